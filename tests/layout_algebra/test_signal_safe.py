"""Thousands of exceptions in the midst of pools and conditions: nobody waits for ever afterwards."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from layout_algebra.signal_safe import Condition, ThreadPool

STRUCK = 500
STRUCK_PROGRAM = """
import signal, sys, threading, time
from layout_algebra.signal_safe import Condition, ThreadPool

class Struck(Exception):
    pass

class Strikes:
    armed = False
    count = 0

def strike(number, frame):
    if Strikes.armed:
        Strikes.armed = False
        raise Struck

def struck(act):
    # Interrupts an endless act, sooner or later.
    Strikes.count += 1
    try:
        Strikes.armed = True
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + Strikes.count * 7919 % 1000 * 1e-6)
        while True:
            act()
    except Struck:
        pass

signal.signal(signal.SIGALRM, strike)
sys.setswitchinterval(1e-4)  # threads take turns often, so locks are found taken often
pool, condition, counts = ThreadPool(2, "struck"), Condition(), [0]

def notify():
    while True:
        with condition:
            counts[0] += 1
            condition.notify_all()

def work():
    jobs = [pool.submit(time.sleep, 0) for _ in range(2)]
    while not all(job.done() for job in jobs):
        pass
    for job in jobs:
        job.result()

def wait():
    with condition:
        condition.wait(1e-3)

threading.Thread(target=notify, daemon=True).start()
for _ in range(int(sys.argv[1])):
    struck(work)
    assert pool.submit(sum, (20, 22)).result() == 42
    assert pool.map(abs, [-1, 2]) == [1, 2]
    struck(wait)
    before = counts[0]
    while counts[0] == before:  # the other thread gets the lock
        time.sleep(1e-4)
pool.shutdown()
print("whole")
"""


def test_exceptions_at_any_moment_leave_nothing_stuck() -> None:
    program = [sys.executable, "-X", "faulthandler", "-c", STRUCK_PROGRAM, str(STRUCK)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.returncode) == ("whole\n", 0), ended.stderr


def test_a_pool_does_jobs_in_order_and_hands_on_what_they_raise() -> None:
    done: list[int] = []
    with ThreadPool(1, "one") as pool:
        jobs = [pool.submit(done.append, number) for number in range(20)]
        bad = pool.submit(int, "no number")
        for job in jobs:
            job.result()
        assert done == list(range(20))
        for _ in range(2):
            with pytest.raises(ValueError, match="no number"):
                bad.result()
        assert bad.done()


def test_map_waits_for_all_before_it_raises() -> None:
    done: list[int] = []

    def slow(number: int) -> None:
        time.sleep(0.01 * number)
        done.append(1 // number)

    with ThreadPool(3, "three") as pool, pytest.raises(ZeroDivisionError):
        pool.map(slow, [0, 1, 2, 3])
    assert done == [1, 0, 0]


def test_shutdown_ends_what_was_submitted_and_refuses_more() -> None:
    done: list[int] = []
    pool = ThreadPool(2, "two")
    for number in range(10):
        pool.submit(done.append, number)
    pool.shutdown()
    pool.shutdown()
    assert sorted(done) == list(range(10))
    assert not any(thread.is_alive() for thread in pool._threads)
    with pytest.raises(RuntimeError, match="pool two was shut down"):
        pool.submit(int)
    ThreadPool(2, "unused").shutdown()


def test_the_threads_of_a_pool_that_nobody_holds_end() -> None:
    pool = ThreadPool(2, "forgotten")
    pool.map(abs, range(4))
    threads = list(pool._threads)
    del pool
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_condition_that_nobody_notifies() -> None:
    condition = Condition()
    with condition:
        assert not condition.wait(0.01)
        assert condition._is_owned()  # type: ignore[attr-defined]
    assert not condition._is_owned()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="un-acquired"):
        condition.wait(0.01)
