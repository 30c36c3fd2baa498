"""The command line: what is accepted, where it lands, and what bad input gets."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import REPO, copy_of_repository, digest, events
from sources import ranks, stop_at

from plumbing import cli
from plumbing.cli import configured, read_knobs

TRAIN = REPO / "train.py"
SCRIPT = '''\
"""
Counts sheep.

More about sheep.
"""

import json
import sys

from plumbing.cli import configured, run_script

CONSTANT = 3  # not a knob

# where
out_dir = "out/run"  # folder of the run
data_dir = ""  # folder of the data
# the sizes of
# things
batch_size = 32  # sequences, and a comment that is so long that it cannot stand on a single line
#   and goes on below
shift = -1  # steps back
peak_lr = 1e-3  # at the top
name = "none"
# switches
report = True  # write one
compile = "auto"  # auto | true | false
deterministic = False  # auto | true | false
computed = len("not a knob")
_private = 1


def main():
    with configured(globals(), names=NAMES) as config:
        for key, value in config.items():
            assert globals()[key] is value
        print(json.dumps([config, sorted(config.typed), NAMES]))


NAMES = None
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
    knobs = {name: knob.default for name, knob in cli.read_knobs(script).items()}
    return knobs | {"__file__": str(script), "__doc__": ""}


def configure(script, *argv):
    """(config, flags) inside the block; outside of it nothing may have changed."""
    scope = scope_of(script)
    before = dict(scope)
    with configured(scope, argv=list(argv)) as config:
        assert all(scope[name] is value for name, value in config.items())
    assert scope == before
    return config, config.typed


def refusal(script, *argv):
    """The one line that bad arguments get. Nothing may have been set."""
    scope = scope_of(script)
    before = dict(scope)
    with pytest.raises(cli.BadInput) as error, configured(scope, argv=list(argv)):
        pass
    assert scope == before and "\n" not in str(error.value)
    return str(error.value)


def run(script, *argv, cwd=None, columns=100):
    return subprocess.run(
        [sys.executable, str(script), *argv],
        cwd=cwd or script.parent,
        env=os.environ | {"PYTHONPATH": str(REPO), "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_arguments_every_knob_has_its_default(script):
    config, flags = configure(script)
    assert config == {
        "out_dir": "out/run",
        "data_dir": "",
        "batch_size": 32,
        "shift": -1,
        "peak_lr": 1e-3,
        "name": "none",
        "report": True,
        "compile": "auto",
        "deterministic": False,
    }
    assert flags == set()


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--batch_size=1_000", 1000),
        ("--batch_size=1e3", 1000),
        ("--batch_size=-7", -7),
        ("--peak_lr=1", 1.0),
        ("--peak_lr=-inf", -math.inf),
        ("--name=a=b", "a=b"),
        ("--name=", ""),
        ("--name=7", "7"),
        ("--report=NO", False),
        ("--report=0", False),
        ("--report=Yes", True),
        ("--compile=auto", "auto"),
        ("--compile=FALSE", False),
        ("--compile=1", True),
        ("--deterministic=auto", "auto"),
    ],
)
def test_a_flag_has_the_type_of_the_default(script, flag, value):
    name = flag[2:].partition("=")[0]
    config, flags = configure(script, flag)
    assert config[name] == value and type(config[name]) is type(value)
    assert flags == {name}


def test_a_config_file_is_python_that_sees_the_knobs_so_far(script):
    path = script.parent / "config" / "next.py"
    path.write_text("_half = batch_size // 2\nshift = -_half\nbatch_size += 1\nreport = 0\n")
    config, _ = configure(script, "config/small.py", "config/next.py")
    assert (config["shift"], config["batch_size"], config["report"]) == (-2, 5, False)
    assert configure(script, "config/next.py")[0]["shift"] == -16
    path.write_text("batch_size = 6\nshift = max(batch_size + i for i in (0, 1))\n")
    assert configure(script, "config/next.py")[0]["shift"] == 7  # the file's own batch_size


def test_later_arguments_win(script):
    assert configure(script, "config/small.py", "--batch_size=5")[0]["batch_size"] == 5
    assert configure(script, "--batch_size=5", "config/small.py")[0]["batch_size"] == 4
    assert configure(script, "--batch_size=5", "--batch_size=6")[0]["batch_size"] == 6


def test_folders_are_relative_to_the_working_directory(script):
    (script.parent / "config" / "paths.py").write_text('out_dir = "out/filed"\ndata_dir = "d"\n')
    config, _ = configure(script, "config/paths.py", "--data_dir=../here")
    assert (config["out_dir"], config["data_dir"]) == ("out/filed", "../here")
    assert configure(script, "--data_dir=~/here")[0]["data_dir"] == os.path.expanduser("~/here")
    assert configure(script, "--data_dir=")[0]["data_dir"] == ""
    assert configure(script, "--data_dir=/abs")[0]["data_dir"] == "/abs"


NANOGPT = """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from
    wandb_log wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size
    n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip
    decay_lr warmup_iters lr_decay_iters min_lr backend device dtype compile""".split()


@pytest.mark.parametrize("name", sorted(set(NANOGPT) - cli.read_knobs(TRAIN).keys()))
def test_every_name_of_nanogpt_is_a_knob_of_train_or_gets_a_hint(name, tmp_path):
    (tmp_path / "theirs.py").write_text(f"{name} = 1\n")
    for argument in (f"--{name}=1", str(tmp_path / "theirs.py")):
        err = refusal(TRAIN, argument)
        assert f"unknown name {name!r}" in err
        assert "did you mean" not in err and "lists every name" not in err


def table(text):
    """[[left, right], ...] of lines whose two columns are at least two spaces apart."""
    return [re.split("   *", line) for line in text.strip().splitlines()]


BAD_ARGUMENTS = """
--batchsize=4          did you mean batch_size?
--batch-size=4         did you mean batch_size?
-batch_size=4          did you mean batch_size?
--zzz=4                unknown name 'zzz' in --zzz=4; --help lists
--computed=1           unknown name 'computed'
--after=1              unknown name 'after'
--_private=1           unknown name '_private'
--batch_size=abc       --batch_size=abc: expected int, batch_size = 32
--batch_size=1.5       expected int,
--batch_size=nan       expected int,
--batch_size=          expected int,
--batch_size=true      expected int,
--peak_lr=fast         expected float, peak_lr = 0.001
--peak_lr=nan          expected float,
--out_dir=             --out_dir=: expected str, out_dir = 'out/run'
--report=maybe         expected bool, report = True
--report=auto          expected bool,
--compile=perhaps      expected str, compile = 'auto'
--batch_size           --batch_size has no value
--report               as in --report=true
--                     --help
config/none.py         no config file config/none.py
config                 config/FILE.py
a                      unexpected argument 'a'
"""


@pytest.mark.parametrize("argument, words", table(BAD_ARGUMENTS))
def test_a_bad_argument_gets_one_line_that_says_what_to_type(script, argument, words):
    assert words in refusal(script, "--name=two\nlines", argument)


BAD_LINES = """
batchsize = 4            bad.py: batchsize = 4; did you mean batch_size?
batch_size = 'abc'       bad.py: batch_size = 'abc': expected int, batch_size = 32
batch_size = True        bad.py: batch_size = True: expected int,
batch_size = None        bad.py: batch_size = None: expected int,
peak_lr = False          bad.py: peak_lr = False: expected float,
report = 2               bad.py: report = 2: expected bool
name = 3                 bad.py: name = 3: expected str
out_dir = ''             expected str, out_dir = 'out/run'
import os                unknown name 'os'
import math              one of your own, in a file, begins with _
"""


@pytest.mark.parametrize("line, words", table(BAD_LINES))
def test_a_config_file_with_a_wrong_name_or_value_gets_one_line(script, line, words):
    (script.parent / "config" / "bad.py").write_text(f"shift = 1\n{line}\n")
    assert words in refusal(script, "--shift=5", "config/bad.py")


def test_an_error_in_a_config_file_is_pythons(script):
    (script.parent / "config" / "bad.py").write_text("shift = 1\nbatch_size = shifted\n")
    result = run(script, "config/bad.py")
    assert result.returncode == 1
    assert 'config/bad.py", line 2' in result.stderr and "NameError" in result.stderr


def test_a_script_gets_its_knobs_or_exits_2_with_one_line(script, tmp_path):
    path = str(script.parent / "config" / "small.py")
    result = run(script, path, "--out_dir=mine", cwd=tmp_path)  # from any folder
    assert result.returncode == 0, result.stderr
    assert '"out_dir": "mine"' in result.stdout
    assert '"batch_size": 4' in result.stdout and '["out_dir"]' in result.stdout
    result = run(script, "--batch_size=4", "--batchsize=4")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "sheep.py: unknown name 'batchsize' in --batchsize=4; did you mean batch_size?\n"
    )


def test_every_knob_and_config_file_of_this_repository_is_right():
    for path in REPO.glob("*.py"):
        for name, knob in cli.read_knobs(path).items():
            assert knob.comment or knob.heading, f"{path.name}: {name} is not explained"
    knobs = cli.read_knobs(REPO / "train.py")
    for path in (REPO / "config").glob("*.py"):
        assert cli.read_config_file(str(path), cli.Config(knobs))


# ---- another command is another run --------------------------------------------------------------


RUN = """\
out_dir = "out/run"
n_layer = 1  # layers; fixed
batch_size = 8  # ; free
accum_steps = 1  # ; free
name = "a"
peak_lr = 1e-3
report = True
max_steps = 9  # steps; free
"""
FOLDERS = """
--n_layer=2                                 out/run,n_layer=2
--n_layer=2 --report=no --peak_lr=1e-2      out/run,n_layer=2,peak_lr=0.01,report=false
--peak_lr=1e-2 --report=no --n_layer=2      out/run,n_layer=2,peak_lr=0.01,report=false
--n_layer=1 --peak_lr=0.001 --max_steps=5   out/run
--batch_size=4 --accum_steps=2              out/run
--accum_steps=4                             out/run,accum_steps=4
--out_dir=mine --n_layer=2                  mine
two.py                                      out/two
two.py --n_layer=2                          out/two
two.py three.py                             out/two,n_layer=3
two.py --n_layer=1                          out/two,n_layer=1
--n_layer=3 two.py                          out/two
--name=a/b:c,d                              out/run,name=a%2Fb%3Ac%2Cd
"""


@pytest.fixture
def name_of(tmp_path, monkeypatch):
    """name_of(*argv) -> the folder of a run, relative to its repository."""
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "two.py").write_text('n_layer = 2\nout_dir = "out/two"\n')
    (tmp_path / "three.py").write_text("n_layer = 3\n")
    monkeypatch.chdir(tmp_path)

    def name(*argv):
        with configured(scope_of(tmp_path / "run.py"), argv=list(argv)) as config:
            return os.path.relpath(cli.folder_name(config), tmp_path)

    return name


@pytest.mark.parametrize("argv, folder", table(FOLDERS))
def test_what_is_not_free_names_the_folder_in_the_order_of_the_knobs(name_of, argv, folder):
    """What the run's own config file says names nothing; a second file counts as typed."""
    assert name_of(*argv.split()) == folder


