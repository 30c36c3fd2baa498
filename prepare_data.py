"""Make the datasets that train.py reads, data/NAME/{train.bin,val.bin,meta.json}:

    python prepare_data.py shakespeare                       # TinyShakespeare, downloaded once
    python prepare_data.py pydoc                             # CPython's own manual: no network
    python prepare_data.py formula                           # products, the same text everywhere
    python prepare_data.py NAME --input=FILE                 # any UTF-8 text
    python prepare_data.py NAME --input=FILE --tokenizer=gpt2
    python prepare_data.py NAME --input=FOLDER               # a corpus of any size: gpt2 tokens
    python prepare_data.py NAME --input='web/*.parquet' --field=content

Of one text, the last tenth of its characters is held out for validation, or the last val_fraction.
A dataset that exists is never overwritten. A corpus is streamed: a folder (its files in order of
their paths, without hidden ones), a glob in quotes, a .jsonl (one object a line), a .parquet (with
the library pyarrow), a .gz of a text or .jsonl, or a text of more than 32 MB.
- A row of a .jsonl or .parquet is a document, and so is a text file. In a text, also in one of less
  than 32 MB, `<|endoftext|>` separates documents, with up to one newline on each side; for char,
  and in a row, it is text. A text file longer than WHOLE_DOCUMENT is split into documents of up to
  PART, at line ends if it has any. Each is followed by an end-of-text id: 50256 for gpt2, 0 for
  byte. NUL, and half a surrogate pair, become U+FFFD.
- A document goes to val if the hash of its content, as a fraction, is below val_fraction: copies of
  a document share a split, whatever the order of files. The same command writes the same bytes. If
  DEFAULT_FRACTION holds out too little, it is doubled until it does not; of one or two documents,
  their last tenths are held out. A typed val_fraction is kept, so that no document changes sides
  when others are added.
- A byte order mark is removed, and CRLF is one newline. Rows that cannot be read are left out, up to
  max_bad_rows. All of that is printed.
- A sample of train.py or sample.py begins after start_id in meta.json: the end-of-text id, if the
  data has it, else a newline, else the first id of the text. It ends at the end-of-text id.
"""

import plumbing  # noqa: F401  first: Ctrl-C in the imports is one line

# isort: split
import contextlib
import glob
import gzip
import hashlib
import json
import math
import os
import re
import statistics
import sys
import tempfile
import unicodedata
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from plumbing import data
from plumbing.cli import BadInput, configured, fail, run_script
from plumbing.console import print0
from plumbing.data import SPLITS, TOKENIZERS, Offline, read_file
from plumbing.files import digest_of, write_json

# What to make, and where
data_dir = "data"  # the dataset's folder is made in this one
input = ""  # a UTF-8 text file, .jsonl, .parquet, folder or glob; "" = what NAME stands for
tokenizer = "auto"  # auto | char | byte | gpt2; char: an id for each distinct character, for one
#  text of up to 32 MB; gpt2 needs tiktoken; auto = char for one such text, gpt2 for a corpus
chars_of = ""  # another dataset, whose tokenizer and characters are used: its weights then fit both
val_fraction = 0.0  # share to hold out for validation, of a corpus of its documents, [0, 1); 0 = a
#  tenth of one text, 0.0005 of a corpus, doubled until that is enough

# Of a corpus
field = "text"  # the field of a .jsonl object, or the column of a .parquet, that holds the text
max_bad_rows = 0.001  # share of the rows that may be left out as unreadable, [0, 1]

# Bytes
WHOLE_TEXT = 32_000_000  # a plain text up to this size is read whole (char: up to 0.5 GB of memory)
WHOLE_DOCUMENT = 1_000_000  # a text file up to this size is one document, as most novels are
PART = 64_000  # largest document cut from a longer file; small, so that val gets enough of them
MIN_VAL = 16_000  # to hold out at least, or a twentieth of the text if that is less
CHUNK = 1_000_000  # read at a time, and to the end of the line
BATCH = 64  # documents that are read, and tokenized, at a time
DEFAULT_FRACTION = 0.0005  # of the documents of a corpus

