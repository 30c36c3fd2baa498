"""Make the datasets that train.py reads, data/NAME/{train.bin,val.bin,meta.json}:

    python prepare_data.py shakespeare                       # TinyShakespeare, downloaded once
    python prepare_data.py pydoc                             # CPython's own manual: no network
    python prepare_data.py formula                           # products, the same text everywhere
    python prepare_data.py NAME --input=FILE                 # any UTF-8 text
    python prepare_data.py NAME --input=FILE --tokenizer=gpt2
    python prepare_data.py NAME --input=FOLDER               # a corpus of any size: gpt2 tokens
    python prepare_data.py NAME --input='web/*.{md,txt}'     # a pattern, in quotes
    python prepare_data.py NAME --input='web/*.parquet' --field=content

The last tenth of a text, or its last val_fraction, is held out for validation. A dataset that exists
is never overwritten. A corpus is streamed: a folder (its files sorted by path, without hidden ones),
a pattern, a .jsonl (one object a line), a .parquet (needs the library pyarrow), a .gz of a text or
.jsonl, or a text of more than 32 MB.
- A row of a .jsonl or .parquet is a document, and so is a text file. In a text of any size,
  `<|endoftext|>` separates documents, with up to one newline on each side; for char, and in a row,
  it is ordinary text. A text file longer than WHOLE_DOCUMENT is split into documents of up to PART,
  at line ends if it has any. An end-of-text id follows each document: 50256 for gpt2, 0 for byte.
- A document goes to val if the hash of its content, as a fraction, is below val_fraction. So copies
  of a document share a split, and the order of files does not matter. Without a val_fraction it is
  DEFAULT_FRACTION, doubled until enough is held out; of one or two documents, the last tenth of each
  is held out. With the val_fraction that is printed, no document changes sides when others are added.
- A byte order mark is removed, CRLF becomes a newline, NUL and half a surrogate pair become U+FFFD.
  Rows that cannot be read are left out, up to max_bad_rows. All of that is printed, and a warning if
  the tokenizer's decode(encode(text)) is not the text.
- A sample of train.py or sample.py begins after start_id in meta.json: the end-of-text id if the
  data has it, else a newline, else the first id of the text. It ends at the end-of-text id.
"""

import contextlib
import glob
import gzip
import hashlib
import http.client
import importlib
import json
import os
import re
import shlex
import sys
import tempfile
import unicodedata
import urllib.error
import urllib.request
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from plumbing import (
    Offline,
    configured,
    digest_of,
    exit_process,
    fail,
    print0,
    write_json,
)

# What to make, and where
data_dir = "data"  # the dataset's folder is made in this one
input = ""  # a UTF-8 text, .jsonl, .parquet, folder or pattern; "" = the text that NAME stands for
tokenizer = "auto"  # auto, char, byte, gpt2 or your own; auto: char for a text, gpt2 for a corpus
chars_of = ""  # another dataset, whose tokenizer and characters are used: its weights then fit both
val_fraction = 0.0  # share to hold out, in [0, 1); 0 = a tenth of a text, enough of a corpus

# Of a corpus
field = "text"  # the field of a .jsonl object, or the column of a .parquet, that holds the text
max_bad_rows = 0.001  # share of the rows that may be left out as unreadable, in [0, 1]

# Sizes in bytes, unless another unit is named
WHOLE_TEXT = 32_000_000  # a plain text up to this size is read whole (char: up to 0.5 GB of memory)
WHOLE_DOCUMENT = 1_000_000  # a text file up to this size is one document, as most novels are
PART = 64_000  # largest document cut from a longer file; small, so that val gets enough of them
MIN_VAL = 16_000  # to hold out at least, or a twentieth of the text if that is less
CHUNK = 1_000_000  # read at a time, and to the end of the line
HEAD = 64_000  # of a file: enough to tell what it is
CHECKED = 1_000_000  # characters that the tokenizer must give back unchanged
BATCH = 64  # documents that are read, and tokenized, at a time
DEFAULT_FRACTION = 0.0005  # of the documents of a corpus
SEPARATOR = "<|endoftext|>"  # the border of two documents in a plain text
CLEANED = "taken out: byte order marks; replaced: CRLF by a newline, what is no character by U+FFFD"
DECOMPOSED = (
    "some characters are not in the normal form NFC, such as e and U+0301 for é, and so one letter "
    "may be different tokens; unicodedata.normalize('NFC', text) in Python makes them one"
)
BORDERS = "{:,} <|endoftext|> are borders of documents"

