"""The block manager alone, without a tensor: who holds which blocks, who gets a copy, and what is refused.

The last test plays any sequence of calls against a naive model, in which a sequence's blocks are Python lists and
sharing a block means holding the same list.
"""

import copy
import time
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ..block_manager import LOG_LENGTH, BlockManager
from ..block_pool import BlockPool, BlockTable, DoubleFreeError, IntegrityError, OutOfBlocksError
from ..intake import check_fits_pool

B = 16  # tokens of a block, where a test does not choose its own


def snapshot(manager: BlockManager) -> object:
    """All that a call may change: free lists with their order, ref counts, tables, log."""
    pools = [(list(pool.free), list(pool.ref_counts), copy.deepcopy(pool.tables)) for pool in pools_of(manager)]
    return pools, list(manager.allocation_log)


def pools_of(manager: BlockManager) -> tuple[BlockPool, BlockPool]:
    return manager._pool, manager._host


def family(manager: BlockManager, prompt_len: int, names: str = "abc") -> list[str]:
    """Samples of one prompt: the first has its blocks, the others fork from it."""
    manager.allocate(names[0], prompt_len)
    for name in names[1:]:
        manager.fork(names[0], name)
    return list(names)


def sharing(manager: BlockManager, pool: BlockPool, seq_ids: list[str]) -> list[list[int]]:
    """Tables with their blocks numbered in the order of first sight: the same for tables that share alike."""
    seen: dict[int, int] = {}
    return [[seen.setdefault(block, len(seen)) for block in pool.tables[seq_id].blocks] for seq_id in seq_ids]


# sizes


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_around_a_boundary(block_size):
    """One token too many needs a block more, one too few none less: the place of every off-by-one."""
    manager = BlockManager(8, block_size)
    wanted = {0: 0, 1: 1, block_size: 1, block_size + 1: 2, 2 * block_size: 2, 2 * block_size + 1: 3}
    assert {tokens: manager.blocks_for(tokens) for tokens in wanted} == wanted
    if block_size > 1:
        assert manager.blocks_for(block_size - 1) == 1
    for tokens, blocks in wanted.items():
        manager.allocate(f"with {tokens}", tokens)
        assert len(manager.block_table(f"with {tokens}")) == blocks
        manager.free(f"with {tokens}")


@pytest.mark.parametrize("prompt_len", [B - 1, B, B + 1])
def test_growing_over_a_boundary_takes_one_block(prompt_len):
    """A block is taken when a token needs it and not before: 16 tokens decode without a request for memory."""
    manager = BlockManager(8, B)
    manager.allocate("a", prompt_len)
    taken = []
    for length in range(prompt_len + 1, prompt_len + 2 * B + 1):
        before = manager.num_free_blocks
        assert manager.grow({"a": length}) == []
        taken += [length] * (before - manager.num_free_blocks)
        manager.check_integrity()
    assert taken == [length for length in range(prompt_len + 1, prompt_len + 2 * B + 1) if length % B == 1]


def test_growing_to_fewer_tokens_changes_nothing():
    """The scheduler asks for room that is there already at every step of a prompt in pieces."""
    manager = BlockManager(4, B)
    family(manager, 20, "ab")
    before = snapshot(manager)
    assert manager.num_blocks_to_grow({"a": 20, "b": 7}) == 0
    assert manager.grow({"a": 20, "b": 7}) == []
    assert snapshot(manager) == before


@pytest.mark.parametrize("prompt_len, new", [(1, 30), (B, 1), (B, 5), (B + 1, 3), (3 * B - 1, 20)])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_samples_need_what_is_reckoned_for_them(prompt_len, new, n):
    """Admission trusts this number: too small and the group is preempted at once, too large and it waits in vain."""
    manager = BlockManager(64, B)
    names = family(manager, prompt_len, "abcd"[:n])
    manager.grow(dict.fromkeys(names, prompt_len + new))
    taken = manager.num_blocks - manager.num_free_blocks
    assert manager.blocks_for_samples(prompt_len, [prompt_len + new] * n) == taken


# running out


