"""A file is replaced whole or not at all, and is on the disk before it has its name."""

import errno
import json
import math
import os

import pytest
import torch

from plumbing.files import read_json, replacing, write_json


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    (tmp_path / "file.tmp").write_text("half")  # by a process that was killed
    with replacing(path) as temporary:
        assert temporary.read_bytes() == b""
        temporary.write_text("old")
        assert names(tmp_path) == ["file.tmp"]
    with pytest.raises(KeyboardInterrupt), replacing(path, ".1.tmp") as temporary:
        temporary.write_text("new")
        assert names(tmp_path) == ["file", "file.1.tmp"]
        raise KeyboardInterrupt
    assert names(tmp_path) == ["file"] and path.read_text() == "old"

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"new": 1})
    assert names(tmp_path) == ["file"] and path.read_text() == "old"


def test_the_content_is_fsynced_before_the_name_changes_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    inodes = {tmp_path.stat().st_ino: "fsync folder"}
    real_fsync = os.fsync
    real_replace = os.replace

    def fsync(descriptor):
        calls.append(inodes.get(os.fstat(descriptor).st_ino, "fsync file"))
        real_fsync(descriptor)

    def replace(*paths):
        calls.append("replace")
        real_replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_json(tmp_path / "file", {})
    assert calls == ["fsync file", "replace", "fsync folder"]


def test_json_has_null_for_what_is_not_finite_and_repr_for_what_it_does_not_know(tmp_path):
    value = {"a": [math.nan, 1.5, (math.inf,)], "b": {"c": -math.inf}, "t": torch.ones(2)}
    write_json(tmp_path / "file", value | {"ß": "🐴"})

    def refuse(constant):
        raise ValueError(constant)

    found = json.loads((tmp_path / "file").read_text(), parse_constant=refuse)
    expected = {"a": [None, 1.5, [None]], "b": {"c": None}, "t": "tensor([1., 1.])", "ß": "🐴"}
    assert found == expected
    assert read_json(tmp_path / "file") == found
