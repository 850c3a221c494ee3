"""The same calls on the mount and on a local disk: whatever a script returns must be equal."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

Script = Callable[[Path], Any]

_libc = ctypes.CDLL(None, use_errno=True)

AT_FDCWD = -100
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or the name of the errno it fails with."""
    try:
        return call(*args, **kwargs)
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, str(e))


def rename2(old: Path | bytes, new: Path | bytes, flags: int) -> None:
    """renameat2(2)."""
    if _libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def shape(path: Path) -> Any:
    """Everything below a directory that both file systems must agree on."""
    found: dict[str, Any] = {}
    # By hand: rglob of Python 3.10 fails at links to names that are too long.
    subs = [Path(top, name) for top, dirs, files in os.walk(path) for name in dirs + files]
    for sub in sorted(subs):
        st = sub.lstat()
        what: Any = stat.S_IFMT(st.st_mode)
        if stat.S_ISREG(st.st_mode):
            what = (oct(st.st_mode), st.st_size, st.st_uid, st.st_gid, sub.read_bytes())
        elif stat.S_ISLNK(st.st_mode):
            what = os.readlink(sub)
        else:
            what = (oct(st.st_mode), st.st_uid, st.st_gid)
        found[str(sub.relative_to(path))] = what
    return found


def agree(script: Script, mounted: Path, local: Path) -> Any:
    """Run a script in a new directory of each file system; its results and what it leaves must be equal."""
    results = []
    for base in (local, mounted):
        where = base / script.__name__
        where.mkdir()
        results.append((script(where), shape(where)))
    assert results[1] == results[0]
    return results[0][0]


def run_as(uid: int, gid: int, call: Callable[[], Any]) -> str:
    """repr() of what a call gives (or its errno) in a child with other ids."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.write(w, repr(outcome(call)).encode())
        finally:
            os._exit(0)
    os.close(w)
    with os.fdopen(r, "rb") as f:
        answer = f.read().decode()
    os.waitpid(pid, 0)
    return answer
