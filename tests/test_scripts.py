"""A script that imports train is a run of its own: its flags, folder, text and exit code."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import REPO, TINY, events, run_python
from helpers import ONE_THREAD, torchrun
from sources import stop_at

import train
from plumbing.cli import BadInput, configured

LAB = """\
import sys
sys.path.insert(0, {repo!r})
import train

train.knob("alpha", 0.5, "weight of the loss, [0, 1]; fixed")
train.knob("temperature", 1.0, "of nothing, (0, inf)")
{defaults}


def build_model(config, vocab_size, inner=train.build_model):
    model = inner(config, vocab_size)
    model.forward_alone = model.forward
    model.forward = lambda x, y=None: scaled(model, model.forward_alone(x, y), y)
    return model


def scaled(model, result, y):
    return result * train.alpha if model.training and y is not None else result


train.build_model = build_model
if __name__ == "__main__":
    train.main()
"""
AS_SCRIPT = """
import sys
sys.argv = [{path!r}, *{flags!r}]
sys.path.insert(0, {folder!r})
import lab
"""


@pytest.fixture
def lab(train_in, tmp_path, data_dir):
    """lab(*flags, out_dir=its folder, text=added to it, ...) -> Done of lab.py, in tmp_path."""
    settings = TINY | {"data_dir": str(data_dir), "compile": False, "report": False}
    defaults = "\n".join(f"train.{name} = {value!r}" for name, value in settings.items())
    path = tmp_path / "lab.py"

    def run(*flags, out_dir="out/lab", text="", before="", **how):
        path.write_text(LAB.format(repo=str(REPO), defaults=defaults) + text)
        script = AS_SCRIPT.format(path=str(path), flags=flags, folder=str(tmp_path))
        return train_in(tmp_path, out_dir, before=script + before, **how)

    run()
    return run


def test_a_sweep_of_a_flag_of_its_own(lab, tmp_path):
    for seed in (1, 2):
        for rate in (0.001, 0.01):
            for alpha in (0.2, 0.5, 0.8):
                lab(f"--alpha={alpha}", f"--peak_lr={rate}", f"--seed={seed}")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert len(names) == 13 and {"lab", "lab,seed=2,peak_lr=0.01,alpha=0.8"} < names
    folders = [tmp_path / "out" / f"lab,seed=1{more}" for more in ("", ",alpha=0.2")]
    assert re.search(r"(?m)^\| alpha=0.2 +\|", run_python("report.py", *folders).stdout)
    done = lab("--alpha=0.2", "--seed=1", out_dir=folders[1])
    assert "is finished" in done.stdout and done.facts["command"][0] == "lab.py"
    assert done.facts["config"]["alpha"] == 0.2 and done.facts["git"]["dirty"] in (True, None)
    knob = done.facts["run"]["added_knobs"]["alpha"]
    assert knob["comment"] == "weight of the loss, [0, 1]; fixed"
    texts = [path.read_text() for path in (done.out_dir / "code").glob("*.py")]
    assert texts == [(tmp_path / "lab.py").read_text()]
    again = f"--out_dir={done.out_dir}"
    for flag, words in {
        "--alhpa=0.2": "did you mean alpha?",
        "--alpha=1.2": "[0, 1]",
        f"{again} --seed=1 --alpha=0.3": "alpha changed from 0.2 to 0.3",
        f"{again} --seed=1 --alpha=0.2 --temperature=2": "temperature 1.0 -> 2.0",
    }.items():
        assert words in lab(*flag.split(), code=2).stderr
    edited = lab("--alpha=0.2", "--seed=1", text="# edited", code=2)
    assert re.search(r"changed since: script lab.py \w+ -> lab.py \w+;", edited.stderr)


def test_a_stopped_run_of_a_script_resumes_and_is_named_beside_another_course(lab):
    whole = lab("--alpha=0.2", "--out_dir=out/whole", out_dir="out/whole")
    lab("--alpha=0.2", before=stop_at(6, "SIGTERM"), code=143)
    other = lab("--alpha=0.2", "--temperature=2", out_dir="out/lab,alpha=0.2,temperature=2.0")
    assert "out/lab,alpha=0.2 has this run with temperature 1.0 at step 6; to" in other.stdout
    done = lab("--alpha=0.2", out_dir="out/lab,alpha=0.2")
    assert done.fingerprint(12) == whole.fingerprint(12) and events(done, "resume")


@pytest.mark.slow
def test_the_other_tools_take_it(lab, tmp_path):
    done = lab("--save_interval=4")
    verify = ["--script=lab.py", "--verify=true"]
    assert run_python(REPO / "replay.py", done.out_dir, *verify, cwd=tmp_path).returncode == 0
    against = ["lab.py", "--seeds=2", "--against=lab.py --alpha=0.9"]
    found = run_python(REPO / "check.py", *against, cwd=tmp_path)
    assert "verdict: not shown" in found.stdout, found.stdout + found.stderr
    results = json.loads((tmp_path / "out/lab,alpha=0.9,against/check.json").read_text())
    assert results["against"]["verdict"] == "not shown"
    wrong = run_python(REPO / "check.py", *against[:2], "--against=lab.py --alpha=9", cwd=tmp_path)
    assert wrong.returncode == 2 and "--alpha=9" in wrong.stderr


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bare_main_leaves_with_the_exit_code_of_the_run(ranks, lab, tmp_path):
    lab()
    script = tmp_path / "lab.py"
    stop = f"{stop_at(6, 'SIGINT')}\nif __name__"
    script.write_text(script.read_text().replace("if __name__", stop))
    launcher = [sys.executable] if ranks == 1 else torchrun(ranks)
    for flag, code in {"--out_dir=out/new": 130, "--out_dir=out/lab": 2}.items():
        command = [*launcher, script, flag]
        how = {"capture_output": True, "text": True, "cwd": tmp_path}
        done = subprocess.run(command, env=os.environ | ONE_THREAD, **how)
        found = re.findall(r"exitcode +: (\d+)", done.stderr) if ranks > 1 else [done.returncode]
        assert {*map(int, found)} == {code}, done.stderr


# ---- train.knob ----------------------------------------------------------------------------------


@pytest.fixture
def knob(monkeypatch):
    monkeypatch.setattr(train, "ADDED_KNOBS", {})
    return train.knob


TAKEN = ["max", "lambda", "copy", "peak_lr", "seeds", "only", "Alpha", "a-b"]


@pytest.mark.parametrize("name, default", [*((name, 1) for name in TAKEN), ("alpha", None)])
def test_a_name_that_is_taken_or_a_default_that_is_no_value_is_refused(name, default, knob):
    with pytest.raises(BadInput, match=f"{name}.*expected a lower-case name .* and a default"):
        knob(name, default, "what it is")
    with pytest.raises(BadInput, match="expected float, alpha = 2.0"):
        knob("alpha", 2.0, "[0, 1]")


def test_a_value_exists_within_a_run_alone_and_that_of_a_run_around_it_is_the_default(knob):
    for default in (0.3, 0.5):  # a cell of a notebook that runs twice
        knob("alpha", default, "weight, [0, 1]; fixed")
    with configured(vars(train), argv=["--alpha=0.7"]):
        with configured(vars(train), argv=[]) as config:
            assert train.alpha == config["alpha"] == 0.7
        with pytest.raises(BadInput), configured(vars(train), argv=["--alpha=7"]):
            pass
        assert train.alpha == 0.7
    with pytest.raises(AttributeError, match="no attribute 'alpha'"):
        assert train.alpha


def test_a_thread_is_refused_before_a_knob_is_set(knob):
    before = dict(vars(train))
    with ThreadPoolExecutor() as pool:
        job = pool.submit(train.main, ["--peak_lr=0.5"])
        assert "main thread" in str(job.exception())
    assert vars(train) == before


def test_a_knob_with_the_name_of_a_fact_is_refused_at_the_start(lab):
    done = lab(text="train.knob('threads', 1, 'how many')", code=2)
    assert "train.knob('threads', ...): run.json says something else" in done.stderr
