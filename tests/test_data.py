"""prepare_data.py: what a dataset is, what bad input gets, and what a download may turn into."""

import gzip
import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from conftest import tree

import prepare_data
from plumbing import BadInput, Offline
from prepare_data import TOKENIZERS, prepare, start_and_end, tokenizer_of, verified_meta

HONEST_DATA = Path(os.environ.get("HONEST_DATA") or os.devnull)  # which holds no file
if has_gpt2 := (HONEST_DATA / "tiktoken_cache").is_dir():
    os.environ["TIKTOKEN_CACHE_DIR"] = str(HONEST_DATA / "tiktoken_cache")
needs_gpt2 = pytest.mark.skipif(not has_gpt2, reason="HONEST_DATA has no folder tiktoken_cache")
GPT2 = pytest.param("gpt2", marks=needs_gpt2)
SHAKESPEARE = HONEST_DATA / "tinyshakespeare" / "input.txt"
TEXT = "Ein Esel, ein Käse & ein 🐴: \nsie reisen nach Bremen.\n" * 20
TEXTS = ["".join(f"{i} x {j} = {i * j}\n" for j in range(150)) for i in range(200)]
TEXTS = [f"Nº {i}\n{text}" for i, text in enumerate(TEXTS)]
# No test leaves this machine: one that downloads says from where. Nothing listens at this port.
os.environ |= {"SHAKESPEARE_URL": "http://127.0.0.1:9", "no_proxy": "*"}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"  # holds TEXTS in their order
    write_lines(folder / "a.jsonl", TEXTS[:60])
    write_lines(folder / "b.jsonl.gz", TEXTS[60:120])
    for i in range(120, 200):
        write(folder / (f"c{i}.txt" if i < 160 else f"d/{i}.txt.gz"), TEXTS[i])
    write(folder / ".hidden.txt", "left out")
    write(folder / "d" / "empty.txt", "")
    return folder


@pytest.fixture
def command(run_train):
    """command(*words, code=0, **environment) -> Done: python prepare_data.py WORDS in tmp_path."""

    def run(*words, code=0, **environment):
        source = f"import prepare_data\nraise SystemExit(prepare_data.main({[*map(str, words)]}))"
        return run_train("unused", before=source, code=code, env=environment)

    return run


@pytest.fixture
def refusal(command, tmp_path):
    """refusal(*words): the one line that a bad command gets. No file may have been written."""

    def run(*words):
        before = tree(tmp_path)
        done = command(*words, code=2)
        done.is_one_line()
        assert tree(tmp_path) == before
        return done.stderr

    return run


def make(folder, source, tokenizer="byte", **knobs):
    """prepare() with these knobs. Returns the meta."""
    with patch.dict(vars(prepare_data), knobs):
        return prepare(folder.name, str(folder.parent), str(source), tokenizer)[1]


def write(path, content):
    content = content if isinstance(content, bytes) else content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def write_lines(path, texts, field="text"):
    write(path, "".join(json.dumps({"id": 1, field: text}) + "\n\n" for text in texts))


def text_of(folder, *splits):
    meta = verified_meta(str(folder))
    ids = [np.fromfile(folder / f"{split}.bin", meta["dtype"]) for split in splits]
    assert [meta[f"{split}_tokens"] for split in splits] == [*map(len, ids)]
    return tokenizer_of(meta).decode(np.concatenate(ids).tolist())


def documents_of(folder, *splits):
    """The texts of the splits, as their tokens say; each must end with its end-of-text."""
    kind = TOKENIZERS[verified_meta(str(folder))["tokenizer"]]
    *documents, rest = text_of(folder, *splits).split(kind({}).decode([kind.end_of_text]))
    assert not rest
    return documents


# ---- what a command writes -----------------------------------------------------------------------

KNOWN = [  # SHA-256 of meta.json, train.bin and val.bin, as made in November 2026
    ("text", "char", 0.0, "7fd63e30 3803c225 022aea02"),
    ("text", "byte", 0.25, "a084914b f4797851 f0e48f42"),
    ("wide", "char", 0.0, "c427bd51 815e2967 ea4d60da"),
    ("long", "byte", 0.0, "c19f5d93 395cddbd ce3f655f"),
    ("web", "byte", 0.0, "4d9e3e19 a32dc8d9 9d892501"),
    ("web", "byte", 0.1, "d105c4b9 18937b45 3e62d610"),
    pytest.param("web", "gpt2", 0.0, "85c9dd4b 8ba5eafc 5bef6dfd", marks=needs_gpt2),
]


