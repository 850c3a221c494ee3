"""Failures a user can meet, and the exit codes of the commands.

Every failure is one sentence: what happened, to which path, what to do.
"""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes, documented in docs/CONFIGURATION.md."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """Bad input: a flag, size, URL, configuration key or path that can't be used."""
    TIMEOUT = 3
    """The time given ran out and something is not durable yet."""
    STUCK = 4
    """The tier refuses an entry each time it is tried; `ckptfs status` names it."""
    INTERRUPTED = 5
    """A file whose writer was killed is kept in the mount and not published."""
    NOT_MOUNTED = 6
    """No ckptfs daemon serves this mount point."""
    UNSUPPORTED = 7
    """The machine lacks something ckptfs needs (/dev/fuse, fusermount3, permission)."""
    TIER_DOWN = 8
    """The tier can't be reached."""
    LEFT_OVER = 9
    """The daemon ended with data that is not durable; it stays staged for the next mount."""
    BUSY = 10
    """The mount point, or its staging, is in use by another process."""


class CkptfsError(Exception):
    """One sentence for the user and the exit code to leave with."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
