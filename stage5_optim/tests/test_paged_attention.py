"""The Triton kernels against float64: on a CPU in Triton's interpreter; on a GPU compiled, and in a CUDA graph.

The steps and their answers are in interpreted_attention.py. Blocks are shuffled and whatever no token owns is NaN, so a
kernel that reads one place too many answers NaN, and one that writes one place too many changes a bit of the cache.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from .. import paged_attention
from ..attention import triton_obstacle
from ..paged_attention import attend_triton, choose_num_splits, kernel_config
from .interpreted_attention import STEPS, TOLERANCE, Step, assert_close, assert_same_bits, build, check

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def interpreted(request) -> dict[str, str | None]:
    """What went wrong, by step: all steps that were asked for, in one process that has the interpreter on."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    names = [item.callspec.params["step"] for item in items if item.originalname == "test_interpreted_step"]
    command = [sys.executable, "-m", f"{__package__}.interpreted_attention", *names]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=250)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    missing = {name: f"no answer; the interpreter's process ended:\n{run.stderr[-2000:]}" for name in names}
    return missing | {result["name"]: result["failure"] for result in results}


@pytest.mark.parametrize("step", STEPS)
def test_interpreted_step(step, interpreted):
    """Result and cache of one call: lengths at block edges, groups, head dims, splits, padding rows."""
    assert interpreted[step] is None, "\n" + interpreted[step]


@pytest.mark.parametrize(("programs", "longest"), [(1, 1), (8, 100), (8, 8192), (24, 5000), (128, 8192), (2048, 8192)])
def test_splits_fill_the_gpu_and_no_more(programs, longest):
    """A split costs a second kernel: none where the GPU is full already, and none of less than two tiles."""
    splits = choose_num_splits(programs, longest, 64, 132)
    assert splits == 1 or (splits * programs <= 2 * 132 and splits * 2 * 64 <= longest)
    assert 1 <= splits <= 64
    assert (splits > 1) == (programs <= 132 and longest >= 256)


@pytest.mark.parametrize("is_bytes", [True, False])
@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("group", [1, 3, 8, 71])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_tiles_hold_a_group_and_suit_tensor_cores(head_dim, group, itemsize, is_decode, is_bytes):
    config = kernel_config(head_dim, group, itemsize, is_decode, is_bytes)
    assert config["BLOCK_M"] >= max(16, group) and config["BLOCK_N"] >= 16
    assert all(config[name].bit_count() == 1 for name in ("BLOCK_M", "BLOCK_N", "num_warps"))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "block_size", "capability", "words"),
    [
        (CPU, torch.float32, 64, 16, None, "needs a GPU"),
        (GPU, torch.float16, 64, 16, (7, 5), "compute capability 8.0"),
        (GPU, torch.float64, 64, 16, (9, 0), "not float64"),
        (GPU, torch.bfloat16, 320, 16, (9, 0), "not 320"),
        (GPU, torch.bfloat16, 64, 8, (9, 0), "not 8"),
        (GPU, torch.bfloat16, 80, 24, (9, 0), None),
        (GPU, torch.float32, 256, 256, (8, 0), None),
    ],
)
def test_the_obstacle_is_named(device, dtype, head_dim, block_size, capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    obstacle = triton_obstacle(device, dtype, head_dim, block_size)
    assert words in obstacle if words else obstacle is None


LENGTHS = (1, 15, 16, 17, 255, 256, 257, 1000, 2049, 5000)
GPU_SHAPES = {
    "one": ((1, 5000),),
    "one short": ((1, 30),),
    "decode": tuple((1, LENGTHS[i % 10] + i // 10) for i in range(40)),
    "prompts": ((300, 300), (17, 17), (256, 256), (1, 1), (2, 2), (511, 511)),
    "chunks": ((600, 5000), (64, 1000), (65, 66), (2, 2049)),
    "mixed": ((1, 5000), (130, 400), (1, 1), (1, 257), (33, 33), (1, 900), (500, 1500), (1, 16)),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(torch.bfloat16, 16), (torch.bfloat16, 48), (torch.bfloat16, 256), (torch.float16, 16), (torch.float32, 16)],
    ids=str,
)
@pytest.mark.parametrize("shapes", GPU_SHAPES)
def test_compiled_step(shapes, dtype, block_size):
    """The same check, compiled, at sizes where the loops' pipelines fill."""
    check(Step(GPU_SHAPES[shapes], (16, 8), 128, block_size, dtype), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((9, 3), 64), ((4, 4), 32), ((32, 8), 128), ((16, 2), 80), ((20, 1), 64), ((8, 1), 256), ((16, 8), 256)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_shape(heads, head_dim, dtype):
    """Models' groups and head dims: each is a kernel of its own, with tiles of its own."""
    for splits in (1, 5):
        check(Step(GPU_SHAPES["mixed"], heads, head_dim, 16, dtype, splits=splits), "cuda")


BYTES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_dtype", BYTES, ids=str)
@pytest.mark.parametrize("shapes", GPU_SHAPES)
def test_compiled_step_over_bytes(shapes, kv_dtype, dtype):
    """In bf16 bytes are widened by assembly, which no interpreter has tried."""
    check(Step(GPU_SHAPES[shapes], (16, 8), 128, 16, dtype, kv_dtype=kv_dtype), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 4), 32), ((16, 2), 80), ((8, 1), 256)], ids=str)
