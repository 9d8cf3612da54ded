"""Creates a Python that can run one of the peers, for ``--peer-python`` or ``benchmarks.report --peers``, or one with
the libraries of the scripts of ``benchmarks.unchanged``, or of ``benchmarks.recovery``.

    python -m benchmarks.peer_venv /tmp/venvs/peers-paddle
    python -m benchmarks.peer_venv --peer torchft /tmp/venvs/peers-torchft
    python -m benchmarks.peer_venv --peer scripts /tmp/venvs/scripts

Each peer gets a virtual environment of its own, which takes everything else (Paddle, torch without CUDA, protobuf,
grpcio) from the Python that runs this program. What a peer would install twice, or with CUDA, it does not install.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from benchmarks.common.processes import clean_environment

INSTALL_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Peer:
    """What to install beside the shared packages. ``alone``: without dependencies, which would duplicate shared
    packages. ``check``: Python that imports it and prints its version. ``environment``: for pip, when it builds."""

    alone: tuple[str, ...]
    whole: tuple[str, ...]
    check: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    # Paddle's elastic mode imports the etcd3 client, which was last released years ago.
    "paddle": Peer(
        ("etcd3==0.12.0", "six", "tenacity"),
        (),
        "import etcd3, paddle; print('etcd3', etcd3.__version__)",
    ),
    # Nightly wheels exist for few versions of Python.
    "torchft": Peer(
        ("torchft-nightly",),
        ("opentelemetry-exporter-otlp-proto-http>=1.39",),
        "import importlib.metadata as m, torchft; print('torchft-nightly', m.version('torchft-nightly'))",
    ),
    "ray-train": Peer((), ("ray[train]==2.60.0",), "import ray, ray.train.torch; print('ray', ray.__version__)"),
    "dlrover": Peer(
        ("dlrover[torch]==0.6.1",),
        ("psutil", "pynvml", "deprecated", "requests", "kubernetes"),
        "import importlib.metadata as m, dlrover.trainer.torch.elastic_run, dlrover.python.master.main;"
        "print('dlrover', m.version('dlrover'))",
    ),
    # Newer wheels than 0.4.1 are built for glibc 2.39 or later.
    "nvrx": Peer(
        ("nvidia-resiliency-ext>=0.4.1",),
        ("defusedxml", "nvidia-ml-py", "pynvml", "pyyaml"),
        "import importlib.metadata as m, nvidia_resiliency_ext.fault_tolerance.launcher;"
        "print('nvidia-resiliency-ext', m.version('nvidia-resiliency-ext'))",
    ),
    # No wheel exists. The build needs CMake, a C++ compiler, and the torch that will be used, so without isolation.
    "horovod": Peer(
        ("horovod==0.28.1",),
        ("cloudpickle", "pyyaml", "wheel", "setuptools>=75,<81"),
        "import horovod, horovod.torch; print('horovod', horovod.__version__)",
        ("--no-build-isolation", "--no-cache-dir"),
        {
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_CPU_OPERATIONS": "GLOO",
            "MAKEFLAGS": "-j2",
        },
    ),
}

SCRIPTS = {
    "scripts": Peer(
        (),
        ("accelerate==1.15.0", "datasets==5.2.0", "lightning==2.6.6", "transformers==5.23.0"),
        "import importlib.metadata as m;"
        "print(*(f'{one} {m.version(one)}' for one in ('transformers', 'datasets', 'lightning')))",
    ),
    # Its wheel names exact versions of packages, which do not exist for today's Python, and needs only these. The etcd
    # client is for its peer, see "paddle".
    "scripts-paddle": Peer(
        ("paddleseg==2.8.0", "etcd3==0.12.0", "six", "tenacity"),
        ("opencv-python-headless", "prettytable", "pyyaml", "tqdm"),
        "import importlib.metadata as m, paddleseg.core; print('paddleseg', m.version('paddleseg'))",
    ),
    # For benchmarks.ps bags. With a later protobuf its DistributedStrategy has no attributes.
    "paddle-2.6": Peer(
        (),
        ("paddlepaddle==2.6.2", "numpy<2", "protobuf==3.20.3", "setuptools"),
        "import paddle; print('paddle', paddle.__version__)",
    ),
    # For benchmarks.recovery, with edl's integrations and without. torchtitan imports triton, also where it has no GPU,
    # and the torch without CUDA does not bring it.
    "trainers": Peer(
        (),
        ("lightning==2.6.6", "torchtitan>=0.3,<0.4", "transformers==5.23.0", "triton"),
        "import importlib.metadata as m, lightning, torchtitan, transformers;"
        "print(*(f'{one} {m.version(one)}' for one in ('lightning', 'torchtitan', 'transformers')))",
    ),
}
"""What scripts under every launcher need, by environment."""


class NotInstalled(Exception):
    """A peer could not be installed; the message is the first line of pip's or the compiler's error."""


def reason_file(folder: Path) -> Path:
    """Where the reason stands if the peer of an environment could not be installed."""
    return folder / "not-installed.txt"


def make(folder: Path, peer: Peer) -> Path:
    """Create or reuse an environment in ``folder``; returns its interpreter. Raises ``NotInstalled``, and writes the
    reason down for ``benchmarks.report``."""
    reason_file(folder).unlink(missing_ok=True)
    try:
        return _make(folder, peer)
    except NotInstalled as error:
        reason_file(folder).write_text(f"{error}\n")
        raise


def _make(folder: Path, peer: Peer) -> Path:
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    packages = Path(_output([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (packages / "shared-packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if peer.whole:
        _output([*install, *peer.whole])
    if peer.alone:
        _output([*install, "--no-deps", "--pre", *peer.options, *peer.alone], peer.environment)
    return python


def check(python: Path | str, peer: Peer) -> str:
    """Import the peer; returns its name and version. Raises ``NotInstalled``."""
    said = _output([str(python), "-c", peer.check], {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"})
    return said.strip().splitlines()[-1]


def first_error(output: str) -> str:
    """The line that says why: the first one with an error in it, but a summary of pip's only if there is no other."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if _ERROR.search(line) and not line.startswith(_SUMMARIES)]
    return (telling or lines or ["no output"])[0][:300]


_ERROR = re.compile(r"\b(\w*error:|CMake Error|#error)", re.IGNORECASE)
"""Of a compiler, of CMake, or of Python; file names and options may contain the word as well."""
_SUMMARIES = ("error: subprocess-exited-with-error", "ERROR: Failed building wheel", "ERROR: Failed to build")


def _output(command: list[str], more: Mapping[str, str] | None = None) -> str:
    """The standard output of a command without a terminal. Raises ``NotInstalled``."""
    env = clean_environment(more or {})
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"not ready after {INSTALL_LIMIT_S:g} s") from None
    if done.returncode:
        raise NotInstalled(first_error(done.stdout + done.stderr))
    return done.stdout


@click.command()
@click.option("--peer", "name", type=click.Choice(sorted(PEERS | SCRIPTS)), default="paddle", show_default=True)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(name: str, folder: Path) -> None:
    """Create the environment in FOLDER and print the path of its Python."""
    try:
        peer = (PEERS | SCRIPTS)[name]
        python = make(folder.resolve(), peer)
        click.echo(check(python, peer))
    except NotInstalled as error:
        raise click.ClickException(f"{name} cannot be installed here: {error}") from None
    click.echo(f"--peer-python {python}")


if __name__ == "__main__":
    main()
