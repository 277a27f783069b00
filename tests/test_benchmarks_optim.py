"""benchmarks.optim measures what it says with each of its commands, and reads a GPU's trace rightly."""

import importlib
import json
import os
from dataclasses import replace

import pytest

from benchmarks import fused, kv_quality, kv_speed, optim, optim_profile, optim_tables, plots_optim, prefix, workloads
from benchmarks.optim_engine import known_options, summary

SMALL = ["--model", "tiny", "--device", "cpu", "--repeats", "1"]


def measure(what: str, out, *arguments: str) -> dict:
    assert optim.main([what, *SMALL, *arguments, "--out", str(out)]) == 0
    return json.loads((out / f"optim-{what}.json").read_text())


def test_speed_has_both_stages_and_workloads(tmp_path, monkeypatch):
    """The same work in both rows: outputs, greedy tokens and steps; times and what the engine holds beside them."""
    short = [replace(request, max_tokens=40) for request in workloads.mixed_256(250)]
    monkeypatch.setattr(workloads, "mixed_256", lambda vocab: short)
    document = measure("speed", tmp_path, "--requests", "2", "--tokens", "8")
    paged, fast = document["rows"]
    assert [row["stage"] for row in (paged, fast)] == [optim.PAGED, optim.OPTIM]
    assert paged["one"]["samples"][0]["ids_digest"] == fast["one"]["samples"][0]["ids_digest"]
    for row in (paged, fast):
        one, many = (row[name]["samples"][0] for name in ("one", "many"))
        assert one["tokens"] == 8 and many["tokens"] == 80
        assert one["counters"]["decode_tokens"] >= 7 and one["counters"]["prefill_tokens"] == 128
        assert row["one"]["tokens_per_second"] == pytest.approx(8 / one["seconds"])
        assert 0 < one["ttft_ms"] < 1000 * one["seconds"] and set(one["phases"]) >= {"schedule", "forward"}
        assert row["startup_seconds"] > 0 and row["left_bytes"] == 0 and row["peak_bytes"] is None
        assert 40 <= many["counters"]["steps"] <= 42
    assert [len(cells) for cells in document["cells"]] == [len(document["columns"])] * 2
    assert (tmp_path / "optim-speed.png").stat().st_size > 5000


def test_ablation_changes_one_thing_at_a_time(tmp_path):
    """Each row differs from "all on" in one option, the last in all; all that round alike make the same tokens."""
    rows = measure("ablation", tmp_path, "--workload", "one", "--tokens", "8")["rows"]
    names = ["all on", "no CUDA graphs", "no fused kernels", "no async scheduling", "with prefix caching"]
    names += ["with int8 KV", "with fp8 KV", "with n-gram drafts", "all off"]
    assert [row["name"] for row in rows] == names
    assert [len(row["options"]) for row in rows] == [0, 1, 1, 1, 1, 1, 1, 1, 3]
    exact = [row for row in rows if "kv_cache_dtype" not in row["options"]]
    assert len(exact) == 7 and len({row["one"]["samples"][0]["ids_digest"] for row in exact}) == 1
    assert [rows[0]["kv_pool_bytes"] > 1.8 * row["kv_pool_bytes"] for row in rows[5:7]] == [True, True]
    assert rows[4]["used_options"]["enable_prefix_caching"] is True
    drafting = rows[7]
    assert drafting["options"] == {"speculative": {"method": "ngram"}}, "as a file can hold it"
    assert drafting["used_options"]["speculative"] == {"method": "ngram"}
    assert rows[4]["one"]["samples"][0]["counters"]["prefix_hit_tokens"] == 0, "the warm-up's prompt must be forgotten"
    assert (tmp_path / "optim-ablation.png").stat().st_size > 5000


def test_ablation_tells_the_time_of_a_token(tmp_path):
    """A step with drafts brings several: what stands in the table is the time from token to token, and called so."""
    document = measure("ablation", tmp_path, "--workload", "one", "--tokens", "24", "--rows", "all on", "n-gram")
    assert document["columns"]["0"] == "one: ms per token"
    plain, drafting = (row["one"]["samples"][0] for row in document["rows"])
    assert drafting["counters"]["steps"] < plain["counters"]["steps"] == 24, "else a step and a token were the same"
    for row, cells in zip(document["rows"], document["cells"], strict=True):
        (sample,) = row["one"]["samples"]
        assert cells[0] == f"{sample['ms_per_step']:.2f}"
        assert sample["ms_per_step"] == pytest.approx(1000 / sample["decode_tokens_per_second"])


