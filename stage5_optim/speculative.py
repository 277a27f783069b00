"""Speculative decoding: guess the next tokens cheaply, and let the model check all of them in one step.

A step that decodes reads all weights to compute one token for each sequence, and the GPU's arithmetic idles meanwhile.
Computing 1 + k tokens of a sequence takes hardly longer. So somebody drafts k tokens, and the step computes the last
known token and the drafts behind it, as if they were a piece of a prompt:

    known ... the        drafts  cat sat on        computed  the  cat  sat  on
                                                   sampled   cat  sat  by   x        what the model says comes next
                                                   kept      cat  sat  by            two drafts were right, and one more

Row by row: what is sampled behind "the" is the next token in any case. If it is the draft "cat", then the row of "cat"
has seen the true text, and what is sampled there is the token after that; and so on up to the first draft that is
wrong. Its row and those behind it are dropped, and the places of their K and V in the cache are given back. Every step
keeps 1 to 1 + k tokens, so drafts that are always wrong cost rows, but no steps.

Why this is exact, at any temperature. Noise is a function of (seed, output position, token id), see sampling.py: what
comes after a text is one certain token. A row is only used if all drafts before it were what was sampled, so it saw the
very text, position and noise that it would have seen without drafts. Hence the output is not only distributed as the
model's, it is the same output, whoever drafts, with every parameter of sampling (a row's penalties count the drafts in
front of it). Floating point apart: a row of many may round otherwise than a row alone.

It is rejection sampling (Leviathan et al., arXiv 2211.17192) in another form. There a draft x, drawn from q, is kept
with probability min(1, p(x) / q(x)), else a token is drawn from what p has more than q. If the draft is certain (an
n-gram) that is: keep x with probability p(x), else draw from p without x. Here the draw is x with probability p(x), and
if it is not, it is distributed as p without x: the same. If the draft is sampled by a draft model with the same noise,
the two draws are the same token with probability (1 - d) / (1 + d) at least, where d is the total variation distance of
p and q. Theirs reaches 1 - d, but its output depends on the draft. Source of the bound: arXiv 2408.07978.
"""

import logging
import os
import time
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .config import ModelConfig, SchedulerConfig, check_choice, check_int, reject_unknown
from .sequence import Sequence

if TYPE_CHECKING:
    from .batch import Batch, Scheduled
    from .block_manager import BlockManager
    from .metrics import Metrics, StepRecord

logger = logging.getLogger(__package__)

