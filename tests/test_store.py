"""The store: all tiers as one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tier_contract import features_of, is_intact, key_of

from featcache import FeatureStore
from featcache.errors import (
    CancelledError,
    ConfigError,
    ImageError,
    LeaseError,
    StoreClosedError,
    StoreError,
)
from featcache.features import Features, Layout
from featcache.keys import FeatureKey
from featcache.lease import Lease

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeatureStore]:
    with FeatureStore.open(tmp_path / "store", host_bytes="4MiB", disk_bytes="64MiB") as opened:
        yield opened
        opened.flush()  # the writer's holds end
        assert opened.check() == []
        host = opened.stats().host
        assert host is not None and host.held_bytes == 0


@pytest.fixture
def memory() -> Iterator[FeatureStore]:
    """A store without a path."""
    with FeatureStore.open(host_bytes="4MiB") as opened:
        yield opened
        assert opened.check() == []


def number_of(key: bytes) -> int:
    return int.from_bytes(key, "big")


class Computing:
    """A `compute` that counts what it was asked for, and can be held up."""

    def __init__(self, tokens: int = 4) -> None:
        self.asked: list[list[int]] = []
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._tokens = tokens

    def __call__(self, keys: list[FeatureKey]) -> Mapping[FeatureKey, Features | Exception]:
        self.asked.append([number_of(key) for key in keys])
        self.started.set()
        assert self.gate.wait(60)
        return {key: features_of(number_of(key), self._tokens) for key in keys}


def release(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Lease):
            outcome.release()


# Keeping and finding


def test_what_was_put_comes_back_from_every_tier(tmp_path: Path) -> None:
    with FeatureStore.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        for number in range(10):
            store.put(key_of(number), features_of(number))
        for number in range(10):
            lease = store.get(key_of(number))
            assert lease is not None and lease.tier == "host"
            assert is_intact(lease.features, number) and lease.layout == Layout(4, 30, 40)
            lease.release()
        assert store.tier_of(key_of(3)) == "host"
        assert store.get(key_of(99)) is None
    with FeatureStore.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        assert store.tier_of(key_of(3)) == "disk"
        leases = store.get_many([key_of(3), key_of(99), key_of(4)])
        assert [lease and lease.tier for lease in leases] == ["disk", None, "disk"]
        assert leases[0] is not None and is_intact(leases[0].features, 3)
        assert store.tier_of(key_of(3)) == "host"  # it moved up
        release(leases)
        counts = store.stats().counts
        assert (counts["hits_disk"], counts["hits_host"], counts["misses"]) == (2, 0, 1)


def test_pending_features_are_found_at_once(memory: FeatureStore) -> None:
    for number in range(50):
        memory.put(key_of(number), features_of(number))
        with memory.get(key_of(number)) or pytest.fail("lost") as lease:
            assert is_intact(lease.features, number)


def test_memory_without_a_path_is_a_store(memory: FeatureStore) -> None:
    memory.put(key_of(1), features_of(1), wait=True)
    memory.flush()
    assert memory.tier_of(key_of(1)) == "host"
    assert memory.stats().disk is None and memory.stats().writer is None
    memory.put_alias(b"a" * 32, b"b" * 32)
    assert memory.alias(b"a" * 32) == b"b" * 32
    assert memory.alias(b"c" * 32) is None
    with pytest.raises(StoreError, match="no disk tier"):
        memory.verify()


def test_disk_alone_is_a_store(tmp_path: Path) -> None:
    with FeatureStore.open(tmp_path, host_bytes=0, disk_bytes="64MiB") as store:
        store.put(key_of(1), features_of(1))
        store.flush()
        lease = store.get(key_of(1))
        assert lease is not None and lease.tier == "disk" and is_intact(lease.features, 1)
        lease.release()
        assert store.stats().host is None
        assert store.check() == []


def test_several_tensors_and_dtypes_round_trip(store: FeatureStore) -> None:
    made = Features(
        {
            "rows": torch.randn(5, 7).bfloat16(),
            "deepstack.0": torch.randn(5, 3),
            "deepstack.1": torch.randn(5, 9).half(),
            "codes": torch.arange(5, dtype=torch.int8)[:, None],
            "scaled": torch.randn(5, 2).to(torch.float8_e5m2),
        },
        Layout(5, 6, 7, grid=(1, 2, 3), tiles=(2, 1)),
        b"f" * 32,
    )
    store.put(key_of(1), made)
    store.flush()
    for _ in range(2):
        lease = store.get(key_of(1))
        assert lease is not None
        assert lease.layout == made.layout and lease.features.fingerprint == b"f" * 32
        assert lease.features.tensors.keys() == made.tensors.keys()
        for name, tensor in made.tensors.items():
            got = lease.features.tensors[name]
            assert got.dtype == tensor.dtype and torch.equal(got.view(torch.int8), tensor.view(torch.int8))
        lease.release()
        store._stack.host.clear()  # the second time from disk
    assert store.stats().counts["hits_disk"] == 1


def test_image_without_tokens_is_kept(store: FeatureStore) -> None:
    store.put(key_of(1), Features({"rows": torch.zeros(0, 16)}, Layout(0, 1, 1)))
    store.flush()
    store._stack.host.clear()
    lease = store.get(key_of(1))
    assert lease is not None and lease.features.rows.shape == (0, 16)
    lease.release()


def test_put_again_changes_nothing(store: FeatureStore) -> None:
    for _ in range(3):
        store.put(key_of(1), features_of(1))
    store.flush()
    stats = store.stats()
    assert stats.host is not None and stats.host.num_entries == 1
    assert stats.disk is not None and stats.disk.entries == 1


def test_layout_needs_no_payload(tmp_path: Path) -> None:
    with FeatureStore.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        store.put(key_of(1), features_of(1))
        assert store.layout(key_of(1)) == Layout(4, 30, 40)
        assert store.layout(key_of(2)) is None
    with FeatureStore.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        assert store.layout(key_of(1)) == Layout(4, 30, 40)
        stats = store.stats()
        assert stats.host is not None and stats.host.num_entries == 0
        assert stats.counts["hits_disk"] == 0


def test_view_of_a_batch_is_kept_alone(memory: FeatureStore) -> None:
    batch = torch.cat([features_of(n).rows for n in range(8)])
    memory.put(key_of(3), Features({"rows": batch[12:16]}, Layout(4, 30, 40), key_of(10)))
    memory.flush()
    lease = memory.get(key_of(3))
    assert lease is not None and is_intact(lease.features, 3)
    batch.zero_()
    assert is_intact(lease.features, 3)
    lease.release()


def test_record_larger_than_the_host_tier_goes_to_disk_and_is_served(store: FeatureStore) -> None:
    large = features_of(1, tokens=6 * 1024)  # 6 MiB; the host tier has 4
    store.put(key_of(1), large)
    store.flush()
    assert store.stats().counts["no_room"] == 1
    lease = store.get(key_of(1))
    assert lease is not None and lease.tier == "disk" and is_intact(lease.features, 1)
    lease.release()


def test_disk_hit_is_served_though_every_byte_of_the_host_tier_is_leased(store: FeatureStore) -> None:
    for number in range(4):
        store.put(key_of(number), features_of(number, tokens=1024), wait=True)
    store.put(key_of(9), features_of(9, tokens=1024), wait=True)
    store.flush()
    held = [lease for number in range(4) if (lease := store.get(key_of(number)))]
    host = store.stats().host
    assert len(held) == 4 and host is not None and host.held_bytes == host.max_bytes
    lease = store.get(key_of(9))
    assert lease is not None and lease.tier == "disk" and is_intact(lease.features, 9)
    lease.release()
    release(held)


def test_put_does_not_lose_a_record_when_the_host_tier_is_leased(store: FeatureStore) -> None:
    store.put(key_of(0), features_of(0, tokens=4 * 1024), wait=True)
    store.flush()
    held = store.get(key_of(0))
    assert held is not None
    store.put(key_of(1), features_of(1, tokens=1024))
    store.flush()
    assert store.tier_of(key_of(1)) == "disk"
    held.release()


def test_too_many_bytes_on_their_way_to_disk_are_kept_in_memory_only(tmp_path: Path) -> None:
    with FeatureStore.open(tmp_path, host_bytes="64MiB", disk_bytes="128MiB", queue_bytes="2MiB") as store:
        assert store._stack.disk is not None
        with store._stack.disk._env.write():  # as another process that writes: ours has to wait
            for number in range(40):
                store.put(key_of(number), features_of(number, tokens=1024))
            assert store.stats().backlog_bytes == 2 * MIB
        store.flush()
        stats = store.stats()
        assert stats.host is not None and stats.host.num_entries == 40
        assert stats.counts["unwritten"] == 38
        assert stats.disk is not None and stats.disk.entries == 2
        assert stats.backlog_bytes == 0


def test_put_that_waits_drops_nothing(tmp_path: Path) -> None:
    with FeatureStore.open(tmp_path, host_bytes="64MiB", disk_bytes="128MiB", queue_bytes="2MiB") as store:
        for number in range(40):
            store.put(key_of(number), features_of(number, tokens=1024), wait=True)
            assert store.stats().backlog_bytes <= 2 * MIB
        store.flush()
        stats = store.stats()
        assert stats.disk is not None and stats.disk.entries == 40 and stats.counts["unwritten"] == 0


# Leases


def test_lease_outlives_a_thousand_evictions(store: FeatureStore) -> None:
    store.put(key_of(0), features_of(0, tokens=100), wait=True)
    store.flush()
    lease = store.get(key_of(0))
    assert lease is not None
    for number in range(1, 1100):
        store.put(key_of(number), features_of(number, tokens=100))
        if number % 20 == 0:
            store._stack._copies.drain()
            while store.stats().backlog_bytes > MIB:  # what is being written is held too
                time.sleep(0.001)
    store.flush()
    host = store.stats().host
    assert host is not None and host.evicted >= 1000 and host.used_bytes <= host.max_bytes
    assert is_intact(lease.features, 0)
    lease.release()


def test_second_release_raises_and_so_does_use_after_it(store: FeatureStore) -> None:
    store.put(key_of(1), features_of(1))
    lease = store.get(key_of(1))
    assert lease is not None and not lease.is_released
    lease.release()
    with pytest.raises(LeaseError, match="released twice"):
        lease.release()
    with pytest.raises(LeaseError, match="after their release"):
        _ = lease.features
    with pytest.raises(LeaseError):
        lease.again()
    assert lease.is_released and lease.layout == Layout(4, 30, 40)


def test_lease_is_released_once_by_many_threads(memory: FeatureStore) -> None:
    memory.put(key_of(1), features_of(1))
    memory.flush()
    lease = memory.get(key_of(1))
    assert lease is not None
    results: list[str] = []
    barrier = threading.Barrier(8)

    def try_release() -> None:
        barrier.wait(60)
        try:
            lease.release()
            results.append("released")
        except LeaseError:
            results.append("refused")

    threads = [threading.Thread(target=try_release) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == ["refused"] * 7 + ["released"]


def test_each_lease_of_a_key_is_a_hold_of_its_own(memory: FeatureStore) -> None:
    memory.put(key_of(1), features_of(1, tokens=1024))
    memory.flush()
    first, second = memory.get(key_of(1)), memory.get(key_of(1))
    assert first is not None and second is not None
    third = second.again()
    first.release()
    second.release()
    for number in range(2, 30):
        memory.put(key_of(number), features_of(number, tokens=1024))
    memory.flush()
    assert is_intact(third.features, 1)
    third.release()


def test_leased_features_survive_delete_and_close(tmp_path: Path) -> None:
    store = FeatureStore.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB")
    store.put(key_of(1), features_of(1))
    store.flush()
    lease = store.get(key_of(1))
    assert lease is not None
    assert store.delete(key_of(1))
    assert store.tier_of(key_of(1)) is None and store.get(key_of(1)) is None
    assert not store.delete(key_of(1))
    store.close()
    assert is_intact(lease.features, 1)
    lease.release()


def test_deleted_stays_deleted_though_its_write_was_under_way(store: FeatureStore) -> None:
    for number in range(20):
        store.put(key_of(number), features_of(number, tokens=256))
        store.delete(key_of(number))
    store.flush()
    assert [number for number in range(20) if store.tier_of(key_of(number))] == []


# Single flight


def test_only_misses_are_computed_and_each_once(store: FeatureStore) -> None:
    store.put(key_of(1), features_of(1))
    computing = Computing()
    leases = store.get_or_compute([key_of(n) for n in (2, 1, 2, 3, 1)], computing)
    assert computing.asked == [[2, 3]]
    assert [lease.tier for lease in leases] == ["encoded", "host", "encoded", "encoded", "host"]
    assert all(is_intact(lease.features, n) for lease, n in zip(leases, (2, 1, 2, 3, 1), strict=True))
    release(leases)
    again = store.get_or_compute([key_of(3)], computing)
    assert computing.asked == [[2, 3]] and again[0].tier == "host"
    release(again)


def test_nothing_missing_computes_nothing(store: FeatureStore) -> None:
    computing = Computing()
    assert store.get_or_compute([], computing) == []
    assert computing.asked == []


def test_sixteen_threads_one_compute(store: FeatureStore) -> None:
    computing = Computing()
    computing.gate.clear()
    keys = [key_of(n) for n in range(6)]
    results: list[list[int]] = []

    def want() -> None:
        leases = store.get_or_compute(keys, computing)
        results.append([n for n, lease in enumerate(leases) if is_intact(lease.features, n)])
        release(leases)

    threads = [threading.Thread(target=want) for _ in range(16)]
    for thread in threads:
        thread.start()
    assert computing.started.wait(60)
    computing.gate.set()
    for thread in threads:
        thread.join(60)
    assert computing.asked == [[0, 1, 2, 3, 4, 5]]
    assert results == [[0, 1, 2, 3, 4, 5]] * 16
    assert store.stats().num_computing == 0


def test_overlapping_wishes_of_two_threads_do_not_deadlock(memory: FeatureStore) -> None:
    """Each computes what the other waits for, and then waits for what the other computes."""
    first, second = Computing(), Computing()
    first.gate.clear()
    second.gate.clear()
    leases: dict[str, list[Lease]] = {}

    def want(name: str, computing: Computing, numbers: list[int]) -> None:
        leases[name] = memory.get_or_compute([key_of(n) for n in numbers], computing)

    one = threading.Thread(target=want, args=("one", first, [1, 2]))
    one.start()
    assert first.started.wait(60)
    two = threading.Thread(target=want, args=("two", second, [3, 2]))
    two.start()
    assert second.started.wait(60)
    three = Computing()
    overlap = threading.Thread(target=want, args=("three", three, [3, 1]))
    overlap.start()
    first.gate.set()
    second.gate.set()
    for thread in (one, two, overlap):
        thread.join(60)
        assert not thread.is_alive()
    assert (first.asked, second.asked) == ([[1, 2]], [[3]])
    assert three.asked == []
    for name in leases:
        release(leases[name])


def test_exception_of_compute_reaches_every_waiter_and_leaves_no_trace(store: FeatureStore) -> None:
    started, gate = threading.Event(), threading.Event()
    calls = []

    def fails(keys: list[FeatureKey]) -> Mapping[FeatureKey, Features | Exception]:
        calls.append(len(keys))
        started.set()
        assert gate.wait(60)
        raise ValueError("the tower fell over")

    caught: list[str] = []

    def want() -> None:
        try:
            store.get_or_compute([key_of(1), key_of(2)], fails)
        except ValueError as exc:
            caught.append(str(exc))

    threads = [threading.Thread(target=want) for _ in range(8)]
    threads[0].start()
    assert started.wait(60)
    for thread in threads[1:]:
        thread.start()
    while sum(thread.is_alive() for thread in threads) < 8 or store.stats().counts["misses"] < 16:
        time.sleep(0.001)  # until all have looked, and wait or are about to
    gate.set()
    for thread in threads:
        thread.join(60)
    assert caught == ["the tower fell over"] * 8
    assert store.stats().num_computing == 0
    computing = Computing()
    release(store.get_or_compute([key_of(1)], computing))
    assert computing.asked == [[1]]


def test_failed_key_harms_no_other(store: FeatureStore) -> None:
    def compute(keys: list[FeatureKey]) -> Mapping[FeatureKey, Features | Exception]:
        return {
            key: ImageError("b.png", "cut short") if number_of(key) == 2 else features_of(number_of(key))
            for key in keys
        }

    keys = [key_of(1), key_of(2), key_of(3)]
    outcomes = store.outcomes(keys, compute)
    assert [type(outcome) for outcome in outcomes] == [Lease, ImageError, Lease]
    release(outcomes)
    store.put(key_of(4), features_of(4))
    with pytest.raises(ImageError, match=r"b\.png"):
        store.get_or_compute([key_of(4), key_of(2)], compute)
    # and the fixture sees that every lease was released


def test_foreign_exception_is_the_cause_of_a_store_error(store: FeatureStore) -> None:
    def compute(keys: list[FeatureKey]) -> Mapping[FeatureKey, Features | Exception]:
        raise ZeroDivisionError("bug")

    outcome = store.outcomes([key_of(1)], compute)[0]
    assert isinstance(outcome, StoreError) and isinstance(outcome.__cause__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        store.get_or_compute([key_of(1)], compute)


def test_key_that_compute_forgot_is_an_error(store: FeatureStore) -> None:
    with pytest.raises(StoreError, match="compute returned nothing"):
        store.get_or_compute([key_of(1)], lambda keys: {})


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, CancelledError])
def test_cancelled_computing_does_not_cancel_those_who_wait(
    store: FeatureStore, interruption: type[BaseException]
) -> None:
    started, gate = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def cancelled(keys: list[FeatureKey]) -> Mapping[FeatureKey, Features | Exception]:
        started.set()
        assert gate.wait(60)
        raise interruption("stop")

    def first() -> None:
        try:
            store.get_or_compute([key_of(1)], cancelled)
        except BaseException as exc:
            raised.append(exc)

    computing, leases = Computing(), []

    def other() -> None:
        leases.extend(store.get_or_compute([key_of(1)], computing))

    one = threading.Thread(target=first)
    one.start()
    assert started.wait(60)
    others = [threading.Thread(target=other) for _ in range(5)]
    for thread in others:
        thread.start()
    while store.stats().counts["misses"] < 6:
        time.sleep(0.001)
    gate.set()
    for thread in [one, *others]:
        thread.join(60)
    assert [type(exc) for exc in raised] == [interruption]
    assert len(leases) == 5 and all(is_intact(lease.features, 1) for lease in leases)
    assert computing.asked == [[1]]
    release(leases)


def test_compute_may_use_the_store_but_not_for_its_own_keys(store: FeatureStore) -> None:
    inner = Computing()

    def compute(keys: list[FeatureKey]) -> Mapping[FeatureKey, Features | Exception]:
        release(store.get_or_compute([key_of(50)], inner))
        with pytest.raises(StoreError, match="computing itself"):
            store.get_or_compute([key_of(1)], inner)
        return {key: features_of(number_of(key)) for key in keys}

    release(store.get_or_compute([key_of(1)], compute))
    assert inner.asked == [[50]]


# Names


def test_aliases_and_encoders_are_found_after_reopening(tmp_path: Path) -> None:
    with FeatureStore.open(tmp_path, disk_bytes="64MiB") as store:
        store.put_alias(b"s" * 32, b"p" * 32)
        assert store.alias(b"s" * 32) == b"p" * 32
        store.put_encoder(b"e" * 32, {"family": "tiny"})  # type: ignore[arg-type]
    with FeatureStore.open(tmp_path, disk_bytes="64MiB") as store:
        assert store.alias(b"s" * 32) == b"p" * 32
        assert store.alias(b"t" * 32) is None
        assert store.stats().num_aliases == 1
        assert store._stack.disk is not None
        assert store._stack.disk.encoders()[b"e" * 32]["description"] == {"family": "tiny"}


def test_aliases_in_memory_are_bounded() -> None:
    from featcache.aliases import Aliases

    aliases = Aliases(max_entries=3)
    for n in range(4):
        assert aliases.put(key_of(n), b"v%d" % n)
        assert aliases.get(key_of(0)) == b"v0"
    assert len(aliases) == 3
    assert aliases.get(key_of(1)) is None  # the one that was used least recently
    assert not aliases.put(key_of(0), b"v0") and aliases.put(key_of(0), b"other")


# Opening and closing


def test_closed_store_refuses_and_close_may_be_called_again(tmp_path: Path) -> None:
    before_it = set(threading.enumerate())
    store = FeatureStore.open(tmp_path, disk_bytes="64MiB")
    store.put(key_of(1), features_of(1))
    store.close()
    store.close()
    for use in (
        lambda: store.get(key_of(1)),
        lambda: store.put(key_of(1), features_of(1)),
        lambda: store.outcomes([key_of(1)], Computing()),
        lambda: store.layout(key_of(1)),
        lambda: store.tier_of(key_of(1)),
        lambda: store.alias(b"a"),
        lambda: store.put_alias(b"a", b"b"),
        lambda: store.delete(key_of(1)),
        lambda: store.flush(),
        lambda: store.stats(),
        lambda: store.check(),
    ):
        with pytest.raises(StoreClosedError):
            use()
    assert set(threading.enumerate()) <= before_it
    with FeatureStore.open(tmp_path, disk_bytes="64MiB") as again:  # and close has written it
        assert again.tier_of(key_of(1)) == "disk"


def test_close_ends_a_put_that_waits(tmp_path: Path) -> None:
    store = FeatureStore.open(tmp_path, host_bytes="64MiB", disk_bytes="64MiB", queue_bytes="1MiB")
    assert store._stack.backlog.enter(MIB, wait=False)  # as a disk that doesn't answer would leave it
    raised: list[BaseException] = []

    def put() -> None:
        try:
            store.put(key_of(1), features_of(1), wait=True)
        except StoreClosedError as exc:
            raised.append(exc)

    thread = threading.Thread(target=put)
    thread.start()
    while not store.stats().counts["puts"]:
        time.sleep(0.001)
    store.close()
    thread.join(60)
    assert len(raised) == 1


def test_use_after_fork_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    with FeatureStore.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        store.put(key_of(1), features_of(1))
        store.flush()
        child = os.fork()
        if child == 0:  # pragma: no cover
            code = 1
            try:
                store.get(key_of(1))
            except StoreClosedError as exc:
                code = 0 if "fork" in str(exc) else 2
            store.close()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        store.put(key_of(2), features_of(2))
        store.flush()
        assert store.verify().is_clean


def test_two_stores_of_one_path_in_one_process_share_it(tmp_path: Path) -> None:
    with (
        FeatureStore.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as one,
        FeatureStore.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as two,
    ):
        one.put(key_of(1), features_of(1))
        one.flush()
        lease = two.get(key_of(1))
        assert lease is not None and lease.tier == "disk" and is_intact(lease.features, 1)
        lease.release()
        one.close()
        assert two.tier_of(key_of(1)) == "host"
        two.put(key_of(2), features_of(2))
        two.flush()


def test_all_is_found_in_a_new_process_with_another_hash_seed(tmp_path: Path) -> None:
    """Keys hold nothing of the process: sglang #27619 hit 3 % after a restart."""
    script = """
import sys
sys.path[:0] = [sys.argv[2]]
from tier_contract import features_of, is_intact, key_of
from featcache import FeatureStore
from featcache.keys import alias_key, encoder_fingerprint, feature_key, PixelDigest
with FeatureStore.open(sys.argv[1], disk_bytes="64MiB") as store:
    print(hash("featcache"), end=" ")
    for number in range(20):
        configs = {"b": {"y": 1, "x": number}}
        print_ = encoder_fingerprint(family="tiny", layout_version=1, configs=configs, weights=[])
        key = feature_key(print_, PixelDigest(key_of(number)), {"max_pixels": 7, "min_pixels": None})
        lease = store.get(key)
        if lease is None:
            store.put(key, features_of(number))
        print("miss" if lease is None else is_intact(lease.features, number), end=" ")
"""
    outputs = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(done.stdout.split())
    assert outputs[0][0] != outputs[1][0]
    assert outputs[0][1:] == ["miss"] * 20
    assert outputs[1][1:] == ["True"] * 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_bytes": "lots"}, "host_bytes: 'lots'"),
        ({"disk_bytes": -1}, "disk_bytes: -1"),
        ({"queue_bytes": "1XB"}, "queue_bytes"),
        ({"policy": "fifo"}, "policy: 'fifo'; there are s3fifo, lru"),
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"disk_bytes": 1000}, "disk_bytes"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FeatureStore.open(tmp_path, **settings)  # type: ignore[arg-type]


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(ConfigError, match="path: empty"):
        FeatureStore.open("")