def test_waterfall_steps_are_of_all_requests(tmp_path):
    """Gaps from where the last one has its first token, two left out; each size of the batch is there."""
    rows = measure("waterfall", tmp_path, "--batches", "1", "3", "--tokens", "8")["rows"]
    assert [row["name"] for row in rows][::4] == ["stage 4", "+ async scheduling"]
    assert [len(row["options"]) for row in rows] == [0, 3, 2, 1, 0]
    for row in rows:
        assert list(row["batches"]) == ["1", "3"]
        found = row["batches"]["3"]
        assert 3 <= len(found["samples"][0]["gaps_ms"]) <= 6 and found["ms_per_step"] > 0
        assert found["samples"][0]["counters"]["prefill_tokens"] == 3 * 128
    assert (tmp_path / "optim-waterfall.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "what, arguments",
    [("ablation", ["--workload", "one"]), ("waterfall", ["--batches", "1"]), ("profile", ["--batches", "1"])],
)
def test_what_a_cpu_does_not_have_is_said(what, arguments, tmp_path, capsys):
    """Its rows are equal but for chance: one line names what is off in all of them."""
    rows = ["all on", "no CUDA", "all off", "+ async"]
    measure(what, tmp_path, *arguments, "--tokens", "4", "--steps", "2", "--rows", *rows)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("This device ")]
    assert "has no fused kernels, no CUDA graphs, no async scheduling: rows that differ only in that" in line


def test_what_a_device_has_is_not_called_missing(tmp_path, capsys):
    """Judged by what the engines ran with where nobody switched it, not by rows that forbid it."""
    on, off = ({name: value for name, _ in optim_tables.SWITCHES.values()} for value in (True, False))
    free, eager = {"used_options": {}}, {"used_options": {"enforce_eager": True}}
    drafts = {"used_options": {"speculative": {"method": "ngram"}}}
    assert optim_tables.not_here([free | {"features": on}, eager | {"features": off}]) == []
    no_graphs = free | {"features": on | {"cuda_graphs": False}}
    assert optim_tables.not_here([drafts | {"features": on | {"async_scheduling": False}}]) == []
    assert optim_tables.not_here([no_graphs, eager | {"features": off}]) == ["CUDA graphs"]
    assert optim_tables.not_here([eager | {"features": on | {"cuda_graphs": False}}]) == [], "nobody asked for them"
    assert optim_tables.not_here([free | {"features": {}}, free]) == [], "stage 4, and files of old"
    measure("waterfall", tmp_path, "--batches", "1", "--tokens", "4", "--rows", "all off")
    assert "This device" not in capsys.readouterr().out


def test_parallel_rows_share_the_model(tmp_path, monkeypatch):
    """Two processes on a CPU too; a row's environment is gone after it."""
    rows = measure("parallel", tmp_path, "--batches", "1", "2", "--tokens", "6")["rows"]
    assert [row["used_options"].get("tensor_parallel_size", 1) for row in rows] == [1, 2, 2]
    for row in rows:
        assert list(row["batches"]) == ["1", "2"]
        counters = row["batches"]["2"]["samples"][0]["counters"]
        assert bool(counters["all_reduces"]) == (row is not rows[0])
        assert counters["prefill_tokens"] == 2 * 128
    assert "INFERENCE_STAGES_QUICK_SUMS" not in os.environ
    assert (tmp_path / "optim-parallel.png").stat().st_size > 5000


def test_profile_on_a_cpu_says_so_and_profiles_operations(tmp_path, capsys):
    rows = measure("profile", tmp_path, "--batches", "1", "2", "--steps", "2")["rows"]
    assert "no GPU" in capsys.readouterr().out
    for row in rows:
        for batch, found in row["batches"].items():
            assert found["decode_tokens"] == found["batch"] == int(batch)
            assert found["kernels"] > 50 and found["launches"] == 0 and found["busy_share"] is None
            assert 0 < found["busy_ms"] <= found["recorded_wall_ms"]
            assert len(found["top"]) == 12 and found["top"][0]["us"] >= found["top"][-1]["us"] > 0


def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0, tid: int = 7) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"correlation": correlation}}


