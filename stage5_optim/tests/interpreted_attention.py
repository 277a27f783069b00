"""Steps to try paged attention on, and their answers in float64. As a program: run named ones in Triton's interpreter.

    TRITON_INTERPRET=1 python -m PACKAGE.tests.interpreted_attention NAME ...     one line of JSON per step

Every step is built to punish: blocks lie in shuffled order, all memory that belongs to no token is NaN, table rows are
padded with a block of NaN, and q, k and v are slices of one tensor. A quantised cache is full of bytes of 255 instead,
NaN where they are scales, and its tokens are of very different sizes, zero among them. The interpreter must be chosen
before triton is imported, hence a process of its own; bf16 products are wrong there, so the steps are fp32 and fp16.
"""

import json
import sys
import traceback
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from .. import paged_attention
from ..quantised_kv import QuantisedKV, dequantise, head_bytes, quantise

SMALL = dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=2)  # tiles that end often
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Step:
    """One call. shapes: (query_len, seq_len) per sequence; (1, 0) is a padding row of a captured graph: slot -1."""

    shapes: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)  # query heads, KV heads
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    splits: int | None = None  # None: as many as the engine would take
    config: dict | None = None  # None: the engine's
    loudness: float = 1.0  # of q: large scores overflow where a maximum is forgotten
    table_width: int | None = None
    kv_dtype: torch.dtype | None = None  # of a quantised cache


DECODE = ((1, 15), (1, 16), (1, 17), (1, 1), (1, 100), (1, 47))
PROMPTS = ((15, 15), (16, 16), (17, 17), (2, 2), (40, 40))
CHUNKS = ((5, 40), (16, 48), (17, 33), (2, 64), (31, 95))
MIXED = ((1, 40), (9, 9), (1, 1), (20, 70), (1, 17), (3, 18))
SHAPES = {"decode": DECODE, "prompts": PROMPTS, "chunks": CHUNKS, "mixed": MIXED}
FAR_APART = ((1, 300), (1, 1), (1, 16), (1, 33), (1, 150))

STEPS = {name: Step(shapes) for name, shapes in SHAPES.items()}
STEPS |= {f"{name}, small tiles": Step(shapes, config=SMALL) for name, shapes in SHAPES.items()}
STEPS |= {f"{name}, blocks of 24": Step(shapes, block_size=24, config=SMALL) for name, shapes in SHAPES.items()}
STEPS |= {"mixed, blocks of 32": Step(MIXED, block_size=32), "decode, blocks of 32": Step(DECODE, block_size=32)}
STEPS |= {"mixed, fp16": Step(MIXED, dtype=torch.float16), "chunks, fp16": Step(CHUNKS, dtype=torch.float16)}
for heads in ((2, 2), (9, 3), (8, 2), (16, 2), (20, 1)):
    config = SMALL | dict(BLOCK_M=32 if heads[0] > 16 * heads[1] else 16)
    STEPS[f"mixed, {heads[0]} heads on {heads[1]}"] = Step(MIXED, heads, config=config)
    STEPS[f"splits, {heads[0]} heads on {heads[1]}"] = Step(DECODE, heads, config=config, splits=3)
for head_dim in (64, 80, 128):
    STEPS[f"mixed, head_dim {head_dim}"] = Step(MIXED[:4], head_dim=head_dim)
    STEPS[f"splits, head_dim {head_dim}"] = Step(DECODE[1:5], head_dim=head_dim, config=SMALL, splits=2)
for splits in (1, 2, 5, 20):
    STEPS[f"{splits} splits, lengths far apart"] = Step(FAR_APART, config=SMALL, splits=splits)
