"""The KV cache in slots: cached equals uncached, unwritten slots are never read, and the memory is what it says."""

from itertools import accumulate

import pytest
import torch

from .. import LLM, SamplingParams, kv_cache
from ..attention import BACKENDS, AttentionMetadata, causal_mask
from ..kv_cache import kv_bytes_per_token, resolve_num_slots

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", dtype="float64", device="cpu", max_model_len=96, max_num_seqs=3) as llm:
        yield llm


def greedy(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def prompt(length: int, offset: int = 0) -> list[int]:
    return [(offset + 37 * i + i * i) % 250 for i in range(length)]


@pytest.mark.parametrize("filler", [float("nan"), 1e30])
def test_unwritten_slots_are_never_read(llm, filler):
    """Slots that were reserved but not written hold anything; a masked NaN times zero is still NaN."""
    prompts = [prompt(length) for length in (1, 15, 16, 17)]
    llm.model_runner.kv_cache.data.zero_()
    clean = greedy(llm, prompts)
    llm.model_runner.kv_cache.data.fill_(filler)
    assert greedy(llm, prompts) == clean
    assert all(len(set(tokens)) > 3 for tokens in clean)


def test_only_the_places_of_the_step_are_written(llm):
    """A token written beside its place spoils a neighbour's slot, and only the neighbour's text shows it."""
    cache = llm.model_runner.kv_cache
    cache.data.fill_(-7.0)
    greedy(llm, [prompt(5), prompt(2)], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    written = (cache.data != -7.0).flatten(4).any(-1)  # [layers, 2, slots, slot_len]
    lengths = written.sum(-1)
    assert written.sort(dim=-1, descending=True, stable=True).values.equal(written)  # from position 0 on, without holes
    assert sorted(lengths[0, 0].tolist()) == [0, 2 + 3, 5 + 3]  # the last token's K and V are never needed
    assert (lengths == lengths[0, 0]).all()


def test_slot_mapping_is_slot_times_length_plus_position(llm):
    """Offsets of two requests, a prompt and a decode step, by hand."""
    runner, seen = llm.model_runner, []
    original = runner.prepare
    runner.prepare = lambda batch: seen.append(original(batch)) or seen[-1]
    try:
        greedy(llm, [prompt(3), prompt(2)], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    finally:
        runner.prepare = original
    (_, positions, first), (_, later, second) = seen
    a, b = (slot * runner.kv_cache.slot_len for slot in first.slots)
    assert positions.tolist() == [0, 1, 2, 0, 1] and later.tolist() == [3, 2]
    assert first.slot_mapping.tolist() == [a, a + 1, a + 2, b, b + 1]
    assert second.slot_mapping.tolist() == [a + 3, b + 2]
    assert first.cu_seqlens_q.tolist() == [0, 3, 5] and second.cu_seqlens_k.tolist() == [0, 4, 7]


def test_full_to_the_last_place(llm):
    """Filling the slot ends with reason length; one place further would be the neighbour's first token."""
    limit = llm.resolved.max_model_len
    prompts = [prompt(limit - 3), prompt(4)]
    long, short = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True), use_tqdm=False)
    assert len(long.outputs[0].token_ids) == 3
    assert long.outputs[0].finish_reason == "length"
    assert (
        short.outputs[0].token_ids
        == greedy(llm, [prompt(4)], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0]
    )
    with pytest.raises(ValueError, match=str(limit)):
        llm.generate([prompt(limit)])


def test_a_slot_is_used_again(llm):
    """Ten requests on three slots: the second owner of a slot sees nothing of the first."""
    prompts = [prompt(3 + 5 * (i % 4), offset=i) for i in range(10)]
    together = greedy(llm, prompts)
    assert together == [greedy(llm, [one])[0] for one in prompts]
    assert llm.scheduler.slots.num_free == 3


def test_causal_mask_is_aligned_to_the_bottom_right():
    """Three queries on five keys: the first already sees three keys, the last sees all."""
    assert causal_mask(3, 5, CPU).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_attention_pairs_count_the_masks():
    """The counter is the number of ones in the causal masks of all sequences."""
    shapes = [(1, 1), (3, 5), (4, 4), (1, 9)]
    none = torch.empty(0)
    metadata = AttentionMetadata([q for q, _ in shapes], [s for _, s in shapes], [0] * 4, none, none, none, none, none)
    assert metadata.attention_pairs == sum(int(causal_mask(q, s, CPU).sum()) for q, s in shapes)


def test_bytes_are_those_allocated(llm):
    """head_dim is the config's own (64 here, not 96 / 4), K and V count, and so does every slot."""
    cache = llm.model_runner.kv_cache
    assert cache.bytes_per_token == kv_bytes_per_token(2, 2, 64, torch.float64) == 2 * 2 * 2 * 64 * 8
    assert cache.data.nbytes == cache.bytes_per_token * llm.resolved.max_model_len * 3
    assert llm.metrics.kv_bytes_per_token == cache.bytes_per_token


@pytest.mark.parametrize(
    ("free", "requested", "wanted"),
    [(1000, None, 8), (1000, 5, 5), (60, None, 5), (100, 9, 9), (5, None, None), (60, 6, None)],
)
def test_slots_are_checked_against_free_memory(free, requested, wanted, monkeypatch):
    """Slots x bytes against 90 % of what is free: both numbers in the error, before the first request."""
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: free)
    if wanted is None:
        with pytest.raises(ValueError, match="lower max_num_seqs or max_model_len"):
            resolve_num_slots(requested, 10, CPU)
    else:
        assert resolve_num_slots(requested, 10, CPU) == wanted


