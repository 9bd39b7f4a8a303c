import numpy as np
import pytest

from selfadapt.streets import CLASSES, LOOKS, SOURCE, TARGETS, VALIDATION, render
from selfadapt.streets.cars import BODIES, car
from selfadapt.streets.figures import person
from selfadapt.streets.objects import PAINTS, SceneObject
from selfadapt.streets.painter import Canvas, paint
from selfadapt.streets.scene import Street, lay_out
from selfadapt.streets.surfaces import Band

CAR, PERSON, SKY = (CLASSES.index(name) for name in ("car", "person", "sky"))


@pytest.fixture(scope="module")
def images() -> dict[str, np.ndarray]:
    """Some streets in every look, ``(N, H, W, 3)``."""
    return {
        look: np.stack([render(look, seed, 128, 256)[0] for seed in range(6)]) for look in LOOKS
    }


@pytest.fixture
def empty() -> Street:
    """A street with nothing but the ground."""
    street = lay_out(0)
    street.objects, street.shadows = street.objects[:1], []
    return street


def painted(street: Street, *objects: SceneObject) -> Canvas:
    ground = [obj for obj in street.objects if obj.rank == 0]
    street.objects = ground + list(objects)
    return paint(street, 256, 512)


def saturation(image: np.ndarray) -> float:
    return float((image.max(-1).astype(float) - image.min(-1)).mean())


def roughness(image: np.ndarray) -> float:
    sky = image[:, :8].astype(float)
    return float(np.abs(np.diff(sky, axis=2)).mean())


@pytest.mark.parametrize("look", LOOKS)
def test_the_same_seed_gives_the_same_image(look: str) -> None:
    image, label = render(look, 5, 64, 128)
    np.random.seed(1)
    again, label_again = render(look, 5, 64, 128)
    np.testing.assert_array_equal(image, again)
    np.testing.assert_array_equal(label, label_again)
    other, _ = render(look, 6, 64, 128)
    assert (image != other).mean() > 0.5


def test_all_looks_show_the_same_scene() -> None:
    for seed in range(3):
        day, label = render("day", seed, 96, 192)
        for look in set(LOOKS) - {"day"}:
            image, label_in_look = render(look, seed, 96, 192)
            np.testing.assert_array_equal(label_in_look, label)
            assert np.abs(image.astype(float) - day).mean() > 5


@pytest.mark.parametrize(("height", "width"), [(96, 192), (97, 203), (256, 512), (200, 150)])
def test_images_have_the_size_asked_for(height: int, width: int) -> None:
    for look in ("day", "night", "rain"):
        image, label = render(look, 2, height, width)
        assert image.shape == (height, width, 3)
        assert label.shape == (height, width)
        assert image.dtype == label.dtype == np.uint8
        assert label.max() < len(CLASSES)
        assert np.ptp(image) > 100


def test_every_class_is_seen_often_enough() -> None:
    counts = np.zeros((20, len(CLASSES)))
    for seed in range(20):
        _, label = render("day", seed, 64, 128)
        counts[seed] = np.bincount(label.ravel(), minlength=len(CLASSES)) / label.size
    share = dict(zip(CLASSES, counts.mean(axis=0), strict=True))
    assert min(share.values()) > 0.005
    assert max(share.values()) < 0.5
    assert share["road"] > share["sidewalk"] > share["traffic sign"]
    assert ((counts > 0).mean(axis=0) > 0.8).all()


def test_a_small_render_shows_the_same_scene() -> None:
    for seed in range(4):
        _, large = render("day", seed, 256, 512)
        _, small = render("day", seed, 128, 256)
        assert (large[1::2, 1::2] == small).mean() > 0.95


def test_looks_are_divided_into_source_validation_and_targets() -> None:
    assert {SOURCE, VALIDATION, *TARGETS} == set(LOOKS)
    assert len(TARGETS) == len(LOOKS) - 2 >= 4


def test_every_paint_has_colors_in_every_look() -> None:
    for look in LOOKS.values():
        assert {*PAINTS, "shutter"} - set(look.palette) == {"gable"}


