"""The election of the Master: a machine that runs in every launcher. The store decides between launchers.

The launcher that creates the election key is the Master. The key's create revision is the fencing token: every write of
a Master depends on it, so a replaced Master cannot write. Therefore a Master may be deposed long before its lease ends,
as soon as its host refuses connections: at worst a living Master is replaced, and none of its later writes takes
effect.
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
    """URL of its HTTP interface; empty: none."""


class Role(enum.Enum):
    """Role of this launcher in the election."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    """A campaign is in progress in the store; its result arrives as an event."""
    MASTER = "master"


@dataclass(frozen=True, slots=True)
class ElectionState:
    """One launcher's knowledge of the election. ``token`` 0: no Master is known."""

    role: Role = Role.FOLLOWER
    master: MasterInfo | None = None
    token: FencingToken = FencingToken(0)
    seen: FencingToken = FencingToken(0)
    """Revision of the newest known creation or deletion of the election key; older ones are outdated."""
    registered: bool = False
    """Whether this launcher has a lease, without which it cannot campaign."""
    deposing: FencingToken = FencingToken(0)
    """The Master that this launcher's last campaign replaces; 0: none."""

    @property
    def known(self) -> MasterInfo | None:
        """The current Master; None if unknown, or if it is the one that this launcher campaigns against. A candidate
        learns that another one has won before its own campaign ends, which takes seconds if its store member was lost
        with the Master."""
        return None if self.role is Role.CANDIDATE and self.token == self.deposing else self.master


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """The election key as reported by the watch. ``master`` None: it has been deleted.

    ``token``: its create revision, or the revision of its deletion (0: unknown). A watch may lag behind this launcher's
    own writes, so revisions decide, not the order of arrival.
    """

    master: MasterInfo | None
    token: FencingToken
    mine: bool = False
    """Whether the key is attached to this launcher's lease."""


@dataclass(frozen=True, slots=True)
class MasterRefused:
    """The Master's host refuses connections on its port, so that Master is dead."""

    token: FencingToken


@dataclass(frozen=True, slots=True)
class CampaignEnded:
    """The result of a campaign. ``token``: that of this launcher if ``won``; 0 if another launcher was faster or the
    store did not answer."""

    won: bool
    token: FencingToken


@dataclass(frozen=True, slots=True)
class LauncherRegistered:
    """This launcher has obtained a lease."""


@dataclass(frozen=True, slots=True)
class LauncherUnregistered:
    """This launcher's lease has ended, or the launcher is about to leave."""


@dataclass(frozen=True, slots=True)
class FencedOff:
    """A guarded write was refused: another Master has been elected."""


@dataclass(frozen=True, slots=True)
class OutOfTouch:
    """The store has not answered this Master for a lease time, and a node is not attached, which may already follow
    another Master: this Master must step down."""


ElectionEvent = (
    KeyChanged | MasterRefused | CampaignEnded | LauncherRegistered | LauncherUnregistered | FencedOff | OutOfTouch
)


@dataclass(frozen=True, slots=True)
class Campaign:
    """Delete the key if its create revision is ``depose`` (0: do not delete), then create it if it does not exist."""

    depose: FencingToken


@dataclass(frozen=True, slots=True)
class BecomeMaster:
    """Start as Master with this token."""

    token: FencingToken


@dataclass(frozen=True, slots=True)
class StepDown:
    """Stop as Master at once, and send nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Attach to this Master, which may run in this launcher."""

    master: MasterInfo
    token: FencingToken


ElectionEffect = Campaign | BecomeMaster | StepDown | Follow


@dataclass(frozen=True, slots=True)
class ElectionDecision:
    """The result of one step: the new state, effects, and the reason for logs and tests."""

    state: ElectionState
    effects: tuple[ElectionEffect, ...]
    reason: str


