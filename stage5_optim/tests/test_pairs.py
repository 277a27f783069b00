"""Which features work together: each pair serves one workload and says what a plain engine says, or is refused by name.

FEATURES and REFUSED are the data; `table` makes the README's table of them. Counters show that in each pair both
features have really worked. The reference serves one sequence at a time with nothing on but the same rounding: with
quantised KV each token's K and V is rounded by itself, so no schedule may change a token there either.
"""

import re
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .. import LLM, SamplingParams, SpeculativeConfig
from ..features import DRAFTS_NEED_TOKENS
from ..metrics import StepRecord
from ..sampling import sample_seed
from .script import new_engine, tiny_checkpoint
from .test_batching import some_prompt

NGRAM = SpeculativeConfig(method="ngram", min_ngram=1, num_tokens=3)
DRAFT = "a model that often agrees"  # stands for the folder of `draft`
FEATURES: dict[str, dict] = {
    "prefix caching": dict(enable_prefix_caching=True),
    "quantised KV": dict(kv_cache_dtype="int8"),
    "fused kernels": dict(fused_kernels=True),
    "CUDA graphs": dict(enforce_eager=False),
    "async scheduling": dict(async_scheduling=True),
    "n-gram drafts": dict(speculative=NGRAM),
    "draft model": dict(speculative=SpeculativeConfig(model=DRAFT, num_tokens=3)),
    "tensor parallelism": dict(tensor_parallel_size=2),
    "recompute": dict(preemption_mode="recompute"),
    "swap": dict(preemption_mode="swap", num_swap_blocks=40),
    "n > 1": dict(),
    "static": dict(policy="static"),
    "prefill_first": dict(policy="prefill_first"),
    "mixed": dict(policy="mixed"),
}
ONE_DRAFTS = "`speculative` takes one of the two: a step checks one run of drafts"
REFUSED = {  # in the order of FEATURES
    ("async scheduling", "n-gram drafts"): DRAFTS_NEED_TOKENS,
    ("async scheduling", "draft model"): DRAFTS_NEED_TOKENS,
    ("n-gram drafts", "draft model"): ONE_DRAFTS,
}
CHOICES = [("recompute", "swap"), ("static", "prefill_first", "mixed")]  # values of one option
ALTERNATIVES = {pair for names in CHOICES for pair in combinations(names, 2)}
PAIRS = [pair for pair in combinations(FEATURES, 2) if pair not in REFUSED and pair not in ALTERNATIVES]
ON_CPU = [pair for pair in PAIRS if "fused kernels" not in pair and "tensor parallelism" not in pair]
ON_GPU = [pair for pair in PAIRS if "fused kernels" in pair]
TOGETHER = [
    ("prefix caching", "CUDA graphs", "n-gram drafts", "swap", "n > 1", "mixed"),
    ("prefix caching", "CUDA graphs", "n-gram drafts", "recompute", "n > 1", "static"),
    ("prefix caching", "CUDA graphs", "draft model", "recompute", "n > 1", "prefill_first"),
    ("prefix caching", "CUDA graphs", "draft model", "swap", "n > 1", "mixed"),
    ("prefix caching", "CUDA graphs", "async scheduling", "swap", "n > 1", "static"),
    ("prefix caching", "CUDA graphs", "async scheduling", "recompute", "n > 1", "mixed"),
]
ON_RANKS = [  # tensor parallelism with each of the others; an engine on two ranks takes seconds to start
    ("prefix caching", "quantised KV", "CUDA graphs", "n-gram drafts", "tensor parallelism", "swap", "n > 1", "mixed"),
    ("prefix caching", "CUDA graphs", "async scheduling", "tensor parallelism", "recompute", "n > 1", "prefill_first"),
    ("quantised KV", "draft model", "tensor parallelism", "swap", "n > 1", "static"),
]

# the workload

PREFIX = some_prompt(18)
GREEDY = dict(temperature=0.0, ignore_eos=True)
FIRST = (PREFIX, dict(GREEDY, max_tokens=4))  # runs alone, so that others find its prefix
REQUESTS = [
    ([*PREFIX, 7, 7], dict(GREEDY, max_tokens=12)),
    ([*PREFIX[:17], 9], dict(temperature=1.0, seed=3, ignore_eos=True, max_tokens=9, n=2)),
    ([5] * 9, dict(GREEDY, max_tokens=24)),  # the model repeats itself here
    ([*PREFIX, 250, 3], dict(temperature=0.8, seed=5, top_k=20, ignore_eos=True, max_tokens=10)),
    ([65, 66, 67] * 5, dict(GREEDY, max_tokens=20, repetition_penalty=1.1)),
    (list(b"once more"), dict(temperature=1.0, seed=1, min_tokens=4, stop_token_ids=tuple(range(128)), max_tokens=9)),
    ([100, 111] * 3, dict(GREEDY, max_tokens=16, logprobs=1)),
]
Answers = list[list[list[int]]]  # by request and sample


