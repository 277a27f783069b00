"""Calls to try the fused kernels on. As a program: run named ones in Triton's interpreter, on a CPU.

    TRITON_INTERPRET=1 python -m PACKAGE.tests.interpreted_kernels NAME ...     one line of JSON per call

The answer to each call is that of ops.py in float64. Every call is built to punish: each tensor of floating-point
numbers lies between margins of NaN, and so does each result, which is NaN before it is written. So is the cache; what
no slot names must keep its bits. Small inputs and a large eps make sure that eps counts.
"""

import json
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from .. import kernels, ops, sample_kernels, sampling
from ..quantised_kv import QuantisedKV, dequantise, head_bytes
from ..sampling import NO_TOKEN
from .interpreted_attention import assert_same_bits, bits_of, mend_interpreter

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
EPS = 0.05
MARGIN = 64  # numbers on each side; a multiple of 16 bytes, so that tensors are aligned as usual


@dataclass(frozen=True)
class Call:
    """op: a function of ops.py. sizes: what its builder below takes first. options: what else."""

    op: str
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)


SMALL = dict(BLOCK_N=2, BLOCK_K=64, num_warps=1, EVICTION="evict_first")
FLAGS = {
    "plain": {},
    "bias": dict(bias=True),
    "norm": dict(norm=True),
    "residual": dict(residual=True),
    "gated": dict(gated=True),
    "all": dict(bias=True, norm=True, residual=True),
    "gated, all": dict(bias=True, norm=True, residual=True, gated=True),
}


def _calls(dtype: torch.dtype) -> dict[str, Call]:
    """Odd shapes: what is no power of two, edges of tiles, one token."""
    calls = {}
    for tokens, hidden in ((1, 64), (2, 576), (3, 100), (17, 64)):
        calls[f"rms_norm {tokens} x {hidden}"] = Call("rms_norm", (tokens, hidden))
    for tokens, heads, kv_heads, dim in ((1, 4, 2, 32), (2, 9, 3, 64), (3, 2, 2, 80), (17, 9, 3, 32), (2, 16, 8, 128)):
        for norm in (True, False):
            name = f"store_qkv {tokens} x {heads}/{kv_heads} of {dim}{', norm' if norm else ''}"
            calls[name] = Call("store_qkv", (tokens, heads, kv_heads, dim), options=dict(norm=norm))
    calls["store_qkv padding"] = Call("store_qkv", (7, 4, 2, 32), options=dict(norm=True, unslotted=4))
    calls["store_qkv only padding"] = Call("store_qkv", (2, 4, 2, 32), options=dict(norm=True, unslotted=2))
    for tokens, inner in ((1, 64), (2, 1000), (3, 1025), (17, 96)):
        calls[f"silu_mul {tokens} x {inner}"] = Call("silu_mul", (tokens, inner))
    for rows in (1, 2, 3, 4):
        for flags, options in FLAGS.items():
            options = options | dict(config=SMALL)
            calls[f"gemv {rows} x 7 x 130, {flags}"] = Call("gemv", (rows, 7, 130), options=options)
    for columns, inner in ((1, 63), (2, 64), (3, 65), (5, 127), (4, 128), (3, 129)):
        options = dict(config=SMALL, norm=True)
        calls[f"gemv edge {columns} x {inner}"] = Call("gemv", (2, columns, inner), options=options)
    for inner in (100, 576, 1024, 1536):
        calls[f"gemv engine's tiles, {inner}"] = Call("gemv", (3, 5, inner), options=FLAGS["gated, all"])
    for rows, vocab in ((1, 1), (2, 1023), (3, 1024), (2, 1025), (5, 3000), (9, 4100)):
        calls[f"sample {rows} x {vocab}"] = Call("sample", (rows, vocab))
    return {name: Call(call.op, call.sizes, dtype, call.options) for name, call in calls.items()}


