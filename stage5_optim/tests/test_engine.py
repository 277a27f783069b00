"""The engine as a whole: order, repeatability, chat, streams, faults within a step, lifetime, and the command line."""

import gc
import io
import os
import random
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import zip_longest

import pytest
import torch

from .. import LLM, SamplingParams
from ..__main__ import main, report
from ..sequence import RequestOutput
from .script import PACKAGE, ROOT, complete, edit_json, engine, new_engine, tiny_checkpoint

GREEDY8 = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["What is it?", "A", "Zum Beispiel", "你好"]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm: LLM, prompts, params) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, params, use_tqdm=False))


# ---------------------------------------------------------------- order and reuse


@pytest.mark.parametrize("bar", [True, False])
def test_outputs_come_in_input_order(bar, capsys):
    """Results came in the order in which requests finished, and the second call on one engine looked up ids counted
    from zero. Four requests that end at different times, twice, then duplicates."""
    llm = engine()
    solo = [complete(llm, prompt, max_tokens=8, ignore_eos=True).token_ids for prompt in PROMPTS]
    lengths = [8, 1, 4, 2]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    expected = [tokens[:n] for tokens, n in zip(solo, lengths, strict=True)]
    capsys.readouterr()
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params, use_tqdm=bar)
        assert [output.prompt for output in outputs] == PROMPTS
        assert tokens_of(outputs) == expected
        shown = capsys.readouterr().err
        assert "4/4" in shown if bar else shown == "", (
            "the bar ends at 4/4 where it is on, and is not there where it is off"
        )
    twice = llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[0]], GREEDY8, use_tqdm=False)
    assert tokens_of(twice) == [solo[0], solo[1], solo[0]]
    assert len({output.request_id for output in twice}) == 3


@pytest.mark.parametrize("lengths", [[3, 7, 12], [12, 7, 3], [7, 7, 7], [5], [1, 40]])
def test_rows_of_a_batch_equal_their_solo_runs(lengths):
    """Padding: rows attended to pad tokens, positions counted them, and a row of nothing but padding was NaN for all.
    0, the usual pad id, is a token like others here."""
    llm = engine()
    prompts = [[0, *range(60, 59 + n)] for n in lengths]
    alone = [generate(new_engine(), prompt, GREEDY8)[0] for prompt in prompts]
    assert generate(llm, prompts, GREEDY8) == alone


def test_the_size_of_the_batch_does_not_matter():
    """Kernels that sum in another order for other batch sizes change a bf16 text, and a real fault hides behind that
    excuse. In float64 there is none: alone, eight copies, and among seven others are equal."""
    llm = engine()
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    others = [f"{i} others of {'many' * i} lengths" for i in range(7)]
    alone = generate(llm, "The one", params)
    assert generate(llm, ["The one"] * 8, params) == alone * 8
    assert generate(llm, [*others[:3], "The one", *others[3:]], params)[3:4] == alone


