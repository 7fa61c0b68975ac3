"""What every test starts from, also when pytest is started without make."""

from __future__ import annotations

import os

from hypothesis import settings

# Before the first import of torch: its sums depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run; a shared machine is no reason to fail.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
