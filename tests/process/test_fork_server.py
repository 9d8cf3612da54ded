"""Workers through a real fork server: they behave as under ``python script.py``, and none outlives its agent."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edl.adapters.processes import ForkServerProcesses
from edl.config import Standby
from edl.errors import StarterLost, WorkerStartError
from edl.ports import CommandKind, WorkerCommand
from edl.wire.process_events import ForkServerLost, WorkerExited, WorkerResumed, WorkersStopped, WorkerSuspended
from tests.process.fork_server_fixture import (
    DEADLINE_S,
    ROOT,
    Bench,
    Outcome,
    base_environment,
    kill_now,
    pin,
    python,
    run,
    script,
    script_bench,
    until,
    wait_gone,
)

EVERY = pytest.mark.parametrize("standby", list(Standby), ids=lambda standby: standby.value)

DESCRIBE = """
    import json, os, re, signal, sys
    here = sys.modules["__main__"]
    handlers = {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()}
    told = dict(
        argv=sys.argv, path=sys.path, name=__name__, file=__file__, same=here.__dict__ is globals(),
        spec=re.sub(' at 0x[0-9a-f]*', '', str(__spec__)),
        package=str(__package__), loader=type(__loader__).__name__, names=sorted(globals()),
        environment=dict(os.environ), original=sys.orig_argv, blocked=sorted(signal.pthread_sigmask(0, [])),
        descriptors=sorted(os.listdir("/proc/self/fd"))[:4], input=os.readlink("/proc/self/fd/0"),
        raw=[type(sys.stdout.buffer).__name__, sys.stdout.write_through, sys.stderr.write_through],
        cwd=os.getcwd(), handlers={k: v.partition(" at ")[0] for k, v in handlers.items()},
        wakeup=signal.set_wakeup_fd(-1),
    )
    print(json.dumps(told, sort_keys=True, indent=1))
