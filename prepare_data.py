"""Make the datasets that train.py reads, data/NAME/{train.bin,val.bin,meta.json}:

    python prepare_data.py shakespeare                       # TinyShakespeare, downloaded once
    python prepare_data.py pydoc                             # CPython's own manual: no network
    python prepare_data.py NAME --input=FILE                 # any UTF-8 text
    python prepare_data.py NAME --input=FILE --tokenizer=gpt2
    python prepare_data.py NAME --input=FOLDER               # a corpus of any size: gpt2 tokens
    python prepare_data.py NAME --input='web/*.jsonl.zst' --field=content
    python prepare_data.py openwebtext                       # or fineweb: downloads with `datasets`

train.bin and val.bin are flat token ids: of one text the first 90% of its characters, and the rest.
meta.json says how to read them and holds their SHA-256. It is written last, so a folder with a
meta.json is a complete dataset, which is never overwritten. Text is used as it is: line ends are
not translated. The environment variable SHAKESPEARE_URL gives another address for TinyShakespeare
(a mirror, or file://); its hash is checked all the same.

A corpus is streamed: a folder (its files in order of their paths; hidden ones are skipped), a glob in
quotes, a .jsonl (one object a line), a .gz or .zst of a text or .jsonl, or a long text.
- A line of a .jsonl is a document, and so is a text file; one longer than WHOLE_DOCUMENT is split
  into documents of up to PART, at line ends if it has any. Empty documents are skipped.
- Each document is followed by an end-of-text id: 50256 for gpt2; 0 for byte, which has none of its
  own (a text file may not contain NUL bytes). val_bytes counts the text without these.
- A document goes to val if the hash of its content, as a fraction, is below val_fraction: copies of
  a document share a split, whatever the order of files. The same command writes the same bytes.
- Half a surrogate pair, which JSON allows and UTF-8 does not, becomes U+FFFD. So does NUL.
"""

import contextlib
import fcntl
import glob
import gzip
import hashlib
import http.client
import json
import os
import queue
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from plumbing import data
from plumbing.cli import configured, fail, run_script
from plumbing.data import CORPORA, SPLITS, TOKENIZERS, DataError, Offline, decode_utf8, needed
from plumbing.files import fsync, replacing

# What to make, and where
data_dir = "data"  # the dataset's folder is made in this one
input = ""  # a UTF-8 text file, .jsonl, folder or glob; "" = what NAME stands for
tokenizer = "auto"  # char (one id for each distinct character), byte, or gpt2 (needs tiktoken)
#  auto = char for one small text, gpt2 for a corpus

# Of a corpus
field = "text"  # the field of a .jsonl object that holds the text
val_fraction = 0.0005  # share of the documents held out for validation, (0, 1)

# Bytes
WHOLE_TEXT = 32_000_000  # a plain text up to this size is read whole (char: 0.90 GB of memory)
WHOLE_DOCUMENT = 4_000_000  # a text file up to this size is one document (a long novel has 3 MB)
PART = 64_000  # largest document cut from a longer file; small, so that val gets enough of them
LONGEST_LINE = 16_000_000  # of a .jsonl
CHUNK = 1_000_000  # read at a time
BATCH = 64  # documents that the threads tokenize together

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
TIMEOUT = 4  # seconds without an answer that count as no network
DOWNLOAD_SECONDS = 60  # for all of the download; a server may send a byte a second
NO_NETWORK = "; python prepare_data.py pydoc needs no network, and --input=FILE takes a copy"


# ---- one dataset ---------------------------------------------------------------------------------


def prepare(name, data_dir, input="", tokenizer="auto", say=print, **of_corpus) -> tuple[str, dict]:
    """Make the dataset data_dir/name. Returns (its folder, its meta). If it exists, it is checked
    and left as it is.

    input: a text file or a corpus, or "" for what `name` stands for. of_corpus: values of the
    corpus knobs above. Raises DataError or Offline.
    """
    folder = data.dataset_folder(name, data_dir)
    if tokenizer not in ("auto", *TOKENIZERS):
        known = "|".join(TOKENIZERS)
        raise DataError(f"unknown tokenizer {tokenizer!r}; write --tokenizer={known}")
    with making(folder, say):
        old = data.read_meta(folder) if data.exists(folder) else {}
        streamed = is_corpus(name, input)
        if tokenizer == "auto":
            usual = "gpt2" if streamed else "char"
            tokenizer = old.get("tokenizer") if old else usual
        if old and (old.get("tokenizer") != tokenizer or not input):
            return keep(folder, old, old.get("tokenizer") == tokenizer, say)
        options = {"tokenizer": tokenizer, "field": field, "val_fraction": val_fraction} | of_corpus
        if streamed:
            meta, documents = find_corpus(name, input, options)
        else:
            meta, documents = find_text(name, folder, input, tokenizer, say)
        if old:
            marks = [each.get("source", "").rpartition(" (")[2] for each in (old, meta)]
            return keep(folder, old, marks[0] == marks[1], say)
        return folder, write(folder, meta, documents, say)


