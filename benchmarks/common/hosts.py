"""Hosts on one machine: network namespaces joined by a switch whose cables can be pulled, cut one way, or made worse.

Needs root and iproute2. What the kernel does not allow raises ``NotAllowed``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x4000_0000
_SWITCH = "switch"
_ADDRESSES = "10.213.7."
_OWN = f"{_ADDRESSES}254"


class NotAllowed(Exception):
    """The kernel, or the rights of this process, do not allow it."""


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``ip WORDS…`` and return the finished process."""
    try:
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)
    except FileNotFoundError:
        return subprocess.CompletedProcess(["ip", *words], 127, "", "there is no program ip (iproute2)")


@dataclass(frozen=True)
class Network:
    """Addresses by host name. The switch's own namespace has an address too, for whoever wants to look at the hosts
    from outside."""

    prefix: str
    """Of the names of its namespaces."""
    hosts: dict[str, str]

    @property
    def switch(self) -> str:
        return self.namespace(_SWITCH)

    def namespace(self, host: str) -> str:
        """The name of a host's namespace."""
        return f"{self.prefix}-{host}"

    def on(self, host: str) -> list[str]:
        """Put before a command to run it on that host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def pull(self, host: str) -> None:
        """Unplug the host's cable: packets are dropped silently in both directions."""
        ip("-n", self.switch, "link", "set", f"to-{host}", "down")

    def plug(self, host: str) -> None:
        """Plug the host's cable in again."""
        ip("-n", self.switch, "link", "set", f"to-{host}", "up")

    def deafen(self, host: str) -> None:
        """What others send to the host is dropped; what it sends arrives."""
        self._shape(self.switch, f"to-{host}", *_DROP)

    def mute(self, host: str) -> None:
        """What the host sends is dropped; what others send arrives."""
        self._shape(self.namespace(host), "eth0", *_DROP)

    def shape(self, host: str, *words: str) -> None:
        """Put a packet scheduler, such as ``netem loss 5%``, on what goes to and comes from the host. Raises
        ``NotAllowed`` if the kernel lacks it."""
        self._shape(self.switch, f"to-{host}", *words)
        self._shape(self.namespace(host), "eth0", *words)

    def restore(self, host: str) -> None:
        """Undo ``deafen``, ``mute`` and ``shape``."""
        for namespace, link in ((self.switch, f"to-{host}"), (self.namespace(host), "eth0")):
            _tc(namespace, "qdisc", "delete", "dev", link, "root")

    def _shape(self, namespace: str, link: str, *words: str) -> None:
        done = _tc(namespace, "qdisc", "replace", "dev", link, "root", *words)
        if done.returncode:
            raise NotAllowed(f"tc {' '.join(words)}: {done.stderr.strip()}")


_DROP = ("pfifo", "limit", "0")


def _tc(namespace: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["tc", "-n", namespace, *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(["tc", *words], 127, "", "there is no program tc (iproute2)")


def enter(namespace: str) -> None:
    """Move the calling thread, and no other, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(Path("/run/netns") / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def network(hosts: Sequence[str], prefix: str = "") -> Iterator[Network]:
    """A switch with these hosts. Raises ``NotAllowed``. ``prefix`` distinguishes several of one process."""
    made = Network(f"edl-{os.getpid()}{prefix and '-'}{prefix}", {})
    if (added := ip("netns", "add", made.switch, check=False)).returncode:
        raise NotAllowed(f"may not make network namespaces: {added.stderr.strip()}")
    try:
        if (added := ip("-n", made.switch, "link", "add", "bridge", "type", "bridge", check=False)).returncode:
            raise NotAllowed(f"may not make a network bridge: {added.stderr.strip()}")
        ip("-n", made.switch, "address", "add", f"{_OWN}/24", "dev", "bridge")
        ip("-n", made.switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts, start=1):
            name, made.hosts[host] = made.namespace(host), f"{_ADDRESSES}{number}"
            ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"to-{host}", "netns", made.switch)
            ip("-n", made.switch, "link", "set", f"to-{host}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{made.hosts[host]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in (*hosts, _SWITCH):
            ip("netns", "delete", made.namespace(host), check=False)
