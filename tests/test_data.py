"""prepare_data.py: what a dataset is, what bad input gets, and what a download may turn into."""

import contextlib
import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import HONEST_DATA, first, needs_gpt2, tree

import prepare_data
from plumbing import data
from plumbing.data import DataError, Offline, fingerprint, tokenizer_of
from prepare_data import get_dataset, prepare
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
    return subprocess.run(
        [sys.executable, str(SCRIPT), *argv, "--data_dir=data"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def refusal(tmp_path, *argv, **environment):
    """The one line that a bad command gets. Nothing may have been written."""
    before = tree(tmp_path)
    result = run(tmp_path, *argv, **environment)
    assert result.returncode == 2, result
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("prepare_data.py: ")
    assert tree(tmp_path) == before
    return result.stderr


def encode(text, meta):
    return tokenizer_of(meta).encode(text)


def decode(ids, meta):
    return tokenizer_of(meta).decode(ids)


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def ids(folder, split):
    meta = json.loads((Path(folder) / "meta.json").read_text())
    return np.fromfile(Path(folder) / f"{split}.bin", meta["dtype"])


# --- what a dataset is ---


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_dataset_is_the_whole_text_and_what_its_meta_says(tmp_path, text_file, tokenizer):
    result = run(tmp_path, "esel", f"--input={text_file}", f"--tokenizer={tokenizer}")
    assert (result.returncode, result.stderr) == (0, "")
    folder = tmp_path / "data" / "esel"
    assert files(folder) == ["meta.json", "train.bin", "val.bin"]
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
    assert get_dataset("wide", tmp_path) == (folder, meta)
    with pytest.raises(DataError, match=r"the vocabulary lacks 'Z' '~' '\\udc80'"):
        encode("ZZ~\udc80~", meta)


def test_pydoc_and_formula_need_no_network(tmp_path):
    result = run(tmp_path, "pydoc")
    assert result.returncode == 0, result.stderr
    folder, meta = get_dataset("pydoc", tmp_path / "data")
    assert meta["train_tokens"] > 100_000 and "CPython" in meta["source"]
    train, val = (decode(ids(folder, split), meta) for split in ("train", "val"))
    assert "statement" in train
    assert not any(val[at : at + 200] in train for at in range(0, len(val) - 200, 50))
    folder, meta = get_dataset("formula", tmp_path)
    assert meta["source"] == "products() in prepare_data.py (SHA-256 ad3d84f72e7e1417...)"
    assert "\n940 x 519 = 487860\n" in decode(ids(folder, "train"), meta)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_ids_are_decoded_as_a_whole_and_as_a_stream(tmp_path, text_file, tokenizer):
    """A stream never shows half a character."""
    _, meta = prepare("esel", tmp_path, str(text_file), tokenizer)
    first = encode("Käse reisen\n🐴", meta)
    assert decode(first, meta) == "Käse reisen\n🐴" == decode(first.tolist(), meta)
    assert decode([], meta) == "" and len(encode("", meta)) == 0
    pieces = list(stream(encode("Käse 🐴 & Esel", meta), tokenizer_of(meta)))
    assert "".join(pieces) == "Käse 🐴 & Esel" and len(pieces) > 3
    assert not any("\ufffd" in piece for piece in pieces)
    if tokenizer == "byte":  # what is no text at all is shown as such, as a whole it would be
        broken = [0xC3, 0xFF, 0xE2, 0x82, 0x41, 0xF0, 0x9F]
        whole = bytes(broken).decode(errors="replace")
        assert "".join(stream(broken, tokenizer_of(meta))) == whole


# --- a dataset that is there already ---


def test_a_dataset_is_never_overwritten_by_another(tmp_path, text_file):
    prepare("esel", tmp_path / "data", str(text_file))
    (tmp_path / "other.txt").write_text(TEXT + "!")
    for argv in (
        [f"--input={text_file}", "--tokenizer=byte"],
        ["--tokenizer=byte"],
        ["--input=other.txt"],
    ):
        err = refusal(tmp_path, "esel", *argv)
        assert "holds another dataset: char tokens of esel.txt" in err
        assert "choose another NAME" in err


# --- bad input ---


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["is empty", "expected UTF-8 text"]),
        (b"some text\0more", ["byte 0x00 at offset 9", "binary"]),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ["binary", "byte 0x00 at offset 8", "leave it out"]),
        (b"Ein K\xe4se", ["is not UTF-8: byte 0xe4 at offset 5", "iconv"]),
        ("Ein Käse".encode()[:6], ["is not UTF-8: byte 0xc3 at offset 5"]),
        (b"a", ["too short: 0 tokens to train on, 1 to validate"]),
        (b"abcdefghij", ["too short: 9 tokens to train on, 1 to validate", "more text"]),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path, content, words):
    (tmp_path / "bad.txt").write_bytes(content)
    err = refusal(tmp_path, "bad", "--input=bad.txt")
    assert all(word in err for word in words), err


