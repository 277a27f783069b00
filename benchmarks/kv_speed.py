"""KV speed: paged attention over a quantised cache against the same over bf16, by the clock of a GPU.

    python -m benchmarks.kv_speed              # decoding and a chunk, bf16, int8 and fp8: half a minute
    python -m benchmarks.kv_speed --sweep      # tiles, warps and stages for int8 and fp8: two minutes

Setup and clock are those of benchmarks.kernels: CUDA graphs, shuffled blocks, several times the L2 cache, results
compared with float64 before they are timed. TB/s are of the bytes that are there, scales included.
Files: kv-speed.json, kv-speed-sweep.json.
"""

import argparse
import importlib
import importlib.util
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .common import ROOT, environment, publish, results_folder, stages
from .kernels import (
    HEAD_DIM,
    KV_HEADS,
    Setup,
    Shape,
    attempt,
    call_triton,
    decode_shape,
    exact,
    make_memory,
    measure,
    print_sweep,
)
from .plots_kv import draw_kv_speed

LESSON = "stage 5"
STAGES = [stage for stage in stages() if (ROOT / stage / "quantised_kv.py").exists()]
NAMES = {"bf16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHAPES = [decode_shape(*sizes) for sizes in ((256, 2048), (256, 512), (32, 2048), (8, 2048), (1, 8192))]
SHAPES += [decode_shape(256, 2048, num_heads=32), Shape("chunk of 2,048 on 8,192", ((2048, 10240),))]
# (BLOCK_M, BLOCK_N, num_warps, num_stages)
TILES = [(16, 64, warps, stages) for warps in (2, 4) for stages in (3, 4, 6)]
TILES += [(16, 128, 4, stages) for stages in (2, 3, 4)] + [(16, 128, 8, 3), (16, 32, 2, 4), (16, 32, 4, 6)]


class ByteSetup(Setup):
    """The same K and V in bytes, or as they are where kv_dtype is None."""

    def __init__(self, shape: Shape, memory: torch.Tensor, stage: str, kv_dtype: torch.dtype | None):
        super().__init__(shape, 16, memory)
        self.token_bytes = 4 * HEAD_DIM * KV_HEADS  # K and V
        if kv_dtype is not None:
            quantised_kv = importlib.import_module(f"{stage}.quantised_kv")
            self.token_bytes = 2 * KV_HEADS * quantised_kv.head_bytes(HEAD_DIM, kv_dtype)
            plain, num_blocks = self.kv, self.kv.shape[1]
            pool = torch.empty(num_blocks, 16 * self.token_bytes, dtype=torch.uint8, device="cuda")
            self.kv = quantised_kv.QuantisedKV.view(pool, 16, KV_HEADS, HEAD_DIM, kv_dtype)
            for start in range(0, num_blocks, 4096):  # fp32 copies of all would need too much memory
                some = slice(start, start + 4096)
                numbers, scales = quantised_kv.quantise(plain[:, some], kv_dtype)
                self.kv.numbers[:, some].view(torch.uint8).copy_(numbers.view(torch.uint8))
                self.kv.scales[:, some].copy_(scales)

    def error(self, out: torch.Tensor) -> float:
        """As Setup's, against the numbers that the bytes stand for."""
        step, worst = self.steps[0], 0.0
        for i in {0, len(self.shape.sequences) - 1}:
            query_len, seq_len = self.shape.sequences[i]
            rows = slice(step.cu_seqlens_q[i], step.cu_seqlens_q[i] + query_len)
            blocks = step.block_table[i, : -(-seq_len // 16)].long()
            found = self.kv[:, blocks] if isinstance(self.kv, torch.Tensor) else self.kv.read(blocks, torch.float64)
            expected = exact(self.q[rows], *found.flatten(1, 2)[:, :seq_len])
            error = (out[rows].double() - expected).norm() / expected.norm()
            worst = max(worst, error.nan_to_num(float("inf")).item())
        return worst

    @property
    def num_bytes(self) -> int:
        return self.token_bytes * sum(seq_len for _, seq_len in self.shape.sequences)


def timed(kernels: ModuleType, setup: ByteSetup, samples: int) -> dict:
    result = measure(call_triton(kernels), setup, samples)
    if setup.shape.decode:
        result["rate"] = setup.num_bytes / result["seconds"] / 1e12
    return result


def compare(kernels: ModuleType, shapes: list[Shape], stage: str, samples: int) -> list[dict]:
    memory, rows = make_memory(shapes), []
    for shape in tqdm(shapes, unit="shape", desc="KV speed"):
        results = {
            name: timed(kernels, ByteSetup(shape, memory, stage, dtype), samples) for name, dtype in NAMES.items()
        }
        rows.append({"name": shape.name, "num_heads": shape.num_heads, "results": results})
    return rows


def columns_and_cells(rows: list[dict]) -> tuple[dict[str, str], list[list[str]]]:
    """Heads by key, and the cells of each row: a time and a rate for each dtype, and how many times as fast it is."""
    columns = {name: name for name in NAMES} | {"int8 gain": "int8, times as fast", "fp8 gain": "fp8, times as fast"}
    cells = []
    for row in rows:
        results = [row["results"][name] for name in NAMES]
        times = [f"{r['seconds'] * 1e6:,.1f} us, {r['rate']:.2f} {r['unit']}" for r in results]
        cells.append([*times, *(f"{results[0]['seconds'] / r['seconds']:.2f} x" for r in results[1:])])
    return columns, cells


def print_comparison(document: dict, title: str) -> None:
    table = Table(title=title)
    for column in ("step", *document["columns"].values()):
        table.add_column(column, justify="left" if column == "step" else "right")
    for row, cells in zip(document["rows"], document["cells"], strict=True):
        table.add_row(row["name"], *cells)
    Console(width=140).print(table)


def sweep(kernels: ModuleType, shapes: list[Shape], stage: str, samples: int) -> list[dict]:
    """Every tile for int8 and fp8; first the engine's own choice."""
    memory, rows = make_memory(shapes), []
    for shape, name in tqdm(list(product(shapes, ("int8", "fp8"))), desc="sweep"):
        setup = ByteSetup(shape, memory, stage, NAMES[name])
        splits = kernels.choose_num_splits(KV_HEADS * len(shape.sequences), shape.sequences[0][1], 64, 132)
        rows.append({"name": f"{shape.name}, {name}", "config": {}} | measure(call_triton(kernels), setup, samples))
        for tile in TILES:
            config = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), tile, strict=True))
            found = attempt(kernels, setup, config, splits)
            rows.append({"name": f"{shape.name}, {name}", "config": config, "splits": splits} | found)
    return rows


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_speed",
        description="Paged attention over a quantised KV cache, on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--stage", default=STAGES[-1] if STAGES else None, choices=STAGES, help="whose kernels")
    p.add_argument("--sweep", action="store_true", help="try tile sizes, warps and stages instead")
    p.add_argument("--only", default="", help="only the rows whose name holds this text")
    p.add_argument("--samples", type=int, default=9, help="replays of each graph; the median counts")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/h200, ...")
    return p


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if args.stage is None:
        cli.error("no stage has a quantised_kv.py")
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        cli.error("needs a CUDA GPU and the package triton")
    shapes = [shape for shape in SHAPES if args.only in shape.name and (shape.decode or not args.sweep)]
    if not shapes or args.samples < 1:
        cli.error(f"--only {args.only!r} leaves no row, or --samples is below 1")
    kernels = importlib.import_module(f"{args.stage}.paged_attention")
    torch.manual_seed(0)
    env, out = environment("cuda"), args.out or results_folder("cuda")
    job = {
        "what": "attention over a quantised cache",
        "model": "attention alone, random K and V",
        "stage": args.stage,
        "kv_heads": KV_HEADS,
    }
    job |= {"head_dim": HEAD_DIM, "dtype": "bfloat16", "samples": args.samples}
    document = {"environment": env, "job": job}
    if args.sweep:
        document |= {"rows": sweep(kernels, shapes[:1] + shapes[2:5], args.stage, args.samples)}
        print_sweep(document["rows"])
        publish(out / "kv-speed-sweep.json", document)
        return 0
    document |= {"rows": compare(kernels, shapes, args.stage, args.samples)}
    document["columns"], document["cells"] = columns_and_cells(document["rows"])
    print_comparison(document, f"{args.stage}, 8 KV heads of 128, blocks of 16, {env['device_name']}")
    publish(out / "kv-speed.json", document, draw_kv_speed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
