"""The result file of benchmarks.optim, which grows row by row: a run that is cut short keeps what it has."""

import json
from pathlib import Path

from . import gates
from .common import write_json
from .optim_engine import summary
from .optim_tables import columns_and_cells


def kept_rows(path: Path, document: dict, wanted: bool) -> list[dict]:
    """Rows that the file holds already, if they are to be kept and were measured alike."""
    if not wanted or not path.exists():
        return []
    old = json.loads(path.read_text())
    same = old["job"] == document["job"] and old["environment"]["device_name"] == document["environment"]["device_name"]
    if not same:
        raise SystemExit(f"--keep: {path} was measured with another job or on another device")
    return old["rows"]


def joined(rows: list[dict], new: dict) -> dict:
    """A row of a later round, with the samples of the rounds before."""
    old = next((r for r in rows if r["name"] == new["name"]), None)
    if old is None or "error" in new:
        return new
    both = {name: both_runs(old[name], new[name]) for name in ("one", "many") if name in new}
    if "batches" in new:
        both["batches"] = {n: both_runs(old["batches"][n], run) for n, run in new["batches"].items()}
    return new | both


def both_runs(old: dict, new: dict) -> dict:
    """Medians over the samples of both; of a profile, which has none, the later."""
    if "samples" not in new:
        return new
    samples = old["samples"] + new["samples"]
    return summary(samples) | {"samples": samples}


def judged(document: dict) -> list[dict]:
    """The rows, with what is suspect about them."""
    rows, found = document["rows"], []
    for r in rows:
        runs = [r[name] for name in ("one", "many") if name in r] + list(r.get("batches", {}).values())
        seconds = [[sample["seconds"] for sample in run["samples"]] for run in runs if "samples" in run]
        found.append([reason for some in gates.wide_spread(seconds) for reason in some])
    return gates.mark(rows, found, gates.slower_stage5(rows, document["environment"]["device"]))


def save(path: Path, document: dict, new: dict, order: list[str]) -> None:
    """Put a row in its place (or among the failed) and write the file."""
    rows = [r for r in document["rows"] if r["name"] != new["name"]]
    if "error" in new:
        document["failed"].append(new)
    else:
        document["rows"] = sorted([*rows, new], key=lambda r: order.index(r["name"]))
    document["rows"] = judged(document)
    document["columns"], document["cells"] = columns_and_cells(document)
    write_json(path, document)