@pytest.mark.parametrize("kv_dtype", BYTES, ids=str)
def test_compiled_shape_over_bytes(heads, head_dim, kv_dtype):
    for splits, block_size in ((1, 16), (5, 16), (3, 48)):
        step = Step(GPU_SHAPES["mixed"], heads, head_dim, block_size, torch.bfloat16, splits=splits, kv_dtype=kv_dtype)
        check(step, "cuda")


@pytest.mark.gpu
def test_result_does_not_vary():
    """No atomics and fixed tiles: the same digits in every run."""
    step = Step(GPU_SHAPES["decode"], (16, 8), 128, 16, torch.bfloat16)
    s = build(step, "cuda")
    first, *others = (attend_triton(s.q, s.k, s.v, s.kv, s.metadata) for _ in range(5))
    assert all(other.equal(first) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 7])
def test_one_graph_for_all_lengths(splits, monkeypatch):
    """Captured with the longest lengths there can be, replayed with others; padding rows write nowhere."""
    if splits:
        monkeypatch.setattr(paged_attention, "choose_num_splits", lambda *_: splits)
    step = Step(((1, 4000),) * 4, (16, 8), 128, 16, torch.bfloat16, table_width=256)
    s = build(step, "cuda")
    kv = torch.full((2, 1024, *s.kv.shape[2:]), float("nan"), dtype=s.kv.dtype, device="cuda")
    kv[:, : s.kv.shape[1]] = s.kv
    attend_triton(s.q, s.k, s.v, kv, s.metadata)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_triton(s.q, s.k, s.v, kv, s.metadata)
    for seed, lengths in enumerate([(4000,) * 4, (1, 4000, 17, 300), (64, 63, 65, 128), (3, 0, 0, 0)]):
        new = build(replace(step, shapes=tuple((1, length) for length in lengths)), "cuda", seed)
        kv.fill_(float("nan"))
        used = kv[:, : new.kv.shape[1]].copy_(new.kv)
        for name in ("q", "k", "v"):
            getattr(s, name).copy_(getattr(new, name))
        for name in ("cu_seqlens_q", "seq_lens_tensor", "block_table", "slot_mapping"):
            getattr(s.metadata, name).copy_(getattr(new.metadata, name))
        graph.replay()
        assert_same_bits(used, new.kv_after)
        assert_close(out, new.out, TOLERANCE[step.dtype])


@pytest.mark.gpu
def test_a_pool_of_more_than_two_billion_numbers():
    """Offsets of 32 bits wrap around from 2^31 on: the last blocks of a large pool."""
    step = Step(((1, 100), (30, 70)), (16, 8), 128, 16, torch.bfloat16)
    s = build(step, "cuda")
    blocks = 2**31 // s.kv[0, 0].numel() + s.kv.shape[1]
    if torch.cuda.mem_get_info()[0] < 1.2 * 2 * blocks * s.kv[0, 0].nbytes:
        pytest.skip("needs 11 GB of GPU memory")
    kv = torch.empty((2, blocks, *s.kv.shape[2:]), dtype=s.kv.dtype, device="cuda")
    shift = blocks - s.kv.shape[1]
    kv[:, shift:] = s.kv
    s.metadata.block_table += shift
    s.metadata.slot_mapping += shift * step.block_size
    assert_close(attend_triton(s.q, s.k, s.v, kv, s.metadata), s.out, TOLERANCE[step.dtype])
    assert_same_bits(kv[:, shift:], s.kv_after)
