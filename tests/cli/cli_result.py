"""The outcome of one command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line of an error; fails the test when there is more or no such line."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("ckptfs: ")
        return lines[0].removeprefix("ckptfs: ")
