"""Launch: what our Triton kernels share. Needs the package triton: import this file only where it is installed.

Programmatic dependent launch (a GPU of compute capability 9.0): a kernel says at once that the next one may start, and
that one loads what does not depend on anybody, its weights, and only then waits for the results of the one before. So
memory hardly idles between two products:

    in a row     |k1 launch|load|compute|k2 launch|load|compute|
    dependent    |k1 launch|load|compute|
                   |k2 launch|load|wait.|compute|

Every kernel that is launched so must wait, also a program that has nothing to do, or the kernel after it would start
before the one before it has ended. Until then it writes nothing and reads only what nobody writes.
"""

from functools import cache

import torch
import triton
import triton.language as tl


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()  # Triton's own costs 2 us, several times in every layer


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that may start before the one in front of it has ended, where the GPU can do that."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    can = can and hasattr(tl.extra.cuda, "gdc_wait")  # older versions of triton have no word for it
    return dict(PDL=True, launch_pdl=True) if can else dict(PDL=False)


@triton.jit
def start_next(PDL: tl.constexpr):
    """The next kernel may start, once all programs of this one have said so or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Until the kernel before this one has ended, and what it wrote can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()
