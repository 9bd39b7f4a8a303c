"""Draw docs/streets.jpg: three scenes in every look of the built-in world.

python docs/streets.py
"""

from pathlib import Path

import numpy as np
from PIL import Image

from selfadapt.streets import LOOKS, render

SEEDS = (3, 11, 40)

rows = [np.hstack([render(look, seed)[0] for seed in SEEDS]) for look in LOOKS]
sheet = Image.fromarray(np.vstack(rows)).reduce(2)
sheet.save(Path(__file__).with_suffix(".jpg"), quality=88)
