"""Nodes as Slurm jobs, on a real Slurm: what the rules that hold for all schedulers (test_schedulers.py) do not say."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.errors import SchedulerError
from edl.job_records import SchedulerChoice
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.port import SchedulerSize, Sized
from edl.schedulers.slurm import Slurm as Adapter
from edl.schedulers.slurm import make
from tests.contract.test_schedulers import deps, eventually, run
from tests.process.harness import ROOT, until
from tests.process.slurm_fixture import MEMORY_MB, Slurm

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")
TELLER = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(sys.argv[1], 'w'))"
"""Says how it was called."""
DEPLOY = ROOT / "deploy" / "slurm"
ODD = 'a b\'s $(touch x) "q" #1 %j ;&'


@pytest.fixture
def told(tmp_path: Path, slurm: Slurm) -> SchedulerDeps:
    """For an adapter whose launchers sleep."""
    wanted = SchedulerChoice("slurm", conf={"options": f"--partition=low --mem={MEMORY_MB}", "poll": "0.1"})
    return deps(tmp_path, wanted, launcher=SLEEPER, environment=slurm.environment)


def adapter(told: SchedulerDeps, options: str = "", **conf: str) -> Adapter:
    """With further options of ``sbatch``, and other settings."""
    conf = {**told.wanted.conf, **conf, "options": f"{told.wanted.conf['options']} {options}"}
    return make(dataclasses.replace(told, wanted=SchedulerChoice("slurm", conf=conf)))


def running(one: Adapter, nodes: int) -> None:
    async def story() -> None:
        await one.request(nodes, "the test")

    run(story())
    until(lambda: run(one.current()).there == nodes, f"{nodes} nodes")


class TestSize:
    def test_those_that_wait_are_counted_and_their_reason_is_given(self, told: SchedulerDeps) -> None:
        running(adapter(told), 1)
        one = adapter(told, "--hold")
        run(one.request(3, ""))
        assert run(one.current()) == SchedulerSize(3, 1, "2 of 3 jobs wait in the queue (JobHeldUser)")

    def test_an_array_is_as_many_nodes_as_it_has_tasks(self, slurm: Slurm, told: SchedulerDeps) -> None:
        one = adapter(told)
        options = ("--job-name=edl-job", "--partition=low")
        slurm.submit(*options, "--array=1-2", command=SLEEPER)
        until(lambda: run(one.current()) == SchedulerSize(2, 2), "both run")
        waiting = slurm.submit(*options, "--hold", "--array=3-6", command=SLEEPER)
        assert run(one.current()).nodes == 6
        run(one.release([], 4, "4 are enough"))
        left = slurm.call("squeue", "--noheader", "--array", f"--jobs={waiting}", "--format=%K").split()
        assert len(left) == 2, "only some of the array are cancelled"
        assert run(one.current()) == SchedulerSize(4, 2, "2 of 4 jobs wait in the queue (JobHeldUser)")

    def test_other_jobs_do_not_count(self, slurm: Slurm, told: SchedulerDeps) -> None:
        for name in ("edl-job2", "edl", "edl-jo"):
            slurm.submit("--hold", f"--job-name={name}", command=SLEEPER)
        assert run(adapter(told).current()) == SchedulerSize(0, 0)

    def test_a_node_that_gives_way_is_asked_for_again(self, slurm: Slurm, told: SchedulerDeps) -> None:
        """Preempted: its job ends, and another one waits for its place."""
        one = adapter(told)
        running(one, 2)
        high = slurm.submit("--partition=high", "--ntasks=8", command=SLEEPER)
        slurm.wait(high, "RUNNING")
        assert run(one.current()) == SchedulerSize(0, 0)
        run(one.request(2, "two are wanted"))
        until(lambda: "wait in the queue (" in run(one.current()).detail, "Slurm's reason")
        assert run(one.current()).there == 0
        slurm.call("scancel", str(high))
        until(lambda: run(one.current()) == SchedulerSize(2, 2), "they run")


class TestRelease:
    def test_one_that_has_begun_meanwhile_is_spared(self, told: SchedulerDeps) -> None:
        one = adapter(told)
        running(one, 2)
        run(one.release([], 1, "1 is enough"))
        assert run(one.current()) == SchedulerSize(2, 2), "it joins, and is told to leave then"

    def test_those_that_wait_are_cancelled_the_youngest_first(self, slurm: Slurm, told: SchedulerDeps) -> None:
        one = adapter(told, "--hold")
        run(one.request(3, ""))
        run(one.release([], 1, "1 is enough"))
        oldest = min(task.number for task in slurm.tasks()[-3:])
        until(lambda: [task.number for task in slurm.tasks() if task.state == "PENDING"] == [oldest], "the oldest")

    def test_when_the_job_has_ended_nobody_starts_it_again(self, slurm: Slurm, told: SchedulerDeps) -> None:
        """Jobs that have not come yet are cancelled, running or not. A person's own, and nodes of the job, are not."""
        one = adapter(told)
        running(one, 2)
        member, late = sorted(task.number for task in slurm.tasks() if task.state == "RUNNING")
        by_hand = slurm.submit("--partition=low", "--job-name=edl-job", command=SLEEPER)
        slurm.wait(by_hand, "RUNNING")
        run(adapter(told, "--hold").request(4, ""))
        run(one.release([f"slurm-{member}"], 0, "the job has ended"))
        until(lambda: slurm.task(late).state not in ("RUNNING", "COMPLETING"), "the late one is cancelled")
        assert slurm.task(member).state == slurm.task(by_hand).state == "RUNNING"
        assert run(one.current()) == SchedulerSize(2, 2)


