"""Speculative decoding: whoever drafts, and however badly, the tokens are those of a run without drafts.

The reference is one sequence at a time, without drafts. Proposers of the tests' own know the right tokens and spoil
some of them, so that a run is accepted up to every place in it.
"""

import gc
import json
import logging
import math
import random
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .. import LLM, SamplingParams, SpeculativeConfig, cuda_graphs, speculative
from ..block_manager import BlockManager
from ..config import POLICIES, PREEMPTION_MODES
from ..cuda_graphs import graph_memory, graph_sizes
from ..draft_model import DraftModel
from ..kv_cache import KVCache, block_bytes
from ..model import CausalLM
from ..model_runner import ModelRunner, largest_batch
from ..sequence import Sequence
from ..speculative import NgramIndex, NgramProposer, Proposer
from ..staging import TableRows
from ..step_inputs import last_rows, sampled_sequences
from .helpers import make_checkpoint
from .script import PieceTokenizer, ScriptModel, force, new_engine, play, scripted
from .test_batching import Solo, some_prompt
from .test_engine import run_main
from .test_failures import failing, interrupt_at_line
from .test_features import resolve
from .test_pipeline import assert_idle, check, draw_request, serve

GREEDY = dict(temperature=0.0, ignore_eos=True)
NGRAM = SpeculativeConfig(method="ngram", min_ngram=1)
ITSELF = SpeculativeConfig(model="tiny")


@pytest.fixture(scope="module")
def solo():
    solo = Solo()
    yield solo
    solo.llm.close()


@pytest.fixture
def engine():
    """Makes engines that draft; they are closed after the test."""
    made: list[LLM] = []

    def make(speculative=NGRAM, **options) -> LLM:
        options = dict(max_model_len=64, block_size=4, num_kv_blocks=64, speculative=speculative) | options
        made.append(new_engine(**options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


class Planted(Proposer):
    """Drafts by a rule: (what is right, how many are wanted) -> drafts. `known` says what is right."""

    def __init__(self, known: Callable[[Sequence], list[int]], rule: Callable[[list[int], int], list[int]]):
        self.known = known
        self.rule = rule
        self.asked: list[int] = []

    def propose(self, wanted):
        self.asked += wanted.values()
        return {seq: self.rule(self.known(seq)[seq.num_output_tokens :], count) for seq, count in wanted.items()}


def right(tokens: list[int], count: int) -> list[int]:
    return tokens[:count] + [0] * (count - len(tokens))


def wrong(tokens: list[int], count: int) -> list[int]:
    return [(token + 1) % 256 for token in right(tokens, count)]


def plant(llm: LLM, known, rule=right) -> Planted:
    llm._pipeline.speculator.proposer = Planted(known, rule)
    return llm._pipeline.speculator.proposer


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model with the vocabulary of tiny that knows nothing of it, with fewer heads, and positions for 40 tokens."""
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=16, vocab_size=259)
    return str(make_checkpoint(tmp_path_factory.mktemp("other"), "qwen3", max_position_embeddings=40, **shape))


# what can be asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), "method=None, model=None: expected one of the two"),
        (dict(method="ngram", model="tiny"), "method='ngram', model='tiny': expected one of the two"),
        (dict(method="medusa"), "method='medusa': expected one of ngram, None"),
        (dict(model=""), "model='': expected a name"),
        (dict(model=3), "model=3: expected a name"),
        (dict(method="ngram", num_tokens=0), "num_tokens=0: expected an integer of at least 1"),
        (dict(method="ngram", num_tokens=True), "num_tokens=True"),
        (dict(method="ngram", min_ngram=0), "min_ngram=0"),
        (dict(method="ngram", max_ngram=1), "min_ngram=2 is more than max_ngram=1"),
        (dict(method="ngram", max_ngram=33), "max_ngram=33: expected at most 32, as all n-grams are kept"),
        (dict(model="tiny", max_ngram=3), "max_ngram=3 belongs to method='ngram'"),
        (dict(method="ngram", num_token=3), "unknown option 'num_token' for SpeculativeConfig, did you mean 'num_tok"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError) as error:
        SpeculativeConfig(**options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("value", ["ngram", True, 4, {"method": "ngram"}])
def test_the_engine_takes_nothing_else(value):
    with pytest.raises(ValueError, match=r"^speculative=.*: expected a SpeculativeConfig or None, such as"):
        new_engine(speculative=value)


def test_async_scheduling_is_off_and_that_is_said(engine):
    """Drafts are made from tokens that the host knows. Asked for together, the two are an error."""
    llm = engine()
    assert not llm.features.async_scheduling and "up to 4 drafts by ngram" in str(llm.features)
    assert any(note.startswith("no async scheduling (drafts are made") for note in llm.features.notes)
    with pytest.raises(ValueError, match=r"^async_scheduling=True: drafts are made .*; leave it out, or say speculat"):
        new_engine(speculative=NGRAM, async_scheduling=True)
    assert new_engine(async_scheduling=True).features.notes == ()


def test_who_wants_no_async_scheduling_is_not_told_that_it_is_off(engine):
    assert engine(async_scheduling=False).features.notes == ()


def test_on_a_gpu_all_else_stays_on(monkeypatch):
    found = resolve(monkeypatch, speculative=NGRAM)
    assert (found.fused_kernels, found.cuda_graphs, found.async_scheduling) == (True, True, False)
    assert len(found.notes) == 1 and found.rows_per_seq == 5
    assert resolve(monkeypatch).rows_per_seq == 1


@pytest.mark.parametrize(("num_seqs", "rows", "most"), [(32, 5, 160), (100, 5, 500), (256, 5, 512), (600, 5, 600)])
def test_graphs_for_drafts_have_an_end(num_seqs, rows, most):
    """A graph costs memory; a step of more than 512 rows keeps the GPU busy for longer than its launches take."""
    sizes = graph_sizes(num_seqs, rows)
    assert sizes[-1] == most and set(sizes) >= set(graph_sizes(num_seqs)) - {num_seqs}


@pytest.mark.parametrize(("budget", "rows", "sampled"), [(64, 1, 8), (64, 3, 24), (64, 9, 64), (8, 5, 8)])
def test_the_largest_step_has_rows_for_drafts(engine, budget, rows, sampled):
    """Each row that is sampled needs logits, and with all that sampling can do several times so much."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=8), max_num_seqs=8, max_num_batched_tokens=budget)
    batch = largest_batch(llm.scheduler_config, 64, 4, rows)
    assert sum(item.num_tokens for item in batch.scheduled) == budget and len(batch.scheduled) == 8
    assert len(last_rows(batch.scheduled)) == len(sampled_sequences(batch.scheduled)) == sampled
    assert max(item.seq.num_computed_tokens + item.num_tokens for item in batch.scheduled) == 64
    assert len(llm.model_runner.run(batch).token_ids) == 8


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("num_seqs", "budget"), [(4, 8), (8, 2048)])
def test_more_drafts_than_a_step_has_tokens(engine, solo, eager, num_seqs, budget):
    """num_tokens only bounds: there is room for the rows of a step, and not for a billion rows of each sequence."""
    llm = engine(
        SpeculativeConfig(model="tiny", num_tokens=10**30),
        enforce_eager=eager,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
    )
    assert len(llm.model_runner.sampled) == (budget + num_seqs if eager else max(budget + num_seqs, 512))
    params = dict(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], [4]], SamplingParams(**params, n=2), use_tqdm=False)
    for prompt, output in zip([[1, 2, 3], [4]], outputs, strict=True):
        assert [one.token_ids for one in output.outputs] == [solo.tokens(prompt, i, **params) for i in range(2)]
    assert llm.metrics.accepted_tokens == llm.metrics.drafted_tokens > 0
    assert llm.metrics.steps > 20 if budget == 8 else llm.metrics.steps < 5


