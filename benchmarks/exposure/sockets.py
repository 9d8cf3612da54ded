"""Finds every socket through which the processes of a run can be reached."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common import processes
from edl.wire.address import address

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where others listen
_LISTENS = 0x10000
"""Flag in ``/proc/net/unix`` of a socket that accepts connections."""
_KINDS = {"0001": "stream", "0002": "datagram", "0005": "packet"}


@dataclass(frozen=True, slots=True)
class Listening:
    """One listening socket. ``family``: ``tcp``, ``udp``, ``unix`` or ``abstract``; the latter two with ``-datagram``
    or ``-packet`` if they are not streams."""

    node: str
    whose: str
    family: str
    where: str
    """``host:port``, a path, or a name."""
    hint: str = ""

    @property
    def target(self) -> str:
        """The address in gRPC's syntax."""
        prefix = {"unix": "unix:", "abstract": "unix-abstract:"}.get(self.family.partition("-")[0], "")
        found = self.address
        return prefix + self.where if isinstance(found, str) else address(*found)

    @property
    def address(self) -> tuple[str, int] | str:
        """The address for a socket."""
        if self.family.startswith("unix"):
            return self.where
        if self.family.startswith("abstract"):
            return "\0" + self.where
        host, _, port = self.where.rpartition(":")
        return EVERYWHERE.get(host, host), int(port)


def listening(run: str) -> list[Listening]:
    """All listening sockets of a run's processes; each once, even if a fork also holds it."""
    found: dict[tuple[str, str], Listening] = {}
    bound = dict(_bound_unix_sockets())
    for one in processes.find(run):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            process = psutil.Process(one.pid)
            node, whose, urls = _node(one.pid), _whose(process), _etcd_urls(process)
            for family, where in (*_internet(process), *_unix(one.pid, bound)):
                end = f":{where.rpartition(':')[2]}" if family == "tcp" else where.rpartition("/")[2]
                hint = next((name for name, url in urls if url.endswith(end)), "")
                found.setdefault((family, where), Listening(node, whose, family, where, hint))
    return sorted(found.values(), key=lambda one: (one.node, one.whose, one.family, one.where))


def _internet(process: psutil.Process) -> Iterator[tuple[str, str]]:
    for one in process.net_connections("inet"):
        if one.status == psutil.CONN_LISTEN:
            yield "tcp", f"{_plain(one.laddr.ip)}:{one.laddr.port}"
        elif one.status == psutil.CONN_NONE and not one.raddr:
            yield "udp", f"{_plain(one.laddr.ip)}:{one.laddr.port}"


def _plain(address: str) -> str:
    """gRPC listens on IPv4 addresses in their IPv6 notation; convert these to IPv4."""
    return address.removeprefix("::ffff:")


def _bound_unix_sockets() -> Iterator[tuple[str, tuple[str, str]]]:
    """By inode: family and name of the sockets that others could send to. psutil does not tell which ones listen."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, kind, _, inode, *names = line.split(None, 7)
        if names and (int(flags, 16) & _LISTENS or _KINDS.get(kind) == "datagram"):
            suffix = "" if _KINDS.get(kind) == "stream" else f"-{_KINDS.get(kind, kind)}"
            name = names[0].removeprefix("@")
            yield inode, (f"{'abstract' if name != names[0] else 'unix'}{suffix}", name)


def _unix(pid: int, bound: dict[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path))
            if match and match[1] in bound:
                family, name = bound[match[1]]
                # etcd was given a name relative to the process's working directory.
                yield family, str(Path(os.readlink(f"/proc/{pid}/cwd")) / name) if family.startswith("unix") else name


def _node(pid: int) -> str:
    match = re.search(rf"{processes.NODE_MARK}=(\d+)".encode(), Path(f"/proc/{pid}/environ").read_bytes())
    return match[1].decode() if match else "?"


def _whose(process: psutil.Process) -> str:
    words = process.cmdline()
    if process.name() == "etcd":
        return "etcd"
    if "data_service" in words:
        return "reader"
    if "edl.launch" in words:
        return "launcher"
    if "ps" in words and "server" in words:
        return "pserver"
    return "worker" if any("benchmarks/scripts" in word for word in words) else "helper"


def _etcd_urls(process: psutil.Process) -> list[tuple[str, str]]:
    if process.name() != "etcd":
        return []
    words = " ".join(process.cmdline())
    return [(name, url) for name in ("client", "peer") for url in re.findall(rf"--listen-{name}-urls[= ](\S+)", words)]
