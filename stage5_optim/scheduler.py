"""Scheduler: decides anew, at every step, which sequences run and with how many tokens each.

Every sequence has `num_computed_tokens` and tries to catch up with `num_tokens`. A prompt that has not been computed,
the next piece of a long prompt and one more token of a running text are the same thing: tokens that are missing. A step
may compute `max_num_batched_tokens` of them; who gets how many is the policy:

    static         a batch is formed, runs until its last member ends, and only then the next one is formed
    prefill_first  waiting prompts first, whole; when none can come in, one token for every running sequence
    mixed          one token for every running sequence first; what is left of the budget goes to pieces of prompts

            static                 mixed                      A, B, C, D: prompts; a, b, c, d: one token each
    step    1  2  3  4  5  6       1  2  3  4  5  6           .: a slot that computes nothing
    slot 0  A  a  a  a  a  C       A  a  a  a  a
    slot 1  B  b  .  .  .  D       B  b  C  c  D  d           A makes 5 tokens; B, C and D 2 each

First come, first served: whoever cannot be admitted makes those behind it wait, so nobody waits for ever. Containers
are ordered; nothing is decided by the order of a set. Source: Orca, section 4.1 (OSDI 2022); chunks: Sarathi-Serve
(arXiv 2403.02310).

Memory comes in blocks, and they run out. First of all everybody who runs gets the blocks for its next tokens, the
oldest first; if there are none left the newest gives up its own and goes back to the head of the queue:

    recompute   its blocks are dropped; later its prompt and its output so far are computed again, like a prompt
    swap        its blocks go to host memory; later they come back (recompute, where the host is full too)

The oldest is never preempted for another, so it finishes; then the next one is the oldest: all finish. Nobody is
admitted if that left fewer free blocks than the watermark, which keeps them for those who run; an idle engine ignores
it, or a large request would never start. Source: PagedAttention, section 4.5 (arXiv 2309.06180).
"""

from collections import deque

from .batch import Batch, Scheduled
from .block_manager import BlockManager
from .config import SchedulerConfig
from .prefix_cache import CachedBlock, extend_hashes
from .sequence import Sequence, SequenceGroup, SequenceStatus


