"""URLs of Redis servers and of Sentinels."""

from __future__ import annotations

import pytest

from tidegate.adapters.redis_url import BadRedisUrl, RedisUrl


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("redis://h:1/0", RedisUrl(has_tls=False)),
        ("rediss://me:x@h", RedisUrl(has_tls=True)),
        ("unix:///run/redis.sock", RedisUrl(has_tls=False)),
        ("redis+sentinel://a:1,b/main", RedisUrl(False, (("a", 1), ("b", 26379)), "main")),
        (
            "rediss+sentinel://me:p%40ss@a:1/main",
            RedisUrl(True, (("a", 1),), "main", {"username": "me", "password": "p@ss"}),
        ),
    ],
)
def test_a_url_says_whom_to_ask(url: str, want: RedisUrl) -> None:
    assert RedisUrl.parse(url) == want


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://me:secret@h",
        "redis://me:secret@h:port",
        "redis+sentinel://me:secret@a:1",
        "redis+sentinel://me:secret@a:1/main/0",
        "redis+sentinel://me:secret@a:0/main",
        "redis+sentinel://me:secret@,b/main",
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(BadRedisUrl) as refused:
        RedisUrl.parse(url)
    assert "secret" not in str(refused.value)