def test_running_out_changes_nothing_and_is_survived_a_hundred_times():
    """A call that takes some blocks before it finds too few leaks them: the pool shrinks with every refusal."""
    manager = BlockManager(8, B)
    for _ in range(100):
        manager.allocate("a", 6 * B)
        manager.fork("a", "b")
        before = snapshot(manager)
        with pytest.raises(OutOfBlocksError, match=r"3 blocks are needed, 2 of 8 are free"):
            manager.allocate("c", 2 * B + 1)
        with pytest.raises(OutOfBlocksError, match=r"4 blocks are needed, 2 of 8 are free"):
            manager.grow({"a": 7 * B, "b": 9 * B})
        assert snapshot(manager) == before
        manager.check_integrity()
        manager.grow({"a": 7 * B, "b": 7 * B})
        assert manager.num_free_blocks == 0
        with pytest.raises(OutOfBlocksError, match=r"1 blocks are needed, 0 of 8 are free"):
            manager.grow({"a": 7 * B + 1})
        manager.free("a")
        manager.free("b")
        manager.check_integrity()
        assert manager.num_free_blocks == 8
    assert sorted(manager._pool.free) == list(range(8))


def test_running_out_at_a_copy_changes_nothing():
    """Copy-on-write needs a free block too, though no table gets longer: with none free the shared block must stay."""
    manager = BlockManager(2, B)
    family(manager, B + 3, "ab")
    before = snapshot(manager)
    assert manager.num_blocks_to_grow({"a": B + 4}) == 1
    with pytest.raises(OutOfBlocksError):
        manager.grow({"a": B + 4, "b": B + 4})
    assert snapshot(manager) == before
    manager.free("b")
    assert manager.grow({"a": B + 4}) == []


def test_an_empty_pool_says_so():
    """`take` on an empty free list must be the named error: a KeyError would pass for a bug somewhere else."""
    pool = BlockPool(2)
    assert [pool.take(), pool.take()] == [0, 1]
    with pytest.raises(OutOfBlocksError, match="all 2 blocks are taken"):
        pool.take()


# fork and copy-on-write


@pytest.mark.parametrize("prompt_len", [1, B, 8 * B + 1])
def test_fork_takes_no_block(prompt_len):
    """Samples share the prompt's blocks: a fork that copies them makes n samples cost n prompts."""
    manager = BlockManager(16, B)
    manager.allocate("a", prompt_len)
    before, table = manager.num_free_blocks, manager.block_table("a")
    manager.fork("a", "b")
    manager.fork("b", "c")
    assert manager.num_free_blocks == before
    assert manager.block_table("b") == manager.block_table("c") == table
    assert [manager.ref_count(block) for block in table] == [3] * len(table)
    manager.check_integrity()


@pytest.mark.parametrize("writer, other", ["ab", "ba"])
@pytest.mark.parametrize("new", [1, B, 8 * B + 1])
@pytest.mark.parametrize("prompt_len", [1, B, 8 * B + 1])
def test_the_first_to_write_gets_a_copy_and_the_last_does_not(prompt_len, new, writer, other):
    """Parent or child, whoever writes first into a shared block must not be read by the other. A full block is never
    written again, so copying it would be waste; and whoever is left alone may write in place."""
    manager = BlockManager(64, B)
    family(manager, prompt_len, "ab")
    prompt = manager.block_table("a")
    copies = manager.grow({writer: prompt_len + new})
    tail = len(prompt) - 1
    partly_filled = prompt_len % B > 0
    assert copies == ([(prompt[tail], manager.block_table(writer)[tail])] if partly_filled else [])
    assert manager.block_table(other) == prompt
    shared = prompt[:tail] if partly_filled else prompt
    assert manager.block_table(writer)[: len(shared)] == shared
    assert [manager.ref_count(block) for block in shared] == [2] * len(shared)
    assert manager.ref_count(prompt[tail]) == (1 if partly_filled else 2)
    manager.check_integrity()

    assert manager.grow({other: prompt_len + new}) == []
    assert manager.block_table(other)[: len(prompt)] == prompt
    own = [set(manager.block_table(name)[len(shared) :]) for name in "ab"]
    assert not own[0] & own[1], "both write into the same block"
    manager.check_integrity()


@pytest.mark.parametrize("together", [True, False])
def test_three_samples_make_two_copies(together):
    """The last holder writes in place, whether all grow in one call or one after the other: n samples, n - 1 copies."""
    manager = BlockManager(16, B)
    names = family(manager, B + 5)
    head, tail = manager.block_table("a")
    calls = [dict.fromkeys(names, B + 6)] if together else [{name: B + 6} for name in names]
    assert sum(manager.num_blocks_to_grow(call) for call in calls[:1]) == (2 if together else 1)
    copies = [pair for call in calls for pair in manager.grow(call)]
    assert [source for source, _ in copies] == [tail, tail]
    assert [target for _, target in copies] == [manager.block_table("a")[1], manager.block_table("b")[1]]
    assert manager.block_table("c") == [head, tail]
    assert manager.ref_count(head) == 3 and manager.ref_count(tail) == 1
    manager.check_integrity()


