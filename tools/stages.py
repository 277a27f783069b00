"""Stages: which there are in the tree, which files each has, and what lineage.toml says of the steps between them."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from outline import Allowed

ROOT = Path(__file__).resolve().parent.parent
LISTS = ("changed", "added", "removed", "dropped", "renamed", "reshaped", "features")


@dataclass(frozen=True)
class Step:
    """One step of lineage.toml: path -> why for files; path -> names for what a changed file may drop or rename; the
    features that it consists of, as features.py reads them."""

    older: str
    newer: str
    idea: str
    changed: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    renamed: dict[str, dict[str, str]] = field(default_factory=dict)
    reshaped: dict[str, list[str]] = field(default_factory=dict)
    features: dict[str, dict] = field(default_factory=dict)

    def allowed(self, path: str) -> Allowed:
        return Allowed(self.dropped.get(path, []), self.renamed.get(path, {}), self.reshaped.get(path, []))

    def why(self, path: str) -> str | None:
        """The reason that the step gives for touching a file; None where it does not."""
        return self.changed.get(path) or self.added.get(path) or self.removed.get(path)


class Tree:
    """The stages below a root folder, and its lineage.toml."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        folders = [p.name for p in root.iterdir() if re.fullmatch(r"stage\d+_\w+", p.name) and p.is_dir()]
        self.stages = sorted(folders, key=stage_number)
        self.steps = read_steps(root / "lineage.toml")

    def stage(self, name: str) -> str:
        """A stage by its number ("1"), its beginning ("stage1") or its name. Raises ValueError for any other."""
        for stage in self.stages:
            if name.rstrip("/") in (stage, stage.partition("_")[0], str(stage_number(stage))):
                return stage
        raise ValueError(f"no stage {name!r}; there are: {', '.join(self.stages)}")

    def files(self, stage: str) -> set[str]:
        """Paths of the files of a stage, relative to it; no caches, nothing hidden."""
        folder = self.root / stage
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {p.as_posix() for p in found if not any(part[0] == "." or part == "__pycache__" for part in p.parts)}

    def read(self, stage: str, path: str) -> bytes:
        return (self.root / stage / path).read_bytes()

    def same(self, one: str, other: str, path: str) -> bool:
        return self.read(one, path) == self.read(other, path)

    def step_between(self, older: str, newer: str) -> Step | None:
        return next((step for step in self.steps if (step.older, step.newer) == (older, newer)), None)

    def known_steps(self) -> list[Step]:
        """The steps whose two stages follow each other in the tree."""
        pairs = zip(self.stages, self.stages[1:], strict=False)
        return [step for pair in pairs if (step := self.step_between(*pair))]


def stage_number(stage: str) -> int:
    return int(re.match(r"stage(\d+)_", stage).group(1))


def read_steps(path: Path) -> list[Step]:
    """The steps of lineage.toml. Raises ValueError for a key that is none."""
    steps = []
    for raw in tomllib.loads(path.read_text(encoding="utf-8")).get("step", []):
        unknown = raw.keys() - {"from", "to", "idea", *LISTS}
        missing = {"from", "to", "idea"} - raw.keys()
        if unknown or missing:
            what = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
            raise ValueError(f"{path.name}: [[step]] number {len(steps) + 1}: {what}")
        lists = {name: raw.get(name, {}) for name in LISTS}
        steps.append(Step(raw["from"], raw["to"], raw["idea"], **lists))
    return steps
