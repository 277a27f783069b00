"""Figures of the course's notebooks: from the trace of a live run, or from a result file in benchmarks/results.

Each function returns a figure; the last line of a cell shows it. Whatever a figure says was counted or measured: its
foot says where.
"""

import json
import shlex
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from . import plots, plots_kv, plots_optim, plots_paged, plots_prefix, plots_speculative  # noqa: F401 (for the notebooks)
from .common import OUT, ROOT, colour, default_device, label
from .plots import finish, source
from .serve import drive
from .workloads import Request

LIVE = "Counted in this notebook with the model tiny: the same on every machine."
GREY, HATCH, ALARM = "#999999", "////", "#D55E00"
OWNERS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"]  # Okabe-Ito
NAIVE, CACHED, BATCHING, PAGED = "stage1_naive", "stage2_kvcache", "stage3_batching", "stage4_paged"
OPTIM = "stage5_optim"

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm would like ipywidgets; no figure needs them


# Numbers: result files, and tables.


def results(name: str, measure: bool = False) -> dict:
    """A stored result file; or, with `measure`, the same command run again on this machine (its GPU, if it has one)."""
    document = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    if not measure:
        return document
    if document["environment"]["device"] == "cuda" and default_device() != "cuda":
        raise ValueError(f"{name} was measured on {document['environment']['device_name']}; torch sees no GPU here")
    _, *arguments = shlex.split(document["environment"]["command"])
    subprocess.run([sys.executable, *arguments, "--out", str(OUT / "here")], cwd=ROOT, check=True)
    return json.loads((OUT / "here" / name.rpartition("/")[2]).read_text())


def only(document: dict, **wanted: list) -> dict:
    """The same results with fewer rows: those whose key has one of the wanted values."""
    rows = [row for row in document["rows"] if all(row[key] in values for key, values in wanted.items())]
    return document | {"rows": rows}


def where(document: dict) -> str:
    """On which device and when a result was measured, and the command that does it again."""
    env = document["environment"]
    return f"{document['job']['model']}, {env['device_name']}, {env['date'][:10]}: {env['command']}"


@dataclass(frozen=True)
class Table:
    """Rows under a header, for a notebook (Markdown) and for a terminal (text)."""

    header: list[str]
    rows: list[list]
    foot: str = ""

    def _repr_markdown_(self) -> str:
        rule = ["---" if isinstance(cell, str) else "---:" for cell in self.rows[0]]
        lines = [" | ".join(line) for line in [self.header, rule, *self._cells()]]
        return "\n".join(f"| {line} |" for line in lines) + (f"\n\n*{self.foot}*" if self.foot else "")

    def __repr__(self) -> str:
        lines = [self.header, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*text, self.foot] if self.foot else text)

    def _cells(self) -> list[list[str]]:
        return [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in self.rows]


def number(value: float) -> str:
    digits = 0 if isinstance(value, int) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def claims(*rows: list) -> Table:
    """The article's number, ours, and why they differ."""
    return Table(["claim", "the article", "here", "why"], [list(map(_as_text, row)) for row in rows])


def _as_text(cell: object) -> str:
    return cell if isinstance(cell, str) else number(cell)


def _axes(columns: int = 1, height: float = 3.2, width: float = 9, **options) -> tuple[Figure, list]:
    fig, (axes,) = plt.subplots(1, columns, figsize=(width, height), squeeze=False, **options)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return fig, list(axes)


def _legend(axis, **options) -> None:
    axis.legend(frameon=False, fontsize=8, **options)


# Stages 1 and 2: work, time and memory over the length of a text.


