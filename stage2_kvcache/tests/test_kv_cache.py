"""The KV cache: cached results equal uncached ones, however the prompt is cut, and unwritten slots are never read."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams
from ..attention import BACKENDS, AttentionMetadata, causal_mask
from ..kv_cache import KVCache, kv_bytes_per_token
from ..sequence import Sequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", dtype="float64", device="cpu", max_model_len=96) as llm:
        yield llm


@torch.inference_mode()
def logits_in_chunks(llm: LLM, ids: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of every token [T, vocab], the prompt computed in chunks that end at `cuts` and at its end."""
    runner, logits = llm.model_runner, []
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    cache = KVCache(llm.model_config, len(ids), runner.device)
    cache.data.fill_(float("nan"))
    for start, end in pairwise(bounds):
        metadata = AttentionMetadata(query_len=end - start, seq_len=end)
        hidden = runner.model(torch.tensor(ids[start:end]), torch.arange(start, end), cache.data, metadata)
        logits.append(runner.model.compute_logits(hidden))
    return torch.cat(logits)


def greedy(llm: LLM, ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids


def prompt(length: int, offset: int = 0) -> list[int]:
    return [(offset + 37 * i + i * i) % 250 for i in range(length)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 20, 39, 40])
def test_any_chunk_size_gives_the_same_logits(llm, size):
    """A mask aligned to the top left does not show in one-token steps, which use none, nor in the first chunk."""
    ids = prompt(40)
    whole = logits_in_chunks(llm, ids, [])
    chunked = logits_in_chunks(llm, ids, list(range(0, 40, size)))
    torch.testing.assert_close(chunked, whole, rtol=1e-9, atol=1e-9)
    assert len(set(whole.argmax(-1).tolist())) > 10  # a model that always says the same would prove nothing


@given(data=st.data())
def test_any_split_gives_the_same_logits(llm, data):
    """The same with uneven chunks, down to two tokens and one."""
    ids = data.draw(st.lists(st.integers(0, 258), min_size=2, max_size=24))
    cuts = data.draw(st.lists(st.integers(1, len(ids) - 1), max_size=5))
    torch.testing.assert_close(logits_in_chunks(llm, ids, cuts), logits_in_chunks(llm, ids, []), rtol=1e-9, atol=1e-9)


def test_cached_logits_equal_uncached_at_every_step(llm, monkeypatch):
    """Offsets go 6, 7, 8, ...: a cache that advances twice after the prefill is right for one token only."""
    runner, seen = llm.model_runner, []
    original = runner.model.compute_logits

    def note(hidden):
        logits = original(hidden)
        seen.append((runner.kv_cache.owner.num_computed_tokens, logits[-1]))
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", note)
    output = greedy(llm, prompt(6), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    monkeypatch.undo()
    assert [computed for computed, _ in seen] == [0, *range(6, 25)]
    whole = logits_in_chunks(llm, prompt(6) + output[:-1], [])
    cached = torch.stack([logits for _, logits in seen])
    torch.testing.assert_close(cached, whole[5:], rtol=1e-9, atol=1e-9)


def test_second_request_equals_a_fresh_engine(llm):
    """A write offset that is not reset between requests makes the second one attend to the first one's tokens."""
    greedy(llm, prompt(30))
    second = greedy(llm, prompt(3, offset=99))
    with LLM("tiny", dtype="float64", device="cpu", max_model_len=96) as fresh:
        assert greedy(fresh, prompt(3, offset=99)) == second


@pytest.mark.parametrize("filler", [float("nan"), 1e30])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_unwritten_slots_are_never_read(llm, filler, length):
    """Slots that were reserved but not written hold anything; a masked NaN times zero is still NaN."""
    llm.model_runner.kv_cache.data.zero_()
    clean = greedy(llm, prompt(length))
    llm.model_runner.kv_cache.data.fill_(filler)
    assert greedy(llm, prompt(length)) == clean
    assert len(set(clean)) > 3


def test_only_the_slots_of_the_step_are_written(llm):
    """A step that writes beside its slots would spoil a neighbour once the cache is shared."""
    cache = llm.model_runner.kv_cache
    cache.data.fill_(-7.0)
    greedy(llm, prompt(5), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    written = (cache.data != -7.0).flatten(3).any(-1)  # [layers, 2, max_len]
    assert written[:, :, :8].all()  # 5 + 4 - 1: the last token's K and V are never needed
    assert not written[:, :, 8:].any()


def test_full_to_the_last_slot(llm):
    """Filling the context ends with reason length; a wrapped or clamped slot would overwrite an old token."""
    limit = llm.resolved.max_model_len
    (output,) = llm.generate([prompt(limit - 3)], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].finish_reason == "length"
    assert llm.model_runner.kv_cache.owner.num_computed_tokens == limit - 1
    with pytest.raises(ValueError, match=str(limit)):
        llm.generate([prompt(limit)])


def test_two_streams_share_one_cache(llm):
    """Two streams that take turns recompute when the cache comes back; without an owner they would read each other."""
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    alone = ["".join(llm.stream(prompt(n), params)) for n in (4, 9)]
    streams = [llm.stream(prompt(n), params) for n in (4, 9)]
    texts = ["", ""]
    for _ in range(10):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, "")
    assert [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)] == alone


