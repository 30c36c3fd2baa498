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
import sys
import threading
import time
from pathlib import Path

import numpy as np

from plumbing import dataset
from plumbing.dataset import CORPORA, SPLITS, Offline
from plumbing.files import fsync, read_json, write_json
from plumbing.tokenizers import END_OF_TEXT, VOCAB_SIZE, DataError, decode_utf8, encode, gpt2

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Bytes
WHOLE_DOCUMENT = 4_000_000  # a text file up to here is one document (a long novel has 3 MB)
PART = 64_000  # of a longer one: short, so that val_fraction finds enough of them
LONGEST_LINE = 16_000_000  # of a .jsonl
PIECE = 1_000_000  # what a process tokenizes at a time
COUNTS = ("train_documents", "val_documents", "train_bytes", "val_bytes")
START = {"file": 0, "offset": 0, "line": 1}  # which file, where in its text (uncompressed)


class Unfinished(DataError):
    """The input is not to blame: what is done is kept, and the same command resumes."""


def make_corpus(folder, name, input, survey, options, num_proc, say):
    """
    Makes the dataset, or resumes making it; returns (folder, meta).

    survey: what survey_corpus() found. options: {tokenizer, field, val_fraction, shard_tokens}.
    num_proc: processes that tokenize; 0 = one for each core.
    """
    source, mark, size = survey
    options = dict(options)
    shard_tokens = options.pop("shard_tokens")
    read = functools.partial(read_items, input) if input else hub_reader(name)
    if options["tokenizer"] == "gpt2":
        gpt2()  # where it cannot be had, nothing is written
    progress = Path(folder, "progress.json")
    with only_process(folder, say):
        if dataset.exists(folder):  # another process has just made it
            return folder, dataset.read_meta(folder)
        nothing = {"inputs": mark, "at": START, "train_tokens": 0, "val_tokens": 0}
        nothing |= dict.fromkeys(COUNTS, 0)
        done = read_progress(folder, mark, shard_tokens, say) or dict(nothing)
        bytes_before = total_bytes(done)
        start = time.perf_counter()
        try:
            cut_shards(folder, done, shard_tokens)
            work = functools.partial(tokenize_piece, **options)
            results = map_in_order(work, in_pieces(read(done["at"])), num_proc or os.cpu_count())
            write_shards(folder, results, done, shard_tokens, size, say)
            meta = meta_of_corpus(folder, source, options["tokenizer"], done, shard_tokens)
            write_json(os.path.join(folder, "meta.json"), meta)
        except (Unfinished, Offline):
            raise
        except OSError as error:
            raise Unfinished(
                f"cannot write {folder}: {error.strerror}; mend that, and the same command resumes"
            ) from error
        except DataError:  # the input must change, so what is done cannot be used
            cut_shards(folder, nothing, shard_tokens)
            progress.unlink(missing_ok=True)
            raise
        progress.unlink(missing_ok=True)
        n_train = done["train_documents"]
        say(f"{n_train:,} documents to train on, {done['val_documents']:,} to validate")
        rate = (total_bytes(done) - bytes_before) / (time.perf_counter() - start)
        say(dataset.summary(folder, meta, total_bytes(done), rate))
        return folder, meta


@contextlib.contextmanager
def only_process(folder, say):
    """Locks the folder against a second process. Folders that stay empty are removed at the end."""
    new = [path for path in (folder, os.path.dirname(folder)) if not os.path.exists(path)]
    path = Path(folder, "lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "w")
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror}; write --data_dir=FOLDER"
        ) from error
    with lock:
        try:
            if fcntl:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it dies with its holder
            else:
                say(f"no file locks on this system: let no second process make {folder} meanwhile")
        except OSError as error:
            raise DataError(f"another process is making {folder}; wait for it to end") from error
        try:
            yield
        finally:
            if not fcntl:
                lock.close()  # Windows removes no open file
            path.unlink(missing_ok=True)
            for empty in new:
                with contextlib.suppress(OSError):  # it is not
                    os.rmdir(empty)


