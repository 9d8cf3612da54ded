"""What a worker reports about collectives that it waits for. The dumps of NCCL are torch's format, from a fake."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from edl.torch import pending_collectives as pc
from edl.wire.collective_wait import ADDRESS_SUFFIX, CollectiveWait, DumpRequest, PendingCollective
from edl.wire.json_messages import decode, encode


class Recorder:
    """A flight recorder: groups with their counters, and calls."""

    def __init__(self) -> None:
        self.groups: dict[str, tuple[int, int]] = {"0": (0, 0)}
        self.calls: list[dict[str, Any]] = []
        self.dumps: list[bool] = []

    def call(self, name: str = "nccl:all_reduce", *, p2p: bool = False) -> None:
        called, complete = self.groups["0"]
        self.groups["0"] = called + 1, complete
        self.calls.append(
            {
                "record_id": len(self.calls),
                "collective_seq_id": called + 1,
                "profiling_name": name,
                "process_group": ["0", "default_pg"],
                "input_sizes": [[4, 256], []],
                "retired": False,
                "is_p2p": p2p,
            }
        )

    def complete(self) -> None:
        called, complete = self.groups["0"]
        self.groups["0"] = called, complete + 1
        self.calls[complete]["retired"] = True

    def __call__(self, calls: bool, active: bool) -> pc.Recorded:
        self.dumps.append(calls)
        names = [f"last_{what}_collective" for what in ("enqueued", "started", "completed")]
        status = {
            name: dict(zip(names, (str(called), "-1", str(complete)), strict=True))
            for name, (called, complete) in self.groups.items()
        }
        return {"pg_status": status, **({"entries": self.calls[::-1]} if calls else {})}


def looks(reporter: pc.WaitReporter, count: int) -> list[CollectiveWait]:
    return [reporter.look() for _ in range(count)]


def test_a_call_that_stays_is_reported_with_its_place() -> None:
    recorder = Recorder()
    reporter = pc.WaitReporter((recorder,))
    assert reporter.look() == CollectiveWait()
    recorder.call()
    assert looks(reporter, pc.LASTS) == [CollectiveWait()] * pc.LASTS, "it may complete soon"
    found = looks(reporter, 2)[-1]
    assert found.state
    assert found.pending == (PendingCollective("nccl:all_reduce", 1, "default_pg", "4x256, a scalar"),)
    assert found.pending[0].text == "nccl:all_reduce of 4x256, a scalar, number 1 of group default_pg"
    assert looks(reporter, 5) == [found] * 5
    assert recorder.dumps.count(True) == 1, "the calls are read once for each state"
    recorder.complete()
    assert reporter.look() == CollectiveWait()


def test_calls_that_come_and_go_are_not() -> None:
    recorder = Recorder()
    reporter = pc.WaitReporter((recorder,))
    for _ in range(20):
        recorder.call()
        assert looks(reporter, pc.LASTS) == [CollectiveWait()] * pc.LASTS
        recorder.complete()
    assert True not in recorder.dumps


def test_progress_of_another_group_is_progress() -> None:
    recorder = Recorder()
    reporter = pc.WaitReporter((recorder,))
    recorder.call()
    first = looks(reporter, 10)[-1]
    recorder.groups["1"] = (5, 4)
    assert looks(reporter, pc.LASTS) == [CollectiveWait()] * pc.LASTS
    assert looks(reporter, 1)[0].state not in ("", first.state)


def test_counters_that_lag_behind_are_no_wait() -> None:
    """gloo's, with torch 2.13: all calls are complete, and the counter does not say so."""
    recorder = Recorder()
    for _ in range(3):
        recorder.call("gloo:all_reduce")
        recorder.complete()
    recorder.groups["0"] = (3, 2)
    reporter = pc.WaitReporter((recorder,))
    assert looks(reporter, 20) == [CollectiveWait()] * 20
    assert recorder.dumps.count(True) == 1


def test_sends_and_receives_are_no_collectives() -> None:
    recorder = Recorder()
    recorder.call("nccl:recv", p2p=True)
    reporter = pc.WaitReporter((recorder,))
    assert looks(reporter, 20) == [CollectiveWait()] * 20


def test_both_recorders_of_a_torch_with_nccl_are_read() -> None:
    nccl, others = Recorder(), Recorder()
    others.call("gloo:barrier")
    reporter = pc.WaitReporter((nccl, others))
    assert [one.name for one in looks(reporter, 10)[-1].pending] == ["gloo:barrier"]


@pytest.mark.parametrize(
    "odd", [{}, {"pg_status": None}, {"pg_status": {"0": {}}}, {"pg_status": {"0": {"last_enqueued_collective": "x"}}}]
)
def test_dumps_of_another_form_say_nothing(odd: pc.Recorded) -> None:
    assert pc.counters(odd) == ""
    assert pc.pending(odd) == ()


def test_the_buffers_size_is_the_users() -> None:
    for variable in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        environment = {variable: "0"}
        pc.set_up(environment)
        assert environment == {variable: "0"}
    environment = {}
    pc.set_up(environment)
    assert environment == {"TORCH_FR_BUFFER_SIZE": "2000"}


def test_this_torch_has_a_recorder() -> None:
    dumps = pc.recorders()  # a torch with CUDA has two
    assert dumps and all("pg_status" in dump(False, False) for dump in dumps)


def test_the_thread_reports_to_the_agent_and_writes_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"edl-test-{os.getpid()}"
    recorder = Recorder()
    recorder.call()
    monkeypatch.setenv("EDL_AGENT", address)
    monkeypatch.setattr(pc, "recorders", lambda: (recorder,))
    monkeypatch.setattr(pc, "_started", {})
    monkeypatch.setattr(pc, "EVERY_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.settimeout(60)
        agent.bind(f"\0{address}{ADDRESS_SUFFIX}")
        pc.begin()
        pc.begin()  # once in a process
        found, worker = CollectiveWait(), ""
        while not found.state:
            data, worker = agent.recvfrom(8192)
            found = decode(CollectiveWait, data)
        assert found.pending[0].number == 1
        path = tmp_path / "dump.json"
        agent.sendto(encode(DumpRequest(str(path))), worker)
        while not path.exists() or not path.read_text().endswith("]"):
            agent.recv(8192)
        assert json.loads(path.read_text())[0]["entries"][0]["profiling_name"] == "nccl:all_reduce"
        (thread,) = (one for one in threading.enumerate() if one.name == "edl-collectives")
    thread.join(60)
    assert not thread.is_alive(), "it ends with its agent"
