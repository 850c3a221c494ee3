"""The file tier: checkpoints as plain files of a directory, local or NFS.

The layout is the mount's own tree. What ckptfs adds is in `.ckptfs/` (and in hidden files
beside their targets, see `file_upload`): `tier-id`, `uploads/`, `conflicts/`, `manifests/`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptfs.tiers import file_apply, file_probe, file_read
from ckptfs.tiers.base import (
    Digest,
    Draft,
    Familiar,
    Found,
    Op,
    Outcome,
    Source,
    Space,
    TierError,
    TierInfo,
    Upload,
)
from ckptfs.tiers.file_errors import advice, show, tier_error
from ckptfs.tiers.file_root import Root
from ckptfs.tiers.file_upload import Uploads

_T = TypeVar("_T")


class FileTier:
    """`base.Tier` on a directory. See there for what the methods promise.

    Concurrency: any method from any thread; nothing but the tier's identity is remembered between
    calls, and no descriptor stays open, so the directory can be unmounted and mounted at will.
    Every call first checks that the directory is still the tier that was probed: when it is gone,
    empty or another one the answer is `Trouble.DOWN`, never an empty listing.
    """

    def __init__(self, root: bytes, mount_uuid: str, *, url: str = "", tier_id: str = "") -> None:
        """`root`: absolute path. `tier_id`: the identity an earlier probe found, empty if none."""
        self._url = url or "file://" + os.fsdecode(root)
        self._root = Root(root, tier_id)
        self._uploads = Uploads(mount_uuid)

    def _run(self, what: str, job: Callable[[int], _T], create_id: bool = False) -> _T:
        """Run `job(root_fd)`. ESTALE (the server lost a handle) is tried again once, by path."""
        for last in (False, True):
            try:
                with self._root.opened(create_id) as root_fd:
                    return job(root_fd)
            except OSError as exc:
                if exc.errno == errno.ESTALE and not last:
                    continue
                raise tier_error(exc, what) from exc
        raise AssertionError("unreachable")

    def probe(self) -> TierInfo:
        """Check the directory and give it an identity if it has none.

        A directory without one is refused when the identity to expect is known.
        """
        what = f"probing {show(self._root.path)}"

        def job(root_fd: int) -> tuple[bool, tuple[str, ...], int]:
            try:
                return file_probe.probe(root_fd, self._uploads)
            except OSError as exc:
                if exc.errno == errno.ESTALE:
                    raise
                error = tier_error(exc, what)
                raise TierError(
                    error.trouble, f"{error.message}; {advice(error.errno)}", error.errno
                ) from exc

        durable, notes, largest = self._run(what, job, create_id=True)
        return TierInfo(self._url, self._root.tier_id, durable, notes, largest)

    def begin(self, draft: Draft) -> Upload:
        """Make the hidden file; one of the same version left by an earlier try is replaced."""
        return self._run(
            f"beginning the upload {draft.version}", lambda root_fd: self._uploads.begin(root_fd, draft)
        )

    def send(self, upload: Upload, offset: int, source: Source) -> bytes:
        """Copy a window into the hidden file. REDO when that, or the staging file, is gone."""
        return self._run(
            f"sending to {upload.handle!r}",
            lambda root_fd: self._uploads.send(root_fd, upload, offset, source),
        )

    def send_small(self, batch: Sequence[tuple[Draft, Source]]) -> list[tuple[Upload, bytes]]:
        """Send whole versions; after an error all of the batch is to be sent again."""
        return self._run(
            f"sending {len(batch)} small files", lambda root_fd: self._uploads.send_small(root_fd, batch)
        )

    def apply(self, ops: Sequence[Op]) -> Outcome:
        """Apply a batch; a batch that was applied before, wholly or in part, may come again."""
        outcome = self._run("applying a batch", lambda root_fd: file_apply.apply(root_fd, self._uploads, ops))
        if outcome.failed is None or outcome.failed.errno != errno.ESTALE:
            return outcome
        rest = ops[len(outcome.applied) :]
        again = self._run("applying a batch", lambda root_fd: file_apply.apply(root_fd, self._uploads, rest))
        return Outcome(outcome.applied + again.applied, again.failed)

    def listdir(self, path: bytes, familiar: Familiar | None = None) -> list[Found]:
        """The directory's entries, in no order."""
        return self._run(f"listing {show(path)}", lambda root_fd: file_read.listdir(root_fd, path))

    def stat(self, path: bytes) -> Found | None:
        """The object, not following a link at the end or on the way."""
        return self._run(f"looking at {show(path)}", lambda root_fd: file_read.stat(root_fd, path))

    def digests(self, path: bytes, token: str) -> tuple[Digest, ...]:
        """The digests recorded for exactly this content."""
        return self._run(
            f"reading digests of {show(path)}", lambda root_fd: file_read.digests(root_fd, path, token)
        )

    def fetch(self, path: bytes, token: str, offset: int, length: int, into: str) -> int:
        """Copy a range to the local file, which must exist; its page cache on the tier is dropped."""
        return self._run(
            f"fetching {show(path)}",
            lambda root_fd: file_read.fetch(root_fd, path, token, offset, length, into),
        )

    def read(self, path: bytes, token: str, offset: int, length: int) -> bytes:
        """Return a range."""
        return self._run(
            f"reading {show(path)}", lambda root_fd: file_read.read(root_fd, path, token, offset, length)
        )

    def space(self) -> Space:
        """statvfs(2) of the root, in bytes; `free` is what this user may still write."""

        def job(root_fd: int) -> Space:
            found = os.statvfs(root_fd)
            return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

        return self._run("asking for the free space", job)

    def abandon(self, uploads: Sequence[Upload]) -> None:
        """Remove hidden files."""
        self._run("removing uploads", lambda root_fd: self._uploads.abandon(root_fd, uploads))

    def sweep(self, keep: frozenset[str]) -> int:
        """Remove hidden files of this mount's uuid that no journal row names."""
        return self._run("sweeping uploads", lambda root_fd: self._uploads.sweep(root_fd, keep))
