"""
A corpus: text of any size, streamed, tokenized by several processes, written as shards.

It is a folder (its files by name, then its folders; hidden ones are left out), a glob in quotes, a
.jsonl (one object a line, the text in --field), a .gz or .zst of a text or .jsonl, a long text, or
one of CORPORA.
- A line of a .jsonl is a document, and so is a text file. One past WHOLE_DOCUMENT is cut, at line
  ends where it has any, into documents of up to PART. Empty documents are left out.
- Each document is followed by the tokenizer's end-of-text: 50256 of gpt2. byte has none, and takes
  id 0, a byte that no text file may hold. val_bytes counts text, not these.
- A document goes to val where the hash of its content falls below val_fraction: its copies are all
  on one side, whatever the order of files and the number of processes.
- Half of a surrogate pair, which JSON may hold and UTF-8 may not, becomes U+FFFD.
progress.json says how far the shards are: after a kill the same command resumes, to the same bytes.

A DataError means that the input must change, and what is done is removed. After an OSError what is
done is kept: once the disk or the network is mended, the same command resumes.
"""

import concurrent.futures
import contextlib
import functools
import glob
import gzip
import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

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
WHOLE_DOCUMENT = 4_000_000  # a text file up to here is one document (a long novel has 3 MB)
PART = 64_000  # of a longer one: short, so that val_fraction finds enough of them
LONGEST_LINE = 16_000_000  # of a .jsonl
PIECE = 1_000_000  # what a process tokenizes at a time
COUNTS = [f"{split}_{unit}" for unit in ("documents", "bytes", "tokens") for split in SPLITS]
# A place between two documents: how many of them of which file are done, and how much of the disk.
START = {"file": 0, "documents": 0, "on_disk": 0}


class Corpus(NamedTuple):
    source: str  # what meta.json says of it: another text for other files, dates or options
    size: int  # bytes on the disk; 0 = unknown
    read: Callable  # read(place) yields (document, the place after it) from there on


def make_corpus(folder, corpus, options, num_proc, say):
    """
    Makes the dataset, or resumes making it; returns (folder, meta).

    options: {tokenizer, field, val_fraction, shard_tokens}. num_proc: processes that tokenize; 0 =
    one for each core.
    """
    if options["tokenizer"] == "gpt2":
        gpt2()  # where it cannot be had, nothing is written
    try:
        with only_process(folder, say):
            if not dataset.exists(folder):  # another process may just have made it
                write_corpus(folder, corpus, num_proc or os.cpu_count(), say, **options)
            return folder, dataset.read_meta(folder)
    except OSError as error:
        raise DataError(
            f"cannot make {folder}: {error}; mend that, and the same command resumes"
        ) from error


def write_corpus(folder, corpus, num_proc, say, tokenizer, field, val_fraction, shard_tokens):
    """Writes the shards, and meta.json when they are whole. Saves every 10 s, or every shard_tokens."""
    progress = Path(folder, "progress.json")
    done = read_progress(progress, corpus.source, shard_tokens, say)
    begun = dict(done)
    saved = dict(done)
    start = saved_at = said_at = time.perf_counter()
    try:
        cut_shards(folder, dataset.shard_sizes(done, shard_tokens))
        work = functools.partial(tokenize_piece, tokenizer, field, val_fraction)
        pieces = in_pieces(corpus.read(done["at"]))
        for result, at in map_in_order(work, pieces, num_proc):
            for split in SPLITS:
                append(folder, split, result[split], done[f"{split}_tokens"], shard_tokens)
            done |= {key: done[key] + result[key] for key in COUNTS} | {"at": at}
            now = time.perf_counter()
            unsaved = done["train_tokens"] - saved["train_tokens"]
            if now - saved_at > 10 or unsaved >= shard_tokens:
                save_progress(progress, done, saved, shard_tokens)
                saved = dict(done)
                saved_at = now
            if now - said_at > 10:
                say(how_far(done, begun, now - start, corpus.size))
                said_at = now
        meta = meta_of_corpus(folder, corpus.source, tokenizer, done, shard_tokens)
    except DataError:
        cut_shards(folder, {})
        progress.unlink(missing_ok=True)
        raise
    save_progress(progress, done, saved, shard_tokens)
    write_json(os.path.join(folder, "meta.json"), meta)
    progress.unlink()
    n_train = done["train_documents"]
    say(f"{n_train:,} documents to train on, {done['val_documents']:,} to validate")
    rate = (total(done, "bytes") - total(begun, "bytes")) / (time.perf_counter() - start)
    say(dataset.summary(folder, meta, total(done, "bytes"), rate))