def requests(features: tuple[str, ...]) -> list[tuple[list[int], dict]]:
    """One sample of each prompt, unless the feature is in."""
    keep = {} if "n > 1" in features else {"n": 1}
    return [(prompt, params | keep) for prompt, params in (FIRST, *REQUESTS)]


def options(features: tuple[str, ...], draft: Path, more: dict) -> dict:
    """Of an engine with these features and no other; its pool is small if somebody has to be preempted."""
    is_cuda = more.get("device") == "cuda"
    found = dict(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=5, watermark=0.0)
    found |= dict(async_scheduling=False, enforce_eager=True, fused_kernels=False)
    found |= dict(block_size=16, num_kv_blocks=64) if is_cuda else dict(block_size=4, num_kv_blocks=96)
    if "recompute" in features or "swap" in features:
        found["num_kv_blocks"] = 5 if is_cuda else 11
    for name in features:
        found |= FEATURES[name]
    if "draft model" in features:
        found["speculative"] = SpeculativeConfig(model=str(draft), num_tokens=3)
    return found | more


def run_out(llm: LLM, done: dict[str, list[list[int]]], marks: set[str]) -> None:
    for _ in range(500):
        if not llm.has_unfinished_requests():
            return
        for output in llm.step():
            done[output.request_id] = [one.token_ids for one in output.outputs]
            for one in (one for one in output.outputs if one.logprobs is not None):
                assert all(token in row for token, row in zip(one.token_ids, one.logprobs, strict=True))
        llm.block_manager.check_integrity()
        if llm._pipeline.in_flight is not None:
            marks.add("in flight")
    raise AssertionError("somebody waits for ever")


def serve(llm: LLM, features: tuple[str, ...]) -> tuple[Answers, set[str]]:
    """The first request, then all others together. Nothing is left over."""
    done, marks, asked = {}, set(), requests(features)
    for part in (asked[:1], asked[1:]):
        for prompt, params in part:
            llm.add_request(prompt, SamplingParams(**params))
        run_out(llm, done, marks)
    manager = llm.block_manager
    assert (manager.num_free_blocks, manager.num_free_swap_blocks) == (manager.num_blocks, manager.num_swap_blocks)
    assert not llm.scheduler.has_unfinished and not manager._pool.tables and not manager._host.tables
    return [done[name] for name in sorted(done, key=int)], marks


# what shows that a feature has worked


def stands_by(trace: list[StepRecord]) -> bool:
    """A step of prompts alone, while somebody could have decoded."""
    steps = pairwise(trace)
    return any(not now.decode_tokens and set(old.tokens) - set(now.tokens) - set(old.finished) for old, now in steps)


EVIDENCE: dict[str, Callable[[LLM, set[str]], object]] = {
    "prefix caching": lambda llm, _: llm.metrics.prefix_hit_tokens,
    "quantised KV": lambda llm, _: llm.model_runner.kv_cache.data.dtype == torch.uint8,
    "fused kernels": lambda llm, _: llm.model_runner.ops.__name__.endswith("fused"),
    "CUDA graphs": lambda llm, _: llm.metrics.graph_replays,
    "async scheduling": lambda llm, marks: "in flight" in marks,
    "n-gram drafts": lambda llm, _: llm.metrics.accepted_tokens and llm.metrics.rejected_tokens,
    "draft model": lambda llm, _: llm.metrics.draft_tokens_forwarded and EVIDENCE["n-gram drafts"](llm, _),
    "tensor parallelism": lambda llm, _: llm.metrics.all_reduces == 5 * llm.metrics.steps,
    "recompute": lambda llm, _: llm.metrics.preemptions and llm.metrics.recomputed_tokens,
    "swap": lambda llm, _: llm.metrics.swapped_out_blocks and llm.metrics.swapped_in_blocks,
    "n > 1": lambda llm, _: llm.metrics.cow_copies,
    "static": lambda llm, _: any(record.waiting and record.idle_slots for record in llm.metrics.trace),
    "prefill_first": lambda llm, _: stands_by(llm.metrics.trace),
    "mixed": lambda llm, _: any(0 < one.decode_tokens < sum(one.tokens.values()) for one in llm.metrics.trace),
}


