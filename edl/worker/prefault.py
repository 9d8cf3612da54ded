"""Prefaults a buffer in a thread beside training, before the first commit faults its pages in one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edl.pages import populate

LEAST_BYTES = 16 << 20
"""Smaller buffers are not worth a thread."""


def prefault_in_thread(view: memoryview, then: Callable[[], None] | None = None) -> threading.Thread | None:
    """Map all pages of a writable, page-aligned mapping, on a separate thread, which calls ``then`` last. The content
    is preserved."""
    if len(view) < LEAST_BYTES:
        return None

    def work() -> None:
        populate(view)
        if then is not None:
            then()

    thread = threading.Thread(target=work, name="edl-pages", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there can be no further thread: the first commit maps the pages
        return None
    return thread
