"""A job, its Master's rules about size, and a scheduler, on a fake clock: what the reconciler is let loose on."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from edl.job_records import SizeOwner
from edl.schedulers import reconcile as rc
from edl.schedulers.plan import Job, Node
from edl.schedulers.port import Doomed, Size, Sized
from edl.wire.scale_requests import Drain, Granted, Resize, Verdict


@dataclass
class FakeNode:
    """One that is in the job."""

    name: str
    index: int
    member: bool = False
    leaving: bool = False


@dataclass
class Story:
    """Which events may happen, and durations."""

    indexed: bool = False
    owner: SizeOwner = SizeOwner.MASTER
    error_share: float = 0.0
    lost_share: float = 0.0
    """Of calls: carried out, and an error all the same."""
    final_share: float = 0.0
    slow_s: float = 1.0
    start_s: float = 2.0
    stuck: int = 1000
    """More nodes than that never come: the cluster is full."""
    ask_none_at_end: bool = False


@dataclass
class ScaleWorld:
    """Runs one random schedule."""

    seed: int
    story: Story
    minimum: int = 1
    maximum: int = 6
    unit: int = 1
    now_s: float = 0.0
    desired: int = 6
    asked: bool = False
    suspended: bool = False
    ended: bool = False
    replicas: int = 2
    nodes: dict[str, FakeNode] = field(default_factory=dict)
    coming: set[str] = field(default_factory=set)
    log: list[tuple[float, rc.Effect]] = field(default_factory=list)
    explained: str = ""
    finished: bool = False
    faults: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._made = 0
        self._rule = 0
        self._shown: Job | None = None
        self._wake_s: float | None = None
        self._calls = 0
        self._requests = 0
        story = self.story
        self.about = rc.About("fake", story.owner, story.indexed, story.ask_none_at_end)
        self.state = rc.State(self.about)
        self._fill()
        self.at(0.0, self._world)
        self.at(0.0, self._controller)
        self._watch()

    # --- time ------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._order, what))

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._queue)
            what()
            self.show()
        self.now_s = until_s

    # --- the reconciler --------------------------------------------------------------------------------------------

    def job(self) -> Job:
        members = [node for node in self.nodes.values() if node.member]
        return Job(
            self.minimum,
            self.maximum,
            self.unit,
            self.desired,
            self.asked,
            bool(members),
            self.suspended,
            self.ended,
            nodes=tuple(
                Node(node.name, node.index, node.member, spare=not node.member and not node.leaving)
                for node in self.nodes.values()
            ),
        )

    def show(self) -> None:
        job = self.job()
        if job != self._shown:
            self._shown = job
            self.post(rc.Looked(job))

    def new_master(self) -> None:
        """Start a new Master. Calls in flight may still take effect, but their answers are lost."""
        self._rule += 1
        self._calls = self._requests = 0
        self.state = rc.State(self.about)
        self._shown = None
        self.finished = False
        self.explained = ""
        self._watch()

    def _watch(self) -> None:
        self.post(rc.Observed(Sized(Size(self.replicas))))

    def post(self, event: rc.Event) -> None:
        if self.finished:
            return
        decision = rc.step(self.state, event, self.now_s)
        self.state = decision.state
        wake_s = None
        for effect in decision.effects:
            self.log.append((self.now_s, effect))
            match effect:
                case rc.Current() | rc.Ask() | rc.Release():
                    self._calls += 1
                    assert self._calls == 1, f"two calls under way, seed {self.seed}"
                    self._check(effect)
                    self._call(effect)
                case rc.Tell(request):
                    self._requests += 1
                    assert self._requests == 1, f"two requests under way, seed {self.seed}"
                    self.at(self.random.uniform(0, 0.2), functools.partial(self._submit, request, self._rule))
                case rc.Explain(text):
                    self.explained = text
                case rc.WakeAt(at_s):
                    assert at_s > self.now_s
                    wake_s = at_s
                case rc.Finished():
                    self.finished = True
        self._wake_s = wake_s
        if wake_s is not None:
            self.at(wake_s - self.now_s, lambda: self._tick(wake_s))

    def _tick(self, wake_s: float) -> None:
        if wake_s == self._wake_s:
            self.post(rc.Tick())

    def _check(self, call: rc.Call) -> None:
        if self.ended:
            assert isinstance(call, rc.Current) or self.story.ask_none_at_end
            return
        if not isinstance(call, rc.Current):
            assert self.story.owner is SizeOwner.MASTER, f"asks though the size is not the Master's, seed {self.seed}"
            assert not self.suspended
            assert self.minimum <= call.nodes <= max(self.maximum, self.replicas), (call, self.seed)
        if isinstance(call, rc.Ask):
            assert call.nodes <= self.maximum, (call, self.seed)
        if isinstance(call, rc.Release):
            for node in self.nodes.values():
                gone = node.index >= call.nodes if self.story.indexed else node.name in call.names
                assert not (gone and node.member), f"{call} takes member {node}, seed {self.seed}"

    # --- the scheduler ---------------------------------------------------------------------------------------------

    def _call(self, call: rc.Call) -> None:
        story, rule = self.story, self._rule
        luck = self.random.random() if self.faults else 1.0
        error = luck < story.error_share
        lost = not error and luck < story.error_share + story.lost_share
        final = not error and not lost and luck < story.error_share + story.lost_share + story.final_share
        delay_s = self.random.uniform(0.01, story.slow_s if self.faults else 0.1)

        def answer() -> None:
            size = Size(self.replicas)
            if not error and not final:
                self._carry_out(call)
            if rule != self._rule:
                return
            self._calls -= 1
            if error or lost or final:
                self.post(rc.Failed("it does not answer", retry=not final))
            else:
                self.post(rc.Answered(size if isinstance(call, rc.Current) else None))

        self.at(delay_s, answer)

    def _carry_out(self, call: rc.Call) -> None:
        if isinstance(call, rc.Ask):
            self.replicas = max(self.replicas, call.nodes)
        elif isinstance(call, rc.Release):
            if not self.story.indexed:
                for name in call.names:
                    self._leave(name)
            self.replicas = min(self.replicas, call.nodes)
        self._fill()

    def foreign(self, replicas: int) -> None:
        """Another program sets the number of replicas."""
        self.replicas = replicas
        if not self.story.indexed:
            for name in sorted(self.nodes)[replicas:]:
                self._leave(name)
        self.post(rc.Observed(Sized(Size(replicas))))
        self._fill()

    def doom(self, name: str) -> None:
        self.post(rc.Observed(Doomed(name, "spot", 30.0)))
        self.at(30.0, lambda: self.vanish(name))

    def _controller(self) -> None:
        """Looks after the replicas again and again."""
        self._fill()
        self.at(1.0, self._controller)

    def _fill(self) -> None:
        if self.ended:
            return
        if self.story.indexed:
            for index in range(max(8, self.replicas)):
                name = f"n-{index}"
                if index >= self.replicas and name in self.nodes:
                    self._leave(name)
                elif index < min(self.replicas, self.story.stuck) and name not in self.nodes | dict.fromkeys(
                    self.coming
                ):
                    self._bring(name, index)
            return
        while len(self.nodes) + len(self.coming) < min(self.replicas, self.story.stuck):
            self._made += 1
            self._bring(f"j{self._made}", -1)
        surplus = len(self.nodes) + len(self.coming) - self.replicas
        self.coming -= set(sorted(self.coming)[: max(0, surplus)])

    def _bring(self, name: str, index: int) -> None:
        self.coming.add(name)

        def come() -> None:
            if name in self.coming and (not self.story.indexed or index < self.replicas):
                self.nodes[name] = FakeNode(name, index)
            self.coming.discard(name)

        self.at(self.random.uniform(0.1, self.story.start_s), come)

    # --- the Master ------------------------------------------------------------------------------------------------

    def vanish(self, name: str) -> None:
        self.nodes.pop(name, None)

    def _leave(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is not None:
            node.leaving = True

    def _world(self) -> None:
        """A step boundary: who should not train any more does not, and spares come in."""
        for node in [node for node in self.nodes.values() if node.leaving]:
            del self.nodes[node.name]
        staying = list(self.nodes.values())
        if self.suspended or self.ended:
            for node in staying:
                node.member = False
        else:
            order = sorted(staying, key=lambda node: (node.index >= self.desired, not node.member))
            count = min(len(staying), self.desired) // self.unit * self.unit
            for position, node in enumerate(order):
                node.member = position < count and count >= self.minimum
        self.at(self.random.uniform(0.2, 3.0), self._world)

    def _submit(self, request: object, rule: int) -> None:
        granted = Granted(Verdict.ACCEPTED, "")
        if isinstance(request, Drain):
            able = [node for node in self.nodes.values() if not node.leaving and node.name not in request.nodes]
            if len(able) < self.minimum:
                granted = Granted(Verdict.REFUSED, "fewer than the minimum would be left")
            else:
                for name in request.nodes:
                    self._leave(name)
        if isinstance(request, Resize):
            assert request.external and self.story.owner is SizeOwner.EXTERNAL
            self.desired = min(max(request.nodes, self.minimum), self.maximum)
            self.asked = True
        if rule != self._rule:
            return
        self._requests -= 1
        self.show()
        self.post(rc.Replied(granted))

    def resize(self, nodes: int) -> None:
        """A user requests a new size."""
        self.desired, self.asked = nodes, True

    # --- looking ---------------------------------------------------------------------------------------------------

    def calls(self, since_s: float = 0.0) -> list[rc.Call]:
        """The calls of the adapter so far, without mere reads."""
        return [effect for at_s, effect in self.log if at_s >= since_s and isinstance(effect, rc.Ask | rc.Release)]

    def of(self, kind: type) -> list[rc.Effect]:
        return [effect for _, effect in self.log if isinstance(effect, kind)]

    @property
    def members(self) -> int:
        return sum(node.member for node in self.nodes.values())


def varied(seed: int) -> Story:
    """Some troubles, drawn by the seed."""
    draw = random.Random(seed * 7919)
    return dataclasses.replace(
        Story(),
        indexed=draw.random() < 0.5,
        owner=SizeOwner.EXTERNAL if draw.random() < 0.25 else SizeOwner.MASTER,
        error_share=draw.choice([0.0, 0.1, 0.5]),
        lost_share=draw.choice([0.0, 0.1, 0.3]),
        final_share=draw.choice([0.0, 0.0, 0.05]),
        slow_s=draw.choice([0.2, 2.0, 20.0]),
        start_s=draw.choice([0.5, 5.0, 30.0]),
    )
