"""Cluster environments: what their variables come to, who wins, and what is said where they cannot be right.

The sets of variables are those that the real things set: taken down from Slurm 22.05, Open MPI 4.1.4 and MPICH 4.0.2,
and from the sources of kubeflow/trainer (1.9, 2.0) and volcano (1.9), see edl/launch/cluster_env.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.adapters.etcd_plan import parse_endpoints
from edl.config import changed
from edl.errors import EdlError, SettingError
from edl.launch import __main__ as program
from edl.launch import cluster_env
from edl.launch.cluster_env import CLUSTER_ENVS
from edl.launch.cluster_env.findings import LOOPBACK, store_port
from edl.launch.naming import private_name
from edl.launch.resolved_options import OptionSource, ResolvedOptions
from edl.wire.address import address

Env = dict[str, str]

SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-03,7]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_JOB_NODELIST": "n[01-03,7]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
BATCH = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "n[01-02]",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
"""In the shell of sbatch; that of salloc has no NODEID, PROCID and LOCALID."""
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_MCA_ess_base_jobid": "1918042113",
    "OMPI_MCA_orte_hnp_uri": "1918042112.0;tcp://10.0.0.2:51563;tcp6://[fd00::2]:50127",
    "OMPI_MCA_orte_local_daemon_uri": "1918042112.1;tcp://10.0.0.3:40001",
    "PMIX_NAMESPACE": "1918042113",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "PMI_FD": "6"}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "train-worker-0"}
PYTORCHJOB = {
    **POD,
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "1",
    "PYTHONUNBUFFERED": "0",
}
TRAINJOB = {
    **POD,
    "HOSTNAME": "train-node-0-1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}
VOLCANO = {
    **POD,
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "train-worker-0.train,train-worker-1.train",
    "VC_WORKER_NUM": "2",
    "HOSTNAME": "train-worker-1",
}
VOLCANO_PYTORCH = {
    **VOLCANO,
    "VC_MASTER_HOSTS": "train-master-0.train",
    "VC_MASTER_NUM": "1",
    "MASTER_ADDR": "train-master-0.train",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
BARE = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}


def told_by(*arguments: str) -> ResolvedOptions:
    context = program.run.make_context("edl-run", [*arguments, "train.py"])
    return ResolvedOptions.by(context, "train.py")


def applied(env: Mapping[str, str], *arguments: str) -> ResolvedOptions:
    told = told_by(*arguments)
    cluster_env.apply(told, env)
    return told


@pytest.mark.parametrize("spelling", ["--cluster-env=none", "--world=none", "EDL_CLUSTER_ENV", "EDL_WORLD"])
def test_the_option_has_an_older_spelling(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if spelling.startswith("--"):
        assert told_by(spelling).values["cluster_env"] == "none"
        return
    monkeypatch.setenv(spelling, "none")
    context = program.run.make_context("edl-run", ["train.py"], auto_envvar_prefix="EDL")
    told = ResolvedOptions.by(context, "train.py")
    assert (told.values["cluster_env"], told.source("cluster_env")) == ("none", OptionSource.EDL)


def place(told: ResolvedOptions) -> tuple[Any, ...]:
    """What it came to: nodes, this one's rank, the store, the job."""
    return tuple(told.values[name] for name in ("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id"))


NOWHERE = ("1:1", -1, "", "")


def refused(env: Mapping[str, str], *arguments: str) -> str:
    with pytest.raises(SettingError) as caught:
        applied(env, *arguments)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


