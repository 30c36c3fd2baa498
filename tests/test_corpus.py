"""A corpus: what becomes which token, the same at every try, and nothing half made after a kill."""

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import REPO, needs_gpt2, pydoc_text, tree, wait_for
from test_data import run

import prepare_data
from plumbing.cli import setting
from plumbing.data import TOKENIZERS, DataError, Offline, tokenizer_of
from prepare_data import CORPORA, get_dataset, parts, prepare, read_chunks

BOTH = ["byte", pytest.param("gpt2", marks=needs_gpt2)]
MANY = {"val_fraction": 0.1}  # so that a small corpus has some to validate


@pytest.fixture(scope="module")
def texts():
    """200 documents of about 2,000 bytes, no two the same."""
    text = pydoc_text()
    return [f"Nº {i}\n{text[2000 * i : 2000 * i + 2000]}" for i in range(200)]


@pytest.fixture
def corpus(tmp_path, texts):
    """A folder that holds `texts` in their order: .txt, .txt.gz, .jsonl and .jsonl.gz."""
    folder = tmp_path / "corpus"
    write_lines(folder / "a.jsonl", texts[:60])
    write_lines(folder / "b.jsonl.gz", texts[60:120])
    for i in range(120, 160):
        write(folder / f"c{i}.txt", texts[i].encode())
    for i in range(160, 200):
        write(folder / "d" / f"{i}.txt.gz", gzip.compress(texts[i].encode()))
    write(folder / ".hidden.txt", b"left out")
    write(folder / "d" / "empty.txt", b"")
    return folder


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def write_lines(path, texts, field="text"):
    lines = "".join(json.dumps({"id": 1, field: text}) + "\n\n" for text in texts).encode()
    write(path, gzip.compress(lines) if path.suffix == ".gz" else lines)


def quiet(*words):
    pass


def make(folder, source, tokenizer="byte", say=quiet, **how):
    with setting(vars(prepare_data), **how):
        return prepare(folder.name, folder.parent, str(source), tokenizer, say)


def documents_of(folder, split):
    """The texts of a split, as their tokens say; each must end with its end-of-text."""
    meta = json.loads((folder / "meta.json").read_text())
    ids = np.fromfile(folder / f"{split}.bin", meta["dtype"])
    end = TOKENIZERS[meta["tokenizer"]].end_of_text
    assert ids[-1] == end
    pieces = np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]
    return [tokenizer_of(meta).decode(piece[:-1]) for piece in pieces]


def all_of(folder):
    return sorted(documents_of(folder, "train") + documents_of(folder, "val"))


# --- what becomes of a document ---


@pytest.mark.parametrize("tokenizer", BOTH)
def test_each_document_is_there_once_with_its_end_of_text(tmp_path, corpus, texts, tokenizer):
    said = []
    folder = tmp_path / "made"
    _, meta = make(folder, corpus, tokenizer, say=said.append, **MANY)
    made = {split: documents_of(folder, split) for split in ("train", "val")}
    for part in made.values():
        assert part == [text for text in texts if text in set(part)]
    assert all_of(folder) == sorted(texts)
    assert 5 < len(made["val"]) < 40  # a tenth
    assert meta["val_bytes"] == sum(len(text.encode()) for text in made["val"])
    assert meta["vocab_size"] == {"byte": 256, "gpt2": 50257}[tokenizer]
    assert get_dataset("made", tmp_path) == (str(folder), meta)
    assert f"{meta['train_tokens']:,} tokens to train on" in said[0]


def test_the_same_command_writes_the_same_bytes(tmp_path, corpus, monkeypatch):
    made = tmp_path / "whole" / "made", tmp_path / "small" / "made"
    make(made[0], corpus, **MANY)
    monkeypatch.setattr(prepare_data, "CHUNK", 1000)
    monkeypatch.setattr(prepare_data, "BATCH", 3)
    make(made[1], corpus, **MANY)
    assert tree(made[0]) == tree(made[1])
    assert sorted(tree(made[0])) == ["meta.json", "train.bin", "val.bin"]


def test_a_validation_document_never_occurs_in_training(tmp_path, texts):
    """Every document is planted three times, in files whose order differs between two corpora."""
    sides = []
    for order in (1, 2):
        copies = [*texts, *texts[::-1], *texts]
        random.Random(order).shuffle(copies)
        source = tmp_path / f"corpus{order}"
        for i in range(0, 600, 150):
            write_lines(source / f"{(order * i) % 7}{i}.jsonl", copies[i : i + 150])
        make(tmp_path / f"made{order}", source, **MANY)
        made = [documents_of(tmp_path / f"made{order}", split) for split in ("train", "val")]
        assert len(made[0]) + len(made[1]) == 600
        assert not set(made[0]) & set(made[1])
        sides.append([sorted(part) for part in made])
    assert sides[0] == sides[1]
    assert len(sides[0][1]) >= 15


