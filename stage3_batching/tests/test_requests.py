"""Requests that come and go: ids, aborts, errors in a step, several streams, outputs that belong to somebody else."""

import sys
import threading

import pytest
import torch

from .. import LLM, SamplingParams
from ..config import POLICIES
from ..sequence import Sequence
from .script import new_engine


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", dtype="float64", device="cpu", max_model_len=64, max_num_seqs=3) as llm:
        yield llm


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


def finish(llm: LLM) -> dict[str, list[int]]:
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    return done


def is_clean(llm: LLM) -> bool:
    return not llm.has_unfinished_requests() and llm.scheduler.slots.num_free == llm.scheduler_config.max_num_seqs


def next_id(llm: LLM) -> int:
    """The number that the engine gives to its next request."""
    request_id = llm.add_request([1], greedy(1))
    llm.abort_request(request_id)
    return int(request_id) + 1


def test_an_abort_after_the_end_brings_no_output(llm):
    """Somebody else drove the engine until the request had ended: its output waits for `step`, and must not come once
    the request is aborted."""
    request_id = llm.add_request([1, 2], greedy(2))
    llm.generate([[3, 4]], greedy(6), use_tqdm=False)
    assert llm.has_unfinished_requests()  # an output to return
    llm.abort_request(request_id)
    assert is_clean(llm) and llm.step() == []


def test_an_id_in_use_is_refused_and_the_first_is_untouched(llm):
    """A second request under the same id used to overwrite the first: one caller waits for ever."""
    llm.add_request([1, 2, 3], greedy(10), request_id="x")
    with pytest.raises(ValueError, match="'x' is in use"):
        llm.add_request([4, 5], greedy(5), request_id="x")
    llm.step()
    llm.abort_request("unknown")
    assert len(finish(llm)["x"]) == 10
    assert llm.add_request([4, 5], greedy(5), request_id="x") == "x"
    assert len(finish(llm)["x"]) == 5
    assert is_clean(llm)


def test_own_ids_do_not_collide_with_given_ones(llm):
    """The engine counts; a user who counts too must not be overwritten."""
    taken = str(next_id(llm))
    llm.add_request([1], greedy(2), request_id=taken)
    assert llm.add_request([2], greedy(2)) != taken
    assert len(finish(llm)) == 2


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_frees_everything_at_once(llm, steps):
    """Waiting or running: the slot is free before the next step, and no output comes."""
    for name in "abcd":
        llm.add_request([1, 2, 3], greedy(8), request_id=name)
    for _ in range(steps):
        llm.step()
    for name in "abcd":
        llm.abort_request(name)
        llm.abort_request(name)
    assert is_clean(llm)
    assert llm.step() == []


def test_a_refused_request_leaves_nothing(llm):
    """Bad input is an error of its own request; the queue holds the others only."""
    llm.add_request([1, 2], greedy(3), request_id="good")
    for prompt in ([], "", [999], list(range(64)), [-1], None):
        with pytest.raises(ValueError):
            llm.add_request(prompt, greedy(3))
    assert [seq.request_id for seq in llm.scheduler.waiting] == ["good"]
    assert list(finish(llm)) == ["good"]


