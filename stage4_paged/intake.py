"""Intake: what a user hands in becomes sequences that can be queued, or a ValueError that says why it cannot be served.

Everything of a call is checked before anything of it is made. inputs.py knows what a prompt is; here it is held against
this engine: its vocabulary, its context, the budget of a step and the blocks of the pool.
"""

import random
from itertools import count

from .block_manager import BlockManager
from .config import EngineConfig, ModelConfig, Resolved
from .inputs import as_params, as_prompts, check_params, check_prompt_ids
from .sampling import SamplingParams, sample_seed
from .scheduler import Scheduler, check_fits_step
from .sequence import Sequence, SequenceGroup
from .tokenizer import Detokenizer, Tokenizer


class Intake:
    """Makes sequences; gives them their ids and seeds."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        resolved: Resolved,
        scheduler: Scheduler,
        eos_token_ids: tuple[int, ...],
    ):
        self._vocab_size = model_config.vocab_size
        self._max_model_len = resolved.max_model_len
        self._max_blocks_per_seq = config.max_blocks_per_seq
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._seeds = random.Random(config.seed)  # for requests that bring none; None: from the system
        self._next_id = 0

    def make_groups(
        self, prompts: object, params: object, tokenizer: Tokenizer, request_id: str | None, in_use: dict
    ) -> list[SequenceGroup]:
        """One group per prompt. request_id: of the only one; None: ids that are not in use. Raises ValueError."""
        prompts = as_prompts(prompts)
        params = as_params(params, len(prompts))
        requests = list(zip(prompts, params, strict=True))
        checked = [self._check(i, *request, tokenizer) for i, request in enumerate(requests)]
        groups = []
        for (prompt, params), (ids, most) in zip(requests, checked, strict=True):
            options = dict(prompt=prompt if isinstance(prompt, str) else None, prompt_token_ids=ids, params=params)
            name = self._new_id(in_use) if request_id is None else request_id
            options |= dict(request_id=name, max_output_tokens=most)
            groups.append(self._make_group(tokenizer, **options))
        return groups

    def _check(
        self, index: int, prompt: str | list[int], params: SamplingParams, tokenizer: Tokenizer
    ) -> tuple[list[int], int]:
        """Token ids of a prompt that can be served, and the most tokens that it may make; ValueError otherwise."""
        try:
            check_params(params, self._vocab_size)
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            ids = check_prompt_ids(ids, self._vocab_size, self._max_model_len)
            check_fits_step(ids, params.n, self._scheduler.config)
            room, manager = self._max_model_len - len(ids), self._scheduler.block_manager
            return ids, check_fits_pool(len(ids), params.max_tokens, room, params.n, manager, self._max_blocks_per_seq)
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from None

    def _make_group(self, tokenizer: Tokenizer, params: SamplingParams, **options: object) -> SequenceGroup:
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        special = tokenizer.end_ids(params.stop, self._vocab_size)
        stop_token_ids = (*(() if params.ignore_eos else self._eos_token_ids), *params.stop_token_ids, *special)
        return SequenceGroup(
            [
                Sequence(
                    params=params,
                    seed=sample_seed(seed, index),
                    stop_token_ids=stop_token_ids,
                    detokenizer=Detokenizer(tokenizer, params.stop),
                    index=index,
                    **options,
                )
                for index in range(params.n)
            ]
        )

    def _new_id(self, in_use: dict) -> str:
        self._next_id = next(n for n in count(self._next_id) if str(n) not in in_use) + 1
        return str(self._next_id - 1)


def check_fits_pool(
    num_prompt_tokens: int,
    max_tokens: int | None,
    room: int,
    n: int,
    manager: BlockManager,
    max_blocks_per_seq: int | None,
) -> int:
    """Most tokens that a request may make: max_tokens, or what its context (`room`) and the blocks leave for None.

    Raises ValueError if its n samples could need more blocks than there are, even alone in the engine: it would wait
    for ever, and all behind it. The last token needs no place in the cache, as nothing is computed after it.
    """
    shared = num_prompt_tokens // manager.block_size if n > 1 else 0
    most = shared + (manager.num_blocks - shared) // n  # blocks of one sample
    limit = f"the pool has {manager.num_blocks}"
    if max_blocks_per_seq is not None and max_blocks_per_seq < most:
        most, limit = (
            max_blocks_per_seq,
            f"max_blocks_per_seq={max_blocks_per_seq} allows {max_blocks_per_seq} for each",
        )
    wanted = 1 if max_tokens is None else min(max_tokens, room)
    fits = most * manager.block_size - num_prompt_tokens + 1
    if fits < wanted:
        need = manager.blocks_for_samples(num_prompt_tokens, [num_prompt_tokens + wanted - 1] * n)
        raise ValueError(
            f"n={n} samples of {num_prompt_tokens} prompt tokens and up to {wanted} new ones need {need} KV blocks of "
            f"{manager.block_size} tokens, but {limit}; shorten the prompt, lower max_tokens or n, or raise "
            "num_kv_blocks or max_blocks_per_seq"
        )
    return min(fits, room) if max_tokens is None else wanted
