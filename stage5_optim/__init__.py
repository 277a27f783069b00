"""Stage 5: optimised. Prefix caching, fused kernels, CUDA graphs, asynchronous scheduling, speculative decoding."""

import logging

from .llm import LLM
from .sampling import SamplingParams
from .sequence import RequestOutput
from .speculative import SpeculativeConfig

__all__ = ["LLM", "RequestOutput", "SamplingParams", "SpeculativeConfig"]

# What the engine chose (device, dtype, attention backend) should be seen without any set-up of logging.
_logger = logging.getLogger(__package__)
if not _logger.handlers:
    _logger.addHandler(logging.StreamHandler())
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
