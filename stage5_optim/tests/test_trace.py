"""What counters, trace and allocation log say of the pool: how little is wasted, who holds what, who lost what when."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams
from ..config import POLICIES, PREEMPTION_MODES
from .script import engine, new_engine


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)


def run(llm: LLM, requests: dict[str, tuple[int, SamplingParams]]) -> None:
    """Serve requests: id -> (prompt tokens, parameters)."""
    for name, (length, params) in requests.items():
        llm.add_request([len(name) + i % 200 for i in range(length)], params, request_id=name)
    while llm.has_unfinished_requests():
        llm.step()
        llm.block_manager.check_integrity()


# ---------------------------------------------------------------- waste


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_sequence_wastes_less_than_a_block(block_size):
    """A slot of max_model_len wasted all that its sequence never came to use. Now it is the rest of the last block,
    whatever the length: with blocks of one token it is nothing."""
    with new_engine(max_model_len=64, block_size=block_size, num_kv_blocks=200 // block_size) as llm:
        run(llm, {"a": (17, greedy(20)), "b": (1, greedy(30)), "c": (16, greedy(9))})
        wasted = [record.kv_tokens_reserved - record.kv_tokens_used for record in llm.metrics.trace]
        running = [len(record.tokens) for record in llm.metrics.trace]
        assert all(0 <= waste <= count * (block_size - 1) for waste, count in zip(wasted, running, strict=True))
        assert max(wasted) >= block_size - 1


request = st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3))


@given(
    requests=st.lists(request, min_size=1, max_size=6),
    policy=st.sampled_from(POLICIES),
    mode=st.sampled_from(PREEMPTION_MODES),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_tokens=st.sampled_from([96, 128, 400]),
)
def test_no_schedule_wastes_more_than_a_block_per_sequence(requests, policy, mode, block_size, num_tokens):
    """Under every policy, with forks, preemption and swap; what samples share counts once on both sides. (A block more
    than above: who has to wait for a step has the place for its next token already.)"""
    options = dict(policy=policy, preemption_mode=mode, block_size=block_size, max_num_seqs=4, watermark=0.0)
    options |= dict(max_model_len=64, num_kv_blocks=num_tokens // block_size, num_swap_blocks=64, trace_blocks=True)
    with new_engine(**options) as llm:
        pairs = enumerate(requests)
        run(llm, {str(i): (length, greedy(new, n)) for i, (length, new, n) in pairs})
        for record in llm.metrics.trace:
            size, blocks = block_size, record.pool_map(block_size)
            assert record.kv_tokens_reserved == len(blocks) * size <= llm.block_manager.num_blocks * size
            assert record.kv_tokens_used == sum(filled for _, filled in blocks.values())
            assert record.kv_tokens_reserved - record.kv_tokens_used <= len(record.block_tables) * size
        check_log(llm)


def check_log(llm: LLM) -> None:
    """Every line says how many blocks are free after it; the sum of all is what is free at the end."""
    free = llm.block_manager.num_blocks
    for line in llm.block_manager.allocation_log:
        free -= line.blocks
        assert free == line.num_free_blocks
    assert free == llm.block_manager.num_free_blocks


def test_a_prompt_in_pieces_has_its_blocks_from_the_start():
    """What its first piece does not fill is reserved, not wasted: the rest of the prompt goes there."""
    with new_engine(max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=5) as llm:
        run(llm, {"a": (18, greedy(2))})
        assert [record.kv_tokens_used for record in llm.metrics.trace] == [5, 10, 15, 18, 19]
        assert [record.kv_tokens_reserved for record in llm.metrics.trace] == [20] * 5


# ---------------------------------------------------------------- the map of the pool


def test_a_map_of_the_pool():
    """Block by block: whose it is, and how full. Two samples and another request, by hand."""
    with new_engine(max_model_len=64, block_size=4, num_kv_blocks=9, trace_blocks=True) as llm:
        run(llm, {"a": (6, greedy(3, 2)), "b": (4, greedy(1))})
        first, second, third = (record.pool_map(4) for record in llm.metrics.trace)
        assert first == {0: (["a", "a/1"], 4), 1: (["a", "a/1"], 2), 2: (["b"], 4)}
        # b has given its block back; a/1, asked second, is left alone with block 1 and keeps it: a has the copy
        assert second == {0: (["a", "a/1"], 4), 3: (["a"], 3), 1: (["a/1"], 3)}
        assert third == {0: (["a", "a/1"], 4), 3: (["a"], 4), 1: (["a/1"], 4)}
        assert [record.cow_copies for record in llm.metrics.trace] == [0, 1, 0]


def test_the_map_agrees_with_the_block_manager():
    """As many owners as the ref count says, in every step in which nobody leaves."""
    with new_engine(max_model_len=64, block_size=4, num_kv_blocks=40, trace_blocks=True) as llm:
        for name, length, n in (("a", 10, 3), ("b", 8, 2), ("c", 3, 1)):
            llm.add_request([7] * length, greedy(9, n), request_id=name)
        for _ in range(8):
            llm.step()
            record, manager = llm.metrics.trace[-1], llm.block_manager
            blocks = record.pool_map(4)
            assert {block: len(owners) for block, (owners, _) in blocks.items()} == {
                block: manager.ref_count(block) for block in range(40) if manager.ref_count(block)
            }
            assert record.block_tables == {name: manager.block_table(name) for name in record.block_tables}


def test_block_tables_are_kept_when_asked_for_only():
    """A long run with all tables in its trace fills the memory."""
    llm = engine()
    llm.metrics.reset()
    run(llm, {"a": (5, greedy(3))})
    (first, *_) = llm.metrics.trace
    assert (first.block_tables, first.computed_tokens, first.pool_map(16)) == ({}, {}, {})


# ---------------------------------------------------------------- preempted, swapped, recomputed


def two_that_do_not_fit(mode: str) -> LLM:
    """Pool of 4 blocks of 4 tokens; two prompts of 7, 6 new tokens each: both fit until either needs a third block."""
    options = dict(preemption_mode=mode, num_swap_blocks=4, watermark=0.0, trace_blocks=True)
    llm = new_engine(max_model_len=64, block_size=4, num_kv_blocks=4, **options)
    run(llm, {"a": (7, greedy(6)), "b": (7, greedy(6))})
    return llm


def test_recompute_step_by_step():
    """In step 2 a needs a third block: b, the newest, gives up its two. When a has ended, b computes its prompt, its
    output so far and one token more; that much is lost work, and counted as such."""
    with two_that_do_not_fit("recompute") as llm:
        trace = llm.metrics.trace
        assert [record.tokens for record in trace[:2]] == [{"a": 7, "b": 7}, {"a": 1, "b": 1}]
        assert [record.tokens for record in trace[2:]] == [{"a": 1}] * 4 + [{"b": 9}] + [{"b": 1}] * 3
        assert [record.preempted for record in trace] == [[], [], ["b"], *[[]] * 7]
        assert [record.waiting for record in trace] == [[], [], *[["b"]] * 4, *[[]] * 4]
        assert [record.recomputed_tokens for record in trace] == [0] * 6 + [8] + [0] * 3
        assert [record.kv_tokens_reserved for record in trace] == [16, 16, *[12] * 8]
        assert all(record.swapped == [] and record.swapped_out_blocks == 0 for record in trace)
        m = llm.metrics
        assert (m.preemptions, m.recomputed_tokens, m.swapped_out_blocks, m.swapped_in_blocks) == (1, 8, 0, 0)
        assert m.tokens_forwarded == 2 * (7 + 5) + 8 and m.prefill_tokens == 7 + 7 + 9


def test_swap_step_by_step():
    """The same, but b's two blocks go to the host and come back; nothing is computed twice."""
    with two_that_do_not_fit("swap") as llm:
        trace = llm.metrics.trace
        assert [record.tokens for record in trace[2:]] == [{"a": 1}] * 4 + [{"b": 1}] * 4
        assert [record.preempted for record in trace] == [[], [], ["b"], *[[]] * 7]
        assert [record.swapped for record in trace] == [[], [], *[["b"]] * 4, *[[]] * 4]
        assert all(record.waiting == [] for record in trace)
        assert [record.swapped_out_blocks for record in trace] == [0, 0, 2] + [0] * 7
        assert [record.swapped_in_blocks for record in trace] == [0] * 6 + [2] + [0] * 3
        assert all("b" not in record.block_tables for record in trace[2:6])
        m = llm.metrics
        assert (m.preemptions, m.recomputed_tokens, m.swapped_out_blocks, m.swapped_in_blocks) == (1, 0, 2, 2)
        assert m.tokens_forwarded == 2 * (7 + 5)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_reset_and_json_have_all_of_it(mode, tmp_path):
    """A counter that `reset` forgets adds the warm-up to the measurement; one that JSON lacks cannot be plotted."""
    with two_that_do_not_fit(mode) as llm:
        content = json.loads(llm.metrics.to_json(tmp_path / "metrics.json"))
        names = ("preemptions", "recomputed_tokens", "swapped_out_blocks", "swapped_in_blocks", "cow_copies")
        assert [content[name] for name in names] == [getattr(llm.metrics, name) for name in names]
        for name in names[1:]:
            assert sum(record[name] for record in content["trace"]) == content[name]
        assert content["trace"][2]["preempted"] == ["b"]
        assert content["trace"][0]["block_tables"] == {"a": [0, 1], "b": [2, 3]}
        assert content["trace"][0]["computed_tokens"] == {"a": 7, "b": 7}
        llm.metrics.reset()
        assert [getattr(llm.metrics, name) for name in names] == [0] * 5
        run(llm, {"a": (2, greedy(2))})
        assert [getattr(llm.metrics, name) for name in names] == [0] * 5


