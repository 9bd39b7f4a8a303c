"""The domains of an evaluation, opened, and looked through for images they share."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from zlib import crc32

from selfadapt.data import Dataset, Pair
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
        """What the domain is called."""
        return self.config.label

    @cached_property
    def names(self) -> list[str]:
        """The names of its images, in order."""
        return [pair.name for pair in self.data.pairs]

    def file_sizes(self, number: int) -> list[int] | None:
        """Return the bytes of an image and of its label, where they are files that are there."""
        pair = self.data.pairs[number]
        sizes = [_size(path) for path in (pair.image, pair.label)]
        return None if self.config.dataset == "streets" or min(sizes) < 0 else sizes

    def usual_size(self) -> Size:
        """Return rows and columns of its first image, enlarged; the image itself is not read."""
        width, height = STREET_SIZE
        if self.config.dataset != "streets":
            width, height = read_image_size(self.data.pairs[0].image)
        return round(height * self.config.scale), round(width * self.config.scale)

    def fingerprint(self) -> str:
        """Return a short text that changes with the names of the images and what labels mean.

        Their content is left out, so that a damaged file can be repaired; the sizes of the files
        stand in the rows.
        """
        content = self.names, sorted(self.data.table.ids.items()), self.config.scale
        return f"{len(self.data)} images, {crc32(repr(content).encode()):08x}"


def open_domains(config: EvaluateConfig) -> list[Domain]:
    """Open the validation domain and the targets, and refuse images that are in two of them."""
    domains = [Domain(one, _rooted(one, config).open(config.space)) for one in config.domains]
    for domain in domains:
        _check_names(domain)
        _check_sizes(domain)
    _check_shared(domains)
    return domains


def _rooted(domain: DomainConfig, config: EvaluateConfig) -> DomainConfig:
    """Return a domain with its root, which may be the folder of its name among the datasets."""
    if domain.root is not None or domain.dataset in ("streets", "folder"):
        return domain
    return replace(domain, root=str(Path(config.data) / domain.dataset.partition("-")[0]))


def _check_names(domain: Domain) -> None:
    """Refuse names that no table could hold."""
    for name in domain.names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{domain.label}: the name of an image must be text in UTF-8, got {name!a}; "
                "rename the file"
            ) from None


def _check_sizes(domain: Domain) -> None:
    """Refuse a domain whose labels are of other sizes than its images, as the first files say."""
    found = []
    for pair in domain.data.pairs[:3] if domain.config.dataset != "streets" else ():
        try:
            image, label = read_image_size(pair.image), read_image_size(pair.label)
            found.append(None if image == label else (pair, image, label))
        except (OSError, ValueError):  # it is reported when it is read
            return
    if found and all(found):
        assert found[0] is not None
        raise ValueError(size_error(*found[0]))


def _check_shared(domains: Sequence[Domain]) -> None:
    """Compare image files, those of one size only: a copy is as good as the image."""
    by_size: dict[int, list[tuple[Domain, Pair]]] = defaultdict(list)
    for domain in domains:
        for pair in domain.data.pairs:
            if domain.config.dataset != "streets":
                by_size[_size(pair.image)].append((domain, pair))
    for size, found in by_size.items():
        if size < 1 or len({domain.label for domain, _ in found}) < 2:
            continue
        seen: dict[int, tuple[Domain, Pair]] = {}
        for domain, pair in found:
            try:
                content = crc32(pair.image.read_bytes())
            except OSError:  # it is reported when it is read
                continue
            other, same = seen.setdefault(content, (domain, pair))
            if other is not domain and same.image.read_bytes() == pair.image.read_bytes():
                raise ValueError(
                    f"{pair.image} of {domain.label} is the same image as {same.image} of "
                    f"{other.label}; no image may be in two domains of a protocol"
                )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it is reported when it is read
        return -1
