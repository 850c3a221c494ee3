"""Looking at a file tier and reading from it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

import xxhash

from ckptfs.tiers import file_records
from ckptfs.tiers.base import RESERVED, Digest, Found, Source, TierError, Trouble
from ckptfs.tiers.file_attrs import by_descriptor, pinned
from ckptfs.tiers.file_copy import copy_range
from ckptfs.tiers.file_errors import GONE, show
from ckptfs.tiers.file_names import components, look, seen, split
from ckptfs.tiers.file_root import open_dir
from ckptfs.tiers.linux import drop_cache
from ckptfs.tiers.window import digest


def listdir(root_fd: int, path: bytes) -> list[Found]:
    """Everything in a directory but ckptfs's own names, devices, sockets and pipes."""
    try:
        fd = open_dir(root_fd, components(path))
    except OSError as exc:
        if exc.errno not in GONE:
            raise
        raise TierError(
            Trouble.CHANGED, f"{show(path)} is no directory on the tier", exc.errno or errno.ENOENT
        ) from exc
    try:
        found = []
        for text in os.listdir(fd):
            name = os.fsencode(text)
            if name.startswith(RESERVED):
                continue
            there = look(fd, name)
            if there is not None and there.kind is not None:
                found.append(there.found(name))
        return found
    finally:
        os.close(fd)


def stat(root_fd: int, path: bytes) -> Found | None:
    """One object; None for what is not there or not shown."""
    if any(name.startswith(RESERVED) for name in path.split(b"/")):
        return None
    names = components(path)
    try:
        fd = open_dir(root_fd, names[:-1])
    except OSError as exc:
        if exc.errno in GONE:
            return None
        raise
    try:
        there = look(fd, names[-1] if names else b".")
        if there is None or there.kind is None:
            return None
        return there.found(names[-1] if names else b"")
    finally:
        os.close(fd)


def digests(root_fd: int, path: bytes, token: str) -> tuple[Digest, ...]:
    """The recorded digests; empty when there are none or the object is not `token` any more."""
    parent, name = split(path)
    components(path)
    try:
        dir_fd = open_dir(root_fd, components(parent))
        try:
            fd = pinned(dir_fd, name)
        finally:
            os.close(dir_fd)
    except OSError as exc:
        if exc.errno in GONE:
            return ()
        raise
    try:
        st = os.fstat(fd)
        record = _record(root_fd, fd, st) if seen(st).token == token else None
        return record.digests if record is not None else ()
    finally:
        os.close(fd)


def _record(root_fd: int, fd: int, st: os.stat_result) -> file_records.Record | None:
    """The record of an open file, if it describes it as it is."""
    record = file_records.load(root_fd, by_descriptor(fd), st)
    return record if record is not None and record.describes(st) else None


def _open(root_fd: int, path: bytes, token: str) -> int:
    """The object to read, checked to be `token`."""
    parent, name = split(path)
    try:
        dir_fd = open_dir(root_fd, components(parent))
        try:
            # Not blocking: a pipe that another writer put there would hang the open.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(name, flags, dir_fd=dir_fd)
        finally:
            os.close(dir_fd)
    except OSError as exc:
        if exc.errno not in GONE and exc.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise TierError(Trouble.CHANGED, f"{show(path)} is gone from the tier", errno.ESTALE) from exc
    try:
        _same(fd, path, token)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _same(fd: int, path: bytes, token: str) -> os.stat_result:
    st = os.fstat(fd)
    if seen(st).token != token:
        raise TierError(Trouble.CHANGED, f"{show(path)} was changed on the tier", errno.ESTALE)
    return st


def fetch(root_fd: int, path: bytes, token: str, offset: int, length: int, into: str) -> int:
    """Copy a range into the same range of a local file; whole chunks in it are verified there,
    where they will be read."""
    components(path)
    fd = _open(root_fd, path, token)
    try:
        try:
            local = os.open(into, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise TierError(
                Trouble.REDO, f"staging file {into} cannot be opened: {exc.strerror}", exc.errno or 0
            ) from exc
        try:
            try:
                copied = copy_range(fd, local, offset, length)
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise
                raise TierError(
                    Trouble.DOWN, f"no room in the cache to fetch {show(path)}", errno.ENOSPC
                ) from exc
        finally:
            os.close(local)
        st = _same(fd, path, token)
        for chunk in _whole_chunks(root_fd, fd, st, offset, copied):
            if digest(Source(into, chunk.offset, chunk.length)) != chunk.xxh3:
                _same(fd, path, token)
                raise _corrupt(path, chunk)
        return copied
    finally:
        os.close(fd)


def read(root_fd: int, path: bytes, token: str, offset: int, length: int) -> bytes:
    """A range as bytes; whole chunks in it are verified."""
    components(path)
    fd = _open(root_fd, path, token)
    try:
        size = max(0, min(length, os.fstat(fd).st_size - offset))
        parts: list[bytes] = []
        got = 0
        while got < size:
            part = os.pread(fd, size - got, offset + got)
            if not part:
                break
            parts.append(part)
            got += len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        drop_cache(fd, offset, got)
        st = _same(fd, path, token)
        with memoryview(data) as view:
            for chunk in _whole_chunks(root_fd, fd, st, offset, got):
                start = chunk.offset - offset
                with view[start : start + chunk.length] as part_view:
                    if xxhash.xxh3_128_digest(part_view) != chunk.xxh3:
                        _same(fd, path, token)
                        raise _corrupt(path, chunk)
        return data
    finally:
        os.close(fd)


def _whole_chunks(root_fd: int, fd: int, st: os.stat_result, offset: int, length: int) -> Iterable[Digest]:
    """Chunks with a recorded digest that lie in the range completely."""
    record = _record(root_fd, fd, st)
    if record is None:
        return ()
    end = offset + length
    return [item for item in record.digests if item.offset >= offset and item.offset + item.length <= end]


def _corrupt(path: bytes, chunk: Digest) -> TierError:
    return TierError(
        Trouble.CORRUPT,
        f"{show(path)}: bytes {chunk.offset}..{chunk.offset + chunk.length} are not what was written",
        errno.EIO,
    )
