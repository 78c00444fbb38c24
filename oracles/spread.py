"""The spread of the errors of a claimed arithmetic: the expected mean square error of each element.

`bounds` says whether a single error is possible. This module says whether all errors of a tensor together are too
large. The bound alone does not show that. In float32, the bound is 20 to 100 times the error of a kernel, because it
adds every rounding with the same sign. In 16 bit, the part of the bound that allows for the casts of the weights also
excuses an output that a kernel sums in 16 bit.

Independent errors add by their squares. The mean squares are:

    a rounding of x            (u x)^2 / 3: the error is uniformly distributed over its range. Where x is the exact
                               answer, half a unit in the last place of x replaces u x.
    a sum of n terms x_t       u^2 / 3 (n/2 sum x_t^2 + n/3 S^2), where S is the sum. The terms are in no order, so a
                               partial sum of t terms has the mean square t/n sum x_t^2 + (t/n)^2 S^2.
    an exponential             eps_e^2 / 3, whether it rounds or truncates
    a truncating accumulator   3 n times the mean square of a sum, because its roundings have the same sign

The model of independent roundings with mean zero is that of Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019. The
other symbols are those of `bounds`.

The model applies to inputs in general position. This means that the weights of a row differ, so that their roundings
differ too, and that no coordinate stands out, so that the terms of a sum have no order. Only the bound judges ties,
spikes, shifts and dropout.

If a kernel divides its weights by exp(lse) instead of by their sum, the errors that all weights of a row share do not
cancel. The model ignores this effect, because it is small: the scores are of order 1 here. The model grants each weight
extra roundings, as if each weight were merged from parts, and these roundings are larger than the effect. Kernels that
normalise by exp(lse) in float32 reach 0.6 of the expectation.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashproof.impls.shapes import Float
from flashproof.impls.spec import Arithmetic
from flashproof.oracles import bounds, naive
from flashproof.oracles.bounds import Claim, Units
from flashproof.oracles.naive import Attention, Rows, Slopes
from flashproof.oracles.problem import Problem


def is_modelled(problem: Problem, arithmetic: Arithmetic) -> bool:
    """Whether the model applies to this claim.

    The model requires exact products and no dropout. In float32, it excludes tensor cores, because their truncation
    would be the only visible error.
    """
    truncates = problem.query.dtype == torch.float32 and arithmetic.accumulate == "tensor_core"
    return arithmetic.products == "exact" and not problem.dropout.p and not truncates


@dataclass(frozen=True, eq=False)
class Variances:
    """The expected squares of the errors, estimated from above.

    elements: for every element of out, lse, dq, dk and dv.
    dk_sums, dv_sums: for the sums of dK and dV over all keys. Such a sum is not a sum of independent elements. The
        errors of delta and of the LSE, and a systematic error of the exponential, are common to all keys of a row.
    """

    elements: Attention
    dk_sums: Float[Tensor, "batch kv_heads dim"]
    dv_sums: Float[Tensor, "batch kv_heads dim"]


def variances(problem: Problem, arithmetic: Arithmetic) -> Variances:
    """Computes the expected squares of the errors of a claim on a problem.

    Raises ValueError if the model does not apply (`is_modelled`).
    """
    if not is_modelled(problem, arithmetic):
        raise ValueError(f"spread: {arithmetic} is not modelled for {problem.query.dtype}, or there is dropout")
    adding = _Adding(
        problem, bounds.units_of(problem, Claim(arithmetic)), truncates=arithmetic.accumulate == "tensor_core"
    )
    return Variances(adding.answer, adding.dk_sums, adding.dv_sums)


class _Adding:
    """Accumulates the variances: each block of rows writes its own elements and adds to those of the keys."""

    def __init__(self, problem: Problem, units: Units, *, truncates: bool) -> None:
        self.units = units
        self.truncates = truncates
        self.dtype = problem.query.dtype
        self.rounding = units.u_a**2 / 3.0  # one float32 operation
        self.cast = units.u_p**2 / 3.0  # the cast of P or dS to an operand of a product
        self.exponential = units.eps_e**2 / 3.0
        self.underflow = units.eta**2 / 3.0
        self.columns = problem.query.shape[2] * problem.groups  # rows summed into one element of dK or dV
        self.sixteen_bit_steps = units.sixteen_bit_steps
        self.answer = naive.empty_answer(problem)
        self.dk_sums, self.dv_sums = (
            torch.zeros_like(self.answer.dk[:, :, 0]),
            torch.zeros_like(self.answer.dv[:, :, 0]),
        )
        exact = naive.empty_answer(problem)
        for rows in naive.row_blocks(problem):
            slopes = rows.slopes()
            naive.add_rows(exact, rows, slopes)
            self._add(rows, slopes, problem.groups)
        # These errors grow with the whole sum over the queries: a systematic error of the exponential, systematic
        # errors of the partial sums, and the last rounding.
        exact.dq[exact.lse == -math.inf] = math.nan  # becomes variance 0: a row that sees no key is exactly 0
        leaning = (
            self.exponential
            + 2.0 * self.rounding
            + self._sum(self.columns, 0.0, 1.0)
            + self._sixteen_bit_sum(problem.groups, 0.0, 1.0)
        )
        for variance, gradient, factor in (
            (self.answer.dq, exact.dq, 2.0 * self.rounding),
            (self.answer.dk, exact.dk, leaning),
            (self.answer.dv, exact.dv, leaning),
        ):
            variance.add_((gradient.square() * factor + self._last(gradient)).nan_to_num(nan=0.0))
        self.dk_sums += self.answer.dk.sum(dim=2)
        self.dv_sums += self.answer.dv.sum(dim=2) + exact.dv.sum(dim=2).square() * (
            self.exponential + 2.0 * self.rounding
        )

    def _sum(self, terms: int, squares: Tensor | float, total_square: Tensor | float) -> Tensor | float:
        """The variance of a float32 sum.

        terms: the number of terms. squares: the sum of their squares. total_square: the square of their sum.
        """
        return (
            self.rounding
            * (3.0 * terms if self.truncates else 1.0)
            * (terms / 2.0 * squares + terms / 3.0 * total_square)
        )

    def _sixteen_bit_sum(self, groups: int, squares: Tensor | float, total_square: Tensor | float) -> Tensor | float:
        """The variance of a gradient that is summed tile by tile in 16 bit; 0 unless the claim says so."""
        steps = self.sixteen_bit_steps * groups
        return self.units.u_o**2 / 3.0 * (steps / 2.0 * squares + steps / 3.0 * total_square)

    def _last(self, exact: Tensor) -> Tensor:
        """The variance of the last rounding of a result."""
        return bounds.half_unit(exact, self.dtype).square() / 3.0

    def _add(self, rows: Rows, slopes: Slopes, groups: int) -> None:
        """Adds the contribution of one block of rows.

        The errors are independent, so their squares add, and the code multiplies matrices of squares. For example,
        P^2 V^2 is the sum over the keys of (P_ij V_jd)^2.
        """
        dim, keys = rows.query.shape[-1], rows.all_keys
        query_squares, key_squares, value_squares, dout_squares = (
            x.square() for x in (rows.query, rows.key, rows.value, rows.dout)
        )
        weights_squares, out_squares, delta_squares = rows.weights.square(), rows.out.square(), slopes.delta.square()
        lse_squares = rows.finite_lse.square()
        # Each step of the online softmax except the first rescales the partial sum. This adds one exponential and six
        # roundings of the partial sum.
        online_sum = keys + 6 * (self.units.tiles - 1)
        exponentials = 1.0 if self.units.tiles == 1 else 2.0

        # The relative error of a weight has these sources: the score, three multiplications, two subtractions, one
        # exponential, and a second exponential where tiles or splits are merged.
        weight = (
            self._sum(dim, rows.scale**2 * (query_squares @ key_squares.mT), rows.scores.square())
            + self.rounding * (3.0 * (rows.scores.square() + lse_squares) + 2.0 * (rows.maximum - rows.scores).square())
            + exponentials * self.exponential
        )
        moved = weights_squares * weight
        weighted_squares = weights_squares @ value_squares
        # The relative error of the row's sum.
        total = self._sum(online_sum, weights_squares.sum(dim=-1, keepdim=True), 1.0)

        # --- out: sum_j P_j theta_j (V_j - O), the two sums, the casts, the division, the last rounding
        apart = (
            moved @ value_squares
            - 2.0 * rows.out * (moved @ rows.value)
            + out_squares * moved.sum(dim=-1, keepdim=True)
        ).clamp(min=0.0)
        sums = self._sum(online_sum, weighted_squares, out_squares) + out_squares * (total + 3.0 * self.rounding)
        visible = torch.ones_like(rows.weights) if rows.visible is None else rows.visible.to(torch.float64)
        out = (
            apart
            + sums
            + self.cast * weighted_squares
            + self._last(rows.out)
            + self.underflow * (visible @ value_squares)
        )
        lse = (
            moved.sum(dim=-1, keepdim=True)
            + self.exponential
            + total
            + 3.0 * self.rounding * (lse_squares + 1.0)
            + self.units.u_l**2 / 3.0 * lse_squares
        )

        # --- delta: one error for all keys of a row. A kernel computes delta from the stored output or from
        # sum_j P_j dP_j. It is not known which error is larger, so the variance is the sum of both.
        slope_squares = slopes.slope.square()
        dweights_squares = slopes.dweights.square()
        weighted_dweights = (weights_squares * dweights_squares).sum(dim=-1, keepdim=True)
        from_output = (dout_squares * (sums + self._last(rows.out))).sum(dim=-1, keepdim=True) + (
            moved * slope_squares
        ).sum(dim=-1, keepdim=True)
        from_output = (
            from_output
            + self.cast * weighted_dweights
            + self._sum(dim, (dout_squares * out_squares).sum(dim=-1, keepdim=True), delta_squares)
        )
        from_weights = (
            self._sum(keys, weighted_dweights, delta_squares)
            + (moved * dweights_squares).sum(dim=-1, keepdim=True)
            + lse * delta_squares
        )
        delta = from_output + from_weights

        # --- dS: the errors that each element has on its own. A kernel may cast P before it casts dS. It may also
        # multiply dS by a scale below 1 before the cast, so that the cast of dS underflows earlier.
        dscores_squares = slopes.dscores.square()
        scaled_before = max(1.0, 1.0 / rows.scale**2) if rows.scale else 1.0
        own = (
            dscores_squares * (weight + 3.0 * self.rounding + 2.0 * self.cast)
            + weights_squares * self._sum(dim, dout_squares @ value_squares.mT, dweights_squares)
            + self.underflow * scaled_before * (1.0 + slope_squares) * visible
        )
        dq_squares = (slopes.dscores @ rows.key).square()
        dscores_keys = dscores_squares @ key_squares
        dq = (
            own @ key_squares
            + delta * (rows.weights @ rows.key).square()
            + (lse + self.exponential) * dq_squares
            + self._sum(keys, dscores_keys, dq_squares)
            + self._sixteen_bit_sum(1, dscores_keys, dq_squares)
        )
        dk = (
            own
            + dscores_squares * (lse + self._sum(self.columns, 1.0, 0.0) + self._sixteen_bit_sum(groups, 1.0, 0.0))
            + weights_squares * delta
        )
        of_weights = (
            weight
            + lse
            + 2.0 * self.rounding
            + self.cast
            + self._sum(self.columns, 1.0, 0.0)
            + self._sixteen_bit_sum(groups, 1.0, 0.0)
        )
        dv = weights_squares * of_weights + self.underflow * visible

        # In a row that sees no key, out is exactly 0 and lse is exactly -inf.
        rows.write(self.answer.out, rows.if_sees(out))
        rows.write(self.answer.lse, rows.if_sees(lse))
        rows.write(self.answer.dq, rows.if_sees(rows.scale**2 * dq))
        rows.add(self.answer.dk, dk, query_squares, rows.scale**2)
        rows.add(self.answer.dv, dv, dout_squares)
        every_key = torch.ones_like(rows.weights[..., :1])
        rows.add(self.dk_sums[:, :, None], every_key, delta * query_squares, rows.scale**2)
        rows.add(self.dv_sums[:, :, None], every_key, lse * dout_squares)
