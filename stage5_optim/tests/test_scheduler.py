"""The scheduler alone, without a model: budgets, order, liveness, memory, and what each policy promises.

A pretended memory stands in for the model: it moves blocks as the plan says, and every sequence must find its own
tokens where its block table says that they are.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..batch import Batch
from ..block_manager import BlockManager
from ..config import POLICIES, PREEMPTION_MODES, SchedulerConfig
from ..intake import check_fits_pool
from ..model_runner import slots
from ..sampling import SamplingParams
from ..scheduler import Scheduler, check_fits_step
from ..sequence import Sequence, SequenceGroup, SequenceStatus


class NoText:
    """A detokenizer for sequences whose text nobody reads."""

    text = ""

    def add(self, token_id: int, may_stop: bool) -> bool:
        return False

    def finish(self) -> None:
        pass


def sequence(name: str, prompt_len: int, max_tokens: int, index: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, [1] * prompt_len, params, 0, (), max_tokens, NoText(), index=index)


def group(name: str, prompt_len: int, max_tokens: int, n: int = 1) -> SequenceGroup:
    return SequenceGroup([sequence(name, prompt_len, max_tokens, index) for index in range(n)])


def scheduler(
    policy="mixed",
    num_seqs=4,
    tokens=16,
    prefills=None,
    chunked=None,
    blocks=1000,
    block_size=4,
    mode="recompute",
    host=0,
    watermark=0.0,
) -> Scheduler:
    chunked = policy == "mixed" if chunked is None else chunked
    config = SchedulerConfig(policy, num_seqs, tokens, prefills or num_seqs, chunked, mode, watermark)
    s = Scheduler(config, BlockManager(blocks, block_size, host))
    s.memory = Memory()
    return s


def filled(*groups: tuple, **options) -> Scheduler:
    """A scheduler with these requests in its queue: (name, prompt_len, max_tokens) or with n as a fourth."""
    s = scheduler(**options)
    for name, prompt_len, max_tokens, *n in groups:
        check_fits_pool(prompt_len, max_tokens, 10_000, *n or [1], s.block_manager, None)
        s.add(group(name, prompt_len, max_tokens, *n))
    return s


class Memory:
    """What lies in which slot: (owner, position); up to the end of the prompt the owner is the request."""

    def __init__(self):
        self.device: dict[int, tuple] = {}
        self.host: dict[int, tuple] = {}
        self.recomputed = 0

    def run(self, s: Scheduler, batch: Batch) -> None:
        """Move blocks, then write each sequence's new tokens; what it reads on the way must be its own."""
        size = s.block_manager.block_size
        self.move(batch.moves.swap_out, self.device, self.host, size)
        self.move(batch.moves.swap_in, self.host, self.device, size)
        self.move(batch.moves.copies, self.device, self.device, size)
        self.recomputed += batch.num_recomputed
        written = []
        for item in batch.scheduled:
            seq, table = item.seq, item.block_table
            end = seq.num_computed_tokens + item.num_tokens
            for position, slot in enumerate(slots(table, 0, end, size)):
                token = (seq.request_id if position < seq.num_prompt_tokens else seq.seq_id, position)
                if position >= seq.num_computed_tokens:
                    self.device[slot] = token
                    written.append(slot)
                    assert s.block_manager.ref_count(slot // size) == 1, "written, and others read it"
                assert self.device.get(slot) == token, f"{seq.seq_id} reads {self.device.get(slot)}, not {token}"
        assert len(set(written)) == len(written), "two tokens in one place"

    def move(self, pairs: list[tuple[int, int]], source: dict, target: dict, size: int) -> None:
        before = dict(source)
        for a, b in pairs:
            for i in range(size):
                target[b * size + i] = before.get(a * size + i)


def run_step(s: Scheduler) -> list[tuple[str, int]]:
    """Schedule, pretend to compute, append a token where one is due, retire. Returns who ran with how many tokens."""
    before = order(s)
    batch = s.schedule()
    check_step(s, batch)
    check_order(s, batch, *before)
    s.memory.run(s, batch)
    for item in batch.scheduled:
        item.seq.num_computed_tokens += item.num_tokens
        s.fork(item)
        if item.is_last_chunk:
            for seq in (item.seq, *item.forks):
                seq.append_token(7)
    s.retire()
    check_blocks(s)
    return [(item.seq.seq_id, item.num_tokens) for item in batch.scheduled]


def check_step(s: Scheduler, batch: Batch) -> None:
    """Invariants of one plan."""
    items, budget = batch.scheduled, s.config.max_num_batched_tokens
    names = [item.seq.seq_id for item in items]
    assert len(names) == len(set(names)) <= s.config.max_num_seqs
    assert 0 <= sum(item.num_tokens for item in items) <= budget
    for item in items:
        assert 1 <= item.num_tokens <= item.num_missing == item.seq.num_missing_tokens
        assert item.seq.status is SequenceStatus.RUNNING
        has_begun = item.seq.num_computed_tokens > 0 or item.seq.num_lost_tokens > 0
        missing = s.running[item.seq.request_id].target_len(item.seq) - item.seq.num_computed_tokens
        assert s.config.enable_chunked_prefill or item.num_tokens == missing or missing > budget or has_begun
    assert len({item.seq.request_id for item in items if not item.is_decode}) <= s.config.max_num_prefills
    running, waiting = order(s)  # s.running may also hold members of a static batch that have ended
    assert items or not (running or (waiting and not s.running)), "there is work, and nobody works"


def order(s: Scheduler) -> tuple[list[str], list[str]]:
    """Who runs, without those that have ended, and who waits."""
    return [name for name, one in s.running.items() if not one.is_finished], [one.request_id for one in s.waiting]


def check_order(s: Scheduler, batch: Batch, was_running: list[str], was_waiting: list[str]) -> None:
    """The newest step back, the next ones come in, never both, and never into the blocks under the watermark."""
    running, waiting = order(s)
    assert running + waiting == was_running + was_waiting, "somebody overtakes"
    assert batch.preempted == was_running[len(running) :][::-1]
    assert not was_running or running[:1] == was_running[:1], "the oldest never steps back"
    if len(running) > max(len(was_running), 1):
        manager = s.block_manager
        assert manager.num_free_blocks >= int(s.config.watermark * manager.num_blocks)


def check_blocks(s: Scheduler) -> None:
    """No block twice, none lost. Who runs has its blocks on the device, who waits has none or all on the host."""
    manager = s.block_manager
    manager.check_integrity()
    running = [seq for one in s.running.values() for seq in one.active]
    waiting = [seq for one in s.waiting for seq in one.active]
    swapped = [seq for seq in waiting if seq.status is SequenceStatus.SWAPPED]
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    assert all(seq.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED) for seq in waiting)
    assert set(manager._pool.tables) == {seq.seq_id for seq in running}
    assert set(manager._host.tables) == {seq.seq_id for seq in swapped}
    assert sum(len(one.unfinished) for one in s.running.values()) <= s.config.max_num_seqs
    assert s.config.policy == "static" or not any(one.is_finished for one in s.running.values())


