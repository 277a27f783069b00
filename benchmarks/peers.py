"""Peers: other people's engines as rows of a comparison, where they are installed. Nothing here depends on them.

Each is asked through its public offline interface, in a process of its own: token ids in, token ids out. What such an
interface does not tell is left out of the row: when each token was there, tokens forwarded, KV memory. Prefix caching
is off, as in our stages (nano-vllm's is always on, but holds only whole blocks of 256 tokens).
"""

import importlib
import json
import tempfile
from pathlib import Path
from typing import ClassVar

from .common import stages

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Peer:
    """vLLM: `LLM(folder)`, prompts as {"prompt_token_ids": ids}, `outputs[i].outputs[0].token_ids`."""

    backend = "its own"
    options: ClassVar[dict] = {"temperature": 0.0, "detokenize": False}

    def __init__(self, package: str, job: dict):
        first = stages()[0]
        zoo, config = (importlib.import_module(f"{first}.{name}") for name in ("zoo", "config"))
        device = config.resolve_device(job.get("device"))
        files = zoo.locate(job["model"], job.get("load_format") or "auto")
        shape = config.ModelConfig.from_hf(files.config)
        self.dtype = str(config.resolve_dtype(job.get("dtype") or "auto", shape.dtype, device)).removeprefix("torch.")
        self.checkpoint_dtype = str(shape.dtype).removeprefix("torch.")
        self.package = importlib.import_module(package)
        self.tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(files.tokenizer)
        self.llm = self.load(files.weights, files.config)

    def load(self, folder: Path | None, config: dict):
        """folder: None for random weights in the shapes of `config`."""
        common = dict(dtype=self.dtype, enable_prefix_caching=False, seed=0)
        if folder is not None:
            return self.package.LLM(model=str(folder), **common)
        folder = Path(tempfile.mkdtemp(prefix="shape-"))
        config = config | {"architectures": [ARCHITECTURES[config["model_type"]]]}
        (folder / "config.json").write_text(json.dumps(config))
        return self.package.LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True, **common)

    def encode(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def run(self, prompts: list[list[int]], max_tokens: int | list[int]) -> list[dict]:
        """max_tokens: of all outputs, or of each."""
        lengths = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        params = [self.package.SamplingParams(max_tokens=n, ignore_eos=True, **self.options) for n in lengths]
        return [{"token_ids": list(ids), "token_times": []} for ids in self.generate(prompts, params)]

    def generate(self, prompts: list[list[int]], params: list) -> list[list[int]]:
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def reset(self) -> None:
        pass

    def counters(self) -> dict:
        return {}


class NanoVLLM(Peer):
    """nano-vllm: lists of ids in, dicts out. Knows Qwen3 alone, in the checkpoint's type; refuses temperature 0."""

    options: ClassVar[dict] = {"temperature": 1.0}

    def load(self, folder: Path | None, config: dict):
        if folder is None:
            raise ValueError("nano-vllm has no random weights: it needs the model's files")
        if config.get("model_type") != "qwen3":
            raise ValueError(f"nano-vllm runs Qwen3 models only, and this is {config.get('model_type')!r}")
        self.dtype = self.checkpoint_dtype
        return self.package.LLM(str(folder))

    def generate(self, prompts: list[list[int]], params: list) -> list[list[int]]:
        return [output["token_ids"] for output in self.llm.generate(prompts, params, use_tqdm=False)]


def load(package: str, job: dict) -> Peer:
    return (NanoVLLM if package == "nanovllm" else Peer)(package, job)
