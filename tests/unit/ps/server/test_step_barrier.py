"""Whose pushes are averaged, and who waits for whom."""

from __future__ import annotations

from edl.job_records import Mode, Training
from ps.protocol.messages import TrainerMember
from ps.server.step_barrier import Apply, PullDecision, Stale, StepBarrier


def barrier(*members: TrainerMember, mode: Mode = Mode.SYNC, staleness: int = 0) -> StepBarrier:
    made = StepBarrier(Training(mode, staleness))
    made.orders(1, members, ())
    return made


def two() -> StepBarrier:
    return barrier(TrainerMember(1, "a/0"), TrainerMember(2, "b/0"))


def test_a_step_is_applied_when_all_have_pushed_it() -> None:
    one = two()
    assert one.push(1, 0, 10) == ()
    assert [member.number for member in one.waits_for(0)] == [2]
    assert one.push(2, 0, 20) == (Apply(0, (10, 20), 0.5),)


def test_parts_of_one_trainer_count_once() -> None:
    one = two()
    one.push(1, 0, 10)
    one.push(1, 0, 11)
    assert one.push(2, 0, 20) == (Apply(0, (10, 11, 20), 0.5),)


def test_a_part_that_comes_after_its_step_gets_the_scale_of_the_step() -> None:
    one = two()
    one.push(1, 0, 10)
    one.push(2, 0, 20)
    assert one.push(1, 0, 11) == (Apply(0, (11,), 0.5),)


def test_who_leaves_is_not_waited_for() -> None:
    one = two()
    one.push(1, 0, 10)
    assert one.orders(2, [TrainerMember(1, "a/0")], ()) == (Apply(0, (10,), 1.0),)


def test_pushes_of_the_dead_are_refused() -> None:
    one = two()
    one.push(2, 0, 20)
    assert one.orders(2, [TrainerMember(1, "a/0")], (2,)) == (Stale((20,)),)
    assert one.push(2, 1, 21) == (Stale((21,)),)
    assert one.may_pull(2, 1) is PullDecision.STALE


def test_who_is_not_known_yet_waits_for_the_orders_that_name_it() -> None:
    one = barrier(TrainerMember(1, "a/0"))
    assert one.push(2, 0, 20) == ()
    assert one.push(1, 0, 10) == (Apply(0, (10,), 1.0),)
    assert one.orders(2, [TrainerMember(1, "a/0"), TrainerMember(2, "b/0", step=1)], ()) == (), "step 0 is over"
    assert one.push(1, 1, 11) == (Apply(1, (20, 11), 0.5),)
    assert one.push(1, 2, 12) == ()
    assert one.push(2, 2, 22) == (Apply(2, (12, 22), 0.5),)


def test_a_newcomer_counts_in_the_step_that_is_open() -> None:
    one = barrier(TrainerMember(1, "a/0"))
    for step in range(5):
        one.push(1, step, step)
    one.orders(2, [TrainerMember(1, "a/0"), TrainerMember(2, "b/0", step=3)], ())
    assert one.push(1, 5, 15) == ()
    assert one.push(2, 3, 23) == (Apply(5, (15, 23), 0.5),), "its step 3 was over: it is told 5"


def late() -> StepBarrier:
    """Trainer 1 is alone up to step 50; trainer 2 becomes a member when its orders say step 48."""
    one = barrier(TrainerMember(1, "a/0"))
    for step in range(51):
        one.push(1, step, step)
    one.orders(2, [TrainerMember(1, "a/0"), TrainerMember(2, "b/0", step=48)], ())
    return one


def test_a_newcomer_that_repeats_its_first_push_counts_in_the_open_step() -> None:
    one = late()
    assert one.push(2, 48, 100) == ()
    one.withdraw(100)
    assert one.push(2, 48, 101) == (), "its first push has not been applied yet"
    assert one.push(2, 48, 102) == (), "nor another part of it"
    assert one.push(1, 51, 51) == (Apply(51, (101, 102, 51), 0.5),)


def test_a_newcomer_that_repeats_what_was_applied_is_told_the_step_in_which_it_counted() -> None:
    one = late()
    one.push(2, 48, 100)
    one.push(1, 51, 51)
    assert one.push(2, 48, 101) == (Apply(51, (101,), 0.5),), "the first answer was lost"


