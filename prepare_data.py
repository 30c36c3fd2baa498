"""
Makes the datasets that train.py reads, data/NAME/{train.bin,val.bin,meta.json}:

    python prepare_data.py shakespeare                       # TinyShakespeare, downloaded once
    python prepare_data.py pydoc                             # CPython's own manual: no network
    python prepare_data.py NAME --input=FILE                 # any UTF-8 text
    python prepare_data.py NAME --input=FILE --tokenizer=gpt2
    python prepare_data.py NAME --input=FOLDER               # a corpus of any size: gpt2 tokens
    python prepare_data.py NAME --input='web/*.jsonl.zst' --field=content
    python prepare_data.py openwebtext                       # or fineweb: needs a network, datasets

train.bin and val.bin are flat token ids: the first 90% of the text's characters and the rest.
meta.json says how to read them and holds their SHA-256. It is written last, so a folder with a
meta.json is a whole dataset; one that exists is never overwritten. Text is taken as it is: line
ends are not translated. The environment variable SHAKESPEARE_URL names another place for
TinyShakespeare (a mirror, a file:// address); its hash is checked all the same.

A corpus is a folder (of a folder: its files by name, then its folders; hidden ones are left out),
a glob in quotes (the files that it matches), a .jsonl (one object a line, the text in --field), a
.gz or .zst of a text or .jsonl, or a text file past WHOLE_TEXT. It is streamed, and made in shards
that are read as one, train_00000.bin ... and val_00000.bin ...:
- A line of a .jsonl is a document, and so is a text file. One past WHOLE_DOCUMENT is cut, at line
  ends where it has any, into documents of up to PART. Empty documents are left out.
- After each document stands the tokenizer's end-of-text: 50256 of gpt2. byte has none, and takes
  id 0, a byte that no text file may hold. val_bytes counts text, not these.
- A document goes to val where the hash of its content falls below val_fraction: copies of it lie on
  one side, whatever the order of files and the number of processes.
- Half of a surrogate pair, which JSON may hold and UTF-8 may not, becomes U+FFFD.
Killed at any moment, the same command goes on where progress.json says, to the same bytes.
"""

import collections
import concurrent.futures
import contextlib
import fcntl
import functools
import glob
import gzip
import hashlib
import http.client
import json
import logging
import math
import multiprocessing
import os
import re
import secrets
import signal
import stat
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np

from configurator import configure, fail

# What to make, and where
data_dir = "data"  # the dataset's folder is made in here
input = ""  # a UTF-8 text file, .jsonl, folder or glob; "": the text that NAME stands for
tokenizer = "auto"  # char (one id for each distinct character), byte, or gpt2 (needs tiktoken)
#  auto = char for one small text, gpt2 for a corpus

# Of a corpus
field = "text"  # where an object in a .jsonl holds its text
val_fraction = 0.0005  # share of the documents to validate, (0, 1)
shard_tokens = 100_000_000  # in a file, [1, inf); 2 bytes each
num_proc = 0  # processes that tokenize, [0, inf); 0 = one for each core

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
NAMED = ("shakespeare", "pydoc")  # the datasets that need no --input
CORPORA = {  # those that need none either, but the package datasets: path and name on the hub
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
}
TOKENIZERS = ("char", "byte", "gpt2")
END_OF_TEXT = {"byte": 0, "gpt2": 50256}
SPLITS = ("train", "val")
TIMEOUT = 4  # seconds without an answer before there counts as being no network

# Bytes. One plain text file up to WHOLE_TEXT is taken whole, and split by position: by character,
# which needs the most memory, that took 0.90 GB, and what is streamed stays below 1 GB as well.
WHOLE_TEXT = 32_000_000
WHOLE_DOCUMENT = 4_000_000  # a text file up to here is one document (a long novel has 3 MB)
PART = 64_000  # of a longer one: short, so that val_fraction finds enough of them
LONGEST_LINE = 16_000_000  # of a .jsonl
PIECE = 1_000_000  # what a process tokenizes at a time


class DataError(ValueError):
    """The data cannot be used. The message is one line: what was found, and what to type."""


class Unfinished(DataError):
    """The input is not to blame: what is done of a corpus is kept, and the same command goes on."""


class Offline(OSError):
    """A download was needed and its server could not be reached."""


