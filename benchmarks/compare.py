"""Compare: the same prompts through every stage, beside `transformers`. One table, one picture, one JSON file.

    python -m benchmarks.compare                          # the default model; what `make demo` runs
    python -m benchmarks.compare --model tiny --samples 1 # in a few seconds

All prompts are handed in at once; an engine that can serve only one sequence serves them one after the other. Each row
runs in a fresh process, in several rounds of alternating order. A row's time is the median over the rounds; only ratios
within one run mean anything. TTFT counts from the call. All rows must make the same tokens. nano-vllm and vLLM are rows
too where they can be imported; one that fails is left out with its reason. nano-vllm cannot decode greedily, so its
tokens are not compared; neither says when its tokens came, so there is no TTFT.

Two variants of stage 5 follow it, once, as each process takes its time: with n-gram drafts, which
must not change a token, and with int8 KV, which rounds, so that its tokens are compared but may differ.
"""

import argparse
import importlib
import sys
from functools import cache
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import gap, gates, roofline
from .common import (
    ROUNDED,
    SAMPLED,
    VARIANTS,
    default_device,
    engines,
    environment,
    label,
    package_of,
    publish,
    results_folder,
    run_in_turn,
    stages,
)
from .plots import draw_compare

PROMPTS = [
    "Explain in simple words what a cache is and why computers have one.",
    "Write a short story about a lighthouse keeper and a whale.",
    "List five things that a good teacher does, with a reason for each.",
    "What happens to a letter between the sender and the reader?",
]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="The same prompts through every stage and through transformers, side by side; "
        "nanovllm and vllm are taken along if they can be imported.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", default="smollm2-135m", help="a name (smollm2-135m, tiny) or a folder")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--max-tokens", type=int, default=64, help="new tokens per prompt")
    p.add_argument("--samples", type=int, default=3, help="rounds; each is a fresh process per engine")
    p.add_argument("--runs", type=int, default=1, help="timed runs of each process, after its warm-up")
    names = [*engines(), *VARIANTS]
    p.add_argument("--engines", nargs="+", default=names, choices=names, help="rows of the table")
    p.add_argument("--out", type=Path, help="folder for compare.json and compare.png; left out: out/cpu, out/h200, ...")
    return p


def run_rounds(args: argparse.Namespace) -> dict[str, dict]:
    """Every engine `samples` times, each time in a fresh process; the order turns around after each round.

    Variants of a stage run once, at the end.
    """
    job = {name: getattr(args, name) for name in ("model", "device", "dtype", "max_tokens")}
    job |= {"prompts": PROMPTS, "samples": args.runs}
    several = [engine for engine in args.engines if engine not in VARIANTS]
    once = [engine for engine in args.engines if engine in VARIANTS]
    total = (args.samples * len(several) + len(once)) * args.runs * len(PROMPTS) * args.max_tokens
    with tqdm(total=total, unit="tok", desc="Comparing") as bar:
        results = run_in_turn([(engine, job) for engine in several], args.samples, bar)
        results += run_in_turn([(package_of(name), job | {"options": VARIANTS[name]}) for name in once], 1, bar)
    found = dict(zip([*several, *once], results, strict=True))
    return {engine: found[engine] for engine in args.engines}


def summary(engine: str, result: dict) -> dict:
    """One row of the table: medians over the samples, counters of the first (they do not vary). None: not told."""
    counters = result["samples"][0]["counters"]
    seconds = median(sample["seconds"] for sample in result["samples"])
    tokens = sum(len(run["token_ids"]) for run in result["samples"][0]["runs"])
    times = [run["token_times"] for sample in result["samples"] for run in sample["runs"]]
    per_token = counters.get("kv_bytes_per_token", 0)
    used = counters.get("kv_bytes_peak", per_token * counters.get("kv_tokens_used_peak", 0))
    reserved = counters.get("kv_bytes_peak", per_token * counters.get("kv_tokens_reserved_peak", 0))
    return {
        "engine": engine,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "ttft": median(t[0] for t in times) if all(times) else None,
        "tokens_forwarded": counters.get("tokens_forwarded"),
        "kv_bytes_reserved": reserved if counters else None,
        "kv_bytes_used": used if counters else None,
        "dtype": result["dtype"],
        "attention_backend": result["attention_backend"],
    }


def check_same(results: dict[str, dict], folder: Path) -> list[dict]:
    """Every output that differs from the first engine's, with the gap of the two best logits where they part."""
    greedy = [engine for engine in results if engine not in SAMPLED]
    if not greedy:
        return []
    first, *others = greedy
    wanted = [run["token_ids"] for run in results[first]["samples"][0]["runs"]]
    differences, gap_at = [], cache(lambda prefix: gap.top2_gap(str(folder), list(prefix)))
    for engine in (first, *others):
        for sample in results[engine]["samples"]:
            for prompt, (run, expected) in enumerate(zip(sample["runs"], wanted, strict=True)):
                at = gap.first_difference(run["token_ids"], expected)
                if at is not None:
                    prefix = results[first]["prompt_token_ids"][prompt] + expected[:at]
                    top2 = gap_at(tuple(prefix))
                    allowed = gap.ROUNDING_BOUND[results[engine]["dtype"]]
                    where = {"engine": engine, "prompt": prompt, "output_position": at}
                    differences.append(where | {"top2_gap": top2, "within_rounding": top2 <= allowed})
    return differences


