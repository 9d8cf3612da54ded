"""Options on which all launchers of a job must agree, and the differences between two launchers' values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from edl.config import (
    AutoscaleRules,
    HyperPolicy,
    JobSpec,
    NodeRange,
    Replicas,
    ScriptServers,
    SlotRules,
    Timeouts,
    VerifyRules,
)
from edl.job_records import HealthRules, SchedulerChoice, StragglerRules, Training
from edl.launch.options import OPTIONS

NONE = "''"

_PARTS: Mapping[type, Callable[[JobSpec], Any]] = {
    JobSpec: lambda spec: spec,
    NodeRange: lambda spec: spec.nodes,
    Timeouts: lambda spec: spec.timeouts,
    HyperPolicy: lambda spec: spec.hyper,
    AutoscaleRules: lambda spec: spec.autoscale,
    SlotRules: lambda spec: spec.slots,
    HealthRules: lambda spec: spec.health,
    Replicas: lambda spec: spec.replicas,
    VerifyRules: lambda spec: spec.verify,
    StragglerRules: lambda spec: spec.stragglers,
    Training: lambda spec: spec.servers,
}
"""For each settings record in a job's specification, a function that returns it; None: the job has no such record."""


def agreed(spec: JobSpec) -> dict[str, str]:
    """The value of each option on which all launchers must agree, by flag, in the order of the table."""
    several = _of_several_options(spec)
    found: dict[str, str] = {}
    for option in OPTIONS:
        if option.flag in several:
            found[option.flag] = several.pop(option.flag)
        elif option.setting is not None and option.setting.record in _PARTS:
            part = _PARTS[option.setting.record](spec)
            if part is not None:
                found[option.flag] = _shown(getattr(part, option.setting.name))
    return found | several


def differences(mine: JobSpec, theirs: JobSpec) -> list[str]:
    """Options in which two specifications differ, as ``--flag=MINE (the running job has THEIRS)``."""
    here, there = agreed(mine), agreed(theirs)
    if mine.replicas != theirs.replicas:
        here.pop("--node-unit")  # it follows from them, and was perhaps not given
    return [
        f"{flag}={value} (the running job has {there[flag]})"
        for flag, value in here.items()
        if flag in there and there[flag] != value
    ]


def _of_several_options(spec: JobSpec) -> dict[str, str]:
    """Values that depend on several options, or that only some jobs have."""
    return {
        "--nnodes": f"{spec.nodes.minimum}:{spec.nodes.maximum}",
        "--data": " ".join(sorted(one.text for one in spec.data)) or NONE,
        "--sync-dir": " ".join(spec.sync_dirs) or NONE,
        "--run-mode": "ps" if spec.servers or spec.script_servers else "collective",
        "--pservers": "script" if spec.script_servers else "edl",
        "--autoscale": "throughput" if spec.autoscale.enabled else "off",
        **({"--nproc-per-node": str(spec.replicas.slots)} if spec.replicas.slots else {}),
        **_pservers(spec.servers, spec.script_servers),
        **_scheduler(spec.scheduler),
    }


def _pservers(servers: Training | None, script: ScriptServers) -> dict[str, str]:
    if servers is not None:
        return {"--servers": ":".join(map(str, servers.servers))}
    if not script:
        return {}
    if not script.servers:
        return {"--with_gloo": script.gloo, "--server_num": str(script.each)}
    listed = {"--servers": ",".join(script.servers), "--trainers": ",".join(script.trainers)}
    return {"--with_gloo": script.gloo, **listed}


def _scheduler(choice: SchedulerChoice | None) -> dict[str, str]:
    if choice is None:
        return {"--scheduler": NONE}
    conf = ",".join(f"{key}={value}" for key, value in sorted(choice.conf.items()))
    return {"--scheduler": choice.text, "--scheduler-conf": conf, "--scale-owner": choice.owner.value}


def _shown(value: Any) -> str:
    """A value as written on the command line."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
