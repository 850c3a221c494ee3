"""What /proc tells about the process behind a request (rules R6 and B7; formats from proc(5)).

A pid of 0 (another PID namespace) and one that has gone are unknown: every answer is then the
harmless one.
"""

from __future__ import annotations

import os
import signal
import time

PF_EXITING = 0x4
PF_SIGNALED = 0x400

_FLAGS = 9 - 3
_EXIT_CODE = 52 - 3
"""Fields of /proc/PID/stat behind the command name, which may contain anything."""

TRUST_S = 1.0
"""How long a thread's process is remembered: many files are opened by one thread in a row, and no
number comes around again that soon."""

_tgids: dict[int, tuple[int, float]] = {}


def tgid_of(tid: int) -> int:
    """Process of a thread, 0 when unknown. The kernel names the thread that called; it may be gone
    by the time its file is closed."""
    if tid <= 0:
        return 0
    now = time.monotonic()
    known = _tgids.get(tid)
    if known is not None and now < known[1]:
        return known[0]
    try:
        text = _read(f"/proc/{tid}/status")
        tgid = int(text.split(b"\nTgid:", 1)[1].split(None, 1)[0])
    except (OSError, IndexError, ValueError):
        return 0
    if len(_tgids) > 4096:
        _tgids.clear()
    _tgids[tid] = tgid, now + TRUST_S
    return tgid


def _read(path: str | bytes) -> bytes:
    """A file of /proc; what `open` does besides takes longer than the reading."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 16_384)
    finally:
        os.close(fd)


def killed_by(tgid: int) -> int:
    """The signal a process is dying of now, 0 when it is not."""
    if tgid <= 0:
        return 0
    try:
        fields = _read(f"/proc/{tgid}/stat").rsplit(b")", 1)[1].split()
        if not int(fields[_FLAGS]) & PF_EXITING:
            return 0
        return int(fields[_EXIT_CODE]) & 0x7F
    except (OSError, IndexError, ValueError):
        return 0


def holds_for_writing(tgid: int, name: bytes, ino: int) -> bool:
    """Whether the process still has a descriptor open for writing on the file `name` with inode number `ino`.

    Reads links and fdinfo only: neither asks the file system, which would be a deadlock.
    """
    if tgid <= 0:
        return False
    base = b"/proc/%d/fd" % tgid
    wanted = b"ino:\t%d\n" % ino
    try:
        fds = os.listdir(base)
    except OSError:
        return False
    for fd in fds:
        try:
            link = os.readlink(base + b"/" + fd)
            if not link.endswith(name) and b" (deleted)" not in link:
                continue
            info = _read(b"/proc/%d/fdinfo/%s" % (tgid, fd))
            flags = int(info.split(b"flags:\t", 1)[1].split(None, 1)[0], 8)
        except (OSError, IndexError, ValueError):
            continue
        if flags & os.O_ACCMODE != os.O_RDONLY and (wanted in info or b"ino:" not in info):
            return True
    return False


def signal_pending(tid: int) -> bool:
    """Whether a signal that would end or interrupt the thread's system call is pending.

    Unblocked and not ignored; of the thread itself or its whole process.
    """
    if tid <= 0:
        return False
    try:
        text = _read(f"/proc/{tid}/status")
    except OSError:
        return False
    masks = _signal_masks(text)
    pending = masks.get(b"SigPnd", 0) | masks.get(b"ShdPnd", 0)
    return bool(pending & ~masks.get(b"SigBlk", 0) & ~masks.get(b"SigIgn", 0))


def kill_pending(tid: int) -> bool:
    """Whether the thread is to be killed by SIGKILL as soon as its system call returns."""
    if tid <= 0:
        return False
    try:
        masks = _signal_masks(_read(f"/proc/{tid}/status"))
    except OSError:
        return False
    return bool((masks.get(b"SigPnd", 0) | masks.get(b"ShdPnd", 0)) & 1 << (signal.SIGKILL - 1))


def _signal_masks(status: bytes) -> dict[bytes, int]:
    masks: dict[bytes, int] = {}
    for line in status.splitlines():
        if line.startswith((b"Sig", b"ShdPnd")):
            key, value = line.split(b":", 1)
            if key != b"SigQ":
                masks[key] = int(value, 16)
    return masks
