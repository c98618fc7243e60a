"""The exceptions that pagetile raises; an unknown block or token is Python's ValueError.

    PagetileError
    ├── ShapeError         (ValueError)           sizes that disagree, or a size out of range
    ├── DTypeError         (TypeError)            a tensor of the wrong element type
    ├── UnsupportedError   (NotImplementedError)  correct, but nothing here can run it
    ├── OutOfBlocksError   (RuntimeError)         the block pool is exhausted
    ├── RequestError       (ValueError)           a generation request that can never be served
    │   └── TemplateError                         the chat template refuses its messages
    ├── OverloadedError    (RuntimeError)         too many requests now; try again later
    ├── GenerationError    (RuntimeError)         a request failed while it was computed
    │   └── NoTokenLeftError                      its own parameters forbid every token
    └── EngineDeadError    (RuntimeError)         the engine has stopped

Each message says what was given, what was expected and what to do about it.
"""


class PagetileError(Exception):
    """The base class of all errors of pagetile."""


class ShapeError(PagetileError, ValueError):
    """Sizes disagree, or one is out of range."""


class DTypeError(PagetileError, TypeError):
    """A tensor has an element type that this argument does not take."""


class UnsupportedError(PagetileError, NotImplementedError):
    """The call is correct, but no implementation (or not the named one) can run it."""


class OutOfBlocksError(PagetileError, RuntimeError):
    """Fewer blocks are free than were requested. Nothing was allocated."""


class RequestError(PagetileError, ValueError):
    """A generation request that can never be served as it stands."""


class TemplateError(RequestError):
    """A chat template refuses a conversation: it has no system role, say."""


class OverloadedError(PagetileError, RuntimeError):
    """The queue is full or the engine is draining. Nothing was started; try again later."""


class GenerationError(PagetileError, RuntimeError):
    """A request was accepted and failed while it was computed. Others are not affected."""


class NoTokenLeftError(GenerationError):
    """A request's own parameters exclude every token; it would fail again."""


class EngineDeadError(PagetileError, RuntimeError):
    """The engine has stopped, because its device was lost or it was closed."""


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, for a message.

    Examples:
        >>> plural(1, "block"), plural(2000, "block")
        ('1 block', '2,000 blocks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"