def prepare(
    name,
    data_dir,
    input="",
    tokenizer="auto",
    say=print,
    field=field,
    val_fraction=val_fraction,
    shard_tokens=shard_tokens,
    num_proc=num_proc,
):
    """
    Makes the dataset data_dir/name and returns (its folder, its meta). One that is there already
    is checked, and left as it is.

    input: a text file or a corpus, or "" for the text that `name` stands for. The last four: of a
    corpus. Raises DataError, Offline.
    """
    folder = dataset_folder(name, data_dir)
    if tokenizer not in ("auto", *TOKENIZERS):
        raise DataError(
            f"unknown tokenizer {tokenizer!r}; write --tokenizer={'|'.join(TOKENIZERS)}"
        )
    old, corpus = read_meta(folder) if exists(folder) else None, is_corpus(name, input)
    if tokenizer == "auto":
        tokenizer = old["tokenizer"] if old else "gpt2" if corpus else "char"
    if old and (old["tokenizer"] != tokenizer or not input):
        same = old["tokenizer"] == tokenizer
    elif corpus:
        if tokenizer == "char":
            raise DataError(
                "char must know every character before the first is written, and a corpus is"
                " streamed; write --tokenizer=gpt2, or byte"
            )
        how = {"tokenizer": tokenizer, "field": field, "val_fraction": val_fraction}
        how["shard_tokens"] = shard_tokens
        found = survey(name, input, how)
        if not old:
            pieces = functools.partial(read_pieces, input) if input else hub_pieces(name)
            return prepare_corpus(folder, found, pieces, how, num_proc, say)
        same = old["source"] == found[0]
    else:
        raw, source = read_source(name, folder, input, say)
        start = time.perf_counter()
        arrays, meta = tokenize(decode_utf8(raw, input or name), tokenizer, source)
        same = old and fingerprint(old) == fingerprint(meta)
    if old:
        if not same:
            raise DataError(
                f"{folder} holds another dataset: {old['tokenizer']} tokens of {old['source']}"
                + (", which are not those files and options" if corpus else "")
                + "; choose another NAME, or delete that folder if no run depends on it"
            )
        verify(folder, old)
        say(f"{folder} is there already, {tokenizer} tokens of {old['source']}; nothing to do")
        return folder, old

    files = {f"{split}.bin": arrays[split].tobytes() for split in SPLITS}
    write(folder, files | {"meta.json": json.dumps(meta, indent=1).encode() + b"\n"})
    say_made(folder, meta, len(raw), len(raw) / (time.perf_counter() - start), say)
    return folder, meta


def say_made(folder, meta, size, rate, say):
    """size: bytes of text, those of an earlier start too. rate: bytes a second, of this start."""
    tokens = meta["train_tokens"] + meta["val_tokens"]
    say(
        f"made {folder} from {meta['source']}: {meta['train_tokens']:,} {meta['tokenizer']} tokens"
        f" to train on, {meta['val_tokens']:,} to validate, vocabulary {meta['vocab_size']:,}"
        f" ({meta['dtype']}), {size / tokens:.2f} bytes/token, {rate / 1e6:.1f} MB/s"
    )


def open_dataset(name, data_dir, say=print):
    """
    (folder, meta) of the dataset data_dir/name, every byte of it checked. Where it is missing and
    `name` is one of NAMED, it is made first. Raises DataError, Offline.
    """
    folder = dataset_folder(name, data_dir)
    if not exists(folder):
        if name in CORPORA:
            raise DataError(
                f"no dataset {name!r} in {data_dir}; it takes hours and tens of GB, so make it"
                f" first: {command(folder)}"
            )
        return prepare(name, data_dir, say=say)
    meta = read_meta(folder)
    verify(folder, meta)
    return folder, meta


def dataset_of_run(name, offline_name, data_dir, begun_with=None, say=print):
    """
    (name, folder, meta) of the dataset that a run learns; exits where there is none. That is `name`,
    or where no network lets it be made, and then loudly, `offline_name` ("": none).

    begun_with: the dataset that the run so far has learnt, if there is one.
    """

    def instead(why):
        bar = "!" * 90
        say(f"{bar}\n!! {why}\n!! This run learns {offline_name!r} INSTEAD OF {name!r}:")
        say(f"!! its numbers say nothing about {name!r}.\n{bar}")
        return offline_name, *open_dataset(offline_name, data_dir, say)

    try:
        if begun_with == offline_name != name:
            return instead("This run was begun without a network.")
        try:
            return name, *open_dataset(name, data_dir, say)
        except Offline as error:
            if not offline_name:
                raise
            return instead(error)
    except (DataError, Offline) as error:
        fail(error)


