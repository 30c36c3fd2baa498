"""Make the datasets that train.py reads, data/NAME/{train.bin,val.bin,meta.json}:

    python prepare_data.py shakespeare                       # TinyShakespeare, downloaded once
    python prepare_data.py pydoc                             # CPython's own manual: no network
    python prepare_data.py formula                           # products, the same text everywhere
    python prepare_data.py NAME --input=FILE                 # any UTF-8 text
    python prepare_data.py NAME --input=FILE --tokenizer=gpt2
    python prepare_data.py NAME --input=FOLDER               # a corpus of any size: gpt2 tokens
    python prepare_data.py NAME --input='web/*.jsonl.gz' --field=content

Of one text, the first 90% of its characters are to train on. A dataset that exists is never
overwritten. A corpus is streamed: a folder (its files in order of their paths, without hidden
ones), a glob in quotes, a .jsonl (one object a line), a .gz of a text or .jsonl, or a text of more
than 32 MB. How to get a dataset of Hugging Face as a .jsonl: docs/forks.md.
- A line of a .jsonl is a document, and so is a text file. In a text, also in one of less than 32
  MB, `<|endoftext|>` separates documents, with up to one newline on each side; for char, and in a
  .jsonl, it is text. A document longer than WHOLE_DOCUMENT is split into documents of up to PART,
  at line ends if it has any. Each is followed by an end-of-text id: 50256 for gpt2, 0 for byte.
  NUL, and half a surrogate pair, become U+FFFD.
- A document goes to val if the hash of its content, as a fraction, is below val_fraction: copies of
  a document share a split, whatever the order of files. The same command writes the same bytes. If
  the default holds out too little, it is doubled until it does not; of one or two documents, their
  last tenths are held out. A typed val_fraction is kept, so that no document changes sides when
  others are added, unless it holds out nothing.
- A byte order mark is removed, and CRLF is one newline. Rows of a .jsonl that cannot be read are
  left out, up to max_bad_rows. All of that is printed.
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
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from plumbing import data
from plumbing.cli import configured, fail, run_script
from plumbing.console import print0
from plumbing.data import SPLITS, TOKENIZERS, DataError, Offline, read_file
from plumbing.files import digest_of, fsync

# What to make, and where
data_dir = "data"  # the dataset's folder is made in this one
input = ""  # a UTF-8 text file, .jsonl, folder or glob; "" = what NAME stands for
tokenizer = "auto"  # auto | char | byte | gpt2; char: an id for each distinct character, for one
#  text of up to 32 MB; gpt2 needs tiktoken; auto = char for one such text, gpt2 for a corpus
chars_of = ""  # another dataset, whose tokenizer and characters are used: its weights then fit both

# Of a corpus
field = "text"  # the field of a .jsonl object that holds the text
val_fraction = 0.0005  # share of the documents held out for validation, (0, 1); this one is doubled
#  until it holds out enough, any other is kept
max_bad_rows = 0.001  # share of the rows of .jsonl files that may be left out as unreadable, [0, 1]

# Bytes
WHOLE_TEXT = 32_000_000  # a plain text up to this size is read whole (char: up to 0.5 GB of memory)
WHOLE_DOCUMENT = 1_000_000  # a text file up to this size is one document, as most novels are
PART = 64_000  # largest document cut from a longer file; small, so that val gets enough of them
MIN_VAL = 16_000  # to hold out at least, or a twentieth of the text if that is less
CHUNK = 1_000_000  # read at a time
BATCH = 64  # documents that are tokenized together
DEFAULT_FRACTION = val_fraction

SEPARATOR = "<|endoftext|>"  # the border of two documents in a plain text
# A newline on each side belongs to it; the two bytes after it show whether one follows.
BORDER = re.compile(rb"<\|endoftext\|>(?:\r?\n|(?=..))", re.DOTALL)
BORDER_BYTES = 16  # of CRLF, <|endoftext|> and CR: what more bytes may show to be a border

LOAD = (
    'pip install datasets && python -c "from datasets import load_dataset as load; '
    "load('%s', data_files='{path}', split='train').to_json('{path}.jsonl')\"; "
    "then --input='{path}.jsonl' (data_files may be a glob)"
)
FILTER = (  # corpora leave out hidden files
    "type: mv '{path}' '{folder}/.{name}' && gzip -dcf '{folder}/.{name}' | %s > '{path}'; "
    "then the same command again"
)
NO_TEXT = {  # how a file begins that is no text: what it is, and what to do
    rb"PAR1": "parquet; type: " + LOAD % "parquet",
    rb"ARROW1|\xff{4}": "Arrow; type: " + LOAD % "arrow",
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
    rb"(?=.*\0).*[\x01-\x08]": "binary; expected UTF-8",
    rb".*\0": "it has a NUL; " + FILTER % "tr -d '\\000'",
}
LATIN1 = "if it is Latin-1, " + FILTER % "iconv -f latin1 -t UTF-8"
HEAD = 64_000  # of a file: enough to tell what it is

TEXTS = ("shakespeare", "pydoc", "formula")  # names that need no --input
SHAKESPEARE_URL = (  # the environment variable of this name gives another, such as file://
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
TIMEOUT = 4  # seconds without an answer that count as no network


# ---- one dataset ---------------------------------------------------------------------------------


def prepare(name, data_dir, input="", tokenizer="auto") -> tuple[str, dict]:
    """Make the dataset data_dir/name, or verify the one that exists. Returns (its folder, its
    meta).

    input: a text file or a corpus, or "" for what `name` stands for. Raises DataError or Offline.
    """
    folder = data.folder_of(name, data_dir)
    old = data.verified_meta(folder) if os.path.exists(f"{folder}/meta.json") else {}
    streamed = is_corpus(input)
    other = data.verified_meta(data.folder_of(chars_of, data_dir)) if chars_of else old
    if tokenizer == "auto":
        tokenizer = other.get("tokenizer", "gpt2" if streamed else "char")
    cleaned = Cleaned()
    if old and not input:
        meta = old | {"tokenizer": tokenizer}
    elif streamed:
        meta, documents = find_corpus(input, tokenizer, cleaned)
    else:
        meta, documents, streamed = find_text(name, folder, input, tokenizer, cleaned)
    if chars_of:
        chars = {"chars": other["chars"]} if "chars" in other else {}
        meta |= chars | {"source": f"{meta['source']}, vocabulary of {chars_of}"}
    if not old:
        meta = store(folder, meta, documents, streamed)
        cleaned.report()
        return folder, meta
    if described(meta) != described(old):
        hint = "choose another NAME, or delete that folder if no run depends on it"
        found = f"{folder} holds another dataset: {described(old)}, not {described(meta)}"
        raise DataError(f"{found}; {hint}")
    print0(f"{folder} is there already, {described(old)}; nothing to do")
    return folder, old


def is_corpus(input: str) -> bool:
    """Whether `input` is streamed: a folder, a glob, a .jsonl, a .gz, or a long text."""
    if not os.path.isfile(input):
        return os.path.isdir(input) or glob.has_magic(input)
    return input.endswith((".jsonl", ".gz")) or os.path.getsize(input) > WHOLE_TEXT


def described(meta: dict) -> str:
    """What a dataset is made of, in words. Two datasets of the same words are taken for one."""
    return f"{meta.get('tokenizer')} tokens of {meta.get('source')}"


class Cleaned(Counter):
    """What reading has changed -> how often, and what it has left out."""

    rows = 0  # of .jsonl files
    bad_rows = 0
    first_bad = ""
    likely_field = "NAME"  # the longest of the last row without the field

    def text(self, text: str) -> str:
        """`text` without a byte order mark, with newlines instead of CRLF."""
        self["byte order marks were removed"] += text.startswith("\ufeff")
        self["line ends were CRLF and are newlines now"] += text.count("\r\n")
        return text.removeprefix("\ufeff").replace("\r\n", "\n")

    def bad(self) -> str:
        share = f"{self.bad_rows:,} of {self.rows:,} rows cannot be read"
        return f"{share} (up to {max_bad_rows:.1%} are left out), the first: {self.first_bad}"

    def refuse_bad_rows(self, limit: float) -> None:
        """Raises DataError if more than this share of the rows are bad."""
        share = self.bad_rows / max(1, self.rows)
        if share > limit:
            hint = f"--max_bad_rows={share + 0.001:.3f} leaves these out, too"
            if share > 0.5:
                hint = f"expected a JSON object a line, its text in --field={self.likely_field}"
            raise DataError(f"{self.bad()}; {hint}")

    def report(self) -> None:
        for change, count in (+self).items():
            print0(f"{count:,} {change}")
        if self.bad_rows:
            print0(f"left out: {self.bad()}")


@contextlib.contextmanager
def making(folder: str) -> Iterator[str]:
    """Yields a new folder within `folder`. At the end its files move there, meta.json as the last;
    if anything goes wrong before, none does. Two processes that make one dataset have two folders,
    so what a killed one left behind is removed a day later."""
    try:
        os.makedirs(folder, exist_ok=True)
        for left in Path(folder).glob("unfinished_*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > 24 * 3600:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="unfinished_", dir=folder) as unfinished:
            yield unfinished
            made = sorted(Path(unfinished).iterdir(), reverse=True)
            for path in made:  # a full disk raises before any file has its name
                fsync(path)
            for path in made:
                path.replace(Path(folder, path.name))
        fsync(folder)
    except OSError as error:
        raise DataError(f"cannot write {folder} ({error}); write --data_dir=FOLDER") from error
    finally:
        for path in (folder, os.path.dirname(folder)):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(path)


def store(folder: str, meta: dict, documents: Iterable, streamed: bool) -> dict:
    """Write the dataset: `meta` as far as it is known, documents: (split, text). Returns its
    meta."""
    tokenizer = data.tokenizer_of(meta)
    meta["vocab_size"] = tokenizer.vocab_size
    meta["dtype"] = "uint16" if meta["vocab_size"] <= 2**16 else "uint32"
    ends = [tokenizer.end_of_text] if streamed else []
    with making(folder) as unfinished:
        val_bytes = write_tokens(unfinished, tokenizer, meta["dtype"], documents, ends)
        meta["sha256"] = {}
        for split in SPLITS:
            path = os.path.join(unfinished, f"{split}.bin")
            meta[f"{split}_tokens"] = os.path.getsize(path) // np.dtype(meta["dtype"]).itemsize
            meta["sha256"][f"{split}.bin"] = digest_of(path)
        meta["val_bytes"] = val_bytes
        tokens = [meta["train_tokens"], meta["val_tokens"]]
        what = "{:,} tokens to train on, {:,} to validate".format(*tokens)
        if min(tokens) < 2:
            raise DataError(f"{meta['source']}: it is too short: {what}; take more text")
        meta["start_id"] = data.find_start_id(unfinished, meta)
        Path(unfinished, "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    kind = f"{meta['tokenizer']}, vocabulary {meta['vocab_size']:,}"
    print0(f"made {folder} from {meta['source']}: {what} ({kind})")
    return meta


def write_tokens(folder: str, tokenizer, dtype: str, documents: Iterable, ends: list) -> int:
    """Write the ids of each document, and `ends` after it, to the .bin file of its split. Returns
    the bytes of the validation text."""
    encode_batch = getattr(tokenizer, "encode_batch", partial(map, tokenizer.encode))
    end = np.array(ends, dtype).tobytes()
    sizes = dict.fromkeys(SPLITS, 0)
    documents = iter(documents)
    said = time.perf_counter()
    with open(f"{folder}/train.bin", "wb") as train, open(f"{folder}/val.bin", "wb") as val:
        while batch := list(islice(documents, BATCH)):
            encoded = encode_batch([text for _, text in batch])
            for (split, text), ids in zip(batch, encoded, strict=True):
                file = train if split == "train" else val
                file.write(np.asarray(ids, dtype).tobytes() + end)
                sizes[split] += len(text.encode())
            if time.perf_counter() - said > 10:
                said = time.perf_counter()
                print0(f"{sum(sizes.values()) / 1e6:,.0f} MB of text")
    return sizes["val"]


# ---- a corpus ------------------------------------------------------------------------------------


def find_corpus(input: str, tokenizer: str, cleaned: Cleaned) -> tuple[dict, Iterator]:
    """(what is known of meta, an iterator over (split, text)) of the files of `input`.
    meta["source"] says what decides about the content: number and size of the files, and flags."""
    if hasattr(TOKENIZERS[tokenizer], "learn"):
        limit = f"{tokenizer} learns its vocabulary from one text of up to {WHOLE_TEXT // 10**6} MB"
        raise DataError(f"{limit}; write --tokenizer=gpt2 or --tokenizer=byte")
    files = input_files(input)
    refuse_binary(input, ((path, next(read_chunks(path), b"")) for path in files))
    total = f"{len(files):,} files, {sum(map(os.path.getsize, files)):,} bytes"
    name = os.path.basename(os.path.normpath(input))
    source = f"{name}, {total} (field {field}, val_fraction {val_fraction:g})"
    documents = split_corpus(partial(read_documents, files), cleaned)
    return {"tokenizer": tokenizer, "source": source}, documents


def split_corpus(read: Callable, cleaned: Cleaned) -> Iterator:
    """Yields (split, text) of the documents read(cleaned), by a fraction that holds out enough."""
    fraction = fraction_to_hold_out(clean(read, Cleaned()), val_fraction)
    if fraction == 1:
        print0("the last tenth of each document is held out: no --val_fraction holds out enough")
    else:
        print0(f"--val_fraction={fraction} is held out; typed, it stays when documents are added")
    for text in clean(read, cleaned):
        if fraction == 1:
            yield from last_tenth_apart(text)
        else:
            yield ("val" if draw_of(text) < fraction else "train"), text


def clean(read: Callable, cleaned: Cleaned) -> Iterator[str]:
    """Yields the documents read(cleaned) as they are stored. Raises DataError at the end if too many
    rows were bad."""
    for text in read(cleaned):
        text = re.sub("[\0\ud800-\udfff]", "\ufffd", cleaned.text(text))
        if text:
            yield text
    cleaned.refuse_bad_rows(max_bad_rows)


def last_tenth_apart(text: str) -> list[tuple[str, str]]:
    cut = int(0.9 * len(text))
    return [("train", text[:cut]), ("val", text[cut:])]


def draw_of(text: str) -> float:
    """In [0, 1), by the hash of the content."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fraction_to_hold_out(texts: Iterable[str], val_fraction: float) -> float:
    """val_fraction, doubled until it holds out enough of the texts; 1.0 if that is more than half
    of them. One that was typed need only hold out something. Reads no more than it needs to."""
    least = MIN_VAL if val_fraction == DEFAULT_FRACTION else 1
    drawn = []  # (draw, bytes) of each document
    total = 0
    held_out = 0
    for text in texts:
        draw = draw_of(text)
        size = len(text.encode())
        drawn.append((draw, size))
        total += size
        if draw < val_fraction:
            held_out += size
        if min(held_out, total - held_out) >= least:
            return val_fraction
    enough = min(least, total / 20)
    if enough <= held_out < total:
        return val_fraction
    while held_out < enough:
        val_fraction *= 2
        held_out = sum(size for draw, size in drawn if draw < val_fraction)
    return val_fraction if held_out <= total / 2 else 1.0


