"""Modules that workers are seen to import are imported ahead of the next workers, which behave as if they had imported
them themselves."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.config import Standby
from tests.process.fork_server_fixture import ROOT, Bench, kill_now, pin, run, script, script_bench, until

LEARNT = "the next workers start with"
MORE = "\nimport time; print('imported', flush=True); time.sleep(600)\n"
"""The end of a script that lives on."""

HEAVY = {
    "heavy/__init__.py": "import os, sys\nfrom heavy import a, b, c, d, e\nPID = os.getpid()\nARGV = sys.argv[:]\n",
    **{f"heavy/{name}.py": "import time; time.sleep(0.15)\n" for name in "abcde"},
    "heavy/placed.py": "import os, time\ntime.sleep(0.15)\nRANK = os.environ.get('RANK')\n",
    "heavy/setting.py": "import os\nos.environ.setdefault('HEAVY_MODE', 'quick')\n",
    "threaded/__init__.py": "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()\n",
    "drawing/__init__.py": "import random\nRNG = random.Random()\n",
    "writing/__init__.py": "import os, tempfile\nFOLDER = tempfile.mkdtemp(dir=os.environ['SCRATCH'])\n",
    "dependent/__init__.py": "import threaded\n",
}


def bench_of(folder: Path, text: str, *arguments: str, learn_bytes: int = 1 << 30, slots: int = 1) -> Bench:
    """A script whose libraries are installed in this folder."""
    for name, content in HEAVY.items():
        script(folder, content, f"site-packages/{name}")
    (folder / "scratch").mkdir(exist_ok=True)
    bench = script_bench(folder, Standby.FORK, textwrap.dedent(text) + MORE, *arguments, slots=slots)
    bench.learn_bytes = learn_bytes
    bench.environment = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'site-packages'}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "SCRATCH": str(folder / "scratch"),
    }
    return bench


async def learnt(bench: Bench, templates: int = 1) -> None:
    """Wait until the fork server has so many times said that its next workers start with more."""
    await until(lambda: sum(LEARNT in line for line in bench.logged) >= templates, f"a template in {bench.logged}")


async def replaced(bench: Bench, pid: int, name: str, **more: str) -> tuple[int, Any]:
    """Kill a worker and start the next one; returns its pid and what it says of itself."""
    kill_now(pid)
    await bench.codes([pid])
    return await described(bench, name, **more)


async def described(bench: Bench, name: str, **more: str) -> tuple[int, Any]:
    pid = await bench.spawn(name, 0, (), **more)
    text = await bench.text_in(name, "imported")
    return pid, json.loads(text.partition("imported")[0])


def stored(bench: Bench) -> Any:
    """What is kept for the next job."""
    (path,) = Path(bench.environment["XDG_CACHE_HOME"]).rglob("*.json")
    return json.loads(path.read_text())


TELL = """
    import heavy, json, os, random, signal, sys, threading
    told = dict(
        own=heavy.PID == os.getpid(), parent=os.getppid(), threads=threading.active_count(), argv=sys.argv,
        at_import=heavy.ARGV, environment=dict(os.environ), drawn=random.random(), session=os.getsid(0) == os.getpid(),
        tasks=len(os.listdir("/proc/self/task")), descriptors=sorted(os.listdir("/proc/self/fd"))[:4],
        cwd=os.getcwd(), path=sys.path, names=sorted(globals()), main=sys.modules["__main__"].__dict__ is globals(),
        handlers={int(s): str(signal.getsignal(s)).partition(" at ")[0] for s in signal.valid_signals()},
        blocked=sorted(signal.pthread_sigmask(0, [])), title=open("/proc/self/cmdline").read(), frozen=sys.orig_argv,
        error=os.readlink("/proc/self/fd/2"),
    )
    print(json.dumps(told))
