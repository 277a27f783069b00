"""Progress bar of `generate`: requests that finished, and the speed of prefill and decode so far. (A given file.)"""

import time
from collections.abc import Callable
from contextlib import suppress

from tqdm.auto import tqdm

from .metrics import Metrics


class Progress:
    """A tqdm bar over requests; between two of its redraws it costs next to nothing. One that cannot be written to (its
    terminal is gone, or a pipe's reader) is given up: it must not cost anybody an answer."""

    def __init__(self, total: int, metrics: Metrics, shown: bool):
        self._bar: tqdm | None = None
        if shown:
            self._bar = self._draw(lambda: tqdm(total=total, desc="Generating", unit="req", miniters=0))
        self._metrics = metrics
        self._start = time.perf_counter()
        self.count = 0  # requests finished so far
        self._before = (metrics.prefill_tokens, metrics.decode_tokens)

    def update(self, count: int) -> None:
        """Call after each step with the number of requests that have finished so far."""
        if self._bar is None:
            self.count = count
            return
        seconds = time.perf_counter() - self._start
        prefill = (self._metrics.prefill_tokens - self._before[0]) / seconds
        decode = (self._metrics.decode_tokens - self._before[1]) / seconds
        self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", refresh=False)
        self._draw(lambda: self._bar.update(count - self.count))
        self.count = count

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._draw(self._bar.close)

    def _draw(self, what: Callable) -> object:
        try:
            return what()
        except (OSError, ValueError, AttributeError):  # the last two: a closed stream, and none at all
            self._bar = None
            with suppress(RuntimeError, AssertionError):  # tqdm keeps its lock then, and all other bars would wait
                tqdm.get_lock().release()
            return None