def test_looks_differ_as_their_names_say(images: dict[str, np.ndarray]) -> None:
    brightness = {look: image.mean() for look, image in images.items()}
    assert brightness["night"] < brightness["dusk"] < brightness["day"] < brightness["haze"]
    contrast = {look: image.std() for look, image in images.items()}
    assert max(contrast["haze"], contrast["rain"]) < contrast["day"]
    color = {look: saturation(image) for look, image in images.items()}
    assert max(color["rain"], color["haze"]) < color["day"] < color["south"]
    warmth = {look: image[..., 0].mean() / image[..., 2].mean() for look, image in images.items()}
    assert min(warmth["south"], warmth["old camera"]) > warmth["day"]
    assert roughness(images["old camera"]) > 1.5 * roughness(images["day"])


def test_haze_takes_the_far_more_than_the_near() -> None:
    street = lay_out(4)
    image, label = render("haze", 4, 256, 512)
    depth = Band(street, paint(street, 256, 512), slice(None)).depth
    veil = np.abs(image - np.array(LOOKS["haze"].haze_color)).mean(axis=2)
    solid = label != SKY
    assert veil[solid & (depth > 40)].mean() < 0.6 * veil[solid & (depth < 10)].mean()


def test_a_car_three_times_as_far_is_a_third_as_large(empty: Street) -> None:
    sizes = []
    for z in (10, 30):
        rows, columns = np.nonzero(painted(empty, car(0, z, 0, 0.5)).label == CAR)
        sizes.append((np.ptp(rows) + 1, np.ptp(columns) + 1))
    (tall, wide), (far_tall, far_wide) = sizes
    assert tall / far_tall == pytest.approx(3, rel=0.15)
    assert wide / far_wide == pytest.approx(3, rel=0.25)


def test_a_person_is_as_tall_in_the_image_as_the_lens_says(empty: Street) -> None:
    someone = person(empty.camera.x, 0, 12, np.random.default_rng(0))
    tall = np.ptp(np.concatenate(someone.points)[:, 1])
    rows, _ = np.nonzero(painted(empty, someone).label == PERSON)
    assert np.ptp(rows) + 1 == pytest.approx(empty.camera.focal * 512 * tall / 12, abs=2.5)


def test_the_nearer_hides_the_farther(empty: Street) -> None:
    x = empty.camera.x
    near, far = car(x, 10, 3, 0.2), car(x, 20, 0, 0.7)
    for objects in ((near, far), (far, near)):
        canvas = painted(empty, *objects)
        seen = canvas.faces[np.unique(canvas.face_index)]
        tints = seen["tint"][seen["paint"] == PAINTS.index("body")]
        assert 0.2 in tints
        assert 0.7 not in tints


def test_the_ground_lies_where_the_camera_height_says(empty: Street) -> None:
    canvas, camera = painted(empty), empty.camera
    band = Band(empty, canvas, slice(None))
    road = canvas.label == CLASSES.index("road")
    np.testing.assert_allclose(band.y[road], 0, atol=1e-3)
    below = 255 - camera.horizon * 256 + 0.5
    assert band.depth[255, 256] == pytest.approx(
        camera.height * camera.focal * 512 / below, rel=1e-3
    )


def test_cars_are_closed_bodies_that_face_outwards() -> None:
    for shape, body in enumerate(BODIES):
        obj = car(0, 0, shape, 0.5)
        points, start = np.concatenate(obj.points), 0
        middle = np.array([0, body.height / 2, body.length / 2])
        for corners, *_ in obj.faces:
            face = points[start : start + corners] - middle
            normal = np.cross(face, np.roll(face, -1, axis=0)).sum(axis=0)
            assert normal @ face.mean(axis=0) > 0
            start += corners


def test_no_sky_below_the_horizon() -> None:
    for seed in range(6):
        _, label = render("day", seed, 128, 256)
        first = int(lay_out(seed).camera.horizon * 128) + 2
        assert (label[first:] != SKY).all()


def test_an_unknown_look_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"unknown look 'knight'; did you mean 'night'\? known: day"
    ):
        render("knight", 0)


def test_a_tiny_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 16x16 pixels, got 8x768"):
        render("day", 0, height=8)
