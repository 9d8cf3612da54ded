"""An error in the middle of a push ends the pserver: it must not be repeated on rows that have changed already."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.job_records import Mode, Training
from ps.protocol.frames import FrameOp
from ps.protocol.messages import TrainerMember
from ps.rows import TrainerPush
from ps.server.step_barrier_shell import StepBarrierShell
from ps.spec import Optimizer, TableSpec, UpdateRule
from ps.store.push_plan import PartlyApplied
from ps.store.store import RowStore
from tests.support.ps_echo import LONG_S
from tests.support.ps_servers import ALL, COUNTS, Boss, Plan, Trainer, place, server, tidy
from tests.support.ps_stores import ZEROS, part, store_of

KEYS = np.arange(10)


def out_of_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


def store() -> RowStore:
    return store_of("numpy", TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS))


def test_an_error_after_rows_have_changed_is_no_lack_of_memory() -> None:
    one = store()
    with pytest.raises(PartlyApplied, match="MemoryError"):
        one.push([TrainerPush(1, 1, [part(KEYS, 1.0)])], step=1, each=out_of_memory)


def test_an_error_before_any_row_has_changed_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = store()
    with monkeypatch.context() as patch:
        patch.setattr(RowStore, "_add", out_of_memory)
        with pytest.raises(MemoryError):
            one.push([TrainerPush(1, 1, [part(KEYS, 1.0)])], step=1)
    assert one.push([TrainerPush(1, 1, [part(KEYS, 1.0)])], step=1).applied == len(KEYS)


def test_pushes_that_were_applied_in_part_together_are_not_applied_one_by_one() -> None:
    shell = StepBarrierShell()
    shell.orders(1, [TrainerMember(1, "a/0"), TrainerMember(2, "b/0")], (), Training(Mode.SYNC))
    applied: list[int] = []
    errors: list[BaseException] = []

    def apply(pushes: Sequence[TrainerPush], step: int, scale: float) -> None:
        applied.append(len(pushes))
        raise PartlyApplied("in part")

    def push(trainer: int) -> None:
        try:
            shell.push(TrainerPush(trainer, 1, []), 0, apply, SYSTEM_THREADS.now_s() + LONG_S)
        except PartlyApplied as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert applied == [2] and len(errors) == 2


def test_a_pserver_ends_when_it_has_applied_a_push_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    one = server()
    failed: list[str] = []
    monkeypatch.setattr(one, "_failed", failed.append)
    monkeypatch.setattr(one.bucket_shell, "feeds", lambda first, last: True)
    monkeypatch.setattr(one.bucket_shell, "spread", out_of_memory)
    try:
        Boss(place(one)).say(Plan({1: place(one)}, {1: ALL}).orders(1))
        answer = Trainer(place(one)).push(1, COUNTS, [3])
    finally:
        tidy()
    assert answer.op is FrameOp.REFUSED and "applied in part" in answer.head["text"]
    assert failed == ["a push was applied in part, and cannot be completed: MemoryError()"]
