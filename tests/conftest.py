"""Shared by all tests: hypothesis profiles and the guard that nothing is left behind."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("BACKSTAY_HYPOTHESIS_PROFILE", "default"))
