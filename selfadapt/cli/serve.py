"""``selfadapt serve``: the web app."""

import os
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from selfadapt.app.limits import PIXELS, Limits
from selfadapt.cli.commands import Command
from selfadapt.cli.model_flags import model_arguments, open_models
from selfadapt.demo.run import STREETS_SETTINGS
from selfadapt.models.create import SHIPPED
from selfadapt.optional import import_optional


def _serve_arguments(parser: ArgumentParser) -> None:
    model_arguments(parser, several="to choose from", default=SHIPPED)
    parser.add_argument(
        "--port", type=int, default=7860, help="Port to listen on; 0: any free port."
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="Address to listen on. By default only this machine can connect; with 0.0.0.0 "
        "everyone who can reach it.",
    )
    parser.add_argument(
        "--token",
        help="Token that programs must send. Other users of this machine can see it: rather set "
        "the environment variable SELFADAPT_TOKEN. Without one, programs are answered on this "
        "machine only.",
    )
    parser.add_argument(
        "--max-mb",
        type=float,
        default=Limits.megabytes,
        help="Refuse image files larger than this many MB.",
    )
    parser.add_argument(
        "--max-megapixels",
        type=float,
        default=Limits.megapixels,
        help="Refuse images with more megapixels.",
    )
    parser.add_argument(
        "--max-pixels",
        type=int,
        help="Scale larger images down to this many pixels, and resize their masks to the original "
        "size. By default 294912 (384 x 768), on a GPU 2097152.",
    )


def _serve(args: Namespace) -> int:
    import_optional("gradio", "app")
    from selfadapt.app.networks import OfferedNetwork
    from selfadapt.app.server import is_local, serve
    from selfadapt.app.service import check_token

    token = os.environ.get("SELFADAPT_TOKEN") if args.token is None else args.token
    if token is not None:
        check_token(token)
    args.model = args.model or [SHIPPED]
    models = open_models(args)
    device = next(models[0].parameters()).device.type
    limits = Limits(
        megabytes=args.max_mb,
        megapixels=args.max_megapixels,
        max_pixels=PIXELS.get(device, PIXELS["cpu"])
        if args.max_pixels is None
        else args.max_pixels,
    )
    networks: dict[str, Any] = {}
    for address, model in zip(args.model, models, strict=True):
        settings = STREETS_SETTINGS["self-adapt"] if address == SHIPPED else {}
        try:
            networks[_name(address, networks)] = OfferedNetwork(model, settings)
        except TypeError as error:  # it is not a segmentation network
            raise ValueError(str(error)) from error
    if not is_local(args.host):
        print(f"note: everyone who can reach {args.host} can use the app", file=sys.stderr)
        if token is None:
            off = "note: the interface for programs is off, it needs a token: set SELFADAPT_TOKEN"
            print(off, file=sys.stderr)
    serve(networks, limits, args.host, args.port, token, _print_address)
    print("stopped", file=sys.stderr)
    return 0


def _name(address: str, taken: dict[str, Any]) -> str:
    """Return a unique display name for a network that does not reveal its folder."""
    name = base = Path(address).stem if Path(address).exists() else address
    number = 1
    while name in taken:
        number += 1
        name = f"{base} ({number})"
    return name


def _print_address(address: str) -> None:
    print(f"the page is at {address}, Ctrl-C stops it", flush=True)


SERVE = Command(
    "Serve a web page that adapts to images dropped on it.",
    "selfadapt serve --model net.safetensors",
    _serve_arguments,
    _serve,
)
