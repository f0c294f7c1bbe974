"""The arena: one buffer and the book of its free parts."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featcache.errors import ConfigError
from featcache.eviction import make_policy
from featcache.settings import PolicyName
from featcache.tiers.arena import ALIGNMENT, Allocator, Arena, Block, rounded

CAPACITY = 64 * ALIGNMENT

steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 20 * ALIGNMENT)),
        st.tuples(st.just("free"), st.integers(0, 1 << 30)),
    ),
    max_size=120,
)


class Model:
    """The plainest allocator that can be: a list with the owner of each grain."""

    def __init__(self) -> None:
        self.grains: list[int | None] = [None] * (CAPACITY // ALIGNMENT)

    def runs(self) -> list[tuple[int, int]]:
        """(length, begin) of each free run."""
        runs, begin = [], None
        for i, owner in enumerate([*self.grains, -1]):
            if owner is None and begin is None:
                begin = i
            if owner is not None and begin is not None:
                runs.append((i - begin, begin))
                begin = None
        return runs


@given(steps)
def test_allocator_agrees_with_the_plain_model(commands: list[tuple[str, int]]) -> None:
    allocator, model = Allocator(CAPACITY), Model()
    live: dict[int, Block] = {}
    for number, (command, argument) in enumerate(commands):
        if command == "free":
            if not live:
                continue
            owner = sorted(live)[argument % len(live)]
            allocator.free(live.pop(owner))
            model.grains = [None if grain == owner else grain for grain in model.grains]
        else:
            grains = max(1, -(-argument // ALIGNMENT))
            fitting = sorted(run for run in model.runs() if run[0] >= grains)
            block = allocator.allocate(argument)
            assert (block is None) == (not fitting)
            if block is not None:
                assert block == Block(fitting[0][1] * ALIGNMENT, grains * ALIGNMENT)
                begin = fitting[0][1]
                model.grains[begin : begin + grains] = [number] * grains
                live[number] = block
        assert allocator.check(list(live.values())) == []
        assert [(hole.size, hole.offset) for hole in allocator.holes()] == [
            (length * ALIGNMENT, begin * ALIGNMENT) for length, begin in model.runs()
        ]
        assert allocator.largest_hole == max((length for length, _ in model.runs()), default=0) * ALIGNMENT
    for block in live.values():
        allocator.free(block)
    assert allocator.holes() == [Block(0, CAPACITY)]
    assert allocator.used_bytes == 0


def test_check_sees_overlap_gap_and_wrong_account() -> None:
    allocator = Allocator(CAPACITY)
    block = allocator.allocate(3 * ALIGNMENT)
    assert block is not None
    assert allocator.check([block]) == []
    assert any("gap" in problem for problem in allocator.check([]))
    assert any("overlap" in problem for problem in allocator.check([block, Block(0, ALIGNMENT)]))
    allocator.used_bytes += 1
    assert allocator.check([block]) == [f"arena: {3 * ALIGNMENT + 1} bytes accounted, {3 * ALIGNMENT} live"]


def test_sizes_are_rounded_to_the_grain_and_capacity_down() -> None:
    assert [rounded(n) for n in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    assert Allocator(1023).capacity == 512
    assert Allocator(511).allocate(1) is None


@pytest.mark.parametrize("name", ["s3fifo", "lru"])
def test_ninety_percent_is_usable_after_a_hundred_thousand_allocations(name: PolicyName) -> None:
    """Records of 0.25 to 14 MiB, some asked for again, in 1 GiB: how full it is when one finds no room."""
    capacity, chance = 1 << 30, random.Random(1)
    allocator, policy = Allocator(capacity), make_policy(name, capacity)
    live: dict[bytes, Block] = {}
    recent: OrderedDict[bytes, None] = OrderedDict()
    fullness = []
    for number in range(100_000):
        for key in chance.sample(list(recent), min(len(recent), 1)):
            policy.touch(key)
        size = int((1 << 18) * 56 ** chance.random())
        block = allocator.allocate(size)
        if block is None:
            fullness.append(allocator.used_bytes / capacity)
            for victim in policy.victims():
                policy.remove(victim)
                recent.pop(victim, None)
                allocator.free(live.pop(victim))
                if (block := allocator.allocate(size)) is not None:
                    break
        assert block is not None
        key = number.to_bytes(4, "big")
        live[key] = block
        policy.add(key, block.size)
        recent[key] = None
        if len(recent) > 32:
            recent.popitem(last=False)
    late = fullness[len(fullness) // 2 :]
    assert sum(late) / len(late) >= 0.9
    assert allocator.check(list(live.values())) == []


def test_arena_gives_views_of_one_buffer() -> None:
    arena = Arena(8 * ALIGNMENT)
    first, second = arena.allocator.allocate(700), arena.allocator.allocate(100)
    assert first is not None and second is not None
    arena.memory(first, 700)[:] = b"a" * 700
    arena.memory(second, 100)[:] = b"b" * 100
    assert arena.tensor(first, 700).unique().tolist() == [ord("a")]
    assert arena.tensor(second, 100).unique().tolist() == [ord("b")]
    assert arena.buffer.untyped_storage().nbytes() == 8 * ALIGNMENT


def test_memory_outlives_the_arena() -> None:
    arena = Arena(8 * ALIGNMENT)
    block = arena.allocator.allocate(512)
    assert block is not None
    tensor = arena.tensor(block, 512)
    tensor.fill_(7)
    arena.close()
    del arena
    assert torch.equal(tensor, torch.full((512,), 7, dtype=torch.uint8))


def test_untouched_arena_takes_no_memory() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * 4096

    before = resident()
    arena = Arena(4 << 30)
    assert arena.allocator.capacity == 4 << 30
    assert resident() - before < 64 << 20


def test_more_memory_than_there_can_be_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="host_bytes"):
        Arena(1 << 60)
