"""Real processes killed in mid-push while pservers stall: every record is in the parameters exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ps.records import MASTER, PLAIN, PSERVER, STALLED, run

pytest.importorskip("numba")
pytest.importorskip("pyarrow")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kills", "arguments"),
    [
        pytest.param("async", 2, (), marks=pytest.mark.soak),
        ("async", 2, ("--no-wait",)),
        pytest.param("sync", 2, (), marks=pytest.mark.soak),
        pytest.param("async", 6, (), marks=pytest.mark.soak),
    ],
)
def test_records_are_counted_once(tmp_path: Path, mode: str, kills: int, arguments: tuple[str, ...]) -> None:
    ledger = run(
        tmp_path, kills, seed=1, records=1000 * kills, kinds={STALLED: 1}, arguments=arguments,
        options=(f"--ps-mode={mode}",),
    )  # fmt: skip
    assert ledger.exact, ledger
    assert ledger.pushes > 40 * kills and ledger.kills[STALLED] == kills


@pytest.mark.soak
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), ()),
        (("--accumulate=3",), ()),
        (("--accumulate=3", "--no-wait"), ()),
        (("--mixed=4",), ("--staleness=4",)),
        ((), ("--ps-mode=sync",)),
    ],
)
def test_records_are_counted_once_through_everything(
    tmp_path: Path, arguments: tuple[str, ...], options: tuple[str, ...]
) -> None:
    kinds = {STALLED: 8, PLAIN: 4, PSERVER: 2, MASTER: 1}
    ledger = run(tmp_path, 30, seed=2, kinds=kinds, arguments=arguments, options=options)
    assert ledger.exact, ledger
