"""The recipe of an evaluation: networks, one validation domain, target domains and methods.

Every field here is a key of the recipe and a flag of ``selfadapt evaluate``.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from selfadapt.checks import check_not_none, check_number
from selfadapt.data import DATASETS, DataConfig
from selfadapt.data.domains import overlap, same_folder
from selfadapt.labels import ClassSpace, class_names, class_space
from selfadapt.methods import check_method
from selfadapt.own import is_own
from selfadapt.patterns import alternatives, nearest


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """A trained network."""

    place: str
    """A file, the folder of a training run, or a name or address of ``selfadapt models``."""
    weights: str | None = None
    """A file with its weights, for a network without weights."""
    classes: str | list[str] | None = None
    """Its classes, if the network does not name them: a class space, or their names."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the architecture, for a network by name."""

    def __post_init__(self) -> None:
        check_not_none(self)


@dataclass(frozen=True, kw_only=True)
class DomainConfig(DataConfig):
    """Images to evaluate on."""

    name: str | None = None
    """Name in tables; null: dataset and split, or for folder the name of the folder."""
    in_mean: bool = True
    """Include it in the mean over the targets."""

    @property
    def label(self) -> str:
        """The name of the domain in tables."""
        if self.name:
            return self.name
        if self.dataset == "folder" and self.root:
            return Path(self.root).resolve().name + (
                "" if self.split == "all" else f"/{self.split}"
            )
        return f"{self.dataset}/{self.split}"


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A row of the tables: a method, what is fixed, what is tuned and what is swept."""

    method: str
    """A name of ``selfadapt methods``; or your own class, MODULE:CLASS, with --trust."""
    label: str | None = None
    """Name in tables; null: the method's name."""
    network: str | list[str] | None = None
    """Name of the network in ``networks``, for ensemble several; null: the first, or all."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fixed settings of the method."""
    tune: dict[str, list[Any]] = field(default_factory=dict)
    """Settings to tune on the validation domain, with the values to try."""
    search: Literal["grid", "in turn"] = "grid"
    """Try all combinations, or tune one setting after the other."""
    same_as: str | None = None
    """The label of an earlier method whose tuned settings are used."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the network; below 32 bits by autocast, as in mixed-precision training."""
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    """Settings to evaluate with each of these values, one at a time; not used for tuning."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """The default settings of your own method. An evaluation fills them in, so that its report does
    not need the code of the method."""

    @property
    def name(self) -> str:
        """The name of the method in tables."""
        return self.label or self.method

    def __post_init__(self) -> None:
        check_not_none(self)
        if not is_own(self.method):  # else its code is not imported yet
            self.check_settings()
        if twice := sorted(set(self.settings) & set(self.tune)):
            raise ValueError(f"{self.name}: {twice[0]} is fixed and tuned; give only one of them")
        for kind, values in (*self.tune.items(), *self.sweep.items()):
            if not isinstance(values, list) or not values:
                raise ValueError(f"{self.name}: {kind} must have values to try, got {values!r}")
            try:
                different = {json.dumps(plain(value)) for value in values}
            except TypeError:
                raise ValueError(
                    f"a value to try must be a number, a text or a list of them, got {values!r}"
                ) from None
            if len(different) < len(values):
                raise ValueError(f"{self.name}: the values of {kind} must differ, got {values}")
        timed = [*self.tune.get("budget_ms", ()), *self.sweep.get("budget_ms", ())]
        if any(limit is not None for limit in (self.settings.get("budget_ms"), *timed)):
            raise ValueError(
                f"{self.name}: with budget_ms the number of steps depends on the speed of the "
                "machine, so that results cannot be reproduced; give steps"
            )

    def check_settings(self) -> None:
        """Raise ValueError unless there is such a method and it has these settings."""
        check_method(self.method, {**self.settings, **self.tune, **self.sweep})


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """An evaluation by the protocol: tune on the validation domain, then report on the targets."""

    networks: dict[str, NetworkConfig]
    """The networks, by names of your choice. The same networks segment all targets."""
    validation: DomainConfig | None = None
    """The domain on which settings are tuned."""
    targets: list[DomainConfig]
    """The domains to report on. They are not used for tuning."""
    methods: list[MethodConfig]
    """The methods, in the order of the tables."""
    classes: str | list[str] = "cityscapes-19"
    """The classes to score: a class space, or their names."""
    data: str = "data"
    """The folder of the datasets: one without a root is in the subfolder of its name."""
    source: str | None = None
    """The dataset the networks were trained on, such as gta, to show the paper's numbers, too."""
    pictures: int = 3
    """Number of pictures of each kind per domain: the best, the worst, the first images."""
    unreadable: Literal["go on", "stop"] = "go on"
    """What to do if an image cannot be read."""
    device: str = "auto"
    """cpu, cuda ...; auto: a GPU if available."""
    threads: int = 1
    """Threads of a process on a CPU. The last bits of sums depend on this number, so it does not
    follow the machine; use --shard for more cores."""

    def __post_init__(self) -> None:
        check_not_none(self)
        if not self.networks:
            raise ValueError("networks must name at least one trained network")
        if not self.methods:
            raise ValueError("methods must name at least one method")
        check_number("threads", self.threads, 1, whole=True)
        check_number("pictures", self.pictures, 0, whole=True)
        class_names(self.classes)  # raises an error unless they differ
        if self.source is not None and self.source not in DATASETS:
            raise ValueError(
                f"source must be a dataset, got {self.source!r}"
                f"{alternatives(self.source, DATASETS)}"
            )
        self._check_domains()
        self._check_methods()

    def _check_domains(self) -> None:
        if self.validation is None:
            raise ValueError(
                "no validation domain is named; settings are chosen there and nowhere else, so "
                "that tables can be compared: give validation, such as wilddash"
            )
        if not self.targets:
            raise ValueError("targets must name at least one domain to report on")
        for target in self.targets:
            if same_images(target, self.validation):
                raise ValueError(
                    f"the validation domain {self.validation.label} is also the target domain "
                    f"{target.label}; settings chosen on a target would bias every score. "
                    "Give another validation domain, or leave out the target"
                )
        for number, target in enumerate(self.targets):
            for other in self.targets[:number]:
                if same_images(target, other):
                    raise ValueError(
                        f"the targets {other.label} and {target.label} have images in common, "
                        "which would count twice; leave out one of them"
                    )
        if not any(target.in_mean for target in self.targets):
            raise ValueError("at least one target must count in the mean: leave out in_mean")
        names = (domain.label for domain in (self.validation, *self.targets))
        _check_names("domain", names, "give one of them a name")

    def _check_methods(self) -> None:
        _check_names("method", (m.name for m in self.methods), "give one of them a label")
        tuned: set[str] = set()
        for method in self.methods:
            for network in self.networks_of(method):
                if network not in self.networks:
                    raise ValueError(
                        f"{method.name}: there is no network {network!r}"
                        f"{alternatives(network, self.networks)}"
                    )
            if method.same_as is not None and method.same_as not in tuned:
                raise ValueError(
                    f"{method.name}: same_as must be the label of a method that comes before it "
                    f"and tunes something, got {method.same_as!r};{nearest(method.same_as, tuned)}"
                )
            if method.tune:
                tuned.add(method.name)

    @property
    def space(self) -> ClassSpace:
        """The classes to score."""
        return class_space(self.classes)

    @property
    def domains(self) -> list[DomainConfig]:
        """The validation domain, then the targets."""
        assert self.validation is not None
        return [self.validation, *self.targets]

    def networks_of(self, method: MethodConfig) -> list[str]:
        """Return the names of the networks of a method."""
        if method.network is None:
            return list(self.networks)[: None if method.method == "ensemble" else 1]
        named = [method.network] if isinstance(method.network, str) else method.network
        if not named:
            raise ValueError(f"{method.name}: network must name a network, got none")
        if len(named) > 1 and method.method != "ensemble":
            raise ValueError(f"{method.name}: {method.method} takes one network, got {named}")
        return named

    def identity(self) -> dict[str, Any]:
        """Return what determines the results, as plain data: all but where and how it runs."""
        content = json.loads(json.dumps(asdict(self)))
        for key in ("data", "pictures", "unreadable", "device", "source"):
            del content[key]
        for domain in (content["validation"], *content["targets"]):
            del domain["root"], domain["in_mean"]
        for network in content["networks"].values():
            del network["place"], network["weights"]  # their tensors count
        for method in content["methods"]:
            method["tune"] = list(method["tune"].items())  # the order matters for search "in turn"
        return json.loads(json.dumps(content))


def same_images(first: DataConfig, second: DataConfig) -> bool:
    """Return True if two domains have images in common according to their names."""
    if first.root and second.root and first.dataset == second.dataset == "folder":
        same = same_folder(first.root, second.root, nested=True)
        return same and (first.split == second.split or "all" in (first.split, second.split))
    if first.dataset == "folder":
        return bool(first.root) and overlap(str(first.root), second)
    return overlap(f"{first.dataset}/{first.split}", second)


def _check_names(kind: str, names: Iterable[str], advice: str) -> None:
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{count} {kind}s are called {name!r}; {advice}")


def plain(value: Any) -> Any:
    """Return plain data such that equal values have the same JSON: 1 and 1.0, (1,) and [1]."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
