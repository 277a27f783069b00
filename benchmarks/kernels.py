"""Kernels: paged attention alone, by the clock of a GPU, against flash-attn where it is installed.

    python -m benchmarks.kernels               # decoding, chunks of prompts, a mixed step: a minute
    python -m benchmarks.kernels --sweep       # tile sizes, warps, pipeline stages and splits: two to three minutes

Decoding reads every K and V once and computes next to nothing: TB/s of K and V, to be held against the memory's own
bandwidth. Chunks of prompts compute: TFLOP/s. Calls are captured in a CUDA graph, so no launch from Python counts, and
rotate among sequences whose K and V together are several times the L2 cache. Block tables are shuffled. Before a kernel
is timed its result is compared with float64. Files: kernels.json, kernels-sweep.json.
"""

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .common import ROOT, environment, publish, results_folder, stages

LESSON = "stage 4"

KV_HEADS, HEAD_DIM = 8, 128
ENOUGH = 256 * 2**20  # bytes of K and V in one graph: more than four times the L2 cache of an H200
KERNELS = [stage for stage in stages() if (ROOT / stage / "paged_attention.py").exists()]


@dataclass(frozen=True)
class Shape:
    """One step: (query_len, seq_len) of each sequence."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 16

    @property
    def decode(self) -> bool:
        return all(query_len == 1 for query_len, _ in self.sequences)

    @property
    def kv_bytes(self) -> int:
        return sum(seq_len for _, seq_len in self.sequences) * 2 * KV_HEADS * HEAD_DIM * 2

    @property
    def flops(self) -> int:
        """Two products, a multiplication and an addition each, for every pair that the causal mask leaves."""
        pairs = sum(q * (s - q) + q * (q + 1) // 2 for q, s in self.sequences)
        return 4 * pairs * self.num_heads * HEAD_DIM


def decode_shape(batch: int, context: int, num_heads: int = 16) -> Shape:
    note = "" if num_heads == 16 else f", {num_heads} heads"
    return Shape(f"decode {batch} x {context:,}{note}", ((1, context),) * batch, num_heads)


DECODE = [decode_shape(batch, context) for batch in (1, 32, 131, 256) for context in (512, 1024, 2048, 8192)]
CHUNKS = [Shape("chunk of 2,048 from nothing", ((2048, 2048),)), Shape("chunk of 2,048 on 8,192", ((2048, 10240),))]
MIXED = Shape("64 decode at 2,048 and a chunk of 1,024", ((1, 2048),) * 64 + ((1024, 1024),))
SHAPES = [*DECODE, decode_shape(32, 2048, num_heads=32), *CHUNKS, MIXED]
SWEEP_DECODE = [decode_shape(batch, context) for batch in (1, 32, 256) for context in (1024, 8192)]
SWEEP_SPLITS = {1: (8, 16, 33, 64), 32: (1, 2, 4), 256: (1, 2)}
# (BLOCK_M, BLOCK_N, num_warps, num_stages)
DECODE_TILES = [(16, 32, warps, stages) for warps in (1, 2, 4) for stages in (3, 4, 6)]
DECODE_TILES += [(16, 64, warps, stages) for warps in (2, 4) for stages in (2, 3, 4)]
DECODE_TILES += [(16, 128, 4, 2), (16, 128, 4, 3), (16, 128, 8, 2)]
CHUNK_TILES = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 8, 3), (128, 64, 4, 2)]
CHUNK_TILES += [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3)]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="Paged attention alone: bandwidth of decoding, arithmetic of prompts, on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--stage", default=KERNELS[-1] if KERNELS else None, choices=KERNELS, help="whose kernels")
    p.add_argument("--sweep", action="store_true", help="try tile sizes, warps, stages and splits instead")
    p.add_argument("--only", default="", help="only the rows whose name holds this text")
    p.add_argument("--samples", type=int, default=9, help="replays of each graph; the median counts")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/h200, ...")
    return p


class Setup:
    """Random K and V, q, and block tables for one shape: what the kernels are called with, several times over."""

    def __init__(self, shape: Shape, block_size: int, memory: torch.Tensor):
        self.shape = shape
        query_lens, seq_lens = zip(*shape.sequences, strict=True)
        blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
        self.distinct = -(-ENOUGH // shape.kv_bytes)
        num_blocks = self.distinct * sum(blocks)
        numbers = 2 * num_blocks * block_size * KV_HEADS * HEAD_DIM
        self.kv = memory[:numbers].view(2, num_blocks, block_size, KV_HEADS, HEAD_DIM)
        self.q = torch.randn(sum(query_lens), shape.num_heads, HEAD_DIM, device="cuda", dtype=memory.dtype)
        self.out = torch.empty_like(self.q)
        ends = torch.tensor([0, *accumulate(blocks)])
        place = torch.arange(max(blocks))[None] + ends[:-1, None]  # [N, max_blocks]: the sequence's pieces of a shuffle
        place = place.where(place < ends[1:, None], 0).cuda()
        tables = torch.randperm(num_blocks, device="cuda").int().view(self.distinct, -1)
        common = {"query_lens": list(query_lens), "seq_lens": list(seq_lens)}
        common |= {"seq_lens_tensor": torch.tensor(seq_lens, device="cuda", dtype=torch.int32)}
        for name, lens in (("cu_seqlens_q", query_lens), ("cu_seqlens_k", seq_lens)):
            common[name] = torch.tensor([0, *accumulate(lens)], device="cuda", dtype=torch.int32)
        self.steps = [SimpleNamespace(**common, block_table=table[place]) for table in tables]

    def error(self, out: torch.Tensor) -> float:
        """Of the first call, over the first and the last sequences, against float64: |out - expected| / |expected|."""
        step, size, worst = self.steps[0], self.kv.shape[2], 0.0
        for i in {0, len(self.shape.sequences) - 1}:
            query_len, seq_len = self.shape.sequences[i]
            rows = slice(step.cu_seqlens_q[i], step.cu_seqlens_q[i] + query_len)
            positions = torch.arange(seq_len, device="cuda")
            slots = step.block_table[i, positions // size].long() * size + positions % size
            expected = exact(self.q[rows], *self.kv.flatten(1, 2)[:, slots])
            got = out[rows].double()
            worst = max(worst, ((got - expected).norm() / expected.norm()).nan_to_num(float("inf")).item())
        return worst


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by its definition in float64, one KV head at a time. q holds the last tokens of k and v."""
    group = q.shape[1] // KV_HEADS
    visible = torch.ones(len(q), len(k), device="cuda", dtype=torch.bool).tril(len(k) - len(q))
    outs = []
    for head in range(KV_HEADS):
        q_head, k_head, v_head = (
            q[:, head * group : (head + 1) * group].double(),
            k[:, head].double(),
            v[:, head].double(),
        )
        scores = torch.einsum("qhd,kd->hqk", q_head, k_head) * HEAD_DIM**-0.5
        outs.append(torch.einsum("hqk,kd->qhd", scores.where(visible, float("-inf")).softmax(-1), v_head))
    return torch.cat(outs, dim=1)


