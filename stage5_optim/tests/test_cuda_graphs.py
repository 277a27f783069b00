"""CUDA graphs: steps whose tokens are rows, padded to the sizes there are graphs for, and replayed.

On a CPU the padded steps run without a recording, which shows whether padding rows are harmless. On a GPU the recording
is compared with the same step run as it is.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams, model_runner
from ..batch import Scheduled
from ..cuda_graphs import DecodeGraphs, GraphInputs, graph_sizes
from ..model_runner import ModelRunner
from ..sampling import sample
from ..sequence import Sequence
from ..speculative import SpeculativeConfig
from ..staging import TableRows
from ..step_inputs import StepInputs, StepPlan, count_pairs, empty_arrays, fill_rows, last_rows, plan_step
from .helpers import make_checkpoint
from .script import new_engine
from .test_batching import some_prompt
from .test_staging import define, scheduled_strategy

CPU = torch.device("cpu")
GREEDY = dict(temperature=0.0, ignore_eos=True)

# sizes


@pytest.mark.parametrize("most", range(1, 301))
def test_every_decode_step_has_a_graph(most):
    """The largest size is max_num_seqs itself: with a list that ends below it the fullest steps run eagerly."""
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    ladder = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, *range(80, 400, 16)]
    assert sizes[:-1] == [size for size in ladder if size < most]
    for count in range(1, most + 1):
        rows = next(size for size in sizes if size >= count)
        assert rows - count <= (7 if count <= 64 else 15) and (count > 8 or rows < 2 * count)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 40, 64, 65, 80, 100])
def test_fit_at_below_and_above_each_size(most):
    graphs = DecodeGraphs(lambda inputs: inputs.input_ids, graph_sizes(most), 4, 64, CPU)
    for before, size in zip([0, *graphs.sizes], graphs.sizes, strict=False):
        assert graphs.fit(size) == size and graphs.fit(before + 1) == size
    assert graphs.fit(most + 1) is None


# every token is a row, and the rest is padding

CONSTANTS = ("rows", "cu_seqlens_q", "cu_seqlens_k")
PER_SAMPLE = ("seeds", "output_positions", "inverse_temperatures")


def spoil(arrays: dict[str, np.ndarray]) -> None:
    """What an earlier step may have left: tokens, places, lengths and blocks that are nobody's."""
    for name, array in arrays.items():
        if name not in CONSTANTS:
            array[...] = 77_777


def assert_rows(arrays: dict[str, np.ndarray], items: list[Scheduled], block_size: int) -> None:
    """The arrays of a graph hold this step, a row for each token, and padding behind it."""
    wanted = define(items, block_size)
    count, size = len(wanted["input_ids"]), len(arrays["input_ids"])
    more = [0] * (size - count)
    assert arrays["input_ids"].tolist() == wanted["input_ids"] + more
    assert arrays["positions"].tolist() == wanted["positions"] + more
    assert arrays["slot_mapping"].tolist() == wanted["slot_mapping"] + [-1 for _ in more], "0 would be a real place"
    assert arrays["seq_lens"].tolist() == [position + 1 for position in wanted["positions"]] + more
    for name in PER_SAMPLE:
        by_row = dict(zip(wanted["rows"], wanted[name], strict=True))
        assert arrays[name].tolist() == [by_row.get(row, 0) for row in range(size)], name
    tables = [item.block_table for item in items for _ in range(item.num_tokens)]
    for table, row, length in zip(tables, arrays["block_table"], arrays["seq_lens"].tolist(), strict=False):
        used = -(-length // block_size)  # nobody reads what is behind that
        assert row[:used].tolist() == table[:used]


def num_tokens(items: list[Scheduled]) -> int:
    return sum(item.num_tokens for item in items)


def longest_table(items: list[Scheduled]) -> int:
    return max(len(item.block_table) for item in items)


@given(
    steps=st.lists(scheduled_strategy(may_fork=False), min_size=1, max_size=3),
    more=st.integers(0, 9),
    wider=st.integers(0, 5),
)
def test_every_token_is_a_row_and_padding_does_nothing(steps, more, wider):
    """Any mixture of decodes and chunks, in arrays full of what was there before: each row's id, place and length, the
    blocks up to there, and noise where a sequence's last token is. A row behind them writes and reads nothing."""
    tables = TableRows()
    size = max(num_tokens(items) for items, _ in steps) + more
    arrays = empty_arrays(size, max(longest_table(items) for items, _ in steps) + wider)
    kinds = {name: (array.dtype, array.shape, array.ctypes.data) for name, array in arrays.items()}
    spoil(arrays)
    for items, block_size in steps:
        assert fill_rows(arrays, plan_step(items, tables, block_size)) == num_tokens(items)
        assert_rows(arrays, items, block_size)
        assert {name: (array.dtype, array.shape, array.ctypes.data) for name, array in arrays.items()} == kinds


@given(size=st.integers(1, 40), width=st.integers(1, 9))
def test_a_graph_without_a_step_is_padding(size, width):
    """What is recorded: it must write nowhere. The dtypes are those that a step has without a graph."""
    arrays = empty_arrays(size, width)
    assert (arrays["slot_mapping"] == -1).all() and (arrays["rows"] == np.arange(size)).all()
    assert (arrays["cu_seqlens_q"] == np.arange(size + 1)).all(), "a padding row is one token too"
    for name in ("input_ids", "positions", "seq_lens", "cu_seqlens_k", "block_table", *PER_SAMPLE):
        assert not arrays[name].any()
    assert arrays["block_table"].shape == (size, width)
    int32 = {"cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table"}
    for name, array in arrays.items():
        wanted = "int32" if name in int32 else "float32" if name == "inverse_temperatures" else "int64"
        assert str(array.dtype) == wanted, name


def as_arrays(inputs: StepInputs) -> dict[str, np.ndarray]:
    """What the device reads, by the names of empty_arrays. It is the same memory."""
    names = ("input_ids", "positions", "rows", *PER_SAMPLE)
    found = {name: getattr(inputs, name).numpy() for name in names}
    names = ("slot_mapping", "cu_seqlens_q", "cu_seqlens_k", "block_table")
    found |= {name: getattr(inputs.metadata, name).numpy() for name in names}
    return found | {"seq_lens": inputs.metadata.seq_lens_tensor.numpy()}


def addresses(inputs: StepInputs) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in as_arrays(inputs).items()}


