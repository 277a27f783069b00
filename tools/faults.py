"""Faults: small mistakes to plant in a stage, each with the test that finds it.

A fault is an entry of a stage's faults.toml: in `file` the text `find` becomes `replace`, and `test` turns red. To
plant one and look for it is an exercise ("break it: which test fails, and why"); to run them all tests the tests.

    python tools/faults.py list 1                     what can be planted in stage 1
    python tools/faults.py plant 1 rope-on-k          break the stage in this working tree
    python -m pytest stage1_naive -x                  which test fails, and why?
    python tools/faults.py undo 1 rope-on-k           mend it
    python tools/faults.py run 1                      in copies: does every fault turn its test red?
"""

import argparse
import ast
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from multiprocessing.context import BaseContext
from pathlib import Path

from stages import ROOT, Tree

SELF = "python tools/faults.py"
SECONDS = 120  # for one run of pytest; the green side gets this for each of its tests
SLOW_IMPORTS = ("pytest", "hypothesis", "torch", "transformers.models.qwen3.modeling_qwen3")


@dataclass(frozen=True)
class Fault:
    """One entry. stage: the folder's name. file and test: relative to it. idea: what is broken, in one sentence."""

    stage: str
    id: str
    file: str
    find: str
    replace: str
    test: str
    idea: str

    def plant(self, source: str) -> str:
        """The source with the fault in it. Raises ValueError where it does not fit."""
        if self.is_planted(source):
            raise ValueError(f"{self.id} is planted in {self.file} already; {SELF} undo {self.stage} {self.id}")
        return self._swap(source, self.find, self.replace)

    def undo(self, source: str) -> str:
        """The source without the fault. Raises ValueError where it is not planted."""
        if not self.is_planted(source):
            raise ValueError(f"{self.id} is not planted in {self.file}")
        return self._swap(source, self.replace, self.find)

    def is_planted(self, source: str) -> bool:
        return self.replace in source and (self.find not in source or self.find in self.replace)

    def _swap(self, source: str, out: str, into: str) -> str:
        if source.count(out) != 1:
            raise ValueError(f"{self.id}: {self.file} holds {out!r} {source.count(out)} times, expected once")
        return source.replace(out, into)


def read_faults(root: Path, stage: str) -> list[Fault]:
    """The faults of a stage, [] without a faults.toml. Raises ValueError for an entry with other keys than Fault's."""
    path = root / stage / "faults.toml"
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"] if path.is_file() else []
    keys = {field.name for field in fields(Fault)} - {"stage"}
    for entry in entries:
        if entry.keys() != keys:
            raise ValueError(f"{stage}/faults.toml: {entry.get('id')}: expected the keys {', '.join(sorted(keys))}")
    return [Fault(stage, **entry) for entry in entries]


def find_fault(root: Path, stage: str, fault_id: str) -> Fault:
    for fault in read_faults(root, stage):
        if fault.id == fault_id:
            return fault
    raise ValueError(f"{stage} has no fault {fault_id!r}; `{SELF} list {stage}` names them")


def entry_problems(root: Path, fault: Fault) -> list[str]:
    """Why an entry cannot be right, without running anything."""
    path, test_file = root / fault.stage / fault.file, root / fault.stage / fault.test.partition("::")[0]
    if not path.is_file() or not test_file.is_file():
        return [f"{fault.stage} has no {fault.file if not path.is_file() else fault.test}"]
    name = fault.test.rpartition("::")[2].partition("[")[0]
    functions = [node.name for node in ast.walk(ast.parse(test_file.read_text())) if isinstance(node, ast.FunctionDef)]
    problems = [] if name in functions else [f"{test_file.name} has no {name}"]
    source = path.read_text(encoding="utf-8")
    try:
        planted = fault.plant(source)
        if fault.undo(planted) != source:
            problems.append("undo does not give the file back: make `replace` a text of its own")
    except ValueError as error:
        problems.append(str(error))
    return problems


