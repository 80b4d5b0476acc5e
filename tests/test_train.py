"""train.py does what its settings say, from its arguments to its run folder."""

import contextlib
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
from helpers import (
    ROOT,
    SMALL,
    assert_near_run,
    assert_same_run,
    free_port,
    join,
    lines,
    metrics,
    refusal,
    start,
    start_ranks,
)
from wandb_server import no_key, wandb_server  # noqa: F401 (fixtures)

from sympow import train
from sympow.attention import ATTENTIONS
from sympow.training import batches
from sympow.runs import checkpoint, display, machine, settings


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_learns(go, attention):
    sizes = ["--tokens_per_step=128", "--max_iters=25", "--eval_interval=25"]
    assert go(f"--attention={attention}", "--out_dir=out/a", *sizes) == 0
    losses = metrics("out/a")
    assert list(losses) == list(range(1, 26))
    assert losses[25] < 0.75 * losses[1]
    assert metrics("out/a", "val_loss")[25] < 0.75 * losses[1]


def test_a_run_folder_has_all_that_is_needed_to_read_it(go):
    assert go("--attention=conformal_sympow", "--out_dir=out/a", "--sample_tokens=100") == 0
    files = {".lock", "ckpt", "config.json", "environment.json", "metrics.jsonl", "samples.jsonl", "tokenizer.json"}
    assert {name for name in os.listdir("out/a") if not name.endswith(".diff")} == files  # of changed code
    assert sorted(os.listdir("out/a/ckpt")) == ["step_00000003", "step_00000006"]
    config = json.load(open("out/a/config.json"))
    assert config["model"]["rope_base"] == 512 and config["model"]["vocab_size"] == 257  # by the data
    step, _, _, evaluation, *_ = lines("out/a")
    assert {"step", "train_loss", "tokens", "seconds", "lr", "grad_norm", "tok_per_sec"} <= step.keys()
    assert step["tokens"] == 256 and "mfu" not in step  # no peak is known for a CPU
    assert evaluation.keys() - {"gate", "beta"} == {"step", "val_loss", "tokens", "seconds", "memory", "context"}
    (start,) = json.load(open("out/a/environment.json"))
    assert torch.__version__.startswith(start["versions"]["torch"])
    assert len(start["commit"]) == 40 and start["command"][1:3] == SMALL[:2] and start["world"] == 1
    samples = [json.loads(line) for line in open("out/a/samples.jsonl")]
    assert [s["step"] for s in samples] == [3, 6] and all(s["text"] for s in samples)


def test_an_attention_that_does_not_generate_trains_without_samples(go, monkeypatch):
    def without_state(mix, x, qkv, resets=None, state=None):
        assert state is None, "it does not generate"
        return forward(mix, x, qkv, resets)

    forward = ATTENTIONS["sympow"].forward
    monkeypatch.setattr(ATTENTIONS["sympow"], "forward", without_state)
    assert go("--attention=sympow", "--out_dir=out/a", "--sample_tokens=0") == 0
    with pytest.raises(AssertionError, match="it does not generate"):
        go("--attention=sympow", "--out_dir=out/b", "--sample_tokens=10")


def test_a_resume_and_a_conversion_keep_the_settings_that_they_do_not_give(go, capsys, refused):
    recipe = dict(positions="rotary,none", gate_bias=5.0, convolution=3, output_gate=False)
    saved = lambda run: json.load(open(f"{run}/config.json"))["model"].items()
    start = ["--attention=sympow_gating", "--out_dir=out/a"]
    assert go(*start, *(f"--{name}={value}" for name, value in recipe.items()), "--max_iters=3") == 0
    assert go(*start) == 0 and list(metrics("out/a")) == [*range(1, 7)] and recipe.items() <= saved("out/a")
    assert "was trained with gate_bias=5.0, now gate_bias=3.0" in refused(go, *start, "--gate_bias=3")
    convert = ["--attention=sympow", "--init_from=out/a", "--max_iters=1"]
    assert go(*convert, "--out_dir=out/b") == 0 and recipe.items() <= saved("out/b")
    assert go(*convert, "--out_dir=out/c", "--positions=none") == 0
    assert "positions=rotary,none becomes none" in capsys.readouterr().out


