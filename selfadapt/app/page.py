"""The Gradio page: image and controls on one side, results on the other."""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from selfadapt.app.jobs import JobQueue
from selfadapt.app.limits import (
    MAX_LR,
    MAX_METHODS,
    MAX_RENDERED,
    MAX_RUNNING,
    MAX_SEED,
    MAX_STEPS,
    Limits,
)
from selfadapt.app.masks import masks_zip
from selfadapt.app.networks import Networks, OfferedNetwork
from selfadapt.app.requests import (
    HELP,
    SCALES,
    SETTINGS,
    Request,
    check_method,
    defaults,
    validated,
)
from selfadapt.app.run import Outcome, reason, run
from selfadapt.app.uploads import FORMATS, Upload, read_upload
from selfadapt.app.viewer import WEB, viewer_data
from selfadapt.checks import check_number
from selfadapt.method import Method, Stopped
from selfadapt.methods import create_method, summary_of
from selfadapt.models.trained import TRAINED
from selfadapt.patterns import alternatives
from selfadapt.progress import duration
from selfadapt.streets import LOOKS, render
from selfadapt.views import size_of

FIRST_STREET = "night", 4
HOUR_S = 3600
LONG_S = 5
"""If the estimate is longer, the page suggests faster settings."""
STOPPED = "<p>Stopped. The network is unchanged.</p>"
EXAMPLE_SESSION = "-example"
"""Name of the session that runs the example; no visitor's session may have a hyphen."""
PROGRESS = gr.Progress()
INTRO = """<h1>selfadapt</h1>
<p>A segmentation network assigns a class to every pixel. It is less accurate in light and weather
it was not trained for. Here it adapts to your single image, predicts again, and is reset.</p>"""


