"""The one frozen configuration object; `ckptfs.config_file` builds it from defaults, TOML and flags."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from .errors import CkptfsError, Exit

DEFAULT_STREAM_GLOBS = ("events.out.tfevents.*", "*.log", "*.out", "*.err", "*.jsonl")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a mount needs to know. Sizes in bytes, times in seconds.

    Field names are the keys of the TOML file (sizes and times may be written with units there).
    """

    mountpoint: str
    tier: str
    """URL, `file:///absolute/path` or `s3://bucket/prefix`."""
    cache_size: int
    """Budget for staged and cached bytes in RAM (or in `cache_dir`)."""
    cache_dir: str = ""
    """Directory on local disk for staging; empty: a private tmpfs."""
    spill_dir: str = ""
    """Directory for extents beyond the budget."""
    spill_size: int = 0
    """Bound of the spill; 0 switches it off."""
    fsync: str = "cache"
    """`cache` or `tier`: what fsync waits for."""
    fsync_rules: tuple[tuple[str, str], ...] = ()
    """(glob, policy) pairs, first match wins, matched against the file name and the path."""
    allow_other: bool = True
    allow_tier_down: bool = False
    foreground: bool = False
    workers: int = 2
    worker_threads: int = 4
    niceness: int = 10
    chunk_size: int = 16 << 20
    flush_limit: int = 0
    """Bytes per second that are sent to the tier at most; 0: no limit."""
    settle_time: float = 2.0
    """A file unlinked or replaced within this time of its close, unsent, is never sent (R4b)."""
    stream_globs: tuple[str, ...] = DEFAULT_STREAM_GLOBS
    stream_interval: float = 30.0
    attr_timeout: float = 1.0
    drain_timeout: float = 90.0
    """How long SIGTERM may take to drain."""
    memory_floor: float = 0.10
    """Share of the machine's memory to leave available (B6)."""
    log_level: str = "info"
    log_file: str = ""
    """Empty: a file in the data directory."""
    config_file: str = ""
    """The TOML file that was named with `--config`; empty: none, or the default one. No key."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the tier: `endpoint_url` (URLs separated by spaces), `region`, `profile`, `ca_bundle` and
    `verify` (`true` or `false`) of an object store, and what `[tier_options]` in the TOML file has."""

    def to_json(self) -> str:
        """One line of JSON, as the mount command hands it to the daemon."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        """What `to_json` wrote. CkptfsError (USAGE) when it is something else."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise CkptfsError("the configuration handed over is not a JSON object", Exit.USAGE)
        for key in ("stream_globs", "fsync_rules"):
            if isinstance(values.get(key), list):
                values[key] = tuple(tuple(item) if isinstance(item, list) else item for item in values[key])
        try:
            return cls(**values)
        except TypeError:
            odd = sorted(set(values) ^ {item.name for item in dataclasses.fields(cls)})
            raise CkptfsError(
                f"the configuration handed over does not fit this version (see {', '.join(odd)})", Exit.USAGE
            ) from None
