"""Sequence: one request's way through the engine, and what comes out of it.

    WAITING  ->  RUNNING (holds KV blocks)  ->  FINISHED (finish_reason: "stop" | "length" | "abort" | "error")
       ^            |      ^
       |  recompute |      | swap in
       +------------+      |
                    +->  SWAPPED (its blocks are in host memory)

A generation is no function call: it is a loop of tens to thousands of steps, and between two steps everything that the
engine knows of it lies here: the tokens so far, how to sample, when to stop, the text so far, and when each token came.
"""

import time
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from .sampling import NO_TOKEN, Logprob, SamplingParams
from .tokenizer import Detokenizer


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass
class RequestMetrics:
    """Times of one request, in seconds of one monotonic clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    finish_time: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def queue_time(self) -> float | None:
        """From arrival until the first step that worked on it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gap before each token but the first."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def first_token_time(self) -> float | None:
        return self.token_times[0] if self.token_times else None


@dataclass(frozen=True)
class CompletionOutput:
    """text without stop token and stop string; token_ids with the stop token; logprobs: one dict per token.

    finish_reason: "stop", "length", "abort", or "error": the logits were no numbers.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None if it was given as ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


class Sequence:
    """One request, or one of its n samples.

    stop_token_ids: the ids that end it (the model's own end tokens, unless ignored, and the request's).
    max_output_tokens: what max_tokens, the context and the pool leave, at least 1. seed: 64 bits that its
    random numbers hang on.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        stop_token_ids: tuple[int, ...],
        max_output_tokens: int,
        detokenizer: Detokenizer,
        prompt: str | None = None,
        index: int = 0,
    ):
        self.request_id = request_id
        self.index = index  # of the n samples
        self.seq_id = f"{request_id}/{index}" if index else request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.max_output_tokens = max_output_tokens
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)  # prompt and output
        self.num_computed_tokens = 0  # the first so many have their K and V in the cache
        self.num_lost_tokens = 0  # computed once, and dropped: the first so many are computed a second time
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())
        self._detokenizer = detokenizer

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens still to be computed: the whole prompt at first, then the one that was sampled last."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def text(self) -> str:
        """The output's text so far, without what may still become a stop string or half a character."""
        return self._detokenizer.text

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def start(self) -> None:
        """It has its blocks, for the first time or again."""
        self.status = SequenceStatus.RUNNING
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = time.perf_counter()

    def restart(self) -> None:
        """Its blocks are gone: prompt and output are computed again, like a prompt. What was sampled stays."""
        self.status = SequenceStatus.WAITING
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0

    def append_token(self, token_id: int) -> None:
        """Take the token that was sampled, and finish if it ends the output."""
        if token_id == NO_TOKEN:
            self.finish("error")
            return
        self.token_ids.append(token_id)
        self.metrics.token_times.append(time.perf_counter())
        may_stop = self.num_output_tokens >= self.params.min_tokens
        if (may_stop and token_id in self.stop_token_ids) or self._detokenizer.add(token_id, may_stop):
            self.finish("stop")
        elif self.num_output_tokens >= self.max_output_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """reason: "stop", "length", "abort" or "error". Text held back is released. A finished sequence stays so."""
        if self.is_finished:
            return
        self._detokenizer.finish()
        self.finish_reason = reason
        self.metrics.finish_time = time.perf_counter()
        self.status = SequenceStatus.FINISHED  # last: who is finished is complete, whatever fails after it

    def to_completion(self) -> CompletionOutput:
        return CompletionOutput(self.index, self.text, self.output_token_ids, self.finish_reason, self.logprobs)


class SequenceGroup:
    """The n samples of one prompt. They wait, run, are preempted and returned together.

    The first one computes the prompt; then the others fork from it: they share its blocks and go their own ways.
    """

    def __init__(self, seqs: list[Sequence]):
        self.request_id = seqs[0].request_id
        self.seqs = seqs
        self.is_forked = len(seqs) == 1
        self.failure = ""  # the error of a step that ended it

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.seqs if not seq.is_finished]

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.seqs)

    @property
    def active(self) -> list[Sequence]:
        """Those that compute: all that are unfinished, but before the fork only the first of them."""
        return self.unfinished if self.is_forked else self.unfinished[:1]

    @property
    def status(self) -> SequenceStatus:
        """That of those which are unfinished: they wait, run and are swapped together."""
        return next((seq.status for seq in self.seqs if not seq.is_finished), SequenceStatus.FINISHED)

    @property
    def is_new(self) -> bool:
        """It has not begun, so a static batch that runs may keep it out."""
        return self.metrics.first_scheduled_time is None

    @property
    def metrics(self) -> RequestMetrics:
        """Those of the first sample; finish_time is that of the last one to finish."""
        return self.seqs[0].metrics

    def target_len(self, seq: Sequence) -> int:
        """Up to where `seq` computes: all its tokens, but before the fork only the prompt, which the others share."""
        return seq.num_tokens if self.is_forked else seq.num_prompt_tokens

    def restart(self) -> None:
        """All blocks are gone. The first unfinished one computes the prompt; the others fork, each with its output."""
        for seq in self.unfinished:
            seq.restart()
        self.is_forked = len(self.unfinished) == 1

    def finish(self, reason: str) -> None:
        for seq in self.seqs:
            seq.finish(reason)

    def to_output(self) -> RequestOutput:
        first = self.seqs[0]
        completions = [seq.to_completion() for seq in self.seqs]
        prompt_ids = first.token_ids[: first.num_prompt_tokens]
        return RequestOutput(self.request_id, first.prompt, prompt_ids, completions, self.is_finished, self.metrics)
