"""Options about schedulers, autoscaling and HTTP."""

from __future__ import annotations

from edl.config import AutoscaleRules, JobSpec
from edl.launch.options.option import Option, Section, Setting

WHERE_NODES_COME_FROM = (
    Option(
        "--scheduler",
        metavar="KIND",
        help=(
            "The scheduler that adds and removes nodes, such as `statefulset/train`, `slurm`, `process`; see "
            "[schedulers.md](schedulers.md). Default: none; launchers are started from outside."
        ),
    ),
    Option(
        "--scheduler-conf",
        metavar="K=V[,…]",
        help="Settings of the scheduler, `KEY=VALUE[,…]`.",
    ),
    Option(
        "--scale-owner",
        metavar="master|external",
        help=("Who decides the number of nodes: `master` or `external`. Default: the usual owner for that scheduler."),
    ),
    Option(
        "--scale-cooldown",
        setting=Setting(JobSpec, "cooldown_s"),
        metavar="SECONDS",
        help="Seconds between one resize and the next.",
    ),
    Option(
        "--autoscale",
        written_default="off",
        choices=("off", "throughput"),
        help="`throughput`: choose the number of nodes by measured throughput, see [autoscale.md](autoscale.md).",
    ),
    Option(
        "--autoscale-efficiency",
        setting=Setting(AutoscaleRules, "efficiency"),
        metavar="SHARE",
        help="Throughput that an additional node must contribute, as a fraction of what an average node contributes.",
    ),
    Option(
        "--autoscale-cooldown",
        setting=Setting(AutoscaleRules, "cooldown_s"),
        metavar="SECONDS",
        help="Seconds between two changes of size by the autoscale policy.",
    ),
    Option(
        "--node-index",
        metavar="N",
        help=(
            "The scheduler's index of this node; nodes with the highest index leave first. Default: "
            "`JOB_COMPLETION_INDEX`, `VC_TASK_INDEX`, `SLURM_ARRAY_TASK_ID`, or the ordinal of a StatefulSet's pod."
        ),
    ),
)
HTTP = (
    Option(
        "--http-port",
        metavar="PORT",
        help="Serve HTTP on this port; 0 for any free one. Default: no HTTP.",
    ),
    Option(
        "--http-host",
        metavar="HOST",
        help="Address to listen on. Default: the node's address.",
    ),
    Option(
        "--http-token-file",
        metavar="FILE",
        help=(
            "File with tokens for full access, one per line. Default: the job's own token. See "
            "[tokens](scale.md#tokens-and-certificates)."
        ),
    ),
    Option(
        "--http-read-token-file",
        metavar="FILE",
        help="File with tokens for read-only access, one per line.",
    ),
    Option(
        "--http-cert",
        metavar="FILE",
        help="Certificate for TLS, in PEM format.",
    ),
    Option(
        "--http-key",
        metavar="FILE",
        help="Key of the certificate, not encrypted.",
    ),
    Option(
        "--http-client-ca",
        metavar="FILE",
        help="Require client certificates signed by this CA.",
    ),
)
SECTIONS = (
    Section("Where nodes come from", WHERE_NODES_COME_FROM),
    Section(
        "HTTP",
        HTTP,
        (
            "These options configure [the HTTP interface](scale.md#over-http). Give them to every launcher, because "
            "any of them may become the Master."
        ),
    ),
)
