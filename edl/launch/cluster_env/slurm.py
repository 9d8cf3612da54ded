"""Slurm: a step of ``srun`` with one launcher on each of its nodes.

Only a step counts. ``sbatch`` and ``salloc`` set ``SLURM_NNODES`` and the like for a shell on one host as well; a
launcher that is started there is one launcher. Variables: srun(1), "Output environment variables".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from edl.errors import SettingError
from edl.launch.cluster_env.findings import OFF, Findings, first_of, host_name, in_range, job_name, number, shortened

TITLE = "Slurm"
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps with such numbers are no steps of srun: the batch shell, an interactive shell of salloc."""
MOST_HOSTS = 100_000
TERMINAL = "SLURM_PTY_PORT"
"""Of ``srun --pty``: a shell for a person, whatever tasks beside it there were."""
ONE_A_NODE = "srun --ntasks-per-node=1"


def find(env: Mapping[str, str]) -> Findings | None:
    """Findings from a Slurm step. Raises ``SettingError`` for several launchers on a node or broken variables."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if not step or not first_of(env, "SLURM_STEP_NUM_NODES") or first_of(env, TERMINAL):
        return None
    if not step.isdecimal() or int(step[:12]) >= FIRST_SPECIAL_STEP:
        return None
    nnodes = number(env, "SLURM_STEP_NUM_NODES", least=1)
    _check_tasks(env, nnodes)
    names = first_of(env, "SLURM_STEP_NODELIST")
    hosts = _hosts(env, names, nnodes)
    rank = number(env, "SLURM_NODEID")
    # The same after a requeue, so that a job without a name of its own goes on from its checkpoints.
    job = job_name("slurm", env.get("SLURM_JOB_ID", "") or env.get("SLURM_JOBID", ""), step)
    return Findings(
        TITLE,
        nnodes,
        in_range("SLURM_NODEID", rank, nnodes),
        hosts[0] if hosts else "",
        job=job,
        origin=names,
        hint=_gpu_hint(env),
    )


def hosts_of(text: str) -> Iterator[str]:
    """Hosts of a list as Slurm writes it, such as ``n[01-03,7],gpu8``, one after the other.

    Numbers keep the width of the lower bound. Raises ``ValueError`` for what is no such list, as far as it was read.
    """
    for item in _items(text):
        parts = re.split(r"\[([^\]]*)\]", item)
        yield from map("".join, _products([_Ranges(part) if at % 2 else (part,) for at, part in enumerate(parts)]))


def _items(text: str) -> Iterator[str]:
    """The list's items; commas in brackets do not separate."""
    start, inside = 0, False
    for at, mark in enumerate(f"{text},"):
        if mark in "[]":
            if inside == (mark == "["):
                raise ValueError(text)
            inside = not inside
        elif mark == "," and not inside:
            if item := text[start:at].strip():
                yield item
            start = at + 1
    if inside:
        raise ValueError(text)


class _Ranges:
    """``01-03,7``: may be gone through again, and holds no more than its text however many numbers there are."""

    def __init__(self, text: str) -> None:
        self._bounds: list[tuple[int, int, int]] = []
        for part in text.split(","):
            match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", part.strip(), re.ASCII)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise ValueError(text)
            self._bounds.append((int(match[1]), int(match[2] or match[1]), len(match[1])))

    def __iter__(self) -> Iterator[str]:
        for low, high, width in self._bounds:
            for one in range(low, high + 1):
                yield f"{one:0{width}d}"


def _products(choices: Sequence[Iterable[str]]) -> Iterator[tuple[str, ...]]:
    """As ``itertools.product``, which would write them all down first."""
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _products(choices[1:]):
            yield (first, *rest)


def _hosts(env: Mapping[str, str], name: str, nnodes: int) -> list[str]:
    """The first hosts of the step's list. Raises ``SettingError`` when the list has another length than the step."""
    if not name:
        return []
    try:
        found = list(itertools.islice(hosts_of(env[name]), min(nnodes, MOST_HOSTS) + 1))
    except (ValueError, RecursionError):
        raise SettingError(name, shortened(env[name]), "is no list of hosts as Slurm writes them", OFF) from None
    if len(found) != nnodes and nnodes <= MOST_HOSTS:
        raise SettingError(name, shortened(env[name]), f"is not as long as SLURM_STEP_NUM_NODES={nnodes}", OFF)
    return [host_name({name: found[0]}, name)]


def _check_tasks(env: Mapping[str, str], nnodes: int) -> None:
    """One task a node. ``SLURM_STEP_TASKS_PER_NODE`` is such as ``2(x3),1``."""
    tasks = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    listed = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    several = re.search(r"(?:^|,)(?!1(?:\(|,|$))(\d+)", listed, re.ASCII)
    if tasks > nnodes or several:
        name = "SLURM_STEP_TASKS_PER_NODE" if several else "SLURM_STEP_NUM_TASKS"
        raise SettingError(
            name,
            shortened(env.get(name, "")) or tasks,
            "Slurm has started several launchers on a node; one starts all workers of its node",
            f"Write {ONE_A_NODE}, and --nproc-per-node for the workers; --cluster-env=none for a job of each one's own",
        )


def _gpu_hint(env: Mapping[str, str]) -> str:
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    return f"Slurm gives this node {gpus} GPUs" if gpus.isdecimal() and int(gpus[:6]) > 1 else ""
