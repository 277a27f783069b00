"""The KV cache in blocks: what is written is read, at the right place, through tables in any order; nothing else is."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams
from ..attention import BACKENDS, AttentionMetadata, causal_mask, write_kv
from ..block_manager import BlockManager, BlockMoves
from ..kv_cache import KVCache, block_bytes, kv_bytes_per_token
from ..model_runner import slots
from .script import new_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CPU = torch.device("cpu")
FILLERS = [float("nan"), 1e30]


@pytest.fixture(scope="module")
def llm():
    with new_engine(max_model_len=96, max_num_seqs=4, num_kv_blocks=24, trace_blocks=True) as llm:
        yield llm


def greedy(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def prompt(length: int, offset: int = 0) -> list[int]:
    return [(offset + 37 * i + i * i) % 250 for i in range(length)]


# ---------------------------------------------------------------- attention through block tables


class Step:
    """One step of sequences of (query_len, seq_len) over a pool of shuffled blocks, and its answer by definition.

    All that no token of these sequences owns holds `filler`. Heads: 4 of queries, 2 of keys and values.
    """

    def __init__(self, shapes: list[tuple[int, int]], block_size: int, filler: float, seed: int = 0):
        self.shapes, self.block_size = shapes, block_size
        generator = torch.Generator().manual_seed(seed)
        self.keys = [torch.randn(2, seq_len, 2, 8, generator=generator, dtype=torch.float64) for _, seq_len in shapes]
        self.queries = [torch.randn(q, 4, 8, generator=generator, dtype=torch.float64) for q, _ in shapes]
        counts = [-(-seq_len // block_size) for _, seq_len in shapes]
        blocks = random.Random(seed).sample(range(sum(counts) + 3), sum(counts))
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.kv = torch.full((2, sum(counts) + 3, block_size, 2, 8), filler, dtype=torch.float64)
        for (query_len, seq_len), kv, table in zip(shapes, self.keys, self.tables, strict=True):
            self.flat(self.kv)[:, slots(table, 0, seq_len - query_len, block_size)] = kv[:, : seq_len - query_len]

    def flat(self, kv: torch.Tensor) -> torch.Tensor:
        return kv.view(2, -1, 2, 8)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]:
        new = [kv[:, seq_len - q :] for kv, (q, seq_len) in zip(self.keys, self.shapes, strict=True)]
        k, v = torch.cat(new, dim=1)
        return torch.cat(self.queries), k, v, self.kv, metadata_of(self.shapes, self.tables, self.block_size, CPU)

    def answer(self) -> torch.Tensor:
        """Query by query and head by head, from the sequences' own K and V."""
        rows = []
        for q, (k, v), (query_len, seq_len) in zip(self.queries, self.keys, self.shapes, strict=True):
            for i in range(query_len):
                end = seq_len - query_len + i + 1
                heads = [(k[:end, h // 2] @ q[i, h] / math.sqrt(8)).softmax(0) @ v[:end, h // 2] for h in range(4)]
                rows.append(torch.stack(heads))
        return torch.stack(rows)

    def cache(self) -> torch.Tensor:
        """The cache as it must be afterwards: this step's K and V in their places, all else as it was."""
        after = self.kv.clone()
        for kv, table, (_, seq_len) in zip(self.keys, self.tables, self.shapes, strict=True):
            self.flat(after)[:, slots(table, 0, seq_len, self.block_size)] = kv
        return after


def metadata_of(shapes: list, tables: list[list[int]], block_size: int, device: torch.device) -> AttentionMetadata:
    """What the runner would build for sequences of (query_len, seq_len) with these tables."""

    def tensor(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    queries, lens = [q for q, _ in shapes], [s for _, s in shapes]
    places = [p for t, (q, s) in zip(tables, shapes, strict=True) for p in slots(t, s - q, s, block_size)]
    offsets = [tensor([0, *accumulate(values)]) for values in (queries, lens)]
    longest = max(map(len, tables))
    table = tensor([t + [0] * (longest - len(t)) for t in tables])
    return AttentionMetadata(queries, lens, *offsets, tensor(lens), table, tensor(places, torch.int64))


def bits(x: torch.Tensor) -> torch.Tensor:
    """NaN is not equal to itself, but its bits are."""
    return x.contiguous().view(torch.int64)


MIXED = [(1, 1), (1, 40), (3, 5), (17, 17), (5, 33), (1, 16), (2, 18)]


@pytest.mark.parametrize("filler", FILLERS)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_torch_equals_the_definition(block_size, filler):
    """A mixed step over shuffled blocks: a table read in the wrong order, or an unwritten place that is masked instead
    of left out, shows here. Foreign blocks, the rest of the last block and block 0 behind the tables hold poison."""
    step = Step(MIXED, block_size, filler)
    expected, after = step.answer(), step.cache()
    out = BACKENDS["torch"](*step.inputs())
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert bits(step.kv).equal(bits(after)), "K and V of this step's tokens are written, and nothing else"


shape = st.integers(1, 30).flatmap(lambda seq_len: st.tuples(st.integers(1, seq_len), st.just(seq_len)))


@given(shapes=st.lists(shape, min_size=1, max_size=5), block_size=st.integers(1, 20), seed=st.integers(0, 999))
def test_any_step_equals_the_definition(shapes, block_size, seed):
    """The same for any lengths and any block size, also such as are no power of two."""
    step = Step(shapes, block_size, float("nan"), seed)
    expected, after = step.answer(), step.cache()
    torch.testing.assert_close(BACKENDS["torch"](*step.inputs()), expected, rtol=1e-12, atol=1e-12)
    assert bits(step.kv).equal(bits(after))


@pytest.mark.parametrize("padding", [[0], [3], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_slot_minus_one_writes_nothing(padding):
    """-1 as an index is the last place of the pool, which belongs to somebody; clamped it is the first one."""
    step = Step([(2, 9), (1, 16), (2, 2)], 4, float("nan"))
    _, k, v, kv, metadata = step.inputs()
    places = metadata.slot_mapping.clone()
    places[padding] = -1
    after, kept = kv.clone(), [i for i in range(5) if i not in padding]
    step.flat(after)[0, places[kept]], step.flat(after)[1, places[kept]] = k[kept], v[kept]
    write_kv(k, v, kv, replace(metadata, slot_mapping=places))
    assert bits(kv).equal(bits(after))


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [[(1, 1)] * 3, [(1, 300), (1, 5), (1, 777)], [(7, 7), (1, 40), (33, 550), (5, 5)]])
def test_flash_attn_equals_torch(shapes):
    """The package's paged kernel, on random numbers: pure decode and mixed steps, blocks out of order, all else NaN."""
    pytest.importorskip("flash_attn")
    torch.manual_seed(len(shapes))
    total = sum(query_len for query_len, _ in shapes)
    q, k, v = (torch.randn(total, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (9, 3, 3))
    blocks = iter([5, 0, 7, 2, 9, 1, 8, 3, 6, 4])
    tables = [[next(blocks) for _ in range(-(-seq_len // 256))] for _, seq_len in shapes]
    kv = torch.full((2, 10, 256, 3, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    for table, (_, seq_len) in zip(tables, shapes, strict=True):
        old = torch.randn(2, seq_len, 3, 64, device="cuda", dtype=torch.bfloat16)
        kv.view(2, -1, 3, 64)[:, slots(table, 0, seq_len, 256)] = old
    metadata = metadata_of(shapes, tables, 256, q.device)
    outs = [BACKENDS[name](q, k, v, kv.clone(), metadata) for name in ("torch", "flash_attn")]
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)


def test_causal_mask_is_aligned_to_the_bottom_right():
    """Three queries on five keys: the first already sees three keys, the last sees all."""
    assert causal_mask(3, 5, CPU).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_attention_pairs_count_the_masks():
    """The counter is the number of ones in the causal masks of all sequences."""
    shapes = [(1, 1), (3, 5), (4, 4), (1, 9)]
    metadata = metadata_of(shapes, [[0], [1], [2], [3]], 16, CPU)
    assert metadata.attention_pairs == sum(int(causal_mask(q, s, CPU).sum()) for q, s in shapes)


# ---------------------------------------------------------------- blocks on the move


def numbered_cache(llm: LLM, num_blocks: int, num_host_blocks: int) -> KVCache:
    """Every number of device block b is b, of host block h it is 100 + h, plus a little that differs within a block."""
    cache = KVCache(llm.model_config, num_blocks, 4, CPU, num_host_blocks)
    for block in range(num_blocks):
        cache.data[:, :, block] = block + little(cache)
    for block in range(num_host_blocks):
        cache.host[block] = 100 + block + little(cache)
    return cache


def little(cache: KVCache) -> torch.Tensor:
    """Another small number for every place of a block: [layers, 2, block_size, num_kv_heads, head_dim]."""
    block = cache.data[:, :, 0]
    return torch.arange(block.numel(), dtype=torch.float64).view_as(block) / 1e6


def contents(cache: KVCache) -> tuple[list[int], list[int]]:
    """The number in each block of the device and of the host. A block that is torn apart has none and fails."""
    sides = cache.data.transpose(0, 2).transpose(1, 2), cache.host  # the block first in both
    found = [[block - little(cache) for block in side] for side in sides]
    assert all((x - x.round()).abs().max() < 1e-9 and x.round().unique().numel() == 1 for side in found for x in side)
    return tuple([round(x.mean().item()) for x in side] for side in found)


def test_out_in_and_copies_in_one_step(llm):
    """In this order: a block that goes out makes room for one that comes in, and that one may be copied at once."""
    cache = numbered_cache(llm, 5, 3)
    cache.move(BlockMoves(swap_out=[(0, 2), (3, 1)], swap_in=[(0, 0), (2, 4)], copies=[(0, 3), (4, 1)]))
    assert contents(cache) == ([100, 0, 2, 100, 0], [100, 3, 0])


def test_copies_do_not_follow_each_other(llm):
    """Copy-on-write copies of one step are independent: a target that is also a source gives what it held before."""
    cache = numbered_cache(llm, 4, 0)
    cache.move(BlockMoves(copies=[(0, 1), (1, 2), (0, 3)]))
    assert contents(cache) == ([0, 0, 1, 0], [])


def test_nothing_to_move(llm):
    """Most steps move nothing; an empty list of copies must not become an error."""
    cache = numbered_cache(llm, 2, 1)
    cache.move(BlockMoves())
    assert contents(cache) == ([0, 1], [100])
    assert not BlockMoves() and BlockMoves(copies=[(0, 1)])


@given(st.data())
def test_any_moves_are_carried_out_in_order(llm, data):
    """Against lists of numbers: out, in, copies."""
    device, host = list(range(6)), [100 + i for i in range(4)]
    blocks, places = st.permutations(range(6)), st.permutations(range(4))
    out = list(zip(data.draw(blocks), data.draw(places)[: data.draw(st.integers(0, 4))], strict=False))
    back = list(zip(data.draw(places), data.draw(blocks)[: data.draw(st.integers(0, 4))], strict=False))
    copies = list(zip(data.draw(st.lists(st.integers(0, 5), max_size=4)), data.draw(blocks), strict=False))
    cache = numbered_cache(llm, 6, 4)
    cache.move(BlockMoves(out, back, copies))
    for block, place in out:
        host[place] = device[block]
    for place, block in back:
        device[block] = host[place]
    before = list(device)
    for source, target in copies:
        device[target] = before[source]
    assert contents(cache) == (device, host)


def test_shared_blocks_come_back_shared(llm):
    """Swapped out and in by the block manager's own pairs, each sequence finds its numbers, and what two of them share
    was moved once."""
    manager, cache = BlockManager(6, 4, 6), numbered_cache(llm, 6, 6)
    manager.allocate("a", 10)
    manager.fork("a", "b")
    copies = manager.grow({"a": 11, "b": 12})
    cache.move(BlockMoves(copies=copies))
    seen = {name: [contents(cache)[0][block] for block in manager.block_table(name)] for name in "ab"}
    assert seen == {"a": [0, 1, 2], "b": [0, 1, 2]} and len(copies) == 1
    out = manager.swap_out(["a", "b"])
    assert len(out) == 4
    cache.move(BlockMoves(swap_out=out))
    cache.data.fill_(float("nan"))  # whoever takes the blocks meanwhile writes over them
    back = manager.swap_in(["a", "b"])
    cache.move(BlockMoves(swap_in=back))
    cache.data.nan_to_num_(nan=77.0)
    for name in "ab":
        blocks = manager.block_table(name)
        assert [round(cache.data[0, 0, block, 0, 0, 0].item()) for block in blocks] == seen[name]
    assert manager.block_table("a")[:2] == manager.block_table("b")[:2]
    manager.check_integrity()


@pytest.mark.gpu
def test_swaps_on_a_stream_of_their_own():
    """On the GPU out and in run beside the steps: what was computed before must go out, and what comes in must be there
    for the next step, a thousand times."""
    with LLM("tiny", device="cuda", dtype="float32") as llm:
        config = llm.model_config
    device = torch.device("cuda")
    cache = KVCache(config, 64, 16, device, 32)
    for i in range(1000):
        cache.data.fill_(i)
        cache.move(BlockMoves(swap_out=[(block, block) for block in range(32)]))
        cache.data.fill_(-1)
        cache.move(BlockMoves(swap_in=[(place, 63 - place) for place in range(32)], copies=[(40, 0)]))
        result = cache.data[:, :, [0, 1, 32, 63]].amin(dim=(0, 1, 3, 4, 5))
        cache.data.fill_(-2)
        assert result.tolist() == [i, -1, i, i]


# ---------------------------------------------------------------- in the engine


@pytest.mark.parametrize("filler", FILLERS)
def test_unwritten_places_are_never_read(llm, filler):
    """The rest of a last block holds anything; a masked NaN times zero is still NaN. Prompts around the block size,
    together and one after the other, with all blocks spoilt before each."""
    prompts = [prompt(length) for length in (1, 15, 16, 17)]
    llm.model_runner.kv_cache.data.zero_()
    clean = greedy(llm, prompts)
    llm.model_runner.kv_cache.data.fill_(filler)
    assert greedy(llm, prompts) == clean
    for one, tokens in zip(prompts, clean, strict=True):
        llm.model_runner.kv_cache.data.fill_(filler)
        assert greedy(llm, [one]) == [tokens]
    assert all(len(set(tokens)) > 3 for tokens in clean)


def test_only_the_places_of_the_step_are_written(llm):
    """A token written beside its place spoils a neighbour's block, and only the neighbour's text shows it."""
    cache = llm.model_runner.kv_cache
    cache.data.fill_(-7.0)
    llm.metrics.reset()
    greedy(llm, [prompt(17), prompt(2)], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    written = (cache.data != -7.0).flatten(4).any(-1).flatten(2)  # [layers, 2, slots]
    tables = sorted(llm.metrics.trace[-1].block_tables.values(), key=len)
    places = {*slots(tables[0], 0, 2 + 3, 16), *slots(tables[1], 0, 17 + 3, 16)}  # the last token's are never needed
    for layer in written.flatten(0, 1):
        assert set(layer.nonzero()[:, 0].tolist()) == places


def test_slot_mapping_follows_the_tables(llm, monkeypatch):
    """Positions and slots of two requests, a prompt and a decode step, by hand."""
    runner, seen = llm.model_runner, []
    original = runner.prepare
    monkeypatch.setattr(runner, "prepare", lambda *given: seen.append(original(*given)) or seen[-1])
    greedy(llm, [prompt(18), prompt(16)], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    positions, later = (inputs.positions for inputs in seen)
    first, second = (inputs.metadata for inputs in seen)
    a, b = first.block_table.tolist()
    assert len({*a, b[0]}) == 3 and b[1:] == [0]
    assert positions.tolist() == [*range(18), *range(16)] and later.tolist() == [18, 16]
    in_a = [a[0] * 16 + i for i in range(16)] + [a[1] * 16, a[1] * 16 + 1]
    assert first.slot_mapping.tolist() == in_a + [b[0] * 16 + i for i in range(16)]
    new_b = second.block_table[1, 1].item()
    assert second.slot_mapping.tolist() == [a[1] * 16 + 2, new_b * 16] and new_b not in {*a, b[0]}
    assert first.cu_seqlens_q.tolist() == [0, 18, 34] and second.cu_seqlens_k.tolist() == [0, 19, 36]
    assert second.seq_lens_tensor.tolist() == second.seq_lens == [19, 17]


def test_full_to_the_last_place(llm):
    """Filling the context ends with reason length; one place further would be a block that was never taken."""
    limit = llm.resolved.max_model_len
    assert limit % 16 == 0
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    long, short = llm.generate([prompt(limit - 3), prompt(4)], params, use_tqdm=False)
    assert len(long.outputs[0].token_ids) == 3
    assert long.outputs[0].finish_reason == "length"
    assert short.outputs[0].token_ids == greedy(llm, [prompt(4)], params)[0]
    with pytest.raises(ValueError, match=str(limit)):
        llm.generate([prompt(limit)])


def test_blocks_are_used_again():
    """Ten requests over six blocks: the second owner of a block sees nothing of the first."""
    prompts = [prompt(3 + 5 * (i % 4), offset=i) for i in range(10)]
    with new_engine(max_model_len=96, num_kv_blocks=6, max_num_seqs=3) as llm:
        together = greedy(llm, prompts)
        assert together == [greedy(llm, [one])[0] for one in prompts]
        assert llm.block_manager.num_free_blocks == 6


def test_bytes_are_those_allocated(llm):
    """head_dim is the config's own (64 here, not 96 / 4), K and V count, and so does every block."""
    cache = llm.model_runner.kv_cache
    assert cache.bytes_per_token == kv_bytes_per_token(2, 2, 64, torch.float64) == 2 * 2 * 2 * 64 * 8
    assert cache.data.nbytes == cache.bytes_per_token * 16 * 24 == block_bytes(llm.model_config, 16) * 24
    assert llm.metrics.kv_bytes_per_token == cache.bytes_per_token
    assert cache.host.nbytes == 0
    with new_engine(num_kv_blocks=8, num_swap_blocks=5, preemption_mode="swap", block_size=32) as other:
        assert other.model_runner.kv_cache.host.nbytes == block_bytes(llm.model_config, 32) * 5
        assert other.block_manager.num_swap_blocks == other.block_manager.num_free_swap_blocks == 5
