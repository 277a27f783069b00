"""Tensor parallelism: two and four processes say what one says, share its work evenly, and end together.

All of it on the CPU, over gloo, in fp32. The reference is the same engine in one process.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from .. import LLM, SamplingParams, ops, processes, quick_sum
from .. import llm as llm_module
from ..attention import attend_torch
from ..checkpoint import build_model
from ..config import ModelConfig
from ..parallel import CHECK, OneRank, fingerprint, parallel_ops
from ..peer_memory import Runtime
from ..quick_sum import SWITCH, find_obstacle
from ..sharding import Shard, split
from ..step_inputs import StepPlan
from .helpers import engine_logprobs, make_checkpoint
from .saboteur import FaultySetup
from .script import PACKAGE, ROOT

CPU = torch.device("cpu")
FAMILIES = {  # vocabularies and MLPs that no number of ranks divides, biases everywhere, a head of its own or not
    "llama": dict(vocab_size=129, intermediate_size=90, attention_bias=True, mlp_bias=True),
    "qwen2": dict(),
    "qwen3": dict(tie_word_embeddings=True),
}
OPTIONS = dict(device="cpu", dtype="float32", max_model_len=64, block_size=4, num_kv_blocks=16, max_num_seqs=6)
FEATURES = {  # what else is on
    "llama": dict(async_scheduling=True, enforce_eager=False, enable_prefix_caching=True),
    "qwen2": dict(async_scheduling=False, preemption_mode="swap", num_swap_blocks=16),
    "qwen3": dict(async_scheduling=True, enable_prefix_caching=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("parallel")
    return {family: make_checkpoint(folder / family, family, **more) for family, more in FAMILIES.items()}


@pytest.fixture(scope="module")
def engines(folders) -> Iterator[Callable[[str, int], LLM]]:
    """The engine of a family on so many ranks: one of each. Where there are two, they compare their plans."""
    made: dict[tuple[str, int], LLM] = {}

    def get(family: str, size: int) -> LLM:
        if (family, size) not in made:
            options = OPTIONS | FEATURES[family] | dict(tensor_parallel_size=size)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(CHECK, "1" if size == 2 else "0")
                made[family, size] = LLM(str(folders[family]), **options)
        made[family, size].metrics.reset()
        made[family, size].reset_prefix_cache()
        return made[family, size]

    yield get
    for llm in made.values():
        llm.close()
    assert not children()


def children() -> list[psutil.Process]:
    """Processes that ranks run in."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "worker import main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within seconds"
        time.sleep(0.02)