"""


def test_the_next_worker_has_the_modules_and_is_otherwise_a_fresh_one(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, TELL, "--lr", "0.1")

    async def main() -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], int]:
        async with bench.open():
            pid, first = await described(bench, "worker", RANK="0")
            await learnt(bench)
            pid, second = await replaced(bench, pid, "worker", RANK="0", MORE="1")
            pid, third = await replaced(bench, pid, "worker", RANK="0", MORE="1")
            gone = pin(pid)
            fork_server = bench.processes.fork_server_pid
        os.close(gone)
        return first, second, third, fork_server

    first, second, third, fork_server = run(main())
    assert first["own"] and not second["own"] and not third["own"]
    assert {one["parent"] for one in (first, second, third)} == {fork_server}
    assert second["environment"] == {**first["environment"], "MORE": "1"}
    assert len({one["drawn"] for one in (first, second, third)}) == 3
    varying = {"own", "environment", "drawn"}
    for one in (second, third):
        assert {k: v for k, v in one.items() if k not in varying} == {
            k: v for k, v in first.items() if k not in varying
        }


def test_the_next_job_of_the_script_starts_with_the_modules(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, TELL)

    async def job() -> Any:
        async with bench.open():
            _, told = await described(bench, "worker")
            if told["own"]:
                await learnt(bench)
            return told

    assert [run(job())["own"], run(job())["own"]] == [True, False]


def test_what_starts_a_thread_or_writes_a_file_is_left_out_and_said_once(tmp_path: Path) -> None:
    text = """
        import heavy, dependent, drawing, writing, json, os, threading
        print(json.dumps([heavy.PID == os.getpid(), threading.active_count(), os.path.isdir(writing.FOLDER)]))
    """
    bench = bench_of(tmp_path, text)

    async def main() -> tuple[Any, Any]:
        async with bench.open():
            pid, first = await described(bench, "worker")
            await learnt(bench)
            _, second = await replaced(bench, pid, "worker")
            return first, second

    first, second = run(main())
    assert (first, second) == ([True, 2, True], [False, 2, True])
    left_out = stored(bench)["left_out"]
    assert left_out.keys() == {"threaded", "dependent", "drawing", "writing"}
    assert len(list((tmp_path / "scratch").iterdir())) == 2, "one folder for each worker, and none for a template"
    for module in left_out:
        assert sum(line.startswith(f"{module} is not imported ahead") for line in bench.logged) == 1, bench.logged


def test_modules_that_read_the_rank_are_imported_once_for_each(tmp_path: Path) -> None:
    text = """
        import heavy, heavy.placed, heavy.setting, json, os
        print(json.dumps([heavy.PID == os.getpid(), heavy.placed.RANK, os.environ["HEAVY_MODE"]]))
    """
    bench = bench_of(tmp_path, text, slots=2)

    async def main() -> list[Any]:
        async with bench.open():
            pids = [(await described(bench, name, RANK=name))[0] for name in "01"]
            await learnt(bench, 2)
            others = [await replaced(bench, pid, name, RANK=name) for pid, name in zip(pids, "01", strict=True)]
            slow = await replaced(bench, others[0][0], "0", RANK="0", HEAVY_MODE="slow")
            return [*(told for _, told in others), slow[1]]

    assert run(main()) == [[False, "0", "quick"], [False, "1", "quick"], [True, "0", "slow"]]


def test_modules_of_the_script_are_imported_by_each_worker(tmp_path: Path) -> None:
    script(tmp_path, "import os, heavy\nPID = os.getpid()\n", "beside.py")
    text = """
        import beside, heavy, json, os
        print(json.dumps([heavy.PID == os.getpid(), beside.PID == os.getpid()]))
    """
    bench = bench_of(tmp_path, text)

    async def main() -> Any:
        async with bench.open():
            pid, _ = await described(bench, "worker")
            await learnt(bench)
            return (await replaced(bench, pid, "worker"))[1]

    assert run(main()) == [False, True]
    assert not [one for one in stored(bench)["modules"] if one["name"] == "beside"]


def test_the_memory_limit_ends_the_imports(tmp_path: Path) -> None:
    script(tmp_path, "DATA = b'1' * (64 << 20)\n", "site-packages/large/__init__.py")
    script(tmp_path, "import os\nPID = os.getpid()\n", "site-packages/later/__init__.py")
    text = """
        import heavy, large, later, json, os
        print(json.dumps([one.PID == os.getpid() for one in (heavy, later)]))
    """
    bench = bench_of(tmp_path, text, learn_bytes=48 << 20)

    async def main() -> Any:
        async with bench.open():
            pid, _ = await described(bench, "worker")
            await learnt(bench)
            return (await replaced(bench, pid, "worker"))[1]

    assert run(main()) == [False, True]
    assert any("the limit of 48 MiB (--learn-memory) is reached" in line for line in bench.logged)


def test_a_template_that_has_died_is_done_without(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, TELL)

    def template() -> int:
        (path,) = (
            path.parent
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if b"edl.worker.template" in path.read_bytes()
            and f"\nPPid:\t{bench.processes.fork_server_pid}\n" in (path.parent / "status").read_text()
        )
        return int(path.name)

    async def main() -> Any:
        async with bench.open():
            pid, _ = await described(bench, "worker")
            await learnt(bench)
            kill_now(template())
            return (await replaced(bench, pid, "worker"))[1]

    assert run(main())["own"]
