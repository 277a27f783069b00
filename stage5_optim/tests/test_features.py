"""Which ideas are on: the defaults of each machine, what is left out and why, and what cannot be asked for."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch

from .. import LLM, SpeculativeConfig, attention
from .. import llm as llm_module
from .. import ops as torch_ops
from ..config import EngineConfig, Resolved
from ..features import Features, resolve_features
from ..llm import logger
from .script import new_engine
from .test_requests import greedy, is_clean, without_numbers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKENDS = ("triton", "flash_attn", "torch")
CHOICES = (None, True, False)


def resolve(monkeypatch, device: torch.device = CUDA, **machine: object) -> Features:
    """On a machine with a new GPU and triton, less what is said; with the options that are given."""
    usual = dict(triton=object(), capability=(9, 0), dtype=torch.bfloat16, head_dim=128)
    usual |= dict(backend="triton", block_size=16)
    machine = usual | machine
    missing = "the package triton is not installed"
    monkeypatch.setattr(attention, "package_obstacle", lambda *_: None if machine["triton"] else missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine["capability"])
    options = {name: value for name, value in machine.items() if name not in usual}
    dtype, backend, block_size = machine["dtype"], machine["backend"], machine["block_size"]
    resolved = Resolved(device, dtype, backend, "", 64, block_size)
    return resolve_features(EngineConfig("tiny", **options), resolved, machine["head_dim"])


def flags(found: Features) -> tuple[bool, bool, bool]:
    return found.fused_kernels, found.cuda_graphs, found.async_scheduling


MACHINES = {
    "cpu": (dict(device=CPU, backend="torch"), (False, False, False)),
    "gpu": (dict(), (True, True, True)),
    "gpu, flash_attn": (dict(backend="flash_attn", block_size=256), (True, True, True)),
    "gpu, torch attention": (dict(backend="torch"), (True, False, True)),
    "gpu, torch attention in small blocks": (dict(backend="torch", block_size=1), (True, False, True)),
    "no triton": (dict(triton=None, backend="torch"), (False, False, True)),
    "no triton, flash_attn": (dict(triton=None, backend="flash_attn"), (False, False, True)),
    "old gpu": (dict(capability=(7, 5), backend="torch"), (False, False, True)),
    "float64": (dict(dtype=torch.float64, backend="torch"), (False, False, True)),
    "large heads": (dict(head_dim=264, backend="torch"), (False, False, True)),
}
WHY_NOT_FUSED = {
    "cpu": "triton needs a GPU",
    "no triton": "the package triton is not installed",
    "no triton, flash_attn": "the package triton is not installed",
    "old gpu": "capability 8.0",
    "float64": "not float64",
    "large heads": "not 264",
}
CPU_GOES_ROUND = "from sequence to sequence on the CPU"
WRITES_EVERYWHERE = "the padding rows, whose slot is -1"


@pytest.mark.parametrize("machine", MACHINES)
def test_defaults(machine, monkeypatch):
    """All that the machine can do is on, and nothing else; on a CPU nothing is."""
    options, wanted = MACHINES[machine]
    assert flags(resolve(monkeypatch, **options)) == wanted


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("fused", "eager", "overlap"), list(itertools.product(CHOICES, repeat=3)))
def test_every_combination(machine, fused, eager, overlap, monkeypatch):
    """What is asked for is what one gets, or a ValueError; what is not said depends on the machine alone."""
    given, (can_fuse, _, is_gpu) = MACHINES[machine]
    backend = given.get("backend", "triton")
    has_fused = can_fuse if fused is None else fused
    can_record = not is_gpu or (backend != "torch" and (backend != "flash_attn" or has_fused))
    given = given | dict(fused_kernels=fused, enforce_eager=eager, async_scheduling=overlap)
    if fused and not can_fuse:
        with pytest.raises(ValueError, match=f"^fused_kernels=True: .*{WHY_NOT_FUSED[machine]}.*; leave it out, or"):
            resolve(monkeypatch, **given)
    elif eager is False and not can_record:
        why = CPU_GOES_ROUND if backend == "torch" else WRITES_EVERYWHERE
        with pytest.raises(ValueError, match=f"^enforce_eager=False: .*{re.escape(why)}.*; leave it out, or say True"):
            resolve(monkeypatch, **given)
    else:
        found = resolve(monkeypatch, **given)
        graphs = is_gpu and can_record if eager is None else not eager
        assert flags(found) == (has_fused, graphs, is_gpu if overlap is None else overlap)
        if not has_fused:
            assert found.ops is torch_ops


@pytest.mark.parametrize("machine", MACHINES)
def test_notes_say_what_was_left_out(machine, monkeypatch):
    """Each with its reason, on a GPU; on a CPU nobody expects them."""
    options, (fused, graphs, is_gpu) = MACHINES[machine]
    notes = resolve(monkeypatch, **options).notes
    assert len(notes) == is_gpu * ((not fused) + (not graphs))
    if is_gpu and not fused:
        assert notes[0].startswith("no fused kernels (") and WHY_NOT_FUSED[machine] in notes[0]
    if is_gpu and not graphs:
        why = CPU_GOES_ROUND if options["backend"] == "torch" else WRITES_EVERYWHERE
        assert notes[-1].startswith("no graphs (") and why in notes[-1]


def test_what_was_switched_off_needs_no_excuse(monkeypatch):
    """Whoever says no himself is not told that it would not have worked."""
    found = resolve(monkeypatch, triton=None, backend="torch", fused_kernels=False, enforce_eager=True)
    assert found.notes == ()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Features(True, True, True), "fused kernels, cuda graphs, async scheduling"),
        (Features(False, True, False), "cuda graphs"),
        (Features(False, False, False), "no fused kernels, graphs or async scheduling"),
        (Features(False, False, True, ("no graphs (x)",)), "async scheduling; no graphs (x)"),
        (
            Features(False, False, False, ("no x",), SpeculativeConfig(method="ngram")),
            "no fused kernels, graphs or async scheduling; up to 4 drafts by ngram; no x",
        ),
    ],
)
def test_how_it_reads(found, text):
    assert str(found) == text


def first_line(caplog, **options) -> str:
    logger.addHandler(caplog.handler)
    try:
        with LLM("tiny", device="cpu", **options):
            pass
    finally:
        logger.removeHandler(caplog.handler)
    (line,) = (r.getMessage() for r in caplog.records if "scheduling of up to" in r.getMessage())
    return line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no fused kernels, graphs or async scheduling"),
        (dict(enforce_eager=False), "tokens, cuda graphs"),
        (dict(async_scheduling=True, enforce_eager=False), "tokens, cuda graphs, async scheduling"),
        (dict(async_scheduling=True, enforce_eager=True), "tokens, async scheduling"),
    ],
)
def test_the_log_line_says_what_is_on(options, words, caplog):
    """The first question about any measurement. On a CPU: what was asked for, and nothing about a GPU's features."""
    assert first_line(caplog, max_model_len=64, **options).endswith(words)


