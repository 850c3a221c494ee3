"""Writing to a terminal, a pipe or a file: names that can't be displayed, and what the stream can show."""

from __future__ import annotations

import os
import sys
import unicodedata
from typing import TextIO

from ..mountinfo import inside


def printable(text: str) -> str:
    """`text` with everything escaped that would disturb a terminal or can't be encoded.

    File names are any bytes: control characters could move the cursor, undecodable bytes would raise.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char == "\n" or unicodedata.category(char)[0] != "C" else _escape(char) for char in text
    )


def _escape(char: str) -> str:
    if 0xDC80 <= ord(char) <= 0xDCFF:  # a byte that was no UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def say(text: str, stream: TextIO | None = None) -> None:
    """One or more lines for a human, on stdout unless told otherwise."""
    stream = sys.stdout if stream is None else stream
    encoding = stream.encoding or "ascii"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def complain(text: str) -> None:
    """A line on stderr."""
    say(text, sys.stderr)


def fail(message: str, code: int) -> int:
    """`ckptfs: sentence` on stderr; returns `code`. More lines of `message` follow it."""
    try:
        complain(f"ckptfs: {message}")
    except OSError:
        pass  # stderr is gone; the exit code still tells
    return int(code)


def full_path(mountpoint: str, path: str) -> str:
    """A path as the daemon names it (relative to the mount, or absolute) as the user would type it."""
    if path.startswith("/") and inside(path, mountpoint):
        return path
    return os.path.join(mountpoint, path.lstrip("/")) if path.strip("/") else mountpoint


def listing(paths: list[str], most: int = 10) -> str:
    """Indented lines, one per path, the rest counted."""
    lines = [f"  {path}" for path in paths[:most]]
    if len(paths) > most:
        lines.append(f"  ... and {len(paths) - most:,} more")
    return "\n".join(lines)