def test_a_long_text_is_cut_at_line_ends_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "WHOLE_DOCUMENT", 50_000)
    monkeypatch.setattr(prepare_data, "PART", 1_000)
    monkeypatch.setattr(prepare_data, "CHUNK", 7_000)

    def parts_of(raw):
        (tmp_path / "long.txt").write_bytes(raw)
        return list(parts(read_chunks(str(tmp_path / "long.txt"))))

    lines, spaces = pydoc_text()[:120_000], pydoc_text()[:120_000].replace("\n", " ")
    bare = "käse漢🐴" * 9_000  # no line ends, and characters of 1 to 4 bytes
    for text in (lines, spaces, bare):
        items = parts_of(text.encode())
        raws = [raw for _, raw in items]
        assert b"".join(raws) == text.encode() and len(raws) > 100
        assert all(len(raw) <= 1_000 and raw.decode() for raw in raws)
        if text is lines:
            assert all(raw.endswith(b"\n") for raw in raws[:-1])
        offsets = [offset for offset, _ in items]
        assert offsets == [0, *np.cumsum([len(raw) for raw in raws])[:-1].tolist()]
    assert len(parts_of(lines.encode()[:50_000])) == 1  # no longer: one document


def test_a_glob_takes_the_files_that_it_matches_and_field_names_the_text(tmp_path, texts):
    for i, name in enumerate(("x1.jsonl", "x2.jsonl", "y.jsonl")):
        write_lines(tmp_path / "web" / name, texts[50 * i : 50 * i + 50], field="content")
    make(tmp_path / "made", tmp_path / "web" / "x*.jsonl", field="content", **MANY)
    assert all_of(tmp_path / "made") == sorted(texts[:100])


def test_a_kill_leaves_no_half_dataset_and_a_rerun_makes_it_all(tmp_path, corpus, texts):
    write_lines(corpus / "e.jsonl", [f"{n} {text}" for n in range(20) for text in texts])
    make(tmp_path / "whole" / "made", corpus, **MANY)
    slow = """
import signal, sys, time, prepare_data
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
prepare_data.BATCH = 10
prepare_data.split_of = lambda *of, inner=prepare_data.split_of: time.sleep(0.001) or inner(*of)
prepare_data.val_fraction = 0.1
prepare_data.prepare("made", sys.argv[1], sys.argv[2], "byte")
"""
    command = [sys.executable, "-c", slow, str(tmp_path), str(corpus)]
    folder = tmp_path / "made"
    for signum, code in ((signal.SIGKILL, -9), (signal.SIGINT, -2)):
        process = subprocess.Popen(command, cwd=REPO, stderr=subprocess.DEVNULL)
        old = set(folder.glob("*/train.bin"))
        new = lambda: set(folder.glob("*/train.bin")) - old  # noqa: B023, E731
        wait_for(lambda: any(path.stat().st_size > 100_000 for path in new()))  # noqa: B023
        process.send_signal(signum)
        assert process.wait() == code or signum == signal.SIGINT
        left = list(folder.iterdir()) if folder.exists() else []
        assert len(left) == (signum == signal.SIGKILL)
        with pytest.raises(DataError, match="no dataset 'made'"):
            get_dataset("made", tmp_path)
        for each in left:
            os.utime(each, (0, 0))
    make(folder, corpus, **MANY)
    assert tree(folder) == tree(tmp_path / "whole" / "made")


def test_a_corpus_that_is_there_is_checked_and_left_as_it_is(tmp_path, corpus):
    said = []
    first = make(tmp_path / "made", corpus, **MANY)
    before = tree(tmp_path / "made")
    os.utime(corpus / "a.jsonl")  # touched: the content decides
    assert make(tmp_path / "made", corpus, say=said.append, **MANY) == first
    assert "is there already, byte tokens of corpus, 83 files" in said[0]
    with pytest.raises(DataError, match="it has val_fraction 0.1, not val_fraction 0.2; choose"):
        make(tmp_path / "made", corpus, val_fraction=0.2)
    (corpus / "c120.txt").write_bytes((corpus / "c120.txt").read_bytes()[::-1])
    with pytest.raises(
        DataError, match="holds another dataset: .*; it has content .*, not content"
    ):
        make(tmp_path / "made", corpus, **MANY)
    assert tree(tmp_path / "made") == before


