"""What an attack on the asynchronous engine has found: aborts at odd moments, and outputs that came late or twice."""

import gc

import pytest

from .. import SamplingParams
from .script import new_engine

GREEDY = dict(temperature=0.0, ignore_eos=True)


def alone(prompt: list[int], count: int) -> list[int]:
    with new_engine(max_model_len=64) as llm:
        return (
            llm.generate([prompt], SamplingParams(**GREEDY, max_tokens=count), use_tqdm=False)[0].outputs[0].token_ids
        )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("place", ["schedule", "launch", "collect", "retire"])
def test_a_stream_that_dies_in_the_middle_of_a_step(place, is_async, monkeypatch):
    """The garbage collector closes a stream whenever it likes, also while a step is made. The stream's request was
    aborted there and then: the step under way was collected twice, and its neighbour got a token twice."""
    with new_engine(max_model_len=64, async_scheduling=is_async) as llm:
        owner, name = {
            "schedule": (llm.scheduler, "schedule"),
            "launch": (llm.model_runner, "launch"),
            "collect": (llm.model_runner, "collect"),
            "retire": (llm.scheduler, "retire"),
        }[place]
        llm.add_request([7, 8], SamplingParams(**GREEDY, max_tokens=12), request_id="a")
        stream = llm.stream([9], SamplingParams(**GREEDY, max_tokens=30))
        next(stream)
        streams, original = [stream], getattr(owner, name)
        del stream

        def closes(*given):
            result = original(*given)
            if streams:
                streams.pop()  # the last reference: the generator is closed here
                gc.collect()
            return result

        monkeypatch.setattr(owner, name, closes)
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
            llm.block_manager.check_integrity()
        assert [output.outputs[0].token_ids for output in outputs] == [alone([7, 8], 12)]
        assert not streams and llm.block_manager.num_free_blocks == llm.block_manager.num_blocks


def test_an_aborted_request_brings_no_output():
    """Not even if it had ended while another one was aborted; nor does its id bring two outputs when used again."""
    with new_engine(max_model_len=64, async_scheduling=True) as llm:
        llm.add_request([1], SamplingParams(**GREEDY, max_tokens=1), request_id="a")
        llm.add_request([2], SamplingParams(**GREEDY, max_tokens=9), request_id="b")
        assert llm.step() == []
        llm.abort_request("b")  # collects the step in which a has ended
        with pytest.raises(ValueError, match="in use"):
            llm.add_request([3], SamplingParams(**GREEDY, max_tokens=2), request_id="a")
        llm.abort_request("a")
        assert not llm.has_unfinished_requests()
        llm.add_request([3], SamplingParams(**GREEDY, max_tokens=2), request_id="a")
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert [output.prompt_token_ids for output in outputs] == [[3]]


def test_nobody_joins_a_static_batch_that_is_about_to_end():
    """Its last token was pending, nobody decoded, and so the batch seemed open: the next request joined it, and the
    first one's output came when that one ended."""
    steps = {}
    for is_async in (False, True):
        with new_engine(max_model_len=64, policy="static", async_scheduling=is_async) as llm:
            llm.add_request([1, 2], SamplingParams(**GREEDY, max_tokens=1), request_id="a")
            outputs = llm.step()
            llm.add_request([3, 4], SamplingParams(**GREEDY, max_tokens=20), request_id="b")
            while not outputs:
                outputs = llm.step()
            steps[is_async] = [output.request_id for output in outputs], llm.metrics.steps
    assert steps[False][0] == steps[True][0] == ["a"] and steps[True][1] <= 2


def test_decodes_do_not_keep_a_short_prompt_from_a_graph():
    """Their contexts were counted as if they were the prompt's: under load every prompt made its step an eager one."""
    with new_engine(max_model_len=64, max_num_seqs=8, enforce_eager=False) as llm:
        from .. import model_runner

        limit, model_runner.MAX_PAIRS_IN_GRAPH = model_runner.MAX_PAIRS_IN_GRAPH, 20
        try:
            for i in range(3):
                llm.add_request([i] * 8, SamplingParams(**GREEDY, max_tokens=9))
            for _ in range(4):
                llm.step()
            llm.add_request([5, 6], SamplingParams(**GREEDY, max_tokens=2))
            before = llm.metrics.graph_replays
            llm.step()
            assert llm.metrics.graph_replays == before + 1
        finally:
            model_runner.MAX_PAIRS_IN_GRAPH = limit
