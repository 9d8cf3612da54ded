"""Creates a Python that can run ``paddle.distributed.launch`` with etcd, or torchft, for ``--peer-python``.

    python -m benchmarks.peer_venv /tmp/edl-peer
    python -m benchmarks.peer_venv --peer torchft /tmp/edl-torchft

Paddle's elastic mode imports the ``etcd3`` client, which was last released years ago. It is installed in a separate
virtual environment, which takes everything else (Paddle, torch, protobuf, grpcio) from the Python that runs this
program. torchft's nightly wheels exist for few versions of Python.
"""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.common.processes import clean_environment


@dataclass(frozen=True, slots=True)
class Peer:
    """What to install beside the shared packages. ``alone``: without dependencies, which would duplicate shared
    packages. ``check``: Python that imports it."""

    alone: tuple[str, ...]
    whole: tuple[str, ...]
    check: str


PEERS = {
    "paddle": Peer(
        ("etcd3==0.12.0", "six", "tenacity"),
        (),
        "import etcd3, paddle; print('etcd3', etcd3.__version__, 'and paddle', paddle.__version__)",
    ),
    "torchft": Peer(
        ("torchft-nightly",),
        ("opentelemetry-exporter-otlp-proto-http>=1.39",),
        "import importlib.metadata as m, torchft, torch; print(m.version('torchft-nightly'), torch.__version__)",
    ),
}


def make(folder: Path, peer: Peer) -> Path:
    """Create or reuse an environment in ``folder``; returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    shown = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip())
    own = sysconfig.get_path("purelib")
    (packages / "shared-packages.pth").write_text(f"{own}\n")
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--pre", *peer.alone], check=True)
    if peer.whole:
        subprocess.run([*install, *peer.whole], check=True)
    return python


@click.command()
@click.option("--peer", "name", type=click.Choice(sorted(PEERS)), default="paddle", show_default=True)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(name: str, folder: Path) -> None:
    """Create the environment in FOLDER and print the path of its Python."""
    python = make(folder.resolve(), PEERS[name])
    env = clean_environment({"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"})
    subprocess.run([str(python), "-c", PEERS[name].check], env=env, check=True)
    click.echo(f"--peer-python {python}")


if __name__ == "__main__":
    main()
