"""A killed trainer's half-written file never replaces the good one (R6)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.crash.campaign import Campaign, tree
from tests.crash.content import judge_file
from tests.crash.test_kill_loop import SEED
from tests.mounted.harness import Mount, wait_for

SAVE = """
import os, signal, sys, threading, time, torch

def written():
    with open("/proc/self/io") as f:
        return int(f.read().split("wchar: ")[1].split()[0])

def end_in_the_middle():
    before = written()
    while written() < before + (40 << 20):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)

state = {f"layer{i}": torch.full((1 << 20,), 2.0 + i) for i in range(150)}
threading.Thread(target=end_in_the_middle).start()
torch.save(state, sys.argv[1])
"""


def save(value: float, layers: int, path: Path) -> None:
    import torch

    torch.save({f"layer{i}": torch.full((1 << 20,), value + i) for i in range(layers)}, path)


def holds(path: Path, value: int) -> bool:
    import torch

    return float(torch.load(path)["layer1"][7]) == value + 1


def test_torch_save_killed_over_a_good_file(new_mount: Callable[..., Mount]) -> None:
    m = new_mount()
    m.start("--cache-size", "1GiB", config="settle_time = 0.1\n")
    last = m.point / "last.pt"
    save(1, 4, last)
    m.wait()
    good = (m.tier / "last.pt").read_bytes()
    assert holds(m.tier / "last.pt", 1)

    killed = subprocess.run([sys.executable, "-c", SAVE, str(last)], check=False)
    assert killed.returncode == -signal.SIGKILL
    half = wait_for(lambda: m.status()["interrupted"], "the interrupted file")
    assert [x["path"] for x in half] == ["last.pt"]
    assert "killed by signal 9" in half[0]["reason"]
    assert half[0]["size"] < 600 << 20
    assert m.cli("status", m.point, check=False).returncode == 5
    assert os.getxattr(last, "user.ckptfs.state") == b"interrupted"
    (m.point / "marker").write_bytes(b"others go on")
    m.wait(m.point / "marker")
    assert (m.tier / "last.pt").read_bytes() == good

    for workers in (False, True):
        m.kill(workers=workers)
        m.start()
        assert [x["path"] for x in m.status()["interrupted"]] == ["last.pt"]
        assert last.stat().st_size == half[0]["size"]
        m.wait(m.point / "marker")
        assert (m.tier / "last.pt").read_bytes() == good

    save(3, 4, last)
    assert m.status()["interrupted"] == []
    m.wait()
    assert holds(m.tier / "last.pt", 3)
    assert holds(last, 3)
    m.umount()


def test_trainers_killed_at_random(campaign: Callable[..., Campaign]) -> None:
    print(f"CKPTFS_SEED={SEED}")
    rng = random.Random(SEED)
    c = campaign(SEED, runs=5, big=8 << 20)
    m = c.mount
    c.spawn("sampler", "tests.crash.sampler", str(m.tier), str(c.control), *c.runs)
    for i, run in enumerate(c.runs):
        c.spawn(
            run, "tests.crash.trainer", str(m.point), run, str(c.control),
            "--seed", str(SEED * 10 + i), "--big", str(c.big),
        )  # fmt: skip
        wait_for(lambda run=run: c.logs[run].read().done > 5, "some work")
        time.sleep(rng.random() * 0.8)
        os.kill(c.processes[run].pid, signal.SIGKILL)
        c.processes.pop(run).wait()
    c.check()
    c.verify_mount()
    doubt = {d for model in c.models().values() for d in model.doubt}
    m.kill(workers=rng.random() < 0.5)
    m.start()
    c.verify_mount()
    held = {x["path"] for x in m.status()["interrupted"]}
    m.cli("wait", "--mount", m.point, "--timeout", "60", check=False)
    c.sampled()
    for name in held:
        assert name in doubt, f"{name} is held, but was finished"
        if os.path.lexists(m.tier / name):
            assert judge_file(m.tier / name) is not None
        m.cli("discard", m.point / name)
    m.wait()
    c.sampled()
    for run in c.runs:
        assert tree(m.point, run) == tree(m.tier, run)
        for name in tree(m.point, run):
            if (m.point / name).is_file():
                assert (m.point / name).read_bytes() == (m.tier / name).read_bytes()
    c.no_rubbish()
