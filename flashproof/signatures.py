"""Signatures: what a bare callable claims.

The parameters of a callable are its claim, for any kind of callable: a function, a `functools.partial`, a module, an
operator of `torch.ops`, a builtin whose docstring begins with its signature.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from flashproof import wrapping
from flashproof.impls.spec import Implementation, Supports, arithmetic_of_callables

Kind = inspect.Parameter


def of_callable(attention: object, name: str) -> Implementation:
    """A bare callable as an implementation that claims what its parameters name, in three dtypes, on both devices.

    `is_causal` claims top-left causal masks, and with `causal_alignment` also bottom-right ones. `scale` claims any
    positive scale, `enable_gqa` grouped heads, `block_mask` block masks, `dropout_p` together with `dropout_seed`
    dropout, and `return_lse` the log-sum-exp. `**kwargs` claims nothing. The assumed arithmetic is
    `arithmetic_of_callables`.

    Raises TypeError for an object that cannot be called with query, key and value alone, and for an object whose
    parameters are unknown.
    """
    if reason := _no_function(attention):
        raise TypeError(
            f"{name}: {reason}; give a function attention(query, key, value, ...) or a flashproof.Implementation"
        )
    assert callable(attention)
    parameters = _parameters(attention, name)
    keywords = _keywords(parameters, name)
    if any(p.name == "is_causal" and p.default is True for p in parameters):  # else calls without it are causal
        attention = functools.partial(attention, is_causal=False)
    causal: tuple[Any, ...] = ("top_left", "bottom_right") if "causal_alignment" in keywords else ("top_left",)
    supports = Supports(
        causal=causal if "is_causal" in keywords else (),
        scale="positive" if "scale" in keywords else "default",
        grouped_heads="enable_gqa" in keywords,
        cross_lengths=True,
        strided=True,
        unaligned=True,
        block_mask="block_mask" in keywords,
        dropout={"dropout_p", "dropout_seed"} <= keywords,
        lse="return_lse" in keywords,
    )
    return Implementation(
        name=name,
        attention=attention,
        supports=supports,
        arithmetic=arithmetic_of_callables,
        summary="A plain function, verified for what its parameters name.",
        bare=True,
    )


def parameters_of(attention: Callable[..., object]) -> list[Kind]:
    """The parameters of a callable; empty if they cannot be read."""
    with suppress(TypeError):
        return _parameters(attention, "")
    return []


def never_given(implementation: Implementation) -> list[str]:
    """The parameters of a bare callable that flashproof never passes."""
    parameters = parameters_of(implementation.attention)[3:] if implementation.bare else []
    supports, given = implementation.supports, set(wrapping.NEUTRAL)
    if not supports.dropout:
        given -= {"dropout_p", "dropout_seed"}
    if not supports.causal:
        given.discard("causal_alignment")
    nameless = (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)
    never = [p for p in parameters if p.kind not in nameless]
    return [p.name for p in never if p.name not in given or p.kind is Kind.POSITIONAL_ONLY]


def renaming(never: list[str]) -> str:
    """How to rename parameters that are never passed and have a known meaning. Empty if there are none."""
    known = [f"{name} to {wrapping.KNOWN_AS[name]}" for name in never if name in wrapping.KNOWN_AS]
    return f"; rename {' and '.join(known)} to have this verified" if known else ""


def _no_function(given: object) -> str | None:
    """Why an object is not an attention function, in words; None for an object that can be called."""
    if isinstance(given, ModuleType):
        return f"{given.__name__} is a module, not an attention function; name an attribute of it"
    if inspect.isclass(given):
        if issubclass(given, torch.autograd.Function):
            return f"{given.__name__} is a class, not an attention function; its method {given.__name__}.apply is one"
        return f"{given.__name__} is a class, not an attention function; an instance of it may be one"
    if type(given).__module__.partition(".")[0] == "triton":
        return "a Triton kernel is not an attention function; the Python function that launches it is one"
    return None if callable(given) else f"{given!r} is not an attention function"


def _keywords(parameters: list[Kind], name: str) -> set[str]:
    """The parameters that may be passed by name beside query, key and value. Raises TypeError if more is needed."""
    positional = [p for p in parameters if p.kind in (Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)]
    tensors, others = positional[:3], [p for p in parameters if p not in positional[:3]]
    if len(tensors) < 3 and any(p.kind is Kind.VAR_POSITIONAL for p in parameters):
        raise TypeError(f"{name}: takes *args, which does not say what it takes; {_saying_what(name)}")
    if len(tensors) < 3:
        raise TypeError(
            f"{name}: takes {len(tensors)} positional arguments; give a function that takes three: "
            "attention(query, key, value, ...)"
        )
    named = [p for p in others if p.kind not in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)]
    if needed := wrapping.needed(parameters):
        if tensors[0].name == "self":
            raise TypeError(f"{name}: is a method of a class; give that of an instance, or the instance")
        raise TypeError(
            f"{name}: needs {', '.join(needed)} beside query, key and value, and flashproof gives only "
            f"{', '.join(wrapping.NEUTRAL)}; {wrapping.advice(wrapping.completing(parameters, name), name)}"
        )
    return {p.name for p in named if p.kind is not Kind.POSITIONAL_ONLY}


def _saying_what(name: str) -> str:
    """Advice for a callable whose signature does not name its parameters."""
    return (
        "give a function with named parameters that calls it, or say what it takes: "
        f"{wrapping.advice(wrapping.claiming(name), name)}"
    )


def _parameters(attention: Callable[..., object], name: str) -> list[Kind]:
    """A callable's parameters. Raises TypeError if they cannot be read."""
    owner = getattr(attention, "__self__", None)
    if inspect.isclass(owner) and issubclass(owner, torch.autograd.Function):
        # `apply` takes no keywords. It takes the arguments of `forward`, without the context if `forward` has one.
        has_context = owner.setup_context is torch.autograd.Function.setup_context
        found = list(inspect.signature(owner.forward).parameters.values())[1 if has_context else 0 :]
        return [p.replace(kind=Kind.POSITIONAL_ONLY) if p.kind is Kind.POSITIONAL_OR_KEYWORD else p for p in found]
    attention = getattr(attention, "_orig_mod", attention)  # a compiled module
    attention = getattr(attention, "forward", attention)  # of nn.Module, only forward has a useful signature
    if isinstance(attention, functools.partial):
        return _of_partial(attention, name)
    schema = _schema(attention, name)
    if schema is not None:
        return _of_schema(schema, name)[isinstance(attention, torch.ScriptMethod) :]  # the first one is the module
    try:
        return list(inspect.signature(attention).parameters.values())
    except (TypeError, ValueError):
        return _of_docstring(attention, name)


