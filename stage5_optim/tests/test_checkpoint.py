"""Weights: every file layout is read, every tensor that does not fit is named, and loading costs one model's memory."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from .. import LLM, zoo
from ..checkpoint import empty_model
from ..config import ModelConfig
from ..model_runner import ModelRunner
from .helpers import assert_same_logits, greedy, make_checkpoint, reference_model

PACKAGE = __package__.rpartition(".")[0]
ROOT = Path(__file__).parents[len(__package__.split("."))]
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint to spoil: untied Llama, one file."""
    return make_checkpoint(tmp_path / "llama", "llama")


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a one-file checkpoint: `change` gets the dict of them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path, index: bool) -> list[str]:
    """Spread the one file over three, with or without the index that says which tensor is where."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    for i, name in enumerate(names):
        save_file({key: tensors[key] for key in sorted(tensors)[i::3]}, folder / name)
    if index:
        weight_map = {key: names[i % 3] for i, key in enumerate(sorted(tensors))}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def load(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), device="cpu", **options)


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read_like_one_file(folder, index):
    """A loader that takes the first shard for all of it leaves the rest uninitialised."""
    tokens = greedy(load(folder), IDS, 8)
    shard(folder, index)
    assert greedy(load(folder), IDS, 8) == tokens


def test_one_whole_file_comes_before_an_index(folder):
    """An index was left over from before the shards were joined; transformers does not look at it either."""
    tokens = greedy(load(folder), IDS, 8)
    weight_map = {"lm_head.weight": "model-00001-of-00012.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert greedy(load(folder), IDS, 8) == tokens


def test_only_the_files_of_the_index_are_read(folder):
    """Published folders hold the weights a second time, in another naming (consolidated.safetensors)."""
    tokens = greedy(load(folder), IDS, 8)
    shard(folder, index=True)
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, folder / "consolidated.safetensors")
    assert greedy(load(folder), IDS, 8) == tokens


@pytest.mark.parametrize("in_file", [True, False])
def test_tied_head_with_and_without_its_own_copy(tmp_path, in_file):
    """Tied means that the embedding is the head; a copy of it in the file changes nothing."""
    folder = make_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    model = reference_model(folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    if in_file:
        rewrite(
            folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
        )
    assert_same_logits(load(folder), model, IDS, n=4)


def test_tied_head_that_differs(tmp_path):
    """Some would take the one, some the other, and both write fluent text: transformers 4 and 5 did."""
    folder = make_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(128, 64)}))
    with pytest.raises(ValueError, match=r"differs from embed_tokens\.weight, but tie_word_embeddings is true"):
        load(folder)


def test_old_buffers_are_passed_over(folder):
    """Checkpoints of 2023 carry rotary_emb.inv_freq, which follows from the config."""
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert len(greedy(load(folder), IDS, 2)) == 2


def test_every_tensor_that_does_not_fit_is_named_at_once(folder):
    """One wrong matrix still gives fluent text; a list of all differences tells a renamed file from a wrong config."""

    def spoil(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
        tensors["model.norm.weight"] = torch.ones(65)

    rewrite(folder, spoil)
    with pytest.raises(ValueError) as error:
        load(folder)
    lines = str(error.value).splitlines()
    assert sorted(line.strip() for line in lines[1:]) == [
        "missing: lm_head.weight [128, 64]",
        "missing: model.layers.1.mlp.up_proj.weight [96, 64]",
        "shape of model.norm.weight: [65], expected [64]",
        "unexpected: model.layers.0.self_attn.q_proj.bias [64]",
    ]


def test_missing_bias_is_no_zero_bias(tmp_path):
    """Qwen2 without its biases: zeros, or what lay in memory, in most loaders."""
    folder = make_checkpoint(tmp_path / "qwen2", "qwen2")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.bias \[32\]"):
        load(folder)


def test_wrong_head_dim_is_a_matter_of_shapes(tmp_path):
    """Qwen3 with head_dim struck from its config: 64 / 4 = 16 does not fit q_proj, and that is said."""
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"shape of model\.layers\.0\.self_attn\.q_proj\.weight: \[128, 64\], expected"
    ):
        load(folder)


def test_missing_shard_is_named(folder):
    names = shard(folder, index=True)
    (folder / names[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks {names[1]}"):
        load(folder)


@pytest.mark.parametrize("left", [100, 2000])
def test_half_a_file_is_named(folder, left):
    """A broken download, or git-lfs's pointer in place of the weights."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"model\.safetensors is no complete safetensors file"):
        load(folder)


