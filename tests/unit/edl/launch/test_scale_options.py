"""Options about schedulers: what is read from them, and what is said when it cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from edl.config import JobSpec, NodeRange, environment
from edl.errors import SettingError
from edl.job_records import SchedulerChoice, SizeOwner
from edl.launch import __main__ as program
from edl.launch import scale_options, scaling
from edl.launch.options import value_options
from edl.launch.options.agreement import differences
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.scale_options import KINDS, launcher_again, make_scheduler, node_index
from edl.ports import Store
from edl.schedulers.deps import with_options
from edl.types import JobId
from edl.wire import plain
from tests.support.script_folder import folder
from tests.unit.edl.launch.cluster_env.test_cluster_env import SLURM
from tests.unit.edl.launch.test_cli import read, refused

__all__ = ["folder"]

JOB = JobId("job")


class TestRead:
    def test_none_is_the_default(self) -> None:
        spec = read("train.py").spec
        assert (spec.scheduler, spec.size_owner, spec.sized_outside, spec.cooldown_s) == (None, "", False, 0.0)

    @pytest.mark.parametrize(
        ("arguments", "owner"),
        [
            (("--scheduler=process",), "process (master)"),
            (("--scheduler=exec:sh -c true",), "exec:sh -c true (master)"),
            (("--scheduler=exec:sh", "--scale-owner=external"), "exec:sh (external)"),
            (("--scheduler=discovery:sh hosts.sh",), "discovery:sh hosts.sh (external)"),
        ],
    )
    def test_what_all_launchers_agree_on(self, arguments: tuple[str, ...], owner: str) -> None:
        spec = read("--nnodes=1:4", *arguments, "train.py").spec
        assert spec.size_owner == owner
        assert spec.sized_outside == owner.endswith("(external)")
        assert plain.loads(JobSpec, plain.dumps(spec)) == spec

    def test_settings_of_the_scheduler(self) -> None:
        spec = read("--scheduler=discovery:sh", "--scheduler-conf=poll=5, timeout=2", "--scale-cooldown=60", "x.py")
        assert spec.spec.scheduler == SchedulerChoice(
            "discovery", "sh", {"poll": "5", "timeout": "2"}, SizeOwner.EXTERNAL
        )
        assert spec.spec.cooldown_s == 60.0

    def test_launchers_that_differ_are_told(self) -> None:
        choices = [SchedulerChoice("exec", "a", owner=owner) for owner in SizeOwner]
        one, other = (JobSpec(JOB, NodeRange(1, 1), scheduler=choice) for choice in choices)
        assert differences(one, other) == ["--scale-owner=master (the running job has external)"]
        none = JobSpec(JOB, NodeRange(1, 1), cooldown_s=5)
        assert differences(none, one) == [
            "--scheduler='' (the running job has exec:a)",
            "--scale-cooldown=5 (the running job has 0)",
        ]

    def test_no_client_is_imported_for_others(self) -> None:
        for name, kind in KINDS.items():
            assert kind.module.startswith("edl.schedulers."), name
        assert not hasattr(scale_options, "kubernetes")


@pytest.fixture(autouse=True)
def script(folder: Path) -> None:
    (folder / "x.py").write_text("")


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--scheduler=nomad",), "unknown kind of scheduler. Known: process, exec:COMMAND"),
            (("--scheduler=Process",), "unknown kind of scheduler"),
            (("--scheduler=process/here",), "not a valid process scheduler. Write process"),
            (("--scheduler=exec",), "Write exec:COMMAND"),
            (("--scheduler=exec:",), "Write exec:COMMAND"),
            (("--scheduler=exec/true",), "Write exec:COMMAND"),
            (("--scheduler=exec:/no/such/program",), "no such program on the PATH"),
            (("--scheduler=exec:'",), "cannot be split into words"),
            (("--scheduler=discovery:nothing-of-the-kind",), "no such program on the PATH"),
            (("--scheduler=statefulset",), "Write statefulset/NAME"),
            (("--scheduler=process", "--scale-owner=external"), "only master is possible"),
            (("--scheduler=discovery:sh", "--scale-owner=master"), "only external is possible"),
            (("--scheduler=process", "--scale-owner=me"), "only master is possible"),
            (("--scheduler=slurm",), "its jobs could not reach this host's private store"),
            (("--scale-owner=master",), "has no effect without --scheduler"),
            (("--scheduler-conf=poll=1",), "has no effect without --scheduler"),
            (("--scheduler=process", "--scheduler-conf=poll=1"), "--scheduler=process has no key 'poll'. Known: none"),
            (("--scheduler=discovery:sh", "--scheduler-conf=poll"), "Write poll=VALUE"),
            (("--scheduler=discovery:sh", "--scheduler-conf=poll=1,poll=2"), "is given twice"),
            (("--scheduler=discovery:sh", "--scheduler-conf=poll=soon"), "must be from 0.01 to 86400 seconds"),
            (("--scheduler=discovery:sh", "--scheduler-conf=timeout=nan"), "must be from 0.1 to 86400 seconds"),
            (("--scheduler=process", "--standalone"), "--standalone means exactly one node"),
            (("--scale-cooldown=-1",), "must be 0 or more"),
            (("--scale-cooldown=nan",), "must be 0 or more"),
            (("--node-index=-1",), "must be a whole number"),
            (("--node-index=x",), "must be a whole number"),
            (("--node-index=1000001",), "must be a whole number"),
        ],
    )
    def test_what_cannot_work(self, arguments: tuple[str, ...], message: str) -> None:
        assert message in refused("--nnodes=1:4", *arguments, "train.py")


class TestNodeIndex:
    SET = SchedulerChoice("statefulset", "train")

    def index(self, wanted: SchedulerChoice | None = None, given: str = "", **environment: str) -> int:
        return node_index({"node_index": given}, wanted, environment)

    def test_the_option_wins(self) -> None:
        assert self.index(given="0", JOB_COMPLETION_INDEX="3") == 0

    @pytest.mark.parametrize("name", ["JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "SLURM_ARRAY_TASK_ID"])
    def test_schedulers_say_it(self, name: str) -> None:
        assert node_index({"node_index": ""}, None, {name: "3"}) == 3
        assert node_index({"node_index": ""}, None, {name: ""}) == -1

    def test_the_ordinal_of_a_pod_only_where_pods_have_ordinals(self) -> None:
        assert self.index(HOSTNAME="train-3") == -1
        assert self.index(self.SET, HOSTNAME="train-3") == 3
        assert self.index(self.SET, HOSTNAME="host-1", POD_NAME="train-12") == 12
        assert self.index(self.SET, HOSTNAME="train") == -1
        assert self.index(SchedulerChoice("process"), HOSTNAME="train-3") == -1
        assert self.index(SchedulerChoice("paddlejob", "train"), HOSTNAME="train-worker-2") == 2
        assert self.index(SchedulerChoice("paddlecloud"), HOSTNAME="train-worker-2") == 2
        named = SchedulerChoice("paddlecloud", conf={"paddlejob": "train"})
        assert (self.index(named, HOSTNAME="train-worker-2"), self.index(named, HOSTNAME="gpu-12")) == (2, -1)

    def test_a_hosts_number_is_not_a_pods(self) -> None:
        """With hostNetwork a container is called like its host."""
        assert self.index(self.SET, HOSTNAME="gpu-12") == -1
        assert self.index(SchedulerChoice("custom", "kubeflow.org/v1/pytorchjobs/train"), HOSTNAME="gpu-12") == -1
        assert (
            self.index(SchedulerChoice("custom", "kubeflow.org/v1/pytorchjobs/train"), HOSTNAME="train-worker-1") == 1
        )

    def test_it_reaches_the_settings(self) -> None:
        assert read("--node-index=7", "train.py").node.index == 7
        assert read("train.py").node.index == -1

    def test_a_number_that_cannot_be_an_index_is_none(self) -> None:
        assert self.index(SLURM_ARRAY_TASK_ID="99999999") == -1


class TestAnotherLauncher:
    def again(self, *arguments: str, endpoints: tuple[str, ...] = ()) -> str:
        told = {"--rdzv-id": "job", "--log-dir": "/logs"}
        return " ".join(launcher_again("python", arguments, value_options(), endpoints, told))

    def test_what_is_for_this_node_alone_is_left_out(self) -> None:
        line = self.again(
            *("--nnodes=1:4", "--node-id=a", "--node-rank", "0", "--node-index=3", "-t", "3", "--standby=none"),
            *("train.py", "--node-id=theirs", "-x"),
        )
        assert line == (
            "python -m edl.launch --nnodes=1:4 -t 3 --standby=none --rdzv-id=job --log-dir=/logs "
            "train.py --node-id=theirs -x"
        )

    def test_the_addresses_of_this_host_are_none_on_another(self) -> None:
        given = (
            *("--nnodes=1:4", "--local-addr=10.0.0.1", "--http-host", "10.0.0.1", "--host-id=h1", "--rack", "r1"),
            "train.py",
        )
        told = {"--rdzv-id": "job"}
        here = launcher_again("python", given, value_options(), (), told)
        assert "--local-addr=10.0.0.1" in here
        there = launcher_again("python", given, value_options(), (), told, elsewhere=True)
        assert there == ("python", "-m", "edl.launch", "--nnodes=1:4", "--rdzv-id=job", "train.py")

    @pytest.mark.parametrize(
        "env",
        [
            {"PADDLE_RANK": "2", "PADDLE_TRAINER_ID": "1", "PADDLE_JOB_ID": "j"},
            {"PET_NODE_RANK": "2"},
            {"EDL_NODE_RANK": "2"},
            {**SLURM, "SLURM_NODEID": "2"},
        ],
        ids=lambda env: next(iter(env)),
    )
    def test_it_has_no_place_by_variables_either(self, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        given = ("--nnodes=1:4", "train.py")
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        assert self.place(given, environment()) == 2
        deps = scaling.scheduler_deps(
            read(*given), SchedulerChoice("process"), cast(Store, None), ("127.0.0.1:5",), print
        )
        assert self.place(given, deps.environment) == -1

    def place(self, arguments: tuple[str, ...], env: Mapping[str, str]) -> object:
        with pytest.MonkeyPatch.context() as patch:
            for name in {*environment(), *env}:
                patch.setenv(name, env[name]) if name in env else patch.delenv(name)
            context = program.run.make_context("edl-run", list(arguments))
            told = ResolvedOptions.by(context, "train.py")
        program.settle(told, env)
        return told.values["node_rank"]

    def test_a_private_store_is_named(self) -> None:
        line = self.again("--rdzv-backend=c10d", "-m", "pkg.train", endpoints=("127.0.0.1:5",))
        assert line == (
            "python -m edl.launch -m --rdzv-id=job --log-dir=/logs --rdzv-backend=etcd --rdzv-endpoint=127.0.0.1:5 "
            "pkg.train"
        )

    def test_a_port_that_is_in_use_is_not_asked_for_again(self) -> None:
        assert "--http-port=0 train.py" in self.again("--http-port=8080", "train.py")
        assert "--http-port" not in self.again("train.py")
        assert "--http-port=0" not in self.again("train.py", "--http-port=9000"), "it is the script's"

    def test_variables_of_this_node_are_not_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("HTTP_PORT", "8080"), ("HOST_ID", "h1"), ("RACK", "r1"), ("NODE_ID", "a")):
            monkeypatch.setenv(f"EDL_{name}", value)

        def passed(kind: str) -> dict[str, str]:
            deps = scaling.scheduler_deps(read("train.py"), SchedulerChoice(kind), cast(Store, None), (), print)
            names = ("EDL_HTTP_PORT", "EDL_HOST_ID", "EDL_RACK", "EDL_NODE_ID")
            return {name: deps.environment[name] for name in names if name in deps.environment}

        assert passed("process") == {"EDL_HTTP_PORT": "0", "EDL_HOST_ID": "h1", "EDL_RACK": "r1"}
        assert passed("slurm") == {"EDL_HTTP_PORT": "0"}, "a Master there serves HTTP, too"

    @pytest.mark.parametrize("logs", [(), ("--log-dir=/dev/null",)])
    def test_a_folder_of_this_host_is_not_for_the_logs_of_others(self, logs: tuple[str, ...], folder: Path) -> None:
        """Slurm ends a job at once whose output it cannot write, and the Master would submit the next one."""
        there = scaling.scheduler_deps(read(*logs, "train.py"), SchedulerChoice("slurm"), cast(Store, None), (), print)
        assert there.log_folder == Path.cwd() == folder
        assert [text for text in there.launcher if text.startswith("--log-dir")] == list(logs)
        given = scaling.scheduler_deps(
            read("--log-dir=logs", "train.py"), SchedulerChoice("slurm"), cast(Store, None), (), print
        )
        assert given.log_folder == folder / "logs"
        assert f"--log-dir={folder / 'logs'}" in given.launcher

    def test_launchers_on_this_host_share_its_log_folder(self) -> None:
        settings = read("train.py")
        here = scaling.scheduler_deps(settings, SchedulerChoice("process"), cast(Store, None), (), print)
        assert here.log_folder == Path(settings.logs.folder).parent
        assert f"--log-dir={here.log_folder}" in here.launcher

    def test_more_options_go_before_the_script(self) -> None:
        line = with_options(("python", "-m", "edl.launch", "--a", "train.py", "-b"), "--node-id=n")
        assert line == ["python", "-m", "edl.launch", "--node-id=n", "--a", "train.py", "-b"]

    def test_an_unknown_kind_in_the_store_is_an_error_in_words(self) -> None:
        deps = scaling.scheduler_deps(read("train.py"), SchedulerChoice("newer"), cast(Store, None), (), print)
        with pytest.raises(SettingError, match="unknown kind of scheduler"):
            make_scheduler(deps)