def work(traces: dict[str, list]) -> Figure:
    """What went through the model, step by step, added up. traces: stage -> the trace of one request."""
    fig, (left, right) = _axes(2)
    for stage, trace in traces.items():
        tokens = list(accumulate(sum(record.tokens.values()) for record in trace))
        pairs = list(accumulate(record.attention_pairs for record in trace))
        for axis, values in ((left, tokens), (right, pairs)):
            axis.plot(range(1, len(values) + 1), values, color=colour(stage), label=label(stage))
            axis.annotate(f"{values[-1]:,}", (len(values), values[-1]), xytext=(3, 3), textcoords="offset points",
                          ha="right", va="bottom", fontsize=8, color=colour(stage))  # fmt: skip
    left.set(xlabel="new tokens", ylabel="tokens through the model, in all")
    right.set(xlabel="new tokens", ylabel="pairs in attention, in all")
    for axis in (left, right):
        axis.ticklabel_format(style="plain", axis="y")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
        _legend(axis, loc="upper left")
    return finish(fig, LIVE)


def curve(document: dict, *engines: str) -> Figure:
    """Milliseconds per token over its position, with their range, and the sum of them."""
    return plots.draw_curve(only(document, engine=engines) if engines else document)


def seconds_per_step(traces: dict[str, list], foot: str) -> Figure:
    """Milliseconds of each step over the length of the sequence, as this machine had them."""
    fig, (axis,) = _axes(1, width=6)
    for stage, trace in traces.items():
        times = [1000 * record.seconds["forward"] for record in trace]
        axis.plot(range(1, len(times) + 1), times, ".", markersize=3, color=colour(stage), label=label(stage))
    axis.set(xlabel="new tokens so far", ylabel="milliseconds for one more", ylim=(0, None))
    _legend(axis, loc="upper left")
    return finish(fig, foot)


def distributions(tokens: list[str], panels: dict[str, list[float]], foot: str, most: int = 8) -> Figure:
    """The next token's probabilities, the likeliest first, under several settings; all behind the first as one bar."""
    fig, axes = _axes(len(panels), height=3.2, width=11, sharey=True)
    names = [repr(token) for token in tokens[:most]] + ["all others"]
    for axis, (title, probs) in zip(axes, panels.items(), strict=True):
        bars = axis.barh(names, [*probs[:most], sum(probs[most:])], color=[colour(NAIVE)] * most + [GREY])
        axis.bar_label(bars, fmt=lambda p: f"{p:.0%}" if p >= 0.005 else "", fontsize=8, padding=2)
        axis.set(xlabel="probability", xlim=(0, 1.2))
        axis.set_title(f"{title}\n{sum(p > 0 for p in probs):,} tokens possible", fontsize=9)
    axes[0].invert_yaxis()
    return finish(fig, foot)


