"""Segmentation of images, folders and videos: resumable, in one process or several."""

from selfadapt.predict.folder import FileKey, PredictFolder
from selfadapt.predict.inputs import Input, find_inputs
from selfadapt.predict.outputs import (
    DEFAULT,
    IMAGES_ONLY,
    OUTPUTS,
    check_outputs,
    masks_of,
    write_result,
)
from selfadapt.predict.run import PredictRun, Summary
from selfadapt.predict.scene import LargeImages, SceneResult, segment_scene
from selfadapt.predict.stream import Segmented, predict

__all__ = [
    "DEFAULT",
    "IMAGES_ONLY",
    "OUTPUTS",
    "FileKey",
    "Input",
    "LargeImages",
    "PredictFolder",
    "PredictRun",
    "SceneResult",
    "Segmented",
    "Summary",
    "check_outputs",
    "find_inputs",
    "masks_of",
    "predict",
    "segment_scene",
    "write_result",
]
