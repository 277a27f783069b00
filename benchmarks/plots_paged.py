"""Figures of stage 4, drawn from result files alone."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .common import colour, stages
from .plots import _bars, finish, source

SLOTS, BLOCKS = (colour(stage) for stage in stages() if stage[5] in "34")


def _shade(row: dict) -> str:
    return colour(row["stage"])


def draw_memory(document: dict, path: Path | None = None) -> Figure:
    """KV memory over the steps: reserved as an outline, used filled in; one panel per row, one scale."""
    rows = document["rows"]
    fig, (axes,) = plt.subplots(1, len(rows), figsize=(11, 3.4), sharey=True, squeeze=False)
    for axis, row in zip(axes, rows, strict=True):
        series = row["result"]["samples"][0]["series"]
        per_token = row["result"]["samples"][0]["counters"]["kv_bytes_per_token"] / 2**30
        steps = range(len(series["kv_tokens_used"]))
        reserved, used = ([n * per_token for n in series[f"kv_tokens_{what}"]] for what in ("reserved", "used"))
        axis.fill_between(steps, used, color=_shade(row), alpha=0.7, linewidth=0, label="used")
        axis.fill_between(steps, used, reserved, color="#bbbbbb", linewidth=0, label="reserved and empty")
        axis.set_title(f"{row['name']}: {row['wasted_share']:.0%} wasted", fontsize=10)
        axis.set(xlabel="step", xlim=(0, None), ylim=(0, None))
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("KV memory, GiB")
    return finish(fig, source(document), path)


def _panels(document: dict, path: Path | None, panels: list[tuple[str, str, str]]) -> Figure:
    rows = document["rows"]
    fig, axes = plt.subplots(1, len(panels), figsize=(11, 1.2 + 0.32 * len(rows)), sharey=True)
    for axis, (key, title, form) in zip(axes, panels, strict=True):
        names, values = [row["name"] for row in rows], [row[key] for row in rows]
        _bars(axis, names, values, [_shade(row) for row in rows], title, form)
    axes[0].invert_yaxis()
    return finish(fig, source(document), path)


def draw_capacity(document: dict, path: Path | None = None) -> Figure:
    """Requests at once in the same memory, and the steps that all of them take."""
    return _panels(document, path, [("most_at_once", "requests at once", "{:,}"), ("steps", "steps for all", "{:,}")])


def draw_thrash(document: dict, path: Path | None = None) -> Figure:
    """What is done twice or moved, and what is left of the speed."""
    for row in document["rows"]:
        counters = row["result"]["samples"][0]["counters"]
        row["moved"] = counters["swapped_out_blocks"] + counters["swapped_in_blocks"]
    panels = [("preemptions", "preemptions", "{:,}"), ("recomputed_tokens", "tokens computed again", "{:,}")]
    panels.append(("moved", "blocks moved, out and in", "{:,}"))
    if "tokens_per_second" in document["columns"]:
        panels.append(("tokens_per_second", "new tokens per second", "{:,.0f}"))
    panels = [panel for panel in panels if any(row[panel[0]] for row in document["rows"])]
    return _panels(document, path, panels)


def draw_story(document: dict, path: Path | None = None) -> Figure:
    """Blocks in use over the steps, with a mark wherever somebody was preempted."""
    rows = document["rows"]
    fig, (axes,) = plt.subplots(1, len(rows), figsize=(12, 3.2), sharey=True, squeeze=False)
    for axis, row in zip(axes, rows, strict=True):
        series = row["result"]["samples"][0]["series"]
        pool = row["options"]["num_kv_blocks"]
        blocks = [tokens // row["options"]["block_size"] for tokens in series["kv_tokens_reserved"]]
        axis.plot(blocks, color=BLOCKS, linewidth=1)
        axis.axhline(pool, linestyle=":", color="#777777")
        hit = [step for step, count in enumerate(series["preempted"]) if count]
        axis.plot(hit, [pool * 1.04] * len(hit), linestyle="none", marker="v", markersize=3, color="#D55E00")
        axis.set_title(f"{row['name']}\n{row['preemptions']} preemptions", fontsize=9)
        axis.set(xlabel="step", xlim=(0, None), ylim=(0, pool * 1.12))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("blocks in use (dotted: the pool)")
    return finish(fig, source(document), path)


def draw_moves(document: dict, path: Path | None = None) -> Figure:
    """Milliseconds to take a sequence's memory away and give it back, over its length; one panel per model."""
    models = list(dict.fromkeys(row["model"] for row in document["rows"]))
    fig, axes = plt.subplots(1, len(models), figsize=(5.5 * len(models), 3.6), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        rows = [row for row in document["rows"] if row["model"] == model]
        lengths = [row["length"] for row in rows]
        swap = [row["swap_out_ms"] + row["swap_in_ms"] for row in rows]
        axis.plot(lengths, swap, marker="s", linestyle="--", color=BLOCKS, label="swap, out and back")
        axis.plot(lengths, [row["recompute_ms"] for row in rows], marker="o", color=BLOCKS, label="recompute")
        decode = [row["decode_ms"] for row in rows]
        axis.plot(lengths, decode, marker=".", linestyle=":", color="#777777", label="one decode step")
        axis.set(xlabel="tokens of the sequence", ylabel="milliseconds", title=model, xscale="log", yscale="log")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths], minor=False)
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    return finish(fig, source(document), path)
