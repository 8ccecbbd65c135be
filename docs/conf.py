"""The documentation site: ``make docs``. Warnings are errors."""

from hpcfsdp import __version__

project = "hpcfsdp"
author = "The hpcfsdp developers"
copyright = "The hpcfsdp developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "examples", "packaging"]
nitpick_ignore_regex = [("py:.*", ".*")]  # docstrings name types of torch, whose pages no build machine reaches

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]

default_role = "code"  # a name in single backquotes is an argument
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"hpcfsdp {version}"
html_theme_options = {"navigation_with_keys": True}
