"""The prefix cache alone, without a tensor: what is found, what is a miss, and what goes first when blocks run out."""

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from .. import prefix_cache
from ..block_manager import BlockManager
from ..block_pool import IntegrityError, OutOfBlocksError
from ..prefix_cache import ROOT, CachedBlock, PrefixCache, extend_hashes, hash_block

B = 4  # tokens of a block
A_PROMPT, B_PROMPT = list(range(100, 112)), list(range(200, 212))


def new_manager(num_blocks: int = 16, host: int = 0, block_size: int = B) -> BlockManager:
    return BlockManager(num_blocks, block_size, host, enable_prefix_caching=True)


def hashes_of(tokens: list[int], block_size: int = B) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, len(tokens), block_size)
    return hashes


def find(manager: BlockManager, tokens: list[int]) -> list[CachedBlock]:
    """What a request with these tokens and one more would find."""
    return manager.find_prefix(hashes_of(tokens, manager.block_size), tokens, len(tokens) + 1)


def found(manager: BlockManager, tokens: list[int]) -> int:
    return len(find(manager, tokens))


def compute(manager: BlockManager, name: str, tokens: list[int]) -> int:
    """What the scheduler does for a prompt that is computed in one step. Returns how many of its blocks were found."""
    hashes = hashes_of(tokens, manager.block_size)
    prefix = manager.find_prefix(hashes, tokens, len(tokens))
    manager.allocate(name, len(tokens), prefix)
    manager.publish(name, hashes, tokens, len(tokens))
    check_entries(manager)
    return len(prefix)


def extend(manager: BlockManager, name: str, tokens: list[int]) -> None:
    """A running sequence has all these tokens now."""
    manager.grow({name: len(tokens)})
    manager.publish(name, hashes_of(tokens), tokens, len(tokens))
    check_entries(manager)


def serve(manager: BlockManager, tokens: list[int]) -> int:
    """Computed, and finished at once."""
    hits = compute(manager, "one", tokens)
    manager.free("one")
    return hits


def check_entries(manager: BlockManager) -> None:
    """No more entries than blocks, and each one's tokens, behind its parent's hash, give its hash."""
    manager.check_integrity()
    cache = manager.prefix_cache
    assert len(cache) <= manager.num_blocks
    for cached in cache._by_hash.values():
        parent = cached.parent.hash if cached.parent else ROOT
        assert cached.hash == prefix_cache.hash_block(parent, cached.tokens)
        assert len(cached.tokens) == manager.block_size


def snapshot(manager: BlockManager) -> object:
    pool, cache = manager._pool, manager.prefix_cache
    tables = {name: (list(table.blocks), table.num_tokens, list(table.cached)) for name, table in pool.tables.items()}
    entries = list(cache._by_hash.items()), list(cache._by_block.items())
    return list(pool.free), list(pool.ref_counts), tables, entries, list(manager.allocation_log)


# the hash


CHAINS = {  # of [0]*16, [0]*32 and [1]+[0]*15 in blocks of 16: the same on every machine
    "zeros": "40d697295c01d2312035c1fa7d884b8d",
    "zeros, second block": "133193292054a2de29a104f79ebe048a",
    "one and zeros": "20e3f51732ca833780f00ca35598365e",
}


def chains() -> list[str]:
    zeros = hashes_of([0] * 32, 16)
    return [zeros[0].hex(), zeros[1].hex(), hashes_of([1] + [0] * 15, 16)[0].hex()]


