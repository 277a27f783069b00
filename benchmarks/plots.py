"""Figures, drawn from result files alone: what is in the JSON can be drawn again.

Each function saves its figure if it is given a path, and returns it.
"""

import sys
from pathlib import Path

import matplotlib

if "ipykernel" not in sys.modules:  # a notebook has a way of its own to show a figure
    matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from .common import REFERENCE, colour, label


def caption(document: dict) -> str:
    """Where the numbers come from, for the foot of a figure."""
    env, job = document["environment"], document["job"]
    row = document["rows"][0]
    dtype = row.get("dtype") or row["result"]["dtype"]
    versions = f"torch {env['versions']['torch']}, transformers {env['versions']['transformers']}"
    return f"{job['model']}, {dtype}, {env['device_name']}, {versions}, {env['date'][:10]}"


def finish(fig: Figure, foot: str, path: Path | None = None) -> Figure:
    """Put the source of the numbers at the foot, lay the figure out, save it if there is a path."""
    lines = 1 + foot.count("\n")
    fig.text(0.01, 0.01, foot, fontsize=7, color="#555555", va="bottom")
    fig.tight_layout(rect=(0, (0.06 + 0.13 * lines) / fig.get_figheight(), 1, 1))
    if path is not None:
        fig.savefig(path, dpi=130)
    fig.set_dpi(80)  # in a notebook, which should stay small
    plt.close(fig)
    return fig


def source(document: dict) -> str:
    """What was measured where, and below it the command that does it again."""
    return f"{caption(document)}\n{document['environment']['command']}"


def whiskers(axis, runs: list[list[float]]) -> None:
    """A thin line at the foot of each bar, from the least to the most of its runs; none where there was one run."""
    for place, values in enumerate(runs):
        if len(values) > 1:
            axis.plot(
                [min(values), max(values)], [place + 0.3] * 2, color="#333333", marker="|", markersize=5, linewidth=1
            )


LADDER = 50  # from the lowest rung to the highest, beyond which the axis is logarithmic


def draw_compare(document: dict, path: Path | None = None) -> Figure:
    """Three bar charts side by side: speed, work, memory."""
    rows = document["rows"]
    panels = [
        ("tokens_per_second", "new tokens per second", 1),
        ("tokens_forwarded", "tokens through the model", 1),
        ("kv_bytes_used", "KV memory used, MB", 2**20),
    ]
    fig, axes = plt.subplots(1, len(panels), figsize=(11, 1.2 + 0.55 * len(rows)), sharey=True)
    for axis, (key, title, unit) in zip(axes, panels, strict=True):
        values = [(row[key] or 0) / unit for row in rows]
        bars = axis.barh([label(row["engine"]) for row in rows], values, color=[colour(row["engine"]) for row in rows])
        axis.bar_label(
            bars, [f"{value:,.0f}" if key == "tokens_forwarded" else f"{value:,.1f}" for value in values], padding=3
        )
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0, max(values) * 1.25 or 1)
        axis.spines[["top", "right"]].set_visible(False)
    speeds = [row["tokens_per_second"] for row in rows]
    if max(speeds) > LADDER * min(speeds):  # or the lower rungs would not be seen
        axes[0].set(xscale="log", xlim=(min(speeds) / 3, max(speeds) * 6))
        axes[0].set_title("new tokens per second (logarithmic)", fontsize=10)
    samples = {engine: result["samples"] for engine, result in document["results"].items()}
    speeds = [[row["tokens"] / sample["seconds"] for sample in samples[row["engine"]]] for row in rows]
    whiskers(axes[0], speeds)
    axes[0].invert_yaxis()
    return finish(fig, source(document), path)


