"""Paddle's options and variables: what each becomes, who wins, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.agent.workers.paddle_environment import GPU, KINDS
from edl.config import LogLayout, NodeRange, changed
from edl.errors import SettingError, UsageError
from edl.exit_codes import ExitCode
from edl.launch import paddle_devices, paddle_options
from edl.launch.launcher import status_of_worker
from edl.launch.options import value_options
from edl.launch.resolved_options import OptionSource
from edl.launch.scale_options import launcher_again
from edl.launch.settings import Backend
from edl.ports import CommandKind
from edl.types import NodeId, Rank, Round
from edl.wire.records import Failure
from tests.support.launching import read, tell
from tests.support.script_folder import folder

__all__ = ["folder"]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without GPUs."""
    monkeypatch.setattr(paddle_devices, "count_gpus", lambda: 0)
    monkeypatch.setattr(paddle_options, "paddle_devices", lambda: (GPU, 0))


class TestDialect:
    @pytest.mark.parametrize(
        ("arguments", "env", "paddles"),
        [
            ([], {}, False),
            (["--nnodes=1", "--nproc_per_node=2", "--log_dir=x", "--max-restarts=2"], {}, False),
            (["--max_restart=2"], {}, False),
            (["--job_id=j"], {}, True),
            (["--gpus="], {}, True),
            ([], {"PADDLE_MASTER": "h:1"}, True),
            ([], {"PADDLE_MASTER": ""}, False),
            ([], {"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1"}, True),
            ([], {"POD_IP": "10.0.0.1", "POD_NAME": "x", "http_proxy": "p"}, False),
            ([], {"PADDLE_DISTRI_BACKEND": "gloo", "PADDLE_PORT": "1"}, False),
            ([], {"PADDLE_ELASTIC_SERVER": "e:1", "PADDLE_ELASTIC_NP": "2"}, False),
            ([], {"PADDLE_ELASTIC_SERVER": "e:1", "PADDLE_ELASTIC_NP": "2", "PADDLE_ELASTIC_JOB_ID": "j"}, True),
            (["--dialect=paddle"], {}, True),
            (["--dialect=edl"], {"PADDLE_JOB_ID": "j"}, False),
            ([], {"PADDLE_JOB_ID": "j", "EDL_ROUND": "3"}, False),
            ([], {"PADDLE_LOG_DIR": "j", "EDL_AGENT": "socket"}, False),
        ],
    )
    def test_is_spoken_when_something_is_only_paddles(
        self, arguments: list[str], env: dict[str, str], paddles: bool
    ) -> None:
        told = tell(*arguments, env=env)
        assert told.values["log_layout"] == ("paddle" if paddles else "auto")
        assert told.values["exit_code"] == ("worker" if paddles else "edl")

    @pytest.mark.parametrize(
        ("arguments", "env", "named"),
        [
            ([], {"PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINER_ID in the environment"),
            ([], {"PADDLE_MASTER": "h:1", "PADDLE_NNODES": "2"}, "PADDLE_MASTER, PADDLE_NNODES in the environment"),
            ([], {"PADDLE_ELASTIC_SERVER": "e:1", "PADDLE_ELASTIC_NP": "2", "PADDLE_ELASTIC_JOB_ID": "j"}, "ELASTIC"),
            (["--job_id=j"], {"PADDLE_MASTER": "h:1"}, ""),
            (["--dialect=paddle"], {"PADDLE_MASTER": "h:1"}, ""),
            (["--dialect=edl"], {"PADDLE_MASTER": "h:1"}, ""),
        ],
    )
    def test_that_variables_alone_have_chosen_is_said(
        self, arguments: list[str], env: dict[str, str], named: str
    ) -> None:
        lines = [line for line in tell(*arguments, env=env).remarks if "--dialect=edl" in line]
        assert len(lines) == bool(named)
        assert all(named in line for line in lines)

    def test_of_paddlecloud_belongs_to_its_scheduler(self) -> None:
        cloud = {"PADDLE_ELASTIC_SERVER": "e:1", "PADDLE_ELASTIC_NP": "2", "PADDLE_ELASTIC_JOB_ID": "j"}
        told = tell("--scheduler=paddlecloud", "--rdzv-endpoint=h:1", "--nnodes=1:4", env=cloud)
        assert (told.values["rdzv_endpoint"], told.values["nnodes"], told.values["rdzv_id"]) == ("h:1", "1:4", "")
        assert told.values["log_layout"] == "auto"

    def test_decides_on_what_nobody_has_said(self, folder: Path) -> None:
        settings = read("--dialect=paddle")
        assert settings.logs.layout is LogLayout.PADDLE
        assert settings.logs.links == str(folder / "log")
        assert settings.report.worker_status
        assert (settings.slots, settings.spec.nodes) == (1, NodeRange(1, 1))
        other = read("--dialect=paddle", "--log_dir=mine", "--exit-code=edl", "--nproc_per_node=3")
        assert other.logs.links == str(folder / "mine")
        assert (other.report.worker_status, other.slots) == (False, 3)

    def test_gives_each_gpu_that_paddle_can_use_a_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paddle_options, "paddle_devices", lambda: (GPU, 4))
        assert read("--dialect=paddle").slots == 4
        assert read("--dialect=paddle", "--run_mode=ps").slots == 2
        assert read("--dialect=paddle", "--run_mode=ps", "--pservers=edl").slots == 1

    def test_takes_other_scripts_for_programs(self, folder: Path) -> None:
        (folder / "train.sh").write_text("#!/bin/sh\n")
        (folder / "train.sh").chmod(0o755)
        assert read("--dialect=paddle", "./train.sh").workers.command.kind is CommandKind.PROGRAM
        assert read("--dialect=paddle", "train.py").workers.command.kind is CommandKind.SCRIPT

    def test_takes_proxies_from_workers(self) -> None:
        told = tell("--dialect=paddle", env={"http_proxy": "p:1"})
        assert (told.environment, told.for_workers) == ({}, {"http_proxy": None, "http_proxy_original": "p:1"})
        own = {"http_proxy": "p:1", "PATH": "/bin"}
        assert changed(own, told.for_workers) == {"http_proxy_original": "p:1", "PATH": "/bin"}
        assert any("http_proxy" in line for line in told.remarks)
        assert tell(env={"http_proxy": "p:1"}).for_workers == {}


