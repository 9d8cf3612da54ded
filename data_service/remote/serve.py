"""The reader process, ``python -m data_service reader``: a child of a launcher, connected by lines over stdin and
stdout.

The launcher writes ``{"secret": …, "authority": …}`` (see ``tls.py``), and later ``?`` periodically. The process writes
``{"port": …}`` once it listens, and answers each ``?`` with ``!``. It exits when the launcher has ended. On SIGTERM it
finishes its streams first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from typing import NoReturn

import click

from data_service.remote.flight import DEFAULT_CAPACITY, ReaderServer
from edl.adapters.child import at_sigterm, order_line, private_stdout
from edl.wire.address import address


def serve(host: str, port: int, capacity: int, grace_s: float, functions: Collection[str] = ()) -> int:
    """Run a reader process; returns its exit status. Raises ``PortInUse``."""
    answers = private_stdout()
    order = order_line("Readers", "--role=reader")
    server = ReaderServer(host, port, order["secret"], capacity, functions, order.get("authority", ""))

    def leave() -> None:
        if server.drain(grace_s):
            _end(0)
        where = address(host, server.port)
        click.echo(f"reader at {where}: streams still run after {grace_s:g} s, exiting anyway", err=True)
        _end(1)

    at_sigterm(leave)
    try:
        answers.write(json.dumps({"port": server.port}) + "\n")
        answers.flush()
        for _ in sys.stdin:
            answers.write("!\n")
            answers.flush()
    except BrokenPipeError:
        pass
    _end(0)  # the launcher is gone, and with it the key that trainers find this process by


@click.command("reader")
@click.option("--host", default="127.0.0.1", help="Address to listen on. Default: this host only.")
@click.option("--port", type=int, default=0, help="Port to listen on. Default: any free port.")
@click.option("--capacity", type=int, default=DEFAULT_CAPACITY, help="Most streams served at once.")
@click.option("--grace", type=float, default=30.0, metavar="SECONDS", help="Time for running streams after SIGTERM.")
@click.option("--function", multiple=True, metavar="MODULE:FUNCTION", help="A function that trainers may name.")
def reader_command(host: str, port: int, capacity: int, grace: float, function: tuple[str, ...]) -> None:
    """Read and decode for trainers. Started and supervised by a launcher."""
    sys.exit(serve(host, port, capacity, grace, function))


def _end(status: int) -> NoReturn:
    """Exit without waiting for Flight's threads, which may be streaming."""
    sys.stderr.flush()
    os._exit(status)