def run_all(s: Scheduler, bound: int = 10_000) -> list[list[tuple[str, int]]]:
    steps = []
    while s.has_unfinished:
        steps.append(run_step(s))
        assert len(steps) < bound, "work is left: somebody waits for ever"
    assert s.block_manager.num_free_blocks == s.block_manager.num_blocks
    assert s.block_manager.num_free_swap_blocks == s.block_manager.num_swap_blocks
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
    groups = [group(str(i), prompt, new) for i, (prompt, new, _) in enumerate(requests)]
    todo, steps = list(zip(groups, (gap for _, _, gap in requests), strict=True)), []
    while todo or s.has_unfinished:
        while todo and (todo[0][1] <= 0 or not s.has_unfinished):
            s.add(todo.pop(0)[0])
        todo = [(one, gap - (i == 0)) for i, (one, gap) in enumerate(todo)]
        steps.append(run_step(s))
        assert len(steps) < 10 * sum(prompt + new for prompt, new, _ in requests) + 10
    first_run = {}
    for number, step in enumerate(steps):
        for name, _ in step:
            first_run.setdefault(name, number)
    assert list(first_run) == [one.request_id for one in groups]
    for one, (prompt, new, _) in zip(groups, requests, strict=True):
        computed = sum(count for step in steps for name, count in step if name == one.request_id)
        assert computed == one.seqs[0].num_computed_tokens == prompt + new - 1


