"""What was published of the benchmark's files and of fine-tuning's, by which they are known: published.yaml."""

from __future__ import annotations

from input_preprocessing.stage.reading import table

PUBLISHED = table(__file__, "published.yaml")
NUM_PARTS: int = PUBLISHED["text_parts"]
TEXT_MD5: dict[str, str] = PUBLISHED["text_md5"]
