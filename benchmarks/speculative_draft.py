"""Draft models without a download: the target itself, and its own first layers as a checkpoint.

Layers that were never trained to be the last ones make a poor model, but one with the right vocabulary, and an honest
pair can be made of any checkpoint.
"""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


def first_layers(weights: Path, tokenizer: Path, count: int, target: Path) -> Path:
    """A Hugging Face folder with the first `count` layers of another; embedding, last norm and head are the same."""
    target.mkdir(parents=True)
    for file in [*weights.iterdir(), *tokenizer.iterdir()]:
        if file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json"):
            shutil.copy(file, target / file.name)
    config = json.loads((weights / "config.json").read_text()) | {"num_hidden_layers": count}
    (target / "config.json").write_text(json.dumps(_cut(config, count)))
    tensors = {}
    for file in sorted(weights.glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            tensors |= {name: source.get_tensor(name) for name in list(source.keys()) if _is_kept(name, count)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _cut(config: dict, count: int) -> dict:
    """Lists with an entry for each layer are cut too."""
    return config | ({"layer_types": config["layer_types"][:count]} if config.get("layer_types") else {})


def _is_kept(name: str, count: int) -> bool:
    parts = name.split(".")
    return "layers" not in parts or int(parts[parts.index("layers") + 1]) < count
