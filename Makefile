# make demo       environment, data, three small models, pictures of them and a sample: the quick start
# make ... PY=python3   use this interpreter as it is (conda, docker) and make no .venv

PYTHON ?= python3
PY ?= .venv/bin/python

.PHONY: help env test-env demo test test-slow test-all test-gpu doctor tune bench

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.12 builds .venv from that Python; PY=python3 uses that one as it is, without .venv"

DEMO_NAMES = softmax,window,sympow_gating

demo: env  ## prepare data, train three small models, plot their losses, sample from one (7 to 12 minutes on two CPUs)
	$(PY) data/pystdlib/prepare.py
	$(PY) train.py config/demo.py --attention=softmax --output_gate=True --out_dir=out/demo_softmax
	$(PY) train.py config/demo.py --attention=softmax --output_gate=True --window=256 --out_dir=out/demo_window
	$(PY) train.py config/demo.py --out_dir=out/demo_power
	$(PY) compare.py out/demo_softmax out/demo_window out/demo_power --names=$(DEMO_NAMES) --png=out/demo_loss.png
	$(PY) evaluate.py --out_dir=out/demo_softmax,out/demo_window,out/demo_power --names=$(DEMO_NAMES) --length=2048 --documents=24 --png=out/demo_loss_by_position.png
	$(PY) sample.py --out_dir=out/demo_power --prompt="def " --max_new_tokens=600
	@echo
	@echo "out/demo_loss.png shows how they learn, by tokens and time. The window keeps as many bytes as the state. It is as"
	@echo "long as the training context, so the window learns what softmax learns."
	@echo "out/demo_loss_by_position.png shows them reading 8 times their training context, which ends at the dashed line."

PYTEST = -m pytest -rfE -n auto --maxprocesses=8 tests

test: test-env  ## run the tests on the CPU, without those marked slow
	$(PY) $(PYTEST) -m "not slow"

test-slow: test-env  ## run the tests marked slow
	$(PY) $(PYTEST) -m slow

test-all: test-env  ## run both: every test that needs no GPU
	$(PY) $(PYTEST)

test-gpu: test-env  ## test the kernels on this machine's GPU
	TEST_GPU=1 $(PY) -m pytest -n 12 tests/test_combinations.py
	TEST_GPU=1 $(PY) -m pytest -n 12 --dist=loadgroup tests/test_kernels.py tests/test_chunked.py tests/test_operators.py tests/test_sequences.py tests/test_heinsen_kernels.py tests/test_decoder.py tests/test_prompt.py tests/test_convolution_kernels.py tests/test_window.py tests/test_check.py tests/test_variant.py tests/test_compat.py tests/test_library.py tests/test_rotary.py tests/test_cross_entropy.py

bench: env  ## attention against cuDNN, flash and FlexAttention on this machine's GPU
	$(PY) -m bench.attention

tune: env  ## choose the kernels' tile sizes for this machine's GPU: rewrites kernels/table.json
	$(PY) -m sympow.kernels.tune

doctor: env  ## say what is wrong with this machine's Python, torch, GPU or compiler, and how to fix it
	$(PY) doctor.py

ifeq ($(PY),.venv/bin/python)
env: .venv/.ready  ## make .venv and install requirements.txt into it (once)

test-env: .venv/.ready-for-tests  ## install what the tests need beside it
else
env test-env:
	@command -v "$(PY)" >/dev/null || { echo "PY=$(PY): no such interpreter" >&2; exit 1; }
endif

# Run by $(PYTHON): lets .venv see the torch that $(PYTHON) has, if requirements.txt takes its version, so that pip does
# not fetch its gigabytes again. (--system-site-packages would not do: it shows nothing when $(PYTHON) is itself in a
# virtual environment.)
define SHARE_TORCH
import os, re, sys
try:
    import torch
except Exception:
    sys.exit()
pair = lambda version: tuple(map(int, re.findall(r"\d+", version)[:2]))
low, high = re.search(r"^torch>=([\d.]+),<([\d.]+)", open("requirements.txt").read(), re.M).groups()
folder = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
site = ".venv/lib/python%d.%d/site-packages" % sys.version_info[:2]
fits = pair(low) <= pair(torch.__version__) < pair(high)
if fits and os.path.isdir(site) and not folder.startswith(os.path.abspath(".venv")):
    print("sharing the torch", torch.__version__, "in", folder)
    open(site + "/shared_torch.pth", "w").write(folder + "\n")
endef
export SHARE_TORCH

.venv/.ready: requirements.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "PYTHON=$(PYTHON): no such interpreter" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed,\
 $(PYTHON) is $$($(PYTHON) --version 2>&1); choose one with: make env PYTHON=python3.12" >&2; exit 1; }
	.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@rm -f .venv/lib/python*/site-packages/shared_torch.pth
	@$(PYTHON) -c "$$SHARE_TORCH"
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/.ready-for-tests: .venv/.ready tests/requirements.txt
	.venv/bin/python -m pip install --disable-pip-version-check -r tests/requirements.txt
	@touch $@
