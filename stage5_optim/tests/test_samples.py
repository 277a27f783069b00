"""n samples of one prompt: each as if it had been asked for alone, and what they have in common is kept once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams
from ..config import POLICIES, PREEMPTION_MODES
from ..sampling import sample_seed
from ..sequence import RequestOutput
from .script import force, new_engine, scripted

OPTIONS = dict(max_model_len=64, block_size=4, num_kv_blocks=64)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # two full blocks and two tokens


@pytest.fixture(scope="module")
def llm():
    with new_engine(**OPTIONS, max_num_seqs=8, trace_blocks=True) as llm:
        yield llm


def params(n: int = 4, **options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True, "n": n} | options)


def tokens(output: RequestOutput) -> list[list[int]]:
    return [one.token_ids for one in output.outputs]


def generate(llm: LLM, prompt: str | list[int], one: SamplingParams) -> list[list[int]]:
    return tokens(llm.generate([prompt], one, use_tqdm=False)[0])


def is_clean(llm: LLM) -> bool:
    manager = llm.block_manager
    manager.check_integrity()
    is_free = (manager.num_free_blocks, manager.num_free_swap_blocks) == (manager.num_blocks, manager.num_swap_blocks)
    return is_free and not llm.has_unfinished_requests() and not llm.scheduler.has_unfinished


# ---------------------------------------------------------------- seeds


def test_seeded_samples_differ_and_come_again(llm):
    """All branches used one seed and came out identical. Four different ones, the same four in the next run and among
    neighbours, and fewer of them are the first of these."""
    four = generate(llm, PROMPT, params())
    assert len({tuple(one) for one in four}) == 4
    assert generate(llm, PROMPT, params()) == four
    assert generate(llm, PROMPT, params(n=2)) == four[:2]
    others = llm.generate([[8], PROMPT, PROMPT], [params(n=2), params(), params(n=1)], use_tqdm=False)
    assert [tokens(one) for one in others[1:]] == [four, four[:1]]


def test_each_sample_is_a_request_of_its_own(llm):
    """The first is that of n=1, so that a larger n only adds; the others are those of their own seeds."""
    four = generate(llm, PROMPT, params())
    assert [generate(llm, PROMPT, params(n=1, seed=sample_seed(5, i)))[0] for i in range(4)] == four
    assert generate(llm, PROMPT, params(n=1)) == four[:1]


def test_seeds_of_samples_do_not_meet():
    """Seed + index would make sample 1 of seed 5 the text of seed 6."""
    seeds = [sample_seed(seed, index) for seed in (-1, 0, 1, 5, 6, 2**63, 12, 1) for index in range(1, 50)]
    assert len(set(seeds)) == 7 * 49 and all(0 <= seed < 2**64 for seed in seeds)
    assert [sample_seed(seed, 0) for seed in (-1, 5, 2**64)] == [-1, 5, 2**64]


def test_samples_without_a_seed_differ_from_run_to_run():
    """An implicit fixed seed gave the same text in every process. An engine's own seed repeats the session."""
    hot = params(seed=None, temperature=5.0)
    runs = []
    for seed in (None, None, 3, 3):
        with new_engine(**OPTIONS, seed=seed) as llm:
            runs.append(generate(llm, PROMPT, hot) + generate(llm, PROMPT, hot))
    assert len({tuple(one) for run in runs[:3] for one in run}) == 24
    assert runs[2] == runs[3]


def test_greedy_samples_are_alike(llm):
    """There is one best text. Asked for four times it is given four times."""
    one = generate(llm, PROMPT, params(n=1, temperature=0.0))
    assert generate(llm, PROMPT, params(temperature=0.0)) == one * 4


