"""Data preparation, from text to packed records: `python -m input_preprocessing STAGE`, one
function per stage.
"""

from common.tables import read_table

STAGES: dict[str, list[str]] = read_table(__file__, "stages.yaml")
