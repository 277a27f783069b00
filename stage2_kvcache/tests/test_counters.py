"""Counters: the work that this stage does, exactly. A step feeds only what has not been computed.

A prompt of p tokens and m new ones: one step over p tokens, then m - 1 steps over one.
"""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import SamplingParams, metrics
from .script import engine, new_engine, play

PROMPT_LENGTHS = st.integers(1, 40)
OUTPUT_LENGTHS = st.integers(1, 16)
BYTES_PER_TOKEN = 2 * 2 * 2 * 64 * 8  # K and V, layers, KV heads, head_dim, float64


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
        "kv_tokens_reserved_peak": engine().resolved.max_model_len,
        "kv_tokens_used_peak": fed,
    }


def add_up(costs: list[dict[str, int]]) -> dict[str, int]:
    """Work is summed over requests; of peaks the largest counts."""
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
    """A long request and then a short one: the last value is not the peak."""
    run(engine(), (20, 5), (2, 2))
    assert engine().metrics.kv_tokens_used_peak == 24


@given(st.lists(st.tuples(PROMPT_LENGTHS, OUTPUT_LENGTHS), max_size=4))
def test_requests_add_up(requests):
    """Several requests cost the sum of each, and no request pays for its neighbour's padding."""
    run(engine(), *requests)
    assert engine().metrics.counters() == add_up([work(*request) for request in requests])
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
    assert [record.step for record in trace] == [0, 1, 2, 3, 4]
    assert [record.tokens for record in trace] == [{ids[0]: n} for n in (5, 1, 1)] + [{ids[1]: n} for n in (2, 1)]
    assert [record.attention_pairs for record in trace] == [15, 6, 7, 3, 3]
    assert [record.kv_tokens_used for record in trace] == [5, 6, 7, 2, 3]
    assert {record.kv_tokens_reserved for record in trace} == {llm.resolved.max_model_len}
    assert all(set(record.seconds) == {"prepare", "forward", "sample"} for record in trace)
    assert all(seconds >= 0 for record in trace for seconds in record.seconds.values())
    assert all(a.time + sum(a.seconds.values()) <= b.time for a, b in pairwise(trace))


def test_trace_and_request_share_a_clock():
    """Two clocks cannot be drawn on one axis."""
    llm = engine()
    llm.metrics.reset()
    m = llm.generate([[7] * 5], SamplingParams(max_tokens=1), use_tqdm=False)[0].metrics
    assert m.arrival_time <= m.first_scheduled_time <= llm.metrics.trace[0].time <= m.finish_time


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
    kv = {"kv_tokens_reserved", "kv_tokens_used"}
    assert set(trace[0]) == {"step", "time", "tokens", "attention_pairs", "seconds"} | kv


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
