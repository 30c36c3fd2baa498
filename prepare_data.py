"""Make the datasets that train.py reads, data/NAME/{train.bin,val.bin,meta.json}:

    python prepare_data.py shakespeare                       # TinyShakespeare, downloaded once
    python prepare_data.py pydoc                             # CPython's own manual: no network
    python prepare_data.py NAME --input=FILE                 # any UTF-8 text
    python prepare_data.py NAME --input=FILE --tokenizer=gpt2
    python prepare_data.py NAME --input=FOLDER               # a corpus of any size: gpt2 tokens
    python prepare_data.py NAME --input='web/*.jsonl.zst' --field=content
    python prepare_data.py openwebtext                       # or fineweb: downloads with `datasets`

train.bin and val.bin are flat token ids: the first 90% of the text's characters and the rest.
meta.json says how to read them and holds their SHA-256. It is written last, so a folder with a
meta.json is a complete dataset, which is never overwritten. Text is used as it is: line ends are
not translated. The environment variable SHAKESPEARE_URL gives another address for TinyShakespeare
(a mirror, or file://); its hash is checked all the same.

A corpus (a folder, a glob, a .jsonl, .gz or .zst, or a long text) is streamed, tokenized by several
processes, and written in shards; plumbing/corpus.py says how documents are cut and split. After a
kill, the same command resumes and writes the same bytes.
"""

import contextlib
import glob
import hashlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request

import numpy as np

from plumbing import dataset, tokenizers
from plumbing.cli import configured, fail, run_script
from plumbing.corpus import find_corpus, make_corpus
from plumbing.dataset import SPLITS, Offline
from plumbing.tokenizers import DataError

# What to make, and where
data_dir = "data"  # the dataset's folder is made in this one
input = ""  # a UTF-8 text file, .jsonl, folder or glob; "" = what NAME stands for
tokenizer = "auto"  # char (one id for each distinct character), byte, or gpt2 (needs tiktoken)
#  auto = char for one small text, gpt2 for a corpus

# Of a corpus
field = "text"  # the field of a .jsonl object that holds the text
val_fraction = 0.0005  # share of the documents held out for validation, (0, 1)
shard_tokens = 100_000_000  # tokens in a shard, [1, inf); 2 bytes each
num_proc = 0  # processes that tokenize, [0, inf); 0 = one for each core

# Bytes. A plain text file up to this size is read whole: with char, which needs the most memory,
# that took 0.90 GB. A longer one is streamed as a corpus, which stays below 1 GB as well.
WHOLE_TEXT = 32_000_000

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
TIMEOUT = 4  # seconds without an answer that count as no network


# ---- text to tokens ------------------------------------------------------------------------------


def prepare(name, data_dir, input="", tokenizer="auto", say=print, **of_corpus):
    """Make the dataset data_dir/name. Returns (its folder, its meta). If it exists, it is checked
    and left as it is.

    input: a text file or a corpus, or "" for what `name` stands for. of_corpus: values of the
    corpus knobs above. Raises DataError or Offline.
    """
    folder = dataset.dataset_folder(name, data_dir)
    if tokenizer not in ("auto", *tokenizers.TOKENIZERS):
        known = "|".join(tokenizers.TOKENIZERS)
        raise DataError(f"unknown tokenizer {tokenizer!r}; write --tokenizer={known}")
    old = dataset.read_meta(folder) if dataset.exists(folder) else None
    streamed = is_corpus(name, input)
    if tokenizer == "auto":
        usual = "gpt2" if streamed else "char"
        tokenizer = old["tokenizer"] if old else usual
    if old and (old["tokenizer"] != tokenizer or not input):
        return keep(folder, old, old["tokenizer"] == tokenizer, say)

    if streamed:
        if tokenizer == "char":
            raise DataError("char cannot stream a corpus; write --tokenizer=gpt2, or byte")
        options = {"tokenizer": tokenizer, "field": field, "val_fraction": val_fraction}
        options |= {"shard_tokens": shard_tokens} | of_corpus
        n_processes = options.pop("num_proc", num_proc) or os.cpu_count()
        source, documents = find_corpus(name, input, options)
        if old:
            return keep(folder, old, old["source"] == source, say)
        return make_corpus(folder, source, documents, options, n_processes, say)

    raw, source = read_source(name, folder, input, say)
    start = time.perf_counter()
    ids, meta = tokenize(tokenizers.decode_utf8(raw, input or name), tokenizer, source)
    if old:
        return keep(folder, old, dataset.fingerprint(old) == dataset.fingerprint(meta), say)
    files = {f"{split}.bin": ids[split].tobytes() for split in SPLITS}
    files["meta.json"] = json.dumps(meta, indent=1).encode() + b"\n"
    dataset.write_files(folder, files)
    say(dataset.summary(folder, meta, len(raw), len(raw) / (time.perf_counter() - start)))
    return folder, meta


