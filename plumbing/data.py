"""
The data of a run: a dataset on disk, its windows, its tokenizer, batches that are read ahead.

A dataset is a folder, DATA_DIR/NAME, with train.bin and val.bin (flat token ids) and meta.json. That
is written last, so a folder that has it is complete. `meta` is the dict in it. Every dataset has:
    vocab_size                ids are below it; data of your own (train.open_dataset) needs no more
A folder also has:
    dtype                     of the ids in its files: uint16 or uint32
    train_tokens, val_tokens  in each file
    sha256                    {file name: 64 hex digits}
What is missing of the rest is "n/a":
    tokenizer                 a key of TOKENIZERS, to encode prompts and to print samples
    chars                     the tokenizer's own: for char, its characters, sorted. What your own
                              tokenizer learned lies here too, under names of your choice
    val_bytes                 of the validation text in UTF-8, for bits per byte
    source                    what the text is, in words
"""

import atexit
import contextlib
import hashlib
import importlib
import json
import math
import os
import queue
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from plumbing.cli import BadInput, RunFailed
from plumbing.files import clean
from plumbing.signals import HANDLED

SPLITS = ("train", "val")
# Names that need no --input: texts, and corpora on huggingface.co (their path and subset there).
TEXTS = ("shakespeare", "pydoc")
CORPORA = {
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
}
DEFAULT_DATA_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")
POLL_SECONDS = 0.5  # how often a wait for a batch looks at signals and at the workers

# torch's warning about more workers than CPUs: the column `wait` shows whether they help
warnings.filterwarnings("ignore", message="This DataLoader will create")


class DataError(BadInput):
    """The data cannot be used. The message is one line: what was found, and what to type."""


class Offline(BadInput):
    """A download was needed, and no server gave it in time."""


# ---- meta.json, and the files it vouches for -----------------------------------------------------


def dataset_folder(name: str, data_dir: str) -> str:
    """The folder of a dataset. Raises DataError if `name` is not a valid name."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise DataError(f"a NAME is made of letters, digits, '_', '-' and '.', not {name!r}")
    return os.path.join(data_dir, name)


def exists(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "meta.json"))


def read_meta(folder: str) -> dict:
    """The dict in meta.json. Raises DataError if it does not describe a dataset."""
    path = os.path.join(folder, "meta.json")
    content = read_file(path)
    try:
        meta = json.loads(content)
        counts = [meta[key] for key in ("vocab_size", "train_tokens", "val_tokens")]
        valid = (
            meta["dtype"] in ("uint16", "uint32")
            and all(isinstance(meta["sha256"][f"{split}.bin"], str) for split in SPLITS)
            and all(type(n) is int and 0 < n < 2**62 for n in [*counts, meta.get("val_bytes", 1)])
            and isinstance(meta.get("source", ""), str)
            and ("tokenizer" not in meta or tokenizer_of(meta).vocab_size == counts[0])
            and clean(meta) == meta  # not nested too deep to be written to run.json
        )
    except KeyError as error:
        raise DataError(f"{path} lacks {error}; {make_again(folder)}") from error
    except (ValueError, TypeError, AttributeError, RecursionError, DataError):
        valid = False
    if not valid:
        raise DataError(f"{path} does not describe a dataset; {make_again(folder)}")
    return meta


def fingerprint(meta: dict) -> str:
    """16 hex digits that identify the tokens and their meaning, but not their source."""
    content = {key: value for key, value in meta.items() if key != "source"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def verify(folder: str, meta: dict) -> None:
    """Raises DataError unless both files have the size, hash and range of ids that `meta` says.
    They are read, not mapped: mapped pages would count as memory of this process."""
    again = make_again(folder, meta.get("tokenizer", "char"))
    dtype = np.dtype(meta["dtype"])
    for split in SPLITS:
        path = os.path.join(folder, f"{split}.bin")
        digest = hashlib.sha256()
        size = highest = 0
        with open(path if os.path.isfile(path) else os.devnull, "rb") as file:
            while chunk := file.read(1 << 24):
                size += len(chunk)
                digest.update(chunk)
                ids = np.frombuffer(chunk, dtype, len(chunk) // dtype.itemsize)
                highest = max(highest, ids.max(initial=0))
        found = f"{size:,} bytes and its SHA-256 is {digest.hexdigest()}"
        expected = meta[f"{split}_tokens"] * dtype.itemsize
        recorded = f"{expected:,} bytes and its SHA-256 is {meta['sha256'][f'{split}.bin']}"
        if found != recorded:
            said = f"it has {found}, but meta.json says {recorded}"
            raise DataError(f"{path} was changed or damaged: {said}; {again}")
        if highest >= meta["vocab_size"]:
            found = f"{path} holds token id {highest}"
            raise DataError(f"{found}, but vocab_size is {meta['vocab_size']}; {again}")


def make_again(folder: str, tokenizer: str = "char") -> str:
    return f"delete {os.path.join(folder, 'meta.json')} and type: {command(folder, tokenizer)}"


def command(folder: str, tokenizer: str = "char") -> str:
    """What to type to make the dataset in `folder`."""
    data_dir, name = os.path.split(os.path.abspath(folder))
    return (
        f"python prepare_data.py {name}"
        + ("" if name in TEXTS or name in CORPORA else " --input=FILE")
        + ("" if tokenizer == "char" else f" --tokenizer={tokenizer}")
        + ("" if data_dir == DEFAULT_DATA_DIR else f" --data_dir={data_dir}")
    )


# ---- tokens and windows --------------------------------------------------------------------------


class Split(np.memmap):
    """The token ids of a split, mapped into memory once. A pickle, for a worker that is spawned,
    holds the file's name and not the tokens."""

    def __reduce__(self):
        if isinstance(self.base, np.ndarray):  # a part, such as split[:100]
            return np.array(self).__reduce__()
        return Split, (self.filename, self.dtype, "r")


