"""One engine in its own process: run the prompts of a job and report times, tokens and counters.

    python -m benchmarks.worker stage2_kvcache '{"model": "tiny", "prompts": ["Hello"], "max_tokens": 8, ...}'

Standard output carries one JSON object per line: {"tokens": n} as tokens are made, at last the result. A job holds
model, device, dtype, prompts (chat texts or token ids), max_tokens, warmup_tokens, samples, and perhaps options of LLM.
For a peer there may be a workload (of benchmarks.workloads), its arguments and `first` instead of prompts: each output
then has its own length.
"""

import importlib
import json
import os
import sys
import time

import torch

from . import peers, workloads
from .common import PEERS, REFERENCE, stage_options, stages

channel = sys.stdout


def own_stdout() -> None:
    """Keep standard output for `emit`: what a library prints there, in any process, goes to standard error."""
    global channel
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def emit(event: dict) -> None:
    print(json.dumps(event), file=channel, flush=True)


class StageEngine:
    """One of our stages, through the interface that they all keep."""

    def __init__(self, package: str, job: dict):
        self.stage = importlib.import_module(package)
        options = {name: job[name] for name in ("device", "dtype", "max_model_len", "load_format") if job.get(name)}
        options |= stage_options(self.stage, job.get("options", {}))
        self.llm = self.stage.LLM(job["model"], **options)
        self.dtype = str(self.llm.resolved.dtype).removeprefix("torch.")
        self.backend = self.llm.resolved.attention_backend

    def encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])

    def decode(self, ids: list[int]) -> str:
        return self.llm.tokenizer.decode(ids)

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        """Output tokens of each prompt, and when each token was there, in seconds since the call."""
        params = self.stage.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            {"token_ids": o.outputs[0].token_ids, "token_times": [t - start for t in o.metrics.token_times]}
            for o in outputs
        ]

    def reset(self) -> None:
        self.llm.metrics.reset()

    def counters(self) -> dict:
        return self.llm.metrics.counters()


class TransformersEngine:
    """`transformers` generate() with its cache, as a user has it today. Its work is counted by a hook."""

    def __init__(self, package: str, job: dict):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        first = importlib.import_module(stages()[0])
        config = importlib.import_module(f"{first.__name__}.config")
        zoo = importlib.import_module(f"{first.__name__}.zoo")
        files = zoo.locate(job["model"])
        self.device = config.resolve_device(job.get("device"))
        checkpoint_dtype = config.ModelConfig.from_hf(files.config).dtype
        dtype = config.resolve_dtype(job.get("dtype") or "auto", checkpoint_dtype, self.device)
        self.dtype, self.backend = str(dtype).removeprefix("torch."), "sdpa"
        self.model = AutoModelForCausalLM.from_pretrained(files.weights, dtype=dtype).to(self.device).eval()
        self.model.generation_config.eos_token_id = None  # all rows make the same number of tokens
        self.model.generation_config.pad_token_id = 0
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.tokenizer = AutoTokenizer.from_pretrained(files.tokenizer)
        self.reset()

    def _count(self, module, args, kwargs) -> None:
        self.steps += 1
        self.tokens_forwarded += kwargs["input_ids"].shape[1]

    def encode(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[dict]:
        start = time.perf_counter()
        return [self._run_one(ids, max_tokens, start) for ids in prompts]

    def _run_one(self, ids: list[int], max_tokens: int, start: float) -> dict:
        clock = TokenClock(start)
        output = self.model.generate(
            torch.tensor([ids], device=self.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            streamer=clock,
            return_dict_in_generate=True,
        )
        tensors = [t for layer in output.past_key_values.layers for t in (layer.keys, layer.values)]
        self.kv_bytes = max(self.kv_bytes, sum(t.numel() * t.element_size() for t in tensors))
        return {"token_ids": output.sequences[0, len(ids) :].tolist(), "token_times": clock.times}

    def reset(self) -> None:
        self.steps, self.tokens_forwarded, self.kv_bytes = 0, 0, 0

    def counters(self) -> dict:
        return {"steps": self.steps, "tokens_forwarded": self.tokens_forwarded, "kv_bytes_peak": self.kv_bytes}


class TokenClock:
    """A streamer that notes when each token was there, since `start`. generate() hands it the prompt first."""

    def __init__(self, start: float):
        self.start = start
        self.times: list[float] = []
        self.seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self.seen_prompt:
            self.times.append(time.perf_counter() - self.start)
        self.seen_prompt = True

    def end(self) -> None:
        pass


def measure(engine: StageEngine | TransformersEngine | peers.Peer, job: dict) -> dict:
    """Warm up, then run all prompts `samples` times: all at once, as far as the engine can."""
    prompts, max_tokens = work_of(job)
    prompts = [engine.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    engine.run(prompts[:1], job.get("warmup_tokens", 4))
    samples = []
    for _ in range(job["samples"]):
        engine.reset()
        start = time.perf_counter()
        runs = engine.run(prompts, max_tokens)
        samples.append({"seconds": time.perf_counter() - start, "runs": runs, "counters": engine.counters()})
        emit({"tokens": sum(len(run["token_ids"]) for run in runs)})
    texts = [engine.decode(run["token_ids"]) for run in samples[0]["runs"]]
    result = {"dtype": engine.dtype, "attention_backend": engine.backend, "prompt_token_ids": prompts}
    return result | {"texts": texts, "samples": samples}


def work_of(job: dict) -> tuple[list, int | list[int]]:
    """Prompts, and how many tokens to make: of each, or of all."""
    if "workload" not in job:
        return job["prompts"], job["max_tokens"]
    requests = getattr(workloads, job["workload"])(**job["arguments"])[: job["first"]]
    return [request.prompt for request in requests], [request.max_tokens for request in requests]


def main() -> None:
    name, job = sys.argv[1], json.loads(sys.argv[2])
    own_stdout()
    if name in PEERS and job.get("device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before it is imported: a build for GPUs fails then, and is left out
    kinds = {REFERENCE: TransformersEngine} | dict.fromkeys(PEERS, peers.load)
    emit(measure(kinds.get(name, StageEngine)(name, job), job))


if __name__ == "__main__":
    main()
