"""Sampling: which tokens may be drawn, how often each is, and on what a draw depends.

Draws are tested as a statistician would, but never at random: seeds are fixed, so each test gives one result for ever.
"""

import itertools
import math
import random
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .. import SamplingParams, sampling
from ..sampling import NO_TOKEN, apply_penalties, gumbel_noise, sample, top_logprobs
from .script import complete, engine, force, scripted

PROBS = [0.50, 0.25, 0.15, 0.10]
DRAWS = 8_000
SMALL = torch.tensor([1.0, 0.5, 0.0, -0.3, -0.9, -1.2, 2.1, 0.2])


def row(seed=0, position=0, token_ids=(0,), stop_token_ids=(), **params) -> SimpleNamespace:
    """What `sample` reads of a sequence that has made `position` tokens."""
    return SimpleNamespace(
        params=SamplingParams(**params),
        seed=seed,
        token_ids=list(token_ids),
        num_output_tokens=position,
        stop_token_ids=stop_token_ids,
    )


def rows_with(field: str, values: Iterable[int], **fields) -> list[SimpleNamespace]:
    """Rows that differ in one field alone."""
    model = row(**fields)
    return [SimpleNamespace(**vars(model) | {field: value}) for value in values]


def draw(logits: torch.Tensor, seqs: list) -> list[int]:
    """One draw from the same logits [vocab] for each sequence."""
    return sample(logits.expand(len(seqs), -1), seqs).tolist()


def seeds(n: int, **params) -> list:
    return rows_with("seed", range(n), **params)


def chi_square(ids: list[int], probs: torch.Tensor) -> float:
    """The probability that draws from `probs` look at least as odd as these. Draws of probability 0 make it 0."""
    counts = torch.bincount(torch.tensor(ids), minlength=len(probs)).double()
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    expected = probs[possible].double() * len(ids)
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


# ---------------------------------------------------------------- temperature


TEMPERATURES = [0, 1e-8, 1e-5, 1e-4, 0.01, 1.0]


def steep_logits(dtype: torch.dtype) -> torch.Tensor:
    """Largest 11.06, at the last but one place, so that a row of infinities would give another id."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)).clamp(-3, 3) * 3
    logits[-2] = 11.06
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperatures_are_greedy_in_every_dtype(dtype):
    """11.06 / 1e-5 is infinite in half precision, softmax of it NaN: the draw crashed, or gave id 0."""
    logits = steep_logits(dtype)
    for seed in range(50):
        ids = draw(logits, [row(seed=seed, temperature=t, top_p=0.9) for t in TEMPERATURES])
        assert ids[:-1] == [48] * 5, f"seed {seed}: temperatures {TEMPERATURES[:-1]} must take the best, id 48"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_greedy_neighbour_does_not_poison_a_row(dtype):
    """NaN from one row's temperature 0 spread over the batch. The row with temperature 1 must draw as when alone."""
    logits = steep_logits(dtype)
    logits[:8] = 10.5  # so that temperature 1 has a choice
    together, alone = [], []
    for seed in range(100):
        rows = [row(seed=seed, temperature=t, top_p=0.9) for t in TEMPERATURES]
        together.append(draw(logits, rows)[-1])
        alone.append(draw(logits, rows[-1:])[0])
    assert together == alone
    assert len(set(alone)) > 4, "nothing was drawn: all rows took the same id"


def test_greedy_takes_the_exact_maximum():
    """Two logits that differ in their last bit only: scaling before the argmax makes them equal and takes the first."""
    logits = torch.full((9,), -1.0)
    logits[3] = 11.06
    logits[7] = torch.nextafter(logits[3], torch.tensor(math.inf))
    rows = [row(temperature=t) for t in (0, 1e-8, 9e-6)] + [row(temperature=0, top_k=3, top_p=0.5), row(temperature=1)]
    assert draw(logits, rows)[:4] == [7, 7, 7, 7]
    assert draw(logits, rows[:4]) == [7, 7, 7, 7]