class TestSlurm:
    def test_a_step(self) -> None:
        told = applied(SLURM)
        port = store_port("slurm-1234-0")
        assert place(told) == ("4", 2, f"n01:{port}", "slurm-1234-0")
        assert {told.source(name) for name in ("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id")} == {
            OptionSource.CLUSTER
        }
        assert told.remarks == [
            f"Slurm: 4 nodes, this is node 2, store at n01:{port} (SLURM_STEP_NODELIST), job slurm-1234-0; "
            "override with --cluster-env=none or --rdzv-endpoint"
        ]

    def test_all_nodes_find_the_same(self) -> None:
        found = [applied({**SLURM, "SLURM_NODEID": str(rank)}) for rank in range(4)]
        assert [one.values["node_rank"] for one in found] == [0, 1, 2, 3]
        assert len({(one.values["rdzv_endpoint"], one.values["rdzv_id"], one.values["nnodes"]) for one in found}) == 1

    @pytest.mark.parametrize(
        "env",
        [
            BATCH,
            {name: BATCH[name] for name in BATCH if name.startswith(("SLURM_J", "SLURM_N"))},
            {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
            | {"SLURM_STEP_NODELIST": "n01", "SLURM_NODEID": "0"},
            {**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFA)},
            {**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFB)},
            {**SLURM, "SLURM_STEP_ID": "batch"},
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PTY_PORT": "40007"},
        ],
        ids=["sbatch", "salloc", "step of one node", "salloc's interactive step", "batch step", "named step", "--pty"],
    )
    def test_a_shell_or_a_step_of_one_node_is_one_node(self, env: Env) -> None:
        told = applied(env)
        assert place(told) == NOWHERE and told.remarks == []

    @pytest.mark.parametrize(
        ("tasks", "each"), [("8", "2(x4)"), ("5", "1(x3),2"), ("5", "2,1(x3)"), ("12", "12"), ("5", "")]
    )
    def test_several_tasks_on_a_node_are_refused(self, tasks: str, each: str) -> None:
        several = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": each}
        assert "--ntasks-per-node=1" in refused({**SLURM, **several})
        assert place(applied({**SLURM, **several}, "--cluster-env=none")) == NOWHERE

    def test_several_tasks_on_the_only_node_are_refused(self) -> None:
        one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n01", "SLURM_NODEID": "0"}
        env = {**SLURM, **one, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
        assert "--ntasks-per-node=1" in refused(env)

    @pytest.mark.parametrize("each", ["1(x4)", "1,1,1,1", "1(x2),1(x2)"])
    def test_one_task_on_each_node_is_not(self, each: str) -> None:
        assert applied({**SLURM, "SLURM_STEP_TASKS_PER_NODE": each}).values["nnodes"] == "4"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("SLURM_STEP_NUM_NODES", "four"),
            ("SLURM_STEP_NUM_NODES", "0"),
            ("SLURM_STEP_NUM_NODES", "9" * 5000),
            ("SLURM_STEP_NUM_NODES", "5"),
            ("SLURM_NODEID", "4"),
            ("SLURM_NODEID", "-1"),
            ("SLURM_NODEID", "²"),
            ("SLURM_STEP_NODELIST", "n[01-03"),
            ("SLURM_STEP_NODELIST", "n[3-1]"),
            ("SLURM_STEP_NODELIST", "n[1-99999999]"),
            ("SLURM_STEP_NODELIST", "[1]" * 3000),
            ("SLURM_STEP_NODELIST", "[" * 100_000),
            ("SLURM_STEP_NODELIST", "a b,c,d,e"),
            ("SLURM_STEP_NODELIST", "n1"),
            ("SLURM_STEP_NUM_TASKS", "?"),
        ],
    )
    def test_what_cannot_be_is_named(self, name: str, value: str) -> None:
        text = refused({**SLURM, name: value})
        assert "SLURM_" in text and "--cluster-env=none" in text

    def test_a_step_without_a_list_needs_a_store(self) -> None:
        env = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
        assert "do not name the first one's host" in refused(env)
        assert applied(env, "--cluster-env=slurm", "--rdzv-endpoint=n9:1").values["nnodes"] == "4"

    def test_gpus_that_nobody_uses_are_mentioned(self) -> None:
        env = {**SLURM, "SLURM_GPUS_ON_NODE": "4"}
        assert any("4 GPUs" in remark for remark in applied(env).remarks)
        assert not any("GPUs" in remark for remark in applied(env, "--nproc-per-node=2").remarks)

    def test_a_requeued_job_keeps_its_name_and_port(self) -> None:
        assert place(applied({**SLURM, "SLURM_RESTART_COUNT": "3"})) == place(applied(SLURM))

    def test_another_step_of_the_job_is_another_job(self) -> None:
        first, second = applied(SLURM), applied({**SLURM, "SLURM_STEP_ID": "1"})
        assert first.values["rdzv_id"] != second.values["rdzv_id"]
        assert first.values["rdzv_endpoint"] != second.values["rdzv_endpoint"]


