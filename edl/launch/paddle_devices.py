"""``--devices`` of paddle.distributed.launch and its synonyms: which accelerators of the node workers use, and by
default also the number of workers."""

from __future__ import annotations

from collections.abc import Mapping

from edl.agent.workers.devices import listed
from edl.errors import SettingError
from edl.launch.accelerators import count_gpus, paddle_devices
from edl.launch.resolved_options import ResolvedOptions

CUDA = "CUDA_VISIBLE_DEVICES"
VARIABLE_OF = {"gpus": CUDA, "selected_gpus": CUDA, "npus": "ASCEND_RT_VISIBLE_DEVICES", "xpus": "XPU_VISIBLE_DEVICES"}
_ORDER = ("ASCEND_RT_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", CUDA)
"""If several of these variables are set, ``--devices`` refers to the first of them, as in Paddle. If none is, it refers
to the kind of device that the installed Paddle was built for."""


def choose(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Restrict the workers to the devices that the options name. Raises ``SettingError`` for a device that this node
    does not have, or fewer devices than workers."""
    _pass_over(resolved, env)
    given = [name for name in ("devices", *VARIABLE_OF) if resolved.values[name]]
    if not given:
        return
    name, *others = given
    origin, text = _said(resolved, name), resolved.values[name]
    if others:
        raise SettingError(
            _said(resolved, others[0]),
            resolved.values[others[0]],
            f"{origin}={text} is given as well",
            "Give only one of them",
        )
    entries = listed(text)
    if not entries or len(set(entries)) < len(entries):
        why = "must be a comma-separated list of devices, each named once"
        raise SettingError(origin, text, why, "Write a list such as 0,1")
    variable = VARIABLE_OF.get(name) or next((one for one in _ORDER if one in env), paddle_devices()[0].variable)
    _check(origin, text, entries, variable, env)
    slots = resolved.values["nproc_per_node"] if resolved.given("nproc_per_node") else ""
    if resolved.values["run_mode"] == "ps" or resolved.values["trainer_num"]:
        slots = resolved.values["trainer_num"] or slots or "1"
    elif not slots:
        resolved.offer("nproc_per_node", str(len(entries)), resolved.source(name), origin)
    if slots.isdecimal() and int(slots) > len(entries):
        raise SettingError(
            origin, text, f"not enough devices for {slots} workers", "Name more devices, or start fewer workers"
        )
    if slots.isdecimal() and int(slots) > 1:
        entries = entries[: int(slots)]  # as under Paddle's launcher, the others are not used
    resolved.environment[variable] = ",".join(entries)


def _said(resolved: ResolvedOptions, name: str) -> str:
    return resolved.origin(name) or f"--{name}"


def _pass_over(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Ignore ``--selected_gpus`` on a node without GPUs, as Paddle's legacy launcher does."""
    text = resolved.values["selected_gpus"]
    if text and CUDA not in env and not count_gpus():
        resolved.remark(f"{_said(resolved, 'selected_gpus')}={text} is not used: this node has no GPUs")
        resolved.values["selected_gpus"] = ""


def _check(origin: str, text: str, entries: tuple[str, ...], variable: str, env: Mapping[str, str]) -> None:
    if variable in env and env[variable] != "all":
        known = listed(env[variable])
        where = f"{variable}={env[variable]}"
    elif variable == CUDA:
        known = tuple(str(index) for index in range(count_gpus()))
        where = f"this node has {len(known)} GPUs"
    else:
        return  # without the variable these devices cannot be counted
    missing = [entry for entry in entries if entry not in known]
    if missing:
        raise SettingError(
            origin, text, f"there is no device {missing[0]}: {where}", "Name devices that workers may use"
        )
