"""Combination mutants: kernels that are wrong only where two or three properties of a call meet, or beyond a size.

They measure how good the cases of a run are. A condition is drawn from the whole space of cases at random, and never
from the covering array of a run. It is drawn in three steps: choose a point of the space, call the kernel there, and
take some of the properties that the call shows.

The properties are read from the call itself (tensors, keywords, state of the process), and not from the case, because
kernels choose their code in the same way. A mutant is wrong at the point where it was drawn. If its error there is
inside the bound, another mutant is drawn.

    python -m flashproof.tests.suite.mutants.combinations [-n COUNT] [--seed SEED] [-j PROCESSES] [-o RECORDS]
        [--thorough]
"""

import argparse
import math
import multiprocessing
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashproof import judging, ways
from flashproof.calling import UNOBSERVED, TensorName
from flashproof.cases import Case
from flashproof.covering import OPEN
from flashproof.environment import environment, run_name
from flashproof.impls.spec import DTYPES, OWN_KERNELS, Dtype, Implementation
from flashproof.oracles.masks import BLOCK, Dropout
from flashproof.registry import Check, checks
from flashproof.reports.record import Combined, append
from flashproof.space import FACTORS, space_of
from flashproof.tests.suite.mutants import trial

Kind = Literal["pair", "triple", "threshold"]
Fault = Literal["factor", "last row", "coarse", "rows swapped", "first head"]
FAULTS: dict[Fault, str] = {
    "factor": "everything is 1 % too large",
    "last row": "the last row is zero",
    "coarse": "every number is rounded to a few bits",
    "rows swapped": "the first two rows are exchanged",
    "first head": "the last head has what belongs to the first",
}
SUPPORTS = replace(OWN_KERNELS, block_mask=True, deterministic=False, batch_invariant=False, linear_memory=False)
Shows = dict[str, str]  # the properties that a call shows, each with its level


@dataclass(frozen=True)
class Mutant:
    """A kernel that is wrong where a call shows all these properties, or where a size is above a limit."""

    kind: Kind
    where: tuple[tuple[str, str], ...]  # properties and their levels
    beyond: tuple[str, int] | None  # a size and its limit
    tensor: TensorName
    fault: Fault

    def __str__(self) -> str:
        conditions = [f"{name} {level}" for name, level in self.where]
        conditions += [f"{self.beyond[0]} > {self.beyond[1]}"] if self.beyond else []
        return f"{self.tensor}: {FAULTS[self.fault]}, where {', '.join(conditions)}"

    def holds(self, shown: Shows, sizes: dict[str, int]) -> bool:
        """Returns whether a call meets the condition."""
        if self.beyond and sizes[self.beyond[0]] <= self.beyond[1]:
            return False
        return all(shown.get(name) == level for name, level in self.where)


# ------------------------------------------------------------------------------------------------- what calls show


def _class(number: float, limits: tuple[float, ...]) -> str:
    """Returns the class of a number between ascending limits, in words."""
    below = [limit for limit in limits if number <= limit]
    return f"up to {below[0]:g}" if below else f"over {limits[-1]:g}"


LENGTHS = (1, 15, 64, 144, 1024, 4096)


def _rest(length: int) -> str:
    return next(f"of {step}" for step in (64, 16, 2, 1) if length % step == 0)


def _layout(tensor: Tensor) -> str:
    heads, length, dim = tensor.stride()[1:]
    sizes = tensor.shape
    if any(stride == 0 for stride, size in zip(tensor.stride(), sizes, strict=True) if size > 1):
        return "expanded"
    if dim > 2 and sizes[3] > 1:
        return "columns"
    if dim == 2 and sizes[3] > 1:
        return "sliced"
    if heads < length and sizes[1] > 1 and sizes[2] > 1:
        return "length first" if sizes[0] > 1 and tensor.stride()[0] < length else "transposed"
    return "cropped" if heads > length * sizes[2] and sizes[1] > 1 else "contiguous"


def _address(tensor: Tensor) -> str:
    return "aligned" if tensor.data_ptr() % 16 == 0 else "offset"


def _sign(tensor: Tensor) -> str:
    if not tensor.any():
        return "zero"
    return "one sign" if bool((tensor >= 0).all() or (tensor <= 0).all()) else "both signs"