def _of_partial(attention: functools.partial[object], name: str) -> list[Kind]:
    """The parameters that a partial leaves. `inspect` need not be able to read the signature of its function."""

    def stand_in() -> None:
        """Has the parameters of the partial's function."""

    stand_in.__signature__ = inspect.Signature(_parameters(attention.func, name))  # type: ignore[attr-defined]
    try:
        left = inspect.signature(functools.partial(stand_in, *attention.args, **attention.keywords))
    except ValueError as error:
        given = [*map(repr, attention.args), *(f"{keyword}=..." for keyword in attention.keywords)]
        raise TypeError(
            f"{name}: is a functools.partial of a function that does not take ({', '.join(given)}); "
            "give arguments that the function has"
        ) from error
    return list(left.parameters.values())


def _schema(attention: object, name: str) -> Any:
    """The schema of an operator or of a scripted function; None for any other callable."""
    operator: Any = getattr(attention, "_opoverload", attention)  # torch.library.custom_op
    if isinstance(operator, torch._ops.OpOverloadPacket):
        overloads = operator.overloads()  # type: ignore[no-untyped-call]
        if "default" not in overloads and len(overloads) != 1:
            raise TypeError(
                f"{name}: has the overloads {', '.join(overloads)}; give one of them, as {name}.{overloads[0]}"
            )
        operator = getattr(operator, "default" if "default" in overloads else overloads[0])
    if isinstance(operator, torch._ops.OpOverload):
        return operator._schema
    return operator.schema if isinstance(operator, torch.jit.ScriptFunction | torch.ScriptMethod) else None


def _of_schema(schema: Any, name: str) -> list[Kind]:
    if len(schema.returns) != 1:
        values = ", ".join(value.name or str(value.type) for value in schema.returns)
        raise TypeError(
            f"{name}: returns {len(schema.returns)} values ({values}), not the output alone; "
            f"{wrapping.advice(wrapping.first_of_tuple(_arguments(schema), name), name)}"
        )
    return _arguments(schema)


def _arguments(schema: Any) -> list[Kind]:
    return [
        Kind(
            argument.name,
            Kind.KEYWORD_ONLY if argument.kwarg_only else Kind.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else Kind.empty,
        )
        for argument in schema.arguments
    ]


def _of_docstring(attention: object, name: str) -> list[Kind]:
    """The parameters from the head of a docstring, as in torch's builtins: "f(a, b=0.0) -> Tensor"."""
    head = (inspect.getdoc(attention) or "").partition("\n\n")[0].partition("->")[0].strip()
    try:
        definition = ast.parse(f"def {head}: ...").body[0]
    except SyntaxError:
        definition = None
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"{name}: its parameters cannot be read; {_saying_what(name)}")
    given = definition.args

    def read(arguments: Iterable[ast.arg], defaults: Iterable[object], kind: Any) -> list[Kind]:
        pairs = zip(arguments, defaults, strict=True)
        return [Kind(a.arg, kind, default=Kind.empty if default is None else default) for a, default in pairs]

    plain = [*given.posonlyargs, *given.args]
    missing = [None] * (len(plain) - len(given.defaults))
    found = read(plain, [*missing, *given.defaults], Kind.POSITIONAL_OR_KEYWORD)
    if given.vararg:
        found.append(Kind(given.vararg.arg, Kind.VAR_POSITIONAL))
    return found + read(given.kwonlyargs, given.kw_defaults, Kind.KEYWORD_ONLY)
