"""The election of the Master. One such machine runs in every launcher; the store decides between them.

The launcher that creates the election key is the Master. The key's create revision is the fencing token: every write of
a Master depends on it, so a replaced Master cannot write, whatever it believes. So it is safe to depose a Master on a
strong hint (its host refuses connections) long before its lease ends: at worst a living Master is replaced, and nothing
it does afterwards takes effect.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from edl.types import FencingToken, NodeId


@dataclass(frozen=True, slots=True)
class MasterInfo:
    """Value of the election key: the Master's node and addresses."""

    node: NodeId
    host: str
    port: int
    http: str = ""
    """Address of its HTTP API; empty if it has none."""


class Role(enum.Enum):
    """Role of this launcher in the election."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    """A campaign is in progress in the store; its result arrives as an event."""
    MASTER = "master"


@dataclass(frozen=True, slots=True)
class ElectionState:
    """One launcher's knowledge of the election. ``token`` 0 means that no Master is known."""

    role: Role = Role.FOLLOWER
    master: MasterInfo | None = None
    token: FencingToken = FencingToken(0)
    seen: FencingToken = FencingToken(0)
    """Newest known revision of the election key, of its creation or its deletion; anything older is outdated."""
    registered: bool = False
    """This launcher has a living lease, without which it cannot run for election."""
    deposing: FencingToken = FencingToken(0)
    """The Master that this launcher's last campaign replaces; 0 for none."""

    @property
    def known(self) -> MasterInfo | None:
        """The Master, if one is known that this launcher does not run against. A candidate learns of another one's
        success before its own campaign ends, which takes seconds if its store member was lost with the Master."""
        return None if self.role is Role.CANDIDATE and self.token == self.deposing else self.master


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """The election key as reported by the watch; ``master`` is None when it is gone.

    ``token`` is its create revision, or the revision of its deletion (0: unknown). A watch may lag behind this
    launcher's own writes, so the order of arrival means nothing.
    """

    master: MasterInfo | None
    token: FencingToken
    mine: bool = False
    """The key is attached to this launcher's lease."""


@dataclass(frozen=True, slots=True)
class MasterRefused:
    """The Master's host refuses connections on its port, so that Master is dead."""

    token: FencingToken


@dataclass(frozen=True, slots=True)
class CampaignEnded:
    """The store answered a campaign. ``token`` is this launcher's if ``won``; 0 if the store was unreachable."""

    won: bool
    token: FencingToken


@dataclass(frozen=True, slots=True)
class LauncherRegistered:
    """This launcher has a (new) lease."""


@dataclass(frozen=True, slots=True)
class LauncherUnregistered:
    """This launcher's lease has ended, or the launcher is about to leave."""


@dataclass(frozen=True, slots=True)
class FencedOff:
    """A guarded write was refused: another Master has been elected."""


@dataclass(frozen=True, slots=True)
class OutOfTouch:
    """The store has not answered this Master for the length of a lease, and a node is missing that may already follow
    another Master: this Master's nodes must not simply continue."""


ElectionEvent = (
    KeyChanged | MasterRefused | CampaignEnded | LauncherRegistered | LauncherUnregistered | FencedOff | OutOfTouch
)


@dataclass(frozen=True, slots=True)
class Campaign:
    """Delete the key if its create revision is ``depose`` (unless 0), then create it if it does not exist."""

    depose: FencingToken


@dataclass(frozen=True, slots=True)
class BecomeMaster:
    """Become Master under this token."""

    token: FencingToken


@dataclass(frozen=True, slots=True)
class StepDown:
    """Stop being Master at once; send nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Attach to this Master, which may be in this launcher."""

    master: MasterInfo
    token: FencingToken


ElectionEffect = Campaign | BecomeMaster | StepDown | Follow


@dataclass(frozen=True, slots=True)
class ElectionDecision:
    """Result of one step."""

    state: ElectionState
    effects: tuple[ElectionEffect, ...]
    reason: str


