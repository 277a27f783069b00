"""Attention: the one place where tokens look at each other, and the one place that tells sequences apart.

For each sequence, with q, k and v of its tokens in this step and the K and V of all earlier ones in its cache blocks:

    out_t = sum over s <= t of softmax_s(q_t . k_s / sqrt(head_dim)) * v_s

The tokens of all sequences lie end to end; `cu_seqlens_q` says where each begins. A step may mix pieces of prompts with
single tokens of running texts:

    cu_seqlens_q  0        3  4     6          Every token sees itself and what came before it in its own sequence.
    tokens        A5 A6 A7 B9 C0 C1            The causal mask of each is aligned to the bottom right (see causal_mask).
    seq_lens      8        10 2                Query heads share key-value heads in groups (GQA).

Backends have one signature, (q, k, v, kv, metadata) -> out, and the same result:

    torch       F.scaled_dot_product_attention, sequence by sequence, over a copy of its blocks; anywhere; the reference
    triton      kernels of our own that read the blocks where they are (paged_attention.py); a GPU
    flash_attn  the flash-attn package, likewise; a GPU, a 16-bit dtype, and block sizes that are multiples of 256

kv is a layer's cache: a tensor, or if it is quantised a QuantisedKV, which flash_attn cannot read.

Source: Attention Is All You Need, section 3.2 (arXiv 1706.03762); GQA (arXiv 2305.13245); PagedAttention, section 4.1
(arXiv 2309.06180).
"""

import importlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .quantised_kv import KV, QuantisedKV


@dataclass(frozen=True)
class AttentionMetadata:
    """Where each sequence's tokens lie, in this step and in the cache. N sequences, T tokens.

    Per sequence, as lists for the host: query_lens, the tokens of this step (the sequence's last ones); seq_lens, its
    tokens in all after the step. On the device: cu_seqlens_q and cu_seqlens_k [N + 1] int32, seq_lens_tensor [N] int32,
    block_table [N, blocks of the longest] int32 (shorter rows are filled up with 0, which nobody reads), and
    slot_mapping [T] int64, the place in the cache that each token's K and V go to (-1: nowhere).
    """

    query_lens: list[int]
    seq_lens: list[int]
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


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: KV, metadata: AttentionMetadata) -> None:
    """Store this step's k and v [T, num_kv_heads, head_dim]. kv: [2, num_blocks, block_size, num_kv_heads, head_dim].

    A token whose slot is -1 is stored nowhere. (On a GPU only the kernels know that, torch does not.)
    """
    slots = metadata.slot_mapping
    if slots.is_cpu and (slots < 0).any():  # on a GPU the question would make the CPU wait; see write_kv_triton
        k, v, slots = k[slots >= 0], v[slots >= 0], slots[slots >= 0]
    if isinstance(kv, QuantisedKV):
        return kv.write(k, v, slots)
    flat = kv.flatten(1, 2)  # [2, num_blocks * block_size, num_kv_heads, head_dim], a view
    flat[0].index_copy_(0, slots, k)
    flat[1].index_copy_(0, slots, v)


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
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, kv: KV, metadata: AttentionMetadata
) -> torch.Tensor:
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], kv the layer's cache -> as q.

    k and v are None where they lie in the cache already: a fused kernel has put them there.
    """
    if k is not None:
        write_kv(k, v, kv, metadata)
    outs = []
    queries = q.split(metadata.query_lens)
    for q_one, table, seq_len in zip(queries, metadata.block_table, metadata.seq_lens, strict=True):
        blocks = table[: -(-seq_len // kv.shape[2])]
        found = kv.read(blocks, q.dtype) if isinstance(kv, QuantisedKV) else kv[:, blocks]
        k_one, v_one = found.flatten(1, 2)[:, :seq_len]  # [seq_len, num_kv_heads, head_dim] each: written slots
        outs.append(attend_one(q_one, k_one, v_one))
    return torch.cat(outs)


def attend_flash(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, kv: KV, metadata: AttentionMetadata
) -> torch.Tensor:
    """As attend_torch, all sequences in one kernel, which finds each one's K and V through the block table."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    if k is not None:
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


def attend_triton(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, kv: KV, metadata: AttentionMetadata
) -> torch.Tensor:
    """As attend_torch, with kernels of our own. Triton is imported here, so that nobody else needs it."""
    from . import paged_attention

    return paged_attention.attend_triton(q, k, v, kv, metadata)


BACKENDS = {"torch": attend_torch, "flash_attn": attend_flash, "triton": attend_triton}


def package_obstacle(module: str, name: str) -> str | None:
    """Why a package cannot be used, or None when it can. One that was built for another torch is there, and fails."""
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return f"the package {name} is not installed"
        return f"the package {name} cannot be imported ({type(error).__name__}: {error})"
    return None


def flash_attn_obstacle(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, kv_dtype: torch.dtype | None = None
) -> str | None:
    """Why flash-attn cannot be used here, or None when it can. kv_dtype: of a quantised cache."""
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
    if block_size % 256:
        return f"flash_attn needs a block_size that is a multiple of 256, not {block_size}"
    if kv_dtype is not None:
        return "flash_attn reads K and V in 16 bits only, and kv_cache_dtype makes them 8"
    return None


def triton_obstacle(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, kv_dtype: torch.dtype | None = None
) -> str | None:
    """Why our Triton kernels cannot be used here, or None when they can. kv_dtype: of a quantised cache."""
    if device.type != "cuda":
        return "triton needs a GPU"
    if obstacle := package_obstacle("triton", "triton"):
        return obstacle
    if torch.version.hip:
        return "our Triton kernels are written for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "triton needs a GPU of compute capability 8.0 or more"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"triton needs float16, bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
    if not (8 if kv_dtype is None else 16) < head_dim <= 256:  # tiles of at least 16 numbers; of bytes, two halves
        return f"triton needs a head_dim from {9 if kv_dtype is None else 17} to 256, not {head_dim}"
    if block_size < 16:
        return f"triton needs a block_size of at least 16, not {block_size}"
    if kv_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
        return "triton needs a GPU of compute capability 8.9 or more for kv_cache_dtype='fp8'; 'int8' needs less"
    return None


OBSTACLES = {"triton": triton_obstacle, "flash_attn": flash_attn_obstacle}  # the fastest first; in a graph that is ours


def choose_block_size(
    requested: int | None,
    backend: str | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Tokens per block: 256 where flash-attn is asked for or will be chosen, as it takes no less; else 16."""
    no_triton = triton_obstacle(device, dtype, head_dim, 16, kv_dtype) is not None
    will_be_flash = no_triton and not flash_attn_obstacle(device, dtype, head_dim, 256, kv_dtype)
    return requested or (256 if backend == "flash_attn" or (backend is None and will_be_flash) else 16)


def choose_backend(
    requested: str | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
) -> tuple[str, str]:
    """The backend to use and the reason. Raises ValueError when the requested one cannot run here."""
    obstacles = {name: find(device, dtype, head_dim, block_size, kv_dtype) for name, find in OBSTACLES.items()}
    if obstacles.get(requested):
        raise ValueError(f"attention_backend={requested!r}: {obstacles[requested]}; leave it out, or say 'torch'")
    if requested:
        return requested, "asked for"
    for name, obstacle in obstacles.items():
        if obstacle is None:
            return name, "fastest here"
    return "torch", obstacles["triton"]
