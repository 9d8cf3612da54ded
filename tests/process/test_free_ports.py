"""Blocks of ports: processes that test at the same time have different ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.process.free_ports import SIZE, claim_block
from tests.process.harness import ROOT

CLAIM = """
import sys, time
from pathlib import Path
from tests.process.free_ports import claim_block
print(claim_block(folder=Path(sys.argv[1])).start, flush=True)
time.sleep(600)
"""


@contextmanager
def other(folder: Path) -> Iterator[int]:
    """Another process that tests; the first port of its block."""
    command = [sys.executable, "-c", CLAIM, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            os.kill(process.pid, signal.SIGKILL)


def test_processes_have_different_blocks_and_a_dead_one_gives_its_own_back(tmp_path: Path) -> None:
    with other(tmp_path) as first, other(tmp_path) as second:
        assert abs(second - first) >= SIZE
        assert claim_block(folder=tmp_path).start not in (first, second)
    with other(tmp_path) as again:
        assert again == first