LOG_SECONDS = 10.0  # between two lines on how many drafts were right
LONGEST_NGRAM = 32  # each token adds an n-gram of each length to the table: some KB for 32 of them


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts, and how many tokens a step.

    method: "ngram" looks for the last tokens earlier in the text, and drafts what came after them there. model: any
    checkpoint with the same tokens that is faster than the target (see draft_model.py); give one of the two.
    num_tokens: most drafts of a sequence in one step. max_ngram, min_ngram: of "ngram" alone, so many last tokens are
    looked for, more of them first; 32 at most.
    """

    method: str | None = None
    model: str | os.PathLike | None = None
    num_tokens: int = 4
    max_ngram: int = 4
    min_ngram: int = 2

    def __new__(cls, *args, **options):
        reject_unknown(options, [f.name for f in fields(cls)], cls.__name__)
        return super().__new__(cls)

    def __post_init__(self):
        check_choice("method", self.method, ("ngram", None))
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ValueError(f"model={self.model!r}: expected a name, a folder or a hub id, or None")
        if (self.method is None) == (self.model is None):
            raise ValueError(
                f"method={self.method!r}, model={self.model!r}: expected one of the two, method='ngram' or the name of "
                "a draft model"
            )
        own = [name for name in ("max_ngram", "min_ngram") if getattr(self, name) != getattr(type(self), name)]
        if own and self.method is None:
            raise ValueError(
                f"{own[0]}={getattr(self, own[0])!r} belongs to method='ngram'; a draft model has no use for it"
            )
        for name in ("num_tokens", "max_ngram", "min_ngram"):
            check_int(name, getattr(self, name), minimum=1)
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={self.min_ngram} is more than max_ngram={self.max_ngram}")
        if self.max_ngram > LONGEST_NGRAM:
            raise ValueError(f"max_ngram={self.max_ngram}: expected at most {LONGEST_NGRAM}, as all n-grams are kept")

    def __str__(self) -> str:
        return f"up to {self.num_tokens} drafts by {self.method or self.model}"


class Ahead:
    """A sequence as it will be if these drafts are right: what is sampled behind the last of them belongs to that."""

    def __init__(self, seq: Sequence, drafts: list[int]):
        self.seq = seq
        self.drafts = drafts
        self.num_output_tokens = seq.num_output_tokens + len(drafts)
        self.params, self.seed, self.inverse_temperature = seq.params, seq.seed, seq.inverse_temperature  # asked often

    @property
    def token_ids(self) -> list[int]:
        return self.seq.token_ids + self.drafts

    def __getattr__(self, name: str) -> object:
        return getattr(self.seq, name)  # all else is the same


def sampled_of(item: "Scheduled") -> list[Sequence | Ahead]:
    """For whom a token is sampled, in the order of the rows: the sequence, as it is and as far ahead as its drafts go,
    and the other samples of its prompt if they begin here."""
    if not item.drafts:
        return [item.seq, *item.forks]
    return [item.seq, *(Ahead(item.seq, item.drafts[:count]) for count in range(1, len(item.drafts) + 1))]


def is_true(seq: Sequence | Ahead, found: list[int]) -> bool:
    """Whether a row saw the true text, given the tokens that the rows before it have found."""
    return not isinstance(seq, Ahead) or seq.drafts == found


class Proposer:
    """Who drafts. This one never does."""

    tokens_forwarded = 0  # through a draft model, since the start
    makes_all = False  # that it is asked for, and works for each of them

    def propose(self, wanted: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        """Drafts for these sequences, at most so many each; who is left out gets none."""
        return {}

    def forget(self) -> None:
        """After an error: whatever is known of any sequence may be half done."""

    def leave_room(self, room: int, target: ModelConfig, graph_sizes: list[int]) -> int:
        """Of so many bytes of a GPU, those that are left for the target's KV."""
        return room

    def make_cache(self, num_blocks: int, config: SchedulerConfig) -> None:
        """Make what is needed beside weights, now that the target has so many blocks."""


