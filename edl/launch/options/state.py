"""Options about checkpoints, data, readers, and the comparison of states."""

from __future__ import annotations

from edl.config import VerifyRules
from edl.history.parts import LEAST_BYTES
from edl.launch.naming import checkpoint_folder
from edl.launch.options.option import Option, Section, Setting
from edl.launch.options.parsing import at_least, between, bytes_from, finite_seconds
from edl.launch.settings import HistorySettings, NodeSettings, ReaderPool, StateSettings, SyncSettings

AUTO = "auto"
"""Default of ``--history-dir``."""

SLOWEST_COPY = 2 << 20
"""Lower bound of ``--copy-rate`` in bytes per second: slower copies are cancelled."""
MOST_READERS = 1024
"""Limit on the reader processes of one launcher."""


def copies_in_time(rate: int) -> str:
    """Check ``--copy-rate``; returns what is wrong, or an empty string."""
    too_slow = 0 < rate < SLOWEST_COPY
    return "must be at least 2M, or 0 for no limit, because slower copies are cancelled" if too_slow else ""


def enough_history(most_bytes: int) -> str:
    """Check ``--history-size``; returns what is wrong, or an empty string."""
    return "must be at least 1M, or 0 for no limit" if 0 < most_bytes < LEAST_BYTES else ""


def folder(option: str, text: str) -> str:
    """Parse ``--checkpoint-dir``: a path becomes absolute. Raises ``SettingError``."""
    return checkpoint_folder(text, option)


STATE = (
    Option(
        "--checkpoint-dir",
        setting=Setting(StateSettings, "checkpoint_dir"),
        parse=folder,
        metavar="PATH|URL",
        help=(
            "Where `state.save()` writes: a path that every node sees, or an fsspec URL such as "
            "`s3://bucket/run7`. See [checkpoints.md](checkpoints.md)."
        ),
    ),
    Option(
        "--checkpoint-keep",
        setting=Setting(StateSettings, "keep_last"),
        check=at_least(2, "the newest one may turn out to be damaged"),
        help="Number of newest checkpoints to keep, at least 2.",
    ),
    Option(
        "--checkpoint-keep-every",
        setting=Setting(StateSettings, "keep_every"),
        check=at_least(0),
        metavar="N",
        help=("Checkpoints whose commit number is a multiple of this are kept permanently. 0: none."),
    ),
    Option(
        "--adopt-checkpoint",
        setting=Setting(StateSettings, "adopt"),
        flag_only=True,
        help=("Start from the checkpoints of a job with another `--rdzv-id`, and take over its checkpoint directory."),
    ),
    Option(
        "--state-memory",
        setting=Setting(StateSettings, "memory_bytes"),
        parse=bytes_from,
        metavar="BYTES",
        help=(
            "Memory limit of this node for commits and for copies of other nodes' commits, such as `8G`. 0: half "
            "of what is free at the start."
        ),
    ),
    Option(
        "--save-timeout",
        setting=Setting(StateSettings, "save_timeout_s"),
        check=finite_seconds,
        metavar="SECONDS",
        help=(
            "Seconds that the end of the job or of this launcher, or the next world, waits for [saved "
            "commits](checkpoints.md#what-is-written-and-when) to be written."
        ),
    ),
    Option(
        "--copies",
        setting=Setting(StateSettings, "copying"),
        help=(
            "When a commit is copied to another node: `auto` (if only one node has it), `always`, `never`; see "
            "[Memory](checkpoints.md#memory)."
        ),
    ),
    Option(
        "--copy-rate",
        setting=Setting(StateSettings, "copy_rate"),
        parse=bytes_from,
        check=copies_in_time,
        metavar="BYTES",
        help=("Limit on the bytes per second that this node sends for copies, such as `200M`. 0: no limit."),
    ),
    Option(
        "--history-dir",
        written_default=AUTO,
        metavar="DIR",
        help=(
            "Directory in which the Master writes the [history of the job](history.md), which `edl history` shows also "
            "after the end. `auto`: `.edl-history` in `--checkpoint-dir` if that is a path and in no `--sync-dir`, "
            "else none. Empty: none. Shared by the nodes, or one on each."
        ),
    ),
    Option(
        "--history-size",
        setting=Setting(HistorySettings, "most_bytes"),
        parse=bytes_from,
        check=enough_history,
        metavar="BYTES",
        help="Size limit for this job's files in the history directory; the oldest are deleted first. 0: no limit.",
    ),
    Option(
        "--sync-dir",
        metavar="DIR",
        repeated=True,
        help=(
            "Keep this directory of the script [alike on all nodes](sync-dir.md), without a shared file system. "
            "Relative to where the launcher runs. May be given several times; the same on every node. In the variable, "
            "separate directories with spaces."
        ),
    ),
    Option(
        "--sync-timeout",
        setting=Setting(SyncSettings, "timeout_s"),
        check=finite_seconds,
        metavar="SECONDS",
        help=(
            "Seconds without progress after which a node no longer waits for the newest files of `--sync-dir`: its "
            "workers fail instead of starting with older ones."
        ),
    ),
    Option(
        "--data",
        metavar="NAME=PATTERN[,…][;K=V…]",
        repeated=True,
        help=(
            "Files of a [data set](data.md) that the workers find by name: "
            "`NAME=PATTERN[,PATTERN…][;KEY=VALUE…]`. May be given several times; the same on every node. In the "
            "variable, separate sets with spaces."
        ),
    ),
    Option(
        "--role",
        written_default="default",
        metavar="NAME",
        help=(
            "`reader`: this launcher runs no script and is not a node; it only provides [remote "
            "readers](remote-readers.md). `pserver`: the same with [parameter servers](parameter-servers.md). "
            "`trainer`, in a job with parameter servers: a node that runs none itself. Any other name is passed "
            "to the workers as [`ROLE_NAME`](torchrun.md#roles)."
        ),
    ),
    Option(
        "--readers",
        setting=Setting(ReaderPool, "count"),
        check=between(0, MOST_READERS),
        help=(
            "Number of remote readers of this launcher, which read data for all workers of the job. With "
            "`--role=reader` at least 1."
        ),
    ),
    Option(
        "--reader-functions",
        metavar="MODULE:FUNCTION[,…]",
        help=(
            "`package.module:function`, separated by commas: functions that trainers may have "
            "[readers](remote-readers.md) call. Functions named in `--data` are included."
        ),
    ),
    Option(
        "--reader-capacity",
        setting=Setting(ReaderPool, "capacity"),
        check=at_least(1),
        metavar="N",
        help="Number of streams that each reader serves at once.",
    ),
    Option(
        "--rack",
        setting=Setting(NodeSettings, "rack"),
        help="Rack of this node, any name. Copies of its commits prefer a node in another rack; a model replica of "
        "several nodes gets nodes of one rack if it can.",
    ),
)
COMPARING_THE_STATE = (
    Option(
        "--verify-state",
        setting=Setting(VerifyRules, "every"),
        metavar="N",
        help=("Ranks compare their state at every N-th commit and at every `save()`. 0: after restores only."),
    ),
    Option(
        "--on-state-mismatch",
        setting=Setting(VerifyRules, "on_mismatch"),
        help=(
            "When parameters or optimizer values differ between ranks: `stop` the job, `rollback` to the last "
            "compared commit, or `sync` (continue with the majority's values)."
        ),
    ),
)
SECTIONS = (
    Section("State", STATE),
    Section(
        "Comparing the state",
        COMPARING_THE_STATE,
        ("Must be the same on every node. See [state.md](state.md#do-all-ranks-hold-the-same)."),
    ),
)
