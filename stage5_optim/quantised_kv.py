"""Quantised KV: a byte for each number of K and V, and a scale for each token and head, beside them in the block.

    scale  = max |x| over the head / largest number that the byte can hold      fp16; 127 for int8, 448 for fp8
    number = x / scale, rounded                                                 x is about number * scale

int8 rounds to the next of 255 even steps: no number is off by more than half a step, max |x| / 254. fp8 (e4m3: 4 bits
of exponent, 3 of mantissa) is off by 1/16 of the number itself, and keeps small ones apart where one channel is large.
Numbers are divided by the scale as it is stored, after its own rounding. What would be too large is cut off, so a byte
is never infinite; zeros stay zeros.

A block is one piece of bytes, so whoever copies, swaps or shares a block moves its scales too, and cannot forget them:

    K [block_size, kv_heads, head_dim] | V, likewise | scales [kv_heads, block_size, 2 (K, V)]
    16 tokens, 8 heads of 128:  16,384 bytes | 16,384 bytes | 512 bytes     260 bytes for a token and head, not 512

The scales come last because the numbers then begin where 16 bytes can be loaded at once; a row of 128 numbers and
their scale would be 130 bytes long. A head's scales lie side by side, and those of K and V of a token are one load.

Nobody makes an unquantised copy of the cache. As a scale belongs to a whole row of K, it can wait until the row's
product is known: q . k = scale * (q . numbers); and V's goes into the weights. paged_attention.py does just that, and
torch widens what one sequence has in it. Source of the idea: KIVI (arXiv 2402.02750), which groups more cleverly.
"""

from dataclasses import dataclass

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE = torch.float16
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0  # of fp16: no scale is 0, so a token of zeros needs no special case


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the K (or V) of one token and head, its scale included where there is one."""
    return head_dim * dtype.itemsize + (SCALE.itemsize if dtype in LARGEST else 0)


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim] -> numbers, as x but of dtype, and scales [...]. The kernels do the same, to the bit."""
    wide, largest = x.to(torch.promote_types(x.dtype, torch.float32)), LARGEST[dtype]
    scales = (wide.abs().amax(-1) * (1 / largest)).clamp(SMALLEST_SCALE, LARGEST_SCALE).to(SCALE)
    scaled = (wide * (1 / scales.to(wide.dtype))[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def dequantise(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """numbers [..., head_dim], scales [...] -> numbers * scales in dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return (numbers.to(wide) * scales.to(wide)[..., None]).to(dtype)


@dataclass(frozen=True)
class QuantisedKV:
    """One layer's quantised cache: views of the same bytes. It stands where an unquantised cache is one tensor.

    numbers: [2 (K, V), num_blocks, block_size, kv_heads, head_dim]; scales: [2, num_blocks, block_size, kv_heads];
    pairs: both scales of a token and head as one int32, K's in the low half, [num_blocks, kv_heads, block_size].
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    pairs: torch.Tensor

    @classmethod
    def view(cls, blocks: torch.Tensor, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> "QuantisedKV":
        """blocks [num_blocks, bytes of a block], uint8."""
        count, size, side = *blocks.shape, block_size * heads * dim  # side: bytes of the K of a block, and of its V

        def view(dtype: torch.dtype, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
            typed = blocks.view(dtype)
            return typed.as_strided(shape, strides, typed.storage_offset() + start // dtype.itemsize)

        numbers = view(dtype, 0, (2, count, block_size, heads, dim), (side, size, heads * dim, dim, 1))
        scales = view(SCALE, 2 * side, (2, count, block_size, heads), (1, size // 2, 2, 2 * block_size))
        pairs = view(torch.int32, 2 * side, (count, heads, block_size), (size // 4, block_size, 1))
        return cls(numbers, scales, pairs)

    @property
    def shape(self) -> torch.Size:
        """As of the unquantised cache: [2, num_blocks, block_size, kv_heads, head_dim]."""
        return self.numbers.shape

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] in their slots, none of which is -1."""
        blocks, offsets = slots // self.shape[2], slots % self.shape[2]
        numbers, scales = quantise(torch.stack((k, v)), self.numbers.dtype)
        self.numbers.view(torch.uint8)[:, blocks, offsets] = numbers.view(torch.uint8)  # fp8 has few operators
        self.scales[:, blocks, offsets] = scales

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """K and V of these blocks in dtype: [2, len(blocks), block_size, kv_heads, head_dim]."""
        numbers = self.numbers.view(torch.uint8)[:, blocks].view(self.numbers.dtype)
        return dequantise(numbers, self.scales[:, blocks], dtype)


KV = torch.Tensor | QuantisedKV  # one layer's cache


def parts(kv: KV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What a kernel takes: K, V, and the pairs of scales if it is quantised."""
    return (*kv.numbers.unbind(0), kv.pairs) if isinstance(kv, QuantisedKV) else (*kv.unbind(0), None)