class TestOptions:
    def test_a_master_is_a_store_of_ours_at_that_address(self) -> None:
        settings = read("--master=10.0.0.1:8765", "--nnodes=2", "--rank=1", "--job_id=j", "--host=10.0.0.2")
        assert (settings.store.backend, settings.store.endpoints) == (Backend.EMBEDDED, ("10.0.0.1:8765",))
        assert (settings.spec.nodes, settings.node.rank, settings.spec.job) == (NodeRange(2, 2), 1, "j")
        assert settings.node.local_addr == "10.0.0.2"

    def test_or_an_etcd(self) -> None:
        settings = read("--master", "etcd://e:2379", "--nnodes", "2:4")
        assert (settings.store.backend, settings.store.endpoints) == (Backend.ETCD, ("e:2379",))
        assert (settings.spec.nodes, settings.spec.job) == (NodeRange(2, 4), "default")

    def test_one_node_needs_none(self) -> None:
        told = tell("--master=127.0.0.1:8765", "--nnodes=1", "--rank=0", "--nproc_per_node=2", "--run_mode=rpc")
        assert told.values["rdzv_endpoint"] == ""
        assert told.remarks == ["--master=127.0.0.1:8765 is not used: a job of one node has a private store"]
        assert read("--master=h:1", "--run_mode=rpc").spec.servers is None
        assert read("--master=h:1", "--trainers=1:2").store.endpoints == ("h:1",)
        assert read("--master=http://h:1", "--nnodes=2").store.endpoints == ("h:1",)

    def test_addresses_of_all_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = read("--ips=203.0.113.1,203.0.113.2,203.0.113.3", "--host=203.0.113.2", "--start_port=7000")
        assert settings.store.endpoints == ("203.0.113.1:7000",)
        assert tell("--ips=203.0.113.1,203.0.113.2", "--host=203.0.113.2", "--start_port=7000").remarks == []
        assert (settings.spec.nodes, settings.node.rank, settings.node.local_addr) == (
            NodeRange(3, 3),
            1,
            "203.0.113.2",
        )
        monkeypatch.setattr("edl.adapters.etcd_cluster.can_bind", lambda host, port: host == "203.0.113.1")
        settings = read("--ips=203.0.113.1,203.0.113.2")
        assert (settings.store.endpoints, settings.node.rank) == (("203.0.113.1:6070",), 0)
        assert settings.node.local_addr == "203.0.113.1"
        assert read("--ips=127.0.0.1").store.endpoints == ()
        told = tell("--ips=203.0.113.1,203.0.113.2", "--master=203.0.113.9:1", "--nnodes=2")
        assert told.values["rdzv_endpoint"] == "203.0.113.9:1"
        assert "not used with --master" in told.remarks[0]

    def test_lists_of_pservers_and_trainers_need_no_further_address(self) -> None:
        lists = ["--servers=203.0.113.1:6170,203.0.113.2:6170", "--workers=203.0.113.1:6171,203.0.113.2:6171"]
        settings = read(*lists, "--host=203.0.113.2")
        assert settings.store.endpoints == ("203.0.113.1:6767",)
        assert (settings.slots, settings.servers.count, settings.spec.nodes) == (2, 0, NodeRange(2, 2))
        assert settings.workers.scripts.addresses == ("203.0.113.2:6170", "203.0.113.2:6171")
        ours = read(*lists, "--host=203.0.113.2", "--pservers=edl")
        assert (ours.slots, ours.servers.count, ours.spec.nodes) == (1, 1, NodeRange(2, 2))
        assert read(*lists, "--host=203.0.113.2", "--gloo_port=7").store.endpoints == ("203.0.113.1:7",)
        assert read(*lists, "--host=203.0.113.2", "--master=h:9").store.endpoints == ("h:9",)
        assert read("--servers=127.0.0.1:6170", "--workers=127.0.0.1:6171").store.endpoints == ()

    def test_the_legacy_launchers_elastic_job(self) -> None:
        settings = read("--elastic_server=e:2379", "--np=2:4", "--job_id=j")
        assert (settings.store.backend, settings.store.endpoints) == (Backend.ETCD, ("e:2379",))
        assert (settings.spec.nodes, settings.spec.job) == (NodeRange(2, 4), "j")

    def test_the_elastic_designs_own_spelling(self) -> None:
        settings = read(
            *("--server_nnodes=1:2", "--nnodes=1:4", "--nproc_per_node=2", "--rdzv_id=j"),
            *("--rdzv_backend=etcd", "--rdzv_endpoint=e:2379"),
        )
        assert (settings.spec.nodes, settings.slots, settings.store.backend) == (NodeRange(1, 4), 2, Backend.ETCD)
        assert settings.spec.servers is not None and settings.spec.servers.servers == (1, 2)

    @pytest.mark.parametrize(
        ("arguments", "restarts", "recover_s", "grace_s"),
        [
            (["--max_restart=7"], 7, 600.0, 1.0),
            (["--elastic_level=-1"], 0, 600.0, 1.0),
            (["--elastic_level=-1", "--max_restart=5"], 0, 600.0, 1.0),
            (["--elastic_level=0", "--max_restart=5"], 5, 600.0, 1.0),
            (["--elastic_level=1"], 3, 600.0, 1.0),
            (["--elastic_timeout=20"], 3, 200.0, 1.0),
            (["--elastic_timeout=20", "--master=etcd://e:1", "--nnodes=1:2"], 3, 20.0, 20.0),
        ],
    )
    def test_levels_and_times(self, arguments: list[str], restarts: int, recover_s: float, grace_s: float) -> None:
        spec = read(*arguments).spec
        found = (spec.max_restarts, spec.timeouts.recover_s, spec.timeouts.join_grace_s)
        assert found == (restarts, recover_s, grace_s)

    def test_what_workers_find(self, folder: Path) -> None:
        (folder / "auto.json").write_text('{"tuner_run_mode": "run_only"}')
        told = tell("--backend=gloo", "--auto_cluster_config=true", "--auto_parallel_config=auto.json")
        assert told.environment == {
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_AUTO_CLUSTER": "1",
            "PADDLE_AUTO_PARALLEL_CONFIG": "auto.json",
            "PADDLE_AUTO_PARALLEL_STAGE": "run",
        }

    @pytest.mark.parametrize(
        "given",
        ["--log_level=debug", "--sort_ip=1", "--enable_gpu_log=1", "--legacy=true", "--with_gloo=1", "--force=1"],
    )
    def test_those_without_a_meaning_are_explained_once(self, given: str) -> None:
        name = given.partition("=")[0]
        (line,) = tell(given).remarks
        assert line.startswith(f"{name}=")
        assert len(line) < 200

    @pytest.mark.parametrize("given", ["--start_port=7000", "--gloo_port=7000"])
    def test_ports_of_a_store_that_is_not_there_are_explained(self, given: str) -> None:
        (line,) = tell(given).remarks
        assert line.startswith(f"{given} is not used: it is the port of the store with ")

    def test_those_that_ask_for_what_holds_anyway_need_no_word(self) -> None:
        assert (
            tell("--sort_ip=0", "--enable_gpu_log=no", "--legacy=f", "--log_level=INFO", "--with_gloo=0").remarks == []
        )


