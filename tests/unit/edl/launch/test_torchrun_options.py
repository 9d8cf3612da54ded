"""Every option and variable of the installed torchrun, held against ours: spelling, default, meaning, refusal."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edl.config import NodeRange, StreamTarget
from edl.errors import EdlError, ScriptError, SettingError, UsageError
from edl.launch import __main__ as program
from edl.launch import torchrun_options
from edl.launch.cli import with_both_spellings
from edl.launch.dropin_table import Fate, Row
from edl.launch.resolved_options import OptionSource, ResolvedOptions
from edl.launch.settings import CONF_KEYS, Backend, Invocation, LaunchSettings
from edl.launch.torchrun_table import CONF_KEYS as THEIR_KEYS
from edl.launch.torchrun_table import FLAGS, TORCHRUN_ROWS, VARIABLES
from edl.ports import CommandKind
from scripts import dropin, dropin_torchrun
from scripts.dropin_torchrun import Theirs
from tests.support.launching import read, tell
from tests.torch_release import installed, release, since

ROOT = Path(__file__).resolve().parents[4]
STORE = ("--nnodes=1:2", "--rdzv-endpoint=h:1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a script, on a host without accelerators."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "broken.py").write_text("x = (\n")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(torchrun_options, "visible_devices", lambda: {})
    return tmp_path


@pytest.fixture(scope="module")
def theirs() -> dict[str, Theirs]:
    pytest.importorskip("torch")
    return {one.name: one for one in dropin_torchrun.options()}


# --- the table against torch's own parser ----------------------------------------------------------------------------


def known_there() -> list[Row]:
    """Rows of the options that the installed torch has."""
    return [row for row in TORCHRUN_ROWS if not row.since or release(row.since) <= installed()]


def test_every_option_of_torchrun_is_in_the_table_and_no_other(theirs: dict[str, Theirs]) -> None:
    assert sorted(theirs) == sorted(row.name for row in known_there())
    assert len(theirs) >= 24


@since("2.12", "other defaults of --master-port and --shutdown-timeout")
def test_the_table_has_torchruns_defaults_kinds_and_variables(theirs: dict[str, Theirs]) -> None:
    for row in known_there():
        one = theirs[row.name]
        assert (row.default, row.name in FLAGS) == (one.default, one.is_flag), row.option
        assert row.variables == ((one.variable,) if one.variable else ()), row.option


@since("2.12", "as above")
def test_every_default_is_the_same_or_has_its_reason(theirs: dict[str, Theirs]) -> None:
    ours = dropin_torchrun.our_defaults()
    nothing = {"numa_binding": "none", "master_port": "0"}  # as their words for nothing
    differ = {name for name, one in theirs.items() if ours[name] != one.default and ours[name] != nothing.get(name)}
    explained = {row.name for row in TORCHRUN_ROWS if row.default_why}
    assert differ == explained - {"local_addr"}  # nothing there and nothing here, but it stands for something else


def test_every_spelling_and_choice_is_accepted(theirs: dict[str, Theirs]) -> None:
    for one in (one for one in theirs.values() if one.name not in ENDS):
        for spelling in one.spellings:
            for value in one.choices or (WRITTEN[one.name],):
                given = [spelling] if one.is_flag else [spelling, value]
                assert WRITTEN.keys() | ENDS >= theirs.keys()
                context = program.run.make_context("edl-run", with_both_spellings([*given, "train.py"]))
                assert ResolvedOptions.by(context).source(one.name) is OptionSource.COMMAND_LINE, given


ENDS = {"print_completion"}
"""Options that do something else than run a script."""


WRITTEN = {
    **dict.fromkeys(FLAGS, ""),
    "nnodes": "1:2",
    "nproc_per_node": "3",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "h:1",
    "rdzv_id": "mine",
    "rdzv_conf": "join_timeout=9",
    "max_restarts": "5",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "event_log_handler": "console",
    "role": "teacher",
    "log_dir": "logs",
    "redirects": "1",
    "tee": "2",
    "local_ranks_filter": "0",
    "duplicate_stdout_filters": "a,,b,c",
    "duplicate_stderr_filters": "d",
    "node_rank": "1",
    "master_addr": "h",
    "master_port": "7",
    "local_addr": "10.0.0.9",
    "logs_specs": "default",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "5",
    "log_line_prefix_template": "${hostname}:",
}
"""A value that each option takes in torchrun."""


@dataclass(frozen=True)
class Effect:
    """Effect of an option: a command line with it, and the resulting settings."""

    more: tuple[str, ...]
    of: Callable[[LaunchSettings], object]
    becomes: object


EFFECTS: dict[str, Effect] = {
    "nnodes": Effect(("--rdzv-endpoint=h:1",), lambda made: made.spec.nodes, NodeRange(1, 2)),
    "nproc_per_node": Effect((), lambda made: made.slots, 3),
    "rdzv_backend": Effect(STORE, lambda made: made.store.backend, Backend.EMBEDDED),
    "rdzv_endpoint": Effect(("--nnodes=2",), lambda made: made.store.endpoints, ("h:1",)),
    "rdzv_id": Effect((), lambda made: made.spec.job, "mine"),
    "rdzv_conf": Effect((), lambda made: made.spec.timeouts.recover_s, 9.0),
    "standalone": Effect(("--rdzv-endpoint=h:1",), lambda made: made.store.endpoints, ()),
    "max_restarts": Effect((), lambda made: made.spec.max_restarts, 5),
    "role": Effect((), lambda made: made.workers.role, "teacher"),
    "module": Effect(("json.tool",), lambda made: made.workers.command.kind, CommandKind.MODULE),
    "no_python": Effect((), lambda made: made.workers.command.kind, CommandKind.PROGRAM),
    "run_path": Effect(("--no-python",), lambda made: made.workers.command.kind, CommandKind.SCRIPT),
    "log_dir": Effect(
        ("--rdzv-id=j", "--node-id=n"), lambda made: Path(made.logs.folder).relative_to(Path.cwd()), Path("logs/j_n")
    ),
    "redirects": Effect((), lambda made: (made.logs.stdout(0), made.logs.redirect_all), (StreamTarget.FILE, 1)),
    "tee": Effect((), lambda made: (made.logs.stderr(0), made.logs.tee_all), (StreamTarget.BOTH, 2)),
    "local_ranks_filter": Effect(("--nproc-per-node=2",), lambda made: made.logs.shown, frozenset({0})),
    "duplicate_stdout_filters": Effect((), lambda made: made.logs.stdout_filters, ("a,b", "c")),
    "duplicate_stderr_filters": Effect((), lambda made: made.logs.stderr_filters, ("d",)),
    "node_rank": Effect(STORE, lambda made: made.node.rank, 1),
    "master_addr": Effect(("--nnodes=2",), lambda made: made.store.endpoints, ("h:29500",)),
    "master_port": Effect(("--nnodes=2",), lambda made: made.store.endpoints, ("127.0.0.1:7",)),
    "local_addr": Effect((), lambda made: made.node.local_addr, "10.0.0.9"),
    "signals_to_handle": Effect((), lambda made: made.leave.passed, (signal.SIGUSR1,)),
    "shutdown_timeout": Effect((), lambda made: made.spec.timeouts.shutdown_s, 5.0),
    "virtual_local_rank": Effect((), lambda made: made.workers.virtual_local_rank, True),
    "log_line_prefix_template": Effect((), lambda made: made.logs.prefix, "${hostname}:"),
    "use_env": Effect((), lambda made: made.workers.command.arguments, ()),
}


def row_names(fate: Fate) -> list[str]:
    return [row.name for row in TORCHRUN_ROWS if row.fate is fate]


@pytest.mark.parametrize("name", [name for name in row_names(Fate.HONOURED) if name not in {"numa_binding", *ENDS}])
def test_what_is_honoured_has_its_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line, and by the variable. ``--numa-binding`` has a test file of its own."""
    effect, row = EFFECTS[name], next(row for row in TORCHRUN_ROWS if row.name == name)
    monkeypatch.setenv("PATH", "/usr/bin:/bin:.")
    Path("train.py").chmod(0o755)
    option = [row.option] if name in FLAGS else [row.option, WRITTEN[name]]
    others = [one for one in effect.more if not one.endswith("json.tool")]
    script = [one for one in effect.more if one.endswith("json.tool")]
    assert effect.of(read(*option, *others, *script)) == effect.becomes
    for variable in row.variables:
        env = {variable: "1" if name in FLAGS else WRITTEN[name]}
        assert effect.of(read(*others, *script, env=env)) == effect.becomes, variable