def input_files(input: str) -> list[str]:
    """Paths of a file, folder or glob, in their order. glob leaves out hidden ones."""
    pattern = f"{glob.escape(input)}/**" if os.path.isdir(input) else input
    paths = [input] if os.path.isfile(input) else sorted(glob.glob(pattern, recursive=True))
    return [path for path in paths if not os.path.isdir(path)]


def read_documents(files: list[str], cleaned: Cleaned) -> Iterator[str]:
    for path in files:
        if path.removesuffix(".gz").endswith(".jsonl"):
            yield from read_rows(path, cleaned)
        else:
            yield from text_documents(path, read_chunks(path), cleaned)


def read_rows(path: str, cleaned: Cleaned) -> Iterator[str]:
    """The texts in a .jsonl file."""
    for number, line in enumerate(read_chunks(path, by_line=True), 1):
        if not line.strip():
            continue
        cleaned.rows += 1
        try:
            row = json.loads(line)
            text = row[field]
            if type(text) is not str:
                raise TypeError(f"{field!r} is no string")
        except (ValueError, LookupError, TypeError) as error:
            cleaned.bad_rows += 1
            if cleaned.bad_rows == 1:
                cleaned.first_bad = f"{path}:{number}: {type(error).__name__}: {error}"
            if isinstance(error, KeyError):
                cleaned.likely_field = max(
                    row, key=lambda name: len(str(row[name])), default="NAME"
                )
            if cleaned.rows >= 100:
                cleaned.refuse_bad_rows(max(0.5, max_bad_rows))
        else:
            yield text


