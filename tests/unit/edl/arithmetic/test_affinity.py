"""Which processor cores a worker is bound to, on made-up hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.arithmetic.affinity import Topology, bind, numbers, topology
from edl.errors import SettingError, UsageError
from edl.launch import numa_binding
from edl.launch.numa_binding import Host, cores_of_slots

ONE_NODE = {"node/node0/cpulist": "0-3\n"}


def host(*, nodes: int = 2, cores: int = 4, threads: int = 2, sockets: int = 1, complexes: int = 1) -> dict[str, str]:
    """Files of a host with so many NUMA nodes, physical cores in each, hardware threads in each of these, sockets, and
    last caches in a node. Threads are numbered as on most hosts: second ones after all first ones."""
    files = {}
    first = nodes * cores
    for node in range(nodes):
        mine = [node * cores + core for core in range(cores)]
        files[f"node/node{node}/cpulist"] = ",".join(
            str(core + first * thread) for thread in range(threads) for core in mine
        )
        for place, core in enumerate(mine):
            siblings = [core + first * thread for thread in range(threads)]
            share = cores // complexes
            together = [
                one + first * thread
                for thread in range(threads)
                for one in mine[place // share * share : (place // share + 1) * share]
            ]
            for thread in siblings:
                files[f"cpu/cpu{thread}/topology/physical_package_id"] = f"{node * sockets // nodes}\n"
                files[f"cpu/cpu{thread}/topology/thread_siblings_list"] = ",".join(map(str, siblings))
                for index, (kind, level, shared) in enumerate(
                    [("Data", 1, siblings), ("Instruction", 1, siblings), ("Unified", 3, together)]
                ):
                    folder = f"cpu/cpu{thread}/cache/index{index}"
                    files[f"{folder}/type"], files[f"{folder}/level"] = f"{kind}\n", f"{level}\n"
                    files[f"{folder}/shared_cpu_list"] = ",".join(map(str, shared))
    return files


def of(files: dict[str, str], allowed: range | tuple[int, ...] = range(64)) -> Topology:
    return topology(files, allowed)


@pytest.mark.parametrize(
    ("text", "found"), [("0-2,4,6-7\n", {0, 1, 2, 4, 6, 7}), ("5", {5}), ("", set()), (" 1 , 3-3 ", {1, 3})]
)
def test_lists_of_the_kernel(text: str, found: set[int]) -> None:
    assert numbers(text) == found


def test_node_is_all_that_is_next_to_the_gpu() -> None:
    plan = of(host())
    assert bind("node", plan, (0, 1), 0) == (0, 1, 2, 3, 8, 9, 10, 11)
    assert bind("node", plan, (0, 1), 1) == (4, 5, 6, 7, 12, 13, 14, 15)


def test_only_cores_that_the_launcher_may_use() -> None:
    assert bind("node", of(host(), (1, 2, 5, 8)), (0, 1), 0) == (1, 2, 8)


def test_a_kernel_that_does_not_tell_the_node_has_one() -> None:
    assert bind("node", of(host(nodes=1)), (-1,), 0) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_socket_is_all_nodes_of_it() -> None:
    plan = of(host(nodes=4, cores=2, threads=1, sockets=2))
    assert bind("socket", plan, (0, 3), 0) == (0, 1, 2, 3)
    assert bind("socket", plan, (0, 3), 1) == (4, 5, 6, 7)
    assert bind("socket", of(host(nodes=4, cores=2, threads=1, sockets=2), (0, 4, 6)), (0, 3), 1) == (4, 6)


def test_exclusive_shares_physical_cores() -> None:
    plan = of(host(nodes=1, cores=4, threads=2))
    assert [bind("exclusive", plan, (0, 0), gpu) for gpu in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_exclusive_gives_the_first_ones_what_is_left_over() -> None:
    plan = of(host(nodes=1, cores=5, threads=1))
    assert [bind("exclusive", plan, (0, 0, 0), gpu) for gpu in range(3)] == [(0, 1), (2, 3), (4,)]


def test_exclusive_counts_gpus_of_the_same_node_only() -> None:
    plan = of(host(nodes=2, cores=4, threads=1))
    shares = [bind("exclusive", plan, (1, 0, 1), gpu) for gpu in range(3)]
    assert shares == [(4, 5), (0, 1, 2, 3), (6, 7)]
    assert len({core for share in shares for core in share}) == 8


def test_core_complex_takes_another_cache_for_each() -> None:
    plan = of(host(nodes=1, cores=8, threads=1, complexes=2))
    assert [bind("core-complex", plan, (0, 0, 0), gpu) for gpu in range(3)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (0, 1, 2, 3),
    ]


def test_core_complex_prefers_the_one_with_more_usable_cores() -> None:
    plan = of(host(nodes=1, cores=8, threads=1, complexes=2), (0, 1, 4, 5, 6))
    assert bind("core-complex", plan, (0, 0), 0) == (4, 5, 6)
    assert bind("core-complex", plan, (0, 0), 1) == (0, 1)


def test_the_order_in_which_the_kernel_lists_its_files_does_not_matter() -> None:
    files = host(nodes=2, cores=4, threads=2, complexes=2)
    assert of(dict(reversed(files.items()))) == of(files)


def test_caches_of_instructions_do_not_count() -> None:
    files = {
        **ONE_NODE,
        "cpu/cpu0/cache/index0/type": "Instruction",
        "cpu/cpu0/cache/index0/level": "9",
        "cpu/cpu0/cache/index0/shared_cpu_list": "0-3",
    }
    assert of(files).caches == {}
    assert bind("core-complex", of(files), (0,), 0) == (0,)


@pytest.mark.parametrize(
    ("mode", "files", "near", "words"),
    [
        ("node", ONE_NODE, (1,), "none is known to be at NUMA node 1, where GPU 0 is"),
        ("node", {}, (0,), "none is known to be at NUMA node 0"),
        ("socket", ONE_NODE, (0,), "the kernel does not report which socket NUMA node 0 is in"),
        (
            "exclusive",
            host(nodes=1, cores=1, threads=2),
            (0, 0),
            "1 physical cores at NUMA node 0 are too few for 2 GPUs",
        ),
    ],
)
def test_what_cannot_be_is_said(mode: str, files: dict[str, str], near: tuple[int, ...], words: str) -> None:
    with pytest.raises(SettingError) as refused:
        bind(mode, of(files), near, 0)
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"--numa-binding={mode}: ")


# --- a host's own files ----------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Two nodes, and a GPU at each: the first one on the bus at node 1."""
    monkeypatch.setattr(numa_binding, "gpu_uuids", lambda: ("GPU-aaaa", "GPU-bbbb"))
    for path, text in host(nodes=2, cores=2, threads=1).items():
        (tmp_path / "system" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "system" / path).write_text(text)
    for place, node in (("0000:0A:00.0", 1), ("0000:dc:00.0", 0)):
        (tmp_path / "gpus" / place).mkdir(parents=True)
        (tmp_path / "pci" / place.lower()).mkdir(parents=True)
        (tmp_path / "pci" / place.lower() / "numa_node").write_text(f"{node}\n")
    return Host(tmp_path / "system", tmp_path / "pci", tmp_path / "gpus")


