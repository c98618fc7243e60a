"""Id of the process that imported the package; a forked child inherits it and can tell itself."""

from os import getpid

HOME = getpid()
