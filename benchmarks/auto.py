"""``auto`` mode on pairs of networks and domains they were not trained on (docs/auto.md).

    python benchmarks/auto.py train mobile-bdd --data DATA --seconds 270 -o networks
    python benchmarks/auto.py run mobile-bdd wild --data DATA --networks networks -o rows
    python benchmarks/auto.py table rows/*.npz
    python benchmarks/auto.py signs mobile-bdd wild --data DATA --networks networks --every 10

DATA holds folders of ``images/NAME.jpg`` and ``labels/NAME.png``: the streets ``bdd`` and ``carla``
to train on, ``camvid``, ``wild`` and ``cityscapes`` (Cityscapes train ids), the retinal vessels
``drive`` (from the 21st image on: to train) and ``chase``. Streets are enlarged to twice their size
and scored at their own, in the 13 classes that CARLA knows.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from selfadapt import SelfAdapt, create_method, create_model, paper_views
from selfadapt.auto import label_iou
from selfadapt.losses import BalancedCrossEntropy
from selfadapt.models.detect import IMAGENET_MEAN, IMAGENET_STD
from selfadapt.train.statistics import reset_nonfinite_statistics

TO_13 = [*range(11), 11, 11, *[12] * 6]
"""Cityscapes train ids in the classes of CARLA: people as one, vehicles as one."""
NETWORKS: dict[str, tuple[str, str, int]] = {
    "deeplab-carla": ("deeplabv1_resnet50", "", 19),
    "deeplab-bdd": ("deeplabv1_resnet50", "bdd", 19),
    "deeplab-camvid": ("deeplabv1_resnet50", "camvid", 19),
    "hrnet-bdd": ("hrnet_w18", "bdd", 19),
    "mobile-bdd": ("smp:unet/mobilenet_v2", "bdd", 19),
    "effnet-carla": ("smp:fpn/efficientnet-b0", "carla", 13),
    "segformer-bdd": ("segformer", "bdd", 19),
    "mobile-drive": ("smp:unet/mobilenet_v2", "drive", 2),
}
"""Architecture, training domain and number of classes."""
IMAGENET = "weights/resnet50_imagenet_caffe.safetensors"
"""What DeepLabv1 starts from; the other networks start from random weights."""
METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "source": lambda net: create_method("source", net),
    "san": lambda net: create_method("san", net),
    "tta": lambda net: create_method("tta", net),
    "paper": lambda net: SelfAdapt(net, mode="paper", compare=False),
    "official": lambda net: SelfAdapt(net, mode="official", compare=False),
    "auto": lambda net: SelfAdapt(net, compare=False),
    "cpu": lambda net: SelfAdapt(net, preset="cpu", compare=False),
    "realtime": lambda net: SelfAdapt(net, preset="realtime", compare=False),
    "no final views": lambda net: SelfAdapt(net, final_scales=(), compare=False),
    "balance 0.5": lambda net: SelfAdapt(
        net, loss=BalancedCrossEntropy(balance=0.5), compare=False
    ),
    "no balance": lambda net: SelfAdapt(net, loss="smoothed-cross-entropy", compare=False),
    "no smoothing": lambda net: SelfAdapt(net, loss=BalancedCrossEntropy(0.0), compare=False),
    "10 steps": lambda net: SelfAdapt(net, steps=10, compare=False),
    "3 steps": lambda net: SelfAdapt(net, steps=3, compare=False),
    "gradient descent": lambda net: SelfAdapt(net, step="gradient-descent", compare=False),
    "a third of the length": lambda net: SelfAdapt(net, lr=0.0253, compare=False),
    "three times the length": lambda net: SelfAdapt(net, lr=0.253, compare=False),
}


BASELINES = ("source", "san", "tta", "paper", "official")
"""What ``auto`` is compared with: regret is the best of them minus ``auto``."""


def build(network: str) -> nn.Module:
    """Return a network with random weights."""
    architecture, _, classes = NETWORKS[network]
    if architecture == "segformer":
        import transformers

        config: Any = transformers.SegformerConfig
        return transformers.SegformerForSemanticSegmentation(config(num_labels=classes))
    is_deeplab = architecture.startswith("deeplab")
    options: dict[str, Any] = {"style": "caffe", "dilation": "released"} if is_deeplab else {}
    return create_model(architecture, classes=classes, **options)


def load(network: str, networks: Path, device: str) -> nn.Module:
    """Return a trained network."""
    model = build(network).eval()
    state = load_file(networks / f"{network}.safetensors")
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    return model.to(device)


def read(folder: Path, scale: float = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Return the images ``(3, H, W)`` and labels ``(H, W)`` of a domain, uint8."""
    images, labels = [], []
    for path in sorted((folder / "images").iterdir()):
        image = Image.open(path).convert("RGB")
        label = Image.open(folder / f"labels/{path.stem}.png").convert("L")
        if scale != 1:
            size = (round(image.width * scale), round(image.height * scale))
            image = image.resize(size, Image.Resampling.BILINEAR)
            label = label.resize(size, Image.Resampling.NEAREST)
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous())
        labels.append(torch.from_numpy(np.array(label)))
    return images, labels