def test_the_hash_is_the_same_in_every_process():
    """Python's own hash() of text and bytes differs between processes: two of them could not share a cache."""
    assert chains() == list(CHAINS.values())
    assert hashes_of([0] * 16, 16) == hashes_of([0] * 32, 16)[:1]
    program = "import sys, types; package = sys.modules['p'] = types.ModuleType('p'); package.__path__ = sys.argv[1:]; "
    program += "import p.prefix_cache as m; m.extend_hashes(h := [], [0] * 32, 32, 16); "
    program += "m.extend_hashes(g := [], [1] + [0] * 15, 16, 16); print(*(x.hex() for x in h + g))"
    folder, env = str(Path(prefix_cache.__file__).parent), {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", program, folder]  # as a package of its own, without torch
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.split() == list(CHAINS.values())


def test_a_hash_says_all_that_came_before():
    """If it knew its own tokens only, the same paragraph behind two system prompts would share K and V."""
    tokens = [1, 2, 3, 4]
    first = hash_block(ROOT, tokens)
    assert len(first) == 16 and first == hash_block(ROOT, tuple(tokens))
    others = [
        hash_block(first, tokens),  # behind itself
        hash_block(hash_block(ROOT, [1, 2, 4, 3]), tokens),
        hash_block(ROOT, [4, 3, 2, 1]),
        hash_block(ROOT, [1, 2, 3]),
        hash_block(ROOT, [1, 2, 3, 4 + 2**32]),
        hash_block(ROOT, [0x0201, 0x0403]),  # no gluing of digits or bytes
        hash_block(ROOT, [12, 34]),
    ]
    assert len({first, *others}) == len(others) + 1


def test_each_block_is_hashed_once(monkeypatch):
    """A chain that is computed anew for each token of the output costs the square of the length."""
    calls, original = [], prefix_cache.hash_block
    monkeypatch.setattr(prefix_cache, "hash_block", lambda *a: calls.append(a) or original(*a))
    tokens, hashes = [], []
    for token in range(4 * B + 3):
        tokens.append(token)
        extend_hashes(hashes, tokens, len(tokens), B)
        extend_hashes(hashes, tokens, len(tokens), B)
        assert len(calls) == len(hashes) == len(tokens) // B
    assert [block for _, block in calls] == [tokens[i : i + B] for i in range(0, 4 * B, B)]
    assert [parent for parent, _ in calls] == [ROOT, *hashes[:3]]
    extend_hashes(whole := [], tokens, len(tokens), B)
    assert whole == hashes


# what is found


@pytest.mark.parametrize("block_size", [1, 4])
def test_at_least_one_token_is_left_to_be_computed(block_size):
    """A prompt that is cached as a whole has nothing left to sample from: a batch of length zero, and a crash."""
    manager, tokens = new_manager(block_size=block_size), list(range(50, 50 + 3 * block_size))
    serve(manager, tokens)
    b = block_size
    for length in (b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 3 * b):
        hits = manager.find_prefix(hashes_of(tokens[:length], b), tokens[:length], length)
        assert len(hits) == max(0, length - 1) // b
        assert len(hits) * b <= max(0, length - 1)


def test_the_longest_run_is_found():
    """It ends at the first block that differs, even if a later one is cached; without the option nothing is found."""
    manager = new_manager()
    assert serve(manager, A_PROMPT) == 0
    assert found(manager, A_PROMPT) == 3
    assert found(manager, A_PROMPT[:11]) == 2
    assert found(manager, [*A_PROMPT, 1, 2, 3, 4]) == 3
    assert found(manager, [*A_PROMPT[:4], 1, 2, 3, 4, *A_PROMPT[8:]]) == 1
    assert found(manager, [1, *A_PROMPT[1:]]) == 0
    assert found(manager, B_PROMPT) == 0
    off = BlockManager(16, B)
    off.allocate("a", 12)
    assert off.prefix_cache is None and off.find_prefix(hashes_of(A_PROMPT), A_PROMPT, 12) == []


def test_a_block_that_is_not_full_is_not_found():
    """Its owner goes on writing into it."""
    manager = new_manager()
    compute(manager, "a", A_PROMPT[:7])
    assert found(manager, A_PROMPT) == len(manager.prefix_cache) == 1
    extend(manager, "a", A_PROMPT[:8])
    assert found(manager, A_PROMPT) == 2


def test_only_what_this_step_computes_is_published():
    """A prompt in pieces has blocks for all of it from the first piece on: the others are still empty."""
    manager = new_manager()
    manager.allocate("a", 12)
    for end, blocks in ((3, 0), (4, 1), (7, 1), (12, 3)):
        manager.publish("a", hashes_of(A_PROMPT), A_PROMPT, end)
        assert found(manager, A_PROMPT) == blocks


def test_equal_hashes_are_not_equal_tokens(monkeypatch):
    """A hash may lie. Whoever trusts it alone reads somebody else's text; here all hashes are the same."""
    monkeypatch.setattr(prefix_cache, "hash_block", lambda parent, tokens: b"7" * 16)
    manager = new_manager()
    assert serve(manager, A_PROMPT) == 0
    assert found(manager, B_PROMPT) == 0
    assert serve(manager, B_PROMPT) == 0
    assert len(manager.prefix_cache) == 1
    (entry,) = manager.prefix_cache._by_hash.values()
    assert entry.tokens == B_PROMPT[8:], "the newest content replaces the others"
    assert list(manager.prefix_cache._by_block) == [entry.block]


def test_the_same_tokens_behind_another_parent_are_a_miss(monkeypatch):
    """K and V depend on all that came before. The hash says so; if it lies, the parent is compared too."""
    manager, tail = new_manager(), [1, 2, 3, 4]
    serve(manager, A_PROMPT[:4] + tail)
    serve(manager, B_PROMPT[:4])
    assert found(manager, B_PROMPT[:4] + tail) == 1
    assert found(manager, tail) == 0

    lie = {tuple(tail): b"t" * 16}
    original = prefix_cache.hash_block
    monkeypatch.setattr(prefix_cache, "hash_block", lambda p, t: lie.get(tuple(t)) or original(p, t))
    manager = new_manager()
    serve(manager, A_PROMPT[:4] + tail)
    serve(manager, B_PROMPT[:4])
    assert (found(manager, A_PROMPT[:4] + tail), found(manager, B_PROMPT[:4] + tail)) == (2, 1)
    serve(manager, B_PROMPT[:4] + tail)
    assert (found(manager, A_PROMPT[:4] + tail), found(manager, B_PROMPT[:4] + tail)) == (1, 2)


def test_a_block_whose_parent_is_gone_is_a_miss_until_it_is_published_again():
    """The head is evicted and computed anew, the old tail is still there: nobody has compared what lies before it."""
    manager = new_manager()
    serve(manager, A_PROMPT)
    (head, middle, tail) = find(manager, A_PROMPT)
    manager.prefix_cache.evict(head.block)
    check_entries(manager)
    assert found(manager, A_PROMPT) == 0 and len(manager.prefix_cache) == 2
    serve(manager, A_PROMPT[:4])
    assert found(manager, A_PROMPT) == 1
    assert serve(manager, A_PROMPT) == 1
    again = find(manager, A_PROMPT)
    assert len(again) == 3 and not {id(head), id(middle), id(tail)} & {id(cached) for cached in again}
    assert not manager.prefix_cache.holds(middle.block)
    check_entries(manager)


def test_who_computes_the_same_at_the_same_time_is_led_to_the_first():
    """Two blocks with the same content: one is found, and what follows either copy follows that one."""
    manager = new_manager()
    compute(manager, "a", A_PROMPT[:8])
    assert compute(manager, "b", A_PROMPT[:8]) == 1  # its last block it computes itself
    assert manager.block_table("a")[0] == manager.block_table("b")[0]
    assert manager.block_table("a")[1] != manager.block_table("b")[1]
    extend(manager, "b", A_PROMPT)
    expected = [*manager.block_table("a"), manager.block_table("b")[2]]
    assert [cached.block for cached in find(manager, A_PROMPT)] == expected


# who holds what


def test_shared_blocks_are_counted():
    """Without the count, the first to finish frees the prefix from under the other."""
    manager = new_manager(8)
    compute(manager, "a", [*A_PROMPT, 1])
    free = manager.num_free_blocks
    assert compute(manager, "b", [*A_PROMPT, 2]) == 3
    assert manager.num_free_blocks == free - 1
    assert manager.allocation_log[-1].blocks == 1
    assert [manager.ref_count(block) for block in manager.block_table("b")] == [2, 2, 2, 1]
    manager.free("a")
    assert [manager.ref_count(block) for block in manager.block_table("b")] == [1, 1, 1, 1]
    manager.free("b")
    assert manager.num_free_blocks == 8
    assert found(manager, A_PROMPT) == 3


def test_a_free_block_that_is_found_leaves_the_free_list():
    """Left in it, it is handed to the next one and overwritten while it is read."""
    manager = new_manager(8)
    serve(manager, A_PROMPT)
    blocks = [cached.block for cached in find(manager, A_PROMPT)]
    assert set(blocks) <= set(manager._pool.free)
    assert compute(manager, "a", [*A_PROMPT, 1]) == 3
    assert manager.block_table("a")[:3] == blocks
    assert not set(manager.block_table("a")) & set(manager._pool.free)
    assert manager.num_free_blocks == 4


def test_what_is_found_is_taken_before_anything_is_evicted():
    """The found blocks are the next ones of the free list: whoever takes his new ones first takes them twice."""
    manager = new_manager(4)
    compute(manager, "x", [1])
    serve(manager, A_PROMPT)
    manager.free("x")
    assert compute(manager, "a", [*A_PROMPT, 1]) == 3
    assert sorted(manager.block_table("a")) == [0, 1, 2, 3]


def test_free_hits_need_free_blocks_and_held_ones_do_not():
    """Counted as a gift, a free hit lets a request in for whom there is no room."""
    manager = new_manager(5)
    compute(manager, "a", [*A_PROMPT, 1])
    prefix = find(manager, A_PROMPT)
    assert manager.num_held(prefix) == 3
    compute(manager, "b", [*A_PROMPT, 2])  # one free block is enough
    assert manager.num_free_blocks == 0
    manager.free("a")
    manager.free("b")
    assert manager.num_held(prefix) == 0
    manager.allocate("x", 2 * B)
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError, match="4 blocks are needed, 3 of 5 are free"):
        manager.allocate("c", 13, prefix)
    assert snapshot(manager) == before


