"""Who is Master. One such machine runs in every launcher; the store decides between them.

The Master is whoever created the election key. Its create revision is the fencing token: every write of a Master
names it, so a Master that has been replaced cannot write any more, whatever it believes. That makes it safe to
depose a Master on a strong hint (its host refuses connections) long before its lease ends: at worst a living Master is
replaced by another one, and nothing it does afterwards counts.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from edl.types import NodeId, Token


@dataclass(frozen=True, slots=True)
class Ruler:
    """Value of the election key: who rules and where."""

    node: NodeId
    host: str
    port: int
    http: str = ""
    """Address of its HTTP side; empty: it has none."""


class Role(enum.Enum):
    """Part this launcher plays."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    """A campaign is under way in the store; its result comes back as an event."""
    MASTER = "master"


@dataclass(frozen=True, slots=True)
class ElectionState:
    """What one launcher knows of the election. ``token`` 0 means that nobody is known to rule."""

    role: Role = Role.FOLLOWER
    ruler: Ruler | None = None
    token: Token = Token(0)
    seen: Token = Token(0)
    """Newest revision of the election key heard of, be it a ruler's or the end of one; what is older is old news."""
    registered: bool = False
    """This launcher has a living lease; without one it cannot stand."""


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """The election key as the watch shows it; ``ruler`` None when it is gone.

    ``token`` is its create revision, or the revision at which it went (0: not known). A watch may lag behind what
    this launcher has done itself, so the order of arrival says nothing.
    """

    ruler: Ruler | None
    token: Token
    mine: bool = False
    """It stands on this launcher's lease."""


@dataclass(frozen=True, slots=True)
class RulerRefused:
    """The Master's host refuses connections on its port, so that Master is dead."""

    token: Token


@dataclass(frozen=True, slots=True)
class CampaignEnded:
    """The store has answered. ``token`` is ours when ``won``; 0 when the store could not be asked."""

    won: bool
    token: Token


@dataclass(frozen=True, slots=True)
class Registered:
    """This launcher has a (new) lease."""


@dataclass(frozen=True, slots=True)
class Unregistered:
    """This launcher's lease has ended, or it is about to leave."""


@dataclass(frozen=True, slots=True)
class FencedOff:
    """A guarded write was refused: somebody else rules."""


@dataclass(frozen=True, slots=True)
class OutOfTouch:
    """The store has not answered this Master for as long as a lease lasts, and a node is missing that may follow
    another Master by now: who follows this one must not go on as if nothing had happened."""


ElectionEvent = KeyChanged | RulerRefused | CampaignEnded | Registered | Unregistered | FencedOff | OutOfTouch


@dataclass(frozen=True, slots=True)
class Campaign:
    """Delete the key if it still carries ``depose`` (when not 0), then create it if it does not exist."""

    depose: Token


@dataclass(frozen=True, slots=True)
class Rule:
    """Start ruling under this token."""

    token: Token


@dataclass(frozen=True, slots=True)
class StepDown:
    """Stop ruling at once; send nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Attach to this Master (it may be ourselves)."""

    ruler: Ruler
    token: Token


ElectionEffect = Campaign | Rule | StepDown | Follow


@dataclass(frozen=True, slots=True)
class ElectionDecision:
    """Result of one step."""

    state: ElectionState
    effects: tuple[ElectionEffect, ...]
    reason: str


def elect(state: ElectionState, event: ElectionEvent) -> ElectionDecision:
    """Take one event."""
    match event:
        case KeyChanged():
            return _key_changed(state, event)
        case RulerRefused(token):
            if state.role is Role.FOLLOWER and token == state.token and state.registered:
                return _stand(state, token, "the Master's host refuses connections: replacing it")
            return ElectionDecision(state, (), "an old hint")
        case CampaignEnded():
            return _campaign_ended(state, event)
        case Registered():
            registered = dataclasses.replace(state, registered=True)
            if state.role is Role.FOLLOWER and not state.token:
                return _stand(registered, Token(0), "nobody rules")
            return ElectionDecision(registered, (), "registered")
        case Unregistered():
            return _resign(dataclasses.replace(state, registered=False), "this launcher's lease ended")
        case FencedOff():
            lost = dataclasses.replace(state, ruler=None, token=Token(0)) if state.role is Role.MASTER else state
            return _resign(lost, "another Master has been elected")
        case OutOfTouch():
            return _retire(state)