def test_the_draft_model_has_its_share_of_the_memory(engine, other):
    """A block here for each of the target's: of the model `other` one has an eighth of the bytes of one of tiny."""
    llm = engine(SpeculativeConfig(model=other))
    draft = llm._pipeline.speculator.proposer
    ours, theirs = (block_bytes(one, 4) for one in (draft.model_config, llm.model_config))
    assert theirs == 8 * ours and draft.leave_room(9 * ours * 100, llm.model_config, []) == theirs * 100
    graphs = graph_memory(draft.model_config, [1, 2, 4], draft.resolved.max_model_len // 4 + 1)
    assert draft.leave_room(9 * ours * 100 + graphs, llm.model_config, [1, 2, 4]) == theirs * 100
    assert draft.block_manager.num_blocks == llm.block_manager.num_blocks


def test_a_draft_model_with_other_tokens(tmp_path):
    """Its ids would mean something else, and nothing but the acceptance would tell. As many ids are no proof."""
    folder = make_checkpoint(tmp_path, "llama", vocab_size=259)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"has other tokens than 'tiny': id 97 is 'b' there and 'a' here; take a smal"):
        new_engine(speculative=SpeculativeConfig(model=str(folder)))


@pytest.mark.parametrize(("target", "draft"), [("tiny", "small"), ("small", "tiny")])
def test_a_vocabulary_that_is_padded_otherwise(tmp_path, target, draft):
    """The target has more ids: who uses one of them gets no drafts. It has fewer: a draft beyond them would be looked
    up outside of its embedding. Nobody gets another token."""
    folders = {"tiny": "tiny", "small": str(make_checkpoint(tmp_path, "llama"))}  # 259 ids, and the first 128 of them
    config = SpeculativeConfig(model=folders[draft], num_tokens=3)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    options = dict(device="cpu", dtype="float64", max_model_len=64)
    with LLM(folders[target], **options) as plain, LLM(folders[target], speculative=config, **options) as llm:
        for prompts in ([[1, 2, 3], [9] * 20], [[200, 1, 2]], [[5, 250, 9], [1, 2]]):
            prompts = [[token_id % plain.model_config.vocab_size for token_id in prompt] for prompt in prompts]
            runs = [one.generate(prompts, params, use_tqdm=False) for one in (plain, llm)]
            expected, found = ([output.outputs[0].token_ids for output in run] for run in runs)
            assert found == expected
        assert llm.metrics.drafted_tokens > 0
        before = llm.metrics.drafted_tokens
        llm.generate([[200 % plain.model_config.vocab_size, 1, 2]], params, use_tqdm=False)
        assert (llm.metrics.drafted_tokens > before) == (target == "small")
        proposed = llm._pipeline.speculator.proposer
        assert all(
            max(one.drafts, default=0) < proposed.model_config.vocab_size for one in proposed._followers.values()
        )


# n-grams


@pytest.mark.parametrize(
    ("text", "sizes", "count", "drafts"),
    [
        ("abcdeab", (2, 2), 3, "cde"),
        ("abcdeab", (2, 2), 9, "cdeabcdea"),  # a copy that runs into itself
        ("abcdeab", (3, 3), 3, ""),  # "eab" is new
        ("abcdeab", (1, 4), 3, "cde"),
        ("xyxyx", (2, 3), 4, "yxyx"),
        ("aaaa", (1, 3), 3, "aaa"),
        ("abXabYab", (2, 2), 2, "Ya"),  # the last place counts
        ("abXcbYab", (1, 2), 1, "X"),  # a longer match counts more than a later one
        ("abcd", (1, 3), 3, ""),
        ("a", (1, 3), 3, ""),
        ("aa", (2, 2), 3, ""),  # the end of the text is not found in itself
        ("aa", (1, 2), 2, "aa"),
    ],
)
def test_what_came_before(text, sizes, count, drafts):
    index = NgramIndex(*sizes)
    assert "".join(map(chr, index.propose([ord(c) for c in text], count))) == drafts


def look(tokens: list[int], least: int, most: int, count: int) -> list[int]:
    """The definition, by looking everywhere."""
    for size in range(min(most, len(tokens)), least - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                more = list(tokens)
                for at in range(end, end + count):
                    more.append(more[at])
                return more[len(tokens) :]
    return []


@settings(max_examples=max(100, settings().max_examples))
@given(
    pieces=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12),
    least=st.integers(1, 3),
    more=st.integers(0, 2),
    count=st.integers(1, 6),
)
def test_an_index_that_grows_finds_what_a_search_finds(pieces, least, more, count):
    """Tokens come one at a time or several at once; nothing may be noted twice, or not at all."""
    index, tokens = NgramIndex(least, least + more), []
    for piece in pieces:
        tokens += piece
        assert index.propose(tokens, count) == look(tokens, least, least + more, count)


def test_an_index_goes_with_its_sequence(engine):
    """A server runs for weeks."""
    llm = engine()
    llm.generate([[1, 2, 1]] * 3, SamplingParams(max_tokens=4, **GREEDY), use_tqdm=False)
    llm.step()  # the plan of the last step is kept until there is another
    gc.collect()
    proposer = llm._pipeline.speculator.proposer
    assert isinstance(proposer, NgramProposer) and len(proposer._indices) == 0


# any workload


def spoil(chance: random.Random) -> Callable[[list[int], int], list[int]]:
    """Drafts that are right until they are not; sometimes fewer than wanted, sometimes none."""

    def rule(tokens: list[int], count: int) -> list[int]:
        drafts = right(tokens, count)
        for i in range(count):
            if chance.random() < 0.15:
                drafts[i] = chance.randrange(256)
        return drafts[: chance.choice([0, 1, count, count, count, count])]

    return rule


def truth(requests: list[dict], solo: Solo) -> Callable[[Sequence], list[int]]:
    """What is right for a sequence of one of these requests."""
    shared = some_prompt(12, 7)
    known = {}
    for one in requests:
        prompt = shared[: one["shared"]] + one["own"]
        for params in (one["params"], one["params"] | {"n": 1}):
            known[tuple(prompt), SamplingParams(**params)] = prompt, one["params"]

    def of(seq: Sequence) -> list[int]:
        prompt, params = known[tuple(seq.token_ids[: seq.num_prompt_tokens]), seq.params]
        return solo.tokens(prompt, seq.index, **params)

    return of