def call_triton(kernels: ModuleType) -> Callable[[Setup, SimpleNamespace], torch.Tensor]:
    def call(setup: Setup, step: SimpleNamespace) -> torch.Tensor:
        if len(setup.q) > len(step.seq_lens):
            kernels.attend_chunks(setup.q, setup.kv, step, setup.out)
        if 1 in step.query_lens:
            kernels.attend_decode(setup.q, setup.kv, step, setup.out)
        return setup.out

    return call


def call_flash(setup: Setup, step: SimpleNamespace) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    if setup.shape.decode:
        lens, table = step.seq_lens_tensor, step.block_table
        q = setup.q[:, None]
        return flash_attn_with_kvcache(q, *setup.kv, cache_seqlens=lens, block_table=table, causal=True)[:, 0]
    return flash_attn_varlen_func(
        setup.q,
        *setup.kv,
        cu_seqlens_q=step.cu_seqlens_q,
        cu_seqlens_k=step.cu_seqlens_k,
        max_seqlen_q=max(step.query_lens),
        max_seqlen_k=max(step.seq_lens),
        block_table=step.block_table,
        causal=True,
    )


def measure(call: Callable, setup: Setup, samples: int) -> dict:
    """Seconds of one call: median, least and most over replays of a graph of calls. Raises if the result is off."""
    setup.out.fill_(float("nan"))
    error = setup.error(call(setup, setup.steps[0]))
    if error > 1e-2:
        raise RuntimeError(f"{setup.shape.name}: the result is off by {error:.1e}")
    calls = max(4, setup.distinct)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(setup, setup.steps[i % setup.distinct])
    seconds = []
    for _ in range(samples + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000 / calls)
    seconds = seconds[2:]  # the first replays warm up
    rate = setup.shape.kv_bytes if setup.shape.decode else setup.shape.flops
    result = {"seconds": median(seconds), "least": min(seconds), "most": max(seconds), "error": error, "calls": calls}
    return result | {"unit": "TB/s" if setup.shape.decode else "TFLOP/s", "rate": rate / median(seconds) / 1e12}


