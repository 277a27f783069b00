"""Profile: what the GPU does in a decode step, from a trace of torch.profiler. Part of benchmarks.optim.

A trace names every kernel with its begin and its duration, those inside a CUDA graph too, and every call that launched
one. Busy is the union of the kernels' and copies' intervals: what overlaps counts once. Recording costs time, so the
wall time of a step is taken from steps before the recording.

On a CPU there are no kernels: PyTorch's operations take their place (those that call others count too, but each with
its own time), and nothing is launched.
"""

import json
import os
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .optim_engine import PROMPT, Engine, random_prompts, synchronize

WARM = 8  # decode steps before the first timed one
TOP, GAPS = 12, 5
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = re.compile(r"(cudaLaunch(Cooperative)?Kernel|cuLaunch(Cooperative)?Kernel|cu(da)?GraphLaunch)")


def prepare_profiler(device: str) -> None:
    """Attach the profiler before any graph is captured, and keep it so: attaching again crashes with graphs."""
    if device == "cuda":
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.ones(8, device="cuda").sum().item()


def profile_decode(engine: Engine, batch: int, steps: int) -> dict:
    """Wall time, kernels, launches and busy time of one decode step of `batch` requests."""
    llm, on_gpu = engine.llm, engine.llm.resolved.device.type == "cuda"
    engine.forget()
    params = engine.params(WARM + 4 * steps + 16, temperature=0.0)
    ids = [llm.add_request(prompt, params) for prompt in random_prompts(batch, PROMPT, engine.vocab)]
    while llm.metrics.decode_tokens < batch * WARM:
        llm.step()
    wall = timed_steps(llm, 3 * steps)
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as prof:
        recorded = timed_steps(llm, steps)
    decoded = [record.decode_tokens for record in llm.metrics.trace[-steps:]]
    drop(llm, ids)
    found = analyse(exported(prof), steps) if on_gpu else analyse(with_self_times(exported(prof)), steps, ("cpu_op",))
    return {
        "batch": batch,
        "steps": steps,
        "decode_tokens": sum(decoded) / len(decoded),  # per step: `batch`, if all were decoding
        "wall_ms": wall,
        "recorded_wall_ms": recorded,
        **found,
        "busy_share": found["busy_ms"] / wall if on_gpu else None,
    }


def drop(llm, ids: list[str]) -> None:
    """End the requests, and let the engine finish what is under way."""
    for request_id in ids:
        llm.abort_request(request_id)
    while llm.has_unfinished_requests():
        llm.step()


def timed_steps(llm, steps: int) -> float:
    """Milliseconds of a step."""
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        llm.step()
    synchronize()
    return 1000 * (time.perf_counter() - start) / steps


def exported(prof: profile) -> list[dict]:
    """The events of a trace that have a duration."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "dur" in event]


def with_self_times(events: list[dict]) -> list[dict]:
    """The operations on a CPU, each with the time in it (`self`) that is in no operation that it called."""
    ops = [event | {"self": event["dur"]} for event in events if event.get("cat") == "cpu_op"]
    open_ops: dict[int, list[dict]] = defaultdict(list)  # of each thread, the outermost first
    for op in sorted(ops, key=lambda op: (op["ts"], -op["dur"])):
        stack = open_ops[op["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= op["ts"]:
            stack.pop()
        if stack:
            stack[-1]["self"] -= op["dur"]
        stack.append(op)
    return ops


def analyse(events: list[dict], steps: int, kinds: tuple[str, ...] = ON_GPU) -> dict:
    """Per step: kernels, copies, launches and busy time; the largest gaps and the kernels that take most time."""
    work = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    if not work:
        raise RuntimeError("the trace holds no kernel: the profiler may lack the right to read the GPU's counters")
    kernels = [e for e in work if e["cat"] in ("kernel", "cpu_op")]
    launches = {launch_id(e): e["name"] for e in events if LAUNCH.match(e["name"]) and "cu" in e.get("cat", "")}
    busy, gaps = busy_and_gaps(work)
    return {
        "kernels": len(kernels) / steps,
        "copies": (len(work) - len(kernels)) / steps,
        "launches": len(launches) / steps,
        "graph_launches": sum("GraphLaunch" in name for name in launches.values()) / steps,
        "busy_ms": busy / 1000 / steps,
        "gaps": sorted(gaps, key=lambda gap: -gap["us"])[:GAPS],
        "top": top_kernels(kernels, steps),
    }


def launch_id(event: dict) -> object:
    """A call of the runtime and the driver's call inside it have one id: they count once."""
    return event.get("args", {}).get("correlation", (event["ts"], event.get("tid")))


def busy_and_gaps(work: list[dict]) -> tuple[float, list[dict]]:
    """Microseconds in which at least one event ran, and the pauses between. work: in order of begin."""
    busy, gaps, end, last = 0.0, [], work[0]["ts"], None
    for event in work:
        begin, until = event["ts"], event["ts"] + event["dur"]
        if begin > end:
            gaps.append({"us": begin - end, "after": short_name(last["name"]), "before": short_name(event["name"])})
        busy += max(0.0, until - max(begin, end))
        if until >= end:
            end, last = until, event
    return busy, gaps


def top_kernels(kernels: list[dict], steps: int) -> list[dict]:
    """The kernels that take most time, each under its short name."""
    times = defaultdict(list)
    for event in kernels:
        times[event["name"]].append(event.get("self", event["dur"]))
    order = sorted(times, key=lambda name: -sum(times[name]))[:TOP]
    return [
        {"name": short_name(name), "calls": len(times[name]) / steps, "us": sum(times[name]) / steps} for name in order
    ]


def short_name(name: str, limit: int = 56) -> str:
    """A kernel's own name: without namespaces and types, but with the operation that PyTorch's general kernels run."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    own = re.split(r"[<(]", name, maxsplit=1)[0].split("::")[-1].strip()
    inner = name[name.find("<") + 1 :] if "<" in name else ""
    if own in ("Kernel", "Kernel2", "device_kernel") and inner:
        own = re.split(r"[<>(,]", inner, maxsplit=1)[0].split("::")[-1].strip()
    what = re.search(r"(\w*[Ff]unctor\w*|\w+_kernel_(?:cuda|impl)\w*|\w+Ops?)\b", inner)
    return f"{own} ({what[1]})"[:limit] if what and what[1] not in own else own[:limit] or name[:limit]
