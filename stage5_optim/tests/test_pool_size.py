"""How large the pool becomes: from memory or as asked for, never more than fits, and never too little to serve."""

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .. import LLM, SamplingParams, kv_cache
from ..config import EngineConfig, Resolved, SchedulerConfig
from ..kv_cache import KVCache, block_bytes, kv_room, plan_blocks, plan_swap_blocks
from ..model_runner import ModelRunner, largest_batch
from .script import engine, new_engine

GB = 10**9
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("utilization", "room"),
    [
        (0.9, 27.2),  # all that is free but 1 % of the device, less the step's own need: neighbours have 46
        (0.4, 26),  # 32 for this process, of which 4 are weights and 2 the step's
        (0.05, -2),  # not even the weights
    ],
)
def test_room_is_a_share_of_the_device_and_never_more_than_is_free(utilization, room):
    """What neighbours use was charged to this process, and the number of blocks became negative: 80 GB, of which 30 are
    free, 4 of weights, 2 for a step."""
    assert kv_room(80 * GB, 30 * GB, 4 * GB, 2 * GB, utilization) == int(room * GB)


@given(*[st.integers(0, 100)] * 4, st.floats(0, 1))
def test_room_leaves_room_for_a_step(total, free, own, peak, utilization):
    """Whatever the numbers: the pool and a step fit into what is free, and with the weights into the share."""
    room = kv_room(total, min(free, total - own), own, peak, utilization)
    assert room + peak <= min(free, total - own) and own + room + peak <= total * utilization


# 16 tokens of `tiny` in float64: 64 KiB a block
SIZE = 16 * 2 * 2 * 2 * 64 * 8
MODEL = engine().model_config
ON_CPU = Resolved(CPU, torch.float64, "torch", "", max_model_len=100, block_size=16)
ON_GPU = replace(ON_CPU, device=CUDA)


def plan(resolved: Resolved, room: int, wanted_tokens: int = 0, **options) -> int:
    return plan_blocks(EngineConfig("tiny", **options), MODEL, resolved, room, wanted_tokens)


def test_a_block_in_bytes():
    assert block_bytes(MODEL, 16) == SIZE


def test_the_pool_fills_the_room_on_a_gpu():
    """As many whole blocks as fit, whatever the requests need."""
    assert plan(ON_GPU, 1000 * SIZE) == plan(ON_GPU, 1001 * SIZE - 1, wanted_tokens=1) == 1000


def test_the_pool_is_no_larger_than_needed_on_a_cpu():
    """There it shares the memory with everything else: what all sequences need at full length, within the room."""
    assert plan(ON_CPU, 1000 * SIZE, wanted_tokens=3 * 100) == 19  # 300 / 16, rounded up
    assert plan(ON_CPU, 10 * SIZE, wanted_tokens=3 * 100) == 10
    assert plan(ON_CPU, 10 * SIZE, wanted_tokens=1) == 7  # one sequence of max_model_len must fit
    assert plan(ON_CPU, 100 * GB, wanted_tokens=10**9) == 4 * 2**30 // SIZE  # 4 GiB are enough for anybody
    assert plan(replace(ON_CPU, max_model_len=2 * 10**6), 100 * GB, wanted_tokens=10**9) == 125_000  # but for this one


