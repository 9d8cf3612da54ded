"""Default job names, for jobs without ``--rdzv-id``."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path


def checkpoint_folder(text: str) -> str:
    """Normalise ``--checkpoint-dir``: a path becomes absolute, a URL stays as it is."""
    return str(Path(text).absolute()) if text and "://" not in text else text


def private_name(checkpoint_dir: str) -> str:
    """The default name of a job with a private store: derived from the checkpoint directory, so that each run that
    continues from the same checkpoints has the same name; random without one."""
    suffix = hashlib.sha256(checkpoint_dir.encode()).hexdigest()[:8] if checkpoint_dir else secrets.token_hex(4)
    return f"job-{suffix}"
