"""``edl.integrations.fleet`` in one process."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

pytest.importorskip("paddle")

import paddle

from edl.errors import StateError
from edl.integrations import fleet

pytestmark = pytest.mark.paddle


def strategy(**features: Any) -> Any:
    made = fleet.DistributedStrategy()
    for name, value in features.items():
        setattr(made, name, value)
    return made


def test_data_parallelism_is_accepted() -> None:
    fleet.init(is_collective=True)
    fleet.init(is_collective=True, strategy=strategy())
    fleet.init(is_collective=True, strategy=strategy(hybrid_configs={"dp_degree": -1, "mp_degree": 1, "pp_degree": 1}))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"amp": True}, "amp=True"),
        ({"gradient_merge": True, "lamb": True}, "gradient_merge=True, lamb=True"),
        ({"hybrid_configs": {"mp_degree": 2}}, "mp_degree=2"),
        ({"hybrid_configs": {"sharding_degree": 4}}, "sharding_degree=4"),
        ({"hybrid_configs": {"dp_degree": 2}}, r"dp_degree=2, .*use -1"),
    ],
)
def test_other_strategies_are_refused_by_name(given: dict[str, Any], text: str) -> None:
    made = strategy(**given)
    with pytest.raises(StateError, match=text):
        fleet.init(is_collective=True, strategy=made)
    with pytest.raises(StateError, match=text):
        fleet.distributed_optimizer(object(), made)


@pytest.mark.parametrize("given", [{}, {"role_maker": object(), "is_collective": True}])
def test_parameter_servers_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=r"fleet\.init\(is_collective=True\)"):
        fleet.init(**given)


def test_all_that_a_strategy_can_switch_on_is_known() -> None:
    known = {*fleet._FEATURES, *IRRELEVANT}
    switches = {one.name for one in strategy().strategy.DESCRIPTOR.fields if one.type == one.TYPE_BOOL}
    assert switches <= known


IRRELEVANT = {
    "a_sync", "adam_d2sum", "auto_search", "calc_comm_same_stream", "cudnn_batchnorm_spatial_persistent",
    "cudnn_exhaustive_search", "elastic", "find_unused_parameters", "fuse_all_reduce_ops", "fuse_grad_merge",
    "is_fl_ps_mode", "split_data", "sync_nccl_allreduce", "use_hierarchical_allreduce", "with_coordinator",
    "without_graph_optimization",
}  # fmt: skip
"""Of parameter servers, static graphs, or without an effect on results."""


def test_model_and_optimizer_are_those_that_edl_keeps() -> None:
    layer = paddle.nn.Linear(2, 1)
    adam = paddle.optimizer.Adam(parameters=layer.parameters())
    assert fleet.distributed_optimizer(adam) is adam
    assert fleet.distributed_model(layer).state_dict().keys() == layer.state_dict().keys()


def test_a_function_that_is_missing_is_named_with_those_that_are_there() -> None:
    with pytest.raises(AttributeError, match=r"no save_persistables: .*distributed_model"):
        fleet.save_persistables  # noqa: B018


def test_without_paddle_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edl.integrations.fleet")
    monkeypatch.setitem(sys.modules, "paddle", None)
    with pytest.raises(ImportError, match=r"pip install 'edl\[paddle\]'"):
        importlib.import_module("edl.integrations.fleet")