def test_a_trace_of_a_gpu():
    """Overlap counts once, a driver's call inside the runtime's is one launch, a graph's kernels are kernels."""
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 5, 1),
        event("cuda_driver", "cuLaunchKernel", 1, 3, 1),  # the same launch
        event("cuda_driver", "cuLaunchKernelEx", 6, 2, 2),
        event("cuda_runtime", "cudaGraphLaunch_v10000", 9, 8, 3),
        event("cuda_runtime", "cudaLaunchHostFunc", 18, 1, 4),
        event("cuda_runtime", "cudaMemcpyAsync", 19, 1, 5),
        event("kernel", "void at::native::a<float>(int)", 10, 10, 1),
        event("kernel", "_b", 15, 10, 2),  # overlaps with the first by 5
        event("kernel", "_b", 30, 10, 3),  # two of the graph
        event("kernel", "void ns::c<int>()", 40, 20, 3),
        event("gpu_memcpy", "Memcpy DtoH", 70, 2, 5),
    ]
    found = optim_profile.analyse(events, steps=2)
    assert (found["kernels"], found["copies"], found["launches"], found["graph_launches"]) == (2.0, 0.5, 1.5, 0.5)
    assert found["busy_ms"] == pytest.approx((15 + 30 + 2) / 2 / 1000)
    assert [gap["us"] for gap in found["gaps"]] == [10, 5]
    assert found["gaps"][0] == {"us": 10, "after": "c", "before": "Memcpy DtoH"}
    assert [(kernel["name"], kernel["calls"], kernel["us"]) for kernel in found["top"][:2]] == [
        ("_b", 1.0, 10.0),
        ("c", 0.5, 10.0),
    ]
    with pytest.raises(RuntimeError, match="no kernel"):
        optim_profile.analyse(events[:3], 1)


def test_self_times_of_operations():
    """What an operation called is not its own time."""
    outer, inner = event("cpu_op", "aten::linear", 0, 10), event("cpu_op", "aten::mm", 2, 7)
    ops = optim_profile.with_self_times([inner, outer, event("cpu_op", "aten::add", 10, 1), event("x", "y", 0, 99)])
    assert {op["name"]: op["self"] for op in ops} == {"aten::linear": 3, "aten::mm": 7, "aten::add": 1}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<float>>(int)", "elementwise_kernel"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>(flash::P)", "flash_fwd_splitkv_kernel"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>(P)", "cutlass_80_tensorop_bf16"),
        ("void (anonymous namespace)::softmax_warp<float>(float*)", "softmax_warp"),
        ("nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "nvjet_tst_128x8_64x12_2x1_v_bz_TNT"),
    ],
)
def test_short_names(name, short):
    assert optim_profile.short_name(name).split(" (")[0] == short


def test_an_option_that_a_stage_lacks_is_left_out(tmp_path):
    """--option reaches the engines that know it; a name that none knows, and a filter that leaves nothing, end it."""
    arguments = ["--workload", "one", "--tokens", "4", "--option", "enable_prefix_caching=true", "--option", "seed=3"]
    paged, fast = measure("speed", tmp_path, *arguments)["rows"]
    assert "enable_prefix_caching" not in known_options(optim.PAGED)
    assert "enable_prefix_caching" not in paged["used_options"] and paged["used_options"]["seed"] == 3
    assert fast["used_options"]["enable_prefix_caching"] is True
    for wrong in (["--option", "no_such=1"], ["--rows", "nothing"], ["--repeats", "0"], ["--option", "seed"]):
        with pytest.raises(SystemExit) as exit_info:
            optim.main(["speed", *wrong])
        assert exit_info.value.code == 2


