"""Gallery: one prompt under many sampling parameters, to see what each does to a text.

    python -m benchmarks.gallery            # writes out/<device>/gallery.json

Most complaints about an engine's text (it repeats itself, it jumps between topics, it says nothing) are the doing of
these parameters. Everything here is seeded: the same machine writes the same texts again.
"""

import argparse
import importlib
import sys
from pathlib import Path

from tqdm import tqdm

from .common import default_device, environment, publish, results_folder, stages

STORY = "Write three sentences about the sea."
SHORT = "What is the capital of France? Answer in one word."
LOOP = "The sea was"
PENALTY = dict(temperature=0.0, max_tokens=80)

# name, prompt, chat template?, parameters, what to see in it
CASES = [
    ("greedy", STORY, True, dict(temperature=0.0), "always the best token: correct, even, the same every time"),
    ("temperature 0.7", STORY, True, dict(temperature=0.7, seed=1), "some variety, still on the subject"),
    ("temperature 1", STORY, True, dict(temperature=1.0, seed=1), "the model's own distribution"),
    ("temperature 2", STORY, True, dict(temperature=2.0, seed=1), "too hot: the flat tail of 49,152 tokens wins"),
    ("temperature 2, top_k 5", STORY, True, dict(temperature=2.0, top_k=5, seed=1), "hot, but from five tokens only"),
    ("temperature 2, top_p 0.5", STORY, True, dict(temperature=2.0, top_p=0.5, seed=1), "p is taken after the heat"),
    (
        "temperature 1, top_p 0.5",
        STORY,
        True,
        dict(temperature=1.0, top_p=0.5, seed=1),
        "the tail is cut, not the head",
    ),
    ("plain greedy", LOOP, False, dict(temperature=0.0, max_tokens=80), "too greedy: a loop feeds itself"),
    (
        "penalty 1.3",
        LOOP,
        False,
        dict(temperature=0.0, repetition_penalty=1.3, max_tokens=80),
        "the loop is broken, the subject jumps",
    ),
    (
        "penalty 3",
        LOOP,
        False,
        dict(temperature=0.0, repetition_penalty=3.0, max_tokens=80),
        "over-penalised: the subject is lost",
    ),
    ("one word", SHORT, True, dict(temperature=0.0), "the end token comes when the model wants"),
    ("min_tokens 30", SHORT, True, dict(temperature=0.0, min_tokens=30), "the end is forbidden: the model must go on"),
    (
        "stop at a newline",
        "My list:",
        False,
        dict(temperature=0.0, stop=["\n"]),
        "an empty answer, by the user's own stop",
    ),
]


def run(model: str, device: str | None) -> list[dict]:
    stage = importlib.import_module(stages()[-1])
    rows = []
    with stage.LLM(model, device=device, dtype="float32") as llm:
        for name, prompt, chat, options, see in tqdm(CASES, desc="Gallery"):
            params = stage.SamplingParams(**{"max_tokens": 48, **options})
            ask = llm.chat if chat else llm.generate
            (output,) = ask([{"role": "user", "content": prompt}] if chat else prompt, params, use_tqdm=False)
            text, reason = output.outputs[0].text, output.outputs[0].finish_reason
            tokens = len(output.outputs[0].token_ids)
            row = {"name": name, "prompt": prompt, "chat": chat, "params": options, "see": see}
            rows.append(row | {"text": text, "tokens": tokens, "finish_reason": reason})
    return rows


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gallery", description="One prompt, many parameters.")
    p.add_argument("--model", default="smollm2-135m", help="a name or a folder")
    p.add_argument("--device", choices=["cuda", "cpu"], help="left out: the GPU where there is one")
    p.add_argument("--out", type=Path, help="folder for gallery.json; left out: out/cpu, out/h200, ...")
    args = p.parse_args(argv)
    device = args.device or default_device()
    rows = run(args.model, args.device)
    out = args.out or results_folder(device)
    for row in rows:
        print(f"\n[{row['name']}] {row['tokens']} tokens, {row['finish_reason']}: {row['text']!r}")
    document = {"environment": environment(device), "job": {"model": args.model}, "rows": rows}
    publish(out / "gallery.json", document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