def test_a_newcomer_that_repeats_its_first_push_late_counts_in_the_step_that_is_open_then() -> None:
    one = barrier(TrainerMember(1, "a/0"))
    one.push(1, 0, 0)
    assert one.push(2, 0, 100) == (), "the orders that name it are on their way"
    one.withdraw(100)
    for step in (1, 2):
        one.push(1, step, step)
    one.orders(2, [TrainerMember(1, "a/0"), TrainerMember(2, "b/0")], ())
    assert one.push(2, 0, 101) == ()
    assert one.push(1, 3, 3) == (Apply(3, (101, 3), 0.5),)


def test_what_is_withdrawn_takes_nothing_else_along() -> None:
    one = two()
    one.push(1, 0, 10)
    one.push(1, 0, 11)
    one.withdraw(10)
    assert one.push(2, 0, 20) == (Apply(0, (11, 20), 0.5),)
    one.push(1, 1, 12)
    one.withdraw(12)
    assert one.push(1, 0, 13) == (Apply(0, (13,), 0.5),), "the part of an applied step whose bucket had moved"


def test_a_newcomer_is_not_waited_for_before_its_step() -> None:
    one = barrier(TrainerMember(1, "a/0"), TrainerMember(2, "b/0", step=3))
    assert one.push(1, 2, 12) == (Apply(2, (12,), 1.0),)
    assert one.push(1, 3, 13) == ()


def test_steps_go_in_order() -> None:
    one = two()
    assert one.push(1, 1, 11) == ()
    assert one.push(1, 0, 10) == ()
    assert one.push(2, 1, 21) == (Apply(0, (10,), 1.0), Apply(1, (11, 21), 0.5))


def test_a_step_that_another_pserver_has_applied_does_not_wait() -> None:
    one = two()
    assert one.push(1, 5, 10, complete=True) == (Apply(5, (10,), 0.5),)
    assert one.push(2, 5, 19) == (Apply(5, (19,), 0.5),), "it has known of this pserver before"
    assert one.push(1, 6, 11) == ()
    assert one.push(2, 6, 20) == (Apply(6, (11, 20), 0.5),)


def test_what_is_withdrawn_is_waited_for_again() -> None:
    one = two()
    one.push(1, 0, 10)
    one.withdraw(10)
    assert one.push(2, 0, 20) == ()
    assert one.push(1, 0, 11) == (Apply(0, (20, 11), 0.5),)


def test_a_new_history_starts_from_scratch() -> None:
    one = two()
    one.push(1, 7, 10)
    assert one.reset() == (Stale((10,)),)
    assert one.step == -1
    one.push(1, 0, 11)
    assert one.push(2, 0, 20) == (Apply(0, (11, 20), 0.5),)


def test_async_pushes_do_not_wait() -> None:
    one = barrier(TrainerMember(1, "a/0"), TrainerMember(2, "b/0"), mode=Mode.ASYNC)
    assert one.push(1, 5, 10) == (Apply(5, (10,), 1.0),)
    assert one.may_pull(1, 100) is PullDecision.GO


def test_no_trainer_gets_further_ahead_than_the_bound() -> None:
    one = barrier(TrainerMember(1, "a/0"), TrainerMember(2, "b/0"), mode=Mode.ASYNC, staleness=2)
    assert one.may_pull(1, 2) is PullDecision.GO
    assert one.may_pull(1, 3) is PullDecision.WAIT
    assert [member.number for member in one.waits_for(3)] == [2]
    one.push(2, 1, 20)
    assert one.may_pull(1, 3) is PullDecision.GO


def test_an_async_newcomer_begins_where_the_others_are() -> None:
    one = barrier(TrainerMember(1, "a/0"), mode=Mode.ASYNC, staleness=2)
    one.push(1, 50, 10)
    one.orders(2, [TrainerMember(1, "a/0"), TrainerMember(2, "b/0", step=40)], ())
    assert one.may_pull(1, 52) is PullDecision.GO
    assert one.push(2, 40, 20) == (Apply(50, (20,), 1.0),), "the answer takes it there"
