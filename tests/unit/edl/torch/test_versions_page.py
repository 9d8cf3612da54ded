"""The page on versions says of the installed torch what it has, and covers every function that edl looks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._C import _distributed_c10d  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from edl.torch import nccl  # noqa: E402

pytestmark = pytest.mark.torch
PAGE = Path(__file__).resolve().parents[4] / "docs" / "torch-versions.md"
OWNERS: dict[str, Any] = {
    "ProcessGroupNCCL": getattr(dist, "ProcessGroupNCCL", None),
    "Backend": _distributed_c10d.Backend,
    "distributed_c10d": distributed_c10d,
}


def table() -> dict[str, dict[str, str]]:
    """By function: what its row says of each version."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith(("| function", "| `"))
    ]
    versions = rows[0][1:4]
    return {row[0].strip("`"): dict(zip(versions, row[1:4], strict=True)) for row in rows[1:]}


def found(function: str) -> bool:
    owner, _, name = function.rpartition(".")
    if owner == "distributed_c10d" and hasattr(_distributed_c10d, name):
        return True  # torch keeps some of this module's functions in C++
    return hasattr(OWNERS[owner], name) if owner else hasattr(_distributed_c10d, name)


def said_of_the_installed() -> dict[str, str]:
    # The wheels of a release differ in their suffix: +cu121.
    for version in (torch.__version__, torch.__version__.split("+")[0]):
        said = {function: row[version] for function, row in table().items() if version in row}
        if said:
            return said
    return {}


@pytest.mark.parametrize("function", table())
def test_the_installed_torch_has_what_the_page_says(function: str) -> None:
    said = said_of_the_installed()
    if not said:
        pytest.skip(f"the page has no column for torch {torch.__version__}")
    assert said[function] == "yes" if found(function) else said[function] in ("no", "n/a")
    if said[function] == "n/a":
        assert not dist.is_nccl_available(), "only builds without NCCL say nothing of a version"


def test_every_function_of_nccl_that_edl_looks_for_is_on_the_page() -> None:
    looked_for = set(re.findall(r'hasattr\([^"]*"(\w+)"\)', Path(nccl.__file__).read_text()))
    assert {"abort", "get_error"} <= looked_for
    assert {f"ProcessGroupNCCL.{name}" for name in looked_for} <= set(table())
