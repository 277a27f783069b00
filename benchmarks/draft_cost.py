"""Draft cost: what a step with drafts takes longer than one without, and so how many tokens it must bring to pay.

    python -m benchmarks.draft_cost --models qwen3-0.6b qwen3-8b --dummy    # on a GPU: some two minutes
    python -m benchmarks.draft_cost                                         # tiny: seconds

A proposer drafts k tokens for every sequence in every step, all wrong. So a step brings each sequence one token, and
its time is what k drafts cost: more rows, their sampling, taking them back, and that the CPU cannot plan ahead. A step
with drafts pays if it brings more tokens than time(k) / time(0); how many it brings depends on the text, and is what
benchmarks.speculative measures. Times are medians over the steps in which all sequences decode. Files: draft-cost.json.
"""

import argparse
import sys
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import gates
from .common import default_device, environment, publish, results_folder, stages
from .optim_engine import PROMPT, Engine, start_device, summary
from .plots_speculative import draw_cost

LESSON = "stage 5"

(OPTIM,) = (stage for stage in stages() if stage[5] == "5")


class WrongProposer:
    """Drafts as many tokens as it may, each of them wrong as good as always: a fixed id that no run has made."""

    tokens_forwarded = 0
    makes_all = False

    def __init__(self, token_id: int):
        self.token_id = token_id

    def propose(self, wanted: dict) -> dict:
        return {seq: [self.token_id] * count for seq, count in wanted.items()}

    def forget(self) -> None:
        """It remembers nothing."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_cost",
        description="Milliseconds of a step with k wrong drafts for each sequence, and what it must bring to pay.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--models", nargs="+", default=["tiny"], help="names, folders or hub ids")
    p.add_argument("--dummy", action="store_true", help="random weights in the models' shapes")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 8], help="of a sequence in a step, beside 0")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="sequences at once")
    p.add_argument("--tokens", type=int, default=64, help="steps of a run")
    p.add_argument("--samples", type=int, default=3, help="runs, after a warm-up; the median counts")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


def engine_args(args: Namespace, model: str) -> Namespace:
    return Namespace(model=model, device=args.device, dtype=args.dtype, dummy=args.dummy, option=[])


def measure(args: Namespace, model: str, drafts: int) -> dict[int, dict]:
    """One engine with so many wrong drafts a step: a summary of its runs per batch."""
    options = {"speculative": {"method": "ngram", "num_tokens": drafts}} if drafts else {}
    row = {"name": f"{model}, {drafts} drafts", "stage": OPTIM, "options": options, "env": {}}
    room = dict(max_num_seqs=max(args.batches), max_model_len=PROMPT + args.tokens)
    room |= dict(max_num_batched_tokens=max(args.batches) * PROMPT)  # all prompts in one step
    with Engine(row, engine_args(args, model), **room) as engine:
        if drafts:
            engine.llm._pipeline.speculator.proposer = WrongProposer(engine.vocab + 1)
        found = {}
        for batch in args.batches:
            engine.lockstep(batch, min(args.tokens, 12))
            runs = [engine.lockstep(batch, args.tokens) for _ in range(args.samples)]
            counters = runs[0]["counters"]
            found[batch] = summary(runs) | {
                "gaps_ms": [run["gaps_ms"] for run in runs],
                "dtype": engine.facts()["dtype"],
            }
            found[batch] |= {name: counters[name] for name in ("steps", "drafted_tokens", "accepted_tokens")}
    return found


def rows_of(args: Namespace, model: str, bar: tqdm) -> list[dict]:
    """One row per batch: the numbers without drafts, and with more and more of them."""
    found = {}
    for drafts in (0, *sorted(args.drafts)):
        bar.set_postfix_str(f"{model}, {drafts} drafts")
        found[drafts] = measure(args, model, drafts)
        bar.update()
    rows = []
    for batch in args.batches:
        base = found[0][batch]["ms_per_step"]
        line = [
            {"drafts": k} | cells[batch] | {"tokens_to_pay": cells[batch]["ms_per_step"] / base}
            for k, cells in found.items()
        ]
        where = {"name": f"{model}, batch {batch}", "model": model, "batch": batch}
        rows.append(where | {"dtype": line[0]["dtype"], "steps": line})
    return rows


def judged(rows: list[dict]) -> list[dict]:
    """A row is suspect if the runs of one of its engines lie far apart."""
    samples = [[step["ms_per_step_range"] for step in row["steps"]] for row in rows]
    return gates.mark(rows, *(gates.wide_spread(column, "times per step") for column in zip(*samples, strict=True)))


def columns_and_cells(rows: list[dict]) -> tuple[dict[str, str], list[list[str]]]:
    """One line per model and batch: ms without drafts; ms with k of them, and the tokens that must come of it."""
    columns = {str(step["drafts"]): f"{step['drafts']}: ms, tokens to pay" for step in rows[0]["steps"]}
    columns["0"] = "no drafts, ms"
    cells = []
    for row in rows:
        with_drafts = [f"{step['ms_per_step']:.2f}, {step['tokens_to_pay']:.2f}" for step in row["steps"][1:]]
        cells.append([f"{row['steps'][0]['ms_per_step']:.2f}", *with_drafts])
    return columns, cells


def print_table(document: dict) -> None:
    rows, env = document["rows"], document["environment"]
    table = Table(title=f"wrong drafts of each sequence in a step: {rows[0]['dtype']}, {env['device_name']}")
    for column in ("run", *document["columns"].values()):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row, cells in zip(rows, document["cells"], strict=True):
        table.add_row(gates.name(row, row["name"]), *cells)
    Console(width=130).print(table)
    gates.print_suspects(rows)


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if min(args.samples, *args.drafts, *args.batches) < 1 or args.tokens < 8:
        cli.error("--samples, --drafts and --batches must be at least 1, --tokens at least 8")
    start_device(args)
    device, rows = args.device or default_device(), []
    file = (args.out or results_folder(device)) / "draft-cost.json"
    job = {"what": "cost of wrong drafts", "model": ", ".join(args.models)}
    job |= {name: getattr(args, name) for name in ("dummy", "drafts", "batches", "tokens", "samples")}
    document = {"environment": environment(device), "job": job}
    with tqdm(total=len(args.models) * (len(args.drafts) + 1), unit="engine", desc="drafts") as bar:
        for model in args.models:
            rows += rows_of(args, model, bar)
    rows = judged(rows)
    columns, cells = columns_and_cells(rows)
    document |= {"rows": rows, "columns": columns, "cells": cells}
    print_table(document)
    publish(file, document, draw_cost)
    return 0


if __name__ == "__main__":
    sys.exit(main())