def test_a_refusal_changes_nothing_not_even_the_cache():
    """A failed call that has evicted, or taken hits out of the free list, costs hits or blocks with each refusal."""
    manager = new_manager(6)
    serve(manager, A_PROMPT)
    manager.allocate("x", B)
    before = snapshot(manager)
    for prefix in ([], find(manager, A_PROMPT)):
        with pytest.raises(OutOfBlocksError):
            manager.allocate("c", 6 * B, prefix)
        with pytest.raises(OutOfBlocksError):
            manager.grow({"x": 7 * B})
        assert snapshot(manager) == before
    check_entries(manager)


# what goes first


def test_tails_go_before_heads_and_the_oldest_first():
    """A tail without its head can never be found; what was used last is the most likely to be wanted again."""
    manager = new_manager(6)
    serve(manager, A_PROMPT)
    serve(manager, B_PROMPT)
    left = []
    for taken in range(1, 7):
        manager.allocate("x", taken * B)
        left.append((found(manager, A_PROMPT), found(manager, B_PROMPT)))
        check_entries(manager)
        manager.free("x")
        manager = new_manager(6)
        serve(manager, A_PROMPT)
        serve(manager, B_PROMPT)
    assert left == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_hit_makes_young_again():
    """Without that, the system prompt that all use goes before the question that nobody repeats."""
    manager = new_manager(8)
    serve(manager, A_PROMPT)
    serve(manager, B_PROMPT)
    assert serve(manager, [*A_PROMPT, 1]) == 3
    manager.allocate("x", 4 * B)  # one that never held anything, then those of B
    assert (found(manager, A_PROMPT), found(manager, B_PROMPT)) == (3, 0)
    check_entries(manager)


