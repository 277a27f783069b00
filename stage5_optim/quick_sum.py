"""Quick sum: the sum of a small tensor over the GPUs of one host, in one kernel.

NCCL is made for large tensors and any network. A decode step sums 8 KB to some hundred KB, two times in each layer,
and nothing can be computed before a sum is done: what counts is how long the smallest sum takes, not how many bytes
there are in a second. GPUs of one host can be quick, as each can read the other's memory:

    rank 0   copy x to its own memory | flags there: it is in | wait for their flags here | read all parts, add them
    rank 1   copy x to its own memory | flags there: it is in | wait for their flags here | read all parts, add them

Every rank reads all of every part, so with N ranks N - 1 times the bytes come in: good for small tensors. Large ones
go to NCCL, where every rank sums a piece and passes it on. The kernel is in sum_kernels.py, the memory in
peer_memory.py. Source of the idea: the one-shot all-reduce of TensorRT-LLM and vLLM (custom_all_reduce).
"""

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .attention import package_obstacle
from .peer_memory import PeerMemory, find_runtime

if TYPE_CHECKING:
    from .parallel import OneRank

SWITCH = "INFERENCE_STAGES_QUICK_SUMS"
MOST = 2**20  # numbers of a tensor: 2 MiB in 16 bits
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class QuickSum:
    """Sums over all ranks. All of them make it together, and none sums before all have made it."""

    def __init__(self, rank: int, size: int, store: dist.Store, dtype: torch.dtype, device: torch.device):
        from . import sum_kernels
        from .launch import dependent_launch

        self._kernel, self._block = sum_kernels.sum_kernel, sum_kernels.BLOCK
        self._rank, self._size, self._dtype = rank, size, dtype
        programs, numbers = MOST // self._block, 2 * MOST * dtype.itemsize
        self._memory = PeerMemory(numbers + 4 * size * programs, rank, size, dist.PrefixStore("quick sums", store))
        self._flags = self._memory.as_tensor(device)[numbers:].view(torch.int32).view(size, programs)
        self._addresses = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
        self._epochs = torch.zeros(programs, dtype=torch.int32, device=device)  # sums so far, by program
        self._options = dependent_launch(device)

    def fits(self, x: torch.Tensor) -> bool:
        return x.dtype == self._dtype and 0 < x.numel() <= MOST and x.is_contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in a new tensor."""
        out, programs = torch.empty_like(x), -(-x.numel() // self._block)
        sizes = self._rank, self._size, MOST, MOST // self._block, self._block, x.numel() % self._block == 0
        self._kernel[(programs,)](x, out, self._addresses, self._epochs, x.numel(), *sizes, **self._options)
        return out

    def act_for_the_others(self) -> None:
        """Another rank has died, and kernels here wait for its flags. Set them far ahead, by copies, which need no room
        among the waiting kernels. What is summed from now on is wrong, and nobody reads it."""
        device = self._epochs.device
        torch.cuda.set_device(device)  # of this thread
        with torch.cuda.stream(torch.cuda.Stream(device)):
            ahead = self._epochs.cpu() + 2**30
            self._flags.copy_(ahead.repeat(self._size, 1))


def make_quick_sum(
    ranks: "OneRank", store: dist.Store, dtype: torch.dtype, device: torch.device
) -> tuple[QuickSum | None, str]:
    """All ranks together: either each gets one, or none does. Also a name of it for the log, or what is in the way."""
    if device.type != "cuda":
        return None, "no GPUs"
    obstacle = find_obstacle(ranks.size, dtype)
    if ranks.minimum(obstacle is None) == 0:  # they agree before they wait for each other
        return None, obstacle or "another rank cannot read the others' memory"
    try:
        quick_sum = QuickSum(ranks.rank, ranks.size, store, dtype, device)
    except RuntimeError as error:  # a container may keep its processes apart
        quick_sum, obstacle = None, str(error)
    if ranks.minimum(quick_sum is not None) == 0:  # now all have made theirs, or know that somebody has not
        return None, obstacle or "another rank cannot read the others' memory"
    return quick_sum, f"a quick kernel up to {MOST * dtype.itemsize // 2**20} MiB"


def find_obstacle(size: int, dtype: torch.dtype) -> str | None:
    """Why this rank, one of so many, cannot; or None."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if dtype not in DTYPES:
        return f"no quick kernel for {dtype}"
    if dist.is_torchelastic_launched() and int(os.environ["LOCAL_WORLD_SIZE"]) < size:
        return "ranks are on several machines"
    if obstacle := package_obstacle("triton", "triton"):
        return obstacle
    if find_runtime() is None:
        return "the CUDA runtime was not found"
    here = torch.cuda.current_device()
    if not all(torch.cuda.can_device_access_peer(here, i) for i in range(size) if i != here):
        return "GPUs cannot read each other's memory"
    return None
