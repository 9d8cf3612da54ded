"""Settings are checked when they are made, in words that say what to do."""

from __future__ import annotations

import itertools
import math

import pytest

from edl.config import (
    MAX_NODES,
    FaultTolerance,
    HangTimeout,
    HyperPolicy,
    JobSpec,
    LogPlan,
    LrRule,
    NodeRange,
    StreamTarget,
    Timeouts,
    check_job_id,
    environment,
    parse_nnodes,
)
from edl.errors import SettingError, UsageError
from edl.exit_codes import ExitCode
from edl.launch.options.agreement import differences
from edl.types import JobId

JOB = JobId("job")


class TestNodeRange:
    @pytest.mark.parametrize(
        ("text", "unit", "setting", "words"),
        [
            ("3:2", 1, "--nnodes", ["3:2", "the maximum 2 is below the minimum 3", "--nnodes=2:3"]),
            ("0", 1, "--nnodes", ["0:0", "at least 1", "MIN:MAX"]),
            ("-1:2", 1, "--nnodes", ["-1:2", "at least 1"]),
            (f"1:{MAX_NODES + 1}", 1, "--nnodes", [str(MAX_NODES + 1), f"at most {MAX_NODES}"]),
            ("1:3", 4, "--node-unit", ["=4", "--nnodes=1:3", "multiple of 4", "Raise the maximum to 4"]),
            ("5:7", 4, "--node-unit", ["=4", "--nnodes=5:7", "Raise the maximum to 8"]),
            ("1:4", 0, "--node-unit", ["=0", "at least 1"]),
            ("two", 1, "--nnodes", ["two", "not a number", "such as 2 or 1:4"]),
            ("1:", 1, "--nnodes", ["1:", "not a number"]),
            (":4", 1, "--nnodes", [":4", "not a number"]),
            ("1:2:3", 1, "--nnodes", ["1:2:3", "not a number"]),
            ("1.5", 1, "--nnodes", ["1.5", "not a number"]),
            ("", 1, "--nnodes", ["--nnodes=", "not a number"]),
        ],
    )
    def test_says_what_is_wrong_with_a_range(self, text: str, unit: int, setting: str, words: list[str]) -> None:
        with pytest.raises(SettingError) as caught:
            parse_nnodes(text, unit)
        assert caught.value.setting == setting
        assert str(caught.value).startswith(f"{setting}=")
        assert [word for word in words if word not in str(caught.value)] == []

    def test_is_an_error_of_whoever_typed_it(self) -> None:
        with pytest.raises(UsageError) as caught:
            parse_nnodes("x")
        assert caught.value.exit_code is ExitCode.USAGE

    @pytest.mark.parametrize(
        ("text", "unit", "shown"),
        [("4", 1, "4"), ("1:4", 1, "1:4"), ("4:4", 1, "4"), ("2:9", 3, "2:9 in units of 3"), ("100000", 1, "100000")],
    )
    def test_reads_what_people_write(self, text: str, unit: int, shown: str) -> None:
        assert str(parse_nnodes(text, unit)) == shown

    def test_fits_as_many_nodes_as_the_rules_allow(self) -> None:
        checked = 0
        for minimum, maximum, unit in itertools.product(range(1, 8), range(1, 12), range(1, 6)):
            allowed = [size for size in range(minimum, maximum + 1) if size % unit == 0]
            if not allowed:
                with pytest.raises(SettingError):
                    NodeRange(minimum, maximum, unit)
                continue
            nodes = NodeRange(minimum, maximum, unit)
            assert (nodes.lowest, nodes.highest) == (allowed[0], allowed[-1])
            for available in range(15):
                assert nodes.fit(available) == max((size for size in allowed if size <= available), default=0)
                checked += 1
        assert checked > 1000


class TestTimeouts:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("recover_s", 0.0, "--recover-timeout=0: must be more than 0"),
            ("recover_s", -1.5, "--recover-timeout=-1.5: must be more than 0"),
            ("recover_s", math.nan, "--recover-timeout=nan: must be more than 0"),
            ("join_grace_s", -0.1, "--join-grace=-0.1: must be 0 or more"),
            ("join_grace_s", math.nan, "--join-grace=nan: must be 0 or more"),
            ("shutdown_s", -1, "--shutdown-timeout=-1: must be 0 or more"),
            ("lease_ttl_s", 0.5, "--lease-ttl=0.5: must be from 1 to 3600 seconds"),
            ("lease_ttl_s", 3601, "--lease-ttl=3601: must be from 1 to 3600 seconds"),
            ("lease_ttl_s", math.nan, "--lease-ttl=nan: must be from 1 to 3600 seconds"),
        ],
    )
    def test_refuses_impossible_times(self, field: str, value: float, message: str) -> None:
        with pytest.raises(SettingError) as caught:
            Timeouts(**{field: value})  # type: ignore[arg-type]
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("auto", "seconds", "message"),
        [
            (True, 0.0, "--hang-timeout=0: must be more than 0"),
            (True, math.nan, "--hang-timeout=nan: must be more than 0"),
            (False, -1.0, "--hang-timeout=-1: must be 0 or more"),
        ],
    )
    def test_refuses_impossible_limits_for_hangs(self, auto: bool, seconds: float, message: str) -> None:
        with pytest.raises(SettingError) as caught:
            HangTimeout(auto, seconds)
        assert str(caught.value) == message

    def test_takes_the_ends_of_each_range(self) -> None:
        Timeouts(recover_s=math.inf, join_grace_s=0, lease_ttl_s=1.0, shutdown_s=0)
        Timeouts(recover_s=0.001, lease_ttl_s=3600)


