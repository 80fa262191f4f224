"""Threads that run one at a time, when a test says so, and time that is a number.

Stand-ins for what `threading`, `queue` and `time` offer to code that waits: every wait hands back to the scheduler.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable


class Killed(BaseException):
    """A thread's process has ended."""


class Thread:
    """A thread that runs while the scheduler waits, and the other way round."""

    def __init__(self, scheduler: Scheduler, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self._scheduler = scheduler
        self._run = run
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._ready: Callable[[], bool] = lambda: True
        self.over = False
        self.killed = False
        self._interrupted = False
        self._thread = threading.Thread(target=self._body, daemon=True)
        self._thread.start()

    def _body(self) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                self._run()
        except Killed:
            pass
        finally:
            self.over = True
            self._back.release()

    def runnable(self) -> bool:
        return not self.over and self._ready()

    def resume(self) -> None:
        """Called by the scheduler: run until the thread waits again or ends."""
        self._scheduler.current = self
        self._go.release()
        self._back.acquire()
        self._scheduler.current = None

    def park(self, ready: Callable[[], bool]) -> None:
        """Called by the thread: wait until this is so and the scheduler goes on with it."""
        self._ready = ready
        self._back.release()
        self._go.acquire()
        if self.killed:
            raise Killed
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def interrupt(self) -> None:
        """What it waits in raises KeyboardInterrupt."""
        self._interrupted = True
        self.resume()

    def kill(self) -> None:
        if not self.over:
            self.killed = True
            self.resume()


class Scheduler:
    """Threads and time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.current: Thread | None = None
        self.threads: list[Thread] = []

    def spawn(self, name: str, run: Callable[[], None]) -> Thread:
        made = Thread(self, name, run)
        self.threads.append(made)
        return made

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait in the thread that runs now; whether it became so in time."""
        assert self.current is not None, "the control thread must not wait"
        stop_at = None if timeout_s is None else self.now + timeout_s
        self.current.park(lambda: ready() or (stop_at is not None and self.now >= stop_at))
        return ready()

    def runnable(self) -> list[Thread]:
        self.threads = [thread for thread in self.threads if not thread.over]
        return [thread for thread in self.threads if thread.runnable()]


class Condition:
    """Of `threading`: only one thread runs at a time, so there is nothing to lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._notices = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        self._notices += 1

    def wait(self, timeout: float | None = None) -> bool:
        before = self._notices
        return self._scheduler.wait(lambda: self._notices != before, timeout)


class Queue:
    """Of `queue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[object] = deque()

    def put(self, item: object) -> None:
        self._items.append(item)

    def get(self, timeout: float) -> object:
        if not self._items and not self._scheduler.wait(lambda: bool(self._items), timeout):
            raise queue.Empty
        return self._items.popleft()
