"""Creates a Python that can run ``paddle.distributed.launch`` with etcd, for ``--peer-python``.

    python -m benchmarks.peer_venv /tmp/edl-peer

Paddle's elastic mode imports the ``etcd3`` client, which was last released years ago. It is installed in a separate
virtual environment, which takes everything else (Paddle, protobuf, grpcio) from the Python that runs this program.
"""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

import click

from benchmarks.common.processes import clean_environment

PACKAGES = ("etcd3==0.12.0", "six", "tenacity")
CHECK = "import etcd3, paddle; print('etcd3', etcd3.__version__, 'and paddle', paddle.__version__)"


def make(folder: Path) -> Path:
    """Create or reuse an environment in ``folder``; returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    shown = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip())
    own = sysconfig.get_path("purelib")
    (packages / "shared-packages.pth").write_text(f"{own}\n")
    # Without its dependencies, which would duplicate the shared packages.
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
    return python


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(folder: Path) -> None:
    """Create the environment in FOLDER and print the path of its Python."""
    python = make(folder.resolve())
    env = clean_environment({"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"})
    subprocess.run([str(python), "-c", CHECK], env=env, check=True)
    click.echo(f"--peer-python {python}")


if __name__ == "__main__":
    main()
