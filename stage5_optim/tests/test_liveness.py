"""Requests and pools that do not go together: what can never fit is refused at once, all else is served, in full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams
from ..config import POLICIES, PREEMPTION_MODES
from .script import new_engine


def pool(num_blocks: int, block_size: int, **options: object) -> LLM:
    return new_engine(max_model_len=256, num_kv_blocks=num_blocks, block_size=block_size, **options)


def params(max_tokens: int | None, n: int = 1, **more: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=3, max_tokens=max_tokens, ignore_eos=True, n=n, **more)


def tokens(llm: LLM, prompts: list[list[int]], one: SamplingParams | list) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in out.outputs] for out in llm.generate(prompts, one, use_tqdm=False)]


def is_clean(llm: LLM) -> bool:
    llm.block_manager.check_integrity()
    return not llm.has_unfinished_requests() and llm.block_manager.num_free_blocks == llm.block_manager.num_blocks


@pytest.fixture(scope="module")
def big():
    """A pool in which everything fits."""
    with pool(1000, 16) as llm:
        yield llm


# ---------------------------------------------------------------- never


def test_more_than_the_whole_pool_is_refused(big):
    """Two blocks of four, a prompt of eight: one token can be made, as the last one needs no place. More tripped a bare
    assert, or was preempted for the sake of itself again and again."""
    with pool(2, 4) as llm:
        for request in (lambda: llm.generate([[7] * 8], params(4)), lambda: llm.stream([7] * 8, params(2))):
            with pytest.raises(
                ValueError, match=r"8 prompt tokens .*need 3 KV blocks of 4 tokens, but the pool has 2;"
            ):
                request()
            with pytest.raises(ValueError, match="the pool has 2; shorten the prompt, lower max_tokens"):
                llm.add_request([7] * 8, params(4))
            assert is_clean(llm) and llm.metrics.steps == 0
        assert tokens(llm, [[7] * 8], params(1)) == tokens(big, [[7] * 8], params(1))
        assert tokens(llm, [[7] * 5], params(4)) == tokens(big, [[7] * 5], params(4))


def test_one_that_never_fits_does_not_block_the_others(big):
    """In one call with a prompt of 80 tokens in a pool of 64 nobody is queued; the next call serves the other two."""
    prompts = [[i % 250 for i in range(length)] for length in (80, 10, 12)]
    with pool(4, 16) as llm:
        with pytest.raises(ValueError, match=r"request 0: .*80 prompt tokens .*need 6 KV blocks.* the pool has 4"):
            llm.generate(prompts, params(4), use_tqdm=False)
        assert is_clean(llm) and not llm.scheduler.has_unfinished and llm.metrics.steps == 0
        assert tokens(llm, prompts[1:], params(4)) == tokens(big, prompts[1:], params(4))
        assert is_clean(llm)


@pytest.mark.parametrize(("cap", "fits"), [(1, 4), (2, 8), (4, 16)])
def test_a_cap_per_sequence(cap, fits):
    """max_blocks_per_seq keeps one request from taking the whole pool; it holds for each sample, and alone."""
    with pool(20, 4, max_blocks_per_seq=cap) as llm:
        assert [len(one) for one in tokens(llm, [[7]], params(fits, n=3))[0]] == [fits] * 3
        with pytest.raises(ValueError, match=rf"need {3 * cap + 3} KV blocks .*max_blocks_per_seq={cap} allows"):
            llm.generate([[7]], params(fits + 1, n=3))
        assert len(tokens(llm, [[7]], params(None))[0][0]) == fits
        assert is_clean(llm)


@pytest.mark.parametrize(("num_blocks", "n", "made"), [(3, 1, 8), (5, 2, 8), (4, 2, 4), (100, 1, 251), (7, 3, 8)])
def test_no_limit_fills_what_there_is(num_blocks, n, made):
    """max_tokens=None asks for as much as context and pool leave for all samples, alone in the engine."""
    with pool(num_blocks, 4) as llm:
        (output,) = llm.generate([[7] * 5], params(None, n), use_tqdm=False)
        assert [(len(one.token_ids), one.finish_reason) for one in output.outputs] == [(made, "length")] * n
        assert is_clean(llm)


# ---------------------------------------------------------------- not now


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_two_that_outgrow_the_pool_together(big, mode):
    """Six blocks of four; each of the two comes to need five. The newer one steps back, and when it returns it has
    prompt and output before it: planned by the prompt's length alone, it wrote to wrong places."""
    prompts = [[7] * 8, list(range(8))]
    with pool(6, 4, preemption_mode=mode, num_swap_blocks=5, watermark=0.0) as llm:
        assert tokens(llm, prompts, params(12)) == tokens(big, prompts, params(12))
        assert is_clean(llm) and llm.metrics.preemptions >= 1
        back = next(record for record in llm.metrics.trace if record.recomputed_tokens or record.swapped_in_blocks)
        so_far = sum("1" in record.tokens for record in llm.metrics.trace[: back.step])  # a token each
        assert back.tokens == {"1": 1 if mode == "swap" else 8 + so_far}


