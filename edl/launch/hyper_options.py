"""The launcher's options for batch and learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from edl.config import HyperPolicy, LrRule, NodeRange
from edl.errors import SettingError

HYPER_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--global-batch", default="", metavar="N", help="Samples of a step, whatever the size of the world."),
    click.option("--local-batch", default="", metavar="N", help="Most samples that a worker takes at once."),
    click.option(
        "--lr-rule",
        type=click.Choice([rule.value for rule in LrRule]),
        default=LrRule.NONE.value,
        help="How the learning rate follows the size. Default: none.",
    ),
    click.option("--lr-warmup", default="0", metavar="STEPS", help="Over how many a changed LR comes in. Default: 0."),
    click.option("--lr-reference", default="", metavar="N", help="Size that the script's own LR is meant for."),
    click.option("--logical-ranks", default="", metavar="K", help="Fixed number of ranks that live on the workers."),
]


def policy_from(options: Mapping[str, Any], nodes: NodeRange, slots: int) -> HyperPolicy:
    """What the options say, for nodes with so many workers each. Raises ``SettingError``."""
    policy = HyperPolicy(
        global_batch=_number(options, "global_batch"),
        local_batch=_number(options, "local_batch"),
        rule=LrRule(options["lr_rule"]),
        warmup=_number(options, "lr_warmup", least=0),
        reference=_number(options, "lr_reference"),
        logical_ranks=_number(options, "logical_ranks"),
    )
    most = nodes.highest * slots
    if policy.logical_ranks and most > policy.logical_ranks:
        raise SettingError(
            "--logical-ranks",
            policy.logical_ranks,
            f"{nodes.highest} nodes with {slots} workers each are {most}, and each worker needs a logical rank",
            "Raise it, or lower the maximum of --nnodes",
        )
    return policy


def _number(options: Mapping[str, Any], name: str, least: int = 1) -> int:
    text = options[name].strip()
    if not text:
        return 0
    if not text.isdecimal() or int(text) < least:
        flag = "--" + name.replace("_", "-")
        advice = "Leave it out for none" if least else ""
        raise SettingError(flag, text, f"must be a whole number of at least {least}", advice)
    return int(text)
