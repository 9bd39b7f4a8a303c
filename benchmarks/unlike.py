"""Which signs, without labels, tell images that a network predicts badly.

    python benchmarks/unlike.py DOMAIN ... --foreign FOLDER ... --weights FILE --every 4
    python benchmarks/unlike.py streets/night streets/rain --model streets --limit 6

DOMAIN, --model and --weights are as in ``street.py``; --foreign names folders of images that show
nothing the network knows, which count as images with an IoU of 0. For each sign it prints the area
under the curve for images with a mean IoU below 0.3 after self-adaptation, and the rank correlation
with that IoU; then, for each domain, how many images are noted as unlike the training images.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import rankdata, spearmanr
from street import open_domain, open_network, read_pairs

from selfadapt import Result, SelfAdapt
from selfadapt.images import load_image
from selfadapt.method import UNLIKE
from selfadapt.metrics import Score, to_class_space
from selfadapt.pseudo import view_confidence

POOR = 0.3
"""Mean IoU of an image below which its mask is poor."""


def signs(result: Result) -> dict[str, float]:
    """Return what can be known of a result without labels; higher is better."""
    assert result.fused_probs is not None
    assert result.source_probs is not None
    source, fused = result.source_probs.argmax(dim=0), result.fused_probs.argmax(dim=0)
    return {
        "confidence over the views": float(view_confidence(result.fused_probs)),
        "confidence of the source": float(result.source_probs.amax(dim=0).mean()),
        "confidence after adaptation": float(result.confidence.mean()),
        "views agree with the result": float((fused == result.label).float().mean()),
        "share of unchanged labels": float((source == result.label).float().mean()),
    }


def area_under_curve(values: np.ndarray, good: np.ndarray) -> float:
    """Return how often a good image has a higher value than a poor one."""
    ranks, num_good = rankdata(values), good.sum()
    higher = ranks[good].sum() - num_good * (num_good + 1) / 2
    return float(higher / (num_good * (~good).sum()))


def main() -> None:
    """Print what each sign tells."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("domains", nargs="+")
    parser.add_argument("--foreign", nargs="*", type=Path, default=[], help="folders of images")
    parser.add_argument("--model", help="what selfadapt train saved, or streets")
    parser.add_argument("--weights", type=Path, help="weights of a caffe-style DeepLabv1 ResNet-50")
    parser.add_argument("--every", type=int, default=1, help="take every N-th image only")
    parser.add_argument("--limit", type=int, help="take the first N images only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = open_network(args.model, args.weights).to(args.device)
    method = SelfAdapt(model, mode="paper")
    rows: list[dict[str, float]] = []
    ious: list[float] = []
    noted: dict[str, list[bool]] = {}
    for domain in args.domains:
        dataset, scale = open_domain(domain, args.limit)
        score = Score(len(dataset.space.names))
        for image, label in read_pairs(dataset, scale, args.every):
            result = method(image.to(args.device))
            probs = F.interpolate(result.probs[None].cpu(), label.shape, mode="bilinear")[0]
            score.add(label, to_class_space(probs, model.spec.classes, dataset.space))
            rows.append(signs(result))
            noted.setdefault(domain, []).append(UNLIKE in result.notes)
        ious += score.image_iou
    for folder in args.foreign:
        for path in sorted(folder.iterdir())[: args.limit : args.every]:
            result = method(load_image(path).to(args.device))
            rows.append(signs(result))
            noted.setdefault(str(folder), []).append(UNLIKE in result.notes)
            ious.append(0.0)
    iou = np.array(ious)
    print(f"{len(iou)} images, {(iou < POOR).sum()} of them with a mean IoU below {POOR}")
    for sign in rows[0]:
        values = np.array([row[sign] for row in rows])
        area = area_under_curve(values, iou >= POOR)
        print(f"{sign:30} AUC {area:.2f}, rank correlation {spearmanr(values, iou)[0]:.2f}")
    for domain, each in noted.items():
        print(f"{domain}: {sum(each)} of {len(each)} images noted")


if __name__ == "__main__":
    main()
