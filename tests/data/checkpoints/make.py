"""Writes a checkpoint of each kind by a real job, into a folder named after this version of edl:

    python tests/data/checkpoints/make.py

Run it for each release with other first two numbers, and commit the folder. The folders of all versions are read by
``test_old_checkpoints.py`` and ``test_old_tables.py``. A folder is never made again: what is in it stands for the files
that users have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import edl

HERE = Path(__file__).resolve().parent
JOBS = {
    "whole": (["--nproc-per-node=1"], "torch_script.py", []),
    "sharded": (["--nproc-per-node=2"], "torch_script.py", ["--sharded"]),
    "tables": (["--run-mode=ps", "--servers-per-node=2"], "tables_script.py", ["--checkpoints={folder}"]),
}
"""By kind: options of the launcher, the script, and its arguments."""


def make(kind: str, folder: Path) -> None:
    """Run one job on this host. Raises ``CalledProcessError`` if it fails."""
    options, script, arguments = JOBS[kind]
    command = [sys.executable, "-m", "edl.launch", f"--rdzv-id={kind}", "--node-id=node", *options]
    command += [f"--checkpoint-dir={folder}", "--history-dir="]  # a history would contain paths of this host
    command += [str(HERE / script), *(one.format(folder=folder) for one in arguments)]
    with tempfile.TemporaryDirectory() as elsewhere:
        path = os.pathsep.join(filter(None, (str(HERE.parents[2]), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=elsewhere, env=environment, check=True)


def main() -> None:
    """Make all kinds that this version's folder lacks."""
    for kind in JOBS:
        folder = HERE / edl.__version__ / kind
        if folder.exists():
            print(f"{folder} exists and is kept")
            continue
        folder.mkdir(parents=True)
        make(kind, folder)


if __name__ == "__main__":
    main()
