"""The control socket against clients that ask for nonsense, come all at once, or wait for the impossible."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import Any

import pytest

from ckptfs.control import client
from ckptfs.paths import MountPaths, socket_address
from tests.mounted.harness import Mount, wait_for

LONGEST = "give seconds from 0 to 1,000,000,000, or null to wait for ever; see docs/CONTROL.md"


def answers(mount: Mount, line: bytes) -> list[dict[str, Any]]:
    """All that the daemon says to one line, till its last word."""
    (path,) = mount.run_dir.glob("*/control.sock")
    found = []
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(20)
        s.connect(str(path))
        s.sendall(line)
        for answer in s.makefile("rb"):
            found.append(json.loads(answer))
            if found[-1].get("done"):
                break
    return found


NUMBERS = ["NaN", "Infinity", "-Infinity", "-1", "-0.5", "1e300", "1" + "0" * 40, "true", '"5"', "[]", "{}"]

NONSENSE = [
    ('{"command": "wait", "paths": "f"}', 'paths is "f", not a list of texts'),
    ('{"command": "wait", "paths": {"f": 1}}', 'paths is {"f": 1}, not a list of texts'),
    ('{"command": "wait", "paths": 7}', "paths is 7, not a list of texts"),
    ('{"command": "wait", "paths": [7]}', "a path is 7, not a text in quotes"),
    ('{"command": "wait", "paths": [""]}', 'a path is "", not a text in quotes'),
    ('{"command": "wait", "paths": ["a\\u0000b"]}', "holds a character that no path can have"),
    ('{"command": "wait", "paths": ["a\\ud800b"]}', "holds a character that no path can have"),
    ('{"command": "wait", "paths": ["../f"]}', "without `..`"),
    ('{"command": "wait", "paths": ["/elsewhere"]}', "/elsewhere is not in the mount"),
    ('{"command": "wait", "paths": ["' + "n" * 300 + '"]}', "in the mount"),
    ('{"command": "umount", "drain": "no"}', 'drain is "no", neither true nor false'),
    ('{"command": "umount", "drain": 0}', "drain is 0, neither true nor false"),
    ('{"command": "umount", "drain": null}', "drain is null, neither true nor false"),
    ('{"command": "umount", "drain": false, "timeout_s": -1}', LONGEST),
    ('{"command": "publish"}', "path is null, not a text in quotes"),
    ('{"command": "discard", "path": null}', "path is null, not a text in quotes"),
    ('{"command": "skip", "path": ["f"]}', 'path is ["f"], not a text in quotes'),
    ('{"command": "skip", "path": ""}', 'path is "", not a text in quotes'),
    ('{"command": ["wait"]}', 'command is ["wait"], not a text in quotes'),
    ('{"command": "dance"}', "does not know the command 'dance'"),
    ("{}", "command is null, not a text in quotes"),
    ("[]", "the request is not a JSON object"),
    ("wait", "the request is not JSON"),
    ('{"command": "wait", "timeout_s": ' + "1" * 5000 + "}", "the request is not JSON"),
    ("[" * 200_000, "the request is not JSON"),
]


def test_a_request_that_makes_no_sense_gets_one_sentence_and_does_nothing(mount: Mount) -> None:
    (mount.point / "f").write_bytes(b"f")
    for number in NUMBERS:
        for command in ("wait", "umount"):
            request = f'{{"command": "{command}", "timeout_s": {number}}}\n'
            (answer,) = answers(mount, request.encode())
            assert (answer["code"], answer["done"]) == (2, True), number
            assert answer["error"].startswith("timeout_s is ")
            assert answer["error"].endswith(LONGEST)
    for text, part in NONSENSE:
        (answer,) = answers(mount, text.encode() + b"\n")
        assert (answer["code"], answer["done"]) == (2, True), (text, answer)
        assert part in answer["error"], (text, answer)
        assert "\n" not in answer["error"]
    (answer,) = answers(mount, b'{"command": "wait", "paths": ["\xff"]}\n')
    assert answer["code"] == 2
    assert os.path.ismount(mount.point)
    assert mount.status()["errors"] == 0


def test_what_makes_sense_is_taken(mount: Mount) -> None:
    (mount.point / "f").write_bytes(b"f")
    for timeout in ("null", "20", "20.5", "1e9"):
        request = f'{{"command": "wait", "paths": ["f", "{mount.point}/f"], "timeout_s": {timeout}}}\n'
        assert answers(mount, request.encode())[-1]["code"] == 0
    many = json.dumps({"command": "wait", "paths": ["f"] * 300_000, "timeout_s": 0}).encode()
    assert answers(mount, many + b"\n")[-1]["code"] == 0


def test_a_request_that_never_ends_is_told_so(mount: Mount) -> None:
    (path,) = mount.run_dir.glob("*/control.sock")
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(20)
        s.connect(str(path))

        def pour() -> None:
            try:
                for _ in range(20):
                    s.sendall(b"x" * (1 << 20))
            except OSError:
                pass  # it has heard enough

        thread = threading.Thread(target=pour)
        thread.start()
        answer = json.loads(s.makefile("rb").readline())
        thread.join()
    assert answer["code"] == 2
    assert "longer than 16 MiB" in answer["error"]


def test_hundreds_of_clients_at_once_are_all_answered(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPTFS_RUN_DIR", "CKPTFS_DATA_DIR"):
        monkeypatch.setenv(name, mount.env[name])
    paths = MountPaths(str(mount.point))
    waiting = []
    os.kill(mount.pid, 19)
    try:
        # More than the queue of old, while nobody takes any out of it.
        for _ in range(300):
            s = socket.socket(socket.AF_UNIX)
            s.settimeout(20)
            s.connect(paths.control)
            s.sendall(b'{"command": "status"}\n')
            waiting.append(s)
    finally:
        os.kill(mount.pid, 18)
    for s in waiting:
        with s, s.makefile("rb") as lines:
            assert json.loads(lines.readline())["pid"] == mount.pid
    assert client.request(paths, "status")["pid"] == mount.pid


def test_a_client_waits_for_its_place_in_a_full_queue(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPTFS_RUN_DIR", "CKPTFS_DATA_DIR"):
        monkeypatch.setenv(name, mount.env[name])
    paths = MountPaths(str(mount.point))
    paths.control = str(mount.base / "small.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        with socket_address(paths.control) as address:
            listener.bind(address)
        listener.listen(0)
        first = client.connect(paths)
        assert not any(client.alive(paths) is False for _ in range(2)), "busy is not dead"
        taker = threading.Timer(0.5, lambda: listener.accept()[0].close())
        taker.start()
        begun = time.monotonic()
        second = client.connect(paths, timeout=10)
        assert 0.3 < time.monotonic() - begun < 5
        taker.join()
        first.close()
        second.close()


def test_wait_ends_when_the_drain_gives_up(mount: Mount) -> None:
    mount.umount()
    mount.start(config='settle_time = 3600\ndrain_timeout = "1s"\n')
    (mount.point / "f").write_bytes(b"f")
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    said: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: said.append(mount.ask("wait", paths=[], timeout_s=None)))
    thread.start()
    wait_for(lambda: mount.status()["tier"]["state"] == "down", "the tier to be down")
    begun = time.monotonic()
    os.kill(mount.pid, 15)
    thread.join(20)
    assert time.monotonic() - begun < 2.7
    (last,) = said
    assert (last["code"], last["ending"], last["remaining"]) == (3, True, ["f"])
    aside.rename(mount.tier)
