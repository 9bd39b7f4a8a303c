"""Answers of ``selfadapt serve`` to many programs at once: lost and wrong ones, times, memory.

    python benchmarks/service.py
    python benchmarks/service.py --clients 50 --seconds 300 --method self-adapt --steps 1

A server of its own is started with the network that comes with the package. Clients send rendered
streets, each one after the other, wait as ``Retry-After`` says when the queue is full, and compare
each label with that of the library for the same image and settings.
"""

import argparse
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Event, Lock, Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import torch
from PIL import Image

from selfadapt import create_method, open_model
from selfadapt.streets import render

NUM_IMAGES = 16
ALPHA = 0.3


class Clients:
    """Clients of one server, and what they got.

    Args:
        address: The address of requests, with their settings.
        images: PNG files.
        expected: The label of each.
    """

    def __init__(self, address: str, images: list[bytes], expected: list[np.ndarray]) -> None:
        self.address, self.images, self.expected = address, images, expected
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.stop, self.lock = Event(), Lock()

    def run(self, client: int) -> None:
        """Send images until ``stop`` is set."""
        number = client
        while not self.stop.is_set():
            index, start = number % len(self.images), time.perf_counter()
            request = Request(self.address, self.images[index], {"Content-Type": "image/png"})
            wait = 0.0
            try:
                with urlopen(request, timeout=300) as answer:
                    label = np.asarray(Image.open(io.BytesIO(answer.read())))
                is_right = np.array_equal(label, self.expected[index])
                outcome = "right" if is_right else "wrong"
                number += 1
            except HTTPError as error:
                outcome = f"status {error.code}"
                wait = float(error.headers.get("Retry-After", 1))
            except OSError as error:
                outcome = f"lost: {error}"
            with self.lock:
                self.counts[outcome] += 1
                if outcome == "right":
                    self.seconds.append(time.perf_counter() - start)
            self.stop.wait(wait)


def memory(process: int) -> float:
    """Return the memory of a process in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def main() -> None:
    """Print the counts, the times of right answers and the memory of the server."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--method", default="san")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    settings = {"alpha": ALPHA} | ({} if args.steps is None else {"steps": args.steps, "lr": 0.05})
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    method = create_method(args.method, open_model("streets"), compare=False, **settings)
    images, expected = [], []
    for seed in range(NUM_IMAGES):
        picture = Image.fromarray(render("night", seed, args.height, 2 * args.height)[0])
        file = io.BytesIO()
        picture.save(file, "PNG")
        images.append(file.getvalue())
        expected.append(method(picture).label.numpy())
    command = [sys.executable, "-m", "selfadapt", "serve", "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = re.search(r"http://[\w.:]+", server.stdout.readline())[0]  # type: ignore[index]
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        address = f"{address}/v1/segment?method={args.method}&{query}"
        clients = Clients(address, images, expected)
        threads = [Thread(target=clients.run, args=(i,)) for i in range(args.clients)]
        for thread in threads:
            thread.start()
        memories = []
        for _ in range(10):
            time.sleep(args.seconds / 10)
            memories.append(memory(server.pid))
            print(f"{memories[-1]:.0f} MB, {dict(clients.counts)}", flush=True)
        clients.stop.set()
        for thread in threads:
            thread.join()
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
    print(f"{args.clients} clients, {args.seconds:.0f} s: {dict(clients.counts)}, exit code {code}")
    p50, p95 = np.percentile(clients.seconds, [50, 95])
    print(f"seconds of an answer: p50 {p50:.2f}, p95 {p95:.2f}, max {max(clients.seconds):.2f}")
    print(f"images a second: {clients.counts['right'] / args.seconds:.1f}")
    print(
        f"memory: {memories[0]:.0f} MB, then {statistics.median(memories):.0f}, {memories[-1]:.0f}"
    )


if __name__ == "__main__":
    main()
