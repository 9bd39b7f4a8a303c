"""The recipe of a training run, with the defaults of the paper.

Every field is a key of the YAML file and a flag of ``selfadapt train``.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from selfadapt.checks import check_number
from selfadapt.data import DataConfig
from selfadapt.data.domains import check_target, domain_label, overlap
from selfadapt.labels import ClassSpace, class_names, class_space
from selfadapt.models.address import is_external
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
    """Initial weights: imagenet or a file; null for random initialisation."""
    norm: str = "bn"
    """Normalisation: bn, bin or sn."""
    dropout: float = 0.0
    """Dropout rate after every ReLU; 0 disables it."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the architecture, see ``selfadapt models``."""

    def __post_init__(self) -> None:
        names = class_names(self.classes)
        if len(names) < 2:
            raise ValueError(
                f"a network must have two or more classes, got {', '.join(names)}; "
                "add one for all other pixels, such as background"
            )
        if is_external(self.name):
            raise ValueError(
                f"{self.name} cannot be rebuilt from a checkpoint, so it cannot be trained here; "
                "use a name of selfadapt models, or torchvision:NAME or smp:KIND/ENCODER"
            )

    @property
    def space(self) -> ClassSpace:
        """The classes to train for."""
        return class_space(self.classes)

    def build(self, *, fresh: bool = False) -> Any:
        """Create the network; ``fresh`` skips the initial weights."""
        settings: dict[str, Any] = {**self.options, "norm": self.norm, "dropout": self.dropout}
        weights = None if fresh else self.weights
        return create_model(self.name, classes=self.space.names, weights=weights, **settings)


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The hardware of a run. It changes results only by rounding."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """cpu or gpu; auto: a GPU if available."""
    devices: int | Literal["auto"] = 1
    """Devices on each node, each with a process; auto: all. Ignored with torchrun."""
    nodes: int = 1
    """Number of machines; a run on several is started with torchrun, which sets it."""
    workers: int | None = None
    """Processes that read images, for each training process; null: by the number of cores."""
    measure: bool = True
    """First measure the speed of reading images and of the network."""

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
    """The source domain to train on."""
    validation: DataConfig | None = None
    """The validation domain to select checkpoint and alpha on; null: the last checkpoint."""
    targets: list[str] = field(default_factory=lambda: list(PAPER_TARGETS))
    """Target domains, never used for selection: DATASET, DATASET/SPLIT or a folder."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Augmentation of the training images."""
    epochs: int = 50
    """Passes over the source domain."""
    batch: int = 4
    """Images in a step, over all devices."""
    lr: float = 0.005
    """Learning rate of the first step."""
    power: float = 0.9
    """Power of the polynomial decay of the learning rate to 0."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay."""
    class_weights: dict[str, float] = field(default_factory=dict)
    """Weights of classes in the loss; 1 for classes that are not given."""
    average: float = 0.0
    """Decay of an average (EMA) of the weights, which is validated and saved; 0 disables it."""
    seed: int = 0
    """Seed of initialisation, order, augmentation and dropout."""
    seeds: list[int] = field(default_factory=list)
    """Train a network for each seed, in the folders seed_0, seed_1 ...; empty: use seed."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Precision of the training steps. Validation is in 32 bits."""
    frozen_batchnorm: bool = False
    """Keep the initial BatchNorm statistics, for very small batches."""
    statistics_batches: int = 0
    """Batches to average BatchNorm statistics over, for validation and at the end; 0: none."""
    statistics_scale: tuple[float, float] | None = None
    """Area of the crops in these batches, as a fraction of the image; null: as in training."""
    validate_from: int = 1
    """First epoch to validate; the last is always validated."""
    validate_every: int = 1
    """Epochs between validations."""
    alphas: list[float] = field(default_factory=lambda: [n / 10 for n in range(11)])
    """Values of SaN's alpha to validate."""
    save_every: int = 500
    """Steps between saved states; the state is also saved after every epoch."""
    machine: MachineConfig = field(default_factory=MachineConfig)
    """The hardware."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "validate_from", "validate_every", "save_every"):
            check_number(name, getattr(self, name), 1, whole=True)
        check_number("statistics_batches", self.statistics_batches, 0, whole=True)
        if self.statistics_scale is not None:
            if not self.statistics_batches:
                raise ValueError("statistics_scale applies to statistics_batches, which is 0")
            replace(self.augment, scale=self.statistics_scale)  # checks the value
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
                "frozen_batchnorm and statistics_batches apply to BatchNorm, but the network has "
                f"norm {self.model.norm!r}; leave them out"
            )
        for name in self.targets:
            check_target(name)
        if self.source.scale != 1:
            raise ValueError(
                "the scale of source must be 1, as augment.scale sets the size of its crops, "
                f"got {self.source.scale}"
            )
        for target in self.targets:
            if self.validation is not None and overlap(target, self.validation):
                raise ValueError(
                    f"validation is {domain_label(self.validation)}, but {target!r} is a target "
                    "domain, on which checkpoint and alpha must not be selected; give another "
                    "validation, or list the domains you will report on in targets"
                )

    @property
    def statistics_augment(self) -> AugmentConfig:
        """Augmentation of the images that statistics are averaged over."""
        return replace(self.augment, scale=self.statistics_scale or self.augment.scale)

    def runs(self, folder: Path) -> list[tuple["TrainConfig", Path]]:
        """Return the runs of this recipe and their folders, one for each seed."""
        if not self.seeds:
            return [(self, folder)]
        return [(replace(self, seed=s, seeds=[]), folder / f"seed_{s}") for s in self.seeds]

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the result, as plain data."""
        content = json.loads(json.dumps(asdict(self)))
        del content["machine"], content["save_every"], content["targets"]
        for domain in ("source", "validation"):
            if content[domain] is not None:
                del content[domain]["root"]
        return content