def test_utf_16_is_named_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "wide text.txt").write_bytes(TEXT.encode("UTF-16"))
    err = refusal(tmp_path, "esel", "--input=wide text.txt")
    assert "is UTF-16, not UTF-8" in err and "latin1" not in err
    advice = err.partition("type: ")[2].strip()
    subprocess.run(advice, shell=True, cwd=tmp_path, check=True)
    done = run(tmp_path, "esel", "--input=NEW.txt")
    assert done.returncode == 0, done.stderr
    assert decode(ids(tmp_path / "data/esel", "train"), data.verified_meta(tmp_path / "data/esel"))


def test_a_byte_order_mark_is_removed_and_crlf_is_one_newline_and_that_is_said(tmp_path):
    (tmp_path / "esel.txt").write_bytes(("\ufeff" + TEXT.replace("\n", "\r\n")).encode())
    done = run(tmp_path, "esel", "--input=esel.txt")
    assert "removed 1 byte order marks" in done.stdout
    assert "40 line ends were CRLF and are newlines now" in done.stdout
    folder = tmp_path / "data/esel"
    meta = data.verified_meta(folder)
    text = "".join(decode(ids(folder, split), meta) for split in ("train", "val"))
    assert text == TEXT and "\r" not in meta["chars"]
    assert meta["val_bytes"] == len(decode(ids(folder, "val"), meta).encode())


BAD_COMMANDS = """
x --input=none.txt                  cannot read none.txt
x --input=. --tokenizer=char        one text of up to 32 MB
x --input=esel.txt --tokenizer=bpe  --tokenizer=char|byte|gpt2
x                                   prepare_data.py x --input=FILE
a/b --input=esel.txt                NAME is made of letters
.. --input=esel.txt                 NAME is made of letters
x y                                 expected one NAME, found 2
x --inputs=esel.txt                 did you mean --input=esel.txt?
shakespeare --input=esel.txt        not the text that shakespeare
pydoc --input=esel.txt              not the text that pydoc
"""


@pytest.mark.parametrize("line", BAD_COMMANDS.strip().splitlines())
def test_a_bad_command_gets_one_line_that_says_what_to_type(tmp_path, text_file, line):
    argv, words = re.split("   *", line)
    assert words in refusal(tmp_path, *argv.split())


@pytest.mark.parametrize("fits", [0, 1, 2])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, text_file, monkeypatch, fits):
    real = os.fsync
    synced = []

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) > fits:  # of the three files
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        prepare("esel", tmp_path, str(text_file))
    assert not (tmp_path / "esel").exists()


