"""Inputs: what users hand in is checked at the door. (A given file: it may be skipped.)

That goes for the files of a model too: a damaged one is named, and so is a value in it that cannot be meant.

Nothing is queued before everything of a call is known to be right, so a refusal leaves no trace in the engine. Each
refusal is a ValueError that names the value, the limit and the way out.
"""

import json
import math
import numbers
import operator
import os
from pathlib import Path

from .config import check_int
from .sampling import SamplingParams, plain


def as_model(model: object) -> object:
    """A Path as text, whatever else as it is."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def as_prompts(prompts: object) -> list[str | list[int]]:
    """One prompt or many (text, or token ids as a list, tuple, array or tensor) -> a list of prompts."""
    prompts = plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts={prompts!r:.80}: expected text, a list of token ids, or a list of such")
    prompts = [plain(prompt) for prompt in prompts]
    return [prompts] if _is_ids(prompts) else prompts


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
            kind = f"{type(one).__module__}.{type(one).__qualname__}"  # each stage has its own
            raise ValueError(
                f"sampling_params={one!r:.80}, a {kind}: expected {SamplingParams.__module__}.SamplingParams"
            )
    return many


def check_prompt_ids(ids: object, vocab_size: int, max_model_len: int) -> list[int]:
    """The token ids of a prompt as ints. Raises ValueError for none, too many, or one outside the vocabulary."""
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"the prompt {ids!r:.80} is neither text nor a list of token ids")
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


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError that names a file that is missing, damaged, or holds no object."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; expected a Hugging Face model folder")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:  # half a download, or the pointer that git-lfs leaves
        raise ValueError(f"{path} is no complete JSON file: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {value!r:.40}: expected a JSON object, {{...}}; fetch it again")
    return value


COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
COUNTS += ("num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings")
NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow")
NUMBERS += ("mscale", "mscale_all_dim", "partial_rotary_factor")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "truncate")
OBJECTS = ("rope_scaling", "rope_parameters", "quantization_config")


def read_config(path: Path) -> dict:
    """config.json or generation_config.json. Raises ValueError that names the file and the key of a wrong value.

    Only the type is looked at, and null is a value left out; what the decoder can do is ModelConfig's to say.
    """
    config = read_json(path)
    _check_values(path, config)
    if config.get("rms_norm_eps", 1e-6) is None:  # the one key whose default nobody else fills in
        raise ValueError(f"{path}: rms_norm_eps=None: expected a number; leave the key out for 1e-06")
    for section in OBJECTS:
        if config.get(section) is not None:
            _check_value(f"{path}: {section}", config[section], isinstance(config[section], dict), "an object")
            _check_values(f"{path}: {section}", config[section])
    ids = config.get("eos_token_id")
    _check_value(f"{path}: eos_token_id", ids, ids in (None, []) or _is_id(ids) or _is_ids(ids), "a token id or a list")
    return config


def _check_values(where: object, values: dict) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if name in COUNTS:
            check_int(f"{where}: {name}", value, minimum=1)
        elif name in (*NUMBERS, "rms_norm_eps"):
            _check_value(f"{where}: {name}", value, _is_number(value), "a number of at least 0")
        elif name in FLAGS:
            _check_value(f"{where}: {name}", value, isinstance(value, bool), "true or false")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_value(name: str, value: object, is_right: bool, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name}={value!r:.80}: expected {expected}")