def fingerprint(meta):
    """16 hex digits for what a model learns: the tokens and their meaning, not their source."""
    content = {key: value for key, value in meta.items() if key != "source"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def encode(text, meta):
    """The token ids of `text` as an array. DataError names characters that the vocabulary lacks."""
    if meta["tokenizer"] == "char":
        codes, known = code_points(text), code_points(meta["chars"])  # `chars` is sorted
        ids = np.searchsorted(known, codes).clip(max=len(known) - 1)
        missing = np.unique(codes[known[ids] != codes])
        if len(missing):
            names = " ".join(repr(chr(code)) for code in missing[:20])
            more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
            raise DataError(f"the vocabulary lacks {names}{more}")
    elif meta["tokenizer"] == "byte":
        ids = np.frombuffer(text.encode(), np.uint8)
    else:
        # encode_ordinary as an array: a tenth of the memory of a list
        ids = gpt2().encode_to_numpy(text, disallowed_special=())
    return ids.astype(meta["dtype"])


def decode(ids, meta):
    """The text of token ids (list, array, CPU tensor). Bytes that are not UTF-8 become U+FFFD."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    if len(ids) and not (0 <= ids.min() and ids.max() < meta["vocab_size"]):
        raise DataError(f"token ids {ids.min()}..{ids.max()} outside 0..{meta['vocab_size'] - 1}")
    if meta["tokenizer"] == "char":
        return code_points(meta["chars"])[ids].tobytes().decode("utf-32-le")
    if meta["tokenizer"] == "byte":
        return ids.astype(np.uint8).tobytes().decode(errors="replace")
    return gpt2().decode(ids.tolist())


# --- the text ---


def read_source(name, folder, input, say):
    """(bytes, description) of the text that is asked for."""
    if input:
        raw, source = read_file(input), os.path.basename(input)
        is_shakespeare = hashlib.sha256(raw).hexdigest() == SHAKESPEARE_SHA256
        if name == "pydoc" or (name == "shakespeare" and not is_shakespeare):
            raise DataError(f"{input} is not the text that {name} stands for; choose another NAME")
    elif name == "shakespeare":
        raw, source = read_shakespeare(os.path.join(folder, "input.txt"), say), "TinyShakespeare"
    elif name == "pydoc":
        from pydoc_data.topics import topics

        raw = "".join(topics[topic] for topic in sorted(topics)).encode()
        source = f"pydoc_data.topics of CPython {sys.version.split()[0]}"
    else:
        raise DataError(
            f"no dataset {name!r} in {os.path.dirname(folder)}; make it from a text file:"
            f" {command(folder)} (only {' and '.join(NAMED)} need none)"
        )
    return raw, f"{source} (SHA-256 {hashlib.sha256(raw).hexdigest()[:16]}...)"


def read_shakespeare(path, say):
    """TinyShakespeare, from `path` if it is kept there, else downloaded and kept there."""
    if os.path.exists(path):
        raw = read_file(path)
        if hashlib.sha256(raw).hexdigest() == SHAKESPEARE_SHA256:
            return raw
        say(f"{path} is not TinyShakespeare (its SHA-256 differs); downloading it again")
    url = os.environ.get("SHAKESPEARE_URL") or SHAKESPEARE_URL
    say(f"downloading {url}")
    for attempt, pause in enumerate((0, 0.3, 1)):
        time.sleep(pause)
        try:
            raw, problem = download(url)
        except Offline:
            if attempt:  # tried twice; a machine without network should not be kept waiting
                raise
            continue
        if hashlib.sha256(raw).hexdigest() == SHAKESPEARE_SHA256:
            write(os.path.dirname(path), {os.path.basename(path): raw})
            return raw
    raise DataError(
        f"{url}: {problem}; expected {SHAKESPEARE_BYTES:,} bytes with SHA-256 {SHAKESPEARE_SHA256}."
        " Try again later, or give a copy of it: python prepare_data.py shakespeare --input=FILE"
    )


def download(url):
    """(bytes, what is wrong with them if they are not the right ones). Offline: nobody answered."""
    raw, reason = b"", ""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            try:
                while len(raw) <= SHAKESPEARE_BYTES and (chunk := response.read(1 << 16)):
                    raw += chunk
                    progress(len(raw) / SHAKESPEARE_BYTES)
            except (OSError, http.client.HTTPException) as error:
                reason = f" ({error})"
            if response.headers.get_content_type() == "text/html" or raw[:1] == b"<":
                return raw, f"a page of HTML came instead of the text, from {response.url}"
    except urllib.error.HTTPError as error:
        return raw, f"the server answered {error.code} {error.reason}"
    except OSError as error:
        raise Offline(f"cannot reach {url}: {getattr(error, 'reason', error)}") from error
    except (ValueError, http.client.HTTPException) as error:
        return raw, f"{type(error).__name__}: {error}"
    finally:
        progress(None)
    if len(raw) < SHAKESPEARE_BYTES:
        return raw, f"cut off after {len(raw):,} bytes{reason}"
    return raw, f"the SHA-256 of what came is {hashlib.sha256(raw).hexdigest()}"


def progress(fraction):
    """A bar on a terminal, nothing elsewhere; None wipes it."""
    if sys.stderr.isatty():
        done = round(40 * min(fraction or 0, 1))
        bar = f"[{'#' * done}{'.' * (40 - done)}]"
        print(f"\r{' ' * 42}\r" if fraction is None else f"\r{bar}", end="", file=sys.stderr)


def read_file(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; expected a file") from error


def decode_utf8(raw, path, begin=0):
    """The text of `raw`, which begins at offset `begin` of the file."""
    if not raw:
        raise DataError(f"{path} is empty; expected UTF-8 text")
    if (offset := raw.find(b"\0")) >= 0:
        raise DataError(
            f"{path} is binary, or UTF-16: NUL byte at offset {begin + offset}; expected UTF-8 text"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {begin + error.start}"
            f" ({error.reason}); convert it: iconv -f latin1 -t utf-8 FILE"
        ) from error


# --- tokens ---


def tokenize(text, tokenizer, source):
    """({"train": ids, "val": ids}, meta)"""
    meta = {"tokenizer": tokenizer, "source": source}
    if tokenizer == "char":
        meta["chars"] = np.unique(code_points(text)).tobytes().decode("utf-32-le")
    meta["vocab_size"] = {"char": len(meta.get("chars", "")), "byte": 256, "gpt2": 50257}[tokenizer]
    meta["dtype"] = "uint16" if meta["vocab_size"] <= 2**16 else "uint32"
    cut = int(0.9 * len(text))
    halves = {"train": text[:cut], "val": text[cut:]}
    arrays = {split: encode(half, meta) for split, half in halves.items()}
    for split in SPLITS:
        if len(arrays[split]) < 2:
            raise DataError(
                f"the text is too short: {len(text)} characters give {split} {len(arrays[split])}"
                " tokens; at least 2 are needed, and block_size + 1 to train"
            )
        meta[f"{split}_tokens"] = len(arrays[split])
    meta["val_bytes"] = len(halves["val"].encode())
    meta["sha256"] = {f"{s}.bin": hashlib.sha256(arrays[s]).hexdigest() for s in SPLITS}
    return arrays, meta


def code_points(text):
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def gpt2():
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except ImportError as error:
        raise DataError("the gpt2 tokenizer needs tiktoken; type: pip install tiktoken") from error
    except Exception as error:  # tiktoken passes on whatever its HTTP library raises
        raise DataError(
            "the gpt2 vocabulary is not cached and could not be downloaded"
            f" ({type(error).__name__}); TIKTOKEN_CACHE_DIR=FOLDER names a folder that holds it,"
            " and --tokenizer=byte needs none"
        ) from error


# --- a corpus: what there is to read ---


def is_corpus(name, input):
    """Whether to stream: all but one plain text file that fits into memory with ease."""
    if not input:
        return name in CORPORA
    if os.path.isfile(input):
        packed = input.endswith((".jsonl", ".gz", ".zst"))
        return packed or os.path.getsize(input) > WHOLE_TEXT
    return os.path.isdir(input) or glob.has_magic(input)


def input_files(input):
    """The paths that a file, a folder or a glob stands for, in their order. A folder is walked."""

    def refuse(error):
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    if not os.path.isdir(input):
        found = [input] if os.path.isfile(input) else sorted(glob.glob(input, recursive=True))
        yield from (path for path in found if not os.path.isdir(path))
        return
    for folder, folders, names in os.walk(input, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (os.path.join(folder, name) for name in sorted(names) if name[0] != ".")


def survey(name, input, how):
    """(description, 16 hex digits, bytes) of a corpus. Where a file or an option changes, they do."""
    digest, count, size = hashlib.sha256(json.dumps([CORPORA.get(name), how]).encode()), 0, 0
    for path in input_files(input) if input else ():
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; expected a file") from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file; expected text, or leave it out")
        place = os.path.relpath(path, input)
        digest.update(
            f"{place}\0{status.st_size}\0{status.st_mtime_ns}\0".encode("utf-8", "replace")
        )
        count, size = count + 1, size + status.st_size
    if input and not size:
        raise DataError(
            f"{input}: {count} files of 0 bytes in all; expected text, .jsonl, .gz or .zst"
        )
    mark = digest.hexdigest()[:16]
    if not input:
        return f"{name} of huggingface.co ({mark})", mark, 0
    base = os.path.basename(os.path.normpath(input))
    return f"{base} ({count:,} files, {size:,} bytes, with their dates {mark})", mark, size


START = {"file": 0, "offset": 0, "line": 1}  # which file, where in its text, uncompressed


def read_pieces(input, at):
    """Yields (piece, the place after it as `at`, bytes on the disk so far) from the place `at` on.

    piece: [(path, number, raw)], of a .jsonl whole lines and the first one's number, of a text a
    whole document and its offset. Where it is cut changes nothing in what comes out.
    """
    piece, size, before, index = [], 0, 0, -1
    for index, path in enumerate(input_files(input)):
        if index >= at["file"]:
            begin = at if index == at["file"] else START
            read = read_lines if is_jsonl(path) else read_texts
            for on_disk, number, raw, offset, line in read(path, begin["offset"], begin["line"]):
                piece.append((path, number, raw))
                size += len(raw)
                if size >= PIECE:
                    place = {"file": index, "offset": offset, "line": line}
                    yield piece, place, before + on_disk
                    piece, size = [], 0
        before += os.path.getsize(path)
    if piece:
        yield piece, START | {"file": index + 1}, before


def is_jsonl(path):
    return path.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")


def read_lines(path, offset, line):
    """Yields (bytes on the disk so far, number of the first line, lines, offset after, line after)."""
    rest, on_disk = b"", 0
    for on_disk, chunk in read_chunks(path, offset):
        end = chunk.rfind(b"\n") + 1
        if end:
            raw, rest = rest + chunk[:end], chunk[end:]
            first, offset, line = line, offset + len(raw), line + raw.count(b"\n")
            yield on_disk, first, raw, offset, line
        else:
            rest += chunk
        if len(rest) > LONGEST_LINE:
            raise DataError(
                f"{path}:{line}: a line of more than {LONGEST_LINE:,} bytes; expected one JSON"
                " object a line"
            )
    if rest:
        yield on_disk, line, rest, offset + len(rest), line + 1


def read_texts(path, offset, line):
    """Yields (bytes on the disk so far, offset, document, offset after it, `line`)."""
    rest, long, on_disk = b"", offset > 0, 0
    for on_disk, chunk in read_chunks(path, offset):
        rest += chunk
        long, begin = long or len(rest) > WHOLE_DOCUMENT, 0
        while long and len(rest) - begin > PART:
            end = end_of_part(rest, begin)
            yield on_disk, offset, rest[begin:end], offset + end - begin, line
            offset, begin = offset + end - begin, end
        rest = rest[begin:]
    if rest:
        yield on_disk, offset, rest, offset + len(rest), line


def end_of_part(raw, begin):
    """After the last line end in PART bytes; without one, after the last space or character."""
    end = begin + PART
    for mark in (b"\n", b" "):
        if found := raw.rfind(mark, begin, end) + 1:
            return found
    first = next((i for i in range(end, end - 4, -1) if raw[i] & 0xC0 != 0x80), end)
    return max(first, begin + 1)


def read_chunks(path, offset):
    """Yields (bytes of the file read so far, some of its text, uncompressed) from `offset` on."""
    try:
        with open(path, "rb") as file:
            if path.endswith(".gz"):
                chunks = iter(functools.partial(gzip.GzipFile(fileobj=file).read, PIECE), b"")
            elif path.endswith(".zst"):
                chunks = read_zst(path, file)
            else:
                file.seek(offset)
                chunks, offset = iter(functools.partial(file.read, PIECE), b""), 0
            for chunk in chunks:
                if offset < len(chunk):
                    yield file.tell(), chunk[offset:]
                offset = max(0, offset - len(chunk))
    except DataError:
        raise
    except Exception as error:  # gzip, zlib and each zstd have their own
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"cannot read {path}: {error.strerror}; expected a file") from error
        raise DataError(
            f"{path} is cut off or damaged ({error}); fetch it again, or leave it out"
        ) from error


def read_zst(path, file):
    """Yields what a .zst holds, frame after frame."""
    try:
        from compression.zstd import ZstdDecompressor as decompressor  # Python 3.14
    except ImportError:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                f"{path} needs zstandard to be read; type: pip install zstandard"
            ) from error
        # its stream_reader takes a file that is cut off for whole: only `eof` tells
        decompressor = zstandard.ZstdDecompressor().decompressobj
    frame = decompressor()
    while raw := file.read(1 << 16):
        while raw:
            if frame.eof:
                frame = decompressor()
            yield frame.decompress(raw)
            raw = frame.unused_data
    if not frame.eof:
        raise EOFError("it ends inside a frame")


def hub_pieces(name):
    """read_pieces of a corpus on huggingface.co; `at`'s offset counts its rows. Raises Offline."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name} needs datasets; type: pip install datasets") from error
    for package in ("datasets", "huggingface_hub"):  # which tell of each of their retries
        logging.getLogger(package).setLevel(logging.ERROR)
    path, subset = CORPORA[name]

    def pieces(at):
        piece, size, row = [], 0, at["offset"]
        try:
            rows = datasets.load_dataset(path, subset, split="train", streaming=True)
            for document in rows.skip(row):
                text, row = document["text"], row + 1
                piece.append((path, row, text))
                size += len(text)
                if size >= PIECE:
                    yield piece, START | {"offset": row}, 0
                    piece, size = [], 0
        except Exception as error:  # whatever its HTTP library raises
            reason = " ".join(str(error).split())[:150]
            raise Offline(f"cannot read {path} of huggingface.co: {reason}") from error
        if piece:
            yield piece, START | {"offset": row}, 0

    return pieces


# --- a corpus: documents to tokens, in several processes ---


def tokenize_piece(piece, tokenizer, field, val_fraction):
    """{"train": ids, "val": ids, the rest: counts} of a piece; each document has its end-of-text."""
    meta = {"tokenizer": tokenizer, "dtype": "uint16"}
    end = np.array([END_OF_TEXT[tokenizer]], np.uint16)
    ids = {split: [end[:0]] for split in SPLITS}
    counts = dict.fromkeys(COUNTS, 0)
    for path, number, raw in piece:
        for text in [raw] if isinstance(raw, str) else documents(path, number, raw, field):
            try:
                content = text.encode()
            except UnicodeEncodeError:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                content = text.encode()
            if not content:
                continue
            place = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
            split = "val" if place < val_fraction * 2**64 else "train"
            ids[split] += [encode(text, meta), end]
            counts[f"{split}_documents"] += 1
            counts[f"{split}_bytes"] += len(content)
    return {split: np.concatenate(ids[split]) for split in SPLITS} | counts


COUNTS = ("train_documents", "val_documents", "train_bytes", "val_bytes")


def documents(path, number, raw, field):
    """The texts in a piece of a file. DataError names the line, or the offset, of what is no text."""
    if not is_jsonl(path):
        yield decode_utf8(raw, path, number)
        return
    for i, line in enumerate(raw.split(b"\n")):
        place = f"{path}:{number + i}"
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at offset"
                f" {error.start} of the line ({error.reason})"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON ({error}); expected one object a line") from error
        if not isinstance(value, dict) or not isinstance(value.get(field), str):
            known = [k for k in value if isinstance(value[k], str)] if type(value) is dict else []
            hint = f"; --field={'|'.join(known[:8])} would be one" if known else ""
            raise DataError(f"{place} has no string in the field {field!r}{hint}")
        yield value[field]


def in_order(function, pieces, num_proc):
    """Yields (function(piece), *rest) for each (piece, *rest), in their order.

    A few pieces are read ahead, so that memory stays bounded. One process is this one.
    """
    if num_proc == 1:
        for piece, *rest in pieces:
            yield function(piece), *rest
        return
    context, waiting = multiprocessing.get_context("spawn"), collections.deque()
    pool = concurrent.futures.ProcessPoolExecutor(num_proc, context, leave_with_parent)
    try:
        for piece, *rest in pieces:
            waiting.append((pool.submit(function, piece), rest))
            if len(waiting) > 2 * num_proc:
                future, rest = waiting.popleft()
                yield future.result(), *rest
        for future, rest in waiting:
            yield future.result(), *rest
    except concurrent.futures.process.BrokenProcessPool as error:
        raise Unfinished(
            "a process that tokenizes died, perhaps for want of memory; the same command goes on,"
            " and --num_proc=1 needs the least"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def leave_with_parent():
    """In a process that tokenizes: Ctrl-C is the parent's, and if that is killed, this ends too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# --- a corpus: shards, and what is kept of a work that was cut off ---


def prepare_corpus(folder, survey, pieces, how, num_proc, say):
    """Makes the dataset from pieces(at), or goes on making it; returns (folder, meta).

    survey: what survey() found. how: {tokenizer, field, val_fraction, shard_tokens}.
    """
    source, mark, size = survey
    how = dict(how)
    shard_tokens = how.pop("shard_tokens")
    if how["tokenizer"] == "gpt2":
        gpt2()  # where it cannot be had, nothing is written
    with alone_in(folder):
        if exists(folder):  # another process has just made it
            return folder, read_meta(folder)
        done = {"inputs": mark, "at": START, **dict.fromkeys(COUNTS, 0)}
        nothing = done | {"train_tokens": 0, "val_tokens": 0}
        done = kept_work(folder, mark, shard_tokens, say) or dict(nothing)
        begun, start = total_bytes(done), time.perf_counter()
        try:
            cut_back(folder, done, shard_tokens)
            work = functools.partial(tokenize_piece, **how)
            results = in_order(work, pieces(done["at"]), num_proc or os.cpu_count())
            write_shards(folder, results, done, shard_tokens, size, say)
            meta = meta_of_corpus(folder, source, how["tokenizer"], done, shard_tokens)
            write(folder, {"meta.json": json.dumps(meta, indent=1).encode() + b"\n"})
        except (Unfinished, Offline):
            raise
        except OSError as error:
            raise Unfinished(
                f"cannot write {folder}: {error.strerror}; with that in order, the same command"
                " goes on"
            ) from error
        except DataError:  # the input must change, so what is done cannot be used
            cut_back(folder, nothing, shard_tokens)
            remove(os.path.join(folder, "progress.json"))
            raise
        remove(os.path.join(folder, "progress.json"))
        say(
            f"{done['train_documents']:,} documents to train on, {done['val_documents']:,} to validate"
        )
        text = total_bytes(done)
        say_made(folder, meta, text, (text - begun) / (time.perf_counter() - start), say)
        return folder, meta


@contextlib.contextmanager
def alone_in(folder):
    """No second process makes this dataset meanwhile; folders that stay empty go again."""
    new = [path for path in (folder, os.path.dirname(folder)) if not os.path.exists(path)]
    path = os.path.join(folder, "lock")
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(path, "w")
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror}; write --data_dir=FOLDER"
        ) from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it dies with its holder
        except OSError as error:
            raise DataError(f"another process is making {folder}; wait for it to end") from error
        try:
            yield
        finally:
            remove(path)
            for path in new:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(path)


def write_shards(folder, results, done, shard_tokens, size, say):
    """Appends the results to the shards, counts them in `done`, and says how far it is.

    size: of the input on the disk, bytes; 0: not known.
    """
    terminal, begun, first = sys.stderr.isatty(), total_bytes(done), None
    start = saved = shown = time.perf_counter()
    try:
        for result, at, on_disk in results:
            full = [append(folder, split, result[split], done, shard_tokens) for split in SPLITS]
            done |= {key: done[key] + result[key] for key in COUNTS} | {"at": at}
            now = time.perf_counter()
            if any(full) or now - saved > 10:
                save_progress(folder, done, shard_tokens)
                saved = now
            first = first or (on_disk, now)
            if now - shown < (0.2 if terminal else 30):
                continue
            shown, text = now, total_bytes(done)
            line = f"{text / 1e6:,.0f} MB of text, {(text - begun) / 1e6 / (now - start):.1f} MB/s"
            if on_disk > first[0]:
                left = int((now - first[1]) * (size - on_disk) / (on_disk - first[0]))
                line += f", {on_disk / size:.1%}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
            print(f"\r{line:70}", end="", file=sys.stderr) if terminal else say(line)
    finally:
        if terminal:
            print(f"\r{'':70}\r", end="", file=sys.stderr)


def total_bytes(done):
    return done["train_bytes"] + done["val_bytes"]


def shard_path(folder, split, number):
    return os.path.join(folder, f"{split}_{number:05}.bin")


def append(folder, split, ids, done, shard_tokens):
    """Writes ids behind those that `done` counts, and counts them. True where that filled a shard."""
    key, full = f"{split}_tokens", False
    while len(ids):
        number, filled = divmod(done[key], shard_tokens)
        now, ids = ids[: shard_tokens - filled], ids[shard_tokens - filled :]
        with open(shard_path(folder, split, number), "ab") as file:
            file.write(now)
        done[key] += len(now)
        if filled + len(now) == shard_tokens:
            full = True
            sync(shard_path(folder, split, number))
    return full


def sync(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def save_progress(folder, done, shard_tokens):
    """From here on, a work that is cut off goes on from here."""
    for split in SPLITS:
        number, filled = divmod(done[f"{split}_tokens"], shard_tokens)
        if filled:
            sync(shard_path(folder, split, number))
    write(folder, {"progress.json": json.dumps(done).encode()})


def kept_work(folder, mark, shard_tokens, say):
    """What progress.json counts as done of this very work, with the shards in place; or None."""
    path = os.path.join(folder, "progress.json")
    if not os.path.exists(path):
        return None
    try:
        done = json.loads(read_file(path))
        if done["inputs"] != mark:
            say(f"{folder} was begun from other files or options, or older ones: starting afresh")
            return None
        sizes = expected_sizes(done, shard_tokens)
        whole = all(os.path.getsize(os.path.join(folder, f)) >= sizes[f] for f in sizes)
    except (ValueError, KeyError, TypeError, OSError):
        whole = False
    if not whole:
        say(f"what was begun in {folder} is damaged: starting afresh")
        return None
    say(f"going on in {folder} after {total_bytes(done) / 1e6:,.1f} MB of text")
    return done


def expected_sizes(done, shard_tokens):
    """{name of a shard: its bytes} of what `done` counts."""
    sizes = {}
    for split in SPLITS:
        tokens = done[f"{split}_tokens"]
        for number in range(math.ceil(tokens / shard_tokens)):
            name = os.path.basename(shard_path("", split, number))
            sizes[name] = 2 * min(shard_tokens, tokens - number * shard_tokens)
    return sizes


def cut_back(folder, done, shard_tokens):
    """Leaves of the shards what `done` counts: a kill comes between two of its counts."""
    sizes = expected_sizes(done, shard_tokens)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name in sizes:
            if os.path.getsize(path) > sizes[name]:
                os.truncate(path, sizes[name])
        elif re.fullmatch(r"(train|val)_\d{5,}\.bin|(progress|meta)\.json\..*\.tmp", name):
            os.remove(path)


def meta_of_corpus(folder, source, tokenizer, done, shard_tokens):
    documents = done["train_documents"] + done["val_documents"]
    for split in SPLITS:
        if done[f"{split}_tokens"] < 2:
            raise DataError(
                f"the corpus is too small: of {documents:,} documents {split} has"
                f" {done[f'{split}_documents']:,}, and needs one, or block_size + 1 tokens to train;"
                f" take more text, or write --val_fraction={min(0.5, 10 / max(1, documents)):.2g}"
            )
    meta = {"tokenizer": tokenizer, "source": source, "dtype": "uint16"}
    meta["vocab_size"] = {"byte": 256, "gpt2": 50257}[tokenizer]
    meta |= {key: done[key] for key in ("train_tokens", "val_tokens", "val_bytes")}
    names = sorted(expected_sizes(done, shard_tokens))
    meta["sha256"] = {f: digest_of(os.path.join(folder, f), "uint16")[0] for f in names}
    return meta


def remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


# --- files ---


def dataset_folder(name, data_dir):
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise DataError(
            f"a dataset's NAME is made of letters, digits, '_', '-' and '.', not {name!r}"
        )
    return os.path.join(data_dir, name)


def exists(folder):
    return os.path.exists(os.path.join(folder, "meta.json"))


def write(folder, files):
    """
    The files {name: content}, each whole, the last one last; or none of them where that fails.
    Of two processes that write the same file at once, either one's is there, whole.
    """
    suffix = f".{secrets.token_hex(4)}.tmp"
    try:
        os.makedirs(folder, exist_ok=True)
        for name, content in files.items():
            with open(os.path.join(folder, name + suffix), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for name in files:
            os.replace(os.path.join(folder, name + suffix), os.path.join(folder, name))
    except OSError as error:
        raise Unfinished(
            f"cannot write {folder}: {error.strerror}; write --data_dir=FOLDER"
        ) from error
    finally:
        for name in files:
            if os.path.exists(os.path.join(folder, name + suffix)):
                os.remove(os.path.join(folder, name + suffix))


def read_meta(folder):
    path = os.path.join(folder, "meta.json")
    content = read_file(path)
    try:
        meta = json.loads(content)
        numbers = ("vocab_size", "train_tokens", "val_tokens", "val_bytes")
        chars = meta["chars"] if meta["tokenizer"] == "char" else ""
        right = (
            meta["tokenizer"] in TOKENIZERS
            and meta["dtype"] in ("uint16", "uint32")
            and isinstance(meta["source"], str)
            and all(isinstance(meta["sha256"][f], str) for s in SPLITS for f in shards(meta, s))
            and all(type(meta[key]) is int and meta[key] > 0 for key in numbers)
            and list(chars) == sorted(set(chars))
            and len(chars) == (meta["vocab_size"] if meta["tokenizer"] == "char" else 0)
        )
    except KeyError as error:
        raise DataError(f"{path} lacks {error}; {make_again(folder)}") from error
    except (ValueError, TypeError):
        right = False
    if not right:
        raise DataError(f"{path} does not describe a dataset; {make_again(folder)}")
    return meta


def verify(folder, meta):
    """Raises DataError unless all files are what `meta` says, to the byte."""
    again = make_again(folder, meta["tokenizer"])
    for split in SPLITS:
        names, tokens = shards(meta, split), meta[f"{split}_tokens"]
        paths = [os.path.join(folder, name) for name in names]
        sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in paths]
        expected = tokens * np.dtype(meta["dtype"]).itemsize
        if sum(sizes) != expected or 0 in sizes:
            # the first that differs in size from the first shard, which is a full one
            wrong = next((i for i, size in enumerate(sizes) if size not in (0, sizes[0])), -1)
            wrong = sizes.index(0) if 0 in sizes else wrong
            among = f", {split}_*.bin {sum(sizes):,}" if len(paths) > 1 else ""
            raise DataError(
                f"{paths[wrong]} has {sizes[wrong]:,} bytes{among}, but meta.json says {expected:,}"
                f" ({tokens:,} tokens of {meta['dtype']}); {again}"
            )
        for name, path in zip(names, paths, strict=True):
            digest, highest = digest_of(path, meta["dtype"])
            if digest != meta["sha256"][name]:
                raise DataError(
                    f"{path} was changed or damaged: its SHA-256 is {digest}, meta.json says"
                    f" {meta['sha256'][name]}; {again}"
                )
            if highest >= meta["vocab_size"]:
                raise DataError(
                    f"{path} holds token id {highest}, but vocab_size is {meta['vocab_size']}"
                    f" (ids are 0 to {meta['vocab_size'] - 1}); {again}"
                )


def digest_of(path, dtype):
    """(SHA-256, highest id) of a file of token ids, which is never in memory as a whole."""
    digest, highest = hashlib.sha256(), 0
    ids = np.memmap(path, dtype, mode="r")
    for i in range(0, len(ids), 1 << 22):
        chunk = ids[i : i + (1 << 22)]
        digest.update(chunk)
        highest = max(highest, int(chunk.max()))
    return digest.hexdigest(), highest


def shards(meta, split):
    """The names of a split's files, in their order."""
    numbered = re.compile(split + r"_\d{5}\.bin")
    return sorted(filter(numbered.fullmatch, meta.get("sha256", ()))) or [f"{split}.bin"]


def make_again(folder, tokenizer="char"):
    return f"delete {os.path.join(folder, 'meta.json')} and type: {command(folder, tokenizer)}"


def command(folder, tokenizer="char"):
    """What to type to make the dataset in `folder`."""
    where, name = os.path.split(os.path.abspath(folder))
    is_default = where == os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
    return (
        f"python prepare_data.py {name}"
        + ("" if name in NAMED or name in CORPORA else " --input=FILE")
        + ("" if tokenizer == "char" else f" --tokenizer={tokenizer}")
        + ("" if is_default else f" --data_dir={where}")
    )


def main():
    names = []
    configure(globals(), names=names)
    if len(names) != 1:
        fail(f"expected one NAME, found {len(names)}; type: python prepare_data.py shakespeare")
    try:
        how = (field, val_fraction, shard_tokens, num_proc)
        prepare(names[0], data_dir, input, tokenizer, print, *how)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
    except DataError as error:
        fail(error)
    except Offline as error:
        fail(
            f"{error}; python prepare_data.py pydoc needs no network, and --input=FILE takes a copy"
        )


if __name__ == "__main__":
    main()
