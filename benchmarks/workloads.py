"""Workloads: which requests come, when, and how long their outputs are. Seeded, so every stage gets the same.

A workload is a list of Request in order of arrival. Outputs have a fixed length (end tokens are ignored), so that the
work is the same whatever the model says.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """prompt: token ids. max_tokens: length of the output. arrival: the step (or the second) before which it comes."""

    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0


def _prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def short_and_long(vocab: int = 250) -> list[Request]:
    """The article's first mix: 8 requests at once, seven of 20 new tokens and one of 800."""
    rng = random.Random(1)
    return [Request(_prompt(rng, 16, vocab), 800 if i == 3 else 20) for i in range(8)]


def twelve_and_three(order: str = "spread", vocab: int = 250) -> list[Request]:
    """The article's second mix: 12 requests of 30 new tokens and 3 of 1,500, at once.

    order: "spread" puts one long request into each five; "first" and "last" put the long ones in front or at the end.
    """
    lengths = {
        "spread": [1500 if i % 5 == 4 else 30 for i in range(15)],
        "first": [1500] * 3 + [30] * 12,
        "last": [30] * 12 + [1500] * 3,
    }[order]
    rng = random.Random(2)
    return [Request(_prompt(rng, 16, vocab), length) for length in lengths]


def equal_lengths(num_requests: int = 16, max_tokens: int = 100, vocab: int = 250) -> list[Request]:
    """All outputs alike: there is nothing that continuous batching could gain."""
    rng = random.Random(3)
    return [Request(_prompt(rng, 16, vocab), max_tokens) for _ in range(num_requests)]


def poisson(num_requests: int, rate: float, vocab: int = 250, seed: int = 4) -> list[Request]:
    """Requests that come independently: `rate` per unit of time, prompts of 16 to 64 tokens, outputs of 8 to 64."""
    rng = random.Random(seed)
    requests, now = [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        requests.append(Request(_prompt(rng, rng.randint(16, 64), vocab), rng.randint(8, 64), now))
    return requests


def long_prompts_arrive(
    num_running: int = 4, num_long: int = 4, long_len: int = 512, every: int = 12, vocab: int = 250
) -> list[Request]:
    """Some short prompts are being answered while a long prompt arrives every few steps: do the answers stall?"""
    rng = random.Random(5)
    running = [Request(_prompt(rng, 16, vocab), 96) for _ in range(num_running)]
    return running + [Request(_prompt(rng, long_len, vocab), 8, 16.0 + every * i) for i in range(num_long)]


def mixed_256(vocab: int = 10001) -> list[Request]:
    """The 256 requests that nano-vllm's benchmark made common: prompts and outputs of 100 to 1,024 tokens each.

    142,827 prompt tokens and 133,966 output tokens in all. vocab: a smaller one folds the same ids into it.
    """
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) % vocab for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return [Request(prompt, rng.randint(100, 1024)) for prompt in prompts]


def short_answers(num_requests: int, vocab: int = 250) -> list[Request]:
    """Many requests at once that use little of what they might: 100 to 500 tokens of prompt and output together."""
    rng = random.Random(6)
    return [Request(_prompt(rng, rng.randint(50, 250), vocab), rng.randint(50, 250)) for _ in range(num_requests)]


def long_answers(num_requests: int, prompt_scale: int = 1, vocab: int = 250) -> list[Request]:
    """Prompts of 24 to 40 tokens, times prompt_scale; outputs of 200 to 300; at once: all are let in, and then grow."""
    rng = random.Random(7)
    lengths = [(rng.randint(24, 40) * prompt_scale, rng.randint(200, 300)) for _ in range(num_requests)]
    return [Request(_prompt(rng, prompt, vocab), output) for prompt, output in lengths]


def documents_among_small(num_requests: int = 192, huge_len: int = 1500, vocab: int = 250) -> list[Request]:
    """A backlog of small requests, and now and then four in a row whose prompts hold a whole document."""
    rng = random.Random(8)
    small = [Request(_prompt(rng, rng.randint(24, 40), vocab), rng.randint(80, 120)) for _ in range(num_requests)]
    is_huge = [(i // 4) % 12 == 11 for i in range(num_requests)]
    return [Request(_prompt(rng, huge_len, vocab), 16) if h else r for h, r in zip(is_huge, small, strict=True)]
