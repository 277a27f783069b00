"""benchmarks.speculative counts drafts rightly, on texts that are what their kind says; its draft models are models."""

import json

import pytest

from benchmarks import draft_cost, speculative, speculative_tables
from benchmarks.optim_engine import Engine
from benchmarks.speculative_draft import first_layers
from benchmarks.speculative_texts import KINDS, prompts, repeated
from stage5_optim import zoo

SMALL = ["--model", "tiny", "--device", "cpu", "--samples", "1", "--kinds", "stories", "--batches", "1", "2"]
SMALL += ["--texts", "2", "--tokens", "12", "--drafts", "2", "--model-drafts", "2", "--model-kinds", "stories"]


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict:
    """One kind of text, two batches, one draft model of each sort: as a user would run it."""
    out = tmp_path_factory.mktemp("speculative")
    assert speculative.main([*SMALL, "--out", str(out)]) == 0
    assert (out / "speculative.png").stat().st_size > 5000
    return json.loads((out / "speculative.json").read_text())


def test_every_cell_has_its_rows(document):
    """No drafts first in each cell; then n-gram drafts; at batch 1 the draft models with a first row of their own."""
    rows = [(row["part"], row["batch"], row["proposer"], row["drafts"]) for row in document["rows"]]
    grid = [("n-gram", batch, *who) for batch in (1, 2) for who in (("none", 0), ("n-gram", 2))]
    models = [("none", 0), ("itself", 2), ("its first 1 layer", 2)]
    assert rows == grid + [("draft model", 1, *who) for who in models]
    assert [len(document[key]["body"]) for key in ("ngram_table", "model_table")] == [2, 2]


def test_the_same_tokens_and_the_same_work(document):
    """Two texts of 12 tokens in each row, 11 behind the first; drafts change none of them."""
    for row in document["rows"]:
        (sample,) = row["samples"]
        counters = sample["counters"]
        assert row["differing"] == 0 and row["first_difference"] is None and row["texts"] == 2
        assert row["tokens"] == 22 and row["tokens_per_second"] == pytest.approx(22 / sample["decode_seconds"])
        turns = counters["decode_tokens"] - counters["drafted_tokens"]
        assert turns + counters["accepted_tokens"] == 22, "each token is a turn's own, or an accepted draft"
        if row["drafts"] == 0:
            assert counters["drafted_tokens"] == 0 and row["speed_up"] == 1


def test_the_target_as_its_own_draft_is_always_right(document):
    """11 tokens behind the first: three turns of 1 + 2 and one of 1 + 1."""
    row = next(row for row in document["rows"] if row["proposer"] == "itself")
    assert row["acceptance_rate"] == 1 and row["tokens_per_step"] == 22 / 8
    assert row["samples"][0]["counters"]["draft_tokens_forwarded"] > 0


def test_losses_are_named():
    rows = [{"name": "a", "drafts": 2, "speed_up": 0.9}, {"name": "b", "drafts": 4, "speed_up": 1.1}]
    assert speculative_tables.losses([*rows, {"name": "c", "drafts": 0, "speed_up": 1.0}]) == ["a: 0.90 x"]


def test_texts_that_differ_are_counted():
    found = speculative.differences([[1, 2, 3], [1, 9, 3], [8, 2, 3]], [[1, 2, 3]] * 3)
    assert found == {"texts": 3, "differing": 2, "first_difference": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_kind_are_many_and_different(kind):
    found = prompts(kind, 64)
    assert len(set(found)) == 64 and max(map(len, found)) < 1000
    assert prompts(kind, 3) == found[:3], "a small batch serves the first of a large one"
    with pytest.raises(ValueError, match="only"):
        prompts(kind, 10_000)


def test_repeated_by_hand():
    """Of 5 outputs, each the end of three tokens: 3 4 1, 4 1 2 are new; 1 2 3 and 2 3 4 stood there; 3 4 9 is new."""
    assert repeated([1, 2, 3, 4], [1, 2, 3, 4, 9]) == 2 / 5
    assert repeated([1], [2, 3]) == 0


def test_first_layers_are_a_model_of_their_own(tmp_path):
    """All layers: the same tokens as the model; one layer: others, from a folder with a tokenizer."""
    files = zoo.locate("tiny")
    args = speculative.parser().parse_args(["--device", "cpu"])
    args.dummy, args.option, found = False, [], {}
    for count in (1, 2):
        args.model = str(first_layers(files.weights, files.tokenizer, count, tmp_path / str(count)))
        with Engine(speculative.engine_row("none", 0, None), args, **speculative.room(1)) as engine:
            assert engine.llm.model_config.num_hidden_layers == count
            found[count] = speculative.run(engine, [[1, 2, 3]], 1, 8)["outputs"]
    args.model = "tiny"
    with Engine(speculative.engine_row("none", 0, None), args, **speculative.room(1)) as engine:
        assert speculative.run(engine, [[1, 2, 3]], 1, 8)["outputs"] == found[2] != found[1]


@pytest.mark.parametrize("wrong", [["--batches", "0"], ["--tokens", "1"], ["--batches", "5000"], ["--kinds", "poems"]])
def test_bad_arguments_end_in_one_line(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        speculative.main(wrong)
    assert ended.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_wrong_drafts_cost_and_bring_nothing(tmp_path):
    """A step brings one token, whatever is drafted; what it must bring to pay is its time over that without drafts."""
    small = ["--batches", "1", "2", "--drafts", "1", "3", "--tokens", "8", "--samples", "2", "--device", "cpu"]
    assert draft_cost.main([*small, "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "draft-cost.json").read_text())
    assert [row["batch"] for row in document["rows"]] == [1, 2] and (tmp_path / "draft-cost.png").exists()
    for row, cells in zip(document["rows"], document["cells"], strict=True):
        none, *others = row["steps"]
        assert none["drafted_tokens"] == 0 and none["tokens_to_pay"] == 1.0 and len(cells) == 3
        for step in others:
            assert step["accepted_tokens"] == 0 and step["steps"] == none["steps"]
            assert 4 * row["batch"] * step["drafts"] <= step["drafted_tokens"] <= 7 * row["batch"] * step["drafts"]
            assert step["tokens_to_pay"] == step["ms_per_step"] / none["ms_per_step"]
