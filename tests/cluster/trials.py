"""One fault trial: something happens to one worker at one moment of an update; then everything must come right again.

::

    update 1, with the fault     survivors: the next update     victim is back     connect, update 3: everybody
    ------------X------------    -------------------------     --------------     ---------------------------
                                 (the victim may be back here, or after it)

Every call must end in time, and at no step of any rank may it be ready with a wrong bit.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from adapters.cli.soak_report import FAULTS, MODES, TrialRecord
from tests.cluster.fleet import DIED, Fleet
from tests.cluster.network import Cluster
from tests.cluster.soak_workers import Called, Seen, Setting

TRAINERS = 2
ENGINES = {"a": 2, "b": 2}
DEADLINE_S = 4.0
LIMIT_S = 7 * DEADLINE_S
LOST_AFTER_S = 12.0
"""Longer than control connections bear silence."""

_RECOVER_S = 30.0
_SETTLE_S = 2.0
_AGAIN_S = 3.0
_PAUSE_S = 0.01

WORKERS = (
    *(f"trainer/{rank}" for rank in range(TRAINERS)),
    *(f"engine/{engine}/{rank}" for engine, size in ENGINES.items() for rank in range(size)),
)
"""By number of process."""

JOBS = ("shared_memory", False), ("mooncake", True), ("shared_memory", True), ("mooncake", False)
"""Transport, and whether trainers are replicas."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a seed means.

    Attributes
    ----------
    seed, mode, transport, replicas, fault, victim
        As in `TrialRecord`; the victim by number.
    at
        In update spans, from the call of ``send_weights`` on; before it if negative.
    lasts_s
        Until a frozen or cut off victim is back, if that is still within the first update; otherwise None.
    back_after
        Updates after which the victim is back, otherwise.
    dwell_s
        How long it stays away beyond them.
    """

    seed: int
    mode: str
    transport: str
    replicas: bool
    fault: str
    victim: int
    at: float
    lasts_s: float | None
    back_after: int
    dwell_s: float

    @staticmethod
    def of(seed: int) -> Trial:
        """As many seeds in a row as there are modes have all of them; three times as many, one kind of job each."""
        draw = random.Random(seed)
        mode = seed % len(MODES)
        transport, replicas = JOBS[(seed // (3 * len(MODES)) + mode) % len(JOBS)]
        fault = draw.choice(FAULTS)
        victim = draw.randrange(len(WORKERS))
        at = draw.uniform(-0.3, 1.2)
        short = fault != "kill" and draw.random() < 0.4
        lasts_s = draw.uniform(0.02, 1.2 * DEADLINE_S) if short else None
        back_after = draw.choice((1, 2))
        # Some are away for so long that their connections are given up.
        dwell_s = draw.uniform(0.0, 1.5 * DEADLINE_S) if draw.random() < 0.9 else LOST_AFTER_S
        return Trial(seed, MODES[mode], transport, replicas, fault, victim, at, lasts_s, back_after, dwell_s)

    @property
    def back(self) -> str:
        """When the victim is back, in words."""
        if self.lasts_s is not None:
            return f"{self.lasts_s:.2f} s"
        return f"update {self.back_after}" + ("" if self.fault == "kill" else f" and {self.dwell_s:.2f} s")


@dataclass(slots=True)
class _Findings:
    hangs: list[str] = field(default_factory=list)
    wrong_bytes: list[str] = field(default_factory=list)
    survivors_failed: list[str] = field(default_factory=list)
    not_recovered: list[str] = field(default_factory=list)
    longest_call_s: float = 0.0
    refused_connects: list[str] = field(default_factory=list)


class _StoppedError(Exception):
    """The trial cannot go on; why has been noted."""


class Course:
    """The workers of one job, and the version that all of them have; trials come one after the other.

    Parameters
    ----------
    cluster
        Whose cables may be cut; None without.
    fleet
        Processes in the order of `WORKERS`.
    setting
        Of the job that they join.
    """

    def __init__(self, cluster: Cluster | None, fleet: Fleet, setting: Setting) -> None:
        self._cluster, self._fleet, self._setting = cluster, fleet, setting
        self._version = 0
        self._span_s = 0.0
        self._dead: set[int] = set()
        self._frozen: set[int] = set()
        self._owed: set[int] = set()
        self._errors: list[str] = []
        self._found = _Findings()

    def begin(self) -> None:
        """Join, connect, and send the first versions.

        Raises
        ------
        RuntimeError
            If that fails, with no fault at all.
        """
        self._fleet.each(range(len(WORKERS)), "join", self._setting)
        try:
            self._recover()
            began = time.monotonic()
            self._update(range(TRAINERS))
            self._span_s = time.monotonic() - began
            self._judge_recovery()
        except _StoppedError:
            pass
        found = self._found
        if found.hangs or found.wrong_bytes or found.survivors_failed or found.not_recovered:
            raise RuntimeError(f"without a fault: {found}")

    def updates(self, count: int) -> list[str]:
        """Send so many versions; ranks that at any step were ready and had a wrong bit, or did not get one.

        Raises
        ------
        RuntimeError
            If one fails.
        """
        self._found = found = _Findings()
        with suppress(_StoppedError):
            for _ in range(count):
                self._update(range(TRAINERS))
                self._judge_recovery()
                if self._errors:
                    raise RuntimeError(f"version {self._version}: {'; '.join(self._errors)}")
        return [*found.wrong_bytes, *found.not_recovered, *found.hangs, *found.survivors_failed]

    def run(self, trial: Trial) -> TrialRecord:
        """Carry out a trial; afterwards everybody is well again, unless the record says otherwise."""
        self._found = found = _Findings()
        began = time.monotonic()
        with suppress(_StoppedError):
            self._carry_out(trial)
        return TrialRecord(
            seed=trial.seed,
            mode=trial.mode,
            transport=trial.transport,
            replicas=trial.replicas,
            fault=trial.fault,
            victim=WORKERS[trial.victim],
            at=round(trial.at, 3),
            back=trial.back,
            hangs=found.hangs,
            wrong_bytes=found.wrong_bytes,
            survivors_failed=found.survivors_failed,
            not_recovered=found.not_recovered,
            longest_call_s=round(found.longest_call_s, 2),
            refused_connects=found.refused_connects,
            seconds=round(time.monotonic() - began, 2),
        )

    # One trial

    def _carry_out(self, trial: Trial) -> None:
        self._first_update(trial)
        if trial.lasts_s is None and trial.back_after == 1:
            self._bring_back(trial)
        if self._can_send(trial):
            there = [number for number in range(TRAINERS) if number not in self._dead]
            self._update(there)
            silent: list[str] = []
            if self._errors and trial.victim < TRAINERS and trial.fault != "kill":
                # Right after a trainer's absence engines may be absent too, which is no failure if the trainers are
                # told and the next update reaches them; one that did not answer in time waits for a connect.
                late = [f"no {said} from engine/" for said in ("answer", "word")]
                silent = [n for n in ENGINES if any(f"{words}{n}/" in e for words in late for e in self._errors)]
                time.sleep(_AGAIN_S)
                self._update(there)
            self._judge_survivors(trial, silent)
        if trial.lasts_s is None and trial.back_after == 2:
            self._bring_back(trial)
        self._recover()
        self._judge_recovery()

    def _first_update(self, trial: Trial) -> None:
        self._version += 1
        moment = trial.at * self._span_s
        if moment < 0:
            self._hurt(trial)
            time.sleep(-moment)
        asked = [number for number in range(TRAINERS) if number not in self._dead | self._frozen]
        self._owed.update(asked)
        for number in asked:
            self._fleet.tell(number, "update", self._version)
        if moment >= 0:
            time.sleep(moment)
            self._hurt(trial)
        if trial.lasts_s is not None:
            time.sleep(trial.lasts_s)
            self._restore(trial)
        self._collect("send_weights", trial)

    def _hurt(self, trial: Trial) -> None:
        match trial.fault:
            case "kill":
                self._fleet.signal(trial.victim, signal.SIGKILL)
                self._dead.add(trial.victim)
                self._owed.discard(trial.victim)
            case "freeze":
                self._fleet.signal(trial.victim, signal.SIGSTOP)
                self._frozen.add(trial.victim)
            case _:
                assert self._cluster is not None
                self._cluster.cut(trial.victim)

    def _bring_back(self, trial: Trial) -> None:
        if trial.fault != "kill":
            time.sleep(trial.dwell_s)
        self._restore(trial)

    def _restore(self, trial: Trial) -> None:
        match trial.fault:
            case "kill":
                try:
                    self._fleet.start([trial.victim])
                    self._fleet.each([trial.victim], "join", self._setting)
                except RuntimeError as error:
                    self._stop(self._found.not_recovered, str(error))
                self._dead.clear()
            case "freeze":
                self._frozen.clear()
                self._fleet.signal(trial.victim, signal.SIGCONT)
            case _:
                assert self._cluster is not None
                self._cluster.mend(trial.victim)
        self._collect("send_weights", trial)

    def _can_send(self, trial: Trial) -> bool:
        """Whether the trainers that are there hold everything, and are connected."""
        if trial.victim >= TRAINERS:
            return True
        if trial.fault == "kill":
            # One that was started again takes no part before the next connect.
            return trial.victim != 0 and trial.replicas and bool(self._dead)
        return trial.lasts_s is not None or trial.back_after == 1

    def _recover(self) -> None:
        """Connect everybody, as often as it takes for a while, and send a version."""
        stop_at = time.monotonic() + _RECOVER_S
        while True:
            called = self._call(range(TRAINERS), "connect", list(ENGINES))
            errors = "; ".join(dict.fromkeys(each.error for each in called if each.error))
            if not errors:
                break
            self._found.refused_connects.append(errors)
            if time.monotonic() > stop_at:
                self._stop(self._found.not_recovered, f"connect, for {_RECOVER_S:g} s: {errors}")
        self._update(range(TRAINERS))

    def _update(self, trainers: Iterable[int]) -> None:
        self._version += 1
        called = self._call(trainers, "update", self._version)
        self._errors = [each.error for each in called if each.error]

    # Judging

    def _judge_survivors(self, trial: Trial, silent: list[str]) -> None:
        victim = WORKERS[trial.victim]
        survivors = [name for name in ENGINES if name not in silent and not victim.startswith(f"engine/{name}/")]
        ranks = [n for n, worker in enumerate(WORKERS) if worker.split("/")[1] in survivors]
        for number, seen in self._wait_ready(ranks).items():
            self._found.survivors_failed.append(f"{WORKERS[number]}: {_state(seen)}; {'; '.join(self._errors)}")

    def _judge_recovery(self) -> None:
        for number, seen in self._wait_ready(range(TRAINERS, len(WORKERS))).items():
            self._found.not_recovered.append(f"{WORKERS[number]}: {_state(seen)}; {'; '.join(self._errors)}")

    def _wait_ready(self, ranks: Iterable[int]) -> dict[int, Seen]:
        """Ranks that are not ready with the newest version, shortly after an update has ended."""
        stop_at = time.monotonic() + _SETTLE_S
        left = list(ranks)
        while True:
            seen = self._look(left)
            left = [n for n, one in seen.items() if not (one.ready and one.version == self._version)]
            if not left or time.monotonic() > stop_at:
                return {number: seen[number] for number in left}
            time.sleep(_PAUSE_S)

    def _look(self, ranks: Iterable[int]) -> dict[int, Seen]:
        out = {}
        for number in ranks:
            self._fleet.tell(number, "look")
            out[number] = seen = self._answer(number, "look")
            assert isinstance(seen, Seen)
            self._note_seconds(number, "poll_requests", max(seen.longest_poll_s, seen.in_poll_s))
            for wrong in seen.wrong:
                if f"{WORKERS[number]}, {wrong}" not in self._found.wrong_bytes:
                    self._found.wrong_bytes.append(f"{WORKERS[number]}, {wrong}")
        return out

    # Calls

    def _call(self, numbers: Iterable[int], method: str, *arguments: object) -> list[Called]:
        numbers = list(numbers)
        for number in numbers:
            self._fleet.tell(number, method, *arguments)
        return [self._called(number, method) for number in numbers]

    def _collect(self, what: str, trial: Trial) -> None:
        """Wait for calls that were left open, except those of frozen workers."""
        for number in sorted(self._owed - self._frozen):
            self._owed.discard(number)
            self._called(number, what, was_frozen=trial.fault == "freeze" and trial.victim == number)

    def _called(self, number: int, method: str, *, was_frozen: bool = False) -> Called:
        called = self._answer(number, method)
        assert isinstance(called, Called)
        if not was_frozen:
            self._note_seconds(number, method, max(called.seconds))
        return called

    def _answer(self, number: int, what: str) -> object:
        answer = self._fleet.answer(number, 2 * LIMIT_S)
        if answer.error == DIED:
            self._stop(self._found.survivors_failed, f"{WORKERS[number]} died by itself in {what}")
        if answer.error:
            self._stop(self._found.hangs, f"{WORKERS[number]}, {what}: {answer.error}")
        return answer.value

    def _note_seconds(self, number: int, what: str, seconds: float) -> None:
        self._found.longest_call_s = max(self._found.longest_call_s, seconds)
        if seconds > LIMIT_S:
            self._found.hangs.append(f"{WORKERS[number]}, {what}: {seconds:.1f} s")

    def _stop(self, kind: list[str], why: str) -> NoReturn:
        kind.append(why)
        raise _StoppedError


def _state(seen: Seen) -> str:
    state = "ready" if seen.ready else "torn" if seen.torn else "not ready"
    return f"{state} at version {seen.version}{''.join(f'; {error}' for error in seen.errors)}"
