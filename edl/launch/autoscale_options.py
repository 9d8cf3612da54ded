"""The launcher's options for a job that sizes itself by what it measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from edl.config import AutoscaleRules, NodeRange
from edl.errors import SettingError

AUTOSCALE_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--autoscale",
        type=click.Choice(["off", "throughput"]),
        default="off",
        help="Have as many nodes train as are worth it: see docs/autoscale.md. Default: off.",
    ),
    click.option(
        "--autoscale-efficiency",
        type=float,
        default=0.6,
        metavar="SHARE",
        help="What a further node must bring, as a share of an average one. Default: 0.6.",
    ),
    click.option(
        "--autoscale-cooldown", type=float, default=60.0, metavar="SECONDS", help="Between two changes. Default: 60."
    ),
]


def autoscale_from(options: Mapping[str, Any], nodes: NodeRange) -> AutoscaleRules:
    """What the options say. Raises ``SettingError``."""
    enabled = options["autoscale"] != "off"
    rules = AutoscaleRules(enabled, options["autoscale_efficiency"], options["autoscale_cooldown"])
    if enabled and nodes.lowest == nodes.highest:
        raise SettingError(
            "--autoscale",
            options["autoscale"],
            f"--nnodes={nodes} leaves no choice of a size",
            "Give a range such as --nnodes=1:8, or drop one of the two",
        )
    return rules
