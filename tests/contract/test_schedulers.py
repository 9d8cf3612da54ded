"""Every rule of the ``Scheduler`` docstrings, on each adapter that can be run here.

A new adapter adds a ``Setup``: a class that makes schedulers of one job, and a line in ``SETUPS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from edl.adapters.clock import SystemClock
from edl.config import NodeRange
from edl.errors import SchedulerError
from edl.job_records import SchedulerChoice, SizeOwner
from edl.schedulers import hook, kubernetes, process, slurm
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.port import Disruption, Observation, Scheduler, SchedulerSize, Sized
from edl.testing.clock import FakeClock
from edl.testing.memory_scheduler import MemoryScheduler
from edl.testing.memory_store import MemoryStore
from edl.types import JobId
from tests.kubernetes_fake.cluster import ADMIN, FakeCluster
from tests.process.slurm_fixture import MEMORY_MB, Slurm

LIMIT_S = 60.0


class Setup(Protocol):
    """One kind of scheduler, and what a test may do to it."""

    def scheduler(self) -> Scheduler:
        """One for this job, with no node so far; each call another object for the same job, as of another Master."""
        ...

    def nodes(self) -> Sequence[str]:
        """Nodes that it has given, by name."""
        ...

    def leave(self, node: str) -> None:
        """A node's launcher ends by itself, as it does when the Master tells it to."""
        ...

    def close(self) -> None:
        """Release all nodes and stop."""
        ...


def deps(folder: Path, wanted: SchedulerChoice, **changes: Any) -> SchedulerDeps:
    """For adapters on this host."""
    made = SchedulerDeps(
        wanted=wanted,
        job=JobId("job"),
        nodes=NodeRange(1, 8),
        node="here",
        clock=SystemClock(),
        log=lambda text: None,
        launcher=("true",),
        environment=dict(os.environ),
        runtime_folder=folder / "run",
        log_folder=folder / "logs",
        shutdown_s=1.0,
        store=MemoryStore(FakeClock()),
        beside=dict,
        open_store=lambda endpoints: MemoryStore(FakeClock()),
    )
    return dataclasses.replace(made, **changes)


class MemorySetup:
    def __init__(self, folder: Path) -> None:
        self._one = MemoryScheduler()

    def scheduler(self) -> Scheduler:
        return self._one

    def nodes(self) -> Sequence[str]:
        return self._one.names

    def leave(self, node: str) -> None:
        pass  # it is the release that takes it off its list

    def close(self) -> None:
        pass


class ProcessSetup:
    """Processes that sleep take the place of launchers."""

    def __init__(self, folder: Path) -> None:
        sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
        self._deps = deps(folder, SchedulerChoice("process"), launcher=sleeper)

    def scheduler(self) -> Scheduler:
        return process.make(self._deps)

    def _files(self) -> dict[str, int]:
        found = {}
        for path in self._deps.runtime_folder.glob("*.json"):
            told = json.loads(path.read_text())
            if process.started_at(told["pid"]):
                found[told["node"]] = told["pid"]
        return found

    def nodes(self) -> Sequence[str]:
        return sorted(self._files())

    def leave(self, node: str) -> None:
        os.kill(self._files()[node], signal.SIGTERM)

    def close(self) -> None:
        for pid in self._files().values():
            os.kill(pid, signal.SIGKILL)


CLUSTER = """
import json, pathlib, sys
file = pathlib.Path(__file__).with_suffix(".json")
names = json.loads(file.read_text()) if file.exists() else []
match sys.argv[1]:
    case "current":
        print(json.dumps({"nodes": len(names), "detail": "all is well"}))
    case "request":
        names += [f"m{len(names) + n}" for n in range(int(sys.argv[2]) - len(names))]
    case "release":
        names = [name for name in names if name not in sys.argv[4:]][: int(sys.argv[2])]
    case _:
        sys.exit(64)
file.write_text(json.dumps(names))
"""


