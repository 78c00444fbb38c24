"""The file that holds every judgement of an implementation, for the fold at the end of its page.

It is a script, because a page that was opened from a disk may load scripts and nothing else. The judgements are JSON,
packed with gzip and written in base 64: packed, they take a twentieth of the space of a table.
"""

import base64
import gzip
import json

from flashproof.reports import wording
from flashproof.reports.evidence import Kernel, severity

FOLDER = "cases"


def address(kernel: Kernel) -> str:
    """The address of the file, from the pages."""
    return f"{FOLDER}/{wording.stem(kernel.name)}.js"


def content(kernel: Kernel) -> str:
    """The file: a call of `flashproofCases` with the packed judgements, the worst first.

    The judgements are columns, in which words that repeat are numbers of a list. A bias is there unless a case passed.
    """
    judged = sorted(kernel.judged, key=severity, reverse=True)
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    columns = {
        "status": [word(one.judgement.status) for one in judged],
        "check": [word(one.judgement.check) for one in judged],
        "tensor": [word(wording.TITLES.get(one.judgement.tensor or "", "")) for one in judged],
        "dtype": [word(one.judgement.dtype) for one in judged],
        "device": [word(str(one.machine)) for one in judged],
        "rho": ["" if one.rho is None else wording.rho(one.rho) for one in judged],
        "bias": ["" if one.judgement.status == "passed" else wording.number(one.judgement.bias) for one in judged],
        "grade": [word(one.judgement.certainty or "") for one in judged],
        "again": [word(wording.repeat_line(one.judgement)) for one in judged],
        "said": [word(one.judgement.message if one.judgement.status != "passed" else "") for one in judged],
    }
    data = json.dumps({"words": list(words), **columns}, separators=(",", ":"), ensure_ascii=False)
    packed = base64.b64encode(gzip.compress(data.encode(errors="replace"), 9, mtime=0)).decode()
    return f'flashproofCases("{packed}")\n'