def test_bad_key_is_refused(memory: FeatureStore) -> None:
    with pytest.raises(ConfigError, match="5 bytes; a feature key has 32"):
        memory.put(b"short", features_of(1))


def test_stats_are_json(store: FeatureStore) -> None:
    import json

    store.put(key_of(1), features_of(1))
    store.flush()
    doc = json.loads(json.dumps(store.stats().to_json()))
    assert doc["host"]["num_entries"] == 1 and doc["disk"]["entries"] == 1
    assert doc["puts"] == 1 and doc["device"] is None


# Under load


@pytest.mark.parametrize("policy", ["s3fifo", "lru"])
def test_many_threads_of_all_kinds_of_use_lose_and_mix_up_nothing(tmp_path: Path, policy: str) -> None:
    """Threads compute, put, get and delete 60 keys in a host tier of a third of them."""
    import random

    wrong: list[object] = []
    sizes = {n: 1 + 37 * n % 160 for n in range(60)}

    def compute(keys: list[FeatureKey]) -> Mapping[FeatureKey, Features | Exception]:
        return {key: features_of(number_of(key), sizes[number_of(key)]) for key in keys}

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            numbers = [chance.randrange(60) for _ in range(chance.randint(1, 5))]
            what = chance.random()
            if what < 0.03:
                store.delete(key_of(numbers[0]))
            elif what < 0.2:
                store.put(key_of(numbers[0]), features_of(numbers[0], sizes[numbers[0]]))
            elif what < 0.5:
                for number, lease in zip(numbers, store.get_many(map(key_of, numbers)), strict=True):
                    if lease is not None:
                        if not is_intact(lease.features, number):
                            wrong.append(number)
                        lease.release()
            else:
                for number, lease in zip(
                    numbers, store.get_or_compute(list(map(key_of, numbers)), compute), strict=True
                ):
                    if not is_intact(lease.features, number) or lease.layout.num_tokens != sizes[number]:
                        wrong.append(number)
                    lease.release()

    with FeatureStore.open(
        tmp_path,
        host_bytes="1600KiB",
        disk_bytes="64MiB",
        queue_bytes="1MiB",
        policy=policy,  # type: ignore[arg-type]
    ) as store:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
            assert not thread.is_alive()
        store.flush()
        assert wrong == []
        assert store.check() == []
        assert store.verify().is_clean
        stats = store.stats()
        assert stats.host is not None and stats.host.held_bytes == 0 and stats.host.evicted > 50
        assert stats.num_computing == 0 and stats.backlog_bytes == 0
