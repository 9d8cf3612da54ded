"""Deltas of orders and membership, so that not everything is sent again.

A change of one trainer among a thousand is a few bytes to each peer. Each delta names its base, so a peer that missed
one notices and requests the complete state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ps.protocol.messages import MembersChanged, Orders, OrdersChanged, TrainerMember

_SHARED = ("training", "tables", "lr", "revoked", "since", "giver")
Members = tuple[TrainerMember, ...]


def counted(token: int, since: int, before: Members, epoch: int, now: Members) -> MembersChanged:
    """The delta from the membership of epoch ``since`` to that of ``epoch``."""
    return MembersChanged(token, since, epoch, *_moves(before, now))


def members_after(members: Members, came: Iterable[TrainerMember], went: Iterable[int]) -> Members:
    """Apply a membership delta; the result is in order of number."""
    left = {one.number: one for one in members}
    for number in went:
        left.pop(number, None)
    left.update({one.number: one for one in came})
    return tuple(left[number] for number in sorted(left))


def orders_changed(before: Orders, now: Orders) -> OrdersChanged:
    """The delta between two orders, without the parts specific to one pserver."""
    came, went = _moves(before.members, now.members)
    placement = None if replace(before.placement, version=now.placement.version) == now.placement else now.placement
    new = {name: getattr(now, name) for name in _SHARED if getattr(now, name) != getattr(before, name)}
    return OrdersChanged(
        now.token, now.you, before.placement.version, now.placement.version, now.epoch, came, went, placement, **new
    )


def orders_after(before: Orders, change: OrdersChanged) -> Orders:
    """Apply a delta to the orders that it is based on."""
    placement = change.placement or replace(before.placement, version=change.version)
    new = {name: getattr(change, name) for name in _SHARED if getattr(change, name) is not None}
    members = members_after(before.members, change.came, change.went)
    return replace(
        before, token=change.token, you=change.you, placement=placement, epoch=change.epoch, members=members,
        checkpoint=change.checkpoint, drain=change.drain, go=change.go, **new,
    )  # fmt: skip


def _moves(before: Members, now: Members) -> tuple[Members, tuple[int, ...]]:
    if before is now:
        return (), ()
    old, new = set(before), {one.number for one in now}
    return tuple(one for one in now if one not in old), tuple(one.number for one in before if one.number not in new)
