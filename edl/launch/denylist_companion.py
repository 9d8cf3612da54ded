"""Sets up the Master's companion for the denylist."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

from edl.adapters.clock import SystemClock, wall_clock_s
from edl.checkpoint.memory.background import in_thread
from edl.errors import SettingError
from edl.launch.options.faults import IN_STORE
from edl.launch.scaling import Companions
from edl.launch.settings import LaunchSettings
from edl.ports import Store


def companions(settings: LaunchSettings, store: Store, run: str, log: Callable[[str], None]) -> Companions:
    """The companions for ``MasterDeps``; none without ``--denylist``. ``run``: see ``Registration.run``."""
    where = settings.denylist.where
    if not where:
        return lambda master: ()
    from edl.adapters.remote_files import open_files  # imported late: only for jobs with a denylist
    from edl.denylist.places import DenylistPlace, FilesDenylist, StoreDenylist
    from edl.denylist.plan import Author
    from edl.denylist.shell import DenylistCompanion

    place: DenylistPlace
    if where == IN_STORE:
        place = StoreDenylist(store, "the job's etcd")
    else:
        try:
            files = open_files(where)
        except SettingError as error:
            raise error.renamed("--denylist") from None
        place = FilesDenylist(files, functools.partial(in_thread, "edl-denylist"))
    digest = hashlib.sha256(f"run {run}".encode()).hexdigest()[:8]
    author = Author(settings.spec.job, digest, settings.denylist.keep_s)
    return lambda master: (DenylistCompanion(master, place, author, wall_clock_s, log, SystemClock()).run(),)
