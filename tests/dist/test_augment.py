"""Augmentation: keyed numbers, every operation against torchvision, rows that depend on themselves alone."""

from __future__ import annotations

import doctest
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

try:  # at the top, since importing it sets an environment variable of torch's compiler
    from torchvision.transforms import v2
except ImportError:
    v2 = None
from phalanx.dist import augment, augment_draws, augment_policies
from phalanx.dist.augment import (
    Cutout,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    Shift,
    Transform,
    augment_batch,
    check_transforms,
)
from phalanx.dist.augment_draws import Draws, mix
from phalanx.dist.augment_policies import OPERATIONS, RandAugment, TrivialAugment, operation

needs_torchvision = pytest.mark.skipif(
    v2 is None, reason="torchvision, which results are compared with, is missing"
)

TRANSFORMS: list[Transform] = [
    RandomCrop(3), RandomCrop(2, mode="reflect"), Shift(2, 3, fill=1), HorizontalFlip(), Cutout(5), Normalize(0.4, 0.2),
    RandAugment(3, magnitude=15), TrivialAugment(),
]  # fmt: skip


def _images(
    count: int, channels: int = 1, height: int = 19, width: int = 23, dtype: Any = torch.uint8
) -> Tensor:
    """Noise, with a flat, a dark and a narrow-ranged image among it."""
    generator = torch.Generator().manual_seed(count * 100 + channels)
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    images[1::4] = images[1::4] // 3 + 40
    if count > 2:
        images[2] = 0
    return images if dtype == torch.uint8 else (images / 255).to(dtype)


