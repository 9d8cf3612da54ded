"""``--notify`` and ``--notify-file``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edl.errors import SettingError
from edl.launch.notify_options import notify_from
from edl.notify.settings import NO_NOTIFICATIONS
from edl.wire.severity import Severity

HOOK = "https://hooks.example.com/secret"
MAIL = "smtp://mail.example.com/?from=a@example.com&to=b@example.com"


def options(*urls: str, file: str = "", least: str = "warning") -> dict[str, Any]:
    return {"notify": urls, "notify_file": file, "notify_on": least}


def test_none_by_default() -> None:
    assert notify_from(options(), {}) == NO_NOTIFICATIONS


def test_both_sources_without_repetitions_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "channels"
    file.write_text(f"# ours\n\n  {MAIL}\n{HOOK}\n")
    file.chmod(0o600)
    found = notify_from(options(HOOK, file=str(file), least="critical"), {})
    assert found.urls == (HOOK, MAIL)
    assert found.least is Severity.CRITICAL
    assert "secret" not in repr(found)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "channels"
    file.write_text(HOOK)
    file.chmod(0o644)
    with pytest.raises(SettingError, match=r"--notify-file=.*others may open it \(mode 0644\)"):
        notify_from(options(file=str(file)), {})


@pytest.mark.parametrize(("content", "text"), [(b"# nothing\n", "holds no URL"), (b"\xff\n", "is not UTF-8")])
def test_a_useless_file_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "channels"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(SettingError, match=text):
        notify_from(options(file=str(file)), {})


def test_a_missing_file() -> None:
    with pytest.raises(SettingError, match="No such file or directory"):
        notify_from(options(file="/no/such/file"), {})


def test_addresses_are_checked_at_the_start() -> None:
    with pytest.raises(SettingError, match="--notify: not a URL"):
        notify_from(options("nonsense"), {})
