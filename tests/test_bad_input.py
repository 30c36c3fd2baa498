"""Bad input: one clear line on stderr, exit code 2, nothing written and nothing lost."""

import functools
import math
import os
import re
import sys

import pytest
from conftest import copy_of_repository, make_dataset, run_python, tree
from sources import WITHOUT_OVERRIDE, stop_at

import train
from plumbing import cli
from plumbing.cli import INTERVAL, BadInput, configured, read_knobs

KNOBS = read_knobs(train.__file__)
NUMBERS = {name: knob for name, knob in KNOBS.items() if type(knob.default) in (int, float)}


def assert_refused(done, *words):
    assert re.fullmatch(r"train\.py: [^\n]+\n", done.stderr), done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture
def refused(run_train, data_dir, tmp_path):
    """refused(*flags, words=[...]): the run is refused, and leaves the disk as it found it."""

    def check(*flags, words, out_dir="run", **options):
        before = tree(tmp_path), tree(data_dir)
        assert_refused(run_train(out_dir, *flags, **options, code=2), *words)
        assert (tree(tmp_path), tree(data_dir)) == before

    return check


# ---- knobs ---------------------------------------------------------------------------------------


# Of numbers, of the range of each, and of files: test_config.py, and the tests below.
BAD_FLAGS = """
--n_layer=1e18           expected int, n_layer = 1
--optimizer=lion         adamw | adam | sgd | momentum | muon
--schedule=cos           cosine | linear | constant | step | onecycle | wsd
--dtype=fp16             auto | float32 | bfloat16 | float16
--n_head=3               multiple of --n_head=3
--n_head=32              no even multiple
--warmup_steps=13        --max_steps=12
--min_lr=0.1             --peak_lr=0.001
--device=gpu             auto, cpu, cuda
--device=cuda:99         --device=auto
--device=cpu:x           auto, cpu, cuda
--block_size=400         300 to validate
--block_size=5000        has 2,700 tokens
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
    monkeypatch.setattr(cli, "read_knobs", functools.cache(read_knobs))  # else each time
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


def test_the_real_command_exits_with_2(python_train, tmp_path):
    assert_refused(python_train("run", "--batch_size=0", code=2), "--batch_size=0", "[1, ")
    assert tree(tmp_path) == {}


NOWHERE = {"SHAKESPEARE_URL": "http://127.0.0.1:9", "no_proxy": "*"}


def test_what_only_the_repository_has_is_named_and_so_is_a_name_that_is_not_utf8(tmp_path):
    copy = copy_of_repository(tmp_path / "repo")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    train = [copy / "train.py", "--dataset=mine"]
    refused = run_python(*train, cwd=elsewhere)
    assert f"no dataset 'mine' in {elsewhere}/data; type" in refused.stderr
    (copy / "data/mine").mkdir(parents=True)
    (copy / "data/mine/meta.json").touch()
    refused = run_python(*train, cwd=elsewhere)
    assert f"the repository's data/ has it: --data_dir={copy}/data\n" in refused.stderr
    refused = run_python(*train, os.fsdecode(b"--out_dir=caf\xe9"), cwd=elsewhere)
    assert "'--out_dir=caf\\udce9' is not UTF-8" in refused.stderr and refused.returncode == 2
    assert list(elsewhere.iterdir()) == []


def test_without_a_network_another_text_takes_its_place_loudly(run_train, tmp_path):
    flags = ["--dataset=shakespeare", f"--data_dir={tmp_path}/data", "--max_steps=3"]
    done = run_train("run", *flags, "--batch_size=64", "--block_size=64", env=NOWHERE)
    assert "INSTEAD OF 'shakespeare'" in done.stdout and "!" * 40 in done.stdout
    facts = done.facts
    assert facts["data"]["name"] == facts["run"]["dataset"] == "pydoc"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["pydoc"]


SCRIPTS = "train sample report check replay bench prepare_data".split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_system_without_fcntl_gets_one_line(script, tmp_path):
    windows = "import runpy, signal, sys; sys.modules['fcntl'] = None; del signal.SIGUSR1;"
    code = f"{windows} runpy.run_path('{script}.py', run_name='__main__')"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout) == (2, "") and "WSL2" in done.stderr
    assert done.stderr.count("\n") == 1


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


# ---- resume --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(train_in, tmp_path_factory):
    """A run that was stopped after 5 of its 12 steps. Refused commands must leave it as it is."""
    folder = tmp_path_factory.mktemp("stopped")
    return train_in(folder, "run", "--save_interval=2", before=stop_at(5), code=143)


@pytest.fixture
def refused_there(train_in, stopped):
    def check(*flags, words, **options):
        before = tree(stopped.out_dir)
        done = train_in(stopped.out_dir.parent, "run", *flags, **options, code=2)
        assert_refused(done, *words)
        assert tree(stopped.out_dir) == before
        return done

    return check


def test_another_dataset_is_refused(refused_there, tmp_path):
    for name in ("other", "small"):  # another name; the same name, other content
        make_dataset(tmp_path, name, "another text " * 100)
        key = "dataset changed from small" if name == "other" else "data changed from "
        flags = [f"--dataset={name}", f"--data_dir={tmp_path}"]
        done = refused_there(*flags, words=[key, "--out_dir="])
        for flag in re.findall(r"--(\w+)", done.stderr):
            assert flag in KNOBS, f"there is no --{flag} to write"


def test_resume_never_refuses_a_folder_that_holds_a_run(refused_there, run_train):
    refused_there("--resume=never", words=["--resume=never", "--out_dir=run_2"])
    run_train("run", "--resume=never", "--max_steps=3")  # control: empty


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 not really"])
def test_a_path_that_is_no_checkpoint_is_refused(refused, stopped, tmp_path, content):
    if content is not None:
        (tmp_path / "seed.pt").write_bytes(content)
    words = ["--resume=", "seed.pt", "checkpoint's path"]
    refused(f"--resume={tmp_path}/seed.pt", words=words)
    seed = f"--resume={stopped.checkpoint(5)}"  # of another model
    refused(seed, "--n_layer=2", words=["n_layer changed from 1 to 2"])


def test_a_path_is_never_ignored_where_a_run_is(refused_there, stopped):
    """Neither one that is not there, nor any other than the one that the run began from."""
    refused_there("--resume=nowhere.pt", words=["--resume=nowhere.pt", "No such file"])
    older = stopped.out_dir / "ckpt_00000004.pt"
    words = [f"--resume={older}", "did not begin from it", "--out_dir=run_2"]
    refused_there(f"--resume={older}", words=words)


def test_a_finished_run_asked_for_another_one_is_refused(run_train):
    """A sweep that forgets --out_dir must not look like a success."""
    finished = run_train("run", "--max_steps=3")
    before = tree(finished.out_dir)
    done = run_train("run", "--max_steps=3", "--peak_lr=0.5", "--log_interval=1", code=2)
    assert_refused(done, "finished run", "peak_lr 0.001 -> 0.5", "--out_dir=run_2")
    assert "log_interval" not in done.stderr
    assert tree(finished.out_dir) == before
