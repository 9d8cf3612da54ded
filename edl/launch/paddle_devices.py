"""``--devices`` of paddle.distributed.launch: which of the node's accelerators the workers use, and so how many they
are."""

from __future__ import annotations

from collections.abc import Mapping

from edl.agent.workers.devices import listed
from edl.errors import SettingError
from edl.launch.accelerators import count_gpus, paddle_devices
from edl.launch.told import Told

CUDA = "CUDA_VISIBLE_DEVICES"
DEVICE_OPTIONS: dict[tuple[str, ...], str] = {
    ("--devices",): "devices",
    ("--gpus",): "GPUs",
    ("--selected-gpus",): "GPUs",
    ("--npus", "--selected-npus"): "NPUs",
    ("--xpus", "--selected-xpus"): "XPUs",
}
"""Spellings, and what they name."""
VARIABLE_OF = {"gpus": CUDA, "selected_gpus": CUDA, "npus": "ASCEND_RT_VISIBLE_DEVICES", "xpus": "XPU_VISIBLE_DEVICES"}
_ORDER = ("ASCEND_RT_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", CUDA)
"""Which kind ``--devices`` means where several lists are set: as Paddle looks for them. Without any it is the kind that
the installed Paddle is made for."""


def choose(told: Told, env: Mapping[str, str]) -> None:
    """Have workers see these devices only. Raises ``SettingError`` for one that this node does not have."""
    _pass_over(told, env)
    given = [name for name in ("devices", *VARIABLE_OF) if told.values[name]]
    if not given:
        return
    name, *others = given
    origin, text = _said(told, name), told.values[name]
    if others:
        raise SettingError(
            _said(told, others[0]), told.values[others[0]], f"{origin}={text} is given, too", "Give one of them"
        )
    entries = listed(text)
    if not entries or len(set(entries)) < len(entries):
        raise SettingError(origin, text, "must be devices separated by commas, each once", "Such as 0,1")
    variable = VARIABLE_OF.get(name) or next((one for one in _ORDER if one in env), paddle_devices()[0].variable)
    _check(origin, text, entries, variable, env)
    slots = told.values["nproc_per_node"] if told.given("nproc_per_node") else ""
    if told.values["run_mode"] == "ps" or told.values["trainer_num"]:
        slots = told.values["trainer_num"] or slots or "1"
    elif not slots:
        told.offer("nproc_per_node", str(len(entries)), told.source(name), origin)
    if slots.isdecimal() and int(slots) > len(entries):
        raise SettingError(origin, text, f"{slots} workers cannot have a device each", "Name more, or start fewer")
    if slots.isdecimal() and int(slots) > 1:
        entries = entries[: int(slots)]  # as there: the rest stay unused
    told.environment[variable] = ",".join(entries)


def _said(told: Told, name: str) -> str:
    return told.origin(name) or f"--{name}"


def _pass_over(told: Told, env: Mapping[str, str]) -> None:
    """The legacy launcher's option, which a Paddle without GPUs does not know and so leaves out."""
    text = told.values["selected_gpus"]
    if text and CUDA not in env and not count_gpus():
        told.remark(f"{_said(told, 'selected_gpus')}={text} is not used: this node has no GPUs")
        told.values["selected_gpus"] = ""


def _check(origin: str, text: str, entries: tuple[str, ...], variable: str, env: Mapping[str, str]) -> None:
    if variable in env and env[variable] != "all":
        known = listed(env[variable])
        where = f"{variable}={env[variable]}"
    elif variable == CUDA:
        known = tuple(str(index) for index in range(count_gpus()))
        where = f"this node has {len(known)} GPUs"
    else:
        return  # nobody has listed them, and there is no way to count them without the framework
    missing = [entry for entry in entries if entry not in known]
    if missing:
        raise SettingError(origin, text, f"there is no {missing[0]}: {where}", "Name devices that workers may use")
