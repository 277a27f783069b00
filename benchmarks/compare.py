"""Compare: the same prompts through every stage, beside `transformers`. One table, one picture, one JSON file.

    python -m benchmarks.compare                          # the default model; what `make demo` runs
    python -m benchmarks.compare --model tiny --samples 1 # in a few seconds

All prompts are handed in at once; an engine that can serve only one sequence serves them one after the other. Each row
runs in a fresh process, in several rounds of alternating order. A row's time is the median over the rounds; only ratios
within one run mean anything. TTFT counts from the call. All rows must make the same tokens.
"""

import argparse
import importlib
import sys
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from . import gap
from .common import default_device, engines, environment, label, results_folder, run_worker, write_json
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
        description="The same prompts through every stage and through transformers, side by side.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", default="smollm2-135m", help="a name (smollm2-135m, tiny) or a folder")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--max-tokens", type=int, default=64, help="new tokens per prompt")
    p.add_argument("--samples", type=int, default=3, help="rounds; each is a fresh process per engine")
    p.add_argument("--engines", nargs="+", default=engines(), choices=engines(), help="rows of the table")
    p.add_argument("--out", type=Path, help="folder for compare.json and compare.png; left out: out/cpu, out/h200, ...")
    return p


def run_rounds(args: argparse.Namespace) -> dict[str, dict]:
    """Every engine `samples` times, each time in a fresh process; the order turns around after each round."""
    job = {name: getattr(args, name) for name in ("model", "device", "dtype", "max_tokens")}
    job |= {"prompts": PROMPTS, "samples": 1}
    results: dict[str, dict] = {}
    total = args.samples * len(args.engines) * len(PROMPTS) * args.max_tokens
    with tqdm(total=total, unit="tok", desc="Comparing") as bar:
        for round_number in range(args.samples):
            for engine in args.engines[:: 1 if round_number % 2 == 0 else -1]:
                bar.set_postfix_str(label(engine))
                result = run_worker(engine, job, bar.update)
                if engine in results:
                    results[engine]["samples"] += result["samples"]
                else:
                    results[engine] = result
    return {engine: results[engine] for engine in args.engines}


def summary(engine: str, result: dict) -> dict:
    """One row of the table: medians over the samples, counters of the first (they do not vary)."""
    counters = result["samples"][0]["counters"]
    seconds = median(sample["seconds"] for sample in result["samples"])
    tokens = sum(len(run["token_ids"]) for run in result["samples"][0]["runs"])
    ttft = median(run["token_times"][0] for sample in result["samples"] for run in sample["runs"])
    per_token = counters.get("kv_bytes_per_token", 0)
    used = counters.get("kv_bytes_peak", per_token * counters.get("kv_tokens_used_peak", 0))
    reserved = counters.get("kv_bytes_peak", per_token * counters.get("kv_tokens_reserved_peak", 0))
    return {
        "engine": engine,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "ttft": ttft,
        "tokens_forwarded": counters["tokens_forwarded"],
        "kv_bytes_reserved": reserved,
        "kv_bytes_used": used,
        "dtype": result["dtype"],
        "attention_backend": result["attention_backend"],
    }


def check_same(results: dict[str, dict], folder: Path) -> list[dict]:
    """Every output that differs from the first engine's, with the gap of the two best logits where they part."""
    first, *others = results
    wanted = [run["token_ids"] for run in results[first]["samples"][0]["runs"]]
    differences = []
    for engine in (first, *others):
        for sample in results[engine]["samples"]:
            for prompt, (run, expected) in enumerate(zip(sample["runs"], wanted, strict=True)):
                at = gap.first_difference(run["token_ids"], expected)
                if at is not None:
                    prefix = results[first]["prompt_token_ids"][prompt] + expected[:at]
                    top2 = gap.top2_gap(str(folder), prefix)
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
        numbers = [f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.1f}", f"{row['ttft'] * 1000:.0f}"]
        memory = [f"{row[key] / 2**20:.1f}" for key in ("kv_bytes_reserved", "kv_bytes_used")]
        table.add_row(label(row["engine"]), str(row["tokens"]), *numbers, f"{row['tokens_forwarded']:,}", *memory)
    Console(width=120).print(table)


def print_agreement(differences: list[dict], count: int) -> bool:
    """Say whether all texts are the same. False if one differs by more than rounding can explain."""
    if not differences:
        print(f"All {count} engines made the same tokens.")
    seen = {(d["engine"], d["prompt"], d["output_position"]): d for d in differences}  # once, not per sample
    for d in seen.values():
        verdict = "rounding explains that" if d["within_rounding"] else "that is NOT rounding"
        where = f"{d['engine']}, prompt {d['prompt']}, output position {d['output_position']}"
        print(f"{where}: another token; the two best logits are {d['top2_gap']:.4f} apart: {verdict}.")
    return all(d["within_rounding"] for d in differences)


def model_folder(model: str) -> Path:
    """The Hugging Face folder of the model; a missing model is a one-line error before any process starts."""
    return importlib.import_module(f"{engines()[1]}.zoo").locate(model).weights


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if args.samples < 1 or args.max_tokens < 2:
        cli.error("--samples must be at least 1 and --max-tokens at least 2")
    try:
        folder = model_folder(args.model)
    except ValueError as error:
        cli.exit(2, f"{cli.prog}: {error}\n")
    results = run_rounds(args)
    rows = [summary(engine, result) for engine, result in results.items()]
    device = args.device or default_device()
    env = environment(device)
    differences = check_same(results, folder)
    title = f"{args.model}, {rows[0]['dtype']}, {env['device_name']}: {len(PROMPTS)} prompts at once"
    print_table(rows, title)
    same = print_agreement(differences, len(rows))
    out = args.out or results_folder(device)
    job = {name: getattr(args, name) for name in ("model", "max_tokens", "samples")} | {"prompts": PROMPTS}
    document = {"environment": env, "job": job, "rows": rows, "differences": differences, "results": results}
    write_json(out / "compare.json", document)
    draw_compare(document, out / "compare.png")
    print(f"Written: {out / 'compare.json'} and {out / 'compare.png'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
