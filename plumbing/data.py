"""The data of a run: a dataset on disk, its windows, batches that are read ahead, its tokenizer.

A dataset is a folder, DATA_DIR/NAME, with train.bin and val.bin (flat token ids) and meta.json.
That is written last, so a folder that has it is complete. `meta` is the dict in it: vocab_size
(data of your own, train.open_dataset, needs no more), dtype (of the ids: uint16 or uint32),
train_tokens, val_tokens, sha256 ({file name: 64 hex digits}), and of a text: tokenizer (a key of
TOKENIZERS) and what that has learned, val_bytes (of the validation text in UTF-8), source (in
words) and start_id (the id after which a sample begins; computed where an older file lacks it)."""

import atexit
import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unicodedata import category, normalize

import numpy as np

from plumbing.cli import BadInput, RunFailed, fail
from plumbing.console import REPO, print0
from plumbing.fields import expect
from plumbing.files import digest_of
from plumbing.signals import HANDLED

SPLITS = ("train", "val")
PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent dies
FORMS = ("NFC", "NFD", "NFKC", "NFKD")  # the normal forms of Unicode
UNSEEN = "Mn Mc Me Cf Zs Zl Zp"  # its categories of marks, formats and spaces
FALLBACK = {"shakespeare": "pydoc"}  # where the first cannot be downloaded: CPython's own manual
ROWS = (  # how other rows are read
    "a Dataset with dataset[i] becomes that as data.Shuffled(dataset, train.seed), for validation as "
    "data.InOrder(dataset, train.seed), from plumbing; row=FUNCTION makes (input, target) of what "
    "dataset[i] is, collate=FUNCTION makes a batch of such pairs"
)
INSTEAD = """\
{bar}
!! {why}
!! This run trains on {chosen!r} INSTEAD OF {name!r}:
!! its numbers say nothing about {name!r}.
!! With a network, --resume=restart starts over on it.
{bar}"""


class Offline(BadInput):
    """A download was needed, and no server gave it in time."""


def folder_of(name: str, data_dir: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name):
        fail(f"a NAME is made of letters, digits, '_', '-' and '.', not {name!r}")
    return os.path.join(data_dir, name)


def verified_meta(folder: str) -> dict:
    """The dict in meta.json. Raises BadInput unless the files have the SHA-256 that it says."""
    try:
        meta = json.loads(read_file(f"{folder}/meta.json"))
        for name, digest in meta["sha256"].items():
            if digest_of(f"{folder}/{name}") != digest:
                raise ValueError(f"{name} has another SHA-256")
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(
            f"a dataset is incomplete, changed or damaged ({type(error).__name__}: {error}); delete "
            f"{folder}/meta.json and type the command that made it: "
            f"python prepare_data.py {os.path.basename(folder)} ..."
        )
    if "tokenizer" in meta:
        meta.setdefault("start_id", find_start_id(folder, meta))
    return meta


def find_start_id(folder: str, meta: dict) -> int:
    """The id after which a sample begins: that of the end of a text, else that of a newline, else
    the first one. The training ids hold it."""
    tokens = np.memmap(f"{folder}/train.bin", meta["dtype"], "r")
    for i in end_and_newline(meta):
        if i in tokens[: 2**22]:  # what comes later is no usual start
            return i
    return int(tokens[0])


def end_and_newline(meta: dict) -> tuple[int, int]:
    """(the id of the end of a text, the id of a newline); -1: none."""
    kind = TOKENIZERS.get(meta["tokenizer"])
    newline = getattr(kind, "newline", meta.get("chars", "").find("\n"))
    return getattr(kind, "end_of_text", -1), newline


def start_and_end(meta: dict) -> tuple[int, int]:
    """(the id after which a sample begins, the id at which it ends; -1: none). In checkpoints of
    before 2026-11-27, no start is named: it is a newline, else 0."""
    end, newline = end_and_newline(meta)
    start = meta.get("start_id", max(0, newline))
    return start, end if start == end else -1


