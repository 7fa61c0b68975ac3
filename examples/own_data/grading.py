"""A reward of one's own: how much of the response is the word that was asked for.

It is imported in processes apart from the job, by `path: grading:share_right` in job.yaml. It gets what it names:
`prompt`, `response`, `answer`, and any column of the record.
"""

from __future__ import annotations


def share_right(*, response: str, word: str, times: int) -> float:
    """1 for the word as often as was asked; less for other words, and for too few or too many."""
    words = response.split()
    return min(words.count(word), times) / max(len(words), times)
