"""Set before torch starts its threads: tests share their cores, and spinning threads do not."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