STEPS["splits in a mixed step"] = Step(MIXED, config=SMALL, splits=3)
STEPS["splits, large scores"] = Step(FAR_APART, config=SMALL, splits=4, loudness=150.0)
STEPS["chunks, large scores"] = Step(CHUNKS, config=SMALL, loudness=150.0)
STEPS["padding rows"] = Step(((1, 20), (1, 0), (1, 35), (1, 0)), config=SMALL)
STEPS["padding rows, splits"] = Step(((1, 20), (1, 0), (1, 35), (1, 0)), config=SMALL, splits=2)
STEPS["only padding"] = Step(((1, 0), (1, 0)), config=SMALL, splits=2)
STEPS["decode, every length"] = Step(tuple((1, length) for length in range(1, 36)), config=SMALL)
STEPS["chunks, every context"] = Step(tuple((18, 18 + context) for context in range(17)), config=SMALL)
STEPS["one token alone"] = Step(((1, 1),), config=SMALL)
for name, kv_dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
    STEPS |= {f"{kind}, {name}": Step(shapes, config=SMALL, kv_dtype=kv_dtype) for kind, shapes in SHAPES.items()}
    STEPS[f"decode, {name}, engine's tiles"] = Step(DECODE, kv_dtype=kv_dtype)
    STEPS[f"mixed, {name}, engine's tiles"] = Step(MIXED, (9, 3), 64, kv_dtype=kv_dtype)
    STEPS[f"mixed, {name}, fp16"] = Step(MIXED, dtype=torch.float16, config=SMALL, kv_dtype=kv_dtype)
    STEPS[f"mixed, {name}, blocks of 24"] = Step(MIXED, block_size=24, config=SMALL, kv_dtype=kv_dtype)
    STEPS[f"mixed, {name}, head_dim 80"] = Step(MIXED[:4], head_dim=80, config=SMALL, kv_dtype=kv_dtype)
    STEPS[f"splits, {name}"] = Step(FAR_APART, config=SMALL, splits=4, kv_dtype=kv_dtype)
    STEPS[f"splits, {name}, fp16"] = Step(FAR_APART, dtype=torch.float16, config=SMALL, splits=4, kv_dtype=kv_dtype)
    STEPS[f"padding rows, {name}"] = Step(((1, 20), (1, 0), (1, 35)), config=SMALL, splits=2, kv_dtype=kv_dtype)
SIZES = torch.tensor([[0.02, 1.0, 0.0, 2.0], [4.0, 300.0, 0.02, 0.0]])  # of K and V, token by token, if quantised
STEPS["150 short prompts"] = Step(((2, 2),) * 150, heads=(1, 1), config=SMALL | dict(BLOCK_M=128))


