"""Figures in the texts: every measured number in a README is drawn from a result file by this script.

    python tools/figures.py            # rewrite the blocks from the JSON files
    python tools/figures.py --check    # only say which are out of date (a test runs this)

A block stands between two comments, `<!-- begin NAME ARGUMENTS -->` and `<!-- end NAME -->`; NAME is a function below.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- begin ([\w-]+)([^>]*) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)


def source(document: dict) -> str:
    """The line under each block: where and when the numbers were measured, and how to measure them again."""
    env = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
    return f"*{env['device_name']}, {versions}, {env['date'][:10]}: `{env['command']}`*\n"


def load(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


def table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table; all columns but the first `left` are right-aligned."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows]) + "\n"


def name_of(engine: str) -> str:
    number, _, words = engine.removeprefix("stage").partition("_")
    return f"stage {number}, {words.replace('_', ' ')}" if words else engine


def picture(page: Path, path: str, alt: str) -> str:
    return f"![{alt}]({os.path.relpath(ROOT / path, page.parent)})\n"


def told(value: float | None, form: str, unit: float = 1) -> str:
    """A number, or a dash where the engine does not tell it (a peer)."""
    return "-" if value is None else form.format(value * unit)


def ladder(page: Path, path: str) -> str:
    """The side-by-side picture, and the rungs in words."""
    document = load(path)
    stages = [row for row in document["rows"] if row["engine"].count("_") == 1 or "_" not in row["engine"]]
    words = "; ".join(f"{name_of(row['engine']).replace(',', '')} {row['tokens_per_second']:,.0f}" for row in stages)
    image = picture(page, path.replace(".json", ".png"), "tokens per second, tokens forwarded and KV memory by engine")
    return f"{image}\nTokens per second: {words}.\n\n{source(document)}"


def compare(page: Path, path: str, only: str = "") -> str:
    """The side-by-side table and its picture; only="table" leaves the picture out."""
    document = load(path)
    header = [
        "engine",
        "tokens",
        "seconds",
        "tokens/s",
        "TTFT, ms",
        "tokens forwarded",
        "KV reserved, MB",
        "KV used, MB",
    ]
    rows = []
    for row in document["rows"]:
        speed = [f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.1f}", told(row["ttft"], "{:.0f}", 1000)]
        memory = [told(row[key], "{:.1f}", 2**-20) for key in ("kv_bytes_reserved", "kv_bytes_used")]
        forwarded = told(row["tokens_forwarded"], "{:,}")
        rows.append([name_of(row["engine"]), str(row["tokens"]), *speed, forwarded, *memory])
    image = picture(page, path.replace(".json", ".png"), "tokens per second, tokens forwarded and KV memory by engine")
    return table(header, rows) + "\n" + (image + "\n" if only != "table" else "") + source(document)


NUMBERS = {  # column of a batching table -> heading and number format
    "steps": ("steps", "{:,}"),
    "idle_slot_steps": ("idle slot-steps", "{:,}"),
    "short_returned_after_steps": ("short ones back after steps", "{:,.0f}"),
    "longest_gap_work": ("longest wait, tokens of work", "{:,}"),
    "longest_gap_ms": ("longest wait, ms", "{:,.0f}"),
    "seconds": ("seconds", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}


def batching(page: Path, path: str) -> str:
    """A table of one of the batching measurements, and its picture if there is one."""
    document = load(path)
    keys = document["columns"]
    rows = [[row["name"], *(NUMBERS[key][1].format(row[key]) for key in keys)] for row in document["rows"]]
    image = path.replace(".json", ".png")
    drawn = picture(page, image, document["job"]["what"]) + "\n" if (ROOT / image).exists() else ""
    return table(["workload", *(NUMBERS[key][0] for key in keys)], rows) + "\n" + drawn + source(document)


def paged(page: Path, path: str) -> str:
    """A table of one of the measurements of KV memory in blocks, and its picture."""
    document = load(path)
    rows = [[row["name"], *cells] for row, cells in zip(document["rows"], document["cells"], strict=True)]
    image = path.replace(".json", ".png")
    drawn = picture(page, image, document["job"]["what"]) + "\n" if (ROOT / image).exists() else ""
    return table(["run", *document["columns"].values()], rows) + "\n" + drawn + source(document)


def peers(page: Path, path: str) -> str:
    """What other engines reach. Not measured by this project: the file says by whom, and how."""
    document = load(path)
    rows = [[row["name"], *cells] for row, cells in zip(document["rows"], document["cells"], strict=True)]
    env = document["environment"]
    note = f"*{env['device_name']}, {env['date']}, {document['job']['note']}; {env['command']}*\n"
    image = picture(page, path.replace(".json", ".png"), "tokens per second of other engines and of stage 5")
    return table(["engine", *document["columns"].values()], rows) + "\n" + image + "\n" + note


def speculative(page: Path, path: str, key: str = "ngram_table") -> str:
    """One of the two tables of drafts (ngram_table, model_table); below the first its picture."""
    document = load(path)
    image = picture(page, path.replace(".json", ".png"), "speed-up and accepted drafts over the number of drafts")
    grid = table(document[key]["head"], document[key]["body"], left=1)
    return grid + "\n" + (image + "\n" if key == "ngram_table" else "") + source(document)


def moves(page: Path, path: str) -> str:
    """Swap against recompute, and what single blocks cost."""
    document = load(path)
    keys = ("swap_out_ms", "swap_in_ms", "recompute_ms", "decode_ms")
    rows = []
    for row in document["rows"]:
        size = f"{row['bytes'] / 2**20:,.0f}"
        rows.append([row["model"], f"{row['length']:,}", size, *(f"{row[key]:.1f}" for key in keys)])
    header = ["model", "tokens", "MB", "out, ms", "back, ms", "recompute, ms", "one decode step, ms"]
    words = [
        f"{model}, {name}: {piece['bytes'] / 1024:,.0f} KB, {piece['there_and_back_ms']:.3f} ms there and back"
        for model, found in document["pieces"].items()
        for name, piece in found.items()
    ]
    image = picture(page, path.replace(".json", ".png"), "swap against recompute over the length of the sequence")
    return table(header, rows) + "\n" + "  \n".join(words) + "\n\n" + image + "\n" + source(document)


def interleave(page: Path, path: str) -> str:
    """Engines that took turns, step by step, on one workload."""
    document, rows = load(path), []
    first = document["rows"][0]["tokens_per_second"]
    for row in document["rows"]:
        speed = row["tokens_per_second"]
        numbers = [f"{row['counters']['steps']:,}", f"{row['kv_bytes_reserved'] / 2**20:,.0f}", f"{row['seconds']:.1f}"]
        rows.append([row["name"], row["backend"], *numbers, f"{speed:,.0f}", f"{speed / first:.2f}"])
    header = ["engine", "attention", "steps", "KV reserved, MB", "seconds", "tokens/s", "to the first"]
    return table(header, rows, left=2) + "\n" + source(document)


def kernels(page: Path, path: str) -> str:
    """Paged attention alone: our kernels and flash-attn, where both ran."""
    document = load(path)
    names = list(document["rows"][0]["results"])
    rows = []
    for row in document["rows"]:
        found = [row["results"].get(name) for name in names]
        cells = [f"{one['rate']:,.2f} {one['unit']}" if one else "-" for one in found]
        rows.append([row["name"], *cells])
    return table(["step", *names], rows) + "\n" + source(document)


def curve(page: Path, path: str) -> str:
    """Milliseconds per token at a few positions, and the picture."""
    document = load(path)
    header = ["milliseconds for the token at position", *map(str, document["rows"][0]["positions"])]
    rows = [[name_of(row["engine"]), *(f"{ms:.1f}" for ms in row["milliseconds"])] for row in document["rows"]]
    image = picture(page, path.replace(".json", ".png"), "time per token and in all against position")
    return image + "\n" + table(header, rows) + "\n" + source(document)


def curve_one(page: Path, engine: str, path: str) -> str:
    """One engine's time per token at the first and last position, in a sentence."""
    document = load(path)
    (row,) = [row for row in document["rows"] if row["engine"] == engine]
    first, last = row["milliseconds"][0], row["milliseconds"][-1]
    low, high = row["positions"][0], row["positions"][-1]
    return (
        f"Measured: {first:.0f} ms for a token at position {low}, {last:.0f} ms at position {high}, "
        f"{last / first:.0f} times as much.\n\n{source(document)}"
    )


