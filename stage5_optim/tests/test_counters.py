"""Counters: the work that this stage does, exactly. Batching changes the number of steps, not the work.

A prompt of p tokens and m new ones: p + m - 1 tokens, whoever else is in the same steps.
"""

import json
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import SamplingParams, SpeculativeConfig, __main__, metrics
from .script import engine, new_engine, play
from .test_scheduler import filled, run_all

PROMPT_LENGTHS = st.integers(1, 40)
OUTPUT_LENGTHS = st.integers(1, 16)
BYTES_PER_TOKEN = 2 * 2 * 2 * 64 * 8  # K and V, layers, KV heads, head_dim, float64
BLOCK = 16  # tokens
NOTHING_LOST = ("preemptions", "recomputed_tokens", "swapped_out_blocks", "swapped_in_blocks", "cow_copies")
NOTHING_LOST += ("prefix_query_tokens", "prefix_hit_tokens", "graph_replays", "padding_tokens", "discarded_tokens")
NOTHING_LOST += ("all_reduces",)
NOTHING_LOST += ("drafted_tokens", "accepted_tokens", "draft_tokens_forwarded")


def work(p: int, m: int) -> dict[str, int]:
    """What p prompt tokens and m new ones cost."""
    fed = p + m - 1  # nobody asks what follows the last token
    return {
        "steps": m,
        "tokens_forwarded": fed,
        "prefill_tokens": p if p > 1 else 0,
        "decode_tokens": m - 1 if p > 1 else m,  # the sequence lacked one token, as a prompt of one does at its start
        "attention_pairs": fed * (fed + 1) // 2,  # each token meets itself and all before it, once
        "kv_bytes_per_token": BYTES_PER_TOKEN,
        "kv_tokens_reserved_peak": -(-fed // BLOCK) * BLOCK,  # whole blocks, and no more of them than it needs
        "kv_tokens_used_peak": fed,
        "idle_slot_steps": m * (engine().scheduler_config.max_num_seqs - 1),
        **dict.fromkeys(NOTHING_LOST, 0),
    }


def add_up(costs: list[dict[str, int]]) -> dict[str, int]:
    """Requests one after the other: work is summed; of peaks the largest counts."""
    total = dict.fromkeys(work(1, 1), 0) | {"kv_bytes_per_token": BYTES_PER_TOKEN}
    for cost in costs:
        for name, value in cost.items():
            total[name] = max(total[name], value) if name.startswith("kv_") else total[name] + value
    return total


def run(llm, *requests: tuple[int, int]) -> None:
    """Serve requests of (prompt tokens, new tokens), counted from zero."""
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in requests]
    llm.metrics.reset()
    llm.generate([[7] * p for p, _ in requests], params, use_tqdm=False)


@given(PROMPT_LENGTHS, OUTPUT_LENGTHS)
def test_one_request_costs_what_the_formula_says(p, m):
    """A step too many (the prompt alone first), or the last token fed once more: one unit off shows here."""
    run(engine(), (p, m))
    assert engine().metrics.counters() == work(p, m)


def test_the_numbers_themselves():
    """The formula above could be wrong in the same way as the engine: 5 and 3 by hand."""
    run(engine(), (5, 3))
    counters = engine().metrics.counters()
    assert {name: counters[name] for name in list(counters)[:5]} == {
        "steps": 3,
        "tokens_forwarded": 5 + 1 + 1,
        "prefill_tokens": 5,
        "decode_tokens": 2,
        "attention_pairs": 15 + 6 + 7,
    }
    assert counters["kv_tokens_used_peak"] == 7
    run(engine(), (1, 3))
    counters = engine().metrics.counters()
    assert {name: counters[name] for name in list(counters)[:5]} == {
        "steps": 3,
        "tokens_forwarded": 1 + 1 + 1,
        "prefill_tokens": 0,
        "decode_tokens": 3,
        "attention_pairs": 1 + 2 + 3,
    }


def test_a_peak_is_the_most_of_any_step():
    """A long request and a short one at once: both count while both run, and the last value is not the peak."""
    run(engine(), (20, 5), (2, 2))
    assert engine().metrics.kv_tokens_used_peak == 24
    run(engine(), (20, 2), (2, 5))
    assert [record.kv_tokens_used for record in engine().metrics.trace] == [22, 24, 4, 5, 6]
    assert engine().metrics.kv_tokens_used_peak == 24
    assert engine().metrics.kv_tokens_reserved_peak == (2 + 1) * BLOCK


