"""The benchmarks run, count what they claim to count, and write files that say where the numbers come from."""

import json
from functools import partial

import pytest
from tqdm import tqdm

from benchmarks import compare, curve, gap, interleave, moves, paged, prefix
from benchmarks.common import REFERENCE, VARIANTS, colour, engines, run_worker, stages

SMALL = ["--model", "tiny", "--device", "cpu", "--samples", "1"]


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict:
    """One small comparison of everything there is, as a user would run it."""
    out = tmp_path_factory.mktemp("compare")
    assert compare.main([*SMALL, "--max-tokens", "8", "--runs", "2", "--out", str(out)]) == 0
    assert (out / "compare.png").stat().st_size > 5000
    return json.loads((out / "compare.json").read_text())


def test_every_engine_has_a_row(document):
    """A stage that is in the tree and not in the table would be a silent omission."""
    assert [row["engine"] for row in document["rows"]] == [*engines(), *VARIANTS] == [REFERENCE, *stages(), *VARIANTS]


def test_all_rows_made_the_same_tokens(document):
    """Greedy tokens of tiny in float32 are the same everywhere, and they vary."""
    assert [d for d in document["differences"] if d["engine"] != "stage5_int8_KV"] == []
    runs = document["results"][REFERENCE]["samples"][0]["runs"]
    assert all(len(set(run["token_ids"])) > 2 for run in runs)


def test_counters_of_the_table(document):
    """Stage 1 forwards the sum, a cached engine p + m - 1; KV bytes are reserved and used tokens times bytes."""
    lengths = [len(ids) for ids in document["results"][REFERENCE]["prompt_token_ids"]]
    rows = {row["engine"]: row for row in document["rows"]}
    cached = sum(p + 8 - 1 for p in lengths)
    assert rows["stage1_naive"]["tokens_forwarded"] == sum(p + i for p in lengths for i in range(8))
    assert rows["stage2_kvcache"]["tokens_forwarded"] == rows[REFERENCE]["tokens_forwarded"] == cached
    assert rows["stage1_naive"]["kv_bytes_reserved"] == 0
    per_token = 2 * 2 * 2 * 64 * 4
    assert rows["stage2_kvcache"]["kv_bytes_used"] == rows[REFERENCE]["kv_bytes_used"] == (max(lengths) + 7) * per_token
    assert rows["stage2_kvcache"]["kv_bytes_reserved"] == 2048 * per_token


def test_result_says_where_it_comes_from(document):
    """A number without device, versions, date and command cannot be judged."""
    env = document["environment"]
    assert env["device"] == "cpu" and env["device_name"] and env["versions"]["torch"]
    assert env["date"].startswith("20") and env["command"].startswith("python -m benchmarks.")
    assert len(document["results"]["stage2_kvcache"]["samples"]) == 2  # runs of one process


def test_curve_writes_positions_and_sums(tmp_path, monkeypatch):
    """The figure's data: one time per position, and a sum that grows; with tqdm's bars switched off, too."""
    monkeypatch.setattr("benchmarks.curve.tqdm", partial(tqdm, disable=True))
    arguments = ["--positions", "8", "24", "--engines", "stage2_kvcache", "--out", str(tmp_path)]
    assert curve.main([*SMALL, *arguments]) == 0
    (row,) = json.loads((tmp_path / "curve.json").read_text())["rows"]
    assert row["positions"] == [8, 24] and len(row["milliseconds"]) == 2
    assert 0 < row["seconds_in_all"][0] < row["seconds_in_all"][1]
    assert (tmp_path / "curve.png").exists()


def test_a_difference_is_judged_by_the_gap():
    """Only a near tie can be turned by rounding; a longer or shorter output is a difference too."""
    assert gap.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert gap.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert gap.first_difference([1, 2], [1, 2, 3]) == 2


def test_wrong_tokens_are_reported_and_fail(document):
    """A stage that writes another text must not pass as rounding."""
    results = json.loads(json.dumps({name: document["results"][name] for name in (REFERENCE, *stages())}))
    run = results["stage2_kvcache"]["samples"][0]["runs"][1]
    run["token_ids"][3] = (run["token_ids"][3] + 1) % 250
    differences = compare.check_same(results, compare.model_folder("tiny"))
    assert [(d["engine"], d["prompt"], d["output_position"]) for d in differences] == [("stage2_kvcache", 1, 3)]
    assert not compare.print_agreement(differences, list(results))


