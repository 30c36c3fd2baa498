"""What a run is: where it lies, when a command is another run, and the ways on from there."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO, TINY, copy_code, edit, fingerprint, make_dataset, rows, tree
from sources import KNOB, around, stop_at

import plumbing
import train


def state_in(path):
    return torch.load(path, weights_only=True)["state"]


@pytest.fixture
def refused(run_train, tmp_path):
    """refused(*flags, words=[...]): exit code 2, one line with the words, nothing is changed."""

    def check(*flags, words, **how):
        before = tree(tmp_path / "run")
        run_train("run", *flags, **how, code=2).is_one_line(*words)
        assert tree(tmp_path / "run") == before

    return check


@pytest.fixture
def stopped(once, tmp_path):
    """The folder of a `run` that was stopped after 6 of its 12 steps."""
    made = once(before=stop_at(6), code=143)
    return shutil.copytree(made.out_dir, tmp_path / "run")


FOLDERS = """
--n_layer=2                               out/run,n_layer=2
--peak_lr=1e-2 --report=false --n_layer=2 out/run,n_layer=2,peak_lr=0.01
--max_steps=20                            out/run,max_steps=20
--n_layer=1 --peak_lr=0.001               out/run
--batch_size=16 --accum_steps=2           out/run
--batch_size=16                           out/run,batch_size=16
--device=cpu --save_interval=9            out/run
--out_dir=mine --n_layer=2                mine
two.py --seed=2                           out/two,seed=2
two.py --n_layer=2                        out/two
--init_from=out/a,n_layer=2/best.pt       out/run,init_from=a,n_layer=2-best
--init_from=out/run/ckpt_1.pt             out/run,init_from=run-ckpt_1
lab.py                                    out/lab
lab.py two.py --seed=3                    out/two,lab,seed=3
"""


@pytest.mark.parametrize("line", FOLDERS.strip().splitlines())
def test_what_is_typed_and_makes_another_run_names_the_folder(line, tmp_path, monkeypatch):
    """In the order of the knobs, after the name of a script. What a config file says is the run's
    own. A name past 150 characters ends in a hash."""
    monkeypatch.chdir(tmp_path)
    Path("two.py").write_text('n_layer = 2\nout_dir = "out/two"\n')
    *argv, folder = line.split()
    script = Path(argv.pop(0)) if argv[0] == "lab.py" else None
    with plumbing.configured(vars(train), argv=argv) as config:
        assert plumbing.folder_name(config, train.FREE, script) == folder
    if "--out_dir=mine" not in argv:
        names = set()
        for seed in "12":
            long = [*argv, f"--dataset={140 * 'x'}", f"--seed={seed}"]
            with plumbing.configured(vars(train), argv=long) as config:
                names.add(plumbing.folder_name(config, train.FREE, script))
        assert len(names) == 2 and all(re.search(r".{128},\w{16}$", name) for name in names)


# ---- another run is refused ----------------------------------------------------------------------

DIFFERENCES = {  # flags: words
    "--peak_lr=0.003": ["peak_lr 0.001 -> 0.003"],
    "--batch_size=16": ["batch 8 -> 16"],
    "--dtype=bfloat16 --seed=2": ["dtype float32 -> bfloat16", "seed 1337 -> 2"],
    "--schedule=linear": ["schedule cosine -> linear"],
    "--max_steps=14": ["decay_steps 12 -> 14", "--decay_steps=12 trains on at the last rate"],
    "--eval_interval=3 --patience=2": ["eval_interval"],
}


@pytest.mark.parametrize("flags", DIFFERENCES)
def test_another_knob_is_another_run(refused, stopped, flags):
    ways = ["--resume=force", "--resume=restart", "--out_dir=run_2"]
    refused(*flags.split(), words=[*DIFFERENCES[flags], *ways])


def test_other_data_are_another_run(run_train, refused, stopped, tmp_path):
    """Another text under the same name, other rows, another file that the data names."""
    make_dataset(tmp_path / "data", "small", "another text " * 240)
    refused(f"--data_dir={tmp_path}/data", words=["fingerprint", " -> "])
    fewer = around("open_dataset", then="result[0].tokens = result[0].tokens[:1000]")
    refused(before=fewer, words=["rows 167 -> 61"])
    shutil.rmtree(tmp_path / "run")
    named = around("open_dataset", then="result[2]['files'] = ['labels.txt']")
    (tmp_path / "labels.txt").write_text("one")
    run_train("run", before=named + stop_at(6), code=143)
    (tmp_path / "labels.txt").write_text("two")
    digests = [hashlib.sha256(text).hexdigest() for text in (b"one", b"two")]
    refused(before=named, words=[f"labels.txt {digests[0]} -> {digests[1]}"])


def test_a_knob_of_a_fork_is_another_run_unless_it_is_free(run_train, refused):
    run_train("run", before=KNOB + stop_at(6), code=143)
    refused("--alpha=0.5", before=KNOB, words=["alpha 0.01 -> 0.5"])
    free = KNOB + "\ntrain.FREE.add('alpha')\n"
    run_train("free", before=free + stop_at(6), code=143)
    (event,) = run_train("free", "--alpha=0.5", before=free).events("resume")
    assert event["changed"] == {"alpha": [0.01, 0.5]}


def test_what_is_free_is_said_and_not_refused(run_train, stopped):
    """Torch, threads, plumbing.py: what may explain a difference."""
    other = """
