"""Draft model: a smaller model with the same tokens writes on, and the target checks what it wrote.

It has a runner and KV blocks of its own. To each sequence that decodes belongs a follower: the same text and seed in
the draft's blocks, a little behind or ahead.

    target    a b c d|            the follower has computed a b c, takes d, and drafts e f g in three steps of its own
    follower  a b c|d e f g       (the last one, g, is sampled and not computed)
    target    a b c d e x|        e was right, f was not: f and g go, x comes, and the next drafts begin behind x
    follower  a b c d e|x

What a rejected draft has left in the follower's blocks is overwritten by the next one. At first the follower lacks the
whole prompt and computes it, in pieces if it is longer than a step.

Drafts are sampled as the target samples, with the same parameters and noise: speculative.py says why. So a target that
drafts for itself is always right. A sequence gets no drafts while there are no blocks for its follower, or where the
draft model's positions end.

Models of one family share their tokens, but often not the size to which the vocabulary is padded (Qwen2.5: 151,936 or
152,064). A draft that the target has no row for is dropped, and a text that the draft model has no row for gets none.
"""

from dataclasses import replace
from itertools import takewhile

import torch

from . import checkpoint, zoo
from .attention import BACKENDS, choose_backend
from .batch import Batch
from .block_manager import BlockManager
from .config import EngineConfig, ModelConfig, Resolved, SchedulerConfig
from .cuda_graphs import graph_memory, graph_sizes
from .features import resolve_features
from .kv_cache import KVCache, block_bytes
from .model_runner import ModelRunner
from .sequence import Sequence, SequenceGroup, SequenceStatus
from .speculative import NgramProposer, Proposer
from .tokenizer import Tokenizer


class Follower:
    """A sequence in the draft model's blocks. drafts: those of this step."""

    def __init__(self, seq: Sequence, name: str):
        self.target = seq
        params = replace(seq.params, logprobs=None)
        prompt, more = seq.token_ids[: seq.num_prompt_tokens], (seq.stop_token_ids, seq.max_output_tokens, None)
        self.seq = Sequence(name, prompt, params, seq.seed, *more)
        self.group = SequenceGroup([self.seq])
        self.num_wanted = 0
        self.drafts: list[int] = []

    def begin(self, num_wanted: int) -> None:
        """Drop the drafts that were wrong, take what came in their place, and be ready to draft so many tokens."""
        ours, true = self.seq.token_ids, self.target.token_ids
        same = self.num_true
        while same < min(len(ours), len(true)) and ours[same] == true[same]:
            same += 1
        ours[same:] = true[same:]
        last = len(true) - 1  # is computed in any case: the next token is sampled from it
        self.seq.num_computed_tokens = min(self.seq.num_computed_tokens, same, last)
        self.num_wanted, self.drafts = num_wanted, []

    @property
    def num_true(self) -> int:
        """Its first tokens that are no drafts."""
        return len(self.seq.token_ids) - len(self.drafts)

    @property
    def is_done(self) -> bool:
        return len(self.drafts) >= self.num_wanted

    def append(self, token_id: int) -> None:
        self.seq.token_ids.append(token_id)
        self.drafts.append(token_id)


