"""Local rank in the arguments, CPU affinity and signals of workers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from edl.config import Standby
from edl.ports import CommandKind, WorkerCommand
from tests.process.fork_server_fixture import Bench, run, until

SCRIPT = """
import json, os, signal, sys, threading
if "HEARS" in os.environ:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
print(json.dumps([sys.argv[1:], sorted(os.sched_getaffinity(0)), sys.orig_argv[-1]]), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("standby", list(Standby), ids=lambda standby: standby.value)
def test_local_rank_cores_and_signals_however_a_worker_is_started(tmp_path: Path, standby: Standby) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = WorkerCommand(
        CommandKind.SCRIPT, str(tmp_path / "script.py"), ("${local_rank}", "$$HOME", "${rank}", "--at=$local_rank")
    )
    bench = Bench(tmp_path, command, standby, slots=2)
    core = min(os.sched_getaffinity(0))

    async def scenario() -> None:
        async with bench.open():
            deaf = await bench.spawn("0", cores=(core,))
            hearing = await bench.spawn("1", local_rank=1, HEARS="1")
            await until(lambda: all((tmp_path / f"{name}.out").read_text() for name in "01"), "their words")
            for pid in (deaf, hearing):
                await bench.processes.forward(pid, signal.SIGUSR1)
            assert await bench.codes([hearing]) == [0]
            await until(lambda: bool(bench.logged), "the remark")
            assert bench.logged == [f"SIGUSR1 is not passed to process {deaf}: it has no handler, and would die"]
            os.kill(deaf, 0)

    run(scenario())
    every = sorted(os.sched_getaffinity(0))
    assert json.loads((tmp_path / "0.out").read_text()) == [["0", "$HOME", "${rank}", "--at=0"], [core], "--at=0"]
    assert json.loads((tmp_path / "1.out").read_text()) == [["1", "$HOME", "${rank}", "--at=1"], every, "--at=1"]


def test_cores_that_are_not_there_are_said_and_the_worker_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('here')")
    bench = Bench(tmp_path, WorkerCommand(CommandKind.SCRIPT, str(tmp_path / "script.py"), ()), Standby.FORK)

    async def scenario() -> None:
        async with bench.open():
            assert await bench.codes([await bench.spawn(cores=(4000,))]) == [0]

    run(scenario())
    assert (tmp_path / "worker.out").read_text() == "here\n"
    assert (tmp_path / "worker.err").read_text() == "edl: not bound to processor cores [4000]: Invalid argument\n"
