"""Sampling: how the next token is chosen from the logits. (A given file: it may be skipped.)

Each row of a batch has its own parameters, and they are applied in this order, in fp32:

    repetition_penalty   tokens seen in the prompt or the output lose score
    min_tokens           tokens that would end the output are forbidden so far
    temperature          divide; 0 (and anything under 1e-5) means greedy: the best token, and nothing below applies
    top_k                only the k best
    top_p                the best tokens until their probabilities add up to p; the one that crosses p is kept
    draw                 argmax(logits + Gumbel noise), which is a draw from softmax(logits)

The noise is no stream that calls advance. It is a function of (seed, output position, token id), computed by hashing:
neighbours in the batch, the batch's size or a restart of the request cannot change it, and torch's generator is
untouched. Source: the Gumbel-max trick (Maddison et al., arXiv 1411.0030); the 32-bit mixer is Wellons' lowbias32.
"""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields

import torch

from .config import check_int, reject_unknown

GREEDY_EPSILON = 1e-5
LARGEST = torch.finfo(torch.float32).max  # what is above it would be infinite when it meets the logits
NO_TOKEN = -1  # in place of an id, where the logits are no numbers
NO_NUMBERS = (
    "the logits are NaN or infinite: weights are broken, or a 16-bit dtype overflows (float16 ends at 65,504; try "
    "dtype='bfloat16' or 'float32')"
)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Every value is checked here, with a ValueError that says the limit.

    max_tokens: most tokens to make; None fills the context. min_tokens: no end before so many. temperature: 0 is
    greedy. top_k: 0 or -1 turns it off. top_p: in (0, 1]. repetition_penalty: above 0; 1 turns it off. seed: None draws
    one. stop: strings that end the output and are cut from it, or special tokens as they are written. stop_token_ids:
    ids that end it; they stay in token_ids and do not appear in the text. ignore_eos: the model's own end tokens do not
    end it. logprobs: report so many best tokens per position, as log-softmax of the raw logits; None reports nothing.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __new__(cls, *args, **options):
        reject_unknown(options, [f.name for f in fields(cls)], cls.__name__)
        return super().__new__(cls)

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(self, f.name, plain(getattr(self, f.name)))
        check_int("max_tokens", self.max_tokens, minimum=1, optional=True)
        check_int("min_tokens", self.min_tokens, minimum=0)
        check_int("top_k", self.top_k, minimum=-1)
        check_int("seed", self.seed, optional=True)
        check_int("logprobs", self.logprobs, minimum=0, optional=True)
        _check_number("temperature", self.temperature, 0.0, LARGEST, "at least 0 and finite")
        _check_number("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1", above=True)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, LARGEST, "above 0 and finite", above=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r}: expected True or False")
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_stop_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON


def plain(value: object) -> object:
    """Numbers and arrays of numpy and torch as Python's own."""
    return value.tolist() if hasattr(type(value), "tolist") else value


def _check_number(name: str, value: object, low: float, high: float, limit: str, above: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):
        raise ValueError(f"{name}={value!r}: expected a number {limit}")


def _as_stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, (list, tuple)):
        raise ValueError(f"stop={stop!r:.80}: expected a string or a list of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop={stop!r:.80}: expected non-empty strings")
    return tuple(strings)


def _as_stop_ids(ids: object) -> tuple[int, ...]:
    ids = () if ids is None else ids
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"stop_token_ids={ids!r:.80}: expected a list of token ids")
    ids = [plain(token_id) for token_id in ids]
    for token_id in ids:
        check_int("a stop_token_ids entry", token_id, minimum=0)
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class Logprob:
    """log-softmax of the raw logits for one token at one position, and its rank there (1 is the best)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def sample(logits: torch.Tensor, seqs: Rows) -> torch.Tensor:
    """Choose the next token of each row.

    logits [R, vocab] of any float dtype (raised to fp32 at least); seqs: R sequences, of which `params`, `seed`,
    `token_ids`, `num_output_tokens` and `stop_token_ids` are read. Returns ids [R], int64, on the logits' device.
    NO_TOKEN for a row with NaN, or whose best is infinite: any id would look like an answer.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = apply_penalties(logits, seqs)
    best, greedy = logits.max(dim=-1)  # NaN, if there is one
    is_sound = best.isfinite()
    greedy = torch.where(is_sound, greedy, NO_TOKEN)
    params = [seq.params for seq in seqs]
    if all(p.is_greedy for p in params):
        return greedy
    temperature = _column([1.0 if p.is_greedy else p.temperature for p in params], logits)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0, so nothing overflows
    logits = keep_top_k_top_p(logits, [p.top_k for p in params], [p.top_p for p in params])
    noise = gumbel_noise([seq.seed for seq in seqs], [seq.num_output_tokens for seq in seqs], logits)
    is_greedy = torch.tensor([p.is_greedy for p in params], device=logits.device)
    return torch.where(is_greedy | ~is_sound, greedy, (logits + noise).argmax(dim=-1))


