"""The text of figures and findings: numbers, bytes, and the block of a failure."""

import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from hashlib import sha256

from flashproof.reports.evidence import is_zero, size, worst_rho
from flashproof.reports.record import Covered, Element, Judgement

_AXES = {
    "out": ("batch", "head", "query", "dim"),
    "lse": ("batch", "head", "query"),
    "dq": ("batch", "head", "query", "dim"),
}
_KEY_AXES = ("batch", "kv head", "key", "dim")


def number(value: float | str | None, digits: int = 2) -> str:
    """A figure with `digits` significant digits: 0.79, 7.3, 3.1e-5. A dash stands for None."""
    if value is None:
        return "–"
    value = float(value)
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else str(value)
    rounded = float(f"{value:.{digits}g}")
    if 1e-3 <= abs(rounded) < 1e4:
        return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"
    return scientific(value, digits)


def rho(value: float | str | None) -> str:
    """A rho with two digits, or with as many (up to seven) as distinguish it from 1.

    The value 1 separates a pass from a failure, so a rho beside it must not print as 1.
    """
    digits = 2
    while value is not None and digits < 7 and float(value) != 1 and number(value, digits) == number(1.0, digits):
        digits += 1
    return number(value, digits)


def scientific(value: float | str, digits: int = 2) -> str:
    """A number such as 3.1e-2, with no zero before its exponent. From 0.1 to 1000 it has no exponent."""
    value = float(value)
    if not math.isfinite(value) or value == 0 or 0.1 <= abs(value) < 1000:
        return "0" if value == 0 else f"{float(f'{value:.{digits}g}'):g}" if abs(value) >= 1 else f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def value(number_or_text: float | str, digits: int = 4) -> str:
    """An element of a tensor, with four digits by default."""
    number = float(number_or_text)
    return f"{number:.{digits}g}" if math.isfinite(number) else str(number)


def told_apart(first: float | str, second: float | str) -> tuple[str, str]:
    """Two elements of tensors, with four digits, or with as many (up to 16) as distinguish them."""
    digits = next((digits for digits in range(4, 17) if value(first, digits) != value(second, digits)), 4)
    return value(first, digits), value(second, digits)