def test_any_pool_serves_everybody():
    """Too few blocks for all: they step back, return, fork and are aborted at any moment, and yet all finish, each
    finds its own tokens in memory, and at the end every block is free."""
    events = Counter()

    @settings(max_examples=max(200, settings().max_examples))
    @given(st.data(), st.sampled_from(POLICIES), st.sampled_from(PREEMPTION_MODES))
    def play(data, policy, mode):
        requests = data.draw(st.lists(crowded, min_size=3, max_size=8), "prompt, new tokens of each sample, gap")
        groups = [
            SequenceGroup([sequence(str(i), prompt, count, index) for index, count in enumerate(new)])
            for i, (prompt, new, _) in enumerate(requests)
        ]
        s = draw_scheduler(data, policy, mode, requests)
        aborts = data.draw(st.dictionaries(st.integers(0, 40), st.integers(0, 7), max_size=3), "step -> who is aborted")
        serve(s, groups, [gap for _, _, gap in requests], aborts)
        for one, (_, new, _) in zip(groups, requests, strict=True):
            for seq, count in zip(one.seqs, new, strict=True):
                assert seq.finish_reason == "abort" or (seq.finish_reason, seq.num_output_tokens) == ("length", count)
        events.update(line.why for line in s.block_manager.allocation_log)

    play()
    whys = ("preempted", "swapped out", "swapped in", "copy-on-write", "fork", "aborted")
    assert all(events[why] >= 20 for why in whys), f"the fuzz tests little: {events}"


# A prompt, the new tokens of each sample, and the steps between the one before it and this one.
crowded = st.tuples(
    st.sampled_from([1, 2, 3, 4, 5, 8, 12]),
    st.sampled_from([1, 1, 2, 3]).flatmap(lambda n: st.lists(st.integers(8, 20), min_size=n, max_size=n)),
    st.sampled_from([0, 0, 0, 1, 5]),
)


def draw_scheduler(data: st.DataObject, policy: str, mode: str, requests: list[tuple]) -> Scheduler:
    """Any options, with a pool in which the largest request just fits or little more."""
    block_size = data.draw(st.sampled_from([1, 2, 4]), "block_size")
    chunked = data.draw(st.booleans(), "chunked")
    reckon = BlockManager(1, block_size)
    largest = max(reckon.blocks_for_samples(prompt, [prompt + max(new) - 1] * len(new)) for prompt, new, _ in requests)
    return scheduler(
        policy,
        num_seqs=data.draw(st.sampled_from([3, 8, 12]), "num_seqs"),
        tokens=data.draw(st.sampled_from([12, 16, 64]), "tokens"),
        prefills=data.draw(st.none() | st.integers(1, 3), "prefills"),
        chunked=chunked,
        blocks=largest + data.draw(st.sampled_from([0, 1, 3]), "spare"),
        block_size=block_size,
        mode=mode,
        host=data.draw(st.sampled_from([100, 12, 1, 0]), "host") if mode == "swap" else 0,
        watermark=data.draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5]), "watermark"),
    )


def serve(s: Scheduler, groups: list[SequenceGroup], gaps: list[int], aborts: dict[int, int]) -> None:
    """Hand in, step and abort as told. The oldest gets a token in all but the steps that prompts may take before it."""
    todo, steps = list(zip(groups, gaps, strict=True)), 0
    work = sum(seq.num_prompt_tokens + seq.max_output_tokens for one in groups for seq in one.seqs)
    while todo or s.has_unfinished:
        while todo and (todo[0][1] <= 0 or not s.has_unfinished):
            s.add(todo.pop(0)[0])
        todo = [(one, gap - (i == 0)) for i, (one, gap) in enumerate(todo)]
        run_step(s)
        if s.abort(str(aborts.get(steps))):
            check_blocks(s)
        steps += 1
        assert steps <= work * (s.config.max_num_seqs + 1) + sum(gaps), "somebody waits for ever"
    run_all(s)


@pytest.mark.parametrize("budget", [1, 3])
def test_small_budgets(budget):
    """A budget of one token: a prompt of five takes five steps, and only the last one samples."""
    s = filled(("a", 5, 2), num_seqs=budget, tokens=budget)
    assert [step[0][1] for step in run_all(s)] == {1: [1] * 6, 3: [3, 2, 1]}[budget]


def test_mixed_gives_every_running_sequence_a_token_in_every_step():
    """Decodes come first, so a stream of new prompts never makes a running text wait."""
    s = filled(("a", 4, 40), ("b", 4, 40), num_seqs=8)
    run_step(s)
    for i in range(38):
        s.add(group(f"new{i}", 16, 2))
        names = [name for name, _ in run_step(s)]
        assert names[:2] == ["a", "b"]
    assert any(name.startswith("new") for name, _ in run_step(s))


def test_prefill_first_lets_decodes_run_after_max_num_seqs_prompts():
    """Prompts that end with their first token free their place at once; without a bound they could keep decodes out."""
    s = filled(("a", 4, 5), policy="prefill_first", num_seqs=3)
    run_step(s)
    turns = []
    for i in range(20):
        s.add(group(f"new{i}", 16, 1))
        turns.append(run_step(s)[0][0][0])
    assert "".join(turns) == "nna" + 3 * "nnna" + "nnnnn", "and then it is the prompts' turn again"