@pytest.mark.parametrize("name", row_names(Fate.EXPLAINED))
def test_what_is_explained_changes_nothing_and_says_why(name: str) -> None:
    row = next(row for row in TORCHRUN_ROWS if row.name == name)
    said = tell(row.option, WRITTEN[name]).remarks
    assert said == [f"{row.option}={WRITTEN[name]} has no effect: {row.why}"]
    by_variable = tell(env={row.variables[0]: WRITTEN[name]}).remarks
    assert by_variable == [f"{row.variables[0]}={WRITTEN[name]} has no effect: {row.why}"]
    assert tell(row.option, row.default).remarks == []


def test_what_is_refused_says_why() -> None:
    assert row_names(Fate.REFUSED) == ["logs_specs"]
    with pytest.raises(SettingError, match="--logs-specs=mine: torchrun's log plug-ins need torch in the launcher"):
        read("--logs-specs=mine")
    read("--logs-specs=default")


def test_the_program_prints_every_option_and_every_exception(theirs: dict[str, Theirs]) -> None:
    text = dropin_torchrun.report(list(theirs.values()))
    table, _, exceptions = text.partition("options differ in something:\n")
    lines = [line.split() for line in table.splitlines()[1:-1] if line]
    assert [(line[0], line[3]) for line in lines] == [(row.option, row.fate.value) for row in known_there()]
    assert {line.split()[0] for line in exceptions.splitlines()} == {
        row.option for row in known_there() if row.exception
    }
    new = Theirs("new_one", ("--new-one", "--new_one"), "", False, (), "")
    assert "--new-one                    MISSING" in dropin_torchrun.report([new])


