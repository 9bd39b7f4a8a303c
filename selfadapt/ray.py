"""On a Ray cluster: ``Segmenter`` for datasets, and the workers of ``predict`` and ``evaluate``.

    dataset.map_batches(Segmenter, fn_constructor_kwargs={"model": "net.safetensors"}, num_gpus=1)

With ``--ray`` the process that was started is the only one that writes to the journal of a run, so
that the run can be continued with Ray or without. Workers are actors of Ray, one for each GPU, or
for as many cores as the process has threads. They get the networks once, from the process that has
fingerprinted them. Ray restarts workers that die; their images go to whichever worker is free.
"""

import io
import os
import platform
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from torch import Tensor, nn

from selfadapt.addresses import download, is_address
from selfadapt.devices import find_device
from selfadapt.images import Image, read_image, readable_formats
from selfadapt.journal import Row
from selfadapt.labels import Classes
from selfadapt.methods import create_method, load_own
from selfadapt.models.create import open_model
from selfadapt.optional import import_optional
from selfadapt.predict.outputs import masks_of
from selfadapt.predict.remote import FileJob, FileSegmenter
from selfadapt.predict.scene import LargeImages
from selfadapt.predict.stream import UnitOutcome
from selfadapt.protocol.domains import Domain
from selfadapt.protocol.recipe import EvaluateConfig
from selfadapt.protocol.scorer import ScoreJob, Scorer
from selfadapt.protocol.trials import load_own_code

IN_FLIGHT = {"cpu": 2, "cuda": 8}
"""Images that a worker has at a time: one is segmented, the others are read and written."""
MAX_ATTEMPTS = 3
"""How many workers an image may be with when they die, before it counts as failed."""
MAX_RESTARTS = 20
"""How often Ray restarts a worker."""
START_TIMEOUT_S = 60.0
"""Seconds without a worker after which a note is printed."""


