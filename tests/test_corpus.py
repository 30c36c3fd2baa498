"""A corpus: what becomes which token, the same for any number of processes and after any kill."""

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, pydoc_text, wait_for

import plumbing.corpus
from plumbing.corpus import only_process, read_documents
from plumbing.dataset import CORPORA, shards
from plumbing.tokenizers import END_OF_TEXT, DataError, decode
from prepare_data import open_dataset, prepare

SCRIPT = REPO / "prepare_data.py"
FOLDER = Path(os.environ.get("HONEST_DATA") or "/nonexistent")
needs_gpt2 = pytest.mark.skipif(
    not (FOLDER / "tiktoken_cache").is_dir(), reason="HONEST_DATA names no folder tiktoken_cache"
)
BOTH = ["byte", pytest.param("gpt2", marks=needs_gpt2)]
MANY = {"val_fraction": 0.1, "shard_tokens": 50_000}  # so that a small corpus has a few of all


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    if (FOLDER / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(FOLDER / "tiktoken_cache"))


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


def make(folder, source, tokenizer="byte", num_proc=1, say=quiet, **how):
    return prepare(
        folder.name, folder.parent, str(source), tokenizer, say, num_proc=num_proc, **how
    )


def ids_of(folder, split):
    meta = json.loads((folder / "meta.json").read_text())
    names = shards(meta, split)
    return np.concatenate([np.fromfile(folder / name, "uint16") for name in names])


def documents_of(folder, split):
    """The texts of a split, as their tokens say; each must end with its end-of-text."""
    meta = json.loads((folder / "meta.json").read_text())
    ids, end = ids_of(folder, split), END_OF_TEXT[meta["tokenizer"]]
    assert ids[-1] == end
    return [
        decode(part[part != end], meta) for part in np.split(ids, np.flatnonzero(ids == end) + 1)
    ][:-1]


def snapshot(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).iterdir()}


# --- what becomes of a document ---


@pytest.mark.parametrize("tokenizer", BOTH)
def test_each_document_is_there_once_in_order_with_its_end_of_text(
    tmp_path, corpus, texts, tokenizer
):
    said = []
    folder = tmp_path / "made"
    _, meta = make(folder, corpus, tokenizer, say=said.append, **MANY)
    parts = {split: documents_of(folder, split) for split in ("train", "val")}
    for part in parts.values():
        assert part == [text for text in texts if text in set(part)]
    assert sorted(parts["train"] + parts["val"]) == sorted(texts)
    assert 5 < len(parts["val"]) < 40  # a tenth
    assert meta["val_bytes"] == sum(len(text.encode()) for text in parts["val"])
    assert meta["vocab_size"] == {"byte": 256, "gpt2": 50257}[tokenizer]
    assert open_dataset("made", tmp_path) == (str(folder), meta)
    assert (
        f"{len(parts['train'])} documents to train on, {len(parts['val'])} to validate" in said[0]
    )


def test_shards_are_full_but_for_the_last_and_read_as_one(tmp_path, corpus):
    folder, small = tmp_path / "made", tmp_path / "small"
    _, meta = make(folder, corpus, **MANY)
    assert len(shards(meta, "train")) > 5
    for split in ("train", "val"):
        sizes = [(folder / name).stat().st_size for name in shards(meta, split)]
        assert set(sizes[:-1]) <= {100_000} and 0 < sizes[-1] <= 100_000
        assert sum(sizes) == 2 * meta[f"{split}_tokens"]
    assert sorted(snapshot(folder)) == sorted([*meta["sha256"], "meta.json"])
    make(small, corpus, val_fraction=0.1, shard_tokens=7_777)
    for split in ("train", "val"):
        assert np.array_equal(ids_of(folder, split), ids_of(small, split))


