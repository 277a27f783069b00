"""Scheduler: decides anew, at every step, which sequences run and with how many tokens each.

Every sequence has `num_computed_tokens` and tries to catch up with `num_tokens`. A prompt that has not been computed,
the next piece of a long prompt and one more token of a running text are the same thing: tokens that are missing. A step
may compute `max_num_batched_tokens` of them; who gets how many is the policy:

    static         a batch is formed, runs until its last member ends, and only then the next one is formed
    prefill_first  waiting prompts first, whole; when none can come in, one token for every running sequence
    mixed          one token for every running sequence first; what is left of the budget goes to pieces of prompts

            static                 mixed                      A, B, C, D: prompts; a, b, c, d: one token each
    step    1  2  3  4  5  6       1  2  3  4  5  6           .: a slot that computes nothing
    slot 0  A  a  a  a  a  C       A  a  a  a  a
    slot 1  B  b  .  .  .  D       B  b  C  c  D  d           A makes 5 tokens; B, C and D 2 each

First come, first served: whoever cannot be admitted makes those behind it wait, so nobody waits for ever. Containers
are ordered; nothing is decided by the order of a set. Source: Orca, section 4.1 (OSDI 2022); chunks: Sarathi-Serve
(arXiv 2403.02310).
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice

from .config import SchedulerConfig
from .kv_cache import SlotAllocator
from .metrics import MOST_NAMED, StepRecord
from .sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    """What one sequence computes in this step: `num_tokens` of the `num_missing` that it lacks."""

    seq: Sequence
    num_tokens: int
    num_missing: int

    @property
    def is_decode(self) -> bool:
        """The sequence lacked exactly one token."""
        return self.num_missing == 1

    @property
    def is_last_chunk(self) -> bool:
        """Nothing is missing afterwards, so its next token is sampled."""
        return self.num_tokens == self.num_missing


class Batch:
    """One step's plan while it is being made: what is scheduled, and how many tokens of the budget are left."""

    def __init__(self, budget: int):
        self.scheduled: list[Scheduled] = []
        self.left = budget

    def add(self, seq: Sequence, may_cut: bool) -> bool:
        """Schedule what `seq` is missing, cut to the budget if that is allowed. False if it gets nothing."""
        missing = seq.num_missing_tokens
        num_tokens = min(missing, self.left)
        if num_tokens == 0 or (num_tokens < missing and not may_cut):
            return False
        self.scheduled.append(Scheduled(seq, num_tokens, missing))
        self.left -= num_tokens
        return True


