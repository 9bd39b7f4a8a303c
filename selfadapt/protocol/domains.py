"""The domains of an evaluation, with a check that no image is in two of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from zlib import crc32

from selfadapt.data import Dataset, Pair, open_datasets
from selfadapt.data.reading import read_image_size
from selfadapt.data.samples import size_error
from selfadapt.protocol.recipe import DomainConfig, EvaluateConfig
from selfadapt.views import Size

STREET_SIZE = 768, 384
"""Width and height of rendered streets."""


@dataclass(frozen=True)
class Domain:
    """A domain and its images."""

    config: DomainConfig
    data: Dataset

    @property
    def label(self) -> str:
        """The name of the domain in tables."""
        return self.config.label

    @cached_property
    def names(self) -> list[str]:
        """The names of its images, in order."""
        return [pair.name for pair in self.data.pairs]

    def file_sizes(self, number: int) -> list[int] | None:
        """Return the file sizes of an image and its label; None if rendered or missing."""
        pair = self.data.pairs[number]
        sizes = [_file_size(path) for path in (pair.image, pair.label)]
        return None if self.config.dataset == "streets" or min(sizes) < 0 else sizes

    def usual_size(self) -> Size:
        """Return height and width of its first image after scaling, without decoding the image."""
        width, height = STREET_SIZE
        if self.config.dataset != "streets":
            width, height = read_image_size(self.data.pairs[0].image)
        return round(height * self.config.scale), round(width * self.config.scale)

    def fingerprint(self) -> str:
        """Return a short text that changes with the images, the meaning of ids, and the scale."""
        return f"{self.data.fingerprint()}, scale {self.config.scale:g}"


def open_domains(config: EvaluateConfig) -> list[Domain]:
    """Open the validation domain and the targets; raise ValueError for images in two of them."""
    located = []
    for domain_config in config.domains:
        name = domain_config.dataset
        if domain_config.root is None and name not in ("streets", "folder"):
            root = Path(config.data) / name.partition("-")[0]
            domain_config = replace(domain_config, root=str(root))
        located.append(domain_config)
    data = open_datasets(located, config.space)
    domains = [Domain(*pair) for pair in zip(config.domains, data, strict=True)]
    for domain in domains:
        _check_names(domain)
        _check_sizes(domain)
    _check_shared(domains)
    return domains


def _check_names(domain: Domain) -> None:
    """Raise ValueError for image names that cannot be written to a table."""
    for name in domain.names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{domain.label}: the name of an image must be text in UTF-8, got {name!a}; "
                "rename the file"
            ) from None


def _check_sizes(domain: Domain) -> None:
    """Raise ValueError if the first labels of a domain differ in size from their images."""
    mismatches = []
    for pair in domain.data.pairs[:3] if domain.config.dataset != "streets" else ():
        try:
            image, label = read_image_size(pair.image), read_image_size(pair.label)
            mismatches.append(None if image == label else (pair, image, label))
        except (OSError, ValueError):  # reported when it is read
            return
    if mismatches and all(mismatches):
        assert mismatches[0] is not None
        raise ValueError(size_error(*mismatches[0]))


def _check_shared(domains: Sequence[Domain]) -> None:
    """Raise ValueError for identical files in two domains; only files of one size are compared."""
    by_size: dict[int, list[tuple[Domain, Pair]]] = defaultdict(list)
    for domain in domains:
        for pair in domain.data.pairs:
            if domain.config.dataset != "streets":
                by_size[_file_size(pair.image)].append((domain, pair))
    for size, pairs in by_size.items():
        if size < 1 or len({domain.label for domain, _ in pairs}) < 2:
            continue
        seen: dict[int, tuple[Domain, Pair]] = {}
        for domain, pair in pairs:
            try:
                content = crc32(pair.image.read_bytes())
            except OSError:  # reported when it is read
                continue
            other, first = seen.setdefault(content, (domain, pair))
            if other is not domain and first.image.read_bytes() == pair.image.read_bytes():
                raise ValueError(
                    f"{pair.image} of {domain.label} is the same image as {first.image} of "
                    f"{other.label}; no image may be in two domains of a protocol"
                )


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reported when it is read
        return -1
