"""Features: which of this stage's ideas are on here, and what stands in the way of the others.

Each can be switched off by itself, to see what it gives (benchmarks/optim.py does), and each is left out where it
cannot work, with a reason that the first log line says.
"""

from dataclasses import dataclass
from types import ModuleType

from . import ops as torch_ops
from .attention import triton_obstacle
from .config import EngineConfig, Resolved
from .speculative import SpeculativeConfig

DRAFTS_NEED_TOKENS = "drafts are made from the tokens of the last step, so the CPU waits for them"


@dataclass(frozen=True)
class Features:
    """fused_kernels: fused.py in place of ops.py. cuda_graphs: decode steps are replayed. async_scheduling: the next
    step is planned while this one runs. speculative: who drafts, if anybody. notes: what was left out, and why."""

    fused_kernels: bool
    cuda_graphs: bool
    async_scheduling: bool
    notes: tuple[str, ...] = ()
    speculative: SpeculativeConfig | None = None

    @property
    def ops(self) -> ModuleType:
        """What the model computes with."""
        if not self.fused_kernels:
            return torch_ops
        from . import fused  # needs triton, which nobody else does

        return fused

    @property
    def rows_per_seq(self) -> int:
        """Most tokens of a sequence that a step samples: behind its last token, and behind each draft."""
        return 1 if self.speculative is None else 1 + self.speculative.num_tokens

    def __str__(self) -> str:
        names = ("fused_kernels", "cuda_graphs", "async_scheduling")
        found = [name.replace("_", " ") for name in names if getattr(self, name)]
        words = ", ".join(found) or "no fused kernels, graphs or async scheduling"
        drafts = [] if self.speculative is None else [str(self.speculative)]
        return "; ".join([words, *drafts, *self.notes])


def resolve_features(config: EngineConfig, resolved: Resolved, head_dim: int) -> Features:
    """What was asked for, else what a GPU can do. Raises ValueError for what was asked for and cannot be."""
    is_cuda = resolved.device.type == "cuda"
    no_triton = triton_obstacle(resolved.device, resolved.dtype, head_dim, 16, resolved.kv_dtype)
    if config.fused_kernels and no_triton:
        raise ValueError(f"fused_kernels=True: {no_triton}; leave it out, or say False")
    fused = no_triton is None if config.fused_kernels is None else config.fused_kernels
    no_graphs = graph_obstacle(resolved, fused)
    if config.enforce_eager is False and no_graphs:
        raise ValueError(f"enforce_eager=False: {no_graphs}; leave it out, or say True")
    graphs = is_cuda and not no_graphs if config.enforce_eager is None else not config.enforce_eager
    speculative = check_speculative(config)
    overlap = is_cuda and speculative is None if config.async_scheduling is None else config.async_scheduling
    notes = [f"no fused kernels ({no_triton})"] * (is_cuda and no_triton is not None and config.fused_kernels is None)
    notes += [f"no graphs ({no_graphs})"] * (is_cuda and no_graphs is not None and config.enforce_eager is None)
    has_drafts = speculative is not None
    notes += [f"no async scheduling ({DRAFTS_NEED_TOKENS})"] * (has_drafts and config.async_scheduling is None)
    return Features(fused, graphs, overlap, tuple(notes), speculative)


def check_speculative(config: EngineConfig) -> SpeculativeConfig | None:
    """Raises ValueError for what is no SpeculativeConfig, or does not go together with it."""
    if not isinstance(config.speculative, SpeculativeConfig | None):
        example = "SpeculativeConfig(method='ngram')"
        raise ValueError(f"speculative={config.speculative!r}: expected a SpeculativeConfig or None, such as {example}")
    if config.speculative is not None and config.async_scheduling:
        raise ValueError(f"async_scheduling=True: {DRAFTS_NEED_TOKENS}; leave it out, or say speculative=None")
    return config.speculative


def graph_obstacle(resolved: Resolved, fused: bool) -> str | None:
    """Why decode steps cannot be recorded, or None. On a CPU they run padded and unrecorded, which always works."""
    if resolved.device.type == "cpu":
        return None
    if resolved.attention_backend == "torch":
        return "the torch attention goes from sequence to sequence on the CPU, which a graph does not repeat"
    if resolved.attention_backend == "flash_attn" and not fused:
        return "torch cannot store K and V without the padding rows, whose slot is -1; fused kernels can"
    return None
