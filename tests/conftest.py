"""Fixtures that every test gets, and the options for slow and long tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from edl.worker import session as sessions
from tests.lost_workers import pytest_testnodedown as pytest_testnodedown

# A shell without job control starts what runs in its background with SIGINT and SIGQUIT ignored, nohup with SIGHUP, and
# programs started from here would inherit that.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Container images often forbid compiled files. Then each process of pytest-xdist compiles all test modules again, which
# is half of the CPU time of collection, and each program that a test starts compiles the product.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

hypothesis.settings.register_profile("edl", deadline=None)  # no test depends on how quick the machine is
hypothesis.settings.load_profile("edl")

LAUNCHER_PREFIXES = ("EDL_", "PET_", "TORCHELASTIC_", "PADDLE_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests, too")
    parser.addoption("--soak", action="store_true", help="run the fault tests of hours in full length")
    parser.addoption("--card", action="store_true", help="run the tests that need a GPU, too; else none is visible")
    parser.addoption("--rewrite", action="store_true", help="rewrite tests/sim/golden from what the machines do")


def pytest_configure(config: pytest.Config) -> None:
    """Long runs tell the whole truth: every launcher is a program of its own; see ``tests/process/forking.py``.

    Where there is a GPU, tests run as they do without one.
    """
    if Path("/dev/nvidiactl").exists() and not config.getoption("--card"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("--soak"):
        os.environ["TEST_REAL_STARTS"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Both frameworks and every test module make millions of objects that stay: the collector is kept from them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # An address differs between processes, and the processes of a whole run must have the same tests.
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give the parameters of this test ids: {named[0]}")
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak") is not None or _is_other_variant(item):
            item.add_marker(pytest.mark.skip(reason="takes long: run with --soak"))
        elif item.get_closest_marker("slow") is not None and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --all"))


def _is_other_variant(item: pytest.Item) -> bool:
    """Where several variants of a test, such as both frameworks, tell the same long story, one tells it each time."""
    marker = item.get_closest_marker("soak_but")
    return marker is not None and marker.args[0] not in item.name.partition("[")[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees, or passes on, what a launcher or a user's shell left in the environment."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sessions, "_current", None)  # nor the session that another test has opened


@pytest.fixture(scope="module", autouse=True)
def collected_once() -> Iterator[None]:
    """What a file of tests leaves for good, above all the modules that it has loaded, is kept from the collector: it
    takes 0.2 s to go through, and the code that leaves a round and many fixtures collect in full each time."""
    yield
    gc.collect()
    gc.freeze()
