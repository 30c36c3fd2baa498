"""A corpus: text of any size, streamed, tokenized by several processes, written as shards.

It is a folder (its files by name, then its subfolders; hidden ones are skipped), a glob in quotes,
a .jsonl (one object per line, its text in --field), a .gz or .zst of a text or .jsonl, a long text,
or one of CORPORA.
- A line of a .jsonl is a document, and so is a text file. A text file longer than WHOLE_DOCUMENT is
  split into documents of up to PART, at line ends if it has any. Empty documents are skipped.
- Each document is followed by an end-of-text id: 50256 for gpt2; 0 for byte, which has none of its
  own (a text file may not contain NUL bytes). val_bytes counts the text without these.
- A document goes to val if the hash of its content, as a fraction, is below val_fraction. Copies of
  a document share a split, whatever the order of files and the number of processes.
- A lone surrogate, which JSON allows and UTF-8 does not, becomes U+FFFD. So does NUL.
progress.json records what is done: after a kill, the same command resumes, to the same bytes.

After a DataError, the input must change: what was written is removed. After an OSError it is kept:
once the disk or the network works again, the same command resumes.
"""

import contextlib
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import signal
import stat
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from plumbing import dataset, tokenizers
from plumbing.dataset import CORPORA, SPLITS, Offline
from plumbing.files import fsync, read_json, write_json
from plumbing.tokenizers import DataError, decode_utf8, encode, gpt2, needed

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Bytes
WHOLE_DOCUMENT = 4_000_000  # a text file up to this size is one document (a long novel has 3 MB)
PART = 64_000  # largest document cut from a longer file; small, so that val gets enough of them
LONGEST_LINE = 16_000_000  # of a .jsonl
PIECE = 1_000_000  # a process tokenizes at least this at a time, in whole documents

# What progress.json counts: documents read, empty ones too; documents and bytes of text written
COUNTS = ("read", "train_documents", "val_documents", "bytes", "val_bytes")
SAVE_SECONDS = 10  # between two saves of progress.json


def make_corpus(folder, source, documents, options, num_proc, say):
    """Make the dataset, or resume making it. Returns (folder, meta).

    source, documents: from find_corpus. options: {tokenizer, field, val_fraction, shard_tokens}.
    num_proc: processes that tokenize.
    """
    if options["tokenizer"] == "gpt2":
        gpt2()  # raises DataError before anything is written
    try:
        with only_process(folder, say):
            if not dataset.exists(folder):  # another process may just have made it
                write_corpus(folder, source, documents, options, num_proc, say)
            return folder, dataset.read_meta(folder)
    except (OSError, BrokenProcessPool) as error:
        hint = "fix that, and the same command resumes (--num_proc=1 needs the least memory)"
        raise DataError(f"cannot make {folder}: {error}; {hint}") from error


def write_corpus(folder, source, documents, options, num_proc, say):
    """Write the shards, then meta.json. After a kill it resumes from the last save."""
    progress = Path(folder, "progress.json")
    done = read_progress(progress, source, say)
    bytes_before = done["bytes"]
    began = saved_at = time.perf_counter()
    rate = 0.0  # bytes per second, in this process
    try:
        pieces = in_pieces(islice(documents, done["read"], None))
        for ids, counts in map_in_order(partial(tokenize_piece, options), pieces, num_proc):
            append(folder, ids, done["sizes"], options["shard_tokens"])
            done |= {key: done[key] + counts[key] for key in COUNTS}
            now = time.perf_counter()
            rate = (done["bytes"] - bytes_before) / (now - began)
            if now - saved_at > SAVE_SECONDS:
                save_progress(progress, done)
                say(f"{done['bytes'] / 1e6:,.0f} MB of text, {rate / 1e6:.1f} MB/s")
                saved_at = now
        save_progress(progress, done)
        meta = meta_of_corpus(folder, source, options["tokenizer"], done)
    except DataError:
        cut_shards(folder, {})
        progress.unlink(missing_ok=True)
        raise
    write_json(os.path.join(folder, "meta.json"), meta)
    progress.unlink()
    n_train = done["train_documents"]
    say(f"{n_train:,} documents to train on, {done['val_documents']:,} to validate")
    say(dataset.summary(folder, meta, done["bytes"], rate))


@contextlib.contextmanager
def only_process(folder, say):
    """Lock the folder against a second process. Folders it made are removed if they stay empty."""
    new = [path for path in (folder, os.path.dirname(folder)) if not os.path.exists(path)]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w") as lock:
        try:
            if fcntl:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when its process ends
            else:
                say(f"no file locks on this system: do not make {folder} in a second process")
        except (BlockingIOError, PermissionError) as error:
            raise DataError(f"another process is making {folder}; wait for it to end") from error
        try:
            yield
        finally:
            lock.close()  # Windows cannot remove an open file
            os.remove(lock.name)
            for empty in new:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(empty)


# ---- where the documents are ---------------------------------------------------------------------