def text_documents(path: str, chunks: Iterable[bytes], cleaned: Cleaned) -> Iterator[str]:
    """The documents of a plain text."""
    return (decode_utf8(raw, path, offset) for offset, raw in parts(chunks, cleaned))


def parts(chunks: Iterable[bytes], cleaned: Cleaned) -> Iterator[tuple[int, bytes]]:
    """(offset, part) of a plain text: its documents without the borders between them, or parts of
    up to PART of one that is longer than WHOLE_DOCUMENT, each cut after a line end, or else between
    two characters."""
    rest = b""
    offset = 0  # of `rest`
    is_long = False
    for chunk in chain(chunks, [b""]):
        rest += chunk or b"\n"  # the end is as good as a line end
        margin = BORDER_BYTES if chunk else 1
        begin = 0
        while True:
            border = BORDER.search(rest, begin)
            last = border.start() if border else len(rest) - margin
            is_long = is_long or last - begin > WHOLE_DOCUMENT
            if is_long and last - begin > PART:
                latest = begin + PART
                characters = (i for i in range(latest, latest - 4, -1) if rest[i] & 0xC0 != 0x80)
                end = rest.rfind(b"\n", begin, latest) + 1 or next(characters, latest)
                yield offset + begin, rest[begin:end]
                begin = end
            elif border:
                document = rest[begin:last].removesuffix(b"\n").removesuffix(b"\r")
                yield offset + begin, document
                begin = border.end()
                cleaned[f"{SEPARATOR} are borders of documents"] += 1
                is_long = False
            else:
                break
        rest = rest[begin:]
        offset += begin
    yield offset, rest[:-1]


