"""All options and variables of ``paddle.distributed.launch``, and what edl does with each.

Source: PaddlePaddle 3.3, ``launch/context/args_envs.py``, ``launch/plugins``, and the legacy launcher in
``fleet/launch.py`` and ``fleet/elastic/manager.py``. Defaults are Paddle's. Tests compare this table with the installed
parsers, and docs/paddle.md with this table.
"""

from __future__ import annotations

from edl.launch.dropin_table import Fate, Row

HONOURED, EXPLAINED, REFUSED = Fate.HONOURED, Fate.EXPLAINED, Fate.REFUSED

BASE: tuple[Row, ...] = (
    Row(
        *("--master", HONOURED, "--rdzv-endpoint"),
        why="required with more than one node: edl prints no command with it to copy to the other nodes",
        variables=("PADDLE_MASTER",),
    ),
    Row("--rank", HONOURED, "--node-rank", default="-1", variables=("PADDLE_TRAINER_ID", "PADDLE_RANK")),
    Row("--nnodes", HONOURED, "--nnodes", default="1", variables=("PADDLE_NNODES",)),
    Row(
        *("--nproc_per_node", HONOURED, "--nproc-per-node"),
        why="0 is refused; auto, gpu and cpu are accepted as well",
        variables=("PADDLE_NPROC_PER_NODE",),
    ),
    Row("--job_id", HONOURED, "--rdzv-id", default="default", variables=("PADDLE_JOB_ID",)),
    Row("--host", HONOURED, "--local-addr", variables=("POD_IP",), why="POD_IP does not override --local-addr"),
    Row(
        *("--devices", HONOURED, "CUDA_VISIBLE_DEVICES"),
        why="workers see only these devices, and count them from 0",
        aliases=("--gpus", "--npus", "--xpus", "--selected_xpus"),
        variables=("PADDLE_DEVICES",),
    ),
    Row(
        *("--ips", HONOURED, "--nnodes, --rdzv-endpoint, --node-rank"),
        why="the store is at --start_port of the first address; a node whose address is not listed is refused",
        variables=("PADDLE_IPS",),
    ),
    Row(
        *("--start_port", HONOURED, "--rdzv-endpoint"),
        default="6070",
        why="with --ips it is the port of the store, otherwise not used; workers get new free ports in each round",
        variables=("PADDLE_START_PORT",),
    ),
    Row(
        *("--run_mode", HONOURED, "--run-mode"),
        why="rpc is the same as collective, whose workers also get the variables of RPC; ps-heter and unknown names "
        "are refused",
        variables=("PADDLE_RUN_MODE",),
    ),
    Row("--log_dir", HONOURED, "--log-dir", default="log", variables=("PADDLE_LOG_DIR",)),
    Row("--log_overwrite", HONOURED, default="False", variables=("PADDLE_LOG_OVERWRITE",)),
    Row(
        *("--log_level", EXPLAINED),
        default="INFO",
        why="the launcher's own log lines have no levels; all are printed",
        variables=("PADDLE_LOG_LEVEL",),
    ),
    Row(
        *("--sort_ip", EXPLAINED),
        default="False",
        why="nodes keep their order when the world changes, so addresses cannot set it; give --rank on each node",
        variables=("PADDLE_SORT_IP",),
    ),
    Row(
        *("--enable_gpu_log", EXPLAINED),
        default="True",
        why="the launcher does not log GPU utilization; use nvidia-smi",
    ),
    Row("--legacy", EXPLAINED, default="False", why="the options of both of Paddle's launchers are accepted anyway"),
    Row(
        *("--auto_parallel_config", HONOURED, "PADDLE_AUTO_PARALLEL_CONFIG"),
        why="only files with tuner_run_mode run_only are accepted, because edl has no tuner",
        variables=("PADDLE_AUTO_PARALLEL_CONFIG",),
    ),
    Row(
        *("--auto_cluster_config", HONOURED, "PADDLE_AUTO_CLUSTER"),
        default="0",
        why="workers get 1, where Paddle's launcher sets True, which Paddle itself cannot parse",
        variables=("PADDLE_AUTO_CLUSTER",),
    ),
    Row(
        *("--auto_tuner_json", REFUSED),
        why="edl has no auto tuner, which runs one job after another",
        advice="Run it with paddle.distributed.launch, and pass its result to the script",
    ),
)

