"""``edl health``: what is wrong with the nodes of a job."""

from __future__ import annotations

import asyncio
import json

import click

from edl.cli.completion import node_names
from edl.cli.options import job_options, where_of


@click.command()
@job_options
@click.option("--node", default="", metavar="NODE", help="Only this node.", shell_complete=node_names)
def health(as_json: bool, node: str, **where: str) -> None:
    """Show for each node its devices, dropped slots, alarms, and what checks have found."""
    asyncio.run(_show(where, as_json, node))


async def _show(where: dict[str, str], as_json: bool, node: str) -> None:
    from edl.cli.find import master_of
    from edl.cli.health_text import NODES, health_of, health_row, problem_lines
    from edl.cli.show import screen
    from edl.cli.tables import show_lines, show_table
    from edl.errors import UsageError
    from edl.wire.json_messages import to_plain

    async with master_of(where_of(where)) as client:
        status = await client.status()
        launchers = client.launchers
    found = [one for one in health_of(status, launchers) if node in ("", one.node)]
    if node and not found:
        raise UsageError(f"job {status.job} has no node {node}; see edl status")
    if as_json:
        job = {"alarms": to_plain(status.alarms), "warnings": list(status.warnings)}
        click.echo(json.dumps({"job": status.job, **job, "nodes": to_plain(tuple(found))}, indent=2))
        return
    console = screen()
    show_table(console, NODES, [health_row(one) for one in found])
    show_lines(console, problem_lines(status, found) or ["No alarms, no dropped slots, no warnings."])
