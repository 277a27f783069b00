"""Metrics: what the engine did, counted, and a record of every step.

Counters are exact and the same on every machine; seconds are not. The lessons look at counters first.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

MOST_RECORDS = 40_000  # that a trace keeps: an engine may run for weeks
MOST_NAMED = 256  # ids of all that wait, in every step: with 16,000 in the queue that was a gigabyte


@dataclass
class StepRecord:
    """One step: who got how many tokens, who waited, who left, what the cache held, where the time went (seconds).

    On a GPU `forward` only launches the work: the wait for it shows up in `sample`, which reads the result.
    """

    step: int
    time: float  # at the start, of the clock that RequestMetrics uses
    tokens: dict[str, int]  # request_id -> tokens forwarded
    attention_pairs: int
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> seconds
    kv_tokens_reserved: int = 0  # token slots of the cache that others cannot have
    kv_tokens_used: int = 0  # of those, written after this step
    decode_tokens: int = 0  # of `tokens`, those whose sequence lacked exactly one
    idle_slots: int = 0  # of max_num_seqs, those that computed nothing
    num_waiting: int = 0  # requests in the queue during the step
    waiting: list[str] = field(default_factory=list)  # the ids of the first MOST_NAMED of them
    finished: list[str] = field(default_factory=list)  # request_ids whose outputs were returned after it


@dataclass
class Metrics:
    """Counters since the start or the last `reset`.

    steps: forward passes. tokens_forwarded: tokens that went through the model. decode_tokens: those of a step in which
    the sequence lacked exactly one token; prefill_tokens: all others. attention_pairs: causal query-key pairs per
    sequence, counted once, not per layer or head. kv_tokens_reserved_peak and kv_tokens_used_peak: the most of any
    step, in tokens; times kv_bytes_per_token (a fact of the model, which `reset` keeps) they are bytes.
    idle_slot_steps: slots that computed nothing, summed over the steps.
    """

    steps: int = 0
    tokens_forwarded: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    attention_pairs: int = 0
    kv_bytes_per_token: int = 0
    kv_tokens_reserved_peak: int = 0
    kv_tokens_used_peak: int = 0
    idle_slot_steps: int = 0
    trace: list[StepRecord] = field(default_factory=list)

    def record(self, record: StepRecord) -> None:
        """Count one step and keep its record; of a full trace the older half goes."""
        record.step = self.steps
        if len(self.trace) == MOST_RECORDS:
            del self.trace[: MOST_RECORDS // 2]
        self.trace.append(record)
        self.steps += 1
        self.attention_pairs += record.attention_pairs
        self.kv_tokens_reserved_peak = max(self.kv_tokens_reserved_peak, record.kv_tokens_reserved)
        self.kv_tokens_used_peak = max(self.kv_tokens_used_peak, record.kv_tokens_used)
        self.idle_slot_steps += record.idle_slots
        forwarded = sum(record.tokens.values())
        self.tokens_forwarded += forwarded
        self.decode_tokens += record.decode_tokens
        self.prefill_tokens += forwarded - record.decode_tokens

    def counters(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "trace"}

    def reset(self) -> None:
        for f in fields(self):
            if f.name != "kv_bytes_per_token":
                setattr(self, f.name, [] if f.name == "trace" else 0)

    def to_json(self, path: str | Path | None = None) -> str:
        """Counters and trace as JSON text; written to `path` too, if given."""
        text = json.dumps({**self.counters(), "trace": [asdict(record) for record in self.trace]})
        if path is not None:
            Path(path).write_text(text + "\n")
        return text
