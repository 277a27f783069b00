"""Prefix: what a cache of prefixes saves, in memory, in work and in time to the first token; and what it costs.

    python -m benchmarks.prefix claims                                      # memory and work, counted
    python -m benchmarks.prefix ttft --model smollm2-135m                   # a prompt that was seen before
    python -m benchmarks.prefix ttft --model qwen3-0.6b --dummy             # on a GPU; an H200: half a minute
    python -m benchmarks.prefix host                                        # what hashing adds to a step, without a hit

claims and host run on `tiny`; what is counted is exact on any machine. Files: prefix-NAME.json and prefix-NAME.png.
"""

import argparse
import importlib
import random
import sys
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import roofline
from .common import default_device, environment, publish, results_folder, stages
from .plots_prefix import draw_claims, draw_ttft

LESSON = "stage 5"

STAGE = stages()[-1]
BLOCK = 16


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix",
        description="Prefix caching: what it saves and what it costs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("what", choices=list(WHAT), help="which measurement")
    p.add_argument("--model", default="tiny", help="ttft: a name, a folder or a hub id")
    p.add_argument("--dummy", action="store_true", help="random weights in the model's shapes")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--lengths", type=int, nargs="+", help="ttft: tokens; left out: 128 512 1024, and 2048 if not tiny")
    p.add_argument("--block-size", type=int, default=BLOCK, help="ttft: tokens of a block; 0: the engine's own choice")
    p.add_argument("--samples", type=int, default=3, help="runs per number, after a warm-up; the median counts")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


def engine(args: argparse.Namespace, caching: bool, model: str = "tiny", **options):
    package = importlib.import_module(STAGE)
    options |= {"load_format": "dummy"} if args.dummy else {}
    common = dict(device=args.device, dtype=args.dtype, block_size=BLOCK, enable_prefix_caching=caching)
    return package, package.LLM(model, **common | options)


def prompts(count: int, shared: int, own: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts that begin with the same `shared` tokens and go on with `own` tokens each."""
    rng = random.Random(seed)
    stem = [rng.randrange(250) for _ in range(shared)]
    return [stem + [rng.randrange(250) for _ in range(own)] for _ in range(count)]


def count_one(args: argparse.Namespace, count: int, shared: int, own: int, new: int, caching: bool) -> dict:
    """Counters of `count` requests that come at once."""
    blocks = 2 * count * (shared + own + new) // BLOCK
    package, llm = engine(args, caching, num_kv_blocks=blocks, max_num_seqs=count, max_num_batched_tokens=8192)
    with llm:
        params = package.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        llm.generate(prompts(count, shared, own), params, use_tqdm=False)
        return llm.metrics.counters()


def claims(args: argparse.Namespace) -> list[dict]:
    """A prefix of 40 % of the context, shared by more and more; and the article's 200 + 50 tokens."""
    cases = [(count, 160, 208, 32) for count in (1, 2, 4, 5, 8, 16, 32)] + [(2, 200, 50, 1)]
    rows = []
    for count, shared, own, new in tqdm(cases, unit="row", desc="claims"):
        off, on = (count_one(args, count, shared, own, new, caching) for caching in (False, True))
        full = shared // BLOCK * BLOCK
        rows.append(
            {
                "name": f"{count} x ({shared} + {own} + {new})",
                "requests": count,
                "shared": shared,
                "context": shared + own + new,
                "kv_tokens": off["kv_tokens_reserved_peak"],
                "kv_tokens_cached": on["kv_tokens_reserved_peak"],
                "saved": 1 - on["kv_tokens_reserved_peak"] / off["kv_tokens_reserved_peak"],
                "saved_on_paper": full * (count - 1) / off["kv_tokens_reserved_peak"],
                "prefill_tokens": off["prefill_tokens"],
                "prefill_tokens_cached": on["prefill_tokens"],
                "prefill_on_paper": count * (shared + own) - full * (count - 1),
                "hit_tokens": on["prefix_hit_tokens"],
            }
        )
    return rows


def lengths_of(args: argparse.Namespace) -> list[int]:
    return args.lengths or [128, 512, 1024] + ([] if args.model == "tiny" else [2048])


def ttft(args: argparse.Namespace) -> list[dict]:
    """Time to the first token of a prompt that is new, and of the same prompt again: all but its end is cached."""
    lengths = lengths_of(args)
    options = dict(max_num_seqs=32, max_num_batched_tokens=max(lengths), block_size=args.block_size or None)
    package, llm = engine(args, True, args.model, **options)
    params, rows = package.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), []
    for length in tqdm(lengths, unit="row", desc="ttft"):
        found = []  # of each sample: time and computed tokens of the first call and of the second
        for sample in range(args.samples + 1):
            (prompt,) = prompts(1, 0, length, seed=1000 * sample + length)
            llm.reset_prefix_cache()
            found.append([*timed_call(llm, prompt, params), *timed_call(llm, prompt, params)])
        new, new_tokens, again, again_tokens = (median(column) for column in zip(*found[1:], strict=True))
        rows.append({"name": f"{length:,} tokens", "length": length, "new_ms": new, "again_ms": again})
        rows[-1] |= {"new_tokens": int(new_tokens), "again_tokens": int(again_tokens), "ratio": new / again}
        rows[-1] |= {"dtype": str(llm.resolved.dtype).removeprefix("torch."), "block_size": llm.resolved.block_size}
    llm.close()
    return rows


