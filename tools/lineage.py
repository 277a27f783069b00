"""Lineage: hold the stages against lineage.toml, carry mends forward, print the diffs that are the lessons.

Stage N+1 is stage N plus one idea. What the idea does not touch is byte-identical in both; what it touches is listed in
lineage.toml with the reason. Which stages there are is read from the tree: the folders stage<number>_<name>.

    python tools/lineage.py check                                   what drifted, and what to do about it
    python tools/lineage.py copy stage1_naive/sampling.py           a mend goes forward to every stage that shares it
    python tools/lineage.py diff 1 2                                the lesson
    python tools/lineage.py diff 4 5 --feature prefix               one idea of a lesson that has several
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from drift import check
from features import show
from stages import ROOT, Step, Tree, stage_number

SELF = "python tools/lineage.py"


# copy


def copy(tree: Tree, given: str) -> list[str]:
    """Carry one file forward to each later stage that shares it. Returns what was done, a line each."""
    first, path = _split(tree, given)
    _refuse_a_copy(tree, first, path)
    lines = []
    for older, newer in zip(tree.stages, tree.stages[1:], strict=False):
        if stage_number(older) < stage_number(first):
            continue
        step = tree.step_between(older, newer)
        stop = _stop_reason(step, newer, path)
        if stop:
            return [*lines, stop]
        lines.append(_copy_one(tree, first, newer, path))
    return lines or [f"{first} is the last stage: nothing to copy to"]


def _split(tree: Tree, given: str) -> tuple[str, str]:
    """A path from the root, from here or absolute: stage1_naive/tests/x.py -> ("stage1_naive", "tests/x.py")."""
    for absolute in (tree.root / given, Path(given).resolve()):
        if absolute.is_file() and absolute.is_relative_to(tree.root):
            stage, _, path = absolute.relative_to(tree.root).as_posix().partition("/")
            if stage in tree.stages:
                return stage, path
    raise ValueError(f"{given!r} is no file of a stage; expected e.g. {tree.stages[0]}/sampling.py")


def _refuse_a_copy(tree: Tree, stage: str, path: str) -> None:
    """A file that an earlier stage shares is mended there, or the earlier stage would keep the fault."""
    origin = _origin(tree, stage, path)
    if not tree.same(origin, stage, path):
        raise ValueError(f"{stage}/{path} is a copy of {origin}/{path}: make the mend there, and copy from there")


def _origin(tree: Tree, stage: str, path: str) -> str:
    """The earliest stage that shares the file with `stage`."""
    for step in reversed(tree.known_steps()):
        if step.newer == stage and not step.why(path) and path in tree.files(step.older):
            stage = step.older
    return stage


def _stop_reason(step: Step | None, newer: str, path: str) -> str | None:
    if step is None:
        return f"stopped before {newer}: lineage.toml has no step to it"
    for verb in ("changed", "removed"):
        if path in getattr(step, verb):
            by_hand = " A mend goes in by hand there." if verb == "changed" else ""
            return f"stopped before {newer}, where {path} is {verb}: {getattr(step, verb)[path]}{by_hand}"
    return None


def _copy_one(tree: Tree, source: str, target: str, path: str) -> str:
    to = tree.root / target / path
    if to.is_file() and tree.same(source, target, path):
        return f"{target}/{path}: the same already"
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tree.root / source / path, to)
    return f"{target}/{path}: copied from {source}"


def copy_all(tree: Tree) -> list[str]:
    """Make every shared file the same as in the earliest stage that has it. Returns what was copied."""
    lines = []
    for step in tree.known_steps():
        shared = {path for path in tree.files(step.older) if not step.why(path)}
        lines += [_copy_one(tree, step.older, step.newer, path) for path in sorted(shared)]
    return [line for line in lines if not line.endswith("already")] or ["every shared file is the same already"]


# diff


def diff(tree: Tree, older: str, newer: str, files: list[str], tests: bool) -> None:
    """Print what changed between two stages: a summary, then each file's reasons and its diff."""
    older, newer = tree.stage(older), tree.stage(newer)
    steps = _steps_from_to(tree, older, newer)
    paths = _differing(tree, older, newer)
    wanted = [_relative(tree, file) for file in files]
    for path in wanted:
        if path not in tree.files(older) | tree.files(newer):
            raise ValueError(f"neither {older} nor {newer} has a file {path!r}")
    shown = [p for p in paths if (p in wanted if wanted else tests or not _is_aside(p))]
    print(f"{older} -> {newer}: {' '.join(step.idea for step in steps)}")
    _print_summary(tree, older, newer, shown)
    hidden = [p for p in paths if p not in shown]
    if hidden and not wanted:
        print(f"  left out (--tests shows them): {', '.join(hidden)}")
    for path in [p for p in wanted if p not in paths]:
        print(f"  {path} is the same in both")
    for path in shown:
        print("\n" + "\n".join([f"=== {path}", *_reasons(steps, path)]), flush=True)
        _git_diff(tree, older, newer, path, "--color=auto")


