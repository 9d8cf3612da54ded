"""Options about parameter servers, batch and learning rate."""

from __future__ import annotations

from edl.config import HyperPolicy
from edl.job_records import Training
from edl.launch.options.option import Option, Section, Setting
from edl.launch.options.parsing import bytes_from, count_or_none, seconds, whole
from edl.launch.settings import ServerSettings

RUN_MODES = ("collective", "ps", "ps-heter", "rpc")

PARAMETER_SERVERS = (
    Option(
        "--run-mode",
        written_default="collective",
        choices=RUN_MODES,
        help=(
            "`rpc`: the same as `collective`, for [Paddle](paddle.md#what-is-different). `ps`: independent "
            "trainers with parameter servers. `--servers`, `--trainers`, `--servers-per-node`, `--trainer-num`, "
            "`--server-nnodes`, `--role=trainer` and `--role=pserver` imply `ps`."
        ),
    ),
    Option(
        "--servers",
        metavar="MIN:MAX|HOST:PORT,…",
        help=(
            "Minimum and maximum number of pservers of the whole job: `N` or `MIN:MAX`. Default: 1 to 64. Or the "
            "addresses of all of them, `HOST:PORT,HOST:PORT…`: those on this host run here."
        ),
    ),
    Option(
        "--trainers",
        others=("--workers",),
        metavar="MIN:MAX|HOST:PORT,…",
        help=(
            "Minimum and maximum number of trainers of the whole job, `N` or `MIN:MAX`, both multiples of "
            "`--nproc-per-node`; replaces `--nnodes`. Or the addresses of all of them: one trainer runs here for each "
            "address of this host."
        ),
    ),
    Option(
        "--server-nnodes",
        metavar="N|MIN:MAX",
        help=(
            "Minimum and maximum number of nodes with pservers; replaces `--servers`, which becomes this times "
            "`--servers-per-node`."
        ),
    ),
    Option(
        "--servers-per-node",
        others=("--server-num",),
        metavar="N",
        help="Pservers of this launcher. Default: 1 in a job with parameter servers.",
    ),
    Option(
        "--trainer-num",
        others=("--worker-num",),
        metavar="N",
        help="Trainers on this node, another name for `--nproc-per-node`.",
    ),
    Option(
        "--pservers",
        written_default="auto",
        choices=("auto", "edl", "script"),
        help=(
            "`edl`: edl's own pservers. `script`: the pservers run the script, [as under Paddle's "
            "launcher](paddle.md#parameter-servers-that-run-the-script). `auto`: `script` for a command line in "
            "Paddle's dialect whose script does not use edl's pservers."
        ),
    ),
    Option(
        "--pserver-memory",
        setting=Setting(ServerSettings, "memory_bytes"),
        parse=bytes_from,
        metavar="BYTES",
        help=(
            "Memory limit for the rows of each pserver here, such as `8G`. 0: half of what is free at the start, "
            "divided among them."
        ),
    ),
    Option(
        "--ps-mode",
        setting=Setting(Training, "mode"),
        help="How trainers synchronise: `sync`, `async` or `geo`.",
    ),
    Option(
        "--staleness",
        setting=Setting(Training, "staleness"),
        parse=whole,
        metavar="STEPS",
        help=("With `async`: steps that a trainer may be ahead of the slowest one. 0: unlimited."),
    ),
    Option(
        "--staleness-lr",
        setting=Setting(Training, "staleness_lr"),
        flag_only=True,
        help=("With `async`: divide the learning rate of a push by 1 + (pushes of others since its pull) / trainers."),
    ),
    Option(
        "--geo-steps",
        setting=Setting(Training, "geo_steps"),
        parse=whole,
        metavar="N",
        help="With `geo`: steps on local copies between two exchanges of differences.",
    ),
    Option(
        "--replication",
        setting=Setting(Training, "replication"),
        help=("What a push waits for: `sync` (every replica has it), `async` (replicas follow), `none` (no replicas)."),
    ),
    Option(
        "--replication-lag",
        setting=Setting(Training, "lag_s"),
        parse=seconds,
        metavar="SECONDS",
        help=("With `--replication=async`: seconds that a replica may be behind before pushes wait for it."),
    ),
    Option(
        "--ps-save-every",
        setting=Setting(Training, "save_every_s"),
        parse=seconds,
        metavar="SECONDS",
        help="Seconds between two checkpoints of pservers and trainers. 0: only on request.",
    ),
)
BATCH_AND_LEARNING_RATE = (
    Option(
        "--global-batch",
        setting=Setting(HyperPolicy, "global_batch"),
        written_default="",
        parse=count_or_none(1),
        metavar="N",
        help="Samples per step over all workers, constant at any size of the world.",
    ),
    Option(
        "--local-batch",
        setting=Setting(HyperPolicy, "local_batch"),
        written_default="",
        parse=count_or_none(1),
        metavar="N",
        help=("Most samples that a worker processes at once; without `--global-batch`, the samples of its step."),
    ),
    Option(
        "--lr-rule",
        setting=Setting(HyperPolicy, "rule"),
        help=("How the learning rate follows the size of the world: `none`, `linear`, `sqrt`, `adascale`, `user`."),
    ),
    Option(
        "--lr-warmup",
        setting=Setting(HyperPolicy, "warmup"),
        parse=count_or_none(0),
        metavar="STEPS",
        help="Number of commits over which a changed LR factor is phased in.",
    ),
    Option(
        "--lr-reference",
        setting=Setting(HyperPolicy, "reference"),
        written_default="",
        parse=count_or_none(1),
        metavar="N",
        help=(
            "The size for which the script's own LR was chosen: samples with `--global-batch`, otherwise workers. "
            "Default: the size of the job's first world."
        ),
    ),
    Option(
        "--logical-ranks",
        setting=Setting(HyperPolicy, "logical_ranks"),
        written_default="",
        parse=count_or_none(1),
        metavar="K",
        help=(
            "Fixed number of logical ranks that are distributed over the workers; at least the largest possible "
            "number of workers."
        ),
    ),
)
SECTIONS = (
    Section(
        "Parameter servers",
        PARAMETER_SERVERS,
        (
            "See [parameter-servers.md](parameter-servers.md). Options that are not about one node must be the "
            "same on every node."
        ),
    ),
    Section(
        "Batch and learning rate",
        BATCH_AND_LEARNING_RATE,
        "Must be the same on every node. See [hyperparameters.md](hyperparameters.md).",
    ),
)
