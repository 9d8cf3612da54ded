"""Builds sdist and wheel of the current commit, checks them, and tries the wheel: see docs/release.md."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from edl.config import environment
from scripts.release_contents import has_section, path_problems, sdist_problems, sums_text, wheel_problems

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""Versions that a release is tried under, if they are found."""
TOOLS = ("build>=1.2", "cyclonedx-bom>=7,<8", "pip>=24.1")  # an older pip cannot install for a newer Python
NAMESPACE = "edl-release"
"""The purpose that ``ssh-keygen`` writes into a signature."""
JOB = """\
import os
from pathlib import Path

Path(f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").touch()
"""


def fail(problem: str) -> NoReturn:
    """End with a message."""
    sys.exit(f"release: {problem}")


def run(command: Sequence[str | Path], cwd: Path, **variables: str) -> str:
    """Run a program; returns its stdout. Ends the script with the program's output if it fails."""
    ours = {name: value for name, value in environment().items() if not name.startswith(("EDL_", "PYTHON"))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env={**ours, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def say(text: str) -> None:
    """Print one line at once."""
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python under which the release is tried."""

    path: str
    version: str


def interpreters(given: Sequence[str]) -> Iterator[Interpreter]:
    """One interpreter for each version of ``PYTHONS``: those given, then those on the PATH. A name on the PATH that
    does not run, such as a version manager's stand-in, is passed over."""
    seen: set[str] = set()
    for name in (*given, *(f"python{version}" for version in PYTHONS)):
        code = "import sys; print('%d.%d' % sys.version_info[:2]); print('.'.join(map(str, sys.version_info[:3])))"
        try:
            done = subprocess.run([name, "-c", code], capture_output=True, text=True, check=False)
        except OSError:
            done = None
        if done is None or done.returncode:
            if name in given:
                fail(f"--python {name} does not run")
            continue
        minor, version = done.stdout.split()
        if minor in PYTHONS and minor not in seen:
            seen.add(minor)
            yield Interpreter(shutil.which(name) or name, version)
    for minor in PYTHONS:
        if minor not in seen:
            say(f"Python {minor} is not on the PATH (--python names it): not tried")


def check_commit(version: str, *, rehearsal: bool) -> list[str]:
    """Returns the files of the commit. Ends the script if it is not one to release."""
    changed = run(["git", "status", "--porcelain", "--untracked-files=no"], ROOT).strip()
    if changed:
        fail(f"tracked files differ from the commit, and the commit is what is built. Commit or stash:\n{changed}")
    if not rehearsal:
        tags = run(["git", "tag", "--points-at", "HEAD"], ROOT).split()
        if f"v{version}" not in tags:
            fail(f"the commit has no tag v{version}: git tag -s v{version}; or use --rehearsal")
        if not has_section((ROOT / "CHANGELOG.md").read_text(), version):
            fail(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'; or use --rehearsal")
    return run(["git", "ls-tree", "-r", "--name-only", "-z", "HEAD"], ROOT).rstrip("\0").split("\0")


def build(tools: Path, work: Path) -> tuple[Path, Path]:
    """Build from the files of the commit alone; returns sdist and wheel. The same commit gives the same files, as far
    as setuptools allows."""
    source, made = work / "source", work / "made"
    source.mkdir()
    run(["git", "archive", f"--output={work / 'source.tar'}", "HEAD"], ROOT)
    with tarfile.open(work / "source.tar") as archive:
        archive.extractall(source)  # noqa: S202 - written by git from our own commit
    epoch = run(["git", "log", "-1", "--format=%ct"], ROOT).strip()
    run([tools / "python", "-m", "build", f"--outdir={made}", source], work, SOURCE_DATE_EPOCH=epoch)
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    return sdist, wheel


def check_archives(sdist: Path, wheel: Path, tracked: Sequence[str], work: Path) -> None:
    """Ends the script if an archive lacks a file, or contains another one or a path of this machine."""
    with zipfile.ZipFile(wheel) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    with tarfile.open(sdist) as archive:
        names = [entry.name for entry in archive.getmembers() if entry.isfile()]
    here = (str(ROOT), str(work), str(Path.home()))
    problems = wheel_problems(files, tracked) + sdist_problems(names, tracked) + path_problems(files, here)
    if problems:
        fail("the archives are wrong:\n  " + "\n  ".join(problems))
    say(f"{wheel.name}: {len(files)} files, {wheel.stat().st_size} bytes; {sdist.name}: {len(names)} files")


def try_wheel(wheel: Path, version: str, python: Interpreter, tools: Path, folder: Path) -> Path:
    """Install the wheel into a new environment, and run a job of one node there. Returns its interpreter."""
    run([python.path, "-m", "venv", "--without-pip", folder / "venv"], folder)
    programs = folder / "venv" / "bin"
    run([tools / "python", "-m", "pip", "--python", programs / "python", "install", "--quiet", wheel], folder)
    shown = run([programs / "edl", "--version"], folder).strip()
    if shown.split()[-1] != version:
        fail(f"edl --version says {shown!r} under Python {python.version}, not {version}")
    where = run([programs / "python", "-c", "import data_service, edl, ps; print(edl.__file__)"], folder).strip()
    if not Path(where).is_relative_to(folder.resolve()):
        fail(f"import edl finds {where}, not what was installed")
    (folder / "job.py").write_text(JOB)
    path = f"{programs}{os.pathsep}{environment().get('PATH', '')}"
    options = ("--nnodes=1", "--nproc-per-node=2", f"--log-dir={folder / 'logs'}")
    run([programs / "python", "-m", "edl.launch", *options, "job.py"], folder, PATH=path)
    ran = sorted(one.name for one in folder.glob("rank-*"))
    if ran != ["rank-0-of-2", "rank-1-of-2"]:
        fail(f"the job under Python {python.version} left {ran} instead of a file of each of two workers")
    say(f"Python {python.version}: {shown}; imports; a job of one node with two workers ended with status 0")
    return programs / "python"


def write_sbom(tools: Path, python: Path, version: str, target: Path) -> None:
    """List what the wheel brings along, in CycloneDX's JSON. ``python``: an interpreter that has the wheel alone."""
    text = (ROOT / "pyproject.toml").read_text()
    project = target.parent / "pyproject.toml"
    project.write_text(text.replace('dynamic = ["version"]', f'version = "{version}"'))
    options = ("--output-reproducible", "--of=JSON", f"--output-file={target}", f"--pyproject={project}")
    run([tools / "cyclonedx-py", "environment", *options, python], target.parent)


def sign(sums: Path, key: str) -> None:
    """Sign with an SSH key; ``ssh-keygen`` asks for its passphrase, or its agent has it."""
    command = ["ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, str(sums)]
    if subprocess.run(command, check=False).returncode:
        fail(f"--sign-key {key}: ssh-keygen could not sign {sums.name}")
    check = ["ssh-keygen", "-Y", "check-novalidate", "-n", NAMESPACE, "-s", f"{sums}.sig"]
    with sums.open("rb") as content:
        subprocess.run(check, stdin=content, check=True)


def digests(files: Sequence[Path]) -> Mapping[str, str]:
    """SHA-256 of each file, by its name."""
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files; default: dist")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="try this interpreter too")
    parser.add_argument("--sign-key", default="", metavar="FILE", help="SSH key that signs SHA256SUMS")
    parser.add_argument("--rehearsal", action="store_true", help="build without a tag and a section of the changelog")
    return parser.parse_args()


def main() -> None:
    """Build, check, try, list, sum up and sign; ends at the first problem and leaves nothing then."""
    given = arguments()
    match = re.search(r'^__version__ = "(.+)"$', (ROOT / "edl/__init__.py").read_text(), re.MULTILINE)
    version = match[1] if match else fail("edl/__init__.py has no __version__")
    out: Path = given.out.resolve()
    left = sorted(one.name for one in out.glob("*")) if out.exists() else []
    if left:
        fail(f"{out} is not empty: {', '.join(left)}. Remove them, or use --out")
    tracked = check_commit(version, rehearsal=given.rehearsal)
    pythons = list(interpreters(given.python))
    if not pythons:
        fail(f"no Python of {', '.join(PYTHONS)} is on the PATH: name one with --python")
    with tempfile.TemporaryDirectory(prefix="edl-release-") as temporary:
        work = Path(temporary).resolve()
        venv.create(work / "tools", with_pip=True)
        tools = work / "tools" / "bin"
        run([tools / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS], work)
        sdist, wheel = build(tools, work)
        check_archives(sdist, wheel, tracked, work)
        environments = []
        for python in pythons:
            folder = work / f"try-{python.version}"
            folder.mkdir()
            environments.append(try_wheel(wheel, version, python, tools, folder))
        sbom = work / f"edl-{version}.cdx.json"
        write_sbom(tools, environments[-1], version, sbom)
        out.mkdir(parents=True, exist_ok=True)
        files = [Path(shutil.copy(one, out)) for one in (sdist, wheel, sbom)]
    sums = out / "SHA256SUMS"
    sums.write_text(sums_text(digests(files)))
    if given.sign_key:
        sign(sums, given.sign_key)
    for path in sorted(out.iterdir()):
        say(f"{path.stat().st_size:>9} {path.name}")


if __name__ == "__main__":
    main()