# ---------------------------------------------------------------- who took how many blocks when


def test_the_log_tells_the_whole_story():
    """The two that do not fit, line by line. Steps are counted from 1, as the scheduler plans them."""
    with two_that_do_not_fit("swap") as llm:
        log = [(line.step, line.seq_id, line.blocks, line.num_free_blocks, line.why) for line in log_of(llm)]
        assert log == [
            (1, "a", 2, 2, "prompt"),
            (1, "b", 2, 0, "prompt"),
            (3, "b", -2, 2, "swapped out"),
            (3, "a", 1, 1, "growth"),
            (6, "a", -3, 4, "finished"),
            (7, "b", 2, 2, "swapped in"),
            (7, "b", 1, 1, "growth"),
            (10, "b", -3, 4, "finished"),
        ]


def log_of(llm: LLM) -> list:
    return list(llm.block_manager.allocation_log)


def test_the_long_prompt_is_found_at_once():
    """Five short requests are decoding when one of 40 tokens arrives, and memory runs out: who was it? One call, and
    the long one is the first in its answer."""
    with new_engine(max_model_len=64, block_size=4, num_kv_blocks=24, watermark=0.0) as llm:
        for i in range(5):
            llm.add_request([i, 1, 2], greedy(30), request_id=f"short{i}")
        for _ in range(3):
            llm.step()
        llm.add_request([9] * 40, greedy(8), request_id="long")
        while not llm.metrics.preemptions:
            llm.step()
        now = llm.block_manager.step
        taken = llm.block_manager.blocks_taken(now - 10, now)
        assert next(iter(taken)) == "long" and taken["long"] >= 10
        assert set(taken) == {"long", *(f"short{i}" for i in range(5))}
        assert llm.block_manager.blocks_taken(1, 1) == {f"short{i}": 1 for i in range(5)}
        assert llm.block_manager.blocks_taken(now + 1, now + 9) == {}
        check_log(llm)
