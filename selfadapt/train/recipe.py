"""What a training run is made of: the recipe, written in YAML, and its defaults from the paper.

Every field here is a key of the recipe and a flag of ``selfadapt train``.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from selfadapt.checks import check_number
from selfadapt.data import DataConfig
from selfadapt.data.domains import check_target, overlap, spelled
from selfadapt.labels import ClassSpace, class_space
from selfadapt.models.address import is_foreign
from selfadapt.models.create import create_model
from selfadapt.norm import check_alpha
from selfadapt.train.augment import AugmentConfig

PAPER_TARGETS = ("cityscapes", "bdd", "idd", "mapillary", "acdc")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network to train."""

    name: str
    """A name of ``selfadapt models``, or an address such as smp:Unet/resnet34."""
    classes: str | list[str] = "cityscapes-19"
    """The name of a class space, or the names of the classes."""
    weights: str | None = None
    """What to start from: imagenet, a file, or nothing."""
    norm: str = "bn"
    """Normalisation: bn, bin or sn."""
    dropout: float = 0.0
    """Rate of dropout after every ReLU; 0: none."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the architecture, see ``selfadapt models``."""

    def __post_init__(self) -> None:
        names = class_space(self.classes).names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"classes must differ, got {', '.join(twice)} twice")
        if len(names) < 2:
            raise ValueError(
                f"a network must have two classes or more to tell apart, got {', '.join(names)}; "
                "add one for what is none of them, such as background"
            )
        if is_foreign(self.name):
            raise ValueError(
                f"{self.name} cannot be built anew from a checkpoint, so it is not trained here; "
                "take a name of selfadapt models, or torchvision:NAME or smp:KIND/ENCODER"
            )

    @property
    def space(self) -> ClassSpace:
        """The classes to train for."""
        return class_space(self.classes)

    def build(self, *, fresh: bool = False) -> Any:
        """Create the network; ``fresh`` leaves out the weights to start from."""
        settings: dict[str, Any] = {**self.options, "norm": self.norm, "dropout": self.dropout}
        weights = None if fresh else self.weights
        return create_model(self.name, classes=self.space.names, weights=weights, **settings)


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """Where a run takes place. It does not change what comes out but by rounding."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """cpu or gpu; auto: a GPU if there is one."""
    devices: int | Literal["auto"] = 1
    """Processes on each node, one for each device; auto: all devices. With torchrun, as it says."""
    nodes: int = 1
    """Number of machines; torchrun starts them, and knows their number."""
    workers: int | None = None
    """Processes that read images, for each training process; None: by the cores there are."""
    measure: bool = True
    """First measure how fast images come and how fast the network takes them."""

    def __post_init__(self) -> None:
        if self.devices != "auto":
            check_number("devices", self.devices, 1, whole=True)
        check_number("nodes", self.nodes, 1, whole=True)
        if self.workers is not None:
            check_number("workers", self.workers, 0, whole=True)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. The defaults are the paper's."""

    model: ModelConfig
    """The network."""
    source: DataConfig
    """What it is trained on."""
    validation: DataConfig | None = None
    """The validation domain, where checkpoint and alpha are chosen; none: the last is taken."""
    targets: list[str] = field(default_factory=lambda: list(PAPER_TARGETS))
    """Target domains, which nothing may be chosen on: DATASET, DATASET/SPLIT or a folder."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Random changes to the training images."""
    epochs: int = 50
    """Passes over the source domain."""
    batch: int = 4
    """Images in a step, over all devices together."""
    lr: float = 0.005
    """Learning rate of the first step."""
    power: float = 0.9
    """Power of the polynomial that takes the learning rate to 0."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay."""
    class_weights: dict[str, float] = field(default_factory=dict)
    """Weights of pixels in the loss, by their class; 1 for classes that are not named."""
    average: float = 0.0
    """Decay of a running mean of the weights, which is validated and saved for them; 0: none."""
    seed: int = 0
    """Seed of everything random: fresh weights, order, augmentation, dropout."""
    seeds: list[int] = field(default_factory=list)
    """Train a network with each of these seeds, into folders seed_0, seed_1 ...; empty: seed."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Arithmetic of the training steps. Validation is in 32 bits."""
    frozen_batchnorm: bool = False
    """Keep BatchNorm's statistics as they come, for very small batches."""
    statistics_batches: int = 0
    """Batches to average BatchNorm's statistics over before validation and at the end; 0: none."""
    statistics_scale: tuple[float, float] | None = None
    """Area of the crops in these batches, as a share of the image's; null: as in training."""
    validate_from: int = 1
    """First epoch to validate after; the last epoch is always validated."""
    validate_every: int = 1
    """Validate after every so many epochs."""
    alphas: list[float] = field(default_factory=lambda: [n / 10 for n in range(11)])
    """Values of SaN's alpha to validate with."""
    save_every: int = 500
    """Steps between two saved states; one is also saved after every epoch."""
    machine: MachineConfig = field(default_factory=MachineConfig)
    """Where it runs."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "validate_from", "validate_every", "save_every"):
            check_number(name, getattr(self, name), 1, whole=True)
        check_number("statistics_batches", self.statistics_batches, 0, whole=True)
        if self.statistics_scale is not None:
            if not self.statistics_batches:
                raise ValueError("statistics_scale is about statistics_batches, but these are 0")
            replace(self.augment, scale=self.statistics_scale)  # which is checked there
        for seed in (self.seed, *self.seeds):
            check_number("seed", seed, 0, 2**32 - 1, whole=True)
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ, got {self.seeds}")
        check_number("lr", self.lr, 1e-12, 1e3)
        check_number("momentum", self.momentum, 0, 1)
        check_number("weight_decay", self.weight_decay, 0, 1)
        check_number("power", self.power, 0, 10)
        check_number("average", self.average, 0, 0.999999)
        for name, weight in self.class_weights.items():
            if name not in self.model.space.names:
                raise ValueError(
                    f"class_weights must be of classes of the network, got {name!r}; it has "
                    f"{', '.join(self.model.space.names)}"
                )
            check_number(f"class_weights of {name}", weight, 0, 1e6)
        if not self.alphas:
            raise ValueError("alphas must have at least one value, such as 0")
        for alpha in self.alphas:
            check_alpha(alpha)
        if self.frozen_batchnorm and self.statistics_batches:
            raise ValueError(
                "frozen_batchnorm keeps BatchNorm's statistics and statistics_batches replaces "
                "them; give one of the two"
            )
        if self.model.norm != "bn" and (self.frozen_batchnorm or self.statistics_batches):
            raise ValueError(
                "frozen_batchnorm and statistics_batches are about BatchNorm, but the network has "
                f"norm {self.model.norm!r}; leave them out"
            )
        for name in self.targets:
            check_target(name)
        if self.source.scale != 1:
            raise ValueError(
                "source has crops of many sizes, see augment.scale; its scale must be 1, "
                f"got {self.source.scale}"
            )
        if self.validation is not None and (target := self._target_of(self.validation)):
            raise ValueError(
                f"validation is {spelled(self.validation)}, but {target!r} is a target domain; "
                "checkpoint and alpha are chosen on another domain only. Give another validation, "
                "or say in targets which domains will be reported on"
            )

    @property
    def statistics_augment(self) -> AugmentConfig:
        """Random changes to the images that statistics are averaged over."""
        return replace(self.augment, scale=self.statistics_scale or self.augment.scale)

    def _target_of(self, data: DataConfig) -> str | None:
        """Return the target domain that ``data`` is of."""
        return next((target for target in self.targets if overlap(target, data)), None)

    def runs(self, folder: Path) -> list[tuple["TrainConfig", Path]]:
        """Return the runs of this recipe and their folders, one for each seed."""
        if not self.seeds:
            return [(self, folder)]
        return [(replace(self, seed=s, seeds=[]), folder / f"seed_{s}") for s in self.seeds]

    def identity(self) -> dict[str, Any]:
        """Return what decides the result, as plain data: all but where the run takes place."""
        content = json.loads(json.dumps(asdict(self)))
        del content["machine"], content["save_every"], content["targets"]
        for domain in ("source", "validation"):
            if content[domain] is not None:
                del content[domain]["root"]
        return content


def settings() -> list[str]:
    """Return the names of all settings of a recipe, those of its parts as PART.NAME."""
    parts = {
        "model": ModelConfig, "source": DataConfig, "validation": DataConfig,
        "augment": AugmentConfig, "machine": MachineConfig,
    }  # fmt: skip
    inner = [f"{part}.{f.name}" for part, kind in parts.items() for f in fields(kind)]
    return [f.name for f in fields(TrainConfig)] + inner