def _steps_from_to(tree: Tree, older: str, newer: str) -> list[Step]:
    first, last = stage_number(older), stage_number(newer)
    if first >= last:
        raise ValueError(f"FROM must be an earlier stage than TO, not {older} and {newer}")
    return [s for s in tree.known_steps() if first <= stage_number(s.older) and stage_number(s.newer) <= last]


def _differing(tree: Tree, older: str, newer: str) -> list[str]:
    old, new = tree.files(older), tree.files(newer)
    return sorted(p for p in old | new if not (p in old and p in new and tree.same(older, newer, p)))


def _relative(tree: Tree, file: str) -> str:
    """A file may be given with its stage in front."""
    stage, _, path = file.partition("/")
    return path if stage in tree.stages else file


def _is_aside(path: str) -> bool:
    return path.startswith("tests/") or path in ("README.md", "faults.toml")


def _print_summary(tree: Tree, older: str, newer: str, paths: list[str]) -> None:
    width = max(map(len, paths), default=0)
    old, new = tree.files(older), tree.files(newer)
    for path in paths:
        verb = "added" if path not in old else "removed" if path not in new else "changed"
        plus, minus, _ = _git_diff(tree, older, newer, path, "--numstat", capture=True).split("\t", 2)
        print(f"  {verb:8} {path:{width}}  +{plus} -{minus}")


def _reasons(steps: list[Step], path: str) -> list[str]:
    reasons = [f"    {step.newer}: {step.why(path)}" for step in steps if step.why(path)]
    return reasons or ["    (lineage.toml gives no reason)"]


def _git_diff(tree: Tree, older: str, newer: str, path: str, option: str, capture: bool = False) -> str:
    """git diff of one file of two stages; a file that a stage lacks is empty there."""
    sides = [f"{stage}/{path}" if (tree.root / stage / path).is_file() else "/dev/null" for stage in (older, newer)]
    command = ["git", "--no-pager", "diff", "--no-index", option, *sides]
    done = subprocess.run(command, cwd=tree.root, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode > 1:  # 1: they differ
        raise ValueError(f"git diff failed for {path}")
    return done.stdout or ""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=SELF, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="hold the tree against lineage.toml; exit status 1 if anything drifted")
    c = commands.add_parser("copy", help="carry a mended shared file forward to the later stages that share it")
    c.add_argument("paths", nargs="*", metavar="PATH", help="a file of a stage, e.g. stage1_naive/sampling.py")
    c.add_argument("--all", action="store_true", help="every shared file, from the earliest stage that has it")
    d = commands.add_parser("diff", help="what changed between two stages, and why")
    d.add_argument("older", metavar="FROM", help="a stage's number or name")
    d.add_argument("newer", metavar="TO", help="a later stage's number or name")
    d.add_argument("files", nargs="*", metavar="FILE", help="only these, e.g. attention.py; left out: all that differ")
    only = d.add_mutually_exclusive_group()
    only.add_argument("--tests", action="store_true", help="tests, README.md and faults.toml too")
    only.add_argument("--feature", metavar="NAME", help="only what serves this feature of the step, e.g. prefix")
    return p


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    try:
        tree = Tree(root)
        if args.command == "check":
            return report(tree, check(tree))
        if args.command == "diff" and args.feature is not None:
            show(tree, args.older, args.newer, args.feature, [_relative(tree, file) for file in args.files])
        elif args.command == "diff":
            diff(tree, args.older, args.newer, args.files, args.tests)
        elif bool(args.paths) == args.all:
            cli.error("copy: give files, or --all")
        else:
            print("\n".join(copy_all(tree) if args.all else [line for path in args.paths for line in copy(tree, path)]))
    except ValueError as error:
        cli.exit(2, f"{cli.prog}: {error}\n")
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def report(tree: Tree, problems: list[str]) -> int:
    """Print the problems; returns the exit status."""
    for problem in problems:
        print(f"- {problem}")
    print(f"{len(problems)} problems" if problems else f"{' -> '.join(tree.stages)}: as lineage.toml says")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