def poison_unread(llm: LLM) -> None:
    """What nobody has computed in blocks that somebody holds becomes NaN: what rejected drafts have left is there."""
    filled: dict[int, int] = {}
    manager, size = llm.block_manager, llm.block_manager.block_size
    for seq in (seq for group in llm.scheduler.running.values() for seq in group.seqs if manager.holds(seq.seq_id)):
        for i, block in enumerate(manager.table(seq.seq_id).blocks):
            filled[block] = max(filled.get(block, 0), min(size, seq.num_computed_tokens - i * size))
    for block, count in filled.items():
        llm.model_runner.kv_cache.data[:, :, block, max(0, count) :] = float("nan")


def watch(llm: LLM) -> None:
    """After each step: nobody has blocks for drafts any more, and what can be found in the prefix cache is true."""
    step = llm._pipeline.step

    def watched(retire: Callable[[], None]) -> None:
        step(retire)
        manager = llm.block_manager
        for group in llm.scheduler.running.values():
            for seq in (seq for seq in group.seqs if manager.holds(seq.seq_id)):
                table = manager.table(seq.seq_id)
                assert table.num_tokens <= seq.num_tokens and (seq.is_finished or not seq.num_pending_tokens)
                assert len(table.cached) * manager.block_size <= seq.num_computed_tokens
                for i, cached in enumerate(table.cached):
                    assert cached.tokens == seq.token_ids[i * manager.block_size : (i + 1) * manager.block_size]
        poison_unread(llm)

    llm._pipeline.step = watched


