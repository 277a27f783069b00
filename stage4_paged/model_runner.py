"""Model runner: one step on the device. Build the inputs, run the model, sample.

Stage 3 lays the tokens of all scheduled sequences end to end and runs them through the model as one list. A linear
layer reads its weights once for all of them, and that is where the speed of a batch comes from. Since stage 4 a token's
place in the cache comes from its sequence's block table, and blocks are copied and moved before the step.
"""

import time
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from .attention import AttentionMetadata
from .batch import Batch, Scheduled
from .config import SchedulerConfig
from .kv_cache import KVCache
from .model import CausalLM
from .sampling import NO_TOKEN, Logprob, SamplingParams, sample, top_logprobs
from .sequence import Sequence, SequenceGroup
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class StepResult:
    """What a step brought: the sampled token per seq_id, its query-key pairs, and the seconds of each phase."""

    token_ids: dict[str, int]
    attention_pairs: int
    seconds: dict[str, float]


class ModelRunner:
    """Owns the model on its device and the KV cache. `run` takes a step's plan and returns the tokens sampled."""

    def __init__(self, model: CausalLM, kv_cache: KVCache | None, device: torch.device, tokenizer: Tokenizer):
        self.model = model
        self.kv_cache = kv_cache
        self.device = device
        self.tokenizer = tokenizer

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """One forward pass over the scheduled tokens, and a token for every sequence that lacks nothing any more."""
        start = time.perf_counter()
        self.kv_cache.move(batch.moves)
        input_ids, positions, metadata = self.prepare(batch.scheduled)
        prepared = time.perf_counter()
        with torch.autocast(self.device.type, enabled=False):  # one of the caller's would mix dtypes in here
            hidden = self.model(input_ids, positions, self.kv_cache.data, metadata)  # [T, hidden]
            rows, seqs = self.rows_to_sample(batch.scheduled)
            logits = self.model.compute_logits(hidden[rows])  # [R, vocab]: only the last tokens' successors are unknown
        forwarded = time.perf_counter()
        token_ids = sample(logits, seqs).tolist() if seqs else []
        for row, (seq, token_id) in enumerate(zip(seqs, token_ids, strict=True)):
            if seq.params.logprobs is not None and token_id != NO_TOKEN:
                seq.logprobs.append(self.describe(logits[row], token_id, seq.params.logprobs))
        seconds = {
            "prepare": prepared - start,
            "forward": forwarded - prepared,
            "sample": time.perf_counter() - forwarded,
        }
        by_id = {seq.seq_id: token_id for seq, token_id in zip(seqs, token_ids, strict=True)}
        return StepResult(by_id, metadata.attention_pairs, seconds)

    def prepare(self, batch: list[Scheduled]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Inputs of this step: input_ids [T] and positions [T] of the scheduled tokens, end to end, int64."""
        token_ids, positions, slot_mapping = [], [], []
        for scheduled in batch:
            seq = scheduled.seq
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + scheduled.num_tokens
            token_ids += seq.token_ids[start:end]
            positions += range(start, end)
            slot_mapping += slots(scheduled.block_table, start, end, self.kv_cache.block_size)
        metadata = self.describe_batch(batch, slot_mapping)
        return self.tensor(token_ids), self.tensor(positions), metadata

    def describe_batch(self, batch: list[Scheduled], slot_mapping: list[int]) -> AttentionMetadata:
        query_lens = [scheduled.num_tokens for scheduled in batch]
        seq_lens = [scheduled.seq.num_computed_tokens + scheduled.num_tokens for scheduled in batch]
        return AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            cu_seqlens_q=self.tensor([0, *accumulate(query_lens)], torch.int32),
            cu_seqlens_k=self.tensor([0, *accumulate(seq_lens)], torch.int32),
            seq_lens_tensor=self.tensor(seq_lens, torch.int32),
            block_table=self.pad_tables([scheduled.block_table for scheduled in batch]),
            slot_mapping=self.tensor(slot_mapping),
        )

    def peak_memory(self, batch: Batch) -> int:
        """Bytes that one step needs on the GPU, beside weights and cache."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.run(batch)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_reserved(self.device) - before  # reserved: torch takes memory in large pieces
        torch.cuda.empty_cache()
        return peak

    def pad_tables(self, tables: list[list[int]]) -> torch.Tensor:
        """[N, blocks of the longest] int32, the shorter ones filled up with 0."""
        padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return torch.from_numpy(padded).to(self.device)

    def tensor(self, values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def rows_to_sample(self, batch: list[Scheduled]) -> tuple[torch.Tensor, list[Sequence]]:
        """Rows [R] to sample from and their sequences: the last token of each that lacks nothing any more.

        Samples that fork from it begin with the same row.
        """
        ends = accumulate(scheduled.num_tokens for scheduled in batch)
        last = [(end - 1, item) for end, item in zip(ends, batch, strict=True) if item.is_last_chunk]
        pairs = [(row, seq) for row, item in last for seq in (item.seq, *item.forks)]
        return self.tensor([row for row, _ in pairs]), [seq for _, seq in pairs]

    def describe(self, logits: torch.Tensor, token_id: int, count: int) -> dict[int, Logprob]:
        """The logprobs entry of one output token: the `count` best and the chosen one, by id."""
        rows = top_logprobs(logits, token_id, count)
        return {i: Logprob(logprob, rank, self.tokenizer.token_text(i)) for i, logprob, rank in rows}


def slots(block_table: list[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions start ... end - 1: where the block table puts them."""
    return [block_table[p // block_size] * block_size + p % block_size for p in range(start, end)]


def largest_batch(config: SchedulerConfig, max_model_len: int, block_size: int) -> Batch:
    """The step that needs most memory: as many tokens as the budget allows, in as many sequences, each sampled with all
    that sampling can do, and one of them at the end of the longest context. All tokens lie in block 0."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    count = min(-(-config.max_num_batched_tokens // num_seqs), max_model_len)
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1)
    batch = Batch(num_seqs * count)
    for i in range(num_seqs):
        length = count if i else max_model_len
        seq = Sequence(f"warm-up {i}", [0] * length, params, 0, (), 1, detokenizer=None)
        seq.num_computed_tokens = length - count
        batch.add(SequenceGroup([seq]), seq, [0] * -(-length // block_size), may_cut=False)
    return batch
