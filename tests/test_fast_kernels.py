"""The kernels without a GPU: Triton can interpret them, in a process that knows from the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", ["kernels", "fusing", "methods"])
def test_the_kernels_do_what_pytorch_does(name: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, TESTS / f"interpreted_{name}.py"], cwd=TESTS.parent, capture_output=True,
        text=True, env=environment | {"TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