def print_table(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    names = ["engine", "tokens", "seconds", "tokens/s", "TTFT ms", "tokens forwarded", "KV reserved MB", "KV used MB"]
    for name in names:
        table.add_column(name, justify="left" if name == "engine" else "right")
    for row in rows:
        numbers = [f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.1f}", cell(row["ttft"], "{:.0f}", 1000)]
        memory = [cell(row[key], "{:.1f}", 2**-20) for key in ("kv_bytes_reserved", "kv_bytes_used")]
        name, forwarded = gates.name(row, label(row["engine"])), cell(row["tokens_forwarded"], "{:,}")
        table.add_row(name, str(row["tokens"]), *numbers, forwarded, *memory)
    Console(width=120).print(table)
    gates.print_suspects(rows, "engine")


def cell(value: float | None, form: str, unit: float = 1) -> str:
    """A number of a table, or a dash where the engine does not tell it."""
    return "-" if value is None else form.format(value * unit)


def judged(results: dict[str, dict], max_tokens: int) -> list[dict]:
    """The rows of the table, and what is suspect about them."""
    rows = [summary(engine, result) for engine, result in results.items()]
    seconds = [[sample["seconds"] for sample in result["samples"]] for result in results.values()]
    length = max_tokens + min(len(ids) for result in results.values() for ids in result["prompt_token_ids"])
    return gates.mark(rows, gates.slower_stage(rows, len(PROMPTS), length), gates.wide_spread(seconds))


def print_agreement(differences: list[dict], names: list[str]) -> bool:
    """Say whether the texts of these engines are the same. False if one differs by more than rounding can explain.

    An engine that rounds K and V may make others: that is said, and no failure.
    """
    exact = [d for d in differences if d["engine"] not in ROUNDED]
    if not exact:
        print(
            f"All {len(names) - len(set(names) & set(ROUNDED))} engines that do not round K and V made the same tokens."
        )
    seen = {(d["engine"], d["prompt"], d["output_position"]): d for d in differences}  # once, not per sample
    for d in seen.values():
        explained = "rounding explains that" if d["within_rounding"] else "that is NOT rounding"
        verdict = "it rounds K and V, and may" if d["engine"] in ROUNDED else explained
        where = f"{d['engine']}, prompt {d['prompt']}, output position {d['output_position']}"
        print(f"{where}: another token; the two best logits are {d['top2_gap']:.4f} apart: {verdict}.")
    for engine in set(ROUNDED) & set(names) - {d["engine"] for d in differences}:
        print(f"{engine} rounds K and V, and made these tokens too.")
    return all(d["within_rounding"] for d in exact)


def model_folder(model: str) -> Path:
    """The Hugging Face folder of the model; a missing model is a one-line error before any process starts."""
    return importlib.import_module(f"{stages()[0]}.zoo").locate(model).weights


def split_failures(results: dict[str, dict]) -> tuple[dict[str, dict], dict[str, str]]:
    """What was measured, and why which peer is left out."""
    left_out = {engine: result["failure"] for engine, result in results.items() if "failure" in result}
    return {engine: result for engine, result in results.items() if engine not in left_out}, left_out


def print_notes(results: dict[str, dict], left_out: dict[str, str]) -> None:
    for engine, why in left_out.items():
        print(f"{engine} is left out: {why.strip().splitlines()[-1]}")
    for engine in set(SAMPLED) & set(results):
        print(f"{engine} has no greedy decoding: its tokens are not compared.")


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, Path]:
    """What was asked for, and the model's folder."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.samples < 1 or args.runs < 1 or args.max_tokens < 2:
        cli.error("--samples and --runs must be at least 1 and --max-tokens at least 2")
    try:
        return args, model_folder(args.model)
    except ValueError as error:
        cli.exit(2, f"{cli.prog}: {error}\n")


def main(argv: list[str] | None = None) -> int:
    args, folder = arguments(argv)
    points = [(1, args.max_tokens), (len(PROMPTS), args.max_tokens)]  # a little low: the prompts come on top
    card = roofline.show(args.model, args, points)
    results, left_out = split_failures(run_rounds(args))
    print_notes(results, left_out)
    if not results:
        return 1
    rows = judged(results, args.max_tokens)
    env = environment(args.device or default_device())
    differences = check_same(results, folder)
    print_table(rows, f"{args.model}, {rows[0]['dtype']}, {env['device_name']}: {len(PROMPTS)} prompts at once")
    same = print_agreement(differences, [engine for engine in results if engine not in SAMPLED])
    job = {name: getattr(args, name) for name in ("model", "max_tokens", "samples", "runs")} | {"prompts": PROMPTS}
    document = {"environment": env, "job": job, "roofline": card, "rows": rows, "differences": differences}
    document |= {"left_out": left_out, "results": results}
    publish((args.out or results_folder(env["device"])) / "compare.json", document, draw_compare)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
