"""``selfadapt train``, ``tune``, ``evaluate`` and ``report``: runs described by a recipe."""

import json
import sys
from dataclasses import fields
from functools import partial

from jsonargparse import ArgumentParser, Namespace

from selfadapt.cli.commands import (
    Command,
    complete_files,
    json_argument,
    output_arguments,
    ray_argument,
    ray_cluster,
    recipe_argument,
    shard_argument,
)
from selfadapt.protocol import EvaluateConfig, evaluate, read_results
from selfadapt.protocol.folder import read_record
from selfadapt.protocol.summary import print_summary, summary
from selfadapt.ray import EvaluateWorkers
from selfadapt.report import write_report
from selfadapt.runs import Shard
from selfadapt.train import TrainConfig, train


def _train_arguments(parser: ArgumentParser) -> None:
    recipe_argument(parser)
    output_arguments(parser)
    parser.add_class_arguments(TrainConfig)


def _train(args: Namespace) -> int:
    config = TrainConfig(**{f.name: args[f.name] for f in fields(TrainConfig)})
    train(config, args.output, overwrite=args.overwrite)
    return 0


def _evaluate_arguments(parser: ArgumentParser) -> None:
    recipe_argument(parser)
    output_arguments(parser)
    parser.add_argument(
        "--retry",
        action="store_true",
        help="Retry images that failed, or whose files have changed since.",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="Run your own code: networks at MODULE:FUNCTION, methods at MODULE:CLASS.",
    )
    shard_argument(parser)
    ray_argument(parser)
    json_argument(parser)
    parser.add_class_arguments(EvaluateConfig)


def _evaluate(args: Namespace, *, only_tune: bool = False) -> int:
    config = EvaluateConfig(**{f.name: args[f.name] for f in fields(EvaluateConfig)})
    with ray_cluster(args, config.device, config.threads) as cluster:
        folder = evaluate(
            config,
            args.output,
            overwrite=args.overwrite,
            retry=args.retry,
            only_tune=only_tune,
            trust=args.trust,
            log=lambda line: None if args.json else print(line, file=sys.stderr, flush=True),
            shard=Shard.parse(args.shard),
            workers=EvaluateWorkers(cluster, args.trust) if cluster else None,
        )
    results = read_results(folder)
    missing = 0 if only_tune else results.num_missing(read_record(folder)["images"])
    if not args.json:
        return print_summary(results, folder, only_tune=only_tune, missing=missing)
    content = summary(results)
    print(json.dumps({"folder": str(folder), "missing": missing, **content}))
    return 1 if content["failures"] else 0


def _report_arguments(parser: ArgumentParser) -> None:
    complete_files(
        parser.add_argument("run", metavar="RUN", help="Output folder of an evaluation.")
    )
    output_arguments(parser)


def _report(args: Namespace) -> int:
    page = write_report(args.run, args.output, overwrite=args.overwrite)
    print(f"the report is in {page}")
    return 0


TRAIN = Command(
    "Train a network on a source domain, or continue a run.",
    "selfadapt train streets-quick -o run",
    _train_arguments,
    _train,
)
TUNE = Command(
    "Choose the settings of methods on a validation domain.",
    "selfadapt tune streets-quick -o run",
    _evaluate_arguments,
    partial(_evaluate, only_tune=True),
)
EVALUATE = Command(
    "Tune on a validation domain, then score the targets.",
    "selfadapt evaluate streets-quick -o run",
    _evaluate_arguments,
    _evaluate,
)
REPORT = Command(
    "Write an evaluation's report: page, tables and figures.",
    "selfadapt report run -o report",
    _report_arguments,
    _report,
)
