"""The file that holds every judgement of an implementation. A section at the end of its page shows them.

The file is a script, because a page that was opened from a disk can load only scripts. The judgements are JSON, which
is packed with gzip and written in base 64. This takes a twentieth of the space of a table.
"""

import base64
import gzip
import json
import shlex

from flashproof.reports import common, wording
from flashproof.reports.evidence import Judged, Kernel

FOLDER = "cases"


def address(kernel: Kernel) -> str:
    """The address of the file, relative to the pages."""
    return f"{FOLDER}/{wording.stem(kernel.name)}.js"


def content(kernel: Kernel, where: common.Shared | None = None) -> str:
    """The file: a call of `flashproofCases` with the packed judgements.

    where: what the failing cases have in common. Then no message says what its case alone needs.

    Each field of the judgements is a column. A list holds each text that may repeat, and the column holds the number of
    the text in this list. A judgement that passed has no bias and no message. The order is by check and case, because
    neighbours that are alike pack well; the script lists the worst first.
    """
    judged = kernel.judged
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
        # The line that repeats a judgement is its command, which all cases on a device share, and its case.
        "command": [word(wording.repeat_line(one.judgement).removesuffix(_case(one))) for one in judged],
        "case": [word(_case(one)) for one in judged],
        "said": [word(_said(one, where)) for one in judged],
    }
    data = json.dumps({"words": list(words), **columns}, separators=(",", ":"), ensure_ascii=False)
    packed = base64.b64encode(gzip.compress(data.encode(errors="replace"), 9, mtime=0)).decode()
    return f'flashproofCases("{packed}")\n'


def _case(judged: Judged) -> str:
    """The case as it ends the line that repeats it. Empty for a judgement without a case."""
    case = judged.judgement.case
    return shlex.quote(case) if case else ""


def _said(judged: Judged, where: common.Shared | None) -> str:
    message = judged.judgement.message if judged.judgement.status != "passed" else ""
    return common.without_needs(message) if where else message
