"""What a process becomes that is started as a worker."""

from __future__ import annotations

import os
import subprocess
import sys

from edl.worker import spawn

LATER = """
import io, os, sys
from edl.worker import spawn
before = sys.stdin.seekable()
spawn.become(spawn.WorkerOrder("script", "x.py", (), dict(os.environ)), (int(sys.argv[1]), 1, 2))
print(before, sys.stdin.seekable(), sys.stdin is sys.__stdin__, sys.stdin.name, sys.stdin.mode, sys.stdin.encoding)
print([input(), sys.stdin.read()])
"""


def pipe_with(data: bytes) -> int:
    """The reading end."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return reading


def test_a_program_gets_the_streams() -> None:
    stdin, (reading, stdout) = pipe_with(b"one\ntwo\n"), os.pipe()
    pid = spawn.start(["cat"], os.environ, streams=(stdin, stdout, stdout))
    os.close(stdin)
    os.close(stdout)
    with open(reading, "rb") as shown:
        assert shown.read() == b"one\ntwo\n"
    assert os.waitpid(pid, 0)[1] == 0


def test_a_warm_process_reads_the_input_of_its_order_as_if_it_had_always_had_it() -> None:
    """The null device, which it has while it waits, can seek."""
    stdin = pipe_with(b"one\ntwo\r\n")
    words = [sys.executable, "-c", LATER, str(stdin)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, pass_fds=[stdin], capture_output=True, text=True, check=True
    )
    os.close(stdin)
    assert ended.stdout == "True False True <stdin> r ascii\n['one', 'two\\r\\n']\n"
