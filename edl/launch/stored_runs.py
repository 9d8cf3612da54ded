"""Which run of the job a store belongs to: that of a later one is not continued with the data of an earlier one."""

from __future__ import annotations

import hashlib

from edl.ports import KeyValue, Store
from edl.types import JobId
from edl.wire.keys import JobKeys
from edl.wire.secret import Secret, token_of


def run_of(token: KeyValue, run: KeyValue | None, secret: Secret | None, job: JobId) -> str:
    """Text that differs between all runs of the job, although a secret gives them the same token; as secret as the
    token. Without a secret, the token itself is random; a founder of an earlier version of edl stored nothing else with
    one either."""
    found = token_of(token.value, secret, job) or ""
    return found if secret is None or run is None else f"{found} {run.value.decode()}"


def fingerprint(run: str) -> str:
    """Identifies a run on disk without revealing the job's token."""
    return hashlib.sha256(f"run {run}".encode()).hexdigest()


async def stored_run(store: Store, secret: Secret | None, job: JobId) -> str:
    """The fingerprint of the run in the store; empty: there is none. Raises ``StoreError``."""
    keys = JobKeys(job)
    found = {entry.key: entry for entry in (await store.read(keys.prefix)).entries}
    token = found.get(keys.token)
    return "" if token is None else fingerprint(run_of(token, found.get(keys.run), secret, job))
