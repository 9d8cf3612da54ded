"""``--denylist`` and ``--host-id``."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from edl.errors import SettingError
from edl.launch.naming import checkpoint_folder
from edl.launch.options import record
from edl.launch.options.faults import IN_STORE, NO_DENYLIST
from edl.launch.settings import Backend, DenylistSettings, StoreSettings

_HOST_VARIABLES = ("NODE_NAME", "SLURMD_NODENAME")
"""Variables that name the host: by convention from the Kubernetes downward API, where the host name is the pod's;
and from Slurm."""
LONGEST = 253
"""Maximum length of a host's name: that of a DNS name."""


def host_id_from(given: str, env: Mapping[str, str]) -> str:
    """The name of this host. ``given``: the value of ``--host-id``. Raises ``SettingError``."""
    name = given or next(filter(None, (env.get(one, "") for one in _HOST_VARIABLES)), "") or socket.gethostname()
    if len(name) > LONGEST or not name.isprintable() or name != name.strip():
        what = f"must be 1 to {LONGEST} printable characters without blanks at the ends"
        raise SettingError("--host-id", repr(name), what)
    return name


def denylist_from(options: Mapping[str, Any], store: StoreSettings) -> DenylistSettings:
    """Where the denylist is kept. Raises ``SettingError``."""
    where = options["denylist"].strip()
    if where == IN_STORE and store.backend is Backend.EMBEDDED:
        what = "the store of this job is its own and ends with it"
        raise SettingError("--denylist", where, what, "Name a directory that all jobs share, or an etcd of your own")
    return record(DenylistSettings, options, where=_place(where))


def _place(where: str) -> str:
    if where in ("", NO_DENYLIST):
        return ""
    return where if where == IN_STORE else checkpoint_folder(where, "--denylist")
