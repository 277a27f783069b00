"""KV cache: the keys and values of every token so far, in one pool of blocks, and a second pool in host memory.

    data   [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]

    block    0    1    2    3    4    5    6  ...      The tokens of a sequence lie where its block table says.
             B0   A1   .    A0   C0   .    B1          slot of position p: table[p // block_size] * block_size
    A: table [3, 1]   B: table [0, 6]   C: table [4]                       + p % block_size

One table serves all layers, because every layer holds the same tokens: block 3 is A's first block in each of them.
On the host a block is one piece with all its layers: [num_swap_blocks, num_layers, 2, block_size, num_kv_heads,
head_dim].

What a token costs: 2 * num_layers * num_kv_heads * head_dim * bytes of a number.

With kv_cache_dtype="int8" or "fp8" a block is bytes: numbers and scales of K and V together (quantised_kv.py). `data`
is [num_layers, 1, num_blocks, bytes], `host` [num_swap_blocks, num_layers, 1, bytes]; a token costs 2 * num_layers *
num_kv_heads * (head_dim + 2). `layers` is what attention is given: a tensor, or a QuantisedKV, of each layer.
"""

import psutil
import torch

from .block_manager import BlockMoves
from .config import EngineConfig, ModelConfig, Resolved
from .quantised_kv import KV, LARGEST, QuantisedKV, head_bytes

