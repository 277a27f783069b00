"""What a step needs on the device: each array by its definition, up to date tables, one piece of memory."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .. import staging
from ..batch import Scheduled
from ..model_runner import slots
from ..sampling import SamplingParams
from ..sequence import Sequence
from ..staging import ALIGNMENT, Staging, TableRows, layout, views
from ..step_inputs import build, count_pairs, last_rows, offsets, sampled_sequences

CPU = torch.device("cpu")
DTYPES = ("int64", "int32", "float32", "uint8", "float64", "int16")

# tables


def padded(tables: list[list[int]], width: int) -> list[list[int]]:
    """What `fill` is by definition."""
    return [table + [0] * (width - len(table)) for table in tables]


class Blocks:
    """Sequences whose tables change as the block manager changes them between two steps."""

    def __init__(self, draw):
        self.draw = draw
        self.next_block = 1
        self.tables: list[list[int]] = []
        self.shrunk: list[list[int]] = []  # since the last call; these do not grow: whoever shrinks is preempted

    def take(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def change(self) -> None:
        for table in self.tables:
            if any(table is other for other in self.shrunk):
                continue
            if self.draw(st.booleans()):  # a copy of its last block, which was shared
                table[-1:] = self.take(1)
            if self.draw(st.booleans()):
                table += self.take(self.draw(st.integers(1, 3)))
        kind = self.draw(st.sampled_from(["new", "new", "shrink", "replace", "leave", "move", "swap"]))
        if kind == "new" or not self.tables:
            self.tables.append(self.take(self.draw(st.integers(1, 9))))
            return
        i = self.draw(st.integers(0, len(self.tables) - 1))
        if kind == "shrink":
            del self.tables[i][max(1, len(self.tables[i]) // 2) :]
            self.shrunk.append(self.tables[i])
        elif kind == "replace":  # it was preempted: a new list, of any length, perhaps with the old last block
            last = self.tables[i][-1]
            self.tables[i] = [*self.take(self.draw(st.integers(0, 9))), last]
        elif kind == "leave":
            del self.tables[i]
        elif kind == "move":
            self.tables.append(self.tables.pop(i))
        else:
            self.tables.reverse()


@settings(max_examples=max(60, settings().max_examples))
@given(st.data())
def test_rows_are_always_the_tables(data):
    """Only what changed is written. Too little: a row keeps a block of its former owner, or of its own former length.
    A table may grow and have its last block exchanged between two calls, while others take its row."""
    rows, blocks = TableRows(), Blocks(data.draw)
    for _ in range(data.draw(st.integers(1, 12))):
        blocks.change()
        chosen = [table for table in blocks.tables if data.draw(st.integers(0, 4))]
        if not chosen:
            continue
        longest = max(map(len, chosen))
        filled = rows.fill(chosen)
        assert filled.dtype == np.int32 and filled.tolist() == padded(chosen, longest)
        blocks.shrunk = [table for table in blocks.shrunk if all(table is not other for other in chosen)]


def test_a_table_with_the_length_and_the_end_of_another():
    """Row 0 belongs to one list, then to another of the same length with the same last block, as samples have them."""
    rows = TableRows()
    assert rows.fill([[1, 2, 9], [4]]).tolist() == [[1, 2, 9], [4, 0, 0]]
    assert rows.fill([[5, 6, 9], [4]]).tolist() == [[5, 6, 9], [4, 0, 0]]
    assert rows.fill([[9]]).tolist() == [[9]]
    assert rows.fill([[9], [4], [3, 3]]).tolist() == [[9, 0], [4, 0], [3, 3]]


def test_the_last_block_is_exchanged_and_the_table_grows():
    """A copy of the last block, and another one behind it, in one step: what was written last has changed too."""
    rows, table = TableRows(), [1, 2]
    rows.fill([table])
    table[-1] = 7
    assert rows.fill([table]).tolist() == [[1, 7]]
    table[-1] = 8
    table.append(3)
    assert rows.fill([table]).tolist() == [[1, 8, 3]]
    del table[1:]
    assert rows.fill([table, [4, 5, 6]]).tolist() == [[1, 0, 0], [4, 5, 6]]


def test_an_unchanged_table_is_not_written_again():
    """That is what the class is for: 256 tables of 500 blocks each are 128,000 numbers a step."""
    rows, table = TableRows(), [1, 2, 3]
    rows.fill([table, [4]])
    rows._rows[0, 0] = 77
    assert rows.fill([table, [4]])[0].tolist() == [77, 2, 3]
    table.append(5)
    assert rows.fill([table, [4]])[0].tolist() == [77, 2, 3, 5]


# one piece of memory


arrays_strategy = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)),
    min_size=1,
    max_size=8,
)


def make_arrays(shapes: list[tuple[str, tuple[int, ...]]], seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    pairs = enumerate(shapes)
    return {f"{i} {dtype}": random.integers(0, 100, shape).astype(dtype) for i, (dtype, shape) in pairs}


def assert_equal(tensors: dict[str, torch.Tensor], arrays: dict[str, np.ndarray]) -> None:
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        tensor = tensors[name]
        assert str(tensor.dtype).removeprefix("torch.") == str(array.dtype) and tensor.shape == array.shape
        assert tensor.tolist() == array.tolist(), name


class Device(str):
    """A CPU that is not called so: Staging sends to it as to a GPU. What is sent is read where it lies, in the host's
    buffer, for as long as anybody looks: a copy that never gets done."""

    type = "no cpu"


class Unpinned:
    """torch, where there is no memory to pin."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def empty(self, size: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        assert pin_memory or not size, "from other memory a copy is not asynchronous"
        return torch.empty(size, dtype=dtype)


