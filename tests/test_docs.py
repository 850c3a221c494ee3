"""What the documents name exists: tests, configuration keys and defaults, exit codes, commands, options."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import click
import pytest

from ckptfs.cli.main import cli
from ckptfs.config import Config
from ckptfs.config_file import DEFAULT_MOUNTPOINT
from ckptfs.config_keys import KEYS, OBJECT_STORE_KEYS, Given
from ckptfs.errors import Exit

ROOT = Path(__file__).parent.parent
DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
CONFIGURATION = (ROOT / "docs" / "CONFIGURATION.md").read_text()
README = (ROOT / "README.md").read_text()

COMPUTED = {"tier", "cache_size", "spill_dir", "spill_size", "allow_other", "log_file"}
"""Keys whose default depends on the machine; tests/cli/test_config_file.py has those."""


def table(text: str, heading: str) -> dict[str, list[str]]:
    """Rows of the Markdown table whose first column is headed so, by the code spans of their first cell."""
    rows: dict[str, list[str]] = {}
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            break
    else:
        raise AssertionError(f"no table headed {heading}")
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        for name in re.findall(r"`([^`]+)`", cells[0]) or [cells[0]]:
            rows[name] = cells
    return rows


# -- tests named as evidence -------------------------------------------------------------------


@functools.cache
def names_of(path: str) -> tuple[frozenset[str], frozenset[str]]:
    """(names that can be a test, words that can be a parameter) of a test file."""
    tree = ast.parse((ROOT / path).read_text())
    tests: set[str] = set()
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            (tests if node.name.lower().startswith("test") else words).add(node.name)
        elif isinstance(node, ast.Assign):
            tests |= {t.id for t in node.targets if isinstance(t, ast.Name) and t.id.startswith("Test")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return frozenset(tests), frozenset(words)


NAMED = sorted(
    {
        (str(doc.relative_to(ROOT)), *found)
        for doc in DOCS
        for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]`]+)\])?`", doc.read_text())
    }
)


def test_the_promises_name_tests() -> None:
    assert len([n for n in NAMED if n[0] == "docs/SEMANTICS.md"]) > 100


@pytest.mark.parametrize(("doc", "path", "name", "parameter"), NAMED, ids=["::".join(n[1:3]) for n in NAMED])
def test_a_test_named_in_a_document_exists(doc: str, path: str, name: str, parameter: str) -> None:
    assert (ROOT / path).is_file(), f"{doc} names {path}"
    tests, words = names_of(path)
    assert name in tests, f"{doc} names {path}::{name}"
    assert not parameter or parameter in words, f"{doc} names {path}::{name}[{parameter}]"


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: p.name)
def test_every_mention_of_a_test_or_file_is_well_formed(doc: Path) -> None:
    text = doc.read_text()
    for found in re.findall(r"tests/[\w/.]+::\S*", text):
        assert re.match(r"tests/[\w/]+\.py::\w+(\[[^\]`]+\])?`", found), f"{doc.name}: {found}"
    for found in re.findall(r"`((?:docs|tests|tools|systemd)/[\w@./-]+)`", text):
        assert (ROOT / found).exists(), f"{doc.name} names {found}"


def test_the_table_of_operations_has_its_columns() -> None:
    """Every row ends with a test, or says that there is none."""
    rows = table((ROOT / "docs" / "SEMANTICS.md").read_text(), "operation")
    assert len(rows) > 50
    for name, cells in rows.items():
        if set(cells[0]) <= set("-"):
            continue
        assert len(cells) == 5, name
        assert "::" in cells[4] or "untested" in cells[4], name


# -- configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_documented_with_its_default(key: str) -> None:
    rows = table(CONFIGURATION, "key")
    assert key in rows, f"docs/CONFIGURATION.md has no row for {key}"
    if key in COMPUTED:
        return
    cell = rows[key][1]
    names = re.findall(r"`([^`]+)`", rows[key][0])
    if len(names) > 1:
        cell = cell.split(",")[names.index(key)].strip()
    config = Config(mountpoint=DEFAULT_MOUNTPOINT, tier="", cache_size=0)
    default = getattr(config, "options" if key in ("tier_options", *OBJECT_STORE_KEYS) else key)
    if not cell:
        assert not default, f"{key} has the default {default!r}"
    elif isinstance(default, tuple):
        assert tuple(re.findall(r"`([^`]+)`", cell)) == default
    else:
        # The key's own reader, which takes numbers with units.
        written = cell.strip("`").replace(" %", "%")
        assert KEYS[key](Given(written, key, "/", loose=True)) == default


def test_only_keys_are_documented() -> None:
    assert {k for k in table(CONFIGURATION, "key") if not set(k) <= set("-")} == set(KEYS)


def test_exit_codes_are_documented() -> None:
    rows = table(CONFIGURATION, "code")
    codes = {int(code) for code in rows if code.isdigit()}
    assert codes == {int(code) for code in Exit} | {130}


# -- commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_a_command_and_its_options_are_in_the_readme(name: str) -> None:
    assert f"`ckptfs {name}" in README, name
    for parameter in cli.commands[name].params:
        if isinstance(parameter, click.Option):
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert re.search(rf"{option}(?![\w-])", README), f"{name} {option}"


# -- the repository ----------------------------------------------------------------------------

FOREIGN = [
    # In pieces, so that this file is none of them.
    "/" + "work/", "../" + "shared", "issues" + " show", ".lib" + "rary/", ".mir" + "ror/",
]  # fmt: skip
"""Paths of the workplace, and its tools, that mean nothing to a reader of the repository."""


def files_of_the_repository() -> list[Path]:
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(git, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git repository")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def test_no_file_names_the_place_where_it_was_made() -> None:
    for path in files_of_the_repository():
        text = path.read_text(errors="replace")
        for word in FOREIGN:
            assert not re.search(rf"(?<![\w.-]){re.escape(word)}", text), f"{path} says {word}"