class Spy(torch.nn.Module):
    """The model, and a record of every (position, token) that it is fed."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model, self.fed = model, []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *more):
        self.fed += zip(positions.tolist(), input_ids.tolist(), strict=True)
        return self.model(input_ids, positions, *more)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)


def test_only_real_tokens_at_their_own_positions(monkeypatch):
    """Positions that count padding, or go on from the longest prompt of a batch, rotate short prompts wrongly. Each
    token must be fed at its place in its sequence, the first at 0, and nothing else; the last one is never needed."""
    llm = engine()
    spy = Spy(llm.model_runner.model)
    monkeypatch.setattr(llm.model_runner, "model", spy)
    prompts = [[60 + i, *range(70, 69 + n)] for i, n in enumerate((3, 7, 12))]
    outputs = generate(llm, prompts, GREEDY8)
    sequences = [[*prompt, *output[:-1]] for prompt, output in zip(prompts, outputs, strict=True)]
    assert set(spy.fed) == {pair for sequence in sequences for pair in enumerate(sequence)}


# ---------------------------------------------------------------- seeds

SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=5.0, max_tokens=16, ignore_eos=True)  # so hot that no two runs agree by chance


@pytest.mark.parametrize(
    "neighbour",
    [UNSEEDED, SamplingParams(temperature=0.8, seed=7), SamplingParams(max_tokens=1), GREEDY8, SEEDED],
    ids=["unseeded", "seed 7", "ends early", "greedy", "same seed"],
)
def test_a_seed_decides_alone(neighbour):
    """A neighbour without a seed switched the batch to one shared stream; a neighbour with one shifted it."""
    llm = engine()
    alone = generate(llm, "Say", SEEDED)[0]
    assert generate(new_engine(seed=3), "Say", SEEDED)[0] == alone, "another engine gives other tokens"
    for _ in range(2):
        assert generate(llm, ["Say", "other"], [SEEDED, neighbour])[0] == alone
        assert generate(llm, ["other", "Say"], [neighbour, SEEDED])[1] == alone
        assert generate(llm, ["other", "Say", "third"], [neighbour, SEEDED, neighbour])[1] == alone
    assert generate(llm, "Say", SamplingParams(temperature=0.8, seed=43, max_tokens=16, ignore_eos=True))[0] != alone


def test_requests_without_a_seed_differ():
    """A fixed default seed gave every user the same 'random' text, and n copies of one prompt n equal answers."""
    llm, other = engine(), new_engine()
    outputs = generate(llm, ["Say"] * 3, UNSEEDED) + generate(llm, "Say", UNSEEDED) + generate(other, "Say", UNSEEDED)
    assert len({tuple(tokens) for tokens in outputs}) == 5


def test_the_engine_seed_repeats_all_requests():
    """With a seed for the engine a whole session is repeatable, and yet no two requests are alike."""
    runs = []
    for seed in (5, 5, 6):
        llm = new_engine(seed=seed)
        runs.append(generate(llm, ["Say"] * 2, UNSEEDED) + generate(llm, "Say", UNSEEDED))
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0] + runs[2]}) == 6


def test_the_process_is_left_as_it_was():
    """Building a model under torch.set_default_dtype and sampling with manual_seed changed the user's own programs."""
    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), torch.get_default_device()
    with new_engine(dtype="bfloat16", seed=1) as llm:
        generate(llm, ["a", "b"], [UNSEEDED, SEEDED])
        list(llm.stream("c", UNSEEDED))
    assert torch.equal(torch.get_rng_state(), before[0]), "torch's global generator has moved"
    assert random.getstate() == before[1], "Python's global generator has moved"
    assert (torch.get_default_dtype(), torch.get_default_device()) == before[2:]
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


# ---------------------------------------------------------------- chat


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 你好"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Why?"},
]


def template_ids(llm: LLM, conversation: list[dict]) -> list[int]:
    return llm.tokenizer.hf.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)


def test_chat_is_generate_on_the_template():
    """The ids are those of the tokenizer's own template, up to where the answer begins; one conversation or several."""
    llm = engine()
    ids = template_ids(llm, CONVERSATION)
    assert llm.tokenizer.decode(ids).endswith("assistant\n")
    (output,) = llm.chat(CONVERSATION, GREEDY8, use_tqdm=False)
    assert output.prompt_token_ids == ids
    assert tokens_of([output]) == generate(llm, ids, GREEDY8)
    both = llm.chat([CONVERSATION, CONVERSATION[1:2]], [GREEDY8, GREEDY8], use_tqdm=False)
    assert [one.prompt_token_ids for one in both] == [ids, template_ids(llm, CONVERSATION[1:2])]


BOS = 256


@pytest.fixture
def with_bos(tmp_path) -> LLM:
    """A model whose tokenizer adds BOS to every text, and whose chat template writes it too."""
    from tokenizers import processors

    folder = tiny_checkpoint(tmp_path)
    hf = new_engine(folder).tokenizer.hf
    hf.bos_token = "<|endoftext|>"
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BOS)]
    )
    hf.chat_template = "{{ bos_token }}" + hf.chat_template
    hf.save_pretrained(folder)
    return new_engine(folder)


def test_exactly_one_bos(with_bos):
    """The template wrote BOS and the tokenizer added another, which the model never saw in training."""
    llm = with_bos
    params = SamplingParams(temperature=0, max_tokens=1)
    ids = template_ids(llm, CONVERSATION)
    assert ids[0] == BOS and ids.count(BOS) == 1
    rendered = llm.tokenizer.hf.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    assert llm.chat(CONVERSATION, params, use_tqdm=False)[0].prompt_token_ids == ids
    assert llm.generate(rendered, params, use_tqdm=False)[0].prompt_token_ids == ids
    assert llm.generate("hi", params, use_tqdm=False)[0].prompt_token_ids == [BOS, 104, 105]
    for given in ([104, 105], [BOS, 104], [BOS, BOS, 104]):
        assert llm.generate(given, params, use_tqdm=False)[0].prompt_token_ids == given, "ids are taken as they are"