def test_a_row_that_fails_does_not_take_the_others_along(tmp_path, monkeypatch, capsys):
    """What was measured is in the file, the exit status says 1; --keep adds the row later, in its place."""
    arguments = ["waterfall", *SMALL, "--batches", "1", "--tokens", "4", "--rows", "stage 4", "all off"]
    whole, path = optim.waterfall_rows, tmp_path / "optim-waterfall.json"

    def broken(args):
        rows = whole(args)
        return [rows[0] | {"options": {"num_kv_blocks": 1}}, *rows[1:]]

    monkeypatch.setitem(optim.WHAT, "waterfall", (broken, *optim.WHAT["waterfall"][1:]))
    assert optim.main([*arguments, "--out", str(tmp_path)]) == 1
    document = json.loads(path.read_text())
    assert [row["name"] for row in document["rows"]] == ["stage 5, all off"]
    assert [row["name"] for row in document["failed"]] == ["stage 4"] and "ValueError" in document["failed"][0]["error"]
    monkeypatch.setitem(optim.WHAT, "waterfall", (whole, *optim.WHAT["waterfall"][1:]))
    assert optim.main([*arguments[:-1], "--keep", "--out", str(tmp_path)]) == 0
    document = json.loads(path.read_text())
    assert [row["name"] for row in document["rows"]] == ["stage 4", "stage 5, all off"] and not document["failed"]
    (tmp_path / "optim-waterfall.png").unlink()
    plots_optim.main([str(path)])
    assert (tmp_path / "optim-waterfall.png").exists()


def test_rounds_join_their_samples(tmp_path):
    """Two rounds, one sample each: both count, and the table is in its own order."""
    found = measure("waterfall", tmp_path, "--batches", "1", "--tokens", "4", "--rows", "+", "--rounds", "2")
    assert [row["name"] for row in found["rows"]] == ["+ fused kernels", "+ CUDA graphs", "+ async scheduling"]
    for row in found["rows"]:
        run = row["batches"]["1"]
        assert len(run["samples"]) == 2 and run["seconds"] == sum(s["seconds"] for s in run["samples"]) / 2
    assert found["job"]["rounds"] == 2 and found["roofline"]["decode"][0]["batch"] == 1


def test_the_median_counts():
    found = summary([{"seconds": s, "tokens": 3} for s in (1.0, 9.0, 2.0)])
    assert found == {"seconds": 2.0, "seconds_range": [1.0, 9.0]}


def test_ttft_of_a_cached_prompt(tmp_path):
    """Of a prompt that was seen before only the last block is computed."""
    arguments = ["ttft", *SMALL[:-2], "--samples", "1", "--lengths", "64", "70", "--out", str(tmp_path)]
    assert prefix.main(arguments) == 0
    rows = json.loads((tmp_path / "prefix-ttft.json").read_text())["rows"]
    assert [(row["new_tokens"], row["again_tokens"]) for row in rows] == [(64, 16), (70, 6)]
    assert all(row["ratio"] == row["new_ms"] / row["again_ms"] for row in rows)


def test_kv_quality_counts_every_token(tmp_path):
    """Three caches, the same text, in windows and pieces that do not divide it; other pieces change nothing."""
    arguments = ["--tokens", "300", "--window", "128", "--piece", "50", "--prompts", "2", "--max-tokens", "6"]
    assert kv_quality.main([*arguments, *SMALL[:4], "--out", str(tmp_path)]) == 0
    plain, *others = json.loads((tmp_path / "kv-quality.json").read_text())["rows"]
    assert plain["perplexity_change"] == 0 and plain["first_differences"] == [None, None]
    for row in others:
        assert 0 < abs(row["perplexity_change"]) < 0.1 and row["kv_bytes_per_token"] == 2 * 2 * 2 * 66
        assert row["tokens_per_byte"] == pytest.approx(4 * 64 / 66)
    one_piece = kv_quality.main(["--piece", "300", *arguments[:4], *arguments[6:], *SMALL[:4], "--out", str(tmp_path)])
    again = json.loads((tmp_path / "kv-quality.json").read_text())["rows"]
    assert one_piece == 0
    for row, same in zip([plain, *others], again, strict=True):
        assert row["perplexity"] == pytest.approx(same["perplexity"], rel=1e-3)


def test_kv_speed_says_what_it_needs(capsys):
    """A row that is there, a GPU, a triton: an error of one line, with exit status 2."""
    with pytest.raises(SystemExit) as ended:
        kv_speed.main(["--only", "no such step"])
    assert ended.value.code == 2 and "kv_speed: error:" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(fused.CALLS))
def test_fused_finds_both_versions_of_each_operation(name):
    """On a GPU it would be a row that failed: names are looked up before anything is measured."""
    pytest.importorskip("triton", reason="needs the package triton")
    assert callable(fused.kernel(fused.STAGES[-1], name))
    assert name == "sample" or callable(getattr(importlib.import_module(f"{fused.STAGES[-1]}.ops"), name))