@contextlib.contextmanager
def only_process(folder, say):
    """Locks the folder against a second process. Folders that stay empty are removed at the end."""
    new = [path for path in (folder, os.path.dirname(folder)) if not os.path.exists(path)]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w") as lock:
        try:
            if fcntl:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it dies with its holder
            else:
                say(f"no file locks on this system: let no second process make {folder} meanwhile")
        except (BlockingIOError, PermissionError) as error:
            raise DataError(f"another process is making {folder}; wait for it to end") from error
        try:
            yield
        finally:
            if not fcntl:
                lock.close()  # Windows removes no open file
            os.remove(lock.name)
            for empty in new:
                with contextlib.suppress(OSError):  # it is not
                    os.rmdir(empty)


# ---- where the documents are ---------------------------------------------------------------------


def find_corpus(name, input, options):
    """The Corpus in the files of `input`, or, without those, that `name` stands for."""
    digest = hashlib.sha256(json.dumps([CORPORA.get(name), options]).encode())
    if not input:
        return Corpus(f"{name} of huggingface.co ({digest.hexdigest()[:16]})", 0, hub_reader(name))
    count = 0
    size = 0
    try:
        for path in input_files(input):
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path} is not a regular file; expected text, or leave it out")
            facts = f"{os.path.relpath(path, input)}\0{status.st_size}\0{status.st_mtime_ns}\0"
            digest.update(facts.encode("utf-8", "replace"))
            count += 1
            size += status.st_size
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
    if not size:
        raise DataError(
            f"{input}: {count} files of 0 bytes in all; expected text, .jsonl, .gz or .zst"
        )
    base = os.path.basename(os.path.normpath(input))
    mark = digest.hexdigest()[:16]
    source = f"{base} ({count:,} files, {size:,} bytes, with their dates {mark})"
    return Corpus(source, size, functools.partial(read_documents, input))