# running: always in a copy of the stage, alone in a temporary folder


@dataclass(frozen=True)
class Verdict:
    """What became of a fault. status: "found" (its test turned red), "survived", "broken" (red without a failed test,
    or not green without the fault) or "skipped" (this machine cannot run the test)."""

    fault: Fault
    status: str
    detail: str = ""


def run_tests(root: Path, stage: str, tests: list[str], fault: Fault | None = None) -> tuple[int, str]:
    """Run some tests of a stage in a copy of it, with a fault or without. Returns pytest's exit code and its output."""
    with tempfile.TemporaryDirectory(prefix=f"{stage}-", ignore_cleanup_errors=True) as folder:
        shutil.copytree(root / stage, Path(folder, stage), ignore=shutil.ignore_patterns("__pycache__", ".*"))
        if fault:
            path = Path(folder, stage, fault.file)
            path.write_text(fault.plant(path.read_text(encoding="utf-8")), encoding="utf-8")
        # -c and --rootdir: a configuration file above the temporary folder is none of ours.
        options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, "-vv" if fault is None else "-xq"]
        process = PROCESSES.Process(target=_pytest, args=(folder, [*options, *(f"{stage}/{test}" for test in tests)]))
        process.start()
        process.join(SECONDS * len(tests))
        if process.is_alive():
            process.kill()
            return -1, f"no end within {SECONDS * len(tests)} seconds"
        output, code = Path(folder, "output"), Path(folder, "code")
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else "pytest did not start"
        return int(code.read_text()) if code.exists() else -1, text


def _processes() -> BaseContext:
    """Where it is possible, new processes are forked from one that has imported the large packages already."""
    context = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    if os.name == "posix":
        context.set_forkserver_preload([*SLOW_IMPORTS])
    return context


PROCESSES = _processes()


def is_ours(path: str) -> bool:
    """Whether an entry of sys.path leads to the repository's own code. A .venv inside it holds other people's."""
    place = Path(path or ".").resolve()
    return place.is_relative_to(ROOT) and "site-packages" not in place.parts


