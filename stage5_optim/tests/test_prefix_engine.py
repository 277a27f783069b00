"""Prefix caching in the engine: the same tokens with less work, however hits, evictions, preemptions, samples and swaps
come together. The reference is an engine without the cache and with room for everybody.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .. import LLM, SamplingParams, prefix_cache
from ..block_manager import BlockManager
from ..config import POLICIES
from ..model import CausalLM
from ..model_runner import ModelRunner
from .script import new_engine
from .test_batching import Solo, assert_same_logprobs, check_invariants, some_prompt
from .test_prefix_cache import check_entries

GREEDY = dict(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def solo():
    solo = Solo()
    yield solo
    solo.llm.close()


@pytest.fixture
def engine():
    """Makes engines with prefix caching that are closed after the test."""
    made: list[LLM] = []

    def make(**options) -> LLM:
        defaults = {"max_model_len": 64, "block_size": 4, "num_kv_blocks": 64, "enable_prefix_caching": True}
        made.append(new_engine(**defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(autouse=True)
def no_empty_batch(monkeypatch):
    """In every test here: the model never sees a step without tokens, nor a sequence with none."""
    forward, launch = CausalLM.forward, ModelRunner.launch

    def checked_forward(self, input_ids, *more):
        assert len(input_ids) > 0, "a batch of length zero"
        return forward(self, input_ids, *more)

    def checked_launch(self, batch):
        for item in batch.scheduled:
            seq, end = item.seq, item.seq.num_computed_tokens + item.num_tokens
            assert 1 <= item.num_tokens == end - seq.num_computed_tokens and end <= seq.num_tokens
            assert len(item.block_table) * self.kv_cache.block_size >= end, "tokens without a slot"
        return launch(self, batch)

    monkeypatch.setattr(CausalLM, "forward", checked_forward)
    monkeypatch.setattr(ModelRunner, "launch", checked_launch)


def tokens_of(llm: LLM, *prompts: list[int], max_tokens: int = 4, **params) -> list[list[int]]:
    """Greedy, all in one call."""
    one = SamplingParams(**GREEDY | params, max_tokens=max_tokens)
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), one, use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    """All blocks are free, whether cached or not."""
    manager = llm.block_manager
    assert (manager.num_free_blocks, manager.num_free_swap_blocks) == (manager.num_blocks, manager.num_swap_blocks)
    if manager.prefix_cache is not None:
        check_entries(manager)


def distinct(length: int, offset: int) -> list[int]:
    """A prompt whose first tokens no other offset has."""
    return [offset, *some_prompt(length - 1, offset)]


# reported faults


@pytest.mark.parametrize("length", [16, 31, 32, 33, 48])
@pytest.mark.parametrize("together", [False, True])
def test_a_prompt_that_is_cached_as_a_whole(engine, length, together):
    """The second time nothing seems to be left to compute: the query length is zero and the kernel fails. One token at
    least has to be computed, here one block's worth when the prompt just fills its blocks."""
    prompt = some_prompt(length)
    (wanted,) = tokens_of(engine(enable_prefix_caching=False, block_size=16), prompt)
    llm = engine(block_size=16, num_kv_blocks=8)
    got = tokens_of(llm, prompt, prompt) if together else [tokens_of(llm, prompt)[0] for _ in range(2)]
    assert got == [wanted, wanted]
    cached = (length - 1) // 16 * 16
    assert llm.metrics.prefix_query_tokens == 2 * length
    assert llm.metrics.prefix_hit_tokens == cached
    assert llm.metrics.tokens_forwarded == 2 * (length + 3) - cached
    assert_idle(llm)


def test_an_overwritten_block_is_not_found(engine):
    """A's blocks have gone to B and D, and the map still leads to them: A gets their text, and counts it as a hit."""
    a, b, d = distinct(32, 1), distinct(48, 2), distinct(48, 3)
    llm = engine(block_size=16, num_kv_blocks=4)
    (first,) = tokens_of(llm, a, max_tokens=1)
    for other in (b, d):
        tokens_of(llm, other, max_tokens=1)
    llm.metrics.reset()
    assert tokens_of(llm, a, max_tokens=1) == [first]
    assert (llm.metrics.prefix_query_tokens, llm.metrics.prefix_hit_tokens) == (32, 0)
    assert len(llm.block_manager.prefix_cache) <= 4
    assert_idle(llm)