@pytest.mark.parametrize(
    ("entries", "cores"),
    [
        (("0", "1"), ((2, 3), (0, 1))),
        (("1", "0"), ((0, 1), (2, 3))),
        (("GPU-bbbb", "GPU-aaaa"), ((0, 1), (2, 3))),
        (("GPU-b", "0"), ((0, 1), (2, 3))),
    ],
)
def test_slots_go_with_the_gpus_in_the_order_of_the_variable(
    here: Host, entries: tuple[str, ...], cores: tuple[tuple[int, ...], ...]
) -> None:
    assert cores_of_slots("node", {"CUDA_VISIBLE_DEVICES": entries}, 2, here, range(4)) == cores


def test_nothing_is_looked_at_unless_it_was_asked_for() -> None:
    assert cores_of_slots("none", {}, 2) == ()


@pytest.mark.parametrize(
    ("entries", "slots", "words"),
    [
        ((), 1, "but this node has none"),
        (("0",), 2, "each of 2 slots needs its own GPU, but only 1 may be used"),
        (("7",), 1, "cannot tell which GPU '7' in CUDA_VISIBLE_DEVICES is"),
        (("GPU-",), 1, "cannot tell which GPU 'GPU-'"),
        (("MIG-1",), 1, "cannot tell which GPU 'MIG-1'"),
    ],
)
def test_gpus_that_cannot_be_found_are_named(here: Host, entries: tuple[str, ...], slots: int, words: str) -> None:
    with pytest.raises(SettingError) as refused:
        cores_of_slots("node", {"CUDA_VISIBLE_DEVICES": entries} if entries else {}, slots, here, range(4))
    assert words in str(refused.value)


def test_a_kernel_without_places_on_the_bus(here: Host) -> None:
    (here.pci / "0000:dc:00.0" / "numa_node").unlink()
    with pytest.raises(UsageError, match=r"does not report the NUMA node of the GPU at 0000:dc:00\.0"):
        cores_of_slots("node", {"CUDA_VISIBLE_DEVICES": ("0", "1")}, 2, here, range(4))


def test_this_host_can_be_read() -> None:
    plan = topology(Host().files(), {0})
    assert all(cores for cores in plan.nodes.values())
