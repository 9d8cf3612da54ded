"""What a launcher learns from a cluster's environment variables, and functions that parse them. Pure: the environment
is an argument."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from edl.errors import SettingError

OFF = "Correct it, or ignore the cluster environment: --cluster-env=none"
"""Advice for an invalid variable."""
MOST_NODES = 1_000_000
"""Largest number that is accepted; a greater one is a mistake."""
FIRST_PORT = 20_000
PORTS = 5_000
"""Number of default ports of the store: the even ones from 20000 to 29998. The odd one after each is for etcd's peers.
All are below Linux's ephemeral ports (32768 and above)."""
LONGEST_NAME = 128
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Findings:
    """The place of this launcher in its job, according to the cluster's variables."""

    cluster: str
    """Name of the cluster environment for messages, such as ``Slurm``."""
    nnodes: int
    """Number of launchers of the job, one per node."""
    node_rank: int = -1
    """Rank of this node, from 0; -1: unknown."""
    host: str = ""
    """Host that runs the store; empty: unknown."""
    port: int = 0
    """Port of the store; 0: derived from the job's name."""
    job: str = ""
    """A name for the job, the same on all its nodes and unique among jobs; empty: unknown."""
    origin: str = ""
    """The variable from which ``host`` was read."""
    grows: bool = False
    """Whether more than ``nnodes`` nodes may come later."""
    advice: str = ""
    """The user's next action if ``host`` is unknown."""
    unclear: str = ""
    """Why the findings are not used; empty: they are."""
    hint: str = ""
    """The GPUs that the cluster gives this node, for a remark; empty: none."""


def store_port(job: str) -> int:
    """The default port of a job's store: even, at least ``FIRST_PORT``, the same on every host."""
    return FIRST_PORT + 2 * (zlib.crc32(job.encode()) % PORTS)


def job_name(*parts: str) -> str:
    """A job id made of the non-empty parts. Characters that a job id may not contain become ``-``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(part for part in parts if part))[:LONGEST_NAME]


def first_of(env: Mapping[str, str], *names: str) -> str:
    """The name of the first of these variables that is set and not blank; empty: none is."""
    return next((name for name in names if env.get(name, "").strip()), "")


def number(env: Mapping[str, str], *names: str, least: int = 0, most: int = MOST_NODES) -> int:
    """The value of the first of these variables that is set; -1: none is. Raises ``SettingError`` unless it is a whole
    number from ``least`` to ``most``."""
    name = first_of(env, *names)
    if not name:
        return -1
    text = env[name].strip()
    if not (text.isascii() and text.isdecimal()) or not least <= int(text[:12]) <= most:
        raise SettingError(name, shortened(text), f"must be a whole number from {least} to {most}", OFF)
    return int(text)


def host_name(env: Mapping[str, str], name: str, nnodes: int = 1) -> str:
    """The host name or address in this variable. Raises ``SettingError`` if it cannot be one, or if it is a loopback
    address in a job of several nodes."""
    text = env[name].strip()
    if nnodes > 1 and text in LOOPBACK:
        advice = "Give the first host's address in the network, or ignore the cluster environment: --cluster-env=none"
        raise SettingError(name, text, f"cannot be reached from other hosts, and there are {nnodes} launchers", advice)
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", text):
        raise SettingError(name, shortened(text), "is not a host name or address", OFF)
    return text


def in_range(name: str, rank: int, nnodes: int) -> int:
    """Return ``rank``. Raises ``SettingError`` for variable ``name`` if the rank is not below ``nnodes``."""
    if rank >= nnodes:
        raise SettingError(name, rank, f"must be less than the number of launchers, {nnodes}", OFF)
    return rank


def shortened(text: str) -> str:
    """At most 60 characters of the text, for messages."""
    return text if len(text) <= 60 else text[:57] + "..."
