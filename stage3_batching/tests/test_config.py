"""Configuration: every spelling of a config.json is read, and what cannot be done is refused by name, at once."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from .. import LLM, attention
from ..config import EngineConfig, ModelConfig, resolve_device, resolve_dtype, resolve_max_model_len
from ..llm import logger
from ..rope import RopeConfig
from .helpers import assert_same_logits, make_checkpoint, reference_model

PACKAGE = __package__.rpartition(".")[0]
ROOT = Path(__file__).parents[len(__package__.split("."))]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def hf(**overrides: object) -> dict:
    """A config.json of the smallest kind; a value of None removes nothing: it stands there as null."""
    base = dict(model_type="llama", vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    return base | dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32) | overrides


def read(**overrides: object) -> ModelConfig:
    return ModelConfig.from_hf(hf(**overrides))


THETA_SPELLINGS = {
    "top level": dict(rope_theta=1e6),
    "top level, scaling null": dict(rope_theta=1e6, rope_scaling=None),
    "rope_parameters": dict(rope_parameters={"rope_theta": 1e6}),
    "rope_parameters with type": dict(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
    "rope_parameters before top level": dict(rope_theta=500.0, rope_parameters={"rope_theta": 1e6}),
    "rope_scaling with theta": dict(rope_scaling={"rope_theta": 1e6, "type": "default"}),
}


@pytest.mark.parametrize("spelling", THETA_SPELLINGS.values(), ids=THETA_SPELLINGS)
def test_theta_is_found_wherever_it_is_written(spelling, tmp_path):
    """rope_theta moved into rope_parameters with transformers 5; code that looked in one place quietly used 10000."""
    (tmp_path / "config.json").write_text(json.dumps(hf(**spelling)))
    assert read(**spelling).rope == RopeConfig(rope_theta=1e6)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1e6


def test_theta_and_dtype_without_any_key():
    """Documented defaults, those of transformers."""
    assert read().rope == read(rope_theta=None, rope_scaling=None, rope_parameters=None).rope == RopeConfig()
    assert RopeConfig().rope_theta == 10000.0
    assert read().dtype == read(dtype=None, torch_dtype=None).dtype == torch.float32


@pytest.mark.parametrize(
    "spelling", [dict(dtype="bfloat16"), dict(torch_dtype="bfloat16"), dict(dtype="torch.bfloat16")]
)
def test_dtype_under_its_old_and_its_new_name(spelling):
    """torch_dtype became dtype; a getattr default turned bf16 checkpoints into fp32, twice the memory."""
    assert read(**spelling).dtype == torch.bfloat16


def test_dtype_that_is_not_known():
    with pytest.raises(ValueError, match=r"float8_e4m3fn.*supported: .*bfloat16"):
        read(dtype="float8_e4m3fn")


@pytest.fixture(scope="module")
def theta_checkpoint(tmp_path_factory):
    """A checkpoint with theta 1,000,000, in bfloat16 files."""
    return make_checkpoint(tmp_path_factory.mktemp("theta"), "llama", rope_theta=1e6, dtype="bfloat16")


@pytest.mark.parametrize("spelling", THETA_SPELLINGS.values(), ids=THETA_SPELLINGS)
def test_every_spelling_gives_the_same_logits(spelling, theta_checkpoint, tmp_path):
    """With the wrong theta the first positions look right and position 200 does not."""
    folder = Path(shutil.copytree(theta_checkpoint, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    (folder / "config.json").write_text(json.dumps(config | spelling))
    llm = LLM(str(folder), device="cpu")
    reference = reference_model(theta_checkpoint)
    for position in (0, 3, 200):
        assert_same_logits(llm, reference, [(7 * i) % 128 for i in range(position + 1)])


@pytest.mark.parametrize(("given", "wanted"), [({"head_dim": 32}, 32), ({}, 16), ({"head_dim": None}, 16)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_head_dim_given_missing_or_null(family, given, wanted):
    """Qwen3 sets head_dim apart; hidden_size / heads gives wrong shapes or, worse, a wrong softmax scale."""
    assert read(model_type=family, **given).head_dim == wanted


def test_key_value_heads_default_to_all_heads():
    assert read(num_key_value_heads=None).num_key_value_heads == 4


def test_biases_and_norms_of_the_families():
    """Qwen2 has q, k and v biases though no key says so; dropped in silence, the text stays fluent and wrong."""
    flags = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")

    def of(**overrides: object) -> list[str]:
        config = read(**overrides)
        return [flag for flag in flags if getattr(config, flag)]

    assert of(model_type="llama") == []
    assert of(model_type="llama", attention_bias=True) == ["qkv_bias", "o_bias"]
    assert of(model_type="llama", mlp_bias=True) == ["mlp_bias"]
    assert of(model_type="qwen2") == of(model_type="qwen2", attention_bias=True) == ["qkv_bias"]
    assert of(model_type="qwen3") == ["qk_norm"]
    assert of(model_type="qwen3", attention_bias=True) == ["qkv_bias", "o_bias", "qk_norm"]


def test_end_tokens_one_or_many_without_duplicates():
    assert read().eos_token_ids == read(eos_token_id=None).eos_token_ids == ()
    assert read(eos_token_id=0).eos_token_ids == (0,)
    assert read(eos_token_id=[2, 1, 2]).eos_token_ids == (2, 1)


REFUSED = {
    "family": (dict(model_type="gpt2"), "'gpt2'.*llama, qwen2, qwen3"),
    "no family": (dict(model_type=None), "None.*llama, qwen2, qwen3"),
    "activation": (dict(hidden_act="gelu_new"), "hidden_act 'gelu_new'.*silu"),
    "sliding window": (dict(model_type="qwen2", use_sliding_window=True, sliding_window=16), "use_sliding_window"),
    "sliding layers": (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    "sliding llama": (dict(model_type="llama", sliding_window=16), "sliding window"),
    "both ways": (dict(is_causal=False), "is_causal False.*True"),
    "quantised": (dict(quantization_config={"quant_method": "awq", "bits": 4}), "awq"),
    "uneven groups": (dict(num_key_value_heads=3), "num_attention_heads=4.*num_key_value_heads=3"),
    "odd head_dim": (dict(head_dim=15), "head_dim=15.*even"),
    "rope dynamic": (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type 'dynamic'.*yarn"),
    "rope longrope": (dict(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "rope_type 'longrope'.*yarn"),
    "rope partial": (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "rope linear without factor": (dict(rope_scaling={"type": "linear"}), "'linear' needs factor"),
    "rope factor 0": (dict(rope_scaling={"type": "linear", "factor": 0}), "factor=0 .*above 0"),
    "rope theta 0": (dict(rope_theta=0), "rope_theta=0 .*above 0"),
    "rope llama3 without a middle": (
        dict(rope_scaling=dict(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=4)),
        "high_freq_factor=4 .*above low_freq_factor=4",
    ),
    "rope llama3 without factors": (
        dict(rope_scaling={"rope_type": "llama3", "factor": 8}),
        "needs low_freq_factor, high",
    ),
    "rope by layer": (dict(rope_parameters={"full_attention": {"rope_theta": 1e6}}), "of their own for full_attention"),
    "rope in two places": (
        dict(rope_scaling={"type": "linear", "factor": 2}, rope_parameters={"rope_theta": 1e6}),
        "rope_theta=1000000.0 in rope_parameters.* 10000.0 without it.*take rope_scaling out",
    ),
    "missing shapes": (dict(hidden_size=None, num_hidden_layers=None), "lacks hidden_size, num_hidden_layers"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_decoder_cannot_do_is_refused_by_name(overrides, message):
    """A key that is read past is a model that writes nonsense, fluently."""
    with pytest.raises(ValueError, match=message):
        read(**overrides)


def test_sliding_window_that_is_off_is_no_obstacle():
    """Published Qwen2 files carry a window's size and say that it is not used."""
    off = dict(use_sliding_window=False, sliding_window=16, layer_types=["full_attention"] * 2)
    assert read(model_type="qwen2", **off).hidden_size == 64
    assert read(partial_rotary_factor=None).hidden_size == 64


