"""The journal: what it holds is the state, and what it acknowledged survives kill -9."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptfs.core.state import State, entry_row, inode_row, load, node_row
from ckptfs.errors import CkptfsError, Exit
from ckptfs.journal.journal import SCHEMA_VERSION, Journal
from tests.core.test_order_machine import NAMES, join
from tests.core.world import ROOT_ATTRS, RefDir, World


def rows_of(s: State) -> dict[str, object]:
    """Everything that is journaled, as rows; of dirty files without what staging knows better."""

    def inode(row: tuple[object, ...]) -> tuple[object, ...]:
        return row[:7] + row[11:] if row[14] else row

    return {
        "inodes": {i.ino: inode(inode_row(i)) for i in s.inodes.values() if i.kept and i.ino != 1},
        "nodes": {n.id: node_row(n) for n in s.nodes.values() if n.kept and n.id != 1},
        "entries": [entry_row(e) for e in s.log.values()],
        "graves": list(s.graves),
        "targets": s.targets,
        "busy": s.busy_dirs,
        "held": set(s.held_inodes),
        "attrs": {i for i in s.attr_queue if s.inodes[i].kept},
        "sent": {e.id: e.sent for e in s.log.values()},
        "puts": {i.ino: [e.id for e in i.puts] for i in s.inodes.values() if i.puts},
        "holding": {
            i.ino: sorted(n.id for n in i.holding if n.held_by is i and n.id in s.graves)
            for i in s.inodes.values()
            if any(n.held_by is i and n.id in s.graves for n in i.holding)
        },
    }


def random_state(seed: int, journal: Path) -> World:
    """Some minutes of a mount's life."""
    r = random.Random(seed)
    w = World(journal=journal)
    for _ in range(r.randrange(10, 80)):
        dirs, files = w.dirs(), w.files()
        free = [p for d in dirs for n in NAMES if (p := join(d, n)) not in w.walk()]
        match r.randrange(11):
            case 0 if free and len(dirs) < 6:
                w.mkdir(r.choice(free))
            case 1 if free:
                w.symlink(r.choice(free))
            case 2 | 3 if free:
                h = w.create(r.choice(free))
                w.write(h, 0, r.randrange(1, 4))
                if r.random() < 0.8:
                    w.close(h, killed=r.random() < 0.2)
            case 4 if files and free:
                w.rename(r.choice(files), r.choice(free))
            case 5 if len(dirs) > 1 and free:
                src, dst = r.choice(dirs[1:]), r.choice(free)
                if not dst.startswith(src + b"/"):
                    w.rename(src, dst)
            case 6 if files:
                w.unlink(r.choice(files))
            case 7 if files:
                w.chmod(r.choice(files), 0o600)
            case 8 if any(isinstance(n, RefDir) and not n.children for n in w.walk().values()):
                w.rmdir(next(p for p, n in w.walk().items() if isinstance(n, RefDir) and not n.children))
            case 9:
                w.plan(r.randrange(1, 20), hurry=True)
                for job in r.sample(w.jobs, len(w.jobs) // 2):
                    w.do_job(job, r.choice(["ok", "ok", "fail", "redo"]))
            case 10:
                take = r.choice([w.publish_take, w.publish_take, w.removals_take, w.attrs_take])
                if w.round is None and take(r.randrange(1, 9)):
                    w.round_apply(r.choice(["", "", "refuse", "lost"]), r.randrange(4))
                    w.round_answer()
        w.now += r.choice([0.1, 3.0])
    return w


@pytest.mark.parametrize("seed", range(40))
def test_load_gives_the_state_that_was_committed(seed: int, tmp_path: Path) -> None:
    w = random_state(seed, tmp_path / "journal")
    before = rows_of(w.core.state)
    w.journal.close()
    journal = Journal(tmp_path / "journal")
    loaded = load(journal.load(), ROOT_ATTRS)
    assert rows_of(loaded) == before
    assert not loaded.changed
    assert loaded.last_id >= w.core.state.last_id
    journal.close()


def test_ids_are_never_used_twice_though_only_their_steps_are_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    used: set[int] = set()
    for _ in range(5):
        state = load(journal.load(), ROOT_ATTRS)
        for _ in range(3):
            new = state.next_id()
            assert new not in used
            used.add(new)
            journal.commit(state.take_changes())
    journal.close()


def test_a_failed_transaction_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    w = World(journal=tmp_path / "journal")
    w.mkdir(b"d")
    before = w.journal.load()
    changes = w.core.state.take_changes()
    changes.gone_inodes.append(w.inode(b"d").ino)
    changes.gone_nodes.append(1 << 80)  # an integer that SQLite can't hold
    with pytest.raises(OverflowError):
        w.journal.commit(changes)
    assert w.journal.load() == before
    w.mkdir(b"e")
    assert len(w.journal.load().entries) == 2


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    with pytest.raises(CkptfsError, match="newer ckptfs") as caught:
        Journal(path)
    assert caught.value.code == Exit.FAILED
    assert str(path) in caught.value.message


@pytest.mark.parametrize("content", [b"this is no database, whatever it is" * 100, os.urandom(8192)])
def test_a_file_that_is_no_journal_is_refused_in_one_sentence_and_kept(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(CkptfsError, match="can't be read") as caught:
        Journal(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert path.read_bytes() == content


def test_a_journal_with_a_damaged_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    state = load(journal.load(), ROOT_ATTRS)
    journal.commit(state.take_changes())
    journal.close()
    damaged = bytearray(path.read_bytes())
    damaged[100:400] = b"\xff" * 300
    path.write_bytes(damaged)
    with pytest.raises(CkptfsError, match="can't be read"):
        Journal(path)


COMMIT_FOR_EVER = """
import sys
from pathlib import Path
from ckptfs.core import Core
from ckptfs.core.state import load
from ckptfs.journal.journal import Journal
from ckptfs.tiers.base import Attrs

journal = Journal(Path(sys.argv[1]))
core = Core(load(journal.load(), Attrs(0o755, 0, 0, 0, 0)))
s, n = core.state, 0
while True:
    n += 1
    i = core.names.create(s.root, b"f%d" % n, 0o644, 0, 0, s.next_id(), 0.0)
    core.content.seal(i, 0.0)
    if n % 3 == 0:
        core.names.rename(s.root, b"f%d" % n, s.root, b"r%d" % n, 0, 5.0)
    journal.commit(s.take_changes())
    sys.stdout.write("%d\\n" % n)
    sys.stdout.flush()
"""


@pytest.mark.parametrize("wait", [0.05, 0.13, 0.3])
def test_kill_9_loses_no_acknowledged_transaction(wait: float, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    child = subprocess.Popen(
        [sys.executable, "-c", COMMIT_FOR_EVER, str(path)], stdout=subprocess.PIPE, cwd=os.getcwd()
    )
    assert child.stdout is not None
    said = os.read(child.stdout.fileno(), 4)  # it runs
    time.sleep(wait)
    child.send_signal(signal.SIGKILL)
    said += child.stdout.read()
    child.stdout.close()
    child.wait()
    acknowledged = len(said[: said.rindex(b"\n") + 1].splitlines())
    assert acknowledged > 3, "the test proves nothing"
    journal = Journal(path)
    s = load(journal.load(), ROOT_ATTRS)
    for n in range(1, acknowledged + 1):
        name = b"r%d" % n if n % 3 == 0 else b"f%d" % n
        assert name in s.root.children
        assert [e.name for e in s.root.children[name].puts] == [name]
    assert len(s.root.children) - acknowledged in (0, 1), "a transaction is there in part, or out of order"
    assert len(s.log) == len(s.root.children)
    journal.close()


def test_what_could_not_be_committed_is_committed_next_time(tmp_path: Path) -> None:
    w = World(journal=tmp_path / "journal")
    s = w.core.state
    h = w.create(b"f")
    w.core.names.mkdir(s.root, b"d", 0o755, 0, 0, w.now)
    w.core.content.seal(h.inode, w.now)
    w.core.names.rename(s.root, b"f", s.inodes[h.inode.ino].parent or s.root, b"g", 0, w.now)
    before = w.journal.load()
    s.put_back(s.take_changes())
    assert w.journal.load() == before
    w.journal.commit(s.take_changes())
    assert rows_of(load(w.journal.load(), ROOT_ATTRS)) == rows_of(s)
    assert w.journal.load().last_id >= s.last_id
