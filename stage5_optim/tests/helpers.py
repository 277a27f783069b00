"""Tools of the tests: small random checkpoints, the reference (transformers, without a cache), and fair comparisons.

Floating point is not associative: two correct engines differ in the last digits, and where the two best logits are
closer than that, greedy decoding may take either. So a token mismatch is a failure only above a rounding bound.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from .. import LLM, SamplingParams
from ..zoo import _save_byte_tokenizer

logging.disable_progress_bar()

SHAPE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=None)
FAMILY_SHAPE = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32}}  # Qwen3: not hidden_size / heads, which is 16


def make_checkpoint(folder: Path, family: str, **config_overrides: object) -> Path:
    """Write a tiny random model of a family as transformers itself saves it, with the byte tokenizer. Returns folder.

    Vocabulary of 128 (the bytes that are ASCII; the tokenizer's special tokens lie outside and are never made), hidden
    64, 2 layers, 4 query and 2 KV heads, fp32. `config_overrides` replace any key of the config.
    """
    options = {**SHAPE, **FAMILY_SHAPE[family], **config_overrides}
    config = AutoConfig.for_model(family, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for seed in range(8):  # a model that repeats itself tests little: take the first that does not
        widen(model, seed)
        tokens, _ = reference_greedy(model, [1, 2, 3], 16)
        if len(set(tokens)) >= 6:
            break
    else:
        raise AssertionError(f"the greedy outputs of this model do not vary: {tokens}")
    model.to(config.dtype or torch.float32).save_pretrained(folder)
    _save_byte_tokenizer(Path(folder))
    return Path(folder)


@torch.no_grad()
def widen(model: torch.nn.Module, seed: int) -> None:
    """Fresh weights, so wide that attention is not flat, biases and norms matter, and the best token keeps moving."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        if "norm" in name:
            parameter.mul_(0.2).add_(1.0)
        elif name.endswith("bias"):
            parameter.mul_(0.5)
        elif "embed" in name:
            parameter.mul_(0.3)  # a tied head would favour the last token again
        else:
            parameter.mul_(1.5 * parameter.shape[-1] ** -0.5)


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The checkpoint in transformers, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def reference_logits(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, vocab] of transformers after each token of ids, in one pass without a cache, as float64 on the CPU."""
    return model(torch.tensor([ids], device=model.device), use_cache=False).logits[0].double().cpu()


def reference_greedy(model: torch.nn.Module, ids: Sequence[int], n: int) -> tuple[list[int], list[float]]:
    """n greedy tokens by the plainest loop there is, and at each the gap between the two best logits."""
    ids, gaps = list(ids), []
    for _ in range(n):
        logits = reference_logits(model, ids)[-1]
        best, second = logits.topk(2).values.tolist()
        ids.append(int(logits.argmax()))
        gaps.append(best - second)
    return ids[-n:], gaps


def reference_choices(
    model: torch.nn.Module, ids: Sequence[int], output: Sequence[int]
) -> tuple[list[int], list[float]]:
    """What the reference would have said after ids and after each token of output but the last, and the gaps there.

    As long as both agree these are its own greedy tokens, for the price of one pass.
    """
    logits = reference_logits(model, [*ids, *output[:-1]])[-len(output) :]
    best, second = logits.topk(2).values.unbind(-1)
    return logits.argmax(-1).tolist(), (best - second).tolist()


def greedy(llm: LLM, ids: Sequence[int], n: int) -> list[int]:
    """The engine's n greedy tokens, whatever end tokens the model has."""
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    return llm.generate([list(ids)], params, use_tqdm=False)[0].outputs[0].token_ids


def engine_logprobs(llm: LLM, ids: Sequence[int], n: int = 1) -> tuple[list[int], torch.Tensor]:
    """n greedy tokens after ids and what they were chosen from: log-softmax of the logits, [n, vocab] in float64.

    Through the public interface, so that it holds however the engine computes: the first row comes from the prompt,
    the rest from decoding.
    """
    vocab = llm.model_config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=vocab)
    output = llm.generate([list(ids)], params, use_tqdm=False)[0].outputs[0]
    rows = [[row[token_id].logprob for token_id in range(vocab)] for row in output.logprobs]
    return output.token_ids, torch.tensor(rows, dtype=torch.float64)


def assert_same_logits(llm: LLM, model: torch.nn.Module, ids: Sequence[int], n: int = 1, rel: float = 1e-4) -> None:
    """The engine's logits after ids, and after each of its next n - 1 tokens, are those of the reference.

    Compared as log-softmax, which forgets only what softmax does; `rel` is relative to the largest value.
    """
    tokens, ours = engine_logprobs(llm, ids, n)
    theirs = reference_logits(model, [*ids, *tokens[:-1]])[-n:].log_softmax(-1)
    error = (ours - theirs).abs().amax(-1) / theirs.abs().max()
    worst = int(error.argmax())
    assert error[worst] <= rel, f"logits differ by {error[worst]:.1e} of their size at position {len(ids) - 1 + worst}"


def assert_same_greedy(ours: Sequence[int], theirs: Sequence[int], gaps: Sequence[float], bound: float = 1e-4) -> None:
    """Equal tokens, or a first difference where the reference itself wavers: its two best logits are within `bound`.

    After the first difference the two continue different texts, so nothing more is compared.
    """
    assert len(ours) == len(theirs), f"{len(ours)} tokens, the reference has {len(theirs)}"
    for position, (token, expected, gap) in enumerate(zip(ours, theirs, gaps, strict=True)):
        if token != expected:
            message = f"output token {position} is {token}, reference says {expected}; its two best are {gap:.1e} apart"
            print(message)
            assert gap <= bound, message
            return
