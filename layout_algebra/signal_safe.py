"""Threads and locks that an exception at any moment cannot leave stuck.

A signal handler runs between two steps of the main thread, and one that raises there (Ctrl-C does) may strike right
after a lock was taken in Python code, before whoever took it could see to giving it back. That lock is never free
again, and the thread that needs it hangs for ever. The condition, the pool and the futures of the standard library are
open to that; those here take every lock within one step of the interpreter::

    with ThreadPool(2, "digests") as pool:
        jobs = [pool.submit(digest, part) for part in parts]
        sums = [job.result() for job in jobs]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

__all__ = ["Condition", "Job", "ThreadPool"]

T = TypeVar("T")


class Condition(threading.Condition):
    """A condition variable with a lock of its own; wait for it only where that lock is held once."""

    def __init__(self) -> None:
        super().__init__(threading.RLock())

    # Looked up before the lock is taken, and then called without a step of Python in between.
    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock back until somebody notifies, or so many seconds are over; whether somebody did."""
        try:
            return super().wait(timeout)
        finally:
            if not self._is_owned():  # type: ignore[attr-defined]  # struck just after it was given back
                self._lock.acquire()  # type: ignore[attr-defined]


class Job(Generic[T]):
    """Something that a pool's thread does, and what came of it."""

    __slots__ = ("_act", "_arguments", "_error", "_is_done", "_running", "_value")

    def __init__(self, act: Callable[..., T], arguments: tuple[object, ...]) -> None:
        self._act, self._arguments = act, arguments
        self._value: T
        self._error: BaseException | None = None
        self._is_done = False
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Do it; in the pool's thread."""
        try:
            self._value = self._act(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - for whoever asks for the result
            self._error = error
        del self._act, self._arguments
        self._is_done = True
        self._running.release()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._is_done

    def wait(self) -> None:
        """Wait until it is over."""
        with self._running:
            pass

    def result(self) -> T:
        """What it returned, once it is over.

        Raises
        ------
        BaseException
            What it raised.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


class ThreadPool:
    """Threads that do jobs in the order in which they are submitted.

    Parameters
    ----------
    threads
        At most; they start with the first jobs.
    name
        Of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._size, self._name = threads, name
        self._jobs: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, act: Callable[..., T], *arguments: object) -> Job[T]:
        """Let a thread call ``act(*arguments)``.

        Raises
        ------
        RuntimeError
            After `shutdown`.
        """
        if self._is_closed:
            raise RuntimeError(f"the pool {self._name} was shut down")
        job = Job(act, arguments)
        self._jobs.put(job)  # type: ignore[arg-type]
        if len(self._threads) < self._size:
            thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return job

    def map(self, act: Callable[..., T], *items: Iterable[object]) -> list[T]:
        """What ``act`` returns for each of some items, in their order; all are over then, also if one raises."""
        jobs = [self.submit(act, *each) for each in zip(*items, strict=True)]
        for job in jobs:
            job.wait()
        return [job.result() for job in jobs]

    def shutdown(self) -> None:
        """Wait until all jobs are over, and end the threads. May be called again."""
        self._is_closed = True
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self._jobs.put(None)


def _serve(jobs: SimpleQueue[Job[object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # what it holds must not live until the next one comes
    jobs.put(None)  # for the other threads
