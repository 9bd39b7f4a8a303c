"""What one sees: the image and the controls on one side, before and after on the other."""

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from html import escape
from pathlib import Path
from threading import Lock
from typing import Any

import gradio as gr
import torch
from PIL import Image as PILImage
from torch import Tensor

from selfadapt.app import charts
from selfadapt.app.masks import zipped
from selfadapt.app.networks import Network, Networks
from selfadapt.app.requests import (
    MAX_LR,
    MAX_METHODS,
    MAX_SEED,
    MAX_STEPS,
    SCALES,
    SETTINGS,
    Request,
    check_method,
    defaults,
    validated,
)
from selfadapt.app.run import Outcome, Stops, run
from selfadapt.app.uploads import FORMATS, Limits, Upload, read_upload
from selfadapt.app.viewer import WEB, scene
from selfadapt.checks import check_number
from selfadapt.cost import duration
from selfadapt.method import Method, Stopped
from selfadapt.methods import create_method, summary_of
from selfadapt.models.trained import TRAINED
from selfadapt.patterns import nearest
from selfadapt.streets import LOOKS, render
from selfadapt.views import size_of

LOG = logging.getLogger(__name__)
FIRST_STREET = "night", 4
WAITING = 20
"""So many users may wait; more are told to come back."""
HOUR = 3600
MAX_RENDERED = 1000
"""Of so many streets that were given out the exact labels are still known."""
LONG_S = 5
"""From so many seconds on the page says what would be faster."""
STOPPED = "<p>Stopped. The network is as it was.</p>"
EXAMPLE = "example"
"""The session that the first street is run for."""
PROGRESS = gr.Progress()
INTRO = """<h1>selfadapt</h1>
<p>A segmentation network says what every pixel shows. It does so worse in light and weather it was
not trained for. Here it adapts itself to your one image, predicts again, and forgets.</p>"""


