"""What this machine allows: probed by doing it once."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Iterator

from benchmarks.common.hosts import Network, NotAllowed, network
from benchmarks.endurance.disk import Disk, small_disk
from benchmarks.soak.faults import Need
from benchmarks.soak.job import SIZE_MB
from benchmarks.soak.kinds import Kind

PROBE = "probe"


def allowed() -> tuple[frozenset[Need], dict[Need, str]]:
    """What is allowed, and the reason why something is not."""
    reasons = dict(_network()) | dict(_disk())
    return frozenset(set(Need) - reasons.keys()), reasons


def _network() -> Iterator[tuple[Need, str]]:
    schedulers: dict[Need, Callable[[Network], None]] = {
        Need.NETEM: lambda hosts: hosts.shape(PROBE, "netem", "loss", "1%"),
        Need.NARROW: lambda hosts: hosts.shape(PROBE, "tbf", "rate", "1mbit", "burst", "16k", "latency", "200ms"),
    }
    try:
        with network([PROBE], prefix=PROBE) as hosts:
            for need, shape in schedulers.items():
                try:
                    shape(hosts)
                except NotAllowed as error:
                    yield need, str(error)
    except (NotAllowed, subprocess.CalledProcessError) as error:
        yield from ((need, str(error)) for need in (Need.NAMESPACES, *schedulers))


def _disk() -> Iterator[tuple[Need, str]]:
    with small_disk(SIZE_MB) as disk:
        if not disk.bounded:
            yield from ((need, f"no disk may be mounted: {disk.kind}") for need in (Need.DISK, Need.FREEZE))
        elif not _freezes(disk):
            yield Need.FREEZE, f"fsfreeze does not work on {disk.kind}"


def _freezes(disk: Disk) -> bool:
    for action in ("--freeze", "--unfreeze"):
        try:
            done = subprocess.run(["fsfreeze", action, str(disk.folder)], capture_output=True, check=False)
        except FileNotFoundError:
            return False
        if done.returncode:
            return False
    return True


def missing(kind: Kind) -> str:
    """The packages that a kind needs and that are not installed."""
    return ", ".join(name for name in kind.frameworks if importlib.util.find_spec(name) is None)
