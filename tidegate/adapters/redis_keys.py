"""The keys of Tidegate in Redis: one hash for each table of cells, and one for the session of the last adoption. Pure.

All share one hash tag, so that a script may use several. [test_redis_store: all_keys_share_one_hash_tag]
"""

from __future__ import annotations


def table_key(table: str) -> str:
    return f"{{tidegate}}:{table}"


STORE_KEY = table_key("store")
"""The run id and the term of the last adoption. `lua/guard.lua` names it too."""