def curve_ratio(page: Path, path: str) -> str:
    """Seconds for all tokens, stage 1 against stage 2."""
    document = load(path)
    seconds = {row["engine"]: row["seconds_in_all"][-1] for row in document["rows"]}
    position = document["rows"][0]["positions"][-1]
    words = ", ".join(f"{name_of(engine)} {value:.1f} s" for engine, value in seconds.items())
    naive, cached = (value for engine, value in seconds.items() if engine.startswith(("stage1", "stage2")))
    return f"All tokens up to {position}: {words}. That is a factor of {naive / cached:.1f}.\n\n{source(document)}"


def gallery(page: Path, path: str) -> str:
    """The texts under each set of sampling parameters."""
    document = load(path)
    parts = []
    for row in document["rows"]:
        given = {"max_tokens": 48} | row["params"]
        params = ", ".join(f"{key}={value!r}" for key, value in given.items())
        text = " ".join(row["text"].split()) or "(nothing)"
        kind = "chat" if row["chat"] else "plain text"
        parts.append(f'**{row["name"]}**: {row["see"]}. `{params}`; {kind}: "{row["prompt"]}"\n\n> {text}\n')
    return "\n".join(parts) + "\n" + source(document)


def lines(page: Path) -> str:
    """Lines of each stage: the files that a lesson reads, the given ones, and the tests."""
    given = {"tokenizer.py", "sampling.py", "checkpoint.py", "zoo.py", "inputs.py", "rope.py", "progress.py"}
    rows = []
    for folder in sorted(ROOT.glob("stage[1-9]_*")):
        count = {file.name: len(file.read_text().splitlines()) for file in folder.glob("*.py")}
        to_read = sum(n for name, n in count.items() if name not in given)
        tests = sum(len(file.read_text().splitlines()) for file in (folder / "tests").glob("*.py"))
        rows.append([f"`{folder.name}`", f"{to_read:,}", f"{sum(count.values()) - to_read:,}", f"{tests:,}"])
    return table(["lines of Python", "to read", "given, may be skipped", "tests"], rows)


