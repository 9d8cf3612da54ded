"""How a pserver carries out its orders, event by event."""

from __future__ import annotations

from typing import TypeVar

from edl.job_records import Replication, Training
from ps.protocol import messages
from ps.protocol.messages import RESTORE, CheckpointOrder, Orders
from ps.server.bucket_machine import (
    MOVED,
    SERVED,
    WAITING,
    BucketMachine,
    CloseStream,
    Copy,
    Drop,
    Effect,
    FeedFollowers,
    FollowerFenced,
    ImageAcked,
    LineLost,
    LineMade,
    MarkAcked,
    MarkStream,
    MasterLine,
    OrdersCame,
    Released,
    Reset,
    RestoreBuckets,
    Restored,
    SendRelease,
    SendToMaster,
    Serve,
    StopServing,
)
from ps.spec import BUCKETS

Kind = TypeVar("Kind")
Role = tuple[int, int, int, int, int]
"""Owner, backup, joining, giver, since."""


def orders(version: int, *roles: Role, you: int = 1, history: int = 1, living: str = "123", **more: object) -> Orders:
    servers = tuple(messages.PserverAddress(int(one), f"servers/{one}", "host", 1) for one in living)
    columns = list(zip(*roles, strict=True))
    owner, backup, joining, giver = (messages.pack(column) for column in columns[:4])
    placement = messages.PlacementMap(version, history, servers, owner, backup, joining)
    since = messages.pack(columns[4], "i")
    values = {"training": Training(), **more}
    return Orders(0, you, placement, 1, (), values.pop("training"), (), since=since, giver=giver, **values)  # type: ignore[arg-type]


def take(effects: tuple[Effect, ...], kind: type[Kind]) -> list[Kind]:
    return [effect for effect in effects if isinstance(effect, kind)]


def said(effects: tuple[Effect, ...], kind: type[Kind]) -> list[Kind]:
    return [effect.message for effect in take(effects, SendToMaster) if isinstance(effect.message, kind)]


def step(bucket_machine: BucketMachine, version: int, *roles: Role, **more: object) -> tuple[Effect, ...]:
    return bucket_machine.step(OrdersCame(orders(version, *roles, **more)))  # type: ignore[arg-type]


def synced(bucket_machine: BucketMachine, follower: int = 2) -> tuple[Effect, ...]:
    """The copy that was just begun is made."""
    number = bucket_machine._numbers
    effects = bucket_machine.step(ImageAcked(follower, number, tuple(range(bucket_machine.buckets))))
    return bucket_machine.step(MarkAcked(follower, take(effects, MarkStream)[0].number))


def with_backup() -> BucketMachine:
    """Bucket 0 is served, pserver 2 is its copy in step."""
    one = BucketMachine("servers/1", buckets=1)
    step(one, 1, (1, 0, 2, 0, 1))
    synced(one)
    step(one, 2, (1, 2, 0, 0, 2))
    return one


# --- serving and copying ---------------------------------------------------------------------------------------------


def test_the_first_orders_reset_and_serve() -> None:
    one = BucketMachine("servers/1", buckets=2)
    effects = step(one, 1, (1, 0, 0, 0, 1), (2, 0, 0, 0, 1))
    assert effects[0] == Reset(1, 1)
    assert take(effects, Serve) == [Serve((0,))]
    assert list(one.allowed) == [SERVED, MOVED]
    assert effects[-1] == SendToMaster(messages.Followed(1))


def test_older_orders_change_nothing() -> None:
    one = BucketMachine("servers/1", buckets=1)
    step(one, 5, (1, 0, 0, 0, 1))
    assert step(one, 4, (2, 0, 0, 0, 4)) == ()
    assert one.version == 5


def test_pushes_wait_for_a_copy_from_its_image_on_and_synced_is_sent_when_complete() -> None:
    one = BucketMachine("servers/1", buckets=1)
    effects = step(one, 1, (1, 0, 2, 0, 1))
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (2,), ())]
    copy = take(effects, Copy)[0]
    effects = one.step(ImageAcked(2, copy.number, (0,)))
    assert effects[0] == FeedFollowers((0,), (2,), (2,)), "before the mark is put into the stream"
    mark = take(effects, MarkStream)[0]
    assert said(one.step(MarkAcked(2, mark.number)), messages.Synced) == [messages.Synced(1, 2, ((0, 1),))]