@given(st.lists(st.tuples(PROMPT_LENGTHS, OUTPUT_LENGTHS), max_size=4))
def test_requests_add_up(requests):
    """Several requests cost the sum of each, and no request pays for its neighbour's padding."""
    run(engine(), *requests)
    counters, apart = engine().metrics.counters(), add_up([work(*request) for request in requests])
    for name in ("tokens_forwarded", "prefill_tokens", "decode_tokens", "attention_pairs"):
        assert counters[name] == apart[name]
    assert counters["steps"] == max((m for _, m in requests), default=0)  # all at once
    slots = engine().scheduler_config.max_num_seqs
    assert counters["idle_slot_steps"] == slots * counters["steps"] - sum(m for _, m in requests)
    assert engine().metrics.prefill_tokens + engine().metrics.decode_tokens == engine().metrics.tokens_forwarded


def test_work_after_a_stop_is_not_done():
    """An output that ends early costs only the steps until then: here the third token is the end token."""
    llm = engine()
    llm.metrics.reset()
    play(llm, [70, 71, 258, 72, 73], prompt=[7] * 4)  # generate and stream: twice
    assert llm.metrics.counters() == add_up([work(4, 3), work(4, 3)])


def test_a_stream_costs_what_was_read():
    """A stream closed after its first piece has not paid for the rest."""
    llm = engine()
    llm.metrics.reset()
    stream = llm.stream([7] * 4, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.metrics.counters() == work(4, llm.metrics.steps)
    assert llm.metrics.steps < 50


def test_trace_has_one_record_per_step():
    """The trace is what the notebooks draw: which request got how many tokens in which step, and where time went."""
    llm = engine()
    llm.metrics.reset()
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for m in (3, 2)]
    ids = [output.request_id for output in llm.generate([[7] * 5, [8] * 2], params, use_tqdm=False)]
    trace = llm.metrics.trace
    one, two = ids
    assert [record.step for record in trace] == [0, 1, 2]
    assert [record.tokens for record in trace] == [{one: 5, two: 2}, {one: 1, two: 1}, {one: 1}]
    assert [record.decode_tokens for record in trace] == [0, 2, 1]
    assert [record.attention_pairs for record in trace] == [15 + 3, 6 + 3, 7]
    assert [record.kv_tokens_used for record in trace] == [5 + 2, 6 + 3, 7]
    assert [record.kv_tokens_reserved for record in trace] == [n * BLOCK for n in (2, 2, 1)]
    assert [record.finished for record in trace] == [[], [two], [one]]
    slots = llm.scheduler_config.max_num_seqs
    assert [record.idle_slots for record in trace] == [slots - 2, slots - 2, slots - 1]
    assert all(set(record.seconds) == {"schedule", "prepare", "forward", "sample", "postprocess"} for record in trace)
    assert all(seconds >= 0 for record in trace for seconds in record.seconds.values())
    assert all(a.time + sum(a.seconds.values()) <= b.time for a, b in pairwise(trace))


def test_trace_and_request_share_a_clock():
    """Two clocks cannot be drawn on one axis."""
    llm = engine()
    llm.metrics.reset()
    m = llm.generate([[7] * 5], SamplingParams(max_tokens=1), use_tqdm=False)[0].metrics
    assert m.arrival_time <= llm.metrics.trace[0].time <= m.first_scheduled_time <= m.finish_time


def test_reset():
    """Counters that survive a reset add the warm-up to the measurement; a shared trace list empties old results."""
    llm = new_engine()
    run(llm, (3, 2))
    old = llm.metrics.trace
    llm.metrics.reset()
    assert llm.metrics.counters() == add_up([]) and llm.metrics.trace == []
    assert len(old) == 2
    run(llm, (3, 2))
    assert llm.metrics.counters() == work(3, 2) and llm.metrics.trace[0].step == 0


def test_trace_of_a_long_run_stays_short(monkeypatch):
    """An engine that runs for weeks kept a record of each step that it had ever made."""
    monkeypatch.setattr(metrics, "MOST_RECORDS", 10)
    llm = new_engine()
    run(llm, (3, 25))
    assert [record.step for record in llm.metrics.trace] == list(range(15, 25))
    assert llm.metrics.counters() == work(3, 25)


def test_counters_belong_to_their_engine():
    """Counters in a class or a module count all engines of the process."""
    one, two = new_engine(), new_engine()
    run(one, (3, 2))
    assert two.metrics.counters() == add_up([])