class Segmenter:
    """Segments the images of a Ray dataset, for ``Dataset.map_batches``.

    Adds the columns ``label`` and ``confidence`` (0 to 255) of the shape ``(H, W)``, ``quality``
    and ``notes``.

    Args:
        model: The network, or its file, name or address, see ``open_model``.
        method: Name of the method.
        column: The column with images: arrays ``(H, W, 3)``, contents of image files as bytes, or
            paths and addresses of image files.
        device: Device of the network; by default the GPU that Ray has given the actor, if any.
        **settings: Settings of the method.
    """

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str],
        method: str = "self-adapt",
        *,
        column: str = "image",
        device: str = "auto",
        **settings: Any,
    ) -> None:
        network = model if isinstance(model, nn.Module) else open_model(model)
        self.method = create_method(method, network.to(find_device(device)), **settings)
        self.column = column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Segment the images of a batch."""
        results = [self.method(_image_of(value)) for value in batch[self.column]]
        masks = [masks_of(result) for result in results]
        qualities = [np.nan if r.quality is None else r.quality for r in results]
        return {
            **batch,
            "label": _stacked([mask.label for mask in masks]),
            "confidence": _stacked([mask.confidence for mask in masks]),
            "quality": np.array(qualities),
            "notes": np.array(["; ".join(result.notes) for result in results]),
        }


def _image_of(value: Any) -> Image:
    """Return the image in a cell of a dataset."""
    if isinstance(value, bytes):
        with PILImage.open(io.BytesIO(value), formats=readable_formats()) as picture:
            return read_image(picture)
    if not is_address(value):
        return value if isinstance(value, np.ndarray) else str(value)
    with TemporaryDirectory(prefix="selfadapt-") as folder:
        path = Path(folder) / "image"
        download(value, path)
        return read_image(path)


def _stacked(maps: Sequence[Tensor]) -> np.ndarray:
    """Return maps as one array, of objects if their sizes differ."""
    arrays = [part.numpy() for part in maps]
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    column = np.empty(len(arrays), object)
    column[:] = arrays
    return column


class Cluster:
    """Workers on a Ray cluster, which is started on this machine if there is none.

    Args:
        address: Address of the cluster; None: that in ``RAY_ADDRESS``, or the one on this machine.
        device: auto, cpu or cuda; auto: GPUs if the cluster has any.
        threads: Number of threads, and of cores, of a worker without a GPU.
    """

    def __init__(self, address: str | None, device: str, threads: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray = ray = import_optional("ray", "ray")
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--ray takes --device auto, cpu or cuda, got {device}")
        self._stack = ExitStack()
        if not ray.is_initialized():
            self._stack.callback(ray.shutdown)
            try:
                ray.init(address=address, include_dashboard=False, log_to_driver=False,
                         logging_level="ERROR")  # fmt: skip
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = f" at {address}" if address else ""
                raise ValueError(f"no Ray cluster can be reached{where}: {error}") from error
        resources = ray.cluster_resources()
        num_gpus = int(resources.get("GPU", 0)) if device != "cpu" else 0
        if num_gpus:
            self.device, self._needs, self._number = "cuda", {"num_gpus": 1}, num_gpus
            names = (n.partition(":")[2] for n in resources if n.startswith("accelerator_type:"))
            self.device_name = next(names, "GPU")
        elif device == "cuda":
            raise ValueError("the Ray cluster has no GPU; use --device cpu")
        else:
            nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
            self.device, self._needs = "cpu", {"num_cpus": threads}
            self._number = sum(int(cpus // threads) for cpus in nodes)
            self.device_name = "cpu"
        if not self._number:
            raise ValueError(
                f"no machine of the Ray cluster has {threads} cores, as a worker needs; use fewer "
                "threads (predict: OMP_NUM_THREADS=1, evaluate: --threads 1)"
            )
        self._actors: list[Any] = []

    def start(self, worker: type, *args: Any) -> None:
        """Start workers of a class, created with these arguments."""
        kind = self._ray.remote(
            max_restarts=MAX_RESTARTS, max_concurrency=IN_FLIGHT[self.device], **self._needs
        )(_Actor)
        self._args = self._ray.put((worker, args))
        self._actors = [kind.remote() for _ in range(self._number)]

    def map(self, method: str, jobs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each job with its outcome, in the order in which workers end.

        A job whose workers have died ``MAX_ATTEMPTS`` times has a ValueError as its outcome.
        """
        ray, errors = self._ray, self._ray.exceptions
        waiting = deque((job, 1) for job in jobs)
        busy: dict[Any, tuple[Any, Any, int]] = {}
        free: deque[Any] = deque()
        reason: Exception | None = None

        def ready(actor: Any) -> Any:
            return actor.create.options(max_task_retries=-1).remote([self._args])

        # Workers get jobs once they are ready, and again once they were restarted, if ever.
        slots = self._actors * IN_FLIGHT[self.device]
        starting = {ready(actor): actor for actor in slots}
        while waiting or busy:
            while waiting and free:
                actor, (job, attempt) = free.popleft(), waiting.popleft()
                busy[actor.run.remote(method, job)] = actor, job, attempt
            if not busy and not starting:
                last = str(reason).strip().splitlines()[-1]
                raise OSError(f"all workers on the Ray cluster have died; the last: {last}")
            ended, _ = ray.wait([*busy, *starting], timeout=None if busy else START_TIMEOUT_S)
            if not ended:
                warnings.warn("no worker has started yet: is the Ray cluster busy?", stacklevel=2)
                continue
            (done,) = ended
            if done in starting:
                actor = starting.pop(done)
                try:
                    ray.get(done)
                    free.append(actor)
                except errors.RayTaskError as error:
                    raise error.cause from None
                except errors.RayError as error:  # it was restarted too often
                    reason = error
                continue
            actor, job, attempt = busy.pop(done)
            try:
                outcome = ray.get(done)
                free.append(actor)
            except errors.RayTaskError as error:
                raise error.cause from None
            except errors.RayError:  # its process, machine or network is gone
                starting[ready(actor)] = actor
                if attempt < MAX_ATTEMPTS:
                    waiting.append((job, attempt + 1))
                    continue
                outcome = ValueError(
                    f"workers have died {MAX_ATTEMPTS} times while they had it, perhaps as the "
                    "memory was too small; --retry tries it again"
                )
            yield job, outcome

    def __enter__(self) -> "Cluster":
        self._stack.enter_context(redirect_stdout(sys.stderr))  # stdout may have to be JSON
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._stack.close()


