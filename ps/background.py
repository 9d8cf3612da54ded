"""Background work while the script computes: one thread that runs jobs one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class BackgroundJob:
    """A submitted job and its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """True once the job has finished, with or without an error."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the job; return True if it has finished."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """Block until the job has finished and return its result. Raises whatever the job raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """Run the job; called on the background thread."""
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._error = error
        finally:
            del self._work  # it holds large arrays
            self._done.set()


class Background:
    """One thread that runs jobs in order. The thread starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[BackgroundJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._beginning = threading.Lock()

    def submit(self, work: Callable[[], Any]) -> BackgroundJob:
        """Queue a job; return a handle to its result."""
        with self._beginning:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        job = BackgroundJob(work)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Let the thread exit once all queued jobs are done."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job