def fingerprint(meta: dict) -> str:
    """16 hex digits that identify the tokens and their meaning, but not their source."""
    content = {key: value for key, value in meta.items() if key not in ("source", "start_id")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def dataset_of_run(
    make: Callable, name: str, so_far: str | None, data_dir: str, block_size: int
) -> tuple[str, str, dict]:
    """(name, folder, meta) of the dataset that a run trains on. Raises BadInput or Offline.

    It is `name`, or, if that cannot be downloaded, its FALLBACK with a loud warning. make(name,
    data_dir) makes one that is missing. so_far: the dataset of the run until now, or None.
    block_size: tokens in a window; train needs twice as many tokens, val one more than a window."""
    try:
        if so_far and so_far == FALLBACK.get(name):
            raise Offline("This run started without a network.")
        folder = folder_of(name, data_dir)
        if os.path.exists(f"{folder}/meta.json"):
            meta = verified_meta(folder)
        elif not os.path.isabs(data_dir) and (REPO / "data" / name / "meta.json").exists():
            found = f"no dataset {name!r} in {os.path.abspath(data_dir)}; the repository's data/"
            fail(f"{found} has it: --data_dir={REPO / 'data'}")
        else:
            folder, meta = make(name, data_dir)
    except Offline as error:
        chosen = FALLBACK[name]
        print0(INSTEAD.format(bar="!" * 90, why=error, chosen=chosen, name=name))
        return dataset_of_run(make, chosen, None, data_dir, block_size)
    if meta["train_tokens"] < 2 * block_size or meta["val_tokens"] <= block_size:
        fail(
            f"--block_size={block_size}: {folder} has {meta['train_tokens']:,} tokens to train on, "
            f"{meta['val_tokens']:,} to validate; expected more, or a smaller block_size"
        )
    return name, folder, meta


def read_rows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """The `length` tokens from each of `starts` on, (len(starts), length): token ids as int64,
    other numbers in their own dtype."""
    rows = np.asarray(tokens)[starts[:, None] + np.arange(length)]
    return rows.astype(np.int64) if np.issubdtype(rows.dtype, np.integer) else rows


class OrderedWindows:
    """The first `n_targets` targets of `tokens` (0 = all), rounded up to whole windows, for
    validation. `windows[first, count]` is a batch: inputs and targets, each (count, block_size), as
    read_rows() reads them. If the last window overlaps the one before, its repeated targets do not
    count: they are -100, or NaN where targets are no token ids but floats."""

    def __init__(self, tokens: np.memmap, block_size: int, n_targets: int = 0):
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
        is_repeated = np.arange(self.block_size) < (first_new - starts)[:, None]
        targets[is_repeated] = -100 if np.issubdtype(targets.dtype, np.integer) else np.nan
        return rows[:, :-1].copy(), targets

    __getitem__.draws_nothing = True


class InOrder:
    """The rows of an ordinary Dataset of PyTorch, for validation: `dataset[i]` with an int is (input,
    target), each of them an array, a tensor or a number. `in_order[first, count]` is a batch.

    row(dataset[i]) makes that pair of anything else; collate([pair, ...]) makes a batch of rows that
    differ in shape. What is drawn in a row, such as an augmentation, follows from (seed, number of
    the row): it depends on no batch, worker or rank."""

    def __init__(self, dataset, seed, row=None, collate=None):
        require_rows(dataset)
        self.dataset = dataset
        self.seed = seed
        self.row = row
        self.collate = collate or stacked

    def __len__(self):
        return len(self.dataset)

    def index_of(self, number):
        return number

    def __getitem__(self, batch):
        first, count = batch
        pairs = []
        with seeded([self.seed, first]):
            for number in range(first, first + count):
                seed_cpu(seed_of(self.seed, number))
                row = self.dataset[self.index_of(number)]
                pairs.append(self.row(row) if self.row else row)
        return self.collate(pairs)

    __getitem__.draws_nothing = True  # the random state is as before


class Shuffled(InOrder):
    """The same rows as an endless sequence, for training: each epoch has each row once, in an order
    drawn from (seed, epoch). The number of a row is its place in the sequence, so an augmentation
    differs between epochs."""

    order = None, ()  # an epoch, the indices of its rows

    def index_of(self, number):
        epoch, place = divmod(number, len(self))
        if epoch != self.order[0]:
            # RandomState, not Generator: NumPy promises that its stream never changes
            self.order = epoch, np.random.RandomState([self.seed, epoch]).permutation(len(self))
        return int(self.order[1][place])


def stacked(pairs: list) -> list[np.ndarray]:
    """(inputs, targets) of pairs (input, target). Numbers in float64 become float32."""
    try:
        batch = [np.stack([np.asarray(x) for x in column]) for column in zip(*pairs, strict=True)]
    except (TypeError, ValueError) as error:
        raise RunFailed(f"rows cannot be stacked: {error}; {ROWS}") from error
    return [part.astype(np.float32) if part.dtype == float else part for part in batch]


def require_rows(dataset: Any) -> None:
    """Raises BadInput for what has no row, or is a mere stream of rows."""
    if not getattr(dataset, "__len__", int)():
        name = type(dataset).__name__
        fail(f"{name} is empty or has no length; expected len(dataset) rows, dataset[0] and so on")


class Reader:
    """dataset[first, count] as the loop reads it, as arrays. Raises RunFailed for what is no batch.

    Meanwhile random numbers are seeded from (seed, first): so a dataset may draw from them, and each
    batch still is a pure function of its place. Not where __getitem__ says that it draws_nothing:
    a third of a millisecond is much of a short step."""

    def __init__(self, dataset: Any, seed: int):
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, place: tuple[int, int]) -> list[np.ndarray]:
        first, count = place
        is_plain = hasattr(type(self.dataset).__getitem__, "draws_nothing")
        with nullcontext() if is_plain else seeded([self.seed, first]):
            batch = self.read(place)
        parts = batch if isinstance(batch, tuple | list) else [batch]
        arrays = [*map(np.asarray, parts)]
        kinds = [(*array.shape[:1], array.dtype.kind in "biuf") for array in arrays]
        source = f"{type(self.dataset).__name__}[{first}, {count}]"
        expected = f"(inputs, targets), arrays or tensors of {count} rows each; {ROWS}"
        expect(kinds == 2 * [(count, True)], source, batch, expected)
        return arrays

    def read(self, place):
        try:
            return self.dataset[place]
        except Exception as error:
            with suppress(Exception):
                self.dataset[0]
                return error  # a Dataset of rows: what is expected says how it is used
            raise