"""


def once(bench: Bench, **more: str) -> Outcome:
    async def main() -> Outcome:
        async with bench.open():
            return await bench.run(**more)

    return run(main())


@EVERY
def test_a_script_cannot_tell_a_worker_from_the_interpreter(tmp_path: Path, standby: Standby) -> None:
    bench = script_bench(tmp_path, standby, DESCRIBE, "--lr", "0.1", "ä b")
    plain = python(tmp_path, bench.command.target, *bench.command.arguments, EXTRA="1", EMPTY="")
    outcome = once(bench, EXTRA="1", EMPTY="")
    assert json.loads(outcome.out) == json.loads(plain.out)
    assert (outcome.code, outcome.err) == (0, plain.err)


@pytest.mark.slow
@EVERY
def test_a_module_is_run_as_by_dash_m(tmp_path: Path, standby: Standby) -> None:
    script(tmp_path, "", "kit/__init__.py")
    script(tmp_path, DESCRIBE, "kit/train.py")
    script(tmp_path, DESCRIBE, "kit/__main__.py")
    for target in ("kit.train", "kit"):
        bench = Bench(tmp_path, WorkerCommand(CommandKind.MODULE, target, ("a",)), standby)
        before = os.getcwd()
        os.chdir(tmp_path)
        try:
            plain = python(tmp_path, "-m", target, "a")
            outcome = once(bench)
        finally:
            os.chdir(before)
        assert json.loads(outcome.out) == json.loads(plain.out)


ENDS = (
    "x = (",
    "raise SystemExit",
    "raise SystemExit(7)",
    "raise SystemExit('no data')",
    "import sys; sys.exit(300)",
    "import os; os._exit(5)",
    "import atexit; atexit.register(print, 'bye'); print('hi')",
    "def f():\n    raise ValueError('wrong') from KeyError('k')\nf()",
    "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__); 1/0",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start(); 1/0",
    "raise KeyboardInterrupt",
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "import warnings; warnings.warn('careful')",
)
"""Of scripts. The first is what a fork server finds when it looks for imports: nothing that compiles."""


@pytest.fixture(scope="module")
def interpreters_ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """How the plain interpreter ends with each text, as a script in this folder."""
    folder = tmp_path_factory.mktemp("ends")
    return folder, [python(folder, script(folder, text)) for text in ENDS]


@pytest.mark.slow
@EVERY
def test_ends_are_those_of_the_interpreter(interpreters_ends: tuple[Path, list[Outcome]], standby: Standby) -> None:
    folder, expected = interpreters_ends
    bench = script_bench(folder, standby, ENDS[0])

    async def main() -> list[Outcome]:
        async with bench.open():
            return [await bench.run() for text in ENDS if script(folder, text)]

    found = run(main())
    assert dict(zip(ENDS, found, strict=True)) == dict(zip(ENDS, expected, strict=True))


@EVERY
def test_a_crash_of_the_process_shows_where_python_was(tmp_path: Path, standby: Standby) -> None:
    outcome = once(script_bench(tmp_path, standby, "import os\ndef broken():\n    os.abort()\nbroken()\n"))
    assert outcome.code == -signal.SIGABRT
    assert "in broken" in outcome.err


@EVERY
def test_a_missing_script_is_named(tmp_path: Path, standby: Standby) -> None:
    bench = Bench(tmp_path, WorkerCommand(CommandKind.SCRIPT, str(tmp_path / "none.py")), standby)
    if standby is Standby.NONE:
        outcome = once(bench)
        assert (outcome.code, "can't open file" in outcome.err) == (2, True)
    else:
        with pytest.raises(WorkerStartError, match=r"none\.py"):
            once(bench)


def test_torch_style_error_file(tmp_path: Path) -> None:
    text = (
        "import os, sys\nif 'own' in os.environ: "
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(os.environ['own'])\n1/0\n"
    )
    bench = script_bench(tmp_path, Standby.FORK, text)
    path = tmp_path / "error.json"

    async def main() -> None:
        async with bench.open():
            await bench.run(TORCHELASTIC_ERROR_FILE=str(path))
            message = json.loads(path.read_text())["message"]
            assert message["message"] == "ZeroDivisionError: division by zero"
            assert message["extraInfo"]["timestamp"].isdigit()
            assert bench.command.target in message["extraInfo"]["py_callstack"]
            assert "edl" not in message["extraInfo"]["py_callstack"].replace(str(tmp_path), "")
            for own, stays in (
                ("mine", True),
                ('{"message": "division by zero, at step 3"}', True),
                ('{"message": {"message": "OSError: of a child, long ago", "extraInfo": {}}}', False),
            ):
                path.unlink()
                await bench.run(TORCHELASTIC_ERROR_FILE=str(path), own=own)
                assert (path.read_text() == own) == stays
                assert stays or json.loads(path.read_text())["message"]["message"].startswith("ZeroDivisionError")
            outcome = await bench.run(TORCHELASTIC_ERROR_FILE=str(tmp_path / "no" / "folder"))
            assert outcome.code == 1
            assert "cannot write the error file" in outcome.err

    run(main())


@EVERY
def test_programs(tmp_path: Path, standby: Standby) -> None:
    shell = shutil.which("sh")
    assert shell is not None
    bench = Bench(tmp_path, WorkerCommand(CommandKind.PROGRAM, "sh", ("-c", "echo $WHO $0; exit 3", "me")), standby)
    assert once(bench, WHO="I") == Outcome(3, "I me\n", "")


def test_a_program_that_cannot_be_started_is_an_error_and_no_worker(tmp_path: Path) -> None:
    script(tmp_path, "", "plain.txt")
    for target, reason in (("no-such-program", "No such file"), (str(tmp_path / "plain.txt"), "Permission denied")):
        bench = Bench(tmp_path, WorkerCommand(CommandKind.PROGRAM, target), Standby.NONE)
        with pytest.raises(WorkerStartError, match=reason) as caught:
            once(bench)
        assert target in str(caught.value)


@EVERY
def test_an_environment_of_a_megabyte(tmp_path: Path, standby: Standby) -> None:
    bench = script_bench(tmp_path, standby, "import os; print(sum(map(len, os.environ.values())))")
    # The kernel allows 128 KiB for one variable of an exec'ed program.
    more = {f"ENDPOINTS_{number}": "10.0.0.1:6170," * 8000 for number in range(10)}
    assert int(once(bench, **more).out) > 1_000_000


@EVERY
def test_output_is_not_buffered(tmp_path: Path, standby: Standby) -> None:
    text = "import sys, time\nprint('a', end='')\nsys.stderr.write('b')\nwhile True: time.sleep(60)\n"
    bench = script_bench(tmp_path, standby, text)

    async def main() -> None:
        async with bench.open():
            pid = await bench.spawn()
            await bench.text_in("worker", "a")
            await until(lambda: bench.outcome(0).err == "b", "b on stderr")
            await bench.processes.signal(pid, signal.SIGTERM)
            assert await bench.codes([pid]) == [-signal.SIGTERM]

    run(main())


def test_children_draw_different_random_numbers_and_keep_the_seed_they_set(tmp_path: Path) -> None:
    text = "import random, numpy\nprint(random.random(), numpy.random.rand())\nrandom.seed(1); print(random.random())"
    bench = script_bench(tmp_path, Standby.FORK, text)

    async def main() -> list[str]:
        async with bench.open():
            return (await bench.run()).out.splitlines() + (await bench.run()).out.splitlines()

    first, seeded, second, again = run(main())
    assert set(first.split()).isdisjoint(second.split())
    assert seeded == again


@pytest.mark.slow
@EVERY
def test_multiprocessing_forks_and_spawns(tmp_path: Path, standby: Standby) -> None:
    text = """
        import multiprocessing, os
        def square(x):
            return x * x, __name__
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(method, pool.map(square, [1, 2, 3]))
    """
    outcome = once(script_bench(tmp_path, standby, text))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "fork [(1, '__main__'), (4, '__main__'), (9, '__main__')]",
        "spawn [(1, '__mp_main__'), (4, '__mp_main__'), (9, '__mp_main__')]",
    ]


def test_a_module_beside_the_script_wins_over_one_imported_early(tmp_path: Path) -> None:
    script(tmp_path, "mine = 1", "secrets.py")
    script(tmp_path, "mine = 2", "json/__init__.py")
    text = "import json, secrets, sys\nif False: import numpy\nprint(secrets.mine, json.mine, 'numpy' in sys.modules)"
    assert once(script_bench(tmp_path, Standby.FORK, text)) == Outcome(0, "1 2 True\n", "")


def test_stops_and_continues_are_told(tmp_path: Path) -> None:
    bench = script_bench(tmp_path, Standby.FORK, "print('up')\nwhile True: __import__('time').sleep(60)")

    async def main() -> None:
        async with bench.open():
            pid = await bench.spawn()
            await bench.text_in("worker", "up")
            await bench.processes.signal(pid, signal.SIGSTOP)
            assert await bench.event() == WorkerSuspended(pid)
            os.kill(pid, signal.SIGCONT)
            assert await bench.event() == WorkerResumed(pid)
            await bench.processes.signal(pid, signal.SIGSTOP)
            assert await bench.event() == WorkerSuspended(pid)
            # SIGTERM reaches a stopped worker as well.
            await bench.processes.signal(pid, signal.SIGTERM)
            assert await bench.codes([pid]) == [-signal.SIGTERM]
            await bench.processes.signal(pid, signal.SIGTERM)

    run(main())


FAMILY = """
    import subprocess, sys, time
    rest = "while True: time.sleep(60)"
    inner = f"import time\\n{rest}"
    middle = f"import subprocess, sys, time\\nprint(subprocess.Popen([sys.executable, '-c', {inner!r}]).pid)\\n{rest}"
    child = subprocess.Popen([sys.executable, "-u", "-c", middle], stdout=subprocess.PIPE, text=True)
    away = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
    print(child.pid, child.stdout.readline().strip(), away.pid, "up")
    while True: time.sleep(60)
