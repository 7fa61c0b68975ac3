"""The lead's record of its workers' torch worlds."""

from __future__ import annotations

from services.inference.worlds import Worlds
from tidegate.types import NO_TOKEN, GpuId, Grant, Token

A, B, C = (GpuId(f"n0/{number}") for number in range(3))


def grants(*gpus: GpuId, counter: int = 1) -> list[Grant]:
    return [Grant(gpu, Token(1, counter)) for gpu in gpus]


def test_ranks_that_formed_a_world_together_share_it() -> None:
    worlds = Worlds()
    formed = worlds.form(grants(A, B))
    assert worlds.shared_by([A, B]) == formed
    assert (worlds.of(A), worlds.of(B), worlds.of(C)) == (formed, formed, None)


def test_ranks_in_any_other_company_or_order_share_no_world() -> None:
    worlds = Worlds()
    worlds.form(grants(A, B))
    assert [worlds.shared_by(gpus) for gpus in ([B, A], [A], [A, B, C], [C], [A, C])] == [None] * 5


def test_a_rank_that_formed_another_world_has_left_the_one_before() -> None:
    worlds = Worlds()
    worlds.form(grants(A, B))
    after = worlds.form(grants(B, C, counter=2))
    assert worlds.shared_by([A, B]) is None
    assert worlds.shared_by([B, C]) == after


def test_a_rank_that_ended_leaves_no_world_to_the_others() -> None:
    worlds = Worlds()
    worlds.form(grants(A, B))
    worlds.forget([B, C])
    assert (worlds.shared_by([A, B]), worlds.of(B)) == (None, None)


def test_the_name_of_a_world_has_the_token_of_its_first_rank_so_it_is_never_used_again() -> None:
    worlds = Worlds()
    names = [worlds.form(grants(A, B, counter=counter)).name for counter in (1, 2)]
    assert names == ["n0/0@1.1", "n0/0@1.2"]
    assert worlds.form([Grant(A, NO_TOKEN)]).name == "n0/0@0.0"
