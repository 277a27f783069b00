"""Block manager: KV memory handed out in fixed-size blocks, as an operating system hands out pages.

A sequence sees its tokens at positions 0, 1, 2 ...; its block table says where in the pool they really are. Blocks are
taken when a token needs one and need not lie side by side, so nothing is reserved for a future that may not come: once
its prompt is computed a sequence wastes at most the rest of its last block, and any free block is good for anybody.

    block_size 16     block table of A  [7, 2, 11]       ref counts   7: 2 (A and B share it)   2: 1   11: 1
                      block table of B  [7, 5]                        5: 1
    position 37 of A  ->  37 // 16 = 2, the third block: 11;  37 % 16 = 5  ->  slot 11 * 16 + 5 = 181

    free list   front [9, 4, 0, ...] back       taken from the front, given back at the back

`fork` lets another sequence use the same blocks: only ref counts change. Before either writes into a block that both
have and that is not full, it gets a copy of its own (copy-on-write). When blocks run out a sequence can be moved to a
second pool in host memory and back.

Owns: free lists, ref counts, block tables, and a log of who took how many blocks when. Touches no tensor: what has to
be copied is returned as (source, target) pairs, for kv_cache.py to carry out. Source: PagedAttention, sections 4.2 to
4.5 (arXiv 2309.06180).
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from .block_pool import BlockPool, BlockTable, DoubleFreeError, OutOfBlocksError
from .prefix_cache import CachedBlock, PrefixCache

LOG_LENGTH = 100_000  # records kept: a server runs for weeks


@dataclass(frozen=True)
class Allocation:
    """One line of the allocation log: who took (or gave back: negative) how many blocks, how many were free afterwards,
    and why. step: the call of the scheduler, counted from 1; not the trace's number of the step."""

    step: int
    seq_id: str
    blocks: int
    num_free_blocks: int
    why: str


