"""What kernels do to write K and V into the cache, and to read scales (quantised_kv.py says what a block looks like).

The kernel that norms and rotates q and k, in kernels.py, stores K and V itself; without fused kernels `write_kernel`
does it. Both quantise what they have in registers, so no unquantised K or V goes to memory first. The arithmetic is
that of quantised_kv.quantise to the bit: one division, rounded as IEEE says; then a product, cut off, and rounded half
to even by adding a number so large that no digit behind the point is left.

Needs the package triton: import this file only where it is installed.
"""

import torch
import triton
import triton.language as tl

from .launch import next_power_of_two
from .quantised_kv import KV, parts


@triton.jit
def block_gap(KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Bytes of a block between the last number of its K and the first of the next block's: V, and all scales."""
    return BLOCK_SIZE * KV_HEADS * (DIM + 4)


@triton.jit
def scale_of(absmax, cache):
    """In fp16, for the dtype of the cache. absmax: fp32. What these functions get as `cache` is a pointer."""
    one_over_largest: tl.constexpr = 1.0 / 127.0 if cache.dtype.element_ty == tl.int8 else 1.0 / 448.0
    return tl.minimum(tl.maximum(absmax * one_over_largest, 2.0**-24), 65504.0).to(tl.float16)


@triton.jit
def scale_of_halves(first, second, cache):
    """Heads as two tiles [heads, half] -> [heads, 1]."""
    return scale_of(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1, keep_dims=True), cache)


@triton.jit
def quantise(x, scale, cache):
    """fp32 numbers -> those of the cache."""
    scaled = x * tl.div_rn(1.0, scale.to(tl.float32))
    if cache.dtype.element_ty == tl.int8:
        scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: half to even
    else:
        return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def store_scales(
    scales, slot, heads, exists, k_scale, v_scale, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Put a token's scales side by side, K's in the low half. heads, exists and both scales: [heads, 1]."""
    low = k_scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = v_scale.to(tl.int16, bitcast=True).to(tl.int32) << 16
    block = slot // BLOCK_SIZE * (BLOCK_SIZE * KV_HEADS * (DIM + 2) // 2)
    tl.store(scales + block + heads * BLOCK_SIZE + slot % BLOCK_SIZE, low | high, mask=exists)


@triton.jit
def load_scales(
    scales, blocks, positions, seq_len, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """A head's of K and of V at each position, in fp32; past the end: not loaded, 0. scales: the head's in block 0."""
    places = blocks.to(tl.int64) * (BLOCK_SIZE * KV_HEADS * (DIM + 2) // 2) + positions % BLOCK_SIZE
    pairs = tl.load(scales + places, mask=positions < seq_len, other=0)
    low, high = (pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def write_kernel(
    k_ptr, v_ptr, k_cache, v_cache, scales, slot_mapping, k_stride, k_head_stride, v_stride, v_head_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program per token. HEADS and DIM are the next powers of two, which tiles must be; masks cut them."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
        exists = (heads < KV_HEADS) & (dims < HEAD_DIM)
        place = (slot * KV_HEADS + heads) * HEAD_DIM + dims
        k = tl.load(k_ptr + token * k_stride + heads * k_head_stride + dims, mask=exists, other=0.0)
        v = tl.load(v_ptr + token * v_stride + heads * v_head_stride + dims, mask=exists, other=0.0)
        if scales is not None:
            k, v = k.to(tl.float32), v.to(tl.float32)
            k_scale = scale_of(tl.max(tl.abs(k), 1, keep_dims=True), k_cache)
            v_scale = scale_of(tl.max(tl.abs(v), 1, keep_dims=True), v_cache)
            k, v = quantise(k, k_scale, k_cache), quantise(v, v_scale, v_cache)
            store_scales(scales, slot, heads, heads < KV_HEADS, k_scale, v_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
            place += slot // BLOCK_SIZE * block_gap(KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        tl.store(k_cache + place, k, mask=exists)
        tl.store(v_cache + place, v, mask=exists)


def write_kv_triton(k: torch.Tensor, v: torch.Tensor, kv: KV, slot_mapping: torch.Tensor) -> None:
    """Store k and v [T, num_kv_heads, head_dim] in their slots of kv; slot -1 is nowhere."""
    num_tokens, heads, head_dim = k.shape
    strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    sizes = heads, head_dim, kv.shape[2], next_power_of_two(heads), next_power_of_two(head_dim)
    write_kernel[(num_tokens,)](k, v, *parts(kv), slot_mapping, *strides, *sizes)