CLEANED = "taken out: byte order marks; replaced: CRLF by a newline, what is no character by U+FFFD"
DECOMPOSED = (
    "some characters are not in the normal form NFC, such as e and U+0301 for é, and so one letter "
    "may be different tokens; unicodedata.normalize('NFC', text) in Python makes them one"
)
SEPARATOR = "<|endoftext|>"  # the border of two documents in a plain text
BORDER = re.compile(rb"<\|endoftext\|>(?:\r?\n)?")

FILTER = (  # corpora leave out hidden files
    "type: mv '{path}' '{path.parent}/.{path.name}' && "
    "gzip -dcf '{path.parent}/.{path.name}' | %s > '{path}'; "
    "then the same command again"
)
NO_TEXT = {  # how a file begins that is no text: what it is, and what to do
    rb"PAR1": "parquet; type: mv '{path}' '{path}.parquet'; then --input='{path}.parquet'",
    rb"ARROW1|\xff{4}": (
        'Arrow; type: pip install datasets && python -c "from datasets import load_dataset as load; '
        "load('arrow', data_files='{path}', split='train').to_parquet('{path}.parquet')\"; "
        "then --input='{path}.parquet'"
    ),
    rb"\x1f\x8b": "gzip; type: mv '{path}' '{path}.gz'; then --input='{path}.gz'",
    rb"\(\xb5/\xfd": "zstd; type: zstd -d '{path}'; then --input='{root}'",
    rb"\xfd7zXZ": "xz; type: xz -dk '{path}'; then --input='{root}'",
    rb"BZh[1-9]1AY": "bzip2; type: bzip2 -dk '{path}'; then --input='{root}'",
    rb"PK\x03\x04.{26}(\[Content|_rels|mimetype|word)|{\\rtf": (
        "an office document; type: pandoc -t plain '{path}' -o '{path}.txt'; "
        "then --input='{path}.txt'"
    ),
    rb"PK\x03\x04": "zip; type: unzip '{path}' -d '{path}.files'; then --input='{path}.files'",
    rb".{257}ustar": (
        "tar; type: mkdir '{path}.files' && tar -xf '{path}' -C '{path}.files'; "
        "then --input='{path}.files'"
    ),
    rb"%PDF-": "PDF; type: pdftotext '{path}' '{path}.txt'; then --input='{path}.txt'",
    rb"\.json\s*\[": (
        'one JSON array; type: python -c "import json; [print(json.dumps('
        "row if isinstance(row, dict) else {{'text': row}})) for row in json.load(open('{path}'))]"
        "\" > '{path}.jsonl'; then --input='{path}.jsonl'"
    ),
    rb"\.json{.*}\s*\n{": (
        "JSON, an object a line; type: cp '{path}' '{path}.jsonl'; then --input='{path}.jsonl'"
    ),
    rb"\xff\xfe|\xfe\xff": "UTF-16; " + FILTER % "iconv -f UTF-16 -t UTF-8",
    rb"([^\0]\0){16}": "UTF-16; " + FILTER % "iconv -f UTF-16LE -t UTF-8",
    rb"version https://git-lfs": "a pointer of Git LFS; type: git lfs pull; then the same command again",
    rb"(?=.*\0).*[\x01-\x08]": "binary; expected UTF-8",
    rb".*\0": "it has a NUL; " + FILTER % "tr -d '\\000'",
}
LATIN1 = "if it is Latin-1, " + FILTER % "iconv -f latin1 -t UTF-8"
HEAD = 64_000  # of a file: enough to tell what it is