def crops(images: Tensor, labels: Tensor, zoom: float, size: int) -> tuple[Tensor, Tensor]:
    """Return 16 random crops, scaled, flipped and with other colours, and their labels."""
    device, num = images.device, 16
    index = torch.randint(len(images), (num,), device=device)
    x, y = images[index].float() / 255, labels[index].float()[:, None] + 1  # 0: ignored
    zooms = zoom * torch.exp((torch.rand(num, device=device) * 2 - 1) * math.log(1.9))
    theta = torch.zeros(num, 2, 3, device=device)
    for axis, side in enumerate((x.shape[-1], x.shape[-2])):
        share = size / zooms / side
        theta[:, axis, axis] = share
        theta[:, axis, 2] = (torch.rand(num, device=device) * 2 - 1) * (1 - share).clamp_min(0)
    theta[:, 0, 0] *= torch.where(torch.rand(num, device=device) < 0.5, -1.0, 1.0)
    grid = F.affine_grid(theta, [num, 3, size, size], align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    y = F.grid_sample(y, grid, mode="nearest", align_corners=False)[:, 0].long() - 1

    def factor(spread: float) -> Tensor:
        return 1 + (torch.rand(num, 1, 1, 1, device=device) * 2 - 1) * spread

    x = x * factor(0.35)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * factor(0.35) + mean
    gray = x.mean(1, keepdim=True)
    x = (x - gray) * factor(0.4) + gray
    is_gray = torch.rand(num, 1, 1, 1, device=device) < 0.1
    return torch.where(is_gray, gray, x).clamp(0, 1), y.masked_fill(y < 0, 255)


def train(network: str, data: Path, seconds: float, folder: Path, device: str) -> None:
    """Train a network from scratch for some time, and store its weights."""
    torch.manual_seed(0)
    architecture, source, _ = NETWORKS[network]
    images, labels = read(data / source)
    pairs = zip(images, labels, strict=True)
    kept = [pair for n, pair in enumerate(pairs) if (n >= 20 if source == "drive" else n % 25)]
    x, y = (torch.stack(part).to(device) for part in zip(*kept, strict=True))
    if source == "carla":
        table = torch.full((256,), 255, dtype=torch.uint8)
        table[:19] = torch.tensor(TO_13, dtype=torch.uint8)
        y = table.to(device)[y.long()]
    model: Any = build(network).train()
    if is_pretrained := architecture.startswith("deeplab"):
        model.backbone.load_state_dict(load_file(data / IMAGENET), strict=False)
        reset_nonfinite_statistics(model)  # this file has one, an overflow of fp16
    model = model.to(device, memory_format=torch.channels_last)
    mean, std = (
        torch.tensor(v, device=device).reshape(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD)
    )
    lr = 3e-4 if is_pretrained else 6e-4 if architecture == "segformer" else 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.02)
    zoom = {"bdd": 2.0, "camvid": 2.0, "carla": 1.3, "drive": 1.0}[source]
    size = 384 if source == "drive" else 448
    start = time.monotonic()
    while (done := (time.monotonic() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, done / 0.05) * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-6
        image, target = crops(x, y, zoom, size)
        with torch.autocast(device, torch.bfloat16):
            output = model((image - mean) / std)
        logits = getattr(output, "logits", output).float()
        logits = F.interpolate(logits, (size, size), mode="bilinear")
        loss = F.cross_entropy(logits, target, ignore_index=255, reduction="sum")
        optimizer.zero_grad()
        (loss / (target != 255).sum().clamp_min(1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / f"{network}.safetensors")


def count(probs: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return pixels by class (hits, labelled, predicted) and by confidence, of several methods."""
    kept = label != 255
    confidence, best = (part[:, kept] for part in probs.max(dim=1))  # (M, N)
    truth, hits = label[kept].expand_as(best), best == label[kept]
    num, classes = probs.shape[:2]
    counts = torch.zeros(num, 3, classes, device=probs.device)
    one = torch.ones_like(confidence)
    counts[:, 0].scatter_add_(1, truth, hits.float())
    counts[:, 1].scatter_add_(1, truth, one)
    counts[:, 2].scatter_add_(1, best, one)
    bins = torch.zeros(num, 3, 10, device=probs.device)
    index = (confidence * 10).long().clamp(0, 9)
    for row, weights in enumerate((one, confidence, hits.float())):
        bins[:, row].scatter_add_(1, index, weights)
    return counts, bins


def run(
    network: str,
    domain: str,
    data: Path,
    networks: Path,
    folder: Path,
    every: int,
    device: str,
    chosen: list[str],
    seconds: float,
) -> None:
    """Segment a domain with all methods; store the counts of each image."""
    model = load(network, networks, device)
    methods = {name: METHODS[name](model) for name in chosen or METHODS}
    is_street = domain not in ("drive", "chase")
    images, labels = read(data / domain, scale=0.5 if domain == "chase" else 1)
    numbers = range(0, 20 if domain == "drive" else len(images), every)
    rows: dict[str, list[np.ndarray]] = {"iou": [], "bins": []}
    quality, start = [], time.monotonic()
    to_13 = torch.tensor(TO_13, device=device)
    for number in numbers:
        if time.monotonic() - start > seconds:
            break
        image, label = images[number].to(device).float() / 255, labels[number].to(device).long()
        if is_street:
            image = F.interpolate(image[None], scale_factor=2, mode="bilinear")[0]
            label = F.pad(to_13, (0, 237), value=255)[label]
        maps = []
        for name, method in methods.items():
            result = method(image.clamp(0, 1))
            probs = F.interpolate(result.probs[None], label.shape, mode="bilinear")[0]
            if is_street and len(probs) == 19:
                merged = torch.zeros(13, *label.shape, device=device)
                probs = merged.index_add_(0, to_13, probs)
            maps.append(probs)
            if name == "auto":
                quality.append(result.quality)
        counts, bins = count(torch.stack(maps), label)
        rows["iou"].append(counts.cpu().numpy())
        rows["bins"].append(bins.cpu().numpy())
    folder.mkdir(parents=True, exist_ok=True)
    stacked: dict[str, Any] = {name: np.stack(values) for name, values in rows.items()}
    np.savez(folder / f"{network}-{domain}.npz", methods=list(methods), quality=quality, **stacked)


def signs(network: str, domain: str, data: Path, networks: Path, every: int, device: str) -> None:
    """Print the signs of auto mode: shift of the statistics, gain of small views."""
    method = SelfAdapt(load(network, networks, device), compare=False)
    images, _ = read(data / domain, scale=0.5 if domain == "chase" else 1)
    rows = []
    for raw in images[::every]:
        image = raw.to(device).float() / 255
        if domain not in ("drive", "chase"):
            image = F.interpolate(image[None], scale_factor=2, mode="bilinear")[0].clamp(0, 1)
        with torch.no_grad():
            adapting = method._network()
            whole = adapting.logits(image)[0].argmax(dim=0)
            small, middle = (
                adapting.mean_probs(image, paper_views(scale)).argmax(dim=0)
                for scale in (0.25, 0.5)
            )
            shift, num_classes = method._source(image).shift, NETWORKS[network][2]
        gain = label_iou(middle, small, num_classes) - label_iou(middle, whole, num_classes)
        rows.append((math.nan if shift is None else float(shift), float(gain)))
    shift_mean, gain_mean = np.mean(rows, axis=0)
    print(f"{network}, {domain}: {len(rows)} images, shift {shift_mean:.2f}, gain {gain_mean:.3f}")


def table(paths: list[Path]) -> None:
    """Print mIoU, ECE, images made worse, regret and rank correlation of the quality."""
    regrets = []
    for path in paths:
        rows = np.load(path)
        names, hits = list(rows["methods"]), rows["iou"][:, :, 0]
        truth, union = rows["iou"][:, :, 1], rows["iou"][:, :, 1:].sum(axis=2) - hits
        present = truth > 0
        each = 100 * (np.where(present, hits / union.clip(1), 0).sum(-1) / present.sum(-1))
        whole = truth[:, 0].sum(0) > 0
        miou = 100 * (hits.sum(0) / union.sum(0).clip(1))[:, whole].mean(-1)
        number, sure, right = np.moveaxis(rows["bins"].sum(0), 1, 0)
        ece = 100 * abs(sure - right).sum(-1) / number.sum(-1)
        worse = 100 * (each < each[:, :1]).mean(0)
        auto, others = names.index("auto"), [n for n, name in enumerate(names) if name in BASELINES]
        regrets.append(max(miou[others]) - miou[auto])
        ranks = [np.argsort(np.argsort(values)) for values in (rows["quality"], each[:, auto])]
        rho = np.corrcoef(ranks[0], ranks[1])[0, 1]
        print(f"{path.stem}: {len(each)} images, regret {regrets[-1]:.2f}, quality {rho:.2f}")
        for line in zip(names, miou, ece, worse, strict=True):
            print("  {:18s} mIoU {:5.2f}  ECE {:4.1f}  worse {:5.1f} %".format(*line))
    print(f"regret: mean {np.mean(regrets):.2f}, largest {np.max(regrets):.2f}")


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["train", "run", "table", "signs"])
    parser.add_argument("names", nargs="+", help="network (and domain), or files of rows")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--networks", type=Path)
    parser.add_argument("--seconds", type=float, default=270)
    parser.add_argument("--every", type=int, default=1, help="take every n-th image")
    parser.add_argument("--methods", nargs="+", default=[], help="of METHODS; default: all")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.command == "train":
        train(args.names[0], args.data, args.seconds, args.output, device)
    elif args.command == "run":
        network, domain = args.names
        run(
            network, domain, args.data, args.networks, args.output, args.every, device,
            args.methods, args.seconds,
        )  # fmt: skip
    elif args.command == "signs":
        network, domain = args.names
        signs(network, domain, args.data, args.networks, args.every, device)
    else:
        table([Path(name) for name in args.names])


if __name__ == "__main__":
    main()
