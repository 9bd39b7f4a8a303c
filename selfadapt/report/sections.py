"""The sections of a report: each asks the results for what it shows, and is left out without it.

To add one, write a function that takes the results and returns a ``Section`` or None, and give it
a place in ``SECTIONS``.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from pathlib import Path
from statistics import mean, median

from selfadapt.metrics import Counts, class_ece, ece, iou, reliability
from selfadapt.protocol.pictures import shown_method
from selfadapt.protocol.results import DomainScores, Results
from selfadapt.protocol.statistics import change, interval, worse
from selfadapt.protocol.tables import failed_table
from selfadapt.report.figures import curves, histograms, reliability_diagrams, scatter
from selfadapt.report.formats import Cell, Grid
from selfadapt.report.material import Exhibit, Material, Section
from selfadapt.report.published import compared, is_published


def overview(material: Material) -> Section:
    """All methods on all targets."""
    results = material.results
    grid = material.grid(results.methods, lambda scores: scores.mean_iou)
    gains = _gains(material)
    text = (
        f"Settings were chosen on {results.validation}, by mIoU, and frozen; then every target was "
        "segmented once, with the same networks and settings. Each image is segmented on its own, "
        "from the same weights."
    )
    if left := results.num_missing(material.record["images"]):
        text = f"This run is not complete: {left} rows are missing. " + text
    scales = {domain.scale for domain in results.config.domains}
    if scales != {1}:
        text += f" Images are scaled by {', '.join(f'{scale:g}' for scale in sorted(scales))}."
    numbers = (f"{material.record['images'][name]} of {name}" for name in results.targets)
    text += f" Images: {', '.join(numbers)}."
    failed = failed_table(results)
    if failed.rows:
        text += f" {len(failed.rows)} predictions failed and are in no number, see the end."
    caption = "mIoU (%) on the target domains."
    if results.averaged != "targets":
        caption += f" The mean is of all {results.averaged}."
    exhibits = [Exhibit("overview", caption, grid)]
    if gains.rows:
        caption = (
            "Change of mIoU against the source network, in points, with the 95 % interval of a "
            "paired bootstrap over images, where there are several."
        )
        exhibits.append(Exhibit("gains", caption, gains))
    return Section("All methods", text, exhibits)


def _gains(material: Material) -> Grid:
    results, rows = material.results, []
    for label in results.methods:
        reference = results.reference(label)
        if reference in (None, label):
            continue
        cells = []
        for domain in results.targets:
            after, before = results.scores(label, domain), results.scores(str(reference), domain)
            if not after.images or not before.images:
                cells.append("-")
                continue
            if (found := change(after, before)) != found:  # of images without a counted pixel
                cells.append("-")
                continue
            low, high = interval(after, before, domain)
            span = f" [{100 * low:+.2f}, {100 * high:+.2f}]" if low == low else ""
            cells.append(f"{100 * found:+.2f}{span}")
        rows.append((label, *cells))
    return Grid(("method", *results.targets), rows)


def normalisation(material: Material) -> Section | None:
    """SaN against t-BN and p-BN (paper Tables 2a, 7a)."""
    labels = material.labels(("source", "p-bn", "san"))
    if len(labels) < 2:
        return None
    grid = material.grid(labels, lambda scores: scores.mean_iou)
    return Section(
        "Normalisation",
        "The statistics of training (t-BN), those of the image (p-BN), and a mixture (SaN). "
        "Paper: Tables 2a and 7a.",
        [Exhibit("normalisation", "mIoU (%).", grid)],
    )


def calibration(material: Material) -> Section | None:
    """Calibration errors and reliability diagrams (paper Tables 2b, 7b, 8)."""
    results = material.results
    forms: dict[str, tuple[str, Callable[[Counts], float]]] = {
        "ece_class": ("the paper's form: per class and image, 10 bins", class_ece),
        "ece_10": ("over all pixels, 10 bins", ece),
        "ece_15": ("over all pixels, 15 bins", lambda counts: ece(counts, 15)),
    }
    exhibits = []
    for name, (caption, error) in forms.items():
        metric = "ECE" if name == "ece_class" else None
        grid = material.grid(results.methods, partial(_of_counts, error), metric, "low")
        exhibits.append(Exhibit(name, f"Expected calibration error (%), {caption}.", grid))
    bins = {}
    for label in results.methods:
        zero = Counts.zero(len(results.config.space.names))
        counts = sum((results.scores(label, d).counts for d in results.targets), zero)
        bins[label] = reliability(counts)
    caption = "Accuracy over confidence on all targets; bars: share of the pixels."
    exhibits.append(Exhibit("reliability", caption, figure=reliability_diagrams(bins)))
    return Section(
        "Calibration",
        "How far confidence is from accuracy. Paper: Tables 2b, 7b and 8.",
        exhibits,
    )


def _of_counts(error: Callable[[Counts], float], scores: DomainScores) -> float:
    return error(scores.counts)


def adaptation(material: Material) -> Section | None:
    """TTA against self-adaptation (Table 3), entropy minimisation and Tent (Table 5)."""
    exhibits = []
    groups = {
        "tta": (("source", "san", "tta", "self-adapt"), "paper: Table 3"),
        "entropy": (
            ("san", "tent", "entropy", "memo", "intent", "self-adapt"), "paper: Table 5",
        ),
    }  # fmt: skip
    for name, (methods, where) in groups.items():
        labels = material.labels(methods)
        own = {"tta"} if name == "tta" else {"tent", "entropy", "memo", "intent"}
        if own & {material.results.method(label).method for label in labels}:
            grid = material.grid(labels, lambda scores: scores.mean_iou)
            exhibits.append(Exhibit(f"adaptation_{name}", f"mIoU (%); {where}.", grid))
    if not exhibits:
        return None
    text = "Averaging over views, minimising entropy, and adapting to the views' pseudo-label."
    return Section("Adaptation", text, exhibits)


def published_methods(material: Material) -> Section | None:
    """Methods of domain generalisation, as published (Table 4)."""
    results = material.results
    numbers = list(compared(results.config.source))
    config = results.config
    domains = {
        target.dataset: target.label
        for target in config.targets
        if is_published(target, config.source, config.classes)
    }
    shown = [name for name in domains if any(number.domain == name for number in numbers)]
    if not shown:
        return None
    rows: list[tuple[Cell, ...]] = []
    for key in dict.fromkeys((n.network, n.method, n.setting, n.cite) for n in numbers):
        network, method, setting, cite = key
        same = [n for n in numbers if (n.network, n.method, n.setting, n.cite) == key]
        values = {number.domain: number.value for number in same}
        name = f"{method}{f' ({setting})' if setting else ''}, {network}, {cite}"
        rows.append((name, *(values.get(domain) for domain in shown)))
    for label in results.methods:
        ours = [100 * results.scores(label, domains[name]).mean_iou for name in shown]
        rows.append((f"{label}, {material.network(label)}, this run", *ours))
    grid = Grid(("method", *(domains[name] for name in shown)), rows)
    text = "Numbers of other methods are quoted from the paper, Table 4; networks differ."
    return Section("Published methods", text, [Exhibit("published", "mIoU (%).", grid)])


def sweeps(material: Material) -> Section | None:
    """MIoU over the settings that are swept: alpha (Fig. 5), psi and lr (Fig. 3, Table 9)."""
    results, exhibits = material.results, []
    for label in results.methods:
        by_setting: dict[str, list[str]] = {}
        for setting, value in results.sweeps(label):
            by_setting.setdefault(setting, []).append(value)
        for setting, values in by_setting.items():
            exhibits += _sweep(material, label, setting, values)
    if not exhibits:
        return None
    text = (
        "One setting is changed, the others are as chosen. Nothing is chosen by these numbers. "
        "Paper: Figures 3 and 5, Tables 9, 10 and 11."
    )
    return Section("Sensitivity", text, exhibits)


def _sweep(material: Material, label: str, setting: str, values: list[str]) -> list[Exhibit]:
    results = material.results
    trials = {value: results.sweeps(label)[setting, value] for value in values}
    domains = [results.validation, *results.targets]
    rows: list[tuple[Cell, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {domain: [] for domain in domains}
    for value, trial in trials.items():
        found = [results.scores_of(trial, domain) for domain in domains]
        cells = [100 * one.mean_iou if one.images else nan for one in found]
        times = [ms for one in found for ms in one.ms]
        rows.append((_plain(value), *cells, _median(times)))
        number = _number(value)
        if number is not None:
            for domain, cell in zip(domains, cells, strict=True):
                lines[domain].append((number, cell))
    name = f"sweep_{label}_{setting}"
    columns = [setting, *domains, "ms"]
    known = material.swept(label, setting, [_number(value) for value in values])
    if any(known):
        columns.append("Cityscapes, published")
        rows = [(*row, number) for row, number in zip(rows, known, strict=True)]
    grid = Grid(tuple(columns), rows)
    caption = f"{label}: mIoU (%) by {setting}, and milliseconds for an image."
    exhibits = [Exhibit(name, caption, grid)]
    if len(rows) > 1 and all(len(points) == len(rows) for points in lines.values()):
        chosen = results.choices[label].chosen.get(setting)
        marked = {"chosen": float(chosen)} if isinstance(chosen, int | float) else {}
        figure = curves(lines, setting, "mIoU (%)", marked=marked)
        exhibits.append(Exhibit(f"{name}_curve", f"{label}: mIoU by {setting}.", figure=figure))
    return exhibits


def runtime(material: Material) -> Section | None:
    """Accuracy over runtime (Figs. 2 and 6)."""
    results = material.results
    groups: dict[str, list[tuple[float, float, str]]] = {}
    rows: list[tuple[Cell, ...]] = []
    for label in results.methods:
        trials = {"": results.trial(label)}
        for (setting, value), trial in results.sweeps(label).items():
            if setting in ("steps", "adapt"):
                trials[f"{setting} {_plain(value)}"] = trial
        for said, trial in trials.items():
            scores = [results.scores_of(trial, domain) for domain in results.targets]
            times = [ms for one in scores for ms in one.ms]
            if not times or not all(one.images for one in scores):
                continue
            accuracy = results.mean([100 * one.mean_iou for one in scores])
            peak = max((m for one in scores for m in one.megabytes), default=nan)
            rows.append((f"{label} {said}".strip(), median(times), accuracy, peak))
            group = f"{label}, {said.split()[0]}" if said else label
            groups.setdefault(group, []).append((median(times), accuracy, said or label))
    if not rows:
        return None
    grid = Grid(("method", "ms", "mIoU", "MiB"), rows)
    by_domain: list[tuple[Cell, ...]] = [
        (label, *(_median(results.scores(label, domain).ms) for domain in results.targets))
        for label in results.methods
    ]
    figure = scatter(groups, "ms for an image (median)", "mIoU (%), mean of the targets")
    device = material.record["device"]
    return Section(
        "Runtime and accuracy",
        f"On {device}, from a decoded image to its prediction. Paper: Figures 2 and 6.",
        [
            Exhibit("runtime", "Median of milliseconds, mean mIoU (%), peak memory.", grid),
            Exhibit("runtime_plot", "Accuracy over runtime.", figure=figure),
            Exhibit(
                "runtime_by_domain",
                "Milliseconds for an image, by domain, and so by resolution; paper: Table 11.",
                Grid(("method", *results.targets), by_domain, digits=0),
            ),
        ],
    )


def networks(material: Material) -> Section | None:
    """The same methods on several networks (Table 12)."""
    results = material.results
    by_network: dict[str, list[str]] = {}
    for label in results.methods:
        by_network.setdefault(material.network(label), []).append(label)
    if len(by_network) < 2:
        return None
    exhibits = [
        Exhibit(f"network_{name}", f"{name}: mIoU (%).",
                material.grid(labels, lambda scores: scores.mean_iou))
        for name, labels in by_network.items()
    ]  # fmt: skip
    return Section("Networks", "Paper: Tables 6 and 12.", exhibits)


def classes(material: Material) -> Section:
    """IoU by class."""
    results = material.results
    names = results.config.space.names
    exhibits = []
    for domain in results.targets:
        rows: list[tuple[Cell, ...]] = []
        for label in results.methods:
            found = iou(results.scores(label, domain).counts.confusion)
            rows.append((label, *(100 * float(value) for value in found)))
        grid = Grid(("method", *names), rows, "high", 1)
        exhibits.append(Exhibit(f"classes_{domain}", f"{domain}: IoU (%) by class.", grid))
    return Section("Classes", "A class that does not occur in a domain has no number.", exhibits)


def images(material: Material) -> Section | None:
    """Change by image (Fig. 11), the best and the worst images, and others (Figs. 4, 7-10)."""
    results = material.results
    changes: dict[str, list[float]] = {}
    rows: list[tuple[Cell, ...]] = []
    for label in results.methods:
        by_domain = _changes(results, label)
        if values := [value for found in by_domain.values() for value in found]:
            changes[label] = values
            shares = [100 * share for share in worse(values)]
            rows.append((label, len(values), 100 * mean(values), 100 * min(values), *shares))
    if not changes:
        return None
    columns = ("method", "images", "mean", "worst", "worse %", "by more than 5", "by more than 10")
    caption = "Change of each image's own IoU against the source network, in points, all targets."
    return Section(
        "Image by image",
        "Not every image gains. Pictures: image, ground truth, source network, adapted; black "
        "pixels of the ground truth do not count. Paper: Figures 4 and 7 to 11.",
        [
            Exhibit("changes", caption, Grid(columns, rows)),
            Exhibit("changes_histogram", caption, figure=histograms(changes)),
            *_by_domain(results),
        ],
        material.pictures,
    )


def _changes(results: Results, label: str) -> dict[str, list[float]]:
    """Return how the IoU of each image changes against the source network, by domain."""
    reference = results.reference(label)
    if reference is None or reference == label:
        return {}
    return {
        domain: list(
            results.scores(label, domain).changes(results.scores(reference, domain)).values()
        )
        for domain in results.targets
    }


def _by_domain(results: Results) -> list[Exhibit]:
    """Return the histograms of the method that is shown in pictures, one for each target."""
    label = shown_method(results)
    if label is None or len(results.targets) < 2:
        return []
    caption = f"{label}: change of each image's own IoU, by target."
    return [Exhibit("changes_by_domain", caption, figure=histograms(_changes(results, label)))]


def record(material: Material) -> Section:
    """What was tried, chosen and run, so that each number can be traced to its rows."""
    results = material.results
    trials = [
        (label, results.method(label).method, ", ".join(results.trial(label).networks),
         results.trial(label).shown() or "as they are", results.trial(label).key)
        for label in results.methods
    ]  # fmt: skip
    tried = [
        (label, ", ".join(f"{k} {v}" for k, v in settings.items()), 100 * score,
         "chosen" if settings == choice.chosen else "")
        for label, choice in results.choices.items()
        for settings, score in choice.tried
    ]  # fmt: skip
    domains: list[tuple[Cell, ...]] = []
    for place, domain in enumerate(results.config.domains):
        role = (
            ("target" if domain.in_mean else "target, not in the mean") if place else "validation"
        )
        images = material.record["identity"]["images"][domain.label]
        every = (results.scores(label, domain.label).errors for label in results.methods)
        failed = len({image for errors in every for image in errors})
        taken = "all" if domain.limit is None else f"the first {domain.limit}"
        taken += "" if domain.names is None else f" of those in {Path(domain.names).name}"
        domains.append((domain.label, role, images, taken, str(failed), f"{domain.scale:g}"))
    exhibits = [
        Exhibit("trials", "Methods with their settings; every row of the journal has its key.",
                Grid(("method", "is", "networks", "settings", "key"), trials)),
        Exhibit("domains", "Domains.",
                Grid(("domain", "role", "images, names", "taken", "failed", "scale"), domains)),
    ]  # fmt: skip
    if tried:
        caption = f"What was tried on {results.validation}."
        grid = Grid(("method", "settings", "mIoU", ""), tried)
        exhibits.append(Exhibit("tuning", caption, grid))
    notes = material.record["notes"] + sorted(
        {
            note
            for label in results.methods
            for domain in (results.validation, *results.targets)
            for note in results.scores(label, domain).notes
        }
    )
    if failures := [tuple(map(str, row)) for row in failed_table(results).rows]:
        grid = Grid(("method", "domain", "image", "reason"), failures)
        exhibits.append(Exhibit("failed", "What failed, and is in no number.", grid))
    if notes:
        grid = Grid(("note",), [(note,) for note in notes])
        exhibits.append(Exhibit("notes", "What was noted about domains and images.", grid))
    prints = ", ".join(f"{n} {p}" for n, p in material.record["identity"]["networks"].items())
    text = (
        f"selfadapt {material.record['version']}, PyTorch {material.record['torch']} on "
        f"{material.record['device']}. Classes: "
        f"{', '.join(material.record['classes'])}. Networks by fingerprint: {prints}."
    )
    return Section("How it was done", text, exhibits)


SECTIONS: tuple[Callable[[Material], Section | None], ...] = (
    overview, normalisation, calibration, adaptation, published_methods, sweeps, runtime,
    networks, classes, images, record,
)  # fmt: skip


def _median(values: Sequence[float]) -> float:
    return median(values) if values else nan


def _plain(value: str) -> str:
    """Return a value that was written as JSON as a person writes it."""
    content = json.loads(value)
    return ", ".join(map(str, content)) if isinstance(content, list) else str(content)


def _number(value: str) -> float | None:
    content = json.loads(value)
    number = isinstance(content, int | float) and not isinstance(content, bool)
    return float(content) if number else None
