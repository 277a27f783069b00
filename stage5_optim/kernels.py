"""The operations of ops.py as Triton kernels: one launch each, and one trip to memory for what must travel.

A GPU answers a load after about a microsecond and a launch costs about as much, while the arithmetic of a token's norm
takes nothing. So the rule for all of these: ask for everything at once, compute in fp32 registers, round once, store.

    rms_norm_kernel   a program per token: the row stays in registers between the sum of squares and the scaling
    qkv_kernel        a program per token and 8 heads. Both halves of a head are loaded as tiles of their own, so that
                      channel i and i + head_dim/2 meet in one thread and rotating them moves nothing
    silu_kernel       a program per token and 1,024 channels
    gemv_kernel       a matrix times very few vectors: time is bytes of weights over bandwidth. A thread multiplies the
                      16 bytes that it loads into sums of its own; threads meet once, after the last column. All have
                      three dimensions from the load on, so that a thread holds the same columns k of x and weight:
                          x [ROWS, 1, BLOCK_K]   weight [1, BLOCK_N, BLOCK_K]   acc [ROWS, BLOCK_N, BLOCK_K]
                      norm(x) @ W = (x * norm_weight) @ W * rsqrt(mean(x^2) + eps): the norm needs no pass before

While a kernel still runs, the next one loads its weights already (launch.py).

What varies from step to step is an argument that Triton does not specialise on: it would compile once more for a value
of 1 or a multiple of 16. Needs the package triton: import this file only where it is installed.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_kernels import block_gap, quantise, scale_of_halves, store_scales
from .launch import dependent_launch, next_power_of_two, start_next, wait_for_last
from .ops import MAX_GEMV_ROWS
from .quantised_kv import KV, parts


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per row. The result is narrowed before the weight, as PyTorch does it."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64) * SIZE
    channels = tl.arange(0, BLOCK)
    exists = channels < SIZE
    weight = tl.load(weight_ptr + channels, mask=exists, other=0.0).to(tl.float32)
    wait_for_last(PDL)
    x = tl.load(x_ptr + row + channels, mask=exists, other=0.0)
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(out_ptr + row + channels, wide.to(x.dtype).to(tl.float32) * weight, mask=exists)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ops.rms_norm. x [T, hidden]."""
    num_tokens, size = x.shape
    out = torch.empty_like(x)
    block = next_power_of_two(size)
    options = dict(num_warps=min(16, max(1, block // 256))) | dependent_launch(x.device)
    rms_norm_kernel[(num_tokens,)](x, weight, out, eps, size, block, **options)
    return out


@triton.jit
def load_halves(source, offsets, exists, HALF: tl.constexpr):
    """Channels 0 .. HALF - 1 and HALF .. 2 * HALF - 1 as two tiles in fp32."""
    first = tl.load(source + offsets, mask=exists, other=0.0).to(tl.float32)
    return first, tl.load(source + offsets + HALF, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def norm_and_rotate(source, offsets, exists, channels, norm_ptr, eps, cos, sin, HALF: tl.constexpr):
    """Heads [heads, 2 * HALF] -> their two halves, normed if norm_ptr is not None, and rotated."""
    first, second = load_halves(source, offsets, exists, HALF)
    if norm_ptr is not None:
        first_weight, second_weight = load_halves(norm_ptr, channels, channels < HALF, HALF)
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        first, second = first * scale * first_weight, second * scale * second_weight
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def qkv_kernel(
    qkv_ptr, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, scales, slot_mapping, q_out,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The program of (token, group): the first groups are of HEADS query heads each, the others of K and V heads.

    scales is None, or the cache is quantised."""
    DIM: tl.constexpr = 2 * HALF
    start_next(PDL)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.arange(0, HEADS)[:, None]
    channels = tl.broadcast_to(tl.arange(0, HALF_TILE)[None, :], (HEADS, HALF_TILE))  # all loads divided alike
    angles = cos_sin + tl.load(positions + token) * DIM
    cos, sin = load_halves(angles, channels, channels < HALF, HALF)
    slot = tl.load(slot_mapping + token)
    wait_for_last(PDL)
    row = qkv_ptr + token * ((Q_HEADS + 2 * KV_HEADS) * DIM)
    if group < tl.cdiv(Q_HEADS, HEADS):
        heads += group * HEADS
        exists = (heads < Q_HEADS) & (channels < HALF)
        offsets = heads * DIM + channels
        first, second = norm_and_rotate(row, offsets, exists, channels, q_norm, eps, cos, sin, HALF)
        place = q_out + token * (Q_HEADS * DIM) + offsets
        tl.store(place, first, mask=exists)
        tl.store(place + HALF, second, mask=exists)
    elif slot >= 0:
        heads += (group - tl.cdiv(Q_HEADS, HEADS)) * HEADS
        exists = (heads < KV_HEADS) & (channels < HALF)
        offsets = heads * DIM + channels
        k, v = row + Q_HEADS * DIM, row + (Q_HEADS + KV_HEADS) * DIM
        k_first, k_second = norm_and_rotate(k, offsets, exists, channels, k_norm, eps, cos, sin, HALF)
        v_first, v_second = load_halves(v, offsets, exists, HALF)
        place = slot * (KV_HEADS * DIM) + offsets  # 64 bits, as the slot: a pool may exceed 2^31 numbers
        if scales is not None:
            k_scale, v_scale = scale_of_halves(k_first, k_second, k_cache), scale_of_halves(v_first, v_second, v_cache)
            k_first, k_second = quantise(k_first, k_scale, k_cache), quantise(k_second, k_scale, k_cache)
            v_first, v_second = quantise(v_first, v_scale, v_cache), quantise(v_second, v_scale, v_cache)
            store_scales(scales, slot, heads, heads < KV_HEADS, k_scale, v_scale, KV_HEADS, DIM, BLOCK_SIZE)
            place += slot // BLOCK_SIZE * block_gap(KV_HEADS, DIM, BLOCK_SIZE)
        tl.store(k_cache + place, k_first, mask=exists)
        tl.store(k_cache + place + HALF, k_second, mask=exists)
        tl.store(v_cache + place, v_first, mask=exists)
        tl.store(v_cache + place + HALF, v_second, mask=exists)


@cache
def qkv_config(num_heads: int, kv_heads: int, head_dim: int, block_size: int) -> tuple[int, dict[str, int]]:
    """The number of groups of heads, and the sizes that the kernel is compiled for: 8 channels per thread and half."""
    heads, half_tile = min(8, next_power_of_two(num_heads)), next_power_of_two(head_dim // 2)
    sizes = dict(Q_HEADS=num_heads, KV_HEADS=kv_heads, HALF=head_dim // 2, HALF_TILE=half_tile, HEADS=heads)
    sizes |= dict(BLOCK_SIZE=block_size, num_warps=max(1, heads * half_tile // 256))
    return -(-num_heads // heads) + -(-kv_heads // heads), sizes


def store_qkv(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    kv: KV, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """See ops.store_qkv."""
    num_tokens, (kv_heads, head_dim) = len(qkv), kv.shape[3:]
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = qkv.new_empty((num_tokens, num_heads, head_dim))
    groups, sizes = qkv_config(num_heads, kv_heads, head_dim, kv.shape[2])
    tensors = (*parts(kv), slot_mapping, q)
    options = sizes | dependent_launch(qkv.device)
    qkv_kernel[(num_tokens, groups)](qkv, positions, cos_sin, q_norm, k_norm, eps, *tensors, **options)
    return q


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per token and tile of BLOCK channels, tiles of a token side by side."""
    start_next(PDL)
    wait_for_last(PDL)
    TILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // TILES).to(tl.int64)
    channels = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    exists = channels < SIZE
    gate_ptr = gate_up_ptr + token * (2 * SIZE) + channels
    gate = tl.load(gate_ptr, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + channels, silu(gate) * up, mask=exists)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ops.silu_mul. gate_up [T, 2 * I]."""
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, size))
    block = min(1024, next_power_of_two(size))
    options = dict(num_warps=max(1, block // 256)) | dependent_launch(gate_up.device)
    silu_kernel[(num_tokens * -(-size // block),)](gate_up, out, size, block, **options)
    return out


@triton.jit
def load_weights(
    weights, k, K: tl.constexpr, RAGGED: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr, EVICTION: tl.constexpr
):
    """Columns k of some rows of the matrix, and if gated of those OFFSET numbers further on. RAGGED: k may pass K."""
    inside = k < K if RAGGED else None
    zero = 0.0 if RAGGED else None
    w = tl.load(weights + k, mask=inside, other=zero, eviction_policy=EVICTION)
    up = w
    if GATED:
        up = tl.load(weights + OFFSET + k, mask=inside, other=zero, eviction_policy=EVICTION)
    return w, up


@triton.jit
def add_products(
    acc, up_acc, squares, w, up, x_rows, norm_ptr, k, K: tl.constexpr, RAGGED: tl.constexpr, GATED: tl.constexpr
):
    """Add columns k of x times weights to the sums, and of x alone to its squares."""
    inside = k < K if RAGGED else None
    zero = 0.0 if RAGGED else None
    x = tl.load(x_rows + k, mask=inside, other=zero).to(tl.float32)
    if norm_ptr is not None:
        squares += x * x
        x *= tl.load(norm_ptr + k, mask=inside, other=zero).to(tl.float32)
    acc += x * w.to(tl.float32)
    if GATED:
        up_acc += x * up.to(tl.float32)
    return acc, up_acc, squares


@triton.jit(do_not_specialize=["num_rows"])
def gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVICTION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_N columns of the result, of which there are N. What is None costs nothing.

    Rows and columns past the end repeat the last one instead of being masked: they are computed and not stored.
    """
    start_next(PDL)
    first = tl.program_id(0) * BLOCK_N
    rows = tl.minimum(tl.arange(0, ROWS), num_rows - 1)[:, None, None]
    columns = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    RAGGED: tl.constexpr = K % BLOCK_K != 0
    x_rows, weights = x_ptr + rows * K, weight_ptr + columns * K
    acc = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, 1, BLOCK_K], tl.float32)
    w, up = load_weights(weights, k, K, RAGGED, N * K, GATED, EVICTION)
    wait_for_last(PDL)
    acc, up_acc, squares = add_products(acc, up_acc, squares, w, up, x_rows, norm_ptr, k, K, RAGGED, GATED)
    for _ in range(BLOCK_K, K, BLOCK_K):
        k += BLOCK_K
        w, up = load_weights(weights, k, K, RAGGED, N * K, GATED, EVICTION)
        acc, up_acc, squares = add_products(acc, up_acc, squares, w, up, x_rows, norm_ptr, k, K, RAGGED, GATED)
    y, up_y = tl.sum(acc, 2), tl.sum(up_acc, 2)  # [ROWS, BLOCK_N]
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(squares, 2) / K + eps)
        y, up_y = y * scale, up_y * scale
    rows, columns = tl.arange(0, ROWS)[:, None], first + tl.arange(0, BLOCK_N)[None, :]
    exists = (rows < num_rows) & (columns < N)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    if GATED:
        if bias_ptr is not None:
            up_y += tl.load(bias_ptr + N + columns, mask=columns < N, other=0.0).to(tl.float32)
        y = silu(y) * up_y
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows * N + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * N + columns, y, mask=exists)


@cache
def gemv_config(n: int, k: int, itemsize: int) -> dict[str, int | str]:
    """Tile and warps for a result of n columns: a thread loads 16 bytes of each weight row at a time.

    Of BLOCK_K the largest that does not load much padding behind column k. The numbers are those that were best in a
    whole step of Qwen3's shapes on an H200: alone, a product likes other ones.
    """
    sizes = [2 * size // itemsize for size in (2048, 1024, 512, 256)]
    sizes = sizes if n > 2048 <= k <= 8192 else sizes[1:]
    padded = {size: -(-k // size) * size for size in sizes}
    block_k = next((size for size in sizes if padded[size] <= 1.125 * k), min(sizes, key=padded.get))
    block_n = 1 if n <= 2048 else 4 if n > 65536 and k <= 1024 else 2
    return dict(BLOCK_N=block_n, BLOCK_K=block_k, num_warps=block_k * itemsize // 512, EVICTION="")


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm_weight: Tensor | None = None, eps: float = 0.0,
    residual: Tensor | None = None, gated: bool = False, config: dict[str, int | str] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See ops.gemv. config: another than gemv_config's, to try. out: a tensor to write to."""
    num_rows, k = x.shape
    if num_rows > MAX_GEMV_ROWS:
        raise ValueError(f"gemv is for at most {MAX_GEMV_ROWS} rows, not {num_rows}")
    n, rows = len(weight) // (2 if gated else 1), next_power_of_two(num_rows)
    config = (config or gemv_config(n, k, x.element_size())) | dependent_launch(x.device)
    out = x.new_empty((num_rows, n)) if out is None else out
    grid = (-(-n // config["BLOCK_N"]),)
    gemv_kernel[grid](x, weight, bias, norm_weight, residual, out, num_rows, eps, n, k, rows, gated, **config)
    return out
