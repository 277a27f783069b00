"""Figures of a quantised KV cache: how fast attention over it is, and what it costs in quality."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .common import colour
from .plots import finish

LOOKS = {"int8": dict(color=colour("stage5_optim")), "fp8": dict(color=colour("stage5_optim"), alpha=0.5)}
IDEAL = 512 / 260  # bytes of K and V of one token and head of 128: two of 16 bits, or of 8 with a scale of 2 bytes each


def foot(document: dict) -> str:
    env, job = document["environment"], document["job"]
    what = f"{job['model']}, {env['device_name']}, torch {env['versions']['torch']}, {env['date'][:10]}"
    return f"{what}\n{env['command']}"


def draw_kv_speed(document: dict, path: Path | None = None) -> Figure:
    """Times as fast as attention over bf16, for each step and each kind of byte. Left of the line at 1 it is slower."""
    rows = document["rows"]
    fig, axis = plt.subplots(figsize=(9, 1.4 + 0.45 * len(rows)))
    for i, (name, look) in enumerate(LOOKS.items()):
        gains = [row["results"]["bf16"]["seconds"] / row["results"][name]["seconds"] for row in rows]
        places = [place + 0.38 * i for place in range(len(rows))]
        bars = axis.barh(places, gains, height=0.36, label=name, **look)
        axis.bar_label(bars, [f"{gain:.2f} x" for gain in gains], padding=3, fontsize=8)
    axis.set_yticks([place + 0.19 for place in range(len(rows))], [row["name"] for row in rows], fontsize=8)
    axis.axvline(1, color="#555555", linewidth=0.8)
    axis.axvline(IDEAL, color="#555555", linewidth=0.8, linestyle=":")
    axis.text(IDEAL, -0.6, f" bytes: {IDEAL:.2f} x", fontsize=8, va="bottom")
    axis.set(xlim=(0, 2.4), xlabel="times as fast as over bf16", ylim=(len(rows) - 0.3, -0.75))
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    return finish(fig, foot(document), path)


def draw_kv_quality(document: dict, path: Path | None = None) -> Figure:
    """Bytes of a token and change of perplexity, side by side."""
    rows = document["rows"]
    fig, axes = plt.subplots(1, 2, figsize=(9, 1.3 + 0.4 * len(rows)), sharey=True)
    panels = [
        ("bytes of K and V per token", [row["kv_bytes_per_token"] for row in rows], "{:,.0f}"),
        ("change of perplexity, %", [100 * row["perplexity_change"] for row in rows], "{:+.2f}"),
    ]
    looks = [dict(color="#999999"), *LOOKS.values()]
    for axis, (title, values, form) in zip(axes, panels, strict=True):
        for row, value, look in zip(rows, values, looks, strict=True):
            bars = axis.barh(row["name"], value, **look)
            axis.bar_label(bars, [form.format(value)], padding=3, fontsize=8)
        low = min(0.0, *values)
        axis.set_xlim(1.3 * low, 1.3 * max(values) or 1)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    return finish(fig, foot(document), path)
