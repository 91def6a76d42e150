"""Names, digests and sources of the published files for the benchmark and fine-tuning (published.yaml)."""

from __future__ import annotations

from input_preprocessing.stage.reading import table

PUBLISHED = table(__file__, "published.yaml")
NUM_PARTS: int = PUBLISHED["text_parts"]
TEXT_MD5: dict[str, str] = PUBLISHED["text_md5"]
