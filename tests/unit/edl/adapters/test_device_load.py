"""Whether devices compute, from what ``nvidia-smi`` says; here a fake of it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from edl.adapters import device_load
from edl.adapters.device_load import devices_busy, run


@pytest.mark.parametrize(
    ("said", "busy"), [("0\n0\n", False), ("0\n37\n", True), ("100\n", True), ("[N/A]\n", False), ("", False)]
)
def test_one_busy_device_is_enough(said: str, busy: bool) -> None:
    assert devices_busy((), lambda command: said) is busy


def test_only_the_nodes_own_devices_are_asked_about() -> None:
    asked: list[Sequence[str]] = []

    def ask(command: Sequence[str]) -> str:
        asked.append(command)
        return "0"

    devices_busy(("GPU-1", "0000:01:00.0", "GPU-2"), ask)
    devices_busy(("",), ask)
    assert asked[0][-2:] == ("-i", "GPU-1,GPU-2")
    assert "-i" not in asked[1]


@pytest.mark.parametrize("problem", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 5.0)])
def test_without_an_answer_no_device_is_busy(problem: Exception) -> None:
    def ask(command: Sequence[str]) -> str:
        raise problem

    assert not devices_busy((), ask)


def test_the_output_of_a_program() -> None:
    assert run(("echo", "37")) == "37\n"
    with pytest.raises(subprocess.CalledProcessError):
        run(("false",))


def test_a_program_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that asks a broken driver, which is when workers hang."""
    made: list[subprocess.Popen[str]] = []

    class Unkillable(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

        def kill(self) -> None:
            pass

    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    monkeypatch.setattr(device_load, "LIMIT_S", 0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        run(("sleep", "20"))
    assert made[0].poll() is None
    made[0].terminate()
    made[0].wait()
