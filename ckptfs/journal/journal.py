"""SQLite persistence of the core's state.

On tmpfs (which outlives the process but not the machine) `synchronous=OFF` is right: a committed
transaction is in the page cache, and a killed process can't take it back. On disk (`--cache-dir`)
`synchronous=FULL` makes it survive power loss; the staged bytes are made durable before the seal
row by the caller.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from ckptfs.core.state import Changes, Row, Rows
from ckptfs.errors import CkptfsError, Exit

SCHEMA_VERSION = 1

TABLES = {
    "inodes": "ino INTEGER PRIMARY KEY, kind, parent, name BLOB, mode, uid, gid, atime_ns, mtime_ns,"
    " ctime_ns, size, target BLOB, node, data, unsealed, close_mark, held, held_at, attr_dirty, xattrs",
    "nodes": "id INTEGER PRIMARY KEY, kind, parent, name BLOB, present, token, ident, inode, dead_pos,"
    " held_by, setting",
    "entries": "id INTEGER PRIMARY KEY, kind, pos, inode, node, dir, name BLOB, frozen, stuck, stuck_at,"
    " data, length, mtime_ns, atime_ns, sealed_at, first_at, chunk, handle, ident",
    "sent": "entry INTEGER, offset INTEGER, length, xxh3 BLOB, PRIMARY KEY (entry, offset)",
    "spilled": "data INTEGER, extent INTEGER, PRIMARY KEY (data, extent)",
    "digests": "data INTEGER, offset INTEGER, length, xxh3 BLOB, PRIMARY KEY (data, offset)",
    "meta": "key TEXT PRIMARY KEY, value",
}

UPGRADES: dict[int, str] = {}
"""Statements that bring schema N to N+1; a journal newer than this program is refused."""


def _columns(spec: str) -> int:
    return spec.split(", PRIMARY KEY")[0].count(",") + 1


def _insert(table: str, columns: int) -> str:
    return f"INSERT OR REPLACE INTO {table} VALUES ({','.join('?' * columns)})"


_INSERTS = {name: _insert(name, _columns(spec)) for name, spec in TABLES.items()}
_SHIFT = "UPDATE entries SET pos = ? + j.key FROM json_each(?) AS j WHERE entries.id = j.value"


OPENING_ROOM = 1 << 20
"""Bytes that SQLite may need to open a journal that was not closed."""


def _free(path: Path) -> int:
    st = os.statvfs(path.parent)
    return st.f_bavail * st.f_frsize


def _os_error(e: sqlite3.Error) -> OSError:
    """What SQLite says, as an errno. (Its own error codes come with Python 3.11 only.)"""
    return OSError(errno.ENOSPC if "full" in str(e) else errno.EIO, f"{e}")


class Journal:
    """One mount's journal file. All methods are synchronous, 10-20 us a transaction on tmpfs."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """Open or create. Raises `CkptfsError` for a journal this version can't read."""
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._open_schema()
        except sqlite3.DatabaseError as e:
            if _free(path) < OPENING_ROOM:
                raise CkptfsError(
                    f"the file system of the journal {path} is full: make room there and mount again; nothing"
                    " is lost",
                    Exit.FAILED,
                ) from e
            raise CkptfsError(
                f"the journal {path} can't be read ({e}); it is kept as it is, move it away to start afresh"
                " (staged files that are not on the tier stay beside it)",
                Exit.FAILED,
            ) from e

    def _open_schema(self) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            db.execute("ROLLBACK")
            raise CkptfsError(
                f"the journal {self.path} was written by a newer ckptfs (schema {version}, this one knows"
                f" {SCHEMA_VERSION}); mount with that version",
                Exit.FAILED,
            )
        if version == 0:
            for name, columns in TABLES.items():
                db.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
        for v in range(max(version, 1), SCHEMA_VERSION):
            db.execute(UPGRADES[v])
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        db.execute("COMMIT")

    def load(self) -> Rows:
        """Everything there is."""

        def rows(table: str) -> list[Row]:
            return self._db.execute(f"SELECT * FROM {table}").fetchall()

        return Rows(
            inodes=rows("inodes"),
            nodes=rows("nodes"),
            entries=rows("entries"),
            sent=rows("sent"),
            last_id=int(self.get("last_id") or 0),
        )

    def commit(self, c: Changes) -> None:
        """Write one transaction, all or nothing. OSError (ENOSPC, EIO) when it can't be written."""
        work: list[tuple[str, list[Row]]] = [(_SHIFT, [row]) for row in c.shifted]
        if c.gone_inodes:
            work.append(("DELETE FROM inodes WHERE ino=?", [(i,) for i in c.gone_inodes]))
        if c.gone_nodes:
            work.append(("DELETE FROM nodes WHERE id=?", [(i,) for i in c.gone_nodes]))
        if c.gone_entries:
            gone = [(i,) for i in c.gone_entries]
            work += [("DELETE FROM entries WHERE id=?", gone), ("DELETE FROM sent WHERE entry=?", gone)]
        if c.unsent:
            work.append(("DELETE FROM sent WHERE entry=?", [(i,) for i in c.unsent]))
        if c.inodes:
            work.append((_INSERTS["inodes"], c.inodes))
        if c.nodes:
            work.append((_INSERTS["nodes"], c.nodes))
        if c.entries:
            work.append((_INSERTS["entries"], c.entries))
        if c.sent:
            work.append((_INSERTS["sent"], c.sent))
        if c.moved:
            work.append(("UPDATE entries SET pos=? WHERE id=?", c.moved))
        if c.last_id:
            work.append(("INSERT OR REPLACE INTO meta VALUES ('last_id', ?)", [(c.last_id,)]))
        try:
            if len(work) == 1 and len(work[0][1]) == 1:
                self._db.execute(work[0][0], work[0][1][0])  # one statement is a transaction by itself
            else:
                self._write(work)
        except sqlite3.Error as e:
            raise _os_error(e) from e

    def _write(self, work: Iterable[tuple[str, list[Row]]]) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            for sql, rows in work:
                if len(rows) == 1:
                    db.execute(sql, rows[0])
                else:
                    db.executemany(sql, rows)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # SQLite has rolled back itself when the disk is full
                db.execute("ROLLBACK")
            raise

    def has_room(self, reserve: int) -> bool:
        """Whether more than `reserve` bytes (a quarter of a small file system) are left to write to."""
        st = os.statvfs(self.path.parent)
        free, total = st.f_bavail * st.f_frsize, st.f_blocks * st.f_frsize
        reserve = min(reserve, total // 4)
        if free > reserve:
            return True
        # The file does not shrink: what rows have left of it is room too.
        pages = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        size = self._db.execute("PRAGMA page_size").fetchone()[0]
        return bool(free + pages * size > reserve)

    # -- staging's own rows --------------------------------------------------------------------

    def spilled(self) -> dict[int, set[int]]:
        """Extents that are in the spill, by data id."""
        found: dict[int, set[int]] = {}
        for data, extent in self._db.execute("SELECT data, extent FROM spilled"):
            found.setdefault(data, set()).add(extent)
        return found

    def add_spilled(self, data: int, extent: int) -> None:
        """The extent is in the spill (said before its RAM is punched). OSError as `commit`."""
        try:
            self._db.execute("INSERT OR REPLACE INTO spilled VALUES (?,?)", (data, extent))
        except sqlite3.Error as e:
            raise _os_error(e) from e

    def drop_data(self, data: Iterable[int]) -> None:
        """Forget all about these data ids (said before they are deleted). OSError as `commit`."""
        ids: list[Row] = [(d,) for d in data]
        if not ids:
            return
        try:
            self._write(
                [("DELETE FROM spilled WHERE data=?", ids), ("DELETE FROM digests WHERE data=?", ids)]
            )
        except sqlite3.Error as e:
            raise _os_error(e) from e

    def set_digests(self, data: int, digests: Iterable[tuple[int, int, bytes]]) -> None:
        """Digests of durable staging at its seal: (offset, length, xxh3). OSError as `commit`."""
        rows: list[Row] = [(data, *d) for d in digests]
        try:
            self._write([("DELETE FROM digests WHERE data=?", [(data,)]), (_INSERTS["digests"], rows)])
        except sqlite3.Error as e:
            raise _os_error(e) from e

    def digests(self, data: int) -> list[tuple[int, int, bytes]]:
        """What `set_digests` said."""
        return self._db.execute(
            "SELECT offset, length, xxh3 FROM digests WHERE data=? ORDER BY offset", (data,)
        ).fetchall()

    def get(self, key: str) -> str | None:
        """A value of the meta table."""
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set(self, key: str, value: str) -> None:
        """Set a value of the meta table. `CkptfsError` when it can't be written."""
        try:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, value))
        except sqlite3.Error as e:
            raise CkptfsError(
                f"the journal {self.path} can't be written ({e}): give its file system room", Exit.FAILED
            ) from e

    def close(self) -> None:
        """Close the file."""
        self._db.close()
