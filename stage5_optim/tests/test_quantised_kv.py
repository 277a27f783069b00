"""Quantised KV: errors as small as the bytes allow, scales that go wherever their block goes, and a pool that holds
nearly twice the tokens. Whatever nobody wrote is 255 in every byte, which as a scale is NaN.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams, attention
from ..attention import BACKENDS, choose_backend, choose_block_size
from ..block_manager import BlockMoves
from ..config import EngineConfig, ModelConfig, Resolved
from ..kv_cache import KVCache, block_bytes, kv_bytes_per_token, plan_blocks, plan_swap_blocks
from ..model_runner import slots
from ..quantised_kv import LARGEST, QuantisedKV, dequantise, head_bytes, quantise
from .helpers import engine_logprobs
from .script import engine, new_engine
from .test_kv_cache import MIXED, Step, prompt

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = list(LARGEST)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


# ---------------------------------------------------------------- numbers and scales


def bound(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a step, and what fp16 does to the scale: it is rounded, and below 2^-24 there is none."""
    absmax = x.abs().amax(-1, keepdim=True).double()
    of_scale = absmax * 2**-11 + LARGEST[dtype] * 2**-25
    return of_scale + (absmax / 254 if dtype == torch.int8 else x.abs().double() / 16 + absmax / 448 * 2**-10)


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("absmax", [0.02, 4.0, 300.0, 1.0, 6e4, 1e-3, 1e-6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_number_is_off_by_more_than_half_a_step(dtype, absmax, source):
    """A scale that is clamped to 1 loses small tokens, one that is shared loses them beside large ones."""
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    x = (x / x.abs().amax(-1, keepdim=True) * absmax).to(source)
    numbers, scales = quantise(x, dtype)
    assert numbers.dtype == dtype and scales.dtype == torch.float16 and scales.shape == x.shape[:-1]
    error = (dequantise(numbers, scales, torch.float64) - x.double()).abs()
    assert (error <= bound(x, dtype)).all(), f"{(error - bound(x, dtype)).max():.1e} too much"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loud_neighbours_cost_nothing(dtype):
    """Heads and tokens of 0.02, 4, 300 and 0 side by side: each is as exact as alone."""
    absmax = torch.tensor([0.02, 4.0, 300.0, 0.0])
    x = torch.randn(4, 4, 64)
    x *= ((absmax[:, None] + absmax) / 2 / x.abs().amax(-1))[..., None]
    error = (dequantise(*quantise(x, dtype), torch.float64) - x.double()).abs()
    assert (error <= bound(x, dtype)).all() and not x[3, 3].any()


@given(st.lists(st.floats(-300, 300, width=32), min_size=2, max_size=8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_row(dtype, row):
    x = torch.tensor([row])
    error = (dequantise(*quantise(x, dtype), torch.float64) - x.double()).abs()
    assert (error <= bound(x, dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros(dtype):
    """0 / 0 is NaN; and a zero token must not take its neighbour's scale."""
    x = torch.randn(4, 2, 16)
    x[1], x[2, 0] = 0.0, 0.0
    back = dequantise(*quantise(x, dtype), torch.float32)
    assert back.isfinite().all() and not back[1].any() and not back[2, 0].any() and back[2, 1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_too_large_is_cut_off(dtype):
    """fp8 has no infinity but a NaN: what is above 448 must not become one, also where the scale is at its end."""
    x = torch.tensor([[1e30, -1e30, 1.0], [3e38, 0.0, -3e38], [float("inf"), 1.0, 2.0], [448.5, -449.0, 463.0]])
    numbers, scales = quantise(x, dtype)
    back = dequantise(numbers, scales, torch.float64)
    assert back.isfinite().all() and scales.isfinite().all()
    assert back[0, 0] == -back[0, 1] == LARGEST[dtype] * 65504
    assert numbers.to(torch.float32).abs().max() == LARGEST[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tokens_give_equal_bytes(dtype):
    """Each token by itself: neighbours, other heads and the order of a batch change nothing."""
    x = torch.randn(9, 3, 64)
    numbers, scales = quantise(x, dtype)
    for i in range(9):
        alone = quantise(x[i : i + 1], dtype)
        assert alone[0].view(torch.uint8).equal(numbers[i : i + 1].view(torch.uint8)) and alone[1].equal(
            scales[i : i + 1]
        )


# ---------------------------------------------------------------- in blocks


def new_layer(num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> tuple:
    """A layer's cache of bytes of 255, and these bytes, with a block of somebody else before and behind it."""
    size = 2 * block_size * heads * head_bytes(dim, dtype)
    whole = torch.full((num_blocks + 2, size), 255, dtype=torch.uint8)
    return QuantisedKV.view(whole[1:-1], block_size, heads, dim, dtype), whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 24])
def test_a_block_is_numbers_and_scales_and_nothing_else(block_size, dtype):
    """Every byte of a block belongs to one number or one scale of one token, and the pairs are the scales."""
    kv, whole = new_layer(3, block_size, 2, 8, dtype)
    kv.numbers.view(torch.uint8).fill_(1)
    assert (whole == 1).sum() == 3 * 2 * block_size * 2 * 8
    kv.scales.zero_()
    assert not (whole[1:-1] == 255).any() and (whole[[0, -1]] == 255).all()
    kv.scales.copy_(torch.arange(kv.scales.numel()).view(kv.scales.shape))
    low, high = (kv.pairs & 0xFFFF).to(torch.int16), (kv.pairs >> 16).to(torch.int16)
    for side, half in enumerate((low, high)):
        assert half.view(torch.float16).transpose(1, 2).equal(kv.scales[side])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_only_the_slots_of_the_step_are_written(block_size, dtype):
    """Half a block and a slot elsewhere: the tokens come back, and all other bytes are 255 still."""
    kv, whole = new_layer(32 // block_size, block_size, 2, 8, dtype)
    k, v = torch.randn(2, 3, 2, 8)
    places = torch.tensor([17, 2, 30])
    kv.write(k, v, places)
    read = kv.read(torch.arange(32 // block_size), torch.float32).flatten(1, 2)
    assert read[:, places].equal(dequantise(*quantise(torch.stack((k, v)), dtype), torch.float32))
    others = [slot for slot in range(32) if slot not in places]
    assert (kv.numbers.view(torch.uint8).flatten(1, 2)[:, others] == 255).all()
    assert kv.scales.flatten(1, 2)[:, others].isnan().all() and (whole[[0, -1]] == 255).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_torch_attention_is_that_over_the_stored_numbers(block_size, dtype):
    """A mixed step over shuffled blocks, half filled ones too: what no token owns is NaN, and nobody reads it."""
    step = Step(MIXED, block_size, float("nan"))
    q, k, v, plain, metadata = step.inputs()
    kv, _ = new_layer(plain.shape[1], block_size, 2, 8, dtype)
    for (query_len, seq_len), keys, table in zip(step.shapes, step.keys, step.tables, strict=True):
        old = seq_len - query_len
        kv.write(*keys[:, :old], torch.tensor(slots(table, 0, old, block_size), dtype=torch.int64))
    step.keys = [dequantise(*quantise(keys, dtype), torch.float64) for keys in step.keys]
    torch.testing.assert_close(BACKENDS["torch"](q, k, v, kv, metadata), step.answer(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_carry_numbers_and_scales(dtype):
    """Out, in and copies, on random bytes: every byte of a block arrives, and those of the other blocks stay."""
    config = engine().model_config
    cache = KVCache(config, 6, 4, CPU, 3, dtype)
    for pool in (cache.data, cache.host):
        pool.random_(0, 256, generator=torch.Generator().manual_seed(0))
    before, host = cache.data.clone(), cache.host.clone()
    cache.move(BlockMoves(swap_out=[(0, 2), (3, 1)], swap_in=[(0, 0)], copies=[(1, 3), (4, 5)]))
    assert (
        cache.host[1].equal(before[:, :, 3]) and cache.host[2].equal(before[:, :, 0]) and cache.host[0].equal(host[0])
    )
    sources = [host[0], *(before[:, :, i] for i in (1, 2, 1, 4, 4))]
    assert all(cache.data[:, :, i].equal(source) for i, source in enumerate(sources))
    layer = cache.layers[1]
    for found in (layer.numbers.view(torch.uint8), layer.scales.view(torch.int16)):
        assert found[:, 3].equal(found[:, 1]) and found[:, 5].equal(found[:, 4]) and not found[:, 0].equal(found[:, 1])


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(("dim", "least"), [(128, 1.96), (64, 1.93), (80, 1.95)])
@pytest.mark.parametrize("name", NAMES)
def test_the_pool_holds_nearly_twice_the_tokens(name, dim, least):
    """In the same room, against bf16, scales included: 256 bytes or 130 for a token and head of 128."""
    model = ModelConfig(1000, 64, 64, 28, 16, 8, dim, 4096, dtype=torch.bfloat16)
    config = EngineConfig("tiny", kv_cache_dtype=name, preemption_mode="swap")
    counts, sizes = [], []
    for kv_dtype in (None, NAMES[name]):
        resolved = Resolved(CUDA, torch.bfloat16, "triton", "", 4096, 16, kv_dtype)
        counts.append(plan_blocks(config, model, resolved, room=100 * 2**30, wanted_tokens=0))
        sizes.append(block_bytes(model, 16, kv_dtype))
    assert counts[1] / counts[0] >= least and sizes[0] / sizes[1] >= least
    assert sizes[1] == 16 * 2 * 28 * 8 * (dim + 2)
    assert plan_swap_blocks(config, model, resolved, 10**9) * sizes[1] <= 4 * 2**30


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_allocated(name):
    with new_engine(num_kv_blocks=24, kv_cache_dtype=name, preemption_mode="swap", num_swap_blocks=5) as llm:
        cache, per_token = llm.model_runner.kv_cache, 2 * 2 * 2 * (64 + 2)
        assert llm.metrics.kv_bytes_per_token == cache.bytes_per_token == per_token
        assert kv_bytes_per_token(2, 2, 64, NAMES[name]) == per_token
        assert cache.data.nbytes == per_token * 16 * 24 and cache.host.nbytes == per_token * 16 * 5
        assert block_bytes(llm.model_config, 16, NAMES[name]) == per_token * 16


# ---------------------------------------------------------------- what cannot be


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype='int4': expected one of auto, int8, fp8"):
        new_engine(kv_cache_dtype="int4")


def test_flash_attn_is_refused_by_name(monkeypatch):
    """It would read bytes as something else. Left out, it is not chosen, and its large blocks are not either."""
    monkeypatch.setattr(attention, "package_obstacle", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    machine = CUDA, torch.bfloat16, 128
    with pytest.raises(
        ValueError, match=r"attention_backend='flash_attn': .*16 bits only.*kv_cache_dtype.*leave it out"
    ):
        choose_backend("flash_attn", *machine, 256, torch.int8)
    assert choose_backend(None, *machine, 16, torch.float8_e4m3fn)[0] == "triton"
    monkeypatch.setattr(attention, "package_obstacle", lambda name, _: "not installed" if name == "triton" else None)
    assert choose_block_size(None, None, *machine) == 256 and choose_block_size(None, None, *machine, torch.int8) == 16
    assert choose_backend(None, *machine, 16, torch.int8)[0] == "torch"


def test_fp8_needs_a_gpu_that_has_it(monkeypatch):
    monkeypatch.setattr(attention, "package_obstacle", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    machine = CUDA, torch.bfloat16, 128, 16
    with pytest.raises(ValueError, match=r"capability 8\.9 or more for kv_cache_dtype='fp8'; 'int8' needs less"):
        choose_backend("triton", *machine, torch.float8_e4m3fn)
    assert choose_backend(None, *machine, torch.float8_e4m3fn)[0] == "torch"
    assert choose_backend(None, *machine, torch.int8)[0] == "triton"


# ---------------------------------------------------------------- in the engine


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]


def spoil(llm: LLM) -> None:
    """All that nobody holds becomes NaN."""
    manager, cache = llm.block_manager, llm.model_runner.kv_cache
    cache.data[:, :, [b for b in range(manager.num_blocks) if not manager.ref_count(b)]] = 255
    cache.host[list(manager._host.free)] = 255


@pytest.fixture(scope="module", params=NAMES)
def roomy(request):
    """An engine in which nobody waits, shares or moves: what the others must say."""
    with new_engine(max_model_len=96, max_num_seqs=4, num_kv_blocks=64, kv_cache_dtype=request.param) as llm:
        yield llm


PROMPTS = [prompt(length, offset=length) for length in (1, 15, 16, 17, 33, 40)]


@pytest.mark.parametrize(("name", "most"), [("int8", 0.1), ("fp8", 0.5)])
def test_the_text_stays_close(name, most):
    """Log probabilities after a prompt and of the first tokens, against the unquantised engine."""
    ids = prompt(60)
    with new_engine(max_model_len=96, kv_cache_dtype=name) as llm:
        tokens, ours = engine_logprobs(llm, ids, 8)
    with new_engine(max_model_len=96) as llm:
        expected, theirs = engine_logprobs(llm, ids, 8)
    assert tokens == expected
    error = (ours - theirs).abs().max()
    assert 0 < error < most, f"off by {error:.3f}"


def test_unwritten_places_are_never_read(roomy):
    """Recycled blocks full of NaN, and half-filled ones: together, and one after the other."""
    roomy.model_runner.kv_cache.data.zero_()
    clean = run(roomy, PROMPTS)
    for spoilt in (255, 127):
        roomy.model_runner.kv_cache.data.fill_(spoilt)
        assert run(roomy, PROMPTS) == clean
        for one, tokens in zip(PROMPTS, clean, strict=True):
            roomy.model_runner.kv_cache.data.fill_(spoilt)
            assert run(roomy, [one]) == [tokens]
    assert all(len(set(tokens)) > 3 for (tokens,) in clean)


SITUATIONS = {
    "chunks": dict(max_num_batched_tokens=7, max_num_seqs=4),
    "small blocks": dict(block_size=4, num_kv_blocks=200),
    "blocks of one": dict(block_size=1, num_kv_blocks=500),
    "full pool, recompute": dict(num_kv_blocks=6, max_num_seqs=6, watermark=0.0),
    "full pool, swap": dict(num_kv_blocks=6, max_num_seqs=6, watermark=0.0, preemption_mode="swap", num_swap_blocks=20),
    "padded rows": dict(enforce_eager=False, max_num_seqs=8),
    "prefix caching": dict(enable_prefix_caching=True, block_size=4, num_kv_blocks=200),
    "one step ahead": dict(async_scheduling=True, enable_prefix_caching=True, num_kv_blocks=6, watermark=0.0),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_same_tokens_however_blocks_move(roomy, situation):
    """Twice, so that blocks are used again and prefixes are found; where nothing may be found, what is free is NaN."""
    expected = run(roomy, PROMPTS)
    options = dict(max_model_len=96, num_kv_blocks=64, kv_cache_dtype=roomy.config.kv_cache_dtype)
    with new_engine(**options | SITUATIONS[situation]) as llm:
        launch = llm.model_runner.launch
        if not llm.config.enable_prefix_caching:
            llm.model_runner.launch = lambda batch: (batch.moves or spoil(llm), launch(batch))[1]
        assert run(llm, PROMPTS) == run(llm, PROMPTS) == expected
        counters = llm.metrics.counters()
        assert "full" not in situation or counters["preemptions"] > 0
        assert "swap" not in situation or counters["swapped_in_blocks"] > 0
        assert "prefix" not in situation or counters["prefix_hit_tokens"] > 0
        assert "padded" not in situation or counters["padding_tokens"] > 0


def test_samples_copy_before_they_write(roomy):
    """Two samples share the blocks of their prompt; with blocks of one token nobody ever has to copy."""
    params = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    roomy.metrics.reset()
    found = run(roomy, PROMPTS, params)
    assert roomy.metrics.counters()["cow_copies"] > 0 and all(first != second for first, second in found)
    options = dict(max_model_len=96, block_size=1, num_kv_blocks=500, max_num_seqs=4)
    with new_engine(**options, kv_cache_dtype=roomy.config.kv_cache_dtype) as llm:
        assert run(llm, PROMPTS, params) == found
        assert llm.metrics.counters()["cow_copies"] == 0


def test_a_prefix_hit_finds_the_very_bytes(roomy):
    """Log probabilities behind a prefix that was found are those without, to the last digit but rounding."""
    ids = prompt(50)
    _, expected = engine_logprobs(roomy, ids, 4)
    options = dict(max_model_len=96, num_kv_blocks=64, enable_prefix_caching=True)
    with new_engine(**options, kv_cache_dtype=roomy.config.kv_cache_dtype) as llm:
        engine_logprobs(llm, ids[:40], 1)
        before = llm.model_runner.kv_cache.data.clone()
        _, found = engine_logprobs(llm, ids, 4)
        assert llm.metrics.counters()["prefix_hit_tokens"] == 32
        hit = [b for b in range(64) if before[:, :, b].equal(llm.model_runner.kv_cache.data[:, :, b])]
        assert len(hit) >= 2, "the cached blocks were written again"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_in_graphs_say_what_torch_says(name, dtype):
    """The fused write and the paged read in a CUDA graph, against the torch backend on the same GPU."""
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    options = dict(device="cuda", dtype=dtype, max_model_len=96, num_kv_blocks=64, kv_cache_dtype=name)
    outs = []
    for more in ({}, dict(attention_backend="torch", fused_kernels=False)):
        with LLM("tiny", **options, **more) as llm:
            assert llm.features.cuda_graphs == (not more)
            outs.append([engine_logprobs(llm, ids, 6) for ids in PROMPTS])
    for (_, ours), (_, theirs) in zip(*outs, strict=True):  # the first token's: later ones may follow another text
        assert (ours[0] - theirs[0]).abs().max() < (0.02 if dtype == "float32" else 0.3)