def test_a_variant_that_rounds_may_differ(document, capsys):
    """int8 KV is compared and reported; drafts must not change a token."""
    results = json.loads(json.dumps(document["results"]))
    for engine, may in (("stage5_int8_KV", True), ("stage5_n-gram_drafts", False)):
        changed = json.loads(json.dumps(results[engine]))
        ids = changed["samples"][0]["runs"][0]["token_ids"]
        ids[:] = [(i + 1) % 250 for i in ids]
        pair = {REFERENCE: results[REFERENCE], engine: changed}
        differences = compare.check_same(pair, compare.model_folder("tiny"))
        assert [d["engine"] for d in differences if d["prompt"] == 0] == [engine]
        assert compare.print_agreement(differences, list(pair)) is may
        assert f"{engine}, prompt 0, output position 0" in capsys.readouterr().out


def test_variants_are_what_they_say(document):
    """Drafts are drafted and still in no output but the same; int8 takes a little more than a quarter of float32."""
    rows = {row["engine"]: row for row in document["rows"]}
    counters = document["results"]["stage5_n-gram_drafts"]["samples"][0]["counters"]
    assert rows["stage5_n-gram_drafts"]["tokens"] == rows["stage5_optim"]["tokens"]
    assert counters["drafted_tokens"] >= counters["accepted_tokens"] >= 0
    plain, small = (rows[name]["kv_bytes_used"] for name in ("stage5_optim", "stage5_int8_KV"))
    assert small / plain == 66 / (4 * 64)


def test_a_failing_engine_says_why():
    """The worker's own error must reach the user."""
    with pytest.raises(RuntimeError, match="no such folder"):
        run_worker("stage1_naive", {"model": "no-such-model", "prompts": ["x"], "max_tokens": 2, "samples": 1}, print)


def test_colours_are_fixed_and_differ():
    """One colour per stage, in every figure."""
    names = [*engines(), *VARIANTS]
    assert len({colour(engine) for engine in names}) == len(names)


@pytest.mark.parametrize("arguments", [["--samples", "0"], ["--model", "no-such-model"], ["--engines", "vllm-9"]])
def test_bad_arguments_end_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        compare.main(arguments)
    assert exit_info.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_story_of_paged_memory(tmp_path):
    """32 at once: nobody is preempted; the table's cells come from what was counted."""
    assert paged.main(["story", "--only", "32 at once", "--device", "cpu", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "paged-story.json").read_text())
    (row,), (cells,) = document["rows"], document["cells"]
    assert row["preemptions"] == 0 and cells[list(document["columns"]).index("preemptions")] == "0"
    series = row["result"]["samples"][0]["series"]
    assert max(series["kv_tokens_reserved"]) <= 560 * 16 and len(series["running"]) == row["steps"]
    assert (tmp_path / "paged-story.png").stat().st_size > 5000


def test_moves_are_timed(tmp_path):
    """Swap and recompute of two lengths, and the bytes of what is moved."""
    assert moves.main(["--models", "tiny", "--lengths", "32", "64", *SMALL[2:], "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "paged-moves.json").read_text())
    assert [row["bytes"] for row in document["rows"]] == [n * 2 * 2 * 2 * 64 * 4 for n in (32, 64)]
    times = ("swap_out_ms", "swap_in_ms", "recompute_ms", "decode_ms")
    assert all(row[key] > 0 for row in document["rows"] for key in times)
    assert document["pieces"]["tiny"]["one block of one layer"]["bytes"] == 16 * 2 * 2 * 64 * 4


def test_interleaved_engines_serve_the_same(tmp_path):
    """Slots and blocks in turn: the same steps and tokens, less memory."""
    assert interleave.main(["--requests", "2", "--device", "cpu", "--out", str(tmp_path)]) == 0
    slots, blocks, large = json.loads((tmp_path / "interleave.json").read_text())["rows"]
    for key in ("steps", "tokens_forwarded", "attention_pairs"):
        assert slots["counters"][key] == blocks["counters"][key] == large["counters"][key]
    assert blocks["kv_bytes_reserved"] < large["kv_bytes_reserved"] < slots["kv_bytes_reserved"]


def test_prefix_claims_are_as_on_paper(tmp_path):
    """N requests that share 40 % of their context: memory and prefill tokens to the token; the article's 200 + 50."""
    assert prefix.main(["claims", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "prefix-claims.json").read_text())["rows"]
    assert all(row["prefill_tokens_cached"] == row["prefill_on_paper"] for row in rows)
    assert {row["requests"]: round(row["saved"], 3) for row in rows if row["shared"] == 160}[4] == 0.3
    assert rows[-1]["prefill_tokens_cached"] == 250 + 58
