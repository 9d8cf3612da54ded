"""The checkpoint directory in the simulation, and what pservers do for a cut."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ps.protocol import messages
from tests.sim.ps_net import Violation
from tests.sim.ps_node import Bucket, Id, Node

if TYPE_CHECKING:
    from tests.sim.ps_world import PsSim

Place = tuple[int, int, Id]
"""Bucket, row, push."""


class Disk:
    """Checkpoints that were written, and the rows that they must contain."""

    def __init__(self, sim: PsSim) -> None:
        self.sim = sim
        self.top = 0
        self.parts: dict[int, dict[int, dict[int, Bucket]]] = {}
        self.cuts: dict[int, dict[int, Bucket]] = {}
        self.steps: dict[int, str] = {}
        self.expected: dict[int, frozenset[Place]] = {}
        """By cut: what was acknowledged when all had stopped for it."""
        self.bad: set[int] = set()
        self.said: dict[str, Any] = {}

    def run(self, number: int) -> str:
        return f"cut-{number}"

    def broken(self, cut: messages.Cut) -> bool:
        return cut.number in self.bad

    def load(self, run: str, bucket: int) -> Bucket:
        return self.cuts[int(run.split("-")[1])][bucket].copy()

    def must_have(self, run: str) -> None:
        if int(run.split("-")[1]) not in self.cuts:
            raise Violation(f"{run} was told to be complete")

    def say(self, node: Node, word: Any) -> None:
        self.said[node.name] = word
        node.say(word)

    def say_again(self, node: Node) -> None:
        if node.name in self.said:
            node.say(self.said[node.name])

    def work(self, node: Node, cut: messages.Cut, chart: messages.PlacementMap) -> None:
        """A phase of a cut has been ordered; it takes a while."""
        if cut.phase == "mark":
            self.top = max(self.top, cut.number)
            owner = messages.unpack(chart.owner, self.sim.buckets)
            node.marked[cut.number] = {
                bucket: node.store.get(bucket, Bucket()).copy()
                for bucket in range(self.sim.buckets)
                if owner[bucket] == node.bucket_machine.number
            }
            self.say(node, messages.CutDone(cut.number, "mark"))
        else:
            self.sim.run_later(node, self._work, node, cut, after_s=self.sim.net.rng.uniform(0.01, 0.3))

    def _work(self, node: Node, cut: messages.Cut) -> None:
        if cut.phase == "find":
            found = [
                messages.FoundCut(self.run(number), number, 1, self.sim.tables, self.steps[number])
                for number in sorted(self.cuts, reverse=True)[:3]
            ]
            node.done.discard((0, "find"))
            self.say(node, messages.Found(self.top, tuple(found)))
        elif cut.phase == "write":
            if self.sim.net.rng.random() < self.sim.disk_faults:
                self.say(node, messages.CutDone(cut.number, "write", "the disk is full"))
                return
            self.parts.setdefault(cut.number, {})[node.bucket_machine.number] = node.marked.get(cut.number, {})
            self.say(node, messages.CutDone(cut.number, "write", "", f"{node.bucket_machine.number}"))
        elif cut.phase == "complete":
            parts = [self.parts[cut.number][int(part)] for part in cut.parts]
            self._complete(cut, parts)
            self.say(node, messages.CutDone(cut.number, "complete", "", json.dumps({"run": self.run(cut.number)})))

    def _complete(self, cut: messages.Cut, parts: list[dict[int, Bucket]]) -> None:
        whole: dict[int, Bucket] = {}
        for part in parts:
            for bucket, held in part.items():
                if bucket in whole:
                    raise Violation(f"bucket {bucket} is twice in cut {cut.number}")
                whole[bucket] = held
        if len(whole) != self.sim.buckets:
            raise Violation(f"cut {cut.number} has {len(whole)} of {self.sim.buckets} buckets")
        have = {
            (bucket, row, push) for bucket, held in whole.items() for row, all_ in held.rows.items() for push in all_
        }
        missing = self.expected[cut.number] - have
        lost = self.sim.losses.unexcused(missing)
        if lost:
            raise Violation(f"cut {cut.number} lacks {lost[:3]}")
        later = {
            place
            for place in have - self.expected[cut.number]
            if place[2][0] in {one.number for one in self.sim.trainers()}
        }
        if later:
            raise Violation(f"cut {cut.number} has what came after it: {sorted(later)[:3]}")
        self.cuts[cut.number] = whole
        self.steps[cut.number] = cut.extra
        if self.sim.net.rng.random() < self.sim.disk_faults:
            self.bad.add(cut.number)
