"""Batching: what a scheduler gains, by counters on any machine and by the clock on a real one.

    python -m benchmarks.batching claims       # static against continuous: steps, idle slots; exact anywhere
    python -m benchmarks.batching clock        # the same workloads by the clock, on a real model
    python -m benchmarks.batching stalls       # how long a running text waits while long prompts arrive
    python -m benchmarks.batching throughput   # tokens per second over the number of sequences at once
    python -m benchmarks.batching requests256  # the 256-request workload (a GPU)

Each row runs in a fresh process. Files: batching-NAME.json and, where there is something to see, batching-NAME.png.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import gates, roofline
from .common import default_device, environment, publish, results_folder, run_in_turn, stages
from .plots import draw_claims, draw_stalls, draw_throughput

LESSON = "stage 3"

BATCHING = [stage for stage in stages() if stage[5] >= "3"]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.batching",
        description="What a scheduler gains: static against continuous batching, stalls, throughput.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("what", choices=list(WHAT), help="which measurement")
    p.add_argument("--stage", default=BATCHING[0], choices=BATCHING, help="the engine")
    p.add_argument("--model", help="left out: tiny for claims, smollm2-135m otherwise")
    p.add_argument("--dummy", action="store_true", help="random weights in the model's shapes")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--only", default="", help="only the rows whose name holds this text")
    p.add_argument(
        "--samples", type=int, default=1, help="fresh processes per row, warmed up, in turn; the median counts"
    )
    p.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8], help="throughput: sequences at once")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


def row(name: str, workload: str, arguments: dict | None = None, **options) -> dict:
    """One row of a measurement: a workload and the options of the engine that serves it."""
    return {"name": name, "workload": workload, "arguments": arguments or {}, "options": options}


def claims_rows(args: argparse.Namespace) -> list[dict]:
    """The article's two mixes, and the cases where nothing is gained."""
    rows = [row(f"20 and 800, {p}", "short_and_long", policy=p, max_num_seqs=8) for p in ("static", "mixed")]
    for slots, order in ((4, "spread"), (8, "spread"), (15, "spread"), (8, "first"), (8, "last")):
        for policy in ("static", "mixed"):
            name = f"12 x 30 + 3 x 1,500 ({order}), {slots} slots, {policy}"
            rows.append(row(name, "twelve_and_three", {"order": order}, policy=policy, max_num_seqs=slots))
    rows += [row(f"16 x 100, {p}", "equal_lengths", policy=p, max_num_seqs=8) for p in ("static", "mixed")]
    return [r | {"options": r["options"] | {"max_model_len": 1600}} for r in rows]


def clock_rows(args: argparse.Namespace) -> list[dict]:
    keep = ("20 and 800", "12 x 30 + 3 x 1,500 (spread), 8 slots", "16 x 100")
    return [r for r in claims_rows(args) if r["name"].startswith(keep)]


def stalls_rows(args: argparse.Namespace) -> list[dict]:
    """Four short texts run while a prompt of 512 tokens arrives every 12 steps."""
    common = dict(max_num_seqs=8, max_model_len=640)
    return [
        row("prefill first, whole prompts", "long_prompts_arrive", policy="prefill_first", **common),
        row("mixed, 640 tokens a step", "long_prompts_arrive", max_num_batched_tokens=640, **common),
        row("mixed, 64 tokens a step", "long_prompts_arrive", max_num_batched_tokens=64, **common),
        row(
            "mixed, 64, one prefill at once",
            "long_prompts_arrive",
            max_num_batched_tokens=64,
            max_num_prefills=1,
            **common,
        ),
    ]


def throughput_rows(args: argparse.Namespace) -> list[dict]:
    def one(batch: int) -> dict:
        arguments = {"num_requests": batch, "max_tokens": 64}
        return row(f"{batch} at once", "equal_lengths", arguments, max_num_seqs=batch, max_model_len=512)

    return [one(batch) for batch in args.batches]


def requests256_rows(args: argparse.Namespace) -> list[dict]:
    options = dict(max_num_seqs=256, max_model_len=2304, max_num_batched_tokens=16384)
    return [row(f"256 requests, {p}", "mixed_256", policy=p, **options) for p in ("mixed", "prefill_first")]


WHAT = {
    "claims": claims_rows,
    "clock": clock_rows,
    "stalls": stalls_rows,
    "throughput": throughput_rows,
    "requests256": requests256_rows,
}
DRAW = {"claims": draw_claims, "clock": draw_claims, "stalls": draw_stalls, "throughput": draw_throughput}


def measure(args: argparse.Namespace, rows: list[dict]) -> list[dict]:
    """Every row in fresh processes, one per sample, in turn; with a summary of what its requests saw."""
    plan = [(args.stage, job_of(r, args)) for r in rows]
    with tqdm(total=len(plan) * args.samples, unit="run", desc=args.what) as bar:
        results = run_in_turn(plan, args.samples, bar, "benchmarks.serve")
    rows = [r | summary(found) | {"result": found} for r, found in zip(rows, results, strict=True)]
    return rows if args.what == "claims" else judged(rows, args.what)


