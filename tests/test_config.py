"""The command line, config files, --help, the terminal, a notebook; bad input is one line, exit code
2, and nothing is written."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from conftest import REPO, arguments, read_log, rows
from sources import at_step

import plumbing
import train


def configure(*argv):
    """The config inside the block; outside of it nothing may have changed."""
    before = plumbing.knobs_in(vars(train))
    with plumbing.configured(vars(train), argv=argv) as config:
        assert plumbing.knobs_in(vars(train)) == config
    assert plumbing.knobs_in(vars(train)) == before
    return config


def refusal(*argv):
    """The one line that bad arguments get; no knob is set."""
    before = plumbing.knobs_in(vars(train))
    with pytest.raises(plumbing.BadInput) as error, plumbing.configured(vars(train), argv=argv):
        train.check_knobs({flag[2:].partition("=")[0] for flag in argv})
    assert plumbing.knobs_in(vars(train)) == before and "\n" not in str(error.value)
    return str(error.value)


# ---- flags and files -----------------------------------------------------------------------------

TYPES = {
    "--batch_size=1_000": 1000,
    "--batch_size=1e3": 1000,
    "--peak_lr=1": 1.0,
    "--wandb_run_name=a=b": "a=b",
    "--report=False": False,
    "--shard=True": True,
    "--compile=FALSE": False,
    "--compile=auto": "auto",
    "--resume=Force": "force",
}


@pytest.mark.parametrize("flag", TYPES)
def test_a_flag_has_the_type_of_the_default(flag):
    name, value = flag[2:].partition("=")[0], TYPES[flag]
    config = configure(flag)
    assert config[name] == value and type(config[name]) is type(value)
    assert config.typed == {name}


def test_a_config_file_sees_the_knobs_so_far_and_flags_win_wherever_they_stand(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("_half = batch_size // 2\nn_layer = _half\nbatch_size += 1\nreport = False\n")
    two.write_text("n_head = batch_size\nbatch_size = 6\n")
    config = configure(str(one), "--batch_size=5", str(two))
    assert (config["n_layer"], config["n_head"], config["report"]) == (16, 33, False)
    assert config["batch_size"] == 5 and config.base["batch_size"] == 6
    assert config.default["batch_size"] == 32 and config.typed == {"batch_size"}
    assert configure(str(two), str(one))["n_layer"] == 3
    assert configure("--seed=1", "--seed=2")["seed"] == 2


BAD_FLAGS = """
--batchsize=4         unknown name 'batchsize' in --batchsize=4; did you mean batch_size?
-batch_size=4         did you mean batch_size?
--no-report           unknown name 'no-report' in --no-report; did you mean report?
--lr=1                unknown name 'lr' in --lr=1; here it is peak_lr
--eval_iters=200      unknown name 'eval_iters' in --eval_iters=200; --eval_tokens=N evaluates
--zzz=4               unknown name 'zzz' in --zzz=4; --help lists
--FREE=1              unknown name 'FREE'
--batch_size=1.5      --batch_size=1.5: expected int, such as --batch_size=32
--batch_size=inf      --batch_size=inf: expected int
--peak_lr=nan         --peak_lr=nan: expected float
--peak_lr             --peak_lr: expected float, such as --peak_lr=0.001
--out_dir=            --out_dir=: expected str
--compile=perhaps     --compile=perhaps: expected auto | true | false
--optimizer=lion      --optimizer=lion: expected adamw | adam | sgd | momentum | muon
--schedule=cos        expected cosine | linear | constant | step | onecycle
--dtype=fp16          expected auto | float32 | bfloat16 | float16
--resume=yes          expected auto | never | restart | force
config/none.py        no config file config/none.py
a                     unexpected argument 'a'
--batch_size=0        --batch_size=0: expected 1 or more
--dropout=1           --dropout=1.0: expected 0 or more, and less than 1
--beta2=-0.1          --beta2=-0.1: expected 0
--peak_lr=inf         --peak_lr=inf: expected 0 or more
--min_lr=0.1          --min_lr=0.1: expected no more than --peak_lr=0.001
--warmup_steps=3000   --warmup_steps=3000: expected no more than --max_steps=2000
bad.py: batch_size = True   bad.py: batch_size = True: expected int, such as --batch_size=
bad.py: import math         one of your own, in a file, begins with _
bad.py: peak_rl = 1         did you mean peak_lr?
bad.py: lr = max_iters = 2   lr (here it is peak_lr), max_iters (here it is max_steps)
"""


@pytest.mark.parametrize("line", BAD_FLAGS.strip().splitlines())
def test_a_bad_argument_is_one_line_that_says_what_to_type(line, tmp_path):
    """Also a config file with a wrong name or value."""
    argument, words = re.split("   +", line)
    if argument.startswith("bad.py: "):
        (tmp_path / "bad.py").write_text(argument.removeprefix("bad.py: "))
        argument = str(tmp_path / "bad.py")
    assert words in refusal(argument)


def test_the_config_files_of_this_repository_set_knobs_alone():
    for path in (REPO / "config").glob("*.py"):
        is_for_ngram = "\nngram_rows = " in path.read_text()  # they are knobs of examples/ngram.py
        with pytest.raises(plumbing.BadInput) if is_for_ngram else contextlib.nullcontext():
            assert configure(str(path))["out_dir"] == f"out/{path.stem}"


# ---- --help, and what a terminal gets ------------------------------------------------------------


def on_a_terminal(words, columns):
    """What a terminal of so many columns gets from a command."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    process = subprocess.Popen(words, stdout=theirs, env=os.environ | {"COLUMNS": "0"}, cwd=REPO)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # at its end
        while part := os.read(mine, 1 << 16):
            shown += part
    os.close(mine)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize("columns", [60, 120])
