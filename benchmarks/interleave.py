"""Interleave: several engines serve the same workload in one process, one step of each in turn.

    python -m benchmarks.interleave --model qwen3-0.6b --dummy      # a GPU

Where a step is launched from Python, its time hangs on the host, and a host that is shared runs now faster, now slower.
In turn, step by step, all engines meet the same host, so the ratio of their times is theirs. File: interleave.json.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import roofline, workloads
from .common import default_device, environment, publish, results_folder, stages

LESSON = "stage 4"

SLOTS, BLOCKS = (stage for stage in stages() if stage[5] in "34")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.interleave",
        description="The 256-request workload in slots and in blocks, one step of each engine in turn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", default="tiny", help="a name, a folder or a hub id")
    p.add_argument("--dummy", action="store_true", help="random weights in the model's shapes")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--requests", type=int, default=256, help="the first so many of the 256")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


def rows(args: argparse.Namespace) -> list[dict]:
    """Engines and their options. The pools hold what the workload needs at its peak, and a little more."""
    common = dict(max_num_seqs=256, max_model_len=2048 if args.model == "tiny" else 2304, max_num_batched_tokens=16384)
    tokens = 256 * 900
    found = [dict(name=f"slots of {common['max_model_len']:,}", stage=SLOTS, options=common)]
    for size in (16, 256):
        options = common | dict(block_size=size, num_kv_blocks=tokens // size)
        found.append(dict(name=f"blocks of {size}", stage=BLOCKS, options=options))
    return found


class Runner:
    """One engine with the whole workload in its queue."""

    def __init__(self, row: dict, args: argparse.Namespace):
        stage = importlib.import_module(row["stage"])
        options = row["options"] | {"device": args.device, "dtype": args.dtype}
        options |= {"load_format": "dummy"} if args.dummy else {}
        self.llm = stage.LLM(args.model, **options)
        self.seconds = 0.0
        requests = workloads.mixed_256(250 if args.model == "tiny" else 10001)[: args.requests]
        warm = stage.SamplingParams(temperature=0.6, max_tokens=3, ignore_eos=True)
        self.llm.generate([request.prompt for request in requests[:8]], warm, use_tqdm=False)
        self.llm.metrics.reset()
        for i, request in enumerate(requests):
            params = stage.SamplingParams(temperature=0.6, seed=i, max_tokens=request.max_tokens, ignore_eos=True)
            self.llm.add_request(request.prompt, params)
        self.num_tokens = sum(request.max_tokens for request in requests)

    def step(self) -> bool:
        """One step, timed to its end: it reads the sampled tokens, so the device is done. False when all are served."""
        if not self.llm.has_unfinished_requests():
            return False
        start = time.perf_counter()
        self.llm.step()
        self.seconds += time.perf_counter() - start
        return True

    def result(self) -> dict:
        metrics, resolved = self.llm.metrics, self.llm.resolved
        phases = {name: sum(r.seconds[name] for r in metrics.trace) for name in metrics.trace[0].seconds}
        counters = metrics.counters()
        return {
            "backend": resolved.attention_backend,
            "dtype": str(resolved.dtype).removeprefix("torch."),
            "seconds": self.seconds,
            "tokens_per_second": self.num_tokens / self.seconds,
            "phases": phases,
            "counters": counters,
            "kv_bytes_reserved": counters["kv_bytes_per_token"] * counters["kv_tokens_reserved_peak"],
        }


def print_table(found: list[dict], title: str) -> None:
    table = Table(title=title)
    for name in ("engine", "attention", "steps", "KV reserved, MB", "seconds", "tokens/s", "to the first"):
        table.add_column(name, justify="left" if name in ("engine", "attention") else "right")
    for r in found:
        numbers = f"{r['counters']['steps']:,}", f"{r['kv_bytes_reserved'] / 2**20:,.0f}", f"{r['seconds']:.2f}"
        ratio = r["tokens_per_second"] / found[0]["tokens_per_second"]
        table.add_row(r["name"], r["backend"], *numbers, f"{r['tokens_per_second']:,.0f}", f"{ratio:.2f}")
    Console(width=120).print(table)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    plan = rows(args)
    card = roofline.show(args.model, args, [(args.requests, 900)])  # about what the 256 see on average
    runners = [Runner(row, args) for row in plan]
    with tqdm(desc="interleave", unit="step") as bar:
        while any([runner.step() for runner in runners]):  # a list: each one steps
            bar.update()
    found = [row | runner.result() for row, runner in zip(plan, runners, strict=True)]
    env = environment(args.device or default_device())
    print_table(found, f"{args.model}, {found[0]['dtype']}, {env['device_name']}")
    job = {"model": args.model, "what": "interleave", "requests": args.requests}
    out = args.out or results_folder(env["device"])
    publish(out / "interleave.json", {"environment": env, "job": job, "roofline": card, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
