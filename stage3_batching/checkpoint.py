"""Checkpoint: the weights of a Hugging Face folder -> a model on its device. (A given file: it may be skipped.)

The files are memory-mapped and each tensor is copied straight to where it lives, converted on the way, so that loading
never holds a second copy of the model. Names must match exactly: a tensor that is missing, unexpected or of another
shape is an error with its name, because a model with one wrong matrix still writes fluent nonsense.
"""

import functools
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .attention import attend_torch
from .config import ModelConfig
from .inputs import read_json
from .model import CausalLM, Linear

FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors files call them


def empty_model(config: ModelConfig) -> CausalLM:
    """The model without memory: names and shapes only."""
    with torch.device("meta"):
        return CausalLM(config, attend_torch, max_model_len=1)


def build_model(
    config: ModelConfig, attend: Callable, max_model_len: int, device: torch.device, weights: Path | None, seed: int
) -> CausalLM:
    """A model on `device` in `config.dtype`, filled from the folder `weights`, or at random where that is None.

    Raises ValueError that names every missing, unexpected or misshapen tensor.
    """
    if weights is not None:
        check_names(empty_model(config), weights, config.tie_word_embeddings)
    if device.type == "cuda":  # what a dropped engine has left to torch: the weights would settle in pieces of it
        gc.collect()
        torch.cuda.empty_cache()
    with torch.device(device):
        model = CausalLM(config, attend, max_model_len)
    if weights is None:
        fill_random(model, seed)
    else:
        fill_from(model, weights)
    if device.type == "cpu" and config.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        pack_linears(model)
    return model.eval()


def keeps_nothing_on_error(build: Callable) -> Callable:
    """A decorator. A notebook keeps its last error, which keeps the variables of all functions that it went through:
    weights, of which the next attempt would have to hold a second copy. So these variables are dropped."""

    @functools.wraps(build)
    def wrapped(*args):
        outer = sys.exception()  # one that the caller is dealing with has nothing to do with this
        try:
            return build(*args)
        except BaseException as error:
            errors = [error]
            for one in errors:  # and those behind it, which the loop appends
                traceback.clear_frames(one.__traceback__)
                for behind in (one.__cause__, one.__context__):
                    if behind is not None and all(behind is not known for known in (outer, *errors)):
                        errors.append(behind)
            raise

    return wrapped


class PackedLinear(nn.Module):
    """A Linear for float32 on a CPU, its weight kept in the layout of the library oneDNN: the same sums, faster."""

    def __init__(self, linear: Linear):
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_linears(module: nn.Module) -> None:
    """Replace each Linear below `module` by a PackedLinear, one at a time, so that no second copy is held."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def weight_files(folder: Path) -> list[Path]:
    """The *.safetensors files of a folder, as its index names them. Raises ValueError where there is none."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():  # an index beside it is a left-over
        return [single]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index}: weight_map={weight_map!r:.80}: expected an object, tensor name to file name")
        files = [folder / name for name in dict.fromkeys(weight_map.values())]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        what = f"lacks {', '.join(missing)}" if missing else "has no *.safetensors files"
        raise ValueError(f"{folder} {what}; other weight formats are not read")
    return files


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:  # half a download, the pointer that git-lfs leaves, or a folder
        raise ValueError(f"{file} is no complete safetensors file: {error}") from error


def read_tensors(folder: Path, names: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all files, one at a time; the tensors lie in the memory map until they are copied. names: of
    these alone."""
    for file in weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if not names or name in names:
                    yield name, tensors.get_tensor(name)


def _is_one_matrix(folder: Path, dtype: torch.dtype) -> bool:
    """Whether a head that is stored though it is tied is the embedding indeed, as config.json says."""
    pair = [tensor.to(dtype) for _, tensor in read_tensors(folder, ("lm_head.weight", "model.embed_tokens.weight"))]
    return all(torch.equal(pair[0], tensor) for tensor in pair)


def _read_shapes(folder: Path, wanted: dict, problems: list[str]) -> dict[str, list[int]]:
    """Shape by name of all tensors; one that is there twice, or a wanted one that holds no floats, is a problem."""
    found = {}
    for file in weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                part = tensors.get_slice(name)
                if name in found:
                    problems.append(f"twice: {name}, the second time in {file.name}")
                if name in wanted and part.get_dtype() not in FLOATS:
                    problems.append(f"dtype of {name}: {part.get_dtype()}; quantised weights are not supported")
                found[name] = list(part.get_shape())
    return found


def check_names(model: CausalLM, folder: Path, tied: bool) -> None:
    """Compare names and shapes of the files with the model's; raise one ValueError with all differences."""
    wanted = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    problems: list[str] = []
    found = _read_shapes(folder, wanted, problems)
    optional = {"lm_head.weight"} if tied else set()
    problems += [f"missing: {name} {shape}" for name, shape in wanted.items() if name not in found]
    for name, shape in found.items():
        if name not in wanted and name not in optional and not name.endswith("rotary_emb.inv_freq"):
            problems.append(f"unexpected: {name} {shape}")
        elif name in wanted and shape != wanted[name]:
            problems.append(f"shape of {name}: {shape}, expected {wanted[name]}")
    if tied and "lm_head.weight" in found and not _is_one_matrix(folder, model.lm_head.weight.dtype):
        problems.append("lm_head.weight differs from embed_tokens.weight, but tie_word_embeddings is true; say false")
    if problems:
        raise ValueError(f"the weights in {folder} do not fit its config.json:\n  " + "\n  ".join(problems))


def fill_from(model: CausalLM, folder: Path) -> None:
    """Copy each tensor of the folder to its parameter, converted on the way."""
    parameters = dict(model.named_parameters())
    for name, tensor in read_tensors(folder):
        if name in parameters:
            parameters[name].copy_(tensor)


def fill_random(model: CausalLM, seed: int) -> None:
    """Random weights made on the device: ones for norms, normal with deviation 0.02 for all else."""
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed % 2**64)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0, 0.02, generator=generator)