@contextmanager
def seeded(seeds: list[int]) -> Iterator[None]:
    """A context in which random numbers of Python, NumPy and torch on the CPU follow from `seeds`."""
    import torch  # here, so that prepare_data.py, which needs none, starts at once

    from plumbing.snapshot import rng_state, set_rng_state

    cpu = torch.device("cpu")
    before = rng_state(cpu)
    seed_cpu(int(np.random.SeedSequence(seeds).generate_state(1)[0]))
    try:
        yield
    finally:
        set_rng_state(before, cpu)


def seed_cpu(seed: int) -> None:
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def seed_of(seed: int, number: int) -> int:
    """32 bits that follow from both: the seed of what is drawn for a row, by its number."""
    return zlib.crc32(f"{seed} {number}".encode())


def batches(
    dataset: Any,
    places: Iterable,
    device: Any,
    num_workers: int = 0,
    prefetch_factor: int = 2,
) -> Iterator[tuple]:
    """Yields (inputs, targets, milliseconds waited), on the device: dataset[place] for each of
    `places`, which `num_workers` processes read ahead; 0 = this one reads. If one of them dies,
    torch raises RuntimeError: at once by a signal, or within five seconds, as the standard library
    may swallow that error. With a timeout of ours, torch would not look every five seconds."""
    import torch

    atexit.register(kill_workers)
    loader = torch.utils.data.DataLoader(
        dataset,
        sampler=places,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        collate_fn=list,  # arrays go through a pipe; tensors would hang on a full /dev/shm
        worker_init_fn=live_as_long_as_the_run,
        generator=torch.Generator(),  # or it would draw a seed from the global generator
    )
    began = time.perf_counter()
    try:
        for batch in loader:
            yield *to_device(batch, device), 1000 * (time.perf_counter() - began)
            began = time.perf_counter()
    except (ConnectionError, EOFError) as error:
        if not num_workers or "Caught" in str(error):  # the dataset's own, perhaps in a worker
            raise
        raise RuntimeError("DataLoader worker was killed while it sent a batch") from error


