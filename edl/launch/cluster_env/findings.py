"""Findings from a cluster's environment variables, and their parsing. Pure: the environment is an argument."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from edl.errors import SettingError

OFF = "Correct it, or keep out of it: --cluster-env=none"
MOST_NODES = 1_000_000
"""Above it a number is taken for a mistake."""
FIRST_PORT = 20_000
PORTS = 5_000
"""Default ports of the store: the even ones from 20000 to 29998, the next one of each for etcd's
peers. They lie below those that Linux hands out to connections (32768 and above)."""
LONGEST_NAME = 128
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Findings:
    """Where this launcher stands, as its cluster has it."""

    cluster: str
    """As people call it, such as ``Slurm``."""
    nnodes: int
    """Launchers of the job, one on each node."""
    node_rank: int = -1
    """This one's number from 0; -1: not known."""
    host: str = ""
    """Where the store is to be; empty: not known."""
    port: int = 0
    """0: to be made from the job's name."""
    job: str = ""
    """A name for the job, the same on all its nodes and no other job's; empty: not known."""
    origin: str = ""
    """The variable that ``host`` comes from."""
    grows: bool = False
    """More nodes than ``nnodes`` may come later."""
    advice: str = ""
    """The user's next action if ``host`` is unknown."""
    unclear: str = ""
    """Why nothing of it can be used."""
    hint: str = ""
    """Further remarks for the user."""


def store_port(job: str) -> int:
    """An even port from ``FIRST_PORT`` for a job's store, the same wherever it is computed."""
    return FIRST_PORT + 2 * (zlib.crc32(job.encode()) % PORTS)


def job_name(*parts: str) -> str:
    """Parts as a job id: what it may not hold becomes ``-``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(part for part in parts if part))[:LONGEST_NAME]


def first_of(env: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is there and not empty; empty: none is."""
    return next((name for name in names if env.get(name, "").strip()), "")


def number(env: Mapping[str, str], *names: str, least: int = 0, most: int = MOST_NODES) -> int:
    """The first of these that is there, as a whole number; -1: none is. Raises ``SettingError`` for other text."""
    name = first_of(env, *names)
    if not name:
        return -1
    text = env[name].strip()
    if not (text.isascii() and text.isdecimal()) or not least <= int(text[:12]) <= most:
        raise SettingError(name, shortened(text), f"must be a whole number from {least} to {most}", OFF)
    return int(text)


def host_name(env: Mapping[str, str], name: str, nnodes: int = 1) -> str:
    """A host's name or address from this variable. Raises ``SettingError`` for what cannot be one, or means each host
    itself where there are several."""
    text = env[name].strip()
    if nnodes > 1 and text in LOOPBACK:
        advice = "Name the first host by an address that all of them reach, or keep out of it: --cluster-env=none"
        raise SettingError(name, text, f"cannot be reached from other hosts, and there are {nnodes} launchers", advice)
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", text):
        raise SettingError(name, shortened(text), "is no name or address of a host", OFF)
    return text


def in_range(name: str, rank: int, nnodes: int) -> int:
    """``rank``. Raises ``SettingError`` when there are not that many."""
    if rank >= nnodes:
        raise SettingError(name, rank, f"must be less than the number of launchers, {nnodes}", OFF)
    return rank


def shortened(text: str) -> str:
    """For a message: a list of a thousand hosts says no more than its beginning."""
    return text if len(text) <= 60 else text[:57] + "..."