def is_corpus(name, input):
    """Whether to stream the input: all but a plain text file of up to WHOLE_TEXT bytes."""
    if not input:
        return name in dataset.CORPORA
    if os.path.isfile(input):
        packed = input.endswith((".jsonl", ".gz", ".zst"))
        return packed or os.path.getsize(input) > WHOLE_TEXT
    return os.path.isdir(input) or glob.has_magic(input)


def tokenize(text, tokenizer, source):
    """({"train": ids, "val": ids}, meta) of a text: its first 90% of characters, and the rest."""
    meta = {"tokenizer": tokenizer, "source": source}
    if tokenizer == "char":
        meta["chars"] = np.unique(tokenizers.code_points(text)).tobytes().decode("utf-32-le")
        meta["vocab_size"] = len(meta["chars"])
    else:
        meta["vocab_size"] = tokenizers.VOCAB_SIZE[tokenizer]
    meta["dtype"] = "uint16" if meta["vocab_size"] <= 2**16 else "uint32"
    cut = int(0.9 * len(text))
    texts = {"train": text[:cut], "val": text[cut:]}
    ids = {split: tokenizers.encode(texts[split], meta) for split in SPLITS}
    for split in SPLITS:
        tokens = len(ids[split])
        meta[f"{split}_tokens"] = tokens
        if tokens < 2:
            found = f"the text is too short: {len(text)} characters give {split} {tokens} tokens"
            raise DataError(f"{found}; to train, val needs block_size + 1 and train 2 * block_size")
    meta["val_bytes"] = len(texts["val"].encode())
    meta["sha256"] = {f"{s}.bin": sha256(ids[s]) for s in SPLITS}
    return ids, meta


def keep(folder, old, same, say):
    """(folder, meta) of a dataset that exists, once verified. Raises DataError unless `same`."""
    what = f"{old['tokenizer']} tokens of {old['source']}"
    if not same:
        hint = "choose another NAME, or delete that folder if no run depends on it"
        raise DataError(f"{folder} holds another dataset: {what}; {hint}")
    dataset.verify(folder, old)
    say(f"{folder} is there already, {what}; nothing to do")
    return folder, old


def sha256(content):
    return hashlib.sha256(content).hexdigest()


# ---- the named texts, or a file ------------------------------------------------------------------


def read_source(name, folder, input, say):
    """(bytes, description) of the text."""
    if input:
        raw = tokenizers.read_file(input)
        source = os.path.basename(input)
        is_shakespeare = sha256(raw) == SHAKESPEARE_SHA256
        if name == "pydoc" or (name == "shakespeare" and not is_shakespeare):
            raise DataError(f"{input} is not the text that {name} stands for; choose another NAME")
    elif name == "shakespeare":
        raw = read_shakespeare(os.path.join(folder, "input.txt"), say)
        source = "TinyShakespeare"
    elif name == "pydoc":
        from pydoc_data.topics import topics

        raw = "".join(topics[topic] for topic in sorted(topics)).encode()
        source = f"pydoc_data.topics of CPython {sys.version.split()[0]}"
    else:
        known = " and ".join(dataset.TEXTS)
        how = f"make it from a text file: {dataset.command(folder)} ({known} need none)"
        raise DataError(f"no dataset {name!r} in {os.path.dirname(folder)}; {how}")
    return raw, f"{source} (SHA-256 {sha256(raw)[:16]}...)"


