"""Parity: the same logits and the same greedy tokens as transformers, for every shape that the decoder claims to know.

Random weights find what a trained model hides: its biases are small, its attention is flat on short prompts, and its
text stays fluent with one wrong matrix. Tokens are compared under the rule of helpers.assert_same_greedy.
"""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from .. import LLM
from ..attention import BACKENDS
from .helpers import (
    assert_same_greedy,
    assert_same_logits,
    engine_logprobs,
    greedy,
    make_checkpoint,
    reference_choices,
    reference_greedy,
    reference_logits,
    reference_model,
)

VARIANTS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", dict(tie_word_embeddings=True)),
    "llama, attention bias": ("llama", dict(attention_bias=True)),  # o_proj has one too
    "llama, mlp bias": ("llama", dict(mlp_bias=True)),
    "llama, head_dim apart": ("llama", dict(head_dim=24)),
    "llama, one KV head": ("llama", dict(num_key_value_heads=1)),
    "llama, as many KV heads": ("llama", dict(num_key_value_heads=4)),
    "llama, three to one": ("llama", dict(hidden_size=144, num_attention_heads=9, num_key_value_heads=3)),
    "llama, large epsilon": ("llama", dict(rms_norm_eps=0.05)),
    "qwen2": ("qwen2", {}),  # its q, k and v biases are of the size 0.5
    "qwen2, tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", {}),  # head_dim 32, not 64 / 4
    "qwen3, tied": ("qwen3", dict(tie_word_embeddings=True, rope_theta=1e6)),
    "qwen3, attention bias": ("qwen3", dict(attention_bias=True)),
    "qwen3, large epsilon": ("qwen3", dict(rms_norm_eps=0.05)),
}
PROMPTS = [[5], [1, 2, 3], [(i * i) % 128 for i in range(40)]]
LONG_PROMPT = [(i * i + 3 * i) % 128 for i in range(400)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function from the name of a variant to its folder, each written once."""
    folders = {}

    def of(variant: str):
        if variant not in folders:
            family, overrides = VARIANTS[variant]
            folders[variant] = make_checkpoint(tmp_path_factory.mktemp("variant"), family, **overrides)
        return folders[variant]

    return of


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_tokens_in_fp32(variant, checkpoint):
    """After the prompt, and after each of 16 tokens."""
    llm, model = LLM(str(checkpoint(variant)), device="cpu"), reference_model(checkpoint(variant))
    said = []
    for prompt in PROMPTS:
        assert_same_logits(llm, model, prompt, n=16)
        tokens, gaps = reference_greedy(model, prompt, 16)
        assert_same_greedy(greedy(llm, prompt, 16), tokens, gaps)
        said += tokens
    assert len(set(said)) >= 12, f"a reference that repeats itself finds no fault: {said}"


@pytest.fixture(scope="module")
def doubles(checkpoint):
    """(engine, reference) of a variant in float64, each loaded once."""
    pairs = {}

    def of(variant: str):
        if variant not in pairs:
            folder = str(checkpoint(variant))
            pairs[variant] = LLM(folder, device="cpu", dtype="float64"), reference_model(folder, torch.float64)
        return pairs[variant]

    return of


@given(
    variant=st.sampled_from(["llama, three to one", "llama, attention bias", "qwen2, tied", "qwen3"]),
    prompt=st.lists(st.integers(0, 127), min_size=1, max_size=48),
    n=st.integers(1, 12),
)
def test_any_prompt_of_any_length(doubles, variant, prompt, n):
    """In float64, where only the reference's own norms (fp32) round, an off-by-one at some length cannot hide."""
    llm, model = doubles(variant)
    assert_same_logits(llm, model, prompt, n, rel=1e-5)
    assert_same_greedy(greedy(llm, prompt, n), *reference_greedy(model, prompt, n), bound=1e-5)


def assert_16_bit_parity(folder: Path, dtype: str, **options: object) -> None:
    """Against the fp32 truth our 16 bits err no more than transformers' do; tokens differ only where it wavers."""
    llm, ids = LLM(str(folder), dtype=dtype, **options), LONG_PROMPT
    device = llm.resolved.device
    exact, coarse = (reference_model(folder, kind).to(device) for kind in (torch.float32, llm.resolved.dtype))
    tokens, ours = engine_logprobs(llm, ids, 16)
    truth, theirs = (reference_logits(model, [*ids, *tokens[:-1]])[-16:].log_softmax(-1) for model in (exact, coarse))
    our_error, their_error = (ours - truth).pow(2).mean().sqrt(), (theirs - truth).pow(2).mean().sqrt()
    print(f"rms error of log-probabilities: ours {our_error:.4f}, transformers' {their_error:.4f}")
    assert our_error <= 1.5 * their_error
    assert_same_greedy(tokens, *reference_choices(coarse, ids, tokens), bound=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_16_bits_on_the_cpu(variant, dtype, checkpoint):
    """Angles rounded to 16 bits before cos and sin are off by a radian at position 300."""
    assert_16_bit_parity(checkpoint(variant), dtype, device="cpu")


def test_large_activations_in_float16(checkpoint, tmp_path):
    """Real models carry values of some hundreds: their squares overflow float16, and a norm in float16 then gives 0."""
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "large"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 1000
    assert tensors["model.embed_tokens.weight"].pow(2).mean() > torch.finfo(torch.float16).max
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_16_bit_parity(folder, "float16", device="cpu")


REAL_PROMPTS = {"english": "The capital of France is", "code": "def add(a, b):", "chinese": "用一句话介绍北京："}


@pytest.mark.weights
@pytest.mark.parametrize("prompt", REAL_PROMPTS.values(), ids=REAL_PROMPTS)
def test_default_model_says_what_transformers_says(prompt, smollm2, smollm2_reference):
    """64 greedy tokens of real weights; 9 query heads share 3 KV heads, and the head is tied."""
    ids = smollm2.tokenizer.encode(prompt)
    ours = greedy(smollm2, ids, 64)
    theirs, gaps = reference_choices(smollm2_reference, ids, ours)
    assert len(set(theirs)) >= 8, f"a reference that repeats itself finds no fault: {theirs}"
    assert_same_greedy(ours, theirs, gaps, bound=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["llama", "llama, attention bias", "qwen2", "qwen3"])
def test_gpu_in_fp32(variant, checkpoint):
    """On the GPU against transformers on the GPU; matrix products in full fp32 there (TF32 is off by default)."""
    llm, model = LLM(str(checkpoint(variant)), device="cuda", dtype="float32"), reference_model(checkpoint(variant))
    model.to("cuda")
    for prompt in PROMPTS:
        assert_same_logits(llm, model, prompt, n=16)
        tokens, gaps = reference_greedy(model, prompt, 16)
        assert_same_greedy(greedy(llm, prompt, 16), tokens, gaps)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_gpu_in_bfloat16(variant, backend, tmp_path):
    """Every backend by the same rule, with the head_dim of 64 that every build of flash-attn has."""
    if backend != "torch":
        pytest.importorskip(backend, reason=f"the package {backend} is not installed")
    folder = make_checkpoint(tmp_path / "model", variant, hidden_size=256, head_dim=64)
    assert_16_bit_parity(folder, "bfloat16", device="cuda", attention_backend=backend)
