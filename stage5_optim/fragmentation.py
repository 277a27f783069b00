"""Fragmentation: the same requests in contiguous pieces of unlike length, and in blocks.

    python -m <this package>.fragmentation

Imagine that every request's length were known, so that a contiguous piece of just that length were reserved: nothing
would be wasted inside the pieces. But requests leave in another order than they came, and leave holes. A new request
that is longer than every hole must wait, though the holes together would hold it: external fragmentation. A block fits
wherever a block is free.

No model is needed: what is simulated is memory. Each request takes its tokens, stays for a while and leaves.
"""

import argparse
import random
from collections import deque
from dataclasses import dataclass

from .block_manager import BlockManager

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Stay:
    """A request as memory sees it: how many tokens it needs, and for how many steps."""

    name: str
    tokens: int
    steps: int


class Contiguous:
    """Memory handed out in one piece per request, at the first hole that is large enough."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self.pieces: dict[str, tuple[int, int]] = {}  # name -> (first token, end)

    def holes(self) -> list[tuple[int, int]]:
        ends = sorted(self.pieces.values())
        starts = [0, *(end for _, end in ends)]
        return [(a, b) for a, (b, _) in zip(starts, [*ends, (self.num_tokens, 0)], strict=True) if b > a]

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self.holes())

    def take(self, stay: Stay) -> bool:
        start = next((a for a, b in self.holes() if b - a >= stay.tokens), None)
        if start is not None:
            self.pieces[stay.name] = (start, start + stay.tokens)
        return start is not None

    def give_back(self, stay: Stay) -> None:
        del self.pieces[stay.name]

    def owners(self, step: int) -> str:
        """One letter per `step` tokens; a dot is free."""
        cells = ["."] * (self.num_tokens // step)
        for name, (start, end) in self.pieces.items():
            for cell in range(start // step, -(-end // step)):
                cells[cell] = name
        return "".join(cells)


class Paged:
    """The same memory in blocks."""

    def __init__(self, num_tokens: int, block_size: int):
        self.manager = BlockManager(num_tokens // block_size, block_size)
        self.names: dict[str, None] = {}

    @property
    def num_free(self) -> int:
        return self.manager.num_free_blocks * self.manager.block_size

    def take(self, stay: Stay) -> bool:
        if self.manager.blocks_for(stay.tokens) > self.manager.num_free_blocks:
            return False
        self.manager.allocate(stay.name, stay.tokens)
        self.names[stay.name] = None
        return True

    def give_back(self, stay: Stay) -> None:
        self.manager.free(stay.name)
        del self.names[stay.name]

    def owners(self, step: int) -> str:
        """One letter per block: that is what a step is here."""
        cells = ["."] * self.manager.num_blocks
        for name in self.names:
            for block in self.manager.block_table(name):
                cells[block] = name
        return "".join(cells)


@dataclass
class Result:
    """What one kind of memory made of the requests."""

    steps: int = 0  # until all had been served
    blocked_steps: int = 0  # in which the next request waited though enough was free in all
    free_while_blocked: int = 0  # tokens, summed over those steps
    worst: str = ""  # the map in the step when most was free and yet of no use
    worst_free: int = 0
    worst_wants: int = 0


def workload(num_requests: int, seed: int) -> list[Stay]:
    """Lengths from 40 to 400 tokens, stays from 5 to 60 steps, no relation between the two."""
    rng = random.Random(seed)
    letter = (LETTERS[i % len(LETTERS)] for i in range(num_requests))
    return [Stay(name, rng.randint(40, 400), rng.randint(5, 60)) for name in letter]


def simulate(memory: Contiguous | Paged, stays: list[Stay], step: int) -> Result:
    """First come, first served: one request enters per step if it can, those whose time is over leave."""
    result, queue, inside = Result(), deque(stays), []
    while queue or inside:
        result.steps += 1
        for stay, _ in [pair for pair in inside if pair[1] <= result.steps]:
            memory.give_back(stay)
        inside = [pair for pair in inside if pair[1] > result.steps]
        if queue and queue[0].name not in {stay.name for stay, _ in inside}:
            if memory.take(queue[0]):
                stay = queue.popleft()
                inside.append((stay, result.steps + stay.steps))
            elif memory.num_free >= queue[0].tokens:
                note_blocked(result, memory, queue[0], step)
    return result


def note_blocked(result: Result, memory: Contiguous | Paged, wants: Stay, step: int) -> None:
    result.blocked_steps += 1
    result.free_while_blocked += memory.num_free
    if memory.num_free > result.worst_free:
        result.worst, result.worst_free, result.worst_wants = memory.owners(step), memory.num_free, wants.tokens


def compare(num_tokens: int, block_size: int, num_requests: int, seed: int) -> dict[str, Result]:
    stays = workload(num_requests, seed)
    return {
        "contiguous pieces": simulate(Contiguous(num_tokens), stays, block_size),
        f"blocks of {block_size}": simulate(Paged(num_tokens, block_size), stays, block_size),
    }


def main() -> None:
    p = argparse.ArgumentParser(prog=f"python -m {__package__}.fragmentation", description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=2048, help="size of the memory (default: 2048)")
    p.add_argument("--block-size", type=int, default=16, help="tokens per block (default: 16)")
    p.add_argument("--requests", type=int, default=200, help="how many requests (default: 200)")
    p.add_argument("--seed", type=int, default=0, help="of the random lengths (default: 0)")
    args = p.parse_args()
    if args.tokens < 400 or not 1 <= args.block_size <= args.tokens or args.requests < 1:
        p.error("--tokens must be at least 400, --block-size from 1 to --tokens, --requests at least 1")
    for name, result in compare(args.tokens, args.block_size, args.requests, args.seed).items():
        waits = f"{result.blocked_steps} of them the next request waited although enough was free in all"
        print(f"{name}: {result.steps} steps for all; in {waits}")
        if result.worst:
            print(f"  {result.worst}")
            print(f"  {result.worst_free} tokens are free (.), but in no hole are {result.worst_wants}")


if __name__ == "__main__":
    main()