def read_shakespeare(path, say):
    """The bytes of TinyShakespeare, from `path` if they are there, else downloaded to it."""
    if os.path.exists(path):
        raw = tokenizers.read_file(path)
        if sha256(raw) == SHAKESPEARE_SHA256:
            return raw
        say(f"{path} is not TinyShakespeare (its SHA-256 differs); downloading it again")
    url = os.environ.get("SHAKESPEARE_URL") or SHAKESPEARE_URL
    say(f"downloading {url}")
    for attempt, pause in enumerate((0, 0.3, 1)):  # seconds
        time.sleep(pause)
        try:
            raw, problem = download(url)
        except Offline:
            if attempt:  # the second try: without a network, do not keep the user waiting
                raise
            continue
        if sha256(raw) == SHAKESPEARE_SHA256:
            dataset.write_files(os.path.dirname(path), {os.path.basename(path): raw})
            return raw
    expected = f"{SHAKESPEARE_BYTES:,} bytes with SHA-256 {SHAKESPEARE_SHA256}"
    hint = "try again later, or take a copy: python prepare_data.py shakespeare --input=FILE"
    raise DataError(f"{url}: {problem}; expected {expected}; {hint}")


def download(url):
    """(bytes, what is wrong with them if they are not the text). Offline: no server answers."""
    try:
        response = urllib.request.urlopen(url, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        return b"", f"the server answered {error.code} {error.reason}"
    except OSError as error:
        hint = "python prepare_data.py pydoc needs no network, and --input=FILE takes a copy"
        raise Offline(f"cannot reach {url}: {getattr(error, 'reason', error)}; {hint}") from error
    except (ValueError, http.client.HTTPException) as error:
        return b"", f"{type(error).__name__}: {error}"
    raw = b""
    with response, contextlib.suppress(OSError, http.client.HTTPException):  # cut off: raw is short
        while len(raw) <= SHAKESPEARE_BYTES and (chunk := response.read(1 << 16)):
            raw += chunk
    if response.headers.get_content_type() == "text/html" or raw[:1] == b"<":
        return raw, f"a page of HTML came instead of the text, from {response.url}"
    if len(raw) < SHAKESPEARE_BYTES:
        return raw, f"truncated after {len(raw):,} bytes"
    return raw, f"the SHA-256 of what came is {sha256(raw)}"


# ---- what train.py asks for ----------------------------------------------------------------------


def open_dataset(name, data_dir, say=print):
    """(folder, meta) of the dataset data_dir/name, after verifying every byte. If it is missing and
    one of TEXTS, it is made first. Raises DataError or Offline."""
    folder = dataset.dataset_folder(name, data_dir)
    if not dataset.exists(folder):
        if name in dataset.CORPORA:
            how = dataset.command(folder)
            raise DataError(f"no dataset {name!r}; it takes hours, so make it first: {how}")
        return prepare(name, data_dir, say=say)
    meta = dataset.read_meta(folder)
    dataset.verify(folder, meta)
    return folder, meta


def dataset_of_run(name, offline_name, begun_with, data_dir, block_size, say=print):
    """(name, folder, meta) of the dataset that a run trains on. Exits with 2 if there is none.

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
        except DataError as error:
            fail(error)
        for split, least in (("train", 2 * block_size), ("val", block_size + 1)):
            if (tokens := meta[f"{split}_tokens"]) < least:
                found = f"--block_size={block_size}: {split}.bin has {tokens:,} tokens"
                fail(f"{found}; expected a smaller block_size, or a longer text")
        return candidate, folder, meta
    fail(why)


def main(argv=None):
    """Returns the exit code; bad input exits with 2."""
    names = []
    with configured(globals(), argv=argv, names=names):
        if len(names) != 1:
            fail(f"expected one NAME, found {len(names)}; type: python prepare_data.py shakespeare")
        try:
            prepare(names[0], data_dir, input, tokenizer)
        except KeyboardInterrupt:
            print("stopped; the same command resumes", file=sys.stderr)
            return 130
        except (DataError, Offline) as error:
            fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
