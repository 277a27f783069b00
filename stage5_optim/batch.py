"""Batch: one step's plan, as the scheduler makes it and the model runner carries it out.

First the blocks that must be copied (`moves`), then the tokens that are computed (`scheduled`): sequences one after the
other, so many tokens each.
"""

from dataclasses import dataclass, field

from .block_manager import BlockMoves
from .sequence import Sequence, SequenceGroup


@dataclass(frozen=True)
class Scheduled:
    """What one sequence computes in this step: `num_tokens` of the `num_missing` that it lacks.

    num_recomputed: of its tokens, those that had been computed once and were lost. block_table: where its K and V are.
    forks: the other samples of its prompt, if they begin after this step. drafts: guesses of its next tokens, which are
    computed too: num_tokens counts them (see speculative.py).
    """

    seq: Sequence
    num_tokens: int
    num_missing: int
    num_recomputed: int
    block_table: list[int]
    forks: tuple[Sequence, ...] = ()
    drafts: list[int] = field(default_factory=list)

    @property
    def is_decode(self) -> bool:
        """The sequence lacked exactly one token."""
        return self.num_missing == 1

    @property
    def is_last_chunk(self) -> bool:
        """Nothing is missing afterwards, so its next token is sampled."""
        return self.num_tokens == self.num_missing + len(self.drafts)


class Batch:
    """One step's plan while it is being made: what is scheduled, and how many tokens of the budget are left.

    moves: blocks to copy first. preempted: request_ids. touched: requests that would be half done if the step failed.
    """

    def __init__(self, budget: int):
        self.scheduled: list[Scheduled] = []
        self.left = budget
        self.moves = BlockMoves()
        self.preempted: list[str] = []
        self.prefix_query_tokens = 0  # of those who were admitted
        self.prefix_hit_tokens = 0
        self.touched: dict[str, SequenceGroup] = {}

    @property
    def num_recomputed(self) -> int:
        return sum(item.num_recomputed for item in self.scheduled)

    def fits(self, group: SequenceGroup, seq: Sequence, may_cut: bool) -> int:
        """How many of its missing tokens `seq` may compute in this step.

        What is computed for the second time may always be cut: it can be longer than any step, and newcomers pass it.
        """
        wanted = group.target_len(seq) - seq.num_computed_tokens
        num_tokens = min(wanted, self.left)
        return num_tokens if num_tokens == wanted or may_cut or seq.num_lost_tokens > 0 else 0

    def add(self, group: SequenceGroup, seq: Sequence, block_table: list[int], may_cut: bool) -> bool:
        """Schedule what `seq` is missing, cut to the budget if that is allowed. False if it gets nothing."""
        num_tokens = self.fits(group, seq, may_cut)
        if num_tokens == 0:
            return False
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        recomputed = max(0, min(end, seq.num_lost_tokens) - start)
        forks = group.unfinished[1:] if end == seq.num_prompt_tokens and not group.is_forked else []
        self.scheduled.append(Scheduled(seq, num_tokens, seq.num_missing_tokens, recomputed, block_table, tuple(forks)))
        self.left -= num_tokens
        return True
