"""Lists the sockets at which jobs listen, and what each of them answers to another user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.common.job import Job, launch
from benchmarks.common.launchers import Edl, JobPlan
from benchmarks.exposure import probes, stranger
from benchmarks.exposure.sockets import Listening, listening

COLUMNS = ("connect", "GET", "etcd's JSON", "range", "Status", "wrong token", "TLS")

_SIGNS = (
    ("launcher", "Status", ("UNAUTHENTICATED", "OK"), "gRPC"),
    ("launcher", "GET", ("40",), "HTTP"),
    ("launcher", "TLS", ("refused, shows",), "gRPC"),
    ("launcher", "connect", ("yes",), "copies of commits"),
)
"""Owner, probe and answer that identify a kind of socket."""


@dataclass(frozen=True, slots=True)
class Told(Edl):
    """``edl-run`` with additional options, and optionally a command before it."""

    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    deadline_s: float = 240.0

    def command(self, plan: JobPlan, node: int) -> list[str]:
        command, tail = Edl.command(self, plan, node), plan.tail()
        more = [
            *self.options,
            f"--checkpoint-dir={plan.folder / 'checkpoints'}",
            *([f"--rdzv-id={plan.job_id}"] if plan.alone else []),
        ]
        return [*self.prefix, *command[: -len(tail)], *more, *tail]


@contextlib.contextmanager
def running(launcher: Told, nodes: int, script: str = "rejoin_torch.py", workers: int = 1) -> Iterator[Job]:
    """A job that trains; with one node it has no endpoint."""
    with launch(launcher, script, (1, 4), alone=nodes == 1, workers_per_node=workers) as job:
        for node in range(nodes):
            job.start(node)
        job.wait_running(nodes * workers, steps=5)
        yield job


def scan(python: str) -> None:
    """Print the tables."""
    print(f"The stranger: {stranger.described()}.\n")
    beside = ("--readers=1", "--http-port=0")
    for title, launcher, nodes in (
        ("a default job on one machine", Told(python, embedded=True), 1),
        ("three nodes, no secret, with readers and HTTP", Told(python, embedded=True, options=beside), 3),
        (
            "three nodes with a secret, with readers and HTTP",
            Told(python, embedded=True, secret=True, options=beside),
            3,
        ),
    ):
        with running(launcher, nodes) as job:
            _show(title, job)


def _show(title: str, job: Job) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("node", "whose", "what it is", "where", *COLUMNS):
        table.add_column(heading, overflow="fold")
    for one in listening(job.run):
        found = stranger.ask(probes.everything, one.family, one.address, one.target, f"/edl/{job.plan.job_id}/")
        if not isinstance(found, dict):
            found = {"connect": found}
        what = _what(one, found)
        shown = one.where if len(one.where) < 30 else f"…{one.where[-27:]}"
        table.add_row(one.node, one.whose, what, f"{one.family} {shown}", *(found.get(name, "") for name in COLUMNS))
    Console(width=190).print(table)


def _what(one: Listening, found: dict[str, str]) -> str:
    """Identify a socket by its owner, else by its answers."""
    if one.family.startswith("abstract"):
        return "its workers' socket" if one.whose == "launcher" else "go-systemd's, never read"
    if one.hint:
        return f"etcd, {one.hint}"
    for whose, probe, answers, name in _SIGNS:
        if one.whose == whose and found.get(probe, "").startswith(answers):
            return name
    return {"worker": "torch's own", "reader": "readers' Flight"}.get(one.whose, "?")