# ---- errors --------------------------------------------------------------------------------------


@pytest.fixture
def fails(monkeypatch, capsys):
    """fails(error) -> (exit code, lines on stderr) of a script in which it is raised."""

    def run(error):
        def main():
            raise error

        monkeypatch.setattr(sys, "argv", ["own.py"])
        code = cli.run_script(main)
        out, err = capsys.readouterr()
        assert out == ""
        return code, err.splitlines()

    return run


def test_an_error_of_ours_is_one_line(fails):
    with pytest.raises(cli.BadInput) as refused:
        cli.fail("it is\nbad")
    assert fails(refused.value) == (2, ["own.py: it is bad"])
    assert fails(cli.RunFailed("it has failed")) == (1, ["own.py: failed: it has failed"])
    refused.value.said = True  # by another rank
    assert fails(refused.value) == (2, [])
    assert fails(KeyboardInterrupt()) == (130, [""])


# ---- what a knob may do --------------------------------------------------------------------------

KNOBS = read_knobs(REPO / "train.py")
FLAGS = ("--save_interval=4", "--decay_steps=12", "--eval_interval=4")
# For each knob another value, after flags that give it something to do; the rest: see other().
OTHER = {
    "out_dir": "elsewhere",
    "resume": "never",
    "dataset": "other",
    "data_dir": "copy",
    "block_size": 8,
    "n_head": 4,
    "n_embd": 64,
    "batch_size": "4 --accum_steps=2",  # another split of the same product
    "accum_steps": "2 --batch_size=4",
    "prefetch_factor": ("--num_workers=1", 3),
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
    "report": "true",
    "best_metric": "-val_accuracy",
    "wandb_project": "mine",
    "wandb_run_name": "mine",
    "patience": 100,
    "save_interval": 3,
}


