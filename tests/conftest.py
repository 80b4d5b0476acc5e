"""Lets the tests import the repository's modules from wherever pytest is started, and chooses the machine.

pytest tests                                 # on the CPU, kernels in Triton's interpreter: `make test`
TEST_GPU=1 pytest tests/test_kernels.py      # kernels on the GPU: `make test-gpu`
"""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if os.environ.get("TEST_GPU"):
    import torch

    if not torch.cuda.is_available():
        pytest.exit("TEST_GPU=1, but torch sees no GPU (see `make doctor`)", returncode=2)
else:
    # equal to the last bit, as several tests ask, is a promise of the CPU alone
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"  # before kernels/ is imported
    if os.environ.get("PYTEST_XDIST_WORKER"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one core a process


def pytest_collection_modifyitems(config, items):
    """Tests marked gpu are not run, and not counted, without TEST_GPU."""
    if not os.environ.get("TEST_GPU"):
        left = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
