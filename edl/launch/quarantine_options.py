"""``--quarantine`` and ``--machine``."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from edl.errors import SettingError
from edl.launch.naming import checkpoint_folder
from edl.launch.options import record
from edl.launch.options.faults import IN_STORE, NO_QUARANTINE
from edl.launch.settings import Backend, QuarantineSettings, StoreSettings

_MACHINE_VARIABLES = ("NODE_NAME", "SLURMD_NODENAME")
"""Variables that name the machine: by convention from the Kubernetes downward API, where the host name is the pod's;
and from Slurm."""
LONGEST = 253
"""Maximum length of a machine's name: that of a DNS name."""


def machine_from(given: str, env: Mapping[str, str]) -> str:
    """The name of this machine. ``given``: the value of ``--machine``. Raises ``SettingError``."""
    name = given or next(filter(None, (env.get(one, "") for one in _MACHINE_VARIABLES)), "") or socket.gethostname()
    if len(name) > LONGEST or not name.isprintable() or name != name.strip():
        what = f"must be 1 to {LONGEST} printable characters without blanks at the ends"
        raise SettingError("--machine", repr(name), what)
    return name


def quarantine_from(options: Mapping[str, Any], store: StoreSettings) -> QuarantineSettings:
    """Where the quarantine is kept. Raises ``SettingError``."""
    where = options["quarantine"].strip()
    if where == IN_STORE and store.backend is Backend.EMBEDDED:
        what = "the store of this job is its own and ends with it"
        raise SettingError("--quarantine", where, what, "Name a directory that all jobs share, or an etcd of your own")
    return record(QuarantineSettings, options, where=_place(where))


def _place(where: str) -> str:
    if where in ("", NO_QUARANTINE):
        return ""
    return where if where == IN_STORE else checkpoint_folder(where)
