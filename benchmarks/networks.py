"""Parameters, time and memory of one forward pass of every network of the paper.

python benchmarks/networks.py --size 512 1024
"""

import argparse
import statistics
import time

import torch
from torch import nn

from selfadapt import MODELS, create_model
from selfadapt.norm import converted, find_san


def measure(model: nn.Module, x: torch.Tensor, repeats: int) -> float:
    """Return the median time of a forward pass in milliseconds."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        model(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[3:])


@torch.inference_mode()
def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, nargs=2, default=(512, 1024), metavar=("H", "W"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    x = torch.rand(1, 3, *args.size, device=args.device)
    print("| network | parameters | published | ms | ms with SaN | peak MB |")
    for name, architecture in MODELS.items():
        model = create_model(name).to(args.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        plain = measure(model, x, args.repeats)
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else float("nan")
        with converted(model, find_san(model, 0.1)):
            mixed = measure(model, x, args.repeats)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        numbers = (f"{millions:.2f} M", architecture.published, f"{plain:.1f}", f"{mixed:.1f}")
        print(f"| {name} | {' | '.join(numbers)} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
