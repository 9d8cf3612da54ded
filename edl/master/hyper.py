"""Batch size and learning rate: the policy's settings for each world, and manual changes.

A manual change is recorded at once, as a changed policy. As long as the current settings differ from it, the workers
agree on a step boundary from which the new ones apply (``wants_boundary``). A world that forms meanwhile adopts them.
Either all workers of a world switch at the same commit or none does: the record is written before any worker learns of
it, workers that have answered wait for the result, and workers that lose the Master get the result from the next one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from edl.arithmetic.hyper import describe, settle
from edl.config import HyperPolicy, LrRule
from edl.errors import SettingError
from edl.master.events import Kind
from edl.master.state import MasterState, NodeEntry, Phase, Record
from edl.master.turn import MasterTurn
from edl.wire.messages import Asked, Switch
from edl.wire.purpose import Purpose
from edl.wire.records import Settings
from edl.wire.status import Answer

UNCHANGED = "nothing changes in the running world"
LATER = "takes effect with the next world"


def _samples(name: str, text: str) -> int:
    if text == "none":
        return 0
    if not text.isdecimal() or not int(text):
        raise SettingError(name, text, "must be a number of at least 1", "Write none to unset it")
    return int(text)


def _steps(name: str, text: str) -> int:
    if not text.isdecimal():
        raise SettingError(name, text, "must be a number of commits, 0 or more")
    return int(text)


def _scale(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(name, text, "must be a number", "Write 1 for the script's own LR") from None


def _rule(name: str, text: str) -> LrRule:
    try:
        return LrRule(text)
    except ValueError:
        known = ", ".join(rule.value for rule in LrRule)
        raise SettingError(name, text, f"no such rule. Known: {known}") from None


NAMES: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "global-batch": ("global_batch", _samples),
    "local-batch": ("local_batch", _samples),
    "lr-rule": ("rule", _rule),
    "lr-scale": ("scale", _scale),
    "lr-warmup": ("warmup", _steps),
    "lr-reference": ("reference", _samples),
}
"""Settings that can be changed in a running job: the field of the policy, and the parser."""


def changed_policy(policy: HyperPolicy, request: str) -> HyperPolicy:
    """The policy with changes such as ``global-batch=512 lr-scale=0.5``. Raises ``SettingError``."""
    changes: dict[str, object] = {}
    for item in request.split():
        name, _, text = item.partition("=")
        if name == "logical-ranks":
            raise SettingError(name, text, "cannot be changed in a running job", "Start a new job with another value")
        if name not in NAMES:
            raise SettingError(name, text, f"no such setting. Known: {', '.join(NAMES)}")
        field, read = NAMES[name]
        changes[field] = read(name, text)
    if not changes:
        raise SettingError("settings", "''", "nothing to set", f"Write name=value. Known: {', '.join(NAMES)}")
    other_measure = bool(changes.get("global_batch", policy.global_batch)) != bool(policy.global_batch)
    if other_measure and "reference" not in changes:
        changes["reference"] = 0  # it counts samples in one case and workers in the other
    try:
        return dataclasses.replace(policy, **changes)  # type: ignore[arg-type]
    except SettingError as error:
        raise error.renamed(error.setting.removeprefix("--")) from None


def policy_of(state: MasterState | MasterTurn) -> HyperPolicy:
    """The current policy: that of the launchers, with manual changes."""
    return state.record.policy or state.spec.hyper


def _reference(asked: HyperPolicy, policy: HyperPolicy, record: Record, workers: int) -> int:
    """The size for which the script's LR was chosen, in samples with a global batch, otherwise in workers. ``asked``:
    the policy without manual changes."""
    first = record.first_workers or workers
    if policy.reference:
        return policy.reference
    if not policy.global_batch:
        return policy.logical_ranks or first
    if asked.global_batch:
        return asked.global_batch
    before = record.settings.reference if record.settings.global_batch else policy.global_batch
    return first * asked.local_batch or before


def _settings(state: MasterState | MasterTurn, workers: int, commit: int) -> Settings:
    record = state.record
    policy = policy_of(state)
    reference = _reference(state.spec.hyper, policy, record, workers)
    was = record.world.size if record.world is not None else 0
    return settle(dataclasses.replace(policy, reference=reference), record.settings, workers, commit, was)


def adopt(turn: MasterTurn, workers: int, commit: int) -> Settings:
    """The settings of a new world with ``workers`` workers from this commit on, which become part of the record. Call
    it while the last world is still recorded."""
    settings = _settings(turn, workers, commit)
    turn.settings_failed = False
    _write(turn, settings, commit)
    if not turn.record.first_workers:
        turn.write(first_workers=workers)
    return settings


def _write(turn: MasterTurn, settings: Settings, commit: int) -> None:
    before = turn.record.settings
    if settings.number == before.number:
        return
    turn.write(settings=settings)
    if describe(settings) == describe(before) and not turn.record.settings_request:
        return  # only the number of workers has changed, which the line about the world says
    by = f" ({turn.record.settings_request})" if turn.record.settings_request else ""
    turn.note(Kind.SETTINGS, f"settings {settings.number} from commit {commit}: {describe(settings)}{by}")
    turn.write(settings_request="")


def _pending(state: MasterState | MasterTurn) -> bool:
    """Whether the settings of the running world differ from the requested ones."""
    record = state.record
    if record.world is None:
        return True
    commit = max(record.world.restore.commit, record.settings.ramp_begin)
    return _settings(state, record.world.size, commit).number != record.settings.number


# --- manual changes --------------------------------------------------------------------------------------------------


def asked(turn: MasterTurn, message: Asked) -> None:
    """Handle a request to change settings (``edl set``)."""
    who = f"{message.by}: {' '.join(message.argument.split())}"
    try:
        policy = changed_policy(policy_of(turn), message.argument)
    except SettingError as error:
        turn.note(Kind.SETTINGS, f"{who}: refused, {error}")
        return
    turn.write(policy=policy, settings_request=who)
    turn.settings_failed = False
    if not _pending(turn):
        turn.write(settings_request="")
        turn.note(Kind.SETTINGS, f"{who}: {UNCHANGED}")
    elif not turn.underway or turn.record.done:
        turn.note(Kind.SETTINGS, f"{who}: {_later(turn.record)}")


def _later(record: Record) -> str:
    soon = record.phase is Phase.RUNNING and record.rejoins and not record.done
    return f"{LATER}, or once all workers of this one train" if soon else LATER


def reply(state: MasterState, underway: bool, request: str) -> Answer:
    """The answer to a request to change settings."""
    if state.record.kill:
        return Answer(f"the job is being stopped by {state.record.kill}", ok=False)
    try:
        changed_policy(policy_of(state), request)
    except SettingError as error:
        return Answer(str(error), ok=False)
    if underway:
        return Answer("takes effect at the next step boundary", ok=True)
    if state.spec.independent and state.record.phase is Phase.RUNNING and not state.record.done:
        return Answer("takes effect at once", ok=True)
    return Answer(f"no world with edl.State is in training: {_later(state.record)}", ok=True)


def wants_boundary(turn: MasterTurn) -> bool:
    """Whether the workers should agree on a step boundary for new settings now."""
    free = turn.agreement is None and turn.underway and not turn.record.done and not turn.settings_failed
    return free and turn.record.policy is not None and _pending(turn)


def wants_world(turn: MasterTurn) -> bool:
    """Whether to form a new world for new settings, which does not interrupt independent workers."""
    return turn.spec.independent and turn.record.policy is not None and not turn.record.done and _pending(turn)


def agreed(turn: MasterTurn, number: int, commit: int, reason: str) -> Switch:
    """Called when a step boundary is agreed on: record the settings that apply from this commit on; returns the order
    for the waiting workers."""
    world = turn.record.world
    assert world is not None, "its workers have agreed"  # noqa: S101
    _write(turn, _settings(turn, world.size, commit), commit)
    return Switch(turn.record.round, number, commit, Purpose.SET, reason, turn.record.settings)


def failed(turn: MasterTurn, reason: str, why: str) -> None:
    """Called when no step boundary could be agreed on: it is not tried again in this world. ``why``: the cause."""
    turn.settings_failed = True
    turn.note(Kind.SETTINGS, f"{reason}: {LATER}, {why}")


def remind(turn: MasterTurn, entry: NodeEntry, in_doubt: bool) -> None:
    """Send the current settings to a member that has reconnected and may have missed them. If its workers are in doubt
    about a lost agreement, they train on then."""
    record = turn.record
    if entry.underway and (in_doubt or record.policy is not None):
        order = Switch(record.round, 0, record.settings.ramp_begin, Purpose.SET, "", record.settings)
        turn.tell(entry, order)