def test_generate_does_not_lose_the_outputs_of_others(llm):
    """A request that finishes while generate drives the engine is returned by the next step."""
    llm.add_request([1, 2, 3], greedy(2), request_id="other")
    (output,) = llm.generate([[4, 5, 6]], greedy(9), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 9
    assert llm.has_unfinished_requests()
    assert [o.request_id for o in llm.step()] == ["other"]
    assert is_clean(llm)


def test_several_streams_at_once(llm):
    """Pieces come as (index, piece); joined they are what generate returns; each stream drives all."""
    prompts = ["one", "another one", "z"]
    texts = [output.outputs[0].text for output in llm.generate(prompts, greedy(12), use_tqdm=False)]
    joined = ["", "", ""]
    for index, piece in llm.stream(prompts, greedy(12)):
        joined[index] += piece
    assert joined == texts
    streams = [llm.stream(prompt, greedy(12)) for prompt in prompts]
    assert ["".join(stream) for stream in reversed(streams)] == texts[::-1]
    assert is_clean(llm)


def test_streams_advance_together(llm):
    """Asking one stream moves all: the steps are shared, so three streams cost hardly more steps than one."""
    llm.metrics.reset()
    streams = [llm.stream([i + 1, 2], greedy(12)) for i in range(3)]
    for stream in streams:
        "".join(stream)
    assert llm.metrics.steps == 12


def test_a_stream_that_another_one_cut_short_says_so(monkeypatch):
    """Its text ended as if it were whole, when the step of somebody else had failed."""
    llm = new_engine(max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    first, second = llm.stream([9, 8], params), llm.stream([7, 7], params)
    next(first)

    def fails(hidden):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner.model, "compute_logits", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(second)
    with pytest.raises(RuntimeError, match="shared with others failed: RuntimeError: out of memory"):
        list(first)
    assert llm.generate([[9, 8]], params, use_tqdm=False)[0].finished


def test_a_long_queue_is_not_looked_through_in_every_step(monkeypatch):
    """Whoever waits cannot have ended: with 20,000 prompts looking at all of them took longer than the step."""
    llm, asked = new_engine(max_num_seqs=2), []
    serves = llm._serves
    monkeypatch.setattr(llm, "_serves", lambda request: asked.append(request) or serves(request))
    outputs = llm.generate([[i] for i in range(60)], SamplingParams(max_tokens=2), use_tqdm=False)
    assert all(output.finished for output in outputs)
    assert len(asked) <= 2 * llm.metrics.steps + 2 * len(outputs)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_in_a_step_frees_what_it_held(policy, error, monkeypatch):
    """After an exception or Ctrl-C in the middle of a step the same engine serves the next request, and right."""
    with LLM("tiny", dtype="float64", device="cpu", max_model_len=64, max_num_seqs=2, policy=policy) as llm:
        expected = llm.generate([[1, 2, 3]], greedy(6), use_tqdm=False)[0].outputs[0].token_ids
        original, calls = llm.model_runner.model.compute_logits, []

        def fails_in_the_third_step(hidden):
            calls.append(1)
            if len(calls) == 3:
                raise error("planted")
            return original(hidden)

        monkeypatch.setattr(llm.model_runner.model, "compute_logits", fails_in_the_third_step)
        with pytest.raises(error):
            llm.generate([[1, 2, 3], [4, 5], [6]], greedy(6), use_tqdm=False)
        assert is_clean(llm)
        assert llm.generate([[1, 2, 3]], greedy(6), use_tqdm=False)[0].outputs[0].token_ids == expected


def test_an_error_in_a_step_spares_those_who_wait(llm, monkeypatch):
    """Only what the step held is aborted; the queue goes on."""
    for name in "abcd":
        llm.add_request([1, 2, 3], greedy(4), request_id=name)
    monkeypatch.setattr(llm.model_runner.model, "compute_logits", lambda hidden: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.step()
    monkeypatch.undo()
    assert list(finish(llm)) == ["d"]
    assert is_clean(llm)


def test_prompt_longer_than_a_step_without_chunks_is_refused():
    """It would wait for ever, silently, and everybody behind it."""
    options = dict(device="cpu", max_model_len=64, max_num_batched_tokens=32, max_num_seqs=4)
    with LLM("tiny", enable_chunked_prefill=False, **options) as llm:
        for length in (33, 40):
            with pytest.raises(ValueError, match=rf"{length} tokens.*max_num_batched_tokens=32"):
                llm.add_request([1] * length, greedy(2))
        assert [len(o.outputs[0].token_ids) for o in llm.generate([[1] * 8, [1] * 32], greedy(2))] == [2, 2]
        whole = llm.generate([[3] * 32], greedy(5))[0].outputs[0].token_ids
    with LLM("tiny", enable_chunked_prefill=True, **options) as llm:
        assert [len(o.outputs[0].token_ids) for o in llm.generate([[1] * n for n in (40, 8, 32, 33)], greedy(2))] == [
            2
        ] * 4
        assert llm.generate([[3] * 32], greedy(5))[0].outputs[0].token_ids == whole


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(policy="greedy"), "policy='greedy'"),
        (dict(max_num_seqs=0), "max_num_seqs=0"),
        (dict(max_num_seqs=8, max_num_batched_tokens=4), "max_num_batched_tokens=4 is less than max_num_seqs=8"),
        (dict(max_num_prefills=-1), "max_num_prefills=-1"),
        (dict(enable_chunked_prefill="yes"), "enable_chunked_prefill='yes'"),
        (dict(max_num_sequences=4), "did you mean 'max_num_seqs'"),
        (dict(max_num_seqs=10**7), "lower max_num_seqs or max_model_len"),
    ],
)
def test_bad_options_are_refused_at_the_door(options, words):
    """Before any request: the value, the limit and the way out."""
    with pytest.raises(ValueError, match=words):
        LLM("tiny", device="cpu", **options)


