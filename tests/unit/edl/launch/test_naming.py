"""How the checkpoint directory is written, and job names that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.errors import SettingError
from edl.launch.naming import checkpoint_folder, private_name
from edl.launch.options import BY_NAME

NOT_UTF_8 = b"caf\xe9".decode(errors="surrogateescape")


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("", ""),
        ("/data/run", "/data/run"),
        ("run", "{here}/run"),
        ("file:///data/run", "/data/run"),
        ("s3://bucket/run", "s3://bucket/run"),
    ],
)
def test_a_path_is_absolute_and_a_url_of_an_object_store_stays(
    given: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert BY_NAME["checkpoint_dir"].value(given) == folder.format(here=tmp_path)


def test_a_job_has_one_name_however_its_directory_is_written() -> None:
    assert private_name(checkpoint_folder("file:///data/run")) == private_name(checkpoint_folder("/data/run"))


@pytest.mark.parametrize("given", [f"/data/{NOT_UTF_8}", NOT_UTF_8, f"s3://bucket/{NOT_UTF_8}"])
def test_a_directory_that_messages_cannot_name_is_refused(given: str) -> None:
    with pytest.raises(SettingError, match=r"^--checkpoint-dir='.*caf\\udce9': is not valid UTF-8\. Rename the dir"):
        BY_NAME["checkpoint_dir"].value(given)


def test_so_is_that_of_the_denylist() -> None:
    with pytest.raises(SettingError, match=r"^--denylist="):
        checkpoint_folder(f"/data/{NOT_UTF_8}", "--denylist")
