"""fio writes, reads back and verifies every block."""

from __future__ import annotations

import shutil

import pytest

from tests.mounted.harness import Mount
from tests.outside.afterwards import check, run

pytestmark = pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")

JOBS = {
    "checkpoints": [
        "--rw=write", "--bs=1M", "--size=48M", "--numjobs=4", "--verify=xxhash", "--end_fsync=1",
    ],
    "random_writes": [
        "--rw=randwrite", "--bsrange=4k-256k", "--size=32M", "--numjobs=2", "--verify=crc32c", "--fsync=16",
    ],
    "mapped": ["--rw=randwrite", "--ioengine=mmap", "--bs=4k", "--size=16M", "--verify=crc32c"],
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_fio_verifies_what_it_wrote(mount: Mount, job: str) -> None:
    command = ["fio", f"--name={job}", f"--directory={mount.point}", "--verify_fatal=1", *JOBS[job]]
    run(command, mount.base, 120)
    check(mount)
