"""``edl quarantine``: the bad devices and machines that jobs share a list of. Needs no running job."""

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
    from edl.quarantine.places import Place
    from edl.wire.quarantine import Quarantined

F = TypeVar("F", bound=Callable[..., Any])
IN_STORE = "store"
SHOWN = 8
"""Entries listed in an error."""


def _place_options(function: F) -> F:
    return click.option(
        "--at",
        default="",
        envvar="EDL_QUARANTINE",
        metavar="store|DIR|URL",
        help="Where the quarantine is kept, as for the launcher (--quarantine). store: the etcd at --rdzv-endpoint.",
    )(store_options(function))


@click.group()
def quarantine() -> None:
    """Devices and machines that no job uses, because one has found them bad."""


@quarantine.command(name="list")
@_place_options
def list_(as_json: bool, at: str, **where: str) -> None:
    """List all entries."""
    asyncio.run(_list(where, at, as_json))


@quarantine.command()
@_place_options
@click.argument("machine", required=False, default="")
@click.option("--device", default="", metavar="UUID", help="Only this device, wherever it is.")
@click.option("--for", "period", default="", metavar="TIME", help="Until it expires: 12h, 7d. Default: never.")
@click.option("--reason", required=True, metavar="TEXT", help="The reason, which every job that is kept off it shows.")
def add(machine: str, device: str, period: str, reason: str, as_json: bool, at: str, **where: str) -> None:
    """Keep MACHINE, or one device, out of all jobs. MACHINE: its host name, or what --machine of its launchers says.
    Running jobs stop using it at their next step boundary."""
    asyncio.run(_add(where, at, as_json, machine, device, period, reason))


@quarantine.command()
@_place_options
@click.argument("names", nargs=-1, required=True, metavar="MACHINE|UUID…")
def remove(names: tuple[str, ...], as_json: bool, at: str, **where: str) -> None:
    """Let machines and devices be used again."""
    asyncio.run(_remove(where, at, as_json, names))


async def _list(where: dict[str, str], at: str, as_json: bool) -> None:
    from edl.adapters.clock import wall_clock_s
    from edl.wire.json_messages import to_plain

    async with _opened(where, at) as place:
        entries, now_s = await place.entries(), wall_clock_s()
        counting = [one for one in entries if not one.expired(now_s)]
    if as_json:
        click.echo(json.dumps([to_plain(one) for one in counting], indent=2))
        return
    for one in counting:
        click.echo(_line(one))
    if not counting:
        click.echo(f"Nothing is in quarantine in {place.where}")


def _line(one: Quarantined) -> str:
    from edl.rendezvous.phrases import day, one_line

    what = f"device {one.device} (last in {one.machine})" if one.device else f"machine {one.machine}"
    until = f"until {day(one.until_s)}" if one.until_s else "until it is removed"
    return one_line(f"{what}: {until}, added {day(one.since_s)} by {one.by}: {one.reason}")


async def _add(
    where: dict[str, str], at: str, as_json: bool, machine: str, device: str, period: str, reason: str
) -> None:
    from edl.adapters.clock import wall_clock_s
    from edl.cli.ask import who_asks
    from edl.wire.json_messages import to_plain
    from edl.wire.quarantine import Quarantined

    if not machine and not device:
        raise UsageError("edl quarantine add: name a machine, or a device with --device=UUID")
    keep_s = duration_s(period) if period else 0.0
    if keep_s is None:
        raise SettingError("--for", period, "is no duration", "Write 90s, 15m, 12h or 7d")
    now_s = wall_clock_s()
    entry = Quarantined(
        *(machine, device, " ".join(reason.split()), who_asks()),
        since_s=now_s,
        until_s=now_s + keep_s if keep_s else 0.0,
    )
    async with _opened(where, at) as place:
        await place.put(entry)
    click.echo(json.dumps(to_plain(entry)) if as_json else _line(entry))


async def _remove(where: dict[str, str], at: str, as_json: bool, names: Sequence[str]) -> None:
    from edl.wire.json_messages import to_plain

    async with _opened(where, at) as place:
        entries = await place.entries()
        meant = [_meant(entries, name, place.where) for name in names]
        for entry in meant:
            await place.remove(entry.name)
    for entry in meant:
        click.echo(json.dumps(to_plain(entry)) if as_json else f"removed: {entry.device or entry.machine}")


def _meant(entries: Sequence[Quarantined], name: str, where: str) -> Quarantined:
    """The entry with this device or machine. Raises ``UsageError`` if there is none."""
    wanted = name.casefold()
    found = next((one for one in entries if wanted == (one.device or one.machine).casefold()), None)
    if found is not None:
        return found
    known = [one.device or one.machine for one in entries]
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    listed = f"It has {', '.join(known[:SHOWN])}{more}" if known else "It has no entries"
    raise UsageError(f"{name} is not in the quarantine in {where}. {listed}")


@contextlib.asynccontextmanager
async def _opened(where: dict[str, str], at: str) -> AsyncIterator[Place]:
    from edl.quarantine.places import FilesPlace, StorePlace

    if at not in ("", IN_STORE):
        from edl.adapters.remote_files import open_files

        try:
            files = open_files(at)
        except SettingError as error:
            raise error.renamed("--at") from None
        yield FilesPlace(files, asyncio.to_thread)
        return
    from edl.cli.find import store_of

    wanted = where_of(where)
    if not wanted.endpoints:
        raise UsageError("where is the quarantine? Name its directory (--at=DIR), or its etcd (--rdzv-endpoint)")
    async with store_of(wanted) as store:
        yield StorePlace(store, ",".join(wanted.endpoints))
