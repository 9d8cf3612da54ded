"""Jobs from Python: launcher arguments, messages and results, without starting any process."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import click
import pytest

from edl.config import Standby
from edl.errors import JobFailed, SettingError, StoreUnavailable, UsageError, WorkerFailure
from edl.launch import __main__ as command_line
from edl.launch import api, function_launch
from edl.launch.api import LaunchConfig, command_words, elastic_launch
from edl.launch.api_options import words_of
from edl.launch.cli import with_both_spellings
from edl.launch.resolved_options import ResolvedOptions
from edl.launch.settings import LaunchSettings
from edl.worker import call, session
from tests.support.launching import launch_settings


def read(config: Any, *command: str) -> LaunchSettings:
    """Settings that the launcher derives from a config."""
    words = with_both_spellings([*words_of(config), *(command or ("--no-python", "--", "true"))])
    with command_line.run.make_context("edl-run", words) as context:
        script, arguments = context.params["script"], context.params["arguments"]
        told = ResolvedOptions.by(context, script, arguments)
        command_line.settle(told, {})
        told.values["log_dir"] = told.values["log_dir"] or "/nonexistent"  # not made before the job starts
        return launch_settings(told)


def test_a_config_says_what_the_command_line_would(tmp_path: Path) -> None:
    config = LaunchConfig(
        1,
        4,
        2,
        run_id="mine",
        rdzv_backend="etcd",
        rdzv_endpoint="h1:2379,h2:2379",
        rdzv_configs={"connect_timeout": 7, "user": "me"},
        max_restarts=0,
        log_dir=str(tmp_path),
        tee={0: 3, 1: 1},
        redirects=2,
        local_addr="127.0.0.1",
        options={"standby": "none", "node-unit": 2, "lease_ttl": 5.5, "adopt_checkpoint": True, "rack": None},
    )
    settings = read(config)
    assert (settings.spec.job, settings.spec.nodes.minimum, settings.spec.nodes.maximum) == ("mine", 1, 4)
    assert (settings.spec.nodes.unit, settings.slots, settings.spec.max_restarts) == (2, 2, 0)
    assert settings.spec.timeouts.lease_ttl_s == 5.5
    assert settings.store.endpoints == ("h1:2379", "h2:2379")
    assert (settings.store.connect_timeout_s, settings.store.user) == (7.0, "me")
    assert (settings.workers.standby, settings.node.local_addr) == (Standby.NONE, "127.0.0.1")
    assert settings.state.adopt
    assert (settings.logs.tee, settings.logs.redirect_all) == ({0: 3, 1: 1}, 2)


def test_what_is_left_out_is_the_launchers_own_default() -> None:
    assert LaunchConfig(1, 1, "auto").words() == ["--nnodes=1:1", "--nproc-per-node=auto", "--role=default_role"]
    assert read(LaunchConfig(1, 1, 2)).spec.max_restarts == 3


@pytest.mark.parametrize("variable", ["EDL_ROLE", "PET_ROLE"])
def test_the_environment_replaces_the_default_role_only(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "mine")
    assert not [word for word in LaunchConfig(1, 1, 1).words() if word.startswith("--role")]
    assert "--role=other" in LaunchConfig(1, 1, 1, role="other").words()


def test_the_fields_are_torchs_in_their_order_and_then_our_own() -> None:
    """So that a program changes one import, whether it names the arguments or not."""
    torchs = dataclasses.fields(pytest.importorskip("torch.distributed.launcher.api").LaunchConfig)
    ours = dataclasses.fields(LaunchConfig)
    assert [one.name for one in ours[: len(torchs)]] == [one.name for one in torchs]
    assert {one.name for one in ours[len(torchs) :]} == {"log_dir", "redirects", "tee", "options"}
    differ = {
        mine.name: mine.default
        for mine, theirs in zip(ours, torchs, strict=False)
        if (mine.default, mine.default_factory) != (theirs.default, theirs.default_factory)
    }
    assert differ == {"rdzv_backend": ""}, "empty: the launchers serve the store themselves"


def test_the_signatures_are_torchs() -> None:
    torch_api = pytest.importorskip("torch.distributed.launcher.api")
    for ours, theirs in ((elastic_launch, torch_api.elastic_launch), (api.launch_agent, torch_api.launch_agent)):
        expected = {one.name: one.default for one in inspect.signature(theirs).parameters.values()}
        assert {one.name: one.default for one in inspect.signature(ours).parameters.values()} == expected


def test_every_field_of_torchs_config_becomes_the_same_options_in_ours() -> None:
    theirs = vars(torchs_config(rdzv_timeout=7, log_line_prefix_template="[${rank}]", signals_to_handle="SIGUSR1"))
    assert LaunchConfig(**theirs).words() == words_of(types.SimpleNamespace(**theirs))
    assert {"--rdzv-conf=timeout=7", "--log-prefix=[${rank}]", "--signals-to-handle=SIGUSR1"} < set(
        words_of(LaunchConfig(**theirs))
    )


def test_a_timeout_of_its_own_takes_precedence() -> None:
    assert LaunchConfig(1, 1, 1, rdzv_configs={"timeout": 5}, rdzv_timeout=9).words()[-1] == "--rdzv-conf=timeout=9"
    assert LaunchConfig(1, 1, 1, rdzv_configs={"timeout": 5}).words()[-1] == "--rdzv-conf=timeout=5"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LaunchConfig(0, 1, 1), "--nnodes=0:1: the minimum must be at least 1"),
        (LaunchConfig(1, 1, 0), "--nproc-per-node=0: must be a number from 1 to 4096"),
        (LaunchConfig(1, 1, 1, max_restarts=-1), "--max-restarts=-1: must be 0 or more"),
        (LaunchConfig(1, 1, 1, rdzv_configs={"join_timeout": "soon"}), "join_timeout=soon"),
        (LaunchConfig(1, 1, 1, tee=7), "--tee=7"),
    ],
)
def test_bad_configs_read_as_on_the_command_line(config: LaunchConfig, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        read(config)
    assert text in str(caught.value)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(click.UsageError, match="--colour"):
        read(LaunchConfig(1, 1, 1, options={"colour": "red"}))


def test_an_option_may_be_given_more_than_once() -> None:
    words = LaunchConfig(1, 1, 1, options={"data": ["a=x", "b=y"], "standalone": True, "module": False}).words()
    assert words[3:] == ["--data=a=x", "--data=b=y", "--standalone"]


def torchs_config(**changed: Any) -> Any:
    """A config with the fields and defaults of torch's, without torch."""

    class DefaultLogsSpecs:
        _root_log_dir, _redirects, _tee, _local_ranks_filter = "/tmp/l", {0: 1, 1: 2}, 3, {1}

    fields: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 2,
        "nproc_per_node": 4,
        "logs_specs": DefaultLogsSpecs(),
        "run_id": "mine",
        "role": "default_role",
        "rdzv_endpoint": "h:29400",
        "rdzv_backend": "c10d",
        "rdzv_configs": {"timeout": 900},
        "rdzv_timeout": -1,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "log_line_prefix_template": None,
        "metrics_cfg": {},
        "local_addr": None,
        "event_log_handler": "null",
        "numa_options": types.SimpleNamespace(affinity_mode=types.SimpleNamespace(value="node")),
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "duplicate_stdout_filters": ["a,b", "c"],
        "duplicate_stderr_filters": None,
        "virtual_local_rank": True,
        "shutdown_timeout": 0,
    }
    return types.SimpleNamespace(**{**fields, **changed})


