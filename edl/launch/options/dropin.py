"""Options that only torchrun or paddle.distributed.launch has.

``torchrun_table`` and ``paddle_table`` define what each of them becomes.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from edl.launch.options.learning import RUN_MODES
from edl.launch.options.option import Option, Section
from edl.launch.options.parsing import above_zero

PORT = click.IntRange(1, 65535)


def print_completion(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    """``--print-completion``: print the shell's completion script, and exit."""
    if not shell:
        return
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has these three
    click.echo(kind(context.command, {}, "edl-run", "_EDL_RUN_COMPLETE").source())
    context.exit()


TORCHRUN = (
    Option(
        "--monitor-interval",
        written_default=0.1,
        check=above_zero,
        advice="Or drop it",
        metavar="SECONDS",
        variable=False,
        help="Accepted for compatibility with torchrun; no effect.",
    ),
    Option(
        "--start-method",
        written_default="spawn",
        choices=("spawn", "fork", "forkserver"),
        variable=False,
        help="Accepted for compatibility with torchrun; no effect. See --standby.",
    ),
    Option(
        "--event-log-handler",
        written_default="null",
        metavar="NAME",
        variable=False,
        help="Accepted for compatibility with torchrun; no effect. See edl events.",
    ),
    Option(
        "--use-env",
        flag_only=True,
        variable=False,
        help="With --dialect=torch.distributed.launch: do not pass --local-rank=N to the script. Otherwise always on.",
    ),
    Option(
        "--log-line-prefix-template",
        same_as="--log-prefix",
        metavar="TEMPLATE",
        variable=False,
        help="torchrun's name for --log-prefix.",
    ),
    Option(
        "--print-completion",
        choices=("bash", "zsh", "fish"),
        variable=False,
        callback=print_completion,
        help="Print the completion script for this shell, and exit.",
    ),
)
PADDLE = (
    Option(
        "--master",
        metavar="HOST:PORT|etcd://…",
        variable=False,
        help="Paddle's: address of the job's store.",
    ),
    Option(
        "--rank",
        written_default=-1,
        variable=False,
        help="Paddle's name for --node-rank.",
    ),
    Option(
        "--job-id",
        same_as="--rdzv-id",
        variable=False,
        help="Paddle's name for --rdzv-id.",
    ),
    Option(
        "--devices",
        metavar="LIST",
        variable=False,
        help="Paddle's: devices to use, such as 0,1; one worker each.",
    ),
    Option(
        "--gpus",
        metavar="LIST",
        variable=False,
        help="Paddle's: GPUs to use, such as 0,1; one worker each.",
    ),
    Option(
        "--selected-gpus",
        metavar="LIST",
        variable=False,
        help="Paddle's: GPUs to use, such as 0,1; one worker each.",
    ),
    Option(
        "--npus",
        others=("--selected-npus",),
        metavar="LIST",
        variable=False,
        help="Paddle's: NPUs to use, such as 0,1; one worker each.",
    ),
    Option(
        "--xpus",
        others=("--selected-xpus",),
        metavar="LIST",
        variable=False,
        help="Paddle's: XPUs to use, such as 0,1; one worker each.",
    ),
    Option(
        "--host",
        same_as="--local-addr",
        variable=False,
        help="Paddle's name for --local-addr.",
    ),
    Option(
        "--ips",
        metavar="HOST,…",
        variable=False,
        help="Paddle's: addresses of all nodes, the first one with the store.",
    ),
    Option(
        "--start-port",
        written_default=6070,
        type=PORT,
        variable=False,
        help="With --ips: port of the store.",
    ),
    Option(
        "--max-restart",
        same_as="--max-restarts",
        written_default=3,
        variable=False,
        help="Paddle's name for --max-restarts.",
    ),
    Option(
        "--elastic-level",
        written_default=-1,
        type=click.IntRange(-1, 1),
        variable=False,
        help="Paddle's: -1 means that failed workers are not restarted.",
    ),
    Option(
        "--elastic-timeout",
        written_default=30,
        type=click.IntRange(1),
        variable=False,
        help="Paddle's: sets --recover-timeout, and with a range of nodes also --join-grace.",
    ),
    Option(
        "--auto-parallel-config",
        metavar="FILE",
        variable=False,
        help="Paddle's: passed to the workers.",
    ),
    Option(
        "--auto-cluster-config",
        written_default=False,
        variable=False,
        help="Paddle's: passed to the workers.",
    ),
    Option(
        "--gloo-port",
        written_default=6767,
        type=PORT,
        variable=False,
        help="With lists of addresses in --servers and --trainers: port of the store.",
    ),
    Option(
        "--backend",
        written_default="auto",
        metavar="gloo|nccl|bkcl|auto",
        variable=False,
        help="Paddle's: passed to the workers.",
    ),
    Option(
        "--elastic-server",
        metavar="HOST:PORT",
        variable=False,
        help="Paddle's: address of an existing etcd; needs --job-id and --np.",
    ),
    Option(
        "--np",
        same_as="--nnodes",
        metavar="N|MIN:MAX",
        variable=False,
        help="Paddle's name for --nnodes.",
    ),
    Option(
        "--log-level",
        written_default="INFO",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--sort-ip",
        written_default=False,
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--enable-gpu-log",
        written_default=True,
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--legacy",
        written_default=False,
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--auto-tuner-json",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--with-gloo",
        written_default="1",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--cluster-topo-path",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--rank-mapping-path",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--enable-auto-mapping",
        written_default=False,
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--coordinators",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--coordinator-num",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--heter-workers",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--heter-devices",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--heter-worker-num",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--elastic-pre-hook",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--hosts",
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--scale",
        written_default=0,
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--force",
        written_default=False,
        metavar="TEXT",
        variable=False,
        hidden=True,
        help="",
    ),
    Option(
        "--run_mode",
        written_default="collective",
        choices=RUN_MODES,
        variable=False,
        hidden=True,
        parameter="paddles_run_mode",
        help="",
    ),
    Option(
        "--server_num",
        variable=False,
        hidden=True,
        parameter="paddles_server_num",
        help="",
    ),
    Option(
        "--trainer_num",
        others=("--worker_num",),
        variable=False,
        hidden=True,
        parameter="paddles_trainer_num",
        help="",
    ),
)
SECTIONS = (
    Section("Accepted from torchrun", TORCHRUN, documented=False),
    Section("Accepted from paddle.distributed.launch", PADDLE, documented=False),
)