class NgramIndex:
    """Where each n-gram of one text ended last. What comes behind its last tokens is looked up, not searched for.

        a b c d e a b      the last two tokens, "a b", came before; behind them stood "c d e"
        x y x y x          "y x" came before; behind it "y x y x ...": a copy may run into itself, as in LZ77

    Grows with the text, and never looks at a token twice.
    """

    def __init__(self, min_ngram: int, max_ngram: int):
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._ends: dict[tuple[int, ...], int] = {}
        self._known = 0  # the n-grams are in that end with the first so many tokens, or earlier

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens, if the text goes on as it did before; [] if its last tokens are new."""
        self._extend(tokens)
        start = self._find(tokens)
        if start is None:
            return []
        drafts: list[int] = []
        for at in range(start, start + count):
            drafts.append(tokens[at] if at < len(tokens) else drafts[at - len(tokens)])
        return drafts

    def _extend(self, tokens: list[int]) -> None:
        """Note all n-grams but those that end with the text: these are looked for."""
        for end in range(self._known + 1, len(tokens)):
            for size in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
            self._known = end

    def _find(self, tokens: list[int]) -> int | None:
        """Behind the last place where as many of the last tokens as possible came before."""
        for size in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            start = self._ends.get(tuple(tokens[len(tokens) - size :]))
            if start is not None:
                return start
        return None


class NgramProposer(Proposer):
    """Prompt look-up: answers quote their prompt and themselves. Costs nothing but a look into a table.

    Source: prompt lookup decoding (Saxena, 2023); LLMA (Yang et al., arXiv 2304.04487).
    """

    def __init__(self, config: SpeculativeConfig):
        self._config = config
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, wanted: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        return {seq: self._index(seq).propose(seq.token_ids, count) for seq, count in wanted.items()}

    def forget(self) -> None:
        self._indices.clear()

    def _index(self, seq: Sequence) -> NgramIndex:
        if seq not in self._indices:
            self._indices[seq] = NgramIndex(self._config.min_ngram, self._config.max_ngram)
        return self._indices[seq]


class Speculator:
    """Puts drafts into a step's plan, and takes back what was wrong.

    Drafts get what is left over: of the step's budget when everybody has its tokens, of the blocks when all who wait
    and fit have been admitted, of the rows of the largest CUDA graph (most_rows; None: there are no graphs). Nobody
    waits or is preempted for a draft, and no step is launched kernel by kernel because of them.
    """

    def __init__(self, proposer: Proposer, num_tokens: int, block_manager: "BlockManager", most_rows: int | None):
        self.proposer = proposer
        self.num_tokens = num_tokens
        self.block_manager = block_manager
        self.most_rows = most_rows
        self._num_counted = 0  # of the draft model's tokens
        self._next_log = time.perf_counter() + LOG_SECONDS

    def add_drafts(self, batch: "Batch") -> None:
        """Drafts for all that decode, the oldest first, as far as budget, rows and blocks go."""
        num_tokens = sum(item.num_tokens for item in batch.scheduled)
        if self.most_rows is not None and num_tokens <= self.most_rows:  # else there is no graph for it in any case
            batch.left = min(batch.left, self.most_rows - num_tokens)
        drafts = self.proposer.propose(self._rooms(batch))
        for i, item in enumerate(batch.scheduled):
            count = min(len(drafts.get(item.seq, ())), batch.left)
            count = self._grow(item.seq, count, batch) if count else 0
            if count:
                chosen = drafts[item.seq][:count]
                batch.scheduled[i] = replace(item, num_tokens=item.num_tokens + count, drafts=chosen)
                batch.left -= count

    def _rooms(self, batch: "Batch") -> dict[Sequence, int]:
        """How many drafts to ask for. Together more than fit, unless each costs work: most texts get fewer."""
        rooms, left = {}, batch.left
        for item in batch.scheduled:
            if (room := min(left, self._room(item, batch))) > 0:
                rooms[item.seq] = room
                left -= room * self.proposer.makes_all
        return rooms

    def _room(self, item: "Scheduled", batch: "Batch") -> int:
        """Most drafts that could be of use. The step adds one token more than drafts are right, and that is the end."""
        if not item.is_decode or item.forks:
            return 0
        return min(self.num_tokens, batch.left, item.seq.max_output_tokens - item.seq.num_output_tokens - 1)

    def _grow(self, seq: Sequence, count: int, batch: "Batch") -> int:
        """Take blocks for so many drafts, or for as many as there are blocks. Returns how many that are."""
        manager, end = self.block_manager, seq.num_tokens
        while count and manager.num_blocks_to_grow({seq.seq_id: end + count}) > manager.num_free_blocks:
            count -= 1
        batch.moves.copies += manager.grow({seq.seq_id: end + count})
        return count

    def take_back(self, item: "Scheduled", num_right: int, record: "StepRecord") -> None:
        """The step's tokens are appended. Forget K and V of the drafts that are not among them, and count the others.

        num_right: drafts that were sampled; some of them may lie behind a stop.
        """
        seq = item.seq
        num_new = seq.num_tokens - (seq.num_computed_tokens - len(item.drafts))
        record.accepted_tokens += min(num_new, num_right)
        seq.num_computed_tokens = seq.num_tokens - 1
        self.block_manager.roll_back(seq.seq_id, seq.num_computed_tokens)

    def count(self, record: "StepRecord") -> None:
        """What the draft model has done for this step."""
        total = self.proposer.tokens_forwarded
        record.draft_tokens_forwarded, self._num_counted = total - self._num_counted, total

    def report(self, metrics: "Metrics") -> None:
        """Log, now and then, how many drafts were right."""
        if time.perf_counter() >= self._next_log and metrics.drafted_tokens:
            self._next_log = time.perf_counter() + LOG_SECONDS
            logger.info(f"{metrics.acceptance}, {metrics.drafted_tokens:,} drafts so far")


def make_speculator(
    proposer: Proposer, num_tokens: int, block_manager: "BlockManager", config: SchedulerConfig, most_rows: int | None
) -> Speculator | None:
    """The last things that drafting needs, now that pool and graphs are known. None if nobody drafts."""
    if num_tokens == 0:
        return None
    proposer.make_cache(block_manager.num_blocks, config)
    return Speculator(proposer, num_tokens, block_manager, most_rows)