def test_longer_than_the_positions_is_refused_with_both_numbers():
    """Past the rotary table the index is out of bounds on a CPU, and anything at all on a GPU."""
    with pytest.raises(ValueError, match=r"64.*32"):
        resolve_max_model_len(64, read())
    with pytest.raises(ValueError, match=r"4096.*2048"):
        LLM("tiny", device="cpu", max_model_len=4096)
    assert resolve_max_model_len(32, read()) == resolve_max_model_len(None, read()) == 32


STRETCHED = {
    "linear": dict(rope_scaling={"type": "linear", "factor": 2.0}),
    "yarn": dict(rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}),
    "yarn without original": dict(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}),
}


@pytest.mark.parametrize("rope", STRETCHED.values(), ids=STRETCHED)
def test_rope_scaling_makes_room(rope):
    """32 positions stretched by 2 hold 64 tokens, and not one more."""
    assert resolve_max_model_len(64, read(**rope)) == resolve_max_model_len(None, read(**rope)) == 64
    with pytest.raises(ValueError, match=r"65.*64"):
        resolve_max_model_len(65, read(**rope))


def test_scaling_that_max_position_embeddings_already_counts():
    """Llama 3.1 writes its long context into max_position_embeddings; multiplied again it would be 8 times too long."""
    llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    assert read(rope_scaling=llama3 | dict(original_max_position_embeddings=4)).max_model_len == 32
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
    assert read(rope_scaling=yarn).max_model_len == 32


