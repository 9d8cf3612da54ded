"""Options about failures, lost nodes and leaving."""

from __future__ import annotations

from edl.config import JobSpec, SlotRules, Timeouts
from edl.job_records import StragglerRules
from edl.launch.options.option import Option, Section, Setting
from edl.launch.options.parsing import between, hang_timeout
from edl.launch.settings import DenylistSettings, LeaveSettings

MOST_STATUS = 125
"""Highest exit status without a special meaning in a shell."""
NO_DENYLIST = "off"
IN_STORE = "store"

FAULTS = (
    Option(
        "--max-restarts",
        setting=Setting(JobSpec, "max_restarts"),
        help=(
            "Worker failures that the whole job survives. Nodes that join or leave do not count; see [what "
            "counts](fault-tolerance.md#what-counts-against---max-restarts)."
        ),
    ),
    Option(
        "--slot-strikes",
        setting=Setting(SlotRules, "strikes"),
        metavar="N",
        help=(
            "Number of failures of a slot alone after which the [slot is dropped](slots.md) and the node continues "
            "without it. 0: never automatically."
        ),
    ),
    Option(
        "--slot-cooldown",
        setting=Setting(SlotRules, "cooldown_s"),
        metavar="SECONDS",
        help=("Seconds after which an automatically dropped slot is used again. 0: never automatically."),
    ),
    Option(
        "--denylist",
        written_default=NO_DENYLIST,
        metavar="off|store|DIR|URL",
        help=(
            "Where the [denylist](denylist.md) is kept, the list of bad devices and hosts that jobs share: the "
            "job's etcd (`store`), a shared directory, or an object store."
        ),
    ),
    Option(
        "--denylist-for",
        setting=Setting(DenylistSettings, "keep_s"),
        metavar="SECONDS",
        help="Seconds until an entry that this job adds to the denylist expires. 0: never.",
    ),
    Option(
        "--host-id",
        written_default="",
        help=(
            "Name of this host in the denylist, the same in every job. Default: `NODE_NAME` (Kubernetes), "
            "`SLURMD_NODENAME`, or the host name."
        ),
    ),
    Option(
        "--stragglers",
        setting=Setting(StragglerRules, "mode"),
        help=(
            "What to do about a rank that [the others wait for](stragglers.md): `off`, `report` (an alarm), "
            "`exclude` (also drop its slot, if the job can do without it)."
        ),
    ),
    Option(
        "--straggler-windows",
        setting=Setting(StragglerRules, "windows"),
        metavar="N",
        help="Windows of about 5 s in a row in which a rank must be slow to be named, and good to be cleared.",
    ),
    Option(
        "--fault-tolerance",
        setting=Setting(JobSpec, "fault_tolerance"),
        help=(
            "What happens when a node is lost: `recover` (keep the size and wait for a replacement), `shrink` "
            "(continue with fewer, never grow), `elastic` (shrink and grow)."
        ),
    ),
    Option(
        "--recover-timeout",
        setting=Setting(Timeouts, "recover_s"),
        metavar="SECONDS",
        help="Seconds that a job waits for enough nodes before it fails with status 3.",
    ),
    Option(
        "--join-grace",
        setting=Setting(Timeouts, "join_grace_s"),
        metavar="SECONDS",
        help=(
            "Seconds that the first world waits for more nodes than the minimum. Later: seconds that a new node waits"
            " for another one that is still importing its framework, so that both join in one change."
        ),
    ),
    Option(
        "--lease-ttl",
        setting=Setting(Timeouts, "lease_ttl_s"),
        metavar="SECONDS",
        help=(
            "Seconds of silence after which a node counts as dead; from 1 to 3600. The same limit applies to a "
            "frozen worker and to an isolated node. A node that keeps losing its lease although it lives gets up to "
            "8 times as long. An etcd with default settings grants leases of at least about 2 s, an embedded one of "
            "1 s."
        ),
    ),
    Option(
        "--shutdown-timeout",
        setting=Setting(Timeouts, "shutdown_s"),
        metavar="SECONDS",
        help=("Seconds between SIGTERM and SIGKILL wherever workers are stopped. 0 kills at once."),
    ),
    Option(
        "--drain-signals",
        written_default="TERM,USR2",
        metavar="NAME[,…]",
        help=("Signals on which this node drains, see [preemption.md](preemption.md). TERM is always included."),
    ),
    Option(
        "--signals-to-handle",
        setting=Setting(LeaveSettings, "handled"),
        metavar="NAME[,…]",
        help=(
            "Signals that stop this node and are passed to its workers: always the four defaults, plus any others "
            "named. See [torchrun.md](torchrun.md#signals)."
        ),
    ),
    Option(
        "--forward-signals",
        metavar="NAME[,…]|none",
        help=(
            "Signals that are only forwarded to the workers that handle them. Default: USR1, unless this node drains"
            " on it. `none`: no signals."
        ),
    ),
    Option(
        "--drained-exit-code",
        setting=Setting(LeaveSettings, "exit_code"),
        check=between(0, MOST_STATUS),
        metavar="N",
        help=(
            "[Exit status](exit-codes.md#a-node-that-leaves-while-the-job-goes-on) of a launcher that has drained"
            " while the job continues; from 0 to 125."
        ),
    ),
    Option(
        "--preemption-notice",
        metavar="aws|gce|azure[:BASEURL]",
        help=(
            "Poll a cloud's metadata service for preemption notices: `aws`, `gce` or `azure`; `:BASEURL` for another "
            "address."
        ),
    ),
    Option(
        "--rejoin-timeout",
        setting=Setting(Timeouts, "rejoin_s"),
        metavar="SECONDS",
        help=(
            "Seconds that a worker with `edl.run` may take to leave a broken round before it is restarted. See "
            "[state.md](state.md)."
        ),
    ),
    Option(
        "--boundary-timeout",
        setting=Setting(Timeouts, "boundary_s"),
        metavar="SECONDS",
        help=("Seconds that workers may take to reach an agreed step boundary before the round is interrupted."),
    ),
    Option(
        "--hang-timeout",
        setting=Setting(Timeouts, "hang"),
        parse=hang_timeout,
        metavar="auto[:SECONDS]|SECONDS",
        help=(
            "Seconds without progress after which all stacks are written and the round is restarted; 0: never. `auto`: "
            "the limit is [learnt](hangs.md) from the job's own steps and never below 300 s, or `SECONDS`; what looks "
            "like a hang is reported, and the round restarted only if no worker of the job shows a sign of life."
        ),
    ),
    Option(
        "--restart-pause",
        setting=Setting(Timeouts, "restart_s"),
        metavar="SECONDS",
        help=(
            "Longest pause in seconds before workers that keep failing within 5 s are started again: none the "
            "first time, 0.5 s the second, doubling after that. Trainers of parameter servers never pause. 0: "
            "never pause."
        ),
    ),
    Option(
        "--spawn-timeout",
        setting=Setting(Timeouts, "spawn_s"),
        metavar="SECONDS",
        help=(
            "Seconds that the fork server of a node may take to answer. After that it is killed with its workers "
            "and replaced; no restart is charged."
        ),
    ),
    Option(
        "--warming-timeout",
        setting=Setting(Timeouts, "warming_s"),
        metavar="SECONDS",
        help=(
            "Seconds that other nodes wait for an attached node that is still importing its framework or starting"
            " workers ahead of a world."
        ),
    ),
    Option(
        "--loading-timeout",
        setting=Setting(Timeouts, "loading_s"),
        metavar="SECONDS",
        help=(
            "Seconds that a world waits for the node that reads the state from the checkpoint directory. After "
            "that another node is asked."
        ),
    ),
)
SECTIONS = (Section("Faults", FAULTS),)
