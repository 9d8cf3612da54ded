"""Computes the factor for an optimizer's learning rate in the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from edl.arithmetic.adascale import AdaScale
from edl.config import LrRule
from edl.errors import StateError
from edl.wire.records import Settings
from edl.worker import hyper
from edl.worker import session as sessions
from edl.worker.session import note

Kept = TypeVar("Kept")
Rule = Callable[[int, int], float]
"""``rule(reference, size)``: the factor for a size, if the script's learning rate is meant for the reference."""


class LrFactor:
    """The Master's factor, times the part that only the workers know."""

    def __init__(self, rule: Rule | None, noise: AdaScale | None) -> None:
        self.rule = rule
        self.noise = noise
        self._noted = False

    def __call__(self) -> float:
        """The factor for the step after the last commit. Raises ``StateError`` when the script lacks what the job's
        rule needs."""
        settings = hyper.current()
        return hyper.lr_factor() * self._own(settings)

    def _own(self, settings: Settings) -> float:
        if settings.lr == LrRule.ADASCALE.value:
            return needed_noise(self.noise).gain
        if settings.lr != LrRule.USER.value:
            if self.rule is not None and settings.number and not self._noted:
                self._noted = True
                note(f"scale_lr(rule=…) is not used: the job has --lr-rule={settings.lr}, not --lr-rule=user")
            return 1.0
        if self.rule is None:
            raise StateError("--lr-rule=user: give the rule, edl.scale_lr(optimizer, rule=lambda reference, size: …)")
        factor = self.rule(settings.reference, settings.size)
        if not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
            raise StateError(
                f"rule({settings.reference}, {settings.size}) returned {factor!r}: a factor is more than 0"
            )
        return float(factor)


def found_noise(given: AdaScale | None = None) -> AdaScale | None:
    """The script's ``AdaScale``: the given one, else the one in its ``State``."""
    if given is not None:
        return given
    return next(iter(in_state(AdaScale).values()), None)


def in_state(kind: type[Kept]) -> dict[str, Kept]:
    """The objects of a kind in the script's ``State``, by name."""
    session = sessions.opened()
    objects = getattr(session.state, "_objects", {}) if session is not None else {}
    return {name: one for name, one in objects.items() if isinstance(one, kind)}


def needed_noise(given: AdaScale | None) -> AdaScale:
    """The script's ``AdaScale``. Raises ``StateError`` if there is none; one outside of the state would differ between
    old and new workers."""
    noise = found_noise(given)
    if noise is None:
        raise StateError("--lr-rule=adascale: the measurements are part of the state, State(noise=edl.AdaScale(), …)")
    return noise


def chosen_noise(given: AdaScale | None) -> AdaScale | None:
    """The ``AdaScale`` to update, if any."""
    return needed_noise(given) if hyper.current().lr == LrRule.ADASCALE.value else found_noise(given)


def scale(samples: int = 0, full: int = 0) -> float:
    """Size of a step, as a multiple of the size that the script's learning rate is meant for.

    A step with fewer ``samples`` than a ``full`` one is smaller by as much, down to one step of the reference: the
    reference's own epochs end with a short step too, for which it keeps its learning rate.
    """
    settings = hyper.current()
    whole = settings.size / settings.reference if settings.reference and settings.size else 1.0
    return max(whole * samples / full, min(whole, 1.0)) if 0 < samples < full else whole
