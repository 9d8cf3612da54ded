"""Names of files: nothing that a round has written is ever in the way of another."""

from __future__ import annotations

import pytest

from edl.agent.workers.log_paths import Attempt, WorkerFiles, changed_environment, launch_folder, prefix, selected
from edl.config import LogLayout
from edl.types import Round

ROUND_3 = Attempt(Round(3), local_rank=11, rank=27, nodes=4)


class TestFiles:
    def test_are_where_torchrun_has_them(self) -> None:
        files = WorkerFiles("/logs/job_a", ROUND_3)
        assert files.folder == "/logs/job_a/attempt_2/11"
        assert files.stdout == "/logs/job_a/attempt_2/11/stdout.log"
        assert files.stderr == "/logs/job_a/attempt_2/11/stderr.log"
        assert files.error_file == "/logs/job_a/attempt_2/11/error.json"
        assert files.filtered("stdout") == "/logs/job_a/attempt_2/filtered_stdout.log"

    def test_of_paddle_are_one_for_both_streams(self) -> None:
        files = WorkerFiles("/log/job_a", ROUND_3, layout=LogLayout.PADDLE)
        assert files.stdout == files.stderr == "/log/job_a/attempt_2/11/workerlog"
        assert files.links() == {
            "workerlog.11": files.stdout,
            "envlog.11": "/log/job_a/attempt_2/11/envlog",
            "backup_env.11.json": "/log/job_a/attempt_2/11/backup_env.json",
        }

    def test_no_two_of_them_meet(self) -> None:
        attempts = [
            Attempt(Round(round), rank, ahead=ahead)
            for round in range(1, 13)
            for rank in range(12)
            for ahead in (False, True)
        ]
        folders = [WorkerFiles("/logs", one, again).folder for one in attempts for again in (1, 2, 3)]
        assert len(set(folders)) == len(folders)

    def test_a_worker_without_a_world_has_its_own_and_no_links(self) -> None:
        files = WorkerFiles("/logs", Attempt(Round(0), 1, ahead=True), layout=LogLayout.PADDLE)
        assert files.folder == "/logs/attempt_0_ahead/1"
        assert files.links() == {}

    def test_where_nothing_is_kept_there_are_none(self) -> None:
        files = WorkerFiles("", ROUND_3, layout=LogLayout.PADDLE)
        names = (
            files.folder,
            files.stdout,
            files.stderr,
            files.error_file,
            files.environment,
            files.filtered("stdout"),
        )
        assert set(names) == {""}
        assert files.links() == {}


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        ([], "job_a"),
        (["job_b", "job_ab", "job_a.b"], "job_a"),
        (["job_a"], "job_a.2"),
        (["job_a", "job_a.2", "job_a.4"], "job_a.5"),
        (["job_a.7"], "job_a.8"),
    ],
)
def test_each_launch_has_a_folder_of_its_own(taken: list[str], name: str) -> None:
    assert launch_folder("job_a", taken) == name


class TestPrefix:
    def test_names_the_rank_as_torchrun_does(self) -> None:
        assert prefix("", Attempt(Round(1), 0, 5), "a") == "[default5]:"
        assert prefix("", Attempt(Round(1), 0, 5), "a", "trainer") == "[trainer5]:"

    def test_names_the_node_where_there_are_several(self) -> None:
        assert prefix("", ROUND_3, "a") == "[default27@a]:"

    def test_a_worker_without_a_world_has_no_rank(self) -> None:
        ahead = Attempt(Round(3), 1, ahead=True)
        assert prefix("", ahead, "a") == "[a/1]:"
        assert prefix("${rank} ${local_rank} ${round}|", ahead, "a") == "- 1 -|"

    def test_may_be_put_together_from_all_that_is_known(self) -> None:
        template = "[${node} ${role_name}/${rank}/$local_rank r${round}]: "
        assert prefix(template, ROUND_3, "a", "actor") == "[a actor/27/11 r3]: "

    def test_leaves_what_it_does_not_know_as_it_is(self) -> None:
        assert prefix("${oops} $", ROUND_3, "a") == "${oops} $"


def test_a_filter_lets_through_lines_that_hold_any_of_its_texts() -> None:
    lines = [b"an apple", b"a pear", b"an orange, too", b""]
    assert selected(lines, [b"apple", b"orange,"]) == [b"an apple", b"an orange, too"]
    assert selected(lines, []) == []


def test_the_note_of_an_environment_holds_only_what_the_launcher_adds() -> None:
    base = {"HOME": "/root", "SECRET": "s", "LANG": "C"}
    assert changed_environment({**base, "RANK": "3", "LANG": "en", "A": "1"}, base) == "A=1\nLANG=en\nRANK=3\n"
