"""Slurm without a Slurm: what is read, what is refused, and the scripts of deploy/slurm."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import click
import pytest

from edl.adapters.secret_file import SHARED
from edl.errors import SchedulerError, SettingError
from edl.exit_codes import ExitCode
from edl.job_records import SchedulerChoice
from edl.launch.options import launcher_options
from edl.launch.scale_options import KINDS
from edl.schedulers.port import SchedulerSize
from edl.schedulers.slurm import MARK, Queued, check, make, node_name, queue_from
from tests.contract.test_schedulers import deps, run
from tests.support.script_folder import folder
from tests.unit.edl.launch.test_cli import read

__all__ = ["folder"]

ROOT = Path(__file__).resolve().parents[4]
DEPLOY = ROOT / "deploy" / "slurm"
SCRIPTS = sorted(path.name for path in DEPLOY.glob("*.sbatch"))
DRAINED = 100
"""``--drained-exit-code`` of requeue.sbatch."""
LEFT = {DRAINED, ExitCode.TERMINATED}
PASSING = {
    *(ExitCode.NOT_ENOUGH_NODES, ExitCode.STORE_UNREACHABLE, ExitCode.PORT_IN_USE),
    *(ExitCode.CANNOT_START_WORKER, ExitCode.INTERNAL, 137),
}
"""Ends after which it may do better later or elsewhere, but not for ever."""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs called like Slurm's, the only ones on the PATH beside the shell's."""
    folder = tmp_path / "bin"
    for name in ("sbatch", "squeue", "scancel"):
        program(folder, name, "exit 0")
    (folder / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(folder))
    return folder


class TestRead:
    @pytest.mark.parametrize(
        ("said", "found"),
        [
            ("", []),
            ("7|7|RUNNING|None|(null)", [Queued("7", 7, "RUNNING", "None", False)]),
            (f"7|7|PENDING|Priority|{MARK}a|b", [Queued("7", 7, "PENDING", "Priority", True)]),
            ("9_3|12|RUNNING|None|", [Queued("9_3", 12, "RUNNING", "None", False)]),
            ("7|7|CONFIGURING|None|", [Queued("7", 7, "CONFIGURING", "None", False)]),
            ("7|7|COMPLETING|None|\n8|8|PREEMPTED|None|\n9|9|FAILED|None|", []),
            ("slurm_load_jobs error\n|||\n7|7\nx|y|RUNNING|z|", []),
        ],
    )
    def test_what_squeue_prints(self, said: str, found: list[Queued]) -> None:
        assert queue_from(said) == found

    @pytest.mark.parametrize(
        ("environment", "name"),
        [
            ({}, ""),
            ({"SLURM_JOB_ID": "7"}, "slurm-7"),
            ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, "slurm-7"),
            ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, ""),
            ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, "slurm-7"),
            ({"SLURM_JOB_ID": "x"}, ""),
        ],
    )
    def test_how_a_launcher_is_called(self, environment: dict[str, str], name: str) -> None:
        assert node_name(environment) == name

    def test_the_name_is_a_default_where_slurm_gives_nodes(
        self, programs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        assert read("--scheduler=slurm", "train.py").node.name == "slurm-7"
        assert read("--scheduler=slurm", "--node-id=mine", "train.py").node.name == "mine"
        assert read("train.py").node.name.startswith(socket.gethostname())


class TestCheck:
    def test_programs_have_to_be_there(self, programs: Path) -> None:
        check(SchedulerChoice("slurm"))
        (programs / "squeue").unlink()
        with pytest.raises(SettingError, match="squeue is not on the PATH"):
            check(SchedulerChoice("slurm"))

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("poll", "0", "must be from 0.001 to 86400 seconds"),
            ("timeout", "soon", "must be from 0.001 to 86400 seconds"),
            ("timeout", "nan", "must be from 0.001 to 86400 seconds"),
            ("options", "--comment='x", "cannot be split into words"),
            ("script", "/no/such/file", "no such file"),
        ],
    )
    def test_settings(self, programs: Path, key: str, value: str, said: str) -> None:
        with pytest.raises(SettingError, match=said):
            check(SchedulerChoice("slurm", conf={key: value}))