class Scheduler:
    """Owns who waits, who runs, and who has which blocks of the KV cache. Touches no tensor."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager):
        self.config = config
        self.block_manager = block_manager
        self.waiting: deque[SequenceGroup] = deque()  # in order of arrival; the preempted ones are at its head
        self.running: dict[str, SequenceGroup] = {}  # in order of arrival too
        self.batch = Batch(0)  # the plan of this step, or of the last one
        self._batch_is_closed = False  # static: the batch has begun to decode, nobody new may join it
        self._prefill_steps = 0  # in a row

    def add(self, group: SequenceGroup) -> None:
        self.waiting.append(group)

    def schedule(self) -> Batch:
        """Choose the next step's tokens; admit waiting requests where the policy, memory and the budget allow it."""
        self.block_manager.step += 1
        batch = self.batch = Batch(self.config.max_num_batched_tokens)
        self._reserve(batch)
        active = [seq for group in self.running.values() for seq in group.active]
        prefills = [seq for seq in active if seq.num_missing_tokens > 1]
        decodes = [seq for seq in active if seq.num_missing_tokens == 1]
        if self.config.policy == "mixed":
            self._take(decodes, batch)
            self._take(prefills, batch)
            self._admit(batch, len(prefills))
        else:
            self._prefill_or_decode(prefills, decodes, batch)
        return batch

    def will_preempt(self) -> bool:
        """Whether the running ones need more blocks for their next tokens than are free."""
        free = self.block_manager.num_free_blocks
        again = any(seq.num_lost_tokens for group in self.running.values() for seq in group.seqs)
        if free >= self.config.max_num_seqs and not again:  # each grows by one token, except who forks a second time
            return False
        return sum(self.block_manager.num_blocks_to_grow(lengths(group)) for group in self.running.values()) > free

    def _reserve(self, batch: Batch) -> None:
        """Blocks for what the running ones compute next, the oldest first; the newest makes room if there are none."""
        for group in list(self.running.values()):
            wanted = lengths(group)
            if group.request_id in self.running and self._make_room(group, wanted, batch):
                batch.touched[group.request_id] = group
                batch.moves.copies += self.block_manager.grow(wanted)

    def _make_room(self, group: SequenceGroup, wanted: dict[str, int], batch: Batch) -> bool:
        """Preempt the newest until the group can grow. False if the group itself had to go."""
        while self.block_manager.num_blocks_to_grow(wanted) > self.block_manager.num_free_blocks:
            newest = next(other for other in reversed(self.running.values()) if not other.is_finished)
            self._preempt(newest, batch)
            if newest is group:
                return False
        return True

    def _preempt(self, group: SequenceGroup, batch: Batch) -> None:
        """Take a request's blocks away. It goes on later, first of all that wait, as if nothing had happened."""
        batch.touched[group.request_id] = group
        self.waiting.appendleft(group)
        self.running.pop(group.request_id)
        batch.preempted.append(group.request_id)
        seq_ids = list(lengths(group))
        if self.config.preemption_mode == "swap" and self._can_swap_out(group):
            batch.moves.swap_out += self.block_manager.swap_out(seq_ids)
            for seq in group.active:
                seq.status = SequenceStatus.SWAPPED
        else:
            self._free(group, "preempted")
            group.restart()
            batch.touched.pop(group.request_id)  # nothing of it is half done: should the step fail, it goes on waiting

    def _can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether the host has room for what is written of it. The blocks for the rest of its prompt go at once."""
        for seq in group.active:
            self.block_manager.shrink(seq.seq_id, seq.num_computed_tokens)
        return group.active[0].num_computed_tokens > 0 and self.block_manager.can_swap_out(list(lengths(group)))

    def _prefill_or_decode(self, prefills: list[Sequence], decodes: list[Sequence], batch: Batch) -> None:
        """Prompts while there are any, but after max_num_seqs such steps in a row the running ones get their turn."""
        if not decodes or self.config.policy == "static":  # a static batch is finite: forming it starves nobody
            self._prefill_steps = 0
        if self._prefill_steps < self.config.max_num_seqs:
            self._take(prefills, batch)
            self._admit(batch, len(prefills))
            self._prefill_steps += 1
        if decodes and not batch.scheduled:
            self._take(decodes, batch)
            self._prefill_steps = 0
            self._batch_is_closed = True

    def _take(self, seqs: list[Sequence], batch: Batch) -> None:
        """Give each of the running sequences as many of its missing tokens as the budget still has."""
        for seq in seqs:
            blocks = self.block_manager.table(seq.seq_id).blocks
            if batch.add(self.running[seq.request_id], seq, blocks, self.config.enable_chunked_prefill):
                self.publish(seq, seq.num_computed_tokens + batch.scheduled[-1].num_tokens)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The blocks that its first num_tokens fill can be found from now on, as far as the host knows the ids.

        They may be computed in this very step: K and V are written before anybody reads, in each layer.
        """
        manager = self.block_manager
        if manager.prefix_cache is None:
            return
        end = min(num_tokens, seq.num_known_tokens)
        if end // manager.block_size > len(manager.table(seq.seq_id).cached):
            extend_hashes(seq.block_hashes, seq.token_ids, seq.num_known_tokens, manager.block_size)
            manager.publish(seq.seq_id, seq.block_hashes, seq.token_ids, end)

    def _admit(self, batch: Batch, num_prefills: int) -> None:
        """Let waiting requests in, first come, first served, until one of them cannot be served in this step."""
        if batch.preempted:  # whoever has just made room would take it back
            return
        places = sum(self._num_places(group) for group in self.running.values())
        while self.waiting and (num_prefills < self.config.max_num_prefills or not self._is_prefill(self.waiting[0])):
            group = self.waiting[0]
            places += self._num_places(group)
            if places > self.config.max_num_seqs:
                return
            prefix = self._find_prefix(group)
            if not self._may_enter(group, batch, prefix):
                return
            num_prefills += self._is_prefill(group)
            batch.touched[group.request_id] = self.running[group.request_id] = group
            self.waiting.popleft()
            self._start(group, batch, prefix)
            self._take(group.active, batch)

    def _find_prefix(self, group: SequenceGroup) -> list[CachedBlock]:
        """Cached blocks that a waiting request begins with. What is in them it need not compute."""
        if self.block_manager.prefix_cache is None or self._is_swapped(group):
            return []
        first = group.unfinished[0]
        extend_hashes(first.block_hashes, first.token_ids, first.num_known_tokens, self.block_manager.block_size)
        prefix = self.block_manager.find_prefix(first.block_hashes, first.token_ids, group.target_len(first))
        first.num_computed_tokens = len(prefix) * self.block_manager.block_size
        return prefix

    def _may_enter(self, group: SequenceGroup, batch: Batch, prefix: list[CachedBlock]) -> bool:
        """The policy lets it in, and there are budget and memory for its tokens."""
        all_pending = self.running and not any(other.active for other in self.running.values())
        if group.is_new and self.config.policy == "static" and (self._batch_is_closed or all_pending):
            return False
        first = group.unfinished[0]
        return bool(batch.fits(group, first, self.config.enable_chunked_prefill)) and self._has_memory(group, prefix)

    def _num_places(self, group: SequenceGroup) -> int:
        """A static batch keeps the places of members that have ended."""
        return len(group.seqs) if self.config.policy == "static" else len(group.unfinished)

    def _has_memory(self, group: SequenceGroup, prefix: list[CachedBlock]) -> bool:
        """Enough free blocks for all that is known of it, and after that the watermark; if nothing runs, without it.

        Blocks that running requests will take when their samples fork are not free.
        """
        forks = (other for other in self.running.values() if not other.is_forked)
        promised = sum(self._blocks_to_start(other) - self._num_held(other) for other in forks)
        is_idle = all(other.is_finished for other in self.running.values())
        needed = self._blocks_to_start(group) - self.block_manager.num_held(prefix)
        free = self.block_manager.num_free_blocks - promised - needed
        return free >= (0 if is_idle else int(self.config.watermark * self.block_manager.num_blocks))

    def _num_held(self, group: SequenceGroup) -> int:
        return len(self.block_manager.table(group.active[0].seq_id).blocks)

    def _is_prefill(self, group: SequenceGroup) -> bool:
        return not self._is_swapped(group) or any(seq.num_missing_tokens > 1 for seq in group.active)

    def _is_swapped(self, group: SequenceGroup) -> bool:
        return self.block_manager.is_swapped(group.unfinished[0].seq_id)

    def _blocks_to_start(self, group: SequenceGroup) -> int:
        if self._is_swapped(group):
            lens = lengths(group)
            return self.block_manager.num_blocks_to_swap_in(list(lens)) + self.block_manager.num_blocks_to_grow(lens)
        lens = [seq.num_tokens for seq in group.unfinished]
        return self.block_manager.blocks_for_samples(group.seqs[0].num_prompt_tokens, lens)

    def _start(self, group: SequenceGroup, batch: Batch, prefix: list[CachedBlock]) -> None:
        """Give a request its blocks, new ones or those that come back from the host."""
        if self._is_swapped(group):
            batch.moves.swap_in += self.block_manager.swap_in(list(lengths(group)))
            batch.moves.copies += self.block_manager.grow(lengths(group))
        else:
            for seq_id, length in lengths(group).items():
                self.block_manager.allocate(seq_id, length, prefix)
                if self.block_manager.prefix_cache is not None:
                    batch.prefix_query_tokens += length
                    batch.prefix_hit_tokens += len(prefix) * self.block_manager.block_size
        for seq in group.active:
            seq.start()

    def fork(self, item: Scheduled) -> None:
        """The prompt is computed: the other samples begin there, with the same blocks."""
        for seq in item.forks:
            self.block_manager.fork(item.seq.seq_id, seq.seq_id)
            seq.num_computed_tokens = item.seq.num_computed_tokens
            num_shared = seq.num_prompt_tokens // self.block_manager.block_size  # item.seq may have output of its own
            seq.block_hashes = seq.block_hashes or item.seq.block_hashes[:num_shared]
            seq.start()
        if item.forks:
            self.running[item.seq.request_id].is_forked = True

    def retire(self) -> list[SequenceGroup]:
        """Free what finished sequences held, and take finished requests out. A static batch retires as a whole."""
        for group in self.running.values():
            for seq in group.seqs:
                if seq.is_finished and not seq.num_steps_in_flight and self.block_manager.holds(seq.seq_id):
                    self.block_manager.free(seq.seq_id)
        finished = [group for group in self.running.values() if group.is_finished and not group.is_in_flight]
        if self.config.policy == "static" and len(finished) < len(self.running):
            return []
        for group in finished:
            self._release(group)
        return finished

    def abort(self, request_id: str) -> SequenceGroup | None:
        """Take a request out wherever it is. Returns it, or None if nobody here has that id."""
        group = self.running.get(request_id) or next((g for g in self.waiting if g.request_id == request_id), None)
        if group is None:
            return None
        if group in self.waiting:
            self.waiting.remove(group)
        self._free(group, "aborted")
        self._release(group)
        group.finish("abort")
        return group

    def _free(self, group: SequenceGroup, why: str) -> None:
        for seq in group.seqs:
            if self.block_manager.holds(seq.seq_id):
                self.block_manager.free(seq.seq_id, why)

    def _release(self, group: SequenceGroup) -> None:
        self.running.pop(group.request_id, None)
        if not self.running:
            self._batch_is_closed = False

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)


def lengths(group: SequenceGroup) -> dict[str, int]:
    """seq_id -> tokens that need a place in the cache, of all that compute."""
    return {seq.seq_id: group.target_len(seq) for seq in group.active}


def check_fits_step(prompt_token_ids: list[int], n: int, config: SchedulerConfig) -> None:
    """Raises ValueError for a request that no step could ever take: it would wait for ever, and all behind it."""
    if not config.enable_chunked_prefill and len(prompt_token_ids) > config.max_num_batched_tokens:
        raise ValueError(
            f"the prompt has {len(prompt_token_ids)} tokens, but one step takes max_num_batched_tokens="
            f"{config.max_num_batched_tokens} and prompts are not cut; raise it, or set enable_chunked_prefill=True"
        )
    if n > config.max_num_seqs:
        raise ValueError(
            f"n={n} samples run at the same time, but max_num_seqs={config.max_num_seqs}; raise it or lower n"
        )