def test_times_of_each_request(llm):
    """queue <= first token <= finish; the one that has to wait for a slot has the longest queue time."""
    outputs = llm.generate([[1, 2]] * 4, greedy(5), use_tqdm=False)
    for output in outputs:
        m = output.metrics
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.token_times[-1] <= m.finish_time
        assert len(m.itl) == 4 and 0 <= m.queue_time <= m.ttft
    assert outputs[3].metrics.queue_time > max(o.metrics.queue_time for o in outputs[:3])


def test_a_stream_closed_before_its_first_piece_is_ended(llm):
    """A generator that never began does not run its finally: the orphan took a slot when somebody else stepped."""
    stream = llm.stream([1, 2, 3], greedy(8))
    assert llm.has_unfinished_requests()
    stream.close()
    assert is_clean(llm)
    llm.stream([1, 2, 3], greedy(8))  # dropped at once
    assert is_clean(llm)


@pytest.mark.parametrize("policy", POLICIES)
def test_ctrl_c_half_way_through_a_step(policy, monkeypatch):
    """Between counting a token as computed and appending it: the request lacked nothing and was never run again."""
    with LLM("tiny", dtype="float64", device="cpu", max_model_len=64, max_num_seqs=2, policy=policy) as llm:
        llm.add_request([1, 2, 3], greedy(9))
        llm.step()

        def stop(self, token_id):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Sequence, "append_token", stop)
            with pytest.raises(KeyboardInterrupt):
                llm.step()
        assert is_clean(llm)


def test_reset_before_a_static_batch_returns():
    """The record of the step that a request ended in may be gone when its batch ends."""
    with LLM("tiny", device="cpu", policy="static", max_num_seqs=3, max_model_len=64) as llm:
        llm.add_request([1, 2], greedy(1), request_id="short")
        llm.add_request([3, 4], greedy(20), request_id="long")
        llm.step()
        llm.metrics.reset()
        llm.abort_request("long")
        assert [output.request_id for output in llm.step()] == ["short"]
        assert is_clean(llm)


@pytest.mark.parametrize("request_id", [1, 1.0, True, ("a",), ["a"], b"a"])
def test_an_id_that_is_no_text_is_refused(llm, request_id):
    """Other types end up as keys in the trace, or collide with each other."""
    with pytest.raises(ValueError, match="expected text or None"):
        llm.add_request([1], greedy(1), request_id=request_id)
    assert is_clean(llm)


