from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.ring import Ring, neighbors


def test_each_replica_has_the_next_one_where_all_nodes_differ() -> None:
    ring = neighbors(range(4), {r: f"n{r}" for r in range(4)})
    assert ring == Ring({0: 1, 1: 2, 2: 3, 3: 0})


def test_a_node_that_is_not_known_is_taken_for_its_own() -> None:
    assert neighbors([1, 0], {}) == Ring({0: 1, 1: 0})


def test_one_replica_has_no_neighbor_and_that_is_said() -> None:
    assert neighbors([0], {0: "n"}) == Ring({}, ("one replica has no neighbor",))
    assert neighbors([], {}) == Ring()


def test_two_on_a_node_keep_for_the_other_node() -> None:
    ring = neighbors(range(4), {0: "a", 1: "a", 2: "b", 3: "b"})
    assert ring == Ring({0: 2, 1: 3, 2: 0, 3: 1})


def test_another_failure_domain_where_possible() -> None:
    rack = {0: "x", 1: "x", 2: "y", 3: "y"}
    ring = neighbors(range(4), {r: f"n{r}" for r in range(4)}, rack)
    assert all(rack[a] != rack[b] for a, b in ring.neighbors.items())
    assert ring.warnings == ()


def test_all_on_one_node_is_said() -> None:
    ring = neighbors(range(3), dict.fromkeys(range(3), "n"))
    assert set(ring.neighbors) == {0, 1, 2}
    assert ring.warnings == (
        "all 3 replicas run on node n: the neighbor tier does not survive its loss",
    )


def test_one_failure_domain_for_too_many_is_said() -> None:
    nodes = {r: f"n{r}" for r in range(4)}
    ring = neighbors(range(4), nodes, {0: "x", 1: "x", 2: "x", 3: "y"})
    assert ring.warnings == ("2 of 4 replicas have their neighbor in the same failure domain",)


def test_on_a_node_with_more_than_half_of_all_some_others_keep_for_several() -> None:
    nodes = {0: "a", 1: "a", 2: "a", 3: "b"}
    ring = neighbors(range(4), nodes)
    assert all(nodes[a] != nodes[b] for a, b in ring.neighbors.items())
    assert [ring.neighbors[r] for r in (0, 1, 2)] == [3, 3, 3]


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=12),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_never_the_same_node_if_there_is_another_and_load_is_even_where_it_can_be(
    nodes: list[int], racks: list[int]
) -> None:
    """`nodes`: of each replica; `racks`: of each node."""
    count = len(nodes)
    where = {replica: f"n{node}" for replica, node in enumerate(nodes)}
    domain = {replica: f"d{racks[node]}" for replica, node in enumerate(nodes)}
    ring = neighbors(range(count), where, domain)
    assert set(ring.neighbors) == set(range(count))
    assert all(a != b for a, b in ring.neighbors.items())
    if len(set(nodes)) > 1:
        assert all(where[a] != where[b] for a, b in ring.neighbors.items())
    if _largest(where) * 2 <= count:
        assert max(Counter(ring.neighbors.values()).values()) == 1
    if _largest(domain) * 2 <= count:
        assert all(domain[a] != domain[b] for a, b in ring.neighbors.items())
        assert ring.warnings == ()


def _largest(groups: dict[int, str]) -> int:
    return max(Counter(groups.values()).values())
