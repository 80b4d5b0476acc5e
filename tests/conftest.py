"""Let the tests import the repository's modules from wherever pytest is started, and choose the machine.

On a CPU the kernels run in Triton's interpreter.

pytest tests                                 # every test that needs no GPU: `make test-all`
pytest tests -m "not slow"                   # without the tests marked slow: `make test`
TEST_GPU=1 pytest tests/test_kernels.py      # kernels on the GPU: `make test-gpu`
"""

import os
import sys

import pytest
from helpers import dataset, go, hopper, layer_norms, on_gpu, refused  # noqa: F401 (fixtures for all tests)

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if os.environ.get("TEST_GPU"):
    import torch

    if not torch.cuda.is_available():
        pytest.exit("TEST_GPU=1, but torch sees no GPU (see `make doctor`)", returncode=2)
else:
    # Several tests compare results to the last bit, which only the CPU promises.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before kernels/ is imported
    if os.environ.get("PYTEST_XDIST_WORKER"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core per process; must be set before torch is imported
    import interpreter

    interpreter.speed_up()

from sympow.data import progress  # noqa: E402 (behind the path)

progress.FIRST_LINE = float("inf")  # or tests of what is on stderr would depend on the time that they take


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """Seed torch, so that a test that passes here passes everywhere: numbers near a bound fall on either side of it.

    train.py lets products of float32 have tf32's 11 bits on a GPU: a test that calls it leaves them to no other one.
    """
    import torch

    torch.manual_seed(int(os.environ.get("TEST_SEED", 0)))
    torch.set_float32_matmul_precision("highest")


def pytest_collection_modifyitems(config, items):
    """Deselect the tests marked gpu unless TEST_GPU is set."""
    if not os.environ.get("TEST_GPU"):
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