DAMAGED = {
    "empty": "",
    "half": '{"model_type": "lla',
    "a list": "[]",
    "null": "null",
    "git-lfs": "version https://git-l",
    "too deep": "[" * 100_000,
}
JSON_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
JSON_FILES += ["model.safetensors.index.json"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint to copy."""
    return make_checkpoint(tmp_path_factory.mktemp("whole") / "llama", "llama")


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_damaged_json_is_named(whole, tmp_path, name, text):
    """ "Expecting value: line 1 column 1 (char 0)": of which of the six files?"""
    folder = shutil.copytree(whole, tmp_path / "copy")
    if "index" in name:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(folder / name)) + " (is no complete JSON file|holds)"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"lm_head.weight": 3}])
def test_index_without_file_names(whole, tmp_path, weight_map):
    folder = shutil.copytree(whole, tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json: weight_map=.*expected an object"):
        load(folder)


BAD_VALUES = [
    ("config.json", "rms_norm_eps", None),
    ("config.json", "rms_norm_eps", "1e-6"),
    ("config.json", "rms_norm_eps", float("nan")),
    ("config.json", "hidden_size", "64"),
    ("config.json", "num_hidden_layers", 2.0),
    ("config.json", "head_dim", -16),
    ("config.json", "num_key_value_heads", True),
    ("config.json", "rope_theta", "1e4"),
    ("config.json", "rope_scaling", "linear"),
    ("config.json", "quantization_config", "awq"),
    ("config.json", "tie_word_embeddings", "false"),
    ("config.json", "eos_token_id", "2"),
    ("config.json", "eos_token_id", [1, None]),
    ("generation_config.json", "eos_token_id", "</s>"),
    ("generation_config.json", "eos_token_id", ["2"]),
    ("generation_config.json", "eos_token_id", 2.0),
]


@pytest.mark.parametrize(("name", "key", "value"), BAD_VALUES)
def test_config_value_of_the_wrong_type_is_named(whole, tmp_path, name, key, value):
    """A TypeError from the middle of the first step, or "false" taken for true."""
    folder = shutil.copytree(whole, tmp_path / "copy")
    config = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=re.escape(f"{folder / name}: {key}={value!r}: expected")):
        load(folder)


def test_rope_value_of_the_wrong_type_is_named(whole, tmp_path):
    """One level down, where the factors are."""
    folder = shutil.copytree(whole, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": "2"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: rope_scaling: factor='2': expected a number"):
        load(folder)


def test_folder_without_safetensors(folder):
    """pytorch_model.bin is a pickle, which can run code; it is not read."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        load(folder)


def test_weights_that_are_a_folder(folder):
    """Half unpacked: "No such device", and not of which file."""
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is no complete safetensors file"):
        load(folder)


def test_folder_that_is_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(tmp_path)


TEXT = "hello world, 你好\n  x"


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokenizer_json_says_it_all(tmp_path, family, name):
    """The class that config files name built another tokenizer from the same vocabulary, and all spaces were lost."""
    folder = make_checkpoint(tmp_path / "model", family, vocab_size=259)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(tokenizer_class=name)))
    tokenizer = load(folder).tokenizer
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(TEXT.encode()) == TEXT


