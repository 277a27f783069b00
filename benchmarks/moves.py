"""Moves: what it costs to take a sequence's blocks away, by swap and by recompute, over its length and the model.

    python -m benchmarks.moves                                               # SmolLM2 on a CPU
    python -m benchmarks.moves --models qwen3-0.6b qwen3-8b --dummy --lengths 512 2048 8192   # a GPU

Each time is a median, with nothing else running: blocks out to host memory and back, the sequence's tokens computed
again in steps of the budget, and one decode step at that length, to compare with. Below them what a single block costs.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .common import default_device, environment, publish, results_folder, stages
from .plots_paged import draw_moves

LESSON = "stage 4"

(BLOCKS,) = (stage for stage in stages() if stage[5] == "4")
BUDGET = 2048


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.moves",
        description="Swap against recompute: milliseconds over context length and model size.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--models", nargs="+", default=["tiny", "smollm2-135m"], help="names, folders or hub ids")
    p.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048], help="tokens of the sequence")
    p.add_argument("--dummy", action="store_true", help="random weights in the models' shapes")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--samples", type=int, default=5, help="runs per number, after a warm-up; the median counts")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


class Bench:
    """An engine with room for one sequence of the greatest length, and a stopwatch."""

    def __init__(self, model: str, args: argparse.Namespace):
        self.stage = {
            name: importlib.import_module(f"{BLOCKS}.{name}") for name in ("batch", "block_manager", "sequence")
        }
        package = importlib.import_module(BLOCKS)
        longest = max(args.lengths)
        options = {"load_format": "dummy"} if args.dummy else {}
        self.llm = package.LLM(
            model, device=args.device, dtype=args.dtype, max_model_len=longest, preemption_mode="swap", **options,
            block_size=16, num_kv_blocks=-(-longest // 16), num_swap_blocks=-(-longest // 16),
            max_num_batched_tokens=BUDGET,
        )  # fmt: skip
        self.params = package.SamplingParams(temperature=0.0)
        self.runner, self.cache = self.llm.model_runner, self.llm.model_runner.kv_cache
        self.blocks = torch.randperm(self.llm.block_manager.num_blocks, generator=torch.manual_seed(0)).tolist()
        self.samples = args.samples

    def time(self, work: Callable[[], object]) -> float:
        """Milliseconds, the median of the samples."""
        times = []
        for _ in range(self.samples + 1):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            times.append(1000 * (time.perf_counter() - start))
        return median(times[1:])

    def wait(self) -> None:
        if self.cache.data.is_cuda:
            torch.cuda.synchronize()

    def swap(self, length: int, way: str) -> float:
        pairs = [(block, place) for place, block in enumerate(self.blocks[: length // 16])]
        pairs = [(place, block) for block, place in pairs] if way == "swap_in" else pairs
        return self.time(lambda: self.cache.move(self.stage["block_manager"].BlockMoves(**{way: pairs})))

    def compute(self, length: int, start: int) -> float:
        """Tokens start ... length - 1, in steps of at most the budget."""
        return self.time(lambda: [self.step(at, min(at + BUDGET, length)) for at in range(start, length, BUDGET)])

    def step(self, start: int, end: int) -> None:
        seq = self.stage["sequence"].Sequence("s", [1 + i % 200 for i in range(end)], self.params, 0, (), 1, None)
        seq.num_computed_tokens = start
        batch = self.stage["batch"].Batch(BUDGET)
        batch.add(self.stage["sequence"].SequenceGroup([seq]), seq, self.blocks[: -(-end // 16)], may_cut=False)
        self.runner.run(batch)

    def piece(self, tensor: torch.Tensor) -> float:
        """One tensor to the host and back."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        there = self.time(lambda: host.copy_(tensor, non_blocking=True))
        return there + self.time(lambda: tensor.copy_(host, non_blocking=True))


def measure(model: str, args: argparse.Namespace, bar: tqdm) -> tuple[list[dict], dict]:
    bench, rows = Bench(model, args), []
    data = bench.cache.data
    pieces = {
        "one block of one layer": (data[0, :, 0].contiguous().nbytes, bench.piece(data[0, :, 0].contiguous())),
        "one block of all layers": (
            data[:, :, 0].contiguous().nbytes,
            bench.swap(16, "swap_out") + bench.swap(16, "swap_in"),
        ),
    }
    for length in args.lengths:
        rows.append(
            {
                "model": model,
                "length": length,
                "bytes": length * bench.cache.bytes_per_token,
                "swap_out_ms": bench.swap(length, "swap_out"),
                "swap_in_ms": bench.swap(length, "swap_in"),
                "recompute_ms": bench.compute(length, 0),
                "decode_ms": bench.compute(length, length - 1),
                "dtype": str(data.dtype).removeprefix("torch."),
            }
        )
        bar.update()
    bench.llm.close()
    return rows, {name: {"bytes": size, "there_and_back_ms": ms} for name, (size, ms) in pieces.items()}


def print_table(rows: list[dict], pieces: dict, title: str) -> None:
    table = Table(title=title)
    for name in ("model", "tokens", "MB", "out, ms", "back, ms", "recompute, ms", "decode step, ms"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for r in rows:
        times = [f"{r[key]:.2f}" for key in ("swap_out_ms", "swap_in_ms", "recompute_ms", "decode_ms")]
        table.add_row(r["model"], f"{r['length']:,}", f"{r['bytes'] / 2**20:,.1f}", *times)
    Console(width=120).print(table)
    for model, found in pieces.items():
        for name, piece in found.items():
            print(f"{model}, {name}: {piece['bytes']:,} bytes, {piece['there_and_back_ms']:.3f} ms there and back")


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if args.samples < 1 or min(args.lengths) < 16 or any(length % 16 for length in args.lengths):
        cli.error("--samples must be at least 1, and --lengths multiples of 16")
    rows, pieces = [], {}
    with tqdm(total=len(args.models) * len(args.lengths), unit="row", desc="moves") as bar:
        for model in args.models:
            found, pieces[model] = measure(model, args, bar)
            rows += found
    device = args.device or default_device()
    env = environment(device)
    job = {"model": ", ".join(args.models), "samples": args.samples, "what": "moves", "budget": BUDGET}
    document = {"environment": env, "job": job, "rows": rows, "pieces": pieces}
    print_table(rows, pieces, f"{rows[0]['dtype']}, {env['device_name']}")
    out = args.out or results_folder(device)
    publish(out / "paged-moves.json", document, draw_moves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