def test_the_host_has_two_buffers_that_take_turns():
    """Device memory is one place for ever, and the two on the host overlap neither it nor each other."""
    memory = GraphInputs(5, 3, 64, CPU)
    first, second, third, fourth = (memory.next_arrays() for _ in range(4))
    assert first is third and second is fourth
    pieces = [first, second, as_arrays(memory.inputs)]
    spans = sorted((x.ctypes.data, x.ctypes.data + x.nbytes) for one in pieces for x in one.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for arrays in pieces:  # nothing was sent but what is there from the start
        for name, array in empty_arrays(5, 3).items():
            assert arrays[name].dtype == array.dtype and (arrays[name] == array).all()


@given(steps=st.lists(scheduled_strategy(may_fork=False), min_size=2, max_size=6))
def test_what_was_sent_is_readable_until_the_step_after(steps):
    """The copy of a step may not be done when the next one is prepared: its memory on the host must be as it was. The
    one before that is done."""
    size = max(num_tokens(items) for items, _ in steps)
    width = max(longest_table(items) for items, _ in steps)
    graphs = DecodeGraphs(lambda inputs: inputs.positions, [size], width, 64, CPU)
    memory, tables, sent = graphs._memory[size], TableRows(), []
    for items, block_size in steps:
        inputs = graphs.prepare(plan_step(items, tables, block_size, size))
        host = memory._hosts[memory._turn]
        if sent:
            before, content = sent[-1]
            assert before.data_ptr() != host.data_ptr() and before.equal(content), "it was overwritten too early"
        assert memory._device.equal(host), "what was filled is not what was sent"
        assert_rows(as_arrays(inputs), items, block_size)
        assert inputs.metadata.seq_lens == inputs.metadata.seq_lens_tensor.tolist()
        sent.append((host, host.clone()))


def some_step(lens: list[tuple[int, int]], block_size: int = 4) -> list[Scheduled]:
    """Sequences of which so many tokens are computed, and so many more scheduled, all that they miss."""
    items, block = [], 1
    for i, (start, count) in enumerate(lens):
        params = SamplingParams(temperature=0.5 * (i % 3))
        seq = Sequence(f"r{i}", some_prompt(start + count, i), params, 2**64 - 1 - i, (), 50, None)
        seq.num_computed_tokens = start
        blocks = -(-(start + count) // block_size)
        items.append(Scheduled(seq, count, count, 0, list(range(block, block + blocks))))
        block += blocks
    return items


def steps_up_to(size: int) -> list[list[Scheduled]]:
    """Mixtures that fill the graph of that size, or nearly."""
    found = [some_step([(5, 1)]), some_step([(3 + i, 1) for i in range(size)])]
    if size > 2:
        found += [
            some_step([(0, size)]),
            some_step([(9, 1), (2, size - 2)]),
            some_step([(0, 1), (7, 1), (0, size - 2)]),
        ]
    return found


def test_each_graph_reads_in_its_own_memory():
    """Where its tensors are never changes, all of it is as large as the graph, and sizes do not touch each other."""
    graphs = DecodeGraphs(lambda inputs: inputs.positions, graph_sizes(20), 8, 64, CPU)
    places = {size: addresses(graphs._memory[size].inputs) for size in graphs.sizes}
    spans = sorted((x._device.data_ptr(), x._device.data_ptr() + len(x._device)) for x in graphs._memory.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for size, memory in graphs._memory.items():
        first = memory._device.data_ptr()
        assert all(first <= place < first + len(memory._device) for place in places[size].values())
    tables, sent = TableRows(), {}
    for round in range(max(len(steps_up_to(size)) for size in graphs.sizes)):
        for size in graphs.sizes:
            items = steps_up_to(size)[round % len(steps_up_to(size))]
            memory = graphs._memory[size]
            memory._device.fill_(255)  # whatever is read there was sent
            inputs, sent[size] = graphs.prepare(plan_step(items, tables, 4, size)), items
            assert addresses(inputs) == addresses(memory.inputs) == places[size]
            assert inputs.metadata.query_lens == memory.inputs.metadata.query_lens == [1] * size
            assert memory.inputs.metadata.seq_lens == [64] * size, "what is recorded must do for the longest context"
            for name, array in as_arrays(inputs).items():
                empty = empty_arrays(size, 8)[name]
                assert array.dtype == empty.dtype and array.shape == empty.shape
                assert name not in CONSTANTS or (array == empty).all()
        for size, items in sent.items():
            assert_rows(as_arrays(graphs._memory[size].inputs), items, 4)


class Recording:
    """Stands for torch.cuda.CUDAGraph: what was done between begin and end is done again, on the same tensors."""

    def __init__(self):
        self.launches = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


def test_what_is_recorded_and_what_a_replay_reads(monkeypatch):
    """Largest first, each once to warm up and once to record, in one pool, on the memory that steps are sent to. Then
    nothing of `step` is called any more."""
    active, calls = [], []

    @contextmanager
    def recording(graph: Recording, pool: str, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("the pool", "thread_local") and not active
        active.append(graph)
        yield
        active.clear()

    def step(inputs: StepInputs) -> torch.Tensor:
        out = torch.empty_like(inputs.positions)
        calls.append((len(out), bool(active)))

        def launch() -> None:
            out.copy_(
                1000 * inputs.positions + 10 * inputs.metadata.seq_lens_tensor + inputs.metadata.block_table[:, 0]
            )

        launch()
        for graph in active:
            graph.launches.append(launch)
        return out

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs, tables = DecodeGraphs(step, graph_sizes(20), 8, 64, CPU), TableRows()
    graphs._capture_all(step)
    assert calls == [(size, recorded) for size in reversed(graphs.sizes) for recorded in (False, True)]
    calls.clear()
    for size in [*graphs.sizes, *reversed(graphs.sizes)]:
        for items in steps_up_to(size):
            inputs = graphs.prepare(plan_step(items, tables, 4, size))
            assert inputs.metadata.seq_lens == [64] * size, "the host's numbers are those of the recording"
            wanted = [1000 * p + 10 * (p + 1) for item in items for p in tokens_of(item)]
            blocks = [item.block_table[0] for item in items for _ in tokens_of(item)]
            wanted = [number + block for number, block in zip(wanted, blocks, strict=True)]
            assert graphs.replay(size, inputs, step).tolist()[: len(wanted)] == wanted
    assert not calls


def tokens_of(item: Scheduled) -> range:
    """The positions that it computes."""
    return range(item.seq.num_computed_tokens, item.seq.num_computed_tokens + item.num_tokens)


# padded steps in the engine


@pytest.fixture
def engine():
    made: list[LLM] = []

    def make(**options) -> LLM:
        made.append(new_engine(**dict(max_model_len=64, block_size=4, num_kv_blocks=480, max_num_seqs=40) | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def some_params(i: int) -> SamplingParams:
    """Greedy and sampled rows, and rows that ask for more than a kernel can do."""
    options = [
        {},
        {},
        dict(top_k=20),
        dict(top_p=0.7),
        dict(repetition_penalty=1.3),
        dict(logprobs=2),
        dict(min_tokens=3),
    ]
    return SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=5, ignore_eos=True, **options[i % 7])


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams] | SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def eager_tokens():
    """What 40 requests answer, each alone as far as the arithmetic is concerned."""
    with new_engine(max_model_len=64, max_num_seqs=8, enforce_eager=True) as llm:
        return tokens(llm, [some_prompt(1 + i % 9, i) for i in range(40)], [some_params(i) for i in range(40)])


@pytest.mark.parametrize("is_async", [False, True])
def test_every_batch_size_gives_the_tokens_of_eager_steps(engine, eager_tokens, is_async):
    """1 to 40 sequences. Whatever nobody wrote is NaN: a padding row that reads or writes a real place would show."""
    llm = engine(enforce_eager=False, async_scheduling=is_async)
    for count in range(1, 41):
        spoil_all(llm)
        llm.metrics.reset()
        prompts = [some_prompt(1 + i % 9, i) for i in range(count)]
        assert tokens(llm, prompts, [some_params(i) for i in range(count)]) == eager_tokens[:count]
        rows = [sum(map(len, prompts)), *[count] * 4]  # all prompts in one step, then four times a token for each
        padding = [fitting(some, 40) - some for some in rows if some <= 40]
        assert (llm.metrics.graph_replays, llm.metrics.padding_tokens) == (len(padding), sum(padding))


def fitting(num_rows: int, most: int) -> int:
    return next(size for size in graph_sizes(most) if size >= num_rows)


def spoil_all(llm: LLM) -> None:
    """NaN wherever nobody has written, and inputs that were left behind."""
    llm.model_runner.kv_cache.data.fill_(float("nan"))
    for memory in llm.model_runner.graphs._memory.values():
        memory._device.numpy()[:] = 255
        for arrays in memory._arrays:
            spoil(arrays)


@pytest.mark.parametrize("lens, padding", [([2, 3, 4, 5, 6], [3, 3, 3, 3]), ([1, 2, 3], [2, 1, 1, 1, 1])])
def test_padding_writes_nowhere(engine, monkeypatch, lens, padding):
    """After each padded step the cache differs from before in the slots of its tokens only, bit by bit; a slot of -1
    taken as an index is the last place of the pool, and one of 0 the first."""
    llm = engine(enforce_eager=False, num_kv_blocks=40, max_num_seqs=8)
    cache, launch, seen = llm.model_runner.kv_cache, ModelRunner.launch, []
    cache.data.copy_(torch.randn(cache.data.shape, dtype=cache.data.dtype))

    def watched(self, batch):
        before = cache.data.clone()
        step = launch(self, batch)
        if step.num_padding:
            changed = (cache.data.view(torch.int64) != before.view(torch.int64)).flatten(4).any(-1).any(0).any(0)
            places = [(at, item.block_table) for item in batch.scheduled for at in tokens_of(item)]
            wanted = sorted((table[at // 4], at % 4) for at, table in places)
            assert sorted(map(tuple, changed.nonzero().tolist())) == wanted
            seen.append(step.num_padding)
        return step

    monkeypatch.setattr(ModelRunner, "launch", watched)
    tokens(
        llm, [some_prompt(length, i) for i, length in enumerate(lens)], [some_params(2 * i) for i in range(len(lens))]
    )
    assert seen == padding


def watch_launches(monkeypatch) -> list[tuple[list[Scheduled], int, model_runner.LaunchedStep]]:
    """(what was scheduled, query-key pairs, the step) of every launch from now on."""
    launch, seen = ModelRunner.launch, []

    def watched(self, batch):
        pairs = count_pairs(batch.scheduled)
        seen.append((batch.scheduled, pairs, launch(self, batch)))
        return seen[-1][-1]

    monkeypatch.setattr(ModelRunner, "launch", watched)
    return seen


def test_replays_and_padding_by_hand(engine, monkeypatch):
    """Prompts of 2, 1 and 2 tokens that get 2, 4 and 4: five rows in the graph of 6, then 3, 2 and 2 in those of 4, 2
    and 2. The last token of each prompt is in row 1, 2 and 4."""
    seen = watch_launches(monkeypatch)
    llm = engine(enforce_eager=False, max_num_seqs=6)
    params = [SamplingParams(**GREEDY, max_tokens=count) for count in (2, 4, 4)]
    tokens(llm, [[1, 2], [3], [5, 6]], params)
    assert [record.graph_replays for record in llm.metrics.trace] == [1, 1, 1, 1]
    assert [record.padding_tokens for record in llm.metrics.trace] == [1, 1, 0, 0]
    assert (llm.metrics.graph_replays, llm.metrics.padding_tokens) == (4, 2)
    assert [step.rows for _, _, step in seen] == [[1, 2, 4], [0, 1, 2], [0, 1], [0, 1]]
    assert [step.num_padding for _, _, step in seen] == [1, 1, 0, 0]


def test_a_placeholder_names_the_row_of_the_last_token(engine, monkeypatch):
    """A text that runs, a whole prompt and the first piece of a long one in a step of 8 rows: tokens are in rows 0 and
    3, and the next step reads them there. Without a graph they are in rows 0 and 1."""
    for eager, rows in ((False, [[2], [0, 3], [0, 1, 7]]), (True, [[0], [0, 1], [0, 1, 2]])):
        seen = watch_launches(monkeypatch)
        llm = engine(enforce_eager=eager, async_scheduling=True, max_num_seqs=8, max_num_batched_tokens=8)
        one = SamplingParams(**GREEDY, max_tokens=6)
        llm.add_request([1, 2, 3], one)
        llm.step()
        llm.add_request([4, 5, 6], one)
        llm.add_request(some_prompt(10), one)
        llm.step()
        assert [item.num_tokens for item in seen[1][0]] == [1, 3, 4]
        assert [item.seq.token_ids[-1] for item in seen[1][0][:2]] == [row - 8 for row in rows[1]]
        llm.step()
        assert [step.rows for _, _, step in seen] == rows
        while llm.has_unfinished_requests():
            llm.step()
        monkeypatch.undo()


@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(model="tiny")])
def test_graphs_and_their_runner_do_not_hold_each_other(speculative):
    """An engine that nobody holds is gone at once, without `close` and without Python's collector: the next one needs
    its memory."""
    llm = new_engine(enforce_eager=False, async_scheduling=speculative is None, speculative=speculative)
    assert len(tokens(llm, [[1, 2, 3]], SamplingParams(**GREEDY, max_tokens=9))[0]) == 9
    assert llm.metrics.graph_replays
    held = [weakref.ref(llm), weakref.ref(llm.model_runner), weakref.ref(llm.model_runner.kv_cache.data)]
    gc.disable()
    try:
        del llm
        assert [one() for one in held] == [None] * 3
    finally:
        gc.enable()


def test_no_graphs_no_replays(engine):
    for llm in (engine(), engine(enforce_eager=True)):
        tokens(llm, [[1, 2], [3]], SamplingParams(**GREEDY, max_tokens=3))
        assert (llm.metrics.graph_replays, llm.metrics.padding_tokens) == (0, 0)
        assert llm.model_runner.graphs is None


def test_forks_take_no_graph(engine):
    """A step in which samples fork samples several times from a row: no graph, even for a prompt of one token, which
    looks like a decode step. Before and after that they take one, together with others' prompts."""
    llm = engine(enforce_eager=False, max_num_seqs=6, max_num_batched_tokens=6)
    forks = SamplingParams(n=3, max_tokens=3, seed=1, ignore_eos=True)
    llm.add_request([7], forks, request_id="forks")
    llm.step()
    llm.add_request([1, 2, 3], SamplingParams(**GREEDY, max_tokens=2), request_id="prompt")
    while llm.has_unfinished_requests():
        llm.step()
    llm.add_request(some_prompt(8), forks, request_id="pieces")
    while llm.has_unfinished_requests():
        llm.step()
    assert [(record.tokens, record.graph_replays, record.padding_tokens) for record in llm.metrics.trace] == [
        ({"forks": 1}, 0, 0),
        ({"forks": 3, "prompt": 3}, 1, 0),
        ({"forks": 3, "prompt": 1}, 1, 0),
        ({"pieces": 6}, 1, 0),
        ({"pieces": 2}, 0, 0),
        ({"pieces": 3}, 1, 1),
        ({"pieces": 3}, 1, 1),
    ]


@pytest.mark.parametrize(
    "lens, size",
    [
        ([(3, 1)], 1),
        ([(3, 1)] * 6, 6),
        ([(3, 1)] * 7, None),
        ([(0, 3)], 4),
        ([(0, 6)], 6),
        ([(0, 7)], None),
        ([(9, 1), (0, 1), (2, 4)], 6),
        ([(9, 1), (0, 2), (2, 4)], None),
    ],
)
def test_what_fits_into_a_graph(engine, lens, size):
    """Tokens are counted, whoever's they are."""
    runner = engine(enforce_eager=False, max_num_seqs=6).model_runner
    items = some_step(lens)
    assert runner.graph_size(items) == size
    forks = replace(items[0], forks=(items[0].seq,))
    assert runner.graph_size([*items[1:], forks]) is None


@pytest.mark.parametrize(
    "lens, pairs",
    [([(0, 5)], 15), ([(4, 2)], 11), ([(9, 1), (0, 3)], 16), ([(0, 2), (20, 1)], 24), ([(0, 1), (0, 2), (1, 2)], 9)],
)
def test_pieces_with_long_contexts_take_no_graph(engine, monkeypatch, lens, pairs):
    """There each token reads its context by itself; the kernel for chunks reads it once. Pairs by hand: up to the limit
    and one more. A step of single tokens has nothing to win there, however long the contexts."""
    runner = engine(enforce_eager=False, max_num_seqs=6).model_runner
    items = some_step(lens)
    assert count_pairs(items) == pairs
    pairs = count_pairs([item for item in items if item.num_tokens > 1])  # what decodes is no reason
    monkeypatch.setattr(model_runner, "MAX_PAIRS_IN_GRAPH", pairs)
    assert runner.graph_size(items) == fitting(num_tokens(items), 6)
    monkeypatch.setattr(model_runner, "MAX_PAIRS_IN_GRAPH", pairs - 1)
    assert runner.graph_size(items) is None
    singles = some_step([(start + count - 1, 1) for start, count in lens])
    monkeypatch.setattr(model_runner, "MAX_PAIRS_IN_GRAPH", 0)
    assert runner.graph_size(singles) == fitting(len(lens), 6)


def test_the_pair_limit_in_the_engine(engine, monkeypatch):
    """Prompts of 5 and 6 tokens have 15 and 21 pairs; a limit of 20 is between them. Later steps have more, by one
    token each. A prompt that is longer than the largest graph runs eagerly whatever the limit is."""
    llm = engine(enforce_eager=False, max_num_seqs=6)
    for limit, wanted in ((20, {5: 1, 6: 0, 7: 0}), (21, {5: 1, 6: 1, 7: 0}), (0, {1: 1, 2: 0}), (10**9, {6: 1, 7: 0})):
        monkeypatch.setattr(model_runner, "MAX_PAIRS_IN_GRAPH", limit)
        for length, first in wanted.items():
            llm.metrics.reset()
            tokens(llm, [some_prompt(length)], SamplingParams(**GREEDY, max_tokens=20))
            assert [record.graph_replays for record in llm.metrics.trace] == [first] + [1] * 19
            assert llm.metrics.trace[0].attention_pairs == length * (length + 1) // 2


MIXED = [
    dict(),
    dict(async_scheduling=True),
    dict(async_scheduling=True, enable_prefix_caching=True),
    dict(num_kv_blocks=20, watermark=0.0, async_scheduling=True, enable_prefix_caching=True),
    dict(num_kv_blocks=16, watermark=0.0, preemption_mode="swap", num_swap_blocks=40, async_scheduling=True),
    dict(policy="prefill_first", async_scheduling=True, enable_chunked_prefill=True),
]


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 31 tokens, some with a common beginning, some with two samples, some that stop early."""
    found = []
    for i in range(14):
        prompt = [*some_prompt((0, 0, 13)[i % 3]), *some_prompt(1 + 5 * i % 19, i)]
        stops = tuple(range(i % 3, 256, 3)) if i % 2 else ()
        found.append((prompt, replace(some_params(i), n=1 + (i % 5 == 1), stop_token_ids=stops, max_tokens=12)))
    return found


@pytest.fixture(scope="module")
def mixed_alone():
    """Their outputs from eager steps, each request by itself."""
    with new_engine(max_model_len=64, max_num_seqs=8, enforce_eager=True) as llm:
        return [llm.generate([prompt], params, use_tqdm=False)[0].outputs for prompt, params in mixed_requests()]


@pytest.mark.parametrize("options", MIXED)
def test_pieces_of_prompts_as_rows_are_what_eager_steps_compute(engine, mixed_alone, monkeypatch, options):
    """No step has more tokens than the largest graph has rows, so all but forks are rows: pieces of prompts among
    running texts, several rows of a sequence, its blocks found, copied, lost and computed again. A row that reads what
    has not been written finds NaN."""
    llm = engine(enforce_eager=False, max_num_seqs=12, max_num_batched_tokens=12, **options)
    spoil_all(llm)
    seen, done = watch_launches(monkeypatch), {}
    for i, (prompt, params) in enumerate(mixed_requests()):
        llm.add_request(prompt, params, request_id=str(i))
        if i % 4 == 0:
            done |= {output.request_id: output.outputs for output in llm.step()}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output.outputs for output in llm.step()}
    for i, alone in enumerate(mixed_alone):
        for ours, theirs in zip(done[str(i)], alone, strict=True):
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason), i
            for mine, wanted in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert [x.logprob for x in mine.values()] == pytest.approx(
                    [x.logprob for x in wanted.values()], abs=1e-9
                )
    for items, pairs, step in seen:
        count = num_tokens(items)
        has_forks = any(item.forks for item in items)
        assert step.num_padding == (None if has_forks else fitting(count, 12) - count)
        assert step.attention_pairs == pairs
        assert has_forks or step.rows == last_rows(items)
    pieces = [items for items, _, step in seen if step.num_padding is not None and num_tokens(items) > len(items)]
    together = any(items[0].is_decode and items[-1].num_tokens > 1 for items in pieces)
    is_mixed = options.get("policy") is None
    assert len(pieces) >= 8 and together == is_mixed
    m = llm.metrics
    assert m.cow_copies
    assert m.preemptions or "num_kv_blocks" not in options
    assert m.prefix_hit_tokens or not options.get("enable_prefix_caching")
    assert m.discarded_tokens or not (is_mixed and options.get("async_scheduling"))


def test_a_batch_that_no_graph_holds_runs_eagerly(engine):
    """Nobody is cut off, and no graph of a smaller size is taken."""
    llm = engine(enforce_eager=False, max_num_seqs=6)
    wanted = tokens(llm, [[i] * 3 for i in range(6)], SamplingParams(**GREEDY, max_tokens=4))
    llm.model_runner.make_graphs([1, 2, 4], 64, llm.model_config.vocab_size)
    llm.metrics.reset()
    assert tokens(llm, [[i] * 3 for i in range(6)], SamplingParams(**GREEDY, max_tokens=4)) == wanted
    assert llm.metrics.graph_replays == 0
    assert tokens(llm, [[i] * 3 for i in range(3)], SamplingParams(**GREEDY, max_tokens=4)) == wanted[:3]
    assert (llm.metrics.graph_replays, llm.metrics.padding_tokens) == (3, 3)


def test_what_a_long_table_left_is_not_read(engine):
    """Long sequences in the rows, then short ones: the blocks of the long ones, still in the rows, are NaN by then, or
    lie outside of the pool. Padding has slot -1 and length 0."""
    options = dict(max_num_seqs=4, block_size=1, num_kv_blocks=200)
    llm, eager = engine(enforce_eager=False, **options), engine(enforce_eager=True, **options)
    tokens(llm, [some_prompt(30), some_prompt(30, 3), some_prompt(30, 5)], SamplingParams(**GREEDY, max_tokens=20))
    sent, prepare = [], llm.model_runner.graphs.prepare

    def watched(plan):
        inputs = prepare(plan)
        sent.append({name: array.copy() for name, array in as_arrays(inputs).items()})
        return inputs

    llm.model_runner.graphs.prepare = watched
    for spoilt in (False, True):
        llm.model_runner.kv_cache.data.fill_(float("nan"))
        if spoilt:
            spoil_all(llm)
        short = [[[5], [6, 7], [8]], SamplingParams(**GREEDY, max_tokens=3)]
        assert tokens(llm, *short) == tokens(eager, *short)
    assert [arrays["seq_lens"].tolist() for arrays in sent] == 2 * [[1, 1, 2, 1], [2, 3, 2, 0], [3, 4, 3, 0]]
    assert [arrays["slot_mapping"][3] == -1 for arrays in sent] == 2 * [False, True, True]
    assert sent[1]["block_table"][0, 30], "nothing was left: this tests nothing"


def test_logits_of_a_replay_are_kept_for_logprobs(engine):
    """The next replay overwrites them: who has asked for logprobs must get those of its own step, also when the next
    step has been launched by then."""
    outputs = []
    for eager, overlap in ((True, False), (False, False), (False, True)):
        llm = engine(enforce_eager=eager, async_scheduling=overlap)
        params = SamplingParams(**GREEDY, max_tokens=6, logprobs=3)
        outputs.append([o.outputs[0].logprobs for o in llm.generate([[1, 2], [3], [4]], params, use_tqdm=False)])
    for other in outputs[1:]:
        for one, two in zip(outputs[0], other, strict=True):
            for row, row2 in zip(one, two, strict=True):
                assert list(row) == list(row2)
                assert [x.logprob for x in row.values()] == pytest.approx([x.logprob for x in row2.values()], abs=1e-9)


# on a GPU


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """head_dim 64, which every build of every attention kernel has."""
    return make_checkpoint(tmp_path_factory.mktemp("graphs"), "qwen3", hidden_size=256, head_dim=64)


@pytest.fixture
def on_gpu(checkpoint):
    """Makes engines on the GPU in float32 that are closed after the test."""
    pytest.importorskip("triton", reason="needs the package triton")
    made: list[LLM] = []

    def make(**options) -> LLM:
        defaults = dict(device="cuda", dtype="float32", max_model_len=128, num_kv_blocks=1500, max_num_seqs=80, seed=0)
        made.append(LLM(str(checkpoint), **defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def assert_same_choices(ours: list, theirs: list, llm: LLM, bound: float = 1e-3) -> None:
    """Equal tokens, or a first difference where the two best logits of the eager engine are within `bound`: kernels of
    other shapes round otherwise. `ours` and `theirs`: RequestOutputs of greedy requests, theirs with two logprobs."""
    for one, other in zip(ours, theirs, strict=True):
        mine, wanted = one.outputs[0].token_ids, other.outputs[0].token_ids
        different = [i for i, (a, b) in enumerate(zip(mine, wanted, strict=True)) if a != b]
        if different:
            at = different[0]
            best = sorted((entry.logprob for entry in other.outputs[0].logprobs[at].values()), reverse=True)
            gap = best[0] - best[1]
            message = f"token {at} is {mine[at]}, eagerly {wanted[at]}; the two best are {gap:.1e} apart"
            print(message)
            assert gap <= bound, message


BATCHES = sorted({*range(1, 41), *(size + more for size in graph_sizes(80) for more in (-1, 0, 1))} & set(range(1, 81)))


@pytest.mark.gpu
@pytest.mark.parametrize("is_async", [False, True])
def test_gpu_every_batch_size(on_gpu, is_async):
    """Every size up to 40, and one less, as many and one more than each graph has rows: greedy, with graphs and
    without. A captured launch that is too small for the batch, or a padding row with effect, shows."""
    eager, graphs = on_gpu(enforce_eager=True, async_scheduling=False), on_gpu(async_scheduling=is_async)
    assert graphs.features.cuda_graphs, graphs.features
    for count in BATCHES:
        prompts = [[(7 * i + j * j) % 128 for j in range(2 + i % 37)] for i in range(count)]
        plain = SamplingParams(**GREEDY, max_tokens=8)
        looked_at = SamplingParams(**GREEDY, max_tokens=8, logprobs=2)
        graphs.metrics.reset()
        ours = graphs.generate(prompts, plain, use_tqdm=False)
        assert_same_choices(ours, eager.generate(prompts, looked_at, use_tqdm=False), eager)
        rows = [sum(map(len, prompts)), *[count] * 7]  # all prompts in one step, then seven times a token for each
        padding = [fitting(some, 80) - some for some in rows if some <= 80]
        assert (graphs.metrics.graph_replays, graphs.metrics.padding_tokens) == (len(padding), sum(padding))


@pytest.mark.gpu
def test_gpu_sampled_tokens(on_gpu):
    """With temperature: noise hangs on seed and position, so the graph draws what the eager step draws. A near tie of
    logits plus noise cannot be seen from outside: one token in a thousand may differ, and what follows it."""
    eager, graphs = on_gpu(enforce_eager=True), on_gpu()
    same = total = 0
    for count in (1, 3, 8, 9, 40, 65, 80):
        prompts = [[(5 * i + j) % 128 for j in range(3 + i % 11)] for i in range(count)]
        params = [SamplingParams(temperature=1.0, seed=2**63 + i, max_tokens=8, ignore_eos=True) for i in range(count)]
        for ours, theirs in zip(tokens(graphs, prompts, params), tokens(eager, prompts, params), strict=True):
            total += 1
            same += ours == theirs
    assert same >= 0.99 * total, f"{total - same} of {total} outputs differ"


def decoding(llm: LLM, count: int, chunk: int = 0) -> list[Scheduled]:
    """A plan of one step of so many tokens: the next one of texts whose prompts have been computed, and a whole prompt
    of `chunk` tokens, if that is not 0."""
    for i in range(count - chunk):
        one = SamplingParams(temperature=i % 2, seed=2**64 - 1 - i, max_tokens=9, ignore_eos=True)
        llm.add_request([(3 * i + j) % 128 for j in range(1 + i % 30)], one, request_id=str(i))
    llm.step()
    llm._pipeline.drain()
    if chunk:
        one = SamplingParams(temperature=1.0, seed=77, max_tokens=9, ignore_eos=True)
        llm.add_request([(11 * j + 5) % 128 for j in range(chunk)], one, request_id="chunk")
    scheduled = llm.scheduler.schedule().scheduled
    assert num_tokens(scheduled) == count
    return scheduled


def plan_of(runner: ModelRunner, scheduled: list[Scheduled], size: int | None = None) -> StepPlan:
    return plan_step(scheduled, TableRows(), runner.kv_cache.block_size, size)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "count, chunk",
    [*((count, 0) for count in (1, 3, 5, 8, 9, 33, 65, 80)), (3, 2), (9, 8), (40, 33), (65, 5), (80, 64)],
)
def test_gpu_a_replay_is_the_same_step_run_eagerly(on_gpu, count, chunk):
    """Bit by bit, cache included: both are the same kernels on the same padded inputs. What the graph sampled is what
    sampling.py chooses from its logits. And these are, but for rounding, those of the step as it is without graphs."""
    llm = on_gpu(async_scheduling=False, max_num_batched_tokens=4096)
    runner = llm.model_runner
    scheduled = decoding(llm, count, chunk)
    rows = last_rows(scheduled)
    size = runner.graph_size(scheduled)
    assert size == fitting(count, 80)
    with torch.inference_mode():
        before = runner.kv_cache.data.clone()
        inputs = runner.prepare(plan_of(runner, scheduled, size))
        replayed = runner.graphs.replay(size, inputs, runner.decode)[:count].clone()
        sampled, written = runner.sampled[:count].clone(), runner.kv_cache.data.clone()
        runner.kv_cache.data.copy_(before)
        eager = runner.decode(runner.graphs._memory[size].inputs)[:count].clone()
        again, written_again = runner.sampled[:count].clone(), runner.kv_cache.data.clone()
        runner.kv_cache.data.copy_(before)
        plain = runner.forward(runner.prepare(plan_of(runner, scheduled)))
        torch.cuda.synchronize()
    assert replayed.view(torch.int32).equal(eager.view(torch.int32))
    assert written.view(torch.int32).equal(written_again.view(torch.int32))
    assert again.equal(sampled)
    error = (replayed[rows] - plain).abs().max() / plain.abs().max()
    print(f"{error:.1e} of the largest logit")
    assert error <= 1e-3
    if runner.samples_in_graph:
        replayed, sampled = replayed[rows], sampled[rows]
        chosen = sample(replayed, [item.seq for item in scheduled])
        for row in (chosen != sampled).nonzero().flatten().tolist():
            scores = replayed[row].double()
            gap = scores[chosen[row]] - scores[sampled[row]]
            print(f"row {row}: {int(sampled[row])}, sampling.py says {int(chosen[row])}; logits {gap:.1e} apart")
        assert (chosen != sampled).sum() <= len(rows) // 50


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [0, 3])
def test_gpu_padding_writes_nowhere(on_gpu, chunk):
    """A replay changes the cache in the slots of its tokens, and in no other place."""
    llm = on_gpu(async_scheduling=False, max_num_batched_tokens=4096)
    runner = llm.model_runner
    scheduled = decoding(llm, 5, chunk)
    with torch.inference_mode():
        runner.kv_cache.data[:, :, list(llm.block_manager._pool.free)] = float("nan")
        before = runner.kv_cache.data.clone()
        logits = runner.graphs.replay(8, runner.prepare(plan_of(runner, scheduled, 8)), runner.decode)[:5]
    changed = (runner.kv_cache.data.view(torch.int32) != before.view(torch.int32)).flatten(4).any(-1).any(0).any(0)
    size = runner.kv_cache.block_size
    at = [(place, item.block_table) for item in scheduled for place in tokens_of(item)]
    wanted = sorted([table[place // size], place % size] for place, table in at)
    assert sorted(changed.nonzero().tolist()) == wanted
    assert logits.isfinite().all()


@pytest.mark.gpu
def test_gpu_starts_and_serves_in_bfloat16(checkpoint):
    """Start-up with all defaults, whatever the pool's size comes to, and twice in one process: the memory of the first
    engine, its graphs included, is given back."""
    free = []
    for _ in range(2):
        with LLM(str(checkpoint), device="cuda", dtype="bfloat16", max_model_len=512, max_num_seqs=32) as llm:
            params = SamplingParams(**GREEDY, max_tokens=20)
            got = tokens(llm, [[i, i + 1] for i in range(20)], params)
            assert [len(one) for one in got] == [20] * 20
            if llm.features.cuda_graphs:
                assert llm.metrics.graph_replays == 19  # the prompts' 40 tokens are more than any graph has rows
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1] > free[0] - 2**28, f"{(free[0] - free[1]) / 2**20:.0f} MiB were not given back"


@pytest.mark.gpu
def test_gpu_engines_side_by_side(on_gpu):
    """Two engines with graphs at the same time: each replays its own, on its own memory."""
    one, two = on_gpu(max_num_seqs=8, num_kv_blocks=64), on_gpu(max_num_seqs=6, num_kv_blocks=64)
    prompts = [[i, 2 * i + 1] for i in range(5)]
    params = SamplingParams(**GREEDY, max_tokens=12)
    first = tokens(one, prompts, params)
    assert tokens(two, prompts, params) == first == tokens(one, prompts, params)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_gpu_everything_together(on_gpu, mode):
    """Prefix caching, preemption, forks, late stops, an asynchronous engine and graphs, against greedy requests one by
    one. Chunks of other sizes round otherwise, so near ties may differ."""
    eager = on_gpu(enforce_eager=True, async_scheduling=False, max_num_seqs=4)
    options = dict(num_kv_blocks=20, max_num_seqs=12, enable_prefix_caching=True, max_num_batched_tokens=48)
    llm = on_gpu(**options, preemption_mode=mode, num_swap_blocks=30, watermark=0.0)
    shared = [(i * i) % 128 for i in range(33)]
    prompts = [[*shared[: (0, 16, 33)[i % 3]], i, i + 1, 2 * i] for i in range(16)]
    looked_at = SamplingParams(**GREEDY, max_tokens=40, logprobs=2)
    theirs = [eager.generate([prompt], looked_at, use_tqdm=False)[0] for prompt in prompts]
    for stop in ((), tuple(range(8))):
        for i, prompt in enumerate(prompts):
            one = SamplingParams(**GREEDY, max_tokens=40, stop_token_ids=stop, n=1 + i % 2)
            llm.add_request(prompt, one, request_id=str(i))
        done = {}
        while llm.has_unfinished_requests():
            done |= {output.request_id: output for output in llm.step()}
            llm.block_manager.check_integrity()
        for i, alone in enumerate(theirs):
            entries = alone.outputs[0].logprobs
            wanted = alone.outputs[0].token_ids
            end = next((at + 1 for at, token in enumerate(wanted) if token in stop), len(wanted))
            for completion in done[str(i)].outputs:
                pairs = enumerate(zip(completion.token_ids, wanted[:end], strict=False))
                at = next((at for at, (a, b) in pairs if a != b), None)
                if at is None:
                    assert len(completion.token_ids) == end
                    continue
                best = sorted((entry.logprob for entry in entries[at].values()), reverse=True)
                print(f"request {i}, token {at}: the two best are {best[0] - best[1]:.1e} apart")
                assert best[0] - best[1] <= 1e-3
        assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    m = llm.metrics
    assert m.preemptions and m.prefix_hit_tokens and m.graph_replays and m.discarded_tokens and m.cow_copies
