"""Runs trainers, a sampler and a mount together, kills things, and judges what is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.crash.content import LINE, judge_file, line
from tests.crash.oplog import Model, OpLogReader
from tests.mounted.harness import Mount, alive, wait_for

MOUNT_LIMIT_S = 10.0
"""A mount after a kill must be usable within this."""


class Campaign:
    """One mount under load. `close` ends whatever runs."""

    def __init__(self, mount: Mount, seed: int, *, runs: int = 2, big: int = 20 << 20) -> None:
        self.mount = mount
        self.rng = random.Random(seed)
        self.seed = seed
        self.control = mount.base / "control"
        self.control.mkdir()
        self.runs = [f"run{i}" for i in range(runs)]
        self.big = big
        self.logs = {run: OpLogReader(self.control / f"{run}.oplog") for run in self.runs}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.reuploaded = 0
        self.slowest_mount = 0.0
        self.kills: list[str] = []

    # -- processes -----------------------------------------------------------------------------

    def start(self) -> None:
        """Trainers and sampler."""
        self.watch()
        for i, run in enumerate(self.runs):
            self.spawn(
                run, "tests.crash.trainer", str(self.mount.point), run, str(self.control),
                "--seed", str(self.seed * 100 + i), "--big", str(self.big),
            )  # fmt: skip
        wait_for(lambda: all((self.control / f"{run}.oplog").exists() for run in self.runs), "the trainers")

    def watch(self) -> None:
        """Start the sampler."""
        self.spawn("sampler", "tests.crash.sampler", str(self.mount.tier), str(self.control), *self.runs)

    def spawn(self, name: str, module: str, *args: str) -> None:
        root = Path(__file__).parents[2]
        output = open(self.control / f"{name}.out", "ab")  # noqa: SIM115
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", module, *args], cwd=root, stdout=output, stderr=output
        )
        output.close()

    def close(self) -> None:
        """End the helpers, gently or not."""
        for name in ("stop", "stop-now", "sampler-stop"):
            (self.control / name).touch()
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()

    # -- looking -------------------------------------------------------------------------------

    def models(self) -> dict[str, Model]:
        return {run: log.read() for run, log in self.logs.items()}

    def steps(self) -> int:
        """Steps done by all trainers together."""
        return sum(m.done for m in self.models().values())

    def check(self) -> None:
        """Nobody has complained so far."""
        for run, model in self.models().items():
            assert not model.failed, (
                f"{run} got an error (seed {self.seed}): {model.failed}\n{self.mount.log()}"
            )
        with contextlib.suppress(FileNotFoundError):
            text = (self.control / "violations").read_text()
            raise AssertionError(f"seed {self.seed}: {text}\nkills: {self.kills}\n{self.mount.log()[-6000:]}")
        for name, process in self.processes.items():
            code = process.poll()
            out = (self.control / f"{name}.out").read_text(errors="replace")
            assert code in (None, 0), f"{name} ended with {code}: {out}"

    def sampled(self, more: int = 2) -> None:
        """Wait until the sampler has looked again."""
        before = self.rounds()
        wait_for(lambda: self.rounds() >= before + more, "the sampler", 60)
        self.check()

    def rounds(self) -> int:
        try:
            return int((self.control / "rounds").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    # -- moments -------------------------------------------------------------------------------

    def uploads(self) -> set[str]:
        """Hidden files on the tier."""
        found = set()
        with contextlib.suppress(OSError):
            for home in os.scandir(self.mount.tier / ".ckptfs" / "uploads"):
                if home.is_dir():
                    with contextlib.suppress(OSError):
                        found |= {f"{home.name}/{name}" for name in os.listdir(home)}
        return found

    def moment(self) -> str:
        """Wait for a moment worth killing at; returns what it was."""
        kind = self.rng.choice(("any", "any", "hidden", "published", "done", "rename", "closed", "idle"))
        limit = time.monotonic() + 3.0
        if kind == "hidden":
            before = self.uploads()
            while time.monotonic() < limit and not self.uploads() - before:
                time.sleep(0.0005)
        elif kind == "published":
            before = self.uploads()
            while time.monotonic() < limit and before <= (now := self.uploads()):
                before = now
                time.sleep(0.0005)
        elif kind in ("done", "rename", "closed"):
            wanted = {"done": b'"d"', "rename": b'"rename"', "closed": b'"put"'}[kind]
            path = self.control / f"{self.rng.choice(self.runs)}.oplog"
            with open(path, "rb") as f:
                f.seek(0, os.SEEK_END)
                while time.monotonic() < limit and wanted not in f.read():
                    time.sleep(0.0003)
            if kind == "closed":
                time.sleep(self.rng.random() * 0.01)
        elif kind == "any":
            time.sleep(self.rng.random() * 1.0)
        return kind

    # -- killing -------------------------------------------------------------------------------

    def kill(self) -> str:
        """Something dies at some moment. Returns what; the mount is dead when it was the daemon."""
        what = self.rng.choice(
            ("daemon", "daemon", "all", "all", "worker", "workers", "frozen-daemon", "frozen-workers")
        )
        with contextlib.suppress(Exception):
            self.note_counters()
        when = self.moment()
        self.kills.append(f"{what}@{when}")
        pid, workers = self.mount.pid, self.mount.workers()
        victims = {
            "daemon": [pid], "all": [pid, *workers], "worker": workers[:1], "workers": workers,
            "frozen-daemon": [pid], "frozen-workers": workers,
        }[what]  # fmt: skip
        if what == "all":
            self.rng.shuffle(victims)
        if what.startswith("frozen"):
            # What the other side is doing goes on to its end, and nobody hears of it.
            for victim in victims:
                self.signal(victim, signal.SIGSTOP)
            time.sleep(self.rng.random() * 0.4)
        for victim in victims:
            self.signal(victim, signal.SIGKILL)
        wait_for(lambda: not any(alive(v) for v in victims), "the end of the killed")
        return what

    @contextlib.contextmanager
    def tier_away(self) -> Iterator[None]:
        """The tier's directory is gone meanwhile; back, and noticed, afterwards."""
        away = self.mount.tier.with_name("away")
        os.rename(self.mount.tier, away)
        time.sleep(self.rng.random())
        yield
        time.sleep(self.rng.random() * 0.5)
        os.rename(away, self.mount.tier)
        wait_for(lambda: self.mount.status()["tier"]["state"] == "up", "status to say that the tier is up")

    @staticmethod
    def signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def note_counters(self) -> None:
        self.reuploaded += self.mount.status()["reuploaded_bytes"]

    def wait_lost(self) -> None:
        """All trainers have met the dead mount and wait."""
        for run in self.runs:
            wait_for(lambda run=run: self.waiting(run), f"{run} to notice", 30)

    def waiting(self, run: str) -> bool:
        notes = self.logs[run].read().notes
        assert self.processes[run].poll() is None, (
            (self.control / f"{run}.out").read_text()
            + f"seed {self.seed}, kills {self.kills}\n"
            + self.mount.log()
        )
        return sum(n["note"] == "lost" for n in notes) > self.gone(run)

    def gone(self, run: str) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.control / f"{run}.go").read_text())
        return 0

    def remount(self) -> None:
        """`ckptfs mount` again, quickly."""
        started = time.monotonic()
        self.mount.start()
        took = time.monotonic() - started
        self.slowest_mount = max(self.slowest_mount, took)
        assert took < MOUNT_LIMIT_S, f"mounting took {took:.1f} s"

    def go(self) -> None:
        """Let the trainers continue."""
        for run in self.runs:
            count = self.gone(run) + 1
            part = self.control / f"{run}.go.new"
            part.write_text(str(count))
            os.replace(part, self.control / f"{run}.go")

    # -- judging -------------------------------------------------------------------------------

    def verify_mount(self) -> None:
        """All that the logs call finished is there, right; nothing else is; only doubtful names are held."""
        held = {x["path"] for x in self.mount.status()["interrupted"]}
        for run, model in self.models().items():
            certain = model.certain()
            names = tree(self.mount.point, run)
            where = f"(seed {self.seed}, kills {self.kills})"
            for name, b in certain.items():
                path = self.mount.point / name
                assert name in names, f"{name} is missing in the mount {where}\n{self.mount.log()[-5000:]}"
                if b.kind == "file":
                    got = judge_file(path)
                    assert got == b.version, f"{name}: version {got} instead of {b.version} {where}"
                    assert name not in held, f"{name} was closed, and is interrupted {where}"
                elif b.kind == "link":
                    assert os.readlink(path) == b.version, where
            extra = {n for n in names - certain.keys() if not self.explained(n, model)}
            assert not extra, f"not written by anybody, or removed: {extra} {where}"
            for name, count in model.streams.items():
                data = (self.mount.point / name).read_bytes()
                assert len(data) >= count * LINE, f"{name} lost lines {where}"
                assert data == b"".join(map(line, range(len(data) // LINE))), where

    @staticmethod
    def explained(name: str, model: Model) -> bool:
        return name in model.streams or any(name == d or name.startswith(d + "/") for d in model.doubt)

    def finish(self) -> None:
        """Stop the load, wait until everything is durable, and compare all three views."""
        self.finish_with(set())

    def finish_with(self, others: set[str]) -> None:
        """The same, with these names on the tier besides the trainers'."""
        (self.control / "stop").touch()
        for run in self.runs:
            wait_for(lambda run=run: self.processes[run].poll() is not None, f"the end of {run}", 120)
        self.check()
        self.mount.wait(timeout=240)
        self.note_counters()
        (self.control / "sampler-stop").touch()
        wait_for(lambda: self.processes["sampler"].poll() is not None, "the end of the sampler", 60)
        self.check()
        self.verify_mount()
        self.compare(others)

    def compare(self, others: set[str]) -> None:
        """The tier is the mount, byte for byte, and holds nothing else."""
        m = self.mount
        for run in self.runs:
            assert tree(m.tier, run) == tree(m.point, run)
            for name in sorted(tree(m.point, run)):
                a, b = m.point / name, m.tier / name
                if a.is_symlink():
                    assert os.readlink(a) == os.readlink(b)
                elif a.is_file():
                    assert a.read_bytes() == b.read_bytes(), name
                    assert a.stat().st_mtime_ns == b.stat().st_mtime_ns, f"{name}: mtime"
                    assert a.stat().st_mode == b.stat().st_mode, f"{name}: mode"
        assert m.tier_names() == others.union(*(tree(m.tier, run) for run in self.runs))
        self.no_rubbish()

    def no_rubbish(self) -> None:
        """No hidden upload, no conflict copy: nobody else wrote here."""
        left = wait_gone(self.uploads)
        assert not left, f"uploads left on the tier: {left} (seed {self.seed}, kills {self.kills})"
        conflicts = list((self.mount.tier / ".ckptfs" / "conflicts").rglob("*"))
        assert not conflicts, f"conflicts with nobody: {conflicts} (seed {self.seed}, kills {self.kills})"


def tree(base: Path, run: str) -> set[str]:
    """Names below a run's directory, relative to `base`."""
    found = {run} if (base / run).exists() else set()
    for top, dirs, files in os.walk(base / run):
        found |= {os.path.relpath(os.path.join(top, n), base) for n in (*dirs, *files)}
    return found


def wait_gone(look: Callable[[], set[str]], timeout: float = 10.0) -> set[str]:
    """Empty set as soon as `look` gives one, else what is left after `timeout`."""
    deadline = time.monotonic() + timeout
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
