"""Many images: read ahead by threads, and taken together where they have one size."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from selfadapt.checks import check_number
from selfadapt.images import Image, read_image
from selfadapt.prefetch import num_readers, prefetch
from selfadapt.result import Result
from selfadapt.views import Size, size_of

Item = TypeVar("Item")


class BatchSegmenter(ABC):
    """Segments images, one or many."""

    @property
    def takes_batches(self) -> bool:
        """Images of one size are computed together, each with its own result."""
        return False

    @abstractmethod
    def __call__(self, image: Image, *, normalized: bool = False) -> Result:
        """Segment an image."""

    @overload
    def map(
        self, images: Iterable[Image], batch_size: int = 1, *, normalized: bool = False,
        return_exceptions: Literal[False] = False,
    ) -> Iterator[Result]: ...  # fmt: skip

    @overload
    def map(
        self, images: Iterable[Image], batch_size: int = 1, *, normalized: bool = False,
        return_exceptions: Literal[True],
    ) -> Iterator[Result | Exception]: ...  # fmt: skip

    def map(
        self,
        images: Iterable[Image],
        batch_size: int = 1,
        *,
        normalized: bool = False,
        return_exceptions: bool = False,
    ) -> Iterator[Any]:
        """Segment many images, and yield their results in order.

        Threads read the next images meanwhile. What ``source``, ``p-bn``, ``san`` and ``tta`` give
        for a batch is what they give for each of its images by itself, up to rounding. Other
        methods, and networks that cannot tell the images of a batch apart, take them one by one.

        Args:
            images: Images, each as for a call.
            batch_size: How many images are computed together, at most. Those of one size that
                follow each other are: it takes as many times the memory, and pays off on a GPU.
            normalized: As for a call.
            return_exceptions: Yield the error in the place of the result of an image that fails.
                False: it is raised when its turn comes, with a note that says which image it was,
                and ends the iteration.

        Example:
            >>> from torch import nn
            >>> from selfadapt import create_method
            >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
            >>> method = create_method("san", model)
            >>> for result in method.map(torch.rand(3, 3, 20, 30), batch_size=2):
            ...     print(tuple(result.label.shape))
            (20, 30)
            (20, 30)
            (20, 30)
        """
        check_number("batch_size", batch_size, 1, whole=True)
        return self._map(images, batch_size, normalized, return_exceptions)

    def batch(
        self, images: Sequence[Image], *, normalized: bool = False
    ) -> list[Result | Exception]:
        """Segment images of one size; return the error in the place of a result that failed."""
        return [self._outcome(image, normalized) for image in images]

    def _map(
        self, images: Iterable[Image], batch_size: int, normalized: bool, return_exceptions: bool
    ) -> Generator[Result | Exception, None, None]:
        def read(image: Image) -> tuple[Image, Image | Exception]:
            try:
                return image, image if normalized else self._read(image)
            except Exception as error:
                return image, error

        index, readers = 0, num_readers()
        with closing(prefetch(read, images, readers, max(readers, batch_size))) as loaded:
            for group in grouped(loaded, lambda pair: pair[1], lambda _: batch_size):
                outcomes: list[Any] = [image for _, image in group]
                if not isinstance(outcomes[0], Exception):
                    outcomes = self.batch(outcomes, normalized=normalized)
                for (image, _), outcome in zip(group, outcomes, strict=True):
                    if isinstance(outcome, Result):
                        outcome = outcome._replace(image=None if normalized else image)
                    elif not return_exceptions:
                        outcome.add_note(f"it was image {index}, counted from 0")
                        raise outcome
                    yield outcome
                    index += 1

    def _outcome(self, image: Image, normalized: bool) -> Result | Exception:
        try:
            return self(image, normalized=normalized)
        except Exception as error:
            return error

    def _read(self, image: Image) -> Image:
        """Return an image as a tensor on the CPU, uint8 if that is lossless."""
        members: tuple[Any, ...] = getattr(self, "members", (self,))  # of an ensemble
        channels = {member.interface.channels or 3 for member in members}
        if len(channels) > 1:
            return image  # each reads it
        return pinned(read_image(image, channels.pop()), members[0].engine.device)


def grouped(
    items: Iterable[Item], image_of: Callable[[Item], Any], limit: Callable[[Size], int]
) -> Iterator[list[Item]]:
    """Yield neighbours whose images have one size together; what is no tensor is alone.

    Args:
        items: The items.
        image_of: Returns the image of an item.
        limit: Returns how many images of a size are taken together at most.

    Example:
        >>> images = [torch.ones(3, 2, width) for width in (4, 4, 4, 5)]
        >>> [len(group) for group in grouped(images, lambda image: image, lambda size: 2)]
        [2, 1, 1]
    """
    group: list[Item] = []
    previous = None
    for item in items:
        image = image_of(item)
        size = size_of(image) if isinstance(image, Tensor) else None
        if group and size != previous:
            yield group
            group = []
        group.append(item)
        if size is None or len(group) >= limit(size):
            yield group
            group = []
        previous = size
    if group:
        yield group


def pinned(image: Tensor, device: torch.device) -> Tensor:
    """Return an image in memory that a GPU reads without waiting for the CPU."""
    return image.pin_memory() if device.type == "cuda" and not image.is_cuda else image