def find_corpus(name, input, options):
    """(source, an iterator over the documents) of the files of `input`, or of the corpus `name`.

    source: the description in meta.json, which differs if files, their dates or options differ.
    document: (path, number, raw), where number is a line of a .jsonl or an offset in a text.
    """
    digest = hashlib.sha256(json.dumps([CORPORA.get(name), options]).encode())
    if not input:
        needed("datasets", name)
        source = f"{name} of huggingface.co ({digest.hexdigest()[:16]})"
        return source, read_hub(*CORPORA[name])
    try:
        files = {path: os.stat(path) for path in input_files(input)}
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
    for path, status in files.items():
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file; expected text, or leave it out")
        facts = f"{os.path.relpath(path, input)}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(facts.encode("utf-8", "replace"))
    size = sum(status.st_size for status in files.values())
    found = f"{len(files):,} files, {size:,} bytes"
    if not size:
        raise DataError(f"{input}: {found}; expected text, .jsonl, .gz or .zst")
    base = os.path.basename(os.path.normpath(input))
    source = f"{base} ({found}, with their dates {digest.hexdigest()[:16]})"
    return source, read_documents(files)


def input_files(input):
    """Yields the files of a file, folder or glob, in order. A folder includes its subfolders."""

    def refuse(error):
        raise error

    if os.path.isdir(input):
        for folder, folders, names in os.walk(input, onerror=refuse):
            folders[:] = sorted(name for name in folders if name[0] != ".")
            yield from (os.path.join(folder, name) for name in sorted(names) if name[0] != ".")
    elif os.path.isfile(input):
        yield input
    else:
        paths = sorted(glob.glob(input, recursive=True))
        yield from (path for path in paths if not os.path.isdir(path))


def read_documents(paths):
    for path in paths:
        with open(path, "rb") as file:
            chunks = read_chunks(path, file)
            numbered = lines(path, chunks) if is_jsonl(path) else parts(chunks)
            yield from ((path, number, raw) for number, raw in numbered)


def read_hub(path, subset):
    """Yields the documents of a corpus on huggingface.co; `raw` is a str. Raises Offline."""
    import datasets

    try:
        rows = datasets.load_dataset(path, subset, split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield path, number, row["text"]
    except Exception as error:  # whatever its HTTP library raises
        reason = " ".join(str(error).split())[:150]
        raise Offline(f"cannot read {path} of huggingface.co: {reason}") from error


def is_jsonl(path):
    return path.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")


def lines(path, chunks):
    """Yields (line number, line) of a .jsonl."""
    rest = b""
    number = 1
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from enumerate(whole, number)
        number += len(whole)
        if len(rest) > LONGEST_LINE:
            found = f"{path}:{number}: a line of more than {LONGEST_LINE:,} bytes"
            raise DataError(f"{found}; expected one JSON object a line")
    if rest:
        yield number, rest


def parts(chunks):
    """Yields (offset, part): all of a text, or parts of up to PART if it exceeds WHOLE_DOCUMENT."""
    rest = b""
    offset = 0
    is_long = False
    for chunk in chunks:
        rest += chunk
        is_long = is_long or len(rest) > WHOLE_DOCUMENT
        while is_long and len(rest) > PART:
            end = end_of_part(rest)
            yield offset, rest[:end]
            rest = rest[end:]
            offset += end
    if rest:
        yield offset, rest


def end_of_part(raw):
    """Where to cut PART bytes or less: after a line end, else after a space, else a character."""
    for mark in (b"\n", b" "):
        if end := raw.rfind(mark, 0, PART) + 1:
            return end
    begins = (i for i in range(PART, PART - 4, -1) if raw[i] & 0xC0 != 0x80)  # of a character
    return next(begins, PART)


def read_chunks(path, file):
    """Yields the content of a file, decompressed, in chunks."""
    try:
        if path.endswith(".zst"):
            yield from read_zst(path, file)
        else:
            plain = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
            yield from iter(partial(plain.read, PIECE), b"")
    except Exception as error:  # gzip, zlib and zstandard each raise their own
        if isinstance(error, DataError) or getattr(error, "errno", None):
            raise
        found = f"{path} is truncated or damaged ({error})"
        raise DataError(f"{found}; fetch it again, or leave it out") from error


def read_zst(path, file):
    """Yields the decompressed content of a .zst, frame by frame."""
    # zstandard's stream_reader accepts a truncated file without an error; only `eof` shows it
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


# ---- documents to tokens, in several processes ---------------------------------------------------


def in_pieces(documents):
    """Yields lists of documents: as few as reach PIECE bytes (characters, if they are str)."""
    piece = []
    size = 0
    for document in documents:
        piece.append(document)
        size += len(document[-1]) + 1  # so that empty lines count too
        if size >= PIECE:
            yield piece
            piece = []
            size = 0
    if piece:
        yield piece


def tokenize_piece(options, piece):
    """({split: ids}, {each of COUNTS: number}) of a piece, with end-of-text ids."""
    meta = {"tokenizer": options["tokenizer"], "dtype": "uint16"}
    end = np.array([tokenizers.END_OF_TEXT[meta["tokenizer"]]], np.uint16)
    ids = {split: [end[:0]] for split in SPLITS}
    counts = dict.fromkeys(COUNTS, 0) | {"read": len(piece)}
    for document in piece:
        text = text_of(*document, options["field"])
        content = text.encode()
        if not content:
            continue
        draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
        split = "val" if draw < options["val_fraction"] * 2**64 else "train"
        ids[split] += [encode(text, meta), end]
        counts[f"{split}_documents"] += 1
        counts["bytes"] += len(content)
        counts["val_bytes"] += len(content) * (split == "val")
    return {split: np.concatenate(ids[split]) for split in SPLITS}, counts


def text_of(path, number, raw, field):
    """The text of a document. Raises DataError, with line or offset, if it is not text."""
    if isinstance(raw, str):
        text = raw
    elif is_jsonl(path):
        text = json_text(f"{path}:{number}", raw, field) if raw.strip() else ""
    else:
        text = decode_utf8(raw, path, number)
    text = text.replace("\0", "\ufffd")  # byte's end-of-text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_text(place, raw, field):
    line = decode_utf8(raw, place)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}); expected one object a line") from error
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        known = [k for k in value if isinstance(value[k], str)] if type(value) is dict else []
        hint = f"; --field={'|'.join(known[:8])} would be one" if known else ""
        raise DataError(f"{place} has no string in the field {field!r}{hint}")
    return value[field]


