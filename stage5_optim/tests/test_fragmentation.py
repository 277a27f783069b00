"""The simulation of external fragmentation: holes are real, and blocks have none."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..fragmentation import Contiguous, Paged, Stay, compare, simulate, workload
from .script import PACKAGE, ROOT


def test_a_hole_is_too_small_though_enough_is_free():
    """A, B, C fill the memory; A and C leave: 60 are free, and 40 fit nowhere in one piece."""
    memory = Contiguous(100)
    stays = [Stay(name, tokens, 1) for name, tokens in (("A", 30), ("B", 40), ("C", 30))]
    assert all(memory.take(stay) for stay in stays)
    memory.give_back(stays[0])
    memory.give_back(stays[2])
    assert memory.holes() == [(0, 30), (70, 100)] and memory.num_free == 60
    assert not memory.take(Stay("D", 40, 1)) and memory.take(Stay("E", 30, 1))
    assert memory.owners(10) == "EEEBBBB..."


@given(st.integers(0, 10_000))
def test_pieces_and_holes_fill_the_memory(seed):
    """Nothing is lost and nothing overlaps, whatever comes and goes."""
    memory, inside = Contiguous(600), []
    for stay in workload(30, seed):
        if memory.take(stay):
            inside.append(stay)
        elif inside:
            memory.give_back(inside.pop(seed % len(inside)))
        spans = sorted([*memory.pieces.values(), *memory.holes()])
        assert spans[0][0] == 0 and spans[-1][1] == 600
        assert all(a[1] == b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_wait_only_when_nothing_is_free(seed):
    """The same requests: contiguous pieces make them wait beside free memory, blocks do not, and are done earlier."""
    contiguous, paged = compare(2048, 16, 100, seed).values()
    assert contiguous.blocked_steps > 50 and contiguous.worst_free >= contiguous.worst_wants
    assert paged.blocked_steps == 0 and paged.steps < contiguous.steps


def test_all_memory_is_free_at_the_end():
    """Whoever came has left."""
    memory = Paged(2048, 16)
    assert simulate(memory, workload(50, 1), 16).steps > 50
    memory.manager.check_integrity()
    assert memory.num_free == 2048 and not memory.names


def test_the_command_prints_both():
    """As a learner calls it."""
    command = [sys.executable, "-m", f"{PACKAGE}.fragmentation", "--requests", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "contiguous pieces:" in done.stdout and "blocks of 16:" in done.stdout and "are free (.)" in done.stdout
