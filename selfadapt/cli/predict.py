"""``selfadapt predict``: segment images and videos."""

import json
import sys
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from selfadapt.addresses import is_address
from selfadapt.cli.commands import (
    Command,
    complete_files,
    json_argument,
    output_arguments,
    ray_argument,
    ray_cluster,
    shard_argument,
)
from selfadapt.cli.model_flags import (
    as_list,
    given_settings,
    method_arguments,
    model_arguments,
    open_method,
)
from selfadapt.devices import refuse_torchrun
from selfadapt.engine import RECORD_AT
from selfadapt.labels import Classes
from selfadapt.method import UNLIKE
from selfadapt.models.spec import fingerprint
from selfadapt.models.trained import OTHER_NETWORKS, trained_on
from selfadapt.optional import import_optional
from selfadapt.own import is_own
from selfadapt.predict import (
    DEFAULT,
    IMAGES_ONLY,
    OUTPUTS,
    FileKey,
    LargeImages,
    PredictFolder,
    PredictRun,
    Summary,
    check_outputs,
    find_inputs,
)
from selfadapt.predict.remote import FileSegmenter, RemoteFolder, find_remote
from selfadapt.predict.run import SegmentFiles
from selfadapt.progress import ProgressBar
from selfadapt.ray import Cluster, PredictWorker
from selfadapt.runs import Shard

SCALED = "segmented at "
"""Prefix of the note for an image that was scaled down."""
MAX_NOTES, MAX_DOUBTFUL = 20, 10
"""Maximum number of notes printed."""


def _predict_arguments(parser: ArgumentParser) -> None:
    images = parser.add_argument(
        "images",
        nargs="*",
        default=SUPPRESS,
        metavar="IMAGE",
        help="Images, videos, folders of them, or patterns in quotes: 'day*/**/*.png'; images also "
        "at addresses: 's3://bucket/day*/*.png', gs://, https:// ...",
    )
    complete_files(images)
    parser.add_argument(
        "--config",
        action=ActionConfigFile,
        help="YAML file with values for these flags. Flags given on the command line override it.",
    )
    model_arguments(parser, several="of --method ensemble")
    output_arguments(parser, str)
    kinds = "; ".join(f"{kind}: {text}" for kind, text in OUTPUTS.items())
    parser.add_argument(
        "--outputs", nargs="+", default=list(DEFAULT), metavar="KIND", help=f"{kinds}."
    )
    parser.add_argument(
        "--retry", action="store_true", help="Retry files that could not be segmented."
    )
    parser.add_argument(
        "--large", choices=("tiles", "shrink"),
        help="Images of more than --max-pixels: adapt once and segment them in tiles, or scale "
        "them down. By default tiles from eight megapixels on.",
    )  # fmt: skip
    parser.add_argument(
        "--bands", nargs="+", type=int, metavar="BAND",
        help="Bands of georeferenced images to take, from 1; by default red, green and blue.",
    )  # fmt: skip
    shard_argument(parser)
    ray_argument(parser)
    parser.add_argument(
        "--explain", action="store_true",
        help="Print first which layers adapt and why, what is assumed, which optimizations run.",
    )  # fmt: skip
    parser.add_argument(
        "--quiet", action="store_true", help="Print only failures, no progress and no summary."
    )
    json_argument(parser)
    method_arguments(parser)


def _predict(args: Namespace) -> int:
    outputs = check_outputs(as_list(args.outputs))
    patterns = [text.removeprefix("file://") for text in as_list(args.get("images"))]
    args.output = args.output.removeprefix("file://")
    if not patterns:
        raise ValueError("at least one IMAGE is needed: a file, a folder or a pattern")
    refuse_torchrun("predict")
    shard = Shard.parse(args.shard)
    inputs = find_inputs(p for p in patterns if not is_address(p))
    inputs += find_remote(p for p in patterns if is_address(p))
    is_remote = is_address(args.output) or any(is_address(item.file) for item in inputs)
    if any(item.is_video for item in inputs) and (is_remote or args.ray):
        raise ValueError(
            "videos need a run of their own, without --ray and with files on a disk; --shard "
            "shares their frames with other machines"
        )
    folder: PredictFolder
    if not is_address(args.output):
        folder = PredictFolder(Path(args.output), outputs, shard)
    elif shard.total > 1:
        raise ValueError("--shard needs a folder on a disk; use --ray for an output at an address")
    else:
        folder = RemoteFolder(args.output, outputs)
    inputs = folder.plan(inputs, overwrite=args.overwrite)
    if any(item.is_video for item in inputs):
        if images_only := IMAGES_ONLY & set(outputs):
            raise ValueError(
                f"{' and '.join(images_only)} can only be written for images, but there is a video "
                "among the inputs: leave out one of the two"
            )
        import_optional("av", "video")
    workers = ray_cluster(args, args.device, torch.get_num_threads())
    if args.ray:
        args.device = "cpu"  # the workers have the GPUs
    method, classes, networks = open_method(args, compare="panel" in outputs)
    large = LargeImages(method, args.large, args.bands)
    identity = {
        "method": args.method,
        "settings": given_settings(args),
        "networks": [fingerprint(network) for network in networks],
        "outputs": outputs,
        **{name: args[name] for name in ("large", "bands") if args[name] is not None},
        **({"classes": classes} if isinstance(classes, Mapping) else {}),
    }
    if args.explain:
        print(method.explain(), file=sys.stderr)
    with folder, workers as cluster:
        folder.start(identity, inputs, overwrite=args.overwrite)
        with (
            closing(folder.journal(FileKey)) as journal,
            ProgressBar(args.method, quiet=args.quiet) as bar,
        ):
            if args.retry:
                journal.forget_errors()

            def show_progress(done: int, total: int, activity: str) -> None:
                preparing = torch.cuda.is_available() and done < RECORD_AT
                activity = activity or ("preparing" if preparing else args.method)
                bar.update(done, total, name=activity)

            segment_files: SegmentFiles | None = None
            if cluster is not None:
                _start_workers(cluster, args, networks, classes, folder)
                segment_files = partial(cluster.map, "segment")
            elif is_remote:
                segment_files = FileSegmenter(method, classes, outputs, large).segment_files
            run = PredictRun(
                folder, journal, method, classes, inputs, show_progress, large, segment_files
            )
            if not args.quiet and not args.json:
                lines = [] if cluster else run.forecast(args.method)
                for line in (*trained_on(networks), *lines):
                    print(line, file=sys.stderr, flush=True)
            summary = run()
    return _print_summary(summary, args)


