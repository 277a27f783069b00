"""What every benchmark shares: which engines there are, where a number was measured, fresh processes, colours."""

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

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"  # ignored by git; results to keep are written with --out benchmarks/results/...
REFERENCE = "transformers"


def stages() -> list[str]:
    """The stages that exist, in order."""
    return sorted(path.parent.name for path in ROOT.glob("stage[1-9]_*/__init__.py"))


def engines() -> list[str]:
    """Every row of a comparison: what a user has today, then our stages."""
    return [REFERENCE, *stages()]


def colour(engine: str) -> str:
    """One fixed colour per engine, from the Okabe-Ito palette, which colour-blind readers can tell apart."""
    palette = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00"]
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
    return {
        "device": device,
        "device_name": device_name(device),
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


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def write_json(path: Path, result: dict) -> None:
    """Indented, but a list of numbers stays on one line: a series has thousands of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    path.write_text(re.sub(r"\[\s*(-?[\d.][^\[\]{}\"]*?)\s*\]", _on_one_line, text) + "\n")


def _on_one_line(numbers: re.Match) -> str:
    return "[" + " ".join(numbers[1].split()) + "]"
