"""Model runner: one step on the device. Build the inputs, run the model, sample.

Stage 3 lays the tokens of all scheduled sequences end to end and runs them through the model as one list. A linear
layer reads its weights once for all of them, and that is where the speed of a batch comes from.
"""

import time
from dataclasses import dataclass
from itertools import accumulate

import torch

from .attention import AttentionMetadata
from .kv_cache import KVCache
from .model import CausalLM
from .sampling import NO_TOKEN, Logprob, sample, top_logprobs
from .scheduler import Scheduled
from .sequence import Sequence
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class StepResult:
    """What a step brought: the sampled token per request_id, its query-key pairs, and the seconds of each phase."""

    token_ids: dict[str, int]
    attention_pairs: int
    seconds: dict[str, float]


class ModelRunner:
    """Owns the model on its device and the KV cache. `run` takes a step's plan and returns the tokens sampled."""

    def __init__(self, model: CausalLM, kv_cache: KVCache, device: torch.device, tokenizer: Tokenizer):
        self.model = model
        self.kv_cache = kv_cache
        self.device = device
        self.tokenizer = tokenizer

    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> StepResult:
        """One forward pass over the scheduled tokens, and a token for every sequence that lacks nothing any more."""
        start = time.perf_counter()
        input_ids, positions, metadata = self.prepare(batch)
        prepared = time.perf_counter()
        with torch.autocast(self.device.type, enabled=False):  # one of the caller's would mix dtypes in here
            hidden = self.model(input_ids, positions, self.kv_cache.data, metadata)  # [T, hidden]
            rows, seqs = self.rows_to_sample(batch)
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
        by_id = {seq.request_id: token_id for seq, token_id in zip(seqs, token_ids, strict=True)}
        return StepResult(by_id, metadata.attention_pairs, seconds)

    def prepare(self, batch: list[Scheduled]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Inputs of this step: input_ids [T] and positions [T] of the scheduled tokens, end to end, int64."""
        token_ids, positions, slot_mapping = [], [], []
        for scheduled in batch:
            seq = scheduled.seq
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + scheduled.num_tokens
            token_ids += seq.token_ids[start:end]
            positions += range(start, end)
            first = seq.slot * self.kv_cache.slot_len
            slot_mapping += range(first + start, first + end)
        metadata = self.describe_batch(batch, slot_mapping)
        return self.tensor(token_ids), self.tensor(positions), metadata

    def describe_batch(self, batch: list[Scheduled], slot_mapping: list[int]) -> AttentionMetadata:
        query_lens = [scheduled.num_tokens for scheduled in batch]
        seq_lens = [scheduled.seq.num_computed_tokens + scheduled.num_tokens for scheduled in batch]
        slots = [scheduled.seq.slot for scheduled in batch]
        return AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            slots=slots,
            cu_seqlens_q=self.tensor([0, *accumulate(query_lens)], torch.int32),
            cu_seqlens_k=self.tensor([0, *accumulate(seq_lens)], torch.int32),
            seq_lens_tensor=self.tensor(seq_lens, torch.int32),
            block_table=self.tensor([[slot] for slot in slots], torch.int32),
            slot_mapping=self.tensor(slot_mapping),
        )

    def tensor(self, values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def rows_to_sample(self, batch: list[Scheduled]) -> tuple[torch.Tensor, list[Sequence]]:
        """Rows [R] to sample from and their sequences: the last token of each that lacks nothing any more."""
        ends = accumulate(scheduled.num_tokens for scheduled in batch)
        last = [(end - 1, scheduled.seq) for end, scheduled in zip(ends, batch, strict=True) if scheduled.is_last_chunk]
        return self.tensor([row for row, _ in last]), [seq for _, seq in last]

    def describe(self, logits: torch.Tensor, token_id: int, count: int) -> dict[int, Logprob]:
        """The logprobs entry of one output token: the `count` best and the chosen one, by id."""
        rows = top_logprobs(logits, token_id, count)
        return {i: Logprob(logprob, rank, self.tokenizer.token_text(i)) for i, logprob, rank in rows}