class Page:
    """The page of a server and its event handlers.

    Args:
        networks: The networks to choose from.
        limits: Limits on the size of images.
        folder: Folder of Gradio's files, which Gradio also cleans up.
        queue: The queue of images.
    """

    def __init__(self, networks: Networks, limits: Limits, folder: Path, queue: JobQueue) -> None:
        self.networks, self.limits, self.folder, self.queue = networks, limits, folder, queue
        self._read = lru_cache(maxsize=4)(partial(read_upload, limits=limits))
        self._method = lru_cache(maxsize=16)(self._create_method)
        self._rendered: dict[bytes, tuple[str, int]] = {}
        """Look and seed of rendered streets, by a digest of their pixels."""
        self._example: tuple[Request, Upload, list[Outcome]] | None = None
        self._example_lock = Lock()

    def build(self) -> gr.Blocks:
        """Create the components and connect their events."""
        with gr.Blocks(
            title="selfadapt", analytics_enabled=False, delete_cache=(HOUR_S // 4, HOUR_S)
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
                    status = gr.HTML(self._instructions(), elem_id="status")
                    first, network = next(iter(self.networks.loaded.items()))
                    about = gr.HTML(_network_info(first, network), elem_id="about")
                    with gr.Column(elem_id="settings"):
                        look, seed = self._street_controls()
                        model, method, others, controls = self._method_controls(first, network)
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
            inputs = [image, model, method, others, *controls.values()]
            results = [viewer, report, download]
            event = partial(gr.on, preprocess=False, api_visibility="private")
            silent = partial(event, show_progress="hidden")

            street = silent(blocks.load, self.street, [look, seed], image)
            example = silent(blocks.load, self.example, None, results)
            running = event(
                start.click, self.adapt, inputs, [status, *results], show_progress_on=status,
                concurrency_limit=MAX_RUNNING,
            )  # fmt: skip
            silent(stop.click, self.stop, None, status, concurrency_limit=None)
            silent(stop.click, cancels=running)
            # A visitor who is quicker than these keeps the own image and result.
            silent([start.click, image.upload], cancels=[street, example])
            blocks.unload(self.disconnect)

            checked = {"fn": self.check, "inputs": inputs, "outputs": [image, status]}
            checked |= {
                "preprocess": False, "show_progress": "hidden", "api_visibility": "private",
            }  # fmt: skip
            settings = [others.input, *(control.input for control in controls.values())]
            gr.on([image.upload, *settings], trigger_mode="always_last", **checked)
            silent(image.clear, None, None, status, js=f"() => {json.dumps(self._instructions())}")
            silent([look.input, seed.input], self.street, [look, seed], image).then(**checked)
            silent(
                method.input, self.select_method, [model, method], [method, *controls.values()]
            ).then(**checked)
            event(
                model.input, self.select_network, model,
                [model, about, others, method, *controls.values()], show_progress_on=about,
            ).then(**checked)  # fmt: skip

            choices = [look.input, seed.input, method.input, model.input, *settings]
            changes = [image.upload, image.clear, *choices]
            event(changes, js=_dispatch("selfadapt-changed"))
            event(start.click, js=_dispatch("selfadapt-started"))
        blocks.queue(max_size=None, default_concurrency_limit=4)  # the gate has limits
        return blocks

    def _street_controls(self) -> tuple[gr.Radio, gr.Number]:
        look, seed = FIRST_STREET
        with gr.Accordion("No photo at hand? Use a rendered street", open=False, elem_id="streets"):
            looks = gr.Radio(list(LOOKS), value=look, label="Look", elem_id="look")
            number = gr.Number(
                seed, label="Street number", precision=0, minimum=0, maximum=MAX_SEED
            )
        return looks, number

    def _method_controls(
        self, first: str, network: OfferedNetwork
    ) -> tuple[gr.Radio, gr.Dropdown, gr.CheckboxGroup, dict[str, Any]]:
        names = [*reversed(network.methods)]
        with gr.Accordion(
            "Other networks", open=False, elem_id="networks", visible=len([*self.networks]) > 1
        ):
            model = gr.Radio(
                [(_network_choice(name), name) for name in self.networks],
                value=first,
                show_label=False,
                elem_id="model",
            )
        with gr.Accordion("Advanced", open=False, elem_id="advanced"):
            method = gr.Dropdown(
                names, value=names[0], label="Method", info=summary_of(names[0]), elem_id="method"
            )
            controls = self._setting_controls(names[0], network)
            others = gr.CheckboxGroup(
                names,
                value=[],
                label="Compare with",
                info=f"Up to {MAX_METHODS - 1} more. They share alpha and the scales; the rest "
                "are defaults.",
                elem_id="others",
            )
        return model, method, others, controls

    def _setting_controls(self, method: str, network: OfferedNetwork) -> dict[str, Any]:
        """Create a control for each of ``SETTINGS``; those the method has are visible."""
        method_defaults = defaults(method, network.chosen)
        values = defaults("self-adapt", network.chosen) | method_defaults
        controls = {
            "alpha": gr.Slider(
                0, 1, values["alpha"], step=0.05, label="alpha", elem_id="alpha",
                info=HELP["alpha"],
            ),
            "psi": gr.Slider(
                0, 1, values["psi"], step=0.05, label="psi", elem_id="psi",
                info=HELP["psi"],
            ),
            "lr": gr.Number(
                values["lr"], step=0.001, minimum=0, maximum=MAX_LR, label="lr", elem_id="lr",
                info=HELP["lr"],
            ),
            "steps": gr.Slider(
                0, MAX_STEPS, values["steps"], step=1, label="steps", elem_id="steps",
                info=HELP["steps"],
            ),
            "scales": gr.CheckboxGroup(
                list(SCALES), value=list(values["scales"]), label="scales", elem_id="scales",
                info=HELP["scales"],
            ),
        }  # fmt: skip
        for name, control in controls.items():
            control.visible = name in method_defaults
        return controls

    def street(self, look: object, seed: object) -> str:
        """Return the path of a rendered street."""
        with _user_errors():
            if not isinstance(look, str) or look not in LOOKS:
                shown = str(look)[:40]
                raise ValueError(f"unknown look {shown!r}{alternatives(shown, LOOKS)}")
            check_number("street", seed, 0, MAX_SEED, whole=True)
            assert isinstance(seed, int)
            file = self._new_file(f"{look}-{seed}.png")
            PILImage.fromarray(self._render(look, seed)[0]).save(file)
            while len(self._rendered) >= MAX_RENDERED:
                del self._rendered[next(iter(self._rendered))]
            self._rendered[_digest(self._read(file).image)] = look, seed
            return str(file)

    def check(self, image: object, *values: object) -> list[Any]:
        """Validate the image and settings, and estimate how long a run will take."""
        if image is None:
            return [gr.skip(), self._instructions()]
        try:
            upload = self._read(self._file(image))
        except ValueError as error:
            return [None, _refusal(error)]
        shown = gr.skip()
        if upload.png is not None:
            file = self._new_file("image.png")
            file.write_bytes(upload.png)
            shown = str(file)
        with _user_errors():
            try:
                return [shown, self._estimate(upload, self._request(*values))]
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
        """Run the selected methods and show their results.

        The inputs are not preprocessed: Gradio would decode the image before it can be refused.
        """
        with _user_errors():
            selected = self._request(model, method, others, alpha, psi, lr, steps, scales)
            upload = self._read(self._file(image))
            try:
                outcomes = self._run(selected, upload, str(request.session_hash), progress)
            except Stopped:
                return [STOPPED, gr.skip(), gr.skip(), gr.skip()]
            seconds = sum(outcome.seconds for outcome in outcomes)
            done = f"<p>Done in {duration(seconds)}.</p>"
            return [done, *self._results(selected, upload, outcomes)]

    def example(self) -> list[Any]:
        """Show the example."""
        with _user_errors():
            return self._results(*self.compute_example())

    def compute_example(self) -> tuple[Request, Upload, list[Outcome]]:
        """Adapt to a rendered street, once for all visitors."""
        with self._example_lock:
            if self._example is None:
                name, network = next(iter(self.networks.loaded.items()))
                upload = self._read(Path(self.street(*FIRST_STREET)))
                method = network.methods[-1]
                settings = defaults(method, network.chosen)
                request = Request(model=name, methods={method: settings})
                self._example = request, upload, self._run(request, upload, EXAMPLE_SESSION)
            return self._example

    def _instructions(self) -> str:
        limits = self.limits
        return (
            f"<p>Drop an image: {', '.join(FORMATS)}, up to {limits.megabytes:g} MB and "
            f"{limits.megapixels:g} million pixels. Or use a rendered street.</p>"
        )

    def _request(self, model: object, method: object, others: object, *values: object) -> Request:
        network = self.networks.get(model)
        settings = dict(zip(SETTINGS, values, strict=True))
        return validated(str(model), network.methods, method, others, settings)

    def _file(self, image: object) -> Path:
        """Return the path of an image in the folder, uploaded or rendered."""
        if image is None:
            raise ValueError("there is no image yet; drop one, or use a rendered street")
        path = image.get("path") if isinstance(image, dict) else None
        file = Path(path).resolve() if isinstance(path, str) and "\0" not in path else None
        if file is None or not file.is_relative_to(self.folder.resolve()) or not file.is_file():
            raise ValueError("this image does not exist any more; upload it again")
        return file

    def _new_file(self, name: str) -> Path:
        """Return the path of a new file, in a folder that cannot be guessed."""
        folder = self.folder / "made" / secrets.token_hex(16)
        folder.mkdir(parents=True)
        return folder / name

    def _create_method(self, model: str, name: str, settings: frozenset[tuple[str, Any]]) -> Any:
        return create_method(name, self.networks.get(model).model, **dict(settings))

    def _estimate(self, upload: Upload, request: Request) -> str:
        """Return the estimated time for an image, and settings that would be faster."""
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
                    f" With {steps - steps // 2} steps about {duration(less)}, with the method san "
                    f"about {duration(2 * estimate.plain_seconds)} (see Advanced)."
                )
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
        index = {name: i for i, name in enumerate(request.methods)}

        def watch(name: str, step: int, steps: int, loss: float | None) -> None:
            done = (index[name] + step / max(1, steps)) / len(index)
            text = f"{name}: step {step} of {steps}, loss {loss:.3g}" if loss is not None else name
            progress(done, desc=text)

        network = self.networks.get(request.model)  # may be downloaded
        with self.queue.job(session) as job:
            turn = self.queue.enqueue(job)
            if not turn.done():
                progress(0, desc="waiting for an image of a program")
            turn.result()
            return list(run(network, request, upload.image, watch, job.stop))

    def _results(self, request: Request, upload: Upload, outcomes: list[Outcome]) -> list[Any]:
        file = self._new_file("masks.zip")
        file.write_bytes(masks_zip(request.model, outcomes, upload.size))
        street = self._rendered_street(upload)
        title = f"{upload.size[1]}x{upload.size[0]} pixels"
        if (size := size_of(upload.image)) != upload.size:
            title += f", segmented at {size[1]}x{size[0]}; masks are downloaded at full size"
        ground_truth = None
        if street is not None:
            look, seed, ground_truth = street
            title = f"Rendered street: {look}, number {seed}; {title}"
        return [
            viewer_data(upload, outcomes, title, ground_truth),
            charts.report(outcomes, ground_truth),
            gr.DownloadButton(value=str(file), visible=True),
        ]

    def _rendered_street(self, upload: Upload) -> tuple[str, int, Tensor] | None:
        """Return look, seed and labels if the image is a street rendered by this page."""
        street = self._rendered.get(_digest(upload.image))
        if street is None:
            return None
        return (*street, torch.from_numpy(self._render(*street)[1]))

    def _render(self, look: str, seed: int) -> tuple[Any, Any]:
        """Render a street and its labels, at a size within the limits."""
        limits = self.limits
        pixels = min(limits.max_pixels, limits.megapixels * 1e6, limits.num_bytes / 4)
        height = min(384, int((pixels / 2) ** 0.5))
        return render(look, seed, height, 2 * height)

    def stop(self, request: gr.Request) -> str:
        """Stop the user's run at its next step."""
        self.queue.stop_session(str(request.session_hash))
        return STOPPED

    def disconnect(self, request: gr.Request) -> None:
        """Stop the run of a user who has closed the page."""
        self.queue.stop_session(str(request.session_hash))

    def select_method(self, model: object, method: object) -> list[Any]:
        """Describe a method, and set the controls to its defaults."""
        with _user_errors():
            network = self.networks.get(model)
            name = check_method(method, network.methods)
            values = defaults(name, network.chosen)
            controls = [
                gr.update(visible=True, value=_component_value(values[setting]))
                if setting in values
                else gr.update(visible=False)
                for setting in SETTINGS
            ]
            return [gr.update(info=summary_of(name)), *controls]

    def select_network(self, model: object) -> list[Any]:
        """Open a network and list its methods; fall back to the first if it cannot be opened."""
        with _user_errors():
            refusal = ""
            try:
                network = self.networks.get(model)
            except ValueError as error:
                refusal, model = _refusal(error), next(iter(self.networks))
                network = self.networks.get(model)
            names = [*reversed(network.methods)]
            method, *controls = self.select_method(model, names[0])
            methods = {**method, "choices": [(name, name) for name in names], "value": names[0]}
            about = refusal + _network_info(str(model), network)
            others = gr.CheckboxGroup(names, value=[])
            return [gr.Radio(value=str(model)), about, others, methods, *controls]


def _digest(image: Tensor) -> bytes:
    return hashlib.sha256(image.numpy().tobytes()).digest()


def _network_info(name: str, network: OfferedNetwork) -> str:
    trained_on = network.trained_on or "unknown images"
    return f"<p>Network: <b>{escape(name)}</b>, trained on {escape(trained_on)}.</p>"


def _network_choice(name: str) -> str:
    """Return the label of a network; for published networks with training data and licence."""
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
    """Return JavaScript that sends an event to the viewer."""
    return f"() => {{ document.dispatchEvent(new Event('{name}')) }}"


def _component_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@contextmanager
def _user_errors() -> Iterator[None]:
    """Show errors on the page, without internals of the server."""
    try:
        yield
    except Stopped as error:
        raise gr.Error("stopped", print_exception=False) from error
    except gr.Error:
        raise
    except Exception as error:
        raise gr.Error(reason(error), print_exception=False) from error
