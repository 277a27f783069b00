"""What goes wrong in another process: a Setup that brings a fault along. It is planted where the setup is unpickled."""

import os
from dataclasses import dataclass, fields

import torch

from ..model_runner import ModelRunner
from ..sharding import Shard
from ..worker import Setup


@dataclass(frozen=True)
class FaultySetup(Setup):
    """fault: the name of a function of this module."""

    fault: str = ""

    def __reduce__(self):
        return restore, (self.fault, tuple(getattr(self, field.name) for field in fields(Setup)))


def restore(fault: str, values: tuple) -> Setup:
    globals()[fault]()
    return Setup(*values)


def at_once() -> None:
    raise ValueError("planted at the start")


def in_third_step() -> None:
    follow, steps = ModelRunner.follow, []

    def fails(self, plan):
        steps.append(plan)
        if len(steps) == 3:
            raise ValueError("planted in the third step")
        follow(self, plan)

    ModelRunner.follow = fails


def exits_in_third_step() -> None:
    follow, steps = ModelRunner.follow, []

    def fails(self, plan):
        steps.append(plan)
        if len(steps) == 3:
            os._exit(7)
        follow(self, plan)

    ModelRunner.follow = fails


def high_padding() -> None:
    """Rows that only fill the head up get the largest logits of all."""
    copy = Shard.copy

    def fills(self, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
        copy(self, name, source, target)
        rows = (self.rank + 1) * len(target) - len(source)
        if name == "lm_head.weight" and rows > 0:
            target[-rows:] = 100.0 * source[:1]

    Shard.copy = fills