def test_two_bos_that_a_user_writes_stay(tmp_path):
    """Where the tokenizer adds none, none is too many: one of the user's own was dropped."""
    folder = tiny_checkpoint(tmp_path)
    edit_json(folder / "tokenizer_config.json", bos_token="<|endoftext|>")
    llm = new_engine(folder)
    assert llm.tokenizer.hf.bos_token_id == BOS
    assert llm.tokenizer.encode("<|endoftext|><|endoftext|>hi") == [BOS, BOS, 104, 105]


def test_empty_text_with_bos_is_a_prompt(with_bos):
    """With a BOS there is a token to begin from; without one, '' is refused."""
    output = with_bos.generate("", GREEDY8, use_tqdm=False)[0]
    assert output.prompt_token_ids == [BOS] and len(output.outputs[0].token_ids) == 8


def test_chat_without_a_template(tmp_path):
    """A base model has no template: a KeyError or a default that the model never saw, instead of a clear word."""
    folder = tiny_checkpoint(tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    llm = new_engine(folder)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat(CONVERSATION)
    assert len(complete(llm, "text", max_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        {"role": "user", "content": "Hi"},
        ["Hi"],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": None, "content": "Hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [{"role": "user", "content": "\ud800"}],
        [CONVERSATION, []],
        [CONVERSATION, None],
        [[]],
    ],
    ids=repr,
)
def test_malformed_messages(messages):
    """A missing key was a KeyError from within the template; None was written into the prompt as the word None."""
    llm = engine()
    steps = llm.metrics.steps
    with pytest.raises(ValueError, match=r"message|conversation"):
        llm.chat(messages, use_tqdm=False)
    assert llm.metrics.steps == steps


def test_text_that_is_no_unicode_is_not_the_templates_fault():
    """A file name from the command line, read in another encoding: the blame fell on the model's template."""
    with pytest.raises(ValueError, match="'content' is not valid Unicode text"):
        engine().chat([{"role": "user", "content": "caf\udce9"}], use_tqdm=False)


def test_a_template_that_refuses(tmp_path):
    """Templates raise errors of their own kind for roles that they do not know; the user gets a ValueError with the
    template's words."""
    folder = tiny_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        new_engine(folder).chat(CONVERSATION)


# ---------------------------------------------------------------- streams


def test_streams_give_the_text_of_generate():
    """A stream that lacks its last piece, or shows one twice."""
    llm = engine()
    for params in (GREEDY8, SEEDED, SamplingParams(temperature=0, max_tokens=40, stop=["e", "\ufffd"])):
        text = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].text
        assert "".join(llm.stream(PROMPTS[0], params)) == text


def test_a_stream_works_only_when_asked():
    """Each piece is made when it is asked for: a stream that runs ahead shows the text late, all at once."""
    llm = engine()
    llm.metrics.reset()
    stream = llm.stream([65], GREEDY8)
    assert llm.metrics.steps == 0
    next(stream)
    assert 1 <= llm.metrics.steps < 8
    stream.close()


def test_a_stream_closed_early_leaves_nothing_behind():
    """A closed stream went on in the background, or its tokens turned up in the next request."""
    llm = engine()
    text = "".join(llm.stream("ABC", GREEDY8))
    for count in (0, 1, 2):
        stream = llm.stream("ABC", GREEDY8)
        pieces = [next(stream) for _ in range(count)]
        stream.close()
        assert text.startswith("".join(pieces))
        assert list(stream) == []
        assert complete(llm, "ABC", max_tokens=8, ignore_eos=True).text == text


@pytest.mark.parametrize("params", [GREEDY8, SEEDED], ids=["greedy", "seeded"])
def test_interleaved_streams(params):
    """Two conversations in turns: state that belongs to the engine instead of the request mixes their texts."""
    llm = engine()
    prompts = ["The first", "And a second, longer one", "3"]
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    rounds = zip_longest(*(llm.stream(prompt, params) for prompt in prompts), fillvalue="")
    assert ["".join(pieces) for pieces in zip(*rounds, strict=True)] == expected


def test_generate_while_a_stream_is_open():
    """A batch in the middle of a stream: both must be as alone."""
    llm = engine()
    text = "".join(llm.stream("Hello", GREEDY8))
    alone = generate(llm, PROMPTS, GREEDY8)
    stream = llm.stream("Hello", GREEDY8)
    pieces = [next(stream)]
    assert generate(llm, PROMPTS, GREEDY8) == alone
    assert "".join([*pieces, *stream]) == text


