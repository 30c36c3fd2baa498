"""Text from a checkpoint: the same for the same seed, whole characters, and clear words where it
fails."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import REPO, flip_a_bit, make_dataset, run_python
from sources import stop_at

import sample
from plumbing.cli import run_script
from plumbing.data import tokenizer_of

TEXT = (
    "The tortoise, as you know, was slow;\nbut it was honest: every step was written down.\n" * 40
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, train_in):
    """The folder of a run of 20 steps, with averaged weights, on a text of 32 characters."""
    folder = tmp_path_factory.mktemp("sample")
    make_dataset(folder, "tortoise", TEXT)
    flags = (
        "--dataset=tortoise --max_steps=20 --warmup_steps=2 --eval_interval=10 --n_embd=16 "
        f"--n_head=2 --ema_decay=0.5 --dropout=0.1 --data_dir={folder}"
    )
    train_in(folder, "run", *flags.split())
    return folder / "run"


@pytest.fixture
def run_sample(monkeypatch, capsys):
    """run_sample(*arguments) -> (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, arguments), "--device=cpu"])
        return run_script(sample.main), *capsys.readouterr()

    return run


@pytest.fixture
def edited(trained, tmp_path):
    """edited(change) -> path of a checkpoint that change(checkpoint) has been at."""

    def edit(change):
        checkpoint = torch.load(trained / "best.pt", weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, tmp_path / "edited.pt")
        return tmp_path / "edited.pt"

    return edit


def refused(result, *words):
    code, out, err = result
    assert code == 2 and out == "" and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.fixture(scope="module")
def stopped(trained, train_in):
    """The folder of a run that was stopped before its first evaluation."""
    flags = f"--dataset=tortoise --n_embd=16 --n_head=2 --data_dir={trained.parent}"
    done = train_in(trained.parent, "stopped", *flags.split(), before=stop_at(7), code=143)
    return done.out_dir


def test_an_early_stop_gives_no_text_from_untrained_weights(stopped, run_sample, tmp_path):
    pytest.importorskip("safetensors")
    remark = "ckpt_00000007.pt, step 7 (best.pt is of step 0, before training)"
    lines = run_sample(stopped, "--max_new_tokens=5")[2].splitlines()
    assert lines[0].endswith(remark), "above the text"
    export = f"--export={tmp_path}/w.safetensors"
    assert remark in run_sample(stopped, export)[2]
    assert "best.pt, step 0\n" in run_sample(stopped / "best.pt")[2]


def test_the_command_writes_only_text_to_stdout_while_it_is_made(trained):
    command = [sys.executable, REPO / "sample.py", trained, "--start=The"]
    command.append("--max_new_tokens=100000000")  # it would take an hour to end
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        text = process.stdout.read(43)
    finally:
        process.kill()
        _, err = process.communicate()
    assert len(text) == 43 and text.startswith("The") and set(text) <= set(TEXT)
    assert "best.pt" in err


def test_a_prompt_with_unknown_characters_is_refused_by_name(trained, run_sample, tmp_path):
    refused(run_sample(trained, "--start=Thé €"), "'é'", "'€'")
    refused(run_sample(trained, f"--start=FILE:{tmp_path}/none"), f"{tmp_path}/none")


def test_a_prompt_is_cleaned_as_a_text_is(trained, run_sample, tmp_path):
    prompt = "The tortoise,\nas you"
    (tmp_path / "windows.txt").write_bytes(("\ufeff" + prompt.replace("\n", "\r\n")).encode())
    expected = run_sample(trained, f"--start={prompt}", "--max_new_tokens=20")[:2]
    windows = f"--start=FILE:{tmp_path}/windows.txt"
    assert run_sample(trained, windows, "--max_new_tokens=20")[:2] == expected
    byte, char = ({"tokenizer": name, "chars": "<|endoftx>ab\n"} for name in ("byte", "char"))
    text = "a\n<|endoftext|>\nb<|endoftext|>"
    assert sample.encode(text, tokenizer_of(byte)) == [97, 0, 98, 0]
    assert len(sample.encode(text, tokenizer_of(char))) == len(text)


@pytest.fixture(scope="module")
def of_stories(tmp_path_factory, train_in):
    """The folder of a run on 600 short stories by byte, such as `17 Käse.`."""
    folder = tmp_path_factory.mktemp("stories")
    stories = [f"{i} {('fox', 'Käse')[i % 2]}." for i in range(600)]
    make_dataset(folder, "stories", "\n<|endoftext|>\n".join(stories), "byte")
    flags = (
        "--dataset=stories --max_steps=150 --warmup_steps=10 --peak_lr=1e-2 --eval_interval=150 "
        f"--batch_size=16 --n_embd=32 --n_head=2 --sample_interval=150 --data_dir={folder}"
    )
    return train_in(folder, "run", *flags.split())