class TestDevices:
    @pytest.mark.parametrize(
        ("arguments", "env", "slots", "found"),
        [
            (["--gpus=1,3"], {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2, {"CUDA_VISIBLE_DEVICES": "1,3"}),
            (["--devices=5"], {"CUDA_VISIBLE_DEVICES": "4,5"}, 1, {"CUDA_VISIBLE_DEVICES": "5"}),
            (["--selected_gpus=4,5"], {"CUDA_VISIBLE_DEVICES": "4,5"}, 2, {"CUDA_VISIBLE_DEVICES": "4,5"}),
            (["--devices=0,1"], {"XPU_VISIBLE_DEVICES": "0,1"}, 2, {"XPU_VISIBLE_DEVICES": "0,1"}),
            (["--npus=0,1"], {}, 2, {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}),
            (["--xpus=2"], {}, 1, {"XPU_VISIBLE_DEVICES": "2"}),
            (["--npus=0,1,2", "--nproc_per_node=2"], {}, 2, {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}),
            (["--npus=0,1,2", "--nproc_per_node=1"], {}, 1, {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}),
            ([], {"PADDLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, 1, {"CUDA_VISIBLE_DEVICES": "1"}),
        ],
    )
    def test_are_the_visible_ones(
        self, arguments: list[str], env: dict[str, str], slots: int, found: dict[str, str]
    ) -> None:
        told = tell(*arguments, env=env)
        assert (int(told.values["nproc_per_node"]), told.environment) == (slots, found)

    def test_are_counted_where_nobody_has_listed_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paddle_devices, "count_gpus", lambda: 2)
        assert tell("--gpus=1").environment == {"CUDA_VISIBLE_DEVICES": "1"}
        with pytest.raises(SettingError, match="--gpus=1,2: there is no device 2: this node has 2 GPUs"):
            tell("--gpus=1,2")

    def test_are_of_the_kind_that_paddle_is_made_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert tell("--devices=0,1", env={"CUDA_VISIBLE_DEVICES": "0,1"}).environment.keys() == {"CUDA_VISIBLE_DEVICES"}
        (npu,) = (kind for kind in KINDS if kind.name == "npu")
        monkeypatch.setattr(paddle_devices, "paddle_devices", lambda: (npu, 2))
        assert tell("--devices=0,1").environment == {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}


class TestVariables:
    def test_win_over_the_command_line_and_say_so(self) -> None:
        env = {"PADDLE_MASTER": "m:1", "PADDLE_NNODES": "3", "PADDLE_JOB_ID": "theirs", "PADDLE_RANK": "2"}
        told = tell("--master=c:1", "--nnodes=2", "--rdzv-id=mine", "--rank=0", env=env)
        assert (told.values["rdzv_endpoint"], told.values["nnodes"]) == ("m:1", "3")
        assert (told.values["rdzv_id"], told.values["node_rank"]) == ("theirs", 2)
        assert sorted(told.remarks) == [
            "PADDLE_JOB_ID=theirs overrides --rdzv-id=mine",
            "PADDLE_MASTER=m:1 overrides --master=c:1",
            "PADDLE_NNODES=3 overrides --nnodes=2",
            "PADDLE_RANK=2 overrides --rank=0",
        ]

    def test_are_all_of_upstreams_table(self) -> None:
        env = {
            **{"PADDLE_NPROC_PER_NODE": "2", "PADDLE_LOG_DIR": "l", "PADDLE_MAX_RESTART": "9"},
            **{"PADDLE_ELASTIC_LEVEL": "1", "PADDLE_ELASTIC_TIMEOUT": "5", "PADDLE_LOG_OVERWRITE": "yes"},
            **{
                "PADDLE_AUTO_CLUSTER": "true",
                "PADDLE_SORT_IP": "0",
                "PADDLE_LOG_LEVEL": "INFO",
                "PADDLE_WITH_GLOO": "0",
            },
        }
        told = tell(env=env)
        assert (told.values["nproc_per_node"], told.values["log_dir"], told.values["max_restarts"]) == ("2", "l", 9)
        assert (told.values["recover_timeout"], told.values["log_overwrite"]) == (50.0, True)
        assert told.environment == {"PADDLE_AUTO_CLUSTER": "1"}
        servers = {"PADDLE_SERVER_NUM": "2", "PADDLE_TRAINER_NUM": "3", "PADDLE_RUN_MODE": "ps"}
        settings = read(env=servers)
        assert (settings.servers.count, settings.slots, settings.spec.script_servers.each) == (0, 5, 2)
        ours = read("--pservers=edl", env=servers)
        assert (ours.servers.count, ours.slots, ours.spec.independent) == (2, 3, True)
        lists = {
            "PADDLE_SERVERS_ENDPOINTS": "203.0.113.1:1,203.0.113.2:1",
            "PADDLE_TRAINERS_ENDPOINTS": "203.0.113.2:2",
            "PADDLE_GLOO_PORT": "9",
            "POD_IP": "203.0.113.2",
        }
        assert read(env=lists).store.endpoints == ("203.0.113.1:9",)
        ips = {"PADDLE_IPS": "203.0.113.1,203.0.113.2", "PADDLE_START_PORT": "5", "POD_IP": "203.0.113.2"}
        assert read(env=ips).store.endpoints == ("203.0.113.1:5",)

    def test_of_a_trainer_give_the_rank(self) -> None:
        two = ["--master=h:1", "--nnodes=2"]
        assert tell(*two, env={"PADDLE_TRAINER_ID": "1"}).values["node_rank"] == 1
        assert tell(*two, env={"PADDLE_TRAINER_ID": "-1"}).values["node_rank"] == -1
        assert tell(*two, env={"PADDLE_TRAINER_ID": "1", "PADDLE_RANK": "0"}).values["node_rank"] == 0

    def test_of_a_rank_say_nothing_to_a_single_node(self) -> None:
        left_over = tell(env={"PADDLE_TRAINER_ID": "3"})
        assert left_over.values["node_rank"] == -1
        assert any(line.startswith("PADDLE_TRAINER_ID=3 is not used") for line in left_over.remarks)
        assert not any("not used" in line for line in tell(env={"PADDLE_TRAINER_ID": "0"}).remarks)

    @pytest.mark.parametrize(
        "env",
        [
            {"PADDLE_NNODES": "4"},
            {"PADDLE_MASTER": "h:1"},
            {"PADDLE_TRAINER_ID": "3"},
            {"PADDLE_IPS": "10.0.0.1,10.0.0.2"},
            {"PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.2:1"},
        ],
        ids=lambda env: next(iter(env)),
    )
    def test_of_several_nodes_are_not_for_a_standalone_job(self, env: dict[str, str]) -> None:
        settings = read("--standalone", env=env)
        assert (settings.spec.nodes, settings.store.endpoints, settings.node.rank) == (NodeRange(1, 1), (), -1)
        told = tell("--standalone", env=env)
        assert [line for line in told.remarks if f"{next(iter(env))}=" in line and "with --standalone" in line]
        legacy = {"PADDLE_ELASTIC_SERVER": "e:1", "PADDLE_ELASTIC_JOB_ID": "j", "PADDLE_ELASTIC_NP": "2"}
        assert read("--standalone", env=legacy).store.endpoints == ()

    def test_override_variables_of_ours_by_their_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EDL_NNODES", "2")
        told = tell("--master=h:1", env={"PADDLE_NNODES": "3"})
        assert "PADDLE_NNODES=3 overrides EDL_NNODES=2" in told.remarks
        monkeypatch.setenv("EDL_NODE_RANK", "9")
        with pytest.raises(SettingError, match=r"^EDL_NODE_RANK=9: must be from 0 to 1"):
            read("--master=h:1")

    def test_pod_ip_is_an_address_only_for_paddle(self) -> None:
        pod = {"POD_IP": "10.0.0.7"}
        assert tell(env=pod).values["local_addr"] == ""
        assert tell("--job_id=j", env=pod).values["local_addr"] == "10.0.0.7"
        assert tell("--job_id=j", "--local-addr=10.0.0.8", env=pod).values["local_addr"] == "10.0.0.8"
        told = tell("--host=10.0.0.8", env=pod)
        assert (told.values["local_addr"], told.remarks) == (
            "10.0.0.7",
            ["POD_IP=10.0.0.7 overrides --host=10.0.0.8"],
        )

    @pytest.mark.parametrize(
        ("env", "master", "nodes"),
        [
            ({"PADDLE_TRAINER_ENDPOINTS": "a:1,a:2,b:1,b:2"}, "a:1", "2"),
            ({"PADDLE_TRAINER_ENDPOINTS": "a,b,c"}, "a:6768", "3"),
            ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1", "DISTRIBUTED_TRAINER_ENDPOINTS": "c:1,d:1,e:1"}, "c:1", "3"),
            ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1", "PADDLE_MASTER": "m:1", "PADDLE_NNODES": "5"}, "a:1", "2"),
        ],
    )
    def test_that_list_trainers_say_where_and_how_many(self, env: dict[str, str], master: str, nodes: str) -> None:
        told = tell("--nnodes=9", env=env)
        assert (told.values["rdzv_endpoint"], told.values["nnodes"]) == (master, nodes)
        assert [line for line in told.remarks if line.startswith("hosts of ") and line.count("overrides") == 1]

    def test_of_kubeflows_paddle_job(self) -> None:
        """What its operator sets for a worker that is not the first."""
        env = {"PADDLE_JOB_ID": "uid-7", "PADDLE_NNODES": "2", "PADDLE_MASTER": "train-worker-0:36543"}
        settings = read(env={**env, "POD_IP": "10.0.0.9"})
        assert (settings.spec.job, settings.spec.nodes) == ("uid-7", NodeRange(2, 2))
        assert (settings.store.endpoints, settings.node.local_addr) == (("train-worker-0:36543",), "10.0.0.9")

    def test_of_the_legacy_launcher_are_weaker_than_options(self) -> None:
        env = {
            **{"PADDLE_ELASTIC_SERVER": "e:1", "PADDLE_ELASTIC_JOB_ID": "env", "PADDLE_ELASTIC_NP": "2:4"},
            **{"PADDLE_ELASTIC_TTL": "60", "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "1"},
        }
        settings = read(env=env)
        assert (settings.store.endpoints, settings.spec.job) == (("e:1",), "env")
        assert (settings.spec.nodes, settings.spec.timeouts.lease_ttl_s) == (NodeRange(2, 4), 60.0)
        assert settings.spec.fault_tolerance.value == "recover"
        settings = read("--np=3", "--job_id=mine", "--elastic_server=o:1", "--lease-ttl=5", env=env)
        assert (settings.store.endpoints, settings.spec.job, settings.spec.nodes) == (("o:1",), "mine", NodeRange(3, 3))
        assert settings.spec.timeouts.lease_ttl_s == 5.0

    def test_etcd_as_a_service_of_kubernetes(self) -> None:
        env = {
            **{"PADDLE_ELASTIC_ETCD_SERVICE_HOST": "10.0.0.5", "PADDLE_ELASTIC_ETCD_SERVICE_PORT": "2379"},
            **{"PADDLE_ELASTIC_JOB_ID": "j", "PADDLE_ELASTIC_NP": "2"},
        }
        assert read(env=env).store.endpoints == ("10.0.0.5:2379",)
        assert tell(env=env).origin("elastic_server") == "PADDLE_ELASTIC_ETCD_SERVICE_HOST"

    def test_keep_the_strength_they_have(self) -> None:
        told = tell("--job_id=j", "--master=h:1", "--nnodes=2", env={"PADDLE_NNODES": "4"})
        assert told.source("nnodes") is OptionSource.PADDLE
        assert told.source("rdzv_endpoint") is OptionSource.COMMAND_LINE


def test_one_more_launcher_of_the_job_has_what_is_not_about_this_one() -> None:
    given = ["--master", "h:1", "--rank=0", "--host=10.0.0.1", "--nnodes=2:4", "--job-id=j", "train.py", "--rank=9"]
    again = launcher_again("python", given, value_options(), ["s:1"], {"--node-id": "n2"}, elsewhere=True)
    assert again[3:] == (
        *("--nnodes=2:4", "--job-id=j", "--node-id=n2", "--rdzv-backend=etcd", "--rdzv-endpoint=s:1"),
        *("train.py", "--rank=9"),
    )


REFUSED: list[tuple[list[str], dict[str, str], str]] = [
    (["--master=h"], {}, "--master=h: 'h' is not HOST:PORT"),
    (["--master=h:x"], {}, "--master=h:x: 'h:x' is not HOST:PORT"),
    (["--master=etcd://h:0"], {}, "--master=etcd://h:0: 'h:0' is not HOST:PORT"),
    ([], {"PADDLE_MASTER": "h:99999"}, "PADDLE_MASTER=h:99999: 'h:99999' is not HOST:PORT"),
    (["--master=h:1", "--rdzv-endpoint=g:1", "--nnodes=2"], {}, "--master=h:1: --rdzv-endpoint=g:1 contradicts it"),
    (["--rank=0", "--node-rank=1", "--nnodes=2"], {}, "--rank=0: --node-rank=1 contradicts it"),
    (["--rank=5", "--nnodes=2", "--master=h:1"], {}, "--rank=5: must be from 0 to 1, below the maximum of --nnodes=2"),
    (["--nnodes=2", "--master=h:1"], {"PADDLE_RANK": "7"}, "PADDLE_RANK=7: must be from 0 to 1"),
    ([], {"PADDLE_RANK": "first"}, "PADDLE_RANK=first: 'first' is not a valid integer"),
    ([], {"PADDLE_TRAINER_ID": "x"}, "PADDLE_TRAINER_ID=x: 'x' is not a valid integer"),
    ([], {"PADDLE_NNODES": "two"}, "PADDLE_NNODES=two: not a number of nodes"),
    ([], {"PADDLE_NPROC_PER_NODE": "x"}, "PADDLE_NPROC_PER_NODE=x: must be a number"),
    (["--nproc_per_node=0"], {}, "--nproc-per-node=0: must be a number"),
    ([], {"PADDLE_RUN_MODE": "magic"}, "PADDLE_RUN_MODE=magic: 'magic' is not one of"),
    (["--run_mode=ps-heter"], {}, "--run_mode=ps-heter: trainers of several kinds are not supported"),
    (["--job_id=a/b"], {}, "--job_id='a/b': '/' not allowed"),
    (["--job_id=a", "--rdzv-id=b"], {}, "--job_id=a: --rdzv-id=b contradicts it"),
    (["--host=a", "--local-addr=b"], {}, "--host=a: --local-addr=b contradicts it"),
    (["--max_restart=-1"], {}, "--max_restart=-1: must be 0 or more"),
    (["--max_restart=1", "--max-restarts=2"], {}, "--max_restart=1: --max-restarts=2 contradicts it"),
    ([], {"PADDLE_MAX_RESTART": "x"}, "PADDLE_MAX_RESTART=x: 'x' is not a valid integer"),
    ([], {"PADDLE_ELASTIC_LEVEL": "4"}, "PADDLE_ELASTIC_LEVEL=4: 4 is not in the range -1<=x<=1"),
    ([], {"PADDLE_ELASTIC_TIMEOUT": "0"}, "PADDLE_ELASTIC_TIMEOUT=0: 0 is not in the range x>=1"),
    ([], {"PADDLE_START_PORT": "70000"}, "PADDLE_START_PORT=70000: 70000 is not in the range 1<=x<=65535"),
    ([], {"PADDLE_LOG_OVERWRITE": "maybe"}, "PADDLE_LOG_OVERWRITE=maybe: 'maybe' is not a valid boolean"),
    ([], {"PADDLE_LOG_LEVEL": "LOUD"}, "PADDLE_LOG_LEVEL=LOUD: not a log level"),
    (["--gpus=0"], {}, "--gpus=0: there is no device 0: this node has 0 GPUs"),
    (["--gpus=2"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "--gpus=2: there is no device 2: CUDA_VISIBLE_DEVICES=0,1"),
    (["--gpus=,"], {}, "--gpus=,: must be a comma-separated list of devices"),
    (["--npus=1,1"], {}, "--npus=1,1: must be a comma-separated list of devices, each named once"),
    (["--npus=1", "--xpus=1"], {}, "--xpus=1: --npus=1 is given as well"),
    (["--npus=0,1", "--nproc_per_node=3"], {}, "--npus=0,1: not enough devices for 3 workers"),
    ([], {"PADDLE_DEVICES": "9", "CUDA_VISIBLE_DEVICES": "0"}, "PADDLE_DEVICES=9: there is no device 9"),
    (["--ips=127.0.0.1,10.0.0.1"], {}, "--ips=127.0.0.1,10.0.0.1: 127.0.0.1 is every node's own address"),
    (["--ips=a,a"], {}, "--ips=a,a: names an address twice"),
    (["--ips=203.0.113.1,203.0.113.2"], {}, "none of these is an address of this host"),
    (["--ips=203.0.113.1,203.0.113.2", "--nnodes=3"], {}, "--ips=.*--nnodes=3 contradicts it"),
    (["--elastic_server=e:1"], {}, "--elastic_server=e:1: needs --job_id and --np as well"),
    (["--np=2", "--nnodes=3", "--master=h:1"], {}, "--np=2: --nnodes=3 contradicts it"),
    (["--np=many"], {}, "--np=many: not a number of nodes"),
    (["--scale=2"], {}, "--scale=2: starting a launcher does not change the size of the job. Use edl scale"),
    (["--elastic_pre_hook=x"], {}, "--elastic_pre_hook=x: edl runs no command before a round"),
    (
        ["--auto_tuner_json=t.json"],
        {},
        "--auto_tuner_json=t.json: edl has no auto tuner, which runs one job after another",
    ),
    (["--auto_parallel_config=none.json"], {}, "--auto_parallel_config=none.json: cannot be read as JSON"),
    (
        ["--enable_auto_mapping=true"],
        {},
        "--enable_auto_mapping=True: ranks are assigned to the nodes that have joined",
    ),
    (["--coordinators=a:1"], {}, "--coordinators=a:1: coordinators of federated learning"),
    (["--coordinator_num=1"], {}, "--coordinator_num=1: coordinators of federated learning"),
    (["--heter_workers=a:1"], {}, "--heter_workers=a:1: trainers of several kinds"),
    (["--heter_devices=cpu"], {}, "--heter_devices=cpu: trainers of several kinds"),
    (["--heter_worker_num=2"], {}, "--heter_worker_num=2: trainers of several kinds"),
    (["--backend=heter"], {}, "--backend=heter: trainers of several kinds"),
    (["--backend=mpi"], {}, "--backend=mpi: is not one of Paddle's backends"),
    (["--nnodes=2"], {"PADDLE_JOB_ID": "j"}, "--rdzv-endpoint: --nnodes=2 needs a store that every node can reach"),
    ([], {"PADDLE_SERVER_NUM": "x", "PADDLE_RUN_MODE": "ps"}, "PADDLE_SERVER_NUM=x: must be a number"),
    ([], {"PADDLE_TRAINER_NUM": "0"}, "PADDLE_TRAINER_NUM=0: must be a number"),
    ([], {"PADDLE_SERVERS_ENDPOINTS": "h:x"}, "PADDLE_SERVERS_ENDPOINTS=h:x: is neither"),
]


@pytest.mark.parametrize(("arguments", "env", "text"), REFUSED, ids=[" ".join([*row[0], *row[1]]) for row in REFUSED])
def test_what_cannot_work_is_one_line(arguments: list[str], env: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text) as refused:
        read(*arguments, env=env)
    assert refused.value.exit_code is ExitCode.USAGE
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("status", "codes", "ends"),
    [(1, [3, 1], 3), (1, [-9], 137), (1, [0], 1), (1, [], 1), (3, [5], 3), (0, [], 0), (143, [5], 143)],
)
def test_the_status_of_the_worker_that_failed_first(status: int, codes: list[int], ends: int) -> None:
    failures = tuple(Failure(NodeId("a"), Round(1), Rank(0), 0, code, "failed") for code in codes)
    assert status_of_worker(status, failures) == ends
