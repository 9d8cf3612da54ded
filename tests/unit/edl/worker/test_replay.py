"""What speaks against importing a module in a process that is to be forked."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from edl.worker.replay import ALL_NAMES, Footprint, _is_probe, _Seeds, _Watch, as_in, random_generator

BEFORE = Footprint(1, 1, frozenset({0, 1, 2}), frozenset(), {signal.SIGTERM: signal.SIG_DFL}, "/job", ("/job",))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"threads": 2}, "its import starts a thread"),
        ({"native_threads": 2}, "its import starts a thread"),
        ({"descriptors": frozenset({0, 1, 2, 3})}, "its import opens or closes a file and leaves it so"),
        ({"descriptors": frozenset({0, 1})}, "its import opens or closes a file and leaves it so"),
        ({"children": frozenset({77})}, "its import starts a process"),
        ({"handlers": {signal.SIGTERM: print}}, "its import handles SIGTERM"),
        ({"folder": "/tmp"}, "its import changes the working directory"),
        ({"path": ("/job", "/more")}, "its import changes sys.path"),
    ],
)
def test_each_trace_of_an_import_is_a_reason(changed: Mapping[str, Any], reason: str) -> None:
    assert BEFORE.difference(dataclasses.replace(BEFORE, **changed)) == reason


def test_the_threads_of_a_blas_library_survive_a_fork() -> None:
    assert BEFORE.difference(dataclasses.replace(BEFORE, native_threads=8), blas=True) == ""
    assert BEFORE.difference(dataclasses.replace(BEFORE, threads=2), blas=True) == "its import starts a thread"


def test_the_footprint_of_this_process_is_stable() -> None:
    assert Footprint.now().difference(Footprint.now()) == ""


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("made_for_this_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_a_random_generator_of_a_module_is_found(module: types.ModuleType) -> None:
    assert random_generator([module.__name__, "random", "gone"]) == ""
    vars(module)["system"] = random.SystemRandom()
    assert random_generator([module.__name__]) == ""
    vars(module)["own"] = random.Random()
    assert random_generator([module.__name__]) == module.__name__


def test_a_generator_that_each_worker_seeds_is_none_of_the_others(module: types.ModuleType) -> None:
    seeds, kept = _Seeds(), random.Random.seed
    with seeds.inserted():
        vars(module)["own"] = random.Random()
        state = random.Random(1).getstate()
    assert random.Random.seed is kept
    assert random_generator([module.__name__], seeds.from_system) == ""
    vars(module)["later"] = random.Random()
    assert random_generator([module.__name__], seeds.from_system) == module.__name__
    with seeds.inserted():
        vars(module)["later"] = made = random.Random()
        made.seed(3)
    assert random_generator([module.__name__], seeds.from_system) == module.__name__, "its seed was given"
    with seeds.inserted():
        vars(module)["later"] = made = random.Random()
        made.setstate(state)
    assert random_generator([module.__name__], seeds.from_system) == module.__name__, "its state was given"


def test_a_free_port_of_the_host_itself_is_no_effect() -> None:
    """urllib3 binds one when it is imported, and most libraries import urllib3."""
    assert _is_probe("socket.bind", (None, ("::1", 0))) and _is_probe("socket.bind", (None, ("127.0.0.1", 0)))
    assert not _is_probe("socket.bind", (None, ("127.0.0.1", 8080)))
    assert not _is_probe("socket.bind", (None, ("0.0.0.0", 0)))
    assert not _is_probe("socket.connect", (None, ("127.0.0.1", 0)))
    assert not _is_probe("socket.bind", (None, "/run/socket"))


def test_reads_of_the_environment_are_noted() -> None:
    watch = _Watch()
    kind = type(os.environ)
    with watch.inserted():
        os.environ.get("ONE")
        os.getenv("TWO", "")
        assert "THREE" not in os.environ
        assert os.environ["PATH"]
        assert watch.read == {"ONE", "TWO", "THREE", "PATH"}
        dict(os.environ)
    assert ALL_NAMES in watch.read
    assert type(os.environ) is kind
    os.environ.get("FOUR")
    assert "FOUR" not in watch.read


def test_a_list_of_all_variables_is_no_wish_for_those_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_ROUND", "3")
    monkeypatch.setenv("RANK", "1")
    watch = _Watch()
    with watch.inserted():
        assert dict(os.environ)["EDL_ROUND"] == "3"
        assert ("EDL_ROUND", "3") in list(os.environ.items())
        assert "EDL_ROUND" not in watch.read and {"RANK", ALL_NAMES} <= watch.read
        assert os.environ["EDL_ROUND"] == "3"
        assert "EDL_ROUND" in watch.read


def test_a_barred_variable_may_be_read_once_a_module_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN", "1")
    monkeypatch.setenv("SET", "1")
    watch = _Watch()
    watch.barred = {"OWN", "SET"}
    with watch.inserted():
        os.environ["SET"] = "2"
        assert os.environ["SET"] == "2"
        assert not watch.barred_reads
        assert os.environ["OWN"] == "1"
    assert (watch.barred_reads, watch.written) == ({"OWN"}, {"SET"})


def test_imports_see_what_a_worker_sees_for_a_while() -> None:
    before = (dict(os.environ), sys.argv[:], sys.path[:], sys.modules["__main__"])
    with as_in({"RANK": "3"}, ("train.py", "--lr"), "/job/train.py", "/job"):
        assert (dict(os.environ), sys.argv, sys.path[0]) == ({"RANK": "3"}, ["train.py", "--lr"], "/job")
        assert sys.modules["__main__"].__file__ == "/job/train.py"
    assert (dict(os.environ), sys.argv, sys.path, sys.modules["__main__"]) == before