@given(
    prompt=st.lists(st.integers(0, 250), min_size=1, max_size=20),
    n=st.integers(1, 4),
    new=st.integers(1, 10),
    policy=st.sampled_from(POLICIES),
    budget=st.sampled_from([4, 5, 64]),
    block_size=st.sampled_from([1, 3, 4, 16]),
)
def test_any_samples_equal_lone_requests(llm, prompt, n, new, policy, budget, block_size):
    """Prompts in pieces, blocks of any size, every policy: what a sample says does not depend on its siblings."""
    options = dict(policy=policy, max_num_batched_tokens=budget, enable_chunked_prefill=True, max_num_prefills=1)
    with new_engine(max_model_len=64, max_num_seqs=4, num_kv_blocks=200, block_size=block_size, **options) as other:
        other.model_runner.kv_cache.data.fill_(float("nan"))
        given = params(n, max_tokens=new, repetition_penalty=1.2, min_tokens=1)
        lone = [params(1, seed=sample_seed(5, i), max_tokens=new, repetition_penalty=1.2) for i in range(n)]
        assert generate(other, prompt, given) == [generate(llm, prompt, one)[0] for one in lone]
        assert is_clean(other)


# ---------------------------------------------------------------- blocks


def test_samples_share_the_prompt(llm):
    """Four samples of ten tokens: one prompt is computed, its two full blocks stay shared, and the third is copied for
    three of the four, when they write into it."""
    llm.metrics.reset()
    llm.add_request(PROMPT, params(max_tokens=5), request_id="a")
    manager, names = llm.block_manager, ["a", "a/1", "a/2", "a/3"]
    llm.step()
    tables = [manager.block_table(name) for name in names]
    assert tables == [tables[0]] * 4 and [manager.ref_count(block) for block in tables[0]] == [4, 4, 4]
    assert manager.num_blocks - manager.num_free_blocks == 3 and llm.metrics.tokens_forwarded == 10
    llm.step()
    tables = [manager.block_table(name) for name in names]
    assert all(table[:2] == tables[0][:2] for table in tables) and len({table[2] for table in tables}) == 4
    assert [manager.ref_count(block) for block in tables[0]] == [4, 4, 1]
    assert manager.num_blocks - manager.num_free_blocks == 2 + 4
    while llm.has_unfinished_requests():
        llm.step()
    assert llm.metrics.cow_copies == 3
    assert [record.cow_copies for record in llm.metrics.trace] == [0, 3, 0, 0, 0]
    assert [record.kv_tokens_reserved for record in llm.metrics.trace] == [12, 24, 24, 40, 40]
    assert [record.kv_tokens_used for record in llm.metrics.trace] == [10, 8 + 4 * 3, 8 + 4 * 4, 8 + 4 * 5, 8 + 4 * 6]
    assert llm.metrics.tokens_forwarded == 10 + 4 * 4
    assert is_clean(llm)


@pytest.mark.parametrize(("length", "n", "copies"), [(8, 4, 0), (1, 3, 2), (6, 3, 2), (7, 8, 7), (4, 1, 0)])
def test_only_writers_who_share_copy(llm, length, n, copies):
    """A block that the prompt fills is never written again; of n that share the last one n - 1 copy it, and the one
    that is left alone does not."""
    llm.metrics.reset()
    generate(llm, [7] * length, params(n, max_tokens=6))
    assert llm.metrics.cow_copies == copies
    assert is_clean(llm)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_samples_that_end_with_their_first_token(llm, max_tokens):
    """Forked, sampled and finished in one step: there is nothing to copy, and everything is free."""
    llm.metrics.reset()
    assert [len(one) for one in generate(llm, PROMPT, params(max_tokens=max_tokens))] == [max_tokens] * 4
    assert llm.metrics.cow_copies == 3 * (max_tokens - 1)
    assert is_clean(llm)


