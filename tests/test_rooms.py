"""Imports run one way: from the edges to the core."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ckptfs"

MAY_IMPORT = {
    "tiers": {"errors", "tiers"},
    "core": {"core", "tiers"},
    "journal": {"core", "errors", "journal"},
    "staging": {"errors", "paths", "staging", "tiers"},
    "flush": {"errors", "flush", "tiers"},
    "engine": {"config", "core", "engine", "errors", "flush", "journal", "staging", "tiers", "units"},
    "fuse": {"core", "engine", "errors", "fuse", "tiers"},
    "control": {"control", "core", "engine", "errors", "mountinfo", "paths", "resume"},
    "cli": {
        "cli", "config", "config_file", "config_keys", "control", "errors", "memory",
        "mountinfo", "mountpoint", "paths", "tiers", "units",
    },
}  # fmt: skip

ONLY = {
    "pyfuse3": {"fuse"}, "sqlite3": {"journal"}, "boto3": {"tiers"}, "botocore": {"tiers"}, "click": {"cli"},
}  # fmt: skip

PURE = {"os", "trio", "time", "pyfuse3", "sqlite3", "socket", "subprocess", "threading"}


def imports(path: Path) -> set[str]:
    """Dotted names a module imports."""
    found: set[str] = set()
    package = ["ckptfs", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {stem} if node.module else {f"{stem}.{a.name}" for a in node.names}
    return found


MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[str(p.relative_to(ROOT)) for p in MODULES])
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    names = imports(path)
    for name in names:
        first = name.split(".")[0]
        assert first not in ONLY or room in ONLY[first], f"{path} imports {name}"
        if first == "ckptfs" and room in MAY_IMPORT and name not in ("ckptfs", "ckptfs.__version__"):
            assert name.split(".")[1] in MAY_IMPORT[room], f"{path} imports {name}"
    if room == "core":
        assert not {n.split(".")[0] for n in names} & (PURE - {"os"}), f"{path} is not pure"
    assert len(path.read_text().splitlines()) <= 520, f"{path} is too long"