def test_numbers_of_numpy_are_numbers():
    """Sweeps are written with numpy. They become Python's own, so that a seed of 64 bits is not cut off in sums."""
    given = dict(max_tokens=np.int64(9), seed=np.int64(2**62), temperature=np.float32(0.5), top_p=torch.tensor(0.25))
    params = SamplingParams(**given, stop_token_ids=np.array([5, 3]), stop="x")
    expected = SamplingParams(max_tokens=9, seed=2**62, temperature=0.5, top_p=0.25, stop_token_ids=[5, 3], stop="x")
    assert params == expected and repr(params) == repr(expected)
    assert SamplingParams(stop_token_ids=[np.int64(5), torch.tensor(3)]).stop_token_ids == (5, 3)
    for bad in (np.int64(0), np.float32(2), np.array([1, 2]), np.bool_(True), np.int64):
        with pytest.raises(ValueError, match="max_tokens="):
            SamplingParams(max_tokens=bad)


@pytest.mark.parametrize("value", [-1, -1e-9, math.nan, math.inf, -math.inf, "1", None, True, 10**400])
def test_impossible_temperatures_are_refused(value):
    """A negative temperature turned the distribution over; NaN passed every comparison and reached the sampler."""
    with pytest.raises(ValueError, match="temperature="):
        SamplingParams(temperature=value)


# ---------------------------------------------------------------- top_p and top_k


def kept(logits: torch.Tensor, n: int = 600, **params) -> set[int]:
    """The ids that can be drawn: all that n seeds drew (with 600, what has 0.1 is missed once in 10^27)."""
    return set(draw(logits, seeds(n, **params)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top_p", "count"), [(0.49, 1), (0.74, 2), (0.76, 3), (1.0, 4), (1e-8, 1)])
def test_top_p_keeps_the_token_that_crosses(top_p, count, dtype):
    """Off by one: the token that crosses p was dropped, so that the nucleus was too small, or empty for a tiny p.
    Kept ids must be mapped back from the sorted order, so every order of the ids is tried."""
    for order in itertools.permutations(range(4)):
        logits = torch.tensor([PROBS[rank] for rank in order]).log().to(dtype)
        best = {order.index(rank) for rank in range(count)}
        assert kept(logits, top_p=top_p) == best, f"probabilities {[PROBS[rank] for rank in order]}, top_p={top_p}"


def test_top_p_keeps_one_when_the_best_alone_exceeds_it():
    """With 0.99 against top_p 0.5 the nucleus was empty, and an id of probability 0 came out."""
    assert kept(torch.tensor([0.01, 0.99]).log(), top_p=0.5) == {1}


def test_top_p_adds_up_in_high_precision():
    """Adding a thousand times 0.001 in bfloat16 stops growing at 0.25, so the nucleus was everything."""
    ids = kept(torch.zeros(1000, dtype=torch.bfloat16), n=4000, top_p=0.4995)
    assert ids <= set(range(500)), "ids outside of the half that top_p keeps"
    assert len(ids) > 480, "a part of the nucleus is never drawn"


@pytest.mark.parametrize("value", [0, 1.1, -0.1, math.nan, True, "0.9", None])
def test_impossible_top_p_is_refused(value):
    """top_p=0 kept nothing; 1.1 and -0.1 were taken silently."""
    with pytest.raises(ValueError, match="top_p="):
        SamplingParams(top_p=value)


def test_top_k_keeps_exactly_k_of_equals():
    """A threshold at the k-th value keeps all that tie with it; a user who asks for 2 gets 4."""
    ids = kept(torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]), top_k=2)
    assert len(ids) == 2 and 0 not in ids


@pytest.mark.parametrize(("top_k", "best"), [(1, {2}), (2, {2, 0}), (3, {2, 0, 3}), (4, {0, 1, 2, 3})])
def test_top_k_keeps_the_best(top_k, best):
    """Kept by position instead of by rank, the ids of a shuffled distribution are the wrong ones."""
    assert kept(torch.tensor([0.25, 0.10, 0.50, 0.15]).log(), top_k=top_k) == best


@pytest.mark.parametrize("top_k", [0, -1, 5, 100_000])
def test_top_k_off_or_above_the_vocabulary_keeps_all(top_k):
    """A k above the vocabulary crashed topk; -1 indexed from the end."""
    assert kept(torch.tensor(PROBS).log(), top_k=top_k) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left():
    """Of the three best the first has 0.556: top_p 0.54 keeps it alone. Without renormalising it keeps two."""
    logits = torch.tensor(PROBS).log()
    assert kept(logits, top_p=0.54) == {0, 1}
    assert kept(logits, top_k=3, top_p=0.54) == {0}
    assert kept(logits, top_k=2, top_p=0.999) == {0, 1}


