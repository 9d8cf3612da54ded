"""The folder that a user's jobs share on a host must belong to that user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from edl.adapters import etcd_plan
from edl.adapters import runtime_folder as runtime_folder_module
from edl.adapters.etcd_plan import SocketPlan, parse_endpoints, plan_members
from edl.adapters.runtime_folder import runtime_folder, socket_folder
from edl.errors import SettingError
from edl.launch.addresses import address_towards, etcd_store
from edl.launch.settings import Backend, StoreSettings


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that all users share."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_the_user_may_enter(shared: Path) -> None:
    assert runtime_folder().stat().st_mode & 0o777 == 0o700
    runtime_folder().chmod(0o755)
    assert runtime_folder().stat().st_mode & 0o777 == 0o700


def test_a_link_that_somebody_has_put_there_is_refused(shared: Path) -> None:
    elsewhere = shared / "elsewhere"
    elsewhere.mkdir()
    (shared / f"edl-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(SettingError, match=r"TMPDIR=.*belongs to another user"):
        runtime_folder()


def test_a_folder_of_somebody_else_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    (shared / f"edl-{mine + 1}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(SettingError, match="Set TMPDIR to a folder of your own"):
        runtime_folder()


def test_sockets_go_where_their_paths_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = tmp_path / "s", tmp_path / ("x" * 120)
    short.mkdir()
    long.mkdir()
    monkeypatch.setattr(runtime_folder_module, "SHORT_FOLDER", short)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(etcd_plan, "LONGEST_SOCKET_PATH", len(str(tmp_path)) + 60)
    found = socket_folder()
    assert found.parent == short / f"edl-{os.getuid()}" and found.stat().st_mode & 0o777 == 0o700
    assert list(runtime_folder().iterdir()) == []
    monkeypatch.setattr(runtime_folder_module, "SHORT_FOLDER", long)
    with pytest.raises(SettingError, match=r"too long for a socket.* Set TMPDIR to a shorter one"):
        socket_folder()


def test_the_endpoint_of_a_socket(tmp_path: Path) -> None:
    endpoint = SocketPlan(Path("/t m,p/edl-1/store-x")).endpoint
    assert endpoint == "unix:/t%20m%2Cp/edl-1/store-x/client:0"
    assert parse_endpoints(f"{endpoint},h:1") == (endpoint, "h:1")
    assert plan_members([endpoint]) == ()
    assert address_towards([endpoint]) == "127.0.0.1"


def test_a_store_at_somebody_elses_socket_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there yet may come."""
    wanted = StoreSettings(Backend.EMBEDDED)
    etcd_store(wanted, [f"unix:{tmp_path}/later"])
    (tmp_path / "client").touch()
    etcd_store(wanted, [f"unix:{tmp_path}/client"])
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(SettingError, match=r"--rdzv-endpoint=unix:.*/client: belongs to another user"):
        etcd_store(wanted, [f"unix:{tmp_path}/client"])

    def closed(path: object) -> os.stat_result:
        raise PermissionError(path)

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(SettingError, match=r"user .* may not connect to it"):
        etcd_store(wanted, [f"unix:{tmp_path}/client"])
