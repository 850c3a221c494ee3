"""A fake of the daemon's process, run by the mount command in its tests.

It speaks the start-up contract only: configuration on stdin, one JSON line on the ready pipe. What it does
is said by `tier_options.act` in the configuration.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main() -> int:
    ready = int(sys.argv[sys.argv.index("--ready-fd") + 1])
    config = json.loads(sys.stdin.readline())
    act = config["options"].get("act", "ok")
    print(f"fake daemon for {sys.argv[-1]} does {act}", file=sys.stderr, flush=True)
    if act == "die":
        print("the reason it died of", file=sys.stderr, flush=True)
        return 3
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "refuse":
        answer = {"ok": False, "error": "the tier cannot be reached", "code": 8}
    else:
        facts = {"cwd": os.getcwd(), "session": os.getsid(0) == os.getpid(), "mountpoint": sys.argv[-1]}
        aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        answer = {"ok": True, "lines": ["fake line", json.dumps(facts), json.dumps(aws), json.dumps(config)]}
    if act == "stay":  # before the answer: the test sends its signal as soon as it has read that
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))
    os.write(ready, json.dumps(answer).encode() + b"\n")
    os.close(ready)
    if act == "stay":
        time.sleep(30)
    return 0 if answer["ok"] else 8


if __name__ == "__main__":
    sys.exit(main())