def test_whoever_stays_alone_needs_no_copy():
    """After the others have finished the tail belongs to one: a copy would cost a block and time for nothing."""
    manager = BlockManager(4, B)
    family(manager, 5)
    manager.free("a")
    manager.free("c")
    assert manager.num_blocks_to_grow({"b": 6}) == 0
    assert manager.grow({"b": 6}) == []
    assert manager.num_free_blocks == 3


def test_a_table_that_is_handed_out_is_a_copy():
    """A caller that edits what it was shown must not edit the table itself."""
    manager = BlockManager(4, B)
    manager.allocate("a", 20)
    manager.block_table("a").append(99)
    assert manager.block_table("a") == [0, 1]
    with pytest.raises(KeyError):
        manager.block_table("nobody")


def test_the_table_itself_follows_what_happens():
    """Attention reads the table that the manager keeps: a stale copy would send new tokens to old places."""
    manager = BlockManager(4, B)
    manager.allocate("a", 3)
    assert isinstance(manager.table("a"), BlockTable)
    manager.grow({"a": B + 1})
    assert manager.table("a").blocks == manager.block_table("a") == [0, 1]


# giving back


def test_a_second_free_is_refused_and_changes_nothing():
    """A block that is twice in the free list is handed to two requests, and each reads the other's text."""
    manager = BlockManager(4, B)
    family(manager, 20, "ab")
    manager.free("a")
    before = snapshot(manager)
    with pytest.raises(DoubleFreeError, match="'a' has no blocks"):
        manager.free("a")
    with pytest.raises(DoubleFreeError, match="'nobody' has no blocks"):
        manager.free("nobody")
    assert snapshot(manager) == before
    manager.free("b")
    with pytest.raises(DoubleFreeError, match="'b' has no blocks"):
        manager.free("b")
    manager.check_integrity()
    assert sorted(manager._pool.free) == [0, 1, 2, 3]


def test_a_block_is_given_back_as_often_as_it_is_held():
    """Held twice it is free after the second time; the third time is a named error, not a negative ref count."""
    pool = BlockPool(3)
    block = pool.take()
    pool.share(block)
    pool.give_back(block)
    assert list(pool.free) == [1, 2] and pool.ref_counts == [1, 0, 0]
    pool.give_back(block)
    assert list(pool.free) == [1, 2, 0]
    for _ in range(2):
        with pytest.raises(DoubleFreeError, match="block 0 is free already"):
            pool.give_back(block)
        assert list(pool.free) == [1, 2, 0] and pool.ref_counts == [0, 0, 0]
    with pytest.raises(DoubleFreeError, match="block 1 is free already"):
        pool.give_back(1)


def test_a_table_is_given_back_from_its_tail():
    """The free list is used from the front: heads, which others are most likely to want again, are overwritten last."""
    manager = BlockManager(6, B)
    manager.allocate("a", 4 * B)
    assert manager.block_table("a") == [0, 1, 2, 3]
    manager.free("a")
    assert list(manager._pool.free) == [4, 5, 3, 2, 1, 0]
    manager.allocate("b", 3 * B)
    assert manager.block_table("b") == [4, 5, 3]


def test_what_others_hold_stays_taken():
    """Of a fork only its own blocks come back: freeing the shared ones would take them from under the others."""
    manager = BlockManager(8, B)
    family(manager, 2 * B, "ab")
    manager.grow({"a": 3 * B, "b": 3 * B})
    manager.free("a")
    assert manager.block_table("b") == [0, 1, 3]
    assert list(manager._pool.free) == [4, 5, 6, 7, 2]
    manager.check_integrity()


def test_a_free_block_is_taken_out_of_the_middle():
    """What still holds the right tokens may be wanted again while it is free: the free list must not keep it."""
    pool = BlockPool(5)
    assert pool.share(2) == 2
    assert list(pool.free) == [0, 1, 3, 4] and pool.ref_counts == [0, 0, 1, 0, 0]
    assert pool.share(2) == 2 and pool.ref_counts[2] == 2
    assert [pool.take() for _ in range(4)] == [0, 1, 3, 4]
    pool.give_back(2)
    assert list(pool.free) == []
    pool.give_back(2)
    assert list(pool.free) == [2]


def test_taking_out_of_the_middle_does_not_search():
    """A pool has 100,000 blocks: a list that is searched for each of them would need minutes here."""
    pool, start = BlockPool(100_000), time.perf_counter()
    for block in range(50_000, 100_000):
        pool.share(block)
    for block in range(50_000, 100_000):
        pool.give_back(block)
    assert time.perf_counter() - start < 5
    assert pool.take() == 0 and len(pool.free) == 99_999


