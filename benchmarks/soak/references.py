"""The losses of undisturbed runs: each script trains once by itself, without a launcher, while the soak goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.common import processes
from benchmarks.common.launchers import REPOSITORY
from benchmarks.soak.kinds import KINDS, SCRIPTS
from benchmarks.soak.options import Options


class References:
    """Runs the scripts, and reads what they write. The lists grow."""

    def __init__(self, options: Options) -> None:
        self._found: dict[str, list[float]] = {}
        self._read: dict[str, int] = {}
        self._paths: dict[str, Path] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        steps = int(1.3 * (options.job_s + 2 * options.patience_s) / options.pause_s) + 500
        for script in sorted({KINDS[name].reference for name in options.kinds} - {""}):
            folder = options.out / "references" / script
            folder.mkdir(parents=True)
            command = [sys.executable, str(SCRIPTS / script), f"--folder={folder}", f"--reference={steps}"]
            environment = processes.clean_environment({"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
            self._processes.append(processes.start(command, environment, folder / "log", folder))
            self._found[script], self._paths[script] = [], folder / "reference"

    def losses(self, script: str) -> list[float] | None:
        """The losses of a script, as far as they are known; ``None`` if there are none to compare."""
        return self._found.get(script)

    def poll(self) -> None:
        """Read what is new. Raises ``RuntimeError`` if a script has failed."""
        for script, path in self._paths.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(script, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[script] = self._read.get(script, 0) + whole
            self._found[script] += map(float, data[:whole].splitlines())
        for process in self._processes:
            if process.poll():
                raise RuntimeError(f"{process.args!r} ended with status {process.returncode}; see its log")

    def close(self) -> None:
        """End the scripts."""
        for process in self._processes:
            process.kill()
            process.wait()