def describe(device, inner=plumbing.describe):
    return inner(device) | {"torch": "9.9", "threads": 64}
plumbing.describe = describe
"""
    flags = ("--save_interval=5", "--grad_checkpoint=true", "--log_interval=1")
    done = run_train("run", *flags, before=other)
    (event,) = done.events("resume")
    assert event["changed"]["torch"] == [torch.__version__, "9.9"]
    assert event["changed"]["threads"] == [1, 64]
    assert event["changed"]["grad_checkpoint"] == [False, True]
    assert "torch 2" in done.stdout and "-> 9.9" in done.stdout


HELPER = "rate = 2.0\n\n\ndef scaled(lr):\n    return lr * rate\n"
LAB = '''
"""A script."""
import os
import signal

import train
from helpers import values

train.knob("alpha", 0.5, "weight")
train.min_lr = 1e-5
train.max_steps, train.warmup_steps = 8, 0


if "LATE" in os.environ:
    import late  # only the first time


def train_step(run, inputs, targets, lr, inner=train.train_step):
    if run.state["step"] == 5 and "STOP" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
    return inner(run, inputs, targets, values.scaled(lr))


train.train_step = train_step
train.main()
'''


@pytest.fixture
def lab(tmp_path, data_dir):
    """lab(code=0, STOP="1", ...) -> the output of the real `python lab.py config/mine.py ...` in a
    folder that has a package of its own, of a copy of train.py, which is a repository."""
    copy, folder = tmp_path / "copy", tmp_path / "lab"
    for each in (copy, folder / "helpers", folder / "config"):
        each.mkdir(parents=True)
    copy_code(copy)
    (copy / "optim.py").rename(tmp_path / "optim.py")
    (copy / "optim.py").symlink_to(tmp_path / "optim.py")
    for words in ("init -q", "add .", "-c user.name=A -c user.email=a@b.c commit -qm 1"):
        subprocess.run(["git", "-C", copy, *words.split()], check=True)
    texts = {"helpers/values": HELPER, "late": "value = 1\n", "lab": LAB}
    for name, text in (texts | {"config/mine": "weight_decay = 0.5\n"}).items():
        (folder / f"{name}.py").write_text(text)
    words = [f"--{word}" for word in TINY.split() if "steps" not in word]
    command = ["lab.py", "config/mine.py", *words, f"--data_dir={data_dir}", "--out_dir=../run"]

    def run(words=command, code=0, cwd=folder, **env):
        env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"} | env
        how = {"cwd": cwd, "env": env, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, *words], **how)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_code_that_computes_something_else_is_another_run(lab, tmp_path):
    """Of the script, of a package beside it, of model.py, of optim.py, which is a symlink, of a helper
    that only the first process imported; not comments, docstrings, layout, values of knobs. The folder keeps the code and the
    diff, with which the command of the run gives the same rows in another clone."""
    copy, folder, code = (tmp_path / name for name in ("copy", "lab", "run/code"))
    edit(copy / "model.py", "10_000.0", "99.0")
    edit(copy / "plumbing.py", '"""', '"""Edited. ')
    lab(STOP="1", LATE="1", code=143)
    names = {str(path.relative_to(code)) for path in code.rglob("*.py")}
    assert names >= {"lab.py", "helpers/values.py", "late.py", "train.py", "model.py", "optim.py"}
    before = tree(tmp_path / "run")
    texts = {path: path.read_text() for path in (*copy.glob("*.py"), *folder.rglob("*.py"))}
    others = (
        (copy / "model.py", "math.sqrt(self.qkv.in_features)", "self.qkv.in_features"),
        (tmp_path / "optim.py", 'lr = knobs["peak_lr"]', 'lr = 2 * knobs["peak_lr"]'),
        (folder / "helpers/values.py", "lr * rate", "lr + rate"),
        (folder / "lab.py", 'run.state["step"] == 5', 'run.state["step"] == 6'),
        (folder / "late.py", "value = 1", "value = 2"),
    )
    for change in others:
        edit(*change)
    said = lab(code=2)
    assert all(f"{path.name} has changed" in said for path, *_ in others) and said.count("\n") == 1
    assert "run/code has the code so far" in said and tree(tmp_path / "run") == before
    for path, text in texts.items():
        path.write_text(text)
    edit(folder / "lab.py", '"""A script."""', '"""Another word."""  # and a comment')
    edit(folder / "lab.py", '"alpha", 0.5, "weight"', '"alpha", 0.5, "weight of it"')
    edit(folder / "helpers/values.py", "\n\n\ndef", "\n\n# a comment\ndef")
    edit(copy / "train.py", "keep_last = 2", "keep_last = 3")
    said = lab()
    assert "resumed at step 6: 2 steps computed again, every loss and norm the same" in said
    assert "changed: keep_last 2 -> 3" in said
    assert (code / "lab.py").read_text() == (folder / "lab.py").read_text()
    clone = tmp_path / "other/clone"
    subprocess.run(["git", "clone", "-q", copy, clone], check=True)
    subprocess.run(["git", "-C", clone, "apply", code / "git.diff"], check=True)
    for path in copy.glob("*.py"):
        assert path.read_text() == (clone / path.name).read_text()
    shutil.copytree(code, clone, dirs_exist_ok=True)
    lab(plumbing.read_json(tmp_path / "run/run.json")["command"], cwd=clone, PYTHONPATH="")
    assert rows(tmp_path / "other/run") == rows(tmp_path / "run")
    edit(*others[0])  # nor does a finished run answer for other code
    assert "model.py has changed" in lab(code=2)


# ---- the ways on ---------------------------------------------------------------------------------


def test_force_goes_on_with_what_is_typed_and_begins_the_best_anew(run_train, tmp_path):
    """Here from a checkpoint that is older than the best, which is none of another rate: it stays as
    best_before.pt."""
    flags = ("--eval_interval=3", "--save_interval=3", "--keep_last=9")
    values = "values = iter({})\n" + around("evaluate", then="result['val_loss'] = next(values)")
    run_train("run", *flags, before=values.format([3.0, 2.0, 1.0]) + stop_at(7), code=143)
    before = fingerprint(tmp_path / "run/best.pt")
    for step in (6, 7):
        (tmp_path / f"run/ckpt_{step:08}.pt").unlink()
    typed = (*flags, "--peak_lr=0.003", "--resume=force")
    done = run_train("run", *typed, before=values.format([2.5, 2.2, 2.3]))
    assert fingerprint(done.out_dir / "best_before.pt") == before
    best = state_in(done.out_dir / "best.pt")
    assert (best["step"], best["best_val_loss"]) == (9, 2.2)
    (event,) = done.events("resume")
    assert event["changed"] == {"peak_lr": [0.001, 0.003]} and event["step"] == 3
    assert done.steps == [*range(1, 13)]


def test_restart_keeps_what_is_there_and_never_refuses_it(run_train, refused, stopped, tmp_path):
    kept = tree(stopped)
    refused("--resume=never", words=["--resume=never", "--out_dir=run_2"])
    done = run_train("run", "--resume=restart", "--seed=2")
    assert not done.events("resume") and len(done.rows("train")) == 12
    assert [*tree(tmp_path / "run.old_1").values()] == [*kept.values()]


def test_the_time_of_a_run_includes_what_its_script_did_before_it(python_train, tmp_path):
    text = "import time\nbegan = time.time()\ntime.sleep(1)\nimport train\ntrain.main()\n"
    (tmp_path / "lab.py").write_text(f"{text}print('seconds', time.time() - began)\n")
    done = python_train("run", script="lab.py")
    elapsed = float(done.output.rpartition("seconds ")[2])
    assert sum(done.facts["state"]["seconds"].values()) > elapsed - 0.5


def test_code_that_is_edited_while_a_run_starts_is_refused(python_train, tmp_path):
    """Else the run would be known by code that it does not run."""
    text = "import train\n\nopen(__file__, 'a').write('# more')\ntrain.main()\n"
    (tmp_path / "lab.py").write_text(text)
    done = python_train("run", script="lab.py", code=2)
    assert "lab.py was edited while this run started; type the same" in done.output
    assert not done.out_dir.exists()


def test_a_finished_run_never_answers_for_another_one(run_train, refused, tmp_path):
    """Nothing changed: exit code 0, and how to train longer. Else it is refused, by force, too."""
    run_train("run")
    before = tree(tmp_path / "run")
    again = run_train("run", "--log_interval=3")
    assert "run: finished at step 12; best validation loss" in again.stdout
    assert "raise --max_steps, with --decay_steps=12 --out_dir=run; anew" in again.stdout
    assert tree(tmp_path / "run") == before
    for force in ([], ["--resume=force"]):
        refused("--peak_lr=0.5", *force, words=["peak_lr 0.001 -> 0.5"])
    longer = run_train("run", "--peak_lr=0.5", "--resume=force", "--max_steps=14")
    assert [row["lr"] > 0.01 for row in longer.rows("train")][-2:] == [True, True]


def test_longer_and_shorter(run_train, tmp_path):
    """The hint works as it is typed; a schedule without an end needs none."""
    run_train("run")
    refusal = run_train("run", "--max_steps=14", code=2).stderr
    hint = re.search(r"(--decay_steps=\d+) trains on at the last rate", refusal)[1]
    done = run_train("run", "--max_steps=14", hint)
    assert [row["lr"] for row in done.rows("train")][-2:] == [1e-4, 1e-4]
    planned = run_train("run", "--max_steps=20", "--resume=force")
    last = planned.rows("train")[-1]["lr"]
    assert f"cosine 0.001 to {last:g}" in planned.stdout and last > 1e-4
    for schedule in ("constant", "step"):
        flags = (f"--schedule={schedule}", "--warmup_steps=0")
        run_train(schedule, *flags, "--max_steps=8")
        shorter = run_train(schedule, *flags, "--max_steps=5")
        assert "finished at step 8" in shorter.stdout
        longer, straight = run_train(schedule, *flags), run_train(f"{schedule}_12", *flags)
        assert longer.rows("train") == straight.rows("train")


# The flags of TINY become the defaults, so that they are not in the name.
NAMELESS = "import sys; sys.argv = [x for x in sys.argv if not x.startswith('--out_dir')]\n"
for word in TINY.split():
    knob, _, text = word.partition("=")
    value = {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
    NAMELESS += f"train.{knob} = {value!r}\n"


def test_the_same_run_of_another_length_beside_it_is_named(run_train):
    run_train("out/run,max_steps=4", "--max_steps=4", before=NAMELESS)
    done = run_train("out/run,max_steps=6", "--max_steps=6", before=NAMELESS)
    assert "out/run,max_steps=4 has this run at step 4; to go on there add" in done.stdout
    other = run_train("out/run,seed=2,max_steps=5", "--max_steps=5", "--seed=2", before=NAMELESS)
    assert "has this run" not in other.stdout


def test_a_branch_is_a_copy_of_a_checkpoint(run_train, tmp_path):
    """In a folder of its own, at another rate, without the parent's best."""
    parent = run_train("a", "--save_interval=4", "--keep_last=9")
    (tmp_path / "b").mkdir()
    shutil.copy(parent.checkpoint(8), tmp_path / "b")
    assert run_train("b", "--peak_lr=0.01", code=2).stderr.count("peak_lr 0.001 -> 0.01") == 1
    done = run_train("b", "--peak_lr=0.01", "--resume=force")
    assert done.steps == [9, 10, 11, 12]
    assert done.rows("train")[0]["lr"] > 1e-3 and state_in(done.out_dir / "best.pt")["step"] == 12
    assert not (done.out_dir / "best_before.pt").exists()