def _start_workers(
    cluster: Cluster,
    args: Namespace,
    networks: Sequence[Any],
    classes: Classes,
    folder: PredictFolder,
) -> None:
    given = given_settings(args)
    settings = {**given, "compare": "panel" in folder.kinds}
    path = None if isinstance(folder, RemoteFolder) else folder.path.absolute()
    named = {"method": args.method, **{kind: given.get(kind) for kind in ("loss", "step")}}
    own = [(name, kind) for kind, name in named.items() if is_own(name)]
    cluster.start(
        PredictWorker, networks, args.method, settings, own, classes, folder.kinds,
        (args.large, args.bands), path, cluster.device, torch.get_num_threads(),
    )  # fmt: skip


def _print_summary(summary: Summary, args: Namespace) -> int:
    """Print the outcome of a run; return 1 if a file failed, else 0."""
    scaled = [note for note in summary.notes if note.startswith(SCALED)]
    merged = scaled if len(scaled) > 1 else []  # there is one for each image size
    notes = [
        _with_files(note, files, summary.num_files)
        for note, files in summary.notes.items()
        if note not in merged
    ]
    if merged:
        number = sum(len(summary.notes[note]) for note in merged)
        notes.append(f"{number} images were scaled down to be segmented, see {summary.table}")
    if len(notes) > MAX_NOTES:
        more = f"{len(notes) - MAX_NOTES} more notes are in {summary.table}"
        notes = [*notes[:MAX_NOTES], more]
    if UNLIKE in summary.notes:
        notes.append(OTHER_NETWORKS)
    for note in notes if not args.quiet else ():
        print(f"note: {note}", file=sys.stderr)
    if summary.doubtful and not args.quiet:
        number = len(summary.doubtful)
        print(f"to look at, as their quality is low ({number}):", file=sys.stderr)
        for file, quality in list(summary.doubtful.items())[:MAX_DOUBTFUL]:
            print(f"  {quality:.2f}  {file}", file=sys.stderr)
        if number > MAX_DOUBTFUL:
            print(f"  {number - MAX_DOUBTFUL} more are in {summary.table}", file=sys.stderr)
    for file, reason in summary.failures.items():
        text = reason if file in reason else f"{file}: {reason}"
        print(f"not done: {text}", file=sys.stderr)
    if args.json:
        print(json.dumps(_as_json(summary, args)))
    elif not args.quiet:
        done = summary.num_files - len(summary.failures)
        earlier = f" ({summary.num_earlier} before)" if summary.num_earlier else ""
        print(f"{done} of {summary.num_files} images segmented{earlier}, see {args.output}")
        if summary.num_left:
            print(f"{summary.num_left} files are left to other shares")
    return 1 if summary.failures else 0


def _with_files(note: str, files: list[str], num_files: int) -> str:
    """Return a note with its files, unless it applies to all of them."""
    if len(files) == 1 and num_files > 1:
        return f"{files[0]}: {note}"
    if len(files) < num_files:
        return f"{note} ({len(files)} files, the first is {files[0]})"
    return note


def _as_json(summary: Summary, args: Namespace) -> dict[str, Any]:
    failures = [{"file": file, "reason": text} for file, text in summary.failures.items()]
    return {
        "files": summary.num_files,
        "done": summary.num_files - len(failures),
        "before": summary.num_earlier,
        "failed": len(failures),
        "left": summary.num_left,
        "failures": failures,
        "folder": str(args.output),
        "outputs": check_outputs(as_list(args.outputs)),
        "table": str(summary.table),
        "notes": summary.notes,
        "doubtful": summary.doubtful,
        "seconds": round(summary.seconds, 3),
    }


PREDICT = Command(
    "Segment images and videos with any method.",
    "selfadapt predict street.jpg --model net.safetensors -o masks",
    _predict_arguments,
    _predict,
)
