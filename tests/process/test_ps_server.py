"""The pserver process: its lines to the launcher, its ends, and what two of them keep when one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edl.adapters.with_parent
from edl.config import environment
from ps.protocol import messages
from ps.protocol.frames import FrameOp
from ps.spec import BUCKETS, Optimizer, TableSpec, UpdateRule
from tests.support.ps_servers import ALL, COUNTS, SECRET, At, Boss, Plan, Pusher, Trainer, tidy, until

KEYS = list(range(2000))
ADAM = TableSpec("adam", 8, Optimizer(UpdateRule.ADAM, lr=0.1))


class Process:
    """One pserver, this process its launcher."""

    def __init__(self, name: str, *options: str, secret: str = SECRET) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", edl.adapters.with_parent.__file__, str(os.getpid())),
                *(sys.executable, "-m", "ps", "server", f"--name={name}", "--job=j", *options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), "EDL_PS_KERNELS": "numpy"},
        )
        self.say(json.dumps({"secret": secret}))
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready, "it ended before it listened"
        self.ready: dict[str, Any] = json.loads(ready)
        self.place = At(name, "127.0.0.1", self.ready["port"], self.ready["path"], self.ready["machine"])
        self.boss = Boss(self.place)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self) -> str:
        self.say("?")
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> int:
        return self.process.wait(60)


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts pservers; none outlives the test."""
    running: list[Process] = []

    def begin(name: str, *options: str) -> Process:
        running.append(Process(name, *options))
        return running[-1]

    yield begin
    tidy()
    for one in running:
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


def told(processes: Mapping[int, Process], plan: Plan) -> Plan:
    """Orders to all in the plan, followed."""
    for number in plan.places:
        processes[number].boss.tell(plan.orders(number))
    for number in plan.places:
        processes[number].boss.heard(messages.Followed, lambda word: word.version >= plan.version)
    return plan


def test_lines_pulls_and_pushes(start: Any) -> None:
    one = start("a", "--most-bytes", str(1 << 20), "--lease", "600")  # its Master here never pings
    assert one.ready["pid"] == one.process.pid and one.ask() == "!\n"
    plan = told({1: one}, Plan({1: one.place}, {1: ALL}))
    trainer = Trainer(one.place)
    assert trainer.push(1, COUNTS, KEYS).op is FrameOp.OK
    assert set(trainer.pull(COUNTS, KEYS)[:, 0]) == {1.0}
    answer = trainer.push(2, COUNTS, range(10**5))
    assert (answer.op, answer.head["kind"]) == (FrameOp.REFUSED, "memory")
    assert trainer.push(3, COUNTS, KEYS).op is FrameOp.OK and one.ask() == "!\n"
    assert plan.version == 1
    assert one.process.stdin is not None
    one.process.stdin.close()  # the launcher has gone
    assert one.end() == 0


def test_the_first_line_is_no_secret() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ps", "server", "--name=a", "--job=j"],
        input="hello\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode not in (0, 1) and "started by a launcher" in done.stderr and not done.stdout


def test_the_end_at_sigterm(start: Any) -> None:
    one, two = start("a"), start("b", "--grace=0.1")
    plan = told({1: one, 2: two}, Plan({1: one.place, 2: two.place}, {1: range(2048), 2: range(2048, BUCKETS)}))
    one.process.send_signal(signal.SIGTERM)
    trainer = Trainer(one.place)
    assert trainer.push(1, COUNTS, [key for key in KEYS if _bucket(key) < 2048]).op is FrameOp.OK  # serves on
    last = plan.next(owner={2: ALL}, changed=range(2048), go=(1,))
    one.boss.tell(last.orders(1))
    assert one.end() == 0
    two.process.send_signal(signal.SIGTERM)
    assert two.end() == 1, "nobody has taken its buckets"


def _bucket(key: int) -> int:
    from ps.hashing import bucket_of

    return bucket_of(key)


