"""The command line: what is accepted, where it lands, and what bad input gets."""

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from plumbing import cli
from plumbing.cli import configured

REPO = Path(cli.__file__).parent.parent
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
deterministic = False
computed = len("not a knob")
_private = 1


def main():
    with configured(globals(), names=NAMES) as config:
        for key, value in config.items():
            assert globals()[key] is value
        print(json.dumps([config, sorted(config.flags), NAMES]))


NAMES = None
after = 1
if __name__ == "__main__":
    sys.exit(run_script(main))
'''


@pytest.fixture
def script(tmp_path):
    """A real script in a repository of its own, with a config folder."""
    path = tmp_path / "repo" / "sheep.py"
    (path.parent / "config").mkdir(parents=True)
    path.write_text(SCRIPT)
    (path.parent / "config" / "small.py").write_text("batch_size = 4  # fits anywhere\n")
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
    return config, config.flags


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


def test_a_setting_holds_in_its_block_even_if_that_fails():
    scope = {"steps": 1, "rate": 2}
    with pytest.raises(ZeroDivisionError), cli.setting(scope, steps=5):
        assert scope == {"steps": 5, "rate": 2}
        raise ZeroDivisionError
    assert scope == {"steps": 1, "rate": 2}
    with pytest.raises(KeyError), cli.setting(scope, steps=5, step=6):
        pass
    assert scope == {"steps": 1, "rate": 2}


def test_without_arguments_every_knob_has_its_default(script):
    config, flags = configure(script)
    assert config == {
        "out_dir": str(script.parent / "out/run"),
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


def test_a_config_file_computes_with_the_knobs_so_far(script):
    (script.parent / "config" / "big.py").write_text(
        '"""Big."""\n\nbatch_size = 2**3 * 4  # GiB\nshift = -(batch_size // 3)\n'
        'peak_lr = 1 / batch_size\nreport = 0\ncompile = True\nname = "a" + "b"\n'
    )
    config, _ = configure(script, "config/big.py")
    assert (config["batch_size"], config["shift"], config["peak_lr"]) == (32, -10, 1 / 32)
    assert config["report"] is False and config["compile"] is True and config["name"] == "ab"


def test_a_config_file_sees_the_defaults_and_what_came_before_it(script):
    path = script.parent / "config" / "next.py"
    path.write_text("_half = batch_size // 2\nshift = -_half\nbatch_size += 1\n")
    assert configure(script, "config/next.py")[0]["shift"] == -16
    config, _ = configure(script, "config/small.py", "config/next.py")
    assert (config["shift"], config["batch_size"]) == (-2, 5)
    path.write_text("batch_size = 6\nshift = max(batch_size + i for i in (0, 1))\n")
    config, _ = configure(script, "config/next.py")
    assert config["shift"] == 7  # the generator sees the batch_size of the file


def test_later_arguments_win(script):
    assert configure(script, "config/small.py", "--batch_size=5")[0]["batch_size"] == 5
    assert configure(script, "--batch_size=5", "config/small.py")[0]["batch_size"] == 4
    assert configure(script, "--batch_size=5", "--batch_size=6")[0]["batch_size"] == 6


def test_a_config_file_is_looked_up_here_first_and_then_in_the_repository(
    script, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert configure(script, "config/small.py")[0]["batch_size"] == 4
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "small.py").write_text("batch_size = 9\n")
    assert configure(script, "config/small.py")[0]["batch_size"] == 9
    assert configure(script, str(script.parent / "config/small.py"))[0]["batch_size"] == 4


def test_a_flags_folder_is_against_the_working_directory_others_against_the_repository(
    script, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (script.parent / "config" / "paths.py").write_text('out_dir = "out/filed"\ndata_dir = "d"\n')
    config, _ = configure(script, "config/paths.py", "--data_dir=../here")
    assert config["out_dir"] == str(script.parent / "out/filed")
    assert config["data_dir"] == str(tmp_path.parent / "here")
    assert configure(script, "--data_dir=")[0]["data_dir"] == ""
    assert configure(script, "--data_dir=/abs")[0]["data_dir"] == "/abs"


def test_flags_are_told_from_files_and_the_later_one_counts(script):
    def told(*argv):
        return configure(script, *argv)[1]

    assert told() == set()
    assert told("config/small.py", "--shift=2") == {"shift"}
    assert told("config/small.py", "--batch_size=2") == {"batch_size"}
    assert told("--batch_size=2", "config/small.py") == set()


def test_a_value_set_in_a_notebook_is_the_default(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "/run/kernel-7.json"])
    scope = scope_of(script)
    scope.update(batch_size=5, peak_lr=1, compile=False, out_dir="mine")
    for _ in range(2):  # twice in one process
        with configured(scope, argv=[]) as config:
            assert (config["batch_size"], scope["batch_size"]) == (5, 5)
            assert config["out_dir"] == str(script.parent / "mine")
            assert type(config["peak_lr"]) is float and config["compile"] is False
            assert config.flags == set()
        assert (scope["batch_size"], scope["out_dir"]) == (5, "mine")
    with configured(scope, argv=["config/small.py"]) as config:
        assert config["batch_size"] == 4
    with pytest.raises(SystemExit), configured(scope, argv=["--help"]):
        pass
    assert "--batch_size=5 " in capsys.readouterr().out
    for bad in ("5", 1.5, None):
        with pytest.raises(cli.BadInput) as error:
            with configured(scope | {"batch_size": bad}, argv=[]):
                pass
        assert str(error.value).startswith(f"batch_size = {bad!r}: expected an int such as")


def test_without_argv_the_command_line_counts(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sheep.py", "--batch_size=7"])
    with configured(scope_of(script)) as config:
        assert config["batch_size"] == 7


def test_knobs_are_given_back_also_after_an_exception(script):
    scope = scope_of(script)
    before = dict(scope)
    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), configured(scope, argv=["--batch_size=7"]):
            scope["compile"] = True  # a script resolves "auto"
            raise error
        assert scope == before


NANOGPT = """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from
    wandb_log wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size
    n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip
    decay_lr warmup_iters lr_decay_iters min_lr backend device dtype compile""".split()


@pytest.mark.parametrize("name", NANOGPT)
def test_every_name_of_nanogpt_is_a_knob_of_train_or_gets_a_hint(name, tmp_path):
    knobs = cli.read_knobs(REPO / "train.py")
    if name in knobs:
        return
    (tmp_path / "theirs.py").write_text(f"{name} = 1\n")
    for argument in (f"--{name}=1", str(tmp_path / "theirs.py")):
        scope = {key: knob.default for key, knob in knobs.items()} | {"__file__": REPO / "train.py"}
        with pytest.raises(cli.BadInput) as error, configured(scope, argv=[argument]):
            pass
        err = str(error.value)
        assert f"unknown name {name!r}" in err
        assert "did you mean" not in err and "lists every name" not in err


def test_a_hint_names_only_knobs_of_the_script_at_hand(script):
    learning_rate = refusal(script, "--learning_rate=1")
    assert learning_rate.endswith(
        "unknown name 'learning_rate' in --learning_rate=1; here it is --peak_lr=1"
    )
    (script.parent / "config" / "theirs.py").write_text("learning_rate = 1 / 2\n")
    assert refusal(script, "config/theirs.py").endswith("here it is peak_lr = 0.5")
    for name in ("max_iters", "init_from", "bias", "backend"):
        assert refusal(script, f"--{name}=1").endswith("--help lists every name")


def test_a_script_can_take_another_modules_knobs_and_restate_a_default(script, tmp_path):
    bench = tmp_path / "bench.py"
    bench.write_text("batch_size = 1  # small\nrounds = 10  # timed\n")
    theirs = scope_of(script) | {"after": "no knob of theirs"}
    ours = scope_of(bench)
    with configured(theirs, ours, argv=["--rounds=3", "--shift=2"]) as config:
        assert config.flags == {"rounds", "shift"}
        assert theirs["batch_size"] == ours["batch_size"] == config["batch_size"] == 1
        assert (ours["rounds"], theirs["shift"]) == (3, 2)
        assert theirs["after"] == "no knob of theirs" and "shift" not in ours
    assert (theirs["batch_size"], ours["batch_size"]) == (32, 1)
    assert (ours["rounds"], theirs["shift"]) == (10, -1)


def test_positionals_are_collected_only_for_a_script_that_asks_for_them(script):
    names = []
    argv = ["a", "config/small.py", "b/c", "--shift=1"]
    with configured(scope_of(script), argv=argv, names=names):
        assert names == ["a", "b/c"]
    assert "unexpected argument 'a'" in refusal(script, "a")


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--batchsize=4"], ["unknown name 'batchsize'", "did you mean --batch_size=4?"]),
        (["--batch-size=4"], ["did you mean --batch_size=4?"]),
        (["--zzz=4"], ["unknown name 'zzz' in --zzz=4", "--help"]),
        (["--computed=1"], ["unknown name 'computed'"]),
        (["--after=1"], ["unknown name 'after'"]),
        (["--_private=1"], ["unknown name '_private'"]),
        (["--batch_size=abc"], ["--batch_size=abc: expected an int such as --batch_size=32"]),
        (["--batch_size=1.5"], ["expected an int"]),
        (["--batch_size=nan"], ["expected an int"]),
        (["--batch_size=inf"], ["expected an int"]),
        (["--batch_size="], ["expected an int"]),
        (["--batch_size=true"], ["expected an int"]),
        (["--peak_lr=fast"], ["expected a number such as --peak_lr=0.001"]),
        (["--peak_lr=nan"], ["expected a number"]),
        (["--out_dir="], ["--out_dir=: expected a folder such as --out_dir=out/run"]),
        (["--report=maybe"], ["expected one of true, false such as --report=true"]),
        (["--report=auto"], ["expected one of true, false"]),
        (["--compile=perhaps"], ["one of auto, true, false such as --compile=auto"]),
        (["--batch_size", "4"], ["--batch_size has no value", "--batch_size=32"]),
        (["--report"], ["as in --report=true"]),
        (["--compile", "config/small.py"], ["as in --compile=auto"]),
        (["-batch_size=4"], ["did you mean --batch_size=4?"]),
        (["--"], ["--help"]),
        (["--name=two\nlines", "--zzz=two\nlines"], ["unknown name 'zzz'"]),
        (["config/none.py"], ["no config file config/none.py", "config/small.py"]),
        (["config"], ["unexpected argument 'config'", "config/FILE.py"]),
        (["--batch_size=4", "--nam=x"], ["did you mean --name=x?"]),
    ],
)
def test_a_bad_argument_gets_one_line_that_says_what_to_type(script, argv, words):
    err = refusal(script, *argv)
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    "content, words",
    [
        (
            "shift = 1\nbatchsize = 4",
            ["unknown name 'batchsize' in", "bad.py: batchsize = 4", "batch_size = 4?"],
        ),
        ("batch_size = 'abc'", ["bad.py: batch_size = 'abc'", "an int such as batch_size = 32"]),
        ("batch_size = True", ["bad.py: batch_size = True", "expected an int"]),
        ("batch_size = '4'", ["bad.py: batch_size = '4'", "expected an int"]),
        ("peak_lr = False", ["bad.py: peak_lr = False", "expected a number"]),
        ("report = 2", ["bad.py: report = 2", "expected one of true, false"]),
        ("name = 3", ["bad.py: name = 3", "expected a string"]),
        ("out_dir = ''", ["bad.py: ", "expected a folder such as out_dir = 'out/run'"]),
        ("batch_size = shifted", ["bad.py:1", "name 'shifted' is not defined"]),
        ("batch_size = None", ["bad.py: batch_size = None", "expected an int"]),
        ("shift = 1\nbatch_size = 1 / 0", ["bad.py:2", "division by zero"]),
        ("name = 'a' - 1", ["bad.py:1", "unsupported operand"]),
        ("import os", ["unknown name 'os' in", "bad.py: os = "]),
        ("shift = 1\nbatch_size = = 3", ["bad.py:2", "invalid syntax"]),
        (b"name = '\xff'", ["bad.py:1"]),
        (b"name = '\0'", ["bad.py:1"]),
    ],
)
def test_a_bad_config_file_gets_one_line_with_its_file_and_line(script, content, words):
    content = content if isinstance(content, bytes) else content.encode()
    (script.parent / "config" / "bad.py").write_bytes(content)
    err = refusal(script, "--shift=5", "config/bad.py")
    assert all(word in err for word in words), err


def test_a_script_exits_2_with_one_line_under_its_own_name(script):
    result = run(script, "--batch_size=4", "--batchsize=4")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "sheep.py: unknown name 'batchsize' in --batchsize=4; did you mean --batch_size=4?\n"
    )


def test_a_script_gets_its_knobs_from_any_working_directory(script, tmp_path):
    result = run(script, "config/small.py", "--out_dir=mine", "--report=no", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f'"out_dir": "{tmp_path}/mine"' in result.stdout
    assert '"batch_size": 4' in result.stdout
    assert '["out_dir", "report"]' in result.stdout


def test_help_lists_every_knob_by_group_with_default_and_comment(script):
    expected = """\
        Counts sheep.

        usage: python sheep.py [config/FILE.py ...] [--key=value ...]
        (a config file is Python, and is executed; later arguments win)

        where
          --out_dir=out/run             folder of the run
          --data_dir=                   folder of the data

        the sizes of things
          --batch_size=32               sequences, and a comment that is so long that it cannot stand on a
                                        single line and goes on below
          --shift=-1                    steps back
          --peak_lr=0.001               at the top
          --name=none

        switches
          --report=true                 write one
          --compile=auto                auto | true | false
          --deterministic=false
        """
    for flag in ("--help", "-h"):
        result = run(script, flag)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == textwrap.dedent(expected)
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_help_shows_the_values_of_the_other_arguments_where_they_come_from_and_the_folder(script):
    (script.parent / "small.py").write_text("batch_size = 8\nname = 'a b'\n")
    result = run(script, "small.py", "--name=c", "--help", "--shift=3")
    lines = {line.strip(): line for line in result.stdout.splitlines()}
    assert "With these arguments the folder is out/run,shift=3,name=c" in lines
    assert "--batch_size=8                (small.py; default 32) sequences, and a comment" in str(
        lines
    )
    assert "--shift=3                     (flag; default -1) steps back" in lines
    assert "--peak_lr=0.001               at the top" in lines
    refused = run(script, "--help", "--batch_size=x")
    assert refused.returncode == 2 and "--batch_size=x: expected" in refused.stderr


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_help_wraps_at_the_width_of_the_terminal(script, columns):
    widest = max(map(len, run(script, "--help", columns=columns).stdout.splitlines()[2:]))
    assert min(columns, 100) - 25 < widest <= max(min(columns, 100), 66)  # the usage is not wrapped


def test_help_may_be_cut_short(script):
    """As by `--help | head -3`, which closes the pipe before all is written."""
    mine, theirs = os.pipe()
    os.close(mine)
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    command = [sys.executable, str(script), "--help"]
    done = subprocess.run(command, env=environment, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("path", sorted(REPO.glob("*.py")), ids=lambda path: path.name)
def test_every_knob_of_this_repository_is_explained(path):
    knobs = cli.read_knobs(path)
    silent = [name for name, knob in knobs.items() if not (knob.comment or knob.heading)]
    assert not silent


@pytest.mark.parametrize("path", sorted((REPO / "config").glob("*.py")), ids=lambda path: path.name)
def test_every_config_file_of_this_repository_is_right_for_train(path):
    knobs = cli.read_knobs(REPO / "train.py")
    config = {name: knob.default for name, knob in knobs.items()}
    assert cli.read_config_file(str(path), str(REPO), config, knobs)


# ---- numbers and names that no run can have ------------------------------------------------------


@pytest.mark.parametrize("value", ["1e308", "-1e308", "9223372036854775808", "1e19"])
def test_an_absurd_number_is_refused_in_one_line(script, value):
    line = refusal(script, f"--batch_size={value}")
    assert line == f"--batch_size={value}: expected an int such as --batch_size=32"
    assert configure(script, "--batch_size=1e18")[0]["batch_size"] == 10**18  # control


def test_an_interval_may_be_written_with_exponents(script):
    text = script.read_text().replace("# sequences, and", "# [1, 1e6], and")
    script.write_text(text)
    assert "expected an int in [1, 1e6]" in refusal(script, "--batch_size=1000001")
    assert configure(script, "--batch_size=1_000_000")[0]["batch_size"] == 10**6


@pytest.mark.parametrize("name, value", [("batchsize", 4), ("reprot", True), ("peak_lrs", 0.1)])
def test_a_global_that_the_source_does_not_define_is_named(script, name, value):
    scope = scope_of(script) | {name: value}
    with pytest.raises(cli.BadInput) as error, configured(scope, argv=[]):
        pass
    near = {"batchsize": "batch_size", "reprot": "report", "peak_lrs": "peak_lr"}[name]
    assert f"sheep.{name} = {value!r}" in str(error.value)
    assert f"did you mean {near} = {value!r}?" in str(error.value)


def test_globals_that_are_no_typing_mistakes_are_let_be(script):
    fine = {"after": 2, "computed": 3, "CONSTANT": 4, "_own": 5, "last_run": object(), "main": min}
    with configured(scope_of(script) | fine, argv=[]):
        pass
    script.write_text("from math import *\n" + script.read_text())
    with configured(scope_of(script) | {"pi": 3.14}, argv=[]):
        pass


# ---- another command is another run --------------------------------------------------------------


def name_of(tmp_path, *argv, files=None):
    """The folder of a run, against out/run of its config."""
    path = tmp_path / "run.py"
    path.write_text(
        'out_dir = "out/run"\nn_layer = 1  # layers; fixed\nbatch_size = 8  # ; bits\n'
        'accum_steps = 1  # ; bits\nname = "a"\npeak_lr = 1e-3\nreport = True\n'
        "max_steps = 9  # steps; free\n"
    )
    for file, content in (files or {}).items():
        (tmp_path / file).write_text(content)
    with configured(scope_of(path), argv=list(argv)) as config:
        return os.path.relpath(cli.folder_name(config), tmp_path)


def test_another_command_is_another_folder_in_the_order_of_the_knobs(tmp_path):
    assert name_of(tmp_path) == "out/run"
    assert name_of(tmp_path, "--n_layer=2") == "out/run,n_layer=2"
    expected = "out/run,n_layer=2,peak_lr=0.01,report=false"
    flags = ("--peak_lr=1e-2", "--report=no", "--n_layer=2")
    assert name_of(tmp_path, *flags) == name_of(tmp_path, *flags[::-1]) == expected


def test_what_the_run_has_anyway_and_what_is_free_gives_the_same_folder(tmp_path):
    assert name_of(tmp_path, "--n_layer=1", "--peak_lr=0.001", "--max_steps=5") == "out/run"
    files = {"two.py": 'n_layer = 2\nout_dir = "out/two"\n'}
    two = str(tmp_path / "two.py")
    assert name_of(tmp_path, two, files=files) == "out/two"
    assert name_of(tmp_path, two, "--n_layer=2", files=files) == "out/two"
    three = str(tmp_path / "three.py")  # what a second file sets counts as typed
    files |= {"three.py": "n_layer = 3\n"}
    assert name_of(tmp_path, two, three, files=files) == "out/two,n_layer=3"
    assert name_of(tmp_path, two, "--n_layer=1", files=files) == "out/two,n_layer=1"
    assert name_of(tmp_path, "--n_layer=3", two, files=files) == "out/two"  # the file wins


def test_a_batch_is_named_by_what_was_typed_and_only_if_the_product_changes(tmp_path):
    assert name_of(tmp_path, "--batch_size=4", "--accum_steps=2") == "out/run"
    assert name_of(tmp_path, "--accum_steps=4") == "out/run,accum_steps=4"


def test_a_typed_folder_is_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert name_of(tmp_path, "--out_dir=mine", "--n_layer=2") == "mine"


def test_a_folders_name_is_one_name_however_odd_the_value(tmp_path):
    assert name_of(tmp_path, "--name=a/b:c,d e%") == "out/run,name=a%2Fb%3Ac%2Cd%20e%25"
    long = [name_of(tmp_path, f"--name={letter * 200}") for letter in "xy"]
    assert long[0] != long[1] and {len(name) for name in long} == {len("out/") + 120}
    assert name_of(tmp_path, f"--name={200 * 'x'}") == long[0]


# ---- errors --------------------------------------------------------------------------------------

FAILING = r"""
import sys
sys.path.insert(0, {repo!r})
from plumbing import cli
from plumbing.cli import BadInput, RunFailed, fail, run_script

def bad_input():
    fail("it is\nbad")

def failed():
    raise RunFailed("it has failed")

def said():
    error = BadInput("once")
    error.said = True
    raise error

def interrupted():
    raise KeyboardInterrupt

def escape():
    raise ValueError("\x1b]0;title\x07 \x9b31m")

def through_plumbing():
    with cli.configured(globals(), argv=[]):
        int("x")  # my own line

if __name__ == "__main__":
    sys.exit(run_script(globals()[sys.argv[1]]))
"""


def fails(tmp_path, function):
    """(exit code, lines on stderr) of a script that fails in `function`."""
    (tmp_path / "own.py").write_text(FAILING.format(repo=str(REPO)))
    done = run(tmp_path / "own.py", function)
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    "function, code, lines",
    [
        ("bad_input", 2, ["own.py: it is bad"]),
        ("failed", 1, ["own.py: failed: it has failed"]),
        ("said", 2, []),  # by another rank
        ("interrupted", 130, [""]),
    ],
)
def test_an_error_of_ours_is_one_line(tmp_path, function, code, lines):
    assert fails(tmp_path, function) == (code, lines)


@pytest.mark.parametrize("code", [0, 3])
def test_output_that_cannot_be_written_changes_no_exit_code(tmp_path, code):
    """A closed pipe and a full disk, which show only when the last words are flushed."""
    source = f"import sys; sys.path.insert(0, {str(REPO)!r})\nfrom plumbing.cli import run_script\n"
    source += f"def main():\n    print('words')\n    return {code}\nsys.exit(run_script(main))\n"
    (tmp_path / "own.py").write_text(source)
    reader, pipe = os.pipe()
    os.close(reader)
    for stdout in (pipe, os.open("/dev/full", os.O_WRONLY)):
        command, buffered = [sys.executable, tmp_path / "own.py"], {"PYTHONUNBUFFERED": ""}
        pipes = {"stdout": stdout, "stderr": subprocess.PIPE}
        done = subprocess.run(command, env=os.environ | buffered, text=True, **pipes)
        os.close(stdout)
        assert (done.returncode, done.stderr) == (code, "")


def test_an_error_in_your_own_code_is_pythons_traceback_without_run_script(tmp_path):
    code, lines = fails(tmp_path, "through_plumbing")
    assert code == 1 and lines[0] == "Traceback (most recent call last):"
    places = [line for line in lines if line.startswith("  File")]
    assert len(places) == 1 and "own.py" in places[0] and "in through_plumbing" in places[0]
    assert "# my own line" in lines[2]
    assert lines[-1] == "ValueError: invalid literal for int() with base 10: 'x'"


def test_an_error_cannot_type_into_the_terminal(tmp_path):
    _, lines = fails(tmp_path, "escape")
    assert lines[-1] == "ValueError: ]0;title 31m"
    assert cli.printable("\033[31mred\033[0m\ta\nb\r\033[2J") == "[31mred[0m\ta\nb[2J"
