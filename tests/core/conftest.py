"""Hypothesis profiles: `CKPTFS_HYPOTHESIS=long` for many more examples."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

common = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("default_ckptfs", max_examples=150, stateful_step_count=40, **common)
settings.register_profile("long", max_examples=10_000, stateful_step_count=60, **common)
settings.load_profile("long" if os.environ.get("CKPTFS_HYPOTHESIS") == "long" else "default_ckptfs")
