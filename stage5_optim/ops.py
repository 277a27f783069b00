"""Operations that a fused kernel can do in one go, here in plain PyTorch: what kernels.py must compute.

PyTorch launches a kernel for each operator, and every kernel fetches its input from the GPU's memory and puts its
result back there. Much of a model is small operators in a row, and they pay for little else than that:

    rms_norm    widen, square, mean, add, rsqrt, multiply, narrow, weight    a launch each
    store_qkv   split, two norms, two rotations, two stores                  dozens of launches
    silu_mul    silu, multiply                                               5 trips of [T, I] instead of 3
    gemv        norm, product, bias, silu, residual of 1 to 4 tokens         weights are read once, the rest is free
    sample      noise, temperature, argmax over the vocabulary               copies of the logits in int64

A fused kernel keeps what lies in between in registers. Rounding differs, and only to the better: in 16 bits these
functions round after each operator and the kernels once, at the end.

The decoder calls the functions at the end, from `known_ids` on; fused.py has the same under the same names. x is the
residual stream [T, hidden], linears and norms are the modules of model.py. parallel.py has `embed`, `linear_add` and
`linear` for a model that several processes share.

    embed            the first x
    norm_linear      linear(norm(x))                      in front of attention
    rotate_qkv       split, norm of q and k, rotation     where it is a kernel, the write into the KV cache too
    norm_gate_up     silu(gate) * up of norm(x)           in front of the MLP's last matrix
    linear_add       x + linear(y)                        behind attention, and behind the MLP
    linear           the head: logits

Here any dtype is right, float64 too, on any device. T tokens, R rows to sample from; tensors are contiguous.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import write_kv
from .quantised_kv import KV
from .sampling import NO_TOKEN, gumbel_noise

if TYPE_CHECKING:
    from .model import Embedding, Linear, RMSNorm

MAX_GEMV_ROWS = 4  # with more tokens tensor cores pay, and with them cuBLAS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., size], weight [size] -> as x."""
    # Squares overflow and lose digits in 16 bits: widen to fp32 at least (float64 stays as it is).
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate channel i and i + head_dim/2 of each head together. x [T, heads, head_dim], cos_sin [T, 2, head_dim/2]."""
    cos, sin = cos_sin[:, None].unbind(2)  # [T, 1, head_dim/2] each
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def store_qkv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv: KV,
    slot_mapping: Tensor,
) -> Tensor:
    """From the packed product to what attention needs: norm and rotate q and k, put k and v into their cache slots.

    qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], positions [T] int64, cos_sin [max_len, 2, head_dim/2], q_norm
    and k_norm [head_dim] or both None, kv [2, num_blocks, block_size, num_kv_heads, head_dim], slot_mapping [T] int64
    (-1: nowhere; on a GPU only the kernel knows that one). Returns q [T, num_heads, head_dim].
    """
    q, k, v = split_and_rotate(qkv, cos_sin[positions], q_norm, k_norm, eps, kv)
    write_kv(k, v, kv, SimpleNamespace(slot_mapping=slot_mapping))
    return q


def split_and_rotate(
    qkv: Tensor, angles: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a packed product, q and k normed and rotated. angles [T, 2, head_dim/2]; kv: for its shape."""
    kv_heads, head_dim = kv.shape[3:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return apply_rope(q, angles), apply_rope(k, angles), v


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [T, 2 * I], the gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """norm(x) @ weight.T + bias + residual, each of the three if given. Its kernel takes at most MAX_GEMV_ROWS rows.

    x [M, K], weight [N, K], bias [N], norm_weight [K] -> [M, N]. gated: silu_mul of product and bias, so [M, N / 2].
    residual is like the result.
    """
    x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    y = silu_mul(y) if gated else y
    return y if residual is None else y + residual


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, inverse_temperatures: Tensor, out: Tensor) -> None:
    """Write the next token of each row to out [R]: a draw from softmax(logits / temperature), without the softmax.

    logits [R, vocab]; seeds [R], 64 bits in an int64 each; positions [R] int64, below 2^31; inverse_temperatures [R]
    fp32, where 0 means greedy. The noise is that of sampling.py. Of equal scores the lowest id wins in the kernel, and
    usually here, where PyTorch leaves it open. A row with NaN, or whose best is infinite, gives NO_TOKEN.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    noise = gumbel_noise(seeds.tolist(), positions.tolist(), wide)
    scale = inverse_temperatures[:, None]
    best, ids = torch.where(scale > 0, wide * scale + noise, wide).max(dim=-1)
    out.copy_(torch.where(best.isfinite(), ids, NO_TOKEN))


def known_ids(input_ids: Tensor, sampled: Tensor) -> Tensor:
    """input_ids [T] with every negative one replaced by what the last step sampled: -1 is the last row of `sampled`.

    NO_TOKEN is taken as 0: its sequence is at its end, and what is computed for it is dropped.
    """
    return torch.where(input_ids < 0, sampled[input_ids.clamp(max=-1)].clamp(min=0), input_ids)


def embed(input_ids: Tensor, embedding: Embedding) -> Tensor:
    """[T] -> [T, hidden]."""
    return embedding(input_ids)


def linear(x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
    """[T, in] -> [T, out], written to `out` if that is given."""
    return linear(x) if out is None else out.copy_(linear(x))


def norm_linear(x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
    """linear(norm(x)): [T, hidden] -> [T, out]."""
    return linear(rms_norm(x, norm.weight, norm.eps))


def norm_gate_up(x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
    """silu(gate) * up, both from norm(x): [T, hidden] -> [T, intermediate]."""
    return silu_mul(norm_linear(x, norm, gate_up))


def linear_add(y: Tensor, linear: Linear, x: Tensor) -> Tensor:
    """x + linear(y): [T, in], [T, hidden] -> [T, hidden]. x may be overwritten."""
    return x + linear(y)


def rotate_qkv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    kv: KV,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As store_qkv, but k and v come back, for attention to store. A fused kernel has done it, and returns None."""
    norms = (None, None, 0.0) if q_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
    return split_and_rotate(qkv, cos_sin[positions], *norms, kv)
