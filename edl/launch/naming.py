"""The checkpoint directory as all parts write it, and default job names, for jobs without ``--rdzv-id``."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from edl.adapters.file_systems import local_path
from edl.errors import SettingError


def checkpoint_folder(text: str, option: str = "--checkpoint-dir") -> str:
    """Normalise ``--checkpoint-dir`` or an ``option`` like it: a path, also one in a ``file://`` URL, becomes absolute,
    any other URL stays as it is. Raises ``SettingError``."""
    path = local_path(text)
    folder = str(Path(path).absolute()) if path else text
    try:
        folder.encode()
    except UnicodeEncodeError:  # messages between the nodes cannot contain it
        advice = "Rename the directory, or name a link to it"
        raise SettingError(option, repr(folder), "is not valid UTF-8", advice) from None
    return folder


def private_name(checkpoint_dir: str) -> str:
    """The default name of a job with a private store: derived from the checkpoint directory, so that each run that
    continues from the same checkpoints has the same name; random without one."""
    suffix = hashlib.sha256(checkpoint_dir.encode()).hexdigest()[:8] if checkpoint_dir else secrets.token_hex(4)
    return f"job-{suffix}"
