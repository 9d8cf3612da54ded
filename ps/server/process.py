"""The pserver process, ``python -m ps server``: a child of a launcher, connected by lines over stdin and stdout.

The launcher writes ``{"secret": …}``, and later ``?`` periodically. The process writes ``{"port": …, "path": …,
"machine": …, "pid": …}`` once it listens, and answers each ``?`` with ``!``, or ``!0`` if no Master has been in contact
lately. If the store cannot be reached either, the launcher then kills it, because replicas may have taken over. A ``w``
follows if tables export evicted rows: the process then gets time to write them before it exits.

The process exits when its launcher has ended or closes the connection. On SIGTERM it keeps serving until the Master has
moved its buckets away, or the grace period is over; the launcher marks its key for that.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
from typing import NoReturn

import click

from edl.adapters.child import at_sigterm, private_stdout, secret_line
from edl.adapters.remote_files import open_files
from edl.errors import UsageError
from edl.wire.address import address
from ps.net.endpoint import EndpointLimits
from ps.net.stdio import ParentLauncher
from ps.net.tls import TlsFiles, watched
from ps.server.server import ParameterServer, Setup

log = logging.getLogger(__name__)
FILES = 3 * EndpointLimits().peers
"""Open files needed: a socket and lent memory per connection, plus files for checkpoints."""
FINISH_S = 5.0
"""Most seconds that a pserver takes at its end to write evicted rows, once it serves no more."""


def serve(setup: Setup, host: str, port: int, grace_s: float, lease_s: float, launcher: ParentLauncher) -> NoReturn:
    """Run a pserver until it may exit, then exit the process. Raises ``PortInUse``."""
    allow_files(FILES)
    over = threading.Event()
    drained = threading.Event()

    def gone() -> None:
        drained.set()
        over.set()

    def leave() -> None:
        log.info("Parameter server %s: draining, exits in %g s at the latest", setup.name, grace_s)
        over.wait(grace_s)
        over.set()

    def failed(what: str) -> NoReturn:
        sys.stderr.flush()
        os._exit(1)

    server = ParameterServer(setup, gone, failed)
    server.start(host, port)
    at_sigterm(leave)
    endpoint = server.endpoint
    launcher.say({"port": endpoint.port, "path": endpoint.path, "machine": endpoint.machine, "pid": os.getpid()})
    limit = f"{setup.most_bytes / 2**30:.1f} GiB" if setup.most_bytes else "no limit"
    log.info("Parameter server %s at %s, memory for rows: %s", setup.name, address(host, endpoint.port), limit)
    writes = server.eviction_task.exports if setup.files is not None else lambda: False
    launcher.answer_until_gone(over.set, lambda: server.masterless(lease_s), writes)
    over.wait()
    served = int(server.bucket_shell.served.sum())
    if not drained.is_set() and not launcher.gone:
        log.warning(
            "Parameter server %s: exits with %d buckets; other pservers take over from replicas", setup.name, served
        )
    server.stop()
    server.checkpoint_task.finish(FINISH_S)
    sys.stderr.flush()
    os._exit(0 if drained.is_set() or launcher.gone else 1)  # os._exit: threads may still be running


def allow_files(wanted: int) -> None:
    """Raise the limit of open files as far as needed and allowed; the usual 1,024 are too few for 400 trainers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted and soft < wanted:
        log.warning("Parameter server: the limit is %d open files; many trainers need up to %d. Raise "
                    "the hard limit (ulimit -Hn)", most, wanted)  # fmt: skip


@click.command("server")
@click.option("--host", default="127.0.0.1", help="Address to listen on. Default: this host only.")
@click.option("--port", type=int, default=0, help="Port to listen on. Default: any free port.")
@click.option("--name", required=True, help="Name of the pserver's key, such as node-0-1.")
@click.option("--job", required=True, help="Id of the job, for the checkpoint directory.")
@click.option("--most-bytes", type=int, default=0, help="Memory for rows; 0: no limit.")
@click.option("--checkpoint-dir", default="", help="Path or URL. Default: no checkpoints.")
@click.option("--write-mb-per-s", type=float, default=0.0, help="Checkpoints are written no faster; 0: no limit.")
@click.option("--tls-cert", default="", help="PEM file of the job's certificate.")
@click.option("--tls-key", default="", help="PEM file of its key.")
@click.option("--tls-ca", default="", help="PEM file of the authority that signed it.")
@click.option("--grace", type=float, default=60.0, metavar="SECONDS", help="Time to move buckets away after SIGTERM.")
@click.option(
    "--lease", type=float, default=10.0, metavar="SECONDS", help="A Master silent for this long counts as unreachable."
)
def server_command(
    host: str,
    port: int,
    name: str,
    job: str,
    most_bytes: int,
    checkpoint_dir: str,
    write_mb_per_s: float,
    tls_cert: str,
    tls_key: str,
    tls_ca: str,
    grace: float,
    lease: float,
) -> None:
    """Serve rows to trainers. Started and supervised by a launcher."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    launcher = ParentLauncher(private_stdout())
    setup = Setup(
        name=name,
        job=job,
        secret=secret_line("Parameter servers", "--run-mode=ps"),
        most_bytes=most_bytes,
        files=open_files(checkpoint_dir) if checkpoint_dir else None,
        tls=_tls_files(tls_cert, tls_key, tls_ca),
        write_bytes_per_s=write_mb_per_s * 1e6,
    )
    serve(setup, host, port, grace, lease, launcher)


def _tls_files(certificate: str, key: str, authority: str) -> TlsFiles | None:
    """Load the TLS files, if configured. Raises ``UsageError`` and ``SettingError``."""
    given = [one for one in (certificate, key, authority) if one]
    if not given:
        return None
    if len(given) != 3:
        raise UsageError("--tls-cert, --tls-key and --tls-ca must be given together, or none of them")
    return watched(certificate, key, authority)