def test_a_second_table_for_the_same_name_is_refused():
    """It would replace the first one, whose blocks nobody could give back any more."""
    manager = BlockManager(8, B, num_swap_blocks=8)
    family(manager, 4, "ab")
    manager.swap_out(["b"])
    for name in "ab":
        with pytest.raises(AssertionError, match="has a block table already"):
            manager.allocate(name, 4)
    with pytest.raises(AssertionError, match="has a block table already"):
        manager.fork("a", "b")


def test_what_is_not_written_is_given_back_from_the_tail():
    """A prompt has all its blocks from the start; of those behind its last computed token nobody would miss a thing."""
    manager = BlockManager(8, B)
    manager.allocate("a", 5 * B)
    manager.shrink("a", 2 * B + 1)
    assert manager.block_table("a") == [0, 1, 2] and list(manager._pool.free) == [5, 6, 7, 4, 3]
    manager.check_integrity()
    before = snapshot(manager)
    manager.shrink("a", 2 * B + 1)
    manager.shrink("a", 7 * B)
    assert snapshot(manager) == before, "there is nothing to give back, and nothing to log"
    assert manager.grow({"a": 3 * B}) == [] and manager.num_free_blocks == 5
    manager.grow({"a": 3 * B + 1})
    assert manager.block_table("a") == [0, 1, 2, 5]
    manager.fork("a", "b")
    manager.shrink("a", 0)
    assert manager.num_free_blocks == 4 and manager.allocation_log[-1].blocks == 0, "b still has all of them"
    manager.check_integrity()


# swap


def swapped_family(host: int = 16) -> tuple[BlockManager, list[str]]:
    """Three samples with two shared blocks, of which two have a tail of their own; and a neighbour on the device."""
    manager = BlockManager(16, B, host)
    manager.allocate("neighbour", 2 * B)
    names = family(manager, 2 * B + 3)
    manager.grow({"a": 2 * B + 4, "b": 3 * B + 1})
    return manager, names


def test_swapping_out_and_in_keeps_what_is_shared():
    """Shared blocks go once and come back shared: otherwise n samples return with n prompts, which may not fit."""
    manager, names = swapped_family()
    shape, free = sharing(manager, manager._pool, names), manager.num_free_blocks
    tables = {name: manager.block_table(name) for name in names}
    neighbour = manager.block_table("neighbour")

    out = manager.swap_out(names)
    distinct = list(dict.fromkeys(block for name in names for block in tables[name]))
    assert [source for source, _ in out] == distinct, "each block once"
    assert len({target for _, target in out}) == len(out)
    assert manager.num_free_blocks == 14 and manager.num_free_swap_blocks == 16 - len(distinct)
    assert sharing(manager, manager._host, names) == shape
    assert all(manager.holds(name) and manager.is_swapped(name) for name in names)
    assert not manager.is_swapped("neighbour") and manager.block_table("neighbour") == neighbour
    with pytest.raises(KeyError):
        manager.block_table("a")
    manager.check_integrity()

    assert manager.num_blocks_to_swap_in(names) == len(distinct)
    back = manager.swap_in(names)
    assert [source for source, _ in back] == [target for _, target in out]
    assert manager.num_free_blocks == free and manager.num_free_swap_blocks == 16
    assert sharing(manager, manager._pool, names) == shape
    assert not any(manager.is_swapped(name) for name in names)
    manager.check_integrity()


def test_swapping_gives_a_table_back_from_its_tail():
    """The free list is ordered here as it is after `free`: the head of a prompt is overwritten last."""
    manager = BlockManager(5, B, 3)
    manager.allocate("a", 3 * B)
    manager.swap_out(["a"])
    assert list(manager._pool.free) == [3, 4, 2, 1, 0]
    manager.swap_in(["a"])
    assert manager.block_table("a") == [3, 4, 2] and list(manager._host.free) == [2, 1, 0]


def test_a_block_that_came_back_holds_the_same_tokens():
    """The pairs say where each block went: exchanged source and target, or pairs of two tables mixed up, lose text."""
    manager, names = swapped_family()
    memory = {block: f"block {i} of {name}" for name in names for i, block in enumerate(manager.block_table(name))}
    before = {name: [memory[block] for block in manager.block_table(name)] for name in names}
    host = {target: memory[source] for source, target in manager.swap_out(names)}
    manager.allocate("somebody else", 5 * B)  # the freed blocks are used
    memory = {target: host[source] for source, target in manager.swap_in(names)}
    assert {name: [memory[block] for block in manager.block_table(name)] for name in names} == before


