"""Serve a workload with one engine in a fresh process, and report what each request saw. Called by other benchmarks.

    python -m benchmarks.serve stage3_batching '{"model": "tiny", "workload": "short_and_long", "options": {}, ...}'

A job holds model, options (of LLM), workload and arguments (of benchmarks.workloads), clock ("steps" or "seconds": what
arrival times count), samples, temperature. Output: JSON lines as benchmarks.worker writes them.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from itertools import accumulate, pairwise

from . import workloads
from .worker import emit, own_stdout


def drive(
    llm,
    params: list,
    requests: list[workloads.Request],
    clock: str,
    series_wanted: bool = False,
    tell: Callable[[dict], None] = emit,
) -> dict:
    """Hand in each request when it arrives, step until all have left. Returns times, counters and what each one saw.

    A request that the engine refuses is left out and counted. tell: is told of the progress.
    """
    llm.metrics.reset()
    start, outputs, todo = time.perf_counter(), {}, list(zip(requests, params, strict=True))
    arrived, due, refused, announced = {}, {}, [], 0
    while todo or llm.has_unfinished_requests():
        now = llm.metrics.steps if clock == "steps" else time.perf_counter() - start
        while todo and (todo[0][0].arrival <= now or (clock == "steps" and not llm.has_unfinished_requests())):
            request, sampling = todo.pop(0)
            try:
                request_id = llm.add_request(request.prompt, sampling)
                arrived[request_id], due[request_id] = llm.metrics.steps, start + request.arrival
            except ValueError as error:
                refused.append(str(error))
        if not llm.has_unfinished_requests():  # only by the clock: nobody is there, and the next is not due
            time.sleep(max(0.0, todo[0][0].arrival - (time.perf_counter() - start)) if todo else 0)
            continue
        outputs |= {output.request_id: output for output in llm.step()}
        if llm.metrics.decode_tokens - announced >= 500:
            tell({"tokens": llm.metrics.decode_tokens - announced})
            announced = llm.metrics.decode_tokens
    seconds = time.perf_counter() - start
    trace = llm.metrics.trace
    phases = {phase: sum(record.seconds[phase] for record in trace) for phase in trace[0].seconds}
    work = list(accumulate(sum(record.tokens.values()) for record in trace))
    seen = [what_it_saw(trace, work, request_id, step, outputs[request_id]) for request_id, step in arrived.items()]
    if clock == "seconds":
        pairs = zip(seen, due.items(), strict=True)
        seen = [what | by_the_clock(outputs[request_id].metrics, at) for what, (request_id, at) in pairs]
    sample = {"seconds": seconds, "phases": phases, "counters": llm.metrics.counters(), "requests": seen}
    sample |= {"refused": refused}
    return sample | ({"series": series(llm, trace), "takers": takers(llm)} if series_wanted else {})


def by_the_clock(metrics, due: float) -> dict:
    """Times from the moment when the request was due, not from the step that let it in; all gaps between its tokens."""
    first, last = metrics.token_times[0], metrics.finish_time
    return {"ttft": first - due, "seconds": last - due, "itl": metrics.itl}


def series(llm, trace: list) -> dict[str, list]:
    """Step by step: tokens of KV memory reserved and used, sequences that ran, requests preempted."""
    return {
        "kv_tokens_reserved": [record.kv_tokens_reserved for record in trace],
        "kv_tokens_used": [record.kv_tokens_used for record in trace],
        "running": [len(record.tokens) for record in trace],
        "waiting": [record.num_waiting for record in trace],
        "preempted": [len(getattr(record, "preempted", [])) for record in trace],
    }


def takers(llm) -> dict[str, int]:
    """Who has taken how many blocks, from the allocation log (none before there are blocks)."""
    manager = getattr(llm, "block_manager", None)
    return dict(list(manager.blocks_taken(0, manager.step).items())[:8]) if manager else {}


def what_it_saw(trace: list, work: list[int], request_id: str, arrived: int, output) -> dict:
    """Steps and seconds of one request: when it came, first ran and was returned; the gaps between its tokens.

    work: tokens forwarded by all up to the end of each step.
    """
    steps = [record.step for record in trace if request_id in record.tokens]
    (returned,) = [record.step for record in trace if request_id in record.finished]
    num_tokens = len(output.outputs[0].token_ids)
    token_steps = steps[-num_tokens:]  # the steps before these computed pieces of the prompt
    return {
        "arrived": arrived,
        "first_step": steps[0],
        "returned": returned,
        "tokens": num_tokens,
        "longest_gap_steps": max((b - a for a, b in pairwise(token_steps)), default=0),
        "longest_gap_work": max((work[b] - work[a] for a, b in pairwise(token_steps)), default=0),
        "longest_gap_seconds": max(output.metrics.itl, default=0.0),
        "ttft": output.metrics.ttft,
        "seconds": output.metrics.finish_time - output.metrics.arrival_time,
    }


def main() -> None:
    package, job = sys.argv[1], json.loads(sys.argv[2])
    own_stdout()
    stage = importlib.import_module(package)
    llm = stage.LLM(job["model"], **job["options"])
    if job.get("slice_steps"):
        from .slices import TimeSlices

        llm.scheduler = TimeSlices(llm.scheduler_config, llm.block_manager, job["slice_steps"])
    requests = getattr(workloads, job["workload"])(**job.get("arguments", {}))
    params = [
        stage.SamplingParams(
            temperature=job.get("temperature", 0.0), seed=i, max_tokens=request.max_tokens, ignore_eos=True
        )
        for i, request in enumerate(requests)
    ]
    warm = stage.SamplingParams(temperature=job.get("temperature", 0.0), max_tokens=4, ignore_eos=True)
    shortest = sorted((request.prompt for request in requests), key=len)[:8]
    llm.generate(shortest, warm, use_tqdm=False)
    clock, wanted = job.get("clock", "steps"), job.get("series", False)
    samples = [drive(llm, params, requests, clock, wanted) for _ in range(job["samples"])]
    resolved = {"dtype": str(llm.resolved.dtype).removeprefix("torch."), "backend": llm.resolved.attention_backend}
    resolved |= {"max_model_len": llm.resolved.max_model_len}
    config = llm.scheduler_config
    emit({**resolved, "max_num_seqs": config.max_num_seqs, "budget": config.max_num_batched_tokens, "samples": samples})


if __name__ == "__main__":
    main()
