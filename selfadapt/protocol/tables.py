"""Tables of an evaluation as CSV files, byte for byte reproducible except for the times."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import mean, median

import torch

from selfadapt.files import atomic_write, csv_cell, make_folder
from selfadapt.metrics import class_ece, ece, iou, pixel_accuracy
from selfadapt.protocol.folder import TABLES
from selfadapt.protocol.results import DomainScores, Results
from selfadapt.protocol.statistics import bootstrap, change, interval, middle_95, worse


@dataclass(frozen=True)
class CsvTable:
    """Rows under column names."""

    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]


def write_tables(folder: Path, results: Results) -> None:
    """Write all tables of a run to its folder ``tables``."""
    make_folder(folder / "tables")
    make_tables = (
        domains_table, classes_table, images_table, sweeps_table, tuning_table, failed_table,
        times_table,
    )  # fmt: skip
    for name, make_table in zip(TABLES, make_tables, strict=True):
        table = make_table(results)
        with (
            atomic_write(folder / "tables" / f"{name}.csv") as temporary,
            temporary.open("w", newline="") as file,
        ):
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(table.columns)
            writer.writerows([_text(value) for value in row] for row in table.rows)


def domains_table(results: Results) -> CsvTable:
    """Return accuracy and calibration of each method on each domain, and means over the targets.

    Changes are relative to ``source`` with the same network, with paired bootstrap intervals.
    """
    columns = (
        "method", "trial", "domain", "images", "failed", "mIoU", "pixel_accuracy", "ECE_10",
        "ECE_15", "ECE_class", "change", "change_low", "change_high", "worse", "worse_5",
        "worse_10",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for label in results.methods:
        by_domain = []
        for domain in (results.validation, *results.targets):
            values = _domain_row(results, label, domain)
            by_domain.append(values)
            rows.append((label, results.trial(label).key, domain, *values))
        if len(results.targets) > 1:
            means = _mean_row(results, label, by_domain[1:])
            rows.append((label, results.trial(label).key, f"mean of {results.averaged}", *means))
    return CsvTable(columns, rows)


def _domain_row(results: Results, label: str, domain: str) -> tuple[float, ...]:
    scores, reference = results.scores(label, domain), results.reference(label)
    sizes: tuple[float, ...] = len(scores.images), len(scores.errors)
    if not scores.counts.confusion.any():
        return (*sizes, *[nan] * 11)
    quality = (
        scores.mean_iou, pixel_accuracy(scores.counts.confusion), ece(scores.counts, 10),
        ece(scores.counts, 15), class_ece(scores.counts),
    )  # fmt: skip
    if reference is None or reference == label:
        return (*sizes, *quality, *[nan] * 6)
    before = results.scores(reference, domain)
    low, high = interval(scores, before, domain)
    return (
        *sizes, *quality, change(scores, before), low, high,
        *worse(scores.changes(before).values()),
    )  # fmt: skip


def _mean_row(results: Results, label: str, rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Return the means over the targets, with the interval of the mean change."""
    domains = zip(rows, results.config.targets, strict=True)
    rows = [row for row, domain in domains if domain.in_mean]
    values = [mean(column) for column in zip(*rows, strict=True)]
    values[:2] = [sum(row[0] for row in rows), sum(row[1] for row in rows)]
    reference = results.reference(label)
    if reference is not None and reference != label and all(row[0] for row in rows):
        changes = [
            bootstrap(results.scores(label, name), results.scores(reference, name), name)
            for name in (domain.label for domain in results.config.targets if domain.in_mean)
        ]
        values[8:10] = middle_95(torch.stack(changes).mean(dim=0))
    return values


def classes_table(results: Results) -> CsvTable:
    """Return the IoU of each class; empty if the class does not occur."""
    rows: list[tuple[object, ...]] = []
    for label, domain, scores in _all(results):
        pixels = scores.counts.confusion.sum(dim=1)
        by_class = iou(scores.counts.confusion)
        for index, name in enumerate(results.config.space.names):
            rows.append((label, domain, name, int(pixels[index]), float(by_class[index])))
    return CsvTable(("method", "domain", "class", "pixels", "IoU"), rows)


def images_table(results: Results) -> CsvTable:
    """Return the IoU of each image, its change against ``source``, and its estimated quality."""
    rows: list[tuple[object, ...]] = []
    for label, domain, scores in _all(results):
        reference = results.reference(label)
        changes = scores.changes(results.scores(reference, domain)) if reference else {}
        for name in scores.images:
            score = scores.image_iou.get(name, nan)
            quality = scores.quality.get(name, nan)
            rows.append((label, domain, name, score, changes.get(name, nan), quality))
    return CsvTable(("method", "domain", "image", "mIoU", "change", "quality"), rows)


def sweeps_table(results: Results) -> CsvTable:
    """Return accuracy and calibration for each value of the swept settings."""
    rows: list[tuple[object, ...]] = []
    for label in results.methods:
        for (setting, value), trial in results.sweeps(label).items():
            for domain in (results.validation, *results.targets):
                scores = results.scores_of(trial, domain)
                if scores.counts.confusion.any():
                    calibration = ece(scores.counts)
                    rows.append((label, setting, value, domain, scores.mean_iou, calibration))
    return CsvTable(("method", "setting", "value", "domain", "mIoU", "ECE_10"), rows)


def tuning_table(results: Results) -> CsvTable:
    """Return the settings tried on the validation domain; chosen ones are marked by 1."""
    rows: list[tuple[object, ...]] = []
    for label, choice in results.choices.items():
        for settings, score in choice.tried:
            chosen = int(settings == choice.chosen)
            rows.append((label, json.dumps(settings), score, chosen))
    return CsvTable(("method", "settings", "mIoU", "chosen"), rows)


def failed_table(results: Results) -> CsvTable:
    """Return the images that could not be segmented."""
    rows: list[tuple[object, ...]] = []
    for label, domain, scores in (*_all(results), *_swept(results)):
        rows += [(label, domain, image, reason) for image, reason in scores.errors.items()]
    for label in results.methods:
        for settings, errors in results.errors_of_tuning(label).items():
            name = f"{label} {settings}"
            rows += [(name, results.validation, image, why) for image, why in errors.items()]
    return CsvTable(("method", "domain", "image", "reason"), rows)


def times_table(results: Results) -> CsvTable:
    """Return the milliseconds per image, and the peak GPU memory."""
    rows: list[tuple[object, ...]] = []
    for label, domain, scores in (*_all(results), *_swept(results)):
        if scores.ms:
            peak = max(scores.megabytes, default=nan)
            rows.append((label, domain, median(scores.ms), mean(scores.ms), peak))
    return CsvTable(("method", "domain", "ms_median", "ms_mean", "MiB_peak"), rows)


def _all(results: Results) -> Iterator[tuple[str, str, DomainScores]]:
    for label in results.methods:
        for domain in (results.validation, *results.targets):
            yield label, domain, results.scores(label, domain)


def _swept(results: Results) -> Iterator[tuple[str, str, DomainScores]]:
    for label in results.methods:
        for (setting, value), trial in results.sweeps(label).items():
            if trial.key != results.trial(label).key:
                for domain in (results.validation, *results.targets):
                    yield f"{label} {setting}={value}", domain, results.scores_of(trial, domain)


def _text(value: object) -> object:
    if isinstance(value, float):
        return "" if value != value else f"{value:.6f}"
    return csv_cell(value)