# ---------------------------------------------------------------- faults within a step


class Failing(torch.nn.Module):
    """The model, until its n-th forward pass raises."""

    def __init__(self, model: torch.nn.Module, error: BaseException, after: int):
        super().__init__()
        self.model, self.error, self.left = model, error, after

    def forward(self, *args):
        if self.left == 0:
            raise self.error
        self.left -= 1
        return self.model(*args)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["Ctrl-C", "exception"])
@pytest.mark.parametrize("after", [0, 1, 5, 7])
def test_the_engine_outlives_a_fault(error, after, monkeypatch):
    """After Ctrl-C in a notebook cell, or an exception in a step, the next call met half a request: its memory was
    gone, or its tokens came out of another request."""
    llm = engine()
    expected, text = generate(llm, PROMPTS, GREEDY8), "".join(llm.stream("ABC", GREEDY8))
    for call in (
        lambda: llm.generate(PROMPTS, GREEDY8, use_tqdm=False),
        lambda: list(llm.stream("ABC", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))),
        lambda: llm.chat([CONVERSATION] * 2, GREEDY8, use_tqdm=False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner, "model", Failing(llm.model_runner.model, error, after))
            with pytest.raises(type(error)):
                call()
        assert generate(llm, PROMPTS, GREEDY8) == expected
        assert "".join(llm.stream("ABC", GREEDY8)) == text


# ---------------------------------------------------------------- what comes out beside the text


def test_times_of_a_request():
    """Times from two clocks gave negative latencies; the last gap was missing, or one counted the prompt."""
    for output in engine().generate(PROMPTS, GREEDY8, use_tqdm=False):
        m = output.metrics
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finish_time
        assert m.queue_time == m.first_scheduled_time - m.arrival_time
        assert m.ttft == m.first_token_time - m.arrival_time
        assert len(m.itl) == len(output.outputs[0].token_ids) - 1 == 7
        assert min(m.itl) >= 0 and sum(m.itl) <= m.finish_time - m.first_token_time


def test_one_token_has_no_gaps():
    """Dividing by tokens - 1."""
    output = engine().generate("A", SamplingParams(max_tokens=1), use_tqdm=False)[0]
    assert output.metrics.itl == [] and output.metrics.ttft >= 0


def test_the_output_says_what_it_answers():
    """All fields of a RequestOutput, for a prompt given as text and as ids."""
    llm = engine()
    text, ids = llm.generate(["Hi", [72, 105]], GREEDY8, use_tqdm=False)
    assert (text.prompt, ids.prompt) == ("Hi", None)
    assert text.prompt_token_ids == ids.prompt_token_ids == [72, 105]
    assert text.finished and text.outputs[0].index == 0 and len(text.outputs) == 1
    assert text.outputs == ids.outputs
    assert text.outputs[0].text == llm.tokenizer.decode(text.outputs[0].token_ids)


# ---------------------------------------------------------------- lifetime


