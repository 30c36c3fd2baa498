"""Text to token ids and back: by character (char), by byte, or in GPT-2's vocabulary (gpt2).

meta: the dict in a dataset's meta.json: `tokenizer`, `vocab_size`, `dtype`, and `chars` for char.
"""

import importlib

import numpy as np

TOKENIZERS = ("char", "byte", "gpt2")
VOCAB_SIZE = {"byte": 256, "gpt2": 50257}  # char has one id for each distinct character
END_OF_TEXT = {"byte": 0, "gpt2": 50256}  # follows each document of a corpus


class DataError(ValueError):
    """The data cannot be used. The message is one line: what was found, and what to type."""


def encode(text, meta):
    """The token ids of `text`, an array (n,). DataError names characters not in the vocabulary."""
    if meta["tokenizer"] == "char":
        codes = code_points(text)
        known = code_points(meta["chars"])  # sorted
        ids = np.searchsorted(known, codes).clip(max=len(known) - 1)
        missing = np.unique(codes[known[ids] != codes])
        if len(missing):
            names = " ".join(repr(chr(code)) for code in missing[:20])
            more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
            raise DataError(f"the vocabulary lacks {names}{more}")
    elif meta["tokenizer"] == "byte":
        ids = np.frombuffer(text.encode(), np.uint8)
    else:
        # like encode_ordinary, but an array takes a tenth of the memory of a list
        ids = gpt2().encode_to_numpy(text, disallowed_special=())
    return ids.astype(meta["dtype"])


def decode(ids, meta):
    """The text of token ids (list, array or CPU tensor). Bytes that are not UTF-8 become U+FFFD."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    if len(ids) and not (0 <= ids.min() and ids.max() < meta["vocab_size"]):
        raise DataError(f"token ids {ids.min()}..{ids.max()} outside 0..{meta['vocab_size'] - 1}")
    if meta["tokenizer"] == "char":
        return code_points(meta["chars"])[ids].tobytes().decode("utf-32-le")
    if meta["tokenizer"] == "byte":
        return ids.astype(np.uint8).tobytes().decode(errors="replace")
    return gpt2().decode(ids.tolist())


def code_points(text):
    """The Unicode code points of `text`, uint32 (n,)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def gpt2():
    """tiktoken's GPT-2 encoding. Raises DataError if tiktoken or its vocabulary is missing."""
    tiktoken = needed("tiktoken", "the gpt2 tokenizer")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever tiktoken's HTTP library raises
        found = (
            f"the gpt2 vocabulary is not cached and could not be fetched ({type(error).__name__})"
        )
        hint = "TIKTOKEN_CACHE_DIR=FOLDER names a folder that holds it; --tokenizer=byte needs none"
        raise DataError(f"{found}; {hint}") from error


def needed(package, what):
    """Import an optional package, which `what` needs. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(f"{what} needs {package}; type: pip install {package}") from error


def read_file(path):
    """The bytes of a file. Raises DataError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; expected a file") from error


def decode_utf8(raw, path, begin=0):
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
