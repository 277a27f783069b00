"""Roofline: what a machine could do at best with a model, by arithmetic: bytes over bandwidth, operations over FLOP/s.

    python -m benchmarks roofline --model qwen3-8b --dummy --batches 1 256 --context 1024

A step of decoding reads all weights once, however many sequences share it, and the K and V of each sequence's context;
it multiplies each sequence's token with every weight. Whichever takes longer bounds the step:

    seconds(B, c) = max((W + B * c * kv) / bandwidth, B * flops(c) / FLOP/s)        ceiling = B / seconds

Other measurements print this card before they begin and keep it in their file: a speed means something beside its
ceiling. Peaks of GPUs are their makers'; a machine that is not in the table is measured for half a second, so there the
ceilings are rough (a small model may sit in caches that are faster than memory).
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import workloads
from .common import default_device, device_name, environment, publish, results_folder, stages

NVIDIA, AMPERE = "www.nvidia.com/en-us/data-center/", "NVIDIA A100 Tensor Core GPU datasheet"
# name as the driver says it -> bytes per second, FLOP/s in bf16 with float32 sums and without sparsity, source
PEAKS = {
    "NVIDIA H200": (4.8e12, 989e12, f"{NVIDIA}h200 (1,979 TFLOP/s with sparsity)"),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12, f"{NVIDIA}h100, SXM (1,979 with sparsity)"),
    "NVIDIA H100 NVL": (3.9e12, 835e12, f"{NVIDIA}h100, NVL (1,671 with sparsity)"),
    "NVIDIA H100 PCIe": (2.0e12, 756e12, "NVIDIA H100 PCIe product brief (1,513 with sparsity)"),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12, AMPERE),
    "NVIDIA A100 80GB PCIe": (1.935e12, 312e12, AMPERE),
    "NVIDIA A100-SXM4-40GB": (1.555e12, 312e12, AMPERE),
    "NVIDIA A100-PCIE-40GB": (1.555e12, 312e12, AMPERE),
    "NVIDIA L40S": (0.864e12, 362e12, f"{NVIDIA}l40s (733 with sparsity)"),
    "NVIDIA L4": (0.3e12, 121e12, f"{NVIDIA}l4 (242 with sparsity)"),
    "NVIDIA GeForce RTX 4090": (1.008e12, 165.2e12, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    "NVIDIA GeForce RTX 3090": (0.936e12, 71e12, "NVIDIA Ampere GA102 whitepaper, appendix A"),
}
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def layer_weights(config) -> int:
    """Numbers in the matrices of one layer: q, k, v, o of attention, then gate, up and down.

    H * heads * d + 2 * H * kv_heads * d + heads * d * H + 3 * H * I
    """
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return 2 * config.hidden_size * q + 2 * config.hidden_size * kv + 3 * config.hidden_size * config.intermediate_size


def parameters(config) -> int:
    """All numbers of the checkpoint: layers, norms and biases, the embedding, and the head where it is its own."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    small = 2 * config.hidden_size + 2 * config.head_dim * config.qk_norm
    small += (q + 2 * kv) * config.qkv_bias + config.hidden_size * config.o_bias
    small += (2 * config.intermediate_size + config.hidden_size) * config.mlp_bias
    table = config.vocab_size * config.hidden_size
    layers = config.num_hidden_layers * (layer_weights(config) + small)
    return layers + config.hidden_size + table * (1 if config.tie_word_embeddings else 2)


def read_per_step(config) -> int:
    """Numbers that a step reads: all but an embedding table that is not also the head; of that it takes a few rows."""
    return parameters(config) - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)


