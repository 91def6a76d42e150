"""Text that was laid out for pages or a screen, such as pdftotext's or subtitles, made prose.

Pages are told by form feeds with running heads, or that stand within sentences, or by words that are
broken at line ends; a text with form feeds alone keeps them as ends of documents. Subtitles are told
by their times.
"""

import re
from collections import Counter
from itertools import pairwise

_TIME = r"(?:\d+:)?\d\d:\d\d[,.]\d{3}"
# With the line before, a cue's number or name, which subtitles need not have.
_CUE = re.compile(rf"(?:^|\n)(?:[^\n]+\n)?[ \t]*{_TIME} --> {_TIME}[^\n]*\n")
_CUE_TAG = re.compile(r"<[^<>\n]*>|\{\\[^{}\n]*\}")
# A capital begins another part of a name, which has its hyphen.
_BROKEN = re.compile(r"([^\W\d_]+)-\n[ \t]*((?![A-Z])[^\W\d_]+)")
_ENDED = re.compile(r"""[.!?:;。！？]["')\]”’»]*$""")
_FEWEST_PAGES, _FEWEST_BROKEN = 3, 5
_BROKEN_SHARE = 0.01  # of the lines, for a text without page breaks


def prose_of(text: str) -> tuple[str, Counter[str]]:
    """The text as prose, and what was done to it; as it is, and nothing, if it was not laid out."""
    lines = text.replace("\r\n", "\n")
    if len(_CUE.findall(lines)) > 1:
        return _of_cues(lines)
    pages = [page.strip().split("\n") for page in lines.split("\f") if page.strip()]
    # Those of a chapter stand on a tenth of the pages.
    edges = Counter(_bare(line) for page in pages for line in {page[0], page[-1]})
    fewest = max(_FEWEST_PAGES, len(pages) / 10)
    heads = {line for line, count in edges.items() if count >= fewest}
    bare = ["\n".join(_without(page, heads)).strip() for page in pages]
    within = sum(
        after[:1].islower() and not _ENDED.search(page)
        for page, after in pairwise(bare)
    )
    # A number that is repeated at the end is a page's; in front, a chapter's may be.
    feet = Counter(_bare(page[-1]) for page in pages)
    is_paged = any("#" in foot and feet[foot] >= fewest for foot in heads)
    is_paged |= 5 * within >= len(pages)
    broken = len(_BROKEN.findall(lines))
    is_broken = broken >= max(_FEWEST_BROKEN, _BROKEN_SHARE * lines.count("\n"))
    if is_paged if len(pages) >= _FEWEST_PAGES else is_broken and len(pages) == 1:
        dropped = sum(len(page) - len(_without(page, heads)) for page in pages)
        return _of_pages(bare, dropped)
    return text, Counter()


def _of_cues(text: str) -> tuple[str, Counter[str]]:
    """Speech of subtitles. What stands before the first cue is their header."""
    _, *cues = _CUE.split(text)
    lines: list[str] = []
    for cue in cues:
        # A blank line ends a cue; notes and styles may follow.
        speech = cue.lstrip("\n").partition("\n\n")[0]
        spoken = [_CUE_TAG.sub("", line).strip() for line in speech.split("\n")]
        # A line that rolls up stands in two cues.
        lines += [line for line in spoken if line and [line] != lines[-1:]]
    return "\n".join(lines) + "\n", Counter({"cues of subtitles joined": len(cues)})


def _bare(line: str) -> str:
    """A line without its numbers, which differ from page to page."""
    return re.sub(r"\d+", "#", line.strip())


def _without(page: list[str], heads: set[str]) -> list[str]:
    edges = 0, len(page) - 1
    return [x for n, x in enumerate(page) if n not in edges or _bare(x) not in heads]


def _of_pages(pages: list[str], dropped: int) -> tuple[str, Counter[str]]:
    # A page ends a paragraph if it ends a sentence.
    text = "".join(p + ("\n\n" if _ENDED.search(p) else "\n") for p in pages)
    words = Counter(re.findall(r"[^\W\d_]+(?:-[^\W\d_]+)?", text))

    def joined(word: re.Match[str]) -> str:
        begin, end = word.groups()
        # A hyphen of the word itself stands in other places, too.
        return (
            f"{begin}-{end}"
            if words[f"{begin}-{end}"] > words[begin + end]
            else begin + end
        )

    text, broken = _BROKEN.subn(joined, text)
    done = {
        "pages joined": len(pages),
        "running heads dropped": dropped,
        "broken words joined": broken,
    }
    # Blocks stand far apart on a page, and are of one document.
    return re.sub(r"\n\s*\n", "\n\n", text), Counter(done)
