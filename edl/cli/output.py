"""``edl logs`` and ``edl stacks``: what workers have written, and what they do, from the launchers of their nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from edl.agent.workers.recent_output import MOST_LINES
from edl.cli.completion import node_names
from edl.cli.options import job_options, where_of

if TYPE_CHECKING:
    from edl.cli.find import Where
    from edl.wire.node_requests import OutputLines

POLL_S = 0.5
"""Seconds between two requests to a launcher while its output is followed."""
POLLS = 10
"""Requests until the job's nodes are looked up again."""

_rank_option = click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank.")
_node_option = click.option(
    "--node", "nodes", multiple=True, metavar="NODE", help="Only this node.", shell_complete=node_names
)
_raw_option = click.option("--raw", is_flag=True, help="Keep control characters and escape sequences of the output.")


@click.command()
@job_options
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines, until the job has ended.")
@_rank_option
@_node_option
@click.option(
    "--lines",
    type=click.IntRange(0, MOST_LINES),
    default=20,
    metavar="N",
    help=f"Number of earlier lines of each worker to show, up to {MOST_LINES}. Default: 20.",
)
@_raw_option
def logs(
    as_json: bool, follow: bool, ranks: tuple[int, ...], nodes: tuple[str, ...], lines: int, raw: bool, **where: str
) -> None:
    """Show the last lines that workers have written, from the memory of their launchers."""
    asyncio.run(_logs(where_of(where), Selection(ranks, nodes, as_json, raw), lines, follow))


@click.command()
@job_options
@_rank_option
@_node_option
@_raw_option
def stacks(as_json: bool, ranks: tuple[int, ...], nodes: tuple[str, ...], raw: bool, **where: str) -> None:
    """Show what the threads of live workers are doing. The workers continue to run."""
    asyncio.run(_stacks(where_of(where), Selection(ranks, nodes, as_json, raw)))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which workers, and how their lines are shown."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    as_json: bool
    raw: bool

    def show(self, node: str, found: OutputLines) -> None:
        """Print the lines of one node."""
        from edl.cli.output_text import line_text
        from edl.wire.json_messages import to_plain

        if found.gap:
            click.echo(f"edl: some lines of node {node} are missing: more were written than are kept", err=True)
        for line in found.lines:
            text = json.dumps({"node": node, **to_plain(line)}) if self.as_json else line_text(node, line, self.raw)
            click.echo(text, color=True)  # otherwise click removes colours from what --raw keeps


async def _logs(where: Where, selection: Selection, lines: int, follow: bool) -> None:
    from edl.cli.launchers import Launchers
    from edl.cli.output_text import no_lines_text

    async with contextlib.aclosing(Launchers(where, selection.nodes, selection.ranks)) as launchers:
        await launchers.find()
        shown = await launchers.show_output(lines, selection.show, required=True)
        if lines and not shown:
            click.echo(f"edl: {no_lines_text(selection.nodes, selection.ranks)}", err=True)
        while follow:
            for _ in range(POLLS):
                over = await launchers.rest(POLL_S)
                await launchers.show_output(lines, selection.show)
                if over:
                    break
            if await launchers.find_again():
                return


async def _stacks(where: Where, selection: Selection) -> None:
    from edl.cli.launchers import Launchers

    async with contextlib.aclosing(Launchers(where, selection.nodes, selection.ranks)) as launchers:
        await launchers.find()
        if not await launchers.show_stacks(selection.show):
            click.echo("edl: no stacks: none of these workers runs, or they are frozen and cannot write", err=True)
