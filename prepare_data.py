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
- A line of a .jsonl is a document, and so is a text file; one longer than WHOLE_DOCUMENT is split
  into documents of up to PART, at line ends if it has any. Each is followed by an end-of-text id:
  50256 for gpt2, 0 for byte. NUL, and half a surrogate pair, become U+FFFD.
- A document goes to val if the hash of its content, as a fraction, is below val_fraction: copies of
  a document share a split, whatever the order of files. The same command writes the same bytes. If
  that holds out too little, val_fraction is raised until it does; of one or two documents, their
  last tenths are held out.
- A byte order mark is removed, and CRLF is one newline. Rows of a .jsonl that cannot be read are
  skipped, up to 0.1% of them. All of that is printed.
"""

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from plumbing import console, data
from plumbing.cli import configured, fail, run_script
from plumbing.data import SPLITS, TOKENIZERS, DataError, Offline, read_file
from plumbing.files import digest_of, fsync

# What to make, and where
data_dir = "data"  # the dataset's folder is made in this one
input = ""  # a UTF-8 text file, .jsonl, folder or glob; "" = what NAME stands for
tokenizer = "auto"  # auto | char | byte | gpt2; char: an id for each distinct character, for one
#  text of up to 32 MB; gpt2 needs tiktoken; auto = char for one such text, gpt2 for a corpus

# Of a corpus
field = "text"  # the field of a .jsonl object that holds the text
val_fraction = 0.0005  # share of the documents held out for validation, (0, 1)

# Bytes
WHOLE_TEXT = 32_000_000  # a plain text up to this size is read whole (char: up to 0.5 GB of memory)
WHOLE_DOCUMENT = 1_000_000  # a text file up to this size is one document, as most novels are
PART = 64_000  # largest document cut from a longer file; small, so that val gets enough of them
MIN_VAL = 16_000  # to hold out at least, or a twentieth of the text if that is less
CHUNK = 1_000_000  # read at a time
BATCH = 64  # documents that are tokenized together
MAX_BAD_ROWS = 0.001  # share of the rows of .jsonl files that may be unreadable

TEXTS = ("shakespeare", "pydoc", "formula")  # names that need no --input
SHAKESPEARE_URL = (  # the environment variable of this name gives another, such as file://
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
TIMEOUT = 4  # seconds without an answer that count as no network


# ---- one dataset ---------------------------------------------------------------------------------


def prepare(name, data_dir, input="", tokenizer="auto", print0=console.print0) -> tuple[str, dict]:
    """Make the dataset data_dir/name, or verify the one that exists. Returns (its folder, its
    meta).

    input: a text file or a corpus, or "" for what `name` stands for. Raises DataError or Offline.
    """
    folder = data.folder_of(name, data_dir)
    old = data.verified_meta(folder) if os.path.exists(f"{folder}/meta.json") else {}
    streamed = is_corpus(input)
    if tokenizer == "auto":
        tokenizer = old.get("tokenizer", "gpt2" if streamed else "char")
    cleaned = Cleaned()
    if old and not input:
        meta = old | {"tokenizer": tokenizer}
    elif streamed:
        meta, documents = find_corpus(input, tokenizer, cleaned, print0)
    else:
        meta, documents = find_text(name, folder, input, tokenizer, cleaned, print0)
    if not old:
        meta = store(folder, meta, documents, streamed, print0)
        cleaned.report(print0)
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


@dataclass
class Cleaned:
    """What reading has changed and left out."""

    marks: int = 0  # byte order marks
    line_ends: int = 0  # CRLF
    rows: int = 0  # of .jsonl files
    bad_rows: int = 0
    first_bad: str = ""

    def text(self, text: str) -> str:
        """`text` without a byte order mark, with newlines instead of CRLF."""
        self.marks += text.startswith("\ufeff")
        self.line_ends += text.count("\r\n")
        return text.removeprefix("\ufeff").replace("\r\n", "\n")

    def bad(self) -> str:
        found = f"{self.bad_rows:,} of {self.rows:,} rows cannot be read"
        return f"{found}, the first: {self.first_bad}"

    def refuse_bad_rows(self, allowed: int) -> None:
        """Raises DataError if more rows are bad than allowed and MAX_BAD_ROWS together."""
        if self.bad_rows > allowed + MAX_BAD_ROWS * self.rows:
            raise DataError(f"{self.bad()}; expected a JSON object a line, --field=NAME its text")

    def report(self, print0: Callable) -> None:
        if self.marks:
            print0(f"removed {self.marks:,} byte order marks")
        if self.line_ends:
            print0(f"{self.line_ends:,} line ends were CRLF and are newlines now")
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


def store(folder: str, meta: dict, documents: Iterable, streamed: bool, print0: Callable) -> dict:
    """Write the dataset: `meta` as far as it is known, documents: (split, text). Returns its
    meta."""
    tokenizer = data.tokenizer_of(meta)
    meta["vocab_size"] = tokenizer.vocab_size
    meta["dtype"] = "uint16" if meta["vocab_size"] <= 2**16 else "uint32"
    ends = [tokenizer.end_of_text] if streamed else []
    with making(folder) as unfinished:
        val_bytes = write_tokens(unfinished, tokenizer, meta["dtype"], documents, ends, print0)
        hashes = {}
        for split in SPLITS:
            path = os.path.join(unfinished, f"{split}.bin")
            meta[f"{split}_tokens"] = os.path.getsize(path) // np.dtype(meta["dtype"]).itemsize
            hashes[f"{split}.bin"] = digest_of(path)
        meta["val_bytes"] = val_bytes
        meta["sha256"] = hashes
        tokens = [meta["train_tokens"], meta["val_tokens"]]
        what = "{:,} tokens to train on, {:,} to validate".format(*tokens)
        if min(tokens) < 2:
            raise DataError(f"the text is too short: {what}; take more text")
        Path(unfinished, "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    kind = f"{meta['tokenizer']}, vocabulary {meta['vocab_size']:,}"
    print0(f"made {folder} from {meta['source']}: {what} ({kind})")
    return meta


def write_tokens(
    folder: str, tokenizer, dtype: str, documents: Iterable, ends: list, print0: Callable
) -> int:
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


def find_corpus(
    input: str, tokenizer: str, cleaned: Cleaned, print0: Callable
) -> tuple[dict, Iterator]:
    """(what is known of meta, an iterator over (split, text)) of the files of `input`.
    meta["source"] says what decides about the content: number and size of the files, and flags."""
    if hasattr(TOKENIZERS[tokenizer], "learn"):
        found = f"{tokenizer} learns its vocabulary from one text of up to {WHOLE_TEXT // 10**6} MB"
        raise DataError(f"{found}; write --tokenizer=gpt2 or --tokenizer=byte")
    files = input_files(input)
    size = sum(map(os.path.getsize, files))
    found = f"{len(files):,} files, {size:,} bytes"
    if not size:
        raise DataError(f"{input}: {found}; expected text, .jsonl or .gz")
    name = os.path.basename(os.path.normpath(input))
    source = f"{name}, {found} (field {field}, val_fraction {val_fraction:g})"

    def read(cleaned: Cleaned) -> Iterator[str]:
        for text in chain.from_iterable(read_documents(path, cleaned) for path in files):
            text = re.sub("[\0\ud800-\udfff]", "\ufffd", cleaned.text(text))
            if text:
                yield text
        cleaned.refuse_bad_rows(allowed=0)

    return {"tokenizer": tokenizer, "source": source}, split_corpus(read, cleaned, print0)


def split_corpus(read: Callable, cleaned: Cleaned, print0: Callable) -> Iterator:
    """Yields (split, text) of read(cleaned), with a val_fraction that holds out enough."""
    enough = fraction_to_hold_out(read(Cleaned()), val_fraction)
    if enough != val_fraction:
        instead = (
            "the last tenth of each document is held out" if enough == 1 else f"{enough:g} is used"
        )
        print0(f"--val_fraction={val_fraction:g} does not fit this text; {instead} instead")
    for text in read(cleaned):
        if enough == 1:
            yield from last_tenth_apart(text)
        else:
            yield ("val" if draw_of(text) < enough else "train"), text


def last_tenth_apart(text: str) -> list[tuple[str, str]]:
    cut = int(0.9 * len(text))
    return [("train", text[:cut]), ("val", text[cut:])]


def draw_of(text: str) -> float:
    """In [0, 1), by the hash of the content."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fraction_to_hold_out(texts: Iterable[str], val_fraction: float) -> float:
    """val_fraction, doubled until it holds out enough of the texts; 1.0 if that is more than half
    of them. Reads no more than it needs to."""
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
        if min(held_out, total - held_out) >= MIN_VAL:
            return val_fraction
    enough = min(MIN_VAL, total / 20)
    if enough <= held_out < total:
        return val_fraction
    while held_out < enough:
        val_fraction *= 2
        held_out = sum(size for draw, size in drawn if draw < val_fraction)
    return val_fraction if held_out <= total / 2 else 1.0