# ---- the files -----------------------------------------------------------------------------------


def input_files(input):
    """The paths that a file, a folder or a glob stands for, in order. A folder is walked."""

    def refuse(error):
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    if not os.path.isdir(input):
        found = [input] if os.path.isfile(input) else sorted(glob.glob(input, recursive=True))
        yield from (path for path in found if not os.path.isdir(path))
        return
    for folder, folders, names in os.walk(input, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (os.path.join(folder, name) for name in sorted(names) if name[0] != ".")


def survey_corpus(name, input, options):
    """
    (description, mark, bytes on the disk) of a corpus. mark: 16 hex digits that change with the
    names, sizes and dates of the files, and with the options.
    """
    digest = hashlib.sha256(json.dumps([CORPORA.get(name), options]).encode())
    count = 0
    size = 0
    for path in input_files(input) if input else ():
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; expected a file") from error
        if not os.path.isfile(path):
            raise DataError(f"{path} is not a regular file; expected text, or leave it out")
        facts = f"{os.path.relpath(path, input)}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(facts.encode("utf-8", "replace"))
        count += 1
        size += status.st_size
    if input and not size:
        raise DataError(
            f"{input}: {count} files of 0 bytes in all; expected text, .jsonl, .gz or .zst"
        )
    mark = digest.hexdigest()[:16]
    if not input:
        return f"{name} of huggingface.co ({mark})", mark, 0
    base = os.path.basename(os.path.normpath(input))
    return f"{base} ({count:,} files, {size:,} bytes, with their dates {mark})", mark, size


def read_items(input, at):
    """
    Yields (item, the place after it, bytes on the disk so far) from the place `at` (as START) on.

    item: (path, number, raw); of a .jsonl whole lines and the number of the first, of a text one
    document and its offset.
    """
    bytes_before = 0  # of the files before this one
    for index, path in enumerate(input_files(input)):
        if index >= at["file"]:
            begin = at if index == at["file"] else START
            read = read_lines if is_jsonl(path) else read_texts
            for on_disk, number, raw, offset, line in read(path, begin["offset"], begin["line"]):
                place = {"file": index, "offset": offset, "line": line}
                yield (path, number, raw), place, bytes_before + on_disk
        bytes_before += os.path.getsize(path)


def in_pieces(items):
    """Yields (piece, place, bytes on the disk): items of PIECE bytes in all, or a little more."""
    piece = []
    size = 0
    for item, place, on_disk in items:
        piece.append(item)
        size += len(item[-1])
        if size >= PIECE:
            yield piece, place, on_disk
            piece = []
            size = 0
    if piece:
        yield piece, place, on_disk


def is_jsonl(path):
    return path.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")


def read_lines(path, offset, line):
    """Yields (bytes on the disk so far, first line's number, lines, offset after, line after)."""
    rest = b""
    on_disk = 0
    for on_disk, chunk in read_chunks(path, offset):
        end = chunk.rfind(b"\n") + 1
        if end:
            raw = rest + chunk[:end]
            rest = chunk[end:]
            first = line
            offset += len(raw)
            line += raw.count(b"\n")
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
    rest = b""
    is_long = offset > 0
    on_disk = 0
    for on_disk, chunk in read_chunks(path, offset):
        rest += chunk
        is_long = is_long or len(rest) > WHOLE_DOCUMENT
        begin = 0
        while is_long and len(rest) - begin > PART:
            end = end_of_part(rest, begin)
            yield on_disk, offset, rest[begin:end], offset + end - begin, line
            offset += end - begin
            begin = end
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
                offset = 0
                chunks = iter(functools.partial(file.read, PIECE), b"")
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
            f"{path} is truncated or damaged ({error}); fetch it again, or leave it out"
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
        # its stream_reader takes a truncated file for whole: only `eof` tells
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


def hub_reader(name):
    """read_items of a corpus on huggingface.co; a place's offset counts rows. Raises Offline."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name} needs datasets; type: pip install datasets") from error
    for package in ("datasets", "huggingface_hub"):  # they report each of their retries
        logging.getLogger(package).setLevel(logging.ERROR)
    path, subset = CORPORA[name]

    def read(at):
        try:
            rows = datasets.load_dataset(path, subset, split="train", streaming=True)
            for row, document in enumerate(rows.skip(at["offset"]), at["offset"] + 1):
                yield (path, row, document["text"]), START | {"offset": row}, 0
        except Exception as error:  # whatever its HTTP library raises
            reason = " ".join(str(error).split())[:150]
            raise Offline(f"cannot read {path} of huggingface.co: {reason}") from error

    return read


# ---- documents to tokens, in several processes ---------------------------------------------------


def tokenize_piece(piece, tokenizer, field, val_fraction):
    """{"train": ids, "val": ids} | counts of a piece; each document has its end-of-text."""
    meta = {"tokenizer": tokenizer, "dtype": "uint16"}
    end = np.array([END_OF_TEXT[tokenizer]], np.uint16)
    ids = {split: [end[:0]] for split in SPLITS}
    counts = dict.fromkeys(COUNTS, 0)
    for path, number, raw in piece:
        for text in [raw] if isinstance(raw, str) else documents(path, number, raw, field):
            try:
                content = text.encode()
            except UnicodeEncodeError:  # half of a surrogate pair
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                content = text.encode()
            if not content:
                continue
            draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
            split = "val" if draw < val_fraction * 2**64 else "train"
            ids[split] += [encode(text, meta), end]
            counts[f"{split}_documents"] += 1
            counts[f"{split}_bytes"] += len(content)
    return {split: np.concatenate(ids[split]) for split in SPLITS} | counts


def documents(path, number, raw, field):
    """The texts in a piece of a file. DataError names the line, or offset, of what is no text."""
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


def map_in_order(function, pieces, num_proc):
    """
    Yields (function(piece), *rest) for each (piece, *rest), in order. A few pieces are read ahead,
    so that memory stays bounded. With num_proc=1 this process does the work.
    """
    if num_proc == 1:
        for piece, *rest in pieces:
            yield function(piece), *rest
        return
    context = multiprocessing.get_context("spawn")
    waiting = []  # (future, rest)
    pool = concurrent.futures.ProcessPoolExecutor(num_proc, context, exit_with_parent)
    try:
        for piece, *rest in pieces:
            waiting.append((pool.submit(function, piece), rest))
            if len(waiting) > 2 * num_proc:
                future, rest = waiting.pop(0)
                yield future.result(), *rest
        for future, rest in waiting:
            yield future.result(), *rest
    except concurrent.futures.process.BrokenProcessPool as error:
        raise Unfinished(
            "a process that tokenizes died, perhaps out of memory; the same command resumes, and"
            " --num_proc=1 needs the least memory"
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


def write_shards(folder, results, done, shard_tokens, size, say):
    """
    Appends the results to the shards, counts them in `done`, and shows how far it is: on a terminal
    in a line that changes, else in a line every half minute.

    size: of the input on the disk, bytes; 0 = unknown.
    """
    on_terminal = sys.stderr.isatty()
    bytes_before = total_bytes(done)
    start = saved = shown = time.perf_counter()
    first = None  # (bytes on the disk, time) after the first result
    try:
        for result, at, on_disk in results:
            full = [append(folder, split, result[split], done, shard_tokens) for split in SPLITS]
            done |= {key: done[key] + result[key] for key in COUNTS} | {"at": at}
            now = time.perf_counter()
            if any(full) or now - saved > 10:
                save_progress(folder, done, shard_tokens)
                saved = now
            first = first or (on_disk, now)
            if now - shown < (0.2 if on_terminal else 30):
                continue
            shown = now
            rate = (total_bytes(done) - bytes_before) / (now - start)
            line = f"{total_bytes(done) / 1e6:,.0f} MB of text, {rate / 1e6:.1f} MB/s"
            if on_disk > first[0]:
                left = int((now - first[1]) * (size - on_disk) / (on_disk - first[0]))  # seconds
                time_left = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
                line += f", {on_disk / size:.1%}, {time_left} left"
            print(f"\r{line:70}", end="", file=sys.stderr) if on_terminal else say(line)
    finally:
        if on_terminal:
            print(f"\r{'':70}\r", end="", file=sys.stderr)


def append(folder, split, ids, done, shard_tokens):
    """Writes ids after those that `done` counts, and counts them. True where a shard is full."""
    key = f"{split}_tokens"
    is_full = False
    while len(ids):
        number, filled = divmod(done[key], shard_tokens)
        path = dataset.shard_path(folder, split, number)
        part = ids[: shard_tokens - filled]
        ids = ids[len(part) :]
        with open(path, "ab") as file:
            file.write(part)
        done[key] += len(part)
        if filled + len(part) == shard_tokens:
            is_full = True
            fsync(path)
    return is_full


def total_bytes(done):
    return done["train_bytes"] + done["val_bytes"]


def save_progress(folder, done, shard_tokens):
    """After a kill, the same command resumes from here."""
    for split in SPLITS:
        number, filled = divmod(done[f"{split}_tokens"], shard_tokens)
        if filled:
            fsync(dataset.shard_path(folder, split, number))
    write_json(os.path.join(folder, "progress.json"), done)


def read_progress(folder, mark, shard_tokens, say):
    """What progress.json counts as done of this very work, with the shards there; else None."""
    path = os.path.join(folder, "progress.json")
    if not os.path.exists(path):
        return None
    done = read_json(path)
    if done.get("inputs", mark) != mark:
        say(f"{folder} was begun from other files or options, or older ones: starting over")
        return None
    try:
        sizes = dataset.shard_sizes(done, shard_tokens)
        is_whole = all(os.path.getsize(os.path.join(folder, f)) >= sizes[f] for f in sizes)
    except (KeyError, TypeError, OSError):
        is_whole = False
    if not is_whole:
        say(f"the unfinished dataset in {folder} is damaged: starting over")
        return None
    say(f"resuming in {folder} after {total_bytes(done) / 1e6:,.1f} MB of text")
    return done


def cut_shards(folder, done, shard_tokens):
    """Cuts the shards to what `done` counts: a kill may come between an append and a save."""
    sizes = dataset.shard_sizes(done, shard_tokens)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name in sizes:
            if os.path.getsize(path) > sizes[name]:
                os.truncate(path, sizes[name])
        elif re.fullmatch(r"(train|val)_\d{5,}\.bin|(progress|meta)\.json(\..*)?\.tmp", name):
            os.remove(path)


def meta_of_corpus(folder, source, tokenizer, done, shard_tokens):
    """The dataset's meta. Raises DataError where a split has less than 2 tokens."""
    documents = done["train_documents"] + done["val_documents"]
    for split in SPLITS:
        if done[f"{split}_tokens"] < 2:
            raise DataError(
                f"the corpus is too small: of {documents:,} documents {split} has"
                f" {done[f'{split}_documents']:,}, and needs one, or block_size + 1 tokens to"
                f" train; take more text, or write --val_fraction={min(0.5, 10 / max(1, documents)):.2g}"
            )
    meta = {"tokenizer": tokenizer, "source": source, "dtype": "uint16"}
    meta |= {"vocab_size": VOCAB_SIZE[tokenizer]}
    meta |= {key: done[key] for key in ("train_tokens", "val_tokens", "val_bytes")}
    names = sorted(dataset.shard_sizes(done, shard_tokens))
    meta["sha256"] = {f: dataset.digest_of(os.path.join(folder, f), "uint16")[0] for f in names}
    return meta
