"""The engine: prompts in, text out.

    llm = LLM("smollm2-135m")
    llm.generate(["Hello"], SamplingParams(temperature=0))     # all at once
    for piece in llm.stream("Hello"): ...                       # as it is made
    llm.chat([{"role": "user", "content": "Hello"}])

Stage 2 serves one request after the other. Its KV cache is reserved once, for one sequence of max_model_len tokens.
"""

import gc
import logging
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from . import checkpoint, zoo
from .attention import BACKENDS, choose_backend
from .config import (
    EngineConfig,
    ModelConfig,
    Resolved,
    as_ids,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
)
from .inputs import as_model, as_params, as_prompts, check_params, check_prompt_ids
from .kv_cache import KVCache
from .metrics import Metrics
from .model_runner import ModelRunner
from .sampling import NO_NUMBERS, SamplingParams
from .sequence import RequestOutput, Sequence, SequenceStatus
from .tokenizer import Detokenizer, Tokenizer

logger = logging.getLogger(__package__)


class LLM:
    """One model, ready to generate. Options: see EngineConfig; an unknown one is a ValueError."""

    def __init__(self, model: str | os.PathLike = zoo.DEFAULT_MODEL, **options):
        self.config = EngineConfig.from_options(as_model(model), options)
        device = resolve_device(self.config.device)
        files = zoo.locate(self.config.model, self.config.load_format)
        model_config = ModelConfig.from_hf(files.config)
        self.resolved = self._resolve(device, model_config)
        self.model_config = replace(model_config, dtype=self.resolved.dtype)
        self.tokenizer = Tokenizer(files.tokenizer)
        self.metrics = Metrics()
        self.eos_token_ids = self._end_tokens(files)
        self.model_runner = self._build_runner(files)
        self._seeds = random.Random(self.config.seed)  # for requests that bring none; None: from the system
        self._next_id = 0
        self._lock = threading.RLock()  # one thread at a time: a web server calls from many
        self._announce()

    def _resolve(self, device: torch.device, model_config: ModelConfig) -> Resolved:
        dtype = resolve_dtype(self.config.dtype, model_config.dtype, device)
        backend, reason = choose_backend(self.config.attention_backend, device, dtype, model_config.head_dim)
        max_model_len = resolve_max_model_len(self.config.max_model_len, model_config)
        return Resolved(device, dtype, backend, reason, max_model_len)

    def _end_tokens(self, files: zoo.ModelFiles) -> tuple[int, ...]:
        """Checkpoints name their end tokens in up to three places; all count that the model has a logit for."""
        ids = [*self.model_config.eos_token_ids, *as_ids(files.generation_config.get("eos_token_id"))]
        if files.weights is not None and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return tuple(i for i in dict.fromkeys(ids) if 0 <= i < self.model_config.vocab_size)

    @checkpoint.keeps_nothing_on_error
    def _build_runner(self, files: zoo.ModelFiles) -> ModelRunner:
        attend, resolved = BACKENDS[self.resolved.attention_backend], self.resolved
        seed = self.config.seed or 0
        model = checkpoint.build_model(
            self.model_config, attend, resolved.max_model_len, resolved.device, files.weights, seed
        )
        kv_cache = KVCache(self.model_config, resolved.max_model_len, resolved.device)
        self.metrics.kv_bytes_per_token = kv_cache.bytes_per_token
        return ModelRunner(model, kv_cache, resolved.device, self.tokenizer, self.metrics)

    def _announce(self) -> None:
        r = self.resolved
        dtype = str(r.dtype).removeprefix("torch.")
        logger.info(
            f"{__package__}: {self.config.model} on {r.device} in {dtype}, attention {r.attention_backend} "
            f"({r.attention_reason}), up to {r.max_model_len} tokens"
        )

    def generate(
        self,
        prompts: str | list[int] | list[str | list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids). Outputs come in the order of the prompts.

        Raises ValueError, before anything runs, if any prompt or parameter cannot be served, and FloatingPointError
        where the logits are no numbers.
        """
        seqs = self._make_sequences(prompts, sampling_params)
        try:
            with tqdm(total=len(seqs), desc="Generating", unit="req", miniters=0, disable=not use_tqdm) as bar:
                for seq in seqs:
                    while not seq.is_finished:
                        self.step(seq)
                        bar.set_postfix_str(f"{seq.num_output_tokens} tokens", refresh=False)
                        bar.update(seq.is_finished)
        finally:
            for seq in seqs:
                seq.finish("abort")  # only what an error or Ctrl-C left unfinished
        return [seq.to_output() for seq in seqs]

    def stream(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The output's text in pieces, as it is made; joined they are the text that `generate` returns.

        Bad input raises ValueError here, not at the first piece; logits that are no numbers FloatingPointError, where
        they come. Closing the iterator ends the request.
        """
        prompts = as_prompts(prompt)
        if len(prompts) != 1:
            raise ValueError(f"prompt={prompt!r:.80}: stream takes one prompt, as text or token ids")
        (seq,) = self._make_sequences(prompts, sampling_params)
        return self._pieces(seq)

    def _pieces(self, seq: Sequence) -> Iterator[str]:
        sent = 0
        try:
            while not seq.is_finished:
                self.step(seq)
                if len(seq.text) > sent:
                    piece, sent = seq.text[sent:], len(seq.text)
                    yield piece
        finally:
            seq.finish("abort")

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of {"role": ..., "content": ...}, by the model's chat template."""
        many = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple))
        conversations = messages if many else [messages]
        prompts = [self.tokenizer.apply_chat_template(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def step(self, seq: Sequence) -> None:
        """Schedule, run, postprocess: one more token for the one sequence that is being served."""
        with self._lock:
            self._check_open()
            if seq.status is SequenceStatus.WAITING:
                seq.start()
            seq.append_token(self.model_runner.run(seq))
            if seq.finish_reason == "error":
                raise FloatingPointError(NO_NUMBERS)

    def _check_open(self) -> None:
        if self.model_runner is None:
            raise ValueError("this engine is closed; make a new LLM")

    def _make_sequences(self, prompts: object, sampling_params: object) -> list[Sequence]:
        self._check_open()
        prompts = as_prompts(prompts)
        params = as_params(sampling_params, len(prompts))
        checked = [self._check(i, *request) for i, request in enumerate(zip(prompts, params, strict=True))]
        return [self._make_sequence(*request) for request in zip(prompts, checked, params, strict=True)]

    def _check(self, index: int, prompt: str | list[int], params: SamplingParams) -> list[int]:
        """Token ids of a prompt that can be served; ValueError otherwise."""
        vocab_size = self.model_config.vocab_size
        try:
            check_params(params, vocab_size)
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            return check_prompt_ids(ids, vocab_size, self.resolved.max_model_len)
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from None

    def _make_sequence(self, prompt: str | list[int], ids: list[int], params: SamplingParams) -> Sequence:
        self._next_id += 1
        room = self.resolved.max_model_len - len(ids)
        special = self.tokenizer.end_ids(params.stop, self.model_config.vocab_size)
        return Sequence(
            request_id=str(self._next_id - 1),
            prompt_token_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            stop_token_ids=(*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids, *special),
            max_output_tokens=min(params.max_tokens or room, room),
            detokenizer=Detokenizer(self.tokenizer, params.stop),
            prompt=prompt if isinstance(prompt, str) else None,
        )

    def close(self) -> None:
        """Give the memory back. A second call does nothing; a later request is a ValueError."""
        self.model_runner = None
        if self.resolved.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