def _column(values: list, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def apply_penalties(logits: torch.Tensor, seqs: Rows) -> torch.Tensor:
    """Repetition penalty and min_tokens, for the rows that ask for them. The given logits [R, vocab] stay."""
    rows = [row for row, seq in enumerate(seqs) if _needs_penalty(seq)]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        _penalise(logits[row], seqs[row])
    return logits


def _needs_penalty(seq) -> bool:
    return seq.params.repetition_penalty != 1.0 or seq.num_output_tokens < seq.params.min_tokens


def _penalise(logits: torch.Tensor, seq) -> None:
    """In place, on one row [vocab]."""
    factor = seq.params.repetition_penalty
    if factor != 1.0:
        seen = torch.tensor(sorted(set(seq.token_ids)), device=logits.device)
        scores = logits[seen]
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    if seq.num_output_tokens < seq.params.min_tokens:
        logits[list(seq.stop_token_ids)] = -math.inf


def keep_top_k_top_p(logits: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """Set to -inf what is not among the k best or outside the nucleus of mass p. logits [R, vocab]."""
    vocab = logits.shape[-1]
    top_k = [k if 0 < k < vocab else vocab for k in top_k]
    if all(k == vocab for k in top_k) and all(p == 1.0 for p in top_p):
        return logits
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    ordered = ordered.masked_fill(rank >= _column(top_k, rank), -math.inf)
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs  # of the tokens ranked above: 0 for the best one, which always stays
    limit = _column([p if p < 1.0 else math.inf for p in top_p], logits)
    ordered = ordered.masked_fill((mass_before >= limit) & (rank > 0), -math.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)


_MASK32 = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash of 32-bit values kept in int64: each input bit flips each output bit about half of the time."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def hash_bits(seeds: list[int], positions: list[int], vocab: int, device: torch.device) -> torch.Tensor:
    """Hash of (seed, position, token id) as 32-bit integers in int64: [R, vocab]."""
    seed = torch.tensor([[s & _MASK32, (s >> 32) & _MASK32] for s in seeds], device=device)  # [R, 2]
    position = torch.tensor(positions, device=device)[:, None]
    key = _mix(seed ^ _mix(position * 2 + torch.tensor([0, 1], device=device)))  # two 32-bit keys a row
    key = _mix(key ^ _mix(key.flip(-1) + 0x9E3779B9 & _MASK32))  # both keys depend on all 64 bits of the seed
    token = _mix(torch.arange(vocab, device=device) ^ key[:, :1])
    return _mix(token ^ key[:, 1:])


def gumbel_noise(seeds: list[int], positions: list[int], like: torch.Tensor) -> torch.Tensor:
    """-log(E) with E exponentially distributed, by (seed, position, token id). Shape and dtype of `like` [R, vocab]."""
    bits = hash_bits(seeds, positions, like.shape[-1], like.device)
    # u in (0, 1): the small values, which decide an argmax, keep all their digits; the largest stay below 1.
    u = ((bits.to(like.dtype) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> list[tuple[int, float, int]]:
    """(id, logprob, rank) of the `count` best tokens of one row [vocab], and of the chosen one."""
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    values, ids = logprobs.topk(min(count, len(logprobs)))
    rows = [(i, v, rank) for rank, (i, v) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1)]
    if token_id not in ids.tolist():
        rank = int((logprobs > logprobs[token_id]).sum()) + 1
        rows.append((token_id, logprobs[token_id].item(), rank))
    return rows