SERVERS: tuple[Row, ...] = (
    Row(
        *("--servers", HONOURED, "--servers"),
        why="MIN:MAX is accepted as well, and selects edl's own pservers",
        variables=("PADDLE_SERVERS_ENDPOINTS",),
    ),
    Row(
        *("--trainers", HONOURED, "--trainers"),
        why="MIN:MAX is accepted as well; with edl's own pservers the ports are not used",
        aliases=("--workers",),
        variables=("PADDLE_TRAINERS_ENDPOINTS",),
    ),
    Row("--trainer_num", HONOURED, "--trainer-num", aliases=("--worker_num",), variables=("PADDLE_TRAINER_NUM",)),
    Row("--server_num", HONOURED, "--servers-per-node", variables=("PADDLE_SERVER_NUM",)),
    Row(
        *("--gloo_port", HONOURED, "--rdzv-endpoint"),
        default="6767",
        why="with address lists in --servers and --trainers it is the port of the store on the first pserver's host; "
        "gloo does not use it",
        variables=("PADDLE_GLOO_PORT",),
    ),
    Row(
        *("--with_gloo", HONOURED),
        default="1",
        why="trainers get 0 with edl's own pservers, which do not run the script and so cannot serve gloo",
        variables=("PADDLE_WITH_GLOO",),
    ),
)

ELASTIC: tuple[Row, ...] = (
    Row(
        *("--max_restart", HONOURED, "--max-restarts"),
        default="3",
        why="it counts worker failures in the whole job, not changes of one node, and also applies without etcd",
        variables=("PADDLE_MAX_RESTART",),
    ),
    Row(
        *("--elastic_level", HONOURED, "--max-restarts"),
        default="-1",
        why="-1 is --max-restarts=0; with 0 or 1 a failed worker is restarted on its node",
        default_why="without it the job survives worker failures, as --max-restarts says",
        variables=("PADDLE_ELASTIC_LEVEL",),
    ),
    Row(
        *("--elastic_timeout", HONOURED, "--recover-timeout, --join-grace"),
        default="30",
        why="multiplied by 10 with a fixed --nnodes, as in Paddle",
        default_why="without it the first world waits 1 s for more nodes than MIN, and a job 600 s for enough nodes",
        variables=("PADDLE_ELASTIC_TIMEOUT",),
    ),
)

