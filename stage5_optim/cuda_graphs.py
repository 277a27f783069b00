"""CUDA graphs: a decode step recorded once and replayed with one call.

Decoding one token for each of a few sequences takes the GPU less time than it takes Python to launch the few hundred
kernels for it. A graph is a recording of those launches, addresses and sizes included; replaying it costs one launch.

    eager    CPU  |launch|launch|launch|launch|...        graph    CPU  |replay|
             GPU     |k|    |k|    |k|    |k|                      GPU     |k|k|k|k|...

What was recorded is repeated exactly, hence three rules:

    inputs    are read from the same memory in every replay: staging copies them there
    shapes    are fixed, so there is a graph for each of some batch sizes; a batch takes the next larger one, filled up
              with padding rows that write nowhere (slot -1) and read nothing (length 0)
    branches  are those of the recording; what differs from step to step, the lengths above all, is read on the device

Small pieces of prompts take part too, one row for each token: a graph does not mind that two rows belong to one
sequence. All graphs share one pool of memory, as only one runs at a time; the largest is recorded first, so the others
find room in what it took. On a CPU there is nothing to record: `replay` runs the step as it is, padding included.

Source: Getting Started with CUDA Graphs (NVIDIA, 2019); decode graphs by batch size as in vLLM.
"""

import bisect
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from tqdm import tqdm

from .config import ModelConfig
from .staging import layout, views
from .step_inputs import StepInputs, StepPlan, as_inputs, empty_arrays, fill_rows

MAX_DRAFT_ROWS = 512
LAUNCHES_PER_LAYER = 10
BYTES_PER_LAUNCH = 16384

Step = Callable[[StepInputs], torch.Tensor]


def graph_sizes(max_num_seqs: int, rows_per_seq: int = 1) -> list[int]:
    """1, 2, 4, 8, then every 8th up to 64 and every 16th above: at most 15 of 16 rows short of full. The last is
    max_num_seqs itself, so that every decode step has a graph. Drafts are rows too, up to MAX_DRAFT_ROWS in all: each
    graph costs memory, and so many rows keep a GPU busy. Beyond the last graph nobody drafts (speculative.py)."""
    most = max(max_num_seqs, min(max_num_seqs * rows_per_seq, MAX_DRAFT_ROWS))
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, most + 1, 16)]
    return sorted({*(size for size in sizes if size < most), most})


def graph_memory(config: ModelConfig, sizes: list[int], width: int) -> int:
    """Bytes that graphs of these sizes will take, about: the largest step's logits and activations, which all share,
    each one's block tables of `width` blocks, and what the driver keeps of each recorded launch. In
    all it is more than was seen on an H200: 0.15 GiB for the 23 graphs of Qwen3-0.6B, 0.23 GiB for those of 8B."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    row = config.vocab_size + 2 * (3 * config.intermediate_size + 4 * config.hidden_size + heads * config.head_dim)
    launches = len(sizes) * config.num_hidden_layers * LAUNCHES_PER_LAYER
    return max(sizes, default=0) * row * config.dtype.itemsize + sum(sizes) * width * 4 + launches * BYTES_PER_LAUNCH


class DecodeGraphs:
    """Graphs of `step`, a function of StepInputs in which every row is a token by itself, by the number of rows.

    width: blocks that a table row may have. max_model_len: kernels cut their work for contexts of up to that. `step` is
    recorded and not kept: it belongs to the runner that keeps these graphs, and two that hold each other stay, with all
    their memory, until Python's collector comes by.
    """

    def __init__(
        self,
        step: Step,
        sizes: list[int],
        width: int,
        max_model_len: int,
        device: torch.device,
    ):
        self.sizes = sizes
        self._memory = {size: GraphInputs(size, width, max_model_len, device) for size in sizes}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        if device.type == "cuda":
            self._capture_all(step)

    def fit(self, num_rows: int) -> int | None:
        """The smallest size with room for so many rows. None if there is none."""
        at = bisect.bisect_left(self.sizes, num_rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Send a step to where the graph of its size reads its inputs."""
        memory = self._memory[plan.size]
        arrays = memory.next_arrays()
        fill_rows(arrays, plan)
        memory.send()
        if self._graphs:
            return memory.inputs
        metadata = replace(memory.inputs.metadata, seq_lens=arrays["seq_lens"].tolist())  # attention asks the host too
        return replace(memory.inputs, metadata=metadata)

    def replay(self, size: int, inputs: StepInputs, step: Step) -> torch.Tensor:
        """Run the step of that size on what `prepare` has sent. Its result is valid until the next replay."""
        if not self._graphs:
            return step(inputs)
        self._graphs[size].replay()
        return self._outputs[size]

    def _capture_all(self, step: Step) -> None:
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(sorted(self.sizes, reverse=True), desc="CUDA graphs", leave=False, delay=1):
            inputs = self._memory[size].inputs  # nothing but padding rows
            step(inputs)  # kernels are compiled and libraries set up outside of the recording
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL has threads of its own
                self._outputs[size] = step(inputs)
            self._graphs[size] = graph


class GraphInputs:
    """The inputs of one graph: memory on the device that never moves, and two pinned buffers that take turns.

    What is the same in every step is written once, here.
    """

    def __init__(self, size: int, width: int, max_model_len: int, device: torch.device):
        empty = empty_arrays(size, width)
        _, num_bytes = layout(empty)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        pin = device.type == "cuda"
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._arrays = [{name: x.numpy() for name, x in views(host, empty).items()} for host in self._hosts]
        for arrays in self._arrays:
            for name, content in empty.items():
                arrays[name][:] = content
        self._turn = 0
        self.inputs = as_inputs(views(self._device, empty), [1] * size, [max_model_len] * size)
        self.send()

    def next_arrays(self) -> dict[str, np.ndarray]:
        """The buffer that was not sent last, as numpy sees it."""
        self._turn = 1 - self._turn
        return self._arrays[self._turn]

    def send(self) -> None:
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
