"""A memory file of the agent, mapped into this worker."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator

from edl.pages import populate
from edl.worker.framework import Accelerator
from edl.worker.prefault import LEAST_BYTES, prefault_in_thread


class MappedMemory:
    """A mapped memory file: either shared and writable, or a private copy-on-write view."""

    def __init__(self, descriptor: int, size: int, *, private: bool) -> None:
        """Raises ``OSError`` or ``ValueError`` when the file is shorter, or cannot be mapped."""
        self.size = size
        status = os.fstat(descriptor)
        self.file = status.st_dev, status.st_ino
        """The same for all mappings of one file."""
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        self._map = mmap.mmap(descriptor, size, access=access)
        self.view = memoryview(self._map)
        self._lock = threading.Lock()
        self._unlock: Callable[[], None] | None = None
        self._users = 0
        self._closed = False
        self._prepared: threading.Thread | None = None

    def prepare(self, accelerator: Accelerator | None) -> None:
        """Map all pages, and page-lock them for the accelerator if there is one, on a thread beside training."""
        if self._closed:
            return
        if accelerator is None:
            prefault_in_thread(self.view)
        else:
            self._prepared = prefault_in_thread(self.view, lambda: self._page_lock(accelerator))

    def read_soon(self) -> None:
        """Map all pages now, since all of them are to be read."""
        if self.size >= LEAST_BYTES:
            populate(self.view, writing=False)

    def wait(self) -> None:
        """Wait until it is page-locked, if that is under way: a copy into locked pages is much faster."""
        if self._prepared is not None:
            self._prepared.join()
            self._prepared = None

    def _page_lock(self, accelerator: Accelerator) -> None:
        with self._lock:
            if not self._closed:
                self._unlock = accelerator.lock(self.view)

    @property
    def locked(self) -> bool:
        """Whether its pages are locked."""
        return self._unlock is not None

    @contextlib.contextmanager
    def used(self) -> Iterator[memoryview | None]:
        """Keep it mapped and locked; None if it is not locked."""
        with self._lock:
            usable = self.locked and not self._closed
            self._users += usable
        try:
            yield self.view if usable else None
        finally:
            with self._lock:
                self._users -= usable
                last = self._closed and not self._users
            if last:
                self.close()

    def close(self) -> bool:
        """Unlock and unmap it. Returns False if it is still in use: the mapping then ends with the last array over it,
        or the last user, or when this is called again."""
        with self._lock:
            self._closed = True
            if self._users:
                return False
            unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()  # before the pages go: the device would keep them, and refuse the next mapping at this address
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            return False
        return True

    def close_in_background(self) -> None:
        """Like ``close``, but returns at once if its pages are locked. Unlocking them may wait for the device, and the
        device for a lost peer, until the thread that closes this aborts the group."""
        if self._prepared is not None or self.locked:
            with contextlib.suppress(RuntimeError):  # there can be no further thread
                threading.Thread(target=self.close, name="edl-unlock", daemon=True).start()
                return
        self.close()
