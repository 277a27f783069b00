"""Asynchronous scheduling: a step is planned while the last one runs, and nobody can tell from the tokens.

The reference is one sequence at a time, in turn. On a CPU a step is computed when it is launched; what the tests watch
is that nobody reads its tokens, or takes its blocks, before it is collected.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .. import LLM, RequestOutput, SamplingParams, model_runner, pipeline
from ..block_manager import BlockManager
from ..config import POLICIES, PREEMPTION_MODES
from ..model_runner import ModelRunner
from ..pipeline import Pipeline
from ..scheduler import Scheduler
from ..sequence import Sequence, SequenceGroup
from ..staging import TableRows
from .script import force, new_engine, scripted
from .test_batching import Solo, assert_same_logprobs, some_prompt
from .test_failures import PLACES, failing, interrupt_at_line

GREEDY = dict(temperature=0.0, ignore_eos=True)
ASYNC = dict(max_model_len=64, block_size=4, num_kv_blocks=64, async_scheduling=True)


@pytest.fixture(scope="module")
def solo():
    solo = Solo()
    yield solo
    solo.llm.close()


@pytest.fixture
def engine():
    """Makes asynchronous engines that are closed after the test."""
    made: list[LLM] = []

    def make(**options) -> LLM:
        made.append(new_engine(**ASYNC | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def add(llm: LLM, name: str, prompt: list[int], **params) -> SequenceGroup:
    llm.add_request(prompt, SamplingParams(**GREEDY | params), request_id=name)
    return llm._requests[name]


def check(llm: LLM) -> None:
    """Blocks are whole; no sequence is more than one token ahead; who is in flight has its blocks."""
    llm.block_manager.check_integrity()
    for group in llm._requests.values():
        for seq in group.seqs:
            assert 0 <= seq.num_pending_tokens <= seq.num_steps_in_flight <= 1
            assert not seq.num_steps_in_flight or llm.block_manager.holds(seq.seq_id)
            assert sum(token < 0 for token in seq.token_ids) == seq.num_pending_tokens
            assert seq.is_finished or seq.num_computed_tokens <= seq.num_tokens


def run_out(llm: LLM) -> dict[str, RequestOutput]:
    """Step until nothing is left."""
    done = {}
    for _ in range(500):
        if not llm.has_unfinished_requests():
            break
        done |= {output.request_id: output for output in llm.step()}
        check(llm)
    assert_idle(llm)
    return done


def assert_idle(llm: LLM) -> None:
    """Nothing is under way, and all blocks are free."""
    manager = llm.block_manager
    assert not llm.has_unfinished_requests() and not llm.scheduler.has_unfinished, "somebody waits for ever"
    assert llm._pipeline.in_flight is None
    assert (manager.num_free_blocks, manager.num_free_swap_blocks) == (manager.num_blocks, manager.num_swap_blocks)
    llm.block_manager.check_integrity()


def poison_free_blocks(llm: LLM) -> None:
    """What nobody holds and nobody can find becomes NaN."""
    cache, manager = llm.model_runner.kv_cache, llm.block_manager
    known = manager.prefix_cache
    free = [block for block in manager._pool.free if known is None or not known.holds(block)]
    cache.data[:, :, free] = float("nan")
    cache.host[list(manager._host.free)] = float("nan")


@contextmanager
def guarded(llm: LLM) -> Iterator[Counter]:
    """Whenever a block is taken, it must not be one that a step in flight reads or writes; nobody who is in flight may
    be preempted or freed; and a plan knows the tokens that it depends on. Counts what happened."""
    pool, pipe, scheduler = llm.block_manager._pool, llm._pipeline, llm.scheduler
    take, launch, preempt = pool.take, pipe._launch, scheduler._preempt
    in_use: dict[int, set[int]] = {}  # step in flight -> its blocks
    seen = Counter()

    def checked_take() -> int:
        block = take()
        if pipe.in_flight is not None:
            seen["taken with a step in flight"] += 1
            assert block not in in_use[id(pipe.in_flight)], f"block {block} belongs to a step in flight"
        return block

    def checked_launch(batch, *more):
        for item in batch.scheduled:
            seen["looked ahead"] += item.seq.num_pending_tokens
            assert not item.seq.num_pending_tokens or item.seq.params.repetition_penalty == 1.0
        blocks = {block for item in batch.scheduled for block in item.block_table}
        step = launch(batch, *more)
        in_use[id(step)] = blocks
        return step

    def checked_preempt(group, batch):
        seen["preempted"] += 1
        assert pipe.in_flight is None and not group.is_in_flight, "preempted with a step in flight"
        return preempt(group, batch)

    pool.take, pipe._launch, scheduler._preempt = checked_take, checked_launch, checked_preempt
    try:
        yield seen
    finally:
        del pool.take, pipe._launch, scheduler._preempt


# any workload


def draw_request(chance: random.Random, block_size: int) -> dict:
    """Prompts that begin alike or not, with lengths around the ends of blocks, and every way to end."""
    params = {
        "max_tokens": [12, 12, 9, 5, 2, 1],
        "n": [1, 1, 2, 3],
        "temperature": [0.0, 1.0, 0.7],
        "seed": range(2**40),
        "repetition_penalty": [1.0] * 7 + [1.4],
        "top_k": [0, 0, 9],
        "top_p": [1.0, 1.0, 0.8],
        "min_tokens": [0, 0, 1],
        "stop_token_ids": [(), (), tuple(range(40)), tuple(range(0, 256, 9))],
        "stop": [(), (), (), ("e", "0A"), ("\x00", " ")],
        "logprobs": [None, None, None, 2],
        "ignore_eos": [True, False],
    }
    return {
        "shared": min(12, chance.choice([0, 0, block_size, 2 * block_size, 2 * block_size + 1])),
        "own": [chance.randrange(256) for _ in range(chance.randint(1, 6))],
        "params": {name: chance.choice(values) for name, values in params.items()},
        "same id": chance.random() < 0.3,  # as the one before it, once that one is gone
        "how": chance.choice(["step", "step", "step", "step", "stream", "closed stream"]),
    }


def draw_engine(chance: random.Random, **options) -> LLM:
    """A pool of 2 to 24 blocks, more often a small one, and of 20 tokens at least."""
    least = -(-20 // options["block_size"])
    options |= {
        "policy": chance.choice(POLICIES),
        "num_swap_blocks": chance.choice([0, 3, 50]),
        "enforce_eager": chance.choice([True, False]),
        "num_kv_blocks": min(chance.randint(least, 24), chance.randint(least, 24)),
        "max_num_seqs": chance.choice([3, 4, 8]),
        "max_num_batched_tokens": chance.choice([20, 24, 64]),
        "watermark": chance.choice([0.0, 0.0, 0.1]),
    }
    return new_engine(max_model_len=64, async_scheduling=True, **options)


OFTEN = {"steps": 200, "preemptions": 5, "discarded_tokens": 7, "aborted": 7, "streams": 10, "same id": 5}
OFTEN |= {"taken with a step in flight": 70, "looked ahead": 170, "cow_copies": 5, "refused": 2}


@pytest.mark.parametrize("is_caching", [False, True], ids=["plain", "prefix"])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_any_workload_gives_the_tokens_of_a_solo_run(mode, is_caching, solo):
    """Stops seen late, forks, preemption, aborts and streams, in pools of 2 to 24 blocks: whoever plans a step without
    knowing the tokens of the last one must not lose, repeat or mix up any."""
    events = Counter()

    @settings(max_examples=max(50, settings().max_examples // 4))
    @given(st.integers(0, 2**32))
    def play(seed):
        chance = random.Random(seed)
        block_size = chance.choice([1, 2, 3, 4, 16])
        requests = [draw_request(chance, block_size) for _ in range(chance.randint(4, 9))]
        llm = draw_engine(chance, preemption_mode=mode, enable_prefix_caching=is_caching, block_size=block_size)
        with llm, guarded(llm) as seen:
            serve(llm, requests, chance, solo, events)
            assert_idle(llm)
        events.update(seen)
        events.update(llm.metrics.counters())

    play()
    print({name: events[name] for name in (*OFTEN, "prefix_hit_tokens", "swapped_in_blocks")})
    often = OFTEN | ({"prefix_hit_tokens": 100} if is_caching else {})
    assert all(events[event] >= least for event, least in often.items()), f"too little happens: {dict(events)}"


def serve(llm: LLM, requests: list[dict], chance: random.Random, solo: Solo, events: Counter) -> None:
    """Hand in, step, read, abort and close as chance wants, and compare what comes out."""
    shared, todo = some_prompt(12, 7), list(enumerate(requests))
    asked: dict[str, int] = {}  # who has which id now
    streams: dict[int, tuple[Iterator, list[str]]] = {}
    for _ in range(600):
        if not todo and not streams and not llm.has_unfinished_requests():
            return
        poison_free_blocks(llm)
        if todo and chance.random() < 0.6:
            i, one = todo[0]
            name = f"r{i - 1}" if one["same id"] and i else f"r{i}"
            if name not in asked:
                todo.pop(0)
                prompt = shared[: one["shared"]] + one["own"]
                try:
                    if one["how"] == "step":
                        llm.add_request(prompt, SamplingParams(**one["params"]), request_id=name)
                        asked[name] = i
                        events["same id"] += name != f"r{i}"
                    else:
                        streams[i] = llm.stream(prompt, SamplingParams(**one["params"] | {"n": 1})), []
                        events["streams"] += 1
                except ValueError:  # too large for this pool
                    events["refused"] += 1
        if asked and chance.random() < 0.05:
            name = chance.choice(list(asked))
            if name in llm._requests:  # else it has finished, and its output comes with the next step
                llm.abort_request(name)
                assert llm._pipeline.in_flight is None
                del asked[name]
                events["aborted"] += 1
                check(llm)
        if streams and chance.random() < 0.5:
            read(streams, chance.choice(list(streams)), requests, chance, shared, solo)
        else:
            for output in llm.step():
                one = requests[asked.pop(output.request_id)]
                compare(output, shared[: one["shared"]] + one["own"], one["params"], solo)
        check(llm)
    raise AssertionError("work is left: somebody waits for ever")


def read(streams: dict, i: int, requests: list[dict], chance: random.Random, shared: list[int], solo: Solo) -> None:
    """One more piece of a stream, or its end; some are closed early."""
    stream, pieces = streams[i]
    one = requests[i]
    wanted = solo.run(shared[: one["shared"]] + one["own"], **one["params"]).outputs[0].text
    if one["how"] == "closed stream" and pieces and chance.random() < 0.3:
        stream.close()
        del streams[i]
        assert wanted.startswith("".join(pieces))
        return
    piece = next(stream, None)
    if piece is None:
        del streams[i]
        assert "".join(pieces) == wanted
    else:
        pieces.append(piece)


def compare(output: RequestOutput, prompt: list[int], params: dict, solo: Solo) -> None:
    assert output.finished and len(output.outputs) == params["n"]
    for completion in output.outputs:
        alone = solo.run(prompt, completion.index, **params).outputs[0]
        assert (completion.token_ids, completion.text) == (alone.token_ids, alone.text)
        assert completion.finish_reason == alone.finish_reason
        if params["logprobs"] is not None:
            assert_same_logprobs(completion, alone)


# what a stop seen late costs


SINGLE = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 99),
        "stop_token_ids": st.sampled_from([(), tuple(range(50)), tuple(range(0, 256, 2))]),
        "min_tokens": st.sampled_from([0, 1]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "logprobs": st.sampled_from([None, 1]),
    }
)


@pytest.fixture(scope="module")
def pairs():
    """(in turn, asynchronous) engines, by options; each is made once."""
    made: dict[str, tuple[LLM, LLM]] = {}

    def of(**options) -> tuple[LLM, LLM]:
        key = repr(options)
        if key not in made:
            made[key] = new_engine(**ASYNC | options | {"async_scheduling": False}), new_engine(**ASYNC | options)
        return made[key]

    yield of
    for pair in made.values():
        for llm in pair:
            llm.close()


@given(
    params=SINGLE,
    length=st.integers(1, 20),
    policy=st.sampled_from(POLICIES),
    block_size=st.sampled_from([1, 4]),
    eager=st.booleans(),
)
def test_of_one_request_only_discarded_tokens_differ(params, length, policy, block_size, eager, pairs):
    """A token that is computed after the end is waste, and counted as such: in no other counter, and not as a step.

    That holds for a request alone. Of several who has ended keeps its place and its blocks for one step more, so steps,
    idle slots, and the peaks of what is reserved and used may be others, and a copy may be made for a token that is
    then dropped."""
    in_turn, ahead = pairs(policy=policy, block_size=block_size, enforce_eager=eager)
    outputs = []
    for llm in (in_turn, ahead):
        llm.metrics.reset()
        outputs.append(llm.generate([some_prompt(length)], SamplingParams(**params), use_tqdm=False)[0].outputs[0])
    first, second = outputs
    assert (first.token_ids, first.text, first.logprobs) == (second.token_ids, second.text, second.logprobs)
    assert first.finish_reason == second.finish_reason
    stopped_early = first.finish_reason == "stop" and len(first.token_ids) < params["max_tokens"]
    waste = int(stopped_early and params["repetition_penalty"] == 1.0)
    assert ahead.metrics.counters() == in_turn.metrics.counters() | {"discarded_tokens": waste}
    for one, other in zip(in_turn.metrics.trace, ahead.metrics.trace, strict=True):
        assert (one.tokens, one.attention_pairs, one.finished) == (other.tokens, other.attention_pairs, other.finished)
    assert_idle(ahead)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 3])
def test_an_end_that_is_foreseen_wastes_nothing(engine, policy, n):
    """max_tokens is known to the plan: one who is about to end gets no further token, and no block for it."""
    llm = engine(policy=policy, max_num_seqs=6)
    for i, count in enumerate((1, 2, 5, 8)):
        add(llm, str(i), some_prompt(3 + i), max_tokens=count, n=n, temperature=1.0)
    done = run_out(llm)
    assert llm.metrics.discarded_tokens == 0
    assert [len(done[str(i)].outputs[n - 1].token_ids) for i in range(4)] == [1, 2, 5, 8]
    assert llm.metrics.decode_tokens == n * (0 + 1 + 4 + 7)


def test_a_full_context_wastes_nothing(engine):
    """The end of the context is an end by count too: a token behind it would have no position."""
    llm = engine(max_model_len=16)
    add(llm, "a", some_prompt(10), max_tokens=None)
    assert len(run_out(llm)["a"].outputs[0].token_ids) == 6
    assert llm.metrics.discarded_tokens == 0


def test_a_late_stop_beside_a_neighbour_by_hand(engine):
    """a stops with its second token, b goes on. Step 3 computes one token for each: b's counts, a's is waste; in steps
    and pairs nothing of it is left."""
    llm = engine(max_num_seqs=2, trace_blocks=True)
    with scripted(llm, force([10, 11, 12, 13], 256), 3):
        add(llm, "a", [1, 2, 3], max_tokens=4, stop_token_ids=(11,))
        add(llm, "b", [4, 5, 6], max_tokens=4)
        done = run_out(llm)
    assert done["a"].outputs[0].token_ids == [10, 11] and done["b"].outputs[0].token_ids == [10, 11, 12, 13]
    m = llm.metrics
    assert [record.tokens for record in m.trace] == [{"a": 3, "b": 3}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1}]
    assert [record.discarded_tokens for record in m.trace] == [0, 0, 1, 0]
    assert [record.attention_pairs for record in m.trace] == [12, 8, 5, 6]
    assert [record.decode_tokens for record in m.trace] == [0, 2, 1, 1]
    assert [record.idle_slots for record in m.trace] == [0, 0, 1, 1]
    assert [record.kv_tokens_used for record in m.trace] == [6, 8, 9, 11]  # a keeps its 5 places for a step
    assert (m.steps, m.tokens_forwarded, m.discarded_tokens) == (4, 6 + 2 + 1 + 1, 1)


def test_samples_that_all_stop_late(engine):
    """One token of waste for each of three samples, whose request has one entry in the record."""
    llm = engine()
    with scripted(llm, force([10, 11, 12, 13], 256), 3):
        add(llm, "a", [1, 2, 3], max_tokens=4, n=3, stop_token_ids=(11,))
        add(llm, "b", [1, 2, 3], max_tokens=4)
        run_out(llm)
    assert [record.tokens for record in llm.metrics.trace] == [{"a": 3, "b": 3}, {"a": 3, "b": 1}, {"b": 1}, {"b": 1}]
    assert llm.metrics.discarded_tokens == 3


def test_a_step_that_nobody_needed_is_no_step(engine):
    """All that a step computed is waste: it is not counted, and the end is noted with the step that brought it."""
    llm = engine()
    with scripted(llm, force([10, 11, 12], 256), 2):
        add(llm, "a", [1, 2], max_tokens=3, stop_token_ids=(10,))
        run_out(llm)
    assert (llm.metrics.steps, llm.metrics.tokens_forwarded, llm.metrics.discarded_tokens) == (1, 2, 1)
    assert [record.finished for record in llm.metrics.trace] == [["a"]]


def test_no_logprobs_for_a_token_that_is_dropped(engine):
    """One entry per token: the waste has none."""
    llm = engine()
    with scripted(llm, force([10, 11, 12, 13], 256), 3):
        add(llm, "a", [1, 2, 3], max_tokens=4, n=2, stop_token_ids=(11,), logprobs=1, temperature=1.0)
        add(llm, "b", [1, 2, 3], max_tokens=4, logprobs=1)
        done = run_out(llm)
    entries = [len(one.logprobs) for one in (*done["a"].outputs, *done["b"].outputs)]
    assert entries == [2, 2, 4]


# when things happen


def test_one_step_is_under_way_between_calls(engine):
    """The tokens of a step are read in the next call: that is the whole idea."""
    llm = engine()
    group = add(llm, "a", [1, 2, 3], max_tokens=2)
    seq = group.seqs[0]
    known = []
    while llm.has_unfinished_requests():
        llm.step()
        known.append((seq.num_known_tokens, seq.num_pending_tokens))
    assert known == [(3, 1), (4, 1), (5, 0)]


def test_blocks_stay_until_the_step_is_collected(engine):
    """a stops with its first token while a token after it is computed: its successor, which needs the whole pool, must
    wait until that step is done, or both would write into one block."""
    llm = engine(num_kv_blocks=3, watermark=0.0)
    with scripted(llm, force([10, 11, 12, 13], 256), 4), guarded(llm):
        a = add(llm, "a", [1, 2, 3, 4], max_tokens=4, stop_token_ids=(10,))
        add(llm, "b", some_prompt(12), max_tokens=1)
        assert llm.step() == []
        assert llm.step() == [] and a.is_finished and a.is_in_flight, "it has ended, and one more token is on its way"
        assert llm.block_manager.block_table("a") == [0, 1]
        (output,) = llm.step()
        assert output.request_id == "a" and llm.scheduler.running == {}
        assert set(run_out(llm)) == {"b"}


def must_drain(llm: LLM) -> bool:
    return llm._pipeline.must_drain


def test_a_penalty_needs_all_tokens(engine, solo):
    """What has been said lowers the score of the next token, so the plan cannot go ahead; without a penalty it does."""
    for penalty in (1.0, 1.7):
        llm = engine()
        add(llm, "a", [1, 2, 3], max_tokens=6, repetition_penalty=penalty)
        llm.step()
        assert must_drain(llm) == (penalty != 1.0)
        with guarded(llm) as seen:
            got = run_out(llm)["a"].outputs[0].token_ids
        assert (seen["looked ahead"] > 0) == (penalty == 1.0)
        assert got == solo.tokens([1, 2, 3], **GREEDY, max_tokens=6, repetition_penalty=penalty)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_nobody_is_preempted_while_in_flight(engine, solo, mode):
    """Whoever loses its blocks computes its output again: for that all of it must be known."""
    llm = engine(num_kv_blocks=6, preemption_mode=mode, num_swap_blocks=16)
    wanted = {}
    for name, offset in (("a", 0), ("b", 3)):
        add(llm, name, some_prompt(8, offset), max_tokens=12)
        wanted[name] = solo.tokens(some_prompt(8, offset), **GREEDY, max_tokens=12)
    with guarded(llm) as seen:
        done = run_out(llm)
    assert {name: output.outputs[0].token_ids for name, output in done.items()} == wanted
    assert seen["preempted"] == llm.metrics.preemptions > 0


@pytest.mark.parametrize("is_caching", [False, True])
@pytest.mark.parametrize("stop", [(), tuple(range(256))])
def test_blocks_of_samples_that_fork_again(engine, solo, stop, is_caching):
    """The samples of g were preempted: right after their second fork they want the blocks of all their output, not one
    each. The pool has two free blocks for every sequence, and yet h, the newest, is preempted, with a token pending."""
    options = dict(block_size=1, num_kv_blocks=42, max_num_seqs=5, max_num_batched_tokens=5, watermark=0.0)
    llm = engine(**options, enable_prefix_caching=is_caching)
    requests = {
        "e": ([1], dict(max_tokens=40)),
        "f": ([2] * 4, dict(max_tokens=18)),
        "g": ([3] * 3, dict(max_tokens=12, n=2, temperature=1.0, seed=1)),
        "h": ([4], dict(max_tokens=4, stop_token_ids=stop)),
    }
    got = {}
    with guarded(llm):
        for name, (prompt, params) in requests.items():
            while name == "h" and not llm.metrics.preemptions:
                llm.step()
            add(llm, name, prompt, **params)
        got = run_out(llm)
    for name, (prompt, params) in requests.items():
        for one in got[name].outputs:
            assert one.token_ids == solo.tokens(prompt, one.index, **GREEDY | params)
    assert llm.metrics.preemptions > 1


def test_an_abort_waits_for_the_step(engine):
    """What it held may be given to others at once, so nothing may still write there."""
    llm = engine()
    add(llm, "a", some_prompt(6), max_tokens=9)
    add(llm, "b", some_prompt(5), max_tokens=9)
    llm.step()
    assert llm._pipeline.in_flight is not None
    llm.abort_request("nobody")
    assert llm._pipeline.in_flight is not None, "nobody has that id, so there is nothing to wait for"
    llm.abort_request("a")
    assert llm._pipeline.in_flight is None and not llm.block_manager.holds("a")
    assert set(run_out(llm)) == {"b"}


def test_the_output_that_an_abort_brings_is_not_lost(engine, solo):
    """The step that the abort of a waits for ends b: b's output comes from the next call of `step`, even if nothing
    else is left to do."""
    llm = engine()
    add(llm, "a", some_prompt(6), max_tokens=9)
    add(llm, "b", some_prompt(5), max_tokens=1)
    assert llm.step() == []
    llm.abort_request("a")
    assert llm.has_unfinished_requests()
    (output,) = llm.step()
    assert output.request_id == "b"
    assert output.outputs[0].token_ids == solo.tokens(some_prompt(5), **GREEDY, max_tokens=1)
    assert_idle(llm)


@pytest.mark.parametrize("stop", [(), (10,)])
def test_no_output_of_the_one_that_is_aborted(engine, stop):
    """Its last token is on its way when it is aborted, and the abort waits for it: still no output comes."""
    llm = engine()
    with scripted(llm, force([10, 11], 256), 3):
        add(llm, "a", [1, 2, 3], max_tokens=4 if stop else 1, stop_token_ids=stop)
        assert llm.step() == []
        llm.abort_request("a")
        assert run_out(llm) == {}


def test_generate_and_streams_keep_what_belongs_to_step(engine, solo):
    """Requests end while generate, a stream, a stream's end or an abort drives the engine."""
    llm = engine(max_num_seqs=8)
    wanted = {}
    for i, count in enumerate((1, 2, 3, 4, 5, 6, 9)):
        add(llm, f"r{i}", some_prompt(3 + i), max_tokens=count)
        wanted[f"r{i}"] = solo.tokens(some_prompt(3 + i), **GREEDY, max_tokens=count)
    one = SamplingParams(**GREEDY, max_tokens=3)
    stream, closed = llm.stream([5, 6], one), llm.stream([8], one)
    pieces = [next(stream)]
    next(closed)
    (output,) = llm.generate([[7, 7, 7]], one, use_tqdm=False)
    closed.close()
    pieces += stream
    got = {name: output.outputs[0].token_ids for name, output in run_out(llm).items()}
    assert got == wanted
    assert output.outputs[0].token_ids == solo.tokens([7, 7, 7], **GREEDY, max_tokens=3)
    assert "".join(pieces) == solo.run([5, 6], **GREEDY, max_tokens=3).outputs[0].text


