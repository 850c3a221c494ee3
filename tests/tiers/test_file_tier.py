"""What only a file tier has: its root directory, hidden files, other file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from file_rig import file_rig, hidden_files, needs_root, small_tmpfs
from rig import ATTRS, CHUNK, DIR_ATTRS, Session, blob, caught, draft, trouble

from ckptfs.tiers import open_tier
from ckptfs.tiers.base import (
    Digest,
    Kind,
    Link,
    Mkdir,
    Move,
    Put,
    Remove,
    SetAttrs,
    Trouble,
)
from ckptfs.tiers.file_names import path_of

# -- the root -------------------------------------------------------------------------------------


def test_a_tier_that_vanished_is_down_and_never_empty(s: Session, root: Path) -> None:
    s.put(b"f", b"data")
    op = s.put_op(b"g", b"more")
    away = root.parent / "away"
    root.rename(away)
    for _ in range(2):
        for call in (
            lambda: s.tier.listdir(b""),
            lambda: s.tier.stat(b"f"),
            lambda: s.tier.apply([op]),
            lambda: s.tier.begin(draft("v", b"", 1)),
            lambda: s.tier.sweep(frozenset()),
            s.tier.space,
            s.tier.probe,
        ):
            assert caught(call).trouble is Trouble.DOWN
        root.mkdir(exist_ok=True)  # second round: an empty directory, as under a mount that is gone
    assert list(root.iterdir()) == []
    root.rmdir()
    away.rename(root)
    assert s.names() == {b"f"}
    s.apply(op)
    assert s.rig.foreign_read(b"g") == b"more"


def test_another_tier_in_its_place_is_down(s: Session, root: Path) -> None:
    tier_id = s.tier.probe().tier_id
    root.rename(root.parent / "away")
    root.mkdir()
    other = open_tier(f"file://{root}", "0000-mount").probe()
    assert other.tier_id != tier_id
    error = caught(lambda: s.tier.listdir(b""))
    assert error.trouble is Trouble.DOWN
    assert tier_id in str(error)
    told = open_tier(f"file://{root}", "0000-mount", {"tier_id": tier_id})
    assert caught(told.probe).trouble is Trouble.DOWN


def test_a_directory_that_was_never_probed_is_no_tier(root: Path) -> None:
    tier = open_tier(f"file://{root}", "0000-mount")
    assert caught(lambda: tier.listdir(b"")).trouble is Trouble.DOWN
    assert list(root.iterdir()) == []


def test_a_copied_tier_is_the_same_tier(s: Session, root: Path) -> None:
    s.put(b"f", b"data")
    shutil.copytree(root, root.parent / "copy", symlinks=True)
    root.rename(root.parent / "away")
    (root.parent / "copy").rename(root)
    assert s.names() == {b"f"}


@needs_root
def test_the_tier_can_be_unmounted_between_calls(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    with small_tmpfs(tmp_path / "tier", "size=8m") as root:
        s = Session(file_rig(root, tmp_path / "staging"))
        info = s.tier.probe()
        s.put(b"f", b"data")
    assert not info.durable
    assert any("tmpfs" in note for note in info.notes)
    assert caught(lambda: s.tier.listdir(b"")).trouble is Trouble.DOWN


# -- hidden files ---------------------------------------------------------------------------------


def test_hidden_files_lie_in_uploads_and_are_private(s: Session, root: Path) -> None:
    upload, _, _ = s.send(b"secret", b"run/f")
    path = root / os.fsdecode(path_of(upload.handle))
    assert path.parent == root / ".ckptfs/uploads/0000-mount"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(path.stat().st_ino) == upload.ident
    assert not (root / "run").exists()


@pytest.mark.parametrize("target_dir", [b"shared", b"shared/not/yet/there"])
def test_in_a_setgid_directory_they_lie_beside_and_are_never_listed(
    s: Session, root: Path, target_dir: bytes
) -> None:
    (root / "shared").mkdir()
    os.chmod(root / "shared", 0o2775)
    upload, digests, version = s.send(blob(CHUNK), target_dir + b"/f")
    assert os.path.dirname(path_of(upload.handle)) == b"shared"
    assert s.names(b"shared") == set()
    assert s.tier.stat(path_of(upload.handle)) is None
    s.apply(Put(target_dir + b"/f", upload, CHUNK, ATTRS, digests, None, version))
    assert s.rig.foreign_read(target_dir + b"/f") == blob(CHUNK)
    assert hidden_files(root) == []


def test_with_a_default_acl_they_lie_beside(s: Session, root: Path) -> None:
    (root / "shared").mkdir()
    # acl(5) in the kernel's form: version 2, then (tag, permissions, id): owner, group, others.
    entries = ((1, 7, 0xFFFFFFFF), (4, 5, 0xFFFFFFFF), (0x20, 5, 0xFFFFFFFF))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(root / "shared", "system.posix_acl_default", acl)
    except OSError as exc:
        pytest.skip(f"no ACLs on this file system: {exc.strerror}")
    op = s.put_op(b"shared/f", b"data")
    assert os.path.dirname(path_of(op.upload.handle)) == b"shared"
    s.apply(op)
    assert s.rig.foreign_read(b"shared/f") == b"data"


def test_a_directory_made_in_a_setgid_one_inherits(s: Session, root: Path) -> None:
    os.chmod(root, 0o2755)
    s.apply(Mkdir(b"run", DIR_ATTRS))
    assert (root / "run").stat().st_mode & stat.S_ISGID


def test_sweep_finds_what_lies_beside(s: Session, root: Path) -> None:
    (root / "shared").mkdir()
    os.chmod(root / "shared", 0o2775)
    kept, _, _ = s.send(b"kept", b"shared/f")
    s.send(b"gone", b"shared/g")
    s.send(b"gone")
    assert s.rig.open().sweep(frozenset({kept.handle})) == 2
    assert sorted(path.name for path in hidden_files(root)) == [".ckptfs-0000-mount-v1", "@v1"]
    assert s.rig.open().sweep(frozenset()) == 1
    assert hidden_files(root) == []


def test_sweep_leaves_other_mounts_alone(s: Session, root: Path) -> None:
    other = open_tier(f"file://{root}", "other-mount")
    upload = other.begin(draft("v1", b"", 4))
    assert s.tier.sweep(frozenset()) == 0
    other.send(upload, 0, s.stage(b"data"))
    assert caught(lambda: s.tier.send(upload, 0, s.stage(b"data"))).trouble is Trouble.REDO


def test_removing_a_directory_removes_our_hidden_files_in_it(s: Session, root: Path) -> None:
    made = s.apply(Mkdir(b"d", replace(DIR_ATTRS, mode=0o2755)))[0]
    os.chmod(root / "d", 0o2755)
    upload, _, _ = s.send(b"data", b"d/f")
    assert (root / os.fsdecode(path_of(upload.handle))).parent == root / "d"
    s.apply(Remove(b"d", Kind.DIR, made.token))
    assert not (root / "d").exists()
    assert caught(lambda: s.tier.send(upload, 0, s.stage(b"data"))).trouble is Trouble.REDO
    assert s.tier.sweep(frozenset()) == 0
    assert hidden_files(root) == []


def test_moving_a_directory_strands_no_hidden_file(s: Session, root: Path) -> None:
    made = s.apply(Mkdir(b"d", DIR_ATTRS))[0]
    os.chmod(root / "d", 0o2755)
    op = s.put_op(b"d/f", b"data")
    s.apply(Move(b"d", b"e", Kind.DIR, made.ident, None))
    assert trouble(s.tier.apply([replace(op, path=b"e/f")])) is Trouble.REDO
    assert hidden_files(root) == []


def test_an_upload_is_not_recreated_by_send(s: Session, root: Path) -> None:
    upload = s.tier.begin(draft("v1", b"", 4))
    path = root / os.fsdecode(path_of(upload.handle))
    path.unlink()
    assert caught(lambda: s.tier.send(upload, 0, s.stage(b"data"))).trouble is Trouble.REDO
    assert not path.exists()
    path.write_bytes(b"who?")  # another file under the name, another inode
    if str(path.stat().st_ino) != upload.ident:
        assert caught(lambda: s.tier.send(upload, 0, s.stage(b"data"))).trouble is Trouble.REDO
        assert path.read_bytes() == b"who?"


def test_holes_stay_holes(s: Session, root: Path) -> None:
    path = s.rig.staging / "sparse"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"island")
    upload = s.tier.begin(draft("h", b"", 64 << 20))
    source = replace(s.stage(b""), ram_path=str(path), length=64 << 20)
    digest = s.tier.send(upload, 0, source)
    applied = s.apply(Put(b"f", upload, 64 << 20, ATTRS, (Digest(0, 64 << 20, digest),), None, "h"))[0]
    assert (root / "f").stat().st_blocks * 512 < 1 << 20
    into = s.local()
    assert s.tier.fetch(b"f", applied.token, 0, 64 << 20, into) == 64 << 20
    st = os.stat(into)
    assert st.st_size == 64 << 20
    assert st.st_blocks * 512 < 1 << 20


def test_no_descriptor_is_left_open(s: Session) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    s.put(b"d/f", blob(CHUNK))
    s.tier.listdir(b"d")
    s.tier.apply([Put(b"x", s.tier.begin(draft("v9", b"", 1)), 2, ATTRS, (), None)])
    assert caught(lambda: s.tier.read(b"d/f", "x", 0, 1))
    assert sorted(os.listdir("/proc/self/fd")) == before


# -- other file systems ---------------------------------------------------------------------------


@needs_root
def test_a_directory_on_another_file_system(s: Session, root: Path) -> None:
    with small_tmpfs(root / "other", "size=64m") as other:
        upload, digests, version = s.send(blob(3 * CHUNK), b"other/f")
        assert os.path.dirname(path_of(upload.handle)) == b"other"
        s.apply(Put(b"other/f", upload, 3 * CHUNK, ATTRS, digests, None, version))

        # Sent to the usual place, published there: rename gives EXDEV.
        op = replace(s.put_op(b"g", blob(2 * CHUNK)), path=b"other/g")
        applied = s.apply(op)[0]
        assert applied.ident == str((other / "g").stat().st_ino) != op.upload.ident
        assert s.rig.foreign_read(b"other/g") == blob(2 * CHUNK)
        assert s.tier.digests(b"other/g", applied.token) == op.digests
        assert s.look(b"other/g").attrs.mtime_ns == ATTRS.mtime_ns
        assert s.apply(op)[0] == applied
        assert hidden_files(root) == []

        # What is foreign there is kept, beside since conflicts/ is elsewhere.
        s.rig.foreign_write(b"other/g", b"theirs")
        assert s.apply(replace(s.put_op(b"h", b"new"), path=b"other/g", expected=applied.token))[0].conflict
        kept = [path for path in other.iterdir() if path.name.startswith(".ckptfs-conflict-")]
        assert [path.read_bytes() for path in kept] == [b"theirs"]
        assert s.names(b"other") == {b"f", b"g"}

        # Files and links move by copying, trees do not.
        moving = s.put(b"m", blob(CHUNK))
        moved = s.apply(Move(b"m", b"other/m", Kind.FILE, moving.ident, None))[0]
        assert s.rig.foreign_read(b"other/m") == blob(CHUNK)
        assert s.tier.stat(b"m") is None
        assert s.tier.digests(b"other/m", moved.token)
        link = s.apply(Link(b"l", b"t", ATTRS, None))[0]
        s.apply(Move(b"l", b"other/l", Kind.LINK, link.ident, None))
        assert s.look(b"other/l").target == b"t"
        tree = s.apply(Mkdir(b"tree", DIR_ATTRS))[0]
        outcome = s.tier.apply([Move(b"tree", b"other/tree", Kind.DIR, tree.ident, None)])
        assert outcome.failed is not None
        assert (outcome.failed.trouble, outcome.failed.errno) == (Trouble.REFUSED, errno.EXDEV)


@needs_root
def test_a_full_tier_is_down_until_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    with small_tmpfs(tmp_path / "tier", "size=4m") as root:
        s = Session(file_rig(root, tmp_path / "staging"))
        s.put(b"ballast", blob(3 * CHUNK))
        data = blob(2 * CHUNK)
        upload = s.tier.begin(draft("v", b"", len(data)))
        source = s.stage(data)
        error = caught(lambda: s.tier.send(upload, 0, source))
        assert (error.trouble, error.errno) == (Trouble.DOWN, errno.ENOSPC)
        s.rig.foreign_remove(b"ballast")
        digest = s.tier.send(upload, 0, source)
        s.apply(Put(b"f", upload, len(data), ATTRS, (Digest(0, len(data), digest),), None, "v"))
        assert s.rig.foreign_read(b"f") == data


@needs_root
def test_a_tier_without_inodes_left_is_down(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    with small_tmpfs(tmp_path / "tier", "size=8m,nr_inodes=30") as root:
        s = Session(file_rig(root, tmp_path / "staging"))
        with contextlib.ExitStack() as stack:
            for n in range(30):
                try:
                    stack.enter_context(open(root / f"n{n}", "w"))
                except OSError:
                    break
        error = caught(lambda: s.tier.begin(draft("v", b"", 1)))
        assert (error.trouble, error.errno) == (Trouble.DOWN, errno.ENOSPC)


@needs_root
def test_an_ordinary_user_publishes_and_changes_read_only_files(tmp_path: Path) -> None:
    """In a child process that gave up root: mode 0444 must not lock the daemon out."""
    os.chmod(tmp_path, 0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o011 == 0:
            os.chmod(parent, parent.stat().st_mode | 0o011)
        if parent == Path("/tmp"):
            break
    (tmp_path / "tier").mkdir()
    (tmp_path / "staging").mkdir()
    os.chown(tmp_path / "tier", 65534, 65534)
    os.chown(tmp_path / "staging", 65534, 65534)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            _as_ordinary_user(tmp_path)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _as_ordinary_user(tmp_path: Path) -> None:
    s = Session(file_rig(tmp_path / "tier", tmp_path / "staging"))
    attrs = replace(ATTRS, mode=0o6400, uid=0, gid=0)
    op = s.put_op(b"f", b"data", attrs=attrs)
    hidden = tmp_path / "tier" / op.upload.handle
    hidden.chmod(0)  # as left by a crash between fchmod and rename
    applied = s.apply(op)[0]
    found = s.look(b"f")
    assert found.attrs.uid == 65534
    assert found.attrs.mode == 0o400  # no set-id bits for an owner that is not the wanted one
    changed = s.apply(SetAttrs(b"f", Kind.FILE, replace(attrs, mode=0o400, mtime_ns=5_000), applied.token))[0]
    assert s.tier.digests(b"f", changed.token) == op.digests
    assert s.look(b"f").attrs.mode == 0o400
    (tmp_path / "tier/locked").mkdir()
    (tmp_path / "tier/locked").chmod(0o555)
    assert trouble(s.tier.apply([s.put_op(b"locked/f", b"data")])) is Trouble.REFUSED