@pytest.fixture
def start(folders, monkeypatch) -> Iterator[Callable[..., LLM]]:
    """Makes an engine on two ranks that may break, perhaps with a fault in the other process."""
    made, before = [], len(children())

    def make(family: str = "qwen2", fault: str | None = None, **options) -> LLM:
        with monkeypatch.context() as patch:
            if fault:
                patch.setattr(llm_module, "Setup", partial(FaultySetup, fault=fault))
            made.append(LLM(str(folders[family]), **OPTIONS | dict(tensor_parallel_size=2) | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
    assert len(children()) == before


# the same answers

COMMON = [5, 6, 7, 8, 9, 10, 11, 12]
GREEDY = dict(temperature=0.0, ignore_eos=True)
REQUESTS = [
    ([*COMMON, 1, 2], dict(GREEDY, max_tokens=6)),
    ([*COMMON, 3], dict(GREEDY, max_tokens=14, logprobs=3)),
    ([*COMMON, 4, 4, 4], dict(temperature=1.0, seed=3, max_tokens=10, n=3)),
    ([70, 71], dict(temperature=0.9, seed=4, top_k=20, top_p=0.9, max_tokens=12)),
    (COMMON, dict(GREEDY, max_tokens=12, repetition_penalty=1.3)),
    ([90] * 21, dict(temperature=1.0, seed=5, min_tokens=4, max_tokens=8, stop_token_ids=tuple(range(64)))),
]


def answers(llm: LLM) -> list[list[list[int]]]:
    """Token ids by request and sample. The first request runs alone, so that others find its prefix."""
    params = [SamplingParams(**more) for _, more in REQUESTS]
    prompts = [prompt for prompt, _ in REQUESTS]
    first = llm.generate(prompts[:1], params[:1], use_tqdm=False)
    outputs = first + llm.generate(prompts[1:], params[1:], use_tqdm=False)
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_say_what_one_process_says(engines, family, size):
    """With forks, preemptions, prefix hits, every way to sample, one step ahead or not, in padded steps or not; and no
    step more or less."""
    one, many = engines(family, 1), engines(family, size)
    assert answers(many) == answers(one)
    counters, wanted = many.metrics.counters(), one.metrics.counters()
    layers = one.model_config.num_hidden_layers
    assert [record.all_reduces for record in many.metrics.trace] == [2 * layers + 1] * many.metrics.steps
    assert counters.pop("all_reduces") == (2 * layers + 1) * many.metrics.steps
    assert wanted.pop("all_reduces") == 0
    assert counters.pop("kv_bytes_per_token") == wanted.pop("kv_bytes_per_token") // 2, "2 KV heads: 1 on each rank"
    assert counters == wanted
    assert counters["preemptions"] and counters["cow_copies"]
    assert bool(counters["prefix_hit_tokens"]) == FEATURES[family].get("enable_prefix_caching", False)
    assert bool(counters["swapped_in_blocks"]) == (FEATURES[family].get("preemption_mode") == "swap")
    assert bool(counters["graph_replays"]) == (FEATURES[family].get("enforce_eager") is False)
    many.block_manager.check_integrity()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_process(engines, family, size):
    """A bias that every rank adds, or a residual, still gives fluent text."""
    tokens, logprobs = engine_logprobs(engines(family, size), COMMON, 6)
    wanted_tokens, wanted = engine_logprobs(engines(family, 1), COMMON, 6)
    assert tokens == wanted_tokens
    assert (logprobs - wanted).abs().max() <= 1e-4
    assert logprobs.shape[1] == engines(family, 1).model_config.vocab_size


def test_what_fills_the_vocabulary_up_is_never_seen(start, engines):
    """129 tokens on two ranks: the 130th has the largest logit by far, and is no token."""
    llm = start("llama", "high_padding")
    ways = dict(temperature=0.0), dict(temperature=1.0, seed=1), dict(temperature=3.0, seed=2, top_k=100)
    params = [SamplingParams(max_tokens=8, logprobs=129, ignore_eos=True, **way) for way in ways]
    outputs = [output.outputs[0] for output in llm.generate([COMMON] * 3, params, use_tqdm=False)]
    assert all(set(row) == set(range(129)) for output in outputs for row in output.logprobs)
    one = [output.outputs[0] for output in engines("llama", 1).generate([COMMON] * 3, params, use_tqdm=False)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in one]


class TwoRanks:
    """Rank 0 of two; the other one has `theirs`."""

    rank, size, vocab_size = 0, 2, 5

    def __init__(self, theirs: torch.Tensor):
        self.theirs = theirs

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, self.theirs]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.theirs


def test_logits_end_with_the_vocabulary():
    """5 tokens on two ranks: 3 and 2, and what fills up the second is cut off, in `out` too."""
    head = torch.nn.Linear(4, 3, bias=False)
    x, theirs = torch.randn(2, 4), torch.tensor([[1.0, 2.0, 1e9]] * 2)
    linear = parallel_ops(ops, TwoRanks(theirs)).linear
    with torch.inference_mode():
        wanted = torch.cat([head(x), theirs[:, :2]], 1)
        out = torch.empty(2, 5)
        assert linear(x, head).equal(wanted) and linear(x, head, out) is out and out.equal(wanted)


# who has what


def shapes(family: str, folders: dict[str, Path]) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folders[family] / "config.json").read_text()))


def part(config: ModelConfig, shard: Shard, weights: Path | None) -> dict[str, torch.Tensor]:
    """The parameters of a rank, as they run."""
    config = replace(config, dtype=torch.float64)
    model = build_model(config, attend_torch, 64, CPU, weights, seed=3, shard=shard)
    return dict(model.named_parameters())


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_make_up_the_whole(folders, family, size, random):
    """Read from a file or drawn at random: every output channel, head and token is on one rank, KV heads on neighbours;
    what is behind the end is zero; a bias of o and down is on rank 0 alone."""
    config, weights = shapes(family, folders), None if random else folders[family]
    whole = part(config, Shard(), weights)
    parts = [part(config, split(size, rank, config, family), weights) for rank in range(size)]
    for name, tensor in whole.items():
        found = [one[name] for one in parts if name in one]
        module = name.split(".")[-2]
        if "norm" in module or (module in ("o_proj", "down_proj") and name.endswith("bias")):
            assert len(found) == (size if "norm" in module else 1)
            assert all(one.equal(tensor) for one in found)
        elif module == "qkv_proj":
            check_heads(config, tensor, found)
        elif module == "gate_up_proj":
            for half, wanted in enumerate(tensor.chunk(2)):
                check_filled(wanted, torch.cat([one.chunk(2)[half] for one in found]), 0)
        else:
            dim = 1 if module in ("o_proj", "down_proj") else 0
            check_filled(tensor, torch.cat(found, dim), dim)


