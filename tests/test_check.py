"""Kernels that fail on a machine are found where training or a prompt begins, and PyTorch takes their place."""

import json
import os
import subprocess
import sys
import threading
import warnings

import numerics
import pytest
import torch
from helpers import ROOT

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from test_kernels import DEVICE, DTYPES, inputs  # noqa: E402
from test_variant import seen_on_gpu  # noqa: E402

from sympow.generation import decoder  # noqa: E402
from sympow.generation import generate  # noqa: E402
from sympow.attention import ATTENTIONS, naive  # noqa: E402
from sympow.attention.operator import check, dispatch  # noqa: E402
from sympow.attention.operator.dispatch import Problem, plan  # noqa: E402
from sympow.attention.power import power_attention  # noqa: E402
from sympow.kernels.decode import power as decode, heinsen as decode_heinsen, softmax as decode_softmax  # noqa: E402
from sympow.kernels import operators, precompile  # noqa: E402
from sympow.model import GPTConfig  # noqa: E402


def forget(monkeypatch):
    """Let `check` know nothing but what is in its files, as the next process does."""
    monkeypatch.setattr(check, "_problems", {})


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Stand for a GPU that remembers in tmp_path what passed; return the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget(monkeypatch)
    monkeypatch.setattr(check.backend, "precompile", lambda launch: None)
    monkeypatch.setattr(check.backend, "table_name", lambda device: "GPU")
    for name, value in dict(current_device=0, set_device=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return tmp_path / "sympow" / "checked.json"


def test_disabled_kernels_give_way_to_pytorch_with_one_line(on_gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "_disabled", "OutOfResources: shared memory")
    monkeypatch.setattr(operators, "quadratic_attention", None)  # not called
    tensors, _ = inputs(40, "learned", DTYPES[-1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            y = power_attention(*tensors, p=2, form="quadratic")
    assert numerics.relative_error(y, naive.quadratic(*(x.double() for x in tensors), p=2), 1e-6) < 1e-5
    (line,) = {warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in told}
    assert len(told) == 1 and "not on its Triton kernels: OutOfResources" in line and line.count("\n") == 1


def test_what_is_compared_is_what_will_be_run(on_gpu, monkeypatch):
    plans = [
        plan(Problem(T, 64, 64, 2, torch.bfloat16, "cuda", gated=True), **more)
        for T in (1024, 65536)
        for more in ({}, dict(initial_state=True), dict(return_state=True), dict(queries=T - 1))
    ]
    forms = [chosen.size.form for chosen in plans]
    assert forms == ["quadratic", "states", "states", "quadratic", "chunked", "states", "states", "states"]
    compared = []
    monkeypatch.setattr(check, "compare", lambda sizes, device: compared.extend(sizes) or "wrong")
    for convolution, output_gate, parts in (0, False, []), (4, False, ["convolution"]), (0, True, ["prompt"]):
        config = GPTConfig(convolution=convolution, output_gate=output_gate)
        assert check.compare_plans([plans[0], plans[0]], torch.bfloat16, "cuda", config) == "wrong"
        assert [size.form for size in compared] == ["rotary", "cross_entropy", *parts, "quadratic"]
        compared.clear()


def test_a_check_runs_once_for_a_machine_and_its_failures_again_in_the_next_process(machine, monkeypatch):
    calls = []
    find = lambda answer: lambda: calls.append(threading.current_thread()) or answer
    for _ in range(2):
        assert check.remember("a", find("")) == "" and check.remember("b", find("wrong")) == "wrong"
    assert len(calls) == 2 and threading.main_thread() not in calls  # the caller's modes do not count there
    assert ["a" in key.split(", ")[-1] for key in json.loads(machine.read_text())] == [True]
    forget(monkeypatch)
    launched = []
    monkeypatch.setattr(check.backend, "precompile", launched.append)
    assert check.remember("a", find(""), launch="a") == "" and check.remember("b", find("")) == "" and launched == ["a"]
    assert len(calls) == 3 and len(json.loads(machine.read_text())) == 2
    machine.write_text("[" * 100_000)
    forget(monkeypatch)
    assert check.remember("c", find("")) == "" and len(json.loads(machine.read_text())) == 1


def test_the_sizes_of_a_model_are_compiled_together(machine, monkeypatch):
    sizes, launched = [check.Size("rotary", torch.bfloat16, D) for D in (64, 32)], []
    monkeypatch.setattr(check.backend, "precompile", lambda launch: launch())
    monkeypatch.setattr(check, "launch", launched.append)
    monkeypatch.setattr(check, "check", lambda sizes, longest: [])
    for _ in range(2):
        assert check.compare(dict.fromkeys(sizes)) == "" and launched == [sizes]


@pytest.mark.parametrize(
    "error,answer",
    [(RuntimeError("no compiler\nhere"), "no compiler"), (ValueError(), "ValueError"), (torch.OutOfMemoryError(), "")],
)
def test_an_exception_is_what_is_wrong_unless_there_is_no_memory_to_check(machine, monkeypatch, error, answer):
    def fails(*arguments):
        raise error

    monkeypatch.setattr(check, "check", fails)
    assert check.compare([check.Size("quadratic", torch.bfloat16, 64, 4)]) == answer
    assert not machine.exists()


def test_wrong_results_are_what_is_wrong(machine, monkeypatch):
    size = check.Size("chunked", torch.float32, 16, 2, gated=True)
    monkeypatch.setattr(check, "errors", lambda *size: {"y": 1e-6, "dq": float("nan")})
    assert check.compare([size]) == "wrong results, chunked float32 D=16 p=2 gated=True T=1200: y 1.0e-06, dq nan"
    forget(monkeypatch)
    monkeypatch.setattr(check, "errors", lambda *size: {"y": 1e-6, "dq": 1e-5})
    assert check.compare([size]) == ""


# For a process of its own without the interpreter, and without a GPU. Prints how many kernels the first use of a size
# compiles, in threads and then one after another, and how many calls of other sizes add to these.
KERNELS = """
import sys, targets, torch
from sympow.attention.operator import check
from sympow.kernels import configs, precompile
from triton.runtime.jit import JITFunction

gpu = configs.describe_gpu("NVIDIA H200", (9, 0), 227 * 1024)
configs.gpu = lambda device: gpu
targets.pretend_gpu(90)
size = eval(sys.argv[1])
operator = check.OPERATORS[size.form]

def use():
    for B, T, H, Hkv in (1, 64, 2, 1), (2, 1024, 12, 12), (3, 4112, 6, 2):
        q, k, v = (torch.randn(B, T, heads, size.D, dtype=size.dtype) for heads in (H, Hkv, Hkv))
        inputs, arguments = dict(q=q, k=k, v=v), dict(p=size.p)
        if size.gated:
            inputs["log_g"] = torch.randn(B, T, Hkv).sigmoid().log()
        if size.form == "heinsen":
            arguments = dict(resets=torch.zeros(B, T, dtype=torch.bool))
        check.differentiate(operator.kernels, inputs, arguments, torch.ones_like(q))

threads = precompile.precompile(lambda: check.launch([size], device="cpu"))
added = precompile.precompile(use)
compiled, run = [], JITFunction.run
JITFunction.run = lambda self, *args, warmup, **options: compiled.append(run(self, *args, warmup=True, **options).hash)
check.launch([size], device="cpu")
print(threads, len({*compiled}), added)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [
        'check.Size("quadratic", torch.bfloat16, 16, 4, gated=True)',
        'check.Size("chunked", torch.bfloat16, 16, 2, gated=True)',
        'check.Size("states", torch.bfloat16, 16, 2)',
        'check.Size("heinsen", torch.bfloat16, 16)',
    ],
)
def test_all_kernels_of_a_size_are_compiled_at_once_and_serve_every_length_batch_and_number_of_heads(size, tmp_path):
    threads, launched, added = run_without_gpu(KERNELS, size, tmp_path)
    assert threads == launched > 5 and added == 0


def run_without_gpu(program, size, cache):
    """Return the numbers that a program prints for a size; it compiles for a GPU that is not there, into this cache."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join((ROOT, os.path.join(ROOT, "tests")))}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", program, size], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return map(int, done.stdout.split())


# For such a process too. Prints how many kernels the first call of a size compiles one after another, and all of them.
FIRST_CALL = (
    KERNELS[: KERNELS.index("def use")]
    + """
from triton.runtime._async_compile import active_mode

alone, compiled, compile, run = [], [], JITFunction._do_compile, JITFunction.run

def count(self, *args, **options):
    compiled.append(self)
    alone.extend([] if active_mode.get() else [self])
    return compile(self, *args, **options)

JITFunction._do_compile = count
JITFunction.run = lambda self, *args, warmup, **options: run(self, *args, warmup=True, **options)
precompile.may_compile = lambda device: not precompile._lock.locked()  # as on a GPU
check.OPERATORS[size.form] = operator._replace(lengths=(1168,))
check.launch([size], device="cpu")
print(len(alone), len(compiled))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["quadratic", "sums", "chunked", "states"])
def test_the_first_call_of_a_size_compiles_the_kernels_of_a_pass_at_once(form, tmp_path):
    alone, compiled = run_without_gpu(FIRST_CALL, f'check.Size("{form}", torch.bfloat16, 16, 2, gated=True)', tmp_path)
    assert alone == 0 and compiled > 5


def test_a_kind_of_call_is_compiled_once_and_not_while_others_are(monkeypatch):
    x, compiled = torch.ones(1, 32, 2, 4), []
    monkeypatch.setattr(precompile, "_compiled", set())
    monkeypatch.setattr(precompile, "may_compile", lambda device: not precompile._lock.locked())
    monkeypatch.setattr(precompile, "precompile", lambda launch: compiled.append(launch().shape))
    function = lambda x, factor: x * factor
    call = lambda x, kind: precompile.compile_and_call(function, kind, x, factor=2)
    with precompile._lock:
        assert call(x, 2).equal(2 * x) and not compiled
    for x in x, x[:, :16], x[:, :15], x[..., :3], x.double(), x:
        assert call(x, 2).equal(2 * x)
    assert [(shape[1], shape[3]) for shape in compiled] == [(32, 4), (15, 4), (32, 3), (32, 4)]
    call(x, 4)
    assert len(compiled) == 5


@pytest.mark.slow
@pytest.mark.parametrize("form", ["auto", "chunked"])
def test_torch_compile_takes_the_kernels_whole_with_sizes_that_change(form, on_gpu):
    tensors, _ = inputs(150, "learned", DTYPES[-1])
    attend = lambda *x: power_attention(*x, p=2, form=form)
    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="aot_eager")
    for T in (140, 150):
        cut = [x[:, :T] for x in tensors]
        assert torch.equal(compiled(*cut), attend(*cut))


@pytest.mark.usefixtures("layer_norms")
@pytest.mark.parametrize(
    "attention,module,breaks",
    [
        ("sympow", decode, ""), ("sympow", decode, "attend"), ("sympow", decode, "flush"), ("softmax", decode, ""),
        ("softmax", decode_softmax, "attend_softmax"), ("heinsen", decode, ""),
        ("heinsen", decode_heinsen, "attend_heinsen"), ("heinsen", decode_heinsen, "add_log_position"),
    ],
)  # fmt: skip
def test_the_decoder_is_compared_with_the_model(monkeypatch, attention, module, breaks):
    config = GPTConfig(vocab_size=40, n_layer=1, n_head=1, n_embd=16, attention=attention)
    if breaks:
        monkeypatch.setattr(module, breaks, lambda *args, **options: None)
    problem = decoder.find_wrong_token(config, ATTENTIONS[attention], torch.float32, torch.float32, DEVICE)
    assert bool(problem) == bool(breaks), problem


def sympow_on_gpu(dtype):
    """Return a small model as generation sees it on a GPU, with weights of this dtype."""
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, attention="sympow")
    return seen_on_gpu(config, ATTENTIONS["sympow"](config), dtype=dtype)


def test_generation_steps_through_the_model_if_the_decoder_fails(on_gpu, monkeypatch):
    requests = []
    monkeypatch.setattr(decoder, "compare", lambda *args: requests.append(args) or "wrong results")
    monkeypatch.setattr(generate, "why_not", lambda *args: "")
    with pytest.warns(UserWarning, match="does not compute this model: generating with GPT.step .wrong results"):
        assert not generate.decodes_on_kernels(sympow_on_gpu(torch.float32), torch.bfloat16)
    assert [args[1:] for args in requests] == [(torch.float32, torch.bfloat16)]


def test_training_in_float16_is_planned_as_it_is_computed_in_float32(hopper):
    mix = ATTENTIONS["sympow_gating"](GPTConfig(attention="sympow_gating", n_head=1, n_embd=64))
    half, single = ((65536, dtype, "cuda") for dtype in (torch.float16, torch.float32))
    assert mix.plans(*half) == mix.plans(*single)


def test_generation_with_float16_weights_stays_in_pytorch(on_gpu, monkeypatch):
    """The kernels take no float16: that is one line of warning at most, and no check."""
    monkeypatch.setattr(decoder, "compare", None)  # not called
    assert not generate.decodes_on_kernels(sympow_on_gpu(torch.float16))
