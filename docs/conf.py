"""How Sphinx makes the site of the pages that docs/gather.py has gathered."""

from fedrpc import __version__

project, author, version, release = "fedrpc", "the authors of fedrpc", __version__, __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # links to headings, spelled as in the READMEs
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
suppress_warnings = [
    "misc.highlighting_failure",  # console blocks have output in them
    "myst.header",  # a README may begin below the first level
]

html_theme = "furo"  # system fonts, and nothing from elsewhere: the site works offline
html_title = f"fedrpc {version}"
html_show_sourcelink, html_copy_source, html_show_sphinx = False, False, False
html_static_path, html_css_files = ["static"], ["site.css"]
html_theme_options = {"navigation_with_keys": True}
