"""Writers in processes of their own, to be killed in mid-save."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

SAVE = """
import os, sys
how, path = sys.argv[1], sys.argv[2]
if how == "tmp":          # safetensors: renamed before the close
    f = open(path + ".tmp", "w+b", buffering=0)
    f.write(b"half of the new one")
    os.rename(path + ".tmp", path)
elif how == "again":      # unlinked and made again
    os.unlink(path)
    f = open(path, "xb", buffering=0)
    f.write(b"half of the new one")
elif how == "append":
    f = open(path, "ab", buffering=0)
    f.write(b"half of a line")
elif how == "patch":
    f = open(path, "r+b", buffering=0)
    f.write(b"half")
else:                     # torch.save: truncated in place
    f = open(path, "wb", buffering=0)
    f.write(b"half of the new one")
print("ready", flush=True)
sys.stdin.read()
f.write(b", and the rest")
f.close()
"""


def saver(path: Path, how: str = "trunc") -> subprocess.Popen[str]:
    """A process in the middle of a save, waiting for its stdin to end before it goes on."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE, how, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """Send a signal; returns when the process is gone."""
    process.send_signal(number)
    process.wait(10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def let_finish(process: subprocess.Popen[str]) -> None:
    """The save goes on to its end."""
    process.communicate("", timeout=20)
    assert process.returncode == 0
