"""Figures of stage 5's optimisations, drawn from result files alone.

python -m benchmarks.plots_optim out/h200/optim-ablation.json     # draw a figure again, or that of a run cut short
"""

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .common import ROOT, colour, stages
from .optim_tables import speed_ratio
from .plots import finish, source

LESSON = "figures"

PAGED, OPTIM = (colour(stage) for stage in stages() if stage[5] in "45")
RESULTS = ROOT / "benchmarks" / "results"
GREY, SLOWER = "#999999", "#D55E00"
WORKLOADS = {"one": "one request", "many": "256 requests"}


def _bars(axis, rows: list[dict], workload: str, key: str, form: str, colours: list[str]) -> None:
    """One bar per row: the median, a whisker from the least to the most, and the speed in units of the first row's."""
    values = [row[workload][key] for row in rows]
    ranges = [row[workload][f"{key}_range"] for row in rows]
    reach = [[v - low for v, (low, _) in zip(values, ranges, strict=True)]]
    reach.append([high - v for v, (_, high) in zip(values, ranges, strict=True)])
    axis.barh([row["name"] for row in rows], values, color=colours, xerr=reach, ecolor="#555555", capsize=2)
    most = max(high for _, high in ranges)
    for i, (row, value, (_, high)) in enumerate(zip(rows, values, ranges, strict=True)):
        ratio = speed_ratio(row[workload], rows[0][workload], key)
        axis.text(high + 0.03 * most, i, f"{form.format(value)}  ({ratio:.2f} x)", va="center", fontsize=8)
    axis.set_xlim(0, most * 1.45)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _of_workloads(
    document: dict, path: Path | None, units: dict[str, tuple[str, str, str]], colours: list[str]
) -> Figure:
    """units: workload -> (key, what it is, number format)."""
    rows = document["rows"]
    names = [name for name in WORKLOADS if all(name in row for row in rows)]
    fig, (axes,) = plt.subplots(
        1, len(names), figsize=(1 + 5 * len(names), 1.3 + 0.36 * len(rows)), sharey=True, squeeze=False
    )
    for axis, name in zip(axes, names, strict=True):
        key, title, form = units[name]
        _bars(axis, rows, name, key, form, colours)
        who = WORKLOADS[name].replace("256", str(document["job"]["requests"]))
        axis.set_title(f"{who}: {title}\n(in brackets: speed, {rows[0]['name']} = 1)", fontsize=9)
    axes[0].invert_yaxis()
    return finish(fig, source(document), path)


def draw_speed(document: dict, path: Path | None = None) -> Figure:
    """Tokens per second of each stage, alone and with many requests."""
    unit = ("tokens_per_second", "new tokens per second", "{:,.0f}")
    colours = [colour(row["stage"]) for row in document["rows"]]
    return _of_workloads(document, path, {"one": unit, "many": unit}, colours)


def draw_ablation(document: dict, path: Path | None = None) -> Figure:
    """What is lost without each thing, and gained with one more: time of a token alone, tokens per second of many. Grey
    is a row in which something is off."""
    units = {
        "one": ("ms_per_step", "ms per token", "{:.2f}"),
        "many": ("tokens_per_second", "new tokens per second", "{:,.0f}"),
    }
    colours = [OPTIM if all(row["features"].values()) else GREY for row in document["rows"]]
    return _of_workloads(document, path, units, colours)


def draw_waterfall(document: dict, path: Path | None = None) -> Figure:
    """What each thing takes off a decode step, from stage 4 to stage 5; one panel per size of the batch."""
    batches = list(document["rows"][0]["batches"])
    height = 1.5 + 0.36 * (len(document["rows"]) + 1)
    fig, (axes,) = plt.subplots(1, len(batches), figsize=(1 + 5 * len(batches), height), sharey=True, squeeze=False)
    for axis, batch in zip(axes, batches, strict=True):
        _waterfall(axis, document["rows"], batch)
        plural = "s decode" if batch != "1" else " decodes"
        axis.set_title(f"{batch} request{plural}: ms per step", fontsize=10)
    axes[0].invert_yaxis()
    return finish(fig, source(document), path)


