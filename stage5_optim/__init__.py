"""Stage 5: optimised. Prefix caching, fused kernels, CUDA graphs, asynchronous scheduling."""

import logging

from .llm import LLM
from .sampling import SamplingParams
from .sequence import RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

# What the engine chose (device, dtype, attention backend) should be seen without any set-up of logging.
_logger = logging.getLogger(__package__)
if not _logger.handlers:
    _logger.addHandler(logging.StreamHandler())
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
