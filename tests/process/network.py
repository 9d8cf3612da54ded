"""Hosts on one machine: network namespaces joined by a switch whose cables can be pulled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``ip WORDS…`` and return the finished process."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


@dataclass(frozen=True)
class Network:
    """Addresses by host name; cables can be pulled and put back."""

    switch: str
    hosts: dict[str, str]

    def on(self, host: str) -> list[str]:
        """Put before a command to run it on that host."""
        return ["ip", "netns", "exec", _namespace(host)]

    def pull(self, host: str) -> None:
        """Unplug the host's cable: packets are dropped silently in both directions."""
        ip("-n", self.switch, "link", "set", f"to-{host}", "down")

    def plug(self, host: str) -> None:
        """Plug the host's cable in again."""
        ip("-n", self.switch, "link", "set", f"to-{host}", "up")


def _namespace(host: str) -> str:
    return f"edl-{os.getpid()}-{host}"


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """A switch with these hosts. Skips the test where the kernel does not allow it."""
    switch = _namespace("switch")
    made = ip("netns", "add", switch, check=False)
    if made.returncode:
        pytest.skip(f"may not make network namespaces: {made.stderr.strip()}")
    try:
        if ip("-n", switch, "link", "add", "bridge", "type", "bridge", check=False).returncode:
            pytest.skip("may not make a network bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        addresses = {}
        for number, host in enumerate(hosts, start=1):
            name, addresses[host] = _namespace(host), f"10.213.7.{number}"
            ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"to-{host}", "netns", switch)
            ip("-n", switch, "link", "set", f"to-{host}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{addresses[host]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Network(switch, addresses)
    finally:
        for host in (*hosts, "switch"):
            ip("netns", "delete", _namespace(host), check=False)