def test_each_row_has_its_own_limits():
    """A batch that took the first row's top_k and top_p for all gave neighbours each other's nucleus."""
    logits = torch.tensor(PROBS).log()
    limits = [dict(top_k=1), dict(top_p=0.74), dict(), dict(top_k=3), dict(temperature=0)]
    ids = draw(logits, [row(seed=seed, **limit) for seed in range(400) for limit in limits])
    assert [set(ids[i :: len(limits)]) for i in range(len(limits))] == [{0}, {0, 1}, {0, 1, 2, 3}, {0, 1, 2}, {0}]


# ---------------------------------------------------------------- penalties


def test_repetition_penalty_against_hand_computation():
    """Dividing a negative score by the factor rewards the repetition. Prompt tokens count, twice seen counts once,
    the neighbour keeps its scores, and the raw logits, which the logprobs are made of, stay as they are."""
    logits = torch.tensor([[3.0, -1.0, 0.0, 2.5, -0.5]] * 2)
    before = logits.clone()
    rows = [row(token_ids=(1, 0, 0, 0), position=2, repetition_penalty=2.0), row(token_ids=(1, 0))]
    expected = torch.tensor([[1.5, -2.0, 0.0, 2.5, -0.5], [3.0, -1.0, 0.0, 2.5, -0.5]])
    assert torch.equal(apply_penalties(logits, rows), expected)
    rows[0].params = SamplingParams(repetition_penalty=2.0, temperature=0)
    rows[1].params = SamplingParams(temperature=0)
    assert sample(logits, rows).tolist() == [3, 0]
    assert torch.equal(logits, before), "the raw logits were changed in place"


def test_repetition_penalty_changes_the_distribution():
    """The penalty was applied to greedy rows only. Drawn tokens must follow softmax of the penalised scores."""
    logits = torch.tensor([1.0, -0.5, 0.3])
    rows = seeds(5000, token_ids=(0, 1), repetition_penalty=1.5)
    assert chi_square(draw(logits, rows), torch.tensor([1 / 1.5, -0.75, 0.3]).softmax(0)) > 1e-3


