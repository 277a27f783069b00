"""The scheduler alone, without a model: budgets, order, liveness, and what each policy promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..config import POLICIES, SchedulerConfig
from ..kv_cache import SlotAllocator
from ..sampling import SamplingParams
from ..scheduler import Scheduler, check_fits_step
from ..sequence import Sequence, SequenceStatus


class NoText:
    """A detokenizer for sequences whose text nobody reads."""

    text = ""

    def add(self, token_id: int, may_stop: bool) -> bool:
        return False

    def finish(self) -> None:
        pass


def sequence(name: str, prompt_len: int, max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, [1] * prompt_len, params, 0, (), max_tokens, NoText())


def scheduler(policy="mixed", num_seqs=4, tokens=16, prefills=None, chunked=None) -> Scheduler:
    chunked = policy == "mixed" if chunked is None else chunked
    return Scheduler(SchedulerConfig(policy, num_seqs, tokens, prefills or num_seqs, chunked), SlotAllocator(num_seqs))


def run_step(s: Scheduler) -> list[tuple[str, int]]:
    """Schedule, pretend to compute, append a token where one is due, retire. Returns who ran with how many tokens."""
    batch = s.schedule()
    check_step(s, batch)
    for item in batch:
        item.seq.num_computed_tokens += item.num_tokens
        if item.is_last_chunk:
            item.seq.append_token(7)
    s.retire()
    check_slots(s)
    return [(item.seq.request_id, item.num_tokens) for item in batch]


def check_step(s: Scheduler, batch: list) -> None:
    """Invariants of one plan."""
    names = [item.seq.request_id for item in batch]
    assert len(names) == len(set(names)) <= s.config.max_num_seqs
    assert 0 <= sum(item.num_tokens for item in batch) <= s.config.max_num_batched_tokens
    assert sum(not item.is_decode for item in batch) <= s.config.max_num_prefills
    for item in batch:
        assert 1 <= item.num_tokens <= item.num_missing == item.seq.num_missing_tokens
        assert item.seq.status is SequenceStatus.RUNNING
        assert s.config.enable_chunked_prefill or item.is_last_chunk
    assert batch or not s.has_unfinished


def check_slots(s: Scheduler) -> None:
    """No slot twice, none lost."""
    held = [seq.slot for seq in s.running.values()]
    assert len(set(held)) == len(held)
    assert s.slots.num_free + len(held) == s.slots.num_slots and s.slots.num_taken == len(held)


def run_all(s: Scheduler, bound: int = 10_000) -> list[list[tuple[str, int]]]:
    steps = []
    while s.has_unfinished:
        steps.append(run_step(s))
        assert len(steps) < bound, "work is left: somebody waits for ever"
    return steps


requests = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=10)


@given(
    requests=requests,
    policy=st.sampled_from(POLICIES),
    num_seqs=st.integers(1, 5),
    tokens=st.sampled_from([12, 16, 64]),
    prefills=st.none() | st.integers(1, 3),
    chunked=st.none() | st.booleans(),
)
def test_any_workload_is_served_in_order(requests, policy, num_seqs, tokens, prefills, chunked):
    """Everybody finishes in bounded steps, admitted first come first served, every token computed exactly once."""
    s = scheduler(policy, num_seqs, tokens, prefills, chunked)
    seqs = [sequence(str(i), prompt, new) for i, (prompt, new, _) in enumerate(requests)]
    todo, steps = list(zip(seqs, (gap for _, _, gap in requests), strict=True)), []
    while todo or s.has_unfinished:
        while todo and (todo[0][1] <= 0 or not s.has_unfinished):
            s.add(todo.pop(0)[0])
        todo = [(seq, gap - (i == 0)) for i, (seq, gap) in enumerate(todo)]
        steps.append(run_step(s))
        assert len(steps) < 10 * sum(prompt + new for prompt, new, _ in requests) + 10
    first_run = {}
    for number, step in enumerate(steps):
        for name, _ in step:
            first_run.setdefault(name, number)
    assert list(first_run) == [seq.request_id for seq in seqs]
    for seq, (prompt, new, _) in zip(seqs, requests, strict=True):
        computed = sum(count for step in steps for name, count in step if name == seq.request_id)
        assert computed == seq.num_computed_tokens == prompt + new - 1


@pytest.mark.parametrize("budget", [1, 3])
def test_small_budgets(budget):
    """A budget of one token: a prompt of five takes five steps, and only the last one samples."""
    s = scheduler(num_seqs=budget, tokens=budget)
    s.add(sequence("a", 5, 2))
    assert [step[0][1] for step in run_all(s)] == {1: [1] * 6, 3: [3, 2, 1]}[budget]


def test_mixed_gives_every_running_sequence_a_token_in_every_step():
    """Decodes come first, so a stream of new prompts never makes a running text wait."""
    s = scheduler("mixed", num_seqs=8, tokens=16)
    for name in ("a", "b"):
        s.add(sequence(name, 4, 40))
    run_step(s)
    for i in range(38):
        s.add(sequence(f"new{i}", 16, 2))
        names = [name for name, _ in run_step(s)]
        assert names[:2] == ["a", "b"]
    assert any(name.startswith("new") for name, _ in run_step(s))


def test_prefill_first_lets_decodes_run_after_max_num_seqs_prompts():
    """Prompts that end with their first token free their slot at once; without a bound they could keep decodes out."""
    s = scheduler("prefill_first", num_seqs=3, tokens=16)
    s.add(sequence("a", 4, 10))
    run_step(s)
    waits, longest = 0, 0
    for i in range(60):
        s.add(sequence(f"new{i}", 16, 1))
        waits = 0 if ("a", 1) in run_step(s) else waits + 1
        longest = max(longest, waits)
        if "a" not in s.running:
            break
    assert longest <= 3
    assert "a" not in s.running


def test_prefill_first_takes_whole_prompts_before_decodes():
    """nano-vllm's order: step 1 the first prompts, step 2 the next ones, and only then decodes."""
    s = scheduler("prefill_first", num_seqs=4, tokens=10)
    for name in ("a", "b", "c"):
        s.add(sequence(name, 6, 2))
    assert run_all(s) == [[("a", 6)], [("b", 6)], [("c", 6)], [("a", 1), ("b", 1), ("c", 1)]]


