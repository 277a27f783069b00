"""Stand-ins that make the engine predictable: a model that follows a script, a tokenizer with given pieces.

With them the tests of stopping, text and sampling know what must come out, without a real model. They hold in every
stage: the "hidden states" of the script are the tokens' positions, so it does not matter how many tokens a step feeds,
whether there is a cache, or which sequences share the batch.
"""

import functools
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from .. import LLM, SamplingParams
from ..sequence import CompletionOutput
from ..zoo import tiny_folder

PACKAGE = __package__.rpartition(".")[0]
ROOT = Path(__file__).parents[2]  # where `python -m PACKAGE` finds the package


def new_engine(model: str | Path = "tiny", **options) -> LLM:
    """An engine of one's own, on the CPU in float64, where equal work gives equal bits."""
    return LLM(str(model), **{"device": "cpu", "dtype": "float64"} | options)


@functools.cache
def engine(**options) -> LLM:
    """The shared engine with these options: leave it as it was."""
    return new_engine(**options)


def complete(llm: LLM, prompt: str | list[int], **params) -> CompletionOutput:
    """One request, greedy unless the parameters say otherwise."""
    return llm.generate([prompt], SamplingParams(**{"temperature": 0.0} | params), use_tqdm=False)[0].outputs[0]


class ScriptModel(torch.nn.Module):
    """A model whose logits for output token i are rows[i], whatever the tokens are; the last row goes on for ever."""

    def __init__(self, rows: torch.Tensor, prompt_len: int):
        super().__init__()
        self.rows = rows
        self.prompt_len = prompt_len

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *more: object) -> torch.Tensor:
        """-> [T, 1]: where each token stands."""
        return positions[:, None]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        index = hidden[:, 0] + 1 - self.prompt_len
        return self.rows[index.clamp(max=len(self.rows) - 1)]


def force(tokens: Iterable[int], vocab: int) -> torch.Tensor:
    """Logits [n, vocab] that leave no choice but these tokens, at any sensible temperature."""
    tokens = torch.tensor(list(tokens))
    return torch.full((len(tokens), vocab), -200.0, dtype=torch.float64).scatter_(1, tokens[:, None], 0.0)


@contextmanager
def scripted(llm: LLM, rows: torch.Tensor, prompt_len: int, tokenizer: object = None) -> Iterator[LLM]:
    """The engine with a ScriptModel in place of its model, and perhaps another tokenizer."""
    real = llm.model_runner.model, llm.tokenizer
    llm.model_runner.model, llm.tokenizer = ScriptModel(rows, prompt_len), tokenizer or llm.tokenizer
    try:
        yield llm
    finally:
        llm.model_runner.model, llm.tokenizer = real


def play(
    llm: LLM, tokens: Sequence[int], prompt: Sequence[int] = (65,), tokenizer: object = None, **params
) -> CompletionOutput:
    """What comes out when the model wants these tokens. Checks on the way that the stream is the same text."""
    prompt = list(prompt)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": len(tokens)} | params)
    with scripted(llm, force(tokens, llm.model_config.vocab_size), len(prompt), tokenizer):
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        pieces = list(llm.stream(prompt, params))
    assert "".join(pieces) == output.text, f"the stream {pieces} is not the text {output.text!r}"
    assert all(pieces), "an empty piece tells the reader nothing"
    return output


class PieceTokenizer:
    """Token i is pieces[i]: text, or bytes where it holds half a character. Other ids have no text."""

    eos_token_id = None
    has_chat_template = False

    def __init__(self, pieces: Sequence[str | bytes]):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def has_text(self, token_id: int) -> bool:
        return token_id < len(self.pieces)

    def end_ids(self, stop: Sequence[str], vocab_size: int) -> list[int]:
        return []

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.pieces[i] for i in ids if i < len(self.pieces)).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file, which is made if need be."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def tiny_checkpoint(folder: Path, **config: object) -> Path:
    """A copy of the model `tiny` whose config.json has these changes, to be edited further. Returns the folder."""
    shutil.copytree(tiny_folder(), folder, dirs_exist_ok=True)
    edit_json(folder / "config.json", **config)
    return folder
