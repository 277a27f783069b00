"""Block pool: the free list, the ref counts and the block tables of one memory, the device's or the host's.

    block           0    1    2    3    4    5
    ref count       1    0    2    1    0    0        2 is in two tables
    free list       front [4, 1, 5] back              taken from the front, given back at the back

A block is in the free list if and only if its ref count is 0. block_manager.py says who gets which.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prefix_cache import CachedBlock, PrefixCache


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. Nothing was taken."""


class DoubleFreeError(RuntimeError):
    """A block or a sequence was given back that nobody holds. Nothing changed."""


class IntegrityError(RuntimeError):
    """Free list, ref counts and block tables contradict each other."""


@dataclass
class BlockTable:
    """A sequence's blocks in the order of its tokens, and how many tokens have a place in them."""

    blocks: list[int]
    num_tokens: int
    cached: list["CachedBlock"] = field(default_factory=list)  # its first full blocks, as the prefix cache knows them


class BlockPool:
    """Blocks 0 ... num_blocks - 1: which are free, how many tables hold each of the others, and those tables."""

    def __init__(self, num_blocks: int, prefix_cache: "PrefixCache | None" = None):
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.ref_counts = [0] * num_blocks
        self.tables: dict[str, BlockTable] = {}
        # Python's OrderedDict is a linked list with an index: first, last and any in between in O(1).
        self.free = OrderedDict.fromkeys(range(num_blocks))

    def take(self) -> int:
        """The block that has been free for longest, now held once."""
        if not self.free:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are taken")
        block, _ = self.free.popitem(last=False)
        if self.prefix_cache is not None:
            self.prefix_cache.evict(block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more table holds the block. A free one leaves the free list, from wherever in it it is."""
        self.free.pop(block, None)
        self.ref_counts[block] += 1
        return block

    def give_back(self, block: int) -> None:
        """One table less holds the block; held by none it is free. Raises DoubleFreeError if it was free already."""
        if self.ref_counts[block] == 0:
            raise DoubleFreeError(f"block {block} is free already")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free[block] = None

    def recount(self) -> None:
        """After an interruption: what no table holds is free, whatever the counts say."""
        held = Counter(block for table in self.tables.values() for block in table.blocks)
        self.ref_counts = [held[block] for block in range(self.num_blocks)]
        known = [*self.free, *(block for block in range(self.num_blocks) if block not in self.free)]
        self.free = OrderedDict.fromkeys(block for block in known if not held[block])
        if self.prefix_cache is not None:  # what was published for this step may never have been computed
            self.prefix_cache.reset()

    def check(self, block_size: int) -> None:
        """Raise IntegrityError unless free list, ref counts and tables say the same."""
        if self.prefix_cache is not None:
            self.prefix_cache.check()
        held = Counter(block for table in self.tables.values() for block in table.blocks)
        for block in range(self.num_blocks):
            count, is_free = self.ref_counts[block], block in self.free
            if count != held[block] or is_free != (count == 0):
                raise IntegrityError(f"block {block}: ref count {count}, in {held[block]} tables, free: {is_free}")
        ends: dict[int, int] = {}
        for seq_id, table in self.tables.items():
            if len(table.blocks) != -(-table.num_tokens // block_size) or len(set(table.blocks)) < len(table.blocks):
                raise IntegrityError(f"the table of {seq_id!r} for {table.num_tokens} tokens is {table.blocks}")
            for i, block in enumerate(table.blocks):
                end = min(table.num_tokens - i * block_size, block_size)
                if ends.setdefault(block, end) != end:  # one of the two has written where the other reads
                    raise IntegrityError(f"block {block} is shared, with {ends[block]} and with {end} tokens in it")
