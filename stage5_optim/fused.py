"""Fused: the steps of the decoder, as in ops.py, but with the kernels of kernels.py.

For one token (and for a few, where rows are short) every product is our own kernel, and norm, silu and residual are
part of it: a layer is five launches and attention. With more tokens tensor cores pay, and products are cuBLAS's: a
layer is eight launches and attention. Functions have the names and arguments of ops.py, so the model does not know
which of the two it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels import gemv, rms_norm, silu_mul, store_qkv
from .ops import MAX_GEMV_ROWS, embed
from .quantised_kv import KV
from .sample_kernels import known_ids, sample

if TYPE_CHECKING:
    from .model import Linear, RMSNorm

LONGEST_TINY = 6144  # numbers in all rows

__all__ = ["embed", "known_ids", "linear", "linear_add", "norm_gate_up", "norm_linear", "rms_norm", "rotate_qkv"]
__all__ += ["sample"]


def is_tiny(x: Tensor) -> bool:
    """Whether our own product of x [T, in] is the faster one: on an H200 for one token always, for four whose rows
    have 1,024 numbers, as most of Qwen3-0.6B's, for fewer of longer ones, never for two of 8B (benchmarks.fused)."""
    return len(x) == 1 or (0 < len(x) <= MAX_GEMV_ROWS and x.numel() <= LONGEST_TINY)


def linear(x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
    """See ops.linear."""
    if is_tiny(x):
        return gemv(x, linear.weight, linear.bias, out=out)
    if out is None or linear.bias is not None:
        return linear(x) if out is None else out.copy_(linear(x))
    return torch.mm(x, linear.weight.t(), out=out)


def norm_linear(x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
    """See ops.norm_linear."""
    if is_tiny(x):
        return gemv(x, linear.weight, linear.bias, norm.weight, norm.eps)
    return linear(rms_norm(x, norm.weight, norm.eps))


def norm_gate_up(x: Tensor, norm: RMSNorm, gate_up: Linear) -> Tensor:
    """See ops.norm_gate_up."""
    if is_tiny(x):
        return gemv(x, gate_up.weight, gate_up.bias, norm.weight, norm.eps, gated=True)
    return silu_mul(gate_up(rms_norm(x, norm.weight, norm.eps)))


def linear_add(y: Tensor, linear: Linear, x: Tensor) -> Tensor:
    """See ops.linear_add. The residual is added where the product is rounded: that add is not even a kernel."""
    if is_tiny(y):
        return gemv(y, linear.weight, linear.bias, residual=x)
    if linear.bias is not None:
        return x + linear(y)
    return x.addmm_(y, linear.weight.t())


def rotate_qkv(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None,
    kv: KV, slot_mapping: Tensor,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """See ops.rotate_qkv. k and v are in the cache when it returns."""
    norms = (None, None, 0.0) if q_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
    return store_qkv(qkv, positions, cos_sin, *norms, kv, slot_mapping), None, None
