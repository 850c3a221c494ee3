"""What is not durable yet, and why: the facts behind `status`, `wait` and the state attribute."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from ckptfs import __version__
from ckptfs.core import Entry, EntryKind, Inode
from ckptfs.core.model import ROOT, Unsealed
from ckptfs.engine.hub import Hub
from ckptfs.engine.publisher import Publisher
from ckptfs.tiers.base import Kind

FILES_SHOWN = 100


def below(inode: Inode | None, top: Inode) -> bool:
    """Whether an inode is `top` or in it."""
    while inode is not None:
        if inode is top:
            return True
        inode = inode.parent
    return top.ino == ROOT


class Report:
    """Reads the engine; changes nothing."""

    def __init__(self, hub: Hub, publisher: Publisher, mountpoint: str, log_file: str) -> None:
        self.hub = hub
        self.publisher = publisher
        self.mountpoint = mountpoint
        self.log_file = log_file
        self.recovered: str | None = None

    # -- states ------------------------------------------------------------------------------

    def state_of(self, inode: Inode) -> str:
        """`dirty`, `flushing`, `durable` or `interrupted`, of a file or of all in a directory."""
        if inode.kind == Kind.DIR:
            if any(below(i, inode) for i in self.hub.core.state.held_inodes.values()):
                return "interrupted"
            if self._open_below(inode):
                return "dirty"
            entries = self.entries(inode)
            if not entries:
                return "durable"
            return "dirty" if all(e.untouched for e in entries) else "flushing"
        if inode.held:
            return "interrupted"
        if inode.unsealed is not Unsealed.NO:
            return "dirty"
        if inode.pending:
            return "dirty" if inode.puts and all(e.untouched for e in inode.puts) else "flushing"
        return "durable"

    def _open_below(self, top: Inode) -> list[Inode]:
        return [
            i
            for i in self.hub.open_writers.values()
            if i.unsealed is not Unsealed.NO and not i.dead and not i.held and below(i, top)
        ]

    def entries(self, top: Inode) -> list[Entry]:
        """Un-applied entries about `top`, anything in it, or the directories above it."""
        log = self.hub.core.state.log.values()
        if top.ino == ROOT:
            return list(log)
        return [
            e
            for e in log
            if below(e.inode, top) or below(e.dir, top) or (e.kind != EntryKind.PUT and below(top, e.inode))
        ]

    def remaining(self, tops: Iterable[Inode]) -> tuple[list[str], bool, list[Inode]]:
        """(mount paths that are not durable, whether only help from outside gets on, held files).

        Late removals and attributes count for the whole mount only.
        """
        paths: dict[str, None] = {}
        held: list[Inode] = []
        stuck_at = min((e.pos for e in self.hub.core.state.log.values() if e.stuck), default=None)
        hopeless = False
        for top in tops:
            for e in self.entries(top):
                paths[os.fsdecode(e.path())] = None
                # What is logged before the stuck entry still arrives.
                hopeless = hopeless or (stuck_at is not None and e.pos >= stuck_at)
            for i in self._open_below(top):
                paths[os.fsdecode(i.path())] = None
            held += [i for i in self.hub.core.state.held_inodes.values() if below(i, top)]
            if top.ino == ROOT and not paths and not self.hub.core.order.settled:
                paths["(removals and attributes)"] = None
                hopeless = hopeless or bool(self.publisher.stuck_removals)
        return list(paths), hopeless, held

    def stuck(self) -> list[dict[str, Any]]:
        """Entries that the tier refuses."""
        found = [
            {
                "path": os.fsdecode(e.path()),
                "operation": e.kind.name.lower(),
                "error": e.stuck,
                "since": e.stuck_at,
                "retries": e.retries,
            }
            for e in self.hub.core.state.log.values()
            if e.stuck
        ]
        found += [
            {
                "path": os.fsdecode(node.path()),
                "operation": "remove",
                "error": message,
                "since": since,
                "retries": 0,
            }
            for node, message, since in self.publisher.stuck_removals.values()
        ]
        return found

    # -- status ------------------------------------------------------------------------------

    def pending(self) -> dict[str, Any]:
        """What is at risk: entries, files, bytes, and the age of the oldest undurable byte.

        `files` and `bytes` get on to the tier by themselves, those still open included; what is kept back
        (interrupted, skipped) is at risk too, and counted apart.
        """
        state = self.hub.core.state
        files = size = still_open = 0
        oldest: float | None = None
        for e in state.log.values():
            if e.kind == EntryKind.PUT:
                files += 1
                size += e.length
                oldest = e.first_at if oldest is None else min(oldest, e.first_at)
        for i in self._open_below(state.root):
            files += 1
            size += i.size
            still_open += 1
            oldest = i.dirty_at if oldest is None else min(oldest, i.dirty_at)
        held = state.held_inodes.values()
        return {
            "entries": len(state.log) + len(state.graves) + len(state.attr_queue),
            "files": files,
            "bytes": size,
            "oldest_age_s": None if oldest is None else max(0.0, round(time.time() - oldest, 3)),
            "open_files": still_open,
            "kept_back_files": len(held),
            "kept_back_bytes": sum(i.size for i in held),
        }

    def unsent_bytes(self) -> int:
        """Sealed bytes that the tier does not have, visible or not."""
        return sum(
            e.length - e.sent_bytes for e in self.hub.core.state.log.values() if e.kind == EntryKind.PUT
        )

    def eta_s(self) -> float | None:
        """Seconds until all sealed bytes are sent at the present rate; None when there is no rate, and when
        nothing but files still being written is left.
        """
        left = self.unsent_bytes()
        if not left:
            state = self.hub.core.state
            return 0.0 if not state.log and not self._open_below(state.root) else None
        rate = self.hub.counters.flushed.per_second(time.monotonic())
        return round(left / rate, 1) if rate > 1 else None

    def _files(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for e in self.hub.core.state.log.values():
            if e.kind != EntryKind.PUT:
                continue
            if e.frozen:
                state = "publishing"
            elif e.complete:
                state = "sent"
            else:
                state = "waiting" if e.untouched else "sending"
            found.append(
                {
                    "path": os.fsdecode(e.path()), "size": e.length, "sent_bytes": e.sent_bytes,
                    "state": state,
                }
            )  # fmt: skip
            if len(found) >= FILES_SHOWN:
                return found
        for i in self._open_below(self.hub.core.state.root)[: FILES_SHOWN - len(found)]:
            found.append({"path": os.fsdecode(i.path()), "size": i.size, "sent_bytes": 0, "state": "open"})
        return found

    def tier(self) -> dict[str, Any]:
        """How the tier is: `up`, `down` or `stuck`, why, and since when."""
        health, stuck = self.hub.health, self.stuck()
        if stuck and health.state == "up":
            return {"state": "stuck", "error": stuck[0]["error"] or None, "since": stuck[0]["since"]}
        return {"state": health.state, "error": health.error or None, "since": health.since}

    def status(self) -> dict[str, Any]:
        """The object of `ckptfs status --json`."""
        hub = self.hub
        c, staging = hub.counters, hub.staging
        now = time.monotonic()
        held = hub.core.state.held_inodes.values()
        return {
            "mountpoint": self.mountpoint,
            "pid": os.getpid(),
            "log_file": self.log_file,
            "version": __version__,
            "draining": hub.draining,
            "uptime_s": round(time.time() - c.started, 1),
            "tier": {
                "url": hub.config.tier,
                **self.tier(),
                "notes": list(hub.pool.notes),
            },
            "fsync": hub.config.fsync,
            "fsync_rules": [list(r) for r in hub.config.fsync_rules],
            "cache": {
                "limit_bytes": hub.budget,
                "dirty_bytes": staging.dirty_ram,
                "clean_bytes": staging.clean_bytes,
                "spilled_bytes": staging.spilled_bytes,
                "spill_limit_bytes": hub.config.spill_size if hub.config.spill_dir else 0,
                "used_bytes": staging.used,
            },
            "pending": self.pending(),
            "absorb_bytes_per_s": round(c.absorbed.per_second(now)),
            "flush_bytes_per_s": round(c.flushed.per_second(now)),
            "eta_s": self.eta_s(),
            "files": self._files(),
            "files_total": sum(e.kind == EntryKind.PUT for e in hub.core.state.log.values())
            + len(self._open_below(hub.core.state.root)),
            "interrupted": [
                {"path": os.fsdecode(i.path()), "size": i.size, "reason": i.held, "since": i.held_at}
                for i in held
                if i.held != "skipped"
            ],
            "stuck": self.stuck(),
            "skipped": [{"path": os.fsdecode(i.path()), "size": i.size} for i in held if i.held == "skipped"],
            "held_back_s": round(c.held_back_s, 3),
            "writers_waiting": c.writers_waiting,
            "conflicts": hub.core.state.conflicts,
            "reuploaded_bytes": c.reuploaded_bytes,
            "errors": c.errors,
            "journal_error": hub.behind or None,
            "last_durable": (
                {"path": c.last_durable_path, "time": c.last_durable_time} if c.last_durable_time else None
            ),
            "recovered": self.recovered,
        }