def test_json(tmp_path):
    """What is written can be read back, with all counters and the whole trace, from the text and from the file."""
    llm = engine()
    run(llm, (4, 2), (1, 1))
    text = llm.metrics.to_json(tmp_path / "metrics.json")
    content = json.loads(text)
    assert json.loads((tmp_path / "metrics.json").read_text()) == content == json.loads(llm.metrics.to_json())
    trace = content.pop("trace")
    assert content == llm.metrics.counters()
    assert [record["tokens"] for record in trace] == [record.tokens for record in llm.metrics.trace]
    added = {
        "kv_tokens_reserved",
        "kv_tokens_used",
        "decode_tokens",
        "idle_slots",
        "num_waiting",
        "waiting",
        "finished",
    }
    added |= {"swapped", "preempted", *NOTHING_LOST[1:], "block_tables", "computed_tokens"}
    assert set(trace[0]) == {"step", "time", "tokens", "attention_pairs", "seconds"} | added


def test_who_waits_is_in_the_trace():
    """Two slots and four requests: the queue of each step, in order."""
    llm = new_engine(max_num_seqs=2)
    run(llm, (3, 2), (3, 2), (3, 1), (3, 1))
    first = min(int(name) for record in llm.metrics.trace for name in record.tokens)
    waiting = [[int(name) - first for name in record.waiting] for record in llm.metrics.trace]
    assert waiting == [[2, 3], [2, 3], []]


@pytest.mark.parametrize(
    ("policy", "steps", "idle", "short"),
    [("static", 800, 8 * 800 - 7 * 20 - 800, 800), ("mixed", 800, 8 * 800 - 7 * 20 - 800, 20)],
)
def test_seven_short_requests_and_a_long_one(policy, steps, idle, short):
    """The article's first mix: under static the short ones come back with the long one, after 800 steps."""
    llm = new_engine(policy=policy, max_num_seqs=8, max_model_len=900)
    run(llm, *[(4, 800 if i == 3 else 20) for i in range(8)])
    returned = [record.step + 1 for record in llm.metrics.trace for _ in record.finished]
    assert (llm.metrics.steps, llm.metrics.idle_slot_steps, returned) == (steps, idle, [short] * 7 + [800])


@pytest.mark.parametrize(
    ("policy", "slots", "order", "steps"),
    [
        ("static", 8, "spread", 3000),
        ("mixed", 8, "spread", 1530),
        ("static", 4, "spread", 4530),
        ("mixed", 4, "spread", 1620),
        ("static", 15, "spread", 1500),
        ("mixed", 15, "spread", 1500),
        ("static", 8, "first", 1530),
        ("mixed", 8, "first", 1500),
        ("static", 8, "last", 1530),
        ("mixed", 8, "last", 1530),
    ],
)
def test_twelve_short_requests_and_three_long_ones(policy, slots, order, steps):
    """The article's second mix: 1.96 times fewer steps with 8 slots, and little where all fit or sort well."""
    short, long = [30] * 12, [1500] * 3
    lengths = {"first": long + short, "last": short + long, "spread": ([30] * 4 + [1500]) * 3}[order]
    requests = [(str(i), 4, length) for i, length in enumerate(lengths)]
    s = filled(*requests, policy=policy, num_seqs=slots, tokens=4096, chunked=True, blocks=slots * 100, block_size=16)
    s.memory = SimpleNamespace(run=lambda *_: None)  # what lies where is not the question here
    assert len(run_all(s)) == steps


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_fails_is_not_counted(error, monkeypatch):
    """Counted at its start, a step that raised stays in the sums for ever."""
    llm = new_engine()

    def fail(*_):
        raise error

    monkeypatch.setattr(llm.model_runner.model, "compute_logits", fail)
    with pytest.raises(error):
        run(llm, (3, 2))
    assert llm.metrics.counters() == add_up([]) and llm.metrics.trace == []


@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(method="ngram")])
def test_the_command_line_counts_tokens_and_not_steps(speculative, monkeypatch, capsys):
    """A prompt of 30 tokens in pieces of 8 takes four steps before there is a token."""
    llm = new_engine(max_num_batched_tokens=8, max_num_seqs=8, speculative=speculative)
    monkeypatch.setattr(__main__, "time", SimpleNamespace(perf_counter=count().__next__))  # 2 seconds in all
    __main__.report(llm, llm.stream([7] * 30, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    assert "2.00 s, 4.5 tokens/s, first text after 1.00 s" in capsys.readouterr().err