def test_torchs_own_config_is_understood() -> None:
    assert words_of(torchs_config()) == [
        "--nnodes=1:2",
        "--nproc-per-node=4",
        "--rdzv-id=mine",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=h:29400",
        "--max-restarts=0",
        "--shutdown-timeout=0",
        "--virtual-local-rank",
        "--role=default_role",
        "--redirects=0:1,1:2",
        "--tee=3",
        "--log-dir=/tmp/l",
        "--local-ranks-filter=1",
        "--duplicate-stdout-filters=a,,b,c",
        "--numa-binding=node",
    ]


def test_each_call_without_a_name_is_a_job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one node. With one name for all, a call would take part in the one before."""
    config = torchs_config(run_id="", max_nodes=1)
    names = {word for _ in range(2) for word in words_of(config) if word.startswith("--rdzv-id=call-")}
    assert len(names) == 2
    monkeypatch.setenv("EDL_RDZV_ID", "said")
    assert not [word for word in words_of(config) if word.startswith("--rdzv-id")]
    monkeypatch.delenv("EDL_RDZV_ID")
    own = torchs_config(run_id="", max_nodes=1, rdzv_endpoint="")
    assert not [word for word in words_of(own) if word.startswith("--rdzv-id")], "the launcher makes one up"


def test_every_field_of_torchs_config_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_api = pytest.importorskip("torch.distributed.launcher.api")
    assert {one.name for one in dataclasses.fields(torch_api.LaunchConfig)} <= set(vars(torchs_config()))
    config = torch_api.LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    settings = read(config)
    assert (settings.slots, settings.spec.timeouts.shutdown_s, settings.spec.timeouts.recover_s) == (2, 30.0, 600.0)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (torchs_config(metrics_cfg={"a": "b"}), "metrics_cfg"),
        (torchs_config(logs_specs=object()), "only DefaultLogsSpecs"),
        (LaunchConfig(1, 1, 1, logs_specs=torchs_config().logs_specs, tee=3), "tee=3: logs_specs is given as well"),
        (torchs_config(run_id=""), "Give the same run_id on every node"),
        ({"min_nodes": 1}, "it has no min_nodes"),
    ],
)
def test_what_no_option_can_say_is_refused(config: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        words_of(config)


def test_programs_scripts_and_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert command_words("echo", (1, "b")) == ["--no-python", "--", "echo", "1", "b"]
    assert command_words(str(script), ("--lr", 2)) == ["--", str(script), "--lr", "2"]
    assert command_words("gone.py", ()) == ["--", "gone.py"], "what is refused is the script"
    # As torchrun's own code has it.
    assert command_words(sys.executable, ("-u", "train.py", "x")) == ["--", "train.py", "x"]
    assert command_words(sys.executable, ("-u", "-m", "json.tool", "x")) == ["--module", "--", "json.tool", "x"]
    odd = ("-X", "dev", "train.py")
    assert command_words(sys.executable, odd) == ["--no-python", "--", sys.executable, *odd]


def test_a_function_is_sent_by_reference_and_comes_back_by_the_newest_round(tmp_path: Path) -> None:
    assert api._write_function(tmp_path, inspect.cleandoc, ("a",)) == inspect.__file__
    assert call.read_private(tmp_path / call.CALL) == pickle.dumps((inspect.cleandoc, ("a",)))
    for number, rank, value in ((1, 0, "old"), (1, 2, "old"), (10, 1, "new"), (10, 0, "new"), (9, 0, "older")):
        call.write_private(tmp_path / f"result-{number}-{rank}.pickle", pickle.dumps(value))
    assert call.results(tmp_path) == {0: "new", 1: "new"}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("status", [None, 0])
def test_a_function_that_exits_well_has_returned_nothing(
    status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("EDL_ROUND", "1")
    monkeypatch.setenv("RANK", "0")
    call.write_call(tmp_path, call.Before((), ()), pickle.dumps((sys.exit, (status,))))
    call.run(str(tmp_path), print)
    assert call.results(tmp_path) == {0: None}
    call.write_call(tmp_path, call.Before((), ()), pickle.dumps((sys.exit, ("no",))))
    with pytest.raises(SystemExit, match="no"):
        call.run(str(tmp_path), print)


def test_trainers_of_all_rounds_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_current", None)
    told = {"EDL_ROUND": "1", "RANK": "3"}
    assert call._result_name(told) == "result-1-3.pickle"
    assert call._result_name({**told, "EDL_PS": "1"}) == "result-0-3.pickle"
    monkeypatch.setattr(session, "_current", types.SimpleNamespace(seat=types.SimpleNamespace(rank=2)))
    assert call._result_name({**told, "EDL_PS": "1"}) == "result-0-2.pickle", "it has heard of its new place"


def test_what_others_could_have_written_is_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "result-1-0.pickle"
    call.write_private(path, pickle.dumps("mine"))
    path.chmod(0o622)
    with pytest.raises(PermissionError, match="other users have access to it"):
        call.results(tmp_path)
    path.chmod(0o600)
    (tmp_path / "result-1-1.pickle").symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        call.results(tmp_path)


def test_a_function_runs_with_the_callers_path_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setenv("EDL_ROUND", "3")
    monkeypatch.setenv("RANK", "5")
    searched: list[str] = []
    before = call.Before(("/caller", *sys.path), ("train.py", "--x"))
    call.write_call(tmp_path, before, pickle.dumps((sys.intern, ("value",))))
    call.run(str(tmp_path), searched.append)
    assert (searched, sys.argv, sys.path[0]) == (["/caller"], ["train.py", "--x"], "/caller")
    assert call.results(tmp_path) == {5: "value"}


def test_a_worker_may_start_a_job_of_its_own_with_a_function_of_the_callers_main_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "callers.py"
    source.write_text("def inner() -> None: ...\n")
    module = types.ModuleType("__mp_main__")  # what multiprocessing makes of it in a worker, under both names
    module.__file__ = str(source)
    exec(source.read_text(), vars(module))  # noqa: S102 - the text above
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, module)
    api._write_function(tmp_path, module.inner, ())
    assert json.loads(call.read_private(tmp_path / call.BEFORE))["main_path"] == str(source)


def test_functions_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api._pickled(os.path.join, (), main_is_known=False) == pickle.dumps((os.path.join, ()))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # not installed
    with pytest.raises(UsageError, match=r"<lambda> or one of its arguments cannot be sent.*install cloudpickle"):
        api._pickled(lambda: 1, (), main_is_known=True)

    def at_a_prompt() -> None: ...

    at_a_prompt.__module__, at_a_prompt.__qualname__ = "__main__", "at_a_prompt"
    monkeypatch.setattr(sys.modules["__main__"], "at_a_prompt", at_a_prompt, raising=False)
    assert b"at_a_prompt" in api._pickled(at_a_prompt, (), main_is_known=True)
    with pytest.raises(UsageError, match="at an interactive prompt or in a notebook"):
        api._pickled(at_a_prompt, (), main_is_known=False)


def test_a_call_while_a_worker_imports_main_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "importing_main", True)
    with pytest.raises(UsageError, match="if __name__ == '__main__'"):
        elastic_launch(LaunchConfig(1, 1, 1), os.getpid)()


def test_what_is_no_entrypoint() -> None:
    with pytest.raises(UsageError, match="entrypoint=None: must be a function"):
        elastic_launch(LaunchConfig(1, 1, 1), None)()


def test_what_the_config_says_is_not_shown_to_everybody_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def start(command: list[str], **_: Any) -> Any:
        shown.extend(command)
        return types.SimpleNamespace(wait=lambda: 7)

    monkeypatch.setattr("edl.launch.api.subprocess.Popen", start)
    words = LaunchConfig(1, 1, 1, rdzv_configs={"password": "sesame"}).words()
    assert api._run(tmp_path, "-", words) == 7
    assert json.loads(call.read_private(tmp_path / function_launch.WORDS)) == words
    assert "sesame" in str(words) and "sesame" not in str(shown)


@pytest.mark.parametrize(("source", "stdin"), [("-", None), ("/job.py", subprocess.DEVNULL)])
def test_a_program_may_read_the_callers_input_and_a_function_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, stdin: int | None
) -> None:
    """As with the children of multiprocessing."""
    given: list[int | None] = []

    def start(_: list[str], **options: Any) -> Any:
        given.append(options["stdin"])
        return types.SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr("edl.launch.api.subprocess.Popen", start)
    api._run(tmp_path, source, [])
    assert given == [stdin]


def test_how_the_launcher_has_ended_is_raised(tmp_path: Path) -> None:
    api._raise_for(tmp_path, 0)
    with pytest.raises(JobFailed, match="see the output of its launcher") as killed:
        api._raise_for(tmp_path, -9)
    assert (killed.value.exit_code, killed.value.failures) == (-9, ())
    for error, raised in (
        (StoreUnavailable("no answer"), StoreUnavailable),
        (SettingError("--x", 1, "no"), UsageError),
    ):
        with pytest.raises(SystemExit) as status:
            function_launch._refuse(str(tmp_path), type(error).__name__, str(error), int(error.exit_code))
        assert status.value.code == int(error.exit_code)
        with pytest.raises(raised, match=str(error)):
            api._raise_for(tmp_path, int(error.exit_code))


def test_an_error_names_the_root_cause_first() -> None:
    failure = WorkerFailure(
        3, 1, "b", 2, 1, "ended with exit status 1", "ValueError: no", "Traceback\n  x\nValueError: no"
    )
    other = WorkerFailure(0, 0, "a", 2, -15, "was killed by SIGTERM")
    error = JobFailed("worker 3 failed", 1, (failure, other))
    assert str(error).splitlines() == [
        "the job has failed: worker 3 failed (exit status 1)",
        "Root cause: rank 3 (local rank 1 on b, round 2) ended with exit status 1: ValueError: no",
        "    Traceback",
        "      x",
        "    ValueError: no",
        "then: rank 0 (local rank 0 on a, round 2) was killed by SIGTERM",
    ]