def is_corpus(name: str, input: str) -> bool:
    """Whether to stream the input: all but a plain text file of up to WHOLE_TEXT bytes."""
    if not input:
        return name in CORPORA
    if os.path.isfile(input):
        packed = input.endswith((".jsonl", ".gz", ".zst"))
        return packed or os.path.getsize(input) > WHOLE_TEXT
    return os.path.isdir(input) or glob.has_magic(input)


def keep(folder: str, old: dict, same: bool, say: Callable) -> tuple[str, dict]:
    """(folder, meta) of a dataset that exists, once verified. Raises DataError unless `same`."""
    what = f"{old.get('tokenizer')} tokens of {old.get('source')}"
    if not same:
        hint = "choose another NAME, or delete that folder if no run depends on it"
        raise DataError(f"{folder} holds another dataset: {what}; {hint}")
    data.verify(folder, old)
    say(f"{folder} is there already, {what}; nothing to do")
    return folder, old


@contextlib.contextmanager
def making(folder: str, say: Callable) -> Iterator[None]:
    """Only one process at a time makes a dataset. What a killed one left is removed, and so are
    folders that are made here and stay empty."""
    new = [path for path in (folder, os.path.dirname(folder)) if not os.path.exists(path)]
    try:
        os.makedirs(folder, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # network disks that cannot lock a folder
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    say(f"another process is making {folder}; waiting for it")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    os.makedirs(folder, exist_ok=True)  # the other one failed, and removed it
            for leftover in Path(folder).glob("*.tmp"):
                leftover.unlink()
            yield
        finally:
            os.close(lock)
    except OSError as error:
        found = f"cannot write {folder}: {error.strerror or error}"
        raise DataError(f"{found}; write --data_dir=FOLDER") from error
    finally:
        for empty in new:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(empty)


@contextlib.contextmanager
def new_files(folder: str, *names: str) -> Iterator[dict]:
    """Yields {name: open file}. At the end they get their names, the last one last; if anything goes
    wrong before, none does."""
    with contextlib.ExitStack() as renames, contextlib.ExitStack() as opened:
        files = {}
        for name in reversed(names):  # the stack exits in reverse
            temporary = renames.enter_context(replacing(os.path.join(folder, name)))
            files[name] = opened.enter_context(open(temporary, "wb"))
        yield files
        for file in files.values():
            file.close()
            fsync(file.name)  # a full disk raises before any file has its name


def write(folder: str, meta: dict, documents: Iterable, say: Callable) -> dict:
    """Write the dataset: `meta` as far as it is known, documents: (split, text). Returns its meta."""
    tokenizer = data.tokenizer_of(meta)
    meta["vocab_size"] = int(tokenizer.vocab_size)
    meta["dtype"] = "uint16" if meta["vocab_size"] <= 2**16 else "uint32"
    streamed = not isinstance(documents, list)
    documents = iter(documents)
    ends = [tokenizer.end_of_text] if streamed and hasattr(tokenizer, "end_of_text") else []
    tokens, sizes, counts = (dict.fromkeys(SPLITS, 0) for _ in range(3))
    digests = {split: hashlib.sha256() for split in SPLITS}
    began = said = time.perf_counter()
    with (
        new_files(folder, "train.bin", "val.bin", "meta.json") as files,
        ThreadPoolExecutor() as pool,
    ):
        while batch := list(islice(documents, BATCH)):
            encoded = pool.map(tokenizer.encode, [text for _, text in batch])
            for (split, text), ids in zip(batch, encoded, strict=True):
                content = b"".join(
                    np.asarray(each, meta["dtype"]).tobytes() for each in (ids, ends)
                )
                files[f"{split}.bin"].write(content)
                digests[split].update(content)
                tokens[split] += len(ids) + len(ends)
                sizes[split] += len(text.encode())
                counts[split] += 1
            if time.perf_counter() - said > 10:
                said = time.perf_counter()
                done = sum(sizes.values()) / 1e6
                say(f"{done:,.0f} MB of text, {done / (said - began):.1f} MB/s")
        if min(tokens.values()) < 2:
            found = f"too short: {tokens['train']} tokens to train on, {tokens['val']} to validate"
            hint = f", or write --val_fraction={min(0.5, 10 / max(1, sum(counts.values()))):.2g}"
            need = "expected 2 * block_size and block_size + 1; take more text"
            raise DataError(f"the text is {found}; {need}{hint if streamed else ''}")
        meta |= {f"{split}_tokens": tokens[split] for split in SPLITS}
        meta["val_bytes"] = sizes["val"]
        meta["sha256"] = {f"{split}.bin": digests[split].hexdigest() for split in SPLITS}
        files["meta.json"].write(json.dumps(meta, indent=1).encode() + b"\n")
    if streamed:
        say(f"{counts['train']:,} documents to train on, {counts['val']:,} to validate")
    size = sum(sizes.values())
    say(
        f"made {folder} from {meta['source']}: {tokens['train']:,} {meta['tokenizer']} tokens to train"
        f" on, {tokens['val']:,} to validate, vocabulary {meta['vocab_size']:,} ({meta['dtype']}),"
        f" {size / sum(tokens.values()):.2f} bytes/token,"
        f" {size / (time.perf_counter() - began) / 1e6:.1f} MB/s"
    )
    return meta


# ---- a corpus ------------------------------------------------------------------------------------


def find_corpus(name: str, input: str, options: dict) -> tuple[dict, Iterator]:
    """(what is known of meta, an iterator over (split, text)) of the files of `input`, or of the
    corpus `name`. meta["source"] differs if files, their dates or options differ."""
    tokenizer = options["tokenizer"]
    if hasattr(TOKENIZERS[tokenizer], "learn"):
        found = f"{tokenizer} learns its vocabulary from one text, and cannot stream a corpus"
        raise DataError(f"{found}; write --tokenizer=gpt2, or byte")
    digest = hashlib.sha256(json.dumps([CORPORA.get(name), options]).encode())
    if input:
        files = input_files(input)
        for path, status in files.items():
            facts = f"{os.path.relpath(path, input)}\0{status.st_size}\0{status.st_mtime_ns}\0"
            digest.update(facts.encode("utf-8", "replace"))
        size = sum(status.st_size for status in files.values())
        found = f"{len(files):,} files, {size:,} bytes"
        if not size:
            raise DataError(f"{input}: {found}; expected text, .jsonl, .gz or .zst")
        base = os.path.basename(os.path.normpath(input))
        source = f"{base} ({found}, with their dates {digest.hexdigest()[:16]})"
        texts = read_documents(files, options["field"])
    else:
        needed("datasets", name)
        source = f"{name} of huggingface.co ({digest.hexdigest()[:16]})"
        texts = read_hub(*CORPORA[name])
    split = partial(split_of, options["val_fraction"])
    documents = ((split(text), text) for text in texts if text)
    return {"tokenizer": tokenizer, "source": source}, documents


def split_of(val_fraction: float, text: str) -> str:
    draw = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "val" if int.from_bytes(draw, "big") < val_fraction * 2**64 else "train"


def input_files(input: str) -> dict[str, os.stat_result]:
    """The files of a file, folder or glob, in the order of their paths."""

    def refuse(error):
        raise error

    try:
        if os.path.isdir(input):
            walk = os.walk(input, onerror=refuse)
            found = [os.path.join(folder, name) for folder, _, names in walk for name in names]
            found = [path for path in found if "/." not in path.removeprefix(input)]
        else:
            found = [input] if os.path.isfile(input) else glob.glob(input, recursive=True)
        return {path: os.stat(path) for path in sorted(found) if not os.path.isdir(path)}
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error


def read_hub(path: str, subset: str | None) -> Iterator[str]:
    """The documents of a corpus on huggingface.co. Raises Offline."""
    import datasets

    try:
        rows = datasets.load_dataset(path, subset, split="train", streaming=True)
        yield from (without_nul(row["text"]) for row in rows)
    except Exception as error:  # whatever its HTTP library raises
        reason = " ".join(str(error).split())[:150]
        raise Offline(f"cannot read {path} of huggingface.co: {reason}") from error


def read_documents(paths: Iterable[str], field: str) -> Iterator[str]:
    for path in paths:
        try:
            with open(path, "rb") as file:
                chunks = read_chunks(path, file)
                if path.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
                    for number, line in lines(path, chunks):
                        yield text_of_line(f"{path}:{number}", line, field)
                else:
                    for offset, raw in parts(chunks):
                        yield decode_utf8(raw, path, offset)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def text_of_line(place: str, line: bytes, field: str) -> str:
    """The text in a line of a .jsonl."""
    text = decode_utf8(line, place)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}); expected one object a line") from error
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        known = [k for k in value if isinstance(value[k], str)] if type(value) is dict else []
        hint = f"; --field={'|'.join(known[:8])} would be one" if known else ""
        raise DataError(f"{place} has no string in the field {field!r}{hint}")
    return without_nul(value[field])


