"""Sampling on the GPU: one pass over the logits, without a softmax. ops.sample says what comes out.

argmax(logits / temperature + Gumbel noise) is a draw from softmax(logits / temperature). The noise of a token is hashed
from (seed, position, id) where its logit is, so neither the maximum of a row nor a sum over it is needed:

    sample_kernel   a program per row and slice of the vocabulary leaves the best score of the slice, and its id
    pick_kernel     a program per row: the best slice
    known_ids       the next step reads a token where it was sampled, if the CPU does not know it yet

Everything that varies from row to row is read on the device, so both can be recorded in a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dependent_launch, next_power_of_two, start_next, wait_for_last


@triton.jit
def mix(x):
    """sampling._mix. The product of 32-bit numbers wraps around by itself."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hash_bits(seed, position, ids):
    """sampling.hash_bits of one row: seed and position are int64, ids uint32 -> uint32."""
    low = mix(seed.to(tl.uint32) ^ mix((position * 2).to(tl.uint32)))
    high = mix((seed >> 32).to(tl.uint32) ^ mix((position * 2 + 1).to(tl.uint32)))
    first, second = mix(low ^ mix(high + 0x9E3779B9)), mix(high ^ mix(low + 0x9E3779B9))
    return mix(mix(ids ^ first) ^ second)


@triton.jit
def gumbel_noise(bits):
    """sampling.gumbel_noise. Of a small u, 1 - u forgets the digits: a series instead."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u / 6)))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "inverse_temperatures"])
def sample_kernel(
    logits_ptr, seeds, positions, inverse_temperatures, best_ptr, ids_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The program of (slice, row) leaves the slice's best score and its id. NaN counts as infinite."""
    piece, row = tl.program_id(0), tl.program_id(1)
    start_next(PDL)
    ids = piece * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(inverse_temperatures + row)
    wait_for_last(PDL)
    scores = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    scores = scores.to(tl.float32)
    if scale > 0:
        bits = hash_bits(tl.load(seeds + row), tl.load(positions + row), ids.to(tl.uint32))
        scores = scores * scale + gumbel_noise(bits)
    scores = tl.where(scores == scores, scores, float("inf"))
    best, at = tl.max(scores, 0, return_indices=True)  # the lowest of equals: a masked id never wins
    tl.store(best_ptr + row * tl.num_programs(0) + piece, best)
    tl.store(ids_ptr + row * tl.num_programs(0) + piece, piece * BLOCK + at)


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def pick_kernel(best_ptr, ids_ptr, out_ptr, PIECES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """One program per row: the id of the best slice, the first of equals. NO_TOKEN if that is infinite."""
    wait_for_last(PDL)
    row, pieces = tl.program_id(0), tl.arange(0, TILE)
    best = tl.load(best_ptr + row * PIECES + pieces, mask=pieces < PIECES, other=float("-inf"))
    top, at = tl.max(best, 0, return_indices=True)
    token = tl.load(ids_ptr + row * PIECES + at).to(tl.int64)
    tl.store(out_ptr + row, tl.where(tl.abs(top) < float("inf"), token, -1))


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, inverse_temperatures: Tensor, out: Tensor) -> None:
    """See ops.sample. Reads nothing back, so it can be captured in a CUDA graph."""
    rows, vocab = logits.shape
    block, num_warps = (1024, 4) if rows <= 8 else (4096, 8)  # few rows: small slices, to fill the GPU
    pieces = -(-vocab // block)
    best, ids = (logits.new_empty((rows, pieces), dtype=dtype) for dtype in (torch.float32, torch.int32))
    tensors = (logits, seeds, positions, inverse_temperatures, best, ids)
    options = dependent_launch(logits.device)
    sample_kernel[(pieces, rows)](*tensors, vocab, block, num_warps=num_warps, **options)
    pick_kernel[(rows,)](best, ids, out, pieces, next_power_of_two(pieces), num_warps=1, **options)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def known_ids_kernel(ids_ptr, sampled_ptr, out_ptr, num_tokens, num_rows, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < num_tokens, other=0)
    sampled = tl.load(sampled_ptr + num_rows + ids, mask=ids < 0, other=0)
    tl.store(out_ptr + at, tl.where(ids < 0, tl.maximum(sampled, 0), ids), mask=at < num_tokens)


def known_ids(input_ids: Tensor, sampled: Tensor) -> Tensor:
    """See ops.known_ids."""
    out = torch.empty_like(input_ids)
    known_ids_kernel[(-(-len(out) // 256),)](input_ids, sampled, out, len(out), len(sampled), 256, num_warps=1)
    return out
