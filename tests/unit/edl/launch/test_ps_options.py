"""Launching jobs with parameter servers: options, and pservers that are kept running."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from edl.adapters.clock import SystemClock
from edl.config import JobSpec, NodeRange
from edl.errors import SettingError, UsageError, WorkerStartError
from edl.job_records import Mode, Replication, Training
from edl.launch import __main__ as program
from edl.launch import helpers as helping
from edl.launch import pservers
from edl.launch.cli import settings_of
from edl.launch.helper_process import HelperProcess
from edl.launch.helpers import HelperDeps, Helpers
from edl.launch.options.agreement import agreed, differences
from edl.launch.pservers import Pservers, secret_of
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import LaunchSettings, PserverSettings, ServerSettings
from edl.ports import Put
from edl.testing.memory_store import MemoryStore
from edl.types import JobId
from edl.wire import plain
from edl.wire.keys import JobKeys
from tests.support import launching

STORE, JOB = "--rdzv-endpoint=h:2379", "--rdzv-id=j"


def read(tmp_path: Path, *arguments: str, source: str = "import edl.torch.ps as ps\n") -> LaunchSettings:
    """Settings for a script that uses edl's own pservers, unless ``source`` does otherwise."""
    script = tmp_path / "train.py"
    script.write_text(source)
    return launching.read(f"--log-dir={tmp_path}", *arguments, str(script))


def bounds(settings: LaunchSettings) -> tuple[int, ...]:
    assert settings.spec.servers is not None
    return settings.spec.servers.servers


# --- options ---------------------------------------------------------------------------------------------------------


def test_a_collective_job_has_nothing_of_it(tmp_path: Path) -> None:
    settings = read(tmp_path)
    assert (settings.spec.servers, settings.spec.independent, settings.servers) == (None, False, ServerSettings())
    assert agreed(settings.spec)["--run-mode"] == "collective"


def test_sizes_are_of_the_whole_job(tmp_path: Path) -> None:
    settings = read(tmp_path, STORE, "--servers=2:8", "--trainers=2:6", "--nproc-per-node=2", "--servers-per-node=3")
    assert settings.spec.independent
    assert (settings.spec.nodes, settings.slots) == (NodeRange(1, 3), 2)
    assert bounds(settings) == (2, 8)
    assert settings.servers.count == 3


def test_how_it_trains_is_agreed_on(tmp_path: Path) -> None:
    options = ["--ps-mode=sync", "--staleness=4", "--staleness-lr", "--geo-steps=7", "--replication=async"]
    more = ["--replication-lag=0.25", "--ps-save-every=60", "--servers=3"]
    settings = read(tmp_path, *options, *more)
    wanted = Training(Mode.SYNC, 4, True, 7, Replication.ASYNC, 0.25, (3, 3), 60.0)
    assert settings.spec.servers == wanted
    assert plain.loads(JobSpec, plain.dumps(settings.spec)) == settings.spec
    other = read(tmp_path, *options, "--servers=3", "--ps-save-every=60")
    (difference,) = differences(
        settings.spec, JobSpec(settings.spec.job, settings.spec.nodes, servers=other.spec.servers)
    )
    assert difference == "--replication-lag=0.25 (the running job has 0.5)"
    assert read(tmp_path, "--run-mode=ps").spec.servers == Training()


@pytest.mark.parametrize(
    ("arguments", "trainers", "servers"),
    [
        (["--run_mode", "ps", "--server_num", "2", "--trainer_num", "3"], 3, 2),
        (["--run_mode=ps", "--server_num=2", "--worker_num=3"], 3, 2),
        (["--run-mode=ps", "--nproc_per_node=4"], 4, 1),
        (["--server_nnodes=1:2", "--server_num=2", "--nproc_per_node=2"], 2, 2),
        (["--run-mode=ps", "--role=trainer"], 1, 0),
        (["--role=trainer", "--trainers=1:2"], 1, 0),
    ],
)
def test_other_spellings(tmp_path: Path, arguments: list[str], trainers: int, servers: int) -> None:
    settings = read(tmp_path, *arguments)
    assert (settings.slots, settings.servers.count, settings.spec.independent) == (trainers, servers, True)


def test_pservers_counted_by_nodes(tmp_path: Path) -> None:
    settings = read(tmp_path, "--server_nnodes=2:3", "--server_num=2")
    assert bounds(settings) == (4, 6)