@pytest.mark.parametrize(
    "extra",
    [
        "--dropout=0.1",
        "--optimizer=muon --schedule=wsd --decay_share=0.5 --weight_decay=0.1 --dropout=0.1 --max_iters=6",
        "--optimizer=muon --schedule=cosine --dtype=bfloat16",
    ],
)
def test_a_run_that_was_cut_resumes_with_the_same_bits(go, capsys, extra):
    extra = ["--attention=sympow_gating", "--warmup_iters=2", *extra.split()]
    assert go(*extra, "--out_dir=out/whole") == 0
    shutil.copytree("out/whole", "out/cut")
    shutil.rmtree("out/cut/ckpt/step_00000006")
    with open("out/cut/metrics.jsonl", "a") as f:  # the last line is torn
        f.write('{"step": 4, "train_loss": 99.0}\n{"step": 5, "tra')
    capsys.readouterr()
    assert go(*extra, "--out_dir=out/cut") == 0
    out = capsys.readouterr().out
    assert "resuming from out/cut/ckpt/step_00000003, step 3" in out
    assert "stopped at step 6: max_iters=6 is reached\n" in out
    assert_same_run("out/cut", "out/whole")
    assert go(*extra, "--out_dir=out/cut", "--init_from=resume") == 0  # nanoGPT's name for auto
    assert "out/cut is trained: 6 steps" in capsys.readouterr().out


def test_a_run_goes_on_only_with_its_own_settings(go, refused):
    assert go("--attention=sympow", "--out_dir=out/a") == 0
    for change, message in (
        ("--p=4", "was trained with p=2, now p=4"),
        ("--learning_rate=1", "was trained with learning_rate=0.01, now learning_rate=1.0"),
        ("--tokens_per_step=512", "tokens_per_step=256, now tokens_per_step=512"),
    ):
        assert message in refused(go, "--attention=sympow", "--out_dir=out/a", change)
    assert go("--attention=sympow", "--out_dir=out/a", "--max_iters=7", "--eval_interval=2", "--batch_size=2") == 0
    assert max(metrics("out/a")) == 7


def test_nothing_is_overwritten_unless_asked_and_then_renamed(go, refused):
    assert go("--out_dir=out/a") == 0
    message = "out/a is not empty: --overwrite=True renames it"
    assert message in refused(go, "--out_dir=out/a", "--init_from=scratch")
    message = "overwrite=True needs --init_from=scratch, or weights"
    assert message in refused(go, "--out_dir=out/a", "--overwrite=True")
    assert go("--out_dir=out/a", "--init_from=scratch", "--overwrite=True") == 0
    assert go("--out_dir=out/a/", "--init_from=scratch", "--overwrite=True") == 0
    assert sorted(os.listdir("out")) == ["a", "a.old-1", "a.old-2"] and os.path.exists("out/a.old-1/metrics.jsonl")
    assert "which would be renamed" in refused(go, "--out_dir=out/a", "--init_from=out/a", "--overwrite=True")


def test_weights_of_another_run_can_be_taken(go, capsys):
    assert go("--out_dir=out/a", "--attention=even_power", "--max_iters=12", "--eval_interval=12") == 0
    assert go("--out_dir=out/b", "--attention=sympow", "--init_from=out/a", "--max_iters=1", "--eval_interval=1") == 0
    assert metrics("out/b")[1] < metrics("out/a")[6]
    assert go("--out_dir=out/b", "--attention=sympow", "--init_from=out/a", "--max_iters=2") == 0  # goes on
    assert list(metrics("out/b")) == [1, 2]
    assert go("--out_dir=out/e", "--init_from=out/a", "--eval_only=True") == 0 and not os.path.exists("out/e")
    expected = f"val loss {metrics('out/a', 'val_loss')[12]:.4f}"  # even_power still: settings come with the weights
    assert expected in capsys.readouterr().out


def test_accumulation_and_batch_size_do_not_change_the_step(go):
    for name, batch in (("a", 8), ("b", 2)):
        assert go(f"--out_dir=out/{name}", "--attention=sympow", f"--batch_size={batch}") == 0
    assert_near_run("out/a", "out/b", rel=1e-5)
    assert go("--out_dir=out/c", "--attention=sympow", "--batch_size=2", "--gradient_accumulation_steps=4") == 0
    assert metrics("out/c") == metrics("out/b")


