"""Modules that workers are seen to import are imported ahead of the next workers, which behave as if they had imported
them themselves."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edl.config import Standby
from tests.process.fork_server_fixture import ROOT, Bench, kill_now, pin, run, script, script_bench, until, wait_gone
from tests.process.harness import Job
from tests.process.harness import until as wait_until

LEARNT = "the next workers start with"
MORE = "\nimport time; print('imported', flush=True); time.sleep(600)\n"
"""The end of a script that lives on."""

HEAVY = {
    "heavy/__init__.py": "import os, sys\nfrom heavy import a, b, c, d, e\nPID = os.getpid()\nARGV = sys.argv[:]\n",
    **{f"heavy/{name}.py": "import time; time.sleep(0.1)\n" for name in "abcde"},
    "heavy/placed.py": "import os, time\ntime.sleep(0.1)\nRANK = os.environ.get('RANK')\n",
    "heavy/setting.py": "import os\nos.environ.setdefault('HEAVY_MODE', 'quick')\n",
    "threaded/__init__.py": "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()\n",
    "drawing/__init__.py": "import random\nRNG = random.Random(7)\n",
    "drawing_anew/__init__.py": "import os, random\nRNG, PID = random.Random(), os.getpid()\n",
    "halting/__init__.py": "import os, time\ntime.sleep(5)\nimport halting.more\nPID = os.getpid()\n",
    "halting/more.py": "",
    "writing/__init__.py": "import os, tempfile\nFOLDER = tempfile.mkdtemp(dir=os.environ['SCRATCH'])\n",
    "dependent/__init__.py": "import threaded\n",
    "curious/__init__.py": "import __main__\nif not hasattr(__main__, 'FLAG'):\n    import heavy.unseen\n",
    "heavy/unseen.py": "",
    "configured/__init__.py": "import os\nMODE = os.environ.get('CONFIGURED')\n",
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


def template_of(fork_server: int) -> int:
    """The pid of its template."""
    (found,) = (
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"edl.worker.template" in content(path)
        and f"\nPPid:\t{fork_server}\n".encode() in content(path.parent / "status")
    )
    return found


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def test_the_next_worker_has_the_modules_and_is_otherwise_a_fresh_one(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, TELL, "--lr", "0.1")

    async def main() -> tuple[list[Mapping[str, Any]], int]:
        async with bench.open():
            pid, first = await described(bench, "worker", RANK="0")
            await learnt(bench)
            pid, second = await replaced(bench, pid, "worker", RANK="0", MORE="1")
            pid, third = await replaced(bench, pid, "worker", RANK="0", MORE="1")
            fork_server = bench.processes.fork_server_pid
            kill_now(template_of(fork_server))
            pid, fourth = await replaced(bench, pid, "worker", RANK="0", MORE="1")
            gone = pin(pid)
        wait_gone([gone])
        return [first, second, third, fourth], fork_server

    told, fork_server = run(main())
    assert [one["own"] for one in told] == [True, False, False, True], "the last one has no template any more"
    assert {one["parent"] for one in told} == {fork_server}
    assert len({one["drawn"] for one in told}) == 4
    first, varying = told[0], {"own", "environment", "drawn"}
    for one in told[1:]:
        assert one["environment"] == {**first["environment"], "MORE": "1"}
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


def test_what_cannot_be_forked_and_what_is_the_users_own_is_left_out(tmp_path: Path) -> None:
    script(tmp_path, "import os, heavy\nPID = os.getpid()\n", "beside.py")
    text = """
        FLAG = 1
        import os
        os.environ["CONFIGURED"] = str(os.getpid())
        import beside, configured, curious, heavy, dependent, drawing, writing, json, threading
        assert configured.MODE == str(os.getpid())
        own = [module.PID == os.getpid() for module in (heavy, beside)]
        print(json.dumps([own, threading.active_count(), os.path.isdir(writing.FOLDER)]))
    """
    bench = bench_of(tmp_path, text)

    async def main() -> tuple[Any, Any]:
        async with bench.open():
            pid, first = await described(bench, "worker")
            await learnt(bench)
            _, second = await replaced(bench, pid, "worker")
            return first, second

    first, second = run(main())
    assert (first, second) == ([[True, True], 2, True], [[False, True], 2, True])
    assert not [one for one in stored(bench)["modules"] if one["name"] == "beside"]
    left_out = stored(bench)["left_out"]
    assert left_out.keys() == {"configured", "curious", "threaded", "dependent", "drawing", "writing"}
    assert left_out["curious"].startswith("it imports heavy.unseen") and left_out["curious"].endswith(
        "as no worker has"
    )
    assert len(list((tmp_path / "scratch").iterdir())) == 2, "one folder for each worker, and none for a template"
    for module in left_out:
        assert sum(line.startswith(f"{module} is not imported ahead") for line in bench.logged) == 1, bench.logged


def test_a_librarys_generator_without_a_seed_is_seeded_in_each_worker(tmp_path: Path) -> None:
    text = """
        import drawing_anew, heavy, json, os
        print(json.dumps([drawing_anew.PID == os.getpid(), drawing_anew.RNG.random()]))
    """
    bench = bench_of(tmp_path, text)

    async def main() -> list[Any]:
        async with bench.open():
            pid, _ = await described(bench, "worker")
            await learnt(bench)
            pid, second = await replaced(bench, pid, "worker")
            return [second, (await replaced(bench, pid, "worker"))[1]]

    (own, drawn), (other_own, other_drawn) = run(main())
    assert not own and not other_own, "both come from the template"
    assert drawn != other_drawn


@pytest.mark.slow
def test_a_module_that_a_worker_was_importing_for_long_is_not_left_out_forever(tmp_path: Path) -> None:
    """A busy machine is enough: the record rests, and ends in the middle of an import."""
    bench = bench_of(
        tmp_path, "import heavy, halting, json, os\nprint(json.dumps([halting.PID == os.getpid()]))", slots=1
    )

    async def main() -> Any:
        async with bench.open():
            pid, _ = await described(bench, "worker")
            await learnt(bench, 2)
            return (await replaced(bench, pid, "worker"))[1]

    assert run(main()) == [False]
    assert any(line.startswith("halting is not imported ahead") for line in bench.logged)


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


STARTED = """\
import heavy, json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1].partition("=")[2])
place = folder / f"{os.environ['EDL_ROUND']}-{os.environ['RANK']}"
place.with_suffix(".new").write_text(json.dumps([os.getpid(), heavy.PID == os.getpid(), sys.argv]))
place.with_suffix(".new").rename(place)
while not (folder / "last-step").exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_launchers_workers_come_back_with_what_the_first_ones_have_imported(tmp_path: Path) -> None:
    for name, text in HEAVY.items():
        script(tmp_path, text, f"site-packages/{name}")
    script(tmp_path, STARTED, "train.py")
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'site-packages'}"}
    job = Job(
        *(tmp_path, [], "etcd-embedded"),
        script=(str(tmp_path / "train.py"),),
        nnodes="1",
        options=("--max-restarts=5",),
        environment=environment,
    )

    def started(number: int) -> list[tuple[int, bool, list[str]]] | None:
        """The workers of a round by rank, when both have started."""
        files = [job.steps_folder / f"{number}-{rank}" for rank in range(2)]
        return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else None

    def round_of(number: int) -> list[tuple[int, bool, list[str]]]:
        return wait_until(lambda: started(number), f"round {number}") or []

    with job:
        node = job.start("a", nproc=2)
        first = round_of(1)
        node.says(LEARNT)
        kill_now(first[0][0])
        second = round_of(2)
        kill_now(second[1][0])
        third = round_of(3)
        job.stop_at(1)
        assert job.exit_codes() == {"a": 0}
    assert [[own for _, own, _ in world] for world in (first, second, third)] == [[True] * 2, [False] * 2, [False] * 2]
    assert len({pid for world in (first, second, third) for pid, _, _ in world}) == 6
    assert {tuple(argv) for world in (first, second, third) for _, _, argv in world} == {tuple(first[0][2])}
