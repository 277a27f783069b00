"""Gates: rows that cannot be believed as they stand are marked, with the reason, and kept.

A larger batch that serves fewer tokens per second, a stage that loses on the very workload its idea is for, samples
that lie far apart: each may be true, but more often something disturbed the measurement. Nothing is thrown away or
measured again; whoever reads the row decides. Functions of rows alone: each returns reasons by row, and `mark` puts
them in.
"""

from collections.abc import Iterable
from statistics import median

Reasons = list[list[str]]  # of each row

MOST_SPREAD = 0.2
PAST = 64  # tokens of a sequence from which on a KV cache must pay


def spread(values: Iterable[float]) -> float:
    """(max - min) / median of the samples; 0 for a single one."""
    values = list(values)
    return (max(values) - min(values)) / median(values) if len(values) > 1 else 0.0


def wide_spread(samples: list[list[float]], what: str = "seconds") -> Reasons:
    """Rows whose samples lie more than a fifth of their median apart."""
    text = f"the samples' {what} lie {{:.0%}} of their median apart"
    return [[text.format(spread(values))] if spread(values) > MOST_SPREAD else [] for values in samples]


def slower_batch(batches: list[int], speeds: list[float]) -> Reasons:
    """More sequences at once must not bring fewer tokens per second than the fewest do."""
    base = batches.index(min(batches))
    reason = f"{{}} at once make fewer tokens per second than {batches[base]}: {{:,.1f}} against {speeds[base]:,.1f}"
    pairs = zip(batches, speeds, strict=True)
    return [[reason.format(n, s)] if n > batches[base] and s < speeds[base] else [] for n, s in pairs]


def slower_than(row: str, speed: float, before: str, speed_before: float, where: str) -> list[str]:
    """`row` has an idea that `before` lacks, for the very workload `where`."""
    if speed >= speed_before:
        return []
    return [f"slower than {before} {where}: {speed:,.1f} tokens/s against {speed_before:,.1f}"]


def slower_stage(rows: list[dict], prompts: int, length: int) -> Reasons:
    """Stage 2 below stage 1 where sequences pass 64 tokens, stage 3 below stage 2 with several requests at once.

    length: of the shortest sequence at its end, prompt and output. Memory is what stage 4 is for, so its speed is not
    judged here; stage 5's is, by `slower_stage5`.
    """
    by_number = {row["engine"][5]: row for row in rows if row["engine"].startswith("stage")}
    ideas = {"2": (length > PAST, f"past {PAST} tokens"), "3": (prompts > 1, f"with {prompts} requests")}
    found: Reasons = []
    for row in rows:
        number = row["engine"][5] if row["engine"].startswith("stage") else ""
        before = by_number.get(str(int(number) - 1)) if number in ideas else None
        if before is None or not ideas[number][0]:
            found.append([])
            continue
        speeds = row["tokens_per_second"], before["tokens_per_second"]
        found.append(slower_than(row["engine"], speeds[0], before["engine"], speeds[1], ideas[number][1]))
    return found


def slower_past(rows: list[dict]) -> Reasons:
    """Of a curve: positions past 64 where a token of stage 2 takes longer than one of stage 1."""
    first = next((row for row in rows if row["engine"].startswith("stage1")), None)
    if first is None:
        return [[] for _ in rows]
    limit = dict(zip(first["positions"], first["milliseconds"], strict=True))
    return [[_slow_positions(row, limit)] if _slow_positions(row, limit) else [] for row in rows]


def _slow_positions(row: dict, limit: dict[int, float]) -> str:
    if not row["engine"].startswith("stage2"):
        return ""
    points = zip(row["positions"], row["milliseconds"], strict=True)
    slow = [str(p) for p, ms in points if p > PAST and ms > limit.get(p, ms)]
    return f"a token takes longer than in stage 1 at position {', '.join(slow)}" if slow else ""


def slower_stage5(rows: list[dict], device: str) -> Reasons:
    """On a GPU, what stage 5 adds must make one request, and many, faster than stage 4. On a CPU nothing is added."""
    before = next((row for row in rows if row["stage"].startswith("stage4")), None)
    found: Reasons = []
    for row in rows:
        judged = device == "cuda" and before is not None and row["stage"].startswith("stage5")
        pairs = [(work, row[work], before[work]) for work in ("one", "many") if judged and work in row]
        key = "tokens_per_second"
        reasons = [slower_than(row["name"], now[key], "stage 4", old[key], f"with {work}") for work, now, old in pairs]
        found.append([reason for some in reasons for reason in some])
    return found


def mark(rows: list[dict], *gates: Reasons) -> list[dict]:
    """The rows, each with the reasons of all gates under "suspect" (an empty list: it passed)."""
    return [row | {"suspect": [r for some in found for r in some]} for row, *found in zip(rows, *gates, strict=True)]


def name(row: dict, text: str) -> str:
    """A row's name for a table, with a mark if the row is suspect."""
    return f"{text} (?)" if row.get("suspect") else text


def print_suspects(rows: list[dict], key: str = "name") -> None:
    """Under the table: why a row carries its mark."""
    for row in rows:
        for reason in row.get("suspect", []):
            print(f"(?) {row[key]}: {reason}")