FALLBACK = {"shakespeare": "pydoc"}  # what train.py takes where the first cannot be downloaded
SHAKESPEARE_URL = (  # the environment variable of this name gives another, such as file://
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
WITHOUT_NETWORK = "python prepare_data.py pydoc needs no network; --input=FILE takes a copy"
TIMEOUT = 4  # seconds without an answer that count as no network


def main(argv=None):
    names = []
    with configured(globals(), argv=argv, words=names):
        if len(names) != 1:
            fail(f"expected one NAME, found {len(names)}; type: python prepare_data.py shakespeare")
        is_there = os.path.exists(f"{folder_of(names[0], data_dir)}/meta.json")
        folder, meta = prepare(names[0], data_dir, os.path.expanduser(input), tokenizer)
        if is_there:
            print0(f"{folder} is there already, {described(meta)}; nothing to do")


# ---- one dataset ---------------------------------------------------------------------------------
#
# A dataset is a folder, DATA_DIR/NAME, with train.bin and val.bin (token ids, nothing else) and
# meta.json, which is written last: a folder that has it is complete. `meta` is the dict in it:
#   tokenizer                  a key of TOKENIZERS; what that has learned, such as chars, is beside it
#   source                     what the dataset was made of, in words
#   vocab_size, dtype          of the ids: uint16 or uint32
#   train_tokens, val_tokens   numbers of ids
#   val_bytes                  of the validation text in UTF-8
#   sha256                     {file name: 64 hex digits}
#   start_id                   the id after which a sample begins


def prepare(name: str, data_dir: str, input: str = "", tokenizer: str = "auto") -> tuple[str, dict]:
    """Make the dataset data_dir/name, or verify the one that exists. Returns (its folder, its
    meta).

    input: the path of a text or a corpus, or "" for the text that `name` stands for.
    Raises BadInput, or Offline if a download fails."""
    folder = folder_of(name, data_dir)
    old = verified_meta(folder) if os.path.exists(f"{folder}/meta.json") else {}
    if old and not (input or chars_of or val_fraction) and tokenizer == "auto":
        return folder, old
    other = verified_meta(folder_of(chars_of, data_dir)) if chars_of else old
    if tokenizer == "auto" or chars_of:
        tokenizer = other.get("tokenizer", "gpt2" if is_corpus(input) else "char")
    check_knobs(tokenizer)
    if old and not input:
        source = old.get("source", "")
        texts = []
    elif is_corpus(input):
        source, texts = find_corpus(input, tokenizer)
    else:
        source, texts = find_text(name, data_dir, input, tokenizer)
    if chars_of:
        source += f", vocabulary of {chars_of}"
    fraction = f"val_fraction {val_fraction:g})"
    if val_fraction and fraction not in source:
        source += f" ({fraction}"
    meta = (other if chars_of else {"tokenizer": tokenizer}) | {"source": source}
    if not old:
        return folder, store(folder, meta, texts)
    if described(meta) != described(old):
        fail(
            f"{folder} holds another dataset: {described(old)}, not {described(meta)}; "
            "choose another NAME, or delete that folder if no run depends on it"
        )
    return folder, old


def check_knobs(tokenizer):
    if tokenizer not in TOKENIZERS:
        fail(f"--tokenizer={tokenizer}: expected auto, {', '.join(TOKENIZERS)}")
    if not 0 <= val_fraction < 1:  # NaN is refused, too
        fail(f"--val_fraction={val_fraction}: expected a share, at least 0 and below 1")
    if not 0 <= max_bad_rows <= 1:
        fail(f"--max_bad_rows={max_bad_rows}: expected a share, from 0 to 1")


def folder_of(name: str, data_dir: str) -> str:
    """data_dir/name. Raises BadInput if `name` is no plain name."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        fail(f"a NAME is made of letters, digits, '_', '-' and '.', not {name!r}")
    return os.path.join(data_dir, name)


def verified_meta(folder: str) -> dict:
    """The dict in meta.json. Raises BadInput unless the files have the SHA-256 that it says."""
    try:
        meta = json.loads(read_file(f"{folder}/meta.json"))
        for name, digest in meta["sha256"].items():
            if digest_of(f"{folder}/{name}") != digest:
                raise ValueError(f"{name} has another SHA-256")
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(
            f"a dataset is incomplete, changed or damaged ({type(error).__name__}: {error}); delete "
            f"{folder}/meta.json and type the command that made it: "
            f"python prepare_data.py {os.path.basename(folder)} ..."
        )
    return meta


def instead_of(name: str, error: Exception) -> str:
    """The dataset on which a run trains where that of this name cannot be downloaded."""
    if name not in FALLBACK:
        raise error
    bar = "!" * 90
    print0(
        f"{bar}\n!! {error}\n!! This run trains on {FALLBACK[name]!r} INSTEAD OF {name!r}.\n{bar}"
    )
    return FALLBACK[name]


def read_file(path: str) -> bytes:
    """The bytes of a file. Raises BadInput if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; expected a file")


def described(meta):
    """What a dataset is made of, in words. Two datasets of the same words are taken for one."""
    return f"{meta.get('tokenizer')} tokens of {meta.get('source')}"


def store(folder, meta, texts):
    """Write the dataset of [one text] or of a Corpus. Returns `meta`, which has only tokenizer and
    source as yet, completed."""
    kind = TOKENIZERS[meta["tokenizer"]]
    if hasattr(kind, "learn") and not chars_of:
        meta |= kind.learn(texts)
    tokenizer = kind(meta)
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    warn_if_lossy(tokenizer, texts)
    with making(folder) as unfinished:
        train = f"{unfinished}/train.bin"
        val = f"{unfinished}/val.bin"
        val_bytes = write_tokens(train, val, texts, tokenizer, dtype)
        train_tokens = os.path.getsize(train) // dtype.itemsize
        val_tokens = os.path.getsize(val) // dtype.itemsize
        sizes = f"{train_tokens:,} tokens to train on, {val_tokens:,} to validate"
        if min(train_tokens, val_tokens) < 2:
            fail(f"{meta['source']} is too short: {sizes}; take more text, or a --val_fraction")
        meta |= {
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name,
            "val_bytes": val_bytes,
            "sha256": {"train.bin": digest_of(train), "val.bin": digest_of(val)},
            "train_tokens": train_tokens,
            "val_tokens": val_tokens,
            "start_id": find_start_id(np.memmap(train, dtype, "r"), tokenizer),
        }
        write_json(f"{unfinished}/meta.json", meta)
    print0(f"made {folder}, {described(meta)}: {sizes}, vocabulary {tokenizer.vocab_size:,}")
    return meta


def warn_if_lossy(tokenizer, texts):
    """Print a warning if decode(encode(text)) is not the text: a model cannot learn what is lost.
    Only the first CHECKED characters are tried."""
    left = CHECKED
    tried = 0
    changed = []  # (text, what comes back)
    for text in texts:
        text = text[:left]
        left -= len(text)
        tried += 1
        back = tokenizer.decode([int(i) for i in tokenizer.encode(text)])
        if back != text:
            changed.append((text, back))
        if left == 0:
            break
    if changed:
        text, back = changed[0]
        start = max(0, len(os.path.commonprefix([text, back])) - 10)
        lost = slice(start, start + 30)
        print0(
            f"warning: decode(encode(text)) changes {len(changed):,} of the first {tried:,} "
            f"documents: {text[lost]!r} becomes {back[lost]!r}"
        )


@contextlib.contextmanager
def making(folder):
    """Yields a new folder beside `folder`. At the end its files move to `folder`, meta.json as the
    last; if anything goes wrong before, none does. Two processes that make one dataset have two
    new folders; a process that is killed leaves its own behind."""
    data_dir = os.path.dirname(folder)
    try:
        os.makedirs(data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished_", dir=data_dir) as unfinished:
            yield unfinished
            os.makedirs(folder, exist_ok=True)
            for name in ("train.bin", "val.bin", "meta.json"):
                os.replace(f"{unfinished}/{name}", f"{folder}/{name}")
    except OSError as error:
        fail(f"cannot write {folder} ({error}); write --data_dir=FOLDER")


def write_tokens(train, val, texts, tokenizer, dtype):
    """Write the ids of the texts to the files `train` and `val`. Returns the bytes of the validation
    text. Threads encode BATCH documents at a time: tiktoken releases Python's lock."""
    if isinstance(texts, Corpus):
        documents = split_apart(texts)
        end = np.array(tokenizer.end_of_text, dtype).tobytes()
    else:
        documents = iter(last_part_apart(texts[0]))
        end = b""
    number = val_bytes = 0
    with open(train, "wb") as train_file, open(val, "wb") as val_file, ThreadPoolExecutor() as pool:
        files = {"train": train_file, "val": val_file}
        while batch := list(islice(documents, BATCH)):
            encoded = pool.map(tokenizer.encode, [text for _, text in batch])
            for (split, text), ids in zip(batch, encoded, strict=True):
                files[split].write(np.asarray(ids, dtype).tobytes() + end)
                if split == "val":
                    val_bytes += len(text.encode())
                number += 1
                if number % 50_000 == 0:
                    print0(f"{number:,} documents")
    return val_bytes


def find_start_id(tokens, tokenizer):
    """The id after which a sample begins: the end of a text, else a newline, else the first id.
    tokens: the training ids, which have it."""
    for name in ("end_of_text", "newline"):
        i = getattr(tokenizer, name, -1)
        if i in tokens[: 2**22]:  # what comes later is no usual start
            return i
    return int(tokens[0])


# ---- one text: a name, or a file -----------------------------------------------------------------


def find_text(name, data_dir, input, tokenizer):
    """(source in words, [text]) of the file `input`, or of the text that `name` stands for. With
    borders between documents it is a corpus, unless its tokenizer has no end of text."""
    if input:
        refuse_binary(input, [input])
        raw = read_file(input)
        source = os.path.basename(input)
    elif name in TEXTS:
        source, read = TEXTS[name]
        raw = read()
    else:
        fail(
            f"no dataset {name!r} in {os.path.abspath(data_dir)}; type: "
            f"python prepare_data.py {name} --input=FILE ({' and '.join(TEXTS)} need none)"
        )
    path = input or "the download"
    digest = hashlib.sha256(raw).hexdigest()
    if digest == SHAKESPEARE_SHA256:
        source = "TinyShakespeare"
    elif name == "shakespeare":
        fail(
            f"{path} has {len(raw):,} bytes and is not TinyShakespeare, which has "
            f"{SHAKESPEARE_BYTES:,}; try again, or choose another NAME; {WITHOUT_NETWORK}"
        )
    if borders := raw.count(SEPARATOR.encode()):
        if hasattr(TOKENIZERS[tokenizer], "end_of_text"):
            return find_corpus(input, tokenizer)
        print0(
            f"{borders:,} {SEPARATOR} are ordinary characters; "
            "--tokenizer=gpt2 makes them borders of documents, and so does byte"
        )
    notes = Counter()
    text = cleaned(decode_utf8(raw, path), notes)
    print_notes(notes)
    return f"{source} (SHA-256 {digest[:16]}...)", [text]


def decode_utf8(raw: bytes, path: str) -> str:
    """The text of `raw`, which is from the file `path`. Raises BadInput."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        advice = LATIN1.format(path=shlex.quote(path))
        fail(f"{path} is not UTF-8 text at the end of {raw[: error.end][-20:]}; {advice}")


def clean(text: str) -> str:
    """`text` as it is stored: without a byte order mark, with newlines instead of CRLF, U+FFFD
    instead of NUL and of half a surrogate pair."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    return re.sub("[\0\ud800-\udfff]", "\ufffd", text)


def cleaned(text, notes):
    """clean(text). Counts in `notes` what print_notes() is to print."""
    new = clean(text)
    notes[CLEANED] += new != text
    notes[DECOMPOSED] += not unicodedata.is_normalized("NFC", new)
    return new


def print_notes(notes):
    for note, count in notes.items():
        if count:
            print0(note.format(count))


def last_part_apart(text):
    """The text without its last val_fraction, or tenth, to train on, and that to validate."""
    cut = int((1 - (val_fraction or 0.1)) * len(text))
    return [("train", text[:cut]), ("val", text[cut:])]


def read_shakespeare():
    """The bytes of TinyShakespeare, downloaded. Raises Offline if no server gives it."""
    url = os.environ.get("SHAKESPEARE_URL", SHAKESPEARE_URL)
    print0(f"downloading {url}")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return response.read(SHAKESPEARE_BYTES + 1)
    except (urllib.error.HTTPError, http.client.HTTPException) as error:  # a server has answered
        fail(f"{url}: {error}; {WITHOUT_NETWORK}")
    except OSError as error:
        raise Offline(f"cannot get {url}: {error}; {WITHOUT_NETWORK}") from error


def manual():
    """The topics of CPython's manual, but those that another one repeats: a copy in the validation
    split would only test what was memorized."""
    from pydoc_data.topics import topics

    texts = dict.fromkeys(topics[topic] for topic in sorted(topics))
    everything = "".join(texts)
    bodies = {text: text.partition("*\n\n")[2].strip() for text in texts}  # without headings
    return "".join(text for text in texts if everything.count(bodies[text]) < 2).encode()


def products():
    """16,000 lines such as 940 x 519 = 487860, no two alike: a text that needs no file."""
    factors = ((n * 7919 % 997, n * 104729 % 613) for n in range(16_000))
    return "".join(f"{a} x {b} = {a * b}\n" for a, b in factors).encode()


TEXTS = {  # a name that needs no --input: what it stands for, in words, and its bytes
    "shakespeare": ("TinyShakespeare", read_shakespeare),
    "pydoc": (f"pydoc_data.topics of CPython {sys.version.split()[0]}", manual),
    "formula": ("products() in prepare_data.py", products),
}


# ---- a corpus ------------------------------------------------------------------------------------


def is_corpus(input):
    """Whether `input` is streamed: a folder, a pattern, rows, a .gz, or a long text."""
    if os.path.isfile(input) and not input.endswith((".jsonl", ".parquet", ".gz")):
        return os.path.getsize(input) > WHOLE_TEXT
    return input != ""


def find_corpus(input, tokenizer):
    """(source, texts) of a corpus. The source says what decides about the content: number and size
    of the files, and flags."""
    files = input_files(input)
    if not hasattr(TOKENIZERS[tokenizer], "end_of_text"):
        fail(
            f"{tokenizer} takes one text of up to {WHOLE_TEXT:,} bytes; "
            "write --tokenizer=gpt2 or --tokenizer=byte"
        )
    refuse_binary(input, files)
    source = (
        f"{os.path.basename(os.path.normpath(input))}, "
        f"{len(files):,} files, {sum(map(os.path.getsize, files)):,} bytes "
        f"(field {field}, val_fraction {val_fraction or DEFAULT_FRACTION:g})"
    )
    return source, Corpus(files)


def input_files(input):
    """The file `input`, the files in the folder `input`, or those that match the pattern `input`,
    sorted and without hidden ones. Raises BadInput if there are none."""
    if os.path.isfile(input):
        return [input]
    patterns = [f"{glob.escape(input)}/**"] if os.path.isdir(input) else without_braces(input)
    matches = {path for pattern in patterns for path in glob.glob(pattern, recursive=True)}
    files = sorted(path for path in matches if not os.path.isdir(path))
    if not files:
        fail(
            f"--input={input}: no file of this name, in this folder or of this pattern (from "
            f"{os.getcwd()}; hidden files do not count); expected a file, a folder, or a pattern in "
            "quotes, such as 'web/*.txt' or 'web/*.{md,txt}'"
        )
    return files


def without_braces(pattern):
    """['*.md', '*.txt'] of '*.{md,txt}': glob knows no braces, which shells do."""
    before, _, rest = pattern.partition("{")
    choices, _, after = rest.partition("}")
    return [before + choice + after for choice in choices.split(",")]


def split_apart(corpus):
    """Yields (split, text) of the documents, and prints what has become of them. Raises BadInput,
    after the last one, if all are of one split."""
    fraction = val_fraction or fraction_to_hold_out(corpus)
    if fraction is None:
        for text in corpus:
            yield from last_part_apart(text)
        print0("the last tenth of each document is held out: no --val_fraction holds out enough")
    else:
        yield from split_by_hash(corpus, fraction)
    corpus.report()


def split_by_hash(corpus, fraction):
    """Yields (split, text): a document goes to val if its hash is below `fraction`."""
    documents = Counter()  # of each split
    characters = Counter()
    for text in corpus:
        split = "val" if draw_of(text) < fraction else "train"
        documents[split] += 1
        characters[split] += len(text)
        yield split, text
    if not documents:
        return  # store() says that this is too short
    held_out = (
        f"--val_fraction={fraction} holds out {documents['val']:,} of {documents.total():,} "
        f"documents, {characters['val'] / characters.total():.2%} of the text"
    )
    if len(documents) == 1:
        fail(f"{held_out}; expected another --val_fraction; without one it is enough")
    print0(f"{held_out}; typed, it stays when documents are added")


def draw_of(text):
    """In [0, 1), by the hash of the content."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fraction_to_hold_out(texts):
    """DEFAULT_FRACTION, doubled until it holds out enough of the texts; None if that is more than
    half of them. Reads no more than it needs to."""
    drawn = []  # (draw, bytes) of each document
    fraction = DEFAULT_FRACTION
    total = held_out = 0
    for text in texts:
        draw = draw_of(text)
        size = len(text.encode())
        drawn.append((draw, size))
        total += size
        if draw < fraction:
            held_out += size
        if MIN_VAL <= held_out <= total / 2:
            return fraction
    while held_out < min(MIN_VAL, total / 20):
        fraction *= 2
        held_out = sum(size for draw, size in drawn if draw < fraction)
    return fraction if held_out <= total / 2 else None


class Corpus:
    """The documents of files, cleaned. After an iteration it knows what became of them."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        """Raises BadInput, at the end if too many rows were bad."""
        self.notes = Counter()
        self.rows = 0
        self.bad_rows = []  # where, and why
        for path in self.files:
            has_rows = path.removesuffix(".gz").endswith((".jsonl", ".parquet"))
            for item in self.rows_of(path) if has_rows else self.documents_of(path):
                text = cleaned(item if has_rows else decode_utf8(item, path), self.notes)
                if text:
                    yield text
        self.refuse_bad_rows(max_bad_rows)

    def report(self):
        print_notes(self.notes)
        if self.bad_rows:
            print0(f"left out: {self.bad_words()}")

    def rows_of(self, path):
        """The texts in a .jsonl, whose rows are lines, or in a .parquet."""
        with opened(path) as file:
            rows = parquet_rows(file) if path.endswith(".parquet") else file
            for number, row in enumerate(rows, 1):
                is_line = isinstance(row, bytes)
                if is_line and not row.strip():
                    continue
                self.rows += 1
                try:
                    text = json.loads(row)[field] if is_line else row
                    if type(text) is not str:
                        raise TypeError(f"{field!r} is no string")
                except (ValueError, LookupError, TypeError) as error:
                    why = f"{type(error).__name__}: {error} in {row!r:.100}"
                    self.bad_rows.append(f"{path}:{number}: {why}")
                    if self.rows >= 100:  # mostly bad ones: the field is wrong
                        self.refuse_bad_rows(max(0.5, max_bad_rows))
                else:
                    yield text

    def refuse_bad_rows(self, limit):
        """Raises BadInput if more than this share of the rows are bad."""
        if len(self.bad_rows) > limit * self.rows:
            fail(
                f"{self.bad_words()}; expected --field=NAME, a text in each row, or a higher "
                "--max_bad_rows"
            )

    def bad_words(self):
        return (
            f"{len(self.bad_rows):,} of {self.rows:,} rows cannot be read (up to {max_bad_rows:.1%} "
            f"are left out), the first: {self.bad_rows[0]}"
        )

    def documents_of(self, path):
        """The documents of a plain text, or parts() of a long one."""
        border = re.compile(rb"<\|endoftext\|>(?:\r?\n)?")
        rest = b""  # of the document that is not complete
        limit = WHOLE_DOCUMENT  # of its length; PART if the beginning of it was cut off
        with opened(path) as file:
            # a chunk ends with a line, and so cuts no border
            while chunk := file.read(CHUNK) + file.readline(WHOLE_DOCUMENT):
                *documents, rest = border.split(rest + chunk)
                self.notes[BORDERS] += len(documents)
                for document in documents:
                    yield from parts(document.removesuffix(b"\n").removesuffix(b"\r"), limit)
                    limit = WHOLE_DOCUMENT
                if len(rest) > limit:
                    limit = PART
                    *begun, rest = parts(rest, limit)
                    yield from begun
        yield from parts(rest, limit)


def parts(raw, limit):
    """`raw`, or, if it is longer than `limit`, parts of it of up to PART, each cut after a line end,
    or else between two characters."""
    if len(raw) > limit:
        while len(raw) > PART:
            end = raw.rfind(b"\n", 0, PART) + 1 or PART
            while raw[end] & 0xC0 == 0x80 and end > 1:  # within a character
                end -= 1
            yield raw[:end]
            raw = raw[end:]
    yield raw


# ---- files ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path):
    """The file `path`, open, and decompressed if it is a .gz. Raises BadInput if it is damaged."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            yield file
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow raises ValueError
        fail(f"cannot read {path} ({error}); fetch it again or leave it out")


def parquet_rows(file):
    """The column `field` of a parquet file. Raises BadInput if it has none."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fail(f"{file.name} needs the library pyarrow; type: pip install pyarrow")
    table = ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)  # a group may be large
    names = table.schema_arrow.names
    if field not in names:
        fail(f"{file.name} has no column {field!r}; expected --field=NAME, one of {names}")
    for batch in table.iter_batches(BATCH, columns=[field]):
        yield from batch.column(0).to_pylist()


NO_TEXT = {  # how a file begins that is no text: what it is, and what to type
    rb"PAR1": "parquet; type: mv {path} {path}.parquet; then take {path}.parquet instead",
    rb"\x1f\x8b": "gzip; type: mv {path} {path}.gz; then take {path}.gz instead",
    rb"PK\x03\x04.{26}(\[Content|_rels|mimetype|word)": (
        "an office document; type: pandoc -t plain {path} -o {path}.txt; "
        "then take {path}.txt instead"
    ),
    rb"PK\x03\x04": "zip; type: unzip {path} -d {path}.files; then take {path}.files instead",
    rb"%PDF-": "PDF; type: pdftotext {path} {path}.txt; then take {path}.txt instead",
    rb"\xff\xfe|\xfe\xff": (
        "UTF-16; type: iconv -f UTF-16 -t UTF-8 {path} > {path}.utf8; then take {path}.utf8 instead"
    ),
    rb"(?=.*\0).*[\x01-\x08]": "binary; expected UTF-8",
    rb".*\0": (
        "it has a NUL; type: tr -d '\\000' < {path} > {path}.utf8; then take {path}.utf8 instead"
    ),
}
JSON = {  # the same of a single .json; in a folder such a file may be code
    rb"\s*\[": (
        'one JSON array; type: python -c "import json, sys; [print(json.dumps(row if '
        "isinstance(row, dict) else {{'text': row}})) for row in json.load(open(sys.argv[1]))]\" "
        "{path} > {path}.jsonl; then take {path}.jsonl instead"
    ),
    rb"{.*}\s*\n{": (
        "JSON, an object a line; type: mv {path} {path}.jsonl; then take {path}.jsonl instead"
    ),
}
LATIN1 = (
    "if it is Latin-1, type: iconv -f latin1 -t UTF-8 {path} > {path}.utf8; "
    "then take {path}.utf8 instead"
)
LEAVE_OUT = (  # of several files
    "; to leave it out, type: mv {path} {hidden}; or take only the texts by a pattern, such as "
    "--input='FOLDER/**/*.{{md,txt}}'"
)


def refuse_binary(input, files):
    """Raises BadInput if one of the files is no text, with what to do about it."""
    kinds = NO_TEXT | JSON if input.endswith(".json") else NO_TEXT
    for path in files:
        if path.endswith(".parquet"):
            continue
        with opened(path) as file:
            head = file.read(HEAD)
        for start, advice in kinds.items():
            if re.match(start, head, re.DOTALL):
                advice += "" if files == [input] else LEAVE_OUT
                hidden = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}")
                advice = advice.format(path=shlex.quote(path), hidden=shlex.quote(hidden))
                fail(f"{path} is not plain text: {advice}")


# ---- tokenizers ----------------------------------------------------------------------------------


def tokenizer_of(meta: dict) -> Any:
    """The tokenizer of a dataset: encode(text) -> int array, decode(ids) -> str, vocab_size."""
    name = meta["tokenizer"]
    if name not in TOKENIZERS:
        fail(f"no tokenizer {name!r} in TOKENIZERS of prepare_data.py; add its class there")
    return TOKENIZERS[name](meta)


def start_and_end(meta: dict) -> tuple[int, int]:
    """(the id after which a sample begins, the id at which it ends; -1: none)."""
    end = getattr(TOKENIZERS.get(meta["tokenizer"]), "end_of_text", -1)
    start = meta.get("start_id", max(0, end))
    return start, end if start == end else -1


class Char:
    """One id for each distinct character of the text, by code point."""

    def __init__(self, meta):
        self.chars = meta["chars"]
        self.vocab_size = len(self.chars)
        self.newline = self.chars.find("\n")
        self.ids = {char: i for i, char in enumerate(self.chars)}

    @staticmethod
    def learn(texts):
        return {"chars": "".join(sorted(set().union(*texts)))}

    def encode(self, text):
        if missing := set(text) - self.ids.keys():
            some = "".join(sorted(missing)[:20])
            hint = "" if unicodedata.is_normalized("NFC", text) else "; it is not in the form NFC"
            fail(f"the vocabulary lacks {len(missing):,} characters: {some!r} ({some!a}){hint}")
        return np.fromiter(map(self.ids.get, text), np.uint32, len(text))

    def decode(self, ids):
        return "".join(self.chars[i] for i in ids)


class Byte:
    """The bytes of the text in UTF-8. Bytes that are not UTF-8 become U+FFFD."""

    vocab_size = 256
    end_of_text = 0  # follows each document of a corpus
    newline = ord("\n")

    def __init__(self, meta):
        pass

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids):
        return bytes(map(int, ids)).decode(errors="replace")


class GPT2:
    """GPT-2's vocabulary, from the library tiktoken."""

    vocab_size = 50257
    end_of_text = 50256
    newline = 198

    def __init__(self, meta):
        try:
            import tiktoken

            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # it is not installed; whatever its HTTP library raises
            fail(
                f"no gpt2 vocabulary: {str(error)[:200]}; TIKTOKEN_CACHE_DIR=FOLDER names a folder "
                "with it; --tokenizer=byte needs none"
            )

    def encode(self, text):
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids):
        return self.encoding.decode(list(map(int, ids)))


# A tokenizer of your own is a class and a name, which may be added at the end of this file:
# TOKENIZERS["mine"] = Mine. It is built from `meta`, and has vocab_size, encode(text) -> ids, which
# several threads call, and decode(ids) -> text. It may have
#   learn(texts)   a static method; what it returns, a dict for JSON, goes into `meta`
#   end_of_text    the id that follows each document of a corpus; without it, it takes one text
#   newline        the id of a newline, if there is one
TOKENIZERS = {"char": Char, "byte": Byte, "gpt2": GPT2}


if __name__ == "__main__":
    # Imported, so that a tokenizer that is added below these lines counts, too.
    exit_process(importlib.import_module(Path(__file__).stem).main())
