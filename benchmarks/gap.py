"""Where two greedy outputs part: how close were the two best tokens there?

Rounding differs between kernels. It can only turn a choice where the two best logits were almost equal, so a
divergence is judged by that gap, measured by `transformers` in float32 on the tokens that both outputs share.
"""

import torch

# Largest gap that rounding can explain: relative to logits of some tens, a few units in the last place.
ROUNDING_BOUND = {"float64": 1e-6, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs, or None if the lists are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def top2_gap(folder: str, token_ids: list[int]) -> float:
    """Difference of the two best logits after the given tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        best = model(torch.tensor([token_ids])).logits[0, -1].topk(2).values
    return (best[0] - best[1]).item()