def _entries(blocks: Tensor, batch: int, heads: int) -> str:
    return "one each" if blocks.shape[:2] == (batch, heads) else "one for several"


def _scale(keywords: dict[str, Any]) -> str:
    scale = keywords.get("scale")
    if scale is None:
        return "default"
    if isinstance(scale, float) and type(scale) is not float:
        return "NumPy"
    if isinstance(scale, int):
        return "int"
    if scale <= 0:
        return "zero" if scale == 0 else "negative"
    return "1" if scale == 1 else "above 1" if scale > 1 else "below 1/32" if scale < 1 / 32 else "given"


def of_forward(tensors: tuple[Tensor, ...], keywords: dict[str, Any]) -> tuple[Shows, dict[str, int]]:
    """Returns the properties that the forward of a call shows, and the sizes of the call."""
    query, key, value = tensors
    (batch, heads, queries, dim), (_, kv_heads, keys, _) = query.shape, key.shape
    blocks = keywords.get("block_mask")
    p = keywords.get("dropout_p", 0.0)
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    wanted = [name for name, tensor in zip(("dq", "dk", "dv"), tensors, strict=True) if tensor.requires_grad]
    shown = {
        "dtype": str(query.dtype),
        "batch": "over 65535 with heads" if batch * heads > 65535 else _class(batch, (1, 2)),
        "key heads": _class(kv_heads, (1, 2, 3, 9)),
        "group": _class(heads // kv_heads, (1, 2, 3, 4, 7, 8)),
        "queries": _class(queries, LENGTHS),
        "queries' rest": _rest(queries),
        "keys": _class(keys, LENGTHS),
        "keys' rest": _rest(keys),
        "queries against keys": "=" if queries == keys else "<" if queries < keys else ">",
        "head dim": str(dim) if dim % 8 == 0 else "odd" if dim % 2 else "even",
        "mask": str(keywords.get("causal_alignment", "top_left")) if keywords.get("is_causal") else "full",
        "block mask": "none" if blocks is None else "half" if 3.0 * float(blocks.float().mean()) > 1.0 else "sparse",
        "entries of the block mask": "none" if blocks is None else _entries(blocks, batch, heads),
        "scale": _scale(keywords),
        "dropout": "none" if not p else "up to 0.1" if 10.0 * p <= 1.0 else "some" if p < 0.5 else "most",
        "dropout seed": "none" if not p else "of 32 bits" if keywords["dropout_seed"] < 2**32 else "of 64 bits",
        "LSE": str(bool(keywords.get("return_lse"))),
        "keywords": "all" if "is_causal" in keywords and not keywords["is_causal"] else "needed",
        "sharing": "apart" if len(set(storages)) == 3 else "all" if len(set(storages)) == 1 else "key and value",
        "gradients": "inference" if torch.is_inference_mode_enabled() else str(torch.is_grad_enabled()),
        "wanted": " ".join(wanted),
        "inputs": "leaves" if query.is_leaf else "results of operations",
        "thread": "main" if threading.current_thread() is threading.main_thread() else "another",
        "threads of loops": "several" if torch.get_num_threads() > 1 else "one",
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "autocast": str(torch.is_autocast_enabled("cpu")),
        "recomputed": str(torch._C._current_graph_task_id() != -1),
        "queries' size": _class(float(query.detach().abs().max()), (0.0, 0.1, 6.0, 30.0)),
        "keys' size": _class(float(key.detach().abs().max()), (0.0, 6.0, 30.0)),
        "values": _sign(value),
        "values' size": _class(float(value.detach().abs().max()), (0.0, 0.001, 6.0)),
    }
    shown |= {f"layout of {name}": _layout(tensor) for name, tensor in zip("qkv", tensors, strict=True)}
    shown |= {f"address of {name}": _address(tensor) for name, tensor in zip("qkv", tensors, strict=True)}
    return shown, sizes_of(batch, heads, kv_heads, queries, keys, dim)


def sizes_of(batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int) -> dict[str, int]:
    """Returns the sizes of a call for which a mutant may have a limit."""
    return {
        "queries": queries,
        "keys": keys,
        "heads": heads,
        "group": heads // kv_heads,
        "batch": batch,
        "batch x heads": batch * heads,
        "head dim": dim,
    }


def of_backward(dout: Tensor, number: int, interleaved: bool) -> Shows:
    """Returns the properties that a backward shows in addition to those of its forward.

    number: how many backwards this forward has had, with this one. interleaved: whether another forward came between.
    """
    rows = dout.abs().sum(dim=-1)
    return {
        "layout of do": _layout(dout),
        "address of do": _address(dout),
        "output gradient": _sign(dout),
        "output gradient's size": _class(float(dout.abs().max()), (0.0, 0.001, 30.0)),
        "rows of do": "some zero" if bool((rows == 0).any()) and bool(rows.any()) else "none zero",
        "backward": "first" if number == 1 else "again",
        "between": "another forward" if interleaved else "nothing",
    }


# ------------------------------------------------------------------------------------------------ the right kernel


def _kept(query: Tensor, keys: int, keywords: dict[str, Any]) -> Tensor | None:
    """Returns the factors by which dropout multiplies the weights; None without dropout."""
    p = keywords.get("dropout_p", 0.0)
    if not p:
        return None
    batches, heads = (torch.arange(size) for size in query.shape[:2])
    dropout, rows = Dropout(p, keywords["dropout_seed"]), torch.arange(query.shape[2])
    kept = dropout.kept(batches[:, None], heads[None, :].expand(len(batches), -1), rows, keys)
    return kept.float() / (1.0 - p)


def _visible(query: Tensor, keys: int, keywords: dict[str, Any]) -> Tensor | None:
    queries = query.shape[2]
    seen = None
    if keywords.get("is_causal"):
        below = keys - queries if keywords.get("causal_alignment") == "bottom_right" else 0
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(below)
    if (blocks := keywords.get("block_mask")) is not None:
        whole = blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[..., :queries, :keys]
        seen = whole if seen is None else whole & seen
    return seen


class _Eager(torch.autograd.Function):
    """Textbook attention in float32 with the casts of FlashAttention.

    It has a fault where the condition of its mutant holds.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keywords: dict[str, Any], spy: "Spy", about: Any
    ) -> Any:
        shown, sizes = about
        spy.forwards += 1
        group = query.shape[1] // key.shape[1]
        q, k, v = query.float(), *(tensor.float().repeat_interleave(group, 1) for tensor in (key, value))
        scale = 1.0 / math.sqrt(query.shape[3]) if keywords.get("scale") is None else float(keywords["scale"])
        scores = scale * (q @ k.mT)
        if (seen := _visible(query, key.shape[2], keywords)) is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.softmax(scores, dim=-1).nan_to_num(nan=0.0)
        kept = _kept(query, key.shape[2], keywords)
        dropped = weights if kept is None else weights * kept
        out = (dropped.to(query.dtype).float() @ v).to(query.dtype)
        spy.see(shown, sizes)
        ctx.save_for_backward(query, key, value, out, weights, kept)
        ctx.scale, ctx.spy, ctx.shown, ctx.sizes, ctx.number, ctx.at = scale, spy, shown, sizes, 0, spy.forwards
        return spy.wrong("out", out, shown, sizes), spy.wrong("lse", lse, shown, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        query, key, value, out, weights, kept = ctx.saved_tensors
        ctx.number += 1
        spy, sizes = ctx.spy, ctx.sizes
        shown = ctx.shown | of_backward(dout, ctx.number, ctx.at != spy.forwards)
        spy.see(shown, sizes)
        (batch, heads, _, dim), (kv_heads, keys) = query.shape, key.shape[1:3]
        k, v = (tensor.float().repeat_interleave(heads // kv_heads, 1) for tensor in (key, value))
        dweights = dout.float() @ v.mT
        dropped = weights
        if kept is not None:
            dweights, dropped = dweights * kept, weights * kept
        delta = (dout.float() * out.float()).sum(dim=-1, keepdim=True)
        dscores = (weights * (dweights - delta)).to(query.dtype).float()

        def summed(tensor: Tensor) -> Tensor:
            return tensor.reshape(batch, kv_heads, heads // kv_heads, keys, dim).sum(dim=2).to(query.dtype)

        gradients: dict[TensorName, Tensor] = {
            "dq": (ctx.scale * (dscores @ k)).to(query.dtype),
            "dk": summed(ctx.scale * (dscores.mT @ query.float())),
            "dv": summed(dropped.to(query.dtype).float().mT @ dout.float()),
        }
        return (*(spy.wrong(name, tensor, shown, sizes) for name, tensor in gradients.items()), None, None, None)


@dataclass
class Spy:
    """Remembers the calls of a kernel, and holds the fault of the kernel."""

    mutant: Mutant | None = None
    forwards: int = 0
    seen: list[tuple[Shows, dict[str, int]]] = field(default_factory=list)
    watches: bool = False

    def see(self, shown: Shows, sizes: dict[str, int]) -> None:
        """Remembers the properties and sizes of a call, if it watches."""
        if self.watches:
            self.seen.append((shown, sizes))

    def wrong(self, name: TensorName, tensor: Tensor, shown: Shows, sizes: dict[str, int]) -> Tensor:
        """Returns a tensor of the answer, with the fault if the call meets its condition."""
        mutant = self.mutant
        if mutant is None or mutant.tensor != name or not mutant.holds(shown, sizes):
            return tensor
        found = tensor.clone()
        rows = found if found.ndim == 4 else found[..., None]
        match mutant.fault:
            case "factor":
                rows *= 1.01
            case "last row":
                rows[:, :, -1] = 0.0
            case "coarse":
                mantissa, exponent = torch.frexp(found.float())
                found.copy_(torch.ldexp((mantissa * 32.0).round() / 32.0, exponent).to(found.dtype))
            case "rows swapped":
                rows[:, :, :2] = rows[:, :, :2].flip(2)
            case "first head":
                rows[:, -1] = rows[:, 0].clone()
        return found


def kernel(spy: Spy) -> Implementation:
    """Returns the right kernel with the fault that the spy holds."""

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def call(query: Tensor, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> Any:
        about = of_forward((query, key, value), keywords)
        with torch.autocast("cpu", enabled=False):
            out, lse = _Eager.apply(query, key, value, keywords, spy, about)  # type: ignore[no-untyped-call]
        return (out, lse.detach()) if keywords.get("return_lse") else out

    def attention(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Any:
        return call(query, key, value, keywords)

    return Implementation(name="combination", attention=attention, supports=SUPPORTS)


SPACE = space_of(kernel(Spy()))

# --------------------------------------------------------------------------------------------------------- drawing


def points(seed: str) -> Iterator[Case]:
    """Yields random points of the space.

    The factors are taken in random order. Each factor gets a random level of those that the levels so far allow.
    """
    space, chance = SPACE, random.Random(seed)
    while True:
        row = [OPEN] * len(FACTORS)
        order = list(range(len(FACTORS)))
        chance.shuffle(order)
        for place in order:
            options = []
            for level in range(len(space.levels[FACTORS[place].name])):
                row[place] = level
                options += [level] if space.allowed(row, place) else []
            if not options:
                break
            row[place] = chance.choice(options)
        else:
            yield space.case(tuple(row), chance.randrange(10**6))


_LIMITS = {"queries": 4096, "keys": 4096, "heads": 64, "group": 24, "batch": 4, "head dim": 248, "batch x heads": 65535}


def mutants(kind: Kind, count: int, seed: str) -> Iterator[tuple[Mutant, Case]]:
    """Yields `count` mutants of a kind, each with a point where it is wrong."""
    chance, found = random.Random(f"{kind} {seed}"), 0
    for case in points(f"{kind} {seed}"):
        beyond: tuple[str, int] | None = None
        if kind == "threshold":
            beyond = chance.choice(list(_LIMITS)), 0
            beyond = beyond[0], int(math.exp(chance.uniform(0.0, math.log(_LIMITS[beyond[0]] + 1))))
            if (
                sizes_of(case.batch, case.heads, case.kv_heads, case.queries, case.keys, case.dim)[beyond[0]]
                <= beyond[1]
            ):
                continue
        spy = Spy(watches=True)
        for _ in ways.computed(kernel(spy), case, "cpu", UNOBSERVED):
            pass  # the spy remembers the calls
        tensor = chance.choice(["out", *(["lse"] if case.lse else []), *ways.wanted(case)])
        shown, _ = chance.choice([seen for seen in spy.seen if tensor in ("out", "lse") or "backward" in seen[0]])
        if tensor in ("out", "lse"):
            shown = {name: level for name, level in shown.items() if name not in of_backward_names()}
        where = [] if kind == "threshold" else chance.sample(sorted(shown.items()), 2 if kind == "pair" else 3)
        mutant = Mutant(kind, tuple(where), beyond, tensor, chance.choice(list(FAULTS)))  # type: ignore[arg-type]
        if _rejected(mutant, case):
            yield mutant, case
            found += 1
            if found == count:
                return


def of_backward_names() -> tuple[str, ...]:
    """Returns the names of the properties that only a backward shows."""
    return (
        "layout of do",
        "address of do",
        "output gradient",
        "output gradient's size",
        "rows of do",
        "backward",
        "between",
    )


def _rejected(mutant: Mutant, case: Case) -> bool:
    """Returns whether a mutant is judged wrong at a point."""
    implementation = kernel(Spy(mutant))
    for one in ways.computed(implementation, case, "cpu", UNOBSERVED):
        names = tuple(name for name in one.answer.tensors if name in ("out", "lse", *ways.wanted(one.case)))
        claim = ways.arithmetic(implementation, one.case, "cpu")
        verdicts = judging.judge(one.answer, one.case, claim, names, one.given)
        if not all(judged.passed for judged in verdicts):
            return True
    return False


# ------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Seen:
    """A case of a check, with the properties and sizes of the calls that the check makes for it."""

    check: str
    case: Case
    calls: tuple[tuple[Shows, dict[str, int]], ...]


def seen_by(check: Check, dtype: Dtype) -> list[Seen]:
    """Returns the properties and sizes of the calls of a check, for each of its cases."""
    found = []
    for case in check.cases(kernel(Spy()), dtype, SPACE):
        spy = Spy(watches=True)
        trial.ask(check, kernel(spy), dtype, [case])
        found.append(Seen(check.name, case, tuple(spy.seen)))
    return found


def rejected_by(mutant: Mutant, log: Sequence[Seen]) -> Seen | None:
    """Returns the first case whose check rejects a mutant; None if there is none.

    Only cases with a call that meets the mutant's condition are tried, because no other case can reject it.
    """
    for one in log:
        if not any(mutant.holds(*call) for call in one.calls):
            continue
        if trial.ask(checks()[one.check], kernel(Spy(mutant)), one.case.dtype, [one.case]).verdict == "rejected":
            return one
    return None


@dataclass(frozen=True)
class Result:
    """A mutant, the point where it was drawn, and the check and the case that reject it. These are empty if none do."""

    mutant: Mutant
    point: Case
    check: str = ""
    case: str = ""


PARTS = 10  # the mutants of a kind are drawn in this many independent parts
_LOG: list[Seen] = []  # the judging processes are forks, and so inherit it


def _drawn(about: tuple[Kind, int, str]) -> list[Result]:
    if not about[1]:
        return []
    return [Result(mutant, point) for mutant, point in mutants(*about)]


def _seen(about: tuple[str, Dtype]) -> list[Seen]:
    return seen_by(checks()[about[0]], about[1])


def _judged(result: Result) -> Result:
    found = rejected_by(result.mutant, _LOG)
    return replace(result, check=found.check, case=str(found.case)) if found else result


def measured(count: int, seed: str, processes: int) -> list[Result]:
    """Draws `count` mutants of each kind. Returns what the checks of a default run say of them."""
    context = multiprocessing.get_context("fork")
    work = [(name, dtype) for name in checks() if not name.startswith("memory/") for dtype in DTYPES]
    assert SPACE.array  # computed here, before the forks, so that they share it
    parts = [
        (kind, len(range(part, count, PARTS)), f"{seed} {part}") for kind in get_args(Kind) for part in range(PARTS)
    ]
    with context.Pool(processes) as pool:
        drawn = pool.map(_drawn, parts, chunksize=1)
        print("drawn", file=sys.stderr)
        _LOG[:] = [seen for part in pool.map(_seen, work, chunksize=1) for seen in part]
        print("every case of the checks is seen", file=sys.stderr)
    with context.Pool(processes) as pool:
        return pool.map(_judged, [one for part in drawn for one in part], chunksize=2)


def _seen_in_passing(about: tuple[str, Case]) -> Seen:
    """Returns the properties and sizes of the calls of a case of the covering array, without judging the answers."""
    name, case = about
    spy = Spy(watches=True)
    for _ in ways.computed(kernel(spy), case, "cpu", UNOBSERVED):
        pass
    return Seen(name, case, tuple(spy.seen))


def measured_thoroughly(results: Sequence[Result], processes: int) -> list[Result]:
    """Judges the mutants that passed the default run by the checks on the covering array of a thorough run.

    That array has every triple of levels. Returns the results of all mutants.
    """
    space = space_of(kernel(Spy()), effort="thorough")
    of_array = [check for check in checks().values() if check.call]
    implementation = kernel(Spy())
    work = [
        (check.name, case)
        for check in of_array
        for dtype in DTYPES
        for case in check.cases(implementation, dtype, space)
    ]
    print(f"{len(work)} cases", file=sys.stderr)
    left = [one for one in results if not one.check]
    context = multiprocessing.get_context("fork")
    with context.Pool(processes) as pool:
        seen = pool.imap_unordered(_seen_in_passing, work, chunksize=50)
        _LOG[:] = [one for one in seen if any(result.mutant.holds(*call) for call in one.calls for result in left)]
    with context.Pool(processes) as pool:
        found = dict(zip(map(id, left), pool.map(_judged, left, chunksize=1), strict=True))
    return [found.get(id(one), one) for one in results]


def rows(results: Sequence[Result], run: str, suite: str) -> list[Combined]:
    """Counts how many mutants were rejected: by kind, and by each property that conditions contain."""

    def row(some: Sequence[Result], **about: str) -> Combined:
        return Combined(run=run, suite=suite, rejected=sum(bool(one.check) for one in some), tried=len(some), **about)

    found = [row([one for one in results if one.mutant.kind == kind], kind=f"{kind}s") for kind in get_args(Kind)]
    names = sorted({name for one in results for name, _ in one.mutant.where})
    found += [row([one for one in results if name in dict(one.mutant.where)], about=name) for name in names]
    return [one for one in found if one.tried]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws and judges the mutants. Prints the figures and every mutant that passes."""
    parser = argparse.ArgumentParser(
        prog="python -m flashproof.tests.suite.mutants.combinations", description="Combination mutants."
    )
    parser.add_argument("-n", "--count", type=int, default=300, help="mutants of each kind (300)")
    parser.add_argument("--seed", default="0", help="what they are drawn from (0)")
    parser.add_argument("-j", "--processes", type=int, default=1, help="1 unless given")
    parser.add_argument("-o", "--output", type=Path, metavar="RECORDS", help="where records of the figures go")
    parser.add_argument("--thorough", action="store_true", help="then the checks of a run with --thorough, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run, found = run_name(), list[Combined]()
    results = measured(options.count, options.seed, options.processes)
    found += _told(results, run, "default")
    if options.thorough:
        found += _told(measured_thoroughly(results, options.processes), run, "thorough")
    if options.output:
        command = " ".join(
            [
                "python -m flashproof.tests.suite.mutants.combinations",
                *(sys.argv[1:] if arguments is None else arguments),
            ]
        )
        append(options.output, environment(run, command=command))
        for record in found:
            append(options.output, record)
    return 0


def _told(results: Sequence[Result], run: str, suite: str) -> list[Combined]:
    """Prints the figures and every mutant that passes. Returns the figures."""
    print(f"checks: {suite}")
    for one in results:
        if not one.check:
            print(f"passes: {one.mutant}\n        drawn at {one.point}")
    found = rows(results, run, suite)
    for row in found:
        print(f"{row.kind or row.about}: {row.rejected} of {row.tried} rejected")
    return found


if __name__ == "__main__":
    sys.exit(main())