def test_no_code_of_the_folder_is_run(folder):
    """Whoever gives a folder does not say that what is in it may run; a question on the terminal waits for 15 s."""
    file = folder / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": ["tok.Mine", None]}
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(auto_map=auto_map, tokenizer_class="Mine")))
    (folder / "tok.py").write_text("raise SystemExit('code of the folder ran')\n")
    script = f"from {PACKAGE} import LLM; LLM({str(folder)!r}, device='cpu')"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, input="y\n", capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "custom code" not in run.stdout + run.stderr


def test_half_a_tokenizer(folder):
    """Its config without its vocabulary made a tokenizer that knows no word."""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokenizer files"):
        load(folder)


def test_folder_without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="no tokenizer files"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tinny", "Did you mean 'tiny'"),
        ("SmolLM2-135", "Did you mean 'smollm2-135m'"),
        ("qwen3_8b", "Did you mean 'qwen3-8b'"),
        ("/no/such/folder", "Names: smollm2-135m, tiny, "),
        ("no-such-file.gguf", "no such folder, .gguf file or name"),
    ],
)
def test_name_that_leads_nowhere_says_what_would(name, hint):
    with pytest.raises(ValueError) as error:
        LLM(name)
    assert repr(name) in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "Qwen/Qwen3-0.6B", "nobody/nothing"])
