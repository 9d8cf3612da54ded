"""``edl data add``: adds files to a data set of a running job."""

from __future__ import annotations

import asyncio
import json
import re

import click

from edl.cli.options import job_options, reason_option, wait_option, where_of


@click.group()
def data() -> None:
    """Change data sets of a running job."""


@data.command()
@job_options
@wait_option
@reason_option
@click.argument("dataset")
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