LEGACY: tuple[Row, ...] = (
    Row(
        *("--selected_gpus", HONOURED, "CUDA_VISIBLE_DEVICES"),
        why="the same as --gpus, but ignored on a node without GPUs, as in Paddle",
    ),
    Row("--hosts", EXPLAINED, why="Paddle's launchers ignore it as well; --ips names the nodes"),
    Row(
        *("--backend", HONOURED, "PADDLE_DISTRI_BACKEND"),
        default="auto",
        why="heter is refused",
    ),
    Row("--cluster_topo_path", EXPLAINED, why="it has no effect without --enable_auto_mapping"),
    Row("--rank_mapping_path", EXPLAINED, why="it has no effect without --enable_auto_mapping"),
    Row(
        *("--enable_auto_mapping", REFUSED),
        default="False",
        why="ranks are assigned to the nodes that have joined, not read from a file",
        advice="Drop it, and give --rank on each node to fix their order",
    ),
    Row("--coordinators", REFUSED, why="coordinators of federated learning are not supported", advice="Drop it"),
    Row("--coordinator_num", REFUSED, why="coordinators of federated learning are not supported", advice="Drop it"),
    Row("--heter_workers", REFUSED, why="trainers of several kinds are not supported", advice="Use --trainers"),
    Row("--heter_devices", REFUSED, why="trainers of several kinds are not supported", advice="Drop it"),
    Row("--heter_worker_num", REFUSED, why="trainers of several kinds are not supported", advice="Use --trainer_num"),
    Row(
        *("--http_port", HONOURED, "--http-port"),
        why="it is edl's option of that name, the port of the HTTP interface; gloo needs none",
    ),
    Row(
        *("--elastic_server", HONOURED, "--rdzv-endpoint"),
        why="needs --job_id and --np as well, as in Paddle",
        variables=("PADDLE_ELASTIC_ETCD_SERVICE_HOST", "PADDLE_ELASTIC_ETCD_SERVICE_PORT", "PADDLE_ELASTIC_SERVER"),
    ),
    Row(
        *("--elastic_pre_hook", REFUSED),
        why="edl runs no command before a round",
        advice="Run it from the script before training",
    ),
    Row(
        *("--np", HONOURED, "--nnodes"),
        why="MIN:MAX is accepted as well",
        variables=("PADDLE_ELASTIC_NP",),
    ),
    Row(
        *("--scale", REFUSED),
        default="0",
        why="starting a launcher does not change the size of the job",
        advice="Use edl scale",
        variables=("PADDLE_ELASTIC_SCALE",),
    ),
    Row(
        *("--force", EXPLAINED),
        default="False",
        why="it has no effect without --scale",
        variables=("PADDLE_ELASTIC_FORCE",),
    ),
)

PADDLE_ROWS: tuple[Row, ...] = BASE + SERVERS + ELASTIC + LEGACY

WEAK_VARIABLES = frozenset(
    {
        "PADDLE_ELASTIC_ETCD_SERVICE_HOST",
        "PADDLE_ELASTIC_ETCD_SERVICE_PORT",
        "PADDLE_ELASTIC_SERVER",
        "PADDLE_ELASTIC_NP",
        "PADDLE_ELASTIC_SCALE",
        "PADDLE_ELASTIC_FORCE",
    }
)
"""Variables of the legacy launcher, which the command line overrides. They are used only together, see
``paddle_options``."""

OTHER_VARIABLES: dict[str, str] = {
    "PADDLE_TRAINER_ENDPOINTS": "its first endpoint is `--master` (port 6768 if it has none), its number of hosts "
    "`--nnodes`",
    "DISTRIBUTED_TRAINER_ENDPOINTS": "the same, with higher precedence",
    "PADDLE_LAUNCH_WITH_ARGS": "`1`: lists of endpoints give only the number of nodes; `--ips` gives their addresses",
    "PADDLE_ELASTIC_JOB_ID": "`--job_id`, if the command line has none",
    "PADDLE_ELASTIC_TTL": "`--lease-ttl`, if the command line has none",
    "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "`1` is `--fault-tolerance=recover`, `2` is `elastic`",
    "PADDLE_ENV_LIMIT_LEN": "length from which the list of endpoints is only in the backup file; default 48000",
    "http_proxy": "removed from the workers' environment, who get it as `http_proxy_original`",
    "https_proxy": "the same",
    "PORT_RANGE": "not read: the kernel assigns ports",
    "FLAGS_FIXED_PORT": "not read: each round has new ports",
    "FLAGS_START_PORT": "not read, for the same reason",
    "FLAGS_print_launcher_env": "not read: `envlog.N` in the log folder has each worker's environment",
    "PADDLE_TRAINERS": "not read: `PADDLE_TRAINER_ENDPOINTS` has the same information",
    "PADDLE_PORT": "not read: the endpoints contain their ports",
    "TRAINER_PORTS_NUM": "not read",
}
"""Other variables that Paddle's launchers read, and what edl does with each."""


def row_of(name: str) -> Row:
    """The row of an option, by its name among the launcher's values. Raises ``KeyError``."""
    return _BY_NAME[name]


_BY_NAME = {row.name: row for row in PADDLE_ROWS}
