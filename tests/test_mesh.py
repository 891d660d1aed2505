import threading
import time

import pytest

from hvdkit import mesh
from hvdkit.mesh import Incomplete, Meshes, Place


def addresses(rank, size):
    """At which `rank` listens for each of the others."""
    return b"".join(b"%2d for %2d" % (rank, other) for other in range(size) if other != rank)


def expected(rank, size):
    return b"".join(b"%2d for %2d" % (other, rank) for other in range(size) if other != rank)


def places(size, attempt="a", scope="global"):
    return [Place(scope, size, rank, attempt) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_rank_gets_the_addresses_meant_for_it(size):
    meshes = Meshes()
    for place in places(size):
        meshes.put(place, addresses(place.rank, size))
    for place in places(size):
        assert meshes.get(place, 0) == expected(place.rank, size)


def test_get_waits_for_the_last_rank():
    meshes = Meshes()
    first, last = places(2)
    meshes.put(first, addresses(0, 2))
    late = threading.Timer(0.2, meshes.put, (last, addresses(1, 2)))
    late.start()
    assert meshes.get(first, 30) == expected(0, 2)
    late.join()


def test_the_missing_ranks_are_named():
    meshes = Meshes()
    everyone = places(40)
    for place in (everyone[0], everyone[2]):
        meshes.put(place, addresses(place.rank, 40))
    shown = "ranks 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 and 22 more of 40 did not"
    with pytest.raises(Incomplete, match=shown):
        meshes.get(everyone[0], 0.01)


def test_a_rank_that_gave_up_is_not_given_to_others():
    meshes = Meshes()
    first, last = places(2)
    meshes.put(first, addresses(0, 2))
    with pytest.raises(Incomplete):
        meshes.get(first, 0.01)
    meshes.put(last, addresses(1, 2))
    with pytest.raises(Incomplete, match="rank 0 of 2"):
        meshes.get(last, 0.01)


def test_ranks_that_come_again_do_not_get_the_addresses_of_before():
    meshes = Meshes()
    before, again = places(2, "a"), places(2, "b")
    for place in before:
        meshes.put(place, addresses(place.rank, 2))
    assert meshes.get(before[0], 0)
    # Rank 0 is quick: it comes again before rank 1 has asked for the first time.
    meshes.put(again[0], b"new of 0")
    with pytest.raises(Incomplete, match="rank 1 of 2"):
        meshes.get(again[0], 0.01)
    meshes.put(again[0], b"new of 0")
    assert meshes.get(before[1], 0) == expected(1, 2)
    meshes.put(again[1], b"new of 1")
    assert meshes.get(again[0], 0) == b"new of 1"
    assert meshes.get(again[1], 0) == b"new of 0"


def test_requests_may_be_repeated():
    meshes = Meshes()
    for place in [*places(2), *places(2)]:
        meshes.put(place, addresses(place.rank, 2))
    assert [meshes.get(place, 0) for place in places(2) * 2] == [expected(0, 2), expected(1, 2)] * 2


def test_what_all_have_got_is_forgotten_after_a_while(monkeypatch):
    meshes = Meshes()
    for place in places(2):
        meshes.put(place, addresses(place.rank, 2))
    for place in places(2):
        meshes.get(place, 0)
        meshes.left(place)
    meshes.forget()
    # An answer may have been lost on the way.
    assert meshes.get(places(2)[0], 0) == expected(0, 2)
    monkeypatch.setattr(mesh, "_KEPT_SECONDS", 0.0)
    meshes.forget()
    with pytest.raises(LookupError):
        meshes.get(places(2)[0], 0)
    assert meshes.registered() == {0, 1}


def test_meshes_of_other_names_and_sizes_are_others():
    meshes = Meshes()
    for scope, size in (("global", 2), ("global", 3), ("local_a", 2)):
        meshes.put(Place(scope, size, 0, "a"), addresses(0, size))
    for scope, size in (("global", 2), ("global", 3), ("local_a", 2)):
        with pytest.raises(Incomplete, match=f"of {size} did not come to the mesh '{scope}'"):
            meshes.get(Place(scope, size, 0, "a"), 0)


@pytest.mark.parametrize(
    ("place", "given"),
    [
        (Place("global", 2, 2, "a"), b"x"),
        (Place("global", 3, 0, "a"), b"xyz"),
        (Place("global", 3, 0, "a"), b""),
    ],
)
def test_places_and_addresses_that_cannot_be(place, given):
    with pytest.raises(ValueError, match=f"rank {place.rank} of {place.size}"):
        Meshes().put(place, given)


def test_addresses_of_another_length_than_those_of_others():
    meshes = Meshes()
    first, last = places(2)
    meshes.put(first, b"1234")
    with pytest.raises(ValueError, match="rank 1 of 2: 3 bytes"):
        meshes.put(last, b"123")


def test_close_ends_all_waiting():
    meshes = Meshes()
    place = places(2)[0]
    meshes.put(place, addresses(0, 2))
    threading.Timer(0.2, meshes.close).start()
    began = time.monotonic()
    with pytest.raises(Incomplete, match="because the job does"):
        meshes.get(place, 30)
    assert time.monotonic() < began + 10
