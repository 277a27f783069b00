"""One engine of benchmarks.optim: built from a row, warmed up, given work against the clock, closed again.

A row is a name, a stage and options of LLM. An option that a stage does not know is left out, so that the same row
works for every stage. Outputs have fixed lengths, so each engine does the same work.
"""

import gc
import hashlib
import importlib
import os
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from statistics import median

import torch
from rich.console import Console

from . import workloads
from .common import default_device, stage_options
from .optim_tables import SWITCHES

PROMPT = 128  # tokens of a prompt, except in the 256-request workload
SKIP = 2  # gaps between tokens that are left out after the last prefill
NOTHING_LEFT = 64 * 2**20  # bytes: what a closed engine may leave behind without a remark


def known_options(stage: str) -> list[str]:
    """The names that LLM of this stage takes."""
    return [f.name for f in fields(importlib.import_module(f"{stage}.config").EngineConfig)]


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def clean_up() -> int:
    """Give back what nobody holds. Returns the bytes of GPU memory that are still allocated."""
    gc.collect()
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def start_device(args: Namespace) -> None:
    """Start CUDA before the first engine does, whose start-up would otherwise count it."""
    if (args.device or default_device()) == "cuda":
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
        torch.cuda.synchronize()


@contextmanager
def environment_of(row: dict) -> Iterator[None]:
    """The row's variables in the environment, for as long as this lasts."""
    before = {name: os.environ.get(name) for name in row["env"]}
    os.environ.update(row["env"])
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class Engine:
    """An engine with its stopwatch. A context manager: what it held is given back at the end, and that is checked."""

    def __init__(self, row: dict, args: Namespace, **common: object):
        self.name = row["name"]
        self.package = importlib.import_module(row["stage"])
        self.vocab = 250 if args.model == "tiny" else 10001
        self.left_bytes = 0
        options = common | {"device": args.device, "dtype": args.dtype} | dict(args.option) | row["options"]
        options |= {"load_format": "dummy"} if args.dummy else {}
        self.options = {name: value for name, value in options.items() if name in known_options(row["stage"])}
        self._before = clean_up()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with environment_of(row):
            self.llm = self.package.LLM(args.model, **stage_options(self.package, self.options))
        synchronize()
        self.startup_seconds = time.perf_counter() - start

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.llm.close()
        self.llm = None
        self.left_bytes = clean_up() - self._before
        if self.left_bytes > NOTHING_LEFT:
            megabytes = self.left_bytes / 2**20
            Console(stderr=True).print(
                f"{self.name}: {megabytes:,.0f} MB of GPU memory did not come back after close()"
            )

    def facts(self) -> dict:
        """What it is and what it holds. Peaks: since before it was built; the pool of the KV cache is part of them."""
        llm, cuda = self.llm, torch.cuda.is_initialized()
        manager, features = llm.block_manager, getattr(llm, "features", None)  # stage 4 has none
        return {
            "dtype": str(llm.resolved.dtype).removeprefix("torch."),
            "backend": llm.resolved.attention_backend,
            "used_options": self.options,
            "features": {name: getattr(features, name) for name, _ in SWITCHES.values()} if features else {},
            "startup_seconds": self.startup_seconds,
            "kv_pool_bytes": manager.num_blocks * manager.block_size * llm.metrics.kv_bytes_per_token,
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        }

    def params(self, max_tokens: int, **options: object):
        return self.package.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)

    def forget(self) -> None:
        """Start a run from nothing: no counters, no cached prefixes (the same prompts come again), no rubbish."""
        self.llm.metrics.reset()
        getattr(self.llm, "reset_prefix_cache", lambda: None)()
        gc.collect()
        synchronize()

    def one(self, tokens: int) -> dict:
        """One request alone, greedy: seconds of the whole call, time to the first token, and of the tokens after it.

        ms_per_step is the time from token to token: with drafts a step brings several.
        """
        (prompt,) = random_prompts(1, PROMPT, self.vocab)
        self.forget()
        start = time.perf_counter()
        (output,) = self.llm.generate([prompt], self.params(tokens, temperature=0.0), use_tqdm=False)
        synchronize()
        seconds = time.perf_counter() - start
        first, last = output.metrics.token_times[0], output.metrics.token_times[-1]
        ids = output.outputs[0].token_ids
        return self._sample(seconds, len(ids)) | {
            "ttft_ms": 1000 * output.metrics.ttft,
            "decode_tokens_per_second": (len(ids) - 1) / (last - first),
            "ms_per_step": 1000 * (last - first) / (len(ids) - 1),
            "ids_digest": hashlib.sha256(str(ids).encode()).hexdigest()[:12],  # the same in rows with the same tokens
        }

    def many(self, num_requests: int, share: float = 1.0) -> dict:
        """The 256-request workload, all in the queue at the start; timed from the first step to the last.

        share: of each output's length, for a warm-up that meets all sizes of the batch and ends sooner.
        """
        requests = workloads.mixed_256(self.vocab)[:num_requests]
        lengths = [max(2, int(request.max_tokens * share)) for request in requests]
        params = [self.params(n, temperature=0.6, seed=i) for i, n in enumerate(lengths)]
        seconds, _ = self.serve([request.prompt for request in requests], params)
        sample = self._sample(seconds, sum(lengths))
        return sample | {"ms_per_step": 1000 * seconds / sample["counters"]["steps"]}

    def lockstep(self, batch: int, tokens: int) -> dict:
        """`batch` requests that decode side by side: the median time from one token to the next, while all decode."""
        params = [self.params(tokens, temperature=0.0)] * batch
        seconds, outputs = self.serve(random_prompts(batch, PROMPT, self.vocab), params)
        times = [output.metrics.token_times for output in outputs]
        begin, end = max(t[0] for t in times), min(t[-1] for t in times)
        gaps = [1000 * (b - a) for a, b in pairwise(t for t in times[0] if begin <= t <= end)]
        gaps = gaps[SKIP:] or gaps or [1000 * (b - a) for a, b in pairwise(times[0])]
        return self._sample(seconds, batch * tokens) | {"ms_per_step": median(gaps), "gaps_ms": gaps}

    def serve(self, prompts: list[list[int]], params: list) -> tuple[float, list]:
        """Queue all, then step until all have left. Returns the seconds of the steps, and the outputs in order."""
        self.forget()
        ids = [self.llm.add_request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        outputs, start = {}, time.perf_counter()
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                outputs[output.request_id] = output
        synchronize()
        return time.perf_counter() - start, [outputs[i] for i in ids]

    def _sample(self, seconds: float, tokens: int) -> dict:
        phases = Counter()
        for record in self.llm.metrics.trace:
            phases.update(record.seconds)
        counters = self.llm.metrics.counters()
        speed = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
        return speed | {"phases": dict(phases), "counters": counters}


def summary(samples: list[dict]) -> dict:
    """The median of every time and speed of several runs, and the range of it."""
    keys = [key for key, value in samples[0].items() if isinstance(value, float)]
    columns = {key: [sample[key] for sample in samples] for key in keys}
    found = {key: median(values) for key, values in columns.items()}
    return found | {f"{key}_range": [min(values), max(values)] for key, values in columns.items()}
