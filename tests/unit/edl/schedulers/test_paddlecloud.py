"""PaddleCloud's key: what it may hold, who writes it, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from edl.config import NodeRange
from edl.errors import SchedulerError, SettingError
from edl.job_records import SchedulerChoice, SizeOwner
from edl.launch.scale_options import KINDS, wanted_from
from edl.ports import Delete, Put
from edl.schedulers import paddlecloud
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.paddlecloud import PaddleCloud, check, key_of, make, read_nodes
from edl.schedulers.port import Disruption, Observation, SchedulerSize, Sized
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import JobId

KEY = key_of("ml-train")


class Setup:
    def __init__(self, first: int = 2, pods: Any = None) -> None:
        self.store = MemoryStore(FakeClock())
        self.said: list[str] = []
        self.cloud = PaddleCloud(self.store, KEY, first, self.said.append, pods, mine=False)

    def write(self, value: bytes) -> None:
        self.store.write_now([Put(KEY, value)])

    @property
    def value(self) -> bytes:
        return b"".join(entry.value for entry in self.store.read_now(KEY).entries if entry.key == KEY)


def play(scenario: Callable[[Setup], Coroutine[Any, Any, None]], **how: Any) -> Setup:
    setup = Setup(**how)
    asyncio.run(asyncio.wait_for(scenario(setup), 60))
    return setup


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddlecloud, "RETRY_S", 0)
    for name in ("PADDLE_ELASTIC_SERVER", "PADDLE_ELASTIC_JOB_ID", "PADDLE_ELASTIC_NP"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("3", 3), (" 3\n", 3), ("003", 3), ("1000000", 1_000_000)]
    + [
        (junk, 0)
        for junk in ("", "0", "-1", "+2", "2:4", "three", "1e3", "3.0", "٣", "1000001", "9" * 300, "\0", "2 3")
    ],
)
def test_numbers_of_nodes(text: str, nodes: int) -> None:
    assert read_nodes(text) == nodes


def test_the_key_is_made_for_the_operators_guard_and_only_then() -> None:
    async def scenario(setup: Setup) -> None:
        assert await setup.cloud.current() == SchedulerSize(2)
        assert setup.value == b"2"
        setup.write(b"5")
        assert await setup.cloud.current() == SchedulerSize(5)
        assert setup.value == b"5"

    play(scenario)


def test_what_others_write_is_seen_and_junk_is_not() -> None:
    async def scenario(setup: Setup) -> None:
        setup.store.write_now([Put(KEY + "x", b"7")])
        watch = setup.cloud.watch()
        assert await watch.__anext__() == Sized(SchedulerSize(2))
        for value in (b"three", b"\xff\xfe", b"0", b"2", b"3", b"9" * 1000, b"3", b"1"):
            setup.write(value)
        assert [await watch.__anext__() for _ in range(2)] == [Sized(SchedulerSize(3)), Sized(SchedulerSize(1))]
        setup.write(b"four")
        setup.write(b"6")
        assert await watch.__anext__() == Sized(SchedulerSize(6))
        await watch.aclose()  # type: ignore[attr-defined]

    setup = play(scenario)
    assert f"PaddleCloud ({KEY}) holds 'three', which is not a number of nodes; keeping 2" in setup.said
    assert f"PaddleCloud ({KEY}) holds 'four', which is not a number of nodes; keeping 1" in setup.said


def test_junk_is_told_of_as_long_as_it_stands_there() -> None:
    async def scenario(setup: Setup) -> None:
        setup.write(b"2:4")
        size = await setup.cloud.current()
        assert (size.nodes, size.detail) == (2, "the key holds '2:4', which is not a number of nodes")
        await setup.cloud.current()
        setup.write(b"4")
        assert await setup.cloud.current() == SchedulerSize(4)

    assert len(play(scenario).said) == 1


def test_a_key_that_is_deleted_is_made_again() -> None:
    async def scenario(setup: Setup) -> None:
        watch = setup.cloud.watch()
        await watch.__anext__()
        setup.write(b"4")
        assert await watch.__anext__() == Sized(SchedulerSize(4))
        setup.store.write_now([Delete(KEY)])
        seen = asyncio.ensure_future(watch.__anext__())
        for _ in range(100):
            await asyncio.sleep(0)
        assert setup.value == b"4"
        setup.write(b"5")
        assert await seen == Sized(SchedulerSize(5))
        await watch.aclose()  # type: ignore[attr-defined]

    play(scenario)


class Pods:
    """An adapter for PaddleJob."""

    name = "paddlejob/train"
    indexed = True
    ask_none_at_end = False

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.observations: Sequence[Observation] = ()

    async def current(self) -> SchedulerSize:
        raise AssertionError("the key says how many")

    async def request(self, nodes: int, reason: str) -> None:
        self.calls.append(("request", nodes))

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        self.calls.append(("release", tuple(names), nodes))

    async def watch(self) -> AsyncIterator[Observation]:
        for observation in self.observations:
            yield observation
        raise SchedulerError("403", retry=False)

    async def close(self) -> None:
        self.calls.append("close")


def test_the_master_writes_and_a_paddlejob_makes_the_pods() -> None:
    pods = Pods()
    pods.observations = (Sized(SchedulerSize(9)), Disruption("train-worker-1", "evicted"))

    async def scenario(setup: Setup) -> None:
        await setup.cloud.request(3, "more")
        assert setup.value == b"3"
        revision = setup.store.revision
        await setup.cloud.request(3, "more")
        assert setup.store.revision == revision, "asking twice changes nothing"
        await setup.cloud.request(1, "a request takes nothing away")
        assert setup.value == b"3"
        await setup.cloud.release(["c"], 2, "fewer")
        await setup.cloud.release(["c"], 4, "a release gives nothing")
        assert setup.value == b"2"
        await setup.cloud.release(["a", "b"], 0, "the job has ended")
        assert setup.value == b"2"
        watch = setup.cloud.watch()
        seen = [await watch.__anext__() for _ in range(2)]
        assert Disruption("train-worker-1", "evicted") in seen and Sized(SchedulerSize(2)) in seen
        await watch.aclose()  # type: ignore[attr-defined]
        await setup.cloud.close()

    assert play(scenario, pods=pods).cloud.indexed and not Setup().cloud.indexed
    requests = [("request", 3), ("request", 3), ("request", 1)]
    releases = [("release", ("c",), 2), ("release", ("c",), 4), ("release", ("a", "b"), 0)]
    assert pods.calls == [*requests, *releases, "close"]


def test_a_store_that_is_away_is_worth_another_try() -> None:
    async def scenario(setup: Setup) -> None:
        setup.store.available = False
        with pytest.raises(SchedulerError) as error:
            await setup.cloud.current()
        assert error.value.retry
        watch = setup.cloud.watch()
        first = asyncio.ensure_future(watch.__anext__())
        for _ in range(5):
            await asyncio.sleep(0)
        setup.store.available = True
        assert await first == Sized(SchedulerSize(2))
        await watch.aclose()  # type: ignore[attr-defined]

    play(scenario)


# --- how it is made --------------------------------------------------------------------------------------------------


def deps(tmp_path: Path, environment: dict[str, str], **conf: str) -> tuple[SchedulerDeps, list[Sequence[str]]]:
    opened: list[Sequence[str]] = []

    def open_store(endpoints: Sequence[str]) -> MemoryStore:
        opened.append(endpoints)
        return MemoryStore(FakeClock())

    return (
        SchedulerDeps(
            *(
                SchedulerChoice("paddlecloud", conf=conf, owner=SizeOwner.EXTERNAL),
                JobId("job"),
                NodeRange(1, 4),
                "n0",
                FakeClock(),
            ),
            log=print,
            launcher=(),
            environment=environment,
            runtime_folder=tmp_path,
            log_folder=tmp_path,
            shutdown_s=30.0,
            store=MemoryStore(FakeClock()),
            beside=dict,
            open_store=open_store,
        ),
        opened,
    )


def test_where_the_key_is_and_what_is_written_there(tmp_path: Path) -> None:
    told, opened = deps(tmp_path, {})
    assert make(told).name == "PaddleCloud (/paddle/job/np)"
    assert opened == []
    assert asyncio.run(make(told).current()) == SchedulerSize(4), "the maximum, as if nobody had asked"
    environment = {"PADDLE_ELASTIC_SERVER": "etcd://e1:2379, e2:2379/", "PADDLE_ELASTIC_JOB_ID": "ml-train"}
    told, opened = deps(tmp_path, {**environment, "PADDLE_ELASTIC_NP": "3"})
    made = make(told)
    assert made.name == f"PaddleCloud ({KEY})"
    assert opened == [("e1:2379", "e2:2379")]
    assert asyncio.run(made.current()) == SchedulerSize(3)
    told, opened = deps(tmp_path, {**environment, "PADDLE_ELASTIC_NP": "2:4"}, server="e3:1;[::1]:2")
    assert asyncio.run(make(told).current()) == SchedulerSize(4)
    assert opened == [("e3:1", "[::1]:2")]


@pytest.mark.parametrize("address", ["etcd", "e1:0", "e1:70000", "http://e1:2379/x", "e 1:2"])
def test_bad_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_ELASTIC_SERVER", address)
    with pytest.raises(SettingError, match="PADDLE_ELASTIC_SERVER"):
        check(SchedulerChoice("paddlecloud"))
    with pytest.raises(SettingError, match="scheduler-conf server"):
        check(SchedulerChoice("paddlecloud", conf={"server": address}))


def test_on_the_command_line() -> None:
    options = {"scheduler": "paddlecloud", "scheduler_conf": "", "scale_owner": "", "standalone": False}
    wanted = wanted_from(options)
    assert wanted is not None and wanted.owner is SizeOwner.EXTERNAL
    with pytest.raises(SettingError, match="has no effect without paddlejob=NAME"):
        wanted_from({**options, "scheduler_conf": "namespace=ml"})
    assert {"server", "paddlejob", "namespace"} <= set(KINDS["paddlecloud"].conf)


def test_a_paddlejob_is_checked_and_made_as_its_own_adapter_says(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    conf = {"paddlejob": "train", "api": "http://127.0.0.1:1", "namespace": "ml", "token_file": str(token)}
    check(SchedulerChoice("paddlecloud", conf=conf, owner=SizeOwner.MASTER))
    with pytest.raises(SettingError):
        check(SchedulerChoice("paddlecloud", conf={**conf, "timeout": "soon"}, owner=SizeOwner.MASTER))
    told, _ = deps(tmp_path, {}, **conf)
    made = make(told)
    assert made.indexed

    async def scenario() -> None:
        with pytest.raises(SchedulerError, match="train") as error:  # nobody answers there
            await made.request(3, "more")
        assert error.value.retry
        await made.close()

    asyncio.run(scenario())
    assert told.store.read_now(key_of("job")).entries == ()  # type: ignore[attr-defined]


def test_pods_that_may_not_be_seen_for_a_while_are_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddlecloud, "REFUSED_S", 0, raising=False)

    class Refused(Pods):
        refusals = 2

        async def watch(self) -> AsyncIterator[Observation]:
            self.refusals -= 1
            if self.refusals >= 0:
                raise SchedulerError("403", retry=False)
            yield Disruption("train-worker-1", "evicted")
            await asyncio.Event().wait()

    async def scenario(on: Setup) -> None:
        async for observation in on.cloud.watch():
            if isinstance(observation, Disruption):
                return

    said = play(scenario, pods=Refused()).said
    assert said == ["403 (retrying every 0 s; notices of pods that will be removed come later)"]
