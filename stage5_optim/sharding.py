"""Sharding: which part of every weight matrix a rank keeps. Arithmetic only; parallel.py does the talking.

    column-parallel   q, k, v, gate, up        a rank has some of the outputs: whole heads, whole channels of the MLP
    row-parallel      o, down                  it has the inputs that it has made itself, and gets a part of every sum
    vocabulary        embedding, head          it has some of the tokens
    whole             norms                    they are small; every rank has them

    x -> [q k v of heads 0, 1] -> attention -> [o, columns of heads 0, 1] -> part 0 \
                                                                                     + -> all ranks have the sum
    x -> [q k v of heads 2, 3] -> attention -> [o, columns of heads 2, 3] -> part 1 /

Between a column-parallel and a row-parallel matrix nothing needs the other ranks: attention treats every head alone and
silu(gate) * up every channel. That is why two sums a layer are enough.

More ranks than KV heads: several ranks keep the same KV head. A vocabulary or an MLP that the number of ranks does not
divide is filled up with zeros: such channels add nothing to any sum, and such tokens are cut off before anybody sees
their logits. Source: Megatron-LM (arXiv 1909.08053), section 3.
"""

from dataclasses import dataclass, replace

import torch

from .config import ModelConfig, check_int

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_INPUT = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`. kv_copies: so many neighbours keep the same KV head."""

    rank: int = 0
    size: int = 1
    kv_copies: int = 1

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The shape of this rank's part. With one rank it is the whole."""
        return replace(
            whole,
            num_attention_heads=whole.num_attention_heads // self.size,
            num_key_value_heads=whole.num_key_value_heads * self.kv_copies // self.size,
            intermediate_size=-(-whole.intermediate_size // self.size),
            vocab_size=-(-whole.vocab_size // self.size),
        )

    def drop_biases(self, model: torch.nn.Module) -> None:
        """What is added to a sum of all ranks is added by the first alone."""
        for layer in model.model.layers if self.rank else []:
            layer.self_attn.o_proj.bias = layer.mlp.down_proj.bias = None

    def copy(self, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy this rank's part of the whole tensor `source`. Of a tensor in a mapped file only that part is read."""
        module, kind = name.split(".")[-2:]
        dim = 0 if module in BY_OUTPUT else 1 if module in BY_INPUT and kind == "weight" else None
        if dim is None or self.size == 1:
            target.copy_(source)
            return
        count = target.shape[dim]
        copies = self.kv_copies if module in ("k_proj", "v_proj") else 1
        start = min(self.rank // copies * count, source.shape[dim])
        found = min(count, source.shape[dim] - start)
        target.narrow(dim, 0, found).copy_(source.narrow(dim, start, found))
        target.narrow(dim, found, count - found).zero_()


def split(size: int, rank: int, config: ModelConfig, model: str) -> Shard:
    """The part of one of `size` ranks. Raises ValueError, with the numbers, where the heads cannot be shared out."""
    check_int("tensor_parallel_size", size, minimum=1)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    choices = [n for n in range(1, heads + 1) if not heads % n and (not kv_heads % n or not n % kv_heads)]
    if size not in choices:
        raise ValueError(
            f"tensor_parallel_size={size}: the {heads} attention heads and {kv_heads} KV heads of {model!r} cannot be "
            f"shared out evenly to {size} ranks; take one of {', '.join(map(str, choices))}"
        )
    return Shard(rank, size, max(1, size // kv_heads))
