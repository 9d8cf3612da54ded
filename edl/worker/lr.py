"""Computes the factor for an optimizer's learning rate in the next step."""

from __future__ import annotations

from collections.abc import Callable

from edl.arithmetic.adascale import AdaScale
from edl.config import LrRule
from edl.errors import StateError
from edl.wire.records import Settings
from edl.worker import hyper
from edl.worker import session as sessions
from edl.worker.session import note

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
    session = sessions.opened()
    objects = getattr(session.state, "_objects", {}) if session is not None else {}
    return next((one for one in objects.values() if isinstance(one, AdaScale)), None)


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


def scale() -> float:
    """Size of the next step, as a multiple of the size that the script's learning rate is meant for."""
    settings = hyper.current()
    return settings.size / settings.reference if settings.reference and settings.size else 1.0
