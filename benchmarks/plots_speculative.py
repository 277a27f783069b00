"""Figures of benchmarks.speculative and benchmarks.draft_cost, drawn from their result files alone.

python -m benchmarks.plots_speculative out/h200/speculative.json     # draw it again
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .plots import finish, source

LESSON = "figures"

LOOKS = {  # Okabe-Ito, as everywhere
    "editing": ("#0072B2", "o", "-"),
    "quoting": ("#009E73", "s", "--"),
    "code": ("#CC79A7", "^", "-."),
    "stories": ("#D55E00", "v", ":"),
}


def draw(document: dict, path: Path | None = None) -> Figure:
    """Speed-up over the number of drafts, one panel per batch; below it the share of drafts that were right."""
    rows, job = [row for row in document["rows"] if row["part"] == "n-gram"], document["job"]
    fig, axes = plt.subplots(
        2, len(job["batches"]), figsize=(1 + 3.2 * len(job["batches"]), 5.6), sharex=True, sharey="row", squeeze=False
    )
    for (above, below), batch in zip(axes.T, job["batches"], strict=True):
        for kind in job["kinds"]:
            line = [row for row in rows if row["batch"] == batch and row["kind"] == kind]
            _line(above, below, kind, line)
        above.axhline(1, color="#555555", linewidth=0.8)
        above.set_title(f"batch {batch}", fontsize=10)
        below.set(xlabel="drafts of a step", ylim=(0, 1.02))
        below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0, 0].set(ylabel="speed-up (1: no drafts)", ylim=(0, None))
    axes[1, 0].set_ylabel("drafts accepted")
    axes[0, 0].set_xticks([0, *sorted(job["drafts"])])
    axes[1, -1].legend(fontsize=8, frameon=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return finish(fig, source(document), path)


def _line(above, below, kind: str, rows: list[dict]) -> None:
    """One kind of text at one batch: medians, and whiskers from the least to the most of the runs."""
    base, drafts = rows[0]["tokens_per_second"], [row["drafts"] for row in rows]
    ups = [row["speed_up"] for row in rows]
    reach = [[up - row["tokens_per_second_range"][0] / base for up, row in zip(ups, rows, strict=True)]]
    reach.append([row["tokens_per_second_range"][1] / base - up for up, row in zip(ups, rows, strict=True)])
    shade, marker, style = LOOKS[kind]
    look = dict(color=shade, marker=marker, linestyle=style, markersize=4, label=kind)
    above.errorbar(drafts, ups, reach, capsize=2, elinewidth=0.8, **look)
    below.plot(drafts[1:], [row["acceptance_rate"] for row in rows[1:]], **look)


def draw_cost(document: dict, path: Path | None = None) -> Figure:
    """The tokens that a step must bring to pay, over the number of drafts: a line per model, a panel per batch."""
    rows, job = document["rows"], document["job"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    fig, axes = plt.subplots(
        1, len(job["batches"]), figsize=(1 + 3.2 * len(job["batches"]), 3.4), sharey=True, squeeze=False
    )
    for axis, batch in zip(axes[0], job["batches"], strict=True):
        for model, (shade, marker, style) in zip(models, LOOKS.values(), strict=False):
            (row,) = (row for row in rows if row["model"] == model and row["batch"] == batch)
            places = [step["drafts"] for step in row["steps"]]
            tokens = [step["tokens_to_pay"] for step in row["steps"]]
            axis.plot(places, tokens, color=shade, marker=marker, linestyle=style, markersize=4, label=model)
        axis.plot(places, [1 + k for k in places], color="#999999", linewidth=0.8, label="all drafts right")
        axis.set(title=f"batch {batch}", xlabel="drafts of a step", ylim=(0, 5))
        axis.set_xticks([0, *sorted(job["drafts"])])
        axis.axhline(1, color="#555555", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("tokens a step must bring to pay")
    axes[0, -1].legend(fontsize=8, frameon=False)
    return finish(fig, source(document), path)


def main(argv: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(prog="python -m benchmarks.plots_speculative", description=__doc__.partition("\n")[0])
    cli.add_argument("paths", nargs="+", type=Path, metavar="FILE.json", help="result files; FILE.png is drawn anew")
    for path in cli.parse_args(argv).paths:
        document = json.loads(path.read_text())
        (draw_cost if path.stem == "draft-cost" else draw)(document, path.with_suffix(".png"))
        print(f"Drawn: {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