@pytest.mark.parametrize("host", [0, 1, 16])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_samples_through_preemption(llm, mode, host):
    """Two requests of two samples that each need the whole pool. With too little host memory the engine aborted, or
    what was swapped never came back, or came back unshared and no longer fitted."""
    prompts, given = [[7] * 8, [2, 9] * 4], [params(2, seed=seed, max_tokens=8) for seed in (1, 2)]
    expected = [generate(llm, *request) for request in zip(prompts, given, strict=True)]
    options = dict(num_kv_blocks=6, num_swap_blocks=host, preemption_mode=mode, watermark=0.0)
    with new_engine(max_model_len=64, block_size=4, **options) as other:
        ids = [other.add_request(*request) for request in zip(prompts, given, strict=True)]
        got, steps = {}, 0
        while other.has_unfinished_requests():
            got |= {output.request_id: tokens(output) for output in other.step()}
            other.block_manager.check_integrity()
            steps += 1
            assert steps < 100
        assert [got[name] for name in ids] == expected
        assert is_clean(other)
        swaps = mode == "swap" and host == 16
        assert other.metrics.preemptions >= 1
        assert (other.metrics.swapped_out_blocks > 0) == swaps and (other.metrics.recomputed_tokens > 0) == (not swaps)
        assert other.metrics.swapped_out_blocks == other.metrics.swapped_in_blocks


# ---------------------------------------------------------------- when each ends


def half_stop(llm: LLM, position: int):
    """Logits that spell A and B, but at `position` "!" or "?" with equal odds."""
    rows = force([65, 66] * 6, llm.model_config.vocab_size)
    rows[position] = -200.0
    rows[position, [33, 63]] = 0.0
    return rows


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("stop", "text"),
    [(dict(stop_token_ids=[33]), "ABABA"), (dict(stop="!"), "ABABA"), (dict(stop=["A!", "x"]), "ABAB")],
)
def test_samples_end_on_their_own(stop, text, policy):
    """Some draw the stop at their sixth token and end there; their blocks are free at once, while the others go on to
    the limit. A request that is returned with its first finished sample loses the rest."""
    with new_engine(**OPTIONS, max_num_seqs=8, policy=policy) as llm:
        with scripted(llm, half_stop(llm, position=5), prompt_len=10):
            llm.add_request(PROMPT, params(n=8, max_tokens=9, **stop), request_id="a")
            outputs, holders = [], []
            while llm.has_unfinished_requests():
                outputs += llm.step()
                llm.block_manager.check_integrity()
                names = ["a", *(f"a/{i}" for i in range(1, 8))]
                holders.append([name for name in names if llm.block_manager.holds(name)])
                blocks = {block for name in holders[-1] for block in llm.block_manager.block_table(name)}
                assert llm.block_manager.num_free_blocks == 64 - len(blocks)
        (output,) = outputs
        assert [one.index for one in output.outputs] == list(range(8))
        reasons = [one.finish_reason for one in output.outputs]
        assert set(reasons) == {"stop", "length"}
        for name, one, reason in zip(names, output.outputs, reasons, strict=True):
            assert len(one.token_ids) == {"stop": 6, "length": 9}[reason]
            assert one.token_ids[5] == {"stop": 33, "length": 63}[reason]
            assert one.text == {"stop": text, "length": "ABABA?ABA"}[reason]
            assert sum(name in names for names in holders) == len(one.token_ids) - 1
        assert is_clean(llm)


def test_an_end_token_ends_one_sample(llm):
    """The model's own end token, drawn by some: its text is not shown, and ignore_eos lets all go on."""
    with scripted(llm, half_stop(llm, position=2), prompt_len=10):
        one = params(n=8, max_tokens=5, ignore_eos=False)
        llm.eos_token_ids, before = (33,), llm.eos_token_ids
        llm._intake._eos_token_ids = (33,)
        try:
            (output,) = llm.generate([PROMPT], one, use_tqdm=False)
            (ignoring,) = llm.generate([PROMPT], params(n=8, max_tokens=5), use_tqdm=False)
        finally:
            llm.eos_token_ids = llm._intake._eos_token_ids = before
    assert {(one.finish_reason, one.text) for one in output.outputs} == {("stop", "AB"), ("length", "AB?BA")}
    assert {(one.finish_reason, one.text) for one in ignoring.outputs} == {("length", "AB!BA"), ("length", "AB?BA")}


# ---------------------------------------------------------------- what comes out


