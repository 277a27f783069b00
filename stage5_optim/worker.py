"""Worker: what every rank does. All build their part of the model; those behind rank 0 then follow its plans."""

import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from . import checkpoint
from .attention import BACKENDS
from .config import EngineConfig, ModelConfig, Resolved, SchedulerConfig
from .cuda_graphs import graph_memory, graph_sizes
from .features import Features
from .kv_cache import KVCache, free_memory, kv_room, plan_blocks, plan_swap_blocks
from .model_runner import ModelRunner, largest_batch
from .parallel import OneRank, Ranks
from .processes import Link, Parent, Started, Torchrun, leave_with
from .sharding import split
from .speculative import Proposer
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Setup:
    """All that a rank must know to build its part. model: of the whole. weights: as in ModelFiles."""

    config: EngineConfig
    model: ModelConfig
    resolved: Resolved
    features: Features
    scheduler: SchedulerConfig
    weights: Path | None

    @property
    def graph_sizes(self) -> list[int]:
        if not self.features.cuda_graphs:
            return []
        return graph_sizes(self.scheduler.max_num_seqs, self.features.rows_per_seq)

    @property
    def most_rows(self) -> int:
        """Most rows that are sampled in one step: each is a token of the budget or a sample that forks, or it pads."""
        num_seqs, budget = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        return max(min(num_seqs * self.features.rows_per_seq, budget + num_seqs), *self.graph_sizes, 0)


def start_ranks(setup: Setup) -> OneRank:
    """Rank 0's side of all ranks. A rank that torchrun has started does its work in here, and leaves the script."""
    size, device = setup.config.tensor_parallel_size, setup.resolved.device
    if size == 1:
        return OneRank()
    if dist.is_torchelastic_launched():
        return join_torchrun(setup)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size={size}: torch sees {torch.cuda.device_count()} GPUs here; lower it, or join several "
            "machines with torchrun"
        )
    return make_ranks(setup, 0, Started(setup, size))


def join_torchrun(setup: Setup) -> Ranks:
    """Torchrun has started as many processes as there are ranks; this is one of them."""
    size, rank, found = setup.config.tensor_parallel_size, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if found != size:
        raise ValueError(f"tensor_parallel_size={size}, but torchrun has started {found} processes; give both the same")
    if setup.resolved.device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = make_ranks(setup, rank, Torchrun(rank, size))
    if rank > 0:
        serve(setup, ranks)
        raise SystemExit(0)
    return ranks


def make_ranks(setup: Setup, rank: int, link: Link) -> Ranks:
    shard = split(setup.config.tensor_parallel_size, rank, setup.model, setup.config.model)
    return Ranks(shard, setup.model.vocab_size, setup.resolved.device, link)


def build_runner(
    setup: Setup, ranks: OneRank, tokenizer: Tokenizer | None = None, proposer: Proposer | None = None
) -> ModelRunner:
    """This rank's part of the model, with its cache and graphs. All ranks are in here at the same time. The first one
    has a tokenizer, and it alone drafts."""
    resolved, most = setup.resolved, setup.most_rows
    shape = setup.model, BACKENDS[resolved.attention_backend], resolved.max_model_len, resolved.device
    seed, ops = setup.config.seed or 0, ranks.ops(setup.features.ops)
    model = checkpoint.build_model(*shape, setup.weights, seed, ops, ranks.shard)
    runner = ModelRunner(model, None, resolved.device, tokenizer, setup.features.ops, most, ranks)
    ranks.before_end = weakref.WeakMethod(runner.let_graphs_go)
    ranks.connect(setup.resolved.dtype)
    runner.kv_cache = build_cache(setup, ranks, memory_for_cache(setup, runner, proposer or Proposer()))
    if setup.features.cuda_graphs:
        vocab_size = setup.model.vocab_size if ranks.rank == 0 else 0  # the others keep no logits
        runner.make_graphs(setup.graph_sizes, resolved.max_model_len, vocab_size)
    return runner


def memory_for_cache(setup: Setup, runner: ModelRunner, proposer: Proposer) -> int:
    """Bytes that the KV cache may take. On a GPU one step at the largest batch shows what the steps need."""
    resolved, free = setup.resolved, free_memory(setup.resolved.device)
    if resolved.device.type == "cpu" or setup.config.num_kv_blocks is not None:
        return free // (2 * runner.ranks.size) if resolved.device.type == "cpu" else free
    part = runner.ranks.shard.config(setup.model)
    runner.kv_cache = KVCache(part, 1, resolved.block_size, resolved.device, 0, resolved.kv_dtype)
    lens = resolved.max_model_len, resolved.block_size, setup.features.rows_per_seq
    batch = largest_batch(setup.scheduler, *lens)
    peak = runner.peak_memory(batch if runner.ranks.rank == 0 else None)
    peak += graph_memory(setup.model, setup.graph_sizes, resolved.max_model_len // resolved.block_size + 1)
    free, total = torch.cuda.mem_get_info(resolved.device)
    own = torch.cuda.memory_allocated(resolved.device)
    room = kv_room(total, free, own, peak, setup.config.gpu_memory_utilization)
    return proposer.leave_room(room, setup.model, setup.graph_sizes)


def build_cache(setup: Setup, ranks: OneRank, room: int) -> KVCache:
    """The blocks of the KV cache, as many as asked for or as fit in every rank."""
    resolved, part = setup.resolved, ranks.shard.config(setup.model)
    tokens = setup.scheduler.max_num_seqs * resolved.max_model_len
    num_blocks = plan_blocks(setup.config, part, resolved, ranks.minimum(room), tokens)
    num_swap_blocks = ranks.minimum(plan_swap_blocks(setup.config, part, resolved, num_blocks))
    return KVCache(part, num_blocks, resolved.block_size, resolved.device, num_swap_blocks, resolved.kv_dtype)


def serve(setup: Setup, ranks: Ranks) -> None:
    """The life of a rank that is not the first."""
    runner = build_runner(setup, ranks)
    while (plan := ranks.receive()) is not None:
        runner.follow(plan)


def main(pipe: int, parent: int) -> None:
    """A started process, from its first message to its end. pipe: the file descriptor of its end of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal reaches all; rank 0 decides what it means
    threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
    logging.getLogger(__package__).setLevel(logging.WARNING)  # what there is to say, rank 0 says
    connection, code = Connection(pipe), 0
    try:
        setup, rank, port, threads = connection.recv()
        torch.set_num_threads(threads)
        if setup.resolved.device.type == "cuda":
            torch.cuda.set_device(rank)
        serve(setup, make_ranks(setup, rank, Parent(connection, port)))
    except BaseException:
        code = 1
        with suppress(OSError):
            connection.send((time.time(), traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: threads of the process group may wait for somebody who has left