@pytest.mark.parametrize(
    ("option", "hint"),
    [("max_modellen", "max_model_len"), ("load_fromat", "load_format"), ("attn_backend", "attention_backend")],
)
def test_unknown_option_gets_a_suggestion(option, hint):
    """Engines that swallow **kwargs run on with the default, and the user never learns of the slip."""
    with pytest.raises(ValueError, match=f"{option}.*did you mean '{hint}'"):
        LLM("tiny", **{option: 64})


def test_unknown_option_that_resembles_nothing_lists_what_there_is():
    with pytest.raises(ValueError, match=r"'zzz'.*Known: model, device, dtype, .*attention_backend"):
        LLM("tiny", zzz=1)


BAD_OPTIONS = [
    *(("dtype", value) for value in ("float31", "fp16", None, torch.float16)),
    *(("load_format", value) for value in ("fast", None)),
    *(("attention_backend", value) for value in ("sdpa", "", 1)),
    *(("max_model_len", value) for value in (0, 1, -5, "7", 2.5, True)),
    *(("seed", value) for value in ("a", 1.5, True)),
    *(("device", value) for value in ("tpu", "", "cuda:7", 0)),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS)
def test_bad_value_is_named_before_anything_is_loaded(option, value):
    """The model does not exist, and yet the option is what is complained about."""
    with pytest.raises(ValueError) as error:
        LLM("/no/such/model", **{option: value})
    assert f"{option}={value!r}" in str(error.value)


@pytest.mark.parametrize("model", ["", None, 3])
def test_model_must_be_a_name(model):
    with pytest.raises(ValueError, match="model="):
        LLM(model)


@pytest.mark.parametrize("make", [lambda: EngineConfig("tiny"), read, RopeConfig])
def test_configs_are_frozen(make):
    """A runner that writes back into the config makes the second engine differ from the first."""
    config = make()
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)


