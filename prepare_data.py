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
  others are added.
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
import math
import os
import re
import statistics
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from plumbing import data
from plumbing.cli import configured, fail, run_script
from plumbing.console import print0
from plumbing.data import SPLITS, TOKENIZERS, Offline, read_file
from plumbing.files import digest_of, write_json

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
CHUNK = 1_000_000  # read at a time, and to the end of the line
BATCH = 64  # documents that are tokenized together
DEFAULT_FRACTION = val_fraction

CLEANED = "taken out: byte order marks; replaced: CRLF by a newline, what is no character by U+FFFD"
SEPARATOR = "<|endoftext|>"  # the border of two documents in a plain text
BORDER = re.compile(rb"<\|endoftext\|>(?:\r?\n)?")

LOAD = (
    'pip install datasets && python -c "from datasets import load_dataset as load; '
    "load('%s', data_files='{path}', split='train').to_json('{path}.jsonl')\"; "
    "then --input='{path}.jsonl' (data_files may be a glob)"
)
FILTER = (  # corpora leave out hidden files
    "type: mv '{path}' '{path.parent}/.{path.name}' && "
    "gzip -dcf '{path.parent}/.{path.name}' | %s > '{path}'; "
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
    if tokenizer == "auto":
        tokenizer = other.get("tokenizer", "gpt2" if is_corpus(input) else "char")
    if old and not input:
        meta = old | {"tokenizer": tokenizer}
    elif is_corpus(input):
        meta, documents, ends = find_corpus(input, tokenizer)
    else:
        meta, documents, ends = find_text(name, folder, input, tokenizer)
    if chars_of:
        meta["source"] += f", vocabulary of {chars_of}"
        if "chars" in other:
            meta["chars"] = other["chars"]
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
    """Whether `input` is streamed: a folder, a glob, a .jsonl, a .gz, or a long text."""
    if not os.path.isfile(input):
        return os.path.isdir(input) or glob.has_magic(input)
    return input.endswith((".jsonl", ".gz")) or os.path.getsize(input) > WHOLE_TEXT


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
            fail(f"{meta['source']}: it is too short: {what}; take more text")
        meta["start_id"] = data.find_start_id(unfinished, meta)
        write_json(f"{unfinished}/meta.json", meta)
    print0(f"made {folder}, {described(meta)}: {what}, vocabulary {meta['vocab_size']:,}")
    return meta


def write_tokens(paths: dict, tokenizer, dtype, documents: Iterable, ends: list[int]) -> int:
    """Write the ids of each document, and `ends` after it, to the file of its split. Returns the
    bytes of the validation text."""
    end = np.array(ends, dtype).tobytes()
    val_bytes = 0
    threads = ThreadPoolExecutor()  # tiktoken encodes without Python's lock
    documents = iter(documents)
    batches = iter(lambda: list(islice(documents, BATCH)), [])
    with open(paths["train"], "wb") as train, open(paths["val"], "wb") as val, threads:
        for number, batch in enumerate(batches, 1):
            encoded = threads.map(tokenizer.encode, [text for _, text in batch])
            for (split, text), ids in zip(batch, encoded, strict=True):
                file = train if split == "train" else val
                file.write(np.asarray(ids, dtype).tobytes() + end)
                if split == "val":
                    val_bytes += len(text.encode())
            if number % 1000 == 0:
                print0(f"{number * BATCH:,} documents")
    return val_bytes


# ---- a corpus ------------------------------------------------------------------------------------


def find_corpus(input: str, tokenizer: str) -> tuple:
    """(what is known of meta, (split, text) of each document, the ids that follow each). In
    meta["source"] is what decides about the content: number and size of the files, and flags."""
    if hasattr(TOKENIZERS[tokenizer], "learn"):
        fail(
            f"{tokenizer} learns its vocabulary from one text of up to {WHOLE_TEXT // 10**6} MB; "
            "write --tokenizer=gpt2 or --tokenizer=byte"
        )
    files = input_files(input)
    refuse_binary(input, ((path, next(read_chunks(path), b"")) for path in files))
    source = (
        f"{os.path.basename(os.path.normpath(input))}, "
        f"{len(files):,} files, {sum(map(os.path.getsize, files)):,} bytes "
        f"(field {field}, val_fraction {val_fraction:g})"
    )
    meta = {"tokenizer": tokenizer, "source": source}
    return meta, split_apart(files), [TOKENIZERS[tokenizer].end_of_text]


def split_apart(files: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (split, text) of the documents in the files, and prints what has become of them."""
    fraction = val_fraction
    if fraction == DEFAULT_FRACTION:
        fraction = fraction_to_hold_out(Corpus(files))
    if fraction > 1:
        print0("the last tenth of each document is held out: no --val_fraction holds out enough")
    else:
        print0(f"--val_fraction={fraction} is held out; typed, it stays when documents are added")
    corpus = Corpus(files)
    for text in corpus:
        if fraction > 1:
            yield from last_tenth_apart(text)
        else:
            yield ("val" if draw_of(text) < fraction else "train"), text
    if corpus.cleaned:
        print0(CLEANED)
    if corpus.borders:
        print0(f"{corpus.borders:,} {SEPARATOR} are borders of documents")
    if corpus.bad_rows:
        print0(f"left out: {corpus.bad()}")


def last_tenth_apart(text: str) -> list[tuple[str, str]]:
    cut = int(0.9 * len(text))
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
        self.cleaned = False  # whether any was changed
        self.first_bad = ""

    def __iter__(self) -> Iterator[str]:
        """Raises BadInput, at the end if too many rows of .jsonl files were bad."""
        for path in self.files:
            is_rows = path.removesuffix(".gz").endswith(".jsonl")
            for item in self.read_rows(path) if is_rows else self.read_text(path):
                text = item if is_rows else decode_utf8(item, path)
                cleaned = clean(text)
                self.cleaned |= cleaned != text
                if cleaned:
                    yield cleaned
        self.refuse_bad_rows(max_bad_rows)

    def read_rows(self, path: str) -> Iterator[str]:
        """The texts in a .jsonl file."""
        for number, line in enumerate(read_chunks(path, by_line=True), 1):
            if not line.strip():
                continue
            self.rows += 1
            try:
                text = json.loads(line)[field]
                if type(text) is not str:
                    raise TypeError(f"{field!r} is no string")
            except (ValueError, LookupError, TypeError) as error:
                self.bad_rows += 1
                bad = f"{path}:{number}: {type(error).__name__}: {error} in {line[:100]}"
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
            fail(
                f"{self.bad()}; expected a JSON object a line, its text in --field=NAME; "
                f"--max_bad_rows={share:.3f} leaves these out"
            )

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


def read_chunks(path: str, by_line: bool = False) -> Iterator[bytes]:
    """The content of a file, decompressed, in chunks of whole lines, or in lines."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            chunks = iter(lambda: file.read(CHUNK) + file.readline(WHOLE_DOCUMENT), b"")
            yield from file if by_line else chunks
    except Exception as error:  # gzip and zlib raise their own
        fail(f"cannot read {path} ({error}); fetch it again or leave it out")


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
            f"no dataset {name!r} in {os.path.dirname(folder)}; type: "
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
    text = decode_utf8(raw, input or name)
    cleaned = clean(text)
    if cleaned != text:
        print0(CLEANED)
    if hasattr(kind, "learn"):
        meta |= kind.learn(cleaned)
    return meta, last_tenth_apart(cleaned), []


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
