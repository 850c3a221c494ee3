"""Attributes as metadata, ours and others'."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.tiers.base import Attrs, Kind
from ckptfs.tiers.s3_meta import date_ns, nanoseconds, pack, seconds, unpack

DATE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
DATE_NS = 1767323045 * 10**9
ATTRS = Attrs(0o640, 1000, 1001, 1_600_000_000_000_000_001, 1_700_000_000_123_456_789)


@pytest.mark.parametrize("kind", [Kind.FILE, Kind.LINK])
def test_what_is_packed_is_unpacked(kind: Kind) -> None:
    metadata = pack(kind, ATTRS, "u/v1", bytes(range(16)))
    meta = unpack(metadata, 5, DATE)
    assert (meta.kind, meta.attrs, meta.ident, meta.xxh3) == (kind, ATTRS, "u/v1", bytes(range(16)))
    assert unpack(pack(Kind.DIR, ATTRS, "dir"), 0, DATE, directory=True).attrs == ATTRS
    upper = {name.title(): value for name, value in metadata.items()}
    assert unpack(upper, 5, DATE) == meta
    assert all(value.isascii() for value in metadata.values())


def test_the_form_is_that_of_s3fs() -> None:
    metadata = pack(Kind.FILE, ATTRS, "u/v1")
    assert metadata["mode"] == str(stat.S_IFREG | 0o640)
    assert metadata["mtime"] == "1700000000.123456789"
    assert metadata["uid"] == "1000"


@given(st.integers(-(10**19), 10**19))
def test_times_are_exact(ns: int) -> None:
    assert nanoseconds(seconds(ns)) == ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1700000000", 1_700_000_000 * 10**9),
        ("1700000000.5", 1_700_000_000_500_000_000),
        ("1700000000.123456789999", 1_700_000_000_123_456_789),
        ("-1.5", -1_500_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000 * 10**9),
        ("2023-11-14T23:13:20.25+01:00", 1_700_000_000_250_000_000),
        ("", None),
        ("yesterday", None),
        ("1e9", None),
        ("2023-13-14T22:13:20Z", None),
        ("٣", None),
        ("9" * 40, None),
    ],
)
def test_times_of_others(text: str, ns: int | None) -> None:
    assert nanoseconds(text) == ns


@pytest.mark.parametrize(
    ("text", "mode", "kind"),
    [
        ("33188", 0o644, Kind.FILE),  # s3fs
        ("41471", 0o777, Kind.LINK),
        ("100664", 0o664, Kind.FILE),  # rclone --metadata
        ("0100600", 0o600, Kind.FILE),
        ("120777", 0o777, Kind.LINK),
        ("420", 0o644, Kind.FILE),
        ("0600", 0o600, Kind.FILE),
        ("4516", 0o644, None),  # a pipe
        ("0x1ff", 0o644, Kind.FILE),
        ("-1", 0o644, Kind.FILE),
        ("99999999999", 0o644, Kind.FILE),
    ],
)
def test_modes_of_others(text: str, mode: int, kind: Kind | None) -> None:
    meta = unpack({"mode": text}, 3, DATE)
    assert (meta.attrs.mode, meta.kind) == (mode, kind)


def test_an_object_without_metadata() -> None:
    meta = unpack({}, 3, DATE)
    assert meta.kind is Kind.FILE
    assert meta.attrs == Attrs(0o644, os.geteuid(), os.getegid(), DATE_NS, DATE_NS)
    assert (meta.ident, meta.xxh3, meta.mtime_known) == ("", None, False)
    assert unpack({}, 0, DATE, directory=True).attrs.mode == 0o755
    assert date_ns(DATE) == DATE_NS


def test_rclone_writes_mtime_only() -> None:
    meta = unpack({"mtime": "1700000000.123456789"}, 3, DATE)
    assert meta.attrs.mtime_ns == meta.attrs.atime_ns == ATTRS.mtime_ns
    assert meta.mtime_known


def test_what_is_too_long_or_empty_is_no_link() -> None:
    assert unpack({"mode": "41471"}, 0, DATE).kind is Kind.FILE
    assert unpack({"mode": "41471"}, 5000, DATE).kind is Kind.FILE


def test_a_digest_is_about_one_mtime() -> None:
    """s3fs keeps metadata it does not know when it writes other content, but sets the mtime."""
    metadata = pack(Kind.FILE, ATTRS, "u/v1", bytes(16))
    assert unpack({**metadata, "mtime": seconds(ATTRS.mtime_ns + 1)}, 5, DATE).xxh3 is None
    assert unpack({**metadata, "mtime": ""}, 5, DATE).xxh3 is None
    assert unpack({**metadata, "ckptfs-xxh3": "nonsense"}, 5, DATE).xxh3 is None
    assert unpack(pack(Kind.FILE, replace(ATTRS, mtime_ns=0), "u/v1", bytes(16)), 5, DATE).xxh3 == bytes(16)


@given(st.dictionaries(st.sampled_from(["mode", "uid", "gid", "mtime", "atime", "ckptfs-xxh3"]), st.text()))
def test_nonsense_is_never_an_error(metadata: dict[str, str]) -> None:
    attrs = unpack(metadata, 1, DATE).attrs
    assert 0 <= attrs.mode <= 0o7777
    assert 0 <= attrs.uid < 1 << 32
