"""``edl notify test``: tries the channels of a running job."""

from __future__ import annotations

import asyncio
import json

import click

from edl.cli.options import job_options, where_of

LONGEST_S = 45.0
"""Seconds to wait for the answer: an attempt of a channel ends after 30."""


@click.group()
def notify() -> None:
    """Notifications of a running job."""


@notify.command()
@job_options
def test(as_json: bool, **where: str) -> None:
    """Send a test notification through every channel of the Master's launcher, whatever its severity, and print the
    result of each. Fails if one of them failed."""
    asyncio.run(_test(where, as_json))


async def _test(where: dict[str, str], as_json: bool) -> None:
    from edl.cli.ask import who_asks
    from edl.cli.find import master_of
    from edl.errors import NotificationError
    from edl.wire.json_messages import to_plain
    from edl.wire.messages import Asked
    from edl.wire.purpose import Purpose

    async with master_of(where_of(where)) as client:
        answer = await client.ask(Asked(Purpose.NOTIFY, who_asks()), LONGEST_S)
    click.echo(json.dumps(to_plain(answer)) if as_json else answer.text)
    if not answer.ok:
        raise NotificationError("not every channel works", retry=False)
