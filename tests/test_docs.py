"""What the pages say is so: measured numbers come from result files, commands and paths exist."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks.common import ROOT, stages

READMES = (ROOT / "README.md", ROOT / "README.zh.md")
PAGES = sorted([*READMES, *ROOT.glob("stage*/README.md")])


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
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
    for name in re.findall(r"^\| `(\w+\.py)`", text, re.MULTILINE):
        assert (page.parent / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_of_commands_exist(page):
    """`python -m X` and `make Y` in a page can be run."""
    text = page.read_text(encoding="utf-8")
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists() or module == "pytest", module
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"^    make (\w+)", text, re.MULTILINE):
        assert target in targets, target


def sections(text: str) -> list[dict]:
    """What a translation must not change, for each section of a page (the first: what stands above all `##`)."""
    found = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        blocks = re.findall(r"<!-- begin (.*?) -->\n(.*?)<!-- end", part, re.DOTALL)
        words = re.sub(r"<!-- begin .*?<!-- end [\w-]+ -->", "", part, flags=re.DOTALL)
        code = re.findall(r"^(?:    .*\n|```.*\n(?:.*\n)*?```\n)+", words, re.MULTILINE)
        code = [piece for piece in code if not piece.startswith("    stage 1")]  # the map of the stages is prose
        found.append(
            {
                "measured": blocks,
                "commands": [re.sub(r"\s+# .*", "", line) for piece in code for line in piece.splitlines()],
                "in the text": set(re.findall(r"`([^`\n]+)`", words)),
                "links": [link for link in re.findall(r"\]\(([^)]+)\)", words) if not link.startswith("README")],
                "rows": len(re.findall(r"^\|", words, re.MULTILINE)),
                "items": len(re.findall(r"^- ", words, re.MULTILINE)),
            }
        )
    return found


def test_both_readmes_say_the_same():
    """The Chinese README has the sections, commands, links and measured blocks of the English one, in its order."""
    english, chinese = (sections(page.read_text(encoding="utf-8")) for page in READMES)
    assert len(english) == len(chinese) > 5
    assert sum(len(part["commands"]) for part in english) > 20 and any(part["measured"] for part in english)
    for number, (one, other) in enumerate(zip(english, chinese, strict=True)):
        for key in one:
            assert one[key] == other[key], f"section {number}, {key}: README.md and README.zh.md differ"


def test_the_readmes_name_each_other_at_the_top():
    for page, other in (READMES, READMES[::-1]):
        head = page.read_text(encoding="utf-8").splitlines()[:4]
        assert any(f"]({other.name})" in line for line in head), page.name


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*/*.json")), ids=lambda p: p.name)
def test_results_carry_their_origin(path):
    """Device, versions, date, command and dtype stand in every result file."""
    document = json.loads(path.read_text())
    env = document["environment"]
    assert all(env[key] for key in ("device", "device_name", "date", "command", "python"))
    assert env["versions"]["torch"] and document["job"]["model"]
