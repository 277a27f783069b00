"""Processes: rank 0 starts the others, watches them, and ends them; or torchrun does.

    LLM(..., tensor_parallel_size=2)                rank 0 is this process, it starts the other one itself
    torchrun --nproc-per-node 2 script.py           every rank runs the script; all but rank 0 stay in `LLM(...)`, work
                                                    there until rank 0 closes its engine, and then leave the script

    rank 0  --- pipe: setup, then plans --->  rank 1        a closed pipe means: end
            <-- pipe: its error, if any ----
            <====== process group: sums ===>

A started process is a fresh interpreter that imports this package and nothing of the user's, so a script needs no
`if __name__ == "__main__"`. Nothing outlives its engine: rank 0 ends the others when it closes, is collected as garbage
or exits; when one of them fails, a thread in rank 0 notices within a second and ends all; and when rank 0 itself is
killed, the others see that they have another parent. Ports are chosen by the system. The process groups belong to the
engine, not to torch.distributed as a whole: there may be several engines, and what the user does with it is untouched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from .parallel import PATIENCE, TIMEOUT


def make_group(store: dist.Store, rank: int, size: int, device: torch.device) -> dist.Backend:
    """For sums: NCCL between GPUs, gloo between CPUs. Returns when all ranks are there."""
    store = dist.PrefixStore("sums", store)
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)


class Link:
    """How a rank talks to the others before and beside the sums: what the three kinds have in common. store: small
    values that all ranks can read. stop_sums: a weak reference to what is called when a rank has failed."""

    store: dist.Store
    stop_sums: Callable[[], Callable[[], None] | None] = staticmethod(lambda: None)

    def send(self, message: bytes) -> None:
        """To all other ranks. Rank 0 alone."""
        raise NotImplementedError

    def receive(self) -> bytes | None:
        """What rank 0 has sent; None when it wants an end."""
        raise NotImplementedError

    def failure(self) -> str | None:
        """What is known of a rank that has failed."""
        return None

    def failure_behind(self, error: BaseException) -> str | None:
        """The failure of another rank that may have led to this error here; it is waited for."""
        return None

    def end(self, patience: float = PATIENCE) -> None:
        """End all other ranks. A second call does nothing."""


class Started(Link):
    """Rank 0's link to processes that it has started, each with `setup`, some picklable object (see worker.py)."""

    def __init__(self, setup: object, size: int):
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)  # 0: any free port
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        self._failure: str | None = None
        self._failed = threading.Event()
        self._woken, self._wake = Pipe(duplex=False)
        self._is_ended = False
        try:
            for rank in range(1, size):
                self._start((setup, rank, self.store.port, max(1, torch.get_num_threads() // size)))
        except BaseException:
            self.end(patience=0)
            raise
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()

    def _start(self, message: tuple) -> None:
        ours, theirs = Pipe()
        call = f"main({theirs.fileno()}, {os.getpid()})"
        here = str(Path(__file__).resolve().parents[1])
        path = [entry or here for entry in sys.path if isinstance(entry, str)]  # "": a folder that may have changed
        path += [] if here in path else [here]
        code = f"import sys; sys.path[:] = {path!r}; from {__package__}.worker import main; {call}"
        arguments = [sys.executable, "-c", code]
        env = os.environ | {"TQDM_DISABLE": "1"}  # bars are shown once
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env)
        self._processes.append(process)
        self._pipes.append(ours)
        theirs.close()
        ours.send(message)

    def connect(self, rank: int, size: int, device: torch.device) -> dist.Backend:
        while self.store.add("ready", 0) < size - 1:  # the group's own waiting would not notice that somebody has died
            if self._failed.wait(0.02):
                raise RuntimeError(self._failure)
        return make_group(self.store, rank, size, device)

    def send(self, message: bytes) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def failure(self) -> str | None:
        return self._failure

    def failure_behind(self, error: BaseException) -> str | None:
        may_be = isinstance(error, (RuntimeError, OSError, EOFError))
        self._failed.wait(3.0 if may_be else 0.0)
        return self._failure

    def _watch(self) -> None:
        """Wait until a process says something or ends: both mean that it has failed."""
        try:
            if self._woken in wait([self._woken, *self._pipes]):
                return
            time.sleep(0.3)  # others fail because of it: who was the first?
            self._failure = self._cause()
        except OSError:  # the engine is being closed
            return
        self._failed.set()
        for process in self._processes:
            process.kill()
            process.wait()
        if stop_sums := self.stop_sums():
            stop_sums()

    def _cause(self) -> str:
        """Which rank it was, and why. Who was killed could not say so."""
        reports, codes = [], {}
        for rank, (process, pipe) in enumerate(zip(self._processes, self._pipes, strict=True), start=1):
            codes[rank] = process.poll()
            with suppress(EOFError, OSError):
                if pipe.poll():
                    reports.append((*pipe.recv(), rank))
        what = "failed, and with it all ranks of this engine; make a new LLM"
        for rank, code in codes.items():
            if code is not None and code < 0:
                return f"rank {rank} {what}: it was ended by signal {-code} ({signal.Signals(-code).name})"
        if reports:
            _, text, rank = min(reports)
            return f"rank {rank} {what}. Its error:\n{text}"
        ended = {rank: code for rank, code in codes.items() if code is not None}
        return f"rank {', '.join(map(str, ended))} {what}: exit code {', '.join(map(str, ended.values()))}"

    def end(self, patience: float = PATIENCE) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        self._wake.close()  # the thread leaves
        for pipe in self._pipes:
            pipe.close()  # so do the processes
        deadline = time.monotonic() + patience
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Parent(Link):
    """The link of a started process to rank 0."""

    def __init__(self, pipe: Connection, port: int):
        self._pipe = pipe
        self.store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)

    def connect(self, rank: int, size: int, device: torch.device) -> dist.Backend:
        self.store.add("ready", 1)
        return make_group(self.store, rank, size, device)

    def receive(self) -> bytes | None:
        try:
            return self._pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return None


class Torchrun(Link):
    """Every rank was started by torchrun, perhaps on several machines; it ends all if one fails. Plans go by gloo."""

    def __init__(self, rank: int, size: int):
        self.store, found_rank, found_size = next(dist.rendezvous("env://"))
        assert (rank, size) == (found_rank, found_size)
        forever = timedelta(days=1000)  # nobody knows when the next request comes
        self._plans = dist.ProcessGroupGloo(dist.PrefixStore("plans", self.store), rank, size, forever)
        self._is_ended = rank > 0

    def connect(self, rank: int, size: int, device: torch.device) -> dist.Backend:
        return make_group(self.store, rank, size, device)

    def send(self, message: bytes) -> None:
        self._broadcast(torch.tensor([len(message)]))
        self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes | None:
        length = self._broadcast(torch.empty(1, dtype=torch.int64))
        return self._broadcast(torch.empty(int(length), dtype=torch.uint8)).numpy().tobytes() if length else None

    def _broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._plans.broadcast(x, 0).wait()
        return x

    def end(self, patience: float = PATIENCE) -> None:
        if not self._is_ended:
            self._is_ended = True
            if patience:  # otherwise rank 0 has failed, and its error ends the others
                with suppress(RuntimeError):
                    self._broadcast(torch.tensor([0]))


def leave_with(parent: int) -> None:
    """End this process as soon as its parent has ended, wherever it waits."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
