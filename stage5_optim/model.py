"""The decoder: Llama, Qwen2 and Qwen3 from one definition, on flat tokens.

The model takes `input_ids [T]` and `positions [T]`: no batch dimension. Embedding, norms, linear layers and the MLP
treat every token alone, so they never need to know which sequence a token belongs to. Attention alone looks at other
tokens; it is handed in from attention.py as a function, and each layer hands it its own part of the KV cache.

    input_ids [T] -> embed -> [T, hidden]
    each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    norm -> hidden [T, hidden] -> (of the tokens that are sampled from) lm_head -> logits [N, vocab]

Module names are those of the Hugging Face checkpoint, so that loading is a walk over names.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .attention import AttentionMetadata
from .config import ModelConfig
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
    def __init__(self, size: int, config: ModelConfig):
        super().__init__()
        self.weight = _weight(size, dtype=config.dtype)
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Squares overflow and lose digits in 16 bits: widen to fp32 at least (float64 stays as it is).
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i and i + head_dim/2 of each head together. x [T, heads, head_dim], cos_sin [T, 2, head_dim/2]."""
    cos, sin = cos_sin[:, None].unbind(2)  # [T, 1, head_dim/2] each
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, attend):
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, config.qkv_bias, config.dtype)
        self.k_proj = Linear(config.hidden_size, kv_size, config.qkv_bias, config.dtype)
        self.v_proj = Linear(config.hidden_size, kv_size, config.qkv_bias, config.dtype)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias, config.dtype)
        self.q_norm = RMSNorm(config.head_dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config) if config.qk_norm else nn.Identity()
        self.attend = attend

    def forward(
        self, x: torch.Tensor, cos_sin: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, num_heads, head_dim]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, num_kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, num_kv_heads, head_dim]
        q = apply_rope(self.q_norm(q), cos_sin)
        k = apply_rope(self.k_norm(k), cos_sin)
        out = self.attend(q, k, v, kv, metadata)  # [T, num_heads, head_dim]
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, config.mlp_bias, config.dtype)
        self.up_proj = Linear(hidden, inner, config.mlp_bias, config.dtype)
        self.down_proj = Linear(inner, hidden, config.mlp_bias, config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, attend):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.self_attn = Attention(config, attend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, cos_sin: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, kv, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, attend, max_model_len: int):
        super().__init__()
        self.embed_tokens = Embedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, attend) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config)
        table = rope_table(config.rope, config.head_dim, max_model_len)
        self.register_buffer("cos_sin", table.to(config.dtype), persistent=False)  # [max_model_len, 2, head_dim/2]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)  # [T, hidden]
        cos_sin = self.cos_sin[positions]  # [T, 2, head_dim/2]
        for layer, kv in zip(self.layers, kv_cache, strict=True):
            x = layer(x, cos_sin, kv, metadata)  # kv [2, num_blocks, block_size, num_kv_heads, head_dim]
        return self.norm(x)


class CausalLM(nn.Module):
    """Decoder plus language model head.

    `attend` is one of the functions of attention.py; `config.dtype` is the dtype of the weights. The weights are
    uninitialised until checkpoint.py has filled them.
    """

    def __init__(self, config: ModelConfig, attend, max_model_len: int):
        super().__init__()
        self.model = Decoder(config, attend, max_model_len)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, config.dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """input_ids [T], positions [T] (int64), kv_cache as in kv_cache.py -> hidden states [T, hidden]."""
        return self.model(input_ids, positions, kv_cache, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] of the tokens to sample from -> logits [N, vocab]."""
        return self.lm_head(hidden)
