"""Looking at the objects of a bucket: HEAD and LIST, and what they mean as files, links and directories.

Listings show names, sizes and ETags; all else needs a HEAD, so what a HEAD said is remembered for as long as
the listing shows the same ETag and date. Objects that the mount cannot show (keys with empty segments or
control characters, devices) are left out, counted and logged once; they are never an error.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from ckptfs.tiers.base import Attrs, Kind, TierError, Trouble
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.s3_client import Missing, Precondition, Store
from ckptfs.tiers.s3_keys import Keys, trouble_with
from ckptfs.tiers.s3_meta import default_attrs, unpack

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

THREADS = 16
"""Requests at once for one listing."""
PAGE = 1000
"""Keys of one answer (S3 API reference)."""
SAMPLE = 250
"""Keys in a directory that are looked at for its newest one."""
REMEMBERED = 16384
"""HEADs that one process remembers."""
LOGGED = 1024
"""Hidden keys that are remembered so as to be logged once."""
SETTLED = timedelta(seconds=2)
"""Dates have whole seconds, so a younger object may be replaced without a visible change."""
_NO_DATE = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class Entry:
    """An object as a listing shows it."""

    key: str
    size: int
    token: str
    """The ETag without quotes."""
    last_modified: datetime


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as HEAD shows it."""

    kind: Kind | None
    """None for devices, sockets and pipes (s3fs makes them): nothing ckptfs shows."""
    size: int
    token: str
    """The ETag without quotes."""
    attrs: Attrs
    ident: str
    """`ckptfs-version`, or empty for an object of others."""
    xxh3: bytes | None
    last_modified: datetime
    mtime_known: bool = False
    """The mtime is from the metadata, not the date of the object."""
    target: bytes = b""
    """Of a link, where it was asked for."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is below `path/`."""

    marker: Entry | None
    newest: datetime | None
    """Of what is inside, of its first keys."""
    inside: bool
    """There is something besides the marker."""

    @property
    def exists(self) -> bool:
        """Whether it is a directory."""
        return self.inside or self.marker is not None


@dataclass(slots=True)
class Listing:
    """One directory: names of what is directly in it."""

    marker: Entry | None = None
    objects: dict[bytes, Entry] = field(default_factory=dict)
    dirs: list[bytes] = field(default_factory=list)
    """Their names; some stores show some that are not there any more (`Objects.look_dir` tells)."""


def url(store: Store, key: str) -> str:
    """A key for messages."""
    return f"s3://{store.bucket}/{show(key.encode('utf-8', 'surrogateescape'))}"