def test_a_thousand_prompts_leave_no_more_entries_than_blocks():
    """A map that is only added to grows for ever, and points at blocks that hold something else by now."""
    manager, rng = new_manager(4), random.Random(1)
    for _ in range(1000):
        assert serve(manager, [rng.randrange(10**6) for _ in range(2 * B)]) == 0
    assert len(manager.prefix_cache) == 4
    assert manager.num_free_blocks == 4


# fork, swap, reset


def test_samples_go_their_own_ways_behind_one_prefix():
    """Each sample's output can be found behind the prompt that they share, and not behind another's."""
    manager = new_manager()
    prompt = A_PROMPT[:10]
    compute(manager, "a", prompt)
    manager.fork("a", "b")
    one, two = [*prompt, 1, 1, 1, 1, 1, 1], [*prompt, 2, 2, 2, 2, 2, 2]
    extend(manager, "a", one)
    extend(manager, "b", two)
    assert manager.table("a").cached[:2] == manager.table("b").cached[:2]
    assert [c.block for c in find(manager, one)] == manager.block_table("a")
    assert [c.block for c in find(manager, two)] == manager.block_table("b")
    manager.free("a")
    manager.free("b")
    assert (found(manager, one), found(manager, two)) == (4, 4)


def test_a_sequence_that_comes_back_from_the_host_goes_on_with_its_chain():
    """Its blocks have other numbers now, but what it fills is still found behind the same prefix."""
    manager = new_manager(8, host=8)
    compute(manager, "a", A_PROMPT[:10])
    old = manager.block_table("a")
    manager.swap_out(["a"])
    assert found(manager, A_PROMPT) == 2  # the content is still there
    manager.swap_in(["a"])
    assert not set(old) & set(manager.block_table("a"))
    extend(manager, "a", A_PROMPT)
    assert [c.block for c in find(manager, A_PROMPT)] == [*old[:2], manager.block_table("a")[2]]
    manager.free("a")
    assert serve(manager, [*A_PROMPT, 5]) == 3


