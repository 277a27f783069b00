"""CUDA graphs: a decode step recorded once and replayed with one call.

Decoding one token for each of a few sequences takes the GPU less time than it takes Python to launch the few hundred
kernels for it. A graph is a recording of those launches, addresses and sizes included; replaying it costs one launch.

    eager    CPU  |launch|launch|launch|launch|...        graph    CPU  |replay|
             GPU     |k|    |k|    |k|    |k|                      GPU     |k|k|k|k|...

What was recorded is repeated exactly, hence three rules:

    inputs    are read from the same memory in every replay: staging copies them there
    shapes    are fixed, so there is a graph for each of some batch sizes; a batch takes the next larger one, filled up
              with padding rows that write nowhere (slot -1) and read nothing (length 0)
    branches  are those of the recording; what may differ from step to step (how long a context is) is read on the device

All graphs share one pool of memory, as only one runs at a time; the largest is recorded first, so the others find room
in what it took. On a CPU there is nothing to record: `replay` runs the step as it is, padding included.

Source: Getting Started with CUDA Graphs (NVIDIA, 2019); decode graphs by batch size as in vLLM.
"""

import bisect
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from .staging import layout, views
from .step_inputs import StepInputs, as_inputs


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 8th up to 64 and every 16th above: at most 15 of 16 rows short of full. The last is
    max_num_seqs itself, so that every decode step has a graph."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    return sorted({*(size for size in sizes if size < max_num_seqs), max_num_seqs})


class DecodeGraphs:
    """Graphs of `step`, a function of StepInputs with one token per sequence that returns a tensor, by batch size.

    width: blocks that a table row may have. max_model_len: kernels cut their work for contexts of up to that.
    """

    def __init__(
        self,
        step: Callable[[StepInputs], torch.Tensor],
        sizes: list[int],
        width: int,
        max_model_len: int,
        device: torch.device,
    ):
        self.sizes = sizes
        self.width = width
        self._step = step
        _, size = layout(empty_arrays(max(sizes), width))
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._inputs = {size: self._make_inputs(size, max_model_len) for size in sizes}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        if device.type == "cuda":
            self._capture_all()

    def _make_inputs(self, size: int, max_model_len: int) -> StepInputs:
        tensors = views(self.buffer, empty_arrays(size, self.width))
        return as_inputs(tensors, [1] * size, [max_model_len] * size)

    def fit(self, num_seqs: int) -> int | None:
        """The smallest size with room for so many sequences. None if there is none."""
        at = bisect.bisect_left(self.sizes, num_seqs)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, size: int, inputs: StepInputs) -> torch.Tensor:
        """Run the step of that size on `inputs`, which lie in `buffer`. Its result is valid until the next replay."""
        if size not in self._graphs:
            return self._step(inputs)
        self._graphs[size].replay()
        return self._outputs[size]

    def _capture_all(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(sorted(self.sizes, reverse=True), desc="CUDA graphs", leave=False, delay=1):
            self._blank(size)
            self._step(self._inputs[size])  # kernels are compiled and libraries set up outside of the recording
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._outputs[size] = self._step(self._inputs[size])
            self._graphs[size] = graph

    def _blank(self, size: int) -> None:
        """Nothing but padding rows."""
        self.buffer.zero_()
        inputs = self._inputs[size]
        inputs.metadata.slot_mapping.fill_(-1)
        inputs.metadata.cu_seqlens_q.copy_(torch.arange(size + 1))


def empty_arrays(size: int, width: int) -> dict[str, np.ndarray]:
    """The arrays of a padded decode step, as `build` and `pad` of step_inputs.py make them, without content."""
    wide = ("input_ids", "positions", "slot_mapping", "rows", "seeds", "output_positions")
    arrays = {name: np.zeros(size, dtype=np.int64) for name in wide}
    arrays["inverse_temperatures"] = np.zeros(size, dtype=np.float32)
    arrays |= {name: np.zeros(size + 1, dtype=np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    arrays["seq_lens"] = np.zeros(size, dtype=np.int32)
    arrays["block_table"] = np.zeros((size, width), dtype=np.int32)
    return arrays