class ExecSetup:
    """A small program with a file for a cluster."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "cluster.py"
        self._script.write_text(CLUSTER)
        wanted = SchedulerChoice("exec", f"{sys.executable} {self._script}")
        hook.check(wanted)
        self._deps = deps(folder, wanted)

    def scheduler(self) -> Scheduler:
        return hook.make(self._deps)

    def nodes(self) -> Sequence[str]:
        file = self._script.with_suffix(".json")
        found: list[str] = json.loads(file.read_text()) if file.exists() else []
        return found

    def leave(self, node: str) -> None:
        pass

    def close(self) -> None:
        pass


class KubernetesSetup:
    """A StatefulSet of the fake cluster, with pods that sleep."""

    def __init__(self, folder: Path) -> None:
        self._cluster = FakeCluster(folder, {"PATH": os.environ["PATH"]})
        self._cluster.__enter__()
        labels = {"app": "train"}
        pod = {"containers": [{"name": "main", "command": ["sleep", "600"]}], "terminationGracePeriodSeconds": 1}
        template = {"metadata": {"labels": labels}, "spec": pod}
        spec = {"replicas": 0, "podManagementPolicy": "Parallel", "serviceName": "train", "template": template}
        spec["selector"] = {"matchLabels": labels}
        self._cluster.apply(
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "train"}, "spec": spec}
        )
        token = folder / "token"
        token.write_text(ADMIN)
        conf = {"api": self._cluster.server.url, "namespace": "default", "token_file": str(token)}
        if self._cluster.ca is not None:
            conf["ca"] = str(self._cluster.ca)
        wanted = SchedulerChoice("statefulset", "train", conf)
        kubernetes.check(wanted)
        self._deps = deps(folder, wanted)

    def scheduler(self) -> Scheduler:
        return kubernetes.make(self._deps)

    def nodes(self) -> Sequence[str]:
        return sorted(self._cluster.pods())

    def leave(self, node: str) -> None:
        pass  # its container would be started again, until the release takes the pod away

    def close(self) -> None:
        self._cluster.__exit__()


class SlurmSetup:
    """Real Slurm jobs, whose launchers sleep."""

    def __init__(self, folder: Path, cluster: Slurm) -> None:
        self._cluster = cluster
        wanted = SchedulerChoice("slurm", conf={"options": f"--partition=low --mem={MEMORY_MB}", "poll": "0.2"})
        sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
        self.deps = deps(folder, wanted, launcher=sleeper, environment=cluster.environment)

    def scheduler(self) -> Scheduler:
        return slurm.make(self.deps)

    def nodes(self) -> Sequence[str]:
        return [f"slurm-{task.number}" for task in self._cluster.tasks() if task.state == "RUNNING"]

    def leave(self, node: str) -> None:
        self._cluster.call("scancel", node.removeprefix("slurm-"))

    def close(self) -> None:
        self._cluster.clear()


SETUPS: dict[str, Callable[[Path], Setup]] = {
    "memory": MemorySetup,
    "process": ProcessSetup,
    "exec": ExecSetup,
    "kubernetes": KubernetesSetup,
}


@pytest.fixture(params=sorted([*SETUPS, "slurm"]))
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    if request.param == "slurm":
        made: Setup = SlurmSetup(tmp_path, request.getfixturevalue("slurm_cluster"))
    else:
        made = SETUPS[request.param](tmp_path)
    try:
        yield made
    finally:
        made.close()


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S / 2
    while not condition():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.02)


class TestEveryScheduler:
    def test_it_says_who_it_is(self, setup: Setup) -> None:
        one = setup.scheduler()
        assert one.name
        assert isinstance(one.indexed, bool)
        assert isinstance(one.ask_none_at_end, bool)

    def test_what_is_asked_for_is_what_it_means_to_give(self, setup: Setup) -> None:
        async def story() -> None:
            one = setup.scheduler()
            assert (await one.current()).nodes == 0
            await one.request(2, "two are wanted")
            assert (await one.current()).nodes == 2
            await eventually(lambda: len(setup.nodes()) == 2, "two nodes")
            await one.close()

        run(story())

    def test_asking_twice_changes_nothing(self, setup: Setup) -> None:
        async def story() -> None:
            one = setup.scheduler()
            await one.request(2, "")
            await eventually(lambda: len(setup.nodes()) == 2, "two nodes")
            before = list(setup.nodes())
            await one.request(2, "")
            assert (await one.current()).nodes == 2
            assert list(setup.nodes()) == before
            await one.close()

        run(story())

    def test_a_request_never_takes_nodes_away(self, setup: Setup) -> None:
        async def story() -> None:
            one = setup.scheduler()
            await one.request(3, "")
            await one.request(1, "")
            assert (await one.current()).nodes == 3
            await one.close()

        run(story())

    def test_a_release_takes_those_that_are_named(self, setup: Setup) -> None:
        async def story() -> None:
            one = setup.scheduler()
            await one.request(3, "")
            await eventually(lambda: len(setup.nodes()) == 3, "three nodes")
            gone = sorted(setup.nodes())[-1]
            setup.leave(gone)
            await one.release([gone], 2, "two are enough")
            await eventually(lambda: gone not in setup.nodes(), f"{gone} gone")
            assert (await one.current()).nodes == 2
            await one.release([gone], 2, "the answer was lost, so it is said again")
            assert (await one.current()).nodes == 2
            await one.close()

        run(story())

    def test_another_master_sees_the_same_and_takes_nothing_back(self, setup: Setup) -> None:
        async def story() -> None:
            one = setup.scheduler()
            await one.request(2, "")
            await eventually(lambda: len(setup.nodes()) == 2, "two nodes")
            before = list(setup.nodes())
            await one.close()
            other = setup.scheduler()
            assert (await other.current()).nodes == 2
            assert list(setup.nodes()) == before
            await other.close()

        run(story())

    def test_a_watch_begins_with_what_is_or_ends_at_once(self, setup: Setup) -> None:
        async def story() -> None:
            one = setup.scheduler()
            await one.request(2, "")
            watch = one.watch()
            with contextlib.suppress(StopAsyncIteration):
                first = await watch.__anext__()
                assert isinstance(first, Sized)
                assert first.size.nodes == 2
            await watch.aclose()  # type: ignore[attr-defined]
            await one.close()

        run(story())
        # asyncio leaves the socket of a TLS connection to the collector if its task is cancelled before the handshake
        # (``SSLProtocol._abort`` without a transport). Collected here, it warns in no other test.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


class TestProcess:
    def test_its_files_are_not_taken_for_other_processes(self, tmp_path: Path) -> None:
        setup = ProcessSetup(tmp_path)
        run(setup.scheduler().request(1, ""))
        (path,) = (tmp_path / "run").glob("*.json")
        told = json.loads(path.read_text())
        mine = {**told, "pid": os.getpid()}  # the number is that of another process by now: this one
        path.write_text(json.dumps(mine))
        one = process.make(setup._deps)
        assert run(one.current()) == SchedulerSize(0, 0)
        run(one.release([told["node"]], 0, ""))  # were it taken for the launcher, this test would end here
        os.kill(told["pid"], signal.SIGKILL)

    def test_damaged_files_are_removed(self, tmp_path: Path) -> None:
        setup = ProcessSetup(tmp_path)
        (tmp_path / "run").mkdir()
        for name, text in (("0", "{"), ("1", "[]"), ("2", '{"node": 3}'), ("3", "\0")):
            (tmp_path / "run" / f"{name}.json").write_text(text)
        assert run(setup.scheduler().current()).nodes == 0
        assert list((tmp_path / "run").glob("*.json")) == []

    def test_launchers_that_were_started_by_hand_count_and_get_no_signal(self, tmp_path: Path) -> None:
        by_hand = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            made = process.make(
                dataclasses.replace(ProcessSetup(tmp_path)._deps, beside=lambda: {by_hand.pid: "by-hand"})
            )
            run(made.request(2, ""))
            assert run(made.current()).nodes == 2
            (path,) = (tmp_path / "run").glob("*.json")
            told = json.loads(path.read_text())
            assert told["index"] == 1, "numbers begin above those of launchers started by hand"
            run(made.release(["by-hand"], 1, ""))
            assert by_hand.poll() is None
        finally:
            by_hand.kill()
            by_hand.wait()
            ProcessSetup(tmp_path).close()

    def test_one_that_does_not_leave_gets_a_sigterm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "BY_THEMSELVES_S", 0.2)
        setup = ProcessSetup(tmp_path)
        one = setup.scheduler()
        run(one.request(1, ""))
        run(one.release(setup.nodes(), 0, ""))
        run(eventually(lambda: not setup.nodes(), "the launcher is gone"))

    def test_one_that_is_slow_to_leave_gets_no_second_sigterm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second one would cut short what it still writes."""
        monkeypatch.setattr(process, "BY_THEMSELVES_S", 0.05)
        counts = (
            "import pathlib, signal\n"
            f"at = pathlib.Path({str(tmp_path / 'signals')!r})\n"
            "signal.signal(signal.SIGTERM, lambda *_: at.open('a').write('x'))\n"
            "at.touch()\n"
            "while True: signal.pause()\n"
        )
        made = deps(tmp_path, SchedulerChoice("process"), launcher=(sys.executable, "-c", counts))
        signals = tmp_path / "signals"

        async def body() -> None:
            scheduler = process.make(made)
            await scheduler.request(1, "")
            await eventually(signals.exists, "the launcher runs")
            ((pid, node),) = [
                (told["pid"], told["node"])
                for told in (json.loads(path.read_text()) for path in made.runtime_folder.glob("*.json"))
            ]
            try:
                for _ in range(3):
                    await scheduler.release([node], 0, "")
                await eventually(lambda: signals.read_text() == "x", "it got the signal")
                await scheduler.release([node], 0, "")
            finally:
                os.kill(pid, signal.SIGKILL)
            assert signals.read_text() == "x"

        run(body())

    def test_its_watch_tells_of_a_launcher_that_dies(self, tmp_path: Path) -> None:
        setup = ProcessSetup(tmp_path)

        async def story() -> None:
            one = setup.scheduler()
            await one.request(2, "")
            watch = one.watch()
            assert await watch.__anext__() == Sized(SchedulerSize(2, 0))
            setup.leave(setup.nodes()[0])
            assert (await watch.__anext__()).size.nodes == 1  # type: ignore[union-attr]

        try:
            run(story())
        finally:
            setup.close()

    def test_one_that_fails_at_once_is_told_of(self, tmp_path: Path) -> None:
        failing = dataclasses.replace(ProcessSetup(tmp_path)._deps, launcher=(sys.executable, "-c", "exit(3)"))
        one = process.make(failing)

        async def story() -> str:
            await one.request(1, "")
            async for seen in one.watch():
                if isinstance(seen, Sized) and seen.size.detail:
                    return seen.size.detail
            raise AssertionError("its watch has ended")

        assert "exited with status 3 soon after its start: see" in run(story())

    def test_no_program_is_a_matter_for_another_try(self, tmp_path: Path) -> None:
        one = process.make(dataclasses.replace(ProcessSetup(tmp_path)._deps, launcher=("/no/such/python",)))
        with pytest.raises(SchedulerError, match="cannot start a launcher on this host") as caught:
            run(one.request(1, ""))
        assert caught.value.retry
        assert run(one.current()).nodes == 0, "nothing is left of it"