def test_the_acknowledgement_of_another_copy_does_not_count() -> None:
    one = BucketMachine("servers/1", buckets=1)
    first = take(step(one, 1, (1, 0, 2, 0, 1)), Copy)[0]
    second = take(step(one, 3, (1, 0, 2, 0, 3)), Copy)[0]
    assert first.number != second.number
    assert one.step(ImageAcked(2, first.number, (0,))) == ()


def test_a_copy_in_step_becomes_the_backup_without_another_copy() -> None:
    one = BucketMachine("servers/1", buckets=1)
    step(one, 1, (1, 0, 2, 0, 1))
    synced(one)
    effects = step(one, 2, (1, 2, 0, 0, 2))
    assert take(effects, Copy) == []
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (2,), (2,))]


def test_asynchronous_copies_are_fed_and_not_waited_for() -> None:
    one = BucketMachine("servers/1", buckets=1)
    training = Training(replication=Replication.ASYNC)
    step(one, 1, (1, 0, 2, 0, 1), training=training)
    synced(one)
    assert take(step(one, 2, (1, 2, 0, 0, 2), training=training), FeedFollowers) == [FeedFollowers((0,), (2,), ())]


def test_an_asynchronous_copy_is_waited_for_until_it_has_caught_up_and_then_takes_over() -> None:
    bucket_machine = with_backup()
    lagging = {"training": Training(replication=Replication.ASYNC)}
    step(bucket_machine, 3, (1, 2, 0, 0, 3), **lagging)
    effects = step(bucket_machine, 4, (1, 2, 2, 0, 4), **lagging)
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (2,), (2,))] and not take(effects, Copy)
    (mark,) = take(effects, MarkStream)
    assert effects.index(mark) > effects.index(take(effects, FeedFollowers)[0]), "what came before was not waited for"
    effects = bucket_machine.step(MarkAcked(2, mark.number))
    assert said(effects, messages.Synced) == [messages.Synced(4, 2, ((0, 1),))]
    effects = step(bucket_machine, 5, (2, 1, 0, 1, 5), **lagging)
    assert take(effects, SendRelease) == [SendRelease(2, (0,), 5)]


def test_a_mark_from_before_pushes_waited_says_nothing() -> None:
    bucket_machine = with_backup()
    lagging = {"training": Training(replication=Replication.ASYNC)}
    (early,) = take(step(bucket_machine, 3, (1, 2, 2, 0, 3), **lagging), MarkStream)
    effects = step(bucket_machine, 4, (1, 2, 0, 0, 4), **lagging)
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (2,), ())], "it is fed and in step as before"
    (late,) = take(step(bucket_machine, 5, (1, 2, 2, 0, 5), **lagging), MarkStream)
    assert not said(bucket_machine.step(MarkAcked(2, early.number)), messages.Synced)
    assert said(bucket_machine.step(MarkAcked(2, late.number)), messages.Synced)


def test_a_stream_that_breaks_while_a_copy_catches_up_is_reported() -> None:
    bucket_machine = with_backup()
    step(bucket_machine, 3, (1, 2, 2, 0, 3), training=Training(replication=Replication.ASYNC))
    effects = bucket_machine.step(LineLost(2))
    assert said(effects, messages.Unsynced) == [messages.Unsynced(3, 2, ((0, 1),))]
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (), (2,))]


def test_what_was_said_is_said_again_on_a_new_line() -> None:
    one = BucketMachine("servers/1", buckets=1)
    step(one, 1, (1, 0, 2, 0, 1))
    synced(one)
    effects = one.step(MasterLine())
    hello = said(effects, messages.PserverHello)[0]
    assert effects[0] == SendToMaster(hello)
    assert (hello.number, hello.version, list(messages.unpack(hello.holds, 1))) == (1, 1, [1])
    assert said(effects, messages.Synced) == [messages.Synced(1, 2, ((0, 1),))]


