"""Keeping what other writers put where this mount publishes (rule W3), on an object tier.

Kept objects are copies, with their metadata: `.ckptfs/conflicts/<UTC time>-<random>-<name>`; of a directory
one that has its name, with all objects in it.
"""

from __future__ import annotations

import logging
import secrets
import time

from ckptfs.tiers.base import TierError, Trouble
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.s3_client import Missing, Precondition
from ckptfs.tiers.s3_copy import Copier
from ckptfs.tiers.s3_places import Places, above
from ckptfs.tiers.s3_site import Site

_log = logging.getLogger(__name__)

_NAME_MAX = 200
"""Bytes of the kept name, so that the key stays within 1,024."""


_DEPTH = 64
"""Directories inside each other that are looked into."""


class Conflicts:
    """Keeps objects aside."""

    def __init__(self, site: Site, places: Places, copier: Copier) -> None:
        self._site = site
        self._places = places
        self._copier = copier

    def keep(self, path: bytes) -> None:
        """Copy the object at a path aside; it stays there, to be replaced or deleted next."""
        self._copy(self._site.keys.key(path), self._name(path))

    def keep_away(self, path: bytes) -> None:
        """Copy the object at a path aside and delete it."""
        self.keep(path)
        self._site.delete([self._site.keys.key(path)])

    def clear(self, path: bytes, *, remains: bool = False) -> bool:
        """Make sure that no directory is at a path; True when somebody else's was kept.

        An empty one is just removed. `remains`: also what no listing shows: SeaweedFS keeps directories after
        their last object is gone, for a while, and refuses an object in their place.
        """
        site, prefix = self._site, self._site.keys.dir(path)
        name, found, theirs = self._name(path), [], False
        for item in site.listed(prefix):
            found.append(item.key)
            if item.key != prefix:
                theirs |= self._copy(item.key, f"{name}/{item.key[len(prefix) :]}")
        if found or remains:
            site.delete([*found, *self._inner(prefix)])
        self._places.forget(path)
        return theirs

    def _inner(self, prefix: str, depth: int = 0) -> list[str]:
        """The markers that directories of the store would have, innermost first."""
        inner = []
        if depth < _DEPTH:
            for item in self._site.page(prefix, Delimiter="/").get("CommonPrefixes", ()):
                inner += self._inner(item["Prefix"], depth + 1)
        return [*inner, prefix]

    def clear_above(self, path: bytes) -> bool:
        """Make sure that no object has the name of a directory that `path` is in; True when one was kept.

        Some stores can't have both, and refuse what is put into such a directory.
        """
        kept = False
        for parent in above(path):
            if self._site.objects.head(parent) is not None:
                self.keep_away(parent)
                kept = True
        return kept

    def _name(self, path: bytes) -> str:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = path.rpartition(b"/")[2][:_NAME_MAX].decode("utf-8", "ignore")
        return f"{stamp}-{secrets.token_hex(4)}-{name}"

    def _copy(self, key: str, name: str) -> bool:
        """False when the object is gone."""
        site, target = self._site, self._site.keys.own("conflicts", name)
        for _ in range(5):
            head = site.raw(key)
            if head is None:
                return False
            try:
                self._copier.copy(key, head, target)
            except (Precondition, Missing):
                continue  # replaced, or removed, meanwhile
            kept = site.raw(target)
            if kept is None or int(kept["ContentLength"]) != int(head["ContentLength"]):
                raise TierError(Trouble.DOWN, f"{site.url(target)} is not what was copied there")
            _log.warning("another writer's %s was kept as %s", show(key.encode()), target)
            return True
        raise TierError(Trouble.DOWN, f"{site.url(key)}: another writer keeps replacing it")
