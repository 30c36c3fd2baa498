"""
Makes the datasets that train.py reads, data/NAME/{train.bin,val.bin,meta.json}:

    python prepare_data.py shakespeare                       # TinyShakespeare, downloaded once
    python prepare_data.py pydoc                             # CPython's own manual: no network
    python prepare_data.py NAME --input=FILE                 # any UTF-8 text
    python prepare_data.py NAME --input=FILE --tokenizer=gpt2

train.bin and val.bin are flat token ids: the first 90% of the text's characters and the rest.
meta.json says how to read them and holds their SHA-256. It is written last, so a folder with a
meta.json is a whole dataset; one that exists is never overwritten. Text is taken as it is: line
ends are not translated. The environment variable SHAKESPEARE_URL names another place for
TinyShakespeare (a mirror, a file:// address); its hash is checked all the same.
"""

import hashlib
import http.client
import json
import os
import re
import secrets
import sys
import time
import urllib.error
import urllib.request

import numpy as np

from configurator import configure, fail

# What to make, and where
data_dir = "data"  # the dataset's folder is made in here
input = ""  # a UTF-8 text file; "": the named text (shakespeare, pydoc)
tokenizer = "char"  # char (one id for each distinct character), byte, or gpt2 (needs tiktoken)

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
NAMED = ("shakespeare", "pydoc")  # the datasets that need no --input
TOKENIZERS = ("char", "byte", "gpt2")
SPLITS = ("train", "val")
TIMEOUT = 4  # seconds without an answer before there counts as being no network


class DataError(ValueError):
    """The data cannot be used. The message is one line: what was found, and what to type."""


class Offline(OSError):
    """A download was needed and its server could not be reached."""


def prepare(name, data_dir, input="", tokenizer="char", say=print):
    """
    Makes the dataset data_dir/name and returns (its folder, its meta). One that is there already
    is checked, and left as it is.

    input: a text file, or "" for the text that `name` stands for. Raises DataError, Offline.
    """
    folder = dataset_folder(name, data_dir)
    if tokenizer not in TOKENIZERS:
        raise DataError(
            f"unknown tokenizer {tokenizer!r}; write --tokenizer={'|'.join(TOKENIZERS)}"
        )
    old = read_meta(folder) if exists(folder) else None
    if old and (old["tokenizer"] != tokenizer or not input):
        meta = old | {"tokenizer": tokenizer}  # enough to tell whether that is what is asked for
    else:
        raw, source = read_source(name, folder, input, say)
        start = time.perf_counter()
        arrays, meta = tokenize(decode_utf8(raw, input or name), tokenizer, source)
    if old:
        if fingerprint(old) != fingerprint(meta):
            raise DataError(
                f"{folder} holds another dataset: {old['tokenizer']} tokens of {old['source']};"
                " choose another NAME, or delete that folder if no run depends on it"
            )
        verify(folder, old)
        say(f"{folder} is there already, {tokenizer} tokens of {old['source']}; nothing to do")
        return folder, old

    files = {f"{split}.bin": arrays[split].tobytes() for split in SPLITS}
    write(folder, files | {"meta.json": json.dumps(meta, indent=1).encode() + b"\n"})
    seconds = time.perf_counter() - start
    tokens = meta["train_tokens"] + meta["val_tokens"]
    say(
        f"made {folder} from {source}: {meta['train_tokens']:,} {tokenizer} tokens to train on,"
        f" {meta['val_tokens']:,} to validate, vocabulary {meta['vocab_size']:,} ({meta['dtype']}),"
        f" {len(raw) / tokens:.2f} bytes/token, {seconds:.2f} s,"
        f" {len(raw) / 1e6 / seconds:.1f} MB/s"
    )
    return folder, meta


def open_dataset(name, data_dir, say=print):
    """
    (folder, meta) of the dataset data_dir/name, every byte of it checked. Where it is missing and
    `name` is one of NAMED, it is made first. Raises DataError, Offline.
    """
    folder = dataset_folder(name, data_dir)
    if not exists(folder):
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
        ids = np.array(gpt2().encode_ordinary(text))
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


def decode_utf8(raw, path):
    if not raw:
        raise DataError(f"{path} is empty; expected UTF-8 text")
    if (offset := raw.find(b"\0")) >= 0:
        raise DataError(
            f"{path} is binary, or UTF-16: NUL byte at offset {offset}; expected UTF-8 text"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}"
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
        raise DataError(
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
            and all(isinstance(meta["sha256"][f"{split}.bin"], str) for split in SPLITS)
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
    """Raises DataError unless both files are what `meta` says, to the byte."""
    for split in SPLITS:
        path, tokens = os.path.join(folder, f"{split}.bin"), meta[f"{split}_tokens"]
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        expected = tokens * np.dtype(meta["dtype"]).itemsize
        if size != expected:
            raise DataError(
                f"{path} has {size:,} bytes, but meta.json says {expected:,} ({tokens:,} tokens of"
                f" {meta['dtype']}); {make_again(folder, meta['tokenizer'])}"
            )
        digest, highest = hashlib.sha256(), 0
        ids = np.memmap(path, meta["dtype"], mode="r")
        for i in range(0, tokens, 1 << 22):
            chunk = ids[i : i + (1 << 22)]
            digest.update(chunk)
            highest = max(highest, int(chunk.max()))
        if digest.hexdigest() != meta["sha256"][f"{split}.bin"]:
            raise DataError(
                f"{path} was changed or damaged: its SHA-256 is {digest.hexdigest()}, meta.json"
                f" says {meta['sha256'][f'{split}.bin']}; {make_again(folder, meta['tokenizer'])}"
            )
        if highest >= meta["vocab_size"]:
            raise DataError(
                f"{path} holds token id {highest}, but vocab_size is {meta['vocab_size']}"
                f" (ids are 0 to {meta['vocab_size'] - 1}); {make_again(folder, meta['tokenizer'])}"
            )


def make_again(folder, tokenizer="char"):
    return f"delete {os.path.join(folder, 'meta.json')} and type: {command(folder, tokenizer)}"


def command(folder, tokenizer="char"):
    """What to type to make the dataset in `folder`."""
    where, name = os.path.split(os.path.abspath(folder))
    is_default = where == os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
    return (
        f"python prepare_data.py {name}"
        + ("" if name in NAMED else " --input=FILE")
        + ("" if tokenizer == "char" else f" --tokenizer={tokenizer}")
        + ("" if is_default else f" --data_dir={where}")
    )


def main():
    names = []
    configure(globals(), names=names)
    if len(names) != 1:
        fail(f"expected one NAME, found {len(names)}; type: python prepare_data.py shakespeare")
    try:
        prepare(names[0], data_dir, input, tokenizer)
    except DataError as error:
        fail(error)
    except Offline as error:
        fail(
            f"{error}; python prepare_data.py pydoc needs no network, and --input=FILE takes a copy"
        )


if __name__ == "__main__":
    main()
