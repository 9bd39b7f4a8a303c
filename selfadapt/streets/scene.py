"""Layout of a street in metres, generated from a seed independently of the look.

There are three kinds of street: a narrow one in an old town, an avenue with trees, and a suburb
with low houses behind hedges. The camera is that of a car on the right-hand side of the road.
"""

from dataclasses import dataclass, field

import numpy as np

from selfadapt.streets.cars import BODIES, car
from selfadapt.streets.figures import PLATES, lamp, person, pole, sign
from selfadapt.streets.houses import NO_FACADE, Plot, facade, house
from selfadapt.streets.objects import Point, SceneObject, lying, ring, upright
from selfadapt.streets.plants import bush, hedge, tree

START, HORIZON = 2.5, 400.0
"""Near and far end of the ground, in metres ahead."""
CROSSING = 9.0
"""Width of a side street."""
KERB = 0.12
"""Height of the sidewalk."""
FAR_AWAY = 1e4
"""Position of parts that a street does not have."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Kind:
    """A kind of street: ranges of its dimensions, in metres."""

    half_road: Range
    sidewalk: Range
    plot: Range
    """Width of a house along the street."""
    height: Range
    setback: Range
    """Distance from the sidewalk to the houses."""
    gap: float
    """Probability of an open space before a house."""
    tree_every: float
    tree_height: Range
    parked: float
    """Share of occupied parking spaces."""
    gabled: float
    """Share of the houses with a pitched roof."""
    shops: float
    """Share of the houses with a shop."""
    gardens: bool = False
    """Whether there are lawns and hedges in front of the houses."""


KINDS = (
    Kind((2.9, 3.8), (1.5, 2.4), (6, 11), (7, 15), (0, 0.7), 0.08, 30, (4, 6), 0.35, 0.7, 0.45),
    Kind((5, 7), (3, 4.5), (12, 24), (11, 26), (0, 1.5), 0.1, 10, (6, 10), 0.55, 0.2, 0.45),
    Kind((3.4, 4.4), (1.6, 2.4), (8, 13), (3.5, 6.5), (3, 7), 0.6, 13, (4, 9), 0.3, 0.9, 0, True),
)


@dataclass(frozen=True)
class Camera:
    """Position and view of the camera. It has no pitch, so vertical lines stay vertical."""

    x: float
    height: float
    yaw: float
    """View direction to the right, as a slope."""
    horizon: float
    """Row of the horizon, as a fraction of the image's height."""
    focal: float
    """Focal length, as a fraction of the image's width."""

    @property
    def turn(self) -> tuple[float, float]:
        """Sine and cosine of the yaw."""
        cosine = 1 / (1 + self.yaw * self.yaw) ** 0.5
        return self.yaw * cosine, cosine


@dataclass
class Street:
    """A street: its dimensions and its objects."""

    kind: Kind
    camera: Camera
    half_road: float
    sidewalk: float
    end: float
    crossing: float
    """Start of the side street, or ``FAR_AWAY``."""
    zebra: float
    """Start of the crosswalk."""
    marked: bool
    """Whether the road has lane markings."""
    lamp_every: float
    lamp_start: float
    objects: list[SceneObject] = field(default_factory=list)
    facades: list[tuple[float, ...]] = field(default_factory=lambda: [NO_FACADE])
    shadows: list[list[Point]] = field(default_factory=list)
    """Contact shadows: polygons on the ground below objects."""
    occupied: list[tuple[float, float]] = field(default_factory=list)
    """Centres of the shadows, as (x, z)."""
    plots: list[Plot] = field(default_factory=list)

    @property
    def facade_line(self) -> float:
        """Distance of the outer edge of the sidewalk from the middle of the road."""
        return self.half_road + self.sidewalk

    @property
    def parking(self) -> float:
        """Width of the parking lane on either side."""
        return 2.1 if self.half_road > 4.6 else 0.0

    @property
    def lamp_height(self) -> float:
        """Height of the street lamps."""
        return 6.2 + 0.25 * self.half_road

    def first_lamp(self, side: int) -> float:
        """Return the position of the first lamp on a side; the sides alternate."""
        return self.lamp_start + (self.lamp_every / 2 if side > 0 else 0)

    def at_crossing(self, z: float, before: float = 0.0, after: float = 0.0) -> bool:
        """Return True if a position is within the side street or the given margins of it."""
        return self.crossing - before < z < self.crossing + CROSSING + after

    def skyline(self, side: int) -> np.ndarray:
        """Return the height of the houses on a side by metre, starting 300 m behind the camera."""
        heights = np.zeros(600, np.float32)
        plots = [plot for plot in self.plots if plot.side == side]
        for plot in plots:
            heights[300 + int(plot.near) : 300 + int(plot.far)] = plot.height
        heights[:304] = plots[0].height if plots else 0
        return heights

    def is_free(self, x: float, z: float) -> bool:
        """Return True if there is no object within a metre of a position."""
        return not any(abs(x - a) < 1 and abs(z - b) < 1 for a, b in self.occupied)

    def add(self, obj: SceneObject, shadow: list[Point] | None = None) -> None:
        """Add an object and its contact shadow."""
        self.objects.append(obj)
        if shadow is not None:
            self.shadows.append(shadow)
            xs, _, zs = zip(*shadow, strict=True)
            self.occupied.append((sum(xs) / len(shadow), sum(zs) / len(shadow)))


