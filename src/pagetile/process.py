"""Which process the package was first imported in; a forked child inherits the answer."""

from os import getpid

HOME = getpid()
