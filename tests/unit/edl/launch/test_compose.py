"""What a launcher builds gets its settings: each option is off its default here, so that one left out is noticed."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edl.agent.deps import AgentDeps
from edl.agent.machine.state import AgentState
from edl.config import JobSpec, NodeRange, Timeouts
from edl.job_records import Training
from edl.launch import compose
from edl.launch.settings import LaunchSettings
from edl.ports import CommandKind, WorkerCommand
from edl.types import Incarnation, JobId, NodeId
from edl.wire.records import NodeInfo
from ps.coordinator.machine import PlacementMachine
from ps.coordinator.state import CoordinatorLimits
from tests.support.launching import read
from tests.support.script_folder import folder

__all__ = ["folder"]


class Recorded:
    """Stands for a class: keeps the arguments of its only call."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Recorded:
        assert not self.arguments and not self.named, "it is built once"
        self.arguments, self.named = arguments, named
        return self


def test_the_master_waits_for_pservers_as_the_job_says() -> None:
    times = Timeouts(recover_s=77.0, lease_ttl_s=9.0)
    spec = JobSpec(JobId("j"), NodeRange(1, 2), timeouts=times, servers=Training())
    services = compose._services(spec, "authority", "token")()
    (placement,) = (one for one in services if isinstance(one, PlacementMachine))
    assert placement.state.limits == CoordinatorLimits(recover_s=77.0, returns_s=9.0 + compose.RETURN_S)


def test_the_fork_server_is_built_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Recorded()
    monkeypatch.setattr(compose, "ForkServerProcesses", built)
    options = ("--nproc-per-node=2", "--standby=none", "--preload=json", "--spawn-timeout=17", "--learn-memory=5M")
    settings, log = read(*options), list[str]().append
    compose._fork_server(settings, {"A": "b"}, (100, 200), log)
    environment = {"A": "b", "OMP_NUM_THREADS": "1"}
    workers = settings.workers
    assert built.arguments == (workers.command, workers.standby, 2, environment, ("json",), log)
    assert built.named == {"python": sys.executable, "answer_s": 17.0, "files": (100, 200), "learn_bytes": 5 << 20}


@pytest.mark.parametrize(("kind", "threads"), [(CommandKind.CALL, {}), (CommandKind.SCRIPT, {"OMP_NUM_THREADS": "1"})])
def test_functions_get_no_number_of_threads(
    kind: CommandKind, threads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Recorded()
    monkeypatch.setattr(compose, "ForkServerProcesses", built)
    settings = read("--nproc-per-node=2")
    workers = dataclasses.replace(settings.workers, command=WorkerCommand(kind, "x.py", ("folder",)))
    settings = dataclasses.replace(settings, workers=workers)
    compose._fork_server(settings, {}, (100, 200), list[str]().append)
    assert built.arguments[3] == threads
    monkeypatch.setattr(compose, "WorkerGroupDeps", group := Recorded())
    agent_of(settings, monkeypatch, checkpoint_manager=None, switches=None, synced=None)
    assert group.named["share_cores"] is bool(threads)


def agent_of(settings: LaunchSettings, monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[AgentDeps, AgentState]:
    """What the agent of a launcher with these settings is built from."""
    built = Recorded()
    monkeypatch.setattr(compose, "AgentShell", built)
    info = NodeInfo(NodeId("a"), Incarnation(5), "host-a", 1, settings.slots)
    launcher = SimpleNamespace(
        info=info,
        registration=SimpleNamespace(token="t"),
        logs=settings.logs,
        base={},
        server=SimpleNamespace(serve_node=lambda answers: None),
        **given,
    )
    candidate = SimpleNamespace(master_refused=object())

    async def build() -> None:
        warming: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        parts = (candidate, SimpleNamespace(), warming, object(), list[str]().append)
        compose._agent(settings, cast(Any, launcher), *cast(Any, parts))

    asyncio.run(build())
    deps, state = built.arguments
    return deps, state


def test_the_agent_is_built_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read("--save-timeout=123", "--rejoin-timeout=21", "--fault-tolerance=elastic")
    checkpoints, switches, synced = object(), object(), object()
    given = {"checkpoint_manager": checkpoints, "switches": switches, "synced": synced}
    deps, state = agent_of(settings, monkeypatch, **given)
    assert deps.save_timeout_s == 123.0
    assert (deps.checkpoints, deps.switches, deps.synced) == (checkpoints, switches, synced)
    assert state.timeouts == settings.spec.timeouts
    assert state.timeouts.rejoin_s == 21.0


def test_nothing_that_an_agent_may_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"checkpoint_manager": object(), "switches": object(), "synced": object()}
    deps, _ = agent_of(read("--save-timeout=123"), monkeypatch, **given)
    optional = [one for one in dataclasses.fields(AgentDeps) if one.default is not dataclasses.MISSING]
    left_out = [one.name for one in optional if getattr(deps, one.name) == one.default]
    assert left_out == ["decided"], "only the simulator observes decisions"
