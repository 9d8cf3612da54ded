"""``edl scale``, ``drain``, ``cordon``, ``uncordon``, ``suspend``, ``resume``: change the size of a job and the nodes
that take part."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import click

from edl.cli.completion import node_names
from edl.cli.confirm import confirm, must_ask, yes_option
from edl.cli.options import job_options, reason_option, wait_option, where_of
from edl.config import MAX_NODES
from edl.errors import UsageError
from edl.wire.json_messages import to_plain
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Resize, ScaleRequest, ScaleView, SetBounds, Suspend

if TYPE_CHECKING:
    from edl.cli.find import JobClient
    from edl.cli.polling import Finder
    from edl.cli.requests import Goal
    from edl.wire.scale_requests import Granted

Where = dict[str, str]


_AUTO = -1
"""Stands for ``edl scale auto``."""
_device_option = click.option(
    "--device", default="", metavar="SLOT|UUID", help="Only this slot: its number, or the UUID of its device."
)


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Parse a number of nodes; ``auto`` becomes ``_AUTO``."""
    if value is None or value == "auto":
        return None if value is None else _AUTO
    if not value.isdecimal() or len(value) > 9:
        raise click.BadParameter(f"{value!r}: give a number of nodes, or auto", context, parameter)
    return int(value)


@click.command()
@job_options
@wait_option
@reason_option
@yes_option
@click.argument("nodes", required=False, callback=_size, metavar="[N|auto]")
@click.option("--min", "minimum", type=click.IntRange(0, MAX_NODES), metavar="A", help="Minimum number of nodes.")
@click.option("--max", "maximum", type=click.IntRange(0, MAX_NODES), metavar="B", help="Maximum number of nodes.")
def scale(
    nodes: int | None,
    minimum: int | None,
    maximum: int | None,
    reason: str,
    yes: bool,
    wait: bool,
    as_json: bool,
    **where: str,
) -> None:
    """Change the job's size to N nodes, or its minimum and maximum; without arguments, show the size.

    auto returns control of the size to the autoscale policy (--autoscale of the launchers).
    """
    if nodes is None and minimum is None and maximum is None:
        _run(_show(where, as_json))
        return
    command = _SizeCommand(where, as_json, wait, asks=must_ask(yes, as_json))
    _run(command.scale(nodes, minimum, maximum, reason))


@click.command()
@job_options
@wait_option
@reason_option
@yes_option
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…", shell_complete=node_names)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Seconds until the nodes must have left.",
)
@click.option(
    "--checkpoint",
    type=click.Choice([mode.value for mode in DrainMode]),
    default=DrainMode.TRY.value,
    help="Whether to write a checkpoint first. must: always; try: if there is time; no: never. Default: try.",
)
def drain(
    nodes: tuple[str, ...],
    deadline: float,
    checkpoint: str,
    reason: str,
    yes: bool,
    wait: bool,
    as_json: bool,
    **where: str,
) -> None:
    """Drain nodes: they leave gracefully, and their launchers exit."""
    from edl.cli.requests import gone

    names = tuple(dict.fromkeys(nodes))
    request = Drain(names, _by("drain"), reason, deadline, DrainMode(checkpoint))
    command = _SizeCommand(where, as_json, wait, asks=must_ask(yes, as_json))
    question = f"Drain {', '.join(names)}? The launchers there exit"
    _run(command.ask(request, lambda granted: gone(names, granted.generation), question))


@click.command()
@job_options
@wait_option
@reason_option
@_device_option
@click.argument("node", shell_complete=node_names)
def cordon(node: str, device: str, reason: str, wait: bool, as_json: bool, **where: str) -> None:
    """Exclude a node, or one slot of it, from training until it is uncordoned. Its launcher keeps running."""
    _run(_SizeCommand(where, as_json, wait).cordon(node, device, reason, wanted=True))


@click.command()
@job_options
@wait_option
@reason_option
@_device_option
@click.argument("node", shell_complete=node_names)
def uncordon(node: str, device: str, reason: str, wait: bool, as_json: bool, **where: str) -> None:
    """Let a cordoned node, or a dropped slot, take part again."""
    _run(_SizeCommand(where, as_json, wait).cordon(node, device, reason, wanted=False))


@click.command()
@job_options
@wait_option
@reason_option
@yes_option
def suspend(reason: str, yes: bool, wait: bool, as_json: bool, **where: str) -> None:
    """Commit, end the workers, and suspend the job until edl resume. The launchers keep running."""
    _run(_SizeCommand(where, as_json, wait, asks=must_ask(yes, as_json)).suspend(reason, wanted=True))


@click.command()
@job_options
@wait_option
@reason_option
def resume(reason: str, wait: bool, as_json: bool, **where: str) -> None:
    """Continue a suspended job."""
    _run(_SizeCommand(where, as_json, wait).suspend(reason, wanted=False))


@click.command()
@job_options
def token(as_json: bool, **where: str) -> None:
    """Print the job's own token, which its HTTP interface accepts unless --http-token-file names others. Keep it
    secret."""
    _run(_token(where, as_json))


COMMANDS = (scale, drain, cordon, uncordon, suspend, resume, token)


