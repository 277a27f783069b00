"""The stages are what they claim to be: one idea apart, alike in all else, each complete in itself.

The tree is held against lineage.toml, and then the tools are tried on a tree in miniature.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lineage
import pytest
from outline import Allowed, differences
from stages import ROOT, Tree

TREE = Tree()
ENGINE_FILES = [path for stage in TREE.stages for path in sorted((ROOT / stage).glob("*.py"))]
PYTHON_FILES = [path for stage in TREE.stages for path in sorted((ROOT / stage).rglob("*.py"))]
MAX_FILE_LINES = 300
LONGER = {"llm.py": 367, "zoo.py": 309}  # the one ties all others together, the other is given
MAX_FUNCTION_LINES = 19


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# the tree


def test_tree_is_as_lineage_says():
    problems = lineage.check(TREE)
    assert not problems, "\n".join(problems)


def own_modules() -> set[str]:
    """Top-level names that an absolute import would take from this repository."""
    return {path.stem for path in ROOT.iterdir() if path.name[0] != "." and (path.is_dir() or path.suffix == ".py")}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(level, module) of each import; level 0 is absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_imports_stay_inside_the_stage(path: Path):
    """Own modules are imported relatively, and no dots lead out: the folder works wherever it is copied."""
    depth = len(path.relative_to(ROOT).parts) - 1  # 1 for stage/x.py, 2 for stage/tests/x.py
    for level, module in imports(ast.parse(path.read_text(encoding="utf-8"))):
        assert level <= depth, f"from {'.' * level}{module} leads out of the stage"
        assert level or module.partition(".")[0] not in own_modules(), f"import {module}: make it relative"


def code_strings(tree: ast.AST) -> Iterator[str]:
    """String constants that the program uses. A string that stands alone is a docstring: prose."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_code_does_not_know_its_stage(path: Path):
    """A name that differs per stage comes from __package__, or the file could not be the same in the next one."""
    for text in code_strings(ast.parse(path.read_text(encoding="utf-8"))):
        assert not re.search(r"stage_?\d", text), f"{text!r}: take the name from __package__"


def functions(path: Path) -> list[ast.FunctionDef]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


@pytest.mark.parametrize("stage", TREE.stages)
def test_nine_in_ten_functions_are_short(stage: str):
    every = [(f.end_lineno - f.lineno + 1, f.name, p) for p in (ROOT / stage).glob("*.py") for f in functions(p)]
    long = sorted((one for one in every if one[0] > MAX_FUNCTION_LINES), reverse=True)
    listed = "\n".join(f"{lines} lines: {name_of(path)}: {name}" for lines, name, path in long)
    assert len(long) <= len(every) / 10, f"{len(long)} of {len(every)} functions are long:\n{listed}"