def test_a_refused_id_uses_up_nothing():
    """The next request's id and drawn seed are those of an engine that never saw the refusal."""
    made = []
    for refuse in (False, True):
        with LLM("tiny", dtype="float64", device="cpu", max_model_len=64, seed=1) as llm:
            llm.add_request([1], greedy(1), request_id="x")
            if refuse:
                with pytest.raises(ValueError):
                    llm.add_request([1], greedy(1), request_id="x")
            (output,) = llm.generate([[7, 8]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
            made.append((output.request_id, output.outputs[0].token_ids))
    assert made[0] == made[1]


def test_many_ids_from_an_offset(llm):
    """A user who numbers requests from 1,000 on must not exhaust the search for a free number."""
    first = next_id(llm)
    for i in range(1100):
        llm.add_request([1], greedy(1), request_id=str(first + i))
    own = llm.add_request([1], greedy(1))
    assert own == str(first + 1100)
    for i in range(1101):
        llm.abort_request(str(first + i))
    assert is_clean(llm)


def test_close_leaves_nothing_to_step_for():
    """Outputs that nobody fetched kept has_unfinished_requests true on an engine that can no longer step."""
    llm = LLM("tiny", device="cpu", max_model_len=64)
    llm.add_request([1], greedy(1))
    llm.generate([[2]], greedy(4), use_tqdm=False)
    llm.close()
    assert not llm.has_unfinished_requests()


def test_no_two_outputs_have_one_id():
    """An output that `step` has not returned yet keeps its id, against a user's choice and against automatic ones."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with new_engine(max_model_len=64) as llm:
        taken = str(int(llm.add_request([1], params)) + 2)
        llm.add_request([2], params, request_id=taken)
        llm.generate([[3]] * 2, params, use_tqdm=False)  # ends both, and returns neither; takes the id between
        with pytest.raises(ValueError, match="in use"):
            llm.add_request([4], params, request_id=taken)
        llm.add_request([5], params)
        ids = []
        while llm.has_unfinished_requests():
            ids += [output.request_id for output in llm.step()]
        assert len(ids) == len(set(ids)) == 3 and llm.add_request([4], params, request_id=taken) == taken


@pytest.mark.parametrize("prompt", [5, None, 2.5])
def test_a_number_is_no_prompt(prompt):
    """It was taken for a list of one token id here, and refused by `generate`."""
    with new_engine(max_model_len=64) as llm:
        with pytest.raises(ValueError, match="prompt"):
            llm.add_request(prompt)
        assert not llm.has_unfinished_requests()


def test_the_trace_does_not_grow_with_the_queue():
    """Every step kept the ids of all that waited: with 16,000 prompts in one call a gigabyte."""
    with new_engine(max_model_len=32, max_num_seqs=4) as llm:
        llm.generate([[1]] * 300, SamplingParams(max_tokens=1), use_tqdm=False)
        first = llm.metrics.trace[0]
        assert first.num_waiting == 296 and len(first.waiting) == 256
        assert llm.metrics.trace[-1].num_waiting == 0 == len(llm.metrics.trace[-1].waiting)


@pytest.mark.parametrize("is_stream", [False, True])
def test_close_between_a_step_and_its_reader(is_stream, monkeypatch):
    """By another thread: a text that was cut off there looked whole."""
    llm, params = new_engine(), SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True)
    step = llm._step_for_others
    monkeypatch.setattr(llm, "_step_for_others", lambda: (step(), llm.close()))
    with pytest.raises(ValueError, match="closed"):
        list(llm.stream("a", params)) if is_stream else llm.generate(["a", "b"], params, use_tqdm=False)


def without_numbers(llm: LLM, prompt: list[int]) -> list[int]:
    """Break what the model reads of one token, so that this prompt's answer ends after it. Returns that answer."""
    (output,) = llm.generate([prompt], greedy(8), use_tqdm=False)
    said = output.outputs[0].token_ids[:4]
    assert said.count(said[3]) == 1 and said[3] not in prompt
    with torch.inference_mode():
        llm.model_runner.model.model.embed_tokens.weight[said[3]] = float("nan")
    return said


def test_a_request_whose_logits_are_no_numbers_ends_alone():
    """Its neighbours neither fail nor change; what it held is free; `generate` does not call half a text an answer."""
    llm = new_engine(max_num_seqs=3, max_model_len=64)
    (good,) = llm.generate([[3, 3]], greedy(8), use_tqdm=False)
    said = without_numbers(llm, [1, 2])
    assert said[3] not in good.outputs[0].token_ids
    for name, prompt in dict(first=[3, 3], bad=[1, 2], last=[3, 3]).items():
        llm.add_request(prompt, greedy(8), request_id=name)
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0] for output in llm.step()}
    assert (done["bad"].finish_reason, done["bad"].token_ids) == ("error", said)
    assert done["first"].token_ids == done["last"].token_ids == good.outputs[0].token_ids
    assert is_clean(llm)
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        llm.generate([[3, 3], [1, 2]], greedy(8), use_tqdm=False)
    assert llm.generate([[3, 3]], greedy(8), use_tqdm=False)[0].outputs[0].token_ids == good.outputs[0].token_ids


@pytest.mark.parametrize("request_id", [None, 7, ["0"], ("0", "1")])
def test_an_id_to_abort_is_text(llm, request_id):
    """A list, which other engines take, was a TypeError from inside."""
    with pytest.raises(ValueError, match=r"request_id=.*one at a time"):
        llm.abort_request(request_id)


class Broken:
    """A standard error that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", [Broken(), None], ids=["broken", "none"])
def test_a_bar_that_cannot_be_drawn_costs_no_answer(llm, stream, monkeypatch):
    """The answers were lost, and tqdm kept its lock: the next `generate` of another thread waited for ever."""
    expected = llm.generate([[1, 2]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        found = [llm.generate([[1, 2]], greedy(4))[0].outputs[0].token_ids for _ in range(2)]
    assert found == [expected] * 2
    others = []
    thread = threading.Thread(target=lambda: others.extend(llm.generate([[1, 2]], greedy(4))), daemon=True)
    thread.start()
    thread.join(60)
    assert len(others) == 1
