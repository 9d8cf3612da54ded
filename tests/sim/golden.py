"""Stories as text: what happens in a simulated job, and the reasons that the machines give for what they do.

A file under ``tests/sim/golden`` has blocks: one command a line, ``----``, and below it what the machines decided from
then on: each new reason of the Master, and each change of phase of an agent. ``pytest tests/sim/test_golden.py
--rewrite`` writes the files again; read the difference before you commit it. Commands:

======================= ===============================================================
``job 1:3 KEY=VALUE …`` nodes; ``level``, ``restarts``, ``script`` (plain, rejoins, sharded), ``seed``
``start a b …``         start launchers, one after the other
``wait 2.5``            let seconds pass
``kill-worker b 1``     SIGKILL the worker in a slot
``crash a``             SIGKILL a launcher; ``pause a`` and ``resume a``: SIGSTOP and SIGCONT
``sigterm a``           tell a launcher to leave
``partition a``         isolate a host; ``heal`` ends all partitions
``store away``          the store answers nobody; ``store back``
``resize 2``            ask for a size; ``set lr-scale=0.5``: for settings; ``save``, ``kill``: the switches
======================= ===============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from edl.agent.machine import events as ag
from edl.agent.machine.state import AgentState
from edl.config import FaultTolerance, JobSpec, NodeRange, Timeouts
from edl.master import events as ev
from edl.master.state import MasterState
from edl.testing.sim.checks import Checks
from edl.testing.sim.stepping import Script
from edl.testing.sim.world import SimWorld
from edl.types import JobId, NodeId
from edl.wire.purpose import Purpose
from edl.wire.scale_requests import Resize

RULE = "----"
SCRIPTS = {"plain": None, "rejoins": Script(), "sharded": Script(sharded=True)}
PAUSE_S = 0.05
"""Between two launchers that start one after the other, so that the first becomes the Master."""


class Told:
    """One story, as far as it has been told."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._reason = ""
        self.world: SimWorld
        self._commands: dict[str, Callable[[Sequence[str]], None]] = {
            "job": self._job,
            "start": self._start,
            "wait": lambda words: self.world.run(float(words[0])),
            "kill-worker": lambda words: self.world.kill_worker(words[0], int(words[1])),
            "crash": lambda words: self.world.crash(words[0]),
            "pause": lambda words: self.world.launchers[NodeId(words[0])].pause(),
            "resume": lambda words: self.world.launchers[NodeId(words[0])].resume(),
            "sigterm": lambda words: self.world.launchers[NodeId(words[0])].interrupt(15),
            "partition": lambda words: self._ignore(self.world.partition(words)),
            "heal": lambda words: self.world.network.heal_all(),
            "store": self._store,
            "resize": lambda words: self.world.ask_for(Resize(int(words[0]), "somebody", "", 0, "", False)),
            "set": lambda words: self.world.request_settings(" ".join(words)),
            "save": lambda words: self.world.ask(Purpose.SAVE, by_file=False),
            "kill": lambda words: self.world.ask(Purpose.KILL, by_file=False),
        }

    def block(self, commands: Sequence[str]) -> list[str]:
        """Do this; returns what the machines decided."""
        self._lines = []
        for command in commands:
            name, *words = command.split()
            self._commands[name](words)
        return self._lines

    def _ignore(self, value: object) -> None:
        """A command has no result."""

    def _job(self, words: Sequence[str]) -> None:
        settings = dict(word.split("=", 1) for word in words[1:])
        low, _, high = words[0].partition(":")
        level = FaultTolerance(settings.pop("level", "elastic"))
        restarts, seed = int(settings.pop("restarts", "3")), int(settings.pop("seed", "7"))
        script = SCRIPTS[settings.pop("script", "plain")]
        assert not settings, f"unknown: {settings}"
        timeouts = Timeouts(recover_s=20.0, shutdown_s=1.0, rejoin_s=2.0, boundary_s=5.0)
        spec = JobSpec(JobId("story"), NodeRange(int(low), int(high or low)), restarts, level, timeouts)
        self.world = SimWorld(seed, spec, total_s=1000.0, script=script)

    def _start(self, words: Sequence[str]) -> None:
        for name in words:
            self.world.start(name)
            self.world.run(PAUSE_S)

    def _store(self, words: Sequence[str]) -> None:
        if words[0] == "away":
            self.world.store.away = True
        else:
            self.world.store.come_back()

    # --- what the machines decide ------------------------------------------------------------------------------------

    def master_stepped(self, decision: ev.Decision) -> None:
        """A Master has decided."""
        if decision.reason and decision.reason != self._reason:
            self._reason = decision.reason
            self._lines.append(f"Master: {decision.reason}")

    def agent_stepped(self, before: AgentState, decision: ag.Decision) -> None:
        """An agent has decided."""
        after = decision.state
        if after.phase is not before.phase:
            self._lines.append(f"{after.info.node}: {before.phase.value} -> {after.phase.value}")


def play(text: str) -> str:
    """The story again, with what the machines decide now."""
    told = Told()
    on_master, on_agent = Checks.master_stepped, Checks.agent_stepped

    def master(
        self: Checks, before: MasterState, events: Sequence[ev.Event], decision: ev.Decision, where: str
    ) -> None:
        on_master(self, before, events, decision, where)
        told.master_stepped(decision)

    def agent(self: Checks, before: AgentState, event: ag.Event, decision: ag.Decision, now_s: float) -> None:
        on_agent(self, before, event, decision, now_s)
        told.agent_stepped(before, decision)

    written: list[str] = []
    with mock.patch.object(Checks, "master_stepped", master), mock.patch.object(Checks, "agent_stepped", agent):
        for block in text.strip().split("\n\n"):
            comments = [line for line in block.splitlines() if line.startswith("#")]
            lines = [line for line in block.splitlines() if not line.startswith("#")]
            commands = lines[: lines.index(RULE)] if RULE in lines else lines
            found = told.block(commands) if commands else []
            written.append("\n".join([*comments, *commands, *([RULE, *found] if commands else [])]))
    told.world.close()
    return "\n\n".join(written) + "\n"


def stories() -> list[Path]:
    """All files."""
    return sorted((Path(__file__).parent / "golden").glob("*.txt"))