def test_outputs_are_in_order(llm):
    """Prompts in input order, and of each its samples by index, with text and logprobs of their own."""
    outputs = llm.generate(["one", "two", "three"], [params(3), params(1), params(2)], use_tqdm=False)
    assert [[one.index for one in output.outputs] for output in outputs] == [[0, 1, 2], [0], [0, 1]]
    assert [output.prompt for output in outputs] == ["one", "two", "three"]
    for output in outputs:
        assert output.finished and output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
        for one in output.outputs:
            assert one.text == llm.tokenizer.decode(one.token_ids) and one.logprobs is None


def test_logprobs_of_each_sample(llm):
    """One entry per token of the sample itself: the first token is drawn from one row, after that each has its own."""
    (output,) = llm.generate([PROMPT], params(logprobs=3), use_tqdm=False)
    firsts = [list(one.logprobs[0].items())[:3] for one in output.outputs]
    assert firsts == [firsts[0]] * 4
    for i, one in enumerate(output.outputs):
        alone = llm.generate([PROMPT], params(1, seed=sample_seed(5, i), logprobs=3), use_tqdm=False)[0].outputs[0]
        assert len(one.logprobs) == 12 and all(t in row for t, row in zip(one.token_ids, one.logprobs, strict=True))
        for ours, expected in zip(one.logprobs, alone.logprobs, strict=True):
            assert list(ours) == list(expected)
            assert [x.logprob for x in ours.values()] == pytest.approx([x.logprob for x in expected.values()], abs=1e-9)


def test_times_of_a_request_with_samples(llm):
    """Those of its first sample, and the end of the last one."""
    (output,) = llm.generate([PROMPT], params(), use_tqdm=False)
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.token_times[-1] <= m.finish_time
    assert len(m.token_times) == 12 and len(m.itl) == 11
    with scripted(llm, half_stop(llm, position=2), prompt_len=10):
        (output,) = llm.generate([PROMPT], params(n=8, seed=first_stops(llm), stop="!"), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.metrics.token_times) == 3
    assert output.metrics.finish_time > output.metrics.token_times[-1], "the others were not done yet"
    assert output.metrics.finish_time >= llm.metrics.trace[-1].time


def first_stops(llm: LLM) -> int:
    """A seed with which the first sample stops."""
    return next(seed for seed in range(20) if generate(llm, PROMPT, params(1, seed=seed, max_tokens=3))[0][2] == 33)


def test_streams_of_samples(llm):
    """Pieces come as (index, piece): the samples of the first prompt, then those of the second. Joined they are the
    texts of generate, and they come in turns, not one sample after the other."""
    prompts = ["Hello", [5, 6, 7]]
    expected = [one.text for output in llm.generate(prompts, params(3), use_tqdm=False) for one in output.outputs]
    pieces = list(llm.stream(prompts, params(3)))
    joined = ["".join(piece for index, piece in pieces if index == i) for i in range(6)]
    assert joined == expected and all(piece for _, piece in pieces)
    order = [index for index, _ in pieces]
    assert max(order.index(i) for i in range(6)) < min(len(order) - 1 - order[::-1].index(i) for i in range(6))
    alone = list(llm.stream("Hello", params(2)))
    assert ["".join(piece for index, piece in alone if index == i) for i in range(2)] == expected[:2]
    assert "".join(llm.stream("Hello", params(1))) == expected[0]
    assert is_clean(llm)


def test_chat_with_samples(llm):
    """The options of generate reach chat: several answers to one conversation, of which the first is that of n=1."""
    messages = [{"role": "user", "content": "Hi"}]
    with new_engine(block_size=16, num_kv_blocks=40) as other:
        (output,) = other.chat(messages, params(3), use_tqdm=False)
        assert [one.index for one in output.outputs] == [0, 1, 2] and len({one.text for one in output.outputs}) == 3
        assert tokens(other.chat(messages, params(1), use_tqdm=False)[0]) == tokens(output)[:1]
        both = other.chat([messages, messages], [params(1), params(3)], use_tqdm=False)
        assert [tokens(one) for one in both] == [tokens(output)[:1], tokens(output)]


