"""The accelerators of this node, found without importing a framework."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from edl.agent.workers.devices import Devices, devices_of_slot, listed
from edl.agent.workers.paddle_environment import GPU, KINDS, PaddleKind
from edl.config import environment

CUDA = "CUDA_VISIBLE_DEVICES"
_GPUS = "/proc/driver/nvidia/gpus"
_GPU_FOLDERS = Path(_GPUS)


def _nvidia() -> int:
    return len(list(_GPU_FOLDERS.glob("*")))


def _amd() -> int:
    """Count GPUs among the nodes of AMD's driver: those whose id is not 0, which is the id of processors."""
    found = 0
    for file in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"):
        with contextlib.suppress(OSError):  # the file of a card that this container may not use
            found += file.read_text().strip() not in ("", "0")
    return found


def _device_files(name: str) -> int:
    return sum(re.fullmatch(rf"{name}\d+", path.name) is not None for path in Path("/dev").glob(f"{name}*"))


COUNTED: dict[str, Callable[[], int]] = {
    CUDA: _nvidia,
    "HIP_VISIBLE_DEVICES": _amd,
    "ASCEND_RT_VISIBLE_DEVICES": lambda: _device_files("davinci"),
    "XPU_VISIBLE_DEVICES": lambda: _device_files("xpu"),
    "ZE_AFFINITY_MASK": lambda: 0,
}
"""For each variable of ``edl.agent.workers.devices``: how devices are counted if it is not set. Intel's are not
counted."""


def visible_devices() -> Devices:
    """The devices of this node by kind: as listed in the kind's variable, or else as counted."""
    variables, found = environment(), {}
    for variable, count in COUNTED.items():
        text = variables.get(variable)
        entries = listed(text) if text is not None else tuple(str(index) for index in range(count()))
        if entries:
            found[variable] = entries
    return found


def count_accelerators() -> int:
    """Number of accelerators that workers may use, of the first kind that is present; 0: none."""
    return next((len(entries) for entries in visible_devices().values()), 0)


def visible_gpus() -> tuple[str, ...]:
    """Ids of the NVIDIA GPUs that workers may use, as in ``CUDA_VISIBLE_DEVICES``."""
    return visible_devices().get(CUDA, ())


def paddle_devices() -> tuple[PaddleKind, int]:
    """The kind of accelerator that the installed Paddle was built for, and the number of them that it may use; 0:
    Paddle runs on CPUs."""
    for kind in KINDS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(kind.package)
            return kind, len(visible_devices().get(kind.variable, ()))
    return GPU, 0


def count_gpus() -> int:
    """Number of NVIDIA GPUs that workers may use."""
    return len(visible_gpus())


# --- identities ------------------------------------------------------------------------------------------------------


def slot_identities(devices: Devices, slots: int) -> tuple[str, ...]:
    """The UUIDs of the devices in each slot, several separated by commas. Only NVIDIA's devices have them: a text is
    empty if the UUIDs of a slot are not known, the tuple if none are."""
    entries = devices.get(CUDA, ())
    shares = [devices_of_slot(entries, slots, slot) for slot in range(slots)]
    if not all(shares):
        return ()
    uuids: Sequence[str] = () if all(_is_uuid(entry) for entry in entries) else gpu_uuids()

    def name(entry: str) -> str:
        if _is_uuid(entry):
            return entry
        return uuids[int(entry)] if entry.isdecimal() and int(entry) < len(uuids) else ""

    named = [[name(entry) for entry in share] for share in shares]
    found = tuple(",".join(share) if all(share) else "" for share in named)
    return found if any(found) else ()


def _is_uuid(entry: str) -> bool:
    return entry.startswith(("GPU-", "MIG-"))


def gpu_uuids() -> tuple[str, ...]:
    """UUIDs of all GPUs of this node in bus order, from NVML or else from the driver's files; empty if neither has
    them."""
    with contextlib.suppress(ImportError):
        found = _by_nvml(importlib.import_module("pynvml"))
        if found:
            return found
    return _by_driver()


def _by_nvml(nvml: Any) -> tuple[str, ...]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or a driver of another version
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return tuple(text.decode() if isinstance(text, bytes) else str(text) for text in uuids)
    except nvml.NVMLError:  # a card has fallen off the bus: the numbers are no longer reliable
        return ()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _by_driver() -> tuple[str, ...]:
    found = []
    for folder in sorted(_GPU_FOLDERS.glob("*")):
        try:
            match = re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)\s*$", (folder / "information").read_text(), re.M)
        except OSError:
            match = None
        found.append(match[1] if match else "")
    return tuple(found)