def check_filled(wanted: torch.Tensor, found: torch.Tensor, dim: int) -> None:
    count = wanted.shape[dim]
    assert found.narrow(dim, 0, count).equal(wanted)
    assert not found.narrow(dim, count, found.shape[dim] - count).any()


def check_heads(config: ModelConfig, tensor: torch.Tensor, found: list[torch.Tensor]) -> None:
    """Each rank has whole query heads in their order, and with them the KV heads that they read."""
    d, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    q, k, v = tensor.split([heads * d, kv_heads * d, kv_heads * d])
    count = heads // len(found)
    for rank, one in enumerate(found):
        mine = range(rank * count, (rank + 1) * count)
        kv = sorted({head // (heads // kv_heads) for head in mine})
        wanted = [x[head * d : (head + 1) * d] for x, wanted in ((q, mine), (k, kv), (v, kv)) for head in wanted]
        assert one.equal(torch.cat(wanted))


BASE = ModelConfig(100, 64, 96, 2, 12, 4, 16, 64)


@pytest.mark.parametrize("heads", range(1, 17))
def test_every_even_split_is_possible_and_no_other(heads):
    for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
        config = replace(BASE, num_attention_heads=heads, num_key_value_heads=kv_heads)
        for size in range(1, heads + 2):
            even = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
            if not even:
                with pytest.raises(ValueError, match=rf"tensor_parallel_size={size}: the {heads} attention heads and "):
                    split(size, 0, config, "m")
                continue
            mine = split(size, size - 1, config, "m").config(config)
            assert mine.num_attention_heads * size == heads
            assert mine.num_key_value_heads == max(1, kv_heads // size)


def test_impossible_splits_are_refused_with_the_numbers(tmp_path):
    """Before anything is started: SmolLM2's 9 heads on two ranks, 3 heads on two, and what is no number of ranks."""
    smollm2 = replace(BASE, num_attention_heads=9, num_key_value_heads=3)
    message = "tensor_parallel_size=2: the 9 attention heads and 3 KV heads of 'smollm2-135m' .* take one of 1, 3, 9$"
    with pytest.raises(ValueError, match=message):
        split(2, 0, smollm2, "smollm2-135m")
    folder = make_checkpoint(tmp_path / "three", "llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: the 3 attention heads .* take one of 1, 3$"):
        LLM(str(folder), device="cpu", tensor_parallel_size=2)
    for size in (0, -1, 1.0, True, None, "2"):
        with pytest.raises(ValueError, match="tensor_parallel_size="):
            LLM("tiny", device="cpu", tensor_parallel_size=size)


def test_what_rank_0_refuses_ends_the_others(folders):
    """Its own error, not that of a rank which is missed."""
    before = len(children())
    with pytest.raises(ValueError, match=r"num_kv_blocks=1000000000 blocks of .* lower num_kv_blocks or block_size"):
        LLM(str(folders["qwen2"]), **OPTIONS | dict(tensor_parallel_size=2, num_kv_blocks=10**9))
    assert len(children()) == before


@pytest.mark.weights
def test_smollm2_on_two_ranks_is_refused_by_name():
    with pytest.raises(ValueError, match=r"9 attention heads and 3 KV heads of 'smollm2-135m'"):
        LLM("smollm2-135m", device="cpu", tensor_parallel_size=2)


def test_one_rank_needs_no_port(monkeypatch):
    monkeypatch.setattr(processes.dist, "TCPStore", None)
    with LLM("tiny", device="cpu", max_model_len=64, tensor_parallel_size=1) as llm:
        assert llm.generate("a", use_tqdm=False)[0].finished and llm.metrics.all_reduces == 0


# they see the same, and end together


def test_a_plan_that_differs_anywhere_is_seen():
    arrays = {"input_ids": np.arange(4), "seq_lens": np.array([2, 2], dtype=np.int32)}
    plans = [StepPlan(arrays, [2, 2]), StepPlan(arrays, [1, 3]), StepPlan(arrays, [2, 2], size=4)]
    plans += [StepPlan(arrays | {"input_ids": np.array([0, 1, 3, 2])}, [2, 2])]
    numbers = [fingerprint(plan, step) for plan in plans for step in (1, 2)]
    assert len(set(numbers)) == 8 and all(0 <= number < 2**62 for number in numbers)
    assert fingerprint(StepPlan(dict(arrays), [2, 2]), 1) == numbers[0]


def assert_ended(llm: LLM, before: int) -> None:
    wait_until(lambda: len(children()) == before)
    assert not llm.has_unfinished_requests()
    llm.block_manager.check_integrity()
    with pytest.raises(ValueError, match="this engine is closed; make a new LLM"):
        llm.generate("a", use_tqdm=False)
    llm.close()


def run(llm: LLM) -> list[int]:
    return llm.generate([COMMON], SamplingParams(**GREEDY, max_tokens=12), use_tqdm=False)[0].outputs[0].token_ids


def test_ranks_that_see_another_step_say_so(start, monkeypatch):
    """In the debug mode: another order of the tokens would give other text and nothing else."""
    before = len(children())
    monkeypatch.setenv(CHECK, "1")
    llm = start()
    ranks = llm.model_runner.ranks
    check = ranks._check_equal
    monkeypatch.setattr(ranks, "_check_equal", lambda plan: check(replace(plan, query_lens=[*plan.query_lens, 0])))
    with pytest.raises(RuntimeError, match=r"rank [01]: its step 1 is not the one of the other ranks"):
        run(llm)
    assert_ended(llm, before)


def test_a_rank_that_fails_ends_all_with_its_error(start):
    before = len(children())
    llm = start(fault="in_third_step", async_scheduling=True)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*ValueError: planted in the third step"):
        run(llm)
    assert time.monotonic() - begin < 5
    assert_ended(llm, before)


def test_a_rank_that_cannot_begin_ends_all_with_its_error(start):
    before = len(children())
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*planted at the start"):
        start(fault="at_once")
    wait_until(lambda: len(children()) == before)


def test_a_rank_that_exits_is_missed(start):
    before = len(children())
    llm = start(fault="exits_in_third_step")
    with pytest.raises(RuntimeError, match=r"rank 1 failed.* exit code 7"):
        run(llm)
    assert_ended(llm, before)


def test_an_error_of_rank_0_ends_the_others(start, monkeypatch):
    """They wait for a sum that never comes."""
    before = len(children())
    llm = start()
    expected = run(llm)
    monkeypatch.setattr(llm.model_runner, "sample", None)  # after all sums: nobody is lost
    with pytest.raises(TypeError):
        run(llm)
    monkeypatch.undo()
    assert run(llm) == expected
    monkeypatch.setattr(llm.model_runner, "compute", None)  # in front of them
    with pytest.raises(TypeError):
        run(llm)
    assert_ended(llm, before)


@pytest.mark.parametrize("when", ["between steps", "idle"])
def test_a_rank_that_is_killed_ends_all(start, when):
    """By the system, for want of memory; also while nobody asks for anything."""
    old = children()
    size = 4 if when == "between steps" else 2
    llm = start(tensor_parallel_size=size)
    mine = [child for child in children() if child not in old]
    assert len(mine) == size - 1
    if when == "idle":
        run(llm)
        mine[0].kill()
        wait_until(lambda: not any(psutil.pid_exists(child.pid) for child in mine))  # and no zombie
    llm.add_request(COMMON, SamplingParams(**GREEDY, max_tokens=12))
    if when == "between steps":
        llm.step()
        mine[1].kill()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank [123] failed.*SIGKILL"):
        while llm.has_unfinished_requests():
            llm.step()
    assert time.monotonic() - begin < 5
    assert_ended(llm, len(old))


def test_ctrl_c_waits_for_the_end_of_the_sums(engines, monkeypatch):
    """In the middle of a step it would leave the others alone. After it, the engine is as good as before."""
    llm = engines("qwen2", 2)
    expected, compute = run(llm), llm.model_runner.compute
    done = []

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        done.append(compute(*arguments))
        return done[-1]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner, "compute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(llm)
        assert len(done) == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert run(llm) == expected


# several engines, one after the other and at the same time


def test_engines_again_and_side_by_side(start, folders):
    """A notebook cell run again: closed, not closed, after an error. Torch is left as it was."""
    before = len(children())
    torch.manual_seed(5)
    state = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    expected, process, threads = None, psutil.Process(), 0
    for ending in ("close", "nothing"):
        llm = LLM(str(folders["qwen3"]), **OPTIONS, tensor_parallel_size=2)
        tokens = run(llm)
        expected = expected or tokens
        assert tokens == expected
        if ending == "close":
            llm.close()
            llm.close()
            assert len(children()) == before
            threads = process.num_threads()
    other = start("qwen3")  # beside it
    assert run(other) == expected == run(llm)
    after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    assert after[0].equal(state[0]) and after[1:] == state[1:]
    assert not torch.distributed.is_initialized()
    del llm
    gc.collect()
    wait_until(lambda: len(children()) == before + 1)
    assert run(other) == expected
    other.close()
    wait_until(lambda: process.num_threads() <= threads)


SCRIPT = """
import os, signal, sys
import psutil
from {package} import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=64, tensor_parallel_size=2)
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
tokens = llm.generate([{prompt}], params, use_tqdm=False)[0].outputs[0].token_ids
print(*tokens, *[child.pid for child in psutil.Process().children()], flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def in_shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_two_programs_at_once_and_one_that_is_killed(folders, engines):
    """Nothing is named or numbered by us, so nothing is taken; who is killed leaves no process and no memory behind."""
    before = in_shared_memory()
    script = SCRIPT.format(package=PACKAGE, prompt=COMMON)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    both = {
        end: subprocess.Popen([sys.executable, "-c", script, str(folders["qwen2"]), end], **pipes)
        for end in ("exit", "kill")
    }
    expected = run(engines("qwen2", 1))
    for end, process in both.items():
        out, error = process.communicate(timeout=60)
        assert process.returncode == (0 if end == "exit" else -signal.SIGKILL), error
        *tokens, worker = map(int, out.split())
        assert tokens == expected, error
        wait_until(lambda worker=worker: not psutil.pid_exists(worker))
    assert in_shared_memory() <= before


TORCHRUN = """
import sys
from {package} import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=64, tensor_parallel_size=2)
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
print(*llm.generate([{prompt}], params, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
llm.close()
"""


def test_torchrun(folders, engines, tmp_path):
    """Both processes run the script, the second one never comes out of `LLM(...)`."""
    (tmp_path / "script.py").write_text(TORCHRUN.format(package=PACKAGE, prompt=COMMON))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*launcher, str(tmp_path / "script.py"), str(folders["qwen2"])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == run(engines("qwen2", 1)), done.stderr


def run_sums(device: str, **env: str) -> list[str]:
    command = [sys.executable, "-m", f"{PACKAGE}.tests.interpreted_sum", device]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_kernel_of_quick_sums():
    """In Triton's interpreter: sizes around a program's, one sum after the other, every rank of two and of four."""
    pytest.importorskip("triton")
    assert len(run_sums("cpu", TRITON_INTERPRET="1")) == 8


@pytest.mark.parametrize(
    ("env", "dtype", "reason"),
    [
        ({SWITCH: "0"}, torch.float32, f"{SWITCH}=0"),
        ({}, torch.float64, "no quick kernel for torch.float64"),
        ({"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "1"}, torch.float32, "ranks are on several machines"),
    ],
)
def test_why_there_are_no_quick_sums(monkeypatch, env, dtype, reason):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert find_obstacle(2, dtype) == reason


def test_without_shared_memory_nccl_sums(monkeypatch):
    """A handle that cannot be opened, here or on another rank: nobody has quick sums, and the log says why."""

    def fails(*arguments: object) -> None:
        raise RuntimeError("cudaIpcOpenMemHandle: CUDA error 201")

    class Others(OneRank):
        """Other ranks, one of which has failed at the second question."""

        answers = (1, 0)

        def minimum(self, value: int) -> int:
            found, *self.answers = self.answers
            return min(value, found)

    monkeypatch.setattr(quick_sum, "find_obstacle", lambda *arguments: None)
    monkeypatch.setattr(quick_sum, "QuickSum", fails)
    cuda = torch.device("cuda")
    found = quick_sum.make_quick_sum(OneRank(), None, torch.float32, cuda)
    assert found == (None, "cudaIpcOpenMemHandle: CUDA error 201")
    monkeypatch.setattr(quick_sum, "QuickSum", lambda *arguments: "a sum")
    assert quick_sum.make_quick_sum(Others(), None, torch.float32, cuda)[0] is None
    assert quick_sum.make_quick_sum(OneRank(), None, torch.float32, cuda)[0] == "a sum"


def test_the_log_says_who_sums(engines):
    assert engines("qwen2", 2).model_runner.ranks.notes == ", 2 ranks that sum by gloo (no GPUs)"
    assert engines("qwen2", 1).model_runner.ranks.notes == ""


def test_an_error_of_the_cuda_runtime_is_named(monkeypatch):
    class Library:
        """Out of memory, always."""

        def __getattr__(self, name: str) -> Callable:
            def call(*arguments: object) -> int:
                return 2

            return call

    with pytest.raises(RuntimeError, match="cudaMalloc: CUDA error 2"):
        Runtime(Library()).allocate(16)


# two GPUs

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


GPU_OPTIONS = dict(device="cuda", dtype="float32", max_model_len=64, num_kv_blocks=40, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def alone() -> list:
    with LLM("tiny", **GPU_OPTIONS) as llm:
        return answers(llm)


@pytest.mark.gpu
def test_the_kernel_of_quick_sums_compiled():
    assert len(run_sums("cuda")) == 8


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize(("quick", "more"), [("1", {}), ("0", {}), ("1", dict(enforce_eager=True))])
def test_two_gpus_say_what_one_says(alone, monkeypatch, quick, more):
    """With NCCL's sums and with quick ones, in graphs and without."""
    monkeypatch.setenv(SWITCH, quick)
    with LLM("tiny", tensor_parallel_size=2, **GPU_OPTIONS | more) as llm:
        assert ("quick kernel" in llm.model_runner.ranks.notes) == (quick == "1")
        assert answers(llm) == alone
        layers = llm.model_config.num_hidden_layers
        assert llm.metrics.all_reduces == llm.metrics.steps * (2 * layers + 1)
        assert bool(llm.metrics.graph_replays) == (not more.get("enforce_eager"))
    assert not children()


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("quick", ["1", "0"])
def test_a_killed_rank_on_a_gpu_ends_all(monkeypatch, quick):
    """Rank 0 waits for a sum on its GPU that never comes."""
    monkeypatch.setenv(SWITCH, quick)
    llm = LLM("tiny", tensor_parallel_size=2, **GPU_OPTIONS)
    llm.add_request(COMMON, SamplingParams(**GREEDY, max_tokens=50))
    llm.step()
    children()[0].kill()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        while llm.has_unfinished_requests():
            llm.step()
    assert time.monotonic() - begin < 10
    llm.close()
    assert not children()


@pytest.mark.gpu
@needs_two_gpus
def test_large_sums_go_to_nccl():
    """Prompts of so many tokens: the same logprobs as one GPU's."""
    options = dict(device="cuda", dtype="float32", max_model_len=2048, num_kv_blocks=128, max_num_seqs=4)
    prompts = [[3 + i % 97 for i in range(rows)] for rows in (1, 3, 64, 2000)]
    with LLM("tiny", **options) as one, LLM("tiny", tensor_parallel_size=2, **options) as two:
        for prompt in prompts:
            wanted, found = engine_logprobs(one, prompt, 3), engine_logprobs(two, prompt, 3)
            assert wanted[0] == found[0] and (wanted[1] - found[1]).abs().max() < 1e-3


FORKS = """
import os, sys
from {package} import LLM, SamplingParams
llm = LLM("tiny", device="cpu", tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
for leave in (lambda: sys.exit(0), lambda: llm.close(), lambda: llm.generate([[65]], params)):
    child = os.fork()
    if child == 0:
        try:
            leave()
        except ValueError as error:
            os._exit(7 if "closed" in str(error) else 8)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(len(llm.generate([[65, 66]], params, use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_ends_and_leaves_the_engine_to_its_parent(tmp_path):
    """A child has none of gloo's threads, and waited at its exit for them to end. `tmp_path`: an import that was found
    by way of the current folder must be found in the other ranks, too."""
    script = f"import sys, os; sys.path.insert(0, ''); import {PACKAGE}; os.chdir({str(tmp_path)!r})"
    env = os.environ | {"PYTHONPATH": ""}
    command = [sys.executable, "-c", script + FORKS.format(package=PACKAGE)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "0", "7", "3"], done.stderr
