"""A request's versions are those at its dispatch and at its end, not those when somebody looked."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from adapters.failures import UsageError
from adapters.request_versions import RequestRecord, RequestVersions
from tests.adapters.crew import Crew, wait_for
from tests.adapters.toy import rollout, trainer


class Engine:
    """What has a version."""

    version: int | None = None


def test_start_is_the_version_at_dispatch_and_end_that_of_the_last_token() -> None:
    engine = Engine()
    versions = RequestVersions(lambda: engine.version)
    versions.begin("early")
    engine.version = 3
    versions.installed(3)
    versions.begin("a")
    versions.begin("b")
    assert versions.end("a") == RequestRecord(3, 3, (3,))
    for version in (4, 5):
        engine.version = version
        versions.installed(version)
    record = versions.end("b")
    assert (record, record.mixed) == (RequestRecord(3, 5, (3, 4, 5)), True)
    assert versions.end("early") == RequestRecord(None, 5, (None, 3, 4, 5))
    assert len(versions) == 0


def test_an_update_that_nobody_told_of_shows_at_the_end() -> None:
    engine = Engine()
    engine.version = 1
    versions = RequestVersions(lambda: engine.version)
    versions.begin(7)
    engine.version = 2
    assert versions.end(7) == RequestRecord(1, 2, (1, 2))


def test_names_that_are_not_in_flight_or_are_already() -> None:
    versions = RequestVersions(lambda: 1)
    versions.begin("a")
    with pytest.raises(UsageError, match="'a' is in flight already"):
        versions.begin("a")
    versions.end("a")
    with pytest.raises(UsageError, match="'a' is not in flight"):
        versions.end("a")


def test_many_threads() -> None:
    versions = RequestVersions(lambda: 1)

    def work(mine: int) -> None:
        for number in range(500):
            versions.begin((mine, number))
            versions.installed(1)
            assert versions.end((mine, number)) == RequestRecord(1, 1, (1,))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(versions) == 0


@pytest.mark.parametrize("staging", [(), ("a",)], ids=["in place", "staged"])
def test_with_an_engine(tmp_path: Path, staging: tuple[str, ...]) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, staging=staging) as crew:
        crew.connect()
        one = crew.rollouts["a/0"].adapter
        versions = RequestVersions(lambda: one.version)
        crew.send(1)
        versions.begin("long")
        versions.begin("short")
        assert versions.end("short") == RequestRecord(1, 1, (1,))
        crew.send(2)
        wait_for(lambda: one.version == 2)
        versions.begin("late")
        assert versions.end("long") == RequestRecord(1, 2, (1, 2))
        assert versions.end("late") == RequestRecord(2, 2, (2,))
