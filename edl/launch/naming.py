"""Names of jobs that nobody has named."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path


def checkpoint_folder(text: str) -> str:
    """``--checkpoint-dir`` as it is used: a path becomes absolute, a URL stays."""
    return str(Path(text).absolute()) if text and "://" not in text else text


def private_name(checkpoint_dir: str) -> str:
    """A name for a job that nobody else has to know; the same for each run that goes on from the same checkpoints."""
    mark = hashlib.sha256(checkpoint_dir.encode()).hexdigest()[:8] if checkpoint_dir else secrets.token_hex(4)
    return f"job-{mark}"
