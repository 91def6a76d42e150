"""Options of the instance maker. Imports nothing slow, so that --help answers at once."""

import argparse
import dataclasses
import hashlib

from bert.data.records import DataError
from input_preprocessing.stage.cli import parser_of

# Not in the digest: values in data sets made before these options existed.
UNRECORDED = {"do_lower_case": True, "nsp": True}
# A default exists once, in options.yaml.
_default = parser_of("sampling").get_default


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options of the reference, by its names.

    Raises:
        DataError: a value out of range.
    """

    max_seq_length: int = _default("max_seq_length")
    max_predictions_per_seq: int = _default("max_predictions_per_seq")
    masked_lm_prob: float = _default("masked_lm_prob")
    short_seq_prob: float = _default("short_seq_prob")
    random_seed: int = _default("random_seed")
    dupe_factor: int = _default("dupe_factor")
    do_lower_case: bool = _default("do_lower_case")
    # Sentence pairs for next-sentence prediction; else full sequences of a document.
    nsp: bool = _default("nsp")

    def __post_init__(self) -> None:
        # 5: [CLS], two [SEP] and a token for each segment. 32,767: positions are int16.
        for name, low, high in (
            ("max_seq_length", 5, 32767),
            ("max_predictions_per_seq", 1, 32767),
            ("masked_lm_prob", 0, 1),
            ("short_seq_prob", 0, 1),
            ("dupe_factor", 1, 1000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise DataError(
                    f"--{name.replace('_', '-')} is {value}; give a value from {low} to {high}"
                )


def sampling_digest(config: SamplingConfig) -> str:
    """Digest of all sampling options; those of UNRECORDED are included only if they differ."""
    return hashlib.md5(
        repr(sorted(dataclasses.asdict(config).items() - UNRECORDED.items())).encode()
    ).hexdigest()


def sampling_config(options: argparse.Namespace) -> SamplingConfig:
    return SamplingConfig(
        **{
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(SamplingConfig)
        }
    )