def draw_engine(chance: random.Random, **options) -> LLM:
    """A pool of 2 to 24 blocks, more often a small one, and of 20 tokens at least."""
    least = -(-20 // options["block_size"])
    options |= {
        "policy": chance.choice(POLICIES),
        "num_swap_blocks": chance.choice([0, 3, 50]),
        "enforce_eager": chance.choice([True, False]),
        "num_kv_blocks": min(chance.randint(least, 24), chance.randint(least, 24)),
        "max_num_seqs": chance.choice([3, 4, 8]),
        "max_num_batched_tokens": chance.choice([8, 20, 24, 64]),
        "watermark": chance.choice([0.0, 0.0, 0.1]),
    }
    return new_engine(max_model_len=64, **options)


OFTEN = {"steps": 400, "preemptions": 8, "aborted": 8, "streams": 30, "same id": 10, "cow_copies": 10}
OFTEN |= {"drafted_tokens": 300, "accepted_tokens": 150, "rejected": 100, "rolled back": 40}


@pytest.mark.parametrize("is_caching", [False, True], ids=["plain", "prefix"])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_any_workload_gives_the_tokens_of_a_solo_run(mode, is_caching, solo):
    """Greedy and sampled, n > 1, stops, aborts, streams and preemption in pools of few blocks: with drafts that are
    right up to any place nobody may lose, repeat or mix up a token."""
    events = Counter()

    @settings(max_examples=max(40, settings().max_examples // 4))
    @given(st.integers(0, 2**32))
    def play(seed):
        chance = random.Random(seed)
        block_size, num_tokens = chance.choice([1, 2, 3, 4, 16]), chance.choice([1, 2, 3, 5])
        requests = [draw_request(chance, block_size) for _ in range(chance.randint(4, 7))]
        config = SpeculativeConfig(method="ngram", num_tokens=num_tokens, min_ngram=1)
        config = chance.choice([config, config, config, SpeculativeConfig(model="tiny", num_tokens=num_tokens)])
        options = dict(preemption_mode=mode, enable_prefix_caching=is_caching, block_size=block_size)
        with draw_engine(chance, speculative=config, **options) as llm:
            if config.method and chance.random() < 0.7:
                plant(llm, truth(requests, solo), spoil(chance))
            watch(llm)
            serve(llm, requests, chance, solo, events)
            assert_idle(llm)
            events["rolled back"] += sum(line.why == "drafts rejected" for line in llm.block_manager.allocation_log)
        events.update(llm.metrics.counters())

    play()
    events["rejected"] = events["drafted_tokens"] - events["accepted_tokens"]
    print({name: events[name] for name in (*OFTEN, "prefix_hit_tokens", "swapped_in_blocks", "graph_replays")})
    often = OFTEN | ({"prefix_hit_tokens": 100} if is_caching else {})
    assert all(events[event] >= least for event, least in often.items()), f"too little happens: {dict(events)}"


# counters


def test_counters_by_hand(engine):
    """4 prompt tokens, 11 new ones, 3 drafts that are right: the prompt and 1 token, then 4, 4, and 2 are left: one is
    a draft, as the step adds one more by itself. The work is that of 4 + 11 - 1 tokens, in 4 steps and not in 11."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3))
    tokens = list(range(70, 81))
    planted = plant(llm, lambda seq: tokens)
    with scripted(llm, force(tokens, 259), 4):
        (output,) = llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=11, **GREEDY), use_tqdm=False)
    assert output.outputs[0].token_ids == tokens and planted.asked == [3, 3, 1]
    m = llm.metrics
    assert (m.steps, m.drafted_tokens, m.accepted_tokens) == (4, 7, 7)
    assert (m.tokens_forwarded, m.prefill_tokens, m.decode_tokens) == (14, 4, 10)
    assert m.attention_pairs == 14 * 15 // 2
    assert [(record.drafted_tokens, record.accepted_tokens) for record in m.trace] == [(0, 0), (3, 3), (3, 3), (1, 1)]
    assert [list(record.tokens.values()) for record in m.trace] == [[4], [4], [4], [2]]
    assert m.acceptance_rate == 1.0 and m.tokens_per_step == 10 / 3
    assert m.acceptance == "100% of drafts accepted, 3.33 tokens per target step"
    assert m.draft_tokens_forwarded == 0 and m.discarded_tokens == 0


def test_what_is_rejected_is_in_the_counters_too(engine):
    """The second draft of three is wrong: a step forwards 4 tokens and keeps 2; K and V of 2 are written in vain."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3), trace_blocks=True)
    tokens = list(range(70, 76))
    plant(llm, lambda seq: tokens, lambda tokens, count: [*right(tokens, count)[:1], *[1] * (count - 1)])
    with scripted(llm, force(tokens, 259), 4):
        llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=6, **GREEDY), use_tqdm=False)
    m = llm.metrics
    # outputs 1, 3, 5, 6; of the last token nothing can be drafted
    assert [(record.drafted_tokens, record.accepted_tokens) for record in m.trace] == [(0, 0), (3, 1), (2, 1), (0, 0)]
    assert [list(record.tokens.values()) for record in m.trace] == [[4], [4], [3], [1]]
    assert [record.attention_pairs for record in m.trace] == [10, 5 + 6 + 7 + 8, 7 + 8 + 9, 9]
    assert [record.kv_tokens_used for record in m.trace] == [4, 8, 9, 9]  # while the step ran
    assert [record.kv_tokens_reserved for record in m.trace] == [4, 8, 12, 12]
    assert [list(record.computed_tokens.values()) for record in m.trace] == [[4], [8], [9], [9]]
    assert m.acceptance == "40% of drafts accepted, 1.67 tokens per target step"


def test_a_wrong_draft_changes_nothing(engine, solo):
    """Always wrong: as many steps as without drafts, and in each of them a run of drafts for nothing."""
    llm, plain = engine(NGRAM), engine(None)
    prompts, params = [some_prompt(length) for length in (3, 9, 17)], SamplingParams(max_tokens=12, **GREEDY)
    plant(llm, lambda seq: solo.tokens(seq.token_ids[: seq.num_prompt_tokens], max_tokens=12, **GREEDY), wrong)
    for one in (llm, plain):
        one.metrics.reset()
    outputs = [[o.outputs[0].token_ids for o in one.generate(prompts, params, use_tqdm=False)] for one in (llm, plain)]
    assert outputs[0] == outputs[1]
    ours, theirs = llm.metrics, plain.metrics
    assert (ours.steps, ours.accepted_tokens) == (theirs.steps, 0) and ours.drafted_tokens > 90
    assert ours.tokens_forwarded == theirs.tokens_forwarded + ours.drafted_tokens
    assert ours.drafted_tokens <= 4 * 3 * 11 and ours.tokens_per_step == 1.0
    assert theirs.drafted_tokens == theirs.accepted_tokens == theirs.draft_tokens_forwarded == 0


def test_a_run_that_is_right_again_behind_a_wrong_draft(engine, solo):
    """The rows behind a wrong draft saw another text. That their own draft is right by chance does not help them."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=4))
    params = dict(max_tokens=16, **GREEDY)
    tokens = solo.tokens(some_prompt(7), **params)
    plant(llm, lambda seq: tokens, lambda tokens, count: [1, *right(tokens, count)[1:]])
    with scripted(llm, force(tokens, 259), 7):  # this model samples what is right whatever it sees
        output = llm.generate([some_prompt(7)], SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == tokens and 1 not in tokens
    assert llm.metrics.accepted_tokens == 0 and llm.metrics.steps == 16


def test_repetition_is_found_and_saves_steps(engine):
    """A model that repeats "abcd": after the first repetition all is foreseen."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=4))
    output = play(llm, b"abcd" * 10, ignore_eos=True)
    assert output.token_ids == list(b"abcd" * 10)
    m = llm.metrics  # generate and stream: twice
    assert m.steps == 2 * (6 + math.ceil((40 - 6) / 5)) and m.accepted_tokens == m.drafted_tokens


def test_the_log_says_how_good_the_drafts_are(engine, monkeypatch):
    monkeypatch.setattr(speculative, "LOG_SECONDS", 0.0)
    llm, lines = engine(), []
    llm._pipeline.speculator._next_log = 0.0
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    speculative.logger.addHandler(handler)
    try:
        play(llm, b"abab" * 5, ignore_eos=True)
    finally:
        speculative.logger.removeHandler(handler)
    assert any("of drafts accepted" in line and "tokens per target step" in line for line in lines)
    llm.metrics.reset()
    assert llm.metrics.acceptance == "0% of drafts accepted, 1.00 tokens per target step"


def test_the_bar_says_it_too(engine, capsys):
    """And its speed is that of tokens that are kept."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3))
    plant(llm, lambda seq: list(range(70, 90)), lambda tokens, count: [*right(tokens, count)[:1], 1, 1][:count])
    with scripted(llm, force(range(70, 90), 259), 1):
        llm.generate([[65]], SamplingParams(max_tokens=20, **GREEDY))
    assert llm.metrics.decode_tokens - llm.metrics.rejected_tokens == 20
    assert f"tok/s, {llm.metrics.acceptance}" in capsys.readouterr().err


def test_time_for_drafts_is_a_phase_of_its_own(engine):
    llm = engine()
    llm.generate([[1, 2, 1]], SamplingParams(max_tokens=2, **GREEDY), use_tqdm=False)
    phases = {"schedule", "draft", "prepare", "forward", "sample", "postprocess"}
    assert all(set(record.seconds) == phases for record in llm.metrics.trace)


# ends inside of a run

TOKENS = [70, 71, 72, 73, 74, 75, 76, 77]


def drafting(engine, num_tokens: int, **options) -> LLM:
    """An engine of which the drafts are the script."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=num_tokens), **options)
    plant(llm, lambda seq: TOKENS)
    return llm


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("at", range(8))
def test_a_stop_token_inside_of_a_run(engine_of, num_tokens, at):
    """Wherever it is among the drafts, the output ends with it, and what came behind it is nowhere."""
    llm = engine_of(num_tokens)
    llm.metrics.reset()
    output = play(llm, TOKENS, stop_token_ids=[TOKENS[at]], logprobs=0)
    assert (output.token_ids, output.finish_reason) == (TOKENS[: at + 1], "stop")
    assert [list(entry) for entry in output.logprobs] == [[token] for token in TOKENS[: at + 1]]
    full, rest = divmod(at, 1 + num_tokens)  # a prompt of one token is followed by drafts at once
    drafted = min(num_tokens, 7 - full * (1 + num_tokens))  # in the last step
    m = llm.metrics  # generate and stream: twice
    assert m.steps == 2 * (full + 1) and m.accepted_tokens == 2 * (full * num_tokens + min(rest + 1, drafted))
    assert m.drafted_tokens == 2 * (full * num_tokens + drafted)
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks


@pytest.fixture(scope="module")
def engine_of():
    """Engines of which the drafts are the script, by the number of drafts; each is made once."""
    made: dict[int, LLM] = {}

    def of(num_tokens: int) -> LLM:
        if num_tokens not in made:
            config = SpeculativeConfig(method="ngram", num_tokens=num_tokens)
            made[num_tokens] = new_engine(max_model_len=64, block_size=4, num_kv_blocks=64, speculative=config)
            plant(made[num_tokens], lambda seq: TOKENS)
        return made[num_tokens]

    yield of
    for llm in made.values():
        llm.close()


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("most", range(1, 9))
def test_max_tokens_inside_of_a_run(engine_of, num_tokens, most):
    llm = engine_of(num_tokens)
    llm.metrics.reset()
    output = play(llm, TOKENS, max_tokens=most)
    assert (output.token_ids, output.finish_reason) == (TOKENS[:most], "length")
    assert llm.metrics.tokens_forwarded == 2 * most, "drafts behind the last token are of no use"


def test_the_sooner_of_two_ends(engine_of):
    """max_tokens 5, and a stop in the third token; then the stop behind max_tokens."""
    llm = engine_of(5)
    output = play(llm, TOKENS, max_tokens=5, stop_token_ids=[72])
    assert (output.token_ids, output.finish_reason) == (TOKENS[:3], "stop")
    output = play(llm, TOKENS, max_tokens=5, stop_token_ids=[75])
    assert (output.token_ids, output.finish_reason) == (TOKENS[:5], "length")
    output = play(llm, TOKENS, max_tokens=5, stop_token_ids=[74])
    assert (output.token_ids, output.finish_reason) == (TOKENS[:5], "stop")


@pytest.mark.parametrize(("stop", "text"), [("HI", "FG"), ("I", "FGH"), ("KL", "FGHIJ"), ("LM", "FGHIJK")])
def test_a_stop_string_that_ends_inside_of_a_run(engine_of, stop, text):
    llm = engine_of(4)
    output = play(llm, TOKENS, stop=[stop])
    assert (output.text, output.finish_reason) == (text, "stop")
    assert output.token_ids == TOKENS[: len(text) + len(stop)]


def test_a_stop_string_of_several_tokens_in_pieces(engine_of):
    """Half a character and half a stop string lie on both sides of the end of a run."""
    pieces = ["x"] * 70 + ["a", b"\xe4\xbd", b"\xa0b", "c", "dE", "ND", "y", "z"]
    output = play(engine_of(2), TOKENS, tokenizer=PieceTokenizer(pieces), stop=["END"])
    assert (output.text, output.token_ids) == ("a你bcd", TOKENS[:6])


@pytest.mark.parametrize("least", range(1, 9))
def test_min_tokens_inside_of_a_run(engine, least):
    """The end token is the best one all the time, and forbidden so long: a row must know how far it is ahead."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3), max_model_len=32)
    rows = force([65] * 8, 259)
    rows[:, 258] = 1.0
    plant(llm, lambda seq: [65] * (least - 1) + [258] * 9)
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=least)
    with scripted(llm, rows, 1):
        output = llm.generate([[65]], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == [65] * least + [258] * (least < 8)
    assert output.finish_reason == ("stop" if least < 8 else "length")


def test_a_penalty_inside_of_a_run(engine):
    """A seen token scores half: 65 wins, then 66, then 65 over 66. A row must know the drafts in front of it."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=5))
    rows = torch.full((1, 259), -9.0, dtype=torch.float64)
    rows[0, 65:67] = torch.tensor([1.0, 0.9])
    wanted = [65, 66, 65, 65, 65, 65]
    plant(llm, lambda seq: wanted)
    params = SamplingParams(max_tokens=6, repetition_penalty=2.0, **GREEDY)
    with scripted(llm, rows, 1):
        assert llm.generate([[67]], params, use_tqdm=False)[0].outputs[0].token_ids == wanted
    assert (llm.metrics.steps, llm.metrics.accepted_tokens) == (1, 5)


def test_at_the_end_of_the_context(engine):
    """16 prompt tokens of 20, 5 drafts: four tokens come, and no K and V is written behind the limit."""
    llm = drafting(engine, 5, max_model_len=20, num_kv_blocks=5)
    positions = []
    launch = llm.model_runner.launch

    def watched(batch):
        positions.extend(item.seq.num_computed_tokens + item.num_tokens for item in batch.scheduled)
        return launch(batch)

    llm.model_runner.launch = watched
    output = play(llm, TOKENS, prompt=[9] * 16, max_tokens=None)
    assert (output.token_ids, output.finish_reason) == (TOKENS[:4], "length")
    assert max(positions) == 19, "the last token is not computed"


def test_the_real_model_stops_inside_of_a_run(engine, solo):
    """Its own fourth token is declared the end."""
    tokens = solo.tokens(some_prompt(16), max_tokens=8, **GREEDY)
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=4))
    plant(llm, lambda seq: tokens)
    params = SamplingParams(max_tokens=8, stop_token_ids=[tokens[3]], **GREEDY)
    output = llm.generate([some_prompt(16)], params, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (tokens[: tokens.index(tokens[3]) + 1], "stop")


# the distribution

P = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
LIMITS = {1: 10.83, 2: 13.82, 3: 16.27}  # of chi-square at p = 0.001, by degrees of freedom


def frequencies(llm: LLM, runs: int, length: int, **params) -> torch.Tensor:
    """How often each of four tokens came at each place: [length, 4]."""
    rows = torch.full((1, 259), -math.inf, dtype=torch.float64)
    rows[0, :4] = P.log()
    with scripted(llm, rows, 1):
        all_params = [SamplingParams(max_tokens=length, seed=seed, ignore_eos=True, **params) for seed in range(runs)]
        outputs = llm.generate([[65]] * runs, all_params, use_tqdm=False)
    counts = torch.zeros(length, 259)
    for output in outputs:
        for place, token in enumerate(output.outputs[0].token_ids):
            counts[place, token] += 1
    assert not counts[:, 4:].any(), "a token of probability 0"
    return counts[:, :4]


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    wanted = p * counts.sum()
    assert not counts[p == 0].any(), "a token of probability 0"
    return ((counts - wanted)[p > 0] ** 2 / wanted[p > 0]).sum().item()


class FromQ(Proposer):
    """Drafts drawn from a distribution of its own, which has nothing to do with the target's."""

    def __init__(self, q: list[float]):
        self.q, self.chance = q, random.Random(1)

    def propose(self, wanted):
        return {seq: self.chance.choices(range(4), self.q, k=count) for seq, count in wanted.items()}


@pytest.mark.parametrize(
    ("q", "params"),
    [
        ([0.1, 0.2, 0.3, 0.4], dict(temperature=1.0)),
        ([0.0, 0.0, 0.5, 0.5], dict(temperature=1.0)),
        ([0.5, 0.25, 0.15, 0.1], dict(temperature=1.0)),
        ([0.1, 0.2, 0.3, 0.4], dict(temperature=0.7, top_k=3)),
        ([0.1, 0.2, 0.3, 0.4], dict(temperature=1.0, top_p=0.7)),
    ],
)
def test_the_distribution_is_the_targets(engine, q, params):
    """The first token, those of the run, and the one behind it. And they are the tokens of a run without drafts, so a
    seed gives the same text with and without."""
    runs = 1000
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3), max_num_seqs=500, num_kv_blocks=2000)
    llm._pipeline.speculator.proposer = FromQ(q)
    right = watch_first_drafts(llm)
    counts = frequencies(llm, runs, 5, **params)
    p = P ** (1 / params["temperature"])
    p = torch.where(torch.arange(4) < params.get("top_k", 4), p, 0) / p.sum()
    p = torch.where(torch.arange(4) < (2 if "top_p" in params else 4), p, 0)
    p = p / p.sum()
    for place in counts:
        assert chi_square(place, p) < LIMITS[int((p > 0).sum()) - 1]
    wanted = sum(a * b for a, b in zip(p.tolist(), q, strict=True))  # a draft x, drawn from q, is right with p(x)
    assert abs(sum(right) / len(right) - wanted) < 0.04
    plain = engine(None, max_num_seqs=500, num_kv_blocks=2000)
    assert frequencies(plain, runs, 5, **params).equal(counts)


