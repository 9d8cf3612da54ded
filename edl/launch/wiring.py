"""Connects the candidate, the agent and the launcher, which know one another only through callbacks.

Shared by ``compose``, which passes the real parts, and the simulator, which passes simulated ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from edl.agent.machine.events import MasterSaid
from edl.agent.shell import AgentShell
from edl.launch.launcher import Launcher, LauncherDeps
from edl.master.candidate import Candidate, CandidateCallbacks
from edl.master.election import MasterInfo
from edl.master.shell import MasterDeps, MasterShell
from edl.wire.records import NodeInfo


class Wired(NamedTuple):
    """The candidate, the agent and the launcher of one process, connected by callbacks."""

    candidate: Candidate
    agent: AgentShell
    launcher: Launcher


def wire(
    master: MasterDeps,
    own: MasterInfo,
    *,
    elected: Callable[[MasterShell | None], None],
    make_agent: Callable[[Candidate, Callable[[], Awaitable[NodeInfo]]], AgentShell],
    make_deps: Callable[[Candidate, AgentShell], LauncherDeps],
) -> Wired:
    """Create and connect the parts of a launcher.

    ``own``: what this launcher publishes if it is elected Master. ``elected``: called with the Master when it starts,
    and with None when it stops. ``make_agent``: receives the function that registers the node again.
    """
    candidate = Candidate(
        master,
        own,
        CandidateCallbacks(
            follow=lambda found, token: agent.follow(found.host, found.port, token),
            elected=elected,
            concluded=lambda outcome: agent.post(MasterSaid(outcome)),
            lease_ended=lambda lease: launcher.lease_ended(lease),
        ),
    )
    agent = make_agent(candidate, lambda: launcher.register_again())
    launcher = Launcher(make_deps(candidate, agent))
    return Wired(candidate, agent, launcher)
