"""Text to token ids and back. (A given file: it may be skipped.)

`Tokenizer` wraps the tokenizer that lies beside the weights. `Detokenizer` turns ids into text one at a time, and that
takes care: a Chinese character or an emoji may be spread over several tokens, and a stop string too. Text is only
released once no later token can change or cut it:

    ids     e4 bd | a0 e5 | a5 bd              stop=["END"]   "the E" | "N" | "vy"
    text    ""    | "你"  | "好"                               "the "  | ""  | "ENvy"

The joined pieces are the text of the output, and equal the decoding of all output ids at once.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from .inputs import read_json

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


class Tokenizer:
    """The Hugging Face tokenizer of a model folder, behind the calls that the engine needs.

    special_ids: text -> id of the special tokens, which `decode` leaves out.
    """

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # imported late: it takes seconds

        # tokenizer.json says it all. AutoTokenizer may take the class that config files name, which builds another one
        # from the same vocabulary; and it may ask on the terminal whether to run code that lies in the folder.
        has_json = (Path(folder) / "tokenizer.json").exists()
        try:
            kind = PreTrainedTokenizerFast if has_json else AutoTokenizer
            self.hf = kind.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # their errors do not say which file is damaged
            for file in sorted(Path(folder).glob("*token*.json")):
                read_json(file)
            raise ValueError(f"{folder}: its tokenizer cannot be read: {error}") from error
        added = self.hf.added_tokens_decoder.items()
        self.special_ids = {token.content: token_id for token_id, token in added if token.special}
        self._ids_with_text = set(self.hf.get_vocab().values()) - set(self.special_ids.values())
        self._adds_bos = self.hf.bos_token_id is not None and self.hf.encode("")[:1] == [self.hf.bos_token_id]

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids that stand for single bytes where the decoder puts them together. Those that are no character spoil the
        good ones in front of them: it matters what is decoded at once."""
        if "ByteFallback" not in str(self.hf.backend_tokenizer.decoder):
            return frozenset()
        return frozenset(i for token, i in self.hf.get_vocab().items() if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token))

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    def end_ids(self, stop: Iterable[str], vocab_size: int) -> list[int]:
        """Ids of the stop strings that are special tokens: the text is without them, nobody would find them there."""
        ids = [self.special_ids[text] for text in stop if text in self.special_ids]
        return [token_id for token_id in ids if token_id < vocab_size]

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` writes it: not a special token, and none that the tokenizer does not know."""
        return token_id in self._ids_with_text

    def encode(self, text: str) -> list[int]:
        """Ids of a text. A BOS token is added if the tokenizer does so, but not if the text begins with one."""
        try:
            ids = self.hf.encode(text)
        except (TypeError, UnicodeError) as error:  # lone surrogates
            raise ValueError(f"the prompt {text[:40]!r} is not valid Unicode text: {error}") from None
        return ids[1:] if self._adds_bos and ids[:2] == [self.hf.bos_token_id] * 2 else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens left out. Ids that the tokenizer does not know give nothing."""
        return self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_text(self, token_id: int) -> str:
        """One token as it is written, special tokens included; for the eyes of a reader of logprobs."""
        return self.hf.decode([token_id], clean_up_tokenization_spaces=False)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def apply_chat_template(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins. Raises ValueError if that is impossible."""
        if not self.has_chat_template:
            raise ValueError("this model's tokenizer has no chat template; give generate() the prompt as text instead")
        _check_messages(messages)
        try:
            return self.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # the template itself refuses: wrong order of roles, an unknown role, ...
            raise ValueError(f"the chat template of this model refuses the messages: {error}") from error


def _check_messages(messages: object) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages={messages!r:.80}: expected a non-empty list of {{'role': ..., 'content': ...}}")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"message {message!r:.80}: expected a dict with 'role' and 'content'")
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                raise ValueError(f"message {message!r:.80}: {key!r} must be text")
            try:
                message[key].encode()
            except UnicodeError as error:  # lone surrogates
                raise ValueError(f"message {message!r:.80}: {key!r} is not valid Unicode text: {error}") from None


class Detokenizer:
    """Incremental text of one output. One object per sequence; it holds no reference to the prompt.

    `text` is what has been released so far. The last tokens are kept in a window that is decoded anew with each token,
    because how a token is written can depend on the token before it. Without stop strings nothing is decoded before
    somebody asks for the text: decoding each token of 256 sequences takes the CPU longer than a step takes the GPU.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._text = ""
        self._unread: list[int] = []  # tokens that nobody has wanted to read yet
        self._tokenizer = tokenizer
        self._stop = stop
        self._window: list[int] = []
        self._complete = 0  # so many tokens of the window end with a character
        self._taken = 0  # characters of the window's text that `_decode` has returned
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._num_early = 0  # so many characters of that came before a stop string counts

    @property
    def text(self) -> str:
        """What has been released so far."""
        if self._unread:
            pieces = [self._unread]
            bytes_ = getattr(self._tokenizer, "byte_ids", frozenset())
            if not bytes_.isdisjoint(self._window + self._unread):  # what is good of a run depends on what follows
                pieces = [[token_id] for token_id in self._unread]
            self._text += "".join(self._decode(piece) for piece in pieces)
            self._unread = []
        return self._text

    def add(self, token_id: int, may_stop: bool = True) -> bool:
        """Take one more token. Returns True if a stop string is complete; the text then ends before it."""
        if not self._stop:
            self._unread.append(token_id)
            return False
        self._held += self._decode([token_id])
        if may_stop:
            cut = _earliest(self._held, self._stop, self._num_early)
            if cut is not None:
                self._text += self._held[:cut]
                self._held = ""
                self._window.clear()
                return True
        else:
            self._num_early = len(self._held)
        keep = _stop_prefix_length(self._held, self._stop)
        released = len(self._held) - keep
        self._text += self._held[:released]
        self._held = self._held[released:]
        self._num_early = max(0, self._num_early - released)
        return False

    def finish(self) -> None:
        """No more tokens: release what was held back, unfinished characters as replacement marks."""
        self._text = self.text + self._held + self._tokenizer.decode(self._window)[self._taken :]
        self._held = ""
        self._window.clear()

    def _decode(self, token_ids: list[int]) -> str:
        """Text that these tokens add or complete, without what may be half a character at its end."""
        token_ids = [token_id for token_id in token_ids if self._tokenizer.has_text(token_id)]
        if not token_ids:
            return ""
        self._window += token_ids
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._taken :]
        self._taken += len(new)
        if new and certain == text:  # the next window begins where this one was complete before
            del self._window[: self._complete]
            self._complete = len(self._window)
            self._taken = len(self._tokenizer.decode(self._window))
        return new


def _earliest(text: str, stop: tuple[str, ...], num_early: int) -> int | None:
    """Where the stop string that is complete first begins: the same however the text falls into tokens. One that is
    complete within the first num_early characters does not count."""
    places = [(string, text.find(string, max(0, num_early + 1 - len(string)))) for string in stop]
    found = [(at + len(string), at) for string, at in places if at >= 0]
    return min(found)[1] if found else None


def _stop_prefix_length(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string."""
    longest = 0
    for string in stop:
        for size in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:size]):
                longest = size
                break
    return longest
