"""The pages: every file, function and flag that they name is there, and their blocks run."""

import ast
import inspect
import json
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import run_page
import scaling
from conftest import HONEST_DATA, REPO, run_python

from plumbing.cli import read_knobs
from prepare_data import prepare

PAGES = ["docs/trouble.md", "docs/lessons.md", "docs/questions.md"]
WITH_README = [*PAGES, "docs/howto.md", "README.md"]
RUN = [*WITH_README, "docs/forks.md", "docs/errata.md", "docs/exercises.md"]
PICTURES = sorted(path.name for path in REPO.glob("docs/*.png"))
EXAMPLES = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("examples/*.py"))
# why a block is only shown
NEEDS = ("needs a network", "needs a GPU", "needs several nodes", "in a clone")
NEEDS += ("the script, saved as lora.py",)
SCRIPTS = [f"{name}.py" for name in "train bench check report replay sample prepare_data".split()]
# of other programs, as the pages use them
FOREIGN = set("standalone nproc_per_node signal shutdown max build gpus shm help index".split())
FOREIGN |= set("update compare nnodes nproc rdzv local weights".split())
# made by a run, or by a page itself
MADE = re.compile(
    r"(out|data)/|\S*(run\.json|bench\.json|check\.json|metrics\.jsonl|report\.(md|png)|replay_\d+\.(md|png)|\.pt)$"
)
MADE_BY_PAGES = set(
    "meta.json extras.py lesson.py loop.py given.py attention.py first_try.py lab.py lora.py bpe.py mailbox.py late.py bad.py penalty.py late.log openwebtext.jsonl compare.md compare.png trace.json steeper.py target.py widest.py config.json".split()
)
# of nanochat, as the README quotes them
MADE_BY_PAGES |= set("base_train.py checkpoint_manager.py common.py dataloader.py".split())


def text_of(page):
    return (REPO / page).read_text(encoding="utf-8")


def knobs_of(script):
    """The flags that a script takes: bench.py also takes train.py's, and check.py those of both."""
    others = {"bench.py": "train.py", "check.py": "bench.py"}
    if script in MADE_BY_PAGES:  # a fork of train.py
        script = "train.py"
    names = set(read_knobs(REPO / script))
    return names | knobs_of(others[script]) if script in others else names


def headings(page):
    """The anchors of a page: explicit ones, and those that GitHub makes of headings."""
    text = text_of(page)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="(\w+)">', text))


@pytest.mark.parametrize("page", WITH_README)
def test_every_flag_is_a_knob(page):
    added = set(re.findall(r'train\.knob\("(\w+)"', text_of(page)))  # by the page's own scripts
    every = added.union(*map(knobs_of, SCRIPTS))
    flags = set(re.findall(r"--([a-z]\w*)", text_of(page)))
    assert len(flags) > 5
    assert flags - every - FOREIGN == set()
    for script, rest in re.findall(r"^python (\w+\.py)(.*)$", text_of(page), re.MULTILINE):
        given = set(re.findall(r"--(\w+)=", rest.split("#")[0].split(";")[0].split("&")[0]))
        assert given - knobs_of(script) - added == set(), f"{page}: {script}{rest}"


@pytest.mark.parametrize("page", PAGES)
def test_every_function_is_there(page):
    modules = {path.stem for path in REPO.glob("*.py")} | {"plumbing"}
    names = re.findall(r"`((?:\w+\.)+\w+)(?:\([^`]*\))?`", text_of(page))
    names = [n for n in names if n.split(".")[0] in modules and not n.endswith((".py", ".md"))]
    for name in names:
        pkgutil.resolve_name(name)
    assert len(names) >= {"docs/questions.md": 20, "docs/trouble.md": 1}.get(page, 0)


def test_every_concern_has_its_line_in_the_code_and_a_test():
    text = text_of("docs/questions.md").partition("## Fifteen concerns")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| `(\S+)`: `(.+)` \| `(tests/\w+\.py)::(\w+)` \|$", text, re.M)
    assert len(rows) == len(text[text.index("|---") :].splitlines()) - 1 == 15
    for _, function, line, file, test in rows:
        assert line in inspect.getsource(pkgutil.resolve_name(function)), function
        tree = ast.parse(text_of(file))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
    assert len({test for *_, test in rows}) == 15


