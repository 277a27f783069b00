"""Paged: what KV memory in blocks gains, and what happens when blocks run out.

    python -m benchmarks.paged memory     # KV memory over time: slots against blocks, the 256-request workload
    python -m benchmarks.paged capacity   # how many requests fit into the same KV memory at once
    python -m benchmarks.paged thrash     # more requests than the pool holds: watermark, recompute, swap
    python -m benchmarks.paged story      # a few huge prompts at concurrency 32 and 48, and two cures

All of it can be counted, and then it is exact on any machine; with --model and a GPU it is timed too. Each row runs in
a fresh process. Files: paged-NAME.json and paged-NAME.png.
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import ModuleType

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import gates, roofline
from .common import default_device, environment, publish, results_folder, run_in_turn, stages
from .plots_paged import draw_capacity, draw_memory, draw_story, draw_thrash

LESSON = "stage 4"

SLOTS, BLOCKS = (stage for stage in stages() if stage[5] in "34")
BLOCK = 16


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.paged",
        description="KV memory in blocks: how much it saves, and what happens when blocks run out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("what", choices=list(WHAT), help="which measurement")
    p.add_argument(
        "--model", default="tiny", help="a name; tiny: counters, given more positions where a row needs them"
    )
    p.add_argument("--dummy", action="store_true", help="random weights in the model's shapes")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--only", nargs="+", default=[""], help="only the rows whose name holds one of these texts")
    p.add_argument(
        "--samples", type=int, default=1, help="fresh processes per row, warmed up, in turn; the median counts"
    )
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


def row(name: str, stage: str, workload: str, arguments: dict | None = None, **options) -> dict:
    """One row of a measurement: an engine with its options, and the workload that it serves."""
    return {"name": name, "stage": stage, "workload": workload, "arguments": arguments or {}, "options": options}


def memory_rows(args: argparse.Namespace) -> list[dict]:
    """The same requests, all running at once: in slots of max_model_len, and in blocks of 16 and 256."""
    options = dict(max_num_seqs=256, max_model_len=2304 if args.model != "tiny" else 2048, max_num_batched_tokens=16384)
    vocab = {"vocab": 250} if args.model == "tiny" else {}
    rows = [row(f"slots of {options['max_model_len']:,}", SLOTS, "mixed_256", vocab, **options)]
    for size in (BLOCK, 256):
        tokens = 256 * options["max_model_len"]
        blocks = {"num_kv_blocks": tokens // size} if args.model == "tiny" else {}
        rows.append(row(f"blocks of {size}", BLOCKS, "mixed_256", vocab, block_size=size, **blocks, **options))
    return rows


def capacity_rows(args: argparse.Namespace) -> list[dict]:
    """32,768 tokens of KV memory. Slots: as many as fit. Blocks: as many requests as the pool lets in."""
    rows, tokens = [], 32768
    for length in (2048, 4096, 8192):
        arguments, common = {"num_requests": 160}, dict(max_model_len=length)
        slots = dict(max_num_seqs=tokens // length, max_num_batched_tokens=4096)
        rows.append(row(f"slots, up to {length:,} tokens", SLOTS, "short_answers", arguments, **slots, **common))
        pool = dict(num_kv_blocks=tokens // BLOCK, block_size=BLOCK, max_num_seqs=160, max_num_batched_tokens=4096)
        rows.append(row(f"blocks, up to {length:,} tokens", BLOCKS, "short_answers", arguments, **pool, **common))
    return rows


def thrash_rows(args: argparse.Namespace) -> list[dict]:
    """64 requests that grow to some 290 tokens each (on a real model 2,300), in a pool that holds 20 of that length.

    First come, first served with several watermarks; and time slices: whoever has run for so many steps makes room for
    the head of the queue, so that all advance alike and blocks move all the time.
    """
    is_tiny, arguments = args.model == "tiny", {"num_requests": 64}
    arguments |= {} if is_tiny else {"prompt_scale": 64}
    blocks, enough = (360, 1300) if is_tiny else (2880, 10000)
    pool = dict(num_kv_blocks=blocks, block_size=BLOCK, max_num_seqs=64, max_model_len=512 if is_tiny else 4096)
    swap = dict(preemption_mode="swap", num_swap_blocks=enough if is_tiny else 7000)

    def one(name: str, slice_steps: int = 0, **options) -> dict:
        return row(name, BLOCKS, "long_answers", arguments, **pool | options) | {"slice_steps": slice_steps}

    rows = [one("pool for all", num_kv_blocks=enough)]
    for watermark in (0.0, 0.05, 0.1, 0.2, 0.4) if is_tiny else (0.0, 0.1, 0.2):
        rows.append(one(f"recompute, watermark {watermark}", watermark=watermark))
    rows += [one(f"swap, watermark {w}", watermark=w, **swap) for w in (0.0, 0.1)]
    rows += [one(f"swap, slices of {n} steps", n, watermark=0.0, **swap) for n in (16, 4, 1)]
    return [*rows, one("recompute, slices of 4 steps", 4, watermark=0.0)]


def story_rows(args: argparse.Namespace) -> list[dict]:
    """A backlog of small requests with four documents in a row now and then: 32 at once, 48, and then the two cures."""
    pool = dict(num_kv_blocks=560, block_size=BLOCK, max_model_len=2048, max_num_batched_tokens=2048)

    def one(name: str, concurrency: int, **cure) -> dict:
        options = pool | {"max_num_seqs": concurrency, "watermark": 0.0} | cure
        return row(name, BLOCKS, "documents_among_small", **options)

    return [
        one("32 at once", 32),
        one("48 at once", 48),
        one("48, max_blocks_per_seq=64", 48, max_blocks_per_seq=64),
        one("48, max_num_prefills=1, watermark=0.1", 48, max_num_prefills=1, watermark=0.1),
    ]


WHAT = {"memory": memory_rows, "capacity": capacity_rows, "thrash": thrash_rows, "story": story_rows}
DRAW = {"memory": draw_memory, "capacity": draw_capacity, "thrash": draw_thrash, "story": draw_story}


def planned(args: argparse.Namespace) -> list[dict]:
    return [r for r in WHAT[args.what](args) if any(text in r["name"] for text in args.only)]


def measure(args: argparse.Namespace) -> list[dict]:
    """Every row in fresh processes, one per sample, in turn; with a summary."""
    rows = planned(args)
    with model_for(args) as model, tqdm(total=len(rows) * args.samples, unit="run", desc=args.what) as bar:
        plan = [(r["stage"], job_of(r, args, model)) for r in rows]
        results = run_in_turn(plan, args.samples, bar, "benchmarks.serve")
    check_lengths(rows, results)
    seconds = [[sample["seconds"] for sample in found["samples"]] for found in results]
    rows = [r | summary(found) | {"result": without_requests(found)} for r, found in zip(rows, results, strict=True)]
    return gates.mark(rows, gates.wide_spread(seconds)) if is_timed(args) else rows


def tiny_zoo() -> ModuleType:
    """The module that makes `tiny`."""
    return importlib.import_module(f"{BLOCKS}.zoo")


def more_positions(args: argparse.Namespace) -> int | None:
    """How many positions the rows need, if `tiny` has fewer; None: the model is taken as it is."""
    longest = max(r["options"]["max_model_len"] for r in planned(args))
    return longest if args.model == "tiny" and longest > tiny_zoo().TINY_CONFIG["max_position_embeddings"] else None


def model_name(args: argparse.Namespace) -> str:
    positions = more_positions(args)
    return f"tiny with {positions:,} positions" if positions else args.model


@contextmanager
def model_for(args: argparse.Namespace) -> Iterator[str]:
    """The model that the rows run: --model, or for as long as this lasts a folder of `tiny` with more positions.

    Its weights are the same: only the table of rotary angles is longer.
    """
    positions = more_positions(args)
    if positions is None:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(tiny_zoo().tiny_folder(), Path(scratch) / "tiny")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
        yield str(folder)


def check_lengths(rows: list[dict], results: list[dict]) -> None:
    """Raise RuntimeError for a row whose engine took another max_model_len than the row says."""
    for r, result in zip(rows, results, strict=True):
        wanted, ran = r["options"]["max_model_len"], result["max_model_len"]
        if ran != wanted:
            raise RuntimeError(f"{r['name']}: the engine ran with max_model_len={ran}, not {wanted}")


def job_of(r: dict, args: argparse.Namespace, model: str) -> dict:
    """What benchmarks.serve is told."""
    options = r["options"] | {"device": args.device, "dtype": args.dtype}
    options |= {"load_format": "dummy"} if args.dummy else {}
    job = {"model": model, "series": True, "temperature": 0.6, "slice_steps": r.get("slice_steps", 0)}
    return job | {"options": options} | {key: r[key] for key in ("workload", "arguments")}


def without_requests(result: dict) -> dict:
    """The first sample in full but for what each request saw, of the others the seconds."""
    first, *others = result["samples"]
    kept = [{key: value for key, value in first.items() if key != "requests"}]
    return result | {"samples": kept + [{"seconds": sample["seconds"]} for sample in others]}


def summary(result: dict) -> dict:
    """Counters and the series of the first sample (they do not vary), the median of the times."""
    first = result["samples"][0]
    counters, steps = first["counters"], first["series"]
    tokens = sum(request["tokens"] for request in first["requests"])
    seconds = median(sample["seconds"] for sample in result["samples"])
    reserved = max(steps["kv_tokens_reserved"])
    at_peak = steps["kv_tokens_reserved"].index(reserved)
    per_token = counters["kv_bytes_per_token"]
    return {
        "steps": counters["steps"],
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "most_at_once": max(steps["running"]),
        "kv_bytes_reserved": reserved * per_token,
        "kv_bytes_used": steps["kv_tokens_used"][at_peak] * per_token,
        "wasted_share": 1 - sum(steps["kv_tokens_used"]) / sum(steps["kv_tokens_reserved"]),
        "refused": len(first["refused"]),
        **{name: counters.get(name, 0) for name in ("preemptions", "recomputed_tokens", "swapped_out_blocks")},
        "longest_gap_steps": max(request["longest_gap_steps"] for request in first["requests"]),
    }


COLUMNS = {
    "steps": ("steps", "{:,}"),
    "most_at_once": ("requests at once", "{:,}"),
    "kv_bytes_reserved": ("KV reserved, MB", "{:,.0f}"),
    "kv_bytes_used": ("of that used, MB", "{:,.0f}"),
    "wasted_share": ("wasted", "{:.1%}"),
    "preemptions": ("preemptions", "{:,}"),
    "recomputed_tokens": ("tokens computed again", "{:,}"),
    "swapped_out_blocks": ("blocks swapped out", "{:,}"),
    "longest_gap_steps": ("longest wait, steps", "{:,}"),
    "refused": ("refused", "{:,}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}
SHOW = {
    "memory": ["steps", "kv_bytes_reserved", "kv_bytes_used", "wasted_share", "tokens_per_second"],
    "capacity": ["most_at_once", "steps", "wasted_share", "tokens_per_second"],
    "thrash": ["steps", "preemptions", "recomputed_tokens", "swapped_out_blocks", "tokens_per_second"],
    "story": ["steps", "preemptions", "recomputed_tokens", "longest_gap_steps", "refused"],
}


def cell(key: str, value: float) -> str:
    return COLUMNS[key][1].format(value / 2**20 if key.startswith("kv_bytes") else value)


def is_timed(args: argparse.Namespace) -> bool:
    """With `tiny`, whose steps cost next to nothing, only what is counted matters."""
    return args.model != "tiny"


def shown(args: argparse.Namespace) -> list[str]:
    return [key for key in SHOW[args.what] if is_timed(args) or key != "tokens_per_second"]


def print_table(document: dict, title: str) -> None:
    table = Table(title=title)
    table.add_column("row")
    for name in document["columns"].values():
        table.add_column(name, justify="right")
    for r, cells in zip(document["rows"], document["cells"], strict=True):
        table.add_row(gates.name(r, r["name"]), *cells)
    Console(width=120).print(table)
    gates.print_suspects(document["rows"])


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if args.samples < 1:
        cli.error("--samples must be at least 1")
    if not planned(args):
        cli.error(f"--only {args.only!r} leaves no row of {args.what}")
    card = {"roofline": roofline.show(args.model, args, roofline.points_of(planned(args)))} if is_timed(args) else {}
    rows = measure(args)
    device = args.device or default_device()
    env = environment(device)
    job = {"model": model_name(args), "samples": args.samples, "what": args.what}
    columns = {key: COLUMNS[key][0] for key in shown(args)}
    cells = [[cell(key, r[key]) for key in columns] for r in rows]
    document = {"environment": env, "job": job} | card | {"columns": columns, "cells": cells, "rows": rows}
    print_table(document, f"{job['model']}, {rows[0]['result']['dtype']}, {env['device_name']}")
    out = args.out or results_folder(device)
    publish(out / f"paged-{args.what}.json", document, DRAW[args.what])
    return 0


if __name__ == "__main__":
    sys.exit(main())
