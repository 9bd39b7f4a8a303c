"""All limits of the server: on visitors, requests, uploads, files and time."""

from dataclasses import dataclass

from selfadapt.checks import check_number

# images

MIN_SIDE = 16
"""Minimum height and width of an upload."""
MAX_SIDE = 1600
"""Maximum height and width of the photo and masks sent to the page."""
MAX_SCANS = 100
"""Maximum number of scans of a JPEG; each decodes all pixels again. Usual are 1 to 12."""
MAX_SEGMENTS = 10_000
"""Maximum number of markers of a JPEG besides restart markers."""
MAX_TILES = 2**17
"""Maximum number of tiles or strips of a TIFF."""
PIXELS = {"cpu": 384 * 768, "cuda": 1024 * 2048}
"""Default of ``Limits.max_pixels`` by device type; other devices use the value of the CPU."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the size of images, set by flags of ``selfadapt serve``."""

    megabytes: float = 20.0
    """Larger files are refused."""
    megapixels: float = 32.0
    """Images with more pixels are refused."""
    max_pixels: int = PIXELS["cpu"]
    """Images with more pixels are scaled down."""

    def __post_init__(self) -> None:
        check_number("max_mb", self.megabytes, 0.01, 1024)
        check_number("max_megapixels", self.megapixels, 0.01, 1024)
        check_number("max_pixels", self.max_pixels, MIN_SIDE**2, whole=True)

    @property
    def num_bytes(self) -> int:
        """Maximum size of a file in bytes."""
        return int(self.megabytes * 2**20)


# settings of a request

MAX_STEPS, MAX_LR, MAX_METHODS = 50, 1.0, 4
MAX_SEED = 9999
"""Largest number of a rendered street."""

# connections and requests

MAX_CONNECTIONS = 512
"""With more connections, requests are refused; a page has a few."""
REQUEST_S = 30
"""Time for the first request of a connection to arrive."""
BODY_S, BODY_BYTES_S = 30, 2**15
"""A body must arrive within this time, and at this rate if it has the maximum size."""
MAX_JSON_BYTES = 2**18
MAX_DEPTH = 20
"""Maximum depth of JSON; the page sends 4."""
UPLOAD_OVERHEAD = 2**16
"""Bytes that an upload may have in addition to the file."""

# visitors

MAX_VISITORS = 10_000
"""Beyond this number, the least recently seen visitors must reload the page."""
MAX_SESSIONS = 100
"""Beyond this number of open pages, the oldest of a visitor are forgotten."""
MAX_QUEUE = 20
"""Maximum number of waiting events of all visitors; those that stop a run do not count. Also that
of waiting images of programs."""
MAX_PENDING = {"adapt": 2, "stop": 10, "other": 10}
"""Maximum number of waiting or running events of a visitor, by their kind."""

# the interface for programs

MAX_RUNNING = 1
"""Maximum number of images that are adapted to at a time, of the page and of programs."""
MIN_TOKEN, MAX_TOKEN = 16, 256
"""Length of a token."""
MAX_PROBS_BYTES = 2**28
"""Maximum size of the probabilities of an image."""
MAX_NOTE, MAX_HEADER = 300, 2000
"""Maximum length of a note in a header, and of all."""

# memory and disk

MAX_STORAGE_BYTES = 2**31
MAX_FILES = 20_000
"""Limit for all visitors together."""
SHARE = 4
"""A visitor may have one part in ``SHARE`` of the files and of their bytes."""
EXPIRY_S = 2 * 3600
"""Files not modified for this long are removed."""
MAX_FETCHED = 2
"""Number of downloaded networks kept in memory; others are opened again from disk."""
MAX_RENDERED = 1000
"""Number of rendered streets whose labels can still be looked up."""
