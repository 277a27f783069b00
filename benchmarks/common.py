"""What every benchmark shares: which engines there are, where a number was measured, fresh processes, colours."""

import importlib.util
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import ModuleType

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"  # ignored by git; results to keep are written with --out benchmarks/results/...
REFERENCE = "transformers"
PEERS = ("nanovllm", "vllm")  # rows where they can be imported, never needed
SAMPLED = ("nanovllm",)  # has no greedy decoding, so its tokens are not compared


# Stage 5 with one more thing on, as rows of a comparison: name -> options of LLM. ROUNDED: may make other tokens.
VARIANTS = {
    "stage5_n-gram_drafts": {"speculative": {"method": "ngram"}},
    "stage5_int8_KV": {"kv_cache_dtype": "int8"},
}
ROUNDED = ("stage5_int8_KV",)


def stages() -> list[str]:
    """The stages that exist, in order."""
    return sorted(path.parent.name for path in ROOT.glob("stage[1-9]_*/__init__.py"))


def package_of(engine: str) -> str:
    """The package that a row of a comparison runs: of a variant, its stage."""
    return next(stage for stage in stages() if stage[5] == engine[5]) if engine in VARIANTS else engine


def stage_options(package: ModuleType, options: dict) -> dict:
    """Options of LLM as a result file holds them -> as this stage takes them: drafting is an object of its own."""
    drafting = options.get("speculative")
    return options | ({"speculative": package.SpeculativeConfig(**drafting)} if drafting else {})


def peers() -> list[str]:
    """The peers that are installed."""
    return [name for name in PEERS if importlib.util.find_spec(name)]


def engines() -> list[str]:
    """Every row of a comparison: what a user has today, then our stages."""
    return [REFERENCE, *peers(), *stages()]


def colour(engine: str) -> str:
    """One fixed colour per engine, from the Okabe-Ito palette, which colour-blind readers can tell apart."""
    palette = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00"]
    if engine in PEERS:
        return {"nanovllm": "#999999", "vllm": "#56B4E9"}[engine]
    if engine in VARIANTS:
        return ["#F0C566", "#F8E3B0"][list(VARIANTS).index(engine)]  # lighter than their stage
    number = engine.removeprefix("stage")[0]
    return palette[int(number)] if number.isdigit() else palette[0]


def label(engine: str) -> str:
    """A name for an axis: "1 naive" for a stage, the engine's own name otherwise."""
    return engine.removeprefix("stage").replace("_", " ")


def device_name(device: str) -> str:
    """The processor's own name, e.g. "NVIDIA H200"."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def results_folder(device: str) -> Path:
    """out/cpu, or the GPU's short name, e.g. out/h200."""
    name = "cpu" if device == "cpu" else device_name(device).lower().removeprefix("nvidia").split()[0]
    return OUT / name


def environment(device: str) -> dict:
    """Where and with what a number was measured: it goes into every result file."""
    import torch

    return {
        "device": device,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),  # fewer than the cores where somebody set a limit
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(_without_out(sys.argv[1:]))}".strip(),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "flash-attn", "triton")},
    }


def _without_out(arguments: list[str]) -> list[str]:
    """Where the files went does not matter to whoever measures again."""
    at = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or None


def run_worker(engine: str, job: dict, on_progress: Callable[[int], None], module: str = "benchmarks.worker") -> dict:
    """Run one engine in a fresh process. on_progress gets the number of tokens made, as they are made.

    Raises RuntimeError with the process's last words if it fails.
    """
    command = [sys.executable, "-m", module, engine, json.dumps(job)]
    result = None
    with tempfile.TemporaryFile("w+") as log:  # a file, not a pipe: nobody reads it until the process has failed
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            for line in process.stdout:
                event = json.loads(line)
                if "tokens" in event:
                    on_progress(event["tokens"])
                else:
                    result = event
        if process.returncode != 0 or result is None:
            log.seek(0)
            words = "".join(log.readlines()[-15:])
            raise RuntimeError(f"{engine} failed (exit code {process.returncode}):\n{words}")
    return result


def run_in_turn(plan: list[tuple[str, dict]], rounds: int, bar: tqdm, module: str = "benchmarks.worker") -> list[dict]:
    """Every (engine, job) of a plan once per round, each time in a fresh process; the order turns around every round.
    A job may ask for several samples of each process.

    Returns one result per entry, with the samples of all rounds, or for a peer that fails {"failure": why}. The bar
    counts tokens as they are made, or runs, as its unit says.
    """
    results: list[dict | None] = [None] * len(plan)
    unit = getattr(bar, "unit", None)  # a bar that is off has none
    for turn in range(rounds):
        for i in range(len(plan))[:: 1 if turn % 2 == 0 else -1]:
            engine, job = plan[i]
            bar.set_postfix_str(label(engine))
            try:
                found = run_worker(engine, {"samples": 1} | job, lambda n: bar.update(n * (unit == "tok")), module)
            except RuntimeError as error:
                if engine not in PEERS:
                    raise
                found = {"failure": str(error)}
            results[i] = found if results[i] is None else joined(results[i], found)
            bar.update(unit == "run")
    return results


def joined(result: dict, more: dict) -> dict:
    """One result with the samples of both; a failure stays one."""
    if "failure" in result or "failure" in more:
        return {"failure": result.get("failure") or more["failure"]}
    return result | {"samples": result["samples"] + more["samples"]}


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def write_json(path: Path, result: dict) -> None:
    """Indented, but a list of numbers stays on one line: a series has thousands of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    path.write_text(re.sub(r"\[\s*(-?[\d.][^\[\]{}\"]*?)\s*\]", _on_one_line, text) + "\n")


BULKY = ("result", "results", "samples", "series", "takers", "prompts", "left_out")  # keys that only the file holds


def brief(value: object) -> object:
    """A result without what would not fit on a line: raw samples, and lists of more than 64 entries."""
    if isinstance(value, dict):
        return {key: brief(item) for key, item in value.items() if key not in BULKY or isinstance(item, int)}
    if isinstance(value, list):
        return [brief(item) for item in value] if len(value) <= 64 else f"{len(value)} entries, see the file"
    return value


def announce(path: Path, document: dict) -> None:
    """The end of every measurement: where the files are, and as the last line the result in one line of JSON."""
    picture = path.with_suffix(".png")
    print(f"Written: {path}" + (f" and {picture}" if picture.exists() else ""))
    print(json.dumps({"file": str(path)} | brief(document), ensure_ascii=False), flush=True)


def publish(path: Path, document: dict, draw: Callable[[dict, Path], None] | None = None) -> None:
    """Write the file, draw the figure beside it, announce both."""
    write_json(path, document)
    if draw:
        draw(document, path.with_suffix(".png"))
    announce(path, document)


def _on_one_line(numbers: re.Match) -> str:
    return "[" + " ".join(numbers[1].split()) + "]"
