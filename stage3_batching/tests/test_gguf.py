"""GGUF files: the same tensors and logits as the folder they were made from, or a refusal that says why.

llama.cpp stores the q and k rows of Llama in another rotary order: read as they are, all else matches and attention is
wrong. Qwen files are not reordered. Small files are written here; the packaged model is spot-checked.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from .. import LLM, zoo
from .helpers import assert_same_greedy, assert_same_logits, greedy, make_checkpoint, reference_greedy, reference_model

IDS = [(i * i + 5) % 120 for i in range(60)]
BOS, EOS = 126, 127
SUFFIXES = (".weight", ".bias")
VARIANTS = {
    "llama": ("llama", dict(rope_theta=500000.0)),
    "llama, tied": ("llama", dict(tie_word_embeddings=True)),
    "llama, head_dim apart": ("llama", dict(head_dim=24)),
    "qwen2": ("qwen2", dict(rope_theta=1e6)),
    "qwen2, tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(rope_theta=1e6)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Converted files go where the test can see them, and are gone afterwards."""
    monkeypatch.setenv("INFERENCE_STAGES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (first halves, second halves) to pairs, as llama.cpp keeps q and k of Llama."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def tokens() -> list[str]:
    """124 bytes as byte-level BPE writes them, two merges, BOS and EOS: 128 in all."""
    return [*(chr(i) if i > 0x20 else chr(256 + i) for i in range(124)), "ab", "abc", "<|endoftext|>", "<|im_end|>"]


def write_metadata(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config["model_type"] == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])
    if config["model_type"] == "qwen3":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens())
    writer.add_token_types([1] * 126 + [3] * 2)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)


def write_gguf(folder: Path, path: Path, quantise: Type | None = None, extra=None) -> Path:
    """The Hugging Face folder as llama.cpp's converter would write it. `extra` may add to the writer."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    write_metadata(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for projection in heads if family == "llama" else ():
            tensor = interleave(tensor, heads[projection]) if projection in name else tensor
        data, kind = tensor.numpy(), None
        if quantise and tensor.dim() == 2:
            data, kind = gguf.quants.quantize(data, quantise), quantise
        writer.add_tensor(names.get_name(name, SUFFIXES), data, raw_dtype=kind)
    if extra:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("extra", "add_bos"),
    [
        (lambda writer: writer.add_add_bos_token(True), True),
        (lambda writer: writer.add_add_bos_token(False), False),
        (lambda writer: writer.add_tokenizer_pre("llama-bpe"), True),
        (lambda writer: None, False),
    ],
    ids=["true", "false", "llama-bpe", "nothing said"],
)
def test_texts_begin_with_bos_where_the_file_says_so(extra, add_bos, tmp_path):
    """Llama 3 needs it; transformers passes over the word of the file. Old files say only what kind they are."""
    folder = make_checkpoint(tmp_path / "hf", "llama")
    path = write_gguf(folder, tmp_path / "model.GGUF", extra=extra)
    tokenizer = LLM(str(path), device="cpu").tokenizer
    assert tokenizer.encode("Hi") == [BOS] * add_bos + [*b"Hi"]
    assert tokenizer.encode("<|endoftext|>Hi") == [BOS, *b"Hi"]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS.values(), ids=VARIANTS)
def test_tensors_and_logits_are_those_of_the_folder(family, overrides, tmp_path):
    """Rotary order (4 query heads, 2 KV heads), rope base, head_dim, tied head and end token all come from the file."""
    folder = make_checkpoint(tmp_path / "hf", family, **overrides)
    path = write_gguf(folder, tmp_path / "model.gguf")
    llm, model = LLM(str(path), device="cpu"), reference_model(folder)
    original, converted = (load_file(f / "model.safetensors") for f in (folder, zoo.convert_gguf(path)))
    assert original.keys() == converted.keys()
    for name, tensor in original.items():
        assert torch.equal(tensor, converted[name]), name
    assert_same_logits(llm, model, IDS, n=4)
    assert_same_greedy(greedy(llm, IDS, 12), *reference_greedy(model, IDS, 12))
    assert llm.eos_token_ids == (EOS,)
    assert llm.tokenizer.encode("Hi abcab") == [*b"Hi ", 125, 124]


def test_quantised_file_is_its_dequantised_tensors(tmp_path):
    """Q8_0: blocks of 32 with a scale each. Rows are quantised alone, so the rotary order has no part in it."""
    folder = make_checkpoint(tmp_path / "hf", "llama")
    path = write_gguf(folder, tmp_path / "model.gguf", quantise=Type.Q8_0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            rough = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), Type.Q8_0), Type.Q8_0)
            tensors[name] = torch.from_numpy(rough)
            assert 0 < (tensors[name] - tensor).abs().max() < 0.05
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(LLM(str(path), device="cpu"), reference_model(folder), IDS, n=4)


def test_a_file_is_converted_once(tmp_path, cache, monkeypatch):
    """And again when its contents change under the same name."""
    first, second = (make_checkpoint(tmp_path / f"hf{i}", "llama", rope_theta=10.0**i) for i in (4, 6))
    path = write_gguf(first, tmp_path / "model.gguf")
    folder = zoo.convert_gguf(path)
    with monkeypatch.context() as patch:
        patch.setattr(zoo, "_convert_gguf", None)  # to convert again would fail
        assert zoo.convert_gguf(path) == folder
    assert zoo.convert_gguf(write_gguf(second, path)) != folder
    assert len(list(cache.iterdir())) == 2


def refused(path: Path, cache: Path) -> str:
    """The message of the ValueError; nothing may stay in the cache."""
    with pytest.raises(ValueError) as error:
        LLM(str(path), device="cpu")
    assert list(cache.iterdir()) == []
    assert path.name in str(error.value)
    return str(error.value)


def test_unsupported_architecture_is_named(tmp_path, cache):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'gpt2' is not supported" in refused(tmp_path / "other.gguf", cache)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)), "rope_freqs.weight"),
        (lambda writer: writer.add_tensor("blk.1.attn_output.bias", np.ones(64, np.float32)), "blk.1.attn_output.bias"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rope scaling 'yarn'"),
    ],
    ids=["llama3 frequencies", "bias", "yarn"],
)
def test_what_the_converter_would_pass_over_is_refused(extra, message, tmp_path, cache):
    """Llama 3.1's frequencies are a tensor, YaRN is metadata: without them long texts go wrong."""
    folder = make_checkpoint(tmp_path / "hf", "llama")
    assert message in refused(write_gguf(folder, tmp_path / "model.gguf", extra=extra), cache)


