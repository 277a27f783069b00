"""One command for all benchmarks; the roofline against numbers worked out by hand; gates on planted rows; peers."""

import ast
import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks import compare, gates, load, optim, optim_peers, peers, roofline, worker, workloads
from benchmarks.common import PEERS, ROOT, brief, engines, environment, stages

STARTED_BY_OTHERS = {"worker", "serve"}  # processes: they take a job, not options


@pytest.fixture(autouse=True)
def leave_nothing(monkeypatch):
    """Stand-ins for peers and arguments of commands must not reach other tests."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    yield
    for name in PEERS:
        sys.modules.pop(name, None)


def defines_main(path) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body)


def test_every_module_that_can_be_run_is_listed():
    """A measurement that the one command does not know would be forgotten."""
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if defines_main(path)} - {"__main__"}
    assert set(entry.commands()) == modules - STARTED_BY_OTHERS
    text = entry.listing()
    for command in entry.commands().values():
        assert command.line and any(
            line.split() == f"{command.name} {command.line}".split() for line in text.splitlines()
        )
        assert command.lesson in {entry.GENERAL, entry.FIGURES, *(f"stage {stage[5]}" for stage in stages())}


def test_what_only_draws_is_no_measurement():
    """plots_* takes result files and makes none: it stands apart, below what is said of all measurements."""
    drawing = [name for name, command in entry.commands().items() if command.lesson == entry.FIGURES]
    assert drawing == [name for name in entry.commands() if name.startswith("plots")] and drawing
    measured, _, below = entry.listing().partition("Each prints one line of JSON")
    assert all(f"  {name} " in below and f"  {name} " not in measured for name in drawing)
    others = set(entry.commands()) - set(drawing)
    assert all(f"\n  {name} " in measured and f"\n  {name} " not in below for name in others)


def test_a_new_module_needs_no_registration(tmp_path):
    """Docstring and main are enough; LESSON says where it is listed."""
    (tmp_path / "fresh.py").write_text(
        '"""Fresh: what it does.\n\nMore."""\nLESSON = "stage 5"\ndef main(argv=None): ...\n'
    )
    (tmp_path / "helper.py").write_text('"""Helps."""\nA, B = 1, 2\n')
    (tmp_path / "process.py").write_text('"""Works."""\ndef main(): ...\n')
    assert entry.commands(tmp_path) == {"fresh": entry.Command("fresh", "what it does.", "stage 5")}


@pytest.mark.parametrize("name", list(entry.commands()))
def test_every_command_explains_itself(name, monkeypatch, capsys):
    """--help is the module's own, and its first line says how to call it."""
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(SystemExit) as exit_info:
        entry.main([name, "--help"])
    out = capsys.readouterr().out
    assert exit_info.value.code == 0 and f"python -m benchmarks.{name}" in out.replace("\n", " ")


def test_unknown_names_and_no_name(capsys):
    assert entry.main(["nothing"]) == 2 and "known: " in capsys.readouterr().err
    assert entry.main([]) == entry.main(["--help"]) == 0


def test_both_ways_of_calling_note_the_same_command(monkeypatch):
    """What is stored can be typed: python -m benchmarks.X, without --out."""
    seen = []
    monkeypatch.setattr(compare, "main", lambda argv: seen.append(environment("cpu")["command"]) or 0)
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/__main__.py", "compare"])
    assert entry.main(["compare", "--model", "tiny", "--out", "x", "--samples", "1"]) == 0
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/compare.py", "--model", "tiny", "--samples", "1"])
    assert seen == [environment("cpu")["command"]] == ["python -m benchmarks.compare --model tiny --samples 1"]


def test_the_last_line_is_json(tmp_path):
    """As a user runs it: whatever is printed before, the last line can be read by a program, and names the file."""
    command = [sys.executable, "-m", "benchmarks", "roofline", "--model", "tiny", "--device", "cpu"]
    run = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    last = json.loads(run.stdout.splitlines()[-1])
    document = json.loads((tmp_path / "roofline.json").read_text())
    assert last == {"file": str(tmp_path / "roofline.json")} | document
    assert run.stdout.startswith("Roofline of tiny in float32") and document["roofline"]["kv_bytes_per_token"] == 2048


