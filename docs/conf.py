"""How `make docs` builds the pages: Sphinx, Markdown by MyST, the reference from the code (`from_code.py`).

Every warning is an error, so a link, an anchor or a name that leads nowhere ends the build.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]
# The operators import Airflow, which makes its folder and a configuration on import: not in the reader's home.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="roir-docs-"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

from airflow_roir import __version__  # noqa: E402 - found by the path above

project = "airflow-roir"
author = "the airflow-roir contributors"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "from_code",
    "on_the_page",
    "search_sections",
]
exclude_patterns = ["_build", "_templates"]
source_suffix = {".md": "markdown"}

# Anchors as code hosts make them, so that the same links work there and here.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "html_image"]
# A code block without a language: `on_the_page.py` tells SQL from shell.
highlight_language = "none"
# Examples leave things out by "…", which no language has.
suppress_warnings = ["misc.highlighting_failure"]
copybutton_prompt_text = r"\$ |=> "
copybutton_prompt_is_regexp = True

default_role = "literal"
nitpicky = True
# Types of other packages, whose pages are elsewhere; and types of fields that only code reads.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!airflow_roir\.).*"),
    (r"py:class", r"airflow_roir\.engine\.forecast\.set_up\..*"),
    (r"py:class", r"airflow_roir\.engine\.(source|generation|scan\.choosing|scan\.findings\.Survey)(?!\.cut\.Plan$).*"),
]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_use_type_comments = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = "airflow-roir"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["roir.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "airflow-roir"},
    "navbar_center": [],
    "navbar_persistent": [],
    "navbar_end": ["search-button-field", "theme-switcher"],
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_sidebars = {"**": ["pages.html"], "index": []}

# `make docs-links`. Issues of code hosts answer robots with 429; addresses of the reader's own machine are examples.
linkcheck_timeout = 15
linkcheck_retries = 2
linkcheck_workers = 4
linkcheck_rate_limit_timeout = 60
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1|host|kubernetes\.default)([:/].*)?$"]
# The anchors of code hosts are made by scripts.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]