def test_a_gpt2_vocabulary_that_cannot_be_had_is_one_clear_line(tmp_path, text_file):
    pytest.importorskip("tiktoken")
    proxies = {key: NOWHERE for key in ("https_proxy", "HTTPS_PROXY")}
    err = refusal(
        tmp_path,
        *("esel", f"--input={text_file}", "--tokenizer=gpt2"),
        **proxies,
        no_proxy="",
        NO_PROXY="",
        TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"),
    )
    assert "vocabulary" in err and "--tokenizer=byte" in err


# --- a dataset that was damaged ---


def flip_byte(folder):
    content = bytearray((folder / "val.bin").read_bytes())
    content[-2] ^= 1
    (folder / "val.bin").write_bytes(content)


def id_past_the_vocabulary(folder):
    meta, values = json.loads((folder / "meta.json").read_text()), ids(folder, "val")
    values[3] = meta["vocab_size"]
    values.tofile(folder / "val.bin")
    meta["sha256"]["val.bin"] = hashlib.sha256(values).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))


def other_bytes(folder):
    """So that bits per byte would be 4% too low."""
    meta = json.loads((folder / "meta.json").read_text())
    meta["val_bytes"] = round(1.04 * meta["val_bytes"])
    (folder / "meta.json").write_text(json.dumps(meta))


def pipe_as_meta(folder):
    (folder / "meta.json").unlink()
    os.mkfifo(folder / "meta.json")


NO_META = "meta.json does not describe a dataset"
CHANGED_META = [  # (what is changed, in meta.json, the message)
    ({"dtype": "float32"}, NO_META),
    ({"dtype": "uint32"}, "train.bin was changed or damaged: it has 1,908 bytes"),
    ({"dtype": None}, NO_META),
    ({"vocab_size": 1}, NO_META),
    ({"val_tokens": -5}, NO_META),
    ({"train_tokens": float("nan")}, NO_META),
    ({"chars": [1, 2]}, NO_META),
    ({"sha256": ["train.bin", "val.bin"]}, NO_META),
    ({"sha256": {"train.bin": None, "val.bin": 5}}, "was changed or damaged"),
    ({"tokenizer": "bpe"}, NO_META),
    (b"null", NO_META),
    (b"[" * 100_000, NO_META),
    (b"\xff\xfe{}", NO_META),
]
DAMAGES = [
    (flip_byte, "val.bin was changed or damaged"),
    (lambda folder: os.truncate(folder / "train.bin", 100), "train.bin was changed or damaged: it"),
    (lambda folder: os.remove(folder / "val.bin"), "val.bin was changed or damaged: it has 0"),
    (id_past_the_vocabulary, "but vocab_size is"),
    (other_bytes, "bytes of text, but meta.json says"),
    (pipe_as_meta, "meta.json is no regular file"),
]


@pytest.mark.parametrize("damage, words", DAMAGES + CHANGED_META)
def test_a_damaged_dataset_is_refused_with_what_to_type(tmp_path, text_file, damage, words):
    folder, meta = prepare("esel", tmp_path, str(text_file))
    if callable(damage):
        damage(Path(folder))
    else:
        content = damage if isinstance(damage, bytes) else json.dumps(meta | damage).encode()
        (Path(folder) / "meta.json").write_bytes(content)
    before = tree(tmp_path)
    for opener in (get_dataset, prepare):
        with pytest.raises(DataError) as error:
            opener("esel", tmp_path)
        message = str(error.value)
        assert words in message and "\n" not in message
        assert f"delete {folder}/meta.json" in message and "prepare_data.py esel" in message
    assert tree(tmp_path) == before
    os.remove(Path(folder) / "meta.json")  # now it is unfinished, and made anew
    assert prepare("esel", tmp_path, str(text_file)) == (folder, meta)


# --- downloads ---


