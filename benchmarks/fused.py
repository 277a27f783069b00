"""Fused kernels: each of stage 5's own against plain PyTorch and cuBLAS, by the clock of a GPU, inside CUDA graphs.

    python -m benchmarks.fused                           # all parts: a minute and a half
    python -m benchmarks.fused --only gemv,sample        # some of them
    python -m benchmarks.fused --sweep --rows 1          # tiles and warps of gemv: a minute and a half

gemv: all products of one decoding step, layer after layer with weights of their own, so that no cache helps: TB/s of
weights, to be held against the memory's bandwidth. The other operations: one layer's call, on inputs that rotate until
they exceed the L2 cache where memory allows. Results are compared before they are timed. A part that runs out of its
seconds leaves the rest of its rows out and says so. Files: fused.json, fused-sweep.json.
"""

import argparse
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from .common import ROOT, announce, environment, results_folder, stages, write_json

LESSON = "stage 5"

BATCHES = (1, 2, 4, 8, 32, 256)
EPS = 1e-6
PARTS = {"rms_norm": 12, "store_qkv": 14, "silu_mul": 12, "sample": 14, "gemv": 45}  # seconds that each may take
DEVICE = "cuda"
ENOUGH = 256 * 2**20  # bytes of inputs in one graph: several times the L2 cache of an H200
STAGES = [stage for stage in stages() if (ROOT / stage / "kernels.py").exists()]


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder whose q and k are normed."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int = 151936

    @property
    def shapes(self) -> dict[str, tuple[int, int, bool]]:
        """Rows and columns of the weights of one layer, as packed, and whether they are gate and up."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden, False),
            "o": (self.hidden, q, False),
            "gate_up": (2 * self.inner, self.hidden, True),
            "down": (self.hidden, self.inner, False),
        }


MODELS = [
    Model("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072),
    Model("Qwen3-8B", 36, 4096, 32, 8, 128, 12288),
]


class Clock:
    """The seconds of one part."""

    def __init__(self, seconds: float):
        self.end = time.perf_counter() + seconds

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self.end


def graph_seconds(run: Callable[[], None], samples: int) -> float:
    """Median time of a replay, of a graph of whatever `run` launches. It has run once before: kernels are compiled."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seconds = []
    for _ in range(samples + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return median(seconds[2:])  # the first replays warm up


def attempt(measure: Callable[[], dict | list]) -> dict | list:
    """What was measured, or why nothing was: one crash must not cost the other rows."""
    try:
        return measure()
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {str(error)[:300]}"}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    """|out - expected| / |expected|, both from bf16 inputs."""
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    if not error < 2e-2:
        raise RuntimeError(f"the result is off by {error:.1e}")


def rms_norm_call(model: Model, batch: int) -> dict:
    return dict(x=random(batch, model.hidden), weight=random(model.hidden), eps=EPS)


def silu_mul_call(model: Model, batch: int) -> dict:
    return dict(gate_up=random(batch, 2 * model.inner))


def store_qkv_call(model: Model, batch: int) -> dict:
    heads, dim = model.heads + 2 * model.kv_heads, model.head_dim
    return dict(
        qkv=random(batch, heads * dim),
        positions=torch.randint(4096, (batch,), device=DEVICE),
        cos_sin=random(4096, 2, dim // 2),
        q_norm=random(dim),
        k_norm=random(dim),
        eps=EPS,
        kv=torch.zeros(2, batch // 16 + 2, 16, model.kv_heads, dim, device=DEVICE, dtype=torch.bfloat16),
        slot_mapping=torch.randperm(batch // 16 * 16 + 32, device=DEVICE)[:batch].contiguous(),
    )


def sample_call(model: Model, batch: int) -> dict:
    ids = torch.arange(batch, device=DEVICE)
    scale = torch.ones(batch, device=DEVICE)
    given = dict(logits=random(batch, model.vocab), seeds=ids * 7919, positions=ids + 9)
    return given | dict(inverse_temperatures=scale, out=torch.full_like(ids, -1))


CALLS = {
    "rms_norm": rms_norm_call,
    "store_qkv": store_qkv_call,
    "silu_mul": silu_mul_call,
    "sample": sample_call,
}


def plain_sample(logits, seeds, positions, inverse_temperatures, out) -> None:
    """What PyTorch does without noise of its own making: ops.sample reads seeds on the CPU, which no graph can."""
    noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32)))
    out.copy_((logits.float() * inverse_temperatures[:, None] + noise).argmax(-1))


def tensor_bytes(given: dict) -> int:
    """Of the inputs that grow with the batch. A cache is as large as its pool, so it does not count."""
    return sum(x.nbytes for name, x in given.items() if name in ("x", "gate_up", "qkv", "logits"))


def moved_bytes(name: str, given: dict) -> int:
    """What must be read and written once."""
    share = {"rms_norm": 2.0, "store_qkv": 2.0, "silu_mul": 1.5, "sample": 1.0}[name]
    return int(share * tensor_bytes(given))


def first_result(function: Callable, given: dict) -> torch.Tensor:
    """What a call answers; of store_qkv the cache too, which is empty before."""
    kv = given.get("kv")
    if kv is None:
        return function(**given)
    kv.zero_()
    return torch.cat((function(**given).flatten(), kv.flatten()))


def measure_operation(name: str, ours: Callable, plain: Callable, make: Callable[[], dict], samples: int) -> dict:
    """Both versions on the same inputs, several calls to a graph."""
    first = make()
    if name != "sample":  # the plain one draws other numbers
        expected = first_result(plain, first)
        check(first_result(ours, first), expected)
    distinct = min(32, max(1, math.ceil(ENOUGH / tensor_bytes(first))))
    inputs = [first, *(make() for _ in range(distinct - 1))]
    calls = max(distinct, 8)

    def run(function: Callable) -> None:
        for given in islice(cycle(inputs), calls):
            function(**given)

    seconds = {"ours": graph_seconds(lambda: run(ours), samples) / calls}
    seconds["torch"] = graph_seconds(lambda: run(plain), samples) / calls
    return {"seconds": seconds, "tb_per_s": moved_bytes(name, first) / seconds["ours"] / 1e12, "calls": calls}


def kernel(stage: str, name: str) -> Callable:
    """A stage's own version of an operation."""
    file = "sample_kernels" if name == "sample" else "kernels"
    return getattr(importlib.import_module(f"{stage}.{file}"), name)


def operation_rows(name: str, stage: str, models: list[Model], samples: int) -> list[dict]:
    ours, ops = kernel(stage, name), importlib.import_module(f"{stage}.ops")
    plain = plain_sample if name == "sample" else getattr(ops, name)
    models = models[:1] if name == "sample" else models  # the vocabulary is the same
    clock, rows = Clock(PARTS[name]), []
    for model, batch in product(models, BATCHES):
        if clock.is_over:
            print(f"{name}: out of time before {model.name}, batch {batch}")
            break
        make = partial(CALLS[name], model, batch)
        result = attempt(partial(measure_operation, name, ours, plain, make, samples))
        rows.append({"part": name, "model": model.name, "batch": batch} | result)
    return rows


@dataclass
class Weights:
    """Of a whole model, random: every layer has its own."""

    layers: list[dict[str, torch.Tensor]]
    norm: torch.Tensor
    head: torch.Tensor

    @classmethod
    def make(cls, model: Model) -> "Weights":
        shapes = {name: (n, k) for name, (n, k, _) in model.shapes.items()}
        layers = [{name: random(n, k).mul_(k**-0.5) for name, (n, k) in shapes.items()} for _ in range(model.layers)]
        norm = random(model.hidden)
        return cls(layers, norm, random(model.vocab, model.hidden).mul_(model.hidden**-0.5))

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for layer in self.layers for weight in layer.values()) + self.head.nbytes