# How it is computed: `free`, but the bits may be others
HOW = "grad_checkpoint batch_size accum_steps device compile deterministic shard".split()


def other(name):
    """Another value of a knob: the opposite, one more, a tenth less, or one of OTHER."""
    default = KNOBS[name].default
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    assert isinstance(default, int | float), f"{name} has no case in OTHER"
    return default + 1 if isinstance(default, int) else 0.9 * default or 0.1


def of_policy(word, at_once=False):
    """[(names, flags of both runs, flags of the second)] of the knobs with this word: "fixed",
    "free", "course" (none), or "how": those in HOW.

    at_once: first those that need no flags of their own, all in one run; then each alone, slow.
    """
    cases = []
    names = [name for name, knob in KNOBS.items() if word == (knob.policy or "course")]
    names = [name for name in names if name not in HOW] if word != "how" else list(HOW)
    for name in names:
        value = other(name)
        *flags, value = value if isinstance(value, tuple) else (value,)
        first, *others = f"--{name}={value}".split(" --")  # and what must change with it
        changed = [first, *(f"--{other}" for other in others)]
        is_slow = at_once or name in ("compile", "wandb_log")
        marks = [pytest.mark.slow] if is_slow else []
        cases.append(pytest.param([name], flags, changed, id=name, marks=marks))
    if at_once:
        cases.insert(0, together([case.values for case in cases]))
    return cases


