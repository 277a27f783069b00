"""The inner loop of paged attention over a quantised cache: attend_range of paged_attention.py, on bytes.

A byte becomes a 16-bit number in registers, exactly, because that is what tensor cores multiply. The scales of K then
multiply the scores, those of V the weights; both come in one load of 4 bytes per position. Nothing goes back to memory.

Bytes by themselves would be slow: a warp fetches the transposed tile of V from shared memory in words of 16 bits, byte
by byte it takes eight times as many loads. So a tile is one of words, channels 2c and 2c + 1 together, and either half
of the words is a tile of half the channels:

    scores = q_low @ K_low.T + q_high @ K_high.T         low: channels 0, 2, 4 ...   high: 1, 3, 5 ...
    acc_low += weights @ V_low,  acc_high += weights @ V_high

The GPU has instructions that convert a byte, but they run at a fraction of the speed of others. Four bytes, of two
positions in one register of 32 bits, become bf16 by moving bits:

    int8  s xxxxxxx  ->  (128 + x) - (s ? 256 : 128)      bf16 with exponent 0x43 counts in ones from 128 to 255
    fp8   s eeee mmm ->  s 0000eeee mmm0000 * 2^120       the exponents' biases are 127 and 7; also of subnormal numbers

Needs the package triton. In the interpreter, and for dtypes other than bf16, conversions are Triton's own.
"""

import triton
import triton.language as tl

from .kv_kernels import load_scales

INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 bits, sign, high, one;
    mov.b32 one, 0x3F803F80;
    lop3.b32 bits, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign, $2, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $0, bits, one, sign;
    shr.u32 high, $2, 8;
    lop3.b32 bits, high, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign, high, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $1, bits, one, sign;
}""")  # lop3 with 0xEA: (a & b) | c
FP8_TO_BF16 = tl.constexpr("""{
    .reg .b32 bits, sign, factor, zero;
    mov.b32 factor, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    shl.b32 bits, $2, 4;
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 bits, bits, 0x07F007F0, sign, 0xEA;
    fma.rn.bf16x2 $0, bits, factor, zero;
    shr.u32 bits, $2, 4;
    and.b32 sign, $2, 0x80008000;
    lop3.b32 bits, bits, 0x07F007F0, sign, 0xEA;
    fma.rn.bf16x2 $1, bits, factor, zero;
}""")  # zero is -0: a sign is kept


@triton.jit
def widen(words, cache, q):
    """The low and the high bytes of words, as numbers of q's dtype. cache: a pointer to the numbers."""
    if q.dtype == tl.bfloat16:
        assembly: tl.constexpr = INT8_TO_BF16 if cache.dtype.element_ty == tl.int8 else FP8_TO_BF16
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(assembly, "=r,=r,r", [words], dtype=types, is_pure=True, pack=2)
    else:
        low, high = words.to(tl.int8), (words >> 8).to(tl.int8)
        low, high = low.to(cache.dtype.element_ty, bitcast=True), high.to(cache.dtype.element_ty, bitcast=True)
        return low.to(q.dtype), high.to(q.dtype)


@triton.jit
def halves(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, DIM] -> its even and its odd channels."""
    return tl.split(tl.reshape(x, [ROWS, DIM // 2, 2]))


@triton.jit
def attend_bytes(
    acc, row_max, row_sum, q, query_pos, scale, start, end, seq_len, table_row, blocks, k_head, v_head, scales,
    MASKED: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As attend_range. scales: of this head, in block 0. Weights and their sum are 2^6 times as large as there: times
    V's scale they would be smaller than fp16 likes."""
    KV_HEADS: tl.constexpr = TOKEN_STRIDE // HEAD_DIM
    GAP: tl.constexpr = BLOCK_SIZE * KV_HEADS * (HEAD_DIM + 4) // 2
    acc_low, acc_high = halves(acc, BLOCK_M, DIM)
    q_low, q_high = halves(q, BLOCK_M, DIM)
    k_words, v_words = k_head.to(tl.pointer_type(tl.int16)), v_head.to(tl.pointer_type(tl.int16))
    columns = tl.arange(0, DIM // 2)
    for tile in range(start, end, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        rows = slots.to(tl.int64) * (TOKEN_STRIDE // 2) + blocks.to(tl.int64) * GAP
        k_scales, v_scales = load_scales(scales, blocks, positions, seq_len, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        ahead = positions + BLOCK_N  # the next tile's blocks
        blocks = tl.load(table_row + ahead // BLOCK_SIZE, mask=ahead < seq_len, other=0)
        exists = tl.full([BLOCK_N, DIM // 2], True, tl.int1)
        if MASKED:
            exists &= (positions < seq_len)[:, None]
        if HEAD_DIM < DIM:
            exists &= (columns < HEAD_DIM // 2)[None, :]
        offsets = rows[:, None] + columns[None, :]
        k_low, k_high = widen(tl.load(k_words + offsets, mask=exists, other=0), k_head, q)
        v_low, v_high = widen(tl.load(v_words + offsets, mask=exists, other=0), v_head, q)
        scores = tl.dot(q_low, k_low.T, input_precision="ieee")
        scores = tl.dot(q_high, k_high.T, scores, input_precision="ieee") * k_scales[None, :]
        if MASKED:
            scores = tl.where(positions[None, :] <= query_pos[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - (new_max - 6)[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        weights = (weights * v_scales[None, :]).to(q.dtype)
        acc_low = tl.dot(weights, v_low, acc_low * shrink[:, None], input_precision="ieee")
        acc_high = tl.dot(weights, v_high, acc_high * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return tl.reshape(tl.join(acc_low, acc_high), [BLOCK_M, DIM]), row_max, row_sum
