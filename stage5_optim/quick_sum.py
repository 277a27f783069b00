"""Quick sum: the sum of a small tensor over the GPUs of one host, in one kernel.

NCCL is made for large tensors and any network. A decode step sums 8 KB to some hundred KB, two times in each layer,
and nothing can be computed before a sum is done: what counts is how long the smallest sum takes, not how many bytes
there are in a second. GPUs of one host can be quick, as each can read the other's memory:

    rank 0   copy x into its buffer | wait for the others' flags | read all buffers, add them | flags: I have read yours
    rank 1   copy x into its buffer | wait for the others' flags | read all buffers, add them | flags: I have read yours

Every rank reads all of every buffer, so with N ranks N - 1 times the bytes come in: good for small tensors. Large ones
go to NCCL, where every rank sums a part and passes it on. The buffer is "symmetric memory", the kernel torch's own.
Source of the idea: the one-shot all-reduce of TensorRT-LLM and vLLM (custom_all_reduce).
"""

import os
from math import prod
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .parallel import OneRank

SWITCH = "INFERENCE_STAGES_QUICK_SUMS"
MOST_BYTES = 1 << 20
ALIGNMENT = 16  # bytes that the kernel loads at once
DTYPES = (torch.bfloat16, torch.float32)


class QuickSum:
    """Sums over all ranks of the group `name`, for which torch must know a store (see make_quick_sum)."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device):
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._name = name
        self._buffer = symmetric_memory.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._buffer, name)

    def fits(self, x: torch.Tensor) -> bool:
        num_bytes = x.numel() * x.element_size()
        return x.dtype == self._buffer.dtype and 0 < num_bytes <= MOST_BYTES and num_bytes % ALIGNMENT == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in a new tensor."""
        buffer = self._buffer[: prod(x.shape)].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.contiguous(), "sum", self._name)


def make_quick_sum(
    ranks: "OneRank", store: dist.Store, dtype: torch.dtype, device: torch.device
) -> tuple[QuickSum | None, str]:
    """All ranks together: either each gets one, or none does. Also a name of it for the log, or what is in the way."""
    if device.type != "cuda":
        return None, "no GPUs"
    for find in (find_obstacle, register):
        obstacle = find(ranks, store, dtype)
        if ranks.minimum(obstacle is None) == 0:  # they agree before the next step, in which they wait for each other
            return None, obstacle or "another rank cannot read the others' memory"
    return QuickSum(name_of(store), dtype, device), "one kernel up to 1 MiB"


def find_obstacle(ranks: "OneRank", store: dist.Store, dtype: torch.dtype) -> str | None:
    """Why this rank cannot, or None."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if dtype not in DTYPES:
        return f"torch's kernel does not sum {dtype}"
    if dist.is_torchelastic_launched() and int(os.environ["LOCAL_WORLD_SIZE"]) < ranks.size:
        return "ranks are on several machines"
    here = torch.cuda.current_device()
    if not all(torch.cuda.can_device_access_peer(here, i) for i in range(ranks.size) if i != here):
        return "GPUs cannot read each other's memory"
    return None


def register(ranks: "OneRank", store: dist.Store, dtype: torch.dtype) -> str | None:
    """Make a group known to torch under a name that nobody else has. Returns what went wrong."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        if ranks.rank == 0:
            store.set("quick sums", uuid4().hex)
        _SymmetricMemory.set_group_info(name_of(store), ranks.rank, ranks.size, dist.PrefixStore("quick", store))
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"this torch has no symmetric memory: {error}"
    return None


def name_of(store: dist.Store) -> str:
    return store.get("quick sums").decode()
