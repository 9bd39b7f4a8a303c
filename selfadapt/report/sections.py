"""The sections of a report. A section without data is left out.

To add a section, write a function that takes a ``ReportContext`` and returns a ``Section`` or None,
and add it to ``SECTIONS``.
"""

import json
from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from statistics import mean, median

from selfadapt.metrics import Counts, class_ece, ece, iou, reliability
from selfadapt.protocol.pictures import shown_method
from selfadapt.protocol.results import DomainScores, Results
from selfadapt.protocol.statistics import change, interval, quality_correlation, worse
from selfadapt.protocol.tables import failed_table
from selfadapt.report.context import ReportContext, ReportItem, Section
from selfadapt.report.figures import curves, histograms, reliability_diagrams, scatter
from selfadapt.report.formats import Cell, Grid
from selfadapt.report.published import compared_methods, is_published


def overview(context: ReportContext) -> Section:
    """All methods on all targets."""
    results = context.results
    grid = context.grid(results.methods, lambda scores: scores.mean_iou)
    gains = _gains(context)
    text = (
        f"Settings were chosen by mIoU on {results.validation} and frozen; then every target was "
        "segmented once, with the same networks and settings. Each image is segmented "
        "independently, from the same weights."
    )
    if missing := results.num_missing(context.record["images"]):
        text = f"This run is not complete: {missing} rows are missing. " + text
    scales = {domain.scale for domain in results.config.domains}
    if scales != {1}:
        text += f" Images are scaled by {', '.join(f'{scale:g}' for scale in sorted(scales))}."
    numbers = (f"{context.record['images'][name]} of {name}" for name in results.targets)
    text += f" Images: {', '.join(numbers)}."
    failed = failed_table(results)
    if failed.rows:
        text += f" {len(failed.rows)} predictions failed and are not counted, see the end."
    caption = "mIoU (%) on the target domains."
    if results.averaged != "targets":
        caption += f" The mean is of all {results.averaged}."
    items = [ReportItem("overview", caption, grid)]
    if gains.rows:
        caption = (
            "Change of mIoU against the source network, in points, with the 95 % interval of a "
            "paired bootstrap over images, where there are several."
        )
        items.append(ReportItem("gains", caption, gains))
    return Section("All methods", text, items)


def _gains(context: ReportContext) -> Grid:
    results, rows = context.results, []
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
            if (delta := change(after, before)) != delta:  # no pixel is counted
                cells.append("-")
                continue
            low, high = interval(after, before, domain)
            span = f" [{100 * low:+.2f}, {100 * high:+.2f}]" if low == low else ""
            cells.append(f"{100 * delta:+.2f}{span}")
        rows.append((label, *cells))
    return Grid(("method", *results.targets), rows)


def normalisation(context: ReportContext) -> Section | None:
    """SaN against t-BN and p-BN (paper Tables 2a, 7a)."""
    labels = context.labels(("source", "p-bn", "san"))
    if len(labels) < 2:
        return None
    grid = context.grid(labels, lambda scores: scores.mean_iou)
    return Section(
        "Normalisation",
        "The statistics of training (t-BN), those of the image (p-BN), and a mixture (SaN). "
        "Paper: Tables 2a and 7a.",
        [ReportItem("normalisation", "mIoU (%).", grid)],
    )


def calibration(context: ReportContext) -> Section | None:
    """Calibration errors and reliability diagrams (paper Tables 2b, 7b, 8)."""
    results = context.results
    forms: dict[str, tuple[str, Callable[[DomainScores], float]]] = {
        "ece_class": (
            "as in the paper: by class and image, 10 bins",
            lambda s: class_ece(s.counts),
        ),
        "ece_10": ("over all pixels, 10 bins", lambda s: ece(s.counts)),
        "ece_15": ("over all pixels, 15 bins", lambda s: ece(s.counts, 15)),
    }
    items = []
    for name, (caption, error) in forms.items():
        metric = "ECE" if name == "ece_class" else None
        grid = context.grid(results.methods, error, metric, "low")
        items.append(ReportItem(name, f"Expected calibration error (%), {caption}.", grid))
    bins = {}
    for label in results.methods:
        zero = Counts.zero(len(results.config.space.names))
        counts = sum((results.scores(label, d).counts for d in results.targets), zero)
        bins[label] = reliability(counts)
    caption = "Accuracy over confidence on all targets; bars: share of the pixels."
    items.append(ReportItem("reliability", caption, figure=reliability_diagrams(bins)))
    labels = [
        label
        for label in results.methods
        if any(results.scores(label, domain).quality for domain in results.targets)
    ]
    if labels:
        caption = "Rank correlation (%) of the estimated quality with the mean IoU of an image."
        grid = context.grid(labels, quality_correlation, None)
        items.append(ReportItem("quality", caption, grid))
    return Section(
        "Calibration",
        "How far confidence is from accuracy. Paper: Tables 2b, 7b and 8.",
        items,
    )