class TestMpi:
    def test_a_host_that_is_passed_on(self) -> None:
        told = applied({**OPEN_MPI, "MASTER_ADDR": "n1", "MASTER_PORT": "23456"})
        assert place(told) == ("2", 1, "n1:23456", "mpi-1918042113")
        assert "Open MPI: 2 nodes, this is node 1, store at n1:23456 (MASTER_ADDR)" in told.remarks[0]

    def test_the_first_host_of_a_batch_job(self) -> None:
        env = {**OPEN_MPI, **BATCH}
        port = store_port("mpi-1234-1918042113")
        assert place(applied(env)) == ("2", 1, f"n01:{port}", "mpi-1234-1918042113")

    def test_helpers_that_mpirun_starts_by_slurm_do_not_count(self) -> None:
        """mpirun has srun start its daemons, on all hosts but its own: these say nothing about launchers."""
        step = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n02", "SLURM_STEP_NUM_TASKS": "1"}
        told = applied({**OPEN_MPI, **step, "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"})
        assert told.values["nnodes"] == "2" and len(told.remarks) == 1
        assert told.values["rdzv_endpoint"].startswith("n01:")

    def test_an_address_of_six(self) -> None:
        told = applied({**OPEN_MPI, "MASTER_ADDR": "fd00::2", "MASTER_PORT": "23456"})
        assert told.values["rdzv_endpoint"] == address("fd00::2", 23456) == "[fd00::2]:23456"
        assert parse_endpoints(told.values["rdzv_endpoint"]) == ("[fd00::2]:23456",)

    def test_where_mpirun_runs(self) -> None:
        told = applied(OPEN_MPI)
        port = store_port("mpi-1918042113")
        assert place(told) == ("2", 1, f"10.0.0.2:{port}", "mpi-1918042113")
        first = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}
        first["OMPI_MCA_orte_local_daemon_uri"] = first["OMPI_MCA_orte_hnp_uri"]
        assert applied(first).values["rdzv_endpoint"] == f"10.0.0.2:{port}"

    def test_mpirun_that_runs_elsewhere_is_no_place(self) -> None:
        text = refused({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"})
        assert "-x MASTER_ADDR=HOST" in text and "--cluster-env=none" in text

    def test_several_networks_leave_it_open(self) -> None:
        env = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.2,172.17.0.1:51563"}
        assert "MASTER_ADDR" in refused(env)

    def test_hydra(self) -> None:
        told = applied({**HYDRA, "MASTER_ADDR": "n1"})
        assert place(told) == ("2", 0, f"n1:{store_port('mpi-n1-2')}", "mpi-n1-2")
        assert "-genv MASTER_ADDR HOST" in refused(HYDRA)

    def test_pmi_of_srun_is_slurms(self) -> None:
        told = applied({**SLURM, "PMI_SIZE": "4", "PMI_RANK": "2"})
        assert told.values["rdzv_id"] == "slurm-1234-0"

    @pytest.mark.parametrize(
        "env",
        [
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            {**HYDRA, "MPI_LOCALNRANKS": "2"},
            {**HYDRA, "MPI_LOCALRANKID": "1"},  # there are releases that always say LOCALNRANKS=1
        ],
    )
    def test_several_launchers_on_a_host_are_refused(self, env: Env) -> None:
        text = refused({**env, "MASTER_ADDR": "n1"})
        assert "one starts all workers of its node" in text and ("ppr:1:node" in text or "-ppn 1" in text)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("OMPI_COMM_WORLD_SIZE", "zwei"),
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("MASTER_ADDR", "n1 n2"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "70000"),
        ],
    )
    def test_what_cannot_be_is_named(self, name: str, value: str) -> None:
        said = refused({**OPEN_MPI, "MASTER_ADDR": "n1", name: value})
        assert name in said and "or ignore the cluster environment: --cluster-env=none" in said
        assert ("Give the first host's address" in said) == (value in LOOPBACK)

    def test_one_launcher_is_one_node(self) -> None:
        one = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
        assert place(applied({**OPEN_MPI, **one})) == NOWHERE


