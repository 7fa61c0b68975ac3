"""How much a certificate compares.

Levels:
- `full`: everything that is held before and after. Ranks that hold the same region have the same sum, and so do the
  pipeline stages that hold copies of one tensor. The sums of a tensor's regions add up to the tensor's sum, which is
  the same at both ends.
- `new`: only regions that came from other ranks, as the sender and as the receiver have them. It is cheaper, and does
  not see a rank's local copies.
- `off`: nothing.
"""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    OFF = "off"
    NEW = "new"
    FULL = "full"