@pytest.mark.parametrize("path", ENGINE_FILES, ids=name_of)
def test_no_engine_file_is_long(path: Path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGER.get(path.name, MAX_FILE_LINES), f"{lines} lines: this file is asking to be two"


def run_alone(folder: Path, stage: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python where one stage lies, and nothing else."""
    shutil.copytree(ROOT / stage, folder / stage, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("stage", TREE.stages)
def test_a_stage_runs_alone(stage: str, tmp_path: Path):
    options = ["--model", "tiny", "--max-tokens", "4", "--temperature", "0", "--device", "cpu"]
    done = run_alone(tmp_path, stage, "-m", stage, "hi", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "no text was made"


@pytest.mark.parametrize("stage", TREE.stages)
def test_a_stage_tests_itself_alone(stage: str, tmp_path: Path):
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = run_alone(tmp_path, stage, "-m", "pytest", *options, f"{stage}/tests/test_counters.py")
    assert done.returncode == 0, done.stdout + done.stderr


# the tools, on a tree in miniature

MINIATURE = """
[[step]]
from = "stage1_one"
to = "stage2_two"
idea = "Two."
[step.changed]
"engine.py" = "It does more."
[step.added]
"extra.py" = "The idea."

[[step]]
from = "stage2_two"
to = "stage3_three"
idea = "Three."
[step.changed]
"shared.py" = "The lesson of three."
[step.removed]
"tests/test_old.py" = "Holds no longer."
"""
OLD = "class Engine:\n    def run(self, a): pass\n    def stop(self): pass\n"
NEW = "class Engine:\n    def run(self, a, b): pass\n    def pause(self): pass\n    def stop(self): pass\n"


@pytest.fixture
def tree(tmp_path) -> Tree:
    """Three stages that are as their lineage says."""
    first = {"engine.py": OLD, "shared.py": "x = 1\n", "same.py": "y = 1\n", "tests/test_old.py": "z = 1\n"}
    second = first | {"engine.py": NEW, "extra.py": "e = 1\n"}
    third = second | {"shared.py": "x = 3\n"}
    del third["tests/test_old.py"]
    for stage, files in (("stage1_one", first), ("stage2_two", second), ("stage3_three", third)):
        for path, text in files.items():
            (tmp_path / stage / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / stage / path).write_text(text)
    (tmp_path / "lineage.toml").write_text(MINIATURE)
    return Tree(tmp_path)


def test_check_is_content_with_a_faithful_tree(tree):
    (tree.root / "stage2_two/__pycache__").mkdir()
    (tree.root / "stage2_two/__pycache__/engine.pyc").write_text("no file of a stage")
    assert lineage.check(tree) == []


def test_check_names_a_shared_file_that_drifted(tree):
    (tree.root / "stage3_three/same.py").write_text("y = 2\n")
    (problem,) = lineage.check(tree)
    assert problem.startswith("stage3_three/same.py drifted")
    assert "copy stage2_two/same.py" in problem, "it says what to do"


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("stage2_two/new.py", "n = 1\n", "stage2_two/new.py is new"),
        ("stage2_two/same.py", None, "stage2_two/same.py is missing"),
        ("stage2_two/engine.py", None, "stage2_two/engine.py is missing, but lineage.toml lists engine.py as changed"),
        ("stage2_two/extra.py", None, "stage2_two/extra.py is missing"),
        ("stage1_one/extra.py", "e = 1\n", "stage1_one/extra.py exists"),
        ("stage3_three/tests/test_old.py", "z = 1\n", "stage3_three/tests/test_old.py exists"),
        ("stage3_three/shared.py", "x = 1\n", "stage3_three/shared.py is listed as changed in lineage.toml, but both"),
        ("stage2_two/engine.py", NEW.replace("stop", "halt"), "stage2_two/engine.py: Engine.stop is gone"),
        ("stage4_four/engine.py", NEW, "lineage.toml has no step from stage3_three to stage4_four"),
    ],
)
def test_check_names_what_is_not_as_listed(tree, path, text, expected):
    file = tree.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink() if text is None else file.write_text(text)
    assert any(problem.startswith(expected) for problem in lineage.check(Tree(tree.root)))


@pytest.mark.parametrize(
    ("newer", "expected"),
    [
        ("def f(a, new, b, *, c): pass\nclass A:\n    def g(self): pass\n", []),
        ("class A:\n    def g(self): pass\ndef f(a, b, *, c): pass\n", ["A stands where f stood"]),
        (
            "def f(b, a, *, c): pass\nclass A:\n    def g(self): pass\n",
            ["f had the parameters (a, b, c), now (b, a, c)"],
        ),
        ("def f(a, b, *, c): pass\nclass A:\n    def h(self): pass\n", ["A.g is gone"]),
    ],
)
def test_outline_keeps_names_order_and_parameters(newer, expected):
    older = "def f(a, b, *, c): pass\nclass A:\n    def g(self): pass\n"
    assert differences(older, newer, Allowed()) == expected


def test_outline_allows_what_is_listed_and_no_more():
    older, newer = "def f(a): pass\ndef g(): pass\ndef h(): pass\n", "def k(b): pass\ndef g(): pass\n"
    assert differences(older, newer, Allowed(["h"], {"f": "k"}, ["f"])) == []
    assert differences(older, newer, Allowed(["h", "g"], {"f": "k"}, ["f"])) == [
        "g is listed as dropped, but it is still there"
    ]


def test_copy_stops_where_the_lesson_changes_the_file(tree):
    (tree.root / "stage1_one/shared.py").write_text("x = 10\n")
    lines = lineage.copy(tree, "stage1_one/shared.py")
    assert (tree.root / "stage2_two/shared.py").read_text() == "x = 10\n"
    assert (tree.root / "stage3_three/shared.py").read_text() == "x = 3\n"
    assert (
        lines[-1]
        == "stopped before stage3_three, where shared.py is changed: The lesson of three. A mend goes in by hand there."
    )


def test_copy_stops_where_the_file_is_removed(tree):
    (tree.root / "stage1_one/tests/test_old.py").write_text("z = 2\n")
    lines = lineage.copy(tree, "stage1_one/tests/test_old.py")
    assert not (tree.root / "stage3_three/tests/test_old.py").exists()
    assert "removed" in lines[-1]


def test_copy_refuses_a_mend_made_in_a_copy(tree):
    """Copied onwards from there, the earlier stages would keep the fault."""
    (tree.root / "stage3_three/same.py").write_text("y = 2\n")
    with pytest.raises(ValueError, match="is a copy of stage1_one/same"):
        lineage.copy(tree, "stage3_three/same.py")


def test_copy_all_makes_shared_files_the_same(tree):
    (tree.root / "stage1_one/same.py").write_text("y = 2\n")
    (tree.root / "stage3_three/extra.py").write_text("e = 2\n")
    (tree.root / "stage2_two/shared.py").unlink()
    assert lineage.main(["copy", "--all"], tree.root) == 0
    assert lineage.check(tree) == []
    assert (tree.root / "stage3_three/same.py").read_text() == "y = 2\n"
    assert (tree.root / "stage3_three/extra.py").read_text() == "e = 1\n"


def test_diff_gives_summary_reason_and_diff(tree, capfd):
    assert lineage.main(["diff", "1", "stage2_two"], tree.root) == 0
    out = capfd.readouterr().out
    assert "changed  engine.py  +2 -1" in out
    assert "added    extra.py   +1 -0" in out
    assert out.index("It does more.") < out.index("+    def pause(self): pass")
    assert "shared.py" not in out


def test_diff_over_several_steps_gives_all_reasons(tree, capfd):
    assert lineage.main(["diff", "1", "3", "--tests"], tree.root) == 0
    out = capfd.readouterr().out
    assert "Two. Three." in out
    assert "removed  tests/test_old.py" in out
    assert "stage3_three: The lesson of three." in out


def test_diff_leaves_tests_out_and_says_so(tree, capfd):
    assert lineage.main(["diff", "2", "3"], tree.root) == 0
    out = capfd.readouterr().out
    assert "-z = 1" not in out
    assert "left out (--tests shows them): tests/test_old.py" in out


def test_diff_of_chosen_files(tree, capfd):
    assert lineage.main(["diff", "1", "2", "engine.py", "same.py"], tree.root) == 0
    out = capfd.readouterr().out
    assert "same.py is the same in both" in out
    assert "extra.py" not in out


@pytest.mark.parametrize(
    "arguments",
    [["diff", "2", "1"], ["diff", "1", "7"], ["diff", "1", "2", "no.py"], ["copy", "lineage.toml"], ["copy"]],
    ids=" ".join,
)
def test_wrong_arguments_are_refused(tree, capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        lineage.main(arguments, tree.root)
    assert stopped.value.code == 2
    assert "lineage.py" in capsys.readouterr().err
