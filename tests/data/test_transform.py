import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.core.rng import bits, keys_tensor, root
from fedbasin.data import Dataset, Rows
from fedbasin.data.transform import Transform, crop_and_flip

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)


def images(rows, channels=3, height=8, width=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def by_hand(raw, key, padding):
    """Crop and flip one pixel at a time, from the formulas in the docstring."""
    raw = raw.numpy()
    rows, channels, height, width = raw.shape
    out = np.zeros_like(raw)
    for i in range(rows):
        u = int(bits(key, torch.tensor(i)))
        n = 2 * padding + 1
        top, left, mirrored = u % n, u // n % n, u // n**2 % 2
        for c in range(channels):
            for y in range(height):
                for x in range(width):
                    seen = width - 1 - x if mirrored else x
                    from_y, from_x = y + top - padding, seen + left - padding
                    if 0 <= from_y < height and 0 <= from_x < width:
                        out[i, c, y, x] = raw[i, c, from_y, from_x]
    return out


@given(
    seed=st.integers(0, 2**62),
    padding=st.integers(0, 5),
    shape=st.tuples(*[st.integers(1, n) for n in (5, 3, 6, 7)]),
)
@settings(max_examples=25, deadline=None)
def test_crop_and_flip_equal_the_plain_loop(seed, padding, shape):
    raw, key = images(*shape, seed=seed), root(seed).tensor()
    assert np.array_equal(crop_and_flip(raw, key, padding).numpy(), by_hand(raw, key, padding))


def test_the_whole_transform_is_crop_flip_scale_normalise_in_that_order():
    raw, key = images(20), root(3).tensor()
    made = Transform(MEAN, STD, augment=True)(raw, key).numpy()
    mean, std = (np.array(v, dtype=np.float32)[:, None, None] for v in (MEAN, STD))
    wanted = (by_hand(raw, key, 4).astype(np.float32) / np.float32(255) - mean) / std
    assert made.dtype == np.float32
    assert np.array_equal(made, wanted)
    # The padding was black before normalisation, so its value is -mean / std.
    black = Transform(MEAN, STD, augment=True)(torch.full_like(raw, 255), key)
    for channel in range(3):
        assert black[:, channel].min() == pytest.approx(-MEAN[channel] / STD[channel], rel=1e-6)


def test_a_row_gets_the_same_draw_whatever_follows_it():
    raw, key = images(30), root(5).tensor()
    transform = Transform(MEAN, STD, augment=True)
    assert torch.equal(transform(raw, key)[:11], transform(raw[:11], key))


def test_under_vmap_every_client_gets_what_it_gets_alone():
    raw = torch.stack([images(6, seed=s) for s in range(4)])
    keys = keys_tensor([root(s) for s in range(4)])
    transform = Transform(MEAN, STD, augment=True)
    together = torch.func.vmap(transform)(raw, keys)
    for client in range(4):
        assert torch.equal(together[client], transform(raw[client], keys[client]))
    shared = torch.func.vmap(transform, in_dims=(None, 0))(raw[0], keys)
    assert torch.equal(shared[2], transform(raw[0], keys[2]))


def test_it_compiles_to_one_graph_alone_and_under_vmap():
    raw, keys = torch.stack([images(4), images(4, seed=1)]), keys_tensor([root(1), root(2)])
    together = torch.func.vmap(Transform(MEAN, STD, augment=True))
    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(raw, keys), together(raw, keys))


def test_offsets_and_flips_are_uniform_and_independent():
    # One bright pixel in the middle of each image tells where the crop lay.
    raw = torch.zeros(20_000, 1, 9, 9, dtype=torch.uint8)
    raw[:, 0, 4, 4] = 1
    rows, _, y, x = crop_and_flip(raw, root(11).tensor(), 4).nonzero(as_tuple=True)
    assert len(rows) == len(raw)
    seen = torch.bincount(y * 9 + x, minlength=81).double()
    chi_square = ((seen - 20_000 / 81) ** 2 / (20_000 / 81)).sum()
    assert 40 < chi_square < 133  # 80 degrees of freedom: outside this with probability 1e-4
    side = torch.zeros(20_000, 1, 3, 2, dtype=torch.uint8)
    side[..., 0] = 1
    flipped = crop_and_flip(side, root(12).tensor(), 0)[:, 0, 0, 1].double()
    assert abs(flipped.mean() - 0.5) < 4 * 0.5 / 20_000**0.5
    other = crop_and_flip(side, root(13).tensor(), 0)[:, 0, 0, 1].double()
    assert abs(torch.corrcoef(torch.stack([flipped, other]))[0, 1]) < 4 / 20_000**0.5