@pytest.mark.parametrize("source, tokenizer, fraction, digests", KNOWN)
def test_a_command_writes_the_bytes_it_always_wrote(
    command, tmp_path, source, tokenizer, fraction, digests
):
    write(tmp_path / "text", TEXT)
    write(tmp_path / "wide", "".join(map(chr, range(0x10000, 0x10000 + 70_000))))  # 32-bit ids
    long = ["".join(TEXTS) * 4, "käse 漢🐴" * 200_000]
    write(tmp_path / "long" / "long.txt", "<|endoftext|>".join(long))
    write_lines(tmp_path / "web" / "a.jsonl", TEXTS[:100])
    for i in range(100, 150):
        write(tmp_path / "web" / f"{i}.txt", "\ufeff" + TEXTS[i].replace("\n", "\r\n"))
    write(tmp_path / "web" / "separated.txt", "<|endoftext|>\n".join(TEXTS[150:]))
    flags = [f"--input={source}", f"--tokenizer={tokenizer}", f"--val_fraction={fraction}"]
    done = command("made", *flags)
    assert not done.stderr and "warning" not in done.stdout
    made = tree(tmp_path / "data" / "made").values()
    assert " ".join(hashlib.sha256(content).hexdigest()[:8] for content in made) == digests
    if source == "text":
        assert text_of(tmp_path / "data" / "made", "train", "val") == TEXT


def test_pydoc_and_formula_need_no_network(tmp_path):
    prepare("pydoc", str(tmp_path))
    train, val = (text_of(tmp_path / "pydoc", split) for split in ("train", "val"))
    assert not any(val[at : at + 200] in train for at in range(0, len(val) - 200, 50))
    assert "(SHA-256 ad3d84f72e7e1417...)" in prepare("formula", str(tmp_path))[1]["source"]


@pytest.mark.skipif(not SHAKESPEARE.is_file(), reason="HONEST_DATA has no tinyshakespeare")
def test_shakespeare_is_downloaded_or_copied(command):
    done = command("shakespeare", SHAKESPEARE_URL=SHAKESPEARE.as_uri())
    assert not done.stderr and "1,003,854 tokens" in done.stdout
    assert "is there already" in command("shakespeare", f"--input={SHAKESPEARE}").stdout


def test_only_a_server_without_an_answer_is_offline(tmp_path, monkeypatch):
    with pytest.raises(Offline, match="cannot get http://127.0.0.1:9: .*pydoc needs no network"):
        prepare("shakespeare", str(tmp_path / "data"))
    write(tmp_path / "cut.txt", "First Citizen:")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for path, words in (("none", "404"), ("cut.txt", "has 14 bytes and is not TinyShakesp")):
            monkeypatch.setenv("SHAKESPEARE_URL", f"http://127.0.0.1:{server.server_port}/{path}")
            with pytest.raises(BadInput, match=words) as error:
                prepare("shakespeare", str(tmp_path / "data"))
            assert not isinstance(error.value, Offline) and not (tmp_path / "data").exists()
        server.shutdown()


def test_a_dataset_is_never_overwritten_by_one_of_other_flags(command, refusal, tmp_path):
    write(tmp_path / "esel.txt", TEXT)
    write(tmp_path / "other.txt", TEXT + "!")
    flags = ["esel", "--input=esel.txt", "--val_fraction=0.25"]
    command(*flags)
    assert "is there already" in command(*flags).stdout
    for other in ("--tokenizer=byte", "--val_fraction=0.2", "--input=other.txt"):
        for words in ([*flags, other], ["esel", other]):
            assert "holds another dataset: char tokens of esel." in refusal(*words)
    assert text_of(tmp_path / "data" / "esel", "val") == TEXT[int(0.75 * len(TEXT)) :]