def test_prompts_that_disturb_nobody_do_not_wait():
    """prefill_first: more one-token requests than max_num_seqs, one by one. Where nobody decodes nobody gives way."""
    s = filled(*[(str(i), 6, 1) for i in range(9)], policy="prefill_first", num_seqs=3, tokens=6)
    assert len(run_all(s)) == 9


def test_prefill_first_takes_whole_prompts_before_decodes():
    """nano-vllm's order: step 1 the first prompts, step 2 the next ones, and only then decodes."""
    s = filled(("a", 6, 2), ("b", 6, 2), ("c", 6, 2), policy="prefill_first", tokens=10)
    assert run_all(s) == [[("a", 6)], [("b", 6)], [("c", 6)], [("a", 1), ("b", 1), ("c", 1)]]


def test_static_admits_nobody_until_the_longest_member_ends():
    """The baseline: a batch runs to its end, and places of members that ended stay taken."""
    s = filled(("a", 3, 6), ("b", 3, 2), ("c", 3, 1), policy="static", num_seqs=2)
    steps = run_all(s)
    assert steps[:2] == [[("a", 3), ("b", 3)], [("a", 1), ("b", 1)]]
    assert steps[2:6] == [[("a", 1)]] * 4
    assert steps[6:] == [[("c", 3)]]


def test_static_leaves_free_places_empty():
    """Whoever comes while a batch decodes waits for its end, even if a place has been free all the time."""
    s = filled(("a", 3, 4), policy="static", num_seqs=2)
    run_step(s)
    run_step(s)
    s.add(group("late", 3, 1))
    assert run_all(s) == [[("a", 1)], [("a", 1)], [("late", 3)]]


def test_a_static_batch_is_whole_whatever_ran_before():
    """Steps without anybody to starve do not count: after three short requests the next batch still takes both."""
    s = scheduler("static", num_seqs=2, tokens=10)
    for i in range(3):
        s.add(group(f"short{i}", 6, 1))
        run_all(s)
    s.add(group("a", 6, 4))
    s.add(group("b", 6, 4))
    assert run_all(s) == [[("a", 6)], [("b", 6)], *[[("a", 1), ("b", 1)]] * 3]


def test_a_static_batch_of_long_prompts_is_formed_whole():
    """Prompts that take several steps each: nobody decodes before all members are there."""
    s = filled(*[(name, 45, 10) for name in "abcd"], policy="static", tokens=10, chunked=True)
    steps = run_all(s)
    assert len(steps) == 18 + 9
    assert [name for name, _ in steps[18]] == list("abcd")


def test_static_returns_its_members_together():
    """A short request gets its answer when the longest one is done; its blocks are free at once."""
    s = scheduler("static", num_seqs=2, blocks=8)
    short, long = group("short", 8, 1), group("long", 2, 5)
    s.add(short)
    s.add(long)
    run_step(s)
    assert short.is_finished and "short" in s.running
    assert s.block_manager.num_free_blocks == 7
    run_all(s)
    assert not s.running


def test_chunks_fill_what_decodes_leave():
    """mixed, budget 64, prompts of 60 and 60: 60 + 4, then one token and the other 56."""
    s = filled(("a", 60, 5), ("b", 60, 5), tokens=64)
    assert run_step(s) == [("a", 60), ("b", 4)]
    assert run_step(s) == [("a", 1), ("b", 56)]


def test_prefill_cap_keeps_long_prompts_apart():
    """max_num_prefills=1: the second prompt waits until the first is through, even if there is budget and a place."""
    s = filled(("a", 12, 3), ("b", 4, 3), tokens=8, prefills=1)
    assert run_step(s) == [("a", 8)]
    assert run_step(s) == [("a", 4)]
    assert run_step(s) == [("a", 1), ("b", 4)]


def test_nobody_overtakes_the_head_of_the_queue():
    """A prompt that does not fit what is left of this step goes first in the next one, not its smaller neighbour."""
    s = filled(("a", 6, 1), ("b", 8, 1), ("c", 2, 1), tokens=10, chunked=False)
    assert [[name for name, _ in step] for step in run_all(s)] == [["a"], ["b", "c"]]


def test_a_prompt_that_no_step_can_take_is_refused():
    """Without chunks a prompt over the budget would wait for ever, and everybody behind it."""
    config = scheduler("prefill_first", tokens=32).config
    check_fits_step([1] * 32, 1, config)
    with pytest.raises(ValueError, match=r"33 tokens.*max_num_batched_tokens=32"):
        check_fits_step([1] * 33, 1, config)
    check_fits_step([1] * 33, 1, scheduler("mixed", tokens=32).config)