def _pytest(folder: str, arguments: list[str]) -> None:
    """The process of `run_tests`: pytest in a folder, with no way back to this repository's modules."""
    import pytest

    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if not is_ours(path))]
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = True
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # several of these run side by side
    with open("output", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        code = pytest.main(arguments)
        sys.stdout.flush()
    Path(folder, "code").write_text(str(int(code)))


def green_side(root: Path, stage: str, faults: list[Fault]) -> dict[str, str]:
    """Test -> "passed", "skipped", or the output that says what is wrong, without any fault. One run for all."""
    tests = sorted({fault.test for fault in faults})
    _, output = run_tests(root, stage, tests)
    return {test: _outcome(f"{stage}/{test}", output) for test in tests}


def _outcome(test: str, output: str) -> str:
    """A test may have several lines: one for each of its parameters. One word if it passed or was skipped."""
    line = re.compile(rf"^{re.escape(test)}(?:\[.*\])? (PASSED|SKIPPED|XFAIL|FAILED|ERROR)", re.MULTILINE)
    words = set(line.findall(output))
    if "PASSED" in words and words <= {"PASSED", "SKIPPED"}:
        return "passed"
    return "skipped" if words == {"SKIPPED"} else output


def judge(root: Path, fault: Fault, green: str) -> Verdict:
    """Plant a fault in a copy and run its test. green: what the test says without it, from `green_side`."""
    if green != "passed":
        return Verdict(fault, "skipped") if green == "skipped" else Verdict(fault, "broken", f"without it: {green}")
    try:
        code, output = run_tests(root, fault.stage, [fault.test], fault)
    except ValueError as error:
        return Verdict(fault, "broken", str(error))
    if code == 0:
        return Verdict(fault, "survived", output)
    red = code == 1 and re.search(r"\b\d+ failed\b", output)  # not: an error in a fixture, at import, in pytest
    return Verdict(fault, "found" if red else "broken", output)


def run_faults(root: Path, faults: list[Fault], jobs: int, tell: Callable[[Verdict], None]) -> list[Verdict]:
    """Judge all faults, `jobs` at a time, and tell of each verdict in the order of the faults."""
    stages = list(dict.fromkeys(fault.stage for fault in faults))
    verdicts = []
    with ThreadPoolExecutor(jobs) as pool:
        of_stage = {stage: [fault for fault in faults if fault.stage == stage] for stage in stages}
        green = {stage: pool.submit(green_side, root, stage, of_stage[stage]) for stage in stages}
        waiting = [
            pool.submit(judge, root, fault, green[stage].result()[fault.test])
            for stage in stages
            for fault in of_stage[stage]
        ]
        for future in waiting:
            verdicts.append(future.result())
            tell(verdicts[-1])
    return verdicts


# the command line


def list_faults(faults: list[Fault], answers: bool) -> None:
    for fault in faults:
        print(f"{fault.stage}  {fault.id}  ({fault.file})")
        if answers:
            print(f"    {fault.idea}\n    {fault.find!r}\n -> {fault.replace!r}\n    found by {fault.test}")


def plant(root: Path, fault: Fault) -> None:
    """Break the working tree, and say how to mend it."""
    path = root / fault.stage / fault.file
    path.write_text(fault.plant(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"Planted in {fault.stage}/{fault.file}. Which test fails, and why?\n    python -m pytest {fault.stage} -x")
    print(f"Undo:\n    {SELF} undo {fault.stage} {fault.id}")


def undo(root: Path, fault: Fault) -> None:
    path = root / fault.stage / fault.file
    path.write_text(fault.undo(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{fault.stage}/{fault.file} is as it was. It was: {fault.idea}")


def tell(verdict: Verdict) -> None:
    """One line of the table; the output below it where the fault was not found."""
    fault = verdict.fault
    print(f"{verdict.status:9} {fault.stage:16} {fault.id:28} {fault.test}", flush=True)
    if verdict.status in ("survived", "broken"):
        print("\n".join(f"    | {line}" for line in verdict.detail.strip().splitlines()[-12:]), flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=SELF, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    c = commands.add_parser("list", help="the faults of a stage, or of all stages")
    c.add_argument("stage", nargs="?", help="a stage's number or name")
    c.add_argument(
        "--answers", action="store_true", help="also what is wrong, what is changed, and which test finds it"
    )
    for name, text in (("plant", "break a stage in this working tree"), ("undo", "mend it again")):
        c = commands.add_parser(name, help=text)
        c.add_argument("stage", help="a stage's number or name")
        c.add_argument("id", help="the fault, as `list` names it")
    c = commands.add_parser("run", help="in copies: plant each fault and see its test turn red; exit status 1 if not")
    c.add_argument("stage", nargs="?", help="a stage's number or name; left out: all")
    c.add_argument("id", nargs="?", help="one fault; left out: all of the stage")
    c.add_argument("-j", "--jobs", type=int, default=2, help="so many at a time (2)")
    return p


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    try:
        tree = Tree(root)
        stages = [tree.stage(args.stage)] if args.stage else tree.stages
        faults = [fault for stage in stages for fault in read_faults(root, stage)]
        if getattr(args, "id", None):
            faults = [find_fault(root, stages[0], args.id)]
        if args.command == "run":
            return run(root, faults, args.jobs)
        if args.command == "list":
            list_faults(faults, args.answers)
        else:
            {"plant": plant, "undo": undo}[args.command](root, faults[0])
    except ValueError as error:
        cli.exit(2, f"{cli.prog}: {error}\n")
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run(root: Path, faults: list[Fault], jobs: int) -> int:
    """Judge, tell, and return the exit status: 1 if any fault was not found."""
    verdicts = run_faults(root, faults, jobs, tell)
    missed = [verdict for verdict in verdicts if verdict.status in ("survived", "broken")]
    print(f"{len(verdicts)} faults, {len(missed)} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