def without_nul(text: str) -> str:
    """NUL, which is byte's end of text, and half surrogate pairs, which UTF-8 lacks, as U+FFFD."""
    return re.sub("[\0\ud800-\udfff]", "\ufffd", text)


def lines(path: str, chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of a .jsonl, without empty ones."""
    rest = b""
    number = 1
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from ((n, line) for n, line in enumerate(whole, number) if line.strip())
        number += len(whole)
        if len(rest) > LONGEST_LINE:
            found = f"{path}:{number}: a line of more than {LONGEST_LINE:,} bytes"
            raise DataError(f"{found}; expected one JSON object a line")
    if rest.strip():
        yield number, rest


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


def read_chunks(path: str, file: Any) -> Iterator[bytes]:
    """The content of a file, decompressed, in chunks."""
    try:
        if path.endswith(".zst"):
            yield from read_zst(path, file)
        else:
            plain = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
            yield from iter(partial(plain.read, CHUNK), b"")
    except Exception as error:  # gzip, zlib and zstandard each raise their own
        if isinstance(error, DataError) or getattr(error, "errno", None):
            raise
        found = f"{path} is truncated or damaged ({error})"
        raise DataError(f"{found}; fetch it again, or leave it out") from error


def read_zst(path: str, file: Any) -> Iterator[bytes]:
    """The content of a .zst, frame by frame: zstandard's stream_reader would accept half a file."""
    decompressor = needed("zstandard", path).ZstdDecompressor()
    frame = decompressor.decompressobj()
    while raw := file.read(1 << 16):
        while raw:
            if frame.eof:
                frame = decompressor.decompressobj()
            yield frame.decompress(raw)
            raw = frame.unused_data
    if not frame.eof:
        raise EOFError("it ends inside a frame")


# ---- the named texts, or a file ------------------------------------------------------------------


def find_text(name, folder, input, tokenizer, say) -> tuple[dict, list]:
    """(what is known of meta, [(split, text)]): the first 90% of a text's characters, and the rest."""
    if input:
        raw = data.read_file(input)
        source = os.path.basename(input)
        if name == "pydoc" or (name == "shakespeare" and sha256(raw) != SHAKESPEARE_SHA256):
            raise DataError(f"{input} is not the text that {name} stands for; choose another NAME")
    elif name == "shakespeare":
        raw = read_shakespeare(os.path.join(folder, "input.txt"), say)
        source = "TinyShakespeare"
    elif name == "pydoc":
        from pydoc_data.topics import topics

        raw = "".join(topics[topic] for topic in sorted(topics)).encode()
        source = f"pydoc_data.topics of CPython {sys.version.split()[0]}"
    else:
        known = " and ".join(data.TEXTS)
        how = f"make it from a text file: {data.command(folder)} ({known} need none)"
        raise DataError(f"no dataset {name!r} in {os.path.dirname(folder)}; {how}")
    text = decode_utf8(raw, input or name)
    meta = {"tokenizer": tokenizer, "source": f"{source} (SHA-256 {sha256(raw)[:16]}...)"}
    if hasattr(TOKENIZERS[tokenizer], "learn"):
        meta |= TOKENIZERS[tokenizer].learn(text)
    cut = int(0.9 * len(text))
    return meta, [("train", text[:cut]), ("val", text[cut:])]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_shakespeare(path: str, say: Callable) -> bytes:
    """The bytes of TinyShakespeare, from `path` if they are there, else downloaded to it."""
    if os.path.exists(path):
        raw = data.read_file(path)
        if sha256(raw) == SHAKESPEARE_SHA256:
            return raw
        say(f"{path} is not TinyShakespeare (its SHA-256 differs); downloading it again")
    url = os.environ.get("SHAKESPEARE_URL") or SHAKESPEARE_URL
    say(f"downloading {url}")
    answers = queue.Queue()
    # In a thread that may be left behind: no timeout of a socket bounds the time of all of it
    threading.Thread(target=lambda: answers.put(download(url)), daemon=True).start()
    try:
        answer = answers.get(timeout=DOWNLOAD_SECONDS)
    except queue.Empty:
        answer = Offline(f"{url}: timed out after {DOWNLOAD_SECONDS:g} s{NO_NETWORK}")
    if isinstance(answer, Exception):
        raise answer
    with new_files(*os.path.split(path)) as files:
        files[os.path.basename(path)].write(answer)
    return answer


def download(url: str) -> bytes | Exception:
    """TinyShakespeare from `url`, in up to three tries, or why there is none."""
    for attempt, pause in enumerate((0, 0.3, 1)):  # seconds
        time.sleep(pause)
        raw = b""
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                came = f"{response.headers.get_content_type()} from {response.url}"
                with contextlib.suppress(OSError, http.client.HTTPException):  # cut off
                    while len(raw) <= SHAKESPEARE_BYTES and (chunk := response.read(1 << 16)):
                        raw += chunk
        except urllib.error.HTTPError as error:
            came = f"the answer {error.code} {error.reason}"
        except OSError as error:
            if attempt:  # the second try: without a network, do not keep the user waiting
                why = getattr(error, "reason", error)
                return Offline(f"cannot reach {url}: {why}{NO_NETWORK}")
            continue
        except Exception as error:  # no URL, or no HTTP
            came = f"{type(error).__name__} {error}"
        if sha256(raw) == SHAKESPEARE_SHA256:
            return raw
    found = f"{url}: {came}, {len(raw):,} bytes with SHA-256 {sha256(raw)}"
    expected = f"{SHAKESPEARE_BYTES:,} bytes with SHA-256 {SHAKESPEARE_SHA256}"
    hint = "try again later, or take a copy: python prepare_data.py shakespeare --input=FILE"
    return DataError(f"{found}; expected {expected}; {hint}")


# ---- what train.py asks for ----------------------------------------------------------------------


def open_dataset(name: str, data_dir: str, say: Callable = print) -> tuple[str, dict]:
    """(folder, meta) of the dataset data_dir/name, after verifying every byte. If it is missing and
    one of TEXTS, it is made first. Raises DataError or Offline."""
    folder = data.dataset_folder(name, data_dir)
    if not data.exists(folder):
        if name in CORPORA:
            how = data.command(folder)
            raise DataError(f"no dataset {name!r}; it takes hours, so make it first: {how}")
        return prepare(name, data_dir, say=say)
    meta = data.read_meta(folder)
    data.verify(folder, meta)
    return folder, meta


def dataset_of_run(
    name, offline_name, begun_with, data_dir, block_size, say=print
) -> tuple[str, str, dict]:
    """(name, folder, meta) of the dataset that a run trains on. Raises DataError or Offline.

    It is `name`, or, if that cannot be downloaded, `offline_name` with a loud warning ("": none).
    begun_with: the dataset of the run so far, or None. block_size: tokens in a window; train needs
    twice as many tokens, val one more than a window.
    """
    why = "This run started without a network."
    candidates = [offline_name] if offline_name == begun_with else [name, offline_name]
    for candidate in filter(None, candidates):
        if candidate != name:
            bar = "!" * 90
            say(f"{bar}\n!! {why}\n!! This run trains on {candidate!r} INSTEAD OF {name!r}:")
            say(f"!! its numbers say nothing about {name!r}.\n{bar}")
        try:
            folder, meta = open_dataset(candidate, data_dir, say)
        except Offline as error:
            why = error
            continue
        for split, least in (("train", 2 * block_size), ("val", block_size + 1)):
            if (tokens := meta[f"{split}_tokens"]) < least:
                found = f"--block_size={block_size}: {split}.bin has {tokens:,} tokens"
                raise DataError(f"{found}; expected a smaller block_size, or a longer text")
        return candidate, folder, meta
    raise Offline(why)


def main(argv: list[str] | None = None) -> None:
    names = []
    with configured(globals(), argv=argv, names=names):
        if len(names) != 1:
            fail(f"expected one NAME, found {len(names)}; type: python prepare_data.py shakespeare")
        prepare(names[0], data_dir, input, tokenizer)


if __name__ == "__main__":
    sys.exit(run_script(main))
