"""Fault trials and their parts: a dozen trials of every kind of job, many updates in a row, and what a seed means."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from adapters.cli.soak_report import FAULTS, MODES, OUTCOMES
from tests.cluster.network import why_not
from tests.cluster.soak import choose_trials, run_trials, run_updates
from tests.cluster.soak_workers import Steps
from tests.cluster.trials import DEADLINE_S, JOBS, WORKERS, Trial

CABLES = not why_not()
FIRST = 2112
"""A seed from which on trials of all kinds are soon over."""


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_dozen_trials_hang_nobody_spoil_no_byte_and_are_recovered_from() -> None:
    trials = choose_trials(12, FIRST, cables=CABLES)
    records = list(run_trials(trials, cables=CABLES))
    for record in records:
        assert [getattr(record, outcome) for outcome in OUTCOMES] == [[], [], [], []], record
    assert [record.seed for record in records] == [trial.seed for trial in trials]
    assert {record.mode for record in records} == set(MODES)
    assert {record.fault for record in records} == (set(FAULTS) if CABLES else set(FAULTS) - {"cut"})
    assert len({(record.transport, record.replicas) for record in records}) == len(JOBS)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_updates_in_a_row_leave_nothing_behind() -> None:
    report = run_updates(60, mode=MODES[0], cables=CABLES)
    assert report.wrong_bytes == []
    assert report.grown == [], report.workers
    assert [one.worker for one in report.workers] == list(WORKERS)
    assert all(one.threads[0] > 1 and one.sockets[0] > 0 and one.memory_bytes[0] > 1 << 20 for one in report.workers)


def test_seeds_share_modes_jobs_and_faults_evenly() -> None:
    trials = choose_trials(300, 0)
    assert Counter(trial.mode for trial in trials) == dict.fromkeys(MODES, 300 // len(MODES))
    jobs = Counter((trial.mode, trial.transport, trial.replicas) for trial in trials)
    assert len(jobs) == len(MODES) * len(JOBS)
    assert min(jobs.values()) >= 72 // len(MODES)
    assert min(Counter(trial.fault for trial in trials).values()) > 70
    assert len({trial.victim for trial in trials}) == len(WORKERS)
    assert {trial.fault for trial in trials if trial.lasts_s is not None} == {"freeze", "cut"}
    assert all(trial.lasts_s is None or 0 < trial.lasts_s < 2 * DEADLINE_S for trial in trials)


def test_a_trial_is_made_again_from_its_seed_and_filters_keep_seeds() -> None:
    chosen = choose_trials(5, 1000, mode=MODES[-1], fault="freeze")
    assert {(trial.mode, trial.fault) for trial in chosen} == {(MODES[-1], "freeze")}
    assert [Trial.of(trial.seed) for trial in chosen] == chosen
    assert choose_trials(1, chosen[2].seed) == [chosen[2]]
    assert {trial.fault for trial in choose_trials(50, 0, cables=False)} == set(FAULTS) - {"cut"}


def test_no_rank_of_an_engine_is_more_than_a_step_ahead(tmp_path: Path) -> None:
    first, second = (Steps(tmp_path / "steps", rank, 2) for rank in range(2))
    assert [first.begin(), first.begin()] == [1, 0]
    assert [second.begin(), second.begin(), second.begin()] == [1, 2, 0]
    assert [first.begin(), first.begin()] == [2, 3]
    again = Steps(tmp_path / "steps", 1, 2)
    assert [again.begin(), first.begin(), first.begin()] == [4, 4, 5]