def elect(state: ElectionState, event: ElectionEvent) -> ElectionDecision:
    """Handle one event."""
    match event:
        case KeyChanged():
            return _key_changed(state, event)
        case MasterRefused(token):
            if state.role is Role.FOLLOWER and token == state.token and state.registered:
                return _stand(state, token, "the Master's host refuses connections: replacing it")
            return ElectionDecision(state, (), "an old hint")
        case CampaignEnded():
            return _campaign_ended(state, event)
        case LauncherRegistered():
            registered = dataclasses.replace(state, registered=True)
            if state.role is Role.FOLLOWER and not state.token:
                return _stand(registered, FencingToken(0), "there is no Master")
            return ElectionDecision(registered, (), "registered")
        case LauncherUnregistered():
            return _resign(dataclasses.replace(state, registered=False), "this launcher's lease ended")
        case FencedOff():
            lost = (
                dataclasses.replace(state, master=None, token=FencingToken(0)) if state.role is Role.MASTER else state
            )
            return _resign(lost, "another Master has been elected")
        case OutOfTouch():
            return _retire(state)


def _key_changed(state: ElectionState, event: KeyChanged) -> ElectionDecision:
    if 0 < event.token < state.seen:
        return ElectionDecision(state, (), "stale notification")
    state = dataclasses.replace(state, seen=max(state.seen, event.token))
    if event.master is None:
        if state.role is Role.MASTER:
            return _resign(dataclasses.replace(state, master=None, token=FencingToken(0)), "the election key is gone")
        vacant = dataclasses.replace(state, master=None, token=FencingToken(0))
        if state.role is Role.FOLLOWER and state.registered:
            return _stand(vacant, FencingToken(0), "the last Master is gone")
        return ElectionDecision(vacant, (), "there is no Master")
    if state.role is Role.MASTER and event.token != state.token:
        known = dataclasses.replace(state, master=event.master, token=event.token)
        deposed = _resign(known, f"{event.master.node} is the Master now")
        return ElectionDecision(deposed.state, (*deposed.effects, Follow(event.master, event.token)), deposed.reason)
    if event.token == state.token and state.master == event.master:
        return ElectionDecision(state, (), "known already")
    followed = dataclasses.replace(state, master=event.master, token=event.token)
    if event.mine and state.registered and state.role is not Role.MASTER:
        # A campaign has succeeded, be it one that seemed lost or was followed by another one. No other launcher will
        # take this place, and a later campaign finds it taken.
        master = dataclasses.replace(followed, role=Role.MASTER)
        reason = "elected: the store shows this launcher's key"
        return ElectionDecision(master, (BecomeMaster(event.token), Follow(event.master, event.token)), reason)
    return ElectionDecision(followed, (Follow(event.master, event.token),), f"{event.master.node} is the Master")


def _campaign_ended(state: ElectionState, event: CampaignEnded) -> ElectionDecision:
    if state.role is not Role.CANDIDATE:
        return ElectionDecision(state, (), "the campaign was given up")
    if event.won and state.registered and event.token >= state.seen:
        master = dataclasses.replace(state, role=Role.MASTER, token=event.token, seen=event.token)
        return ElectionDecision(master, (BecomeMaster(event.token),), "elected")
    follower = dataclasses.replace(state, role=Role.FOLLOWER)
    if not state.token and state.registered:
        # The store was unreachable, or the winner's key (possibly our own) has not been seen yet, or is already
        # deleted again: retry.
        return _stand(follower, FencingToken(0), "no Master is known: trying again")
    return ElectionDecision(follower, (), "another launcher was faster")


def _stand(state: ElectionState, depose: FencingToken, reason: str) -> ElectionDecision:
    standing = dataclasses.replace(state, role=Role.CANDIDATE, deposing=depose)
    return ElectionDecision(standing, (Campaign(depose),), reason)


def _retire(state: ElectionState) -> ElectionDecision:
    """Step down, and run for election again as soon as the store answers."""
    if state.role is not Role.MASTER:
        return ElectionDecision(state, (), "no longer the Master")
    reason = "out of touch with the store and with a node: another Master may have been elected"
    standing = _stand(state, state.token, reason)
    return ElectionDecision(standing.state, (StepDown(reason), *standing.effects), reason)


def _resign(state: ElectionState, reason: str) -> ElectionDecision:
    effects: tuple[ElectionEffect, ...] = (StepDown(reason),) if state.role is Role.MASTER else ()
    follower = dataclasses.replace(state, role=Role.FOLLOWER)
    if follower.registered and not follower.token:
        standing = _stand(follower, FencingToken(0), reason)
        return ElectionDecision(standing.state, (*effects, *standing.effects), reason)
    return ElectionDecision(follower, effects, reason)
