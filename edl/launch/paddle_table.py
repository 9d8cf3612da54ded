"""All options and variables of ``paddle.distributed.launch``, and what edl does with each.

From PaddlePaddle 3.3: ``launch/context/args_envs.py``, ``launch/plugins``, and the legacy launcher in
``fleet/launch.py`` and ``fleet/elastic/manager.py``. The defaults are Paddle's. Tests compare this table with the
installed parsers, and docs/paddle.md with this table.
"""

from __future__ import annotations

from edl.launch.dropin_table import Fate, Row

HONOURED, EXPLAINED, REFUSED = Fate.HONOURED, Fate.EXPLAINED, Fate.REFUSED

BASE: tuple[Row, ...] = (
    Row(
        *("--master", HONOURED, "--rdzv-endpoint"),
        why="missing, with more than one node, it is refused: there is no command to copy from one node to the others",
        variables=("PADDLE_MASTER",),
    ),
    Row("--rank", HONOURED, "--node-rank", default="-1", variables=("PADDLE_TRAINER_ID", "PADDLE_RANK")),
    Row("--nnodes", HONOURED, "--nnodes", default="1", variables=("PADDLE_NNODES",)),
    Row(
        *("--nproc_per_node", HONOURED, "--nproc-per-node"),
        why="0 is refused; auto, gpu and cpu are understood as well",
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
        why="the store is at the first one's --start_port; a node that is none of them is refused",
        variables=("PADDLE_IPS",),
    ),
    Row(
        *("--start_port", HONOURED, "--rdzv-endpoint"),
        default="6070",
        why="with --ips it is the port of the store, else not used; workers get free ports, other ones in each round",
        variables=("PADDLE_START_PORT",),
    ),
    Row(
        *("--run_mode", HONOURED, "--run-mode"),
        why="rpc is collective, whose workers have the variables of RPC, too; ps-heter and unknown names are refused",
        variables=("PADDLE_RUN_MODE",),
    ),
    Row("--log_dir", HONOURED, "--log-dir", default="log", variables=("PADDLE_LOG_DIR",)),
    Row("--log_overwrite", HONOURED, default="False", variables=("PADDLE_LOG_OVERWRITE",)),
    Row(
        *("--log_level", EXPLAINED),
        default="INFO",
        why="the launcher's own lines have no levels, and all are printed",
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
        why="the launcher does not write down how busy GPUs are; nvidia-smi does",
    ),
    Row("--legacy", EXPLAINED, default="False", why="options of both of Paddle's launchers are understood at once"),
    Row(
        *("--auto_parallel_config", HONOURED, "PADDLE_AUTO_PARALLEL_CONFIG"),
        why="only files whose tuner_run_mode is run_only, because edl has no tuner",
        variables=("PADDLE_AUTO_PARALLEL_CONFIG",),
    ),
    Row(
        *("--auto_cluster_config", HONOURED, "PADDLE_AUTO_CLUSTER"),
        default="0",
        why="workers find 1 where Paddle's launcher writes True, which Paddle itself cannot read",
        variables=("PADDLE_AUTO_CLUSTER",),
    ),
    Row(
        *("--auto_tuner_json", REFUSED),
        why="the auto tuner starts one job after another, which is not this launcher's business",
        advice="Run it under paddle.distributed.launch, and give what it has found to the script",
    ),
)

SERVERS: tuple[Row, ...] = (
    Row(
        *("--servers", HONOURED, "--servers"),
        why="MIN:MAX is understood as well, and means edl's own pservers",
        variables=("PADDLE_SERVERS_ENDPOINTS",),
    ),
    Row(
        *("--trainers", HONOURED, "--trainers"),
        why="MIN:MAX is understood as well; beside edl's own pservers the ports are not used",
        aliases=("--workers",),
        variables=("PADDLE_TRAINERS_ENDPOINTS",),
    ),
    Row("--trainer_num", HONOURED, "--trainer-num", aliases=("--worker_num",), variables=("PADDLE_TRAINER_NUM",)),
    Row("--server_num", HONOURED, "--servers-per-node", variables=("PADDLE_SERVER_NUM",)),
    Row(
        *("--gloo_port", HONOURED, "--rdzv-endpoint"),
        default="6767",
        why="with lists of --servers and --trainers the store is at this port of the first pserver's host; gloo is not "
        "used there",
        variables=("PADDLE_GLOO_PORT",),
    ),
    Row(
        *("--with_gloo", HONOURED),
        default="1",
        why="trainers find 0 beside edl's own pservers: those do not run the script, so none would serve gloo",
        variables=("PADDLE_WITH_GLOO",),
    ),
)