def check(llm: LLM, features: tuple[str, ...], expected: Answers) -> None:
    answers, marks = serve(llm, features)
    assert answers == expected
    for name in features:
        assert EVIDENCE[name](llm, marks), f"{name} did nothing: {llm.metrics.counters()}"


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    """`tiny` with noise on its weights: some of its drafts are right."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("draft"))
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for tensor in weights.values():
            tensor += 0.05 * tensor.float().std(correction=0) * torch.randn(tensor.shape, generator=generator)
        save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expect() -> Iterator[Callable[..., Answers]]:
    """What these features must say: each sequence alone in an engine with the same rounding and nothing else."""
    made: dict[str, LLM] = {}
    known: dict[str, list[int]] = {}

    def alone(llm: LLM, key: str, prompt: list[int], index: int, params: dict) -> list[int]:
        params = params | {"n": 1} | ({"seed": sample_seed(params["seed"], index)} if "seed" in params else {})
        key = repr((key, prompt, params))
        if key not in known:
            known[key] = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids
        return known[key]

    def expected(features: tuple[str, ...], **more) -> Answers:
        names = [name for name in ("quantised KV", "fused kernels") if name in features]
        key = repr((names, more))
        if key not in made:
            made[key] = new_engine(**options(tuple(names), Path(), more) | dict(max_num_seqs=1))
        return [
            [alone(made[key], key, prompt, index, params) for index in range(params.get("n", 1))]
            for prompt, params in requests(features)
        ]

    yield expected
    for llm in made.values():
        llm.close()


@pytest.mark.parametrize("pair", ON_CPU, ids=" + ".join)
def test_a_pair_says_what_a_plain_engine_says(pair, draft, expect):
    with new_engine(**options(pair, draft, {})) as llm:
        check(llm, pair, expect(pair))


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("features", TOGETHER, ids=" + ".join)
def test_all_that_can_be_on_is_on(features, kv, draft, expect):
    more = dict(kv_cache_dtype=kv)
    with new_engine(**options(features, draft, more)) as llm:
        check(llm, features, expect(features, **more))


# two ranks


@pytest.fixture(scope="module")
def ranks(draft) -> Iterator[Callable[[tuple[str, ...]], LLM]]:
    """The engine with these features on two ranks, which has served the workload."""
    made: dict[tuple[str, ...], tuple] = {}

    def get(features: tuple[str, ...]) -> tuple[LLM, Answers, set[str]]:
        if features not in made:
            llm = new_engine(**options(features, draft, dict(dtype="float32")))
            made[features] = llm, *serve(llm, features)
        return made[features]

    yield get
    for llm, *_ in made.values():
        llm.close()


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("tensor parallelism", "fused kernels")])
def test_ranks_with_each_of_the_others(name, ranks, expect):
    """In fp32: a sum over two ranks is rounded otherwise than one over all."""
    for features in (features for features in ON_RANKS if name in features):
        llm, answers, marks = ranks(features)
        assert answers == expect(features, dtype="float32")
        for one in ("tensor parallelism", name):
            assert EVIDENCE[one](llm, marks), f"{one} did nothing: {llm.metrics.counters()}"


# what is refused


@pytest.mark.parametrize("pair", REFUSED, ids=" + ".join)
def test_a_pair_is_refused_by_name_with_the_reason(pair, draft):
    if REFUSED[pair] is ONE_DRAFTS:
        with pytest.raises(ValueError, match=r"^method='ngram', model='tiny': expected one of the two, method='ngram'"):
            SpeculativeConfig(method="ngram", model="tiny")
        return
    with pytest.raises(ValueError, match=f"^async_scheduling=True: {re.escape(REFUSED[pair])}; leave it out, or say"):
        new_engine(**options(pair, draft, {}))


@pytest.mark.parametrize("pair", ON_GPU, ids=" + ".join)
def test_fused_kernels_need_a_gpu_whatever_else_is_on(pair, draft):
    with pytest.raises(ValueError, match=r"^fused_kernels=True: triton needs a GPU; leave it out, or say False"):
        new_engine(**options(pair, draft, {}))


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ON_GPU, ids=" + ".join)
def test_fused_kernels_with_each_of_the_others(pair, draft, expect):
    if "tensor parallelism" in pair and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    more = dict(device="cuda", dtype="float32")
    with new_engine(**options(pair, draft, more)) as llm:
        check(llm, pair, expect(pair, **more))


# the table


def table() -> str:
    """The table of the README. Each pair stands in it once: in the row of the later feature."""
    reasons = list(dict.fromkeys(REFUSED.values()))
    marks = {pair: f"no {'abc'[reasons.index(REFUSED[pair])]}" for pair in REFUSED}
    marks |= dict.fromkeys(ALTERNATIVES, "or") | dict.fromkeys(ON_GPU, "GPU")
    names = list(FEATURES)
    lines = ["| | " + " | ".join(map(str, range(1, len(names)))) + " |", "|---|" + ":-:|" * (len(names) - 1)]
    for i, name in enumerate(names):
        cells = [marks.get((other, name), "yes") for other in names[:i]] + [""] * (len(names) - 1 - i)
        lines.append(f"| {i + 1} {name} | " + " | ".join(cells) + " |")
    notes = [f"- no {'abc'[i]}: {reason}" for i, reason in enumerate(reasons)]
    return "\n".join([*lines, "", *notes])


def test_each_pair_is_tested_or_refused_and_the_readme_says_which():
    tested = {*ON_CPU, *ON_GPU, *(pair for pair in PAIRS if "tensor parallelism" in pair)}
    assert tested | set(REFUSED) | ALTERNATIVES == set(combinations(FEATURES, 2))
    assert {name for features in ON_RANKS for name in features} == set(FEATURES) - {"fused kernels"}
    assert table() in (Path(__file__).parents[1] / "README.md").read_text(), table()
