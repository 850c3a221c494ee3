"""What the human view of `ckptfs status` says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fake_daemon import SAMPLE

from ckptfs.cli.output import full_path, listing, printable
from ckptfs.cli.render import Renderer

NOW = 1000.0


def shown(changes: dict[str, Any] | None = None, blocks: bool = True, width: int = 120) -> str:
    status = {**copy.deepcopy(SAMPLE), "mountpoint": "/ckpt", "pid": 42, **(changes or {})}
    renderer = Renderer(width, blocks)
    return "\n".join(line.plain.rstrip() for line in [renderer.title(status), *renderer.lines(status, NOW)])


def test_the_whole_picture() -> None:
    assert shown() == "\n".join([
        "/ckpt  pid 42, up 1m 15s",
        "tier         file:///mnt/nfs  up",
        "             a note",
        "fsync        cache  fsync returns when safe from process death, before the tier has it",
        "             except *.meta: tier",
        "cache        ██████▒▒▒░░░░░░░░░░░░░░░  dirty 2.0 GiB  clean 1.0 GiB"
        "  spilled 0 B of 32.0 GiB  limit 8.0 GiB",
        "rates        absorb 1.0 GiB/s  flush 512 MiB/s",
        "at risk      2.0 GiB in 3 files, 4 log entries, oldest 4.2 s; durable in about 4.0 s",
        "sending      ████████████░░░░░░░░░░░░  50% 512 MiB of 1.0 GiB    /ckpt/run/step_1.pt",
        "waiting      ░░░░░░░░░░░░░░░░░░░░░░░░ 1.0 GiB                    /ckpt/run/step_2.pt",
        "             and 1 more file",
        "held back    writers waited 1.5 s in all",
        "last durable /ckpt/run/step_0.pt  16m 40s ago",
        "log          /var/lib/ckptfs/logs/x.log",
    ])  # fmt: skip


def test_without_block_characters_it_is_ascii() -> None:
    text = shown(blocks=False)
    assert text.isascii()
    assert "######===..............." in text


def test_nothing_at_risk() -> None:
    nothing = {"entries": 0, "files": 0, "bytes": 0, "oldest_age_s": None}
    text = shown({"pending": nothing, "files": [], "files_total": 0})
    assert "at risk      nothing: everything finished is durable" in text


def test_what_is_kept_back_is_at_risk_too() -> None:
    kept = {"kept_back_files": 2, "kept_back_bytes": 3 << 20}
    nothing = {"entries": 0, "files": 0, "bytes": 0, "oldest_age_s": None, **kept}
    text = shown({"pending": nothing, "files": [], "files_total": 0})
    assert "at risk      interrupted or skipped: 3.0 MiB in 2 files, only here" in text
    text = shown({"pending": {"entries": 1, "files": 1, "bytes": 1 << 20, "oldest_age_s": 2, **kept}})
    assert "durable in about 4.0 s; interrupted or skipped: 3.0 MiB in 2 files, only here" in text


def test_files_being_written_have_no_eta() -> None:
    pending = {"entries": 1, "files": 2, "bytes": 2 << 20, "oldest_age_s": 2, "open_files": 1}
    text = shown({"pending": pending, "eta_s": None})
    assert "oldest 2.0 s; 1 file still being written\n" in text
    text = shown({"pending": pending})
    assert "1 file still being written, what is closed durable in about 4.0 s" in text


def test_trouble_names_the_command_that_helps() -> None:
    text = shown({
        "draining": True,
        "tier": {"url": "file:///x", "state": "down", "error": "Stale file handle", "since": 940},
        "interrupted": [{"path": "a b.pt", "size": 1 << 20, "reason": "killed by signal 9", "since": 900}],
        "stuck": [{"path": "c.pt", "operation": "PUT", "error": "not allowed", "since": 990, "retries": 2}],
        "skipped": [{"path": "d.pt", "size": 10}],
        "writers_waiting": 2,
        "conflicts": 1,
        "reuploaded_bytes": 1 << 20,
        "errors": 3,
        "recovered": "recovered 4 files",
        "eta_s": None,
    })  # fmt: skip
    for part in (
        "draining: unmounted, still publishing",
        "down for 1m: Stale file handle",
        "interrupted  /ckpt/a b.pt  1.0 MiB  killed by signal 9, 1m 40s ago",
        "ckptfs publish '/ckpt/a b.pt'   (keep it)",
        "ckptfs discard '/ckpt/a b.pt'   (drop it)",
        "stuck        PUT /ckpt/c.pt: not allowed (2 retries, 10 s ago)",
        "ckptfs skip /ckpt/c.pt   (let the rest pass)",
        "skipped      /ckpt/d.pt  10 B, kept in staging, not on the tier",
        "ckptfs publish /ckpt/d.pt   (try again)",
        "ckptfs discard /ckpt/d.pt   (drop it)",
        "2 writers waiting now",
        "1 object of others kept under .ckptfs/conflicts/",
        "sent again   1.0 MiB",
        "errors       3 internal, see the log",
        "recovered    recovered 4 files",
        "ETA unknown",
    ):
        assert part in text


@pytest.mark.parametrize(
    "status", [{}, {"files": None, "cache": None, "tier": "x", "pending": [], "interrupted": None}]
)
def test_missing_fields_do_not_matter(status: dict[str, Any]) -> None:
    renderer = Renderer()
    assert renderer.title(status)
    assert renderer.lines(status, NOW)


def test_long_paths_keep_their_end() -> None:
    files = [{"path": "deep/" * 60 + "model.pt", "size": 10, "sent_bytes": 5, "state": "sending"}]
    (line,) = [line for line in shown({"files": files, "files_total": 1}).splitlines() if "model.pt" in line]
    assert len(line) <= 120
    assert line.endswith("/model.pt")


def test_names_cannot_disturb_the_terminal() -> None:
    assert printable("a\x1b[2Jb\u202ec\udcff") == "a\\x1b[2Jb\\u202ec\\xff"
    assert printable("größe/模型.pt") == "größe/模型.pt"


def test_paths_as_typed() -> None:
    assert full_path("/ckpt", "a/b") == "/ckpt/a/b"
    assert full_path("/ckpt", "/ckpt/a") == "/ckpt/a"
    assert full_path("/ckpt", "/a") == "/ckpt/a"
    assert full_path("/ckpt", "") == "/ckpt"
    assert listing(["a", "b", "c"], most=2) == "  a\n  b\n  ... and 1 more"
