"""Speculative: what drafts bring: tokens/s over their number, the batch and the kind of text; and where they lose.

    python -m benchmarks.speculative                                    # smollm2-135m: n-gram drafts, draft models
    python -m benchmarks.speculative --device cpu --batches 1 4 --drafts 2 4 --tokens 48 --samples 2
    python -m benchmarks.speculative --model tiny --kinds code          # in a few seconds

Four kinds of text: two that repeat their prompt (editing, quoting), code, and stories, which should not repeat
anything. All engines are open at once and take turns, cell by cell, so that what disturbs the machine disturbs all of
them. Greedy decoding of a fixed number of tokens; a cell's time begins with the first token, when all prompts have been
computed. Batch 1 serves several texts one after the other. Engines are as by default: without drafts the CPU plans a
step ahead on a GPU, with drafts it cannot.

Draft models, at batch 1: the target as its own draft is always right, and shows what drafts cost; its first layers
alone take less time, and are often wrong. Outputs must be those without drafts; in 16 bits a step of several rows may
round otherwise, so texts that differ are counted and not an error. No text ends before its tokens are made: where an
answer would have ended sooner, the model goes on with what comes to its mind.
"""

import argparse
import gc
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from tqdm import tqdm

from . import gates, roofline
from .common import announce, default_device, environment, results_folder, stages, write_json
from .gap import first_difference
from .optim_engine import Engine, start_device, summary
from .plots_speculative import draw
from .speculative_draft import first_layers
from .speculative_tables import losses, print_tables, tables
from .speculative_texts import KINDS, prompts, repeated

LESSON = "stage 5"

(OPTIM,) = (stage for stage in stages() if stage[5] == "5")
POSITIONS = 1024  # most tokens of a text and its prompt
CONTEXT = 256  # about the mean of these texts, for the roofline
WARM_PROMPT, WARM_TOKENS = 32, 6


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.speculative",
        description="Tokens per second with drafts and without. Two minutes on an H200.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", default="smollm2-135m", help="a name, a folder or a hub id")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8], help="n-gram drafts a step, beside none")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="texts at once")
    p.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="kinds of text")
    p.add_argument("--texts", type=int, default=3, help="so many at least in a cell; a small batch serves them in turn")
    p.add_argument("--tokens", type=int, default=128, help="new tokens of a text")
    p.add_argument("--samples", type=int, default=3, help="runs of a cell, after a warm-up; the median counts")
    p.add_argument("--model-drafts", type=int, nargs="*", default=[2, 4], help="a draft model's; nothing: no such rows")
    p.add_argument("--model-kinds", nargs="+", default=["editing", "stories"], choices=list(KINDS), help="its texts")
    p.add_argument("--layers", type=int, help="of the target, that make the small draft model; left out: four fifths")
    p.add_argument("--out", type=Path, help="folder for the files; left out: out/cpu, out/h200, ...")
    return p


def ngram_rows(args: argparse.Namespace) -> list[dict]:
    """No drafts, then n-gram drafts, more and more."""
    rows = [engine_row("none", 0, None)]
    return rows + [engine_row("n-gram", k, {"method": "ngram", "num_tokens": k}) for k in sorted(args.drafts)]


