"""``python -m pagewise``."""

import sys

from .cli import main

sys.exit(main())