def lay_out(seed: int) -> Street:
    """Generate the street of a seed."""
    rng = np.random.default_rng(seed)
    street = _sample_street(rng)
    _add_ground(street)
    _add_background(street, rng)
    for side in (-1, 1):
        _add_houses(street, side, rng)
        _add_trees(street, side, rng)
        _add_parked_cars(street, side, rng)
        _add_lamps(street, side)
        _add_signs(street, side, rng)
        _add_pedestrians(street, side, rng)
    _add_moving_cars(street, rng)
    _add_crossing_people(street, rng)
    return street


def _sample_street(rng: np.random.Generator) -> Street:
    kind = KINDS[int(rng.integers(len(KINDS)))]
    half_road = rng.uniform(*kind.half_road)
    camera = Camera(
        x=half_road * 0.45 + rng.uniform(-0.5, 0.4),
        height=rng.uniform(1.35, 1.75),
        yaw=rng.uniform(-0.1, 0.1),
        horizon=rng.uniform(0.42, 0.52),
        focal=rng.uniform(0.72, 0.95),
    )
    crossing = rng.uniform(14, 45) if rng.random() < 0.5 else FAR_AWAY
    return Street(
        kind=kind,
        camera=camera,
        half_road=half_road,
        sidewalk=rng.uniform(*kind.sidewalk),
        end=rng.uniform(90, 150),
        crossing=crossing,
        zebra=rng.uniform(8, 60) if crossing == FAR_AWAY else crossing - 4.5,
        marked=rng.random() < 0.75,
        lamp_every=rng.uniform(18, 28),
        lamp_start=rng.uniform(6, 18),
    )


def _add_ground(street: Street) -> None:
    """Add the road, and sidewalks on both sides, interrupted by the side street."""
    ground = SceneObject(FAR_AWAY, rank=0)
    for side in (-1, 1):
        ground.add(_ground_strip(0, side, 0, START, HORIZON), "road", "asphalt")
        if street.crossing == FAR_AWAY:
            _add_sidewalk(street, ground, side, START, HORIZON)
        else:
            _add_sidewalk(street, ground, side, START, street.crossing)
            after = street.crossing + CROSSING
            _add_sidewalk(street, ground, side, after, HORIZON)
            edge = upright((side * street.half_road, after), (side * 300, after), 0, KERB)
            ground.add(edge, "sidewalk", "kerb", shade=0.8, layer=3)
    street.add(ground)


def _add_sidewalk(street: Street, ground: SceneObject, side: int, near: float, far: float) -> None:
    inner, outer = side * street.half_road, side * street.facade_line
    behind = ("vegetation", "grass") if street.kind.gardens else ("sidewalk", "paving")
    ground.add(_ground_strip(outer, side, KERB, near, far), *behind, layer=1)
    ground.add(lying(inner, outer, KERB, near, far), "sidewalk", "paving", layer=2)
    stone = lying(inner, inner + side * 0.16, KERB, near, far)
    ground.add(stone, "sidewalk", "kerb", layer=3)
    edge = upright((inner, near), (inner, far), 0, KERB)
    ground.add(edge, "sidewalk", "kerb", shade=0.8, layer=3)


