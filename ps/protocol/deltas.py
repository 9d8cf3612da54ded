"""What has changed in orders and in the membership since the last word about it, so that not all is said again.

A change of one trainer among a thousand is a few bytes to everybody. Whoever has missed a word notices, since each says
what it goes on from, and asks for everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ps.protocol.messages import Counted, Member, Orders, OrdersChanged

_SHARED = ("training", "tables", "lr", "revoked", "since", "giver")
Members = tuple[Member, ...]


def counted(token: int, since: int, before: Members, epoch: int, now: Members) -> Counted:
    """From the membership of epoch ``since`` to that of ``epoch``."""
    return Counted(token, since, epoch, *_moves(before, now))


def members_after(members: Members, came: Iterable[Member], went: Iterable[int]) -> Members:
    """Those of the next epoch, by their numbers."""
    left = {one.number: one for one in members}
    for number in went:
        left.pop(number, None)
    left.update({one.number: one for one in came})
    return tuple(left[number] for number in sorted(left))


def orders_changed(before: Orders, now: Orders) -> OrdersChanged:
    """From the one to the other, without what each pserver is told for itself."""
    came, went = _moves(before.members, now.members)
    chart = None if replace(before.chart, version=now.chart.version) == now.chart else now.chart
    new = {name: getattr(now, name) for name in _SHARED if getattr(now, name) != getattr(before, name)}
    return OrdersChanged(
        now.token, now.you, before.chart.version, now.chart.version, now.epoch, came, went, chart, **new
    )


def orders_after(before: Orders, change: OrdersChanged) -> Orders:
    """The inverse. ``change`` goes on from ``before``."""
    chart = change.chart or replace(before.chart, version=change.version)
    new = {name: getattr(change, name) for name in _SHARED if getattr(change, name) is not None}
    members = members_after(before.members, change.came, change.went)
    return replace(
        before, token=change.token, you=change.you, chart=chart, epoch=change.epoch, members=members, cut=change.cut,
        drain=change.drain, go=change.go, **new,
    )  # fmt: skip


def _moves(before: Members, now: Members) -> tuple[Members, tuple[int, ...]]:
    if before is now:
        return (), ()
    old, new = set(before), {one.number for one in now}
    return tuple(one for one in now if one not in old), tuple(one.number for one in before if one.number not in new)