def test_the_program_knows_its_launchers(capsys: pytest.CaptureFixture[str]) -> None:
    assert dropin.main(["mpirun"]) == 2
    assert "torchrun|paddle" in capsys.readouterr().err


def test_the_page_has_a_row_for_every_option_key_and_variable() -> None:
    page = (ROOT / "docs" / "torchrun.md").read_text()

    def row_of(word: str) -> str:
        return next((line for line in page.splitlines() if line.startswith(f"| `{word}` |")), "")

    for row in TORCHRUN_ROWS:
        line = row_of(row.option)
        assert row.fate.value in line, f"{row.option} has no row in docs/torchrun.md"
        assert plain(row.why) in line, f"{row.option}: {row.why}"
        assert plain(row.default_why) in line, f"{row.option}: {row.default_why}"
    others = [(key.key, key.fate, key.why) for key in THEIR_KEYS]
    others += [(variable.name, variable.fate, variable.why) for variable in VARIABLES]
    for word, fate, why in others:
        assert fate.value in row_of(word), f"{word} has no row in docs/torchrun.md"
        assert plain(why) in row_of(word)


def plain(text: str) -> str:
    return text.replace("|", "\\|")


# --- torch.distributed.launch ----------------------------------------------------------------------------------------


def test_its_scripts_get_their_rank_as_an_argument() -> None:
    given = ("--dialect=torch.distributed.launch", "train.py", "--lr=1")
    assert tell(*given).arguments == ("--local-rank=${local_rank}", "--lr=1")
    assert tell("--use-env", *given).arguments == ("--lr=1",)
    assert tell("train.py", "--lr=1").arguments == ("--lr=1",)
    told = tell(*given, env={"PADDLE_NNODES": "3"})
    assert told.values["nnodes"] == "1:1", "Paddle's variables are not read in a dialect of torch"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete_the_options(shell: str) -> None:
    printed = CliRunner().invoke(program.run, [f"--print-completion={shell}"])
    assert printed.exit_code == 0
    assert f"_EDL_RUN_COMPLETE={shell}_complete" in printed.output
    completed = CliRunner().invoke(
        program.run, env={"_EDL_RUN_COMPLETE": f"{shell}_complete", "COMP_WORDS": "edl-run --nno", "COMP_CWORD": "1"}
    )
    assert completed.exception is None


# --- PET_*: who wins -------------------------------------------------------------------------------------------------


