"""Published facts of the benchmark's text, by which it is known.

Sources: MLCommons' retired_benchmarks/bert/dataset.md and its dataset's README.
"""

from __future__ import annotations

NUM_PARTS = 500
TEXT_MD5 = {
    "part-00000-of-00500": "a64a7c31eff5cd38ae6d94f7a6229dab",
    "part-00001-of-00500": "549a9ed4f805257245bec936563abfd0",
    "part-00002-of-00500": "1a1366ddfc03aef9d41ce552ee247abf",
    "part-00497-of-00500": "66835aa75d4855f2e678e8f3d73812e9",
    "part-00498-of-00500": "e6d68a7632e9f4aa1a94128cce556dc9",
    "part-00499-of-00500": "b3b087ad24e3770d879a351664cebc5a",
    "eval.txt": "2a220f790517261547b1b45ed3ada07a",
}
# The dump that the text was made of, by its public name.
DUMP_MD5 = {"enwiki-20200101-pages-articles-multistream.xml.bz2": "00d47075e0f583fb7c0791fac1c57cb3"}
