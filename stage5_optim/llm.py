"""The engine: prompts in, text out.

    llm = LLM("smollm2-135m")
    llm.generate(["Hello"], SamplingParams(temperature=0))     # all at once
    for piece in llm.stream("Hello"): ...                       # as it is made
    llm.add_request("Hello"); llm.step()                        # one iteration at a time, for a server's loop
    llm.chat([{"role": "user", "content": "Hello"}])

Stage 5 plans a step while the last one runs; features.py says what else is on.
"""

import gc
import logging
import os
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from . import checkpoint, zoo
from .attention import choose_backend, choose_block_size
from .block_manager import BlockManager
from .config import (
    KV_CACHE_DTYPES,
    EngineConfig,
    ModelConfig,
    Resolved,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
    resolve_scheduler,
)
from .draft_model import make_proposer
from .features import resolve_features
from .inputs import as_model, as_prompts
from .intake import Intake, check_request_id, end_tokens
from .metrics import Metrics
from .model_runner import ModelRunner
from .pipeline import Pipeline
from .progress import Progress
from .sampling import NO_NUMBERS, SamplingParams
from .scheduler import Scheduler
from .sequence import RequestOutput, SequenceGroup
from .sharding import split
from .speculative import make_speculator
from .tokenizer import Tokenizer
from .worker import Setup, build_runner, start_ranks

logger = logging.getLogger(__package__)


