"""Optim: what each optimisation of stage 5 is worth: CUDA graphs, fused kernels, overlapped scheduling.

    python -m benchmarks.optim speed      # stage 4 against stage 5: one request alone, and the 256-request workload
    python -m benchmarks.optim ablation   # stage 5, and stage 5 without one thing at a time
    python -m benchmarks.optim waterfall  # from stage 4 to stage 5, one thing after the other: ms per decode step
    python -m benchmarks.optim parallel   # one process against two that share the model: ms per decode step
    python -m benchmarks.optim profile    # kernels, launches and busy time of a decode step

All rows run in one process, each in a fresh engine that is closed before the next (GPU time is short); --rounds builds
them again in turned order. Files: optim-NAME.json, written after each row, and optim-NAME.png. What prefix caching
saves is measured by benchmarks.prefix.
"""

import argparse
import ast
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from . import roofline
from .common import PEERS, announce, default_device, environment, label, peers, results_folder, stages
from .optim_engine import PROMPT, Engine, known_options, start_device, summary
from .optim_file import joined, kept_rows, save
from .optim_peers import measure_peer
from .optim_profile import prepare_profiler, profile_decode
from .optim_tables import print_not_here, print_profile, print_table
from .plots_optim import DRAW

LESSON = "stage 5"

PAGED, OPTIM = (stage for stage in stages() if stage[5] in "45")
ENGINES = [PAGED, OPTIM, *peers()]
OFF = dict(enforce_eager=True, fused_kernels=False, async_scheduling=False)
WARM_SHARE = 0.25  # of the outputs' lengths, in the run before the first that counts
TIMES = """\
estimated on an H200 with --model qwen3-0.6b --dummy (with --repeats 1 about half of it):
  speed      4 minutes      ablation  9 minutes (for less: --rows, --workload, --at-most)
  waterfall  2 minutes      profile   2 minutes
  parallel   1 minute, with two GPUs
A run that was cut keeps the rows that it wrote; --rows with --keep adds others to them.
"""


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults in the help, and the estimates as they are written."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.optim",
        description="What each optimisation of stage 5 is worth. speed takes nanovllm and vllm along if they import.",
        epilog=TIMES,
        formatter_class=Help,
    )
    p.add_argument("what", choices=list(WHAT), help="which measurement")
    p.add_argument("--model", default="tiny", help="a name, a folder or a hub id")
    p.add_argument("--dummy", action="store_true", help="random weights in the model's shapes")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--workload", choices=["one", "many", "both"], default="both", help="speed, ablation: which")
    p.add_argument("--stages", nargs="+", default=ENGINES, choices=ENGINES, help="speed: which engines")
    p.add_argument("--rows", nargs="+", default=[""], help="only the rows whose name holds one of these texts")
    p.add_argument("--repeats", type=int, default=3, help="runs per number, after a warm-up; the median counts")
    p.add_argument("--rounds", type=int, default=1, help="all engines anew so many times, in turn; samples are joined")
    p.add_argument("--at-most", type=float, default=60.0, help="no further run begins after so many seconds of them")
    p.add_argument("--requests", type=int, default=256, help="many: the first so many of the 256")
    p.add_argument("--tokens", type=int, help="output tokens of a request; left out: one 512, waterfall 64")
    p.add_argument(
        "--batches", type=int, nargs="+", default=[1, 256], help="waterfall, parallel, profile: requests at once"
    )
    p.add_argument("--steps", type=int, default=10, help="profile: decode steps that are recorded")
    p.add_argument(
        "--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="of LLM; repeatable"
    )
    p.add_argument("--keep", action="store_true", help="keep other rows that the file holds already")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