def test_a_swap_that_does_not_fit_changes_nothing():
    """Half a sequence on the host is lost: the blocks are counted before the first one moves."""
    manager, names = swapped_family(host=5)
    assert manager.can_swap_out(names[:1]) and not manager.can_swap_out(names)
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError, match=r"6 blocks are needed, 5 of 5 are free"):
        manager.swap_out(names)
    assert snapshot(manager) == before

    manager, names = swapped_family()
    assert manager.can_swap_out(names)
    manager.swap_out(names)
    manager.allocate("big", 9 * B)
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError, match=r"6 blocks are needed, 5 of 16 are free"):
        manager.swap_in(names)
    assert snapshot(manager) == before
    manager.free("big")
    manager.swap_in(names)
    manager.check_integrity()


def test_a_host_pool_of_exactly_the_right_size_is_enough():
    """Counting a shared block once per table would send a group to be recomputed that fits."""
    manager, names = swapped_family(host=6)
    assert manager.can_swap_out(names)
    manager.swap_out(names)
    assert manager.num_free_swap_blocks == 0
    assert not manager.can_swap_out(["neighbour"])


def test_room_to_grow_is_reckoned_on_the_host_too():
    """Before a swapped request returns, the scheduler must know what it takes in all: its blocks, and its next ones."""
    manager = BlockManager(32, B, 32)
    names = family(manager, 2 * B + 3)
    lengths = {"a": 2 * B + 4, "b": 3 * B + 1, "c": 2 * B + 4}
    on_device = manager.num_blocks_to_grow(lengths)
    manager.swap_out(names)
    assert manager.num_blocks_to_grow(lengths) == on_device == 2 + 1  # two copies, and a block for b
    manager.swap_in(names)
    before = manager.num_free_blocks
    assert len(manager.grow(lengths)) == 2
    assert before - manager.num_free_blocks == on_device


def test_blocks_on_the_host_can_be_given_back():
    """A swapped request that is aborted must not keep its place on the host for ever."""
    manager, names = swapped_family()
    manager.swap_out(names)
    for name in names:
        manager.free(name, "aborted")
    assert manager.num_free_swap_blocks == 16 and not manager.holds("a")
    assert [line.blocks for line in list(manager.allocation_log)[-3:]] == [0, 0, 0]  # none of the device's
    with pytest.raises(DoubleFreeError):
        manager.free("a")
    manager.check_integrity()


# the allocation log


def test_the_log_says_who_took_how_many_blocks_when():
    """When memory runs out the first question is who took it. Each line is checked against a story told by hand."""
    manager = BlockManager(8, B, 4)
    manager.step = 1
    manager.allocate("a", 2 * B + 1)
    manager.step = 2
    manager.fork("a", "b")
    manager.grow({"a": 2 * B + 2, "b": 3 * B + 1})
    manager.step = 3
    manager.free("a")
    manager.swap_out(["b"])
    manager.step = 4
    manager.swap_in(["b"])
    manager.free("b", "aborted")
    lines = [(line.step, line.seq_id, line.blocks, line.num_free_blocks, line.why) for line in manager.allocation_log]
    assert lines == [
        (1, "a", 3, 5, "prompt"),
        (2, "b", 0, 5, "fork"),
        (2, "a", 1, 4, "copy-on-write"),
        (2, "b", 1, 3, "growth"),
        (3, "a", -1, 4, "finished"),
        (3, "b", -4, 8, "swapped out"),
        (4, "b", 4, 4, "swapped in"),
        (4, "b", -4, 8, "aborted"),
    ]


def test_blocks_taken_names_the_greediest_first():
    """Only what was taken counts, and only in the steps that were asked for: what came back later explains nothing."""
    manager = BlockManager(64, B)
    for step, (seq_id, blocks) in enumerate([("small", 2), ("huge", 20), ("middle", 9), ("small", 8)]):
        manager.step = step
        if manager.holds(seq_id):
            manager.grow({seq_id: blocks * B})
        else:
            manager.allocate(seq_id, blocks * B)
    manager.step = 4
    manager.free("huge")
    assert list(manager.blocks_taken(0, 9).items()) == [("huge", 20), ("middle", 9), ("small", 8)]
    assert manager.blocks_taken(2, 3) == {"middle": 9, "small": 6}
    assert manager.blocks_taken(4, 4) == {}


def test_the_log_forgets_its_oldest_lines():
    """A server runs for weeks: a log that only grows is a leak."""
    assert BlockManager(1, B).allocation_log.maxlen == LOG_LENGTH <= 1_000_000


# integrity


def wrong_ref_count(pool: BlockPool) -> None:
    pool.ref_counts[0] += 1


