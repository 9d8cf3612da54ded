from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edl.adapters.files import PlainFiles
from edl.agent.switches import Switches, SwitchFile, asked, reason_in
from edl.errors import CheckpointError, Killed
from edl.exit_codes import ExitCode
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose

PATHS = {Purpose.KILL: "/d/KILL", Purpose.SAVE: "/d/SAVE"}


class Switchboard:
    """Switches over a folder, and what they said."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.kill, self.save = folder / "KILL", folder / "SAVE"
        self.switches = Switches(PlainFiles(folder), self.said.append)

    def purposes(self) -> set[Purpose]:
        return {request.purpose for request in self.switches.poll()}


@pytest.fixture
def board(tmp_path: Path) -> Switchboard:
    return Switchboard(tmp_path)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", ""),
        (b"\n \n", ""),
        (b"maintenance at noon\nsecond line\n", "maintenance at noon"),
        (b"\n  tabs\tand \x1b[31mcolour\n", "tabs and [31mcolour"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("größer".encode(), "größer"),
        (b"x" * 1000, "x" * 200 + " …"),
    ],
)
def test_reason(content: bytes, shown: str) -> None:
    assert reason_in(content) == shown


def test_what_is_asked() -> None:
    seen = SwitchFile("1", "why not")
    assert asked({}, PATHS) == frozenset()
    assert asked({Purpose.SAVE: SwitchFile("1", "")}, PATHS) == {Asked(Purpose.SAVE, "the file /d/SAVE")}
    both = {Purpose.SAVE: SwitchFile("1", ""), Purpose.KILL: seen}
    assert asked(both, PATHS) == {Asked(Purpose.KILL, "the file /d/KILL (why not)")}


def test_nothing_is_asked(board: Switchboard) -> None:
    assert board.switches.poll() == frozenset()
    board.switches.clear_save()
    board.switches.refuse_if_killed()
    assert board.said == []


def test_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert Switchboard(tmp_path / "later").purposes() == set()


def test_save_is_asked_until_it_is_cleared(board: Switchboard) -> None:
    board.save.write_text("before the demo")
    for _ in range(3):
        assert board.switches.poll() == {Asked(Purpose.SAVE, f"the file {board.save} (before the demo)")}
    board.switches.clear_save()
    assert not board.save.exists()
    assert board.purposes() == set()
    board.save.touch()
    assert board.purposes() == {Purpose.SAVE}


@pytest.mark.parametrize("polled", [False, True])
def test_save_asked_again_in_the_meantime_stays(polled: bool, board: Switchboard) -> None:
    board.save.touch()
    board.switches.poll()
    os.utime(board.save, ns=(1, 1))
    if polled:
        board.switches.poll()
    board.switches.clear_save()
    assert board.purposes() == {Purpose.SAVE}
    board.switches.clear_save()
    assert board.purposes() == set()


def test_save_not_seen_yet_is_not_cleared(board: Switchboard) -> None:
    board.save.touch()
    board.switches.clear_save()
    assert board.purposes() == {Purpose.SAVE}


def test_save_taken_back(board: Switchboard) -> None:
    board.save.touch()
    board.switches.poll()
    board.save.unlink()
    assert board.purposes() == set()
    board.switches.clear_save()
    board.save.touch()
    assert board.purposes() == {Purpose.SAVE}


def test_kill_stays_and_refuses_a_start(board: Switchboard, tmp_path: Path) -> None:
    board.kill.write_text("too expensive\n")
    board.save.touch()
    assert board.switches.poll() == {Asked(Purpose.KILL, f"the file {board.kill} (too expensive)")}
    board.switches.clear_save()
    assert board.kill.exists()
    with pytest.raises(Killed) as caught:
        Switchboard(tmp_path).switches.refuse_if_killed()
    assert str(caught.value) == (
        f"this job was ended by the file {board.kill} (too expensive) and may not start. Remove that file to start it"
    )
    assert caught.value.exit_code is ExitCode.KILLED
    board.kill.unlink()
    Switchboard(tmp_path).switches.refuse_if_killed()
    assert board.purposes() == set()  # the checkpoint before the end was the one that SAVE asked for


def test_a_folder_is_a_switch_too(board: Switchboard) -> None:
    board.kill.mkdir()
    assert board.purposes() == {Purpose.KILL}


def test_the_reason_is_read_only_when_the_file_changes(board: Switchboard, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = PlainFiles.read

    def counted(self: PlainFiles, name: str) -> bytes:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(PlainFiles, "read", counted)
    board.save.write_text("one")
    for _ in range(3):
        board.switches.poll()
    board.save.write_text("another")
    assert [request.by for request in board.switches.poll()] == [f"the file {board.save} (another)"]
    assert reads == ["SAVE", "SAVE"]


def test_trouble_is_said_once_and_what_was_asked_stays(board: Switchboard, monkeypatch: pytest.MonkeyPatch) -> None:
    board.save.touch()
    board.switches.poll()

    def stale(self: PlainFiles, name: str) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(PlainFiles, "stamp", stale)
        for _ in range(3):
            assert board.purposes() == {Purpose.SAVE}
        assert len(board.said) == 1
        assert "Stale file handle" in board.said[0]
        board.switches.clear_save()
        assert "Remove it, or it requests another checkpoint" in board.said[1]
        with pytest.raises(CheckpointError, match="Stale"):
            board.switches.refuse_if_killed()
    assert board.purposes() == {Purpose.SAVE}


def test_remote_places_are_looked_at_seldom(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    from edl.adapters.remote_files import RemoteFiles

    files = RemoteFiles(f"memory://{tmp_path.name}")
    switches = Switches(files, print)
    assert switches.poll_s > 10 > Switchboard(tmp_path).switches.poll_s
    files.write("SAVE", [b"now"])
    assert {request.by for request in switches.poll()} == {f"the file memory://{tmp_path.name}/SAVE (now)"}
    switches.clear_save()
    assert files.stamp("SAVE") == ""
