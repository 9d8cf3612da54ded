"""Finds the NUMA nodes of this host's GPUs and processor cores for ``--numa-binding``; the rules are in
``arithmetic.affinity``."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edl.agent.workers.devices import Devices
from edl.arithmetic.affinity import bind, topology
from edl.errors import SettingError, UsageError
from edl.launch.accelerators import CUDA, gpu_uuids

_KINDS = (
    "node/node*/cpulist",
    "cpu/cpu*/topology/physical_package_id",
    "cpu/cpu*/topology/thread_siblings_list",
    "cpu/cpu*/cache/index*/type",
    "cpu/cpu*/cache/index*/level",
    "cpu/cpu*/cache/index*/shared_cpu_list",
)


@dataclass(frozen=True, slots=True)
class Host:
    """The sysfs and procfs folders in which the kernel describes the host's hardware."""

    system: Path = Path("/sys/devices/system")
    pci: Path = Path("/sys/bus/pci/devices")
    gpus: Path = Path("/proc/driver/nvidia/gpus")

    def files(self) -> dict[str, str]:
        """The files that ``arithmetic.affinity.topology`` needs, by relative path."""
        found = {}
        for kind in _KINDS:
            for path in self.system.glob(kind):
                with contextlib.suppress(OSError):
                    found[str(path.relative_to(self.system))] = path.read_text()
        return found

    def nodes(self) -> list[int]:
        """The NUMA node of each GPU in bus order, as torch counts them. Raises ``UsageError``."""
        found = []
        for place in sorted(path.name for path in self.gpus.glob("*")):
            try:
                found.append(int((self.pci / place.lower() / "numa_node").read_text()))
            except (OSError, ValueError):
                why = f"the kernel does not report the NUMA node of the GPU at {place}"
                raise UsageError(f"--numa-binding: {why}. Drop --numa-binding") from None
        return found


def cores_of_slots(
    mode: str, devices: Devices, slots: int, host: Host | None = None, allowed: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """The cores of each slot's worker; empty without ``--numa-binding``.

    ``slots``: spare ones included. As in torch, slot i gets the i-th GPU that the launcher may use. Raises
    ``SettingError`` if the host does not have or describe the GPUs.
    """
    if mode == "none":
        return ()
    host = host or Host()
    entries, everywhere = devices.get(CUDA, ()), host.nodes()
    if not entries or not everywhere:
        raise SettingError(
            "--numa-binding",
            mode,
            "binds each worker to cores near its NVIDIA GPU, but this node has none",
            "Drop --numa-binding",
        )
    if len(entries) < slots:
        few = f"each of {slots} slots needs its own GPU, but only {len(entries)} may be used"
        raise SettingError("--numa-binding", mode, few, "Lower --nproc-per-node, or drop --numa-binding")
    near = [everywhere[_index(mode, entry, len(everywhere))] for entry in entries]
    plan = topology(host.files(), os.sched_getaffinity(0) if allowed is None else allowed)
    return tuple(bind(mode, plan, near, slot) for slot in range(slots))


def _index(mode: str, entry: str, gpus: int) -> int:
    """The index in bus order of a GPU that ``CUDA_VISIBLE_DEVICES`` lists by index or by UUID (or the beginning of
    one). ``gpus``: number of GPUs of the host. Raises ``SettingError``."""
    if re.fullmatch(r"\d+", entry) and int(entry) < gpus:
        return int(entry)
    fitting = [index for index, uuid in enumerate(gpu_uuids()) if entry and uuid.startswith(entry)]
    if len(fitting) != 1 or fitting[0] >= gpus:
        why = f"cannot tell which GPU {entry!r} in {CUDA} is"
        raise SettingError("--numa-binding", mode, why, "List the GPUs by index, or drop --numa-binding")
    return fitting[0]