class TestSubmit:
    def test_whatever_is_in_names_reasons_and_arguments(
        self, slurm: Slurm, told: SchedulerDeps, tmp_path: Path
    ) -> None:
        launcher = (sys.executable, "-c", TELLER, str(tmp_path / "seen.json"), "a b", "$HOME", "it's", '"', "\\", "*")
        own = dataclasses.replace(told, launcher=launcher, log_folder=tmp_path / "50% of%j logs")
        one = adapter(own, name=ODD)
        run(one.request(1, "more|for 'them'\nand\x1f 100 % \"now\"; é" + "x" * 500))
        until(lambda: (tmp_path / "seen.json").exists() and (tmp_path / "seen.json").read_text(), "its call")
        assert json.loads((tmp_path / "seen.json").read_text())[0][1:] == ["a b", "$HOME", "it's", '"', "\\", "*"]
        assert not list(tmp_path.rglob("x"))
        (log,) = own.log_folder.iterdir()
        assert log.name == f"slurm-{slurm.tasks()[-1].number}.log"
        until(lambda: run(one.current()) == SchedulerSize(0, 0), "its end")
        held = adapter(own, "--hold", name=ODD)
        run(held.request(1, "a|b"))
        assert run(one.current()).nodes == 1, "found again by its name"

    def test_the_masters_own_job_is_not_the_nodes(self, slurm: Slurm, told: SchedulerDeps, tmp_path: Path) -> None:
        """Its environment is passed on, but for what Slurm has put in for the job that the Master runs in."""
        inherited = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "99999999", "SLURMD_NODENAME": "x", "SBATCH_QOS": "y"}
        inherited |= {"CUDA_VISIBLE_DEVICES": "3", "EDL_NNODES": "1:8", "SLURM_NTASKS": "64", "PMI_RANK": "4"}
        inherited |= {"SQUEUE_STATES": "R", "SCANCEL_STATE": "PENDING"}
        launcher = (sys.executable, "-c", TELLER, str(tmp_path / "seen.json"))
        own = dataclasses.replace(told, launcher=launcher, environment={**inherited, **slurm.environment})
        run(adapter(own).request(1, ""))
        until(lambda: (tmp_path / "seen.json").exists() and (tmp_path / "seen.json").read_text(), "its call")
        seen: dict[str, str] = json.loads((tmp_path / "seen.json").read_text())[1]
        assert seen["EDL_NNODES"] == "1:8" and seen["SLURM_CONF"] == str(slurm.conf)
        assert not {"CUDA_VISIBLE_DEVICES", "PMI_RANK", "SBATCH_QOS", "SQUEUE_STATES", "SCANCEL_STATE"} & set(seen)
        assert (seen["SLURM_JOB_ID"], seen["SLURM_STEP_NUM_TASKS"]) == (str(slurm.tasks()[-1].number), "1")
        assert (seen["SLURM_MEM_PER_NODE"], seen["SLURMD_NODENAME"]) == (str(MEMORY_MB), "edl0")

    @pytest.mark.soak
    def test_a_script_of_the_users_own_that_is_requeued(
        self, slurm: Slurm, told: SchedulerDeps, tmp_path: Path
    ) -> None:
        """One that does not end by itself when it is preempted waits in the queue again: no second one is needed."""
        script = tmp_path / "node.sbatch"
        script.write_text(
            "#!/bin/sh\n#SBATCH --requeue\n#SBATCH --output=/dev/null\n"
            f"exec srun sh -c \"trap '' TERM; echo $SLURM_RESTART_COUNT >> {tmp_path}/starts; sleep 600\"\n"
        )
        one = adapter(told, script=str(script))
        running(one, 1)
        until(lambda: (tmp_path / "starts").exists(), "its first start")
        (number,) = (task.number for task in slurm.tasks() if task.state == "RUNNING")
        high = slurm.submit("--partition=high", "--ntasks=8", command=SLEEPER)
        slurm.wait(high, "RUNNING")
        assert run(one.current()).nodes == 1
        run(one.request(1, ""))
        assert slurm.wait(number, "PENDING").fields["Restarts"] == "1"
        assert slurm.tasks()[-1].number == high, "nothing was submitted"
        slurm.call("scancel", str(high))
        slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now")
        until(lambda: run(one.current()) == SchedulerSize(1, 1), "it runs again")
        until(lambda: (tmp_path / "starts").read_text().split() == ["1"], "its second start")


