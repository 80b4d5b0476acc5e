"""Programs end in one line whatever becomes of their output, and leave whole files or none."""

import errno
import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
import time

import pytest
from helpers import ROOT, call, join, run, start

from sympow import compare, doctor, evaluate, export, sample, train
from sympow.bench import sample as bench_sample
from sympow.data.files import whole_file
from sympow.data import progress
from sympow.runs.program import check_output

SAY = "from sympow.runs.program import run_program; run_program(lambda: print('gr\u00fc\u00dfe'))"
# a process that a shell has started in the background ignores Ctrl-C
STOP = (
    "import signal; signal.signal(2, signal.default_int_handler); "
    "from sympow.runs.program import run_program; run_program(lambda: os.kill(os.getpid(), 2))"
)


OTHERS = "sample.py", "evaluate.py", "compare.py", "export.py", "doctor.py"


@pytest.mark.parametrize("program", ["train.py", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_program_finds_its_modules_in_an_isolated_python(program, tmp_path):
    run("-I", f"{ROOT}/{program}", "--help", cwd=tmp_path)


@pytest.mark.parametrize(
    "code,redirected,status,out,error",
    [
        (SAY, ">/dev/full", 1, "", "-c: cannot write the output: [Errno 28] No space left on device"),
        (SAY, "| (exec <&-; sleep 0.3)", 0, "", ""),
        (f"import os; {STOP}", "", 130, "", ""),
        (f"import sys; sys.stdout.reconfigure(encoding='ascii'); {SAY}", "", 0, "gr??e", ""),
    ],
)
def test_a_program_ends_in_one_line(code, redirected, status, out, error):
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -c {shlex.quote(code)} {redirected}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=600)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (status, out, error)


@pytest.mark.parametrize("program", [train, sample, evaluate, compare, export, doctor, bench_sample])
def test_help_is_shown_without_docstrings(program, monkeypatch, capsys):
    """`python -OO`, or PYTHONOPTIMIZE=2, drops them."""
    monkeypatch.setattr(program, "__doc__", None)
    assert call(program.main, "--help") == 0 and "--help" in capsys.readouterr().out


@pytest.mark.parametrize("setting,policy", [(None, "passive"), ("active", "active")])
@pytest.mark.parametrize("program", ["train.py", "sample.py", "evaluate.py", "-m experiments.measure"])
def test_waiting_threads_sleep_in_a_program_unless_the_user_has_said_otherwise(program, setting, policy, tmp_path):
    (tmp_path / "torch.py").write_text("import os, sys; sys.exit(os.environ['OMP_WAIT_POLICY'])")
    environment = {"OMP_WAIT_POLICY": setting, "PYTHONPATH": str(tmp_path)}
    assert run(*program.split(), cwd=ROOT, env=environment, check=False).stderr == f"{policy}\n"


def bar_on_a_terminal_without_a_size():
    """Print what a progress bar writes to a terminal of 0 x 0."""
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    os.dup2(stderr, 2)
    with progress.bar(total=10, desc="prompt") as shown:
        shown.update(10)
    print(os.read(terminal, 1000).decode().strip().splitlines()[0][:15])


def test_a_terminal_without_a_size_shows_the_bar(tmp_path):
    assert join(start(bar_on_a_terminal_without_a_size, cwd=tmp_path)) == [0]
    assert (tmp_path / "log").read_text() == "prompt:   0%|  \n"


def test_without_a_terminal_a_line_comes_soon_and_then_some_also_of_what_does_not_move(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE", 0.2)
    monkeypatch.setattr(progress, "NEXT_LINE", 0.0)
    with progress.bar(total=10, desc="prompt") as shown, progress.waiting("reading", shown=False):
        shown.update(5)
        assert capsys.readouterr().err == ""
        lines, end = "", time.monotonic() + 600
        while lines.count("\n") < 2 and time.monotonic() < end:
            lines += capsys.readouterr().err
            time.sleep(0.05)
    assert lines.startswith("prompt:  50% 5/10 [00:0") and lines.count("prompt:  50%") == lines.count("\n") > 1
    monkeypatch.setattr(progress, "FIRST_LINE", 60.0)
    assert progress.bar(total=10).due > time.monotonic() + 50


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    with pytest.raises(OSError), whole_file(path) as temporary:
        with open(temporary, "w") as f:
            f.write("half")
        raise OSError(errno.EFBIG, "File too large")
    assert os.listdir(path.parent) == []
    with whole_file(path) as temporary, open(temporary, "w") as f:
        f.write("whole")
    assert path.read_text() == "whole" and os.listdir(path.parent) == [path.name]
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(KeyboardInterrupt), whole_file(path) as temporary:
        raise KeyboardInterrupt
    with whole_file(tmp_path / "link") as temporary, open(temporary, "w") as f:
        f.write("again")
    assert path.read_text() == "again" and os.listdir(path.parent) == [path.name]


def test_a_path_that_cannot_be_written_is_known_before(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "new/folder/file", "file"):
        check_output(str(path))
    for path in ("", "/dev/null", str(tmp_path), f"{tmp_path}/file/x", 300 * "a"):
        with pytest.raises(OSError):
            check_output(path)