def test_more_samples_than_places_are_refused():
    """Samples run side by side: with fewer places than samples the request would wait for ever."""
    config = scheduler(num_seqs=4).config
    check_fits_step([1], 4, config)
    with pytest.raises(ValueError, match=r"n=5 samples.*max_num_seqs=4"):
        check_fits_step([1], 5, config)


# memory: who is let in


@pytest.mark.parametrize(
    "watermark, prompt_blocks, when",
    [
        *[(0.0, 6, "now"), (0.0, 7, "later"), (0.0, 8, "later"), (0.0, 9, "never")],
        *[(0.5, 2, "now"), (0.5, 3, "later"), (0.5, 8, "later"), (0.5, 9, "never")],
    ],
)
def test_admission_now_later_or_never(watermark, prompt_blocks, when):
    """8 blocks, 2 of them in use: what fits over the watermark comes in now, what fits an empty pool later, and more
    than that must be refused when it is handed in, or it blocks the queue for ever."""
    s = filled(("a", 7, 6), blocks=8, watermark=watermark, tokens=64)
    run_step(s)
    try:
        check_fits_pool(4 * prompt_blocks, 1, 100, 1, s.block_manager, None)
    except ValueError:
        assert when == "never"
        return
    s.add(group("b", 4 * prompt_blocks, 1))
    steps = run_all(s)
    came = next(i for i, step in enumerate(steps) if "b" in dict(step))
    assert came == {"now": 0, "later": len(steps) - 1}[when]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_watermark_yields_when_nothing_runs(policy):
    """A request larger than what the watermark leaves would wait for ever in an engine that does nothing."""
    s = filled(("huge", 30, 3), ("next", 4, 1), policy=policy, blocks=8, watermark=1.0, tokens=64)
    assert run_all(s) == [[("huge", 30)], [("huge", 1)], [("huge", 1)], [("next", 4)]]


def test_the_watermark_is_a_share_of_the_pool():
    """10 % of 40 blocks: four stay free for those who run. The fifth request would take one of them."""
    s = filled(*[(name, 36, 1) for name in "abcde"], num_seqs=8, tokens=1000, blocks=40, watermark=0.1)
    assert [[name for name, _ in step] for step in run_all(s)] == [list("abcd"), ["e"]]


def test_the_watermark_saves_a_preemption():
    """Without it the newcomer takes the blocks that the running text needs next, and gives them back a step later."""

    def preemptions(watermark: float) -> int:
        s = filled(("a", 8, 9), blocks=4, watermark=watermark)
        run_step(s)
        s.add(group("b", 4, 5))
        return sum(line.why == "preempted" for _ in run_all(s) for line in s.block_manager.allocation_log)

    assert preemptions(0.0) > 0 == preemptions(0.3)


# memory: who steps back


def test_the_newest_steps_back_and_the_oldest_never():
    """Whoever has waited longest is served to its end. Three requests that need 9 blocks in all share a pool of 4."""
    s = filled(("a", 4, 6), ("b", 4, 6), ("c", 4, 6), blocks=4)
    assert run_all(s) == [
        [("a", 4), ("b", 4), ("c", 4)],
        *[[("a", 1), ("b", 1)]] * 4,  # a and b need a second block each: c steps back
        [("a", 1)],  # a needs a third one: b steps back
        [("b", 9)],  # its prompt and five tokens of output at once, and the sixth is sampled
        [("c", 5)],
        *[[("c", 1)]] * 4,
    ]


def test_those_who_stepped_back_return_before_anybody_newer():
    """At the tail of the queue they would be overtaken by everybody who comes, again and again."""
    s = filled(("a", 8, 9), ("b", 4, 9), ("c", 4, 9), blocks=4)
    run_step(s)
    s.add(group("d", 1, 1))
    run_step(s)
    assert order(s) == (["a"], ["b", "c", "d"])
    came = []
    while s.has_unfinished:
        came += [name for name, _ in run_step(s) if name not in came]
    assert came == list("abcd")


def test_the_log_names_the_step():
    """Who took which blocks when: without the step the log cannot be held against the trace."""
    s = filled(("a", 4, 3), blocks=8)
    run_step(s)
    s.add(group("b", 9, 2))
    run_all(s)
    taken = [(line.step, line.seq_id, line.blocks) for line in s.block_manager.allocation_log if line.blocks > 0]
    assert taken == [(1, "a", 1), (2, "a", 1), (2, "b", 3)]
    assert s.block_manager.blocks_taken(2, 2) == {"b": 3, "a": 1}


