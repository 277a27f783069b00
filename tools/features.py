"""Features: a step that adds several ideas at once, read one idea at a time.

A feature is its own files, and hooks in files that others change too. lineage.toml says how to know the hooks: per file
words (regexes, any case) that are looked for in the changed lines of each hunk and in the name of what it is in. A hunk
may serve several features. Every hunk must serve one: what `check` reports is that something is shown nowhere.

An import that no word fits goes where the names are used that it brings or takes away.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from hunks import Hunk, hunks
from stages import Step, Tree

CONTEXT = 2  # unchanged lines around a hunk
COLOURS = {"-": "31", "+": "32", "@": "36", "=": "1"}


@dataclass(frozen=True)
class Feature:
    """files: those that the step adds for it. hooks: changed file -> words by which its hunks are known."""

    name: str
    idea: str
    files: list[str]
    hooks: dict[str, list[str]]

    def claims(self, path: str, text: str) -> bool:
        return any(_fits(word, text) for word in self.hooks.get(path, []))


def features(step: Step) -> list[Feature]:
    """The features of a step. Raises ValueError for a table with other keys."""
    for name, raw in step.features.items():
        if raw.keys() != {"idea", "files", "hooks"}:
            raise ValueError(f"lineage.toml, feature {name}: expected idea, files and hooks, not {sorted(raw)}")
    return [Feature(name, **raw) for name, raw in step.features.items()]


def assign(tree: Tree, step: Step, path: str) -> list[tuple[Hunk, list[str]]]:
    """The hunks of a changed file, each with the names of the features that it serves."""
    found = hunks(*(tree.read(stage, path).decode() for stage in (step.older, step.newer)))
    every = features(step)
    known = [(hunk, [f.name for f in every if f.claims(path, hunk.text)]) for hunk in found]
    known = [(hunk, names if _says_something(hunk) else []) for hunk, names in known]
    return [(hunk, names or _by_use(hunk, known)) for hunk, names in known]


def _by_use(hunk: Hunk, known: list[tuple[Hunk, list[str]]]) -> list[str]:
    """The features whose hunks use a name that this import brings or takes away."""
    if not hunk.imports:
        return []
    word = rf"\b({'|'.join(sorted(hunk.imports))})\b"
    users = [names for other, names in known if not other.imports and re.search(word, other.text)]
    return list(dict.fromkeys(name for names in users for name in names))


def _fits(word: str, text: str) -> bool:
    return re.search(word, text, re.IGNORECASE | re.MULTILINE) is not None


def _says_something(hunk: Hunk) -> bool:
    return any(line.strip() for line in (*hunk.old, *hunk.new))


# check


def problems(tree: Tree, step: Step) -> Iterator[str]:
    """Where the features of a step and the tree disagree. A step without features has no such problems."""
    every, where = features(step), f"lineage.toml, step to {step.newer}"
    both = tree.files(step.older) & tree.files(step.newer)
    for feature in every:
        for path in feature.files:
            if path not in step.added:
                yield f"{where}: feature {feature.name} names {path}, which is not in [step.added]. Correct one."
        for path in feature.hooks:
            if path not in step.changed:
                yield f"{where}: feature {feature.name} hooks into {path}, which is not in [step.changed]. Correct one."
    for path in filter(is_engine, step.added if every else ()):
        if not any(path in feature.files for feature in every):
            yield f"{step.newer}/{path} belongs to no feature. Name it under `files` of one in lineage.toml."
    for path in filter(is_engine, step.changed if every else ()):
        if path in both:
            yield from _hook_problems(tree, step, path)


def _hook_problems(tree: Tree, step: Step, path: str) -> Iterator[str]:
    """Words that fit nothing; hunks that nothing fits. What is mere prose (__init__.py says which stage it is) may be
    left over: no code is missing then."""
    assigned = assign(tree, step, path)
    for feature in features(step):
        for word in feature.hooks.get(path, []):
            if not any(_fits(word, hunk.text) for hunk, _ in assigned if _says_something(hunk)):
                yield (
                    f"lineage.toml, step to {step.newer}: feature {feature.name}: no hunk of {path} has {word!r}. "
                    f"Take the word out, or mend it."
                )
    for hunk, names in assigned:
        if not names and not hunk.is_prose:
            at, line = next((i, line.strip()) for i, line in enumerate(hunk.new or hunk.old) if line.strip())
            yield (
                f"{step.newer}/{path}:{hunk.new_start + 1 + (at if hunk.new else 0)}: the change in {hunk.name} "
                f"({line!r}) belongs to no feature. Put a word for it under `hooks` of one in lineage.toml."
            )


def is_engine(path: str) -> bool:
    return path.endswith(".py") and not path.startswith("tests/")


# show


def show(tree: Tree, older: str, newer: str, name: str, files: list[str]) -> None:
    """Print one feature: its idea, its files, and its hooks in the other files (in these alone, if any are given)."""
    step, feature = find(tree, tree.stage(older), tree.stage(newer), name)
    for path in files:
        if path not in feature.hooks:
            raise ValueError(f"feature {name} has no hooks in {path!r}; it has in: {', '.join(feature.hooks)}")
    assigned = {path: assign(tree, step, path) for path in sorted(files or feature.hooks)}
    print(f"{step.older} -> {step.newer}, {name}: {feature.idea}")
    width = max(map(len, [*feature.files, *assigned]), default=0)
    for path in feature.files:
        print(f"  added    {path:{width}}  {len(tree.read(step.newer, path).splitlines())} lines")
    for path, pairs in assigned.items():
        own = [hunk for hunk, names in pairs if name in names]
        print(f"  changed  {path:{width}}  +{sum(len(h.new) for h in own)} -{sum(len(h.old) for h in own)}")
    for path, pairs in assigned.items():
        _print_lines(["", f"=== {path}", f"    {step.newer}: {step.why(path)}"])
        _print_lines(patch(tree.read(step.older, path).decode().splitlines(), pairs, name))


def find(tree: Tree, older: str, newer: str, name: str) -> tuple[Step, Feature]:
    """A feature by its name. Raises ValueError, saying which there are."""
    step = tree.step_between(older, newer)
    if step is None:
        raise ValueError(f"a feature belongs to one step, and there is none from {older} to {newer}")
    every = {feature.name: feature for feature in features(step)}
    if not every:
        raise ValueError(f"the step from {older} to {newer} has no features: it is one idea")
    if name not in every:
        raise ValueError(f"no feature {name!r}; the step to {newer} has: {', '.join(every)}")
    return step, every[name]


def patch(old_lines: list[str], pairs: list[tuple[Hunk, list[str]]], name: str) -> Iterator[str]:
    """The hunks of one feature, with a little of what is the same around them; hunks that touch become one.

    What other features change is left out, so the numbers are those of the files but nobody can apply this.
    """
    run: list[tuple[Hunk, list[str]]] = []
    printed = 0  # old lines up to here are out already
    for i, (hunk, names) in enumerate(pairs):
        if name not in names:
            continue
        run.append((hunk, names))
        later = pairs[i + 1 : i + 2]
        stop = later[0][0].old_start if later else len(old_lines)
        if later and later[0][1] == names and stop - hunk.old_end <= 2 * CONTEXT:
            continue
        start = max(run[0][0].old_start - CONTEXT, printed, pairs[i - len(run)][0].old_end if i >= len(run) else 0)
        printed = min(hunk.old_end + CONTEXT, stop)
        yield from _print_run(old_lines, run, start, printed, [other for other in names if other != name])
        run = []


def _print_run(old_lines: list[str], run: list, start: int, stop: int, others: list[str]) -> Iterator[str]:
    first, last = run[0][0], run[-1][0]
    new_start = first.new_start - (first.old_start - start)
    sizes = f"-{start + 1},{stop - start} +{new_start + 1},{last.new_end + stop - last.old_end - new_start}"
    yield f"@@ {sizes} @@ {first.name}" + (f"    (also for: {', '.join(others)})" if others else "")
    for hunk, _ in run:
        yield from (f" {line}" for line in old_lines[start : hunk.old_start])
        yield from (f"-{line}" for line in hunk.old)
        yield from (f"+{line}" for line in hunk.new)
        start = hunk.old_end
    yield from (f" {line}" for line in old_lines[start:stop])


def _print_lines(lines: Iterator[str] | list[str]) -> None:
    for line in lines:
        colour = COLOURS.get(line[:1]) if sys.stdout.isatty() else None
        print(f"\x1b[{colour}m{line}\x1b[m" if colour else line)
