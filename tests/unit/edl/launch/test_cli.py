"""The launcher's command line: what is read from it, and what is said when it cannot work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edl.adapters.etcd_plan import DEFAULT_PORT
from edl.config import FaultTolerance, HyperPolicy, LogPlan, LrRule, NodeRange, Standby, Timeouts
from edl.errors import ScriptError, UsageError
from edl.exit_codes import ExitCode
from edl.launch import __main__ as program
from edl.launch import accelerators, slot_options
from edl.launch.cli import with_both_spellings
from edl.launch.options import OPTIONS
from edl.launch.options.agreement import differences
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import Backend, LaunchSettings
from edl.ports import CommandKind
from tests.support.launching import launch_settings
from tests.support.script_folder import folder

__all__ = ["folder"]

ROOT = Path(__file__).resolve().parents[4]


def read(*arguments: str) -> LaunchSettings:
    """As the program does it."""
    context = program.run.make_context("edl-run", with_both_spellings(list(arguments)))
    options = dict(context.params)
    script, rest = options.pop("script"), options.pop("arguments")
    return launch_settings(ResolvedOptions(options, script, rest))


def refused(*arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        read(*arguments)
    assert caught.value.exit_code is ExitCode.USAGE
    return str(caught.value)


def endpoints(text: str) -> tuple[str, ...]:
    return read(f"--rdzv-endpoint={text}", "train.py").store.endpoints


class TestDefaults:
    def test_one_worker_on_one_node_with_a_store_of_its_own(self, folder: Path) -> None:
        settings = read("train.py", "--lr", "0.1", "--nnodes=7")
        assert settings.spec.nodes == NodeRange(1, 1)
        assert (settings.slots, settings.node.rank, settings.node.local_addr) == (1, -1, "")
        assert (settings.store.backend, settings.store.endpoints) == (Backend.EMBEDDED, ())
        assert (settings.spec.max_restarts, settings.spec.fault_tolerance) == (3, FaultTolerance.ELASTIC)
        assert settings.spec.timeouts == Timeouts()
        assert (settings.workers.standby, settings.workers.preload) == (Standby.FORK, ())
        assert settings.workers.command.kind is CommandKind.SCRIPT
        assert settings.workers.command.target == "train.py"
        assert settings.workers.command.arguments == ("--lr", "0.1", "--nnodes=7")

    def test_names_are_drawn(self) -> None:
        first, second = read("train.py"), read("train.py")
        assert first.spec.job != second.spec.job
        assert first.node != second.node

    def test_with_a_store_for_all_the_job_has_a_name_for_all(self) -> None:
        assert read("--rdzv-endpoint=h:1", "train.py").spec.job == "default"
        assert read("--rdzv-endpoint=h:1", "--rdzv-id=mine", "train.py").spec.job == "mine"

    def test_logs_go_to_a_temporary_folder(self, folder: Path) -> None:
        settings = read("--rdzv-id=mine", "--node-id=n1", "train.py")
        made = [path.name for path in (folder / "temporary").iterdir()]
        assert len(made) == 1
        assert made[0].startswith("edl-mine-")
        assert settings.logs == LogPlan(str(folder / "temporary" / made[0] / "mine_n1"), temporary=True)

    def test_or_to_the_one_named(self, folder: Path) -> None:
        settings = read("--log-dir=logs", "--rdzv-id=mine", "--node-id=n1", "train.py")
        assert settings.logs.folder == str(folder / "logs" / "mine_n1")
        assert list((folder / "temporary").iterdir()) == []


class TestOptions:
    def test_all_of_them(self) -> None:
        settings = read(
            "--nnodes=2:8",
            "--nproc-per-node=4",
            "--node-rank=7",
            "--node-unit=2",
            "--node-id=n1",
            "--rdzv-id=mine",
            "--rdzv-backend=etcd",
            "--rdzv-endpoint=h1:1,h2:2",
            "--rdzv-conf=request_timeout=5,connect_timeout=0.5,user=me,password=a=b,data_dir=d",
            "--max-restarts=9",
            "--fault-tolerance=shrink",
            "--recover-timeout=60",
            "--join-grace=0",
            "--lease-ttl=5",
            "--shutdown-timeout=7.5",
            "--standby=spawn",
            "--preload=a,b.c,",
            "--local-addr=10.0.0.1",
            "-t",
            "3",
            "-r",
            "1",
            "train.py",
        )
        assert settings.spec.nodes == NodeRange(2, 8, 2)
        assert (settings.slots, settings.node.rank, settings.node.name, settings.spec.job) == (4, 7, "n1", "mine")
        assert (settings.store.backend, settings.store.endpoints) == (Backend.ETCD, ("h1:1", "h2:2"))
        assert (settings.store.request_timeout_s, settings.store.connect_timeout_s) == (5.0, 0.5)
        assert (settings.store.user, settings.store.password, settings.store.data_dir) == ("me", "a=b", "d")
        assert (settings.spec.max_restarts, settings.spec.fault_tolerance) == (9, FaultTolerance.SHRINK)
        assert settings.spec.timeouts == Timeouts(60, 0, 5, 7.5)
        assert (settings.workers.standby, settings.workers.preload, settings.node.local_addr) == (
            Standby.SPAWN,
            ("a", "b.c"),
            "10.0.0.1",
        )
        assert (settings.logs.tee_all, settings.logs.redirect_all) == (3, 1)

    def test_imports_are_learnt_unless_that_is_turned_off(self) -> None:
        workers = read("train.py").workers
        assert (workers.learn, workers.learn_bytes) == (True, 2 << 30)
        workers = read("--learn-imports=off", "--learn_memory=512M", "train.py").workers
        assert (workers.learn, workers.learn_bytes) == (False, 512 << 20)

    def test_batch_and_learning_rate(self) -> None:
        hyper = ("--global-batch=64", "--local-batch", "8", "--lr_rule=sqrt", "--lr-warmup=100", "--lr-reference=32")
        spec = read(*hyper, "--logical-ranks=4", "--nnodes=1:2", "--nproc-per-node=2", "train.py").spec
        assert spec.hyper == HyperPolicy(64, 8, LrRule.SQRT, 100, 32, 4)
        assert read("train.py").spec.hyper == HyperPolicy()
        odd = read("--logical-ranks=4", "--nnodes=1:5", "--node-unit=4", "train.py").spec
        assert odd.hyper.logical_ranks == 4, "five nodes never form a world"

    def test_both_spellings(self) -> None:
        settings = read(
            "--nproc_per_node=2", "--max_restarts", "5", "--node-id", "my_node", "train.py", "--batch_size=3"
        )
        assert (settings.slots, settings.spec.max_restarts, settings.node.name) == (2, 5, "my_node")
        assert settings.workers.command.arguments == ("--batch_size=3",)

    @pytest.mark.parametrize(
        ("given", "made"),
        [
            (["--no_python", "my_program", "--no_python"], ["--no-python", "my_program", "--no_python"]),
            (["--log_dir=my_logs", "a_b.py"], ["--log-dir=my_logs", "a_b.py"]),
            (["--log_dir", "--x_y", "a_b.py"], ["--log-dir", "--x_y", "a_b.py"]),
            (["-t", "0_1", "a.py", "--x_y"], ["-t", "0_1", "a.py", "--x_y"]),
            (["--", "--a_b.py", "--x_y"], ["--", "--a_b.py", "--x_y"]),
            (["--node_rank", "-1", "a.py"], ["--node-rank", "-1", "a.py"]),
            (["--nnodes"], ["--nnodes"]),
            ([], []),
        ],
    )
    def test_only_the_launchers_own_options_are_respelt(self, given: list[str], made: list[str]) -> None:
        assert with_both_spellings(given) == made

    def test_the_environment_speaks_where_the_command_line_is_silent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EDL_NNODES", "1:4")
        monkeypatch.setenv("EDL_NPROC_PER_NODE", "2")
        monkeypatch.setenv("EDL_RDZV_ENDPOINT", "h:1")
        monkeypatch.setenv("EDL_TEE", "0:3")
        settings = read("--nproc-per-node=3", "train.py")
        assert settings.spec.nodes == NodeRange(1, 4)
        assert settings.slots == 3
        assert settings.store.endpoints == ("h:1",)
        assert settings.logs.tee == {0: 3}

    def test_flags_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EDL_MODULE", "1")
        monkeypatch.setenv("EDL_STANDALONE", "true")
        assert read("json.tool").workers.command.kind is CommandKind.MODULE

    def test_a_variable_with_edls_version_is_no_question_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EDL_VERSION", "0.1.0")
        assert read("train.py").slots == 1

    def test_an_empty_endpoint_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EDL_RDZV_ENDPOINT", " ")
        settings = read("--standalone", "train.py")
        assert settings.store.endpoints == ()
        assert settings.spec.job.startswith("job-")
        assert "--rdzv-endpoint: " in refused("--nnodes=2", "train.py")


class TestReplicas:
    four = ("--replica-size=4", "--nnodes=1:4")

    @pytest.mark.parametrize(
        ("arguments", "nodes"),
        [
            (("--replica-size=2", "--nproc-per-node=4", "--nnodes=1:4"), NodeRange(1, 4)),
            (("--replica-size=8", "--nproc-per-node=4", "--nnodes=2:7"), NodeRange(2, 7, 2)),
            (("--replica-size=8", "--nproc-per-node=4", "--nnodes=1:12", "--node-unit=3"), NodeRange(1, 12, 6)),
            (("--replica-size=1", "--nproc-per-node=3", "--nnodes=1:3"), NodeRange(1, 3)),
        ],
    )
    def test_a_world_has_nodes_for_whole_replicas(self, arguments: tuple[str, ...], nodes: NodeRange) -> None:
        assert read("--rdzv-endpoint=h:1", *arguments, "train.py").spec.nodes == nodes

    def test_all_launchers_have_equally_many_workers_then(self) -> None:
        four, two = (
            read("--rdzv-endpoint=h:1", "--rdzv-id=j", *self.four, f"--nproc-per-node={count}", "train.py").spec
            for count in (4, 2)
        )
        assert two.nodes.unit == 2 != four.nodes.unit, "which nobody gave"
        assert differences(two, four) == ["--nproc-per-node=2 (the running job has 4)"]
        one = read("--rdzv-endpoint=h:1", "--rdzv-id=j", "--nnodes=1:4", "--nproc-per-node=4", "train.py").spec
        assert differences(one, four) == ["--replica-size=1 (the running job has 4)"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--nnodes=3:2"], ["--nnodes=3:2", "below the minimum", "--nnodes=2:3"]),
            (["--nnodes=1:3", "--node-unit=4"], ["--node-unit=4", "multiple of 4", "Raise the maximum to 4"]),
            (["--replica-size=0"], ["--replica-size=0", "at least 1"]),
            (
                ["--replica-size=3", "--nproc-per-node=2"],
                ["--replica-size=3", "nodes with 2 workers", "share one evenly", "a multiple of the other"],
            ),
            (
                ["--replica-size=8", "--nproc-per-node=2", "--nnodes=1:3"],
                ["--replica-size=8", "needs 4 nodes with 2 workers each", "--nnodes=1:3", "maximum of --nnodes to 4"],
            ),
            (
                ["--replica-size=2", "--nproc-per-node=2", "--run-mode=ps", "--servers=1:1"],
                ["--replica-size=2", "collective jobs only", "Drop it"],
            ),
            (["--nnodes=many"], ["--nnodes=many", "not a number", "MIN:MAX"]),
            (["--nnodes=2"], ["--rdzv-endpoint: ", "--nnodes=2 needs a store", "--rdzv-endpoint=HOST:PORT"]),
            (["--nnodes=2", "--standalone"], ["--rdzv-endpoint: ", "--nnodes=2 needs a store"]),
            (["--nnodes=2", "--rdzv-endpoint=,"], ["--rdzv-endpoint: ", "--nnodes=2 needs a store"]),
            (
                ["--standalone", "--rdzv-endpoint=h:1"],
                ["--standalone and --rdzv-endpoint", "exclude", "private store"],
            ),
            (["--rdzv-backend=redis"], ["--rdzv-backend=redis", "etcd-embedded", "c10d"]),
            (["--rdzv-backend=etcd"], ["--rdzv-endpoint: ", "needs an address", "HOST:PORT"]),
            (["--rdzv-endpoint=h:x"], ["--rdzv-endpoint=h:x", "not an address", "Write host:port"]),
            (["--rdzv-endpoint=::1"], ["--rdzv-endpoint=::1", "not an address"]),
            (["--rdzv-endpoint=http://h:1"], ["--rdzv-endpoint=http://h:1", "not an address"]),
            (["--rdzv-endpoint=h:70000"], ["--rdzv-endpoint=h:70000", "from 1 to 65535"]),
            (["--rdzv-id=a/b"], ["--rdzv-id='a/b'", "'/' not allowed", "Use letters"]),
            (["--node-id=a/b"], ["--node-id='a/b'", "letters, digits"]),
            (["--node-rank=1"], ["--node-rank=1", "from 0 to 0", "--nnodes=1", "omit it"]),
            (["--node-rank=-2"], ["--node-rank=-2", "from 0 to 0"]),
            (["--max-restarts=-1"], ["--max-restarts=-1", "0 or more"]),
            (["--recover-timeout=0"], ["--recover-timeout=0", "more than 0"]),
            (["--recover-timeout=nan"], ["--recover-timeout=nan", "more than 0"]),
            (["--lease-ttl=0.1"], ["--lease-ttl=0.1", "from 1 to 3600"]),
            (["--nproc-per-node=0"], ["--nproc-per-node=0", "from 1 to 4096", "auto, gpu or cpu"]),
            (["--nproc-per-node=-1"], ["--nproc-per-node=-1", "from 1 to 4096"]),
            (["--nproc-per-node=two"], ["--nproc-per-node=two", "from 1 to 4096"]),
            (["--nproc-per-node=gpu"], ["--nproc-per-node=gpu", "no GPU found", "Give a number, or cpu"]),
            (["--tee=4"], ["--tee=4", "0, 1, 2 or 3", "0:3,1:1"]),
            (["--redirects=0:3,1"], ["--redirects=0:3,1", "LOCAL_RANK:VALUE"]),
            (["--rdzv-conf=user"], ["--rdzv-conf=user", "needs a value", "user=VALUE"]),
            (["--rdzv-conf=request_timeout=soon"], ["request_timeout=soon", "'soon' is not a number", "such as 2.5"]),
            (["--rdzv-conf=request_timeout=0"], ["--rdzv-conf=request_timeout=0", "more than 0"]),
            (["--rdzv-conf=connect_timeout=nan"], ["--rdzv-conf=connect_timeout=nan", "more than 0"]),
            (["--rdzv-conf=request_timeout=inf"], ["--rdzv-conf=request_timeout=inf", "finite"]),
            (["--rdzv-endpoint=.train.svc:2379"], [".train.svc:2379", "'.train.svc' is not a host", "is a variable"]),
            (["--rdzv-endpoint=h1:1,a..b"], ["a..b:29400", "'a..b' is not a host"]),
            (["--local-addr=a..b"], ["--local-addr=a..b", "is not a host"]),
            ([f"--local-addr={'a' * 64}.b"], ["--local-addr=", "longer than 63 characters"]),
            (["--rdzv-conf=ca=missing.pem"], ["--rdzv-conf ca=missing.pem", "no such file"]),
            (["--rdzv-endpoint=etcds://h:1"], ["--rdzv-conf ca", "Add ca=FILE"]),
            (["--global-batch=0"], ["--global-batch=0", "at least 1", "Omit it"]),
            (["--global-batch=many"], ["--global-batch=many", "whole number"]),
            (["--local-batch=0"], ["--local-batch=0", "at least 1"]),
            (["--local-batch=-8"], ["--local-batch=-8", "at least 1"]),
            (["--lr-warmup=-1"], ["--lr-warmup=-1", "at least 0"]),
            (["--lr-reference=0"], ["--lr-reference=0", "at least 1"]),
            (["--global-batch=9999999999"], ["--global-batch=9999999999", "from 0 to 1000000000"]),
            (["--logical-ranks=4", "--global-batch=30"], ["--global-batch=30", "--logical-ranks=4", "multiple of 4"]),
            (
                ["--logical-ranks=4", "--nnodes=1:3", "--nproc-per-node=2"],
                ["--logical-ranks=4", "3 nodes with 2 workers each are 6", "maximum of --nnodes"],
            ),
            (["-m", "--no-python"], ["--module and --no-python", "exclude", "Drop one"]),
        ],
        ids=lambda value: " ".join(value),
    )
    def test_name_the_option_the_value_and_the_way_out(
        self, arguments: list[str], words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slot_options, "count_accelerators", lambda: 0)
        message = refused(*arguments, "train.py")
        assert [word for word in words if word not in message] == []
        assert list((folder / "temporary").iterdir()) == []  # nothing is left of a command that did nothing

    @pytest.mark.parametrize(
        "choice", ["--standby=warm", "--lr-rule=cubic", "--fault-tolerance=none", "--max-restarts=two", "--wrong=1"]
    )
    def test_end_the_program_with_the_status_for_usage(
        self, choice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["edl-run", choice, "train.py"])
        with pytest.raises(SystemExit) as ended:
            program.main()
        assert ended.value.code == ExitCode.USAGE
        assert choice.partition("=")[0] in capsys.readouterr().err

    def test_are_one_line_without_a_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["edl-run", "--nnodes=3:2", "train.py"])
        with pytest.raises(SystemExit) as ended:
            program.main()
        assert ended.value.code == ExitCode.USAGE
        shown = capsys.readouterr().err
        assert shown.startswith("edl: error: --nnodes=3:2")
        assert shown.count("\n") == 1

    def test_are_written_where_an_outer_launcher_looks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        monkeypatch.setattr(sys, "argv", ["edl-run", "--nnodes=3:2", "train.py"])
        with pytest.raises(SystemExit):
            program.main()
        message = json.loads(path.read_text())["message"]
        assert message["message"].startswith("SettingError: --nnodes=3:2")
        assert message["errorCode"] == ExitCode.USAGE
        assert "Traceback" in message["extraInfo"]["py_callstack"]

    def test_a_bug_has_its_own_status_and_is_shown(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Python's own, 1, would mean that a worker failed, after which Kubernetes may end the whole job."""

        def fails(*_: object) -> None:
            raise AssertionError("never so")

        monkeypatch.setattr(program, "settle", fails)
        monkeypatch.setattr(sys, "argv", ["edl-run", "train.py"])
        with pytest.raises(SystemExit) as ended:
            program.main()
        assert ended.value.code == ExitCode.INTERNAL
        shown = capsys.readouterr().err
        assert "AssertionError: never so" in shown and "this is a bug in edl" in shown


