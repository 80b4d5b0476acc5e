"""Compare every kernel with float64 on this machine's GPU: python -m sympow.doctor. It takes about four minutes.

The exit status is 0 if all is well (a machine without a GPU is well: there everything runs in PyTorch), 1 if not.
"""

import importlib.util
import platform
import sys
from importlib.metadata import version

import torch

from .attention.check import check_all
from .kernels import unsupported_reason


def main():
    triton = "no Triton"
    if importlib.util.find_spec("triton"):
        import triton as package

        triton = f"Triton {package.__version__}"
    print(f"sympow {version('sympow')}, Python {platform.python_version()}, torch {torch.__version__}, {triton}")
    if not torch.cuda.is_available():
        print("no GPU: everything runs in plain PyTorch")
        return 0
    print(torch.cuda.get_device_name())
    if reason := unsupported_reason("quadratic", torch.bfloat16, 64, 64, 2):
        print(f"the kernels do not run here: {reason}")
        return 1
    wrong = 0
    for line, ok in check_all():
        print(line, "" if ok else "TOO FAR FROM float64", flush=True)
        wrong += not ok
    print(
        "all is well" if not wrong else f"{wrong} of the kernels are wrong on this machine: PyTorch takes their place"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
