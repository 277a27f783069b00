"""Trace: what is kept of a step that has been launched. Reads the scheduler and the block manager, changes nothing."""

from collections import Counter
from itertools import islice, takewhile

from .batch import Batch
from .block_manager import BlockManager
from .metrics import MOST_NAMED, StepRecord
from .scheduler import Scheduler
from .sequence import SequenceGroup, SequenceStatus


def step_record(
    batch: Batch, scheduler: Scheduler, start: float, attention_pairs: int, seconds: dict, trace_blocks: bool
) -> StepRecord:
    """What the trace keeps of a step that has just been launched: who runs, who waits, what the cache holds."""
    manager, scheduled = scheduler.block_manager, batch.scheduled
    swapped, queue = swapped_ids(scheduler), (group.request_id for group in scheduler.waiting)
    running = [seq for group in scheduler.running.values() for seq in group.seqs] if trace_blocks else []
    holders = [seq for seq in running if manager.holds(seq.seq_id)]
    tokens = Counter()
    for item in scheduled:
        tokens[item.seq.request_id] += item.num_tokens
    return StepRecord(
        step=-1,  # numbered when it is recorded
        time=start,
        tokens=dict(tokens),
        attention_pairs=attention_pairs,
        seconds=seconds,
        kv_tokens_reserved=(manager.num_blocks - manager.num_free_blocks) * manager.block_size,
        kv_tokens_used=tokens_stored(list(scheduler.running.values()), manager),
        decode_tokens=sum(item.num_tokens for item in scheduled if item.is_decode),
        idle_slots=scheduler.config.max_num_seqs - len(scheduled),
        num_waiting=len(scheduler.waiting) - len(swapped),
        waiting=list(islice((name for name in queue if name not in swapped), MOST_NAMED)),
        swapped=list(swapped),
        preempted=batch.preempted,
        recomputed_tokens=batch.num_recomputed,
        swapped_out_blocks=len(batch.moves.swap_out),
        swapped_in_blocks=len(batch.moves.swap_in),
        cow_copies=len(batch.moves.copies),
        drafted_tokens=sum(len(item.drafts) for item in scheduled),
        prefix_query_tokens=batch.prefix_query_tokens,
        prefix_hit_tokens=batch.prefix_hit_tokens,
        block_tables={seq.seq_id: manager.block_table(seq.seq_id) for seq in holders},
        computed_tokens={seq.seq_id: seq.num_computed_tokens for seq in holders},
    )


def swapped_ids(scheduler: Scheduler) -> dict[str, None]:
    """Who waits with its blocks on the host. The preempted are at the head of the queue: the rest is not looked at."""
    begun = takewhile(lambda group: not group.is_new, scheduler.waiting)
    return dict.fromkeys(group.request_id for group in begun if group.status is SequenceStatus.SWAPPED)


def tokens_stored(groups: list[SequenceGroup], manager: BlockManager) -> int:
    """Tokens whose K and V are in the cache; what samples of a prompt or requests with one prefix share counts once."""
    tokens, blocks = 0, 0
    for group in groups:
        if len(group.seqs) == 1:
            if manager.holds(group.request_id):  # a member of a static batch that has ended holds nothing any more
                tokens += group.seqs[0].num_computed_tokens
                blocks += len(manager.table(group.request_id).blocks)
            continue
        filled = {}
        for seq in group.seqs:
            if manager.holds(seq.seq_id):
                for i, block in enumerate(manager.table(seq.seq_id).blocks):
                    end = seq.num_computed_tokens - i * manager.block_size
                    filled[block] = max(filled.get(block, 0), min(end, manager.block_size))
        tokens += sum(filled.values())
        blocks += len(filled)
    twice = blocks - (manager.num_blocks - manager.num_free_blocks)  # counted by several requests, and full
    return tokens - twice * manager.block_size