def test_buckets_without_a_role_are_dropped() -> None:
    one = with_backup()
    step(one, 3, (2, 1, 0, 1, 3))
    assert take(step(one, 4, (2, 3, 0, 0, 4)), Drop) == [Drop((0,))]


def test_a_new_history_begins_empty() -> None:
    one = with_backup()
    effects = step(one, 3, (2, 0, 0, 0, 3), history=2)
    assert effects[0] == Reset(1, 2)
    assert list(one.allowed) == [MOVED]


def test_many_buckets_make_few_effects() -> None:
    one = BucketMachine("servers/1")
    effects = step(one, 1, *[(1, 0, 2, 0, 1)] * BUCKETS)
    assert [type(effect) for effect in effects] == [Reset, FeedFollowers, Serve, Copy, SendToMaster]


# --- hand-over -------------------------------------------------------------------------------------------------------


def test_the_old_owner_stops_then_releases() -> None:
    effects = step(with_backup(), 3, (2, 1, 0, 1, 3))
    kinds = [type(effect) for effect in effects]
    assert kinds.index(StopServing) < kinds.index(SendRelease)
    assert take(effects, StopServing) == [StopServing((0,), False)]
    assert take(effects, SendRelease) == [SendRelease(2, (0,), 3)]


def heir() -> BucketMachine:
    """Pserver 2 has orders to own bucket 0, which pserver 1 has to release."""
    two = BucketMachine("servers/2", buckets=1)
    step(two, 2, (1, 2, 0, 0, 2), you=2)
    step(two, 3, (2, 1, 0, 1, 3), you=2)
    return two


def test_the_new_owner_waits_for_the_release() -> None:
    two = heir()
    assert list(two.allowed) == [WAITING]
    effects = two.step(Released(1, 3, (0,)))
    assert take(effects, Serve) == [Serve((0,))]
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (1,), (1,))], (
        "the old one is its copy, with nothing to copy"
    )
    assert said(effects, messages.Took) == [messages.Took(3, ((0, 1),))]


def test_asynchronous_pushes_wait_for_the_giver_until_orders_say_that_the_bucket_was_taken() -> None:
    """Until then the Master may give the bucket back to it."""
    two, training = BucketMachine("servers/2", buckets=1), Training(replication=Replication.ASYNC)
    step(two, 2, (1, 2, 0, 0, 2), you=2, training=training)
    step(two, 3, (2, 1, 0, 1, 3), you=2, training=training)
    assert take(two.step(Released(1, 3, (0,))), FeedFollowers) == [FeedFollowers((0,), (1,), (1,))]
    effects = step(two, 4, (2, 1, 0, 0, 4), you=2, training=training)
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (1,), ())]


def test_a_release_of_an_earlier_time_does_not_count() -> None:
    two = heir()
    two.step(Released(1, 2, (0,)))
    two.step(Released(3, 3, (0,)))
    assert list(two.allowed) == [WAITING]


def test_a_release_may_come_before_its_orders() -> None:
    two = BucketMachine("servers/2", buckets=1)
    step(two, 2, (1, 2, 0, 0, 2), you=2)
    two.step(Released(1, 5, (0,)))
    step(two, 3, (1, 3, 2, 0, 3), you=2)
    assert list(two.allowed) == [MOVED]
    step(two, 5, (2, 1, 0, 1, 5), you=2)
    assert list(two.allowed) == [SERVED]


def test_a_release_under_newer_orders_that_changed_nothing_about_it_counts_at_once() -> None:
    two = heir()
    assert take(two.step(Released(1, 4, (0,))), Serve) == [Serve((0,))]


def test_an_early_release_under_still_newer_orders_counts() -> None:
    two = BucketMachine("servers/2", buckets=1)
    step(two, 2, (1, 2, 0, 0, 2), you=2)
    two.step(Released(1, 6, (0,)))
    step(two, 3, (2, 1, 0, 1, 3), you=2)
    assert list(two.allowed) == [SERVED]


