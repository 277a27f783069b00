"""Tensor parallelism: several processes, one model. Each has a part of every matrix, and they sum what they compute.

    rank 0   scheduler, blocks, tokenizer | plan -> launch ----------------------------------> sample -> collect
                                               |      a layer: part of attention, sum, part of the MLP, sum
    rank 1                                     +----> the same step, its own heads -----------> (logits to rank 0)

Rank 0 is the process in which the `LLM` lives. Per step it tells the others one StepPlan: the arrays that it computes
from itself. So every rank sees the same batch in the same order, and none but rank 0 knows what a request is.

    embed        a rank looks up the tokens that it has; the sum of all ranks is the embedding
    linear_add   the part of o or down, and from rank 0 also the residual and the bias: the sum is x + linear(y)
    linear       the head: each rank has the logits of its tokens, rank 0 puts them side by side

Rank 0 alone samples: that needs the requests, and two ranks that choose differently would be two models from there on.
What it has sampled is sent to the others in front of the next step, if that step was planned before the tokens were
known. In 16 bits every part is rounded before it is summed, so tokens may differ from those of one process where two
logits are close; in fp32 and on small models they are equal.

Sums of a decode step are small, and a general library is slow at them. quick_sum.py is faster where it can be used;
INFERENCE_STAGES_QUICK_SUMS=0 in the environment turns it off. INFERENCE_STAGES_CHECK_RANKS=1 compares, step by step,
what all ranks are about to compute. processes.py starts, watches and ends the processes.
"""

import ctypes
import hashlib
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F

from .quick_sum import QuickSum, make_quick_sum
from .sharding import Shard
from .step_inputs import StepPlan

TIMEOUT = timedelta(minutes=30)  # of one sum: the slowest rank may have to load its weights, or compile kernels
PATIENCE = 5.0
CHECK = "INFERENCE_STAGES_CHECK_RANKS"


class OneRank:
    """The whole model in this process: nobody to talk to. The interface of Ranks."""

    rank, size = 0, 1
    is_closed = False
    notes = ""  # what the first log line says of the ranks
    before_end: Callable[[], Callable[[], None] | None] = staticmethod(lambda: None)  # a weak reference: lets graphs go

    def __init__(self):
        self.shard = Shard()
        self.all_reduces = 0  # sums over all ranks so far

    def ops(self, ops: ModuleType) -> ModuleType:
        """What the model computes with."""
        return ops

    def starting(self) -> nullcontext:
        """Around what all ranks do until the first step."""
        return nullcontext()

    def in_step(self) -> nullcontext:
        """Around what all ranks do in a step."""
        return nullcontext()

    def connect(self, dtype: torch.dtype) -> None:
        """All ranks can be reached when it returns. dtype: of what they sum."""

    def send(self, plan: StepPlan) -> None:
        """Tell the other ranks what is computed next."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Every rank gets what rank 0 has in x."""

    def minimum(self, value: int) -> int:
        """The least of all ranks' values."""
        return value

    def check(self) -> None:
        """Raises RuntimeError if a rank has failed."""

    def close(self, patience: float = PATIENCE) -> None:
        """End the other ranks, which have so many seconds to end by themselves."""