def repeated_share(text: str, size: int = 3) -> float:
    """Of the runs of `size` words in a text, the share that stood in it before."""
    words = text.lower().split()
    runs = list(zip(*(words[i:] for i in range(size)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def repetition(document: dict) -> Figure:
    """How much each text of the gallery repeats itself, and how long it is. One engine, one model: only parameters."""
    rows = document["rows"]
    fig, (left, right) = _axes(2, height=0.9 + 0.24 * len(rows), sharey=True)
    names = [row["name"] for row in rows]
    shares = [repeated_share(row["text"]) for row in rows]
    bars = left.barh(names, shares, color=colour(NAIVE))
    left.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=8, padding=2)
    words = [len(row["text"].split()) for row in rows]
    right.bar_label(right.barh(names, words, color=GREY), fontsize=8, padding=2)
    left.set(xlabel="runs of three words that stood there before", xlim=(0, max(shares) * 1.2))
    left.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set(xlabel="words in the text", xlim=(0, max(words) * 1.15))
    left.tick_params(axis="y", labelsize=8)
    left.invert_yaxis()
    return finish(fig, where(document))


def kv_budget(bytes_per_token: dict[str, int], tokens: int, weights_gb: float, card_gb: float) -> Figure:
    """Memory over the number of sequences: weights are a constant, the cache grows, and the card has an end."""
    fig, (axis,) = _axes(1, height=3.6, width=7)
    counts = range(0, 73)
    axis.axhspan(0, weights_gb, color="#dddddd", linewidth=0)
    axis.text(71, weights_gb / 2, f"weights, {weights_gb:g} GB", ha="right", va="center", fontsize=9)
    axis.axhline(card_gb, color="#000000", linestyle="--", linewidth=1)
    axis.text(71, card_gb + 0.4, f"the card, {card_gb:g} GB", ha="right", va="bottom", fontsize=9)
    for (name, per_token), style in zip(bytes_per_token.items(), ("-", ":", "-."), strict=False):
        gigabytes = [weights_gb + n * per_token * tokens / 2**30 for n in counts]
        axis.plot(counts, gigabytes, style, color=colour(CACHED), label=f"{name}: {per_token // 1024} KB per token")
        fits = int((card_gb - weights_gb) * 2**30 // (per_token * tokens))
        axis.plot([fits], [weights_gb + fits * per_token * tokens / 2**30], "o", color=colour(CACHED))
        axis.annotate(f"{fits} fit", (fits, card_gb), xytext=(4, -13), textcoords="offset points", fontsize=9)
    axis.set(xlabel=f"sequences of {tokens:,} tokens at once", ylabel="GB", xlim=(0, 72), ylim=(0, 2 * card_gb))
    _legend(axis, loc="upper left")
    return finish(fig, "Computed, not measured: 2 x layers x KV heads x head dim x bytes of a number, for each token.")


def memory(rows: dict[str, tuple[float, float]], unit: str, foot: str = LIVE) -> Figure:
    """Reserved memory as a bar, what is used of it filled in. rows: name -> (reserved, used)."""
    fig, (axis,) = _axes(1, height=1.1 + 0.42 * len(rows))
    most = max(reserved for reserved, _ in rows.values())
    for name, (reserved, used) in rows.items():
        axis.barh(name, used, color=_of_stage(name))
        axis.barh(name, reserved - used, left=used, color="#eeeeee", edgecolor=GREY, hatch=HATCH, linewidth=0.5)
        text = f"{number(used)} of {number(reserved)} used: {1 - used / reserved:.1%} wasted"
        axis.text(reserved + most / 80, name, text, va="center", fontsize=8)
    axis.set(xlabel=unit, xlim=(0, most * 1.55))
    axis.invert_yaxis()
    return finish(fig, foot)


def _of_stage(name: str) -> str:
    """Slots are stage 3, blocks stage 4; one cache for all is stage 2."""
    return colour(BATCHING if "slot" in name else PAGED if "block" in name else CACHED)


# Stage 3: who runs when, and what everybody sees of it.


def slots_over_time(trace: list, num_slots: int) -> list[list[tuple[str, int]]]:
    """For each slot, step by step: (request that holds it, tokens it computed); ("", 0) where nobody holds it."""
    rows, holder = [[] for _ in range(num_slots)], [""] * num_slots
    for record in trace:
        for request in record.tokens:
            if request not in holder:
                holder[holder.index("")] = request
        for slot, request in enumerate(holder):
            rows[slot].append((request, record.tokens.get(request, 0)))
        holder = ["" if request in record.finished else request for request in holder]
    return rows


def gantt(traces: dict[str, list], num_slots: int, letters: bool = False) -> Figure:
    """Slots over steps: dark is a prompt, light a token of a text, hatched a slot that computes nothing.

    Hatched with strokes: somebody holds it; with dots: it is free.
    """
    height = 0.9 + len(traces) * (0.5 + 0.24 * num_slots)
    fig, axes = plt.subplots(len(traces), 1, figsize=(9, height), sharex=True, squeeze=False)
    for axis, (title, trace) in zip(axes[:, 0], traces.items(), strict=True):
        for slot, cells in enumerate(slots_over_time(trace, num_slots)):
            for start, end, (request, kind) in _segments([(who, _kind(who, tokens)) for who, tokens in cells]):
                _bar(axis, start, end, slot, request, kind)
                if letters and kind in ("prompt", "text"):
                    axis.text(
                        (start + end) / 2, slot, "ABCDEFGH"[int(request) % 8], ha="center", va="center", fontsize=9
                    )
        idle = sum(record.idle_slots for record in trace)
        axis.set_title(f"{title}: {len(trace):,} steps, {idle:,} idle slot-steps", fontsize=10, loc="left")
        axis.set(ylim=(num_slots - 0.5, -0.5), ylabel="slot", xlim=(0, max(map(len, traces.values()))))
        axis.set_yticks(range(num_slots), range(num_slots), fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("step")
    _gantt_legend(axes[0, 0])
    return finish(fig, LIVE)


def _kind(request: str, tokens: int) -> str:
    if tokens == 0:
        return "held" if request else "free"
    return "text" if tokens == 1 else "prompt"


def _segments(cells: list) -> list[tuple[int, int, tuple[str, str]]]:
    """Runs of equal cells as (start, end, cell)."""
    starts = [i for i, cell in enumerate(cells) if i == 0 or cell != cells[i - 1]]
    return [(a, b, cells[a]) for a, b in pairwise([*starts, len(cells)])]


IDLE = {"held": dict(facecolor="white", edgecolor="#777777", hatch="////", linewidth=0.4)}
IDLE["free"] = dict(facecolor="white", edgecolor="#cccccc", hatch="...", linewidth=0.4)


def _bar(axis, start: int, end: int, slot: int, request: str, kind: str) -> None:
    busy = dict(color=OWNERS[int(request or 0) % 6], alpha=1.0 if kind == "prompt" else 0.55, edgecolor="white")
    axis.barh(slot, end - start, left=start, height=0.86, **IDLE.get(kind, busy | {"linewidth": 0.3}))


def _gantt_legend(axis) -> None:
    handles = [
        Patch(facecolor=OWNERS[0], label="prompt"),
        Patch(facecolor=OWNERS[0], alpha=0.55, label="one token of a text"),
        Patch(**IDLE["held"], label="idle, but held"),
        Patch(**IDLE["free"], label="free"),
    ]
    axis.legend(handles=handles, frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1.01, 0.98))


@dataclass(frozen=True)
class Seen:
    """What one request saw: steps until its first token, and what stood between its tokens."""

    first_token_steps: int
    returned_steps: int
    gap_steps: list[int]
    gap_work: list[int]  # tokens that went through the model for anybody
    token_work: list[int]  # work done by all when each token came


def what_they_saw(trace: list, arrived: dict[str, int], num_tokens: dict[str, int]) -> dict[str, Seen]:
    """From a trace alone. arrived: request -> the step before which it came; num_tokens: the length of its output."""
    done = list(accumulate(sum(record.tokens.values()) for record in trace))
    seen = {}
    for request, start in arrived.items():
        steps = [i for i, record in enumerate(trace) if request in record.tokens][-num_tokens[request] :]
        (returned,) = [i for i, record in enumerate(trace) if request in record.finished]
        gaps = list(pairwise(steps))
        seen[request] = Seen(
            steps[0] - start + 1, returned - start + 1, [b - a for a, b in gaps], [done[b] - done[a] for a, b in gaps],
            [done[step] for step in steps],
        )  # fmt: skip
    return seen


def serve(llm, params: type, requests: list[Request]) -> tuple[list, dict[str, Seen]]:
    """Hand in each request before the step of its arrival, run until all have left: the trace, and what each one saw.

    The clock is the engine's own count of steps; while nobody is there it stands still, and the next request comes.
    """
    sampling = [params(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests]
    seen = drive(llm, sampling, requests, clock="steps", tell=lambda event: None)["requests"]
    arrived = {str(i): request["arrived"] for i, request in enumerate(seen)}
    lengths = {str(i): request["tokens"] for i, request in enumerate(seen)}
    return llm.metrics.trace, what_they_saw(llm.metrics.trace, arrived, lengths)


def streams(runs: dict[str, Seen]) -> Figure:
    """The tokens of one text as they come, over the work that all requests together have done by then."""
    fig, (left, right) = _axes(2, height=3.4)
    styles = [(GREY, "--"), (OWNERS[1], ":"), (OWNERS[0], "-."), (colour(BATCHING), "-")]
    styles = styles[: len(runs) - 1] + styles[-1:]
    for (name, seen), (shade, style) in zip(runs.items(), styles, strict=False):
        left.step(seen.token_work, range(1, len(seen.token_work) + 1), style, where="post", color=shade, label=name)
        right.plot(range(2, len(seen.gap_work) + 2), seen.gap_work, style, color=shade, label=name, linewidth=1)
    left.set(xlabel="work so far, tokens through the model", ylabel="tokens of this text", ylim=(0, None))
    right.set(xlabel="token of this text", ylabel="work since the token before", ylim=(0, None))
    _legend(right, loc="upper right")
    right.set_ylim(0, right.get_ylim()[1] * 1.1)
    return finish(fig, LIVE)


def cdf(panels: dict[str, dict[str, list]], foot: str = LIVE) -> Figure:
    """For each value the share of all that is no larger. panels: what is on the axis -> name -> values."""
    fig, axes = _axes(len(panels), height=3.4, sharey=True)
    styles = [(GREY, "--"), (OWNERS[0], "-."), (colour(BATCHING), "-")]
    for axis, (unit, series) in zip(axes, panels.items(), strict=True):
        for (name, values), (shade, style) in zip(series.items(), styles, strict=False):
            ordered = sorted(values)
            shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
            axis.step([ordered[0], *ordered], [0, *shares], style, where="post", color=shade, label=name)
        axis.set(xlabel=unit, ylim=(0, 1.02))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0].set_ylabel("share of all")
    _legend(axes[-1], loc="lower right")
    return finish(fig, foot)


def throughput(document: dict, roof: dict[int, float] | None = None) -> Figure:
    """Tokens per second, and milliseconds per step, over the batch. roof: batch -> tokens a second, at the most."""
    rows, shade = document["rows"], colour(BATCHING)
    batch = [row["options"]["max_num_seqs"] for row in rows]
    seconds = [[sample["seconds"] for sample in row["result"]["samples"]] for row in rows]
    tokens, steps = [row["tokens"] for row in rows], [row["steps"] for row in rows]
    fig, (left, right) = _axes(2, height=3.4)
    for axis, amounts in ((left, [(n, 1) for n in tokens]), (right, [(n, -1000) for n in steps])):
        spread = [sorted(n / t if way > 0 else -way * t / n for t in times)
                  for (n, way), times in zip(amounts, seconds, strict=True)]  # fmt: skip
        middle = [values[len(values) // 2] for values in spread]
        below = [m - values[0] for m, values in zip(middle, spread, strict=True)]
        above = [values[-1] - m for m, values in zip(middle, spread, strict=True)]
        axis.errorbar(batch, middle, [below, above], marker="o", color=shade, capsize=3, label="measured")
        axis.set_xscale("log", base=2)
        axis.set_xticks(batch, batch)
    if roof:
        left.plot(
            list(roof), list(roof.values()), "--", color="#000000", label="roof: the slower of reading and computing"
        )
    else:
        one = tokens[0] / min(seconds[0]) / batch[0]
        left.plot(batch, [one * n for n in batch], ":", color=GREY, label="if a step took no longer")
    left.set(xlabel="sequences at once", ylabel="new tokens per second")
    left.set_yscale("log", base=10 if roof else 2)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    left.minorticks_off()
    right.set(xlabel="sequences at once", ylabel="milliseconds per step", ylim=(0, None))
    right.set_ylim(0, right.get_ylim()[1] * 1.15)
    _legend(left)
    return finish(fig, source(document))


# Stage 4: blocks.


def pool_map(trace: list, num_blocks: int, block_size: int) -> Figure:
    """Each block over the steps: its colour is its owner, a number says how many own it, pale means not yet full."""
    fig, (axis,) = _axes(1, height=1.6 + 0.15 * num_blocks)
    owners: dict[str, str] = {}
    cells = {block: [] for block in range(num_blocks)}
    for record in trace:
        held = record.pool_map(block_size)
        for block in range(num_blocks):
            who, filled = held.get(block, ([], 0))
            cells[block].append((tuple(who), filled == block_size))
    for block, over_time in cells.items():
        for start, end, (who, full) in _segments(over_time):
            if who:
                shade = owners.setdefault(who[0], OWNERS[len(owners) % len(OWNERS)])
                hatch = "xxx" if len(who) > 1 else None
                axis.barh(block, end - start, left=start, height=0.9, color=shade, alpha=0.95 if full else 0.45,
                          hatch=hatch, edgecolor="white", linewidth=0.3)  # fmt: skip
                if len(who) > 1:
                    axis.text((start + end) / 2, block, len(who), ha="center", va="center", fontsize=8,
                              bbox=dict(boxstyle="round,pad=0.1", facecolor="white", linewidth=0))  # fmt: skip
    axis.set(xlabel="step", ylabel="block", xlim=(0, len(trace)), ylim=(num_blocks - 0.4, -0.6))
    axis.set_yticks(range(0, num_blocks, 2))
    for step in (i for i, record in enumerate(trace) if record.preempted):
        axis.axvline(step, color="#000000", linestyle=":", linewidth=1)
        axis.text(step, -0.7, " a preemption", fontsize=8, va="bottom", ha="left")
    names = {name: "request " + name.replace("/", ", sample ") for name in sorted(owners)}
    handles = [Patch(color=owners[name], label=text) for name, text in names.items()]
    handles.append(Patch(facecolor=GREY, hatch="xxx", edgecolor="white", label="shared: ref count"))
    handles.append(Patch(color=GREY, alpha=0.45, label="not full yet"))
    axis.legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return finish(fig, LIVE)


def strips(maps: dict[str, str]) -> Figure:
    """Memory as a strip, one cell per character: a colour for each owner, white and hatched where it is free."""
    fig, axes = plt.subplots(len(maps), 1, figsize=(9, 0.6 + 0.85 * len(maps)), squeeze=False)
    for axis, (title, cells) in zip(axes[:, 0], maps.items(), strict=True):
        for start, end, who in _segments(list(cells)):
            look = dict(color=OWNERS[ord(who) % 6], alpha=0.7, edgecolor="white")
            free = dict(color="white", edgecolor=GREY, hatch=HATCH, linewidth=0.4)
            axis.barh(0, end - start, left=start, **(free if who == "." else look))
        axis.set(xlim=(0, len(cells)), ylim=(-0.4, 0.4), yticks=[], xticks=[])
        axis.set_title(title, fontsize=9, loc="left")
        axis.spines[:].set_visible(False)
    return finish(fig, "Simulated without a model: the block manager of stage 4, and memory in contiguous pieces.")


def watermark(document: dict) -> Figure:
    """What a reserve for those who run gains and what it costs: preemptions and work done twice, against steps."""
    rows = [row for row in document["rows"] if row["name"].startswith("recompute, watermark")]
    marks = [row["options"]["watermark"] for row in rows]
    fig, axes = _axes(3, height=3, width=10)
    panels = {"preemptions": "preemptions", "recomputed_tokens": "tokens computed again", "steps": "steps for all"}
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        axis.plot(marks, [row[key] for row in rows], "o-", color=colour(PAGED))
        axis.set(xlabel="watermark, share of the pool", ylabel=title, ylim=(0, None))
        axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return finish(fig, source(document))


def who_holds(log: list, num_blocks: int, big: int, last_step: int) -> Figure:
    """The allocation log as a picture: blocks held by requests that took `big` at once or more, and by all others."""
    documents = {line.seq_id for line in log if line.blocks >= big}
    held, series, at = Counter(), {True: [], False: []}, iter([*log, None])
    line = next(at)
    for step in range(1, last_step + 1):
        while line is not None and line.step <= step:
            held[line.seq_id in documents] += line.blocks
            line = next(at)
        for kind, values in series.items():
            values.append(held[kind])
    fig, (axis,) = _axes(1)
    steps = range(1, last_step + 1)
    stack = axis.stackplot(steps, series[False], series[True], colors=[colour(PAGED), ALARM], alpha=0.8, linewidth=0)
    axis.axhline(num_blocks, color="#000000", linestyle="--", linewidth=1)
    hit = [line.step for line in log if line.why == "preempted"]
    (marks,) = axis.plot(hit, [num_blocks * 1.05] * len(hit), "v", markersize=4, color="#000000")
    names = ["small requests", f"{len(documents)} documents, {big} blocks or more at once", "a preemption"]
    axis.legend([*stack, marks], names, frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))
    axis.set(xlabel="call of the scheduler", ylabel="blocks held", xlim=(0, last_step), ylim=(0, num_blocks * 1.12))
    return finish(fig, LIVE)


# Stage 5, and all stages together.


def launches(document: dict) -> Figure:
    """A decode step of each row: how many kernels and launches it takes, and how much of its time the GPU works."""
    batches = list(document["rows"][0]["batches"])
    fig, axes = plt.subplots(len(batches), 2, figsize=(9, 0.8 + 1.5 * len(batches)), sharey=True, squeeze=False)
    for (left, right), batch in zip(axes, batches, strict=True):
        for row in document["rows"]:
            _launches_and_time(left, right, row["name"], row["batches"][batch])
        left.set_title(f"batch {batch}: kernels (grey), launches (colour)", fontsize=9)
        right.set_title(f"batch {batch}: ms per step, GPU busy (colour)", fontsize=9)
        left.set_xlim(0, left.get_xlim()[1] * 1.8)
        right.set_xlim(0, right.get_xlim()[1] * 1.5)
        for axis in (left, right):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].invert_yaxis()
    return finish(fig, source(document))


def _launches_and_time(left, right, name: str, step: dict) -> None:
    kernels, calls, wall = step["kernels"], step["launches"], step["wall_ms"]
    left.barh(name, kernels, color="#dddddd")
    left.barh(name, calls, height=0.4, color=colour(OPTIM))
    right.barh(name, wall, color="white", edgecolor=GREY, hatch=HATCH, linewidth=0.5)
    right.barh(name, step["busy_ms"], color=colour(OPTIM))
    words = f"{kernels:,.0f} kernels, {calls:,.0f} {'launch' if calls == 1 else 'launches'}"
    for axis, end, text in ((left, kernels, words), (right, wall, f"{wall:.2f} ms, busy {step['busy_share']:.0%}")):
        axis.annotate(text, (end, name), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def tokens_over_steps(traces: dict[str, list], foot: str) -> Figure:
    """How many tokens a text has after each step: without drafts one more in each."""
    fig, (axis,) = _axes(1, width=6)
    styles = [(GREY, "--"), (colour(OPTIM), "-"), (OWNERS[0], "-.")]
    for (name, trace), (shade, style) in zip(traces.items(), styles, strict=False):
        made = list(accumulate(1 + record.accepted_tokens for record in trace))
        axis.step(range(1, len(made) + 1), made, style, where="post", color=shade, label=f"{name}: {len(made)} steps")
    axis.set(xlabel="steps of the target model", ylabel="tokens of the text", xlim=(0, None), ylim=(0, None))
    _legend(axis, loc="lower right")
    return finish(fig, foot)


def counters(rows: dict[str, dict[str, float]]) -> Figure:
    """One panel per counter, one bar per stage. rows: stage -> counter -> value."""
    names = list(next(iter(rows.values())))
    fig, axes = _axes(len(names), height=0.9 + 0.34 * len(rows), width=11, sharey=True)
    for axis, name in zip(axes, names, strict=True):
        values = [row[name] for row in rows.values()]
        bars = axis.barh([label(stage) for stage in rows], values, color=[colour(stage) for stage in rows])
        axis.bar_label(bars, [number(value) for value in values], padding=3, fontsize=8)
        axis.set_title(name, fontsize=9)
        axis.set(xlim=(0, max(values) * 1.4 or 1), xticks=[])
    axes[0].invert_yaxis()
    return finish(fig, LIVE)
