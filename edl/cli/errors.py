"""``edl errors``: which workers of a job failed, and why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from edl.cli.options import job_options, where_of

if TYPE_CHECKING:
    from edl.cli.find import Where
    from edl.cli.incident_list import PastIncident
    from edl.wire.records import Failure
    from edl.wire.status import HistoryEntry


@click.command()
@job_options
@click.option("--all", "everything", is_flag=True, help="Show earlier incidents as well, as far as they are known.")
def errors(as_json: bool, everything: bool, **where: str) -> None:
    """Show the last incident: which workers failed, where and why, with tracebacks, the root cause first."""
    asyncio.run(_errors(where_of(where), as_json, everything))


async def _errors(where: Where, as_json: bool, everything: bool) -> None:
    from edl.cli.incident_list import incidents
    from edl.wire.json_messages import to_plain

    job, ending, history, failures = await _known(where)
    found = incidents(history, failures)
    shown = found if everything else found[:1]
    if as_json:
        click.echo(json.dumps({"job": job, "ending": ending, "incidents": to_plain(tuple(shown))}, indent=2))
        return
    click.echo("\n".join(incident_lines(job, shown, len(found) - len(shown), ending)))


async def _known(where: Where) -> tuple[str, str, list[HistoryEntry], tuple[Failure, ...]]:
    """Name of the job, how it ended (empty: it has not), its history, and the failures of its last incident. Raises
    ``NoMaster`` if nothing is known about the job."""
    from edl.cli.find import NoMaster, master_of

    try:
        async with master_of(where) as client:
            status = await client.status()
            history = [entry async for entry in client.events(0, follow=False)]
    except NoMaster as error:
        if error.outcome is None:
            raise
        return where.job, str(error), [], error.outcome.failures
    return status.job, "", history, status.failures


def incident_lines(job: str, shown: Sequence[PastIncident], more: int, ending: str = "") -> list[str]:
    """The text of ``edl errors``. ``more``: number of incidents that are not shown. ``ending``: how the job ended."""
    from edl.agent.failure_report import failure_text
    from edl.cli.show import moment
    from edl.rendezvous.phrases import count, lines_of, one_line

    lines = [one_line(ending)] if ending else []
    if not shown:
        return [*lines, one_line(f"no failure of a worker of job {job} is known")]
    for incident in shown:
        lines += ["", f"Incident in round {incident.round}, {moment(incident.at_s)}"]
        lines += [f"  {one_line(entry.text)}" for entry in incident.events]
        if incident.failures:
            lines += lines_of(failure_text(incident.failures, every=True))
    if more:
        lines += ["", f"{count(more, 'earlier incident')}: edl errors --all"]
    return lines if lines[0] else lines[1:]