def adaptation(context: ReportContext) -> Section | None:
    """TTA against self-adaptation (Table 3), entropy minimisation and Tent (Table 5)."""
    items = []
    groups = {
        "tta": (("source", "san", "tta", "self-adapt"), "paper: Table 3"),
        "entropy": (
            ("san", "tent", "entropy", "memo", "intent", "self-adapt"), "paper: Table 5",
        ),
    }  # fmt: skip
    for name, (methods, where) in groups.items():
        labels = context.labels(methods)
        required = {"tta"} if name == "tta" else {"tent", "entropy", "memo", "intent"}
        if required & {context.results.method(label).method for label in labels}:
            grid = context.grid(labels, lambda scores: scores.mean_iou)
            items.append(ReportItem(f"adaptation_{name}", f"mIoU (%); {where}.", grid))
    if not items:
        return None
    text = "Averaging over views, minimising entropy, and adapting to the views' pseudo-label."
    return Section("Adaptation", text, items)


def published_methods(context: ReportContext) -> Section | None:
    """Methods of domain generalisation, as published (Table 4)."""
    results = context.results
    numbers = list(compared_methods(results.config.source))
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
        rows.append((f"{label}, {context.network(label)}, this run", *ours))
    grid = Grid(("method", *(domains[name] for name in shown)), rows)
    text = "Numbers of other methods are quoted from the paper, Table 4; networks differ."
    return Section("Published methods", text, [ReportItem("published", "mIoU (%).", grid)])


def sweeps(context: ReportContext) -> Section | None:
    """MIoU by values of the swept settings: alpha (Fig. 5), psi and lr (Fig. 3, Table 9)."""
    results, items = context.results, []
    for label in results.methods:
        by_setting: dict[str, list[str]] = {}
        for setting, value in results.sweeps(label):
            by_setting.setdefault(setting, []).append(value)
        for setting, values in by_setting.items():
            items += _sweep(context, label, setting, values)
    if not items:
        return None
    text = (
        "One setting is varied, the others are as chosen. These numbers are not used for tuning. "
        "Paper: Figures 3 and 5, Tables 9, 10 and 11."
    )
    return Section("Sensitivity", text, items)


