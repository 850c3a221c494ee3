"""One mount on one model tier, with an independent plain model of what must be true of it.

`World` plays the engine: it calls the core as the engine does, commits to a real journal, runs the
planner's jobs and the publisher against a `ModelTier`, and can crash at any point. Beside it, it
keeps a reference that knows nothing of logs and nodes: a dict tree of files with their cells (the
mount), and the history of sealed views (R7). `check` compares everything after every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptfs.core import ROOT, Core, Entry, EntryKind, Inode, Node
from ckptfs.core import state as core_state
from ckptfs.core.content import MIB
from ckptfs.core.plan import Begin, Job, Small
from ckptfs.core.state import entry_row, inode_row, load, node_row
from ckptfs.journal.journal import Journal
from ckptfs.tiers.base import Applied, Attrs, Failed, Found, Kind, Move, Op, Put, Remove, Trouble

from .model_tier import Cells, ModelTier, xxh3

ROOT_ATTRS = Attrs(0o755, 0, 0, 0, 0)
core_state.MANY = 3  # so that small models see common moves too


def is_stream(name: bytes) -> bool:
    return name.endswith(b".log")


class Crash(Exception):
    """The process died inside a syscall, before its commit."""


@dataclass(eq=False)
class RefFile:
    """A file or link of the reference mount. `sealed` is the version that counts as finished under
    its present name (None: nothing does, R6)."""

    cells: list[int] = field(default_factory=list)
    target: bytes | None = None
    mode: int = 0o644
    sealed: str | None = None
    unsealed: bool = False
    closed: bool = False
    held: bool = False
    puts: list[str] = field(default_factory=list)
    """Sealed versions in order, for `discard`."""
    shadows: set[str] = field(default_factory=set)
    """Older versions the tier showed when this file was renamed unsealed: they stay till the seal
    is published."""
    sealed_before: int = 0
    """How many of `puts` there were then."""
    covers: set[str] = field(default_factory=set)
    """Versions of the file that it replaced unsealed: they stay under the name till then."""


@dataclass(eq=False)
class RefDir:
    mode: int = 0o755
    children: dict[bytes, RefFile | RefDir] = field(default_factory=dict)


@dataclass(eq=False)
class Handle:
    """A file open for writing."""

    inode: Inode
    file: RefFile
    linked: bool = True


@dataclass
class Question:
    """A listing, or one name, asked of the tier."""

    dir: Inode
    path: bytes
    asked: int
    answer: list[Found] | None
    name: bytes | None = None


@dataclass
class Round:
    """What the publisher is doing."""

    kind: str
    items: list[Any]
    ops: list[Op]
    answers: list[Applied | Failed] | None = None


class World:
    def __init__(self, *, settle_s: float = 2.0, journal: Path = Path(":memory:")) -> None:
        self.settle_s = settle_s
        self.now = 1000.0
        self.journal = Journal(journal)
        self.tier = ModelTier()
        self.staging: dict[int, list[int]] = {}
        self.core = self._load()
        self.ref = RefDir()
        self.handles: list[Handle] = []
        self.jobs: list[Job] = []
        self.questions: list[Question] = []
        self.round: Round | None = None
        self.history: list[dict[bytes, str]] = [{}]
        self.first: dict[tuple[bytes, str], int] = {}
        self.born: dict[str, int] = {}
        self.contents: dict[str, Cells] = {}
        self.applied: set[str] = set()
        self.alien_gone: set[str] = set()
        self.foreign: set[str] = set()
        self.let_be: dict[str, int] = {}
        self.discarded: set[str] = set()
        self.dirs_gone = False
        self.skipped: set[str] = set()
        self.before: dict[str, set[str]] = {}
        self.lenient = False
        self.full = False
        """The journal can't be written for now."""
        self._tag = 0

    # -- plumbing ----------------------------------------------------------------------------

    def _load(self) -> Core:
        return Core(load(self.journal.load(), ROOT_ATTRS), settle_s=self.settle_s, chunk_bytes=MIB)

    def tag(self) -> int:
        self._tag += 1
        return self._tag

    def commit(self) -> None:
        """One transaction, then what it set free."""
        changes = self.core.state.take_changes()
        if self.full:
            self.core.state.put_back(changes)
            return
        self.journal.commit(changes)
        for data in self.core.state.take_freed():
            del self.staging[data]
        self.tier.abandon(self.core.state.take_abandoned())

    def relieve(self) -> None:
        """The journal can be written again."""
        self.full = False
        self.commit()

    @contextlib.contextmanager
    def syscall(self, crash: bool = False) -> Iterator[None]:
        """Run the body in the core, then commit, unless the process dies before that."""
        before = {v: e.pos for v, e in self.pending().items()}
        yield
        if crash and not self.full:
            raise Crash
        self.commit()
        self._note_rewrites(before)

    def pending(self) -> dict[str, Entry]:
        """Un-applied PUTs and LINKs by version."""
        return {
            version_of(e): e
            for e in self.core.state.log.values()
            if e.kind in (EntryKind.PUT, EntryKind.LINK)
        }

    def _note_rewrites(self, before: dict[str, int]) -> None:
        """R4: a removal that a moved or dropped PUT passes moves with it to the end."""
        after = self.pending()
        gone = {v for v, pos in before.items() if v not in after or after[v].pos != pos} - self.skipped
        for version, waits in self.before.items():
            if gone & waits:
                waits |= after.keys() - {version}

    def inode(self, path: bytes) -> Inode:
        inode = self.core.state.root
        for part in path.split(b"/") if path else ():
            inode = inode.children[part]
        return inode

    def node(self, path: bytes) -> RefFile | RefDir:
        node: RefFile | RefDir = self.ref
        for part in path.split(b"/") if path else ():
            assert isinstance(node, RefDir)
            node = node.children[part]
        return node

    def ref_dir(self, path: bytes) -> RefDir:
        node = self.node(path)
        assert isinstance(node, RefDir)
        return node

    def ref_file(self, path: bytes) -> RefFile:
        node = self.node(path)
        assert isinstance(node, RefFile)
        return node

    def walk(self) -> dict[bytes, RefFile | RefDir]:
        """The reference mount by path."""
        found: dict[bytes, RefFile | RefDir] = {}

        def down(prefix: bytes, dir: RefDir) -> None:
            for name, child in dir.children.items():
                path = prefix + b"/" + name if prefix else name
                found[path] = child
                if isinstance(child, RefDir):
                    down(path, child)

        down(b"", self.ref)
        return found

    def files(self) -> list[bytes]:
        return [p for p, n in self.walk().items() if isinstance(n, RefFile)]

    def dirs(self) -> list[bytes]:
        return [b""] + [p for p, n in self.walk().items() if isinstance(n, RefDir)]

    # -- syscalls ----------------------------------------------------------------------------

    def create(self, path: bytes, *, crash: bool = False) -> Handle:
        """open(O_CREAT|O_EXCL)."""
        parent, name = split(path)
        dir = self.inode(parent)
        with self.syscall(crash):
            data = self.core.state.next_id()
            self.staging[data] = []
            inode = self.core.names.create(dir, name, 0o644, 0, 0, data, self.now)
            inode.opens += 1
            inode.writers += 1
        file = RefFile(unsealed=True)
        self.ref_dir(parent).children[name] = file
        return self._handle(inode, file)

    def _handle(self, inode: Inode, file: RefFile) -> Handle:
        handle = Handle(inode, file)
        self.handles.append(handle)
        return handle

    def open(self, path: bytes, *, trunc: bool = False) -> Handle:
        """open for writing, with O_TRUNC if asked."""
        inode, file = self.inode(path), self.ref_file(path)
        inode.opens += 1
        inode.writers += 1
        if trunc:
            self._fresh(inode, file)
        return self._handle(inode, file)

    def _fresh(self, inode: Inode, file: RefFile) -> None:
        with self.syscall():
            data = self.core.state.next_id()
            self.staging[data] = []
            self.core.content.replace(inode, data, self.now)
        file.cells = []
        file.unsealed, file.held, file.closed = True, False, False

    def _fetched(self, inode: Inode) -> None:
        """Bring content that only the tier has into staging."""
        if inode.data == 0:
            data = self.core.state.next_id()
            self.staging[data] = list(self._tier_cells(inode))
            self.core.state.set_data(inode, data)

    def _tier_cells(self, inode: Inode) -> Cells:
        path = self.core.tier.tier_path(inode)
        assert path is not None, f"{inode} has no content anywhere"
        obj = self.tier.at(path)
        assert inode.node is not None
        if self.core.order.in_motion(inode.node):
            # Maybe applied and not answered: readers look again until the answer is there.
            obj = next((o for o in self.tier.visible().values() if o.ident == inode.node.ident), None)
        assert obj is not None, f"{inode}: the tier has nothing at {path!r}"
        assert obj.ident == inode.node.ident, f"{inode}: the tier's {path!r} is another one"
        return obj.cells

    def writable(self, handle: Handle) -> bool:
        """Whether its bytes can be had (others may have removed the object on the tier)."""
        inode = handle.inode
        if inode.data:
            return True
        path = self.core.tier.tier_path(inode)
        obj = None if path is None else self.tier.at(path)
        return obj is not None and inode.node is not None and obj.ident == inode.node.ident

    def write(self, handle: Handle, at: int, count: int) -> None:
        """pwrite of `count` cells at cell `at`."""
        inode, file = handle.inode, handle.file
        self._prepare(handle, at)
        data = self.staging[inode.data]
        for i in range(at, at + count):
            value = self.tag()
            for cells in (data, file.cells):
                cells[i : i + 1] = [value]
        inode.size = max(inode.size, (at + count) * MIB)
        inode.mtime_ns = int(self.now * 1e9)
        file.unsealed, file.closed = True, False

    def _prepare(self, handle: Handle, at: int) -> None:
        """Make staging that may be changed at cell `at`; journaled first."""
        inode, content = handle.inode, self.core.content
        with self.syscall():
            self._fetched(inode)
            if content.needs_clone(inode, at * MIB):
                copy = self.core.state.next_id()
                self.staging[copy] = list(self.staging[inode.data][: inode.size // MIB])
                mtime = inode.mtime_ns
                content.replace(inode, copy, self.now, size=inode.size)
                inode.mtime_ns = mtime
            content.dirty(inode, at * MIB, self.now)

    def truncate(self, handle: Handle, cells: int) -> None:
        """ftruncate to fewer cells."""
        if cells == 0:
            self._fresh(handle.inode, handle.file)
            return
        self._prepare(handle, cells)
        del self.staging[handle.inode.data][cells:]
        del handle.file.cells[cells:]
        handle.inode.size = cells * MIB
        handle.file.unsealed, handle.file.closed = True, False

    def flush(self, handle: Handle) -> None:
        """close(2) of the opener: a crash from here on seals it."""
        with self.syscall():
            if handle.inode.unsealed and not handle.inode.held:
                self.core.content.mark_closed(handle.inode)
                handle.file.closed = handle.linked

    def close(self, handle: Handle, *, killed: bool = False) -> None:
        """RELEASE."""
        inode = handle.inode
        self.handles.remove(handle)
        with self.syscall():
            inode.opens -= 1
            inode.writers -= 1
            if inode.writers == 0:
                if killed and not is_stream(inode.name or b""):
                    self.core.content.interrupt(inode, self.now, "killed")
                    if handle.linked and handle.file.unsealed:
                        handle.file.held = True
                        handle.file.closed = False
                else:
                    self._seal(inode, handle.file)
            self.core.order.reap(inode)

    def seal_open(self, handle: Handle) -> None:
        """fsync under fsync=tier, or the stream timer."""
        with self.syscall():
            self._seal(handle.inode, handle.file)

    def _seal(self, inode: Inode, file: RefFile) -> None:
        held = list(file.shadows)
        e = self.core.content.seal(inode, self.now)
        if inode.dead or not file.unsealed or file.held:
            assert e is None
            return
        assert e is not None
        self._sealed(file, e, held)

    def _sealed(self, file: RefFile, e: Entry, held: list[str]) -> None:
        version = version_of(e)
        if e.kind == EntryKind.PUT:
            self.contents[version] = tuple(file.cells)
            assert e.length == len(file.cells) * MIB
        file.sealed, file.unsealed, file.held, file.closed = version, False, False, False
        file.puts.append(version)
        for old in held:
            if old not in self.before:  # else it was released at an earlier seal
                self.before[old] = {v for v, x in self.pending().items() if x.pos <= e.pos and v != old}
        self._record_history()

    def _dies(self, version: str | None) -> None:
        """The mount has no use for a version any more: it may go after what is un-applied now (R3)."""
        if version is not None and version not in self.before:
            self.before[version] = set(self.pending()) - {version}

    def _drop_ref(self, file: RefFile, heir: RefFile | None = None) -> None:
        """A reference file lost its name, maybe to one that is not sealed yet."""
        for handle in self.handles:
            if handle.file is file:
                handle.linked = False
        shown = {o.version for o in self.tier.visible().values()}
        for version in (file.sealed, *file.shadows, *file.covers, *file.puts):
            if version is None:
                continue
            if heir is not None and version in shown - file.shadows - self.before.keys():
                heir.covers.add(version)
            self._dies(version)

    def unlink(self, path: bytes, *, crash: bool = False) -> None:
        parent, name = split(path)
        with self.syscall(crash):
            self.core.names.unlink(self.inode(parent), name, self.now)
        file = self.ref_dir(parent).children.pop(name)
        assert isinstance(file, RefFile)
        self._drop_ref(file)
        self._record_history()

    def mkdir(self, path: bytes, *, crash: bool = False) -> None:
        parent, name = split(path)
        with self.syscall(crash):
            self.core.names.mkdir(self.inode(parent), name, 0o755, 0, 0, self.now)
        self.ref_dir(parent).children[name] = RefDir()

    def rmdir(self, path: bytes, *, crash: bool = False) -> None:
        parent, name = split(path)
        with self.syscall(crash):
            self.core.names.rmdir(self.inode(parent), name, self.now)
        dir = self.ref_dir(parent).children.pop(name)
        assert isinstance(dir, RefDir)
        assert not dir.children

    def symlink(self, path: bytes, *, crash: bool = False) -> None:
        parent, name = split(path)
        target = b"t%d" % self.tag()
        with self.syscall(crash):
            self.core.names.symlink(self.inode(parent), name, target, 0, 0, self.now)
        version = "L:" + target.decode()
        file = RefFile(target=target, mode=0o777, sealed=version, puts=[version])
        self.ref_dir(parent).children[name] = file
        self._record_history()

    def rename(self, src: bytes, dst: bytes, *, crash: bool = False) -> None:
        """Raises `OSError` as the core does; the reference has checked that it must not (or must)."""
        (src_parent, src_name), (dst_parent, dst_name) = split(src), split(dst)
        if src == dst:
            return
        inode = self.inode(src)
        node = self.node(src)
        shown = {o.version for o in self.tier.visible().values()}
        live = [version_of(e) for e in inode.puts if not e.frozen]
        frozen = {version_of(e) for e in inode.puts if e.frozen}
        before = {v: e.pos for v, e in self.pending().items()}
        with self.syscall(crash):
            self.core.names.rename(
                self.inode(src_parent), src_name, self.inode(dst_parent), dst_name, 0, self.now
            )
        late = [v for v, e in self.pending().items() if before.get(v) != e.pos]
        self._forget_history(set(late))
        old = self.ref_dir(dst_parent).children.get(dst_name)
        del self.ref_dir(src_parent).children[src_name]
        self.ref_dir(dst_parent).children[dst_name] = node
        if isinstance(node, RefFile):
            waiting = (node.unsealed or node.held) and not live
            if waiting:
                # R6: it takes effect at the seal; until then the tier keeps what it has.
                node.shadows |= ((shown | frozen) & {*node.puts, node.sealed}) - self.before.keys()
                node.covers.clear()
                node.sealed_before = len(node.puts)
                node.sealed = None
            elif live:
                node.sealed = live[-1]
                node.covers.clear()
                for version in node.puts:
                    if version not in live:
                        self._dies(version)
            if isinstance(old, RefFile):
                self._drop_ref(old, node if waiting else None)
        else:
            # R4a: what was not applied comes to the rename's position, one after the other.
            for n in range(len(late)):
                self._record_history(without=set(late[n:]))
        self._record_history()

    def chmod(self, path: bytes, mode: int, *, crash: bool = False) -> None:
        with self.syscall(crash):
            self.core.names.setattr(self.inode(path), self.now, mode=mode, mtime_ns=int(self.now * 1e9) + 7)
        self.node(path).mode = mode

    # -- the owner's decisions ---------------------------------------------------------------

    def publish_held(self, path: bytes) -> None:
        inode, file = self.inode(path), self.ref_file(path)
        with self.syscall():
            held = list(file.shadows)
            e = self.core.content.publish_held(inode, self.now)
            assert e is not None
            file.held = False
            self._sealed(file, e, held)

    def discard(self, path: bytes) -> None:
        """Then look at the tier, as the engine does."""
        parent, name = split(path)
        inode, file = self.inode(path), self.ref_file(path)
        pending = [v for v in file.puts if v in self.pending()]
        with self.syscall():
            revert = self.core.content.discard(inode)
            assert (revert is not None) == bool(pending)
            if revert is not None and revert.data:
                del self.staging[revert.data][revert.length // MIB :]
        if revert is not None:
            file.sealed = pending[-1]
            if file.target is None:
                file.cells = list(self.contents[file.sealed])
            file.unsealed = file.held = file.closed = False
            if inode.puts[-1].version != file.sealed:  # renamed meanwhile: sealed again under the new name
                self._sealed(file, inode.puts[-1], list(file.shadows))
            for version in file.shadows:
                self._dies(version)
            file.shadows.clear()
            return
        self.discarded.update(file.puts)
        del self.ref_dir(parent).children[name]
        for handle in self.handles:
            if handle.file is file:
                handle.linked = False
        dead = {n.ident for n in self.core.state.graves.values() if n.present}
        coming = {version_of(e) for e in self.core.state.log.values() if e.node.dead_pos}
        for obj in self.tier.visible().values():
            given_up = obj.version in self.before.keys() | file.shadows | file.covers
            if given_up and obj.ident not in dead and obj.version not in coming:
                self._let_be(obj.version)
        self.look_everywhere()

    def skip(self, e: Entry) -> None:
        """What is in the tier's hands goes on, and is skipped later if it is refused."""
        with self.syscall(), self._skipping():
            self.core.order.skip(e, self.now)

    @contextlib.contextmanager
    def _skipping(self) -> Iterator[None]:
        """Around what may skip entries."""
        before, moves = self.pending(), self._moves()
        yield
        gone = before.keys() - self.pending().keys()
        self.skipped |= gone
        for waits in self.before.values():
            waits -= gone  # a link that is published after all has the same name again
        if any(m.node.present or m.node.pending for m in moves - self._moves()):
            self.lenient = True  # the tier keeps an old name for good
        for file in self.walk().values():
            if isinstance(file, RefFile) and file.sealed in gone:
                file.sealed = None
                file.held |= not file.unsealed
                file.shadows.clear()
                file.covers.clear()

    def _let_be(self, version: str) -> None:
        """It comes back, and is no older version of any file any more."""
        self.before.pop(version, None)
        self.let_be[version] = self.born.get(version, 0)
        for file in self.walk().values():
            if isinstance(file, RefFile) and file.sealed != version:
                file.sealed_before -= version in file.puts[: file.sealed_before]
                file.puts = [v for v in file.puts if v != version]
                file.shadows.discard(version)
                file.covers.discard(version)

    def _moves(self) -> set[Entry]:
        return {e for e in self.core.state.log.values() if e.kind == EntryKind.MOVE}

    def give_up_removal(self, node: Node) -> None:
        """`ckptfs skip` of a removal the tier refuses: the object stays and comes back into view."""
        path = next((p for p, o in self.tier.visible().items() if o.ident == node.ident), None)
        self.before.pop(self.tier.versions.get(node.ident, ""), None)
        with self.syscall():
            self.core.order.give_up_removal(node)
        for other, obj in self.tier.visible().items():
            if path is not None and (other == path or other.startswith(path + b"/")):
                self._let_be(obj.version)

    # -- the flow ----------------------------------------------------------------------------

    def plan(self, limit: int = 8, *, hurry: bool = False) -> int:
        jobs = self.core.planner.next_jobs(self.now, limit, hurry=hurry)
        self.jobs += jobs
        self.commit()
        return len(jobs)

    def do_job(self, job: Job, fate: str = "ok") -> None:
        """`fate`: ok, fail (nothing happened), redo (the tier lost the upload)."""
        self.jobs.remove(job)
        planner, tier = self.core.planner, self.tier
        if fate == "fail":
            planner.failed(job)
        elif isinstance(job, Begin):
            planner.begun(job.entry, tier.begin(job.entry.version))
        elif isinstance(job, Small):
            for e in job.entries:
                cells = self._staged(e, 0, e.length)
                upload = tier.begin(e.version)
                tier.send(upload, 0, cells)
                planner.sent(e, upload, 0, e.length, xxh3(cells))
        else:
            e, upload = job.entry, job.entry.upload
            if fate == "redo" and upload is not None:
                tier.hidden.pop(upload.handle, None)
            if upload is None or e.id not in self.core.state.log:
                planner.failed(job)
            else:
                digest = tier.send(upload, job.offset, self._staged(e, job.offset, job.length))
                if digest is None:
                    planner.failed(job, redo=True)
                else:
                    planner.sent(e, upload, job.offset, job.length, digest)
        self.commit()

    def _staged(self, e: Entry, offset: int, length: int) -> Cells:
        cells = self.staging.get(e.data)
        if cells is None:
            assert e.id not in self.core.state.log, f"{e}: its staged bytes were freed"
            return (-1,) * (length // MIB)
        return tuple(cells[offset // MIB : (offset + length) // MIB])

    def publish_take(self, limit: int = 64) -> bool:
        """First third of a round: decide and journal."""
        assert self.round is None
        batch = self.core.order.next_batch(limit)
        if batch is not None:
            entries, ops = batch
            assert ops
            self.round = Round("batch" if entries else "forced", list(entries or ops), list(ops))
        self.commit()
        if self.lenient:
            self._learn()  # a directory may come where a skipped rename left a file
        return self.round is not None

    def removals_take(self, limit: int = 128) -> bool:
        assert self.round is None
        nodes, ops = self.core.order.next_removals(limit)
        if nodes:
            self.round = Round("removals", list(nodes), list(ops))
        self.commit()
        return self.round is not None

    def attrs_take(self, limit: int = 64) -> bool:
        assert self.round is None
        chosen, ops = self.core.order.next_attrs(limit)
        if chosen:
            self.round = Round("attrs", list(chosen), list(ops))
        self.commit()
        return self.round is not None

    def round_apply(self, fault: str = "", at: int = 0) -> None:
        """Second third: the tier works. `fault` strikes at op `at`: down, lost (it did it and what
        came before, but nobody hears), refuse, redo."""
        assert self.round is not None
        assert self.round.answers is None
        answers: list[Applied | Failed] = []
        kind = self.round.kind
        for i, op in enumerate(self.round.ops):
            if fault and i == at % len(self.round.ops):
                if fault == "down":
                    answers.append(Failed(Trouble.DOWN, "down"))
                    break
                if fault == "lost":
                    self._apply(op, kind)
                    answers = [Failed(Trouble.DOWN, "timeout")]
                    break
                if fault == "refuse" and kind == "batch" and not self.tier.is_done(op):
                    answers.append(Failed(Trouble.REFUSED, "permission denied"))
                    break
                if fault == "redo" and kind == "batch":
                    upload = getattr(op, "upload", None)
                    if upload is not None:
                        self.tier.hidden.pop(upload.handle, None)
            answer = self._apply(op, kind)
            answers.append(answer)
            if isinstance(answer, Failed):
                break
        self.round.answers = answers

    def _apply(self, op: Op, kind: str) -> Applied | Failed:
        if isinstance(op, Remove) and kind == "removals":
            there = self.tier.at(op.path)
            if there is not None and there.kind != Kind.DIR and there.token == op.expected:
                self._check_removal(there.version, op.path)
        if kind == "forced" or (kind == "batch" and not self.tier.is_done(op)):
            # A name that is used again: what is there goes, R6 or not.
            there = self.tier.at(op.dst if isinstance(op, Move) else op.path)
            if there is not None:
                dead = there.version in self.before.keys() | self.skipped
                for file in self.walk().values():
                    if isinstance(file, RefFile) and there.version in file.shadows | file.covers:
                        dead = True
                        file.shadows.discard(there.version)
                        file.covers.discard(there.version)
                if isinstance(op, Remove) and there.kind != Kind.DIR and there.token == op.expected:
                    assert dead or self.lenient, f"{op.path!r} is in use"
        done = self.tier.is_done(op)
        answer = self.tier.apply(op)
        if isinstance(op, Put) and isinstance(answer, Applied) and not done:
            self.alien_gone.discard(op.version)  # others removed it before its answer was heard
        return answer

    def _check_removal(self, version: str, path: bytes) -> None:
        """R3."""
        if self.lenient:
            return
        waits = self.before.get(version)
        assert waits is not None or version in self.skipped, f"{version} at {path!r} is removed but not dead"
        late = [w for w in waits or () if w in self.pending()]
        assert not late, f"R3: {version} at {path!r} removed before {late}"

    def round_answer(self) -> None:
        """Last third: the answers are heard."""
        assert self.round is not None
        assert self.round.answers is not None
        round, self.round = self.round, None
        order = self.core.order
        for item, op, answer in zip(round.items, round.ops, round.answers, strict=False):
            if round.kind == "batch":
                if isinstance(answer, Failed):
                    before, skip = self.pending(), item.id in order.skipping
                    with self._skipping():
                        order.refused(item, answer, self.now)
                    if answer.trouble == Trouble.REDO and not skip:
                        assert before.keys() == self.pending().keys()
                else:
                    order.unstick(item)
                    order.applied(item, answer)
                    if item.kind in (EntryKind.PUT, EntryKind.LINK):
                        self.applied.add(version_of(item))
            elif isinstance(answer, Failed):
                break
            elif round.kind == "forced":
                assert isinstance(op, Remove)
                order.in_the_way_removed(op.path, answer)
            elif round.kind == "removals":
                order.removed(item, answer)
            else:
                order.attrs_done(*item, answer)
        self.commit()
        self._learn()  # a MOVE may have found its source removed by others

    # -- the view of the tier ----------------------------------------------------------------

    def ask(self, path: bytes, name: bytes | None = None) -> bool:
        """Ask for a listing, or one name; the tier answers at once, the answer may be kept long."""
        dir = self.inode(path)
        asked = self.core.tier.ask()
        tier_path = self.core.tier.tier_path(dir)
        if tier_path is None:
            self.core.tier.give_up(asked)
            return False
        self.questions.append(Question(dir, tier_path, asked, None, name))
        self._look(self.questions[-1])
        return True

    def _look(self, q: Question) -> None:
        if q.name is None:
            q.answer = self.tier.listdir(q.path)
        else:
            found = self.tier.stat(q.path + b"/" + q.name if q.path else q.name)
            q.answer = [] if found is None else [found]

    def merge(self, q: Question, *, late: bool = False) -> None:
        """The answer arrives; `late`: the tier looked only just now."""
        self.questions.remove(q)
        if late:
            self._look(q)
        tier = self.core.tier
        if q.name is not None:
            tier.merge_one(q.dir, q.name, q.asked, q.answer[0] if q.answer else None)
        elif q.answer is None:
            tier.dir_vanished(q.dir, q.asked)
        else:
            tier.merge_listing(q.dir, q.asked, q.answer)
        self.commit()
        self._learn()

    def look_everywhere(self) -> None:
        """Fresh listings of all directories, then W2's promise: what others have there is in view."""
        todo, seen = [b""], set()
        while todo:
            path = todo.pop()
            seen.add(path)
            if self.ask(path):
                self.merge(self.questions[-1])
            todo += [p for p in self.dirs() if p not in seen and p not in todo]
        if not self.lenient and self.round is None:
            self._check_view()

    def _check_view(self) -> None:
        state = self.core.state
        for path, obj in self.tier.visible().items():
            if obj.version not in self.foreign or obj.version in self.before:
                continue
            parent, name = split(path)
            node = state.root_node
            for part in parent.split(b"/") if parent else ():
                nxt = node.children.get(part)
                if nxt is None or nxt.kind != Kind.DIR or nxt.inode is None or nxt.inode.dead:
                    break
                node = nxt
            else:
                assert node.inode is not None
                if self.core.order.in_motion(node):
                    continue
                child = node.inode.children.get(name)
                known = node.children.get(name)
                hidden = known is not None and (known.dead_pos or known.pending or known.setting)
                targeted = (node.inode.ino, name) in state.targets
                assert child is not None or hidden or targeted, f"W2: {path!r} is not in view"

    def _learn(self) -> None:
        """Take over into the reference what a listing may change: names with nothing local."""

        def down(prefix: bytes, inode: Inode, ref: RefDir) -> None:
            for name in {*inode.children, *ref.children}:
                path = prefix + b"/" + name if prefix else name
                child, node = inode.children.get(name), ref.children.get(name)
                if child is None:
                    assert node is not None
                    self._may_vanish(path, node)
                    del ref.children[name]
                elif node is None or (child.kind == Kind.DIR) != isinstance(node, RefDir):
                    if node is not None:
                        self._may_vanish(path, node)
                    ref.children[name] = self._adopted(path, child)
                elif isinstance(node, RefFile) and self._differs(child, node):
                    self._may_vanish(path, node)
                    ref.children[name] = self._adopted(path, child)
                elif (
                    (isinstance(node, RefDir) or node.sealed in self.discarded)
                    and not child.attr_dirty
                    and not child.pending
                ):
                    node.mode = child.mode  # made again by others; what was sent before the discard
                if child is not None and child.kind == Kind.DIR:
                    sub = ref.children[name]
                    assert isinstance(sub, RefDir)
                    down(path, child, sub)

        down(b"", self.core.state.root, self.ref)

    def _differs(self, inode: Inode, file: RefFile) -> bool:
        if inode.local or file.unsealed or file.held:
            return False
        assert inode.node is not None
        return self.tier.versions[inode.node.ident] != file.sealed

    def _may_vanish(self, path: bytes, node: RefFile | RefDir) -> None:
        if isinstance(node, RefDir):
            for name, child in node.children.items():
                self._may_vanish(path + b"/" + name, child)
            return
        assert not node.unsealed, f"the local {path!r} was taken"
        assert not node.held, f"the local {path!r} was taken"
        if not self.lenient and node.sealed not in self.foreign:
            # A directory that others removed, that we made again and moved without hearing the answer, is
            # not recognised: its names are gone from the mount until it is looked at.
            shown = {o.version for o in self.tier.visible().values()} if self.dirs_gone else set()
            found_again = node.sealed in shown
            assert node.sealed in self.alien_gone or found_again, f"{path!r} was taken, not by others"
        for handle in self.handles:
            if handle.file is node:
                handle.linked = False

    def _adopted(self, path: bytes, inode: Inode) -> RefFile | RefDir:
        if inode.kind == Kind.DIR:
            return RefDir(inode.mode)
        assert not inode.local
        node = inode.node
        assert node is not None
        assert node.present
        version = self.tier.versions[node.ident]
        if self.dirs_gone:  # as in `_may_vanish`: removals in it are not known any more
            self.before.pop(version, None)
        assert version not in self.before, f"{path!r}: {version} was removed in the mount"
        if inode.kind == Kind.LINK:
            return RefFile([], inode.target, inode.mode, version, puts=[version])
        return RefFile(list(self.contents[version]), None, inode.mode, version, puts=[version])

    # -- other writers -----------------------------------------------------------------------

    def foreign_put(self, path: bytes) -> None:
        version = f"F{self.tag()}"
        self.foreign.add(version)
        self.contents[version] = (self.tag(),)
        old = self.tier.foreign_put(path, version, self.contents[version])
        if old is not None:
            self.alien_gone.add(old.version)

    def foreign_remove(self, path: bytes) -> None:
        """A file, or a directory with all there is in it."""
        gone = [self.tier.foreign_remove(path)]
        self.dirs_gone |= gone[0].kind == Kind.DIR
        while gone:
            obj = gone.pop()
            self.alien_gone.add(obj.version)
            gone += obj.children.values()

    def foreign_mkdir(self, path: bytes) -> None:
        self.tier.foreign_mkdir(path)

    # -- crash -------------------------------------------------------------------------------

    def crash(self) -> None:
        """kill -9 and the next mount."""
        if self.full:  # what would be lost was answered with an error
            self.relieve()
        self.core = self._load()
        self.handles.clear()
        self.jobs.clear()
        self.questions.clear()
        self.round = None

        def staged(data: int) -> tuple[int, int] | None:
            cells = self.staging.get(data)
            return None if cells is None else (len(cells) * MIB, int(self.now * 1e9))

        sealed, interrupted = self.core.content.recover(staged, is_stream, self.now)
        refs = {p: n for p, n in self.walk().items() if isinstance(n, RefFile)}
        by_ino = {self._try_inode(p): p for p in refs}
        expect_sealed = {
            p for p, f in refs.items() if f.unsealed and not f.held and (f.closed or is_stream(p))
        }
        assert {by_ino[i.ino] for i in sealed} == expect_sealed
        for inode in sealed:
            file = refs[by_ino[inode.ino]]
            held = list(file.shadows)
            self._sealed(file, inode.puts[-1], held)
        for inode in interrupted:
            file = refs[by_ino[inode.ino]]
            assert file.unsealed
            file.held = True
        for path, file in refs.items():
            if file.unsealed:
                assert file.held, f"{path!r} was open and is neither sealed nor interrupted"
        self.commit()
        used = self.core.state.data_refs
        for data in [d for d in self.staging if d not in used]:
            del self.staging[data]  # orphans
        keep = {e.upload.handle for e in self.core.state.log.values() if e.upload is not None}
        for handle in [h for h in self.tier.hidden if h not in keep]:
            del self.tier.hidden[handle]
        # Clean names are not journaled: they come back with the listings.
        self._forget_clean(self.core.state.root, self.ref)
        self.look_everywhere()

    def _try_inode(self, path: bytes) -> int:
        try:
            return self.inode(path).ino
        except KeyError:
            return 0

    def _forget_clean(self, inode: Inode, ref: RefDir) -> None:
        for name, node in list(ref.children.items()):
            child = inode.children.get(name)
            if child is None:
                self._must_be_clean(node)
                del ref.children[name]
            elif isinstance(node, RefDir):
                self._forget_clean(child, node)

    def _must_be_clean(self, node: RefFile | RefDir) -> None:
        if isinstance(node, RefDir):
            for child in node.children.values():
                self._must_be_clean(child)
            return
        assert not node.unsealed
        assert not node.held
        shown = {o.version for o in self.tier.visible().values()}
        assert node.sealed in shown or node.sealed in self.alien_gone, f"lost {node.sealed}"

    # -- what must be true -------------------------------------------------------------------

    def check(self) -> None:
        self._check_mount()
        self._check_state()
        self._check_journal()
        self._check_data()
        self._record_history()
        self._check_tier()

    def _check_mount(self) -> None:
        """Invariant 1: the mount is the reference."""

        def same(prefix: bytes, inode: Inode, ref: RefDir) -> None:
            assert inode.children.keys() == ref.children.keys(), (
                f"in {prefix!r}: mount {sorted(inode.children)}, reference {sorted(ref.children)}"
            )
            for name, node in ref.children.items():
                child = inode.children[name]
                path = prefix + b"/" + name
                assert child.parent is inode
                assert child.name == name
                assert child.mode == node.mode, f"{path!r} has mode {child.mode:o}, not {node.mode:o}"
                if isinstance(node, RefDir):
                    assert child.kind == Kind.DIR
                    same(path, child, node)
                elif node.target is not None:
                    assert child.target == node.target
                else:
                    self._same_content(path, child, node)

        same(b"", self.core.state.root, self.ref)
        for handle in self.handles:
            if handle.inode.data:
                assert self.staging[handle.inode.data] == handle.file.cells

    def _same_content(self, path: bytes, inode: Inode, file: RefFile) -> None:
        assert inode.kind == Kind.FILE
        assert bool(inode.unsealed) == file.unsealed, f"{path!r}: {inode.unsealed!r}"
        assert bool(inode.held) == file.held, f"{path!r}: {inode.held!r}"
        if inode.data:
            assert self.staging[inode.data][: inode.size // MIB] == file.cells, f"{path!r} has other content"
            assert inode.size == len(file.cells) * MIB
        elif file.sealed in self._kept_aside():
            assert self.lenient, f"{path!r} was in use"  # its rename was skipped, and the name used again
        elif file.sealed not in self.alien_gone:
            assert self._tier_cells(inode) == tuple(file.cells), f"{path!r} has other content"

    def _check_state(self) -> None:
        """The core's tables agree with each other."""
        s = self.core.state
        targets: dict[tuple[int, bytes], int] = {}
        busy: dict[int, int] = {}
        pending: dict[int, int] = {}
        refs: dict[int, int] = {}
        last = 0
        for e in s.log.values():
            assert e.pos > last, "the log is not ordered by position"
            last = e.pos
            assert e.node.id in s.nodes
            assert e.inode.ino in s.inodes
            assert e.dir.ino in s.inodes
            key = (e.dir.ino, e.name)
            targets[key] = targets.get(key, 0) + 1
            busy[e.dir.ino] = busy.get(e.dir.ino, 0) + 1
            pending[e.node.id] = pending.get(e.node.id, 0) + 1
            pending[e.inode.ino] = pending.get(e.inode.ino, 0) + 1
            if e.data:
                refs[e.data] = refs.get(e.data, 0) + 1
        assert targets == s.targets
        assert busy == s.busy_dirs
        last = 0
        for n in s.graves.values():
            assert n.dead_pos > last, "the graves are not ordered"
            last = n.dead_pos
            assert s.nodes[n.id] is n
        for n in s.nodes.values():
            assert n.pending == pending.get(n.id, 0), n
            assert bool(n.dead_pos) == (n.id in s.graves), n
            if n.present and n.id != ROOT:
                assert n.parent is not None
                assert n.parent.children.get(n.name) is n, n
                assert n.parent.id in s.nodes, f"{n}: its directory is gone"
                assert n.parent.present
            if not n.present:
                assert n.pending, f"{n} leaked"
            for child in n.children.values():
                assert child.parent is n
                assert s.nodes.get(child.id) is child
        for i in s.inodes.values():
            assert i.pending == pending.get(i.ino, 0), i
            assert i.puts == [
                e for e in s.log.values() if e.inode is i and e.kind in (EntryKind.PUT, EntryKind.LINK)
            ]
            if i.data:
                refs[i.data] = refs.get(i.data, 0) + 1
            if i.dead:
                assert i.opens or i.pending or i.ino in busy, f"{i} leaked"
                assert not i.held
            elif i.ino != ROOT:
                assert i.parent is not None
                assert i.name is not None
                assert i.parent.children.get(i.name) is i
                if i.kind != Kind.DIR:
                    assert i.local or (i.node is not None and i.node.present), f"{i} has no content"
            if i.node is not None and i.kind != Kind.DIR and i.node.present:
                assert i.node.inode is i
            assert bool(i.held) == (i.ino in s.held_inodes)
        assert refs == s.data_refs

    def _check_journal(self) -> None:
        """The journal describes the state, always (kill -9 loses nothing)."""
        if self.full:
            return
        s, rows = self.core.state, self.journal.load()
        assert not s.changed, "a change was not committed"
        assert {r[0]: r for r in rows.entries} == {e.id: entry_row(e) for e in s.log.values()}
        kept_nodes = {n.id: node_row(n) for n in s.nodes.values() if n.kept and n.id != ROOT}
        assert {r[0]: r for r in rows.nodes if r[0] != ROOT} == kept_nodes
        inodes = {r[0]: r for r in rows.inodes}
        kept = {i.ino: i for i in s.inodes.values() if i.kept}
        assert inodes.keys() == kept.keys() | {r for r in inodes if r == ROOT}
        for ino, row in inodes.items():
            fresh = inode_row(s.inodes[ino])
            if s.inodes[ino].dead:  # its directory's object may be gone without its knowing
                row, fresh = row[:12] + row[13:], fresh[:12] + fresh[13:]
            if s.inodes[ino].unsealed:  # size, mtime and atime are the staging file's
                assert row[:8] + row[11:] == fresh[:8] + fresh[11:]
            else:
                assert row[:7] + row[9:] == fresh[:7] + fresh[9:], f"{s.inodes[ino]}: {row} is not {fresh}"
        for i in s.inodes.values():
            assert i.kept or i.dead or not (i.local or i.attr_dirty), f"{i} is not journaled"
            if i.kept and i.parent is not None:
                assert i.parent.kept
        for n in s.nodes.values():
            if n.dead_pos or n.pending:
                assert n.kept, f"{n} is not journaled"
            if n.kept and n.parent is not None and n.present:
                assert n.parent.kept
        sent: dict[int, set[int]] = {}
        for entry, offset, _, _ in rows.sent:
            sent.setdefault(entry, set()).add(offset)
        assert sent == {e.id: set(e.sent) for e in s.log.values() if e.sent}
        assert rows.last_id >= s.last_id or s.last_id == ROOT

    def _check_data(self) -> None:
        """Staged bytes: none lost, none kept for nothing, sealed ones unchanged (invariant 5)."""
        s = self.core.state
        assert self.staging.keys() == s.data_refs.keys() | set(s.freed)
        for e in s.log.values():
            if e.kind == EntryKind.PUT:
                held = tuple(self.staging[e.data][: e.length // MIB])
                assert held == self.contents[e.version], f"{e}: a sealed version changed"

    def _record_history(self, without: set[str] | None = None) -> None:
        view = {
            p: n.sealed
            for p, n in self.walk().items()
            if isinstance(n, RefFile) and n.sealed is not None and n.sealed not in (without or ())
        }
        if view != self.history[-1]:
            index = len(self.history)
            self.history.append(view)
            for pair in view.items():
                self.first.setdefault(pair, index)
                self.born.setdefault(pair[1], index)

    def _forget_history(self, moved: set[str]) -> None:
        """R4a: a PUT that moved was never at its old position, even if it gets its old name again."""
        if moved:
            for view in self.history:
                for path in [p for p, v in view.items() if v in moved]:
                    del view[path]
            self.first = {pair: k for pair, k in self.first.items() if pair[1] not in moved}
            for version in moved:
                self.born.pop(version, None)

    def _check_tier(self) -> None:
        visible = {p: o for p, o in self.tier.visible().items() if o.kind != Kind.DIR}
        for path, obj in visible.items():
            # R6, invariant 9: only finished versions, whole.
            if obj.version in self.foreign or obj.kind == Kind.LINK:
                continue
            assert obj.version in self.contents, f"R6: {path!r} shows unfinished {obj.version}"
            assert obj.cells == self.contents[obj.version], f"R6: {path!r} is torn"
        shown = {o.version for o in visible.values()}
        kept = self._kept_aside()
        view = self.history[-1]
        for path, version in view.items():
            if version in self.applied and version not in self.alien_gone:
                where = shown | kept if self.lenient else shown
                assert version in where, f"{version}, the content of {path!r}, is gone from the tier"
        given_up = {v for view in self.history for v in view.values()} - set(view.values())
        for version in self.foreign:
            assert version in shown | kept | self.alien_gone | given_up, f"W3: {version} of others is lost"
        if not self.lenient:
            self._check_shadows(shown)
            self._check_r7({p: o.version for p, o in visible.items()})

    def _kept_aside(self) -> set[str]:
        """Versions that W3 kept."""
        kept = set()
        for obj in self.tier.conflicts:
            stack = [obj]
            while stack:
                o = stack.pop()
                kept.add(o.version)
                stack += o.children.values()
        return kept

    def _check_shadows(self, shown: set[str]) -> None:
        """R6: the old file stays until the one that replaces it is published."""
        for path, file in self.walk().items():
            if not isinstance(file, RefFile):
                continue
            if not (self.applied | shown).isdisjoint(file.puts[file.sealed_before :]):
                file.shadows.clear()
                file.covers.clear()
            for version in ((file.shadows & self.applied) | file.covers) - self.alien_gone:
                assert version in shown, f"R6: {path!r} is not published and the old {version} is gone"

    def _check_r7(self, visible: dict[bytes, str]) -> None:
        """There is a k such that every live entry of S(k) is on the tier, and no PUT after k is."""
        now = self.history[-1]
        least = 0
        for path, version in visible.items():
            if version not in self.foreign:
                born = self.first.get((path, version), self.born.get(version, 0))
                least = max(least, self.let_be.get(version, born))  # wherever that was found again
        missing: list[tuple[bytes, str]] = []
        for k in range(least, len(self.history)):
            missing = [
                (p, v)
                for p, v in self.history[k].items()
                if now.get(p) == v and visible.get(p) != v and v not in self.alien_gone
            ]
            if not missing:
                return
        raise AssertionError(f"R7: {missing} should be visible (tier shows {sorted(visible.items())})")

    # -- progress ----------------------------------------------------------------------------

    def drain(self, rounds: int = 400) -> None:
        """The tier answers: everything must get there."""
        self.relieve()
        if self.round is not None:
            if self.round.answers is None:
                self.round_apply()
            self.round_answer()
        for _ in range(rounds):
            busy = self.plan(hurry=True) > 0 or bool(self.jobs)
            for job in list(self.jobs):
                self.do_job(job)
            for take in (self.publish_take, self.removals_take, self.attrs_take):
                if take():
                    busy = True
                    self.round_apply()
                    self.round_answer()
            head = next(iter(self.core.state.log.values()), None)
            if head is not None and head.stuck == "into itself":
                assert self.lenient, f"{head} is refused"  # only after another rename was skipped
                self.skip(head)
            self.check()
            if not busy:
                break
        else:
            raise AssertionError("it does not drain")
        assert self.core.order.settled, (list(self.core.state.log.values()), self.core.state.graves)

    def check_drained(self) -> None:
        """Nothing open, nothing held: the tier's tree is the mount's, and nothing is left over."""
        self.look_everywhere()
        self.drain()
        self.look_everywhere()  # a directory that others removed and we made again has lost its mode
        self.check()
        if not self.lenient:
            tier = {p: (o.kind, o.cells, o.target) for p, o in self.tier.visible().items()}
            mount: dict[bytes, tuple[Kind, Cells, bytes]] = {}
            for path, node in self.walk().items():
                if isinstance(node, RefDir):
                    on_tier = self.inode(path).node
                    if path in tier or (on_tier is not None and on_tier.present):  # else it was skipped
                        mount[path] = (Kind.DIR, (), b"")
                elif node.target is not None:
                    mount[path] = (Kind.LINK, (), node.target)
                else:
                    mount[path] = (Kind.FILE, tuple(node.cells), b"")
            assert tier == mount
            for path, obj in self.tier.visible().items():
                inode = self.inode(path)
                assert obj.attrs.mode == inode.mode, f"{path!r}: mode on the tier {obj.attrs.mode:o}"
                assert obj.attrs.mtime_ns == inode.mtime_ns, f"{path!r}: mtime"
        s = self.core.state
        assert not s.graves or self.lenient  # a skipped MOVE leaves its object in a removed directory
        assert not s.log
        assert all(i.kind == Kind.DIR or not i.kept for i in s.inodes.values())
        assert not self.tier.hidden, "uploads leaked"
        assert set(s.data_refs) == {i.data for i in s.inodes.values() if i.data}


def version_of(e: Entry) -> str:
    return "L:" + e.inode.target.decode() if e.kind == EntryKind.LINK else e.version


def split(path: bytes) -> tuple[bytes, bytes]:
    parent, _, name = path.rpartition(b"/")
    return parent, name
