"""KV quality: what a quantised KV cache does to a model's predictions.

    python -m benchmarks.kv_quality                          # SmolLM2-135M: some minutes on a CPU
    python -m benchmarks.kv_quality --model qwen3-0.6b --device cuda --tokens 32768

Perplexity: a text is read in windows, some tokens at a time, whose K and V go into the cache before they are attended
to; how well each next token was foreseen is averaged. The text is Python's own reference, which every Python carries
as pydoc_data.topics (its words change a little from version to version: compare rows of one run).

Divergence: greedy texts, up to the first token that differs from that of the unquantised cache. One changed token is no
mistake: two continuations that are as likely as each other change places at the slightest touch.
Files: kv-quality.json.
"""

import argparse
import importlib
import math
import sys
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .common import ROOT, default_device, environment, publish, results_folder, stages
from .plots_kv import draw_kv_quality

LESSON = "stage 5"
KV_DTYPES = ("auto", "int8", "fp8")
STAGES = [stage for stage in stages() if (ROOT / stage / "quantised_kv.py").exists()]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_quality",
        description="Perplexity and first greedy difference with a quantised KV cache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--stage", default=STAGES[-1] if STAGES else None, choices=STAGES, help="whose engine")
    p.add_argument("--model", default="smollm2-135m", help="a name, a folder or a hub id")
    p.add_argument("--device", default=default_device(), choices=["cpu", "cuda"])
    p.add_argument("--dtype", default="auto", help="of the model, and of the unquantised cache")
    p.add_argument("--tokens", type=int, default=4096, help="of the text")
    p.add_argument("--window", type=int, default=1024, help="tokens that are read in a row")
    p.add_argument("--piece", type=int, default=64, help="tokens of one step")
    p.add_argument("--prompts", type=int, default=8, help="beginnings that are continued greedily")
    p.add_argument("--max-tokens", type=int, default=128, help="tokens of each continuation")
    p.add_argument("--out", type=Path, help="folder for the file; left out: out/cpu, out/h200, ...")
    return p


def text_ids(llm, count: int) -> list[int]:
    """The first tokens of Python's reference."""
    from pydoc_data.topics import topics

    ids = llm.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))[: 16 * count])
    if len(ids) < count:
        raise ValueError(f"--tokens {count}: the text has {len(ids)}; lower it")
    return ids[:count]