def test_equal_hashes_share_nothing(engine, monkeypatch):
    """The hash is 7 for all: two prompts share K and V if nobody compares their tokens."""
    monkeypatch.setattr(prefix_cache, "hash_block", lambda parent, tokens: b"7" * 16)
    prompts = [distinct(40, 1), distinct(40, 2)]
    wanted = tokens_of(engine(enable_prefix_caching=False), *prompts)
    for block_size in (4, 16, 32):  # of 32: one full block, so that no parent tells them apart
        llm = engine(block_size=block_size, num_kv_blocks=32)
        for _ in range(2):
            assert [tokens_of(llm, prompt)[0] for prompt in prompts] == wanted
        assert tokens_of(llm, *prompts) == wanted
        assert_idle(llm)


def test_the_same_block_behind_another_one(engine):
    """Two prompts with the same second block: its K and V depend on the first one too, so nothing is shared."""
    tail = some_prompt(20, 9)
    prompts = [distinct(16, 1) + tail, distinct(16, 2) + tail]
    wanted = tokens_of(engine(enable_prefix_caching=False), *prompts)
    llm = engine(block_size=16, num_kv_blocks=16)
    assert [tokens_of(llm, prompt)[0] for prompt in prompts] == wanted
    assert llm.metrics.prefix_hit_tokens == 0
    assert wanted[0] != wanted[1]


def test_a_preempted_request_finds_its_own_blocks(engine):
    """6 blocks of 4 for two requests that grow to 5: one steps back, and finds what it has computed. Whoever works out
    the tokens to compute before the lookup has too many of them, and writes out of bounds."""
    prompts = [distinct(8, 1), distinct(8, 2)]
    wanted = tokens_of(engine(), *prompts, max_tokens=12)
    off, llm = engine(num_kv_blocks=6, enable_prefix_caching=False), engine(num_kv_blocks=6)
    assert tokens_of(off, *prompts, max_tokens=12) == tokens_of(llm, *prompts, max_tokens=12) == wanted
    assert llm.metrics.preemptions > 0 and llm.metrics.prefix_hit_tokens > 0
    assert llm.metrics.recomputed_tokens < off.metrics.recomputed_tokens
    for metrics in (off.metrics, llm.metrics):
        assert metrics.tokens_forwarded == 2 * (8 + 11) + metrics.recomputed_tokens
    assert_idle(llm)


# what is saved, on paper


def test_a_shared_system_prompt(engine):
    """200 tokens shared and 50 of one's own in blocks of 16: 12 blocks, 192 tokens, are found and 58 computed."""
    shared = some_prompt(200)
    llm = engine(block_size=16, max_model_len=300, max_num_batched_tokens=300)
    prompts = [shared + distinct(50, offset) for offset in (251, 252)]
    wanted = tokens_of(engine(max_model_len=300, num_kv_blocks=80, enable_prefix_caching=False), *prompts)
    assert tokens_of(llm, prompts[0]) == wanted[:1]
    llm.metrics.reset()
    assert tokens_of(llm, prompts[1]) == wanted[1:]
    assert (llm.metrics.prefix_query_tokens, llm.metrics.prefix_hit_tokens) == (250, 192)
    assert llm.metrics.prefill_tokens == 58
    assert llm.metrics.attention_pairs == sum(range(193, 251)) + sum(range(251, 254))


