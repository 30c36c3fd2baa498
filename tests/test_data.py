"""prepare_data.py: what a dataset is, what bad input gets, and what a download may turn into."""

import gzip
import hashlib
import json
import lzma
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import HONEST_DATA, flip_a_bit, needs_gpt2, pydoc_text, run_python, tree

import prepare_data
from plumbing import data
from plumbing.cli import BadInput, setting
from plumbing.data import TOKENIZERS as OF_NAME
from plumbing.data import Offline, fingerprint, tokenizer_of
from prepare_data import Corpus, prepare
from sample import stream

SCRIPT = Path(prepare_data.__file__)
SHAKESPEARE = HONEST_DATA / "tinyshakespeare" / "input.txt"
needs_shakespeare = pytest.mark.skipif(
    not SHAKESPEARE.is_file(), reason="HONEST_DATA names no folder with tinyshakespeare/input.txt"
)
TOKENIZERS = ["char", "byte", pytest.param("gpt2", marks=needs_gpt2)]
TEXT = "Ein Esel, ein Käse & ein 🐴: \nsie reisen nach Bremen.\n" * 20
NOWHERE = "http://127.0.0.1:9"  # the port where nothing listens


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No test leaves this machine: a test that downloads says from where."""
    monkeypatch.setenv("SHAKESPEARE_URL", NOWHERE)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "esel.txt"
    path.write_bytes(TEXT.encode())
    return path


def run(tmp_path, *argv, **environment):
    return run_python(SCRIPT, *argv, "--data_dir=data", cwd=tmp_path, **environment)


def refusal(tmp_path, *argv, **environment):
    """The one line that a bad command gets. Nothing may have been written."""
    before = tree(tmp_path)
    result = run(tmp_path, *argv, **environment)
    assert result.returncode == 2, result
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("prepare_data.py: ")
    assert tree(tmp_path) == before
    return result.stderr


def decode(ids, meta):
    return tokenizer_of(meta).decode(ids)


def ids(folder, split):
    meta = json.loads((Path(folder) / "meta.json").read_text())
    return np.fromfile(Path(folder) / f"{split}.bin", meta["dtype"])


# --- what a dataset is ---


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_dataset_is_the_whole_text_and_what_its_meta_says(tmp_path, text_file, tokenizer):
    result = run(tmp_path, "esel", f"--input={text_file}", f"--tokenizer={tokenizer}")
    assert (result.returncode, result.stderr) == (0, "")
    folder = tmp_path / "data" / "esel"
    assert [*tree(Path(folder))] == ["meta.json", "train.bin", "val.bin"]
    meta = json.loads((folder / "meta.json").read_text())
    cut = int(0.9 * len(TEXT))
    assert decode(ids(folder, "train"), meta) == TEXT[:cut]
    assert decode(ids(folder, "val"), meta) == TEXT[cut:]
    assert meta["tokenizer"] == tokenizer and meta["dtype"] == "uint16"
    assert meta["vocab_size"] == {"char": len(set(TEXT)), "byte": 256, "gpt2": 50257}[tokenizer]
    assert meta["val_bytes"] == len(TEXT[cut:].encode())
    assert "esel.txt" in meta["source"]
    assert ("chars" in meta) == (tokenizer == "char")
    for split in ("train", "val"):
        assert meta[f"{split}_tokens"] == len(ids(folder, split))
        digest = hashlib.sha256((folder / f"{split}.bin").read_bytes()).hexdigest()
        assert meta["sha256"][f"{split}.bin"] == digest
    assert f"{meta['train_tokens']:,} tokens" in result.stdout and tokenizer in result.stdout
    assert decode([meta.pop("start_id")], meta) == "\n"  # which an old one gets when it is opened
    (folder / "meta.json").write_text(old := json.dumps(meta))
    again = data.verified_meta(str(folder))
    assert "start_id" in again and fingerprint(again) == fingerprint(meta)
    assert (folder / "meta.json").read_text() == old


@needs_shakespeare
@pytest.mark.parametrize(
    "tokenizer, train, val, vocab_size, sha256",
    [
        ("char", 1_003_854, 111_540, 65, "6ec305602a99ac28"),
        ("byte", 1_003_854, 111_540, 256, "5c67032fe71ad87a"),
        pytest.param("gpt2", 301_966, 36_059, 50257, "502a2bdc8210d1ac", marks=needs_gpt2),
    ],
)
def test_shakespeare_has_the_published_sizes(tmp_path, tokenizer, train, val, vocab_size, sha256):
    _, meta = prepare("shakespeare", tmp_path, str(SHAKESPEARE), tokenizer)
    assert (meta["train_tokens"], meta["val_tokens"]) == (train, val)
    assert meta["vocab_size"] == vocab_size
    assert meta["val_bytes"] == 111_540
    assert meta["sha256"]["train.bin"].startswith(sha256)  # as ever: runs depend on it


def test_a_vocabulary_past_65536_is_stored_in_32_bits(tmp_path):
    text = "".join(chr(code) for code in range(0x10000, 0x10000 + 70_000))
    (tmp_path / "wide.txt").write_text(text, encoding="utf-8")
    folder, meta = prepare("wide", tmp_path, str(tmp_path / "wide.txt"))
    assert (meta["dtype"], meta["vocab_size"]) == ("uint32", 70_000)
    assert ids(folder, "val").max() == 69_999
    assert prepare("wide", tmp_path) == (folder, meta)
    with pytest.raises(BadInput, match=r"the vocabulary lacks 'Z' '~' '\\udc80'"):
        tokenizer_of(meta).encode("ZZ~\udc80~")
    assert meta["start_id"] == 0  # no newline: the first of the text


def test_pydoc_and_formula_need_no_network(tmp_path):
    result = run(tmp_path, "pydoc")
    assert result.returncode == 0, result.stderr
    folder, meta = prepare("pydoc", tmp_path / "data")
    assert meta["train_tokens"] > 100_000 and "CPython" in meta["source"]
    train, val = (decode(ids(folder, split), meta) for split in ("train", "val"))
    assert "statement" in train
    assert not any(val[at : at + 200] in train for at in range(0, len(val) - 200, 50))
    folder, meta = prepare("formula", tmp_path)
    assert meta["source"] == "products() in prepare_data.py (SHA-256 ad3d84f72e7e1417...)"
    assert "\n940 x 519 = 487860\n" in decode(ids(folder, "train"), meta)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_ids_are_decoded_as_a_whole_and_as_a_stream(tmp_path, text_file, tokenizer):
    """A stream never shows half a character."""
    _, meta = prepare("esel", tmp_path, str(text_file), tokenizer)
    first = tokenizer_of(meta).encode("Käse reisen\n🐴")
    assert decode(first, meta) == "Käse reisen\n🐴" == decode(first.tolist(), meta)
    assert decode([], meta) == "" and len(tokenizer_of(meta).encode("")) == 0
    pieces = list(stream(tokenizer_of(meta).encode("Käse 🐴 & Esel"), tokenizer_of(meta)))
    assert "".join(pieces) == "Käse 🐴 & Esel" and len(pieces) > 3
    assert not any("\ufffd" in piece for piece in pieces)


# --- a dataset that is there already ---


def test_a_dataset_is_never_overwritten_by_one_of_other_flags(tmp_path, text_file):
    typed = [f"--input={text_file}", "--val_fraction=0.25"]
    for said in ("made", "is there already"):
        assert said in run(tmp_path, "esel", *typed).stdout
    (tmp_path / "other.txt").write_text(TEXT + "!")
    for argv in (
        [*typed, "--tokenizer=byte"],
        ["--tokenizer=byte"],
        ["--input=other.txt", "--val_fraction=0.25"],
        [typed[0], "--val_fraction=0.2"],
        ["--val_fraction=0.2"],
    ):
        err = refusal(tmp_path, "esel", *argv)
        assert "holds another dataset: char tokens of esel.txt" in err
        assert "choose another NAME" in err
    meta = data.verified_meta(tmp_path / "data/esel")
    assert decode(ids(tmp_path / "data/esel", "val"), meta) == TEXT[int(0.75 * len(TEXT)) :]


# --- bad input ---


ROWS = [{"text": f"{i} {TEXT}"} for i in range(200)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PLAIN = TEXT.replace("🐴", "")
ODD_FILES = [
    ("nul.txt", TEXT.encode() + b"\0\0" + TEXT.encode()),
    ("latin.txt", PLAIN.encode("latin1")),
    ("windows.txt", TEXT.encode("UTF-16")),
    ("bare.txt", PLAIN.encode("UTF-16-LE")),
    ("a text.txt.xz", lzma.compress(TEXT.encode())),
    ("misnamed.txt", gzip.compress(TEXT.encode(), mtime=0)),
    ("array.json", json.dumps([*ROWS, TEXT]).encode()),
    ("lines.json", LINES),
]


@pytest.mark.parametrize("name, content", ODD_FILES)
def test_what_is_printed_for_an_odd_file_leads_to_a_dataset(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    while (done := run(tmp_path, "x", f"--input={name}", "--tokenizer=byte")).returncode:
        command, then = re.search("type: (.+); then (.+)", done.stderr).groups()
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        name = (re.findall("--input='(.+?)'", then) or [name])[0]
    meta = data.verified_meta(tmp_path / "data/x")
    text = decode(ids(tmp_path / "data/x", "train"), meta)
    assert "Käse" in text and "{" not in text


BEGINNINGS = {
    b"ARROW1": "to_parquet('x.parquet')\"; then --input='x.parquet'",
    b"PK\3\4" + bytes(26) + b"[Content_Types].xml": "pandoc",
    b"\x89PNG\0\0\1": "binary",
}


def test_a_binary_file_is_named_and_a_folder_gets_the_glob_without_it(tmp_path):
    for i in range(40):
        write(tmp_path / "web" / f"{i}.md", f"{i}\n{TEXT}".encode())
    for content, words in BEGINNINGS.items():
        assert words in prepare_data.advice_on("x", content)
        write(tmp_path / "web" / "x.bin", content)
        with pytest.raises(BadInput, match="x.bin is not plain .* to leave it out: ") as error:
            make(tmp_path / "made", tmp_path / "web")
    (pattern,) = re.findall(r"--input='(\S+/\*\*/\*.md)'$", str(error.value))
    make(tmp_path / "made", pattern)


def test_a_byte_order_mark_is_removed_and_crlf_is_one_newline_and_that_is_said(tmp_path):
    (tmp_path / "esel.txt").write_bytes(("\ufeff" + TEXT.replace("\n", "\r\n")).encode())
    done = run(tmp_path, "esel", "--input=esel.txt")
    assert "byte order marks; replaced: CRLF by a newline" in done.stdout
    folder = tmp_path / "data/esel"
    meta = data.verified_meta(folder)
    text = "".join(decode(ids(folder, split), meta) for split in ("train", "val"))
    assert text == TEXT and "\r" not in meta["chars"]
    assert meta["val_bytes"] == len(decode(ids(folder, "val"), meta).encode())


BAD_COMMANDS = """
x --input=none.txt                  cannot read none.txt
x --input=none*.txt                 0 files, 0 bytes
x --input=. --tokenizer=char        one text of up to 32 MB
x --input=esel.txt --tokenizer=bpe  auto | char | byte | gpt2
x                                   prepare_data.py x --input=FILE
a/b --input=esel.txt                NAME is made of letters
shakespeare --input=esel.txt        not the text that shakespeare
"""


@pytest.mark.parametrize("line", BAD_COMMANDS.strip().splitlines())
def test_a_bad_command_gets_one_line_that_says_what_to_type(tmp_path, text_file, line):
    argv, words = re.split("   *", line)
    assert words in refusal(tmp_path, *argv.split())


def test_a_full_disk_leaves_nothing_half_written(tmp_path, text_file, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_data, "digest_of", full)
    with pytest.raises(BadInput, match="No space left"):
        prepare("esel", tmp_path, str(text_file))
    assert [*tree(tmp_path)] == ["esel.txt"]


# --- a dataset that was damaged ---


DAMAGES = [
    (lambda folder: flip_a_bit(folder / "val.bin"), "val.bin has another SHA-256"),
    (lambda folder: os.truncate(folder / "train.bin", 100), "train.bin has another SHA-256"),
    (lambda folder: os.remove(folder / "val.bin"), "val.bin"),
    (lambda folder: (folder / "meta.json").write_text("null"), "damaged (TypeError"),
    (lambda folder: (folder / "meta.json").write_text("{}"), "damaged (KeyError: 'sha256'"),
]


@pytest.mark.parametrize("damage, words", DAMAGES)
def test_a_damaged_dataset_is_refused_with_what_to_type(tmp_path, text_file, damage, words):
    folder, meta = prepare("esel", tmp_path, str(text_file))
    damage(Path(folder))
    with pytest.raises(BadInput) as error:
        prepare("esel", tmp_path)
    message = str(error.value)
    assert words in message and "\n" not in message
    assert f"delete {folder}/meta.json" in message and "prepare_data.py esel" in message
    os.remove(Path(folder) / "meta.json")  # now it is unfinished, and made anew
    assert prepare("esel", tmp_path, str(text_file)) == (folder, meta)


# --- downloads ---


@needs_shakespeare
def test_shakespeare_is_downloaded_or_copied(tmp_path):
    result = run(tmp_path, "shakespeare", SHAKESPEARE_URL=SHAKESPEARE.as_uri())
    assert (result.returncode, result.stderr) == (0, "")
    _, one = prepare("shakespeare", tmp_path / "data")
    assert one["train_tokens"] == 1_003_854
    assert run(tmp_path, "shakespeare", f"--input={SHAKESPEARE}").returncode == 0
    assert fingerprint(prepare("shakespeare", tmp_path / "data")[1]) == fingerprint(one)


def test_no_network_is_noticed_quickly_and_told_apart_from_another_text(tmp_path, monkeypatch):
    err = refusal(tmp_path, "shakespeare", SHAKESPEARE_URL=SCRIPT.as_uri())
    assert "the download is not the text that shakespeare" in err and "--input=FILE" in err
    start = time.monotonic()
    err = refusal(tmp_path, "shakespeare", SHAKESPEARE_URL=NOWHERE)
    assert "cannot get http://127.0.0.1:9: " in err and "Connection refused" in err
    assert "pydoc needs no network" in err
    assert time.monotonic() - start < 5
    monkeypatch.setattr(prepare_data, "TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("SHAKESPEARE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Offline, match="timed out"):
            prepare("shakespeare", tmp_path)
    assert tree(tmp_path) == {}


# ---- a corpus ------------------------------------------------------------------------------------

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
        write(folder / "d" / f"{i}.txt.gz", gzip.compress(texts[i].encode(), mtime=0))
    write(folder / ".hidden.txt", b"left out")
    write(folder / "d" / "empty.txt", b"")
    return folder


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def write_lines(path, texts, field="text"):
    lines = "".join(json.dumps({"id": 1, field: text}) + "\n\n" for text in texts).encode()
    write(path, gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)


def make(folder, source, tokenizer="byte", **how):
    with setting(vars(prepare_data), **how):
        return prepare(folder.name, folder.parent, str(source), tokenizer)


def documents_of(folder, split):
    """The texts of a split, as their tokens say; each must end with its end-of-text."""
    meta = json.loads((folder / "meta.json").read_text())
    found = ids(folder, split)
    end = OF_NAME[meta["tokenizer"]].end_of_text
    assert found[-1] == end
    pieces = np.split(found, np.flatnonzero(found == end) + 1)[:-1]
    return [tokenizer_of(meta).decode(piece[:-1]) for piece in pieces]


def all_of(folder):
    return sorted(documents_of(folder, "train") + documents_of(folder, "val"))


# --- what becomes of a document ---


@pytest.mark.parametrize("tokenizer", BOTH)
def test_each_document_is_there_once_with_its_end(tmp_path, corpus, texts, tokenizer, capsys):
    folder = tmp_path / "made"
    _, meta = make(folder, corpus, tokenizer, **MANY)
    made = {split: documents_of(folder, split) for split in ("train", "val")}
    for part in made.values():
        assert part == [text for text in texts if text in set(part)]
    assert all_of(folder) == sorted(texts)
    assert 5 < len(made["val"]) < 40  # a tenth
    assert meta["val_bytes"] == sum(len(text.encode()) for text in made["val"])
    assert meta["vocab_size"] == {"byte": 256, "gpt2": 50257}[tokenizer]
    assert prepare("made", tmp_path) == (str(folder), meta)
    assert f"{meta['train_tokens']:,} tokens to train on" in capsys.readouterr().out
    assert meta["start_id"] == OF_NAME[tokenizer].end_of_text


def test_a_validation_document_never_occurs_in_training(tmp_path, texts):
    """Every document is planted three times, in files whose order differs between two corpora. A
    glob takes the files that it matches, and --field names the text."""
    sides = []
    for order in (1, 2):
        copies = [*texts, *texts[::-1], *texts]
        random.Random(order).shuffle(copies)
        source = tmp_path / f"corpus{order}"
        for i in range(0, 600, 150):
            write_lines(
                source / f"{(order * i) % 7}{i}.jsonl", copies[i : i + 150], field="content"
            )
        write_lines(source / "no_match.jsonl", ["left out"])
        make(tmp_path / f"made{order}", source / "*0.jsonl", field="content", **MANY)
        made = [documents_of(tmp_path / f"made{order}", split) for split in ("train", "val")]
        assert sorted(made[0] + made[1]) == sorted(copies)
        assert not set(made[0]) & set(made[1])
        sides.append([sorted(part) for part in made])
    assert sides[0] == sides[1]
    assert len(sides[0][1]) >= 15


def test_a_long_text_is_cut_at_line_ends_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "WHOLE_DOCUMENT", 50_000)
    monkeypatch.setattr(prepare_data, "PART", 1_000)
    monkeypatch.setattr(prepare_data, "CHUNK", 7_000)

    def parts_of(text):
        (tmp_path / "long.txt").write_text(text)
        return list(Corpus([str(tmp_path / "long.txt")]))

    lines, spaces = pydoc_text()[:120_000], pydoc_text()[:120_000].replace("\n", " ")
    bare = "käse漢🐴" * 9_000  # no line ends, and characters of 1 to 4 bytes
    for text in (lines, spaces, bare):
        pieces = parts_of(text)
        assert "".join(pieces) == text and len(pieces) > 100
        assert all(len(piece.encode()) <= 1_000 for piece in pieces)
        if text is lines:
            assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert len(parts_of(lines[:49_000])) == 1  # no longer: one document


def test_after_a_kill_a_rerun_writes_the_same_bytes(tmp_path, corpus, monkeypatch):
    make(tmp_path / "whole" / "made", corpus, **MANY)
    killed = """