CALLS = _calls(torch.float32)
CALLS |= {f"{name}, fp16": call for name, call in list(_calls(torch.float16).items())[::3]}
CALLS |= {f"{name}, bf16": call for name, call in list(_calls(torch.bfloat16).items())[1::4]}
for name, kv_dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
    for tokens, heads, kv_heads, dim in (
        (1, 4, 2, 32),
        (2, 9, 3, 64),
        (3, 2, 2, 80),
        (17, 20, 10, 32),
        (2, 16, 8, 128),
    ):
        for dtype in (torch.float32, torch.float16):
            options = dict(norm=tokens != 3, unslotted=4 if tokens == 17 else 0, kv_dtype=kv_dtype)
            title = f"store_qkv {tokens} x {heads}/{kv_heads} of {dim}, {name}{', fp16' if dtype.itemsize == 2 else ''}"
            CALLS[title] = Call("store_qkv", (tokens, heads, kv_heads, dim), dtype, options)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor full of NaN, or of -77, and the flat one in whose middle it lies."""
    size = torch.Size(shape).numel()
    poison = float("nan") if dtype.is_floating_point else -77
    whole = torch.full((size + 2 * MARGIN,), poison, dtype=dtype, device=device)
    return whole[MARGIN : MARGIN + size].view(shape), whole


@contextmanager
def guarded_results():
    """Whatever is allocated in here is guarded, and at the end nobody may have written beside it."""
    wholes, original = [], torch.Tensor.new_empty

    def new_empty(like, size, dtype=None, **of_the_interpreter):
        if of_the_interpreter:
            return original(like, size, dtype=dtype, **of_the_interpreter)
        tensor, whole = guarded(size, dtype or like.dtype, like.device)
        wholes.append(whole)
        return tensor

    with patch.object(torch.Tensor, "new_empty", new_empty), patch("torch.empty_like", lambda x: x.new_empty(x.shape)):
        yield
    for whole in wholes:
        margins = torch.cat((whole[:MARGIN], whole[-MARGIN:]))
        untouched = margins.isnan() if whole.is_floating_point() else margins == -77
        assert untouched.all(), "something was written beside a result"


class Maker:
    """Random tensors of one dtype, between margins of NaN."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return guarded(shape, self.dtype, self.device)[0].copy_(numbers)

    def integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def rms_norm(self, tokens: int, hidden: int) -> dict:
        return dict(x=self.random(tokens, hidden, scale=0.3), weight=self.random(hidden), eps=EPS)

    def silu_mul(self, tokens: int, inner: int) -> dict:
        gate_up = self.random(tokens, 2 * inner, scale=3.0)
        gate_up[0, 0], gate_up[-1, inner - 1] = -200.0, 200.0  # exp(200) is no number of fp32
        return dict(gate_up=gate_up)

    def gemv(self, rows, columns, inner, bias=False, norm=False, residual=False, gated=False, config=None) -> dict:
        n = columns * (2 if gated else 1)
        arguments = dict(x=self.random(rows, inner, scale=0.3), weight=self.random(n, inner, scale=inner**-0.5))
        arguments |= dict(bias=self.random(n)) if bias else {}
        arguments |= dict(norm_weight=self.random(inner), eps=EPS) if norm else {}
        arguments |= dict(residual=self.random(rows, columns)) if residual else {}
        return arguments | dict(gated=gated) | (dict(config=config) if config else {})

    def store_qkv(self, tokens, heads, kv_heads, dim, norm=False, unslotted=0, kv_dtype=None) -> dict:
        block_size, blocks = 16, -(-tokens // 16) + 2
        order = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(tokens)).tolist()
        slots = [-1 if token % 2 < unslotted and token < 2 * unslotted else order[token] for token in range(tokens)]
        slots = [-1] * tokens if unslotted == tokens else slots
        angle = torch.arange(100, device=self.device)[:, None] * torch.logspace(0, -3, dim // 2, device=self.device)
        cos_sin = guarded((100, 2, dim // 2), self.dtype, self.device)[0]
        cos_sin.copy_(torch.stack((angle.cos(), angle.sin()), dim=1))
        qkv = self.random(tokens, (heads + 2 * kv_heads) * dim, scale=0.3)
        kv = guarded((3, 2, blocks, block_size, kv_heads, dim), self.dtype, self.device)[0][1]
        if kv_dtype:
            size = 2 * block_size * kv_heads * head_bytes(dim, kv_dtype)
            pool = torch.full((3, blocks, size), 255, dtype=torch.uint8, device=self.device)
            kv = QuantisedKV.view(pool[1], block_size, kv_heads, dim, kv_dtype)
            qkv *= torch.tensor([1.0, 0.0, 100.0, 0.02], device=self.device).to(qkv)[torch.arange(tokens) % 4][:, None]
        return dict(
            qkv=qkv,
            positions=self.integers([(7 * token + 99) % 100 for token in range(tokens)]),
            cos_sin=cos_sin,
            q_norm=self.random(dim) if norm else None,
            k_norm=self.random(dim) if norm else None,
            eps=EPS,
            kv=kv,
            slot_mapping=self.integers(slots),
        )


def exact(arguments: dict, device: str) -> dict:
    """Copies in float64."""
    copies = {name: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in copies.items()}


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Number by number: the error over the number plus the row's usual size, as sums lose digits by that."""
    out = out.to(expected)
    assert out.shape == expected.shape
    error = (out - expected).abs() / (expected.abs() + expected.pow(2).mean(-1, keepdim=True).sqrt()).clamp_min(1e-30)
    bad = (~(error <= tolerance)).nonzero().tolist()  # NaN is not <= anything
    assert not bad, f"{len(bad)} of {out.numel()} numbers are wrong, at {bad[:8]}; worst error {error.max():.1e}"


def check_cache(kv: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """V to the bit, K as close as results are, and not a bit changed elsewhere, nor in the layers before and after."""
    expected = expected.to(kv.device)
    written = ~expected.isnan()
    assert_close(kv[0][written[0].any(-1)], expected[0][written[0].any(-1)], tolerance)
    pool = torch.full((3, *kv.shape), float("nan"), dtype=kv.dtype, device=kv.device)
    pool[1][written] = torch.stack((kv[0], expected[1].to(kv)))[written]
    found = kv.as_strided(pool.shape, pool.stride(), kv.storage_offset() - kv.numel())
    assert_same_bits(found.flatten(0, 1), pool.flatten(0, 1))


def check_quantised(kv: QuantisedKV, expected: torch.Tensor, arguments: dict, tolerance: float) -> None:
    """V to the bit as the reference, K within the error of a byte, and not a byte changed elsewhere."""
    whole, (_, blocks, block_size, heads, dim) = bits_of(kv), kv.shape
    whole = whole.view(3, blocks, -1)
    after = torch.full_like(whole, 255)
    reference = QuantisedKV.view(after[1], block_size, heads, dim, kv.numbers.dtype)
    slots = arguments["slot_mapping"]
    v = arguments["qkv"].unflatten(1, (-1, dim))[slots >= 0, -heads:]
    reference.write(v, v, slots[slots >= 0])
    written = reference.scales[0].isfinite().all(-1)  # [blocks, block_size]
    for own, theirs in ((kv.numbers, reference.numbers), (kv.scales, reference.scales)):
        theirs[0].copy_(torch.where(written.view(*written.shape, *[1] * (own.ndim - 3)), own[0], theirs[0]))
    assert_same_bits(whole, after)
    expected, scales = expected.to(kv.pairs.device)[0][written], kv.scales[0][written].double()
    found = dequantise(kv.numbers[0][written], scales, torch.float64)
    half_step = scales[..., None] * 0.501 if kv.numbers.dtype == torch.int8 else expected.abs() / 15.9
    error = (
        (found - expected).abs() - half_step - scales[..., None] * 2**-10 - tolerance * expected.abs().amax(-1, True)
    )
    assert (error <= 0).all(), f"K is off by {error.max():.1e} more than a byte explains"


def check(call: Call, device: str = "cpu", seed: int = 0) -> None:
    """Run a call: its result is that of float64, and what it was given is as it was."""
    if call.op == "sample":
        return check_sample(*call.sizes, call.dtype, device, seed)
    arguments = getattr(Maker(call.dtype, device, seed), call.op)(*call.sizes, **call.options)
    reference = exact(arguments, "cpu" if call.op == "store_qkv" else device)
    if isinstance(kv := arguments.get("kv"), QuantisedKV):
        reference["kv"] = torch.full(kv.shape, float("nan"), dtype=torch.float64)
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor) and name != "kv"}
    expected = getattr(ops, call.op)(**{name: x for name, x in reference.items() if name != "config"})
    with guarded_results():
        out = getattr(kernels, call.op)(**arguments)
    assert out.dtype == call.dtype
    assert_close(out, expected, TOLERANCE[call.dtype])
    assert all(arguments[name].equal(x) for name, x in before.items()), "an argument has changed"
    if isinstance(kv, QuantisedKV):
        check_quantised(kv, reference["kv"], arguments, TOLERANCE[call.dtype])
    elif call.op == "store_qkv":
        check_cache(arguments["kv"], reference["kv"], TOLERANCE[call.dtype])


SEEDS = (0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 12345)
POSITIONS = (0, 1, 5, 1000, 2**30, 2**31 - 1)


def wrapped(seed: int) -> int:
    """The int64 of the same 64 bits."""
    return seed - 2**64 if seed >= 2**63 else seed


def check_sample(rows: int, vocab: int, dtype: torch.dtype, device: str, seed: int) -> None:
    """Every third row is greedy, with ties. The others: no id has a score that is better by more than rounding."""
    maker = Maker(dtype, device, seed)
    logits = maker.random(rows, vocab, scale=3.0)
    logits[::3] = logits[::3].round()
    logits[1::3] -= 50.0  # below what a place that does not exist might count as
    seeds, positions = [SEEDS[row % 8] for row in range(rows)], [POSITIONS[row % 6] for row in range(rows)]
    inverse = torch.tensor([(0.0, 1.0, 1.7)[row % 3] for row in range(rows)], device=device)
    out, whole = guarded((rows,), torch.int64, device)
    with guarded_results():
        sample_kernels.sample(
            logits, maker.integers([wrapped(s) for s in seeds]), maker.integers(positions), inverse, out
        )
    assert (whole[:MARGIN] == -77).all() and (whole[-MARGIN:] == -77).all()
    for row, token in enumerate(out.tolist()):
        assert 0 <= token < vocab
        wide = logits[row : row + 1].float()
        if row % 3 == 0:
            assert token == (wide[0] == wide.max()).nonzero()[0].item(), f"row {row}: not the first of the best"
            continue
        noise = sampling.gumbel_noise([seeds[row]], [positions[row]], wide)
        scores = (wide.double() * inverse[row].item() + noise.double())[0]
        assert scores.max() - scores[token] < 1e-4, f"row {row}: {token} is no argmax"


@triton.jit
def hash_kernel(seeds, positions, out_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The integers behind the noise, one row per program."""
    row, ids = tl.program_id(0), tl.arange(0, BLOCK)
    bits = sample_kernels.hash_bits(tl.load(seeds + row), tl.load(positions + row), ids.to(tl.uint32))
    tl.store(out_ptr + row * VOCAB + ids, bits.to(tl.int64), mask=ids < VOCAB)


@triton.jit
def noise_kernel(bits_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, sample_kernels.gumbel_noise(tl.load(bits_ptr + at).to(tl.uint32)))


def check_hash(device: str = "cpu") -> None:
    """Bit for bit those of sampling.py, for every pair of seed and position."""
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    seeds, positions = zip(*pairs, strict=True)
    maker = Maker(torch.float32, device, 0)
    out = maker.integers([-1] * 300 * len(pairs)).view(len(pairs), 300)
    arguments = maker.integers([wrapped(s) for s in seeds]), maker.integers(positions)
    hash_kernel[(len(pairs),)](*arguments, out, 300, 512)
    assert out.equal(sampling.hash_bits(seeds, positions, 300, out.device))


def check_noise(device: str = "cpu") -> None:
    """From the smallest u to the largest, and around the place where the formula changes."""
    bits = torch.linspace(0, 32, 2048, dtype=torch.float64).exp2().long() - 1
    bits = torch.cat((bits, 2**32 - 1 - bits, 2**28 + torch.arange(-1024, 1024), torch.arange(2048))).to(device)
    out = torch.full((len(bits),), float("nan"), device=device)
    noise_kernel[(1,)](bits, out, len(bits))
    with patch.object(sampling, "hash_bits", lambda *_: bits[None]):
        expected = sampling.gumbel_noise([0], [0], out[None])[0]
    error = ((out - expected).abs() / (1 + expected.abs())).max()
    assert error < 2e-6, f"off by {error:.1e}"


def check_hopeless(device: str = "cpu") -> None:
    """Rows with NaN or without any number have no token; one number among -inf is the token."""
    logits = torch.full((8, 1500), float("nan"), device=device)
    logits[2:4], logits[4:6], logits[4:, 1400] = float("-inf"), float("-inf"), 1.0
    out = torch.full((8,), -77, device=device)
    inverse = torch.tensor([0.0, 1.0] * 4, device=device)
    sample_kernels.sample(logits, torch.arange(8, device=device), torch.arange(8, device=device), inverse, out)
    assert out.tolist() == [NO_TOKEN] * 4 + [1400] * 2 + [NO_TOKEN] * 2


CHECKS = {"hash": check_hash, "noise": check_noise, "hopeless": check_hopeless}


def main(names: list[str]) -> None:
    mend_interpreter()
    torch.set_num_threads(1)
    for name in names:
        try:
            CHECKS[name]() if name in CHECKS else check(CALLS[name])
            failure = None
        except Exception:
            failure = traceback.format_exc(limit=-4)
        print(json.dumps({"name": name, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