@pytest.mark.parametrize("value", [0, -1.5, math.nan, math.inf, "1", True])
def test_impossible_penalties_are_refused(value):
    """A penalty of 0 divides by zero."""
    with pytest.raises(ValueError, match="repetition_penalty="):
        SamplingParams(repetition_penalty=value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_forbids_the_end(temperature):
    """The end token was drawn and dropped, so that the output had holes. It must have no chance, and only so long."""
    logits = torch.tensor([0.0, 0.1, 9.0, 30.0])
    ends = dict(stop_token_ids=(2, 3), min_tokens=2, temperature=temperature)
    for position, allowed in [(0, {0, 1}), (1, {0, 1}), (2, {3})]:
        ids = set(draw(logits, seeds(100, position=position, **ends)))
        assert ids <= allowed, f"output token {position} may be one of {allowed}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_token(bad, temperature):
    """A model that overflowed in 16 bits said "!!!!!!!!", id 0 for ever. Neighbours must draw as when alone."""
    logits, seqs = SMALL.repeat(3, 1), seeds(3, temperature=temperature)
    logits[1, 4] = bad
    ids = sample(logits, seqs).tolist()
    assert ids[1] == NO_TOKEN
    assert [ids[0], ids[2]] == [draw(SMALL, [seqs[i]])[0] for i in (0, 2)]
    assert draw(torch.full((8,), -math.inf), seqs) == [NO_TOKEN] * 3


@pytest.mark.parametrize("params", [{}, dict(temperature=1.0, top_p=0.5), dict(logprobs=2, repetition_penalty=1.5)])
def test_a_model_that_gives_no_numbers_is_an_error(params):
    """What was said before stays, and the engine can be used again."""
    llm = engine()
    rows = force([65, 66, 67, 68], llm.model_config.vocab_size)
    rows[2] = math.nan
    with scripted(llm, rows, prompt_len=1):
        with pytest.raises(FloatingPointError, match="dtype='bfloat16' or 'float32'"):
            complete(llm, [9], max_tokens=4, **params)
        pieces, said = llm.stream([9], SamplingParams(max_tokens=4, **params)), []
        with pytest.raises(FloatingPointError):
            said.extend(pieces)
    assert "".join(said) == llm.tokenizer.decode([65, 66])
    assert complete(llm, [9], max_tokens=4).finish_reason == "length"


# ---------------------------------------------------------------- the distribution


DISTRIBUTIONS = [
    (dict(), SMALL.softmax(0)),
    (dict(temperature=0.7), (SMALL / 0.7).softmax(0)),
    (dict(temperature=2.0), (SMALL / 2).softmax(0)),
    (dict(temperature=0.7, top_k=3), (SMALL / 0.7).masked_fill(SMALL < 0.5, -math.inf).softmax(0)),
    (dict(top_p=0.7), SMALL.masked_fill(SMALL < 0.5, -math.inf).softmax(0)),
]


@pytest.mark.parametrize(("params", "probs"), DISTRIBUTIONS)
def test_draws_follow_softmax_over_seeds(params, probs):
    """A race with the wrong noise, or temperature after the filter, still looks random: only counting tells."""
    assert chi_square(draw(SMALL, seeds(DRAWS, **params)), probs) > 1e-3


@pytest.mark.parametrize(("params", "probs"), DISTRIBUTIONS[:2])
def test_draws_follow_softmax_over_positions(params, probs):
    """Noise that depends weakly on the position gives one request the same luck at every token."""
    rows = rows_with("num_output_tokens", range(DRAWS), seed=5, **params)
    assert chi_square(draw(SMALL, rows), probs) > 1e-3


def test_rare_tokens_are_as_rare_as_they_should_be():
    """Noise from 24 random bits cannot reach its own tail: tokens of probability 0.0005 never came, or too often."""
    probs = torch.full((200,), 0.0005)
    probs[60] = 1 - 199 * 0.0005
    rare = sum(token != 60 for token in draw(probs.log(), seeds(DRAWS)))
    assert abs(rare - DRAWS * 0.0995) < 4 * math.sqrt(DRAWS * 0.0995 * 0.9005)


def test_successive_draws_are_independent():
    """With seed + position as the key, request 5's token 4 has the luck of request 6's token 3, and so on for ever.
    Pairs of draws must be as frequent as the product of their probabilities."""
    probs = torch.tensor(PROBS)
    here, later = (draw(probs.log(), seeds(DRAWS, position=position)) for position in (3, 4))
    joint = torch.outer(probs, probs).flatten()
    for step in range(4):  # against the draws of the seed that is `step` higher
        for one, other in [(here, later), (later, here), (here, here)][: 3 if step else 2]:
            pairs = [4 * a + b for a, b in zip(one[: DRAWS - step], other[step:], strict=True)]
            assert chi_square(pairs, joint) > 1e-3, f"the draws of seeds {step} apart are not independent"


def test_noise_is_uncorrelated():
    """Ids, positions and seeds that differ in one bit must not share luck: correlations stay within chance."""
    n = 5_000
    by_seed = gumbel_noise(list(range(n)), [0] * n, torch.empty(n, 16))
    by_position = gumbel_noise([0] * n, list(range(n)), torch.empty(n, 16))
    high_bits = gumbel_noise([seed << 32 for seed in range(n)], [0] * n, torch.empty(n, 16))
    for name, noise in [("seeds", by_seed), ("positions", by_position), ("high halves of seeds", high_bits)]:
        between_ids = torch.corrcoef(noise.T) - torch.eye(16)
        successive = torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1]
        assert between_ids.abs().max() < 5 / math.sqrt(n), f"token ids share luck over {name}"
        assert successive.abs() < 5 / math.sqrt(16 * n), f"neighbouring {name} share luck"
        assert abs(noise.mean() - 0.5772) < 0.03 and abs(noise.var() - math.pi**2 / 6) < 0.05, "not Gumbel's"


# ---------------------------------------------------------------- what a draw depends on


@given(st.integers(-(2**64), 2**64), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_draw_is_the_same_in_any_batch(seed, neighbours, rnd):
    """One random stream for the batch made a seeded request depend on its neighbours and on its place among them."""
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(3))
    mine = row(seed=seed, position=rnd.randrange(500), temperature=0.8, top_k=rnd.choice([0, 20]))
    alone = sample(logits[:1], [mine]).item()
    others = [row(seed=rnd.randrange(99), temperature=rnd.choice([0, 1.0]), top_p=0.9) for _ in range(neighbours)]
    for place in range(neighbours + 1):
        batch = [*others[:place], mine, *others[place:]]
        rows = torch.cat((logits[1 : place + 1], logits[:1], logits[place + 1 : neighbours + 1]))
        assert sample(rows, batch)[place].item() == alone, f"another draw at place {place} of {neighbours + 1}"