def test_a_damaged_dataset_is_refused_with_what_to_type(tmp_path):
    write(tmp_path / "esel.txt", TEXT)
    meta = make(tmp_path / "esel", tmp_path / "esel.txt")
    flipped = bytearray((tmp_path / "esel" / "train.bin").read_bytes())
    flipped[0] ^= 1
    whole = tree(tmp_path / "esel")
    damages = [("val.bin", bytes(9)), ("train.bin", bytes(flipped))]
    for name, content in (*damages, ("meta.json", "null"), ("meta.json", "{}")):
        write(tmp_path / "esel" / name, content)
        with pytest.raises(BadInput, match="damaged .*; delete .*esel/meta.json and type"):
            prepare("esel", str(tmp_path))
        for path, content in whole.items():
            write(path, content)
    os.remove(tmp_path / "esel" / "meta.json")  # now it is incomplete, and made anew
    assert make(tmp_path / "esel", tmp_path / "esel.txt") == meta


KILLED = """
import prepare_data
def draw_of(text, inner=prepare_data.draw_of, drawn=[]):
    drawn.append(text)
    return os.kill(os.getpid(), 9) if len(drawn) == 100 and not LAST else inner(text)
def replace(path, target, inner=os.replace):
    os.kill(os.getpid(), 9) if target == f"./made/{LAST}" else inner(path, target)
prepare_data.draw_of, os.replace = draw_of, replace
prepare_data.BATCH, prepare_data.val_fraction = 10, 0.1
prepare_data.prepare("made", ".", "corpus", "byte")
"""


@pytest.mark.parametrize("last", ["", "train.bin", "val.bin", "meta.json"])
def test_after_a_kill_a_rerun_writes_the_same_bytes(run_train, tmp_path, corpus, last):
    """The kill comes in the middle of the documents, or before the file `last` is moved."""
    make(tmp_path / "whole" / "made", corpus, val_fraction=0.1)
    run_train("unused", before=f"LAST = {last!r}\n{KILLED}", code=137)
    with pytest.raises(BadInput, match="no dataset 'made'"):
        prepare("made", str(tmp_path))
    make(tmp_path / "made", corpus, val_fraction=0.1, CHUNK=1000, BATCH=3)
    whole = tree(tmp_path / "whole" / "made").values()
    assert [*tree(tmp_path / "made").values()] == [*whole] and len(whole) == 3


# ---- tokenizers, a corpus ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["char", "byte", GPT2])
def test_a_tokenizer_gives_a_text_back(name):
    tokenizer = tokenizer_of({"tokenizer": name, "chars": "".join(sorted(set(TEXT)))})
    for text in (TEXT, "Käse 🐴", "\n", ""):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text == tokenizer.decode([int(i) for i in tokens])
    assert tokenizer.decode([tokenizer.newline]) == "\n"
    assert start_and_end({"tokenizer": name, "start_id": 3}) == (3, -1)
    with pytest.raises(BadInput, match="no tokenizer 'bpe' in TOKENIZERS of prepare_data.py"):
        tokenizer_of({"tokenizer": "bpe"})


def test_what_a_tokenizer_loses_is_printed(tmp_path, capsys, monkeypatch):
    """One of one's own, whose decode(encode(text)) is not the text."""

    class Lower(TOKENIZERS["byte"]):
        def encode(self, text):
            return list(text.lower().encode())

    monkeypatch.setitem(TOKENIZERS, "lower", Lower)
    for i in range(5):
        write(tmp_path / "web" / f"{i}.txt", "nothing to lose\n" * i + "Esel" * (i % 2))
    make(tmp_path / "x", tmp_path / "web", "lower")
    warning = r"changes 2 of the first 4 documents: 'g to lose\nEsel' becomes 'g to lose\nesel'"
    printed = capsys.readouterr().out
    assert printed.count("warning") == 1 and warning in printed


def test_a_validation_document_never_occurs_in_training(tmp_path):
    sides = []
    for order in (1, 2):  # of files, in which every document is planted three times
        copies = TEXTS * 3
        random.Random(order).shuffle(copies)
        source = tmp_path / f"corpus{order}"
        for i in range(0, 600, 150):
            write_lines(source / f"{order * i % 7}{i}.jsonl", copies[i : i + 150], field="content")
        folder = tmp_path / f"made{order}"
        make(folder, source / "*.jsonl", field="content", val_fraction=0.1)
        made = [sorted(documents_of(folder, split)) for split in ("train", "val")]
        assert sorted(made[0] + made[1]) == sorted(copies) and not set(made[0]) & set(made[1])
        sides.append(made)
    assert sides[0] == sides[1] and len(sides[0][1]) >= 15