def test_static_admits_nobody_until_the_longest_member_ends():
    """The baseline: a batch runs to its end, and slots of members that ended stay taken."""
    s = scheduler("static", num_seqs=2, tokens=16)
    for name, new in (("a", 6), ("b", 2), ("c", 1)):
        s.add(sequence(name, 3, new))
    steps = run_all(s)
    assert steps[:2] == [[("a", 3), ("b", 3)], [("a", 1), ("b", 1)]]
    assert steps[2:6] == [[("a", 1)]] * 4
    assert steps[6:] == [[("c", 3)]]


def test_static_leaves_free_slots_empty():
    """Whoever comes while a batch decodes waits for its end, even if a slot has been free all the time."""
    s = scheduler("static", num_seqs=2, tokens=16)
    s.add(sequence("a", 3, 4))
    run_step(s)
    run_step(s)
    s.add(sequence("late", 3, 1))
    assert run_all(s) == [[("a", 1)], [("a", 1)], [("late", 3)]]


def test_a_static_batch_is_whole_whatever_ran_before():
    """Steps without anybody to starve do not count: after three short requests the next batch still takes both."""
    s = scheduler("static", num_seqs=2, tokens=10)
    for i in range(3):
        s.add(sequence(f"short{i}", 6, 1))
        run_all(s)
    s.add(sequence("a", 6, 4))
    s.add(sequence("b", 6, 4))
    assert run_all(s) == [[("a", 6)], [("b", 6)], *[[("a", 1), ("b", 1)]] * 3]


def test_a_static_batch_of_long_prompts_is_formed_whole():
    """Prompts that take several steps each: nobody decodes before all members are there."""
    s = scheduler("static", num_seqs=4, tokens=10, chunked=True)
    for name in "abcd":
        s.add(sequence(name, 45, 10))
    steps = run_all(s)
    assert len(steps) == 18 + 9
    assert [name for name, _ in steps[18]] == list("abcd")


def test_static_returns_its_members_together():
    """A short request gets its answer when the longest one is done."""
    s = scheduler("static", num_seqs=2)
    short, long = sequence("short", 2, 1), sequence("long", 2, 5)
    s.add(short)
    s.add(long)
    run_step(s)
    assert short.is_finished and "short" in s.running
    run_all(s)
    assert not s.running and s.slots.num_free == 2


def test_chunks_fill_what_decodes_leave():
    """mixed, budget 64, prompts of 60 and 60: 60 + 4, then one token and the other 56."""
    s = scheduler("mixed", num_seqs=4, tokens=64)
    s.add(sequence("a", 60, 5))
    s.add(sequence("b", 60, 5))
    assert run_step(s) == [("a", 60), ("b", 4)]
    assert run_step(s) == [("a", 1), ("b", 56)]


def test_prefill_cap_keeps_long_prompts_apart():
    """max_num_prefills=1: the second prompt waits until the first is through, even if there is budget and a slot."""
    s = scheduler("mixed", num_seqs=4, tokens=8, prefills=1)
    s.add(sequence("a", 12, 3))
    s.add(sequence("b", 4, 3))
    assert run_step(s) == [("a", 8)]
    assert run_step(s) == [("a", 4)]
    assert run_step(s) == [("a", 1), ("b", 4)]


def test_nobody_overtakes_the_head_of_the_queue():
    """A prompt that does not fit what is left of this step goes first in the next one, not its smaller neighbour."""
    s = scheduler("mixed", num_seqs=4, tokens=10, chunked=False)
    for name, prompt in (("a", 6), ("b", 8), ("c", 2)):
        s.add(sequence(name, prompt, 1))
    assert [[name for name, _ in step] for step in run_all(s)] == [["a"], ["b", "c"]]


def test_a_prompt_that_no_step_can_take_is_refused():
    """Without chunks a prompt over the budget would wait for ever, and everybody behind it."""
    config = SchedulerConfig("prefill_first", 4, 32, 4, False)
    assert check_fits_step([1] * 32, config) == [1] * 32
    with pytest.raises(ValueError, match=r"33 tokens.*max_num_batched_tokens=32"):
        check_fits_step([1] * 33, config)
    assert check_fits_step([1] * 33, SchedulerConfig("mixed", 4, 32, 4, True))


@pytest.mark.parametrize("policy", POLICIES)
def test_abort_frees_the_slot_wherever_the_request_is(policy):
    """Waiting, running, finished in a static batch, unknown: nothing is lost and nobody else is touched."""
    s = scheduler(policy, num_seqs=2)
    for name in ("a", "b", "c"):
        s.add(sequence(name, 3, 4))
    run_step(s)
    assert s.abort("c").finish_reason == "abort" and not s.waiting
    assert s.abort("a").finish_reason == "abort" and s.slots.num_free == 1
    assert s.abort("a") is None and s.abort("nobody") is None
    check_slots(s)
    assert all(name == "b" for step in run_all(s) for name, _ in step)
    assert s.slots.num_free == 2


def test_slots_cannot_be_given_back_twice():
    """A slot that is free twice would be handed to two sequences."""
    slots = SlotAllocator(2)
    slots.give_back(slots.take())
    with pytest.raises(AssertionError, match="twice"):
        slots.give_back(0)
    assert slots.num_free == 2