@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.5, 1.0])
def test_a_large_request_starts_when_nothing_else_runs(big, watermark):
    """With all blocks free, but fewer than it and the watermark want together, it waited for ever."""
    prompts = [[1, 2], [3] * 60, [4, 5]]
    with pool(16, 4, watermark=watermark) as llm:
        assert tokens(llm, prompts, params(5)) == tokens(big, prompts, params(5))
        assert is_clean(llm)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32])
@pytest.mark.parametrize("new", [1, 2])
def test_ends_at_the_edge_of_a_block(big, length, new):
    """A token that fills a block, or the first of the next one, and then the end: exactly so many tokens, by length."""
    with pool(3, 16) as llm:
        (output,) = llm.generate([[7] * length], params(new), use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (new, "length")
        assert [output.outputs[0].token_ids] == tokens(big, [[7] * length], params(new))[0]
        assert is_clean(llm)


request = st.tuples(st.integers(1, 20), st.none() | st.integers(1, 12), st.integers(1, 3))


@given(
    requests=st.lists(request, min_size=1, max_size=6),
    num_blocks=st.integers(1, 10),
    block_size=st.integers(1, 6),
    policy=st.sampled_from(POLICIES),
    mode=st.sampled_from(PREEMPTION_MODES),
    host=st.sampled_from([0, 1, 3, 50]),
    watermark=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_refused_or_served(big, requests, num_blocks, block_size, policy, mode, host, watermark):
    """Any pool, however small: whoever could need more than all of it is refused, everybody else gets all its tokens,
    in bounded steps, and these are the tokens of a large pool."""
    options = dict(policy=policy, preemption_mode=mode, num_swap_blocks=host, watermark=watermark, max_num_seqs=4)
    with pool(num_blocks, block_size, **options) as llm:
        llm.model_runner.kv_cache.data.fill_(float("nan"))
        accepted, got, steps = {}, {}, 0
        for length, new, n in requests:
            prompt, one = [length + i for i in range(length)], params(new, n)
            shared, most = length // block_size if n > 1 else 0, -(-(length + (new or 1) - 1) // block_size)
            if shared + n * (most - shared) > num_blocks:
                with pytest.raises(ValueError, match=f"the pool has {num_blocks}"):
                    llm.add_request(prompt, one)
            else:
                accepted[llm.add_request(prompt, one)] = prompt, new, n
        while llm.has_unfinished_requests():
            got |= {output.request_id: [one.token_ids for one in output.outputs] for output in llm.step()}
            llm.block_manager.check_integrity()
            steps += 1
            assert steps < 1000, "work is left: somebody waits for ever"
        assert got.keys() == accepted.keys()
        for name, (prompt, new, n) in accepted.items():
            expected = tokens(big, [prompt], params(new or len(got[name][0]), n))[0]
            assert got[name] == expected
        assert is_clean(llm)