class DraftModel(Proposer):
    """Proposes what another model would write. `make_cache` must be called before it can."""

    makes_all = True

    def __init__(self, config: EngineConfig, target: ModelConfig, resolved: Resolved, tokenizer: Tokenizer):
        files = zoo.locate(config.speculative.model, config.load_format)
        model_config = ModelConfig.from_hf(files.config)
        check_vocabulary(config, Tokenizer(files.tokenizer), tokenizer)
        self.target_vocab_size = target.vocab_size
        self.resolved = resolve_draft(config, model_config, resolved)
        self.features = resolve_features(config, self.resolved, model_config.head_dim)
        self.model_config = replace(model_config, dtype=resolved.dtype)
        self.model = build_draft(self, files, config.seed or 0)
        self.tokens_forwarded = 0
        self._followers: dict[Sequence, Follower] = {}
        self._num_made = 0

    def leave_room(self, room: int, target: ModelConfig, graph_sizes: list[int]) -> int:
        """Each of the target's blocks has one here, and there are graphs of no more sizes than the target's."""
        r, models = self.resolved, (target, self.model_config)
        size, ours = (block_bytes(model, r.block_size, r.kv_dtype) for model in models)
        graphs = graph_memory(self.model_config, graph_sizes, r.max_model_len // r.block_size + 1)
        return (room - graphs) * size // (size + ours)

    def make_cache(self, num_blocks: int, config: SchedulerConfig) -> None:
        """As many blocks as the target has, and a runner for as many sequences."""
        self._budget, r = config.max_num_batched_tokens, self.resolved
        cache = KVCache(self.model_config, num_blocks, r.block_size, r.device, 0, r.kv_dtype)
        self.block_manager = BlockManager(num_blocks, r.block_size)
        self.runner = ModelRunner(self.model, cache, r.device, None, self.features.ops, config.max_num_seqs)
        if self.features.cuda_graphs:
            vocab_size = self.model_config.vocab_size
            self.runner.make_graphs(graph_sizes(config.max_num_seqs), r.max_model_len, vocab_size)

    def propose(self, wanted: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        """All of them together: each step of the draft model computes what each follower lacks."""
        self._drop_the_stopped()
        followers = [one for seq, count in wanted.items() if (one := self._follow(seq, count)) is not None]
        while left := [one for one in followers if not one.is_done]:
            self._step(left)
        return {
            one.target: [*takewhile(lambda token_id: 0 <= token_id < self.target_vocab_size, one.drafts)]
            for one in followers
        }

    def forget(self) -> None:
        """Free all blocks, whoever seems to hold them. Followers are made anew when they are needed."""
        blocks = self.block_manager
        self.block_manager, self._followers = BlockManager(blocks.num_blocks, blocks.block_size), {}

    def _drop_the_stopped(self) -> None:
        """Whoever has finished or been preempted needs no blocks here."""
        for seq in [seq for seq in self._followers if seq.status is not SequenceStatus.RUNNING]:
            self.block_manager.free(self._followers.pop(seq).seq.seq_id)

    def _follow(self, seq: Sequence, count: int) -> Follower | None:
        """The follower of a sequence, ready to draft so many tokens, or as many as there are positions for. None if
        there are none, or too few blocks."""
        count = min(count, self.resolved.max_model_len - seq.num_tokens + 1)
        end = seq.num_tokens + count - 1  # the last draft is not computed
        known = self._followers.get(seq)
        if count < 1 or not self._can_read(seq.token_ids[known.num_true if known else 0 :]):
            return None
        if known is None:
            if self.block_manager.blocks_for(end) > self.block_manager.num_free_blocks:
                return None
            self._num_made += 1  # a name of its own: the id of a request may be used again
            known = Follower(seq, str(self._num_made))
            self.block_manager.allocate(known.seq.seq_id, end)
            self._followers[seq] = known
        wanted = {known.seq.seq_id: end}
        if self.block_manager.num_blocks_to_grow(wanted) > self.block_manager.num_free_blocks:
            return None
        self.block_manager.grow(wanted)
        known.begin(count)
        return known

    def _can_read(self, token_ids: list[int]) -> bool:
        return max(token_ids, default=0) < self.model_config.vocab_size

    def _step(self, followers: list[Follower]) -> None:
        """One step of the draft model: what these lack, as far as it goes, and a draft for who lacks nothing more."""
        batch, by_id = Batch(self._budget), {one.seq.seq_id: one for one in followers}
        for one in followers:
            batch.add(one.group, one.seq, self.block_manager.table(one.seq.seq_id).blocks, may_cut=True)
        token_ids = self.runner.run(batch).token_ids
        for item in batch.scheduled:
            item.seq.num_computed_tokens += item.num_tokens
            self.tokens_forwarded += item.num_tokens
            if item.is_last_chunk:
                by_id[item.seq.seq_id].append(*token_ids[item.seq.seq_id])


def make_proposer(config: EngineConfig, target: ModelConfig, resolved: Resolved, tokenizer: Tokenizer) -> Proposer:
    """Who drafts, by the option `speculative`. A draft model's weights are loaded here. tokenizer: the target's."""
    if config.speculative is None:
        return Proposer()
    if config.speculative.method:
        return NgramProposer(config.speculative)
    return DraftModel(config, target, resolved, tokenizer)


def check_vocabulary(config: EngineConfig, ours: Tokenizer, theirs: Tokenizer) -> None:
    """Raises ValueError for a draft model of whose token ids one means something else. More ids do no harm."""
    tokens = {token_id: token for token, token_id in theirs.hf.get_vocab().items()}
    same = {token_id: token for token, token_id in ours.hf.get_vocab().items() if token_id in tokens}
    other = min((token_id for token_id, token in same.items() if token != tokens[token_id]), default=None)
    if other is not None:
        raise ValueError(
            f"speculative model={config.speculative.model!r} has other tokens than {config.model!r}: id {other} is "
            f"{same[other]!r} there and {tokens[other]!r} here; take a smaller model of the same family, or "
            "method='ngram'"
        )


def resolve_draft(config: EngineConfig, model_config: ModelConfig, target: Resolved) -> Resolved:
    """What the draft model runs with: the target's device, dtype and blocks, its own attention and length."""
    where = target.device, target.dtype, model_config.head_dim, target.block_size, target.kv_dtype
    backend, reason = choose_backend(config.attention_backend, *where)
    most = min(target.max_model_len, model_config.max_model_len)
    return replace(target, attention_backend=backend, attention_reason=reason, max_model_len=most)


def build_draft(draft: DraftModel, files: zoo.ModelFiles, seed: int) -> torch.nn.Module:
    r, attend = draft.resolved, BACKENDS[draft.resolved.attention_backend]
    sizes = draft.model_config, attend, r.max_model_len, r.device
    return checkpoint.build_model(*sizes, files.weights, seed, draft.features.ops)
