from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edl.errors import UsageError
from edl.wire import local
from edl.wire.local import Seat
from edl.worker.context import context_of
from edl.worker.loop import make_run
from edl.worker.session import Session
from edl.worker.state import BaseState
from tests.support.fake_agent import TIMEOUT_S, FakeAgent, FakeFramework, Model, PeerGone, Worker, a_seat, connected


def test_context_waits_for_the_place_and_run_does_not_again() -> None:
    worker = Worker()
    framework = FakeFramework()
    worker.session.framework = framework
    run = make_run(framework, lambda: worker.session)
    state = BaseState(framework, {"step": 0})

    def script() -> Any:
        before = context_of(worker.session)
        return before, run(lambda state: context_of(worker.session))(state)

    worker.start(script)
    worker.agent.expect(local.Enter)
    worker.agent.expect(local.Parked)
    worker.agent.place(a_seat(3, rank=1, world_size=1, node="b", nodes=2, local_world_size=4))
    before, inside = worker.join()
    assert before == inside
    assert (before.rank, before.world_size, before.local_world_size, before.node, before.nodes) == (1, 1, 4, "b", 2)
    assert (before.round, before.launched, before.should_stop) == (3, True, False)
    worker.agent.expect(local.TrainingStarted)
    worker.agent.send(local.Stop("the launcher leaves"))
    assert worker.link.wait_until_broken(4, TIMEOUT_S)
    stopping = context_of(worker.session)
    assert (stopping.should_stop, stopping.reason) == (True, "the launcher leaves")
    worker.close()


def test_a_sharded_state_after_context_is_said_again() -> None:
    worker = Worker()
    framework = FakeFramework()
    worker.session.framework = framework
    run = make_run(framework, lambda: worker.session)
    state = BaseState(framework, {"step": 0}, sharded=True)
    worker.start(lambda: (context_of(worker.session), run(lambda state: None)(state)))
    assert worker.agent.expect(local.Enter).rejoins
    worker.agent.expect(local.Parked)
    worker.agent.place(a_seat(1))
    again = worker.agent.expect(local.Enter)
    assert (again.rejoins, again.why_not) == (False, "its state is sharded, and no build function was given")
    worker.join()
    worker.close()


# --- without a launcher ----------------------------------------------------------------------------------------------


def test_alone(capfd: pytest.CaptureFixture[str]) -> None:
    environment: dict[str, str] = {}
    session = Session(None, environment)
    framework = FakeFramework()
    state = BaseState(framework, {"model": Model(), "step": 0})

    @make_run(framework, lambda: session)
    def train(state: BaseState, steps: int) -> Any:
        for _ in range(steps):
            state.step += 1
            state.commit()
            state.save()
        return context_of(session)

    found = train(state, 3)
    assert (found.rank, found.world_size, found.launched, found.should_stop) == (0, 1, False, False)
    assert (state.step, state.commits, state.era) == (3, 6, 0)
    assert environment["WORLD_SIZE"] == "1"
    assert capfd.readouterr().err == (
        "edl: nothing is saved: this script runs without a launcher (python -m edl.launch)\n"
    )
    seat = framework.groups[0].seat
    assert isinstance(seat, Seat) and seat.world_size == 1 and seat.master != seat.endpoints[0]


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "PADDLE_TRAINERS_NUM"])
def test_under_another_launcher(variable: str) -> None:
    session = Session(None, {variable: "4"})
    run = make_run(FakeFramework(), lambda: session)
    with pytest.raises(UsageError, match=f"{variable}=4, but EDL_AGENT is not set"):
        run(lambda state: None)(BaseState(FakeFramework(), {}))


def test_alone_an_error_is_an_error() -> None:
    session = Session(None, {})
    framework = FakeFramework()

    @make_run(framework, lambda: session)
    def train(state: BaseState) -> None:
        raise PeerGone("whatever")

    with pytest.raises(PeerGone):
        train(BaseState(framework, {}))


PROGRAM = """
import os, subprocess, sys
from edl.worker import session
from edl.worker.context import context
from tests.support.fake_agent import FakeFramework
session.introduce(FakeFramework())
if sys.argv[1:] != ["helper"]:
    print(context().rank, flush=True)
    if os.fork() == 0:
        print(context().rank, flush=True)
        os._exit(0)
    os.wait()
    subprocess.run([sys.executable, __file__, "helper"])
else:
    print(context().rank, context().launched, flush=True)
    try:
        session.current()
    except Exception as error:
        print(error, flush=True)
"""


def test_processes_that_a_worker_starts(tmp_path: Any) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    address, listener = connected()
    root = str(Path(__file__).parents[4])
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        env={**os.environ, "EDL_AGENT": address, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    channel, _ = listener.accept()
    agent = FakeAgent(channel)
    agent.expect(local.Enter)
    agent.expect(local.Parked)
    agent.place(a_seat(2, rank=7))
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert said.splitlines() == [
        "7", "7", "7 True", "this process was started by a worker; only the worker itself can take part in training"
    ]  # fmt: skip
    agent.close()
    listener.close()
