"""Step inputs: the arrays that one step of the model needs, for any mixture of prompts and running texts.

All of it is computed with numpy over whole arrays: a Python loop over 16,000 tokens would take longer than the model.

    scheduled       A: tokens 5..7     B: token 9        (A is a prompt in pieces, B a running text)
    input_ids       A5 A6 A7 B9
    positions       5  6  7  9
    slot_mapping    where their K and V go: block_table[row, position // block_size] * block_size + rest
    rows            3                  of which tokens the successor is sampled: A is not complete

Drafts (speculative.py) are computed behind the last token of a running text, each a token and a row to sample from.

A CUDA graph has a fixed number of rows. `fill_rows` fills a step up with rows that write nowhere (slot -1) and read
nothing (length 0).
"""

from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

import numpy as np
import torch

from .attention import AttentionMetadata
from .batch import Scheduled
from .block_manager import BlockMoves
from .sequence import Sequence
from .speculative import Ahead, sampled_of
from .staging import TableRows

MASK64 = 2**64 - 1
DRAFTS, FORKS = attrgetter("drafts"), attrgetter("forks")


@dataclass(frozen=True)
class StepInputs:
    """T tokens of N sequences, R of which are followed by a sampled one.

    On the device: input_ids, positions [T] int64, `metadata` for attention, rows [R] int64 (of the T tokens, those that
    are sampled from). For the sampler kernel: seeds [R] int64 (64 bits), output_positions [R] int64 and
    inverse_temperatures [R] float32 (0: greedy). A negative id in input_ids is a row of the last step (see known_ids).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    rows: torch.Tensor
    seeds: torch.Tensor
    output_positions: torch.Tensor
    inverse_temperatures: torch.Tensor


@dataclass(frozen=True)
class StepPlan:
    """A step in numbers: all that a process must know to compute it, whoever the sequences are.

    arrays: see `build`. query_lens: tokens of each sequence. size: of the graph that runs the step; None: none does.
    moves: blocks that are copied first.
    """

    arrays: dict[str, np.ndarray]
    query_lens: list[int]
    size: int | None = None
    moves: BlockMoves = field(default_factory=BlockMoves)

    @property
    def needs_sampled(self) -> bool:
        """Some tokens are still where the last step has put them."""
        return bool((self.arrays["input_ids"] < 0).any())


def plan_step(
    scheduled: list[Scheduled],
    tables: TableRows,
    block_size: int,
    size: int | None = None,
    moves: BlockMoves | None = None,
) -> StepPlan:
    """The plan of a step. Its block table is valid until the next call."""
    arrays = build(scheduled, tables, block_size)
    return StepPlan(arrays, [item.num_tokens for item in scheduled], size, moves or BlockMoves())


def sampled_sequences(scheduled: list[Scheduled]) -> list[Sequence | Ahead]:
    """Those that get a token in this step: they lack nothing any more. Samples that fork follow their first one."""
    return [seq for item in scheduled if item.is_last_chunk for seq in sampled_of(item)]


def last_rows(scheduled: list[Scheduled]) -> list[int]:
    """Of all tokens of a step, the last one of each sequence that lacks nothing any more, and the drafts behind it. The
    last one comes once more for each sample that forks."""
    ends = accumulate(item.num_tokens for item in scheduled)
    pairs = zip(ends, scheduled, strict=True)
    if not any(map(DRAFTS, scheduled)) and not any(map(FORKS, scheduled)):  # nearly always: let it be fast
        return [end - 1 for end, item in pairs if item.is_last_chunk]
    rows: list[int] = []
    for end, item in pairs:
        if item.is_last_chunk:
            rows += [*range(end - 1 - len(item.drafts), end), *[end - 1] * len(item.forks)]
    return rows


def build(scheduled: list[Scheduled], tables: TableRows, block_size: int) -> dict[str, np.ndarray]:
    """The arrays of a step, by the names of StepInputs and AttentionMetadata."""
    lens = np.array([item.num_tokens for item in scheduled])
    starts = np.array([item.seq.num_computed_tokens for item in scheduled])
    token_ids: list[int] = []
    for item in scheduled:
        start = item.seq.num_computed_tokens
        token_ids += item.seq.token_ids[start : start + item.num_tokens]
        token_ids += item.drafts
    ends = lens.cumsum()
    owner = np.repeat(np.arange(len(lens)), lens)  # [T], which sequence a token belongs to
    positions = np.arange(len(owner)) - (ends - lens - starts)[owner]
    block_table = tables.fill([item.block_table for item in scheduled])
    slot_mapping = block_table[owner, positions // block_size] * np.int64(block_size) + positions % block_size
    return {
        "input_ids": np.array(token_ids, dtype=np.int64),
        "positions": positions,
        "slot_mapping": slot_mapping,
        "rows": np.array(last_rows(scheduled), dtype=np.int64),
        **sampling_arrays(sampled_sequences(scheduled)),
        "cu_seqlens_q": offsets(lens),
        "cu_seqlens_k": offsets(starts + lens),
        "seq_lens": (starts + lens).astype(np.int32),
        "block_table": block_table,
    }


def count_pairs(scheduled: list[Scheduled]) -> int:
    """Causal query-key pairs of a step: each token looks at itself and all before it."""
    counts = ((item.seq.num_computed_tokens, item.num_tokens) for item in scheduled)
    return sum(count * start + count * (count + 1) // 2 for start, count in counts)


def sampling_arrays(seqs: list[Sequence | Ahead]) -> dict[str, np.ndarray]:
    return {
        "seeds": np.array([seq.seed & MASK64 for seq in seqs], dtype=np.uint64).view(np.int64),
        "output_positions": np.array([seq.num_output_tokens for seq in seqs], dtype=np.int64),
        "inverse_temperatures": np.array([seq.inverse_temperature for seq in seqs], dtype=np.float32),
    }


def offsets(lens: np.ndarray) -> np.ndarray:
    """[0, first, first + second, ...] int32."""
    return np.concatenate(([0], lens.cumsum())).astype(np.int32)


def fill_rows(arrays: dict[str, np.ndarray], plan: StepPlan) -> int:
    """Write a step into the arrays of a graph (see `empty_arrays`), every token as a row. Returns how many rows it has.

    A graph decodes: each row is one token with its own length and block table. The tokens of a piece of a prompt are
    rows with one table and lengths that grow by one; K and V of all rows are written before any row looks at them.
    """
    step = plan.arrays
    count, rows, block_table = len(step["input_ids"]), step["rows"], step["block_table"]
    for name in ("input_ids", "positions", "slot_mapping"):
        arrays[name][:count] = step[name]
        arrays[name][count:] = -1 if name == "slot_mapping" else 0
    arrays["seq_lens"][:count] = step["positions"] + 1
    arrays["seq_lens"][count:] = 0
    for name in ("seeds", "output_positions", "inverse_temperatures"):
        arrays[name][:] = 0
        arrays[name][rows] = step[name]
    if len(block_table) < count:
        block_table = np.repeat(block_table, plan.query_lens, axis=0)
    arrays["block_table"][:count, : block_table.shape[1]] = block_table
    return count


def empty_arrays(size: int, width: int) -> dict[str, np.ndarray]:
    """The arrays of a graph of `size` rows of which none is used, with tables of `width` blocks."""
    names = ("input_ids", "positions", "slot_mapping", "rows", "seeds", "output_positions")
    arrays = {name: np.zeros(size, dtype=np.int64) for name in names}
    arrays["slot_mapping"] -= 1
    arrays["rows"] += np.arange(size)
    arrays["inverse_temperatures"] = np.zeros(size, dtype=np.float32)
    arrays["cu_seqlens_q"] = np.arange(size + 1, dtype=np.int32)  # a padding row has one token too
    arrays["cu_seqlens_k"] = np.zeros(size + 1, dtype=np.int32)  # of prompts; nobody reads it here
    arrays["seq_lens"] = np.zeros(size, dtype=np.int32)
    arrays["block_table"] = np.zeros((size, width), dtype=np.int32)
    return arrays


def as_inputs(tensors: dict[str, torch.Tensor], query_lens: list[int], seq_lens: list[int]) -> StepInputs:
    """The same on the device. query_lens, seq_lens: what the host knows of the sequences (see AttentionMetadata)."""
    metadata = AttentionMetadata(
        query_lens=query_lens,
        seq_lens=seq_lens,
        cu_seqlens_q=tensors["cu_seqlens_q"],
        cu_seqlens_k=tensors["cu_seqlens_k"],
        seq_lens_tensor=tensors["seq_lens"],
        block_table=tensors["block_table"],
        slot_mapping=tensors["slot_mapping"],
    )
    names = ("rows", "seeds", "output_positions", "inverse_temperatures")
    more = {name: tensors[name] for name in names}
    return StepInputs(tensors["input_ids"], tensors["positions"], metadata, **more)