class _Actor:
    """The process of a worker."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._lock = threading.Lock()

    def create(self, stored: Sequence[Any]) -> None:
        """Create the worker, unless that is done, from its class and arguments in the store."""
        with self._lock:
            if self._worker is None:
                worker, args = import_optional("ray", "ray").get(stored[0])
                self._worker = worker(*args)

    def run(self, method: str, job: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(job)


class PredictWorker:
    """Segments files; an actor of ``predict --ray``.

    Args:
        networks: The networks.
        method: Name of the method.
        settings: Its settings.
        own: The user's own code to import, with its kind, see ``load_own``.
        classes: Names of the classes, with colours if they are a mapping.
        outputs: Kinds of output.
        large: Arguments of ``LargeImages`` after the method.
        folder: The output folder, which this machine must see; None: outputs go to an address.
        device: Device of the networks.
        threads: Number of threads on a CPU.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        method: str,
        settings: Mapping[str, Any],
        own: Sequence[tuple[str, str]],
        classes: Classes | None,
        outputs: Sequence[str],
        large: tuple[Any, ...],
        folder: Path | None,
        device: str,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        for name, kind in own:
            load_own(name, kind)
        networks = [network.to(find_device(device)) for network in networks]
        model = networks if method == "ensemble" else networks[0]
        segments = create_method(method, model, **settings)
        large_images = LargeImages(segments, *large)
        self._segmenter = FileSegmenter(segments, classes, outputs, large_images)
        self._folder = folder

    def segment(self, job: FileJob) -> UnitOutcome:
        """Segment a file and write its outputs."""
        if self._folder is not None:
            check_shared(self._folder)
        if not is_address(job.file):
            check_shared(Path(job.file).parent)
        return self._segmenter.segment_file(job)


class EvaluateWorker:
    """Scores images; an actor of ``evaluate --ray``.

    Args:
        config: The recipe.
        domains: The domains.
        models: The networks by name.
        trust: Run the user's own code.
        device: Device of the networks.
    """

    def __init__(
        self,
        config: EvaluateConfig,
        domains: Sequence[Domain],
        models: Mapping[str, Any],
        trust: bool,
        device: str,
    ) -> None:
        torch.set_num_threads(config.threads)
        models = {name: model.to(find_device(device)) for name, model in models.items()}
        self._scorer = Scorer(load_own_code(config, trust), domains, models)
        self._lock = threading.Lock()

    def rows(self, job: ScoreJob) -> list[Row]:
        """Return the rows of an image, one for each trial."""
        domain = self._scorer.domains[job.domain]
        if domain.config.dataset != "streets":
            check_shared(domain.data.pairs[0].image.parent)
        loaded = self._scorer.load_or_error(domain, job.number)
        with self._lock:
            return [self._scorer.score(domain, job.number, loaded, t)() for t in job.trials]

    def labels(self, job: ScoreJob) -> list[Tensor]:
        """Return the most likely scored classes of an image ``(H, W)`` for each trial."""
        return self._scorer.labels(job)


class EvaluateWorkers:
    """The workers of ``evaluate --ray``.

    Args:
        cluster: The cluster.
        trust: Run the user's own code.
    """

    def __init__(self, cluster: Cluster, trust: bool) -> None:
        self.device_name = cluster.device_name
        self._cluster, self._trust = cluster, trust

    def start(
        self, config: EvaluateConfig, domains: Sequence[Domain], models: Mapping[str, Any]
    ) -> None:
        """Start the workers."""
        device = self._cluster.device
        self._cluster.start(EvaluateWorker, config, domains, models, self._trust, device)

    def rows(self, jobs: Sequence[ScoreJob]) -> Iterator[tuple[ScoreJob, list[Row] | ValueError]]:
        """Yield the rows of each image, or why there are none."""
        return self._cluster.map("rows", jobs)

    def labels(self, job: ScoreJob) -> list[Tensor]:
        """Return the most likely scored classes of an image ``(H, W)`` for each trial."""
        ((_, labels),) = self._cluster.map("labels", [job])
        if isinstance(labels, ValueError):
            raise labels
        return list(labels)


def check_shared(folder: Path) -> None:
    """Raise OSError if a machine of the cluster does not see a folder of the run."""
    if not folder.is_dir():
        raise OSError(
            f"{platform.node()}, a machine of the Ray cluster, does not see {folder}: put it on a "
            "disk that all machines share, or use an address such as s3://bucket/folder"
        )
