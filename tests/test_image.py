"""The image holds what a run needs, pinned, and a run inside it says what it was built from.

Building it takes an engine and minutes; what can be told without one is told here.
"""

import re

from conftest import REPO, copy_of_repository

from plumbing import files

DOCKERFILE = (REPO / "Dockerfile").read_text()
STEPS = re.findall(r"^([A-Z]+) ((?:.*\\\n)*.*)", DOCKERFILE, re.M)  # [(instruction, the rest)]


def test_the_base_is_an_argument_whose_default_is_pinned_by_digest():
    assert [name for name, _ in STEPS[:2]] == ["ARG", "FROM"]
    assert re.fullmatch(r"BASE_IMAGE=\S+:\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}", STEPS[0][1])
    assert STEPS[1][1] == "${BASE_IMAGE}"


def test_every_requirement_is_pinned_and_installed_before_the_code():
    for line in (REPO / "requirements.txt").read_text().splitlines():
        assert re.fullmatch(r"[\w-]+==\d[\w.]*", line), line
    steps = [" ".join(step) for step in STEPS]
    copy_pins, install, copy_code, commit = (
        next(number for number, step in enumerate(steps) if re.match(pattern, step))
        for pattern in (
            r"COPY requirements.txt",
            r"RUN case (?s:.*)-m pip install",
            r"COPY \. ",
            r"ARG GIT_COMMIT",
        )
    )
    assert copy_pins < install < copy_code < commit  # each changes more often than those before


def locked():
    """{package: (version, [its hashes])} of requirements.lock."""
    text = (REPO / "requirements.lock").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        name, version, *hashes = re.split(r"==| +--hash=", line)
        found[name] = version.strip(), hashes
    return found


def test_the_lock_has_every_requirement_at_its_version_and_hashes_for_all():
    lock = locked()
    for line in (REPO / "requirements.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        assert lock[name.lower()][0] == version
    for name, (version, hashes) in lock.items():
        assert re.fullmatch(r"[a-z0-9-]+", name) and re.fullmatch(r"\d[\w.]*", version)
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes)
    assert len(lock) > 50 and {"triton", "nvidia-cudnn-cu13", "pillow"} <= set(lock)


def test_run_json_names_the_commit_where_there_is_no_git(run_train, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    environment = {"GIT_COMMIT": commit, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    copy = copy_of_repository(tmp_path / "image")
    done = run_train("run", "--max_steps=3", env=environment, repo=copy)
    run = files.read_json(done.out_dir / "run.json")
    assert run["git"] == {"commit": commit, "dirty": None, "diff_sha256": None}
