"""Who takes part in the report, with which settings, and why someone is missing from a row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_venv import PEERS, NotInstalled, check, reason_file


@dataclass(frozen=True, slots=True)
class Contender:
    """A launcher with a framework. ``peer``: the environment that it needs (a key of ``peer_venv.PEERS``); empty for
    the Python that runs the report. ``rows``: the only rows in which it takes part; empty: all."""

    name: str
    launcher: str
    settings: str
    peer: str = ""
    framework: str = "torch"
    rows: tuple[str, ...] = ()


_SHORT_RENDEZVOUS = "`last_call_timeout=1` (30), `keep_alive_interval=1`, `keep_alive_max_attempt=3`"

CONTENDERS = tuple(
    Contender(*one)
    for one in (
        ("edl-rejoin", "edl-rejoin", "script with `edl.torch`; etcd outside the nodes, `--lease-ttl=3`"),
        ("edl", "edl", "plain script; the same launcher"),
        ("torchrun", "torchrun-tuned", f"plain script; `--monitor-interval=0.1`, {_SHORT_RENDEZVOUS}, no shared store"),
        (
            "torchft",
            "torchft",
            "script with its manager; its lighthouse drops a silent replica after 1 s (5), waits 1 s for others (60)",
            "torchft",
        ),
        (
            "nvrx",
            "nvrx",
            f"plain script; `ft_launcher`, {_SHORT_RENDEZVOUS}, `--workers-stop-timeout=1` (30)",
            "nvrx",
        ),
        (
            "nvrx-inprocess",
            "nvrx-inprocess",
            "script in its wrapper; intervals of 0.1 s (1), a silent rank is given up after 3 s (30); in the row "
            "`worker` one rank in reserve",
            "nvrx",
        ),
        (
            "dlrover",
            "dlrover",
            "plain script; its local master, `lastcall_timeout=1` (60), `--monitor-interval=0.1`",
            "dlrover",
        ),
        (
            "ray-train",
            "ray-train",
            "plain script's function; elastic `num_workers`, looks for nodes every 0.5 s (60) and at workers every "
            "0.1 s (2), a silent node is dead after 2 s, a start without room is given up after 2 s (60)",
            "ray-train",
        ),
        ("horovod", "", "not measured", "horovod"),
        ("edl-rejoin-paddle", "edl-rejoin", "script with `edl.paddle`; otherwise as edl-rejoin", "", "paddle"),
        (
            "paddle-launch",
            "paddle-launch",
            "plain script; etcd outside the nodes, `--elastic_level 1 --elastic_timeout 10` (30)",
            "paddle",
            "paddle",
        ),
        ("bare", "bare", "plain script, started by hand with its rank", "", "torch", ("steady",)),
        ("bare-paddle", "bare", "plain script, started by hand with its rank", "", "paddle", ("steady",)),
    )
)
"""In the order of the tables. Settings give the default in brackets where it differs."""

_NO_STORE = "has no store apart from what the row `leader` kills"
WITHOUT: dict[str, dict[str, str]] = {
    "leader": {
        "paddle-launch": "has no such part: each launcher watches etcd by itself",
    },
    "store": {
        "torchrun": _NO_STORE,
        "torchft": _NO_STORE,
        "nvrx": _NO_STORE,
        "nvrx-inprocess": _NO_STORE,
        "dlrover": _NO_STORE,
        "ray-train": _NO_STORE,
    },
    "join": {
        "nvrx-inprocess": "has no such feature: a restart only excludes ranks that are gone, and the world is never "
        "larger than at the start (documentation of its Wrapper)",
    },
}
"""Why a contender has no part in a row, by row and contender."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a look at a contender's environment has found: its Python and version, or why it cannot run."""

    python: str = ""
    version: str = ""
    reason: str = ""


def environment_of(peer: str, peers: Path) -> Path:
    """The folder of a peer's environment, in that of all of them."""
    return peers / f"peers-{peer}"


def look(contender: Contender, peers: Path, own_python: str) -> Place:
    """Find the contender's environment in the folder ``peers``."""
    if not contender.peer:
        return Place(python=own_python)
    folder = environment_of(contender.peer, peers)
    python = folder / "bin" / "python"
    if reason_file(folder).exists():
        return Place(reason=f"cannot be installed here: {reason_file(folder).read_text().strip()}")
    if not python.exists():
        return Place(reason=f"not installed: `python -m benchmarks.peer_venv --peer {contender.peer} {folder}`")
    try:
        return Place(python=str(python), version=check(python, PEERS[contender.peer]))
    except NotInstalled as error:
        return Place(reason=f"its environment {folder} does not work: {error}")
