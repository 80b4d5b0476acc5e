"""Experiments: corpora by project, tables that mix nothing, and runs that are kept."""

import math
import os
import pathlib
import random
import re
import runpy
import signal
import subprocess
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from numerics import DEVICE, GATES, gradients, relative_error

from sympow.attention import ATTENTIONS, naive
from sympow.data import near_duplicates
from sympow.data.dataset import Dataset
from sympow.data.files import read_json, write_json
from sympow.data.source import prepare as prepare_source
from sympow.experiments import english, larger, long_texts, measure, parts, recipe, report, runs
from sympow.experiments.forgetting import Forgetting, fla_attention, forgetting_attention
from sympow.experiments.measure import find_texts, read_text, read_tokens
from sympow.experiments.report import Entry, table
from sympow.experiments.runs import SIZES, make_run
from sympow.model import GPT, GPTConfig

SEED = int(os.environ.get("TEST_SEED", 0))
RECORDS = pathlib.Path(helpers.ROOT, "docs/data").glob("*.json")
EXPERIMENTS = [path.stem for path in RECORDS if not path.stem.endswith("_cost")]  # those are of bench/sample.py


def code(seed, lines=60):
    """Return the source of a file that shares no line with files of another seed."""
    draw = random.Random(f"{SEED} {seed}")
    return "".join(f"{draw.randrange(10**9)} = compute({draw.randrange(10**9)})\n" for _ in range(lines)).encode()


# ---- corpora by project


def test_repeated_texts_are_found_whatever_their_white_space():
    a, b = code("a"), code("b")
    indented = b"".join(b"    " + line + b"\r\n\n" for line in a.splitlines())
    half = b"".join(a.splitlines(True)[:30]) + b"".join(b.splitlines(True)[:30])
    shares = near_duplicates.repeated_shares([a, b"", b, indented, half, code("c"), a[:100]])
    assert not any(shares[i] for i in (0, 1, 2, 5))
    assert shares[3] > 0.95 and 0.8 < shares[4] < 1 and shares[6] < 1  # the shingles across the seam are new


