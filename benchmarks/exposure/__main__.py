"""Lists the sockets at which a job listens and what they answer to another user, and repeats attacks that once worked.

    python -m benchmarks.exposure [ports] [doors] [floods]

``ports``: a default job on one machine, and jobs of three nodes on loopback without and with a secret, with readers and
HTTP. User 65534 probes every socket at which one of their processes listens (TCP, unix or abstract): a connection,
HTTP, a range read of etcd, a status call without and with a wrong token, a TLS handshake.

``doors``: the same jobs; the stranger reads the token and a reader's password, sends readers tickets that name code and
other users' files, joins, and runs ``edl stop``.

``floods``: 60 MB without a token; 400 idle connections to a launcher with few files; a full store; a log folder that
hangs, by fsfreeze where root may mount a file system, else by files that never finish opening.

Words in capitals must not appear for a closed job. For a job without a secret they are documented: docs/security.md.
Only root can act as another user; otherwise the program says so, and probes as the same user. Linux only.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

PARTS = {"ports": "scan", "doors": "attack", "floods": "attack"}
"""Modules here, and the function that each of them provides."""


@click.command("exposure")
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--edl-python", default=sys.executable, show_default=False, help="Python that runs the launchers.")
def main(parts: tuple[str, ...], edl_python: str) -> None:
    """Probe all sockets of jobs as another user, and attack the jobs."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before Flight is loaded: failing handshakes are intended
    for part in parts or PARTS:
        module = importlib.import_module(f"benchmarks.exposure.{part}")
        print(f"\n=== {part}", flush=True)
        getattr(module, PARTS[part])(edl_python)


if __name__ == "__main__":
    main()
