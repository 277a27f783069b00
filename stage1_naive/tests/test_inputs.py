"""Bad input: refused at the door with the value and the limit, nothing run, and the next request served."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from .. import LLM, SamplingParams
from .script import complete, engine, new_engine

VOCAB = 259
GOOD = "a good prompt"


@contextmanager
def refused(*fragments: str) -> Iterator[None]:
    """What is inside must raise a ValueError that says all of these, run nothing, and leave the engine usable."""
    llm = engine()
    expected = complete(llm, GOOD, max_tokens=4).token_ids
    steps = llm.metrics.steps
    with pytest.raises(ValueError) as error:
        yield
    missing = [fragment for fragment in fragments if not re.search(fragment, str(error.value))]
    assert not missing, f"the message does not say {missing}: {error.value}"
    assert llm.metrics.steps == steps, "something ran before the refusal"
    assert complete(llm, GOOD, max_tokens=4).token_ids == expected, "the next request is not served as before"


# ---------------------------------------------------------------- prompts


BAD_PROMPTS = {
    "empty text": ("", "prompt is empty"),
    "no ids": ([[]], "prompt is empty"),
    "id -1": ([1, -1], "-1", "0 to 258"),
    "id = vocab": ([VOCAB], "259", "0 to 258"),
    "huge id": ([[2**70]], "0 to 258"),
    "float ids": ([[1.5, 2.0]], "1.5"),
    "whole floats": ([[1.0, 2.0]], "1.0"),
    "a float": (1.5, "1.5"),
    "a number": (7, "7"),
    "None": (None, "None"),
    "None inside": ([GOOD, None], "request 1", "None"),
    "None as id": ([[1, None]], "None"),
    "nested too deep": ([[[1, 2]]], "request 0"),
    "ids and text mixed": ([1, "a"], "request 0", "1"),
    "text among ids": ([[1, "a"]], "'a'"),
    "bools": ([[True, False]], "True"),
    "a mask": (torch.tensor([True, True]), "True"),
    "float array": (np.array([1.0, 2.0]), "1.0"),
    "a dict": ({"prompt": "a"}, "prompts="),
    "bytes": (b"abc", "prompts="),
    "a generator": ((text for text in ["a"]), "prompts="),
    "lone surrogate": ("ok \ud800", r"\\ud800", "Unicode"),
    "bad one among good ones": ([GOOD, GOOD, ""], "request 2", "empty"),
}


@pytest.mark.parametrize(("prompt", "fragments"), [(bad[0], bad[1:]) for bad in BAD_PROMPTS.values()], ids=BAD_PROMPTS)
def test_bad_prompts(prompt, fragments):
    """An empty prompt or an id outside of the vocabulary tripped an assert in the step, for everyone; or indexed the
    embedding with -1 and answered something else."""
    with refused(*fragments):
        engine().generate(prompt, use_tqdm=False)


@pytest.mark.parametrize("prompt", ["", [], [1, -1], [VOCAB], None, ["a", "b"], [[1, 2], [3]], 1.5, "\ud800"])
def test_stream_refuses_at_the_call(prompt):
    """A generator function checks nothing before the first piece is asked for, far from the mistake."""
    with refused("prompt|token id"):
        engine().stream(prompt)


IDS = [72, 105]


@pytest.mark.parametrize(
    "prompt",
    [
        [IDS],
        (72, 105),
        [tuple(IDS)],
        np.array(IDS),
        np.array(IDS, dtype=np.uint8),
        np.array([IDS]),
        [np.array(IDS)],
        [np.int64(72), np.int32(105)],
        torch.tensor(IDS),
        torch.tensor([IDS]),
        [torch.tensor(IDS)],
        [torch.tensor(72), torch.tensor(105)],
        "Hi",
        ["Hi"],
    ],
    ids=repr,
)
def test_all_forms_of_one_prompt(prompt):
    """A list of arrays was taken for one prompt of ids and failed with a TypeError from inside."""
    llm = engine()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.prompt_token_ids == IDS and all(type(i) is int for i in output.prompt_token_ids)
    assert output.outputs[0].token_ids == complete(llm, IDS, max_tokens=3, ignore_eos=True).token_ids
    assert "".join(llm.stream(prompt, params)) == output.outputs[0].text
    assert output.prompt in (None, "Hi")


@pytest.mark.parametrize(
    "prompts",
    [
        ["Hi", "you", "Hi"],
        ("Hi", [121, 111, 117], [72, 105]),
        [np.array(IDS), np.array([121, 111, 117]), torch.tensor(IDS)],
        [[72, 105], "you", (72, 105)],
    ],
)
def test_all_forms_of_a_batch(prompts):
    """Text, ids and arrays may stand side by side; each is a prompt of its own."""
    outputs = engine().generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [IDS, [121, 111, 117], IDS]


def test_no_prompts_no_outputs():
    """An empty list is no empty prompt."""
    steps = engine().metrics.steps
    assert engine().generate([]) == engine().generate([], [], use_tqdm=False) == engine().generate(()) == []
    assert engine().metrics.steps == steps


# ---------------------------------------------------------------- sampling parameters


BAD_PARAMS = [
    dict(max_tokens=0),
    dict(max_tokens=-3),
    dict(max_tokens=1.5),
    dict(max_tokens=True),
    dict(max_tokens="5"),
    dict(min_tokens=-1),
    dict(min_tokens=None),
    dict(min_tokens=1.0),
    dict(top_k=-2),
    dict(top_k=2.5),
    dict(top_k=True),
    dict(top_k="3"),
    dict(seed=1.5),
    dict(seed="1"),
    dict(seed=True),
    dict(logprobs=-1),
    dict(logprobs=True),
    dict(logprobs=2.0),
    dict(ignore_eos=1),
    dict(ignore_eos=None),
    dict(temperature="0.5"),
    dict(temperature=[0.5]),
]


@pytest.mark.parametrize("params", BAD_PARAMS, ids=repr)
def test_bad_parameters(params):
    """max_tokens=0 or -3 looped or made one token all the same; True and 1.5 counted as 1; '5' failed in the step."""
    ((name, value),) = params.items()
    with refused(f"{name}={re.escape(repr(value))}: expected"):
        SamplingParams(**params)


def test_min_tokens_above_max_tokens():
    """The two together can never be met."""
    with refused("min_tokens=9", "max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("topp", "top_p"), ("zzz", None)]
)
def test_unknown_parameters_are_refused(name, near):
    """An unknown option was dropped: a misspelled temperature was sampled at 1. The message offers the nearest name."""
    with refused(
        f"unknown option '{name}' for SamplingParams", f"did you mean '{near}'" if near else "Known: max_tokens"
    ):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("params", "fragments"),
    [
        (SamplingParams(logprobs=VOCAB + 1), ["request 0", "260", "259"]),
        (SamplingParams(stop_token_ids=[3, VOCAB]), ["259", "0 to 258"]),
        ([SamplingParams()], ["1 sampling_params for 2 prompts"]),
        ([SamplingParams()] * 3, ["3 sampling_params for 2 prompts"]),
        ([], ["0 sampling_params for 2 prompts"]),
        ([SamplingParams(), None], ["sampling_params=None"]),
        ([SamplingParams(), SamplingParams(logprobs=999)], ["request 1", "999"]),
        ({}, ["sampling_params={}"]),
        (0, ["sampling_params=0"]),
        ({"max_tokens": 3}, ["max_tokens"]),
        ("greedy", ["greedy"]),
        (SamplingParams, ["SamplingParams"]),
    ],
)
def test_parameters_that_do_not_fit_the_call(params, fragments):
    """Too few parameters were zipped away with their prompts; {} and 0 were silently the defaults."""
    with refused(*fragments):
        engine().generate([GOOD, GOOD], params, use_tqdm=False)


def test_all_of_a_call_or_nothing():
    """Good requests before the bad one ran, or stayed queued and came out of the next call."""
    llm = engine()
    with refused("request 1", "-5"):
        llm.generate([GOOD, [3, -5], GOOD], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(llm.generate([GOOD], SamplingParams(max_tokens=2), use_tqdm=False)) == 1


# ---------------------------------------------------------------- options of the engine


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (dict(devise="cpu"), ["unknown option 'devise' for LLM", "did you mean 'device'"]),
        (dict(max_len=5), ["unknown option 'max_len'", "max_model_len"]),
        (dict(temperature=0.5), ["unknown option 'temperature'"]),
        (dict(device="tpu"), ["'tpu'", "cuda", "cpu"]),
        (dict(device=0), ["device=0"]),
        (dict(dtype="fp16"), ["'fp16'", "float16"]),
        (dict(dtype=torch.float16), ["dtype=torch.float16"]),
        (dict(max_model_len=1), ["max_model_len=1", "2"]),
        (dict(max_model_len=0), ["max_model_len=0"]),
        (dict(max_model_len=True), ["max_model_len=True"]),
        (dict(max_model_len="32"), ["'32'"]),
        (dict(max_model_len=10**6), ["1000000", "2048"]),
        (dict(seed="1"), ["seed='1'"]),
        (dict(load_format="gguf"), ["'gguf'", "dummy"]),
        (dict(attention_backend="flash"), ["'flash'", "torch", "flash_attn"]),
    ],
)
def test_bad_engine_options(options, fragments):
    """An unknown option was dropped without a word; a wrong value failed deep inside of torch."""
    with refused(*fragments):
        new_engine(**options)


@pytest.mark.parametrize("model", [None, "", 5, "no-such-model", "tinny"])
def test_unknown_models(model):
    """A misspelled name was looked for on the hub for a minute. The message offers what there is."""
    with refused("model=", "tiny" if model in ("no-such-model", "tinny") else repr(model)):
        LLM(model)


@pytest.mark.parametrize("model", ["x" * 5000, "~no-such-user-here/model"])
def test_names_that_the_file_system_dislikes(model):
    """A prompt in place of the model, or a home of nobody: an OSError with a traceback of the standard library."""
    with pytest.raises(ValueError, match=f"model='{model[:20]}") as error:
        LLM(model, device="cpu")
    assert len(str(error.value)) < 400


LONG = "data:image/png;base64," + "A" * 100_000
LONG_INPUTS = {
    "content part": lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": LONG}]}]),
    "no list": lambda llm: llm.chat({"role": "user", "content": LONG}),
    "no role": lambda llm: llm.chat([{"content": LONG}]),
    "dict": lambda llm: llm.generate({"prompt": LONG}),
    "list of dicts": lambda llm: llm.generate([{"prompt": LONG}]),
    "stop": lambda llm: SamplingParams(stop=[LONG, 1]),
    "stop ids": lambda llm: SamplingParams(stop_token_ids=LONG),
    "params": lambda llm: llm.generate("a", LONG),
}


@pytest.mark.parametrize("call", LONG_INPUTS.values(), ids=LONG_INPUTS)
def test_a_refusal_is_shorter_than_what_it_refuses(call):
    """A picture of three megabytes came back as an error message of three megabytes."""
    with pytest.raises(ValueError) as error:
        call(engine())
    assert len(str(error.value)) < 400


def test_params_of_another_package_are_named():
    """Each stage has its own: "SamplingParams(...): expected SamplingParams" helped nobody."""
    other = type("SamplingParams", (), {"__module__": "some.other"})()
    with refused("a some.other.SamplingParams", f"expected {SamplingParams.__module__}.SamplingParams"):
        engine().generate("a", other)


def test_seeds_of_any_size_for_random_weights():
    """Beyond 64 bits it was an overflow in torch, without a name; the same seed was fine for sampling."""
    one, two = (new_engine(load_format="dummy", seed=seed, max_model_len=64) for seed in (3, 3 + 2**64))
    assert complete(one, [65, 66], max_tokens=8).token_ids == complete(two, [65, 66], max_tokens=8).token_ids


def test_a_refused_call_uses_up_nothing():
    """One bad prompt among good ones: ids and drawn seeds go on as if the call had not been made."""
    texts = []
    for bad in (False, True):
        llm = new_engine(seed=3)
        if bad:
            with pytest.raises(ValueError, match="request 1"):
                llm.generate(["good", [VOCAB]], SamplingParams(max_tokens=2))
        (output,) = llm.generate("a prompt", SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        texts.append((output.request_id, output.outputs[0].token_ids))
    assert texts[0] == texts[1]
