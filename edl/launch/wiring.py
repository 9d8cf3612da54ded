"""Connects the candidate, the agent and the launcher, which know one another only by callbacks.

``compose`` passes the real parts, and the simulator passes simulated ones: both get the same connections.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from edl.agent.machine.events import MasterSaid
from edl.agent.shell import AgentShell
from edl.launch.launcher import Launcher, Parts
from edl.master.candidate import Callbacks, Candidate
from edl.master.election import Ruler
from edl.master.shell import MasterDeps, MasterShell
from edl.wire.messages import NodeInfo


class Wired(NamedTuple):
    """The connected parts."""

    candidate: Candidate
    agent: AgentShell
    launcher: Launcher


def wire(
    master: MasterDeps,
    ruler: Ruler,
    *,
    rule: Callable[[MasterShell | None], None],
    make_agent: Callable[[Candidate, Callable[[], Awaitable[NodeInfo]]], AgentShell],
    make_parts: Callable[[Candidate, AgentShell], Parts],
) -> Wired:
    """Create the parts of a launcher in the order in which they need one another.

    ``ruler``: the address under which this launcher would be the Master. ``rule``: called when it becomes the Master,
    and with None when it stops. ``make_agent``: receives the function that registers the node again.
    """
    candidate = Candidate(
        master,
        ruler,
        Callbacks(
            follow=lambda ruler, token: agent.follow(ruler.host, ruler.port, token),
            rule=rule,
            concluded=lambda outcome: agent.post(MasterSaid(outcome)),
        ),
    )
    agent = make_agent(candidate, lambda: launcher.register_again())
    launcher = Launcher(make_parts(candidate, agent))
    return Wired(candidate, agent, launcher)
