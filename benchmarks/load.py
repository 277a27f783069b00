"""Load: requests that come one by one, as users do (a Poisson process): time to the first token and between tokens.

    python -m benchmarks load                            # stages 3 to 5, two rates, SmolLM2: two minutes on a CPU
    python -m benchmarks load --rates 8 32 128 --requests 512 --model qwen3-0.6b --dummy     # a GPU

Gaps between arrivals are exponential, so requests come in bunches; prompts have 16 to 64 tokens, outputs 8 to 64. Every
stage and sample gets the same. TTFT counts from the moment a request is due, so waiting for a running step and in the
queue are part of it; ITL is the gap between two tokens of a request. A mean would hide what the slowest see, so there
are percentiles, and in load.json all values. Above the rate that an engine can serve the queue grows for as long as the
run lasts: TTFT then says how long it lasted. A few requests served once say little of small differences: on a shared
machine the median TTFT of a row came out at 184 ms and at 326 ms. With --samples runs are pooled, and a row whose runs
differ that much is marked.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import gates, roofline
from .common import default_device, environment, label, publish, results_folder, run_in_turn, stages
from .plots import draw_load

LESSON = "stage 3"

SERVING = [stage for stage in stages() if stage[5] >= "3"]
SHARES = (50, 90, 99)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        description="Requests that arrive as a Poisson process: percentiles of TTFT and of the time between tokens.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--stages", nargs="+", default=SERVING, choices=SERVING, help="the engines")
    p.add_argument("--rates", type=float, nargs="+", default=[1.5, 3.0], help="requests per second")
    p.add_argument("--requests", type=int, default=20, help="of each row")
    p.add_argument("--model", default="smollm2-135m", help="a name, a folder or a hub id")
    p.add_argument("--dummy", action="store_true", help="random weights in the model's shapes")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--max-num-seqs", type=int, default=32, help="sequences at once")
    p.add_argument(
        "--samples", type=int, default=1, help="fresh processes per row, warmed up, in turn; values are pooled"
    )
    p.add_argument("--out", type=Path, help="folder for load.json and load.png; left out: out/cpu, out/h200, ...")
    return p


def planned(args: argparse.Namespace) -> list[dict]:
    """Rate by rate, one row per stage."""
    options = {"max_num_seqs": args.max_num_seqs, "max_model_len": 256}
    found = []
    for rate in args.rates:
        arguments = {"num_requests": args.requests, "rate": rate}
        for stage in args.stages:
            row = {"name": f"{label(stage)}, {rate:g}/s", "stage": stage, "rate": rate}
            found.append(row | {"workload": "poisson", "arguments": arguments, "options": options})
    return found


def job_of(row: dict, args: argparse.Namespace) -> dict:
    """What benchmarks.serve is told."""
    options = row["options"] | {"device": args.device, "dtype": args.dtype}
    options |= {"load_format": "dummy"} if args.dummy else {}
    job = {key: row[key] for key in ("workload", "arguments")} | {"options": options}
    return job | {"model": args.model, "clock": "seconds"}


def measure(args: argparse.Namespace, rows: list[dict]) -> list[dict]:
    plan = [(row["stage"], job_of(row, args)) for row in rows]
    with tqdm(total=len(plan) * args.samples, unit="run", desc="load") as bar:
        results = run_in_turn(plan, args.samples, bar, "benchmarks.serve")
    ttft = [[median(request["ttft"] for request in run["requests"]) for run in found["samples"]] for found in results]
    rows = [row | summary(found) for row, found in zip(rows, results, strict=True)]
    return gates.mark(rows, gates.wide_spread(ttft, "median times to the first token"))


def summary(result: dict) -> dict:
    """What the requests of all samples saw, in milliseconds: percentiles, and every value in order of size."""
    seen = [request for sample in result["samples"] for request in sample["requests"]]
    ttft = sorted(round(1000 * request["ttft"], 3) for request in seen)
    itl = sorted(round(1000 * gap, 3) for request in seen for gap in request["itl"])
    seconds = median(sample["seconds"] for sample in result["samples"])
    tokens = sum(request["tokens"] for request in result["samples"][0]["requests"])
    found = {"dtype": result["dtype"], "backend": result["backend"], "seconds": seconds, "tokens": tokens}
    found |= {"tokens_per_second": tokens / seconds}
    found |= {f"ttft_p{share}_ms": percentile(ttft, share) for share in SHARES}
    found |= {f"itl_p{share}_ms": percentile(itl, share) for share in SHARES}
    return found | {"ttft_ms": ttft, "itl_ms": itl, "sample_seconds": [s["seconds"] for s in result["samples"]]}


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least `share` percent of all do not exceed (nearest rank)."""
    return ordered[max(0, -int(-share * len(ordered) // 100) - 1)]


def print_table(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    table.add_column("row")
    heads = [f"{what} p{share}, ms" for what in ("TTFT", "ITL") for share in SHARES]
    for head in (*heads, "tokens/s"):
        table.add_column(head, justify="right")
    keys = [f"{what}_p{share}_ms" for what in ("ttft", "itl") for share in SHARES]
    for row in rows:
        cells = [f"{row[key]:,.1f}" for key in keys]
        table.add_row(gates.name(row, row["name"]), *cells, f"{row['tokens_per_second']:,.1f}")
    Console(width=120).print(table)
    gates.print_suspects(rows)


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if min(args.samples, args.requests, args.max_num_seqs) < 1 or min(args.rates) <= 0:
        cli.error("--samples, --requests and --max-num-seqs must be at least 1, --rates above 0")
    rows = planned(args)
    points = [(1, context) for _, context in roofline.points_of(rows)] + roofline.points_of(rows)
    card = roofline.show(args.model, args, points)
    rows = measure(args, rows)
    env = environment(args.device or default_device())
    print_table(rows, f"{args.model}, {rows[0]['dtype']}, {env['device_name']}: {args.requests} requests")
    job = {name: getattr(args, name) for name in ("model", "rates", "requests", "samples")} | {"what": "load"}
    document = {"environment": env, "job": job, "roofline": card, "rows": rows}
    publish((args.out or results_folder(env["device"])) / "load.json", document, draw_load)
    return 0


if __name__ == "__main__":
    sys.exit(main())
