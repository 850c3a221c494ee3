"""What `ckptfs status` shows of one mount, as styled lines, from the daemon's answer (docs/CONTROL.md)."""

from __future__ import annotations

import shlex
from typing import Any

from rich.text import Text

from ..units import format_duration, format_rate, format_size, plural
from .output import full_path, printable

Status = dict[str, Any]

_LABEL_WIDTH = 13
_BAR_WIDTH = 24
_MOST_FILES = 20
_HEALTH = {"up": "green", "down": "red", "stuck": "red"}
_FSYNC = {
    "cache": "fsync returns when safe from process death, before the tier has it",
    "tier": "fsync returns when durable on the tier",
}


class Renderer:
    """Turns a status object into lines for a given width (columns) and character set."""

    def __init__(self, width: int = 100, blocks: bool = True) -> None:
        self._width = width
        self._full, self._half, self._free = ("█", "▒", "░") if blocks else ("#", "=", ".")
        self._more = "…" if blocks else "..."

    def title(self, status: Status) -> Text:
        """Mount point and state of the daemon."""
        text = Text().append(printable(str(status.get("mountpoint", "?"))), "bold")
        text.append(f"  pid {status.get('pid')}, up {format_duration(_number(status, 'uptime_s'))}", "dim")
        if status.get("draining"):
            text.append("  draining: unmounted, still publishing", "yellow")
        return text

    def lines(self, status: Status, now: float) -> list[Text]:
        """Everything below the title; `now` is the Unix time that ages are counted from."""
        mountpoint = str(status.get("mountpoint", ""))
        lines = [*self._tier(status, now), *self._fsync(status), self._cache(status), self._rates(status)]
        lines += [self._risk(status), *self._files(status, mountpoint)]
        lines += self._interrupted(status, mountpoint, now)
        lines += self._stuck(status, mountpoint, now)
        lines += self._skipped(status, mountpoint)
        lines += self._held_back(status)
        lines.append(self._last_durable(status, mountpoint, now))
        lines += self._remarks(status)
        if status.get("log_file"):
            lines.append(_row("log", str(status["log_file"])))
        return lines

    def _tier(self, status: Status, now: float) -> list[Text]:
        tier = _table(status, "tier")
        state = str(tier.get("state", "unknown"))
        row = _row("tier", str(tier.get("url", "?")) + "  ")
        row.append(state, _HEALTH.get(state, "yellow"))
        if tier.get("since") is not None and state != "up":
            row.append(f" for {format_duration(max(0.0, now - _number(tier, 'since')))}")
        if tier.get("error"):
            row.append(f": {printable(str(tier['error']))}", "red")
        notes = tier.get("notes")
        return [row, *(_row("", str(note)) for note in (notes if isinstance(notes, list) else ()))]

    def _fsync(self, status: Status) -> list[Text]:
        policy = str(status.get("fsync", "?"))
        rows = [_row("fsync", policy)]
        rows[0].append(f"  {_FSYNC[policy]}" if policy in _FSYNC else "", "dim")
        rules = [(str(rule[0]), str(rule[1])) for rule in status.get("fsync_rules") or [] if len(rule) == 2]
        if rules:
            rows.append(_row("", "except " + ", ".join(f"{glob}: {choice}" for glob, choice in rules)))
        return rows

    def _cache(self, status: Status) -> Text:
        cache = _table(status, "cache")
        limit, clean = _number(cache, "limit_bytes"), _number(cache, "clean_bytes")
        dirty, spilled = _number(cache, "dirty_bytes"), _number(cache, "spilled_bytes")
        # What is spilled takes no room in the budget, so the bar goes by the used bytes where they are known.
        held = max(0.0, _number(cache, "used_bytes") - clean) if "used_bytes" in cache else dirty
        row = _row("cache", "")
        first = self._cells(held, limit)
        second = min(_BAR_WIDTH - first, self._cells(clean, limit))
        row.append(self._full * first, "yellow").append(self._half * second, "green")
        row.append(self._free * (_BAR_WIDTH - first - second), "dim")
        row.append(f"  dirty {format_size(dirty)}", "yellow" if dirty else "")
        row.append(f"  clean {format_size(clean)}  spilled {format_size(spilled)}")
        spill_limit = _number(cache, "spill_limit_bytes")
        row.append(f" of {format_size(spill_limit)}" if spill_limit else "")
        row.append(f"  limit {format_size(limit)}")
        return row

    def _cells(self, part: float, whole: float) -> int:
        """Cells of a bar; something is never shown as nothing."""
        if part <= 0 or whole <= 0:
            return 0
        return max(1, min(_BAR_WIDTH, round(_BAR_WIDTH * part / whole)))

    def _rates(self, status: Status) -> Text:
        absorb, flush = _number(status, "absorb_bytes_per_s"), _number(status, "flush_bytes_per_s")
        return _row("rates", f"absorb {format_rate(absorb)}  flush {format_rate(flush)}")

    def _risk(self, status: Status) -> Text:
        pending = _table(status, "pending")
        files, entries = int(_number(pending, "files")), int(_number(pending, "entries"))
        size = _number(pending, "bytes")
        kept, kept_size = int(_number(pending, "kept_back_files")), _number(pending, "kept_back_bytes")
        only_here = f"interrupted or skipped: {format_size(kept_size)} in {plural(kept, 'file')}, only here"
        if not files and not entries and not size:
            if kept:
                return _row("at risk", only_here, "yellow")
            return _row("at risk", "nothing: everything finished is durable", "green")
        row = _row("at risk", f"{format_size(size)} in {plural(files, 'file')}", "yellow")
        if entries > files:
            row.append(f", {plural(entries, 'log entry')}")
        if pending.get("oldest_age_s") is not None:
            row.append(f", oldest {format_duration(_number(pending, 'oldest_age_s'))}")
        eta, still_open = status.get("eta_s"), int(_number(pending, "open_files"))
        known = f"; durable in about {format_duration(float(eta))}" if eta is not None else "; ETA unknown"
        if still_open:
            # What is not closed yet has no end that could be foretold.
            known = f"; {plural(still_open, 'file')} still being written" + (
                f", what is closed durable in about {format_duration(float(eta))}" if eta else ""
            )
        return row.append(known).append(f"; {only_here}" if kept else "")

    def _files(self, status: Status, mountpoint: str) -> list[Text]:
        files = [item for item in status.get("files") or [] if isinstance(item, dict)]
        rows = [self._file(item, mountpoint) for item in files[:_MOST_FILES]]
        total = max(len(files), int(_number(status, "files_total")))
        if total > len(rows):
            rows.append(_row("", f"and {plural(total - len(rows), 'more file')}", "dim"))
        return rows

    def _file(self, item: Status, mountpoint: str) -> Text:
        size, sent, state = _number(item, "size"), _number(item, "sent_bytes"), str(item.get("state", "?"))
        row = _row(state, "", "", "cyan" if state in ("sending", "publishing") else "")
        numbers = f" {format_size(size)}"
        if state not in ("open", "waiting"):
            share = min(1.0, sent / size) if size else 1.0
            cells = int(_BAR_WIDTH * share)
            row.append(self._full * cells, "cyan").append(self._free * (_BAR_WIDTH - cells), "dim")
            numbers = f" {int(100 * share):3d}% {format_size(sent)} of {format_size(size)}"
        else:
            row.append(self._free * _BAR_WIDTH, "dim")
        row.append(f"{numbers:<27} ")
        path = full_path(mountpoint, str(item.get("path", "?")))
        return row.append(self._shorten(printable(path), self._width - row.cell_len))

    def _shorten(self, text: str, width: int) -> str:
        """The end of a path tells files apart, so the beginning is cut."""
        width = max(width, 24)
        return text if len(text) <= width else self._more + text[len(self._more) - width :]

    def _interrupted(self, status: Status, mountpoint: str, now: float) -> list[Text]:
        rows = []
        for item in status.get("interrupted") or []:
            path = full_path(mountpoint, str(item.get("path", "?")))
            row = _row("interrupted", f"{printable(path)}  {format_size(_number(item, 'size'))}", "yellow")
            row.append(f"  {printable(str(item.get('reason') or ''))}{_ago(item, now)}")
            rows += [row, _command("publish", path, "keep it"), _command("discard", path, "drop it")]
        return rows

    def _stuck(self, status: Status, mountpoint: str, now: float) -> list[Text]:
        rows = []
        for item in status.get("stuck") or []:
            path = full_path(mountpoint, str(item.get("path", "?")))
            row = _row("stuck", f"{item.get('operation', '')} {printable(path)}".strip(), "red")
            row.append(f": {printable(str(item.get('error') or ''))}")
            row.append(f" ({plural(int(_number(item, 'retries')), 'retry')}{_ago(item, now)})")
            rows += [row, _command("skip", path, "let the rest pass")]
        return rows

    def _skipped(self, status: Status, mountpoint: str) -> list[Text]:
        rows = []
        for item in status.get("skipped") or []:
            path = full_path(mountpoint, str(item.get("path", "?")))
            row = _row("skipped", f"{printable(path)}  {format_size(_number(item, 'size'))}", "yellow")
            row.append(", kept in staging, not on the tier")
            rows += [row, _command("publish", path, "try again"), _command("discard", path, "drop it")]
        return rows

    def _held_back(self, status: Status) -> list[Text]:
        held, waiting = _number(status, "held_back_s"), int(_number(status, "writers_waiting"))
        row = _row("held back", f"writers waited {format_duration(held)} in all", "yellow" if waiting else "")
        if waiting:
            row.append(f", {plural(waiting, 'writer')} waiting now", "yellow")
        return [row]

    def _last_durable(self, status: Status, mountpoint: str, now: float) -> Text:
        last = status.get("last_durable")
        if not isinstance(last, dict):
            return _row("last durable", "nothing yet")
        path = printable(full_path(mountpoint, str(last.get("path", "?"))))
        age = format_duration(max(0.0, now - _number(last, "time")))
        return _row("last durable", f"{path}  {age} ago")

    def _remarks(self, status: Status) -> list[Text]:
        rows = []
        if status.get("recovered"):
            rows.append(_row("recovered", printable(str(status["recovered"]))))
        if _number(status, "conflicts"):
            count = plural(int(_number(status, "conflicts")), "object")
            rows.append(_row("conflicts", f"{count} of others kept under .ckptfs/conflicts/", "yellow"))
        if _number(status, "reuploaded_bytes"):
            rows.append(_row("sent again", format_size(_number(status, "reuploaded_bytes"))))
        if status.get("journal_error"):
            error = printable(str(status["journal_error"]))
            rows.append(_row("journal", f"can't be written ({error}): changes wait until it can", "red"))
        if _number(status, "errors"):
            rows.append(_row("errors", f"{int(_number(status, 'errors'))} internal, see the log", "red"))
        return rows


def _row(label: str, value: str, style: str = "", label_style: str = "dim") -> Text:
    return Text().append(f"{label:<{_LABEL_WIDTH}}", label_style).append(printable(value), style)


def _command(name: str, path: str, purpose: str) -> Text:
    # A path with unprintable bytes can't be pasted from its printable form, but a shell's $'...' can be.
    shown = shlex.quote(path) if printable(path) == path else f"$'{printable(path)}'"
    return _row("", f"ckptfs {name} {shown}", "bold").append(f"   ({purpose})", "dim")


def _ago(item: Status, now: float) -> str:
    if item.get("since") is None:
        return ""
    return f", {format_duration(max(0.0, now - _number(item, 'since')))} ago"


def _table(status: Status, name: str) -> Status:
    value = status.get(name)
    return value if isinstance(value, dict) else {}


def _number(table: Status, name: str) -> float:
    """A number of the answer; 0 when it is missing, so that an older daemon can still be shown."""
    value = table.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
