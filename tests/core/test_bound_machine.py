"""The machine of `test_order_machine`, with an object store as the tier (R5)."""

from __future__ import annotations

from .bound import BoundWorld
from .test_order_machine import OrderMachine


class BoundMachine(OrderMachine):
    def __init__(self) -> None:
        super().__init__()
        self.w = BoundWorld()


TestBoundMachine = BoundMachine.TestCase
