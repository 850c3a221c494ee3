"""Hypothesis profiles: `CKPTFS_HYPOTHESIS=long` for many more examples."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

common = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
# The quick profile tries the same examples every time, so that a change is judged by itself; the long
# one looks for new ones.
settings.register_profile(
    "default_ckptfs", max_examples=60, stateful_step_count=40, derandomize=True, **common
)
settings.register_profile("long", max_examples=10_000, stateful_step_count=60, **common)
settings.load_profile("long" if os.environ.get("CKPTFS_HYPOTHESIS") == "long" else "default_ckptfs")
