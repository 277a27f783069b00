"""What the course's figures compute before they draw: from a trace, by hand."""

from collections import deque

import pytest

from benchmarks import figures, workloads
from stage3_batching import LLM, SamplingParams
from stage4_paged.block_manager import Allocation

LENGTHS = [(6, 5), (3, 2), (3, 2), (3, 2), (3, 2)]  # tokens of the prompt, new tokens: lesson 3's drawing
FIVE = [workloads.Request([7] * prompt, output) for prompt, output in LENGTHS]


def served(policy: str, requests=FIVE) -> tuple[list, dict[str, figures.Seen]]:
    with LLM("tiny", device="cpu", policy=policy, max_num_seqs=2, max_model_len=64) as llm:
        return figures.serve(llm, SamplingParams, requests)


@pytest.mark.parametrize(
    ("policy", "drawn"), [("static", ["AAAAACCEE", "BBbbbDD.."]), ("mixed", ["AAAAAEE", "BBCCDD."])]
)
def test_slots_are_those_of_the_lesson(policy, drawn):
    """Capital: computes; small: holds its slot and computes nothing; a dot: nobody holds it."""

    def letter(request: str, tokens: int) -> str:
        name = "ABCDE"[int(request)] if request else "."
        return name if tokens else name.lower()

    rows = figures.slots_over_time(served(policy)[0], 2)
    assert ["".join(letter(*cell) for cell in row) for row in rows] == drawn


def test_what_requests_saw():
    """Steps until the first token and until the return, and the work between tokens; C waits for B's slot."""
    _, seen = served("mixed")
    a, c = seen["0"], seen["2"]
    assert (a.first_token_steps, a.returned_steps, a.gap_steps) == (1, 5, [1] * 4)
    assert a.gap_work == [2, 4, 2, 4]  # a token of A and: one of B, C's prompt, one of C, D's prompt
    assert (c.first_token_steps, c.returned_steps) == (3, 4)
    assert served("static")[1]["1"].returned_steps == 5  # B waits for A


def test_later_requests_count_from_their_arrival():
    late = [*FIVE[:1], workloads.Request([7] * 3, 2, arrival=2)]
    assert served("mixed", late)[1]["1"].first_token_steps == 1


def test_repeated_share():
    assert figures.repeated_share("a b c d e") == 0
    assert figures.repeated_share("a b c a b c") == 0.25  # abc bca cab abc: one of four
    assert figures.repeated_share("") == 0


def test_table_in_text_and_markdown():
    table = figures.Table(["name", "tokens"], [["a", 1234], ["b", 0.5]], "where")
    assert repr(table) == "name  tokens\na     1,234\nb     0.50\nwhere"
    assert table._repr_markdown_() == "| name | tokens |\n| --- | ---: |\n| a | 1,234 |\n| b | 0.50 |\n\n*where*"


def test_the_log_adds_up_in_the_picture():
    """Blocks of documents and of all others, call by call."""
    log = deque([Allocation(1, "a", 2, 98, "prompt"), Allocation(1, "doc", 60, 38, "prompt")])
    log += [Allocation(2, "a", 1, 37, "growth"), Allocation(3, "doc", -60, 97, "finished")]
    fig = figures.who_holds(list(log), num_blocks=100, big=50, last_step=3)
    small, documents = fig.axes[0].collections[:2]
    assert small.get_paths()[0].vertices[:, 1].max() == 3
    assert documents.get_paths()[0].vertices[:, 1].max() == 63


def test_a_gpu_result_is_not_measured_without_one(monkeypatch):
    monkeypatch.setattr(figures, "default_device", lambda: "cpu")
    with pytest.raises(ValueError, match="no GPU"):
        figures.results("h200/curve.json", measure=True)
    assert figures.results("h200/curve.json")["rows"]
