"""What only a file tier has: hidden files, inodes, errnos, other file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("contract")

from contract import ATTRS, CHUNK, DIR_ATTRS, Rig, Session, blob, trouble  # noqa: E402
from test_contract import file_rig  # noqa: E402

from ckptfs.errors import CkptfsError, Exit  # noqa: E402
from ckptfs.tiers import file_errors, file_records, open_tier  # noqa: E402
from ckptfs.tiers.base import (  # noqa: E402
    Applied,
    Digest,
    Kind,
    Link,
    Mkdir,
    Move,
    Op,
    Put,
    Remove,
    SetAttrs,
    TierError,
    Trouble,
)
from ckptfs.tiers.file_names import handle_of, ident_of_token, path_of  # noqa: E402
from ckptfs.tiers.url import parse_tier_url  # noqa: E402

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount or to be another user")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    (tmp_path / "staging").mkdir()
    return tmp_path / "tier"


@pytest.fixture
def rig(root: Path) -> Rig:
    return file_rig(root, root.parent / "staging")


@pytest.fixture
def s(rig: Rig) -> Session:
    return Session(rig)


@contextlib.contextmanager
def small_tmpfs(at: Path, options: str) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ckptfs-test", at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


def hidden_files(root: Path) -> list[Path]:
    """All hidden uploads anywhere in the tier."""
    uploads = [path for path in (root / ".ckptfs/uploads").rglob("*") if path.is_file()]
    return uploads + [path for path in root.rglob(".ckptfs-*") if path.is_file()]


def caught(call: Callable[[], Any]) -> TierError:
    with pytest.raises(TierError) as found:
        call()
    return found.value


# -- URLs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:///mnt/ckpt", b"/mnt/ckpt"),
        ("FILE:///mnt/ckpt/", b"/mnt/ckpt"),
        ("file://localhost/a//b/./c/../d", b"/a/b/d"),
        ("file:///with%20space%25/%ff%3F", b"/with space%/\xff?"),
        ("file:///tab\there", b"/tab\there"),
        ("file:///caf\u00e9/\udcff", b"/caf\xc3\xa9/\xff"),
    ],
)
def test_urls(url: str, root: bytes) -> None:
    assert parse_tier_url(url) == ("file", root)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("", "empty"),
        ("/mnt/x", "file:///mnt/x"),
        ("s3://bucket/p", "no S3 tier yet"),
        ("nfs://host/p", "unknown scheme"),
        ("file://host/p", "host"),
        ("file://", "absolute"),
        ("file:///", "root of the machine"),
        ("file:///a?b", "%3F"),
        ("file:///a%00b", "absolute"),
    ],
)
def test_urls_that_cannot_be_used(url: str, part: str) -> None:
    with pytest.raises(CkptfsError) as found:
        open_tier(url, "uuid")
    assert found.value.code is Exit.USAGE
    assert part in found.value.message
    assert "\n" not in found.value.message


# -- the root ------------------------------------------------------------------------------------


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
            lambda: s.tier.begin("v", b"", 1),
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


# -- hidden files --------------------------------------------------------------------------------


def test_hidden_files_lie_in_uploads_and_are_private(s: Session, root: Path) -> None:
    upload, _, _ = s.send(b"secret", b"run")
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
    upload, digests, version = s.send(blob(CHUNK), target_dir)
    assert os.path.dirname(path_of(upload.handle)) == b"shared"
    assert s.names(b"shared") == set()
    assert s.tier.stat(path_of(upload.handle)) is None
    s.apply(Put(target_dir + b"/f", upload, CHUNK, ATTRS, digests, None, version))
    assert s.rig.foreign_read(target_dir + b"/f") == blob(CHUNK)
    assert hidden_files(root) == []


def test_a_directory_made_in_a_setgid_one_inherits(s: Session, root: Path) -> None:
    os.chmod(root, 0o2755)
    s.apply(Mkdir(b"run", DIR_ATTRS))
    assert (root / "run").stat().st_mode & stat.S_ISGID


def test_sweep_finds_what_lies_beside(s: Session, root: Path) -> None:
    (root / "shared").mkdir()
    os.chmod(root / "shared", 0o2775)
    kept, _, _ = s.send(b"kept", b"shared")
    s.send(b"gone", b"shared")
    s.send(b"gone", b"")
    assert s.rig.open().sweep(frozenset({kept.handle})) == 2
    assert sorted(path.name for path in hidden_files(root)) == ["@v1", ".ckptfs-0000-mount-v1"]
    assert s.rig.open().sweep(frozenset()) == 1
    assert hidden_files(root) == []


def test_sweep_leaves_other_mounts_alone(s: Session, root: Path) -> None:
    other = open_tier(f"file://{root}", "other-mount")
    upload = other.begin("v1", b"", 4)
    assert s.tier.sweep(frozenset()) == 0
    other.send(upload, 0, s.stage(b"data"))
    assert caught(lambda: s.tier.send(upload, 0, s.stage(b"data"))).trouble is Trouble.REDO


def test_removing_a_directory_removes_our_hidden_files_in_it(s: Session, root: Path) -> None:
    made = s.apply(Mkdir(b"d", replace(DIR_ATTRS, mode=0o2755)))[0]
    os.chmod(root / "d", 0o2755)
    upload, _, _ = s.send(b"data", b"d")
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
    upload = s.tier.begin("v1", b"", 4)
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
    upload = s.tier.begin("h", b"", 64 << 20)
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
    s.tier.apply([Put(b"x", s.tier.begin("v9", b"", 1), 2, ATTRS, (), None)])
    assert caught(lambda: s.tier.read(b"d/f", "x", 0, 1))
    assert sorted(os.listdir("/proc/self/fd")) == before


# -- other file systems --------------------------------------------------------------------------


@needs_root
def test_a_directory_on_another_file_system(s: Session, root: Path) -> None:
    with small_tmpfs(root / "other", "size=64m") as other:
        upload, digests, version = s.send(blob(3 * CHUNK), b"other")
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
        upload = s.tier.begin("v", b"", len(data))
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
        error = caught(lambda: s.tier.begin("v", b"", 1))
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


# -- conflicts -----------------------------------------------------------------------------------


def test_a_foreign_directory_is_kept_with_its_content(s: Session, root: Path) -> None:
    s.rig.foreign_write(b"f/a/b", b"theirs")
    assert s.put(b"f", b"ours").conflict
    (kept,) = (root / ".ckptfs/conflicts").iterdir()
    assert kept.name.endswith("-f")
    assert (kept / "a/b").read_bytes() == b"theirs"


def test_a_directory_we_know_gives_way_only_when_empty(s: Session, root: Path) -> None:
    made = s.apply(Mkdir(b"x", DIR_ATTRS))[0]
    assert not s.put(b"x", b"file", made.token).conflict
    made = s.apply(Mkdir(b"y", DIR_ATTRS))[0]
    s.rig.foreign_write(b"y/theirs", b"t")
    assert s.put(b"y", b"file", made.token).conflict
    assert s.rig.foreign_read(b"y") == b"file"
    (kept,) = (root / ".ckptfs/conflicts").iterdir()
    assert (kept / "theirs").read_bytes() == b"t"


def test_a_file_in_place_of_a_parent_directory_is_kept(s: Session) -> None:
    s.rig.foreign_write(b"run", b"theirs")
    assert s.put(b"run/step/f", b"ours").conflict
    assert s.rig.foreign_read(b"run/step/f") == b"ours"
    assert s.rig.conflicts() == [b"theirs"]


def test_a_link_in_place_of_a_parent_directory_is_not_followed(s: Session, root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"precious")
    (root / "run").symlink_to(outside)
    assert s.tier.stat(b"run/f") is None
    assert caught(lambda: s.tier.listdir(b"run")).errno == errno.ENOTDIR
    assert s.put(b"run/f", b"ours").conflict
    assert (outside / "f").read_bytes() == b"precious"
    assert s.rig.foreign_read(b"run/f") == b"ours"


def test_a_link_under_the_name_is_replaced_not_followed(s: Session, root: Path) -> None:
    outside = root.parent / "outside"
    outside.write_bytes(b"precious")
    (root / "f").symlink_to(outside)
    assert s.put(b"f", b"ours").conflict
    assert outside.read_bytes() == b"precious"
    assert not (root / "f").is_symlink()


def test_many_conflicts_of_one_name_are_all_kept(s: Session) -> None:
    theirs = [b"theirs %d" % n for n in range(5)]
    for data in theirs:
        s.rig.foreign_write(b"f", data)
        assert s.put(b"f", b"ours").conflict
    assert sorted(s.rig.conflicts()) == theirs


def test_a_foreign_socket_is_kept_aside(s: Session, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("f")
    assert s.names() == set()
    assert s.tier.stat(b"f") is None
    assert s.put(b"f", b"ours").conflict
    assert s.rig.foreign_read(b"f") == b"ours"


def test_pipes_and_devices_are_left_out_and_do_not_hang(s: Session, root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert s.names() == set()
    token = "f%d-0-0" % (root / "pipe").stat().st_ino
    assert caught(lambda: s.tier.read(b"pipe", token, 0, 1)).trouble is Trouble.CHANGED


# -- crashes -------------------------------------------------------------------------------------

STEPS = (
    "chmod",
    "fchmod",
    "chown",
    "fchown",
    "utime",
    "setxattr",
    "fsync",
    "mkdir",
    "rmdir",
    "rename",
    "link",
    "symlink",
    "unlink",
)


class Crash(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def failing_at(step: int, make: Callable[[], BaseException]) -> Iterator[list[str]]:
    """Let the `step`-th call that changes a file system fail instead; yields the calls made."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def wrap(name: str) -> None:
            real = getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                if len(calls) == step:
                    raise make()
                return real(*args, **kwargs)

            patch.setattr(os, name, call)

        for name in STEPS:
            wrap(name)
        yield calls


