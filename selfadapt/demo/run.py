"""``selfadapt demo``: compare the main methods on rendered streets or on images without labels.

Network and streets are part of the package. Settings were chosen on the look ``dusk``, not on the
looks shown.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from selfadapt.checks import check_number
from selfadapt.data import open_dataset
from selfadapt.data.reading import read_image_size
from selfadapt.demo.pictures import comparison_pictures, legend, strip, visible_classes
from selfadapt.demo.tables import (
    DemoCell,
    DemoSection,
    Headline,
    MethodChange,
    MethodScore,
    Scene,
    change_chart,
    change_table,
    change_verdict,
    gain,
    mean_changes,
    mean_scores,
    score_chart,
    score_table,
    score_verdict,
)
from selfadapt.devices import cpu_threads
from selfadapt.engine import described
from selfadapt.files import atomic_write, make_folder, would_be_replaced
from selfadapt.forecast import FEW_STEPS, SLOW_IMAGE_S, total_seconds
from selfadapt.images import load_image
from selfadapt.labels import STREETS_9, predicted_names
from selfadapt.method import UNLIKE
from selfadapt.methods import create_method
from selfadapt.metrics import Score
from selfadapt.models import open_model
from selfadapt.models.create import SHIPPED
from selfadapt.models.trained import OTHER_NETWORKS, trained_on
from selfadapt.pages import render
from selfadapt.patterns import alternatives
from selfadapt.predict import find_inputs
from selfadapt.predict.stream import picture_notes
from selfadapt.progress import ProgressBar, duration
from selfadapt.result import Result
from selfadapt.streets import TARGETS
from selfadapt.views import Size, resize, size_of

DEFAULT_SETTINGS: dict[str, dict[str, Any]] = {
    "source": {}, "p-bn": {}, "san": {}, "tta": {}, "tent": {}, "self-adapt": {},
}  # fmt: skip
"""Methods in the order of the tables, with default settings."""
STREETS_SETTINGS: dict[str, dict[str, Any]] = {
    "source": {},
    "p-bn": {},
    "san": {"alpha": 0.3},
    "tta": {"alpha": 0.3},
    "tent": {"alpha": 0.3},
    "self-adapt": {"alpha": 0.3, "lr": 0.05},
}
"""Methods with the settings that are best for the shipped network on the look ``dusk``."""
MAX_SIDE = 1024
"""Maximum height and width of your own images; larger ones are scaled down."""


def demo(
    folder: Path,
    *,
    looks: Sequence[str] = TARGETS,
    scenes: int = 2,
    steps: int = 10,
    device: torch.device | str = "cpu",
    overwrite: bool = False,
) -> Path:
    """Compare methods on rendered streets, print tables and write a page.

    Args:
        folder: Where to write ``report.html``.
        looks: Target looks of the built-in world.
        scenes: Number of scenes of each look.
        steps: Gradient steps of the methods that take steps.
        device: Where to compute.
        overwrite: Replace a page that is there.

    Returns:
        The page.
    """
    for look in looks:
        if look not in TARGETS:
            raise ValueError(f"unknown target look {look!r}{alternatives(look, TARGETS)}")
    check_number("scenes", scenes, 1, whole=True)
    report = _report_path(folder, overwrite)
    make_folder(folder)
    console, sections = Console(), []
    methods = _methods(open_model(SHIPPED).to(device), STREETS_SETTINGS, steps)
    means: dict[str, list[MethodScore]] = {}
    gains: list[tuple[float, str, Scene]] = []
    # Several threads stall on a machine with other load.
    with cpu_threads(1), ProgressBar("adapting", len(looks) * scenes * len(methods)) as bar:
        for look in dict.fromkeys(looks):
            domain = open_dataset("streets", split=look, space="streets-9", limit=scenes)
            scores = {name: Score(len(STREETS_9)) for name in methods}
            times: dict[str, list[float]] = {name: [] for name in methods}
            shown = []
            for sample in (domain[number] for number in range(len(domain))):
                image = load_image(sample.image)
                label = torch.from_numpy(sample.label).long().to(device)
                results = {}
                for name, method in methods.items():
                    results[name] = method(image)
                    scores[name].add(label, results[name].probs)
                    times[name].append(results[name].seconds)
                    bar.advance()
                before, after = (scores[name].image_iou[-1] for name in ("source", "self-adapt"))
                pictures = comparison_pictures(
                    image, results["source"], results["self-adapt"], STREETS_9, label
                )
                badge = gain(after - before)
                title = f"{sample.name}: mIoU {before:.1%} to {after:.1%} ({badge.text})"
                shown.append(Scene(title, pictures, strip(pictures, labelled=True), badge))
                gains.append((after - before, look, shown[-1]))
            means[look] = [MethodScore.of(name, scores[name], times[name]) for name in methods]
            table = score_table(f"{look}, scenes: {len(domain)}", means[look])
            console.print(table.to_rich())
            sections.append(DemoSection(look, table, shown))
    overall = mean_scores(means)
    if len(means) > 1:
        console.print(score_table(f"mean over {', '.join(means)}", overall).to_rich())
    verdict = score_verdict(overall)
    console.print(verdict)
    ranked = sorted(gains, key=lambda entry: entry[0])
    _, look, scene = ranked[(len(ranked) - 1) // 2]
    headline = Headline(
        scene.strip,
        scene.change._replace(text=f"{scene.change.text} mIoU"),
        f"by self-adaptation on this image ({look}), the median gain of {len(gains)} images",
    )
    _write(
        report, title=STREETS_TITLE, text=STREETS_TEXT, headline=headline,
        legend=legend(STREETS_9), chart=score_chart(overall), verdict=verdict, sections=sections,
        footer=SCORES_FOOTER, notes=(),
    )  # fmt: skip
    console.print(f"the report is in {report}", soft_wrap=True)
    return report


def demo_images(
    folder: Path,
    images: Sequence[str | Path],
    model: nn.Module,
    classes: Sequence[str],
    *,
    settings: Mapping[str, Mapping[str, Any]] = DEFAULT_SETTINGS,
    steps: int = 10,
    overwrite: bool = False,
) -> tuple[Path, dict[Path, str]]:
    """Compare methods on images without labels, print tables and write a page.

    Args:
        folder: Where to write ``report.html``.
        images: Image files or folders. Larger images are scaled down to ``MAX_SIDE``.
        model: A trained segmentation network.
        classes: Names of its classes.
        settings: Settings by method; ``source`` and ``self-adapt`` are required.
        steps: Gradient steps of the methods that take steps.
        overwrite: Replace a page that is there.

    Returns:
        Path of the page, and the errors of images that failed.
    """
    paths = [item.path for item in find_inputs(images) if not item.is_video]
    if not paths:
        raise ValueError("the demo takes images, got videos only; selfadapt predict takes them")
    report = _report_path(folder, overwrite)
    console, sections = Console(), []
    methods = _methods(model, settings, steps)
    names: list[str] = []
    changes: list[list[MethodChange]] = []
    failures: dict[Path, str] = {}
    for line in _opening_lines(model, methods, paths):
        Console(stderr=True).print(line, soft_wrap=True, markup=False, highlight=False)
    with ProgressBar("adapting", len(paths) * len(methods)) as bar:
        for path in paths:
            try:
                image = _downscaled(load_image(path))
            except (ValueError, OSError) as error:
                failures[path] = str(error)
                continue
            results: dict[str, Result] = {}
            try:
                for name, method in methods.items():
                    results[name] = method(image)
                    bar.advance()
            except (torch.OutOfMemoryError, MemoryError, OSError):
                raise
            except Exception as error:  # raised by the network
                failures[path] = f"{path}: the network failed: {described(error)}"
                continue
            make_folder(folder)
            source = results["source"]
            classes = predicted_names(classes, len(source.probs))
            rows = [MethodChange.of(name, result, source) for name, result in results.items()]
            changes.append(rows)
            table = change_table(path.name, rows)
            console.print(table.to_rich())
            adapted_result = results["self-adapt"]
            pictures = comparison_pictures(image, source, adapted_result, classes)
            adapted = MethodChange.of("self-adapt", adapted_result, source)
            quality = adapted_result.quality
            estimate = "" if quality is None else f", estimated quality {quality:.2f}"
            badge = DemoCell(f"{adapted.changed:.1%} of the pixels{estimate}")
            scene = Scene("", pictures, strip(pictures, labelled=False), badge)
            notes = (*picture_notes(path), *adapted_result.notes)
            if UNLIKE in notes:
                notes += (OTHER_NETWORKS,)
            sections.append(DemoSection(path.name, table, [scene], notes))
            for note in notes:
                console.print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)
            names += visible_classes((source.label, adapted_result.label), classes)
    if not sections:
        raise ValueError("; ".join(failures.values()))
    shown = [name for name in classes if name in set(names)]
    common_notes = [note for note in sections[0].notes if all(note in s.notes for s in sections)]
    sections = [
        section._replace(notes=[note for note in section.notes if note not in common_notes])
        for section in sections
    ]
    text = " ".join([IMAGES_TEXT, *(f"{line.capitalize()}." for line in trained_on([model]))])
    mean = mean_changes(changes)
    scene = sections[0].scenes[0]
    headline = Headline(
        scene.strip, scene.change, f"change their class by adaptation: {sections[0].title}"
    )
    _write(
        report, title=IMAGES_TITLE, text=text, headline=headline, legend=legend(classes, shown),
        chart=change_chart(mean), verdict=change_verdict(mean), sections=sections,
        footer=CHANGES_FOOTER, notes=common_notes,
    )  # fmt: skip
    console.print(f"the report is in {report}", soft_wrap=True)
    return report, failures


def _report_path(folder: Path, overwrite: bool) -> Path:
    """Return the path of the page; raise an error if it cannot be written there."""
    report = folder / "report.html"
    if report.exists() and not overwrite:
        raise would_be_replaced(report)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"the output must be a folder, but {folder} is a file")
    return report


def _methods(
    model: nn.Module, settings: Mapping[str, Mapping[str, Any]], steps: int
) -> dict[str, Any]:
    """Create the methods, with ``steps`` for those that take steps."""
    stepwise = {name: {"steps": steps} for name in ("tent", "self-adapt")}
    methods: dict[str, Any] = {}
    for name, given in settings.items():
        try:
            values = {**given, **stepwise.get(name, {})}
            methods[name] = create_method(name, model, compare=False, **values)
        except ValueError as error:
            if name in ("source", "self-adapt"):  # the page needs both
                raise
            warnings.warn(f"without {name}: {error}", stacklevel=2)
    return methods


def _downscaled(image: Tensor) -> Tensor:
    size = _downscaled_size(size_of(image))
    return image if size == size_of(image) else resize(image, size)


def _downscaled_size(size: Size) -> Size:
    scale = MAX_SIDE / max(size)
    return size if scale >= 1 else (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))


def _opening_lines(
    model: nn.Module, methods: Mapping[str, Any], paths: Sequence[Path]
) -> list[str]:
    """Return the training data of the network, and an estimate of the total time on a CPU."""
    sizes: Counter[Size] = Counter()
    for path in paths:
        with suppress(ValueError, OSError):  # reported when the image is read
            width, height = read_image_size(path)
            sizes[_downscaled_size((height, width))] += 1
    if not sizes:
        return []
    times = [total_seconds(method, sizes) for method in methods.values()]
    total = sum(time or 0.0 for time in times)
    if not total or None in times:
        return trained_on([model])
    text = f"{len(methods)} methods on {sizes.total()} images take about {duration(total)}"
    steps = max(getattr(method, "steps", 0) for method in methods.values())
    hint = f"; fewer steps take less, such as --steps {FEW_STEPS}" if steps > FEW_STEPS else ""
    text += " on this CPU" + (hint if total > SLOW_IMAGE_S * sizes.total() else "")
    return [*trained_on([model]), text]


def _write(report: Path, **content: object) -> None:
    with atomic_write(report) as temporary:
        temporary.write_text(render("demo.html", **content), encoding="utf-8")


STREETS_TITLE = "A network trained on daylight images, applied to other conditions"
STREETS_TEXT = """A small network was trained on rendered streets by day. Settings were chosen on
another look, dusk, not on those below. Each image is segmented independently, from the same
trained weights. The streets are drawn for this package: the gains are an illustration, not a
benchmark."""
SCORES_FOOTER = """mIoU: overlap of prediction and ground truth, mean over the classes; ECE:
difference of confidence and accuracy, lower is better; time: one image on this machine."""
IMAGES_TITLE = "Before and after self-adaptation"
IMAGES_TEXT = """These images have no ground truth, so no number here says which prediction is
right: compare the pictures."""
CHANGES_FOOTER = """Changed: pixels whose class differs from that of the network as trained;
confidence: mean probability of the predicted class; time: one image on this machine."""
