"""The commands in the documentation's code blocks, and what becomes of each: which test runs it, or why none does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.docs_steps import ALONE, BEFORE_THE_END, IN_THE_JOB
from tests.unit.test_house_rules import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = ("console", "bash", "")
"""Languages of code blocks with commands; those in blocks of output, without a language, follow a ``$``."""
OTHERS = ("cpp", "diff", "dockerfile", "json", "mermaid", "proto", "promql", "python", "text", "toml", "yaml")
"""Languages of code blocks without commands."""
BETWEEN = ("|", "||", "&", "&&", ";")
LAUNCHER = re.compile(r"edl-run|edl\.launch(?:\.\w+)?")


def lines_of(page: str) -> Iterator[str]:
    """The lines with commands in a page's code blocks: without comments, with continued lines joined and single spaces.

    A block of console without a prompt has only commands.
    """
    for language, text in BLOCK.findall(page):
        if language not in SHELLS:
            continue
        prompted = any(line.startswith("$ ") for line in text.splitlines())
        for line in text.replace("\\\n", " ").splitlines():
            command = re.sub(r" +", " ", re.sub(r"(^|\s)#.*$", "", line)).strip()
            if command.startswith("$ "):
                yield command[2:].strip()
            elif command and (
                language == "bash" or (language == "console" and not prompted) or command.startswith("edl-run ")
            ):
                yield command


def calls(line: str) -> Iterator[list[str]]:
    """The words of each call of edl or its launcher in a line of a shell; usage lines without their brackets."""
    for inner in re.findall(r"\$\(([^)]*)\)", line):
        yield from calls(inner)
    words = shlex.split(re.sub(r"[\[\]…]", " ", line))
    call: list[str] = []
    for word in [*words, ";"]:
        if word in BETWEEN:
            while call and (re.fullmatch(r"\w+=.*", call[0]) or call[0] in ("exec", "(umask")):
                del call[0]
            for place in range(len(call) - 1):  # also behind the words of another program, such as mpirun
                if call[place : place + 2] in (["python", "-m"], ["python3", "-m"]):
                    del call[: place + 2]
                    break
            if call and (call[0] == "edl" or LAUNCHER.fullmatch(call[0])):
                yield call
            call = []
        else:
            call.append(word)


def commands() -> dict[str, list[str]]:
    """Every line with commands, and the pages that have it."""
    found: dict[str, list[str]] = {}
    for path in PAGES:
        for line in lines_of(path.read_text()):
            found.setdefault(line, []).append(str(path.relative_to(ROOT)))
    return found


# --- what becomes of each --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elsewhere:
    """Another test runs such a command."""

    test: str
    """Its file."""
    text: str
    """What is in that file."""


@dataclass(frozen=True)
class Checked:
    """A launcher's command line: the launcher's own checks accept it, to the last value. It is not started."""

    reason: str


@dataclass(frozen=True)
class NotRun:
    """A machine that runs the tests lacks something. Calls of edl in the line are parsed."""

    reason: str


Fate = Elsewhere | Checked | NotRun

FATES: tuple[tuple[str, Fate], ...] = (
    # Starting jobs.
    (r"(python -m edl\.launch|edl-run) (?!\[).*examples/.*", Checked("trains for minutes, most on two hosts")),
    (r"(edl-run|python -m edl\.launch) \[OPTIONS\] .*", NotRun("describes the usage")),
    (r"python -m edl\.launch\.paddle .*--(ips|devices)=.*", NotRun("names two hosts, or four GPUs of this one")),
    (r"((?:\w+=\S+ )*)(edl-run|python -m edl\.launch(\.paddle)?) (?!\[|.*examples/|.*--(?:ips|devices)=).*",
     Checked("the page has no script that could run")),
    (r"(srun|mpirun|mpiexec\.hydra) .*", Checked("needs several hosts with Slurm or MPI")),
    (r"(horovodrun|dlrover-run|torchft_lighthouse|TORCHFT_LIGHTHOUSE=\S+ torchrun) .*",
     NotRun("needs another launcher, for comparison")),
    (r"torchrun .*|python -m paddle\.distributed\.launch .*", NotRun("another launcher, for comparison")),
    # Examples.
    (r"python examples/07-click-through/(generate|prepare)\.py.*",
     Elsewhere("tests/process/test_ps_example.py", '"prepare.py"')),
    (r"python examples/07-click-through/train_torch\.py",
     Elsewhere("tests/process/test_ps_example.py", 'f"train_{framework}.py"')),
    (r"python examples/(?!07|05-data-service/make_data)\S+", NotRun("trains for minutes, in one process without edl")),
    (r"head -n 44000000 .*", NotRun("needs a data set of 11 GB")),
    (r"diff <\(.*", NotRun("compares the curves of two trainings of minutes")),
    (r"kill -9 4711", NotRun("needs the process id of a worker that the reader sees")),
    # Commands of edl that need a special job.
    (r"edl data add .*", Elsewhere("tests/process/test_data_growing.py", '"data", "add"')),
    (r"edl data \[.*", Elsewhere("tests/process/test_data_growing.py", 'running.cli("data")')),
    (r"edl ps \[.*", Elsewhere("tests/process/test_ps_launch.py", 'job.cli("ps")')),
    (r"edl stop \[.*", NotRun("describes the usage of a command that ends the job")),
    (r"python -m ps export .*", Elsewhere("tests/unit/ps/client/test_export.py", '"export"')),
    (r"(eval \"\$\()?_EDL_COMPLETE=.*", Elsewhere("tests/unit/edl/cli/test_completion.py", "ShellComplete")),
    (r"curl .*/metrics", Elsewhere("tests/process/test_metrics.py", '"/metrics"')),
    (r"python -m data_service scan --list 's3://.*", NotRun("needs an object store")),
    # Tools of the project.
    (r"scripts/(check|test|soak|demo|torch-versions|site)( .*)?", NotRun("takes minutes to hours, or runs this test")),
    (r"python -m scripts\.generate_protobuf check", Elsewhere("scripts/check", "generate_protobuf check")),
    (r"python -m scripts\.generate_protobuf write", NotRun("rewrites generated code, with a compiler of its own")),
    (r"python -m scripts\.dropin torchrun", Elsewhere("tests/unit/edl/launch/test_torchrun_options.py", "scripts")),
    (r"python -m edl\.testing\.commits .*",
     Elsewhere("tests/process/test_commit_schedules.py", '"edl.testing.commits"')),
    (r"python -m edl\.testing (?!--seed=3$).*", Elsewhere("tests/sim/test_simulator.py", "--trace")),
    # Other programs.
    (r"pip install .*", NotRun("needs a package index")),
    (r"\. \.venv/bin/activate", NotRun("changes the reader's shell")),
    (r"edl simulate --nodes 304 .*", NotRun("simulates for eight minutes")),
    (r"python -m benchmarks\.report .*", NotRun("installs other launchers, and measures for hours")),
    (r"kubectl .*", NotRun("needs a cluster of Kubernetes; tests/process/test_kubernetes.py has a fake one")),
    (r"sbatch .*|squeue .*", NotRun("needs a cluster of Slurm; tests/process/test_slurm.py starts one")),
    (r"ssh -L .*", NotRun("needs a second host")),
    (r"(openssl rand .* > |chmod 640 )/etc/.*", NotRun("writes to /etc")),
    (r"ssh-keygen -Y verify .*|sha256sum --check .*", NotRun("needs a signed release")),
)  # fmt: skip
"""What becomes of lines that ``docs_steps`` does not run: the one pattern that matches the whole line says it."""


def fates_of(line: str) -> list[Fate]:
    """Everything that the table says of a line; it should be one thing."""
    return [fate for pattern, fate in FATES if re.fullmatch(pattern, line)]


def is_run(line: str) -> bool:
    """Whether ``tests/process/test_docs_run.py`` runs the line."""
    return line in {step.line for step in (*ALONE, *IN_THE_JOB, *BEFORE_THE_END)}