def _ground_strip(x: float, side: int, y: float, near: float, far: float) -> list[Point]:
    """Return the ground beside a line along the street, as far as it is visible."""
    wide = side * (14.0 if near == START else 300.0)  # a wider strip would reach behind the camera
    return [(x, y, near), (wide, y, near), (side * 300.0, y, far), (x, y, far)]


def _add_background(street: Street, rng: np.random.Generator) -> None:
    """Add houses and trees beyond the end of the street."""
    x = -100.0
    while x < 100:
        width, z = rng.uniform(12, 30), street.end + rng.uniform(10, 60)
        if rng.random() < 0.5:
            obj, height = SceneObject(z), rng.uniform(8, 22)
            street.facades.append(facade(rng, height, x))
            wall, row = upright((x, z), (x + width, z), 0, height), len(street.facades) - 1
            obj.add(wall, "building", "wall", rng.random(), facade=row)
        else:
            center, radii = (x + width / 2, 0.25 * width, z), (0.6 * width, 0.42 * width)
            obj = bush(center, radii, 10, rng.random(), rng)
        obj.rank = 1
        street.add(obj)
        x += width * rng.uniform(0.5, 0.95)


def _add_houses(street: Street, side: int, rng: np.random.Generator) -> None:
    """Add houses on a side from near to far, with some open spaces between them."""
    kind = street.kind
    z = START + rng.uniform(0, 3)
    while z < street.end:
        if street.at_crossing(z, before=4):
            z = street.crossing + CROSSING + rng.uniform(0, 2)
        if rng.random() < kind.gap:
            space = rng.uniform(3, 8)
            _add_gap_plants(street, side, z + space / 2, rng)
            z += space
        far = z + rng.uniform(*kind.plot)
        if z < street.crossing < far:
            far = max(z + 3, street.crossing - 0.5)
        _add_house(street, side, z, far, rng)
        z = far
    if kind.gardens:
        _add_hedges(street, side, rng)


def _add_house(
    street: Street, side: int, near: float, far: float, rng: np.random.Generator
) -> None:
    kind = street.kind
    x = side * (street.facade_line + rng.uniform(*kind.setback))
    plot = Plot(side, x, near, far, rng.uniform(*kind.height))
    shop = rng.random() < kind.shops
    front = len(street.facades)
    street.facades.append(facade(rng, plot.height, near, abs(x - street.camera.x), shop))
    street.facades.append(facade(rng, plot.height, x))
    flank = front + 1 if rng.random() < 0.5 else 0
    gabled, awning = rng.random() < kind.gabled, shop and rng.random() < 0.6
    street.add(house(plot, front, flank, gabled, awning, rng))
    street.plots.append(plot)


def _add_gap_plants(street: Street, side: int, z: float, rng: np.random.Generator) -> None:
    """Add a tree and a bush between two houses."""
    if z < START + 4 or street.at_crossing(z, before=3, after=1):
        return
    line = street.facade_line
    plant = tree(side * (line + rng.uniform(4, 8)), z, rng.uniform(5, 10), rng.random(), rng)
    low = bush((side * (line + 3), 0.8, z), (2.2, 1.2), 12, rng.random(), rng)
    for obj in (plant, low):
        obj.rank = 1
        street.add(obj)


def _add_hedges(street: Street, side: int, rng: np.random.Generator) -> None:
    z, line = START + rng.uniform(0, 4), street.facade_line
    while z < 70:
        far = z + rng.uniform(5, 14)
        end = min(far, street.crossing - 0.5) if z < street.crossing else far
        if rng.random() < 0.7 and end > z + 1 and not street.at_crossing(z):
            height, tint = rng.uniform(0.8, 1.7), rng.uniform(0, 0.7)
            street.add(hedge(side * (line + 0.3), side * (line + 1.2), z, end, height, tint))
        z = far + rng.uniform(1, 5)


