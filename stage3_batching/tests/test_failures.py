"""Errors and Ctrl-C anywhere in a step: whoever the step held is ended, every slot is free again or owned by those who
go on, and these get the right tokens."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from .. import LLM, SamplingParams, model_runner
from .. import llm as llm_module
from ..config import POLICIES
from ..kv_cache import SlotAllocator
from ..model import CausalLM
from ..model_runner import ModelRunner
from ..scheduler import Scheduler
from ..sequence import Sequence
from .script import new_engine

REQUESTS = {  # for two slots, in steps of at most six tokens: c waits, mixed cuts prompts in pieces, b leaves before a
    "a": ([1, 2, 3, 4, 5, 6], SamplingParams(seed=1, max_tokens=7, ignore_eos=True)),
    "b": ([9, 9, 9], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)),
    "c": ([7, 8], SamplingParams(seed=2, max_tokens=4, ignore_eos=True)),
}


@pytest.fixture(params=POLICIES)
def llm(request):
    options = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=6)
    with new_engine(**options, policy=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected():
    with new_engine(max_model_len=64) as llm:
        outputs = {name: llm.generate([prompt], one, use_tqdm=False) for name, (prompt, one) in REQUESTS.items()}
    return {name: output.outputs[0].token_ids for name, (output,) in outputs.items()}


def serve(
    llm: LLM, expected: dict, error: type[BaseException] | tuple = (), step: Callable[[LLM], list] = LLM.step
) -> tuple[set[str], list[str]]:
    """Add the requests and step until nothing is left. Returns who was served, and who was lost to the error."""
    for name, (prompt, one) in REQUESTS.items():
        llm.add_request(prompt, one, request_id=name)
    got, lost, steps = {}, [], 0
    while llm.has_unfinished_requests():
        before = set(llm._requests)
        try:
            got |= {output.request_id: output.outputs[0].token_ids for output in step(llm)}
        except error:
            lost += sorted(before - set(llm._requests))
        check_slots(llm.scheduler)
        steps += 1
        assert steps < 100, "work is left: somebody waits for ever"
    assert llm.scheduler.slots.num_taken == 0 and not llm.scheduler.has_unfinished
    assert got == {name: expected[name] for name in got}
    return set(got), lost


def check_slots(scheduler: Scheduler) -> None:
    """Who runs has a slot of its own, all others are free, and nobody both runs and waits."""
    taken = [seq.slot for seq in scheduler.running.values()]
    assert sorted(taken) == sorted(scheduler.slots._taken) and len(set(taken)) == len(taken)
    assert sorted([*taken, *scheduler.slots._free]) == list(range(scheduler.slots.num_slots))
    assert not {seq.request_id for seq in scheduler.waiting} & set(scheduler.running)


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
    "schedule: take": (SlotAllocator, "take"),
    "schedule: start": (Sequence, "start"),
    "schedule: all of it": (Scheduler, "schedule"),
    "run: prepare": (ModelRunner, "prepare"),
    "run: forward": (CausalLM, "forward"),
    "run: sample": (model_runner, "sample"),
    "postprocess: append": (Sequence, "append_token"),
    "postprocess: record": (llm_module, "step_record"),
    "retire: give back": (SlotAllocator, "give_back"),
    "retire: all of it": (Scheduler, "retire"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_anywhere_in_a_step(place, llm, expected, monkeypatch):
    """Every call of the place fails once, in a run of its own. A slot that was taken and had no owner was lost for
    ever, and with the last one lost nobody was served any more."""
    places = 0
    for at in range(1, 1000):
        error, after = (KeyboardInterrupt, RuntimeError)[at % 2], bool(at // 2 % 2)
        with failing(monkeypatch, *PLACES[place], error, at, after) as calls:
            served, lost = serve(llm, expected, error)
        if len(calls) < at:
            break
        places += 1
        assert not served & set(lost) and len(served) + len(lost) == 3
    assert places and serve(llm, expected)[0] == set(REQUESTS)


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
    """Ctrl-C comes at any time, also between taking a slot and noting whose it is. Every 13th line of the whole
    workload is tried; another stride tries others."""
    stride, at, served = 13, 1, set()
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
    stride, at = 23, 1
    while at:
        streams = [llm.stream([9, 8], SamplingParams(max_tokens=9, ignore_eos=True))]
        next(streams[0])
        step, where = interrupt_at_line(at, streams.clear)  # the last reference: the generator is closed there
        try:
            assert serve(llm, expected, step=step)[0] == set(REQUESTS)
        except Exception as error:
            raise AssertionError(f"closed before {where}, and then {error!r}") from error
        at = at + stride if where else 0
