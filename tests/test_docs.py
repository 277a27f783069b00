"""What the pages say is so: measured numbers come from result files, commands and paths exist."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks.common import ROOT, stages

PAGES = sorted([ROOT / "README.md", *ROOT.glob("stage*/README.md")])


def test_measured_numbers_are_up_to_date():
    """A number in a page that no file in benchmarks/results holds is a claim, not a measurement."""
    check = subprocess.run([sys.executable, "tools/figures.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr + "\nrun: python tools/figures.py"


def test_every_stage_has_a_lesson_in_the_same_order():
    """Problem, idea, walk, (from stage 2) diff, measure, limits, exercises."""
    for stage in stages():
        text = (ROOT / stage / "README.md").read_text()
        wanted = ["## The problem", "## The idea", "## The walk", "## The diff", "## Measure it", "## What it still"]
        wanted = [head for head in [*wanted, "## Exercises"] if head != "## The diff" or not stage.startswith("stage1")]
        places = [text.find(head) for head in wanted]
        assert -1 not in places and places == sorted(places), f"{stage}: {list(zip(wanted, places, strict=True))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page):
    """Every relative link and picture of a page leads somewhere, and so does every file of a lesson's walk."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
    for name in re.findall(r"^\| `(\w+\.py)`", text, re.MULTILINE):
        assert (page.parent / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_of_commands_exist(page):
    """`python -m X` and `make Y` in a page can be run."""
    text = page.read_text()
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists() or module == "pytest", module
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"^    make (\w+)", text, re.MULTILINE):
        assert target in targets, target


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*/*.json")), ids=lambda p: p.name)
def test_results_carry_their_origin(path):
    """Device, versions, date, command and dtype stand in every result file."""
    document = json.loads(path.read_text())
    env = document["environment"]
    assert all(env[key] for key in ("device", "device_name", "date", "command", "python"))
    assert env["versions"]["torch"] and document["job"]["model"]
