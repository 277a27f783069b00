"""Many threads on one engine, as the handlers of a web server are: each gets the tokens that it would get alone."""

import sys
import threading

import pytest

from .. import SamplingParams
from .script import new_engine

PROMPTS = [[i + 1, i + 2, i + 3] * (i % 4 + 1) for i in range(24)]
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=8, ignore_eos=True) for i in range(24)]


@pytest.fixture
def often():
    """Threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def test_threads_get_what_they_would_get_alone(often):
    """Their steps fell into one another: full outputs of wrong tokens in one stage, blocks given back twice in another,
    or nobody ever came back."""
    with new_engine(max_model_len=64) as llm:
        params = list(zip(PROMPTS, PARAMS, strict=True))
        expected = [llm.generate([prompt], one, use_tqdm=False)[0].outputs[0] for prompt, one in params]
        found: dict[int, object] = {}

        def serve(first: int) -> None:
            for i in range(first, len(PROMPTS), 4):
                if i % 3 == 0:
                    found[i] = "".join(llm.stream(PROMPTS[i], PARAMS[i]))
                else:
                    found[i] = llm.generate([PROMPTS[i]], PARAMS[i], use_tqdm=False)[0].outputs[0].token_ids

        threads = [threading.Thread(target=serve, args=(first,), daemon=True) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "somebody waits for ever"
        assert found == {i: one.text if i % 3 == 0 else one.token_ids for i, one in enumerate(expected)}
        assert llm.generate([PROMPTS[5]], PARAMS[5], use_tqdm=False)[0].outputs[0].token_ids == expected[5].token_ids


def test_streams_of_many_threads_lose_no_text(often):
    """Text is decoded when it is read, and another thread's step adds to it: what came in between was lost."""
    sys.setswitchinterval(1e-5)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [[i + 1, i + 2, i + 3] for i in range(8)]
    with new_engine(max_model_len=64) as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
        found: dict[int, str] = {}

        def serve(first: int) -> None:
            for i in range(first, len(prompts), 4):
                found[i] = "".join(llm.stream(prompts[i], params))

        threads = [threading.Thread(target=serve, args=(first,), daemon=True) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert found == dict(enumerate(expected))