def test_two_processes_take_the_same_steps_as_one(go, dataset):
    options = ["--attention=conformal_sympow,softmax", "--activation_checkpointing=True"]
    ranks = start_ranks(2, train.main, *SMALL, f"--dataset={dataset}", "--out_dir=out/two", *options)
    assert go("--out_dir=out/one", *options) == 0 and join(*ranks) == [0, 0]
    assert_near_run("out/two", "out/one", ("train_loss", "val_loss", "grad_norm"), rel=1e-5)


@pytest.mark.parametrize(
    "settings,message",
    [
        ("--n_embd=33", "n_embd must be a multiple of n_head, got 33 and 2; or set head_dim"),
        ("--attention=sympow --p=3", "p must be a positive even integer, got 3"),
        (
            "--block_size=1024 --tokens_per_step=4096",
            "is longer than the documents of text (512 tokens): give --block_size=512 or less, or --pack=1",
        ),
        (
            "--block_size=2048 --tokens_per_step=8192",
            "is longer than the documents of text (512 tokens): give --block_size=512 or less\n",
        ),
        ("--tokens_per_step=300", "1 ranks x batch_size 4 x block_size 32 = 128, got 300"),
        ("--gradient_accumulation_steps=3", "= 384, but tokens_per_step is 256: give one of them"),
        ("--dataset=nowhere", "no dataset 'nowhere'"),
        ("--batch_size=0", "batch_size must be at least 1, got 0"),
        ("--beta1=1", "beta1 must be in [0, 1), got 1.0"),
        ("--device=tpu", "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("--lr=1", "unknown key --lr=1: did you mean learning_rate?"),
        ("--eval_iters=1", "--eval_iters=1: did you mean eval_tokens?"),
        ("--attention=sympow,sympow_gatng", "got 'sympow_gatng': did you mean sympow_gating?"),
        ("--attention=retention", f"{', '.join(ATTENTIONS)}, got 'retention'\n"),
        ("--schedule=cosin", "got 'cosin': did you mean cosine?"),
        ("--dtype=float16", "dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ("--learning_rate=1e-5 --schedule=cosine", "min_lr must be at most learning_rate=1e-05"),
        ("--decay_share=0", "decay_share must be above 0 and at most 1, got 0.0"),
        ("--init_from=resume", "there is no checkpoint in out_dir out/a; leave init_from out, or give scratch, "),
        ("--then=64@1.5", "then must be CONTEXT@START"),
        ("--then=32@0.5", "then must have contexts that grow from block_size=32 on"),
        ("--then=64@0.9,128@0.5", "contexts that start after [5, 3] steps"),
        ("--then=1024@0.5", "then 1024 is longer than the documents of text (512 tokens)"),
        ("--then=2048@0.5 --pack=1", "then 2048 is longer than the val split of text (1536 tokens)"),
        ("--then=512@0.5", "multiple of 1 ranks x context 512 = 512, got 256"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_made(go, refused, settings, message):
    assert message in refused(go, *settings.split(), "--out_dir=out/a") and not os.path.exists("out")


def test_packed_documents_may_be_shorter_than_the_context(go):
    packed = ["--pack=1", "--block_size=1024", "--tokens_per_step=1024", "--batch_size=1", "--eval_tokens=1024"]
    assert go("--attention=softmax,conformal_sympow", "--out_dir=out/a", "--max_iters=1", *packed) == 0
    assert json.load(open("out/a/config.json"))["model"]["reset_token"] == 256


class Ticks:
    """Stand for the module time. Every call takes `seconds`."""

    def __init__(self, seconds=0.01):
        self.now, self.seconds = 0.0, seconds

    def perf_counter(self):
        self.now += self.seconds
        return self.now


def test_the_schedule_follows_the_time_that_it_is_given_and_a_resumed_run_goes_on_with_it(go, monkeypatch, capsys):
    monkeypatch.setattr("sympow.runs.metrics.time", Ticks())
    timed = ["--decay_lr=True", "--min_lr=1e-4", "--max_seconds=2", "--lr_decay_iters=100000", "--eval_interval=100000"]
    assert go(*timed, "--out_dir=out/a", "--max_iters=8") == 0
    assert "stopped at step 8: max_iters=8 is reached\n" in capsys.readouterr().out
    seconds = json.load(open("out/a/ckpt/step_00000008/progress.json"))["seconds"]
    assert 0 < seconds < 1.5
    assert go(*timed, "--out_dir=out/a", "--max_iters=100000") == 0
    rates, last = metrics("out/a", "lr"), max(metrics("out/a"))
    assert f"stopped at step {last}: max_seconds=2 is reached\n" in capsys.readouterr().out
    assert max(metrics("out/a", "val_loss")) == last
    cfg = train.TrainConfig(learning_rate=1e-2, min_lr=1e-4, schedule="cosine", max_seconds=2, lr_decay_iters=100000)
    assert rates[1] == 1e-2 and rates[9] == train.learning_rate(8, cfg, seconds) < rates[8]
    assert list(rates.values()) == sorted(rates.values(), reverse=True) and 1e-4 <= rates[last] < 3e-4


LEAVE = """
import time
import torch
from sympow.runs.processes import Ranks

ranks = Ranks()
ranks.join(torch.device("cpu"), "gloo", timeout=1)
ranks.watch.interval = 0  # it reports all the time, so that it is in the store's C++ when Python exits
time.sleep(0.5)
ranks.leave()
"""


def test_a_rank_that_leaves_no_longer_reports_when_python_exits():
    env = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    rank = subprocess.run([sys.executable, "-c", LEAVE], env={**os.environ, **env}, capture_output=True, text=True)
    assert rank.returncode == 0, rank.stderr


def test_a_backend_for_gpus_is_refused_on_cpus_and_leaves_no_folder(go, monkeypatch, refused):
    for variable, number in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(variable, number)
    line = refused(go, "--out_dir=out/a", "--backend=nccl")
    assert "backend=nccl needs a GPU for each rank" in line and not os.path.exists("out")


@pytest.mark.parametrize("given,missing", [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_what_a_launcher_sets_is_one_line(go, monkeypatch, refused, given, missing):
    monkeypatch.setenv(given, "0" if given == "RANK" else "2")
    assert f"variable {missing} is missing: a launcher sets both" in refused(go, "--out_dir=out/a")
    assert not os.path.exists("out")


@pytest.mark.parametrize(
    "options",
    [
        "--batch_size=1000000000 --tokens_per_step=32000000000",
        "--n_embd=1000000000 --head_dim=16",
        "--n_embd=1000000",
        "--n_embd=20000 --batch_size=1",
    ],
)
def test_a_step_that_no_cpu_can_hold_is_refused(go, refused, options):
    pattern = r"batch_size=\d+ takes at least [\d,.]+ GB of .* has [\d,.]+ GB: a smaller batch_size"
    assert re.search(pattern, refused(go, *options.split(), "--out_dir=out/a")) and not os.path.exists("out")


CPU_FULL = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 by"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("can't allocate memory"), RuntimeError(CPU_FULL)], ids=["GPU", "CPU"]
)
def test_too_little_memory_is_one_line_that_says_what_needs_less(go, monkeypatch, capsys, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(train.GPT, "forward", full)
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert go("--out_dir=out/a") == 1
    line = refusal(capsys)
    assert re.match(r"train.py: out of memory: can't allocate memory.*; a smaller --batch_size", line)
    assert "--activation_checkpointing=True" in line and "--shard=True" in line


def test_a_missing_toolchain_is_one_line_unless_compilation_was_demanded(go, monkeypatch, capsys):
    def broken(function):
        raise RuntimeError("no C compiler found\nand a long explanation")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(os, "_exit", sys.exit)
    warnings = []
    assert machine.can_compile("auto", torch.device("cuda"), warnings.append) is False
    assert warnings == ["training without torch.compile: no C compiler found (see `make doctor`)"]
    assert go("--out_dir=out/a", "--compile=True") == 1
    assert "compile=True, but torch.compile does not work here: no C compiler found" in capsys.readouterr().err
    assert go("--out_dir=out/b", "--compile=auto") == 0  # a CPU does not try


@pytest.fixture
def graph_cache():
    """Return torch._inductor's settings, and set back afterwards those that machine.cache_graphs sets."""
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor

    names = "autograd_cache_allow_custom_autograd_functions", "unsafe_marked_cacheable_functions"
    with autograd.patch(names[0], False), inductor.patch(names[1], {}):
        yield inductor


@pytest.mark.slow
def test_a_model_is_compiled_by_its_parts_and_not_again_before_its_code_changes(tmp_path, monkeypatch, graph_cache):
    """Three layers of one kind are two blocks, since the first one has nothing to add, beside embedding and loss."""
    from torch._dynamo.utils import counters

    from sympow.model import GPT, GPTConfig
    from sympow.training.parallel import compile_parts

    def compile_model():
        torch._dynamo.reset()
        counters.clear()
        model = GPT(GPTConfig(attention="sympow_gating", n_layer=3, n_head=1, n_embd=16, vocab_size=64))
        compile_parts(model)
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(ids, ids.clone())
        loss.backward()
        return {name: n for name, n in counters["aot_autograd"].items() if name.startswith("autograd_cache")}

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ids = torch.zeros(1, 16, dtype=torch.int64)
    new = dict(autograd_cache_miss=4, autograd_cache_saved=4)
    machine.cache_graphs()
    assert compile_model() == new and compile_model() == dict(autograd_cache_hit=4)
    monkeypatch.setattr(machine, "hash_sources", lambda sources: "of other code")
    machine.cache_graphs()
    assert compile_model() == new


def test_graphs_of_another_code_of_an_attention_of_ones_own_are_not_found(tmp_path, monkeypatch, graph_cache):
    """A graph names the operators that the user's module registers, but not their derivatives."""
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for code in ("x = 1", "x = 1", "x = 2"):
        (tmp_path / "an_attention_of_ones_own.py").write_text(code)
        importlib.import_module("an_attention_of_ones_own")
        machine.cache_graphs()
        keys.append(graph_cache.unsafe_marked_cacheable_functions)
    assert keys[0] == keys[1] != keys[2]


def test_wandb_has_nanogpts_names_and_our_own_step(go, wandb_server, monkeypatch):  # noqa: F811
    """The real package with a server on this machine. The group and the tags are in its own environment variables."""
    monkeypatch.setenv("WANDB_RUN_GROUP", "g")
    monkeypatch.setenv("WANDB_TAGS", "t,u")
    assert go("--out_dir=out/a", "--wandb=auto", "--max_iters=3") == 0
    assert go("--out_dir=out/a", "--wandb=auto", "--max_iters=4") == 0
    (run,) = wandb_server.runs.values()  # the same run went on
    assert (run["displayName"], run["groupName"], run["tags"]) == ("a", "g", ["t", "u"])
    assert run["config"]["parameters"]["value"] > 30000 and run["config"]["seed"]["value"] == 1337
    rows = [{name for name in row if not name.startswith("_")} for row in run["rows"]]
    assert [row["iter"] for row in run["rows"]] == [1, 2, 3, 3, 3, 4, 4, 4]
    both = {"iter", "tokens", "seconds", "memory"}
    axes = [metric["1"] for metric in run["config"]["_wandb"]["value"]["m"] if "1" in metric]
    assert sorted(axes) == ["iter", "memory", "seconds", "tokens"]
    assert rows[0] >= both | {"train/loss", "lr", "train/tok_per_sec", "train/grad_norm", "train/context"}
    assert rows[3] == both | {"val/loss", "val/context"} and rows[4] == {"iter", "sample"}


def test_config_files_are_complete():
    """Each file in config/ gives a model; the papers' files name LongCrawl64, context 4096, 524,288 tokens a step."""
    from dataclasses import fields

    from sympow.model import GPTConfig
    from sympow.runs.settings import read_settings

    for name in (path.stem for path in pathlib.Path(ROOT, "config").glob("[!_]*.py")):
        values, _ = read_settings((train.TrainConfig, GPTConfig), [f"{ROOT}/config/{name}.py"])
        model = GPTConfig(**{f.name: values[f.name] for f in fields(GPTConfig) if f.name in values})
        assert "max_seconds" not in values  # a busy machine takes the same steps
        if values.get("dataset") == "longcrawl64":
            assert name.startswith("hybrid" if "," in model.attention else model.attention)
            assert f"_p{model.p}" in name or not any(map(str.isdigit, name))
            cfg = train.TrainConfig(**{f.name: values[f.name] for f in fields(train.TrainConfig) if f.name in values})
            assert (cfg.block_size, cfg.tokens_per_step) == (4096, 524288)
            assert settings.accumulation_steps(cfg, values, 8) * 8 * cfg.batch_size * 4096 == 524288


@pytest.mark.parametrize("limit", ["0", "1e6"])
def test_seconds_count_evaluations_samples_and_checkpoints_with_and_without_a_limit(go, monkeypatch, limit):
    ticks = Ticks()
    monkeypatch.setattr("sympow.runs.metrics.time", ticks)
    for owner, function, duration in (
        (batches, "eval_batches", 100),
        (batches, "generate_by_steps", 1000),
        (checkpoint.Writer, "save", 10000),
    ):

        def slow(*args, real=getattr(owner, function), duration=duration, **kwargs):
            ticks.now += duration
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, function, slow)
    assert go("--out_dir=out/a", f"--max_seconds={limit}") == 0  # evaluates after steps 3 and 6
    saved = [json.load(open(f"out/a/ckpt/step_0000000{step}/progress.json"))["seconds"] for step in (3, 6)]
    assert [int(x) for x in saved] == [1100, 12200]
    assert [int(line["seconds"]) for line in lines("out/a")] == [0, 0, 0, 100, 11100, 11100, 11100, 11200]
    assert all(speed > 256 for speed in metrics("out/a", "tok_per_sec").values())  # of steps alone


@pytest.mark.parametrize("max_seconds,left", [(50, "00:10"), (0, "07:15")])
def test_the_bar_shows_what_was_logged_last_and_a_time_left_that_counts_evaluations(max_seconds, left):
    cfg = train.TrainConfig(max_iters=100, max_seconds=max_seconds)
    shown = display.Display(cfg, 10, torch.device("cpu"), shown=True)
    for step, seconds in ((11, 30.0), (13, 40.0)):
        numbers = dict(train_loss=2.5, tok_per_sec=1000.0, lr=1e-3, seconds=seconds, mfu=None)
        shown.log(step, numbers, steps_per_second=2.0, context=32)
        shown.step()
    assert re.search(rf"12/100 .*loss 2.5000, 1,000 tok/s, {left} left\]", str(shown.bar))
    shown.close()
    assert display.Display(cfg, 10, torch.device("cpu"), shown=False).bar.disable


def test_without_a_terminal_a_line_has_loss_speed_rate_memory_and_the_time_left(go, capsys):
    assert go("--out_dir=out/a", "--log_interval=2", "--warmup_iters=1") == 0
    form = r"step (\d): loss \d\.\d{4}, [\d,]+ tok/s, lr (\S+), \d+\.\d GB, (\d\d:\d\d) left"
    steps = re.findall(form, capsys.readouterr().out)
    assert [step for step, _, _ in steps] == ["1", "2", "4", "6"]
    assert steps[0][1] == "5.00e-03" and steps[-1][1:] == ("1.00e-02", "00:00")


def test_a_sample_that_does_not_fit_into_memory_does_not_end_training(go, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError("the state takes 1000 GB")

    monkeypatch.setattr(batches, "generate_by_steps", full)
    assert go("--out_dir=out/a", "--max_iters=3") == 0
    assert json.loads(open("out/a/samples.jsonl").read())["text"] == "(no sample: the state takes 1000 GB)"


def test_the_best_checkpoint_stays(go):
    model = torch.nn.Linear(1, 1)
    os.makedirs("out/a")
    optimizer, writer = torch.optim.AdamW(model.parameters()), checkpoint.Writer("out/a")
    for step in range(1, 6):
        writer.save(model, optimizer, checkpoint.Progress(step, best_step=min(step, 2)))
    writer.wait()
    assert sorted(os.listdir("out/a/ckpt")) == ["step_00000002", "step_00000004", "step_00000005"]
    assert checkpoint.newest("out/a") == os.path.join("out/a", "ckpt", "step_00000005")
    assert checkpoint.load("out/a/ckpt/step_00000002", model).step == 2


def test_ranks_that_do_not_share_out_dir_end_with_a_line(dataset, tmp_path):
    argv = [*SMALL, f"--dataset={dataset}", "--out_dir=out/a", "--timeout=4"]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    assert join(start(train.main, *argv, "--max_iters=3", cwd=folders[0])) == [0]
    assert all(join(*start_ranks(2, train.main, *argv, cwd=tmp_path, cwds=folders)))
    assert "out_dir must be shared by all nodes" in (tmp_path / "rank_1").read_text()


def test_the_kernels_that_are_compared_are_those_that_training_will_run(hopper):
    def form(block_size, ranks=1, **settings):
        model = train.GPT(train.GPTConfig(n_layer=1, n_head=1, n_embd=64, vocab_size=64, **settings))
        (chosen,) = model.attentions()[0].plans(block_size, torch.bfloat16, "cuda", ranks) or [None]
        return chosen and chosen.size and chosen.size.form

    assert form(1024, attention="sympow_gating") == form(1024, 2, attention="conformal_sympow") == "quadratic"
    assert form(65536, attention="sympow_gating") == "chunked"
    assert form(65536, 2, attention="sympow_gating") == "states"
    assert form(65536, attention="sympow", p=6, form="chunked") is None  # in PyTorch


def test_prompts_are_read_by_kernels_that_were_compared(monkeypatch, hopper):
    compared = []
    monkeypatch.setattr(machine, "compare_plans", lambda plans, *sizes: compared.extend(plans) or "wrong results")
    monkeypatch.setattr(machine, "disable_kernels", compared.append)
    model = train.GPT(train.GPTConfig(n_layer=3, n_head=1, n_embd=64, attention="sympow_gating,softmax,heinsen"))
    plans = [mix.prompt_plans(torch.bfloat16, "cuda") for mix in model.attentions()]
    forms = [[chosen.size.form for chosen in plans] for plans in plans]
    assert forms == [["quadratic", "states"], [], ["heinsen"]]
    with pytest.warns(UserWarning, match="without its Triton kernels, which fail on this machine: wrong results"):
        machine.check_kernels_of_prompts(model)
    assert compared.pop() == "wrong results"
    assert [chosen.form for chosen in compared] == ["quadratic", "chunked", "chunked"]


def test_kernels_that_fail_on_one_rank_are_used_on_none(monkeypatch):
    failures, warnings = [], []
    monkeypatch.setattr(machine, "compare_plans", lambda *args: "")
    monkeypatch.setattr(machine, "disable_kernels", failures.append)
    ranks = types.SimpleNamespace(
        first=lambda failure: failure or "wrong results on rank 1",
        log=warnings.append,
        local_rank_0_first=contextlib.nullcontext,
    )
    model = train.GPT(train.GPTConfig(n_layer=1, n_head=1, n_embd=64))
    machine.check_kernels(model, [1024], torch.bfloat16, ranks)
    assert failures == ["wrong results on rank 1"] and "fail on this machine: wrong results on rank 1" in warnings[0]


def test_gates_and_rotations_are_logged(go):
    options = "--attention=conformal_sympow,softmax", "--gate_bias=6.9", "--convolution=0", "--output_gate=False"
    assert go(*options, "--out_dir=out/a", "--sample_tokens=0") == 0
    for line in [line for line in lines("out/a") if "val_loss" in line]:
        (gate, no_gate), (beta, no_beta) = line["gate"], line["beta"]
        assert 0.99 < gate < 1 and 0.5 < beta < 1.5 and no_gate is no_beta is None
    assert not os.path.getsize("out/a/samples.jsonl")


def test_ranks_that_cannot_meet_end_with_a_line(dataset, tmp_path):
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "no port"}
    argv = [*SMALL, f"--dataset={dataset}", "--out_dir=out/a"]
    assert join(start(train.main, *argv, env=env, cwd=tmp_path)) == [1]
    log = (tmp_path / "log").read_text()
    assert "the ranks cannot find each other: " in log and "Traceback" not in log