class TestKubeflow:
    def test_a_pytorchjob(self) -> None:
        told = applied(PYTORCHJOB)
        assert place(told) == ("3", 1, "train-master-0:23456", "train")
        assert "Kubeflow: 3 nodes, this is node 1, store at train-master-0:23456 (MASTER_ADDR)" in told.remarks[0]

    def test_newer_operators_count_workers_in_world_size(self) -> None:
        newer = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "WORLD_SIZE": "12"}
        told = told_by()
        told.offer("nnodes", "3", OptionSource.PET, "PET_NNODES")
        told.offer("node_rank", 1, OptionSource.PET, "PET_NODE_RANK")
        cluster_env.apply(told, {**PYTORCHJOB, **newer})
        assert place(told) == ("3", 1, "train-master-0:23456", "train")
        assert told.source("nnodes") is OptionSource.PET
        assert applied({**PYTORCHJOB, **newer}).values["nnodes"] == "3"

    def test_early_operators_call_the_first_pod_localhost(self) -> None:
        env = {**PYTORCHJOB, "MASTER_ADDR": "localhost", "RANK": "0", "HOSTNAME": "train-master-0"}
        assert place(applied(env)) == ("3", 0, "train-master-0:23456", "train")

    def test_a_trainjob(self) -> None:
        told = applied(TRAINJOB)
        assert place(told) == ("2", 1, "train-node-0-0.train:29500", "train")

    def test_the_elastic_policy_needs_nothing(self) -> None:
        """PET_RDZV_ENDPOINT says it all."""
        told = told_by()
        told.offer("rdzv_endpoint", "train-worker-0:23456", OptionSource.PET, "PET_RDZV_ENDPOINT")
        told.offer("nnodes", "1:3", OptionSource.PET, "PET_NNODES")
        cluster_env.apply(told, {**PYTORCHJOB, "PET_NNODES": "1:3"})
        assert place(told) == ("1:3", -1, "train-worker-0:23456", "") and told.remarks == []

    def test_a_job_of_one_pod_that_may_grow_has_a_store_that_others_reach(self) -> None:
        env = {**PYTORCHJOB, "WORLD_SIZE": "1", "RANK": "0"}
        assert place(applied(env)) == NOWHERE
        assert applied(env, "--nnodes=1:4").values["rdzv_endpoint"] == "train-master-0:23456"

    @pytest.mark.parametrize(
        "env",
        [
            BARE,
            {**BARE, **POD},
            {**PYTORCHJOB, "MASTER_ADDR": "localhost"},
            {**PYTORCHJOB, "MASTER_ADDR": "10.0.0.7"},
            {name: value for name, value in PYTORCHJOB.items() if name != "KUBERNETES_SERVICE_HOST"},
            {name: value for name, value in PYTORCHJOB.items() if name != "WORLD_SIZE"},
        ],
        ids=["exported", "exported in a pod", "localhost", "an address", "outside of a pod", "no size"],
    )
    def test_variables_that_anybody_may_have_exported_do_not_count(self, env: Env) -> None:
        told = applied(env)
        assert place(told) == NOWHERE and told.remarks == []

    def test_they_count_on_request(self) -> None:
        assert place(applied(BARE, "--cluster-env=env")) == ("2", 1, "n1:29500", "n1-29500")
        with_pet = {**BARE, "PET_NNODES": "7", "PET_MASTER_ADDR": "elsewhere"}
        assert place(applied(with_pet, "--cluster-env=env")) == ("2", 1, "n1:29500", "n1-29500")

    @pytest.mark.parametrize(
        ("name", "value"),
        [("WORLD_SIZE", "-3"), ("WORLD_SIZE", ""), ("RANK", "3"), ("MASTER_PORT", "x"), ("RANK", "one")],
    )
    def test_what_cannot_be_is_named(self, name: str, value: str) -> None:
        env = {**PYTORCHJOB, name: value}
        if value:
            assert f"{name}={value}" in refused(env)
        else:
            assert place(applied(env)) == NOWHERE


