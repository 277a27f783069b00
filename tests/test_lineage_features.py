"""A step in features: each hunk is shown with the idea that it serves, and none is shown nowhere."""

from pathlib import Path

import features
import lineage
import pytest
from hunks import hunks, parts
from stages import Tree

TREE = Tree()
WITH_FEATURES = [step for step in TREE.known_steps() if step.features]


# the tree


@pytest.mark.parametrize("step", WITH_FEATURES, ids=lambda step: step.newer)
def test_features_of_the_tree_are_complete(step):
    assert not list(features.problems(TREE, step))
    known = {feature.name for feature in features.features(step)}
    for path in filter(features.is_engine, step.changed):
        for hunk, names in features.assign(TREE, step, path):
            assert hunk.is_prose or (names and known.issuperset(names)), f"{path}: {hunk.text}"


@pytest.mark.parametrize("step", TREE.known_steps(), ids=lambda step: step.newer)
def test_hunks_lead_from_the_older_file_to_the_newer(step):
    for path in filter(features.is_engine, step.changed):
        older, newer = (TREE.read(stage, path).decode() for stage in (step.older, step.newer))
        assert apply(older, newer) == newer.splitlines(), path


def apply(older: str, newer: str) -> list[str]:
    """The older lines with all hunks applied."""
    lines, made, at = older.splitlines(), [], 0
    for hunk in hunks(older, newer):
        made += lines[at : hunk.old_start]
        assert (tuple(lines[hunk.old_start : hunk.old_end]), len(made)) == (hunk.old, hunk.new_start)
        made += hunk.new
        at = hunk.old_end
    return made + lines[at:]


@pytest.mark.parametrize("name", [(step.newer, name) for step in WITH_FEATURES for name in step.features], ids="-".join)
def test_each_feature_of_the_tree_is_printed(name, capsys):
    (step,) = (step for step in WITH_FEATURES if step.newer == name[0])
    features.show(TREE, step.older, step.newer, name[1], [])
    out = capsys.readouterr().out
    for path in step.features[name[1]]["hooks"]:
        assert f"=== {path}\n    {step.newer}: {step.changed[path]}\n@@ " in out, "a reason, and a hunk at least"


# the tools, on a tree in miniature

LINEAGE = """
[[step]]
from = "stage1_one"
to = "stage2_two"
idea = "Faster."
[step.changed]
"engine.py" = "Hooks."
"__init__.py" = "Says which stage this is."
[step.added]
"cache.py" = "Keeps things."
"speed.py" = "Hurries."
"tests/test_cache.py" = "Tries."

[step.features.cache]
idea = "Keep things."
files = ["cache.py"]
hooks = { "engine.py" = ["cache"] }

[step.features.speed]
idea = "Hurry."
files = ["speed.py"]
hooks = { "engine.py" = ["speed", "hurry"] }

[[step]]
from = "stage2_two"
to = "stage3_three"
idea = "The same again."
[step.changed]
"engine.py" = "Another line."
"""
OLD = """import os


class Engine:
    def __init__(self):
        self.name = os.name
        self.last = None

    def run(self, a):
        return a

    def stop(self):
        pass
"""
NEW = """import os
import time

from .cache import Cache


class Engine:
    def __init__(self):
        self.name = os.name
        self.cache = Cache()
        self.speed = 9
        self.last = None

    def run(self, a):
        return self.cache.get(a, self.speed)

    def hurry(self):
        time.sleep(0)

    def stop(self):
        pass
"""


@pytest.fixture
def tree(tmp_path) -> Tree:
    first = {"engine.py": OLD, "__init__.py": '"""One."""\n'}
    second = {"engine.py": NEW, "__init__.py": '"""Two."""\n', "cache.py": "c = 1\n", "speed.py": "s = 1\n\n\nt = 2\n"}
    second["tests/test_cache.py"] = "t = 1\n"
    third = second | {"engine.py": NEW + "z = 1\n"}
    for stage, files in (("stage1_one", first), ("stage2_two", second), ("stage3_three", third)):
        for path, text in files.items():
            (tmp_path / stage / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / stage / path).write_text(text)
    (tmp_path / "lineage.toml").write_text(LINEAGE)
    return Tree(tmp_path)


def shown(capsys, root: Path, *arguments: str) -> str:
    assert lineage.main(["diff", *arguments], root) == 0
    return capsys.readouterr().out


