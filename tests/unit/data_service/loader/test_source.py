"""The arguments of a data set, given in the script or to the launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.formats.options import FormatOptions
from data_service.loader.source import VARIABLE
from edl.errors import SettingError
from tests.support.data_fixture import ArrayData, Bench, write_ipc

RECORDS = 60


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number in range(3):
        write_ipc(tmp_path / f"{number}.arrow", number * RECORDS // 3, RECORDS // 3)
    return str(tmp_path / "*.arrow")


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.begin(1)
    return made


def data_set(bench: Bench, files: Any, **options: Any) -> ArrayData:
    return ArrayData(bench, 0, "d", files, **{"batch_size": 8, **options})


def ids(data: ArrayData) -> list[int]:
    return [int(one) for batch in data for one in batch["id"]]


def test_what_the_launcher_says_of_the_data(bench: Bench, files: str) -> None:
    environment = {VARIABLE: json.dumps({"d": {"files": [files], "shuffle": "no", "columns": "id"}})}
    data = ArrayData(bench, 0, "d", batch_size=5, environment=environment)
    assert list(next(iter(data))) == ["id"]
    assert ids(data) == list(range(5, RECORDS))
    wrong = {VARIABLE: json.dumps({"d": {"files": [files], "colour": "red"}})}
    with pytest.raises(SettingError, match="no such setting"):
        ids(ArrayData(bench, 0, "d", batch_size=5, environment=wrong))


@pytest.mark.parametrize("given", [{"types": "b:float32"}, FormatOptions(types={"b": "float32"})])
def test_options_of_script_and_launcher_are_combined(bench: Bench, tmp_path: Path, given: Any) -> None:
    (tmp_path / "a.csv").write_text("1;2\n")
    options = {"header": "no", "names": "a:b,b", "delimiter": "semicolon", "types": "a:b:int8"}
    environment = {VARIABLE: json.dumps({name: {"files": [str(tmp_path)], **options} for name in "de"})}
    (batch,) = ArrayData(bench, 0, "d", batch_size=1, environment=environment)
    assert batch["a:b"].dtype == np.int8 and batch["b"].dtype == np.int64
    (batch,) = ArrayData(bench, 0, "e", batch_size=1, environment=environment, options=given)
    assert batch["b"].dtype == np.float32


@pytest.mark.parametrize("several", [False, True])
def test_files_as_paths(bench: Bench, files: str, several: bool) -> None:
    folder = Path(files).parent
    given = [folder / "0.arrow", str(folder / "1.arrow"), folder / "2.arrow"] if several else folder
    assert sorted(ids(data_set(bench, given))) == list(range(RECORDS))


def test_one_column_by_its_name(bench: Bench, files: str) -> None:
    assert list(next(iter(data_set(bench, files, columns="id")))) == ["id"]


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"prefetch": 0}, {"tail": "cut"}, {"mode": "other"}, {"shuffle_shards": 0},
                {"batch_size": 8.0}, {"batch_size": True}, {"failures": "3"}]
)  # fmt: skip
def test_impossible_options_are_refused(bench: Bench, files: str, options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        data_set(bench, files, **options)


@pytest.mark.parametrize("options", [{"seed": 1.5}, {"seed": 1 << 62}, {"seed": True}, {"shuffle": "no"}])
def test_impossible_orders_are_refused(bench: Bench, files: str, options: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(options))):
        ids(data_set(bench, files, **options))