def elect(state: ElectionState, event: ElectionEvent) -> ElectionDecision:
    """Handle one event: the step function of the machine."""
    match event:
        case KeyChanged():
            return _key_changed(state, event)
        case MasterRefused(token):
            if state.role is Role.FOLLOWER and token == state.token and state.registered:
                return _start_campaign(state, token, "the Master's host refuses connections: replacing it")
            return ElectionDecision(state, (), "about an earlier Master")
        case CampaignEnded():
            return _campaign_ended(state, event)
        case LauncherRegistered():
            registered = dataclasses.replace(state, registered=True)
            if state.role is Role.FOLLOWER and not state.token:
                return _start_campaign(registered, FencingToken(0), "there is no Master")
            return ElectionDecision(registered, (), "registered")
        case LauncherUnregistered():
            return _resign(dataclasses.replace(state, registered=False), "this launcher's lease ended")
        case FencedOff():
            lost = (
                dataclasses.replace(state, master=None, token=FencingToken(0)) if state.role is Role.MASTER else state
            )
            return _resign(lost, "another Master has been elected")
        case OutOfTouch():
            return _step_down(state)


def _key_changed(state: ElectionState, event: KeyChanged) -> ElectionDecision:
    if 0 < event.token < state.seen:
        return ElectionDecision(state, (), "stale notification")
    state = dataclasses.replace(state, seen=max(state.seen, event.token))
    if event.master is None:
        if state.role is Role.MASTER:
            return _resign(dataclasses.replace(state, master=None, token=FencingToken(0)), "the election key is gone")
        vacant = dataclasses.replace(state, master=None, token=FencingToken(0))
        if state.role is Role.FOLLOWER and state.registered:
            return _start_campaign(vacant, FencingToken(0), "the last Master is gone")
        return ElectionDecision(vacant, (), "there is no Master")
    if state.role is Role.MASTER and event.token != state.token:
        known = dataclasses.replace(state, master=event.master, token=event.token)
        deposed = _resign(known, f"{event.master.node} is the Master now")
        return ElectionDecision(deposed.state, (*deposed.effects, Follow(event.master, event.token)), deposed.reason)
    if event.token == state.token and state.master == event.master:
        return ElectionDecision(state, (), "known already")
    followed = dataclasses.replace(state, master=event.master, token=event.token)
    if event.mine and state.registered and state.role is not Role.MASTER:
        # A campaign of this launcher has succeeded although its result was lost or has not arrived. No other launcher
        # can create the key now, and a later campaign of this launcher will find it taken.
        master = dataclasses.replace(followed, role=Role.MASTER)
        reason = "elected: the store shows this launcher's key"
        return ElectionDecision(master, (BecomeMaster(event.token), Follow(event.master, event.token)), reason)
    return ElectionDecision(followed, (Follow(event.master, event.token),), f"{event.master.node} is the Master")


def _campaign_ended(state: ElectionState, event: CampaignEnded) -> ElectionDecision:
    if state.role is not Role.CANDIDATE:
        return ElectionDecision(state, (), "the campaign was abandoned")
    if event.won and state.registered and event.token >= state.seen:
        master = dataclasses.replace(state, role=Role.MASTER, token=event.token, seen=event.token)
        return ElectionDecision(master, (BecomeMaster(event.token),), "elected")
    follower = dataclasses.replace(state, role=Role.FOLLOWER)
    if not state.token and state.registered:
        # The store was unreachable, or the winner's key (possibly our own) has not been reported yet, or has been
        # deleted again: retry.
        return _start_campaign(follower, FencingToken(0), "no Master is known: trying again")
    return ElectionDecision(follower, (), "another launcher was faster")


def _start_campaign(state: ElectionState, depose: FencingToken, reason: str) -> ElectionDecision:
    candidate = dataclasses.replace(state, role=Role.CANDIDATE, deposing=depose)
    return ElectionDecision(candidate, (Campaign(depose),), reason)


def _step_down(state: ElectionState) -> ElectionDecision:
    """Step down, and campaign again as soon as the store answers."""
    if state.role is not Role.MASTER:
        return ElectionDecision(state, (), "no longer the Master")
    reason = "out of touch with the store and with a node: another Master may have been elected"
    standing = _start_campaign(state, state.token, reason)
    return ElectionDecision(standing.state, (StepDown(reason), *standing.effects), reason)


def _resign(state: ElectionState, reason: str) -> ElectionDecision:
    effects: tuple[ElectionEffect, ...] = (StepDown(reason),) if state.role is Role.MASTER else ()
    follower = dataclasses.replace(state, role=Role.FOLLOWER)
    if follower.registered and not follower.token:
        campaign = _start_campaign(follower, FencingToken(0), reason)
        return ElectionDecision(campaign.state, (*effects, *campaign.effects), reason)
    return ElectionDecision(follower, effects, reason)
