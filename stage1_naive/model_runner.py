"""Model runner: one step on the device. Build the inputs, run the model, sample.

Stage 1 keeps nothing between steps: for each new token the whole sequence, prompt and output so far, goes through the
model again. A prompt of p tokens and m new ones cost p + (p + 1) + ... + (p + m - 1) tokens of work.
"""

import time

import torch

from .attention import AttentionMetadata
from .metrics import Metrics, StepRecord
from .model import CausalLM
from .sampling import NO_TOKEN, Logprob, sample, top_logprobs
from .sequence import Sequence
from .tokenizer import Tokenizer


class ModelRunner:
    """Owns the model on its device. `run` takes a sequence and returns its next token."""

    def __init__(self, model: CausalLM, device: torch.device, tokenizer: Tokenizer, metrics: Metrics):
        self.model = model
        self.device = device
        self.tokenizer = tokenizer
        self.metrics = metrics

    @torch.inference_mode()
    def run(self, seq: Sequence) -> int:
        """One forward pass over the sequence; returns the token sampled after its last one."""
        start = time.perf_counter()
        input_ids, positions, metadata = self.prepare(seq)
        prepared = time.perf_counter()
        with torch.autocast(self.device.type, enabled=False):  # one of the caller's would mix dtypes in here
            hidden = self.model(input_ids, positions, metadata)  # [T, hidden]
            logits = self.model.compute_logits(hidden[-1:])  # [1, vocab]: only the last token's successor is unknown
        forwarded = time.perf_counter()
        token_id = sample(logits, [seq]).item()
        if seq.params.logprobs is not None and token_id != NO_TOKEN:
            seq.logprobs.append(self.describe(logits[0], token_id, seq.params.logprobs))
        seconds = {
            "prepare": prepared - start,
            "forward": forwarded - prepared,
            "sample": time.perf_counter() - forwarded,
        }
        tokens = {seq.request_id: len(input_ids)}
        self.metrics.record(StepRecord(self.metrics.steps, start, tokens, metadata.attention_pairs, seconds))
        return token_id

    def prepare(self, seq: Sequence) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Inputs of this step: input_ids [T] and positions [T] of all tokens of the sequence, int64."""
        input_ids = torch.tensor(seq.token_ids, device=self.device)
        positions = torch.arange(seq.num_tokens, device=self.device)
        return input_ids, positions, AttentionMetadata(seq_len=seq.num_tokens)

    def describe(self, logits: torch.Tensor, token_id: int, count: int) -> dict[int, Logprob]:
        """The logprobs entry of one output token: the `count` best and the chosen one, by id."""
        rows = top_logprobs(logits, token_id, count)
        return {i: Logprob(logprob, rank, self.tokenizer.token_text(i)) for i, logprob, rank in rows}