def test_a_small_corpus_has_validation_text_too(tmp_path, texts):
    """Forty books, with the default val_fraction: expected are 0.02 documents."""
    for i in range(40):
        write(tmp_path / "books" / f"{i}.txt", texts[i].encode() * 20)
    flags, data = ("--input=books", "--tokenizer=byte"), tmp_path / "data"
    done = run(tmp_path, "made", *flags)
    assert done.returncode == 0, done.stderr
    (fraction,) = re.findall("=0.0005 does not fit this text; (.+) is used instead", done.stdout)
    val = documents_of(data / "made", "val")
    assert 1 <= len(val) <= 4 and all_of(data / "made") == sorted(t * 20 for t in texts[:40])
    again = run(tmp_path, "again", *flags, f"--val_fraction={fraction}")
    assert documents_of(data / "again", "val") == val and "instead" not in again.stdout


# --- bad input ---


GOOD = b'{"text": "good"}\n'


BAD_FILES = [  # (name, content, the message)
    ("a.jsonl", GOOD + b"\n{oops\n", "a.jsonl:3: JSONDecodeError"),
    ("a.jsonl", GOOD + b'{"body": "x"}', "a.jsonl:2: KeyError: 'text'"),
    ("a.jsonl", b'{"text": 5}', "a.jsonl:1: TypeError: 'text' is no string"),
    ("a.jsonl", b'"text"', "a.jsonl:1: TypeError"),
    ("a.jsonl", b'{"text":' + b"[" * 99_999, "a.jsonl:1: RecursionError"),
    ("a.jsonl", b'[{"text": "x"}]', "is a JSON array"),
    ("a.jsonl", GOOD + b'{"text": "\xe4"}', "0xe4 in position 10"),
    ("b.txt", b"K\xe4se", "b.txt is not UTF-8: byte 0xe4 at offset 1"),
    ("b.png", b"\x89PNG\0x", "b.png is binary"),
    ("a.txt.gz", gzip.compress(b"a text" * 99, mtime=0)[:-9], "fetch it again or leave it out"),
    ("a.txt.gz", b"no gzip at all", "fetch it again or leave it out"),
]


@pytest.mark.parametrize("name, content, words", BAD_FILES)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path, name, content, words):
    write(tmp_path / "web" / "a.txt", b"good")
    write(tmp_path / "web" / name, content)
    assert words in refusal(tmp_path, "")


NONE = {"": "too short", "/*.jsonl": "0 files, 0 bytes", "/b.jsonl": "No such file"}


def test_a_corpus_that_cannot_be_used_is_refused(tmp_path):
    write(tmp_path / "web" / "a.txt", b"1")
    for source, words in NONE.items():
        assert words in refusal(tmp_path, source)
    for tokenizer, words in (("char", "char learns its vocab"), ("bpe", "no tokenizer")):
        assert words in refusal(tmp_path, "", tokenizer=tokenizer)


def refusal(tmp_path, source, **how):
    """The one line for the corpus tmp_path/web. Nothing may have been written."""
    with pytest.raises(DataError) as error:
        make(tmp_path / "data" / "made", f"{tmp_path}/web{source}", **how)
    assert "\n" not in str(error.value) and not (tmp_path / "data").exists()
    return str(error.value)


def test_a_few_bad_rows_are_skipped_and_counted_and_more_are_refused(tmp_path, texts):
    lines = [json.dumps({"text": f"{i} {text}"}) for i in range(10) for text in texts]
    said = []
    lines[3] = lines[1_500] = '{"body": 1}'
    write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    make(tmp_path / "made", tmp_path / "a.jsonl", say=said.append, **MANY)
    assert "skipped 2 of 2,000 rows" in said[1] and "a.jsonl:4: KeyError: 'text'" in said[1]
    assert len(all_of(tmp_path / "made")) == 1_998
    lines[1_999] = "{oops"  # the third, past a thousandth: found at the end
    write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    with pytest.raises(DataError, match="3 of 2,000 rows cannot be read, the first: .*a.jsonl:4"):
        make(tmp_path / "more", tmp_path / "a.jsonl", **MANY)
    assert not (tmp_path / "more").exists()


def test_a_hub_corpus_is_streamed_and_a_broken_network_leaves_nothing(tmp_path, monkeypatch, texts):
    """By a stand-in for the package `datasets`."""
    asked = []

    def load_dataset(*path, fail=False, **how):
        asked.append((path, how))
        yield from ({"text": text} for text in [*texts, "a\0b\ud83d"])
        if fail:
            raise ConnectionError("the hub\nis gone")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    folder, meta = make(tmp_path / "fineweb", "", **MANY)
    assert asked == [(CORPORA["fineweb"], {"split": "train", "streaming": True})]
    assert all_of(Path(folder)) == sorted([*texts, "a\ufffdb\ufffd"])
    assert "huggingface.co" in meta["source"]
    broken = partial(load_dataset, fail=True)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=broken))
    with pytest.raises(Offline, match="cannot read Skylion007/openwebtext .*: the hub is gone"):
        make(tmp_path / "openwebtext", "", **MANY)
    assert os.listdir(tmp_path) == ["fineweb"]