def test_without_a_key_or_without_augment_nothing_moves():
    raw, key = images(5), root(0).tensor()
    plain = Transform((0.0,) * 3, (1.0,) * 3)(raw)
    assert torch.equal(plain, raw.float() / 255)
    assert torch.equal(Transform((0.0,) * 3, (1.0,) * 3)(raw, key), plain)
    assert torch.equal(Transform((0.0,) * 3, (1.0,) * 3, augment=True)(raw), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_result_has_the_asked_dtype_and_is_rounded_once(dtype):
    raw = images(5)
    made = Transform(MEAN, STD)(raw, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mean, std = (torch.tensor(v, dtype=wide)[:, None, None] for v in (MEAN, STD))
    assert made.dtype == dtype
    assert torch.equal(made, ((raw.to(wide) / 255 - mean) / std).to(dtype))


def test_text_passes_unchanged_as_int64():
    tokens = torch.arange(160, dtype=torch.uint8).reshape(2, 80)
    made = Transform(kind="text")(tokens, root(0).tensor())
    assert made.dtype == torch.int64
    assert torch.equal(made, tokens.long())


@pytest.mark.parametrize("stored", [torch.int16, torch.int32, torch.int64])
def test_text_of_any_whole_numbers_passes_as_int64_and_no_other(stored):
    tokens = torch.tensor([[0, 3, 300], [31_000, 2, 1]], dtype=stored)
    made = Transform(kind="text")(tokens)
    assert made.dtype == torch.int64 and made.tolist() == tokens.tolist()
    with pytest.raises(ValueError, match=r"tokens must be whole numbers, got torch.float32"):
        Transform(kind="text")(tokens.float())


STORED = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", [(4,), (5, 2), (3, 2, 2)])
def test_numbers_of_a_table_pass_as_they_are_alone_under_vmap_and_compiled(stored, shape):
    raw = torch.arange(2 * 6 * int(np.prod(shape))).reshape(2, 6, *shape).to(stored)
    keys = keys_tensor([root(1), root(2)])
    transform = Transform(kind="table")
    together = torch.func.vmap(transform)
    torch.compiler.reset()  # which compiles a function for a few types only
    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    for made in (together(raw, keys), compiled(raw, keys), transform(raw[0], keys[0])[None]):
        assert made.dtype == torch.float32
        assert torch.equal(made, raw[: len(made)].float())
    assert transform(raw[0], dtype=torch.float64).dtype == torch.float64


def test_of_takes_the_datasets_own_numbers():
    some = Rows(np.zeros((1, 3, 2, 2), np.uint8), np.zeros(1, np.int64))
    data = Dataset("toy", "image", some, some, ("a",), mean=MEAN, std=STD)
    assert Transform.of(data, augment=True) == Transform(MEAN, STD, augment=True, kind="image")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean": (0.5,), "std": (0.5, 0.5)}, r"one number per channel, got \(0.5,\) and"),
        ({}, "one number per channel"),
        ({"mean": (0.5,), "std": (0.0,)}, r"std must be positive, got \(0.0,\)"),
        ({"kind": "text", "augment": True}, "cannot be set for text"),
        ({"kind": "table", "augment": True}, "cannot be set for table"),
        ({"kind": "table", "mean": (0.5,), "std": (1.0,)}, "leave them out for table"),
        ({"kind": "sound"}, "kind is 'sound': available: image, text, table"),
        ({"mean": (0.5,), "std": (1.0,), "padding": -1}, "padding must be 0 or more, got -1"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Transform(**arguments)


@pytest.mark.parametrize("raw", [images(2, channels=1), images(2).float(), images(2)[0]])
def test_other_inputs_are_refused(raw):
    with pytest.raises(ValueError, match=r"images must be uint8 \[B, 3, H, W\], got"):
        Transform(MEAN, STD)(raw)
