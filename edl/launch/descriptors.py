"""The limit on a launcher's open files (``RLIMIT_NOFILE``).

A Master has a connection to each node of its job, and the usual soft limit of 1,024 exists only for programs that use
``select``. So a launcher raises its soft limit to the hard limit, and starts its workers with the original limits.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from edl.errors import UsageError
from edl.launch.settings import Backend, LaunchSettings

BASE = 96
"""Open files of a launcher without workers, with all features in use."""
EACH_WORKER = 12
"""Open files per worker: pipes, log files, a socket, memory files."""
EACH_NODE = 2
"""Connections per node of a Master: its stream, and an occasional request."""
ETCD = 192
"""Open files for etcd, which refuses to start with fewer than 150, and for its clients."""
PEERS = 1024
"""Limit on simultaneous connections, unless the job is larger or the limit on open files is lower."""
FEWEST_PEERS = 16
MOST = 1 << 20
"""The highest soft limit that a launcher sets."""

Limits = tuple[int, int]
"""The soft and the hard limit."""


def needed(settings: LaunchSettings) -> int:
    """Open files that this launcher needs as the Master of the largest world of its job."""
    own = BASE + EACH_WORKER * settings.slots + EACH_NODE * settings.spec.nodes.maximum
    return max(own, ETCD) if _serves_alone(settings) else own


def for_peers(settings: LaunchSettings) -> int:
    """Limit on simultaneous connections to this launcher.

    Low enough that clients cannot exhaust its open files, and high enough for a job of the largest size, if the soft
    limit allows. Call it after ``take_all``.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = BASE + EACH_WORKER * settings.slots
    wanted = max(PEERS, 2 * EACH_NODE * settings.spec.nodes.maximum)
    return wanted if soft == resource.RLIM_INFINITY else max(FEWEST_PEERS, min(wanted, soft - own))


def take_all(settings: LaunchSettings, log: Callable[[str], None]) -> Limits:
    """Raise the soft limit to the hard limit; returns the original limits, for the workers. Logs a warning if that is
    too low for the Master of the largest world. Raises ``UsageError`` if it is too low for this launcher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    least = BASE + EACH_WORKER * settings.slots
    if _serves_alone(settings):
        least = max(least, ETCD)
    if most < least:
        raise UsageError(
            f"at most {most} files may be open here (ulimit -Hn), but a launcher with {settings.slots} workers needs "
            f"{least}. Raise the hard limit: `ulimit -Hn 4096` as root, LimitNOFILE= of the service, or --ulimit of "
            "the container"
        )
    if most < needed(settings):
        log(
            f"at most {most} files may be open here (ulimit -Hn). With {settings.spec.nodes.maximum} nodes this "
            f"launcher needs {needed(settings)} when it is the Master: some nodes will not be able to connect to it"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return soft, hard


def _serves_alone(settings: LaunchSettings) -> bool:
    """Whether this launcher runs a private etcd."""
    return settings.store.backend is Backend.EMBEDDED and not settings.store.endpoints
