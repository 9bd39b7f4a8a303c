"""What stands where: a street is laid out in metres from a seed, without knowing any look.

There are three kinds of street: an old town's narrow one, an avenue with trees, a suburb with low
houses behind hedges. The camera is a car's, on the right-hand side of the road.
"""

from dataclasses import dataclass, field

import numpy as np

from selfadapt.streets.cars import BODIES, car
from selfadapt.streets.figures import PLATES, lamp, person, pole, sign
from selfadapt.streets.houses import NO_FACADE, Plot, facade, house
from selfadapt.streets.plants import bush, hedge, tree
from selfadapt.streets.things import Point, Thing, lying, ring, upright

START, HORIZON = 2.5, 400.0
"""Where the ground begins and ends, in metres ahead."""
CROSSING = 9.0
"""Width of a side street."""
KERB = 0.12
"""Height of the sidewalk."""
NOWHERE = 1e4
"""A place for what a street does not have."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Kind:
    """A kind of street: what its measures are drawn from, in metres."""

    half_road: Range
    sidewalk: Range
    plot: Range
    """Width of a house along the street."""
    height: Range
    setback: Range
    """From the sidewalk to the houses."""
    gap: float
    """Chance of an open space before a house."""
    tree_every: float
    tree_height: Range
    parked: float
    """Share of the parking places that are taken."""
    gabled: float
    """Share of the houses with a pitched roof."""
    shops: float
    """Share of the houses with a shop."""
    gardens: bool = False
    """Whether lawns and hedges lie before the houses."""


KINDS = (
    Kind((2.9, 3.8), (1.5, 2.4), (6, 11), (7, 15), (0, 0.7), 0.08, 30, (4, 6), 0.35, 0.7, 0.45),
    Kind((5, 7), (3, 4.5), (12, 24), (11, 26), (0, 1.5), 0.1, 10, (6, 10), 0.55, 0.2, 0.45),
    Kind((3.4, 4.4), (1.6, 2.4), (8, 13), (3.5, 6.5), (3, 7), 0.6, 13, (4, 9), 0.3, 0.9, 0, True),
)


@dataclass(frozen=True)
class Camera:
    """Where the picture is taken from. It looks level, so vertical lines stay vertical."""

    x: float
    height: float
    yaw: float
    """How far it looks to the right, as a slope."""
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
    """A street: its measures, and all that stands in it."""

    kind: Kind
    camera: Camera
    half_road: float
    sidewalk: float
    end: float
    crossing: float
    """Where a side street begins, or ``NOWHERE``."""
    zebra: float
    """Where a crosswalk begins."""
    marked: bool
    """Whether there are lines on the road."""
    lamp_every: float
    lamp_start: float
    things: list[Thing] = field(default_factory=list)
    facades: list[tuple[float, ...]] = field(default_factory=lambda: [NO_FACADE])
    spots: list[list[Point]] = field(default_factory=list)
    """Figures on the ground that are darker because something stands there."""
    taken: list[tuple[float, float]] = field(default_factory=list)
    """Middles of the spots, as (x, z)."""
    plots: list[Plot] = field(default_factory=list)

    @property
    def facade_line(self) -> float:
        """Where the sidewalk ends."""
        return self.half_road + self.sidewalk

    @property
    def parking(self) -> float:
        """Width of the parking lane on either side."""
        return 2.1 if self.half_road > 4.6 else 0.0

    @property
    def lamp_height(self) -> float:
        """How high the lamps are."""
        return 6.2 + 0.25 * self.half_road

    def first_lamp(self, side: int) -> float:
        """Return where the first lamp on a side is; the sides take turns."""
        return self.lamp_start + (self.lamp_every / 2 if side > 0 else 0)

    def at_crossing(self, z: float, before: float = 0.0, after: float = 0.0) -> bool:
        """Return True if a place is within the side street, or so close to it."""
        return self.crossing - before < z < self.crossing + CROSSING + after

    def skyline(self, side: int) -> np.ndarray:
        """Return the height of the houses on a side, by metre; the first is 300 m behind."""
        heights = np.zeros(600, np.float32)
        plots = [plot for plot in self.plots if plot.side == side]
        for plot in plots:
            heights[300 + int(plot.near) : 300 + int(plot.far)] = plot.height
        heights[:304] = plots[0].height if plots else 0
        return heights

    def is_free(self, x: float, z: float) -> bool:
        """Return True if nothing stands within a metre of a place."""
        return not any(abs(x - a) < 1 and abs(z - b) < 1 for a, b in self.taken)

    def stand(self, thing: Thing, spot: list[Point] | None = None) -> None:
        """Add a thing, and the dark spot below it."""
        self.things.append(thing)
        if spot is not None:
            self.spots.append(spot)
            xs, _, zs = zip(*spot, strict=True)
            self.taken.append((sum(xs) / len(spot), sum(zs) / len(spot)))


def lay_out(seed: int) -> Street:
    """Lay out the street of a seed."""
    rng = np.random.default_rng(seed)
    street = _empty_street(rng)
    _lay_ground(street)
    _close_view(street, rng)
    for side in (-1, 1):
        _build_houses(street, side, rng)
        _plant_trees(street, side, rng)
        _park_cars(street, side, rng)
        _set_up_lamps(street, side)
        _set_up_signs(street, side, rng)
        _let_people_walk(street, side, rng)
    _let_cars_drive(street, rng)
    _let_people_cross(street, rng)
    return street


def _empty_street(rng: np.random.Generator) -> Street:
    kind = KINDS[int(rng.integers(len(KINDS)))]
    half_road = rng.uniform(*kind.half_road)
    camera = Camera(
        x=half_road * 0.45 + rng.uniform(-0.5, 0.4),
        height=rng.uniform(1.35, 1.75),
        yaw=rng.uniform(-0.1, 0.1),
        horizon=rng.uniform(0.42, 0.52),
        focal=rng.uniform(0.72, 0.95),
    )
    crossing = rng.uniform(14, 45) if rng.random() < 0.5 else NOWHERE
    return Street(
        kind=kind,
        camera=camera,
        half_road=half_road,
        sidewalk=rng.uniform(*kind.sidewalk),
        end=rng.uniform(90, 150),
        crossing=crossing,
        zebra=rng.uniform(8, 60) if crossing == NOWHERE else crossing - 4.5,
        marked=rng.random() < 0.75,
        lamp_every=rng.uniform(18, 28),
        lamp_start=rng.uniform(6, 18),
    )


def _lay_ground(street: Street) -> None:
    """Lay the road, and on both sides of it sidewalks, up to the side street and after it."""
    ground = Thing(NOWHERE, rank=0)
    for side in (-1, 1):
        ground.add(_outwards(0, side, 0, START, HORIZON), "road", "asphalt")
        if street.crossing == NOWHERE:
            _lay_sidewalk(street, ground, side, START, HORIZON)
        else:
            _lay_sidewalk(street, ground, side, START, street.crossing)
            after = street.crossing + CROSSING
            _lay_sidewalk(street, ground, side, after, HORIZON)
            edge = upright((side * street.half_road, after), (side * 300, after), 0, KERB)
            ground.add(edge, "sidewalk", "kerb", shade=0.8, layer=3)
    street.stand(ground)


def _lay_sidewalk(street: Street, ground: Thing, side: int, near: float, far: float) -> None:
    inner, outer = side * street.half_road, side * street.facade_line
    behind = ("vegetation", "grass") if street.kind.gardens else ("sidewalk", "paving")
    ground.add(_outwards(outer, side, KERB, near, far), *behind, layer=1)
    ground.add(lying(inner, outer, KERB, near, far), "sidewalk", "paving", layer=2)
    stone = lying(inner, inner + side * 0.16, KERB, near, far)
    ground.add(stone, "sidewalk", "kerb", layer=3)
    edge = upright((inner, near), (inner, far), 0, KERB)
    ground.add(edge, "sidewalk", "kerb", shade=0.8, layer=3)


def _outwards(x: float, side: int, y: float, near: float, far: float) -> list[Point]:
    """Return the ground beside a line along the street, as far as the camera sees."""
    wide = side * (14.0 if near == START else 300.0)  # wider would reach behind the camera
    return [(x, y, near), (wide, y, near), (side * 300.0, y, far), (x, y, far)]


def _close_view(street: Street, rng: np.random.Generator) -> None:
    """Put houses and trees beyond the far end."""
    x = -100.0
    while x < 100:
        width, z = rng.uniform(12, 30), street.end + rng.uniform(10, 60)
        if rng.random() < 0.5:
            thing, height = Thing(z), rng.uniform(8, 22)
            street.facades.append(facade(rng, height, x))
            wall, row = upright((x, z), (x + width, z), 0, height), len(street.facades) - 1
            thing.add(wall, "building", "wall", rng.random(), facade=row)
        else:
            center, radii = (x + width / 2, 0.25 * width, z), (0.6 * width, 0.42 * width)
            thing = bush(center, radii, 10, rng.random(), rng)
        thing.rank = 1
        street.stand(thing)
        x += width * rng.uniform(0.5, 0.95)


def _build_houses(street: Street, side: int, rng: np.random.Generator) -> None:
    """Line a side with houses from near to far, with open spaces between some of them."""
    kind = street.kind
    z = START + rng.uniform(0, 3)
    while z < street.end:
        if street.at_crossing(z, before=4):
            z = street.crossing + CROSSING + rng.uniform(0, 2)
        if rng.random() < kind.gap:
            space = rng.uniform(3, 8)
            _plant_gap(street, side, z + space / 2, rng)
            z += space
        far = z + rng.uniform(*kind.plot)
        if z < street.crossing < far:
            far = max(z + 3, street.crossing - 0.5)
        _build_house(street, side, z, far, rng)
        z = far
    if kind.gardens:
        _plant_hedges(street, side, rng)


def _build_house(
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
    street.stand(house(plot, front, flank, gabled, awning, rng))
    street.plots.append(plot)


def _plant_gap(street: Street, side: int, z: float, rng: np.random.Generator) -> None:
    """Grow a tree and a bush in the space between two houses."""
    if z < START + 4 or street.at_crossing(z, before=3, after=1):
        return
    line = street.facade_line
    grown = tree(side * (line + rng.uniform(4, 8)), z, rng.uniform(5, 10), rng.random(), rng)
    low = bush((side * (line + 3), 0.8, z), (2.2, 1.2), 12, rng.random(), rng)
    for thing in (grown, low):
        thing.rank = 1
        street.stand(thing)


def _plant_hedges(street: Street, side: int, rng: np.random.Generator) -> None:
    z, line = START + rng.uniform(0, 4), street.facade_line
    while z < 70:
        far = z + rng.uniform(5, 14)
        grown = min(far, street.crossing - 0.5) if z < street.crossing else far
        if rng.random() < 0.7 and grown > z + 1 and not street.at_crossing(z):
            height, tint = rng.uniform(0.8, 1.7), rng.uniform(0, 0.7)
            street.stand(hedge(side * (line + 0.3), side * (line + 1.2), z, grown, height, tint))
        z = far + rng.uniform(1, 5)


def _plant_trees(street: Street, side: int, rng: np.random.Generator) -> None:
    """Plant a row of trees of one kind along the kerb."""
    every = street.kind.tree_every * rng.uniform(0.8, 1.3)
    z, species = START + rng.uniform(4, 4 + every), rng.uniform(0, 0.75)
    x = side * (street.half_road + 0.7)
    while z < 85:
        if not street.at_crossing(z, before=3, after=2):
            height = rng.uniform(*street.kind.tree_height)
            grown = tree(x, z, height, species + rng.uniform(0, 0.25), rng)
            street.stand(grown, _spot(x, z, 0.3 * height))
        z += every * rng.uniform(0.8, 1.2)


def _spot(x: float, z: float, radius: float) -> list[Point]:
    return [(x + right, 0.02, z + 0.8 * ahead) for right, ahead in ring(radius)]


def _park_cars(street: Street, side: int, rng: np.random.Generator) -> None:
    """Park cars along the kerb; in a narrow street on the left only."""
    z, x = START + rng.uniform(1.5, 7), side * (street.half_road - 1.05)
    while z < 75:
        free = street.parking > 0 or side < 0
        if rng.random() < street.kind.parked and free and not street.at_crossing(z, before=8):
            _stand_car(street, x, z, rng, oncoming=side < 0, parked=True)
        z += 6.2 + rng.uniform(0, 1)


def _let_cars_drive(street: Street, rng: np.random.Generator) -> None:
    """Let cars drive ahead and, where there is room, come towards the camera."""
    lane = street.half_road - street.parking
    z = rng.uniform(9, 30)
    while z < 80:
        if rng.random() < 0.75:
            _stand_car(street, 0.5 * lane + rng.uniform(-0.2, 0.2), z, rng)
        z += rng.uniform(9, 30)
    z = rng.uniform(7, 40)
    while z < 80 and street.half_road > 3.4:
        if rng.random() < 0.7:
            x = -0.5 * lane if street.parking else -0.05 * lane
            _stand_car(street, x + rng.uniform(-0.2, 0.2), z, rng, oncoming=True)
        z += rng.uniform(12, 35)


def _stand_car(
    street: Street,
    x: float,
    z: float,
    rng: np.random.Generator,
    oncoming: bool = False,
    parked: bool = False,
) -> None:
    shape = int(rng.choice(len(BODIES), p=(0.35, 0.28, 0.22, 0.15)))
    half, length = 0.54 * BODIES[shape].width, BODIES[shape].length
    spot = lying(x - half, x + half, 0.02, z - 0.25, z + length + 0.1)
    street.stand(car(x, z, shape, rng.random(), oncoming, parked), spot)


def _set_up_lamps(street: Street, side: int) -> None:
    z = street.first_lamp(side)
    while z < 100:
        x = side * (street.half_road + 0.4)
        street.stand(lamp(x, KERB, z, street.lamp_height, -side * 1.4))
        z += street.lamp_every


def _set_up_signs(street: Street, side: int, rng: np.random.Generator) -> None:
    """Set up traffic signs, and here and there a plain pole."""
    z = rng.uniform(8, 16)
    while z < 60:
        x = side * (street.half_road + rng.uniform(0.35, 0.6))
        if rng.random() < 0.7:
            plate = PLATES[int(rng.integers(len(PLATES)))]
            thing = sign(x, KERB, z, plate, rng.uniform(2.2, 2.8))
        else:
            thing = pole(x, KERB, z, rng.uniform(1, 5), rng.uniform(0.13, 0.25))
        if street.is_free(x, z):
            street.stand(thing)
        z += rng.uniform(5, 16)


def _let_people_walk(street: Street, side: int, rng: np.random.Generator) -> None:
    z = rng.uniform(6, 12)
    while z < 50:
        if rng.random() < 0.7:
            x = side * (street.half_road + rng.uniform(0.5, street.sidewalk - 0.2))
            height = 0 if street.at_crossing(z) else KERB
            street.stand(person(x, height, z, rng), _spot(x, z, 0.35))
        z += rng.uniform(2, 11)


def _let_people_cross(street: Street, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(0, 4))):
        z = street.zebra + rng.uniform(0.5, 2.8)
        x = rng.uniform(-1, 1) * street.half_road
        if START + 4 < z < 60:
            street.stand(person(x, 0, z, rng), _spot(x, z, 0.35))