def bytes_(count: int) -> str:
    """A number of bytes in the largest fitting unit: "1 GiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"


def bias_unit(dtype: str) -> str:
    """The word for the unit of a bias: the bound in float32, and "ulp" of the output in 16 bit.

    In 16 bit, the unit is the mean of u_o |exact| (`oracles.verdict.Bias`).
    """
    return "times the bound" if dtype == "float32" else "ulp"


def repeat_line(judgement: Judgement) -> str:
    """The command that repeats a judgement."""
    words = ["pytest", "--impl", judgement.implementation]
    if judgement.device != "cpu":
        words += ["--device", judgement.device]
    if judgement.case:
        words += ["--case", judgement.case]
    return shlex.join(words)


def where(judgement: Judgement) -> str:
    """The place of the worst element: "[batch 0, head 3, query 517, dim 12]"."""
    if judgement.worst is None:
        return ""
    axes = _AXES.get(judgement.tensor or "", _KEY_AXES)
    index = judgement.worst.index
    if len(axes) != len(index):
        return str(list(index))
    return "[" + ", ".join(f"{axis} {i}" for axis, i in zip(axes, index, strict=True)) + "]"


def failure_block(judgement: Judgement, threshold: str = "") -> str:
    """The text of a failure: what failed, by how much, where, and the command that repeats it.

    threshold: the result of a sweep, such as "passes at magnitude 8, fails from 16". It is shown if the judgement has
        no message of its own.
    """
    lines = finding(judgement, judgement.implementation, judgement.tensor or judgement.check, judgement.dtype)
    message = judgement.message.strip()
    message += "\n" if "\n\n" in message else ""  # an empty line separates code from the command
    lines += ["" if message else threshold, message, f"again: {repeat_line(judgement)}"]
    return "\n".join(line for line in lines if line)


# How the exact value is known, by the certainty of a judgement.
EXACT = {"certified": "certified", "bounded": "in float64", "sampled": "in float64, some rows certified"}


def finding(judgement: Judgement, *about: str) -> list[str]:
    """The lines about the figures of a judgement: rho, the worst element, the properties of its row, and the bias.

    about: the words at the beginning of the first line.
    """
    worst = worst_rho(judgement)
    head = "  ".join(about)
    lines = []
    if worst is not None:
        statistical = size(judgement.rho_statistical) > size(judgement.rho)
        head += f"  rho {rho(worst)}" + (" (statistical)" if statistical else "")
        figures = (
            []
            if judgement.worst is None
            else [f"{what} {size}" for what, size in zip(("error", "bound"), sizes(judgement.worst), strict=True)]
        )
        figures += [f"exact value {EXACT[judgement.certainty]}"] if judgement.certainty else []
        head += "   " + ", ".join(figures) if figures else ""
    lines.append(head)
    if judgement.worst is not None:
        got, exact = told_apart(judgement.worst.got, judgement.worst.exact)
        counts = f", which counts as 0 in {judgement.dtype}" if is_zero(judgement) and exact != "0" else ""
        lines.append(f"worst at {where(judgement)}: got {got}, exact {exact}{counts}")
        lines.append(judgement.worst.note)
    is_part = size(worst) <= 1 or (leans(judgement) and abs(judgement.bias or 0.0) >= PART * size(worst))
    if judgement.bias is not None and is_part:
        lines.append(bias_line(judgement))
    return [line for line in lines if line]


def sizes(worst: Element) -> tuple[str, str]:
    """Error and bound, with two digits, or with as many (up to eight) as distinguish them."""
    digits = next(
        (digits for digits in range(2, 9) if scientific(worst.error, digits) != scientific(worst.bound, digits)), 2
    )
    return scientific(worst.error, digits), scientific(worst.bound, digits)


PART = 0.02  # the least share of the largest error, above its bound, from which on a bias is told


def bias_line(judgement: Judgement) -> str:
    """The line about a bias, with its standard error and its limit, which is another one than that of rho.

    For example: "bias 0.41 ± 0.02 ulp, 1.2 times its limit".
    """
    error = "" if judgement.bias_error is None else f" ± {number(judgement.bias_error)}"
    limit = bias_limit(judgement)
    share = f", {rho(abs(judgement.bias or 0.0) / limit)} times its limit" if limit else ""
    return f"bias {number(judgement.bias)}{error} {bias_unit(judgement.dtype)}{share}"


def bias_limit(judgement: Judgement) -> float:
    """The largest bias that passes: the allowance and four standard errors. 0 if nothing is known."""
    return (judgement.bias_allowance or 0.0) + 4.0 * (judgement.bias_error or 0.0)


def leaning(judgement: Judgement) -> str:
    """Says that errors have a bias: "the errors of dV in bfloat16 lean to one side"."""
    return f"the errors of {_about(judgement)} lean to one side"


def _about(judgement: Judgement) -> str:
    return f"{tensor(judgement)} in {judgement.dtype}" if judgement.dtype else tensor(judgement)


def stem(name: str) -> str:
    """A file name without suffix, and an anchor, for any name and on any file system.

    A short name of lower-case letters, digits, dots, dashes and underscores stays as it is, unless it is reserved. In
    every other name, dashes replace unsafe characters. A digest of the name is added to it, so names stay different.
    """
    reserved = re.match(r"(index|mutants|con|prn|aux|nul|com\d|lpt\d)(\.|$)", name, re.IGNORECASE)
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,79}", name) and not name.endswith(".") and not reserved:
        return name
    stripped = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60]
    prefix = "implementation-" if reserved or not stripped else ""
    return f"{prefix}{stripped or 'name'}-{sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


def covered(found: Covered) -> str:
    """The coverage of the cases of a run, in words."""
    pairs = "all" if found.pairs == found.possible_pairs else f"{found.pairs:,} of the"
    share = 100.0 * found.triples / max(1, found.possible_triples)
    too_large = f"; {found.no_room:,} pairs need larger cases than the run allows" if found.no_room else ""
    return (
        f"{found.cases:,} cases hold {pairs} {found.possible_pairs:,} pairs of properties (a head dim, a layout ...) "
        f"that the claims allow, and {share:.0f} % of the triples{too_large}"
    )


def item(text: str) -> str:
    """An item of a list in Markdown, in lines of at most 120 columns. Code in backticks stays together if it fits."""
    kept = re.sub(r"`[^`]{,110}`", lambda code: code[0].replace(" ", "\0"), f"- {text}")
    lines = textwrap.wrap(kept, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


# The sets of checks that were asked for combination mutants (`record.Combined`).
SUITES = {
    "before": "a default run when its cases were lists by hand",
    "default": "a default run",
    "thorough": "a run with --thorough",
}
TITLES = {"out": "out", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}


def tensor(judgement: Judgement) -> str:
    """The name of the judged tensor: "dV". Of a property, the name of its check."""
    return TITLES[judgement.tensor] if judgement.tensor else judgement.check


def short_name(name: str) -> str:
    """The name of an implementation without the folders or the module before it: "mine.py:attention"."""
    place, colon, attribute = name.rpartition(":")
    file = place.rpartition("/")[2]
    return f"{file}{colon}{attribute}" if file.endswith(".py") else attribute or name


def listed(names: Iterable[str], last: str = "and") -> str:
    """Names as a list in a sentence: "a, b and c"."""
    every = list(names)
    return f" {last} ".join(filter(None, [", ".join(every[:-1]), *every[-1:]]))


def leans(judgement: Judgement) -> bool:
    """Whether the bias is larger than it may be (`bias_limit`)."""
    return judgement.bias is not None and abs(judgement.bias) > bias_limit(judgement) > 0.0


def reason(judgement: Judgement) -> str:
    """Why a judgement failed, as a sentence without its end: "dV in bfloat16 is 1.7 times as far off as allowed"."""
    about, worst = _about(judgement), worst_rho(judgement)
    if size(worst) == math.inf:
        if judgement.worst is not None and size(judgement.worst.got) < math.inf:
            return f"{about} is wrong where its arithmetic allows no error"
        return f"{about} is not finite where the exact result is"
    if size(worst) > 1:
        return f"{about} is {times(size(worst))} times as far off as its arithmetic allows"
    if leans(judgement):
        return f"{leaning(judgement)}: {bias_line(judgement)}"
    if judgement.rms is not None:
        return (
            f"the root mean square of the errors of {about} is {number(judgement.rms)} times what its arithmetic makes"
        )
    message = judgement.message.strip().partition("\n")[0].rstrip(".")
    return f"{about} does not hold" + (f": {message}" if message else "")


def times(figure: float) -> str:
    """A rho in a sentence: "1.7", "28,000", "2.1e31"."""
    return f"{float(f'{figure:.2g}'):,.0f}" if 1e4 <= figure < 1e9 else rho(figure)


def instance(judgement: Judgement) -> str:
    """Why a judgement failed, with its worst element: "out is 17 times as far off ...: got -0.06506 for -0.07506"."""
    worst = judgement.worst
    if worst is None or size(worst_rho(judgement)) <= 1:
        return reason(judgement)
    got, exact = told_apart(worst.got, 0.0 if is_zero(judgement) else worst.exact)
    return f"{reason(judgement)}: got {got} for {exact}"


def short_reason(judgement: Judgement) -> str:
    """The figure of a judgement in a few letters: its rho, "bias", "rms 1.9", "ok", "no" or "fault"."""
    worst = worst_rho(judgement)
    if judgement.status in ("refused", "passed"):
        return "refused" if judgement.status == "refused" else "ok" if worst is None else rho(worst)
    if size(worst) > 1:
        return "∞" if size(worst) == math.inf else rho(worst)
    if leans(judgement):
        return "bias"
    if worst is None and judgement.rms is not None:
        return f"rms {number(judgement.rms)}"
    if worst is None:
        return "fault" if judgement.check.startswith(("accuracy/", "gradients/")) else "no"
    return rho(worst)


def sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 case", "24 cases"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def failed_checks(failures: Sequence[Judgement], verb: str = "") -> str:
    """How many checks failed: "19 checks failed (30 with dtypes)". verb: what follows "checks".

    The number in brackets counts a check once for each dtype and device, as the last line of a run does.
    """
    checks = len({one.check for one in failures})
    places = len({(one.check, one.dtype, one.device) for one in failures})
    each = "dtypes and devices" if len({one.device for one in failures}) > 1 else "dtypes"
    return plural(checks, "check") + verb + (f" ({places:,} with {each})" if places > checks else "")
