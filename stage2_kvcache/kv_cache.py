"""KV cache: the keys and values of every token so far, so that each is computed once.

A token's key and value depend only on that token and those before it, and those never change. Its query is needed
once, in the step that computes it. So K and V are kept, Q is not, and a step only has to compute the new token:

    data   [num_layers, 2 (K, V), max_len, num_kv_heads, head_dim]     max_len is reserved before the first token

             position  0   1   2   3   4   5   6   7  ...  max_len - 1
    layer 0  K         #   #   #   #   #   .   .   .  ...  .             #  written: attention reads these
             V         #   #   #   #   #   .   .   .  ...  .             .  reserved, never read (holds anything)
    layer 1  ...

Each layer has its own K and V, as the input of a layer is the output of the one below. One sequence owns the cache at
a time; another one that comes takes it over, and the first would have to compute its tokens again.

What it costs: 2 * num_layers * num_kv_heads * head_dim * bytes of a number, for each token.
"""

import torch

from .config import ModelConfig
from .sequence import Sequence


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V that one token keeps, over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


class KVCache:
    """K and V of one sequence of up to `max_len` tokens."""

    def __init__(self, config: ModelConfig, max_len: int, device: torch.device):
        layers, kv_heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.max_len = max_len
        self.bytes_per_token = kv_bytes_per_token(layers, kv_heads, head_dim, config.dtype)
        self.owner: Sequence | None = None
        try:
            self.data = torch.empty(layers, 2, max_len, kv_heads, head_dim, dtype=config.dtype, device=device)
        except RuntimeError as error:  # out of memory, on either device
            need = f"{max_len} tokens x {self.bytes_per_token} bytes = {max_len * self.bytes_per_token / 2**30:.2f} GiB"
            raise ValueError(f"no room for the KV cache ({need}); lower max_model_len") from error

    def claim(self, seq: Sequence) -> None:
        """Give the cache to `seq`. Whoever had it before has nothing computed any more."""
        if self.owner is seq:
            return
        if self.owner is not None:
            self.owner.num_computed_tokens = 0
        self.owner = seq
        seq.num_computed_tokens = 0
