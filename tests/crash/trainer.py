"""A process that behaves like trainers do, and writes down what it did: `python -m tests.crash.trainer`.

It survives the death of the mount: on ENOTCONN it says `lost` in its log, waits for the file `go`,
and repeats the step it was in. Any other error from a system call is noted as `error` and ends it.
It ends when the file `stop` is there, between two checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.crash.content import line, make
from tests.crash.oplog import OpLogWriter

DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
KEEP = 2
PIECE = 1 << 20


class Stopped(Exception):
    """The file `stop` appeared while the mount was away."""


class Trainer:
    """One rank, in its own subdirectory of the mount."""

    def __init__(self, mount: Path, run: str, control: Path, seed: int, big: int) -> None:
        self.mount, self.run, self.control = mount, run, control
        self.rng = random.Random(seed)
        self.big = big
        self.log = OpLogWriter(control / f"{run}.oplog")
        self.version = 0
        self.kept: list[list[str]] = []
        self.lines = {"metrics.txt": 0, "events.out.tfevents.7": 0}
        self.stream_fd = -1
        self.again = False

    # -- steps that can be repeated ------------------------------------------------------------

    def at(self, name: str) -> str:
        return str(self.mount / name)

    def step(self, op: str, act: Callable[[], None], **what: object) -> None:
        """Intent, act, done; repeated as often as the mount dies."""
        n = self.log.intent(op, **what)
        self.again = False
        while True:
            try:
                act()
                break
            except OSError as e:
                if not self.died(e):
                    self.log.note("error", of=n, op=op, what=str(what), error=repr(e))
                    raise
                self.lost()
                self.again = True
        self.log.done(n)

    def died(self, e: OSError) -> bool:
        """Whether the mount is dead. The kernel answers EIO to the one request that the daemon was
        reading when it was killed; then the next one tells."""
        if e.errno != errno.EIO:
            return e.errno in DEAD
        try:
            os.statvfs(self.mount)
        except OSError as second:
            return second.errno in DEAD
        return False

    def lost(self) -> None:
        """Wait until the mount is back."""
        go = self.control / f"{self.run}.go"
        before = go.stat().st_mtime_ns if go.exists() else 0
        if self.stream_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.stream_fd)
            self.stream_fd = -1
        self.log.note("lost")
        while not go.exists() or go.stat().st_mtime_ns == before:
            if (self.control / "stop-now").exists():
                raise Stopped
            time.sleep(0.005)

    def next(self) -> int:
        self.version += 1
        return self.version

    def mkdir(self, name: str) -> None:
        self.step("mkdir", lambda: os.makedirs(self.at(name), exist_ok=True), p=name)

    def put(self, name: str, size: int, *, trunc: bool = False, fsync: bool = False) -> None:
        """A file written in pieces and closed."""
        v = self.next()
        data = make(name, v, size)

        def act() -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            if not trunc and not self.again:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.at(name))
                flags |= os.O_EXCL
            self.write(os.open(self.at(name), flags, 0o640), data, fsync)

        self.step("put", act, p=name, v=v)

    @staticmethod
    def write(fd: int, data: bytes, fsync: bool = False) -> None:
        try:
            with memoryview(data) as view:
                done = 0
                while done < len(data):
                    done += os.write(fd, view[done : done + PIECE])
            if fsync:
                os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
        os.close(fd)

    def put_in_place(self, name: str, size: int) -> None:
        """An existing file rewritten without O_TRUNC, back to front: a sealed version must be cloned."""
        v = self.next()
        data = make(name, v, size)

        def act() -> None:
            # What the crash interrupted is resolved by truncating it, not by writing into it.
            flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if self.again else 0)
            fd = os.open(self.at(name), flags, 0o640)
            try:
                for at in range((len(data) - 1) // PIECE * PIECE, -1, -PIECE):
                    piece = data[at : at + PIECE]
                    if os.pwrite(fd, piece, at) != len(piece):
                        raise OSError(errno.EIO, "short write on a cached handle")
                os.ftruncate(fd, len(data))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(fd)
                raise
            os.close(fd)

        self.step("put", act, p=name, v=v)

    def put_renamed_open(self, name: str, size: int) -> None:
        """As safetensors does: renamed to its name before it is closed."""
        v = self.next()
        data = make(name, v, size)
        via = name + ".incomplete"

        def act() -> None:
            fd = os.open(self.at(via), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
            half = len(data) // 2
            try:
                os.write(fd, data[:half])
                os.rename(self.at(via), self.at(name))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(fd)
                raise
            self.write(fd, data[half:])

        self.step("put", act, p=name, v=v, via=via)

    def rename(self, a: str, b: str) -> None:
        def act() -> None:
            try:
                os.rename(self.at(a), self.at(b))
            except FileNotFoundError:
                os.lstat(self.at(b))  # the first try had done it

        self.step("rename", act, a=a, b=b)

    def unlink(self, name: str) -> None:
        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.at(name))

        self.step("unlink", act, p=name)

    def rmdir(self, name: str) -> None:
        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self.at(name))

        self.step("rmdir", act, p=name)

    def link(self, name: str, target: str) -> None:
        """A symbolic link replaced atomically."""

        def make_link() -> None:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, self.at(name + ".new"))

        self.step("link", make_link, p=name + ".new", t=target)
        self.rename(name + ".new", name)

    def append(self, name: str) -> None:
        """Open, append a line, close."""
        k = self.lines[name.rsplit("/", 1)[1]]

        def act() -> None:
            if self.again:
                whole = b"".join(map(line, range(k + 1)))
                self.write(os.open(self.at(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), whole)
                return
            fd = os.open(self.at(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
            try:
                os.write(fd, line(k))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(fd)
                raise
            os.close(fd)

        self.step("append", act, p=name, v=k + 1)
        self.lines[name.rsplit("/", 1)[1]] += 1

    def stream(self, name: str) -> None:
        """A line to a log that stays open."""
        k = self.lines[name.rsplit("/", 1)[1]]

        def act() -> None:
            if self.stream_fd < 0:
                self.stream_fd = os.open(self.at(name), os.O_WRONLY | os.O_CREAT, 0o640)
            os.pwrite(self.stream_fd, line(k), len(line(0)) * k)

        self.step("stream", act, p=name, v=k + 1)
        self.lines[name.rsplit("/", 1)[1]] += 1

    # -- checkpoints ---------------------------------------------------------------------------

    def size(self) -> int:
        kind = self.rng.random()
        if kind < 0.15:
            return self.rng.randint(self.big // 2, self.big)
        if kind < 0.5:
            return self.rng.randint(256, 20_000)
        return self.rng.randint(100_000, 3_000_000)

    def checkpoint(self, number: int) -> None:
        style = self.rng.choice(("dcp", "hf", "flat", "safetensors"))
        files: list[str] = []
        if style == "dcp":
            top = f"{self.run}/step_{number}"
            self.mkdir(top)
            for i in range(self.rng.randint(2, 5)):
                files.append(f"{top}/__{i}_0.distcp")
                self.put(files[-1], self.size(), fsync=self.rng.random() < 0.3)
            self.put(f"{top}/.metadata.tmp", 900)
            self.rename(f"{top}/.metadata.tmp", f"{top}/.metadata")
            files.append(f"{top}/.metadata")
            self.put(f"{self.run}/latest", 300, trunc=True)
        elif style == "hf":
            tmp, top = f"{self.run}/tmp-checkpoint-{number}", f"{self.run}/checkpoint-{number}"
            self.mkdir(tmp)
            names = [f"shard-{i}.bin" for i in range(self.rng.randint(1, 4))]
            for name in (*names, "trainer_state.json"):
                self.put(f"{tmp}/{name}", self.size())
            if self.rng.random() < 0.5:
                time.sleep(self.rng.random() * 0.6)
            self.rename(tmp, top)
            files += [f"{top}/{name}" for name in (*names, "trainer_state.json")]
            self.link(f"{self.run}/latest_link", f"checkpoint-{number}")
        elif style == "safetensors":
            top = f"{self.run}/st_{number}"
            self.mkdir(top)
            for i in range(self.rng.randint(1, 3)):
                files.append(f"{top}/model-{i}.safetensors")
                self.put_renamed_open(files[-1], self.size())
            files.append(f"{top}/model.safetensors.index.json")
            self.put(files[-1], 2000)
        else:
            top = ""
            self.put(f"{self.run}/last.ckpt.tmp", self.size())
            self.rename(f"{self.run}/last.ckpt.tmp", f"{self.run}/last.ckpt")
            self.put_in_place(f"{self.run}/state.bin", self.rng.randint(300, 3 * PIECE))
            if self.rng.random() < 0.5:
                self.put_renamed_open(f"{self.run}/last.ckpt", self.size())
        self.append(f"{self.run}/metrics.txt")
        self.stream(f"{self.run}/events.out.tfevents.7")
        if top:
            self.kept.append([*files, top])
        while len(self.kept) > KEEP:
            *old, old_top = self.kept.pop(0)
            for name in old:
                self.unlink(name)
            self.rmdir(old_top)

    def work(self) -> None:
        """Until told to stop."""
        self.mkdir(self.run)
        number = 0
        while not (self.control / "stop").exists():
            number += 1
            self.checkpoint(number)
            if self.rng.random() < 0.3:
                time.sleep(self.rng.random() * 0.3)
        if self.stream_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.stream_fd)
        self.log.note("ended")


@contextlib.contextmanager
def noted(trainer: Trainer) -> Iterator[None]:
    """Whatever ends the trainer is in its log."""
    try:
        yield
    except Stopped:
        trainer.log.note("stopped")
    except BaseException as e:
        trainer.log.note("error", error=repr(e))
        raise


def main() -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mount", type=Path)
    parser.add_argument("run")
    parser.add_argument("control", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--big", type=int, default=20 << 20)
    args = parser.parse_args()
    trainer = Trainer(args.mount, args.run, args.control, args.seed, args.big)
    with noted(trainer):
        trainer.work()


if __name__ == "__main__":
    main()