def _sweep(context: ReportContext, label: str, setting: str, values: list[str]) -> list[ReportItem]:
    results = context.results
    trials = {value: results.sweeps(label)[setting, value] for value in values}
    domains = [results.validation, *results.targets]
    rows: list[tuple[Cell, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {domain: [] for domain in domains}
    for value, trial in trials.items():
        scores = [results.scores_of(trial, domain) for domain in domains]
        cells = [100 * s.mean_iou if s.images else nan for s in scores]
        times = [ms for s in scores for ms in s.ms]
        rows.append((_format_value(value), *cells, _median(times)))
        number = _number(value)
        if number is not None:
            for domain, cell in zip(domains, cells, strict=True):
                lines[domain].append((number, cell))
    name = f"sweep_{label}_{setting}"
    columns = [setting, *domains, "ms"]
    published = context.sweep_values(label, setting, [_number(value) for value in values])
    if any(published):
        columns.append("Cityscapes, published")
        rows = [(*row, number) for row, number in zip(rows, published, strict=True)]
    grid = Grid(tuple(columns), rows)
    caption = f"{label}: mIoU (%) by {setting}, and milliseconds for an image."
    items = [ReportItem(name, caption, grid)]
    if len(rows) > 1 and all(len(points) == len(rows) for points in lines.values()):
        chosen = results.choices[label].chosen.get(setting)
        marked = {"chosen": float(chosen)} if isinstance(chosen, int | float) else {}
        figure = curves(lines, setting, "mIoU (%)", marked=marked)
        items.append(ReportItem(f"{name}_curve", f"{label}: mIoU by {setting}.", figure=figure))
    return items


def runtime(context: ReportContext) -> Section | None:
    """Accuracy over runtime (Figs. 2 and 6)."""
    results = context.results
    groups: dict[str, list[tuple[float, float, str]]] = {}
    rows: list[tuple[Cell, ...]] = []
    for label in results.methods:
        trials = {"": results.trial(label)}
        for (setting, value), trial in results.sweeps(label).items():
            if setting in ("steps", "adapt"):
                trials[f"{setting} {_format_value(value)}"] = trial
        for name, trial in trials.items():
            scores = [results.scores_of(trial, domain) for domain in results.targets]
            times = [ms for s in scores for ms in s.ms]
            if not times or not all(s.images for s in scores):
                continue
            accuracy = results.mean([100 * s.mean_iou for s in scores])
            peak = max((m for s in scores for m in s.megabytes), default=nan)
            rows.append((f"{label} {name}".strip(), median(times), accuracy, peak))
            group = f"{label}, {name.split()[0]}" if name else label
            groups.setdefault(group, []).append((median(times), accuracy, name or label))
    if not rows:
        return None
    grid = Grid(("method", "ms", "mIoU", "MiB"), rows)
    by_domain: list[tuple[Cell, ...]] = [
        (label, *(_median(results.scores(label, domain).ms) for domain in results.targets))
        for label in results.methods
    ]
    figure = scatter(groups, "ms for an image (median)", "mIoU (%), mean of the targets")
    device = context.record["device"]
    return Section(
        "Runtime and accuracy",
        f"On {device}, from a decoded image to its prediction. Paper: Figures 2 and 6.",
        [
            ReportItem("runtime", "Median of milliseconds, mean mIoU (%), peak memory.", grid),
            ReportItem("runtime_plot", "Accuracy over runtime.", figure=figure),
            ReportItem(
                "runtime_by_domain",
                "Milliseconds for an image, by domain, and so by resolution; paper: Table 11.",
                Grid(("method", *results.targets), by_domain, digits=0),
            ),
        ],
    )


def networks(context: ReportContext) -> Section | None:
    """The same methods on several networks (Table 12)."""
    results = context.results
    by_network: dict[str, list[str]] = {}
    for label in results.methods:
        by_network.setdefault(context.network(label), []).append(label)
    if len(by_network) < 2:
        return None
    items = [
        ReportItem(f"network_{name}", f"{name}: mIoU (%).",
                   context.grid(labels, lambda scores: scores.mean_iou))
        for name, labels in by_network.items()
    ]  # fmt: skip
    return Section("Networks", "Paper: Tables 6 and 12.", items)


def classes(context: ReportContext) -> Section:
    """IoU by class."""
    results = context.results
    names = results.config.space.names
    items = []
    for domain in results.targets:
        rows: list[tuple[Cell, ...]] = []
        for label in results.methods:
            values = iou(results.scores(label, domain).counts.confusion)
            rows.append((label, *(100 * float(value) for value in values)))
        grid = Grid(("method", *names), rows, "high", 1)
        items.append(ReportItem(f"classes_{domain}", f"{domain}: IoU (%) by class.", grid))
    return Section("Classes", "Classes that do not occur in a domain have no value.", items)


def images(context: ReportContext) -> Section | None:
    """Change by image (Fig. 11); pictures of the best, worst and other images (Figs. 4, 7-10)."""
    results = context.results
    changes: dict[str, list[float]] = {}
    rows: list[tuple[Cell, ...]] = []
    for label in results.methods:
        by_domain = _changes(results, label)
        if values := [value for domain in by_domain.values() for value in domain]:
            changes[label] = values
            shares = [100 * share for share in worse(values)]
            rows.append((label, len(values), 100 * mean(values), 100 * min(values), *shares))
    if not changes:
        return None
    columns = ("method", "images", "mean", "worst", "worse %", "by more than 5", "by more than 10")
    caption = "Change of the IoU of each image against the source network, in points, all targets."
    shown = shown_method(results)
    by_target = []
    if shown is not None and len(results.targets) > 1:
        text = f"{shown}: change of the IoU of each image, by target."
        figure = histograms(_changes(results, shown))
        by_target.append(ReportItem("changes_by_domain", text, figure=figure))
    return Section(
        "Image by image",
        "Not every image improves. Pictures: image, ground truth, source network, adapted "
        f"({shown}); black pixels of the ground truth are ignored. Paper: Figures 4 and 7 to 11.",
        [
            ReportItem("changes", caption, Grid(columns, rows)),
            ReportItem("changes_histogram", caption, figure=histograms(changes)),
            *by_target,
        ],
        context.pictures,
    )


def _changes(results: Results, label: str) -> dict[str, list[float]]:
    """Return the change of IoU of each image against the source network, by domain."""
    reference = results.reference(label)
    if reference is None or reference == label:
        return {}
    return {
        domain: list(
            results.scores(label, domain).changes(results.scores(reference, domain)).values()
        )
        for domain in results.targets
    }


def record(context: ReportContext) -> Section:
    """Trials, domains, tuning, failures and notes: each number can be traced to its rows."""
    results = context.results
    trials = [
        (label, results.method(label).method, ", ".join(results.trial(label).networks),
         results.trial(label).shown() or "defaults", results.trial(label).key)
        for label in results.methods
    ]  # fmt: skip
    tried = [
        (label, ", ".join(f"{k} {v}" for k, v in settings.items()), 100 * score,
         "chosen" if settings == choice.chosen else "")
        for label, choice in results.choices.items()
        for settings, score in choice.tried
    ]  # fmt: skip
    domains: list[tuple[Cell, ...]] = []
    for index, domain in enumerate(results.config.domains):
        role = (
            ("target" if domain.in_mean else "target, not in the mean") if index else "validation"
        )
        images = context.record["identity"]["images"][domain.label]
        all_scores = [results.scores(label, domain.label) for label in results.methods]
        failed = len({image for scores in all_scores for image in scores.errors})
        taken = "all" if domain.limit is None else f"the first {domain.limit}"
        taken += "" if domain.names is None else f" of those in {Path(domain.names).name}"
        domains.append((domain.label, role, images, taken, str(failed), f"{domain.scale:g}"))
    items = [
        ReportItem("trials", "Methods with their settings; the key identifies their rows.",
                   Grid(("method", "is", "networks", "settings", "key"), trials)),
        ReportItem("domains", "Domains.",
                   Grid(("domain", "role", "images, names", "taken", "failed", "scale"), domains)),
    ]  # fmt: skip
    if tried:
        caption = f"Settings tried on {results.validation}."
        grid = Grid(("method", "settings", "mIoU", ""), tried)
        items.append(ReportItem("tuning", caption, grid))
    notes = context.record["notes"] + sorted(
        {
            note
            for label in results.methods
            for domain in (results.validation, *results.targets)
            for note in results.scores(label, domain).notes
        }
    )
    if failures := [tuple(map(str, row)) for row in failed_table(results).rows]:
        grid = Grid(("method", "domain", "image", "reason"), failures)
        items.append(ReportItem("failed", "Failed predictions, which are not counted.", grid))
    if notes:
        grid = Grid(("note",), [(note,) for note in notes])
        items.append(ReportItem("notes", "Notes about domains and images.", grid))
    fingerprints = ", ".join(f"{n} {p}" for n, p in context.record["identity"]["networks"].items())
    text = (
        f"selfadapt {context.record['version']}, PyTorch {context.record['torch']} on "
        f"{context.record['device']}. Classes: "
        f"{', '.join(context.record['classes'])}. Fingerprints of the networks: {fingerprints}."
    )
    return Section("How it was done", text, items)


SECTIONS: tuple[Callable[[ReportContext], Section | None], ...] = (
    overview, normalisation, calibration, adaptation, published_methods, sweeps, runtime,
    networks, classes, images, record,
)  # fmt: skip


def _median(values: Sequence[float]) -> float:
    return median(values) if values else nan


def _format_value(value: str) -> str:
    """Return a JSON value as readable text."""
    content = json.loads(value)
    return ", ".join(map(str, content)) if isinstance(content, list) else str(content)


def _number(value: str) -> float | None:
    content = json.loads(value)
    number = isinstance(content, int | float) and not isinstance(content, bool)
    return float(content) if number else None
