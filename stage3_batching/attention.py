"""Attention: the one place where tokens look at each other, and the one place that tells sequences apart.

For each sequence, with q, k and v of its tokens in this step and the K and V of all earlier ones in its cache slot:

    out_t = sum over s <= t of softmax_s(q_t . k_s / sqrt(head_dim)) * v_s

The tokens of all sequences lie end to end; `cu_seqlens_q` says where each begins. A step may mix pieces of prompts with
single tokens of running texts:

    cu_seqlens_q  0        3  4     6          Every token sees itself and what came before it in its own sequence.
    tokens        A5 A6 A7 B9 C0 C1            The causal mask of each is aligned to the bottom right (see causal_mask).
    seq_lens      8        10 2                Query heads share key-value heads in groups (GQA).

Backends have one signature, (q, k, v, kv, metadata) -> out, and the same result:

    torch       F.scaled_dot_product_attention, sequence by sequence; runs anywhere; the reference
    flash_attn  the flash-attn package, all sequences in one call; a GPU and a 16-bit dtype

Source: Attention Is All You Need, section 3.2 (arXiv 1706.03762); GQA (arXiv 2305.13245).
"""

import importlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class AttentionMetadata:
    """Where each sequence's tokens lie, in this step and in the cache. N sequences, T tokens.

    Per sequence, as lists for the host: query_lens, the tokens of this step (the sequence's last ones); seq_lens, its
    tokens in all after the step; slots, its slot of the cache. On the device: cu_seqlens_q and cu_seqlens_k [N + 1]
    int32, seq_lens_tensor [N] int32, block_table [N, 1] int32 (a slot is one huge block), and slot_mapping [T] int64,
    the place in the cache that each token's K and V go to.
    """

    query_lens: list[int]
    seq_lens: list[int]
    slots: list[int]
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_lens_tensor: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def attention_pairs(self) -> int:
        """Causal query-key pairs of this step, counted once, not per layer or head."""
        pairs = 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            pairs += query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
        return pairs


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Store this step's k and v [T, num_kv_heads, head_dim]. kv: [2, num_slots, slot_len, num_kv_heads, head_dim]."""
    flat = kv.flatten(1, 2)  # [2, num_slots * slot_len, num_kv_heads, head_dim], a view
    flat[0].index_copy_(0, metadata.slot_mapping, k)
    flat[1].index_copy_(0, metadata.slot_mapping, v)


def causal_mask(query_len: int, seq_len: int, device: torch.device) -> torch.Tensor:
    """True where a query may look, aligned to the bottom right: [query_len, seq_len]."""
    ones = torch.ones(query_len, seq_len, dtype=torch.bool, device=device)
    return ones.tril(seq_len - query_len)


def attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence: q [query_len, num_heads, head_dim], k and v [seq_len, num_kv_heads, head_dim] -> as q."""
    query_len, seq_len = len(q), len(k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, query_len or seq_len, head_dim]
    whole = query_len == seq_len
    mask = None if whole or query_len == 1 else causal_mask(query_len, seq_len, q.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, enable_gqa=True)
    return out[0].transpose(0, 1)


def attend_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], kv the layer's cache -> as q."""
    write_kv(k, v, kv, metadata)
    outs = []
    queries = q.split(metadata.query_lens)
    for q_one, slot, seq_len in zip(queries, metadata.slots, metadata.seq_lens, strict=True):
        k_one, v_one = kv[:, slot, :seq_len]  # [seq_len, num_kv_heads, head_dim] each: written slots only
        outs.append(attend_one(q_one, k_one, v_one))
    return torch.cat(outs)


def attend_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    """As attend_torch, all sequences in one kernel, which finds each one's K and V through the block table."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    write_kv(k, v, kv, metadata)
    if len(q) == len(metadata.seq_lens):  # one token each: the kernel that splits long contexts over the GPU
        lens, table = metadata.seq_lens_tensor, metadata.block_table
        return flash_attn_with_kvcache(q[:, None], *kv, cache_seqlens=lens, block_table=table, causal=True)[:, 0]
    return flash_attn_varlen_func(
        q,
        *kv,
        cu_seqlens_q=metadata.cu_seqlens_q,
        cu_seqlens_k=metadata.cu_seqlens_k,
        max_seqlen_q=max(metadata.query_lens),
        max_seqlen_k=max(metadata.seq_lens),
        block_table=metadata.block_table,
        causal=True,
    )


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
