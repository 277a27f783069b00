"""Many sequences at once give the tokens that each gives alone, under any schedule and in any pool, however often they
step back, fork, are copied or swapped; invariants hold after each step.

The reference is the same model with room for everybody: one sequence at a time, prompts uncut, n=1.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .. import LLM, RequestOutput, SamplingParams
from ..block_manager import BlockManager
from ..config import POLICIES, PREEMPTION_MODES
from ..sampling import sample_seed
from ..sequence import CompletionOutput, SequenceStatus
from .script import force, new_engine, scripted

MAX_LEN = 64


class Solo:
    """Each sequence alone. Remembers what it has answered."""

    def __init__(self):
        self.llm = new_engine(max_model_len=MAX_LEN, max_num_seqs=1, policy="static", num_kv_blocks=64, block_size=4)
        self.known: dict[str, list] = {}

    def run(self, prompt: list[int], index: int = 0, **params) -> RequestOutput:
        """What sample `index` of a request with these parameters has to be."""
        params |= {"n": 1, "seed": sample_seed(params["seed"], index) if params.get("seed") is not None else None}
        key = repr((prompt, sorted(params.items())))
        if key not in self.known:
            self.known[key] = self.llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0]
        return self.known[key]

    def tokens(self, prompt: list[int], index: int = 0, **params) -> list[int]:
        return self.run(prompt, index, **params).outputs[0].token_ids


@pytest.fixture(scope="module")
def solo():
    solo = Solo()
    yield solo
    solo.llm.close()


@pytest.fixture
def engine():
    """Makes engines that are closed after the test."""
    made: list[LLM] = []

    def make(**options) -> LLM:
        made.append(new_engine(**{"max_model_len": MAX_LEN} | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def check_invariants(llm: LLM) -> None:
    """Blocks: none twice, none lost, none written by two. Sequences: no more computed than there are. Budgets kept."""
    scheduler, config, manager = llm.scheduler, llm.scheduler_config, llm.block_manager
    manager.check_integrity()
    running = [seq for group in scheduler.running.values() for seq in group.active]
    waiting = [seq for group in scheduler.waiting for seq in group.active]
    assert set(manager._pool.tables) == {seq.seq_id for seq in running}
    assert set(manager._host.tables) == {seq.seq_id for seq in waiting if seq.status is SequenceStatus.SWAPPED}
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    for seq in (*running, *waiting):
        assert seq.num_computed_tokens <= seq.num_tokens <= llm.resolved.max_model_len
    for seq in running:
        table = manager.table(seq.seq_id)
        for i, block in enumerate(table.blocks):
            is_full = table.num_tokens >= (i + 1) * manager.block_size
            next_token = {seq.seq_id: table.num_tokens + 1}
            assert is_full or manager.ref_count(block) == 1 or manager.num_blocks_to_grow(next_token) == 1
    if llm.metrics.trace:
        record = llm.metrics.trace[-1]
        assert sum(record.tokens.values()) <= config.max_num_batched_tokens
        assert len(record.tokens) + record.idle_slots <= config.max_num_seqs
        assert record.kv_tokens_used <= record.kv_tokens_reserved


def poison_free_blocks(llm: LLM) -> None:
    """What nobody holds becomes NaN, so that nobody who reads it goes unnoticed."""
    cache, manager = llm.model_runner.kv_cache, llm.block_manager
    cache.data[:, :, list(manager._pool.free)] = float("nan")
    cache.host[list(manager._host.free)] = float("nan")


def run_step(llm: LLM) -> list[RequestOutput]:
    """A step, with everything checked and poisoned after it."""
    outputs = llm.step()
    check_invariants(llm)
    poison_free_blocks(llm)
    return outputs


def serve(llm: LLM, requests: dict[str, tuple[list[int], dict]]) -> dict[str, list[list[int]]]:
    """Hand all of them in, run to the end, and return the tokens of each one's samples."""
    poison_free_blocks(llm)
    for name, (prompt, params) in requests.items():
        llm.add_request(prompt, SamplingParams(**params), request_id=name)
    done = {}
    for _ in range(1000):
        if not llm.has_unfinished_requests():
            break
        done |= {output.request_id: [c.token_ids for c in output.outputs] for output in run_step(llm)}
    assert list(done) and set(done) == set(requests), "work is left: somebody waits for ever"
    assert_all_is_free(llm)
    return done