@pytest.mark.parametrize("page", RUN)
def test_every_file_and_link_is_there(page):
    text = text_of(page)
    links = re.findall(r"\]\(([^)\s]+)\)", run_page.FENCE.sub("", text))
    for link in (link for link in links if not link.startswith("https://")):
        path, _, anchor = link.partition("#")
        target = Path(page).parent.joinpath(path).as_posix() if path else page
        assert (REPO / target).is_file(), f"{page}: {link}"
        assert not anchor or anchor in headings(target), f"{page}: {link}"
    words = re.findall(r"[\w./*-]+\.(?:py|sh|md|png|json|jsonl|txt|log|pt)\b", text)
    files = {word for word in words if not MADE.match(word)} - MADE_BY_PAGES
    missing = {f for f in files if not [*REPO.glob(f), *REPO.glob(f"docs/{f}")]}
    assert len(files) >= 2 and missing == set()


def neither_run_nor_explained(page):
    """[(line, language)] of the blocks of commands that run_page.py passes over without a
    reason."""
    found = []
    printed = {line for line, _ in run_page.outputs(page).values()}
    for _, line, language, needs, code in run_page.blocks(page):
        runs = language in ("bash", "python") and not needs
        shown = language == "sh" and needs in NEEDS
        other = language in ("", "py") and not re.search(
            r"^(\$ |python |bash )", code, re.MULTILINE
        )
        if not (runs or shown or other or line in printed):
            found.append((line, language))
    return found


@pytest.mark.parametrize("page", [*RUN, *EXAMPLES])
def test_every_block_runs_or_says_what_it_needs(page):
    assert neither_run_nor_explained(REPO / page) == []
    found = run_page.blocks(REPO / page)
    languages = [language for _, _, language, _, _ in found]
    assert set(languages) & {*run_page.RUNS, "sh"}
    assert languages.count("sh") <= 3, "there are to be few"
    for _, _, language, _, code in found:
        assert code.strip()
        if language == "python":
            ast.parse(code)
        if language in ("bash", "sh"):
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)


def test_every_try_of_a_lesson_has_its_answer_folded_below_it():
    lessons = re.split(r"(?m)^## \d+\. ", run_page.FENCE.sub("", text_of("docs/lessons.md")))[1:]
    for lesson in lessons:
        assert re.search(r"\*\*Try.*\n\n<details><summary>Answer</summary>\n\n\S", lesson), lesson


def test_the_readme_and_help_lead_to_the_pages():
    docstring = ast.get_docstring(ast.parse(text_of("train.py")))  # which --help prints
    for page in REPO.glob("docs/*.md"):
        assert f"](docs/{page.name})" in text_of("README.md")
    for page in PAGES:
        assert page in docstring


# ---- the blocks are run --------------------------------------------------------------------------


@pytest.fixture
def page_data(monkeypatch, tmp_path):
    text = HONEST_DATA / "tinyshakespeare/input.txt"
    if text.exists():  # elsewhere the page downloads it
        prepare("shakespeare", tmp_path, input=str(text))
        monkeypatch.setenv("PAGE_DATA", str(tmp_path))
    monkeypatch.chdir(REPO)


def sections_of(page):
    """Those that run alone; of other pages all at once."""
    if page != "docs/lessons.md":
        return [()]
    return [(int(number),) for number in re.findall(r"(?m)^## (\d+)", text_of(page))]


@pytest.mark.slow  # an hour, on one core
@pytest.mark.parametrize(
    ("page", "sections"), [(page, each) for page in [*RUN, *EXAMPLES] for each in sections_of(page)]
)
def test_the_page_runs_and_prints_the_lines_that_it_shows(page, sections, page_data):
    code, printed = run_page.run(page, sections)
    assert code == 0
    if page.endswith(".md") and run_page.OFFLINE_TEXT not in printed:
        _, gone = run_page.updated(page, printed)
        assert gone == []


def test_the_table_of_many_gpus_is_what_its_script_prints():
    assert "\n".join(scaling.rows()) in text_of("docs/scaling.md")


ANSWER = """
import torch, train

def clip(weights, limit):
    return torch.nn.utils.clip_grad_norm_(weights, limit)

def accumulate(model, inputs, targets, size):
    for x, y in zip(inputs.split(size), targets.split(size)):
        ((model(x) - y).square().sum() / len(inputs)).backward()

def lr_at(step, *knobs):  # those that the test sets
    return train.lr_at(step)

def save(path, model, optimizer, step):
    torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), step], path)

def load(path, model, optimizer):
    weights, moments, random_state, step = torch.load(path)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    torch.set_rng_state(random_state)
    return step
"""