def test_unsupported_tensor_type_is_named(tmp_path, cache):
    """Q8_1 is a type that only llama.cpp itself uses, between two of its steps."""

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_k_norm.weight", np.zeros((1, 80), np.uint8), raw_dtype=Type.Q8_1)

    folder = make_checkpoint(tmp_path / "hf", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "Q8_1" in refused(write_gguf(folder, tmp_path / "model.gguf", extra=extra), cache)


@pytest.mark.parametrize("name", ["llama.block_count", "llama.embedding_length", "tokenizer.ggml.tokens"])
def test_missing_metadata_is_named(name, tmp_path, cache):
    """A file with the tokenizer alone, or with tensors alone: an AttributeError from inside of the reader."""
    folder = make_checkpoint(tmp_path / "hf", "llama")
    path = write_gguf(folder, tmp_path / "model.gguf", extra=lambda writer: writer.kv_data[0].pop(name))
    assert f"lacks {name}" in refused(path, cache)


def test_missing_tensor_is_named(tmp_path, cache):
    """transformers draws what is missing at random, with a warning."""
    folder = make_checkpoint(tmp_path / "hf", "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "blk.1.ffn_up.weight" in refused(write_gguf(folder, tmp_path / "model.gguf"), cache)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_half_a_file_is_refused(share, tmp_path, cache):
    """A broken download: the errors of the reader speak of dtypes and axes."""
    path = write_gguf(make_checkpoint(tmp_path / "hf", "llama"), tmp_path / "model.gguf")
    contents = path.read_bytes()
    path.write_bytes(contents[: int(share * len(contents))])
    assert "no complete GGUF file" in refused(path, cache)


def test_garbage_is_refused(tmp_path, cache):
    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 64)
    assert "no complete GGUF file" in refused(tmp_path / "model.gguf", cache)


@pytest.fixture
def packaged(monkeypatch):
    """(reader of the packaged file, config and tensors as converted), from the user's own cache."""
    monkeypatch.delenv("INFERENCE_STAGES_CACHE")
    path = zoo._packaged_gguf()
    folder = zoo.convert_gguf(path)
    return (
        gguf.GGUFReader(path),
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )


@pytest.mark.weights
def test_packaged_model_is_what_its_blocks_say(packaged):
    """Q4_1 blocks unpacked by the gguf package, in the rotary order of the file: 9 query heads, 3 KV heads."""
    reader, config, converted = packaged
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    assert {names.get_name(name, SUFFIXES) for name in converted} == stored.keys()
    assert config["tie_word_embeddings"]
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["eos_token_id"] == 2
    for name in ("model.embed_tokens", "model.norm", *(f"model.layers.{i}" for i in (0, 13, 29))):
        for key, tensor in converted.items():
            if key.startswith(name):
                blocks = stored[names.get_name(key, SUFFIXES)]
                wanted = torch.tensor(gguf.quants.dequantize(blocks.data, blocks.tensor_type))
                heads = 9 if "q_proj" in key else 3 if "k_proj" in key else None
                assert torch.equal(interleave(tensor, heads) if heads else tensor, wanted), key