def test_what_torch_keeps_for_later_is_free_too(monkeypatch):
    """Memory of tensors that are gone stays with torch, and the driver calls it used: the engine after one that was
    dropped found a tenth of the GPU free."""
    kept = [6]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 - sum(kept), 10))
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    assert kv_cache.free_memory(torch.device("cuda")) == 10


@pytest.mark.gpu
def test_gpu_the_engine_after_a_dropped_one_gets_as_much():
    """Without `close`; with weights so large that they would be laid into what the first one has left."""
    counts = []
    for _ in range(2):
        llm = LLM("qwen3-0.6b", device="cuda", load_format="dummy")
        counts.append(llm.scheduler_config.max_num_seqs)
        del llm
    assert counts[1] >= counts[0] - 1


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [[(1, 1)] * 3, [(1, 300), (1, 5), (1, 77)], [(7, 7), (1, 40), (33, 150), (5, 5)]])
def test_flash_attn_equals_torch(shapes):
    """The other backend, on random numbers: pure decode and mixed steps, slots out of order, unwritten places NaN."""
    pytest.importorskip("flash_attn")
    torch.manual_seed(len(shapes))
    total = sum(query_len for query_len, _ in shapes)
    q, k, v = (torch.randn(total, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (9, 3, 3))
    slots = [3, 0, 2, 1][: len(shapes)]
    kv = torch.full((2, 4, 512, 3, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    for slot, (_, seq_len) in zip(slots, shapes, strict=True):
        kv[:, slot, :seq_len] = torch.randn(2, seq_len, 3, 64, device="cuda", dtype=torch.bfloat16)
    metadata = metadata_of(shapes, slots, slot_len=512)
    outs = [BACKENDS[name](q, k, v, kv.clone(), metadata) for name in ("torch", "flash_attn")]
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)


def metadata_of(shapes: list[tuple[int, int]], slots: list[int], slot_len: int) -> AttentionMetadata:
    """What the runner would build for sequences of (query_len, seq_len) in these slots."""

    def tensor(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device="cuda")

    queries, lens = [q for q, _ in shapes], [s for _, s in shapes]
    places = [slot * slot_len + p for slot, (q, s) in zip(slots, shapes, strict=True) for p in range(s - q, s)]
    offsets = [tensor([0, *accumulate(values)]) for values in (queries, lens)]
    table = tensor([[slot] for slot in slots])
    return AttentionMetadata(queries, lens, slots, *offsets, tensor(lens), table, tensor(places, torch.int64))
