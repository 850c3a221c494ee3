"""Random walks through the rules of `OrderMachine`, weighted towards lost answers, crashes and other writers.

Hypothesis chooses all rules alike; what goes wrong only after several rounds, it rarely meets. A failing walk
is shortened step by step, and the steps that are left are in the message.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from .test_order_machine import NAMES, OrderMachine

LONG = os.environ.get("CKPTFS_HYPOTHESIS") == "long"
WALKS = 3_000 if LONG else 60
STEPS = 90 if LONG else 60
SHORTENINGS = 2_000

Step = tuple[str, dict[str, Any]]
Draw = Callable[[random.Random], Any]


def any_of(*options: Any) -> Draw:
    return lambda r: r.choice(options)


def chance(p: float) -> Draw:
    return lambda r: r.random() < p


pick: Draw = lambda r: r.randrange(1 << 16)  # noqa: E731
file_name = any_of(*NAMES)
dir_name = any_of(b"d", b"e", b"a")
dies = chance(0.06)
fault = any_of("", "", "", "down", "lost", "lost", "refuse", "redo")
end = any_of("close", "close", "close", "open", "kill")
how = any_of("flush", "seal", "close", "close", "kill")
kind = any_of("publish", "publish", "removals", "attrs")

RULES: dict[str, tuple[float, dict[str, Draw]]] = {
    "save": (6, {"d": pick, "n": file_name, "cells": any_of(0, 1, 2, 3), "end": end, "die": dies}),
    "open": (2, {"f": pick, "trunc": chance(0.5)}),
    "write": (3, {"h": pick, "at": any_of(0, 1, 2, 3), "count": any_of(1, 2), "append": chance(0.5)}),
    "truncate": (1, {"h": pick, "cells": any_of(0, 1, 2)}),
    "end": (4, {"h": pick, "how": how}),
    "mkdir": (2, {"d": pick, "n": dir_name, "die": dies}),
    "symlink": (1, {"d": pick, "n": file_name, "die": dies}),
    "unlink": (3, {"f": pick, "die": dies}),
    "rmdir": (3, {"d": pick, "die": dies}),
    "rename_file": (4, {"f": pick, "d": pick, "n": file_name, "die": dies}),
    "rename_dir": (3, {"f": pick, "d": pick, "n": dir_name, "die": dies}),
    "chmod": (2, {"f": pick, "mode": any_of(0o600, 0o700, 0o644), "die": dies}),
    "decide": (3, {"f": pick, "publish": chance(0.5)}),
    "skip": (1, {}),
    "give_up": (0.5, {"n": pick}),
    "wait": (2, {"seconds": any_of(0.1, 1.0, 3.0)}),
    "plan": (1, {"limit": any_of(1, 3, 8), "hurry": chance(0.5)}),
    "job": (2, {"j": pick, "fate": any_of("ok", "ok", "ok", "fail", "redo")}),
    "send_all": (4, {"hurry": chance(0.8)}),
    "round": (
        10,
        {
            "kind": kind,
            "limit": any_of(1, 2, 64),
            "fault": fault,
            "at": any_of(0, 1, 2, 3),
            "stop": any_of(0, 0, 0, 1, 2),
        },
    ),
    "round_on": (4, {"fault": fault, "at": any_of(0, 1, 2, 3)}),
    "ask": (2, {"d": pick, "n": any_of(None, None, None, *NAMES)}),
    "merge": (2, {"q": pick, "late": chance(0.5)}),
    "look": (1, {}),
    "foreign_put": (1, {"d": pick, "n": file_name}),
    "foreign_mkdir": (0.5, {"d": pick, "n": dir_name}),
    "foreign_remove": (0.7, {"f": pick}),
    "fill_journal": (0.6, {"full": chance(0.3)}),
    "crash": (0.7, {}),
}


def possible(m: OrderMachine, rule: str) -> bool:
    """What the rules' preconditions say."""
    w = m.w
    conditions: dict[str, Callable[[], Any]] = {
        "write": lambda: w.handles,
        "truncate": lambda: w.handles,
        "end": lambda: w.handles,
        "decide": m._held,
        "skip": lambda: any(e.stuck for e in w.core.state.log.values()),
        "give_up": m._graves,
        "job": lambda: w.jobs,
        "round": lambda: w.round is None,
        "round_on": lambda: w.round is not None,
        "merge": lambda: w.questions,
    }
    return rule not in conditions or bool(conditions[rule]())


def draw(seed: int) -> tuple[bool, list[Step]]:
    r = random.Random(seed)
    names, weights = list(RULES), [weight for weight, _ in RULES.values()]
    steps: list[Step] = []
    for _ in range(STEPS):
        rule = r.choices(names, weights)[0]
        steps.append((rule, {arg: d(r) for arg, d in RULES[rule][1].items()}))
    return r.random() < 0.5, steps


def walk(published: bool, steps: list[Step]) -> Exception | None:
    m = OrderMachine()
    try:
        m.start(published=published)
        for rule, args in steps:
            if possible(m, rule):
                getattr(m, rule)(**args)
                m.w.check()
        m.teardown()
    except Exception as e:
        return e
    return None


def shorten(published: bool, steps: list[Step]) -> list[Step]:
    size, tries = len(steps) // 2, 0
    while size:
        at, shorter = 0, False
        while at < len(steps) and tries < SHORTENINGS:
            tries += 1
            rest = steps[:at] + steps[at + size :]
            if walk(published, rest) is not None:
                steps, shorter = rest, True
            else:
                at += size
        size = size if shorter and size == 1 and tries < SHORTENINGS else size // 2
    return steps


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, WALKS, 20)], ids=str)
def test_walk(seeds: range) -> None:
    for seed in seeds:
        published, steps = draw(seed)
        if walk(published, steps) is not None:
            steps = shorten(published, steps)
            lines = "\n".join(f"  {rule} {args}" for rule, args in steps)
            raise AssertionError(f"seed {seed}, start(published={published}):\n{lines}") from walk(
                published, steps
            )