def open_split(folder: str, meta: dict, split: str) -> Split:
    return Split(os.path.join(folder, f"{split}.bin"), meta["dtype"], "r")


def read_rows(tokens: Split, starts: np.ndarray, length: int) -> np.ndarray:
    """The `length` tokens from each of `starts` on, int64 (len(starts), length). Raises OSError if
    the file has another size than when it was opened: to read past its end would kill the process.
    """
    if tokens.base.size() != tokens.nbytes:
        raise OSError(f"{tokens.filename} has changed its size since the start")
    return np.asarray(tokens)[starts[:, None] + np.arange(length)].astype(np.int64)


class OrderedWindows:
    """The first `n_targets` targets of `tokens` (0 = all), rounded up to whole windows, for validation.
    `windows[first, count]` is a batch: inputs and targets, each int64 (count, block_size).

    If the last window overlaps the one before, its repeated targets are -100.
    """

    def __init__(self, tokens: Split, block_size: int, n_targets: int = 0):
        self.tokens = tokens
        self.block_size = block_size
        self.windows = math.ceil(min(n_targets or math.inf, len(tokens) - 1) / block_size)

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, batch: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        first, count = batch
        first_new = np.arange(first, first + count) * self.block_size
        starts = np.minimum(first_new, len(self.tokens) - 1 - self.block_size)
        rows = read_rows(self.tokens, starts, self.block_size + 1)
        targets = rows[:, 1:].copy()
        targets[starts[:, None] + np.arange(self.block_size) < first_new[:, None]] = -100
        return rows[:, :-1].copy(), targets


# ---- batches, read ahead -------------------------------------------------------------------------


