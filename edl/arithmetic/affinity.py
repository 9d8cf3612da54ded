"""CPU affinity: binds a worker to cores close to its GPU, as torchrun's ``--numa-binding`` does.

The modes mean the same as in torch (2.13, ``torch/numa/binding.py``). All input is text as Linux shows it below
``/sys/devices/system``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from edl.errors import SettingError

MODES = ("node", "socket", "exclusive", "core-complex")
_OPTION = "--numa-binding"


@dataclass(frozen=True, slots=True)
class Topology:
    """The CPU cores of a host (hardware threads), by their kernel numbers."""

    nodes: Mapping[int, frozenset[int]]
    """Cores of each NUMA node."""
    sockets: Mapping[int, int]
    """Physical package (socket) of each core."""
    siblings: Mapping[int, frozenset[int]]
    """For each core, the hardware threads of the same physical core, itself included."""
    caches: Mapping[int, frozenset[int]]
    """For each core, the cores that share its last-level cache, itself included."""
    allowed: frozenset[int]
    """Cores that this process may use."""

    def usable(self, node: int) -> frozenset[int]:
        """The cores of a NUMA node that this process may use."""
        return self.nodes.get(node, frozenset()) & self.allowed


def numbers(text: str) -> frozenset[int]:
    """Parse a kernel list such as ``0-2,4``. Raises ``ValueError`` for other text."""
    found: set[int] = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def topology(files: Mapping[str, str], allowed: Iterable[int]) -> Topology:
    """Build the topology from ``files``, which maps paths below ``/sys/devices/system`` to their content:
    ``node/node*/cpulist``, ``cpu/cpu*/topology/physical_package_id`` and ``thread_siblings_list``, and
    ``cpu/cpu*/cache/index*/type``, ``level`` and ``shared_cpu_list``. Missing files leave gaps in the result."""
    return Topology(
        nodes={node: numbers(text) for node, text in _each(files, r"node/node(\d+)/cpulist")},
        sockets={core: int(text) for core, text in _each(files, r"cpu/cpu(\d+)/topology/physical_package_id")},
        siblings={core: numbers(text) for core, text in _each(files, r"cpu/cpu(\d+)/topology/thread_siblings_list")},
        caches=_last_caches(files),
        allowed=frozenset(allowed),
    )


def _each(files: Mapping[str, str], pattern: str) -> Iterator[tuple[int, str]]:
    """For each matching path, the number in it and the file's content."""
    for path, text in files.items():
        match = re.fullmatch(pattern, path)
        if match:
            yield int(match[1]), text


def _last_caches(files: Mapping[str, str]) -> dict[int, frozenset[int]]:
    """Cores that share each core's highest-level cache; instruction caches are ignored."""
    found: dict[int, tuple[int, frozenset[int]]] = {}
    for path, text in files.items():
        match = re.fullmatch(r"(cpu/cpu(\d+)/cache/index\d+)/shared_cpu_list", path)
        if match and files.get(f"{match[1]}/type", "").strip() in ("Unified", "Data"):
            core, level = int(match[2]), int(files.get(f"{match[1]}/level", "0"))
            if core not in found or level > found[core][0]:
                found[core] = (level, numbers(text))
    return {core: cores for core, (_, cores) in found.items()}


def bind(mode: str, host: Topology, near: Sequence[int], index: int) -> tuple[int, ...]:
    """The cores, ascending, for the worker of the GPU with this index. ``near`` holds the NUMA node of each GPU that
    this launcher may use; a negative number (the kernel's way of saying "only one node") means node 0.

    Raises ``SettingError`` when the host does not expose its topology or has too few cores.
    """
    near = [max(node, 0) for node in near]
    node = near[index]
    if not host.usable(node):
        may = f"this launcher may use {len(host.allowed)} processor cores, and none"
        raise SettingError(_OPTION, mode, f"{may} is known to be at NUMA node {node}, where GPU {index} is", _ADVICE)
    peers = [gpu for gpu, other in enumerate(near) if other == node]
    return tuple(sorted(_RULES[mode](mode, host, node, peers.index(index), len(peers))))


_ADVICE = "Drop --numa-binding, or give the launcher more cores"


def _node(mode: str, host: Topology, node: int, place: int, peers: int) -> frozenset[int]:
    return host.usable(node)


def _socket(mode: str, host: Topology, node: int, place: int, peers: int) -> frozenset[int]:
    """The cores of all NUMA nodes in the same socket."""
    sockets = {other: host.sockets.get(min(host.usable(other))) for other in host.nodes if host.usable(other)}
    if sockets[node] is None:
        raise SettingError(_OPTION, mode, f"the kernel does not report which socket NUMA node {node} is in", "Use node")
    return frozenset(
        core for other, socket in sockets.items() if socket == sockets[node] for core in host.usable(other)
    )


def _exclusive(mode: str, host: Topology, node: int, place: int, peers: int) -> frozenset[int]:
    """An equal share of the physical cores; if they do not divide evenly, the first GPUs get one more."""
    cores = [threads for _, threads in sorted(_grouped(host.usable(node), host.siblings).items())]
    share, more = divmod(len(cores), peers)
    if share < 1:
        few = f"{len(cores)} physical cores at NUMA node {node} are too few for {peers} GPUs"
        raise SettingError(_OPTION, mode, few, _ADVICE)
    first = place * share + min(place, more)
    return frozenset().union(*cores[first : first + share + (place < more)])


def _complex(mode: str, host: Topology, node: int, place: int, peers: int) -> frozenset[int]:
    """The cores that share one last-level cache. GPUs take the caches in turn, the largest first."""
    groups = _grouped(host.usable(node), host.caches)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return ordered[place % len(ordered)][1]


def _grouped(cores: frozenset[int], together: Mapping[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    """Group the usable cores by the lowest number in the set that each belongs to."""
    groups: dict[int, set[int]] = {}
    for core in cores:
        groups.setdefault(min(together.get(core) or {core}), set()).add(core)
    return {first: frozenset(members) for first, members in groups.items()}


_RULES: dict[str, Callable[[str, Topology, int, int, int], frozenset[int]]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _complex,
}
