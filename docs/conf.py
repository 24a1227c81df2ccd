"""How ``make docs`` builds these pages with Sphinx: Markdown by MyST-Parser, the reference from docstrings.

Nothing is fetched: no other project's index is asked for, so that names of other projects are not links.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Or TensorFlow tells of its build while it is imported.

import hvd_twobit  # noqa: E402

project = "hvd_twobit"
version = release = hvd_twobit.__version__
copyright = "the authors of hvd_twobit"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
html_theme = "furo"
html_title = f"hvd_twobit {release}"
html_show_copyright = False
smartquotes = False  # Or -- of an option becomes a dash.

myst_heading_anchors = 3  # Links to headings as GitHub has them.
suppress_warnings = ["myst.header"]  # The first heading of a page with a contents block of its own.

napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

nitpicky = True
# What belongs to Python and to other projects, whose indexes are not there, and types that users only hand back.
nitpick_ignore_regex = [
    ("py:.*", r"(np|numpy|tf|tensorflow|torch|os|collections|typing|horovod)\..*"),
    ("py:.*", "Any|optional|Exception|(Value|Runtime|Import|OS|NotImplemented)Error"),
    ("py:class", r"hvd_twobit\.((torch|tensorflow)\.(exchange|allreduce)\.\w+|named\.NamedTensor|compression\.Self)"),
]
