"""Which processor cores a worker is bound to, so that it computes next to its GPU: torchrun's ``--numa-binding``.

The meaning of each mode is torch's (torch 2.13, ``torch/numa/binding.py``). Everything comes from text as Linux shows
it below ``/sys/devices/system``.
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
    """The processor cores of a host, by their numbers as the kernel counts them (hardware threads)."""

    nodes: Mapping[int, frozenset[int]]
    """NUMA node to its cores."""
    sockets: Mapping[int, int]
    """Core to the number of its package."""
    siblings: Mapping[int, frozenset[int]]
    """Core to the hardware threads of the same physical core, itself among them."""
    caches: Mapping[int, frozenset[int]]
    """Core to those that share its last cache, itself among them."""
    allowed: frozenset[int]
    """Those that this process may use."""

    def usable(self, node: int) -> frozenset[int]:
        """Cores of a node that this process may use."""
        return self.nodes.get(node, frozenset()) & self.allowed


def numbers(text: str) -> frozenset[int]:
    """``0-2,4`` as 0, 1, 2 and 4."""
    found: set[int] = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def topology(files: Mapping[str, str], allowed: Iterable[int]) -> Topology:
    """``files``: content by path below ``/sys/devices/system``, of these kinds: ``node/node*/cpulist``,
    ``cpu/cpu*/topology/physical_package_id``, ``thread_siblings_list`` there, ``cpu/cpu*/cache/index*/type``, and
    ``level`` and ``shared_cpu_list`` there. What is missing is missing in the result."""
    return Topology(
        nodes={node: numbers(text) for node, text in _each(files, r"node/node(\d+)/cpulist")},
        sockets={core: int(text) for core, text in _each(files, r"cpu/cpu(\d+)/topology/physical_package_id")},
        siblings={core: numbers(text) for core, text in _each(files, r"cpu/cpu(\d+)/topology/thread_siblings_list")},
        caches=_last_caches(files),
        allowed=frozenset(allowed),
    )


def _each(files: Mapping[str, str], pattern: str) -> Iterator[tuple[int, str]]:
    """The number in each path that fits, and the content."""
    for path, text in files.items():
        match = re.fullmatch(pattern, path)
        if match:
            yield int(match[1]), text


def _last_caches(files: Mapping[str, str]) -> dict[int, frozenset[int]]:
    """Caches of instructions do not count."""
    found: dict[int, tuple[int, frozenset[int]]] = {}
    for path, text in files.items():
        match = re.fullmatch(r"(cpu/cpu(\d+)/cache/index\d+)/shared_cpu_list", path)
        if match and files.get(f"{match[1]}/type", "").strip() in ("Unified", "Data"):
            core, level = int(match[2]), int(files.get(f"{match[1]}/level", "0"))
            if core not in found or level > found[core][0]:
                found[core] = (level, numbers(text))
    return {core: cores for core, (_, cores) in found.items()}


def bind(mode: str, host: Topology, near: Sequence[int], index: int) -> tuple[int, ...]:
    """The cores for the worker of the GPU with this index, ascending. ``near``: for each GPU that this launcher may
    use, the NUMA node that it is at; a negative one (the kernel's word for "only one") is node 0.

    Raises ``SettingError`` when the host does not tell, or there are too few cores.
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
    """All nodes of the same socket."""
    sockets = {other: host.sockets.get(min(host.usable(other))) for other in host.nodes if host.usable(other)}
    if sockets[node] is None:
        raise SettingError(_OPTION, mode, f"the kernel does not tell which socket NUMA node {node} is in", "Use node")
    return frozenset(
        core for other, socket in sockets.items() if socket == sockets[node] for core in host.usable(other)
    )


def _exclusive(mode: str, host: Topology, node: int, place: int, peers: int) -> frozenset[int]:
    """A share of the physical cores; the first GPUs have one more where they do not divide evenly."""
    cores = [threads for _, threads in sorted(_grouped(host.usable(node), host.siblings).items())]
    share, more = divmod(len(cores), peers)
    if share < 1:
        few = f"{len(cores)} physical cores at NUMA node {node} are too few for {peers} GPUs"
        raise SettingError(_OPTION, mode, few, _ADVICE)
    first = place * share + min(place, more)
    return frozenset().union(*cores[first : first + share + (place < more)])


def _complex(mode: str, host: Topology, node: int, place: int, peers: int) -> frozenset[int]:
    """The cores of one last cache, another one for each GPU as far as they go, the largest first."""
    groups = _grouped(host.usable(node), host.caches)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return ordered[place % len(ordered)][1]


def _grouped(cores: frozenset[int], together: Mapping[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    """Usable cores by the lowest number of what they belong to."""
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