def test_close():
    """Closing twice raised; a closed engine failed with an AttributeError on None, also within an open stream."""
    with new_engine() as llm:
        stream = llm.stream("Hello", GREEDY8)
        next(stream)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: llm.chat(CONVERSATION),
        lambda: next(stream),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_close_in_the_middle_of_generate():
    """By another thread: an AttributeError on None, of which nobody knows what it means."""
    llm, errors = new_engine(), []

    def serve() -> None:
        try:
            generate(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    while llm.metrics.steps < 2:
        time.sleep(0.001)
    llm.close()
    thread.join()
    assert errors == ["this engine is closed; make a new LLM"]


def test_memory_is_given_back():
    """A registry, a cycle or a global kept the first model alive, and the second one did not fit beside it."""
    llm = new_engine()
    complete(llm, "Hello", max_tokens=2)
    list(llm.stream("Hello", GREEDY8))
    model = weakref.ref(llm.model_runner.model)
    llm.close()
    gc.collect()
    assert model() is None, "close() leaves the model in memory"
    llm = new_engine()
    complete(llm, "Hello", max_tokens=2)
    engine_ref, model = weakref.ref(llm), weakref.ref(llm.model_runner.model)
    del llm
    gc.collect()
    assert engine_ref() is None and model() is None, "a dropped engine stays in memory"


def test_rebuild_in_one_process(monkeypatch):
    """A notebook cell run again: the second engine failed because of what the first had left, closed or not, also
    after an exception within it."""
    expected = generate(engine(), PROMPTS, GREEDY8)
    for ending in ("close", "nothing", "error", "nothing"):
        llm = new_engine()
        assert generate(llm, PROMPTS, GREEDY8) == expected
        if ending == "close":
            llm.close()
        elif ending == "error":
            monkeypatch.setattr(llm.model_runner, "model", Failing(llm.model_runner.model, RuntimeError("no"), 2))
            with pytest.raises(RuntimeError):
                generate(llm, PROMPTS, GREEDY8)


def test_two_engines_side_by_side():
    """Class attributes and module globals (block size, counters, the current batch) are shared by all engines."""
    one, two = new_engine(max_model_len=64), new_engine(dtype="float32", seed=4, max_model_len=128)
    expected = [generate(new_engine(), "Hello", GREEDY8)[0], generate(new_engine(dtype="float32"), "Hi", GREEDY8)[0]]
    first, second = one.stream("Hello", GREEDY8), two.stream("Hi", GREEDY8)
    texts = ["".join(pieces) for pieces in zip(*zip_longest(first, second, fillvalue=""), strict=True)]
    assert texts == [llm.tokenizer.decode(tokens) for llm, tokens in zip((one, two), expected, strict=True)]
    assert (one.metrics.steps, two.metrics.steps) == (8, 8)
    assert (one.resolved.max_model_len, two.resolved.max_model_len) == (64, 128)
    one.close()
    assert generate(two, "Hi", GREEDY8) == expected[1:]


# ---------------------------------------------------------------- the command line


CPU = ["--model", "tiny", "--device", "cpu", "--dtype", "float64"]


def run_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", [PACKAGE, *arguments])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def python(*arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a fresh interpreter with the package in reach."""
    environment = os.environ | {"PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, timeout=200)
    return done.returncode, *(stream.decode().replace(os.linesep, "\n") for stream in (done.stdout, done.stderr))


def test_command_line_in_a_process_of_its_own():
    """The text to standard output, all else to standard error, so that the text can be piped on."""
    code, out, err = python("-m", PACKAGE, "Hi", *CPU, "--max-tokens", "6", "--ignore-eos")
    assert code == 0, err
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    text = engine().chat(messages, params, use_tqdm=False)[0].outputs[0].text
    assert out == text + "\n"
    assert "steps 6" in err and "tokens/s" in err
    assert f"{PACKAGE}: tiny on cpu" in err, "the first log line says what runs"


def test_command_line_help(monkeypatch, capsys):
    """Every option is explained, with its default, under the package's own name."""
    code, out, _ = run_main(monkeypatch, capsys, "--help")
    assert code == 0
    assert f"python -m {PACKAGE}" in out
    for option in ("--model", "--max-tokens", "--temperature", "--stop", "--seed", "--device", "--raw"):
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["x", *CPU, "--max-tokens", "0"], "max_tokens=0"),
        (["x", *CPU, "--temperature", "-1"], "temperature=-1"),
        (["x", *CPU, "--top-p", "0"], "top_p"),
        (["x", *CPU, "--top-k", "two"], "two"),
        (["", "--raw", *CPU], "prompt is empty"),
        (["x", "--model", "tinny"], "did you mean 'tiny'"),
        (["x", *CPU[:4], "--dtype", "fp16"], "fp16"),
        (["x", *CPU, "--max-model-len", "4"], "max_model_len=4"),
        (["x", *CPU, "--stop", ""], "stop"),
        (["x", *CPU, "--temprature", "1"], "temprature"),
        ([], "prompt"),
    ],
)
def test_command_line_with_bad_values(arguments, word, monkeypatch, capsys):
    """Thirty lines of traceback for a typing mistake. Wanted: exit code 2, and one line that says what is wrong."""
    code, out, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 2 and out == ""
    assert word.lower() in err.splitlines()[-1].lower()
    assert "Traceback" not in err