def read_chunks(path: str, by_line: bool = False) -> Iterator[bytes]:
    """The content of a file, decompressed, in chunks or in lines."""
    try:
        with open(path, "rb") as file:
            if file.peek(2).startswith(b"\x1f\x8b"):
                file = gzip.open(file)
            yield from file if by_line else iter(partial(file.read, CHUNK), b"")
    except Exception as error:  # gzip and zlib raise their own
        raise DataError(f"cannot read {path} ({error}); fetch it again or leave it out") from error


# ---- what a file is ------------------------------------------------------------------------------


def refuse_binary(input: str, heads: Iterable) -> None:
    """Raises DataError if a file is no text, with what to do. heads: (path, its first bytes) of
    each."""
    mark = b".json" if input.endswith(".json") else b""  # in a folder such a file may be code
    advices = {path: advice_on(path, mark + head[:HEAD]) for path, head in heads}
    for path, advice in advices.items():
        if advice:
            suffixes = (os.path.splitext(text)[1] for text in advices if not advices[text])
            for suffix, _ in Counter(suffixes).most_common(1):
                folder = input if os.path.isdir(input) else os.path.dirname(input) or "."
                advice += f"; to leave it out: --input='{folder}/**/*{suffix}'"
            raise DataError(f"{path} is not plain text: {advice}")


