"""Attention: the one place where tokens look at each other.

For one sequence of T tokens, with q, k and v of all of them at hand:

    out_t = sum over s <= t of softmax_s(q_t . k_s / sqrt(head_dim)) * v_s

Every token sees itself and what came before it: T (T + 1) / 2 query-key pairs. Query heads share key-value heads in
groups (GQA): with 9 query and 3 KV heads, query heads 0-2 read KV head 0, and so on.

Backends have one signature, (q, k, v, metadata) -> out, and the same result:

    torch       F.scaled_dot_product_attention; runs anywhere; the reference
    flash_attn  the flash-attn package; a GPU and a 16-bit dtype

Source: Attention Is All You Need, section 3.2 (arXiv 1706.03762); GQA (arXiv 2305.13245).
"""

import importlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class AttentionMetadata:
    """What attention must know of this step: here, the length of the one sequence whose tokens are all present."""

    seq_len: int

    @property
    def attention_pairs(self) -> int:
        """Causal query-key pairs of this step, counted once, not per layer or head."""
        return self.seq_len * (self.seq_len + 1) // 2


def attend_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, num_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, head_dim]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def attend_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """As attend_torch, by flash-attn's kernel, which never writes the T x T score matrix to memory."""
    from flash_attn import flash_attn_func

    return flash_attn_func(q[None], k[None], v[None], causal=True)[0]


BACKENDS = {"torch": attend_torch, "flash_attn": attend_flash}


def package_obstacle(module: str, name: str) -> str | None:
    """Why a package cannot be used, or None when it can. One that was built for another torch is there, and fails."""
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return f"the package {name} is not installed"
        return f"the package {name} cannot be imported ({type(error).__name__}: {error})"
    return None


def flash_attn_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why flash-attn cannot be used here, or None when it can."""
    if device.type != "cuda":
        return "flash_attn needs a GPU"
    if obstacle := package_obstacle("flash_attn", "flash-attn"):
        return obstacle
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash_attn needs a GPU of compute capability 8.0 or more"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash_attn needs float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"flash_attn needs a head_dim up to 256 in steps of 8, not {head_dim}"
    return None


def choose_backend(requested: str | None, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """The backend to use and the reason. Raises ValueError when the requested one cannot run here."""
    obstacle = flash_attn_obstacle(device, dtype, head_dim)
    if requested == "flash_attn" and obstacle:
        raise ValueError(f"attention_backend='flash_attn': {obstacle}; leave it out, or say 'torch'")
    if requested:
        return requested, "asked for"
    return ("torch", obstacle) if obstacle else ("flash_attn", "fastest here")