def test_device_is_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(None) == resolve_device("cpu") == CPU
    with pytest.raises(ValueError, match=r"device='cuda'.*no GPU"):
        LLM("tiny", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(None) == resolve_device("cuda") == CUDA
    assert resolve_device("cpu") == CPU


@pytest.mark.parametrize("checkpoint", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_on_a_cpu(checkpoint):
    """16 bits on a CPU are slower and coarser; auto takes fp32, and what is asked for is what is taken."""
    assert resolve_dtype("auto", checkpoint, CPU) == torch.float32
    assert resolve_dtype("float64", checkpoint, CPU) == torch.float64
    assert resolve_dtype("bfloat16", checkpoint, CPU) == torch.bfloat16


@pytest.mark.parametrize(
    ("checkpoint", "new_gpu", "old_gpu"),
    [
        (torch.float32, torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.float16),
        (torch.float16, torch.float16, torch.float16),
    ],
)
def test_dtype_on_a_gpu(checkpoint, new_gpu, old_gpu, monkeypatch):
    """A GTX 1650 has no bfloat16; engines that assume it die there with an error about a kernel."""
    for has_bfloat16, wanted in ((True, new_gpu), (False, old_gpu)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bfloat16: has)
        assert resolve_dtype("auto", checkpoint, CUDA) == wanted
    assert resolve_dtype("float32", checkpoint, CUDA) == torch.float32


def test_flash_attn_on_a_cpu_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"flash_attn.*needs a GPU.*'torch'"):
        LLM("tiny", device="cpu", attention_backend="flash_attn")


BLOCK_SIZE = ()  # what the kernels need to know beside
OBSTACLES = {
    "package": (dict(package=None), "not installed"),
    "old GPU": (dict(capability=(7, 5)), "capability 8.0"),
    "dtype": (dict(dtype=torch.float32), "not float32"),
    "large head": (dict(head_dim=264), "not 264"),
    "odd head": (dict(head_dim=20), "not 20"),
}


@pytest.mark.parametrize(("machine", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_flash_attn_is_left_aside_for_a_reason(machine, reason, monkeypatch):
    """Where one thing is in the way, auto takes torch and says why; to insist is an error with that reason."""
    machine = dict(package=object(), capability=(9, 0), dtype=torch.bfloat16, head_dim=128) | machine
    monkeypatch.setattr(attention, "package_obstacle", lambda *_: None if machine["package"] else "not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine["capability"])
    arguments = CUDA, machine["dtype"], machine["head_dim"]
    backend, why = attention.choose_backend(None, *arguments)
    assert backend == "torch"
    assert reason in why
    with pytest.raises(ValueError, match=re.escape(why)):
        attention.choose_backend("flash_attn", *arguments)


def test_flash_attn_is_taken_where_nothing_is_in_the_way(monkeypatch):
    monkeypatch.setattr(attention, "package_obstacle", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert attention.choose_backend(None, CUDA, torch.float16, 64)[0] == "flash_attn"
    assert attention.choose_backend("torch", CUDA, torch.float16, 64) == ("torch", "asked for")


def test_first_log_line_says_what_was_chosen(caplog):
    """Which device, dtype and backend ran is the first question about any result."""
    logger.addHandler(caplog.handler)
    try:
        LLM("tiny", device="cpu", dtype="float64", max_model_len=77)
    finally:
        logger.removeHandler(caplog.handler)
    first = caplog.records[0].getMessage()
    for word in (PACKAGE, "tiny", "cpu", "float64", "attention torch", "flash_attn needs a GPU", "77"):
        assert word in first


BROKEN = {
    "undefined symbol": (
        "raise ImportError('undefined symbol: _ZN3c10')",
        "cannot be imported .ImportError: undefined",
    ),
    "half removed": ("import flash_attn_2_cuda_that_is_gone", "cannot be imported .ModuleNotFoundError: .*gone"),
    "no runtime": ("raise OSError('libcudart.so.11.0')", "cannot be imported .OSError: libcudart"),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_package_that_is_there_but_broken(source, reason, monkeypatch, tmp_path):
    """Built for another torch, flash-attn was chosen because it was found, and failed in the first step."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=reason):
        attention.choose_backend("flash_attn", CUDA, torch.bfloat16, 128, *BLOCK_SIZE)
    assert attention.choose_backend(None, CUDA, torch.bfloat16, 128, *BLOCK_SIZE)[0] != "flash_attn"


WITHOUT_EXTRAS = """
import sys
for name in ("triton", "flash_attn", "flash_attn_interface", "xxhash", "numba", "matplotlib"):
    sys.modules[name] = None  # an import of it now fails
from {package} import LLM, SamplingParams
llm = LLM("tiny", device="cpu")
print(llm.generate("Hi", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))[0].outputs[0].token_ids)
"""


def test_runs_without_optional_packages():
    """Where Triton and flash-attn cannot be installed (Windows, old GPUs, no GPU) import and demo must work."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS.format(package=PACKAGE)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)) == 3
