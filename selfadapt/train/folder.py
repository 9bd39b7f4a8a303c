"""The folder of a training run, with its state, checkpoints and logs.

record.json             the recipe, and fingerprints of the images
state.safetensors       the last saved state; without it the run starts over
epoch_012.safetensors   networks that are the best for some alpha
best.safetensors        the best network, written at the end
last.safetensors        the last network, written at the end
recipe.json, log.csv, validation.csv, summary.json, curve.png
"""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from selfadapt.files import atomic_write
from selfadapt.models.checkpoint import serialize
from selfadapt.runs import RunStore
from selfadapt.train.average import WeightAverage

FORMAT = "selfadapt training state 3"


@dataclass
class State:
    """Progress of a run."""

    step: int = 0
    """Number of completed steps."""
    best: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Best mIoU and its epoch, by alpha."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the checkpoint files of the best epochs, by epoch."""
    images_per_s: list[float] = field(default_factory=list)
    """Speed of each completed epoch."""
    losses: list[float] = field(default_factory=list)
    """Losses of the last steps that are not yet logged."""


class TrainFolder(RunStore):
    """The folder of a training run."""

    NAME: ClassVar[str] = "a training run"
    FORMAT: ClassVar[str] = "selfadapt training 1"
    OUTPUTS: ClassVar[tuple[str, ...]] = (
        "state.safetensors", "epoch_[0-9]*.safetensors", "best.safetensors", "last.safetensors",
        "recipe.json", "log.csv", "validation.csv", "summary.json", "curve.png",
        "tensorboard/events.*",
    )  # fmt: skip

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._state = path / "state.safetensors"

    def find(
        self, identity: Mapping[str, Any], *, overwrite: bool = False
    ) -> tuple[State, dict[str, Tensor]] | None:
        """Return the saved state and its tensors to resume from, or None."""
        if not self.check(identity, overwrite=overwrite) or not self._state.exists():
            return None
        state, tensors = read_state(self._state)
        for epoch in state.checksums:
            self.intact_checkpoint(int(epoch), state)
        return state, tensors

    def save(
        self,
        state: State,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None = None,
    ) -> None:
        """Write state, weights, momentum and averaged weights, replacing the last saved state."""
        tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{name}"] = momentum
        if average is not None:
            tensors |= {f"mean.{name}": value for name, value in average.mean.items()}
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        metadata = {key: json.dumps(value) for key, value in vars(state).items()}
        metadata["format"] = FORMAT
        content = serialize(tensors, {**metadata, "checksum": _checksum(metadata, tensors)})
        try:
            with atomic_write(self._state) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            raise OSError(
                f"after step {state.step}: {error}. Make room, then run the same command "
                "(without --overwrite) to go on"
            ) from error

    def checkpoint(self, epoch: int) -> Path:
        """Return the path of the checkpoint of an epoch."""
        return self.path / f"epoch_{epoch:03}.safetensors"

    def intact_checkpoint(self, epoch: int, state: State) -> Path:
        """Return the checkpoint of a best epoch after verifying its checksum."""
        path, checksum = self.checkpoint(epoch), state.checksums[str(epoch)]
        if path.exists() and file_checksum(path) == checksum:
            return path
        reason = "is damaged: its checksum differs" if path.exists() else "is missing"
        best = self.path / "best.safetensors"
        is_copy = best.exists() and file_checksum(best) == checksum
        advice = f"replace it by {best}, which is the same," if is_copy else "restore it,"
        raise ValueError(f"{path} {reason}; {advice} or use --overwrite to start over")

    def keep(self, epochs: Set[int]) -> None:
        """Remove the checkpoints of all other epochs."""
        kept = {self.checkpoint(epoch) for epoch in epochs}
        for path in self.path.glob("epoch_[0-9]*.safetensors"):
            if path not in kept:
                path.unlink()


def read_state(path: Path) -> tuple[State, dict[str, Tensor]]:
    """Read a saved state and its tensors."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is damaged, or not the state of a training run ({error}); use --overwrite to "
            "start over"
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} must have the format {FORMAT!r} to resume from, got "
            f"{metadata.get('format')!r}; use --overwrite to start over"
        )
    if metadata.pop("checksum", "") != _checksum(metadata, tensors):
        raise ValueError(
            f"{path} is damaged: its checksum differs; restore it, or use --overwrite to start over"
        )
    return State(**{key: json.loads(metadata[key]) for key in vars(State())}), tensors


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of metadata and tensors."""
    shapes = [(name, str(value.dtype), value.shape) for name, value in sorted(tensors.items())]
    checksum = crc32(repr((sorted(metadata.items()), shapes)).encode())
    for _, value in sorted(tensors.items()):
        checksum = crc32(value.cpu().flatten().view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(2**20):
            checksum = crc32(part, checksum)
    return checksum


def restore(
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
) -> None:
    """Load weights, momentum and averaged weights of a saved state."""
    model.load_state_dict(_part(tensors, "model."))
    if average is not None:
        average.load(_part(tensors, "mean."))
    for name, parameter in model.named_parameters():
        if (momentum := tensors.get(f"momentum.{name}")) is not None:
            # Copied, since a memory-mapped tensor keeps the replaced file on the disk.
            optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter.device, copy=True)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    named = {name: value for name, value in tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): value for name, value in named.items()}
