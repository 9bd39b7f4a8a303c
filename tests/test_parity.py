"""Official mode against recorded outputs of the released code."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import selfadapt
import selfadapt.adapt
from conftest import needs_data
from selfadapt.engine import Network
from selfadapt.images import load_image

STAGES = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")


GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", ["default", "short"])
def test_official_mode_equals_the_released_code(name: str, device: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    folder = needs_data("parity")
    weights = needs_data("street", "weights", "deeplabv1_resnet50_carla.safetensors")
    with pytest.warns(UserWarning, match="saved with dilation='every block', but is used with"):
        model = selfadapt.create_model(
            "deeplabv1_resnet50", classes=19, style="caffe", weights=weights
        ).to(device)
    settings = json.loads((folder / f"{name}.json").read_text())
    recorded = np.load(folder / f"{name}.npz")
    networks: list[Network] = []

    class Recorded(Network):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            networks.append(self)

    monkeypatch.setattr("selfadapt.engine.engine.Network", Recorded)
    stages = [f"backbone.{stage}" for stage in STAGES if stage not in settings["frozen"]]
    method = selfadapt.SelfAdapt(
        model,
        mode="official",
        adapt=[*stages, "cls_head"],
        compare=False,
        fast=selfadapt.Fast(precision="fp32"),
        **{key: settings[key] for key in ("alpha", "psi", "lr", "steps", "scales")},
    )
    result = method(folder / settings["image"])

    def agreement(label: torch.Tensor, key: str) -> float:
        return float((label.cpu().numpy() == recorded[key]).mean())

    assert agreement(result.pseudo_label, "pseudo_label") >= 0.999
    assert agreement(result.label, "final_label") >= 0.995
    np.testing.assert_allclose(result.losses, recorded["losses"], rtol=0.01)
    for key, maps in (("fused_probs", result.fused_probs), ("final_probs", result.probs)):
        np.testing.assert_allclose(maps[:, ::4, ::4].cpu().numpy(), recorded[key], atol=5e-3)
    (network,) = networks
    for key in (key for key in recorded if key.startswith("stat.")):
        found = network.buffers[f"backbone.{key.removeprefix('stat.')}"].cpu().numpy()
        difference = np.linalg.norm(found - recorded[key]) / np.linalg.norm(recorded[key])
        assert difference < 1e-3, key
    change = network.tuned["cls_head.weight"].detach() - model.cls_head.weight.detach()
    assert float(change.norm()) == pytest.approx(float(recorded["head_weight_delta"]), rel=0.01)
    with torch.no_grad(), selfadapt.san(model, settings["alpha"]):
        image = load_image(folder / settings["image"], device=device)
        probs = Network(model, method.interface).probs(image)
    assert agreement(probs.argmax(dim=0), "san_label") >= 0.999
