"""The kinds of jobs that the soak runs: command lines, scripts, and what each promises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.launchers import REPOSITORY

SCRIPTS = REPOSITORY / "benchmarks" / "scripts"
SAVE_EVERY = 10
FOLDER, DATA = "{folder}", "{data}"
"""Placeholders in arguments."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of job. ``redone_allowed``: steps that one change of the world may cost."""

    name: str
    script: str
    frameworks: tuple[str, ...]
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = (f"--folder={FOLDER}", "--pause={pause}")
    trainers: tuple[str, ...] = ("a", "b", "c")
    pservers: tuple[str, ...] = ()
    reference: str = ""
    """The script that knows the losses of an undisturbed run."""
    redone_allowed: int = 1
    needs_copies: bool = False
    """Whether a node has state that others need not have."""
    records: int = 0
    """Of its data set, if it reads one: an epoch takes about ten seconds, so that each job has several."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.trainers, *self.pservers)

    @property
    def path(self) -> Path:
        return SCRIPTS / self.script


_SAVES = f"--save-every={SAVE_EVERY}"
_TORCH = ("torch",)


def _in_process(name: str, script: str, **more: object) -> Kind:
    arguments = (f"--folder={FOLDER}", "--pause={pause}", _SAVES)
    return Kind(name, script, _TORCH, ("--checkpoint-dir={checkpoints}",), arguments, **more)  # type: ignore[arg-type]


def _ps(mode: str, *arguments: str) -> Kind:
    return Kind(
        f"ps-{mode}",
        "ps_records.py",
        ("numba", "pyarrow"),
        ("--run-mode=ps", f"--ps-mode={mode}", "--pserver-memory=256M", "--servers=1:2"),
        (f"--folder={FOLDER}", f"--data={DATA}", "--records={records}", "--step-time={pause}", *arguments),
        trainers=("t1", "t2", "t3"),
        pservers=("p1", "p2"),
        needs_copies=True,
        records=4800,
    )


_ALL = (
    _in_process("torch", "soak_torch.py", reference="soak_torch.py"),
    Kind("torch-restart", "soak_torch_restart.py", _TORCH, reference="soak_torch.py"),
    # A lost node may take the newest commits with it, as far as they have not been copied: back to a checkpoint then.
    _in_process(
        "sharded", "soak_sharded.py", reference="soak_torch.py", redone_allowed=3 * SAVE_EVERY, needs_copies=True
    ),
    Kind(
        "data",
        "soak_data.py",
        (*_TORCH, "pyarrow"),
        ("--checkpoint-dir={checkpoints}", f"--data=train={DATA}/*"),
        (f"--folder={FOLDER}", "--pause={pause}", _SAVES),
        records=960,
    ),
    _ps("async"),
    _ps("sync", "--add"),
    Kind("paddle-restart", "soak_paddle_restart.py", ("paddle",), reference="soak_paddle_restart.py"),
)
KINDS = {kind.name: kind for kind in _ALL}
"""By name, as ``--kinds`` has them."""


def filled(words: tuple[str, ...], **places: object) -> list[str]:
    """The words with their placeholders replaced."""
    return [word.format(**places) for word in words]
