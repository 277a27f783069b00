"""KV calculator: what the KV cache of a model costs, on paper. Run it with --help.

The weights are a constant; the cache grows with every token of every sequence. Which of the two decides how many users
fit on a card is a multiplication away.
"""

import argparse
import sys

from . import zoo
from .config import DTYPES, ModelConfig
from .kv_cache import kv_bytes_per_token

GB, MB = 2**30, 2**20  # as the articles count them


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=f"python -m {__package__}.kv_calculator",
        description="Bytes of KV cache: 2 (K and V) x layers x KV heads x head dim x bytes per number, for each token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", help="take layers, heads and head dim from this model (a name, a folder or a hub id)")
    p.add_argument("--layers", type=int, default=32, help="num_hidden_layers")
    p.add_argument("--heads", type=int, default=32, help="num_attention_heads: what each token would cost without GQA")
    p.add_argument("--kv-heads", type=int, default=8, help="num_key_value_heads")
    p.add_argument("--head-dim", type=int, default=128, help="channels of one head")
    p.add_argument("--dtype", choices=list(DTYPES), default="float16", help="of the cache")
    p.add_argument("--tokens", type=int, default=2048, help="prompt and output of one sequence together")
    p.add_argument("--sequences", type=int, default=64, help="at the same time")
    p.add_argument("--card", type=float, default=24, help="memory of the card in GB (2**30 bytes)")
    p.add_argument("--weights", type=float, default=15, help="weights of the model in GB (2**30 bytes)")
    return p


def kv_costs(
    layers: int, heads: int, kv_heads: int, head_dim: int, dtype: str, tokens: int, sequences: int
) -> dict[str, int]:
    """Bytes per token, per sequence and in all, and per token if every query head had its own K and V."""
    per_token = kv_bytes_per_token(layers, kv_heads, head_dim, DTYPES[dtype])
    return {
        "per_token": per_token,
        "per_sequence": per_token * tokens,
        "in_all": per_token * tokens * sequences,
        "per_token_without_gqa": kv_bytes_per_token(layers, heads, head_dim, DTYPES[dtype]),
    }


def sequences_that_fit(card_bytes: float, weight_bytes: float, bytes_per_sequence: int) -> int:
    """Whole sequences in what the weights leave of the card (activations are not counted)."""
    return max(int((card_bytes - weight_bytes) // bytes_per_sequence), 0)


def main(argv: list[str] | None = None) -> None:
    cli = parser()
    args = cli.parse_args(argv)
    numbers = {n: getattr(args, n) for n in ("layers", "heads", "kv_heads", "head_dim", "tokens", "sequences")}
    try:
        if args.model:
            numbers |= shape_of(args.model)
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    except ValueError as error:
        cli.exit(2, f"{cli.prog}: {error}\n")
    print_costs(numbers, args)


def shape_of(model: str) -> dict[str, int]:
    """The numbers of a model that its cache depends on."""
    known = model.lower() in zoo.published_shapes()
    config = ModelConfig.from_hf(zoo.locate(model, "dummy" if known else "auto").config)
    return {
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }


def print_costs(numbers: dict[str, int], args: argparse.Namespace) -> None:
    costs = kv_costs(dtype=args.dtype, **numbers)
    megabytes, gigabytes = costs["per_sequence"] / MB, costs["in_all"] / GB
    factor = costs["per_token_without_gqa"] / costs["per_token"]
    fits = sequences_that_fit(args.card * GB, args.weights * GB, costs["per_sequence"])
    print(f"2 x {numbers['layers']} layers x {numbers['kv_heads']} KV heads x {numbers['head_dim']} x {args.dtype}")
    print(f"per token    {costs['per_token']:>15,} bytes")
    print(f"per sequence {costs['per_sequence']:>15,} bytes = {megabytes:,.1f} MB for {args.tokens:,} tokens")
    print(f"in all       {costs['in_all']:>15,} bytes = {gigabytes:,.2f} GB for {args.sequences:,} sequences")
    print(f"without GQA  {costs['per_token_without_gqa']:>15,} bytes per token: {factor:g} times as much")
    print(f"a card of {args.card:g} GB with {args.weights:g} GB of weights has room for {fits} such sequences")


if __name__ == "__main__":
    sys.exit(main())
