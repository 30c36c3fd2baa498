"""The pages: every file, function and flag that they name is there, and their blocks run."""

import ast
import inspect
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import run_page
from conftest import HONEST_DATA, REPO, run_python

from plumbing.cli import read_knobs
from prepare_data import prepare
from reporting.records import HEADER, record_rows

PAGES = ["docs/trouble.md", "docs/lessons.md", "docs/questions.md"]
WITH_README = [*PAGES, "README.md"]
RUN = [*WITH_README, "docs/forks.md", "docs/errata.md", "docs/exercises.md"]
PICTURES = sorted(path.name for path in REPO.glob("docs/*.png"))
EXAMPLES = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("examples/*.py"))
# why a block is only shown
NEEDS = ("needs a network", "needs a GPU", "needs several nodes", "in a clone")
NEEDS += ("the script, saved as lora.py",)
SCRIPTS = [f"{name}.py" for name in "train bench check report replay sample prepare_data".split()]
# of other programs, as the pages use them
FOREIGN = set("standalone nproc_per_node signal shutdown max build gpus shm help index".split())
FOREIGN |= {"update", "compare"}
# made by a run, or by a page itself
MADE = re.compile(
    r"(out|data)/|\S*(run\.json|bench\.json|check\.json|metrics\.jsonl|report\.(md|png)|replay_\d+\.(md|png)|\.pt)$"
)
MADE_BY_PAGES = set(
    "meta.json extras.py lesson.py loop.py given.py first_try.py lora.py mailbox.py late.py bad.py penalty.py late.log openwebtext.jsonl".split()
)
MADE_BY_PAGES |= set("compare.md compare.png trace.json".split())
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
    every = set().union(*map(knobs_of, SCRIPTS))
    flags = set(re.findall(r"--([a-z]\w*)", text_of(page)))
    assert len(flags) > 5
    assert flags - every - FOREIGN == set()
    for script, rest in re.findall(r"^python (\w+\.py)(.*)$", text_of(page), re.MULTILINE):
        given = set(re.findall(r"--(\w+)=", rest.split("#")[0].split(";")[0].split("&")[0]))
        assert given - knobs_of(script) == set(), f"{page}: {script}{rest}"


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
        other = not language and not re.search(r"^(\$ |python |bash )", code, re.MULTILINE)
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


def test_the_readme_and_help_lead_to_the_pages():
    docstring = ast.get_docstring(ast.parse(text_of("train.py")))  # which --help prints
    for page in PAGES:
        assert f"]({page})" in text_of("README.md")
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
        assert re.search(r"python (report|tests/headline)\.py", picture.text["Command"])


# ---- records -------------------------------------------------------------------------------------

FOLDERS = sorted(  # but for whole runs, which test_portable.py computes again
    path for path in (REPO / "records").glob("*/") if not (path / "metrics.jsonl").exists()
)
SPREAD = re.compile(r"\d\.\d{3} ± \d\.\d{3}")
README = (REPO / "README.md").read_text(encoding="utf-8")
ROWS = {folder.name: list(record_rows(folder)) for folder in FOLDERS}


@pytest.mark.parametrize("name", ROWS)
def test_a_record_says_what_was_measured_by_which_command_on_what(name):
    for row in ROWS[name]:
        what, loss, seconds, runs, command, machine, when = row
        assert SPREAD.fullmatch(loss) and float(seconds) > 0 and int(runs) >= 3, what
        assert command.startswith("`python ") and "torch 2." in machine
        assert re.fullmatch(r"\d{4}-\d\d-\d\d, [0-9a-f]{7}(, patched)?", when)
    assert ROWS[name]


@pytest.mark.parametrize("name", ROWS)
def test_the_command_of_a_record_is_one_of_today(name):
    for row in ROWS[name]:
        command, when = row[HEADER.index("command")].strip("`"), row[-1]
        script, *flags = command.split()[1:]
        if script.startswith("$NANOGPT"):
            continue
        files = [script, *(flag for flag in flags if not flag.startswith("--"))]
        assert [file for file in files if not (REPO / file).is_file()] == []
        names = {flag[2:].partition("=")[0] for flag in flags if flag.startswith("--")}
        if not when.endswith("patched"):  # by a patch of tests/hacks, which may add a flag
            assert names - knobs_of(script if script in SCRIPTS else "train.py") == set()


@pytest.mark.parametrize("folder", [".", "docs", "config"])
def test_every_spread_is_that_of_a_record(folder):
    recorded = {row[HEADER.index("loss")] for rows in ROWS.values() for row in rows}
    texts = [path for path in (REPO / folder).glob("*") if path.suffix in (".md", ".py")]
    prose = [
        run_page.FENCE.sub("", path.read_text("utf-8")) for path in texts
    ]  # no lesson's output
    claimed = {each for text in prose for each in SPREAD.findall(text)}
    assert claimed and claimed - recorded == set()


def test_the_seconds_in_the_table_of_measurements_are_those_of_the_record():
    seconds = {row[0]: row[2] for row in ROWS["from_nanogpt"]}
    table = README.partition("## Measured\n\n")[2].split("\n\n")[0]
    claimed = re.findall(r"(\d+\.\d) s\b", table)
    assert len(claimed) >= 3
    assert set(claimed) <= set(seconds.values())


def test_the_table_of_records_is_printed_by_a_command_that_writes_nothing():
    files = set(REPO.glob("records/*/*"))
    folders = sorted((REPO / "records").glob("*/"))  # two of them hold a whole run
    done = run_python("report.py", *folders)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + sum(map(len, ROWS.values()))
    assert re.split(r" *\| *", lines[0])[1:-1] == list(HEADER)
    assert done.returncode == 0 and done.stderr == "" and set(REPO.glob("records/*/*")) == files
