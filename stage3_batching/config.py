"""Configuration: what the user asks for (EngineConfig) and what the checkpoint says of the model (ModelConfig).

Both are frozen: nothing writes back into them. A value that is only known once the machine and the model are known
(device, dtype, attention backend, length limit) is resolved into an object of its own, `Resolved`.
"""

import difflib
from dataclasses import dataclass, field, fields

import torch

from .rope import RopeConfig

FAMILIES = ("llama", "qwen2", "qwen3")
POLICIES = ("mixed", "prefill_first", "static")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ATTENTION_BACKENDS = ("torch", "flash_attn")


def reject_unknown(options: dict, known: list[str], owner: str) -> None:
    """Raise ValueError for the first option that `owner` does not know, with the nearest name that it does."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]!r}" if near else ""
            raise ValueError(f"unknown option {name!r} for {owner}{hint}? Known: {', '.join(known)}")


@dataclass(frozen=True)
class EngineConfig:
    """The options of `LLM`, as given.

    model: a short name ("smollm2-135m", "tiny", ...), a folder with config.json and *.safetensors, a .gguf file, or a
        hub id. device: "cuda" or "cpu"; None takes the GPU where there is one. dtype: "auto", or a name in DTYPES;
        auto is float32 on a CPU, and on a GPU the checkpoint's 16-bit type (bfloat16 where it has none).
    max_model_len: most tokens of prompt and output together; None takes what the model was made for.
    seed: makes requests without a seed of their own repeatable too; None draws them anew in each engine.
    load_format: "auto", or "dummy" for random weights of the right shapes. attention_backend: None chooses.

    policy: "mixed", "prefill_first" or "static" (see scheduler.py). max_num_seqs: sequences that run at the same time,
    each with a KV slot of its own; None: 8 on a CPU, on a GPU as many as its free memory holds, at most 256.
    max_num_batched_tokens: most tokens of one step; None: 2,048, or max_model_len where prompts must not be cut.
    max_num_prefills: most prompts under way at once; None: no limit. enable_chunked_prefill: a prompt may be cut to fit
    the budget; None: yes under "mixed", no under the other two.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int | None = None
    load_format: str = "auto"
    attention_backend: str | None = None
    policy: str = "mixed"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_prefills: int | None = None
    enable_chunked_prefill: bool | None = None

    @classmethod
    def from_options(cls, model: str, options: dict) -> "EngineConfig":
        reject_unknown(options, [f.name for f in fields(cls)], "LLM")
        return cls(model=model, **options)

    def __post_init__(self):
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model={self.model!r}: expected a name, a folder or a hub id, as text")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype={self.dtype!r}: expected one of auto, {', '.join(DTYPES)}")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format={self.load_format!r}: expected 'auto' or 'dummy'")
        if self.attention_backend not in (None, *ATTENTION_BACKENDS):
            known = ", ".join(ATTENTION_BACKENDS)
            raise ValueError(f"attention_backend={self.attention_backend!r}: expected one of {known}, or None")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: expected one of {', '.join(POLICIES)}")
        if self.enable_chunked_prefill not in (None, True, False):
            raise ValueError(f"enable_chunked_prefill={self.enable_chunked_prefill!r}: expected True, False or None")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_prefills"):
            check_int(name, getattr(self, name), minimum=1, optional=True)
        check_int("max_model_len", self.max_model_len, minimum=2, optional=True)
        check_int("seed", self.seed, optional=True)