def input_files(input):
    """The paths that a file, a folder or a glob stands for, in order. A folder is walked."""

    def refuse(error):
        raise error

    if not os.path.isdir(input):
        found = [input] if os.path.isfile(input) else sorted(glob.glob(input, recursive=True))
        yield from (path for path in found if not os.path.isdir(path))
        return
    for folder, folders, names in os.walk(input, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (os.path.join(folder, name) for name in sorted(names) if name[0] != ".")


def read_documents(input, at):
    """
    Yields (document, the place after it) from the place `at` (as START) on.

    document: (path, number, raw), where number is that of the line, or the offset in a text.
    """
    before = 0  # bytes of the files before this one
    for index, path in enumerate(input_files(input)):
        if index >= at["file"]:
            skip = at["documents"] if index == at["file"] else 0
            with open(path, "rb") as file:
                chunks = read_chunks(path, file)
                numbered = enumerate(lines(chunks), 1) if is_jsonl(path) else parts(chunks)
                for count, (number, raw) in enumerate(numbered, 1):
                    if count > skip:
                        on_disk = before + file.tell()
                        place = {"file": index, "documents": count, "on_disk": on_disk}
                        yield (path, number, raw), place
        before += os.path.getsize(path)


def is_jsonl(path):
    return path.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")


def lines(chunks):
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        if len(rest) > LONGEST_LINE:
            break  # text_of() refuses it
    if rest:
        yield rest


def parts(chunks):
    """Yields (offset, part) of a text: all of it, or, past WHOLE_DOCUMENT, parts of up to PART."""
    rest = b""
    offset = 0
    is_long = False
    for chunk in chunks:
        rest += chunk
        is_long = is_long or len(rest) > WHOLE_DOCUMENT
        begin = 0
        while is_long and len(rest) - begin > PART:
            end = end_of_part(rest, begin)
            yield offset + begin, rest[begin:end]
            begin = end
        rest = rest[begin:]
        offset += begin
    if rest:
        yield offset, rest


def end_of_part(raw, begin):
    """After the last line end in PART bytes; without one, after the last space or character."""
    end = begin + PART
    for mark in (b"\n", b" "):
        if found := raw.rfind(mark, begin, end) + 1:
            return found
    first = next((i for i in range(end, end - 4, -1) if raw[i] & 0xC0 != 0x80), end)
    return max(first, begin + 1)


def read_chunks(path, file):
    """Yields the text of a file, uncompressed."""
    try:
        if path.endswith(".zst"):
            yield from read_zst(path, file)
        else:
            plain = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
            yield from iter(functools.partial(plain.read, PIECE), b"")
    except Exception as error:  # gzip, zlib and each zstd have their own
        if isinstance(error, DataError) or getattr(error, "errno", None):
            raise
        raise DataError(
            f"{path} is truncated or damaged ({error}); fetch it again, or leave it out"
        ) from error


def read_zst(path, file):
    """Yields what a .zst holds, frame after frame."""
    try:
        from compression.zstd import ZstdDecompressor as decompressor  # Python 3.14
    except ImportError:
        # its stream_reader takes a truncated file for whole: only `eof` tells
        decompressor = needed("zstandard", path).ZstdDecompressor().decompressobj
    frame = decompressor()
    while raw := file.read(1 << 16):
        while raw:
            if frame.eof:
                frame = decompressor()
            yield frame.decompress(raw)
            raw = frame.unused_data
    if not frame.eof:
        raise EOFError("it ends inside a frame")


def hub_reader(name):
    """Corpus.read of a corpus on huggingface.co, whose documents are strings. Raises Offline."""
    datasets = needed("datasets", name)
    for package in ("datasets", "huggingface_hub"):  # they report each of their retries
        logging.getLogger(package).setLevel(logging.ERROR)
    path, subset = CORPORA[name]

    def read(at):
        skip = at["documents"]
        try:
            rows = datasets.load_dataset(path, subset, split="train", streaming=True)
            for count, row in enumerate(rows.skip(skip), skip + 1):
                yield (path, count, row["text"]), START | {"documents": count}
        except Exception as error:  # whatever its HTTP library raises
            reason = " ".join(str(error).split())[:150]
            raise Offline(f"cannot read {path} of huggingface.co: {reason}") from error

    return read


# ---- documents to tokens, in several processes ---------------------------------------------------


def in_pieces(documents):
    """Yields (piece, the place after it): documents of PIECE bytes in all, or a little more."""
    piece = []
    size = 0
    for document, place in documents:
        piece.append(document)
        size += len(document[-1]) + 1  # empty lines count as well
        if size >= PIECE:
            yield piece, place
            piece = []
            size = 0
    if piece:
        yield piece, place


def tokenize_piece(tokenizer, field, val_fraction, piece):
    """{"train": ids, "val": ids} | COUNTS of a piece; each document has its end-of-text."""
    meta = {"tokenizer": tokenizer, "dtype": "uint16"}
    end = np.array([tokenizers.END_OF_TEXT[tokenizer]], np.uint16)
    ids = {split: [end[:0]] for split in SPLITS}
    counts = dict.fromkeys(COUNTS, 0)
    for document in piece:
        text = text_of(*document, field)
        try:
            content = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            content = text.encode()
        if not content:
            continue
        draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
        split = "val" if draw < val_fraction * 2**64 else "train"
        tokens = encode(text, meta)
        ids[split] += [tokens, end]
        counts[f"{split}_documents"] += 1
        counts[f"{split}_bytes"] += len(content)
        counts[f"{split}_tokens"] += len(tokens) + 1
    return {split: np.concatenate(ids[split]) for split in SPLITS} | counts


def text_of(path, number, raw, field):
    """The text of a document. DataError names the line, or the offset, of what is no text."""
    if isinstance(raw, str):
        return raw
    if not is_jsonl(path):
        return decode_utf8(raw, path, number)
    place = f"{path}:{number}"
    if len(raw) > LONGEST_LINE:
        raise DataError(
            f"{place}: a line of more than {LONGEST_LINE:,} bytes; expected one JSON object a line"
        )
    if not raw.strip():
        return ""
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
    """
    Yields (function(piece), place) for each (piece, place), in order. A few pieces are read ahead,
    so that memory stays bounded. With num_proc=1 this process does the work.
    """
    if num_proc == 1:
        for piece, place in pieces:
            yield function(piece), place
        return
    context = multiprocessing.get_context("spawn")
    waiting = []  # (future, place)
    pool = concurrent.futures.ProcessPoolExecutor(num_proc, context, exit_with_parent)
    try:
        for piece, place in pieces:
            waiting.append((pool.submit(function, piece), place))
            if len(waiting) > 2 * num_proc:
                future, place = waiting.pop(0)
                yield future.result(), place
        for future, place in waiting:
            yield future.result(), place
    except concurrent.futures.process.BrokenProcessPool as error:
        raise ChildProcessError(
            "a process that tokenizes died, perhaps out of memory; --num_proc=1 needs the least"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def exit_with_parent():
    """In a process that tokenizes: leave Ctrl-C to the parent, and exit when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- shards, and how far they are ----------------------------------------------------------------


def total(counts, unit):
    return sum(counts[f"{split}_{unit}"] for split in SPLITS)


def read_progress(progress, source, shard_tokens, say):
    """What progress.json counts as done of this very work, with the shards there; else nothing."""
    nothing = {"inputs": source, "at": START} | dict.fromkeys(COUNTS, 0)
    if not progress.exists():
        return nothing
    done = read_json(progress)
    there = {path.name: path.stat().st_size for path in progress.parent.iterdir()}
    if done.get("inputs", source) != source:
        why = "was begun from other files or options, or older ones"
    elif done.keys() != nothing.keys() or any(
        there.get(name, 0) < size for name, size in dataset.shard_sizes(done, shard_tokens).items()
    ):
        why = "is damaged"
    else:
        say(f"resuming in {progress.parent} after {total(done, 'bytes') / 1e6:,.1f} MB of text")
        return done
    say(f"the unfinished dataset in {progress.parent} {why}: starting over")
    return nothing


def cut_shards(folder, sizes):
    """Cuts the shards to `sizes`, {name: bytes}; a kill may come between an append and a save."""
    for path in Path(folder).iterdir():
        if path.name in sizes:
            if path.stat().st_size > sizes[path.name]:
                os.truncate(path, sizes[path.name])
        elif re.fullmatch(r"(train|val)_\d{5,}\.bin|(progress|meta)\.json(\..*)?\.tmp", path.name):
            path.unlink()


def append(folder, split, ids, first, shard_tokens):
    """Writes ids to the shards of a split. first: how many tokens they hold already."""
    while len(ids):
        number, filled = divmod(first, shard_tokens)
        part = ids[: shard_tokens - filled]
        with open(dataset.shard_path(folder, split, number), "ab") as file:
            file.write(part)
        first += len(part)
        ids = ids[len(part) :]


def save_progress(progress, done, saved, shard_tokens):
    """After a kill, the same command resumes from here. saved: what was saved last."""
    sizes = dataset.shard_sizes(done, shard_tokens)
    for name, _ in sizes.items() - dataset.shard_sizes(saved, shard_tokens).items():
        fsync(progress.parent / name)
    write_json(progress, done)


def how_far(done, begun, seconds, size):
    """A line on what is done, after `seconds` of work since it was `begun`."""
    rate = (total(done, "bytes") - total(begun, "bytes")) / seconds
    line = f"{total(done, 'bytes') / 1e6:,.0f} MB of text, {rate / 1e6:.1f} MB/s"
    on_disk = done["at"]["on_disk"]
    if read := on_disk - begun["at"]["on_disk"]:
        left = timedelta(seconds=int(seconds * (size - on_disk) / read))
        line += f", {on_disk / size:.1%}, {left} left"
    return line


def meta_of_corpus(folder, source, tokenizer, done, shard_tokens):
    """The dataset's meta. Raises DataError where a split has less than 2 tokens."""
    documents = total(done, "documents")
    for split in SPLITS:
        if done[f"{split}_tokens"] < 2:
            raise DataError(
                f"the corpus is too small: of {documents:,} documents {split} has"
                f" {done[f'{split}_documents']:,}, and needs one, or block_size + 1 tokens to"
                f" train; take more text, or write --val_fraction={min(0.5, 10 / max(1, documents)):.2g}"
            )
    meta = {"tokenizer": tokenizer, "source": source, "dtype": "uint16"}
    meta |= {"vocab_size": tokenizers.VOCAB_SIZE[tokenizer]}
    meta |= {key: done[key] for key in ("train_tokens", "val_tokens", "val_bytes")}
    names = sorted(dataset.shard_sizes(done, shard_tokens))
    meta["sha256"] = {name: dataset.digest_of(os.path.join(folder, name)) for name in names}
    return meta
