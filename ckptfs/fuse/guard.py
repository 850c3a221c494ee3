"""The one wrapper around every handler: whatever goes wrong becomes an errno, and the mount stays up."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pyfuse3
import trio

from ckptfs.engine.hub import Hub
from ckptfs.fuse import processes

log = logging.getLogger("ckptfs")

T = TypeVar("T", bound=type)

HANDLERS = (
    "lookup", "forget", "getattr", "setattr", "readlink", "mknod", "mkdir", "unlink", "rmdir", "symlink",
    "rename", "link", "open", "read", "write", "flush", "release", "fsync", "opendir", "readdir",
    "releasedir", "fsyncdir", "statfs", "setxattr", "getxattr", "listxattr", "removexattr", "access",
    "create",
)  # fmt: skip


CHANGING = frozenset(HANDLERS) - {
    "lookup", "forget", "getattr", "readlink", "read", "opendir", "readdir", "releasedir", "statfs",
    "getxattr", "listxattr", "access",
}  # fmt: skip
"""Those are answered only when the journal has what they did (invariant 2)."""


NAMING = frozenset({"create", "mkdir", "mknod", "symlink"})
"""Those are refused when the journal has no room. They can't wait: the kernel holds the directory
meanwhile, against listings too."""


def guarded(cls: T) -> T:
    """Class decorator: pyfuse3 turns only FUSEError into a reply, anything else ends the mount.

    Guards inherited handlers as well.
    """
    for name in HANDLERS:
        handler = getattr(cls, name)
        if handler is not getattr(pyfuse3.Operations, name):  # its defaults raise FUSEError(ENOSYS)
            setattr(cls, name, _guard(handler, name))
    return cls


def _guard(handler: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
    changes, names = name in CHANGING, name in NAMING

    @functools.wraps(handler)
    async def call(self: Any, *args: Any) -> Any:
        hub: Hub = self.hub
        misses = hub.misses
        if names and not hub.takes_names():
            raise pyfuse3.FUSEError(errno.ENOSPC)
        try:
            answer = await handler(self, *args)
            if changes and hub.misses != misses:
                pid = args[-1].pid if isinstance(args[-1], pyfuse3.RequestContext) else 0
                await hub.committed(lambda: processes.kill_pending(pid))
            return answer
        except pyfuse3.FUSEError:
            raise
        except OSError as e:
            raise pyfuse3.FUSEError(e.errno or errno.EIO) from e
        except trio.Cancelled:
            raise
        except Exception as e:
            hub.counters.errors += 1
            log.exception("internal error in %s%r; the caller got EIO", name, args)
            raise pyfuse3.FUSEError(errno.EIO) from e

    return call
