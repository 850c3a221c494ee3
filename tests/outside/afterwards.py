"""What must hold after any suite: no internal error, everything durable, the tier equal to the mount."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

from tests.mounted.harness import Mount


def tree(root: Path) -> dict[str, Any]:
    """Kind, mode, owner, time in ns, and content of everything that a reader of the directory sees."""
    found: dict[str, Any] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if name.startswith(".ckptfs"):
            continue
        st = path.lstat()
        content: Any = None
        if stat.S_ISREG(st.st_mode):
            digest = hashlib.blake2b()
            with path.open("rb") as f:
                while piece := f.read(1 << 20):
                    digest.update(piece)
            content = (st.st_size, digest.hexdigest())
        elif stat.S_ISLNK(st.st_mode):
            content = os.readlink(path)
        found[name] = (oct(st.st_mode), st.st_uid, st.st_gid, st.st_mtime_ns, content)
    return found


def check(mount: Mount) -> None:
    """All of it, also after a kill; leaves the mount unmounted and nothing staged."""
    mount.wait(timeout=120)
    status = mount.status()
    assert (status["errors"], status["interrupted"], status["stuck"]) == (0, [], [])
    before = tree(mount.point)
    assert tree(mount.tier) == before
    mount.kill()
    mount.start()
    mount.wait(timeout=120)
    assert tree(mount.point) == before
    assert tree(mount.tier) == before
    mount.umount()
    assert "internal error" not in mount.log()
    assert list(mount.run_dir.iterdir()) == []


def run(command: list[str], where: Path, timeout: float, **env: str) -> str:
    """Run a tool in a directory of the mount; its output. Fails the test when the tool does."""
    done = subprocess.run(
        command, cwd=where, env={**os.environ, **env}, timeout=timeout, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout[-8000:]}"
    return done.stdout