@pytest.mark.parametrize("resolved", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_a_given_number_is_what_is_made(resolved):
    """It overrides all else, also where it is less than one sequence of max_model_len could need."""
    assert [plan(resolved, 50 * SIZE, 999, num_kv_blocks=n) for n in (1, 7, 50)] == [1, 7, 50]


@pytest.mark.parametrize("room", [50 * SIZE, 50 * SIZE + SIZE - 1])
def test_a_given_number_that_does_not_fit(room):
    """Out of memory at start, or worse in the middle of the day: refused, with what is wanted and what there is."""
    with pytest.raises(ValueError, match=r"num_kv_blocks=51 .*0\.00 GiB.* room for 0\.00 GiB, 50 blocks; lower num_kv"):
        plan(ON_GPU, room, num_kv_blocks=51)


@pytest.mark.parametrize(("room", "fits"), [(6 * SIZE, 6), (0, 0), (-2 * GB, 0)])
@pytest.mark.parametrize("resolved", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_too_little_room(room, fits, resolved):
    """A negative number of blocks tripped a bare assert. Both numbers and the way out; 100 tokens need 7 blocks."""
    share = "half of what is free" if resolved is ON_CPU else r"gpu_memory_utilization=0\.05"
    with pytest.raises(
        ValueError, match=rf"room for {fits} KV blocks.*{share}.*max_model_len=100 needs 7; lower max_m"
    ):
        plan(resolved, room, wanted_tokens=1000, gpu_memory_utilization=0.05)
    assert plan(resolved, 7 * SIZE, wanted_tokens=1000) == 7


def plan_host(monkeypatch, available: int, num_blocks: int = 10**9, **options) -> int:
    memory = SimpleNamespace(available=available)
    monkeypatch.setattr(kv_cache.psutil, "virtual_memory", lambda: memory)
    config = EngineConfig("tiny", **{"preemption_mode": "swap"} | options)
    return plan_swap_blocks(config, MODEL, ON_GPU, num_blocks)


def test_blocks_in_host_memory(monkeypatch):
    """4 GiB, but no more than the device has, nor than half of what is free; none where nothing swaps."""
    four = 4 * 2**30 // SIZE
    assert plan_host(monkeypatch, 100 * GB) == four
    assert plan_host(monkeypatch, 100 * GB, num_blocks=33) == 33
    assert plan_host(monkeypatch, 20 * SIZE) == 10
    assert plan_host(monkeypatch, 100 * GB, preemption_mode="recompute") == 0
    assert plan_host(monkeypatch, 100 * GB, preemption_mode="recompute", num_swap_blocks=5) == 0


def test_a_given_number_of_blocks_in_host_memory(monkeypatch):
    """Taken as it is, also 0 and more than the device has; refused where it would not leave half of the memory."""
    assert [plan_host(monkeypatch, 100 * SIZE, 3, num_swap_blocks=n) for n in (0, 1, 50)] == [0, 1, 50]
    with pytest.raises(ValueError, match=r"num_swap_blocks=51 .*half .* holds 50; lower it"):
        plan_host(monkeypatch, 100 * SIZE, num_swap_blocks=51)


def test_a_cpu_engine_takes_half_of_the_free_memory_at_most(monkeypatch):
    """The other half is for weights, activations and everybody else."""
    monkeypatch.setattr(kv_cache.psutil, "virtual_memory", lambda: SimpleNamespace(available=21 * SIZE))
    with new_engine(max_model_len=96, max_num_seqs=32) as llm:
        assert llm.block_manager.num_blocks == 10
        assert len(llm.generate([[1] * 90] * 3, PARAMS, use_tqdm=False)) == 3
    with pytest.raises(ValueError, match=r"room for 10 KV blocks.*max_model_len=161 needs 11"):
        new_engine(max_model_len=161)
    with new_engine(max_model_len=161, num_kv_blocks=8) as llm:
        assert llm.block_manager.num_blocks == 8


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "max_model_len"), [(8, 64, 100), (1, 2048, 100), (7, 30, 100), (4, 4, 20), (3, 99, 33)]
)
def test_the_largest_batch(max_num_seqs, budget, max_model_len):
    """The trial step has all tokens that a step may have, in all sequences that it may have, each of them sampled, one
    at the end of the longest context; anything less and a real step runs out of memory. It runs in a single block."""
    config = SchedulerConfig("mixed", max_num_seqs, budget, max_num_seqs, True, "recompute", 0.01)
    batch = largest_batch(config, max_model_len, block_size=16)
    lens = [item.seq.num_tokens for item in batch.scheduled]
    assert len(lens) == max_num_seqs and max(lens) == max_model_len
    assert sum(item.num_tokens for item in batch.scheduled) >= min(budget, max_num_seqs * max_model_len)
    assert all(item.is_last_chunk for item in batch.scheduled)
    params = batch.scheduled[-1].seq.params
    assert params.temperature > 0 and params.top_k and params.top_p < 1 and params.repetition_penalty != 1
    cache = KVCache(MODEL, 1, 16, CPU)
    cache.data.zero_()  # on a GPU it is fresh memory, and the answer does not matter
    llm = engine()
    result = ModelRunner(llm.model_runner.model, cache, CPU, llm.tokenizer).run(batch)
    assert len(result.token_ids) == max_num_seqs


