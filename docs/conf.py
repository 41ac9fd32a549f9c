"""Configuration of Sphinx for the site: ``make docs`` writes it to ``build/docs``."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

import matex_data

sys.path.insert(0, str(Path(__file__).parent))

from site_check import problems

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files above this folder, with the page of the site that shows each."""
MADE_BY_FUNCTIONS = ("matex_data.Dataset",)
"""Classes that users do not construct: the parameters of their constructors are not shown."""

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}  # of the tutorials

project = author = "matex_data"
copyright = "the authors of matex_data, Apache-2.0"
version = release = matex_data.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["**/.ipynb_checkpoints"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["ref.python"]  # names that two classes have, such as "rows"

nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "docs-cache")
nb_execution_timeout = 300  # seconds of a cell, on a busy machine
nb_execution_raise_on_error = False
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the parameters' types stand in the docstrings, with shape and unit
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "matex_data"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_sidebars = dict.fromkeys(("index", "quick_start", "training", "clusters"), ())  # sections of one page
toc_object_entries_show_parents = "hide"
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": [],
}


def _link_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links to files above this folder lead to their pages of the site."""
    above = posixpath.relpath("..", posixpath.dirname(docname) or ".")
    for name, page in PAGES.items():
        target = posixpath.relpath(page, posixpath.dirname(docname) or ".")
        source[0] = source[0].replace(f"]({above}/{name}", f"]({target}")


def _separate_descriptions(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Put descriptions on lines of their own, as Napoleon wants them: it takes what follows a name for a type."""
    if what == "property" and lines:
        lines[0] = lines[0].replace(": ", " \N{EN DASH} ", 1)  # before a colon Napoleon sees a type
    section, separated, skipped = "", [], False
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if below.strip("-") == "" and len(below) > 3:
            section = line
        skipped = name in MADE_BY_FUNCTIONS and section == "Parameters"
        entry = re.match(r"(\S[^:]*?) : (.*)", line) if section in ("Parameters", "Attributes", "Raises") else None
        if not skipped:
            separated += [entry[1], f"    {entry[2]}"] if entry else [line]
    # The star of a shape such as "(samples, *field shape)" is no emphasis.
    lines[:] = [
        line if "``" in line else re.sub(r"\(([^()*]*, )\*([^()*]*)\)", r"(\1\\*\2)", line) for line in separated
    ]


def _check_site(app: Sphinx, exception: Exception | None) -> None:
    """Warn about flaws of the built site: warnings are errors."""
    if exception is None and app.builder.format == "html":
        for problem in problems(Path(app.outdir)):
            logging.getLogger(__name__).warning(problem, type="site")


def setup(app: Sphinx) -> None:
    """Connect to Sphinx's events."""
    app.connect("source-read", _link_pages)
    app.connect("autodoc-process-docstring", _separate_descriptions, priority=400)  # before Napoleon
    app.connect("build-finished", _check_site)
