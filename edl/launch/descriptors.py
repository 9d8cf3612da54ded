"""Open files that a launcher may have. A Master holds a connection for each node of its job, and the usual soft limit
of 1,024 is there for programs that use ``select``: a launcher takes what the system allows it, and its workers get
back what they would have had without it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from edl.errors import UsageError
from edl.launch.settings import Backend, LaunchSettings

BASE = 96
"""Of a launcher without workers, with everything switched on."""
EACH_WORKER = 12
"""Pipes, log files, a socket, memory files."""
EACH_NODE = 2
"""Connections to a Master: its stream, and a question now and then."""
ETCD = 192
"""etcd refuses to start with less than 150 and some for its clients."""
PEERS = 1024
FEWEST_PEERS = 16
MOST = 1 << 20
"""Taken where there is no limit at all."""

Limits = tuple[int, int]
"""Soft and hard one."""


def needed(settings: LaunchSettings) -> int:
    """What this launcher takes when it is the Master of the largest world of its job."""
    own = BASE + EACH_WORKER * settings.slots + EACH_NODE * settings.spec.nodes.maximum
    return max(own, ETCD) if _serves_alone(settings) else own


def for_peers(settings: LaunchSettings) -> int:
    """Connections that this launcher takes at once: so few that it can go on with its own work whoever calls, enough
    for a job of the largest size where the limit allows that. Call it after ``take_all``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = BASE + EACH_WORKER * settings.slots
    wanted = max(PEERS, 2 * EACH_NODE * settings.spec.nodes.maximum)
    return wanted if soft == resource.RLIM_INFINITY else max(FEWEST_PEERS, min(wanted, soft - own))


def take_all(settings: LaunchSettings, log: Callable[[str], None]) -> Limits:
    """Raise the soft limit; returns what the workers are to have. Says when even that is too little for the largest
    world, and raises ``UsageError`` when it is for the smallest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    least = BASE + EACH_WORKER * settings.slots
    if _serves_alone(settings):
        least = max(least, ETCD)
    if most < least:
        raise UsageError(
            f"at most {most} files may be open here (ulimit -Hn), and a launcher with {settings.slots} workers needs "
            f"{least}. Raise the hard limit: `ulimit -Hn 4096` as root, LimitNOFILE= of the service, or --ulimit of "
            "the container"
        )
    if most < needed(settings):
        log(
            f"at most {most} files may be open here (ulimit -Hn). With {settings.spec.nodes.maximum} nodes this "
            f"launcher needs {needed(settings)} when it is the Master: some of them will not get through to it"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return soft, hard


def _serves_alone(settings: LaunchSettings) -> bool:
    """Whether an etcd of its own runs beside it for certain."""
    return settings.store.backend is Backend.EMBEDDED and not settings.store.endpoints
