"""Model and optimizer under Accelerate's FSDP2: a sharded model belongs to the workers of one world, so a function of
the script builds it in each, and Accelerate shards it there before edl restores its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from edl.errors import StateError
from edl.integrations import fsdp2
from edl.integrations.accelerate_world import forget_world

Build = Callable[[], Mapping[str, Any]]
"""Returns ``accelerator``, ``model``, ``optimizer`` and, if there is one, ``scheduler``; nothing is prepared."""
_NEEDED, _ALLOWED = {"accelerator", "model", "optimizer"}, {"accelerator", "model", "optimizer", "scheduler"}


class Sharded(NamedTuple):
    """What a loop uses in one world: model and optimizer as Accelerate has prepared them."""

    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any


class ShardedLoop:
    """Builds and shards what a loop trains, in one world after another."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._made: Sharded | None = None

    def make(self, *, elastic: bool) -> dict[str, Any]:
        """Build and shard for the current world. Returns the objects to keep, by name.

        ``elastic``: whether edl keeps them. Raises ``StateError`` for a wrong result of ``build``, and for a kind of
        sharding that cannot be kept.
        """
        self._made = None
        forget_world()
        built = _checked(self._build())
        accelerator = built["accelerator"]
        if elastic:
            fsdp2.refuse(accelerator, "EDLLoop")
        model, optimizer = accelerator.prepare(built["model"], built["optimizer"])
        self._made = Sharded(accelerator, model, optimizer, built.get("scheduler"))
        return {name: kept for name, kept in {**built, "model": model}.items() if name != "accelerator"}

    @property
    def accelerator(self) -> Any:
        """That of the current world."""
        return None if self._made is None else self._made.accelerator

    def take(self, accelerator: Any) -> Sharded:
        """What was made for the current world. It is returned once, so that it ends with the function that uses it.
        Raises ``StateError`` for another accelerator."""
        made, self._made = self._made, None
        if made is None or made.accelerator is not accelerator:
            raise StateError(
                "EDLLoop.prepare(accelerator) was called twice in a world, or with another Accelerator than the one "
                "that build has made: call it once, with the argument of the function that EDLLoop.run calls"
            )
        return made


def _checked(built: Any) -> Mapping[str, Any]:
    if not isinstance(built, Mapping):
        raise StateError(f"build returned a {type(built).__name__}; it must return a dict of objects by name")
    lacking, unknown = sorted(_NEEDED - built.keys()), sorted(built.keys() - _ALLOWED)
    if lacking or unknown:
        raise StateError(
            f"build returned {sorted(built)}: it must return accelerator, model, optimizer and, if there is one, "
            "scheduler; give other objects and values to EDLLoop"
        )
    kinds = {"accelerator": Accelerator, "model": torch.nn.Module, "optimizer": torch.optim.Optimizer}
    for name, kind in kinds.items():
        if not isinstance(built[name], kind):
            raise StateError(f"build returned a {type(built[name]).__name__} as {name}: it must be a {kind.__name__}")
    if getattr(built["model"], "_is_accelerate_prepared", False):
        raise StateError("build returned a model that is prepared already: EDLLoop calls accelerator.prepare")
    return built
