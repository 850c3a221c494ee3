"""What a killed daemon left behind, made whole again (invariant 2)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ckptfs.core import EntryKind
from ckptfs.engine.hub import Hub
from ckptfs.errors import CkptfsError, Exit
from ckptfs.tiers.base import TierError
from ckptfs.units import format_size, plural

log = logging.getLogger("ckptfs")


async def recover(hub: Hub, is_stream: Callable[[bytes], bool], old_spills: Iterable[Path]) -> str | None:
    """Take over journal and staging. Returns the one line that says what was recovered, None for nothing."""
    core = hub.core
    spilled = hub.journal.spilled()
    hub.journal.drop_data(spilled.keys() - core.state.data_refs.keys())
    hub.spilled_ids = spilled.keys() & core.state.data_refs.keys()
    missing = set(hub.staging.recover(core.state.data_refs, spilled, old_spills))
    for data in missing:
        log.error("staging file %d, or what was spilled of it, is missing", data)

    def staged(data: int) -> tuple[int, int] | None:
        blob = hub.staging.blobs.get(data)
        if blob is None:
            return None
        st = os.stat(blob.path)
        return st.st_size, st.st_mtime_ns

    sealed, interrupted = core.content.recover(staged, is_stream, time.time())
    for e in list(core.state.log.values()):
        if e.kind == EntryKind.PUT and e.data in missing and e.id in core.state.log:
            core.order.skip(e, time.time())
            if not e.inode.dead:
                core.order.hold(e.inode, "its staged bytes are missing", time.time())
    for data in [d for d in hub.staging.blobs if d not in core.state.data_refs]:
        hub.staging.delete(data)
    bad = await _check_after_reboot(hub)
    hub.commit()
    if hub.behind:
        raise CkptfsError(
            f"what was recovered can't be journaled ({hub.behind}): give the file system of"
            f" {hub.journal.path} room",
            Exit.FAILED,
        )
    puts = [e for e in core.state.log.values() if e.kind == EntryKind.PUT]
    if not core.state.log and not core.state.held_inodes and not core.state.graves:
        return None
    size = sum(e.length for e in puts)
    held = len(core.state.held_inodes)
    others = plural(len(core.state.log) - len(puts), "other step")
    line = (
        f"recovered {plural(len(puts), 'closed file')} ({format_size(size)}) and {others} to publish, in"
        f" their order; {held} interrupted"
    )
    for inode in interrupted:
        log.warning("%s was open when the daemon died: interrupted", os.fsdecode(inode.path()))
    if sealed:
        log.info("%d files had been closed just before", len(sealed))
    if bad:
        line += f"; {bad} did not survive the reboot intact"
    return line


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def _check_after_reboot(hub: Hub) -> int:
    """Durable staging only: after a power loss, trust what matches its digests and nothing else."""
    if not hub.durable_staging:
        return 0
    boot = _boot_id()
    before = hub.journal.get("boot_id")
    hub.journal.set("boot_id", boot)
    if before in (None, boot):
        return 0
    bad = 0
    for e in list(hub.core.state.log.values()):
        if e.kind == EntryKind.PUT and not await _intact(hub, e.data, e.length):
            bad += 1
            log.error("%s did not survive the reboot intact: not published", os.fsdecode(e.path()))
            hub.core.order.skip(e, time.time())
            hub.core.order.hold(e.inode, "damaged by a reboot", time.time())
    return bad


async def _intact(hub: Hub, data: int, length: int) -> bool:
    blob = hub.staging.blobs.get(data)
    known = hub.journal.digests(data)
    if blob is None or sum(n for _, n, _ in known) < length:
        return False
    for offset, n, xxh3 in known:
        source = hub.staging.pin(blob, offset, n)
        try:
            if await hub.local("digest", source) != xxh3:
                return False
        except TierError as e:
            log.error("staging file %d: %s", data, e.message)
            return False
        finally:
            hub.staging.unpin(blob)
    return True