class Scheduler:
    """Owns who waits, who runs, and who has which slot of the KV cache. Touches no tensor."""

    def __init__(self, config: SchedulerConfig, slots: SlotAllocator):
        self.config = config
        self.slots = slots
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}  # in order of admission
        self._batch_is_closed = False  # static: the batch has begun to decode, nobody may join it
        self._prefill_steps = 0  # in a row

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's tokens; admit waiting sequences where the policy, a slot and the budget allow it."""
        active = [seq for seq in self.running.values() if not seq.is_finished]
        prefills = [seq for seq in active if seq.num_missing_tokens > 1]
        decodes = [seq for seq in active if seq.num_missing_tokens == 1]
        batch = Batch(self.config.max_num_batched_tokens)
        if self.config.policy == "mixed":
            self._take(decodes, batch)
            self._take(prefills, batch)
            self._admit(batch, len(prefills))
        else:
            self._prefill_or_decode(prefills, decodes, batch)
        return batch.scheduled

    def _prefill_or_decode(self, prefills: list[Sequence], decodes: list[Sequence], batch: Batch) -> None:
        """Prompts while there are any, but after max_num_seqs such steps in a row the running ones get their turn."""
        if not decodes or self.config.policy == "static":  # a static batch is finite: forming it starves nobody
            self._prefill_steps = 0
        if self._prefill_steps < self.config.max_num_seqs:
            self._take(prefills, batch)
            self._admit(batch, len(prefills))
            self._prefill_steps += 1
        if decodes and not batch.scheduled:
            self._take(decodes, batch)
            self._prefill_steps = 0
            self._batch_is_closed = True

    def _take(self, seqs: list[Sequence], batch: Batch) -> None:
        """Give each of the running sequences as many of its missing tokens as the budget still has."""
        for seq in seqs:
            batch.add(seq, self.config.enable_chunked_prefill)

    def _admit(self, batch: Batch, num_prefills: int) -> None:
        """Let waiting sequences in, first come, first served, until one of them cannot be served in this step."""
        if self.config.policy == "static" and self._batch_is_closed:
            return
        while self.waiting and self.slots.num_free and num_prefills < self.config.max_num_prefills:
            seq = self.waiting[0]
            if not batch.add(seq, self.config.enable_chunked_prefill):
                return
            seq.start(self.slots.take())
            self.running[seq.request_id] = seq
            self.waiting.popleft()
            num_prefills += 1

    def retire(self) -> list[Sequence]:
        """Take the finished sequences out and free their slots. A static batch retires as a whole."""
        finished = [seq for seq in self.running.values() if seq.is_finished]
        if self.config.policy == "static" and len(finished) < len(self.running):
            return []
        for seq in finished:
            self._release(seq)
        return finished

    def abort(self, request_id: str) -> Sequence | None:
        """Take a request out wherever it is. Returns it, or None if nobody here has that id."""
        seq = self.running.get(request_id)
        if seq is not None:
            self._release(seq)
        else:
            seq = next((seq for seq in self.waiting if seq.request_id == request_id), None)
            if seq is None:
                return None
            self.waiting.remove(seq)
        seq.finish("abort")
        return seq

    def _release(self, seq: Sequence) -> None:
        del self.running[seq.request_id]
        self.slots.give_back(seq.slot)
        if not self.running:
            self._batch_is_closed = False

    def recount(self) -> None:
        """After an error, which may come between any two lines: who runs waits no more, and nobody else has a slot."""
        self.waiting = deque(seq for seq in self.waiting if seq.request_id not in self.running)
        self.slots.recount(seq.slot for seq in self.running.values())
        self._batch_is_closed = self._batch_is_closed and bool(self.running)

    def holds(self, seq: Sequence) -> bool:
        return self.running.get(seq.request_id) is seq or seq in self.waiting

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)


def check_fits_step(prompt_token_ids: list[int], config: SchedulerConfig) -> list[int]:
    """Raises ValueError for a prompt that no step could ever take: it would wait for ever, and all behind it."""
    if not config.enable_chunked_prefill and len(prompt_token_ids) > config.max_num_batched_tokens:
        raise ValueError(
            f"the prompt has {len(prompt_token_ids)} tokens, but one step takes max_num_batched_tokens="
            f"{config.max_num_batched_tokens} and prompts are not cut; raise it, or set enable_chunked_prefill=True"
        )
    return prompt_token_ids


def check_request_id(request_id: object, in_use: dict[str, Sequence]) -> None:
    """Raises ValueError for an id that is no text, or that a request in the engine already has."""
    if not isinstance(request_id, str | None):
        raise ValueError(f"request_id={request_id!r}: expected text or None")
    if request_id in in_use:
        raise ValueError(f"request_id={request_id!r} is in use; choose another, or wait until it has finished")


def step_record(
    batch: list[Scheduled], scheduler: Scheduler, slot_len: int, start: float, attention_pairs: int, seconds: dict
) -> StepRecord:
    """What the trace keeps of a step that has just been computed: who ran, who waits, what the cache holds."""
    return StepRecord(
        step=-1,  # numbered when it is recorded
        time=start,
        tokens={item.seq.request_id: item.num_tokens for item in batch},
        attention_pairs=attention_pairs,
        seconds=seconds,
        kv_tokens_reserved=scheduler.slots.num_taken * slot_len,
        kv_tokens_used=sum(seq.num_computed_tokens for seq in scheduler.running.values()),
        decode_tokens=sum(item.is_decode for item in batch),
        idle_slots=scheduler.config.max_num_seqs - len(batch),
        num_waiting=len(scheduler.waiting),
        waiting=[seq.request_id for seq in islice(scheduler.waiting, MOST_NAMED)],
    )