def test_help_has_every_knob_at_the_width_of_the_terminal(columns):
    shown = on_a_terminal([sys.executable, "train.py", "--help"], columns).replace("\x1b[K", "")
    names = re.findall(r"(?m)^([a-z]\w*) = ", shown)
    assert names == [*plumbing.knobs_in(vars(train))]
    knobs = shown[shown.index("# The run") :]  # below the docstring, which stays as it is
    assert max(map(len, knobs.splitlines())) <= columns
    assert "peak_lr = 1e-3" in shown and "# The optimizer" in shown
    words = f"{sys.executable} train.py --help | head -n 1"
    assert not subprocess.run(words, shell=True, cwd=REPO, capture_output=True).stderr


def test_a_run_shows_its_plan_a_table_and_on_a_terminal_the_live_step(data_dir, tmp_path):
    argv = arguments(tmp_path / "run", data_dir, ["--max_steps=200", "--log_interval=100"])
    shown = on_a_terminal([sys.executable, "train.py", *argv], 100)
    names = re.findall(r"(?m)^(?:\x1b\[K)?([a-z]+)\b", shown)
    assert names[:8] == "run model data batch steps device dtype compile".split()
    table = shown.partition("step/total")[2]
    assert len(re.findall(r"100/200 .* 0:00:\d\d", table)) >= 1 and table.count("step/total") == 0
    live = re.findall(r"(\d+)/200 +loss [\d.]+  0:00:\d\d left[^\n]*?\r", shown)
    assert live and all(100 < int(step) <= 200 for step in live)


def test_knobs_may_have_annotations_and_computed_values_and_help_shows_them(tmp_path, capsys):
    path = tmp_path / "fork.py"
    path.write_text('"""A fork."""\n\n# Sizes\nwidth: int = 64  # of it\nhigh = 2 * 64  # too\n\n'
                    "ADDED_KNOBS = {}\n\n\ndef f():\n    pass\n")  # fmt: skip
    scope = {"__file__": str(path), "__name__": "fork"}
    exec(compile(path.read_text(), path, "exec"), scope)
    with plumbing.configured(scope, argv=["--high=7"]) as config:
        assert config == {"width": 64, "high": 7}
    with pytest.raises(SystemExit), plumbing.configured(scope, argv=["--help"]):
        pass
    shown = capsys.readouterr().out
    assert "width: int = 64  # of it" in shown and "high = 2 * 64  # too" in shown


# ---- knobs of a script, a notebook ---------------------------------------------------------------


@pytest.fixture
def knob(monkeypatch):
    monkeypatch.setattr(train, "ADDED_KNOBS", {})
    yield train.knob
    vars(train).pop("alpha", None)


TAKEN = [("max", 1), ("copy", 1), ("peak_lr", 1), ("Alpha", 1), ("a-b", 1), ("alpha", None)]


@pytest.mark.parametrize("name, default", TAKEN)
def test_a_name_that_is_taken_or_a_default_that_is_no_value_is_refused(name, default, knob):
    with pytest.raises(plumbing.BadInput, match=re.escape(f"train.knob({name!r}")):
        knob(name, default, "what it is")


