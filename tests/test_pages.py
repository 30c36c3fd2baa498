"""The pages: links resolve, tests that they name exist, blocks run."""

import re
import subprocess

import pytest
import run_page
from conftest import REPO

PAGES = [REPO / "records/README.md", REPO / "tests/broken/answers.md"]
PAGES += [*REPO.glob("*.md"), *REPO.glob("docs/*.md")]
PAGE = """## One
```bash
echo "loss 2.5 of 3"; echo "loss 2.6 of 4"
```
```output
loss 2.0 of 4
...
loss gone
```
"""


def anchors(page):
    text = run_page.FENCE.sub("", page.read_text())
    headings = re.findall(r"(?m)^#+ (.*)", text)
    slugs = {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for words in headings}
    return slugs | {*re.findall(r'<a id="(\w+)"', text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_and_tests_of_a_page_are_there_and_its_blocks_are_bash_and_python(page):
    text = run_page.FENCE.sub("", page.read_text())
    for path, _, anchor in re.findall(r"\]\((?!http)([^#)]*)(#?)([^)]*)\)", text):
        target = (page.parent / path if path else page).resolve()
        assert target.exists() and (not anchor or anchor in anchors(target)), (path, anchor)
    file = ""
    for name, test in re.findall(r"(test_\w+\.py)?::(test_\w+)", text):
        file = name or file
        assert f"\ndef {test}(" in (REPO / "tests" / file).read_text(), (file, test)
    for _, line, language, _, code in run_page.blocks(page):
        if language in ("python", "py"):
            compile(code, f"{page}:{line}", "exec")
        elif language in ("bash", "sh"):
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)


def test_a_page_gets_what_its_blocks_print(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(PAGE)
    code, printed = run_page.run(tmp_path / "page.md")
    text, gone = run_page.updated(tmp_path / "page.md", printed)
    assert (code, text) == (0, PAGE.replace("2.0 of 4", "2.6 of 4"))
    assert [line.split(": ")[1] for line in gone] == ["loss gone"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_the_blocks_of_a_page_run(page):
    code, printed = run_page.run(page)
    assert code == 0, printed[-3000:]