class Batches:
    """An iterator over (inputs, targets, milliseconds waited): dataset[place] for each of `places`,
    as tensors on the device. `num_workers` processes read ahead; 0 = this one reads.

    Workers send NumPy arrays through a pipe. Tensors would go through /dev/shm, which is small in
    containers; where it is full, torch waits for ever. A thread reads the pipe: a worker that dies or
    stops within a batch blocks whoever reads, and the training must still hear signals.
    """

    def __init__(
        self, dataset, places, device, num_workers=0, prefetch_factor=2, hang_minutes=30.0
    ):
        import torch  # here, so that prepare_data.py, which needs none, starts at once

        self.device = device
        self.hang_minutes = hang_minutes
        loader = torch.utils.data.DataLoader(
            dataset,
            sampler=places,
            batch_size=None,
            collate_fn=as_arrays,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # or it would draw a seed from the global generator
        )
        try:
            self.iterator = start_workers(loader)
        except OSError as error:
            found = f"cannot start {num_workers} DataLoader workers ({error})"
            raise RunFailed(f"{found}; is /dev/shm full? --num_workers=0 needs none") from error
        self.workers = getattr(self.iterator, "_workers", [])
        self.ready = queue.Queue(1)  # a batch, or the error that took its place
        self.reader = threading.Thread(target=self.read, daemon=True)
        if self.workers:
            atexit.register(self.kill)  # or Python would wait for them, without an end
            self.reader.start()

    def read(self) -> None:
        """In the thread: pass on what the workers send."""
        try:
            for batch in self.iterator:
                self.ready.put(batch)
            self.ready.put(StopIteration())
        except Exception as error:
            self.ready.put(error)

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> tuple:
        return self.next_batch()

    def next_batch(self, should_stop: Callable[[], bool] = lambda: False) -> tuple | None:
        """The next batch; None if should_stop() says so while the workers keep it waiting. Raises
        RunFailed if a worker has died, or if none gave a batch for hang_minutes. After
        None, the next call waits for the same batch."""
        began = time.perf_counter()
        batch = None if self.workers else next(self.iterator)
        while batch is None:
            with contextlib.suppress(queue.Empty):
                batch = self.ready.get(timeout=POLL_SECONDS)
            if batch is None or isinstance(batch, Exception):
                self.check_workers(time.perf_counter() - began, batch)
                if should_stop():
                    return None
        return *to_device(batch, self.device), 1000 * (time.perf_counter() - began)

    def check_workers(self, waited: float, error: Exception | None) -> None:
        """Raises `error` if there is one, and RunFailed if there is no hope for a batch."""
        resume = "the same command resumes from the newest checkpoint"
        for worker in self.workers:
            if worker.exitcode:  # then `error` is only what followed
                found = f"DataLoader worker {worker.pid} has died (exit code {worker.exitcode}"
                raise RunFailed(f"{found}; -9: perhaps memory ran out); {resume}") from error
        if error or not self.reader.is_alive() and self.ready.empty():
            raise error or StopIteration
        if waited > 60 * self.hang_minutes:
            found = f"no DataLoader worker gave a batch for {self.hang_minutes:g} minutes"
            hint = "does the disk of the data answer? --num_workers=0 shows where it hangs"
            raise RunFailed(f"{found} (--hang_minutes); {hint}; {resume}")

    def stop(self) -> None:
        """End the workers, whatever they do. One that hangs is killed after a second: torch would
        send it SIGTERM, which it ignores, and wait for ten."""
        if self.workers:
            killer = threading.Timer(1.0, self.kill)
            killer.start()
            self.iterator._shutdown_workers()
            killer.cancel()
            self.iterator._worker_result_queue._writer.close()  # ends a read of half a batch
        while self.reader.is_alive():
            with contextlib.suppress(queue.Empty):
                self.ready.get(timeout=0.01)
        atexit.unregister(self.kill)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()


def as_arrays(batch: Iterable) -> tuple:
    """Tensors as NumPy arrays, except for dtypes that NumPy lacks: they go through /dev/shm."""
    lacking = ("torch.bfloat16", "torch.float8")
    kept = [str(getattr(each, "dtype", "")).startswith(lacking) for each in batch]
    return tuple(x if keep else np.asarray(x) for x, keep in zip(batch, kept, strict=True))


def to_device(batch: Iterable, device: Any) -> tuple:
    """Arrays or tensors of the host as tensors on the device. To a GPU they go from pinned memory,
    while the host continues."""
    import torch

    from plumbing.machine import upload

    tensors = map(torch.as_tensor, batch)
    if device.type == "cuda":
        tensors = (tensor.pin_memory() for tensor in tensors)
    return tuple(upload(tensor, device) for tensor in tensors)


def start_workers(loader: Iterable) -> Iterator:
    """iter(loader). Its workers start with HANDLED blocked: a signal may come before they ignore it.
    torch's SIGCHLD handler is removed: if a worker dies, it raises an error wherever the training is,
    even in a save."""
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
    return batches