def test_nobody_comes_in_while_somebody_steps_back():
    """The blocks that were just given up are for whoever runs; the small request at the door has to wait."""
    s = filled(("a", 8, 9), ("b", 4, 9), blocks=4)
    run_step(s)
    s.add(group("small", 1, 1))
    batch = s.schedule()
    assert batch.preempted == ["b"] and [item.seq.seq_id for item in batch.scheduled] == ["a"]
    assert s.block_manager.num_free_blocks == 1, "enough for the small one, and yet"
    assert order(s) == (["a"], ["b", "small"])


def test_several_step_back_for_one():
    """Three samples need their second block in the same step, one is free: two requests of one block each must go."""
    s = filled(("a", 3, 3, 3), ("b", 1, 4), ("c", 1, 4), num_seqs=5, blocks=6)
    samples = [("a", 1), ("a/1", 1), ("a/2", 1)]
    assert run_step(s) == [("a", 3), ("b", 1), ("c", 1)]
    assert run_step(s) == [*samples, ("b", 1), ("c", 1)]
    assert run_step(s) == samples
    assert order(s) == ([], ["b", "c"])
    assert run_all(s) == [[("b", 3), ("c", 3)], [("b", 1), ("c", 1)]]


def test_blocks_promised_to_a_fork_are_not_free():
    """Four samples will need four blocks once their prompt is computed: whoever came in on them had to go again."""
    s = filled(("a", 3, 2, 4), ("b", 4, 3), num_seqs=6, blocks=4)
    assert run_step(s) == [("a", 3)] and s.block_manager.num_free_blocks == 3
    assert run_step(s) == [("a", 1), ("a/1", 1), ("a/2", 1), ("a/3", 1)]
    assert not any("preempted" in line.why for line in s.block_manager.allocation_log)


def test_only_what_is_written_goes_to_the_host():
    """A long prompt has all its blocks from the start; those not written yet would only fill the host and the bus."""
    s = filled(("a", 4, 10), ("b", 40, 4), blocks=12, tokens=8, mode="swap", host=20)
    while not s.batch.preempted:
        b = s.waiting[0].seqs[0] if s.waiting else s.running["b"].seqs[0]
        run_step(s)
    assert b.num_computed_tokens == 32 and len(s.batch.moves.swap_out) == 8, "of 10 blocks"
    run_all(s)
    assert s.block_manager.num_free_blocks == 12 and s.block_manager.num_free_swap_blocks == 20


def test_prompt_and_output_are_computed_again_like_a_prompt():
    """What was sampled stays: 4 tokens of prompt and 5 of output come back in one piece, and the next is sampled."""
    s = filled(("a", 4, 9), ("b", 4, 9), policy="prefill_first", blocks=4, num_seqs=2)
    steps = run_all(s)
    assert [dict(step).get("b", 0) for step in steps] == [4, 1, 1, 1, 1, 0, 0, 0, 0, 9, 1, 1, 1]
    assert s.memory.recomputed == 8  # the ninth had been sampled, but not computed


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_what_has_grown_too_long_for_a_step_is_cut(policy):
    """Prompts are not cut here, but with its output a prompt may be longer than any step: it would never return."""
    s = filled(("a", 4, 9), ("b", 5, 9), policy=policy, blocks=5, num_seqs=2, tokens=6, chunked=False)
    pieces = [count for step in run_all(s) for name, count in step if name == "b" and count > 1]
    assert pieces == {"mixed": [5, 6, 3], "prefill_first": [5, 6, 4]}[policy]


def test_it_returns_in_pieces_beside_those_who_run():
    """mixed: a returning request gets what decodes leave of the budget. No token is sampled before its last piece, and
    what is computed a second time is counted once for each time."""
    s = filled(("a", 4, 12), ("x", 4, 6), ("c", 4, 9), blocks=6, num_seqs=3, tokens=6)
    c, computed, outputs = s.waiting[2].seqs[0], [], []
    while s.has_unfinished:
        computed.append(dict(run_step(s)).get("c", 0))
        outputs.append(c.num_output_tokens)
    assert computed == [0, 3, 1, 1, 1, 0, 0, 5, 2, 1, 0, 0, 6, 3, 1, 1, 1]
    assert outputs == [0, 0, 1, 2, 3, 3, 3, 3, 4, 5, 5, 5, 5, 6, 7, 8, 9]
    assert s.memory.recomputed == 6 + 8


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_returns_is_not_starved_by_newcomers(n):
    """Prompts are not cut here, but what returns was begun long ago: if it waited until a step could take all the rest
    of it, a stream of short requests behind it would fill every step, for ever."""
    s = filled(*[(f"a{i}", 2, 18) for i in range(5 - n)], num_seqs=8, tokens=8, chunked=False, blocks=14 - 2 * n)
    run_step(s)
    run_step(s)
    old = group("old", 4, 12, n)
    s.add(old)
    for step in range(200):
        s.add(group(f"new{step}", 1, 3))
        run_step(s)
        if old.is_finished:
            break
    assert old.is_finished and old.seqs[0].num_lost_tokens > 0


