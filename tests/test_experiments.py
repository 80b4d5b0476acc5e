"""Experiments: corpora by project, recall's data and accuracy, tables that mix nothing, and runs that are kept."""

import glob
import json
import os
import random
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace

import helpers
import numpy as np
import pytest
import torch
from helpers import make_dataset

from sympow.data.dataset import Dataset
from sympow.data.near_duplicates import repeated_shares
from sympow.data.recall import prepare as prepare_recall
from sympow.data.recall.tasks import CHANCE, make_needles, make_pairs, questions
from sympow.data.source import prepare as prepare_source
from sympow.experiments import learning_rates, runs
from sympow.experiments.equal_time import describe_leads, leads, long_begins, loss_at, retimed
from sympow.experiments.report import (
    Entry, Panel, Table, draw_panel, find, is_noise, loss_cell, markdown_table, ratio_cell, ratio_curve, texts_cell,
    tokens_cell, val_curve, write_report,
)  # fmt: skip
from sympow.experiments.worker import losses, positions, score, windowed
from sympow.runs.plots import smooth


dataset = helpers.dataset


def code(seed, lines=60):
    """Return the source of a file that has nothing in common with that of another seed."""
    draw = random.Random(f"{os.environ.get('TEST_SEED', 0)} {seed}")
    return "".join(f"{draw.randrange(10**9)} = compute({draw.randrange(10**9)})\n" for _ in range(lines)).encode()


# ---- corpora by project


def test_repeated_texts_are_found_whatever_their_white_space():
    a, b = code("a"), code("b")
    indented = b"".join(b"    " + line + b"\r\n\n" for line in a.splitlines())
    half = b"".join(a.splitlines(True)[:30]) + b"".join(b.splitlines(True)[:30])
    shares = repeated_shares([a, b"", b, indented, half, code("c"), a[:100]])
    assert shares[0] == shares[1] == shares[2] == shares[5] == 0
    assert shares[3] > 0.95 and 0.8 < shares[4] < 1 and shares[6] < 1  # the shingles across the seam are new
    assert not len(repeated_shares([]))


