"""When an output ends, why, and what of it is shown: stop strings, end tokens, and limits of length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .. import LLM, SamplingParams
from ..tokenizer import Detokenizer
from .script import PieceTokenizer, complete, edit_json, engine, new_engine, play, tiny_checkpoint

PIECES = PieceTokenizer(["ABC", "DEF", "G", "HI", "JK", "END\xe4".encode("latin-1")])
ALL = [0, 1, 2, 3, 4]
END = 258  # the end token of `tiny`


def play_pieces(tokens, **params):
    return play(engine(), tokens, tokenizer=PIECES, **params)


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (["DEFGHIJ"], "ABC", 5),  # over four tokens
        (["HIJ", "FG"], "ABCDE", 3),  # two would match: the earlier one counts
        (["FG", "HIJ"], "ABCDE", 3),
        ("EF", "ABCD", 2),  # inside of a token
        (["A"], "", 1),
        (["XYZ", "GHJ"], "ABCDEFGHIJK", 5),  # no match
        (["DEFGX", "EFGHI"], "ABCD", 4),  # held back for one, cut for the other
        (["DEFG", "E"], "ABCD", 2),  # the one that is complete first ends it,
        (["DEF", "E"], "ABCD", 2),  # also when one token completes both
    ],
)
def test_stop_strings_cut_the_text(stop, text, count):
    """A stop string that spans tokens leaked its first part into the stream, or stayed in the result. The tokens are
    those up to the one that completes it."""
    output = play_pieces(ALL, stop=stop)
    assert output.text == text
    assert output.token_ids == ALL[:count]
    assert output.finish_reason == ("length" if text.endswith("JK") else "stop")


@pytest.mark.parametrize(("max_tokens", "text"), [(2, "ABCDEF"), (3, "ABCDEFG"), (4, "ABCDEFGHI")])
def test_nothing_is_lost_when_the_length_ends_it(max_tokens, text):
    """Text held back because it might become a stop string was dropped when the output ended for another reason."""
    output = play_pieces(ALL, stop=["DEFGHIJ"], max_tokens=max_tokens)
    assert (output.text, output.finish_reason) == (text, "length")


def test_nothing_is_lost_when_an_end_token_ends_it():
    """The same, with the model's end token instead of the limit."""
    output = play_pieces([0, 1, END], stop=["DEFGHIJ"])
    assert (output.text, output.finish_reason) == ("ABCDEF", "stop")


def test_stop_string_before_half_a_character():
    """A token that ends in half a character was held as a whole: the stop string in it was seen a token late, and not
    at all if it was the last one."""
    for max_tokens in (2, 3):
        output = play_pieces([0, 5, 1], stop="END", max_tokens=max_tokens)
        assert (output.text, output.finish_reason, len(output.token_ids)) == ("ABC", "stop", 2)


@pytest.mark.parametrize("stop", ["ABC", "JK", "CD", "KD"])
def test_the_prompt_never_stops_the_output(stop):
    """Searching prompt and output together ended a request at once whose prompt explains the stop string."""
    output = play_pieces([1, 2], prompt=[0, 4], stop=stop)
    assert (output.text, output.finish_reason) == ("DEFG", "length")


@pytest.mark.parametrize("stop", ["", [""], ["A", ""], [1], 5, b"A", True, {"A": 1}])
def test_impossible_stop_strings_are_refused(stop):
    """An empty string is found everywhere, so the output was empty; a number was a TypeError from deep inside."""
    with pytest.raises(ValueError, match="stop="):
        SamplingParams(stop=stop)


def one_shot(text: str, stop: list[str]) -> tuple[int, int] | None:
    """(where the text is cut, where the stop string ends) by reading one character after the other."""
    for end in range(1, len(text) + 1):
        begins = [end - len(string) for string in stop if text[:end].endswith(string)]
        if begins:
            return min(begins), end
    return None