def test_a_release_that_comes_while_an_earlier_one_still_counts_is_kept_for_its_own_orders() -> None:
    """The giver's stream had broken: it got the bucket back and has released it again, all before these orders."""
    two = heir()
    two.step(Released(1, 3, (0,)))
    two.step(Released(1, 6, (0,)))
    step(two, 4, (1, 0, 2, 0, 4), you=2)
    assert list(two.allowed) == [MOVED]
    effects = step(two, 6, (2, 1, 0, 1, 6), you=2)
    assert list(two.allowed) == [SERVED]
    assert said(effects, messages.Took)


def test_an_owner_that_gets_content_under_newer_orders_waits_for_them() -> None:
    """What it applied from then on would be in its rows only, with sequence numbers that make repeats of it known."""
    two = heir()
    two.step(Released(1, 3, (0,)))
    assert two.refuses(1, 5, [0]) == []
    assert list(two.allowed) == [WAITING]
    step(two, 4, (2, 1, 0, 0, 4), you=2)
    assert list(two.allowed) == [WAITING], "older than those of the sender"
    assert take(step(two, 5, (1, 0, 2, 0, 5), you=2), StopServing) == [StopServing((0,), False)]


def test_the_new_owner_serves_when_the_old_one_is_dead() -> None:
    two = heir()
    effects = step(two, 4, (2, 0, 0, 0, 4), you=2, living="23")
    assert list(two.allowed) == [SERVED]
    assert take(effects, Serve) == [Serve((0,))]


def test_a_giver_whose_stream_broke_says_so() -> None:
    one = with_backup()
    one.step(LineLost(2))
    effects = step(one, 3, (2, 1, 0, 1, 3))
    assert take(effects, SendRelease) == []
    assert said(effects, messages.Unsynced) == [messages.Unsynced(3, 2, ((0, 1),))]


def test_a_stream_that_breaks_behind_the_release_is_reported() -> None:
    one = with_backup()
    step(one, 3, (2, 1, 0, 1, 3))
    assert said(one.step(LineLost(2)), messages.Unsynced) == [messages.Unsynced(3, 2, ((0, 1),))]


def test_the_copy_takes_over_when_the_owner_dies() -> None:
    two = BucketMachine("servers/2", buckets=1)
    step(two, 2, (1, 2, 0, 0, 2), you=2)
    effects = step(two, 3, (2, 0, 3, 0, 3), you=2, living="23")
    assert take(effects, Serve) == [Serve((0,))]
    assert take(effects, Copy)[0].follower == 3


# --- broken streams --------------------------------------------------------------------------------------------------


def test_a_broken_stream_holds_acknowledgements_up_until_orders_say_otherwise() -> None:
    one = with_backup()
    effects = one.step(LineLost(2))
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (), (2,))]
    assert said(effects, messages.Unsynced) == [messages.Unsynced(2, 2, ((0, 1),))]
    assert one.step(LineMade(2)) == (), "what was lost in between is not known"
    effects = step(one, 3, (1, 0, 2, 0, 3))
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (2,), ())]
    assert take(effects, Copy)[0].follower == 2


def test_it_is_said_again_with_all_orders_until_it_is_heard() -> None:
    one = with_backup()
    one.step(LineLost(2))
    assert said(step(one, 3, (1, 2, 0, 0, 2)), messages.Unsynced) == [messages.Unsynced(3, 2, ((0, 1),))]
    assert said(one.step(MasterLine()), messages.Unsynced)


def test_pushes_wait_for_a_follower_in_step_until_revoked() -> None:
    one = BucketMachine("servers/1", buckets=1)
    step(one, 1, (1, 0, 2, 0, 1))
    synced(one)
    effects = one.step(LineLost(2))
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (), (2,))], (
        "the Master may make it the backup at any moment"
    )
    assert take(step(one, 2, (1, 0, 2, 0, 1)), FeedFollowers) == []
    assert take(step(one, 3, (1, 0, 2, 0, 3)), FeedFollowers) == [FeedFollowers((0,), (), ())]


def test_an_unreported_copy_restarts_with_the_stream() -> None:
    one = BucketMachine("servers/1", buckets=1)
    step(one, 1, (1, 0, 2, 0, 1))
    assert take(one.step(LineLost(2)), FeedFollowers) == [FeedFollowers((0,), (), ())]
    assert take(one.step(LineMade(2)), Copy)[0].buckets == (0,)


