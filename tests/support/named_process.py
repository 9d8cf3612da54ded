"""A process whose name, as the kernel shows it, is any sequence of bytes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CUT_NAME = "a训练任务进程".encode()[:15]
"""What Linux keeps of this name: 15 bytes, the last of them in the middle of a character."""


@contextmanager
def process_named(name: bytes) -> Iterator[int]:
    """Pid of a waiting process with this name; ended afterwards."""
    octal = "".join(f"\\{byte:03o}" for byte in name)
    script = f"printf '{octal}' > /proc/$$/comm; echo named; read line"
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        try:
            yield process.pid
        finally:
            process.kill()