@pytest.mark.parametrize("shared, own", [(40, 60), (42, 63)])
@pytest.mark.parametrize("n", [4, 5, 8])
def test_a_prefix_of_two_fifths_saves_its_share_of_blocks(engine, n, shared, own):
    """0.4 (N - 1) / N of the blocks, up to the rounding of the prefix to blocks; and as much of the computing."""
    prompts = [some_prompt(shared) + distinct(own, 240 + i) for i in range(n)]
    options = dict(max_model_len=128, num_kv_blocks=256, max_num_batched_tokens=1000, max_num_seqs=8)
    llm, off = engine(**options), engine(**options, enable_prefix_caching=False)
    assert tokens_of(llm, *prompts, max_tokens=1) == tokens_of(off, *prompts, max_tokens=1)
    length, found = shared + own, shared // 4
    assert off.metrics.kv_tokens_reserved_peak == 4 * n * -(-length // 4)
    assert llm.metrics.kv_tokens_reserved_peak == off.metrics.kv_tokens_reserved_peak - 4 * found * (n - 1)
    assert llm.metrics.kv_tokens_used_peak == n * length - 4 * found * (n - 1)
    saved = 1 - llm.metrics.kv_tokens_reserved_peak / off.metrics.kv_tokens_reserved_peak
    assert saved == pytest.approx(0.4 * (n - 1) / n, abs=1e-9 if length % 4 == 0 else 1 / -(-length // 4))
    assert llm.metrics.prefill_tokens == n * length - 4 * found * (n - 1)
    assert off.metrics.prefill_tokens == n * length


def test_what_is_shared_is_stored_once(engine):
    """Tokens in the cache are counted by place: otherwise more would be used than there is, and waste negative."""
    llm = engine(max_num_seqs=8)
    requests = [some_prompt(33), [*some_prompt(32), 3], [*some_prompt(16), 5, 6]]
    for prompt in requests:
        llm.add_request(prompt, SamplingParams(**GREEDY, max_tokens=5, n=2))
    while llm.has_unfinished_requests():
        llm.step()
        check_all(llm)
    first = llm.metrics.trace[0]
    assert first.kv_tokens_used == 33 + 1 + 2 and first.kv_tokens_reserved == 4 * (9 + 1 + 1)


def test_equal_prompts_in_one_step_share(engine):
    """What is planned can be found by the next request of the same step: K and V are written before they are read."""
    prompt = some_prompt(33)
    llm = engine(block_size=16, num_kv_blocks=6)
    assert tokens_of(llm, *[prompt] * 4, max_tokens=1) == tokens_of(engine(), prompt, max_tokens=1) * 4
    assert llm.metrics.steps == 1
    assert llm.metrics.prefix_hit_tokens == 3 * 32 and llm.metrics.tokens_forwarded == 33 + 3
    assert_idle(llm)


def test_a_conversation_goes_on(engine, solo):
    """The output is cached too: the next turn, which begins with prompt and answer, computes only what is new."""
    llm = engine()
    prompt = some_prompt(10)
    (answer,) = tokens_of(llm, prompt, max_tokens=11)  # 20 of 21 tokens are computed
    llm.metrics.reset()
    turn = [*prompt, *answer, 7, 8, 9]
    assert tokens_of(llm, turn, max_tokens=6) == [solo.tokens(turn, **GREEDY, max_tokens=6)]
    assert llm.metrics.prefix_hit_tokens == 20 and llm.metrics.prefill_tokens == 4


# with everything else


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [9, 10, 12])
def test_samples_of_a_prompt_that_is_cached(engine, solo, length, n):
    """Found once for all n; each still has its own seed, and its own copy of the block that is not full."""
    llm, prompt = engine(), some_prompt(length)
    params = dict(n=n, temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)
    wanted = [solo.tokens(prompt, index, **params) for index in range(n)]
    hits = []
    for _ in range(3):
        llm.metrics.reset()
        (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
        assert [c.token_ids for c in output.outputs] == wanted
        assert llm.metrics.cow_copies == (n - 1 if length % 4 else 0)
        hits.append(llm.metrics.prefix_hit_tokens)
    assert hits == [0, 8, 8]
    assert_idle(llm)


def test_samples_that_step_back_right_after_the_fork_keep_their_own_hashes(engine):
    """They share less than a block. One of them waits with its first token of output, which fills the block, and hands
    its hashes to the other, who says something else: its blocks lie under hashes that are not theirs."""
    llm = engine(num_kv_blocks=6)
    llm.add_request(distinct(16, 1), SamplingParams(**GREEDY, max_tokens=4), request_id="elder")
    params = dict(n=2, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    llm.add_request([9, 8, 7], SamplingParams(**params), request_id="pair")
    preempted_with, got = [], {}
    while llm.has_unfinished_requests():
        got |= {output.request_id: [c.token_ids for c in output.outputs] for output in llm.step()}
        check_all(llm)
        if llm.metrics.trace[-1].preempted:
            preempted_with += [[seq.num_tokens for seq in llm._requests["pair"].seqs]]
    assert [4, 4] in preempted_with, "the test misses the moment it is about"
    assert got["pair"][0] != got["pair"][1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunked, budget", [(True, 8), (True, 12), (False, 48)])
def test_policies_and_pieces(engine, solo, policy, chunked, budget):
    """Wherever a prompt is cut and whoever goes first, a hit saves whole blocks and changes nothing else."""
    llm = engine(policy=policy, enable_chunked_prefill=chunked, max_num_batched_tokens=budget, max_num_seqs=3)
    prompts = [some_prompt(40), some_prompt(41), some_prompt(30), [*some_prompt(20), 1, 2, 3], some_prompt(40)]
    assert tokens_of(llm, *prompts, max_tokens=8) == [solo.tokens(p, **GREEDY, max_tokens=8) for p in prompts]
    assert llm.metrics.prefix_hit_tokens == 40 + 28 + 20 + 36
    assert llm.metrics.tokens_forwarded == sum(len(p) + 7 for p in prompts) - llm.metrics.prefix_hit_tokens
    assert_idle(llm)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_budget_sees_what_is_left_to_compute(engine, policy):
    """Decided before the lookup, two requests with two tokens to compute would need two steps for their 60."""
    steps = {}
    for caching in (True, False):
        options = dict(policy=policy, enable_chunked_prefill=False, max_num_batched_tokens=32, max_num_seqs=4)
        llm = engine(**options, enable_prefix_caching=caching)
        tokens_of(llm, some_prompt(32), max_tokens=1)
        llm.metrics.reset()
        tokens_of(llm, [*some_prompt(28), 1, 1], [*some_prompt(28), 2, 2], max_tokens=1)
        steps[caching] = (llm.metrics.steps, llm.metrics.tokens_forwarded)
    assert steps == {True: (1, 4), False: (2, 60)}


def test_too_long_is_too_long_even_if_it_is_cached(engine):
    """What is cached now may be gone when its turn comes: it would wait for ever, and all behind it."""
    llm = engine(enable_chunked_prefill=False, max_num_batched_tokens=32, max_num_seqs=4)
    tokens_of(llm, some_prompt(32), max_tokens=8)
    with pytest.raises(ValueError, match=r"33 tokens.*max_num_batched_tokens=32"):
        tokens_of(llm, some_prompt(33))
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize("watermark, first_step", [(0.0, 0), (0.2, 4)])
def test_blocks_that_are_held_need_no_memory(engine, watermark, first_step):
    """6 blocks, of which the first request has 5. The second has 4 of these in common and needs one more: it fits, but
    for the watermark."""
    llm = engine(num_kv_blocks=6, watermark=watermark)
    wanted = tokens_of(engine(), some_prompt(17), [*some_prompt(16), 3], max_tokens=4)
    llm.add_request(some_prompt(17), SamplingParams(**GREEDY, max_tokens=4), request_id="a")
    llm.add_request([*some_prompt(16), 3], SamplingParams(**GREEDY, max_tokens=4), request_id="b")
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
        check_all(llm)
    assert [done["a"], done["b"]] == wanted
    started = next(i for i, record in enumerate(llm.metrics.trace) if "b" in record.tokens)
    assert started == first_step
    assert llm.metrics.preemptions == 0


def test_hits_that_are_free_are_no_gift(engine):
    """6 blocks: 2 are held, 4 are free and hold the first 16 tokens of a request that needs 5. It has to wait: counted
    as found and free, they would let it in where there is no room."""
    llm = engine(num_kv_blocks=6, watermark=0.0)
    tokens_of(llm, some_prompt(17), max_tokens=1)
    llm.add_request([250, 251, 252, 253, 254], SamplingParams(**GREEDY, max_tokens=3), request_id="holder")
    llm.step()
    llm.add_request(some_prompt(17), SamplingParams(**GREEDY, max_tokens=1), request_id="late")
    waiting = []
    while llm.has_unfinished_requests():
        llm.step()
        waiting.append(list(llm.metrics.trace[-1].waiting))
        check_all(llm)
    assert waiting[:2] == [["late"], ["late"]]
    assert llm.metrics.preemptions == 0
    assert llm.metrics.trace[-1].prefix_hit_tokens == 16


def test_logprobs_of_a_hit(engine, solo):
    """The numbers that are reported are those without the cache, to the last bits."""
    llm, prompt = engine(), some_prompt(22)
    params = dict(**GREEDY, max_tokens=6, logprobs=5)
    for _ in range(2):
        (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
        assert output.outputs[0].token_ids == solo.tokens(prompt, **params)
        assert_same_logprobs(output.outputs[0], solo.run(prompt, **params).outputs[0])
    assert llm.metrics.prefix_hit_tokens == 20


def test_streams_share(engine):
    """Two streams of one prompt, read in turns: the second begins with what the first has computed."""
    llm, prompt = engine(), some_prompt(21)
    params = SamplingParams(**GREEDY, max_tokens=12)
    wanted = engine(enable_prefix_caching=False).generate([prompt], params, use_tqdm=False)[0].outputs[0].text
    one = llm.stream(prompt, params)
    first = next(one)
    two = list(llm.stream(prompt, params))
    assert "".join(two) == first + "".join(one) == wanted
    assert llm.metrics.prefix_hit_tokens == 20
    assert_idle(llm)


# reset, errors, off


def test_reset_in_the_middle(engine, solo):
    """After a change of weights nothing old may be found. Who runs goes on, and what it fills is behind a forgotten
    parent; new requests build the cache anew."""
    llm = engine()
    params = dict(n=2, temperature=1.0, seed=6, max_tokens=12, ignore_eos=True)
    llm.add_request(some_prompt(18), SamplingParams(**params), request_id="a")
    for _ in range(3):
        llm.step()
    llm.reset_prefix_cache()
    check_all(llm)
    assert len(llm.block_manager.prefix_cache) == 0
    llm.metrics.reset()
    llm.add_request(some_prompt(18), SamplingParams(**params), request_id="b")
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: [c.token_ids for c in output.outputs] for output in llm.step()}
        check_all(llm)
    assert llm.metrics.prefix_hit_tokens == 0
    wanted = [solo.tokens(some_prompt(18), index, **params) for index in range(2)]
    assert done == {"a": wanted, "b": wanted}
    assert tokens_of(llm, some_prompt(18)) == [solo.tokens(some_prompt(18), **GREEDY, max_tokens=4)]
    assert llm.metrics.prefix_hit_tokens == 16
    engine(enable_prefix_caching=False).reset_prefix_cache()


@pytest.mark.parametrize("failing_step", [1, 2, 3])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_a_failed_step_was_to_compute_is_not_found(engine, solo, monkeypatch, failing_step, error):
    """Blocks are published when the step is planned. If it fails they hold garbage: nobody may find them."""
    llm, prompt = engine(max_num_batched_tokens=16, max_num_seqs=4), some_prompt(40)
    calls, launch = [], ModelRunner.launch

    def fails(self, batch):
        calls.append(batch)
        if len(calls) == failing_step:
            raise error("planted")
        return launch(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch", fails)
        with pytest.raises(error):
            tokens_of(llm, prompt)
    assert_idle(llm)
    llm.metrics.reset()
    poison_free_blocks(llm)
    assert tokens_of(llm, prompt) == [solo.tokens(prompt, **GREEDY, max_tokens=4)]
    assert llm.metrics.prefix_hit_tokens == 0
    assert tokens_of(llm, prompt) == [solo.tokens(prompt, **GREEDY, max_tokens=4)]


def test_an_abort_keeps_what_was_computed(engine, solo):
    """Between two steps all that is published has been computed: an aborted prompt can be found, as far as it came."""
    llm, prompt = engine(max_num_batched_tokens=16, max_num_seqs=4), some_prompt(40)
    llm.add_request(prompt, SamplingParams(**GREEDY, max_tokens=4), request_id="a")
    llm.step()
    llm.step()
    llm.abort_request("a")
    poison_free_blocks(llm)
    llm.metrics.reset()
    assert tokens_of(llm, prompt) == [solo.tokens(prompt, **GREEDY, max_tokens=4)]
    assert llm.metrics.prefix_hit_tokens == 32


def test_where_nothing_is_shared_only_the_question_is_counted(engine):
    """With the option off nothing is found, however much is shared; with it on and nothing shared the work is the same,
    counter by counter."""
    unlike = [distinct(length, i) for i, length in enumerate((5, 17, 30, 9))]
    alike = [some_prompt(30)] * 4
    on, off = engine(max_num_seqs=3), engine(max_num_seqs=3, enable_prefix_caching=False)
    assert LLM("tiny", device="cpu").block_manager.prefix_cache is None
    assert tokens_of(on, *unlike) == tokens_of(off, *unlike)
    counted = on.metrics.counters()
    assert counted.pop("prefix_query_tokens") == sum(len(prompt) for prompt in unlike)
    plain = off.metrics.counters()
    assert plain.pop("prefix_query_tokens") == 0
    assert counted == plain
    off.metrics.reset()
    tokens_of(off, *alike)
    assert off.metrics.tokens_forwarded == 4 * 33 and off.metrics.prefill_tokens == 4 * 30
    assert off.metrics.prefix_hit_tokens == off.metrics.prefix_query_tokens == 0


def test_off_is_the_same_in_any_pool(engine):
    """Without the cache the small pool does the work of the big one and what preemption costs, not a token more."""
    prompts = [some_prompt(8), some_prompt(8), some_prompt(9)]
    big, small = engine(enable_prefix_caching=False), engine(enable_prefix_caching=False, num_kv_blocks=6)
    assert tokens_of(big, *prompts, max_tokens=12) == tokens_of(small, *prompts, max_tokens=12)
    assert big.metrics.tokens_forwarded == sum(len(p) + 11 for p in prompts)
    assert small.metrics.tokens_forwarded == big.metrics.tokens_forwarded + small.metrics.recomputed_tokens
    assert small.metrics.prefix_query_tokens == small.metrics.prefix_hit_tokens == 0 < small.metrics.preemptions


# any workload in any pool


# What has to happen in 30 workloads at least, or they test little. Orphans: entries behind a parent that is gone.
OFTEN = {"steps": 300, "hit requests": 25, "evictions": 100, "preemptions": 10, "copies": 15, "aborted": 5}
OFTEN |= {"orphans": 20, "resets": 3}


def poison_free_blocks(llm: LLM) -> None:
    """What nobody holds and nobody can find becomes NaN, so that nobody who reads it goes unnoticed."""
    cache, manager = llm.model_runner.kv_cache, llm.block_manager
    known = manager.prefix_cache
    free = [block for block in manager._pool.free if known is None or not known.holds(block)]
    cache.data[:, :, torch.tensor(free, dtype=torch.long)] = float("nan")
    cache.host[list(manager._host.free)] = float("nan")


def check_all(llm: LLM) -> None:
    check_invariants(llm)
    check_entries(llm.block_manager)
    for seq_id, table in llm.block_manager._pool.tables.items():
        assert len(table.cached) <= len(table.blocks), seq_id


@pytest.mark.parametrize("mode, host", [("recompute", None), ("swap", 60), ("swap", 4)])
def test_any_schedule_in_any_pool_gives_the_tokens_of_a_solo_run(solo, monkeypatch, mode, host):
    """Shared prefixes, few blocks, samples, swaps, aborts, resets: what is computed changes, what comes out never."""
    events = Counter()
    evict = prefix_cache.PrefixCache.evict

    def counted(self, block):
        events["evictions"] += self.holds(block)
        evict(self, block)

    monkeypatch.setattr(prefix_cache.PrefixCache, "evict", counted)

    @settings(max_examples=max(30, settings().max_examples // 4))
    @given(st.data())
    def play(data):
        block_size = data.draw(st.sampled_from([4, 1, 16]), "block_size")
        requests = data.draw(st.lists(request(block_size), min_size=4, max_size=7), "requests")
        stem = some_prompt(33)
        for r in requests:
            r["prompt"] = (stem[: r["shared"]] + r["own"]) or [5]
        llm = draw_engine(data, block_size, requests, preemption_mode=mode, num_swap_blocks=host)
        got, aborted = drive(llm, requests, events)
        assert set(got) | aborted == set(range(len(requests)))
        for i, tokens in got.items():
            params = requests[i]["params"]
            assert tokens == [solo.tokens(requests[i]["prompt"], j, **params) for j in range(params["n"])]
        assert_idle(llm)
        metrics = llm.metrics
        events.update({"workloads": 1, "steps": metrics.steps, "preemptions": metrics.preemptions})
        events.update({"copies": metrics.cow_copies, "swapped in": metrics.swapped_in_blocks})
        events.update({"hit tokens": metrics.prefix_hit_tokens, "query tokens": metrics.prefix_query_tokens})
        events.update({"hit requests": sum(record.prefix_hit_tokens > 0 for record in metrics.trace)})
        events.update({"recomputed": metrics.recomputed_tokens})
        llm.close()

    play()
    print(dict(events))
    often = OFTEN | ({"recomputed": 40} if mode == "recompute" else {"swapped in": 5})
    assert all(events[event] >= least for event, least in often.items()), f"too little happens: {dict(events)}"


def request(block_size: int) -> st.SearchStrategy:
    """Prefixes of one text that end around the end of a block, and a few tokens behind them."""
    b = block_size
    lengths = [length for length in (2 * b, b, 2 * b + 1, 4 * b, b - 1, 0, 33) if length <= 33]
    return st.fixed_dictionaries(
        {
            "shared": st.sampled_from(lengths),
            "own": st.sampled_from([[], [1], [2, 3], [1, 2, 3, 4, 5], []]),
            "params": st.fixed_dictionaries(
                {
                    "max_tokens": st.sampled_from([12, 9, 17, 5, 1]),
                    "n": st.sampled_from([1, 2, 1, 3, 4]),
                    "temperature": st.sampled_from([0.0, 1.0]),
                    "seed": st.integers(0, 3),
                    "repetition_penalty": st.sampled_from([1.0, 1.3]),
                    "ignore_eos": st.just(True),
                }
            ),
            "gap": st.sampled_from([0, 0, 1, 0, 6]),
            "abort_after": st.sampled_from([None] * 8 + [0, 1, 3, 6]),
            "reset_after": st.sampled_from([None] * 12 + [1, 5]),
        }
    )


def draw_engine(data: st.DataObject, block_size: int, requests: list[dict], **options) -> LLM:
    """Any options; the pool just holds the largest request, or a little more, and 2 to 24 blocks if that is enough."""
    reckon, least = BlockManager(1, block_size), 2
    for r in requests:
        lens = [len(r["prompt"]) + r["params"]["max_tokens"] - 1] * r["params"]["n"]
        least = max(least, reckon.blocks_for_samples(len(r["prompt"]), lens))
    chunked = data.draw(st.booleans(), "enable_chunked_prefill")
    budget = data.draw(st.sampled_from([64, 9, 20]), "max_num_batched_tokens")
    return new_engine(
        max_model_len=64,
        policy=data.draw(st.sampled_from(POLICIES), "policy"),
        max_num_seqs=8,
        max_num_batched_tokens=max(budget, 8, 0 if chunked else max(len(r["prompt"]) for r in requests)),
        max_num_prefills=data.draw(st.sampled_from([None, 1, 2]), "max_num_prefills"),
        enable_chunked_prefill=chunked,
        block_size=block_size,
        num_kv_blocks=max(least, data.draw(st.sampled_from([2, 6, 10, 16, 24]), "blocks")),
        watermark=data.draw(st.sampled_from([0.0, 0.0, 0.1, 0.5]), "watermark"),
        enable_prefix_caching=True,
        **options,
    )


def drive(llm: LLM, requests: list[dict], events: Counter) -> tuple[dict[int, list[list[int]]], set[int]]:
    """Hand in, step, abort and reset as the requests say; everything is checked and poisoned after each step."""
    poison_free_blocks(llm)
    due, at = [], 0
    for r in requests:
        at += r["gap"]
        due.append(at)
    got, aborted, step = {}, set(), 0
    cache = llm.block_manager.prefix_cache
    while step <= at or llm.has_unfinished_requests():
        for i, r in enumerate(requests):
            if due[i] == step:
                llm.add_request(r["prompt"], SamplingParams(**r["params"]), request_id=f"r{i}")
            if r["abort_after"] is not None and due[i] + r["abort_after"] == step and i not in got:
                events["aborted"] += 1
                llm.abort_request(f"r{i}")
                aborted.add(i)
            if r["reset_after"] is not None and due[i] + r["reset_after"] == step:
                events["resets"] += len(cache) > 0
                llm.reset_prefix_cache()
        check_all(llm)
        poison_free_blocks(llm)
        for output in llm.step():
            got[int(output.request_id[1:])] = [completion.token_ids for completion in output.outputs]
        check_all(llm)
        poison_free_blocks(llm)
        events["orphans"] += sum(is_orphan(cache, cached) for cached in cache._by_hash.values())
        step += 1
        assert step < 2000, "work is left: somebody waits for ever"
    return got, aborted


def is_orphan(cache: prefix_cache.PrefixCache, cached: prefix_cache.CachedBlock) -> bool:
    """It cannot be found: the block before it is not the one that it was published behind."""
    return cached.parent is not None and cache._by_hash.get(cached.parent.hash) is not cached.parent