def live_as_long_as_the_run(worker: int) -> None:
    """In a worker: ignore what a scheduler sends to all processes, since the run decides when its
    workers end; but end with the run."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """From here on this process is killed when its parent ends, however that ends (on Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_workers() -> None:
    """At the exit: Python would end workers by SIGTERM, which they ignore, and wait for them."""
    with suppress(RuntimeError):  # torch's handler raises it for a worker that ends meanwhile
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def to_device(batch: Iterable, device: Any) -> tuple:
    """Arrays or tensors of the host as tensors on the device, to a GPU while the host continues. On
    MPS, a copy in the background would not keep its memory (pytorch#189690)."""
    import torch

    tensors = map(torch.as_tensor, batch)
    if device.type == "cuda":
        return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
    return tuple(tensor.to(device) for tensor in tensors)


def tokenizer_of(meta: dict) -> Any:
    """The tokenizer of a dataset: encode(text) -> int array, decode(ids) -> str, vocab_size."""
    name = meta["tokenizer"]
    if name not in TOKENIZERS:
        fail(f"no tokenizer {name!r} in TOKENIZERS of plumbing/data.py; add its class there")
    return TOKENIZERS[name](meta)


class Char:
    """One id for each distinct character of the text, by code point."""

    def __init__(self, meta: dict):
        self.chars = meta["chars"]
        self.vocab_size = len(self.chars)
        self.ids = {char: i for i, char in enumerate(self.chars)}

    @staticmethod
    def learn(texts: Iterable[str]) -> dict:
        """What `meta` needs for this tokenizer, from all texts."""
        return {"chars": "".join(sorted(set().union(*texts)))}

    def encode(self, text: str) -> np.ndarray:
        if missing := set(text) - self.ids.keys():
            forms = [form for form in FORMS if self.ids.keys() >= {*normalize(form, text)}]
            hint = ""
            if forms:
                hint = (
                    f"; in the normal form {forms[0]} it has all: unicodedata.normalize in Python"
                )
            fail(f"the vocabulary lacks {' '.join(map(name_of, sorted(missing)))}{hint}")
        return np.fromiter(map(self.ids.get, text), np.uint32, len(text))

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)


def name_of(char: str) -> str:
    """A character in an error: in quotes, or as U+0301 where it could not be seen."""
    return f"U+{ord(char):04X}" if category(char) in UNSEEN else repr(char)


class Byte:
    """The bytes of the text in UTF-8. Bytes that are not UTF-8 become U+FFFD."""

    vocab_size = 256
    end_of_text = 0  # follows each document of a corpus
    newline = ord("\n")

    def __init__(self, meta: dict):
        pass

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(map(int, ids)).decode(errors="replace")


class GPT2:
    """GPT-2's vocabulary, from tiktoken."""

    vocab_size = 50257
    end_of_text = 50256
    newline = 198

    def __init__(self, meta: dict):
        try:
            import tiktoken

            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # it is not installed; whatever its HTTP library raises
            fail(
                f"no gpt2 vocabulary: {str(error)[:200]}; TIKTOKEN_CACHE_DIR=FOLDER names a folder "
                "with it; --tokenizer=byte needs none"
            )

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode(list(map(int, ids)))


# A tokenizer of your own is a class and a name here and beside prepare_data.py's --tokenizer
# (docs/forks.md has one). It is built from `meta`; it needs encode, decode and vocab_size. If it
# learns its vocabulary, it also has learn(texts), whose dict goes into `meta`; end_of_text is the id
# that follows each document of a corpus, and newline that of a newline, if any. Several threads call
# encode.
TOKENIZERS = {"char": Char, "byte": Byte, "gpt2": GPT2}


def read_file(path: str) -> bytes:
    """The bytes of a file. Raises BadInput if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; expected a file")