def test_what_torch_keeps_for_later_is_free_too(monkeypatch):
    """Memory of tensors that are gone stays with torch, and the driver calls it used: the engine after one that was
    dropped found a tenth of the GPU free."""
    kept = [6]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 - sum(kept), 10))
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    assert kv_cache.free_memory(torch.device("cuda")) == 10


@pytest.mark.gpu
def test_gpu_the_engine_after_a_dropped_one_gets_as_much():
    """Without `close`; with weights so large that they would be laid into what the first one has left."""
    counts = []
    for _ in range(2):
        llm = LLM("qwen3-0.6b", device="cuda", load_format="dummy")
        counts.append(llm.block_manager.num_blocks)
        del llm
    assert counts[1] > 0.98 * counts[0]


def test_close_gives_the_pool_back():
    """The largest piece of memory: a reference to it that stays anywhere keeps the next engine from starting."""
    llm = new_engine(preemption_mode="swap", num_swap_blocks=4, num_kv_blocks=8, trace_blocks=True)
    stream = llm.stream([1, 2, 3], SamplingParams(n=2, max_tokens=9))
    next(stream)
    cache = llm.model_runner.kv_cache
    held = [weakref.ref(cache), weakref.ref(cache.data), weakref.ref(cache.host)]
    del cache
    llm.close()
    gc.collect()
    assert [one() for one in held] == [None] * 3
    assert llm.block_manager.num_free_blocks == 8


def test_an_engine_that_nobody_holds_gives_the_pool_back():
    """Without `close`, and at once: what holds itself in a circle stays until Python's collector happens to come by,
    and until then the next engine finds the memory taken."""
    llm = new_engine(preemption_mode="swap", num_swap_blocks=4, num_kv_blocks=8, trace_blocks=True)
    llm.generate([[1, 2, 3]], SamplingParams(n=2, max_tokens=9), use_tqdm=False)
    cache = llm.model_runner.kv_cache
    held = [weakref.ref(cache), weakref.ref(cache.data), weakref.ref(cache.host)]
    gc.disable()
    try:
        del cache, llm
        assert [one() for one in held] == [None] * 3
    finally:
        gc.enable()


NEIGHBOUR = """
import torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
print("ready", flush=True)
input()
"""


@pytest.mark.gpu
def test_a_pool_sized_from_memory_leaves_room_for_the_largest_step():
    """With the defaults, alone and beside a process that holds half of what is free: the pool takes no more than there
    is, and the largest step that the budgets allow still runs."""
    counts = []
    for is_crowded in (False, True):
        neighbour = None
        if is_crowded:
            command = [sys.executable, "-c", NEIGHBOUR]
            neighbour = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert neighbour.stdout.readline() == "ready\n"
        try:
            with LLM("tiny", device="cuda") as llm:
                counts.append(llm.block_manager.num_blocks)
                count, budget = llm.scheduler_config.max_num_seqs, llm.scheduler_config.max_num_batched_tokens
                params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, max_tokens=2)
                outputs = llm.generate([[7] * (budget // count)] * count, params, use_tqdm=False)
                assert max(sum(record.tokens.values()) for record in llm.metrics.trace) == budget
                assert all(output.finished for output in outputs)
                (long,) = llm.generate([[7] * (llm.resolved.max_model_len - 1)], PARAMS, use_tqdm=False)
                assert len(long.outputs[0].token_ids) == 1
        finally:
            if neighbour:
                neighbour.communicate("\n", timeout=60)
    assert counts[1] < 0.7 * counts[0]


@pytest.mark.gpu
def test_the_pool_follows_the_utilization():
    """A third of the share, about a third of the blocks; nothing is left behind by the engine before."""
    counts = []
    for share in (0.3, 0.1, 0.3):
        with LLM("tiny", device="cuda", gpu_memory_utilization=share) as llm:
            counts.append(llm.block_manager.num_blocks)
            size = block_bytes(llm.model_config, llm.resolved.block_size)
            assert counts[-1] * size <= share * torch.cuda.get_device_properties(0).total_memory
    assert counts[1] < 0.4 * counts[0] and abs(counts[2] / counts[0] - 1) < 0.02
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0\.0"):
        LLM("tiny", device="cuda", gpu_memory_utilization=0.0)
