"""Work that goes on while the script computes: one thread, one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Job:
    """Something handed over, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """A moment; whether it has ended."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """Wait for it. Raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """On the thread."""
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        finally:
            del self._work  # it holds large arrays
            self._done.set()


class Background:
    """The thread begins with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._beginning = threading.Lock()

    def submit(self, work: Callable[[], Any]) -> Job:
        """Have it done."""
        with self._beginning:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        job = Job(work)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """The thread ends when all is done."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job