class TestVolcano:
    def test_the_plugin_svc(self) -> None:
        told = applied(VOLCANO)
        assert place(told) == ("2", 1, f"train-worker-0.train:{store_port('train')}", "train")

    def test_the_plugin_pytorch(self) -> None:
        assert place(applied(VOLCANO_PYTORCH)) == ("3", 2, "train-master-0.train:23456", "train")

    def test_a_master_and_workers_without_that_plugin(self) -> None:
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
        env = {name: value for name, value in VOLCANO_PYTORCH.items() if name not in names}
        assert place(applied(env)) == ("3", 2, f"train-master-0.train:{store_port('train')}", "train")

    def test_pods_are_known_by_name_or_by_number(self) -> None:
        assert applied({**VOLCANO, "HOSTNAME": "host7"}).values["node_rank"] == 1
        nobody = {name: value for name, value in VOLCANO.items() if not name.endswith("TASK_INDEX")}
        assert applied({**nobody, "HOSTNAME": "host7"}).values["node_rank"] == -1
        assert applied(nobody).values["node_rank"] == 1

    def test_tasks_of_which_nobody_knows_what_they_do(self) -> None:
        told = applied({**VOLCANO, "VC_PS_HOSTS": "train-ps-0.train", "VC_PS_NUM": "1"})
        assert place(told) == NOWHERE
        assert "which of the tasks ps, worker train" in told.remarks[0] and "--rdzv-endpoint" in told.remarks[0]

    def test_the_plugin_env_alone_names_nobody(self) -> None:
        assert place(applied({"VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1"})) == NOWHERE

    def test_a_pod_that_came_later_finds_the_same_store(self) -> None:
        later = ",".join(f"train-worker-{index}.train" for index in range(5))
        env = {**VOLCANO, "VC_WORKER_HOSTS": later, "VC_TASK_INDEX": "4", "HOSTNAME": "train-worker-4"}
        first, last = applied(VOLCANO, "--nnodes=1:8"), applied(env, "--nnodes=1:8")
        assert first.values["rdzv_endpoint"] == last.values["rdzv_endpoint"]
        assert first.values["rdzv_id"] == last.values["rdzv_id"] and last.values["node_rank"] == 4

    def test_what_cannot_be_is_named(self) -> None:
        assert "VC_WORKER_HOSTS" in refused({**VOLCANO, "VC_WORKER_HOSTS": "a b,c"})
        assert "VC_TASK_INDEX" in refused({**VOLCANO, "HOSTNAME": "other", "VC_TASK_INDEX": "x"})


ALL = {"slurm": SLURM, "mpi": {**OPEN_MPI, "MASTER_ADDR": "n1"}, "kubeflow": PYTORCHJOB, "volcano": VOLCANO}


