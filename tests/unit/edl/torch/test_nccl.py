"""edl's calls of NCCL backends. The backends are fakes; ``tests/process/test_nccl.py`` makes the calls on a card."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import HashStore, PrefixStore  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from edl.errors import UsageError  # noqa: E402
from edl.torch import nccl  # noqa: E402
from edl.torch.framework import TorchFramework  # noqa: E402
from edl.torch.group import GroupLost, TorchGroup, watch_new_groups  # noqa: E402
from edl.wire.local import Seat  # noqa: E402

pytestmark = pytest.mark.torch


class Backend:
    """Like torch's on a card: creating the communicator waits for all peers on a listening socket. Neither ``abort``
    nor a caller that hangs up releases that."""

    def __init__(self, peers_are_there: bool = True) -> None:
        self.calls: list[str] = []
        self.error = "SUCCESS"
        self.connecting = threading.Event()
        self._peers_are_there = peers_are_there

    def name(self) -> str:
        return "nccl"

    def eager_connect_single_device(self, device: Any) -> None:
        self.calls.append(f"connect {device}")
        if not self._peers_are_there:
            with socket.create_server(("127.0.0.1", 0), backlog=16384) as listener:
                listener.settimeout(60)
                self.connecting.set()
                try:
                    while True:
                        listener.accept()[0].close()
                except OSError as error:
                    self.calls.append("refused" if error.errno == errno.EINVAL else str(error))
            raise RuntimeError("NCCL error: unhandled system error")

    def abort(self) -> None:
        self.calls.append("abort")

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)


class Group:
    """A torch group with such a backend, or with none."""

    def __init__(self, backend: Backend | None) -> None:
        self.backend = backend
        self._device_types = [torch.device("cuda" if backend else "cpu")]

    def _get_backend(self, device: Any) -> Backend:
        if self.backend is None:
            raise RuntimeError("no backend for cuda")
        return self.backend


def seat(world_size: int) -> Seat:
    return Seat(
        round=3, rank=0, local_rank=0, world_size=world_size, local_world_size=world_size, node="n", nodes=1,
        position=0, endpoints=("h:1",) * world_size, master="127.0.0.1:0", era=1, restore_era=0, restore_commit=0,
        shards=1, stored=False, checkpoint_dir="", token="",
    )  # fmt: skip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(pci_bus_id=6))

    yield
    watch_new_groups(None)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200"}),
        (
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "9"},
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "9"},
        ),
        (
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},  # the launcher's
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200"},
        ),
    ],
)
def test_the_users_settings_stand(said: dict[str, str], kept: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    nccl.set_up(said)
    assert said == kept


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (object, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        (object, {}),
        (Backend, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_DIST_USE_NCCL2": "1"}),
    ],
    ids=["torch 2.4", "torch 2.4 without a launcher", "another backend"],
)
def test_a_worker_that_cannot_abort_leaves_hangs_to_torch(
    kind: type, said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
    before = dict(said)
    nccl.set_up(said)
    assert said == before | {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200"}


@pytest.mark.usefixtures("card")
def test_the_framework_sets_what_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "")
    assert TorchFramework()._backend(seat(2)) == "cpu:gloo,cuda:nccl"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("value", "stays"), [("0", True), ("1", True), ("2", True), ("3", False)])
def test_a_setting_that_ends_the_process_at_an_abort_means_a_new_process(
    value: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    reason = TorchFramework().why_not_in_process()
    assert (reason == "") is stays
    assert stays or f"TORCH_NCCL_ASYNC_ERROR_HANDLING={value} ends the process" in reason


def test_another_nccl_backend_means_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    assert nccl.why_not({"TORCH_DIST_USE_NCCL2": "0"}) == ""
    assert nccl.why_not({"TORCH_DIST_USE_NCCL2": "1"}).startswith("TORCH_DIST_USE_NCCL2=1 chooses another NCCL backend")


def test_a_torch_without_abort_means_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", object, raising=False)
    assert "NCCL cannot be aborted in torch" in nccl.why_not({})


# --- forming and aborting --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("card")
def test_the_communicator_is_made_with_the_group_and_an_abort_meanwhile_frees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend(peers_are_there=False)
    made = Group(backend)
    group = TorchGroup(seat(2))
    monkeypatch.setattr(TorchGroup, "_open_store", lambda self: HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **named: None)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: made)
    monkeypatch.setattr(TorchGroup, "_agreed", lambda self, store, backend: backend)

    servers = []  # of other threads, which are none of NCCL's business

    def abort() -> None:
        assert backend.connecting.wait(60)
        servers.append(socket.create_server(("127.0.0.1", 0)))
        servers.append(socket.create_server(("", 0), backlog=1 << 20))
        group.abort()

    aborting = threading.Thread(target=abort)
    aborting.start()
    with pytest.raises(GroupLost, match="aborted while its group was formed"):
        group.connect("cpu:gloo,cuda:nccl")
    aborting.join()
    assert sorted(backend.calls) == ["abort", "connect cuda:0", "refused"]
    for server in servers:
        server.setblocking(False)
        with server, pytest.raises(BlockingIOError):
            server.accept()
    group.retire()


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("shared", [False, True])
def test_a_world_whose_workers_share_a_card_uses_gloo(
    shared: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """NCCL refuses them."""
    backend = Backend()
    formed: list[str] = []
    monkeypatch.setattr(TorchGroup, "_open_store", lambda self: HashStore())
    monkeypatch.setattr(nccl, "compare", lambda *world: nccl.Cards(shared, ()))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **named: formed.append(name))
    monkeypatch.setattr(c10d, "_get_default_group", lambda: Group(None if shared else backend))
    nccl._note_once.cache_clear()
    group = TorchGroup(seat(2))
    group.connect("cpu:gloo,cuda:nccl")
    assert group.has_nccl is not shared
    assert formed == ["gloo" if shared else "cpu:gloo,cuda:nccl"]
    assert backend.calls == ([] if shared else ["connect cuda:0"])
    assert ("several workers use one GPU (this one uses cuda:0)" in capfd.readouterr().err) is shared
    group.abort()


@pytest.fixture
def formed(card: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TorchGroup, Backend]]:
    backend = Backend()
    made = Group(backend)
    monkeypatch.setattr(TorchGroup, "_open_store", lambda self: HashStore())
    monkeypatch.setattr(nccl, "compare", lambda *world: nccl.Cards(False, ()))
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **named: None)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: made)
    group = TorchGroup(seat(2))
    group.connect("cpu:gloo,cuda:nccl")
    backend.calls.clear()
    yield group, backend
    group.abort()
    group.retire()


def test_a_failure_begins_no_collective_and_ends_none(formed: tuple[TorchGroup, Backend]) -> None:
    """NCCL would end those of the peers as well, with garbage."""
    group, backend = formed
    group.refuse()
    group.watch.fail("reset")
    assert (group.aborted, group.failure(), backend.calls) == (True, "a collective failed: reset", [])
    with pytest.raises(GroupLost, match="round 3: no collective can begin: a collective failed: reset"):
        group.refuse()
    aborted = threading.Event()
    backend.abort = aborted.set  # type: ignore[method-assign]
    group.abort()
    assert aborted.wait(60)


def compare(places: str) -> list[Any]:
    """What ranks at these places find; a dash is a worker without a GPU."""
    store, found = HashStore(), []

    def ask(rank: int, place: str) -> None:
        found.append(nccl.compare(store, place.encode().strip(b"-"), f"rank {rank} on h", len(places)))

    threads = [threading.Thread(target=ask, args=rank) for rank in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("places", ["abc", "aba", "aab", "baa", "aaa", "---"])
def test_all_ranks_know_whether_two_are_at_one_place(places: str) -> None:
    assert compare(places) == [nccl.Cards(len(set(places) - {"-"}) in (1, 2), ())] * 3


@pytest.mark.parametrize(("places", "lacking"), [("ab-", [2]), ("-b", [0]), ("a--", [1, 2]), ("a-a", [1])])
def test_all_ranks_know_who_has_no_card(places: str, lacking: list[int]) -> None:
    found = compare(places)
    assert [cards.lacking for cards in found] == [tuple(f"rank {rank} on h" for rank in lacking)] * len(places)


class Waits:
    """A store that notes for what its caller waits, and lets it go on."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._store = HashStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: list[str]) -> None:
        self.waits += keys


