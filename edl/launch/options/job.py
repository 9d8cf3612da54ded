"""Options about the size of the job, its name and its store."""

from __future__ import annotations

from edl.config import NodeRange, Replicas
from edl.errors import SettingError
from edl.launch.cluster_env import CLUSTER_ENVS
from edl.launch.options.option import Option, Section, Setting
from edl.launch.options.parsing import between, names
from edl.launch.settings import LaunchSettings, NodeSettings
from edl.wire.origin import ASPECTS

HIGHEST_PORT = 65535
MOST_SLOTS = 4096
"""Limit on the slots of one node, to catch typing mistakes."""


def aspects(option: str, text: str) -> tuple[str, ...]:
    """Parse ``--allow-differences``. Raises ``SettingError`` for an unknown aspect."""
    found = names(option, text)
    for name in found:
        if name not in ASPECTS:
            raise SettingError(option, name, "launchers are not compared in it", f"Possible: {', '.join(ASPECTS)}")
    return found


SIZE_OF_THE_JOB = (
    Option(
        "--nnodes",
        written_default="1:1",
        metavar="N|MIN:MAX",
        help=(
            "Number of nodes in a world: `N`, or `MIN:MAX`. With `MIN:MAX` the job runs with any number in that range."
        ),
    ),
    Option(
        "--nproc-per-node",
        written_default="1",
        metavar="N|auto|gpu|cpu",
        help=(
            "Workers (slots) on this node: a number, `gpu` (one per GPU; an error without any), `cpu` (one per "
            "core it may use), `auto` (`gpu` if there is one, else `cpu`). Nodes may differ. `gpu` also counts AMD, "
            "Ascend and Kunlun devices, and Intel devices named in `ZE_AFFINITY_MASK`."
        ),
    ),
    Option(
        "--spare-slots",
        written_default=0,
        check=between(0, MOST_SLOTS),
        metavar="N",
        help=(
            "Additional slots of this node that stay idle until one replaces a [dropped slot](slots.md). With "
            "`--nproc-per-node=gpu` or `auto` they are taken from the devices that are counted."
        ),
    ),
    Option(
        "--node-rank",
        setting=Setting(NodeSettings, "rank"),
        help=(
            "Position of this node in the world, counted from 0; respected whenever the world is large enough. "
            "-1: nodes get positions in the order they join."
        ),
    ),
    Option(
        "--node-unit",
        setting=Setting(NodeRange, "unit"),
        help="A world's node count is a multiple of this. Surplus nodes wait as spares.",
    ),
    Option(
        "--replica-size",
        setting=Setting(Replicas, "size"),
        help=(
            "Workers that hold one replica of the model together (tensor and pipeline parallelism, one FSDP group). A "
            "world has whole replicas only, and a fault costs one of them."
        ),
    ),
    Option(
        "--node-id",
        help=(
            "Name of this node, unique in the job: 1 to 128 letters, digits, `.`, `_` and `-`. Default: the host "
            "name and a random suffix."
        ),
    ),
)
THE_JOB_AND_ITS_STORE = (
    Option(
        "--rdzv-id",
        help=(
            "Name of the job, the same on every node: up to 128 letters, digits, `.`, `_` and `-`. Default: with "
            "a private store a name derived from `--checkpoint-dir`, or a random one without it; otherwise `default`."
        ),
    ),
    Option(
        "--rdzv-backend",
        metavar="etcd|etcd-embedded",
        help=(
            "Kind of store, see [below](#the-store). Default: `etcd` if the endpoint begins with `etcd://` or "
            "`etcds://`, otherwise `etcd-embedded`."
        ),
    ),
    Option(
        "--rdzv-endpoint",
        metavar="HOST:PORT[,…]",
        help=(
            "Members of the store: `HOST:PORT`, or several separated by commas. The default port is 29400. Put "
            "IPv6 addresses in brackets. Default: a private store of this launcher."
        ),
    ),
    Option(
        "--cluster-env",
        others=("--world",),
        written_default="auto",
        choices=("auto", "none", *CLUSTER_ENVS),
        old_variables=("EDL_WORLD",),
        help=(
            "The cluster environment, whose variables supply `--nnodes`, `--node-rank` and `--rdzv-endpoint` if they"
            " are not given: `mpi`, `slurm`, `volcano`, `kubeflow`, `env`, `none`; `auto` detects the system that "
            "started this launcher. See [cluster-env.md](cluster-env.md)."
        ),
    ),
    Option(
        "--secret-file",
        metavar="FILE|shared",
        help=(
            "The job's secret, the same on every node: a file that only its owner may read, or `shared` for "
            "`.edl/JOB.secret` in a directory that all nodes share, created by the first launcher. `EDL_SECRET` "
            "may hold the secret itself. With a secret, the store and the launchers accept only TLS connections "
            "from holders of it, see [security.md](security.md)."
        ),
    ),
    Option(
        "--rdzv-conf",
        metavar="K=V[,…]",
        help=(
            "Settings of the store, `KEY=VALUE` separated by commas, see [below](#settings-of-the-store). Unknown"
            " keys are reported and ignored."
        ),
    ),
    Option(
        "--allow-differences",
        setting=Setting(LaunchSettings, "allowed"),
        written_default="",
        parse=aspects,
        metavar="NAME[,…]",
        help=(
            "Join a job although this launcher differs from its first one in the listed aspects: `owner`, "
            "`script`, `versions`, separated by commas. See [security.md](security.md#whose-job-it-is)."
        ),
    ),
    Option(
        "--standalone",
        flag_only=True,
        help=(
            "One node with a private store, the same as omitting `--rdzv-endpoint`. An endpoint that is given is "
            "not used."
        ),
    ),
    Option(
        "--master-addr",
        metavar="HOST",
        help=(
            "With more than one node and no `--rdzv-endpoint`: host of the store. See "
            "[torchrun.md](torchrun.md#what-is-different-and-why)."
        ),
    ),
    Option(
        "--master-port",
        written_default=0,
        check=between(0, HIGHEST_PORT),
        metavar="PORT",
        help=("Port of the store, with `--master-addr`, or alone for several nodes on one host. 0: 29500."),
    ),
)
SECTIONS = (
    Section("Size of the job", SIZE_OF_THE_JOB),
    Section("The job and its store", THE_JOB_AND_ITS_STORE),
)
