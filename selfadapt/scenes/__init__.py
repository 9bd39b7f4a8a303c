"""Images of any size: read in windows, adapted to once, and segmented in tiles."""

from selfadapt.scenes.reading import Picture, Raster, Scene, is_raster, raster_size
from selfadapt.scenes.segment import SceneMaps, nearest, sample, segment_tiles, segment_whole
from selfadapt.scenes.tiles import Canvas, Grid, Window, blocks

__all__ = [
    "Canvas",
    "Grid",
    "Picture",
    "Raster",
    "Scene",
    "SceneMaps",
    "Window",
    "blocks",
    "is_raster",
    "nearest",
    "raster_size",
    "sample",
    "segment_tiles",
    "segment_whole",
]
