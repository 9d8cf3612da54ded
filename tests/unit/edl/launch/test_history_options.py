"""``--history-dir`` and ``--history-size``."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.errors import SettingError
from edl.launch.history_options import history_from
from edl.launch.options import BY_NAME
from edl.launch.settings import HistorySettings


def history(checkpoint_dir: str = "", **given: str) -> HistorySettings:
    names = "history_dir", "history_size"
    return history_from({name: given.get(name, BY_NAME[name].default) for name in names}, checkpoint_dir)


def test_the_default_is_beside_the_checkpoints_if_they_are_on_a_path() -> None:
    assert history("/ckpt") == HistorySettings("/ckpt/.edl-history", 64 << 20)
    assert history("file:///ckpt") == history("/ckpt")
    assert history("s3://bucket/run").folder == history().folder == ""


def test_a_directory_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert history("/ckpt", history_dir="there", history_size="1G") == HistorySettings(f"{tmp_path}/there", 1 << 30)
    assert history("/ckpt", history_dir=f"file://{tmp_path}/there").folder == f"{tmp_path}/there"
    assert history("/ckpt", history_dir="").folder == ""


def test_not_among_files_that_must_stand_still(tmp_path: Path) -> None:
    names = {"history_dir": "auto", "history_size": "1G"}
    assert history_from(names, f"{tmp_path}/out/ckpt", [f"{tmp_path}/out"]).folder == ""
    assert history_from(names, f"{tmp_path}/ckpt", [f"{tmp_path}/out"]).folder == f"{tmp_path}/ckpt/.edl-history"
    with pytest.raises(SettingError, match=r"--history-dir=.*lies in --sync-dir="):
        history_from({**names, "history_dir": f"{tmp_path}/out"}, "", [f"{tmp_path}/out"])


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"history_dir": "s3://bucket/run"}, "--history-dir=s3://bucket/run.*append"),
        ({"history_size": "10K"}, "--history-size=10K: must be at least 1M, or 0 for no limit"),
        ({"history_size": "much"}, "--history-size"),
    ],
)
def test_what_is_wrong(given: dict[str, str], what: str) -> None:
    with pytest.raises(SettingError, match=what):
        history(**given)