# memory: swap


def test_swapped_out_and_in():
    """Its blocks go to the host and come back, and it goes on with its next token: nothing is computed again."""
    s = filled(("a", 4, 9), ("b", 4, 9), blocks=4, mode="swap", host=4)
    b = s.waiting[1]
    steps, statuses, host = [], [], []
    while s.has_unfinished:
        steps.append(dict(run_step(s)).get("b", 0))
        statuses.append(b.status.value)
        host.append(s.block_manager.num_swap_blocks - s.block_manager.num_free_swap_blocks)
    assert steps == [4, *[1] * 4, *[0] * 4, *[1] * 4]
    assert statuses == [*["running"] * 5, *["swapped"] * 4, *["running"] * 3, "finished"]
    assert host == [*[0] * 5, *[2] * 4, *[0] * 4]
    assert b.seqs[0].num_lost_tokens == 0


def test_a_full_host_falls_back_to_recompute():
    """One block on the host: c fits there, b does not, so b drops its blocks and computes its tokens again."""
    s = filled(("a", 4, 9), ("b", 4, 9), ("c", 4, 9), blocks=5, mode="swap", host=1)
    for _ in range(6):
        run_step(s)
    assert [(one.request_id, one.status.value) for one in s.waiting] == [("b", "waiting"), ("c", "swapped")]
    assert s.block_manager.num_free_swap_blocks == 0
    run_all(s)


def test_swapped_requests_are_no_prefills():
    """max_num_prefills keeps prompts apart. Who comes back from the host computes one token: it need not wait."""
    s = filled(("a", 4, 9), ("b", 4, 9), ("c", 4, 9), blocks=5, mode="swap", host=1, prefills=1)
    assert [("b", 9), ("c", 1)] in run_all(s)


def test_a_prompt_that_was_swapped_out_half_way_is_a_prefill():
    """What comes back from the host may lack more than one token: beside another prompt it would exceed the cap."""
    s = filled(("a", 4, 14), ("b", 4, 14), blocks=6, mode="swap", host=2, prefills=1, tokens=7)
    for _ in range(4):
        run_step(s)
    s.add(group("c", 8, 3))
    steps = run_all(s)
    assert steps[0] == [("a", 1), ("b", 1), ("c", 5)]  # then c is swapped out, and later b has to start again
    assert steps[10:13] == [[("b", 7)], [("b", 5)], [("b", 1), ("c", 3)]], (
        "the second step has room for two tokens more"
    )


# several samples of one prompt


def test_samples_take_a_place_each():
    """Three samples run side by side: in four places there is none left for two others until they have ended."""
    s = filled(("a", 4, 3, 3), ("b", 4, 3, 2), num_seqs=4)
    steps = run_all(s)
    assert [[name for name, _ in step] for step in steps] == [
        ["a"],
        *[["a", "a/1", "a/2"]] * 2,
        ["b"],
        *[["b", "b/1"]] * 2,
    ]


def test_a_sample_that_ends_gives_its_place_away():
    """The place of a short sample is free at once, unless the batch is static."""
    for policy, came_in_step in (("mixed", 2), ("static", 5)):
        s = scheduler(policy, num_seqs=3)
        s.add(SequenceGroup([sequence("a", 4, new, index) for index, new in enumerate((5, 2, 5))]))
        s.add(group("b", 4, 1))
        steps = run_all(s)
        assert next(i for i, step in enumerate(steps) if ("b", 4) in step) == came_in_step


def test_samples_begin_after_the_last_piece_of_the_prompt():
    """The prompt is computed once, in pieces here; then the others share its blocks, and each samples a first token."""
    s = scheduler(tokens=4)
    one = group("a", 10, 3, 3)
    s.add(one)
    for pieces in (4, 4):
        assert run_step(s) == [("a", pieces)]
        assert [seq.status.value for seq in one.seqs] == ["running", "waiting", "waiting"]
    assert run_step(s) == [("a", 2)]
    assert [seq.status.value for seq in one.seqs] == ["running"] * 3
    assert [seq.num_output_tokens for seq in one.seqs] == [1, 1, 1]
    assert s.block_manager.num_blocks - s.block_manager.num_free_blocks == 3
    assert run_step(s) == [("a", 1), ("a/1", 1), ("a/2", 1)]
    assert s.block_manager.num_blocks - s.block_manager.num_free_blocks == 2 + 3  # 8 tokens shared, three tails