@pytest.mark.parametrize("how", ["crash", "error"])
def test_R7_a_batch_interrupted_anywhere_is_completed_by_the_next_try(
    rig: Rig, root: Path, how: str, tmp_path: Path
) -> None:
    """As SQLite is tested: fail the 1st, 2nd, 3rd ... call until the batch goes through untouched."""
    make: Callable[[], BaseException] = (
        Crash if how == "crash" else lambda: OSError(errno.EIO, os.strerror(errno.EIO))
    )
    for step in range(1, 1000):
        for path in (root, rig.staging):
            shutil.rmtree(path)
            path.mkdir()
        s = Session(rig)
        old = s.put(b"run/last", b"old last")
        s.put(b"run/tree/f", b"tree")
        gone = s.put(b"run/gone", b"gone")
        attr = s.put(b"run/attr", b"attr")
        tree = s.look(b"run/tree").ident
        s.rig.foreign_write(b"run/theirs", b"theirs")
        ops: list[Op] = [
            s.put_op(b"new/shard", blob(1000)),
            Move(b"run/tree", b"run/tree2", Kind.DIR, tree, None),
            s.put_op(b"run/theirs", b"ours"),
            Mkdir(b"run/made", DIR_ATTRS),
            SetAttrs(b"run/attr", Kind.FILE, replace(ATTRS, mtime_ns=7_000_000_000), attr.token),
            s.put_op(b"run/last", b"new last", old.token),
            Link(b"latest", b"run", ATTRS, None),
            Remove(b"run/gone", Kind.FILE, gone.token),
        ]
        with failing_at(step, make) as calls:
            try:
                outcome = s.tier.apply(ops)
            except Crash:
                outcome = None
        # Order: `last` never before the shard; both whole or not there.
        last, shard = rig.foreign_read(b"run/last"), rig.foreign_read(b"new/shard")
        assert last in (b"old last", b"new last"), (step, calls)
        assert shard in (None, blob(1000)), (step, calls)
        assert last == b"old last" or shard is not None, (step, calls)
        assert rig.foreign_read(b"run/theirs") in (b"theirs", b"ours"), (step, calls)
        if outcome is not None and outcome.failed is not None:
            assert outcome.failed.trouble is Trouble.DOWN, (step, outcome.failed)
        done = len(outcome.applied) if outcome is not None else 0
        again = Session(rig)
        again.apply(*ops[done:])
        assert rig.foreign_read(b"new/shard") == blob(1000)
        assert rig.foreign_read(b"run/last") == b"new last"
        assert rig.foreign_read(b"run/theirs") == b"ours"
        assert rig.foreign_read(b"run/tree2/f") == b"tree"
        assert again.names(b"run") == {b"theirs", b"tree2", b"made", b"attr", b"last"}, (step, calls)
        assert again.names() == {b"run", b"new", b"latest"}
        assert set(rig.conflicts()) == {b"theirs"}, (step, calls)
        found = again.look(b"run/attr")
        assert found.attrs.mtime_ns == 7_000_000_000
        for path in (b"run/attr", b"run/last", b"new/shard", b"run/tree2/f"):
            assert again.tier.digests(path, again.look(path).token), (step, calls, path)
        again.tier.sweep(frozenset())
        assert hidden_files(root) == [], (step, calls)
        if len(calls) < step:
            assert step > 30
            return
    pytest.fail("the batch never went through")


