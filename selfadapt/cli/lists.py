"""``selfadapt methods`` and ``selfadapt models``: list the methods and networks."""

import json
from dataclasses import asdict
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from selfadapt import METHODS, MODELS, Interface, create_model
from selfadapt.cli.commands import Command, json_argument
from selfadapt.cli.model_flags import NOT_FLAGS, setting_texts
from selfadapt.methods import check_method, settings_of, summary_of
from selfadapt.models.create import SHIPPED
from selfadapt.models.families import adapted_parameters
from selfadapt.models.trained import TRAINED
from selfadapt.norm import find_san


def _methods_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="Show the settings of this method.")
    parser.add_argument("--trust", action="store_true", help="Run your own code, MODULE:CLASS.")
    json_argument(parser)


def _methods(args: Namespace) -> int:
    if args.name is not None:
        check_method(args.name, {})
    names = METHODS if args.name is None else [args.name]
    if args.json:
        print(json.dumps({name: _method(name) for name in names}, default=str))
        return 0
    for name in names:
        print(f"{name:12} {summary_of(name)}")
    if args.name is not None:
        for setting, info in _method(args.name)["settings"].items():
            python_only = "" if info["flag"] else " Only in Python."
            print(f"  {setting:12} {info['default']!r:20} {info['help']}{python_only}")
    return 0


def _method(name: str) -> dict[str, Any]:
    """Return the summary of a method, and the default and help text of each setting."""
    texts = setting_texts(name)
    settings = {
        setting: {
            "default": parameter.default,
            "help": texts[setting],
            "flag": setting not in NOT_FLAGS,
        }
        for setting, parameter in settings_of(name).items()
    }
    return {"summary": summary_of(name), "settings": settings}


def _models_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--trained", action="store_true", help="List published networks with trained weights."
    )
    json_argument(parser)


def _models(args: Namespace) -> int:
    if args.trained:
        return _trained(args)
    if args.json:
        print(json.dumps({name: _model(name) for name in MODELS}))
        return 0
    for name in MODELS:
        info = _model(name)
        if "missing" in info:
            print(f"{name}: {info['missing']}\n")
            continue
        print(f"{name}: output stride {info['stride']}")
        print(f"  input       RGB, mean {info['mean']}, std {info['std']}")
        print(
            f"  parameters  {info['parameters'] / 1e6:.2f} M with 19 classes; published: "
            f"{info['published']}"
        )
        print(f"  adapts      {info['adapts']}")
        print(f"  SaN         {info['san']}")
        for option, values in info["options"].items():
            print(f"  {option:11} {' | '.join(values)}")
        print()
    print(f"{SHIPPED}: a small deeplabv1 shipped with the package, trained on its rendered streets")
    print("trained networks to download: selfadapt models --trained\n")
    print(ADDRESSES)
    return 0


def _trained(args: Namespace) -> int:
    """Print the published networks with trained weights."""
    if args.json:
        print(json.dumps({name: asdict(network) for name, network in TRAINED.items()}))
        return 0
    for name, network in TRAINED.items():
        print(f"{name}")
        print(f"  for         {network.purpose}")
        print(f"  trained on  {network.trained_on}; {network.num_classes} classes")
        print(f"  download    {network.megabytes} MB")
        print(f"  licence     {network.licence}")
    print(f"\n{DOWNLOAD_NOTE}")
    return 0


def _model(name: str) -> dict[str, Any]:
    """Describe a network, or say which missing library it needs."""
    try:
        with torch.device("meta"):
            model = create_model(name)
    except ModuleNotFoundError as error:
        return {"missing": str(error)}
    architecture = MODELS[name]
    interface = architecture.interface or Interface()
    return {
        "stride": architecture.stride,
        "mean": interface.mean,
        "std": interface.std,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "published": architecture.published,
        "adapts": adapted_parameters(model).reason,
        "san": str(find_san(model, 0.1)),
        "options": dict(architecture.options),
    }


ADDRESSES = """any other network, by address:
  torchvision:deeplabv3_resnet50    a segmentation network of torchvision
  smp:Unet/resnet34                 any of segmentation-models-pytorch; timm's encoders are tu-NAME
  smp:FOLDER                        a folder written by its save_pretrained
  hf:OWNER/NAME or hf:FOLDER        a network on the Hugging Face hub, or in a folder
  my_module:my_function             your own code on the Python path; needs --trust"""

DOWNLOAD_NOTE = """--model ADDRESS downloads a network once, into the cache of its library. The
terms of its training images may apply in addition to the licence of its weights."""

LIST_METHODS = Command(
    "List the methods, or the settings of one.",
    "selfadapt methods tent",
    _methods_arguments,
    _methods,
)
LIST_MODELS = Command(
    "List the networks by name, and how to address others.",
    "selfadapt models",
    _models_arguments,
    _models,
)