class _SizeCommand:
    """Runs one command: submits its request, and waits for the outcome unless ``wait`` is false. ``asks``: a person has
    to confirm a request that ends workers."""

    def __init__(self, where: Where, as_json: bool, wait: bool, *, asks: bool = False) -> None:
        self._where, self._as_json, self._wait, self._asks = where, as_json, wait, asks
        self._finder: Finder | None = None

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[JobClient]:
        """A client of the Master: of the next one, too, after the launcher of this host has been drained."""
        if self._finder is None:
            from edl.cli.polling import Finder

            self._finder = Finder(where_of(self._where))
        async with self._finder.connect() as client:
            yield client

    async def scale(self, nodes: int | None, minimum: int | None, maximum: int | None, reason: str) -> None:
        """Change bounds and size. The bounds come first, because the size has to be within them. Raises
        ``UsageError``."""
        from edl.cli import requests

        by = _by("scale")
        granted = None
        async with self._client() as client:
            if self._asks:
                _confirm_shrinking((await client.status()).scale, nodes, maximum)
            if minimum is not None or maximum is not None:
                now = (await client.status()).scale
                # If only one bound is given, the other must not have changed since it was read.
                seen = 0 if minimum is not None and maximum is not None else now.revision
                low = now.minimum if minimum is None else minimum
                high = now.maximum if maximum is None else maximum
                if nodes is not None and nodes > 0 and not low <= nodes <= high:
                    raise UsageError(f"{nodes} nodes are outside the requested bounds {low}:{high}")
                granted = await requests.ask(client, SetBounds(low, high, by, reason, seen))
            if nodes is not None:
                size = Resize(max(nodes, 0), by, reason, auto=nodes == _AUTO)
                granted = await requests.ask(client, size)
        assert granted is not None  # noqa: S101 - the caller passes at least one of them
        await self._finish(granted, requests.size_is(max(nodes or 0, 0), granted.generation))

    async def cordon(self, node: str, device: str, reason: str, *, wanted: bool) -> None:
        """Cordon, or with ``wanted`` false uncordon."""
        from edl.cli.requests import cordoned, dropped

        request = Cordon(node, wanted, _by("cordon" if wanted else "uncordon"), reason, device)
        if device:
            await self.ask(request, lambda granted: dropped(node, device, granted.generation, wanted=wanted))
        else:
            await self.ask(request, lambda granted: cordoned(node, granted.generation, wanted=wanted))

    async def suspend(self, reason: str, *, wanted: bool) -> None:
        """Suspend, or with ``wanted`` false resume."""
        from edl.cli.requests import suspended

        request = Suspend(wanted, _by("suspend" if wanted else "resume"), reason)
        question = "Suspend the job? Its workers end until edl resume" if wanted else ""
        await self.ask(request, lambda granted: suspended(granted.generation, wanted=wanted), question)

    async def ask(self, request: ScaleRequest, goal: Callable[[Granted], Goal], question: str = "") -> None:
        """Submit one request, and finish the command. ``question``: what a person has to confirm first, if anything.
        Raises ``UsageError``."""
        from edl.cli import requests

        if question and self._asks:
            confirm(question)
        async with self._client() as client:
            granted = await requests.ask(client, request)
        await self._finish(granted, goal(granted))

    async def _finish(self, granted: Granted, goal: Goal) -> None:
        """Wait for the goal if the command waits, and print the result. Raises ``UsageError`` if it is not reached."""
        from edl.cli import requests
        from edl.cli.job_end import JobEnd

        if self._wait:
            pause = requests.sleep_between_reads
            try:
                async with contextlib.aclosing(JobEnd(self._client)) as job_end:
                    result = await requests.reach(self._client, granted, goal, _say, pause, job_end)
            except asyncio.CancelledError:
                _say("no longer waiting; the request is still valid (see edl scale)")
                raise
        else:
            result = requests.result_of(granted)
        if not result.ok:
            raise UsageError(result.text)
        click.echo(json.dumps(to_plain(result)) if self._as_json else result.text)


def _confirm_shrinking(now: ScaleView, nodes: int | None, maximum: int | None) -> None:
    """Ask if nodes that train have to leave. ``nodes``, ``maximum``: what is requested."""
    wanted = min(one for one in (nodes, maximum, now.nodes) if one is not None and one >= 0)
    if wanted < now.nodes:
        confirm(f"Shrink the job from {now.nodes} to {wanted} nodes?")


async def _show(where: Where, as_json: bool) -> None:
    from edl.cli.find import master_of
    from edl.cli.show import scale_lines

    async with master_of(where_of(where)) as client:
        view = (await client.status()).scale
    click.echo(json.dumps(to_plain(view), indent=2) if as_json else "\n".join(scale_lines(view)) or _unknown(view))


def _unknown(view: ScaleView) -> str:
    return f"the Master reports no size ({view.nodes} nodes)"


async def _token(where: Where, as_json: bool) -> None:
    from edl.cli.find import master_of

    async with master_of(where_of(where)) as client:
        click.echo(json.dumps({"token": client.token, "http": client.http}) if as_json else client.token)


def _by(command: str) -> str:
    from edl.cli.ask import who_asks

    return f"edl {command} ({who_asks()})"


def _say(text: str) -> None:
    """Print progress to stderr, because stdout is only for the outcome."""
    click.echo(text, err=True)


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)