@pytest.fixture(scope="module")
def sending() -> Iterator[Callable[[], Staging]]:
    """Makes Stagings that do all that they do for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "torch", Unpinned())
        yield lambda: Staging(Device("cpu"))


@given(shapes=arrays_strategy, extra=st.integers(0, 40))
def test_pieces_lie_end_to_end(shapes, extra):
    """Every array begins at a multiple of 16 bytes, ends before the next begins, and comes back with its dtype and
    shape, also where it is empty or its size is odd."""
    arrays = make_arrays(shapes)
    starts, size = layout(arrays)
    ends = [starts[name] + array.nbytes for name, array in arrays.items()]
    assert all(start % ALIGNMENT == 0 for start in starts.values()) and max(ends) <= size < max(ends) + ALIGNMENT
    assert all(end <= start for end, start in zip(ends, list(starts.values())[1:], strict=False))
    buffer = torch.full((size + extra,), 255, dtype=torch.uint8)
    for name, piece in views(buffer, arrays).items():
        piece.copy_(torch.from_numpy(arrays[name]))
    assert_equal(views(buffer, arrays), arrays)
    assert (buffer[size:] == 255).all(), "it writes behind its end"
    for name, array in arrays.items():
        assert buffer[starts[name] : starts[name] + array.nbytes].numpy().tobytes() == array.tobytes()


@given(steps=st.lists(arrays_strategy, min_size=2, max_size=6))
def test_an_upload_leaves_the_one_before_alone(sending, steps):
    """A step may still be reading its inputs when those of the next one are made: neither the arrays on the device, nor
    the host memory that they are being copied from, may be the same."""
    for one in (Staging(CPU), sending()):
        before = None
        for seed, shapes in enumerate(steps):
            arrays = make_arrays(shapes, seed)
            tensors = one.upload(arrays)
            if before is not None:
                assert_equal(*before)
            before = tensors, {name: array.copy() for name, array in arrays.items()}
            for array in arrays.values():  # as TableRows does with what it has handed out
                array[...] = 0
            assert_equal(*before)


def test_block_tables_are_corners_of_a_larger_array(sending):
    """Their rows do not follow each other in memory. With one block each they are a column with gaps."""
    for one in (Staging(CPU), sending()):
        tables = TableRows()
        for lens in ([1], [1, 1, 1], [3, 1, 2], [2, 2], [1, 1, 1, 1, 1]):
            filled = tables.fill([list(range(i + 1, i + 1 + count)) for i, count in enumerate(lens)])
            assert_equal(
                one.upload({"block_table": filled, "more": np.arange(3)}), {"block_table": filled, "more": np.arange(3)}
            )


def test_two_buffers_take_turns_and_grow(sending):
    """Pinned memory is slow to get: it is kept, and doubled where it is too small."""
    one, seen = sending(), []
    for size in (10, 10, 10, 10, 15, 15, 1000, 1000):
        one.upload({"a": np.zeros(size, dtype=np.uint8)})
        seen.append(one._pinned[one._turn])
    pointers = [buffer.data_ptr() for buffer in seen]
    assert pointers[0] == pointers[2] == pointers[4] and pointers[1] == pointers[3] == pointers[5]
    assert len({*pointers[:2], *pointers[6:]}) == 4
    assert len(seen[0]) == 2 * 16 and len(seen[6]) == 2 * 1008


@pytest.mark.gpu
def test_gpu_an_upload_is_one_copy_from_pinned_memory():
    """It arrives, step after step, and the tensors of the steps before stay what they were."""
    one, uploads = Staging(torch.device("cuda")), []
    for seed in range(6):
        arrays = make_arrays(
            [("int64", (7, 3)), ("uint8", (5,)), ("float32", (0,)), ("int32", (1 + 1000 * seed,))], seed
        )
        uploads.append((one.upload(arrays), arrays))
        assert one._pinned[one._turn].is_pinned()
    for tensors, arrays in uploads:
        assert_equal(tensors, arrays)
        assert all(tensor.is_cuda for tensor in tensors.values())


# the arrays of a step, by definition


@st.composite
def scheduled_strategy(draw, may_fork: bool = True) -> tuple[list[Scheduled], int]:
    """Any mixture: whole prompts, pieces, decode steps with a known or a pending token, prompts whose samples fork. And
    the block size."""
    items, block_size = [], draw(st.sampled_from([1, 3, 4, 16]))
    next_block = draw(st.integers(0, 5))
    for i in range(draw(st.integers(1, 6))):
        params = SamplingParams(temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 4.0])), max_tokens=50)
        seed = draw(st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5, -1, -(2**63), -(2**70)]))
        prompt = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=20))
        samples = range(draw(st.integers(1, 3)) if may_fork else 1)
        seqs = [Sequence(f"r{i}", prompt, params, seed + j, (), 50, None, index=j) for j in samples]
        seq, forks = seqs[0], ()
        kind = draw(st.sampled_from(["prompt", "piece", "decode", "pending", "recompute"]))
        if kind in ("decode", "pending", "recompute"):
            seq.token_ids += draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
        if kind == "pending":
            seq.append_pending(-draw(st.integers(1, 256)))
        if kind in ("decode", "pending"):
            seq.num_computed_tokens = seq.num_tokens - 1
        elif kind == "recompute":
            seq.num_computed_tokens = draw(st.integers(0, seq.num_tokens - 1))
        else:
            seq.num_computed_tokens = draw(st.integers(0, len(prompt) - 1))
        missing = seq.num_missing_tokens
        num_tokens = draw(st.integers(1, missing)) if kind in ("piece", "recompute") else missing
        if kind == "prompt" or (kind == "piece" and num_tokens == missing):
            forks = tuple(seqs[1:])
        count = -(-(seq.num_computed_tokens + num_tokens) // block_size) + draw(st.integers(0, 2))
        table = draw(st.permutations(range(next_block, next_block + count)))
        next_block += count
        items.append(Scheduled(seq, num_tokens, missing, 0, list(table), forks))
    return items, block_size


def define(items: list[Scheduled], block_size: int) -> dict[str, list]:
    """The arrays of a step in plain Python, token by token and sequence by sequence."""
    wanted = {name: [] for name in ("input_ids", "positions", "slot_mapping", "rows", "seeds", "output_positions")}
    wanted |= {"inverse_temperatures": [], "cu_seqlens_q": [0], "cu_seqlens_k": [0], "seq_lens": [], "block_table": []}
    longest = max(len(item.block_table) for item in items)
    for item in items:
        seq, start = item.seq, item.seq.num_computed_tokens
        end = start + item.num_tokens
        wanted["input_ids"] += seq.token_ids[start:end]
        wanted["positions"] += range(start, end)
        wanted["slot_mapping"] += slots(item.block_table, start, end, block_size)
        wanted["cu_seqlens_q"].append(wanted["cu_seqlens_q"][-1] + item.num_tokens)
        wanted["cu_seqlens_k"].append(wanted["cu_seqlens_k"][-1] + end)
        wanted["seq_lens"].append(end)
        wanted["block_table"].append(item.block_table + [0] * (longest - len(item.block_table)))
        if end == seq.num_tokens:
            for one in (seq, *item.forks):
                wanted["rows"].append(len(wanted["input_ids"]) - 1)
                seed = one.seed % 2**64
                wanted["seeds"].append(seed - 2**64 if seed >= 2**63 else seed)
                wanted["output_positions"].append(one.num_output_tokens)
                temperature = one.params.temperature
                wanted["inverse_temperatures"].append(0.0 if temperature == 0 else 1 / temperature)
    return wanted


@settings(max_examples=max(60, settings().max_examples))
@given(steps=st.lists(scheduled_strategy(), min_size=1, max_size=3))
def test_the_arrays_are_their_definitions(steps):
    """Positions, places, rows and seeds of any mixture, several steps with the same tables' memory."""
    tables = TableRows()
    for items, block_size in steps:
        arrays = build(items, tables, block_size)
        wanted = define(items, block_size)
        assert list(arrays) == list(wanted)
        assert {name: array.tolist() for name, array in arrays.items()} == wanted
        assert {name: str(array.dtype) for name, array in arrays.items()} == {
            name: "int64" for name in ("input_ids", "positions", "slot_mapping", "rows", "seeds", "output_positions")
        } | {"inverse_temperatures": "float32"} | {
            name: "int32" for name in ("cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table")
        }
        assert [seq.seq_id for seq in sampled_sequences(items)] == [
            one.seq_id
            for item in items
            if item.seq.num_computed_tokens + item.num_tokens == item.seq.num_tokens
            for one in (item.seq, *item.forks)
        ]


@given(scheduled_strategy(may_fork=False))
def test_last_rows_and_pairs(step):
    """Where each sequence's token is sampled, if nobody forks; and who looks at whom, counted one by one."""
    items, block_size = step
    wanted = define(items, block_size)
    assert last_rows(items) == wanted["rows"]
    assert len(last_rows(items)) == len(sampled_sequences(items))
    assert count_pairs(items) == sum(len(range(position + 1)) for position in wanted["positions"])


def test_a_slot_beyond_two_billion():
    """block * block_size needs 64 bits in a pool of more than 2^31 tokens."""
    seq = Sequence("a", [1, 2, 3], SamplingParams(), 0, (), 50, None)
    (slot, *_) = build([Scheduled(seq, 3, 3, 0, [2**28])], TableRows(), 16)["slot_mapping"].tolist()
    assert slot == 2**32


@pytest.mark.parametrize("lens", [[1], [3, 1, 4], [1] * 300])
def test_offsets(lens):
    got = offsets(np.array(lens))
    assert got.dtype == np.int32 and got.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]