import os, sys, prepare_data
drawn = []
def draw_of(text, inner=prepare_data.draw_of):
    drawn.append(text)
    return inner(text) if len(drawn) < 100 else os.kill(os.getpid(), 9)
prepare_data.draw_of, prepare_data.BATCH, prepare_data.val_fraction = draw_of, 10, 0.1
prepare_data.prepare("made", sys.argv[1], sys.argv[2], "byte")
"""
    assert run_python("-c", killed, tmp_path, corpus).returncode == -9
    folder = tmp_path / "made"
    with pytest.raises(BadInput, match="no dataset 'made'"):
        prepare("made", tmp_path)
    monkeypatch.setattr(prepare_data, "CHUNK", 1000)
    monkeypatch.setattr(prepare_data, "BATCH", 3)
    make(folder, corpus, **MANY)
    assert tree(folder) == tree(tmp_path / "whole" / "made")
    assert sorted(tree(folder)) == ["meta.json", "train.bin", "val.bin"]


def test_a_corpus_that_is_there_is_checked_and_left_as_it_is(tmp_path, corpus, capsys):
    first = make(tmp_path / "made", corpus, **MANY)
    assert make(tmp_path / "made", corpus, **MANY) == first
    assert "is there already, byte tokens of corpus, 83 files" in capsys.readouterr().out
    with pytest.raises(BadInput, match="another dataset: .* 0.1.*, not .* 0.2.*; choose"):
        make(tmp_path / "made", corpus, val_fraction=0.2)
    (corpus / "c120.txt").write_bytes(b"shorter")
    with pytest.raises(BadInput, match="holds another dataset"):
        make(tmp_path / "made", corpus, **MANY)


def test_a_typed_fraction_of_few_documents_is_kept_or_refused(tmp_path, texts, capsys):
    for i in range(10):
        write(tmp_path / "books" / f"{i}.txt", texts[i].encode())
    for none_or_all in (1e-9, 0.999999):
        with pytest.raises(BadInput, match="of 10 documents, .* of the text; ") as error:
            make(tmp_path / "made", tmp_path / "books", val_fraction=none_or_all)
        (one,) = re.findall(r"--val_fraction=(\S+) holds out one", str(error.value))
        _, meta = make(tmp_path / f"{none_or_all}", tmp_path / "books", val_fraction=float(one))
        assert len(documents_of(tmp_path / f"{none_or_all}", "val")) == 1
        share = meta["val_bytes"] / sum(len(text.encode()) for text in texts[:10])
        assert f"1 of 10 documents, {share:.1%}"[:-2] in capsys.readouterr().out
    write(tmp_path / "one" / "short.txt", texts[0].encode())
    make(tmp_path / "made", tmp_path / "one")
    cut = int(0.9 * len(texts[0]))
    for split, part in (("train", texts[0][:cut]), ("val", texts[0][cut:])):
        assert documents_of(tmp_path / "made", split) == [part]


def test_a_small_corpus_has_validation_text_too(tmp_path, texts):
    """Forty books, with the default val_fraction: expected are 0.02 documents."""
    for i in range(40):
        write(tmp_path / "books" / f"{i}.txt", texts[i].encode() * 20)
    flags, data = ("--input=books", "--tokenizer=byte"), tmp_path / "data"
    done = run(tmp_path, "made", *flags)
    assert done.returncode == 0, done.stderr
    (fraction,) = re.findall("--val_fraction=(.+?) holds out", done.stdout)
    val = documents_of(data / "made", "val")
    assert 1 <= len(val) <= 4 and all_of(data / "made") == sorted(t * 20 for t in texts[:40])
    for i in range(40, 100):  # with the flag that was printed, none of them moves
        write(tmp_path / "books" / f"{i}.txt", texts[i].encode() * 20)
        if i in (40, 60, 99):
            run(tmp_path, f"with{i}", *flags, f"--val_fraction={fraction}")
            sides = [set(documents_of(data / f"with{i}", split)) for split in ("train", "val")]
            assert set(val) <= sides[1] and not sides[1] - set(val) & {t * 20 for t in texts[:40]}


@pytest.mark.parametrize("chunk", [7, 1_000_000])
@pytest.mark.parametrize("around", ["\n", "\r\n", "", "\n<|endoftext|>\n"])
def test_separators_in_a_text_are_borders_of_documents(tmp_path, monkeypatch, texts, around, chunk):
    """In a file or, compressed, in a folder; at its ends, and across chunks."""
    monkeypatch.setattr(prepare_data, "CHUNK", chunk)
    texts = [text.strip() for text in texts]
    content = f"{around}<|endoftext|>{around}".join(["", *texts, ""]).encode()
    write(tmp_path / "a.txt", content)
    write(tmp_path / "folder" / "a.txt.gz", gzip.compress(content, mtime=0))
    for source in ("a.txt", "folder"):
        make(tmp_path / f"made_{source}", tmp_path / source, **MANY)
        assert all_of(tmp_path / f"made_{source}") == sorted(texts)
    monkeypatch.setattr(prepare_data, "WHOLE_DOCUMENT", 500)  # in parts, too
    monkeypatch.setattr(prepare_data, "PART", 100)
    assert "".join(Corpus([str(tmp_path / "a.txt")])) == "".join(texts)


@needs_gpt2
def test_separators_are_ids_for_gpt2_and_characters_for_char_and_rows(tmp_path, texts, capsys):
    texts = [text.strip() for text in texts]
    write(tmp_path / "a.txt", "<|endoftext|>".join(texts).encode())
    assert make(tmp_path / "gpt2", tmp_path / "a.txt", "gpt2", **MANY)[1]["start_id"] == 50256
    assert all_of(tmp_path / "gpt2") == sorted(texts)
    assert "199 <|endoftext|> are borders of documents" in capsys.readouterr().out
    _, meta = make(tmp_path / "char", tmp_path / "a.txt", "auto")
    assert "199 <|endoftext|> are ordinary characters; --tok" in capsys.readouterr().out
    assert "|>" in decode(ids(tmp_path / "char", "train"), meta)
    assert meta["start_id"] == meta["chars"].index("\n")
    write_lines(tmp_path / "a.jsonl", ["1<|endoftext|>2", *texts])
    make(tmp_path / "rows", tmp_path / "a.jsonl", **MANY)
    assert "1<|endoftext|>2" in all_of(tmp_path / "rows")


def test_parquet_files_are_read_as_the_same_rows_of_a_jsonl(tmp_path, texts, capsys):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    raw = pa.array([*(text.encode() for text in texts), None, b"K\xe4se", b" "])
    column = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    write_lines(tmp_path / "web.jsonl", [*texts, None, "K\0se", " "], field="body")
    lines = (tmp_path / "web.jsonl").read_bytes().replace(b"\\u0000", b"\xe4")
    write(tmp_path / "web.jsonl", lines)
    table = pa.table({"id": range(203), "body": column, "names": [["x"]] * 203})
    (tmp_path / "web").mkdir()
    parquet.write_table(table, tmp_path / "web" / "a.parquet", row_group_size=30)
    for n, source in enumerate(("web.jsonl", "web/a.parquet", "web", "web/*.parquet")):
        made = tmp_path / f"made{n}"
        make(made, tmp_path / source, field="body", max_bad_rows=0.01, **MANY)
        out = capsys.readouterr().out
        assert "2 of 203 rows cannot be read" in out and f"{201 if n else 401}: TypeError" in out
        assert all_of(made) == sorted([*texts, " "])
        for split in ("train", "val"):
            assert (ids(made, split) == ids(tmp_path / "made0", split)).all()
    for wrong in ("text", "id", "names"):
        with pytest.raises(BadInput, match=rf"no texts in '{wrong}'; .* one of \['body'\]$"):
            make(tmp_path / "made", tmp_path / "web", field=wrong)


def test_a_character_that_cannot_be_seen_is_named_with_the_form_that_has_it(tmp_path, capsys):
    one, two = "caf\u00e9 ", "cafe\u0301 "
    write(tmp_path / "one.txt", (one * 9).encode())
    write(tmp_path / "both.txt", (one * 9 + two * 9).encode())
    write_lines(tmp_path / "both.jsonl", [one * 9, two * 9])
    for n, name in enumerate(("both.txt", "both.jsonl", "one.txt")):
        _, meta = make(tmp_path / f"made{n}", tmp_path / name, "auto" if n != 1 else "byte")
        assert ("in the normal form NFC" in capsys.readouterr().out) == (name != "one.txt")
    with pytest.raises(BadInput, match=r"lacks 'e' U\+0301; in the normal form NFC it has all"):
        tokenizer_of(meta).encode(two)
    with pytest.raises(BadInput, match=r"lacks 'Z' U\+200B$"):
        tokenizer_of(meta).encode("Z\u200b")


# --- bad input ---


GOOD = b'{"text": "good"}\n'
BAD_FILES = [  # (name, content, the message)
    ("a.jsonl", GOOD + b"\n{oops\n", "a.jsonl:3: JSONDecodeError"),
    ("a.jsonl", GOOD + b'{"body": "x"}', "a.jsonl:2: KeyError: 'text'"),
    ("a.jsonl", b'{"text": 5}', "a.jsonl:1: TypeError: 'text' is no string"),
    ("a.jsonl", GOOD + b'{"text": "\xe4"}', "0xe4 in position 10"),
    ("a.jsonl", b'{"body": "x"}\n' * 100 + GOOD * 900, "expected --field=NAME, a text in each row"),
    ("b.txt", b"K\xe4se", r"b.txt is not UTF-8 text at the end of b'K\xe4'"),
    ("a.parquet", b"PAR1", "needs the library pyarrow; type: pip install pyarrow"),
    ("alone.txt", b"", "too short: 0 tokens to train on, 0 to validate; take more text"),
    ("alone.txt", b"abcdefghij", "too short: 9 tokens to train on, 1 to validate; take more"),
    ("alone.txt", b"Ein K\xe4se", r"is not UTF-8 text at the end of b'Ein K\xe4'"),
    ("a.txt.gz", gzip.compress(b"a text" * 99, mtime=0)[:-9], "fetch it again or leave it out"),
]


@pytest.mark.parametrize("name, content, words", BAD_FILES)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path, monkeypatch, name, content, words):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write(tmp_path / "web" / "a.txt", b"good")
    write(tmp_path / "web" / name, content)
    with pytest.raises(BadInput) as error:
        make(tmp_path / "data" / "made", tmp_path / "web" / (name if name == "alone.txt" else ""))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "data").exists()


def test_a_few_bad_rows_are_skipped_and_counted_and_more_are_refused(tmp_path, texts, capsys):
    lines = [json.dumps({"text": f"{i} {text}"}) for i in range(10) for text in texts]
    lines[3] = lines[7] = '{"body": 1}'  # early: judged at the end
    write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    make(tmp_path / "made", tmp_path / "a.jsonl", **MANY)
    out = capsys.readouterr().out
    assert "2 of 2,000 rows cannot be read (up to 0.1% are left out)" in out
    assert "the first: " in out and "a.jsonl:4: KeyError: 'text'" in out
    assert len(all_of(tmp_path / "made")) == 1_998
    lines[1_999] = "{oops"  # the third, past a thousandth: found at the end
    write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    with pytest.raises(BadInput, match="3 of 2,000 rows cannot .*a.jsonl:4: .*_bad_rows=0.003"):
        make(tmp_path / "more", tmp_path / "a.jsonl", **MANY)
    assert not (tmp_path / "more").exists()
    make(tmp_path / "more", tmp_path / "a.jsonl", max_bad_rows=0.002, **MANY)
