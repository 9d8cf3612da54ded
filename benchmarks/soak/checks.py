"""What must hold of the steps that workers report, all the time. Pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LATE_LINES = 1
"""Steps that a worker may report after a later round has begun: it may have been stopped just before it wrote."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """One line of a worker's step log. ``t``: monotonic clock of the host, in seconds."""

    t: float
    step: int
    rank: int
    world: int
    round: int
    pid: int
    node: str
    loss: float | None = None


@dataclass(slots=True)
class StepCheck:
    """Follows one job. Give it lines in order of time; those of different workers may be slightly out of order."""

    redone_allowed: int
    """Steps that one change of the world may cost. The steps of a single worker come on top if it was lost: nobody else
    has their commits before they are copied."""
    losses: Sequence[float] | None = None
    """Of an undisturbed run, from step 1; may grow while steps are checked. ``None``: losses are not compared."""
    tolerance: float = 1e-6
    last: int = 0
    """The last step that any worker has reported."""
    rounds: int = 0
    redone: int = 0
    compared: int = 0
    """Number of losses that were compared."""
    wrong: list[str] = field(default_factory=list)
    uncompared: list[StepLine] = field(default_factory=list)
    """Lines whose losses are still to be compared, because the undisturbed run has not come to their steps yet."""
    _lone_from: int = 1
    """The first step since which a single worker has trained."""
    _newest: int = 0
    _newest_began_s: float = 0.0
    _seats: dict[tuple[int, int], int] = field(default_factory=dict)
    _worlds: dict[int, int] = field(default_factory=dict)
    _starts: dict[int, int] = field(default_factory=dict)
    _positions: dict[tuple[int, int], int] = field(default_factory=dict)
    _late: collections.Counter[tuple[int, int]] = field(default_factory=collections.Counter)

    def take(self, line: StepLine) -> None:
        """Check one line."""
        self._check_seat(line)
        self._check_order(line)
        self._check_loss(line)
        if line.round == self._newest:
            self.last = max(self.last, line.step)
        elif line.t > self._newest_began_s:
            self._late[line.round, line.rank] += 1
            if self._late[line.round, line.rank] > LATE_LINES:
                self._report(line, f"was made in round {line.round}, although round {self._newest} had begun")

    def _check_seat(self, line: StepLine) -> None:
        """A rank of a round belongs to one process, and all of them see the same size."""
        pid = self._seats.setdefault((line.round, line.rank), line.pid)
        world = self._worlds.setdefault(line.round, line.world)
        if pid != line.pid:
            self._report(line, f"rank {line.rank} of round {line.round} is two processes, {pid} and {line.pid}")
        if world != line.world:
            self._report(line, f"round {line.round} has {world} and {line.world} workers")

    def _check_order(self, line: StepLine) -> None:
        if line.round > self._newest:
            self._begin(line)
        before = self._positions.get((line.round, line.rank))
        expected = self._starts.get(line.round, line.step) if before is None else before + 1
        if line.step != expected:
            self._report(line, f"came where step {expected} was due")
        self._positions[line.round, line.rank] = line.step

    def _begin(self, line: StepLine) -> None:
        alone = self._worlds.get(self._newest) == 1
        self._lone_from = min(self._lone_from, self._starts[self._newest]) if alone else self.last + 1
        allowed = self.redone_allowed + self.last + 1 - self._lone_from
        self.rounds += 1
        self._newest, self._newest_began_s = line.round, line.t
        self._starts[line.round] = line.step
        again = self.last + 1 - line.step
        if again < 0:
            self._report(line, f"was the first of round {line.round}, although only {self.last} had been made")
        elif again > allowed:
            self._report(line, f"of round {line.round} repeats {again} steps, {allowed} are promised")
        self.redone += max(0, again)

    def compare(self) -> None:
        """Compare the losses that can be compared by now."""
        waiting, self.uncompared = self.uncompared, []
        for line in waiting:
            self._check_loss(line)

    def _check_loss(self, line: StepLine) -> None:
        if line.loss is None or self.losses is None:
            return
        if line.step > len(self.losses):
            self.uncompared.append(line)
            return
        self.compared += 1
        right = self.losses[line.step - 1]
        if not abs(line.loss - right) <= self.tolerance * max(1.0, abs(right)):
            self._report(line, f"has the loss {line.loss!r}, without faults it is {right!r}")

    def _report(self, line: StepLine, text: str) -> None:
        self.wrong.append(f"step {line.step} of rank {line.rank} on {line.node} (pid {line.pid}): {text}")


# --- records of a data set -------------------------------------------------------------------------------------------


def committed(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[int, list[int]], list[str]]:
    """Records by epoch along the line of commits that leads to the newest one, and the commits that nobody has written
    down.

    A line is either the beginning of an era (``era``, ``from_era``, ``from_commit``) or the records that one worker
    adds to a commit (``era``, ``commit``, ``epoch``, ``records``).
    """
    began: dict[int, tuple[int, int]] = {}
    steps: dict[tuple[int, int], list[Mapping[str, Any]]] = collections.defaultdict(list)
    for line in lines:
        if "from_era" in line:
            began[line["era"]] = (line["from_era"], line["from_commit"])
        else:
            steps[line["era"], line["commit"]].append(line)
    if not steps:
        return {}, []
    era, commit = max(steps)
    found: dict[int, list[int]] = collections.defaultdict(list)
    missing = []
    while commit > 0:
        first = began.get(era, (0, 0))[1]
        for number in range(first + 1, commit + 1):
            if (era, number) not in steps:
                missing.append(f"nobody has written down commit {number} of era {era}")
            for line in steps[era, number]:
                found[line["epoch"]] += line["records"]
        era, commit = began.get(era, (0, 0))
    return found, missing


def miscounted(found: Mapping[int, Sequence[int]], records: int, whole_epochs: int) -> list[str]:
    """Epochs in which a record of ``0 … records - 1`` was counted twice, or never in one of the first
    ``whole_epochs``."""
    wrong = []
    for epoch, counted in sorted(found.items()):
        counts = collections.Counter(counted)
        twice = sorted(record for record, count in counts.items() if count > 1)
        never = sorted(set(range(records)) - counts.keys()) if epoch < whole_epochs else []
        if twice:
            wrong.append(f"epoch {epoch}: {len(twice)} records were counted more than once, such as {twice[:5]}")
        if never:
            wrong.append(f"epoch {epoch}: {len(never)} records were never counted, such as {never[:5]}")
    missing = [epoch for epoch in range(whole_epochs) if epoch not in found]
    return wrong + [f"epoch {epoch} was not counted at all" for epoch in missing]


# --- leaders ---------------------------------------------------------------------------------------------------------


def two_leaders(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Rounds that more than one Master has formed. ``lines``: of the job's history, of one run."""
    terms: dict[int, set[int]] = collections.defaultdict(set)
    for line in lines:
        if line.get("kind") == "round" and not line.get("copied"):
            terms[int(line["body"]["round"])].add(int(line["term"]))
    return [
        f"round {number} was formed by the Masters of terms {sorted(found)}"
        for number, found in sorted(terms.items())
        if len(found) > 1
    ]