def test_the_log_line_says_why_not(caplog, monkeypatch):
    """A GPU without triton, as far as the line goes."""
    found = resolve(monkeypatch, triton=None, backend="torch")
    monkeypatch.undo()
    monkeypatch.setattr(llm_module, "resolve_features", lambda *_: found)
    line = first_line(caplog, max_model_len=64)
    assert "async scheduling; no fused kernels (the package triton is not installed); no graphs (the torch" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fused_kernels=True), "fused_kernels=True: triton needs a GPU; leave it out, or say False"),
        (dict(fused_kernels="yes"), "fused_kernels='yes': expected one of True, False, None"),
        (dict(enforce_eager="no"), "enforce_eager='no': expected one of True, False, None"),
        (dict(async_scheduling=2), "async_scheduling=2: expected one of True, False, None"),
    ],
)
def test_the_engine_refuses_by_name(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM("tiny", device="cpu", **options)


def test_a_number_is_no_answer():
    """0 equals False and is not it: enforce_eager=0 slipped past the check of what a GPU can record."""
    for name in ("fused_kernels", "enforce_eager", "async_scheduling"):
        for value in (0, 1):
            with pytest.raises(ValueError, match=f"{name}={value}: expected one of True, False, None"):
                EngineConfig("tiny", **{name: value})


@pytest.mark.gpu
def test_gpu_features_as_they_are_found():
    """What the line says is what runs: graphs replayed, or a reason why not."""
    with LLM("tiny", device="cuda", max_model_len=64, num_kv_blocks=64, max_num_seqs=4) as llm:
        assert llm.features.async_scheduling
        assert llm.features.cuda_graphs == (llm.model_runner.graphs is not None)
        assert llm.features.cuda_graphs or any("no graphs" in note for note in llm.features.notes)


NGRAM, DRAFTS = SpeculativeConfig(method="ngram", num_tokens=3), SpeculativeConfig(model="tiny", num_tokens=5)
ANY_FEATURE = [
    dict(async_scheduling=True),
    dict(async_scheduling=True, enforce_eager=False, enable_prefix_caching=True),
    dict(kv_cache_dtype="int8", max_num_batched_tokens=8),
    dict(speculative=NGRAM),
    dict(speculative=DRAFTS, enforce_eager=False),
]


def break_the_guesser(llm: LLM, token_id: int) -> list[int]:
    """A draft model that gives no numbers after this token. Returns the list of all drafts to come."""
    proposer, made = llm._pipeline.speculator.proposer, []
    proposer.model.model.embed_tokens.weight.data[token_id] = math.nan
    propose = proposer.propose

    def propose_and_note(wanted: dict) -> dict:
        found = propose(wanted)
        made.extend(draft for drafts in found.values() for draft in drafts)
        return found

    proposer.propose = propose_and_note
    return made


@pytest.mark.parametrize("options", ANY_FEATURE, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_logits_that_are_no_numbers_end_their_request_alone(options, count):
    """Whatever is planned ahead, padded, shared or guessed: what is not a token is never looked up as one."""
    with new_engine(max_num_seqs=4, max_model_len=64, block_size=4, **options) as llm:
        good = llm.generate([[3, 3] * 5], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
        said = without_numbers(llm, [1, 2])
        drafts = break_the_guesser(llm, said[3]) if llm.config.speculative == DRAFTS else []
        for name, prompt in dict(first=[3, 3] * 5, bad=[1, 2], last=[3, 3] * 5).items():
            llm.add_request(prompt, replace(greedy(8), n=count, logprobs=1), request_id=name)
        done = {}
        while llm.has_unfinished_requests():
            done |= {output.request_id: output.outputs for output in llm.step()}
            llm.block_manager.check_integrity()
        assert [(one.finish_reason, one.token_ids) for one in done["bad"]] == [("error", said)] * count
        assert all(len(one.logprobs) == len(said) for one in done["bad"])
        assert [one.token_ids for one in done["first"] + done["last"]] == [good] * 2 * count
        with pytest.raises(FloatingPointError):
            "".join(llm.stream([1, 2], greedy(8)))
        assert is_clean(llm)
        assert min(drafts, default=0) >= 0


def test_a_beginning_that_was_shared_with_no_numbers_is_not_kept():
    """In front of a token without numbers, K and V of the same step are none either (0 * NaN is NaN), from the second
    layer on: the cache kept them, and every later request with that system prompt failed."""
    with new_engine(max_model_len=64, block_size=4, enable_prefix_caching=True) as llm:
        weight = llm.model_runner.model.model.embed_tokens.weight
        system, kept = [3, 4, 5, 6, 7, 8, 9, 10], weight[200].clone()
        with torch.inference_mode():
            weight[200] = math.nan
        with pytest.raises(FloatingPointError):
            llm.generate([[*system, 200]], greedy(4), use_tqdm=False)
        with torch.inference_mode():
            weight[200] = kept
        found = llm.generate([[*system, 200]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids
        llm.reset_prefix_cache()
        assert found == llm.generate([[*system, 200]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids
        assert is_clean(llm)