@dataclass
class BlockMoves:
    """What must be copied before a step may run, in this order, as (source, target): blocks to the host, blocks back
    from the host, and copy-on-write."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)


class BlockManager:
    """Who has which blocks: of the pool on the device, and of the one in host memory."""

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0, enable_prefix_caching: bool = False):
        self.block_size = block_size
        self.prefix_cache = PrefixCache(block_size) if enable_prefix_caching else None
        self.step = 0  # counted by the scheduler, for the log
        self.allocation_log: deque[Allocation] = deque(maxlen=LOG_LENGTH)
        self._pool = BlockPool(num_blocks, self.prefix_cache)
        self._host = BlockPool(num_swap_blocks)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._pool.free)

    @property
    def num_swap_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def num_free_swap_blocks(self) -> int:
        return len(self._host.free)

    def ref_count(self, block: int) -> int:
        """How many block tables hold the block; 0: it is free."""
        return self._pool.ref_counts[block]

    def block_table(self, seq_id: str) -> list[int]:
        """A sequence's blocks on the device, in the order of its tokens. Raises KeyError if it has none."""
        return list(self._pool.tables[seq_id].blocks)

    def table(self, seq_id: str) -> BlockTable:
        """The table itself, not a copy: read it, do not write."""
        return self._pool.tables[seq_id]

    def holds(self, seq_id: str) -> bool:
        """Whether the sequence has blocks, on the device or on the host."""
        return seq_id in self._pool.tables or seq_id in self._host.tables

    def is_swapped(self, seq_id: str) -> bool:
        return seq_id in self._host.tables

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_for_samples(self, num_prompt_tokens: int, lens: list[int]) -> int:
        """Blocks for samples of one prompt, of so many tokens each: they share the blocks which the prompt fills."""
        shared = num_prompt_tokens // self.block_size if len(lens) > 1 else 0
        return shared + sum(self.blocks_for(length) - shared for length in lens)

    def allocate(self, seq_id: str, num_tokens: int, prefix: list[CachedBlock] | tuple = ()) -> None:
        """A new table with room for num_tokens, which begins with the blocks of `prefix`, as `find_prefix` found them.

        Raises OutOfBlocksError, with nothing taken, if it does not fit.
        """
        assert not self.holds(seq_id), f"{seq_id!r} has a block table already"
        count = self.blocks_for(num_tokens) - self.num_held(prefix)
        self._check_free(self._pool, count)
        blocks = [self._pool.share(cached.block) for cached in prefix]  # before others are taken, which evicts
        blocks += [self._pool.take() for _ in range(self.blocks_for(num_tokens) - len(prefix))]
        self._pool.tables[seq_id] = BlockTable(blocks, num_tokens, list(prefix))
        self._log(seq_id, count, "prompt")

    def num_held(self, prefix: list[CachedBlock] | tuple) -> int:
        """Of these cached blocks those that somebody holds: sharing them takes no free block."""
        return sum(self._pool.ref_counts[cached.block] > 0 for cached in prefix)

    def find_prefix(self, hashes: list[bytes], token_ids: list[int], num_tokens: int) -> list[CachedBlock]:
        """Cached blocks with the first tokens of num_tokens, at least one of which is left to be computed."""
        if self.prefix_cache is None:
            return []
        return self.prefix_cache.find(hashes, token_ids, (num_tokens - 1) // self.block_size)

    def publish(self, seq_id: str, hashes: list[bytes], token_ids: list[int], num_tokens: int) -> None:
        """Let others find the blocks that are full once the first num_tokens are computed, in this step."""
        table = self._pool.tables[seq_id]
        for i in range(len(table.cached), num_tokens // self.block_size):
            parent = table.cached[-1] if table.cached else None
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            table.cached.append(self.prefix_cache.publish(parent, hashes[i], tokens, table.blocks[i]))

    def unpublish(self, seq_id: str) -> None:
        """Nobody finds the blocks of this sequence any more. Whoever holds one keeps it."""
        if self.prefix_cache is not None:
            for block in self._pool.tables[seq_id].blocks:
                self.prefix_cache.evict(block)

    def num_blocks_to_grow(self, lengths: dict[str, int]) -> int:
        """How many free blocks `grow` would take; of sequences on the host, once they have been swapped in."""
        needed, writers = 0, {}  # shared last block -> how many of these sequences write into it
        for seq_id, num_tokens in lengths.items():
            pool = self._host if seq_id in self._host.tables else self._pool
            table = pool.tables[seq_id]
            if num_tokens > table.num_tokens:
                needed += self.blocks_for(num_tokens) - len(table.blocks)
                if self._is_shared_tail(pool, table):
                    last = table.blocks[-1]
                    writers[last] = writers.get(last, 0) + 1
                    needed += writers[last] < pool.ref_counts[last]  # the last holder needs none
        return needed

    def grow(self, lengths: dict[str, int]) -> list[tuple[int, int]]:
        """Give each sequence room for so many tokens in all. Returns the blocks to copy, as (source, target).

        A last block that is not full and has other holders is exchanged for a copy, as it is about to be written. Of
        several holders all but the last get one: it finds itself alone. Raises OutOfBlocksError, with nothing taken.
        """
        self._check_free(self._pool, self.num_blocks_to_grow(lengths))
        copies = []
        for seq_id, num_tokens in lengths.items():
            table = self._pool.tables[seq_id]
            if num_tokens <= table.num_tokens:
                continue
            if self._is_shared_tail(self._pool, table):
                copies.append(self._copy_tail(seq_id, table))
            count = self.blocks_for(num_tokens) - len(table.blocks)
            table.num_tokens = num_tokens
            if count:
                table.blocks += [self._pool.take() for _ in range(count)]
                self._log(seq_id, count, "growth")
        return copies

    def shrink(self, seq_id: str, num_tokens: int) -> None:
        """Give back the blocks behind the first num_tokens."""
        table = self._pool.tables[seq_id]
        count, before = len(table.blocks) - self.blocks_for(num_tokens), self.num_free_blocks
        table.num_tokens = min(table.num_tokens, num_tokens)
        for _ in range(count):
            self._pool.give_back(table.blocks.pop())
        if count > 0:
            self._log(seq_id, before - self.num_free_blocks, "not written yet")

    def roll_back(self, seq_id: str, num_tokens: int) -> None:
        """Give back the blocks behind the first num_tokens. Only rejected drafts are in them, so they are taken again
        first: other free blocks may still hold a prefix that somebody will ask for."""
        table, before = self._pool.tables[seq_id], self.num_free_blocks
        rejected = table.blocks[self.blocks_for(num_tokens) :]
        table.num_tokens = num_tokens
        if rejected:
            table.blocks = table.blocks[: -len(rejected)]  # a new list: TableRows takes it that a table only grows
            for block in reversed(rejected):
                self._pool.give_back(block)
                self._pool.free.move_to_end(block, last=False)
            self._log(seq_id, before - self.num_free_blocks, "drafts rejected")

    def _is_shared_tail(self, pool: BlockPool, table: BlockTable) -> bool:
        """The next token goes into a block that others hold too."""
        return table.num_tokens % self.block_size > 0 and pool.ref_counts[table.blocks[-1]] > 1

    def _copy_tail(self, seq_id: str, table: BlockTable) -> tuple[int, int]:
        source, target = table.blocks[-1], self._pool.take()
        table.blocks[-1] = target
        self._pool.give_back(source)
        self._log(seq_id, 1, "copy-on-write")
        return source, target

    def fork(self, parent_id: str, child_id: str) -> None:
        """The child sees the parent's tokens, in the same blocks. Takes none."""
        assert not self.holds(child_id), f"{child_id!r} has a block table already"
        parent = self._pool.tables[parent_id]
        blocks = [self._pool.share(block) for block in parent.blocks]
        self._pool.tables[child_id] = BlockTable(blocks, parent.num_tokens, list(parent.cached))
        self._log(child_id, 0, "fork")

    def free(self, seq_id: str, why: str = "finished") -> None:
        """Give a sequence's blocks back, the last one first. Raises DoubleFreeError if it has none."""
        if not self.holds(seq_id):
            raise DoubleFreeError(f"{seq_id!r} has no blocks: it has been freed already, or never had any")
        pool = self._host if self.is_swapped(seq_id) else self._pool
        before = self.num_free_blocks
        for block in reversed(pool.tables.pop(seq_id).blocks):
            pool.give_back(block)
        self._log(seq_id, before - self.num_free_blocks, why)

    def can_swap_out(self, seq_ids: list[str]) -> bool:
        return len(self._distinct(self._pool, seq_ids)) <= self.num_free_swap_blocks

    def num_blocks_to_swap_in(self, seq_ids: list[str]) -> int:
        return len(self._distinct(self._host, seq_ids))

    def swap_out(self, seq_ids: list[str]) -> list[tuple[int, int]]:
        """Move sequences to the host, all their blocks once. Returns (block, host block) pairs to copy."""
        return self._move(seq_ids, self._pool, self._host, "swapped out")

    def swap_in(self, seq_ids: list[str]) -> list[tuple[int, int]]:
        """Move sequences back. Returns (host block, block) pairs to copy. What was shared is shared again."""
        return self._move(seq_ids, self._host, self._pool, "swapped in")

    def _distinct(self, pool: BlockPool, seq_ids: list[str]) -> dict[int, None]:
        return dict.fromkeys(block for seq_id in seq_ids for block in pool.tables[seq_id].blocks)

    def _move(self, seq_ids: list[str], source: BlockPool, target: BlockPool, why: str) -> list[tuple[int, int]]:
        self._check_free(target, len(self._distinct(source, seq_ids)))
        new_place: dict[int, int] = {}
        for seq_id in seq_ids:
            table, before = source.tables.pop(seq_id), self.num_free_blocks
            blocks = []
            for block in table.blocks:
                is_known = block in new_place
                blocks.append(
                    target.share(new_place[block]) if is_known else new_place.setdefault(block, target.take())
                )
            target.tables[seq_id] = BlockTable(blocks, table.num_tokens, table.cached)
            for block in reversed(table.blocks):
                source.give_back(block)
            self._log(seq_id, before - self.num_free_blocks, why)
        return list(new_place.items())

    def _check_free(self, pool: BlockPool, count: int) -> None:
        if count > len(pool.free):
            raise OutOfBlocksError(f"{count} blocks are needed, {len(pool.free)} of {pool.num_blocks} are free")

    def _log(self, seq_id: str, blocks: int, why: str) -> None:
        self.allocation_log.append(Allocation(self.step, seq_id, blocks, self.num_free_blocks, why))

    def blocks_taken(self, first_step: int, last_step: int) -> dict[str, int]:
        """Who took how many blocks in these steps, the greediest first: the first question when memory runs out."""
        taken = Counter()
        for line in self.allocation_log:
            if first_step <= line.step <= last_step and line.blocks > 0:
                taken[line.seq_id] += line.blocks
        return dict(taken.most_common())

    def reset_prefix_cache(self) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    def recount(self) -> None:
        """Make free lists and ref counts agree with the tables again, after a Ctrl-C between any two lines."""
        for pool in (self._pool, self._host):
            pool.recount()

    def check_integrity(self) -> None:
        """Raise IntegrityError if free lists, ref counts and tables disagree, on the device or on the host."""
        for pool in (self._pool, self._host):
            pool.check(self.block_size)
