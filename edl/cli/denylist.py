"""``edl denylist``: the bad devices and hosts that jobs share a list of. Needs no running job."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edl.cli.options import duration_s, store_options, where_of
from edl.errors import SettingError, UsageError

if TYPE_CHECKING:
    from edl.denylist.places import DenylistPlace
    from edl.wire.denylist import DenylistEntry

F = TypeVar("F", bound=Callable[..., Any])
IN_STORE = "store"
OFF = "off"
"""What the launcher's variable says in place of a directory if there is no denylist."""
SHOWN = 8
"""Entries listed in an error."""


def _place_options(function: F) -> F:
    return click.option(
        "--at",
        default="",
        envvar="EDL_DENYLIST",
        metavar="store|DIR|URL",
        help="Where the denylist is kept, as for the launcher (--denylist). store: the etcd at --rdzv-endpoint.",
    )(store_options(function))


@click.group()
def denylist() -> None:
    """List and change the denylist: devices and hosts that no job uses because one job has found them faulty."""


@denylist.command(name="list")
@_place_options
def list_(as_json: bool, at: str, **where: str) -> None:
    """List all entries."""
    asyncio.run(_list(where, at, as_json))


@denylist.command()
@_place_options
@click.argument("host", required=False, default="")
@click.option("--device", default="", metavar="UUID", help="Only this device, wherever it is.")
@click.option("--for", "period", default="", metavar="TIME", help="Until it expires: 12h, 7d. Default: never.")
@click.option("--reason", required=True, metavar="TEXT", help="The reason, which every job that is kept off it shows.")
def add(host: str, device: str, period: str, reason: str, as_json: bool, at: str, **where: str) -> None:
    """Keep HOST, or one device, out of all jobs. HOST: its host name, or what --host-id of its launchers says.
    Running jobs stop using it at their next step boundary."""
    asyncio.run(_add(where, at, as_json, host, device, period, reason))


@denylist.command()
@_place_options
@click.argument("names", nargs=-1, metavar="[HOST|UUID…]")
@click.option("--expired", is_flag=True, help="All entries that have expired by the clock of this host.")
def remove(names: tuple[str, ...], expired: bool, as_json: bool, at: str, **where: str) -> None:
    """Let hosts and devices be used again."""
    asyncio.run(_remove(where, at, as_json, names, expired))


async def _list(where: dict[str, str], at: str, as_json: bool) -> None:
    from edl.adapters.clock import wall_clock_s
    from edl.wire.json_messages import to_plain

    async with _opened(where, at) as place:
        entries, now_s = await _entries(place), wall_clock_s()
        counting = [one for one in entries if not one.expired(now_s)]
        _tell_of_expired(len(entries) - len(counting), place.where)
    if as_json:
        click.echo(json.dumps([to_plain(one) for one in counting], indent=2))
        return
    for one in counting:
        click.echo(_line(one))
    if not counting:
        click.echo(f"Nothing is on the denylist in {place.where}")


def _tell_of_expired(number: int, where: str) -> None:
    """Say on stderr that entries have expired. Few jobs last as long as an entry, and others leave it where it is."""
    if number:
        what = f"{number} expired {'entry' if number == 1 else 'entries'} in {where}"
        click.echo(f"edl: {what}: delete with edl denylist remove --expired", err=True)


def _line(one: DenylistEntry) -> str:
    from edl.rendezvous.phrases import day, one_line

    what = f"device {one.device}" if one.device else f"host {one.host}"
    if one.device and one.host:  # without it: added by hand
        what += f" (last in {one.host})"
    until = f"until {day(one.until_s)}" if one.until_s else "until it is removed"
    return one_line(f"{what}: {until}, added {day(one.since_s)} by {one.by}: {one.reason}")


async def _add(where: dict[str, str], at: str, as_json: bool, host: str, device: str, period: str, reason: str) -> None:
    from edl.adapters.clock import wall_clock_s
    from edl.cli.ask import who_asks
    from edl.wire.denylist import DenylistEntry
    from edl.wire.json_messages import to_plain

    if not host and not device:
        raise UsageError("edl denylist add: name a host, or a device with --device=UUID")
    keep_s = duration_s(period) if period else None
    if period and not keep_s:
        raise SettingError("--for", period, "must be a time above 0", "Write 90s, 12h or 7d. Without it: for ever")
    now_s = wall_clock_s()
    entry = DenylistEntry(
        *(host, device, " ".join(reason.split()), who_asks()),
        since_s=now_s,
        until_s=now_s + keep_s if keep_s else 0.0,
    )
    async with _opened(where, at) as place:
        await place.put(entry)
    click.echo(json.dumps(to_plain(entry)) if as_json else _line(entry))


async def _remove(where: dict[str, str], at: str, as_json: bool, names: Sequence[str], expired: bool) -> None:
    from edl.adapters.clock import wall_clock_s
    from edl.rendezvous.phrases import day
    from edl.wire.json_messages import to_plain

    if expired == bool(names):
        raise UsageError("edl denylist remove: name hosts or devices, or give --expired")
    async with _opened(where, at) as place:
        entries, now_s = await _entries(place), wall_clock_s()
        meant = [one for one in entries if one.expired(now_s)] if expired else []
        meant += [_meant(entries, name, place.where) for name in names]
        for entry in meant:
            await place.remove(entry.name)
    for entry in meant:
        since = f" (expired {day(entry.until_s)})" if expired else ""
        click.echo(json.dumps(to_plain(entry)) if as_json else f"removed: {entry.device or entry.host}{since}")


async def _entries(place: DenylistPlace) -> Sequence[DenylistEntry]:
    """All entries; says on stderr which ones cannot be read."""
    found = await place.entries()
    if place.left_out:
        click.echo(f"edl: {place.left_out}", err=True)
    return found


def _meant(entries: Sequence[DenylistEntry], name: str, where: str) -> DenylistEntry:
    """The entry with this device or host. Raises ``UsageError`` if there is none."""
    wanted = name.casefold()
    found = next((one for one in entries if wanted == (one.device or one.host).casefold()), None)
    if found is not None:
        return found
    known = [one.device or one.host for one in entries]
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    listed = f"It has {', '.join(known[:SHOWN])}{more}" if known else "It has no entries"
    raise UsageError(f"{name} is not in the denylist in {where}. {listed}")


@contextlib.asynccontextmanager
async def _opened(where: dict[str, str], at: str) -> AsyncIterator[DenylistPlace]:
    from edl.denylist.places import FilesDenylist, StoreDenylist

    if at not in ("", OFF, IN_STORE):
        from edl.adapters.remote_files import open_files

        try:
            files = open_files(at)
        except SettingError as error:
            raise error.renamed("--at") from None
        yield FilesDenylist(files, asyncio.to_thread)
        return
    from edl.cli.find import store_of

    wanted = where_of(where)
    if not wanted.endpoints:
        raise UsageError("where is the denylist? Name its directory (--at=DIR), or its etcd (--rdzv-endpoint)")
    async with store_of(wanted) as store:
        yield StoreDenylist(store, ",".join(wanted.endpoints))
