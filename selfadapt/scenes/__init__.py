"""Images of any size: read in windows, adapted to once, and segmented in tiles."""

from selfadapt.scenes.reading import (
    PictureReader,
    RasterReader,
    WindowReader,
    check_bands,
    is_raster,
    open_scene,
    raster_size,
)
from selfadapt.scenes.segment import SceneMaps, nearest, sample, segment_tiles, segment_whole
from selfadapt.scenes.tiles import TileCanvas, TileGrid, Window, blocks

__all__ = [
    "PictureReader",
    "RasterReader",
    "SceneMaps",
    "TileCanvas",
    "TileGrid",
    "Window",
    "WindowReader",
    "blocks",
    "check_bands",
    "is_raster",
    "nearest",
    "open_scene",
    "raster_size",
    "sample",
    "segment_tiles",
    "segment_whole",
]
