"""Checks that the Master keeps what it promises when it grants a request for another size."""

from __future__ import annotations

from collections.abc import Callable

from edl.config import NodeRange
from edl.master.invariants import formed_violations
from edl.master.sizing import Sizing
from edl.master.state import Record
from edl.types import Incarnation, NodeId
from edl.wire.scale_requests import Drain, DrainMode, Granted, ScaleRequest, Verdict


class Promises:
    """Records granted requests and checks that each is kept."""

    def __init__(self, spec: NodeRange, fail: Callable[[str], None]) -> None:
        self._spec = spec
        self._fail = fail
        self._sizings: dict[int, Sizing] = {0: Sizing()}
        """Every sizing that was stored, by generation."""
        self._generations: dict[int, int] = {}
        """Generation of the sizing at each revision of the size."""
        self._keys: dict[str, Granted] = {}
        self._granted = 0
        """Highest generation in a granted answer."""
        self._newest = 0
        self.evicted: dict[NodeId, Incarnation] = {}
        """Incarnations of the nodes whose removal was promised."""

    def stored(self, record: Record, revision: int, *, formed: bool) -> None:
        """Check a record that the store has accepted. ``revision``: of the size. ``formed``: the record has a new
        world."""
        sizing = record.sizing
        if sizing.generation < self._newest:
            self._fail(f"the size went back from generation {self._newest} to {sizing.generation}")
        if sizing.generation < self._granted:
            self._fail(f"generation {self._granted} was granted, {sizing.generation} is stored")
        self._newest = sizing.generation
        known = self._sizings.setdefault(sizing.generation, sizing)
        if (known.desired, known.minimum, known.maximum, known.suspended, known.cordoned) != (
            sizing.desired,
            sizing.minimum,
            sizing.maximum,
            sizing.suspended,
            sizing.cordoned,
        ):
            self._fail(f"generation {sizing.generation} was {known}, and is {sizing}")
        self._generations[revision] = sizing.generation
        if formed:
            for violation in formed_violations(record, self._spec):
                self._fail(violation)

    def answered(self, request: ScaleRequest, granted: Granted, incarnations: dict[NodeId, Incarnation]) -> None:
        """Check the Master's answer to a request. ``incarnations``: of the nodes that the request names."""
        key, revision = getattr(request, "key", ""), getattr(request, "revision", 0)
        repeated = bool(key) and key in self._keys
        if repeated and (self._keys[key].verdict, self._keys[key].text) != (granted.verdict, granted.text):
            self._fail(f"{request} is answered with {granted}, before that with {self._keys[key]}")
        if not granted.ok:
            return
        if key:
            self._keys[key] = granted
        if granted.generation > self._newest:
            self._fail(f"{granted} is said before it is stored (generation {self._newest})")
        self._granted = max(self._granted, granted.generation)
        if granted.verdict is not Verdict.ACCEPTED or key:
            return
        if revision and self._generations.get(revision) != granted.generation - 1:
            self._fail(f"{request} is accepted as generation {granted.generation} though its revision is stale")
        if isinstance(request, Drain) and request.mode is not DrainMode.MUST:  # else they may have to stay
            self.evicted.update(incarnations)