def check_int(name: str, value: object, minimum: int | None = None, optional: bool = False) -> None:
    """Raise ValueError unless value is an int of at least `minimum` (or None, where that is allowed)."""
    if value is None and optional:
        return
    limit = "" if minimum is None else f" of at least {minimum}"
    if not isinstance(value, int) or isinstance(value, bool) or (minimum is not None and value < minimum):
        raise ValueError(f"{name}={value!r}: expected an integer{limit}{' or None' if optional else ''}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama, Qwen2 or Qwen3 decoder. One definition serves all three: they differ in the flags."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # Qwen3 sets it apart from hidden_size / num_attention_heads
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False  # lm_head is the embedding matrix
    qkv_bias: bool = False  # Qwen2 always; Llama and Qwen3 if attention_bias says so
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm over head_dim on q and k, before the rotation
    dtype: torch.dtype = torch.float32  # of the checkpoint; of the weights once `LLM` has resolved it
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: dict) -> "ModelConfig":
        """Translate the dict of a Hugging Face `config.json`. Raises ValueError for what the decoder cannot do."""
        family = config.get("model_type")
        _check_supported(config, family)
        missing = [name for name in _REQUIRED if config.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        bias = bool(config.get("attention_bias", False))
        return cls(
            **{name: config[name] for name in _REQUIRED},
            num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bias,
            o_bias=family != "qwen2" and bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            dtype=_read_dtype(config),
            eos_token_ids=as_ids(config.get("eos_token_id")),
        )._checked()

    def _checked(self) -> "ModelConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary embedding needs an even number")
        return self

    @property
    def max_model_len(self) -> int:
        """Most tokens that the positions cover: what the model was made for, stretched by its rope scaling."""
        return self.rope.max_positions(self.max_position_embeddings)


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def _check_supported(config: dict, family: str | None) -> None:
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; supported families: {', '.join(FAMILIES)}")
    for name, only in (("hidden_act", "silu"), ("is_causal", True)):  # the latter looks both ways, for embeddings
        if config.get(name, only) != only:
            raise ValueError(f"{name} {config[name]!r} is not supported; supported: {only}")
    has_window = config.get("use_sliding_window") or (family == "llama" and config.get("sliding_window"))
    if has_window or set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError("no sliding window (use_sliding_window, layer_types) is supported: attention here sees all")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"quantised weights ({method}) are not supported; take the unquantised checkpoint")


def _read_dtype(config: dict) -> torch.dtype:
    """`dtype` in new files, `torch_dtype` in old ones, float32 where neither is there (as transformers)."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} in config.json is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A token id field of a config file (none, one or a list) as a tuple without duplicates, in order."""
    if value is None:
        return ()
    return tuple(dict.fromkeys(value if isinstance(value, (list, tuple)) else [value]))


@dataclass(frozen=True)
class SchedulerConfig:
    """The budgets that the scheduler keeps, resolved."""

    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefills: int
    enable_chunked_prefill: bool


@dataclass(frozen=True)
class Resolved:
    """What the engine really runs with, once machine and model are known."""

    device: torch.device
    dtype: torch.dtype
    attention_backend: str
    attention_reason: str  # why this backend: said in the first log line
    max_model_len: int


def resolve_device(requested: str | None) -> torch.device:
    """None: the GPU where there is one. Raises ValueError for a device that this machine lacks."""
    if requested is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested not in ("cpu", "cuda"):
        raise ValueError(f"device={requested!r}: expected 'cuda', 'cpu' or None (the GPU where there is one)")
    if requested == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU here; leave it out, or say device='cpu'")
    return torch.device(requested)


def resolve_dtype(requested: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 on a CPU; on a GPU the checkpoint's 16-bit type, else bfloat16 (float16 on a GPU without it)."""
    if requested != "auto":
        return DTYPES[requested]
    if device.type == "cpu":
        return torch.float32
    if checkpoint == torch.float16 or not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def resolve_max_model_len(requested: int | None, config: ModelConfig) -> int:
    """Raises ValueError when more is asked for than the positions of the model cover."""
    if requested is not None and requested > (limit := config.max_model_len):
        raise ValueError(f"max_model_len={requested} is more than the {limit} positions that this model has")
    return requested or config.max_model_len


def resolve_scheduler(config: EngineConfig, max_num_seqs: int, max_model_len: int) -> SchedulerConfig:
    """The budgets, with their defaults filled in. Raises ValueError where they contradict each other."""
    chunked = config.policy == "mixed" if config.enable_chunked_prefill is None else config.enable_chunked_prefill
    tokens = config.max_num_batched_tokens or max(2048 if chunked else max_model_len, max_num_seqs)
    if tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={tokens} is less than max_num_seqs={max_num_seqs}: every running sequence must "
            "be able to get a token in each step; raise the first or lower the second"
        )
    return SchedulerConfig(config.policy, max_num_seqs, tokens, config.max_num_prefills or max_num_seqs, chunked)
