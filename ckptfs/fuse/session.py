"""The kernel's side of a mount: pyfuse3's session, its limits, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import resource
import subprocess
from collections.abc import Callable

import pyfuse3
import trio

from ckptfs.core import Inode
from ckptfs.engine.absorb import Absorb
from ckptfs.engine.hub import Hub
from ckptfs.engine.space import SpaceInfo
from ckptfs.engine.view import View
from ckptfs.errors import CkptfsError, Exit
from ckptfs.fuse.files import Files
from ckptfs.fuse.operations import Operations

log = logging.getLogger("ckptfs")

MAX_TASKS = 8_192
"""Concurrent handlers: blocked writers must not keep others out (at pyfuse3's default of 99 they do, B4)."""

MAX_BACKGROUND = 4_096
"""The connection's max_background (default 12): cold page reads, and with them RELEASE, must not queue
up behind each other in the kernel (B4)."""


CUT_S = 0.2
"""Seconds that requests, and then the closing of what is open, get to end when serving is cut off."""


class FuseSession:
    """Opens the mount, serves it, lets go of it."""

    def __init__(
        self,
        hub: Hub,
        absorb: Absorb,
        view: View,
        space: SpaceInfo,
        state_of: Callable[[Inode], str],
        mountpoint: str,
    ) -> None:
        self.hub = hub
        self.mountpoint = mountpoint
        self.operations = Operations(hub, Files.Parts(absorb, state_of), view, space)
        self._serving: trio.Nursery | None = None
        self._cut = False
        self._open = False

    def open(self) -> None:
        """Mount. Raises `CkptfsError` when the kernel refuses."""
        _raise_file_limit()
        options = set(pyfuse3.default_options) | {"fsname=ckptfs", "subtype=ckptfs", "default_permissions"}
        if self.hub.config.allow_other:
            options.add("allow_other")
        try:
            pyfuse3.init(self.operations, self.mountpoint, options)
        except RuntimeError as e:
            raise CkptfsError(
                f"the kernel refused to mount {self.mountpoint} ({e}); see the log for its reason",
                Exit.UNSUPPORTED,
            ) from e
        self._open = True

    async def serve(self) -> None:
        """Until the mount is gone. All handles count as closed then."""
        try:
            async with trio.open_nursery() as self._serving:
                self._serving.start_soon(self._raise_background_limit)
                await pyfuse3.main(max_tasks=MAX_TASKS)
                self._serving.cancel_scope.cancel()
        finally:
            self._serving = None
            # With staging on disk, closing waits for digests from workers, and they may hang. What it
            # does not get to is found unsealed by the next mount.
            with trio.move_on_after(CUT_S if self._cut else math.inf):
                await self.operations.closed_all()
            self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            pyfuse3.close(unmount=True)

    async def detach(self) -> None:
        """Take the mount away lazily: open files go on, new opens are not possible.

        What somebody else has mounted there since ours went is left alone.
        """
        if self._serving is None:
            return
        command = (
            ["umount", "-l", self.mountpoint]
            if os.geteuid() == 0
            else ["fusermount3", "-uz", self.mountpoint]
        )
        await trio.run_process(command, check=False, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    def terminate(self) -> None:
        """End serving although files are open, and although requests wait for room or for the tier, which
        may be for ever: who made them gets ENOTCONN, as if we had been killed."""
        if self._serving is not None:
            self._cut = True
            pyfuse3.terminate()
            self._serving.cancel_scope.deadline = trio.current_time() + CUT_S

    def terminate_at(self, deadline: float) -> None:
        """Open files keep a detached mount alive; not beyond this (trio time)."""

        async def enforce() -> None:
            await trio.sleep_until(deadline)
            self.terminate()

        if self._serving is not None:
            self._serving.start_soon(enforce)

    async def forget_name(self, dir: Inode, name: bytes, inode: Inode) -> None:
        """Make the kernel look `name` up again and drop what it cached of the inode.

        Never on the event loop's thread: the kernel may need an answer from us to finish it.
        """
        if not self._open:
            return

        await trio.to_thread.run_sync(self._forget_name, dir.ino, name, inode.ino)

    @staticmethod
    def _forget_name(dir: int, name: bytes, ino: int) -> None:
        try:
            pyfuse3.invalidate_entry(pyfuse3.InodeT(dir), pyfuse3.FileNameT(name))
        except OSError as e:
            log.debug("invalidation of %r: %s", name, e)
        try:
            pyfuse3.invalidate_inode(pyfuse3.InodeT(ino))
        except OSError as e:
            log.debug("invalidation of inode %d: %s", ino, e)

    async def _raise_background_limit(self) -> None:
        """Through a fusectl of our own (root only; without it the kernel's default stays)."""
        if os.geteuid() != 0:
            return
        await trio.to_thread.run_sync(self._write_background_limit)

    def _write_background_limit(self) -> None:
        try:
            minor = os.minor(os.stat(self.mountpoint).st_dev)
            fusectl = _unattached_mount(b"fusectl")
        except OSError as e:
            log.debug("max_background stays as it is: %s", e)
            return
        try:
            for name, value in (("max_background", MAX_BACKGROUND), ("congestion_threshold", MAX_BACKGROUND)):
                with contextlib.suppress(OSError):
                    fd = os.open(f"{minor}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=fusectl)
                    try:
                        os.write(fd, str(value).encode())
                    finally:
                        os.close(fd)
        finally:
            os.close(fusectl)


FSOPEN, FSCONFIG, FSMOUNT = 430, 431, 432
"""System call numbers, the same on all architectures (Linux 5.2)."""
FSCONFIG_CMD_CREATE = 6


def _unattached_mount(kind: bytes) -> int:
    """A file system mounted nowhere: a descriptor of its root, and nothing is left when we are killed."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *args: object) -> int:
        result = libc.syscall(number, *args)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(result)

    context = call(FSOPEN, kind, 1)
    try:
        call(FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
        return call(FSMOUNT, context, 1, 0)
    finally:
        os.close(context)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