def option(text: str) -> tuple[str, object]:
    """name=value; the value is an int, a float, True, False or None where it reads like one, else a text."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def row(name: str, stage: str = OPTIM, env: dict[str, str] | None = None, **options: object) -> dict:
    """env: variables of the environment while the engine is made."""
    return {"name": name, "stage": stage, "options": options, "env": env or {}}


def speed_rows(args: argparse.Namespace) -> list[dict]:
    """Each stage as it is by default, and the peers that are installed."""
    return [row(label(stage), stage) for stage in args.stages]


def ablation_rows(args: argparse.Namespace) -> list[dict]:
    """All on (the default), then one thing changed at a time, then all off.

    Of one request the time from token to token is told: without drafts that is a step, with them a share of one.
    """
    return [
        row("all on"),
        row("no CUDA graphs", enforce_eager=True),
        row("no fused kernels", fused_kernels=False),
        row("no async scheduling", async_scheduling=False),
        row("with prefix caching", enable_prefix_caching=True),
        row("with int8 KV", kv_cache_dtype="int8"),
        row("with fp8 KV", kv_cache_dtype="fp8"),
        row("with n-gram drafts", speculative={"method": "ngram"}),
        row("all off", **OFF),
    ]


def waterfall_rows(args: argparse.Namespace) -> list[dict]:
    """From stage 4 to stage 5. What is on is left to its default, which is on where the machine can."""
    no_graphs_no_async = {name: OFF[name] for name in ("enforce_eager", "async_scheduling")}
    return [
        row("stage 4", PAGED),
        row("stage 5, all off", **OFF),
        row("+ fused kernels", **no_graphs_no_async),
        row("+ CUDA graphs", async_scheduling=False),
        row("+ async scheduling"),
    ]


def parallel_rows(args: argparse.Namespace) -> list[dict]:
    """One process, and two that share the model; without the quick sums all sums are NCCL's."""
    return [
        row("one process"),
        row("two, sums by NCCL", tensor_parallel_size=2, env={"INFERENCE_STAGES_QUICK_SUMS": "0"}),
        row("two, quick sums", tensor_parallel_size=2),
    ]


def profile_rows(args: argparse.Namespace) -> list[dict]:
    """Stage 5 without what it adds, and with it."""
    return [row("all off", **OFF), row("all on")]


def serving(args: argparse.Namespace) -> dict:
    """Options of the 256-request workload, the same as in benchmarks.interleave."""
    return dict(max_num_seqs=256, max_model_len=2048 if args.model == "tiny" else 2304, max_num_batched_tokens=16384)


def side_by_side(args: argparse.Namespace) -> dict:
    """Options with which all requests of the largest batch compute their prompts in one step."""
    most = max(args.batches)
    return dict(max_num_seqs=most, max_num_batched_tokens=max(2048, most * PROMPT), max_model_len=2048)


def repeat(run: Callable[[float], dict], args: argparse.Namespace) -> dict:
    """A shorter run to warm up (graphs are captured, kernels compiled), then those that count. run: takes a share."""
    run(WARM_SHARE)
    start, samples = time.perf_counter(), []
    while len(samples) < args.repeats and (not samples or time.perf_counter() - start < args.at_most):
        samples.append(run(1.0))
    return summary(samples) | {"samples": samples}


def measure_workloads(engine: Engine, args: argparse.Namespace) -> dict:
    """speed, ablation: one request alone, and many."""
    tokens, found = args.tokens or 512, {}
    if args.workload in ("one", "both"):
        found["one"] = repeat(lambda share: engine.one(max(2, int(tokens * share))), args)
    if args.workload in ("many", "both"):
        found["many"] = repeat(lambda share: engine.many(args.requests, share), args)
    return found


def measure_batches(engine: Engine, args: argparse.Namespace) -> dict:
    """waterfall, parallel: decode steps of each size of the batch."""
    tokens = args.tokens or 64

    def run(batch: int, share: float) -> dict:
        return engine.lockstep(batch, max(4, int(tokens * share)))

    return {"batches": {str(batch): repeat(partial(run, batch), args) for batch in args.batches}}


def measure_profile(engine: Engine, args: argparse.Namespace) -> dict:
    return {"batches": {str(n): profile_decode(engine, n, args.steps) for n in args.batches}}


# name -> rows, options of every engine, what is measured with each engine
WHAT = {
    "speed": (speed_rows, serving, measure_workloads),
    "ablation": (ablation_rows, serving, measure_workloads),
    "waterfall": (waterfall_rows, side_by_side, measure_batches),
    "parallel": (parallel_rows, side_by_side, measure_batches),
    "profile": (profile_rows, side_by_side, measure_profile),
}


