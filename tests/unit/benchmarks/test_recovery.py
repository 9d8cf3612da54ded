"""The program that measures recoveries: which events it causes, and with which scripts."""

from __future__ import annotations

import pytest

from benchmarks.common.contenders import LAUNCHERS
from benchmarks.common.job import SCRIPTS
from benchmarks.recovery import EVENTS, PEERS, default_events


@pytest.mark.parametrize("framework", PEERS)
def test_each_framework_has_its_events_and_a_script_for_each_launcher(framework: str) -> None:
    assert set(default_events(framework)) <= set(EVENTS)
    for name in PEERS[framework].split(","):
        assert (SCRIPTS / LAUNCHERS[name]("python", "python").script(framework)).is_file(), name


def test_trainers_of_libraries_lose_a_worker_only() -> None:
    """Where the others may continue without it, where they may not, and within a node."""
    assert default_events("torchtitan") == ["worker", "worker-of-2", "worker-one-node"]
    assert not {"worker-of-2", "worker-one-node"} & set(default_events("torch"))
    assert EVENTS["worker-one-node"].workers == 2