def test_lists_of_addresses_say_who_is_here(tmp_path: Path) -> None:
    servers = "--servers=127.0.0.1:6171,127.0.0.1:6172,192.0.2.1:6171"
    trainers = "--trainers=127.0.0.1:6181,192.0.2.1:6181,192.0.2.1:6182"
    settings = read(tmp_path, STORE, servers, trainers)
    assert (settings.spec.nodes, settings.slots) == (NodeRange(2, 2), 1)
    assert (settings.servers.count, settings.servers.ports, settings.servers.host) == (2, (6171, 6172), "127.0.0.1")
    assert settings.servers.listed == ("127.0.0.1:6171", "127.0.0.1:6172", "192.0.2.1:6171")
    assert bounds(settings) == (3, 3)
    elsewhere = read(tmp_path, STORE, servers, trainers, "--local-addr=192.0.2.1")
    assert (elsewhere.slots, elsewhere.servers.count) == (2, 1)


def test_a_host_that_is_only_named_for_pservers_trains_nothing(tmp_path: Path) -> None:
    options = ["--servers=127.0.0.1:6171", "--trainers=192.0.2.1:6181", STORE, JOB]
    parameters = program.run.make_context("edl-run", [*options, "train.py"]).params
    settings = settings_of(ResolvedOptions(parameters))
    assert isinstance(settings, PserverSettings)
    assert settings.servers.ports == (6171,)
    assert read(tmp_path, "--run-mode=ps").slots == 1


def test_a_launcher_with_only_pservers() -> None:
    options = ["--role=pserver", STORE, JOB, "--servers-per-node=2", "--pserver-memory=3G", "--shutdown-timeout=8"]
    parameters = program.run.make_context("edl-run", list(options)).params
    settings = settings_of(ResolvedOptions(parameters))
    assert isinstance(settings, PserverSettings)
    assert (settings.helper.job, settings.helper.grace_s) == ("j", 8.0)
    assert settings.servers == ServerSettings(2, memory_bytes=3 << 30)
    with pytest.raises(Exception, match="runs no script"):
        program.run.main(args=[*options, "train.py"], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--staleness=3"], "--staleness=3: applies to parameter servers only. Add --run-mode=ps"),
        (["--pserver-memory=3G"], "--pserver-memory=3G: applies to parameter servers only"),
        (["--run-mode=ps", "--hang-timeout=9"], "--hang-timeout=9: trainers of --run-mode=ps do not wait"),
        (["--servers=0"], "--servers=0: must be N or MIN:MAX with 1 <= MIN <= MAX"),
        (["--servers=4:2"], "--servers=4:2: must be N or MIN:MAX"),
        (["--servers=1:2000"], "--servers=1:2000: at most 1000 pservers"),
        (["--servers=here"], "--servers=here: is neither MIN:MAX nor a list of addresses"),
        (["--servers=h:99999999"], "is neither MIN:MAX nor a list"),
        (["--servers=h:1,h:1"], "--servers=h:1: is listed twice"),
        (["--trainers=1:3", "--nproc-per-node=2"], "cannot be split into nodes of 2 trainers each .* --trainers=2:2"),
        (["--trainers=2:4", "--nnodes=1:2"], "means 2:4 nodes, but --nnodes=1:2 is given"),
        (["--trainer_num=0"], "--trainer_num=0: must be a number from 1 to 256"),
        (["--trainer_num=2", "--nproc-per-node=3"], "--trainer_num=2: --nproc-per-node=3 contradicts it"),
        (["--servers-per-node=x"], "--servers-per-node=x: must be a number from 0 to 256"),
        (["--trainers=192.0.2.1:1", "--servers=192.0.2.1:2"], "names an address of this host"),
        (["--run-mode=ps", "--staleness=-1"], "--staleness=-1: must be a whole number"),
        (["--run-mode=ps", "--staleness=9999999999"], "--staleness=9999999999: must be from 0 to"),
        (["--run-mode=ps", "--geo-steps=0"], "--geo-steps=0: must be from 1 to"),
        (["--run-mode=ps", "--replication-lag=nan"], "--replication-lag=nan: must be 0 or more, and finite"),
        (["--run-mode=ps", "--replication-lag=x"], "--replication-lag=x: must be a number of seconds"),
        (["--run-mode=ps", "--ps-save-every=-1"], "--ps-save-every=-1.0: must be 0 or more"),
        (["--run-mode=ps", "--pserver-memory=much"], "--pserver-memory=much: not an amount of memory"),
        (["--run-mode=ps", "--nnodes=2:1"], "--nnodes"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, arguments: list[str], text: str) -> None:
    with pytest.raises(SettingError, match=text) as refused:
        read(tmp_path, STORE, *arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([JOB], "pservers join a job that runs elsewhere"),
        ([STORE], "--role=pserver needs the name of the job"),
        ([STORE, JOB, "--servers-per-node=0"], "--role=pserver needs at least 1"),
    ],
)
def test_a_launcher_of_pservers_needs_to_know_where_the_job_is(arguments: list[str], text: str) -> None:
    parameters = program.run.make_context("edl-run", ["--role=pserver", *arguments]).params
    with pytest.raises(UsageError, match=text):
        settings_of(ResolvedOptions(parameters))


