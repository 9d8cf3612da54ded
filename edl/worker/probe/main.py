"""The course of a probe: the node's own part on each device, then the exchanges with its peers."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from edl.health.readings import faults, remarks
from edl.wire import json_messages
from edl.wire.health import HealthChecked, LinkFinding, SlotFinding
from edl.wire.health_records import PROBE_VARIABLE, ProbeOrder
from edl.worker.probe import nvml
from edl.worker.probe.device_exchanges import ExchangeTimes, between_devices
from edl.worker.probe.exchange import DeviceLinks, Exchanges
from edl.worker.probe.plugins import run_plugins
from edl.worker.probe.product import NumpyDevice, PlainDevice, ProbedDevice

FRAMEWORKS = {"torch": "edl.torch.health", "paddle": "edl.paddle.health"}
"""For each framework a module with ``devices(slots)``, the devices on which it multiplies, and perhaps with
``device_links()``, the exchanges between them."""
RESERVED = 0.1
"""Share of the time limit that remains for the answer when the exchanges end."""
_GPUS = "/proc/driver/nvidia/gpus"


def run() -> None:
    """Carry out the order in ``PROBE_VARIABLE``, and answer on stdout."""
    began_s = time.monotonic()
    ordered = json_messages.decode(ProbeOrder, os.environ[PROBE_VARIABLE])
    answer = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever libraries print
    exchanges: Exchanges | None = None
    trouble = ""
    if ordered.order.peers:
        try:
            exchanges = Exchanges(ordered)
        except OSError as error:
            trouble = f"cannot listen on port {ordered.order.port}: {error.strerror}"
    checked = own_part(ordered, devices_here)
    answer.write(json_messages.encode(checked) + b"\n")
    until_s = began_s + ordered.order.timeout_s * (1 - RESERVED)
    if exchanges is not None:
        between = _device_links()
        exchanges.store_port = between.store_port if between is not None else 0
        for found in exchanged(ordered, checked, exchanges, between, until_s):
            answer.write(json_messages.encode(found) + b"\n")
    elif trouble:
        links = tuple(LinkFinding(peer.node, trouble) for peer in ordered.order.peers)
        answer.write(json_messages.encode(dataclasses.replace(checked, links=links)) + b"\n")
    # At once: daemon threads may wait for a peer, and a broken device may not let its library end.
    os._exit(0)


def exchanged(
    ordered: ProbeOrder,
    checked: HealthChecked,
    exchanges: Exchanges,
    between: DeviceLinks | None,
    until_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[HealthChecked]:
    """Exchange data with the peers: bytes, then between the devices. Yields the answers, each of which replaces the one
    before."""
    if between is None:
        yield dataclasses.replace(checked, links=exchanges.run(until_s))
        return
    times = ExchangeTimes.between(clock(), until_s)
    checked = dataclasses.replace(checked, links=exchanges.run(times.bytes_until_s))
    yield from between_devices(ordered, checked, exchanges.stores, between, times, clock)


def _device_links() -> DeviceLinks | None:
    """The communicator between devices; None: there are no devices, or no framework that has one."""
    for framework, module in FRAMEWORKS.items():
        if framework in sys.modules:
            create = getattr(importlib.import_module(module), "device_links", None)
            return cast("DeviceLinks | None", create()) if create is not None else None
    return None


def own_part(ordered: ProbeOrder, devices: Callable[[int], Sequence[ProbedDevice]]) -> HealthChecked:
    """Test and measure the devices of this node, alone."""
    order = ordered.order
    checked = HealthChecked(order.number, order.stage)
    wrong: dict[int, str] = {}
    notes: list[str] = []
    for reading in nvml.readings(_visible(), ordered.slots):
        name = f"device {reading.uuid}"
        if fault := faults(reading):
            wrong[reading.slot] = f"{name}: {fault}"
        if remark := remarks(reading):
            notes.append(f"{name}: {remark}")
    kinds: dict[str, None] = {}
    times: list[float] = []
    tested = list(devices(ordered.slots))
    for device in tested:
        kinds[device.kind] = None
        try:
            times.append(device.product_s(order.size))
        except Exception as error:  # noqa: BLE001 - whatever a broken device makes its library raise
            wrong[device.slot] = f"{device.kind}: {error}"
    own, found = run_plugins(ordered.probes)
    wrong |= {one.slot: one.error for one in found}
    shared = wrong.pop(-1, "")
    whole = shared or ("; ".join(wrong.values()) if len(wrong) >= max(1, ordered.slots) else "")
    return dataclasses.replace(
        checked,
        kind=" and ".join(kinds),
        product_s=max(times, default=0.0),
        error="; ".join(text for text in (whole, own) if text),
        slots=() if whole else tuple(SlotFinding(slot, text) for slot, text in sorted(wrong.items())),
        remarks=tuple(notes),
    )


def devices_here(slots: int) -> Sequence[ProbedDevice]:
    """The devices, through the framework that is imported, else numpy, else plain Python. A process without a framework
    imports torch if there are GPUs."""
    for framework, module in FRAMEWORKS.items():
        if framework in sys.modules or (framework == "torch" and os.path.isdir(_GPUS) and _has("torch")):
            return list(cast("Iterator[ProbedDevice]", importlib.import_module(module).devices(slots)))
    try:
        return [NumpyDevice(importlib.import_module("numpy"))]
    except ImportError:
        return [PlainDevice()]


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _visible() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [part.strip() for part in listed.split(",") if part.strip()]