def kv_per_token(config) -> int:
    """Numbers of K and V per token: 2 * layers * kv_heads * d."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def decode_flops(config, context: int) -> int:
    """Of one token: 2 per weight of the layers and the head, and 4 * layers * heads * d * c for scores and values."""
    weights = config.num_hidden_layers * layer_weights(config) + config.vocab_size * config.hidden_size
    return 2 * weights + 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context


def prefill_flops(config, tokens: int) -> int:
    """Of a prompt: 2 per weight of the layers and token, the head once, and 4 * layers * heads * d for every pair.

    Token i sees i tokens: n * (n + 1) / 2 pairs.
    """
    weights = config.num_hidden_layers * layer_weights(config) * tokens + config.vocab_size * config.hidden_size
    pairs = tokens * (tokens + 1) // 2
    return 2 * weights + 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs


def best_of(run: Callable[[], object], device: str, seconds: float = 0.2) -> float:
    """Shortest time of a call among those that fit into `seconds`; at least three."""
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measured_peaks(device: str, dtype: str) -> tuple[float, float]:
    """Bytes per second of a copy (each byte is read and written), FLOP/s of a product of matrices."""
    source = torch.ones(2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    a = torch.ones(512, 512, dtype=getattr(torch, dtype), device=device)
    copied, multiplied = best_of(lambda: target.copy_(source), device), best_of(lambda: a @ a, device)
    return 2 * source.nbytes / copied, 2 * 512**3 / multiplied


def machine(device: str, dtype: str) -> dict:
    """Bandwidth and FLOP/s of where this runs, and how they are known."""
    name = device_name(device)
    if name in PEAKS and BYTES[dtype] == 2:
        bandwidth, flops, source = PEAKS[name]
    else:
        bandwidth, flops = measured_peaks(device, dtype)
        source = f"measured: a copy of 128 MiB, a {dtype} product of 512 x 512"
        if name in PEAKS:
            bandwidth, source = PEAKS[name][0], f"{PEAKS[name][2]}; FLOP/s {source}"
    return {"name": name, "bytes_per_second": bandwidth, "flops": flops, "source": source}


def decode_ceiling(config, dtype: str, peak: dict, batch: int, context: int) -> dict:
    """Tokens per second of `batch` sequences that each see `context` tokens, and what bounds them."""
    size = BYTES[dtype]
    memory = size * (read_per_step(config) + batch * context * kv_per_token(config)) / peak["bytes_per_second"]
    compute = batch * decode_flops(config, context) / peak["flops"]
    bound = "memory" if memory >= compute else "compute"
    return {"batch": batch, "context": context, "tokens_per_second": batch / max(memory, compute), "bound": bound}


def prefill_ceiling(config, dtype: str, peak: dict, tokens: int) -> dict:
    """Prompt tokens per second, and the least milliseconds to the first token."""
    memory = BYTES[dtype] * read_per_step(config) / peak["bytes_per_second"]
    compute = prefill_flops(config, tokens) / peak["flops"]
    seconds, bound = max(memory, compute), "memory" if memory >= compute else "compute"
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "ttft_ms": 1000 * seconds, "bound": bound}


def card(config, dtype: str, peak: dict, decode: list[tuple[int, int]], prefill: list[int] = ()) -> dict:
    """Everything above for the points of one measurement. decode: (batch, context) of each."""
    size = BYTES[dtype]
    return {
        "dtype": dtype,
        "parameters": parameters(config),
        "weight_bytes": size * parameters(config),
        "bytes_read_per_step": size * read_per_step(config),
        "kv_bytes_per_token": size * kv_per_token(config),
        "machine": peak,
        "decode": [decode_ceiling(config, dtype, peak, batch, context) for batch, context in decode],
        "prefill": [prefill_ceiling(config, dtype, peak, tokens) for tokens in prefill],
    }


def resolve(model: str, device: str | None, dtype: str, dummy: bool = False):
    """Shape of a model, the device, and the type that the engines would take. Raises ValueError for an unknown name."""
    first = stages()[0]
    zoo, config = (importlib.import_module(f"{first}.{name}") for name in ("zoo", "config"))
    shape = config.ModelConfig.from_hf(zoo.locate(model, "dummy" if dummy else "auto").config)
    where = config.resolve_device(device)
    kind = config.resolve_dtype(dtype or "auto", shape.dtype, where)
    return shape, where.type, str(kind).removeprefix("torch.")


def show(model: str, args: argparse.Namespace, decode: list[tuple[int, int]], prefill: list[int] = ()) -> dict:
    """Print the card of a measurement that is about to begin, and return it. args: device, dtype and perhaps dummy.

    A model that is not there ends the program with one line, before anything is measured.
    """
    try:
        shape, device, dtype = resolve(model, args.device, args.dtype, getattr(args, "dummy", False))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    found = {"model": model} | card(shape, dtype, machine(device, dtype), decode, prefill)
    print(text(found), flush=True)
    return found


def points_of(rows: list[dict]) -> list[tuple[int, int]]:
    """(batch, context) of rows that serve a workload: as many at once as may run, the mean context of a new token."""
    found = set()
    for row in rows:
        requests = getattr(workloads, row["workload"])(**row["arguments"])
        new = sum(request.max_tokens for request in requests)
        seen = sum(request.max_tokens * (len(request.prompt) + request.max_tokens / 2) for request in requests)
        found.add((min(row["options"]["max_num_seqs"], len(requests)), int(seen / new)))
    return sorted(found)


def text(found: dict) -> str:
    """The card, a few lines."""
    peak, read = found["machine"], found["bytes_read_per_step"]
    speeds = f"{peak['bytes_per_second'] / 1e9:,.1f} GB/s, {peak['flops'] / 1e12:,.2f} TFLOP/s"
    lines = [
        f"Roofline of {found['model']} in {found['dtype']} on {peak['name']}",
        f"  machine  {speeds} ({peak['source']})",
        f"  weights  {found['weight_bytes'] / 1e6:,.1f} MB, {read / 1e6:,.1f} MB of them read by each step",
        f"  KV cache {found['kv_bytes_per_token']:,} bytes per token",
    ]
    for at in found["decode"]:
        where = f"{at['batch']} at once, context {at['context']:,}"
        lines.append(f"  decoding at most {at['tokens_per_second']:,.1f} tokens/s: {where} ({at['bound']})")
    for at in found["prefill"]:
        speed = f"{at['tokens_per_second']:,.0f} tokens/s, first token after {at['ttft_ms']:,.2f} ms"
        lines.append(f"  a prompt of {at['tokens']:,} at most {speed} ({at['bound']})")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline",
        description="What this machine could do at best with a model: nothing is run but a copy and a product.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", default="smollm2-135m", help="a name (smollm2-135m, tiny), a folder or a hub id")
    p.add_argument("--dummy", action="store_true", help="only the shapes of the model: no files are needed")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="sequences at once")
    p.add_argument("--context", type=int, default=1024, help="tokens that each of them sees")
    p.add_argument("--prompts", type=int, nargs="+", default=[512, 2048], help="tokens of a prompt")
    p.add_argument("--out", type=Path, help="folder for roofline.json; left out: out/cpu, out/h200, ...")
    return p


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    if min(*args.batches, args.context, *args.prompts) < 1:
        cli.error("--batches, --context and --prompts must be at least 1")
    found = show(args.model, args, [(batch, args.context) for batch in args.batches], args.prompts)
    device = args.device or default_device()
    document = {"environment": environment(device), "job": {"model": args.model, "what": "roofline"}}
    publish((args.out or results_folder(device)) / "roofline.json", document | {"roofline": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
