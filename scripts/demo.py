"""Break a small training job on purpose and watch it go on. Run it as `scripts/demo`, which prepares Python for it.

Three nodes on this host (a launcher and one worker each, with a store member each) train a network on scikit-learn's
digits. Then a worker, a node and the node of the Master are killed with SIGKILL, and nodes join. The script uses
edl.torch or edl.paddle, so the workers that live keep their process; with --plain it does not know edl, and all workers
start again. All numbers come from lines that the training script writes after each step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts.demo_parts.measure import Recovery, StepLogs, StepRecord, first_whole_steps, missing_steps, recovery
from scripts.demo_parts.nodes import ROOT, DemoError, Nodes, Training, end, now_s, pause
from scripts.demo_parts.show import Chapter, Show

SCRIPTS = {"torch": "examples/03-elastic-torch/train.py", "paddle": "examples/04-elastic-paddle/train.py"}
PLAIN_SCRIPTS = {"torch": "examples/01-digits-torch/train.py", "paddle": "examples/02-digits-paddle/train.py"}
STEPS_BETWEEN = 25
"""Undisturbed steps before the next happening."""
TIMEOUT_S = 60.0
"""The longest wait for any one thing."""
A_MOMENT_S = 1e-6
"""More than the rounding of a sum of times."""
CLEAN_DEATH_S = 3.0
"""All processes of a node must be gone this long after its launcher was killed."""


class Demo:
    """The story, chapter by chapter. Every method raises `DemoError` when edl does not keep its promise."""

    def __init__(self, nodes: Nodes, logs: StepLogs, show: Show, steps: int, *, elastic: bool) -> None:
        """``elastic``: the script uses edl, so a replaced worker comes after the others have gone on."""
        self._elastic = elastic
        self._nodes = nodes
        self._logs = logs
        self._show = show
        self._steps = steps
        self._latest: StepRecord | None = None
        self._done = 0
        self.chapters: list[Chapter] = []

    def tell(self) -> None:
        """The whole story, up to the end of the training."""
        self.begin()
        self.kill_worker()
        gone = self.kill_node("a node that is not the Master's", of_master=False)
        self.add_node(gone, f"{gone} came back")
        self.kill_node("the node of the Master", of_master=True)
        self.add_node("node-d", "a new node joined: node-d")
        self._show.say("now training runs to its end")
        self._wait(self._nodes.finished, "the training to end", 3 * TIMEOUT_S)
        skipped = missing_steps(self._logs.records, self._steps)
        if skipped:
            raise DemoError(f"training ended, but nobody did step {', '.join(map(str, skipped[:10]))}")

    def begin(self) -> None:
        """Start three nodes and wait until all of them train."""
        for name in ("node-a", "node-b", "node-c"):
            self._nodes.start(name)
        self._show.say("started node-a, node-b and node-c: a launcher, a store member and one worker each")
        self._wait(self._three_ranks_step, "all three ranks to step", 2 * TIMEOUT_S)
        self._wait_for_store()
        self._show.say(f"all 3 ranks train; the Master is on {self._master()}")

    def kill_worker(self) -> None:
        """SIGKILL one worker."""
        self._settle()
        master = self._master()
        latest_round = max(record.round for record in self._logs.records)
        workers = sorted({(r.rank, r.pid) for r in self._logs.records if r.round == latest_round})
        owners = {pid: self._nodes.owner(pid) for _, pid in workers}
        pid = next((pid for _, pid in workers if owners[pid] not in (None, master)), None)
        if pid is None:
            raise DemoError(f"cannot tell which worker belongs to which node: {owners}")
        happened_s = self._nodes.kill_worker(pid)
        name, world = owners[pid], len(workers)
        self._show.say(f"killed the worker of {name} (SIGKILL to process {pid}) ...")
        found = self._follow(f"killed the worker of {name}", happened_s, world - 1 if self._elastic else world)
        if self._elastic:
            # On a slow machine the new worker may be there before the others have formed a world without it.
            if found.world_after < world:
                went_on_s = happened_s + found.seconds + A_MOMENT_S
                self._follow(f"{name} replaced its worker", went_on_s, world, planned=True)
            self._show.say(f"  how they came into this world, says edl status: {self._nodes.ways()}")

    def kill_node(self, which: str, *, of_master: bool) -> str:
        """SIGKILL a launcher and see that nothing of its node survives. Returns the name of the node."""
        self._settle()
        master = self._master()
        name = master if of_master else next(name for name in self._nodes.names if name != master)
        world = len(self._nodes.names)
        happened_s, living = self._nodes.kill(name)
        self._show.say(f"killed {name}, {which} (SIGKILL to its launcher) ...")
        self._follow(f"killed {name}, {which}", happened_s, world - 1)
        while living() and now_s() < happened_s + CLEAN_DEATH_S:
            pause(0.1)
        if left := living():
            names = ", ".join(f"{process.pid} ({process.name()})" for process in left)
            end(left)
            raise DemoError(f"{name}'s launcher was killed, but {CLEAN_DEATH_S:g} s later these still ran: {names}")
        if of_master:
            self._show.say(f"the Master is now on {self._master()}")
        return name

    def add_node(self, name: str, what: str) -> None:
        """Start a launcher and wait until its worker trains with the others and the store has three members again."""
        self._settle()
        world = len(self._nodes.names)
        happened_s = now_s()
        self._nodes.start(name)
        self._show.say(f"starting {name}; it takes over the store address that is free ...")
        self._follow(what, happened_s, world + 1, planned=True)
        self._wait_for_store()

    def _follow(self, what: str, happened_s: float, world: int, *, planned: bool = False) -> Recovery:
        """Wait until all ranks of the next world step, and report what it cost. A script that uses edl loses at most
        the interrupted step, and none where the change was ``planned``."""
        found: Recovery | None = None

        def recovered() -> bool:
            nonlocal found
            found = recovery(self._logs.records, happened_s, least_world=world)
            return found is not None

        self._wait(recovered, f"all {world} ranks to step again after: {what}", TIMEOUT_S)
        assert found is not None  # noqa: S101 (what `recovered` has just seen to)
        self.chapters.append(Chapter(what, found))
        self._show.say(
            f"  {found.seconds:.2f} s later all {found.world_after} ranks step again; {found.standstill_s:.2f} s "
            f"passed between the last step before and the first one after; steps done twice: {found.redone}"
        )
        if self._elastic and found.redone > (0 if planned else 1):
            raise DemoError(f"{found.redone} steps were done twice after: {what}")
        return found

    def _settle(self) -> None:
        """Some undisturbed steps, so that one happening does not run into the next."""
        goal = self._done + STEPS_BETWEEN
        if goal + STEPS_BETWEEN > self._steps:
            raise DemoError(f"training is nearly over ({self._done} of {self._steps} steps): ask for more with --steps")
        self._wait(lambda: self._done >= goal, f"step {goal}", TIMEOUT_S)

    def _three_ranks_step(self) -> bool:
        whole = first_whole_steps(self._logs.records)
        return bool(whole) and whole[-1].world == 3

    def _wait_for_store(self) -> None:
        """With two of three members the store lives, but must not lose another: so wait for the third."""
        self._wait(self._nodes.store_is_whole, "all three members of the store to be healthy", TIMEOUT_S)

    def _master(self) -> str:
        """Node of the Master; waits until one is elected."""
        limit_s = now_s() + TIMEOUT_S
        while True:
            self._look()
            try:
                return self._nodes.master()
            except DemoError:
                if now_s() > limit_s:
                    raise

    def _wait(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        until_s = now_s() + limit_s
        while not condition():
            over = self._nodes.finished()
            self._look()
            if condition():
                return
            if over:
                raise DemoError(f"training was over while waiting for {what}: ask for more with --steps")
            if now_s() > until_s:
                raise DemoError(f"waited {limit_s:g} s for {what}")
            pause(0.1)

    def _look(self) -> None:
        """Read the step logs, show how far it is, and check that all launchers are well."""
        for record in self._logs.poll():
            self._done = max(self._done, record.step)
            if record.rank == 0:
                self._latest = record
        self._show.step(self._done, self._latest)
        self._nodes.check()


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--framework", choices=sorted(SCRIPTS), default="torch")
    parser.add_argument("--plain", action="store_true", help="train with a script that does not know edl")
    parser.add_argument("--steps", type=int, default=500, help="global steps of the training (default: 500)")
    parser.add_argument("--step-time", type=float, default=0.15, help="seconds that each step sleeps (default: 0.15)")
    parser.add_argument("--workdir", type=Path, help="an empty or new folder for logs (default: a new temporary one)")
    return parser.parse_args()


def report(show: Show, demo: Demo, workdir: Path) -> None:
    """The table, and what came out of the training."""
    show.print("")
    show.table(demo.chapters)
    try:
        result = json.loads((workdir / "train" / "result.json").read_text())
    except FileNotFoundError:
        raise DemoError("all launchers ended with status 0, but rank 0 has not written result.json") from None
    loss, accuracy = result["loss"], result["accuracy"]
    show.print(f"trained {result['steps']} steps: final loss {loss:.4f}, accuracy {accuracy:.1%} on digits never seen")
    if accuracy < 0.9:
        raise DemoError(f"an accuracy of {accuracy:.1%} is too low: an undisturbed training reaches 95 % or more")


def explain(show: Show, nodes: Nodes, error: DemoError) -> None:
    """What went wrong, with the last words of each launcher."""
    show.print(f"\nFAILED: {error}")
    for path, text in nodes.log_tails(15):
        show.print(f"\n--- the end of {path}\n{text}")


def run(options: argparse.Namespace, workdir: Path) -> int:
    """Tell the story; whatever happens, end every process that was started."""
    training = Training(
        ROOT / (PLAIN_SCRIPTS if options.plain else SCRIPTS)[options.framework],
        (
            *("--workdir", str(workdir / "train"), "--step-log", str(workdir / "steps")),
            *("--steps", str(options.steps), "--step-time", str(options.step_time)),
            *(("--checkpoint-every", "5") if options.plain else ()),
        ),
        () if options.plain else ("--checkpoint-dir", str(workdir / "checkpoints")),
    )
    show = Show(options.steps)
    nodes = Nodes(f"demo-{options.framework}", workdir, training)
    demo = Demo(nodes, StepLogs(workdir / "steps"), show, options.steps, elastic=not options.plain)
    show.print("each node runs: python " + " ".join(nodes.launch_command("NAME")[1:]) + "\n")
    show.open()
    try:
        demo.tell()
        show.close()
        report(show, demo, workdir)
    except DemoError as error:
        show.close()
        explain(show, nodes, error)
        return 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        show.close()
        nodes.close()
        shutil.rmtree(workdir / "tmp", ignore_errors=True)
        show.print(f"logs: {workdir}")
    return 0


def main() -> int:
    """Exit status: 0 all promises kept, 1 not, 130 or 143 when interrupted."""
    options = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    workdir: Path = (options.workdir or Path(tempfile.mkdtemp(prefix="edl-demo-"))).resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    if any(workdir.iterdir()):
        print(f"scripts/demo: --workdir {workdir} is not empty; give a new folder", file=sys.stderr)
        return 2
    try:
        return run(options, workdir)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
