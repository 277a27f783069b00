"""The kernel of quick_sum.py. Needs the package triton: import this file only where it is installed.

Every rank has a piece of memory that all can read and write, at `addresses[rank]`:

    numbers [2, HALF]            its x of this sum, and of the one before
    flags [SIZE, programs]       how many sums each rank has put its part in for, program by program; others write here

A program sums BLOCK numbers and meets only the same program of the other ranks, so nobody waits for a whole GPU. The
halves take turns: whoever writes to a half again has seen a flag of the sum in between, and that was set by a kernel
which began after the others had read the half.
"""

import triton
import triton.language as tl

from .launch import start_next, wait_for_last

BLOCK = 1024


@triton.jit
def numbers_at(address, number: tl.constexpr):
    """A pointer to a rank's numbers, which begin where 16 bytes can be loaded at once."""
    return tl.multiple_of(address.to(tl.pointer_type(number)), 16)


@triton.jit
def wait_for(flag, epoch):
    """Until the flag has reached this epoch. What was written before it was set can be read then."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen - epoch < 0:  # a difference: epochs may run over
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["num_numbers"])
def sum_kernel(
    x_ptr, out_ptr, addresses, epochs, num_numbers, RANK: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = the sum of all ranks' x, added in the order of the ranks and rounded once: the same bits on every rank.
    IS_EVEN: num_numbers is a multiple of BLOCK, so that no load needs a mask, and each fetches 16 bytes."""
    start_next(PDL)
    number: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    exists = (offsets >= 0) if IS_EVEN else (offsets < num_numbers)
    own = tl.load(addresses + RANK)
    own_flags = (own + 2 * HALF * (number.primitive_bitwidth // 8)).to(tl.pointer_type(tl.int32))
    wait_for_last(PDL)
    epoch = tl.load(epochs + program) + 1
    places = (epoch & 1) * HALF + offsets
    x = tl.load(x_ptr + offsets, mask=exists, other=0.0)
    tl.store(numbers_at(own, number) + places, x, mask=exists)
    tl.debug_barrier()  # all threads have written
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flags = tl.load(addresses + rank) + 2 * HALF * (number.primitive_bitwidth // 8)
            flag = flags.to(tl.pointer_type(tl.int32)) + RANK * PROGRAMS + program
            tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            wait_for(own_flags + rank * PROGRAMS + program, epoch)
    tl.debug_barrier()  # one thread has waited for all
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            part = numbers_at(tl.load(addresses + rank), number)
            total += tl.load(part + places, mask=exists, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out_ptr + offsets, total, mask=exists)
    tl.store(epochs + program, epoch)
