"""The loop as a library: errors of one's own show where, numbers beside the loss, runs without
main."""

import re

import pytest
from conftest import arguments, tree
from sources import stop_at

import train

# ---- errors in one's own code --------------------------------------------------------------------

UNPACK = """
import train
from model import GPT
class Own(GPT):
    def forward(self, inputs, targets=None):
        rows, columns, channels = inputs.shape  # here
        return super().forward(inputs, targets)
def build_model(*args, inner=train.build_model):
    model = inner(*args)
    model.__class__ = Own
    return model
train.build_model = build_model
"""
OS_ERROR = """
import train
def train_step(model, run, *rest, inner=train.train_step):
    if run.state["step"] == 3:
        open("no/such/file")  # here
    return inner(model, run, *rest)
train.train_step = train_step
"""
BUILT = """
import train
def build_model(knobs, vocab_size):
    one, two = (1, 2, 3)  # here
train.build_model = build_model
"""


ERRORS = {  # where it happens: (source, the last line)
    "forward": (UNPACK, "ValueError: not enough values to unpack (expected 3, got 2)"),
    "train_step": (OS_ERROR, "FileNotFoundError: [Errno 2] No such file or directory: 'no/such/fi"),
    "build_model": (BUILT, "ValueError: too many values to unpack (expected 2)"),
}
COMPILED = [*((where, "false") for where in ERRORS), ("forward", "true"), ("train_step", "true")]


@pytest.mark.parametrize("where, compile", COMPILED)
def test_an_error_in_own_code_ends_in_its_own_line(where, compile, run_train, tmp_path):
    source, words = ERRORS[where]
    (tmp_path / "own_code.py").write_text(source)
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import own_code"
    if compile == "true":
        before += """
torch.compile = lambda model, **_: torch._dynamo.optimize("eager")(model)
"""
    done = run_train("run", f"--compile={compile}", before=before, code=1)
    number = source.splitlines().index(next(x for x in source.splitlines() if "# here" in x)) + 1
    places = re.findall(r'File "(.*)", line (\d+)', done.stderr)
    assert places[-1] == (str(tmp_path / "own_code.py"), str(number)), done.stderr
    assert done.stderr.splitlines()[-1].startswith(words), done.stderr


# ---- without the command -------------------------------------------------------------------------


@pytest.fixture
def flags(data_dir, tmp_path):
    """flags(out_dir, *more): a list for train.main."""
    return lambda out_dir, *more: arguments(tmp_path / out_dir, data_dir, more)[1:]


def test_a_run_that_is_built_writes_nothing_and_takes_no_lock(flags, run_train, tmp_path):
    with train.build(flags("new")) as run:
        assert run.state["step"] == 0
    assert not (tmp_path / "new").exists()

    run_train("run", before=stop_at(6), code=143)
    before = tree(tmp_path / "run")
    with train.build(flags("run")) as run:
        assert run.state["step"] == 6 and train.n_embd == 32
        assert tree(tmp_path / "run") == before
        run_train("run")
    assert train.n_embd == 128, "the knobs held inside"


def test_a_bad_value_in_the_middle_of_a_sweep_can_be_caught(flags):
    with pytest.raises(Exception, match=r"--peak_lr=nan: expected a number in \(0, inf\)"):
        train.main(flags("run", "--peak_lr=nan"))
    assert train.main(flags("run", "--max_steps=3", "--log_interval=0")) == 0
    assert train.last_run.state["step"] == 3 and train.peak_lr == 1e-3
