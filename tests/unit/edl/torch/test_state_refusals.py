"""A state that cannot be restored on every worker from one of them is refused before the first step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edl.errors import StateError
from edl.worker import alike
from tests.support.fake_agent import FakeFramework


class Others(FakeFramework):
    def __init__(self, *others: dict[str, str]) -> None:
        super().__init__()
        self.others = [json.dumps(one).encode() for one in others]

    def exchange(self, data: bytes) -> list[bytes]:
        return [data, *self.others]


def test_workers_with_the_same_models_go_on() -> None:
    alike.check(Others({"model": "a"}, {"model": "a"}), {"model": "a"})


@pytest.mark.parametrize("other", [{"model": "b"}, {}, {"model": "a", "more": "c"}])
def test_workers_with_other_models_are_told_which(other: dict[str, str]) -> None:
    with pytest.raises(StateError, match=r"state\.(model|more) has other parameters on rank 2 than .*pipeline"):
        alike.check(Others({"model": "a"}, other), {"model": "a"})


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what is imported here
class TestTorch:
    def test_zero_optimizers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = pytest.importorskip("torch")
        from torch.distributed.optim import ZeroRedundancyOptimizer

        from edl.torch.refusals import REFUSED
        from edl.torch.state import State

        optimizer = object.__new__(ZeroRedundancyOptimizer)
        optimizer.param_groups = []
        with pytest.raises(StateError, match=r"state\.optimizer: a ZeroRedundancyOptimizer .*State\(sharded=True\)"):
            State(optimizer=optimizer)

        class ZeROOptimizer(torch.optim.SGD):  # type: ignore[misc,name-defined]
            """Stands for the one of DeepSpeed, which is not installed."""

            __module__ = "deepspeed.runtime.base_optimizer"

        class Stage3(ZeROOptimizer):
            pass

        assert ("deepspeed", "ZeROOptimizer") in REFUSED
        with pytest.raises(StateError, match=r"a Stage3 spreads its state .*checkpoints of its own"):
            State(optimizer=Stage3([torch.zeros(1)], lr=0.1))

    def test_fsdp_of_the_first_kind_also_inside(self) -> None:
        torch = pytest.importorskip("torch")
        from torch.distributed.fsdp import FullyShardedDataParallel

        from edl.torch.state import State

        inner = object.__new__(FullyShardedDataParallel)
        torch.nn.Module.__init__(inner)
        for sharded in (False, True):
            with pytest.raises(StateError, match=r"state\.model: a FullyShardedDataParallel .*fully_shard"):
                State(model=torch.nn.ModuleDict({"part": inner}), sharded=sharded)

    def test_every_name_of_torchs_own_exists(self) -> None:
        pytest.importorskip("torch")
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.distributed.pipelining.stage import _PipelineStageBase

        from edl.torch.refusals import REFUSED

        known = {kind.__name__ for kind in (FullyShardedDataParallel, ZeroRedundancyOptimizer, _PipelineStageBase)}
        assert {name for package, name in REFUSED if package == "torch"} == known

    def test_stages_of_a_pipeline_differ(self) -> None:
        torch = pytest.importorskip("torch")
        from edl.torch.state import State

        stages: list[Any] = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 3), torch.nn.Linear(2, 2, dtype=torch.float64)]
        texts = {State(model=stage)._structure(stage) for stage in stages}
        assert len(texts) == 3
        assert State(model=stages[0])._structure(torch.nn.LazyLinear(2))


@pytest.mark.paddle
class TestPaddle:
    @pytest.mark.filterwarnings("ignore")
    def test_optimizers_around_others(self) -> None:
        paddle = pytest.importorskip("paddle")
        from edl.paddle.state import State

        net = paddle.nn.Linear(2, 2)
        inner = paddle.optimizer.SGD(parameters=net.parameters())
        with pytest.raises(StateError, match=r"state\.optimizer: a LookAhead cannot be kept"):
            State(model=net, optimizer=paddle.incubate.LookAhead(inner))
        assert "weight [2, 2]" in State(model=net)._structure(net)
