"""``edl config``: the options of a job's launchers, with the sources of their values."""

from __future__ import annotations

import asyncio
import json

import click

from edl.cli.completion import node_names
from edl.cli.options import job_options, where_of


@click.command()
@job_options
@click.option(
    "--node", default="", metavar="NODE", help="The launcher's node. Default: the Master's.", shell_complete=node_names
)
@click.option("--all", "everything", is_flag=True, help="Show also the options that have their default.")
def config(as_json: bool, node: str, everything: bool, **where: str) -> None:
    """Show the options of a launcher that are not the default, and where their values come from."""
    asyncio.run(_show(where, as_json, node, everything))


async def _show(where: dict[str, str], as_json: bool, node: str, everything: bool) -> None:
    import grpc.aio

    from edl.cli.config_text import OPTIONS, changed_lines, rows
    from edl.cli.find import NoAnswer, master_of
    from edl.cli.output_text import nodes_to_ask
    from edl.cli.show import screen
    from edl.cli.tables import show_lines, show_table
    from edl.wire.json_messages import to_plain

    async with master_of(where_of(where)) as client:
        status = await client.status()
        (info,) = nodes_to_ask(client.launchers, status, [node or status.master], ())
        launcher = client.launcher(info)
        try:
            found = (await launcher.options()).options
        except grpc.aio.AioRpcError as error:
            why = f"the launcher of node {info.node} does not answer ({error.code().name.lower()})"
            raise NoAnswer(f"{why}. It may be about to end; see edl status") from None
        finally:
            await launcher.close()
    changed = changed_lines(status)
    if as_json:
        document = {"job": status.job, "node": info.node, "options": to_plain(found), "changed": changed}
        click.echo(json.dumps(document, indent=2))
        return
    console = screen()
    shown = rows(found, everything=everything)
    show_table(console, OPTIONS, shown)
    if len(shown) < len(found):
        show_lines(console, [f"{len(found) - len(shown)} options have their defaults (--all lists them)"])
    show_lines(console, changed)
