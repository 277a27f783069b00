"""Notebooks: run the course's notebooks in place, and check that what they show is what their cells say.

    python tools/notebooks.py run                    # all of them, from the top; then check
    python tools/notebooks.py run stage2_kvcache     # one of them
    python tools/notebooks.py check                  # only say what is wrong (a test runs this)

A run leaves in each code cell a hash of its source, and in the notebook a hash of each file of benchmarks/results that
its kernel opened, however the cells came by the name; `check` compares. What would differ from machine to machine
(times of execution, versions, paths) is not kept.
"""

import argparse
import base64
import hashlib
import io
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
RESULTS = ROOT / "benchmarks" / "results"
MOST_BYTES = 800_000
SECONDS_PER_CELL = 300
EXACT = "counters"  # the tag of cells whose text comes out the same on every machine
PATH = re.compile(r"(?<![\w.~/])/(?:home|tmp|root|work|Users)/[\w.]|\b[A-Z]:\\\w")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
WATCH = """
def _watch(log, folder):
    import os, sys

    def seen(event, args):
        if event == "open" and isinstance(args[0], str) and (path := os.path.abspath(args[0])).startswith(folder):
            log.write(path + "\\n")

    sys.addaudithook(seen)

_watch(open({log!r}, "a", buffering=1), {folder!r})
del _watch
"""  # runs in the kernel before the first cell
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output: NotebookNode) -> str:
    """What an output says, without its pictures."""
    data = output.get("data", {})
    return output.get("text", "") + "".join(data[kind] for kind in ("text/markdown", "text/plain") if kind in data)


def exact_texts(notebook: NotebookNode) -> dict[str, str]:
    """Cell id -> text, of the cells that are tagged as the same on every machine."""
    cells = [cell for cell in code_cells(notebook) if EXACT in cell.metadata.get("tags", [])]
    return {cell.id: "".join(map(text_of, cell.outputs)) for cell in cells}


def execute(notebook: NotebookNode) -> NotebookNode:
    """Run all cells in a fresh kernel, in the notebooks' folder. Raises CellExecutionError where a cell fails.

    The notebook's metadata then name the result files that it read.
    """
    with tempfile.NamedTemporaryFile("r") as log:
        watch = WATCH.format(log=log.name, folder=f"{RESULTS}/")
        client = NotebookClient(
            notebook,
            timeout=SECONDS_PER_CELL,
            kernel_name="python3",
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(FOLDER)}},
            on_notebook_start=lambda notebook: client.kc.execute(watch, silent=True),
        )
        done = client.execute()
        done.metadata.results_read = sorted({str(Path(line).relative_to(RESULTS)) for line in log.read().splitlines()})
    return done


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Keep what a reader sees and `check` needs; drop what differs from run to run."""
    used = notebook.metadata.get("results_read", [])
    notebook.metadata = NotebookNode(kernelspec=KERNEL, language_info={"name": "python"})
    notebook.metadata.results = {name: digest((RESULTS / name).read_bytes()) for name in used}
    for cell in notebook.cells:
        kept = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
        if cell.cell_type == "code":
            kept["source_hash"] = digest(cell.source.encode())
            cell.outputs = [lean(output) for output in joined(cell.outputs)]
        cell.metadata = NotebookNode(kept)
    return notebook


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Pieces of one stream as one: how it is cut depends on the clock."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if merged and output.output_type == "stream" and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def lean(output: NotebookNode) -> NotebookNode:
    """Without metadata, and with a PNG of 128 colours: a third of the bytes, and nobody sees it."""
    if "metadata" in output:
        output.metadata = NotebookNode()
    if "image/png" in output.get("data", {}):
        picture, small = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))), io.BytesIO()
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
        output.data["image/png"] = base64.b64encode(small.getvalue()).decode()
    return output


def problems(name: str, notebook: NotebookNode, size: int) -> Iterator[str]:
    """What is wrong with a stored notebook, each with what to do about it."""
    mend = f"run: python tools/notebooks.py run {name}"
    if size > MOST_BYTES:
        yield f"{name}: {size:,} bytes, more than {MOST_BYTES:,}. Draw smaller or fewer figures, then {mend}"
    for number, cell in enumerate(code_cells(notebook), 1):
        where = f"{name}, code cell {number} ({cell.source.splitlines()[0] if cell.source else 'empty'!r})"
        if cell.execution_count != number:
            yield f"{where}: its number is {cell.execution_count}; not run from the top. {mend}"
        if cell.metadata.get("source_hash") != digest(cell.source.encode()):
            yield f"{where}: it was edited after the run, so its output is stale. {mend}"
        yield from (f"{where}: {fault}" for output in cell.outputs for fault in faults_of(output))
    for cell in notebook.cells:
        if found := PATH.search(cell.source):
            yield f"{name}: the text of cell {cell.id!r} names a path of one machine, {found[0]!r}. Make it relative."
        targets = LINK.findall(cell.source) if cell.cell_type == "markdown" else []
        for target in [target for target in targets if not (FOLDER / target).exists()]:
            yield f"{name}: cell {cell.id!r} links to {target}, which is not there. Mend the link."
    for file, known in notebook.metadata.get("results", {}).items():
        path = RESULTS / file
        if not path.exists() or digest(path.read_bytes()) != known:
            yield f"{name}: benchmarks/results/{file} has changed since the run. {mend}"


def faults_of(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "error":
        yield f"it ended with {output.ename}: {output.evalue}"
    if output.get("name") == "stderr":
        yield f"it wrote to stderr: {output.text.strip()[:200]!r}"
    if found := PATH.search(text_of(output)):
        yield f"its output names a path of one machine, {found[0]!r}. Print names, not absolute paths."
    if is_empty_picture(output.get("data", {})):
        yield "its figure is empty."


def is_empty_picture(data: dict) -> bool:
    """A figure without its PNG (nobody returned or showed it), or a PNG too small to hold anything."""
    if "image/png" in data:
        return len(base64.b64decode(data["image/png"])) < 2000
    return data.get("text/plain", "").startswith("<Figure") or data.get("text/plain", "").startswith("<Axes")


def check(chosen: list[str]) -> list[str]:
    return [problem for name in chosen for problem in problems(name, read(name), size_of(name))]


def size_of(name: str) -> int:
    return (FOLDER / f"{name}.ipynb").stat().st_size


def run(chosen: list[str]) -> None:
    """Each notebook is written once all of its cells have run. Raises CellExecutionError, with nothing written."""
    for number, name in enumerate(chosen, 1):
        print(f"{number}/{len(chosen)} {name} ...", end=" ", flush=True)
        start = time.perf_counter()
        notebook = normalise(execute(read(name)))
        nbformat.validate(notebook)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{time.perf_counter() - start:.0f} s, {size_of(name) / 1000:,.0f} KB", flush=True)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python tools/notebooks.py", description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["run", "check"], help="run in place and check, or only check")
    p.add_argument("names", nargs="*", help=f"left out: all ({', '.join(names())})")
    args = p.parse_args(argv)
    if unknown := [name for name in args.names if name not in names()]:
        p.error(f"no such notebook: {', '.join(unknown)}; there are {', '.join(names())}")
    chosen = args.names or names()
    if args.what == "run":
        try:
            run(chosen)
        except CellExecutionError as error:
            print(f"failed; nothing was written\n{error}")
            return 1
    found = check(chosen)
    print("\n".join(found) or f"{len(chosen)} notebooks are as they should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
