"""Environment variables of a worker for every framework."""

from __future__ import annotations

import dataclasses
import os

import click
import pytest

from edl.agent.workers.environment import (
    LocalPaths,
    WorkerGroupDeps,
    ahead_environment,
    fork_server_environment,
    worker_environment,
)
from edl.arithmetic import hyper
from edl.config import JobSpec, NodeRange, Replicas, VerifyRules
from edl.job_records import DataFiles, Training
from edl.launch import __main__ as program
from edl.launch.resolved_options import EXPORTED, OF_WORKER, forget_exports
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire.local import AGENT_VARIABLE
from edl.wire.records import Member, Settings, World
from edl.worker.session import AHEAD_VARIABLE, WORKER_VARIABLE

SPEC = JobSpec(JobId("my-job"), NodeRange(2, 4), max_restarts=7)
WORLD = World(
    Round(3),
    (
        Member(NodeId("a"), Incarnation(1), "10.0.0.1", 2, Rank(0), (100, 101, 102)),
        Member(NodeId("b"), Incarnation(2), "10.0.0.2", 1, Rank(2), (200, 201)),
        Member(NodeId("c"), Incarnation(3), "10.0.0.3", 3, Rank(3), (300, 301, 302, 303)),
    ),
    restarts=1,
)
ENDPOINTS = "10.0.0.1:101,10.0.0.1:102,10.0.0.2:201,10.0.0.3:301,10.0.0.3:302,10.0.0.3:303"
PATHS = LocalPaths("/logs/2/1/error.json", "/logs/2/1")
TORCHRUN = {
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}


def told(
    node: str, local_rank: int, base: dict[str, str] | None = None, world: World = WORLD, gpus: int = 0
) -> dict[str, str]:
    return worker_environment(base or {}, SPEC, world, NodeId(node), local_rank, PATHS, WorkerGroupDeps(gpus))


