import threading
import time

import pytest

from hvdkit.rendezvous import mesh
from hvdkit.rendezvous.mesh import IncompleteMesh, Meshes, MeshMember


def addresses(rank, size):
    """Return the addresses where `rank` listens for each other rank."""
    return b"".join(b"%2d for %2d" % (rank, other) for other in range(size) if other != rank)


def expected(rank, size):
    return b"".join(b"%2d for %2d" % (other, rank) for other in range(size) if other != rank)


def members(size, attempt="a", scope="global"):
    return [MeshMember(scope, size, rank, attempt) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_rank_gets_the_addresses_meant_for_it(size):
    meshes = Meshes()
    for member in members(size):
        meshes.put(member, addresses(member.rank, size))
    for member in members(size):
        assert meshes.get(member, 0) == expected(member.rank, size)


def test_get_waits_for_the_last_rank():
    meshes = Meshes()
    first, last = members(2)
    meshes.put(first, addresses(0, 2))
    late = threading.Timer(0.2, meshes.put, (last, addresses(1, 2)))
    late.start()
    assert meshes.get(first, 30) == expected(0, 2)
    late.join()


def test_the_missing_ranks_are_named():
    meshes = Meshes()
    all_40 = members(40)
    for member in (all_40[0], all_40[2]):
        meshes.put(member, addresses(member.rank, 40))
    shown = "ranks 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 and 22 more of 40 did not"
    with pytest.raises(IncompleteMesh, match=shown):
        meshes.get(all_40[0], 0.01)


def test_a_rank_whose_wait_timed_out_is_not_given_to_others():
    meshes = Meshes()
    first, last = members(2)
    meshes.put(first, addresses(0, 2))
    with pytest.raises(IncompleteMesh):
        meshes.get(first, 0.01)
    meshes.put(last, addresses(1, 2))
    with pytest.raises(IncompleteMesh, match="rank 0 of 2"):
        meshes.get(last, 0.01)


def test_ranks_that_join_again_do_not_get_old_addresses():
    meshes = Meshes()
    before, again = members(2, "a"), members(2, "b")
    for member in before:
        meshes.put(member, addresses(member.rank, 2))
    assert meshes.get(before[0], 0)
    # Rank 0 is fast: it joins again before rank 1 has got its first answer.
    meshes.put(again[0], b"new of 0")
    with pytest.raises(IncompleteMesh, match="rank 1 of 2"):
        meshes.get(again[0], 0.01)
    meshes.put(again[0], b"new of 0")
    assert meshes.get(before[1], 0) == expected(1, 2)
    meshes.put(again[1], b"new of 1")
    assert meshes.get(again[0], 0) == b"new of 1"
    assert meshes.get(again[1], 0) == b"new of 0"


def test_requests_may_be_repeated():
    meshes = Meshes()
    for member in [*members(2), *members(2)]:
        meshes.put(member, addresses(member.rank, 2))
    assert [meshes.get(member, 0) for member in members(2) * 2] == [
        expected(0, 2),
        expected(1, 2),
    ] * 2


def test_a_mesh_is_deleted_a_while_after_all_answers(monkeypatch):
    meshes = Meshes()
    for member in members(2):
        meshes.put(member, addresses(member.rank, 2))
    for member in members(2):
        meshes.get(member, 0)
        meshes.mark_answered(member)
    meshes.forget()
    # Kept, as an answer may have been lost.
    assert meshes.get(members(2)[0], 0) == expected(0, 2)
    monkeypatch.setattr(mesh, "_KEPT_SECONDS", 0.0)
    meshes.forget()
    with pytest.raises(LookupError):
        meshes.get(members(2)[0], 0)
    assert meshes.registered() == {0, 1}


def test_meshes_differ_by_name_and_size():
    meshes = Meshes()
    for scope, size in (("global", 2), ("global", 3), ("local_a", 2)):
        meshes.put(MeshMember(scope, size, 0, "a"), addresses(0, size))
    for scope, size in (("global", 2), ("global", 3), ("local_a", 2)):
        with pytest.raises(IncompleteMesh, match=f"of {size} did not join the mesh '{scope}'"):
            meshes.get(MeshMember(scope, size, 0, "a"), 0)


@pytest.mark.parametrize(
    ("member", "given"),
    [
        (MeshMember("global", 2, 2, "a"), b"x"),
        (MeshMember("global", 3, 0, "a"), b"xyz"),
        (MeshMember("global", 3, 0, "a"), b""),
    ],
)
def test_invalid_ranks_and_addresses(member, given):
    with pytest.raises(ValueError, match=f"rank {member.rank} of {member.size}"):
        Meshes().put(member, given)


def test_addresses_of_different_lengths():
    meshes = Meshes()
    first, last = members(2)
    meshes.put(first, b"1234")
    with pytest.raises(ValueError, match="rank 1 of 2: 3 bytes"):
        meshes.put(last, b"123")


def test_close_ends_all_waiting():
    meshes = Meshes()
    member = members(2)[0]
    meshes.put(member, addresses(0, 2))
    threading.Timer(0.2, meshes.close).start()
    started = time.monotonic()
    with pytest.raises(IncompleteMesh, match="because the job ends"):
        meshes.get(member, 30)
    assert time.monotonic() < started + 10
