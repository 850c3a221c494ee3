"""Paths and keys."""

from __future__ import annotations

import errno

import pytest

from ckptfs.tiers.base import TierError, Trouble
from ckptfs.tiers.s3_keys import KEY_MAX, Keys, check_name, forbids


@pytest.mark.parametrize("prefix", [b"", b"p", "träger/läufe".encode(), b"/p/", b"p/"])
@pytest.mark.parametrize(
    "path", [b"a", b"a/b", "ü/€".encode(), b"a b/%41+", b"tab\there\nand\rthere", b"\x7f"]
)
def test_a_path_is_its_key(prefix: bytes, path: bytes) -> None:
    keys = Keys(prefix)
    key = keys.key(path)
    assert key.encode() == (prefix.strip(b"/") + b"/" if prefix.strip(b"/") else b"") + path
    assert keys.path(key) == path
    assert keys.dir(path) == key + "/"
    assert keys.has(path)


def test_the_root() -> None:
    assert (Keys(b"").dir(b""), Keys(b"p/q").dir(b"")) == ("", "p/q/")
    assert Keys(b"").own("attrs", b"x/y", "z") == ".ckptfs/attrs/x/y/z"
    assert Keys(b"p").own("tier-id") == "p/.ckptfs/tier-id"
    with pytest.raises(TierError):
        Keys(b"p").key(b"")


def test_keys_outside_the_prefix_have_no_path() -> None:
    with pytest.raises(ValueError, match="not below"):
        Keys(b"p").path("pq/x")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (b"/a", errno.EINVAL),
        (b"a/", errno.EINVAL),
        (b"a//b", errno.EINVAL),
        (b".", errno.EINVAL),
        (b"a/../b", errno.EINVAL),
        (b".ckptfs", errno.EINVAL),
        (b"a/.ckptfs-x", errno.EINVAL),
        (b"\xff", errno.EILSEQ),
        (b"a/\0", errno.EILSEQ),
        (b"\x01", errno.EILSEQ),
        (b"\x1f", errno.EILSEQ),
        (b"\xed\xa0\x80", errno.EILSEQ),
        ("\ufffe".encode(), errno.EILSEQ),
        (b"x" * 256, errno.ENAMETOOLONG),
        (b"x/" * 511 + b"xxx", errno.ENAMETOOLONG),
    ],
)
def test_what_cannot_be_a_key_is_refused(path: bytes, code: int) -> None:
    assert forbids(path, b"p") == code
    assert not Keys(b"p").has(path)
    for call in (lambda: check_name(path, b"p"), lambda: Keys(b"p").key(path)):
        with pytest.raises(TierError) as caught:
            call()
        assert (caught.value.trouble, caught.value.errno) == (Trouble.REFUSED, code)
        assert "\n" not in str(caught.value)


def test_a_name_that_is_allowed_leaves_room_for_its_record() -> None:
    prefix = b"p" * 100
    longest = max(
        (b"/".join([b"d" * 200] * 4 + [b"x" * n]) for n in range(1, 256)),
        key=lambda path: len(path) if not forbids(path, prefix) else 0,
    )
    parent, _, name = longest.rpartition(b"/")
    keys = Keys(prefix)
    assert len(keys.own("attrs", parent + b"/.ckptfs-" + name).encode()) == KEY_MAX
    assert keys.key(longest)