def input_files(input: str) -> list[str]:
    """Paths of a file, folder or glob, in their order. glob leaves out hidden ones."""
    pattern = f"{glob.escape(input)}/**" if os.path.isdir(input) else input
    found = [input] if os.path.isfile(input) else sorted(glob.glob(pattern, recursive=True))
    for path in found:
        if not os.access(path, os.R_OK):
            raise DataError(f"cannot read {path}: no permission, or a link to nothing")
    return [path for path in found if not os.path.isdir(path)]


def read_documents(path: str, cleaned: Cleaned) -> Iterator[str]:
    """The documents of one file."""
    if not path.removesuffix(".gz").endswith(".jsonl"):
        yield from (decode_utf8(raw, path, offset) for offset, raw in parts(read_chunks(path)))
        return
    for number, line in enumerate(read_chunks(path, by_line=True), 1):
        if not line.strip():
            continue
        cleaned.rows += 1
        try:
            text = json.loads(line)[field]
            if type(text) is not str:
                raise TypeError(f"{field!r} is no string")
        except (ValueError, LookupError, TypeError) as error:
            cleaned.bad_rows += 1
            found = f"{path}:{number}: {type(error).__name__}: {error}"
            cleaned.first_bad = cleaned.first_bad or found
            cleaned.refuse_bad_rows(allowed=1)
        else:
            yield text


