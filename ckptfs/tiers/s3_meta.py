"""Attributes as user metadata of an object, in the form of s3fs-fuse.

`mode` (decimal, with the type bits), `uid`, `gid`, and `mtime`, `atime`, `ctime` in seconds with up to nine
decimals, as s3fs and rclone write and read them. Read, too: modes in octal and times in RFC 3339, which
`rclone --metadata` writes. Ours are `ckptfs-version`, the ident, and `ckptfs-xxh3`: the digest of a small
object and, after a dash, the mtime it belongs to. s3fs keeps metadata that it does not know when it
rewrites an object; the mtime tells that the digest is not about the new content.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from ckptfs.tiers.base import Attrs, Kind

IDENT = "ckptfs-version"
XXH3 = "ckptfs-xxh3"

FILE_TYPE = "application/octet-stream"
DIR_TYPE = "application/x-directory"
"""Content types that s3fs uses."""

TARGET_MAX = 4095
"""Bytes of the longest target of a symbolic link (PATH_MAX)."""

DEFAULT_FILE_MODE = 0o644
DEFAULT_DIR_MODE = 0o755

_TYPES = {Kind.FILE: stat.S_IFREG, Kind.DIR: stat.S_IFDIR, Kind.LINK: stat.S_IFLNK}
_SHOWN_TYPES = frozenset(_TYPES.values())
_OTHER_TYPES = frozenset({stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK})
_SECONDS = re.compile(r"(-?)([0-9]{1,11})(?:\.([0-9]{1,18}))?\Z", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}\Z", re.ASCII)
_DIGEST = re.compile(r"([0-9a-f]{32})-(-?[0-9]+\.[0-9]{9})\Z", re.ASCII)
_RFC3339 = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?([Zz]|[+-]\d\d:\d\d)\Z", re.ASCII
)
_LARGEST_ID = (1 << 32) - 2
"""-1 means "leave it" to chown(2)."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What the metadata of an object says."""

    kind: Kind | None
    """None for devices, sockets and pipes: nothing ckptfs shows or makes."""
    attrs: Attrs
    ident: str = ""
    xxh3: bytes | None = None
    """Digest of the whole content, if it is about this content."""
    mtime_known: bool = False
    """The mtime is written in the metadata, not the date of the object."""


def seconds(ns: int) -> str:
    """Nanoseconds as seconds with nine decimals, exactly."""
    sign = "-" if ns < 0 else ""
    whole, rest = divmod(abs(ns), 1_000_000_000)
    return f"{sign}{whole}.{rest:09d}"


def nanoseconds(text: str) -> int | None:
    """A time as s3fs, rclone or RFC 3339 write it, in nanoseconds; None for anything else."""
    text = text.strip()
    match = _SECONDS.match(text)
    if match:
        sign, whole, rest = match.groups()
        value = int(whole) * 1_000_000_000 + int(((rest or "") + "000000000")[:9])
        return -value if sign else value
    match = _RFC3339.match(text)
    if match:
        day, time, rest, zone = match.groups()
        zone = "+00:00" if zone in "Zz" else zone
        try:
            then = datetime.fromisoformat(f"{day}T{time}{zone}")
        except ValueError:
            return None
        since = then - datetime(1970, 1, 1, tzinfo=timezone.utc)
        return (since.days * 86400 + since.seconds) * 1_000_000_000 + int(((rest or "") + "000000000")[:9])
    return None


def pack(kind: Kind, attrs: Attrs, ident: str, xxh3: bytes | None = None) -> dict[str, str]:
    """The metadata of an object to be made. `ctime` is its mtime: the real one is the store's date."""
    mtime = seconds(attrs.mtime_ns)
    metadata = {
        "mode": str(stat.S_IMODE(attrs.mode) | _TYPES[kind]),
        "uid": str(attrs.uid),
        "gid": str(attrs.gid),
        "mtime": mtime,
        "atime": seconds(attrs.atime_ns),
        "ctime": mtime,
        IDENT: ident,
    }
    if xxh3 is not None:
        metadata[XXH3] = f"{xxh3.hex()}-{mtime}"
    return metadata


def unpack(
    metadata: Mapping[str, str], size: int, last_modified: datetime, *, directory: bool = False
) -> Meta:
    """What the metadata of an object, anybody's, says; nonsense in it counts as absent.

    `last_modified`: the store's date of the object, the mtime where the metadata has none. `directory`: it is
    a marker. An object says itself that it is a link or a device.
    """
    words = {name.lower(): value.strip() for name, value in metadata.items()}
    mode = _mode(words.get("mode", ""))
    kind: Kind | None = Kind.DIR if directory else Kind.FILE
    if mode is not None and not directory:
        if stat.S_IFMT(mode) in _OTHER_TYPES:
            kind = None
        elif stat.S_ISLNK(mode) and 0 < size <= TARGET_MAX:
            kind = Kind.LINK
    if mode is None:
        mode = DEFAULT_DIR_MODE if directory else DEFAULT_FILE_MODE
    told = nanoseconds(words.get("mtime", ""))
    mtime = told if told is not None else date_ns(last_modified)
    atime = nanoseconds(words.get("atime", ""))
    attrs = Attrs(
        stat.S_IMODE(mode),
        _owner(words.get("uid", ""), os.geteuid()),
        _owner(words.get("gid", ""), os.getegid()),
        atime if atime is not None else mtime,
        mtime,
    )
    return Meta(kind, attrs, words.get(IDENT, ""), _xxh3(words.get(XXH3, ""), mtime), told is not None)


def default_attrs(last_modified: datetime, *, directory: bool = False) -> Attrs:
    """Attributes of an object whose metadata says nothing."""
    return unpack({}, 0, last_modified, directory=directory).attrs


def date_ns(date: datetime) -> int:
    """A date in nanoseconds since the epoch."""
    since = date - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


def _mode(text: str) -> int | None:
    """Decimal as s3fs has it, or octal as rclone has it: the one that has a file type."""
    if not _NUMBER.match(text):
        return None
    decimal = int(text)
    octal = int(text, 8) if not set(text) & set("89") else None
    known = _SHOWN_TYPES | _OTHER_TYPES
    if not text.startswith("0") and decimal <= 0o177777 and stat.S_IFMT(decimal) in known:
        return decimal
    if octal is not None and octal <= 0o177777 and stat.S_IFMT(octal) in known:
        return octal
    if text.startswith("0") and octal is not None and octal <= 0o7777:
        return octal
    return decimal if decimal <= 0o7777 else None


def _owner(text: str, otherwise: int) -> int:
    return int(text) if _NUMBER.match(text) and int(text) <= _LARGEST_ID else otherwise


def _xxh3(text: str, mtime: int) -> bytes | None:
    match = _DIGEST.match(text)
    if match is None or match.group(2) != seconds(mtime):
        return None
    return bytes.fromhex(match.group(1))