def model_rows(args: argparse.Namespace, folder: Path) -> list[dict]:
    """The target as its own draft, and its first layers."""
    zoo = importlib.import_module(f"{OPTIM}.zoo")
    files = zoo.locate(args.model)
    count = args.layers or max(1, files.config["num_hidden_layers"] * 4 // 5)
    small = first_layers(files.weights, files.tokenizer, count, folder / "draft")
    pairs = {"itself": args.model, f"its first {count} layer{'s' * (count > 1)}": str(small)}
    return [
        engine_row(name, k, {"model": model, "num_tokens": k})
        for name, model in pairs.items()
        for k in sorted(args.model_drafts)
    ]


def engine_row(proposer: str, drafts: int, config: dict | None) -> dict:
    """One engine, as benchmarks.optim has them, and who drafts how many tokens."""
    name = f"{proposer}, {drafts} drafts" if config else "no drafts"
    options = {"speculative": config} if config else {}
    return {"name": name, "stage": OPTIM, "options": options, "env": {}, "proposer": proposer, "drafts": drafts}


def room(batch: int) -> dict:
    """Options with which a batch of prompts is computed in one step, and nobody waits for blocks."""
    blocks = -(-batch * POSITIONS // 16)
    tokens = batch * POSITIONS
    return dict(max_num_seqs=batch, max_model_len=POSITIONS, max_num_batched_tokens=tokens, num_kv_blocks=blocks)


def encode(engine: Engine, kind: str, total: int) -> list[list[int]]:
    messages = [[{"role": "user", "content": text}] for text in prompts(kind, total)]
    return [engine.llm.tokenizer.apply_chat_template(message) for message in messages]


def run(engine: Engine, texts: list[list[int]], batch: int, tokens: int) -> dict:
    """All texts, so many at once. Seconds and tokens count from where each group has its first tokens."""
    engine.forget()
    params, outputs, decode, made = engine.params(tokens, temperature=0.0), [], 0.0, 0
    start = time.perf_counter()
    for at in range(0, len(texts), batch):
        group = engine.llm.generate(texts[at : at + batch], params, use_tqdm=False)
        times = [output.metrics.token_times for output in group]
        begin = max(t[0] for t in times)
        decode += max(t[-1] for t in times) - begin
        made += sum(t > begin for each in times for t in each)
        outputs += [output.outputs[0].token_ids for output in group]
    seconds = time.perf_counter() - start
    counters, metrics = engine.llm.metrics.counters(), engine.llm.metrics
    sample = {"seconds": seconds, "decode_seconds": decode, "tokens": made, "tokens_per_second": made / decode}
    rates = {"acceptance_rate": metrics.acceptance_rate, "tokens_per_step": metrics.tokens_per_step}
    return sample | rates | {"counters": counters, "outputs": outputs}


def take_turns(engines: list[Engine], texts: list[list[int]], batch: int, args: argparse.Namespace) -> list[list[dict]]:
    """The samples of each engine on one cell. The order turns around after each round."""
    for engine in engines:
        run(engine, [text[:WARM_PROMPT] for text in texts[:batch]], batch, min(args.tokens, WARM_TOKENS))
    samples: list[list[dict]] = [[] for _ in engines]
    for turn in range(args.samples):
        for i in range(len(engines))[:: 1 if turn % 2 == 0 else -1]:
            samples[i].append(run(engines[i], texts, batch, args.tokens))
    return samples


def differences(outputs: list[list[int]], wanted: list[list[int]]) -> dict:
    """How many texts are not those without drafts, and the first position where one parts."""
    places = [first_difference(ours, theirs) for ours, theirs in zip(outputs, wanted, strict=True)]
    places = [place for place in places if place is not None]
    return {"texts": len(outputs), "differing": len(places), "first_difference": min(places, default=None)}


def cell_rows(part: str, plan: list[dict], samples: list[list[dict]], kind: str, batch: int) -> Iterator[dict]:
    """A row of each engine on one cell; the first engine is the one without drafts."""
    wanted = samples[0][0]["outputs"]
    base = median(sample["tokens_per_second"] for sample in samples[0])
    for engine, runs in zip(plan, samples, strict=True):
        found = differences(runs[0]["outputs"], wanted)
        runs = [{key: value for key, value in sample.items() if key != "outputs"} for sample in runs]
        numbers = summary(runs) | {"tokens": runs[0]["tokens"]}
        who = {"part": part, "proposer": engine["proposer"], "drafts": engine["drafts"]}
        where = {"name": f"{kind}, batch {batch}, {engine['name']}", "kind": kind, "batch": batch}
        speed = {"speed_up": numbers["tokens_per_second"] / base}
        yield where | who | numbers | speed | found | {"samples": runs}


@contextmanager
def only_new_rubbish() -> Iterator[None]:
    """Collect garbage before every run, but look only at what is younger than the engines: all of it takes a while."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(part: str, plan: list[dict], kinds: list[str], batches: list[int], args: argparse.Namespace) -> Iterator:
    """Every kind at every batch with every engine of the plan, whose first one drafts nothing.

    Yields the kind, what its texts are like, and the rows of a cell.
    """
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(row, args, **room(max(batches)))) for row in plan]
        stack.enter_context(only_new_rubbish())
        facts = {key: value for key, value in engines[0].facts().items() if key in ("dtype", "backend")}
        cells = [(kind, batch) for kind in kinds for batch in batches]
        for kind, batch in tqdm(cells, unit="cell", desc=part):
            texts = encode(engines[0], kind, max(batch, args.texts))
            samples = take_turns(engines, texts, batch, args)
            rows = [row | facts for row in cell_rows(part, plan, samples, kind, batch)]
            yield kind, about(engines[0], texts, samples[0][0]["outputs"]), rows


def about(engine: Engine, texts: list[list[int]], outputs: list[list[int]]) -> dict:
    """What a kind of text is like, without drafts: its lengths, how much comes again, and the first text."""
    lengths = [len(text) for text in texts]
    shares = [repeated(text, output) for text, output in zip(texts, outputs, strict=True)]
    decode = engine.llm.tokenizer.decode
    example = {"first_prompt": decode(texts[0]), "first_output": decode(outputs[0])}
    return {
        "texts": len(texts),
        "prompt_tokens": [min(lengths), max(lengths)],
        "repeated": sum(shares) / len(shares),
    } | example


def add(path: Path, document: dict, found: Iterator) -> None:
    """Take in what `measure` yields, judge the rows, make the tables, write the file: a run may be cut later."""
    for kind, texts, rows in found:
        known = document["kinds"].get(kind)
        document["kinds"][kind] = texts if known is None or known["texts"] < texts["texts"] else known
        document["rows"] += rows
    seconds = [[sample["decode_seconds"] for sample in row["samples"]] for row in document["rows"]]
    document["rows"] = gates.mark(document["rows"], gates.wide_spread(seconds))
    document |= tables(document["rows"]) | {"losses": losses(document["rows"])}
    write_json(path, document)


def check(cli: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with one line for what cannot be run."""
    if min(args.texts, args.samples, *args.batches, *args.drafts, *args.model_drafts) < 1:
        cli.error("--texts, --samples, --batches, --drafts and --model-drafts must be at least 1")
    if args.tokens < 2:
        cli.error("--tokens must be at least 2")
    try:
        for kind in {*args.kinds, *args.model_kinds}:
            prompts(kind, max(args.texts, *args.batches))
    except ValueError as error:
        cli.error(str(error))


def main(argv: list[str] | None = None) -> int:
    cli = parser()
    args = cli.parse_args(argv)
    check(cli, args)
    args.dummy, args.option = False, []
    card = roofline.show(args.model, args, [(batch, CONTEXT) for batch in args.batches])
    device = args.device or default_device()
    names = ("model", "drafts", "batches", "kinds", "texts", "tokens", "samples", "model_drafts")
    names += ("model_kinds", "layers")
    job = {"what": "speculative"} | {name: getattr(args, name) for name in names}
    document = {"environment": environment(device), "job": job, "roofline": card, "kinds": {}, "rows": []}
    path = (args.out or results_folder(device)) / "speculative.json"
    start_device(args)
    add(path, document, measure("n-gram", ngram_rows(args), args.kinds, args.batches, args))
    if args.model_drafts:
        with tempfile.TemporaryDirectory() as folder:
            plan = [*ngram_rows(args)[:1], *model_rows(args, Path(folder))]
            add(path, document, measure("draft model", plan, args.model_kinds, [1], args))
    print_tables(document)
    draw(document, path.with_suffix(".png"))
    announce(path, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