def map_in_order(function, pieces, num_proc):
    """Yields function(piece) for each piece, in order. With num_proc=1 this process does the work."""
    if num_proc == 1:
        yield from map(function, pieces)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_proc, spawn, exit_with_parent) as pool:
        waiting = deque()  # a few pieces are read ahead, so that memory stays bounded
        for piece in pieces:
            waiting.append(pool.submit(function, piece))
            if len(waiting) > 2 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def exit_with_parent():
    """In a process that tokenizes: leave Ctrl-C to the parent, and exit when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- shards and progress -------------------------------------------------------------------------


def append(folder, ids, sizes, shard_tokens):
    """Append {split: ids} to the shards. sizes: {name: bytes} of all shards; it is updated."""
    for split in SPLITS:
        rest = ids[split]
        number = max(0, sum(name.startswith(split) for name in sizes) - 1)
        while len(rest):
            name = f"{split}_{number:05}.bin"
            part = rest[: shard_tokens - sizes.get(name, 0) // 2]
            with open(os.path.join(folder, name), "ab") as file:
                file.write(part)
            sizes[name] = sizes.get(name, 0) + part.nbytes
            rest = rest[len(part) :]
            number += 1


def read_progress(progress, source, say):
    """The progress of this dataset, if progress.json and the shards match `source`; else none."""
    nothing = {"source": source, "sizes": {}} | dict.fromkeys(COUNTS, 0)
    done = read_json(progress)
    there = {path.name: path.stat().st_size for path in progress.parent.iterdir()}
    is_mine = done.keys() == nothing.keys() and done["source"] == source
    if is_mine and all(there.get(name, 0) >= size for name, size in done["sizes"].items()):
        say(f"resuming in {progress.parent} after {done['bytes'] / 1e6:,.1f} MB of text")
    else:
        done = nothing
        if progress.exists():
            why = "was begun from other files or options, or is damaged"
            say(f"the unfinished dataset in {progress.parent} {why}: starting over")
    cut_shards(progress.parent, done["sizes"])
    return done


def save_progress(progress, done):
    for name in done["sizes"]:
        fsync(progress.parent / name)
    write_json(progress, done)


def cut_shards(folder, sizes):
    """Cut the shards back to `sizes`, {name: bytes}: a kill may come between append and save."""
    for path in Path(folder).glob("*_[0-9]*.bin"):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path.name]:
            os.truncate(path, sizes[path.name])


def meta_of_corpus(folder, source, tokenizer, done):
    """The dataset's meta. Raises DataError if a split has fewer than 2 tokens."""
    meta = {"tokenizer": tokenizer, "source": source, "dtype": "uint16"}
    meta["vocab_size"] = tokenizers.VOCAB_SIZE[tokenizer]
    documents = done["train_documents"] + done["val_documents"]
    for split in SPLITS:
        sizes = [size for name, size in done["sizes"].items() if name.startswith(split)]
        meta[f"{split}_tokens"] = sum(sizes) // 2
        if meta[f"{split}_tokens"] < 2:
            has = f"of {documents:,} documents {split} has {done[f'{split}_documents']:,}"
            enough = f"--val_fraction={min(0.5, 10 / max(1, documents)):.2g}"
            raise DataError(f"the corpus is too small: {has}; take more text, or write {enough}")
    meta["val_bytes"] = done["val_bytes"]
    names = sorted(done["sizes"])
    meta["sha256"] = {name: dataset.digest_of(os.path.join(folder, name)) for name in names}
    return meta