def test_brief_keeps_what_fits():
    assert brief({"samples": 3, "rows": [{"samples": [1], "x": list(range(65)), "y": [1, 2]}]}) == {
        "samples": 3,
        "rows": [{"x": "65 entries, see the file", "y": [1, 2]}],
    }


PEAK = {"name": "a card", "bytes_per_second": 1e12, "flops": 1e14, "source": "made up"}


def shape(model: str):
    return roofline.resolve(model, "cpu", "bfloat16", dummy=True)[0]


def test_llama_3_8b_by_hand():
    """8.03 billion parameters, 16.06 GB in 16 bits, 128 KiB of KV per token."""
    config = shape("llama-3-8b")
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096
    assert roofline.parameters(config) == 2 * 128256 * 4096 + 32 * layer + 4096 == 8_030_261_248
    found = roofline.card(config, "bfloat16", PEAK, [(1, 0), (64, 1024)], [2048])
    assert found["weight_bytes"] == 16_060_522_496 and found["kv_bytes_per_token"] == 128 * 1024
    read = 2 * (8_030_261_248 - 128256 * 4096)
    assert found["bytes_read_per_step"] == read
    alone, many = found["decode"]
    assert alone["tokens_per_second"] == pytest.approx(1e12 / read) and alone["bound"] == "memory"
    assert many["tokens_per_second"] == pytest.approx(64 * 1e12 / (read + 64 * 1024 * 131072))


def test_work_by_hand():
    """2 operations per weight and token; 4 x layers x heads x d per pair of tokens; many sequences meet the FLOP/s."""
    config = shape("llama-3-8b")
    matrices = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    head, attention = 128256 * 4096, 4 * 32 * 32 * 128
    assert roofline.decode_flops(config, 1000) == 2 * (matrices + head) + attention * 1000
    assert roofline.prefill_flops(config, 3) == 2 * (3 * matrices + head) + attention * (1 + 2 + 3)
    full = roofline.decode_ceiling(config, "bfloat16", PEAK, 10_000, 1)
    assert full["bound"] == "compute"
    assert full["tokens_per_second"] == pytest.approx(1e14 / roofline.decode_flops(config, 1))
    prompt = roofline.prefill_ceiling(config, "bfloat16", PEAK, 2048)
    assert prompt["ttft_ms"] == pytest.approx(1000 * roofline.prefill_flops(config, 2048) / 1e14)