def prepare_projects(folder, projects, *options):
    """Write {project: {path: bytes}} below a folder, and return the dataset that is prepared from them."""
    for name, files in projects.items():
        for path, text in files.items():
            (folder / "in" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "in" / name / path).write_bytes(text)
    prepare_source.main([f"--root={folder / 'in'}", f"--out={folder / 'out'}", *options])
    return Dataset(str(folder / "out"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a dataset of 12 projects, with copies planted in each of them, and their texts by project."""
    projects = {}
    for i in range(12):
        files = projects[f"project{i}"] = {f"src/part{j}.py": code(f"{i} {j}") for j in range(4)}
        files["vendor/six.py"] = code("six")  # vendored by all
        files["LICENSE.py"] = code("licence") + (b"# own\n" * (i % 2))
        files["tables.py"] = b"1234, 5678\n" * 7000  # above 65,536 bytes
    projects["zlib-1.2"] = {"zlib.py": code("zlib")}
    projects["zlib-1.3"] = {"zlib.py": code("zlib"), "new.py": code("new zlib")}
    folder = tmp_path_factory.mktemp("source")
    return prepare_projects(folder, projects, "--val_fraction=0.2", "--document_length=512"), projects


def text_of(dataset, split):
    """Return the bytes of a split, with 0 for ends of text."""
    tokens = dataset.read(split, 0, dataset.tokens(split))
    return bytes(np.where(tokens == dataset.eot, 0, tokens).astype(np.uint8))


def test_whole_projects_are_held_out_and_copies_are_gone(source):
    dataset, _ = source
    train, val = text_of(dataset, "train"), text_of(dataset, "val")
    assert not set(train.splitlines()) & {line for line in val.splitlines() if len(line) > 10}
    rows = list(dataset.meta["held_out"].values())
    assert 2 <= len(rows) < 8 and sum(rows) == dataset.documents("val") and rows == sorted(rows)
    assert (train + val).count(code("six")[:200]) == 1  # one of 12 copies
    assert (train + val).count(code("zlib")[:200]) <= 1  # two versions are one project
    dropped = dataset.meta["dropped"]
    assert dropped["above 65,536 bytes"] == 12 and dropped["mostly repeated"] >= 2 * 11
    assert dataset.meta["files"] <= 12 * 4 + 4 and len(val) >= 0.15 * len(train)


def test_the_files_of_a_project_follow_each_other_without_a_mark(source):
    dataset, projects = source
    name = max(dataset.meta["held_out"], key=dataset.meta["held_out"].get)
    parts = b"".join(projects[name][f"src/part{j}.py"] for j in range(4))
    val = text_of(dataset, "val")
    assert parts[1024 : len(parts) // 512 * 512 - 1024] in val and b"\0" not in val
    assert 0 < text_of(dataset, "train").count(b"\0") <= dataset.meta["projects"]


def test_a_foreign_context_is_another_projects_and_the_scored_tokens_stay(source, monkeypatch):
    dataset, _ = source
    texts_read = []

    def read(model, inputs, targets, window):
        texts_read.append((inputs, targets))
        return np.arange(512.0) + 3 * (len(texts_read) % 2 == 0)

    monkeypatch.setattr(measure, "read_text", read)
    differences = measure.swapped_context(None, dataset, 512, documents=9, skip=0, last=96)
    texts = find_texts(dataset, 512, 9, 0)
    assert differences == len(texts) * [3.0] and len(texts_read) == 2 * len(texts)
    own = [(project, read_tokens(dataset, start, 512)[0]) for project, start in texts]
    for (project, _), (inputs, targets), (foreign, foreign_targets) in zip(texts, texts_read[::2], texts_read[1::2]):
        assert torch.equal(targets, foreign_targets) and torch.equal(inputs[:, -192:], foreign[:, -192:])
        beginnings = [name for name, ids in own if torch.equal(ids[:, :320], foreign[:, :320])]
        assert beginnings and project not in beginnings


def test_texts_of_one_project_alone_have_no_foreign_context(source, monkeypatch, refused):
    """As where only one project is as long as the texts are."""
    dataset, _ = source
    monkeypatch.setattr(measure, "find_texts", lambda *arguments: [("a", 0), ("a", 512)])
    line = refused(helpers.call, lambda: measure.swapped_context(None, dataset, 512, documents=9, skip=0, last=96))
    assert "holds out one project, a" in line


def test_a_corpus_by_project_takes_a_tokenizer_that_is_trained_on_its_training_split(tmp_path):
    projects = {f"p{i}": {f"{j}.py": code(f"{i} {j}", 200) for j in range(4)} for i in range(8)}
    options = "--tokenizer=bpe:300", "--val_fraction=0.3", "--document_length=256"
    dataset = prepare_projects(tmp_path, projects, *options)
    held_out = dataset.meta["held_out"]
    assert 257 < dataset.vocab_size <= 300 and sum(held_out.values()) == dataset.documents("val") and len(held_out) > 1
    row = 0
    for name, count in held_out.items():  # each row is one project's
        text = dataset.tokenizer.decode(dataset.read("val", 256 * row, 256 * count).tolist())
        assert len(text) > 1000 and b"".join(projects[name].values()).decode().startswith(text)
        row += count
    train = dataset.read("train", 0, dataset.tokens("train"))
    assert 0 < (train == dataset.eot).sum() < len(projects)


# ---- tables and curves


def entry(name, loss, corpus="abc", **record):
    """Return the Entry of a run with one seed."""
    corpus = dict(name="here", sha256=corpus, tokens=dict(train=400))
    return Entry(name, [dict(name=name, corpus=corpus, tokens=1000, val=[[1000, loss]], **record)])


def test_a_table_names_the_corpus_and_mixes_no_two(refused):
    entries = [entry("one", 0.5), entry("two", 1.0)]
    columns = [("tokens", report.tokens_cell), ("loss", report.loss_cell), ("none", lambda row: None)]
    lines = table("T", columns, entries).splitlines()
    assert lines[0] == "**T** (here abc)" and lines[5] == "| two | 1,000 (2.5 epochs) | 1.0000 | - |"
    mixed = [*entries, entry("three", 1.0, corpus="other")]
    message = refused(helpers.call, lambda: table("T", columns, mixed))
    assert "different corpora are not put into one table: here abc, here other" in message


def test_a_difference_has_a_confidence_interval_over_the_seeds_that_both_have():
    def row(**losses):
        return Entry("", [dict(settings={"seed": seed}, val=[[1, loss]]) for seed, loss in losses.items()])

    base = row(a=0.9, b=1.9, c=0.9, e=7.0)
    _, cell = report.seeds_column("", base)
    # 4.303 standard errors of 0.1 / sqrt(3)
    assert cell(row(d=5.0, c=1.2, b=2.1, a=1.0)) == "+0.2000 ± 0.2484 (3 seeds)"
    assert cell(row(d=5.0, a=1.0)) == "+0.1000" and cell(row(d=5.0)) is None and cell(base) is None


def test_a_difference_over_many_texts_takes_the_mean_of_the_seeds_that_both_have():
    def row(projects=range(64), **losses):
        measures = [dict(positions=dict(texts=texts, projects=projects)) for texts in losses.values()]
        records = [dict(settings={"seed": seed}, measures=measured) for seed, measured in zip(losses, measures)]
        return Entry("", [*records, dict(settings={"seed": "not measured"})])

    _, cell = report.texts_column("", row(a=64 * [1.0], b=64 * [2.0], c=64 * [9.0]))
    both, one = row(a=[2.0, 4.0] * 32, b=64 * [3.0], d=64 * [0.0]), row(b=[2.0, 4.0] * 32)
    assert cell(both) == "+1.5000 ± 0.1342" and cell(one) == "+1.0000 ± 0.2685"  # 2.131 / sqrt(63)
    assert cell(row(d=64 * [0.0])) is None
    # texts of a project differ alike: two projects of 16 texts and one of 32 are three values, with weights
    projects = row(projects=[*16 * "x", *16 * "y", *32 * "z"], a=[2.0] * 32 + [4.0] * 32)
    assert cell(projects) == f"+2.0000 ± {4.303 * (1.5 * (16**2 + 16**2 + 32**2)) ** 0.5 / 64:.4f}"
    assert cell(row(projects=64 * ["x"], a=[2.0, 4.0] * 32)) == "+2.0000"


# ---- measurements


def test_windows_score_each_target_once_with_half_a_window_before_it(monkeypatch):
    def place_in_window(model, inputs, targets, piece):
        return targets - inputs + torch.arange(inputs.shape[1]) * 100

    monkeypatch.setattr(measure, "losses_by_position", place_in_window)
    ids = torch.arange(33)[None]
    losses = read_text(None, ids[:, :-1], ids[:, 1:], 8)
    assert list(losses) == [1 + 100 * i for i in range(8)] + 6 * [401, 501, 601, 701]


def test_long_texts_are_of_one_project_and_spans_are_means_of_positions(source, monkeypatch):
    dataset, projects = source
    texts = []

    def read(model, inputs, targets, window):
        texts.append(bytes(targets[0].tolist()))
        assert torch.equal(inputs[0, 1:], targets[0, :-1])
        return np.arange(1024.0) + 100 * (len(texts) - 1)

    monkeypatch.setattr(measure, "read_text", read)
    measured = measure.positions(None, dataset, 1024, 2, skip=0, bounds=[0, 2, 1024])
    for text, project in zip(texts, measured.pop("projects"), strict=True):
        content = b"".join(text for _, text in sorted(projects[project].items()))
        assert text[:40] in content and text[-40:] in content
    assert measured == dict(texts=[511.5, 611.5], spans=[50.5, 562.5])


# ---- runs


def read_losses(folder):
    """Return the losses of a run in two stages. The first step of each compiles."""
    steps = [(10, 0.3, 64), (100, 10, 64), (110, 0.1, 1024), (200, 5, 1024)]
    train = [dict(zip(("tokens", "tok_per_sec", "context"), step), train_loss=4.0) for step in steps]
    return train, [dict(tokens=100, val_loss=4.5), dict(tokens=200, val_loss=1.0)]


def test_speeds_leave_out_the_step_that_compiles(monkeypatch):
    monkeypatch.setattr(runs, "read_losses", read_losses)
    speeds = {"64": 10, "1024": 5}
    assert runs.losses("a folder") == dict(val=[[100, 4.5], [200, 1.0]], tokens=200, tokens_per_second=speeds)


def plan(size):
    trained = [make_run(size, name, dict(attention=name), 1e-3) for name in ("softmax", "sympow")]
    return [*trained, recipe.speed_run(size, "softmax")]


MEASURED = dict(
    size=dict(parameters=9, bytes=[10**6, 2 * 10**6, 3 * 10**6]),
    positions=dict(texts=[1.0, 2.0], projects=["a", "b"], spans=3 * [1.75]),
    swapped=[0.5, 0.5],
    far=dict(texts=[1.0, 2.0]),
    speed={"64": 1000.0, "1024": 2000.0},
)


def report_tokens(entries, size):
    return [table("T", [("tokens", lambda entry: entry.record.get("tokens"))], entries.values())]


@pytest.fixture
def experiment(dataset, tmp_path, monkeypatch):
    """Return a function that runs a small experiment in tmp_path, the names of the runs that it has started, and a set
    of the names that are to fail. Their programs end at once."""
    monkeypatch.chdir(tmp_path)
    started, failing = [], set()

    def commands(run):
        started.append(run.name)
        write_json(f"{run.folder}.json", dict(machine=dict(device="a GPU"), measures=MEASURED))
        return [["no_such_program" if run.name in failing else "this"]]

    def main(*options, name="x", experiment=(plan, report_tokens), **settings):
        return helpers.call(
            lambda: runs.main(name, *experiment, **settings), "--size=tiny", f"--dataset={dataset}", *options
        )

    monkeypatch.setattr(runs.Run, "commands", commands)
    monkeypatch.setattr(runs, "is_complete", lambda run: True)
    monkeypatch.setattr(runs, "read_losses", read_losses)
    return main, started, failing


@pytest.mark.parametrize("step,complete", [(255, False), (256, True)])
def test_a_training_that_a_signal_stopped_is_not_complete(monkeypatch, step, complete):
    run = make_run(SIZES["tiny"], "softmax", dict(attention="softmax"), 1e-3)
    monkeypatch.setattr(runs.checkpoint, "newest", lambda folder: folder)
    monkeypatch.setattr(runs.checkpoint, "read_progress", lambda folder: runs.checkpoint.Progress(step))
    assert runs.is_complete(replace(run, settings=run.settings | {"max_iters": 256})) == complete


def test_a_run_is_trained_and_measured_unless_its_model_is_new():
    programs = [[program for program, *_ in run.commands()] for run in plan(SIZES["tiny"])]
    assert programs == 2 * [["experiments.train", "experiments.measure"]] + [["experiments.measure"]]


def test_records_are_kept_and_a_run_that_failed_is_named(experiment, capsys):
    main, started, failing = experiment
    failing.add("sympow")
    assert main() == 3 and started == ["softmax", "sympow", "softmax, speed"]
    assert re.search(r"sympow: status 1, see out/experiments/\w+.log", capsys.readouterr().out)
    text = pathlib.Path("out/experiments/tiny/x.md").read_text()
    assert "| softmax | 200 |" in text and "\nNot run: sympow, seed 1337\n" in text and ".png" not in text
    failing.clear()
    assert main() == 0 and started[3:] == ["sympow"]
    assert main() == 0 and main("--minutes=0") == 0 and len(started) == 4
    assert main("--minutes=0", name="y") == 3 and not os.path.exists("out/experiments/tiny/y.md")


def test_after_the_minutes_a_run_is_told_to_stop_and_no_other_begins(experiment, monkeypatch):
    processes = []

    def start(command, **options):
        processes.append(subprocess.Popen(["sleep", "60"], **options))
        return processes[-1]

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=start))
    main, *_ = experiment
    assert main("--minutes=0.02") == 3 and [process.returncode for process in processes] == [-signal.SIGTERM]


def test_a_stopped_experiment_keeps_the_records_of_all_runs_that_ended(experiment, monkeypatch):
    main, started, _ = experiment
    popen = subprocess.Popen

    def start(command, **options):
        if started == ["softmax", "sympow"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return popen(command, **options)

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=start))
    assert main() == 128 + signal.SIGTERM
    [record] = read_json("out/experiments/tiny/x.json")["runs"].values()
    assert record["name"] == "softmax" and main() == 0 and started[2:] == ["sympow", "softmax, speed"]


def test_the_parts_and_the_recipe_report_each_run(experiment):
    main, started, _ = experiment
    assert main(name="parts", experiment=(parts.plan, parts.report)) == 0 and started == list(parts.RUNS)
    assert main(name="recipe", experiment=(recipe.plan, recipe.report)) == 0
    table = pathlib.Path("out/experiments/tiny/recipe.md").read_text().split("**The best rates, Muon**")[1]
    assert all(f"| {name}, lr 0.0096 |" in table for name in recipe.CONTENDERS)  # no two are the same model
    assert os.path.getsize("out/experiments/tiny/recipe.png") > 1000


def test_long_texts_are_reported_by_way_of_training_beside_the_better_softmax(experiment):
    main, started, _ = experiment
    options, names = dict(name="long_texts", experiment=(long_texts.plan, long_texts.report)), long_texts.NAMES
    assert main(**options) == 3 and started == [f"{name}, speed" for name in names]
    assert main(**options) == 0 and started[8:] == [f"{name}, {way}" for name in names for way in long_texts.SHARES]
    row = "| forgetting, in stages | 200 (0.0 epochs) | 1.0000 | 1.5000 | +0.0000 ± 0.0000 | +0.0000 ± 0.0000 |"
    row += " 1.7500 | 1.7500 | 1.7500 | +0.5000 ± 0.0000 | 1.0 / 2.0 / 3.0 |"
    assert row in pathlib.Path("out/experiments/tiny/long_texts.md").read_text()


def test_distances_to_softmax_are_those_at_the_best_rates():
    def models(softmax, p2, rate):
        settings = dict(seed=1337, learning_rate=rate)
        names = (f"{long_texts.SOFTMAX}, lr {rate}", softmax), (f"p=2, heads of 64, lr {rate}", p2)
        return [entry(name, loss, settings=settings, measures=MEASURED) for name, loss in names]

    rows = {row.name: row for row in models(1.2, 1.4, 0.0012) + models(1.0, 1.1, 0.0006)}
    rates = recipe.rates_table(rows.values())
    assert "| run | adamw, 0.0006 | adamw, 0.0012 |" in rates and "| p=2, heads of 64 | 1.1000 | 1.4000 |" in rates
    (text,) = recipe.report_others(rows, SIZES["tiny"])
    assert "| p=2, heads of 64, lr 0.0006 | 1.1000 | +0.1000 |" in text and "| 1,000 (2.5 epochs) |" in text


@pytest.mark.parametrize("options", [["--size=huge"], ["--gpus=1"], ["--dataset=missing"]])
def test_mistakes_are_one_line(experiment, options, refused):
    main, started, _ = experiment
    assert refused(main, *options) and not started


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_in_docs_are_those_of_their_records(name, monkeypatch):
    texts = {}
    monkeypatch.chdir(helpers.ROOT)
    monkeypatch.setattr(report, "plot", lambda points, xlabel, png: None)
    monkeypatch.setattr(runs, "write_atomically", texts.__setitem__)
    status = helpers.call(lambda: runpy.run_path(f"experiments/{name}.py", run_name="__main__"), "--minutes=0")
    assert status in (0, 3)
    path = f"docs/data/{name}.md"
    tables, tables_in_docs = (
        re.sub(b"Not run: .*\n\n?", b"", text) for text in (texts.pop(path), pathlib.Path(path).read_bytes())
    )  # what is not run follows from the plan, and not from the records
    assert tables == tables_in_docs and not texts


@pytest.mark.slow
@pytest.mark.parametrize("experiment,name", [(recipe, "forgetting"), (long_texts, long_texts.SOFTMAX)])
def test_an_experiment_trains_measures_and_draws(dataset, tmp_path, monkeypatch, experiment, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", helpers.ROOT)
    model = dict(n_layer=2, n_head=1, n_embd=16)
    size = replace(SIZES["tiny"], model=model, shrink=1024, tokens_per_step=64, eval_tokens=512, documents=2)
    monkeypatch.setitem(SIZES, "tiny", size)

    def main():
        plan = partial(filter, lambda run: run.name.startswith(name))
        runs.main(experiment.NAME, lambda size: list(plan(experiment.plan(size))), experiment.report)

    statuses = [helpers.call(main, "--size=tiny", f"--dataset={dataset}") for _ in range(2)]  # the speeds come first
    assert statuses[1] == 0
    records = read_json(f"out/experiments/tiny/{experiment.NAME}.json")["runs"].values()
    trained = [record for record in records if "val" in record]
    assert trained and all(record["val"][-1][1] < 6 for record in trained)
    assert {record["machine"]["device"] for record in records} == {"CPU"}  # of the programs that measured them
    assert all(len(record["measures"]["positions"]["texts"]) > 1 for record in trained)
    assert os.path.getsize(f"out/experiments/tiny/{experiment.NAME}.md") > 500


def follow_plan(experiment, size, best_place):
    """Return the names of the runs that an experiment asks for at one start after another, until it has all.

    best_place(name) is 1 if the run's best rate is 1.2e-3, and n if it is n times as high; then it is as fast, too.
    Beyond 8 its loss is higher by 1.
    """
    records, stages = {}, []
    while missing := [run for run in experiment.plan(size) if not run.find(records)]:
        stages.append([run.name for run in missing])
        for run in missing:
            place = best_place(run.name.rpartition(", ")[0])
            loss = (place > 8) + abs(math.log(run.settings.get("learning_rate", 1) / (1.2e-3 * place)))
            records[run.folder] = dict(
                name=run.name,
                settings=run.settings,
                corpus={"name": os.path.basename(size.dataset)},
                val=[[1, loss]],
                measures={
                    "speed": {n: 2.0**20 * place / n for n in (4096, 65536)},
                    "positions": {"texts": [loss + ("in stages" in run.name)]},
                },
            )
        write_json(os.path.join(size.folder, f"{experiment.NAME}.json"), {"runs": records})
    return stages


def test_each_contender_gets_seeds_at_its_best_rate_and_the_closest_ones_get_five(tmp_path):
    """With records as they would be if forgetting were best at 4.8e-3, all others at 9.6e-3, and sympow far behind."""
    size, names = replace(SIZES["small"], folder=str(tmp_path)), list(recipe.CONTENDERS)
    places = dict.fromkeys(names, 8) | {"forgetting": 4, "sympow p=2": 8.5}
    first, *stages = follow_plan(recipe, size, places.get)
    rates = [f"{name}, lr {rate:g}" for name in names for rate in recipe.RATES]
    assert first == rates + [f"{name}, speed" for name in names]
    powers = [name for name in names if "sympow" in recipe.CONTENDERS[name]["attention"]]  # they alone go higher
    edges = [f"{name}, lr 0.0192" if name in powers else f"{name}, lr 0.0024" for name in (*powers, "forgetting")]
    edges.sort(key=lambda edge: names.index(edge.rpartition(", ")[0]))
    best = [f"{name}, lr {'0.0048' if name == 'forgetting' else '0.0096'}" for name in names if name != "sympow p=2"]
    counts = [4 if name.rpartition(", ")[0] in recipe.CLOSEST else 2 for name in best]
    assert stages == [edges, [name for name, count in zip(best, counts) for _ in range(count)]]


def test_long_texts_take_equal_seconds_in_both_ways_and_the_better_one_gets_three_seeds(tmp_path):
    """With 32 steps a second at 4,096 tokens and 2 at 65,536, and texts that all read worse after stages."""
    size, alone = replace(SIZES["small"], folder=str(tmp_path)), "at 4,096 alone"
    speeds, timed, others = follow_plan(long_texts, size, lambda name: 2**14)
    assert speeds == [f"{name}, speed" for name in long_texts.NAMES]
    assert timed == [f"{name}, {way}" for name in long_texts.NAMES for way in (alone, "in stages")]
    assert others == [f"{name}, {alone}" for name in long_texts.NAMES for _ in (1338, 1339)]
    os.rename(tmp_path / "long_texts.json", tmp_path / "recipe.json")  # which has the same speeds, and runs
    planned = {(run.name, run.settings["seed"]): run for run in long_texts.plan(size)}
    assert len(planned) == len(timed) + len(others)
    keys = "block_size", "batch_size", "then", "max_iters", "decay_share"
    for way, values in {
        "in stages": [4096, 32, "65536@2560", 2600, None],
        alone: [4096, 32, None, 3200, None],
    }.items():
        assert [planned[f"hybrid 3:1, {way}", 1337].settings.get(key) for key in keys] == values
    faster = dict(measures=dict(speed={"4096": 2**22, "65536": 2**20}))  # 8 steps a second at 65,536
    run = long_texts.timed_run(size, long_texts.NAMES[0], "in stages", faster)
    assert run.settings["then"] == "65536@2560" and run.settings["decay_share"] == round(160 / 2720, 4)


def test_long_texts_are_read_at_once_but_by_softmax_that_knows_short_ones(tmp_path):
    size = replace(SIZES["small"], folder=str(tmp_path))
    speed, texts = dict(measures=dict(speed={"4096": 2**22, "65536": 2**18})), dict(length=65536, documents=64)
    for name in long_texts.NAMES:
        for way in long_texts.SHARES:
            run = long_texts.timed_run(size, name, way, speed)
            in_windows = name == long_texts.SOFTMAX and way == "at 4,096 alone"
            assert texts.items() <= run.measures["positions"].items()
            assert run.measures["positions"].get("window") == (4096 if in_windows else None)
            assert ("swapped" in run.measures) != in_windows
            far = name == long_texts.SOFTMAX and not in_windows
            assert run.settings.get("rope_base") == (5e5 if far else None)


def test_the_larger_models_are_twice_as_wide():
    for run in larger.plan(replace(SIZES["small"], dataset="here")):
        assert (run.settings["n_layer"], run.settings["n_embd"]) == (12, 768)


def test_prose_is_read_at_the_best_rates_of_the_recipe(tmp_path):
    size = replace(SIZES["small"], folder=str(tmp_path), dataset="prose")
    settings = dict(seed=1337, learning_rate=4.8e-3)
    record = entry("forgetting, lr 0.0048", 1.0, settings=settings).record
    write_json(str(tmp_path / "recipe.json"), {"runs": {"one": record}})
    names = [f"{name}, lr {'0.0048' if name == 'forgetting' else '0.0096'}" for name in english.NAMES]
    assert [run.name for run in english.plan(size)] == 3 * names


def test_softmax_that_forgets_reads_on_and_trains_all_weights(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "forgetting", Forgetting)
    torch.manual_seed(SEED)
    model = GPT(GPTConfig(attention="forgetting", n_layer=2, n_head=3, n_embd=48, vocab_size=100)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(100, (2, 40))
    _, state = model.hidden(ids, model.empty_state(2))
    x = model.hidden(ids, state)[0]
    assert (model.logits(x) - model(ids.repeat(1, 2))[0][:, 40:]).abs().max() < 1e-9
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("settings", [dict(n_head=2, n_kv_head=1), dict(reset_token=0)])
def test_softmax_that_forgets_refuses_what_it_does_not_compute(monkeypatch, settings):
    monkeypatch.setitem(ATTENTIONS, "forgetting", Forgetting)
    with pytest.raises(ValueError, match="takes no n_kv_head, and no packed documents"):
        GPTConfig(attention="forgetting", **settings)


# ---- softmax that forgets


def forget_naively(q, k, v, log_g):
    """Return sum_j A_ij v_j / sum_j A_ij, A_ij = exp(q_i . k_j / sqrt(D)) gamma_{j+1} .. gamma_i."""
    weights = naive.gate_products(log_g.exp())[0] * torch.einsum("bihd,bjhd->bhij", q / q.shape[3] ** 0.5, k).exp()
    return (weights @ v.transpose(1, 2) / weights.sum(3, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize(
    "attend,dtype,bound",
    [
        (forgetting_attention, torch.float64, 1e-12),
        pytest.param(fla_attention, torch.float32, 2e-3, marks=pytest.mark.gpu),  # in products of tf32
        pytest.param(fla_attention, torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    ],
)
def test_forgetting_attention_and_its_gradients_are_those_of_the_formula(attend, dtype, bound):
    if attend is fla_attention:
        pytest.importorskip("fla")
    tensors = [torch.randn(2, 150, 2, 64).to(DEVICE, dtype) for _ in range(3)]
    tensors.append(GATES["learned"](torch.randn(2, 150, 2)).to(DEVICE, torch.promote_types(dtype, torch.float32)))
    formula = gradients(forget_naively, tensors, to=torch.Tensor.double)
    for name, x, y in zip(("y", "dq", "dk", "dv", "dlog_g"), gradients(attend, tensors), formula):
        assert relative_error(x, y, 1e-6) < bound, name


def experiments_of(section):
    """Return the experiments that a section of the results names by their commands."""
    return re.findall(r"^    python -m experiments\.(\w+)", section, flags=re.M)


RESULTS = pathlib.Path(helpers.ROOT, "docs/measured/results.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in RESULTS.split("\n## ")[1:]}
OF_EXPERIMENTS = [title for title, section in SECTIONS.items() if experiments_of(section) and "repeat" not in title]


@pytest.mark.parametrize("title", OF_EXPERIMENTS)
def test_numbers_in_the_tables_of_the_results_are_those_of_the_records(title):
    """Numbers of three digits or more, below the heads of the tables; speeds are rounded to thousands."""
    recorded = []
    for name in experiments_of(SECTIONS[title]):
        path = pathlib.Path(helpers.ROOT, "docs/data", name)
        recorded += re.findall(r"\d[\d,]*(?:\.\d+)?", path.with_suffix(".md").read_text())
        for record in read_json(f"{path}.json")["runs"].values():
            recorded += [str(speed) for speed in record.get("tokens_per_second", {}).values()]
    recorded = [float(number.replace(",", "")) for number in recorded]
    assert recorded
    tables = re.findall(r"^\|[ :|-]+\|\n((?:\|.*\n?)+)", SECTIONS[title], flags=re.M)
    numbers = [text.replace(",", "") for table in tables for text in re.findall(r"\d[\d,]*(?:\.\d+)?", table)]
    numbers = [number for number in numbers if len(number.replace(".", "").lstrip("0")) >= 3]
    assert len(numbers) > 5
    for number in numbers:
        error = 501 if number.endswith("000") else 0.5001 * 10.0 ** -len(number.partition(".")[2])
        matches = [x for x in recorded if min(abs(x - float(number)), abs(x / 1e6 - float(number))) <= error]
        assert matches, f"{number} is in no record of {title}"
