"""Gluon's kernels for Hopper are chosen by sizes and the GPU, and give way to Triton's. tests/targets.py and
tests/sass.py compile them; what they compute is seen on a GPU only."""

import functools
import sys
import types
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import GPU, inputs  # noqa: E402

from sympow.kernels.chunked import passes as chunked, hopper  # noqa: E402
from sympow.kernels import configs  # noqa: E402
from sympow.kernels.configs import describe_gpu  # noqa: E402

H200 = describe_gpu("NVIDIA H200", (9, 0), 227 * 1024)


def test_hopper_has_them_for_one_shape_and_no_other_gpu_has_them(monkeypatch):
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(hopper, "enabled", True)
    monkeypatch.setattr(configs, "gpu", lambda _: H200)
    assert hopper.available(q, 2)
    assert not hopper.available(q, 4) and not hopper.available(q[..., :32], 2)
    assert not hopper.available(q.half(), 2) and not hopper.available(q.float(), 2)
    for capability, shared in (((9, 0), 99), ((8, 0), 163), ((10, 0), 227), ((12, 0), 99), (None, 64)):
        monkeypatch.setattr(configs, "gpu", lambda _, x=(capability, shared * 1024): describe_gpu("", *x))
        assert not hopper.available(q, 2), capability
    monkeypatch.undo()
    assert not hopper.available(q, 2)  # the interpreter
    monkeypatch.setattr(configs, "gpu", lambda _: H200)
    monkeypatch.setattr(hopper, "enabled", False)
    assert not hopper.available(q, 2)


class Fails:
    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            raise RuntimeError("no layout for this\nand much more")

        return launch


def both_passes():
    (q, k, v, log_g), dy = inputs(130, "rare zeros", torch.float32, H=1, Hkv=1)
    y, saved, _ = chunked.forward(q, k, v, log_g, p=2, chunk=128)
    return y, *chunked.backward(dy, q, k, v, log_g, y, saved, p=2, chunk=128)[:4]


expected_of_both_passes = functools.cache(both_passes)


@pytest.mark.skipif(GPU, reason="pretends that Gluon fails")
@pytest.mark.parametrize("cause", ["missing", "raises"])
def test_without_gluon_the_process_warns_once_and_uses_tritons_kernels(monkeypatch, cause):
    expected = expected_of_both_passes()
    fake = None if cause == "missing" else types.SimpleNamespace(update_state_kernel=Fails())
    monkeypatch.setitem(sys.modules, "sympow.kernels.chunked.hopper_kernels", fake)
    if fake is not None:
        monkeypatch.setattr(sys.modules["sympow.kernels"], "hopper_kernels", fake, raising=False)
    else:
        monkeypatch.delattr(sys.modules["sympow.kernels"], "hopper_kernels", raising=False)
    monkeypatch.setattr(hopper, "enabled", True)
    monkeypatch.setattr(hopper, "available", lambda q, p: hopper.enabled)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = both_passes()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    seen = [str(x.message) for x in seen if "Gluon" in str(x.message)]
    assert len(seen) == 1 and "\n" not in seen[0]
    assert ("ModuleNotFoundError" in seen[0] or "ImportError" in seen[0]) == (cause == "missing")
    assert ("RuntimeError: no layout for this" in seen[0]) == (cause == "raises")