@pytest.mark.parametrize("model", ["tiny", "qwen3-0.6b"])
def test_parameters_are_those_of_the_model(model):
    """Against what `transformers` builds from the same config: own head or tied, q and k normed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from stage1_naive import zoo

    config = dict(zoo.locate(model, "dummy").config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert roofline.parameters(shape(model)) == sum(p.numel() for p in theirs.parameters())


def test_known_machines_are_looked_up(monkeypatch):
    """16 bits on an H200: from the table. Any other type: only the bandwidth is."""
    monkeypatch.setattr(roofline, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(roofline, "measured_peaks", lambda device, dtype: (1.0, 2.0))
    found = roofline.machine("cuda", "bfloat16")
    assert (found["bytes_per_second"], found["flops"]) == (4.8e12, 989e12) and "nvidia.com" in found["source"]
    found = roofline.machine("cuda", "float32")
    assert (found["bytes_per_second"], found["flops"]) == (4.8e12, 2.0) and "measured" in found["source"]


def test_an_unknown_model_ends_in_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_info:
        entry.main(["roofline", "--model", "no-such-model", "--out", str(tmp_path)])
    assert exit_info.value.code == 2 and "no-such-model" in capsys.readouterr().err


def test_gate_of_batches():
    """8 at once below 1 at once is suspect; below 4 at once it is not."""
    assert gates.slower_batch([1, 4, 8], [10.0, 40.0, 30.0]) == [[], [], []]
    first, second, third = gates.slower_batch([8, 1, 4], [9.0, 10.0, 20.0])
    assert first and "8 at once" in first[0] and second == third == []


def speeds(**by_engine: float) -> list[dict]:
    return [{"engine": engine, "tokens_per_second": speed} for engine, speed in by_engine.items()]


def test_gate_of_stages():
    """Stage 2 below stage 1 past 64 tokens, stage 3 below stage 2 with several requests; stage 4 is not judged."""
    rows = speeds(transformers=99.0, stage1_naive=10.0, stage2_kvcache=9.0, stage3_batching=8.0, stage4_paged=1.0)
    found = gates.slower_stage(rows, prompts=4, length=65)
    assert [len(reasons) for reasons in found] == [0, 0, 1, 1, 0]
    assert "past 64 tokens" in found[2][0] and "with 4 requests" in found[3][0]
    assert not any(gates.slower_stage(rows, prompts=1, length=64))
    assert not any(gates.slower_stage(rows[2:3], prompts=4, length=65)), "nothing to compare with"


def test_gate_of_a_curve():
    rows = [
        {"engine": "stage1_naive", "positions": [16, 128, 256], "milliseconds": [1.0, 2.0, 3.0]},
        {"engine": "stage2_kvcache", "positions": [16, 128, 256], "milliseconds": [2.0, 2.5, 1.0]},
    ]
    assert gates.slower_past(rows) == [[], ["a token takes longer than in stage 1 at position 128"]]
    assert gates.slower_past(rows[1:]) == [[]]


def test_gate_of_stage_5():
    """Only on a GPU does stage 5 add anything to the speed."""
    rows = [
        {"name": "4 paged", "stage": "stage4_paged", "one": {"tokens_per_second": 10.0}},
        {"name": "5 optim", "stage": "stage5_optim", "one": {"tokens_per_second": 9.0}},
    ]
    assert gates.slower_stage5(rows, "cpu") == [[], []]
    assert "slower than stage 4 with one" in gates.slower_stage5(rows, "cuda")[1][0]


def test_gate_of_spread_and_marks(capsys):
    """(1.2 - 0.9) / 1.0 is more than a fifth; one sample has no spread. Marked rows are kept."""
    found = gates.wide_spread([[0.9, 1.0, 1.2], [0.9, 1.0, 1.05], [5.0]])
    assert [len(reasons) for reasons in found] == [1, 0, 0] and "30%" in found[0][0]
    rows = gates.mark([{"name": "a"}, {"name": "b"}, {"name": "c"}], found, [[], ["odd"], []])
    assert [len(row["suspect"]) for row in rows] == [1, 1, 0]
    assert [gates.name(row, row["name"]) for row in rows] == ["a (?)", "b (?)", "c"]
    gates.print_suspects(rows)
    assert capsys.readouterr().out.splitlines()[1] == "(?) b: odd"


def test_percentiles():
    """Nearest rank: of 10 values the 50th percentile is the 5th, the 99th the last."""
    values = [float(i) for i in range(1, 11)]
    assert [load.percentile(values, share) for share in (50, 90, 91, 99)] == [5.0, 9.0, 10.0, 10.0]
    assert load.percentile([7.0], 50) == 7.0


def test_load_keeps_every_value(tmp_path, capsys):
    """A TTFT of each request, a gap before each token but the first."""
    arguments = ["--stages", "stage5_optim", "--rates", "50", "--requests", "6", "--model", "tiny", "--device", "cpu"]
    assert load.main([*arguments, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "load.json").read_text())["rows"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["ttft_ms"] == row["ttft_ms"]
    assert len(row["ttft_ms"]) == 6 and len(row["itl_ms"]) == row["tokens"] - 6
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] == row["ttft_ms"][-1]
    assert (tmp_path / "load.png").stat().st_size > 5000


STUB = """
import torch
from types import SimpleNamespace
from transformers import AutoModelForCausalLM
print("a library that talks on standard output")

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, model, dtype=None, **options):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def greedy(self, ids, n):
        for _ in range(n):
            ids = [*ids, self.model(torch.tensor([ids])).logits[0, -1].argmax().item()]
        return ids[-n:]
"""
VLLM = """
    def generate(self, prompts, params, use_tqdm=True):
        found = [self.greedy(p["prompt_token_ids"], q.max_tokens) for p, q in zip(prompts, params)]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids))]) for ids in found]