def watch_first_drafts(llm: LLM) -> list[bool]:
    """For each step of a sequence that has drafts: whether the first of them was right."""
    speculator, right = llm._pipeline.speculator, []
    take_back = speculator.take_back

    def watched(item, num_right, record):
        right.append(num_right > 0)
        take_back(item, num_right, record)

    speculator.take_back = watched
    return right


@pytest.mark.parametrize("q", [[0.1, 0.2, 0.3, 0.4], [0.6, 0.25, 0.15, 0.0], [0.5, 0.25, 0.15, 0.1]])
def test_a_draft_drawn_with_the_same_noise(engine, q):
    """The target's distribution again, and more drafts are right than of those drawn for themselves: at least
    (1 - d) / (1 + d) of them, and by the formula for two races with the same noise; all of them if q is p."""
    llm = engine(SpeculativeConfig(model="tiny", num_tokens=3), max_num_seqs=500, num_kv_blocks=2000)
    q = torch.tensor(q, dtype=torch.float64)
    rows = torch.full((1, 259), -math.inf, dtype=torch.float64)
    rows[0, :4] = q.log()
    llm._pipeline.speculator.proposer.runner.model = ScriptModel(rows, 1)
    right = watch_first_drafts(llm)
    for place in frequencies(llm, 1000, 5, temperature=1.0):
        assert chi_square(place, P) < LIMITS[3]
    both = [1 / torch.maximum(P / p, q / one).sum() for p, one in zip(P.tolist(), q.tolist(), strict=True) if one]
    distance = (P - q).abs().sum() / 2
    assert sum(both) >= (1 - distance) / (1 + distance) - 1e-9
    assert abs(sum(right) / len(right) - sum(both)) < 0.04 and (all(right) or not q.equal(P))


