"""All stages make the same tokens in float64, whatever workload hypothesis draws; they differ in work only."""

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common import stages
from benchmarks.workloads import mixed_256, twelve_and_three

OPTIONS = dict(device="cpu", dtype="float64", max_model_len=64)
SMALL_POOL = dict(block_size=4, num_kv_blocks=20, watermark=0.0)  # five requests outgrow it: some are preempted


def options(stage: str) -> dict:
    return OPTIONS | (SMALL_POOL if stage >= "stage4" else {})


@pytest.fixture(scope="module")
def engines():
    """One engine per stage, `tiny` in float64."""
    made = {stage: importlib.import_module(stage).LLM("tiny", **options(stage)) for stage in stages()}
    yield made
    for llm in made.values():
        llm.close()


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 255), min_size=1, max_size=24),
        "max_tokens": st.integers(1, 16),
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "min_tokens": st.sampled_from([0, 1]),
        "stop": st.sampled_from([[], ["a"], ["qu", "x"]]),
    }
)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.lists(requests, min_size=1, max_size=5))
def test_same_outputs_in_every_stage(engines, drawn):
    """Tokens, text and finish reason, greedy and sampled, with every parameter: the stages differ in work only."""
    results = {}
    for name, llm in engines.items():
        params_of = importlib.import_module(name).SamplingParams
        params = [params_of(**{k: v for k, v in r.items() if k != "prompt"}, seed=i) for i, r in enumerate(drawn)]
        outputs = llm.generate([r["prompt"] for r in drawn], params, use_tqdm=False)
        results[name] = [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]
    first, *others = results.values()
    assert all(other == first for other in others)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.lists(requests, min_size=1, max_size=5))
def test_stage_5_with_everything_off_is_stage_4(engines, drawn):
    """Not the tokens alone: every counter that stage 4 has, and every step of its trace, but for the clock."""
    traces, counters = [], []
    for name in (stage for stage in engines if stage >= "stage4"):
        llm, params_of = engines[name], importlib.import_module(name).SamplingParams
        llm.metrics.reset()
        for i, r in enumerate(drawn):
            one = params_of(**{k: v for k, v in r.items() if k != "prompt"}, seed=i, n=1 + i % 2)
            llm.add_request(r["prompt"], one, request_id=str(i))
        while llm.has_unfinished_requests():
            llm.step()
        counters.append(llm.metrics.counters())
        traces.append([vars(record) | {"time": 0, "seconds": 0} for record in llm.metrics.trace])
    four, five = counters
    assert five == four | dict.fromkeys(five.keys() - four.keys(), 0)
    for one, other in zip(*traces, strict=True):
        assert other == one | dict.fromkeys(other.keys() - one.keys(), 0)


def test_work_falls_from_stage_to_stage(engines):
    """The ladder in counters: a cache saves tokens, a batch saves steps, blocks save memory."""
    prompts, new = [[i + 1] * 8 for i in range(4)], 10
    counters = {}
    for name, llm in engines.items():
        params = importlib.import_module(name).SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        llm.metrics.reset()
        llm.generate(prompts, params, use_tqdm=False)
        counters[name[:6]] = llm.metrics.counters()
    assert counters["stage1"]["tokens_forwarded"] == 4 * sum(8 + i for i in range(new))
    assert counters["stage2"]["tokens_forwarded"] == 4 * (8 + new - 1)
    assert counters["stage2"]["steps"] == 4 * new
    if "stage3" in counters:
        assert counters["stage3"]["tokens_forwarded"] == counters["stage2"]["tokens_forwarded"]
        assert counters["stage3"]["steps"] == new
        assert counters["stage3"]["kv_tokens_reserved_peak"] == 4 * 64
    if "stage4" in counters:
        assert counters["stage4"]["tokens_forwarded"] == counters["stage3"]["tokens_forwarded"]
        assert counters["stage4"]["steps"] == new
        assert counters["stage4"]["kv_tokens_reserved_peak"] == 4 * 20  # 17 tokens in blocks of 4


def test_the_workload_of_256_requests():
    """The totals that published numbers refer to; another order of the random calls gives another workload."""
    requests = mixed_256()
    assert len(requests) == 256
    assert sum(len(request.prompt) for request in requests) == 142_827
    assert sum(request.max_tokens for request in requests) == 133_966
    assert sorted(request.max_tokens for request in twelve_and_three("first")) == [30] * 12 + [1500] * 3
