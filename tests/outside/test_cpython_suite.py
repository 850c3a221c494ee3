"""CPython's own tests with the mount as their temporary directory."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.mounted.harness import Mount
from tests.outside.afterwards import check, run

QUICK = (
    "test_file", "test_fileio", "test_filecmp", "test_fileinput", "test_genericpath", "test_glob",
    "test_mmap", "test_posixpath", "test_shutil", "test_stat", "test_tempfile", "test_unicode_file",
    "test_zipimport",
)  # fmt: skip
MORE = (
    "test_bufio", "test_bz2", "test_dbm_dumb", "test_fcntl", "test_gzip", "test_io", "test_largefile",
    "test_lzma", "test_mailbox", "test_os", "test_pathlib", "test_pickle", "test_posix", "test_shelve",
    "test_sqlite3", "test_tarfile", "test_zipfile",
)  # fmt: skip

# They need what the mount does not have: hard links and named pipes.
WITHOUT = ("test_hardlink_to", "test_pipe")


def run_suite(mount: Mount, names: tuple[str, ...]) -> None:
    try:
        known = [n for n in names if importlib.util.find_spec(f"test.{n}") is not None]
    except ModuleNotFoundError:
        known = []
    if not known:
        pytest.skip("this Python came without its tests")
    where = mount.point / "py"
    where.mkdir()
    ignored = [word for name in WITHOUT for word in ("-i", name)]
    command = [sys.executable, "-m", "test", "--tempdir", str(where), "-j2", "-w", *ignored, *known]
    run(command, where, 900, TMPDIR=str(where))


def test_the_quick_part_passes(mount: Mount) -> None:
    run_suite(mount, QUICK)
    check(mount)


@pytest.mark.long
def test_the_rest_passes(mount: Mount) -> None:
    run_suite(mount, MORE)
    check(mount)