def test_samples_of_a_corpus_end_where_a_text_ends(of_stories, run_sample):
    """Each for itself, as train.py's does."""
    code, out, err = run_sample(of_stories.out_dir, "--num_samples=9")
    samples = out.removesuffix("\n").split(sample.LINE)
    assert code == 0 and len(samples) == 9
    whole = [text for text in samples if re.fullmatch(r"\d+ (fox|Käse)\.", text)]
    assert len(whole) > 4, samples
    assert all(text.count(".") < 2 and "\0" not in text for text in samples), samples
    assert f"{sum(len(text.encode()) for text in samples):,} tokens in" in err
    (event,) = [row for row in of_stories.rows("event") if row["event"] == "sample"]
    assert len(event["text"]) < 20
    limited = run_sample(of_stories.out_dir, "--num_samples=9", "--max_new_tokens=3")[1]
    assert [text[:3] for text in samples] == limited.removesuffix("\n").split(sample.LINE)


def test_a_terminal_that_cannot_show_a_character_is_no_error(of_stories):
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = run_python("sample.py", of_stories.out_dir, "--start=A Käse", **ascii_only)
    assert done.returncode == 0 and done.stdout.startswith("A K?se"), done.stderr


def test_a_token_that_only_the_model_knows_is_never_drawn(trained, run_sample, edited):
    def add(checkpoint):
        checkpoint["data"]["meta"]["vocab_size"] += 1
        for name in ("embedding.token.weight", "head.weight"):
            for weights in (checkpoint["model"], checkpoint["ema"]):
                row = torch.full_like(weights[name][:1], 100.0)
                weights[name] = torch.cat([weights[name], row])

    code, text, _ = run_sample(edited(add))
    assert code == 0 and len(text) > 100


def test_what_cannot_be_sampled_from_is_refused(trained, run_sample, edited, tmp_path):
    refused(run_sample(), "one run")
    refused(run_sample(tmp_path / "nowhere"), "no checkpoint in", "nowhere")
    refused(run_sample(tmp_path), "no checkpoint")
    refused(run_sample(trained / "run.json"), "run.json")
    torch.save({"weights": torch.ones(3)}, tmp_path / "foreign.pt")
    refused(run_sample(tmp_path / "foreign.pt"), "foreign.pt", "no checkpoint of train.py")

    more = edited(lambda c: c["data"]["meta"].update(chars=c["data"]["meta"]["chars"] + "é"))
    refused(run_sample(more), f"vocabulary of {len(set(TEXT)) + 1}")
    other_width = edited(lambda c: c["config"].update(n_embd=32))
    refused(run_sample(other_width), "32", "today's model.py")
    refused(run_sample(edited(lambda c: c["data"].clear())), "was not trained on text")
    refused(run_sample(trained, "--temperature=-1"), "--temperature=-1")


def test_a_damaged_checkpoint_gives_way_to_the_next(trained, run_sample, tmp_path):
    shutil.copy(trained / "best.pt", tmp_path)
    flip_a_bit(tmp_path / "best.pt")
    refused(run_sample(tmp_path / "best.pt"), "best.pt", "damaged")
    refused(run_sample(tmp_path), "best.pt", "damaged")
    shutil.copy(tmp_path / "best.pt", tmp_path / "ckpt_00000010.pt")
    shutil.copy(trained / "best.pt", tmp_path / "ckpt_00000020.pt")
    code, out, err = run_sample(tmp_path)
    assert code == 0 and out
    assert "best.pt is damaged" in err and "ckpt_00000020.pt, step 20" in err
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "ckpt_00000010.pt", "ckpt_00000020.pt"]


def test_weights_alone_are_exported(trained, run_sample, edited, tmp_path):
    from safetensors.torch import load_file

    code, out, err = run_sample(trained, f"--export={tmp_path}/w.safetensors")
    assert (code, out) == (0, "") and "w.safetensors" in err
    best = torch.load(trained / "best.pt", weights_only=True)
    written = load_file(tmp_path / "w.safetensors")
    expected = best["model"] | best["ema"]
    assert written.keys() == expected.keys() and best["ema"]
    assert all(torch.equal(written[name], expected[name]) for name in expected)

    def own(checkpoint):  # tied: two names of one weight, which two tensors of the file hold
        weight = torch.ones(3)
        checkpoint["model"] = {"in": weight, "out": weight.clone(), "other": torch.zeros(2)}
        checkpoint["ema"] = {"in": 2 * weight}

    assert run_sample(edited(own), f"--export={tmp_path}/w.safetensors")[0] == 0
    written = load_file(tmp_path / "w.safetensors")
    assert [written[name].sum() for name in ("in", "out", "other")] == [6, 6, 0]
    refused(run_sample(trained, f"--export={tmp_path}/no/w"), "no/w", "cannot be written")
