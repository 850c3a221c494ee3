"""The core: pure logic of names, content, order and planning (sans-I/O).

Nothing here knows a clock, a file, a tier or the kernel: time comes in as an argument (`now`,
seconds), results go out as plain data, and every change is collected in `State` as rows for the
journal. That is what lets hypothesis drive it through any order of operations, completions and
crashes.
"""

from ckptfs.core.content import Content
from ckptfs.core.model import ROOT, Entry, EntryKind, Inode, Node
from ckptfs.core.names import Names
from ckptfs.core.order import Order
from ckptfs.core.plan import Planner
from ckptfs.core.state import Changes, Rows, State
from ckptfs.core.tierview import TierView
from ckptfs.tiers.base import Traits

__all__ = [
    "ROOT",
    "Changes",
    "Content",
    "Core",
    "Entry",
    "EntryKind",
    "Inode",
    "Names",
    "Node",
    "Order",
    "Planner",
    "Rows",
    "State",
    "TierView",
]


class Core:
    """The parts of the core around one `State`.

    `settle_s`: how long an unsent file may still be dropped as a temporary (R4b), in seconds.
    `chunk_bytes`: least size of a chunk. `traits`: how the tier takes data.
    """

    def __init__(
        self,
        state: State,
        *,
        settle_s: float = 2.0,
        chunk_bytes: int = 16 << 20,
        traits: Traits = Traits(),  # noqa: B008 (frozen)
    ) -> None:
        self.state = state
        self.order = Order(state, settle_s=settle_s)
        self.names = Names(state, self.order, forbids=traits.forbids)
        self.content = Content(state, self.order, chunk_bytes=max(chunk_bytes, traits.least_chunk))
        self.planner = Planner(state, settle_s=settle_s, traits=traits)
        self.tier = TierView(state, self.order)
