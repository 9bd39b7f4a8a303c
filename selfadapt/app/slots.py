"""What one sees of a result: before and after, and what led from one to the other."""

from dataclasses import dataclass
from typing import Any

import gradio as gr
from PIL import Image as PILImage

from selfadapt.app import charts, pictures
from selfadapt.app.run import Outcome
from selfadapt.app.uploads import Upload


@dataclass
class Slot:
    """The place of one method's results."""

    tab: gr.Tab
    facts: gr.HTML
    slider: gr.ImageSlider
    learnt_from: gr.Column
    pseudo: gr.Image
    confidence: gr.Image
    changes: gr.Image
    curve: gr.HTML
    legend: gr.HTML

    @property
    def components(self) -> list[Any]:
        """All of them, in the order of ``filled``."""
        return list(vars(self).values())


def make_slot(number: int) -> Slot:
    """Lay out the place of a method's results, as a tab."""
    with gr.Tab("result", id=number, visible=number == 0) as tab:
        facts = gr.HTML(elem_classes="facts")
        gr.Markdown("**As trained** left of the line, **adapted** right of it. Drag it.")
        slider = gr.ImageSlider(
            label="as trained and adapted", show_label=False, format="png", interactive=False,
            buttons=["fullscreen"], max_height=620, elem_classes="before-after",
        )  # fmt: skip
        with gr.Row():
            with gr.Column(min_width=280):
                legend = gr.HTML(apply_default_css=False)
            with gr.Column(min_width=280):
                gr.Markdown("**Loss** before each step")
                curve = gr.HTML(apply_default_css=False)
        with gr.Row():
            with gr.Column(min_width=240) as learnt_from:
                pseudo = _picture("Pseudo-label", "what it learns from; striped: not sure enough")
            with gr.Column(min_width=240):
                confidence = _picture("Confidence", "dark: unsure, bright: sure")
            with gr.Column(min_width=240):
                changes = _picture("Changes", "where the class is another now, in its colour")
    return Slot(tab, facts, slider, learnt_from, pseudo, confidence, changes, curve, legend)


def _picture(name: str, text: str) -> gr.Image:
    gr.Markdown(f"**{name}**: {text}")
    return gr.Image(
        label=name,
        show_label=False,
        format="png",
        interactive=False,
        buttons=["fullscreen"],
        alt_text=f"{name}: {text}",
        elem_classes=name.lower(),
    )


def filled(outcome: Outcome, upload: Upload) -> list[Any]:
    """Return what the components of a slot show."""
    names, source, pseudo = outcome.names, outcome.source_label, outcome.pseudo_label
    adapted = pictures.mask(outcome.label, names)
    before = adapted if source is None else pictures.mask(source, names)
    changes = None
    if outcome.changed is not None:
        changes = pictures.changes(outcome.label, outcome.changed, upload.image, names)
    return [
        gr.Tab(outcome.method, visible=True),
        charts.facts(outcome),
        (before, adapted),
        gr.Column(visible=pseudo is not None),
        None if pseudo is None else pictures.hatched(pseudo, names),
        pictures.heat(outcome.confidence),
        changes,
        charts.curve(outcome.losses),
        charts.legend(outcome),
    ]


def side_by_side(upload: Upload, outcomes: list[Outcome]) -> list[tuple[PILImage.Image, str]]:
    """Return the image, the prediction as trained and that of each method, with captions."""
    shown = [(pictures.photo(upload.image), "image")]
    if (source := outcomes[0].source_label) is not None:
        shown.append((pictures.mask(source, outcomes[0].names), "as trained"))
    for outcome in outcomes:
        text = f"{outcome.method}, {outcome.seconds:.1f} s"
        shown.append((pictures.mask(outcome.label, outcome.names), text))
    return shown


def summary(upload: Upload, outcomes: list[Outcome]) -> str:
    """Say how long it took, and at which size."""
    height, width = upload.size
    text = f"{width}x{height} pixels"
    if (size := upload.image.shape[-2:]) != upload.size:
        text += f", segmented at {size[1]}x{size[0]}; masks come at {width}x{height}"
    seconds = sum(outcome.seconds for outcome in outcomes)
    return f"<p>Done in {seconds:.1f} s. {text}.</p>"
