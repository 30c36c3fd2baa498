"""The layout: thirteen modules, how much there is to read, imports that point one way, short
functions."""

import ast
import json
from functools import cache

import pytest
from conftest import REPO
from helpers import python

# How much there is to read, in nodes of the syntax tree. The aims are 24,000 loaded by `import train`
# and 48,000 in all Python outside tests/. Until they are met, these limits only go down.
MOST_NODES_LOADED = 29_576
MOST_NODES = 65_390
MOST_NODES_OF_A_LINE = 8.5  # in a file of more than 60 lines of code
MOST_NODES_OF_A_LINE_OF_THE_MODEL = 9.4
MOST_FILES_LOADED = 22
# Of the tests (tests/*.py), and of README.md and docs/*.md. The aims are 14,000 and 19,000.
MOST_LINES_OF_TESTS = 14_000
MOST_WORDS = 18_300
MOST_LINES_OF_A_FUNCTION = 60  # in train.py and model.py
SCRIPTS = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("*.py"))
MODULES = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("plumbing/*.py"))
REPORTING = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("reporting/*.py"))
LOADED = """
import json, sys
import train
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print(json.dumps([sorted(files), sorted(sys.modules)]))
"""


@cache
def parsed(name):
    return ast.parse((REPO / name).read_text(encoding="utf-8"))


def nodes(name):
    return sum(not isinstance(node, ast.Load | ast.Store) for node in ast.walk(parsed(name)))


def lines_of_code(name):
    """Without blank lines, comments and docstrings."""
    documented = set()
    for node in ast.walk(parsed(name)):
        kinds = ast.Module | ast.FunctionDef | ast.ClassDef
        if isinstance(node, kinds) and ast.get_docstring(node):
            docstring = node.body[0]
            documented |= set(range(docstring.lineno, docstring.end_lineno + 1))
    lines = enumerate((REPO / name).read_text(encoding="utf-8").splitlines(), 1)
    code = [n for n, line in lines if line.strip() and not line.lstrip().startswith("#")]
    return len(set(code) - documented)


def functions(name):
    return [n for n in ast.walk(parsed(name)) if isinstance(n, ast.FunctionDef)]


def imports_of(name):
    """The files of this repository that the file `name` imports, anywhere in it."""
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    files = {f"{module.replace('.', '/')}.py" for module in found}
    return files & {*SCRIPTS, *MODULES, *REPORTING}


# ---- the budget ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded():
    """(the repository's files, all modules) of a fresh process after `import train`."""
    files, modules = json.loads(python(LOADED))
    installed = ("site-packages", "dist-packages")  # of a virtual environment in the repository
    files = [file for file in files if file.startswith(f"{REPO}/")]
    names = [file.removeprefix(f"{REPO}/") for file in files]
    return [name for name in names if not any(each in name for each in installed)], set(modules)


def test_what_training_loads_stays_within_its_budget(loaded):
    files, modules = loaded
    assert not modules & {"report", "matplotlib"} and "reporting" not in str(files)
    assert {"train.py", "model.py", "optim.py", "plumbing/ranks.py"} <= set(files)
    sizes = {file: nodes(file) for file in files}
    assert sum(sizes.values()) <= MOST_NODES_LOADED, sizes
    assert len(files) <= MOST_FILES_LOADED, files


def all_python():
    folders = {p.parent for p in REPO.glob("*/*.py") if p.parent.name not in NOT_COUNTED}
    found = [*REPO.glob("*.py"), *(p for folder in folders for p in folder.rglob("*.py"))]
    return sorted(path.relative_to(REPO).as_posix() for path in found)


def test_all_the_code_stays_within_its_budget():
    sizes = {name: nodes(name) for name in all_python()}
    assert {"train.py", "plumbing/cli.py", "config/shakespeare.py"} <= sizes.keys()
    assert sum(sizes.values()) <= MOST_NODES, sizes


def test_a_line_holds_one_idea():
    dense = {}
    for name in all_python():
        count = lines_of_code(name)
        most = MOST_NODES_OF_A_LINE_OF_THE_MODEL if name == "model.py" else MOST_NODES_OF_A_LINE
        if count > 60 and nodes(name) > (most + 0.05) * count:
            dense[name] = round(nodes(name) / count, 1)
    assert dense == {}


def test_tests_and_pages_stay_within_their_budget():
    tests = {path.name: path.read_text().count("\n") for path in REPO.glob("tests/*.py")}
    pages = [REPO / "README.md", *REPO.glob("docs/*.md")]
    words = {page.name: len(page.read_text().split()) for page in pages}
    assert tests["conftest.py"] and words["README.md"]
    assert sum(tests.values()) <= MOST_LINES_OF_TESTS, tests
    assert sum(words.values()) <= MOST_WORDS, words


NOT_COUNTED = ("tests", "out", "data", "wandb", ".venv", "venv")


# ---- imports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MODULES, *REPORTING])
def test_nothing_in_plumbing_or_reporting_imports_a_script(name):
    allowed = set(SCRIPTS) if name == "reporting/sanity.py" else set()  # a part of check.py
    assert imports_of(name) & set(SCRIPTS) <= allowed


def test_imports_have_no_circle():
    done = set()

    def visit(name, path):
        assert name not in path, f"a circle: {' -> '.join([*path, name])}"
        if name not in done:
            for imported in sorted(imports_of(name)):
                visit(imported, [*path, name])
            done.add(name)

    for name in [*SCRIPTS, *MODULES, *REPORTING]:
        visit(name, [])


# ---- functions and modules -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.py", "model.py"])
def test_a_function_fits_on_a_screen(name):
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(name)}
    assert len(long) > 10
    assert {f: n for f, n in long.items() if n > MOST_LINES_OF_A_FUNCTION} == {}


TRAINS_OWN = ("run", "saver")  # their types are train.py's, which plumbing does not import


def test_what_train_calls_has_type_hints():
    words = {n.id for n in ast.walk(parsed("train.py")) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(parsed("train.py")) if isinstance(n, ast.Attribute)}
    without, seen = [], set()
    for module in sorted(imports_of("train.py") & set(MODULES)):
        for function in [n for n in parsed(module).body if isinstance(n, ast.FunctionDef)]:
            given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            bare = [a.arg for a in given if not a.annotation and a.arg not in TRAINS_OWN]
            if function.name in words:
                seen.add(function.name)
                if bare or not function.returns:
                    without.append(f"{module}: {function.name}({', '.join(bare)})")
    assert {"total", "step_unless"} <= seen
    assert without == []