def advice_on(path: str, head: bytes, default: str = "") -> str:
    """What a file is that begins with `head`, if no text, and what to do."""
    matches = (text for start, text in NO_TEXT.items() if re.match(start, head, re.DOTALL))
    folder, name = os.path.split(path)
    root = os.path.splitext(path)[0]
    return next(matches, default).format(path=path, folder=folder or ".", name=name, root=root)


# ---- the named texts, or a file ------------------------------------------------------------------


def find_text(name, folder, input, tokenizer, cleaned) -> tuple[dict, Iterable, bool]:
    """(what is known of meta, (split, text) of each document, whether an end of text follows each):
    a text with borders between documents is a corpus, unless its tokenizer has no end of text. Of
    another, the first 90% of its characters are the one document, the rest the other."""
    if input:
        raw = read_file(input)
        refuse_binary(input, [(input, raw)])
        source = os.path.basename(input)
        if name in TEXTS and sha256(raw) != SHAKESPEARE_SHA256:
            raise DataError(f"{input} is not the text that {name} stands for; choose another NAME")
    elif name == "shakespeare":
        raw = read_shakespeare(folder)
    elif name == "pydoc":
        raw = manual().encode()
        source = f"pydoc_data.topics of CPython {sys.version.split()[0]}"
    elif name == "formula":
        raw = products().encode()
        source = "products() in prepare_data.py"
    else:
        how = f"python prepare_data.py {name} --input=FILE ({' and '.join(TEXTS)} need none)"
        raise DataError(f"no dataset {name!r} in {os.path.dirname(folder)}; type: {how}")
    if sha256(raw) == SHAKESPEARE_SHA256:
        source = "TinyShakespeare"
    source = f"{source} (SHA-256 {sha256(raw)[:16]}...)"
    meta = {"tokenizer": tokenizer, "source": source}
    if borders := raw.count(SEPARATOR.encode()):
        if hasattr(TOKENIZERS[tokenizer], "end_of_text"):
            meta["source"] += f" (val_fraction {val_fraction:g})"
            return meta, split_corpus(partial(text_documents, input, [raw]), cleaned), True
        hint = "--tokenizer=gpt2 makes them borders of documents, and so does byte"
        print0(f"{borders:,} {SEPARATOR} are ordinary characters; {hint}")
    text = cleaned.text(decode_utf8(raw, input or name))
    if hasattr(TOKENIZERS[tokenizer], "learn"):
        meta |= TOKENIZERS[tokenizer].learn(text)
    return meta, last_tenth_apart(text), False


