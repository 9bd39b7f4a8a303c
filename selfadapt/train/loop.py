"""Train on the source domain; select checkpoint and alpha on the validation domain.

Each step reads a batch and takes a gradient step with a learning rate that decays to 0. After an
epoch the validation domain is evaluated with every alpha, networks that are the best for any of
them are kept, and the state to resume from is saved.
"""

import shutil
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfadapt.data import Dataset, open_datasets
from selfadapt.files import atomic_write
from selfadapt.metrics import iou
from selfadapt.models.checkpoint import save_model
from selfadapt.progress import ProgressBar
from selfadapt.train.augment import AugmentConfig
from selfadapt.train.fabric import explain_lost_processes, make_fabric, num_workers, stop_signals
from selfadapt.train.folder import State, TrainFolder, file_checksum, restore
from selfadapt.train.loader import Batch, BatchOrder, read_batches
from selfadapt.train.log import Log, draw_curves
from selfadapt.train.recipe import TrainConfig
from selfadapt.train.speed import Meter, Speed, measure_speed
from selfadapt.train.trainer import Trainer
from selfadapt.train.validate import confusion_by_alpha

LOG_EVERY = 10


def train(config: TrainConfig, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Train a network, or resume a run that was stopped.

    Args:
        config: The recipe.
        folder: The folder of the run. An existing run of the same recipe is resumed.
        overwrite: Replace an existing run.

    Returns:
        The best checkpoint by validation, or the last without validation, for each seed.
    """
    space = config.model.space
    validated = [] if config.validation is None else [config.validation]
    source, validation, *_ = *open_datasets([config.source, *validated], space), None
    fabric = make_fabric(config)
    best = []
    devices = [fabric.device] if fabric.device.type == "cuda" else []
    for run_config, run_path in config.runs(Path(folder)):
        with (
            TrainFolder(run_path) as run_folder,
            torch.random.fork_rng(devices=devices),
            explain_lost_processes(fabric.world_size),
        ):
            run = TrainingRun(run_config, run_folder, source, validation, fabric)
            run.start(overwrite=overwrite)
            run.train()
            best.append(run.finish())
    return best


class TrainingRun:
    """A training run, in one of the processes that share it."""

    def __init__(
        self,
        config: TrainConfig,
        folder: TrainFolder,
        source: Dataset,
        validation: Dataset | None,
        fabric: Any,
    ) -> None:
        self.config, self.folder, self.fabric = config, folder, fabric
        self.source, self.validation = source, validation
        self.order = BatchOrder(
            len(source), config.batch, config.seed, fabric.global_rank, fabric.world_size
        )
        self.num_steps = config.epochs * self.order.steps_per_epoch
        self.workers = num_workers(config.machine.workers, fabric.world_size)
        images = [domain.fingerprint() for domain in (source, validation) if domain is not None]
        self.identity = {**config.identity(), "images": images}
        self.state = State()
        self.speed: Speed | None = None
        self.losses: list[Tensor] = []
        self.status = ""

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.state.step // self.order.steps_per_epoch

    def start(self, *, overwrite: bool) -> None:
        """Build the network, and restore a saved state."""
        saved = self.folder.find(self.identity, overwrite=overwrite)
        self.trainer = Trainer(self.config, self.fabric, fresh=saved is not None)
        if saved is not None:
            self.state, tensors = saved
            trainer = self.trainer
            restore(tensors, trainer.model, trainer.optimizer, trainer.average)
            self.losses = list(torch.tensor(self.state.losses, device=self.fabric.device))
        self.fabric.barrier()  # all processes have read the folder before one writes to it
        if self.fabric.is_global_zero:
            self.folder.open(self.identity, overwrite=overwrite)
            if saved is None:
                self._save_state()
            self.folder.keep(self._best_epochs())
            self.folder.write_json(self.folder.path / "recipe.json", asdict(self.config))
            self.log = Log(self.folder.path, self.state.step, self.epoch)
        for domain in filter(None, (self.source, self.validation)):
            for note in domain.notes:
                self.fabric.print(f"note: {domain.name}: {note}")
        if self.state.step == self.num_steps:
            self.fabric.print(f"this run is finished: all {self.num_steps} steps are done")
        elif self.state.step:
            self.fabric.print(f"going on after step {self.state.step} of {self.num_steps}")

    def train(self) -> None:
        """Take the remaining steps, and validate after epochs."""
        if self.state.step == self.num_steps:
            return
        with (
            stop_signals() as stopped,
            ProgressBar(
                "training", self.num_steps, self.state.step, quiet=not self.fabric.is_global_zero
            ) as progress,
        ):
            if self.config.machine.measure:
                self.speed = measure_speed(self)
                self.fabric.print(str(self.speed))
            self.trainer.train_mode()
            meter = Meter(self.config.batch)
            for x, label in self.inputs(self.state.step, self.num_steps):
                self.losses.append(self.trainer.step(x, label, self.lr, self.state.step))
                self.state.step += 1
                meter.step()
                epoch_ends = self.state.step % self.order.steps_per_epoch == 0
                if epoch_ends or self.state.step % LOG_EVERY == 0:
                    self._log_step(meter.images_per_s, progress)
                if epoch_ends:
                    self.state.images_per_s.append(meter.images_per_s)
                    self._end_epoch()
                    meter = Meter(self.config.batch)
                elif self.state.step % self.config.save_every == 0:
                    self._save_state()
                if self._any_process_stopped(stopped()):
                    self._save_state()
                    raise KeyboardInterrupt

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.config.lr * (1 - self.state.step / self.num_steps) ** self.config.power

    def batches(
        self, start: int, stop: int, augment: AugmentConfig | None = None
    ) -> Iterator[Batch]:
        """Read the batches of steps, augmented as in training unless ``augment`` is given."""
        return read_batches(
            self.source, augment or self.config.augment, self.order, start, stop,
            workers=self.workers, pin=self.fabric.device.type == "cuda",
        )  # fmt: skip

    def inputs(
        self, start: int, stop: int, augment: AugmentConfig | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the network's input and the labels of steps, on the device."""
        for batch in self.batches(start, stop, augment):
            yield batch.to_device(self.fabric.device, self.trainer.interface)

    def _log_step(self, images_per_s: float, progress: ProgressBar) -> None:
        """Log and check the mean of the last losses."""
        loss = float(self.fabric.all_reduce(torch.stack(self.losses).mean(), reduce_op="mean"))
        self.losses.clear()
        self._check_loss(loss)
        self.status = f"loss {loss:.4f}, lr {self.lr:.5f}, {images_per_s:.1f} images/s"
        if self.fabric.is_global_zero:
            epoch = (self.state.step - 1) // self.order.steps_per_epoch + 1
            self.log.step(self.state.step, epoch, loss, self.lr, images_per_s)
            name = f"epoch {epoch}/{self.config.epochs}"
            progress.update(self.state.step, name=name, note=self.status)

    def _check_loss(self, loss: float) -> None:
        if not loss < float("inf"):
            raise ValueError(
                f"the loss is {loss} after step {self.state.step}: the learning rate may be too "
                f"high (lr {self.config.lr}); the last saved state is kept"
            )

    def _any_process_stopped(self, stopped: bool) -> bool:
        """Return True if any process received a stop signal; synchronised every few steps."""
        if self.fabric.world_size == 1:
            return stopped
        if self.state.step % LOG_EVERY:
            return False
        num_stopped = torch.tensor(float(stopped), device=self.fabric.device)
        return bool(self.fabric.all_reduce(num_stopped, reduce_op="sum"))

    def _end_epoch(self) -> None:
        self.fabric.print(f"epoch {self.epoch}/{self.config.epochs}: {self.status}")
        config, last = self.config, self.epoch == self.config.epochs
        due = self.epoch >= config.validate_from and self.epoch % config.validate_every == 0
        if last or (due and self.validation is not None):
            with self.trainer.averaged():
                self.trainer.share_statistics()
                if config.statistics_batches:  # over crops that no step uses
                    stop = self.num_steps + config.statistics_batches
                    inputs = self.inputs(self.num_steps, stop, config.statistics_augment)
                    self.trainer.average_statistics(x for x, _ in inputs)
                if self.validation is not None:
                    self._validate(self.validation)
        self._save_state()
        if self.fabric.is_global_zero:  # no saved state refers to the others any more
            self.folder.keep(self._best_epochs())
        self.trainer.train_mode()

    def _validate(self, domain: Dataset) -> None:
        """Evaluate on the validation domain; save the network if it is the best for any alpha."""
        assert self.config.validation is not None
        counts = confusion_by_alpha(
            self.trainer.model.eval(), self.trainer.interface, domain, self.config.alphas,
            scale=self.config.validation.scale, rank=self.order.rank, world=self.order.world,
            workers=self.workers,
        )  # fmt: skip
        counts = self.fabric.all_reduce(counts, reduce_op="sum")
        if not counts.any():
            raise ValueError(
                f"no pixel of {domain.name} has a class of the network, so no checkpoint can be "
                "selected; check the dataset with selfadapt check-data"
            )
        scores = [float(iou(count).nanmean()) for count in counts]
        by_alpha = dict(zip(self.config.alphas, scores, strict=True))
        for alpha, score in by_alpha.items():
            if score > self.state.best.get(str(alpha), (-1.0, 0))[0]:
                self.state.best[str(alpha)] = (score, self.epoch)
        if self.fabric.is_global_zero:
            if self.epoch in self._best_epochs():
                path = self.folder.checkpoint(self.epoch)
                save_model(self.trainer.model, path)
                self.state.checksums[str(self.epoch)] = file_checksum(path)
            epochs = map(str, sorted(self._best_epochs()))
            self.state.checksums = {epoch: self.state.checksums[epoch] for epoch in epochs}
            self.log.validated(self.state.step, self.epoch, by_alpha)
        text = ", ".join(f"{alpha:g}: {100 * score:.2f}" for alpha, score in by_alpha.items())
        self.fabric.print(f"mIoU on {domain.name} by alpha: {text}")

    def _best_epochs(self) -> set[int]:
        """Return the epochs whose networks are the best for any alpha."""
        return {epoch for _, epoch in self.state.best.values()}

    def finish(self) -> Path:
        """Write the last and the best network, curves and summary; return the path of the best."""
        folder = self.folder.path
        best = folder / "best.safetensors"
        if self.fabric.is_global_zero:
            with self.trainer.averaged():
                save_model(self.trainer.model.eval(), folder / "last.safetensors")
            chosen: dict[str, Any] | None = None
            if self.state.best:  # over all alphas
                alpha, (score, epoch) = max(self.state.best.items(), key=lambda item: item[1][0])
                chosen = {"alpha": float(alpha), "mIoU": score, "epoch": epoch}
            source = folder / "last.safetensors"
            if chosen:
                source = self.folder.intact_checkpoint(chosen["epoch"], self.state)
            with atomic_write(best) as temporary:
                shutil.copyfile(source, temporary)
            speed = statistics.median_high(self.state.images_per_s)
            if not (folder / "summary.json").exists():  # else a finished run was started again
                device = self.fabric.device
                cuda = device.type == "cuda"
                content = {
                    "best": chosen,
                    "best by alpha": self.state.best,
                    "steps": self.num_steps,
                    "images_per_s": speed,
                    "speed": None if self.speed is None else asdict(self.speed),
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name(device) if cuda else str(device),
                    "processes": self.fabric.world_size,
                }
                self.folder.write_json(folder / "summary.json", content)
            try:
                draw_curves(folder)
            except ModuleNotFoundError as error:
                self.fabric.print(f"note: no curves were drawn: {error}")
            self.log.close()
            share = f", {self.speed.share(speed)}" if self.speed else ""
            self.fabric.print(f"{speed:.1f} images/s{share}")
            if chosen and self.validation:
                self.fabric.print(
                    f"best: epoch {chosen['epoch']} with alpha {chosen['alpha']:g}, "
                    f"mIoU {100 * chosen['mIoU']:.2f} on {self.validation.name}"
                )
            self.fabric.print(f"the network is in {best}")
        self.fabric.barrier()
        return best

    def _save_state(self) -> None:
        if self.losses:
            losses = self.fabric.all_reduce(torch.stack(self.losses), reduce_op="mean")
            self.losses = list(losses)
        self.state.losses = [float(loss) for loss in self.losses]
        for loss in self.state.losses:
            self._check_loss(loss)
        if self.fabric.is_global_zero:
            trainer = self.trainer
            self.folder.save(self.state, trainer.model, trainer.optimizer, trainer.average)
