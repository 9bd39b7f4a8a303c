"""Explanation of what a method does with a network on its device, and why."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from selfadapt.method import Method

OPTIMIZATIONS = {
    "reuse": "frozen layers run once for all steps",
    "san_batchnorm": "SaN with PyTorch's BatchNorm kernels",
    "precision": "16-bit numbers",
    "channels_last": "channels-last memory format",
    "kernels": "fused kernels: normalisation, sums and ReLU; the loss before upsampling",
    "batches": "views of one size run together",
    "graphs": "CUDA graphs, recorded for an image and replayed for the next of its size",
}


@dataclass(frozen=True)
class Explanation:
    """Decisions, each with its reason, by topic."""

    title: str
    topics: dict[str, str]
    optimizations: dict[str, str]
    """Reason why each optimization does not run; empty if it runs."""

    def __str__(self) -> str:
        lines = [self.title]
        lines += [f"  {topic + ':':<15}{text}" for topic, text in self.topics.items()]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.optimizations.items():
            reasons.setdefault(reason, []).append(name)
        for name in reasons.pop("", ()):
            lines.append(f"  {'runs:':<15}{name}: {OPTIMIZATIONS[name]}")
        lines += [f"  {'does not run:':<15}{', '.join(n)}: {why}" for why, n in reasons.items()]
        return "\n".join(lines)


def explain(method: Method) -> Explanation:
    """Explain which layers a method adapts, what is assumed, and which optimizations run."""
    model, interface, plan = method.model, method.interface, method.engine.plan()
    device = method.engine.device
    settings = {
        name: getattr(method, name)
        for name in (*signature(type(method)).parameters, "mode", "max_pixels", "compare")
        if hasattr(method, name) and name not in ("model", "views", "interface", "fast", "adapt")
    }
    topics = {"settings": ", ".join(f"{name}={value!r}" for name, value in settings.items())}
    spec = getattr(model, "spec", None)
    if trained_on := getattr(spec, "trained_on", ""):
        topics["trained on"] = trained_on
    if method.selection is not None:
        sizes = {name: value.numel() for name, value in model.named_parameters()}
        tuned = sum(sizes[name] for name in method.selection.names)
        share = f"{tuned / 1e6:.2f} of {sum(sizes.values()) / 1e6:.2f} million weights"
        topics["adapts"] = f"{share}; {method.selection.reason}"
    mixes = any(method.san.converted.values()) or not method.san.converted
    topics["SaN"] = str(method.san) if mixes else "alpha 0: only the training statistics"
    if views := getattr(method, "views", None):
        topics["views"] = ", ".join(map(str, views))
    topics["input"] = (
        f"{interface.channels} channels{' (BGR)' if interface.bgr else ''}, mean {interface.mean}, "
        f"std {interface.std}{' (assumed)' if method.is_normalisation_assumed else ''}"
    )
    if interface.size is not None:
        size = (
            f"resized to {interface.size[1]}x{interface.size[0]}, the only size the network takes"
        )
    elif max(interface.divisor or 1, interface.minimum or 1) > 1:
        size = f"padded to multiples of {interface.divisor}, at least {interface.minimum}"
    else:
        size = "any size"
    topics["sizes"] = f"{size}; more than {method.max_pixels} pixels are scaled down"
    topics |= method.topics()
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", None: _caller_precision(device)}
    topics["computes in"] = f"{names[plan.predict]} to predict, {names[plan.adapt]} in steps"
    if method.engine.notes:
        topics["fell back"] = "; ".join(method.engine.notes)
    optimizations = {
        name: method.engine.fallbacks.get(name, plan.reasons.get(name, ""))
        for name in OPTIMIZATIONS
    }
    if method.selection is None:
        optimizations["reuse"] = "there are no steps"
    title = f"{type(method).__name__} with {type(model).__name__} on {device}"
    return Explanation(title, topics, optimizations)


def _caller_precision(device: torch.device) -> str:
    """Return the precision without an optimization: that of the caller's autocast, or fp32."""
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return f"{torch.get_autocast_dtype(device.type)} (the caller's autocast)".removeprefix(
            "torch."
        )
    return "fp32"