def _waterfall(axis, rows: list[dict], batch: str) -> None:
    """The first row in full, of the others what they take off or add, at last what is left."""
    steps = [row["batches"][batch]["ms_per_step"] for row in rows]
    names = [row["name"] for row in rows]
    most = max(steps)

    def label(y: int, right: float, text: str, bold: bool = False) -> None:
        axis.text(right + 0.02 * most, y, text, va="center", fontsize=8, fontweight="bold" if bold else None)

    axis.barh(names[0], steps[0], color=colour(rows[0]["stage"]))
    label(0, steps[0], f"{steps[0]:.2f}", bold=True)
    for i, (before, after) in enumerate(pairwise(steps), start=1):
        slower = after > before
        look = dict(color=SLOWER, hatch="///", edgecolor="white") if slower else dict(color=OPTIM, alpha=0.6)
        axis.barh(names[i], abs(after - before), left=min(before, after), **look)
        axis.plot([before, before], [i - 1.4, i + 0.4], color="#555555", linewidth=0.8)
        label(i, max(before, after), f"{after - before:+.2f}  ({before / after:.2f} x)")
    axis.plot([steps[-1]] * 2, [len(steps) - 1.4, len(steps) + 0.4], color="#555555", linewidth=0.8)
    axis.barh("left", steps[-1], color=colour(rows[-1]["stage"]))
    label(len(steps), steps[-1], f"{steps[-1]:.2f}  ({steps[0] / steps[-1]:.2f} x in all)", bold=True)
    axis.set_xlim(0, most * 1.4)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def draw_parallel(document: dict, path: Path | None = None) -> Figure:
    """Milliseconds of a decode step with one process and with two; one panel per size of the batch."""
    rows, batches = document["rows"], list(document["rows"][0]["batches"])
    size = (1 + 5 * len(batches), 1.3 + 0.4 * len(rows))
    fig, (axes,) = plt.subplots(1, len(batches), figsize=size, sharey=True, squeeze=False)
    for axis, batch in zip(axes, batches, strict=True):
        steps = [row["batches"][batch]["ms_per_step"] for row in rows]
        axis.barh([row["name"] for row in rows], steps, color=[GREY, *[OPTIM] * (len(rows) - 1)])
        for i, step in enumerate(steps):
            axis.text(step + 0.02 * max(steps), i, f"{step:.2f}  ({steps[0] / step:.2f} x)", va="center", fontsize=8)
        axis.set_xlim(0, max(steps) * 1.35)
        axis.set_title(f"{batch} request{'s decode' if batch != '1' else ' decodes'}: ms per step", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    return finish(fig, source(document), path)


def draw_peers(document: dict, path: Path | None = None) -> Figure:
    """Other engines beside ours, whose numbers come from the files of `speed` for an H200."""
    files = ("optim-speed.json", "optim-speed-8b.json")
    small, large = (json.loads((RESULTS / "h200" / name).read_text()) for name in files)
    (row,), (row_8b,) = ([r for r in d["rows"] if r["stage"] == "stage5_optim"] for d in (small, large))
    ours = {name: row[name]["tokens_per_second"] for name in ("many", "one")}
    ours["one_8b"] = row_8b["one"]["tokens_per_second"]
    rows = [*document["rows"], {"name": "stage 5", **ours}]
    fig, axes = plt.subplots(1, 3, figsize=(12, 2.6), sharey=True)
    for axis, (key, title) in zip(axes, document["columns"].items(), strict=True):
        values = [row[key] for row in rows]
        axis.barh([row["name"] for row in rows], values, color=[*[GREY] * (len(rows) - 1), OPTIM])
        for i, value in enumerate(values):
            axis.text(value + 0.02 * max(values), i, f"{value:,.0f}", va="center", fontsize=8)
        axis.set_xlim(0, max(values) * 1.2)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    return finish(fig, f"{source(small)}\n{large['environment']['command']}", path)


DRAW = {"peers": draw_peers, "speed": draw_speed, "ablation": draw_ablation, "waterfall": draw_waterfall}
DRAW["parallel"] = draw_parallel


def main(argv: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(prog="python -m benchmarks.plots_optim", description=__doc__.partition("\n")[0])
    cli.add_argument("paths", nargs="+", type=Path, metavar="FILE.json", help="result files; FILE.png is drawn anew")
    for path in cli.parse_args(argv).paths:
        document = json.loads(path.read_text())
        DRAW[document["job"]["what"]](document, path.with_suffix(".png"))
        print(f"Drawn: {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
