"""Model runner: one step on the device. Build the inputs, run the model, sample.

Stage 3 lays the tokens of all scheduled sequences end to end and runs them through the model as one list. A linear
layer reads its weights once for all of them, and that is where the speed of a batch comes from. Since stage 4 a token's
place in the cache comes from its sequence's block table, and blocks are copied and moved before the step.

In stage 5 a step has two halves. `launch` gives the GPU its work and returns at once; `collect` waits for the sampled
tokens. In between the CPU is free (pipeline.py says for what). The tokens stay on the device too, in `sampled`, where
the next step may read them before the CPU knows them.

With tensor parallelism every process has a model runner. The first one makes the plan of a step, a StepPlan, tells it
to the others (`follow`), and samples.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from . import ops as torch_ops
from .batch import Batch, Scheduled
from .config import SchedulerConfig
from .cuda_graphs import DecodeGraphs
from .kv_cache import KVCache, free_memory
from .model import CausalLM
from .parallel import OneRank
from .sampling import NO_TOKEN, Logprob, SamplingParams, sample, top_logprobs
from .sequence import Sequence, SequenceGroup
from .speculative import Ahead, is_true
from .staging import Staging, TableRows
from .step_inputs import StepInputs, StepPlan, as_inputs, count_pairs, last_rows, plan_step, sampled_sequences
from .tokenizer import Tokenizer

logger = logging.getLogger(__package__)

MAX_PAIRS_IN_GRAPH = 65_536  # query-key pairs of all pieces of prompts in a step; a judgement, not a measurement


@dataclass(frozen=True)
class StepResult:
    """What a step brought: the sampled tokens per seq_id (one, and one more for each draft that was right), its
    query-key pairs, and the seconds of each phase."""

    token_ids: dict[str, list[int]]
    attention_pairs: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device is working on.

    seqs: who gets a token; rows: for each of them the row of `sampled` where it is. token_ids: the host's copy of
    `sampled`, complete when the device has reached the event `done` (None: it has). logits [R, vocab]: kept if somebody
    wants logprobs. num_padding: rows that nobody needed, of the graph that was replayed; None without a graph.
    all_reduces: sums over all ranks.
    """

    seqs: list[Sequence | Ahead]
    rows: list[int]
    token_ids: torch.Tensor
    done: torch.cuda.Event | None
    logits: torch.Tensor | None
    attention_pairs: int
    num_padding: int | None
    all_reduces: int
    seconds: dict[str, float]


