"""Pservers that run the script: command lines that start them, their number, and their environment."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from edl.agent.workers.environment import LocalPaths, WorkerGroupDeps, worker_environment
from edl.agent.workers.log_paths import Attempt, WorkerFiles, peers
from edl.agent.workers.paddle_environment import ScriptPlaces
from edl.config import JobSpec, LogLayout, NodeRange, ScriptServers
from edl.errors import SettingError
from edl.launch.options.agreement import differences
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire import plain
from edl.wire.records import Member, World
from tests.support.launching import read, tell

WORLD = World(
    Round(4),
    (
        Member(NodeId("a"), Incarnation(1), "10.0.0.1", 3, Rank(0), (100, 101, 102, 103)),
        Member(NodeId("b"), Incarnation(2), "10.0.0.2", 2, Rank(3), (200, 201, 202)),
    ),
    restarts=0,
)
LISTS = ("--servers=127.0.0.1:7001,127.0.0.1:7002", "--trainers=127.0.0.1:7003")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def told(node: str, local_rank: int, job: ScriptServers, here: ScriptPlaces) -> dict[str, str]:
    spec = JobSpec(JobId("job"), NodeRange(1, 2), script_servers=job)
    paths = LocalPaths("/logs/error.json", "/logs")
    found = worker_environment({}, spec, WORLD, NodeId(node), local_rank, paths, WorkerGroupDeps(scripts=here))
    return {name: value for name, value in found.items() if name.startswith(("PADDLE_", "TRAINING_", "POD_IP"))}


class TestWhichLines:
    @pytest.mark.parametrize(
        ("arguments", "env", "chosen"),
        [
            (["--run_mode=ps"], {}, "script"),
            (["--run_mode", "ps", "--log_dir=x"], {}, "script"),
            (["--server_num=2"], {}, "script"),
            (["--worker_num=2"], {}, "script"),
            (["--trainer_num=2"], {}, "script"),
            (["--run-mode=ps", "--job_id=j"], {}, "script"),
            (["--run-mode=ps", "--dialect=paddle"], {}, "script"),
            (["--run-mode=ps"], {"PADDLE_SERVER_NUM": "1"}, "script"),
            ([*LISTS], {}, "script"),
            (["--run-mode=ps"], {}, "edl"),
            (["--run-mode=ps", "--servers-per-node=2"], {}, "edl"),
            (["--server_num=2", "--servers=2:4"], {}, "edl"),
            (["--server_num=2", "--ps-mode=sync"], {}, "edl"),
            (["--server_num=2", "--role=pserver"], {}, "edl"),
            (["--server_num=2", "--server_nnodes=1:2"], {}, "edl"),
            (["--server_num=2", "--dialect=edl"], {}, "edl"),
            (["--server_num=2", "--pservers=edl"], {}, "edl"),
            ([LISTS[0], "--job_id=j"], {}, "edl"),
            (["--job_id=j"], {}, "edl"),
            (["--run-mode=ps", "--pservers=script"], {}, "script"),
        ],
    )
    def test_are_those_in_paddles_words(self, arguments: list[str], env: dict[str, str], chosen: str) -> None:
        line = tell(*arguments, env=env)
        assert line.values["pservers"] == chosen
        said = [remark for remark in line.remarks if "pservers run train.py" in remark]
        assert len(said) == (chosen == "script" and "--pservers=script" not in arguments)

    @pytest.mark.parametrize(
        "source",
        [
            "import edl.torch.ps as ps",
            "from edl.paddle import ps",
            "def main():\n    from ps.client.client import Client",
            "import helper",
        ],
    )
    def test_a_script_that_uses_edls_own_gets_these(self, folder: Path, source: str) -> None:
        (folder / "helper.py").write_text("import edl.torch.ps\n")
        (folder / "train.py").write_text(source)
        assert tell("--server_num=2").values["pservers"] == "edl"

    def test_a_module_of_the_users_own_with_that_name_is_no_client(self, folder: Path) -> None:
        (folder / "ps.py").write_text("")
        (folder / "train.py").write_text("import ps\n")
        assert tell("--server_num=2").values["pservers"] == "script"

    def test_bring_the_rest_of_paddles_ways(self, folder: Path) -> None:
        settings = read("--server_num=1", "--worker_num=2")
        assert (settings.logs.layout, settings.logs.links) == (LogLayout.PADDLE, str(folder / "log"))
        assert settings.report.worker_status


class TestSizes:
    def test_each_node_has_its_pservers_first(self) -> None:
        settings = read("--server_num=2", "--trainer_num=3", "--nnodes=2", "--master=h:1")
        assert (settings.slots, settings.spec.nodes, settings.servers.count) == (5, NodeRange(2, 2), 0)
        assert (settings.spec.script_servers, settings.workers.scripts) == (ScriptServers(2), ScriptPlaces(2))
        assert (settings.spec.independent, settings.spec.slots.strikes, settings.logs.servers) == (False, 0, 2)
        assert read("--server_num=2", "--slot-strikes=3").spec.slots.strikes == 3

    def test_one_of_each_where_nothing_is_said(self) -> None:
        assert (read("--run_mode=ps").slots, read("--trainer_num=4").slots, read("--server_num=4").slots) == (2, 5, 5)

    def test_lists_say_who_is_here(self) -> None:
        settings = read(*LISTS)
        assert (settings.slots, settings.spec.nodes) == (3, NodeRange(1, 1))
        assert settings.workers.scripts == ScriptPlaces(2, ("127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.1:7003"))
        two = ("--servers=203.0.113.1:1,203.0.113.2:1", "--trainers=203.0.113.2:2")
        assert read(*two, "--host=203.0.113.1").workers.scripts == ScriptPlaces(1, ("203.0.113.1:1",))
        assert read(*two, "--host=203.0.113.1").spec.nodes == NodeRange(2, 2)

    def test_all_launchers_agree_on_them(self) -> None:
        spec = read("--server_num=2", "--rdzv-id=j").spec
        assert plain.loads(JobSpec, plain.dumps(spec)) == spec
        assert differences(spec, read("--server_num=1", "--rdzv-id=j").spec) == [
            "--server_num=2 (the running job has 1)"
        ]
        ours = read("--server_num=2", "--rdzv-id=j", "--pservers=edl").spec
        assert "--pservers=script (the running job has edl)" in differences(spec, ours)

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--server_num=0"], "--server_num=0: must be a number from 1 to 256"),
            (["--trainer_num=0"], "--trainer_num=0: must be a number from 1 to 256"),
            (["--run_mode=ps", "--with_gloo=9"], "--with_gloo=9: must be 0, 1, 2"),
            (["--pservers=script", "--servers=2:4"], "--servers=2:4: must be a list of HOST:PORT"),
            (["--pservers=script", "--ps-mode=sync"], "--ps-mode=sync: applies to edl's own pservers only"),
            (["--servers=203.0.113.1:1", "--trainers=203.0.113.1:2"], "names an address of this host"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, arguments: list[str], text: str) -> None:
        with pytest.raises(SettingError, match=text) as refused:
            read(*arguments)
        assert "\n" not in str(refused.value)


class TestWhatTheyAreTold:
    def test_counted_ones_have_the_ports_of_their_slots(self) -> None:
        job, here = ScriptServers(1, gloo="2"), ScriptPlaces(1)
        common = {
            "PADDLE_NNODES": "2",
            "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:101,10.0.0.2:201",
            "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:102,10.0.0.1:103,10.0.0.2:202",
            "PADDLE_TRAINERS_NUM": "3",
            "PADDLE_WITH_GLOO": "2",
            "PADDLE_GLOO_RENDEZVOUS": "3",
            "PADDLE_GLOO_HTTP_ENDPOINT": "10.0.0.1:100",
            "PADDLE_LOG_DIR": "/logs",
        }
        server = {"TRAINING_ROLE": "PSERVER", "PADDLE_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "201"}
        assert told("b", 0, job, here) == {**common, **server}
        trainer = {"TRAINING_ROLE": "TRAINER", "PADDLE_ROLE": "TRAINER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "202"}
        assert told("b", 1, job, here) == {**common, **trainer, "PADDLE_TRAINER_ID": "2"}

    def test_listed_ones_have_the_ports_that_were_named(self) -> None:
        job = ScriptServers(0, ("10.0.0.1:7001",), ("10.0.0.2:7002", "10.0.0.1:7003"))
        found = told("a", 1, job, ScriptPlaces(1, ("10.0.0.1:7001", "10.0.0.1:7003")))
        assert (found["PADDLE_PORT"], found["PADDLE_TRAINER_ID"], found["TRAINING_ROLE"]) == ("7003", "1", "TRAINER")
        assert found["PADDLE_PSERVERS_IP_PORT_LIST"] == "10.0.0.1:7001"
        assert found["PADDLE_TRAINER_ENDPOINTS"] == "10.0.0.2:7002,10.0.0.1:7003"

    def test_a_collective_worker_has_no_role(self) -> None:
        found = told("a", 0, ScriptServers(), ScriptPlaces())
        assert "TRAINING_ROLE" not in found
        assert "PADDLE_ROLE" not in found


class TestFiles:
    @pytest.mark.parametrize(
        ("local_rank", "names"),
        [
            (0, {"serverlog.0", "envlog.0"}),
            (1, {"serverlog.1", "envlog.1"}),
            (2, {"workerlog.0", "envlog.2", "backup_env.0.json"}),
        ],
    )
    def test_have_paddles_names(self, local_rank: int, names: set[str]) -> None:
        attempt = Attempt(Round(1), local_rank, local_rank)
        assert set(WorkerFiles("/log/job_a", attempt, layout=LogLayout.PADDLE, servers=2).links()) == names

    def test_a_line_about_each_round_names_its_nodes(self) -> None:
        (first, second) = json.loads(peers(WORLD))
        assert first == {
            **{"round": 4, "name": "a", "rank": 0, "replicas": 3},
            "endpoints": ["10.0.0.1:101", "10.0.0.1:102", "10.0.0.1:103"],
        }
        assert (second["name"], second["rank"], second["replicas"]) == ("b", 1, 2)
