"""What every test starts from."""

from __future__ import annotations

import signal

# A shell that runs the tests in the background leaves SIGINT ignored, and processes started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
