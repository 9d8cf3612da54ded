"""Which devices are in which slot, and how a launcher finds out."""

from __future__ import annotations

from typing import Any

import pytest

from edl.agent.workers.devices import devices_of_slot, listed, visible
from edl.agent.workers.environment import LocalPaths, WorkerGroupDeps, ahead_environment, worker_environment
from edl.config import JobSpec, NodeRange, SlotRules
from edl.errors import SettingError
from edl.launch import accelerators, slot_options
from edl.launch.options import record
from edl.launch.options.agreement import differences
from edl.types import JobId, NodeId
from tests.unit.edl.agent.machine.test_used_slots import world_of
from tests.unit.edl.master.test_dropping import ALL

CUDA, FOUR = "CUDA_VISIBLE_DEVICES", ("4", "5", "6", "7")


class TestDevices:
    def test_each_slot_has_its_share(self) -> None:
        assert [devices_of_slot(FOUR, 4, slot) for slot in range(4)] == [("4",), ("5",), ("6",), ("7",)]
        assert [devices_of_slot(FOUR, 2, slot) for slot in range(2)] == [("4", "5"), ("6", "7")]
        assert devices_of_slot(FOUR, 3, 0) == devices_of_slot(FOUR, 8, 0) == ()

    def test_only_those_of_used_slots_are_seen(self) -> None:
        assert visible({CUDA: FOUR}, 4, (0, 2, 3)) == {CUDA: "4,6,7"}
        assert visible({CUDA: FOUR, "HIP_VISIBLE_DEVICES": ("0", "1")}, 2, (1,)) == {
            CUDA: "6,7",
            "HIP_VISIBLE_DEVICES": "1",
        }
        assert visible({CUDA: FOUR}, 4, ALL) == visible({}, 4, (0,)) == visible({CUDA: ("0",)}, 4, (0, 1)) == {}

    def test_lists(self) -> None:
        assert listed(" 0, GPU-ab ,") == ("0", "GPU-ab")
        assert listed("1,-1,2") == ("1",), "what follows is not visible"

    def test_workers_see_them(self) -> None:
        around = WorkerGroupDeps(gpus=4, slots=4, devices={CUDA: FOUR})
        spec, paths = JobSpec(JobId("j"), NodeRange(1, 1)), LocalPaths("", "")
        told = worker_environment({CUDA: "4,5,6,7"}, spec, world_of(2, 0, 2, 3), NodeId("a"), 1, paths, around)
        assert {name: told[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "EDL_SLOT", CUDA)} == {
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "3",
            "EDL_SLOT": "2",
            CUDA: "4,6,7",
        }
        assert told["FLAGS_selected_gpus"] == "1", "counted among the visible ones"
        lone = worker_environment({}, spec, world_of(2, 3), NodeId("a"), 0, paths, around)
        assert (lone[CUDA], lone["FLAGS_selected_gpus"]) == ("7", "0"), "never the dropped ones"
        ahead = ahead_environment({}, spec, NodeId("a"), (0, 2, 3), 3, paths, around)
        assert (ahead["LOCAL_RANK"], ahead["EDL_SLOT"], ahead[CUDA]) == ("2", "3", "4,6,7")
        whole = worker_environment({CUDA: "4,5,6,7"}, spec, world_of(1, *ALL), NodeId("a"), 2, paths, around)
        assert whole[CUDA] == "4,5,6,7"


class TestOptions:
    def read(self, monkeypatch: pytest.MonkeyPatch, devices: int, nproc: str, spare: int) -> slot_options.NodeSlots:
        monkeypatch.setattr(slot_options, "count_accelerators", lambda: devices)
        options = {"nproc_per_node": nproc, "spare_slots": spare}
        return slot_options.with_spares(options, slot_options.slots_from(nproc))

    def test_spare_slots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.read(monkeypatch, 0, "3", 2) == slot_options.NodeSlots(3, 2)
        assert self.read(monkeypatch, 8, "6", 2) == slot_options.NodeSlots(6, 2)
        assert self.read(monkeypatch, 8, "gpu", 1) == slot_options.NodeSlots(7, 1)
        assert "workers share them" in self.read(monkeypatch, 2, "3", 0).remark

    @pytest.mark.parametrize(
        ("devices", "nproc", "spare", "words"),
        [
            (4, "4", 1, "4 workers and 1 spare slots need 5 accelerators, but this node has 4"),
            (2, "gpu", 2, "leaves no worker"),
            (0, "1", -1, "must be from 0"),
            (0, "gpu", 0, "no GPU found"),
            (0, "9999", 0, "from 1 to 4096"),
        ],
    )
    def test_refusals(self, devices: int, nproc: str, spare: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(SettingError, match=words):
            self.read(monkeypatch, devices, nproc, spare)

    def test_rules(self) -> None:
        assert record(SlotRules, {"slot_strikes": 3, "slot_cooldown": 60.0}) == SlotRules(3, 60.0)
        for bad in ({"strikes": -1}, {"cooldown_s": -1.0}):
            with pytest.raises(SettingError, match="must be 0 or more"):
                SlotRules(**bad)
        one, other = (JobSpec(JobId("j"), NodeRange(1, 1), slots=SlotRules(number)) for number in (2, 3))
        assert differences(one, other) == ["--slot-strikes=2 (the running job has 3)"]


class _Nvml:
    """Four GPUs, as pynvml has them."""

    class NVMLError(Exception):
        """Fake error of NVML."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(index: int = 0) -> Any:
            self.calls.append(name)
            if name == self.broken:
                raise self.NVMLError
            return {"nvmlDeviceGetCount": 4, "nvmlDeviceGetUUID": f"GPU-{index}"}.get(name, index)

        return call


class TestIdentities:
    @pytest.mark.parametrize(
        ("listed", "slots", "found"),
        [
            (("0", "1"), 2, ("GPU-0", "GPU-1")),
            (("3", "1"), 1, ("GPU-3,GPU-1",)),
            (("GPU-x", "MIG-y"), 2, ("GPU-x", "MIG-y")),
            (("0", "9"), 2, ("GPU-0", "")),
            (("0", "1", "2"), 2, ()),
            ((), 2, ()),
        ],
    )
    def test_by_uuid(
        self, listed: tuple[str, ...], slots: int, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(accelerators, "gpu_uuids", lambda: ("GPU-0", "GPU-1", "GPU-2", "GPU-3"))
        assert accelerators.slot_identities({CUDA: listed} if listed else {}, slots) == found

    def test_nvml_tells_or_says_nothing(self) -> None:
        nvml = _Nvml()
        assert accelerators._by_nvml(nvml) == ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
        assert nvml.calls[-1] == "nvmlShutdown"
        for broken in ("nvmlInit", "nvmlDeviceGetUUID"):
            assert accelerators._by_nvml(_Nvml(broken)) == ()

    def test_the_drivers_files_tell_as_well(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = ("Model: \t X\nGPU UUID: \t GPU-1a2b\nBus: 1\n", "GPU UUID: \t GPU-????????\n", None)
        for number, text in enumerate(texts):
            folder = tmp_path / f"0000:0{number}:00.0"
            folder.mkdir()
            if text is not None:
                (folder / "information").write_text(text)
        monkeypatch.setattr(accelerators, "_GPU_FOLDERS", tmp_path)
        assert accelerators._by_driver() == ("GPU-1a2b", "", "")
        assert accelerators.COUNTED[CUDA]() == 3
