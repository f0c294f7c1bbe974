"""S3-FIFO and LRU, against models that are slower and plainer."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from featcache.eviction import LRU, S3FIFO, Policy, make_policy

KEYS = [bytes([n]) for n in range(24)]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["ask", "remove", "hold"]), st.sampled_from(KEYS), st.integers(1, 40)),
    max_size=300,
)


class Cache:
    """A byte budget over a policy, as a tier uses it."""

    def __init__(self, policy: Policy, max_bytes: int) -> None:
        self.policy, self.max_bytes = policy, max_bytes
        self.sizes: dict[bytes, int] = {}
        self.held: set[bytes] = set()

    def ask(self, key: bytes, nbytes: int) -> bool:
        if key in self.sizes:
            self.policy.touch(key)
            return True
        while sum(self.sizes.values()) + nbytes > self.max_bytes:
            victim = next((k for k in self.policy.victims() if k not in self.held), None)
            if victim is None:
                return False
            self.remove(victim)
        self.policy.add(key, nbytes)
        self.sizes[key] = nbytes
        return False

    def remove(self, key: bytes) -> None:
        del self.sizes[key]
        self.held.discard(key)
        self.policy.remove(key)


@pytest.mark.parametrize("name", ["s3fifo", "lru"])
@given(operations=OPERATIONS)
def test_budget_and_holds_are_kept_whatever_comes(
    name: str, operations: list[tuple[str, bytes, int]]
) -> None:
    cache = Cache(make_policy(name, 100), 100)  # type: ignore[arg-type]
    for what, key, nbytes in operations:
        if what == "ask":
            held = set(cache.held)
            cache.ask(key, nbytes)
            assert held <= cache.sizes.keys()
        elif key in cache.sizes and what == "remove":
            cache.remove(key)
        elif key in cache.sizes:
            cache.held.symmetric_difference_update({key})
        assert sum(cache.sizes.values()) <= 100
        assert len(cache.policy) == len(cache.sizes)
    free = cache.sizes.keys() - cache.held
    assert free <= set(cache.policy.victims()), "an entry that nobody holds can never leave"


@given(asks=st.lists(st.sampled_from(KEYS), max_size=300))
def test_lru_is_an_ordered_dictionary(asks: list[bytes]) -> None:
    cache = Cache(LRU(), 10)
    model: OrderedDict[bytes, None] = OrderedDict()
    for key in asks:
        cache.ask(key, 1)
        model[key] = None
        model.move_to_end(key)
        if len(model) > 10:
            model.popitem(last=False)
        assert cache.sizes.keys() == model.keys()


def test_a_scan_does_not_flush_what_is_hot() -> None:
    kept = {}
    for name in ("s3fifo", "lru"):
        cache = Cache(make_policy(name, 100), 100)  # type: ignore[arg-type]
        hot = [b"hot%d" % n for n in range(50)]
        for _ in range(4):
            for key in hot:
                cache.ask(key, 1)
        for n in range(10_000):
            cache.ask(b"scan%d" % n, 1)
        kept[name] = sum(key in cache.sizes for key in hot)
    assert kept == {"s3fifo": 50, "lru": 0}


def test_what_left_lately_comes_back_to_the_main_queue() -> None:
    policy = S3FIFO(10)
    cache = Cache(policy, 10)
    for n in range(12):
        cache.ask(b"%d" % n, 1)
    assert b"0" not in cache.sizes
    cache.ask(b"0", 1)
    for n in range(100, 109):  # a scan of what the small queue takes
        cache.ask(b"%d" % n, 1)
    assert b"0" in cache.sizes


def test_a_loop_over_too_much_keeps_what_came_first() -> None:
    """As libcachesim's S3-FIFO does: until something has to leave, the main queue takes what the small can't."""
    cache = Cache(S3FIFO(100), 100)
    hits = [cache.ask(b"%d" % (n % 400), 1) for n in range(4000)]
    assert sum(hits[400:800]) == sum(hits[-400:]) == 89


def test_ghosts_are_bounded() -> None:
    policy = S3FIFO(1000)
    cache = Cache(policy, 1000)
    rng = random.Random(1)
    for n in range(20_000):
        cache.ask(b"%d" % n, rng.randint(1, 100))
    assert sum(policy._ghost.values()) <= 1000


def test_a_key_is_added_once() -> None:
    for policy in (S3FIFO(10), LRU()):
        policy.add(b"a", 1)
        with pytest.raises(KeyError):
            policy.add(b"a", 1)
        with pytest.raises(KeyError):
            policy.touch(b"b")
        with pytest.raises(KeyError):
            policy.remove(b"b")