def draw_load(document: dict, path: Path | None = None) -> Figure:
    """The share of requests (of gaps between tokens) that saw at most so many milliseconds. One style per rate."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    styles = dict(zip(document["job"]["rates"], ["-", "--", ":", "-."] * 4, strict=False))
    titles = {"ttft_ms": "milliseconds to the first token", "itl_ms": "milliseconds between two tokens"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for row in document["rows"]:
            values = row[key]
            shares = [(i + 1) / len(values) for i in range(len(values))]
            look = dict(color=colour(row["stage"]), linestyle=styles[row["rate"]], label=row["name"])
            axis.step(values, shares, where="post", **look)
        axis.set(xlabel=title, xscale="log", ylim=(0, 1.02))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share that saw at most so much")
    axes[1].legend(fontsize=7, frameon=False)
    return finish(fig, source(document), path)


def draw_curve(document: dict, path: Path | None = None) -> Figure:
    """Seconds per token against position, and the sum of it: linear against quadratic."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for row in document["rows"]:
        look = dict(color=colour(row["engine"]), marker="o", markersize=3, label=label(row["engine"]))
        if row["engine"] == REFERENCE:
            look["linestyle"] = "--"
        low, high = zip(*row["milliseconds_range"], strict=True)
        left.plot(row["positions"], row["milliseconds"], **look)
        left.fill_between(row["positions"], low, high, color=look["color"], alpha=0.15, linewidth=0)
        right.plot(row["positions"], row["seconds_in_all"], **look)
    left.set(xlabel="position of the token in the sequence", ylabel="milliseconds for one token", ylim=(0, None))
    right.set(xlabel="length of the sequence", ylabel="seconds for all tokens so far", ylim=(0, None))
    for axis in (left, right):
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    return finish(fig, source(document), path)


def _bars(axis, names: list[str], values: list[float], colours: list[str], title: str, form: str) -> None:
    bars = axis.barh(names, values, color=colours)
    axis.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.set_xlim(0, (max(values) or 1) * 1.3)
    if max(values) >= 100_000:  # long numbers below: fewer of them
        axis.xaxis.set_major_locator(MaxNLocator(3))
    axis.tick_params(axis="y", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _panels(
    document: dict, path: Path | None, panels: list[tuple[str, str, str]], shade, runs: dict[str, list] | None = None
) -> Figure:
    """One row of bar charts over the same rows. panels: (key, title, number format). runs: key -> all runs per row."""
    rows = document["rows"]
    fig, axes = plt.subplots(1, len(panels), figsize=(11, 1.2 + 0.32 * len(rows)), sharey=True)
    for axis, (key, title, form) in zip(axes, panels, strict=True):
        values = [row[key] for row in rows]
        _bars(axis, [row["name"] for row in rows], values, [shade(row) for row in rows], title, form)
        whiskers(axis, (runs or {}).get(key, []))
    axes[0].invert_yaxis()
    return finish(fig, source(document), path)


def _static_is_grey(row: dict) -> str:
    return "#999999" if row["options"].get("policy") == "static" else colour("stage3_batching")


def draw_claims(document: dict, path: Path | None = None) -> Figure:
    """Static against continuous: steps or seconds, and when the short requests come back."""
    by_clock = "seconds" in document["columns"]
    first = ("seconds", "seconds", "{:,.1f}") if by_clock else ("idle_slot_steps", "idle slot-steps", "{:,.0f}")
    short = ("short_returned_after_steps", "short ones back after steps", "{:,.0f}")
    return _panels(document, path, [("steps", "steps", "{:,.0f}"), first, short], _static_is_grey)


def draw_stalls(document: dict, path: Path | None = None) -> Figure:
    """The longest wait between two tokens of a running text."""
    panels = [("longest_gap_work", "longest wait, tokens of work", "{:,.0f}")]
    panels.append(("longest_gap_ms", "longest wait, ms", "{:,.0f}"))
    samples = [row["result"]["samples"] for row in document["rows"]]
    waits = [[1000 * max(r["longest_gap_seconds"] for r in one["requests"][:4]) for one in runs] for runs in samples]
    return _panels(document, path, panels, _static_is_grey, {"longest_gap_ms": waits})


def draw_throughput(document: dict, path: Path | None = None) -> Figure:
    """Tokens per second over the number of sequences at once."""
    rows = document["rows"]
    batch = [row["options"]["max_num_seqs"] for row in rows]
    fig, axis = plt.subplots(figsize=(6, 3.6))
    axis.plot(batch, [row["tokens_per_second"] for row in rows], marker="o", color=colour("stage3_batching"))
    one = rows[0]["tokens_per_second"] / batch[0]
    axis.plot(batch, [one * n for n in batch], linestyle=":", color="#999999", label="if a step took no longer")
    axis.set(xlabel="sequences at once", ylabel="new tokens per second", xlim=(0, None), ylim=(0, None))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return finish(fig, source(document), path)