def test_hub_id_without_the_hub(name, monkeypatch):
    """Offline, the client's own error speaks of symlinks and revisions; ours says what works without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/no/such/cache")
    monkeypatch.setattr("huggingface_hub._snapshot_download.HF_HUB_CACHE", "/no/such/cache", raising=False)
    with pytest.raises(ValueError, match=f"model='{name}'.*smollm2-135m, tiny, or load_format='dummy'"):
        LLM(name)


PUBLISHED = {
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 596_049_920),
    "qwen3-4b": ("Qwen/Qwen3-4B", 4_022_468_096),
    "qwen3-8b": ("Qwen/Qwen3-8B", 8_190_735_360),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name):
    """Parameter counts as published, and each tensor as transformers has it; no memory is taken (the meta device)."""
    hub_id, count = PUBLISHED[name]
    files = zoo.locate(name, "dummy")
    assert files == zoo.locate(hub_id, "dummy")
    assert files.weights is None
    ours = {key: value.shape for key, value in empty_model(ModelConfig.from_hf(files.config)).named_parameters()}
    assert sum(shape.numel() for shape in ours.values()) == count
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**files.config))
    assert ours == {key: value.shape for key, value in theirs.named_parameters()}


def test_dummy_needs_only_a_config(tmp_path):
    """Weights at random: the same for one seed, others for another."""
    config = dict(model_type="llama", vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    config |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, again, other = (greedy(load(tmp_path, load_format="dummy", seed=seed), IDS, 8) for seed in (1, 1, 2))
    assert first == again != other
    with pytest.raises(ValueError, match="no tokenizer files"):
        load(tmp_path)


def test_end_tokens_are_those_of_all_three_files(tmp_path):
    """Chat models end with another token than config.json names; whoever reads one file runs on."""
    folder = make_checkpoint(tmp_path / "eos", "llama", vocab_size=259, eos_token_id=1)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [1, 2, 2]}))
    assert load(folder).eos_token_ids == (1, 2, 258)  # 258: the tokenizer's
    generation.unlink()
    assert load(folder).eos_token_ids == (1, 258)


def test_end_token_outside_the_vocabulary_is_no_end_token(folder):
    """The tokenizer's <|im_end|> is 258, the model has 128 logits: to forbid it for min_tokens was an IndexError."""
    from .. import SamplingParams

    llm = load(folder)
    assert llm.eos_token_ids == ()
    (output,) = llm.generate([IDS], SamplingParams(min_tokens=3, max_tokens=4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


MEASURE = """
import threading
from {package} import LLM

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

LLM("tiny", device="cpu")  # imports and the tokenizer's memory are not the loader's
before, done, peak = anonymous(), threading.Event(), [0]

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
llm = LLM({folder!r}, device="cpu", dtype="float32", max_model_len=16)
done.set()
watcher.join()
held = sum(p.numel() * p.element_size() for p in llm.model_runner.model.parameters())
print(max(peak[0], anonymous()) - before, held)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from Linux's /proc")
def test_loading_holds_no_second_copy(tmp_path):
    """A dict of all tensors beside the model costs half as much again in bf16, twice in fp32, and dies on large models.

    Anonymous memory is counted: pages of the mapped files are the system's, which takes them back when it needs them.
    """
    shapes = dict(vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5)
    config = dict(model_type="llama", num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64) | shapes
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    zoo._save_byte_tokenizer(tmp_path)
    shapes = {key: value.shape for key, value in empty_model(ModelConfig.from_hf(config)).named_parameters()}
    for i in range(4):
        shard = {key: torch.full(shapes[key], 0.01, dtype=torch.bfloat16) for key in sorted(shapes)[i::4]}
        save_file(shard, tmp_path / f"model-{i}.safetensors")
    script = MEASURE.format(package=PACKAGE, folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    peak, held = map(int, run.stdout.split())
    assert held > 400e6
    assert 0.9 * held < peak < 1.3 * held, f"{peak / 1e6:.0f} MB at the peak for {held / 1e6:.0f} MB of weights"


@pytest.mark.parametrize("options", [{}, {"load_format": "dummy", "seed": 3}, {"dtype": "bfloat16"}])
def test_torch_is_left_as_it_was(options):
    """torch.set_default_dtype or manual_seed in a constructor changes the user's other models, and their luck."""
    torch.manual_seed(987654321)
    random.seed(987654321)
    torch.set_default_dtype(torch.float64)
    try:
        torch_state, python_state, gradients = torch.get_rng_state(), random.getstate(), torch.is_grad_enabled()
        greedy(load("tiny", **options), IDS, 2)
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device() == torch.device("cpu")
        assert torch.is_grad_enabled() == gradients
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert random.getstate() == python_state
    finally:
        torch.set_default_dtype(torch.float32)


def test_tiny_is_the_same_model_everywhere(tmp_path, monkeypatch):
    """Two machines, two caches, one model: the lessons quote its tokens. The user's generator has no say in it."""
    contents = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        monkeypatch.setenv("INFERENCE_STAGES_CACHE", str(tmp_path / str(seed)))
        folder = zoo.tiny_folder()
        assert folder.parent == tmp_path / str(seed)
        contents.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert contents[0] == contents[1]
    assert len(set(greedy(load("tiny"), IDS, 16))) >= 6


def test_tiny_does_not_depend_on_the_defaults_of_torch(tmp_path, monkeypatch):
    """Made under the user's float64 or on another device, other weights lay in the cache from then on, for everyone."""
    expected = (zoo.tiny_folder() / "model.safetensors").read_bytes()
    monkeypatch.setenv("INFERENCE_STAGES_CACHE", str(tmp_path))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            folder = zoo.tiny_folder()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (folder / "model.safetensors").read_bytes() == expected


def test_the_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("INFERENCE_STAGES_CACHE", str(tmp_path))
    folder = zoo.tiny_folder()
    monkeypatch.setattr(zoo, "_make_tiny", None)  # to build again would fail
    assert zoo.tiny_folder() == folder


def test_cache_in_the_home_folder(tmp_path, monkeypatch):
    """Only a shell expands "~": from Docker or a notebook a folder of that name appeared where the program ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))  # Windows
    monkeypatch.setenv("INFERENCE_STAGES_CACHE", "~/x")
    assert zoo.cache_folder() == tmp_path / "home" / "x"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    """Twenty lines from the depths of pathlib did not say which setting was wrong."""
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "below", "~no-such-user-here/x"):
        monkeypatch.setenv("INFERENCE_STAGES_CACHE", str(bad))
        with pytest.raises(ValueError, match=f"{re.escape(str(bad))} cannot be made.*INFERENCE_STAGES_CACHE"):
            LLM("tiny")


def test_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """A read-only home is common on clusters."""

    def mkdtemp(**options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("INFERENCE_STAGES_CACHE", str(tmp_path))
    monkeypatch.setattr(zoo.tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))} cannot be written.*INFERENCE_STAGES_CACHE"):
        LLM("tiny")


def test_failed_build_leaves_nothing_behind(tmp_path, monkeypatch):
    """Half a folder in the cache would be taken for a whole one ever after."""
    monkeypatch.setenv("INFERENCE_STAGES_CACHE", str(tmp_path))

    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        zoo._built_once("model", build)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_are_refused(folder, dtype):
    """A quantised matrix whose scales are elsewhere was read as plain numbers."""
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"dtype of {name}: .*quantised weights are not supported"):
        load(folder)


def test_a_tensor_that_is_there_twice_is_named(folder):
    """A left-over shard of another download: the last file won."""
    names = shard(folder, index=False)
    shutil.copy(folder / names[0], folder / "model-00004-of-00003.safetensors")
    with pytest.raises(ValueError, match=r"twice: .*the second time in model-00004-of-00003\.safetensors"):
        load(folder)


def test_a_path_is_as_good_as_text(folder):
    assert isinstance(folder, Path)
    assert greedy(LLM(folder, device="cpu"), IDS, 8) == greedy(load(folder), IDS, 8)


@pytest.mark.parametrize("how", ["alone", "from itself", "while another passes", "without the other"])
def test_a_start_that_fails_keeps_no_weights(how, monkeypatch):
    """A notebook keeps its last error, and with it the variables of all functions that it went through: the weights
    stayed, and the next attempt, with the smaller max_model_len that the message asks for, had no room for its own."""
    held = []

    def run_out(model):
        held.append(weakref.ref(model))
        raise ValueError("no room")

    def fail(self, model, *_, **__):
        try:
            run_out(model)
        except ValueError as error:
            if how == "from itself":
                raise error from error
            if how == "while another passes":
                raise ValueError("no room") from None
            if how == "without the other":
                raise ValueError("no room")  # noqa: B904 - as a `with` whose end fails
            raise

    monkeypatch.setattr(ModelRunner, "__init__", fail)
    mine = ["kept"]
    try:
        raise KeyError(mine)
    except KeyError:
        with pytest.raises(ValueError, match="no room") as error:
            LLM("tiny", device="cpu")
    assert error.value.__traceback__.tb_next is not None
    assert held[0]() is None


def test_the_faster_builder_wins(tmp_path, monkeypatch):
    """While one builds, another finishes the same folder: the slower one takes it, and tidies up."""
    monkeypatch.setenv("INFERENCE_STAGES_CACHE", str(tmp_path))

    def write(text: str):
        return lambda folder: (folder / "who").write_text(text)

    def slow(folder: Path) -> None:
        write("slow")(folder)
        zoo._built_once("model", write("fast"))

    assert (zoo._built_once("model", slow) / "who").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


RACE = """
import sys, time
from pathlib import Path
from {package} import LLM, SamplingParams
here = Path({here!r})
(here / f"ready-{{sys.argv[1]}}").touch()
while len(list(here.glob("ready-*"))) < 2:
    time.sleep(0.001)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
print(LLM("tiny", device="cpu").generate("Hi", params, use_tqdm=False)[0].outputs[0].token_ids)
"""


def test_two_processes_fill_an_empty_cache_at_once(tmp_path):
    """Two notebooks started together: one read the half-written file of the other."""
    script = RACE.format(package=PACKAGE, here=str(tmp_path))
    env = os.environ | {"INFERENCE_STAGES_CACHE": str(tmp_path / "cache")}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both = [subprocess.Popen([sys.executable, "-c", script, str(i)], cwd=ROOT, env=env, **pipes) for i in range(2)]
    (first, first_error), (second, second_error) = (process.communicate(timeout=120) for process in both)
    assert [process.returncode for process in both] == [0, 0], first_error + second_error
    assert first == second != ""
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [zoo.tiny_folder().name]