def test_a_knob_of_a_script_is_a_flag_and_a_value_of_train_and_of_the_config(knob, capsys):
    for default in (0.3, 0.5):  # a cell of a notebook that runs twice
        knob("alpha", default, "weight of it")
    with plumbing.configured(vars(train), argv=["--alpha=0.7"]) as config:
        assert train.alpha == config["alpha"] == 0.7
        with plumbing.configured(vars(train), argv=[]) as inner:
            assert inner["alpha"] == 0.7
    assert train.alpha == 0.5 and "expected float" in refusal("--alpha=x")
    with pytest.raises(SystemExit), plumbing.configured(vars(train), argv=["-h"]):
        pass
    assert "alpha = 0.5  # weight of it" in capsys.readouterr().out


def test_a_notebook_may_run_twice_and_nest(data_dir, tmp_path, capsys):
    """Knobs and what was resolved are as before afterwards; the globals that a cell has set count."""
    argv = arguments(tmp_path / "run", data_dir, ["--dtype=auto", "--max_steps=5"])
    argv = [flag for flag in argv if "warmup" not in flag and "seed" not in flag]
    before = plumbing.knobs_in(vars(train))
    locks = open("/proc/locks").read().count(f" {os.getpid()} ")
    train.seed = 7
    try:
        assert train.main(argv) == 0
        assert "finished at step 5" not in capsys.readouterr().out
        assert train.main(argv) == 0
        assert "finished at step 5" in capsys.readouterr().out
    finally:
        train.seed = before["seed"]
    assert plumbing.read_json(tmp_path / "run/run.json")["config"]["seed"] == 7
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [1, 2, 3, 4, 5]
    assert plumbing.knobs_in(vars(train)) == before
    assert open("/proc/locks").read().count(f" {os.getpid()} ") == locks
    with train.build([*argv, "--out_dir=none"]) as outer:
        assert outer.config["warmup_steps"] == 0
        with train.build([*argv, "--out_dir=none", "--warmup_steps=2", "--n_embd=16"]) as inner:
            assert inner.config["warmup_steps"] == train.RESOLVED["warmup_steps"] == 2
        assert train.n_embd == 32 and train.lr_at(0) == train.peak_lr
        assert train.RESOLVED["warmup_steps"] == 0
    assert train.lr_at(0) == train.peak_lr / train.warmup_steps  # nothing leaks


def test_a_run_that_is_built_writes_nothing_and_takes_no_lock(data_dir, tmp_path, run_train):
    inside = at_step(4, "with train.build() as again: print('BUILT', again.state['step'])")
    done = run_train("run", "--save_interval=2", before=inside)
    assert "BUILT 2" in done.stdout
    log = read_log(done.out_dir)
    with train.build(arguments(tmp_path / "run", data_dir, [])) as run:
        assert run.state["step"] == 12
    with train.build(arguments(tmp_path / "new", data_dir, [])) as run:
        assert run.state["step"] == 0
    assert read_log(done.out_dir) == log and not (tmp_path / "new").exists()


BAD_RUNS = """
--n_head=3             expected a multiple of 2 * n_head = 6
--device=gpu           --device=gpu
--device=cuda:99       expected auto, cpu, cuda, cuda:1 or mps
--block_size=400       --block_size=400: expected up to 299
--dataset=nowhere      nowhere
--dataset=../small     ../small
--shard=true           --shard=true: expected several ranks
--init_from=no.pt      no.pt
--resume=restart --n_embd=33   --n_embd=33
--out_dir=file         file cannot be written (File exists); write --out_dir=
--out_dir=file/run     file/run cannot be written (Not a directory); write --out_dir=
"""


@pytest.mark.parametrize("line", BAD_RUNS.strip().splitlines())
def test_bad_input_is_one_line_and_writes_nothing(run_train, data_dir, tmp_path, line):
    flags, words = re.split("   +", line)
    before = sorted(data_dir.rglob("*"))
    (tmp_path / "file").write_text("mine")
    done = run_train("run", *flags.split(), code=2)
    assert words in done.stderr and done.stdout.count("\n") == 0
    assert re.fullmatch(r"train\.py: [^\n]+\n", done.stderr), done.stderr
    assert not (tmp_path / "run").exists() and sorted(data_dir.rglob("*")) == before
