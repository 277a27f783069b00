"""Curve: seconds per token against position, up to 512 tokens. Stage 1 grows with the length, stage 2 hardly.

    python -m benchmarks.curve                 # sampled at a few positions: one minute
    python -m benchmarks.curve --every-token --name curve-every-token    # makes all 512 tokens: minutes on a CPU

At a sampled position p the sequence already has p tokens, and the step that makes the next one is timed. The sum over
all positions is interpolated between the samples; with --every-token it is measured.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

from tqdm import tqdm

from . import gates, roofline
from .common import (
    REFERENCE,
    default_device,
    environment,
    label,
    publish,
    results_folder,
    run_in_turn,
    run_worker,
    stages,
)
from .plots import draw_curve

LESSON = "stage 2"

LINES = [REFERENCE, *stages()]
POSITIONS = [16, 32, 64, 128, 192, 256, 320, 384, 448, 512]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.curve",
        description="Time of one token against its position, for stage 1, stage 2 and transformers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", default="smollm2-135m", help="a name (smollm2-135m, tiny) or a folder")
    p.add_argument("--dummy", action="store_true", help="random weights in the model's shapes; without transformers")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--samples", type=int, default=3, help="fresh processes per engine, in turn; the median counts")
    p.add_argument("--positions", type=int, nargs="+", default=POSITIONS, help="where to measure")
    p.add_argument("--every-token", action="store_true", help="make all tokens up to the last position")
    p.add_argument("--engines", nargs="+", default=LINES[:3], choices=LINES, help="lines of the figure")
    p.add_argument("--name", default="curve", help="of the files: NAME.json and NAME.png")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


STEPS = 4  # tokens per sampled position: the first is the prompt's, the others are steps


def prompt(length: int) -> list[int]:
    """Ids that every vocabulary has; what they say does not matter for the time."""
    return [3 + (i * 7) % 200 for i in range(length)]


def measure_sampled(args: argparse.Namespace, bar: tqdm) -> list[dict]:
    """Step times at each position, from short runs on prompts of that length; the engines take turns."""
    job = {name: getattr(args, name) for name in ("model", "device", "dtype", "load_format")}
    job |= {"prompts": [prompt(p - 1) for p in args.positions], "max_tokens": STEPS}
    plan = [(engine, job) for engine in args.engines]
    results = run_in_turn(plan, args.samples, bar)
    return [sampled_row(engine, found, args) for engine, found in zip(args.engines, results, strict=True)]


def sampled_row(engine: str, result: dict, args: argparse.Namespace) -> dict:
    steps = [[_gaps(sample["runs"][i])[0] for sample in result["samples"]] for i in range(len(args.positions))]
    middle = [median(times) for times in steps]
    return _row(engine, result, args.positions, middle, steps, _integrate(args.positions, middle))


def measure_every_token(args: argparse.Namespace, bar: tqdm) -> list[dict]:
    return [every_token(engine, args, bar) for engine in args.engines]


def every_token(engine: str, args: argparse.Namespace, bar: tqdm) -> dict:
    """One run up to the last position; the times at the positions are read off it, their sum is measured."""
    start, end = 4, max(args.positions)
    job = {name: getattr(args, name) for name in ("model", "device", "dtype", "load_format")} | {"samples": 1}
    job |= {"prompts": [prompt(start)], "max_tokens": end - start}
    result = run_worker(engine, job, bar.update)
    run = result["samples"][0]["runs"][0]
    gaps, positions = _gaps(run), [p for p in args.positions if p > start + 4]
    near = [gaps[p - start - 4 : p - start + 4] for p in positions]  # eight steps around each position
    in_all = [run["token_times"][p - start - 1] for p in positions]
    return _row(engine, result, positions, [median(times) for times in near], near, in_all)


def _gaps(run: dict) -> list[float]:
    return [later - earlier for earlier, later in pairwise(run["token_times"])]


def _row(engine: str, result: dict, positions: list[int], middle: list, steps: list, in_all: list) -> dict:
    return {
        "engine": engine,
        "dtype": result["dtype"],
        "attention_backend": result["attention_backend"],
        "positions": positions,
        "milliseconds": [1000 * t for t in middle],
        "milliseconds_range": [[1000 * min(times), 1000 * max(times)] for times in steps],
        "seconds_in_all": in_all,
        "samples": steps,
    }


def wide_positions(rows: list[dict], every_token: bool) -> gates.Reasons:
    """The widest spread of each row, if it is too wide. With --every-token there are no samples, but steps."""
    if every_token:
        return [[] for _ in rows]
    return gates.wide_spread([max(row["samples"], key=gates.spread) for row in rows], "milliseconds at a position")


def _integrate(positions: list[int], seconds: list[float]) -> list[float]:
    """Seconds for all tokens up to each position, by the trapezoid rule from position 0."""
    total, at, last = [], 0, seconds[0]
    for position, value in zip(positions, seconds, strict=True):
        total.append((total[-1] if total else 0.0) + (position - at) * (value + last) / 2)
        at, last = position, value
    return total


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.positions.sort()
    args.load_format = "dummy" if args.dummy else "auto"
    if args.dummy:
        args.engines = [engine for engine in args.engines if engine != REFERENCE]
    measure = measure_every_token if args.every_token else measure_sampled
    card = roofline.show(
        args.model, args, [(1, position) for position in args.positions[:: len(args.positions) - 1 or 1]]
    )
    per_engine = max(args.positions) if args.every_token else args.samples * len(args.positions) * STEPS
    with tqdm(total=per_engine * len(args.engines), unit="tok", desc="Curve") as bar:
        rows = measure(args, bar)
    rows = gates.mark(rows, gates.slower_past(rows), wide_positions(rows, args.every_token))
    device = args.device or default_device()
    out, name = args.out or results_folder(device), args.name
    job = {"model": args.model, "every_token": args.every_token, "samples": args.samples}
    document = {"environment": environment(device), "job": job, "roofline": card, "rows": rows}
    for row in rows:
        last = row["positions"][-1]
        step, total = row["milliseconds"][-1], row["seconds_in_all"][-1]
        engine = gates.name(row, label(row["engine"]))
        print(f"{engine:>18}: {step:8.2f} ms a token at {last}, {total:8.2f} s for all {last}")
    gates.print_suspects(rows, "engine")
    publish(out / f"{name}.json", document, draw_curve)
    return 0


if __name__ == "__main__":
    sys.exit(main())