SHAKESPEARE_URL = (  # the environment variable of this name gives another, such as file://
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
WITHOUT_NETWORK = "python prepare_data.py pydoc needs no network; --input=FILE takes a copy"
TIMEOUT = 4  # seconds without an answer that count as no network


# ---- one dataset ---------------------------------------------------------------------------------


def prepare(name, data_dir, input="", tokenizer="auto") -> tuple[str, dict]:
    """Make the dataset data_dir/name, or verify the one that exists. Returns (its folder, its
    meta).

    input: a text file or a corpus, or "" for what `name` stands for. Raises BadInput or Offline.
    """
    folder = data.folder_of(name, data_dir)
    old = data.verified_meta(folder) if os.path.exists(f"{folder}/meta.json") else {}
    other = data.verified_meta(data.folder_of(chars_of, data_dir)) if chars_of else old
    if tokenizer == "auto" or chars_of:
        tokenizer = other.get("tokenizer", "gpt2" if is_corpus(input) else "char")
    if old and not input:
        meta = old | {"tokenizer": tokenizer}
    elif is_corpus(input):
        meta, documents, ends = find_corpus(input, tokenizer)
    else:
        meta, documents, ends = find_text(name, folder, input, tokenizer)
    if chars_of:
        meta = other | {"source": f"{meta['source']}, vocabulary of {chars_of}"}
    fraction = f"val_fraction {val_fraction:g})"
    if val_fraction and fraction not in meta["source"]:
        meta["source"] += f" ({fraction}"
    if not old:
        return folder, store(folder, meta, documents, ends)
    if described(meta) != described(old):
        fail(
            f"{folder} holds another dataset: {described(old)}, not {described(meta)}; "
            "choose another NAME, or delete that folder if no run depends on it"
        )
    print0(f"{folder} is there already, {described(old)}; nothing to do")
    return folder, old


def is_corpus(input: str) -> bool:
    """Whether `input` is streamed: a folder, a glob, rows, a .gz, or a long text."""
    if not os.path.isfile(input):
        return os.path.isdir(input) or glob.has_magic(input)
    return input.endswith((".jsonl", ".parquet", ".gz")) or os.path.getsize(input) > WHOLE_TEXT


def described(meta: dict) -> str:
    """What a dataset is made of, in words. Two datasets of the same words are taken for one."""
    return f"{meta.get('tokenizer')} tokens of {meta.get('source')}"


def clean(text: str) -> str:
    """`text` as it is stored: without a byte order mark, with newlines instead of CRLF, U+FFFD
    instead of NUL and of half a surrogate pair."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    return re.sub("[\0\ud800-\udfff]", "\ufffd", text)


@contextlib.contextmanager
def making(folder: str) -> Iterator[str]:
    """Yields a new folder beside `folder`. At the end its files move to `folder`, meta.json as the
    last; if anything goes wrong before, none does. Two processes that make one dataset have two
    new folders; a process that is killed leaves its own behind."""
    data_dir = os.path.dirname(folder)
    try:
        os.makedirs(data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished_", dir=data_dir) as unfinished:
            yield unfinished
            os.makedirs(folder, exist_ok=True)
            for path in sorted(Path(unfinished).iterdir(), reverse=True):
                path.replace(Path(folder, path.name))
    except OSError as error:
        fail(f"cannot write {folder} ({error}); write --data_dir=FOLDER")
    finally:
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(data_dir)


def store(folder: str, meta: dict, documents: Iterable, ends: list[int]) -> dict:
    """Write the dataset: `meta` as far as it is known, documents: (split, text), each followed by the
    ids `ends`. Returns its meta."""
    tokenizer = data.tokenizer_of(meta)
    meta["vocab_size"] = tokenizer.vocab_size
    meta["dtype"] = "uint16" if meta["vocab_size"] <= 2**16 else "uint32"
    dtype = np.dtype(meta["dtype"])
    with making(folder) as unfinished:
        paths = {split: f"{unfinished}/{split}.bin" for split in SPLITS}
        meta["val_bytes"] = write_tokens(paths, tokenizer, dtype, documents, ends)
        meta["sha256"] = {f"{split}.bin": digest_of(path) for split, path in paths.items()}
        tokens = [os.path.getsize(path) // dtype.itemsize for path in paths.values()]
        meta["train_tokens"], meta["val_tokens"] = tokens
        what = "{:,} tokens to train on, {:,} to validate".format(*tokens)
        if min(tokens) < 2:
            fail(
                f"{meta['source']}: it is too short: {what}; take more text, or another "
                "--val_fraction"
            )
        meta["start_id"] = data.find_start_id(unfinished, meta)
        write_json(f"{unfinished}/meta.json", meta)
    print0(f"made {folder}, {described(meta)}: {what}, vocabulary {meta['vocab_size']:,}")
    return meta


def write_tokens(paths: dict, tokenizer, dtype, documents: Iterable, ends: list[int]) -> int:
    """Write the ids of each document, and `ends` after it, to the file of its split. Returns the
    bytes of the validation text."""
    end = np.array(ends, dtype).tobytes()
    val_bytes = 0
    with open(paths["train"], "wb") as train, open(paths["val"], "wb") as val:
        for number, (split, text, ids) in enumerate(encoded(documents, tokenizer), 1):
            file = train if split == "train" else val
            file.write(np.asarray(ids, dtype).tobytes() + end)
            if split == "val":
                val_bytes += len(text.encode())
            if number % 50_000 == 0:
                print0(f"{number:,} documents")
    return val_bytes


def encoded(documents: Iterable, tokenizer: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields (split, text, its ids) of the documents. Threads encode BATCH of them at a time:
    tiktoken needs no lock of Python's."""
    documents = iter(documents)
    with ThreadPoolExecutor() as threads:
        while batch := list(islice(documents, BATCH)):
            splits, texts = zip(*batch, strict=True)
            yield from zip(splits, texts, threads.map(tokenizer.encode, texts), strict=True)


# ---- a corpus ------------------------------------------------------------------------------------


def find_corpus(input: str, tokenizer: str) -> tuple:
    """(what is known of meta, (split, text) of each document, the ids that follow each). In
    meta["source"] is what decides about the content: number and size of the files, and flags."""
    kind = TOKENIZERS[tokenizer]
    if not hasattr(kind, "end_of_text"):
        fail(
            f"{tokenizer} takes one text of up to {WHOLE_TEXT // 10**6} MB; "
            "write --tokenizer=gpt2 or --tokenizer=byte"
        )
    files = input_files(input)
    refuse_binary(input, ((path, next(read_chunks(path), b"")) for path in files))
    source = (
        f"{os.path.basename(os.path.normpath(input))}, "
        f"{len(files):,} files, {sum(map(os.path.getsize, files)):,} bytes "
        f"(field {field}, val_fraction {val_fraction or DEFAULT_FRACTION:g})"
    )
    meta = {"tokenizer": tokenizer, "source": source}
    if hasattr(kind, "learn"):
        meta |= kind.learn(Corpus(files))
    return meta, split_apart(files), [kind.end_of_text]


def split_apart(files: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (split, text) of the documents in the files, and prints what has become of them.
    Raises BadInput, after the last one, if all are of one split."""
    fraction = val_fraction or fraction_to_hold_out(Corpus(files))
    corpus = Corpus(files)
    documents, characters = Counter(), Counter()  # of each split
    for text in corpus:
        if fraction > 1:
            yield from last_part_apart(text)
            continue
        split = "val" if draw_of(text) < fraction else "train"
        documents[split] += 1
        characters[split] += len(text)
        yield split, text
    if fraction > 1:
        print0("the last tenth of each document is held out: no --val_fraction holds out enough")
    elif documents:
        held_out = (
            f"--val_fraction={fraction} holds out {documents['val']:,} of {documents.total():,} "
            f"documents, {characters['val'] / characters.total():.2%} of the text"
        )
        if len(documents) == 1:
            one = math.nextafter(min(map(draw_of, corpus)), 1)
            fail(f"{held_out}; --val_fraction={one} holds out one, without a flag it is enough")
        print0(f"{held_out}; typed, it stays when documents are added")
    corpus.report()


def last_part_apart(text: str) -> list[tuple[str, str]]:
    """The text without its last val_fraction, or tenth, to train on, and that to validate."""
    cut = int((1 - (val_fraction or 0.1)) * len(text))
    return [("train", text[:cut]), ("val", text[cut:])]


def draw_of(text: str) -> float:
    """In [0, 1), by the hash of the content."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fraction_to_hold_out(texts: Iterable[str]) -> float:
    """DEFAULT_FRACTION, doubled until it holds out enough of the texts; inf if that is more than
    half of them. Reads no more than it needs to."""
    drawn = []  # (draw, bytes) of each document
    fraction = DEFAULT_FRACTION
    total = held_out = 0
    for text in texts:
        draw, size = draw_of(text), len(text.encode())
        drawn.append((draw, size))
        total += size
        held_out += size * (draw < fraction)
        if MIN_VAL <= held_out <= total / 2:
            return fraction
    while held_out < min(MIN_VAL, total / 20):
        fraction *= 2
        held_out = sum(size for draw, size in drawn if draw < fraction)
    return fraction if held_out <= total / 2 else math.inf


class Corpus:
    """The documents of files, cleaned. After an iteration it knows what became of them."""

    def __init__(self, files: list[str]):
        self.files = files
        self.borders = self.rows = self.bad_rows = 0
        self.cleaned = self.decomposed = False  # whether any was changed, or is not in NFC
        self.first_bad = ""

    def __iter__(self) -> Iterator[str]:
        """Raises BadInput, at the end if too many rows were bad."""
        for path in self.files:
            is_rows = path.removesuffix(".gz").endswith((".jsonl", ".parquet"))
            for item in self.read_rows(path) if is_rows else self.read_text(path):
                text = item if is_rows else decode_utf8(item, path)
                if cleaned := self.clean(text):
                    yield cleaned
        self.refuse_bad_rows(max_bad_rows)

    def clean(self, text: str) -> str:
        """clean(text), noted what was changed, and what is not in NFC."""
        cleaned = clean(text)
        self.cleaned |= cleaned != text
        self.decomposed |= not unicodedata.is_normalized("NFC", cleaned)
        return cleaned

    def report(self) -> None:
        """Print what became of the documents."""
        if self.cleaned:
            print0(CLEANED)
        if self.decomposed:
            print0(DECOMPOSED)
        if self.borders:
            print0(f"{self.borders:,} {SEPARATOR} are borders of documents")
        if self.bad_rows:
            print0(f"left out: {self.bad()}")

    def read_rows(self, path: str) -> Iterator[str]:
        """The texts in a .jsonl or .parquet file."""
        is_parquet = path.endswith(".parquet")
        for number, row in enumerate(read_chunks(path, by_row=True), 1):
            if not is_parquet and not row.strip():
                continue
            self.rows += 1
            try:
                text = str(row, "utf-8") if is_parquet else json.loads(row)[field]
                if type(text) is not str:
                    raise TypeError(f"{field!r} is no string")
            except (ValueError, LookupError, TypeError) as error:
                self.bad_rows += 1
                bad = f"{path}:{number}: {type(error).__name__}: {error} in {row!r:.100}"
                self.first_bad = self.first_bad or bad
                if self.rows >= 100:  # mostly bad ones: the field is wrong
                    self.refuse_bad_rows(max(0.5, max_bad_rows))
            else:
                yield text

    def bad(self) -> str:
        return (
            f"{self.bad_rows:,} of {self.rows:,} rows cannot be read (up to {max_bad_rows:.1%} are "
            f"left out), the first: {self.first_bad}"
        )

    def refuse_bad_rows(self, limit: float) -> None:
        """Raises BadInput if more than this share of the rows are bad."""
        if self.bad_rows > limit * self.rows:
            share = self.bad_rows / self.rows + 0.001
            hint = f"; --max_bad_rows={share:.3f} leaves these out" if share < 1 else ""
            fail(f"{self.bad()}; expected --field=NAME, a text in each row{hint}")

    def read_text(self, path: str) -> Iterator[bytes]:
        """The documents of a plain text, or parts() of a long one."""
        rest = b""
        is_long = False
        for chunk in read_chunks(path):  # each ends with a line, and so cuts no border
            *documents, rest = BORDER.split(rest + chunk)
            self.borders += len(documents)
            for document in documents:
                yield from parts(document.removesuffix(b"\n").removesuffix(b"\r"), is_long)
                is_long = False
            *begun, rest = parts(rest, is_long)
            is_long = is_long or bool(begun)
            yield from begun
        yield from parts(rest, is_long)


def parts(raw: bytes, is_long: bool) -> Iterator[bytes]:
    """A document, or, if it is longer than WHOLE_DOCUMENT or a piece of one that is (is_long), parts
    of up to PART, each cut after a line end, or else between two characters."""
    is_long = is_long or len(raw) > WHOLE_DOCUMENT
    begin = 0
    while is_long and len(raw) - begin > PART:
        latest = begin + PART
        end = raw.rfind(b"\n", begin, latest) + 1 or latest
        while raw[end] & 0xC0 == 0x80 and end > begin + 1:  # within a character
            end -= 1
        yield raw[begin:end]
        begin = end
    yield raw[begin:]


def input_files(input: str) -> list[str]:
    """Paths of a file, folder or glob, in their order. glob leaves out hidden ones."""
    pattern = f"{glob.escape(input)}/**" if os.path.isdir(input) else input
    paths = [input] if os.path.isfile(input) else sorted(glob.glob(pattern, recursive=True))
    return [path for path in paths if not os.path.isdir(path)]


def read_chunks(path: str, by_row: bool = False) -> Iterator:
    """The content of a file, decompressed, in chunks of whole lines, or in rows: lines, or the texts
    of a .parquet, which has no chunks."""
    try:
        if path.endswith(".parquet"):
            yield from parquet_texts(path) if by_row else []
            return
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            chunks = iter(lambda: file.read(CHUNK) + file.readline(WHOLE_DOCUMENT), b"")
            yield from file if by_row else chunks
    except BadInput:
        raise
    except Exception as error:  # gzip, zlib and pyarrow raise their own
        fail(f"cannot read {path} ({error}); fetch it again or leave it out")


def parquet_texts(path: str) -> Iterator[bytes | None]:
    """The column `field` of a parquet file, a string of each row in UTF-8. Raises BadInput."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fail(f"{path} needs the library pyarrow; type: pip install pyarrow")
    with ParquetFile(path, buffer_size=CHUNK, pre_buffer=False) as file:  # a group may be large
        texts = (column for column in file.schema if column.physical_type == "BYTE_ARRAY")
        names = [column.name for column in texts if column.name == column.path]  # not in another
        if field not in names:
            fail(f"{path} has no texts in {field!r}; expected --field=NAME, one of {names}")
        for batch in file.iter_batches(BATCH, columns=[field]):
            yield from batch.column(0).cast("binary").to_pylist()


# ---- what a file is ------------------------------------------------------------------------------


def refuse_binary(input: str, heads: Iterable) -> None:
    """Raises BadInput if a file is no text, with what to do. heads: (path, its first bytes) of
    each."""
    mark = b".json" if input.endswith(".json") else b""  # in a folder such a file may be code
    advices = {path: advice_on(path, mark + head[:HEAD]) for path, head in heads}
    suffixes = [Path(path).suffix for path, advice in advices.items() if not advice]
    for path, advice in advices.items():
        if advice:
            if suffixes and os.path.isdir(input):
                advice += f"; to leave it out: --input='{input}/**/*{statistics.mode(suffixes)}'"
            fail(f"{path} is not plain text: {advice}")


def advice_on(path: str, head: bytes, default: str = "") -> str:
    """What a file is that begins with `head`, if no text, and what to do."""
    matches = (text for start, text in NO_TEXT.items() if re.match(start, head, re.DOTALL))
    return next(matches, default).format(path=Path(path), root=Path(path).with_suffix(""))


# ---- the named texts, or a file ------------------------------------------------------------------


def find_text(name, folder, input, tokenizer) -> tuple:
    """As find_corpus(), of a text with the name `name`, or in the file `input`. If it has borders
    between documents it is a corpus, unless its tokenizer has no end of text."""
    if input:
        raw = read_file(input)
        refuse_binary(input, [(input, raw)])
        source = os.path.basename(input)
    elif name in TEXTS:
        source, read = TEXTS[name]
        raw = read()
    else:
        fail(
            f"no dataset {name!r} in {os.path.abspath(os.path.dirname(folder))}; type: "
            f"python prepare_data.py {name} --input=FILE ({' and '.join(TEXTS)} need none)"
        )
    digest = hashlib.sha256(raw).hexdigest()
    if digest == SHAKESPEARE_SHA256:
        source = "TinyShakespeare"
    elif name == "shakespeare":
        fail(
            f"{input or 'the download'} is not the text that {name} stands for, "
            f"{SHAKESPEARE_BYTES:,} bytes; {WITHOUT_NETWORK}"
        )
    meta = {"tokenizer": tokenizer, "source": f"{source} (SHA-256 {digest[:16]}...)"}
    kind = TOKENIZERS[tokenizer]
    if borders := raw.count(SEPARATOR.encode()):
        if hasattr(kind, "end_of_text"):
            return find_corpus(input, tokenizer)
        print0(
            f"{borders:,} {SEPARATOR} are ordinary characters; "
            "--tokenizer=gpt2 makes them borders of documents, and so does byte"
        )
    corpus = Corpus([])
    text = corpus.clean(decode_utf8(raw, input or name))
    corpus.report()
    if hasattr(kind, "learn"):
        meta |= kind.learn([text])
    return meta, last_part_apart(text), []


def manual() -> bytes:
    """The topics of CPython's manual, but those that another one repeats: a copy in the validation
    split would only test what was memorized."""
    from pydoc_data.topics import topics

    texts = dict.fromkeys(topics[topic] for topic in sorted(topics))
    everything = "".join(texts)
    bodies = {text: text.partition("*\n\n")[2].strip() for text in texts}  # without headings
    return "".join(text for text in texts if everything.count(bodies[text]) < 2).encode()


def products() -> bytes:
    """16,000 lines such as 940 x 519 = 487860, no two alike: a text that needs no file."""
    factors = ((n * 7919 % 997, n * 104729 % 613) for n in range(16_000))
    return "".join(f"{a} x {b} = {a * b}\n" for a, b in factors).encode()


def decode_utf8(raw: bytes, path: str) -> str:
    """The text of `raw`, which is from the file `path`. Raises BadInput."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        fail(
            f"{path} is not UTF-8 text at the end of {raw[: error.end][-20:]}; "
            f"{advice_on(path, raw, LATIN1)}"
        )


def read_shakespeare() -> bytes:
    """The bytes of TinyShakespeare, downloaded. Raises Offline if no server gives it."""
    url = os.environ.get("SHAKESPEARE_URL", SHAKESPEARE_URL)
    print0(f"downloading {url}")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return response.read(SHAKESPEARE_BYTES + 1)
    except urllib.error.HTTPError as error:  # a server answers: no reason for another text
        fail(f"{url}: {error}; {WITHOUT_NETWORK}")
    except OSError as error:
        raise Offline(f"cannot get {url}: {error}; {WITHOUT_NETWORK}") from error


TEXTS = {  # a name that needs no --input: what it stands for, in words, and its bytes
    "shakespeare": ("TinyShakespeare", read_shakespeare),
    "pydoc": (f"pydoc_data.topics of CPython {sys.version.split()[0]}", manual),
    "formula": ("products() in prepare_data.py", products),
}


def main(argv: list[str] | None = None) -> None:
    names = []
    with configured(globals(), argv=argv, names=names):
        if len(names) != 1:
            fail(f"expected one NAME, found {len(names)}; type: python prepare_data.py shakespeare")
        prepare(names[0], data_dir, input, tokenizer)


if __name__ == "__main__":
    sys.exit(run_script(main))