def test_parts_lie_end_to_end():
    found = parts(NEW)
    names = ["import os", "import time", "from .cache", "Engine"]
    assert [part.name for part in found] == [*names, *(f"Engine.{n}" for n in ("__init__", "run", "hurry", "stop"))]
    assert [part.start for part in found] == [0, *(part.end for part in found[:-1])]
    assert found[-1].end == len(NEW.splitlines())


def test_hunks_keep_to_one_part_and_one_added_statement():
    assert [(h.name, len(h.old), len(h.new)) for h in hunks(OLD, NEW)] == [
        ("import time", 0, 1),
        ("from .cache", 0, 2),
        ("Engine.__init__", 0, 1),
        ("Engine.__init__", 0, 1),
        ("Engine.run", 1, 1),
        ("Engine.hurry", 0, 3),
    ]
    assert apply(OLD, NEW) == NEW.splitlines()
    assert apply(NEW, OLD) == OLD.splitlines()


def test_a_statement_in_an_added_one_is_not_cut_off():
    older, newer = "def f():\n    a()\n", "def f():\n    a()\n    if b:\n        c()\n    d(\n        1,\n    )\n"
    assert [len(hunk.new) for hunk in hunks(older, newer)] == [2, 3]


def test_a_feature_is_shown_without_the_others(tree, capsys):
    out = shown(capsys, tree.root, "1", "2", "--feature", "cache")
    assert out.startswith("stage1_one -> stage2_two, cache: Keep things.\n  added    cache.py   1 lines\n")
    assert "  changed  engine.py  +4 -1\n\n=== engine.py\n    stage2_two: Hooks.\n@@ " in out
    assert "+from .cache import Cache" in out
    assert "+        self.cache = Cache()\n@@" in out, "what speed adds there is neither a change nor context"
    assert "Engine.run    (also for: speed)\n" in out
    assert not any(word in out for word in ("import time", "= 9", "hurry", "speed.py", "__init__.py"))


def test_an_import_goes_where_its_name_is_used(tree, capsys):
    assert "+import time" in shown(capsys, tree.root, "1", "2", "--feature", "speed")


def test_the_numbers_of_a_hunk_are_those_of_the_files(tree, capsys):
    out = shown(capsys, tree.root, "1", "2", "engine.py", "--feature", "speed")
    assert "@@ -9,2 +14,2 @@ Engine.run    (also for: cache)\n     def run(self, a):\n-        return a\n+" in out
    assert "@@ -11,2 +16,5 @@ Engine.hurry\n" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["1", "2", "--feature", "depth"], "no feature 'depth'; the step to stage2_two has: cache, speed"),
        (["2", "3", "--feature", "cache"], "the step from stage2_two to stage3_three has no features"),
        (["1", "3", "--feature", "cache"], "a feature belongs to one step"),
        (["1", "2", "__init__.py", "--feature", "cache"], "it has in: engine.py"),
    ],
)
def test_wrong_features_are_refused(tree, capsys, arguments, expected):
    with pytest.raises(SystemExit) as stopped:
        lineage.main(["diff", *arguments], tree.root)
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err


def test_check_is_content_with_whole_features(tree):
    """A docstring that says which stage this is, and a test, need no feature."""
    assert lineage.check(tree) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('files = ["cache.py"]', 'files = ["cash.py"]', "feature cache names cash.py, which is not in [step.added]"),
        ('files = ["cache.py"]', "files = []", "stage2_two/cache.py belongs to no feature"),
        ('"engine.py" = ["cache"]', '"motor.py" = ["cache"]', "hooks into motor.py, which is not in [step.changed]"),
        ('["cache"]', '["cache", "cash"]', "feature cache: no hunk of engine.py has 'cash'"),
        ('"hurry"]', '"9"]', "stage2_two/engine.py:17: the change in Engine.hurry ('def hurry(self):') belongs to no"),
    ],
)
def test_check_names_what_features_miss(tree, old, new, expected):
    (tree.root / "lineage.toml").write_text(LINEAGE.replace(old, new))
    assert any(expected in problem for problem in lineage.check(Tree(tree.root)))


def test_a_feature_with_other_keys_is_refused(tree):
    (tree.root / "lineage.toml").write_text(LINEAGE.replace('idea = "Hurry."', 'ideas = "Hurry."'))
    with pytest.raises(ValueError, match="feature speed: expected idea, files and hooks"):
        lineage.check(Tree(tree.root))
