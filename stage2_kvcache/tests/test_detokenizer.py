"""Detokenizing: the pieces that a stream shows are text, and joined they are the text of the output."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import SamplingParams
from ..tokenizer import REPLACEMENT, Detokenizer, Tokenizer
from .script import PieceTokenizer, engine, force, scripted

GREETING = "你好，世界。"
THUMB = "👍🏽"  # two code points: the hand and its skin tone
FAMILY = "👩‍👩‍👧"  # three emoji, joined by U+200D


def pieces_of(tokenizer: object, ids: Iterable[int]) -> list[str]:
    """What each token adds to the text, and at the end what `finish` adds."""
    detokenizer = Detokenizer(tokenizer)
    pieces, sent = [], 0
    for token_id in ids:
        detokenizer.add(token_id)
        pieces.append(detokenizer.text[sent:])
        sent = len(detokenizer.text)
    detokenizer.finish()
    return [*pieces, detokenizer.text[sent:]]


def byte_tokenizer() -> Tokenizer:
    return engine().tokenizer


# ---------------------------------------------------------------- characters over several tokens


@pytest.mark.parametrize("text", [GREETING, THUMB, FAMILY, "a👍🏽b", "é", "🇨🇭 e\u0301", "\u0939\u093f\u0928"])
def test_no_half_characters(text):
    """Decoding token by token turns each byte of a Chinese character into a replacement mark. Each character must come
    whole, with the token that completes it and no later."""
    pieces = pieces_of(byte_tokenizer(), text.encode())
    expected = [piece for char in text for piece in [""] * (len(char.encode()) - 1) + [char]]
    assert pieces == [*expected, ""]


def test_a_token_may_end_one_character_and_begin_the_next():
    """Holding a token back until its text has no replacement mark holds 你 until 好 is complete, or for ever."""
    tokenizer = PieceTokenizer([b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", b"OK\xf0\x9f", b"\x91\x8d!"])
    assert pieces_of(tokenizer, [0, 1, 2, 3, 4]) == ["", "你", "好", "OK", "👍!", ""]


def test_unfinished_bytes_at_the_very_end():
    """max_tokens falls into a character: its bytes vanished, or were shown while they could still become one."""
    tokenizer = byte_tokenizer()
    assert pieces_of(tokenizer, "你好".encode()[:-1]) == ["", "", "你", "", "", REPLACEMENT]
    assert pieces_of(tokenizer, b"a" + "👍".encode()[:3]) == ["a", "", "", "", REPLACEMENT]
    assert pieces_of(tokenizer, b"\x80\x80") == ["", "", REPLACEMENT * 2]


def test_a_broken_character_does_not_hold_up_what_follows():
    """Bytes that are no character at all blocked the stream until its end."""
    assert pieces_of(byte_tokenizer(), b"a\xe4\xbdbc") == ["a", "", "", REPLACEMENT + "b", "c", ""]


def test_a_replacement_mark_that_the_model_wrote_is_kept():
    """U+FFFD is a character like others: dropping it as 'unfinished' loses text."""
    text = f"a{REPLACEMENT}b{REPLACEMENT}{REPLACEMENT}你{REPLACEMENT}"
    assert "".join(pieces_of(byte_tokenizer(), text.encode())) == text


def test_interleaved_detokenizers_do_not_mix():
    """One decoding state for the engine gave a request the half character of its neighbour."""
    texts = [GREETING, THUMB + FAMILY, "plain text, no more", "ÄÖÜ" * 5]
    streams = [(text.encode(), Detokenizer(byte_tokenizer())) for text in texts]
    for i in range(max(len(ids) for ids, _ in streams)):
        for ids, detokenizer in streams:
            if i < len(ids):
                detokenizer.add(ids[i])
    assert [detokenizer.text for _, detokenizer in streams] == texts


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_in_half_a_character(cut):
    """Decoding prompt and output together, to find the new part, let the prompt's text leak into the first piece."""
    llm = engine()
    emoji = "👍".encode()
    prompt = list("Say 你好 and ".encode() + emoji[:cut])
    output_ids = list(emoji[cut:] + "!你".encode())
    with scripted(llm, force(output_ids, 259), len(prompt)):
        text = "".join(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=len(output_ids))))
    assert text == llm.tokenizer.decode(output_ids) == REPLACEMENT * (4 - cut) + "!你"


# ---------------------------------------------------------------- joined pieces equal the decoding at once


@given(st.text(max_size=30))
def test_any_text_comes_back(text):
    """Whatever the model writes is what the user reads, and no piece has a mark that the text lacks."""
    pieces = pieces_of(byte_tokenizer(), text.encode())
    assert "".join(pieces) == text
    assert "".join(pieces).count(REPLACEMENT) == text.count(REPLACEMENT)


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0x80, 0xFF), st.sampled_from([256, 257, 258])), max_size=30))
def test_any_ids_decode_as_at_once(ids):
    """Broken bytes, special tokens (256 to 258) and ids without text (259 and above): the stream must be what decoding
    all ids at once gives. A special token between the bytes of a character used to tear it apart."""
    tokenizer = byte_tokenizer()
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_tokens_without_text_are_not_kept():
    """With ignore_eos a model goes on making end tokens: each of them was decoded together with all before it."""
    tokenizer, lengths = byte_tokenizer(), []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: lengths.append(len(ids)) or decode(ids)
    assert "".join(pieces_of(tokenizer, [*b"ab", *[258, 300] * 100, *b"c"])) == "abc"
    assert max(lengths) <= 3


