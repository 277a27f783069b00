"""Ops: what the decoder does between attention and attention, in plain torch. kernels.py has the same as fused kernels.

A layer of stage 4 makes some forty small calls; here they are four steps, each with a name, so that each can be one
kernel:

    norm_linear      linear(norm(x))                      in front of attention
    rotate_qkv       split, norm of q and k, rotation     (and, where it is a kernel, the write into the KV cache)
    norm_gate_up     silu(gate) * up of norm(x)           in front of the MLP's last matrix
    linear_add       x + linear(y)                        behind attention, and behind the MLP

x is the residual stream [T, hidden]. Everything is done in the dtype of x, norms in fp32 at least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from .model import Linear, RMSNorm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size], weight [size]. Squares overflow and lose digits in 16 bits: fp32 at least (float64 stays)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i and i + head_dim/2 of each head together. x [T, heads, head_dim], cos_sin [T, 2, head_dim/2]."""
    cos, sin = cos_sin[:, None].unbind(2)  # [T, 1, head_dim/2] each
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_qkv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> q [T, num_heads, head_dim], k and v [T, num_kv_heads, ...].

    cos_sin [max_model_len, 2, head_dim/2]; kv: the layer's cache [2, num_blocks, block_size, num_kv_heads, head_dim].
    k and v are still to be stored; a fused kernel has done so, and returns None for them.
    """
    kv_heads, head_dim = kv.shape[-2:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    q = q if q_norm is None else rms_norm(q, q_norm.weight, q_norm.eps)
    k = k if k_norm is None else rms_norm(k, k_norm.weight, k_norm.eps)
    at = cos_sin[positions]
    return apply_rope(q, at), apply_rope(k, at), v


def known_ids(input_ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """input_ids [T] with every negative one replaced by what the last step sampled: -1 is the last row of `sampled`."""
    return torch.where(input_ids < 0, sampled[input_ids.clamp(max=-1)], input_ids)


def linear(x: torch.Tensor, linear: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T, in] -> [T, out], written to `out` if that is given."""
    return linear(x) if out is None else out.copy_(linear(x))


def norm_linear(x: torch.Tensor, norm: RMSNorm, linear: Linear) -> torch.Tensor:
    """linear(norm(x)): [T, hidden] -> [T, out]."""
    return linear(rms_norm(x, norm.weight, norm.eps))


def norm_gate_up(x: torch.Tensor, norm: RMSNorm, gate_up: Linear) -> torch.Tensor:
    """silu(gate) * up, both from norm(x): [T, hidden] -> [T, intermediate]."""
    return silu_mul(norm_linear(x, norm, gate_up))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * intermediate], gate and up side by side -> silu(gate) * up [T, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_add(y: torch.Tensor, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """x + linear(y): [T, in], [T, hidden] -> [T, hidden]."""
    return x + linear(y)
