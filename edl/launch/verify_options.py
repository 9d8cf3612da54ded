"""The launcher's options about comparing the state that ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from edl.config import OnMismatch, VerifyRules

VERIFY_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--verify-state",
        type=int,
        default=0,
        metavar="N",
        help="Ranks compare their state at each N-th commit. Default: 0, after restores only.",
    ),
    click.option(
        "--on-state-mismatch",
        type=click.Choice([action.value for action in OnMismatch]),
        default=OnMismatch.STOP.value,
        help="When parameters differ between ranks: stop, rollback, or sync. Default: stop.",
    ),
]


def verify_from(options: Mapping[str, Any]) -> VerifyRules:
    """What all launchers of a job must agree on. Raises ``SettingError``."""
    return VerifyRules(options["verify_state"], OnMismatch(options["on_state_mismatch"]))