def manual() -> str:
    """The topics of CPython's manual, but those that another one repeats: a copy in the validation
    split would only test what was memorized."""
    from pydoc_data.topics import topics

    texts = dict.fromkeys(topics[topic] for topic in sorted(topics))
    everything = "".join(texts)

    def is_repeated(text):
        body = text.partition("*\n\n")[2].strip()  # without the heading
        return everything.count(body) > 1

    return "".join(text for text in texts if not is_repeated(text))


def products() -> str:
    """16,000 lines such as 940 x 519 = 487860, no two alike: a text that needs no file."""
    factors = ((n * 7919 % 997, n * 104729 % 613) for n in range(16_000))
    return "".join(f"{a} x {b} = {a * b}\n" for a, b in factors)


def decode_utf8(raw: bytes, path: str, begin: int = 0) -> str:
    """The text of `raw`, bytes of the file `path` from offset `begin` on. Raises DataError."""
    try:
        text = raw.decode()
        odd = raw.find(0)
    except UnicodeDecodeError as error:
        odd = error.start
    if odd < 0:
        return text
    place = f"byte 0x{raw[odd]:02x} at offset {begin + odd}"
    raise DataError(f"{path} is not UTF-8 text: {place}; {advice_on(path, raw, LATIN1)}")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_shakespeare(folder: str) -> bytes:
    """The bytes of TinyShakespeare, from input.txt in `folder` if it is there, else downloaded to
    it in up to three tries. Raises Offline if no server answers, DataError if what one sends is not
    the text."""
    path = os.path.join(folder, "input.txt")
    if os.path.exists(path) and digest_of(path) == SHAKESPEARE_SHA256:
        return read_file(path)
    url = os.environ.get("SHAKESPEARE_URL") or SHAKESPEARE_URL
    hint = "python prepare_data.py pydoc needs no network; --input=FILE takes a copy"
    print0(f"downloading {url}")
    for attempt in range(3):
        time.sleep(attempt / 2)
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                raw = response.read(SHAKESPEARE_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise DataError(f"{url}: {error}; {hint}") from error
        except OSError as error:
            raw = b""
            if attempt:
                raise Offline(f"cannot reach {url}: {error}; {hint}") from error
        if sha256(raw) == SHAKESPEARE_SHA256:
            with making(folder) as unfinished:
                Path(unfinished, "input.txt").write_bytes(raw)
            return raw
    found = f"{url}: {len(raw):,} bytes with SHA-256 {sha256(raw)}"
    expected = f"{SHAKESPEARE_BYTES:,} bytes with SHA-256 {SHAKESPEARE_SHA256}"
    raise DataError(f"{found}; expected {expected}; {hint}")


def main(argv: list[str] | None = None) -> None:
    names = []
    with configured(globals(), argv=argv, names=names):
        if len(names) != 1:
            fail(f"expected one NAME, found {len(names)}; type: python prepare_data.py shakespeare")
        prepare(names[0], data_dir, input, tokenizer)


if __name__ == "__main__":
    sys.exit(run_script(main))
