"""Rotary embedding: the same angles as transformers for every way of stretching a context that we claim to know.

The old faults: the scaling block is parsed and ignored; "type" is read and "rope_type" is not; YaRN's factor on cos and
sin is left out. All of them write good short texts and fall apart some hundred tokens later.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .. import LLM
from ..rope import RopeConfig, inverse_frequencies, rope_table
from .helpers import assert_same_logits, make_checkpoint, reference_logits, reference_model

HEAD_DIM = 64
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256)
SCALINGS = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    ),
    "yarn": YARN,
    "yarn, attention_factor": YARN | dict(attention_factor=1.25),
    "yarn, mscale": YARN | dict(mscale=1.0, mscale_all_dim=0.5),
    "yarn, mscale alone": YARN | dict(mscale=0.7),
    "yarn, not truncated": YARN | dict(truncate=False),
    "yarn, betas": YARN | dict(beta_fast=16, beta_slow=2),
    "yarn, factor null": dict(rope_type="yarn", factor=None, original_max_position_embeddings=256),
    "yarn, factor 1": YARN | dict(factor=1.0, original_max_position_embeddings=1024),
    "yarn, original missing": dict(rope_type="yarn", factor=2.0),
}
PUBLISHED = {
    "Llama 3.1": SCALINGS["llama3"] | dict(original_max_position_embeddings=8192, rope_theta=500000.0),
    "Qwen2.5 long": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, rope_theta=1e6),
}


def hf(scaling: dict, block: str = "rope_parameters", key: str = "rope_type", theta: float = 10000.0) -> dict:
    """Config with the scaling under an old or a new name of the block and of the type."""
    scaling = {(key if name == "rope_type" else name): value for name, value in scaling.items()}
    base = dict(hidden_size=256, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=1024)
    return base | {"rope_theta": theta, block: scaling}


def reference(config: dict) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(AutoConfig.for_model("llama", **config))


@pytest.mark.parametrize("name", ["llama3", "yarn", "yarn, original missing"])
def test_original_length_beside_the_block_counts(name):
    """Some files have original_max_position_embeddings at the top, and there transformers prefers it."""
    config = hf(SCALINGS[name], "rope_scaling") | dict(original_max_position_embeddings=64)
    inv_freq, _ = inverse_frequencies(RopeConfig.from_hf(config), HEAD_DIM)
    torch.testing.assert_close(inv_freq, reference(config).inv_freq, rtol=1e-6, atol=0)
    without = inverse_frequencies(RopeConfig.from_hf(hf(SCALINGS[name], "rope_scaling")), HEAD_DIM)[0]
    assert not torch.equal(inv_freq, without)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", (SCALINGS | PUBLISHED).values(), ids=SCALINGS | PUBLISHED)
def test_frequencies_are_those_of_transformers(scaling, block, key):
    """In every spelling, to 1e-6 of each frequency, with the factor that multiplies cos and sin."""
    config = hf(scaling, block, key)
    inv_freq, attention_factor = inverse_frequencies(RopeConfig.from_hf(config), HEAD_DIM)
    theirs = reference(config)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)
    if scaling["rope_type"] in ROPE_INIT_FUNCTIONS:  # the functions that models of all families share
        hf_config = AutoConfig.for_model("llama", **config)
        shared, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf_config, torch.device("cpu"))
        torch.testing.assert_close(inv_freq, shared, rtol=1e-6, atol=0)
        assert attention_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_scaling_that_was_added_to_a_new_file_counts(scaling):
    """What model cards advise for long texts, done to a file of transformers 5, which has rope_parameters already."""
    config = hf(scaling, "rope_scaling")
    both = config | dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert RopeConfig.from_hf(both) == RopeConfig.from_hf(config)
    inv_freq, _ = inverse_frequencies(RopeConfig.from_hf(both), HEAD_DIM)
    torch.testing.assert_close(inv_freq, reference(both).inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_table_holds_cos_and_sin_of_each_position(scaling):
    """[positions, 2, head_dim / 2]: what transformers multiplies with, without its second copy of each column."""
    config = hf(scaling)
    table = rope_table(RopeConfig.from_hf(config), HEAD_DIM, 1024)
    cos, sin = reference(config)(torch.zeros(1), torch.arange(1024)[None])
    # An angle of 1,000 radians has an ulp of 6e-5, so that frequencies equal to the last digit still differ here.
    torch.testing.assert_close(table[:, 0], cos[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-4)
    torch.testing.assert_close(table[:, 1], sin[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-4)
    torch.testing.assert_close(table[:8, 0], cos[0, :8, : HEAD_DIM // 2], rtol=0, atol=2e-6)


def test_every_scaling_changes_the_table():
    """Otherwise the comparisons above would pass for an engine that ignores the block."""
    inputs = {name: scaling for name, scaling in SCALINGS.items() if name not in ("default", "yarn, factor 1")}
    tables = [rope_table(RopeConfig.from_hf(hf(scaling)), HEAD_DIM, 600)[599] for scaling in inputs.values()]
    plain = rope_table(RopeConfig(), HEAD_DIM, 600)[599]
    assert all((table - plain).abs().max() > 0.1 for table in tables)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama with heads of 64 whose config is rewritten by each test."""
    return make_checkpoint(tmp_path_factory.mktemp("rope"), "llama", head_dim=HEAD_DIM, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def plain_logits(checkpoint):
    """What an engine without scaling says at the last of 600 positions."""
    return reference_logits(reference_model(checkpoint), IDS)[-1]


IDS = [(i * i + 3 * i) % 128 for i in range(600)]


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_logits_over_600_tokens(scaling, key, checkpoint, plain_logits, tmp_path):
    """Positions 10, 300 and 596 as prompts, then three decoded ones: all of them read one table."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    block = "rope_scaling" if key == "type" else "rope_parameters"
    config |= hf(scaling, block, key)
    config["hidden_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    model = reference_model(folder)
    if scaling["rope_type"] != "default" and scaling.get("factor") != 1.0:
        assert (reference_logits(model, IDS)[-1] - plain_logits).abs().max() > 0.1  # the scaling matters here
    llm = LLM(str(folder), device="cpu")
    assert_same_logits(llm, model, IDS[:11])
    assert_same_logits(llm, model, IDS[:301])
    assert_same_logits(llm, model, IDS[:597], n=4)
