"""What a lease request tells its worker, and what becomes of reports: late, wrong, repeated, or of unreadable files."""

from __future__ import annotations

import pytest

from data_service.leases.lease_table import RETRY_WAIT_S
from data_service.protocol.messages import DataRefused, DataSetOptions, Done, Lease, NextEpoch, Open, Opened
from edl.master.service import Fail
from tests.unit.data_service.leases.test_machine import NAME, Rule, caller, numbers
from tests.unit.data_service.test_manifest import small


class Failing(Rule):
    """Also keeps why the job must end."""

    def do(self, effects: tuple[object, ...]) -> None:
        super().do(effects)
        self.ended = [effect.text for effect in effects if isinstance(effect, Fail)]

    def attempts(self, shard: int = 0) -> int:
        return len(self.machine.sets[NAME].failures.get(shard, ()))


def reading(ranks: int = 2, failures: int = 3, shards: int = 4) -> Failing:
    rule = Failing(ranks)
    rule.start(DataSetOptions(shuffle=False, failures=failures), small(sizes=(4 * shards,)))
    return rule


class TestState:
    """A worker that hears "dry" may end its epoch early, by the rule for uneven ends; "more" keeps it waiting."""

    def test_more_while_there_is_something_to_grant(self) -> None:
        rule = reading(shards=2)
        assert rule.lease(0, 1).state == "more"
        assert rule.lease(0, 0).state == "more", "a mere report, and a shard is pending"
        assert rule.lease(1, 1).state == "more", "the last one, but it has been given one"

    def test_dry_while_others_hold_what_may_come_back(self) -> None:
        rule = reading(shards=1)
        rule.lease(0, 1)
        assert rule.lease(1, 1).state == rule.lease(1, 0).state == "dry"

    def test_finished_once_every_shard_is(self) -> None:
        rule = reading(shards=1)
        rule.lease(0, 1)
        assert rule.lease(0, 0, finished=((0, 4),)).state == "finished"
        assert rule.lease(1, 1).state == "finished"


class TestReports:
    def test_a_repeated_report_is_no_error_and_counts_once(self) -> None:
        rule = reading()
        rule.lease(0, 1)
        for _ in range(2):
            assert rule.lease(0, 0, finished=((0, 4),)).refused == ()
        assert rule.machine.sets[NAME].position.ledger.records == 4

    def test_a_failure_to_read_what_another_one_holds_does_not_count(self) -> None:
        rule = reading()
        rule.lease(0, 1)
        refused = rule.lease(1, 0, failed=((0, 2, "bad magic"),)).refused
        assert refused == ((0, "shard 0 is leased to worker 0 on n0, not to worker 0 on n1"),)
        assert rule.attempts() == 0
        assert rule.lease(0, 0, finished=((0, 4),)).refused == ()

    def test_what_was_read_at_last_has_no_failures_any_more(self) -> None:
        rule = reading(shards=8)
        rule.lease(0, 1)
        rule.lease(0, 0, failed=((0, 0, "timed out"),))
        assert rule.attempts() == 1
        assert numbers(rule.lease(1, 1)) == [0]
        rule.lease(0, 1)
        rule.lease(0, 0, finished=((1, 4),))
        assert rule.attempts() == 1
        rule.lease(1, 0, finished=((0, 4),))
        assert rule.attempts() == 0

    def test_each_epoch_counts_failures_anew(self) -> None:
        rule = reading(ranks=1, shards=1, failures=2)
        rule.lease(0, 1)
        rule.lease(0, 0, failed=((0, 0, "timed out"),))
        rule.get(Done, 0, NextEpoch, 1, 4)
        assert numbers(rule.lease(0, 1, epoch=1)) == [0]
        rule.lease(0, 0, epoch=1, failed=((0, 0, "timed out"),))
        assert rule.flaws == {}
        assert rule.attempts() == 1


class TestUnreached:
    """A file that nobody can reach may be intact: it is not skipped, its records would be missing without a word."""

    def failing(self, *unreached: bool) -> Failing:
        rule = reading(failures=len(unreached), shards=1)
        for rank, one in enumerate(unreached):
            rule.wait(RETRY_WAIT_S)
            assert rule.ended == []
            assert numbers(rule.lease(rank % 2, 1)) == [0]
            rule.lease(rank % 2, 0, failed=((0, 0, f"reason {rank}"),), unreached=((0, 1),) if one else ())
        return rule

    def test_the_job_ends(self) -> None:
        rule = self.failing(True, True, True)
        assert rule.flaws == {}
        (text,) = rule.ended
        assert "no worker can access part-0 (3 attempts: worker 0 on n0: reason 0; worker 0 on n1: reason 1;" in text

    @pytest.mark.parametrize("which", range(3))
    def test_it_is_skipped_if_any_worker_reached_it_and_found_it_damaged(self, which: int) -> None:
        rule = self.failing(*(number != which for number in range(3)))
        assert rule.ended == []
        assert "skipped as unreadable" in rule.flaws[f"data/{NAME}"]


