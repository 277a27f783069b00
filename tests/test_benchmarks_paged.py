"""benchmarks.paged runs its rows at the lengths that they name, and says so where one did not."""

import json

import pytest

from benchmarks import paged
from benchmarks.common import run_in_turn


def arguments(*words: str):
    return paged.parser().parse_args([*words, "--device", "cpu"])


def test_every_row_names_its_length():
    """No row leaves max_model_len to the model; those of capacity are named after it."""
    for what in paged.WHAT:
        for model in ("tiny", "qwen3-0.6b"):
            rows = paged.planned(arguments(what, "--model", model))
            assert all(isinstance(r["options"]["max_model_len"], int) for r in rows)
    for r in paged.planned(arguments("capacity")):
        assert f"up to {r['options']['max_model_len']:,} tokens" in r["name"]


def test_tiny_gets_the_positions_that_a_row_needs(tmp_path):
    """Slots of 8,192 of a model that has 8,192: what is reserved is that long, and the file says which model it was."""
    words = ["capacity", "--only", "slots, up to 8,192", "--device", "cpu", "--out", str(tmp_path)]
    assert paged.main(words) == 0
    document = json.loads((tmp_path / "paged-capacity.json").read_text())
    (row,) = document["rows"]
    assert row["options"]["max_model_len"] == row["result"]["max_model_len"] == 8192
    reserved = row["result"]["samples"][0]["series"]["kv_tokens_reserved"]
    assert row["most_at_once"] == 4 and max(reserved) == 4 * 8192 and row["refused"] == 0
    assert document["job"]["model"] == "tiny with 8,192 positions"


def test_tiny_is_left_as_it_is_where_it_is_long_enough():
    short = arguments("capacity", "--only", "2,048")
    with paged.model_for(short) as model:
        assert model == paged.model_name(short) == "tiny"
    with paged.model_for(arguments("capacity", "--model", "qwen3-0.6b")) as model:
        assert model == "qwen3-0.6b"


@pytest.mark.parametrize("wanted", [4096, None])
def test_a_row_that_ran_at_another_length_is_no_result(wanted):
    """As when the length was left to a model of 2,048 positions."""
    (row,) = paged.planned(arguments("capacity", "--only", "slots, up to 8,192"))
    row["options"] |= {"max_model_len": wanted}
    result = {"max_model_len": 2048}
    with pytest.raises(RuntimeError, match=rf"slots, up to 8,192 tokens: .*max_model_len=2048, not {wanted}"):
        paged.check_lengths([row], [result])
    row["options"]["max_model_len"] = 2048
    paged.check_lengths([row], [result])


def test_the_engine_itself_says_how_long_it_is(monkeypatch, tmp_path):
    """The check is made on what the process reports, before a file is written."""

    def shorter(plan, *others):
        for _, job in plan:
            job["options"]["max_model_len"] = 1024
            job["arguments"] = {"num_requests": 2}
        return run_in_turn(plan, *others)

    monkeypatch.setattr(paged, "run_in_turn", shorter)
    with pytest.raises(RuntimeError, match="ran with max_model_len=1024, not 2048"):
        paged.main(["capacity", "--only", "blocks, up to 2,048", "--device", "cpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
