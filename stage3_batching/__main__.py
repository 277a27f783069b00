"""Command line: stream an answer, then say what it cost."""

import argparse
import os
import sys
import time
from typing import TextIO

from . import LLM, SamplingParams
from .zoo import DEFAULT_MODEL


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Answer a prompt, streaming the text as it is made. Counters and times go to standard error.",
        epilog=f'example: python -m {__package__} "What is a cache?" --max-tokens 100',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("prompt", help="the text; '-' reads it from standard input")
    p.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    p.add_argument("--model", default=DEFAULT_MODEL, help="a name (smollm2-135m, tiny), a folder or a hub id")
    p.add_argument("--device", help="cuda or cpu; left out: the GPU where there is one")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 or float64")
    p.add_argument("--max-model-len", type=int, help="most tokens of prompt and output together")
    p.add_argument("--load-format", default="auto", help="auto, or dummy for random weights of the right shapes")
    p.add_argument("--attention-backend", help="torch or flash_attn; left out: the fastest that runs here")
    p.add_argument("--max-tokens", type=int, default=64, help="most tokens to make")
    p.add_argument("--min-tokens", type=int, default=0, help="no end before so many tokens")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, 1 the model's own distribution")
    p.add_argument("--top-k", type=int, default=0, help="only the k best tokens; 0: all")
    p.add_argument("--top-p", type=float, default=1.0, help="only the best tokens up to this probability mass")
    p.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: seen tokens lose score")
    p.add_argument("--seed", type=int, help="the same seed gives the same text")
    p.add_argument("--stop", action="append", default=[], help="a string that ends the output; may be repeated")
    p.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    return p


ENGINE_OPTIONS = ("device", "dtype", "max_model_len", "load_format", "attention_backend")
SAMPLING_OPTIONS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop")
READER_GONE = 128 + 13  # the status that shells give a program that ended by SIGPIPE


def main() -> None:
    cli = parser()
    args = cli.parse_args()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # "?" for what the terminal cannot write, not the loss of all text
    try:
        params = SamplingParams(**{k: getattr(args, k) for k in SAMPLING_OPTIONS}, ignore_eos=args.ignore_eos)
        text = read_prompt(args.prompt)
        llm = LLM(args.model, **{k: getattr(args, k) for k in ENGINE_OPTIONS})
        chat = llm.tokenizer.has_chat_template and not args.raw
        pieces = llm.stream(
            llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]) if chat else text, params
        )
    except ValueError as error:
        cli.exit(2, f"{cli.prog}: {error}\n")
    report(llm, pieces)


def read_prompt(prompt: str) -> str:
    """The prompt, or what '-' stands for. Raises ValueError where nothing can be read."""
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise ValueError("prompt='-', but standard input is closed; pipe a text into it, or give the text itself")
    return sys.stdin.read()


def show(text: str) -> None:
    """Write to standard output at once. A reader that has seen enough (`| head`) ends the program, without a word."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        _let_go_of(sys.stdout)
        sys.exit(READER_GONE)
    except OSError as error:  # a full disk
        _let_go_of(sys.stdout)
        sys.exit(f"cannot write the text: {error}")


def _let_go_of(stream: TextIO) -> None:
    """The flush at exit would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def report(llm: LLM, pieces) -> None:
    """Print the pieces as they come, then counters and times. Ctrl-C ends the text, not the report."""
    start = time.perf_counter()
    first = None
    try:
        for piece in pieces:
            first = first or time.perf_counter() - start
            show(piece)
    except KeyboardInterrupt:
        pass
    except FloatingPointError as error:
        sys.exit(str(error))
    seconds = time.perf_counter() - start
    counters = llm.metrics.counters()
    of_prompt = sum(not record.decode_tokens for record in llm.metrics.trace)  # steps; the last of them makes a token
    num_tokens = counters["steps"] - max(0, of_prompt - 1)
    show("\n")
    print(
        f"\n{seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s, first text after {first or 0:.2f} s",
        file=sys.stderr,
    )
    print("  ".join(f"{name} {value:,}" for name, value in counters.items()), file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + 2)
