"""The version, for all that says it: ``__version__``, the command line, the server, records."""

SOURCE_TREE = "0+source.tree"
"""The version of a package that runs without being installed, as from a ``PYTHONPATH``."""


def find_version() -> str:
    """Return the installed version, or ``SOURCE_TREE``."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, seldom asked

    try:
        return version("pagetile")
    except PackageNotFoundError:
        return SOURCE_TREE
