"""``edl watch``: watches a job from outside, and notifies when it is gone or stands still."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from edl.cli.options import job_options, where_of


@click.command()
@job_options
@click.option(
    "--limit",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="Seconds that the job may go without training or making progress.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds that the job may go without answering.",
)
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="Seconds between two checks."
)
@click.option(
    "--once",
    is_flag=True,
    help="Check once and exit. Waits up to --grace seconds for an answer; --limit does not apply.",
)
@click.option(
    "--notify",
    "urls",
    multiple=True,
    envvar="EDL_NOTIFY",
    metavar="URL",
    help="Notify this channel, as with edl-run. May be given several times.",
)
@click.option(
    "--notify-file",
    default="",
    envvar="EDL_NOTIFY_FILE",
    metavar="FILE",
    help="File with the URL of one channel per line, which only its owner may read.",
)
@click.option("--heartbeat", default="", metavar="URL", help="Call this URL after each check that the job answered.")
def watch(
    as_json: bool,
    limit: float,
    grace: float,
    every: float,
    once: bool,
    urls: tuple[str, ...],
    notify_file: str,
    heartbeat: str,
    **where: str,
) -> None:
    """Watch a job until it has ended, and notify if it does not answer, does not train, or makes no progress. Exits
    with the job's status; with --once, exits with 1 if something is wrong."""
    from edl.adapters.secret_file import private_bytes
    from edl.cli.outside import Outside, OutsideLimits
    from edl.notify.addresses import channels_of, heartbeat_of, urls_in
    from edl.notify.program import program_environment
    from edl.notify.settings import FILE_ADVICE, MOST_BYTES

    if notify_file:
        raw = private_bytes(Path(notify_file), "--notify-file", FILE_ADVICE, MOST_BYTES)
        urls += tuple(urls_in(raw, notify_file))
    channels = channels_of(urls, program_environment())
    pulse = heartbeat_of(heartbeat) if heartbeat else None
    outside = Outside(where_of(where), OutsideLimits(limit, grace, every), channels, pulse, as_json=as_json)
    sys.exit(asyncio.run(outside.run(once=once)))