def parts(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(offset, part): all of a text, or parts of up to PART if it is longer than WHOLE_DOCUMENT,
    each cut after a line end, or else between two characters."""
    rest = b""
    offset = 0
    is_long = False
    for chunk in chunks:
        rest += chunk
        is_long = is_long or len(rest) > WHOLE_DOCUMENT
        while is_long and len(rest) > PART:
            begins = (i for i in range(PART, PART - 4, -1) if rest[i] & 0xC0 != 0x80)
            end = rest.rfind(b"\n", 0, PART) + 1 or next(begins, PART)
            yield offset, rest[:end]
            rest = rest[end:]
            offset += end
    if rest:
        yield offset, rest


def read_chunks(path: str, by_line: bool = False) -> Iterator[bytes]:
    """The content of a file, decompressed, in chunks or in lines."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            yield from file if by_line else iter(partial(file.read, CHUNK), b"")
    except Exception as error:  # gzip and zlib raise their own
        raise DataError(f"cannot read {path} ({error}); fetch it again or leave it out") from error


# ---- the named texts, or a file ------------------------------------------------------------------


def find_text(name, folder, input, tokenizer, cleaned, print0) -> tuple[dict, list]:
    """(what is known of meta, [(split, text)]): the first 90% of a text's characters, and the
    rest."""
    if input:
        raw = read_file(input)
        source = os.path.basename(input)
        if name in TEXTS and sha256(raw) != SHAKESPEARE_SHA256:
            raise DataError(f"{input} is not the text that {name} stands for; choose another NAME")
    elif name == "shakespeare":
        raw = read_shakespeare(folder, print0)
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
    text = cleaned.text(decode_utf8(raw, input or name))
    meta = {"tokenizer": tokenizer, "source": f"{source} (SHA-256 {sha256(raw)[:16]}...)"}
    if hasattr(TOKENIZERS[tokenizer], "learn"):
        meta |= TOKENIZERS[tokenizer].learn(text)
    return meta, last_tenth_apart(text)


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
        odd = raw.find(0)  # a binary file, or UTF-16 of plain letters
        why = "binary"
    except UnicodeDecodeError as error:
        odd, why = error.start, error.reason
    if odd < 0:
        return text
    found = f"{path} is not UTF-8 text: byte 0x{raw[odd]:02x} at offset {begin + odd} ({why})"
    raise DataError(f"{found}; leave it out, or convert it: iconv -f latin1 (or UTF-16) -t UTF-8")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_shakespeare(folder: str, print0: Callable) -> bytes:
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
