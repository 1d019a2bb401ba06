"""The draft pool against a dict: who finds a slot finds there what was written for the very text."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_stack.sglang.draft_prefixes import DraftPrefixes, Lease, PoolFullError


class Written:
    """What a dict knows of a pool: each slot's content, and every text that was left behind."""

    def __init__(self, pool: DraftPrefixes) -> None:
        self.pool = pool
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.known: set[tuple[str, tuple[int, ...]]] = set()
        self.leases: list[tuple[Lease, str, tuple[int, ...], int]] = []

    def begin(self, namespace: str, ids: tuple[int, ...], num_spare: int, num_wanted: int | None) -> None:
        has_room = self.pool.has_room(namespace, ids, len(ids) if num_wanted is None else num_wanted, num_spare)
        lease = self.pool.lease(namespace, ids, num_wanted)
        for at, slot in enumerate(lease.slots.tolist()):
            assert self.content[slot] == (namespace, ids[: at + 1]), "a slot of another text was shared"
        assert num_wanted is None or len(lease.slots) <= num_wanted
        num_new = len(ids) - lease.num_shared + num_spare
        room = self.pool.num_free + self.pool.num_used - self.pool.num_pinned
        before = self.pool.num_free, self.pool.num_used
        try:
            lease.extend(num_new)
        except PoolFullError:
            assert room < num_new
            assert not has_room
            assert (self.pool.num_free, self.pool.num_used) == before
            lease.insert(0)
            return
        assert room >= num_new
        assert has_room
        self.leases.append((lease, namespace, ids, num_spare))
        self.check()

    def write(self, index: int, num_written: int) -> None:
        lease, namespace, ids, _ = self.leases[index]
        for at in range(lease.num_shared, num_written):
            self.content[int(lease.slots[at])] = (namespace, ids[: at + 1])

    def end(self, index: int, num_written: int) -> None:
        lease, namespace, ids, _ = self.leases[index]
        num_written = max(num_written, lease.num_shared)
        self.write(index, num_written)
        lease.insert(num_written)
        self.leases.pop(index)
        self.known.add((namespace, ids[:num_written]))
        assert self.pool.num_shared(namespace, ids) >= num_written
        self.check()

    def check(self) -> None:
        owned = [slot for lease, *_ in self.leases for slot in lease.slots[lease.num_shared :].tolist()]
        assert len(set(owned)) == len(owned)
        assert self.pool.num_free + self.pool.num_used + len(owned) == self.pool.num_slots, "slots were lost"
        for lease, namespace, ids, _ in self.leases:
            for at, slot in enumerate(lease.slots[: lease.num_shared].tolist()):
                assert self.content[slot] == (namespace, ids[: at + 1]), "a pinned slot was written by another"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([12, 40, 400]))
def test_any_mix_of_texts_ends_and_evictions_shares_only_what_is_the_same(rng: random.Random, num_slots: int) -> None:
    written = Written(DraftPrefixes(num_slots))
    texts: list[tuple[int, ...]] = [()]
    for _ in range(60):
        if written.leases and (rng.random() < 0.45 or len(written.leases) > 3):
            index = rng.randrange(len(written.leases))
            _, _, ids, _ = written.leases[index]
            written.end(index, rng.choice([0, len(ids), len(ids), rng.randrange(len(ids) + 1)]))
            continue
        # Branches, edits and repetitions of earlier texts, over a vocabulary in which they often agree.
        begun = rng.choice(texts)
        begun = begun[: rng.randrange(len(begun) + 1)] if rng.random() < 0.4 else begun
        ids = (*begun, *(rng.randrange(2) for _ in range(rng.choice([1, 2, 7]))))
        texts.append(ids)
        num_wanted = rng.choice([None, len(ids) - 1])
        written.begin(rng.choice("ab"), ids, rng.choice([0, 3]), num_wanted)
    while written.leases:
        written.end(0, rng.randrange(len(written.leases[0][2]) + 1))
    assert written.pool.num_pinned == 0
    if num_slots == 400 and sum(len(ids) for _, ids in written.known) < 400:
        # Nothing had to go, so all that was left behind is found.
        for namespace, ids in written.known:
            assert written.pool.num_shared(namespace, ids) == len(ids)
    written.pool.clear()
    assert written.pool.num_free == num_slots


def test_a_text_that_goes_on_is_read_only_where_it_is_new() -> None:
    pool = DraftPrefixes(100)
    first = pool.lease("", range(20))
    assert first.num_shared == 0
    first.extend(20)
    first.insert(20)
    second = pool.lease("", range(30), 29)
    assert second.num_shared == 20
    second.extend(10)
    second.insert(30)
    assert pool.num_used == 30
    assert pool.num_shared("", range(40)) == 30


def test_tenants_never_share() -> None:
    pool = DraftPrefixes(100)
    lease = pool.lease(("tenant a", None), range(20))
    lease.extend(20)
    lease.insert(20)
    assert pool.lease(("tenant b", None), range(20)).num_shared == 0


def test_the_text_that_was_not_used_for_longest_is_cut_first() -> None:
    pool = DraftPrefixes(30)
    for start in (0, 100, 200):
        lease = pool.lease("", range(start, start + 10))
        lease.extend(10)
        lease.insert(10)
    pool.lease("", range(10)).insert(0)
    lease = pool.lease("", range(300, 304))
    lease.extend(4)
    lease.insert(4)
    assert [pool.num_shared("", range(start, start + 10)) for start in (0, 100, 200)] == [10, 6, 10]


@pytest.mark.parametrize(("num_behind", "has_room"), [(10, True), (11, False)])
def test_a_follow_up_has_no_room_in_its_own_prefix(num_behind: int, has_room: bool) -> None:
    pool, text = DraftPrefixes(100), range(40)
    for ids in (text, range(100, 140)):
        earlier = pool.lease("", ids)
        earlier.extend(40)
        if ids == text:
            earlier.insert(40)
    # The other text is being scored, so 20 slots are free, and the prefix's 40 can be evicted for others alone.
    follow_up = range(50)
    assert pool.num_available == 60
    assert pool.has_room("", follow_up, 49, num_behind) is has_room
    lease = pool.lease("", follow_up, 49)
    with nullcontext() if has_room else pytest.raises(PoolFullError):
        lease.extend(10 + num_behind)


def test_a_text_longer_than_the_pool_is_refused_and_evicts_nobody() -> None:
    pool = DraftPrefixes(30)
    lease = pool.lease("", range(20))
    lease.extend(20)
    lease.insert(20)
    longer = pool.lease("", range(100, 140))
    with pytest.raises(PoolFullError, match="room for 30 tokens, and scoring needs 40"):
        longer.extend(40)
    longer.insert(0)
    assert pool.num_shared("", range(20)) == 20