def test_the_bytes_are_the_same_for_any_number_of_processes(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(plumbing.corpus, "PIECE", 20_000)  # so that there is something to overtake
    made = [tmp_path / str(num_proc) for num_proc in (1, 2, 3)]
    for folder in made:
        make(folder, corpus, num_proc=int(folder.name), **MANY)
    assert snapshot(made[0]) == snapshot(made[1]) == snapshot(made[2])


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_validation_document_never_occurs_in_training(tmp_path, texts, num_proc):
    """Every document is planted three times, in files whose order differs between two corpora."""
    sides = []
    for order in (1, 2):
        copies = [*texts, *texts[::-1], *texts]
        random.Random(order).shuffle(copies)
        source = tmp_path / f"corpus{order}"
        for i in range(0, 600, 150):
            write_lines(source / f"{(order * i) % 7}{i}.jsonl", copies[i : i + 150])
        make(tmp_path / f"made{order}", source, num_proc=num_proc, **MANY)
        parts = [documents_of(tmp_path / f"made{order}", split) for split in ("train", "val")]
        assert len(parts[0]) + len(parts[1]) == 600
        assert not set(parts[0]) & set(parts[1])
        sides.append([sorted(part) for part in parts])
    assert sides[0] == sides[1]
    assert len(sides[0][1]) >= 15


def test_a_long_text_is_cut_at_line_ends_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(plumbing.corpus, "WHOLE_DOCUMENT", 50_000)
    monkeypatch.setattr(plumbing.corpus, "PART", 1_000)
    lines, spaces = pydoc_text()[:120_000], pydoc_text()[:120_000].replace("\n", " ")
    bare = "käse漢🐴" * 9_000  # neither line ends nor spaces, and characters of 1 to 4 bytes
    for text in (lines, spaces, bare):
        (tmp_path / "long.txt").write_text(text, newline="")
        items = list(read_documents([str(tmp_path / "long.txt")]))
        parts = [raw for _, _, raw in items]
        assert b"".join(parts) == text.encode() and len(parts) > 100
        assert all(len(part) <= 1_000 and part.decode() for part in parts)
        if text is lines:
            assert all(part.endswith(b"\n") for part in parts[:-1])
        offsets = [offset for _, offset, _ in items]
        assert offsets == [0, *np.cumsum([len(part) for part in parts])[:-1].tolist()]
    (tmp_path / "long.txt").write_bytes(lines.encode()[:50_000])
    (_,) = read_documents([str(tmp_path / "long.txt")])  # no longer: one document


def test_work_resumes_after_any_piece_as_if_it_had_not_stopped(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(plumbing.corpus, "WHOLE_DOCUMENT", 30_000)
    monkeypatch.setattr(plumbing.corpus, "PART", 5_000)
    monkeypatch.setattr(plumbing.corpus, "PIECE", 20_000)
    monkeypatch.setattr(plumbing.corpus, "SAVE_SECONDS", 0)
    text = pydoc_text()
    write(corpus / "e.txt", text[:70_000].encode())
    write(corpus / "f.txt.gz", gzip.compress(text[70_000:140_000].encode()))
    make(tmp_path / "whole", corpus, **MANY)
    real = plumbing.corpus.save_progress
    saves = 0

    def save_and_stop(*arguments):
        nonlocal saves
        real(*arguments)
        saves += 1
        raise OSError("stopped after one piece")

    with monkeypatch.context() as patch:
        patch.setattr(plumbing.corpus, "save_progress", save_and_stop)
        for _ in range(20):
            with pytest.raises(DataError, match="stopped after one piece"):
                make(tmp_path / "made", corpus, **MANY)
    assert saves == 20
    make(tmp_path / "made", corpus, **MANY)
    assert snapshot(tmp_path / "made") == snapshot(tmp_path / "whole")


def test_half_a_surrogate_pair_and_nul_become_replacement_characters(tmp_path):
    lines = (
        '{"text": "a\\ud83db\\u0000c"}\n{"text": ""}\n',
        *(f'{{"text": "{x}"}}\n' for x in "bcdefghi"),
    )
    (tmp_path / "a.jsonl").write_text("".join(lines))
    make(tmp_path / "made", tmp_path / "a.jsonl", val_fraction=0.5)
    documents = documents_of(tmp_path / "made", "train") + documents_of(tmp_path / "made", "val")
    assert sorted(documents) == ["a\ufffdb\ufffdc", *"bcdefghi"]


def test_a_glob_takes_the_files_that_it_matches_and_field_names_the_text(tmp_path, texts):
    for i, name in enumerate(("x1.jsonl", "x2.jsonl", "y.jsonl")):
        write_lines(tmp_path / "web" / name, texts[50 * i : 50 * i + 50], field="content")
    make(tmp_path / "made", tmp_path / "web" / "x*.jsonl", field="content", **MANY)
    documents = documents_of(tmp_path / "made", "train") + documents_of(tmp_path / "made", "val")
    assert sorted(documents) == sorted(texts[:100])


def test_zst_is_read_frame_after_frame(tmp_path, texts):
    zstandard = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    halves = [zstandard.compress(b"".join(half)) for half in (lines[:100], lines[100:])]
    write(tmp_path / "a.jsonl.zst", b"".join(halves))
    make(tmp_path / "made", tmp_path / "a.jsonl.zst", **MANY)
    documents = documents_of(tmp_path / "made", "train") + documents_of(tmp_path / "made", "val")
    assert sorted(documents) == sorted(texts)
    write(tmp_path / "a.jsonl.zst", b"".join(halves)[:-5])
    with pytest.raises(DataError, match="a.jsonl.zst is truncated or damaged"):
        make(tmp_path / "cut", tmp_path / "a.jsonl.zst", **MANY)


# --- killed, and started again ---

COMMAND = """
import sys, plumbing.corpus, prepare_data
plumbing.corpus.PIECE = 20_000
plumbing.corpus.SAVE_SECONDS = 0
name, data_dir, source, tokenizer, num_proc = sys.argv[1:]
prepare_data.prepare(name, data_dir, source, tokenizer, val_fraction=0.1, shard_tokens=20_000,
                     num_proc=int(num_proc))
"""


def start(tmp_path, name, source, tokenizer, num_proc):
    arguments = [name, str(tmp_path), str(source), tokenizer, str(num_proc)]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=SCRIPT.parent,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def full_shards(folder):
    """How many shards to train on are full, by progress.json."""
    try:
        sizes = json.loads((folder / "progress.json").read_text())["sizes"]
    except FileNotFoundError:
        return 0
    return sum(size == 40_000 for name, size in sizes.items() if name.startswith("train"))


def kill_after(process, folder, count):
    """SIGKILL to the process alone, when it has written down that so many shards are full."""
    wait_for(lambda: full_shards(folder) >= count or process.poll() is not None)
    assert process.poll() is None, "it was faster than this test"
    process.kill()
    process.wait()


def processes_of(group):
    """Those that are left of a process group."""
    fields = [path.read_text().rpartition(")")[2].split() for path in stats()]
    return [field for field in fields if int(field[2]) == group and field[0] != "Z"]


def stats():
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            path.read_text()
        except OSError:
            continue
        yield path


@pytest.mark.parametrize(
    "tokenizer, num_proc",
    [("byte", 2), pytest.param("gpt2", 1, marks=[needs_gpt2, pytest.mark.slow])],
)
def test_killed_and_started_again_the_bytes_are_those_of_an_undisturbed_run(
    tmp_path, corpus, texts, tokenizer, num_proc
):
    write_lines(corpus / "e.jsonl", [f"{n} {text}" for n in range(9) for text in texts])
    how = {"val_fraction": 0.1, "shard_tokens": 20_000}
    said = []
    make(tmp_path / "whole", corpus, tokenizer, **how, say=said.append)
    folder, finished = tmp_path / "killed", {}
    for more in (1, 3, 2):
        process = start(tmp_path, "killed", corpus, tokenizer, num_proc)
        kill_after(process, folder, len(finished) + more)
        wait_for(lambda process=process: not processes_of(process.pid))  # those that tokenize too
        assert not (folder / "meta.json").exists()
        done = full_shards(folder)
        assert done > len(finished)
        for path, written in finished.items():
            assert path.stat().st_mtime_ns == written  # it was not done again
        finished = {path: path.stat().st_mtime_ns for path in sorted(folder.glob("train*"))[:done]}
    process = start(tmp_path, "killed", corpus, tokenizer, num_proc)
    output, _ = process.communicate()
    assert process.returncode == 0 and "resuming in" in output
    of_the_whole = re.search(r"[\d.]+ bytes/token", said[-1]).group()
    assert of_the_whole in output
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())
    assert snapshot(folder) == snapshot(tmp_path / "whole")


@pytest.fixture
def unfinished(tmp_path, corpus, monkeypatch):
    """A folder of a corpus that is half made."""
    monkeypatch.setattr(plumbing.corpus, "PIECE", 20_000)
    monkeypatch.setattr(plumbing.corpus, "SAVE_SECONDS", 0)
    real, calls = plumbing.corpus.append, []

    def full(*arguments):
        calls.append(1)
        if len(calls) == 11:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(plumbing.corpus, "append", full)
        with pytest.raises(
            DataError, match="No space left on device; fix that, and the same command"
        ):
            make(tmp_path / "made", corpus, **MANY)
    assert {"progress.json", "train_00002.bin"} < set(snapshot(tmp_path / "made"))
    return tmp_path / "made"


def test_after_a_full_disk_the_same_command_resumes(tmp_path, corpus, unfinished):
    said = []
    make(unfinished, corpus, say=said.append, **MANY)
    assert "resuming in" in said[0]
    make(tmp_path / "whole", corpus, **MANY)
    assert snapshot(unfinished) == snapshot(tmp_path / "whole")


def change_a_file(corpus, folder):
    path = corpus / "c120.txt"
    path.write_bytes(path.read_bytes().swapcase())  # of the same size


def add_a_file(corpus, folder):
    write(corpus / "z.txt", b"one more")


def lose_a_shard(corpus, folder):
    os.remove(folder / "train_00001.bin")


def shorten_a_shard(corpus, folder):
    os.truncate(folder / "train_00000.bin", 5)


def tear_the_progress(corpus, folder):
    os.truncate(folder / "progress.json", 30)


@pytest.mark.parametrize(
    "change, words",
    [
        (change_a_file, "was begun from other files"),
        (add_a_file, "was begun from other files"),
        (lose_a_shard, "is damaged"),
        (shorten_a_shard, "is damaged"),
        (tear_the_progress, "is damaged"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_work_that_belongs_to_something_else_starts_over(
    tmp_path, corpus, unfinished, change, words
):
    change(corpus, unfinished)
    said = []
    make(unfinished, corpus, say=said.append, **MANY)
    assert words in said[0] and "starting over" in said[0]
    make(tmp_path / "whole", corpus, **MANY)
    assert snapshot(unfinished) == snapshot(tmp_path / "whole")


def test_other_options_are_another_work(tmp_path, corpus, unfinished):
    said = []
    make(unfinished, corpus, say=said.append, **MANY | {"val_fraction": 0.2})
    assert "options" in said[0] and "starting over" in said[0]


def test_two_processes_do_not_make_the_same_corpus_at_once(tmp_path, corpus):
    with only_process(str(tmp_path / "made"), quiet):
        done = command(tmp_path, "made", f"--input={corpus}", "--tokenizer=byte")
    assert done.returncode == 2 and "another process is making" in done.stderr
    assert not (tmp_path / "made").exists()


WITHOUT_LOCKS = """
import sys
sys.modules["fcntl"] = None  # as on Windows
import prepare_data
sys.exit(prepare_data.main(sys.argv[1:]))
"""


def test_a_system_without_file_locks_makes_the_same_and_says_once_what_it_lacks(tmp_path, corpus):
    make(tmp_path / "whole", corpus, **MANY)
    flags = [f"--input={corpus}", "--tokenizer=byte", "--num_proc=1", f"--data_dir={tmp_path}"]
    flags += [f"--{key}={value}" for key, value in MANY.items()]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCKS, "made", *flags],
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("no file locks") == 1
    assert snapshot(tmp_path / "made") == snapshot(tmp_path / "whole")


# --- a corpus that is there already, or was damaged ---


def test_a_corpus_that_is_there_is_checked_and_left_as_it_is(tmp_path, corpus):
    said = []
    first = make(tmp_path / "made", corpus, **MANY)
    before = snapshot(tmp_path / "made")
    assert make(tmp_path / "made", corpus, say=said.append, **MANY) == first
    assert "is there already, byte tokens of corpus (83 files" in said[0]
    add_a_file(corpus, None)
    with pytest.raises(DataError, match="holds another dataset"):
        make(tmp_path / "made", corpus, **MANY)
    assert snapshot(tmp_path / "made") == before


def flip(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, words",
    [
        (flip, "train_00002.bin was changed or damaged"),
        (os.remove, "train_00002.bin was changed or damaged: it has 0 bytes"),
        (
            lambda path: os.truncate(path, 100),
            "train_00002.bin was changed or damaged: it has 100 b",
        ),
        (lambda path: path.write_bytes(b"\xff\xff" * 50_000), "train_00002.bin was changed"),
    ],
)
def test_a_damaged_shard_is_named(tmp_path, corpus, damage, words):
    make(tmp_path / "made", corpus, **MANY)
    damage(tmp_path / "made" / "train_00002.bin")
    with pytest.raises(DataError) as error:
        open_dataset("made", tmp_path)
    assert words in str(error.value) and "--tokenizer=byte" in str(error.value)


# --- bad input ---


def command(tmp_path, *argv, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *argv, f"--data_dir={tmp_path}"],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    "files, source, words",
    [
        ({"a.jsonl": GOOD + b"\n{oops\n"}, "", ["a.jsonl:3 is not JSON", "one object a line"]),
        (
            {"a.jsonl": GOOD + b'{"body": "x"}'},
            "",
            ["a.jsonl:2 has no string in the field 'text'", "--field=body"],
        ),
        ({"a.jsonl": b'{"text": 5}'}, "", ["a.jsonl:1 has no string in the field 'text'"]),
        ({"a.jsonl": b'["text"]'}, "", ["a.jsonl:1 has no string in the field 'text'"]),
        ({"a.jsonl": b"[" * 99_999}, "", ["a.jsonl:1 is not JSON"]),
        (
            {"a.jsonl": GOOD + b'{"text": "\xe4"}'},
            "",
            ["a.jsonl:2 is not UTF-8: byte 0xe4 at offset 10"],
        ),
        (
            {"a.txt": b"good", "b.txt": b"K\xe4se"},
            "",
            ["b.txt is not UTF-8: byte 0xe4 at offset 1"],
        ),
        ({"a.txt": b"good", "b.png": b"x\0y"}, "", ["b.png is binary", "NUL byte at offset 1"]),
        (
            {"a.txt.gz": gzip.compress(b"a text" * 99)[:-9]},
            "",
            ["a.txt.gz is truncated or damaged"],
        ),
        ({"a.txt.gz": b"no gzip at all"}, "", ["a.txt.gz is truncated or damaged"]),
        ({"a.txt": b""}, "", ["1 files, 0 bytes"]),
        ({"a.txt": b"good"}, "/*.jsonl", ["0 files, 0 bytes", "expected text, .jsonl"]),
        ({"a.txt": b"good"}, "/b.jsonl", ["cannot read", "No such file"]),
        ({"a.txt": b"one document"}, "", ["too small: of 1 documents", "--val_fraction="]),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused_by_name_and_leaves_nothing(
    tmp_path, files, source, words
):
    for name, content in files.items():
        write(tmp_path / "web" / name, content)
    with pytest.raises(DataError) as error:
        make(tmp_path / "data" / "made", f"{tmp_path}/web{source}")
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message
    assert not (tmp_path / "data").exists()


def test_the_command_says_it_in_one_line_and_exits_2(tmp_path):
    """Two processes, of which one finds the error long after the first shard was full."""
    write(tmp_path / "web" / "a.jsonl", GOOD * 90_000 + b"{oops\n")
    argv = ["made", "--input=web", "--tokenizer=byte", "--num_proc=2", "--shard_tokens=50000"]
    done = command(tmp_path, *argv, "--val_fraction=0.5")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "web/a.jsonl:90001 is not JSON" in done.stderr
    assert os.listdir(tmp_path) == ["web"]


def test_an_offset_counts_from_the_beginning_of_a_long_text(tmp_path, monkeypatch):
    monkeypatch.setattr(plumbing.corpus, "WHOLE_DOCUMENT", 1_000)
    monkeypatch.setattr(plumbing.corpus, "PART", 100)
    write(tmp_path / "web" / "a.txt", b"a line\n" * 1_000 + b"\xff\n" + b"a line\n" * 1_000)
    with pytest.raises(DataError, match="a.txt is not UTF-8: byte 0xff at offset 7000 "):
        make(tmp_path / "made", tmp_path / "web")


@pytest.mark.parametrize("line", [b'{"text": "' + b"x" * 200_000, b" " * 200_000])
def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, line):
    monkeypatch.setattr(plumbing.corpus, "LONGEST_LINE", 100_000)
    monkeypatch.setattr(plumbing.corpus, "PIECE", 10_000)
    write(tmp_path / "a.jsonl", GOOD + line)
    with pytest.raises(DataError, match="a.jsonl:2: a line of more than 100,000 bytes"):
        make(tmp_path / "made", tmp_path / "a.jsonl")


def test_tokenizers_that_a_corpus_cannot_have_are_refused(tmp_path, corpus):
    for tokenizer, words in (("char", "--tokenizer=gpt2, or byte"), ("bpe", "unknown tokenizer")):
        with pytest.raises(DataError, match=words):
            make(tmp_path / "made", corpus, tokenizer)
    assert not (tmp_path / "made").exists()


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    for name in ("datasets", "zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    write(tmp_path / "a.txt.zst", b"whatever")
    with pytest.raises(DataError, match="needs zstandard; type: pip install zstandard"):
        make(tmp_path / "made", tmp_path / "a.txt.zst")
    for name in CORPORA:
        with pytest.raises(DataError, match=f"{name} needs datasets; type: pip install datasets"):
            prepare(name, tmp_path, tokenizer="byte")
        with pytest.raises(DataError, match=f"make it first: python prepare_data.py {name}"):
            open_dataset(name, tmp_path)
    assert os.listdir(tmp_path) == ["a.txt.zst"]


# --- what reads it ---


@needs_gpt2
def test_train_learns_a_sharded_corpus_and_sample_decodes_from_it(tmp_path, corpus, run_train):
    import sample

    made = command(
        tmp_path,
        *("web", "--input=corpus", "--shard_tokens=10000", "--val_fraction=0.02", "--num_proc=2"),
    )
    assert made.returncode == 0, made.stderr
    assert len(list((tmp_path / "web").glob("train_*.bin"))) > 8
    flags = ["--dataset=web", f"--data_dir={tmp_path}", "--max_steps=4", "--warmup_steps=1"]
    done = run_train("out", *flags)
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in done.rows("train")]
    assert len(losses) == 4 and 10 < losses[0] < 12 and losses[-1] < losses[0]
    model, meta = sample.rebuild(*sample.open_checkpoint(tmp_path / "out"))
    assert len(sample.sample_text(model, meta, block_size=16, max_new_tokens=20)) > 20
    again = run_train("out", *flags)
    assert again.returncode == 0 and "finished" in again.stdout
