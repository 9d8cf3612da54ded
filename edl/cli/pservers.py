"""``edl ps``: the parameter servers of a job."""

from __future__ import annotations

import asyncio
import json

import click

from edl.cli.options import job_options, where_of


@click.command(name="ps")
@job_options
def ps(as_json: bool, **where: str) -> None:
    """Show the parameter servers: placement, load, copies, trainers and the last checkpoint."""
    asyncio.run(_show(where, as_json))


async def _show(where: dict[str, str], as_json: bool) -> None:
    from edl.cli.find import master_of
    from edl.cli.pserver_text import SERVERS, server_rows, servers_of, summary_lines
    from edl.cli.show import screen
    from edl.cli.tables import show_lines, show_table
    from edl.errors import UsageError
    from edl.wire.json_messages import to_plain

    async with master_of(where_of(where)) as client:
        status = await client.status()
    items = servers_of(status)
    if not items:
        raise UsageError(f"job {status.job} has no parameter servers (--run-mode=ps)")
    if as_json:
        click.echo(json.dumps({"job": status.job, "items": to_plain(tuple(items))}, indent=2))
        return
    console = screen()
    show_lines(console, summary_lines(items))
    show_table(console, SERVERS, server_rows(items))
