"""Drift: where the tree and lineage.toml disagree. Each problem names its file and says what to do about it."""

from collections.abc import Iterator

from features import problems as feature_problems
from outline import differences
from stages import Step, Tree

COPY = "python tools/lineage.py copy"


def check(tree: Tree) -> list[str]:
    """Everything in which the tree and lineage.toml disagree: what it is and what to do."""
    problems = list(_chain_problems(tree))
    for step in tree.known_steps():
        problems += _list_problems(step)
        problems += _file_problems(tree, step)
        problems += _outline_problems(tree, step)
        problems += feature_problems(tree, step)
    return problems


def _chain_problems(tree: Tree) -> Iterator[str]:
    pairs = list(zip(tree.stages, tree.stages[1:], strict=False))
    for older, newer in pairs:
        if tree.step_between(older, newer) is None:
            yield f"lineage.toml has no step from {older} to {newer}. Add a [[step]] that lists what differs."
    for step in tree.steps:
        if (step.older, step.newer) not in pairs:
            yield f"lineage.toml has a step from {step.older} to {step.newer}, but the tree has no such neighbours."


def _list_problems(step: Step) -> Iterator[str]:
    where = f"lineage.toml, step to {step.newer}"
    listed = [*step.changed, *step.added, *step.removed]
    for path in sorted({path for path in listed if listed.count(path) > 1}):
        yield f"{where}: {path} is listed twice. Leave one entry."
    for path in listed:
        if not str(step.why(path)).strip():
            yield f"{where}: {path} has no reason. Say why the step touches it."
    for path in {**step.dropped, **step.renamed, **step.reshaped}:
        if path not in step.changed:
            yield f"{where}: names of {path} are excepted, but it is not listed as changed. Take the exception out."


def _file_problems(tree: Tree, step: Step) -> Iterator[str]:
    old, new = tree.files(step.older), tree.files(step.newer)
    for path in sorted(old | new | step.changed.keys() | step.added.keys() | step.removed.keys()):
        problem = _file_problem(tree, step, path, path in old, path in new)
        if problem:
            yield problem


def _file_problem(tree: Tree, step: Step, path: str, in_old: bool, in_new: bool) -> str | None:
    """One file of a step: is it in both stages, or not, as the step says?"""
    older, newer = f"{step.older}/{path}", f"{step.newer}/{path}"
    if path in step.added:
        return _presence(step, path, "added", older, in_old, newer, in_new)
    if path in step.removed:
        return _presence(step, path, "removed", newer, in_new, older, in_old)
    if path in step.changed:
        return _changed_problem(tree, step, path, in_old, in_new)
    if in_old and not in_new:
        return (
            f"{newer} is missing. Copy it ({COPY} {older}), or, if the lesson does without it, list it in "
            f"lineage.toml under [step.removed] with the reason."
        )
    if in_new and not in_old:
        return f"{newer} is new. List it in lineage.toml under [step.added] with the reason, or delete it."
    if not tree.same(step.older, step.newer, path):
        return (
            f"{newer} drifted: it differs from {older}, and no lesson says so. Make the mend in the earlier stage and "
            f"copy it forward ({COPY} {older}), or list it in lineage.toml under [step.changed] with the reason."
        )
    return None


def _presence(step: Step, path: str, verb: str, absent: str, is_there: bool, present: str, exists: bool) -> str | None:
    """An added or removed file: not in the one stage, but in the other."""
    if is_there:
        return f"{absent} exists, but lineage.toml lists {path} as {verb} by the step to {step.newer}. Correct one."
    if not exists:
        return f"{present} is missing, but lineage.toml lists {path} as {verb} by the step to {step.newer}."
    return None


def _changed_problem(tree: Tree, step: Step, path: str, in_old: bool, in_new: bool) -> str | None:
    if not (in_old and in_new):
        missing = step.newer if in_old else step.older
        return f"{missing}/{path} is missing, but lineage.toml lists {path} as changed by the step to {step.newer}."
    if tree.same(step.older, step.newer, path):
        return f"{step.newer}/{path} is listed as changed in lineage.toml, but both are the same. Take it off the list."
    return None


def _outline_problems(tree: Tree, step: Step) -> Iterator[str]:
    both = tree.files(step.older) & tree.files(step.newer)
    for path in step.changed:
        if path.endswith(".py") and path in both:
            sources = (tree.read(stage, path).decode() for stage in (step.older, step.newer))
            for difference in differences(*sources, step.allowed(path)):
                yield (
                    f"{step.newer}/{path}: {difference}, against {step.older}. A changed file keeps names, order and "
                    f"parameters; put that back, or list it in lineage.toml (its head says how)."
                )