def test_one_id_after_the_other(engine, solo):
    """An id is free as soon as its output has come, or it was aborted; the second of that name begins anew."""
    llm = engine()
    got = []
    for i in range(3):
        add(llm, "a", some_prompt(4 + i), max_tokens=4 + i, stop_token_ids=tuple(range(128)))
        if i == 1:
            llm.step()
            llm.step()
            llm.abort_request("a")
            continue
        got.append(run_out(llm)["a"].outputs[0].token_ids)
    params = dict(GREEDY, stop_token_ids=tuple(range(128)))
    assert got == [solo.tokens(some_prompt(4 + i), **params, max_tokens=4 + i) for i in (0, 2)]


# with the prefix cache


@pytest.mark.parametrize("stop", [(), tuple(range(128))])
@pytest.mark.parametrize("length", [7, 8, 9, 16])
def test_prefixes_are_found_as_in_turn(engine, solo, length, stop):
    """The hash of a block needs its tokens: one that is made while they are pending finds nothing, or something wrong.
    The second time the prompt is found, and then the whole conversation."""
    hits = []
    for is_async in (False, True):
        llm = engine(enable_prefix_caching=True, async_scheduling=is_async)
        prompt, params = some_prompt(length), dict(GREEDY, max_tokens=9, stop_token_ids=stop)
        for _ in range(2):
            answer = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids
            assert answer == solo.tokens(prompt, **params)
            hits.append(llm.metrics.prefix_hit_tokens)
        turn = [*prompt, *answer[:-1], 3]  # the last token of an answer was never computed
        got = llm.generate([turn], SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids
        assert got == solo.tokens(turn, **params)
        hits.append(llm.metrics.prefix_hit_tokens)
        assert_idle(llm)
    assert hits[:3] == hits[3:] and hits[1] == (length - 1) // 4 * 4
    assert hits[2] - hits[1] == (len(turn) - 1) // 4 * 4


def test_nothing_is_published_with_a_placeholder(engine):
    """Tokens in the prefix cache are ids: a placeholder in a hash stands for whatever its row was."""
    llm = engine(enable_prefix_caching=True, block_size=1)
    for name in "abc":
        add(llm, name, some_prompt(3, ord(name)), max_tokens=8)
    while llm.has_unfinished_requests():
        llm.step()
        cached = llm.block_manager.prefix_cache._by_block.values()
        assert all(token >= 0 for entry in cached for token in entry.tokens)
    assert len(llm.block_manager.prefix_cache) == 3 * (3 + 7)


# errors, closing, and the metrics


def test_close_with_a_step_in_flight(engine):
    """The engine is closed while the GPU works for it: a second call does nothing, and an open stream just ends."""
    llm = engine()
    add(llm, "a", [1, 2, 3], max_tokens=9, n=2)
    stream = llm.stream([4, 5], SamplingParams(**GREEDY, max_tokens=9))
    next(stream)
    assert llm._pipeline.in_flight is not None
    llm.close()
    assert not llm.has_unfinished_requests()
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    llm.block_manager.check_integrity()
    stream.close()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.step()


def test_reset_with_a_step_in_flight(engine, solo):
    """A step is counted when it is collected: one that is under way at the reset is the first of the new count."""
    llm = engine()
    add(llm, "a", [1, 2, 3], max_tokens=4)
    llm.step()
    llm.step()
    llm.metrics.reset()
    got = run_out(llm)["a"].outputs[0].token_ids
    assert got == solo.tokens([1, 2, 3], **GREEDY, max_tokens=4)
    assert (llm.metrics.steps, llm.metrics.tokens_forwarded, llm.metrics.decode_tokens) == (3, 3, 3)
    assert [record.step for record in llm.metrics.trace] == [0, 1, 2]
    assert llm.metrics.trace[-1].finished == ["a"]


STOPS = tuple(range(60))
REQUESTS = {  # in a pool of 11 blocks of 4: forks, copies, preemption and late stops
    "a": ([1, 2, 3, 4, 5, 6], SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True)),
    "b": ([9, 9, 9, 9, 9], SamplingParams(n=2, seed=2, max_tokens=8, ignore_eos=True)),
    "c": ([7, 8, 9], SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)),
    "d": ([3, 1], SamplingParams(n=2, seed=5, max_tokens=12, ignore_eos=True, stop_token_ids=STOPS)),
}


