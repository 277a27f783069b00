"""The fused kernels against their references in float64: on a CPU in Triton's interpreter, on a GPU compiled.

The calls are in interpreted_kernels.py. A GPU gets them in bf16, and more of them, of the sizes that models have.
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

from .. import kernels, ops, sample_kernels
from .interpreted_kernels import CALLS, CHECKS, SMALL, TOLERANCE, Call, Maker, assert_close, check


@pytest.fixture(scope="module")
def interpreted(request) -> dict[str, str | None]:
    """What went wrong, by call: all calls that were asked for, in one process that has the interpreter on."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    names = [item.callspec.params["call"] for item in items if item.originalname == "test_interpreted_call"]
    command = [sys.executable, "-m", f"{__package__}.interpreted_kernels", *names]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=250)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    missing = {name: f"no answer; the interpreter's process ended:\n{run.stderr[-2000:]}" for name in names}
    return missing | {result["name"]: result["failure"] for result in results}


@pytest.mark.parametrize("call", [*CHECKS, *CALLS])
def test_interpreted_call(call, interpreted):
    """Result of one call, and all that it must leave alone."""
    assert interpreted[call] is None, "\n" + interpreted[call]


def test_every_function_has_both_versions():
    """Same names, and the same arguments in the same order."""
    for name in ("rms_norm", "store_qkv", "silu_mul", "gemv", "sample"):
        ours, reference = (
            getattr(module, name).__code__ for module in (sample_kernels if name == "sample" else kernels, ops)
        )
        arguments = reference.co_varnames[: reference.co_argcount]
        assert ours.co_varnames[: len(arguments)] == arguments


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("k", [64, 576, 1024, 1536, 2048, 3072, 9728, 12288])
@pytest.mark.parametrize("n", [5, 1024, 4096, 151936])
def test_gemv_loads_16_bytes_per_thread(n, k, itemsize):
    config = kernels.gemv_config(n, k, itemsize)
    assert config["BLOCK_K"] * itemsize in (config["num_warps"] * 32 * 16, config["num_warps"] * 32 * 32)
    assert config["BLOCK_K"].bit_count() == config["BLOCK_N"].bit_count() == 1


def test_gemv_refuses_many_rows():
    with pytest.raises(ValueError, match="at most 4 rows, not 5"):
        kernels.gemv(torch.randn(5, 8), torch.randn(3, 8))


BF16 = {name: replace(call, dtype=torch.bfloat16) for name, call in CALLS.items() if call.dtype == torch.float32}
LARGE = {
    "rms_norm 256": Call("rms_norm", (256, 1024)),
    "rms_norm 4096": Call("rms_norm", (4096, 1024)),
    "store_qkv 256": Call("store_qkv", (256, 16, 8, 128), options=dict(norm=True, unslotted=9)),
    "store_qkv 4096": Call("store_qkv", (4096, 16, 8, 128), options=dict(norm=True)),
    "silu_mul 256": Call("silu_mul", (256, 3072)),
    "silu_mul 4096": Call("silu_mul", (4096, 3072)),
}
for name, kv_dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
    LARGE[f"store_qkv 4096, {name}"] = Call("store_qkv", (4096, 16, 8, 128), options=dict(norm=True, kv_dtype=kv_dtype))
for rows in (1, 2, 3, 4):
    LARGE[f"gemv {rows}, qkv"] = Call("gemv", (rows, 4096, 1024), options=dict(norm=True))
    LARGE[f"gemv {rows}, o"] = Call("gemv", (rows, 1024, 2048), options=dict(residual=True))
    LARGE[f"gemv {rows}, gate and up"] = Call("gemv", (rows, 3072, 1024), options=dict(norm=True, gated=True))
    LARGE[f"gemv {rows}, down"] = Call("gemv", (rows, 1024, 3072), options=dict(residual=True))
LARGE["gemv, head"] = Call("gemv", (1, 151936, 1024), options=dict(norm=True))
LARGE["gemv, more than 2^31 numbers"] = Call("gemv", (1, 2**19 + 3, 4096))
LARGE |= {f"sample {rows}": Call("sample", (rows, 151936)) for rows in (1, 2, 8, 9, 300)}