SAMPLED = [
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=20, top_p=0.9),
    dict(temperature=1.0, repetition_penalty=1.3, min_tokens=5),
]


@pytest.mark.parametrize("params", SAMPLED)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7])
def test_the_target_as_its_own_draft_accepts_all(engine, solo, params, num_tokens):
    """Same model, same noise, same parameters: a draft that is not accepted was drawn from another distribution."""
    llm = engine(SpeculativeConfig(model="tiny", num_tokens=num_tokens))
    params = params | dict(max_tokens=20, ignore_eos=True, seed=5)
    prompts = [some_prompt(length) for length in (1, 6, 15)]
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == solo.tokens(prompt, **params)
    m = llm.metrics
    assert m.drafted_tokens and m.accepted_tokens == m.drafted_tokens
    steps = [math.ceil(20 / (1 + num_tokens)), *[1 + math.ceil(19 / (1 + num_tokens))] * 2]  # a prompt of one decodes
    assert m.steps == max(steps) and m.accepted_tokens == 60 - sum(steps)


# the draft model


def test_work_of_the_draft_model_by_hand(engine):
    """6 prompt tokens, 9 new ones, 3 drafts: 1 token; then 4 and 4, where the target's turns are at 7 and 11 tokens.

    The follower computes 7 tokens, then its drafts 1 and 2; in the second turn draft 3 and the token behind it, then
    drafts 1 and 2 again. Of what is wanted, min(3, what is left - 1)."""
    llm = engine(SpeculativeConfig(model="tiny", num_tokens=3))
    llm.generate([some_prompt(6)], SamplingParams(max_tokens=9, **GREEDY), use_tqdm=False)
    m = llm.metrics
    assert (m.steps, m.drafted_tokens, m.accepted_tokens) == (3, 6, 6)
    assert m.tokens_forwarded == 6 + 4 + 4 == 6 + 9 - 1
    assert [record.draft_tokens_forwarded for record in m.trace] == [0, 7 + 1 + 1, 2 + 1 + 1]
    assert m.draft_tokens_forwarded == 13


def test_a_draft_model_is_not_asked_for_what_does_not_fit(engine):
    """One row is left for drafts: the draft model made four for each of eight texts, and 31 of 32 went away."""
    llm, asked = engine(ITSELF, max_num_seqs=8, max_num_batched_tokens=9), []
    proposer = llm._pipeline.speculator.proposer
    propose = proposer.propose
    proposer.propose = lambda wanted: asked.append(sum(wanted.values())) or propose(wanted)
    prompts = [[i, 1, 2] for i in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=12, **GREEDY), use_tqdm=False)
    assert sum(asked) == llm.metrics.drafted_tokens > 8


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("params", SAMPLED)
def test_another_model_as_draft_changes_nothing(engine, solo, other, params, eager):
    """It is nearly always wrong, and where its positions end it says nothing."""
    llm = engine(SpeculativeConfig(model=other, num_tokens=3), enforce_eager=eager, max_num_seqs=4)
    params = params | dict(max_tokens=30, ignore_eos=True, seed=3)
    prompts = [some_prompt(length) for length in (1, 9, 20, 34)]
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == solo.tokens(prompt, **params)
    m = llm.metrics
    assert m.drafted_tokens > m.accepted_tokens and m.draft_tokens_forwarded > 100
    assert max(follower.seq.num_tokens for follower in llm._pipeline.speculator.proposer._followers.values()) <= 41
    assert eager != (m.graph_replays > 0)


def followers(llm: LLM) -> dict[str, int]:
    """request_id -> tokens that the draft model holds of it. Checks its blocks."""
    draft = llm._pipeline.speculator.proposer
    draft.block_manager.check_integrity()
    assert set(draft.block_manager._pool.tables) == {one.seq.seq_id for one in draft._followers.values()}
    return {seq.seq_id: one.seq.num_computed_tokens for seq, one in draft._followers.items()}


def test_followers_go_when_their_sequences_do(engine):
    """Finished, aborted or preempted: the blocks are free again with the next step. An id that comes again is another
    request."""
    llm = engine(ITSELF)
    for name, length in (("a", 3), ("b", 30), ("c", 30)):
        llm.add_request([1, 2, 3], SamplingParams(max_tokens=length, **GREEDY), request_id=name)
    for _ in range(3):
        llm.step()
    assert set(followers(llm)) == {"b", "c"}
    llm.abort_request("b")
    llm.add_request([9, 9, 9, 9], SamplingParams(max_tokens=30, **GREEDY), request_id="b")
    llm.step()
    assert set(followers(llm)) == {"c"}
    llm.step()
    assert followers(llm)["b"] < 12, "of the request that had this id before"
    while llm.has_unfinished_requests():
        llm.step()
    llm.step()
    assert followers(llm) == {} and llm._pipeline.speculator.proposer.block_manager.num_free_blocks == 64
    assert llm.metrics.accepted_tokens == llm.metrics.drafted_tokens


def test_a_draft_model_without_blocks_drafts_nothing(engine, solo):
    """Samples of one prompt share blocks in the target, not here: some go without drafts, and nobody waits."""
    llm = engine(ITSELF, num_kv_blocks=13)
    params = dict(max_tokens=8, n=4, seed=1, temperature=1.0, ignore_eos=True)
    output = llm.generate([some_prompt(20)], SamplingParams(**params), use_tqdm=False)[0]
    for one in output.outputs:
        assert one.token_ids == solo.tokens(some_prompt(20), one.index, **params)
    assert 0 < llm.metrics.drafted_tokens == llm.metrics.accepted_tokens
    followers(llm)