def test_a_sequence_whose_prefix_was_evicted_while_it_was_away():
    """It goes on, and what it fills cannot be found: the blocks before it are somebody else's."""
    manager = new_manager(4, host=4)
    compute(manager, "a", A_PROMPT[:10])
    manager.swap_out(["a"])
    serve(manager, [7] * 16)
    manager.swap_in(["a"])
    extend(manager, "a", A_PROMPT)
    assert found(manager, A_PROMPT) == 0
    manager.free("a")
    assert serve(manager, A_PROMPT) == 0
    assert found(manager, A_PROMPT) == 3


def test_reset_forgets_and_takes_nothing_away():
    """Whoever runs keeps its blocks and goes on publishing; nobody finds what is behind a forgotten parent."""
    manager = new_manager()
    compute(manager, "a", A_PROMPT[:8])
    table = manager.block_table("a")
    manager.prefix_cache.reset()
    assert len(manager.prefix_cache) == found(manager, A_PROMPT) == 0
    extend(manager, "a", A_PROMPT)
    assert manager.block_table("a")[:2] == table
    assert found(manager, A_PROMPT) == 0
    assert compute(manager, "b", [*A_PROMPT, 1]) == 0
    assert [c.block for c in find(manager, A_PROMPT)] == manager.block_table("b")[:3]
    manager.free("a")
    manager.free("b")
    check_entries(manager)


def test_an_interruption_forgets_everything():
    """What was published for a step that failed was never computed: found later, it would be garbage."""
    manager = new_manager()
    compute(manager, "a", A_PROMPT)
    manager.recount()
    assert len(manager.prefix_cache) == found(manager, A_PROMPT) == 0
    manager.check_integrity()


# the check itself


def move_entry(cache: PrefixCache) -> None:
    block = next(iter(cache._by_block))
    cache._by_block[99] = cache._by_block.pop(block)


def lose_hash(cache: PrefixCache) -> None:
    cache._by_hash.pop(next(iter(cache._by_hash)))


def lose_block(cache: PrefixCache) -> None:
    cache._by_block.pop(next(iter(cache._by_block)))


def change_hash(cache: PrefixCache) -> None:
    next(iter(cache._by_hash.values())).hash = b"x" * 16


def swap_blocks(cache: PrefixCache) -> None:
    one, two, *_ = cache._by_block
    cache._by_block[one], cache._by_block[two] = cache._by_block[two], cache._by_block[one]


@pytest.mark.parametrize("damage", [move_entry, lose_hash, lose_block, change_hash, swap_blocks])
def test_every_kind_of_damage_is_noticed(damage):
    """Fuzz tests trust this check: one that looks away makes them all blind."""
    manager = new_manager()
    serve(manager, A_PROMPT)
    manager.check_integrity()
    whole = copy.deepcopy(manager.prefix_cache._by_hash)
    damage(manager.prefix_cache)
    with pytest.raises(IntegrityError, match="cached"):
        manager.check_integrity()
    assert len(whole) == 3


def test_a_twin_takes_over():
    """The same content in two blocks: when the first was taken for something else, the second could not be found, nor
    anything behind it, though somebody still held it."""
    cache, tokens = PrefixCache(B), A_PROMPT[: 2 * B]
    hashes = hashes_of(tokens)
    first = cache.publish(None, hashes[0], tokens[:B], 1)
    assert cache.publish(None, hashes[0], tokens[:B], 5) is first
    cache.publish(first, hashes[1], tokens[B:], 2)
    cache.check()
    assert [known.block for known in cache.find(hashes, tokens, 2)] == [1, 2]
    cache.evict(1)
    cache.check()
    assert [known.block for known in cache.find(hashes, tokens, 2)] == [5, 2]
    cache.evict(5)
    cache.check()
    assert cache.find(hashes, tokens, 2) == [] and not cache.holds(5) and cache.holds(2)