class Page:
    """The page of a server, and what its buttons do.

    Args:
        networks: The networks to choose from.
        limits: How large images may be.
        folder: Where Gradio keeps its files, and deletes them.
        stops: Who has asked for an end of what is run for them.
    """

    def __init__(self, networks: Networks, limits: Limits, folder: Path, stops: Stops) -> None:
        self.networks, self.limits, self.folder, self.stops = networks, limits, folder, stops
        self._read = lru_cache(maxsize=4)(partial(read_upload, limits=limits))
        self._method = lru_cache(maxsize=16)(self._create_method)
        self._rendered: dict[bytes, tuple[str, int]] = {}
        """Look and number of streets that were given out, by a digest of their pixels."""
        self._example: tuple[Request, Upload, list[Outcome]] | None = None
        self._example_lock = Lock()

    def build(self) -> gr.Blocks:
        """Lay the page out."""
        with gr.Blocks(
            title="selfadapt", analytics_enabled=False, delete_cache=(HOUR // 4, HOUR)
        ) as blocks:
            gr.HTML(INTRO, elem_classes="intro")
            with gr.Row(elem_id="layout"):
                with gr.Column(scale=2, min_width=320, elem_id="controls"):
                    image = gr.Image(
                        label="Image",
                        sources=["upload", "clipboard"],
                        format="png",
                        buttons=["fullscreen"],
                        height=260,
                        elem_id="image",
                    )
                    with gr.Row():
                        start = gr.Button(
                            "Adapt", variant="primary", scale=3, min_width=120, elem_id="start"
                        )
                        stop = gr.Button("Stop", min_width=80, elem_id="stop")
                    status = gr.HTML(self._welcome(), elem_id="status")
                    first, network = next(iter(self.networks.loaded.items()))
                    about = gr.HTML(_about(first, network), elem_id="about")
                    with gr.Column(elem_id="settings"):
                        look, seed = self._streets()
                        model, method, others, controls = self._choices(first, network)
                with gr.Column(scale=5, min_width=320, elem_id="result"):
                    viewer = gr.HTML(
                        html_template=(WEB / "viewer.html").read_text(),
                        js_on_load=(WEB / "viewer.js").read_text(),
                        elem_id="viewer",
                        apply_default_css=False,
                    )
                    report = gr.HTML(elem_id="report", apply_default_css=False)
                    download = gr.DownloadButton(
                        "Download all masks (ZIP)", elem_id="download", visible=False
                    )
            asked = [image, model, method, others, *controls.values()]
            results = [viewer, report, download]
            event = partial(gr.on, preprocess=False, api_visibility="private")
            quiet = partial(event, show_progress="hidden")

            quiet(blocks.load, self.street, [look, seed], image)
            quiet(blocks.load, self.example, None, results)
            running = event(
                start.click, self.adapt, asked, [status, *results], show_progress_on=status,
                concurrency_limit=1,
            )  # fmt: skip
            quiet(stop.click, self.stop, None, status, concurrency_limit=None)
            quiet(stop.click, cancels=running)
            blocks.unload(self.leave)

            checked = {"fn": self.check, "inputs": asked, "outputs": [image, status]}
            checked |= {
                "preprocess": False, "show_progress": "hidden", "api_visibility": "private",
            }  # fmt: skip
            settings = [others.input, *(control.input for control in controls.values())]
            gr.on([image.upload, *settings], trigger_mode="always_last", **checked)
            quiet(image.clear, None, None, status, js=f"() => {json.dumps(self._welcome())}")
            quiet([look.input, seed.input], self.street, [look, seed], image).then(**checked)
            quiet(method.input, self.explain, [model, method], [method, *controls.values()]).then(
                **checked
            )
            event(
                model.input, self.offer, model,
                [model, about, others, method, *controls.values()], show_progress_on=about,
            ).then(**checked)  # fmt: skip

            choices = [look.input, seed.input, method.input, model.input, *settings]
            changes = [image.upload, image.clear, *choices]
            event(changes, js=_dispatch("selfadapt-changed"))
            event(start.click, js=_dispatch("selfadapt-started"))
        blocks.queue(max_size=WAITING, default_concurrency_limit=4)
        return blocks

    def _streets(self) -> tuple[gr.Radio, gr.Number]:
        look, seed = FIRST_STREET
        with gr.Accordion(
            "No photo at hand? Take a rendered street", open=False, elem_id="streets"
        ):
            looks = gr.Radio(list(LOOKS), value=look, label="Look", elem_id="look")
            number = gr.Number(
                seed, label="Number of the street", precision=0, minimum=0, maximum=MAX_SEED
            )
        return looks, number

    def _choices(
        self, first: str, network: Network
    ) -> tuple[gr.Radio, gr.Dropdown, gr.CheckboxGroup, dict[str, Any]]:
        names = [*reversed(network.methods)]
        with gr.Accordion(
            "Other networks", open=False, elem_id="networks", visible=len([*self.networks]) > 1
        ):
            model = gr.Radio(
                [(_offered(name), name) for name in self.networks],
                value=first,
                show_label=False,
                elem_id="model",
            )
        with gr.Accordion("Advanced", open=False, elem_id="advanced"):
            method = gr.Dropdown(
                names, value=names[0], label="Method", info=summary_of(names[0]), elem_id="method"
            )
            controls = self._controls(names[0], network)
            others = gr.CheckboxGroup(
                names,
                value=[],
                label="Compare with",
                info=f"Up to {MAX_METHODS - 1} more. They share alpha and the scales; all else is "
                "their own.",
                elem_id="others",
            )
        return model, method, others, controls

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

    def street(self, look: object, seed: object) -> str:
        """Return the file of a street of the built-in world."""
        with _errors_in_words():
            if not isinstance(look, str) or look not in LOOKS:
                shown = str(look)[:40]
                raise ValueError(f"unknown look {shown!r};{nearest(shown, LOOKS)}")
            check_number("street", seed, 0, MAX_SEED, whole=True)
            assert isinstance(seed, int)
            file = self._new_file(f"{look}-{seed}.png")
            PILImage.fromarray(self._render(look, seed)[0]).save(file)
            while len(self._rendered) >= MAX_RENDERED:
                del self._rendered[next(iter(self._rendered))]
            self._rendered[_digest(self._read(file).image)] = look, seed
            return str(file)

    def check(self, image: object, *asked: object) -> list[Any]:
        """Refuse an image that cannot be used, and say how long it will take."""
        if image is None:
            return [gr.skip(), self._welcome()]
        try:
            upload = self._read(self._file(image))
        except ValueError as error:
            return [None, _refusal(error)]
        shown = gr.skip()
        if upload.png is not None:
            file = self._new_file("image.png")
            file.write_bytes(upload.png)
            shown = str(file)
        with _errors_in_words():
            try:
                return [shown, self._estimate(upload, self._request(*asked))]
            except ValueError as error:
                return [shown, _refusal(error)]

    def adapt(
        self,
        image: object,
        model: object,
        method: object,
        others: object,
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
            asked = self._request(model, method, others, alpha, psi, lr, steps, scales)
            upload = self._read(self._file(image))
            try:
                outcomes = self._run(asked, upload, str(request.session_hash), progress)
            except Stopped:
                return [STOPPED, gr.skip(), gr.skip(), gr.skip()]
            seconds = sum(outcome.seconds for outcome in outcomes)
            done = f"<p>Done in {duration(seconds)}.</p>"
            return [done, *self._shown(asked, upload, outcomes)]

    def example(self) -> Iterator[list[Any]]:
        """Show a rendered street, as trained first; it is adapted to for the first visitor only."""
        with _errors_in_words(), self._example_lock:
            if self._example is None:
                name, network = next(iter(self.networks.loaded.items()))
                method = network.methods[-1]
                upload = self._read(Path(self.street(*FIRST_STREET)))
                trained = Request(model=name, methods={"source": {}})
                (outcome,) = self._run(trained, upload, EXAMPLE)
                yield self._shown(trained, upload, [replace(outcome, source_label=None)])
                request = Request(model=name, methods={method: defaults(method, network.chosen)})
                self._example = request, upload, self._run(request, upload, EXAMPLE)
            yield self._shown(*self._example)

    def _welcome(self) -> str:
        limits = self.limits
        return (
            f"<p>Drop an image: {', '.join(FORMATS)}, up to {limits.megabytes:g} MB and "
            f"{limits.megapixels:g} million pixels. Or take a rendered street.</p>"
        )

    def _request(self, model: object, method: object, others: object, *values: object) -> Request:
        network = self.networks.get(model)
        settings = dict(zip(SETTINGS, values, strict=True))
        return validated(str(model), network.methods, method, others, settings)

    def _file(self, image: object) -> Path:
        """Return the file of an image; it is one that was uploaded, or made here."""
        if image is None:
            raise ValueError("there is no image yet; drop one, or take a street")
        path = image.get("path") if isinstance(image, dict) else None
        file = Path(path).resolve() if isinstance(path, str) and "\0" not in path else None
        if file is None or not file.is_relative_to(self.folder.resolve()) or not file.is_file():
            raise ValueError("this image is not here, or not any more; drop it again")
        return file

    def _new_file(self, name: str) -> Path:
        """Return where to write a file for a visitor, who alone may read it."""
        folder = self.folder / "made" / secrets.token_hex(16)
        folder.mkdir(parents=True)
        return folder / name

    def _create_method(self, model: str, name: str, settings: frozenset[tuple[str, Any]]) -> Any:
        return create_method(name, self.networks.get(model).model, **dict(settings))

    def _estimate(self, upload: Upload, request: Request) -> str:
        """Return how long an image will take here, and what would be faster."""
        height, width = size_of(upload.image)
        text = f"{upload.size[1]}x{upload.size[0]} pixels"
        if (height, width) != upload.size:
            text += f", segmented at {width}x{height}"
        if self.networks.get(request.model).device != "cpu":
            return f"<p>{text}.</p>"
        seconds, faster = 0.0, ""
        for name, settings in request.methods.items():
            method = self._method(request.model, name, frozenset(settings.items()))
            if not isinstance(method, Method):
                continue
            estimate = method.estimate(height, width)
            seconds += estimate.seconds
            if (steps := settings.get("steps", 0)) > 1 and not faster:
                less = estimate.seconds - steps // 2 * estimate.step_seconds
                faster = (
                    f" With {steps - steps // 2} steps about {duration(less)}, with the method "
                )
                faster += f"san about {duration(2 * estimate.plain_seconds)} (see Advanced)."
        faster = faster if seconds > LONG_S else ""
        time = "less than a second" if seconds < 1 else f"about {duration(seconds)}"
        return f"<p>{text}. It will take <b>{time}</b> here.{faster}</p>"

    def _run(
        self,
        request: Request,
        upload: Upload,
        session: str,
        progress: Callable[..., object] = lambda *_, **__: None,
    ) -> list[Outcome]:
        count = {name: number for number, name in enumerate(request.methods)}

        def watch(name: str, step: int, steps: int, loss: float | None) -> None:
            done = (count[name] + step / max(1, steps)) / len(count)
            text = f"{name}: step {step} of {steps}, loss {loss:.3g}" if loss is not None else name
            progress(done, desc=text)

        stop = self.stops.begin(session)
        try:
            network = self.networks.get(request.model)
            return list(run(network, request, upload.image, watch, stop))
        finally:
            self.stops.done(session)

    def _shown(self, request: Request, upload: Upload, outcomes: list[Outcome]) -> list[Any]:
        file = self._new_file("masks.zip")
        file.write_bytes(zipped(request.model, outcomes, upload.size))
        street = self._recognised(upload)
        title = f"{upload.size[1]}x{upload.size[0]} pixels"
        if (size := size_of(upload.image)) != upload.size:
            title += f", segmented at {size[1]}x{size[0]}; masks are downloaded at full size"
        exact = None
        if street is not None:
            look, seed, exact = street
            title = f"Rendered street: {look}, number {seed}; {title}"
        return [
            scene(upload, outcomes, title, exact),
            charts.report(outcomes, exact),
            gr.DownloadButton(value=str(file), visible=True),
        ]

    def _recognised(self, upload: Upload) -> tuple[str, int, Tensor] | None:
        """Return look, number and exact labels, where an image is a street rendered here."""
        street = self._rendered.get(_digest(upload.image))
        if street is None:
            return None
        return (*street, torch.from_numpy(self._render(*street)[1]))

    def _render(self, look: str, seed: int) -> tuple[Any, Any]:
        """Return a street and its labels, at a size within the limits."""
        limits = self.limits
        pixels = min(limits.max_pixels, limits.megapixels * 1e6, limits.num_bytes / 4)
        height = min(384, int((pixels / 2) ** 0.5))
        return render(look, seed, height, 2 * height)

    def stop(self, request: gr.Request) -> str:
        """Stop what is run for a user at its next step."""
        self.stops.stop(str(request.session_hash))
        return STOPPED

    def leave(self, request: gr.Request) -> None:
        """Stop what is run for a user who has closed the page."""
        self.stops.stop(str(request.session_hash))

    def explain(self, model: object, method: object) -> list[Any]:
        """Say what a method does, and set the controls to its defaults."""
        with _errors_in_words():
            network = self.networks.get(model)
            name = check_method(method, network.methods)
            values = defaults(name, network.chosen)
            controls = [
                gr.update(visible=True, value=_for_page(values[setting]))
                if setting in values
                else gr.update(visible=False)
                for setting in SETTINGS
            ]
            return [gr.update(info=summary_of(name)), *controls]

    def offer(self, model: object) -> list[Any]:
        """Open a network and offer its methods; go back to the first if it cannot be fetched."""
        with _errors_in_words():
            refusal = ""
            try:
                network = self.networks.get(model)
            except ValueError as error:
                refusal, model = _refusal(error), next(iter(self.networks))
                network = self.networks.get(model)
            names = [*reversed(network.methods)]
            method, *controls = self.explain(model, names[0])
            chosen = {**method, "choices": [(name, name) for name in names], "value": names[0]}
            about = refusal + _about(str(model), network)
            others = gr.CheckboxGroup(names, value=[])
            return [gr.Radio(value=str(model)), about, others, chosen, *controls]


def _digest(image: Tensor) -> bytes:
    return hashlib.sha256(image.numpy().tobytes()).digest()


def _about(name: str, network: Network) -> str:
    trained_on = network.trained_on or "images that nothing is known of"
    return f"<p>Network: <b>{escape(name)}</b>, trained on {escape(trained_on)}.</p>"


def _offered(name: str) -> str:
    """Return how a network is offered: published ones with all one should know beforehand."""
    if name not in TRAINED:
        return name
    network = TRAINED[name]
    return (
        f"{name.rpartition(':')[2]}: {network.purpose}. Trained on {network.trained_on}, "
        f"{network.num_classes} classes. {network.megabytes} MB. Licence: {network.licence}"
    )


def _refusal(error: ValueError) -> str:
    return f'<p class="refused">{escape(str(error))}</p>'


def _dispatch(name: str) -> str:
    """Return JavaScript that tells the viewer of an event."""
    return f"() => {{ document.dispatchEvent(new Event('{name}')) }}"


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