def planned(args: argparse.Namespace) -> list[dict]:
    return [r for r in WHAT[args.what][0](args) if any(text in r["name"] for text in args.rows)]


def measure(args: argparse.Namespace, plan: list[dict]) -> Iterator[dict]:
    """Each row with what was measured, or with the error that ended it: the next rows are measured all the same."""
    _, common, what = WHAT[args.what]
    start_device(args)
    for r in tqdm(plan, unit="row", desc=args.what):
        tqdm.write(f"{args.what}: {r['name']} ...", file=sys.stderr)
        try:
            if r["stage"] in PEERS:
                yield r | measure_peer(r, args)
                continue
            with Engine(r, args, **common(args)) as engine:
                found = what(engine, args)
                found = engine.facts() | found
            yield r | found | {"left_bytes": engine.left_bytes}
        except Exception as error:  # time on a GPU is short: what can be measured is measured
            tqdm.write(f"{args.what}: {r['name']} failed: {type(error).__name__}: {error}", file=sys.stderr)
            yield r | {"error": f"{type(error).__name__}: {error}"}


def check(cli: argparse.ArgumentParser, args: argparse.Namespace, plan: list[dict]) -> None:
    """End with one line for what cannot be run."""
    if min(args.repeats, args.rounds, args.requests, args.steps, *args.batches) < 1:
        cli.error("--repeats, --rounds, --requests, --steps and --batches must be at least 1")
    if args.tokens is not None and args.tokens < 4:
        cli.error("--tokens must be at least 4")
    if not plan:
        cli.error(f"--rows {args.rows!r} leaves no row of {args.what}")
    known = {name for r in plan if r["stage"] not in PEERS for name in known_options(r["stage"])}
    if unknown := [name for name, _ in args.option if name not in known]:
        cli.error(f"--option {unknown[0]}: no such option of {plan[-1]['stage']}.LLM")


def points(args: argparse.Namespace) -> list[tuple[int, int]]:
    """(batch, context) at which the roofline is drawn: the mean context of an output token."""
    if args.what in ("waterfall", "profile"):
        return [(batch, PROMPT + (args.tokens or 64) // 2) for batch in args.batches]
    alone, many = (1, PROMPT + (args.tokens or 512) // 2), (min(args.requests, 256), 900)
    return [point for name, point in (("one", alone), ("many", many)) if args.workload in (name, "both")]


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    plan = planned(args)
    check(cli, args, plan)
    device = args.device or default_device()
    if args.what == "profile":
        prepare_profiler(device)
        if device == "cpu":
            print(
                "There is no GPU here: PyTorch's operations are profiled instead of kernels, and nothing is launched."
            )
    job = {
        name: getattr(args, name) for name in ("what", "model", "workload", "repeats", "requests", "tokens", "steps")
    }
    job |= {"batches": args.batches, "option": dict(args.option)} | ({"rounds": args.rounds} if args.rounds > 1 else {})
    document = {
        "environment": environment(device),
        "job": job,
        "roofline": roofline.show(args.model, args, points(args)),
    }
    document |= {"columns": {}, "cells": [], "rows": [], "failed": []}
    path = (args.out or results_folder(device)) / f"optim-{args.what}.json"
    document["rows"] = kept_rows(path, document, args.keep)
    order = [r["name"] for r in WHAT[args.what][0](args)]
    for turn in range(args.rounds):
        for measured in measure(args, plan[:: 1 if turn % 2 == 0 else -1]):
            save(path, document, joined(document["rows"], measured) if turn else measured, order)
    return finish(args, document, path)


def finish(args: argparse.Namespace, document: dict, path: Path) -> int:
    """Table and figure. Exit status 1 if a row failed that is not a peer's."""
    if document["rows"]:
        print_table(document)
        if args.what in ("ablation", "waterfall", "profile"):
            print_not_here(document)
        if args.what == "profile":
            print_profile(document)
        else:
            DRAW[args.what](document, path.with_suffix(".png"))
    for r in document["failed"]:
        Console(stderr=True).print(f"{r['name']} failed: {r['error']}", style="red", markup=False)
    announce(path, document)
    return 1 if any(r["stage"] not in PEERS for r in document["failed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
