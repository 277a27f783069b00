"""The KV calculator: the numbers of the article, and those of a real engine."""

import pytest

from .. import LLM, kv_calculator
from ..kv_calculator import kv_costs, sequences_that_fit

ARTICLE = dict(layers=32, heads=32, kv_heads=8, head_dim=128, dtype="float16", tokens=2048, sequences=64)


def test_the_numbers_of_the_article():
    """128 KB a token, 256 MB a sequence of 2,048, 16 GB for 64 of them, four times as much without GQA."""
    costs = kv_costs(**ARTICLE)
    assert costs["per_token"] == 131_072
    assert costs["per_sequence"] == 256 * 2**20
    assert costs["in_all"] == 16 * 2**30
    assert costs["per_token_without_gqa"] == 4 * costs["per_token"]


def test_a_card_of_24_gb_holds_36_sequences():
    """15 GB of weights leave 9 GB; a sequence of 2,048 tokens takes a quarter of one."""
    assert sequences_that_fit(24 * 2**30, 15 * 2**30, 256 * 2**20) == 36
    assert sequences_that_fit(8 * 2**30, 15 * 2**30, 256 * 2**20) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_equals_what_the_engine_allocates(dtype):
    """The paper number and the real tensor agree to the byte."""
    with LLM("tiny", dtype=dtype, device="cpu", max_model_len=100) as llm:
        shape = kv_calculator.shape_of("tiny")
        costs = kv_costs(**shape, dtype=dtype, tokens=100, sequences=1)
        assert costs["in_all"] == llm.model_runner.kv_cache.data.nbytes
        assert costs["per_token"] == llm.metrics.kv_bytes_per_token


def test_command_prints_the_numbers(capsys):
    """What the lesson tells the reader to run."""
    kv_calculator.main([])
    text = capsys.readouterr().out
    for number in ("131,072", "256.0 MB", "16.00 GB", "4 times", "36 such sequences"):
        assert number in text


@pytest.mark.parametrize("model, per_token", [("qwen3-8b", 147_456), ("llama-3-8b", 131_072), ("qwen3-0.6b", 114_688)])
def test_published_shapes(model, per_token):
    """By name, without any weights: Qwen3 sets head_dim apart from hidden_size / heads."""
    assert kv_costs(**kv_calculator.shape_of(model), dtype="bfloat16", tokens=1, sequences=1)["per_token"] == per_token


@pytest.mark.parametrize("arguments", [["--layers", "0"], ["--tokens", "-1"], ["--model", "no-such-model"]])
def test_bad_numbers_are_refused_in_one_line(arguments, capsys):
    """No traceback, no table of zeros."""
    with pytest.raises(SystemExit) as exit_info:
        kv_calculator.main(arguments)
    assert exit_info.value.code == 2
    assert arguments[1] in capsys.readouterr().err