def step_of_gemv(gemv: Callable, weights: Weights, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The products of a step with norms, residuals and silu, four launches a layer. Attention's result is given."""
    norm = weights.norm
    for layer in weights.layers:
        gemv(x, layer["qkv"], norm_weight=norm, eps=EPS)
        x = gemv(attended, layer["o"], residual=x)
        inner = gemv(x, layer["gate_up"], norm_weight=norm, eps=EPS, gated=True)
        x = gemv(inner, layer["down"], residual=x)
    return gemv(x, weights.head, norm_weight=norm, eps=EPS)


def step_of_cublas(inner: torch.Tensor, weights: Weights, x: torch.Tensor, attended: torch.Tensor) -> None:
    """The products alone, on inputs that are given, as if all the rest cost nothing."""
    for layer in weights.layers:
        F.linear(x, layer["qkv"])
        F.linear(attended, layer["o"])
        F.linear(x, layer["gate_up"])
        F.linear(inner, layer["down"])
    F.linear(x, weights.head)


def measure_gemv(kernels: ModuleType, ops: ModuleType, weights: Weights, model: Model, batch: int, samples: int):
    """One whole step: our products, cuBLAS with our other kernels, and plain PyTorch."""
    x, attended = random(batch, model.hidden), random(batch, model.heads * model.head_dim)

    def separate(x, weight, norm_weight=None, eps=0.0, residual=None, gated=False):
        y = F.linear(x if norm_weight is None else kernels.rms_norm(x, norm_weight, eps), weight)
        y = kernels.silu_mul(y) if gated else y
        return y if residual is None else y + residual

    columns = {
        "cublas, products alone": partial(step_of_cublas, random(batch, model.inner)),
        "cublas and our others": partial(step_of_gemv, separate),
        "plain torch": partial(step_of_gemv, ops.gemv),
    }
    if batch <= ops.MAX_GEMV_ROWS:
        columns = {"ours": partial(step_of_gemv, kernels.gemv)} | columns
        one_layer = Weights(weights.layers[:1], weights.norm, weights.head)  # with more, rounding adds up
        check(columns["ours"](one_layer, x, attended), columns["plain torch"](one_layer, x, attended))
    seconds = {name: graph_seconds(partial(run, weights, x, attended), samples) for name, run in columns.items()}
    return {"seconds": seconds, "tb_per_s": weights.nbytes / next(iter(seconds.values())) / 1e12}


def gemv_rows(stage: str, models: list[Model], samples: int) -> list[dict]:
    kernels, ops = importlib.import_module(f"{stage}.kernels"), importlib.import_module(f"{stage}.ops")
    clock, rows = Clock(PARTS["gemv"]), []
    for model in models:
        if clock.is_over:
            print(f"gemv: out of time before {model.name}")
            break
        weights = Weights.make(model)
        for batch in BATCHES:
            if clock.is_over:
                print(f"gemv: out of time before {model.name}, batch {batch}")
                break
            result = attempt(partial(measure_gemv, kernels, ops, weights, model, batch, samples))
            rows.append({"part": "gemv", "model": model.name, "batch": batch} | result)
        del weights
        torch.cuda.empty_cache()
    return rows


def print_rows(rows: list[dict], title: str) -> None:
    """Microseconds of every version; TB/s of the first."""
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row.get("seconds", {})))
    table = Table(title=title)
    for name in ("model", "batch", *(f"{column}, us" for column in columns), "TB/s"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        seconds = row.get("seconds", {})
        cells = [f"{seconds[name] * 1e6:,.1f}" if name in seconds else "" for name in columns]
        rate = f"{row['tb_per_s']:.2f}" if "tb_per_s" in row else row["failure"]
        table.add_row(row["model"], str(row["batch"]), *cells, rate)
    Console(width=120).print(table)


TILES = [
    dict(BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, EVICTION="")
    for block_k, block_n, num_warps in product((1024, 512, 2048, 256), (1, 2, 4, 8), (4, 2, 8, 1))
    # Threads that load 16 bytes lie side by side along K, or they would have to exchange x. (With one row, 8 will do.)
    if block_k >= (128 if block_n == 1 else 256) * num_warps
    if block_n * block_k <= 1024 * num_warps  # sums per thread: 32 for each row of x
]


def sweep_cases(models: list[Model]) -> list[tuple[str, str, tuple[int, int, bool], dict]]:
    """(model, name, shape, options): the products of a layer, and the head."""
    cases = []
    for model in models:
        for name, shape in (model.shapes | {"head": (model.vocab, model.hidden, False)}).items():
            normed = name in ("qkv", "gate_up", "head")
            cases.append((model.name, name, shape, dict(norm=normed, gated=shape[2])))
    return cases


def measure_tile(gemv: Callable, x: torch.Tensor, weights: list[torch.Tensor], options: dict, samples: int) -> dict:
    """Seconds of one product: a graph goes once over all copies of the weights."""

    def run() -> None:
        for weight in weights:
            gemv(x, weight, **options)

    seconds = graph_seconds(run, samples) / len(weights)
    return {"seconds": seconds, "tb_per_s": weights[0].nbytes / seconds / 1e12}


def sweep_case(kernels: ModuleType, case: tuple, rows: int, samples: int, clock: Clock) -> list[dict]:
    """The engine's own choice first, then every candidate as long as there is time, then the best two evicting."""
    model, name, (n, k, gated), flags = case
    copies = max(2, math.ceil(ENOUGH / (2 * n * k)))
    x, weights = random(rows, k), [random(n, k).mul_(k**-0.5) for _ in range(copies)]
    options = dict(gated=gated) | (dict(norm_weight=random(k), eps=EPS) if flags["norm"] else {})
    found, expected = [], kernels.gemv(x, weights[0], **options)

    def measure(config: dict) -> dict:
        check(kernels.gemv(x, weights[0], **options, config=config), expected)
        return measure_tile(kernels.gemv, x, weights, options | dict(config=config), samples)

    def try_out(config: dict) -> None:
        found.append({"model": model, "product": name, "rows": rows, "config": config})
        found[-1] |= attempt(partial(measure, config))

    try_out(kernels.gemv_config(n // 2 if gated else n, k, 2))
    for config in TILES:
        if not clock.is_over and config["BLOCK_K"] < 2 * k:
            try_out(config)
    for row in sorted((row for row in found if "seconds" in row), key=lambda row: row["seconds"])[:2]:
        try_out(row["config"] | dict(EVICTION="evict_first"))
    return found


def sweep(stage: str, models: list[Model], rows: int, samples: int, seconds: float) -> list[dict]:
    """Each product gets an equal share of the time that is left."""
    kernels = importlib.import_module(f"{stage}.kernels")
    cases, found, end = sweep_cases(models), [], time.perf_counter() + seconds
    for i, case in enumerate(cases):
        clock = Clock((end - time.perf_counter()) / (len(cases) - i))
        found += sweep_case(kernels, case, rows, samples, clock)
        torch.cuda.empty_cache()
    return found


def print_sweep(found: list[dict], best: int = 3) -> None:
    table = Table(title="gemv: the engine's own tiles, then the best candidates")
    for column in ("product", "BLOCK_N, BLOCK_K", "warps", "eviction", "us", "TB/s", "tried"):
        table.add_column(column, justify="left" if column == "product" else "right")
    failures = [row for row in found if "failure" in row]
    for key in dict.fromkeys((row["model"], row["product"]) for row in found):
        rows = [row for row in found if (row["model"], row["product"]) == key and "failure" not in row]
        for row in rows[:1] + sorted(rows[1:], key=lambda row: row["seconds"])[:best]:
            tile, warps, eviction = (
                f"{row['config']['BLOCK_N']}, {row['config']['BLOCK_K']}",
                *(str(row["config"][name]) for name in ("num_warps", "EVICTION")),
            )
            numbers = f"{row['seconds'] * 1e6:,.1f}", f"{row['tb_per_s']:.2f}", str(len(rows))
            table.add_row(" ".join(key), tile, warps, eviction, *numbers)
        table.add_section()
    Console(width=120).print(table)
    for model in dict.fromkeys(row["model"] for row in found):
        print_loss(model, [row for row in found if row["model"] == model and "failure" not in row])
    print(f"{len(failures)} of {len(found)} candidates could not run", *(f["failure"] for f in failures[:3]), sep="\n")


def print_loss(model: str, rows: list[dict]) -> None:
    """What the engine's tiles lose over a whole step against the best of each product."""
    layers = next(m.layers for m in MODELS if m.name == model)
    own, least = 0.0, 0.0
    for name in dict.fromkeys(row["product"] for row in rows):
        seconds = [row["seconds"] for row in rows if row["product"] == name]
        times = 1 if name == "head" else layers
        own, least = own + times * seconds[0], least + times * min(seconds)
    if least:
        print(f"{model}, a step: {own * 1e3:.3f} ms as chosen, {least * 1e3:.3f} ms at best ({own / least - 1:+.1%})")


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        prog="python -m benchmarks.fused", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--stage", choices=STAGES, default=STAGES[-1] if STAGES else None)
    cli.add_argument("--only", default=",".join(PARTS), help="parts, with commas between: " + ", ".join(PARTS))
    cli.add_argument("--model", default="", help="only the models whose names contain this")
    cli.add_argument("--samples", type=int, default=10, help="replays of each graph; the median counts")
    cli.add_argument("--sweep", action="store_true", help="try tiles of gemv")
    cli.add_argument("--rows", type=int, default=1, choices=(1, 2, 3, 4), help="of x, in a sweep")
    cli.add_argument("--seconds", type=float, default=90.0, help="that a sweep may take")
    cli.add_argument("--out", type=Path, help="folder for the result")
    return cli


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    parts, models = args.only.split(","), [model for model in MODELS if args.model in model.name]
    if args.stage is None:
        cli.error("no stage has a kernels.py")
    if set(parts) - set(PARTS) or not models or args.samples < 1:
        cli.error(f"--only knows {', '.join(PARTS)}; --model must leave one; --samples must be 1 or more")
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        cli.error("needs a CUDA GPU and the package triton")
    torch.manual_seed(0)
    env, out, rows = environment("cuda"), args.out or results_folder("cuda"), []
    job = {
        "model": ", ".join(m.name for m in models),
        "stage": args.stage,
        "dtype": "bfloat16",
        "samples": args.samples,
        "sizes": [vars(m) for m in models],
    }
    file = out / ("fused-sweep.json" if args.sweep else "fused.json")
    start = time.perf_counter()
    if args.sweep:
        rows = sweep(args.stage, models, args.rows, args.samples, args.seconds)
        write_json(file, {"environment": env, "job": job, "rows": rows})
        print_sweep(rows)
    for part in () if args.sweep else parts:
        measure = gemv_rows if part == "gemv" else partial(operation_rows, part)
        made = attempt(partial(measure, args.stage, models, args.samples))
        made = made if isinstance(made, list) else [{"part": part, "model": "all", "batch": 0} | made]
        rows += made
        write_json(file, {"environment": env, "job": job, "rows": rows})  # part by part: a crash keeps the others
        print_rows(made, f"{part}, bfloat16, {env['device_name']}")
    print(f"{time.perf_counter() - start:.0f} s")
    announce(file, {"environment": env, "job": job, "rows": rows})
    return int(not args.sweep and any("failure" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
