"""Watches a tier all along: `python -m tests.crash.sampler TIER CONTROL RUN...`.

Checks, again and again, while trainers, workers and killers are at it:
- whatever is visible is whole (R6), and nothing of ckptfs's own is in view outside `.ckptfs`;
- R7: from the newest step seen to have reached the tier (a visible version, or the disappearance of
  one), everything finished before it and still there in the mount is visible with that content;
- R3: nothing that was visible disappears before a step that takes it away was begun.

Writes one line per violation to CONTROL/violations and a count of rounds to CONTROL/rounds.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

from tests.crash.content import judge
from tests.crash.oplog import Model, OpLogReader, Version

Place = tuple[int, int]
START: Place = (0, 0)


def place(pos: int, version: Version) -> Place:
    """Where in the order a step and what it brought stand. Renaming a directory brings its name first
    and then, where they were not on the tier yet, its files in the order of their seals (R8, R4a)."""
    return pos, version if isinstance(version, int) else 0


class Sampler:
    """State of one watch."""

    def __init__(self, tier: Path, control: Path, runs: list[str]) -> None:
        self.tier, self.control = tier, control
        self.logs = {run: OpLogReader(control / f"{run}.oplog") for run in runs}
        self.judged: dict[tuple[int, int, int], int | None] = {}
        self.seen: dict[str, dict[str, Version]] = {run: {} for run in runs}
        self.reported: set[str] = set()
        self.rounds = 0

    def complain(self, text: str) -> None:
        if text not in self.reported:
            self.reported.add(text)
            with open(self.control / "violations", "a") as f:
                f.write(f"{time.time():.3f} {text}\n")

    def look(self, name: str) -> tuple[bool, Version]:
        """(there, version); a torn file complains."""
        path = self.tier / name
        try:
            st = os.lstat(path)
            if stat.S_ISLNK(st.st_mode):
                return True, os.readlink(path)
            if stat.S_ISDIR(st.st_mode):
                return True, None
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return False, None
        with os.fdopen(fd, "rb") as f:
            st = os.fstat(fd)
            key = (st.st_ino, st.st_size, st.st_mtime_ns)
            if key not in self.judged:
                self.judged[key] = judge(f.read())
            version = self.judged[key]
        if version is None:
            self.complain(f"TORN {name}: {st.st_size} bytes, inode {st.st_ino}")
        return True, version

    def tier_state(self) -> int | None:
        """Changes when the tier goes away or comes back; None while it is away."""
        try:
            os.stat(self.tier / ".ckptfs" / "tier-id")
            return os.stat(self.tier).st_ctime_ns
        except OSError:
            return None

    def scan(self, run: str) -> dict[str, Version]:
        found: dict[str, Version] = {}
        for top, dirs, files in os.walk(self.tier / run):
            for name in (*dirs, *files):
                path = os.path.relpath(os.path.join(top, name), self.tier)
                if name.startswith(".ckptfs"):
                    self.complain(f"HIDDEN NAME IN VIEW {path}")
                there, version = self.look(path)
                if there:
                    found[path] = version
        return found

    def round(self) -> None:
        for run in self.logs:
            before = self.tier_state()
            complaints: list[str] = []
            found = self.scan(run)
            self.judge_run(run, found, complaints)
            if before is not None and before == self.tier_state():  # else it was away: look again
                self.seen[run] = found
                for text in complaints:
                    self.complain(text)
        self.rounds += 1
        (self.control / "rounds.new").write_text(str(self.rounds))
        os.replace(self.control / "rounds.new", self.control / "rounds")

    def judge_run(self, run: str, found: dict[str, Version], complaints: list[str]) -> None:
        """R7 and R3 of what was just seen of one run."""
        log = self.logs[run]
        model = log.read()
        newest, why = self.newest(run, model, found, complaints)
        if newest == START:
            return
        must = [
            (name, b)
            for name, b in model.certain().items()
            if place(b.pos, b.version) <= newest and not os.path.basename(name).startswith("events.")
        ]
        missing = [(name, b) for name, b in must if self.look(name) != (True, b.version)]
        if not missing:
            return
        still = log.read().certain()  # the trainer may have touched it since
        for name, b in missing:
            if still.get(name) == b:
                complaints.append(
                    f"ORDER {name} version {b.version} of step {b.pos} is not on the tier (there:"
                    f" {self.look(name)}), but step {newest[0]} is: {why}"
                )

    def newest(
        self, run: str, model: Model, found: dict[str, Version], complaints: list[str]
    ) -> tuple[Place, str]:
        """The last step that the tier shows signs of, and what shows it."""
        newest, why = START, ""
        for name, version in found.items():
            if os.path.basename(name).startswith("events."):
                continue
            pos = model.bound.get((name, version))
            if pos is None:
                complaints.append(f"UNKNOWN {name} version {version} on the tier: never written")
            elif place(pos, version) > newest:
                newest, why = place(pos, version), f"{name} version {version} is visible"
        for name, version in self.seen[run].items():
            if name in found or os.path.basename(name).startswith("events."):
                continue
            if self.look(name)[0]:
                found[name] = version  # missed by a listing under change
                continue
            pos = model.unbound.get((name, version))
            if pos is None:
                complaints.append(f"LOST {name} version {version} disappeared from the tier")
            elif place(pos, None) > newest:
                newest, why = place(pos, None), f"{name} version {version} is gone"
        return newest, why


def main() -> None:
    """Entry of the process."""
    sampler = Sampler(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    while not (sampler.control / "sampler-stop").exists():
        sampler.round()
        time.sleep(0.01)
    sampler.round()


if __name__ == "__main__":
    main()