def judged(rows: list[dict], what: str) -> list[dict]:
    """The rows with what is suspect about their times."""
    found = [gates.wide_spread([[sample["seconds"] for sample in r["result"]["samples"]] for r in rows])]
    if what == "throughput":
        batches, speeds = [r["options"]["max_num_seqs"] for r in rows], [r["tokens_per_second"] for r in rows]
        found.append(gates.slower_batch(batches, speeds))
    return gates.mark(rows, *found)


def model_of(args: argparse.Namespace) -> str:
    return args.model or ("tiny" if args.what == "claims" else "smollm2-135m")


def job_of(r: dict, args: argparse.Namespace) -> dict:
    """What benchmarks.serve is told."""
    options = r["options"] | {"device": args.device, "dtype": args.dtype}
    options |= {"load_format": "dummy"} if args.dummy else {}
    job = {"model": model_of(args), "options": options} | {key: r[key] for key in ("workload", "arguments")}
    return job | ({"temperature": 0.6} if args.what == "requests256" else {})


def summary(result: dict) -> dict:
    """Counters of the first sample (they do not vary) and medians of the times."""
    first = result["samples"][0]
    requests = first["requests"]
    seconds = median(sample["seconds"] for sample in result["samples"])
    short = min(request["tokens"] for request in requests)
    of_short = [request["returned"] - request["arrived"] + 1 for request in requests if request["tokens"] == short]
    tokens = sum(request["tokens"] for request in requests)
    return {
        "steps": first["counters"]["steps"],
        "idle_slot_steps": first["counters"]["idle_slot_steps"],
        "short_returned_after_steps": median(of_short),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "longest_gap_steps": max(request["longest_gap_steps"] for request in requests),
        "longest_gap_work": max(request["longest_gap_work"] for request in requests[:4]),
        "longest_gap_ms": 1000
        * median(max(r["longest_gap_seconds"] for r in s["requests"][:4]) for s in result["samples"]),
        "phases": first["phases"],
        "kv_bytes_reserved": first["counters"]["kv_bytes_per_token"] * first["counters"]["kv_tokens_reserved_peak"],
        "kv_bytes_used": first["counters"]["kv_bytes_per_token"] * first["counters"]["kv_tokens_used_peak"],
    }


COLUMNS = {
    "steps": ("steps", "{:,}"),
    "idle_slot_steps": ("idle slot-steps", "{:,}"),
    "short_returned_after_steps": ("short ones back after steps", "{:,.0f}"),
    "longest_gap_work": ("longest wait, tokens of work", "{:,}"),
    "longest_gap_ms": ("longest wait, ms", "{:,.0f}"),
    "seconds": ("seconds", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}
SHOW = {
    "claims": ["steps", "idle_slot_steps", "short_returned_after_steps"],
    "clock": ["steps", "short_returned_after_steps", "seconds", "tokens_per_second"],
    "stalls": ["steps", "longest_gap_work", "longest_gap_ms", "seconds"],
    "throughput": ["steps", "seconds", "tokens_per_second"],
    "requests256": ["steps", "seconds", "tokens_per_second"],
}


def print_table(what: str, rows: list[dict], title: str) -> None:
    table = Table(title=title)
    table.add_column("row")
    for key in SHOW[what]:
        table.add_column(COLUMNS[key][0], justify="right")
    for r in rows:
        table.add_row(gates.name(r, r["name"]), *(COLUMNS[key][1].format(r[key]) for key in SHOW[what]))
    Console(width=120).print(table)
    gates.print_suspects(rows)


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if args.samples < 1 or min(args.batches) < 1:
        cli.error("--samples and --batches must be at least 1")
    plan = [r for r in WHAT[args.what](args) if args.only in r["name"]]
    if not plan:
        cli.error(f"--only {args.only!r} leaves no row of {args.what}")
    timed = args.what != "claims"  # where only counters matter there is no ceiling
    card = {"roofline": roofline.show(model_of(args), args, roofline.points_of(plan))} if timed else {}
    rows = measure(args, plan)
    device = args.device or default_device()
    env = environment(device)
    model = model_of(args)
    job = {"model": model, "stage": args.stage, "samples": args.samples, "what": args.what}
    document = {"environment": env, "job": job} | card | {"columns": SHOW[args.what], "rows": rows}
    print_table(args.what, rows, f"{args.stage}, {model}, {rows[0]['result']['dtype']}, {env['device_name']}")
    out = args.out or results_folder(device)
    publish(out / f"batching-{args.what}.json", document, DRAW.get(args.what))
    return 0


if __name__ == "__main__":
    sys.exit(main())
