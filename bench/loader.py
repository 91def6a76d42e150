"""The training loader: sequences per CPU second from files in the page cache to batches.

Files as written by `prepare_data.sh`, with Wikipedia's length distribution (synthetic).

usage: python bench/loader.py [--rows-per-step 48] [--steps 400]
"""

import shutil
import tempfile
from pathlib import Path

from lib import Parser, cpu_seconds, emit, integer

from bert.data.format import write_records
from bert.data.loader import LoaderConfig, TrainingData, open_source
from bert.data.records import Metadata
from bert.data.sampler import Sampler
from bert.data.shards import write_index
from bert.data.synthetic import synthetic_records

_LENGTH, _VOCABULARY = 512, 30_522
# No vocabulary has this digest: the token ids are made up.
_METADATA = Metadata(
    max_seq_length=_LENGTH, vocab_md5="0" * 32, random_seed=0, dupe_factor=1
)
_FILES, _ROWS_PER_FILE = 8, 18_149  # rows of one of the 4,320 real shards


def write_files(folder: Path, packed: bool) -> None:
    """Writes files with the same records: their number and size are what matters here."""
    folder.mkdir()
    records = synthetic_records(_ROWS_PER_FILE, _LENGTH, _VOCABULARY, packed, seed=0)
    names = [
        folder / f"part_{number:05d}_of_{_FILES:05d}.hdf5" for number in range(_FILES)
    ]
    write_records(names[0], records, _METADATA)
    for name in names[1:]:
        shutil.copyfile(names[0], name)
    write_index(folder, names)


def rate(config: LoaderConfig, steps: int) -> dict[str, float]:
    """Sequences per CPU second, in random order, after a first pass."""
    source = open_source(config, _VOCABULARY)
    sampler = Sampler(source.row_counts(), config.rows_per_step, 1, 0, 1)
    # Without padding and page-locked memory, which are the trainer's.
    data = TrainingData(source, sampler, config, _VOCABULARY, 1, lambda batch: batch)
    sequences: list[int] = []  # of each batch

    def run() -> None:
        sequences[:] = [
            batch.num_sequences for _ in range(steps) for batch in data.next_step()
        ]

    # Brings the files into the page cache.
    run()
    seconds = cpu_seconds(run)
    data.close()
    return {"sequences_per_cpu_second": round(sum(sequences) / seconds)}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--rows-per-step",
        type=integer,
        default=48,
        help="per rank (default %(default)s)",
    )
    parser.add_argument(
        "--steps", type=integer, default=400, help="to measure (default %(default)s)"
    )
    options = parser.parse_args()
    size = options.rows_per_step
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder / "packed", packed=True)
        write_files(folder / "unpacked", packed=False)
        configs = {
            "packed": LoaderConfig(
                packed=True, datadir_packed=folder / "packed", batch_size=size
            ),
            "unpacked": LoaderConfig(
                datadir=folder / "unpacked", batch_size=size, batching="rows"
            ),
        }
        figures: dict[str, object] = {
            kind: rate(config, options.steps) for kind, config in configs.items()
        }
    emit(
        "loader",
        figures,
        data="Wikipedia mix (synthetic), 8 files of the size of the real shards, page cache warm",
    )


if __name__ == "__main__":
    main()
