"""A dataset, the folder DATA_DIR/NAME: meta.json, and the token ids of two splits, train and val.

A split is one file of flat ids (train.bin), or shards that are read as one (train_00000.bin, ...).
meta.json says how to read them and holds their SHA-256. It is written last, so a folder that has it
holds a complete dataset. Folder paths are str here.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from itertools import pairwise

import numpy as np

from plumbing.files import fsync, replacing
from plumbing.tokenizers import TOKENIZERS, DataError, read_file

SPLITS = ("train", "val")
# Names that need no --input: texts, and corpora on huggingface.co (their path and subset there).
TEXTS = ("shakespeare", "pydoc")
CORPORA = {
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
}
DEFAULT_DATA_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")


class Offline(OSError):
    """A download was needed and its server could not be reached."""


# ---- reading tokens ------------------------------------------------------------------------------


class Tokens:
    """The token ids of a split, read from its files as if they were one. len() counts the tokens.

    Every read opens the files again, so that nothing stays open and a pickle for a worker is small.
    """

    def __init__(self, paths, dtype):
        """paths: the files, in order. dtype: NumPy's name for the type of an id."""
        self.paths = [os.fspath(path) for path in paths]
        self.dtype = dtype
        sizes = [os.path.getsize(path) // np.dtype(dtype).itemsize for path in self.paths]
        self.ends = np.cumsum(sizes).tolist()  # of each file, in tokens from the start of the split

    def __len__(self):
        return self.ends[-1]

    def read(self, start, length):
        """The `length` tokens from each position in `start`, int64 (len(start), length). A row may
        span files. Raises IndexError if a row leaves the split."""
        start = np.asarray(start, np.int64)
        if len(start) and not (0 <= start.min() and start.max() + length <= len(self)):
            raise IndexError(f"{start.min()} to {start.max()} + {length} of {len(self)} tokens")
        tokens = np.empty((len(start), length), np.int64)
        for path, (begin, end) in zip(self.paths, pairwise([0, *self.ends]), strict=True):
            rows = np.flatnonzero((start < end) & (start + length > begin))
            if len(rows):
                if os.path.getsize(path) // np.dtype(self.dtype).itemsize != end - begin:
                    raise OSError(f"{path} has changed its size since the start")
                # a plain array: slicing a memmap costs more
                ids = np.memmap(path, self.dtype, mode="r").view(np.ndarray)
            for row in rows.tolist():
                offset = int(start[row]) - begin  # of the row in this file
                first = max(0, -offset)  # of the row's tokens that this file holds
                part = ids[offset + first : offset + length]
                tokens[row, first : first + len(part)] = part
        return tokens


def open_tokens(folder, meta, split):
    return Tokens([os.path.join(folder, name) for name in shards(meta, split)], meta["dtype"])


# ---- meta.json -----------------------------------------------------------------------------------


def dataset_folder(name, data_dir):
    """The folder of a dataset. Raises DataError if `name` is not a valid name."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise DataError(f"a NAME is made of letters, digits, '_', '-' and '.', not {name!r}")
    return os.path.join(data_dir, name)


def exists(folder):
    return os.path.exists(os.path.join(folder, "meta.json"))


def read_meta(folder):
    """The dict in meta.json. Raises DataError if it does not describe a dataset."""
    path = os.path.join(folder, "meta.json")
    content = read_file(path)
    try:
        meta = json.loads(content)
        counts = ("vocab_size", "train_tokens", "val_tokens", "val_bytes")
        chars = meta["chars"] if meta["tokenizer"] == "char" else ""
        names = [name for split in SPLITS for name in shards(meta, split)]
        valid = (
            meta["tokenizer"] in TOKENIZERS
            and meta["dtype"] in ("uint16", "uint32")
            and isinstance(meta["source"], str)
            and all(isinstance(meta["sha256"][name], str) for name in names)
            and all(type(meta[key]) is int and meta[key] > 0 for key in counts)
            and list(chars) == sorted(set(chars))
            and len(chars) == (meta["vocab_size"] if meta["tokenizer"] == "char" else 0)
        )
    except KeyError as error:
        raise DataError(f"{path} lacks {error}; {make_again(folder)}") from error
    except (ValueError, TypeError):
        valid = False
    if not valid:
        raise DataError(f"{path} does not describe a dataset; {make_again(folder)}")
    return meta


def shards(meta, split):
    """The names of a split's files, in order."""
    numbered = re.compile(split + r"_\d{5}\.bin")
    return sorted(filter(numbered.fullmatch, meta.get("sha256", ()))) or [f"{split}.bin"]


def fingerprint(meta):
    """16 hex digits that identify the tokens and their meaning, but not their source."""
    content = {key: value for key, value in meta.items() if key != "source"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def verify(folder, meta):
    """Raises DataError unless every file has the size, hash and range of ids that `meta` says."""
    again = make_again(folder, meta["tokenizer"])
    for split in SPLITS:
        paths = [os.path.join(folder, name) for name in shards(meta, split)]
        found = 0
        for path in paths:
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            digest = digest_of(path) if size else "missing"
            recorded = meta["sha256"][os.path.basename(path)]
            if digest != recorded:
                found = f"it has {size:,} bytes and its SHA-256 is {digest}"
                raise DataError(
                    f"{path} was changed or damaged: {found}, but meta.json says {recorded}; {again}"
                )
            found += size
        expected = meta[f"{split}_tokens"] * np.dtype(meta["dtype"]).itemsize
        if found != expected:
            raise DataError(
                f"{paths[0]} has {found:,} bytes, but meta.json says {expected:,}; {again}"
            )
        highest = max(np.memmap(path, meta["dtype"], mode="r").max() for path in paths)
        if highest >= meta["vocab_size"]:
            found = f"{paths[0]} holds token id {highest}"
            raise DataError(f"{found}, but vocab_size is {meta['vocab_size']}; {again}")


def digest_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- writing -------------------------------------------------------------------------------------


def write_files(folder, files):
    """Write {name: content}, the last one last. If writing fails, none is replaced (DataError).

    If two processes write the same file at once, it is complete, from one of them.
    """
    suffix = f".{secrets.token_hex(4)}.tmp"
    try:
        os.makedirs(folder, exist_ok=True)
        with contextlib.ExitStack() as stack:
            for name in reversed(files):  # the stack exits in reverse: the last name last
                path = os.path.join(folder, name)
                temporary = stack.enter_context(replacing(path, suffix))
                temporary.write_bytes(files[name])
                fsync(temporary)  # a full disk raises before any file is replaced
    except OSError as error:
        found = f"cannot write {folder}: {error.strerror}"
        raise DataError(f"{found}; write --data_dir=FOLDER") from error


def summary(folder, meta, size, rate):
    """A line about a dataset just made. size: bytes of its text. rate: bytes per second."""
    tokens = meta["train_tokens"] + meta["val_tokens"]
    return (
        f"made {folder} from {meta['source']}: {meta['train_tokens']:,} {meta['tokenizer']} tokens"
        f" to train on, {meta['val_tokens']:,} to validate, vocabulary {meta['vocab_size']:,}"
        f" ({meta['dtype']}), {size / tokens:.2f} bytes/token, {rate / 1e6:.1f} MB/s"
    )


def make_again(folder, tokenizer="char"):
    return f"delete {os.path.join(folder, 'meta.json')} and type: {command(folder, tokenizer)}"


def command(folder, tokenizer="char"):
    """What to type to make the dataset in `folder`."""
    data_dir, name = os.path.split(os.path.abspath(folder))
    return (
        f"python prepare_data.py {name}"
        + ("" if name in TEXTS or name in CORPORA else " --input=FILE")
        + ("" if tokenizer == "char" else f" --tokenizer={tokenizer}")
        + ("" if data_dir == DEFAULT_DATA_DIR else f" --data_dir={data_dir}")
    )