def _key_changed(state: ElectionState, event: KeyChanged) -> ElectionDecision:
    if 0 < event.token < state.seen:
        return ElectionDecision(state, (), "old news")
    state = dataclasses.replace(state, seen=max(state.seen, event.token))
    if event.ruler is None:
        if state.role is Role.MASTER:
            return _resign(dataclasses.replace(state, ruler=None, token=Token(0)), "the election key is gone")
        vacant = dataclasses.replace(state, ruler=None, token=Token(0))
        if state.role is Role.FOLLOWER and state.registered:
            return _stand(vacant, Token(0), "the last Master is gone")
        return ElectionDecision(vacant, (), "nobody rules")
    if state.role is Role.MASTER and event.token != state.token:
        known = dataclasses.replace(state, ruler=event.ruler, token=event.token)
        deposed = _resign(known, f"{event.ruler.node} rules now")
        return ElectionDecision(deposed.state, (*deposed.effects, Follow(event.ruler, event.token)), deposed.reason)
    if event.token == state.token and state.ruler == event.ruler:
        return ElectionDecision(state, (), "known already")
    followed = dataclasses.replace(state, ruler=event.ruler, token=event.token)
    if event.mine and state.role is Role.FOLLOWER and state.registered:
        # A campaign that was given up for lost has been carried out after all. Nobody else will take this place.
        master = dataclasses.replace(followed, role=Role.MASTER)
        reason = "elected by a campaign that the store carried out late"
        return ElectionDecision(master, (Rule(event.token), Follow(event.ruler, event.token)), reason)
    return ElectionDecision(followed, (Follow(event.ruler, event.token),), f"{event.ruler.node} rules")


def _campaign_ended(state: ElectionState, event: CampaignEnded) -> ElectionDecision:
    if state.role is not Role.CANDIDATE:
        return ElectionDecision(state, (), "the campaign was given up")
    if event.won and state.registered and event.token >= state.seen:
        master = dataclasses.replace(state, role=Role.MASTER, token=event.token, seen=event.token)
        return ElectionDecision(master, (Rule(event.token),), "elected")
    follower = dataclasses.replace(state, role=Role.FOLLOWER)
    if not state.token and state.registered:
        # The store was away, or the winner's key (be it ours) has not been seen yet, or has come and gone: ask again.
        return _stand(follower, Token(0), "nobody is known to rule: trying again")
    return ElectionDecision(follower, (), "another launcher was faster")


def _stand(state: ElectionState, depose: Token, reason: str) -> ElectionDecision:
    return ElectionDecision(dataclasses.replace(state, role=Role.CANDIDATE), (Campaign(depose),), reason)


def _retire(state: ElectionState) -> ElectionDecision:
    """Stop ruling, and ask for the place again as soon as the store answers."""
    if state.role is not Role.MASTER:
        return ElectionDecision(state, (), "not the Master any more")
    reason = "out of touch with the store and with a node: another Master may rule"
    standing = _stand(state, state.token, reason)
    return ElectionDecision(standing.state, (StepDown(reason), *standing.effects), reason)


def _resign(state: ElectionState, reason: str) -> ElectionDecision:
    effects: tuple[ElectionEffect, ...] = (StepDown(reason),) if state.role is Role.MASTER else ()
    follower = dataclasses.replace(state, role=Role.FOLLOWER)
    if follower.registered and not follower.token:
        candidate = dataclasses.replace(follower, role=Role.CANDIDATE)
        return ElectionDecision(candidate, (*effects, Campaign(Token(0))), reason)
    return ElectionDecision(follower, effects, reason)
