"""`ckptfs probe`: what a tier can do, found out by trying."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ..config_file import load
from ..errors import CkptfsError, Exit
from ..tiers import open_tier
from ..tiers.base import LARGEST, TierError, TierInfo
from ..units import format_size
from .object_store import object_store_options
from .output import fail, printable, say

_STYLES = {"ok": "green", "no": "yellow", "note": "dim"}
_PLAIN_WIDTH = 10_000
"""Whoever reads the output from a pipe wants whole lines."""


@click.command(short_help="Try out a tier.")
@click.argument("url", required=False)
@object_store_options
@click.option("--config", "config_file", metavar="FILE", help="TOML file; flags win over it.")
@click.option("--json", "as_json", is_flag=True, help="One object.")
def probe(url: str | None, config_file: str | None, as_json: bool, **flags: object) -> int:
    """Try out the tier URL (default: that of the configuration) and show what it can do.

    Everything that ckptfs would rely on is tried, also what the store has to refuse. In an object store
    nothing is left behind; a directory gets its .ckptfs.
    """
    try:
        config = load({"tier": url, **flags}, config_file).config
    except CkptfsError as exc:
        raise CkptfsError(exc.message.removeprefix("--tier: "), exc.code) from None
    info: TierInfo | None = None
    error: TierError | None = None
    findings: list[tuple[str, str, str]] = []
    try:
        info = _examine(config.tier, config.options, findings)
    except TierError as exc:
        error = exc
    if as_json:
        say(json.dumps(_object(config.tier, info, error, findings)))
    else:
        _show(config.tier, info, findings)
    if error is None:
        return Exit.OK
    if as_json:
        return Exit.TIER_DOWN
    return fail(f"the tier {config.tier} can't be used: {error.message}", Exit.TIER_DOWN)


def _examine(url: str, options: Mapping[str, str], findings: list[tuple[str, str, str]]) -> TierInfo:
    """Fills `findings` with (name, ok|no|note, text), also when it raises TierError."""
    if not url.startswith("s3:"):
        return open_tier(url, "probe", options).probe()
    from ..tiers.s3_client import Store
    from ..tiers.s3_keys import Keys
    from ..tiers.s3_probe import Probe
    from ..tiers.url import bucket_of, parse_tier_url

    bucket, prefix = bucket_of(parse_tier_url(url)[1])
    examination = Probe(Store(bucket, prefix, options), Keys(prefix), url)
    try:
        return examination.run(identify=False)
    finally:
        findings += [(found.name, found.state.value, found.text) for found in examination.findings]


def _object(url: str, info: TierInfo | None, error: TierError | None, findings: list[Any]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "url": url,
        "usable": info is not None,
        "error": error.message if error is not None else None,
        "notes": list(info.notes) if info is not None else [],
        "durable": info.durable if info is not None else None,
        "largest_bytes": info.largest if info is not None else None,
        "capabilities": json.loads(info.caps) if info is not None and info.caps else {},
        "findings": [{"name": name, "state": state, "text": text} for name, state, text in findings],
    }


def _show(url: str, info: TierInfo | None, findings: list[tuple[str, str, str]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    console.print(Text(printable(url), "bold"))
    first = max((len(name) for name, _, _ in findings), default=0)
    for name, state, text in findings:
        row = Text(printable(name).ljust(first + 2)).append(state.ljust(6), _STYLES[state])
        console.print(row.append(printable(text)), soft_wrap=True)
    if info is None:
        return
    for note in info.notes:
        console.print(Text(printable(note)), soft_wrap=True)
    if info.largest < LARGEST:
        console.print(Text(f"files of up to {format_size(info.largest)}"))
    console.print(Text("usable as a tier", "green"))