class TestWhoWins:
    @pytest.mark.parametrize("env", ALL.values(), ids=ALL)
    @pytest.mark.parametrize(
        "arguments",
        [
            ("--standalone",),
            ("--rdzv-endpoint=h:1",),
            ("--rdzv-endpoint=localhost:0",),
            ("--nnodes=1",),
            ("--cluster-env=none",),
            ("--rdzv-backend=etcd",),
            ("--role=reader",),
        ],
        ids=" ".join,
    )
    def test_who_says_where_the_store_is_or_wants_one_node_is_left_alone(
        self, env: Env, arguments: tuple[str, ...]
    ) -> None:
        told = applied(env, *arguments)
        assert place(told) == place(told_by(*arguments)) and told.remarks == []

    @pytest.mark.parametrize("env", ALL.values(), ids=ALL)
    def test_what_is_given_by_hand_holds_and_the_rest_is_found(self, env: Env) -> None:
        told = applied(env, "--nnodes=1:9", "--node-rank=7", "--rdzv-id=mine")
        nnodes, rank, store, job = place(told)
        assert (nnodes, rank, job) == ("1:9", 7, "mine") and store

    @pytest.mark.parametrize("env", ALL.values(), ids=ALL)
    def test_edl_variables_are_given_by_hand_too(self, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EDL_NNODES", "1:9")
        monkeypatch.setenv("EDL_RDZV_ID", "mine")
        assert place(applied(env))[::3] == ("1:9", "mine")
        monkeypatch.setenv("EDL_CLUSTER_ENV", "none")
        assert applied(env).remarks == []

    @pytest.mark.parametrize(("name", "env"), ALL.items(), ids=ALL)
    def test_one_asked_for_fills_what_is_missing(self, name: str, env: Env) -> None:
        """With an etcd of one's own, sizes and places can still be the cluster's."""
        told = applied(env, f"--cluster-env={name}", "--rdzv-endpoint=etcd://e:2379")
        found = CLUSTER_ENVS[name].find(env)
        assert found is not None
        assert place(told)[:3] == (str(found.nnodes), found.node_rank, "etcd://e:2379")

    @pytest.mark.parametrize("name", CLUSTER_ENVS)
    def test_one_asked_for_that_is_not_there(self, name: str) -> None:
        assert "its variables are not set" in refused({}, f"--cluster-env={name}")
        assert "--standalone" in refused({**SLURM, **BARE}, f"--cluster-env={name}", "--standalone")

    def test_a_rank_beyond_the_size_is_not_taken(self) -> None:
        assert applied(SLURM, "--nnodes=1:2").values["node_rank"] == -1

    def test_more_nodes_than_there_are_launchers(self) -> None:
        assert "Slurm has only 4 launchers" in refused(SLURM, "--nnodes=5")
        assert applied(VOLCANO, "--nnodes=5").values["nnodes"] == "5", "pods may come later"

    def test_runs_from_the_same_checkpoints_have_one_name(self, tmp_path: Path) -> None:
        told = applied(SLURM, f"--checkpoint-dir={tmp_path}")
        assert told.values["rdzv_id"] == private_name(str(tmp_path))
        assert told.values["rdzv_endpoint"] == applied(SLURM).values["rdzv_endpoint"]

    def test_trainers_of_parameter_servers_are_counted_otherwise(self) -> None:
        told = applied(SLURM, "--trainers=1:4")
        assert told.values["nnodes"] == "1:1" and told.values["rdzv_endpoint"]

    def test_the_nearer_one_counts(self) -> None:
        told = applied({**SLURM, **VOLCANO})
        assert told.values["nnodes"] == "4" and told.values["rdzv_id"] == "slurm-1234-0"
        (other,) = [remark for remark in told.remarks if "--cluster-env=volcano" in remark]
        assert "Slurm has 4 launchers, Volcano has 2" in other

    def test_a_broken_one_farther_away_does_not_matter(self) -> None:
        assert applied({**SLURM, **VOLCANO_PYTORCH, "WORLD_SIZE": "?"}).values["nnodes"] == "4"

    @pytest.mark.parametrize("ours", ["EDL_ROUND", "EDL_AGENT"])
    def test_inside_of_a_worker_nothing_is_read(self, ours: str) -> None:
        told = told_by()
        program.settle(told, {**SLURM, ours: "3"})
        assert place(told) == NOWHERE
        assert changed({ours: "3", "EDL_WORKER_PID": "7", "RANK": "1", "HOME": "/"}, told.for_workers) == {"HOME": "/"}

    @pytest.mark.parametrize("given", ["--master=h:1", "--master-addr=h"])
    def test_who_names_a_store_as_other_launchers_do_has_their_size(self, given: str) -> None:
        """One node, unless --nnodes says more; else two lines would contradict each other."""
        told = told_by(given)
        program.settle(told, SLURM)
        assert place(told) == NOWHERE and len(told.remarks) == 1
        told = told_by(given, "--nnodes=4")
        program.settle(told, SLURM)
        assert told.values["rdzv_endpoint"].startswith("h:")

    def test_outside_everything_is_wired(self) -> None:
        told = told_by()
        program.settle(told, SLURM)
        assert told.values["nnodes"] == "4"


texts = st.sampled_from(
    ["", ",", "0", "1", "2", "-1", "x", "1:2", "99999999999999999999", "n[1-2]", "n[", "localhost", "\x00"]
)
names = st.sampled_from(sorted({*SLURM, *OPEN_MPI, *HYDRA, *PYTORCHJOB, *TRAINJOB, *VOLCANO_PYTORCH}))


@given(st.sampled_from([*ALL.values(), TRAINJOB, HYDRA, {}]), st.dictionaries(names, texts, max_size=6))
@settings(max_examples=200)
def test_nothing_in_the_environment_is_more_than_one_line(env: Env, changed: Env) -> None:
    try:
        told = applied({**env, **changed})
    except EdlError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return
    nodes = told.values["nnodes"]
    assert (nodes == "1:1") == (told.values["rdzv_endpoint"] == "")
    assert all("\n" not in remark for remark in told.remarks)