class TestSlots:
    @pytest.mark.parametrize(
        ("text", "gpus", "slots"),
        [("3", 8, 3), ("gpu", 8, 8), ("auto", 8, 8), ("auto", 0, 16), ("cpu", 8, 16)],
    )
    def test_are_counted_when_asked(self, text: str, gpus: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slot_options, "count_accelerators", lambda: gpus)
        monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of the host
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
        assert read(f"--nproc-per-node={text}", "train.py").slots == slots

    @pytest.mark.parametrize(
        ("visible", "ids"),
        [("0,2", ("0", "2")), ("", ()), ("-1", ()), ("GPU-ab, GPU-cd", ("GPU-ab", "GPU-cd"))],
    )
    def test_gpus_are_those_cuda_may_see(
        self, visible: str, ids: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert accelerators.visible_gpus() == ids
        assert accelerators.count_gpus() == len(ids)


class TestEndpoints:
    @pytest.mark.parametrize(
        ("text", "read_as"),
        [
            ("h:1", ("h:1",)),
            ("h", (f"h:{DEFAULT_PORT}",)),
            ("10.0.0.1", (f"10.0.0.1:{DEFAULT_PORT}",)),
            ("[::1]", (f"[::1]:{DEFAULT_PORT}",)),
            ("[fe80::2]:2379", ("[fe80::2]:2379",)),
            ("a:1, b ,[::1]:3,", ("a:1", f"b:{DEFAULT_PORT}", "[::1]:3")),
            ("etcd://h:1", ("h:1",)),
            ("etcd://h", (f"h:{DEFAULT_PORT}",)),
            ("localhost:0", ()),
        ],
    )
    def test_are_read_with_and_without_a_port(self, text: str, read_as: tuple[str, ...]) -> None:
        assert endpoints(text) == read_as

    def test_torchruns_port_is_the_default(self) -> None:
        assert endpoints("h") == ("h:29400",)

    @pytest.mark.parametrize(
        ("arguments", "backend"),
        [
            (["--rdzv-endpoint=h:1"], Backend.EMBEDDED),
            (["--rdzv-endpoint=etcd://h:1"], Backend.ETCD),
            (["--rdzv-endpoint= etcd://h:1"], Backend.ETCD),
            (["--rdzv-endpoint=\netcd://h:1\n"], Backend.ETCD),
            (["--rdzv-endpoint=h:1", "--rdzv-backend=etcd"], Backend.ETCD),
            (["--rdzv-endpoint=h:1", "--rdzv-backend=etcd-v2"], Backend.ETCD),
            (["--rdzv-endpoint=h:1", "--rdzv-backend=c10d"], Backend.EMBEDDED),
            (["--rdzv-endpoint=etcd://h:1", "--rdzv-backend=etcd-embedded"], Backend.EMBEDDED),
            (["--rdzv-backend=static"], Backend.EMBEDDED),
        ],
    )
    def test_choose_the_kind_of_store(self, arguments: list[str], backend: Backend) -> None:
        assert read(*arguments, "train.py").store.backend is backend

    def test_files_for_tls_are_checked(self, folder: Path) -> None:
        (folder / "ca.pem").write_text("")
        settings = read("--rdzv-endpoint=etcd://h:1", "--rdzv-conf=ca=ca.pem", "train.py")
        assert (settings.store.ca, settings.store.cert, settings.store.key) == ("ca.pem", "", "")

    def test_a_password_is_not_shown(self) -> None:
        settings = read("--rdzv-conf=user=me,password=rosebud", "train.py")
        assert settings.store.password == "rosebud"
        assert "rosebud" not in repr(settings)


class TestScript:
    def test_must_be_there(self, folder: Path) -> None:
        message = refused("missing.py")
        assert message.startswith("missing.py: No such file or directory")
        assert str(folder) in message
        assert "-m" in message
        assert "--no-python" in message

    def test_must_be_something_that_python_runs(self, folder: Path) -> None:
        (folder / "package").mkdir()
        assert refused("package").startswith("package: this folder has no __main__.py")

    @pytest.mark.parametrize(
        ("source", "line", "words"),
        [
            ("x = 1\ny = (\n", 2, "'(' was never closed"),
            ("def f():\nreturn\n", 2, "expected an indented block"),
            ("x = 1\n\nreturn x\n", 3, "'return' outside function"),
            ("for x in y: pass\nawait x\n", 2, "'await' outside function"),
        ],
    )
    def test_must_compile(self, source: str, line: int, words: str, folder: Path) -> None:
        (folder / "bad.py").write_text(source)
        message = refused("bad.py")
        assert message.startswith(f"bad.py, line {line}: ")
        assert words in message
        assert message.endswith("Nothing was started")

    @pytest.mark.parametrize("data", [b"\x7fELF\x02\x01\x01\x00\x00\xff", b"\x00", b"\x89PNG\r\n\x1a\n\x00"])
    def test_must_be_source(self, data: bytes, folder: Path) -> None:
        (folder / "program").write_bytes(data)
        message = refused("program")
        assert message.startswith("program: not Python source")
        assert message.endswith("For a program use --no-python")

    def test_must_be_text(self, folder: Path) -> None:
        (folder / "latin.py").write_bytes(b"x = 'caf\xe9'\n")
        assert refused("latin.py").startswith("latin.py")

    def test_may_be_in_the_encoding_it_declares(self, folder: Path) -> None:
        (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = 'caf\xe9'\n")
        assert read("latin.py").workers.command.target == "latin.py"

    def test_may_be_sloppy(self, folder: Path) -> None:
        (folder / "sloppy.py").write_text("if 1 is 1: x = '\\d'\n")
        assert read("sloppy.py").workers.command.target == "sloppy.py"

    def test_is_compiled_without_the_launchers_own_future_imports(self, folder: Path) -> None:
        (folder / "old.py").write_text("def g():\n    def f(x: (yield)): pass\n")  # an error under "annotations"
        assert read("old.py").workers.command.target == "old.py"

    def test_is_not_run(self, folder: Path) -> None:
        (folder / "loud.py").write_text("open('ran', 'w')\n")
        read("loud.py")
        assert not (folder / "ran").exists()

    def test_of_a_module_is_its_name(self) -> None:
        command = read("-m", "json.tool", "--x").workers.command
        assert (command.kind, command.target, command.arguments) == (CommandKind.MODULE, "json.tool", ("--x",))

    def test_a_module_that_is_not_there_is_refused_before_anything_starts(self) -> None:
        message = refused("-m", "no_such_package.train")
        assert "no module 'no_such_package'" in message
        assert sys.executable in message

    def test_a_file_is_no_module(self, folder: Path) -> None:
        (folder / "train.py").touch()
        assert refused("-m", "train.py").endswith("Write train.py without -m")

    def test_may_be_any_program(self, folder: Path) -> None:
        command = read("--no-python", "sh", "-c", "true").workers.command
        assert (command.kind, command.target, command.arguments) == (CommandKind.PROGRAM, "sh", ("-c", "true"))

    @pytest.mark.parametrize("name", ["no-such-program-anywhere", "./train.py", "./temporary"])
    def test_that_is_a_program_must_be_one(self, name: str) -> None:
        with pytest.raises(ScriptError, match="not executable"):
            read("--no-python", name)

    def test_is_needed(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["edl-run"])
        with pytest.raises(SystemExit) as ended:
            program.main()
        assert ended.value.code == ExitCode.USAGE
        assert "SCRIPT" in capsys.readouterr().err


def launcher(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "edl.launch", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def imported(log: str) -> set[str]:
    lines = [line for line in log.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_help_comes_without_network_libraries_or_frameworks() -> None:
    ended = launcher("--help")
    assert ended.returncode == 0
    shown = [option for option in OPTIONS if not option.hidden]
    missing = [name for option in shown for name in option.names if name not in ended.stdout]
    assert missing == []
    found = imported(ended.stderr)
    assert "click" in found
    assert found & {"grpc", "google", "pyetcd", "psutil", "torch", "paddle", "numpy"} == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes=1:2"], True),
        (["--nnodes=1"], False),
        (["--nnodes=1:2", "--rdzv-endpoint=here:2379"], False),
        (["--nnodes=1:2", "--scheduler=process"], False),
    ],
)
def test_a_job_that_cannot_grow_is_told_of(arguments: list[str], said: bool) -> None:
    remarks = [text for text in read(*arguments, "train.py").remarks if "no other node can join" in text]
    assert bool(remarks) is said
    assert all(text.startswith("--nnodes=1:2: ") and "--rdzv-endpoint=HOST:PORT" in text for text in remarks)
