"""Outline: the classes, functions and methods of a Python file, and whether a newer file keeps those of an older one.

Two stages can be read side by side only if what both have stands at the same place under the same name. So a changed
file keeps each name of the older one, in the same order, with the same parameters in the same order; new names and new
parameters may come in between. What may differ nevertheless is listed in lineage.toml.
"""

import ast
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Allowed:
    """Exceptions for one file: names that may go, names that go on under another name, names that may move or change
    their parameters."""

    dropped: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    reshaped: list[str] = field(default_factory=list)


def outline(source: str) -> dict[str, list[str]]:
    """Qualified name -> parameter names ([] for a class), in the order of the file. Nested functions are left out."""
    return _walk(ast.parse(source), "")


def _walk(node: ast.AST, prefix: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.setdefault(prefix + child.name, _parameters(child.args))
        elif isinstance(child, ast.ClassDef):
            found.setdefault(prefix + child.name, [])
            found |= _walk(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.If, ast.Try, ast.With)):
            found |= _walk(child, prefix)
    return found


def _parameters(args: ast.arguments) -> list[str]:
    every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return [arg.arg for arg in every if arg is not None]


def differences(older: str, newer: str, allowed: Allowed) -> list[str]:
    """What of the older source the newer one does not keep, a sentence each. Neither may list what is not so."""
    old, new = outline(older), outline(newer)
    return [
        *_gone(old, new, allowed),
        *_moved(old, new, allowed),
        *_reparametrised(old, new, allowed),
        *_idle(old, new, allowed),
    ]


def _new_name(name: str, allowed: Allowed) -> str:
    """What the newer file calls it: its own new name, or that of its class in front."""
    if name in allowed.renamed or "." not in name:
        return allowed.renamed.get(name, name)
    owner, _, last = name.rpartition(".")
    return f"{_new_name(owner, allowed)}.{last}"


def _gone(old: dict, new: dict, allowed: Allowed) -> list[str]:
    names = [name for name in old if not _is_dropped(name, allowed) and _new_name(name, allowed) not in new]
    return [f"{name} is gone" for name in names]


def _is_dropped(name: str, allowed: Allowed) -> bool:
    """Listed, or part of a class that is."""
    return any(name == gone or name.startswith(f"{gone}.") for gone in allowed.dropped)


def _moved(old: dict, new: dict, allowed: Allowed) -> list[str]:
    kept = [name for name in old if name not in allowed.reshaped]
    kept = [_new_name(name, allowed) for name in kept if not _is_dropped(name, allowed)]
    kept = [name for name in kept if name in new]
    found = [name for name in new if name in set(kept)]
    for was, now in zip(kept, found, strict=True):
        if was != now:
            return [f"{now} stands where {was} stood"]
    return []


def _reparametrised(old: dict, new: dict, allowed: Allowed) -> list[str]:
    problems = []
    for name, parameters in old.items():
        now = new.get(_new_name(name, allowed))
        if now is not None and name not in allowed.reshaped and not _in_order(parameters, now):
            problems.append(f"{name} had the parameters ({', '.join(parameters)}), now ({', '.join(now)})")
    return problems


def _in_order(some: list[str], all_of: list[str]) -> bool:
    """Does `all_of` hold each of `some`, in that order?"""
    rest = iter(all_of)
    return all(item in rest for item in some)


def _idle(old: dict, new: dict, allowed: Allowed) -> list[str]:
    """Exceptions that nothing needs."""
    problems = [f"{name} is listed as dropped, but it is still there" for name in allowed.dropped if name in new]
    listed = [*allowed.dropped, *allowed.renamed, *allowed.reshaped]
    return problems + [f"{name} is listed, but the older file has no such name" for name in listed if name not in old]