@settings(max_examples=10 * settings.default.max_examples)
@given(
    st.text("ab你", min_size=1, max_size=14), st.lists(st.text("ab你", min_size=1, max_size=4), max_size=3), st.data()
)
def test_how_the_text_falls_into_tokens_does_not_matter(text, stop, data):
    """Any text, cut into tokens anywhere (within characters too), with any stop strings: the same as one search over
    the whole. And no piece is ever shown that a stop string takes back later."""
    whole = text.encode()
    cuts = [cut for cut in range(1, len(whole)) if data.draw(st.booleans())]
    tokens = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    expected = one_shot(text, stop)
    detokenizer = Detokenizer(PieceTokenizer(tokens), tuple(stop))
    stopped_at, shown = None, []
    for i in range(len(tokens)):
        if detokenizer.add(i):
            stopped_at = i
            break
        shown.append(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == (text if expected is None else text[: expected[0]])
    assert all(detokenizer.text.startswith(earlier) for earlier in shown), f"shown: {shown}"
    if expected is None:
        assert stopped_at is None
    else:  # at the token that holds the last byte of the stop string
        last_byte = len(text[: expected[1]].encode())
        assert stopped_at == sum(cut < last_byte for cut in cuts)


# ---------------------------------------------------------------- end tokens


def test_stop_token_ids_end_the_output_without_text():
    """The stop token was shown as text, or was lost from token_ids, so that ids and logprobs had other lengths."""
    output = play_pieces(ALL, stop_token_ids=[3], logprobs=0)
    assert (output.text, output.token_ids, output.finish_reason) == ("ABCDEFG", [0, 1, 2, 3], "stop")
    assert len(output.logprobs) == 4


@pytest.mark.parametrize("ids", [3, "3", 3.0, [3.0], [-1], [True], ["3"], [None], {3: 1}])
def test_impossible_stop_token_ids_are_refused(ids):
    """A bare number was a TypeError from deep inside; a float never equals a token."""
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=ids)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that names its end tokens in three places: 1 in config.json, 1 and 2 (twice) in
    generation_config.json, and 4 in the tokenizer. In its byte tokenizer, token 4 is written as Ą."""
    folder = tiny_checkpoint(tmp_path, eos_token_id=1)
    edit_json(folder / "generation_config.json", eos_token_id=[1, 2, 2])
    edit_json(folder / "tokenizer_config.json", eos_token="Ą")
    return folder


def test_a_special_token_as_a_stop_string(folder):
    """Special tokens are no text, so a stop string that is one was never found, and the output ran on."""
    llm = new_engine(folder)
    output = play(llm, [7, 257, 8], stop=["x", "<|im_start|>"])
    assert (output.token_ids, output.text, output.finish_reason) == ([7, 257], "\x07", "stop")
    assert llm.tokenizer.end_ids(["<|im_start|>", "x"], vocab_size=257) == []  # such a model cannot make it


def test_all_end_tokens_count(folder):
    """Only one id was honoured, the first of a list or the tokenizer's, so that chat models ran on and on."""
    llm = new_engine(folder)
    assert llm.eos_token_ids == (1, 2, 4)
    for end in (1, 2, 4):
        output = play(llm, [7, end, 7, 7])
        assert (output.token_ids, output.finish_reason) == ([7, end], "stop"), f"end token {end} is not honoured"
        assert output.text == "\x07", "the end token is no text"


def test_ignore_eos(folder):
    """ignore_eos was undone because the end tokens had been copied into the stop ids; or it switched those off too."""
    llm = new_engine(folder)
    output = play(llm, [7, 2, 1, 4, 7], ignore_eos=True)
    assert (output.token_ids, output.finish_reason) == ([7, 2, 1, 4, 7], "length")
    output = play(llm, [7, 1, 2, 7], ignore_eos=True, stop_token_ids=[2, 2])
    assert (output.token_ids, output.finish_reason) == ([7, 1, 2], "stop")
    assert play(llm, [7, 1, 2, 7], stop_token_ids=[2]).token_ids == [7, 1], "explicit ids come on top of the model's"


def test_without_a_generation_config(folder):
    """A missing file crashed the start, or left the model without an end."""
    (folder / "generation_config.json").unlink()
    llm = new_engine(folder)
    assert llm.eos_token_ids == (1, 4)
    assert play(llm, [7, 2, 4, 7]).token_ids == [7, 2, 4]


def test_end_tokens_that_the_model_cannot_make(folder):
    """An end token beyond the vocabulary (a tokenizer with more tokens than the model) or -1 (written for 'none'):
    masking it for min_tokens was an IndexError within the step, or forbade the last token of the vocabulary."""
    edit_json(folder / "generation_config.json", eos_token_id=[-1, 2, 9999])
    llm = new_engine(folder)
    assert llm.eos_token_ids == (1, 2, 4)
    assert play(llm, [END, 2], min_tokens=1).token_ids == [END, 2]


