"""The exceptions that pagetile raises; an unknown block or token is Python's ValueError.

::

    PagetileError
    ├── ShapeError         (ValueError)           sizes that disagree, or a size out of range
    ├── DTypeError         (TypeError)            a tensor of the wrong element type
    ├── UnsupportedError   (NotImplementedError)  correct, but nothing here can run it
    ├── OutOfBlocksError   (RuntimeError)         the block pool is exhausted
    └── RequestError       (ValueError)           a generation request that can never be served

Each message says what was given, what was expected and what to do about it.
"""


class PagetileError(Exception):
    """The root: catch it to catch everything below."""


class ShapeError(PagetileError, ValueError):
    """Sizes disagree, or one is out of range."""


class DTypeError(PagetileError, TypeError):
    """A tensor has an element type that this argument does not take."""


class UnsupportedError(PagetileError, NotImplementedError):
    """The call is correct, but no implementation (or not the named one) can run it."""


class OutOfBlocksError(PagetileError, RuntimeError):
    """Fewer blocks are free than were asked for. Nothing was taken."""


class RequestError(PagetileError, ValueError):
    """A generation request that can never be served as it stands."""