class Objects:
    """The objects of one bucket and prefix. For any number of threads."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._heads: OrderedDict[str, Seen] = OrderedDict()
        self._hidden: OrderedDict[str, None] = OrderedDict()

    @property
    def hidden(self) -> int:
        """Objects that listings left out, of the last `LOGGED` ones."""
        return len(self._hidden)

    @property
    def pool(self) -> Executor:
        """`THREADS` threads for single requests; what runs there must not wait for more of them."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, "s3")
            return self._pool

    def each(self, job: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`job` of every item, many at once; results in order. All have ended when it raises."""
        items = list(items)
        if len(items) == 1:
            return [job(items[0])]
        running = [self.pool.submit(job, item) for item in items]
        failure: BaseException | None = None
        results: list[R] = []
        for future in running:
            try:
                results.append(future.result())
            except Exception as exc:
                failure = failure or exc
                for other in running:
                    other.cancel()
        if failure is not None:
            raise failure
        return results

    # -- single objects --------------------------------------------------------------------------

    def head(self, path: bytes) -> Seen | None:
        """The object at a path, or None. REFUSED for a path that cannot be a key, or when HEAD is."""
        return self._head(self._keys.key(path))

    def head_many(self, paths: Iterable[bytes]) -> list[Seen | None]:
        """`head` of all, at once."""
        return self.each(self.head, list(paths))

    def stat(self, path: bytes) -> Seen | None:
        """`head` with the target of a link; from a listing where HEAD is refused (SSE-C, say)."""
        key = self._keys.key(path)
        try:
            return self._with_target(key, self._head(key))
        except TierError as exc:
            if exc.trouble is not Trouble.REFUSED:
                raise
            for entry in self._page(key, limit=1).entries:
                if entry.key == key:
                    return self._refused(entry, exc)
            return None

    def described(self, entries: Iterable[Entry]) -> list[Seen | None]:
        """What was listed, as it is now, with the targets of links; None for what is gone."""
        return self.each(self._describe, list(entries))

    def described_marker(self, entry: Entry) -> Seen | None:
        """The marker of a directory, which was listed."""
        return self._describe(entry)

    def _describe(self, entry: Entry) -> Seen | None:
        with self._lock:
            known = self._heads.get(entry.key)
            if known is not None:
                self._heads.move_to_end(entry.key)
        if known is not None and known.token == entry.token and _same_second(known, entry):
            return known
        try:
            return self._with_target(entry.key, self._head(entry.key))
        except TierError as exc:
            if exc.trouble is not Trouble.REFUSED:
                raise
            return self._refused(entry, exc)

    def _refused(self, entry: Entry, exc: TierError) -> Seen:
        """What a listing alone tells."""
        _log.info("attributes are not known: %s", exc)
        attrs = default_attrs(entry.last_modified.replace(microsecond=0))
        return Seen(Kind.FILE, entry.size, entry.token, attrs, "", None, entry.last_modified)

    def _head(self, key: str) -> Seen | None:
        def ask(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = client.head_object(Bucket=self._store.bucket, Key=key)
            return answer

        try:
            answer = self._store.run(f"looking at {url(self._store, key)}", ask)
        except Missing:
            with self._lock:
                self._heads.pop(key, None)
            return None
        seen = seen_of(answer, int(answer["ContentLength"]), marker=key.endswith("/"))
        if seen.kind is not Kind.LINK and _is_settled(answer):
            self._remember(key, seen)
        return seen

    def _with_target(self, key: str, seen: Seen | None) -> Seen | None:
        """With the target of a link, which is its body."""
        for _ in range(5):
            if seen is None or seen.kind is not Kind.LINK:
                return seen
            token = seen.token

            def ask(client: Any, token: str = token) -> bytes:
                answer = client.get_object(Bucket=self._store.bucket, Key=key, IfMatch=f'"{token}"')
                body: bytes = answer["Body"].read()
                return body if str(answer["ETag"]).strip('"') == token else b""

            try:
                target = self._store.run(f"reading the link {url(self._store, key)}", ask)
            except (Missing, Precondition):
                target = b""
            if len(target) == seen.size:
                return replace(seen, target=target)
            seen = self._head(key)  # another object by now
        raise TierError(Trouble.DOWN, f"{url(self._store, key)}: another writer keeps replacing this link")

    def _remember(self, key: str, seen: Seen) -> None:
        with self._lock:
            self._heads[key] = seen
            self._heads.move_to_end(key)
            while len(self._heads) > REMEMBERED:
                self._heads.popitem(last=False)

    # -- directories -----------------------------------------------------------------------------

    def is_dir(self, path: bytes) -> bool:
        """Whether a path is a directory: the root, or something is below it, if only a marker."""
        return not path or self.look_dir(path, sample=1).exists

    def look_dir(self, path: bytes, sample: int = SAMPLE) -> Place:
        """What is in a directory, judged by its first `sample` keys (at any depth, but in the root).

        Without a delimiter, since SeaweedFS shows directories that are not there any more with one.
        """
        prefix = self._keys.dir(path)
        page = self._page(prefix, limit=max(2, sample), delimiter="" if path else "/")
        marker: Entry | None = None
        newest: datetime | None = None
        for entry in page.entries:
            if entry.key == prefix:
                marker = entry
            elif newest is None or entry.last_modified > newest:
                newest = entry.last_modified
        return Place(marker, newest, newest is not None or bool(page.prefixes))

    def listing(self, path: bytes) -> Listing:
        """Everything directly in a directory, in any number of pages; ckptfs's own names left out."""
        prefix = self._keys.dir(path)
        found = Listing()
        for page in self._pages(prefix, "/"):
            for entry in page.entries:
                if entry.key == prefix and prefix:
                    found.marker = entry
                elif name := self._shown(prefix, entry.key):
                    found.objects[name] = entry
            for text in page.prefixes:
                if name := self._shown(prefix, text[:-1]):
                    found.dirs.append(name)
        return found

    def below(self, prefix: str) -> list[Entry]:
        """All objects whose keys begin so, in the order of keys."""
        return [entry for page in self._pages(prefix, "") for entry in page.entries]

    def hide(self, key: str, why: str) -> None:
        """Count and log an object that is left out."""
        with self._lock:
            if key in self._hidden:
                self._hidden.move_to_end(key)
                return
            self._hidden[key] = None
            while len(self._hidden) > LOGGED:
                self._hidden.popitem(last=False)
        _log.warning("%s is not shown: %s", url(self._store, key), why)

    def _shown(self, prefix: str, key: str) -> bytes:
        """The name of what a listing shows, or nothing when the mount cannot have it."""
        name = key[len(prefix) :].encode("utf-8", "surrogateescape")
        if name.startswith(b".ckptfs"):
            return b""
        if b"/" in name or trouble_with(name):
            self.hide(key, "the mount cannot have this name")
            return b""
        return name

    # -- pages -----------------------------------------------------------------------------------

    def _pages(self, prefix: str, delimiter: str) -> Iterator[_Page]:
        page = self._page(prefix, delimiter=delimiter)
        yield page
        while page.more is not None:
            more = page.more
            page = self._page(prefix, delimiter=delimiter, after=more)
            if page.more == more:
                raise TierError(Trouble.DOWN, f"listing {url(self._store, prefix)}: the store repeats itself")
            yield page

    def _page(
        self, prefix: str, *, limit: int = PAGE, delimiter: str = "", after: Mapping[str, str] | None = None
    ) -> _Page:
        """One answer of ListObjectsV2. URL-encoded, since XML cannot carry every key."""
        more = {"Delimiter": delimiter, **(after or {})} if delimiter else dict(after or {})

        def ask(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = client.list_objects_v2(
                Bucket=self._store.bucket, Prefix=prefix, EncodingType="url", MaxKeys=limit, **more
            )
            return answer

        return _page_of(self._store.run(f"listing {url(self._store, prefix)}", ask))


@dataclass(slots=True)
class _Page:
    entries: list[Entry]
    prefixes: list[str]
    more: dict[str, str] | None
    """Arguments that ask for the next one."""


def _page_of(answer: Mapping[str, Any]) -> _Page:
    encoded = answer.get("EncodingType") == "url"
    entries = []
    for item in answer.get("Contents", ()):
        token = str(item.get("ETag", "")).strip('"')
        key = decoded(item["Key"], encoded)
        if key.endswith("/") and not token:
            continue  # a directory of SeaweedFS itself, not an object
        entries.append(Entry(key, int(item["Size"]), token, item.get("LastModified", _NO_DATE)))
    prefixes = [decoded(item["Prefix"], encoded) for item in answer.get("CommonPrefixes", ())]
    more: dict[str, str] | None = None
    if answer.get("IsTruncated"):
        token = str(answer.get("NextContinuationToken", ""))
        last = max([entry.key for entry in entries] + prefixes, default="")
        if token or last:
            more = {"ContinuationToken": token} if token else {"StartAfter": last}
    return _Page(entries, prefixes, more)


def decoded(text: str, encoded: bool) -> str:
    """A key of a listing; bytes that are not UTF-8 become surrogates."""
    if not encoded:
        return text
    return unquote_to_bytes(text.replace("+", " ")).decode("utf-8", "surrogateescape")


def seen_of(answer: Mapping[str, Any], size: int, *, marker: bool = False) -> Seen:
    """What the answer of a HEAD or a GET says about an object of `size` bytes."""
    date: datetime = answer.get("LastModified", _NO_DATE)
    meta = unpack(answer.get("Metadata", {}), size, date, directory=marker)
    token = str(answer.get("ETag", "")).strip('"')
    return Seen(meta.kind, size, token, meta.attrs, meta.ident, meta.xxh3, date, meta.mtime_known)


def _same_second(seen: Seen, entry: Entry) -> bool:
    return seen.last_modified.replace(microsecond=0) == entry.last_modified.replace(microsecond=0)


def _is_settled(answer: Mapping[str, Any]) -> bool:
    """By the store's own clock."""
    now = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return bool(parsedate_to_datetime(now) - answer["LastModified"] >= SETTLED)
    except (KeyError, TypeError, ValueError):
        return False