ELASTIC: tuple[Row, ...] = (
    Row(
        *("--max_restart", HONOURED, "--max-restarts"),
        default="3",
        why="it counts failures of workers in the whole job, not changes of one node, and it counts without etcd, too",
        variables=("PADDLE_MAX_RESTART",),
    ),
    Row(
        *("--elastic_level", HONOURED, "--max-restarts"),
        default="-1",
        why="-1 is --max-restarts=0; with 0 a node whose worker fails stays and starts it again; 1 is the same",
        default_why="without it the job survives failures, which is what edl is for",
        variables=("PADDLE_ELASTIC_LEVEL",),
    ),
    Row(
        *("--elastic_timeout", HONOURED, "--recover-timeout, --join-grace"),
        default="30",
        why="times 10 with a fixed --nnodes, as there",
        default_why="without it the first world waits 1 s for nodes beyond MIN, and a job 600 s for enough of them",
        variables=("PADDLE_ELASTIC_TIMEOUT",),
    ),
)

LEGACY: tuple[Row, ...] = (
    Row(
        *("--selected_gpus", HONOURED, "CUDA_VISIBLE_DEVICES"),
        why="as --gpus, but on a node without GPUs it is not used, as there",
    ),
    Row("--hosts", EXPLAINED, why="Paddle's launchers pass over it; --ips names the nodes"),
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
        why="ranks follow the nodes that there are, not a file",
        advice="Drop it, and give --rank on each node to fix their order",
    ),
    Row("--coordinators", REFUSED, why="coordinators of federated learning are not supported", advice="Drop it"),
    Row("--coordinator_num", REFUSED, why="coordinators of federated learning are not supported", advice="Drop it"),
    Row("--heter_workers", REFUSED, why="trainers of several kinds are not supported", advice="Use --trainers"),
    Row("--heter_devices", REFUSED, why="trainers of several kinds are not supported", advice="Drop it"),
    Row("--heter_worker_num", REFUSED, why="trainers of several kinds are not supported", advice="Use --trainer_num"),
    Row(
        *("--http_port", HONOURED, "--http-port"),
        why="it is edl's own option of that name: the port for status and size; gloo needs none",
    ),
    Row(
        *("--elastic_server", HONOURED, "--rdzv-endpoint"),
        why="needs --job_id and --np as well, as there",
        variables=("PADDLE_ELASTIC_ETCD_SERVICE_HOST", "PADDLE_ELASTIC_ETCD_SERVICE_PORT", "PADDLE_ELASTIC_SERVER"),
    ),
    Row(
        *("--elastic_pre_hook", REFUSED),
        why="no command is run before a round",
        advice="Have the script run it before it trains",
    ),
    Row(
        *("--np", HONOURED, "--nnodes"),
        why="MIN:MAX is understood as well",
        variables=("PADDLE_ELASTIC_NP",),
    ),
    Row(
        *("--scale", REFUSED),
        default="0",
        why="a launcher that starts does not change the size of the job",
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
"""Variables of the legacy launcher, which its command line overrides. They count only together: see
``paddle_options``."""

OTHER_VARIABLES: dict[str, str] = {
    "PADDLE_TRAINER_ENDPOINTS": "the first one is `--master` (port 6768 if it has none), their hosts are `--nnodes`",
    "DISTRIBUTED_TRAINER_ENDPOINTS": "the same, and stronger",
    "PADDLE_LAUNCH_WITH_ARGS": "`1`: lists of endpoints only count nodes; `--ips` says where they are",
    "PADDLE_ELASTIC_JOB_ID": "`--job_id`, if the command line has none",
    "PADDLE_ELASTIC_TTL": "`--lease-ttl`, if the command line has none",
    "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "`1` is `--fault-tolerance=recover`, `2` is `elastic`",
    "PADDLE_ENV_LIMIT_LEN": "length from which the list of endpoints is in the backup file only; 48000",
    "http_proxy": "taken from workers, who find it as `http_proxy_original`",
    "https_proxy": "the same",
    "PORT_RANGE": "not read: ports are given by the kernel",
    "FLAGS_FIXED_PORT": "not read: each round has other ports",
    "FLAGS_START_PORT": "not read, for the same reason",
    "FLAGS_print_launcher_env": "not read: `envlog.N` in the log folder has each worker's environment",
    "PADDLE_TRAINERS": "not read: `PADDLE_TRAINER_ENDPOINTS` says the same",
    "PADDLE_PORT": "not read: the endpoints have their ports",
    "TRAINER_PORTS_NUM": "not read",
}
"""Other variables that Paddle's launchers read, and what edl does with each."""


def row_of(name: str) -> Row:
    """The row of an option, by its name among the launcher's values. Raises ``KeyError``."""
    return _BY_NAME[name]


_BY_NAME = {row.name: row for row in PADDLE_ROWS}