def test_claim_resets_both_owners(llm):
    """The loser's tokens are gone, so it must not believe that they are still computed."""
    cache = KVCache(llm.model_config, 8, torch.device("cpu"))
    first, second = (Sequence(str(i), [1, 2], GREEDY, 0, (), 4, None) for i in range(2))
    cache.claim(first)
    first.num_computed_tokens = 2
    cache.claim(first)
    assert first.num_computed_tokens == 2
    cache.claim(second)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (0, 0)


def test_causal_mask_is_aligned_to_the_bottom_right():
    """Three queries on five keys: the first already sees three keys, the last sees all."""
    mask = causal_mask(3, 5, torch.device("cpu"))
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


@given(query_len=st.integers(1, 20), before=st.integers(0, 20))
def test_attention_pairs_count_the_mask(query_len, before):
    """The counter is the number of ones in the causal mask."""
    pairs = AttentionMetadata(query_len, before + query_len).attention_pairs
    assert pairs == int(causal_mask(query_len, before + query_len, torch.device("cpu")).sum())


def test_bytes_per_token_are_the_bytes_allocated(llm):
    """head_dim is the config's own (64 here, not 96 / 4), and both K and V count."""
    cache = llm.model_runner.kv_cache
    assert cache.bytes_per_token == kv_bytes_per_token(2, 2, 64, torch.float64) == 2 * 2 * 2 * 64 * 8
    assert cache.data.nbytes == cache.bytes_per_token * llm.resolved.max_model_len
    assert llm.metrics.kv_bytes_per_token == cache.bytes_per_token


def test_no_room_is_a_value_error_with_the_numbers(llm):
    """Out of memory at start says how much was wanted and what to change."""
    with pytest.raises(ValueError, match=r"10000000000000 tokens x .* lower max_model_len"):
        KVCache(llm.model_config, 10**13, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("query_len, seq_len", [(1, 1), (1, 300), (7, 7), (5, 133), (64, 64), (129, 257)])
def test_flash_attn_equals_torch(query_len, seq_len):
    """The other backend, on random numbers: chunks, whole prompts and single tokens, beside slots that hold NaN."""
    pytest.importorskip("flash_attn")
    torch.manual_seed(query_len)
    q, k, v = (torch.randn(query_len, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (9, 3, 3))
    kv = torch.randn(2, 512, 3, 64, device="cuda", dtype=torch.bfloat16)
    kv[:, seq_len:] = float("nan")
    metadata = AttentionMetadata(query_len, seq_len)
    outs = [BACKENDS[name](q, k, v, kv.clone(), metadata) for name in ("torch", "flash_attn")]
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