class TestJobSpec:
    def test_refuses_a_negative_budget(self) -> None:
        with pytest.raises(SettingError, match=r"--max-restarts=-1: must be 0 or more"):
            JobSpec(JOB, NodeRange(1, 1), max_restarts=-1)
        assert JobSpec(JOB, NodeRange(1, 1), max_restarts=0).max_restarts == 0

    def test_checks_its_id(self) -> None:
        with pytest.raises(SettingError, match="--rdzv-id"):
            JobSpec(JobId("a/b"), NodeRange(1, 1))

    def test_does_not_differ_from_its_equal(self) -> None:
        assert differences(JobSpec(JOB, NodeRange(1, 4)), JobSpec(JOB, NodeRange(1, 4))) == []

    def test_names_each_difference(self) -> None:
        mine = JobSpec(JOB, NodeRange(1, 4))
        theirs = JobSpec(
            JOB, NodeRange(2, 4, 2), 5, FaultTolerance.RECOVER, Timeouts(60, 2.5, lease_ttl_s=10, shutdown_s=7)
        )
        assert differences(mine, theirs) == [
            "--nnodes=1:4 (the running job has 2:4)",
            "--node-unit=1 (the running job has 2)",
            "--max-restarts=3 (the running job has 5)",
            "--fault-tolerance=elastic (the running job has recover)",
            "--recover-timeout=600 (the running job has 60)",
            "--join-grace=1 (the running job has 2.5)",
            "--lease-ttl=3 (the running job has 10)",
            "--shutdown-timeout=30 (the running job has 7)",
        ]

    def test_batch_and_learning_rate_are_the_same_everywhere(self) -> None:
        mine = JobSpec(JOB, NodeRange(1, 4), hyper=HyperPolicy(64, 0, LrRule.SQRT, 10))
        theirs = JobSpec(JOB, NodeRange(1, 4), hyper=HyperPolicy(0, 16, LrRule.NONE, 10, 2, 4))
        assert differences(mine, theirs) == [
            "--global-batch=64 (the running job has 0)",
            "--local-batch=0 (the running job has 16)",
            "--lr-rule=sqrt (the running job has none)",
            "--lr-reference=0 (the running job has 2)",
            "--logical-ranks=0 (the running job has 4)",
        ]


class TestJobId:
    @pytest.mark.parametrize("job", ["a", "my-job_7.b", "A" * 128, "0"])
    def test_takes_one_path_segment(self, job: str) -> None:
        check_job_id(job)

    @pytest.mark.parametrize(
        ("job", "words"),
        [
            ("", ["''", "must not be empty", "the same on every node"]),
            ("a/b", ["'a/b'", "'/' not allowed", "Use letters"]),
            ("a b\n", ["'\\n' ' ' not allowed"]),
            ("jöb", ["'ö' not allowed"]),
            ("A" * 129, ["129 characters, at most 128"]),
        ],
    )
    def test_says_what_is_wrong(self, job: str, words: list[str]) -> None:
        with pytest.raises(SettingError) as caught:
            check_job_id(job)
        assert str(caught.value).startswith("--rdzv-id=")
        assert [word for word in words if word not in str(caught.value)] == []


class TestLogPlan:
    def test_writes_to_the_console_unless_told_otherwise(self) -> None:
        plan = LogPlan("logs")
        assert (plan.stdout(0), plan.stderr(12)) == (StreamTarget.CONSOLE, StreamTarget.CONSOLE)

    @pytest.mark.parametrize(
        ("bits", "stdout", "stderr"),
        [
            (0, StreamTarget.CONSOLE, StreamTarget.CONSOLE),
            (1, StreamTarget.FILE, StreamTarget.CONSOLE),
            (2, StreamTarget.CONSOLE, StreamTarget.FILE),
            (3, StreamTarget.FILE, StreamTarget.FILE),
        ],
    )
    def test_counts_streams_as_torchrun_does(self, bits: int, stdout: StreamTarget, stderr: StreamTarget) -> None:
        plan = LogPlan("logs", redirect_all=bits)
        assert (plan.stdout(3), plan.stderr(3)) == (stdout, stderr)
        both = {StreamTarget.FILE: StreamTarget.BOTH, StreamTarget.CONSOLE: StreamTarget.CONSOLE}
        plan = LogPlan("logs", tee_all=bits)
        assert (plan.stdout(3), plan.stderr(3)) == (both[stdout], both[stderr])

    def test_a_rank_of_its_own_wins_over_the_default(self) -> None:
        plan = LogPlan("logs", redirects={1: 0}, redirect_all=3)
        assert plan.stdout(0) is StreamTarget.FILE
        assert plan.stdout(1) is StreamTarget.CONSOLE

    def test_tee_wins_over_redirects(self) -> None:
        plan = LogPlan("logs", redirects={0: 3}, tee={0: 2})
        assert plan.stdout(0) is StreamTarget.FILE
        assert plan.stderr(0) is StreamTarget.BOTH


def test_environment_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_TEST_VALUE", "1")
    copy = environment()
    assert copy["EDL_TEST_VALUE"] == "1"
    copy["EDL_TEST_VALUE"] = "2"
    assert environment()["EDL_TEST_VALUE"] == "1"