class LLM:
    """One model, ready to generate. Options: see EngineConfig; an unknown one is a ValueError."""

    def __init__(self, model: str | os.PathLike = zoo.DEFAULT_MODEL, **options):
        self.config = EngineConfig.from_options(as_model(model), options)
        device = resolve_device(self.config.device)
        files = zoo.locate(self.config.model, self.config.load_format)
        model_config = ModelConfig.from_hf(files.config)
        split(self.config.tensor_parallel_size, 0, model_config, self.config.model)  # a ValueError if that cannot be
        self.resolved = self._resolve(device, model_config)
        self.features = resolve_features(self.config, self.resolved, model_config.head_dim)
        self.model_config = replace(model_config, dtype=self.resolved.dtype)
        self.tokenizer = Tokenizer(files.tokenizer)
        self.metrics = Metrics()
        self.eos_token_ids = end_tokens(self.model_config, files, self.tokenizer)
        self.model_runner = self._build_runner(files)
        self._intake = Intake(self.config, self.model_config, self.resolved, self.scheduler, self.eos_token_ids)
        self._requests: dict[str, SequenceGroup] = {}  # that have not left the engine
        self._for_step: dict[str, None] = {}  # of these, whose output `step` returns; the others have a reader
        self._undelivered: list[RequestOutput] = []  # for `step`, made while generate or stream drove the engine
        self._is_driving, self._to_abort = False, []  # while steps are worked on, aborts wait
        self._lock = threading.RLock()  # one thread at a time: a web server calls from many
        self._announce()

    def _resolve(self, device: torch.device, model_config: ModelConfig) -> Resolved:
        dtype = resolve_dtype(self.config.dtype, model_config.dtype, device)
        requested, head_dim = self.config.attention_backend, model_config.head_dim
        kv_dtype = KV_CACHE_DTYPES[self.config.kv_cache_dtype]
        block_size = choose_block_size(self.config.block_size, requested, device, dtype, head_dim, kv_dtype)
        backend, reason = choose_backend(requested, device, dtype, head_dim, block_size, kv_dtype)
        max_model_len = resolve_max_model_len(self.config.max_model_len, model_config)
        return Resolved(device, dtype, backend, reason, max_model_len, block_size, kv_dtype)

    @checkpoint.keeps_nothing_on_error
    def _build_runner(self, files: zoo.ModelFiles) -> ModelRunner:
        config, resolved = self.config, self.resolved
        num_seqs = config.max_num_seqs or (32 if resolved.device.type == "cpu" else 256)
        self.scheduler_config = resolve_scheduler(config, num_seqs, resolved.max_model_len)
        setup = Setup(config, self.model_config, resolved, self.features, self.scheduler_config, files.weights)
        ranks = start_ranks(setup)
        with ranks.starting():
            proposer = make_proposer(config, self.model_config, resolved, self.tokenizer)
            runner = build_runner(setup, ranks, self.tokenizer, proposer)
            num_blocks, num_swap_blocks = runner.kv_cache.data.shape[2], len(runner.kv_cache.host)
            sizes = num_blocks, resolved.block_size, num_swap_blocks
            self.block_manager = BlockManager(*sizes, config.enable_prefix_caching)
            self.scheduler = Scheduler(self.scheduler_config, self.block_manager)
            num_drafts = self.features.rows_per_seq - 1
            more = self.scheduler_config, max(runner.graphs.sizes) if runner.graphs else None
            speculator = make_speculator(proposer, num_drafts, self.block_manager, *more)
        self.metrics.kv_bytes_per_token = runner.kv_cache.bytes_per_token
        how = self.features.async_scheduling, config.trace_blocks, speculator
        self._pipeline = Pipeline(self.scheduler, runner, self.metrics, *how)
        return runner

    def _announce(self) -> None:
        r, dtype = self.resolved, str(self.resolved.dtype).removeprefix("torch.")
        kv_dtype = "" if r.kv_dtype is None else f" in {self.config.kv_cache_dtype}"
        logger.info(
            f"{__package__}: {self.config.model} on {r.device} in {dtype}, attention {r.attention_backend} "
            f"({r.attention_reason}), up to {r.max_model_len} tokens, "
            f"{self.scheduler_config.policy} scheduling of up to {self.scheduler_config.max_num_seqs} sequences, "
            f"{self.block_manager.num_blocks:,} KV blocks of {r.block_size} tokens{kv_dtype}, {self.features}"
            f"{self.model_runner.ranks.notes}"
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
        groups: list = []
        try:
            with self._lock:
                groups = self._make_groups(prompts, sampling_params)
                self._enqueue(groups)
            with Progress(len(groups), self.metrics, use_tqdm) as bar:
                left = list(groups)
                while left:
                    self._step_for_others()
                    left = self._still_served(left)
                    bar.update(len(groups) - len(left))
        finally:
            self._abort_all(groups)  # only what an error or Ctrl-C left unfinished
        self._raise_failure(groups)
        return [group.to_output() for group in groups]

    def stream(
        self, prompt: str | list[int] | list[str | list[int]], sampling_params: SamplingParams | None = None
    ) -> Iterator[str] | Iterator[tuple[int, str]]:
        """The output's text in pieces, as it is made; joined they are the text that `generate` returns.

        For several prompts, or n > 1, the pieces come as (index, piece): the index counts the samples of the first
        prompt, then those of the second. Several streams may be open at the same time: whichever is asked for its next
        piece drives the engine for all. Bad input raises ValueError here, another request's error in a shared step
        RuntimeError, logits that are no numbers FloatingPointError. Closing the iterator ends the request.
        """
        with self._lock:
            groups = self._make_groups(prompt, sampling_params)
            if not groups:
                raise ValueError(f"prompt={prompt!r}: stream takes at least one prompt")
            pieces = self._pieces(groups)
            next(pieces)  # up to the first yield: closing a generator that never began would not run its `finally`
        return pieces

    def _pieces(self, groups: list[SequenceGroup]) -> Iterator:
        seqs = [seq for group in groups for seq in group.seqs]
        sent = [0] * len(seqs)
        try:
            self._enqueue(groups)
            yield
            while True:
                with self._lock:  # another thread's step adds to the texts
                    served, texts = [self._serves(group) for group in groups], [seq.text for seq in seqs]
                for i, text in enumerate(texts):
                    if len(text) > sent[i]:
                        piece, sent[i] = text[sent[i] :], len(text)
                        yield (i, piece) if len(seqs) > 1 else piece
                if not any(served):
                    self._raise_failure(groups)
                    return
                self._step_for_others()
        finally:
            self._abort_all(groups)

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
            (group,) = self._make_groups([prompt], sampling_params, request_id)
            self._enqueue([group])
            self._for_step[group.request_id] = None
            return group.request_id

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
            try:
                if request_id in self._requests and self._pipeline.in_flight is not None:
                    self._drive(self._pipeline.drain)
            finally:
                self._requests.pop(request_id, None)
                self.scheduler.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Requests that run keep what they have. Does nothing where caching is off."""
        with self._lock:
            self.block_manager.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has something to do or to return."""
        return bool(self._requests or self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Schedule, run, postprocess: one iteration. Returns the outputs of added requests that finished."""
        with self._lock:
            self._check_open()
            self._drive(lambda: self._pipeline.step(self._retire))
            outputs, self._undelivered = self._undelivered, []
        return outputs

    def _drive(self, work: Callable[[], None]) -> None:
        """Do some work on steps; outputs that come of it are kept for `step`."""
        try:
            self._is_driving = True
            work()
            self._retire()
        except BaseException as error:  # Ctrl-C too: what the steps held must not stay behind, half done
            self._is_driving = False
            batches = [*self._pipeline.cancel(), self.scheduler.batch]
            self.block_manager.recount()
            groups = list(ChainMap(*(batch.touched for batch in batches)).values())
            owed = self._owed(groups)
            self._abort_all(groups, error)
            self._undelivered += owed
            raise
        finally:
            self._is_driving = False
            while self._to_abort:
                self.abort_request(self._to_abort.pop())

    def _owed(self, groups: list[SequenceGroup]) -> list[RequestOutput]:
        """Outputs of those who had ended before the step failed. `step` returns them all the same."""
        ended = [group for group in groups if group.is_finished and self._serves(group)]
        for group in ended:
            group.metrics.finish_time = group.metrics.finish_time or time.perf_counter()
        return [group.to_output() for group in ended if group.request_id in self._for_step]

    def _retire(self) -> None:
        """Let finished sequences go, and keep the outputs that `step` owes its caller."""
        for group in (finished := self.scheduler.retire()):
            group.metrics.finish_time = time.perf_counter()
            del self._requests[group.request_id]
            for record in self.metrics.trace[-1:]:  # none, if `reset` came between a static member's end and its return
                record.finished.append(group.request_id)
        owed = [group for group in finished if self._for_step.pop(group.request_id, group) is None]
        self._undelivered += [group.to_output() for group in owed]

    def _enqueue(self, groups: list[SequenceGroup]) -> None:
        try:
            for group in groups:
                self._requests[group.request_id] = group
                self.scheduler.add(group)
        except BaseException:  # Ctrl-C between the two
            self._abort_all(groups)
            raise

    def _serves(self, group: SequenceGroup) -> bool:
        return self._requests.get(group.request_id) is group

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
        reasons = [seq.finish_reason for one in requests for seq in one.seqs]
        if "error" in reasons:
            raise FloatingPointError(NO_NUMBERS)
        if "abort" in reasons:
            self._check_open()  # another thread's `close` has come between a step and its reader

    def _abort_all(self, groups: list[SequenceGroup], error: BaseException | None = None) -> None:
        for group in groups:
            if self._serves(group):
                if error is not None and not group.is_finished:
                    # Its text: the error itself holds the tensors of the step.
                    group.failure = f"{type(error).__name__}: {error}"
                self.abort_request(group.request_id)

    def _check_open(self) -> None:
        if self.model_runner is None or self.model_runner.ranks.is_closed:
            raise ValueError("this engine is closed; make a new LLM")

    def _make_groups(self, prompts: object, params: object, request_id: str | None = None) -> list[SequenceGroup]:
        self._check_open()
        return self._intake.make_groups(prompts, params, self.tokenizer, request_id, in_use=self._ids_in_use())

    def close(self) -> None:
        """End all requests and give the memory back. A second call does nothing; a later request is a ValueError."""
        with self._lock:
            if self.model_runner is not None:
                self._pipeline.cancel()
            self._abort_all(list(self._requests.values()))
            if self.model_runner is not None:
                self.model_runner.ranks.close()
            self.model_runner, self._pipeline, self._undelivered = None, None, []
        if self.resolved.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