class TestScripts:
    @pytest.mark.parametrize("script", sorted(path.name for path in DEPLOY.glob("*.sbatch")))
    def test_slurm_takes_every_option(self, slurm: Slurm, script: str) -> None:
        text = (DEPLOY / script).read_text()
        told = re.findall(r"^#SBATCH (--[a-z-]+(?:=\S+)?)$", text, re.MULTILINE)
        assert len(told) == text.count("\n#SBATCH") >= 8
        told = [option for option in told if not option.startswith("--array=")]  # tried as a whole it leaves a trace
        slurm.call("sbatch", "--test-only", *told, "--mem=10", "--wrap=true")
        with pytest.raises(AssertionError, match="unrecognized option"):  # a wrong one would be seen
            slurm.call("sbatch", "--test-only", *told, "--requeues", "--mem=10", "--wrap=true")


class TestWatch:
    def test_somebody_cancels_a_node(self, slurm: Slurm, told: SchedulerDeps) -> None:
        one = adapter(told)
        running(one, 2)

        async def story() -> None:
            watch = one.watch()
            assert await watch.__anext__() == Sized(SchedulerSize(2, 2))
            slurm.call("scancel", str(slurm.tasks()[-1].number))
            assert await watch.__anext__() == Sized(SchedulerSize(1, 1))
            await watch.aclose()  # type: ignore[attr-defined]

        run(story())


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ("--partition=nowhere", "invalid partition"),
            ("--mem=10T", "configuration is not available"),
            ("--time=soon", "Invalid --time"),
            ("--no-such-option", "unrecognized option"),
        ],
    )
    def test_what_will_not_pass_by_itself(self, told: SchedulerDeps, options: str, said: str) -> None:
        with pytest.raises(SchedulerError, match=f"(?i)sbatch exited with status .*{said}") as caught:
            run(adapter(told, options).request(1, ""))
        assert not caught.value.retry

    def test_the_controller_goes_and_comes_back(self, slurm: Slurm, told: SchedulerDeps, tmp_path: Path) -> None:
        impatient = tmp_path / "slurm.conf"  # a client of its own gives up after a second, not after ten
        impatient.write_text(slurm.conf.read_text() + "MessageTimeout=1\n")
        one = adapter(dataclasses.replace(told, environment={**slurm.environment, "SLURM_CONF": str(impatient)}))
        running(adapter(told), 1)

        async def story() -> list[Any]:
            watch = one.watch()
            seen = [await watch.__anext__()]
            with away(slurm):
                for call in (one.current(), one.request(2, ""), one.release([], 0, "")):
                    with pytest.raises(SchedulerError, match="Unable to contact slurm controller") as caught:
                        await call
                    assert caught.value.retry
                following = asyncio.ensure_future(anext(watch))
                await asyncio.sleep(0.5)
                assert not following.done(), "the watch goes on, and says nothing"
            await eventually(lambda: bool(slurm.tasks()), "the controller's answer")
            await adapter(told).request(2, "")
            return [*seen, await following]

        first, second = run(story())
        assert first == Sized(SchedulerSize(1, 1))
        assert second.size.nodes == 2

    def test_one_that_does_not_answer_in_time(self, slurm: Slurm, told: SchedulerDeps) -> None:
        with away(slurm), pytest.raises(SchedulerError, match=r"squeue took longer than 0.5 s") as caught:
            run(adapter(told, timeout="0.5").current())
        assert caught.value.retry


@contextlib.contextmanager
def away(slurm: Slurm) -> Iterator[None]:
    """No controller for the time of the block."""
    slurm.stop_controller()
    try:
        yield
    finally:
        slurm.start_controller()
