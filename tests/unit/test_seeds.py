"""Streams: one for each path, the same on every machine and in every version."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.seeds import (
    CPU_ENTROPY,
    CUDA_ENTROPY,
    build_cpu_state,
    build_cuda_state,
    derive,
    make_secret_generator,
    make_torch_generator,
    seed_torch,
)

WORDS = st.characters(exclude_characters="/")  # a purpose is a plain word
PATHS = st.lists(st.one_of(st.text(WORDS, max_size=4), st.integers(-3, 40)), max_size=4)


def first(*path: str | int, seed: int = 0) -> int:
    return int(derive(seed, *path).integers(2**62))


def read_words(generator: torch.Generator) -> np.ndarray:
    """The 624 words of the Mersenne twister in a generator that has drawn nothing."""
    return generator.get_state().numpy()[24 : 24 + 8 * 624].view(np.uint64)


def draw(generator: torch.Generator, count: int = 4) -> list[float]:
    return torch.randn(count, generator=generator).tolist()


def make_seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_streams_are_what_they_were():
    """Recorded once: another number here is another result of every run with the same seed."""
    assert derive(0, "order", 3, 1).integers(2**62, size=2).tolist() == [2449667145544980995, 2743441278921201082]
    assert int(derive(7, "init").integers(2**63 - 1)) == 3818728880742941966


@given(PATHS, PATHS, st.integers(0, 5), st.integers(0, 5))
def test_paths_that_differ_give_streams_that_differ(one, two, seed, other):
    equal = (seed, one) == (other, two)
    assert (first(*one, seed=seed) == first(*two, seed=other)) == equal


def test_a_path_is_not_its_text():
    ways = [("a", 1), ("a", "1"), ("a1",), ("a/1",), ("a", 11), ("a", 1, 1), (1, "a")]
    for one, two in itertools.combinations(ways, 2):
        assert first(*one) != first(*two), (one, two)


def test_a_stream_can_be_had_again():
    assert np.array_equal(derive(3, "noise", 2).normal(size=5), derive(3, "noise", 2).normal(size=5))


def test_torch_follows_the_stream():
    def drawn() -> torch.Tensor:
        return torch.rand(3, generator=make_torch_generator(derive(0, "a")))

    assert torch.equal(drawn(), drawn())
    rng = derive(0, "a")
    assert not torch.equal(
        torch.rand(3, generator=make_torch_generator(rng)), torch.rand(3, generator=make_torch_generator(rng))
    )


def test_torchs_global_stream_can_be_set():
    seed_torch(derive(0, "torch"))
    one = torch.rand(3)
    torch.rand(5)
    seed_torch(derive(0, "torch"))
    assert torch.equal(torch.rand(3), one)
    seed_torch(derive(1, "torch"))
    assert not torch.equal(torch.rand(3), one)


# A torch generator has all the entropy that its state can hold


def test_streams_whose_next_numbers_share_their_low_half_differ():
    """`manual_seed` reads the low 32 bits alone, in which two of these 200,000 streams agree."""
    one, two = ("noise", 369, 85), ("noise", 353, 104)
    numbers = [int(derive(0, *path).integers(2**63 - 1)) for path in (one, two)]
    assert numbers[0] != numbers[1]
    assert numbers[0] % 2**32 == numbers[1] % 2**32
    assert draw(make_seeded(numbers[0])) == draw(make_seeded(numbers[1]))

    assert draw(make_torch_generator(derive(0, *one))) != draw(make_torch_generator(derive(0, *two)))
    seed_torch(derive(0, *one))
    value = torch.rand(4)
    seed_torch(derive(0, *two))
    assert not torch.equal(torch.rand(4), value)


def test_no_search_over_low_halves_finds_a_stream():
    """The candidates are around the seed that would give the stream if only its low half counted."""
    target = draw(make_torch_generator(derive(0, "noise", 1)))
    low = int(derive(0, "noise", 1).integers(2**63 - 1)) % 2**32
    assert not [seed for seed in range(low - 512, low + 512) if draw(make_seeded(seed)) == target]


def find_words_that_follow(words: np.ndarray) -> np.ndarray:
    """Whether each word but the first is what seeding by a number makes of the word before it."""
    before, index = words[:-1], np.arange(1, len(words), dtype=np.uint64)
    return words[1:] == (np.uint64(1812433253) * (before ^ (before >> np.uint64(30))) + index) % np.uint64(2**32)


def make_global_generator() -> torch.Generator:
    seed_torch(derive(0, "noise", 1))
    return torch.default_generator


@pytest.mark.parametrize(
    "make",
    [lambda: make_torch_generator(derive(0, "noise", 1)), make_global_generator, lambda: make_secret_generator("cpu")],
    ids=["seeded", "global", "secret"],
)
def test_a_state_does_not_follow_from_its_first_word(make):
    """It does after `manual_seed`, so that 2**32 states are all that there are to search."""
    assert find_words_that_follow(read_words(make_seeded(3))).all()
    assert find_words_that_follow(read_words(make())).sum() <= 1


def test_the_stream_is_the_twisters_for_these_words():
    """NumPy has the same generator: an oracle for the layout of torch's state, and for its first draw."""
    entropy = derive(0, "words").bytes(CPU_ENTROPY)
    generator = torch.Generator()
    torch.randn(1, generator=generator)  # leaves a second normal behind, which must not come out
    generator.set_state(build_cpu_state(entropy))
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": np.frombuffer(entropy, "<u4"), "pos": 624}}
    drawn = torch.randint(0, 2**16, (2000,), generator=generator)
    assert drawn.tolist() == (twister.random_raw(2000) % 2**16).tolist()