@pytest.mark.gpu
@pytest.mark.parametrize("call", CHECKS)
def test_compiled_check(call):
    CHECKS[call]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("call", [name for name in CALLS if name.endswith("16")] + list(BF16)[::2])
def test_compiled_call(call):
    check(BF16.get(call) or CALLS[call], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("call", LARGE)
def test_compiled_call_of_a_real_size(call, dtype):
    if "2^31" in call and (dtype != torch.bfloat16 or torch.cuda.mem_get_info()[0] < 40 * 2**30):
        pytest.skip("once is enough, with 40 GB of GPU memory")
    check(replace(LARGE[call], dtype=dtype), "cuda")


@pytest.mark.gpu
def test_steps_compile_nothing_new():
    """Other numbers of tokens, rows, seeds and positions, 1 and multiples of 16 among them: still the same kernels."""

    def compiled() -> int:
        functions = [getattr(kernels, f"{name}_kernel") for name in ("rms_norm", "qkv", "silu", "gemv")]
        functions += [sample_kernels.sample_kernel, sample_kernels.pick_kernel]
        return sum(len(cache[0]) for function in functions for cache in function.device_caches.values())

    def step(tokens: int, rows: int) -> None:
        for call, size in (("rms_norm", tokens), ("store_qkv", tokens), ("silu_mul", tokens), ("gemv", rows)):
            sizes = {"store_qkv": (size, 4, 2, 48), "gemv": (size, 48, 80)}.get(call, (size, 80))
            check(Call(call, sizes), "cuda", seed=tokens)
        count = torch.arange(tokens + 1, device="cuda")[1:]  # not aligned to 16 bytes
        logits, inverse = torch.randn(tokens, 500, device="cuda"), torch.ones_like(count).float()
        sample_kernels.sample(logits, count, count, inverse, count)

    step(1, 3)
    before = compiled()
    for tokens, rows in ((2, 4), (3, 3), (5, 4), (8, 3)):
        step(tokens, rows)
    assert before >= 6 and compiled() == before


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_captured_in_a_graph(rows):
    """All five in one graph, replayed with other numbers in the same places."""

    def arguments(seed: int) -> dict[str, dict]:
        maker = Maker(torch.bfloat16, "cuda", seed)
        sizes = {"rms_norm": (rows, 256), "silu_mul": (rows, 512), "gemv": (rows, 512, 256, True, True)}
        calls = {name: getattr(maker, name)(*size) for name, size in sizes.items()}
        calls["store_qkv"] = maker.store_qkv(rows, 4, 2, 64, norm=True)
        row = torch.arange(rows, device="cuda") + seed
        tokens = dict(seeds=row, positions=row * 3, inverse_temperatures=row.float() % 2, out=row.clone())
        return calls | {"sample": dict(logits=maker.random(rows, 5000), **tokens)}

    def run(calls: dict) -> list[torch.Tensor]:
        functions = {name: getattr(sample_kernels if name == "sample" else kernels, name) for name in calls}
        outs = [functions[name](**given) for name, given in calls.items()]
        return [out for out in outs if out is not None] + [calls["sample"]["out"]]

    fixed = arguments(0)
    run(fixed)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(fixed)
    for seed in (1, 2):
        new = arguments(seed)
        for name, given in new.items():
            for key, value in given.items():
                if isinstance(value, torch.Tensor):
                    fixed[name][key].copy_(value)
        graph.replay()
        for out, expected in zip(outs, run(new), strict=True):
            assert out.equal(expected)


@pytest.mark.gpu
def test_other_tiles_give_the_same():
    """What the sweep of benchmarks.fused tries: any tile is right."""
    maker = Maker(torch.bfloat16, "cuda", 0)
    given = maker.gemv(2, 100, 700, norm=True, gated=True)
    expected = ops.gemv(**{n: x.double() if isinstance(x, torch.Tensor) else x for n, x in given.items()})
    for block_n, block_k, num_warps in ((1, 256, 8), (4, 512, 2), (8, 256, 1), (2, 2048, 4)):
        config = SMALL | dict(BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps)
        assert_close(kernels.gemv(**given, config=config), expected, TOLERANCE[torch.bfloat16])