def one_sequence(stage: str, start: int, end: int, block_size: int, device: torch.device) -> object:
    """The metadata of a step with tokens start ... end - 1 of the only sequence, whose blocks are 0, 1, 2 ..."""
    attention = importlib.import_module(f"{stage}.attention")

    def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    blocks, places = tensor(range(-(-end // block_size)))[None], tensor(range(start, end), torch.int64)
    lens = tensor([0, end - start]), tensor([0, end]), tensor([end])
    return attention.AttentionMetadata([end - start], [end], *lens, blocks, places)


@torch.inference_mode()
def surprise(llm, stage: str, ids: list[int], piece: int) -> float:
    """The sum of -log p(token) over the tokens of a window but its first, through the engine's cache."""
    runner, device, total = llm.model_runner, llm.resolved.device, 0.0
    tokens = torch.tensor(ids, device=device)
    for start in range(0, len(ids) - 1, piece):
        end = min(start + piece, len(ids) - 1)
        metadata = one_sequence(stage, start, end, llm.resolved.block_size, device)
        positions = torch.arange(start, end, device=device)
        hidden = runner.model(tokens[start:end], positions, runner.kv_cache.layers, metadata)
        logits = runner.model.compute_logits(hidden).float()
        total += F.cross_entropy(logits, tokens[start + 1 : end + 1], reduction="sum").item()
    return total


def measure(args: argparse.Namespace, kv_dtype: str) -> dict:
    """One cache dtype: perplexity, bytes of a token, and the greedy texts."""
    package = importlib.import_module(args.stage)
    options = dict(device=args.device, dtype=args.dtype, kv_cache_dtype=kv_dtype, enforce_eager=True)
    longest = max(args.window, 64 + args.max_tokens)
    with package.LLM(args.model, max_model_len=longest, max_num_seqs=args.prompts, **options) as llm:
        ids = text_ids(llm, args.tokens)
        starts = range(0, len(ids) - 1, args.window)
        windows = tqdm([ids[start : start + args.window] for start in starts], desc=f"KV {kv_dtype}", leave=False)
        total = sum(surprise(llm, args.stage, window, args.piece) for window in windows)
        perplexity = math.exp(total / (len(ids) - len(starts)))
        step = (len(ids) - 64) // args.prompts
        prompts = [ids[i * step : i * step + 64] for i in range(args.prompts)]
        params = package.SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
        texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        counts = {"kv_bytes_per_token": llm.metrics.kv_bytes_per_token, "backend": llm.resolved.attention_backend}
    name = "as the model" if kv_dtype == "auto" else kv_dtype
    return {"name": name, "kv_cache_dtype": kv_dtype, "perplexity": perplexity, **counts, "texts": texts}


def first_difference(text: list[int], reference: list[int]) -> int | None:
    return next((i for i, pair in enumerate(zip(text, reference, strict=True)) if pair[0] != pair[1]), None)


def compare(rows: list[dict]) -> None:
    """Add to each row how it stands to the first, the unquantised one; the texts themselves are not kept."""
    texts = [row.pop("texts") for row in rows]
    for row, own in zip(rows, texts, strict=True):
        row["perplexity_change"] = row["perplexity"] / rows[0]["perplexity"] - 1
        row["tokens_per_byte"] = rows[0]["kv_bytes_per_token"] / row["kv_bytes_per_token"]
        row["first_differences"] = [first_difference(*pair) for pair in zip(own, texts[0], strict=True)]


def columns_and_cells(rows: list[dict], max_tokens: int) -> tuple[dict[str, str], list[list[str]]]:
    """Heads by key, and the cells of each row."""
    columns = {"perplexity": "perplexity", "change": "change", "bytes": "bytes per token", "tokens": "tokens in a pool"}
    columns |= {"differ": "greedy texts that differ", "from": "from token"}
    cells = []
    for row in rows:
        found = [at for at in row["first_differences"] if at is not None]
        usual = f"{min(found)}, median {median(found):.0f}" if found else f"none in {max_tokens}"
        differ = f"{len(found)} of {len(row['first_differences'])}"
        numbers = f"{row['perplexity']:.4f}", f"{row['perplexity_change']:+.2%}", f"{row['kv_bytes_per_token']:,}"
        cells.append([*numbers, f"{row['tokens_per_byte']:.2f} x", differ, usual])
    return columns, cells


def print_table(document: dict, title: str) -> None:
    table = Table(title=title)
    for column in ("KV cache", *document["columns"].values()):
        table.add_column(column, justify="left" if column == "KV cache" else "right")
    for row, cells in zip(document["rows"], document["cells"], strict=True):
        table.add_row(row["name"], *cells)
    Console(width=130).print(table)


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if args.stage is None:
        cli.error("no stage has a quantised_kv.py")
    if min(args.tokens - 128, args.window - 1, args.piece, args.prompts, args.max_tokens) < 1:
        cli.error("--tokens must be above 128, --window above 1, the others at least 1")
    try:
        rows = [measure(args, kv_dtype) for kv_dtype in KV_DTYPES]
    except ValueError as error:
        cli.error(str(error))
    compare(rows)
    env, file = environment(args.device), (args.out or results_folder(args.device)) / "kv-quality.json"
    names = ("stage", "model", "dtype", "tokens", "window", "piece", "prompts", "max_tokens")
    job = {"what": "quality of a quantised cache"} | {name: getattr(args, name) for name in names}
    job |= {"text": "pydoc_data.topics"}
    document = {"environment": env, "job": job, "rows": rows}
    document["columns"], document["cells"] = columns_and_cells(rows, args.max_tokens)
    print_table(document, f"{args.model}, {args.tokens:,} tokens of Python's reference")
    publish(file, document, draw_kv_quality)
    return 0


if __name__ == "__main__":
    sys.exit(main())