def test_one_of_two_is_killed_and_nothing_acknowledged_is_lost(start: Any) -> None:
    processes = {number: start(name) for number, name in ((1, "a"), (2, "b"))}
    places = {number: one.place for number, one in processes.items()}
    lower, upper = range(2048), range(2048, BUCKETS)
    plan = told(processes, Plan(places, {1: lower, 2: upper}, joining={2: lower, 1: upper}))
    for one in processes.values():
        one.boss.synced(1, 2048)
    plan = told(processes, plan.next(joining={}, backup={2: lower, 1: upper}, changed=ALL))
    pushers = [Pusher(number, plan) for number in (1, 2)]
    over, turn = threading.Event(), threading.Condition()

    def push(pusher: Pusher) -> None:
        while not over.is_set():
            pusher.push(COUNTS, KEYS)
            with turn:
                turn.notify_all()

    threads = [threading.Thread(target=push, args=(pusher,)) for pusher in pushers]
    for thread in threads:
        thread.start()
    until(turn, lambda: all(pusher.acknowledged > 20 for pusher in pushers))
    processes[1].process.kill()
    alone = plan.next(owner={2: ALL}, backup={}, changed=ALL)
    alone.places = {2: places[2]}
    seen = [pusher.acknowledged for pusher in pushers]
    told({2: processes[2]}, alone)
    for pusher in pushers:
        pusher.plan = alone
    until(turn, lambda: all(p.acknowledged > s + 5 for p, s in zip(pushers, seen, strict=True)))
    over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    rows = Trainer(places[2], 3).pull(COUNTS, KEYS)
    assert set(rows[:, 0]) == {float(sum(pusher.acknowledged for pusher in pushers))}


def checkpoint(
    processes: Mapping[int, Process], plan: Plan, number: int, phase: str, **more: Any
) -> tuple[Plan, list[Any]]:
    """Run one phase of a checkpoint on all pservers and return their reports."""
    plan = told(processes, plan.next(checkpoint=messages.CheckpointOrder(number, phase, **more)))
    done = [
        one.boss.heard(messages.CheckpointPhaseDone, lambda word: (word.number, word.phase) == (number, phase))
        for one in processes.values()
    ]
    assert not [word.failed for word in done if word.failed]
    return plan, done


@pytest.mark.slow
def test_a_checkpoint_of_two_restored_on_one(start: Any, tmp_path: Path) -> None:
    option = f"--checkpoint-dir={tmp_path}"
    processes = {number: start(name, option) for number, name in ((1, "a"), (2, "b"))}
    places = {number: one.place for number, one in processes.items()}
    owner: dict[int, Sequence[int]] = {1: range(1000), 2: range(1000, BUCKETS)}
    plan = told(processes, Plan(places, owner, tables=(ADAM, COUNTS)))

    def push(pusher: Pusher, times: int) -> None:
        for _ in range(times):
            pusher.push(ADAM, KEYS)

    pusher = Pusher(1, plan)
    push(pusher, 3)
    plan, _ = checkpoint(processes, plan, 1, "mark")
    push(pusher, 2)  # after the mark: not in the checkpoint
    plan, done = checkpoint(processes, plan, 1, "write")
    parts = tuple(word.report for word in done)
    asked = plan.next(checkpoint=messages.CheckpointOrder(1, "complete", parts=parts, extra=json.dumps({"step": 3})))
    processes[1].boss.say(asked.orders(1))
    run = json.loads(
        processes[1].boss.heard(messages.CheckpointPhaseDone, lambda word: word.phase == "complete").report
    )["run"]

    third = {3: start("c", option)}
    fresh = Plan({3: third[3].place}, {3: ALL}, giver={messages.RESTORE: ALL}, tables=(ADAM, COUNTS), history=2)
    fresh.checkpoint = messages.CheckpointOrder(0, "find")
    fresh.owner = {}
    told(third, fresh)
    found = third[3].boss.heard(messages.FoundCheckpoints)
    assert [(one.run, one.number, one.step) for one in found.checkpoints] == [(run, 1, 3)]
    restored = fresh.next(owner={3: ALL}, checkpoint=messages.CheckpointOrder(1, "restore", run=run), changed=ALL)
    told(third, restored)
    third[3].boss.heard(messages.Took)
    later = Trainer(third[3].place, 1)
    marked = later.pull(ADAM, KEYS, insert=False)

    # The same gradients from there lead to the same weights: the optimizer's state is there, too.
    after = Pusher(1, restored)
    after.seq = 10
    push(after, 2)
    now = {number: Trainer(place, 9) for number, place in places.items()}
    for number, trainer in now.items():
        keys = [key for key in KEYS if _bucket(key) in owner[number]]
        assert np.array_equal(later.pull(ADAM, keys, insert=False), trainer.pull(ADAM, keys, insert=False))
    assert not np.array_equal(marked, later.pull(ADAM, KEYS, insert=False))
