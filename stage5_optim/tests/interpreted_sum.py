"""Two ranks' sums, one after the other, in Triton's interpreter on a CPU or on one GPU: the other rank's part and flag
are there already, as if it had been quicker.

    TRITON_INTERPRET=1 python -m PACKAGE.tests.interpreted_sum      the names of the sums that were right
"""

import sys

import torch

from ..sum_kernels import BLOCK, sum_kernel

HALF = 4 * BLOCK
PROGRAMS = HALF // BLOCK
SIZES = (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


class Rank:
    """The memory of a rank: two halves, flags, epochs."""

    def __init__(self, size: int, dtype: torch.dtype, device: str):
        self.memory = torch.full((2 * HALF * dtype.itemsize + 4 * size * PROGRAMS,), 0xFF, dtype=torch.uint8).to(device)
        self.halves = self.memory[: 2 * HALF * dtype.itemsize].view(dtype).view(2, HALF)
        self.flags = self.memory[2 * HALF * dtype.itemsize :].view(torch.int32).view(size, PROGRAMS)
        self.flags.zero_()
        self.epochs = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def check(size: int, dtype: torch.dtype, device: str, rank: int) -> None:
    """Sums of unlike sizes in a row, as seen by one rank."""
    torch.manual_seed(rank)
    ranks = [Rank(size, dtype, device) for _ in range(size)]
    addresses = torch.tensor([one.memory.data_ptr() for one in ranks], device=device)
    counts = [0] * PROGRAMS
    for num in (*SIZES, *SIZES):
        xs = [torch.randn(num).to(dtype).to(device) for _ in range(size)]
        programs = -(-num // BLOCK)
        for program in range(programs):
            counts[program] += 1
            here = slice(program * BLOCK, min(num, (program + 1) * BLOCK))
            for other in (i for i in range(size) if i != rank):
                ranks[other].halves[counts[program] % 2, here] = xs[other][here]
                ranks[rank].flags[other, program] = counts[program]
        out = torch.full((num + BLOCK,), float("nan"), dtype=dtype, device=device)
        sizes = rank, size, HALF, PROGRAMS, BLOCK, num % BLOCK == 0, False
        sum_kernel[(programs,)](xs[rank], out, addresses, ranks[rank].epochs, num, *sizes)
        wanted = sum(x.float() for x in xs).to(dtype)
        assert out[:num].equal(wanted) and out[num:].isnan().all()
        assert ranks[rank].epochs.tolist() == counts
        assert all(ranks[other].flags[rank].tolist() == counts for other in range(size) if other != rank)


def main(device: str) -> None:
    for size, dtype in ((2, torch.float32), (2, torch.float16), (4, torch.float32)):
        for rank in range(size):
            check(size, dtype, device, rank)
            print(f"{size} {dtype} {rank}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