def test_a_failed_fsync_of_a_directory_reports_nothing_applied(s: Session) -> None:
    op = s.put_op(b"f", b"data")
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        outcome = s.tier.apply([op])
    assert outcome.applied == ()
    assert trouble(outcome) is Trouble.DOWN
    assert s.apply(op)[0].ident == op.upload.ident


def test_a_stale_handle_is_tried_again_by_path(s: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    s.put(b"d/f", b"data")
    real, failures = os.listdir, [errno.ESTALE]

    def listdir(fd: int) -> list[str]:
        if failures:
            raise OSError(failures.pop(), "stale")
        return real(fd)

    monkeypatch.setattr(os, "listdir", listdir)
    assert s.names(b"d") == {b"f"}
    failures.extend([errno.ESTALE, errno.ESTALE])
    assert caught(lambda: s.tier.listdir(b"d")).trouble is Trouble.DOWN


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, Trouble.DOWN),
        (errno.EROFS, Trouble.DOWN),
        (errno.EIO, Trouble.DOWN),
        (errno.ESTALE, Trouble.DOWN),
        (errno.ETIMEDOUT, Trouble.DOWN),
        (errno.ENOTCONN, Trouble.DOWN),
        (errno.EHOSTDOWN, Trouble.DOWN),
        (errno.ENOMEM, Trouble.DOWN),
        (errno.EACCES, Trouble.REFUSED),
        (errno.EPERM, Trouble.REFUSED),
        (errno.EDQUOT, Trouble.REFUSED),
        (errno.ENAMETOOLONG, Trouble.REFUSED),
        (errno.EINVAL, Trouble.REFUSED),
        (errno.ELOOP, Trouble.REFUSED),
        (errno.EFBIG, Trouble.REFUSED),
    ],
)
def test_errnos(code: int, expected: Trouble) -> None:
    error = file_errors.tier_error(OSError(code, os.strerror(code)), "doing it")
    assert (error.trouble, error.errno) == (expected, code)
    assert str(error) == f"doing it: {os.strerror(code)}"


