"""Paged attention in Triton: kernels that read K and V through the block table.

A kernel is a function that runs once per program of a grid; all programs share the memory. Each of ours takes one KV
head and some queries of one sequence, and walks over that sequence's context in tiles of BLOCK_N positions:

    tile of positions        32 .. 47   48 .. 63       BLOCK_N = 32 here, blocks of 16 tokens
    position // block_size      2          3           logical blocks: each sequence counts its own from 0
    table row [7, 4, 9, 2]      9          2           physical blocks: one small load, then
    slots                   144 .. 159  32 .. 47       block * block_size + position % block_size
    K tile                  [32, head_dim]             32 rows at these addresses, read in pieces of 16 bytes

The rest is attention as on contiguous memory. The detour costs 4 bytes per block, and the entries of the next tile are
fetched while this one is computed, so nobody waits for them. What makes such a kernel fast is bytes under way: decoding
does next to no arithmetic, and memory answers after about a microsecond, so the K and V of the tiles ahead (num_stages
- 1 of them, Triton arranges that) must have been asked for already.

    online softmax  a running maximum and sum per query row; earlier results shrink when the maximum grows (fp32)
    packed GQA      the query heads of a KV head are rows of one tile, so K and V are read once for all of them
    decode_kernel   sequences with one new token. If they are few, their contexts are split over the GPU: each split
                    leaves a result and its log-sum-exp in a workspace, and combine_kernel weighs them
    chunk_kernel    pieces of prompts. A step that mixes both runs both kernels; each skips the other's sequences

Cache memory that nobody wrote may hold NaN, and 0 * NaN is NaN: what lies past the end is never loaded.
Over a quantised cache the inner loop is that of byte_attention.py. TRITON_INTERPRET=1 runs all of it on a CPU, slowly.
Sources: PagedAttention (arXiv 2309.06180), FlashAttention-2 (arXiv 2307.08691), Flash-Decoding (PyTorch blog, 2023).
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

from .attention import AttentionMetadata
from .byte_attention import attend_bytes
from .kv_kernels import write_kv_triton
from .launch import dependent_launch, next_power_of_two, num_multiprocessors, start_next, wait_for_last
from .quantised_kv import KV, QuantisedKV, parts


@triton.jit
def look_up(table_row, positions, seq_len, BLOCK_SIZE: tl.constexpr):
    """The physical block of each position. Past the end the row holds anything: not loaded, 0 instead."""
    return tl.load(table_row + positions // BLOCK_SIZE, mask=positions < seq_len, other=0)


@triton.jit
def attend_range(
    acc, row_max, row_sum, q, query_pos, scale, start, end, seq_len, table_row, blocks, k_head, v_head,
    MASKED: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add positions start .. end of a sequence to the softmax of the rows of q [rows, DIM].

    acc [rows, DIM] is the sum of weights * V so far and row_sum that of the weights, both in units of exp2(row_max);
    scale holds log2(e), because exp2 is the cheap one. MASKED: some positions lie behind a query, or past the end.
    blocks [BLOCK_N]: those of the first tile.
    """
    dims = tl.arange(0, DIM)
    for tile in range(start, end, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        blocks = look_up(table_row, positions + BLOCK_N, seq_len, BLOCK_SIZE)  # for the next tile
        offsets = slots.to(tl.int64)[:, None] * TOKEN_STRIDE + dims[None, :]  # a pool may exceed 2^31 numbers
        exists = tl.full([BLOCK_N, DIM], True, tl.int1)
        if MASKED:
            exists &= (positions < seq_len)[:, None]
        if HEAD_DIM < DIM:
            exists &= (dims < HEAD_DIM)[None, :]
        k = tl.load(k_head + offsets, mask=exists, other=0.0)
        v = tl.load(v_head + offsets, mask=exists, other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if MASKED:
            scores = tl.where(positions[None, :] <= query_pos[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def attend(
    acc, row_max, row_sum, q, query_pos, scale, start, end, seq_len, table_row, blocks, k_cache, v_cache, scales,
    kv_head, MASKED: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """attend_range, or attend_bytes if the cache has scales."""
    k_head, v_head = k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM
    if scales is None:
        return attend_range(
            acc, row_max, row_sum, q, query_pos, scale, start, end, seq_len, table_row, blocks, k_head, v_head,
            MASKED, TOKEN_STRIDE, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    else:
        return attend_bytes(
            acc, row_max, row_sum, q, query_pos, scale, start, end, seq_len, table_row, blocks, k_head, v_head,
            scales + kv_head * BLOCK_SIZE, MASKED, TOKEN_STRIDE, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def split_size(seq_len, num_splits, BLOCK_N: tl.constexpr):
    """Positions of each split of a context, whole tiles. A short one does not need all splits."""
    return tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits) * BLOCK_N


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q_ptr, k_cache, v_cache, scales, cu_seqlens_q, seq_lens, block_table, table_stride, q_stride, q_head_stride, scale,
    out_ptr, lse_ptr, SPLIT: tl.constexpr, PDL: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The program of (KV head, sequence with one new token, split). Neighbouring programs read adjacent heads.

    With SPLIT, out_ptr is the workspace [N, num_heads, num_splits, head_dim] in fp32, else the result. The pieces are
    cut here, from the length on the device: a launch captured in a CUDA graph fits any.
    """
    start_next(PDL)
    kv_head, seq, split, num_splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    token, next_token, seq_len = tl.load(cu_seqlens_q + seq), tl.load(cu_seqlens_q + seq + 1), tl.load(seq_lens + seq)
    start, end = 0, seq_len
    if SPLIT:
        piece = split_size(seq_len, num_splits, BLOCK_N)
        start = split * piece
        end = tl.minimum(start + piece, seq_len)
    table_row = block_table + seq.to(tl.int64) * table_stride
    blocks = look_up(table_row, start + tl.arange(0, BLOCK_N), seq_len, BLOCK_SIZE)
    wait_for_last(PDL)
    if (next_token - token != 1) | (start > end):
        return
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    heads = kv_head * GROUP + rows
    exists = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = token.to(tl.int64) * q_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=exists, other=0.0)
    acc, row_max, row_sum = attend(
        tl.zeros([BLOCK_M, DIM], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32), q, tl.zeros([BLOCK_M], tl.int32) + seq_len - 1, scale, start, end, seq_len,
        table_row, blocks, k_cache, v_cache, scales, kv_head,
        True, KV_HEADS * HEAD_DIM, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)  # without any position the result is 0, not 0 / 0
    place = token * (KV_HEADS * GROUP) + heads
    if SPLIT:
        place = (seq * (KV_HEADS * GROUP) + heads) * num_splits + split
        tl.store(lse_ptr + place, row_max + tl.log2(row_sum), mask=rows < GROUP)
    tl.store(out_ptr + place.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], acc / row_sum[:, None], mask=exists)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out_ptr, partial_ptr, lse_ptr, cu_seqlens_q, seq_lens, num_splits, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The program of (head, sequence): the splits' results, each weighed by its share of the softmax's sum."""
    start_next(PDL)
    head, num_heads, seq = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    token, seq_len = tl.load(cu_seqlens_q + seq), tl.load(seq_lens + seq)
    used = tl.maximum(tl.cdiv(seq_len, tl.maximum(split_size(seq_len, num_splits, BLOCK_N), 1)), 1)
    wait_for_last(PDL)
    if tl.load(cu_seqlens_q + seq + 1) - token != 1:
        return
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    place = (seq * num_heads + head) * num_splits + splits
    lse = tl.load(lse_ptr + place, mask=splits < used, other=float("-inf"))
    weights = tl.where(lse > float("-inf"), tl.exp2(lse - tl.max(lse, 0)), 0.0)
    exists = (splits < used)[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=exists, other=0.0)
    out = tl.sum(partial * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1.0)  # the largest weight is 1
    tl.store(out_ptr + (token * num_heads + head) * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_seqs"])
def sequence_of_tile(tile, cu_seqlens_q, num_seqs, BLOCK_Q: tl.constexpr):
    """Sequence s has the tiles from cu_seqlens_q[s] // BLOCK_Q + s on: enough for any length. Count those begun."""
    begun = 0
    for start in range(0, num_seqs, 128):
        seqs = start + tl.arange(0, 128)
        first_tiles = tl.load(cu_seqlens_q + seqs, mask=seqs < num_seqs, other=0) // BLOCK_Q + seqs
        begun += tl.sum(((first_tiles <= tile) & (seqs < num_seqs)).to(tl.int32), 0)
    return begun - 1


@triton.jit(do_not_specialize=["table_stride", "num_seqs"])
def chunk_kernel(
    q_ptr, k_cache, v_cache, scales, cu_seqlens_q, seq_lens, block_table, table_stride, q_stride, q_head_stride, scale,
    out_ptr, num_seqs, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The program of (KV head, tile of queries): its rows are BLOCK_Q tokens of one sequence times GROUP heads."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # later queries see more: the longest work starts first
    seq = sequence_of_tile(tile, cu_seqlens_q, num_seqs, BLOCK_Q)
    first = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first
    begin = (tile - first // BLOCK_Q - seq) * BLOCK_Q  # the tile's first query, counted from the sequence's first
    if (begin >= query_len) | (query_len == 1):
        return
    seq_len = tl.load(seq_lens + seq)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    queries, heads = begin + rows // GROUP, kv_head * GROUP + rows % GROUP
    exists = ((rows < BLOCK_Q * GROUP) & (queries < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first + queries).to(tl.int64)[:, None]
    q = tl.load(q_ptr + tokens * q_stride + heads[:, None] * q_head_stride + dims[None, :], mask=exists, other=0.0)
    query_pos = seq_len - query_len + queries
    first_pos = seq_len - query_len + begin
    unmasked = (first_pos + 1) // BLOCK_N * BLOCK_N  # whole tiles that even the first query sees
    end = tl.minimum(first_pos + BLOCK_Q, seq_len)  # what the last one sees
    table_row = block_table + seq.to(tl.int64) * table_stride
    blocks = look_up(table_row, tl.arange(0, BLOCK_N), seq_len, BLOCK_SIZE)
    acc, row_max, row_sum = attend(
        tl.zeros([BLOCK_M, DIM], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32), q, query_pos, scale, 0, unmasked, seq_len, table_row, blocks, k_cache, v_cache,
        scales, kv_head, False, KV_HEADS * HEAD_DIM, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    blocks = look_up(table_row, unmasked + tl.arange(0, BLOCK_N), seq_len, BLOCK_SIZE)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, query_pos, scale, unmasked, end, seq_len, table_row, blocks, k_cache, v_cache,
        scales, kv_head, True, KV_HEADS * HEAD_DIM, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    out_offsets = (tokens * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, acc / row_sum[:, None], mask=exists)


@cache
def kernel_config(head_dim: int, group: int, itemsize: int, is_decode: bool, is_bytes: bool = False) -> dict[str, int]:
    """Sizes of tiles, warps, pipeline stages. Fixed, not tuned while running: the same digits in every run.

    On an H200 within 3 % of the best of benchmarks.kernels --sweep for each shape (attend_decode splits with 2 stages).
    """
    dim, rows = next_power_of_two(head_dim), next_power_of_two(group)
    positions = 16384 // (dim * itemsize) * (2 if is_bytes and is_decode and itemsize == 2 else 1)
    block_n = min(128, max(16, positions))  # K tiles of 16 KB: three programs per multiprocessor
    if is_decode:
        return dict(BLOCK_M=max(16, rows), BLOCK_N=block_n, num_warps=4, num_stages=3)
    if itemsize > 2:  # fp32 does without tensor cores, and larger tiles do not fit into the registers
        return dict(BLOCK_M=max(16, rows), BLOCK_N=block_n, num_warps=8, num_stages=2)
    wide = dim > 128
    return dict(BLOCK_M=max(64 if wide else 128, rows), BLOCK_N=block_n, num_warps=8, num_stages=2 if wide else 3)


def choose_num_splits(num_programs: int, longest: int, block_n: int, multiprocessors: int) -> int:
    """In how many pieces to cut each context: enough for two programs per multiprocessor, but of two tiles or more."""
    return max(1, min(2 * multiprocessors // num_programs, longest // (2 * block_n), 64))


def arguments(q: torch.Tensor, kv: KV, metadata: AttentionMetadata, is_decode: bool) -> tuple[tuple, dict]:
    """What both attention kernels take: their first arguments, and the sizes that they are compiled for."""
    kv_heads, group, head_dim = kv.shape[3], q.shape[1] // kv.shape[3], q.shape[2]
    sizes = dict(KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, DIM=next_power_of_two(head_dim))
    table, scale, is_bytes = metadata.block_table, head_dim**-0.5 * math.log2(math.e), isinstance(kv, QuantisedKV)
    sizes |= dict(BLOCK_SIZE=kv.shape[2]) | kernel_config(head_dim, group, q.element_size(), is_decode, is_bytes)
    tensors = (q, *parts(kv), metadata.cu_seqlens_q, metadata.seq_lens_tensor, table)
    return (*tensors, table.stride(0), q.stride(0), q.stride(1), scale), sizes


def attend_decode(q: torch.Tensor, kv: KV, metadata: AttentionMetadata, out: torch.Tensor) -> None:
    """The sequences with one new token: writes their rows of out [T, num_heads, head_dim]."""
    common, sizes = arguments(q, kv, metadata, is_decode=True)
    num_seqs, num_heads, head_dim = len(metadata.seq_lens), q.shape[1], q.shape[2]
    num_programs, longest = sizes["KV_HEADS"] * metadata.query_lens.count(1), max(metadata.seq_lens)
    splits = choose_num_splits(num_programs, longest, sizes["BLOCK_N"], num_multiprocessors(q.device))
    grid, early = (sizes["KV_HEADS"], num_seqs, splits), dependent_launch(q.device)
    if splits == 1:
        decode_kernel[grid](*common, out, out, SPLIT=False, **sizes, **early)
        return
    partial = q.new_empty((num_seqs, num_heads, splits, head_dim), dtype=torch.float32)
    lse = q.new_empty((num_seqs, num_heads, splits), dtype=torch.float32)
    sizes |= dict(num_stages=2)  # few tiles each; and the next product finds room to load its weights already
    decode_kernel[grid](*common, partial, lse, SPLIT=True, **sizes, **early)
    sizes = sizes["BLOCK_N"], next_power_of_two(splits), head_dim, sizes["DIM"]
    lens = metadata.cu_seqlens_q, metadata.seq_lens_tensor
    combine_kernel[(num_heads, num_seqs)](out, partial, lse, *lens, splits, *sizes, **early)


def attend_chunks(q: torch.Tensor, kv: KV, metadata: AttentionMetadata, out: torch.Tensor) -> None:
    """The sequences with several new tokens: writes their rows of out [T, num_heads, head_dim]."""
    common, sizes = arguments(q, kv, metadata, is_decode=False)
    num_seqs, block_q = len(metadata.seq_lens), sizes["BLOCK_M"] // sizes["GROUP"]
    grid = (sizes["KV_HEADS"], len(q) // block_q + num_seqs)  # as many tiles as any division into sequences needs
    chunk_kernel[grid](*common, out, num_seqs, **sizes)


def attend_triton(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, kv: KV, metadata: AttentionMetadata
) -> torch.Tensor:
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] or None, kv the layer's cache -> as q."""
    if k is not None:
        write_kv_triton(k, v, kv, metadata.slot_mapping)
    out = q.new_empty(q.shape)
    if len(q) > len(metadata.seq_lens):
        attend_chunks(q, kv, metadata, out)
    if 1 in metadata.query_lens:
        attend_decode(q, kv, metadata, out)
    return out