@pytest.mark.parametrize("module", [augment, augment_draws, augment_policies])
def test_examples_in_docstrings(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


# Draws


def test_the_mixer_is_splitmix64() -> None:
    gamma = 0x9E3779B97F4A7C15
    states = np.array([gamma * step % 2**64 for step in (1, 2, 3)], dtype=np.uint64)
    assert [int(word) for word in mix(states)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_a_row_of_draws_depends_on_key_position_and_draw_index_alone() -> None:
    positions = np.array([0, 5, 2**40, 7, 5])
    whole = Draws(3, positions)
    first, second = whole.words(), whole.words()
    for row, position in enumerate(positions):
        alone = Draws(3, np.array([position]))
        assert alone.words()[0] == first[row]
        assert alone.words()[0] == second[row]
    assert first[1] == first[4]
    assert len({*first.tolist(), *second.tolist(), *Draws(4, positions).words().tolist()}) == 12
    assert Draws(-1, positions).words().tolist() == Draws(2**64 - 1, positions).words().tolist()


def test_draws_are_even_and_neighbours_are_unrelated() -> None:
    count, high = 20000, 10
    draws = Draws(11, np.arange(count))
    one, two = draws.integers(high), draws.integers(high)
    for table in (np.bincount(one, minlength=high), np.bincount(one * high + two, minlength=high**2)):
        expected = count / len(table)
        chi_square = ((table - expected) ** 2 / expected).sum()
        assert chi_square < len(table) - 1 + 5 * math.sqrt(2 * (len(table) - 1))
    numbers = draws.uniform()
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 5 / math.sqrt(12 * count)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 5 / math.sqrt(count)


@pytest.mark.parametrize("high", [0, -1, 2**31 + 1])
def test_a_range_that_cannot_be_drawn_from_is_refused(high: int) -> None:
    with pytest.raises(ValueError, match=r"(?s)high=.*Fix:"):
        Draws(0, np.arange(3)).integers(high)


# Rows


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(
    transform: Transform, dtype: Any, channels: int
) -> None:
    images, positions = _images(41, channels, dtype=dtype), np.arange(41) * 13
    before = images.clone()
    whole = augment_batch(images, [transform], key=9, positions=positions)
    assert torch.equal(images, before), "the input was changed"
    order = np.random.default_rng(0).permutation(41)
    start = 0
    for size in (1, 2, 7, 31):  # odd sizes: vectorised loops have a remainder
        rows = order[start : start + size]
        part = augment_batch(images[torch.from_numpy(rows)], [transform], key=9, positions=positions[rows])
        assert torch.equal(part, whole[torch.from_numpy(rows)]), f"a batch of {size}"
        start += size


@pytest.mark.parametrize("transform", [one for one in TRANSFORMS if not isinstance(one, Normalize)], ids=repr)
def test_key_position_and_place_in_the_sequence_change_the_result(transform: Transform) -> None:
    images, positions = _images(1).expand(40, -1, -1, -1), np.arange(40)
    one = augment_batch(images, [transform], key=1, positions=positions)
    assert len({row.numpy().tobytes() for row in one}) > 1
    assert not torch.equal(one, augment_batch(images, [transform], key=2, positions=positions))
    still = RandomCrop(0)
    assert not torch.equal(one, augment_batch(images, [still, transform], key=1, positions=positions))
    assert torch.equal(one, augment_batch(images, [transform, still], key=1, positions=positions))


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_an_empty_batch_stays_empty(transform: Transform) -> None:
    images = _images(4)[:0]
    assert augment_batch(images, [transform], key=1, positions=np.arange(0)).shape == images.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_rows_on_a_gpu_are_those_of_the_cpu(transform: Transform, dtype: Any) -> None:
    for channels in (1, 3):
        images, positions = _images(64, channels, dtype=dtype), np.arange(64)
        expected = augment_batch(images, [transform], key=4, positions=positions)
        found = augment_batch(images.cuda(), [transform], key=4, positions=positions)
        assert torch.equal(found.cpu(), expected)


# Crop, shift, flip, cutout, normalise


@pytest.mark.parametrize(("channels", "dtype"), [(1, torch.uint8), (3, torch.uint8), (2, torch.float32)])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_random_crop_is_padding_and_a_window(mode: Any, channels: int, dtype: Any) -> None:
    images = _images(30, channels, dtype=dtype)
    crop = RandomCrop(4, mode=mode, fill=0 if mode == "reflect" else 9)
    top, left = crop.draw(Draws(1, np.arange(30)), 19, 23)
    padded = functional.pad(images.double(), (4, 4, 4, 4), mode=mode, value=crop.fill or None).to(dtype)
    for row, found in enumerate(crop.apply(images, (top, left))):
        window = padded[row, :, top[row] : top[row] + 19, left[row] : left[row] + 23]
        assert torch.equal(found, window)
    many = crop.draw(Draws(2, np.arange(2000)), 19, 23)
    assert [sorted(set(values.tolist())) for values in many] == [list(range(9))] * 2


def test_shift_moves_down_and_right() -> None:
    image = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    moved = Shift(1, 2, fill=99).apply(image, (np.array([1]), np.array([-2])))
    assert moved.tolist() == [[[[99, 99, 99], [3, 99, 99], [6, 99, 99]]]]
    down, right = Shift(1, 2).draw(Draws(2, np.arange(500)), 3, 3)
    assert sorted(set(down.tolist())) == [-1, 0, 1]
    assert sorted(set(right.tolist())) == [-2, -1, 0, 1, 2]


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_flip_mirrors_its_share_of_images(p: float) -> None:
    images, flip = _images(2000, height=2, width=3), HorizontalFlip(p)
    (chosen,) = flip.draw(Draws(5, np.arange(2000)), 2, 3)
    assert abs(chosen.mean() - p) <= 5 * math.sqrt(p * (1 - p) / 2000)
    for row, found in enumerate(flip.apply(images, (chosen,))):
        assert torch.equal(found, images[row].flip(-1) if chosen[row] else images[row])


@pytest.mark.parametrize("size", [1, 4, 5, 60])
def test_cutout_blanks_one_square_cut_off_at_the_edges(size: int) -> None:
    images, cutout = torch.ones(300, 3, 19, 23), Cutout(size, fill=0.25)
    top, left = cutout.draw(Draws(5, np.arange(300)), 19, 23)
    expected = images.clone()
    for row in range(300):
        expected[row, :, max(0, top[row]) : top[row] + size, max(0, left[row]) : left[row] + size] = 0.25
    assert torch.equal(cutout.apply(images, (top, left)), expected)
    assert sorted(set((top + size // 2).tolist())) == list(range(19))
    assert sorted(set((left + size // 2).tolist())) == list(range(23))


@needs_torchvision
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_normalize_is_that_of_torchvision(dtype: Any) -> None:
    images, mean, std = _images(9, 3, dtype=dtype), [0.1, 0.5, 0.7], [0.3, 0.2, 0.1]
    found = Normalize(mean, std).apply(images, ())
    wanted_type = torch.float64 if dtype == torch.float64 else torch.float32
    scaled = v2.functional.to_dtype(images, wanted_type, scale=True)
    assert found.dtype == wanted_type
    torch.testing.assert_close(found, v2.functional.normalize(scaled, mean, std), rtol=0, atol=2e-6)


# Operations against torchvision

MAGNITUDES = {
    "shear_x": 0.3, "shear_y": 0.3, "translate_x": 7.0, "translate_y": 7.0, "rotate": 131.0, "brightness": 0.9,
    "color": 0.9, "contrast": 0.9, "sharpness": 0.9, "posterize": 3, "solarize": 0.6,
}  # fmt: skip
# Share of pixels that may differ, by one level of 255: torchvision multiplies and adds in one rounding where the
# processor can, and takes floors of that.
ONE_LEVEL = {"color": 0.05, "contrast": 0.01, "sharpness": 0.01}
# Share of pixels that may show a neighbour: where a map hits the middle between two pixels.
NEIGHBOUR = {"shear_x": 0.01, "shear_y": 0.01, "rotate": 0.01}


def _torchvision(name: str, image: Tensor, magnitude: float) -> Tensor:
    """What torchvision's RandAugment does to one image, in its public functions."""
    f = v2.functional
    degrees = math.degrees(math.atan(magnitude))
    result = {
        "identity": lambda: image,
        "shear_x": lambda: f.affine(image, 0.0, [0, 0], 1.0, [degrees, 0.0], center=[0, 0]),
        "shear_y": lambda: f.affine(image, 0.0, [0, 0], 1.0, [0.0, degrees], center=[0, 0]),
        "translate_x": lambda: f.affine(image, 0.0, [int(magnitude), 0], 1.0, [0.0, 0.0]),
        "translate_y": lambda: f.affine(image, 0.0, [0, int(magnitude)], 1.0, [0.0, 0.0]),
        "rotate": lambda: f.rotate(image, magnitude),
        "brightness": lambda: f.adjust_brightness(image, 1 + magnitude),
        "color": lambda: f.adjust_saturation(image, 1 + magnitude),
        "contrast": lambda: f.adjust_contrast(image, 1 + magnitude),
        "sharpness": lambda: f.adjust_sharpness(image, 1 + magnitude),
        "posterize": lambda: f.posterize(image, int(magnitude)),
        "solarize": lambda: f.solarize(image, magnitude * (255 if image.dtype == torch.uint8 else 1)),
        "autocontrast": lambda: f.autocontrast(image),
        "equalize": lambda: f.equalize(image),
    }[name]()
    assert isinstance(result, Tensor)
    return result


@needs_torchvision
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_torchvision(name: str, channels: int) -> None:
    signs = (1,) if name in ("posterize", "solarize") or name not in MAGNITUDES else (1, -1)
    for height, width in ((28, 28), (17, 31)):
        images = _images(12, channels, height, width)
        for magnitude in [sign * MAGNITUDES.get(name, 0.0) * part for sign in signs for part in (1.0, 0.37)]:
            found = operation(name, images, magnitude)
            expected = torch.stack([_torchvision(name, image, magnitude) for image in images])
            assert found.dtype == torch.uint8
            difference = (found.int() - expected.int()).abs()
            share = (difference > 0).float().mean().item()
            assert share <= ONE_LEVEL.get(name, NEIGHBOUR.get(name, 0.0)), (height, width, magnitude)
            if name in ONE_LEVEL:
                assert difference.max() <= 1


@needs_torchvision
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_floating_point_is_that_of_torchvision(name: str, channels: int) -> None:
    images, magnitude = _images(12, channels, dtype=torch.float32), MAGNITUDES.get(name, 0.0)
    found = operation(name, images, magnitude)
    expected = torch.stack([_torchvision(name, image, magnitude) for image in images])
    assert found.dtype == torch.float32
    share = ((found - expected).abs() > 1e-5).float().mean().item()
    assert share <= NEIGHBOUR.get(name, 0.0)


def test_a_quarter_turn_is_exact() -> None:
    images = _images(3, 3, 16, 16)
    assert torch.equal(operation("rotate", images, 90.0), images.rot90(1, (2, 3)))
    assert torch.equal(operation("translate_x", images, 16.0, fill=3), torch.full_like(images, 3))


def test_tiny_and_flat_images_keep_their_shape() -> None:
    for name in OPERATIONS:
        for shape in ((2, 1, 1, 1), (1, 3, 2, 5), (1, 3, 3, 1)):
            images = torch.full(shape, 77, dtype=torch.uint8)
            assert operation(name, images, MAGNITUDES.get(name, 0.0)).shape == shape
    flat = torch.full((1, 3, 5, 5), 77, dtype=torch.uint8)
    for name in ("autocontrast", "equalize", "sharpness"):
        assert torch.equal(operation(name, flat, -0.5), flat)


# Policies


def _decode(policy: RandAugment | TrivialAugment, code: int) -> tuple[str, int, float]:
    number, rest = divmod(int(code), 2 * policy.num_magnitude_bins)
    return OPERATIONS[number], rest // 2, -1.0 if rest % 2 and number < OPERATIONS.index("posterize") else 1.0


def _table(policy: RandAugment | TrivialAugment, height: int, width: int) -> Any:
    bins = policy.num_magnitude_bins
    if isinstance(policy, RandAugment):
        return augment_policies._rand_augment_table(bins, height, width)
    return augment_policies._trivial_augment_table(bins)


@needs_torchvision
@pytest.mark.parametrize("bins", [2, 10, 31])
@pytest.mark.parametrize("kind", [RandAugment, TrivialAugment])
def test_operations_and_magnitudes_are_those_of_torchvision(kind: Any, bins: int) -> None:
    theirs = v2.RandAugment if kind is RandAugment else v2.TrivialAugmentWide
    if not hasattr(theirs, "_AUGMENTATION_SPACE"):
        pytest.skip("this torchvision keeps its table elsewhere")
    space = theirs._AUGMENTATION_SPACE
    assert [name.lower() for name in space] == [name.replace("_", "") for name in OPERATIONS]
    policy = kind(num_magnitude_bins=bins, **({"magnitude": 1} if kind is RandAugment else {}))
    for ours, (name, (magnitudes_of, signed)) in zip(_table(policy, 20, 24), space.items(), strict=True):
        magnitudes = magnitudes_of(bins, 20, 24)
        expected = [0.0] * bins if magnitudes is None else magnitudes.tolist()
        assert list(ours) == pytest.approx(expected, abs=1e-5), name
        if name.startswith("Translate"):  # cut down to pixels: 15.999999 of theirs is 16 of ours
            assert [int(value) for value in ours] == [int(value + 1e-5) for value in expected]
        assert signed == (list(space).index(name) < OPERATIONS.index("posterize") and name != "Identity")


@pytest.mark.parametrize(
    "policy", [RandAugment(2, magnitude=17), RandAugment(1, 30), TrivialAugment()], ids=repr
)
def test_a_policy_does_what_its_table_says_image_by_image(policy: Any) -> None:
    images, table = _images(200, 3, 20, 24), _table(policy, 20, 24)
    (codes,) = policy.draw(Draws(1, np.arange(200)), 20, 24)
    found = policy.apply(images, (codes,))
    seen = set()
    for row, image in enumerate(images):
        expected = image[None]
        for code in codes[row]:
            name, place, sign = _decode(policy, code)
            expected = operation(name, expected, sign * table[OPERATIONS.index(name)][place])
            seen.add(name)
        assert torch.equal(found[row], expected[0]), [_decode(policy, code) for code in codes[row]]
    assert seen == set(OPERATIONS)


def test_a_policy_draws_operations_directions_and_strengths_evenly() -> None:
    (codes,) = RandAugment(2, magnitude=4).draw(Draws(8, np.arange(7000)), 9, 9)
    decoded = [_decode(RandAugment(), code) for code in codes.reshape(-1)]
    counts = np.array([sum(name == one[0] for one in decoded) for name in OPERATIONS])
    assert ((counts - 1000) ** 2 / 1000).sum() < 13 + 5 * math.sqrt(26)
    assert {place for _, place, _ in decoded} == {4}
    rotations = [sign for name, _, sign in decoded if name == "rotate"]
    assert abs(np.mean(rotations)) < 5 / math.sqrt(len(rotations))
    (codes,) = TrivialAugment().draw(Draws(8, np.arange(6200)), 9, 9)
    places = np.bincount([_decode(TrivialAugment(), code)[1] for code in codes.reshape(-1)], minlength=31)
    assert ((places - 200) ** 2 / 200).sum() < 30 + 5 * math.sqrt(60)


# Bad input


class _Halving:
    """A transform of a user's that loses images."""

    def draw(self, draws: Draws, height: int, width: int) -> tuple[Any, ...]:
        return ()

    def apply(self, images: Tensor, parameters: tuple[Any, ...]) -> Tensor:
        return images[::2]


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: RandomCrop(-1), "-1"),
        (lambda: RandomCrop(1, mode="edge"), "edge"),  # type: ignore[arg-type]
        (
            lambda: RandomCrop(19, mode="reflect").apply(_images(2), (np.zeros(2, int), np.zeros(2, int))),
            "19",
        ),
        (lambda: RandomCrop(1.5), "1.5"),  # type: ignore[arg-type]
        (lambda: augment_batch(_images(2), [RandomCrop(1, fill=0.5)], key=0, positions=np.arange(2)), "0.5"),
        (lambda: augment_batch(_images(2), [Shift(1, 1, fill=256)], key=0, positions=np.arange(2)), "256"),
        (lambda: augment_batch(_images(2), [Cutout(2, fill=-1)], key=0, positions=np.arange(2)), "-1"),
        (lambda: operation("rotate", _images(2), 3.0, fill=float("nan")), "nan"),
        (lambda: Shift(-2, 0), "-2"),
        (lambda: HorizontalFlip(1.5), "1.5"),
        (lambda: HorizontalFlip(float("nan")), "nan"),
        (lambda: Cutout(0), "0"),
        (lambda: Normalize(0.5, 0.0), "0.0"),
        (lambda: Normalize([], []), "()"),
        (lambda: Normalize([0.1, 0.2], 0.5).apply(_images(2, 3), ()), "2 means"),
        (lambda: RandAugment(-1), "-1"),
        (lambda: RandAugment(magnitude=31), "31"),
        (lambda: TrivialAugment(1), "1"),
        (lambda: operation("blur", _images(2), 1.0), "blur"),
        (lambda: RandAugment().apply(_images(2, 4), (np.zeros((2, 2), int),)), "4 channels"),
        (lambda: check_transforms([RandomCrop]), "RandomCrop"),
        (lambda: check_transforms([HorizontalFlip(), torch.nn.Identity()]), "Identity"),
        (lambda: check_transforms(HorizontalFlip()), "HorizontalFlip"),  # type: ignore[arg-type]
        (lambda: augment_batch(_images(2)[:, 0], [], key=0, positions=np.arange(2)), "(2, 19, 23)"),
        (lambda: augment_batch(_images(2).int(), [], key=0, positions=np.arange(2)), "int32"),
        (lambda: augment_batch(_images(2), [], key=0, positions=np.arange(3)), "3 positions"),
        (lambda: augment_batch(_images(4), [_Halving()], key=0, positions=np.arange(4)), "2 images of 4"),
    ],
)
def test_what_cannot_work_is_refused_with_value_and_remedy(make: Any, value: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)\nFix: \S|an integer of at least \d is needed") as caught:
        make()
    assert value in str(caught.value)


_number = st.integers(-3, 40) | st.floats(-2.0, 2.0)


@given(
    kind=st.sampled_from([RandomCrop, Shift, HorizontalFlip, Cutout, Normalize, RandAugment, TrivialAugment]),
    numbers=st.lists(_number, min_size=2, max_size=2),
    is_float=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_numbers_are_refused_at_once_or_work(kind: Any, numbers: list[Any], is_float: bool) -> None:
    arguments = numbers if kind in (Shift, Normalize, RandAugment) else numbers[:1]
    try:
        transform = kind(*arguments)
    except ValueError as error:
        if "Fix: " not in str(error) and "is needed" not in str(error):
            raise
        return
    images = _images(3, 3, 7, 8, torch.float32 if is_float else torch.uint8)
    found = augment_batch(images, [transform], key=1, positions=np.arange(3))
    assert found.shape == images.shape