"""


async def family(bench: Bench, name: str = "worker") -> tuple[int, list[int]]:
    """A worker with a child, a grandchild, and a child that has left its session: its pid and theirs."""
    pid = await bench.spawn(name)
    words = (await bench.text_in(name, "up\n")).split()
    return pid, [int(word) for word in words[:3]]


@EVERY
def test_a_worker_takes_its_group_with_it(tmp_path: Path, standby: Standby) -> None:
    bench = script_bench(tmp_path, standby, FAMILY)

    async def main() -> int:
        async with bench.open():
            pid, (middle, inner, away) = await family(bench)
            group, outsider = [pin(middle), pin(inner)], pin(away)
            kill_now(pid)
            assert await bench.event() == WorkerExited(pid, -signal.SIGKILL)
            # The report comes when the group is gone already, and leaves other sessions alone.
            wait_gone(group)
            os.kill(away, 0)
            return outsider

    # ... which end with the fork server.
    wait_gone([run(main())])


@pytest.mark.slow
@EVERY
def test_nothing_survives_the_agent(tmp_path: Path, standby: Standby) -> None:
    target = script(tmp_path, FAMILY)
    agent_text = f"""
        import asyncio, os, sys
        from pathlib import Path
        from edl.config import Standby
        from edl.ports import CommandKind, WorkerCommand
        from tests.process.fork_server_fixture import Bench
        from tests.process.test_fork_server import family

        async def main():
            command = WorkerCommand(CommandKind.SCRIPT, {target!r})
            bench = Bench(Path({str(tmp_path)!r}), command, Standby({standby.value!r}), 2)
            async with bench.open():
                pids = [bench.processes.fork_server_pid]
                for name in ("one", "two"):
                    pid, others = await family(bench, name)
                    pids += [pid, *others]
                print(*pids, flush=True)
                await bench.event()

        asyncio.run(main())
    """
    agent = subprocess.Popen(
        [sys.executable, script(tmp_path, agent_text, "agent.py")],
        env=base_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    with agent, agent.stdout:
        pins = [pin(int(word)) for word in agent.stdout.readline().split()]
        assert len(pins) == 9
        agent.kill()
    wait_gone(pins)


def test_an_import_does_not_survive_the_agent(tmp_path: Path) -> None:
    imports = tmp_path / "pid"
    text = f"import os, time; open({str(imports)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)"
    script(tmp_path, text, "endless.py")
    target = script(tmp_path, "print('ran')")
    agent_text = f"""
        import asyncio
        from pathlib import Path
        from edl.config import Standby
        from edl.ports import CommandKind, WorkerCommand
        from tests.process.fork_server_fixture import Bench

        async def main():
            bench = Bench(Path({str(tmp_path)!r}), WorkerCommand(CommandKind.SCRIPT, {target!r}), Standby.FORK, 2)
            bench.preload = ("endless",)
            async with bench.open():
                pass

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, script(tmp_path, agent_text, "agent.py")], env=base_environment()) as agent:
        run(until(lambda: imports.exists() and imports.read_text().endswith(" "), "the import"))
        forked = pin(int(imports.read_text()))
        agent.kill()
    wait_gone([forked])


