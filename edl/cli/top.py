"""``edl top``: a live view of a job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from edl.cli.options import job_options, where_of
from edl.rendezvous.phrases import one_line
from edl.tasks import end

if TYPE_CHECKING:
    from rich.live import Live

    from edl.cli.find import Where
    from edl.cli.polling import StatusReading
    from edl.wire.status import JobStatus

SHORTEST_S = 0.1


@click.command()
@job_options
@click.option(
    "-n",
    "--interval",
    type=click.FloatRange(min=SHORTEST_S),
    default=1.0,
    metavar="SECONDS",
    help=f"Seconds between two refreshes, at least {SHORTEST_S:g}. Default: 1.",
)
@click.option("--once", is_flag=True, help="Print one frame and exit, as happens if stdout is not a terminal.")
def top(as_json: bool, interval: float, once: bool, **where: str) -> None:
    """Watch a job live: nodes, ranks, step times, restarts, last events. Press q or Ctrl-C to quit."""
    asyncio.run(_top(where_of(where), as_json, interval, once))


async def _top(where: Where, as_json: bool, interval_s: float, once: bool) -> None:
    from edl.cli.job_end import JobEnd
    from edl.cli.polling import Finder, readings

    async def pause() -> None:
        await asyncio.sleep(interval_s)

    connect = Finder(where).connect
    async with (
        contextlib.aclosing(JobEnd(connect)) as job_end,
        contextlib.aclosing(readings(connect, pause, job_end)) as source,
    ):
        if as_json:
            await _print_json(source, once)
        elif once or not sys.stdout.isatty():
            await _print_frame(source)
        else:
            await _live(source)


async def _print_json(source: AsyncIterator[StatusReading], once: bool) -> None:
    async for reading in source:
        click.echo(json.dumps(plain_reading(reading)))
        if once:
            return


def plain_reading(reading: StatusReading) -> dict[str, object]:
    """One line of ``--json``: the fields of ``edl status --json``, or null for all of them; ``pace`` and
    ``problem``."""
    from edl.cli.node_text import pace_of
    from edl.wire.json_messages import to_plain

    if reading.status is None:
        return {"status": None, "pace": None, "problem": reading.problem, "over": reading.over}
    return {
        "status": to_plain(reading.status),
        "pace": to_plain(pace_of(reading.status)),
        "problem": "",
        "over": reading.over,
    }


async def _print_frame(source: AsyncIterator[StatusReading]) -> None:
    from edl.cli.frame import ScreenSize, frame
    from edl.cli.show import screen

    first = await anext(source)
    if first.status is not None:
        size = shutil.get_terminal_size()
        console = screen()
        for line in frame(first.status, None, ScreenSize(size.columns, size.lines)):
            console.print(line.text, style=line.look.value, markup=False, highlight=False, soft_wrap=True)


async def _live(source: AsyncIterator[StatusReading]) -> None:
    """Redraw the screen with each reading, until q or Ctrl-C is pressed or the job has ended."""
    from rich.live import Live

    from edl.cli.keyboard import quit_event

    first = await anext(source)  # a job that is not found is reported before the screen is cleared
    loop = asyncio.get_running_loop()
    with quit_event() as over, Live(screen=True, auto_refresh=False) as live:
        view = LiveView(live)
        view.show(first)
        loop.add_signal_handler(signal.SIGWINCH, view.draw)
        drawing = asyncio.ensure_future(view.follow(source))
        quitting = asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait({drawing, quitting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
            await end(quitting)
            await end(drawing)
    if drawing.cancelled():
        return
    drawing.result()
    click.echo(one_line(view.problem))


class LiveView:
    """The newest status and the one before it, on a terminal."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._status: JobStatus | None = None
        self._before: JobStatus | None = None
        self.problem = ""
        """Why the status on the screen is not current; how the job ended."""

    async def follow(self, source: AsyncIterator[StatusReading]) -> None:
        """Show all readings; returns when the job has ended."""
        async for reading in source:
            self.show(reading)

    def show(self, reading: StatusReading) -> None:
        """Show one more reading."""
        self.problem = reading.problem
        if reading.status is not None:
            self._before, self._status = self._status, reading.status
        self.draw()

    def draw(self) -> None:
        """Draw the frame again, for instance because the terminal has another size."""
        from rich.text import Text

        from edl.cli.frame import ScreenSize, frame

        if self._status is None:
            return
        size = self._live.console.size
        lines = frame(self._status, self._before, ScreenSize(size.width, size.height), self.problem)
        text = Text("\n", no_wrap=True, overflow="crop").join(Text(line.text, line.look.value) for line in lines)
        self._live.update(text, refresh=True)
