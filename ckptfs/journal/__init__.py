"""The journal: the core's state in SQLite, so that kill -9 loses nothing (invariant 2)."""
