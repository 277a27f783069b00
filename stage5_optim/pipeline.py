"""Pipeline: plan, launch, collect; with async scheduling the CPU plans a step while the GPU runs the one before.

    in turn      CPU  | plan 1 |        wait        | collect 1 | plan 2 |        wait        | collect 2 |
                 GPU           |       step 1       |                    |       step 2       |

    async        CPU  | plan 1 | plan 2 | wait | collect 1 | plan 3 | wait | collect 2 | plan 4 | wait |
                 GPU           |       step 1        |       step 2        |       step 3        |

The plan of step 2 needs to know that a sequence gets one more token, not which: a placeholder stands for it, and on the
device the input of step 2 is read from where step 1 puts its output. The CPU reads tokens one step late, and that is
all the difference:

    a stop seen late    step 2 has computed one token too many for that sequence. It is dropped and counted in
                        `discarded_tokens`, nowhere else. An end that only depends on the count is foreseen.
    place and blocks    stay with their sequence until every step that uses them has been collected: those who wait may
                        begin a step later than they would in turn.
    no look ahead       where the plan depends on the tokens (a repetition penalty) or somebody has to be preempted,
                        the step under way is collected first.

Source: the zero-overhead scheduler of SGLang (2024) and asynchronous scheduling in vLLM, in their simplest form.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from .batch import Batch, Scheduled
from .metrics import Metrics, StepRecord
from .model_runner import LaunchedStep, ModelRunner
from .scheduler import Scheduler
from .sequence import Sequence
from .speculative import Speculator
from .trace import step_record


@dataclass(frozen=True)
class StepInFlight:
    """A step between launch and collect. record: what the trace will keep of it."""

    batch: Batch
    launched: LaunchedStep
    record: StepRecord


class Pipeline:
    """Drives scheduler and model runner, one step per call of `step`. is_async: one step may be under way between.
    speculator: adds drafts to the plan; then nothing may be under way, as they are made from the last step's tokens."""

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        metrics: Metrics,
        is_async: bool,
        trace_blocks: bool,
        speculator: Speculator | None = None,
    ):
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.metrics = metrics
        self.is_async = is_async
        self.trace_blocks = trace_blocks
        self.speculator = speculator
        self.in_flight: StepInFlight | None = None

    def step(self, retire: Callable[[], None]) -> None:
        """Plan and launch one step; then collect the one before it, or this one if nothing may stay under way.

        retire: lets go of whoever has ended. It is called if a step had to be collected before the plan is made.
        """
        if self.must_drain:
            self.drain()
            retire()
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        assert batch.scheduled or not batch.moves, "blocks are moved, but nobody runs"
        before, launched, planned = self.in_flight, None, time.perf_counter()
        if self.speculator is not None:
            self.speculator.add_drafts(batch)
        if batch.scheduled:
            launched = self._launch(batch, start, planned)
        if before is not None:
            self._collect(before)
        self.in_flight = launched
        if not self.is_async:
            self.drain()

    def drain(self) -> None:
        """Collect the step that is under way, if there is one."""
        if self.in_flight is not None:
            self._collect(self.in_flight)
            self.in_flight = None

    def cancel(self) -> list[Batch]:
        """After an error: forget what is under way. Returns its plan; whoever was in it cannot go on."""
        self.model_runner.settle()  # what has been launched reads memory that the next steps will overwrite
        if self.speculator is not None:
            self.speculator.proposer.forget()
        if self.in_flight is None:
            return []
        batch, self.in_flight = self.in_flight.batch, None
        for seq in (seq for group in batch.touched.values() for seq in group.seqs):
            seq.num_steps_in_flight = 0
        return [batch]

    @property
    def must_drain(self) -> bool:
        """The next step cannot be planned without the tokens of this one, or takes blocks away from somebody."""
        if self.in_flight is None:
            return False
        penalised = any(seq.params.repetition_penalty != 1.0 for seq in self.in_flight.launched.seqs)
        return penalised or self.scheduler.will_preempt()

    def _launch(self, batch: Batch, start: float, planned: float) -> StepInFlight:
        """Give the step to the device, and treat it as computed from here on, its tokens as placeholders."""
        drafted = time.perf_counter()
        launched = self.model_runner.launch(batch)
        begin = time.perf_counter()
        for item in batch.scheduled:
            item.seq.num_computed_tokens += item.num_tokens
            self.scheduler.fork(item)
            for seq in (item.seq, *item.forks):
                seq.num_steps_in_flight += 1
        num_rows = len(self.model_runner.sampled)
        for row, seq in zip(launched.rows, launched.seqs, strict=True):
            if isinstance(seq, Sequence):  # how many tokens come behind its drafts is not known yet
                seq.append_pending(row - num_rows)  # counted from the end: see known_ids
        seconds = {"schedule": planned - start}
        record = step_record(batch, self.scheduler, start, launched.attention_pairs, seconds, self.trace_blocks)
        if launched.num_padding is not None:
            record.graph_replays, record.padding_tokens = 1, launched.num_padding
        record.all_reduces = launched.all_reduces
        if self.speculator is not None:
            self.speculator.count(record)
            seconds["draft"] = drafted - planned
        seconds["postprocess"] = time.perf_counter() - begin
        return StepInFlight(batch, launched, record)

    def _collect(self, step: StepInFlight) -> None:
        """Take over what the step computed, and count it."""
        result = self.model_runner.collect(step.launched)
        begin = time.perf_counter()
        for item in step.batch.scheduled:
            self._take_over(item, result.token_ids, step.record)
        seconds = step.record.seconds
        seconds |= result.seconds | {"postprocess": seconds["postprocess"] + time.perf_counter() - begin}
        if step.record.tokens:
            self.metrics.record(step.record)
        else:  # nobody needed anything of it
            self.metrics.discarded_tokens += step.record.discarded_tokens
        if self.speculator is not None:
            self.speculator.report(self.metrics)

    def _take_over(self, item: Scheduled, token_ids: dict[str, list[int]], record: StepRecord) -> None:
        """The tokens of one sequence of a collected step. If it has ended by now, what was computed for it is waste."""
        for seq in (item.seq, *item.forks):
            seq.num_steps_in_flight -= 1
        if item.seq.is_finished:
            discard(item, record)
        elif item.is_last_chunk:
            for seq in (item.seq, *item.forks):
                seq.append_tokens(token_ids[seq.seq_id])
                if item.drafts:
                    self.speculator.take_back(item, len(token_ids[seq.seq_id]) - 1, record)
                if seq.finish_reason == "error":  # its K and V may be no numbers, too, and those of a shared beginning
                    self.scheduler.block_manager.unpublish(seq.seq_id)
                else:
                    self.scheduler.publish(seq, seq.num_computed_tokens)


def discard(item: Scheduled, record: StepRecord) -> None:
    """Take a token that nobody wanted out of the record, and count it as discarded."""
    left = record.tokens.pop(item.seq.request_id) - item.num_tokens
    if left:
        record.tokens[item.seq.request_id] = left
    record.attention_pairs -= item.seq.num_computed_tokens
    record.decode_tokens -= 1
    record.kv_tokens_used -= 1
    record.idle_slots += 1
    record.discarded_tokens += 1
