"""KV cache: the keys and values of every token so far, in one contiguous slot per running sequence.

    data   [num_layers, 2 (K, V), num_slots, slot_len, num_kv_heads, head_dim]

             position  0   1   2   3   4   5  ...  slot_len - 1
    slot 0  A          #   #   #   #   .   .  ...  .             #  written: attention reads these
    slot 1  B          #   #   .   .   .   .  ...  .             .  reserved for this sequence alone
    slot 2  free                                                 position p of slot s lies at s * slot_len + p

Each running sequence gets a slot for the longest text that it could become, because nobody knows how long it will be.
What it does not use, no one else can have: the trace says how much is reserved and how much is used.

What a token costs: 2 * num_layers * num_kv_heads * head_dim * bytes of a number.
"""

from collections import deque
from collections.abc import Iterable

import psutil
import torch

from .config import ModelConfig, Resolved


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V that one token keeps, over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


class SlotAllocator:
    """Hands out the numbers of free slots. First given back, first used again."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._taken: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def take(self) -> int:
        slot = self._free.popleft()
        self._taken[slot] = None
        return slot

    def give_back(self, slot: int) -> None:
        assert slot in self._taken, f"slot {slot} is given back twice"
        del self._taken[slot]
        self._free.append(slot)

    def recount(self, taken: Iterable[int]) -> None:
        """These are taken, and all others are free, whatever was under way when an error came."""
        self._taken = dict.fromkeys(taken)
        self._free = deque(slot for slot in range(self.num_slots) if slot not in self._taken)


class KVCache:
    """K and V of `num_slots` sequences of up to `slot_len` tokens each."""

    def __init__(self, config: ModelConfig, num_slots: int, slot_len: int, device: torch.device):
        layers, kv_heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.slot_len = slot_len
        self.bytes_per_token = kv_bytes_per_token(layers, kv_heads, head_dim, config.dtype)
        shape = (layers, 2, num_slots, slot_len, kv_heads, head_dim)
        self.data = torch.empty(shape, dtype=config.dtype, device=device)


def plan_slots(config: ModelConfig, requested: int | None, resolved: Resolved) -> tuple[int, int]:
    """How many slots to make, and how many tokens each holds. Raises ValueError if they do not fit."""
    slot_len = resolved.max_model_len
    if resolved.attention_backend == "flash_attn":
        slot_len = -(-slot_len // 256) * 256  # its kernel reads a slot as a block, and blocks are multiples of 256
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    slot_bytes = slot_len * kv_bytes_per_token(layers, kv_heads, config.head_dim, config.dtype)
    return resolve_num_slots(requested, slot_bytes, resolved.device), slot_len


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()  # what torch keeps for later is free too, and no part of what a step needs
    return torch.cuda.mem_get_info(device)[0]


def resolve_num_slots(requested: int | None, slot_bytes: int, device: torch.device) -> int:
    """How many slots to make. None: 8 on a CPU, else as many as 90 % of the free memory holds, at most 256.

    Raises ValueError with both numbers if they do not fit.
    """
    room = int(0.9 * free_memory(device))
    fits = room // slot_bytes
    wanted = requested or min(8 if device.type == "cpu" else 256, max(fits, 1))
    if wanted > fits:
        need, have = wanted * slot_bytes / 2**30, room / 2**30
        raise ValueError(
            f"{wanted} slots of {slot_bytes / 2**30:.2f} GiB need {need:.2f} GiB of KV cache, but {have:.2f} GiB are "
            "free; lower max_num_seqs or max_model_len"
        )
    return wanted
