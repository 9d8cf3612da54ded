"""``edl data``: the data sets of a job; ``edl data add`` adds files to one of them."""

from __future__ import annotations

import asyncio
import json
import re

import click

from edl.cli.completion import data_set_names, node_names
from edl.cli.options import job_options, reason_option, wait_option, where_of


@click.group(invoke_without_command=True)
@job_options
@click.option("--node", default="", metavar="NODE", help="Only this node.", shell_complete=node_names)
@click.pass_context
def data(context: click.Context, /, as_json: bool, node: str, **where: str) -> None:
    """Show the data sets of a job: progress, leases, and which nodes read. With a command, change them."""
    if context.invoked_subcommand is None:
        asyncio.run(_show(where, as_json, node))
        return
    given = [name for name in context.params if _is_given(context, name)]
    if given:
        raise click.UsageError(f"options belong after the command: edl data {context.invoked_subcommand} …", context)


@data.command()
@job_options
@wait_option
@reason_option
@click.argument("dataset", shell_complete=data_set_names)
@click.argument("files", nargs=-1, required=True, metavar="FILE|PATTERN…")
@click.option(
    "--when",
    type=click.Choice(["now", "next-epoch"]),
    default="now",
    show_default=True,
    help="now: in the current epoch if it has records left, otherwise in the next one.",
)
def add(dataset: str, files: tuple[str, ...], when: str, reason: str, wait: bool, as_json: bool, **where: str) -> None:
    """Add files to DATASET: paths, patterns or URLs as the workers see them (quote patterns so that the shell does not
    expand them). A worker checks the files; files that are listed already are not added twice."""
    asyncio.run(_add(where, as_json, dataset, files, when, reason, wait))


def _is_given(context: click.Context, name: str) -> bool:
    """Whether an option is on the command line; variables hold for every command."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


async def _show(where: dict[str, str], as_json: bool, node: str) -> None:
    from edl.cli.data_text import SETS, SHARES, data_sets, set_row, share_rows
    from edl.cli.find import master_of
    from edl.cli.show import screen
    from edl.cli.tables import show_lines, show_table
    from edl.errors import UsageError
    from edl.wire.json_messages import to_plain

    async with master_of(where_of(where)) as client:
        status = await client.status()
    sets = data_sets(status)
    if not sets:
        raise UsageError(f"job {status.job} has no data sets: it reads its data without edl's data service")
    if as_json:
        click.echo(json.dumps({"job": status.job, "data_sets": to_plain(tuple(sets))}, indent=2))
        return
    console = screen()
    show_table(console, SETS, [set_row(one) for one in sets])
    rows = share_rows(sets, node)
    show_lines(console, [""] if rows else [])
    if rows:
        show_table(console, SHARES, rows)
    show_lines(console, [text for text in status.flaws if text.startswith("data ")])


async def _add(
    where: dict[str, str], as_json: bool, dataset: str, files: tuple[str, ...], when: str, reason: str, wait: bool
) -> None:
    from edl.cli.ask import OrderReader, RequestOutcome, follow, who_asks
    from edl.cli.find import master_of
    from edl.errors import DataError, UsageError
    from edl.wire.json_messages import to_plain
    from edl.wire.messages import Asked
    from edl.wire.purpose import Purpose

    body = json.dumps({"dataset": dataset, "files": files, "when": when})
    by = f"edl data add ({who_asks()})" + (f": {reason}" if reason else "")
    async with master_of(where_of(where)) as client:
        history = (await client.status()).history
        answer = await client.ask(Asked(Purpose.DATA, by, body))
        if not answer.ok:
            raise UsageError(answer.text)
        outcome = RequestOutcome(True, answer.text)
        number = re.match(r"order (\d+) ", answer.text)
        if wait and number:
            click.echo(answer.text, err=True)
            after = history[-1].number if history else 0
            outcome = await follow(client.events(after, follow=True), OrderReader(dataset, int(number[1])))
    if not outcome.ok:
        raise DataError(outcome.text)
    click.echo(json.dumps(to_plain(outcome)) if as_json else outcome.text)
