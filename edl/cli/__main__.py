"""The ``edl`` command: shows a running job and controls it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from typing import TYPE_CHECKING

import click

from edl import __version__
from edl.cli import (
    config,
    data,
    denylist,
    errors,
    health,
    history,
    notify,
    output,
    pservers,
    simulate,
    size,
    top,
    watch,
)
from edl.cli.confirm import confirm, must_ask, yes_option
from edl.cli.options import job_options, wait_option, where_of
from edl.errors import EdlError
from edl.exit_codes import ExitCode
from edl.wire.json_messages import to_plain

if TYPE_CHECKING:
    from edl.wire.purpose import Purpose
    from edl.wire.status import HistoryEntry


class _Commands(click.Group):
    """Answers an unknown command with the list of commands. click would suggest the most similar name, which may be
    ``stop``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"no such command: {args[0]}. Commands: {known}. `edl status` shows a job", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"auto_envvar_prefix": "EDL"})
@click.version_option(__version__, prog_name="edl", allow_from_autoenv=False)
def edl() -> None:
    """Inspect and control elastic jobs. Start one with edl-run (python -m edl.launch)."""


@edl.command()
@job_options
@click.option("--all", "everything", is_flag=True, help="List all nodes, even if there are many.")
def status(as_json: bool, everything: bool, **where: str) -> None:
    """Show nodes, ranks, round, phase, restart budget, last events and errors."""
    asyncio.run(_status(where, as_json, everything))


@edl.command()
@job_options
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events, until the job has ended.")
@click.option("--after", default=0, help="Only events with a higher number than this; --json shows the numbers.")
def events(as_json: bool, follow: bool, after: int, **where: str) -> None:
    """Show the events of a running job, oldest first. For a job that has ended: edl history."""
    asyncio.run(_events(where, as_json, follow, after))


@edl.command()
@job_options
@wait_option
def checkpoint(as_json: bool, wait: bool, **where: str) -> None:
    """Write a checkpoint at the next step boundary and continue training. Prints the checkpoint's location."""
    from edl.wire.purpose import Purpose

    asyncio.run(_ask(where, as_json, Purpose.SAVE, wait))


@edl.command()
@job_options
@wait_option
@yes_option
def stop(as_json: bool, wait: bool, yes: bool, **where: str) -> None:
    """Write a checkpoint at the next step boundary and end the job."""
    from edl.wire.purpose import Purpose

    asyncio.run(_ask(where, as_json, Purpose.KILL, wait, sure=not must_ask(yes, as_json)))


@edl.command(name="set")
@job_options
@wait_option
@click.argument("settings", nargs=-1, required=True, metavar="NAME=VALUE…")
def set_(as_json: bool, wait: bool, settings: tuple[str, ...], **where: str) -> None:
    """Change batch size and learning rate at the next step boundary, for all workers at once: global-batch,
    local-batch, lr-rule, lr-scale, lr-warmup, lr-reference."""
    from edl.wire.purpose import Purpose

    asyncio.run(_ask(where, as_json, Purpose.SET, wait, " ".join(settings)))


edl.add_command(config.config)
edl.add_command(data.data)
edl.add_command(health.health)
edl.add_command(pservers.ps)
edl.add_command(top.top)
edl.add_command(errors.errors)
edl.add_command(history.history)
edl.add_command(output.logs)
edl.add_command(output.stacks)
edl.add_command(notify.notify)
edl.add_command(denylist.denylist)
edl.add_command(watch.watch)
edl.add_command(simulate.simulate)
for _command in size.COMMANDS:
    edl.add_command(_command)

LINE = 60
"""Longest list of nodes, in characters, that the confirmation of ``edl stop`` shows; otherwise it shows their
number."""
_COMMANDS = {"kill": "edl stop", "save": "edl checkpoint", "set": "edl set"}
"""Commands by purpose, for the history."""


async def _ask(
    where: dict[str, str], as_json: bool, purpose: Purpose, wait: bool, argument: str = "", *, sure: bool = True
) -> None:
    from edl.cli.ask import ask, checked
    from edl.cli.find import master_of

    async with master_of(where_of(where)) as client:
        if not sure:
            seen = await client.status()
            members = ", ".join(node.node for node in seen.nodes if node.first_rank >= 0)
            place = members if len(members) <= LINE else f"{len(members.split())} nodes"
            confirm(f"End job {seen.job} ({seen.phase}, {seen.world_size} workers on {place})?")
        outcome = checked(await ask(client, purpose, _COMMANDS[purpose.value], wait=wait, argument=argument), purpose)
    click.echo(json.dumps(to_plain(outcome)) if as_json else outcome.text)


async def _status(where: dict[str, str], as_json: bool, everything: bool) -> None:
    from edl.cli.find import master_of
    from edl.cli.show import screen, show_status

    async with master_of(where_of(where)) as client:
        answer = await client.status()
    if as_json:
        plain = to_plain(answer)
        old_names = {"journal": plain["history"]}
        click.echo(json.dumps({**plain, **old_names, "http": client.http, "access": client.door}, indent=2))
    else:
        show_status(screen(), answer, client.http, client.door, everything=everything)


async def _events(where: dict[str, str], as_json: bool, follow: bool, after: int) -> None:
    from edl.cli.find import master_of
    from edl.cli.following import PAUSE_S, followed
    from edl.cli.polling import Finder
    from edl.cli.show import entry_line

    def show(entry: HistoryEntry) -> None:
        click.echo(json.dumps(to_plain(entry)) if as_json else entry_line(entry))

    if follow:
        finder = Finder(where_of(where))
        source = followed(finder.connect, lambda: asyncio.sleep(PAUSE_S), after, _remark)
        async with contextlib.aclosing(source) as entries:
            async for entry in entries:
                show(entry)
        return
    async with master_of(where_of(where)) as client:
        async for entry in client.events(after, follow=False):
            show(entry)


def _remark(text: str) -> None:
    """Print on stderr, beside the output."""
    click.echo(f"edl: {text}", err=True)


def escape_what_stdout_cannot_show() -> None:
    """Let texts from scripts and other hosts pass whatever the encoding of stdout is: what it lacks is printed as an
    escape, as Python does on stderr. Other choices of ``PYTHONIOENCODING`` stay."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point. Prints expected errors as one message, and exits with their status."""
    escape_what_stdout_cannot_show()
    try:
        edl.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(int(ExitCode.USAGE))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(int(ExitCode.INTERRUPTED))
    except EdlError as error:
        click.echo(f"edl: error: {error}", err=True)
        sys.exit(int(error.exit_code))


if __name__ == "__main__":
    main()