@pytest.mark.slow
@EVERY
def test_a_fork_server_that_is_killed_takes_its_workers_and_is_replaced(tmp_path: Path, standby: Standby) -> None:
    bench = script_bench(tmp_path, standby, FAMILY)

    async def main() -> None:
        async with bench.open():
            pid, (middle, inner, away) = await family(bench)
            pins = [pin(pid), pin(middle), pin(inner), pin(bench.processes.fork_server_pid)]
            kill_now(bench.processes.fork_server_pid)
            kill_now(away)  # out of everybody's reach: only an orderly end of the fork server finds it
            assert await bench.event() == WorkerExited(pid, -signal.SIGKILL)
            assert await bench.event() == ForkServerLost("killed by signal 9")
            wait_gone(pins)
            with pytest.raises(WorkerStartError, match="fork server is gone"):
                await bench.spawn()
            await bench.processes.signal(pid, signal.SIGTERM)
            await asyncio.wait_for(bench.processes.warm(), DEADLINE_S)
            pid, _ = await family(bench, "second")
            await bench.processes.signal(pid, signal.SIGKILL)
            assert await bench.codes([pid]) == [-signal.SIGKILL]

    run(main())


def test_signals_meant_for_the_agent_do_not_end_the_fork_server(tmp_path: Path) -> None:
    bench = script_bench(tmp_path, Standby.FORK, "print(1)")

    async def main() -> None:
        async with bench.open():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                os.kill(bench.processes.fork_server_pid, number)
            assert (await bench.run()).code == 0

    run(main())