def test_a_long_prompt_is_drafted_from_in_pieces(engine, solo):
    """The draft model has the same budget for a step as the target."""
    llm = engine(ITSELF, max_num_batched_tokens=7, max_num_seqs=2)
    sizes, run = [], llm._pipeline.speculator.proposer.runner.run

    def watched(batch):
        sizes.append(sum(item.num_tokens for item in batch.scheduled))
        return run(batch)

    llm._pipeline.speculator.proposer.runner.run = watched
    params = dict(max_tokens=9, **GREEDY)
    outputs = llm.generate([some_prompt(30), some_prompt(17)], SamplingParams(**params), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [solo.tokens(some_prompt(n), **params) for n in (30, 17)]
    assert max(sizes) == 7 and llm.metrics.accepted_tokens == llm.metrics.drafted_tokens > 0


# what is left over


def test_no_draft_costs_anybody_his_blocks(engine, solo):
    """A pool that holds just what two requests need in the end: nobody is preempted, whatever is drafted."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=7), num_kv_blocks=2 * 5, watermark=0.0)
    params = dict(max_tokens=11, **GREEDY)
    tokens = {length: solo.tokens(some_prompt(length), **params) for length in (9, 10)}
    plant(llm, lambda seq: tokens[seq.num_prompt_tokens], lambda tokens, count: [*tokens[:2], *[0] * count][:count])
    outputs = llm.generate([some_prompt(9), some_prompt(10)], SamplingParams(**params), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(tokens.values())
    assert llm.metrics.preemptions == 0 < llm.metrics.accepted_tokens


def test_right_drafts_that_find_no_blocks(engine, solo):
    """The draft model has then computed all that is known, and must go back by one token to have something to say."""
    llm, asked = engine(SpeculativeConfig(model="tiny", num_tokens=5), num_kv_blocks=9, watermark=0.0), []
    propose = llm._pipeline.speculator.proposer.propose
    llm._pipeline.speculator.proposer.propose = lambda wanted: asked.extend(wanted.values()) or propose(wanted)
    params = dict(max_tokens=20, **GREEDY)
    outputs = llm.generate([some_prompt(6), some_prompt(7)], SamplingParams(**params), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [solo.tokens(some_prompt(n), **params) for n in (6, 7)]
    assert sum(asked) > llm.metrics.drafted_tokens == llm.metrics.accepted_tokens > 0


def test_few_blocks_few_drafts(engine):
    """One free slot in its last block and one free block of 4: of 7 drafts there is room for 5."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=7), num_kv_blocks=4)
    plant(llm, lambda seq: [5] * 20)
    llm.add_request([1] * 6, SamplingParams(max_tokens=10, **GREEDY), request_id="old")
    llm.add_request([2] * 2, SamplingParams(max_tokens=10, **GREEDY), request_id="new")
    llm.step()  # prompts: 2 blocks and 1
    llm._requests["new"].seqs[0].max_output_tokens = 1
    batch = llm.scheduler.schedule()
    llm._pipeline.speculator.add_drafts(batch)
    first = batch.scheduled[0]
    assert (first.seq.request_id, len(first.drafts), first.num_tokens) == ("old", 5, 6)
    assert llm.block_manager.num_free_blocks == 0 and len(first.block_table) == 3


def test_the_budget_goes_to_tokens_first(engine):
    """Two that decode, and a budget of 6: one token each, then 4 drafts, the oldest first. A prompt comes first."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3), max_num_batched_tokens=6, max_num_seqs=4)
    plant(llm, lambda seq: [5] * 20)
    for name in "ab":
        llm.add_request([1, 2], SamplingParams(max_tokens=20, **GREEDY), request_id=name)
    llm.step()
    llm.step()
    assert llm.metrics.trace[-1].tokens == {"a": 4, "b": 2}
    llm.add_request([1] * 3, SamplingParams(max_tokens=20, **GREEDY), request_id="c")
    llm.step()
    assert llm.metrics.trace[-1].tokens == {"a": 2, "b": 1, "c": 3}


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_runs_that_end_anywhere_in_a_block(engine, solo, block_size, num_tokens):
    """Three requests whose drafts are right up to every place: rejected blocks go back and forth between them, so a row
    of the block table must not be taken for what it was."""
    blocks = {1: 96, 2: 48, 4: 24, 16: 8}[block_size]
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=num_tokens), block_size=block_size, num_kv_blocks=blocks)
    params, turn = dict(max_tokens=24, **GREEDY), [0]
    lengths = (5, 15, 16)
    tokens = {length: solo.tokens(some_prompt(length), **params) for length in lengths}

    def rule(tokens: list[int], count: int) -> list[int]:
        turn[0] += 1
        return [*right(tokens, turn[0] % (num_tokens + 1)), *[3] * count][:count]

    plant(llm, lambda seq: tokens[seq.num_prompt_tokens], rule)
    watch(llm)
    outputs = llm.generate([some_prompt(n) for n in lengths], SamplingParams(**params), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(tokens.values())
    assert_idle(llm)


def test_rolled_back_blocks_are_taken_again_first():
    """They hold nothing that anybody could ask for; those that wait behind them may. And the table is a new list, as
    two of its blocks may be others the next time while length and end are the same."""
    manager = BlockManager(8, 1)
    manager.allocate("a", 2)
    rows, blocks = TableRows(), manager.table("a").blocks
    manager.grow({"a": 4})
    assert rows.fill([blocks]).tolist() == [[0, 1, 2, 3]]
    manager.roll_back("a", 2)
    assert list(manager._pool.free) == [2, 3, 4, 5, 6, 7] and manager.table("a").num_tokens == 2
    manager._pool.free.move_to_end(2)
    manager._pool.free.move_to_end(3, last=False)
    manager._pool.free.move_to_end(4, last=False)
    manager.grow({"a": 4})
    assert rows.fill([manager.table("a").blocks]).tolist() == [[0, 1, 4, 3]]
    manager.roll_back("a", 4)
    assert manager.block_table("a") == [0, 1, 4, 3]
    manager.check_integrity()


def test_drafts_do_not_wear_the_prefix_cache_out(engine):
    """Wrong drafts take a block and give it back, step by step: always the same one."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=5), enable_prefix_caching=True, num_kv_blocks=16)
    prefix = some_prompt(28)
    llm.generate([prefix], SamplingParams(max_tokens=1, **GREEDY), use_tqdm=False)  # 7 blocks
    plant(llm, lambda seq: [], lambda tokens, count: [0] * count)
    llm.generate([[200, 201]], SamplingParams(max_tokens=20, **GREEDY), use_tqdm=False)
    assert llm.metrics.drafted_tokens > 50
    llm.metrics.reset()
    llm.generate([prefix], SamplingParams(max_tokens=1, **GREEDY), use_tqdm=False)
    assert llm.metrics.prefix_hit_tokens == 24


def test_graphs_replay_steps_with_drafts(engine, solo):
    """A draft is one more row. With rows for 4 sequences of 1 + 3 tokens no step of drafts runs without a graph."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3), enforce_eager=False, max_num_seqs=4)
    params = dict(max_tokens=16, temperature=1.0, seed=2, ignore_eos=True)
    tokens = {length: solo.tokens(some_prompt(length), **params) for length in (2, 3, 4, 5)}
    plant(llm, lambda seq: tokens[seq.num_prompt_tokens])
    outputs = llm.generate([some_prompt(n) for n in tokens], SamplingParams(**params), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(tokens.values())
    m = llm.metrics
    assert llm.model_runner.graphs.sizes[-1] == 16
    assert m.graph_replays == m.steps == 5 and m.accepted_tokens == m.drafted_tokens == 4 * (15 - 4)
    assert [record.padding_tokens for record in m.trace] == [2, 0, 0, 0, 4]


@pytest.mark.parametrize(("most", "steps"), [(12, 8), (512, 5)])
def test_drafts_end_where_graphs_do(engine, solo, monkeypatch, most, steps):
    """With 576 rows for graphs of 512 a step took four times as long as one with 320. Here 4 + 8 rows fit, of 16."""
    monkeypatch.setattr(cuda_graphs, "MAX_DRAFT_ROWS", most)
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3), enforce_eager=False, max_num_seqs=4)
    params = dict(max_tokens=16, temperature=1.0, seed=2, ignore_eos=True)
    tokens = {length: solo.tokens(some_prompt(length), **params) for length in (2, 3, 4, 5)}
    plant(llm, lambda seq: tokens[seq.num_prompt_tokens])
    outputs = llm.generate([some_prompt(n) for n in tokens], SamplingParams(**params), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(tokens.values())
    m = llm.metrics
    assert m.graph_replays == m.steps - (most < 14) and m.steps == steps  # the prompts have 14 tokens
    assert m.accepted_tokens == m.drafted_tokens > 0
    assert all(sum(record.tokens.values()) <= most for record in m.trace[1:])


def test_logprobs_are_those_of_the_tokens(engine, solo):
    """Rows of rejected drafts have logits too; nobody wants theirs."""
    llm = engine(SpeculativeConfig(method="ngram", num_tokens=3))
    params = dict(max_tokens=12, logprobs=2, **GREEDY)
    alone = solo.run(some_prompt(5), **params).outputs[0]
    turn = [0]

    def rule(tokens, count):
        turn[0] += 1
        return [*tokens[: turn[0] % 4], 0, 0, 0][:count]

    plant(llm, lambda seq: alone.token_ids, rule)
    output = llm.generate([some_prompt(5)], SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == alone.token_ids and len(output.logprobs) == 12
    for ours, theirs in zip(output.logprobs, alone.logprobs, strict=True):
        assert list(ours) == list(theirs)
        for token in ours:
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-9)


# errors

PLACES = {
    "propose": (DraftModel, "propose"),
    "a step of the draft model": (DraftModel, "_step"),
    "grow": (BlockManager, "grow"),
    "allocate": (BlockManager, "allocate"),
    "forward": (CausalLM, "forward"),
    "launch": (ModelRunner, "launch"),
    "move": (KVCache, "move"),
    "append": (Sequence, "append_token"),
    "roll back": (BlockManager, "roll_back"),
    "free": (BlockManager, "free"),
}
REQUESTS = {"a": (some_prompt(9), dict(max_tokens=9)), "b": (some_prompt(5), dict(max_tokens=7, n=2, seed=3))}


def serve_both(llm: LLM, error: type[BaseException] = RuntimeError, step: Callable[[LLM], list] = LLM.step) -> set[str]:
    """Serve REQUESTS; after an error whoever was lost is lost, and nothing of it is left. Returns who was served."""
    for name, (prompt, params) in REQUESTS.items():
        llm.add_request(prompt, SamplingParams(ignore_eos=True, temperature=0.0, **params), request_id=name)
    served = set()
    for _ in range(200):
        if not llm.has_unfinished_requests() and not followers(llm):
            break
        try:
            served |= {output.request_id for output in step(llm)}
        except error:
            followers(llm)
        check(llm)
    assert_idle(llm)
    assert followers(llm) == {}
    return served


@pytest.mark.parametrize("place", PLACES)
def test_an_error_anywhere_in_a_step(place, engine, monkeypatch):
    """Target and draft model have given back everything, and serve the next requests as if nothing had been."""
    llm = engine(SpeculativeConfig(model="tiny", num_tokens=2), num_kv_blocks=12)
    assert serve_both(llm) == set(REQUESTS)
    for at in range(1, 200, 2):
        error, after = (KeyboardInterrupt, RuntimeError)[at // 2 % 2], bool(at // 4 % 2)
        with failing(monkeypatch, *PLACES[place], error, at, after) as calls:
            serve_both(llm, error)
        if len(calls) < at:
            break
    assert at > 2 and serve_both(llm) == set(REQUESTS)


def test_ctrl_c_between_any_two_lines(engine):
    """Every 501st line of the whole workload is tried."""
    llm = engine(SpeculativeConfig(model="tiny", num_tokens=2), num_kv_blocks=12)
    at = 1
    while at:
        step, where = interrupt_at_line(at)
        try:
            serve_both(llm, KeyboardInterrupt, step)
        except Exception as error:
            raise AssertionError(f"Ctrl-C before {where[0]}, and then {error!r}") from error
        at = at + 501 if where else 0
    assert serve_both(llm) == set(REQUESTS)


def test_a_closed_engine_holds_no_draft_model(engine):
    llm = engine(ITSELF)
    llm.generate([[1, 2]], SamplingParams(max_tokens=3), use_tqdm=False)
    draft = weakref.ref(llm._pipeline.speculator.proposer)
    llm.close()
    gc.collect()
    assert draft() is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ngram-drafts", "3"], "up to 3 drafts by ngram"),
        (["--draft-model", "tiny"], "up to 4 drafts by tiny"),
        (["--kv-cache-dtype", "int8"], "tokens in int8"),
        (["--ngram-drafts", "3", "--draft-model", "tiny"], "give one of the two"),
        (["--ngram-drafts", "-1"], "num_tokens=-1"),
    ],
)
def test_on_the_command_line(monkeypatch, capsys, caplog, arguments, said):
    """The same text, and the first log line (or the error) says so."""
    common = ["abcabc", "--raw", "--model", "tiny", "--device", "cpu", "--max-tokens", "9"]
    code, plain, _ = run_main(monkeypatch, capsys, *common)
    assert code == 0
    code, text, error = run_main(monkeypatch, capsys, *common, *arguments)
    assert said in error + caplog.text
    if code == 0 and "int8" not in arguments:
        assert text == plain
    assert code == (2 if text == "" else 0)
