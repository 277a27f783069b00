"""Figures of prefix caching, drawn from result files alone."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .common import colour, stages
from .plots import finish, source

COLOUR = colour(stages()[-1])


def draw_claims(document: dict, path: Path | None = None) -> Figure:
    """KV memory and prefill work over the number of requests that share 40 % of their context."""
    rows = [row for row in document["rows"] if row["shared"] == 160]
    counts = [row["requests"] for row in rows]
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
    left.plot(counts, [100 * row["saved"] for row in rows], marker="o", color=COLOUR, label="counted")
    paper = [40 * (n - 1) / n for n in counts]
    left.plot(counts, paper, linestyle=":", color="#777777", label="40 % x (N - 1) / N")
    left.set(xlabel="requests with the same prefix", ylabel="KV memory saved, %", ylim=(0, 45))
    for key, look in (("prefill_tokens", dict(color="#999999", label="off")),
                      ("prefill_tokens_cached", dict(color=COLOUR, label="on"))):  # fmt: skip
        right.plot(counts, [row[key] for row in rows], marker="o", **look)
    right.set(xlabel="requests with the same prefix", ylabel="prompt tokens computed", ylim=(0, None))
    for axis in (left, right):
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    return finish(fig, source(document), path)


def draw_ttft(document: dict, path: Path | None = None) -> Figure:
    """Time to the first token over the length of the prompt, new and seen before."""
    rows = document["rows"]
    lengths = [row["length"] for row in rows]
    fig, axis = plt.subplots(figsize=(6.5, 3.6))
    axis.plot(lengths, [row["new_ms"] for row in rows], marker="o", color="#999999", label="new")
    axis.plot(lengths, [row["again_ms"] for row in rows], marker="o", color=COLOUR, label="seen before")
    axis.set(xlabel="tokens of the prompt", ylabel="time to the first token, ms", xlim=(0, None), ylim=(0, None))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return finish(fig, source(document), path)
