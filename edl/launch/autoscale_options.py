"""The launcher's options for the autoscale policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl.config import AutoscaleRules, NodeRange
from edl.errors import SettingError
from edl.launch.options import record


def autoscale_from(options: Mapping[str, Any], nodes: NodeRange) -> AutoscaleRules:
    """The rules of the autoscale policy. Raises ``SettingError``."""
    enabled = options["autoscale"] != "off"
    rules = record(AutoscaleRules, options, enabled=enabled)
    if enabled and nodes.lowest == nodes.highest:
        raise SettingError(
            "--autoscale",
            options["autoscale"],
            f"--nnodes={nodes} leaves no choice of size",
            "Give a range such as --nnodes=1:8, or drop one of the two options",
        )
    return rules
