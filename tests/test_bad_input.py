"""Bad input: one clear line on stderr, exit code 2, nothing written and nothing lost."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import WITHOUT_OVERRIDE, stop_at, tree

import train
from plumbing import cli
from plumbing.cli import INTERVAL, BadInput, configured, read_knobs, show
from prepare_data import prepare

KNOBS = read_knobs(train.__file__)
NUMBERS = {name: knob for name, knob in KNOBS.items() if type(knob.default) in (int, float)}


def assert_refused(done, *words):
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert re.fullmatch(r"train\.py: [^\n]+\n", done.stderr), done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture
def refused(run_train, data_dir, tmp_path):
    """refused(*flags, words=[...]): the run is refused, and leaves the disk as it found it."""

    def check(*flags, words, out_dir="run", **options):
        before = tree(tmp_path), tree(data_dir)
        assert_refused(run_train(out_dir, *flags, **options), *words)
        assert (tree(tmp_path), tree(data_dir)) == before

    return check


# ---- knobs ---------------------------------------------------------------------------------------


BAD_FLAGS = """
--batch_size=0           an int in [1,
--accum_steps=-1         an int in [1,
--block_size=0           an int in [1,
--n_layer=1e18           an int in [1,
--batch_size=1e308       an int in [1,
--max_steps=12.5         an int in [1,
--seed=-1                an int in [0, 4294967295]
--dropout=1              a number in [0, 1)
--label_smoothing=nan    a number in [0, 1)
--peak_lr=inf            a number in (0, inf)
--peak_lr=fast           a number in (0, inf)
--grad_clip=nan          a number in [0, inf)
--compile=maybe          auto, true, false
--optimizer=lion         adamw, adam, sgd, momentum, muon
--schedule=cos           cosine, linear, constant, step, onecycle, wsd
--dtype=fp16             auto, float32, bfloat16, float16
--n_head=3               multiple of --n_head=3
--n_head=32              no even multiple
--warmup_steps=13        --max_steps=12
--min_lr=0.1             --peak_lr=0.001
--device=gpu             --device=auto
--device=cuda:99         --device=auto
--device=cpu:x           --device=auto
--block_size=400         val.bin has 300 tokens
--block_size=5000        has 2,700 tokens
--out_dir=               a folder
--max_step=5             did you mean --max_steps=5
nowhere.py               no config file nowhere.py
--dataset=nowhere        nowhere
--dataset=../small       NAME is made of letters
"""


@pytest.mark.parametrize("line", BAD_FLAGS.strip().splitlines())
def test_a_bad_flag_is_named_and_nothing_is_written(refused, line):
    flag, words = line.split(maxsplit=1)
    refused(flag, words=[flag.split("=")[-1].strip("-"), words])


def is_refused(*flags):
    with pytest.raises(BadInput) as error:
        with configured(vars(train), argv=flags):
            pass
    return flags[-1].split("=")[0] in str(error.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range_that_no_nan_slips_through(name, monkeypatch):
    monkeypatch.setattr(cli, "read_knobs", functools.cache(read_knobs))  # else it parses each time
    default, comment = NUMBERS[name].default, NUMBERS[name].comment
    bounds = INTERVAL.search(comment)
    assert bounds, f"{name} says nothing of its range"
    for value in ("-2", "nan", "inf", "-inf"):
        assert is_refused(f"--{name}={value}"), value
    low, high = float(bounds[2]), float(bounds[3])
    for bracket, edge, step in ((bounds[1], low, -1), (bounds[4], high, 1)):
        if edge == math.inf:
            continue
        outside = edge if bracket in "()" else edge + step
        shown = int(outside) if isinstance(default, int) else outside
        assert is_refused(f"--{name}={shown}")
    with configured(vars(train), argv=[f"--{name}={default}"]):  # control
        pass


@pytest.mark.parametrize(
    "value, kind", [("numpy.float64(1)", "float64"), ("[{'x': range(3)}]", "range")]
)
def test_a_state_that_no_checkpoint_brings_back_is_refused_by_name(refused, value, kind):
    before = f"import numpy; train.FRESH_STATE['best_of_all'] = {value}"
    words = ["FRESH_STATE", "'best_of_all'", kind, "checkpoints cannot restore"]
    refused(before=before, words=words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(refused):
    refused("--device=cuda", words=["--device=cuda", "--device=auto"])


def test_float16_on_a_cpu_that_does_not_compute_in_it_is_refused(refused, run_train):
    hide = 'from plumbing import machine; machine.cpu_info = lambda: ("an older CPU", {"avx2"})'
    refused("--dtype=float16", words=["--dtype=float16", "--dtype=auto"], before=hide)
    done = run_train("auto", "--dtype=auto", "--max_steps=3", before=hide)
    assert done.returncode == 0 and "float32 (nothing smaller is native here)" in done.stdout


def test_help_lists_every_knob_with_its_default(run_train, tmp_path):
    done = run_train("run", "--help")
    assert done.returncode == 0 and done.stderr == ""
    words = " ".join(done.stdout.split())
    for name, knob in KNOBS.items():
        assert f"--{name}=" in words
        assert " ".join(knob.comment.split()[:2]) in words
    assert "fixed another value is another run" in words
    assert tree(tmp_path) == {}


def test_the_real_command_exits_with_2(python_train, tmp_path):
    assert_refused(python_train("run", "--batch_size=0"), "--batch_size=0", "[1, ")
    assert tree(tmp_path) == {}


# ---- data ----------------------------------------------------------------------------------------


def test_a_text_shorter_than_a_window_is_refused(refused, tmp_path):
    (tmp_path / "short.txt").write_text("to be or not to be, that is the question")
    input = str(tmp_path / "short.txt")
    prepare("short", tmp_path / "data", input=input, say=lambda *words: None)
    words = ["--block_size=16", "has 4 tokens", "longer text"]
    refused("--dataset=short", f"--data_dir={tmp_path}/data", words=words)


def test_a_text_of_exactly_one_validation_window_is_enough(run_train, tmp_path):
    """Control: 17 tokens to validate are a window of 16 and the target of its last."""
    (tmp_path / "small.txt").write_text("abcdefghij" * 17)
    input = str(tmp_path / "small.txt")
    _, meta = prepare("short", tmp_path / "data", input=input, say=lambda *words: None)
    assert meta["val_tokens"] == 17
    done = run_train("run", "--dataset=short", f"--data_dir={tmp_path}/data", "--max_steps=3")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda folder: os.truncate(folder / "train.bin", 100), ["train.bin", "it has 100 bytes"]),
        (lambda folder: (folder / "val.bin").write_bytes(bytes(600)), ["val.bin", "SHA-256"]),
        (lambda folder: (folder / "meta.json").write_text("{}"), ["meta.json"]),
    ],
    ids=["truncated", "other bytes", "no meta"],
)
def test_damaged_data_is_refused(refused, data_dir, tmp_path, damage, words):
    """test_data.py has every kind of damage."""
    shutil.copytree(data_dir, tmp_path / "data")
    damage(tmp_path / "data" / "small")
    refused(f"--data_dir={tmp_path}/data", words=[*words, "prepare_data.py"])


NOWHERE = {"SHAKESPEARE_URL": "http://127.0.0.1:9", "no_proxy": "*"}


def test_without_a_network_another_text_takes_its_place_loudly(run_train, tmp_path):
    flags = ["--dataset=shakespeare", f"--data_dir={tmp_path}/data", "--max_steps=3"]
    stopped = run_train("run", *flags, "--offline_dataset=", env=NOWHERE)
    assert_refused(stopped, "127.0.0.1:9")
    done = run_train("run", *flags, "--batch_size=64", "--block_size=64", env=NOWHERE)
    assert done.returncode == 0, done.stderr
    assert "INSTEAD OF 'shakespeare'" in done.stdout and "!" * 40 in done.stdout
    facts = json.loads((done.out_dir / "run.json").read_text())
    assert facts["data"]["name"] == facts["run"]["dataset"] == "pydoc"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["pydoc"]


# ---- the folder of the run -----------------------------------------------------------------------


def test_a_folder_below_a_file_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out_dir in ("file", "file/run"):
        refused(out_dir=out_dir, words=["cannot be written", "--out_dir="])


def test_a_read_only_folder_is_refused(refused, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    before = WITHOUT_OVERRIDE if sys.platform == "linux" else ""
    try:
        for out_dir in ("locked", "locked/run"):
            refused(out_dir=out_dir, words=["cannot be written", "--out_dir="], before=before)
    finally:
        folder.chmod(0o755)


def test_too_little_free_disk_is_refused_before_the_first_step(refused):
    words = ["MB free", "--keep_last=1"]
    refused("--keep_last=1000000000", words=words)
    refused("--max_steps=1000000000", "--milestone_interval=1", words=words)


@pytest.mark.parametrize("megabytes", [10, 24])
def test_a_run_that_fits_on_its_disk_can_also_resume_there(run_train, tmp_path, megabytes):
    """Five files of 3.4 MB fit on the larger disk. What the run itself has written is not in its
    way."""
    flags = ("--save_interval=2", "--ngram_rows=8192")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        done = run_train("disk/run", *flags, before=stop_at(5))
        if megabytes == 10:
            assert_refused(done, "MB free", "--keep_last=1")
            assert tree(disk) == {}
        else:
            assert done.returncode == 143
            assert run_train("disk/run", *flags).returncode == 0
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def test_an_empty_folder_stays_empty(refused, tmp_path):
    (tmp_path / "run").mkdir()
    refused("--block_size=400", words=["--block_size=400"])
    refused("--keep_last=1000000000", words=["MB free"])
    refused("--resume=nowhere.pt", words=["nowhere.pt"])


# ---- resume --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(train_in, tmp_path_factory):
    """A run that was stopped after 5 of its 12 steps. Refused commands must leave it as it is."""
    done = train_in(
        tmp_path_factory.mktemp("stopped"), "run", "--save_interval=2", before=stop_at(5)
    )
    assert done.returncode == 143
    return done


@pytest.fixture
def refused_there(train_in, stopped):
    def check(*flags, words, **options):
        before = tree(stopped.out_dir)
        done = train_in(stopped.out_dir.parent, "run", *flags, **options)
        assert_refused(done, *words)
        assert tree(stopped.out_dir) == before
        return done

    return check


CHANGED = {
    "n_layer": ("--n_layer=2", 1, 2),
    "n_head": ("--n_head=4", 2, 4),
    "n_embd": ("--n_embd=64", 32, 64),
    "ngram_rows": ("--ngram_rows=64", 0, 64),
    "conv_width": ("--conv_width=3", 1, 3),
    "block_size": ("--block_size=8", 16, 8),
    "dropout": ("--dropout=0.1", 0.0, 0.1),
    "label_smoothing": ("--label_smoothing=0.1", 0.0, 0.1),
    "n_future_tokens": ("--n_future_tokens=2", 1, 2),
    "seed": ("--seed=1", 1337, 1),
    "optimizer": ("--optimizer=sgd", "adamw", "sgd"),
    "schedule": ("--schedule=linear", "cosine", "linear"),
    "dtype": ("--dtype=bfloat16", "float32", "bfloat16"),
    "global_batch": ("--accum_steps=2", 8, 16),
}


@pytest.mark.parametrize("key", CHANGED)
def test_what_would_be_another_run_is_refused_by_name(refused_there, key):
    flag, then, now = CHANGED[key]
    done = refused_there(flag, words=[f"{key} changed from {then} to {now}", "--out_dir="])
    for name in re.findall(r"--(\w+)", done.stderr):
        assert name in KNOBS, f"there is no --{name} to write"


def test_another_dataset_is_refused(refused_there, tmp_path):
    (tmp_path / "other.txt").write_text("another text " * 100)
    input = str(tmp_path / "other.txt")
    for name in ("other", "small"):  # another name; the same name, other content
        prepare(name, tmp_path / "data", input=input, say=lambda *words: None)
        key = "dataset changed from small" if name == "other" else "data changed from "
        flags = [f"--dataset={name}", f"--data_dir={tmp_path}/data"]
        done = refused_there(*flags, words=[key, "--out_dir="])
        for flag in re.findall(r"--(\w+)", done.stderr):
            assert flag in KNOBS, f"there is no --{flag} to write"


def test_resume_never_refuses_a_folder_that_holds_a_run(refused_there, run_train):
    refused_there("--resume=never", words=["--resume=never", "--out_dir=run_2"])
    assert run_train("run", "--resume=never", "--max_steps=3").returncode == 0  # control: empty


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 not really"])
def test_a_path_that_is_no_checkpoint_is_refused(refused, stopped, tmp_path, content):
    if content is not None:
        (tmp_path / "seed.pt").write_bytes(content)
    words = ["--resume=", "seed.pt", "auto, never, restart or"]
    refused(f"--resume={tmp_path}/seed.pt", words=words)
    seed = f"--resume={stopped.checkpoint(5)}"  # of another model
    refused(seed, "--n_layer=2", words=["n_layer changed from 1 to 2"])


def test_a_path_is_never_ignored_where_a_run_is(refused_there, stopped):
    """Neither one that is not there, nor any other than the one that the run began from."""
    refused_there("--resume=nowhere.pt", words=["--resume=nowhere.pt", "No such file"])
    older = stopped.out_dir / "ckpt_00000004.pt"
    words = [f"--resume={older}", "began from no checkpoint", "--out_dir=run_2"]
    refused_there(f"--resume={older}", words=words)


def test_a_run_begun_from_a_path_refuses_any_other(run_train, stopped, tmp_path):
    first, other = stopped.checkpoint(4), stopped.checkpoint(5)
    assert run_train("run", f"--resume={first}", before=stop_at(6)).returncode == 143
    before = tree(tmp_path)
    done = run_train("run", f"--resume={other}")
    assert_refused(done, f"--resume={other}", "ckpt_00000004.pt", "--out_dir=run_2")
    assert tree(tmp_path) == before
    assert run_train("run", f"--resume={first}").returncode == 0  # control: the same command


def test_a_checkpoint_that_may_not_be_read_is_no_damage(train_in, stopped, tmp_path):
    shutil.copytree(stopped.out_dir, tmp_path / "run")
    (tmp_path / "run" / "ckpt_00000005.pt").chmod(0)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    before = WITHOUT_OVERRIDE if sys.platform == "linux" else ""
    done = train_in(tmp_path, "run", before=before)
    assert_refused(done, "ckpt_00000005.pt", "Permission denied", "stays as it is")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names


@pytest.fixture(scope="module")
def finished(train_in, tmp_path_factory):
    return train_in(tmp_path_factory.mktemp("finished"), "run", "--max_steps=3")


def test_a_finished_run_asked_for_another_one_is_refused(train_in, finished):
    """A sweep that forgets --out_dir must not look like a success."""
    before = tree(finished.out_dir)
    for flag, words in (
        ("--peak_lr=0.5", "peak_lr changed from 0.001 to 0.5"),
        ("--max_skipped=3", "max_skipped changed from 10 to 3"),
        ("--deterministic=false", "deterministic changed from auto to False"),
    ):
        flags = ("--max_steps=3", flag, "--log_interval=1")
        done = train_in(finished.out_dir.parent, "run", *flags)
        assert_refused(done, words, "finished run", "--out_dir=run_2")
        assert "log_interval" not in done.stderr
    assert tree(finished.out_dir) == before


def test_a_finished_run_may_be_asked_again_with_free_knobs(train_in, finished, data_dir):
    before = tree(finished.out_dir)
    free = {n: k.default for n, k in KNOBS.items() if "free" in k.policy and n != "eval_tokens"}
    free = {name: 1 if name in NUMBERS else value for name, value in free.items()}
    free |= {"wandb_project": "other", "wandb_run_name": "other", "offline_dataset": ""}
    free |= {"out_dir": finished.out_dir, "data_dir": data_dir, "max_steps": 3, "resume": "auto"}
    assert len(free) > 20
    flags = [f"--{name}={show(value)}" for name, value in free.items()]
    done = train_in(finished.out_dir.parent, "run", *flags)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "is finished: 3 steps" in done.stdout and "--out_dir=run_2" in done.stdout
    assert tree(finished.out_dir) == before


def test_a_run_folder_that_became_read_only_is_refused(refused_there, stopped):
    before = WITHOUT_OVERRIDE if sys.platform == "linux" else ""
    lock = stopped.out_dir / ".lock"
    lock.chmod(0o444)
    stopped.out_dir.chmod(0o555)
    try:
        refused_there(words=["cannot be written", "--out_dir="], before=before)
    finally:
        stopped.out_dir.chmod(0o755)
        lock.chmod(0o644)


def test_everything_else_may_change_freely(train_in, stopped, tmp_path):
    shutil.copytree(stopped.out_dir, tmp_path / "run")
    free = "--max_steps=14 --decay_steps=12 --log_interval=1 --eval_interval=3"
    free += " --save_interval=3 --keep_last=1 --num_workers=1 --patience=9 --min_delta=0.1"
    free += " --milestone_interval=7 --max_skipped=3"
    free += " --peak_lr=2e-3 --min_lr=2e-4 --weight_decay=0 --grad_clip=0 --beta2=0.9"
    free += " --save_minutes=9 --plateau_factor=0.9 --max_rollbacks=1"
    done = train_in(tmp_path, "run", *free.split())
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in done.rows("train")] == list(range(1, 15))
    events = [row["event"] for row in done.rows("event")]
    assert "resume" in events and "inexact_resume" not in events


# ---- errors in the user's own code ---------------------------------------------------------------

WRONG_FORKS = {
    "embedding": """
def build(knobs, vocab_size, inner=train.build_model):
    model = inner(knobs, vocab_size)
    model.own = torch.nn.Embedding(2, 4)
    def forward(inputs, targets=None, forward=model.forward):
        model.own(inputs)  # my own line
        return forward(inputs, targets)
    model.forward = forward
    return model
train.build_model = build
""",
    "loop": """
def evaluate(run):
    open(run.folder.path / "missing")  # my own line
train.evaluate = evaluate
""",
}


@pytest.mark.parametrize("fork", WRONG_FORKS)
def test_an_error_in_a_fork_shows_the_forks_own_line(run_train, tmp_path, fork):
    """Python's own traceback, not one line that calls it bad input."""
    (tmp_path / "fork.py").write_text("import torch\nimport train\n" + WRONG_FORKS[fork])
    done = run_train(
        "run", before=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fork"
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[0].startswith("Traceback")
    own = [number for number, line in enumerate(lines) if f"{tmp_path}/fork.py" in line][-1]
    assert "# my own line" in lines[own + 1]
    assert lines[-1].startswith({"embedding": "IndexError", "loop": "FileNotFoundError"}[fork])
