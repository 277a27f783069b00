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
import time
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
    """Sums over all ranks of a group that torch knows under this name (see register). All ranks make it together."""

    def __init__(self, name: str, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device):
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._name = name
        self._group = group  # torch does not keep it
        self._buffer = symmetric_memory.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        self._memory = symmetric_memory.rendezvous(self._buffer, name)

    def fits(self, x: torch.Tensor) -> bool:
        num_bytes = x.numel() * x.element_size()
        return x.dtype == self._buffer.dtype and 0 < num_bytes <= MOST_BYTES and num_bytes % ALIGNMENT == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in a new tensor."""
        buffer = self._buffer[: prod(x.shape)].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.contiguous(), "sum", self._name)

    def act_for_the_others(self, seconds: float = 5.0) -> None:
        """Another rank has died. Kernels here wait until it has set its flags with us, and has taken ours away that lie
        with it. Do both in its place until nothing runs any more; what they compute is wrong, and nobody reads it."""
        rank, size, memory = self._group.rank(), self._group.size(), self._memory
        count, device, end = memory.signal_pad_size // 4, self._buffer.device, time.monotonic() + seconds
        pads = [memory.get_signal_pad(i, (count,), torch.int32) for i in range(size)]
        set_all, clear = (torch.full((count,), value, dtype=torch.int32, pin_memory=True) for value in (1, 0))
        torch.cuda.set_device(device)  # of this thread
        with torch.cuda.stream(torch.cuda.Stream(device)):
            while not torch.cuda.default_stream(device).query() and time.monotonic() < end:
                for i, pad in enumerate(pads):  # copies, which need no room among the waiting kernels
                    pad.copy_(set_all if i == rank else clear, non_blocking=True)
                torch.cuda.current_stream(device).synchronize()


def make_quick_sum(
    ranks: "OneRank", store: dist.Store, backend: dist.Backend, dtype: torch.dtype, device: torch.device
) -> tuple[QuickSum | None, str]:
    """All ranks together: either each gets one, or none does. Also a name of it for the log, or what is in the way."""
    if device.type != "cuda":
        return None, "no GPUs"
    obstacle = find_obstacle(ranks, dtype)
    if ranks.minimum(obstacle is None) == 0:  # they agree before they wait for each other
        return None, obstacle or "another rank cannot read the others' memory"
    if ranks.rank == 0:
        store.set("name", uuid4().hex)
    name = store.get("name").decode()
    group = register(name, ranks, store, backend)
    return QuickSum(name, group, dtype, device), "one kernel up to 1 MiB"


def find_obstacle(ranks: "OneRank", dtype: torch.dtype) -> str | None:
    """Why this rank cannot, or None."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if dtype not in DTYPES:
        return f"there is none for {dtype}"
    if dist.is_torchelastic_launched() and int(os.environ["LOCAL_WORLD_SIZE"]) < ranks.size:
        return "ranks are on several machines"
    here = torch.cuda.current_device()
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return "this torch has no such kernel"
    if not all(torch.cuda.can_device_access_peer(here, i) for i in range(ranks.size) if i != here):
        return "GPUs cannot read each other's memory"
    return None


def register(name: str, ranks: "OneRank", store: dist.Store, backend: dist.Backend) -> dist.ProcessGroup:
    """Make a group known to torch, whose only use is that symmetric memory is found by the name of one."""
    from torch.distributed import distributed_c10d

    group = dist.ProcessGroup(dist.PrefixStore("quick sums", store), ranks.rank, ranks.size)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(name)
    distributed_c10d._register_process_group(name, group)
    return group