def test_no_normal_is_left_over_from_before():
    fresh, used = torch.Generator(), torch.Generator()
    torch.randn(1, generator=used)
    for generator in (fresh, used):
        generator.set_state(build_cpu_state(derive(0, "normals").bytes(CPU_ENTROPY)))
    assert draw(fresh, 1) == draw(used, 1)
    seed_torch(derive(0, "torch"))
    value = torch.randn(1)  # one of two
    seed_torch(derive(0, "torch"))
    assert torch.equal(torch.randn(1), value)


def test_states_look_uniform_and_two_paths_differ_in_half_of_their_bits():
    def bits(*path: str | int) -> np.ndarray:
        words = read_words(make_torch_generator(derive(0, *path)))
        assert words.max() < 2**32
        return np.unpackbits(words.astype("<u4").view(np.uint8))

    one, two = bits("a", 1), bits("a", 2)
    spread = 4 * 0.5 / np.sqrt(len(one))  # four standard deviations
    assert abs(one.mean() - 0.5) < spread
    assert abs((one ^ two).mean() - 0.5) < spread
    words = read_words(make_torch_generator(derive(0, "a", 1)))
    assert len(np.unique(words)) > 620, "words repeat"


def test_secret_generators_differ_and_give_standard_normals():
    made = [torch.randn(50_000, generator=make_secret_generator("cpu"), dtype=torch.float64) for _ in range(4)]
    assert len({float(drawn[0]) for drawn in made}) == 4
    drawn = torch.cat(made)
    # Six standard deviations: fails in one of five hundred million runs.
    assert abs(float(drawn.mean())) < 6 / len(drawn) ** 0.5
    assert abs(float(drawn.var()) - 1) < 6 * (2 / len(drawn)) ** 0.5
    assert abs(float((made[0] * made[1]).mean())) < 6 / len(made[0]) ** 0.5


def test_a_cuda_state_is_a_seed_and_an_offset():
    def read(entropy: bytes) -> tuple[int, int]:
        state = build_cuda_state(entropy)
        assert (state.dtype, tuple(state.shape)) == (torch.uint8, (16,))
        seed, offset = state.numpy().view(np.uint64)
        return int(seed), int(offset)

    assert read(bytes(CUDA_ENTROPY)) == (0, 0)
    assert read(b"\xff" * CUDA_ENTROPY) == (2**64 - 1, 2**60 - 4), "an offset is a multiple of four"
    one, two = (read(derive(0, "cuda", i).bytes(CUDA_ENTROPY)) for i in range(2))
    assert one[0] != two[0]
    assert one[1] != two[1]
    assert one[1] % 4 == two[1] % 4 == 0


@pytest.mark.cuda
def test_generators_of_a_gpu_take_their_whole_state():
    made = [make_torch_generator(derive(0, "a"), "cuda"), make_torch_generator(derive(0, "a"), "cuda")]
    drawn = [torch.randn(4, generator=generator, device="cuda") for generator in (*made, make_secret_generator("cuda"))]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
