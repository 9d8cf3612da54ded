"""Compares the state held by the ranks (``edl.worker.verify``) and handles differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from edl.config import OnMismatch, VerifyRules
from edl.errors import StateDiffers
from edl.wire import local
from edl.worker.session import PeersLost, Session, note
from edl.worker.verify import Difference, Held, Verifier, describe, suspects

VARIABLE = "EDL_VERIFY"
"""Environment variable with the rules, ``COMMITS:ACTION``; if unset, those of ``VerifyRules()`` apply."""


class Comparable(Protocol):
    """The comparable part of one worker's state."""

    def _held(self) -> Held:
        """This rank's current replicated state."""
        ...

    def _may_adopt(self, path: str) -> bool:
        """Whether the value of another rank can be adopted at this path."""
        ...

    def _pack(self, paths: Sequence[str]) -> bytes:
        """This rank's values at these paths, for ``_adopt``."""
        ...

    def _adopt(self, data: bytes) -> None:
        """Adopt the values that another rank has packed."""
        ...


class StateComparison:
    """The comparisons of one worker."""

    def __init__(self, session: Session, state: Comparable) -> None:
        framework = session.framework
        assert framework is not None and session.seat is not None, "the worker is in a world"  # noqa: S101
        self.rules = VerifyRules.parse(session.environment.get(VARIABLE, ""))
        self._session = session
        self._state = state
        self._framework = framework
        self._verifier = Verifier(framework.arrays.digest, self._exchange)
        self._damaged: frozenset[str] = frozenset()

    @property
    def rolls_back(self) -> bool:
        """Whether commits that have not been compared must not be kept, because a mismatch rolls back behind them."""
        return bool(self.rules.every) and self.rules.on_mismatch is OnMismatch.ROLLBACK and self._size > 1

    def due(self, commit: int, save: bool) -> bool:
        """Whether ranks compare at this commit. Returns the same on every rank."""
        return bool(self.rules.every) and (save or commit % self.rules.every == 0)

    def committing(self, commit: int) -> None:
        """Compare before this commit is kept. Reports arrays with NaN or infinity once.

        Raises ``StateDiffers`` on a rank that differs, or on all; ``PeersLost`` on the others.
        """
        held = self._state._held()
        self._name_damage(held, commit)
        faults, drifted = self._compare(held)
        if faults:
            self._settle(faults, f"at commit {commit}")
        elif drifted:
            # Buffers and values may differ during a round: the first worker of each node keeps its own.
            self._say(f"commit {commit}: {describe(drifted, self._size)} differs; a restore uses rank 0's")

    def restored(self, commit: int) -> None:
        """Check that all ranks have restored the same state. Raises as ``committing``."""
        if self._size == 1:
            return
        faults, drifted = self._compare(self._state._held())
        if faults:
            self._settle(faults, f"after the restore of commit {commit}")
        drifted = [one for one in drifted if self._state._may_adopt(one.path)]
        if drifted:
            self._take_over(drifted, source=0)

    def _exchange(self, data: bytes) -> list[bytes]:
        answers = self._framework.exchange(data)
        self._session.check()  # the result of an aborted collective says nothing about the others
        return answers

    def _compare(self, held: Held) -> tuple[list[Difference], list[Difference]]:
        if self._size == 1:
            return [], []
        found = self._verifier.differences(held)
        return [one for one in found if one.strict], [one for one in found if not one.strict]

    def _settle(self, faults: Sequence[Difference], when: str) -> None:
        seat, link = self._session.seat, self._session.link
        assert seat is not None, "compared inside a world only"  # noqa: S101
        blamed = suspects(faults)
        what = f"{when} ranks hold different values of {describe(faults, self._size)}"
        action = self.rules.on_mismatch
        if action is OnMismatch.SYNC and all(self._state._may_adopt(one.path) for one in faults):
            source = min(set(range(self._size)) - blamed, default=0)
            note(f"{what}; all adopt those of rank {source} (--on-state-mismatch=sync)")
            self._take_over(faults, source)
            return
        if action is not OnMismatch.ROLLBACK and link is not None:
            link.send(local.GiveUp(int(StateDiffers.exit_code)))
        elif seat.rank not in blamed:
            raise PeersLost(f"{what}; waiting for them to be restarted")
        raise StateDiffers(f"{what}. {_ADVICE[action is OnMismatch.ROLLBACK]}")

    def _take_over(self, differences: Sequence[Difference], source: int) -> None:
        seat = self._session.seat
        mine = seat is not None and seat.rank == source
        packed = self._state._pack([one.path for one in differences]) if mine else b""
        data = self._framework.broadcast(packed, source)
        self._session.check()
        if not mine:
            self._state._adopt(data)

    def _name_damage(self, held: Held, commit: int) -> None:
        names = [path for path, _ in held.leaves]
        whole = self._framework.arrays.finite([array for _, array in held.leaves])
        damaged = frozenset(name for name, good in zip(names, whole, strict=True) if not good)
        new = sorted(damaged - self._damaged)
        self._damaged = damaged
        if new:
            more = f" and {len(new) - 5} more" if len(new) > 5 else ""
            self._say(f"commit {commit}: NaN or infinity in {', '.join(f'state.{name}' for name in new[:5])}{more}")

    def _say(self, text: str) -> None:
        """Print once per job, on rank 0."""
        if self._session.seat is not None and self._session.seat.rank == 0:
            note(text)

    @property
    def _size(self) -> int:
        return self._session.seat.world_size if self._session.seat is not None else 1


_ADVICE: Mapping[bool, str] = {
    False: (
        "The job ends: it is unknown which values are right. Look for a faulty device, for a collective that one rank "
        "skips, and for nodes of different kinds, whose rounding differs (--on-state-mismatch=sync continues with one "
        "rank's values). The newest checkpoint that you trust: --checkpoint-dir"
    ),
    True: "This rank is restarted, and all continue from the last commit that was compared",
}
