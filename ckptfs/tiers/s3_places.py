"""Directories of an object tier: which have a marker, which objects they need, what is in their way.

A directory exists through what is in it; while there is nothing it is the marker `dir/`, without bytes. Its
attributes are in its record (`s3_records`), since not every store keeps the metadata of markers.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ckptfs.tiers.base import Attrs, Kind, TierError
from ckptfs.tiers.s3_meta import DIR_TYPE, pack
from ckptfs.tiers.s3_objects import Seen
from ckptfs.tiers.s3_records import is_ident
from ckptfs.tiers.s3_replay import DIR
from ckptfs.tiers.s3_site import Site

_log = logging.getLogger(__name__)

_REMEMBERED = 4096
"""Directories that one process remembers."""


def above(path: bytes) -> Iterator[bytes]:
    """The directories that a path is in, nearest first, without the root."""
    while b"/" in path:
        path = path.rpartition(b"/")[0]
        yield path


@dataclass(slots=True)
class _Known:
    """What a directory looked like, and what this process did to it since."""

    marker: bool
    alive: bool
    """There is something in it."""
    subs: set[bytes] | None = None
    """Names of directories in it, and of some that are none any more; None: not asked for."""


class Places:
    """What one process knows of directories; for any number of threads.

    Others change directories too, so nothing that matters rests on it: a marker beside content is
    harmless, and names the store cannot have beside each other are found by its refusal.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def forget(self, path: bytes) -> None:
        """A directory, with everything in it, is not known any more."""
        with self._lock:
            for known in [k for k in self._known if k == path or k.startswith(path + b"/")]:
                del self._known[known]
            parent, _, name = path.rpartition(b"/")
            subs = self._known[parent].subs if path and parent in self._known else None
            if subs is not None:
                subs.discard(name)

    def look(self, path: bytes) -> _Known:
        """What is known of a directory; asks when nothing is."""
        with self._lock:
            known = self._known.get(path)
            if known is not None:
                self._known.move_to_end(path)
                return known
        # Without a delimiter: with one, some stores show directories that are not there any more.
        place = self._site.objects.look_dir(path, sample=1)
        known = _Known(place.marker is not None, place.inside)
        self._remember(path, known)
        return known

    def _remember(self, path: bytes, known: _Known) -> None:
        with self._lock:
            self._known[path] = known
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def has_sub(self, path: bytes) -> bool:
        """Whether a directory seems to be at `path`, as far as the first page of its parent once told."""
        parent, _, name = path.rpartition(b"/")
        known = self.look(parent)
        if known.subs is None:
            prefix = self._site.keys.dir(parent)
            page = self._site.page(prefix, Delimiter="/") if known.alive else {}
            found = {item["Prefix"][len(prefix) : -1] for item in page.get("CommonPrefixes", ())}
            known.subs = {text.encode("utf-8", "surrogateescape") for text in found}
        return name in known.subs

    def marked(self, path: bytes) -> None:
        """The directory has a marker now, and nothing else."""
        self._remember(path, _Known(True, False, set()))

    def entered(self, path: bytes) -> list[bytes]:
        """A directory, or an object, is at `path` now. Returns the directories whose markers go."""
        superfluous = []
        for parent in above(path):
            known = self.look(parent)
            was_there = known.alive or known.marker
            if known.marker:
                superfluous.append(parent)
            known.marker, known.alive = False, True
            if was_there:
                break
        return superfluous

    def is_sub(self, path: bytes) -> None:
        """A directory is at `path` now."""
        parent, _, name = path.rpartition(b"/")
        with self._lock:
            known = self._known.get(parent)
        if known is not None and known.subs is not None:
            known.subs.add(name)

    def put_marker(self, path: bytes, attrs: Attrs) -> None:
        """Make the directory visible while nothing is in it."""
        self._site.put(
            self._site.keys.dir(path),
            b"",
            "making the marker",
            Metadata=pack(Kind.DIR, attrs, DIR),
            ContentType=DIR_TYPE,
        )
        self.marked(path)

    def keep_alive(self, parents: Iterable[bytes], dying: Collection[str]) -> None:
        """Put markers into directories that would vanish with the keys that are deleted next (W4).

        Before the deletion, so that a crash between them loses nothing.
        """
        for parent in dict.fromkeys(parents):
            if not parent:
                continue
            there = False
            for item in self._site.listed(self._site.keys.dir(parent), len(dying) + 2):
                there = True
                if item.key not in dying:
                    break
            else:
                if there:
                    self.put_marker(parent, self._site.reader.attrs_of_dir(parent))


class Batch:
    """The markers that one batch makes superfluous: deleted together, at its end."""

    def __init__(self, site: Site, places: Places) -> None:
        self._site = site
        self._places = places
        self._superfluous: dict[bytes, None] = {}
        self.garbage: dict[str, None] = {}
        """Keys nobody needs any more: deleted with the markers, at leisure."""

    def entered(self, path: bytes) -> None:
        """Something is at `path` now."""
        self._superfluous.update(dict.fromkeys(self._places.entered(path)))

    def drop_manifest(self, gone: Seen) -> None:
        """The digests of an object that this mount replaced or removed, unless it carries them itself."""
        if gone.xxh3 is None and gone.kind is Kind.FILE and is_ident(gone.ident):
            self.garbage[self._site.manifests.key(gone.ident)] = None

    def settle(self, path: bytes | None = None) -> None:
        """Delete what is superfluous; with `path` only if its own marker is among it, which must not come
        after what is put there next."""
        if path is not None and path not in self._superfluous:
            return
        keys = [self._site.keys.dir(marker) for marker in self._superfluous] + list(self.garbage)
        self._superfluous.clear()
        self.garbage.clear()
        if not keys:
            return
        try:
            self._site.delete(keys)
        except TierError as exc:
            # Nothing is wrong without: a marker beside content says nothing new, a record is checked.
            _log.info("left behind: %s", exc)