def host_seconds(kernels: ModuleType, memory: torch.Tensor) -> float:
    """What one whole call costs Python, write kernel included: a batch of 8, without a graph."""
    setup = Setup(decode_shape(8, 1024), 16, memory)
    step = setup.steps[0]
    step.slot_mapping = torch.arange(8, device="cuda")
    k, v = torch.randn(2, 8, KV_HEADS, HEAD_DIM, device="cuda", dtype=memory.dtype)
    for calls in (10, 200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            kernels.attend_triton(setup.q, k, v, setup.kv, step)
        seconds = (time.perf_counter() - start) / calls
    return seconds


def make_memory(shapes: list[Shape]) -> torch.Tensor:
    """Random bf16 numbers for the K and V of the largest shape: 8.6 GB for all of them."""
    most = max(-(-ENOUGH // shape.kv_bytes) * (shape.kv_bytes + len(shape.sequences) * 256 * 4096) for shape in shapes)
    return torch.randn(most // 2, device="cuda", dtype=torch.bfloat16)


def compare(kernels: ModuleType, shapes: list[Shape], samples: int) -> list[dict]:
    """Every shape with our kernels at two block sizes, and with flash-attn at the one that it has."""
    columns = {"triton, blocks of 16": (call_triton(kernels), 16), "triton, blocks of 256": (call_triton(kernels), 256)}
    if importlib.util.find_spec("flash_attn"):
        columns["flash_attn, blocks of 256"] = (call_flash, 256)
    memory, rows = make_memory(shapes), []
    for shape in tqdm(shapes, unit="shape", desc="kernels"):
        results = {name: measure(call, Setup(shape, size, memory), samples) for name, (call, size) in columns.items()}
        rows.append({"name": shape.name, "num_heads": shape.num_heads, "results": results})
    return rows


def print_comparison(rows: list[dict], title: str) -> None:
    columns = list(rows[0]["results"])
    table = Table(title=title)
    table.add_column("step")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("triton 16 / flash", justify="right")
    for row in rows:
        results = [row["results"][name] for name in columns]
        cells = [f"{r['rate']:.2f} {r['unit']}, {r['seconds'] * 1e6:,.1f} us" for r in results]
        ratio = f"{results[0]['rate'] / results[-1]['rate']:.2f}" if len(results) > 2 else ""
        table.add_row(row["name"], *cells, ratio)
    Console(width=120).print(table)


def sweep_plan(only: str) -> list[tuple[Shape, list, tuple]]:
    """Shapes, the tiles to try on each, and the numbers of splits."""
    plan = [(shape, DECODE_TILES, SWEEP_SPLITS[len(shape.sequences)]) for shape in SWEEP_DECODE]
    return [entry for entry in [*plan, *((shape, CHUNK_TILES, (1,)) for shape in CHUNKS)] if only in entry[0].name]


def sweep(kernels: ModuleType, plan: list, samples: int) -> list[dict]:
    """Every candidate on every shape. The first row of a shape is the engine's own choice."""
    memory, rows = make_memory([shape for shape, *_ in plan]), []
    for shape, tiles, splits in tqdm(plan, unit="shape", desc="sweep"):
        setup = Setup(shape, 16, memory)
        rows.append({"name": shape.name, "config": {}} | measure(call_triton(kernels), setup, samples))
        for tile, count in product(tiles, splits):
            config = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), tile, strict=True))
            rows.append(
                {"name": shape.name, "config": config, "splits": count} | attempt(kernels, setup, config, count)
            )
    return rows


def attempt(kernels: ModuleType, setup: Setup, config: dict, splits: int) -> dict:
    """One candidate, or why it is none: its tiles may not fit into shared memory."""
    with patch.multiple(kernels, kernel_config=lambda *_: config, choose_num_splits=lambda *_: splits):
        try:
            return measure(call_triton(kernels), setup, 3)
        except Exception as error:  # Triton's OutOfResources, a wrong result: the others are still worth their time
            return {"failure": f"{type(error).__name__}: {error}"}


def print_sweep(rows: list[dict], best: int = 5) -> None:
    table = Table(title="the best candidates; first the engine's own choice")
    for column in ("step", "BLOCK_M, BLOCK_N", "warps", "stages", "splits", "rate", "us"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name in dict.fromkeys(row["name"] for row in rows):
        own, *others = (row for row in rows if row["name"] == name and "failure" not in row)
        for row in [own, *sorted(others, key=lambda row: row["seconds"])[:best]]:
            tile = ", ".join(str(row["config"][key]) for key in ("BLOCK_M", "BLOCK_N") if row["config"]) or "engine"
            cells = (str(row["config"].get(key, "")) for key in ("num_warps", "num_stages"))
            rate = f"{row['rate']:.2f} {row['unit']}", f"{row['seconds'] * 1e6:,.1f}"
            table.add_row(name, tile, *cells, str(row.get("splits", "")), *rate)
        table.add_section()
    Console(width=120).print(table)
    failures = [f"{row['name']}, {row['config']}: {row['failure']}" for row in rows if "failure" in row]
    print(f"{len(failures)} of {len(rows)} candidates could not run", *failures[:3], sep="\n")


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if args.stage is None:
        cli.error("no stage has a paged_attention.py")
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        cli.error("needs a CUDA GPU and the package triton")
    shapes, plan = [shape for shape in SHAPES if args.only in shape.name], sweep_plan(args.only)
    if not (plan if args.sweep else shapes) or args.samples < 1:
        cli.error(f"--only {args.only!r} leaves no row, or --samples is below 1")
    kernels = importlib.import_module(f"{args.stage}.paged_attention")
    torch.manual_seed(0)
    env, out = environment("cuda"), args.out or results_folder("cuda")
    job = {
        "model": "attention alone, random K and V",
        "stage": args.stage,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "dtype": "bfloat16",
        "samples": args.samples,
    }
    if args.sweep:
        rows, file = sweep(kernels, plan, args.samples), out / "kernels-sweep.json"
        print_sweep(rows)
    else:
        rows, file = compare(kernels, shapes, args.samples), out / "kernels.json"
        print_comparison(rows, f"{args.stage}, 8 KV heads of 128, bfloat16, {env['device_name']}")
        job["host_seconds_per_call"] = host_seconds(kernels, make_memory([decode_shape(8, 1024)]))
        print(f"Python's part of a call outside a graph: {job['host_seconds_per_call'] * 1e6:.0f} us")
    publish(file, {"environment": env, "job": job, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
