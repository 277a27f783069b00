"""Rotary position embedding: which angle each pair of channels turns by. (A given file: it may be skipped.)

A query at position m and a key at position n are rotated by m * f and n * f, so that their dot product depends only
on m - n. Channel pair i turns with frequency f_i = theta ** (-2i / head_dim). Models trained on short contexts reach
longer ones by slowing some of these frequencies down; `rope_type` says how:

    default   as trained
    linear    all frequencies divided by `factor`
    llama3    long waves divided, short ones kept, a smooth ramp between
    yarn      the same idea with another ramp, and attention sharpened by `attention_factor`

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's config. Tested against `transformers`.
"""

import math
from dataclasses import dataclass, fields

import torch

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    attention_factor: float | None = None  # yarn: multiplies cos and sin
    beta_fast: float | None = None  # yarn: channels that turn more often than this are kept
    beta_slow: float | None = None  # yarn: channels that turn less often than this are slowed
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn

    @classmethod
    def from_hf(cls, config: dict) -> "RopeConfig":
        """Read the rope settings of a `config.json`, old keys and new.

        Old files say `rope_theta` and `rope_scaling` (with "type" or "rope_type"); new ones put all of it into
        `rope_parameters`. Of both, `rope_scaling` counts, as in transformers: somebody has added it. Raises ValueError
        for a rope_type that is not in ROPE_TYPES, naming it.
        """
        params = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        _check_one_theta(config, params)
        rope_type = params.get("rope_type") or params.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if sections := [key for key, value in params.items() if isinstance(value, dict)]:
            raise ValueError(f"rope settings of their own for {', '.join(sections)} are not supported")
        if (params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError("partial_rotary_factor other than 1.0 is not supported")
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in params.items() if key in known and value is not None}
        given["rope_type"] = rope_type
        given.setdefault("rope_theta", 10000.0 if config.get("rope_theta") is None else config["rope_theta"])
        if rope_type in ("llama3", "yarn"):
            original = config.get("original_max_position_embeddings")  # here it counts, as in transformers
            original = original or given.get("original_max_position_embeddings") or config["max_position_embeddings"]
            given["original_max_position_embeddings"] = original
        return cls(**given)._checked(config["max_position_embeddings"])

    def _checked(self, max_position_embeddings: int) -> "RopeConfig":
        needed = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
        missing = [name for name in needed.get(self.rope_type, []) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"rope_type {self.rope_type!r} needs {', '.join(missing)} in the model's config.json")
        for name in ("rope_theta", "factor"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} in the model's config.json: expected a number above 0"
                )
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            low = f"low_freq_factor={self.low_freq_factor!r}"
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor!r} in config.json: expected a number above {low}"
            )
        if self.rope_type == "yarn" and self.factor is None:
            factor = max_position_embeddings / self.original_max_position_embeddings
            return RopeConfig(**{**self.__dict__, "factor": factor})
        return self

    def max_positions(self, max_position_embeddings: int) -> int:
        """Longest context that these settings cover, in tokens."""
        if self.rope_type == "linear":
            return int(max_position_embeddings * max(self.factor, 1.0))
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return max_position_embeddings


def _check_one_theta(config: dict, params: dict) -> None:
    """Where `rope_scaling` displaces a `rope_theta` of `rope_parameters`, transformers goes on with another one."""
    lost = (config.get("rope_parameters") or {}).get("rope_theta")
    theta = params.get("rope_theta") or config.get("rope_theta") or 10000.0
    if lost is not None and lost != theta:
        raise ValueError(
            f"config.json has rope_theta={lost!r} in rope_parameters, which rope_scaling displaces, and {theta!r} "
            "without it; write all settings into rope_parameters, and take rope_scaling out"
        )


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """cos and sin of every angle, in fp32: [num_positions, 2, head_dim / 2]."""
    inv_freq, attention_factor = inverse_frequencies(rope, head_dim)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inv_freq[None, :]  # [num_positions, head_dim / 2]
    return torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies f_i in radians per position, fp32 [head_dim / 2], and the factor for cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.rope_theta**exponents
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(inv_freq, rope, head_dim), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)  # 0: slow down by factor, 1: as trained
    return (1 - keep) * inv_freq / rope.factor + keep * inv_freq


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    def channel_that_turns(times: float) -> float:
        wavelength = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = channel_that_turns(rope.beta_fast or 32), channel_that_turns(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    channels = torch.arange(head_dim // 2, dtype=torch.float32)
    slow = ((channels - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: as trained, 1: slow down by factor
    return slow * inv_freq / rope.factor + (1 - slow) * inv_freq


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