def test_the_command_line_and_our_own_variables_win_over_pet(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"PET_NNODES": "3:4", "PET_MAX_RESTARTS": "9", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ENDPOINT": "h:1"}
    monkeypatch.setenv("EDL_MAX_RESTARTS", "7")
    made = read("--nnodes=1:2", env=env)
    assert (made.spec.nodes, made.spec.max_restarts, made.slots) == (NodeRange(1, 2), 7, 2)


def test_a_flag_can_be_said_no_to() -> None:
    assert not tell(env={"PET_STANDALONE": "0"}).values["standalone"]
    with pytest.raises(SettingError, match="PET_STANDALONE=yes: must be 0 or 1"):
        tell(env={"PET_STANDALONE": "yes"})


def test_an_empty_variable_says_nothing() -> None:
    told = tell(env=dict.fromkeys((variable for row in TORCHRUN_ROWS for variable in row.variables), ""))
    assert {told.source(row.name) for row in TORCHRUN_ROWS} == {OptionSource.DEFAULT}
    assert told.remarks == []


def test_what_kubeflow_trainer_sets_makes_a_job_of_several_nodes() -> None:
    env = {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29500",
    }
    made = read(env=env)
    assert (made.spec.nodes, made.slots, made.node.rank) == (NodeRange(3, 3), 2, 1)
    assert made.store.endpoints == ("job-node-0-0.job:29500",)


# --- where nodes meet ------------------------------------------------------------------------------------------------


class TestStatic:
    def test_says_that_the_port_is_the_stores_and_not_the_workers(self) -> None:
        told = tell("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=1234")
        assert told.values["rdzv_endpoint"] == "10.0.0.1:1234"
        assert told.remarks == [
            "--master-addr=10.0.0.1 --master-port=1234: the job's store is at 10.0.0.1:1234; the workers' MASTER_PORT "
            "is a free port, a new one in each round"
        ]

    def test_an_address_of_ipv6_may_stand_in_brackets(self) -> None:
        for text in ("fd00::1", "[fd00::1]"):
            assert read("--nnodes=2", f"--master-addr={text}").store.endpoints == ("[fd00::1]:29500",)

    def test_on_one_node_they_name_nothing(self) -> None:
        told = tell("--master-port=1234")
        assert told.values["rdzv_endpoint"] == ""
        assert told.remarks == ["--master-port=1234 is not used: a job of one node has a private store"]

    def test_an_endpoint_wins(self) -> None:
        told = tell("--nnodes=2", "--rdzv-endpoint=a:1", env={"PET_MASTER_ADDR": "b"})
        assert told.values["rdzv_endpoint"] == "a:1"
        assert told.remarks == ["PET_MASTER_ADDR=b is not used: --rdzv-endpoint=a:1 takes precedence, as in torchrun"]


class TestStandalone:
    def test_wins_over_whatever_else_names_a_store(self) -> None:
        told = tell("--standalone", "--rdzv-endpoint=a:1", "--rdzv-id=mine", env={"PET_MASTER_ADDR": "b"})
        assert (told.values["rdzv_endpoint"], told.values["rdzv_id"]) == ("", "mine")
        assert told.remarks == [
            "--standalone: --rdzv-endpoint=a:1 is not used, because the job has a private store",
            "--standalone: PET_MASTER_ADDR=b is not used, because the job has a private store",
        ]


class TestConf:
    @pytest.mark.parametrize(
        ("conf", "of", "becomes"),
        [
            ("join_timeout=9", "recover_timeout", 9.0),
            ("timeout=8", "recover_timeout", 8.0),
            ("join_timeout=9,timeout=8", "recover_timeout", 9.0),
            ("last_call_timeout=7", "join_grace", 7.0),
            ("keep_alive_interval=2", "lease_ttl", 6.0),
            ("keep_alive_interval=2, keep_alive_max_attempt=5", "lease_ttl", 10.0),
            ("read_timeout=30", "rdzv_conf", "connect_timeout=30"),
            ("ca_cert=a,ssl_cert=b,ssl_cert_key=c,user=me", "rdzv_conf", "user=me,cert=b,key=c,ca=a"),
            ("store_type=tcp,protocol=http", "rdzv_conf", ""),
        ],
    )
    def test_keys_of_torchrun_are_translated(self, conf: str, of: str, becomes: object) -> None:
        told = tell("--rdzv-conf", conf)
        assert told.values[of] == becomes
        assert told.remarks == []

    def test_https_is_in_the_address(self) -> None:
        told = tell("--rdzv-endpoint=h:1", "--rdzv-conf=protocol=https")
        assert told.values["rdzv_endpoint"] == "etcds://h:1"

    def test_the_option_itself_wins_over_a_key(self) -> None:
        told = tell("--recover-timeout=5", "--rdzv-conf=join_timeout=9")
        assert told.values["recover_timeout"] == 5.0
        assert told.remarks == ["--rdzv-conf join_timeout=9 is not used: --recover-timeout=5 takes precedence"]

    def test_a_key_on_the_command_line_wins_over_a_variable(self) -> None:
        told = tell("--rdzv-conf=join_timeout=9", env={"PET_RDZV_CONF": "join_timeout=4"})
        assert told.values["recover_timeout"] == 9.0

    @pytest.mark.parametrize("key", [key for key in THEIR_KEYS if key.fate is Fate.EXPLAINED and not key.allowed])
    def test_others_say_why_they_change_nothing(self, key: object) -> None:
        name, why = getattr(key, "key", ""), getattr(key, "why", "")
        assert tell(f"--rdzv-conf={name}=5").remarks == [f"--rdzv-conf {name}=5 has no effect: {why}"]

    def test_the_rank_of_a_static_rendezvous_is_the_nodes(self) -> None:
        assert tell("--nnodes=2", "--rdzv-endpoint=h:1", "--rdzv-conf=rank=1").values["node_rank"] == 1
        told = tell("--nnodes=2", "--rdzv-endpoint=h:1", "--node-rank=0", "--rdzv-conf=rank=1")
        assert told.values["node_rank"] == 0
        assert told.remarks == ["--rdzv-conf rank=1 is not used: --node-rank=0 takes precedence"]
        with pytest.raises(SettingError, match="--rdzv-conf=rank=first: must be a node rank"):
            tell("--rdzv-conf=rank=first")

    @pytest.mark.parametrize("quote", ["'", '"'])
    def test_quotes_that_a_script_has_passed_on_are_taken_off(self, quote: str) -> None:
        told = tell(f"--rdzv-conf={quote}join_timeout=5, user=me{quote}")
        assert (told.values["recover_timeout"], told.values["rdzv_conf"]) == (5.0, "user=me")

    def test_unknown_keys_are_named_and_passed_over(self) -> None:
        told = tell("--rdzv-conf=overlap_timeout=600,usr=me,user=me")
        assert told.values["rdzv_conf"] == "user=me"
        first, second = told.remarks
        assert first.startswith("--rdzv-conf: unknown key 'overlap_timeout' is ignored; ")
        assert second == "--rdzv-conf: unknown key 'usr' is ignored; did you mean user?"

    def test_no_key_has_two_meanings(self) -> None:
        assert CONF_KEYS.keys().isdisjoint(key.key for key in THEIR_KEYS)


# --- the rest --------------------------------------------------------------------------------------------------------


class TestRole:
    def test_a_trainer_is_nothing_special_without_parameter_servers(self) -> None:
        made = read("--role=trainer")
        assert (made.workers.role, made.spec.servers, made.servers.count) == ("trainer", None, 0)

    def test_by_default_it_has_no_name(self) -> None:
        assert read().workers.role == ""


class TestInterpreter:
    def test_another_one_may_run_the_workers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert read().workers.python == ""
        monkeypatch.setenv("PYTHON_EXEC", sys.executable)
        assert read().workers.python == sys.executable

    def test_one_that_is_not_there_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHON_EXEC", "/no/python")
        with pytest.raises(SettingError, match="PYTHON_EXEC=/no/python: no such program"):
            read()


def test_the_time_to_stop_has_a_variable_of_torchs() -> None:
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4"}
    assert tell(env=env).values["shutdown_timeout"] == 4.0
    assert tell(env={**env, "PET_SHUTDOWN_TIMEOUT": "6"}).values["shutdown_timeout"] == 6.0
    assert tell("--shutdown-timeout=5", env=env).values["shutdown_timeout"] == 5.0


def test_variables_that_change_nothing_say_so_unless_nobody_would_miss_it() -> None:
    env = {variable.name: "1" for variable in VARIABLES if variable.name != "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    said = tell(env=env).remarks
    loud = [variable for variable in VARIABLES if variable.fate is Fate.EXPLAINED and not variable.quiet]
    assert [line.partition("=")[0] for line in said] == [variable.name for variable in loud]
    assert "has no effect: there is no timer server" in said[0]
    assert said[0].endswith("See --hang-timeout")


def test_one_device_each_needs_as_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun_options, "visible_devices", lambda: {"CUDA_VISIBLE_DEVICES": ("4", "5")})
    assert read("--virtual-local-rank", "--nproc-per-node=2").workers.virtual_local_rank
    with pytest.raises(UsageError, match="each of 3 slots needs its own device, but only 2 are available"):
        read("--virtual-local-rank", "--nproc-per-node=3")


# --- bad input: one clear line each ----------------------------------------------------------------------------------

BAD: list[tuple[list[str], str]] = [
    (["--nnodes=x"], "--nnodes=x: not a number of nodes"),
    (["--nnodes=0"], "the minimum must be at least 1"),
    (["--nnodes=3:2"], "the maximum 2 is below the minimum 3"),
    (["--nnodes=1:2:3"], "--nnodes=1:2:3: not a number of nodes"),
    (["--nnodes=2"], "needs a store that every node can reach"),
    (["--nproc-per-node=x"], "--nproc-per-node=x: must be a number"),
    (["--nproc-per-node=0"], "--nproc-per-node=0: must be a number from 1 to 4096"),
    (["--rdzv-backend=mine"], "--rdzv-backend=mine: not one of"),
    (["--rdzv-backend=etcd"], "--rdzv-backend=etcd needs an address"),
    (["--nnodes=2", "--rdzv-endpoint=h:x"], "h:x: not an address"),
    (["--nnodes=2", "--rdzv-endpoint=h:70000"], "the port must be from 1 to 65535"),
    (["--rdzv-id=a/b"], "'/' not allowed"),
    (["--print-completion=tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    (["--rdzv-conf=join_timeout"], "--rdzv-conf=join_timeout: needs a value. Write join_timeout=VALUE"),
    (["--rdzv-conf=join_timeout=x"], "--rdzv-conf=join_timeout=x: must be a number of seconds above 0"),
    (["--rdzv-conf=keep_alive_max_attempt=0"], "must be a number of attempts above 0"),
    (
        ["--rdzv-conf=keep_alive_interval=9999"],
        "keep_alive_interval*keep_alive_max_attempt=29997: must be from 1 to 3600",
    ),
    (["--rdzv-conf=store_type=file"], "store_type=file: the store is etcd, over the network"),
    (["--rdzv-conf=store_type=disk"], "store_type=disk: must be tcp or file"),
    (["--rdzv-conf=protocol=ftp"], "protocol=ftp: must be http or https"),
    (["--rdzv-conf=ca_cert=/no/file"], "/no/file: no such file"),
    (
        ["--rdzv-endpoint=h:1", "--rdzv-backend=etcd-v2", "--rdzv-conf=protocol=https"],
        "needs the CA certificate",
    ),
    (["--max-restarts=x"], "'x' is not a valid integer"),
    (["--max-restarts=-1"], "--max-restarts=-1: must be 0 or more"),
    (["--monitor-interval=x"], "'x' is not a valid float"),
    (["--monitor-interval=0"], "--monitor-interval=0: must be more than 0"),
    (["--start-method=thread"], "'thread' is not one of"),
    (["--event-log-handler=mine"], "not a handler that torch includes"),
    (["--role=reader"], "--role=reader runs no script"),
    (["-m", "no_such_module.py"], "no module 'no_such_module'"),
    (["-m", "--no-python"], "--module and --no-python exclude each other"),
    (["--no-python", "no_such_program.py"], "no such program on the PATH"),
    (["no_such_script.py"], "No such file or directory"),
    (["broken.py"], "broken.py, line 1"),
    (["--redirects=4"], "--redirects=4: must be 0, 1, 2 or 3"),
    (["--tee=0:4"], "--tee=0:4: must be 0, 1, 2 or 3"),
    (["--redirects=1:3"], "has no local rank 1"),
    (["--local-ranks-filter=x"], "--local-ranks-filter=x"),
    (["--local-ranks-filter=3"], "has no local rank 3"),
    (["--node-rank=x"], "'x' is not a valid integer"),
    ([*STORE, "--node-rank=2"], "--node-rank=2: must be from 0 to 1"),
    (["--master-port=x"], "'x' is not a valid integer"),
    (["--master-port=65536"], "--master-port=65536: must be from 0 to 65535"),
    (["--nnodes=2", "--master-addr=a b"], "--master-addr=a b: not a host name or address"),
    (["--numa-binding=core"], "'core' is not one of"),
    (["--signals-to-handle=SIGTERM,SIGKILL"], "'KILL' is not a signal on which a launcher can leave"),
    (["--signals-to-handle=SIGNOTHING"], "'NOTHING' is not a signal"),
    (["--forward-signals=USR2"], "--forward-signals=USR2: this node leaves on SIGUSR2 (--drain-signals)"),
    (["--forward-signals=TERM"], "--forward-signals=TERM: this node leaves on SIGTERM"),
    (["--forward-signals=KILL"], "'KILL' cannot be forwarded"),
    (["--shutdown-timeout=x"], "'x' is not a valid float"),
    (["--shutdown-timeout=-1"], "--shutdown-timeout=-1: must be 0 or more"),
    (["--standalone=1"], "does not take a value"),
    (["--standalone", "--nnodes=2"], "--nnodes=2: --standalone means one node"),
    (["--no-such-option"], "No such option"),
    (["--rdzv=x"], "--rdzv is ambiguous: it could be any of --rdzv-backend, --rdzv-conf, --rdzv-endpoint, --rdzv-id"),
    (["--nnodes", "--standalone"], "--nnodes needs a value, but --standalone follows it"),
    (["--nnodes"], "requires an argument"),
]


def complaint(arguments: list[str], env: Mapping[str, str] | None = None) -> str:
    """Error message of the launcher."""
    with pytest.raises((EdlError, click.ClickException)) as refused:
        if arguments == ["--nnodes"]:
            program.run.make_context("edl-run", with_both_spellings(arguments))
        told = tell(*arguments, env=env)
        if told.values["role"] == "reader":
            program._start(told, Invocation())
        read(*arguments, env=env)
    error = refused.value
    return error.format_message() if isinstance(error, click.ClickException) else str(error)


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_ends_in_one_clear_line(arguments: list[str], words: str) -> None:
    text = complaint(arguments)
    print(text)  # to be read by people: pytest -rP
    assert words in text
    assert "\n" not in text.strip()


def test_bad_values_of_variables_are_named_by_the_variable() -> None:
    for variable, value, words in (
        ("PET_MAX_RESTARTS", "x", "PET_MAX_RESTARTS=x: 'x' is not a valid integer"),
        ("PET_NNODES", "3:1", "PET_NNODES=3:1: the maximum 1 is below the minimum 3"),
        ("PET_START_METHOD", "thread", "PET_START_METHOD=thread: 'thread' is not one of"),
        ("PET_NODE_RANK", "9", "PET_NODE_RANK=9: must be from 0 to 0"),
        ("PET_RDZV_CONF", "join_timeout=x", "PET_RDZV_CONF=join_timeout=x: must be a number"),
        ("PET_SIGNALS_TO_HANDLE", "SIGKILL", "PET_SIGNALS_TO_HANDLE=SIGKILL: 'KILL' is not a signal"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x: 'x' is not a valid float"),
    ):
        assert words in complaint([], {variable: value})


def test_every_option_with_a_value_has_a_wrong_one() -> None:
    """So that nobody adds an option and forgets how it fails. Any text is right for the ones left out."""
    any_text = {"local_addr", "log_dir", "duplicate_stdout_filters", "duplicate_stderr_filters", "role"} | {
        "log_line_prefix_template"
    }
    tried = {argument.partition("=")[0] for arguments, _ in BAD for argument in arguments}
    missing: list[Row] = []
    for row in TORCHRUN_ROWS:
        if row.name not in FLAGS | any_text | {"logs_specs"} and row.option not in tried:
            missing.append(row)
    assert missing == []


def test_a_script_error_is_one() -> None:
    with pytest.raises(ScriptError):
        read("broken.py")
