"""The documentation tells the truth: its links lead somewhere, its pages are in the site, its code runs."""

from __future__ import annotations

import ast
import doctest
import os
import re
import runpy
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import matex_data
from matex_data.readers.formats import FORMATS
from sample_data.make import write_jets
from tests.support.launch import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}
BLOCK = re.compile(r"^( *)```(\S*) ?(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
RUN = (
    *("docs/quick_start.md", "docs/guides/chunks.md", "docs/guides/missing_samples.md", "docs/guides/tables.md"),
    *(f"docs/guides/{name}.md" for name in ("predictions", "map", "merging", "preprocessing", "metrics")),
    *(f"docs/coming_from/{name}.md" for name in ("horovod", "multi_worker_mirrored", "pytorch", "xbatcher", "coffea")),
    *("docs/coming_from/image_dataset_from_directory.md", "docs/coming_from/matex.md", "docs/why.md"),
    *("docs/formats/images.md", "docs/formats/root.md"),
)
"""Pages whose Python code runs here, in this process. That of README, docs/processes.md and docstrings runs in tests of
its own, that of the tutorials in ``make docs``."""
PROMPTS = ("docs/variable_length.md",)
"""Pages with sessions (``>>>``), whose output is compared."""


def _blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of that language, without the indentation of lists, and what only notebooks know."""
    found = []
    for indent, kind, argument, code in BLOCK.findall(page.read_text()):
        if language in (kind, argument if kind == "{code-cell}" else ""):
            outside = rf"^{indent}" if kind == language else r"^[%:!].*$"
            found.append(re.sub(outside, "", code, flags=re.MULTILINE))
    return found


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, by GitHub's rule: lower case, no punctuation, a hyphen for each blank."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE):
        plain = "".join(c for c in heading.lower() if c in " -_" or unicodedata.category(c)[0] in "LN")
        slug = plain.strip().replace(" ", "-")
        anchors.add(next(name for i in range(99) if (name := f"{slug}-{i}" if i else slug) not in anchors))
    return anchors


def _links(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield "!" of an image or "", the text, and the target of each link outside of code."""
    text = re.sub(r"`[^`\n]*`", "code", BLOCK.sub("", page.read_text()))
    yield from LINK.findall(text)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page, broken = NAMES[name], []
    for image, text, target in _links(page):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        goal = (page.parent / path).resolve() if path else page
        known = not anchor or goal.suffix != ".md" or anchor in _anchors(goal)
        if not (goal.exists() and known and (text or not image)):
            broken.append(target)
    assert broken == []


def test_flaws_of_the_built_site_are_found(tmp_path: Path) -> None:
    site_check = runpy.run_path(str(ROOT / "docs" / "site_check.py"))
    good = '<html lang="en"><h1 id="a">A</h1><h2 id="b c">B</h2><a href="#a"></a><a href="other.html#b%20c"></a></html>'
    for name in ("index.html", "other.html"):
        (tmp_path / name).write_text(good)
    assert list(site_check["problems"](tmp_path)) == []
    flaws = '<h1>A</h1><h3>B</h3><a href="other.html#d"></a><a href="https://host/x"></a><img src="other.html">'
    (tmp_path / "index.html").write_text(f"<html>{flaws}</html>".ljust(600_000))
    found = [problem.removeprefix("index.html: ").split()[0] for problem in site_check["problems"](tmp_path)]
    assert found == ["link", "picture", "a", "no", "600,000"]


def test_every_page_is_in_the_site() -> None:
    listed = {"index"}
    for page in (ROOT / "docs").rglob("*.md"):
        for tree in _blocks(page, "{toctree}"):
            for entry in re.findall(r"^(?:.*<(.+)>|([^:\s].*))$", tree, re.MULTILINE):
                base = page.parent / "".join(entry)
                found = base.parent.glob(base.name + ".md") if "*" in base.name else [base.with_name(base.name + ".md")]
                listed |= {os.path.relpath(goal.resolve().with_suffix(""), ROOT / "docs") for goal in found}
    assert {os.path.relpath(page.with_suffix(""), ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")} == listed


@pytest.mark.parametrize("name", [name for name, page in NAMES.items() if _blocks(page, "python")])
def test_code_uses_names_that_exist(name: str) -> None:
    unknown = set()
    for code in _blocks(NAMES[name], "python"):
        if ">>>" in code:
            code = "".join(example.source for example in doctest.DocTestParser().get_examples(code))
        texts = {ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
        unknown |= {text for text in texts if re.fullmatch(r"md(\.\w+)+", text) and not _exists(text.split(".")[1:])}
    assert unknown == set()


def test_the_page_of_formats_lists_their_names() -> None:
    rows = re.findall(r"^\| \[.*?\| (.*?) \|", NAMES["docs/formats/index.md"].read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(FORMATS)


def _exists(chain: list[str]) -> bool:
    value: object = matex_data
    for name in chain:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder for the pages' files, in which ``md.sample_data`` writes, too."""
    folder = tmp_path_factory.mktemp("docs")
    write_jets(folder / "sample_data" / "jets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", RUN)
def test_code_runs(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = folder / Path(name).stem
    own.mkdir()
    monkeypatch.chdir(own)
    code = "\n".join(_blocks(NAMES[name], "python"))
    path = own / "page.py"  # AutoGraph reads the source
    path.write_text(code)
    capsys.readouterr()
    exec(compile(code, str(path), "exec"), {"__name__": "__page__"})
    assert name != "docs/why.md" or capsys.readouterr().out in NAMES[name].read_text()  # as it is shown


@pytest.mark.parametrize("name", PROMPTS)
def test_sessions_show_what_they_say(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = doctest.testfile(
        str(NAMES[name]), module_relative=False, globs={"md": matex_data, "np": np}, optionflags=doctest.ELLIPSIS
    )
    assert result.attempted > 5
    assert result.failed == 0
