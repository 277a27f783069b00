"""Texts for benchmarks.speculative: answers that repeat their prompt, and answers that do not.

Passages are paragraphs of Python's own reference (pydoc_data.topics), code is functions of its standard library: both
come with the interpreter, so they differ a little from one version of Python to the next.
"""

import ast
import calendar
import colorsys
import csv
import difflib
import fnmatch
import fractions
import glob
import heapq
import inspect
import posixpath
import pprint
import shlex
import shutil
import statistics
import string
import textwrap
import tokenize
from collections.abc import Callable
from itertools import product
from pydoc_data.topics import topics
from types import ModuleType

MODULES = (textwrap, heapq, statistics, shutil, shlex, difflib, calendar, posixpath, fnmatch, csv, colorsys)
MODULES += (fractions, string, ast, inspect, tokenize, pprint, glob)
SHORTEST, LONGEST = 320, 800  # characters of a passage or a function
HEROES = ["a lighthouse keeper", "two sisters", "a retired pilot", "a clockmaker", "a stray dog", "a young baker"]
HEROES += ["a night nurse", "a lost robot", "a fisherman", "a blind painter", "a bus driver"]
PLACES = ["on a frozen lake", "in an old library", "in a desert town", "on a night train", "under the sea"]
PLACES += ["on a mountain pass", "in a flooded city"]


def passages() -> list[str]:
    """Paragraphs of prose, the first of each topic before the second of any."""
    found = [[" ".join(part.split()) for part in topics[name].split("\n\n")] for name in sorted(topics)]
    found = [[part for part in parts if is_prose(part)] for parts in found]
    longest = max(map(len, found))
    return list(dict.fromkeys(parts[i] for i in range(longest) for parts in found if i < len(parts)))


def is_prose(part: str) -> bool:
    return SHORTEST <= len(part) <= LONGEST and part[0].isupper() and part[-1] == "." and "::=" not in part


def functions() -> list[str]:
    """Sources of functions, module by module."""
    found = []
    for module in MODULES:
        own = [value for _, value in inspect.getmembers(module, inspect.isfunction) if is_written_in(value, module)]
        found += [inspect.getsource(value) for value in own]
    return [text for text in dict.fromkeys(found) if SHORTEST <= len(text) <= LONGEST]


def is_written_in(function: Callable, module: ModuleType) -> bool:
    """Some functions come from elsewhere, and some have no source at all."""
    return function.__code__.co_filename == module.__file__


def editing(total: int) -> list[str]:
    """The same text again but for one word, the longest, which lacks a letter."""
    found = []
    for text in passages()[:total]:
        word = max((w for w in text.split() if w.isalpha()), key=len)
        wrong = text.replace(word, word[:-2] + word[-1])
        found.append(f"Correct the spelling of this text and write it out again:\n\n{wrong}")
    return found


def quoting(total: int) -> list[str]:
    """A summary in the words of the text."""
    ask = "Summarize the following text. Quote its most important sentences word for word."
    return [f"{ask}\n\n{text}" for text in passages()[:total]]


def code(total: int) -> list[str]:
    """A function again with one more thing to do: most lines come back."""
    ask = "Rewrite this Python function so that it prints its arguments first. Keep all other lines as they are."
    return [f"{ask}\n\n```python\n{text}```" for text in functions()[:total]]


def stories(total: int) -> list[str]:
    """Free writing: nothing to copy from."""
    pairs = sorted(product(HEROES, PLACES), key=lambda pair: (HEROES.index(pair[0]) + PLACES.index(pair[1])) % 11)
    ask = "Write a short story about {} {}, in which no sentence is like another."
    return [ask.format(*pair) for pair in pairs[:total]]


KINDS: dict[str, Callable[[int], list[str]]] = {
    "editing": editing,
    "quoting": quoting,
    "code": code,
    "stories": stories,
}


def prompts(kind: str, total: int) -> list[str]:
    """So many different prompts of a kind. Raises ValueError if there are not so many."""
    found = KINDS[kind](total)
    if len(found) < total:
        raise ValueError(f"{total} texts of the kind {kind!r}: there are only {len(found)}")
    return found


def repeated(prompt: list[int], output: list[int], size: int = 3) -> float:
    """Of the output's n-grams, the share that stood in prompt or output before: what look-up could find at most."""
    tokens, seen, again = prompt + output, set(), 0
    for end in range(size, len(tokens) + 1):
        gram = tuple(tokens[end - size : end])
        again += end > len(prompt) and gram in seen
        seen.add(gram)
    return again / max(1, len(output))
