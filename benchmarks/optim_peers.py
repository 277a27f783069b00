"""The work of benchmarks.optim speed for a peer: the same requests, in a process of its own, all times from outside."""

from argparse import Namespace

from .common import run_worker
from .optim_engine import PROMPT, random_prompts, summary


def measure_peer(row: dict, args: Namespace) -> dict:
    """One request alone and many, as for a stage. What a peer does not tell is None or missing."""
    vocab, found = 250 if args.model == "tiny" else 10001, {}
    alone = {"prompts": random_prompts(1, PROMPT, vocab), "max_tokens": args.tokens or 512}
    many = {"workload": "mixed_256", "arguments": {"vocab": vocab}, "first": args.requests}
    facts = {"startup_seconds": None, "peak_bytes": None, "kv_pool_bytes": 0, "left_bytes": 0, "used_options": {}}
    for name, work in {"one": alone, "many": many}.items():
        if args.workload in (name, "both"):
            job = {"model": args.model, "device": args.device, "dtype": args.dtype, "samples": args.repeats} | work
            job |= {"load_format": "dummy"} if args.dummy else {}
            result = run_worker(row["stage"], job, lambda tokens: None)
            samples = [timed(sample) for sample in result["samples"]]
            found[name] = summary(samples) | {"samples": samples}
            facts |= {"dtype": result["dtype"], "backend": result["attention_backend"]}
    return facts | found


def timed(sample: dict) -> dict:
    tokens = sum(len(run["token_ids"]) for run in sample["runs"])
    speed = {"seconds": sample["seconds"], "tokens": tokens, "tokens_per_second": tokens / sample["seconds"]}
    return speed | {"counters": {}}
