"""One mount's life: recover, serve, drain. Builds the parts and runs their tasks."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from ckptfs import leftover, memory, mountpoint
from ckptfs.config import Config
from ckptfs.control.server import ControlServer
from ckptfs.core import Core, EntryKind
from ckptfs.core.state import load
from ckptfs.engine.absorb import Absorb
from ckptfs.engine.admission import Admission
from ckptfs.engine.fetch import Fetcher
from ckptfs.engine.hub import HANGING, READING, Hub
from ckptfs.engine.publisher import Publisher
from ckptfs.engine.recovery import recover
from ckptfs.engine.report import Report
from ckptfs.engine.space import SpaceInfo
from ckptfs.engine.supervise import supervised
from ckptfs.engine.uploader import Uploader, backoff
from ckptfs.engine.view import View
from ckptfs.errors import CkptfsError, Exit
from ckptfs.flush.pool import PoolSettings, WorkerPool
from ckptfs.fuse.session import FuseSession
from ckptfs.journal.journal import Journal
from ckptfs.paths import MountPaths
from ckptfs.resume import mount_arguments, resume_command
from ckptfs.staging import Area, Staging
from ckptfs.tiers import traits_of
from ckptfs.tiers.base import Attrs, TierError, TierInfo, Trouble
from ckptfs.units import format_size

log = logging.getLogger("ckptfs")

Say = Callable[[dict[str, object]], None]

PROBE_S = 10.0
"""How long a tier may take to answer at the start."""

HANG_S = 10.0
"""A tier call that takes longer hangs. Chunks are small enough."""

LEAST_BUDGET = 8 << 20
"""Bytes; with less a mount is of no use."""

STATE_S = 1.0
"""How often `mount.json` is brought up to date."""

LAST_LINE_S, HURRIED_LAST_LINE_S = 2.0, 0.2
"""How long clients get at the end to take their last line; the second one after a second signal."""


class MountSession:
    """Everything of one daemon."""

    def __init__(self, config: Config, paths: MountPaths) -> None:
        self.config = config
        self.paths = paths
        self.area = Area(
            paths, config.cache_size, config.cache_dir, config.spill_dir if config.spill_size else ""
        )
        self._unmounted = trio.Event()
        self._stop_signals = 0

    async def run(self, say: Say) -> int:
        """Returns the exit code."""
        self.area.lock()
        leftover.check(self.paths, self.config.cache_dir)
        leftover.remember(self.paths, self.config.cache_dir)
        self.area.prepare()
        journal = Journal(self.area.journal, durable=self.area.durable)
        try:
            self._remember_spill(journal)
            return await self._run(journal, say)
        finally:
            journal.close()
            if self._nothing_left:
                self.area.destroy()
                leftover.forget(self.paths)

    _nothing_left = False
    _serving = False

    def _remember_spill(self, journal: Journal) -> None:
        """What was spilled is found again although this mount spills elsewhere, or not at all."""
        known = json.loads(journal.get("spill_dirs") or "[]")
        self.area.old_spills = [Path(d) for d in known]
        if self.area.spill is not None and str(self.area.spill) not in known:
            journal.set("spill_dirs", json.dumps([*known, str(self.area.spill)]))

    async def _run(self, journal: Journal, say: Say) -> int:
        config = self.config
        settings = PoolSettings(
            config.tier, self._uuid(), count=config.workers, threads=config.worker_threads,
            niceness=config.niceness, options=self._tier_options(), pass_fds=(self.area.lock_fd,),
        )  # fmt: skip
        now = time.time_ns()
        root = Attrs(0o755, os.geteuid(), os.getegid(), now, now)
        core = Core(
            load(journal.load(), root),
            settle_s=config.settle_time,
            chunk_bytes=config.chunk_size,
            traits=traits_of(config.tier),
        )
        staging = Staging(self.area.data, self.area.cache, self.area.spill)
        async with trio.open_nursery() as nursery:
            pool = WorkerPool(settings, nursery)
            hub = self.hub = Hub(config, core, journal, staging, pool)
            admission = Admission(hub)
            self._fit(admission)
            fetcher = Fetcher(hub, admission, nursery)
            absorb = Absorb(hub, admission, fetcher)
            view = View(hub, nursery)
            uploader, publisher = Uploader(hub), Publisher(hub, fetcher.rescue)
            report = self.report = Report(hub, publisher, self.paths.mountpoint, config.log_file)
            space = SpaceInfo(hub)
            self.fuse = FuseSession(hub, absorb, view, space, report.state_of, self.paths.mountpoint)
            control = self.control = ControlServer(
                hub, publisher, view, report, self._unmount, self._unmounted, self.fuse.forget_name
            )
            try:
                await pool.start()
                lines = await self._begin(absorb)
                if not hub.blind:
                    await view.get_acquainted()
                for task in (
                    uploader.run, publisher.run, admission.run_spill, absorb.run_streams, space.run,
                    self._sample, self._watch, self._write_state,
                    partial(admission.run_pressure, memory.available, _total_memory()),
                ):  # fmt: skip
                    nursery.start_soon(supervised, hub, task, _name(task))
                self.paths.create()
                await nursery.start(control.run, self.paths.control)
                lines += await trio.to_thread.run_sync(mountpoint.take_over, self.paths.mountpoint)
                self.fuse.open()
                await nursery.start(self._signals)
                if hub.blind:
                    nursery.start_soon(supervised, hub, self._look_for_tier, _name(self._look_for_tier))
                say({"ok": True, "lines": lines})
                for line in lines:
                    log.info("%s", line)
                _notify_systemd("READY=1")
                self._serving = True
                await self.fuse.serve()
                self._unmounted.set()
                await self._drain()
                code = self._outcome()
            except CkptfsError:
                # A mount that was refused leaves no empty staging behind.
                self._nothing_left = not self._serving and not self._staged()
                raise
            finally:
                with trio.CancelScope(deadline=trio.current_time() + 10, shield=True):
                    await pool.close()
                nursery.cancel_scope.cancel()
        self._save_state()
        return code

    def _fit(self, admission: Admission) -> None:
        """A staging file system that is not ours alone may have less room than the budget wants."""
        room = self.area.room()
        admission.room, admission.keep_reserve = self.area.room, self.area.keep_reserve
        admission.fit()
        self.hub.last_resort = self.area.give_reserve
        if room is not None and self.hub.budget < LEAST_BUDGET and not self._staged():
            raise CkptfsError(
                f"the file system of {self.area.data} has only {format_size(room[0])} free, too little to"
                " stage in: make room there, or name another directory with --cache-dir",
                Exit.UNSUPPORTED,
            )

    # -- beginning ---------------------------------------------------------------------------

    def _uuid(self) -> str:
        """This mount point's identity on this machine: whose hidden files on the tier are whose."""
        path = Path(self.paths.uuid)
        try:
            found = path.read_text().strip()
        except FileNotFoundError:
            found = ""
        if not found:
            found = uuid.uuid4().hex
            path.write_text(found + "\n")
        return found

    @property
    def _tier_record(self) -> Path:
        return Path(self.paths.uuid).with_name("tier.json")

    def _known_tier(self) -> dict[str, str]:
        """URL and identity of the tier this mount point used last."""
        try:
            found = json.loads(self._tier_record.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _tier_options(self) -> dict[str, str]:
        """With the identity known, an empty mount point is not taken for an empty tier."""
        known = self._known_tier()
        if known.get("url") == self.config.tier and known.get("tier_id"):
            return {**self.config.options, "tier_id": known["tier_id"]}
        return dict(self.config.options)

    async def _begin(self, absorb: Absorb) -> list[str]:
        """Probe the tier, recover what an earlier daemon left; returns what to tell the user."""
        hub, config = self.hub, self.config
        self._check_same_tier()  # before the probe, which makes a tier of the directory
        info: TierInfo | None = None
        lines: list[str] = []
        try:
            with trio.move_on_after(PROBE_S):
                info = await hub.local("probe")
            if info is None:
                raise TierError(Trouble.DOWN, f"no answer within {PROBE_S:g} s")
        except TierError as e:
            if not config.allow_tier_down or e.trouble == Trouble.REFUSED:
                raise CkptfsError(
                    f"the tier {config.tier} can't be used: {e.message}{self._way_out(e)}", Exit.TIER_DOWN
                ) from e
            hub.health.down(READING, e)
            hub.blind = True
            lines.append(
                f"the tier does not answer ({e.message}); until it does, files are staged and only those are"
                " visible"
            )
        if info is not None:
            self._remember_tier(info)
        hub.journal.set("tier", config.tier)
        self.report.recovered = await recover(hub, absorb.is_stream, self.area.old_spills)
        if info is not None:
            await self._root_attributes()
            await self._sweep()
        policy = (
            "the bytes are safe from process death (cache)" if config.fsync == "cache" else "durable (tier)"
        )
        lines.insert(0, f"mounted {self.paths.mountpoint} on {config.tier}; fsync returns when {policy}")
        if hub.budget < config.cache_size:
            lines.append(
                f"the cache is limited to {format_size(hub.budget)}: there is no more room where it is staged"
            )
        lines += [f"tier: {note}" for note in (info.notes if info is not None else ())]
        if self.report.recovered:
            lines.append(self.report.recovered)
        return lines

    def _way_out(self, error: TierError) -> str:
        """What to do about a tier that could not be probed, as the end of the sentence."""
        if error.trouble == Trouble.REFUSED:
            return ""
        if error.errno == errno.ENODEV and self._tier_options().get("tier_id"):
            # Another one: staging files till it comes back would be for one that may never come.
            record = shlex.quote(str(self._tier_record))
            return f"; if it was made anew on purpose, run rm {record}, and mount again to use it as it is"
        return " (--allow-tier-down mounts anyway)"

    def _remember_tier(self, info: TierInfo) -> None:
        self._tier_record.write_text(json.dumps({"url": self.config.tier, "tier_id": info.tier_id}))

    async def _sweep(self) -> bool:
        """Remove hidden files of ours that no journal row names. Only while nothing is being sent."""
        keep = frozenset(e.upload.handle for e in self.hub.core.state.log.values() if e.upload is not None)
        try:
            await self.hub.pool.call("sweep", keep)
        except TierError as e:
            self.hub.health.down(READING, e)
            return False
        return True

    async def _look_for_tier(self) -> None:
        """Mounted without an answer from the tier: what the probe does is done when it comes."""
        tries = 0
        while self.hub.blind:
            await trio.sleep(backoff(tries))
            tries += 1
            try:
                info = await self.hub.pool.call("probe")
            except TierError as e:
                self.hub.health.down(READING, e)
                continue
            self._remember_tier(info)
            if not await self._sweep():
                continue
            await self._root_attributes()
            self.hub.blind = False
            self.hub.health.up(READING)
            self.hub.work.beat()
            for note in info.notes:
                log.info("tier: %s", note)

    def _check_same_tier(self) -> None:
        """What is staged for one tier must not be published to another."""
        before = self.hub.journal.get("tier")
        if before is not None and before != self.config.tier and self._staged():
            raise CkptfsError(
                f"files for the tier {before} are still staged for {self.paths.mountpoint}: mount with that"
                f" tier first (run {resume_command(self.paths)}), and let it drain",
                Exit.USAGE,
            )

    def _staged(self) -> bool:
        """Whether there is anything that the tier does not have, or has too much."""
        state = self.hub.core.state
        return bool(
            state.log
            or state.graves
            or state.held_inodes
            or state.attr_queue
            or any(i.unsealed for i in state.inodes.values())
        )

    async def _root_attributes(self) -> None:
        root = self.hub.core.state.root
        if root.attr_dirty:
            return
        try:
            found = await self.hub.pool.call("stat", b"")
        except TierError as e:
            self.hub.health.down(READING, e)
            return
        if found is not None:
            a = found.attrs
            root.mode, root.uid, root.gid = a.mode, a.uid, a.gid
            root.atime_ns, root.mtime_ns, root.ctime_ns = a.atime_ns, a.mtime_ns, a.mtime_ns

    # -- serving -----------------------------------------------------------------------------

    async def _sample(self) -> None:
        counters = self.hub.counters
        while True:
            now = time.monotonic()
            counters.absorbed.sample(now)
            counters.flushed.sample(now)
            await trio.sleep(0.5)

    async def _watch(self) -> None:
        """Say so when the tier does not even fail: a hard NFS mount without its server hangs."""
        while True:
            await trio.sleep(1.0)
            age = self.hub.pool.oldest_tier_call_s
            if age > HANG_S:
                self.hub.health.down(HANGING, TierError(Trouble.DOWN, f"no answer for {age:.0f} s"))
            else:
                self.hub.health.up(HANGING)

    async def _write_state(self) -> None:
        last = ""
        while True:
            text = self._state_text()
            if text != last:
                try:
                    self._save_state()
                    last = text
                except OSError as e:
                    log.warning("%s can't be written: %s", self.paths.state, e.strerror)
            await trio.sleep(STATE_S)

    def _state_text(self) -> str:
        state = self.hub.core.state
        # Files alone, as its readers say; directories and renames are staged with them.
        files = {e.inode.ino for e in state.log.values() if e.kind in (EntryKind.PUT, EntryKind.LINK)}
        files |= {i.ino for i in self.hub.open_writers.values() if i.unsealed and not i.dead}
        return json.dumps(
            {
                "mountpoint": self.paths.mountpoint, "tier": self.config.tier, "pid": os.getpid(),
                "log_file": self.config.log_file, "started": self.hub.counters.started,
                "staged": len(files | state.held_inodes.keys()),
                "resume": mount_arguments(self.config, self.paths),
            }
        )  # fmt: skip

    def _save_state(self) -> None:
        if self._nothing_left:
            return
        path = Path(self.paths.state)
        part = path.with_suffix(".part")
        part.write_text(self._state_text())
        os.replace(part, path)

    async def _unmount(self) -> None:
        """For `ckptfs umount`: refuse when in use."""
        if self._unmounted.is_set():
            return
        mountpoint = self.paths.mountpoint
        command = ["umount", mountpoint] if os.geteuid() == 0 else ["fusermount3", "-u", mountpoint]
        done = await trio.run_process(command, check=False, capture_stderr=True, stdin=subprocess.DEVNULL)
        if done.returncode and not self._unmounted.is_set():
            raise CkptfsError(
                f"{mountpoint} can't be unmounted ({done.stderr.decode(errors='replace').strip()}): end or"
                " move the processes that use it",
                Exit.BUSY,
            )

    async def _signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                self._stop_signals += 1
                if self._stop_signals > 1:
                    log.warning("a second signal: ending now, what is not durable stays staged")
                    self.control.give_up_at = trio.current_time()
                    self.hub.changed.beat()
                    self.hub.pool.hurry()
                    self.fuse.terminate()
                    continue
                log.info(
                    "%s: unmounting, draining for at most %g s", signal.Signals(number).name,
                    self.config.drain_timeout,
                )  # fmt: skip
                _notify_systemd("STOPPING=1")
                self.control.give_up_at = trio.current_time() + self.config.drain_timeout
                self.hub.changed.beat()
                self.fuse.terminate_at(self.control.give_up_at)
                await self.fuse.detach()

    # -- ending ------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Publish what is left, for as long as it takes or is allowed."""
        hub = self.hub
        hub.draining = True
        hub.work.beat()
        hub.changed.beat()
        while not hub.core.order.settled:
            at = self.control.give_up_at
            if at is not None and trio.current_time() >= at:
                break
            await hub.changed.wait(0.25 if at is None else max(0.0, min(0.25, at - trio.current_time())))
        hub.changed.beat()
        since = trio.current_time()
        while self.control.answering:  # let `ckptfs umount` and `wait` have their last line
            if trio.current_time() > since + (HURRIED_LAST_LINE_S if self._stop_signals > 1 else LAST_LINE_S):
                break
            await hub.changed.wait(0.01)

    def _outcome(self) -> int:
        state = self.hub.core.state
        left = {e.inode.ino for e in state.log.values()}
        # A request that was cut off may have left a file changed and not sealed, open or not.
        left |= {i.ino for i in self.hub.core.order.unsealed() if not i.held}
        if left or state.held_inodes or not self.hub.core.order.settled:
            log.warning(
                "%d files are not durable and %d are interrupted or skipped; they stay staged for the next"
                " mount of %s", len(left), len(state.held_inodes), self.paths.mountpoint,
            )  # fmt: skip
            return Exit.LEFT_OVER
        log.info("everything is durable")
        self._nothing_left = True
        return Exit.OK


def _name(task: Callable[..., object]) -> str:
    return str(getattr(getattr(task, "func", task), "__qualname__", task))


def _total_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _notify_systemd(message: str) -> None:
    """sd_notify(3), where systemd asked for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(message.encode(), address)