def test_parquet_files_are_read_as_the_same_rows_of_a_jsonl(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "web").mkdir()
    table = pa.table({"id": range(202), "body": [*TEXTS, None, " "]})
    parquet.write_table(table, tmp_path / "web" / "a.parquet", row_group_size=30)
    write_lines(tmp_path / "web.jsonl", [*TEXTS, None, " "], field="body")
    knobs = {"field": "body", "max_bad_rows": 0.01, "val_fraction": 0.1}
    rows = make(tmp_path / "rows", tmp_path / "web.jsonl", **knobs)
    assert make(tmp_path / "made", tmp_path / "web", **knobs)["sha256"] == rows["sha256"]
    with pytest.raises(BadInput, match=r"no column 'text'; .* one of \['id', 'body'\]"):
        make(tmp_path / "none", tmp_path / "web")


# ---- bad input -----------------------------------------------------------------------------------

ODD_FILES = [
    ("nul.txt", TEXT.encode() + b"\0\0" + TEXT.encode()),
    ("latin.txt", TEXT.replace("🐴", "").encode("latin1")),
    ("Esel's text.txt", TEXT.encode("UTF-16")),
    ("misnamed.txt", gzip.compress(TEXT.encode(), mtime=0)),
    ("array.json", json.dumps([{"text": TEXT}, TEXT]).encode()),
    ("lines.json", json.dumps({"text": TEXT}).encode() + b'\n{"text": "text"}\n'),
]


@pytest.mark.parametrize("name, content", ODD_FILES)
def test_what_is_printed_for_an_odd_file_leads_to_a_dataset(tmp_path, name, content):
    write(tmp_path / name, content)
    with pytest.raises(BadInput, match=f"{name} is not ") as error:
        make(tmp_path / "x", tmp_path / name)
    command, then = re.search("type: (.+); then take (.+) instead", str(error.value)).groups()
    subprocess.run(command, shell=True, check=True)
    make(tmp_path / "x", shlex.split(then)[0])
    text = text_of(tmp_path / "x", "train")
    assert "Käse" in text and "{" not in text


BAD_FILES = [
    ("a.jsonl", b'{"text": "good"}\n\n{oops\n', "a.jsonl:3: JSONDecodeError"),
    ("a.parquet", b"PAR1", "needs the library pyarrow; type: pip install pyarrow"),
    ("b.gz", gzip.compress(b"a text" * 99, mtime=0)[:-9], "fetch it again or leave it out"),
    ("x", b"%PDF-1.7", "PDF; type: pdftotext {} {}.txt"),
    ("alone", b"", "is too short: 0 tokens to train on, 0 to validate; take more text"),
    ("alone", b"abcdefghij", "is too short: 9 tokens to train on, 1 to validate; take more text"),
]


@pytest.mark.parametrize("name, content, words", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path, monkeypatch, name, content, words):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write(tmp_path / "web" / "0.txt", b"good")
    (tmp_path / "web" / name).write_bytes(content)
    with pytest.raises(BadInput) as error:
        make(tmp_path / "made", tmp_path / "web" / (name if name == "alone" else ""))
    assert words.replace("{}", f"{tmp_path}/web/{name}") in str(error.value)
    assert "\n" not in str(error.value) and not (tmp_path / "made").exists()


BAD_COMMANDS = """
--input=esel.txt                            expected one NAME, found 0
shakespeare                                 cannot get http://127.0.0.1:9: .*; .*pydoc needs no
x                                           prepare_data.py x --input=FILE
a/b --input=esel.txt                        NAME is made of letters
x --input=none*.txt                         no file of this name, in this folder or of this
x --input=esel.txt --tokenizer=none         --tokenizer=none: expected auto, char, byte, gpt2
x --input=. --tokenizer=char                char takes one text of up to 32,000,000 bytes
x --input=esel.txt --val_fraction=1         --val_fraction=1.0: expected a share, at least 0 and
x --input=esel.txt --max_bad_rows=-0.1      --max_bad_rows=-0.1: expected a share, from 0 to 1
x --input=esel.txt --data_dir=esel.txt/d    cannot write esel.txt/d/x
"""


@pytest.mark.parametrize("line", BAD_COMMANDS.strip().splitlines())
def test_a_bad_command_gets_one_line_that_says_what_to_type(refusal, tmp_path, line):
    write(tmp_path / "esel.txt", TEXT)
    words, expected = re.split("   *", line)
    assert re.search(expected, refusal(*words.split()))