ALONE = {"out_dir", "data_dir", "wandb_log"}  # they need more than a flag


def together(cases):
    cases = [(names[0], changed) for names, flags, changed in cases if not flags]
    cases = [case for case in cases if case[0] not in ALONE]
    changed = [flag for _, flags in cases for flag in flags]
    return pytest.param([name for name, _ in cases], [], changed, id="all at once")


def essence(done):
    """Hash of all that the next steps depend on, but for what only evaluations need."""
    saved = torch.load(done.checkpoint(12), weights_only=True)
    kept = {name: saved[name] for name in ("model", "optimizer", "scaler", "ema", "rng")}
    state = {name: saved["state"][name] for name in ("step", "sequences", "tokens", "lr_factor")}
    return digest([kept, state])


@pytest.mark.parametrize("names, flags, changed", of_policy("free", at_once=True))
def test_a_free_knob_changes_no_bit(names, flags, changed, once, run_train, data_dir, tmp_path):
    if names == ["data_dir"]:
        (data_dir.parent / "copy").mkdir(exist_ok=True)
        link = data_dir.parent / "copy" / "small"
        if not link.exists():
            link.symlink_to(data_dir / "small")
        changed = [f"--data_dir={link.parent}"]
    env = {"WANDB_MODE": "offline"}
    other = run_train("run", *FLAGS, *flags, "--keep_last=9", *changed, env=env)
    if names == ["out_dir"]:
        other.out_dir = tmp_path / "elsewhere"
    assert essence(other) == essence(once(*FLAGS, *flags))


@pytest.mark.parametrize("names, flags, changed", of_policy("how"))
def test_another_way_to_compute_names_no_folder_and_the_resume_names_it(
    names, flags, changed, run_train
):
    (name,) = names
    before = ranks(2) if name == "shard" else ""
    done = run_train("run", *FLAGS, *flags, "--max_steps=6", before=before)
    if name == "device":  # this machine has only one
        before = "train.resuming.device_name = lambda _: 'another'"
    done = run_train("run", *FLAGS, *flags, *changed, before=before)
    (event,) = events(done, "resume")
    assert name in event["changed"] and not KNOBS[name].names_folder()
    assert [row["compared"] for row in events(done, "resume_checked")] == [0]  # it had finished


@pytest.mark.parametrize("names, flags, changed", of_policy("fixed"))
def test_a_fixed_knob_is_refused_on_a_resume(names, flags, changed, once, run_train, data_dir):
    (name,) = names
    if name == "dataset" and not (data_dir / "other").exists():
        (data_dir / "other").symlink_to(data_dir / "small")
    done = run_train(
        once(*FLAGS, *flags).out_dir, *FLAGS, "--max_steps=14", *flags, *changed, code=2
    )
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{name} changed from" in done.stderr or "dimension" in done.stderr
    assert KNOBS[name].names_folder()


@pytest.mark.parametrize("names, flags, changed", of_policy("course", at_once=True))
def test_a_change_of_the_course_is_recorded_and_names_the_folder(names, flags, changed, run_train):
    run_train("run", "--save_interval=4", *flags, before=stop_at(6), code=143)
    done = run_train("run", "--save_interval=4", *flags, *changed)
    (event,) = events(done, "resume")
    (found,) = events(done, "resume_checked")
    assert found["compared"] == 0  # rows of another course are no witness
    for name in names:
        then, now = event["changed"][name]
        assert then != now
        assert f"{name} {then} -> {now}" in done.stdout
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