"""
NANO = """
    def generate(self, prompts, params, use_tqdm=True):
        assert params[0].temperature > 1e-10, "greedy sampling is not permitted"
        return [{"text": "", "token_ids": [5] * q.max_tokens} for q in params]
"""


def install(folder, monkeypatch, **packages: str) -> None:
    """Stand-ins with the peers' public interface, importable here and in the processes of a run."""
    for name, text in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_peers_are_rows_where_they_are_installed(tmp_path, monkeypatch, capsys):
    """Their tokens are compared, what they do not tell is null, and one that is broken costs its own row alone."""
    assert not set(PEERS) & set(engines()), "this test stands in for peers that are not installed"
    install(tmp_path, monkeypatch, vllm=STUB + VLLM, nanovllm="raise ImportError('no kernels for this machine')\n")
    assert [name for name in engines() if name in PEERS] == ["nanovllm", "vllm"]
    arguments = ["--model", "tiny", "--device", "cpu", "--samples", "1", "--max-tokens", "4", "--out", str(tmp_path)]
    assert compare.main([*arguments, "--engines", "nanovllm", "vllm"]) == 0
    document = json.loads((tmp_path / "compare.json").read_text())
    (row,) = document["rows"]
    assert row["engine"] == "vllm" and row["tokens"] == 16 and row["tokens_per_second"] > 0
    assert row["ttft"] is None and row["tokens_forwarded"] is None and row["suspect"] == []
    assert "no kernels for this machine" in document["left_out"]["nanovllm"]
    out = capsys.readouterr().out
    assert "nanovllm is left out: ImportError: no kernels" in out and "a library that talks" not in out
    ours = worker.StageEngine("stage2_kvcache", {"model": "tiny", "device": "cpu"})
    (found,) = document["results"]["vllm"]["samples"]
    wanted = ours.run(document["results"]["vllm"]["prompt_token_ids"], 4)
    assert [run["token_ids"] for run in found["runs"]] == [run["token_ids"] for run in wanted]


def test_nano_vllm_samples_and_is_not_compared(tmp_path, monkeypatch):
    """It refuses temperature 0, so it gets another; it has no random weights and knows one family."""
    install(tmp_path, monkeypatch, nanovllm=STUB + NANO)
    job = {"model": "tiny", "device": "cpu"}
    peer = peers.load("nanovllm", job)
    assert [len(run["token_ids"]) for run in peer.run([[1, 2], [3]], [2, 5])] == [2, 5] and peer.counters() == {}
    with pytest.raises(ValueError, match="random weights"):
        peers.load("nanovllm", job | {"model": "qwen3-0.6b", "load_format": "dummy"})
    sample = {"seconds": 1.0, "counters": {}, "runs": peer.run([[1]], 2)}
    assert compare.check_same({"nanovllm": {"samples": [sample]}}, tmp_path) == []


def test_optim_speed_takes_peers_along(tmp_path, monkeypatch):
    """The same requests; what is not told is a dash in the table."""
    install(tmp_path, monkeypatch, vllm=STUB + VLLM)
    monkeypatch.setattr(optim, "ENGINES", ["stage5_optim", "vllm"])
    here = lambda name, job, progress: worker.measure(peers.load(name, job), job)  # noqa: E731
    monkeypatch.setattr(optim_peers, "run_worker", here)
    arguments = ["--model", "tiny", "--device", "cpu", "--repeats", "1", "--tokens", "4", "--workload", "one"]
    assert optim.main(["speed", *arguments, "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "optim-speed.json").read_text())
    assert [row["name"] for row in document["rows"]] == ["5 optim", "vllm"]
    assert document["rows"][1]["one"]["tokens_per_second"] > 0
    assert document["cells"][1][list(document["columns"].values()).index("TTFT, ms")] == "-"


def test_many_requests_of_a_peer_have_their_own_lengths():
    """The workload is made in the peer's process: 256 prompts are too much for a command line."""
    job = {"workload": "mixed_256", "arguments": {"vocab": 250}, "first": 3}
    prompts, lengths = worker.work_of(job)
    assert [len(prompts), lengths] == [3, [request.max_tokens for request in workloads.mixed_256(250)[:3]]]
