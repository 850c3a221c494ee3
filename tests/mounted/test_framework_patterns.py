"""How checkpoints are really written and read: unmodified torch, safetensors and numpy, and their habits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.mounted.harness import Mount, wait_for

# There is no wheel for every Python that ckptfs runs on.
torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
load_file, save_file = (
    getattr(pytest.importorskip("safetensors.torch"), name) for name in ("load_file", "save_file")
)

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> State:
    torch.manual_seed(1)
    return {f"layer{i}": torch.randn(700, 500 + i) for i in range(4)}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def torch_path(state: State, path: Path) -> None:
    torch.save(state, str(path))


def torch_file(state: State, path: Path) -> None:
    with open(path, "wb") as f:
        torch.save(state, f)


def torch_legacy(state: State, path: Path) -> None:
    torch.save(state, str(path), _use_new_zipfile_serialization=False)


def torch_then_fsync(state: State, path: Path) -> None:
    """DLIO, Megatron: fsync without flush, so that the tail is written after it."""
    with open(path, "wb") as f:
        torch.save(state, f)
        os.fsync(f.fileno())
        f.flush()


@pytest.mark.parametrize(
    "save", [torch_path, torch_file, torch_legacy, torch_then_fsync], ids=lambda s: s.__name__
)
def test_torch_save_and_load(shared: Mount, tensors: State, save: Callable[[State, Path], None]) -> None:
    path = shared.point / f"{save.__name__}.pt"
    save(tensors, path)
    assert same(torch.load(path), tensors)
    if save is not torch_legacy:
        assert same(torch.load(path, mmap=True), tensors)
    save({k: v + 1 for k, v in tensors.items()}, path)
    shared.wait(path)
    assert same(torch.load(shared.tier / path.name), {k: v + 1 for k, v in tensors.items()})


def test_an_overwritten_checkpoint_stays_whole_for_who_has_it_mapped_after_a_rename(
    shared: Mount, tensors: State
) -> None:
    path = shared.point / "mapped.pt"
    torch.save(tensors, path)
    mapped = torch.load(path, mmap=True)
    torch.save({k: v * 2 for k, v in tensors.items()}, str(path) + ".tmp")
    os.replace(str(path) + ".tmp", path)
    assert same(mapped, tensors)
    shared.wait(path)
    assert same(mapped, tensors)
    assert same(torch.load(path, mmap=True), {k: v * 2 for k, v in tensors.items()})


def test_safetensors(shared: Mount, tensors: State) -> None:
    path = shared.point / "model.safetensors"
    save_file(tensors, path)
    assert same(load_file(path), tensors)
    save_file({k: v + 1 for k, v in tensors.items()}, path)
    shared.wait(path)
    for top in (shared.point, shared.tier):
        assert same(load_file(top / path.name), {k: v + 1 for k, v in tensors.items()})
    assert not [n for n in os.listdir(shared.point) if n.startswith(".tmp")]


def test_numpy(shared: Mount) -> None:
    a, b = np.arange(500_000.0).reshape(1000, 500), np.ones(77, dtype=np.int8)
    d = shared.point / "np"
    d.mkdir()
    np.save(d / "a.npy", a)
    np.savez(d / "ab.npz", a=a, b=b)
    np.savez_compressed(d / "c.npz", a=a)
    a.tofile(d / "raw")
    m = np.lib.format.open_memmap(d / "m.npy", mode="w+", dtype=np.float64, shape=(1000, 500))
    m[:] = a
    m[17, 3] = -1
    m.flush()
    del m
    shared.wait(d)
    for top in (d, shared.tier / "np"):
        assert np.array_equal(np.load(top / "a.npy"), a)
        assert np.array_equal(np.load(top / "a.npy", mmap_mode="r"), a)
        with np.load(top / "ab.npz") as z:
            assert np.array_equal(z["a"], a)
            assert np.array_equal(z["b"], b)
        with np.load(top / "c.npz") as z:
            assert np.array_equal(z["a"], a)
        assert np.array_equal(np.fromfile(top / "raw"), a.ravel())
        m = np.load(top / "m.npy")
        assert m[17, 3] == -1
        m[17, 3] = a[17, 3]
        assert np.array_equal(m, a)


def test_dcp(shared: Mount, tensors: State) -> None:
    for step in (1, 2):
        dcp.save({k: v + step for k, v in tensors.items()}, checkpoint_id=shared.point / "dcp", no_dist=True)
    shared.wait(shared.point / "dcp")
    for top in (shared.point, shared.tier):
        found = {k: torch.zeros_like(v) for k, v in tensors.items()}
        dcp.load(found, checkpoint_id=top / "dcp", no_dist=True)
        assert same(found, {k: v + 2 for k, v in tensors.items()})
    assert ".metadata" in os.listdir(shared.tier / "dcp")


def test_renamed_before_close(shared: Mount) -> None:
    """safetensors: the tier keeps the old file until the close."""
    final = shared.point / "final"
    final.write_bytes(b"old")
    shared.wait(final)
    with open(shared.point / "tmp", "w+b", buffering=0) as f:
        f.truncate(100)
        f.write(b"new")
        os.rename(shared.point / "tmp", final)
        f.write(b"er")
        assert final.read_bytes()[:5] == b"newer"
        (shared.point / "other").write_bytes(b"o")
        shared.wait(shared.point / "other")
        assert (shared.tier / "final").read_bytes() == b"old"
    shared.wait(final)
    assert (shared.tier / "final").read_bytes() == b"newer" + bytes(95)
    assert not (shared.tier / "tmp").exists()


def test_duplicated_descriptors_seal_at_the_last_close(shared: Mount) -> None:
    path = shared.point / "dup"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"one")
    other = os.dup(fd)
    os.close(fd)
    (shared.point / "after").write_bytes(b"x")
    shared.wait(shared.point / "after")
    assert shared.state("dup") == "dirty"
    assert not (shared.tier / "dup").exists()
    os.write(other, b"two")
    os.close(other)
    shared.wait(path)
    assert (shared.tier / "dup").read_bytes() == b"onetwo"


def test_a_forked_child_that_exits_does_not_seal_its_parents_file(shared: Mount) -> None:
    path = shared.point / "forked"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"parent ")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (shared.point / "after").write_bytes(b"y")
    shared.wait(shared.point / "after")
    assert not (shared.tier / "forked").exists()
    os.write(fd, b"goes on")
    os.close(fd)
    shared.wait(path)
    assert (shared.tier / "forked").read_bytes() == b"parent goes on"


def test_a_child_writes_through_an_inherited_descriptor_after_its_parents_close(shared: Mount) -> None:
    path = shared.point / "inherited"
    go_r, go_w = os.pipe()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"parent ")
    pid = os.fork()
    if pid == 0:
        os.read(go_r, 1)
        os.write(fd, b"child")
        os._exit(0)
    os.close(fd)
    (shared.point / "after").write_bytes(b"z")
    shared.wait(shared.point / "after")
    assert not (shared.tier / "inherited").exists()
    os.write(go_w, b"g")
    os.waitpid(pid, 0)
    for p in (go_r, go_w):
        os.close(p)
    shared.wait(path)
    assert (shared.tier / "inherited").read_bytes() == b"parent child"


def test_rotation_deletes_the_old_before_the_new_is_durable(shared: Mount) -> None:
    """accelerate: rmtree of the oldest comes first; the tier never has less than one whole checkpoint."""
    import shutil

    top, tier = shared.point / "rot", shared.tier / "rot"
    seen: list[set[str]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            try:
                names = {p.name for p in tier.iterdir() if (p / "done").exists() and (p / "model").exists()}
            except FileNotFoundError:
                continue
            seen.append(names)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for step in range(8):
            if step >= 2:
                shutil.rmtree(top / f"checkpoint_{step - 2}")
            (top / f"checkpoint_{step}").mkdir(parents=True)
            (top / f"checkpoint_{step}" / "model").write_bytes(os.urandom(1_500_000))
            (top / f"checkpoint_{step}" / "done").write_bytes(b"done")
            if step == 1:
                shared.wait(top)
                seen.clear()
        shared.wait()
    finally:
        stop.set()
        watcher.join()
    assert all(seen), "a moment without any whole checkpoint"
    assert {p.name for p in tier.iterdir()} == {"checkpoint_6", "checkpoint_7"}


def test_orbax_locks_and_directory_renames(shared: Mount) -> None:
    import fcntl

    tmp = shared.point / "5.orbax-checkpoint-tmp-1"
    tmp.mkdir()
    fd = os.open(tmp / "d.__lock", os.O_WRONLY | os.O_CREAT, 0o666)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    assert os.fstat(fd).st_ino == (tmp / "d.__lock").stat().st_ino
    os.write(fd, b"ocdbt")
    os.fsync(fd)
    os.rename(tmp / "d.__lock", tmp / "d")
    dir_fd = os.open(tmp, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(dir_fd)
    os.close(dir_fd)
    fcntl.lockf(fd, fcntl.LOCK_UN)
    os.close(fd)
    os.rename(tmp, shared.point / "5")
    shared.wait()
    assert (shared.tier / "5" / "d").read_bytes() == b"ocdbt"
    assert not [n for n in os.listdir(shared.tier) if "tmp" in n]


def test_direct_io_and_append_as_fastpersist_does(shared: Mount) -> None:
    import mmap

    path = shared.point / "fast"
    block = mmap.mmap(-1, 1 << 20)
    block.write(b"d" * (1 << 20))
    fd = os.open(path, os.O_DIRECT | os.O_CREAT | os.O_WRONLY)
    assert os.write(fd, block) == 1 << 20
    os.close(fd)
    with open(path, "ab") as f:
        f.write(b"tail")
    fd = os.open(path, os.O_DIRECT | os.O_APPEND | os.O_WRONLY)
    os.fsync(fd)
    os.close(fd)
    shared.wait(path)
    assert (shared.tier / "fast").read_bytes() == b"d" * (1 << 20) + b"tail"


def test_shell_tools(shared: Mount, local: Path) -> None:
    """cp, mv, tar, rsync-like habits: modes, times and bytes arrive."""
    src = local / "src"
    src.mkdir()
    (src / "f").write_bytes(b"f" * 100_000)
    os.chmod(src / "f", 0o751)
    os.utime(src / "f", ns=(10**18, 10**18))
    os.symlink("f", src / "l")
    script = """
        set -e
        cp -a "$1" "$2/cp"; tar -C "$1" -cf "$2/t.tar" .; mkdir "$2/tar"; tar -C "$2/tar" -xpf "$2/t.tar"
        cp -a "$1" "$2/gone"; mv "$2/gone" "$2/mv"; dd if="$1/f" of="$2/dd" bs=7k conv=fsync status=none
        ln -sfn cp "$2/link"; ln -sfn mv "$2/link"; touch -d @1000 "$2/dd"; du -s "$2" >/dev/null
        df "$2" >/dev/null
        rm -rf "$2/cp"
    """
    subprocess.run(["bash", "-c", script, "-", str(src), str(shared.point)], check=True)
    shared.wait()
    for name in ("tar", "mv"):
        st = (shared.tier / name / "f").stat()
        assert (st.st_mode & 0o7777, st.st_mtime_ns, st.st_size) == (0o751, 10**18, 100_000)
        assert os.readlink(shared.tier / name / "l") == "f"
    assert os.readlink(shared.tier / "link") == "mv"
    assert (shared.tier / "dd").stat().st_mtime == 1000
    assert not (shared.tier / "cp").exists()


def test_a_process_that_fails_in_mid_save_closes_like_any_other(shared: Mount) -> None:
    """MemoryError, sys.exit, an exception: ordinary closes, the file is published as it is."""
    for name, how in (("memory", "raise MemoryError"), ("exit", "sys.exit(3)"), ("hard", "os._exit(1)")):
        script = f"import os, sys\nf = open(sys.argv[1], 'wb', buffering=0)\nf.write(b'part')\n{how}\n"
        subprocess.run(
            [sys.executable, "-c", script, str(shared.point / name)], check=False, stderr=subprocess.DEVNULL
        )
        shared.wait(shared.point / name)
        assert (shared.tier / name).read_bytes() == b"part"
    wait_for(lambda: not shared.status()["interrupted"], "nothing interrupted", 1)


def test_fdatasync_waits_for_the_tier_like_fsync(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    mount.start("--fsync", "tier", config="settle_time = 3600\n")
    for name, flags in (("direct", os.O_WRONLY), ("cached", os.O_RDWR)):
        fd = os.open(mount.point / name, flags | os.O_CREAT)
        os.write(fd, b"data")
        os.fdatasync(fd)
        assert (mount.tier / name).read_bytes() == b"data"
        os.close(fd)
