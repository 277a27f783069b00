"""What happens without first come, first served: a scheduler that lets everybody run in turn, however little fits.

An engine does this that answers pressure with fairness. Nothing is wrong with its tokens; blocks move all the time.
"""

from stage4_paged.batch import Batch
from stage4_paged.block_manager import BlockManager
from stage4_paged.config import SchedulerConfig
from stage4_paged.scheduler import Scheduler


class TimeSlices(Scheduler):
    """Every `slice_steps` steps whoever has run longest makes room for the head of the queue, and queues at its end."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, slice_steps: int):
        super().__init__(config, block_manager)
        self._slice_steps = slice_steps

    def _reserve(self, batch: Batch) -> None:
        if self.block_manager.step % self._slice_steps == 0:
            self._rotate(batch)
        super()._reserve(batch)

    def _rotate(self, batch: Batch) -> None:
        """Room for the head of the queue, at the cost of those that have run longest."""
        while self.waiting and len(self.running) > 1 and not self._has_memory(self.waiting[0]):
            head, oldest = self.waiting[0], next(iter(self.running.values()))
            self._preempt(oldest, batch)
            self.waiting.append(self.waiting.popleft())
            assert self.waiting[0] is head

    def _admit(self, batch: Batch, num_prefills: int) -> None:
        """As ever, but in a step that has preempted too."""
        preempted, batch.preempted = batch.preempted, []
        super()._admit(batch, num_prefills)
        batch.preempted = preempted