class ModelRunner:
    """Owns the model on its device and the KV cache. Takes a step's plan and returns the tokens sampled.

    ops: ops.py, or fused.py with the same in fewer launches. max_num_seqs: most tokens sampled in one step. ranks: who
    shares the model. tokenizer: needed by the first of them alone.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache | None,
        device: torch.device,
        tokenizer: Tokenizer | None,
        ops: ModuleType = torch_ops,
        max_num_seqs: int = 256,
        ranks: OneRank | None = None,
    ):
        self.graphs: DecodeGraphs | None = None  # first of all: they go before the ranks, whose sums they contain
        self.model = model
        self.kv_cache = kv_cache
        self.device = device
        self.tokenizer = tokenizer
        self.ops = ops
        self.ranks = ranks or OneRank()
        self._logits: torch.Tensor | None = None  # what graphs write them to
        self._all_reduces_of_graph = 0  # that happen in a replay without any call
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # by row of the last step
        self._staging = Staging(device)
        self._tables = TableRows()

    def run(self, batch: Batch) -> StepResult:
        """One forward pass over the scheduled tokens, and a token for every sequence that lacks nothing any more."""
        return self.collect(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Give the device all that this step has to do, without waiting for it.

        Except: what sampling.py does beyond the kernel, copies of blocks, and logprobs send small lists the slow way.
        """
        start = time.perf_counter()
        scheduled, seqs = batch.scheduled, sampled_sequences(batch.scheduled)
        pairs, all_reduces = count_pairs(scheduled), self.ranks.all_reduces
        size = self.graph_size(scheduled)
        plan = plan_step(scheduled, self._tables, self.kv_cache.block_size, size, batch.moves)
        rows = list(range(len(seqs))) if size is None else last_rows(scheduled)
        with self.ranks.in_step():
            self.ranks.send(plan)
            inputs = self.prepare(plan)
            prepared = time.perf_counter()
            logits = self.compute(plan, inputs)
        forwarded = time.perf_counter()
        self.sample(logits, seqs, rows, inputs, is_sampled=size is not None and self.samples_in_graph)
        token_ids, done = self.send_to_host(rows[-1] + 1 if rows else 0)
        wants_logprobs = any(seq.params.logprobs is not None for seq in seqs)
        seconds = {"prepare": prepared - start, "forward": forwarded - prepared}
        seconds["sample"] = time.perf_counter() - forwarded
        padding = None if size is None else size - sum(item.num_tokens for item in scheduled)
        logits = logits[rows] if wants_logprobs else None  # a copy: the next step overwrites these
        all_reduces = self.ranks.all_reduces - all_reduces
        return LaunchedStep(seqs, rows, token_ids, done, logits, pairs, padding, all_reduces, seconds)

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """A step that the first rank has planned, as all others carry it out: the same but for sampling."""
        self.compute(plan, self.prepare(plan))

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait until the step is done, and read its tokens."""
        start = time.perf_counter()
        if step.done is not None:
            step.done.synchronize()
        self.ranks.check()
        sampled, token_ids = step.token_ids.tolist(), {}
        for i, (seq, row) in enumerate(zip(step.seqs, step.rows, strict=True)):
            found = token_ids.setdefault(seq.seq_id, [])
            if not is_true(seq, found):
                continue
            found.append(sampled[row])
            wants_logprobs = seq.params.logprobs is not None and not seq.is_finished
            if wants_logprobs and sampled[row] != NO_TOKEN:
                seq.logprobs.append(self.describe(step.logits[i], sampled[row], seq.params.logprobs))
        seconds = step.seconds | {"sample": step.seconds["sample"] + time.perf_counter() - start}
        return StepResult(token_ids, step.attention_pairs, seconds)

    def settle(self) -> None:
        """Wait for all that the device has been given, whatever comes of it."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # it belongs to the error that is being dealt with
                torch.cuda.synchronize(self.device)

    def graph_size(self, scheduled: list[Scheduled]) -> int | None:
        """Of the graph that can run this step; None if somebody forks, or there are too many tokens.

        In a graph each token of a prompt reads its context by itself. With long ones the kernel for chunks, which reads
        it once for many tokens, is the better one in spite of all the launches. Drafts are few, and do not count.
        """
        if self.graphs is None or any(item.forks for item in scheduled):
            return None
        pieces = [item for item in scheduled if item.num_tokens > 1 and not item.drafts]
        if count_pairs(pieces) > MAX_PAIRS_IN_GRAPH:
            return None
        return self.graphs.fit(sum(item.num_tokens for item in scheduled))

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Move blocks, and send the inputs to the device; those of a graph to where it reads them."""
        self.kv_cache.move(plan.moves)
        if plan.size is not None:
            return self.graphs.prepare(plan)
        seq_lens = plan.arrays["seq_lens"].tolist()
        return as_inputs(self._staging.upload(plan.arrays), plan.query_lens, seq_lens)

    def compute(self, plan: StepPlan, inputs: StepInputs) -> torch.Tensor:
        """The logits of a step, by a graph or as it is. Only the first rank has them all."""
        if plan.needs_sampled:
            self.ranks.broadcast(self.sampled)
        with torch.autocast(self.device.type, enabled=False):  # one of the caller's would mix dtypes in here
            if plan.size is None:
                return self.forward(inputs)
            self.ranks.all_reduces += self._all_reduces_of_graph
            return self.graphs.replay(plan.size, inputs, self.decode)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [R, vocab]: only the last tokens' successors are unknown."""
        input_ids = self.ops.known_ids(inputs.input_ids, self.sampled)
        hidden = self.model(input_ids, inputs.positions, self.kv_cache.layers, inputs.metadata)  # [T, hidden]
        return self.model.compute_logits(hidden[inputs.rows])

    def decode(self, inputs: StepInputs) -> torch.Tensor:
        """The step that graphs record: every row a token, and sampled where a kernel can. Logits [rows, vocab]."""
        input_ids = self.ops.known_ids(inputs.input_ids, self.sampled)
        hidden = self.model(input_ids, inputs.positions, self.kv_cache.layers, inputs.metadata)
        logits = self.model.compute_logits(hidden, out=self._logits[: len(hidden)])
        if self.samples_in_graph:
            self.sample_all(logits, inputs)
        return logits

    def make_graphs(self, sizes: list[int], max_model_len: int, vocab_size: int) -> None:
        """Record decode steps of these sizes. One memory for the logits of all: they are large."""
        start, free = time.perf_counter(), free_memory(self.device)
        width = min(-(-max_model_len // self.kv_cache.block_size), self.kv_cache.data.shape[2])
        dtype, all_reduces = self.model.lm_head.weight.dtype, self.ranks.all_reduces
        with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            self._logits = torch.empty(max(sizes), vocab_size, dtype=dtype, device=self.device)
            self.graphs = DecodeGraphs(self.decode, sizes, width, max_model_len, self.device)
        self._all_reduces_of_graph = (self.ranks.all_reduces - all_reduces) // (2 * len(sizes))  # run, then recorded
        taken = (free - free_memory(self.device)) / 2**30
        logger.info(f"{len(sizes)} graphs up to {sizes[-1]} rows: {time.perf_counter() - start:.1f} s, {taken:.2f} GiB")

    def let_graphs_go(self) -> None:
        self.graphs = None

    @property
    def samples_in_graph(self) -> bool:
        return self.ops is not torch_ops and self.ranks.rank == 0

    def sample(
        self, logits: torch.Tensor, seqs: list[Sequence | Ahead], rows: list[int], inputs: StepInputs, is_sampled: bool
    ) -> None:
        """Put the next tokens into `sampled`, unless the graph has done so and nobody asked for more than it can."""
        if seqs and (self.ops is torch_ops or any(map(needs_all, seqs))):
            self.sampled[rows] = sample(logits[rows], seqs)
        elif seqs and not is_sampled:
            self.sample_all(logits, inputs)

    def sample_all(self, logits: torch.Tensor, inputs: StepInputs) -> None:
        """By one kernel, on numbers that are on the device already."""
        out = self.sampled[: len(logits)]
        self.ops.sample(logits, inputs.seeds, inputs.output_positions, inputs.inverse_temperatures, out)

    def send_to_host(self, count: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The first rows of `sampled` on the host, and the event after which they are there."""
        if self.device.type == "cpu":
            return self.sampled[:count].clone(), None
        host = torch.empty(count, dtype=torch.int64, pin_memory=True)
        host.copy_(self.sampled[:count], non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.sampled.device))  # another thread may look at another GPU
        return host, done

    def peak_memory(self, batch: Batch | None) -> int:
        """Bytes that one step needs on the GPU, beside weights and cache. None: the step is the first rank's."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.run(batch) if batch is not None else self.follow(self.ranks.receive())
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_reserved(self.device) - before  # reserved: torch takes memory in large pieces
        torch.cuda.empty_cache()
        return peak

    def describe(self, logits: torch.Tensor, token_id: int, count: int) -> dict[int, Logprob]:
        """The logprobs entry of one output token: the `count` best and the chosen one, by id."""
        rows = top_logprobs(logits, token_id, count)
        return {i: Logprob(logprob, rank, self.tokenizer.token_text(i)) for i, logprob, rank in rows}


def slots(block_table: list[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions start ... end - 1: where the block table puts them. For one sequence, to read and to test by;
    step_inputs.py does the same for all tokens of a step."""
    return [block_table[p // block_size] * block_size + p % block_size for p in range(start, end)]


def needs_all(seq: Sequence | Ahead) -> bool:
    """It asks for more than the best sum of logits and noise: sampling.py can do it all."""
    p = seq.params
    return seq.needs_sorting or p.repetition_penalty != 1.0 or seq.num_output_tokens < p.min_tokens


def largest_batch(config: SchedulerConfig, max_model_len: int, block_size: int, rows_per_seq: int = 1) -> Batch:
    """The step that needs most memory: as many tokens as the budget allows, in as many sequences, each sampled with all
    that sampling can do, and one of them at the end of the longest context. With drafts each has all the rows that it
    may have. All tokens lie in block 0."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    count = min(-(-config.max_num_batched_tokens // num_seqs), max_model_len)
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1)
    batch = Batch(num_seqs * count)
    for i in range(num_seqs):
        length, drafts = count if i else max_model_len, [0] * (min(rows_per_seq, count) - 1)
        seq = Sequence(f"warm-up {i}", [0] * (length - len(drafts)), params, 0, (), 1, detokenizer=None)
        seq.num_computed_tokens = length - count
        batch.add(SequenceGroup([seq]), seq, [0] * -(-length // block_size), may_cut=False)
        batch.scheduled[-1] = replace(batch.scheduled[-1], num_tokens=count, drafts=drafts)
    return batch