RENDERERS: dict[str, Callable[..., str]] = {
    "batching": batching,
    "compare": compare,
    "curve": curve,
    "curve-one": curve_one,
    "curve-ratio": curve_ratio,
    "gallery": gallery,
    "interleave": interleave,
    "peers": peers,
    "kernels": kernels,
    "ladder": ladder,
    "lines": lines,
    "moves": moves,
    "paged": paged,
    "speculative": speculative,
}


def pages() -> list[Path]:
    """Every page with blocks: README.md and README.zh.md, the lessons, the pages of the benchmarks."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("stage*/README.md"), *ROOT.glob("benchmarks/**/*.md")])


def rendered(page: Path) -> str:
    """The page with every block drawn anew."""

    def redraw(match: re.Match) -> str:
        begin, name, arguments, _, end = match.groups()
        return begin + RENDERERS[name](page, *arguments.split()) + end

    return BLOCK.sub(redraw, page.read_text(encoding="utf-8"))


def main() -> int:
    p = argparse.ArgumentParser(description="Draw the measured numbers of the READMEs from benchmarks/results.")
    p.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    args = p.parse_args()
    stale = [page for page in pages() if rendered(page) != page.read_text(encoding="utf-8")]
    for page in stale:
        print(f"{'out of date' if args.check else 'rewritten'}: {page.relative_to(ROOT)}")
        if not args.check:
            page.write_text(rendered(page), encoding="utf-8")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