def script(folder: Path, text: str, kind: str = "exec", **conf: str) -> Any:
    path = folder / "hook.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    wanted = SchedulerChoice(kind, str(path), conf, SizeOwner.EXTERNAL if kind == "discovery" else SizeOwner.MASTER)
    hook.check(wanted)
    return hook.make(deps(folder, wanted))


class TestExec:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("echo 3", SchedulerSize(3)),
            ('echo \'{"nodes": 3, "there": 1, "detail": "no room"}\'', SchedulerSize(3, 1, "no room")),
            ("echo 0", SchedulerSize(0)),
        ],
    )
    def test_what_it_may_print(self, tmp_path: Path, text: str, size: SchedulerSize) -> None:
        assert run(script(tmp_path, text).current()) == size

    @pytest.mark.parametrize(
        "text", ["true", "echo three", "echo '[]'", "echo -1", "echo '{}'", "echo true", "echo 1.5"]
    )
    def test_what_it_may_not(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(SchedulerError, match="neither a number nor JSON") as caught:
            run(script(tmp_path, text).current())
        assert caught.value.retry

    def test_how_it_is_called(self, tmp_path: Path) -> None:
        one = script(
            tmp_path,
            f'for word; do echo "$word"; done >> {tmp_path}/calls; echo $EDL_JOB_ID$EDL_NODE_ID >> {tmp_path}/calls; '
            f'echo "of $EDL_MASTER_NODE" >> {tmp_path}/calls',
        )
        run(one.request(3, "the job wants 3 nodes"))
        run(one.release(["n1", "n2"], 1, "1 is enough"))
        assert (tmp_path / "calls").read_text().splitlines() == [
            *("request", "3", "the job wants 3 nodes", "job", "of here"),
            *("release", "1", "1 is enough", "n1", "n2", "job", "of here"),
        ]

    @pytest.mark.parametrize(("status", "retry"), [(1, True), (75, True), (64, False), (77, False), (127, False)])
    def test_exit_statuses(self, tmp_path: Path, status: int, retry: bool) -> None:
        with pytest.raises(
            SchedulerError, match=rf"exited with status {status} and said: no quota .*request 3"
        ) as caught:
            run(script(tmp_path, f"echo no quota >&2; exit {status}").request(3, ""))
        assert caught.value.retry is retry

    def test_a_slow_one_is_killed_with_all_that_it_has_started(self, tmp_path: Path) -> None:
        one = script(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; sleep 300", timeout="0.5")
        with pytest.raises(SchedulerError, match=r"took longer than 0.5 s") as caught:
            run(one.request(3, ""))
        assert caught.value.retry
        child = int((tmp_path / "child").read_text())
        run(eventually(lambda: not process.started_at(child), "the child is gone"))

    def test_what_it_leaves_in_the_background_does_not_hold_it_up(self, tmp_path: Path) -> None:
        one = script(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child", timeout="20")
        begun_s = time.monotonic()
        run(one.request(3, ""))
        assert time.monotonic() - begun_s < 15
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)

    def test_a_flood_of_output_does_no_harm(self, tmp_path: Path) -> None:
        with pytest.raises(SchedulerError, match="printed more than 4 MiB"):
            run(script(tmp_path, "head -c 20000000 /dev/zero | tr '\\0' x").current())
        with pytest.raises(SchedulerError, match="neither a number") as caught:
            run(script(tmp_path, "head -c 2000000 /dev/zero | tr '\\0' x").current())
        assert len(str(caught.value)) < 1000


class TestDiscovery:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("a:4\nb:2\n", ("a", "b")),
            ("a\n\n# b\n10.0.0.1:1\n[fe80::1]:2", ("a", "10.0.0.1", "fe80::1")),
            ("a:0\nb", ("b",)),
            ("a:1\na:2", ("a",)),
        ],
    )
    def test_what_it_may_print(self, text: str, hosts: tuple[str, ...]) -> None:
        assert hook.read_hosts(text, "it") == hosts

    @pytest.mark.parametrize("text", ["", "\n", "a b", "a:x", "a:1:2", "# a"])
    def test_what_it_may_not(self, text: str) -> None:
        with pytest.raises(SchedulerError) as caught:
            hook.read_hosts(text, "it")
        assert caught.value.retry

    def test_hosts_come_and_go_and_a_failing_script_changes_nothing(self, tmp_path: Path) -> None:
        hosts = tmp_path / "hosts"
        hosts.write_text("a:1\nb:1\nc:1\n")
        one = script(tmp_path, f"cat {hosts}", "discovery", poll="0.02")

        async def story() -> list[Observation]:
            watch = one.watch()
            seen = [await watch.__anext__()]
            hosts.rename(tmp_path / "away")
            await asyncio.sleep(0.3)
            (tmp_path / "away").write_text("a:1\nc:1\n")
            (tmp_path / "away").rename(hosts)
            seen += [await watch.__anext__(), await watch.__anext__()]
            return seen

        first, doomed, second = run(story())
        assert first == Sized(SchedulerSize(3))
        assert isinstance(doomed, Disruption)
        assert doomed.node == "b"
        assert second == Sized(SchedulerSize(2))

    def test_it_cannot_be_asked(self, tmp_path: Path) -> None:
        with pytest.raises(SchedulerError, match="only lists hosts and cannot provide nodes") as caught:
            run(script(tmp_path, "echo a", "discovery").request(2, ""))
        assert not caught.value.retry
