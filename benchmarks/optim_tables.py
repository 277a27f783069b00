"""Tables of benchmarks.optim: one line per row of a result file, for the screen and for a README."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from . import gates

Columns = list[tuple[str, Callable[[dict], str]]]

SWITCHES = {  # what it is -> its name in the engine's features, and the options that can switch it off
    "fused kernels": ("fused_kernels", {"fused_kernels"}),
    "CUDA graphs": ("cuda_graphs", {"enforce_eager"}),
    "async scheduling": ("async_scheduling", {"async_scheduling", "speculative"}),
}


def number(value: float | None, form: str = "{:,.1f}") -> str:
    return "-" if value is None else form.format(value)


def spread(found: dict, key: str, form: str) -> str:
    """The median, and behind it the range of several runs."""
    low, high = (number(value, form) for value in found[f"{key}_range"])
    return number(found[key], form) + (f" ({low}–{high})" if len(found["samples"]) > 1 else "")


def beside_kv(row: dict) -> float | None:
    """MB of GPU memory at the peak, without the pool of the KV cache."""
    return None if row["peak_bytes"] is None else (row["peak_bytes"] - row["kv_pool_bytes"]) / 2**20


def replays(row: dict) -> str:
    """Steps of a run that replayed a CUDA graph: whether graphs were on at all."""
    counters = row.get("many", row.get("one"))["samples"][0]["counters"]
    return number(counters.get("graph_replays"), "{:,}")


def columns_of_workloads(rows: list[dict], what: str) -> Columns:
    """speed: medians with their ranges. ablation: medians, and the speed in units of the first row's."""
    columns: Columns = []
    if all("one" in row for row in rows):
        columns += {
            "speed": [
                ("one: tokens/s", lambda r: spread(r["one"], "tokens_per_second", "{:,.0f}")),
                ("decoding only", lambda r: number(r["one"].get("decode_tokens_per_second"), "{:,.0f}")),
            ],
            "ablation": [("one: ms per token", lambda r: number(r["one"]["ms_per_step"], "{:.2f}"))],
        }[what]
        columns += [("TTFT, ms", lambda r: number(r["one"].get("ttft_ms")))]
        columns.append(ratio_column(rows, "one", "tokens_per_second" if what == "speed" else "ms_per_step"))
    if all("many" in row for row in rows):
        columns += {
            "speed": [
                ("many: tokens/s", lambda r: spread(r["many"], "tokens_per_second", "{:,.0f}")),
                ("seconds", lambda r: number(r["many"]["seconds"], "{:.2f}")),
            ],
            "ablation": [("many: tokens/s", lambda r: number(r["many"]["tokens_per_second"], "{:,.0f}"))],
        }[what]
        columns.append(ratio_column(rows, "many", "tokens_per_second"))
    memory = [("MB beside KV", lambda r: number(beside_kv(r), "{:,.0f}"))] if beside_kv(rows[0]) is not None else []
    return [*columns, ("graph replays", replays), ("start-up, s", lambda r: number(r["startup_seconds"])), *memory]


def ratio_column(rows: list[dict], workload: str, key: str) -> tuple[str, Callable[[dict], str]]:
    first = rows[0][workload]
    return f"to {rows[0]['name']}", lambda r: f"{speed_ratio(r[workload], first, key):.2f} x"


def speed_ratio(found: dict, first: dict, key: str) -> float:
    """How many times faster than `first`. key: a speed, or a time in ms."""
    return first[key] / found[key] if key.startswith("ms") else found[key] / first[key]


def columns_of_batches(rows: list[dict]) -> Columns:
    columns: Columns = []
    for batch in rows[0]["batches"]:
        first = rows[0]["batches"][batch]
        columns += [
            (f"batch {batch}: ms per step", lambda r, b=batch: spread(r["batches"][b], "ms_per_step", "{:.2f}")),
            (
                f"to {rows[0]['name']}",
                lambda r, b=batch, f=first: f"{speed_ratio(r['batches'][b], f, 'ms_per_step'):.2f} x",
            ),
        ]
    return columns


def columns_of_profiles(rows: list[dict]) -> Columns:
    forms = {
        "kernels": "{:,.0f}",
        "launches": "{:,.1f}",
        "wall_ms": "{:.2f}",
        "busy_ms": "{:.2f}",
        "busy_share": "{:.0%}",
    }
    heads = ["kernels", "launches", "wall, ms", "busy, ms", "busy"]
    columns: Columns = []
    if all(found["busy_share"] is None for row in rows for found in row["batches"].values()):
        heads[0] = "operations"
    for batch in rows[0]["batches"]:
        for head, (key, form) in zip(heads, forms.items(), strict=True):
            name = f"batch {batch}: {head}" if key == "kernels" else head
            columns.append((name, lambda r, b=batch, k=key, f=form: number(r["batches"][b][k], f)))
    return columns


def columns_and_cells(document: dict) -> tuple[dict[int, str], list[list[str]]]:
    """Heads by number (some come twice), and a list of cells for each row."""
    rows, what = document["rows"], document["job"]["what"]
    if not rows:
        return {}, []
    if what in ("speed", "ablation"):
        columns = columns_of_workloads(rows, what)
    else:
        columns = columns_of_batches(rows) if what in ("waterfall", "parallel") else columns_of_profiles(rows)
    return dict(enumerate(head for head, _ in columns)), [[cell(row) for _, cell in columns] for row in rows]


def not_here(rows: list[dict]) -> list[str]:
    """What this device does not have: it is off in every row that leaves it to the device."""
    found = []
    for what, (name, options) in SWITCHES.items():
        left_alone = [row for row in rows if row.get("features") and not options & set(row["used_options"])]
        if left_alone and not any(row["features"][name] for row in left_alone):
            found.append(what)
    return found


def print_not_here(document: dict) -> None:
    """One line: rows that differ only in what is off anyway are equal but for chance."""
    if found := not_here(document["rows"]):
        name = document["environment"]["device_name"]
        print(f"This device ({name}) has no {', no '.join(found)}: rows that differ only in that do the same work.")


def print_table(document: dict) -> None:
    env, rows = document["environment"], document["rows"]
    table = Table(title=f"{document['job']['model']}, {rows[0]['dtype']}, {env['device_name']}")
    table.add_column("row")
    for head in document["columns"].values():
        table.add_column(head, justify="right")
    for row, cells in zip(rows, document["cells"], strict=True):
        table.add_row(gates.name(row, row["name"]), *cells)
    Console(width=130).print(table)
    gates.print_suspects(rows)


def print_profile(document: dict) -> None:
    """For each row and size of the batch: the kernels that take most time, and the largest pauses between kernels."""
    console = Console(width=130)
    for row in document["rows"]:
        for batch, found in row["batches"].items():
            table = Table(title=f"{row['name']}, batch {batch}: {found['busy_ms']:.2f} ms busy in a step")
            for name in ("kernel", "calls per step", "us per step"):
                table.add_column(name, justify="left" if name == "kernel" else "right")
            for kernel in found["top"]:
                table.add_row(kernel["name"], f"{kernel['calls']:,.1f}", f"{kernel['us']:,.1f}")
            console.print(table)
            for gap in found["gaps"]:
                console.print(f"  idle {gap['us']:,.0f} us between {gap['after']} and {gap['before']}", markup=False)