def test_a_missing_package_is_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pservers.check_packages()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"needs numpy and xxhash. Run: pip install 'edl\[ps\]'"):
        pservers.check_packages()


# --- processes and their keys ----------------------------------------------------------------------------------------


class FakeProcess:
    """A fake ``HelperProcess`` of a pserver."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ready = {"port": 5000 + pid, "path": f"p{pid}", "machine": "m"}
        self.masterless = self.writes = self.asked = False
        self._over = asyncio.Event()
        self._how = ""

    async def look(self, limit_s: float) -> None:
        """Its state is always up to date."""

    async def ended(self) -> str:
        await self._over.wait()
        return self._how

    def end(self, how: str) -> None:
        self._how = self._how or how
        self._over.set()

    @property
    def over(self) -> str:
        return self._how

    def kill(self) -> None:
        self.end("was killed")

    def ask_to_end(self) -> None:
        self.asked = True

    async def stop(self, grace_s: float, *, drains: bool = False) -> None:
        self.end(f"was stopped, with {grace_s:g} s")


class FakePservers(Pservers):
    """Pservers with real keys and fake processes."""

    def __init__(self, count: int, shutdown_s: float = 20.0) -> None:
        super().__init__(
            ServerSettings(count, memory_bytes=77),
            JobId("j"),
            "s",
            checkpoint_dir="",
            shutdown_s=shutdown_s,
            lease_s=1.0,
        )
        self.started: dict[str, FakeProcess] = {}
        self.failures = 0

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        if self.failures:
            self.failures -= 1
            raise WorkerStartError("a pserver process ended with status 1. Its output is above")
        self.started[name] = FakeProcess(len(self.started) + 1)
        return self.started[name]  # type: ignore[return-value]


class Bench:
    """Pservers of one launcher, and the store they are known in."""

    def __init__(self, kind: FakePservers, store: MemoryStore, node: str = "a") -> None:
        self.store, self.kind = store, kind
        self.lines: list[str] = []
        self.kit = HelperDeps(store, JobKeys(JobId("j")), 2.0, node, "10.0.0.1", self.lines.append)
        self.helpers = Helpers(self.kit, kind)
        self.task = asyncio.ensure_future(self.helpers.run())

    def keys(self) -> dict[str, Any]:
        prefix = "/edl/j/helpers/ps/servers/"
        return {e.key[len(prefix) :]: json.loads(e.value) for e in self.store.read_now(prefix).entries}

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline_s = SystemClock().now_s() + 20
        while not condition():
            assert SystemClock().now_s() < deadline_s, what
            assert not self.task.done() or self.task.exception() is None, self.task
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.helpers.leave()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helping, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(helping, "RETRY_S", 0.002)


def on_bench(*counts: int) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Run a test with a bench for each count, all with one store."""

    def wrap(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def run() -> None:
            async def main() -> None:
                store = MemoryStore(SystemClock())
                benches = [Bench(FakePservers(n), store, chr(ord("a") + i)) for i, n in enumerate(counts)]
                await benches[0].until(lambda: len(benches[0].keys()) == sum(counts), "all known")
                try:
                    await test(*benches)
                finally:
                    for bench in benches:
                        await bench.close()

            asyncio.run(main())

        run.__name__ = test.__name__
        return run

    return wrap


@on_bench(2)
async def test_each_has_a_key(bench: Bench) -> None:
    assert bench.keys() == {
        f"a-{n}": {
            "host": "10.0.0.1", "port": 5000 + n, "path": f"p{n}", "machine": "m", "secret": "s", "most_bytes": 77,
            "saves": False,
        }
        for n in (1, 2)
    }  # fmt: skip


@on_bench(2)
async def test_one_that_dies_is_replaced_under_a_new_name(bench: Bench) -> None:
    bench.kind.failures = 2
    bench.kind.started["a-1"].end("was killed by signal 9")
    await bench.until(lambda: sorted(bench.keys()) == ["a-2", "a-5"], "the next one, after two that did not start")
    assert any("a-1 (pid 1) was killed by signal 9; starting another one" in line for line in bench.lines)


@on_bench(1)
async def test_names_are_not_used_again_by_the_next_launcher_of_that_name(bench: Bench) -> None:
    next_one = Bench(FakePservers(1), bench.store)  # the keys of the one before have not expired
    await next_one.until(lambda: sorted(next_one.keys()) == ["a-1", "a-2"], "both are known")
    await next_one.close()
    assert sorted(bench.keys()) == ["a-1"]


@on_bench(1, 1)
async def test_those_that_drain_end_by_themselves(a: Bench, b: Bench) -> None:
    a.helpers.drain()
    assert a.kind.started["a-1"].asked
    await a.until(lambda: a.keys()["a-1"].get("draining"), "its key says so")
    assert "draining" not in a.keys()["b-1"]
    draining = asyncio.ensure_future(a.helpers.drained())
    await asyncio.sleep(0)
    assert not draining.done()
    a.kind.started["a-1"].end("ended with status 0")
    await draining
    await a.until(lambda: sorted(a.keys()) == ["b-1"], "its key is gone")
    assert len(a.kind.started) == 1, "nobody takes its place"
    assert any(line.endswith("ended with status 0") for line in a.lines)


@on_bench(1)
async def test_drains_need_a_target(bench: Bench) -> None:
    bench.helpers.drain()
    await bench.until(lambda: bench.keys()["a-1"].get("draining"), "its key says so")
    await bench.helpers.drained()
    assert not bench.kind.started["a-1"].over
    process = bench.kind.started["a-1"]
    await bench.close()
    assert process.over == "was stopped, with 0 s"
    assert bench.keys() == {}


@on_bench(1, 1)
async def test_nor_into_those_that_drain_themselves(a: Bench, b: Bench) -> None:
    for bench in (a, b):
        bench.helpers.drain()
    await asyncio.gather(a.helpers.drained(), b.helpers.drained())
    assert not a.kind.started["a-1"].over


@on_bench(1, 1)
async def test_a_second_signal_hurries(a: Bench, b: Bench) -> None:
    a.helpers.drain()
    a.helpers.kill()
    await a.helpers.drained()
    assert a.kind.started["a-1"].over == "was killed"


@on_bench(2, 1)
async def test_without_its_lease_a_launcher_kills_pservers_without_a_master(a: Bench, b: Bench) -> None:
    a.kind.started["a-2"].masterless = True
    (lease,) = {entry.lease for entry in a.store.read_now("/edl/j/helpers/ps/servers/a-").entries}
    a.store.revoke_now(lease)
    await a.until(lambda: bool(a.kind.started["a-2"].over), "it is killed")
    await a.until(lambda: sorted(a.keys()) == ["a-1", "a-3", "b-1"], "there is a new one")
    assert not a.kind.started["a-1"].over and not b.kind.started["b-1"].over


@on_bench(1)
async def test_without_the_store_pservers_with_a_master_go_on(bench: Bench) -> None:
    bench.store.available = False
    await bench.until(lambda: any("the store does not answer" in line for line in bench.lines), "it is noticed")
    bench.helpers._renewed_s -= 2.0  # for as long as the lease lasts
    await bench.until(lambda: _looked(bench), "it has looked again")
    assert not bench.kind.started["a-1"].over
    bench.kind.started["a-1"].masterless = True
    await bench.until(lambda: bench.kind.started["a-1"].over, "it is killed")


_looks = itertools.count()


def _looked(bench: Bench) -> bool:
    return next(_looks) > 5


def test_those_that_never_start_are_an_error() -> None:
    async def main() -> None:
        kind = FakePservers(1)
        kind.failures = helping.START_TRIES
        bench = Bench(kind, MemoryStore(SystemClock()))
        with pytest.raises(WorkerStartError, match="Its output is above"):
            await bench.task
        await bench.close()

    asyncio.run(main())


def test_the_secret_follows_from_the_job_alone() -> None:
    assert secret_of("t") == secret_of("t") != secret_of("u")
    assert secret_of("t") != "t" and len(secret_of("t")) == 64


def test_a_key_that_is_there_in_another_form_is_left_alone() -> None:
    """Of another program, or of a later version."""

    async def main() -> None:
        store = MemoryStore(SystemClock())
        await store.write([Put("/edl/j/helpers/ps/servers/a-strange", b"x", 0)])
        bench = Bench(FakePservers(1), store)
        await bench.until(lambda: len(store.read_now("/edl/j/helpers/ps/servers/").entries) == 2, "known")
        await bench.close()

    asyncio.run(main())
