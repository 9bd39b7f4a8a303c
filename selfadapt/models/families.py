"""Which layers of a network are adapted, by default or by name patterns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from selfadapt.models.norms import MIXING_WEIGHTS
from selfadapt.norm import is_batchnorm
from selfadapt.patterns import matches, nearest


@dataclass(frozen=True)
class Family:
    """A kind of backbone, recognised by the names of its stages, and its frozen layers."""

    name: str
    stages: tuple[str, ...]
    frozen: tuple[str, ...]
    released: tuple[str, ...] | None = None
    """Frozen layers of the released code, where they differ."""
    min_blocks: int = 0
    """Minimum number of blocks in the third stage."""

    def has(self, module: nn.Module) -> bool:
        """Return True if a module is a backbone of this family."""
        children = dict(module.named_children())
        if not all(stage in children for stage in self.stages):
            return False
        return sum(1 for _ in children[self.stages[2]].children()) >= self.min_blocks


RESNET_STEM = ("conv1", "bn1", "layer1", "layer2")
HRNET_STEM = ("conv1", "bn1", "conv2", "bn2", "layer1", "transition1", "stage2", "transition2")

RESNET = Family("ResNet", ("layer1", "layer2", "layer3", "layer4"), RESNET_STEM)
DEEP_RESNET = Family("ResNet-101 or deeper", RESNET.stages, (*RESNET_STEM, "layer3"), min_blocks=7)
HRNET = Family(
    "HRNet",
    ("transition1", "stage2", "stage3", "stage4"),
    (*HRNET_STEM, "stage3"),
    released=("conv1", "bn1", "transition1", "stage2", "transition2", "stage3"),
)
SWIN = Family(
    "Swin",
    ("layers_0", "layers_1", "layers_2", "layers_3"),
    ("patch_embed", "layers_0", "layers_1"),
)
FAMILIES = (DEEP_RESNET, RESNET, HRNET, SWIN)
"""In order of precedence."""


@dataclass(frozen=True)
class Selection:
    """The names of the parameters to adapt, and how they were chosen."""

    names: tuple[str, ...]
    reason: str
    guessed: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the choice."""
        return (self.reason,) if self.guessed else ()


def adapted_parameters(
    model: nn.Module,
    patterns: Sequence[str] | None = None,
    *,
    released: bool = False,
    used: Callable[[], Sequence[str]] = tuple,
) -> Selection:
    """Return the parameters to adapt: those ``patterns`` name, or the network's default.

    The default for a ResNet backbone is the last two stages and everything after it, from
    ResNet-101 on the last stage only (paper, supplement); for an HRNet the last stage and the head;
    for a Swin transformer, as for a ResNet-50 of its size, the last two stages and the decoder.
    With several backbones each has its own default. For any other network it is the last third of
    its layers, in the order of ``used`` or, if that is empty, of their definition.

    Args:
        model: The network.
        patterns: Name patterns of layers.
        released: Use the released code's default, which differs for an HRNet.
        used: Returns the parameters that predictions depend on, in the order of their use; called
            for networks of no known family.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> adapted_parameters(model, ["2"]).names
        ('2.weight', '2.bias')
    """
    names = [name for name, p in model.named_parameters() if p.is_floating_point()]
    if not names:
        raise ValueError("this model has no parameters, so there is nothing to adapt")
    if patterns is not None:
        return _by_pattern(_all_names(model, names), patterns)
    backbones = {
        path: next(family for family in FAMILIES if family.has(module))
        for path, module in model.named_modules()
        if any(family.has(module) for family in FAMILIES)
    }
    if backbones:
        frozen = [
            name
            for path, family in backbones.items()
            for name in _frozen(model, path, family, released)
        ]
        chosen = [n for n in names if not any(n == f or n.startswith(f"{f}.") for f in frozen)]
        kinds = " and ".join(dict.fromkeys(family.name for family in backbones.values()))
        return Selection(tuple(chosen), f"{kinds}: all but {', '.join(frozen)}")
    names = list(used()) or names
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    last = set(layers[-max(1, len(layers) // 3) :])
    chosen = [name for name in names if name.rpartition(".")[0] in last]
    return Selection(
        tuple(chosen),
        "not a family with known stages: the last third of its layers is adapted, from "
        f"{chosen[0]!r} on; choose others with --adapt, in Python adapt=[...]",
        guessed=True,
    )


def normalisation_parameters(model: nn.Module) -> Selection:
    """Return scale and shift of every BatchNorm layer, or of other norms if there are none.

    Example:
        >>> normalisation_parameters(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).names
        ('1.weight', '1.bias')
    """
    if names := _parameters_of(model, is_batchnorm):
        layers = {name.rpartition(".")[0] for name in names}
        return Selection(names, f"scale and shift of {len(layers)} BatchNorm layers")
    names = _parameters_of(
        model, lambda module: any("Norm" in kind.__name__ for kind in type(module).__mro__)
    )
    if not names:
        raise ValueError(
            "Tent tunes the scale and shift of normalisation layers, and this network has none; "
            "the methods 'entropy' and 'self-adapt' tune other layers"
        )
    reason = "no BatchNorm has a scale and a shift: those of other normalisation layers are tuned"
    return Selection(names, reason, guessed=True)


def _parameters_of(model: nn.Module, chosen: Callable[[nn.Module], bool]) -> tuple[str, ...]:
    """Return the names of the direct parameters of the chosen modules."""
    parameters = {
        parameter
        for module in model.modules()
        if chosen(module)
        for parameter in module.parameters(recurse=False)
    }
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter in parameters and name.rpartition(".")[2] not in MIXING_WEIGHTS
    )


def _all_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Map all names of parameters, including aliases of tied weights, to the first name of each.

    Example:
        >>> model = nn.ModuleDict({"a": nn.Linear(2, 2, False), "b": nn.Linear(2, 2, False)})
        >>> model["b"].weight = model["a"].weight
        >>> _all_names(model, ["a.weight"])
        {'a.weight': 'a.weight', 'b.weight': 'a.weight'}
    """
    firsts = {id(value): name for name, value in model.named_parameters() if name in names}
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: firsts[id(value)] for name, value in parameters if id(value) in firsts}


def _by_pattern(names: Mapping[str, str], patterns: Iterable[str]) -> Selection:
    if isinstance(patterns, str):
        patterns = (patterns,)
    elif not isinstance(patterns, Iterable):
        raise TypeError(f"adapt must be a list of name patterns, got {patterns!r}")
    patterns = tuple(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"adapt must be a list of name patterns, got {pattern!r} in it")
    parts = sorted({part for name in names for part in name.split(".")[:-1] if not part.isdigit()})
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"adapt names no parameters of this model with {pattern!r};"
                f"{nearest(pattern, parts)} its parts are {', '.join(parts)}"
            )
    if not patterns:
        raise ValueError("adapt must name at least one layer, got none; use steps=0 to adapt none")
    chosen = (first for n, first in names.items() if any(matches(n, p) for p in patterns))
    return Selection(tuple(dict.fromkeys(chosen)), f"as given: {', '.join(patterns)}")


def _frozen(model: nn.Module, path: str, family: Family, released: bool) -> list[str]:
    """Return the names of the layers that are frozen in a backbone.

    Stems differ, so everything before the first stage is frozen as well.
    """
    children = dict(model.get_submodule(path).named_children())
    frozen = family.released if released and family.released else family.frozen
    stem = [] if released else list(children)[: list(children).index(family.stages[0])]
    prefix = f"{path}." if path else ""
    return [
        prefix + name
        for name, child in children.items()
        if name in (*frozen, *stem) and any(True for _ in child.parameters())
    ]
