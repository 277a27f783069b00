"""Hunks: what differs between two Python files, cut so small that of each piece one can say what it is for.

git cuts where equal lines are, and a rewritten stretch is one hunk however much is in it. Here both files are first
laid side by side by their parts (a function, a method, a field, an import, the head of a class), and lines are compared
within a part. So a hunk never reaches over two parts, and it knows whose it is. Statements that are added one after
another to a function that was there before are a hunk each; a function that is new is one hunk.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise


@dataclass(frozen=True)
class Part:
    """A statement of a module or of a class body, or the head of a class: its name and its lines, counted from 0.

    end is the line after the last. Blank lines and comments in front belong to it. imports: the names that it binds.
    """

    name: str
    start: int
    end: int
    imports: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Hunk:
    """Lines that go and lines that come, where they stood and stand, counted from 0, and the part that they are in.

    is_prose: nothing but docstrings, comments and blank lines. imports: names that come or go, if it is an import.
    """

    name: str
    old_start: int
    old: tuple[str, ...]
    new_start: int
    new: tuple[str, ...]
    is_prose: bool
    imports: frozenset[str] = frozenset()

    @property
    def old_end(self) -> int:
        return self.old_start + len(self.old)

    @property
    def new_end(self) -> int:
        return self.new_start + len(self.new)

    @property
    def text(self) -> str:
        """What a word is looked for in: the changed lines, and the name of what they are in."""
        return "\n".join([self.name, *self.old, *self.new])


def hunks(older: str, newer: str) -> list[Hunk]:
    """What differs between two sources, in their order."""
    old, new = Source(older), Source(newer)
    names = [part.name for part in old.parts], [part.name for part in new.parts]
    found = []
    for _, i1, i2, j1, j2 in SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        for one, other in _pairs(old.parts, i1, i2, new.parts, j1, j2):
            found += _compare(old, one, new, other)
    return found


class Source:
    """A file: its lines, its parts, which lines are prose, and where statements begin (line -> column)."""

    def __init__(self, text: str):
        self.lines = text.splitlines()
        self.parts = parts(text)
        self.prose = prose_lines(text)
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
        self.statements = {_first_line(node) - 1: node.col_offset for node in nodes}


def _pairs(old: list[Part], i1: int, i2: int, new: list[Part], j1: int, j2: int) -> Iterator[tuple[Part, Part]]:
    """Parts with the same names side by side; else each beside nothing, at the place where it is missing."""
    if [part.name for part in old[i1:i2]] == [part.name for part in new[j1:j2]]:
        yield from zip(old[i1:i2], new[j1:j2], strict=True)
        return
    before_new = new[j1 - 1].end if j1 else 0
    for part in old[i1:i2]:
        yield part, Part(part.name, before_new, before_new)
    before_old = old[i2 - 1].end if i2 else 0
    for part in new[j1:j2]:
        yield Part(part.name, before_old, before_old), part


def _compare(old: Source, one: Part, new: Source, other: Part) -> Iterator[Hunk]:
    """The hunks of one part."""
    lines = old.lines[one.start : one.end], new.lines[other.start : other.end]
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        going = range(one.start + i1, one.start + i2)
        coming = range(other.start + j1, other.start + j2)
        is_grown = tag == "insert" and one.start < one.end
        for added in _by_statement(new, coming) if is_grown else [coming]:
            is_prose = old.prose.issuperset(going) and new.prose.issuperset(added)
            sides = [
                (side.start, tuple(source.lines[i] for i in side)) for source, side in ((old, going), (new, added))
            ]
            yield Hunk(other.name, *sides[0], *sides[1], is_prose, one.imports ^ other.imports)


def _by_statement(source: Source, lines: range) -> list[range]:
    """These lines cut where a statement begins that is no part of another one among them."""
    columns = [source.statements[i] for i in lines if i in source.statements]
    starts = [i for i in lines if columns and source.statements.get(i) == min(columns)]
    bounds = [lines.start, *starts[1:], lines.stop]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def parts(source: str) -> list[Part]:
    """The parts of a source, end to end: each begins where the one before ends."""
    found, start, num_lines = [], 0, len(source.splitlines())
    marks = list(_marks(ast.parse(source).body, ""))
    for i, (name, end, imports) in enumerate(marks):
        end = num_lines if i == len(marks) - 1 else end
        found.append(Part(name, start, end, imports))
        start = end
    return found


def _marks(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int, frozenset[str]]]:
    """(name, last line, names imported) of each part."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            inner = node.body[1:] if _is_docstring(node.body[0]) else node.body
            head_end = node.body[0].end_lineno if len(inner) < len(node.body) else _first_line(inner[0]) - 1
            yield prefix + node.name, head_end, frozenset()
            yield from _marks(inner, f"{prefix}{node.name}.")
        else:
            yield prefix + _name(node), node.end_lineno, _imported(node)


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])


def _name(node: ast.stmt) -> str:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name
    if isinstance(node, ast.ImportFrom):
        return f"from {'.' * node.level}{node.module or ''}"
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
    return "docstring" if _is_docstring(node) else ast.unparse(node).partition("\n")[0]


def _imported(node: ast.stmt) -> frozenset[str]:
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return frozenset()
    return frozenset((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def prose_lines(source: str) -> set[int]:
    """Lines, counted from 0, that are blank, a comment, or of a docstring."""
    found = {i for i, line in enumerate(source.splitlines()) if not line.strip() or line.lstrip()[0] == "#"}
    for node in ast.walk(ast.parse(source)):
        if _is_docstring(node):
            found |= set(range(node.lineno - 1, node.end_lineno))
    return found