def test_an_older_format_is_refused_with_its_commit(refused, stopped):
    path = stopped / "ckpt_00000006.pt"
    older = torch.load(path, weights_only=True)
    older["format"], older["run"]["git_commit"] = 2, "abcdef0"
    torch.save(older, path)
    refused(words=["ckpt_00000006.pt has another format", "check out the commit abcdef0"])


def test_a_run_may_begin_with_the_averages_of_another(run_train):
    """Or with those in a .safetensors file, whose metadata are compared."""
    from safetensors.torch import save_file

    parent = run_train("parent", "--ema_decay=0.5")
    path = parent.checkpoint(12)
    saved, file = torch.load(path, weights_only=True), path.with_suffix(".safetensors")
    save_file(plumbing.evaluated_weights(saved), file, plumbing.metadata_of(saved))
    for number, source in enumerate((path, file)):
        child = run_train(f"child_{number}", f"--init_from={source}", "--ema_decay=0.9")
        assert child.rows("eval")[0]["val_loss"] == parent.rows("eval")[-1]["val_loss"]
        begun = torch.load(child.checkpoint(0), weights_only=True)
        for name, average in saved["ema"].items():
            assert torch.equal(begun["model"][name], average)
            assert torch.equal(begun["ema"][name], average)
        assert begun["state"]["step"] == 0 and begun["optimizer"]["state"] == {}
        for flags, words in {
            "--n_embd=64": "its n_embd is 32, and 64 in this run",
            "--n_head=4": "its n_head is 2, and 4 in this run",  # which no shape shows
            f"--init_from={source}x": "12.pt" if source == path else "12.safetensors",
        }.items():
            done = run_train("other", f"--init_from={source}", flags, code=2)
            done.is_one_line(words)
            assert not done.out_dir.exists()


