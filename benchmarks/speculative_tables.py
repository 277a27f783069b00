"""Tables of benchmarks.speculative: a line per kind of text and batch, columns by the number of drafts."""

from rich.console import Console
from rich.table import Table

from . import gates

Grid = dict[str, list]  # head: list of names; body: list of lines


def cells(rows: list[dict]) -> list[list[dict]]:
    """Rows of one kind and batch, which follow each other; the first is the one without drafts."""
    found: list[list[dict]] = []
    for row in rows:
        if row["drafts"] == 0:
            found.append([])
        found[-1].append(row)
    return found


def drafted(row: dict) -> str:
    return f"{row['speed_up']:.2f} x, {row['tokens_per_step']:.2f}, {row['acceptance_rate']:.0%}"


def spread(row: dict) -> str:
    low, high = row["tokens_per_second_range"]
    return f"{row['tokens_per_second']:,.0f} ({low:,.0f}–{high:,.0f})"


def ngram_table(rows: list[dict]) -> Grid:
    """Per number of drafts: speed-up, tokens per step and the share of drafts that were right."""
    groups = cells(rows)
    heads = [f"{row['drafts']} drafts: speed-up, tokens/step, accepted" for row in groups[0][1:]] if groups else []
    body = [[group[0]["kind"], str(group[0]["batch"]), spread(group[0]), *map(drafted, group[1:])] for group in groups]
    return {"head": ["text", "batch", "no drafts: tokens/s", *heads], "body": body}


def model_table(rows: list[dict]) -> Grid:
    """One line per draft model, kind and number of drafts."""
    body = []
    for row in rows:
        if row["drafts"]:
            numbers = [f"{row['tokens_per_step']:.2f}", f"{row['acceptance_rate']:.0%}"]
            line = [row["proposer"], row["kind"], str(row["drafts"]), spread(row), f"{row['speed_up']:.2f} x"]
            body.append([*line, *numbers])
    return {"head": ["draft model", "text", "drafts", "tokens/s", "speed-up", "tokens/step", "accepted"], "body": body}


def tables(rows: list[dict]) -> dict[str, Grid]:
    """Both, as the file holds them."""
    return {
        "ngram_table": ngram_table([row for row in rows if row["part"] == "n-gram"]),
        "model_table": model_table([row for row in rows if row["part"] == "draft model"]),
    }


def losses(rows: list[dict]) -> list[str]:
    """Where drafts make it slower."""
    return [f"{row['name']}: {row['speed_up']:.2f} x" for row in rows if row["drafts"] and row["speed_up"] < 1]


def print_tables(document: dict) -> None:
    env, rows, console = document["environment"], document["rows"], Console(width=130)
    titles = {"ngram_table": "n-gram drafts", "model_table": "draft models, batch 1"}
    for key, title in titles.items():
        if not document[key]["body"]:
            continue
        table = Table(title=f"{title}: {document['job']['model']}, {rows[0]['dtype']}, {env['device_name']}")
        for i, head in enumerate(document[key]["head"]):
            table.add_column(head, justify="left" if i == 0 else "right")
        for line in document[key]["body"]:
            table.add_row(*line)
        console.print(table)
    print_notes(document)


def print_notes(document: dict) -> None:
    """How much the texts repeat, whether drafts changed any, and where they lose."""
    rows = document["rows"]
    for kind, found in document["kinds"].items():
        print(f"{kind}: {found['repeated']:.0%} of the output's 3-grams stood in prompt or output before")
    differing = [row for row in rows if row["differing"]]
    for row in differing:
        where = f"the first at position {row['first_difference']}"
        print(f"{row['name']}: {row['differing']} of {row['texts']} texts differ from those without drafts, {where}")
    if not differing:
        print("All texts are those without drafts.")
    count = f"{len(document['losses'])} of {sum(row['drafts'] > 0 for row in rows)} rows"
    print(f"Slower with drafts, {count}: {'; '.join(document['losses']) or 'none'}.")
    gates.print_suspects(rows)
