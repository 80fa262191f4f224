"""A parent with a crew, for tests that end the parent: prints its workers' process ids, then waits for a reply."""

import sys
from pathlib import Path

from adapters.cli.crew import Crew
from tests.cli.toy_worker import Say, Setup, Sleep, decode, failure

names = ("left", "right")
with Crew(
    "tests.cli.toy_worker",
    {name: Setup(name) for name in names},
    decode=decode,
    failure=failure,
    log_folder=Path(sys.argv[1]),
    environment={},
) as crew:
    crew.ask({name: Say("ready") for name in names}, deadline_s=60)
    print(*crew.process_ids.values(), flush=True)
    crew.ask({name: Sleep(600) for name in names}, deadline_s=600)
