"""A pserver without a compile cache serves at once, and uses the compiled kernels when they are ready."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from edl.config import environment
from ps.store.kernels import chosen
from tests.support.ps_servers import ALL, COUNTS, SECRET, At, Boss, Plan, Trainer, tidy

KEYS = list(range(2000))


@pytest.mark.soak  # compiling has the lowest priority, and takes ten minutes on a busy machine
@pytest.mark.skipif(chosen() != "numba", reason="there is nothing to compile")
def test_a_pserver_serves_before_its_kernels_are_compiled(tmp_path: Path) -> None:
    told = {name: value for name, value in environment().items() if name != "EDL_PS_KERNELS"}
    command = [sys.executable, "-m", "ps", "server", "--name=a", "--job=j"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**told, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")},
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps({"secret": SECRET}) + "\n")
        process.stdin.flush()
        listening = json.loads(process.stdout.readline())
        place = At("a", "127.0.0.1", listening["port"], listening["path"], listening["machine"])
        boss = Boss(place)
        boss.say(Plan({1: place}, {1: ALL}).orders(1))
        trainer = Trainer(place)
        assert set(trainer.pull(COUNTS, KEYS)[:, 0]) == {0.0}
        assert not list((tmp_path / "kernels").glob("*/complete")), "nothing has waited for them"
        pushes = 0
        while "compiled kernels in use after" not in (tmp_path / "log").read_text():
            assert process.poll() is None
            pushes += 1
            trainer.push(pushes, COUNTS, KEYS)
            threading.Event().wait(0.2)  # compiling needs the processor, too
        trainer.push(pushes + 1, COUNTS, KEYS)
        assert pushes > 1 and (np.asarray(trainer.pull(COUNTS, KEYS)) == pushes + 1).all()
        assert list((tmp_path / "kernels").glob("*/complete"))
    finally:
        tidy()
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
