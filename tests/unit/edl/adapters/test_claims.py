"""Locks of one user's processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from edl.adapters.claims import claim


def test_one_at_a_time_and_nothing_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        inside = most = 0

        async def work() -> None:
            nonlocal inside, most
            async with claim(tmp_path / "it.lock", 60):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(work() for _ in range(20)))
        assert most == 1

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_others_wait_no_longer_than_they_want_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with claim(tmp_path / "it.lock", 60):
            with pytest.raises(TimeoutError, match=r"it\.lock has been locked for 0 s"):
                async with claim(tmp_path / "it.lock", 0):
                    raise AssertionError("not alone")

    asyncio.run(scenario())


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "it.lock"
    code = f"""if True:
        import asyncio, os, pathlib, signal
        from edl.adapters.claims import claim
        async def main():
            async with claim(pathlib.Path({str(path)!r}), 60):
                os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert path.exists()

    async def scenario() -> None:
        async with claim(path, 0):
            pass

    asyncio.run(scenario())
    assert not path.exists()