def test_a_launcher_in_a_worker_does_not_take_what_it_was_told_for_options(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(SPEC, replicas=Replicas(2, 1))
    told_all = told("a", 0) | ahead_environment({}, spec, NodeId("a"), (0,), 0, PATHS, WorkerGroupDeps(0))
    assert "EDL_REPLICA_SIZE" in told_all
    read = {
        f"EDL_{option.name.upper()}"
        for option in program.run.params
        if isinstance(option, click.Option) and option.allow_from_autoenv and option.name
    }
    for name in told_all.keys() & read:
        monkeypatch.setenv(name, "x")
    forget_exports()
    assert os.environ["EDL_NODE_ID"] == "x", "outside it is an option"
    monkeypatch.setenv("EDL_AGENT", "x")
    forget_exports()
    assert told_all.keys() & read & os.environ.keys() == set()


OF_A_MACHINE = {
    "OMP_NUM_THREADS", "PADDLE_AUTO_CLUSTER", "PADDLE_DISTRI_BACKEND", "PADDLE_LOG_DIR", "POD_IP", "POD_NAME",
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}  # fmt: skip
"""Variables of a worker that mean the same in a process that it starts, or that each worker gets anew."""


def test_a_launcher_in_a_worker_keeps_from_its_workers_which_worker_that_is() -> None:
    data = (DataFiles("clicks", ("/data/*.txt",)),)
    spec = dataclasses.replace(SPEC, servers=Training(), verify=VerifyRules(2), data=data)
    told_all = worker_environment({}, spec, WORLD, NodeId("a"), 0, PATHS, WorkerGroupDeps(0))
    assert {"EDL_DATA_SETS", "EDL_PS", "EDL_VERIFY", "TRAINING_ROLE"} <= told_all.keys()
    told_all |= {WORKER_VARIABLE: "1", AHEAD_VARIABLE: "0", AGENT_VARIABLE: "x"}
    assert told_all.keys() - {*OF_WORKER, *EXPORTED} == OF_A_MACHINE


def part(environment: dict[str, str], *names: str) -> tuple[str, ...]:
    return tuple(environment[name] for name in names)


class TestTorch:
    def test_torchruns_seventeen_variables(self) -> None:
        environment = told("c", 1)
        assert len(TORCHRUN) == 17
        assert {name: environment[name] for name in TORCHRUN} == {
            "LOCAL_RANK": "1",
            "RANK": "4",
            "GROUP_RANK": "2",
            "ROLE_RANK": "4",
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": "3",
            "WORLD_SIZE": "6",
            "GROUP_WORLD_SIZE": "3",
            "ROLE_WORLD_SIZE": "6",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "100",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_MAX_RESTARTS": "7",
            "TORCHELASTIC_RUN_ID": "my-job",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": "/logs/2/1/error.json",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }

    def test_ranks_by_role_count_the_nodes_of_one_role(self) -> None:
        roles = ("teacher", "student", "teacher")
        members = (dataclasses.replace(member, role=role) for member, role in zip(WORLD.members, roles, strict=True))
        world = dataclasses.replace(WORLD, members=tuple(members))
        names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "RANK", "WORLD_SIZE")
        assert part(told("a", 1, world=world), *names) == ("teacher", "1", "5", "1", "6")
        assert part(told("b", 0, world=world), *names) == ("student", "0", "1", "2", "6")
        assert part(told("c", 0, world=world), *names) == ("teacher", "2", "5", "3", "6")

    def test_with_a_virtual_local_rank_each_sees_one_device_as_the_first(self) -> None:
        cuda = {"CUDA_VISIBLE_DEVICES": ("4", "5", "6", "7")}
        around = WorkerGroupDeps(4, slots=4, devices=cuda, virtual=True)
        world = dataclasses.replace(
            WORLD, members=(*WORLD.members[:2], dataclasses.replace(WORLD.members[2], places=(0, 2, 3)))
        )
        found = worker_environment({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, SPEC, world, NodeId("c"), 1, PATHS, around)
        names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_WORLD_SIZE", "FLAGS_selected_gpus")
        assert part(found, *names) == ("0", "6", "4", "3", "0")
        ahead = ahead_environment({}, SPEC, NodeId("c"), (0, 2, 3), 3, PATHS, around)
        assert part(ahead, "LOCAL_RANK", "CUDA_VISIBLE_DEVICES") == ("0", "7")

    def test_a_virtual_local_rank_without_known_devices_is_torchruns(self) -> None:
        found = worker_environment({}, SPEC, WORLD, NodeId("a"), 1, PATHS, WorkerGroupDeps(slots=2, virtual=True))
        assert part(found, "LOCAL_RANK", "CUDA_VISIBLE_DEVICES") == ("0", "1")

    @pytest.mark.parametrize(
        ("node", "local_rank", "rank", "group_rank", "local_size"),
        [("a", 0, 0, 0, 2), ("a", 1, 1, 0, 2), ("b", 0, 2, 1, 1), ("c", 0, 3, 2, 3), ("c", 2, 5, 2, 3)],
    )
    def test_ranks_follow_the_nodes_slots(
        self, node: str, local_rank: int, rank: int, group_rank: int, local_size: int
    ) -> None:
        environment = told(node, local_rank)
        assert part(environment, "RANK", "ROLE_RANK", "LOCAL_RANK") == (str(rank), str(rank), str(local_rank))
        assert part(environment, "GROUP_RANK", "LOCAL_WORLD_SIZE") == (str(group_rank), str(local_size))
        assert part(environment, "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE") == ("10.0.0.1", "100", "6")

    def test_the_users_own_choice_about_nccl_errors_stays(self) -> None:
        assert told("a", 0, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


class TestPaddle:
    def test_its_variables(self) -> None:
        environment = told("c", 1)
        ours = {
            name: value for name, value in environment.items() if name.startswith(("PADDLE_", "TRAINING_", "FLAGS"))
        }
        assert ours == {
            "PADDLE_MASTER": "10.0.0.1:100",
            "PADDLE_GLOBAL_SIZE": "6",
            "PADDLE_LOCAL_SIZE": "3",
            "PADDLE_GLOBAL_RANK": "4",
            "PADDLE_LOCAL_RANK": "1",
            "PADDLE_NNODES": "3",
            "PADDLE_CURRENT_ENDPOINT": "10.0.0.3:302",
            "PADDLE_TRAINER_ID": "4",
            "PADDLE_TRAINERS_NUM": "6",
            "PADDLE_RANK_IN_NODE": "1",
            "PADDLE_TRAINER_ENDPOINTS": ENDPOINTS,
            "PADDLE_AUTO_CLUSTER": "0",
            "PADDLE_MASTER_ENDPOINT": "10.0.0.1:100",
            "PADDLE_WORKER_ENDPOINT": "10.0.0.3:302",
            "PADDLE_LOG_DIR": "/logs/2/1",
            "PADDLE_DISTRI_BACKEND": "gloo",
        }

    def test_every_worker_has_its_own_endpoint_apart_from_the_masters(self) -> None:
        places = [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1), ("c", 2)]
        environments = [told(node, local_rank) for node, local_rank in places]
        assert [environment["PADDLE_CURRENT_ENDPOINT"] for environment in environments] == ENDPOINTS.split(",")
        assert environments[0]["PADDLE_MASTER"] not in ENDPOINTS.split(",")

    def test_the_users_own_backend_stays(self) -> None:
        assert told("a", 0, {"PADDLE_DISTRI_BACKEND": "nccl"})["PADDLE_DISTRI_BACKEND"] == "nccl"

    def test_with_accelerators_paddle_picks_the_backend_and_each_worker_has_one(self) -> None:
        assert "PADDLE_DISTRI_BACKEND" not in told("a", 0, gpus=2)
        assert [told("a", local_rank, gpus=2)["FLAGS_selected_gpus"] for local_rank in range(2)] == ["0", "1"]
        assert [told("c", local_rank, gpus=2)["FLAGS_selected_gpus"] for local_rank in range(3)] == ["0", "1", "0"]

    def test_a_node_with_one_worker_gives_it_all_accelerators(self) -> None:
        assert told("b", 0, gpus=2)["FLAGS_selected_gpus"] == "0,1"


class TestEdl:
    def test_its_variables(self) -> None:
        environment = told("b", 0)
        ours = {name: value for name, value in environment.items() if name.startswith("EDL_")}
        assert {name: ours.pop(name) for name in hyper.environment(WORLD.settings, 6, 2)} == {
            "EDL_SETTINGS": "0",
            "EDL_GLOBAL_BATCH": "",
            "EDL_LOCAL_BATCH": "",
            "EDL_MICRO_BATCH": "",
            "EDL_ACCUMULATION": "1",
            "EDL_LOGICAL_RANKS": "",
            "EDL_LR_FACTOR": "1.0",
        }
        assert ours == {"EDL_JOB_ID": "my-job", "EDL_ROUND": "3", "EDL_NODE_ID": "b", "EDL_NODES": "3", "EDL_SLOT": "0"}

    def test_batches_and_lr_are_those_of_the_rank(self) -> None:
        world = dataclasses.replace(WORLD, settings=Settings(7, global_batch=64, local_batch=4, factor=0.5))
        names = ("EDL_SETTINGS", "EDL_GLOBAL_BATCH", "EDL_LOCAL_BATCH", "EDL_ACCUMULATION", "EDL_LR_FACTOR")
        base = {"EDL_LOCAL_BATCH": "4"}  # the launcher's own option
        assert part(told("b", 0, base, world), *names) == ("7", "64", "11", "3", "0.5")
        assert part(told("c", 2, base, world), *names) == ("7", "64", "10", "3", "0.5")


class TestBase:
    def test_the_launchers_own_environment_is_kept_and_not_changed(self) -> None:
        base = {"PATH": "/bin", "EMPTY": "", "RANK": "99", "PADDLE_TRAINER_ID": "99", "EDL_ROUND": "99"}
        before = dict(base)
        environment = told("a", 1, base)
        assert part(environment, "PATH", "EMPTY") == ("/bin", "")
        assert part(environment, "RANK", "PADDLE_TRAINER_ID", "EDL_ROUND") == ("1", "1", "3")
        assert base == before

    def test_several_workers_share_the_cores(self) -> None:
        assert told("a", 0)["OMP_NUM_THREADS"] == "1"
        assert told("a", 0, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"

    def test_functions_are_left_to_the_framework_as_by_torchs_api(self) -> None:
        deps = WorkerGroupDeps(share_cores=False)
        assert "OMP_NUM_THREADS" not in worker_environment({}, SPEC, WORLD, NodeId("a"), 0, PATHS, deps)
        assert "OMP_NUM_THREADS" not in ahead_environment({}, SPEC, NodeId("a"), (0, 1), 0, PATHS, deps)
        assert fork_server_environment({}, 2, share_cores=False) == {}

    def test_one_worker_has_them_all(self) -> None:
        assert "OMP_NUM_THREADS" not in told("b", 0)

    def test_the_framework_is_imported_under_the_same_rule(self) -> None:
        base = {"PATH": "/bin"}
        assert fork_server_environment(base, 2) == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
        assert fork_server_environment(base, 1) == {"PATH": "/bin"}
        assert fork_server_environment({"OMP_NUM_THREADS": "4"}, 2) == {"OMP_NUM_THREADS": "4"}
        assert base == {"PATH": "/bin"}

    def test_everything_is_text(self) -> None:
        assert all(isinstance(value, str) for value in told("c", 2, gpus=1).values())

    def test_a_node_outside_the_world_is_a_mistake(self) -> None:
        with pytest.raises(KeyError, match="stranger"):
            told("stranger", 0)


def test_workers_know_the_size_of_a_replica() -> None:
    def made(spec: JobSpec) -> dict[str, str]:
        return worker_environment({}, spec, WORLD, NodeId("a"), 0, PATHS, WorkerGroupDeps())

    assert "EDL_REPLICA_SIZE" not in made(SPEC)
    assert made(dataclasses.replace(SPEC, replicas=Replicas(2, 2)))["EDL_REPLICA_SIZE"] == "2"
