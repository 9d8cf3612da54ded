"""Slurm: a job step of ``srun`` with one launcher on each of its nodes.

Only variables of a step are used. ``sbatch`` and ``salloc`` set ``SLURM_NNODES`` and the like for a shell on one host
as well, in which a user starts a single launcher. Variables: srun(1), "Output environment variables".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from edl.errors import SettingError
from edl.launch.cluster_env.findings import OFF, Findings, first_of, host_name, in_range, job_name, number, shortened

TITLE = "Slurm"
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from this one on are not started by srun: the batch script, an interactive shell of salloc."""
MOST_HOSTS = 100_000
"""Limit on the hosts that are read from a list."""
TERMINAL = "SLURM_PTY_PORT"
"""Set by ``srun --pty``, which starts an interactive shell."""
ONE_PER_NODE = "srun --ntasks-per-node=1"


def find(env: Mapping[str, str]) -> Findings | None:
    """Findings from a Slurm step. Raises ``SettingError`` for several launchers on a node or invalid variables."""
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
    # The name stays the same after a requeue, so that a job without --rdzv-id continues from its checkpoints.
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
    """Expand a Slurm host list such as ``n[01-03,7],gpu8``.

    Numbers are padded to the width of the lower bound. Raises ``ValueError`` when iteration reaches an invalid part.
    """
    for item in _items(text):
        parts = re.split(r"\[([^\]]*)\]", item)
        yield from map("".join, _products([_Ranges(part) if at % 2 else (part,) for at, part in enumerate(parts)]))


def _items(text: str) -> Iterator[str]:
    """Split a host list at commas outside brackets. Raises ``ValueError`` for unbalanced brackets."""
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
    """The numbers of a range such as ``01-03,7``. Iterable more than once, without a list of all numbers in memory.
    Raises ``ValueError``."""

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
    """Like ``itertools.product``, but lazy: a list may name millions of hosts."""
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _products(choices[1:]):
            yield (first, *rest)


def _hosts(env: Mapping[str, str], name: str, nnodes: int) -> list[str]:
    """The first host of the step's list, or nothing without a list. Raises ``SettingError`` if the list is invalid or
    its length differs from ``nnodes``."""
    if not name:
        return []
    try:
        found = list(itertools.islice(hosts_of(env[name]), min(nnodes, MOST_HOSTS) + 1))
    except (ValueError, RecursionError):
        raise SettingError(name, shortened(env[name]), "is not a Slurm host list", OFF) from None
    if len(found) != nnodes and nnodes <= MOST_HOSTS:
        raise SettingError(name, shortened(env[name]), f"its length differs from SLURM_STEP_NUM_NODES={nnodes}", OFF)
    return [host_name({name: found[0]}, name)]


def _check_tasks(env: Mapping[str, str], nnodes: int) -> None:
    """Check that each node has one task. ``SLURM_STEP_TASKS_PER_NODE`` has the form ``2(x3),1``. Raises
    ``SettingError``."""
    tasks = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    listed = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    several = re.search(r"(?:^|,)(?!1(?:\(|,|$))(\d+)", listed, re.ASCII)
    if tasks > nnodes or several:
        name = "SLURM_STEP_TASKS_PER_NODE" if several else "SLURM_STEP_NUM_TASKS"
        raise SettingError(
            name,
            shortened(env.get(name, "")) or tasks,
            "Slurm has started several launchers on a node, but one starts all workers of its node",
            f"Use {ONE_PER_NODE}, and --nproc-per-node for the workers. For a separate job per launcher: "
            "--cluster-env=none",
        )


def _gpu_hint(env: Mapping[str, str]) -> str:
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    return f"Slurm gives this node {gpus} GPUs" if gpus.isdecimal() and int(gpus[:6]) > 1 else ""