# ---- what is recorded ----------------------------------------------------------------------------


def test_run_json_says_what_ran(run_train):
    flags, text = ("--dtype=auto", "--decay_steps=0"), (REPO / "train.py").read_text()
    done = run_train("run", *flags, before=stop_at(4), code=143)
    facts = done.facts
    assert facts["ended"] == "stopped by SIGTERM" and facts["end"] >= facts["start"]
    assert facts["command"][0].endswith("train.py") and "--dtype=auto" in facts["command"]
    assert facts["asked"]["dtype"] == "auto" != facts["config"]["dtype"]
    assert (facts["asked"]["decay_steps"], facts["config"]["decay_steps"]) == (0, 12)
    assert facts["defaults"]["max_steps"] == 2000 and facts["defaults"]["n_embd"] == 128
    knobs, code = facts["identity"]["knobs"], facts["identity"]["code"]
    assert knobs["batch"] == 8 and "max_steps" not in knobs and {*code} >= {"model.py", "optim.py"}
    assert code["train.py"] == hashlib.sha256(text.encode()).hexdigest()
    assert (done.out_dir / "code/train.py").read_text() == text
    assert facts["run"]["torch"] == torch.__version__ and facts["run"]["threads"] == 1
    assert facts["parameters"] == 16960 and facts["flops_per_token"] > 6 * 14000
    assert facts["data"]["name"] == "small" and facts["state"]["step"] == 4
    before = sum(facts["state"]["seconds"].values())
    after = run_train("run", *flags).facts
    assert after["ended"] == "finished" and after["start"] == facts["start"]
    assert after["wandb_id"] == facts["wandb_id"]
    assert sum(after["state"]["seconds"].values()) > before  # of all processes together


def test_checkpoints_are_pruned_but_for_the_best(run_train):
    done = run_train("run", "--save_interval=2", "--keep_last=2")
    names = ["best.pt", "ckpt_00000010.pt", "ckpt_00000012.pt"]
    assert sorted(path.name for path in done.out_dir.glob("*.pt*")) == names
    parts = "format model frozen optimizer scaler ema extra state rng config data identity run"
    saved = torch.load(done.checkpoint(10), weights_only=True)
    assert saved["state"]["step"] == 10 and set(saved) == set(parts.split())
    events = done.events("saved")
    assert len({row["sha256"] for row in events}) == len(events) > 5


def test_without_a_network_a_run_trains_on_the_manual_and_says_so(run_train, tmp_path):
    nowhere = {"SHAKESPEARE_URL": "http://127.0.0.1:9", "no_proxy": "*"}
    flags = ("--dataset=shakespeare", f"--data_dir={tmp_path}/data", "--eval_tokens=100")
    done = run_train("out/run,dataset=pydoc,eval_tokens=100", *flags, before=NAMELESS, env=nowhere)
    assert "pydoc" in done.stdout and done.facts["data"]["name"] == "pydoc"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["pydoc"]