def test_a_dead_follower_is_waited_for_no_more() -> None:
    effects = step(with_backup(), 3, (1, 0, 0, 0, 3), living="13")
    assert take(effects, CloseStream) == [CloseStream(2)]
    assert take(effects, FeedFollowers) == [FeedFollowers((0,), (), ())]


# --- fence -----------------------------------------------------------------------------------------------------------


def test_pieces_come_from_the_owner_only() -> None:
    two = BucketMachine("servers/2", buckets=2)
    step(two, 2, (1, 2, 0, 0, 2), (1, 3, 0, 0, 2), you=2)
    assert two.refuses(1, 2, [0, 1]) == [1], "it has no role in the second"
    assert two.refuses(3, 2, [0]) == [0]


def test_an_owner_that_does_not_know_that_it_was_replaced_is_refused() -> None:
    two = BucketMachine("servers/2", buckets=1)
    step(two, 2, (1, 2, 0, 0, 2), you=2)
    step(two, 3, (2, 0, 0, 0, 3), you=2, living="23")
    assert two.refuses(1, 2, [0]) == [0]


def test_the_new_owner_takes_what_comes_before_the_release() -> None:
    two = heir()
    assert two.refuses(1, 2, [0]) == []
    two.step(Released(1, 3, (0,)))
    assert two.refuses(1, 2, [0]) == [0]


def test_who_has_newer_orders_is_believed_and_then_only_he() -> None:
    three = BucketMachine("servers/3", buckets=1)
    step(three, 2, (1, 3, 0, 0, 2), you=3)
    assert three.refuses(2, 5, [0]) == []
    assert three.refuses(1, 2, [0]) == [0], "the old owner, meanwhile"
    step(three, 5, (2, 0, 3, 0, 5), you=3, living="23")
    assert three.refuses(2, 5, [0]) == []


def test_what_came_before_its_orders_is_not_dropped_by_older_ones() -> None:
    three = BucketMachine("servers/3", buckets=1)
    step(three, 2, (1, 3, 0, 0, 2), you=3)
    assert three.refuses(1, 5, [0]) == []
    assert take(step(three, 4, (1, 2, 0, 0, 4), you=3), Drop) == []
    assert take(step(three, 5, (1, 2, 3, 0, 5), you=3), Drop) == []
    assert take(step(three, 6, (1, 2, 0, 0, 6), you=3), Drop) == [Drop((0,))]


def test_a_fenced_bucket_waits_for_newer_orders() -> None:
    one = with_backup()
    effects = one.step(FollowerFenced(2, 9, (0,)))
    assert take(effects, StopServing) == [StopServing((0,), True)]
    step(one, 8, (1, 0, 3, 0, 8))
    assert list(one.allowed) == [SERVED]


def test_a_refusal_under_orders_that_are_known_stops_nothing() -> None:
    one = with_backup()
    effects = one.step(FollowerFenced(2, 2, (0,)))
    assert list(one.allowed) == [SERVED]
    assert said(effects, messages.Unsynced), "what was refused is not there"


# --- restore ---------------------------------------------------------------------------------------------------------


def test_a_restored_bucket_is_served_when_it_is_loaded() -> None:
    one = BucketMachine("servers/1", buckets=1)
    checkpoint = CheckpointOrder(7, "restore", "checkpoint-7")
    effects = step(one, 1, (1, 0, 0, RESTORE, 1), checkpoint=checkpoint)
    assert take(effects, RestoreBuckets) == [RestoreBuckets(checkpoint, (0,))]
    assert list(one.allowed) == [WAITING]
    assert one.step(Restored(6, (0,))) == (), "another checkpoint"
    effects = one.step(Restored(7, (0,)))
    assert take(effects, Serve) == [Serve((0,))]
    assert said(effects, messages.Took) == [messages.Took(1, ((0, 1),))]


def test_a_stale_message_from_an_unknown_sender_changes_nothing() -> None:
    one = with_backup()
    for event in (ImageAcked(9, 1, (0,)), MarkAcked(9, 1), LineLost(9), LineMade(9), Restored(1, (0,))):
        assert one.step(event) == ()
