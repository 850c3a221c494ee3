"""How much memory this process may still use: the machine's and its control groups'.

In a container MemAvailable is the host's, and staging pages are charged to the container: sizing a
budget from MemAvailable alone would get the trainer killed.
"""

from __future__ import annotations

import os


def available(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Bytes available now: MemAvailable, or what the tightest control group has left when that is less."""
    candidates = [_mem_available(proc), *(room for room, _ in _groups(proc, cgroups))]
    return max(0, min(candidates))


def total(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Bytes there are at most: MemTotal, or the limit of the tightest control group when that is less."""
    return min([_meminfo(proc)[b"MemTotal:"], *(limit for _, limit in _groups(proc, cgroups))])


def _meminfo(proc: str) -> dict[bytes, int]:
    with open(os.path.join(proc, "meminfo"), "rb") as file:
        return {line.split()[0]: int(line.split()[1]) * 1024 for line in file if len(line.split()) >= 2}


def _mem_available(proc: str) -> int:
    values = _meminfo(proc)
    # MemAvailable exists since Linux 3.14; FUSE as used here needs a younger kernel.
    return values.get(b"MemAvailable:", values.get(b"MemFree:", 0))


def _groups(proc: str, cgroups: str) -> list[tuple[int, int]]:
    """Bytes left in each limited control group from this process's up to the root, and its limit."""
    try:
        with open(os.path.join(proc, "self/cgroup"), encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    room = []
    for parts in lines:
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            root, limit, usage = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = (
                os.path.join(cgroups, "memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        directory = os.path.normpath(root + "/" + path)
        # Inside a container the path names a group that is not visible there: the root then shows the limits.
        while directory.startswith(root):
            left = _left(directory, limit, usage)
            if left is not None:
                room.append(left)
            directory = os.path.dirname(directory)
    return room


def _left(directory: str, limit: str, usage: str) -> tuple[int, int] | None:
    """Bytes left in one group (its limit less what is used and cannot be reclaimed), and the limit."""
    try:
        maximum = int(_text(os.path.join(directory, limit)))
        used = int(_text(os.path.join(directory, usage)))
    except (OSError, ValueError):
        return None  # "max", the root group, or not there
    reclaimable = 0
    try:
        for line in _text(os.path.join(directory, "memory.stat")).splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                reclaimable = max(reclaimable, int(value))
    except (OSError, ValueError):
        pass
    return maximum - used + min(reclaimable, used), maximum


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()