def timed_call(llm, prompt: list[int], params) -> tuple[float, int]:
    """Milliseconds to the first token, and prompt tokens that were computed for it."""
    llm.metrics.reset()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return 1000 * output.metrics.ttft, llm.metrics.prefill_tokens


def host(args: argparse.Namespace) -> list[dict]:
    """Seconds of `schedule` per decode step, with caching and without, when nothing is ever found."""
    rows = []
    for count in (1, 8, 64, 256):
        engines = [engine(args, caching, num_kv_blocks=count * 20, max_num_seqs=count)[1] for caching in (False, True)]
        times = []  # of each sample: without and with caching, in turn
        for sample in range(args.samples + 1):
            turn = 1 if sample % 2 == 0 else -1
            times.append([schedule_us(llm, count, sample) for llm in engines[::turn]][::turn])
        off, on = (median(column) for column in zip(*times[1:], strict=True))
        rows.append({"name": f"{count} sequences", "off_us": off, "on_us": on, "added_us": on - off})
        for llm in engines:
            llm.close()
    return rows


def schedule_us(llm, count: int, seed: int) -> float:
    """Mean microseconds of `schedule` over the steps in which all sequences decode."""
    params = importlib.import_module(STAGE).SamplingParams(temperature=0.0, max_tokens=65, ignore_eos=True)
    llm.metrics.reset()
    llm.generate(prompts(count, 0, 64, seed=seed), params, use_tqdm=False)
    decode = [record.seconds["schedule"] for record in llm.metrics.trace if record.decode_tokens == count]
    return 1e6 * sum(decode) / len(decode)


WHAT = {"claims": claims, "ttft": ttft, "host": host}
DRAW = {"claims": draw_claims, "ttft": draw_ttft}
COLUMNS = {
    "claims": {
        "kv_tokens": ("KV tokens, off", "{:,}"),
        "kv_tokens_cached": ("on", "{:,}"),
        "saved": ("saved", "{:.1%}"),
        "saved_on_paper": ("on paper", "{:.1%}"),
        "prefill_tokens": ("prefill tokens, off", "{:,}"),
        "prefill_tokens_cached": ("on", "{:,}"),
        "prefill_on_paper": ("on paper", "{:,}"),
    },
    "ttft": {
        "new_tokens": ("tokens computed, new", "{:,}"),
        "again_tokens": ("seen before", "{:,}"),
        "new_ms": ("new, ms", "{:.1f}"),
        "again_ms": ("seen before, ms", "{:.1f}"),
        "ratio": ("times faster", "{:.1f}"),
    },
    "host": {
        "off_us": ("schedule, off, us", "{:.0f}"),
        "on_us": ("on, us", "{:.0f}"),
        "added_us": ("added, us", "{:.0f}"),
    },
}


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if args.samples < 1 or min(args.lengths or [1]) < 1 or args.block_size < 0:
        cli.error("--samples and --lengths must be at least 1, --block-size at least 0")
    start = time.perf_counter()
    card = {"roofline": roofline.show(args.model, args, [], lengths_of(args))} if args.what == "ttft" else {}
    rows = WHAT[args.what](args)
    columns = COLUMNS[args.what]
    cells = [[form.format(r[key]) for key, (_, form) in columns.items()] for r in rows]
    device = args.device or default_device()
    env, heads = environment(device), [head for head, _ in columns.values()]
    job = {"model": args.model, "samples": args.samples, "what": args.what, "stage": STAGE}
    dtype = rows[0].get("dtype", "float32")
    rows = [r | {"dtype": dtype} for r in rows]
    document = {"environment": env, "job": job} | card
    document |= {"columns": dict(enumerate(heads)), "cells": cells, "rows": rows}
    table = Table(title=f"{STAGE}, {args.model}, {env['device_name']}")
    table.add_column("row")
    for head in heads:
        table.add_column(head, justify="right")
    for r, line in zip(rows, cells, strict=True):
        table.add_row(r["name"], *line)
    Console(width=120).print(table)
    out = args.out or results_folder(device)
    print(f"{time.perf_counter() - start:.0f} s")
    publish(out / f"prefix-{args.what}.json", document, DRAW.get(args.what))
    return 0


if __name__ == "__main__":
    sys.exit(main())