def test_who_has_a_card_waits_until_the_others_know_that_they_have_none() -> None:
    """It then aborts its group, and the store of rank 0 is gone: they would take that for the loss of a peer."""
    store = Waits()
    store.add("lacking", 1)
    store.set("lacks 1", "rank 1 on h")
    assert nccl.compare(store, b"a", "rank 0 on h", 2) == nccl.Cards(False, ("rank 1 on h",))
    assert store.waits == ["all counted", "all read"]


def test_of_many_workers_without_a_card_a_few_are_named() -> None:
    assert {len(cards.lacking) for cards in compare("a" + "-" * 20)} == {8}


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("backend", "kind"), [("gloo", UsageError), ("cpu:gloo,cuda:nccl", GroupLost)])
def test_where_some_workers_have_no_card_the_error_names_them(
    backend: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those end; the others have lost them, and train on without them."""
    store = HashStore()
    others = PrefixStore("edl/3/gpus", store)
    others.add("counted", 1)
    others.add("at 00" if backend == "gloo" else "lacking", 1)
    others.set("lacks 1", "rank 1 on other")
    others.set("all read", "")
    monkeypatch.setattr(TorchGroup, "_open_store", lambda self: store)
    lacking = "rank 0 on n" if backend == "gloo" else "rank 1 on other"
    group = TorchGroup(seat(2))
    with pytest.raises(kind, match=f"round 3: {lacking}: no GPU that torch can use with NCCL, and other workers"):
        group.connect(backend)
    group.abort()


@pytest.mark.usefixtures("card")
def test_a_place_is_a_host_and_a_card_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    here = nccl.place(torch.device("cuda", 0))
    assert len(here) == 8 and nccl.place(torch.device("cuda", 0)) == here
    monkeypatch.setenv("NCCL_HOSTID", "one")
    one = nccl.place(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(pci_bus_id=7))
    assert len({here, one, nccl.place(torch.device("cuda", 0))}) == 3


class Blocked(Backend):
    """Its abort returns when all others have begun, as if the device had to finish their kernels first."""

    def __init__(self, begun: threading.Barrier) -> None:
        super().__init__()
        self._begun = begun

    def abort(self) -> None:
        self._begun.wait()
        super().abort()


def test_all_are_aborted_together(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Barrier(3, timeout=60)
    blocked = [Blocked(begun) for _ in range(3)]
    nccl.abort([*map(Group, blocked), Group(None)])
    assert [one.calls for one in blocked] == [["abort"]] * 3
    assert not caplog.records
    nccl.abort([Group(None)])


def test_a_group_that_cannot_be_aborted_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("Timeout during ProcessGroup abort")

    first, second = Backend(), Backend()
    monkeypatch.setattr(first, "abort", fail)
    nccl.abort([Group(first), Group(second)])
    assert second.calls == ["abort"]
    assert "NCCL did not abort cleanly: Timeout during ProcessGroup abort" in caplog.text


# --- calls that never end --------------------------------------------------------------------------------------------


def test_an_error_is_a_hang_only_when_it_lasts() -> None:
    complaint = nccl.Complaint(timeout_s=10)
    assert complaint.overdue(["TIMEOUT"], 100) == ""
    assert complaint.overdue(["TIMEOUT"], 109.9) == ""
    assert complaint.overdue([], 110) == "", "gone again"
    assert complaint.overdue(["COMM_ERROR"], 111) == ""
    assert complaint.overdue(["COMM_ERROR"], 121) == "COMM_ERROR"


class Looks(threading.Event):
    """Aborted after so many looks; no time passes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(
    ("error", "timeout_s", "looks", "ends"),
    [("TIMEOUT", 0.0, 1, True), ("TIMEOUT", 1e9, 5, False), ("TIMEOUT", 0.0, 0, False), ("SUCCESS", 0.0, 5, False)],
)
def test_a_worker_whose_collective_hangs_ends_unless_the_round_ends(
    error: str, timeout_s: float, looks: int, ends: bool, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(nccl.Complaint.__init__, "__defaults__", (timeout_s,))
    backend = Backend()
    backend.error = error
    ended: list[bool] = []
    watched = nccl.WatchedGroups(lambda: [Group(None), Group(backend)], lambda: "", Looks(looks), 3)
    nccl.watch(watched, lambda: ended.append(True))
    assert bool(ended) is ends
    assert backend.calls == [], "it is not aborted: half a sum must not reach a commit"
    assert ("round 3: NCCL reports TIMEOUT" in capfd.readouterr().err) is ends


def test_a_torch_that_reports_no_errors_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nccl._note_once.cache_clear()
    nccl.watch(nccl.WatchedGroups(list, str, Looks(0), 2), lambda: pytest.fail("it is over"))
    assert capfd.readouterr().err == ""
    monkeypatch.delattr(Backend, "get_error")
    for number in (3, 4):
        watched = nccl.WatchedGroups(lambda: [Group(Backend())], str, Looks(5), number)
        nccl.watch(watched, lambda: pytest.fail("nothing is known"))
    assert capfd.readouterr().err.count("does not report NCCL calls that hang; --hang-timeout finds them") == 1


@pytest.mark.parametrize("reports", [True, False])
def test_a_worker_that_cannot_go_on_after_a_failure_ends(
    reports: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its device may wait for a collective that only the abort would end, which comes with the end of the round."""
    monkeypatch.setattr(nccl.Complaint.__init__, "__defaults__", (1e9,))
    monkeypatch.setattr(nccl, "ERROR_TIMEOUT_S", 0.0)
    if not reports:
        monkeypatch.delattr(Backend, "get_error")
    ended: list[bool] = []
    watched = nccl.WatchedGroups(lambda: [Group(Backend())], lambda: "a collective failed: reset", Looks(1), 3)
    nccl.watch(watched, lambda: ended.append(True))
    assert ended
    assert "round 3: a collective failed: reset, and no worker is lost" in capfd.readouterr().err


def test_gloo_that_stands_for_cards_is_left_alone() -> None:
    """As it does where torch was built with CUDA and the machine has no card."""
    backend = Backend()
    backend.name = lambda: "gloo"  # type: ignore[method-assign]
    assert not nccl.has_nccl(Group(backend))
    nccl.form(Group(backend), "cuda:0")
    nccl.abort([Group(backend)])
    assert not backend.calls
