"""A worker that fails between its template and its script says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edl.exit_codes import ExitCode

TEMPLATE = """
import os, socket, sys
from pathlib import Path
from types import SimpleNamespace
from edl.wire.memory_file import write_memory
from edl.worker import linux
from edl.worker.learning import Learning
from edl.worker.replay import Rules
from edl.worker.template import WorkerPlace, fork_from

linux.adopt_orphans()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
template = linux.fork()
if template == 0:
    ours.close()
    place = WorkerPlace(dict(os.environ), ("train.py",), "train.py", ".")
    learning = SimpleNamespace(_templates=[], _in_template=lambda: (), _records=())
    Learning._become_template(learning, theirs, place, Rules((), {}, {}, False, 1 << 30))
    os._exit(0)  # the worker has come as far as its script
theirs.close()
while b"Prepared" not in (said := ours.recv(65536)):
    assert said
worker_output = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
order = write_memory("order", b"no order")
worker = fork_from(ours, -1, [order, 0, worker_output, worker_output], lambda pid: None, 60)
print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""


def test_an_error_before_the_script_is_shown_in_the_workers_output(tmp_path: Path) -> None:
    output = tmp_path / "worker.log"
    command = [sys.executable, "-c", TEMPLATE, str(output)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": "."})
    assert (ran.stdout, ran.stderr) == (f"{ExitCode.INTERNAL:d}\n", "")
    assert "in read_order" in output.read_text()