def build(step: Step, device: str = "cpu", seed: int = 0) -> SimpleNamespace:
    """q, k, v, kv, metadata of a step, and what must come of it: out in float64, kv_after."""
    generator = torch.Generator(device).manual_seed(seed)
    (num_heads, kv_heads), dim, size = step.heads, step.head_dim, step.block_size
    query_lens, seq_lens = [q for q, _ in step.shapes], [s for _, s in step.shapes]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(step.dtype)

    def tensor(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    fused = random(sum(query_lens), num_heads + 2 * kv_heads, dim)
    fused[:, :num_heads] *= step.loudness
    q, k, v = fused.split([num_heads, kv_heads, kv_heads], dim=1)
    need = [-(-seq_len // size) for seq_len in seq_lens]
    if step.kv_dtype:
        k *= SIZES[0].to(k)[torch.arange(len(k)) % 4][:, None, None]
        v *= SIZES[1].to(v)[torch.arange(len(v)) % 4][:, None, None]
    spare, *free = torch.randperm(sum(need) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    kv = new_cache(step, sum(need) + 3, device)
    tables, slot_mapping, outs, begin = [], [], [], 0
    for query_len, seq_len, blocks in zip(query_lens, seq_lens, need, strict=True):
        table = [free.pop() for _ in range(blocks)]
        tables.append(table + [spare] * ((step.table_width or max(need) + 1) - blocks))
        slots = [table[position // size] * size + position % size for position in range(seq_len)]
        context, new = random(2, seq_len, kv_heads, dim), slice(begin, begin + query_len)
        if step.kv_dtype:
            context *= SIZES.to(context)[:, torch.arange(seq_len) % 4][..., None, None]
        if seq_len:
            context[:, seq_len - query_len :] = torch.stack((k[new], v[new]))
            store(kv, context[:, :-query_len], tensor(slots[:-query_len], torch.int64))
        slot_mapping += slots[-query_len:] or [-1] * query_len
        stored = dequantise(*quantise(context, step.kv_dtype), torch.float64) if step.kv_dtype else context
        outs.append(attention(q[new], *stored))
        begin += query_len
    lens = tensor([0, *accumulate(query_lens)]), tensor(seq_lens)
    names = ("query_lens", "seq_lens", "cu_seqlens_q", "seq_lens_tensor", "block_table", "slot_mapping")
    values = (query_lens, seq_lens, *lens, tensor(tables), tensor(slot_mapping, torch.int64))
    kv_after = new_cache(step, sum(need) + 3, device, bits_of(kv))
    kept = [token for token, slot in enumerate(slot_mapping) if slot >= 0]
    store(kv_after, torch.stack((k, v))[:, kept], tensor([slot_mapping[token] for token in kept], torch.int64))
    metadata = SimpleNamespace(**dict(zip(names, values, strict=True)))
    return SimpleNamespace(q=q, k=k, v=v, kv=kv, metadata=metadata, out=torch.cat(outs), kv_after=kv_after)


def new_cache(
    step: Step, num_blocks: int, device: str, content: torch.Tensor | None = None
) -> torch.Tensor | QuantisedKV:
    """One layer's: of nothing but NaN, or a copy of the bits of another."""
    shape = step.block_size, step.heads[1], step.head_dim
    if step.kv_dtype is None:
        kv = torch.full((2, num_blocks, *shape), float("nan"), dtype=step.dtype, device=device)
        return kv if content is None else content.clone()
    size = 2 * shape[0] * shape[1] * head_bytes(shape[2], step.kv_dtype)
    pool = torch.full((num_blocks, size), 255, dtype=torch.uint8, device=device)
    return QuantisedKV.view(pool if content is None else content.clone().view_as(pool), *shape, step.kv_dtype)


def bits_of(kv: torch.Tensor | QuantisedKV) -> torch.Tensor:
    """All of the cache; of a quantised one the bytes."""
    if isinstance(kv, torch.Tensor):
        return kv
    return torch.empty(0, dtype=torch.uint8, device=kv.pairs.device).set_(kv.numbers.untyped_storage())


def store(kv: torch.Tensor | QuantisedKV, tokens: torch.Tensor, slots: torch.Tensor) -> None:
    """tokens: their K and V, [2, T, kv_heads, head_dim]."""
    if isinstance(kv, QuantisedKV):
        kv.write(*tokens, slots)
    else:
        kv.flatten(1, 2)[:, slots] = tokens


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: q [query_len, num_heads, head_dim] are the last of the tokens of k and v."""
    if not len(k):
        return torch.zeros_like(q, dtype=torch.float64)
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Token by token, so that none hides behind the others: |out - expected| over |expected|."""
    error = (out.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp_min(1e-30)
    bad = (~(error <= tolerance)).nonzero().flatten().tolist()  # NaN is not <= anything
    assert not bad, f"tokens {bad[:20]} are wrong ({len(bad)} of {len(out)}); worst error {error.max():.1e}"


def assert_same_bits(kv: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN equals NaN here: what nobody should touch must be as it was."""
    if kv.dtype == torch.uint8:
        assert kv.equal(expected), f"{(kv != expected).sum()} bytes of the cache differ"
        return
    bits = torch.int32 if kv.element_size() == 4 else torch.int16
    places = (kv.view(bits) != expected.view(bits)).flatten(3).any(-1).nonzero().tolist()
    assert not places, f"the cache differs at (K or V, block, offset) {places[:10]}"


def check(step: Step, device: str = "cpu", seed: int = 0) -> None:
    """Run a step: the cache holds the new tokens and nothing else has changed, and the result is that of float64."""
    s = build(step, device, seed)
    splits = paged_attention.choose_num_splits if step.splits is None else lambda *_: step.splits
    config = paged_attention.kernel_config if step.config is None else lambda *_: step.config
    with patch.multiple(paged_attention, choose_num_splits=splits, kernel_config=config):
        out = paged_attention.attend_triton(s.q, s.k, s.v, s.kv, s.metadata)
    assert out.shape == s.q.shape and out.dtype == s.q.dtype
    assert_same_bits(bits_of(s.kv), bits_of(s.kv_after))
    assert_close(out, s.out, TOLERANCE[step.dtype])


def mend_interpreter() -> None:
    """Triton 3.6 counts loops by int(array of one element), which numpy 2.4 refuses; later versions say item(). And it
    rounds to fp8 half up, and wrongly where that carries into the exponent."""
    import triton.runtime.interpreter as interpreter

    original, convert = interpreter._patch_lang_tensor, interpreter._convert_float
    fp8 = {"fp8e4nv": torch.float8_e4m3fn, "fp32": torch.float32, "fp16": torch.float16}

    def converted(data, source, target, rounding):
        if "fp8e4nv" not in (source.name, target.name):
            return convert(data, source, target, rounding)
        raw = torch.from_numpy(np.ascontiguousarray(data)).view(fp8[source.name])
        bits = torch.uint8 if target.name == "fp8e4nv" else fp8[target.name]
        return raw.to(fp8[target.name]).view(bits).numpy()

    def patched(tensor: type, scope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor, interpreter._convert_float = patched, converted


def main(names: list[str]) -> None:
    mend_interpreter()
    torch.set_num_threads(1)
    for name in names:
        try:
            check(STEPS[name])
            failure = None
        except Exception:
            failure = traceback.format_exc(limit=-4)
        print(json.dumps({"name": name, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
