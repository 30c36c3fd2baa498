"""The command line: what is accepted, where it lands, what bad input gets, what a knob may do."""

import os
import re
import sys

import pytest
import torch
from conftest import REPO, copy_of_repository, digest, events, run_python
from sources import ranks, stop_at

from plumbing import cli
from plumbing.cli import configured, read_knobs

TRAIN = REPO / "train.py"
SCRIPT = '''\
"""Counts sheep."""

import json
import sys

from plumbing.cli import configured, run_script

CONSTANT = 3  # not a knob

# where
out_dir = "out/run"  # folder of the run; free
data_dir = ""  # folder of the data; free
# the sizes of
# things
batch_size = 32  # sequences, and a comment that is so long that it cannot stand on a single line
#   and goes on below; product fixed
accum_steps = 1  # of these; product fixed
shift = -1  # steps back
peak_lr = 1e-3  # at the top
name = "none"
# switches
report = True  # write one
compile = "auto"  # auto | true | false
computed = len("not a knob")
_private = 1


def main():
    with configured(globals()) as config:
        for key, value in config.items():
            assert globals()[key] is value
        print(json.dumps([config, sorted(config.typed)]))


after = 1
if __name__ == "__main__":
    sys.exit(run_script(main))
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A real script in a repository of its own, which is the working directory."""
    path = tmp_path / "repo" / "sheep.py"
    (path.parent / "config").mkdir(parents=True)
    path.write_text(SCRIPT)
    (path.parent / "config" / "small.py").write_text("batch_size = 4  # fits anywhere\n")
    monkeypatch.chdir(path.parent)
    return path


def scope_of(script):
    """The script's knobs as configured() sees them, without a process."""
    knobs = {name: knob.default for name, knob in read_knobs(script).items()}
    return knobs | {"__file__": str(script), "__doc__": ""}


def configure(script, *argv):
    """The config inside the block; outside of it nothing may have changed."""
    scope = scope_of(script)
    before = dict(scope)
    with configured(scope, argv=list(argv)) as config:
        assert all(scope[name] is value for name, value in config.items())
    assert scope == before
    return config


def refusal(script, *argv):
    """The one line that bad arguments get. Nothing may have been set."""
    scope = scope_of(script)
    before = dict(scope)
    with pytest.raises(cli.BadInput) as error, configured(scope, argv=list(argv)):
        pass
    assert scope == before and "\n" not in str(error.value)
    return str(error.value)


def run(script, *argv):
    return run_python(script, *argv, cwd=script.parent, PYTHONPATH=str(REPO))


def table(text):
    """[[left, right], ...] of lines whose two columns are at least two spaces apart."""
    return [re.split("   *", line) for line in text.strip().splitlines()]


VALUES = """
--batch_size=1_000  1000
--batch_size=1e3    1000
--peak_lr=1         1.0
--name=a=b          'a=b'
--report=NO         False
--compile=FALSE     False
"""


@pytest.mark.parametrize("flag, value", table(VALUES))
def test_a_flag_has_the_type_of_the_default(script, flag, value):
    assert not configure(script).typed
    name = flag[2:].partition("=")[0]
    config = configure(script, flag)
    assert repr(config[name]) == value and config.typed == {name}


def test_a_config_file_is_python_that_sees_the_knobs_so_far(script):
    path = script.parent / "config" / "next.py"
    path.write_text("_half = batch_size // 2\nshift = -_half\nbatch_size += 1\nreport = 0\n")
    config = configure(script, "config/small.py", "config/next.py")
    assert (config["shift"], config["batch_size"], config["report"]) == (-2, 5, False)
    assert configure(script, "config/next.py")["shift"] == -16


def test_flags_win_over_files_wherever_they_stand_and_later_arguments_over_earlier_ones(script):
    second = script.parent / "config" / "second.py"
    second.write_text("shift = batch_size\nbatch_size = 6\n")
    files = ["config/small.py", "config/second.py"]
    for argv in (["--batch_size=5", *files], [files[0], "--batch_size=5", files[1]]):
        config = configure(script, *argv)
        assert (config["batch_size"], config["shift"]) == (5, 4), "a file sees files, never flags"
        assert config.typed == {"batch_size", "shift"} and config.base["batch_size"] == 4
    assert configure(script, *files)["batch_size"] == 6
    assert configure(script, *files[::-1])["batch_size"] == 4
    assert configure(script, "--batch_size=5", "--batch_size=6")["batch_size"] == 6


def test_folders_are_relative_to_the_working_directory(script):
    (script.parent / "config" / "paths.py").write_text('out_dir = "out/filed"\ndata_dir = "d"\n')
    config = configure(script, "config/paths.py", "--data_dir=../here")
    assert (config["out_dir"], config["data_dir"]) == ("out/filed", "../here")
    assert configure(script, "--data_dir=~/here")["data_dir"] == os.path.expanduser("~/here")


NANOGPT = """eval_iters eval_only always_save_checkpoint gradient_accumulation_steps bias
    learning_rate max_iters decay_lr warmup_iters lr_decay_iters backend""".split()


def test_every_name_of_nanogpt_that_is_no_knob_of_train_gets_a_hint():
    for name in NANOGPT:
        err = refusal(TRAIN, f"--{name}=1")
        assert f"unknown name {name!r}" in err
        assert "did you mean" not in err and "lists every name" not in err


BAD_ARGUMENTS = """
-batch_size=4          did you mean batch_size?
--no-report            unknown name 'no-report' in --no-report; write --report=false
--no_compile=true      write --compile=false
--lr 1                 unknown name 'lr' in --lr; here it is peak_lr
--zzz=4                unknown name 'zzz' in --zzz=4; --help lists
--computed=1           unknown name 'computed'
--after=1              unknown name 'after'
--batch_size=1.5       --batch_size=1.5: expected int, batch_size = 32
--peak_lr=nan          expected float, peak_lr = 0.001
--out_dir=             --out_dir=: expected str, out_dir = 'out/run'
--compile=perhaps      --compile=perhaps: expected auto | true | false
--shift -5             write --shift=-5
--compile --shift=5    write --compile=VALUE
config/none.py         no config file config/none.py
a                      unexpected argument 'a'
"""


@pytest.mark.parametrize("argument, words", table(BAD_ARGUMENTS))
def test_a_bad_argument_gets_one_line_that_says_what_to_type(script, argument, words):
    assert words in refusal(script, "--name=two\nlines", *argument.split(" "))


BAD_LINES = """
batch_size = True        bad.py: batch_size = True: expected int, batch_size = 32
import math              one of your own, in a file, begins with _
"""


@pytest.mark.parametrize("line, words", table(BAD_LINES))
def test_a_config_file_with_a_wrong_name_or_value_gets_one_line(script, line, words):
    (script.parent / "config" / "bad.py").write_text(f"shift = 1\n{line}\n")
    assert words in refusal(script, "--shift=5", "config/bad.py")


def test_a_script_gets_its_knobs_or_exits_2_with_one_line(script):
    result = run(script, "config/small.py", "--out_dir=mine")
    assert result.returncode == 0, result.stderr
    assert '"out_dir": "mine"' in result.stdout
    assert '"batch_size": 4' in result.stdout and '["out_dir"]' in result.stdout
    result = run(script, "--batchsize=4")
    hint = "sheep.py: unknown name 'batchsize' in --batchsize=4; did you mean batch_size?\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", hint)
    (script.parent / "config" / "bad.py").write_text("batch_size = shifted\n")
    result = run(script, "config/bad.py")  # an error in a config file is Python's
    assert result.returncode == 1
    assert 'config/bad.py", line 1' in result.stderr and "NameError" in result.stderr


def test_help_has_every_knob_under_the_headings_of_the_source(script):
    text = run(script, "--help", "--shift=7").stdout
    for part in ("where\n  --out_dir=out/run  ", "the sizes of things\n  --batch_size=32  "):
        assert f"\n{part}" in text
    assert re.search(r"--batch_size=32 .*\n {32}.*and goes on\s+below; ", text)
    assert "--shift=7 " in text and max(map(len, text.splitlines())) <= 100
    assert re.findall(r"--(\w+)=", text) == list(read_knobs(script))


def test_every_knob_and_config_file_of_this_repository_is_right():
    for path in {*REPO.glob("*.py")} - {REPO / "plain.py"}:  # whose knobs are train.py's
        for name, knob in read_knobs(path).items():
            assert knob.comment, f"{path.name}: {name} is not explained"
    for path in (REPO / "config").glob("*.py"):
        knobs = read_knobs(TRAIN)
        defaults = {name: knob.default for name, knob in knobs.items()}
        assert cli.read_config_file(str(path), cli.Config([(defaults, knobs)]))


def test_an_error_of_ours_is_one_line(monkeypatch, capsys):
    def fails(error):
        """(exit code, stderr) of a script in which it is raised."""

        def main():
            raise error

        monkeypatch.setattr(sys, "argv", ["own.py"])
        return cli.run_script(main), capsys.readouterr().err

    refused = cli.BadInput("it is bad")
    assert fails(refused) == (2, "own.py: it is bad\n")
    refused.said = True  # by another rank
    assert fails(refused) == (2, "")
    assert fails(cli.RunFailed("it has failed")) == (1, "own.py: failed: it has failed\n")


# ---- another command is another run --------------------------------------------------------------


FOLDERS = """
--shift=2                                out/run,shift=2
--peak_lr=1e-2 --report=no --shift=2     out/run,shift=2,peak_lr=0.01,report=false
--shift=-1 --peak_lr=0.001               out/run
--batch_size=16 --accum_steps=2          out/run
--batch_size=16                          out/run,batch_size=16
--out_dir=mine --shift=2                 mine
two.py --shift=2                         out/two
two.py three.py                          out/two,shift=3
two.py --shift=-1                        out/two,shift=-1
"""


@pytest.mark.parametrize("argv, folder", table(FOLDERS))
def test_what_is_not_free_names_the_folder_in_the_order_of_the_knobs(script, argv, folder):
    """What the run's own config file says names nothing; a second file counts as typed."""
    (script.parent / "two.py").write_text('shift = 2\nout_dir = "out/two"\n')
    (script.parent / "three.py").write_text("shift = 3\n")
    with configured(scope_of(script), argv=argv.split()) as config:
        assert cli.folder_name(config) == folder


# ---- what a knob may do --------------------------------------------------------------------------

KNOBS = read_knobs(TRAIN)
FLAGS = ("--save_interval=4", "--decay_steps=12", "--eval_interval=4")
OTHER = {  # another value of a knob; of those that are not here, the opposite, or one more
    "resume": "never",
    "dataset": "other",
    "init_from": "another.pt",
    "block_size": 8,
    "n_head": 4,
    "n_embd": 64,
    "batch_size": "4 --accum_steps=2",  # another split of the same product
    "accum_steps": "2 --batch_size=4",
    "optimizer": "adam",
    "schedule": "linear",
    "warmup_steps": 2,
    "max_steps": 16,
    "decay_steps": 11,
    "device": "cpu",
    "dtype": "bfloat16",
    "compile": "true",
    "deterministic": "false",
    "eval_interval": 3,
    "best_metric": "-val_accuracy",
    "wandb_project": "mine",
    "wandb_run_name": "mine",
    "patience": 100,
    "save_interval": 3,
    "keep_last": 9,
}
# How it is computed: `free`, but the bits may be others
HOW = "grad_checkpoint batch_size accum_steps device compile deterministic shard".split()
ALONE = {"out_dir", "data_dir", "wandb_log"}  # other tests are theirs


def of_policy(word):
    """The names of the knobs with this word."""
    found = [name for name, knob in KNOBS.items() if knob.policy == word]
    return [name for name in found if name not in {*HOW, *ALONE}]


def changed(names):
    """Flags that give these knobs another value."""
    flags = []
    for name in names:
        default = KNOBS[name].default
        value = not default if isinstance(default, bool) else OTHER.get(name)
        if value is None:
            value = default + 1 if isinstance(default, int) else 0.9 * default or 0.1
        flags += f"--{name}={value}".split()
    return flags


def essence(done):
    """Hash of all that the next steps depend on, but for what only evaluations need."""
    saved = torch.load(done.checkpoint(12), weights_only=True)
    kept = {name: saved[name] for name in ("model", "optimizer", "scaler", "ema", "rng")}
    state = {name: saved["state"][name] for name in ("step", "sequences", "tokens", "lr_factor")}
    return digest([kept, state])


def test_free_knobs_change_no_bit(once, run_train):
    names = of_policy("free")
    assert len(names) > 10 and not any(KNOBS[name].names_folder() for name in names)
    plain = once(*FLAGS)
    assert essence(run_train("run", *FLAGS, *changed(names))) == essence(plain)
    assert essence(run_train("other", *FLAGS, "--beta2=0.9")) != essence(plain)  # control


@pytest.mark.parametrize("name", [name for name in HOW if name != "compile"])
def test_another_way_to_compute_names_no_folder_and_the_resume_names_it(name, run_train):
    before = ranks(2) if name == "shard" else ""
    run_train("run", *FLAGS, "--max_steps=6", before=before)
    if name == "device":  # this machine has only one
        before = "train.resuming.device_name = lambda _: 'another'"
    done = run_train("run", *FLAGS, *changed([name]), before=before)
    (event,) = events(done, "resume")
    assert name in event["changed"] and not KNOBS[name].names_folder()


@pytest.mark.parametrize("name", of_policy("fixed"))
def test_a_fixed_knob_is_refused_on_a_resume(name, once, run_train, data_dir):
    if name == "dataset" and not (data_dir / "other").exists():
        (data_dir / "other").symlink_to(data_dir / "small")
    begun = once(*FLAGS).out_dir
    done = run_train(begun, *FLAGS, "--max_steps=14", *changed([name]), code=2)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{name} changed from" in done.stderr or "dimension" in done.stderr
    assert KNOBS[name].names_folder()


def test_a_change_of_the_course_is_recorded_and_names_the_folder(run_train):
    names = of_policy("")
    assert len(names) > 10
    run_train("run", "--save_interval=4", before=stop_at(6), code=143)
    done = run_train("run", "--save_interval=4", *changed(names))
    (event,) = events(done, "resume")
    (found,) = events(done, "resume_checked")
    assert found["compared"] == 0  # rows of another course are no witness
    for name in names:
        then, now = event["changed"][name]
        assert then != now and f"{name} {then} -> {now}" in done.stdout
        assert KNOBS[name].names_folder()


def test_a_knob_of_a_fork_names_the_folder_and_a_change_of_it_is_recorded(run_train, tmp_path):
    """A knob without a word, in a copy of train.py: nothing else has to know of it."""
    copy = copy_of_repository(tmp_path / "copy")
    source = (copy / "train.py").read_text(encoding="utf-8")
    knob = "window = 8  # tokens, [1,inf)\nn_head = 4"
    (copy / "train.py").write_text(source.replace("n_head = 4", knob), encoding="utf-8")
    flags = ("--save_interval=4",)
    run_train("run", *flags, before=stop_at(6), repo=copy, code=143)
    done = run_train("run", *flags, "--window=16", repo=copy)
    assert [event["changed"]["window"] for event in events(done, "resume")] == [[8, 16]]
    run_train("none", "--window=0", repo=copy, code=2)
    assert read_knobs(copy / "train.py")["window"].names_folder()