def test_command_line_raw_stdin_and_sampling(monkeypatch, capsys):
    """--raw continues the text as it is; '-' reads it from standard input; sampling options reach the sampler."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("From a pipe"))
    options = ["--raw", "--max-tokens", "6", "--temperature", "0.9", "--top-k", "9", "--seed", "4", "--ignore-eos"]
    code, out, _ = run_main(monkeypatch, capsys, "-", *CPU, *options)
    params = dict(max_tokens=6, temperature=0.9, top_k=9, seed=4, ignore_eos=True)
    assert code == 0
    assert out == complete(engine(), "From a pipe", **params).text + "\n"


def test_command_line_with_standard_input_closed(monkeypatch, capsys):
    """Python has None in place of a closed stream: an AttributeError, after the model was loaded."""
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = run_main(monkeypatch, capsys, "-", *CPU)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "standard input is closed" in err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_command_line_on_a_terminal_that_lacks_characters(encoding, monkeypatch, capsys):
    """One character that the terminal cannot write, and all of the text was lost to a UnicodeEncodeError."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params: iter(["so: ", "你", "!"]))
    code, _, err = run_main(monkeypatch, capsys, "x", *CPU)
    assert (code, written.getvalue().split()) == (0, [b"so:", b"?!"]), err


@pytest.mark.skipif(os.name != "posix", reason="pipes of other systems break in other ways")
def test_command_line_whose_reader_leaves():
    """`| head -c 3` got its three bytes, and the user a traceback about a broken pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", PACKAGE, "Hi", *CPU, "--max-tokens", "6", "--ignore-eos"]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200)
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert len(done.stderr.splitlines()) == 1, done.stderr  # what was chosen, said at the start


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_command_line_on_a_full_disk(monkeypatch, capfd):
    """A line that says so, and no traceback."""
    command = [sys.executable, "-m", PACKAGE, "Hi", *CPU, "--max-tokens", "6", "--ignore-eos"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode == 1
    assert "cannot write the text: " in done.stderr and "Traceback" not in done.stderr


def test_the_callers_autocast_changes_nothing():
    """Around a call it mixed dtypes within the model: an error of a library that nobody had heard of."""
    llm = new_engine(dtype="float32")
    alone = complete(llm, [65, 66], max_tokens=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert complete(llm, [65, 66], max_tokens=8) == alone
        assert torch.is_autocast_enabled("cpu")


class Recorder(io.StringIO):
    """Standard output that remembers how often it was flushed, and with how much text."""

    def __init__(self):
        super().__init__()
        self.flushed = []

    def flush(self):
        self.flushed.append(self.getvalue())


def test_command_line_streams(monkeypatch):
    """Buffered until the end, a stream is no stream: each piece is flushed when it comes."""
    monkeypatch.setattr(sys, "stdout", Recorder())
    report(engine(), iter(["one ", "two ", "three"]))
    assert sys.stdout.flushed[:3] == ["one ", "one two ", "one two three"]


def test_command_line_ctrl_c(capsys):
    """Ctrl-C ends the text; what it cost so far is still said, and there is no traceback."""

    def interrupted() -> Iterator[str]:
        yield "begun"
        raise KeyboardInterrupt

    report(engine(), interrupted())
    captured = capsys.readouterr()
    assert captured.out == "begun\n" and "steps" in captured.err


# ---------------------------------------------------------------- optional dependencies


WITHOUT = """
import sys
for name in ("triton", "flash_attn", "xxhash", "gguf", "accelerate", "hypothesis", "matplotlib"):
    sys.modules[name] = None  # as if it were not installed
from {package} import LLM, SamplingParams
llm = LLM("tiny", device="cpu", dtype="float64")
print(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids)
try:
    LLM("tiny", device="cpu", attention_backend="flash_attn")
except ValueError as error:
    print("refused:", error)
"""


def test_runs_without_optional_packages():
    """The package failed to import where triton or flash-attn cannot be installed: on Windows, a Mac, an old GPU."""
    code, out, err = python("-c", WITHOUT.format(package=PACKAGE))
    assert code == 0, err
    tokens, refusal = out.splitlines()
    assert tokens == str(complete(engine(), "Hello", max_tokens=8, ignore_eos=True).token_ids)
    assert re.match(r"refused: .*flash_attn", refusal)


def test_tokenizer_of_a_config_that_transformers_refuses(tmp_path):
    """transformers 5 rejects "head_dim": null before it looks at the tokenizer; the files themselves are fine."""
    folder = tiny_checkpoint(tmp_path / "null", hidden_size=256, head_dim=None)
    with LLM(str(folder), device="cpu", load_format="dummy") as llm:
        assert llm.model_config.head_dim == 64
        assert llm.tokenizer.encode("hi") == [104, 105]
        assert llm.generate("hi", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].finish_reason == "length"