DEFAULT_HOST_BYTES = 4 * 2**30  # of a pool in host memory: that for swapping, and on a CPU the cache itself


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V that one token keeps, over all layers; if dtype is of one byte, with their scales."""
    return 2 * num_layers * num_kv_heads * head_bytes(head_dim, dtype)


def block_bytes(config: ModelConfig, block_size: int, kv_dtype: torch.dtype | None = None) -> int:
    """Bytes of one block, over all layers. kv_dtype: of a quantised cache."""
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    return block_size * kv_bytes_per_token(layers, kv_heads, config.head_dim, kv_dtype or config.dtype)


class KVCache:
    """K and V of `num_blocks` blocks of `block_size` tokens each, and of `num_swap_blocks` more on the host.

    kv_dtype: None for the model's own, or int8 or float8_e4m3fn, to be quantised.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        num_swap_blocks: int = 0,
        kv_dtype: torch.dtype | None = None,
    ):
        layers, kv_heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.block_size = block_size
        self.bytes_per_token = kv_bytes_per_token(layers, kv_heads, head_dim, kv_dtype or config.dtype)
        sides, block, dtype = 2, (block_size, kv_heads, head_dim), config.dtype
        if kv_dtype in LARGEST:
            sides, block, dtype = 1, (block_size * self.bytes_per_token // layers,), torch.uint8
        self.data = torch.empty((layers, sides, num_blocks, *block), dtype=dtype, device=device)
        # Pinned memory stays where it is, so that the GPU can copy from and to it while the CPU does other things.
        is_cuda = device.type == "cuda"
        pin_memory = is_cuda and num_swap_blocks > 0
        self.host = torch.empty((num_swap_blocks, layers, sides, *block), dtype=dtype, pin_memory=pin_memory)
        self._swap_stream = torch.cuda.Stream(device) if is_cuda and num_swap_blocks else None
        self.layers: list[KV] = list(self.data)
        if kv_dtype in LARGEST:
            shape = block_size, kv_heads, head_dim, kv_dtype
            self.layers = [QuantisedKV.view(layer[0], *shape) for layer in self.data]

    def move(self, moves: BlockMoves) -> None:
        """Carry out what the block manager has decided. Whatever comes after it on the device sees the result."""
        if moves.swap_out or moves.swap_in:
            self._swap_on_stream(moves)
        if moves.copies:
            sources, targets = torch.tensor(moves.copies, device=self.data.device).unbind(-1)
            self.data.index_copy_(2, targets, self.data.index_select(2, sources))

    def _swap_on_stream(self, moves: BlockMoves) -> None:
        """On a stream of its own, after the steps so far and before the next one: the CPU need not wait for it."""
        if self._swap_stream is None:
            return self._swap(moves)
        compute = torch.cuda.current_stream(self.data.device)
        self._swap_stream.wait_stream(compute)
        with torch.cuda.stream(self._swap_stream):
            self._swap(moves)
        compute.wait_stream(self._swap_stream)

    def _swap(self, moves: BlockMoves) -> None:
        for block, place in moves.swap_out:
            self.host[place].copy_(self.data[:, :, block], non_blocking=True)
        for place, block in moves.swap_in:
            self.data[:, :, block].copy_(self.host[place], non_blocking=True)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()  # what torch keeps for later is free too, and no part of what a step needs
    return torch.cuda.mem_get_info(device)[0]


def kv_room(total: int, free: int, own: int, peak: int, utilization: float) -> int:
    """Bytes that the pool may take: a share of the device less what this process uses itself, but no more than is free.

    total: the device's memory; free: what nobody uses now; own: what this process has allocated (the weights); peak:
    what one step needs beside them. What other processes use lowers `free` alone: it is not charged to this one. One
    per cent of the device stays free in any case, for memory that is there but in pieces too small.
    """
    return min(int(total * utilization) - own, free - total // 100) - peak


def plan_blocks(config: EngineConfig, model: ModelConfig, resolved: Resolved, room: int, wanted_tokens: int) -> int:
    """How many blocks to make: num_kv_blocks, or what `room` bytes hold; on a CPU what wanted_tokens need, up to 4 GiB.

    Raises ValueError, with both numbers, if they do not fit, or hold less than one sequence of max_model_len.
    """
    size = block_bytes(model, resolved.block_size, resolved.kv_dtype)
    fits = room // size
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks > fits:
            raise ValueError(_too_many(config.num_kv_blocks, size, room))
        return config.num_kv_blocks
    least = -(-resolved.max_model_len // resolved.block_size)
    if fits < least:
        raise ValueError(_too_few(config, resolved, least, size, room))
    if resolved.device.type == "cpu":
        fits = min(fits, max(least, min(-(-wanted_tokens // resolved.block_size), DEFAULT_HOST_BYTES // size)))
    return fits


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _too_many(num_blocks: int, size: int, room: int) -> str:
    return (
        f"num_kv_blocks={num_blocks} blocks of {size / 2**20:.2f} MiB need {_gib(num_blocks * size)}, but there is "
        f"room for {_gib(max(room, 0))}, {max(room // size, 0)} blocks; lower num_kv_blocks or block_size"
    )


def _too_few(config: EngineConfig, resolved: Resolved, least: int, size: int, room: int) -> str:
    is_cpu = resolved.device.type == "cpu"
    share = "half of what is free" if is_cpu else f"gpu_memory_utilization={config.gpu_memory_utilization}"
    room = max(room, 0)
    return (
        f"there is room for {room // size} KV blocks of {size / 2**20:.2f} MiB ({_gib(room)}, {share}), but one "
        f"sequence of max_model_len={resolved.max_model_len} needs {least}; lower max_model_len or give more memory, "
        "such as that of another engine in this process: close() it"
    )


def plan_swap_blocks(config: EngineConfig, model: ModelConfig, resolved: Resolved, num_blocks: int) -> int:
    """Blocks in host memory: num_swap_blocks, or 4 GiB of them but no more than on the device. 0 if nothing swaps."""
    if config.preemption_mode != "swap":
        return 0
    size = block_bytes(model, resolved.block_size, resolved.kv_dtype)
    free = int(0.5 * psutil.virtual_memory().available) // size
    if config.num_swap_blocks is not None and config.num_swap_blocks > free:
        raise ValueError(
            f"num_swap_blocks={config.num_swap_blocks} blocks of {size / 2**20:.2f} MiB need more than half of the "
            f"host's free memory, which holds {free}; lower it"
        )
    return (
        min(DEFAULT_HOST_BYTES // size, num_blocks, free) if config.num_swap_blocks is None else config.num_swap_blocks
    )