def test_batches_do_not_change_what_is_found(monkeypatch):
    texts = [code(i % 7, 5 + i) for i in range(20)]
    whole = repeated_shares(texts)
    monkeypatch.setattr("sympow.data.near_duplicates.BATCH", 1)
    assert np.array_equal(whole, repeated_shares(texts)) and whole.max() > 0.5


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the folder of a corpus of 12 projects, with copies planted in each of them, and their texts by project."""
    folder, projects = tmp_path_factory.mktemp("source"), {}
    for i in range(12):
        files = projects[f"project{i}"] = {f"src/part{j}.py": code(f"{i} {j}") for j in range(4)}
        files["vendor/six.py"] = code("six")  # vendored by all
        files["LICENSE.py"] = code("licence") + (b"# own\n" * (i % 2))
        files["tables.py"] = b"1234, 5678\n" * 7000  # above 65,536 bytes
    projects["zlib-1.2"] = {"zlib.py": code("zlib")}
    projects["zlib-1.3"] = {"zlib.py": code("zlib"), "new.py": code("new zlib")}
    for name, files in projects.items():
        for path, text in files.items():
            (folder / "in" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "in" / name / path).write_bytes(text)
    out = str(folder / "out")
    prepare_source.main([f"--root={folder / 'in'}", f"--out={out}", "--val_fraction=0.2", "--document_length=512"])
    return out, projects


def text_of(dataset, split):
    return bytes(np.where((x := dataset.read(split, 0, dataset.tokens(split))) > 255, 0, x).astype(np.uint8))


def test_whole_projects_are_held_out_and_copies_are_gone(source):
    out, projects = source
    dataset = Dataset(out)
    train, val = text_of(dataset, "train"), text_of(dataset, "val")
    assert not set(train.splitlines()) & {line for line in val.splitlines() if len(line) > 10}
    held = dataset.meta["held_out"]
    assert 2 <= len(held) < 8 and sum(held.values()) == dataset.documents("val")
    assert list(held.values()) == sorted(held.values())
    assert (train + val).count(code("six")[:200]) == 1  # one of 12 copies
    assert (train + val).count(code("zlib")[:200]) <= 1  # two versions are one project
    dropped = dataset.meta["dropped"]
    assert dropped["above 65,536 bytes"] == 12 and dropped["mostly repeated"] >= 2 * 11
    assert dataset.meta["files"] <= 12 * 4 + 4 and dataset.tokens("val") >= 0.15 * dataset.tokens("train")


def test_the_files_of_a_project_follow_each_other_without_a_mark(source):
    out, projects = source
    dataset = Dataset(out)
    name = max(dataset.meta["held_out"], key=dataset.meta["held_out"].get)
    parts = b"".join(projects[name][f"src/part{j}.py"] for j in range(4))
    rows = len(parts) // 512 - 2
    assert parts[1024 : rows * 512] in text_of(dataset, "val")
    tokens = dataset.read("train", 0, dataset.tokens("train"))
    assert 0 < (tokens == dataset.eot).sum() <= dataset.meta["projects"]
    assert not (dataset.read("val", 0, dataset.tokens("val")) == dataset.eot).any()


def test_docstrings_are_a_corpus_of_english(tmp_path):
    for i in range(6):
        (tmp_path / f"in/p{i}").mkdir(parents=True)
        doc = "".join(f"Line {j} of {random.Random(i * 99 + j).randrange(10**9)}.\n    " for j in range(40))
        (tmp_path / f"in/p{i}/a.py").write_text(f'def f{i}():\n    """{doc}"""\n    secret = {i}\n')
    (tmp_path / "in/p0/bad.py").write_text("def (\n" * 50)
    options = "--text=docstrings", "--val_fraction=0.4", "--document_length=256"
    prepare_source.main([f"--root={tmp_path / 'in'}", f"--out={tmp_path / 'out'}", *options])
    dataset = Dataset(str(tmp_path / "out"))
    both = text_of(dataset, "train") + text_of(dataset, "val")
    assert b"Line 3 of" in both and b"secret" not in both and dataset.meta["dropped"] == {"without text": 1}


# ---- recall


@pytest.mark.parametrize("task", CHANCE)
def test_an_oracle_answers_every_question_and_a_guess_has_its_chance(task):
    rng = np.random.default_rng(int(os.environ.get("TEST_SEED", 0)))
    hay = rng.integers(97, 123, (40, 4096), dtype=np.uint8)
    rows = make_pairs(rng, 40, 4096) if task == "pairs" else make_needles(rng, hay)
    texts = [row.tobytes() for row in rows]
    oracle = score(texts, list(rows), task, 4096)
    assert set(oracle["accuracy"]) == {1.0} and max(oracle["distance"]) > 2048 and len(oracle["distance"]) > 5
    assert sum(oracle["questions"]) > (20_000 if task == "pairs" else 200)
    guesses = [rng.integers(48, 64 if task == "pairs" else 58, len(row)) for row in rows]
    guess = score(texts, guesses, task, 4096)
    mean = np.average(guess["accuracy"], weights=guess["questions"])
    assert abs(mean - CHANCE[task]) < 5 * (CHANCE[task] / sum(guess["questions"])) ** 0.5 + 1e-9
    assert score(texts, [np.roll(row, 1) for row in rows], task, 4096)["accuracy"] < oracle["accuracy"]


def test_a_question_is_asked_after_its_newest_answer():
    assert questions(b"A\x800A\x811A\x800A\x800A\x819A\x819", "pairs") == [(6, 8, 9), (3, 11, 12), (3, 17, 18)]
    assert questions(b"x [[abc: 1234]] y [[abc: 1234]][[abd: 1234]]", "needle") == [(16, 25, 29)]


def test_pairs_have_one_value_for_each_key():
    for row in make_pairs(np.random.default_rng(1), 20, 3000):
        records = row.reshape(-1, 3)
        values = {}
        assert all(values.setdefault(bytes(r[:2]), r[2]) == r[2] for r in records)
        assert 300 < len(values) < 700  # half of 1,000 records
    with pytest.raises(ValueError, match="more than 4096 keys"):
        make_pairs(np.random.default_rng(1), 1, 30000)


def test_documents_of_training_are_whole_in_their_windows(tmp_path):
    options = "--context=256", "--times=4", "--train_tokens=8192", "--short=2", "--long=3"
    prepare_recall.main([f"--out={tmp_path / 'a'}", *options])
    dataset = Dataset(str(tmp_path / "a"))
    assert (dataset.documents("train"), dataset.documents("val"), dataset.document_length) == (8, 5, 1024)
    for at in range(0, 8192, 256):
        text = bytes(dataset.read("train", at, 256).astype(np.uint8))
        assert len(questions(text, "pairs")) > 15
    prepare_recall.main([f"--out={tmp_path / 'b'}", *options])
    assert np.array_equal(dataset.read("val", 0, 5120), Dataset(str(tmp_path / "b")).read("val", 0, 5120))


# ---- tables


def record(loss=1.0, corpus="abc", seed=1, **more):
    machine = dict(device="CPU", torch="2", triton=None, commit="")
    corpus = dict(name="here", sha256=corpus, files=1234)
    return dict(
        name="a", settings={"seed": seed}, corpus=corpus, machine=machine, tokens=1000, val=[[1000, loss, 1]], **more
    )


def entry(name, *records):
    return Entry(name, {}, [str(i) for i in range(len(records))], {str(i): r for i, r in enumerate(records)})


def test_a_table_names_the_corpus_and_says_what_was_not_run(tmp_path):
    entries = [entry("one", record(0.5)), Entry("two", {}, ["x"], {})]
    table = Table("T", [("val loss", loss_cell()), ("ratio", ratio_cell(entries[0]))], entries)
    lines = markdown_table(table).splitlines()
    assert lines[4] == "| one | 0.5000 | 1.0000 | here abc | 1,234 |" and lines[5].startswith("| two | not run | - |")
    write_report("x", str(tmp_path), entries, [table, "A note.", Panel("x", "y", {"one": ([], [])})], "python -m x")
    text = (tmp_path / "x.md").read_text()
    assert "    python -m x\n\nCPU, torch 2" in text and "A note." in text and "png" not in text


def test_points_that_are_results_of_runs_are_all_seen_and_beginnings_of_curves_are_not():
    figures = pytest.importorskip("matplotlib.figure")
    few = {"a": ([1, 2, 4], [1.0, 1.1, 1.2]), "b": ([1, 2, 4], [1.0, 2.0, 9.0]), "c": ([1, 2, 4], [1.0, 1.0, 1.0])}
    many = {"a": (range(1, 41), [9.0] + 39 * [1.0])}
    for lines, seen in ((few, True), (many, False)):
        axis = figures.Figure().subplots()
        draw_panel(axis, Panel("context", "loss", lines, log_x=True), {name: {"color": "black"} for name in lines})
        assert (axis.get_ylim()[1] > 9) == seen


def test_a_diamond_stands_on_its_line_where_the_long_stage_begins():
    figures = pytest.importorskip("matplotlib.figure")
    record = dict(stages=[[256, 1000], [4096, 6000]])
    staged, whole = Entry("staged", {}, ["a"], {"a": record}), Entry("whole", {}, ["b"], {"b": dict(stages=[[256, 9]])})
    begins = long_begins([staged, whole], lambda entry: {256: 2000.0, 4096: 1.0})
    assert begins == {"staged": 3.0}
    axis = figures.Figure().subplots()
    panel = Panel("seconds", "loss", {"staged": ([2.0, 4.0], [1.0, 0.5]), "whole": ([1.0], [2.0])}, begins=begins)
    draw_panel(axis, panel, {name: dict(color="black") for name in panel.lines})
    [diamond] = [line for line in axis.lines if line.get_marker() == "D"]
    assert diamond.get_xydata().tolist() == [[3.0, 0.75]]


def test_runs_on_different_corpora_are_not_put_into_one_table():
    entries = [entry("one", record()), entry("two", record(corpus="other"))]
    with pytest.raises(ValueError, match="different corpora are not put into one table: abc, other"):
        markdown_table(Table("", [("val loss", loss_cell())], entries))


def test_a_difference_below_two_standard_deviations_is_none():
    base = entry("a", record(1.00), record(1.02), record(0.98))
    near, far = (
        entry("b", record(1.01), record(1.03), record(0.99)),
        entry("c", record(1.10), record(1.12), record(1.08)),
    )
    assert is_noise(near, base) and not is_noise(far, base)
    assert [ratio_cell(base)(x) for x in (base, near, far)] == ["1.0000", "none", "1.1000"]
    assert loss_cell()(far) == "1.1000 ± 0.0200 (3 seeds)"
    assert ratio_cell(entry("one", record(1.0)))(entry("two", record(1.001))) == "1.0010"  # nothing is known of noise
    assert find([near, entry("sympow p=2, lr 0.1")], "sympow p=2").name == "sympow p=2, lr 0.1"


def test_curves_are_means_over_seeds_with_their_deviation():
    record = lambda *losses: dict(
        val=[[0, 9.0, 0.0], *([10 * (i + 1), x, 1.0] for i, x in enumerate(losses))],
        train=[[10 * (i + 1), x] for i, x in enumerate(losses)],
    )
    known = {"a": record(3.0, 2.0), "b": record(5.0, 1.0), "c": record(2.0, 1.0)}
    two, one = Entry("two", {}, ["a", "b"], known), Entry("one", {}, ["c"], known)
    tokens, losses, deviations = val_curve(two)
    assert list(tokens) == [10, 20] and list(losses) == [4.0, 1.5]  # without the loss of the fresh model
    assert np.allclose(deviations, [2**0.5, 0.5**0.5])
    assert val_curve(one)[2] is None and val_curve(Entry("none", {}, ["d"], known)) == ([], [], None)
    at, ratios = ratio_curve(two, one)
    assert list(at) == [10, 20] and np.allclose(ratios, smooth([2.0, 1.5]))


def test_differences_are_taken_text_by_text():
    of = lambda *texts: entry("a", record(measures=dict(read=dict(texts=texts))))
    base, other = of(1.0, 2.0, 3.0), of(1.1, 2.1, 3.4)
    assert texts_cell("read")(base) == "2.0000 ± 0.5774" and texts_cell("read")(of(1.0)) == "1.0000"
    assert texts_cell("read", base)(other) == "+0.2000 ± 0.1000" and texts_cell("read", base)(base) is None
    assert texts_cell("read", entry("none"))(other) is None


def test_a_best_learning_rate_is_named_where_all_were_run():
    def at(name, rate, *records):
        return replace(entry(f"{name}, lr {rate:g}", *records), settings={"learning_rate": rate})

    entries = [at("softmax", 2e-3, record(0.9)), at("softmax", 1e-3, record(1.1)), at("softmax", 4e-3, record(1.0))]
    entries += [at("sympow p=2", 1e-3, record(1.0)), at("sympow p=2", 2e-3)]
    _, best, panel = learning_rates.report(entries, runs.SIZES["tiny"])
    assert best == "Best of these rates: softmax: 0.002"
    assert panel.lines["softmax"] == ([1e-3, 2e-3, 4e-3], [1.1, 0.9, 1.0])
    assert panel.lines["sympow p=2"] == ([1e-3], [1.0])


def test_more_than_one_epoch_is_named():
    run = record()
    run["corpus"]["tokens"] = dict(train=400)
    assert tokens_cell(entry("a", run)) == "1,000 (2.5 epochs)"
    run["corpus"]["tokens"]["train"] = 1000
    assert tokens_cell(entry("a", run)) == "1,000"


def test_a_curve_leads_where_it_is_below():
    x = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert leads((x, [5, 4, 3, 1, 0.5]), (x, [3, 3, 3, 3, 3])) == ([(pytest.approx(3, abs=0.02), 5)], 5)
    times = [(pytest.approx(begin, abs=0.02), pytest.approx(begin + 1, abs=0.02)) for begin in (1.5, 3.5)]
    assert leads((x, [5, 1, 5, 1, 5]), (x, [3] * 5)) == (times, 5)
    assert leads((x, [4] * 5), (x, [3] * 5)) == ([], 5)
    assert describe_leads((x, [4] * 5), (x, [3] * 5)) == "behind until 5 s"
    assert describe_leads((x, [1, 1, 1, 5, 5]), (x, [3] * 5)) == "ahead from 1 to 3 of 5 s"
    assert leads(([7.0, 8.0], [1, 1]), (x, [3] * 5)) is leads(([], []), (x, [3] * 5)) is None
    assert leads((x, [1] * 5), (x, [3] * 5)) == ([(1, 5)], 5)
    staged = entry("s", record() | dict(val=[[100, 2.0, 1], [300, 1.0, 2]], stages=[[8, 10], [64, 200]]))
    assert retimed(staged, {8: 10.0, 64: 5.0}) == [[10.0, 40.0], [2.0, 1.0]]
    assert loss_at(staged, 1.5) is None and loss_at(staged, 2) == "1.0000"
    whole = entry("w", record() | dict(val=[[100, 2.0, 1], [300, 1.0, 2]], stages=[[8, 10]]))
    assert loss_at(whole, 1.5) == "1.5000"


# ---- runs


def test_seconds_are_those_of_steps_alone(tmp_path):
    lines = [
        dict(step=1, train_loss=5.0, tokens=10, seconds=30, tok_per_sec=0.3, context=8),
        dict(step=10, train_loss=4.0, tokens=100, seconds=39, tok_per_sec=10, context=8),
        dict(step=10, val_loss=4.5, tokens=100, seconds=60, context=16),
        dict(step=11, train_loss=4.0, tokens=110, seconds=99, tok_per_sec=0.1, context=16),
        dict(step=20, train_loss=3.0, tokens=200, seconds=99, tok_per_sec=5, context=16),
        dict(step=20, val_loss=3.5, tokens=200, seconds=99, context=16),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = losses(str(tmp_path))
    assert found["val"] == [[100, 4.5, 10.0], [200, 3.5, 30.0]] and found["seconds"] == 30
    assert found["stages"] == [(8, 10), (16, 110)] and found["tokens"] == 200 and len(found["train"]) == 4


def test_windows_score_each_target_once_with_half_a_window_before_it(monkeypatch):
    seen = []

    def stub(model, inputs, targets, piece=None):
        seen.append(inputs.shape)
        return targets - inputs + torch.arange(inputs.shape[1]) * 100  # says where in its window a target stood

    monkeypatch.setattr("sympow.experiments.worker.losses_by_position", stub)
    x = torch.arange(33)[None]
    found = windowed((0, None, 0, torch.device("cpu"), nullcontext()), x[:, :-1], x[:, 1:], 8)
    assert len(found) == 32 and list(found[:8]) == [1 + 100 * i for i in range(8)]
    assert list(found[8:12]) == [401, 501, 601, 701] and found[8:].min() == 401 and seen == [(7, 8)]


class Finished:
    """Stands for the process of a worker that has written its record when it began."""

    def __init__(self, returncode=0):
        self.returncode = returncode

    def poll(self):
        return self.returncode

    def terminate(self):
        pass

    def wait(self, seconds):
        return self.returncode


def plan(size):
    return [size.run(name, 4096, 2**25, attention=name) for name in ("softmax", "sympow")]


def report(entries, size):
    return [Table("T", [("val loss", loss_cell())], entries)]


@pytest.fixture
def experiment(dataset, tmp_path, monkeypatch):
    """Return a function that runs a small experiment in tmp_path, and the names of the runs that it has started."""
    monkeypatch.chdir(tmp_path)
    started, fails = [], {}  # {name: status}

    def start(job, device):
        started.append((job["name"], device))
        main.beside.append(job["beside"])
        os.makedirs(job["folder"], exist_ok=True)
        if job["name"] in fails:
            with open(os.path.join(job["folder"], "log"), "w") as f:
                f.write("step 1\nworker.py: out of memory | all; more\n\n")
            return Finished(fails[job["name"]])
        done = record(len(started)) | dict(corpus=job["corpus"], settings=job["settings"])
        with open(os.path.join(job["folder"], job["id"] + ".json"), "w") as f:
            json.dump(done, f)
        return Finished()

    def main(*argv, name="x", plan=None):
        monkeypatch.setattr(sys, "argv", [name, "--size=test", "--to=here", *argv])
        return runs.main(name, plan or globals()["plan"], report)

    main.beside = []  # how many runs shared the device of each that was started
    monkeypatch.setattr(runs, "start", start)
    return main, started, fails


def test_what_is_there_is_not_trained_again_and_what_failed_is_a_row(experiment, dataset, capsys):
    main, started, fails = experiment
    fails["sympow"] = 3
    assert main(f"--dataset={dataset}") == 3 and [name for name, _ in started] == ["softmax", "sympow"]
    table = open("here/x.md").read()
    assert "| softmax | 1.0000 | text" in table and "| sympow | not run |" in table
    fails.clear()
    assert main(f"--dataset={dataset}", "--gpus=cpu,cpu") == 0 and [name for name, _ in started[2:]] == ["sympow"]
    assert main.beside == [1, 1, 2]
    assert main(f"--dataset={dataset}") == 0 and len(started) == 3
    assert main(f"--dataset={dataset}", "--seeds=1337,1") == 0 and len(started) == 5  # the second seed of both
    assert main(f"--dataset={dataset}", "--learning_rates=1e-3", "--minutes=0") == 3 and len(started) == 5
    assert main(f"--dataset={dataset}", "--learning_rates=1e-3,2e-3", "--only=soft") == 3 and len(started) == 7
    assert "| sympow, lr 0.002 | not run |" in open("here/x.md").read()


def test_what_is_timed_runs_first_and_alone_on_its_device(experiment, dataset):
    main, started, _ = experiment
    timed = lambda size: [
        *plan(size), size.run("seconds", 4096, seconds=9.0, attention="softmax"),
        runs.Run("speed", {"attention": "softmax"}).measure(speed=dict(contexts=[64], tokens=64)),
    ]  # fmt: skip
    assert main(f"--dataset={dataset}", "--gpus=cpu,cpu", plan=timed) == 0
    assert [name for name, _ in started] == ["seconds", "speed", "softmax", "sympow"]
    assert main.beside == [1, 1, 2, 2]


def test_a_run_that_failed_has_its_reason_in_one_line_and_the_others_go_on(experiment, dataset, capsys):
    main, started, fails = experiment
    fails |= {"softmax": 1}
    assert main(f"--dataset={dataset}") == 3 and len(started) == 2
    assert "softmax failed, status 1: out of memory | all; more (see" in capsys.readouterr().out
    row = "| softmax | failed: out of memory / all | - | - |"
    assert row in open("here/x.md").read()
    assert main(f"--dataset={dataset}", "--minutes=0") == 3 and row in open("here/x.md").read()


def test_experiments_share_a_run_whatever_they_call_it_and_none_is_started_twice(experiment, dataset, monkeypatch):
    main, started, _ = experiment
    named = lambda *names: lambda size: [size.run(name, 4096, 2**25, attention="softmax") for name in names]
    monkeypatch.setattr(sys.modules[__name__], "plan", named("one"))
    assert main(f"--dataset={dataset}") == 0
    monkeypatch.setattr(sys.modules[__name__], "plan", named("two", "three"))
    assert main(f"--dataset={dataset}", "--to=there") == 0 and [name for name, _ in started] == ["one", "three"]
    assert len(glob.glob("out/experiments/softmax-*")) == 1


def test_losses_that_another_experiment_has_are_taken_and_a_run_that_is_measured_is_trained(
    experiment, dataset, monkeypatch
):
    main, started, _ = experiment
    assert main(f"--dataset={dataset}") == 0 and len(started) == 2
    shutil.rmtree("out")  # what is kept is enough
    assert main(f"--dataset={dataset}", "--gpus=cpu", name="y") == 0 and len(started) == 2
    assert "| softmax | 1.0000 | text" in open("here/y.md").read()
    assert len(json.load(open("here/y.json"))["runs"]) == 2
    assert main(f"--dataset={dataset}", "--seeds=1", name="z") == 0 and len(started) == 4
    measured = lambda size: [run.measure(state=dict(tokens=64)) for run in plan(size)]
    assert main(f"--dataset={dataset}", name="w", plan=measured) == 0 and len(started) == 6


def test_another_corpus_is_refused(experiment, dataset, tmp_path, capsys):
    main, started, _ = experiment
    assert main(f"--dataset={dataset}") == 0
    other = make_dataset(tmp_path / "other", "".join(f"another text {i}\n" for i in range(900)))
    with pytest.raises(SystemExit) as refused:
        main(f"--dataset={other}")
    assert refused.value.code == 2 and len(started) == 2
    assert "runs on different corpora are not put into one table; give another --to" in capsys.readouterr().err


def test_long_texts_are_of_one_project_and_spans_are_means_of_positions(source, monkeypatch):
    out, projects = source
    seen = []
    stub = lambda loaded, inputs, targets, window: seen.append((inputs, targets)) or np.arange(1024.0) + 100 * len(seen)
    monkeypatch.setattr("sympow.experiments.worker.windowed", stub)
    found = positions(dict(dataset=out), None, 1024, 3, start=512, bounds=[0, 2, 1024])
    whole = [b"".join(text for _, text in sorted(files.items())) for files in projects.values()]
    for inputs, targets in seen:
        text = bytes(targets[0].tolist())
        assert any(text[:40] in of and text[-40:] in of for of in whole) and torch.equal(inputs[0, 1:], targets[0, :-1])
    assert len(seen) == found["documents"] == len(found["texts"]) > 1 and not found["joined"]
    mean = np.mean([100 * (i + 1) for i in range(len(seen))])
    error = np.std([100 * (i + 1) for i in range(len(seen))], ddof=1) / len(seen) ** 0.5
    assert found["loss"] == pytest.approx(mean + 767.5) and found["error"] == pytest.approx(error)
    assert found["spans"]["mean"] == [mean + 0.5, mean + 512.5]
    assert found["spans"]["errors"] == pytest.approx([error] * 2, abs=1e-4)


@pytest.mark.parametrize(
    "option", ["--gpus=9", "--gpus=x", "--seeds=a", "--learning_rates=b", "--size=huge", "--seconds=0", "--only=zzz"]
)
def test_mistakes_are_one_line(experiment, dataset, option, capsys):
    main, started, _ = experiment
    with pytest.raises(SystemExit) as refused:
        main(f"--dataset={dataset}", option)
    assert refused.value.code == 2 and not started and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_an_experiment_trains_measures_and_draws(dataset, tmp_path, monkeypatch):
    from sympow.experiments import evaluation_length

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    argv = ["x", "--size=test", f"--dataset={dataset}", "--only=gating", "--to=here", "--gpus=cpu,cpu"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(evaluation_length, "LONGEST", 1 << 16)
    assert runs.main("evaluation_length", evaluation_length.plan, evaluation_length.report) == 3
    with open("here/evaluation_length.json") as f:
        (found,) = json.load(f)["runs"].values()
    far = found["measures"]["far"]
    assert far["length"] == 1024 and far["joined"] and len(far["mean"]) == len(far["errors"]) > 20
    assert found["machine"]["device"].endswith("cores, shared by 2 runs")
    assert found["corpus"]["tokens"]["val"] > 0 and found["val"][-1][1] < 6 and found["parameters"] > 1000
    assert os.path.getsize("here/evaluation_length.png") > 1000
    assert "| softmax | not run |" in open("here/evaluation_length.md").read()
