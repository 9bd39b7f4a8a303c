"""What one sees: controls on one side, before and after on the other."""

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from PIL import Image as PILImage

from selfadapt.app.masks import zipped
from selfadapt.app.run import Network, Outcome, Stops, run
from selfadapt.app.slots import filled, make_slot, side_by_side, summary
from selfadapt.app.uploads import Limits, Upload, read_upload
from selfadapt.app.wishes import (
    MAX_LR,
    MAX_METHODS,
    MAX_SEED,
    MAX_STEPS,
    SCALES,
    SETTINGS,
    Wish,
    defaults,
    wished,
)
from selfadapt.checks import check_number
from selfadapt.method import Stopped
from selfadapt.methods import summary_of
from selfadapt.names import nearest
from selfadapt.streets import LOOKS, render

LOG = logging.getLogger(__name__)
FIRST_STREET = "night", 7
WAITING = 20
"""So many users may wait; more are told to come back."""
HOUR = 3600
PROGRESS = gr.Progress()
INTRO = """<h1>selfadapt</h1>
<p>A segmentation network says what every pixel shows. It does so worse in light and weather it was
not trained for. Here it adapts itself to your one image, predicts again, and forgets.</p>"""
NOTHING_YET = "<p>Drop an image or take a street, then press <b>Adapt</b>.</p>"
CSS = """
.gradio-container { max-width: 1500px !important; margin: 0 auto }
.intro h1 { font-size: 1.6rem; margin: 0 } .intro p { margin: .2rem 0; max-width: 60rem }
.status { min-height: 3.6rem }
.status .wrap { background: var(--body-background-fill) !important; height: 100% !important;
  max-height: none !important; inset: 0 !important }
#gallery .grid-wrap { max-height: none } #gallery .grid-container { grid-auto-rows: auto }
#gallery .thumbnail-item { aspect-ratio: auto } #gallery .thumbnail-item img { height: auto }
.legend { border-collapse: collapse; width: 100%; font-size: .9rem }
.legend td, .legend th { padding: .2rem .35rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--border-color-primary) }
.legend td:first-child, .legend th:first-child { text-align: left; padding-left: 0 }
.legend i { display: inline-block; width: .9rem; height: .9rem; margin-right: .5rem;
  border-radius: 3px; vertical-align: -.1rem; border: 1px solid rgba(128, 128, 128, .6) }
.curve { width: 100%; max-width: 460px; font: 12px system-ui, sans-serif }
.curve path { fill: none; stroke: var(--border-color-primary) }
.curve polyline { fill: none; stroke: var(--color-accent); stroke-width: 2 }
.curve circle { fill: var(--color-accent) } .curve text { fill: var(--body-text-color-subdued) }
"""


