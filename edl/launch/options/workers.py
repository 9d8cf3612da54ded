"""Options about workers and their output."""

from __future__ import annotations

import click

from edl.arithmetic.affinity import MODES
from edl.config import LogLayout, LogPlan
from edl.launch.options.option import Option, Section, Setting
from edl.launch.options.parsing import bytes_from, bytes_or_default, finite_days, names
from edl.launch.settings import NodeSettings, WorkerSettings

TORCH_LAUNCH = "torch.distributed.launch"
"""The dialect of ``python -m torch.distributed.launch``, torchrun's predecessor."""
DIALECTS = ("auto", "edl", "paddle", TORCH_LAUNCH)

WORKERS = (
    Option(
        "--standby",
        setting=Setting(WorkerSettings, "standby"),
        help=("How the next workers are kept warm: `fork`, `spawn` or `none`. See [standby.md](standby.md)."),
    ),
    Option(
        "--preload",
        setting=Setting(WorkerSettings, "preload"),
        written_default="",
        parse=names,
        metavar="MODULE[,…]",
        help=(
            "Modules, separated by commas, to import ahead of the workers, in addition to those found in the script."
        ),
    ),
    Option(
        "--learn-imports",
        setting=Setting(WorkerSettings, "learn"),
        written_default="on",
        choices=("on", "off"),
        parse=lambda _, text: text == "on",
        help=(
            "Import ahead of the next workers what the first ones have imported, see "
            "[standby.md](standby.md#learnt-imports)."
        ),
    ),
    Option(
        "--learn-memory",
        setting=Setting(WorkerSettings, "learn_bytes"),
        parse=bytes_from,
        metavar="BYTES",
        help="Most memory on this node for the imports of `--learn-imports`.",
    ),
    Option(
        "--module",
        others=("-m",),
        flag_only=True,
        help="The script is a module name, as in `python -m`.",
    ),
    Option(
        "--run-path",
        flag_only=True,
        help="The script is a Python file, regardless of `--no-python`.",
    ),
    Option(
        "--virtual-local-rank",
        setting=Setting(WorkerSettings, "virtual_local_rank"),
        flag_only=True,
        help="Each worker sees only one accelerator, and its `LOCAL_RANK` is 0.",
    ),
    Option(
        "--numa-binding",
        written_default="none",
        choices=("none", *MODES),
        help=(
            "Bind each worker to processor cores near its GPU: `node`, `socket`, `exclusive`, `core-complex`. See"
            " [torchrun.md](torchrun.md#devices-and-processor-cores)."
        ),
    ),
    Option(
        "--no-python",
        flag_only=True,
        help="The script is any program. It is always started cold, without a fork server.",
    ),
    Option(
        "--local-addr",
        setting=Setting(NodeSettings, "local_addr"),
        help=(
            "Address at which other nodes reach this one. The launcher listens on it, and `MASTER_ADDR` is this "
            "address if rank 0 is here. Default: this host's address on the route to the store."
        ),
    ),
    Option(
        "--dialect",
        written_default="auto",
        choices=DIALECTS,
        help=(
            "Whose defaults apply and whether `PADDLE_*` is read: `edl`, `paddle`, or `auto` to infer it from the"
            " options and variables: [Paddle's dialect](paddle.md#its-dialect). With `torch.distributed.launch`, "
            "scripts get `--local-rank=N`."
        ),
    ),
    Option(
        "--exit-code",
        written_default="edl",
        choices=("edl", "worker"),
        help=(
            "Exit status of a job that a worker's failure ended: [edl's](exit-codes.md) or the `worker`'s. Default in "
            "Paddle's dialect: `worker`."
        ),
    ),
)
OUTPUT = (
    Option(
        "--log-dir",
        help=(
            "Folder for logs and error files. Default: a new folder in the temporary directory. See "
            "[logs-and-errors.md](logs-and-errors.md)."
        ),
    ),
    Option(
        "--tee",
        others=("-t",),
        written_default="0",
        metavar="0-3|RANK:0-3,…",
        help=(
            "Streams that go to the console and to a file: 0 none, 1 stdout, 2 stderr, 3 both. Or by local rank: "
            "`0:3,1:1`; a local rank that this node does not have is refused."
        ),
    ),
    Option(
        "--redirects",
        others=("-r",),
        written_default="0",
        metavar="0-3|RANK:0-3,…",
        help=("Streams that go to a file only; values as for `--tee`, which takes precedence if both name a stream."),
    ),
    Option(
        "--local-ranks-filter",
        metavar="RANK,…",
        help="Local ranks whose output is shown on the console, such as `0,1`. Default: all.",
    ),
    Option(
        "--duplicate-stdout-filters",
        metavar="TEXT,…",
        help=(
            "Texts, separated by commas (`,,` is a literal comma): with `--tee`, lines that contain one of them "
            "are also written to `filtered_stdout.log`."
        ),
    ),
    Option(
        "--duplicate-stderr-filters",
        metavar="TEXT,…",
        help="The same for stderr.",
    ),
    Option(
        "--logs-specs",
        metavar="NAME",
        help="torchrun's log plug-in. Only `default` is accepted.",
    ),
    Option(
        "--log-prefix",
        metavar="TEMPLATE",
        help=(
            "Prefix of console lines with `--tee`, with `${role_name}`, `${rank}`, `${local_rank}`, "
            "`${hostname}`, `${node}`, `${round}`."
        ),
    ),
    Option(
        "--log-layout",
        written_default="auto",
        choices=("auto", *(layout.value for layout in LogLayout)),
        help=(
            "Layout of files and console: `torchrun`, `paddle`, or `auto`: see [Paddle's "
            "layout](logs-and-errors.md#paddles-layout)."
        ),
    ),
    Option(
        "--log-rounds",
        setting=Setting(LogPlan, "rounds"),
        type=click.IntRange(0),
        metavar="N",
        help=(
            "Rounds of a launch whose files are kept: the first one and the newest; also the number of earlier "
            "launches of this job on this node that are kept. 0: all."
        ),
    ),
    Option(
        "--log-size",
        setting=Setting(LogPlan, "most_bytes"),
        parse=bytes_from,
        metavar="BYTES",
        help=(
            "Size limit for the log files of this job on this node, earlier launches included; the oldest are "
            "deleted first. 0: no limit. See [how much is kept](logs-and-errors.md#how-much-is-kept)."
        ),
    ),
    Option(
        "--log-days",
        setting=Setting(LogPlan, "days"),
        check=finite_days,
        metavar="DAYS",
        help=(
            "Age at which the log files of rounds and earlier launches of this job on this node are deleted, by the "
            "time of the last line. 0: never."
        ),
    ),
    Option(
        "--log-reserve",
        setting=Setting(LogPlan, "reserve"),
        written_default="",
        parse=bytes_or_default,
        metavar="BYTES",
        help=(
            "Free space that logs leave on their disk for store and checkpoints, such as `20G`. Default: 5 % of "
            "the disk, at most 1G. 0: none."
        ),
    ),
    Option(
        "--log-overwrite",
        setting=Setting(LogPlan, "overwrite"),
        metavar="BOOL",
        help=(
            "Overwrite the last launch of this job and node instead of writing beside it. Needs `--node-id`, and "
            "with a private store `--rdzv-id` or `--checkpoint-dir`, because random names differ from launch to launch."
        ),
    ),
)
SECTIONS = (
    Section("Workers", WORKERS),
    Section("Output", OUTPUT),
)