def _add_trees(street: Street, side: int, rng: np.random.Generator) -> None:
    """Add a row of similar trees along the kerb."""
    every = street.kind.tree_every * rng.uniform(0.8, 1.3)
    z, species = START + rng.uniform(4, 4 + every), rng.uniform(0, 0.75)
    x = side * (street.half_road + 0.7)
    while z < 85:
        if not street.at_crossing(z, before=3, after=2):
            height = rng.uniform(*street.kind.tree_height)
            plant = tree(x, z, height, species + rng.uniform(0, 0.25), rng)
            street.add(plant, _round_shadow(x, z, 0.3 * height))
        z += every * rng.uniform(0.8, 1.2)


def _round_shadow(x: float, z: float, radius: float) -> list[Point]:
    return [(x + right, 0.02, z + 0.8 * ahead) for right, ahead in ring(radius)]


def _add_parked_cars(street: Street, side: int, rng: np.random.Generator) -> None:
    """Add parked cars along the kerb; in a narrow street on the left only."""
    z, x = START + rng.uniform(1.5, 7), side * (street.half_road - 1.05)
    while z < 75:
        free = street.parking > 0 or side < 0
        if rng.random() < street.kind.parked and free and not street.at_crossing(z, before=8):
            _add_car(street, x, z, rng, oncoming=side < 0, parked=True)
        z += 6.2 + rng.uniform(0, 1)


def _add_moving_cars(street: Street, rng: np.random.Generator) -> None:
    """Add cars that drive ahead and, on wide roads, oncoming cars."""
    lane = street.half_road - street.parking
    z = rng.uniform(9, 30)
    while z < 80:
        if rng.random() < 0.75:
            _add_car(street, 0.5 * lane + rng.uniform(-0.2, 0.2), z, rng)
        z += rng.uniform(9, 30)
    z = rng.uniform(7, 40)
    while z < 80 and street.half_road > 3.4:
        if rng.random() < 0.7:
            x = -0.5 * lane if street.parking else -0.05 * lane
            _add_car(street, x + rng.uniform(-0.2, 0.2), z, rng, oncoming=True)
        z += rng.uniform(12, 35)


def _add_car(
    street: Street,
    x: float,
    z: float,
    rng: np.random.Generator,
    oncoming: bool = False,
    parked: bool = False,
) -> None:
    shape = int(rng.choice(len(BODIES), p=(0.35, 0.28, 0.22, 0.15)))
    half, length = 0.54 * BODIES[shape].width, BODIES[shape].length
    shadow = lying(x - half, x + half, 0.02, z - 0.25, z + length + 0.1)
    street.add(car(x, z, shape, rng.random(), oncoming, parked), shadow)


def _add_lamps(street: Street, side: int) -> None:
    z = street.first_lamp(side)
    while z < 100:
        x = side * (street.half_road + 0.4)
        street.add(lamp(x, KERB, z, street.lamp_height, -side * 1.4))
        z += street.lamp_every


def _add_signs(street: Street, side: int, rng: np.random.Generator) -> None:
    """Add traffic signs and some plain poles."""
    z = rng.uniform(8, 16)
    while z < 60:
        x = side * (street.half_road + rng.uniform(0.35, 0.6))
        if rng.random() < 0.7:
            plate = PLATES[int(rng.integers(len(PLATES)))]
            obj = sign(x, KERB, z, plate, rng.uniform(2.2, 2.8))
        else:
            obj = pole(x, KERB, z, rng.uniform(1, 5), rng.uniform(0.13, 0.25))
        if street.is_free(x, z):
            street.add(obj)
        z += rng.uniform(5, 16)


def _add_pedestrians(street: Street, side: int, rng: np.random.Generator) -> None:
    z = rng.uniform(6, 12)
    while z < 50:
        if rng.random() < 0.7:
            x = side * (street.half_road + rng.uniform(0.5, street.sidewalk - 0.2))
            height = 0 if street.at_crossing(z) else KERB
            street.add(person(x, height, z, rng), _round_shadow(x, z, 0.35))
        z += rng.uniform(2, 11)


def _add_crossing_people(street: Street, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(0, 4))):
        z = street.zebra + rng.uniform(0.5, 2.8)
        x = rng.uniform(-1, 1) * street.half_road
        if START + 4 < z < 60:
            street.add(person(x, 0, z, rng), _round_shadow(x, z, 0.35))
