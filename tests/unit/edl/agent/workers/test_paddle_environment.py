"""Further variables of Paddle's workers: devices, backends, and lists too long for an environment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from edl.agent.workers.log_paths import Attempt, WorkerFiles
from edl.agent.workers.outputs import Outputs
from edl.agent.workers.paddle_environment import GPU, KINDS, backend, place, selected, shortened, too_long, trainer
from edl.config import LogLayout, LogPlan
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Member, World

XPU, NPU = KINDS[1:]
NODE = NodeId("a")
MEMBER = Member(NODE, Incarnation(1), "10.0.0.1", 2, Rank(0), (100, 101, 102))
WORLD = World(Round(1), (MEMBER,), 0)
ENDPOINTS = ("10.0.0.1:101", "10.0.0.1:102")


def told(base: dict[str, str] | None = None) -> dict[str, str]:
    return place(base or {}, WORLD, NODE, MEMBER, ENDPOINTS, 1, {})


def test_rpc_has_its_store_and_its_endpoint() -> None:
    environment = told()
    assert environment["PADDLE_MASTER_ENDPOINT"] == environment["PADDLE_MASTER"] == "10.0.0.1:100"
    assert environment["PADDLE_WORKER_ENDPOINT"] == environment["PADDLE_CURRENT_ENDPOINT"] == "10.0.0.1:102"


def test_the_pods_own_name_and_the_choice_of_a_cluster_stay() -> None:
    assert (told()["POD_NAME"], told()["PADDLE_AUTO_CLUSTER"]) == ("a", "0")
    environment = told({"POD_NAME": "train-0", "PADDLE_AUTO_CLUSTER": "1"})
    assert (environment["POD_NAME"], environment["PADDLE_AUTO_CLUSTER"]) == ("train-0", "1")


@pytest.mark.parametrize(
    ("kind", "devices", "workers", "chosen"),
    [
        (GPU, 4, 4, {"FLAGS_selected_gpus": "2"}),
        (GPU, 2, 4, {"FLAGS_selected_gpus": "0"}),
        (XPU, 4, 4, {"FLAGS_selected_xpus": "2"}),
        (NPU, 4, 4, {"FLAGS_selected_npus": "2"}),
        (NPU, 0, 4, {}),
    ],
)
def test_each_kind_of_device_has_its_flag(kind: object, devices: int, workers: int, chosen: dict[str, str]) -> None:
    assert selected(kind, devices, 2, workers) == chosen  # type: ignore[arg-type]
    assert list(selected(GPU, 3, 0, 1).values()) == ["0,1,2"]


def test_backends() -> None:
    assert backend({}, GPU, 0) == {"PADDLE_DISTRI_BACKEND": "gloo"}
    assert backend({"PADDLE_DISTRI_BACKEND": "mine"}, GPU, 0) == {"PADDLE_DISTRI_BACKEND": "mine"}
    assert backend({}, GPU, 2) == backend({}, XPU, 2) == {}
    assert backend({}, NPU, 2) == {"PADDLE_DISTRI_BACKEND": "xccl", "PADDLE_XCCL_BACKEND": "npu"}


def test_a_trainer_has_no_gloo_that_nobody_would_serve() -> None:
    assert trainer("[fd00::1]:7") == {
        **{
            "PADDLE_ROLE": "TRAINER",
            "TRAINING_ROLE": "TRAINER",
            "POD_IP": "fd00::1",
            "PADDLE_PORT": "7",
            "PADDLE_WITH_GLOO": "0",
        }
    }


LONG = {"PADDLE_TRAINER_ENDPOINTS": "h" * 48000, "PADDLE_TRAINER_ID": "3"}


class TestLongLists:
    def test_are_left_out_from_paddles_limit_on(self) -> None:
        assert too_long(LONG) == ("PADDLE_TRAINER_ENDPOINTS",)
        assert too_long({"PADDLE_TRAINER_ENDPOINTS": "h" * 47999}) == ()
        assert too_long({"PADDLE_TRAINER_ENDPOINTS": "h" * 10, "PADDLE_ENV_LIMIT_LEN": "10"}) != ()
        assert too_long({"PADDLE_TRAINER_ENDPOINTS": "h" * 10, "PADDLE_ENV_LIMIT_LEN": "many"}) == ()
        assert shortened(LONG, "/f") == {"PADDLE_TRAINER_ID": "3", "PADDLE_BACKUP_ENV_PATH": "/f"}
        short = {"PADDLE_TRAINER_ENDPOINTS": "h:1"}
        assert shortened(short, "/f") == {**short, "PADDLE_BACKUP_ENV_PATH": "/f"}

    def backed_up(self, outputs: Outputs, rank: int, told: dict[str, str]) -> tuple[WorkerFiles, dict[str, str]]:
        async def whole() -> tuple[WorkerFiles, dict[str, str]]:
            files = outputs.files(Attempt(Round(1), 0, rank))
            return files, await outputs.backed_up(files, told)

        return asyncio.run(whole())

    def outputs(self, folder: Path, layout: LogLayout, said: list[str]) -> Outputs:
        links = str(folder) if layout is LogLayout.PADDLE else ""
        return Outputs(LogPlan(str(folder / "job_a"), layout=layout, links=links), "a", {"SECRET": "s"}, said.append)

    def test_are_in_a_file_where_paddle_looks(self, tmp_path: Path) -> None:
        said: list[str] = []
        outputs = self.outputs(tmp_path, LogLayout.TORCHRUN, said)
        short = {"PADDLE_TRAINER_ENDPOINTS": "h:1", "SECRET": "s"}
        files, environment = self.backed_up(outputs, 3, short)
        assert environment is short
        assert not Path(files.backup_environment).exists()
        files, environment = self.backed_up(outputs, 3, {**LONG, "SECRET": "s"})
        assert environment == {**shortened(LONG, files.backup_environment), "SECRET": "s"}
        assert json.loads(Path(files.backup_environment).read_text()) == LONG
        backup_env = pytest.importorskip("paddle.distributed.backup_env")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backup_env, "g_backup_envs", None)
            patch.setenv("PADDLE_BACKUP_ENV_PATH", environment["PADDLE_BACKUP_ENV_PATH"])
            patch.delenv("PADDLE_TRAINER_ENDPOINTS", raising=False)
            assert backup_env.getenv_or_backup("PADDLE_TRAINER_ENDPOINTS") == LONG["PADDLE_TRAINER_ENDPOINTS"]
        assert said == []

    def test_everybody_has_the_file_in_paddles_layout(self, tmp_path: Path) -> None:
        outputs = self.outputs(tmp_path, LogLayout.PADDLE, [])
        _, environment = self.backed_up(outputs, 3, {"PADDLE_TRAINER_ENDPOINTS": "h:1"})
        assert environment["PADDLE_TRAINER_ENDPOINTS"] == "h:1"
        assert json.loads(Path(environment["PADDLE_BACKUP_ENV_PATH"]).read_text()) == {
            "PADDLE_TRAINER_ENDPOINTS": "h:1"
        }

    def test_without_a_folder_workers_are_told_all_at_once(self, tmp_path: Path) -> None:
        said: list[str] = []
        nowhere = Outputs(LogPlan(""), "a", {}, said.append)
        assert self.backed_up(nowhere, 0, LONG)[1] is LONG
        outputs = self.outputs(tmp_path, LogLayout.TORCHRUN, said)
        files, _ = self.backed_up(outputs, 0, {})
        again = Path(files.folder).with_name("0.2") / Path(files.backup_environment).name
        again.mkdir(parents=True)
        assert self.backed_up(outputs, 0, LONG)[1] is LONG
        assert "cannot write" in said[0]