def assert_all_is_free(llm: LLM) -> None:
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    assert llm.block_manager.num_free_swap_blocks == llm.block_manager.num_swap_blocks


def expected(solo: Solo, requests: dict[str, tuple[list[int], dict]]) -> dict[str, list[list[int]]]:
    return {
        name: [solo.tokens(prompt, index, **params) for index in range(params.get("n", 1))]
        for name, (prompt, params) in requests.items()
    }


def some_prompt(length: int, offset: int = 0) -> list[int]:
    return [(offset + 37 * i + i * i) % 250 for i in range(length)]


# any workload in any pool


# What has to happen in 40 workloads at least, in blocks, tokens or requests: otherwise they test little.
OFTEN = {"steps": 500, "preemptions": 20, "copies": 20, "early stops": 5, "aborted running": 3, "aborted waiting": 3}
RECOMPUTED = {"recomputed tokens": 100}
SWAPPED = {"swapped out": 10, "swapped in": 10}


@pytest.mark.parametrize(
    "mode, host, often",
    [
        ("recompute", None, OFTEN | RECOMPUTED),
        ("swap", 100, OFTEN | SWAPPED),
        ("swap", 6, OFTEN | RECOMPUTED | SWAPPED),
        ("swap", 1, OFTEN | RECOMPUTED),
    ],
    ids=["recompute", "swap-100", "swap-6", "swap-1"],
)
def test_any_schedule_in_any_pool_gives_the_tokens_of_a_solo_run(solo, mode, host, often):
    """Chunks, neighbours, arrivals, aborts, too few blocks, copies and swaps change when a token is computed and where
    its K and V lie, never which one it is."""
    events = Counter()

    @settings(max_examples=max(40, settings().max_examples // 4))  # each takes a tenth of a second
    @given(st.data())
    def play(data):
        block_size = data.draw(st.sampled_from([1, 4, 16]), "block_size")
        requests = data.draw(st.lists(request(block_size), min_size=4, max_size=6), "requests")
        llm = draw_engine(data, block_size, requests, preemption_mode=mode, num_swap_blocks=host)
        got, aborted = drive(llm, requests, events)
        assert set(got) | aborted == set(range(len(requests)))
        for i, tokens in got.items():
            params = requests[i]["params"]
            assert tokens == [solo.tokens(requests[i]["prompt"], j, **params) for j in range(params["n"])]
        assert_all_is_free(llm)
        count_events(llm, events)
        llm.close()

    play()
    print(dict(events))
    assert all(events[event] >= least for event, least in often.items()), f"too little happens: {dict(events)}"


def request(block_size: int) -> st.SearchStrategy:
    """Lengths around the end of a block, and enough output that a wrong block shows."""
    b = block_size
    lengths = [length for length in (1, b - 1, b, b + 1, 2 * b, 2 * b + 1, 9) if 0 < length <= 20]
    return st.fixed_dictionaries(
        {
            "prompt": st.sampled_from(lengths).flatmap(lambda n: st.lists(st.integers(0, 255), min_size=n, max_size=n)),
            "params": st.fixed_dictionaries(
                {
                    "max_tokens": st.sampled_from([20, 17, 24, 12, 2]),
                    "n": st.sampled_from([1, 2, 3, 1, 4]),
                    "temperature": st.sampled_from([0.0, 1.0, 1.0]),
                    "seed": st.integers(0, 2**32),
                    "repetition_penalty": st.sampled_from([1.0, 1.3]),
                    "min_tokens": st.integers(0, 2),
                    "stop_token_ids": st.sampled_from([(), (), tuple(range(16))]),
                    "ignore_eos": st.just(True),
                }
            ),
            "gap": st.sampled_from([0, 0, 1, 0, 4]),  # steps between the one before it and this one
            "abort_after": st.sampled_from([None] * 8 + [0, 1, 3, 6, 9, 15]),  # steps after its arrival
        }
    )


def draw_engine(data: st.DataObject, block_size: int, requests: list[dict], **options) -> LLM:
    """Any options, with a pool in which the largest request just fits, or a little more."""
    reckon, least = BlockManager(1, block_size), 2
    for r in requests:
        prompt_len, params = len(r["prompt"]), r["params"]
        lens = [prompt_len + params["max_tokens"] - 1] * params["n"]
        least = max(least, reckon.blocks_for_samples(prompt_len, lens))
    max_num_seqs = data.draw(st.sampled_from([8, 4, 16]), "max_num_seqs")
    chunked = data.draw(st.booleans(), "enable_chunked_prefill")
    budget = data.draw(st.sampled_from([64, 9, 20]), "max_num_batched_tokens")
    return new_engine(
        max_model_len=MAX_LEN,
        policy=data.draw(st.sampled_from(POLICIES), "policy"),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs, 0 if chunked else max(len(r["prompt"]) for r in requests)),
        max_num_prefills=data.draw(st.sampled_from([None, None, 1, 2]), "max_num_prefills"),
        enable_chunked_prefill=chunked,
        block_size=block_size,
        num_kv_blocks=least + data.draw(st.sampled_from([0, 1, 4]), "blocks to spare"),
        watermark=data.draw(st.sampled_from([0.0, 0.0, 0.1, 0.5]), "watermark"),
        **options,
    )


def drive(llm: LLM, requests: list[dict], events: Counter) -> tuple[dict[int, list[list[int]]], set[int]]:
    """Hand in, step and abort as the requests say. Returns the tokens of who finished, and who was aborted."""
    poison_free_blocks(llm)
    due, at = [], 0
    for r in requests:
        at += r["gap"]
        due.append(at)
    got, aborted, step = {}, set(), 0
    while step <= at or llm.has_unfinished_requests():
        for i, r in enumerate(requests):
            if due[i] == step:
                llm.add_request(r["prompt"], SamplingParams(**r["params"]), request_id=f"r{i}")
            if r["abort_after"] is not None and due[i] + r["abort_after"] == step and i not in got:
                status = llm._requests[f"r{i}"].status.value
                events[f"aborted {status}"] += 1
                llm.abort_request(f"r{i}")
                aborted.add(i)
                check_invariants(llm)
                poison_free_blocks(llm)
        for output in run_step(llm):
            got[int(output.request_id[1:])] = [completion.token_ids for completion in output.outputs]
            events["early stops"] += any(c.finish_reason == "stop" for c in output.outputs)
        step += 1
        assert step < 2000, "work is left: somebody waits for ever"
    return got, aborted


def count_events(llm: LLM, events: Counter) -> None:
    metrics = llm.metrics
    counted = {
        "workloads": 1,
        "steps": metrics.steps,
        "preemptions": metrics.preemptions,
        "recomputed tokens": metrics.recomputed_tokens,
        "swapped out": metrics.swapped_out_blocks,
        "swapped in": metrics.swapped_in_blocks,
        "copies": metrics.cow_copies,
        "forks": sum(line.why == "fork" for line in llm.block_manager.allocation_log),
    }
    events.update(counted)


# batches with room for everybody


@pytest.mark.parametrize("budget", [4, 5, 7, 16, 40, 64])
def test_every_chunk_size(engine, solo, budget):
    """A one-token decode hides a mask that is aligned to the wrong corner; every chunk size shows it."""
    llm = engine(max_num_seqs=4, max_num_batched_tokens=budget)
    prompts = [[(11 * i + 5 * j * j) % 256 for i in range(n)] for j, n in enumerate((1, 2, 23, 40, 17))]
    params = dict(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    alone = [solo.tokens(prompt, **params) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert all(len(set(tokens)) > 3 for tokens in alone)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_lengths_around_the_end_of_a_block(engine, solo, block_size):
    """A prompt that just fills a block, one token less and one more, each with outputs over two further boundaries: a
    slot that is off by one token or one block reads a neighbour or the poison in the free blocks."""
    lengths = [length for b in (block_size, 2 * block_size) for length in (b - 1, b, b + 1) if length]
    requests = {
        f"{i} of {length}": (
            some_prompt(length, i),
            dict(temperature=0.0, max_tokens=2 * block_size + 2, ignore_eos=True),
        )
        for i, length in enumerate(lengths)
    }
    llm = engine(max_model_len=128, block_size=block_size, num_kv_blocks=60, max_num_batched_tokens=20, max_num_seqs=8)
    solo_llm = engine(max_model_len=128, block_size=128, num_kv_blocks=1, max_num_seqs=1)
    got = serve(llm, requests)
    for name, (prompt, params) in requests.items():
        alone = solo_llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids
        assert got[name] == [alone]


def test_copies_in_one_batch_agree(engine):
    """Eight times the same prompt: one of them reading a neighbour's blocks would differ."""
    llm = engine(max_num_seqs=8, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_logprobs_do_not_depend_on_neighbours(engine, solo):
    """The reported numbers belong to the right row of the batch."""
    llm = engine(max_num_seqs=3, max_num_batched_tokens=16)
    prompts = [[1, 2, 3], [9] * 14, [40, 41]]
    params = [dict(temperature=0.0, max_tokens=6, logprobs=n, ignore_eos=True) for n in (0, 5, 2)]
    outputs = llm.generate(prompts, [SamplingParams(**one) for one in params], use_tqdm=False)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        assert_same_logprobs(output.outputs[0], solo.run(prompt, **one).outputs[0])


def assert_same_logprobs(ours: CompletionOutput, alone: CompletionOutput) -> None:
    assert len(ours.logprobs) == len(ours.token_ids) == len(alone.logprobs)
    for row, other in zip(ours.logprobs, alone.logprobs, strict=True):
        assert list(row) == list(other)
        assert [x.logprob for x in row.values()] == pytest.approx([x.logprob for x in other.values()], abs=1e-9)


def test_a_step_that_only_computes_pieces_samples_nothing(engine):
    """No token before the last chunk: a sampler that runs too early invents one."""
    llm = engine(max_num_seqs=1, max_num_batched_tokens=4)
    llm.add_request([7] * 10, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), request_id="long")
    seq = llm.scheduler.waiting[0].seqs[0]
    made = []
    while llm.has_unfinished_requests():
        llm.step()
        made.append(seq.num_output_tokens)
    assert made == [0, 0, 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots, order", [(4, "spread"), (8, "spread"), (15, "spread"), (8, "first"), (8, "last")])
def test_work_is_the_same_under_every_policy(engine, policy, slots, order):
    """Scheduling changes steps and waiting, not the tokens through the model."""
    llm = engine(policy=policy, max_num_seqs=slots, max_num_batched_tokens=64)
    lengths = {"spread": [3, 3, 3, 3, 40] * 3, "first": [40] * 3 + [3] * 12, "last": [3] * 12 + [40] * 3}[order]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    llm.generate([[i, 1, 2] for i in range(15)], params, use_tqdm=False)
    assert llm.metrics.tokens_forwarded == sum(3 + n - 1 for n in lengths)
    assert llm.metrics.idle_slot_steps == slots * llm.metrics.steps - sum(len(r.tokens) for r in llm.metrics.trace)


# several samples of one prompt


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8, 9])
def test_each_sample_is_a_request_with_its_own_seed(engine, solo, prompt_len):
    """Samples share the prompt's blocks and nothing else. With equal seeds all would say the same; with a missing copy
    they would write into each other's text."""
    params = dict(n=4, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    requests = {
        "a": (some_prompt(prompt_len), params),
        "b": (some_prompt(prompt_len, 9), params | {"seed": None, "n": 1}),
    }
    llm = engine(block_size=4, num_kv_blocks=40)
    got = serve(llm, requests)["a"]
    assert got == [solo.tokens(requests["a"][0], index, **params) for index in range(4)]
    assert len({tuple(tokens) for tokens in got}) == 4
    assert llm.metrics.cow_copies == (3 if prompt_len % 4 else 0)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_samples_that_end_apart(engine, mode):
    """At the second token chance ends some samples and not others. Those that are left are preempted, come back, fork
    from another first one, and still say what each would say alone."""
    rows = force([10, 11, *range(20, 40)], 256)
    rows[1, 12] = 0.0  # 11 or 12, as chance wants; 12 ends the text
    params = dict(n=4, temperature=1.0, seed=3, max_tokens=14, stop_token_ids=(12,), ignore_eos=True)
    llm = engine(block_size=4, num_kv_blocks=17, max_num_seqs=8, preemption_mode=mode)
    requests = {
        "elder": (some_prompt(6, 1), params | {"n": 1, "stop_token_ids": (), "max_tokens": 40}),
        "a": (some_prompt(6), params),
    }
    alone = engine(max_num_seqs=1)
    with scripted(alone, rows, 6):
        one = [SamplingParams(**params | {"n": 1, "seed": sample_seed(3, index)}) for index in range(4)]
        wanted = [out.outputs[0].token_ids for out in alone.generate([some_prompt(6)] * 4, one, use_tqdm=False)]
    with scripted(llm, rows, 6):
        assert serve(llm, requests)["a"] == wanted
    assert sorted({len(tokens) for tokens in wanted}) == [2, 14]
    assert llm.metrics.preemptions > 0


def test_copies_and_an_abort_in_the_middle(engine, solo):
    """16 blocks of 4; a prompt of 6 for three samples: its second block is shared and half full, so two copies. Aborted
    after some steps, or run to the end: 16 blocks are free."""
    params = dict(n=3, temperature=0.9, seed=11, max_tokens=6, ignore_eos=True)
    llm = engine(block_size=4, num_kv_blocks=16)
    for steps in range(1, 6):
        llm.metrics.reset()
        llm.add_request(some_prompt(6), SamplingParams(**params), request_id="a")
        for _ in range(steps):
            assert run_step(llm) == []
        assert llm.metrics.cow_copies == (2 if steps > 1 else 0)
        assert llm.block_manager.num_free_blocks < 16
        llm.abort_request("a")
        check_invariants(llm)
        assert_all_is_free(llm)
    got = serve(llm, {"a": (some_prompt(6), params)})["a"]
    assert got == [solo.tokens(some_prompt(6), index, **params) for index in range(3)]


# too few blocks


def test_a_pool_that_is_too_small_for_both_gives_the_same_tokens(engine):
    """6 blocks of 4 for two requests that need 5 each: the second steps back, and nobody can tell from the text."""
    params = dict(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = {"a": (some_prompt(8), params), "b": (some_prompt(8, 3), params)}
    small, large = engine(block_size=4, num_kv_blocks=6), engine(block_size=4, num_kv_blocks=64)
    assert serve(small, requests) == serve(large, requests)
    assert small.metrics.preemptions > 0 == large.metrics.preemptions
    assert small.metrics.tokens_forwarded == large.metrics.tokens_forwarded + small.metrics.recomputed_tokens


@pytest.mark.parametrize("host", [0, 1, 16])
def test_two_groups_that_swap(engine, solo, host):
    """6 blocks of 4 for two requests of two samples that need 6 each, with no, too little and enough room on the host:
    swapped or computed again, each sample goes on where it was."""
    params = dict(n=2, temperature=1.0, max_tokens=8, ignore_eos=True)
    requests = {"a": (some_prompt(8), params | {"seed": 1}), "b": (some_prompt(8, 3), params | {"seed": 2})}
    llm = engine(block_size=4, num_kv_blocks=6, preemption_mode="swap", num_swap_blocks=host)
    assert serve(llm, requests) == expected(solo, requests)
    metrics = llm.metrics
    assert metrics.preemptions > 0
    assert (metrics.swapped_out_blocks > 0, metrics.recomputed_tokens > 0) == (host == 16, host < 16)
    assert metrics.swapped_out_blocks == metrics.swapped_in_blocks


def test_a_block_is_copied_after_it_has_come_back(engine, solo):
    """b is swapped out right after its fork, when its samples still share a half full block. In the step that brings it
    back that block is also copied: in the other order the copy would be made of whatever lies there."""
    params = dict(temperature=1.0, ignore_eos=True, seed=3)
    requests = {
        "a": (some_prompt(8), params | dict(max_tokens=5)),
        "b": (some_prompt(6, 3), params | dict(n=2, max_tokens=6)),
    }
    llm = engine(block_size=4, num_kv_blocks=5, preemption_mode="swap", num_swap_blocks=2)
    assert serve(llm, requests) == expected(solo, requests)
    assert any(record.swapped_in_blocks and record.cow_copies for record in llm.metrics.trace)


def test_a_block_is_swapped_out_before_it_is_overwritten(engine, solo):
    """a grows into the last free block, so b's copy goes into the one that c has just given up: by then c's tokens must
    be on the host."""
    params = dict(temperature=1.0, ignore_eos=True, seed=3)
    requests = {
        "a": (some_prompt(4, 5), params | dict(max_tokens=3)),
        "b": (some_prompt(6), params | dict(n=2, max_tokens=3)),
        "c": (some_prompt(4, 3), params | dict(max_tokens=5)),
    }
    llm = engine(block_size=4, num_kv_blocks=5, preemption_mode="swap", num_swap_blocks=2)
    assert serve(llm, requests) == expected(solo, requests)
    assert any(record.swapped_out_blocks and record.cow_copies for record in llm.metrics.trace)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_stepping_back_touches_no_parameter(engine, solo, mode):
    """Logprobs are reported once for each token, penalties see all of the output, min_tokens counts on, and chance goes
    on at the same output position, however often a request has lost its blocks."""
    common = dict(max_tokens=16, ignore_eos=True, seed=4, temperature=1.0)
    requests = {
        "elder": (some_prompt(5), common | dict(max_tokens=30)),
        "logprobs": (some_prompt(4, 1), common | dict(logprobs=3, temperature=0.0)),
        "penalty": (some_prompt(5, 2), common | dict(repetition_penalty=1.8, logprobs=1)),
        "minimum": (some_prompt(3, 3), common | dict(min_tokens=9, stop_token_ids=tuple(range(200)))),
        "samples": (some_prompt(6, 4), common | dict(n=2, logprobs=0, top_k=40, max_tokens=12)),
    }
    llm = engine(block_size=4, num_kv_blocks=9, preemption_mode=mode, num_swap_blocks=16)
    groups = {}
    for name, (prompt, params) in requests.items():
        llm.add_request(prompt, SamplingParams(**params), request_id=name)
        groups[name] = llm._requests[name]
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in run_step(llm)}
    preempted = Counter(name for record in llm.metrics.trace for name in record.preempted)
    assert set(preempted) == set(requests) - {"elder"}
    for name, (prompt, params) in requests.items():
        for completion in outputs[name].outputs:
            alone = solo.run(prompt, completion.index, **params).outputs[0]
            assert (completion.token_ids, completion.text) == (alone.token_ids, alone.text)
            assert completion.finish_reason == alone.finish_reason
            if params.get("logprobs") is not None:
                assert_same_logprobs(completion, alone)
    assert_all_is_free(llm)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_abort_of_a_request_that_has_stepped_back(engine, solo, mode):
    """It has no blocks, or all of them on the host: both pools must be whole again, and its neighbour unharmed."""
    params = dict(n=2, temperature=1.0, seed=8, max_tokens=8, ignore_eos=True)
    llm = engine(block_size=4, num_kv_blocks=6, preemption_mode=mode, num_swap_blocks=16)
    llm.add_request(some_prompt(8), SamplingParams(**params), request_id="a")
    llm.add_request(some_prompt(8, 3), SamplingParams(**params), request_id="b")
    done = []
    while not llm.metrics.preemptions:
        done += run_step(llm)
    assert llm._requests["b"].status is {"swap": SequenceStatus.SWAPPED, "recompute": SequenceStatus.WAITING}[mode]
    llm.abort_request("b")
    check_invariants(llm)
    assert llm.block_manager.num_free_swap_blocks == llm.block_manager.num_swap_blocks
    while llm.has_unfinished_requests():
        done += run_step(llm)
    (output,) = done
    assert [c.token_ids for c in output.outputs] == [solo.tokens(some_prompt(8), index, **params) for index in range(2)]
    assert_all_is_free(llm)