@pytest.fixture(params=PREEMPTION_MODES)
def small(request):
    options = dict(num_kv_blocks=11, num_swap_blocks=16, watermark=0.0, max_num_seqs=8, enable_prefix_caching=True)
    with new_engine(**ASYNC | options, preemption_mode=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected():
    with new_engine(max_model_len=64, async_scheduling=False) as llm:
        outputs = {name: llm.generate([prompt], one, use_tqdm=False) for name, (prompt, one) in REQUESTS.items()}
    return {name: [one.token_ids for one in output.outputs] for name, (output,) in outputs.items()}


def serve_all(
    llm: LLM, expected: dict, error: type[BaseException] | tuple = (), step: Callable[[LLM], list] = LLM.step
) -> tuple[set[str], set[str]]:
    """As in test_failures.py, but an output may have been made, and come with a later call, when the error comes."""
    llm.reset_prefix_cache()
    for name, (prompt, one) in REQUESTS.items():
        llm.add_request(prompt, one, request_id=name)
    got, lost = {}, set()
    for _ in range(100):
        if not llm.has_unfinished_requests():
            break
        before = set(llm._requests)
        try:
            got |= {output.request_id: [one.token_ids for one in output.outputs] for output in step(llm)}
        except error:
            lost |= before - set(llm._requests) - {output.request_id for output in llm._undelivered}
            assert llm._pipeline.in_flight is None or before == set(llm._requests)  # it came before anything was done
        check(llm)
    assert_idle(llm)
    assert got == {name: expected[name] for name in got}
    assert not lost & set(got) and lost | set(got) == set(REQUESTS)
    return set(got), lost


# What can be called often fails in every so many of its calls only.
ALL_PLACES = {name: (place, 1) for name, place in PLACES.items() if name != "postprocess: record"} | {
    "launch": ((Pipeline, "_launch"), 1),
    "launch: build": ((model_runner, "plan_step"), 1),
    "launch: tables": ((TableRows, "fill"), 2),
    "launch: to the host": ((ModelRunner, "send_to_host"), 2),
    "launch: pending": ((Sequence, "append_pending"), 5),
    "launch: record": ((pipeline, "step_record"), 1),
    "collect": ((Pipeline, "_collect"), 1),
    "collect: read": ((ModelRunner, "collect"), 2),
    "collect: take over": ((Pipeline, "_take_over"), 4),
    "collect: discard": ((pipeline, "discard"), 1),
    "collect: publish": ((BlockManager, "publish"), 2),
    "drain": ((Pipeline, "drain"), 1),
}


@pytest.mark.parametrize("place", ALL_PLACES)
def test_an_error_anywhere(place, small, expected, monkeypatch):
    """An error while one step is planned and another one runs: both are given up, whoever was in either is ended, and
    who waits goes on and gets the right tokens."""
    (owner, name), stride = ALL_PLACES[place]
    stride = 5 if name in ("append_token", "start", "free") else 2 * stride
    places = 0
    for at in range(1, 1000, stride):
        error, after = (KeyboardInterrupt, RuntimeError)[places % 2], bool(places // 2 % 2)
        with failing(monkeypatch, owner, name, error, at, after) as calls:
            serve_all(small, expected, error)
        if len(calls) < at:
            break
        places += 1
    assert serve_all(small, expected)[0] == set(REQUESTS)
    assert places or ("swap" in place and small.config.preemption_mode == "recompute"), "nothing was tested"


def test_ctrl_c_between_any_two_lines(small, expected):
    """As in test_failures.py: every 997th line of the whole workload is tried; another stride tries others."""
    stride, at, served = 997, 1, set()
    while at:
        step, where = interrupt_at_line(at)
        try:
            served |= serve_all(small, expected, KeyboardInterrupt, step)[0]
        except Exception as error:
            raise AssertionError(f"Ctrl-C before {where[0]}, and then {error!r}") from error
        at = at + stride if where else 0
    assert served == set(REQUESTS)


def test_the_workload_has_all_that_can_go_wrong(small, expected):
    small.metrics.reset()
    serve_all(small, expected)
    m, swaps = small.metrics, small.config.preemption_mode == "swap"
    assert m.preemptions >= 2 and m.cow_copies >= 2 and m.discarded_tokens >= 1
    assert (m.swapped_out_blocks > 0, m.recomputed_tokens > 0) == (swaps, not swaps)


def test_an_error_ends_who_is_in_flight_and_spares_who_waits(engine, solo, monkeypatch):
    """a is in the step that is under way and b waits for a place: when the plan fails, b must go on as if nothing had
    happened, and a must not stay behind with a step in flight that nobody collects."""
    llm = engine(max_num_seqs=1)
    a = add(llm, "a", [1, 2, 3], max_tokens=9)
    add(llm, "b", [4, 5, 6], max_tokens=5)
    llm.step()
    with failing(monkeypatch, Scheduler, "_reserve", RuntimeError, 1, False), pytest.raises(RuntimeError):
        llm.step()
    assert list(llm._requests) == ["b"]
    assert a.is_finished and not a.is_in_flight and a.seqs[0].finish_reason == "abort"
    assert run_out(llm)["b"].outputs[0].token_ids == solo.tokens([4, 5, 6], **GREEDY, max_tokens=5)


def test_an_error_while_an_abort_waits(engine, monkeypatch):
    """The step that it waits for fails: the error is raised, and nobody is left half done."""
    llm = engine()
    add(llm, "a", [1, 2, 3], max_tokens=9)
    add(llm, "b", [4, 5, 6], max_tokens=9)
    llm.step()
    with failing(monkeypatch, ModelRunner, "collect", RuntimeError, 1, False), pytest.raises(RuntimeError):
        llm.abort_request("a")
    assert_idle(llm)


def test_who_has_ended_is_returned_though_its_surplus_step_fails(engine, solo, monkeypatch):
    """A stop is seen one step late; if the step that was under way fails, the text is complete all the same."""
    llm = engine(max_num_seqs=2)
    (output,) = llm.generate([[9, 8]], SamplingParams(**GREEDY, max_tokens=1), use_tqdm=False)
    add(llm, "short", [9, 8], stop_token_ids=output.outputs[0].token_ids[:1], max_tokens=20)
    add(llm, "long", [7, 7], max_tokens=20)
    while not llm._requests["short"].is_finished:
        assert llm.step() == []
    with failing(monkeypatch, ModelRunner, "collect", RuntimeError, at=1, after=False), pytest.raises(RuntimeError):
        llm.step()
    (ended,) = llm.step()
    assert (ended.request_id, ended.outputs[0].token_ids) == ("short", output.outputs[0].token_ids)
    assert not llm.has_unfinished_requests()
