"""Errors and Ctrl-C anywhere in a step, while blocks are copied, swapped and shared: whoever the step held is ended,
every block is free again or owned by exactly those who go on, and these get the right tokens."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from .. import LLM, SamplingParams, model_runner
from .. import llm as llm_module
from ..block_manager import BlockManager
from ..config import PREEMPTION_MODES
from ..kv_cache import KVCache
from ..model import CausalLM
from ..model_runner import ModelRunner
from ..scheduler import Scheduler
from ..sequence import Sequence
from .script import new_engine

REQUESTS = {  # in a pool of 11 blocks of 4: both pairs of samples fork and copy, b and c are preempted and come back
    "a": ([1, 2, 3, 4, 5, 6], SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True)),
    "b": ([9, 9, 9, 9, 9], SamplingParams(n=2, seed=2, max_tokens=8, ignore_eos=True)),
    "c": ([7, 8, 9], SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)),
}


@pytest.fixture(params=PREEMPTION_MODES)
def llm(request):
    options = dict(max_model_len=64, block_size=4, num_kv_blocks=11, num_swap_blocks=16, watermark=0.0, max_num_seqs=6)
    with new_engine(**options, preemption_mode=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected():
    with new_engine(max_model_len=64) as llm:
        outputs = {name: llm.generate([prompt], one, use_tqdm=False) for name, (prompt, one) in REQUESTS.items()}
    return {name: [one.token_ids for one in output.outputs] for name, (output,) in outputs.items()}


def serve(
    llm: LLM, expected: dict, error: type[BaseException] | tuple = (), step: Callable[[LLM], list] = LLM.step
) -> tuple[set[str], list[str]]:
    """Add the requests and step until nothing is left. Returns who was served, and who was lost to the error. Who had
    ended is served."""
    for name, (prompt, one) in REQUESTS.items():
        llm.add_request(prompt, one, request_id=name)
    got, lost, steps = {}, [], 0
    while llm.has_unfinished_requests():
        before = set(llm._requests)
        try:
            got |= {output.request_id: [one.token_ids for one in output.outputs] for output in step(llm)}
        except error:
            lost += sorted(before - set(llm._requests) - {output.request_id for output in llm._undelivered})
        llm.block_manager.check_integrity()
        steps += 1
        assert steps < 100, "work is left: somebody waits for ever"
    manager = llm.block_manager
    assert (manager.num_free_blocks, manager.num_free_swap_blocks) == (manager.num_blocks, manager.num_swap_blocks)
    assert not llm.scheduler.has_unfinished
    assert got == {name: expected[name] for name in got}
    return set(got), lost


@contextmanager
def failing(monkeypatch, owner: object, name: str, error: type[BaseException], at: int, after: bool) -> Iterator[list]:
    """The at-th call of owner.name raises, before it has done anything or after all of it. Yields the calls so far."""
    original, calls = getattr(owner, name), []

    def fails(*args, **options):
        calls.append(name)
        if len(calls) == at and not after:
            raise error("planted")
        result = original(*args, **options)
        if len(calls) == at:
            raise error("planted")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        yield calls


PLACES = {
    "schedule: grow": (BlockManager, "grow"),
    "schedule: allocate": (BlockManager, "allocate"),
    "schedule: swap_out": (BlockManager, "swap_out"),
    "schedule: swap_in": (BlockManager, "swap_in"),
    "schedule: start": (Sequence, "start"),
    "schedule: all of it": (Scheduler, "schedule"),
    "run: move": (KVCache, "move"),
    "run: prepare": (ModelRunner, "prepare"),
    "run: forward": (CausalLM, "forward"),
    "run: sample": (model_runner, "sample"),
    "postprocess: fork": (BlockManager, "fork"),
    "postprocess: append": (Sequence, "append_token"),
    "postprocess: record": (llm_module, "step_record"),
    "retire: free": (BlockManager, "free"),
    "retire: all of it": (Scheduler, "retire"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_anywhere_in_a_step(place, llm, expected, monkeypatch):
    """Every call of the place fails once, in a run of its own. A plan that was made and not carried out, or half of
    each, left blocks that nobody had, tokens that were never copied, and requests that nobody ran again."""
    places = 0
    for at in range(1, 1000):
        error, after = (KeyboardInterrupt, RuntimeError)[at % 2], bool(at // 2 % 2)
        with failing(monkeypatch, *PLACES[place], error, at, after) as calls:
            served, lost = serve(llm, expected, error)
        if len(calls) < at:
            break
        places += 1
        assert lost or served == set(REQUESTS)  # nothing was planned yet, or all that the step held had ended
        assert not served & set(lost) and len(served) + len(lost) == 3
    assert serve(llm, expected)[0] == set(REQUESTS)
    assert places or ("swap" in place and llm.config.preemption_mode == "recompute"), "nothing was tested"


def test_the_step_has_all_that_can_go_wrong(llm, expected):
    """The workload above: blocks go out, come in and are copied; with recompute, tokens are computed twice."""
    serve(llm, expected)
    m, swaps = llm.metrics, llm.config.preemption_mode == "swap"
    assert m.preemptions >= 2 and m.cow_copies >= 2
    assert (m.swapped_out_blocks > 0, m.recomputed_tokens > 0) == (swaps, not swaps)


def test_an_error_in_the_model_spares_those_who_wait(llm, expected, monkeypatch):
    """Only what the step held is ended; who waits, or lies swapped in host memory, goes on and is right."""
    for name, (prompt, one) in REQUESTS.items():
        llm.add_request(prompt, one, request_id=name)
    llm.step()
    while not llm.metrics.preemptions:
        llm.step()
    spared = llm.metrics.trace[-1].waiting + llm.metrics.trace[-1].swapped
    with failing(monkeypatch, CausalLM, "forward", RuntimeError, at=1, after=False), pytest.raises(RuntimeError):
        llm.step()
    assert sorted(llm._requests) == sorted(spared)
    got = {}
    while llm.has_unfinished_requests():
        got |= {output.request_id: [one.token_ids for one in output.outputs] for output in llm.step()}
    assert got == {name: expected[name] for name in spared}


@pytest.mark.parametrize("after", [False, True])
def test_an_error_when_a_static_batch_returns(after, monkeypatch):
    """Its short member ended steps ago and was not in the last one, yet it is not left behind."""
    with new_engine(max_model_len=64, policy="static", max_num_seqs=2) as llm:
        for length in (1, 4):
            llm.add_request([7], SamplingParams(max_tokens=length, ignore_eos=True))
        for _ in range(3):
            llm.step()
        with failing(monkeypatch, Scheduler, "retire", RuntimeError, 1, after), pytest.raises(RuntimeError):
            llm.step()
        assert not llm.scheduler.has_unfinished
        assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
        assert [len(output.outputs[0].token_ids) for output in llm.step()] == [1, 4], "they had ended, and are owed"
        assert not llm.has_unfinished_requests()


PACKAGE = Path(__file__).parents[1]


def ctrl_c() -> None:
    raise KeyboardInterrupt


def interrupt_at_line(number: int, interrupt: Callable = ctrl_c) -> tuple[Callable[[LLM], list], list[str]]:
    """`step`, but before the number-th line that it runs inside of the engine, over all calls, it is interrupted."""
    left, where = [number], []

    def on_line(frame: FrameType, event: str, _: object) -> Callable:
        left[0] -= event == "line"
        if left[0] == 0 and not where:
            where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            interrupt()
        return on_line

    def on_call(frame: FrameType, event: str, _: object) -> Callable | None:
        return None if where or Path(frame.f_code.co_filename).parent != PACKAGE else on_line

    def step(llm: LLM) -> list:
        before = sys.gettrace()
        sys.settrace(on_call)
        try:
            return llm.step()
        finally:
            sys.settrace(before)

    return step, where


def test_ctrl_c_between_any_two_lines(llm, expected):
    """Ctrl-C comes at any time, also between taking a block off the free list and noting whose it is. Every 401st line
    of the whole workload is tried; another stride tries others."""
    stride, at, served = 401, 1, set()
    while at:
        step, where = interrupt_at_line(at)
        try:
            served |= serve(llm, expected, KeyboardInterrupt, step)[0]
        except Exception as error:
            raise AssertionError(f"Ctrl-C before {where[0]}, and then {error!r}") from error
        at = at + stride if where else 0
    assert served == set(REQUESTS)


def test_a_stream_that_dies_in_the_middle_of_a_step(llm, expected):
    """The garbage collector closes a stream whenever it likes, also while a step is made. Its request was taken out
    there and then, from under those who counted on it."""
    stride, at = 97, 1
    while at:
        streams = [llm.stream([9, 8], SamplingParams(max_tokens=9, ignore_eos=True))]
        next(streams[0])
        step, where = interrupt_at_line(at, streams.clear)  # the last reference: the generator is closed there
        try:
            assert serve(llm, expected, step=step)[0] == set(REQUESTS)
        except Exception as error:
            raise AssertionError(f"closed before {where}, and then {error!r}") from error
        at = at + stride if where else 0
