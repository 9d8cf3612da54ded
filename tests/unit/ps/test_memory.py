"""A store's own account of its memory, compared with the kernel's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ps.store.kernels import chosen

PROGRAM = Path(__file__).parents[2] / "support" / "ps_memory.py"
SMAPS = Path("/proc/self/smaps_rollup")
APART = 4 << 20
"""Bytes of a request's own arrays and of ``malloc``'s, whatever the tables are."""
pytestmark = pytest.mark.skipif(not SMAPS.exists() or chosen() != "numba", reason="Linux, and compiled kernels")


def filled(*arguments: object) -> dict[str, int]:
    """Run ``ps_memory.py`` in a process of its own and return its figures."""
    command = [sys.executable, str(PROGRAM), "numba", *map(str, arguments)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "rows", "dim", "rule", "batch", "row_bytes"),
    [
        (6, 400_000, 16, "adagrad", 20_000, 180),
        (1, 1_000_000, 16, "adagrad", 20_000, 180),
        (3, 200_000, 8, "adam", 20_000, 145),
        (1, 120_000, 64, "adam", 7_000, 900),
        (30, 20_000, 8, "adagrad", 5_000, 130),
        (1, 1_300_000, 1, "ftrl", 20_000, 60),
    ],
    ids=["tables", "rows", "adam", "dim", "small", "narrow"],
)
def test_the_account_is_what_the_kernel_says(
    tables: int, rows: int, dim: int, rule: str, batch: int, row_bytes: int
) -> None:
    found = filled(tables, rows, dim, rule, batch)
    assert abs(found["kernel"] - found["said"]) <= 0.15 * found["kernel"] + APART, found
    assert found["kernel"] <= row_bytes * found["rows"] + APART, found


def test_the_limit_is_kept_by_what_the_kernel_says() -> None:
    most = 150 << 20
    found = filled(2, 800_000, 16, "adagrad", 20_000, most)
    assert found["rows"] < 1_600_000, "there was no room for all"
    assert found["said"] <= most
    assert 0.9 * most <= found["kernel"] <= 1.1 * most + APART, found