# ---------------------------------------------------------------- abort, names, refusals


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 6])
def test_abort_takes_all_samples(steps):
    """While it waits, in the middle of its prompt, at the fork, and when its samples have parted; twice."""
    with new_engine(**OPTIONS, max_num_seqs=3, max_num_batched_tokens=3) as llm:
        llm.add_request(PROMPT, params(3), request_id="a")
        waits = llm.add_request(PROMPT, params(2))
        for _ in range(steps):
            llm.step()
        llm.abort_request("a")
        assert not any(llm.block_manager.holds(name) for name in ("a", "a/1", "a/2"))
        llm.abort_request("a")
        llm.abort_request(waits)
        assert is_clean(llm) and llm.step() == []


def test_abort_of_swapped_samples():
    """Blocks in host memory are given back too."""
    options = dict(num_kv_blocks=8, num_swap_blocks=16, preemption_mode="swap", watermark=0.0)
    with new_engine(max_model_len=64, block_size=4, **options) as llm:
        for name in "ab":
            llm.add_request([7] * 8, params(2), request_id=name)
        while not (llm.metrics.trace and llm.metrics.trace[-1].swapped == ["b"]):
            llm.step()
        assert llm.block_manager.num_free_swap_blocks < 16
        llm.abort_request("b")
        assert llm.block_manager.num_free_swap_blocks == 16
        expected = generate(llm, [7] * 8, params(2))
        (output,) = llm.step()
        assert (output.request_id, tokens(output)) == ("a", expected)
        assert is_clean(llm)


def test_names_of_samples(llm):
    """The first has the request's name, the others a number behind a slash; outputs and trace name the request."""
    llm.metrics.reset()
    assert llm.add_request(PROMPT, params(3, max_tokens=2), request_id="a") == "a"
    (output,) = llm.step() + llm.step()
    assert output.request_id == "a"
    first, second = llm.metrics.trace
    assert (first.tokens, second.tokens) == ({"a": 10}, {"a": 3})
    assert list(first.block_tables) == ["a", "a/1", "a/2"] and second.finished == ["a"]


@pytest.mark.parametrize("name", ["a/1", "/0", "a/b/12", "a/007"])
def test_names_that_look_like_a_sample_are_refused(llm, name):
    """Two sequences of one name would share a block table."""
    with pytest.raises(ValueError, match="a slash and a number"):
        llm.add_request(PROMPT, params(2), request_id=name)
    assert is_clean(llm)


def test_other_slashes_are_fine(llm):
    """A path, a trailing slash and a number in the middle are nobody's name."""
    for name in ("a/b", "a/", "/", "a/1/b", "1", "a/1x", ""):
        assert llm.add_request([1], params(2, max_tokens=1), request_id=name) == name
    assert len(llm.step()) == 4 and len(llm.step()) == 3
    assert is_clean(llm)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2", None])
def test_bad_numbers_of_samples(n):
    """0 samples would never finish; True counted as 1."""
    with pytest.raises(ValueError, match=f"n={n!r}: expected an integer of at least 1"):
        SamplingParams(n=n)


def test_more_samples_than_run_at_a_time(llm):
    """They start together, so more than max_num_seqs of them would wait for ever, and all behind them."""
    with pytest.raises(ValueError, match=r"request 1: n=9 samples .*max_num_seqs=8; raise it or lower n"):
        llm.generate([[1], [2]], [params(1), params(9)], use_tqdm=False)
    assert is_clean(llm)
    assert len(generate(llm, [1], params(8))) == 8


def test_samples_wait_for_places_together(llm):
    """Six and then four samples on eight places: the second request waits whole, and the third does not overtake it."""
    llm.metrics.reset()
    ids = [llm.add_request([i], params(n, max_tokens=3)) for i, n in ((1, 6), (2, 4), (3, 1))]
    order = []
    while llm.has_unfinished_requests():
        order += [output.request_id for output in llm.step()]
    assert order == ids
    waited = [[ids.index(name) for name in record.waiting] for record in llm.metrics.trace]
    assert waited == [[1, 2], [1, 2], [1, 2], [], [], []]