def lost_reference(pool: BlockPool) -> None:
    pool.ref_counts[0] -= 1


def free_while_held(pool: BlockPool) -> None:
    pool.free[0] = None


def neither_free_nor_held(pool: BlockPool) -> None:
    pool.free.popitem()


def held_by_nobody(pool: BlockPool) -> None:
    block = next(iter(pool.free))
    del pool.free[block]
    pool.ref_counts[block] = 1


def table_too_short(pool: BlockPool) -> None:
    pool.give_back(pool.tables["own"].blocks.pop())


def table_too_long(pool: BlockPool) -> None:
    pool.tables["own"].blocks.append(pool.take())


def table_with_more_tokens(pool: BlockPool) -> None:
    pool.tables["own"].num_tokens += B


def block_twice_in_a_table(pool: BlockPool) -> None:
    blocks = pool.tables["own"].blocks
    pool.give_back(blocks[1])
    blocks[1] = pool.share(blocks[0])


def written_while_shared(pool: BlockPool) -> None:
    pool.tables["a"].num_tokens += 1


DAMAGES = [
    (wrong_ref_count, "block 0: ref count"),
    (lost_reference, "block 0: ref count"),
    (free_while_held, "block 0: ref count"),
    (neither_free_nor_held, "ref count 0, in 0 tables, free: False"),
    (held_by_nobody, "ref count 1, in 0 tables"),
    (table_too_short, "the table of 'own' for 20 tokens"),
    (table_too_long, "the table of 'own' for 20 tokens"),
    (table_with_more_tokens, "the table of 'own' for 36 tokens"),
    (block_twice_in_a_table, "the table of 'own' for 20 tokens"),
    (written_while_shared, "block 1 is shared, with 4 and with 3 tokens in it"),
]


@pytest.mark.parametrize("side", ["device", "host"])
@pytest.mark.parametrize("damage, message", DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_every_kind_of_damage_is_noticed(damage, message, side):
    """The other tests lean on check_integrity: one that overlooks a kind of damage makes them all blind to it."""
    manager = BlockManager(12, B, 12)
    family(manager, B + 3, "ab")
    manager.allocate("own", 20)
    if side == "host":
        manager.swap_out(["a", "b", "own"])
    manager.check_integrity()
    damage(pools_of(manager)[side == "host"])
    with pytest.raises(IntegrityError, match=message):
        manager.check_integrity()


@pytest.mark.parametrize("side", ["device", "host"])
@pytest.mark.parametrize(
    "damage", [wrong_ref_count, lost_reference, free_while_held, neither_free_nor_held, held_by_nobody]
)
def test_recount_mends_what_an_interruption_leaves(damage, side):
    """Ctrl-C may come between two lines that belong together. The tables say who holds what; the counts follow them,
    and whoever was free before keeps its place in the free list."""
    manager = BlockManager(12, B, 12)
    family(manager, B + 3, "ab")
    manager.allocate("own", 20)
    if side == "host":
        manager.swap_out(["a", "b", "own"])
    before = snapshot(manager)
    damage(pools_of(manager)[side == "host"])
    manager.recount()
    manager.check_integrity()
    if damage is not held_by_nobody:
        assert snapshot(manager) == before
    for name in ("a", "b", "own"):
        manager.free(name)
    assert manager.num_free_blocks == manager.num_free_swap_blocks == 12
    manager.check_integrity()


# what can never be served


def fits(
    prompt_len: int, max_tokens: int | None, n: int = 1, room: int = 1000, cap: int | None = None, blocks: int = 6
) -> int:
    return check_fits_pool(prompt_len, max_tokens, room, n, BlockManager(blocks, 4), cap)


def test_the_last_token_needs_no_place():
    """24 places: a prompt of 8 and 17 tokens just fit, because nothing is computed after the last one. Not 18."""
    assert fits(8, 17) == 17
    with pytest.raises(ValueError, match=r"n=1 samples of 8 prompt tokens and up to 18 new ones need 7 KV blocks of 4"):
        fits(8, 18)
    with pytest.raises(ValueError, match=r"up to 21 new ones need 7 KV blocks"):
        fits(8, 21)
    assert fits(24, 1) == 1
    with pytest.raises(ValueError, match=r"25 prompt tokens and up to 1 new ones need 7 .* the pool has 6"):
        fits(25, 1)


def test_none_fills_what_there_is():
    """max_tokens=None takes what context and blocks leave, and is refused only if not even one token fits."""
    assert fits(8, None) == 17
    assert fits(8, None, room=10) == 10
    assert fits(24, None) == 1
    assert fits(8, None, cap=3) == 5
    with pytest.raises(ValueError, match="up to 1 new ones"):
        fits(25, None)


def test_the_context_limits_what_must_fit():
    """A context of 20 tokens never needs blocks for 1000, whatever max_tokens says."""
    assert fits(8, 1000, room=12) == 12
    with pytest.raises(ValueError, match="up to 18 new ones"):
        fits(8, 1000, room=18)


def test_a_cap_per_sequence_refuses_by_its_name():
    """max_blocks_per_seq keeps one huge prompt from taking the pool; the message must say which limit it was."""
    assert fits(8, 9, cap=4) == 9
    with pytest.raises(ValueError, match=r"need 5 KV blocks of 4 tokens, but max_blocks_per_seq=4 allows"):
        fits(8, 10, cap=4)
    with pytest.raises(ValueError, match=r"the pool has 6; shorten"):
        fits(8, 18, cap=7)
    with pytest.raises(ValueError, match=r"the pool has 6; shorten"):
        fits(8, 18, cap=6)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 9])
