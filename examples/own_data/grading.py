"""A reward function: the share of the requested word in the response.

Processes outside the job import it by `path: grading:share_right` in job.yaml. Its arguments may be `prompt`,
`response`, `answer` and any column of the record.
"""

from __future__ import annotations


def share_right(*, response: str, word: str, times: int) -> float:
    """1 for the word in the requested number. Other words, too few and too many reduce it."""
    words = response.split()
    return min(words.count(word), times) / max(len(words), times)