class Page:
    """The page of a server, and what its buttons do.

    Args:
        networks: The networks to choose from, by name.
        limits: How large images may be.
        folder: Where Gradio keeps its files, and deletes them.
        stops: Who has asked for an end of what is run for them.
    """

    def __init__(
        self, networks: Mapping[str, Network], limits: Limits, folder: Path, stops: Stops
    ) -> None:
        self.networks, self.limits, self.folder, self.stops = networks, limits, folder, stops

    def build(self) -> gr.Blocks:
        """Lay the page out."""
        with gr.Blocks(
            title="selfadapt", analytics_enabled=False, delete_cache=(HOUR // 4, HOUR)
        ) as blocks:
            gr.HTML(INTRO, elem_classes="intro")
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    image = self._image()
                    model, method, beside, controls = self._choices()
                with gr.Column(scale=5, min_width=320):
                    with gr.Row():
                        start = gr.Button(
                            "Adapt", variant="primary", scale=3, min_width=120, elem_id="start"
                        )
                        stop = gr.Button("Stop", min_width=80, elem_id="stop")
                    status = gr.HTML(NOTHING_YET, elem_classes="status", elem_id="status")
                    outputs = self._results()
            running = start.click(
                self.adapt,
                [image, model, method, beside, *controls.values()],
                [status, *outputs],
                show_progress_on=status,
                preprocess=False,
                concurrency_limit=1,
                api_visibility="private",
            )
            stop.click(
                self.stop,
                None,
                status,
                show_progress="hidden",
                concurrency_limit=None,
                api_visibility="private",
            )
            stop.click(None, cancels=running, api_visibility="private")
            blocks.unload(self.leave)
        blocks.queue(max_size=WAITING, default_concurrency_limit=4)
        return blocks

    def _image(self) -> gr.Image:
        look, seed = FIRST_STREET
        image = gr.Image(
            _street(look, seed),
            label="Image",
            sources=["upload", "clipboard"],
            format="png",
            buttons=["fullscreen"],
            height=260,
            elem_id="image",
        )
        limits = self.limits
        gr.Markdown(
            f"PNG, JPEG, WebP or BMP, up to {limits.megabytes:g} MB and {limits.megapixels:g} "
            f"million pixels. It is segmented at up to {limits.max_pixels / 1e6:.2g} million."
        )
        with gr.Accordion("Or take a rendered street", open=True):
            with gr.Row():
                looks = gr.Dropdown(
                    list(LOOKS), value=look, label="Look", min_width=100, elem_id="look"
                )
                street = gr.Number(
                    seed, label="Number", precision=0, minimum=0, maximum=MAX_SEED, min_width=100
                )
            take = gr.Button("Take this street", size="md", elem_id="take")
        take.click(self.street, [looks, street], image, api_visibility="private")
        return image

    def _choices(self) -> tuple[gr.Dropdown, gr.Dropdown, gr.CheckboxGroup, dict[str, Any]]:
        first, network = next(iter(self.networks.items()))
        names = [*reversed(network.methods)]
        with gr.Group():
            model = gr.Dropdown(
                list(self.networks), value=first, label="Network", visible=len(self.networks) > 1
            )
            method = gr.Dropdown(
                names, value=names[0], label="Method", info=summary_of(names[0]), elem_id="method"
            )
            controls = self._controls(names[0], network)
            beside = gr.CheckboxGroup(
                names,
                value=[],
                label="Beside it",
                info=f"Up to {MAX_METHODS - 1} more. They share alpha and the scales; all else is "
                "their own.",
                elem_id="beside",
            )
        updated = [method, *controls.values()]
        method.input(self.explain, [model, method], updated, api_visibility="private")
        model.input(self.offer, model, [beside, *updated], api_visibility="private")
        return model, method, beside, controls

    def _controls(self, method: str, network: Network) -> dict[str, Any]:
        """Make a control for each of ``SETTINGS``, in their order; a method's own are seen."""
        own = defaults(method, network.chosen)
        values = defaults("self-adapt", network.chosen) | own
        controls = {
            "alpha": gr.Slider(
                0, 1, values["alpha"], step=0.05, label="alpha", elem_id="alpha",
                info="Weight of the image's statistics in normalisation. 0: as trained.",
            ),
            "psi": gr.Slider(
                0, 1, values["psi"], step=0.05, label="psi", elem_id="psi",
                info="How sure a pixel must be, against the surest of its class, to count.",
            ),
            "lr": gr.Number(
                values["lr"], step=0.001, minimum=0, maximum=MAX_LR, label="lr", elem_id="lr",
                info="Learning rate: how far a step goes.",
            ),
            "steps": gr.Slider(
                0, MAX_STEPS, values["steps"], step=1, label="steps", elem_id="steps",
                info="Gradient steps. More take longer.",
            ),
            "scales": gr.CheckboxGroup(
                list(SCALES), value=list(values["scales"]), label="scales", elem_id="scales",
                info="Sizes of the image that are looked at, each plain and flipped in gray.",
            ),
        }  # fmt: skip
        for name, control in controls.items():
            control.visible = name in own
        return controls

    def _results(self) -> list[Any]:
        with gr.Column(visible=False) as column:
            gallery = gr.Gallery(
                label="Side by side", columns=2, format="png", object_fit="contain",
                interactive=False, height="auto", buttons=["fullscreen"], elem_id="gallery",
            )  # fmt: skip
            with gr.Tabs() as tabs:
                slots = [make_slot(number) for number in range(MAX_METHODS)]
            download = gr.DownloadButton("Download all masks (ZIP)", elem_id="download")
        return [column, gallery, tabs, download, *(c for slot in slots for c in slot.components)]

    def adapt(
        self,
        image: object,
        model: object,
        method: object,
        beside: object,
        alpha: object,
        psi: object,
        lr: object,
        steps: object,
        scales: object,
        request: gr.Request,
        progress: gr.Progress = PROGRESS,
    ) -> list[Any]:
        """Run the methods that are asked for, and fill the page.

        What comes in is as it was sent: Gradio would decode the image before it can be refused.
        """
        with _errors_in_words():
            offers = {name: network.methods for name, network in self.networks.items()}
            settings = {"alpha": alpha, "psi": psi, "lr": lr, "steps": steps, "scales": scales}
            wish = wished(offers, model, method, beside, settings)
            upload = read_upload(self._file(image), self.limits)
            outcomes = self._run(wish, upload, str(request.session_hash), progress)
            return self._shown(wish, upload, outcomes)

    def _file(self, image: object) -> Path:
        """Return the file of an image; it is one that was uploaded, or made here."""
        if image is None:
            raise ValueError("there is no image yet; drop one, or take a street")
        path = image.get("path") if isinstance(image, dict) else None
        file = Path(path).resolve() if isinstance(path, str) and "\0" not in path else None
        if file is None or not file.is_relative_to(self.folder.resolve()) or not file.is_file():
            raise ValueError("this image is not here, or not any more; drop it again")
        return file

    def _run(
        self, wish: Wish, upload: Upload, session: str, progress: gr.Progress
    ) -> list[Outcome]:
        count = {name: number for number, name in enumerate(wish.methods)}

        def watch(name: str, step: int, steps: int, loss: float | None) -> None:
            done = (count[name] + step / max(1, steps)) / len(count)
            text = f"{name}: step {step} of {steps}, loss {loss:.3g}" if loss is not None else name
            progress(done, desc=text)

        stop = self.stops.begin(session)
        try:
            network = self.networks[wish.model]
            return list(run(network, wish, upload.image, watch, stop))
        finally:
            self.stops.done(session)

    def _shown(self, wish: Wish, upload: Upload, outcomes: list[Outcome]) -> list[Any]:
        file = self.folder / "masks" / secrets.token_hex(16) / "masks.zip"
        file.parent.mkdir(parents=True)
        file.write_bytes(zipped(wish.model, outcomes, upload.size))
        several = len(outcomes) > 1
        slots = [filled(outcome, upload) for outcome in outcomes]
        empty = [gr.Tab(visible=False), *[gr.skip()] * (len(slots[0]) - 1)]
        slots += [empty] * (MAX_METHODS - len(slots))
        return [
            summary(upload, outcomes),
            gr.Column(visible=True),
            gr.Gallery(side_by_side(upload, outcomes) if several else None, visible=several),
            gr.Tabs(selected=0),
            str(file),
            *(value for slot in slots for value in slot),
        ]

    def stop(self, request: gr.Request) -> Any:
        """End what is run for a user at its next step."""
        self.stops.stop(str(request.session_hash))
        return "<p>Stopped. The network is as it was.</p>"

    def leave(self, request: gr.Request) -> None:
        """End what is run for a user who has closed the page."""
        self.stops.stop(str(request.session_hash))

    def street(self, look: object, seed: object) -> PILImage.Image:
        """Return a street of the built-in world."""
        with _errors_in_words():
            if not isinstance(look, str) or look not in LOOKS:
                guess = nearest(str(look)[:40], LOOKS)
                raise ValueError(f"unknown look {str(look)[:40]!r};{guess}")
            check_number("street", seed, 0, MAX_SEED, whole=True)
            assert isinstance(seed, int)
            return _street(look, seed)

    def explain(self, model: object, method: object) -> list[Any]:
        """Say what a method does, and set the controls to its defaults."""
        with _errors_in_words():
            offers = {name: network.methods for name, network in self.networks.items()}
            chosen = self._network(model).chosen
            if method not in offers[str(model)]:
                raise ValueError(f"the network {model} cannot be used with {str(method)[:40]!r}")
            values = defaults(str(method), chosen)
            controls = [
                gr.update(visible=True, value=_for_page(values[name]))
                if name in values
                else gr.update(visible=False)
                for name in SETTINGS
            ]
            return [gr.update(info=summary_of(str(method))), *controls]

    def offer(self, model: object) -> list[Any]:
        """Offer the methods that a network takes, the first of them chosen."""
        with _errors_in_words():
            names = [*reversed(self._network(model).methods)]
            method, *controls = self.explain(model, names[0])
            chosen = {**method, "choices": [(name, name) for name in names], "value": names[0]}
            return [gr.CheckboxGroup(names, value=[]), chosen, *controls]

    def _network(self, name: object) -> Network:
        if not isinstance(name, str) or name not in self.networks:
            raise ValueError(f"there is no network {str(name)[:40]!r} here")
        return self.networks[name]


def _street(look: str, seed: int) -> PILImage.Image:
    return PILImage.fromarray(render(look, seed)[0])


def _for_page(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@contextmanager
def _errors_in_words() -> Iterator[None]:
    """Show on the page what went wrong, without what is the server's own business."""
    try:
        yield
    except Stopped as error:
        raise gr.Error("stopped", print_exception=False) from error
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error
    except gr.Error:
        raise
    except torch.OutOfMemoryError as error:
        LOG.warning("out of memory: %s", error)
        raise gr.Error(
            "the server is out of memory: try a smaller image", print_exception=False
        ) from error
    except Exception as error:
        LOG.exception("a request failed")
        raise gr.Error(
            "something failed on the server; its log says what", print_exception=False
        ) from error