def sixteen(seed: int) -> list[int]:
    return draw(torch.zeros(50), [row(seed=seed, position=position) for position in range(16)])


def test_all_64_bits_of_a_seed_count():
    """Hashing the low 32 bits only, seeds made by a clock in nanoseconds or by shifting a user's id collide."""
    distinct = [0, 1, 2, 1 << 31, 1 << 32, 1 << 33, (1 << 32) + 1, 1 << 62, 1 << 63, -1, -2, -(2**63) + 7]
    outputs = {seed: sixteen(seed) for seed in distinct}
    for one, other in itertools.combinations(distinct, 2):
        same = sum(a == b for a, b in zip(outputs[one], outputs[other], strict=True))
        assert same < 6, f"seeds {one} and {other} agree in {same} of 16 draws"


@pytest.mark.parametrize("seed", [2**100 + 1, -(2**100), 10**30])
def test_huge_seeds_work(seed):
    """A seed beyond 64 bits overflowed the tensor it was put in."""
    assert sixteen(seed) == sixteen(seed)
    assert SamplingParams(seed=seed).seed == seed


def test_global_generators_are_untouched():
    """torch.multinomial and manual_seed use the global generator: the engine disturbed the user's own experiments."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    draw(SMALL, seeds(10, temperature=0.9, top_k=5, top_p=0.9))
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state


# ---------------------------------------------------------------- logprobs


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=0.0),
        dict(temperature=0.5, top_p=0.5, seed=1),
        dict(temperature=1.0, top_k=2, seed=2),
        dict(temperature=0.0, repetition_penalty=1.5),
        dict(temperature=3.0, min_tokens=5, seed=3),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 3, 259])
def test_logprobs_are_of_the_raw_logits(params, count):
    """They changed with temperature and top_p, were positive, or lacked the sampled token. One entry per output token,
    each log-softmax of what the model said, with its rank."""
    llm = engine()
    rows = 2 * torch.randn(5, 259, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    with scripted(llm, rows, prompt_len=2):
        request = SamplingParams(**params, max_tokens=5, ignore_eos=True, logprobs=count)
        output = llm.generate([[3, 4]], request, use_tqdm=False)[0].outputs[0]
    assert len(output.logprobs) == len(output.token_ids) == 5
    for token_id, entry, expected in zip(output.token_ids, output.logprobs, rows.log_softmax(-1), strict=True):
        order = expected.argsort(descending=True).tolist()
        assert set(entry) == {token_id, *order[:count]}
        for i, one in entry.items():
            assert one.logprob == pytest.approx(expected[i].item(), abs=1e-9) and one.logprob <= 0
            assert one.rank == order.index(i) + 1
            assert one.decoded_token == llm.tokenizer.token_text(i)


def test_no_logprobs_unless_asked():
    """logprobs=0 means the chosen token's, None means none: taking 0 for None loses it."""
    llm = engine()
    outputs = llm.generate(
        [[3]] * 2, [SamplingParams(max_tokens=2, ignore_eos=True, logprobs=n) for n in (None, 0)], use_tqdm=False
    )
    assert outputs[0].outputs[0].logprobs is None
    assert [len(entry) for entry in outputs[1].outputs[0].logprobs] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logprobs_of_half_precision_logits_are_exact(dtype):
    """log-softmax in 16 bits is wrong in its third digit and can be positive for a certain token."""
    logits = torch.tensor([11.06, 1.0, -3.0, 2.0]).to(dtype)
    expected = logits.double().log_softmax(0)
    for i, logprob, rank in top_logprobs(logits, token_id=2, count=2):
        assert logprob == pytest.approx(expected[i].item(), abs=1e-5) and logprob <= 0
        assert rank == {0: 1, 3: 2, 2: 4}[i]


def test_noise_is_finite_at_the_edges_of_the_hash(monkeypatch):
    """A hash of 0 or of all ones must not become an infinite noise: it would win, or lose, whatever the logits say."""
    edges = torch.tensor([[0, 1, 2**32 - 2, 2**32 - 1]])
    monkeypatch.setattr(sampling, "hash_bits", lambda *_: edges)
    for dtype in (torch.float32, torch.float64):
        noise = gumbel_noise([0], [0], torch.zeros(1, 4, dtype=dtype))[0]
        assert noise.isfinite().all() and noise.dtype == dtype
        assert noise[0] > noise[1] > 20 and noise[3] <= noise[2] < -2
