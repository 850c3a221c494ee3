"""What a trainer did, as it wrote it down outside the mount, and what the mount must therefore show.

Each step is a line of intent before the system calls and a line `done` after they returned. A step
without `done` may have happened or not; the trainer repeats it. Positions are the numbers of the
intent lines, so one trainer's steps are totally ordered.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Version = int | str | None
"""Of a file its number, of a link its target, of a directory None."""


class OpLogWriter:
    """Appends lines; each is one write(2), so a reader sees whole lines, whoever is killed."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.n = 0
        if path.stat().st_size:
            self.n = max(json.loads(text)["n"] for text in path.read_text().splitlines())

    def intent(self, op: str, **what: Any) -> int:
        """About to do it."""
        self.n += 1
        self._line({"n": self.n, "w": "i", "op": op, **what})
        return self.n

    def done(self, n: int) -> None:
        """It returned."""
        self._line({"n": n, "w": "d"})

    def note(self, text: str, **what: Any) -> None:
        """Anything else worth knowing."""
        self.n += 1
        self._line({"n": self.n, "w": "n", "note": text, **what})

    def _line(self, record: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(record).encode() + b"\n")


@dataclass(frozen=True)
class Binding:
    """A name and what it holds since step `pos`."""

    kind: str
    version: Version
    pos: int


@dataclass
class Model:
    """The mount after the steps read so far.

    `now`: names whose state is certain. `doubt`: names that a step without `done` may have changed.
    `bound` and `unbound`: at which step a name got, and lost, a version (for the tier, which lags).
    `streams`: append-only files kept open, with the number of lines written.
    """

    now: dict[str, Binding] = field(default_factory=dict)
    doubt: dict[str, int] = field(default_factory=dict)
    bound: dict[tuple[str, Version], int] = field(default_factory=dict)
    unbound: dict[tuple[str, Version], int] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    pending: dict[str, Any] | None = None
    done: int = 0
    failed: list[str] = field(default_factory=list)

    def feed(self, record: dict[str, Any]) -> None:
        """The next line."""
        if record["w"] == "n":
            self.notes.append(record)
            if record["note"] == "error":
                self.failed.append(str(record))
        elif record["w"] == "i":
            if self.pending is not None:
                self._doubtful(self.pending)  # given up and to be repeated
            self.pending = record
            for name, _, version in self._outcome(record):
                self.doubt[name] = record["n"]
                if version != "gone":
                    self.bound.setdefault((name, version), record["n"])
            for name in self._touched(record):
                self.doubt[name] = record["n"]
                if name in self.now:
                    self.unbound.setdefault((name, self.now[name].version), record["n"])
        else:
            assert self.pending is not None, record
            assert self.pending["n"] == record["n"], record
            self._apply(self.pending)
            self.pending = None
            self.done += 1

    def _touched(self, r: dict[str, Any]) -> set[str]:
        names = {r[k] for k in ("p", "a", "b", "via") if k in r}
        inside = {q for q in self.now for a in names if q.startswith(a + "/") and r["op"] == "rename"}
        return (names | inside) if r["op"] != "stream" else set()

    def _outcome(self, r: dict[str, Any]) -> list[tuple[str, str, Any]]:
        """(name, kind, version or "gone") after the step."""
        op = r["op"]
        if op in ("put", "append"):
            out = [(r["p"], "file", r["v"])]
            return out + ([(r["via"], "", "gone")] if "via" in r else [])
        if op == "mkdir":
            return [(r["p"], "dir", None)]
        if op == "link":
            return [(r["p"], "link", r["t"])]
        if op in ("unlink", "rmdir"):
            return [(r["p"], "", "gone")]
        if op == "rename":
            out = [(r["a"], "", "gone")]
            for q, b in list(self.now.items()):
                if q == r["a"]:
                    out.append((r["b"], b.kind, b.version))
                elif q.startswith(r["a"] + "/"):
                    out += [(q, "", "gone"), (r["b"] + q[len(r["a"]) :], b.kind, b.version)]
            return out
        return []

    def _apply(self, r: dict[str, Any]) -> None:
        if r["op"] == "stream":
            self.streams[r["p"]] = r["v"]
            return
        for name, kind, version in self._outcome(r):
            self.doubt.pop(name, None)
            if version == "gone":
                self.now.pop(name, None)
            else:
                self.now[name] = Binding(kind, version, r["n"])
        for name in self._touched(r):
            self.doubt.pop(name, None)

    def _doubtful(self, r: dict[str, Any]) -> None:
        for name in self._touched(r):
            self.now.pop(name, None)
            self.doubt[name] = r["n"]

    def certain(self) -> dict[str, Binding]:
        """Names that hold exactly this, whatever the step under way does."""
        return {
            name: b
            for name, b in self.now.items()
            if name not in self.doubt and not any(name.startswith(d + "/") for d in self.doubt)
        }


class OpLogReader:
    """Follows one trainer's log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = Model()
        self._at = 0

    def read(self) -> Model:
        """Take in what was written since."""
        try:
            with open(self.path, "rb") as f:
                f.seek(self._at)
                data = f.read()
        except FileNotFoundError:
            return self.model
        end = data.rfind(b"\n") + 1
        self._at += end
        for text in data[:end].splitlines():
            self.model.feed(json.loads(text))
        return self.model