class Ranks(OneRank):
    """What one rank has of the others. link: how plans get to them (see processes.py)."""

    def __init__(self, shard: Shard, vocab_size: int, device: torch.device, link):
        super().__init__()
        self.shard, self.rank, self.size = shard, shard.rank, shard.size
        self.vocab_size = vocab_size  # of the whole model
        self._device = device
        self._link = link
        self._group = None
        self._quick_sum: QuickSum | None = None
        self._num_checked = 0 if os.environ.get(CHECK) == "1" else None
        self.is_closed = False
        link.stop_sums = weakref.WeakMethod(self._stop_sums)
        self._finalizer = weakref.finalize(self, link.end)  # nobody closes it, or the program ends
        give_up = weakref.WeakMethod(self._give_up)
        os.register_at_fork(after_in_child=lambda: (here := give_up()) and here())

    def ops(self, ops: ModuleType) -> SimpleNamespace:
        """The given ones, with sums where the parts meet."""
        return parallel_ops(ops, self)

    def connect(self, dtype: torch.dtype) -> None:
        self._group = self._link.connect(self.rank, self.size, self._device)
        self._quick_sum, reason = make_quick_sum(self, self._link.store, dtype, self._device)
        library = "NCCL" if self._device.type == "cuda" else "gloo"
        self.notes = f", {self.size} ranks that sum by {f'{reason} and ' if self._quick_sum else ''}{library}"
        if self._quick_sum is None:
            self.notes += f" ({reason})"

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Whatever fails in here leaves the ranks in different places: all are ended. The error is that of the rank in
        which it began."""
        try:
            yield
        except BaseException as error:
            failure = None if self.is_closed else self._link.failure_behind(error)
            self.close(patience=0)
            if failure is None:
                raise
            raise RuntimeError(failure) from error

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """The same; and Ctrl-C waits, or the others would wait for a sum that never comes."""
        with interrupts_wait(), self.starting():
            yield

    def send(self, plan: StepPlan) -> None:
        self._link.send(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL))
        self._check_equal(plan)

    def receive(self) -> StepPlan | None:
        """What `send` was given in rank 0; None at the end."""
        message = self._link.receive()
        plan = None if message is None else pickle.loads(message)
        if plan is not None:
            self._check_equal(plan)
        return plan

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in a new tensor or in x itself."""
        self.all_reduces += 1
        if self._quick_sum is not None and self._quick_sum.fits(x):
            return self._quick_sum(x)
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' x in their order, for rank 0; None for the others."""
        found = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather(found, x, 0).wait()
        return found or None

    def broadcast(self, x: torch.Tensor) -> None:
        self._group.broadcast(x, 0).wait()

    def minimum(self, value: int) -> int:
        x = torch.tensor([value], device=self._device)
        self._group.allreduce(x, torch.distributed.ReduceOp.MIN).wait()
        return int(x)

    def check(self) -> None:
        if failure := self._link.failure():
            self.close(patience=0)
            raise RuntimeError(failure)

    def close(self, patience: float = PATIENCE) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._link.end(patience)
            aborting = self._abort()
            if let_graphs_go := self.before_end():
                let_graphs_go()
            aborting.join(PATIENCE)
            self._group = self._quick_sum = None

    def _give_up(self) -> None:
        """This process is a fork, and has none of the threads by which a group ends: to destroy it would take for ever.
        The engine is its parent's, and closed in here."""
        self.is_closed = True
        self._finalizer.detach()
        for one in (self._group, self._quick_sum):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))

    def _stop_sums(self) -> None:
        """Another rank has failed. What runs on this GPU waits for it, and would do so for ever."""
        self._abort()
        if self._quick_sum is not None:
            self._quick_sum.act_for_the_others()

    def _abort(self) -> threading.Thread:
        """End the group. In a thread: NCCL stops its kernels at once, but comes back only when no graph knows it any
        more."""

        def abort(group: torch.distributed.Backend | None) -> None:
            with suppress(RuntimeError, AttributeError):
                group.abort()

        thread = threading.Thread(target=abort, args=(self._group,), daemon=True)
        thread.start()
        return thread

    def _check_equal(self, plan: StepPlan) -> None:
        """With CHECK: raises RuntimeError if another rank is about to compute another step."""
        if self._num_checked is None:
            return
        self._num_checked += 1
        number = fingerprint(plan, self._num_checked)
        least, most = self.minimum(number), -self.minimum(-number)
        if least != most:
            raise RuntimeError(f"rank {self.rank}: its step {self._num_checked} is not the one of the other ranks")


def fingerprint(plan: StepPlan, step: int) -> int:
    """A number of 62 bits that hangs on all of the plan, and on how many there were before it."""
    digest = hashlib.sha256(repr((step, plan.size, plan.query_lens, plan.moves)).encode())
    for name, array in plan.arrays.items():
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 2


def parallel_ops(ops: ModuleType, ranks: Ranks) -> SimpleNamespace:
    """ops.py or fused.py, but for the three functions whose result needs all ranks."""

    def embed(input_ids: torch.Tensor, embedding: torch.nn.Module) -> torch.Tensor:
        """[T] -> [T, hidden]. A token that is another rank's is a row of zeros here."""
        rows = len(embedding.weight)
        ids = input_ids - ranks.rank * rows
        x = F.embedding(ids.clamp(0, rows - 1), embedding.weight)
        return ranks.all_reduce(x.masked_fill(((ids < 0) | (ids >= rows))[:, None], 0.0))

    def linear_add(y: torch.Tensor, linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """x + linear(y): [T, part of in], [T, hidden] -> [T, hidden]. Only rank 0 adds x, and it alone has a bias."""
        return ranks.all_reduce(ops.linear_add(y, linear, x) if ranks.rank == 0 else ops.linear(y, linear))

    def linear(x: torch.Tensor, linear: torch.nn.Module, out: torch.Tensor | None = None) -> torch.Tensor:
        """The head. [R, hidden] -> in rank 0 [R, vocab], in `out` if that is given; in the others what they have."""
        part = ops.linear(x, linear)
        parts = ranks.gather(part) if len(part) else [part] * ranks.size
        if parts is None:
            return part
        width = part.shape[-1]
        known = [x[:, : max(ranks.vocab_size - i * width, 0)] for i, x in enumerate(parts)]  # the rest is only filling
        return torch.cat(known, dim=-1, out=out)

    names = ("norm_linear", "norm_gate_up", "rotate_qkv", "rms_norm")
    shared = {name: getattr(ops, name) for name in names}
    return SimpleNamespace(**shared, embed=embed, linear_add=linear_add, linear=linear)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """A Ctrl-C that comes in here is raised at the end. (Only the main thread gets it at all.)"""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: caught.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(*caught[0])