def test_samples_are_taken_exactly_up_to_what_fits_alone(prompt_len, n):
    """Refused too early a request is lost that would run; too late it waits for ever, and all behind it."""
    for blocks in range(1, 12):
        for new in range(2, 16):
            assert is_taken(prompt_len, new, n, blocks) == really_fits(prompt_len, new, n, blocks), (blocks, new)
        asked_at_admission = BlockManager(blocks, 4).blocks_for_samples(prompt_len, [prompt_len] * n)
        assert is_taken(prompt_len, 1, n, blocks) == (asked_at_admission <= blocks)


def really_fits(prompt_len: int, new: int, n: int, blocks: int) -> bool:
    """Tried out: n samples side by side, each with all that it computes."""
    manager = BlockManager(blocks, 4)
    try:
        names = family(manager, prompt_len, "abc"[:n])
        manager.grow(dict.fromkeys(names, prompt_len + new - 1))
    except OutOfBlocksError:
        return False
    return True


def is_taken(prompt_len: int, new: int, n: int, blocks: int) -> bool:
    try:
        return fits(prompt_len, new, n, blocks=blocks) == new
    except ValueError:
        return False


# any sequence of calls, against a naive model


class AnyCalls(RuleBasedStateMachine):
    """The naive model: a sequence is a list of pages, a page is a list of tokens, a shared page is the same list.

    `memory` and `host` are what a runner would keep: blocks of tokens, changed by the returned pairs and by writing new
    tokens through the table. Reading a sequence back through its table must give its pages.
    """

    def __init__(self):
        super().__init__()
        self.size = 4
        self.manager = BlockManager(12, self.size, 7)
        self.pages: dict[str, list[list[int]]] = {}  # on the device
        self.away: dict[str, list[list[int]]] = {}  # on the host
        self.memory = {block: [None] * self.size for block in range(12)}
        self.host = {block: [None] * self.size for block in range(7)}
        self.next_token = 0

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def length(self, name: str) -> int:
        return sum(len(page) for page in {**self.pages, **self.away}[name])

    def append(self, name: str, tokens: list[int]) -> int:
        """Write as a sequence would, into model and memory alike. Returns how many pages were copied."""
        position, copied, pages = self.length(name), 0, self.pages[name]
        is_shared = any(pages[-1] is other[-1] for key, other in self.pages.items() if key != name and other)
        if len(pages[-1]) < self.size and is_shared:
            pages[-1], copied = list(pages[-1]), 1
        for token in tokens:
            if len(pages[-1]) == self.size:
                pages.append([])
            pages[-1].append(token)
            block = self.manager.block_table(name)[position // self.size]
            self.memory[block][position % self.size] = token
            position += 1
        return copied

    @rule(name=st.sampled_from("pqr"), count=st.integers(1, 14))
    def allocate(self, name, count):
        if self.manager.holds(name):
            return
        if self.manager.blocks_for(count) > self.manager.num_free_blocks:
            return self.refused(self.manager.allocate, name, count)
        self.manager.allocate(name, count)
        self.pages[name] = [[]]
        self.append(name, self.new_tokens(count))

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), child=st.sampled_from("stuv"))
    def fork(self, data, child):
        if self.manager.holds(child):
            return
        parent = data.draw(st.sampled_from(sorted(self.pages)))
        free = self.manager.num_free_blocks
        self.manager.fork(parent, child)
        assert self.manager.num_free_blocks == free
        self.pages[child] = list(self.pages[parent])

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), counts=st.lists(st.integers(0, 6), min_size=7, max_size=7))
    def grow(self, data, counts):
        names = data.draw(st.lists(st.sampled_from(sorted(self.pages)), min_size=1, unique=True))
        lengths = {name: self.length(name) + count for name, count in zip(names, counts, strict=False)}
        needed, free = self.manager.num_blocks_to_grow(lengths), self.manager.num_free_blocks
        if needed > free:
            return self.refused(self.manager.grow, lengths)
        copies = self.manager.grow(lengths)
        assert free - self.manager.num_free_blocks == needed
        before = {source: list(self.memory[source]) for source, _ in copies}
        for source, target in copies:
            self.memory[target] = list(before[source])
        copied = sum(self.append(name, self.new_tokens(c)) for name, c in zip(names, counts, strict=False) if c)
        assert copied == len(copies)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def shrink(self, data):
        """To the end of a page, or of what there is: in the middle of a shared page its holders would disagree."""
        name = data.draw(st.sampled_from(sorted(self.pages)))
        count = data.draw(st.integers(1, len(self.pages[name])))
        self.manager.shrink(name, count * self.size)
        del self.pages[name][count:]

    @precondition(lambda self: self.pages or self.away)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted({**self.pages, **self.away})))
        self.manager.free(name)
        self.pages.pop(name, None)
        self.away.pop(name, None)
        self.refused(self.manager.free, name, error=DoubleFreeError)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def swap_out(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.pages)), min_size=1, unique=True))
        distinct = {block for name in names for block in self.manager.block_table(name)}
        assert self.manager.can_swap_out(names) == (len(distinct) <= self.manager.num_free_swap_blocks)
        if not self.manager.can_swap_out(names):
            return self.refused(self.manager.swap_out, names)
        for source, target in self.manager.swap_out(names):
            self.host[target] = list(self.memory[source])
        self.away |= copy.deepcopy({name: self.pages.pop(name) for name in names})

    @precondition(lambda self: self.away)
    @rule(data=st.data(), count=st.integers(0, 6))
    def swap_in(self, data, count):
        names = data.draw(st.lists(st.sampled_from(sorted(self.away)), min_size=1, unique=True))
        if self.manager.num_blocks_to_swap_in(names) > self.manager.num_free_blocks:
            return self.refused(self.manager.swap_in, names)
        lengths = {name: self.length(name) + count for name in self.away}
        to_grow = self.manager.num_blocks_to_grow(lengths)
        for source, target in self.manager.swap_in(names):
            self.memory[target] = list(self.host[source])
        if len(names) == len(self.away):
            assert self.manager.num_blocks_to_grow(lengths) == to_grow, "what was reckoned on the host holds afterwards"
        self.pages |= copy.deepcopy({name: self.away.pop(name) for name in names})

    def refused(self, call, *arguments, error=OutOfBlocksError):
        before = snapshot(self.manager)
        with pytest.raises(error):
            call(*arguments)
        assert snapshot(self.manager) == before

    @invariant()
    def tables_are_like_pages(self):
        """A block for every page, and the same block exactly where it is the same page."""
        for pool, tables in zip(pools_of(self.manager), (self.pages, self.away), strict=True):
            assert pool.tables.keys() == tables.keys()
            pairs = set()
            for name, pages in tables.items():
                blocks = pool.tables[name].blocks
                assert len(blocks) == len(pages)
                pairs |= {(block, id(page)) for block, page in zip(blocks, pages, strict=True)}
            assert len(pairs) == len({block for block, _ in pairs}) == len({page for _, page in pairs})
            assert pool.num_blocks - len(pool.free) == len(pairs)

    @invariant()
    def everybody_reads_its_own_tokens(self):
        places = (self.pages, self.memory), (self.away, self.host)
        for pool, (tables, memory) in zip(pools_of(self.manager), places, strict=True):
            for name, pages in tables.items():
                for block, page in zip(pool.tables[name].blocks, pages, strict=True):
                    assert memory[block][: len(page)] == page

    @invariant()
    def the_log_adds_up(self):
        log = self.manager.allocation_log
        assert sum(line.blocks for line in log) == self.manager.num_blocks - self.manager.num_free_blocks
        assert not log or log[-1].num_free_blocks == self.manager.num_free_blocks
        taken = Counter()
        for line in log:
            taken[line.seq_id] += max(line.blocks, 0)
        assert self.manager.blocks_taken(0, 0) == {name: blocks for name, blocks in taken.items() if blocks}

    @invariant()
    def integrity(self):
        self.manager.check_integrity()
        for block, count in Counter(b for t in self.manager._pool.tables.values() for b in t.blocks).items():
            assert self.manager.ref_count(block) == count


TestAnyCalls = AnyCalls.TestCase
