"""The house: small modules of one idea, imports that point one way, functions that fit on a screen."""

import ast
from functools import cache

import pytest
from conftest import REPO

MOST_LINES = {"train.py": 700, "plumbing/corpus.py": 440}
MOST_LINES_OF_A_MODULE = 300  # of plumbing/, but for what stands above
MOST_LINES_TO_READ = 4_960
MOST_LINES_OF_A_FUNCTION = 60  # in train.py and model.py
SCRIPTS = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("*.py"))
MODULES = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("plumbing/*.py"))
REPORTING = sorted(p.relative_to(REPO).as_posix() for p in REPO.glob("reporting/*.py"))


@cache
def parsed(name):
    return ast.parse((REPO / name).read_text(encoding="utf-8"))


def lines(name):
    return len((REPO / name).read_text(encoding="utf-8").splitlines())


def functions(name):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in ast.walk(parsed(name)) if isinstance(node, kinds[:2])]


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


def test_the_files_are_found():
    assert {"train.py", "model.py", "bench.py"} <= set(SCRIPTS)
    assert {"plumbing/audit.py", "plumbing/files.py"} <= set(MODULES)
    assert {"model.py", "plumbing/ranks.py", "plumbing/audit.py"} <= imports_of("train.py")


@pytest.mark.parametrize("name", [*MODULES, *REPORTING])
def test_nothing_in_plumbing_imports_a_script(name):
    assert imports_of(name) & set(SCRIPTS) == set()


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


def test_a_circle_would_be_found(monkeypatch):
    """The control: two files that import each other, one of them within a function."""
    made_up = {
        "train.py": ast.parse("import model"),
        "model.py": ast.parse("def f():\n    from train import g"),
    }
    monkeypatch.setitem(globals(), "parsed", lambda name: made_up.get(name) or ast.Module([], []))
    with pytest.raises(AssertionError, match=r"a circle: \w+.py -> \w+.py -> "):
        test_imports_have_no_circle()


@pytest.mark.parametrize("name", ["train.py", "model.py"])
def test_a_function_fits_on_a_screen(name):
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(name)}
    assert len(long) > 10
    assert {f: n for f, n in long.items() if n > MOST_LINES_OF_A_FUNCTION} == {}


@pytest.mark.parametrize("name", ["train.py", *MODULES, *REPORTING])
def test_a_file_can_be_read_in_one_sitting(name):
    assert lines(name) <= MOST_LINES.get(name, MOST_LINES_OF_A_MODULE)


def test_what_one_may_have_to_read_has_its_limit():
    """To follow the loop, that is: bench.py is apart, and so is report.py with reporting/."""
    assert sum(map(lines, ["train.py", "model.py", *MODULES])) <= MOST_LINES_TO_READ


@pytest.mark.parametrize("name", [*MODULES, *REPORTING])
def test_a_module_says_in_its_first_line_what_it_is(name):
    assert ast.get_docstring(parsed(name))


def test_no_global_of_train_changes_once_training_has_begun():
    """Knobs are resolved before: by main, and by identity.resolve_auto_knobs, which it calls."""
    resolvers = {"main"}
    changing = {
        f.name for f in functions("train.py") if any(isinstance(n, ast.Global) for n in ast.walk(f))
    }
    assert changing <= resolvers
    writers = {f.name for f in functions("train.py") if writes_to_globals(f)}
    assert writers <= resolvers


def writes_to_globals(function):
    """Whether it assigns globals()[name], or calls globals().update(...)."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Call):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            written = [t.value for t in targets if isinstance(t, ast.Subscript)]
            written += [n.func.value for n in [node] if hasattr(getattr(n, "func", None), "value")]
            if any(ast.unparse(each) == "globals()" for each in written):
                return True
    return False


def test_main_resolves_every_knob_before_it_trains():
    (main,) = [f for f in functions("train.py") if f.name == "main"]
    calls = [(n.lineno, ast.unparse(n.func)) for n in ast.walk(main) if isinstance(n, ast.Call)]
    (begins,) = [line for line, name in calls if name == "run_to_the_end"]
    resolving = [line for line, name in calls if name.endswith("resolve_auto_knobs")]
    names = {name for n in ast.walk(main) if isinstance(n, ast.Global) for name in n.names}
    assigned = [
        n.lineno
        for n in ast.walk(main)
        if isinstance(n, ast.Name | ast.Tuple)
        and isinstance(n.ctx, ast.Store)
        and getattr(n, "id", None) in names
    ]
    assert resolving and assigned and max(resolving + assigned) < begins