@given(st.text("aé你👍", min_size=1, max_size=12), st.data())
def test_any_split_into_tokens(text, data):
    """A vocabulary may cut the bytes of a text anywhere. All that is certain must be out after every token."""
    whole = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=len(whole)))) if len(whole) > 1 else []
    tokens = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    pieces = pieces_of(PieceTokenizer(tokens), range(len(tokens)))
    ends = [*cuts, len(whole), len(whole)]
    assert ["".join(pieces[: i + 1]) for i in range(len(pieces))] == [
        whole[:end].decode(errors="ignore") for end in ends
    ]


# ---------------------------------------------------------------- SentencePiece's way


SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["▁", "▁▁", "a", "b", "▁a", "▁the", "!"]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """A tokenizer as Llama 2 has it: a space is the mark ▁ at the beginning of a word, the first one of a text is
    dropped, and a character outside of the vocabulary is spelled in byte tokens."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    fast = Fast(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    mark = decoders.Replace("▁", " ")
    fast.decoder = decoders.Sequence([mark, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    folder = tmp_path_factory.mktemp("sentencepiece")
    hf = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    hf.save_pretrained(folder)
    return Tokenizer(folder)


def spelled(*tokens: str) -> list[int]:
    """Ids of words and special tokens of the tokenizer above; anything else is spelled in bytes."""
    names = [*SPECIAL, *[None] * 256, *WORDS]
    return [
        i for token in tokens for i in ([names.index(token)] if token in names else [3 + b for b in token.encode()])
    ]


def test_spaces_between_words(sentencepiece):
    """Alone, each word is decoded without its space: thecatsat."""
    assert pieces_of(sentencepiece, spelled("▁the", "▁a", "b", "▁the")) == ["the", " a", "b", " the", ""]


def test_byte_tokens_make_one_character(sentencepiece):
    """Byte tokens decoded one by one are marks; a run of them is decoded as a whole, so 好 changes how 你 is seen."""
    ids = spelled("▁a", "你", "好", "!")
    assert pieces_of(sentencepiece, ids) == ["a", "", "", "你", "", "", "好", "!", ""]


def test_space_after_a_special_token(sentencepiece):
    """The word after an ignored end token was decoded as if it began the text, and its space was lost."""
    ids = spelled("▁a", "</s>", "▁the", "</s>", "<s>", "▁a")
    assert "".join(pieces_of(sentencepiece, ids)) == sentencepiece.decode(ids) == "a the a"


@given(ids=st.lists(st.sampled_from([*WORDS, *SPECIAL, "é", "你", "👍"]), max_size=14).map(lambda t: spelled(*t)))
def test_any_words_decode_as_at_once(sentencepiece, ids):
    """As with the byte tokenizer: the joined pieces are the decoding of all ids at once."""
    assert "".join(pieces_of(sentencepiece, ids)) == sentencepiece.decode(ids)


@given(words=st.lists(st.sampled_from([*WORDS, "é", "你", "👍"]), max_size=8), last=st.sampled_from("é你👍"))
def test_text_cut_within_a_character(sentencepiece, words, last):
    """Decoding a run of byte tokens that ends in half a character makes marks of the whole run: what was shown before
    must stay, and marks may follow only for the half."""
    text = "".join(pieces_of(sentencepiece, spelled(*words, last)[:-1]))
    assert text.rstrip(REPLACEMENT) == sentencepiece.decode(spelled(*words))


@pytest.mark.parametrize("words", [0, 30, 40])
def test_characters_in_bytes_after_much_that_nobody_read(sentencepiece, words):
    """Two streams run side by side and one is read late: its window is long, though nothing in it is broken."""
    ids = spelled(*["▁the"] * words, *"你好吗你好吗你好吗", "!")
    for first in range(len(ids)):
        detokenizer = Detokenizer(sentencepiece)
        for i, token_id in enumerate(ids):
            detokenizer.add(token_id)
            assert i < first or REPLACEMENT not in detokenizer.text
        detokenizer.finish()
        assert detokenizer.text == sentencepiece.decode(ids)


@pytest.mark.parametrize("each", [True, False])
def test_a_broken_run_of_byte_tokens_is_marks_to_its_end(sentencepiece, each):
    """However long it is: a window that forgets the byte that broke the run takes the rest for characters."""
    ids = [*spelled("▁a"), 3 + 0xFF, *spelled(*"你好吗" * 20, "▁the", "!")]
    detokenizer, shown = Detokenizer(sentencepiece), 0
    for token_id in ids:
        detokenizer.add(token_id)
        shown = len(detokenizer.text) if each else shown
    detokenizer.finish()
    assert detokenizer.text == sentencepiece.decode(ids) and shown <= len(detokenizer.text)