def test_samples_step_back_and_return_together():
    """A sample alone would lose what it shares with the others. They return as they began: one prompt, then the forks,
    and then each computes the output that it had already."""
    s = filled(("a", 4, 9), ("b", 6, 7, 3), blocks=7)
    steps = run_all(s)
    assert [[pair for pair in step if pair[0][0] == "b"] for step in steps] == [
        [("b", 6)],
        *[[("b", 1), ("b/1", 1), ("b/2", 1)]] * 2,
        *[[]] * 6,
        [("b", 6)],
        [("b", 3), ("b/1", 3), ("b/2", 3)],
        *[[("b", 1), ("b/1", 1), ("b/2", 1)]] * 3,
    ]


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_what_is_left_of_a_group_goes_on(mode):
    """The first sample has ended before the others step back: the prompt must then be computed by another one."""
    s = scheduler(blocks=7, mode=mode, host=7)
    s.add(group("a", 4, 13))
    s.add(SequenceGroup([sequence("b", 6, new, index) for index, new in enumerate((2, 7, 7))]))
    b = s.waiting[1]
    steps = [[pair for pair in step if pair[0][0] == "b"] for step in run_all(s)]
    assert [seq.num_output_tokens for seq in b.seqs] == [2, 7, 7]
    both = [("b/1", 1), ("b/2", 1)]
    assert steps[1:13] == [[("b", 1), *both], both, both, both, *[[]] * 8]
    assert steps[13:] == {"recompute": [[("b/1", 6)], [("b/1", 5), ("b/2", 5)], both], "swap": [both, both]}[mode]


# the batch of a static policy, and aborts


def test_static_takes_back_who_stepped_back():
    """The batch is closed for newcomers, not for its own members: b returns when x has ended, c stays outside."""
    s = filled(("a", 4, 9), ("x", 4, 3), ("b", 4, 4), ("c", 1, 1), blocks=5, num_seqs=3, policy="static")
    assert run_all(s) == [
        [("a", 4), ("x", 4), ("b", 4)],
        *[[("a", 1), ("x", 1)]] * 2,
        [("b", 5)],
        *[[("a", 1), ("b", 1)]] * 2,
        *[[("a", 1)]] * 4,
        [("c", 1)],
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_abort_frees_the_blocks_wherever_the_request_is(policy):
    """Waiting, running, finished in a static batch, unknown: nothing is lost and nobody else is touched."""
    s = filled(*[(name, 3, 4) for name in "abc"], policy=policy, num_seqs=2, blocks=8)
    run_step(s)
    assert s.abort("c").seqs[0].finish_reason == "abort" and not s.waiting
    assert s.abort("a").seqs[0].finish_reason == "abort" and s.block_manager.num_free_blocks == 7
    assert s.abort("a") is None and s.abort("nobody") is None
    check_blocks(s)
    assert all(name == "b" for step in run_all(s) for name, _ in step)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_abort_of_who_stepped_back(mode):
    """In the queue with tokens of its own, perhaps with blocks on the host, in several samples: all of it must go."""
    s = filled(("a", 4, 9), ("b", 6, 7, 3), blocks=7, mode=mode, host=7)
    while not s.waiting or s.waiting[0].is_new:
        run_step(s)
    assert s.waiting[0].status is (SequenceStatus.SWAPPED if mode == "swap" else SequenceStatus.WAITING)
    assert s.block_manager.num_free_swap_blocks == (3 if mode == "swap" else 7)
    gone = s.abort("b")
    assert [seq.finish_reason for seq in gone.seqs] == ["abort"] * 3
    assert s.block_manager.num_free_swap_blocks == 7
    check_blocks(s)
    assert all(step == [("a", 1)] for step in run_all(s))


@pytest.mark.parametrize("steps", range(1, 7))
def test_abort_of_samples_at_any_moment(steps):
    """Before the fork one sequence holds blocks, after it all do, and those that ended hold none: each block comes back
    exactly once."""
    s = scheduler(tokens=4, blocks=16)
    s.add(SequenceGroup([sequence("a", 10, new, index) for index, new in enumerate((2, 9, 9))]))
    s.add(group("b", 4, 9))
    for _ in range(steps):
        run_step(s)
    s.abort("a")
    check_blocks(s)
    run_all(s)
