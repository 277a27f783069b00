"""Figures, drawn from result files alone: what is in the JSON can be drawn again."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .common import REFERENCE, colour, label


def caption(document: dict) -> str:
    """Where the numbers come from, for the foot of a figure."""
    env, job = document["environment"], document["job"]
    versions = f"torch {env['versions']['torch']}, transformers {env['versions']['transformers']}"
    return f"{job['model']}, {document['rows'][0]['dtype']}, {env['device_name']}, {versions}, {env['date'][:10]}"


def draw_compare(document: dict, path: Path) -> None:
    """Three bar charts side by side: speed, work, memory."""
    rows = document["rows"]
    panels = [
        ("tokens_per_second", "new tokens per second", 1),
        ("tokens_forwarded", "tokens through the model", 1),
        ("kv_bytes_used", "KV memory used, MB", 2**20),
    ]
    fig, axes = plt.subplots(1, len(panels), figsize=(11, 1.2 + 0.55 * len(rows)), sharey=True)
    for axis, (key, title, unit) in zip(axes, panels, strict=True):
        values = [row[key] / unit for row in rows]
        bars = axis.barh([label(row["engine"]) for row in rows], values, color=[colour(row["engine"]) for row in rows])
        axis.bar_label(
            bars, [f"{value:,.1f}" if unit > 1 or value < 1000 else f"{value:,.0f}" for value in values], padding=3
        )
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0, max(values) * 1.25 or 1)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    fig.text(0.01, 0.01, caption(document), fontsize=7, color="#555555")
    fig.tight_layout(rect=(0, 0.05, 1, 1))
    fig.savefig(path, dpi=130)
    plt.close(fig)


def draw_curve(document: dict, path: Path) -> None:
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
    fig.text(0.01, 0.01, caption(document), fontsize=7, color="#555555")
    fig.tight_layout(rect=(0, 0.03, 1, 1))
    fig.savefig(path, dpi=130)
    plt.close(fig)
