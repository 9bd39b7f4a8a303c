"""HTML pages: self-contained files for all screen sizes, light or dark."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from selfadapt.version import __version__


def render(template: str, **values: object) -> str:
    """Render a template of this folder with all values escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(version=__version__, **values)
