"""Logs of all rounds stay, and the root cause is what a console ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import ROOT, WORKERS, Job, OutsideEtcd, until

CRASHING = """
import os, pathlib, sys, time
round, rank = int(os.environ["EDL_ROUND"]), int(os.environ["RANK"])
print(f"round {round} rank {rank} out")
print(f"round {round} rank {rank} err", file=sys.stderr)
spoken = pathlib.Path(f"{__file__}.{round}")
if rank == round % 2:
    while not spoken.exists():
        time.sleep(0.01)
    raise ValueError(f"boom in round {round}")
spoken.touch()
time.sleep(600)
"""
LATE = """
import os, socket, sys

close, fork_server = socket.socket.close, os.getpid()

def tell(self):
    if os.getpid() == fork_server and sys._getframe(1).f_code.co_name == "_hear_agent":
        print("the process that forks the workers ends", file=sys.stderr, flush=True)
    close(self)

socket.socket.close = tell
"""
"""Imported ahead of the workers: something that speaks when the launcher has nearly ended, and waits for that."""
RECORDED = """
import multiprocessing, os, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def child():
    raise OSError("the child of round 1 has no disk")

@record
def main():
    round = int(os.environ["EDL_ROUND"])
    if round == 1:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    if round == 2:
        raise ValueError("the loss of round 2 is not a number")
    sys.exit(7)

main()
"""


def test_three_rounds_are_all_still_there_and_the_last_words_are_the_root_cause(
    tmp_path: Path, etcd: OutsideEtcd
) -> None:
    script, outer = tmp_path / "crash.py", tmp_path / "outer" / "error.json"
    script.write_text(CRASHING)
    (tmp_path / "late.py").write_text(LATE)
    job = Job(
        tmp_path,
        [etcd.endpoint],
        script=(str(script),),
        options=("--max-restarts=2", "--redirects=3", "--preload=late"),
        environment={"TORCHELASTIC_ERROR_FILE": str(outer), "PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )
    with job:
        node = job.start("a", nproc=2)
        assert node.exit_code() == ExitCode.WORKER_FAILED
        (logs,) = node.folder.iterdir()
        for round in (1, 2, 3):
            for rank in (0, 1):
                folder = logs / f"attempt_{round - 1}" / str(rank)
                assert (folder / "stdout.log").read_text() == f"round {round} rank {rank} out\n"
                first, *rest = (folder / "stderr.log").read_text().splitlines()
                assert first == f"round {round} rank {rank} err"
                failing = rank == round % 2
                assert [line for line in rest if line.startswith("ValueError")] == [
                    f"ValueError: boom in round {round}"
                ] * failing
                assert (folder / "error.json").exists() == failing
        assert (logs / "latest").resolve() == (logs / "attempt_2").resolve()

        before, mark, block = node.text.partition("Root Cause (first observed failure):\n")
        assert mark and "Traceback" not in before
        assert before.splitlines().count("the process that forks the workers ends") == 1
        lines = block.splitlines()
        assert (lines[0], lines[-1]) == ("[0]:", "=" * 60)
        keys = {line[2:12].strip(): line[14:] for line in lines[1:-4]}
        assert (keys["rank"], keys["exitcode"].split()[0]) == ("1 (local_rank: 1)", "1")
        assert keys["error_file"] == str(logs / "attempt_2" / "1" / "error.json")
        assert keys["traceback"] == "Traceback (most recent call last):"
        assert lines[-2] == "    ValueError: boom in round 3"

        report = node.report()
        assert [(one["rank"], one["round"], one["error_file"]) for one in report["failures"]] == [
            (1, 3, keys["error_file"])
        ]
        message = json.loads(outer.read_text())["message"]
        assert (message["message"], message["errorCode"]) == ("ValueError: boom in round 3", 1)
        written = json.loads(Path(keys["error_file"]).read_text())["message"]
        assert message["extraInfo"] == written["extraInfo"]


def test_paddles_users_find_their_files(tmp_path: Path, etcd: OutsideEtcd) -> None:
    script, folder = tmp_path / "tell.py", tmp_path / "log"
    script.write_text("import os\nprint('worker', os.environ['RANK'], os.environ['PADDLE_LOG_DIR'])\n")
    folder.mkdir()
    (folder / "workerlog.1").write_text("of an earlier run under paddle.distributed.launch\n")
    options = ("--log-layout=paddle", f"--log-dir={folder}")
    with Job(tmp_path, [etcd.endpoint], script=(str(script),), options=options) as job:
        node = job.start("a", nproc=2)
        assert node.exit_code() == 0
        assert f"worker 0 {folder}\n" in node.text and "worker 1" not in node.text
        for rank in (0, 1):
            link = folder / f"workerlog.{rank}"
            assert link.read_text() == f"worker {rank} {folder}\n"
            assert link.resolve() == folder / f"{job.name}_a" / "attempt_0" / str(rank) / "workerlog"
            assert f"PADDLE_TRAINER_ID={rank}\n" in (folder / f"envlog.{rank}").read_text()
        assert (folder / "workerlog.1.2").read_text().startswith("of an earlier run")


@pytest.mark.soak
def test_torchs_decorator_is_believed_for_its_own_round_only(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """An error of a child process, one of the worker, and an end that nobody has described."""
    script = tmp_path / "recorded.py"
    script.write_text(RECORDED)
    options = ("--max-restarts=2", "--slot-strikes=0")
    with Job(tmp_path, [etcd.endpoint], script=(str(script),), options=options) as job:
        node = job.start("a")
        assert node.exit_code() == ExitCode.WORKER_FAILED
        for cause in ("OSError: the child of round 1 has no disk; restart 1", "round 2 is not a number; restart 2"):
            assert cause in node.text
        (last,) = node.report()["failures"]
        assert (last["round"], last["exit_code"], last["exception"], last["error_file"]) == (3, 7, "", "")


@pytest.mark.soak
def test_a_worker_that_lives_on_writes_into_the_files_of_each_round(tmp_path: Path, etcd: OutsideEtcd) -> None:
    script = (str(WORKERS / "rejoin_torch.py"),)
    with Job(tmp_path, [etcd.endpoint], script=script, options=("--redirects=3",)) as job:
        job.start("a", "b")
        before = job.wait_world(2)
        job.kill("b")
        after = job.wait_world(1, after=before.round)
        assert after.pids_of("a") == before.pids_of("a")
        (logs,) = job.nodes["a"].folder.iterdir()
        until(lambda: (logs / f"attempt_{after.round - 1}" / "0" / "stderr.log").exists(), "the round's own file")
        assert (logs / "latest").resolve().name == f"attempt_{after.round - 1}"
