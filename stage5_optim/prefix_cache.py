"""Prefix cache: full blocks that keep their content after they are freed, found again by the tokens in them.

K and V of a token depend on that token and on all before it, and on nothing else. So two sequences that begin with the
same tokens have the same K and V there, and may share the blocks:

    "You are a helpful assistant. ..." + question 1      blocks  [7, 2, 9]   [11]
    "You are a helpful assistant. ..." + question 2      blocks  [7, 2, 9]   [4]      three blocks found, one computed

A block is known by a hash of its own tokens and its parent's hash: a chain, so it stands for all that came before. A
hash may lie: on a hit tokens and parent are compared, and if they differ it is a miss.

Only full blocks are kept, so nobody ever writes into a shared one. The last token of a prompt is computed in any case:
its hidden state is needed, to sample from. A freed block keeps its content until it is taken for something else: the
one that has been free for longest goes first, and as a table is freed from its end, tails go before heads.

Source: automatic prefix caching in vLLM; the tree form of the idea: RadixAttention (arXiv 2312.07104).
"""

import hashlib
from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from .block_pool import IntegrityError

ROOT = b""  # the hash before the first block


def hash_block(parent: bytes, tokens: Tokens[int]) -> bytes:
    """16 bytes, the same in every process. parent: the hash of the block before, ROOT for the first one."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], token_ids: list[int], num_tokens: int, block_size: int) -> None:
    """Append the hashes of the blocks that the first num_tokens have filled since the last call: each is made once."""
    for end in range((len(hashes) + 1) * block_size, num_tokens + 1, block_size):
        hashes.append(hash_block(hashes[-1] if hashes else ROOT, token_ids[end - block_size : end]))


@dataclass(eq=False)
class CachedBlock:
    """What is in some blocks: these tokens, behind those of the parent (None: they are first blocks). Mostly there is
    one such block; two requests that compute the same at the same time make two."""

    blocks: dict[int, None]  # in the order in which they were published
    parent: "CachedBlock | None"
    hash: bytes
    tokens: list[int]

    @property
    def block(self) -> int:
        """The one to take."""
        return next(iter(self.blocks))


class PrefixCache:
    """Which blocks hold what. Knows nothing of who holds them; the pool tells it when a block is taken."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def find(self, hashes: list[bytes], token_ids: list[int], num_blocks: int) -> list[CachedBlock]:
        """The longest run of cached blocks, of the first num_blocks of these tokens."""
        found: list[CachedBlock] = []
        for i, block_hash in enumerate(hashes[:num_blocks]):
            known = self._by_hash.get(block_hash)
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            if known is None or not _is(known, found[-1] if found else None, tokens):
                break
            found.append(known)
        return found

    def publish(self, parent: CachedBlock | None, block_hash: bytes, tokens: list[int], block: int) -> CachedBlock:
        """From now on these tokens behind `parent` can be found in `block`, too if they are in another one already."""
        known = self._by_hash.get(block_hash)
        if known is None or not _is(known, parent, tokens):
            for other in known.blocks if known else ():  # another content with this hash, or one whose parent is gone
                del self._by_block[other]
            known = self._by_hash[block_hash] = CachedBlock({}, parent, block_hash, tokens)
        known.blocks[block] = None
        self._by_block[block] = known
        return known

    def evict(self, block: int) -> None:
        """The block is taken for something else."""
        cached = self._by_block.pop(block, None)
        if cached is not None:
            del cached.blocks[block]
            if not cached.blocks:
                del self._by_hash[cached.hash]

    def holds(self, block: int) -> bool:
        return block in self._by_block

    def reset(self) -> None:
        """Forget everything. Blocks that are held stay held."""
        self._by_hash.clear()
        self._by_block.clear()

    def check(self) -> None:
        """Raise IntegrityError unless each entry is under its hash and under its blocks, and nothing else is."""
        for block_hash, cached in self._by_hash.items():
            if cached.hash != block_hash or any(self._by_block.get(block) is not cached for block in cached.blocks):
                raise IntegrityError(f"blocks {[*cached.blocks]} are cached under a hash or a block not their own")
        places = sum(len(cached.blocks) for cached in self._by_hash.values())
        if not all(cached.blocks for cached in self._by_hash.values()) or places != len(self._by_block):
            raise IntegrityError(f"{places} blocks are cached under hashes, {len(self._by_block)} under blocks")


def _is(cached: CachedBlock, parent: CachedBlock | None, tokens: list[int]) -> bool:
    return cached.parent is parent and cached.tokens == tokens
