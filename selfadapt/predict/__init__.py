"""Images, folders and videos in, masks out: resumable, on one process or many."""

from selfadapt.predict.folder import Key, PredictFolder
from selfadapt.predict.inputs import Input, find_inputs
from selfadapt.predict.outputs import (
    DEFAULT,
    NOT_OF_VIDEOS,
    OUTPUTS,
    check_outputs,
    masks_of,
    write_result,
)
from selfadapt.predict.run import Run, Summary
from selfadapt.predict.stream import Segmented, predict

__all__ = [
    "DEFAULT",
    "NOT_OF_VIDEOS",
    "OUTPUTS",
    "Input",
    "Key",
    "PredictFolder",
    "Run",
    "Segmented",
    "Summary",
    "check_outputs",
    "find_inputs",
    "masks_of",
    "predict",
    "write_result",
]