@pytest.mark.slow
def test_many_at_once_and_each_spawned_standby_is_used_once(tmp_path: Path) -> None:
    bench = script_bench(tmp_path, Standby.SPAWN, "import os; print(os.getpid())", slots=2)

    async def main() -> None:
        async with bench.open():
            names = [f"w{number}" for number in range(7)]
            pids = await asyncio.gather(*(bench.spawn(name) for name in names))
            assert len(set(pids)) == 7
            assert await bench.codes(pids) == [0] * 7
            assert [int(bench.outcome(0, name).out) for name in names] == pids

    run(main())


def test_a_worker_whose_caller_gave_up_is_killed(tmp_path: Path) -> None:
    bench = script_bench(tmp_path, Standby.FORK, "while True: __import__('time').sleep(60)")

    async def main() -> None:
        async with bench.open():
            caller = asyncio.ensure_future(bench.spawn("lost"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            pid = await bench.spawn("kept")
            await bench.processes.signal(pid, signal.SIGKILL)
            # Nothing is heard of the one that nobody knows.
            assert await bench.event() == WorkerExited(pid, -signal.SIGKILL)
            children = Path(f"/proc/{bench.processes.fork_server_pid}/task/{bench.processes.fork_server_pid}/children")
            await until(lambda: children.read_text() == "", "the end of the unwanted worker")

    run(main())


TREE = """
    import subprocess, sys, time
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(words, start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@EVERY
def test_a_silent_agents_workers_are_killed_with_all_that_they_have_started(tmp_path: Path, standby: Standby) -> None:
    async def main() -> None:
        async with script_bench(tmp_path, standby, TREE).open() as bench:
            pid = await bench.spawn()
            elsewhere = pin(int(await bench.text_in("worker", "\n")))
            until_s = time.monotonic() + 0.5
            bench.processes.entitle(until_s)
            event = await bench.event()
            assert time.monotonic() >= until_s
            assert isinstance(event, WorkersStopped)
            assert event.reason.startswith("the launcher was silent for 0.")
            assert await bench.codes([pid]) == [-signal.SIGKILL]
            wait_gone([elsewhere])
            # Nothing runs before more has been said, and everything after it.
            late = await bench.spawn("late")
            assert await bench.codes([late]) == [-signal.SIGKILL]
            bench.processes.entitle(time.monotonic() + DEADLINE_S)
            again = await bench.spawn("again")
            await bench.text_in("again", "\n")
            await bench.processes.signal(again, signal.SIGKILL)
            assert await bench.codes([again]) == [-signal.SIGKILL]

    run(main())


def test_a_fork_server_that_does_not_answer_is_killed_with_all_that_comes_from_it(tmp_path: Path) -> None:
    async def main() -> None:
        bench = script_bench(tmp_path, Standby.FORK, TREE)
        bench.answer_s = 0.5
        async with bench.open():
            bench.processes.entitle(time.monotonic() + DEADLINE_S)
            pid = await bench.spawn()
            pins = [pin(pid), pin(int(await bench.text_in("worker", "\n"))), pin(bench.processes.fork_server_pid)]
            os.kill(bench.processes.fork_server_pid, signal.SIGSTOP)
            with pytest.raises(StarterLost):
                await bench.spawn("never")
            why = "the fork server has not answered for 0.5 s: killing it and its workers"
            assert await bench.event() == WorkersStopped(why)
            assert await bench.event() == WorkerExited(pid, -signal.SIGKILL)
            assert isinstance(await bench.event(), ForkServerLost)
            wait_gone(pins)
            await bench.processes.warm()
            again = await bench.spawn("again")
            await bench.processes.signal(again, signal.SIGKILL)
            assert await bench.codes([again]) == [-signal.SIGKILL]

    run(main())


def test_nobody_waits_for_room_in_the_socket_of_a_fork_server_that_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        bench = script_bench(tmp_path, Standby.FORK, TREE)
        bench.answer_s = 0.5
        async with bench.open():
            pid = await bench.spawn()
            os.kill(bench.processes.fork_server_pid, signal.SIGSTOP)
            bench.processes.entitle(time.monotonic() + DEADLINE_S)
            signals = [bench.processes.signal(pid, signal.SIGCONT) for _ in range(5000)]
            await asyncio.wait_for(asyncio.gather(*signals), DEADLINE_S)
            assert bench.processes.fork_server_pid == 0

    run(main())


def test_a_killed_fork_servers_workers_leave_nobody_behind_in_other_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        async with script_bench(tmp_path, Standby.FORK, TREE).open() as bench:
            await bench.spawn(EDL_AGENT=f"edl-test-{os.getpid()}")
            elsewhere = pin(int(await bench.text_in("worker", "\n")))
            os.kill(bench.processes.fork_server_pid, signal.SIGKILL)
            while not isinstance(await bench.event(), ForkServerLost):
                pass
            wait_gone([elsewhere])

    run(main())


def test_a_framework_that_is_missing_is_named_with_advice(tmp_path: Path) -> None:
    hidden = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    script(tmp_path, hidden, "hidden/torch/__init__.py")
    command = WorkerCommand(CommandKind.SCRIPT, script(tmp_path, "import torch"))
    environment = base_environment(PYTHONPATH=f"{tmp_path / 'hidden'}:{ROOT}")

    async def main() -> str:
        processes = ForkServerProcesses(command, Standby.FORK, 1, environment)
        with pytest.raises(WorkerStartError) as caught:
            await asyncio.wait_for(processes.warm(), DEADLINE_S)
        await processes.close()
        return str(caught.value)

    message = run(main())
    assert "ModuleNotFoundError: No module named 'torch'" in message
    assert f"{sys.executable} -m pip install torch" in message


def test_a_preload_that_starts_threads_makes_it_spawn_instead(tmp_path: Path) -> None:
    text = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True, name='ticker').start()"
    )
    script(tmp_path, text, "ticking.py")
    bench = script_bench(tmp_path, Standby.FORK, "import ticking; print('ran')")
    bench.preload = ("ticking",)

    async def main() -> None:
        async with bench.open():
            assert "ticker" in bench.warmed
            assert await bench.run() == Outcome(0, "ran\n", "")

    run(main())


def test_edl_is_the_agents_own_wherever_the_worker_runs(tmp_path: Path) -> None:
    """An ``edl`` beside the script or in the current directory is not taken for this one by the helpers."""
    script(tmp_path, "raise SystemExit('the wrong edl')", "edl/__init__.py")
    bench = script_bench(tmp_path, Standby.NONE, "print('ran')")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert once(bench, PYTHONPATH="") == Outcome(0, "ran\n", "")
    finally:
        os.chdir(before)
