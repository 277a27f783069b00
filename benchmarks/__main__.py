"""All measurements behind one command: `python -m benchmarks` lists them, `python -m benchmarks NAME ...` runs one.

    python -m benchmarks                       # what can be measured, by lesson
    python -m benchmarks compare --help        # the options of one of them
    python -m benchmarks compare --model tiny  # the same as python -m benchmarks.compare --model tiny

A measurement is a module of this folder whose `main` takes the arguments; nothing else has to be told. The first line
of its docstring stands in the list, under the lesson that its constant LESSON names ("stage 4"), or "all stages". What
only draws figures of stored results says LESSON = "figures" and is listed apart.
"""

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
GENERAL = "all stages"
FIGURES = "figures"


@dataclass(frozen=True)
class Command:
    """One module that can be run. Read from its text: importing all of them would take seconds."""

    name: str
    line: str
    lesson: str


def read(path: Path) -> Command | None:
    """The command that a file holds; None for helpers, and for processes that only other commands start."""
    tree = ast.parse(path.read_text())
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    if path.stem == "__main__" or not (mains and mains[0].args.args):
        return None
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    lesson = ast.literal_eval(assigned["LESSON"]) if "LESSON" in assigned else GENERAL
    line = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Command(path.stem, line.partition(": ")[2] or line, lesson)


def commands(folder: Path = FOLDER) -> dict[str, Command]:
    """Every command by name: those for all stages, then lesson by lesson, at last those that measure nothing."""
    found = [command for path in sorted(folder.glob("*.py")) if (command := read(path))]
    order = sorted(found, key=lambda c: (c.lesson == FIGURES, c.lesson != GENERAL, c.lesson))
    return {command.name: command for command in order}


def listing() -> str:
    known = list(commands().values())
    lines = ["usage: python -m benchmarks NAME [options]    (NAME --help: the options)"]
    for lesson in dict.fromkeys(command.lesson for command in known if command.lesson != FIGURES):
        lines += section(lesson, [command for command in known if command.lesson == lesson])
    lines += ["", "Each prints one line of JSON at its end, and writes the whole to a file."]
    drawing = [command for command in known if command.lesson == FIGURES]
    return "\n".join(lines + section("measure nothing, only draw figures of result files again", drawing))


def section(title: str, some: list[Command]) -> list[str]:
    width = max([12, *(len(command.name) for command in some)])
    return ["", f"{title}:", *(f"  {command.name:<{width}} {command.line}" for command in some)]


def main(argv: list[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(listing())
        return 0
    if name not in commands():
        print(f"python -m benchmarks: no measurement {name!r}; known: {', '.join(commands())}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.{name}")
    sys.argv = [str(FOLDER / f"{name}.py"), *rest]  # as python -m benchmarks.NAME would have it
    return module.main(rest)


if __name__ == "__main__":
    sys.exit(main())
