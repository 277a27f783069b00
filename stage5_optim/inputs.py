"""Inputs: what users hand in is checked at the door. (A given file: it may be skipped.)

Nothing is queued before everything of a call is known to be right, so a refusal leaves no trace in the engine. Each
refusal is a ValueError that names the value, the limit and the way out.
"""

import numbers
import operator

from .sampling import SamplingParams


def as_prompts(prompts: object) -> list[str | list[int]]:
    """One prompt or many (text, or token ids as a list, tuple, array or tensor) -> a list of prompts."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts={prompts!r}: expected text, a list of token ids, or a list of such")
    prompts = [_plain(prompt) for prompt in prompts]
    return [prompts] if _is_ids(prompts) else prompts


def _plain(value: object) -> object:
    """Arrays and tensors, numpy's integers too, as Python's own lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_ids(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(_is_id(item) for item in value)


def _is_id(item: object) -> bool:
    return isinstance(item, numbers.Integral) and not isinstance(item, bool)


def as_params(params: object, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts, or one for each; None: the defaults."""
    params = SamplingParams() if params is None else params
    many = list(params) if isinstance(params, (list, tuple)) else [params] * num_prompts
    if len(many) != num_prompts:
        raise ValueError(f"{len(many)} sampling_params for {num_prompts} prompts: give one, or one for each prompt")
    for one in many:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"sampling_params={one!r}: expected SamplingParams")
    return many


def check_prompt_ids(ids: object, vocab_size: int, max_model_len: int) -> list[int]:
    """The token ids of a prompt as ints. Raises ValueError for none, too many, or one outside the vocabulary."""
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"the prompt {ids!r} is neither text nor a list of token ids")
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    if not _is_ids(ids):
        raise ValueError(f"the prompt {ids!r:.80} holds something that is no token id")
    ids = [operator.index(token_id) for token_id in ids]
    outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but max_model_len={max_model_len} allows {max_model_len - 1} and one "
            "new token; shorten the prompt or raise max_model_len"
        )
    return ids


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for what only the vocabulary can tell."""
    for token_id in params.stop_token_ids:
        if token_id >= vocab_size:
            raise ValueError(f"stop_token_ids holds {token_id}, but ids go from 0 to {vocab_size - 1}")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ValueError(f"logprobs={params.logprobs} is more than the vocabulary of {vocab_size}")
