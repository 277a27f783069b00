"""The decoder: Llama, Qwen2 and Qwen3 from one definition, on flat tokens.

The model takes `input_ids [T]` and `positions [T]`: no batch dimension. Embedding, norms, linear layers and the MLP
treat every token alone, so they never need to know which sequence a token belongs to. Attention alone looks at other
tokens; it is handed in from attention.py as a function, and each layer hands it its own part of the KV cache.

    input_ids [T] -> embed -> [T, hidden]
    each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    norm -> hidden [T, hidden] -> (of the tokens that are sampled from) lm_head -> logits [N, vocab]

Module names are those of the Hugging Face checkpoint, so that loading is a walk over names.
"""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from . import ops as torch_ops
from .attention import AttentionMetadata
from .config import ModelConfig
from .quantised_kv import KV
from .rope import rope_table


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.weight = _weight(out_features, in_features, dtype=dtype)
        self.bias = _weight(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = _weight(config.vocab_size, config.hidden_size, dtype=config.dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


class RMSNorm(nn.Module):
    """The weights of a norm. What is computed with them is in ops.py."""

    def __init__(self, size: int, config: ModelConfig):
        super().__init__()
        self.weight = _weight(size, dtype=config.dtype)
        self.eps = config.rms_norm_eps


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, attend, ops: ModuleType):
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, config.qkv_bias, config.dtype)
        self.k_proj = Linear(config.hidden_size, kv_size, config.qkv_bias, config.dtype)
        self.v_proj = Linear(config.hidden_size, kv_size, config.qkv_bias, config.dtype)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias, config.dtype)
        self.q_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None
        self.attend = attend
        self.ops = ops

    def pack(self) -> None:
        """One matrix for q, k and v: one product instead of three."""
        self.qkv_proj = pack([self.q_proj, self.k_proj, self.v_proj])
        del self.q_proj, self.k_proj, self.v_proj

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: KV,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x [T, hidden] -> x plus the attention over norm(x)."""
        qkv = self.ops.norm_linear(x, norm, self.qkv_proj)  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
        q, k, v = self.ops.rotate_qkv(qkv, positions, cos_sin, self.q_norm, self.k_norm, kv, metadata.slot_mapping)
        out = self.attend(q, k, v, kv, metadata)  # [T, num_heads, head_dim]
        return self.ops.linear_add(out.flatten(1), self.o_proj, x)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, ops: ModuleType):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, config.mlp_bias, config.dtype)
        self.up_proj = Linear(hidden, inner, config.mlp_bias, config.dtype)
        self.down_proj = Linear(inner, hidden, config.mlp_bias, config.dtype)
        self.ops = ops

    def pack(self) -> None:
        self.gate_up_proj = pack([self.gate_proj, self.up_proj])
        del self.gate_proj, self.up_proj

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x [T, hidden] -> x plus the MLP of norm(x)."""
        inner = self.ops.norm_gate_up(x, norm, self.gate_up_proj)  # [T, intermediate]
        return self.ops.linear_add(inner, self.down_proj, x)


def pack(linears: list[Linear]) -> Linear:
    """One Linear whose outputs are theirs, end to end. They must not be used any more."""
    out_features, in_features = sum(len(one.weight) for one in linears), linears[0].weight.shape[1]
    has_bias = linears[0].bias is not None
    with torch.device(linears[0].weight.device):
        packed = Linear(in_features, out_features, has_bias, linears[0].weight.dtype)
    torch.cat([one.weight for one in linears], out=packed.weight.data)
    if has_bias:
        torch.cat([one.bias for one in linears], out=packed.bias.data)
    return packed


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, attend, ops: ModuleType):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.self_attn = Attention(config, attend, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.mlp = MLP(config, ops)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: KV,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = self.self_attn(x, self.input_layernorm, positions, cos_sin, kv, metadata)
        return self.mlp(x, self.post_attention_layernorm)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, attend, max_model_len: int, ops: ModuleType):
        super().__init__()
        self.embed_tokens = Embedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, attend, ops) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config)
        table = rope_table(config.rope, config.head_dim, max_model_len)
        self.register_buffer("cos_sin", table.to(config.dtype), persistent=False)  # [max_model_len, 2, head_dim/2]
        self.ops = ops

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: list[KV],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = self.ops.embed(input_ids, self.embed_tokens)  # [T, hidden]
        for layer, kv in zip(self.layers, kv_cache, strict=True):
            x = layer(x, positions, self.cos_sin, kv, metadata)  # kv [2, num_blocks, block_size, kv_heads, head_dim]
        return self.ops.rms_norm(x, self.norm.weight, self.norm.eps)


class CausalLM(nn.Module):
    """Decoder plus language model head.

    `attend` is one of the functions of attention.py, `ops` is ops.py or, with the same functions in fewer launches,
    fused.py; `config.dtype` is the dtype of the weights. The weights are uninitialised until checkpoint.py has filled
    them; then `pack` must be called.
    """

    def __init__(self, config: ModelConfig, attend, max_model_len: int, ops: ModuleType = torch_ops):
        super().__init__()
        self.model = Decoder(config, attend, max_model_len, ops)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, config.dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.ops = ops

    def pack(self) -> None:
        """Checkpoints have three matrices for q, k, v and two for the MLP's input; the model runs with one of each."""
        for layer in self.model.layers:
            layer.self_attn.pack()
            layer.mlp.pack()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: list[KV],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """input_ids [T], positions [T] (int64), kv_cache the layers of kv_cache.py -> hidden states [T, hidden]."""
        return self.model(input_ids, positions, kv_cache, metadata)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [N, hidden] of the tokens to sample from -> logits [N, vocab], in `out` if that is given."""
        return self.ops.linear(hidden, self.lm_head, out)
