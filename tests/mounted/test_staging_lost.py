"""Staging files that are gone when the mount comes back: said by name, and no reason to hold up the rest."""

from __future__ import annotations

from collections.abc import Callable

from tests.mounted.harness import Mount


def test_what_is_missing_is_said_and_all_else_is_published(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    mount.start(config="settle_time = 3600\n")
    for name in ("a", "b", "c", "d"):
        mount.point.joinpath(name).write_bytes(name.encode() * 5000)
    mount.kill(workers=True)
    lost = sorted(next(mount.run_dir.glob("*/staging/data")).iterdir(), key=lambda p: p.read_bytes())[:2]
    for path in lost:
        path.unlink()
    mount.start()
    status = mount.status()
    assert [(i["path"], i["reason"]) for i in status["interrupted"]] == [
        ("a", "its staged bytes are missing"),
        ("b", "its staged bytes are missing"),
    ]
    answer = mount.ask("wait", paths=[], timeout_s=30)
    assert (answer["code"], answer["remaining"]) == (5, ["a", "b"])
    assert mount.tier_names() == {"c", "d"}
    for name in ("a", "b"):
        mount.cli("discard", mount.point / name)
    assert {p.name for p in mount.point.iterdir()} == {"c", "d"}
    mount.umount()
