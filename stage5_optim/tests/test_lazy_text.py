"""Text that is decoded when somebody asks for it: the same text, whenever and however often that is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import SamplingParams
from ..tokenizer import Detokenizer, Tokenizer
from .script import PieceTokenizer, engine, force, new_engine, scripted
from .test_detokenizer import sentencepiece, spelled  # noqa: F401  (a fixture)

TEXTS = ["你好，世界。", "👩‍👩‍👧 a👍🏽b", "é plain ▁ text", "ÄÖÜ🇨🇭"]


def read_at(tokenizer: object, ids: list[int], moments: set[int], stop: tuple[str, ...] = ()) -> dict[int, str]:
    """The text after each of these numbers of tokens, and (under -1) when the output has ended."""
    detokenizer, seen = Detokenizer(tokenizer, stop), {}
    for count in range(len(ids) + 1):
        if count in moments:
            seen[count] = detokenizer.text
        if count < len(ids) and detokenizer.add(ids[count]):
            break
    detokenizer.finish()
    return seen | {-1: detokenizer.text}


def assert_same_whenever_read(tokenizer: object, ids: list[int], moments: set[int], stop: tuple[str, ...] = ()) -> None:
    always = read_at(tokenizer, ids, set(range(len(ids) + 1)), stop)
    for some in (moments, set(), {len(ids)}):
        seen = read_at(tokenizer, ids, some, stop)
        assert seen == {at: always[at] for at in seen}


any_ids = st.lists(st.one_of(st.integers(0, 300), st.integers(0x80, 0xFF), st.integers(256, 258)), max_size=24)
moments = st.sets(st.integers(0, 24))


@given(ids=any_ids, moments=moments, stop=st.sampled_from([(), ("a",), ("你", "\x80b")]))
def test_any_bytes(ids, moments, stop):
    """Broken characters, special tokens, ids without text, with stop strings and without."""
    assert_same_whenever_read(engine().tokenizer, ids, moments, stop)


@given(text=st.sampled_from(TEXTS), cut=st.integers(1, 40), moments=moments)
def test_characters_over_several_tokens(text, cut, moments):
    """A character whose bytes come before and after the reading, and one that is cut at the end."""
    assert_same_whenever_read(engine().tokenizer, list(text.encode())[:cut], moments)


@given(text=st.text("aé你👍", min_size=1, max_size=12), cuts=st.sets(st.integers(1, 40)), moments=moments)
def test_any_split_into_tokens(text, cuts, moments):
    whole = text.encode()
    ends = sorted({cut for cut in cuts if cut < len(whole)} | {len(whole)})
    pieces = [whole[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert_same_whenever_read(PieceTokenizer(pieces), list(range(len(pieces))), moments)


@given(
    words=st.lists(st.sampled_from(["▁", "▁▁", "a", "▁the", "!", "<s>", "</s>", "é", "你", "👍"]), max_size=10),
    broken=st.lists(st.integers(3, 258), max_size=4),
    at=st.integers(0, 12),
    moments=moments,
)
def test_byte_tokens(sentencepiece: Tokenizer, words, broken, at, moments):  # noqa: F811
    """A run of byte tokens is decoded as a whole: one broken byte turns all of it into marks. Decoded at once that took
    the characters before it along, which the reader of a stream had seen already."""
    ids = spelled(*words)
    ids[at:at] = broken
    assert_same_whenever_read(sentencepiece, ids, moments)


def test_a_cut_character_leaves_those_before_it(sentencepiece):  # noqa: F811
    """max_tokens falls into 好: a stream shows 你 and marks, and so must `generate`, which reads at the end."""
    ids = spelled("▁a", "你", "好")[:-1]
    texts = [read_at(sentencepiece, ids, moments)[-1] for moments in ({1, 2, 3, 4, 5, 6}, set())]
    assert texts[0] == texts[1] and texts[0].startswith("a你")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_good_bytes_that_were_read_at_once_stay_good(sentencepiece, size):  # noqa: F811
    """Read late, 日本 stayed in the window as a whole; the half emoji behind it then turned all of it into marks."""
    ids = spelled("日", "本") + spelled("👍")[-4:][:size]
    assert_same_whenever_read(sentencepiece, ids, {6})
    assert_same_whenever_read(sentencepiece, ids, {3, 7})


class CountingTokenizer(PieceTokenizer):
    def __init__(self):
        super().__init__(["x"] * 300)
        self.calls = 0

    def decode(self, ids) -> str:
        self.calls += 1
        return super().decode(ids)


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_decoded_that_nobody_reads(is_async):
    """Decoding each token of 256 sequences takes the CPU longer than the step takes the GPU: until a request ends
    nobody needs its text. A stream reads, and pays for it; a stop string must be looked for after each token."""
    tokenizer = CountingTokenizer()
    llm = new_engine(max_model_len=64, max_num_seqs=4, async_scheduling=is_async)
    with llm, scripted(llm, force(range(10, 30), 256), 2, tokenizer):
        params = dict(temperature=0.0, ignore_eos=True)
        for name, stop in (("a", ()), ("b", ()), ("c", ("nothing like this",))):
            llm.add_request([1, 2], SamplingParams(**params, max_tokens=12, stop=stop), request_id=name)
            if name == "b":
                while llm._requests["a"].seqs[0].metrics.token_times[8:] == []:
                    llm.step()
                assert tokenizer.calls == 0
        while llm.has_unfinished_requests() and "a" in llm._requests:
            llm.step()
        at_the_end = tokenizer.calls
        llm.step()
        llm.step()
        assert tokenizer.calls > at_the_end, "a stop string is looked for in each step"
        while llm.has_unfinished_requests():
            llm.step()
        before = tokenizer.calls
        stream = llm.stream([1, 2], SamplingParams(**params, max_tokens=6))
        assert "".join(stream) == "x" * 6 and tokenizer.calls >= before + 6


def test_logprobs_are_their_own_text():
    """Who asks for logprobs has each token's text, but the output's text is still read at the end."""
    tokenizer = PieceTokenizer([b"\xe4\xbd", b"\xa0", "!"])
    llm = engine()
    with scripted(llm, force([0, 1, 2], 259), 1, tokenizer):
        params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0)
        output = llm.generate([[65]], params, use_tqdm=False)[0].outputs[0]
    assert output.text == "你!" and len(output.logprobs) == 3