class TestAnswers:
    """Of programs that behave badly."""

    @pytest.mark.parametrize(
        ("text", "retry"),
        [
            ("echo nonsense", True),
            ("true", True),
            ("echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1", True),
            ("echo 'sbatch: error: Zero Bytes were transmitted or received' >&2; exit 1", True),
            ("echo 'sbatch: error: Slurm backup controller in standby mode' >&2; exit 1", True),
            ("echo 'sbatch: error: Protocol authentication error' >&2; exit 1", True),
            ("echo 'sbatch: error: Failed to connect to authentication agent' >&2; exit 1", True),
            ("echo 'Slurm temporarily unable to accept job, sleeping and retrying' >&2; exit 1", True),
            ("echo 'Job violates accounting/QOS policy (job submit limit, …)' >&2; exit 1", True),
            ("echo 'Batch job submission failed: Access/permission denied' >&2; exit 1", False),
            ("echo 'Invalid account or account/partition combination specified' >&2; exit 1", False),
        ],
    )
    def test_sbatch(self, programs: Path, tmp_path: Path, text: str, retry: bool) -> None:
        program(programs, "sbatch", text)
        one = make(deps(tmp_path, SchedulerChoice("slurm")))
        with pytest.raises(SchedulerError, match="sbatch") as caught:
            run(one.request(1, ""))
        assert caught.value.retry is retry

    def test_of_several_clusters(self, programs: Path, tmp_path: Path) -> None:
        """``--parsable`` names the cluster as well then."""
        program(programs, "sbatch", "echo '7;east'")
        said: list[str] = []
        run(make(deps(tmp_path, SchedulerChoice("slurm"), log=said.append)).request(1, "why"))
        assert said == ["slurm: submitted job 7 for an additional node (why)"]

    def test_no_program(self, programs: Path, tmp_path: Path) -> None:
        (programs / "squeue").unlink()
        with pytest.raises(SchedulerError, match="squeue cannot be started") as caught:
            run(make(deps(tmp_path, SchedulerChoice("slurm"))).current())
        assert not caught.value.retry

    def test_an_empty_queue(self, programs: Path, tmp_path: Path) -> None:
        assert run(make(deps(tmp_path, SchedulerChoice("slurm"))).current()) == SchedulerSize(0, 0)

    def test_a_users_own_defaults_have_no_effect(
        self, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a filter, nodes that are there would be submitted again and again, or not be cancelled."""
        monkeypatch.setenv("SQUEUE_STATES", "R")
        monkeypatch.setenv("SCANCEL_STATE", "PENDING")
        program(programs, "squeue", f'test -n "$SQUEUE_STATES" || echo "7|7|RUNNING|None|{MARK}x"')
        program(programs, "scancel", f'echo "$* ($SCANCEL_STATE)" > {tmp_path}/call')
        one = make(deps(tmp_path, SchedulerChoice("slurm")))
        assert run(one.current()) == SchedulerSize(1, 1)
        run(one.release([], 0, "the job has ended"))
        assert (tmp_path / "call").read_text() == "7 ()\n"

    def test_jobs_in_hidden_partitions_are_seen(self, programs: Path, tmp_path: Path) -> None:
        program(programs, "squeue", f'case " $* " in *" --all "*) echo "7|7|PENDING|Priority|{MARK}x"; esac')
        assert run(make(deps(tmp_path, SchedulerChoice("slurm"))).current()).nodes == 1

    def test_a_host_that_boots_belongs_to_its_job(self, programs: Path, tmp_path: Path) -> None:
        """Slurm takes the job for running: ``scancel --state=PENDING`` does nothing."""
        program(programs, "squeue", f'echo "7|7|CONFIGURING|None|{MARK}x"')
        program(programs, "scancel", f'echo "$*" >> {tmp_path}/calls')
        one = make(deps(tmp_path, SchedulerChoice("slurm")))
        assert run(one.current()) == SchedulerSize(1, 1)
        run(one.release(["slurm-1"], 1, "1 is enough"))
        assert not (tmp_path / "calls").exists(), "it joins, and is ordered to leave then"
        run(one.release([], 0, "the job has ended"))
        assert (tmp_path / "calls").read_text() == "7\n"


def text_of(script: str) -> str:
    return (DEPLOY / script).read_text()


def flags() -> dict[str, str]:
    """Options of the launcher, and the variables that say the same."""

    @click.command()
    @launcher_options
    def probe(**_: object) -> None: ...

    found = [flag for parameter in probe.params for flag in parameter.opts if flag.startswith("--")]
    return {flag: "EDL_" + flag.removeprefix("--").replace("-", "_").upper() for flag in found}


class TestScripts:
    def test_there_are_some(self) -> None:
        assert SCRIPTS == ["array.sbatch", "node.sbatch", "requeue.sbatch", "steady.sbatch"]

    @pytest.mark.parametrize("name", [*SCRIPTS, "job.env"])
    def test_bash_can_read_it(self, name: str) -> None:
        done = subprocess.run(["/bin/bash", "-n", str(DEPLOY / name)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    def test_every_option_of_the_launcher_is_one(self) -> None:
        known = flags()
        named = [word for name in SCRIPTS for word in re.findall(r"(?<=launcher\[@\]}\").*", text_of(name))]
        given = [option for line in named for option in re.findall(r"--[a-z-]+", line)]
        assert sorted(set(given)) == ["--drained-exit-code", "--node-index"]
        assert set(given) <= set(known)
        texts = "\n".join(map(text_of, ["job.env", *SCRIPTS]))
        exported = re.findall(r"^(?:# |    )?export (\w+)=", texts, re.MULTILINE)
        assert len(exported) >= 9
        assert set(exported) <= set(known.values())
        for conf in re.findall(r"^export EDL_SCHEDULER_CONF='(.*)'$", text_of("job.env"), re.MULTILINE):
            assert {part.partition("=")[0] for part in conf.split(",")} <= set(KINDS["slurm"].conf)

    @pytest.mark.parametrize("name", SCRIPTS)
    def test_the_launcher_runs_as_a_step(self, name: str) -> None:
        """A signal goes to steps at once. The node keeps the name that the adapter knows it by."""
        assert re.search(r"^launcher=\(srun .* python -m edl\.launch\)$", text_of("job.env"), re.MULTILINE)
        assert re.search(r'^ *(exec )?"\$\{launcher\[@\]\}"', text_of(name), re.MULTILINE)
        assert "--node-id=" not in text_of(name)
        (job,) = re.findall(r"^#SBATCH --job-name=edl-(\S+)$", text_of(name), re.MULTILINE)
        assert f"export EDL_RDZV_ID={job}\n" in text_of("job.env")

    @pytest.mark.parametrize("status", [*(int(code) for code in ExitCode), DRAINED, 137])
    @pytest.mark.parametrize("restarts", ["", "20"])
    def test_which_ends_go_back_into_the_queue(self, tmp_path: Path, status: int, restarts: str) -> None:
        shutil.copytree(DEPLOY, tmp_path / "job")
        (tmp_path / "job" / "train.store").write_text("host:1\n5\n")
        program(tmp_path / "bin", "squeue", "echo 5")
        program(tmp_path / "bin", "srun", f'echo "$EDL_RDZV_ENDPOINT $*" > {tmp_path}/call; exit {status}')
        program(tmp_path / "bin", "scontrol", f'echo "$*" > {tmp_path}/requeued')
        program(tmp_path / "bin", "sleep", "exit 0")
        told = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        told |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
        done = subprocess.run(["/bin/bash", "requeue.sbatch"], env=told, cwd=tmp_path / "job", check=False)
        assert done.returncode == status
        call = (tmp_path / "call").read_text()
        assert call.startswith("host:1 ") and call.endswith(f" -m edl.launch --drained-exit-code={DRAINED} train.py\n")
        wanted = status in LEFT or (status in PASSING and not restarts)
        assert (tmp_path / "requeued").exists() == wanted
        if wanted:
            assert (tmp_path / "requeued").read_text() == "requeue 7\n"

    def begin(self, tmp_path: Path, script: str, number: int, running: str, **own: str) -> tuple[int, str, str]:
        """Run a script as that Slurm job, while those in ``running`` run: status, what the launcher got, stderr.
        ``own``: variables of the user's environment."""
        if not (tmp_path / "job").exists():
            shutil.copytree(DEPLOY, tmp_path / "job")
        call = tmp_path / "call"
        call.unlink(missing_ok=True)
        program(tmp_path / "bin", "srun", f'echo "$EDL_RDZV_ENDPOINT" > {call}')
        found = f'for one in {running}; do case "$*" in *--all*--jobs=$one" "*) echo $one; esac; done'
        program(tmp_path / "bin", "squeue", f'test -n "$SQUEUE_PARTITION$SQUEUE_USERS" || {found}')
        program(tmp_path / "bin", "sleep", "exit 0")
        told = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": str(number)}
        told |= {"SLURM_ARRAY_TASK_ID": "1", **own}
        done = subprocess.run(
            ["/bin/bash", script], env=told, cwd=tmp_path / "job", check=False, capture_output=True, text=True
        )
        return done.returncode, call.read_text().strip() if call.exists() else "", done.stderr

    def test_a_second_steady_job_does_not_slip_into_the_first(self, tmp_path: Path) -> None:
        status, first, _ = self.begin(tmp_path, "steady.sbatch", 7, "7")
        assert status == 0 and first.endswith(":20014")
        status, second, said = self.begin(tmp_path, "steady.sbatch", 8, "7 8")
        assert (status, second) == (ExitCode.JOB_CONFLICT, "")
        assert "Slurm job 7 serves its store" in said and "change EDL_RDZV_ID" in said
        status, second, _ = self.begin(tmp_path, "steady.sbatch", 8, "8")  # the first one has ended
        assert status == 0 and second.endswith(":20016")

    @pytest.mark.parametrize("script", ["node.sbatch", "array.sbatch"])
    def test_the_store_of_a_job_that_has_ended_is_not_believed(self, tmp_path: Path, script: str) -> None:
        self.begin(tmp_path, "steady.sbatch", 7, "7")
        status, endpoint, said = self.begin(tmp_path, script, 9, "9")
        assert (status, endpoint) == (ExitCode.STORE_UNREACHABLE, "")
        assert "waiting for steady.sbatch" in said and "no store after 600 s" in said
        status, endpoint, said = self.begin(tmp_path, script, 9, "7 9")
        assert status == 0 and endpoint.endswith(":20014") and not said

    def test_a_node_that_finds_no_store_goes_back_into_the_queue(self, tmp_path: Path) -> None:
        program(tmp_path / "bin", "scontrol", f'echo "$*" > {tmp_path}/requeued')
        status, endpoint, said = self.begin(tmp_path, "requeue.sbatch", 9, "9")
        assert (status, endpoint) == (ExitCode.STORE_UNREACHABLE, "") and "no store after 600 s" in said
        assert (tmp_path / "requeued").read_text() == "requeue 9\n"
        (tmp_path / "requeued").unlink()
        self.begin(tmp_path, "requeue.sbatch", 9, "9", SLURM_RESTART_COUNT="20")
        assert not (tmp_path / "requeued").exists()

    def test_only_those_who_can_read_the_folder_join_and_control_the_job(self, tmp_path: Path) -> None:
        """The launchers share a secret, and so do the commands that the pages name for the login node."""
        self.begin(tmp_path, "steady.sbatch", 7, "7")
        program(tmp_path / "bin", "srun", f'echo "$EDL_SECRET_FILE" > {tmp_path}/secret')
        environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        subprocess.run(["/bin/bash", "steady.sbatch"], env=environment, cwd=tmp_path / "job", check=True)
        assert (tmp_path / "secret").read_text() == f"{SHARED}\n"
        for page in (DEPLOY / "README.md", DEPLOY.parents[1] / "docs" / "schedulers.md"):
            assert f"EDL_SECRET_FILE={SHARED}" in page.read_text(), page

    def test_nodes_have_left_before_slurm_kills_them(self) -> None:
        """Within Slurm's default KillWait of 30 s. Those that the Master submits get the same notice before their time
        limit as those of the scripts."""
        (wait,) = re.findall(r"^export EDL_SHUTDOWN_TIMEOUT=(\d+)$", text_of("job.env"), re.MULTILINE)
        assert int(wait) < 30
        (conf,) = re.findall(r"^export EDL_SCHEDULER_CONF='(.*)'$", text_of("job.env"), re.MULTILINE)
        for name in SCRIPTS:
            (notice,) = re.findall(r"^#SBATCH (--signal=\S+)$", text_of(name), re.MULTILINE)
            assert notice in conf.split()

    def test_a_users_own_defaults_do_not_hide_the_steady_job(self, tmp_path: Path) -> None:
        self.begin(tmp_path, "steady.sbatch", 7, "7")
        own = {"SQUEUE_PARTITION": "high", "SQUEUE_USERS": "kim"}
        status, endpoint, said = self.begin(tmp_path, "node.sbatch", 9, "7 9", **own)
        assert status == 0 and endpoint.endswith(":20014") and not said

    @pytest.mark.parametrize("text", ["", "host:1\n", "host:1\n\n"])
    def test_a_file_that_names_no_job_is_not_believed(self, tmp_path: Path, text: str) -> None:
        shutil.copytree(DEPLOY, tmp_path / "job")
        (tmp_path / "job" / "train.store").write_text(text)
        status, endpoint, _ = self.begin(tmp_path, "node.sbatch", 9, "7 9")
        assert (status, endpoint) == (ExitCode.STORE_UNREACHABLE, "")
