"""Every fault of every stage's faults.toml turns its test red: the tests test what they say.

The faults run in temporary copies, several at a time; the working tree is not touched.
"""

import os
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import faults
import pytest
from faults import Fault, Verdict
from stages import ROOT, Tree

STAGES = Tree().stages
FAULTS = [fault for stage in STAGES for fault in faults.read_faults(ROOT, stage)]
LEAST = 8  # faults of its own for each stage


def name_of(fault: Fault) -> str:
    return f"{fault.stage}-{fault.id}"


@pytest.fixture(scope="module")
def verdicts(request) -> dict[Fault, Future[Verdict]]:
    """All chosen faults, started at once; each test waits for its own."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = [item.callspec.params["fault"] for item in items if item.originalname == "test_fault_is_found"]
    green = {stage: [fault for fault in chosen if fault.stage == stage] for stage in STAGES}
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 8))
    green = {stage: pool.submit(faults.green_side, ROOT, stage, own) for stage, own in green.items() if own}
    judge = lambda fault: faults.judge(ROOT, fault, green[fault.stage].result()[fault.test])  # noqa: E731
    yield {fault: pool.submit(judge, fault) for fault in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_fault_is_found(fault: Fault, verdicts):
    verdict = verdicts[fault].result()
    if verdict.status == "skipped":
        pytest.skip(f"{fault.test} cannot run here")
    assert verdict.status == "found", f"{fault.id} {verdict.status}: {fault.idea}\n{verdict.detail}"


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_entry_is_sound(fault: Fault):
    """The file holds the text once, the test exists, and undo gives the file back."""
    assert faults.entry_problems(ROOT, fault) == []


@pytest.mark.parametrize("stage", STAGES)
def test_ids_are_unique(stage: str):
    counts = Counter(fault.id for fault in FAULTS if fault.stage == stage)
    assert [fault_id for fault_id, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("index", range(len(STAGES)), ids=STAGES)
def test_stage_has_faults_of_its_own(index: int):
    """A stage's idea can go wrong in ways that the stage before could not."""
    edits = [{(f.file, f.find, f.replace) for f in FAULTS if f.stage == stage} for stage in STAGES]
    own = edits[index] - (edits[index - 1] if index else set())
    assert len(own) >= LEAST, f"{len(own)} faults of its own, at least {LEAST} are wanted"


# the tool, on a stage in miniature

CODE = "def double(x):\n    return x + x\n\n\ndef unused():\n    return 1\n"
TEST = """
import pytest
from ..code import double

@pytest.mark.parametrize("x", [1, 2])
def test_double(x):
    assert double(x) == 2 * x

@pytest.fixture
def broken():
    assert double(1) == 2

def test_fixture(broken):
    pass

def test_wrong():
    assert double(1) == 3

@pytest.mark.skip(reason="never")
def test_skipped():
    pass
"""


def make_fault(find: str = "x + x", replace: str = "x + 1", test: str = "test_double") -> Fault:
    return Fault("stage1_one", "f", "code.py", find, replace, f"tests/test_code.py::{test}", "It is broken.")


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "stage1_one"
    (folder / "tests").mkdir(parents=True)
    for path, text in {"__init__.py": "", "code.py": CODE, "tests/__init__.py": "", "tests/test_code.py": TEST}.items():
        (folder / path).write_text(text)
    fault = make_fault()
    entry = "\n".join(f"{key} = {getattr(fault, key)!r}" for key in ("id", "file", "find", "replace", "test", "idea"))
    (folder / "faults.toml").write_text(f"[[fault]]\n{entry}\n")
    (tmp_path / "lineage.toml").write_text("")
    return tmp_path


def status(root: Path, fault: Fault) -> str:
    return faults.run_faults(root, [fault], 1, lambda verdict: None)[0].status


def test_a_found_fault_and_one_that_survives(root):
    assert status(root, make_fault()) == "found"
    assert status(root, make_fault("return 1", "return 2")) == "survived"
    assert (root / "stage1_one/code.py").read_text() == CODE, "the tree itself is not touched"


def test_red_for_another_reason_does_not_count(root):
    """An import that fails, an error in a fixture, a test that is red anyway: none of them is a test that found it."""
    assert status(root, make_fault("def double", "def triple")) == "broken"
    assert status(root, make_fault(test="test_fixture", replace="x + 2")) == "broken"
    assert status(root, make_fault(test="test_wrong")) == "broken"
    assert status(root, make_fault(test="test_missing")) == "broken"
    assert status(root, make_fault("no such text")) == "broken"


def test_a_test_that_cannot_run_here(root):
    assert status(root, make_fault(test="test_skipped")) == "skipped"


def test_run_tells_and_fails_for_a_survivor(root, capsys):
    assert faults.main(["run", "1"], root) == 0
    assert "found " in capsys.readouterr().out
    toml = root / "stage1_one/faults.toml"
    toml.write_text(toml.read_text().replace("x + x", "return 1").replace("x + 1", "return 2"))
    assert faults.main(["run", "stage1_one", "f"], root) == 1
    assert "survived" in capsys.readouterr().out


def test_plant_and_undo(root, capsys):
    file = root / "stage1_one/code.py"
    assert faults.main(["plant", "1", "f"], root) == 0
    assert file.read_text() == CODE.replace("x + x", "x + 1")
    assert "undo stage1_one f" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        faults.main(["plant", "1", "f"], root)
    assert "planted in code.py already" in capsys.readouterr().err
    assert faults.main(["undo", "1", "f"], root) == 0
    assert file.read_text() == CODE
    with pytest.raises(SystemExit):
        faults.main(["undo", "1", "f"], root)


def test_list_keeps_the_answer_back(root, capsys):
    faults.main(["list"], root)
    assert "test_double" not in capsys.readouterr().out
    faults.main(["list", "--answers"], root)
    assert "test_double" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (make_fault("return", "yield"), "holds 'return' 2 times"),
        (make_fault("x + x", "1"), "holds '1' 2 times"),
        (make_fault(test="test_missing"), "test_code.py has no test_missing"),
    ],
)
def test_unsound_entries_are_named(root, fault, expected):
    assert expected in "\n".join(faults.entry_problems(root, fault))