def ignore_signals(worker: int) -> None:
    """For DataLoader workers (worker_init_fn): a scheduler signals the whole process group, but the
    training process decides when its workers end."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)


# ---- text to ids and back ------------------------------------------------------------------------


def tokenizer_of(meta: dict) -> Any:
    """The tokenizer of a dataset: encode(text) -> int array, decode(ids) -> str, vocab_size."""
    kind = TOKENIZERS.get(meta["tokenizer"])
    if kind is None:
        known = ", ".join(TOKENIZERS)
        raise DataError(f"unknown tokenizer {meta['tokenizer']!r}; plumbing/data.py has {known}")
    return kind(meta)


class Char:
    """One id for each distinct character of the text, by code point."""

    def __init__(self, meta: dict):
        self.known = code_points(meta["chars"])
        self.vocab_size = len(self.known)
        if not self.vocab_size or (np.diff(self.known.astype(np.int64)) <= 0).any():
            raise ValueError("chars: expected distinct characters, sorted")

    @staticmethod
    def learn(text: str) -> dict:
        """What `meta` needs for this tokenizer, from all of a text."""
        return {"chars": np.unique(code_points(text)).tobytes().decode("utf-32-le")}

    def encode(self, text: str) -> np.ndarray:
        codes = code_points(text)
        ids = np.searchsorted(self.known, codes).clip(max=len(self.known) - 1)
        missing = np.unique(codes[self.known[ids] != codes])
        if len(missing):
            names = " ".join(repr(chr(code)) for code in missing[:20])
            more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
            raise DataError(f"the vocabulary lacks {names}{more}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.known[in_range(ids, self.vocab_size)].tobytes().decode("utf-32-le")


class Byte:
    """The bytes of the text in UTF-8. Bytes that are not UTF-8 become U+FFFD."""

    vocab_size = 256
    end_of_text = 0  # follows each document of a corpus

    def __init__(self, meta: dict):
        pass

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return in_range(ids, 256).astype(np.uint8).tobytes().decode(errors="replace")


class GPT2:
    """GPT-2's vocabulary, from tiktoken. Nothing is loaded before the first use."""

    vocab_size = 50257
    end_of_text = 50256

    def __init__(self, meta: dict):
        pass

    def encode(self, text: str) -> np.ndarray:
        # like encode_ordinary, but an array takes a tenth of the memory of a list
        return gpt2().encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        return gpt2().decode(in_range(ids, self.vocab_size).tolist())


# A tokenizer of your own is a class and a name here, which --tokenizer takes. It is built from `meta`;
# it needs encode, decode and vocab_size. If it learns its vocabulary, it also has learn(text), whose
# dict goes into `meta`; end_of_text is the id that follows each document of a corpus, if any.
TOKENIZERS = {"char": Char, "byte": Byte, "gpt2": GPT2}


def stream(ids: Iterable[int], tokenizer: Any) -> Iterator[str]:
    """Yields the text of `ids` as its characters are complete: a token may end within one."""
    waiting = []
    for i in ids:
        waiting.append(i)
        text = tokenizer.decode(waiting)
        if not text.endswith("\ufffd"):
            yield text
            waiting = []
    yield tokenizer.decode(waiting)


def in_range(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Token ids (list, array or CPU tensor) as int64 (n,). Raises DataError outside the vocabulary."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    if len(ids) and not (0 <= ids.min() and ids.max() < vocab_size):
        raise DataError(f"token ids {ids.min()}..{ids.max()} outside 0..{vocab_size - 1}")
    return ids


def code_points(text: str) -> np.ndarray:
    """The Unicode code points of `text`, uint32 (n,)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def gpt2() -> Any:
    """tiktoken's GPT-2 encoding. Raises DataError if tiktoken or its vocabulary is missing."""
    tiktoken = needed("tiktoken", "the gpt2 tokenizer")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever tiktoken's HTTP library raises
        why = f"is not cached and could not be fetched ({type(error).__name__})"
        hint = "TIKTOKEN_CACHE_DIR=FOLDER names a folder that holds it; --tokenizer=byte needs none"
        raise DataError(f"the gpt2 vocabulary {why}; {hint}") from error


def needed(package: str, what: str) -> Any:
    """Import an optional package, which `what` needs. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(f"{what} needs {package}; type: pip install {package}") from error


def read_file(path: str) -> bytes:
    """The bytes of a file. Raises DataError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; expected a file") from error


def decode_utf8(raw: bytes, path: str, begin: int = 0) -> str:
    """The text of `raw`, bytes of the file `path` from offset `begin` on. Raises DataError."""
    if not raw:
        raise DataError(f"{path} is empty; expected UTF-8 text")
    if (offset := raw.find(b"\0")) >= 0:
        found = f"{path} is binary, or UTF-16: NUL byte at offset {begin + offset}"
        raise DataError(f"{found}; expected UTF-8 text")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{raw[error.start]:02x} at offset {begin + error.start} ({error.reason})"
        hint = "convert it: iconv -f latin1 -t utf-8 FILE"
        raise DataError(f"{path} is not UTF-8: {byte}; {hint}") from error
