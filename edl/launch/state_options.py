"""The launcher's options about state: where commits are saved, how many checkpoints stay, memory and copies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from edl.checkpoint.memory.copy_policy import Copying
from edl.errors import SettingError
from edl.launch.naming import checkpoint_folder
from edl.launch.settings import StateSettings

SLOWEST_COPY = 2 << 20
"""A slower copy to another node would be given up as one that creeps."""

STATE_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--checkpoint-dir", default="", metavar="PATH|URL", help="Where commits of edl.State are saved."),
    click.option("--checkpoint-keep", type=int, default=3, help="Checkpoints kept, at least 2. Default: 3."),
    click.option("--checkpoint-keep-every", type=int, default=0, metavar="N", help="Keep each N-th commit for good."),
    click.option("--adopt-checkpoint", is_flag=True, help="Begin from another job's checkpoints."),
    click.option(
        "--save-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="How long the end of the job waits for its saves. Default: 600.",
    ),
    click.option("--state-memory", default="0", metavar="BYTES", help="For commits, such as 8G. Default: half of it."),
    click.option(
        "--copies",
        type=click.Choice([one.value for one in Copying]),
        default=Copying.AUTO.value,
        help="Copies of commits on another node: auto (where no other node has the same), always, never.",
    ),
    click.option(
        "--copy-rate", default="0", metavar="BYTES", help="Most bytes a second for them, such as 200M. 0: no limit."
    ),
]


def state_from(options: Mapping[str, Any]) -> StateSettings:
    """Raises ``SettingError``."""
    keep, every, limit_s = options["checkpoint_keep"], options["checkpoint_keep_every"], options["save_timeout"]
    if keep < 2:
        raise SettingError("--checkpoint-keep", keep, "must be at least 2: the newest one may turn out to be damaged")
    if every < 0:
        raise SettingError("--checkpoint-keep-every", every, "must be 0 or more")
    if not 0 <= limit_s < math.inf:
        raise SettingError("--save-timeout", f"{limit_s:g}", "must be a number of seconds, 0 or more")
    rate = bytes_from("--copy-rate", options["copy_rate"])
    if 0 < rate < SLOWEST_COPY:
        why = "must be at least 2M, or 0 for no limit: a copy that creeps is given up"
        raise SettingError("--copy-rate", options["copy_rate"], why)
    return StateSettings(
        bytes_from("--state-memory", options["state_memory"]),
        checkpoint_folder(options["checkpoint_dir"]),
        keep,
        every,
        options["adopt_checkpoint"],
        save_timeout_s=limit_s,
        copying=Copying(options["copies"]),
        copy_rate=rate,
    )


def bytes_from(option: str, text: str) -> int:
    """``512M``, ``8G``, ``1.5T`` or a plain number. Raises ``SettingError``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)i?[bB]?", text.strip())
    if match is None:
        raise SettingError(option, text, "not an amount of memory", "Write bytes, or 512M, 8G, 1.5T")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
