"""Many sequences at once give the tokens that each gives alone, under any schedule; invariants hold after each step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams
from ..config import POLICIES
from ..sequence import SequenceStatus

MAX_LEN = 64


@pytest.fixture(scope="module")
def solo():
    """The reference: one sequence at a time, prompts uncut, nobody beside it."""
    with LLM("tiny", dtype="float64", device="cpu", max_model_len=MAX_LEN, max_num_seqs=1, policy="static") as llm:
        yield llm


@pytest.fixture(scope="module")
def engines():
    """One engine per combination of options, made when first asked for."""
    made: dict[tuple, LLM] = {}

    def get(**options) -> LLM:
        key = tuple(options.items())
        if key not in made:
            made[key] = LLM("tiny", dtype="float64", device="cpu", max_model_len=MAX_LEN, **options)
        return made[key]

    yield get
    for llm in made.values():
        llm.close()


def tokens_alone(solo: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return solo.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


def check_invariants(llm: LLM) -> None:
    """Slots: none twice, none lost. Sequences: never more computed than there are. Budgets kept. Order kept."""
    scheduler, config = llm.scheduler, llm.scheduler_config
    held = [seq.slot for seq in scheduler.running.values()]
    assert len(held) == len(set(held)) == scheduler.slots.num_taken
    assert scheduler.slots.num_free + len(held) == config.max_num_seqs
    for seq in scheduler.running.values():
        assert seq.num_computed_tokens <= seq.num_tokens <= MAX_LEN
        assert seq.status is not SequenceStatus.WAITING
    assert all(seq.status is SequenceStatus.WAITING and seq.slot is None for seq in scheduler.waiting)
    if llm.metrics.trace:
        record = llm.metrics.trace[-1]
        assert sum(record.tokens.values()) <= config.max_num_batched_tokens
        assert len(record.tokens) + record.idle_slots == config.max_num_seqs
        assert record.kv_tokens_used <= record.kv_tokens_reserved


request = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 255), min_size=1, max_size=20),
        "new": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 1.0]),
        "gap": st.integers(0, 5),  # steps between the one before it and this one
        "abort_after": st.none() | st.integers(0, 8),  # steps after its arrival
    }
)


@given(
    requests=st.lists(request, min_size=1, max_size=8),
    policy=st.sampled_from(POLICIES),
    max_num_seqs=st.sampled_from([1, 2, 3, 5]),
    budget=st.sampled_from([1, 3, 16, 64]),
    prefills=st.sampled_from([None, 1, 2]),
)
def test_any_schedule_gives_the_tokens_of_a_solo_run(engines, solo, requests, policy, max_num_seqs, budget, prefills):
    """Chunks, neighbours, arrivals and aborts change when a token is computed, never which one it is."""
    llm = engines(
        policy=policy,
        max_num_seqs=min(max_num_seqs, budget),
        max_num_batched_tokens=budget,
        max_num_prefills=prefills,
        enable_chunked_prefill=True,
    )
    llm.model_runner.kv_cache.data.fill_(float("nan"))  # a slot's last owner must not shine through
    params = [
        SamplingParams(temperature=r["temperature"], seed=i, max_tokens=r["new"], ignore_eos=True)
        for i, r in enumerate(requests)
    ]
    got, aborted = drive(llm, requests, params)
    for i, r in enumerate(requests):
        if i not in aborted:
            assert got[i] == tokens_alone(solo, r["prompt"], params[i])
    assert not llm.has_unfinished_requests()
    assert llm.scheduler.slots.num_free == llm.scheduler_config.max_num_seqs


def drive(llm: LLM, requests: list[dict], params: list[SamplingParams]) -> tuple[dict[int, list[int]], set[int]]:
    """Hand in, step and abort as the requests say, checking the invariants after every step."""
    for request_id in list(llm._requests):  # what a failing example left behind
        llm.abort_request(request_id)
    llm.metrics.reset()
    due, at = [], 0
    for r in requests:
        at += r["gap"]
        due.append(at)
    got, aborted, step = {}, set(), 0
    while step <= at or llm.has_unfinished_requests():
        for i, r in enumerate(requests):
            if due[i] == step:
                llm.add_request(r["prompt"], params[i], request_id=f"r{i}")
            if r["abort_after"] is not None and due[i] + r["abort_after"] == step and i not in got:
                llm.abort_request(f"r{i}")
                aborted.add(i)
        for output in llm.step():
            got[int(output.request_id[1:])] = output.outputs[0].token_ids
        check_invariants(llm)
        step += 1
        assert step < 1000, "work is left: somebody waits for ever"
    assert set(got) | aborted == set(range(len(requests)))
    return got, aborted


@pytest.mark.parametrize("budget", [4, 5, 7, 16, 40, 64])
def test_every_chunk_size(engines, solo, budget):
    """A one-token decode hides a mask that is aligned to the wrong corner; every chunk size shows it."""
    llm = engines(max_num_seqs=4, max_num_batched_tokens=budget)
    prompts = [[(11 * i + 5 * j * j) % 256 for i in range(n)] for j, n in enumerate((1, 2, 23, 40, 17))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = [tokens_alone(solo, prompt, params) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(len(set(tokens)) > 3 for tokens in expected)


def test_copies_in_one_batch_agree(engines):
    """Eight times the same prompt: one of them reading a neighbour's slot would differ."""
    llm = engines(max_num_seqs=8, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_logprobs_do_not_depend_on_neighbours(engines, solo):
    """The reported numbers belong to the right row of the batch."""
    llm = engines(max_num_seqs=3, max_num_batched_tokens=16)
    prompts = [[1, 2, 3], [9] * 14, [40, 41]]
    params = [SamplingParams(temperature=0.0, max_tokens=6, logprobs=n, ignore_eos=True) for n in (0, 5, 2)]
    for prompt, one, output in zip(prompts, params, llm.generate(prompts, params, use_tqdm=False), strict=True):
        alone = solo.generate([prompt], one, use_tqdm=False)[0].outputs[0].logprobs
        for ours, expected in zip(output.outputs[0].logprobs, alone, strict=True):
            assert list(ours) == list(expected)
            assert [x.logprob for x in ours.values()] == pytest.approx([x.logprob for x in expected.values()], abs=1e-9)


def test_a_step_that_only_computes_pieces_samples_nothing(engines):
    """No token before the last chunk: a sampler that runs too early invents one."""
    llm = engines(max_num_seqs=1, max_num_batched_tokens=4)
    llm.add_request([7] * 10, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), request_id="long")
    seq = llm.scheduler.waiting[0]
    made = []
    while llm.has_unfinished_requests():
        llm.step()
        made.append(seq.num_output_tokens)
    assert made == [0, 0, 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots, order", [(4, "spread"), (8, "spread"), (15, "spread"), (8, "first"), (8, "last")])
def test_work_is_the_same_under_every_policy(engines, policy, slots, order):
    """Scheduling changes steps and waiting, not the tokens through the model."""
    llm = engines(policy=policy, max_num_seqs=slots, max_num_batched_tokens=64)
    lengths = {"spread": [3, 3, 3, 3, 40] * 3, "first": [40] * 3 + [3] * 12, "last": [3] * 12 + [40] * 3}[order]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    llm.metrics.reset()
    llm.generate([[i, 1, 2] for i in range(15)], params, use_tqdm=False)
    assert llm.metrics.tokens_forwarded == sum(3 + n - 1 for n in lengths)
    assert llm.metrics.idle_slot_steps == slots * llm.metrics.steps - sum(len(r.tokens) for r in llm.metrics.trace)