# -- names ---------------------------------------------------------------------------------------

ODD_NAMES = [
    b"\xff\xfe not utf-8",
    b"new\nline",
    b" ",
    b"-rf",
    b"...",
    "\u00e9\u0301\U0001f4be".encode(),
    b"n" * 255,
    b"\xff" * 255,
    b"a\\b",
    b"%2e%2e",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names(s: Session, name: bytes) -> None:
    s.apply(Mkdir(name, DIR_ATTRS))
    applied = s.put(name + b"/" + name, b"data")
    assert s.names() == {name}
    assert [(found.name, found.token) for found in s.tier.listdir(name)] == [(name, applied.token)]
    s.rig.foreign_write(name + b"/x", b"theirs")
    os.rename(
        s.rig.staging.parent / "tier" / os.fsdecode(name) / "x",
        s.rig.staging.parent / "tier" / os.fsdecode(name) / os.fsdecode(name),
    )
    assert s.put(name + b"/" + name, b"again", applied.token).conflict
    assert s.rig.conflicts() == [b"theirs"]
    found = s.look(name + b"/" + name)
    moved = s.apply(Move(name + b"/" + name, b"plain", Kind.FILE, found.ident, None))[0]
    assert s.apply(Remove(b"plain", Kind.FILE, moved.token)) == [Applied()]
    assert handle_of(path_of(handle_of(name))) == handle_of(name)
    assert file_errors.show(name).isprintable()


def test_a_name_too_long_is_refused(s: Session) -> None:
    outcome = s.tier.apply([s.put_op(b"n" * 256, b"data")])
    assert outcome.failed is not None
    assert (outcome.failed.trouble, outcome.failed.errno) == (Trouble.REFUSED, errno.ENAMETOOLONG)


def test_paths_longer_than_PATH_MAX(s: Session) -> None:
    path = b"/".join([b"d" * 200] * 25)
    s.put(path + b"/f", b"data")
    assert s.names(path) == {b"f"}
    token = s.look(path + b"/f").token
    assert s.tier.read(path + b"/f", token, 0, 4) == b"data"


def test_identities_in_tokens() -> None:
    assert [ident_of_token(token) for token in ("f12-3-4", "d7", "l9-ab", "x1", "", "f")] == [
        "12", "7", "9", "", "", "",
    ]


# -- digests -------------------------------------------------------------------------------------


def test_records_follow_in_attributes_or_manifests(s: Session, root: Path) -> None:
    few = tuple(Digest(n * 4, 4, bytes([n]) * 16) for n in range(4))
    many = tuple(Digest(n, 1, bytes([n % 256]) * 16) for n in range(5000))
    for digests, where in ((few, "xattr"), (many, "manifest")):
        size = digests[-1].offset + digests[-1].length
        upload = s.tier.begin(where, b"", size)
        applied = s.apply(Put(b"f-" + where.encode(), upload, size, ATTRS, digests, None, where))[0]
        assert s.tier.digests(b"f-" + where.encode(), applied.token) == digests
    assert "user.ckptfs" in os.listxattr(root / "f-xattr")
    if shutil.which("stat") and "user.ckptfs" not in os.listxattr(root / "f-manifest"):
        ino = (root / "f-manifest").stat().st_ino
        assert (root / ".ckptfs/manifests" / str(ino)).exists()
        s.apply(Remove(b"f-manifest", Kind.FILE, s.look(b"f-manifest").token))
        assert list((root / ".ckptfs/manifests").iterdir()) == []


@pytest.mark.parametrize(
    "digests",
    [
        (),
        (Digest(0, 100, b"a" * 16),),
        (Digest(0, 60, b"a" * 16), Digest(60, 40, b"b" * 16)),
        (Digest(0, 40, b"a" * 16), Digest(40, 60, b"b" * 16)),
        (Digest(50, 10, b"c" * 16),),
    ],
)
def test_records_survive_encoding(digests: tuple[Digest, ...]) -> None:
    record = file_records.Record(100, 123, "v\u00e9", digests)
    data = file_records.encode(record)
    assert file_records.decode(data) == record
    for at in range(len(data)):
        assert file_records.decode(data[:at]) is None
        assert file_records.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None


def test_a_hostile_record_is_no_record(s: Session, root: Path) -> None:
    applied = s.put(b"f", b"data")
    for data in (b"", b"x", b"CKF1" + bytes(60), os.urandom(3000)):
        os.setxattr(root / "f", "user.ckptfs", data)
        assert s.tier.digests(b"f", applied.token) == ()
        assert s.tier.read(b"f", applied.token, 0, 4) == b"data"


def test_kept_objects_keep_their_name_in_the_listing_of_conflicts(s: Session, root: Path) -> None:
    s.rig.foreign_write(b"run/model.pt", b"theirs")
    s.put(b"run/model.pt", b"ours")
    (kept,) = (root / ".ckptfs/conflicts").iterdir()
    stamp, n, name = kept.name.split("-", 2)
    assert len(stamp) == 16
    assert (n, name) == ("1", "model.pt")
