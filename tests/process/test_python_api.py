"""Jobs started from Python: real launchers, real workers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edl.errors import ScriptError, UsageError
from edl.launch.api import JobFailed, LaunchConfig, elastic_launch
from tests.process.free_ports import free_endpoints
from tests.process.harness import DEADLINE_S, ROOT, alive, until
from tests.process.workers import api_functions

EXAMPLE = re.compile(r"```python\n(# train_all\.py\n.*?)```", re.DOTALL)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where calls put their files; nothing of a call stays."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    tempfile.tempdir = None
    assert list(folder.glob("edl-call-*")) == []


@pytest.mark.slow
def test_a_function_returns_by_rank_and_a_failure_is_raised_with_its_traceback() -> None:
    results = elastic_launch(LaunchConfig(1, 1, 2), api_functions.place)(100)
    assert {rank: result[:2] for rank, result in results.items()} == {0: (100, 2), 1: (101, 2)}
    pids = {result[2] for result in results.values()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert not any(map(alive, pids))

    with pytest.raises(JobFailed) as caught:
        elastic_launch(LaunchConfig(1, 1, 2, max_restarts=0), api_functions.fail_on)(1)
    assert caught.value.exit_code == 1
    root = caught.value.failures[0]
    assert (root.rank, root.exit_code, root.message) == (1, 1, "LookupError: rank 1 found nothing")
    first = root.traceback.splitlines()[1]
    assert "api_functions.py" in first, "the traceback begins with the function, not with what called it"
    assert "fail_on" in str(caught.value)


def test_the_example_of_the_documentation(tmp_path: Path, temporary: Path) -> None:
    """A function of the main module, as most write it."""
    page = (ROOT / "docs" / "python-api.md").read_text()
    found = EXAMPLE.search(page)
    assert found is not None
    script = tmp_path / "train_all.py"
    script.write_text(found[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        timeout=DEADLINE_S,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout == "{0: 'rank 0 of 2: 6', 1: 'rank 1 of 2: 6'}\n"


def test_mistakes_are_raised_as_the_command_line_says_them() -> None:
    with pytest.raises(UsageError, match="--nnodes=2:1: the maximum 1 is below the minimum 2"):
        elastic_launch(LaunchConfig(2, 1, 1), api_functions.place)(0)
    with pytest.raises(ScriptError, match="no-such-program: no such program"):
        elastic_launch(LaunchConfig(1, 1, 1), "no-such-program")()


@pytest.mark.soak
@pytest.mark.torch
def test_a_function_of_torch_goes_on_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.process.workers import api_torch

    results = elastic_launch(LaunchConfig(1, 1, 2), api_torch.sum_of_ranks)(str(tmp_path))
    assert {rank: (int(result["total"]), result["round"]) for rank, result in results.items()} == {0: (3, 2), 1: (3, 2)}


@pytest.mark.slow
@pytest.mark.torch
def test_a_worker_that_uses_edl_may_start_a_job_whose_workers_do(tmp_path: Path) -> None:
    """They are no helpers of that worker."""
    pytest.importorskip("torch")
    from tests.process.workers import api_torch

    results = elastic_launch(LaunchConfig(1, 1, 1, max_restarts=0), api_torch.job_of_its_own)()
    assert results == {0: ((0, 1), {0: (0, 2), 1: (1, 2)})}


@pytest.mark.soak
@pytest.mark.torch
def test_torchs_config_and_its_way_to_name_a_script(tmp_path: Path) -> None:
    torch_api: Any = pytest.importorskip("torch.distributed.launcher.api")
    config = torch_api.LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    results = elastic_launch(config, api_functions.place)(0)
    assert {rank: result[:2] for rank, result in results.items()} == {0: (0, 2), 1: (1, 2)}
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nopen(sys.argv[1] + os.environ['RANK'], 'w').close()\n")
    assert elastic_launch(config, sys.executable)("-u", str(script), f"{tmp_path}/rank-") == {}
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}


@pytest.mark.soak
def test_a_caller_that_is_killed_takes_its_job_along(tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "import os, threading\nfrom edl.launch.api import LaunchConfig, elastic_launch\n"
        "def wait(folder):\n    open(f'{folder}/{os.getpid()}.pid', 'w').close()\n    threading.Event().wait()\n"
        f"if __name__ == '__main__':\n    elastic_launch(LaunchConfig(1, 1, 2), wait)({str(tmp_path)!r})\n"
    )
    started = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, "two workers")
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        assert all(map(alive, pids))
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        started.wait()
    until(lambda: not any(map(alive, pids)), "the end of the workers")
    for left in temporary.glob("edl-call-*"):  # nobody was left to take it away
        assert left.stat().st_mode & 0o777 == 0o700
        left.rename(temporary / "seen")


@pytest.mark.soak
def test_each_node_gets_the_results_of_its_own_workers(tmp_path: Path) -> None:
    (endpoint,) = free_endpoints(1)

    def node(name: str, rank: int) -> dict[int, Any]:
        options = {"node_id": name, "node_rank": rank}
        config = LaunchConfig(2, 2, 2, run_id=f"two-{endpoint[-5:]}", rdzv_backend="c10d", rdzv_endpoint=endpoint)
        return elastic_launch(replace(config, options=options), api_functions.place)(0)

    with ThreadPoolExecutor() as threads:  # a call may come from any thread
        first, second = threads.map(node, ("a", "b"), (0, 1))
    assert {rank: result[:2] for rank, result in first.items()} == {0: (0, 4), 1: (1, 4)}
    assert {rank: result[:2] for rank, result in second.items()} == {2: (2, 4), 3: (3, 4)}


@pytest.mark.soak
def test_a_script_without_its_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from edl.launch.api import LaunchConfig, elastic_launch\ndef work():\n    pass\n"
        "elastic_launch(LaunchConfig(1, 1, 1, max_restarts=0), work)()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, timeout=DEADLINE_S, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"Put the call below: if __name__ == '__main__':" in done.stderr.splitlines()[-1]
