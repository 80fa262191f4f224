"""What every test starts from."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A shell that runs the tests in the background leaves SIGINT ignored, and processes started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("transload", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("transload")