class TestInFlight:
    """The Master or a stream was lost while the report of a failure was on its way."""

    def opened_again(self) -> Failing:
        rule = reading()
        rule.lease(0, 1)
        rule.get(Opened, 0, Open, 0, returned=((0, 1),))
        return rule

    def test_it_counts_although_the_shard_is_free_again(self) -> None:
        rule = self.opened_again()
        assert rule.lease(0, 0, failed=((0, 1, "bad magic"),)).refused == ()
        assert rule.attempts() == 1
        assert numbers(rule.lease(0, 1)) == [1], "another worker tries that one"
        assert numbers(rule.lease(1, 1)) == [0]

    def test_the_file_gets_its_time_if_it_was_out_of_reach(self) -> None:
        rule = reading(ranks=1, shards=1)
        rule.lease(0, 1)
        rule.get(Opened, 0, Open, 0, returned=((0, 1),))
        rule.wait(100.0)
        rule.lease(0, 0, failed=((0, 1, "gone"),), unreached=((0, 1),))
        assert numbers(rule.lease(0, 1)) == []
        rule.wait(RETRY_WAIT_S)
        assert numbers(rule.lease(0, 1)) == [0]

    def test_another_worker_tries_first_even_if_nothing_was_read_and_the_master_is_new(self) -> None:
        before = reading(shards=8)
        before.lease(0, 1)
        rule = Failing(2, before.kept, taken_over=True)
        rule.get(Opened, 0, Open, 0, returned=((0, 0),))
        rule.get(Opened, 1, Open, 1)
        assert rule.lease(0, 0, failed=((0, 0, "bad magic"),)).refused == ()
        assert numbers(rule.lease(0, 1)) == [1]
        assert numbers(rule.lease(1, 1)) == [0]

    def test_only_once(self) -> None:
        rule = self.opened_again()
        rule.lease(0, 0, failed=((0, 1, "bad magic"),))
        assert rule.lease(0, 0, failed=((0, 1, "bad magic"),)).refused == (
            (0, "shard 0 is pending, not leased to worker 0 on n0"),
        )
        assert rule.attempts() == 1

    def test_not_if_another_one_reads_it_by_now(self) -> None:
        rule = self.opened_again()
        assert numbers(rule.lease(1, 1)) == [0]
        assert rule.lease(0, 0, failed=((0, 1, "bad magic"),)).refused == (
            (0, "shard 0 is leased to worker 0 on n1, not to worker 0 on n0"),
        )
        assert rule.attempts() == 0

    def test_not_of_a_shard_that_this_one_never_gave_back(self) -> None:
        rule = self.opened_again()
        assert rule.lease(0, 0, failed=((3, 0, "bad magic"),)).refused == (
            (3, "shard 3 is pending, not leased to worker 0 on n0"),
        )


class TestEpochs:
    def test_only_who_has_opened_begins_one(self) -> None:
        rule = Failing(2)
        rule.start(DataSetOptions(shuffle=False), small())
        rule.begin(2)
        assert isinstance(rule.say(0, NextEpoch, 1, 14), DataRefused)
        assert isinstance(rule.say(0, Lease, 0, 1), DataRefused)
        assert caller(0) in rule.received

    def test_one_that_is_finished_ends_without_a_word_about_dropped_records(self) -> None:
        rule = reading(ranks=1, shards=1)
        rule.lease(0, 1)
        rule.lease(0, 0, finished=((0, 4),))
        before = list(rule.notes)
        rule.get(Done, 0, NextEpoch, 1, 3)
        assert rule.notes == before
        assert numbers(rule.lease(0, 1, epoch=1)) == [0]

    def test_to_begin_it_again_is_no_error_and_changes_nothing(self) -> None:
        rule = reading(ranks=1, shards=1)
        rule.get(Done, 0, NextEpoch, 1, 4)
        rule.lease(0, 1, epoch=1)
        rule.get(Done, 0, NextEpoch, 1, 4)
        assert rule.lease(0, 0, epoch=1, finished=((0, 4),)).refused == ()
        assert rule.get(DataRefused, 0, NextEpoch, 3, 4).kind == "epoch"