class Server(http.server.BaseHTTPRequestHandler):
    """Answers each path with another thing that a download may turn into."""

    def do_GET(self):
        self.server.asked.append(self.path)
        text = SHAKESPEARE.read_bytes() if SHAKESPEARE.is_file() else b"x" * 1_115_394
        if self.path == "/portal":
            self.send_response(302)
            self.send_header("Location", "/login")
            self.end_headers()
            return
        if self.path == "/drip":
            self.send_response(200)
            self.send_header("Content-Length", "1115394")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            return
        is_first = self.path == "/flaky" and len(self.server.asked) < 3
        kind, content, length = "text/plain", text, len(text)
        if self.path == "/login":
            kind, content = "text/html", b"<!doctype html><p>Please log in"
            length = len(content)
        elif self.path == "/cut" or is_first:
            content = text[:500_000]
        elif self.path == "/wrong":
            content = b"?" + text[1:]
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client had enough
            self.wfile.write(content)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.asked, server.url = [], f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


@needs_shakespeare
@pytest.mark.parametrize("path, requests", [("/good", 1), ("/flaky", 3)])
def test_shakespeare_is_downloaded_once_and_kept(tmp_path, server, path, requests):
    result = run(tmp_path, "shakespeare", SHAKESPEARE_URL=server.url + path)
    assert (result.returncode, result.stderr) == (0, "")
    folder = tmp_path / "data" / "shakespeare"
    assert files(folder) == ["input.txt", "meta.json", "train.bin", "val.bin"]
    assert (folder / "input.txt").read_bytes() == SHAKESPEARE.read_bytes()
    assert len(server.asked) == requests

    one = get_dataset("shakespeare", tmp_path / "data")[1]
    assert run(tmp_path, "shakespeare", f"--input={SHAKESPEARE}").returncode == 0  # or a copy
    assert fingerprint(get_dataset("shakespeare", tmp_path / "data")[1]) == fingerprint(one)

    os.remove(folder / "meta.json")  # made again from the text that was kept
    assert run(tmp_path, "shakespeare").returncode == 0
    assert get_dataset("shakespeare", tmp_path / "data")[1]["train_tokens"] == 1_003_854

    os.remove(folder / "meta.json")  # the text was changed: it comes anew
    (folder / "input.txt").write_bytes(b"?" + SHAKESPEARE.read_bytes()[1:])
    result = run(tmp_path, "shakespeare", SHAKESPEARE_URL=server.url + "/good")
    assert result.returncode == 0, result.stderr
    assert len(server.asked) == requests + 1
    assert (folder / "input.txt").read_bytes() == SHAKESPEARE.read_bytes()


NO_TEXT = [
    ("/cut", ["text/plain from http", "500,000 bytes with SHA-256"]),
    ("/portal", ["text/html from http", "/login"]),
    ("/wrong", ["1,115,394 bytes with SHA-256"]),
]


@pytest.mark.parametrize("path, words", first(1, NO_TEXT))
def test_a_download_that_is_not_the_text_is_refused_after_retries(tmp_path, server, path, words):
    err = refusal(tmp_path, "shakespeare", SHAKESPEARE_URL=server.url + path)
    always = ["expected 1,115,394 bytes", prepare_data.SHAKESPEARE_SHA256, "--input=FILE"]
    assert all(word in err for word in words + always), err
    assert server.asked.count(path) == 3


def test_no_network_is_noticed_quickly_and_told_apart(tmp_path, monkeypatch):
    start = time.monotonic()
    err = refusal(tmp_path, "shakespeare", SHAKESPEARE_URL=NOWHERE)
    assert "cannot reach http://127.0.0.1:9: " in err and "Connection refused" in err
    assert "pydoc needs no network" in err
    assert time.monotonic() - start < 5
    monkeypatch.setattr(prepare_data, "TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url in (
            "http://no-such-host.invalid/input.txt",
            f"http://127.0.0.1:{silent.getsockname()[1]}",
        ):
            monkeypatch.setenv("SHAKESPEARE_URL", url)
            with pytest.raises(Offline, match="cannot reach|timed out"):
                get_dataset("shakespeare", tmp_path)
    assert tree(tmp_path) == {}