def test_the_test_of_the_exercise_accepts_right_answers(tmp_path):
    (given,) = re.findall(r"(?s)cat > given.py <<'END'\n(.*?)\nEND\n", text_of("docs/exercises.md"))
    (tmp_path / "given.py").write_text(given)
    (tmp_path / "answer.py").write_text(ANSWER)
    done = run_python("given.py", "answer", cwd=tmp_path, PYTHONPATH=str(REPO))
    assert [line[0] for line in done.stdout.splitlines()] == ["✓"] * 4


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_says_by_which_command_it_was_drawn(name):
    image = pytest.importorskip("PIL.Image")
    with image.open(REPO / "docs" / name) as picture:
        drawn_by = r"python (report|tests/headline|tests/run_page|examples/beside_nanogpt)\.py"
        assert re.search(drawn_by, picture.text["Command"])


# ---- records -------------------------------------------------------------------------------------

SPREAD = re.compile(r"\d\.\d{3} ± \d\.\d{3}")
ROW = re.compile(r"^\| (\w\S*) \| (.+?) \| ([0-9a-f]{7}|new) \|", re.MULTILINE)
# {record: (commit at which it was measured, commit whose version it is)}
TABLE = {name: commits for name, *commits in ROW.findall(text_of("records/README.md"))}
FOLDERS = [name for name in TABLE if not name.endswith(".csv")]


def git(*words):
    done = subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def facts_in(name):
    """What the .json files of a record hold, as dicts."""
    return [json.loads(path.read_text()) for path in (REPO / "records" / name).glob("*.json")]


def rows_in(name):
    """{(loss with its spread, seconds)} of a record."""
    found = []
    for facts in facts_in(name):
        if "seeds" in facts:
            mean, deviation = (facts["seeds"]["runs"][key] for key in ("mean", "deviation"))
            found.append((mean["loss"], deviation["loss"], mean["seconds"]))
        rows = facts.get("from_nanogpt", facts).get("rows", {}).values()
        found += [(row["loss"], row["deviation"] or 0.0, row["process"]) for row in rows]
    return {(f"{loss:.3f} ± {spread:.3f}", f"{seconds:.1f}") for loss, spread, seconds in found}


def test_every_record_is_in_the_table():
    names = {path.name for path in (REPO / "records").iterdir()}
    assert names - {"README.md", "portable", "portable_formula"} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_record_is_as_it_was_measured(name):
    """It equals the version that the table names; a list of trials begins with it."""
    measured, version = TABLE[name]
    if version == "new":  # that of the commit which added the row
        row = f"-S| {name} | {measured} | new |"
        added = git("log", "--format=%h", row, "--", "records/README.md")
        version = added.split()[-1] if added else "not yet a commit"
    if git("cat-file", "-e", f"{version}^{{commit}}") is None:
        pytest.skip(f"no history here: {version}")
    if name.endswith(".csv"):
        assert text_of(f"records/{name}").startswith(git("show", f"{version}:records/{name}"))
    else:
        assert git("diff", version, "--", f"records/{name}") == ""


@pytest.mark.parametrize("name", FOLDERS)
def test_the_files_that_a_record_names_are_in_its_commit(name):
    for facts in facts_in(name):
        commit = facts["git"]["commit"]
        assert commit.startswith(TABLE[name][0])
        if git("cat-file", "-e", commit) is None:
            pytest.skip(f"no history here: {commit}")
        rows = facts.get("from_nanogpt", facts).get("commands", {}).values()
        for words in [facts["command"], *map(str.split, rows)]:
            files = [word for word in words if re.fullmatch(r"[^-].*\.py", word)]
            assert files
            for file in files if not re.match(r"\$?nanogpt", words[0], re.I) else []:
                file = Path(file).name if file.startswith("/") else file
                assert git("cat-file", "-e", f"{commit}:{file}") is not None, file


@pytest.mark.parametrize("folder", [".", "docs", "config"])
def test_every_spread_is_that_of_a_record(folder):
    recorded = {loss for name in FOLDERS for loss, _ in rows_in(name)}
    texts = [path for path in (REPO / folder).glob("*") if path.suffix in (".md", ".py")]
    prose = [
        run_page.FENCE.sub("", path.read_text("utf-8")) for path in texts
    ]  # no lesson's output
    claimed = {each for text in prose for each in SPREAD.findall(text)}
    assert claimed and claimed - recorded == set()


def test_the_seconds_in_the_table_of_measurements_are_those_of_the_record():
    table = text_of("README.md").partition("## Measured\n\n")[2].split("\n\n")[0]
    claimed = set(re.findall(r"(\d+\.\d) s\b", table))
    assert len(claimed) >= 3 and claimed <= {seconds for _, seconds in rows_in("beside_nanogpt")}
