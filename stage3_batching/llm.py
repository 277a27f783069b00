"""The engine: prompts in, text out.

    llm = LLM("smollm2-135m")
    llm.generate(["Hello"], SamplingParams(temperature=0))     # all at once
    for piece in llm.stream("Hello"): ...                       # as it is made
    llm.add_request("Hello"); llm.step()                        # one iteration at a time, for a server's loop
    llm.chat([{"role": "user", "content": "Hello"}])

Stage 3 serves many requests at once; they may come and go between any two steps, and each step is planned anew.
"""

import gc
import logging
import os
import random
import threading
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count

import torch

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
    resolve_scheduler,
)
from .inputs import as_model, as_params, as_prompts, check_params, check_prompt_ids
from .kv_cache import KVCache, SlotAllocator, plan_slots
from .metrics import Metrics
from .model_runner import ModelRunner, StepResult
from .progress import Progress
from .sampling import NO_NUMBERS, SamplingParams
from .scheduler import Scheduled, Scheduler, check_fits_step, check_request_id, step_record
from .sequence import RequestOutput, Sequence
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
        self._requests: dict[str, Sequence] = {}  # that have not left the engine
        self._for_step: dict[str, None] = {}  # of these, whose output `step` returns; the others have a reader
        self._undelivered: list[RequestOutput] = []  # for `step`, made while generate or stream drove the engine
        self._is_driving, self._to_abort = False, []  # while a step is worked on, aborts wait
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
        kv_cache = self._build_cache()
        return ModelRunner(model, kv_cache, resolved.device, self.tokenizer)

    def _build_cache(self) -> KVCache:
        """The slots of the KV cache, as many as asked for or as fit, and the scheduler that hands them out."""
        num_slots, slot_len = plan_slots(self.model_config, self.config.max_num_seqs, self.resolved)
        self.scheduler_config = resolve_scheduler(self.config, num_slots, self.resolved.max_model_len)
        self.scheduler = Scheduler(self.scheduler_config, SlotAllocator(num_slots))
        kv_cache = KVCache(self.model_config, num_slots, slot_len, self.resolved.device)
        self.metrics.kv_bytes_per_token = kv_cache.bytes_per_token
        return kv_cache

    def _announce(self) -> None:
        r = self.resolved
        dtype = str(r.dtype).removeprefix("torch.")
        logger.info(
            f"{__package__}: {self.config.model} on {r.device} in {dtype}, attention {r.attention_backend} "
            f"({r.attention_reason}), up to {r.max_model_len} tokens, "
            f"{self.scheduler_config.policy} scheduling of up to {self.scheduler_config.max_num_seqs} sequences"
        )

    def generate(
        self,
        prompts: str | list[int] | list[str | list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids). Outputs come in the order of the prompts.

        Raises ValueError, before anything runs, if any prompt or parameter cannot be served, RuntimeError if a step of
        another thread failed that computed for one of these, too, FloatingPointError where logits are no numbers.
        """
        seqs: list = []
        try:
            with self._lock:
                seqs = self._make_sequences(prompts, sampling_params)
                self._enqueue(seqs)
            with Progress(len(seqs), self.metrics, use_tqdm) as bar:
                left = list(seqs)
                while left:
                    self._step_for_others()
                    left = self._still_served(left)
                    bar.update(len(seqs) - len(left))
        finally:
            self._abort_all(seqs)  # only what an error or Ctrl-C left unfinished
        self._raise_failure(seqs)
        return [seq.to_output() for seq in seqs]

    def stream(
        self, prompt: str | list[int] | list[str | list[int]], sampling_params: SamplingParams | None = None
    ) -> Iterator[str] | Iterator[tuple[int, str]]:
        """The output's text in pieces, as it is made; joined they are the text that `generate` returns.

        For a list of several prompts the pieces come as (index of the prompt, piece). Several streams may be open at
        the same time: whichever is asked for its next piece drives the engine for all. Bad input raises ValueError
        here, another request's error in a shared step
        RuntimeError, logits that are no numbers FloatingPointError. Closing the iterator ends the request.
        """
        with self._lock:
            seqs = self._make_sequences(prompt, sampling_params)
            if not seqs:
                raise ValueError(f"prompt={prompt!r}: stream takes at least one prompt")
            pieces = self._pieces(seqs)
            next(pieces)  # up to the first yield: closing a generator that never began would not run its `finally`
        return pieces

    def _pieces(self, seqs: list[Sequence]) -> Iterator:
        sent = [0] * len(seqs)
        try:
            self._enqueue(seqs)
            yield
            while True:
                with self._lock:  # another thread's step adds to the texts
                    served, texts = [self._serves(seq) for seq in seqs], [seq.text for seq in seqs]
                for i, text in enumerate(texts):
                    if len(text) > sent[i]:
                        piece, sent[i] = text[sent[i] :], len(text)
                        yield (i, piece) if len(seqs) > 1 else piece
                if not any(served):
                    self._raise_failure(seqs)
                    return
                self._step_for_others()
        finally:
            self._abort_all(seqs)

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of {"role": ..., "content": ...}, by the model's chat template."""
        many = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple))
        prompts = [self.tokenizer.apply_chat_template(one) for one in (messages if many else [messages])]
        return self.generate(prompts, sampling_params, use_tqdm)

    def add_request(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue one request and return its id. Raises ValueError, with nothing queued, if it can never be served."""
        as_prompts(prompt)  # a bare number is no prompt
        with self._lock:
            check_request_id(request_id, self._ids_in_use())
            (seq,) = self._make_sequences([prompt], sampling_params)
            seq.request_id = seq.request_id if request_id is None else request_id
            self._enqueue([seq])
            self._for_step[seq.request_id] = None
            return seq.request_id

    def abort_request(self, request_id: str) -> None:
        """End a request wherever it is; what it held is free at once. No output comes. An unknown id does nothing."""
        if not isinstance(request_id, str):
            raise ValueError(
                f"request_id={request_id!r:.80}: expected the text that add_request returned, one at a time"
            )
        with self._lock:
            self._for_step.pop(request_id, None)  # first of all: the step that is under way may end it
            self._undelivered = [output for output in self._undelivered if output.request_id != request_id]
            if self._is_driving:  # a stream that is garbage is closed in the middle of whatever runs
                self._to_abort.append(request_id)
                return
            self._requests.pop(request_id, None)
            self.scheduler.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has something to do or to return."""
        return bool(self._requests or self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Schedule, run, postprocess: one iteration. Returns the outputs of added requests that finished."""
        with self._lock:
            self._check_open()
            self._drive()
            outputs, self._undelivered = self._undelivered, []
        return outputs

    def _drive(self) -> None:
        """One step. Outputs that come of it are kept for `step`."""
        batch: list[Scheduled] = []
        try:
            self._is_driving = True
            start = time.perf_counter()
            batch = self.scheduler.schedule()
            scheduled = time.perf_counter()
            if batch:
                self._postprocess(batch, self.model_runner.run(batch), start, scheduled)
            self._undelivered += self._retire()
        except BaseException as error:  # Ctrl-C too, in any line: what the step held must not stay behind, half done
            self._is_driving = False
            self.scheduler.recount()
            lost = [seq for seq in self._requests.values() if not self.scheduler.holds(seq)]
            self._abort_all([*lost, *(item.seq for item in batch)], error)
            raise
        finally:
            self._is_driving = False
            while self._to_abort:
                self.abort_request(self._to_abort.pop())

    def _postprocess(self, batch: list[Scheduled], result: StepResult, start: float, scheduled: float) -> None:
        """Take over what the step computed, and count it."""
        begin = time.perf_counter()
        for item in batch:
            item.seq.num_computed_tokens += item.num_tokens
            if item.is_last_chunk:
                item.seq.append_token(result.token_ids[item.seq.request_id])
        seconds = {"schedule": scheduled - start, **result.seconds, "postprocess": time.perf_counter() - begin}
        slot_len, pairs = self.model_runner.kv_cache.slot_len, result.attention_pairs
        self.metrics.record(step_record(batch, self.scheduler, slot_len, start, pairs, seconds))

    def _retire(self) -> list[RequestOutput]:
        """Let finished sequences go. Returns the outputs that `step` owes its caller."""
        finished = self.scheduler.retire()
        for seq in finished:
            seq.metrics.finish_time = time.perf_counter()
            del self._requests[seq.request_id]
            for record in self.metrics.trace[-1:]:  # none, if `reset` came between a static member's end and its return
                record.finished.append(seq.request_id)
        return [seq.to_output() for seq in finished if self._for_step.pop(seq.request_id, seq) is None]

    def _enqueue(self, seqs: list[Sequence]) -> None:
        try:
            for seq in seqs:
                self._requests[seq.request_id] = seq
                self.scheduler.add(seq)
        except BaseException:  # Ctrl-C between the two
            self._abort_all(seqs)
            raise

    def _serves(self, seq: Sequence) -> bool:
        return self._requests.get(seq.request_id) is seq

    def _step_for_others(self) -> None:
        with self._lock:
            self._undelivered = self.step()  # kept for whoever calls `step` next

    def _ids_in_use(self) -> Mapping[str, object]:
        """Of all requests and outputs that have not left the engine."""
        return ChainMap(self._requests, {output.request_id: output for output in self._undelivered})

    def _still_served(self, requests: list) -> list:
        most = self.scheduler_config.max_num_seqs  # first come, first served: no others can have ended
        return [one for one in requests[:most] if self._serves(one)] + requests[most:]

    def _raise_failure(self, requests: list) -> None:
        for failure in [one.failure for one in requests if one.failure]:
            raise RuntimeError(f"a step that this request shared with others failed: {failure}")
        reasons = [one.finish_reason for one in requests]
        if "error" in reasons:
            raise FloatingPointError(NO_NUMBERS)
        if "abort" in reasons:
            self._check_open()  # another thread's `close` has come between a step and its reader

    def _abort_all(self, seqs: list[Sequence], error: BaseException | None = None) -> None:
        for seq in seqs:
            if self._serves(seq):
                if error is not None and not seq.is_finished:
                    # Its text: the error itself holds the tensors of the step.
                    seq.failure = f"{type(error).__name__}: {error}"
                self.abort_request(seq.request_id)

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
            ids = check_prompt_ids(ids, vocab_size, self.resolved.max_model_len)
            return check_fits_step(ids, self.scheduler_config)
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from None

    def _make_sequence(self, prompt: str | list[int], ids: list[int], params: SamplingParams) -> Sequence:
        room = self.resolved.max_model_len - len(ids)
        special = self.tokenizer.end_ids(params.stop, self.model_config.vocab_size)
        return Sequence(
            request_id=self._new_id(),
            prompt_token_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            stop_token_ids=(*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids, *special),
            max_output_tokens=min(params.max_tokens or room, room),
            detokenizer=Detokenizer(self.tokenizer, params.stop),
            prompt=prompt if isinstance(prompt, str) else None,
        )

    def _new_id(self) -> str:
        in_use = self._ids_in_use()
        self._next_id = next(n for n in count(self._next_id) if str(n) not in in_use) + 1
        return str(self._next_id - 1)

    def close(self) -> None:
        """End all requests and give the memory back. A second call does nothing; a later request is a ValueError."""
        with self._lock:
            self._abort_all(list(self._requests.values()))
            self.model_runner, self._undelivered = None, []
        if self.resolved.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