# ---------------------------------------------------------------- min_tokens, max_tokens


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 5])
def test_min_tokens_holds_off_the_end_token(min_tokens):
    """The model wants to end at once. It may not before min_tokens, and what it makes instead is no end token."""
    output = play(engine(), [END] * 8, min_tokens=min_tokens)
    assert len(output.token_ids) == min_tokens + 1
    assert output.token_ids[-1] == END and END not in output.token_ids[:-1]
    assert output.finish_reason == "stop"


def test_min_tokens_holds_off_stop_ids_of_the_request():
    """min_tokens minded the model's end token only."""
    output = play(engine(), [70] * 6, min_tokens=2, stop_token_ids=[70])
    assert len(output.token_ids) == 3 and output.token_ids.index(70) == 2


def test_min_tokens_holds_off_stop_strings():
    """A stop string within the first min_tokens does not end the output and stays in its text."""
    output = play_pieces(ALL, stop=["DEF"], min_tokens=3)
    assert (output.text, output.finish_reason) == ("ABCDEFGHIJK", "length")
    assert play_pieces([0, 1, 2, 1], stop=["DEF"], min_tokens=3).text == "ABCDEFG"
    assert play_pieces(ALL, stop=["FG"], min_tokens=3).text == "ABCDE", "complete with token 3, so it counts"
    assert play_pieces(ALL, stop=["DEFGH"], min_tokens=3).text == "ABC", "complete after token 3, so it counts"
    both = play_pieces(ALL, stop=["DEF", "DEFGX"], min_tokens=3)
    assert (both.text, both.finish_reason) == ("ABCDEFGHIJK", "length"), "held for the second, it counted for the first"


@pytest.mark.parametrize(("tokens", "reason"), [([66], "length"), ([END], "stop")])
def test_max_tokens_of_one(tokens, reason):
    """An off-by-one made two tokens of one, or called the end 'length' although the model had stopped."""
    output = play(engine(), tokens * 3, max_tokens=1)
    assert (output.token_ids, output.finish_reason) == (tokens, reason)


def test_a_stop_at_the_limit_is_a_stop():
    """Both hold for the last token: the reader wants to know that the text is complete."""
    assert play_pieces([0, 1], stop=["EF"], max_tokens=2).finish_reason == "stop"
    assert play_pieces([0, 1], stop_token_ids=[1], max_tokens=2).finish_reason == "stop"


# ---------------------------------------------------------------- the context


@pytest.fixture(scope="module")
def short() -> LLM:
    return new_engine(max_model_len=32)


@pytest.mark.parametrize(("prompt_len", "count"), [(20, 8), (24, 8), (25, 7), (30, 2), (31, 1)])
def test_output_ends_where_the_context_ends(short, prompt_len, count):
    """Past max_model_len the rotary table has no rows: an index out of bounds, or silently wrong positions."""
    output = complete(short, [5] * prompt_len, max_tokens=8, ignore_eos=True)
    assert len(output.token_ids) == count
    assert output.finish_reason == "length"


def test_max_tokens_none_fills_the_context(short):
    """None was taken for 16, or for no limit at all."""
    assert len(complete(short, [5] * 10, max_tokens=None, ignore_eos=True).token_ids) == 22


@pytest.mark.parametrize("prompt_len", [32, 33])
def test_prompts_beyond_the_context_are_refused(short, prompt_len):
    """A prompt as long as the context looped for ever; a longer one was cut silently, or killed the engine. Both are
    refused with both numbers, before anything runs; others are served."""
    steps = short.metrics.steps
    for call in (short.generate, short.stream):
        with pytest.raises(ValueError, match=rf"{prompt_len} tokens.*max_model_len=32"):
            call([5] * prompt_len)
    with pytest.raises(ValueError, match=r"request 1: .*32"):
        short.generate([[5] * 30, [5] * prompt_len])
    assert short.metrics.steps == steps
    assert len(complete(short, [5] * 30, max_tokens=8, ignore_eos=True).token_ids) == 2


def test_more_context_than_the_model_has_is_refused(tmp_path):
    """max_model_len=64 on a model with 32 positions gave text that falls apart after 32 tokens."""
    folder = tiny_checkpoint(tmp_path, max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"max_model_len=64.*32"):
        new_engine(folder, max_model_len=64)
    assert new_engine(folder).resolved.max_model_len == 32
